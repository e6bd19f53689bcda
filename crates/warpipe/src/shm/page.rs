//! Pages of words that streams and processes use: atomics alone, in a sealed memfd if other
//! processes have them. **This module is marked for unsafe**: it maps and registers memory. A page
//! (of one or more of the system's) is one of four kinds:
//!
//! * **private** ([`SharedPage::private`]): of this process alone.
//! * **of two processes** ([`UnsealedPage`], and a link's [segment](super::segment)): both write
//!   it, neither can remove a part of it ([`seal`]). Streams wait for words of these two kinds
//!   only, which a CPU store always releases.
//! * **of many** ([`SharedPage::create`]): each peer can write it and remove pages. **No stream
//!   waits for its words**: a device keeps a removed page, which no CPU reaches any more.
//! * **read-only** for all but its maker ([`SharedPage::publish`]).

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, OnceLock};

use rustix::fs::SealFlags;
use rustix::mm::{MapFlags, ProtFlags};

use crate::atomic::{AtomicU32, AtomicU64};
use crate::backend::unreclaimed::Held;
use crate::backend::{DevicePtr, StreamOp, TimelineWord, host, unreclaimed};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::{CloseOnForkFd, OwnerProcess};
use crate::runtime::closer::PeerFd;
use crate::runtime::fence::{Fence, StreamSet};
use crate::runtime::reactor::{DropReadiness, Reactor};
use crate::shm::seal;

/// The unit of a page's length.
pub(crate) const PAGE_BYTES: usize = 4096;

/// The longest page: a length that a peer announces is checked against it before the page is
/// mapped.
pub(crate) const PAGES_BYTES_MAX: usize = 1 << 24;

/// A type that may lie in shared memory.
///
/// # Safety
/// Every bit pattern is valid, every field is an atomic (or an array of such), and nothing is
/// dropped.
pub(crate) unsafe trait AtomicsOnly {}

// SAFETY: atomics alone.
unsafe impl AtomicsOnly for TimelineWord {}
// SAFETY: an atomic.
unsafe impl AtomicsOnly for AtomicU64 {}
// SAFETY: an atomic.
unsafe impl AtomicsOnly for AtomicU32 {}
// SAFETY: an array of such.
unsafe impl<T: AtomicsOnly, const N: usize> AtomicsOnly for [T; N] {}

/// A mapped page (or several), registered with a device if streams are to use its words. Any thread
/// may drop it, under any lock: the reaper unregisters it, since a driver may hold that up until a
/// stream goes on that waits for a peer. Code that gives its words to a stream keeps it until
/// the stream is past them.
#[derive(Debug)]
pub(crate) struct SharedPage {
    mapping: Mapping,
    registered: OnceLock<Registered>,
    owner_process: OwnerProcess,
}

/// A range of addresses, which its owner unmaps.
#[derive(Debug, Clone, Copy)]
struct Mapping {
    base: *mut u8,
    bytes: usize,
}

// SAFETY: shared memory of atomics alone, at a fixed address until its owner unmaps it.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// # Safety
    /// Nothing uses the memory any more, here or on a device.
    unsafe fn unmap(self) {
        // SAFETY: exactly what `SharedPage::map` mapped, and the caller's promise.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.bytes) };
    }
}

#[derive(Debug)]
struct Registered {
    device: Device,
    /// `None` where the driver failed, and did not undo the registration.
    ptr: Option<DevicePtr>,
    reactor: Arc<Reactor>,
}

/// A registered mapping without an owner. Its drop calls the driver.
struct OrphanedMapping {
    mapping: Mapping,
    device: Device,
}

impl Drop for OrphanedMapping {
    fn drop(&mut self) {
        let Mapping { base, bytes } = self.mapping;
        // SAFETY: registered in `SharedPage::register`, once; its page was dropped when no stream
        // used its words any more.
        unsafe { unreclaimed::release(self.device.backend(), Held::Registered(base, bytes)) };
    }
}

impl SharedPage {
    /// Memory of this process alone, registered with the device. Zeroed. Its pages are there before
    /// the driver is called, which makes missing ones one after the other, under a lock of its own.
    pub(crate) fn private(device: &Device, bytes: usize) -> Result<SharedPage> {
        let bytes = bytes.next_multiple_of(PAGE_BYTES);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice overlaps nothing.
        let base =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, protection, flags) };
        let base = base.map_err(|e| Error::os("mmap", format!("{bytes} bytes of words"), e))?;
        SharedPage::of(base.cast(), bytes).registered_with(Some(device))
    }

    /// Words that this process and its device's streams, if there is a device, write and others
    /// read. No other process can map them for writing, or remove a page.
    pub(crate) fn publish(
        device: Option<&Device>,
        bytes: usize,
    ) -> Result<(SharedPage, CloseOnForkFd)> {
        let (page, fd) = UnsealedPage::create(bytes)?.seal_alone()?;
        Ok((page.registered_with(device)?, fd))
    }

    /// Maps a page that a peer has [published](Self::publish), for reading. Whether the peer has
    /// sealed it does not matter, since nothing is registered.
    pub(crate) fn read(fd: PeerFd, bytes: usize, name: &str) -> Result<SharedPage> {
        SharedPage::check_unsealed(&fd, bytes, name)?;
        SharedPage::map_to_read(fd.as_fd(), bytes)
    }

    /// Maps a memfd of this length or more, and of a final size, for reading.
    pub(crate) fn map_to_read(fd: BorrowedFd<'_>, bytes: usize) -> Result<SharedPage> {
        SharedPage::map_as(fd, bytes, ProtFlags::READ)
    }

    /// Words of many: `memfd_create`, `ftruncate`, seals, `mmap`, and registration if there is a
    /// device. Zeroed. Returns the page and the descriptor for the peers. No stream may wait for
    /// one of its words.
    pub(crate) fn create(
        device: Option<&Device>,
        bytes: usize,
    ) -> Result<(SharedPage, CloseOnForkFd)> {
        let UnsealedPage { page, fd } = UnsealedPage::create(bytes)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SEAL)
            .map_err(|e| Error::os("fcntl(F_ADD_SEALS)", "shared words", e))?;
        Ok((page.registered_with(device)?, fd))
    }

    /// Maps a page of `bytes` bytes that a peer made, once it has been seen to be a sealed memfd of
    /// that length.
    pub(crate) fn open(
        device: Option<&Device>,
        fd: PeerFd,
        bytes: usize,
        name: &str,
    ) -> Result<SharedPage> {
        check_length(bytes, name)?;
        host::check_sealed_memfd(fd.as_fd(), bytes as u64).map_err(|found| wrong(found, name))?;
        fd.approve();
        SharedPage::map(fd.as_fd(), bytes)?.registered_with(device)
    }

    /// Maps and seals words of two that a peer made and has mapped, and registers them with the
    /// device, once they have been seen to be a memfd of `bytes` bytes.
    pub(crate) fn seal(
        device: &Device,
        fd: PeerFd,
        bytes: usize,
        name: &str,
    ) -> Result<SharedPage> {
        SharedPage::check_unsealed(&fd, bytes, name)?;
        let page = SharedPage::map(fd.as_fd(), bytes)?;
        seal::close(fd.as_fd()).map_err(|found| wrong(found, name))?;
        page.registered_with(Some(device))
    }

    /// Checks that a peer's descriptor is a memfd of `bytes` bytes, which this process or another
    /// one may [seal](Self::seal).
    pub(crate) fn check_unsealed(fd: &PeerFd, bytes: usize, name: &str) -> Result<()> {
        check_length(bytes, name)?;
        seal::check(fd.as_fd(), bytes as u64).map_err(|found| wrong(found, name))?;
        fd.approve();
        Ok(())
    }

    /// Maps a memfd of this length or more, and of a final size.
    pub(super) fn map(fd: BorrowedFd<'_>, bytes: usize) -> Result<SharedPage> {
        SharedPage::map_as(fd, bytes, ProtFlags::READ | ProtFlags::WRITE)
    }

    fn map_as(fd: BorrowedFd<'_>, bytes: usize, protection: ProtFlags) -> Result<SharedPage> {
        let base = host::map(&fd, bytes as u64, protection)?;
        Ok(SharedPage::of(base as *mut u8, bytes))
    }

    fn of(base: *mut u8, bytes: usize) -> SharedPage {
        SharedPage {
            mapping: Mapping { base, bytes },
            registered: OnceLock::new(),
            owner_process: OwnerProcess::current(),
        }
    }

    fn registered_with(self, device: Option<&Device>) -> Result<SharedPage> {
        if let Some(device) = device {
            self.register(device)?;
        }
        Ok(self)
    }

    /// Registers the page with the device, unless it is. The driver's call may take a moment.
    pub(super) fn register(&self, device: &Device) -> Result<()> {
        if self.device_ptr(0).is_some() {
            return Ok(());
        }
        let reactor = Reactor::of_process()?;
        let Mapping { base, bytes } = self.mapping;
        // SAFETY: page-aligned mapped memory, unmapped only after `unregister` (see
        // `OrphanedMapping`).
        let registered = unsafe { device.backend().register(base, bytes) };
        if registered.is_ok() || device.backend().is_registered(base) {
            let _ = self.registered.set(Registered {
                device: device.clone(),
                ptr: registered.as_ref().ok().copied(),
                reactor,
            });
        }
        registered.map(drop)
    }

    pub(crate) fn bytes(&self) -> usize {
        self.mapping.bytes
    }

    /// The address of `offset` in this process: of a page that is no words, but this process's own
    /// memory for the device to copy.
    pub(crate) fn address(&self, offset: usize) -> *mut u8 {
        assert!(offset < self.bytes());
        self.mapping.base.wrapping_add(offset)
    }

    /// The `T` at `offset`.
    ///
    /// # Panics
    /// If the `T` is not inside, or not aligned: offsets are this library's own, never a peer's.
    #[inline]
    pub(crate) fn at<T: AtomicsOnly>(&self, offset: usize) -> &T {
        assert!(offset.is_multiple_of(align_of::<T>()) && offset + size_of::<T>() <= self.bytes());
        // SAFETY: inside the mapping and aligned (the mapping is to a page), which lives as long as
        // self; `T` is atomics for which every bit pattern is valid (`AtomicsOnly`).
        unsafe { &*self.mapping.base.add(offset).cast::<T>() }
    }

    /// The device address of `offset`. `None` without a device.
    #[inline]
    pub(crate) fn device_ptr(&self, offset: usize) -> Option<DevicePtr> {
        debug_assert!(offset < self.bytes());
        let registered = self.registered.get();
        registered.and_then(|registered| Some(registered.ptr? + offset as u64))
    }

    /// Whether a GPU may store its words.
    pub(crate) fn is_of_gpu(&self) -> bool {
        let registered = self.registered.get();
        registered.is_none_or(|registered| registered.device.is_gpu())
    }

    /// How many timeline words it has.
    pub(crate) fn words(&self) -> usize {
        self.bytes() / size_of::<TimelineWord>()
    }

    /// The timeline word of this number.
    #[inline]
    pub(crate) fn word(&self, number: usize) -> &TimelineWord {
        self.at(words_bytes(number))
    }

    /// The device address of the timeline word of this number. `None` without a device.
    #[inline]
    pub(crate) fn device_word(&self, number: usize) -> Option<DevicePtr> {
        self.device_ptr(words_bytes(number))
    }

    /// The operation that signals the timeline word of this number, of a page that a device has.
    #[inline]
    pub(crate) fn signal(&self, number: usize, value: u64) -> StreamOp {
        let word = self.device_word(number).unwrap_or_default();
        StreamOp::Signal { word, value }
    }

    /// Drops the page once this process has no other handle of it, and then all of `streams` are
    /// past their work: a thread that has a handle may still give a stream work on the page.
    pub(crate) fn drop_after_streams(self: Arc<Self>, streams: Arc<StreamSet>, reactor: &Reactor) {
        let mut fence = Fence::later(streams);
        reactor.drop_after(move || {
            if Arc::strong_count(&self) > 1 {
                return DropReadiness::Held;
            }
            fence.is_reached().into()
        });
    }
}

/// The bytes of so many timeline words: also where the next one lies.
pub(crate) fn words_bytes(words: usize) -> usize {
    words * size_of::<TimelineWord>()
}

fn check_length(bytes: usize, name: &str) -> Result<()> {
    if bytes == 0 || bytes > PAGES_BYTES_MAX || !bytes.is_multiple_of(PAGE_BYTES) {
        return Err(wrong(format!("{bytes} bytes"), name));
    }
    Ok(())
}

fn wrong(found: String, name: &str) -> Error {
    let allowed = format!("a sealed memfd of 1 to {PAGES_BYTES_MAX} bytes, in whole pages");
    Error::protocol(name, "shared words", found, allowed)
}

/// Words of two processes, which the other one has not sealed yet. The process that is to wait for
/// them makes the page and sends the descriptor. The other one [seals](SharedPage::seal) it; then
/// the first [confirms](Self::confirm) it. From then on neither process can remove a page that the
/// other uses.
#[derive(Debug)]
pub(crate) struct UnsealedPage {
    page: SharedPage,
    fd: CloseOnForkFd,
}

impl AsFd for UnsealedPage {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl UnsealedPage {
    pub(crate) fn create(bytes: usize) -> Result<UnsealedPage> {
        UnsealedPage::named(c"warpipe-words", bytes)
    }

    /// As [`create`](Self::create), with a name that `/proc` shows.
    pub(crate) fn named(name: &CStr, bytes: usize) -> Result<UnsealedPage> {
        let bytes = bytes.next_multiple_of(PAGE_BYTES);
        let fd = seal::memfd(name, bytes as u64)?;
        Ok(UnsealedPage {
            page: SharedPage::map(fd.as_fd(), bytes)?,
            fd,
        })
    }

    /// Seals it before another process has it: none will write it.
    pub(crate) fn seal_alone(self) -> Result<(SharedPage, CloseOnForkFd)> {
        seal::close(self.fd.as_fd())
            .map_err(|found| Error::argument("words", found, "a memfd that can be sealed"))?;
        Ok((self.page, self.fd))
    }

    /// Whether the other process has sealed it.
    pub(crate) fn is_closed(&self) -> bool {
        seal::check_closed(self.fd.as_fd()).is_ok()
    }

    /// Registers the page with the device, once the other process is seen to have sealed it.
    pub(crate) fn confirm(self, device: &Device, name: &str) -> Result<SharedPage> {
        seal::check_closed(self.fd.as_fd()).map_err(|found| wrong(found, name))?;
        self.page.registered_with(Some(device))
    }
}

impl Drop for SharedPage {
    fn drop(&mut self) {
        if !self.owner_process.is_current() {
            return;
        }
        let mapping = self.mapping;
        match self.registered.take() {
            Some(Registered {
                device, reactor, ..
            }) => reactor.defer_drop(Box::new(OrphanedMapping { mapping, device })),
            // SAFETY: references into it borrow self, and no device has its address.
            None => unsafe { mapping.unmap() },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::backend::testing::{Holding, Wrapped};
    use rustix::fs::MemfdFlags;

    #[test]
    fn a_word_that_one_mapping_writes_is_read_by_the_other() {
        let (ours, fd) = SharedPage::create(None, 1).unwrap();
        let copy = CloseOnForkFd::duplicate(&fd).unwrap();
        let theirs = SharedPage::open(None, copy.into(), ours.bytes(), "test").unwrap();
        ours.at::<AtomicU64>(8).store(7, Relaxed);
        assert_eq!(theirs.at::<AtomicU64>(8).load(Relaxed), 7);
    }

    #[test]
    fn words_of_two_are_used_behind_the_seal_alone_and_no_page_of_them_can_be_removed() {
        let device = Device::host();
        let ours = UnsealedPage::create(2 * PAGE_BYTES).unwrap();
        let copy = || CloseOnForkFd::duplicate(&ours.fd).unwrap();
        let (earlier, held) = ([crate::hostile::holes::reopened(ours.fd.as_fd())], copy());
        assert!(!crate::hostile::holes::ways_to_remove(held.as_fd(), &earlier, 0).is_empty());
        let bytes = 2 * PAGE_BYTES;
        let theirs = SharedPage::seal(&device, copy().into(), bytes, "test").unwrap();
        let ours = ours.confirm(&device, "test").unwrap();
        theirs.at::<AtomicU64>(4096).store(7, Relaxed);
        for offset in [0, 4096] {
            assert_eq!(
                crate::hostile::holes::ways_to_remove(held.as_fd(), &earlier, offset),
                [""; 0]
            );
        }
        assert_eq!(ours.at::<AtomicU64>(4096).load(Relaxed), 7);
        assert!(
            SharedPage::seal(&device, held.into(), bytes, "test").is_err(),
            "nobody else maps it any more"
        );
    }

    #[test]
    fn a_page_is_dropped_at_once_although_the_driver_holds_its_unregistration_up() {
        let hook = Wrapped::new(Device::host().backend().clone(), Holding::default());
        let page = SharedPage::private(&Device::from_backend(hook.clone()), 1).unwrap();
        hook.hook().hold("unregister");
        let (dropped_tx, dropped) = mpsc::channel();
        std::thread::spawn(move || {
            drop(page);
            dropped_tx.send(()).unwrap();
        });
        hook.hook().wait_for(1);
        dropped.recv_timeout(Duration::from_secs(10)).unwrap();
        hook.hook().unblock();
    }

    #[test]
    fn words_of_two_that_the_other_has_not_sealed_are_refused() {
        let draft = UnsealedPage::create(PAGE_BYTES).unwrap();
        let refused = draft.confirm(&Device::host(), "test").unwrap_err();
        assert!(
            matches!(
                refused,
                Error::Protocol {
                    field: "shared words",
                    ..
                }
            ),
            "{refused}"
        );
    }

    #[test]
    fn published_words_are_written_by_their_maker_alone() {
        let (ours, fd) = SharedPage::publish(None, PAGE_BYTES).unwrap();
        let copy = || CloseOnForkFd::duplicate(&fd).unwrap();
        let theirs = SharedPage::read(copy().into(), PAGE_BYTES, "test").unwrap();
        ours.at::<AtomicU64>(0).store(7, Relaxed);
        assert_eq!(theirs.at::<AtomicU64>(0).load(Relaxed), 7);
        assert!(SharedPage::map(fd.as_fd(), PAGE_BYTES).is_err());
        assert_eq!(
            crate::hostile::holes::ways_to_remove(fd.as_fd(), &[], 0),
            [""; 0]
        );
    }

    #[test]
    fn a_page_of_another_length_or_an_unsealed_file_is_refused() {
        let (_ours, fd) = SharedPage::create(None, 1).unwrap();
        let copy = || CloseOnForkFd::duplicate(&fd).unwrap();
        for bytes in [0, 100, 2 * PAGE_BYTES, PAGES_BYTES_MAX + PAGE_BYTES] {
            let error = SharedPage::open(None, copy().into(), bytes, "test").unwrap_err();
            assert!(
                matches!(
                    error,
                    Error::Protocol {
                        field: "shared words",
                        ..
                    }
                ),
                "{bytes}: {error}"
            );
        }
        let loose =
            rustix::fs::memfd_create(c"loose", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
                .unwrap();
        rustix::fs::ftruncate(&loose, PAGE_BYTES as u64).unwrap();
        assert!(matches!(
            SharedPage::open(
                None,
                CloseOnForkFd::new(loose).unwrap().into(),
                PAGE_BYTES,
                "test"
            ),
            Err(Error::Protocol { .. })
        ));
    }
}
