//! Sets of descriptor numbers, one of them those that a forked child closes. **This module is
//! marked for unsafe**: it closes by number.
//!
//! A set changes within a [`NoForkSection`](super::NoForkSection) alone, so a child finds its lock
//! free; the child of a signal handler that interrupted a section may not, and closes nothing. To
//! read a set allocates nothing.

use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Mutex;

use rustix::fs::{AtFlags, StatxFlags};

use crate::mutex::LockUnpoisoned;

/// A bit for each descriptor.
pub(crate) struct FdSet(Mutex<Vec<u64>>);

pub(super) static OPEN: FdSet = FdSet::new();

impl FdSet {
    pub(super) const fn new() -> FdSet {
        FdSet(Mutex::new(Vec::new()))
    }

    pub(crate) fn insert(&self, fd: RawFd) {
        let (word, bit) = place(fd);
        let mut words = self.0.locked();
        if words.len() <= word {
            words.resize(word + 1, 0);
        }
        words[word] |= bit;
    }

    pub(super) fn remove(&self, fd: RawFd) {
        let (word, bit) = place(fd);
        let mut words = self.0.locked();
        words
            .get_mut(word)
            .into_iter()
            .for_each(|word| *word &= !bit);
    }

    /// In a forked child: whether the set has, or may have, the number.
    pub(super) fn may_have(&self, fd: RawFd) -> bool {
        let (word, bit) = place(fd);
        let words = self.0.try_lock();
        words.map_or(true, |words| {
            words.get(word).is_some_and(|word| word & bit != 0)
        })
    }

    /// In a forked child: closes every number of the set.
    pub(super) fn close_all(&self) {
        let Ok(mut words) = self.0.try_lock() else {
            return;
        };
        for (index, word) in words.iter_mut().enumerate() {
            let mut bits = std::mem::take(word);
            while bits != 0 {
                let number = index * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                // SAFETY: the child's copy of a descriptor of ours, which nothing in the child uses
                // from now on (`OwnerProcess::check`).
                unsafe { libc::close(number as RawFd) };
            }
        }
    }
}

fn place(fd: RawFd) -> (usize, u64) {
    (fd as usize / 64, 1 << (fd % 64))
}

/// The identity of a file: no other open file has the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct FileId {
    pub(super) device: u64,
    pub(super) inode: u64,
}

/// The file's identity, without a call to a file system (a peer's FUSE server could answer as late
/// as it likes); `None` for an anonymous inode, which all files of its kind share.
pub(super) fn identity(fd: RawFd) -> Option<FileId> {
    // SAFETY: a number that is not open is an error.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = rustix::fs::statx(fd, c"", flags, StatxFlags::TYPE | StatxFlags::INO).ok()?;
    let has_type = u32::from(stat.stx_mode) & libc::S_IFMT != 0;
    has_type.then_some(FileId {
        device: u64::from(stat.stx_dev_major) << 32 | u64::from(stat.stx_dev_minor),
        inode: stat.stx_ino,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_every_size_are_members_of_their_own() {
        let numbers = [0, 3, 63, 64, 1023, 32_767, 32_768, 1 << 20];
        let set = FdSet::new();
        for (index, &fd) in numbers.iter().enumerate() {
            assert!(!set.may_have(fd));
            set.insert(fd);
            assert!(numbers[..=index].iter().all(|&known| set.may_have(known)));
        }
        set.remove(64);
        assert!(!set.may_have(64) && set.may_have(63) && !set.may_have(1 << 21));
    }
}
