//! The numbers that a forked child closes. **This module is marked for unsafe**: it closes by
//! number.
//!
//! Lock-free and without allocation where the child reads them. The tables are written within a
//! [`NoForkSection`](super::NoForkSection) alone, so no child sees one half written.

use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::atomic::{AtomicPtr, AtomicU64};

/// Numbers of one leaf.
const LEAF: usize = 1 << 15;

/// Leaves: the kernel's highest `RLIMIT_NOFILE` is 2^30. A leaf that is never used costs no
/// memory.
const LEAVES: usize = 1 << 15;

struct Leaf([AtomicU64; LEAF / 64]);

/// A bit for each descriptor.
pub(crate) struct OpenTable([AtomicPtr<Leaf>; LEAVES]);

pub(super) static OPEN: OpenTable = OpenTable::new();

impl OpenTable {
    pub(super) const fn new() -> OpenTable {
        OpenTable([const { AtomicPtr::new(ptr::null_mut()) }; LEAVES])
    }

    pub(crate) fn set(&self, fd: RawFd) {
        let (leaf, word, bit) = place(fd);
        let leaf = self.leaf(leaf);
        leaf.0[word].fetch_or(bit, Relaxed);
    }

    pub(super) fn clear(&self, fd: RawFd) {
        let (leaf, word, bit) = place(fd);
        // SAFETY: a leaf is never freed.
        if let Some(leaf) = unsafe { self.0[leaf].load(Acquire).as_ref() } {
            leaf.0[word].fetch_and(!bit, Relaxed);
        }
    }

    pub(super) fn has(&self, fd: RawFd) -> bool {
        let (leaf, word, bit) = place(fd);
        // SAFETY: a leaf is never freed.
        unsafe { self.0[leaf].load(Acquire).as_ref() }
            .is_some_and(|leaf| leaf.0[word].load(Relaxed) & bit != 0)
    }

    fn leaf(&self, index: usize) -> &Leaf {
        let known = self.0[index].load(Acquire);
        // SAFETY: a leaf is never freed.
        if let Some(leaf) = unsafe { known.as_ref() } {
            return leaf;
        }
        let made = Box::into_raw(Box::new(Leaf([const { AtomicU64::new(0) }; LEAF / 64])));
        match self.0[index].compare_exchange(ptr::null_mut(), made, AcqRel, Acquire) {
            // SAFETY: published just now, and never freed.
            Ok(_) => unsafe { &*made },
            Err(other) => {
                // SAFETY: made above, and nobody else knows of it.
                drop(unsafe { Box::from_raw(made) });
                // SAFETY: a leaf is never freed.
                unsafe { &*other }
            }
        }
    }

    /// In a forked child: closes every number that is set.
    pub(super) fn close_all(&self) {
        for (index, leaf) in self.0.iter().enumerate() {
            // SAFETY: a leaf is never freed.
            let Some(leaf) = (unsafe { leaf.load(Relaxed).as_ref() }) else {
                continue;
            };
            for (word, bits) in leaf.0.iter().enumerate() {
                let mut bits = bits.swap(0, Relaxed);
                while bits != 0 {
                    let number = index * LEAF + word * 64 + bits.trailing_zeros() as usize;
                    bits &= bits - 1;
                    // SAFETY: the child's copy of a descriptor of ours, which nothing in the child
                    // uses from now on (`OwnerProcess::check`).
                    unsafe { libc::close(number as RawFd) };
                }
            }
        }
    }
}

fn place(fd: RawFd) -> (usize, usize, u64) {
    let number = fd as usize;
    (
        number / LEAF % LEAVES,
        number % LEAF / 64,
        1 << (number % 64),
    )
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
    // SAFETY: `statx` is plain data, for which zeros are valid.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    let (flags, wanted) = (
        libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC,
        libc::STATX_TYPE | libc::STATX_INO,
    );
    // SAFETY: the kernel writes one `statx`, which lives across the call; a number that is not open
    // is an error.
    let code = unsafe { libc::statx(fd, c"".as_ptr(), flags, wanted, &mut stat) };
    let has_type = libc::mode_t::from(stat.stx_mode) & libc::S_IFMT != 0;
    let device = u64::from(stat.stx_dev_major) << 32 | u64::from(stat.stx_dev_minor);
    (code == 0 && has_type).then_some(FileId {
        device,
        inode: stat.stx_ino,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_every_size_have_their_own_bit() {
        let mut places: Vec<_> = [0, 3, 63, 64, 1023, 32_767, 32_768, 1 << 20, (1 << 30) - 1]
            .map(place)
            .to_vec();
        places.dedup();
        assert_eq!(places.len(), 9);
        assert!(
            places
                .iter()
                .all(|&(leaf, word, _)| leaf < LEAVES && word < LEAF / 64)
        );
    }
}
