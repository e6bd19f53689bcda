//! Sealed memfds as device memory. **This module is marked for unsafe**: it maps and unmaps.

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::os::set_length;

/// The seals that make a size final: without them a peer could shrink the file and turn this
/// process's loads into SIGBUS.
pub(super) const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// `f_type` of the file system of memfds. A fault in one of its pages allocates ordinary memory. A
/// fault in hugetlbfs takes a page of a pool that may be empty, and then it is SIGBUS.
const TMPFS_MAGIC: rustix::fs::FsWord = libc::TMPFS_MAGIC as rustix::fs::FsWord;

pub(super) fn create_memfd(name: &CStr) -> rustix::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    rustix::fs::memfd_create(name, flags)
}

/// `memfd_create`, `ftruncate`, and the seals: memory that no forked child keeps.
pub(crate) fn sealed_memfd(name: &CStr, bytes: u64, seals: SealFlags) -> Result<CloseOnForkFd> {
    sealed(CloseOnForkFd::open(|| create_memfd(name)), bytes, seals)
}

pub(super) fn sealed<F: AsFd>(
    made: rustix::io::Result<F>,
    bytes: u64,
    seals: SealFlags,
) -> Result<F> {
    let failed = |call| move |e| Error::os(call, format!("memory of {bytes} bytes"), e);
    let fd = made.map_err(failed("memfd_create"))?;
    set_length(&fd, bytes).map_err(failed("ftruncate"))?;
    rustix::fs::fcntl_add_seals(&fd, seals).map_err(failed("fcntl(F_ADD_SEALS)"))?;
    Ok(fd)
}

/// The reason, if any, why `fd` is not a memfd of exactly `bytes` bytes with a sealed size.
///
/// The seals are read first: that queries no file system, and only tmpfs and hugetlbfs answer it.
/// `fstat` of a file on FUSE takes as long as its server likes.
pub(crate) fn check_sealed_memfd(fd: BorrowedFd<'_>, bytes: u64) -> Result<(), String> {
    check_memfd(fd, bytes, SEALS)
}

/// Like [`check_sealed_memfd`], with other seals that keep its size.
pub(crate) fn check_memfd(fd: BorrowedFd<'_>, bytes: u64, wanted: SealFlags) -> Result<(), String> {
    let seals = rustix::fs::fcntl_get_seals(fd).map_err(|_| "a file that cannot be sealed")?;
    if !seals.contains(wanted) {
        return Err(format!("a memfd without a sealed size ({seals:?})"));
    }
    let refused = |call| move |e| format!("a descriptor that {call} refuses: {e}");
    if rustix::fs::fstatfs(fd).map_err(refused("fstatfs"))?.f_type != TMPFS_MAGIC {
        return Err("a memfd of huge pages, which need not be there when they are touched".into());
    }
    let found = rustix::fs::fstat(fd).map_err(refused("fstat"))?.st_size;
    if found as u64 != bytes {
        return Err(format!("a memfd of {found} bytes instead of {bytes}"));
    }
    Ok(())
}

/// Maps a file of this length or more.
pub(crate) fn map(fd: &impl AsFd, bytes: u64, protection: ProtFlags) -> Result<u64> {
    let (place, flags) = (std::ptr::null_mut(), MapFlags::SHARED);
    // SAFETY: a fresh shared mapping at an address of the kernel's choice overlaps nothing.
    let ptr = unsafe { rustix::mm::mmap(place, bytes as usize, protection, flags, fd, 0) };
    let number = fd.as_fd().as_raw_fd();
    let what = || format!("{bytes} bytes of shared memory (descriptor {number})");
    Ok(ptr.map_err(|e| Error::os("mmap", what(), e))? as u64)
}
