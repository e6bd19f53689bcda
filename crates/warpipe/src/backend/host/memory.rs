//! Sealed memfds as device memory. **This module is marked for unsafe**: it maps and unmaps.

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::backend::{Access, RawRegion};
use crate::error::{DeviceFault, Error, Result};
use crate::fork::CloseOnForkFd;
use crate::os::{above_standard, set_length};

/// The handle of an imported region: it keeps no descriptor, since the mapping holds the memory.
const IMPORTED: u64 = u64::MAX;

/// The seals that make a size final: without them a peer could shrink the file and turn this
/// process's loads into SIGBUS.
pub(super) const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

const MEMFD: MemfdFlags = MemfdFlags::CLOEXEC.union(MemfdFlags::ALLOW_SEALING);

/// `f_type` of the file system of memfds. A fault in one of its pages allocates ordinary memory. A
/// fault in hugetlbfs takes a page of a pool that may be empty, and then it is SIGBUS.
const TMPFS_MAGIC: rustix::fs::FsWord = libc::TMPFS_MAGIC as rustix::fs::FsWord;

pub(super) fn is_import(region: &RawRegion) -> bool {
    region.handle == IMPORTED
}

/// `memfd_create` + `ftruncate` + seals + `mmap`.
pub(super) fn allocate(bytes: u64) -> Result<RawRegion> {
    let made = rustix::fs::memfd_create(c"warpipe-region", MEMFD).and_then(above_standard);
    let fd = sealed(made, bytes, SEALS)?;
    let ptr = map(&fd, bytes, ProtFlags::READ | ProtFlags::WRITE)?;
    Ok(RawRegion {
        ptr,
        bytes,
        handle: fd.into_raw_fd() as u64,
        piece: bytes,
        mapped: bytes,
    })
}

/// `memfd_create`, `ftruncate`, and the seals: memory that no forked child keeps.
pub(crate) fn sealed_memfd(name: &CStr, bytes: u64, seals: SealFlags) -> Result<CloseOnForkFd> {
    let made = CloseOnForkFd::open(|| rustix::fs::memfd_create(name, MEMFD));
    sealed(made, bytes, seals)
}

fn sealed<F: AsFd>(made: rustix::io::Result<F>, bytes: u64, seals: SealFlags) -> Result<F> {
    let failed = |call| move |e| Error::os(call, format!("memory of {bytes} bytes"), e);
    let fd = made.map_err(failed("memfd_create"))?;
    set_length(&fd, bytes).map_err(failed("ftruncate"))?;
    rustix::fs::fcntl_add_seals(&fd, seals).map_err(failed("fcntl(F_ADD_SEALS)"))?;
    Ok(fd)
}

/// A close-on-exec duplicate of the region's descriptor.
///
/// # Safety
/// `region` came from [`allocate`] and is not released.
pub(super) unsafe fn export(region: &RawRegion) -> Result<OwnedFd> {
    if is_import(region) {
        return Err(Error::argument(
            "region",
            "an imported region",
            "a region allocated here",
        ));
    }
    // SAFETY: the handle of a live allocation is its open descriptor (see `allocate`), borrowed for
    // this call.
    let fd = unsafe { BorrowedFd::borrow_raw(region.handle as i32) };
    rustix::io::fcntl_dupfd_cloexec(fd, 3)
        .map_err(|e| Error::os("fcntl(F_DUPFD_CLOEXEC)", "a region's descriptor", e))
}

fn protection_of(access: Access) -> ProtFlags {
    match access {
        Access::Read => ProtFlags::READ,
        Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
    }
}

/// Checks that each of `fds` is a sealed memfd of exactly `piece` bytes, and maps them in their
/// order into one range.
pub(super) fn import(fds: &[BorrowedFd<'_>], piece: u64, access: Access) -> Result<RawRegion> {
    let bytes = check_pieces(fds, piece)?;
    let failed = |e| Error::os("mmap", format!("{} pieces of {piece} bytes", fds.len()), e);
    // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
    let base = unsafe {
        rustix::mm::mmap_anonymous(
            std::ptr::null_mut(),
            bytes,
            ProtFlags::empty(),
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )
    };
    let region = RawRegion {
        ptr: base.map_err(failed)? as u64,
        bytes: bytes as u64,
        handle: IMPORTED,
        piece,
        mapped: bytes as u64,
    };
    // SAFETY: the range was mapped just now for this, and nothing uses it yet.
    if let Err(error) = unsafe { map_over(&region, fds, piece, access) } {
        // SAFETY: mapped here, and handed to no other code.
        let _ = unsafe { release(region) };
        return Err(error);
    }
    Ok(region)
}

/// Checks that each of `fds` is a sealed memfd of exactly `piece` bytes. Returns the length of all.
fn check_pieces(fds: &[BorrowedFd<'_>], piece: u64) -> Result<usize> {
    let refused = |found: String| {
        let text = format!("the descriptor received is not sealed memfds: {found}");
        Error::device(DeviceFault::NotShareable, text)
    };
    let page = rustix::param::page_size() as u64;
    let bytes = piece
        .checked_mul(fds.len() as u64)
        .filter(|&bytes| bytes > 0);
    let bytes = bytes.filter(|_| piece.is_multiple_of(page));
    let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok());
    let bytes = bytes.ok_or_else(|| refused(format!("{} of {piece} bytes", fds.len())))?;
    for &fd in fds {
        check_sealed_memfd(fd, piece).map_err(refused)?;
    }
    Ok(bytes)
}

/// Maps checked pieces over `region`, in their order.
///
/// # Safety
/// The pieces fill the region, which is mapped here and not used while this runs.
unsafe fn map_over(
    region: &RawRegion,
    fds: &[BorrowedFd<'_>],
    piece: u64,
    access: Access,
) -> Result<()> {
    let mapped = (0..).zip(fds).try_for_each(|(number, &fd)| {
        let at = (region.ptr + number * piece) as *mut std::ffi::c_void;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: inside the region, by the caller's promise; the piece's length is sealed.
        let made =
            unsafe { rustix::mm::mmap(at, piece as usize, protection_of(access), flags, fd, 0) };
        made.map(drop)
    });
    mapped.map_err(|e| Error::os("mmap", format!("{} pieces of {piece} bytes", fds.len()), e))
}

/// As for [`crate::backend::Imports::import_over`].
///
/// # Safety
/// As there.
pub(super) unsafe fn import_over(
    region: &mut RawRegion,
    fds: &[BorrowedFd<'_>],
    piece: u64,
    access: Access,
) -> Result<()> {
    let bytes = check_pieces(fds, piece)? as u64;
    if bytes != region.bytes {
        let text = format!(
            "the descriptor received is not memory of the region's length: {bytes} bytes instead of {}",
            region.bytes
        );
        return Err(Error::device(DeviceFault::NotShareable, text));
    }
    // SAFETY: the caller's promise.
    unsafe { map_over(region, fds, piece, access) }
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
    let seals =
        rustix::fs::fcntl_get_seals(fd).map_err(|_| "a file that cannot be sealed".to_string())?;
    if !seals.contains(wanted) {
        return Err(format!("a memfd without a sealed size ({seals:?})"));
    }
    let system =
        rustix::fs::fstatfs(fd).map_err(|e| format!("a descriptor that fstatfs refuses: {e}"))?;
    if system.f_type != TMPFS_MAGIC {
        return Err(
            "a memfd of huge pages, which need not be there when they are touched".to_string(),
        );
    }
    let stat =
        rustix::fs::fstat(fd).map_err(|e| format!("a descriptor that fstat refuses: {e}"))?;
    if stat.st_size as u64 != bytes {
        return Err(format!(
            "a memfd of {} bytes instead of {bytes}",
            stat.st_size
        ));
    }
    Ok(())
}

/// `munmap`, and `close` of an own allocation's descriptor.
///
/// # Safety
/// `region` came from [`allocate`] or [`import`], is released once, and no code uses the mapping
/// any more.
pub(super) unsafe fn release(region: RawRegion) -> Result<()> {
    // SAFETY: the caller's promise: the range is exactly what was mapped, and unused.
    unsafe { rustix::mm::munmap(region.ptr as *mut _, region.bytes as usize) }
        .map_err(|e| Error::os("munmap", "a region", e))?;
    if !is_import(&region) {
        // SAFETY: the handle of an allocation is its descriptor, given up here once.
        drop(unsafe { OwnedFd::from_raw_fd(region.handle as i32) });
    }
    Ok(())
}

pub(super) fn map(fd: &impl AsFd, bytes: u64, protection: ProtFlags) -> Result<u64> {
    let context = || {
        format!(
            "a region of {bytes} bytes (descriptor {})",
            fd.as_fd().as_raw_fd()
        )
    };
    let length = usize::try_from(bytes)
        .map_err(|_| Error::argument("bytes", bytes, "less than the address space"))?;
    // SAFETY: a fresh shared mapping at an address of the kernel's choice overlaps nothing; its
    // length is sealed.
    let ptr = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            length,
            protection,
            MapFlags::SHARED,
            fd,
            0,
        )
    };
    Ok(ptr.map_err(|e| Error::os("mmap", context(), e))? as u64)
}
