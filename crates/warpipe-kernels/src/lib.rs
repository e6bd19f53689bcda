//! The kernels that warpipe's demos, tests and benchmarks launch, each as PTX for a GPU and as a
//! host version.
//!
//! * `kernels.cu` is the source, `kernels.ptx` what NVRTC 12.0 made of it for `compute_70`: it runs
//!   on any driver from R525 on, and no toolkit is needed to build or use this crate.
//! * The functions of this module launch one kernel each, with a grid that suits its size. Sizes
//!   are in elements: a *word* is a `u64`, aligned to 8 bytes; a *float* is an `f32`, aligned to 4.
//! * [`ALL`] lists the kernels, for lookups by name.
//! * [`render`] draws triangles, with kernels of a module of its own.
//! * [`ring`] has kernels on both sides of kernel rings.
//! * [`pattern`] and [`checksum_of`] say on the CPU what the kernels write and sum.
//!
//! Both sides of a kernel give the same bits, with one exception: the sign and payload of a NaN.
//!
//! ```
//! use warpipe::KernelLaunch;
//! let mut words = [0u64; 100];
//! let args = [words.as_mut_ptr() as u64, 100, 7];
//! // SAFETY: the arguments are what `fill` takes, and name 100 words of this function's own.
//! unsafe { (warpipe_kernels::FILL.host)(KernelLaunch { grid: 1, block: 256, args: &args }) };
//! assert_eq!(words[42], warpipe_kernels::pattern(7, 42));
//! ```
#![deny(missing_docs)]

mod host;
mod pattern;
pub mod render;
pub mod ring;

pub use pattern::{checksum_of, pattern};

use std::ffi::CStr;
use std::time::Duration;

use warpipe::{Device, DevicePtr, Kernel, Result, Stream};

/// The longest that [`spin`], [`slow_fill`] and [`pass_on`] wait; what is asked for beyond it is
/// cut.
pub const WAIT_MAX: Duration = Duration::from_secs(10);

const TEXT: &str = concat!(include_str!("kernels.ptx"), "\0");

/// The module of all kernels here, as NVRTC wrote it. A static, so that it has one address.
static MODULE: &CStr = match CStr::from_bytes_with_nul(TEXT.as_bytes()) {
    Ok(text) => text,
    Err(_) => panic!("kernels.ptx holds a NUL byte; run `cargo xtask ptx`"),
};

/// `fill(words, count, seed)`; see [`fill()`].
pub static FILL: Kernel = Kernel::new(c"fill", MODULE, host::fill);
/// `check(words, count, seed, errors)`; see [`check()`].
pub static CHECK: Kernel = Kernel::new(c"check", MODULE, host::check);
/// `checksum(words, count, sum)`; see [`checksum()`].
pub static CHECKSUM: Kernel = Kernel::new(c"checksum", MODULE, host::checksum);
/// `scale(out, in, count, factor_bits)`; see [`scale()`].
pub static SCALE: Kernel = Kernel::new(c"scale", MODULE, host::scale);
/// `add(out, in, count, addend_bits)`; see [`add()`].
pub static ADD: Kernel = Kernel::new(c"add", MODULE, host::add);
/// `square_root(out, in, count)`; see [`square_root()`].
pub static SQUARE_ROOT: Kernel = Kernel::new(c"square_root", MODULE, host::square_root);
/// `spin(nanoseconds)`; see [`spin()`].
pub static SPIN: Kernel = Kernel::new(c"spin", MODULE, host::spin);
/// `slow_fill(words, count, seed, nanoseconds)`; see [`slow_fill()`].
pub static SLOW_FILL: Kernel = Kernel::new(c"slow_fill", MODULE, host::slow_fill);
/// `touch(words, count)`; see [`touch()`].
pub static TOUCH: Kernel = Kernel::new(c"touch", MODULE, host::touch);
/// `pass_on(flag, due, next, nanoseconds)`; see [`pass_on()`].
pub static PASS_ON: Kernel = Kernel::new(c"pass_on", MODULE, host::pass_on);
/// `dense(out, in, weights, bias, rows, inputs, outputs, relu)`; see [`dense()`].
pub static DENSE: Kernel = Kernel::new(c"dense", MODULE, host::dense);

/// Every kernel of this module; those that draw are in [`render::ALL`], those on rings in
/// [`ring::ALL`].
pub static ALL: &[Kernel] = &[
    FILL,
    CHECK,
    CHECKSUM,
    SCALE,
    ADD,
    SQUARE_ROOT,
    SPIN,
    SLOW_FILL,
    TOUCH,
    PASS_ON,
    DENSE,
];

/// Threads a block, a multiple of the warp's 32 as the kernels ask.
const BLOCK: u32 = 256;
/// Elements a thread should have before a launch takes one more block.
const PER_THREAD: u64 = 4;
/// Blocks that fill the largest GPU in use: an H200 has 132 multiprocessors and keeps 8 blocks of
/// 256 threads on each.
const GRID_MAX: u32 = 132 * 8;

/// Blocks for `count` elements: one for few, and never more than run at once, since the kernels
/// stride.
fn grid_for(count: u64) -> u32 {
    let blocks = count
        .div_ceil(u64::from(BLOCK) * PER_THREAD)
        .clamp(1, u64::from(GRID_MAX));
    u32::try_from(blocks).unwrap_or(GRID_MAX)
}

/// Loads the kernels onto `device` now (`cuModuleLoadData`), so that no later launch loads them
/// behind a stream that waits.
///
/// # Errors
/// [`warpipe::Error::Driver`].
pub fn preload(device: &Device) -> Result<()> {
    ALL.iter()
        .chain(ring::ALL)
        .try_for_each(|kernel| device.backend().preload(kernel))
}

/// `cuLaunchKernel` of `fill`: word `i` becomes [`pattern`]`(seed, i)`.
///
/// # Errors
/// [`warpipe::Error::Driver`].
///
/// # Safety
/// `words` names `count` words that are writable, and written by nothing else, until the kernel is
/// done.
pub unsafe fn fill(stream: &Stream, words: DevicePtr, count: u64, seed: u64) -> Result<()> {
    // SAFETY: the arguments are what the kernel takes; the memory is the caller's promise.
    unsafe { stream.launch(&FILL, grid_for(count), BLOCK, &[words, count, seed]) }
}

/// `cuLaunchKernel` of `check`: adds to the word `errors` how many words differ from
/// [`pattern`]`(seed, i)`.
///
/// The addition is atomic for the whole system, so the counter may lie in registered host memory or
/// a peer's region. It is not set to zero first.
///
/// # Errors
/// [`warpipe::Error::Driver`].
///
/// # Safety
/// Until the kernel is done, `words` names `count` readable words and `errors` one word that is
/// writable and written only atomically.
pub unsafe fn check(
    stream: &Stream,
    words: DevicePtr,
    count: u64,
    seed: u64,
    errors: DevicePtr,
) -> Result<()> {
    // SAFETY: the arguments are what the kernel takes; the memory is the caller's promise.
    unsafe {
        stream.launch(
            &CHECK,
            grid_for(count),
            BLOCK,
            &[words, count, seed, errors],
        )
    }
}

/// `cuLaunchKernel` of `checksum`: adds [`checksum_of`] the words to the word `sum`, wrapping.
///
/// The addition is atomic for the whole system. The sum is not set to zero first.
///
/// # Errors
/// [`warpipe::Error::Driver`].
///
/// # Safety
/// Until the kernel is done, `words` names `count` readable words and `sum` one word that is
/// writable and written only atomically.
pub unsafe fn checksum(
    stream: &Stream,
    words: DevicePtr,
    count: u64,
    sum: DevicePtr,
) -> Result<()> {
    // SAFETY: the arguments are what the kernel takes; the memory is the caller's promise.
    unsafe { stream.launch(&CHECKSUM, grid_for(count), BLOCK, &[words, count, sum]) }
}

/// `cuLaunchKernel` of `scale`: float `i` of `out` becomes `factor` times float `i` of `input`,
/// rounded to nearest.
///
/// # Errors
/// [`warpipe::Error::Driver`].
///
/// # Safety
/// Until the kernel is done, `input` names `count` readable floats and `out` as many that are
/// writable and written by nothing else; the two are the same range or do not overlap.
pub unsafe fn scale(
    stream: &Stream,
    out: DevicePtr,
    input: DevicePtr,
    count: u64,
    factor: f32,
) -> Result<()> {
    // SAFETY: the arguments are what the kernel takes; the memory is the caller's promise.
    unsafe {
        stream.launch(
            &SCALE,
            grid_for(count),
            BLOCK,
            &[out, input, count, u64::from(factor.to_bits())],
        )
    }
}

/// `cuLaunchKernel` of `add`: float `i` of `out` becomes float `i` of `input` plus `addend`,
/// rounded to nearest.
///
/// # Errors
/// [`warpipe::Error::Driver`].
///
/// # Safety
/// As for [`scale()`].
pub unsafe fn add(
    stream: &Stream,
    out: DevicePtr,
    input: DevicePtr,
    count: u64,
    addend: f32,
) -> Result<()> {
    // SAFETY: the arguments are what the kernel takes; the memory is the caller's promise.
    unsafe {
        stream.launch(
            &ADD,
            grid_for(count),
            BLOCK,
            &[out, input, count, u64::from(addend.to_bits())],
        )
    }
}

/// `cuLaunchKernel` of `square_root`: float `i` of `out` becomes the root of float `i` of `input`,
/// rounded to nearest (PTX `sqrt.rn`), so that a CPU gives the same bits.
///
/// # Errors
/// [`warpipe::Error::Driver`].
///
/// # Safety
/// As for [`scale()`].
pub unsafe fn square_root(
    stream: &Stream,
    out: DevicePtr,
    input: DevicePtr,
    count: u64,
) -> Result<()> {
    // SAFETY: the arguments are what the kernel takes; the memory is the caller's promise.
    unsafe { stream.launch(&SQUARE_ROOT, grid_for(count), BLOCK, &[out, input, count]) }
}

/// `cuLaunchKernel` of `spin`: keeps the stream busy for about `duration`, at most [`WAIT_MAX`].
///
/// # Errors
/// [`warpipe::Error::Driver`].
pub fn spin(stream: &Stream, duration: Duration) -> Result<()> {
    // SAFETY: the argument is what the kernel takes, and it uses no memory.
    unsafe { stream.launch(&SPIN, 1, 32, &[nanoseconds(duration)]) }
}

/// `cuLaunchKernel` of `slow_fill`: waits for about `delay`, at most [`WAIT_MAX`], and then does
/// what [`fill()`] does, so that a reader that does not wait finds wrong words.
///
/// # Errors
/// [`warpipe::Error::Driver`].
///
/// # Safety
/// As for [`fill()`].
pub unsafe fn slow_fill(
    stream: &Stream,
    words: DevicePtr,
    count: u64,
    seed: u64,
    delay: Duration,
) -> Result<()> {
    let args = [words, count, seed, nanoseconds(delay)];
    // SAFETY: the arguments are what the kernel takes; the memory is the caller's promise.
    unsafe { stream.launch(&SLOW_FILL, grid_for(count), BLOCK, &args) }
}

/// `cuLaunchKernel` of `touch`: adds one to each word, wrapping.
///
/// # Errors
/// [`warpipe::Error::Driver`].
///
/// # Safety
/// `words` names `count` words that are writable, and used by nothing else, until the kernel is
/// done.
pub unsafe fn touch(stream: &Stream, words: DevicePtr, count: u64) -> Result<()> {
    // SAFETY: the arguments are what the kernel takes; the memory is the caller's promise.
    unsafe { stream.launch(&TOUCH, grid_for(count), BLOCK, &[words, count]) }
}

/// `cuLaunchKernel` of `pass_on`: spins until the word `flag` is at least `due`, at most for
/// `limit` (at most [`WAIT_MAX`]), and then stores `next` there. A kernel that times out stores
/// nothing.
///
/// This is how two processes take turns by kernels alone: what a semaphore is measured against.
///
/// # Errors
/// [`warpipe::Error::Driver`].
///
/// # Safety
/// `flag` names one word that is writable until the kernel is done, and used only atomically.
pub unsafe fn pass_on(
    stream: &Stream,
    flag: DevicePtr,
    due: u64,
    next: u64,
    limit: Duration,
) -> Result<()> {
    // SAFETY: the arguments are what the kernel takes; the memory is the caller's promise.
    unsafe { stream.launch(&PASS_ON, 1, 32, &[flag, due, next, nanoseconds(limit)]) }
}

/// A fully connected layer of a network: device addresses, and how much there is.
#[derive(Debug, Clone, Copy)]
pub struct Layer {
    /// `inputs` rows of `outputs` floats: what each input adds to each output.
    pub weights: DevicePtr,
    /// `outputs` floats, that the outputs begin with.
    pub bias: DevicePtr,
    /// Floats in a row that goes in.
    pub inputs: u64,
    /// Floats in a row that comes out.
    pub outputs: u64,
    /// Whether what would be below zero comes out as zero.
    pub relu: bool,
}

/// `cuLaunchKernel` of `dense`: each of `rows` rows of `input` goes through `layer`, and comes out
/// as a row of `out`.
///
/// An output is its bias and then, input by input, the product added with one rounding (PTX
/// `fma.rn`), so that a CPU gives the same bits.
///
/// # Errors
/// [`warpipe::Error::Driver`].
///
/// # Safety
/// Until the kernel is done, `input` names `rows * layer.inputs` readable floats, the layer's
/// addresses as many as it says, and `out` names `rows * layer.outputs` floats that are writable,
/// used by nothing else, and apart from the rest.
pub unsafe fn dense(
    stream: &Stream,
    out: DevicePtr,
    input: DevicePtr,
    rows: u64,
    layer: &Layer,
) -> Result<()> {
    let Layer {
        weights,
        bias,
        inputs,
        outputs,
        relu,
    } = *layer;
    // Every output is a sum over all inputs: no thread should have more than one.
    let grid = grid_for(rows.saturating_mul(outputs).saturating_mul(PER_THREAD));
    let args = [
        out,
        input,
        weights,
        bias,
        rows,
        inputs,
        outputs,
        u64::from(relu),
    ];
    // SAFETY: the arguments are what the kernel takes; the memory is the caller's promise.
    unsafe { stream.launch(&DENSE, grid, BLOCK, &args) }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.min(WAIT_MAX).as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many parameters the entry `name` has in the PTX, and whether all are 64 bits wide.
    fn parameters(name: &str) -> Option<(usize, bool)> {
        let (_, after) = TEXT.split_once(&format!(".visible .entry {name}("))?;
        let (list, _) = after.split_once(')')?;
        let parameters: Vec<&str> = list
            .lines()
            .filter(|line| line.contains(".param"))
            .collect();
        Some((
            parameters.len(),
            parameters.iter().all(|line| line.contains(".param .u64")),
        ))
    }

    #[test]
    fn every_kernel_is_an_entry_of_the_committed_ptx_with_parameters_of_64_bits() {
        for kernel in ALL {
            let name = kernel.name.to_str().expect("a kernel's name is ASCII");
            let (count, wide) =
                parameters(name).unwrap_or_else(|| panic!("no entry {name} in kernels.ptx"));
            assert!(
                count > 0 && wide,
                "{name} has {count} parameters, all 64 bits wide: {wide}"
            );
        }
        assert_eq!(TEXT.matches(".visible .entry").count(), ALL.len());
    }

    #[test]
    fn all_kernels_share_one_module_so_that_it_is_loaded_once() {
        assert!(ALL.iter().all(|kernel| std::ptr::eq(kernel.ptx, MODULE)));
    }

    #[test]
    fn a_grid_is_one_block_for_few_elements_and_bounded_for_many() {
        assert_eq!([0, 1, 1024].map(grid_for), [1, 1, 1]);
        assert_eq!(grid_for(1025), 2);
        assert_eq!(grid_for(u64::MAX), GRID_MAX);
    }

    #[test]
    fn a_wait_beyond_the_limit_is_cut_to_it() {
        assert_eq!(nanoseconds(Duration::MAX), 10_000_000_000);
        assert_eq!(nanoseconds(Duration::from_micros(3)), 3_000);
    }
}
