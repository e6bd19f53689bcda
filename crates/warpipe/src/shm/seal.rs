//! Sealed memfds that two processes map, and into which neither can punch a hole.
//!
//! A device that has registered shared memory keeps the pages that the memory had then. If a peer
//! removes a page afterwards (`fallocate(FALLOC_FL_PUNCH_HOLE)`, `madvise(MADV_REMOVE)`), a CPU
//! store reaches no stream any more, and a stream that waits cannot be released.
//! `F_SEAL_FUTURE_WRITE` (Linux 5.1) refuses both calls and new writable mappings, and keeps the
//! mappings that exist.
//!
//! One process makes the file ([`memfd`]) and maps it. The other one checks it ([`check`]), maps
//! it, and seals it ([`close`]). Then the first verifies that ([`check_closed`]).

use std::os::fd::BorrowedFd;

use rustix::fs::SealFlags;

use crate::backend::host;
use crate::error::Result;
use crate::fork::CloseOnForkFd;

/// The size is final: a file that shrinks would turn loads into `SIGBUS`.
const SIZE: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// The seals that both processes require before they register their mappings: no other writable
/// mapping, no hole, and no further seal.
const CLOSED: SealFlags = SIZE.union(SealFlags::FUTURE_WRITE).union(SealFlags::SEAL);

/// `memfd_create`, `ftruncate`, and the seals of the size.
pub(crate) fn memfd(name: &std::ffi::CStr, bytes: u64) -> Result<CloseOnForkFd> {
    host::sealed_memfd(name, bytes, SIZE)
}

/// Whether `fd` can be mapped: a memfd of exactly `bytes` bytes with a final size.
pub(crate) fn check(fd: BorrowedFd<'_>, bytes: u64) -> Result<(), String> {
    host::check_memfd(fd, bytes, SIZE)
}

/// Seals a file that both processes have mapped. Afterwards no process can remove a page of it.
pub(crate) fn close(fd: BorrowedFd<'_>) -> Result<(), String> {
    // A peer that has forbidden further seals may have set all of them.
    let _ = rustix::fs::fcntl_add_seals(fd, CLOSED);
    check_closed(fd)
}

/// Why a page of the file could still be removed, if one can.
pub(crate) fn check_closed(fd: BorrowedFd<'_>) -> Result<(), String> {
    let seals = rustix::fs::fcntl_get_seals(fd)
        .map_err(|e| format!("a file with unreadable seals: {e}"))?;
    if seals.contains(CLOSED) {
        return Ok(());
    }
    Err(format!(
        "a memfd into which holes can be punched ({seals:?})"
    ))
}
