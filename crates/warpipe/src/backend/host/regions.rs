//! Regions of sealed memfds. **This module is marked for unsafe**: it maps and unmaps, and borrows
//! the descriptors of regions.
//!
//! They are listed by address, for code that knows an address alone, as
//! `cuMemRetainAllocationHandle` gives it the allocation.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::mm::{MapFlags, ProtFlags};

use super::HostBackend;
use super::memory::{SEALS, check_sealed_memfd, create_memfd, map, sealed};
use crate::backend::{
    Access, DeviceId, DevicePtr, Imports, Ipc, PointerKind, RawRegion, Regions, Retained,
    duplicate, length_of_pieces, not_shareable,
};
use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::fork::per_process::InheritedOnFork;
use crate::os::above_standard;

/// The handle of an imported region: it keeps no descriptor, since the mapping holds the memory.
const IMPORTED: u64 = u64::MAX;

/// The expected kind of a descriptor, for errors.
const WANTED: &str = "sealed memfds";

#[derive(Debug, Default)]
pub(super) struct RegionTable {
    mapped: InheritedOnFork<BTreeMap<DevicePtr, RawRegion>>,
    /// By the inode of its memfd: the descriptor, and how often it is held.
    retained: InheritedOnFork<HashMap<u64, (CloseOnForkFd, u32)>>,
}

impl Regions for HostBackend {
    fn granularity(&self) -> u64 {
        rustix::param::page_size() as u64
    }

    fn allocate(&self, bytes: u64) -> Result<RawRegion> {
        let region = self.reserved(bytes, || {
            let made = create_memfd(c"warpipe-region").and_then(above_standard);
            let fd = sealed(made, bytes, SEALS)?;
            Ok(RawRegion {
                ptr: map(&fd, bytes, ProtFlags::READ | ProtFlags::WRITE)?,
                bytes,
                handle: fd.into_raw_fd() as u64,
                piece: bytes,
                mapped: bytes,
            })
        })?;
        self.regions.mapped.lock().insert(region.ptr, region);
        Ok(region)
    }

    unsafe fn export(&self, region: &RawRegion) -> Result<OwnedFd> {
        if region.handle == IMPORTED {
            let allowed = "a region allocated here";
            return Err(Error::argument("region", "an imported region", allowed));
        }
        // SAFETY: the handle of a live allocation is its open descriptor (see `allocate`), borrowed
        // for this call.
        duplicate(unsafe { BorrowedFd::borrow_raw(region.handle as i32) })
    }

    unsafe fn release(&self, region: &mut RawRegion) -> Result<()> {
        let is_import = region.handle == IMPORTED;
        if !is_import {
            // Before another mapping may have the address.
            self.regions.mapped.lock().remove(&region.ptr);
        }
        // SAFETY: the caller's promise: the range is exactly what was mapped, and unused.
        unsafe { rustix::mm::munmap(region.ptr as *mut _, region.bytes as usize) }
            .map_err(|e| Error::os("munmap", "a region", e))?;
        if is_import {
            self.imported.fetch_sub(region.bytes, Ordering::Relaxed);
        } else {
            // SAFETY: the handle of an allocation is its descriptor, given up here once.
            drop(unsafe { OwnedFd::from_raw_fd(region.handle as i32) });
            self.allocated.fetch_sub(region.bytes, Ordering::Relaxed);
        }
        Ok(())
    }

    unsafe fn register(&self, ptr: *mut u8, _bytes: usize) -> Result<DevicePtr> {
        Ok(ptr as DevicePtr)
    }

    unsafe fn unregister(&self, _ptr: *mut u8) -> Result<()> {
        Ok(())
    }

    fn bytes_held(&self) -> u64 {
        self.allocated.load(Ordering::Relaxed) + self.imported.load(Ordering::Relaxed)
    }
}

impl Imports for HostBackend {
    fn import(
        &self,
        fds: &[BorrowedFd<'_>],
        piece: u64,
        access: Access,
        _owner: DeviceId,
    ) -> Result<RawRegion> {
        let bytes = self.check_pieces(fds, piece)?;
        let (nothing, flags) = (ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes as usize, nothing, flags)
        };
        let mut region = RawRegion {
            ptr: base.map_err(|e| Error::os("mmap", format!("{bytes} bytes of a peer"), e))? as u64,
            bytes,
            handle: IMPORTED,
            piece,
            mapped: bytes,
        };
        self.imported.fetch_add(bytes, Ordering::Relaxed);
        // SAFETY: the range was mapped just now for this, and nothing uses it yet.
        if let Err(error) = unsafe { map_over(&region, fds, piece, access) } {
            // SAFETY: mapped here, and handed to no other code.
            let _ = unsafe { self.release(&mut region) };
            return Err(error);
        }
        Ok(region)
    }

    unsafe fn import_over(
        &self,
        region: &mut RawRegion,
        fds: &[BorrowedFd<'_>],
        piece: u64,
        access: Access,
        _owner: DeviceId,
    ) -> Result<()> {
        self.check_pieces(fds, piece)?;
        // SAFETY: the caller's promise.
        unsafe { map_over(region, fds, piece, access) }
    }

    fn retain_mapped(&self, ptr: DevicePtr) -> Result<Retained> {
        let mapped = self.regions.mapped.lock();
        let found = mapped.range(..=ptr).next_back().map(|(_, region)| *region);
        let Some(region) = found.filter(|region| ptr - region.ptr < region.bytes) else {
            drop(mapped);
            let kind = match self.locate(ptr)?.kind {
                // Mapped, and not allocated here.
                PointerKind::Vmm => PointerKind::VmmPrivate,
                kind => kind,
            };
            return Err(Error::not_exportable(ptr, kind));
        };
        // SAFETY: a region in the table is not released, as the lock is held: its handle is its
        // open descriptor.
        let fd = unsafe { BorrowedFd::borrow_raw(region.handle as i32) };
        let failed = |e| Error::os("fcntl(F_DUPFD_CLOEXEC)", "a held region", e);
        let copy = CloseOnForkFd::duplicate(fd).map_err(failed)?;
        drop(mapped);
        let stat = rustix::fs::fstat(&copy).map_err(|e| Error::os("fstat", "a held region", e))?;
        let mut retained = self.regions.retained.lock();
        let (_, times) = retained.entry(stat.st_ino).or_insert((copy, 0));
        *times += 1;
        Ok(Retained {
            handle: stat.st_ino,
            base: region.ptr,
            bytes: region.bytes,
        })
    }

    unsafe fn export_retained(&self, held: &Retained) -> Result<OwnedFd> {
        match self.regions.retained.lock().get(&held.handle) {
            Some((fd, _)) => duplicate(fd.as_fd()),
            None => Err(Error::not_exportable(held.base, PointerKind::Unknown)),
        }
    }

    unsafe fn release_retained(&self, held: &Retained) -> Result<()> {
        let mut retained = self.regions.retained.lock();
        if let Some((_, times)) = retained.get_mut(&held.handle) {
            *times -= 1;
            if *times == 0 {
                retained.remove(&held.handle);
            }
        }
        Ok(())
    }
}

impl HostBackend {
    /// Checks that each of `fds` is a sealed memfd of exactly `piece` bytes. Returns the length of
    /// all.
    fn check_pieces(&self, fds: &[BorrowedFd<'_>], piece: u64) -> Result<u64> {
        let bytes = length_of_pieces(fds, piece, self.granularity(), WANTED)?;
        for &fd in fds {
            check_sealed_memfd(fd, piece).map_err(|found| not_shareable(WANTED, found))?;
        }
        Ok(bytes)
    }
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
    let protection = match access {
        Access::Read => ProtFlags::READ,
        Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
    };
    (0..).zip(fds).try_for_each(|(number, &fd)| {
        let at = (region.ptr + number * piece) as *mut std::ffi::c_void;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: inside the region, by the caller's promise; the piece's length is sealed.
        let made = unsafe { rustix::mm::mmap(at, piece as usize, protection, flags, fd, 0) };
        made.map(drop)
            .map_err(|e| Error::os("mmap", format!("a piece of {piece} bytes"), e))
    })
}
