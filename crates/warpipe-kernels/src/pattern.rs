//! The pattern that `fill` writes and `check` compares with, and the sum that `checksum` builds.
//!
//! Both stand on one 64-bit bijection, the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast
//! splittable pseudorandom number generators", 2014):
//!
//! * Within one seed the words differ from each other for every pair of indices, so a misplaced
//!   word is wrong. The halves of a word depend on all of its index and seed, so a torn one is
//!   wrong (but for one in 2^32).
//! * Changing a single word always changes the sum, since its term is a bijection of it; the term
//!   depends on the index too, so exchanging two words changes the sum (but for one in 2^64), while
//!   the order of adding does not.
//!
//! `kernels.cu` says the same for the GPU.

const SEED_SALT: u64 = 0x5851_f42d_4c95_7f2d;
const WORD_SALT: u64 = 0xd134_2543_de82_ef95;
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

#[inline]
const fn scramble(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The part that all words of one seed share.
#[inline]
pub(crate) const fn base(seed: u64) -> u64 {
    scramble(seed ^ SEED_SALT)
}

/// The word at `index` of the seed with this [`base`].
#[inline]
pub(crate) const fn word(base: u64, index: u64) -> u64 {
    scramble(base.wrapping_add(index.wrapping_mul(GOLDEN)))
}

/// The term of `word` at `index` in the checksum.
#[inline]
pub(crate) const fn term(word: u64, index: u64) -> u64 {
    scramble((word ^ WORD_SALT).wrapping_add(index.wrapping_mul(GOLDEN)))
}

/// The word that `fill` writes at `index` (counted in words) for `seed`.
///
/// ```
/// use warpipe_kernels::pattern;
/// assert_ne!(pattern(1, 0), pattern(1, 1));
/// assert_ne!(pattern(1, 0), pattern(2, 0));
/// ```
pub const fn pattern(seed: u64, index: u64) -> u64 {
    word(base(seed), index)
}

/// The sum that `checksum` adds for `words`: independent of the order of adding, dependent on each
/// word's place.
///
/// ```
/// use warpipe_kernels::checksum_of;
/// assert_eq!(checksum_of(&[]), 0);
/// assert_ne!(checksum_of(&[1, 2]), checksum_of(&[2, 1]));
/// ```
pub fn checksum_of(words: &[u64]) -> u64 {
    words
        .iter()
        .zip(0u64..)
        .fold(0, |sum, (&word, index)| sum.wrapping_add(term(word, index)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words_of(seed: u64, count: u64) -> Vec<u64> {
        (0..count).map(|index| pattern(seed, index)).collect()
    }

    #[test]
    fn the_pattern_is_the_same_in_every_version() {
        assert_eq!(pattern(7, 42), 0xccfe_84fa_1120_fce3);
        assert_eq!(checksum_of(&words_of(7, 3)), 0x9156_f614_3a32_130e);
        // The finalizer against the first output of SplitMix64 with seed 0, a published figure.
        assert_eq!(scramble(GOLDEN), 0xe220_a839_7b1d_cdaf);
    }

    #[test]
    fn the_cuda_source_mixes_with_the_same_constants() {
        let source = include_str!("kernels.cu");
        for constant in [
            SEED_SALT,
            WORD_SALT,
            GOLDEN,
            0xbf58_476d_1ce4_e5b9,
            0x94d0_49bb_1331_11eb,
        ] {
            assert!(
                source.contains(&format!("0x{constant:x}ull")),
                "{constant:#x} is not in kernels.cu"
            );
        }
    }

    #[test]
    fn no_word_of_a_pattern_stands_at_another_index_or_seed() {
        let mut words: Vec<u64> = (0..64).flat_map(|seed| words_of(seed, 256)).collect();
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), 64 * 256);
    }

    #[test]
    fn a_word_torn_between_two_neighbouring_fills_is_wrong() {
        for index in 0..4096 {
            let (old, new) = (pattern(7, index), pattern(8, index));
            let torn = (old & 0xffff_ffff) | (new & !0xffff_ffff);
            assert!(torn != old && torn != new, "index {index}");
        }
    }

    #[test]
    fn any_flipped_bit_changes_the_checksum() {
        for place in 0..48 * 64 {
            let mut words = words_of(3, 48);
            let whole = checksum_of(&words);
            words[place / 64] ^= 1 << (place % 64);
            assert_ne!(checksum_of(&words), whole, "bit {place}");
        }
    }

    #[test]
    fn any_two_exchanged_words_change_the_checksum() {
        let words = words_of(4, 64);
        for (first, second) in
            (0..64).flat_map(|first| (0..first).map(move |second| (first, second)))
        {
            let mut exchanged = words.clone();
            exchanged.swap(first, second);
            assert_ne!(
                checksum_of(&exchanged),
                checksum_of(&words),
                "words {first} and {second}"
            );
        }
    }

    #[test]
    fn zeros_appended_change_the_checksum() {
        assert_ne!(checksum_of(&[5]), checksum_of(&[5, 0]));
    }
}
