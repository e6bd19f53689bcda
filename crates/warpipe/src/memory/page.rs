//! Words that several processes share: a sealed memfd of atomics alone. **This module is marked for unsafe**: it maps
//! and registers memory.
//!
//! Unlike a link's segment it may have more than two users, each of which can write all of it; what a face makes of that
//! stands at the face's head. Nothing but atomics is ever read here, so whatever a peer writes is a value, not a fault.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::backend::{DevicePtr, TimelineWord, host};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::{Home, PrivateFd};
use crate::link::proof::Streams;
use crate::link::watcher::Watcher;

/// The unit of a page's length.
pub(crate) const PAGE_BYTES: usize = 4096;

/// The longest: what a peer announces is checked against it before it is mapped.
pub(crate) const PAGES_BYTES_MAX: usize = 1 << 20;

/// What may lie in shared memory.
///
/// # Safety
/// Every bit pattern is valid, every field is an atomic (or an array of such), and nothing is dropped.
pub(crate) unsafe trait Shared {}

// SAFETY: atomics alone.
unsafe impl Shared for TimelineWord {}
// SAFETY: an atomic.
unsafe impl Shared for AtomicU64 {}
// SAFETY: an atomic.
unsafe impl Shared for AtomicU32 {}

/// A mapped page (or several), registered with a device if streams are to use its words.
#[derive(Debug)]
pub(crate) struct Page {
    base: *mut u8,
    bytes: usize,
    registered: Option<(Device, DevicePtr)>,
    home: Home,
}

// SAFETY: shared memory of atomics alone, at a fixed address until drop.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    /// `memfd_create`, `ftruncate`, seals, `mmap`, and registration if there is a device. Zeroed. Returns it and the
    /// descriptor for the peers.
    pub(crate) fn create(device: Option<&Device>, bytes: usize) -> Result<(Page, PrivateFd)> {
        let bytes = bytes.next_multiple_of(PAGE_BYTES);
        let context = || format!("{bytes} bytes of shared words");
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = PrivateFd::open(|| rustix::fs::memfd_create(c"warpipe-words", flags))
            .map_err(|e| Error::os("memfd_create", context(), e))?;
        rustix::fs::ftruncate(&fd, bytes as u64).map_err(|e| Error::os("ftruncate", context(), e))?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(|e| Error::os("fcntl(F_ADD_SEALS)", context(), e))?;
        Ok((Page::map(fd.as_fd(), bytes)?.register(device)?, fd))
    }

    /// Maps a page of `bytes` bytes that a peer made, once it has been seen to be a sealed memfd of that length.
    pub(crate) fn open(device: Option<&Device>, fd: PrivateFd, bytes: usize, name: &str) -> Result<Page> {
        let wrong = |found: String| Error::Protocol {
            name: name.to_string(),
            field: "shared words",
            found,
            allowed: format!("a sealed memfd of 1 to {PAGES_BYTES_MAX} bytes, in whole pages"),
        };
        if bytes == 0 || bytes > PAGES_BYTES_MAX || !bytes.is_multiple_of(PAGE_BYTES) {
            return Err(wrong(format!("{bytes} bytes")));
        }
        host::check_sealed_memfd(fd.as_fd(), bytes as u64).map_err(wrong)?;
        Page::map(fd.as_fd(), bytes)?.register(device)
    }

    fn map(fd: BorrowedFd<'_>, bytes: usize) -> Result<Page> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh shared mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, fd, 0) };
        let base = base.map_err(|e| Error::os("mmap", format!("{bytes} bytes of shared words"), e))?;
        Ok(Page { base: base.cast(), bytes, registered: None, home: Home::here() })
    }

    fn register(mut self, device: Option<&Device>) -> Result<Page> {
        if let Some(device) = device {
            // SAFETY: page-aligned mapped memory, unmapped only after `unregister` (see `Drop`).
            let device_ptr = unsafe { device.backend().register(self.base, self.bytes)? };
            self.registered = Some((device.clone(), device_ptr));
        }
        Ok(self)
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The `T` at `offset`.
    ///
    /// # Panics
    /// If it is not inside, or not aligned: offsets are this library's own, never a peer's.
    #[inline]
    pub(crate) fn at<T: Shared>(&self, offset: usize) -> &T {
        assert!(offset.is_multiple_of(align_of::<T>()) && offset + size_of::<T>() <= self.bytes);
        // SAFETY: inside the mapping and aligned (the mapping is to a page), which lives as long as self; `T` is atomics
        // for which every bit pattern is valid (`Shared`).
        unsafe { &*self.base.add(offset).cast::<T>() }
    }

    /// The device address of `offset`. `None` without a device.
    #[inline]
    pub(crate) fn device_ptr(&self, offset: usize) -> Option<DevicePtr> {
        debug_assert!(offset < self.bytes);
        self.registered.as_ref().map(|(_, base)| base + offset as u64)
    }

    /// Lets it go once all of `streams` are past what they were given, and nobody else here holds it. Never on the
    /// caller's thread: to unregister memory, a driver may wait for a stream that waits for a peer.
    pub(crate) fn retire(self: Arc<Self>, streams: Arc<Streams>, watcher: &Watcher) {
        if !self.home.is_here() {
            return std::mem::forget(self);
        }
        let mut proof = None;
        watcher.retire(move || {
            let page = &self;
            Arc::strong_count(page) == 1 && proof.get_or_insert_with(|| streams.mark()).is_passed()
        });
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        if !self.home.is_here() {
            return;
        }
        if let Some((device, _)) = &self.registered {
            // SAFETY: registered in `register`, once; who gave its words to a stream lets it go by `retire`.
            let _ = unsafe { device.backend().unregister(self.base) };
        }
        // SAFETY: exactly what `map` mapped; references into it borrow self.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    #[test]
    fn what_one_mapping_writes_the_other_reads() {
        let (ours, fd) = Page::create(None, 1).unwrap();
        let copy = PrivateFd::duplicate(&fd).unwrap();
        let theirs = Page::open(None, copy, ours.bytes(), "test").unwrap();
        ours.at::<AtomicU64>(8).store(7, Relaxed);
        assert_eq!(theirs.at::<AtomicU64>(8).load(Relaxed), 7);
    }

    #[test]
    fn a_page_of_another_length_or_an_unsealed_file_is_refused() {
        let (_ours, fd) = Page::create(None, 1).unwrap();
        let copy = || PrivateFd::duplicate(&fd).unwrap();
        for bytes in [0, 100, 2 * PAGE_BYTES, PAGES_BYTES_MAX + PAGE_BYTES] {
            let error = Page::open(None, copy(), bytes, "test").unwrap_err();
            assert!(matches!(error, Error::Protocol { field: "shared words", .. }), "{bytes}: {error}");
        }
        let loose = rustix::fs::memfd_create(c"loose", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&loose, PAGE_BYTES as u64).unwrap();
        assert!(matches!(Page::open(None, PrivateFd::new(loose), PAGE_BYTES, "test"), Err(Error::Protocol { .. })));
    }
}
