//! Stand-in for lending: the borrowers and their claims are the library's.

#[path = "../../../crates/warpipe/src/lend/claims.rs"]
pub(crate) mod claims;

pub(crate) const RETURNED: u64 = 1 << 62;

pub(crate) fn word_at(word: u32) -> usize {
    word as usize * 16
}
