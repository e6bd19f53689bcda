//! The host versions: each does the work of its kernel's whole grid, and gives the same bits.
//!
//! They work on raw pointers, one element at a time, because the memory may be shared with other
//! processes (and a test may well read it too early on purpose), so that no reference to it would
//! be sound.

use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use warpipe::KernelLaunch;

use crate::WAIT_MAX;
use crate::pattern::{base, term, word};

/// The arguments, exactly as many as the kernel takes. Another number is a mistake of the launching
/// code, which the host versions' safety contract excludes; stopping is better than reading what is not
/// there.
pub(crate) fn arguments<const N: usize>(launch: &KernelLaunch<'_>) -> [u64; N] {
    match launch.args.try_into() {
        Ok(arguments) => arguments,
        Err(_) => panic!(
            "a kernel of {N} arguments was launched with {}",
            launch.args.len()
        ),
    }
}

/// # Safety
/// `address` names `count` readable elements of type `T`, aligned.
unsafe fn read<T: Copy>(address: u64, count: u64) -> impl Iterator<Item = T> {
    let start: *const T = with_exposed_provenance(address as usize);
    // SAFETY: each index is below `count`, for which the caller vouches.
    (0..count as usize).map(move |index| unsafe { start.add(index).read() })
}

/// # Safety
/// `address` names `count` writable elements of type `T`, aligned.
unsafe fn write<T: Copy>(address: u64, count: u64, value_at: impl Fn(u64) -> T) {
    let start: *mut T = with_exposed_provenance_mut(address as usize);
    for index in 0..count {
        // SAFETY: the index is below `count`, for which the caller vouches.
        unsafe { start.add(index as usize).write(value_at(index)) };
    }
}

/// # Safety
/// `address` names one writable word, aligned to 8 bytes, that is written only atomically.
unsafe fn add_to_word(address: u64, amount: u64) {
    if amount != 0 {
        // SAFETY: the caller vouches for the word; the reference lives for this call only.
        let total = unsafe { AtomicU64::from_ptr(with_exposed_provenance_mut(address as usize)) };
        total.fetch_add(amount, Ordering::AcqRel);
    }
}

fn wait_for(nanoseconds: u64) {
    thread::sleep(Duration::from_nanos(nanoseconds).min(WAIT_MAX));
}

/// # Safety
/// As for the kernel `fill`: the arguments are its own, and the memory they name is valid.
pub(crate) unsafe fn fill(launch: KernelLaunch<'_>) {
    let [words, count, seed] = arguments(&launch);
    let base = base(seed);
    // SAFETY: `words` names `count` writable words, as the caller promises.
    unsafe { write(words, count, |index| word(base, index)) };
}

/// # Safety
/// As for the kernel `check`: the arguments are its own, and the memory they name is valid.
pub(crate) unsafe fn check(launch: KernelLaunch<'_>) {
    let [words, count, seed, errors] = arguments(&launch);
    let base = base(seed);
    // SAFETY: `words` names `count` readable words, as the caller promises.
    let found = unsafe { read::<u64>(words, count) };
    let wrong = found
        .zip(0u64..)
        .map(|(found, index)| u64::from(found != word(base, index)))
        .sum();
    // SAFETY: `errors` names one word, as the caller promises.
    unsafe { add_to_word(errors, wrong) };
}

/// # Safety
/// As for the kernel `checksum`: the arguments are its own, and the memory they name is valid.
pub(crate) unsafe fn checksum(launch: KernelLaunch<'_>) {
    let [words, count, sum] = arguments(&launch);
    // SAFETY: `words` names `count` readable words, as the caller promises.
    let found = unsafe { read::<u64>(words, count) };
    let part = found.zip(0u64..).fold(0u64, |part, (word, index)| {
        part.wrapping_add(term(word, index))
    });
    // SAFETY: `sum` names one word, as the caller promises.
    unsafe { add_to_word(sum, part) };
}

/// # Safety
/// As for the kernel `scale`: the arguments are its own, and the memory they name is valid.
pub(crate) unsafe fn scale(launch: KernelLaunch<'_>) {
    let [out, input, count, factor_bits] = arguments(&launch);
    let factor = f32::from_bits(factor_bits as u32);
    // SAFETY: both ranges hold `count` floats and are equal or apart, as the caller promises.
    unsafe { map_floats(out, input, count, |value| value * factor) };
}

/// # Safety
/// As for the kernel `add`: the arguments are its own, and the memory they name is valid.
pub(crate) unsafe fn add(launch: KernelLaunch<'_>) {
    let [out, input, count, addend_bits] = arguments(&launch);
    let addend = f32::from_bits(addend_bits as u32);
    // SAFETY: both ranges hold `count` floats and are equal or apart, as the caller promises.
    unsafe { map_floats(out, input, count, |value| value + addend) };
}

/// # Safety
/// As for the kernel `square_root`: the arguments are its own, and the memory they name is valid.
pub(crate) unsafe fn square_root(launch: KernelLaunch<'_>) {
    let [out, input, count] = arguments(&launch);
    // SAFETY: both ranges hold `count` floats and are equal or apart, as the caller promises.
    unsafe { map_floats(out, input, count, f32::sqrt) };
}

/// # Safety
/// `input` names `count` readable floats, `out` as many writable ones; they are the same range or
/// do not overlap.
unsafe fn map_floats(out: u64, input: u64, count: u64, function: impl Fn(f32) -> f32) {
    let start: *const f32 = with_exposed_provenance(input as usize);
    // SAFETY: the caller vouches for both ranges, and `write` stays below `count`; where the ranges
    // are the same, each element is read before it is written.
    unsafe {
        write(out, count, |index| {
            function(start.add(index as usize).read())
        })
    };
}

/// # Safety
/// As for the kernel `spin`: the argument is its own. It uses no memory.
pub(crate) unsafe fn spin(launch: KernelLaunch<'_>) {
    let [nanoseconds] = arguments(&launch);
    wait_for(nanoseconds);
}

/// # Safety
/// As for the kernel `slow_fill`: the arguments are its own, and the memory they name is valid.
pub(crate) unsafe fn slow_fill(launch: KernelLaunch<'_>) {
    let [words, count, seed, nanoseconds] = arguments(&launch);
    wait_for(nanoseconds);
    let base = base(seed);
    // SAFETY: `words` names `count` writable words, as the caller promises.
    unsafe { write(words, count, |index| word(base, index)) };
}

/// # Safety
/// As for the kernel `touch`: the arguments are its own, and the memory they name is valid.
pub(crate) unsafe fn touch(launch: KernelLaunch<'_>) {
    let [words, count] = arguments(&launch);
    let start: *const u64 = with_exposed_provenance(words as usize);
    // SAFETY: `words` names `count` words that nothing else uses, as the caller promises.
    unsafe {
        write(words, count, |index| {
            start.add(index as usize).read().wrapping_add(1)
        })
    };
}

/// # Safety
/// As for the kernel `pass_on`: the arguments are its own, and the memory they name is valid.
pub(crate) unsafe fn pass_on(launch: KernelLaunch<'_>) {
    let [flag, due, next, nanoseconds] = arguments(&launch);
    // SAFETY: `flag` names one word that is used only atomically, as the caller promises; the
    // reference lives for this call only.
    let flag = unsafe { AtomicU64::from_ptr(with_exposed_provenance_mut(flag as usize)) };
    let (start, limit) = (
        Instant::now(),
        Duration::from_nanos(nanoseconds).min(WAIT_MAX),
    );
    while flag.load(Ordering::Acquire) < due {
        if start.elapsed() >= limit {
            return;
        }
        // Beside another process's host version on few CPUs, spinning alone would keep it from its turn.
        thread::yield_now();
    }
    flag.store(next, Ordering::Release);
}

/// # Safety
/// As for the kernel `dense`: the arguments are its own, and the memory they name is valid.
pub(crate) unsafe fn dense(launch: KernelLaunch<'_>) {
    let [out, input, weights, bias, rows, inputs, outputs, relu] = arguments(&launch);
    let [input, weights, bias] =
        [input, weights, bias].map(|at| with_exposed_provenance::<f32>(at as usize));
    let output_at = |index: u64| {
        let (row, column) = (index / outputs, index % outputs);
        // SAFETY: the column is below `outputs`, of which `bias` names as many, as the caller
        // promises.
        let bias = unsafe { bias.add(column as usize).read() };
        let sum = (0..inputs).fold(bias, |sum, k| {
            // SAFETY: the row is below `rows` and `k` below `inputs`; the caller vouches for their
            // products.
            let (value, weight) = unsafe {
                (
                    input.add((row * inputs + k) as usize).read(),
                    weights.add((k * outputs + column) as usize).read(),
                )
            };
            value.mul_add(weight, sum)
        });
        if relu != 0 && sum < 0.0 { 0.0 } else { sum }
    };
    // SAFETY: `out` names `rows * outputs` writable floats, as the caller promises.
    unsafe { write(out, rows * outputs, output_at) };
}

#[cfg(test)]
mod tests {
    use fastrand::Rng;

    use super::*;
    use crate::{ALL, checksum_of, pattern};

    fn run(name: &str, args: &[u64]) {
        let kernel = ALL
            .iter()
            .find(|kernel| kernel.name.to_str() == Ok(name))
            .expect("the kernel is listed");
        // SAFETY: every test here passes the kernel's own arguments, over memory that it owns.
        unsafe {
            (kernel.host)(KernelLaunch {
                grid: 1,
                block: 256,
                args,
            })
        };
    }

    fn address<T>(values: &mut [T]) -> u64 {
        values.as_mut_ptr().expose_provenance() as u64
    }

    fn filled(count: usize, seed: u64) -> Vec<u64> {
        let mut words = vec![0; count];
        run("fill", &[address(&mut words), count as u64, seed]);
        words
    }

    fn errors_in(words: &mut [u64], seed: u64) -> u64 {
        let mut errors = [0u64];
        run(
            "check",
            &[
                address(words),
                words.len() as u64,
                seed,
                address(&mut errors),
            ],
        );
        errors[0]
    }

    fn sum_of(words: &mut [u64]) -> u64 {
        let mut sum = [0u64];
        run(
            "checksum",
            &[address(words), words.len() as u64, address(&mut sum)],
        );
        sum[0]
    }

    #[test]
    fn fill_writes_the_pattern_and_nothing_beyond_its_count() {
        let mut cases = Rng::with_seed(1);
        for _ in 0..50 {
            let (count, seed) = (cases.usize(..3000), cases.u64(..));
            let mut words = vec![0u64; count + 2];
            run("fill", &[address(&mut words[1..]), count as u64, seed]);
            assert_eq!((words[0], words[count + 1]), (0, 0));
            assert!((0..count).all(|index| words[index + 1] == pattern(seed, index as u64)));
        }
    }

    #[test]
    fn check_counts_exactly_the_damaged_words() {
        let mut cases = Rng::with_seed(2);
        for _ in 0..50 {
            let (count, seed) = (1 + cases.usize(..3000), cases.u64(..));
            let mut words = filled(count, seed);
            assert_eq!(errors_in(&mut words, seed), 0);
            let damaged: std::collections::BTreeSet<usize> =
                (0..10).map(|_| cases.usize(..count)).collect();
            damaged
                .iter()
                .for_each(|&index| words[index] ^= 1 << cases.usize(..64));
            assert_eq!(errors_in(&mut words, seed), damaged.len() as u64);
        }
    }

    #[test]
    fn check_finds_words_of_another_seed_and_words_that_moved_by_one() {
        let mut words = filled(1000, 5);
        assert_eq!(errors_in(&mut words, 6), 1000);
        words.rotate_left(1);
        assert_eq!(errors_in(&mut words, 5), 1000);
    }

    #[test]
    fn check_and_checksum_add_to_what_is_there() {
        let mut words = [0u64; 4];
        let mut total = [u64::MAX];
        run("check", &[address(&mut words), 4, 1, address(&mut total)]);
        assert_eq!(total[0], 3);
        run("checksum", &[address(&mut words), 4, address(&mut total)]);
        assert_eq!(total[0], checksum_of(&words).wrapping_add(3));
    }

    #[test]
    fn the_checksum_host_version_agrees_with_the_pure_function_and_sees_damage() {
        let mut cases = Rng::with_seed(3);
        for _ in 0..50 {
            let mut words: Vec<u64> = (0..2 + cases.usize(..2000))
                .map(|_| cases.u64(..))
                .collect();
            let whole = sum_of(&mut words);
            assert_eq!(whole, checksum_of(&words));
            let last = words.len() - 1;
            words.swap(0, last);
            assert_ne!(sum_of(&mut words), whole);
        }
    }

    #[test]
    fn scale_add_and_square_root_round_once_also_in_place() {
        let mut cases = Rng::with_seed(4);
        let input: Vec<f32> = (0..1000)
            .map(|_| f32::from_bits(cases.u64(..) as u32 & 0x7f00_ffff))
            .collect();
        let (mut values, mut out) = (input.clone(), vec![0f32; 1000]);
        let factor = 0.3f32;
        run(
            "scale",
            &[
                address(&mut out),
                address(&mut values),
                1000,
                u64::from(factor.to_bits()),
            ],
        );
        assert!(
            out.iter()
                .zip(&input)
                .all(|(out, value)| out.to_bits() == (value * factor).to_bits())
        );
        let addend = 1e-3f32;
        run(
            "add",
            &[
                address(&mut out),
                address(&mut values),
                1000,
                u64::from(addend.to_bits()),
            ],
        );
        assert!(
            out.iter()
                .zip(&input)
                .all(|(out, value)| out.to_bits() == (value + addend).to_bits())
        );
        let place = address(&mut out);
        run("add", &[place, place, 999, u64::from(1f32.to_bits())]);
        assert!(
            out.iter()
                .zip(&input)
                .take(999)
                .all(|(out, value)| out.to_bits() == (value + addend + 1.0).to_bits())
        );
        assert_eq!(out[999].to_bits(), (input[999] + addend).to_bits());
        let place = address(&mut values);
        run("square_root", &[place, place, 1000]);
        // The root in double precision, rounded to single, is the exactly rounded one.
        let exact = |value: f32| (f64::from(value).sqrt() as f32).to_bits();
        assert!(
            values
                .iter()
                .zip(&input)
                .all(|(root, &value)| root.to_bits() == exact(value))
        );
    }

    #[test]
    fn slow_fill_fills_and_touch_adds_one_with_wrapping() {
        let mut words = vec![0u64; 100];
        run("slow_fill", &[address(&mut words), 100, 9, 1000]);
        assert_eq!(errors_in(&mut words, 9), 0);
        words[0] = u64::MAX;
        run("touch", &[address(&mut words), 99]);
        assert_eq!(
            (words[0], words[98], words[99]),
            (0, pattern(9, 98).wrapping_add(1), pattern(9, 99))
        );
    }

    #[test]
    fn pass_on_stores_when_its_turn_has_come_and_gives_up_when_it_does_not() {
        let mut flag = [2u64];
        let place = address(&mut flag);
        run("pass_on", &[place, 3, 9, 1000]);
        assert_eq!(flag[0], 2);
        run("pass_on", &[place, 2, 3, 1000]);
        assert_eq!(flag[0], 3);
    }

    #[test]
    fn dense_adds_each_input_by_its_weight_to_the_bias_of_each_output() {
        // Two rows of two inputs, three outputs; small whole numbers, so that every sum is exact.
        let (mut input, mut bias) = ([1f32, 2.0, -3.0, 4.0], [10f32, -20.0, 0.0]);
        let mut weights = [1f32, 2.0, 3.0, 4.0, 5.0, 6.0];
        let places = [
            address(&mut input),
            address(&mut weights),
            address(&mut bias),
        ];
        let through = |relu: u64| {
            let mut out = [7f32; 8];
            let [input, weights, bias] = places;
            run(
                "dense",
                &[address(&mut out[1..]), input, weights, bias, 2, 2, 3, relu],
            );
            out
        };
        assert_eq!(through(0), [7.0, 19.0, -8.0, 15.0, 23.0, -6.0, 15.0, 7.0]);
        assert_eq!(through(1), [7.0, 19.0, 0.0, 15.0, 23.0, 0.0, 15.0, 7.0]);
    }

    #[test]
    fn dense_rounds_once_for_each_input() {
        // The product of two floats is exact in double precision; here the sum with the bias is,
        // too.
        let (above, below) = (1.0 + f32::EPSILON, 1.0 - f32::EPSILON);
        let (mut input, mut weights, mut bias, mut out) = ([above], [below], [-1f32], [0f32]);
        let places = [
            address(&mut out),
            address(&mut input),
            address(&mut weights),
            address(&mut bias),
        ];
        run("dense", &[&places[..], &[1, 1, 1, 0]].concat());
        let exact = (f64::from(above) * f64::from(below) - 1.0) as f32;
        assert!(
            exact != 0.0 && above * below - 1.0 != exact,
            "two roundings would be seen"
        );
        assert_eq!(out, [exact]);
    }

    #[test]
    fn no_memory_is_used_for_a_count_of_zero() {
        let mut counter = [0u64];
        let place = address(&mut counter);
        run("fill", &[0, 0, 1]);
        run("check", &[0, 0, 1, place]);
        run("checksum", &[0, 0, place]);
        run("scale", &[0, 0, 0, 0]);
        run("add", &[0, 0, 0, 0]);
        run("touch", &[0, 0]);
        run("dense", &[0, 0, 0, 0, 0, 5, 5, 0]);
        run("dense", &[0, 0, 0, 0, 5, 5, 0, 0]);
        assert_eq!(counter[0], 0);
    }

    #[test]
    #[should_panic(expected = "a kernel of 2 arguments was launched with 1")]
    fn a_wrong_number_of_arguments_stops_the_host_version_before_it_touches_memory() {
        run("touch", &[0]);
    }
}
