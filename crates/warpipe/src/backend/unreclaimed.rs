//! Memory that a device has not released. **This module is marked for unsafe**: it unregisters and
//! unmaps memory.
//!
//! The driver may still use memory that it refuses to unregister, to unmap or to close, so this
//! memory stays as it is, and is counted ([`process_stats`](crate::process_stats)). So does memory
//! when its [unregistration](crate::backend::Regions::unregister) would block. The reaper retries
//! with each tick. Memory of a device that was reset is not retried: its addresses and handles may
//! belong to others by now.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use rustix::mm::munmap;

use super::{Backend, DevicePtr, RawRegion, Retained};
use crate::error::{Error, HandleFault, Result};
use crate::fork::per_process::PerProcess;

/// The number of such mappings and regions, and their bytes. A forked child starts at zero.
static UNRECLAIMED: PerProcess<[AtomicU64; 2]> = PerProcess::new();

/// The retry list. It is bounded by the mappings and regions that were dropped.
static RETRIES: PerProcess<Mutex<Retries>> = PerProcess::new();

#[derive(Default)]
struct Retries {
    list: Vec<UnreclaimedMemory>,
    /// Called when an entry is added.
    on_due: Option<Box<dyn Fn() + Send>>,
}

/// Memory that only the device may still use.
struct UnreclaimedMemory {
    backend: Arc<dyn Backend>,
    of: Held,
}

/// What a device is to let go of, and the length of what does not say it.
pub(crate) enum Held {
    /// By [`Regions::release`](crate::backend::Regions::release).
    Region(RawRegion),
    /// By [`Regions::unregister`](crate::backend::Regions::unregister): a mapping of its own, which
    /// is unmapped then.
    Registered(*mut u8, usize),
    /// By [`Ipc::close_legacy`](crate::backend::Ipc::close_legacy).
    Legacy(DevicePtr, u64),
    /// By [`Imports::release_retained`](crate::backend::Imports::release_retained).
    Retained(Retained),
}

// SAFETY: the address is that of a mapping that nothing else has.
unsafe impl Send for UnreclaimedMemory {}

/// The number of unreclaimed mappings and regions, and their bytes.
pub(crate) fn totals() -> (u64, u64) {
    let [count, bytes] = UNRECLAIMED.get();
    (count.load(Relaxed), bytes.load(Relaxed))
}

/// Counts memory that a device did not release.
fn count_kept(bytes: u64) {
    let [count, all] = UNRECLAIMED.get();
    count.fetch_add(1, Relaxed);
    all.fetch_add(bytes, Relaxed);
}

fn count_given_back(bytes: u64) {
    let [count, all] = UNRECLAIMED.get();
    count.fetch_sub(1, Relaxed);
    all.fetch_sub(bytes, Relaxed);
}

/// Lets the device let go of memory, now or later.
///
/// # Safety
/// As for the method that [`Held`] names, and nothing uses the memory any more.
pub(crate) unsafe fn release(backend: &Arc<dyn Backend>, of: Held) {
    let backend = backend.clone();
    let mut memory = UnreclaimedMemory { backend, of };
    match memory.release() {
        Ok(()) => {}
        // Counted for the rest of the process's life.
        Err(error) if error.is_reset() => count_kept(memory.bytes()),
        Err(_) => retry(memory.backend, memory.of),
    }
}

/// Lets the device let go of memory that nothing uses any more, but not on this thread.
pub(super) fn retry(backend: Arc<dyn Backend>, of: Held) {
    let memory = UnreclaimedMemory { backend, of };
    count_kept(memory.bytes());
    let mut retries = RETRIES.lock();
    retries.list.push(memory);
    retries.on_due.iter().for_each(|on_due| on_due());
}

/// Sets `on_due`, called whenever the retry list gets an entry. It must not block.
pub(crate) fn on_retry_due(on_due: impl Fn() + Send + 'static) {
    RETRIES.lock().on_due = Some(Box::new(on_due));
}

/// Whether the retry list has an entry.
pub(crate) fn is_retry_due() -> bool {
    !RETRIES.lock().list.is_empty()
}

/// Retries everything. A driver may block this. A call that panics may have done its work, so its
/// memory stays as it is, and counted, as does memory of a device that was reset; the rest is
/// retried.
pub(crate) fn retry_all() {
    // Without the lock, which the reactor takes.
    let list = std::mem::take(&mut RETRIES.lock().list);
    for mut memory in list {
        match catch_unwind(AssertUnwindSafe(|| memory.release())) {
            Ok(Ok(())) => count_given_back(memory.bytes()),
            Ok(Err(error)) if !error.is_reset() => RETRIES.lock().list.push(memory),
            _ => {}
        }
    }
}

impl UnreclaimedMemory {
    fn bytes(&self) -> u64 {
        match self.of {
            Held::Region(region) => region.bytes,
            Held::Registered(_, bytes) => bytes as u64,
            Held::Legacy(_, bytes) => bytes,
            Held::Retained(retained) => retained.bytes,
        }
    }

    /// Tries once.
    fn release(&mut self) -> Result<()> {
        match &mut self.of {
            // SAFETY: the code that dropped it promised that nothing uses it; this alone has what is
            // left of it.
            Held::Region(region) => unsafe { self.backend.release(region) },
            Held::Registered(base, bytes) => {
                // SAFETY: as above; it is registered still.
                unsafe { self.backend.unregister(*base) }?;
                // SAFETY: a mapping of this length, which the caller of the function left here.
                let _ = unsafe { munmap(base.cast(), *bytes) };
                Ok(())
            }
            // SAFETY: as above; it is open still.
            Held::Legacy(base, _) => match unsafe { self.backend.close_legacy(*base) } {
                Err(Error::Handle {
                    fault: HandleFault::NotOpen(_),
                    ..
                }) => Ok(()),
                closed => closed,
            },
            // SAFETY: as above; it is held still.
            Held::Retained(retained) => unsafe { self.backend.release_retained(retained) },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::SeqCst;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::backend::testing::{Failing, Hook, Wrapped};
    use crate::device::Device;
    use crate::error::Error;
    use crate::memory::pieces::Piece;
    use crate::memory::region::Region;
    use crate::runtime::reactor::Reactor;
    use crate::shm::page::{PAGE_BYTES, SharedPage};
    use crate::shm::segment::Segment;

    fn is_mapped(address: usize) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let range = |line: &str| {
            let (start, end) = line.split_once(' ')?.0.split_once('-')?;
            let parse = |text| usize::from_str_radix(text, 16).ok();
            Some(parse(start)?..parse(end)?)
        };
        maps.lines()
            .filter_map(range)
            .any(|range| range.contains(&address))
    }

    #[test]
    fn a_forked_child_has_kept_nothing() {
        count_kept(4096);
        assert!(totals().0 > 0);
        crate::hostile::in_a_forked_child(|| totals() == (0, 0));
    }

    /// Refuses to release memory.
    #[derive(Debug, Default)]
    struct Refusing {
        is_on: AtomicBool,
        refusals: AtomicU64,
    }

    impl Hook for Refusing {
        fn before(&self, method: &'static str) -> crate::Result<()> {
            if !(self.is_on.load(SeqCst) && matches!(method, "unregister" | "release")) {
                return Ok(());
            }
            let call = self.refusals.fetch_add(1, SeqCst) + 1;
            Err(Error::injected(method, call))
        }
    }

    fn wait_until(what: &str, is_so: impl Fn() -> bool) {
        let start = Instant::now();
        while !is_so() {
            assert!(start.elapsed() < Duration::from_secs(30), "{what}");
            std::thread::yield_now();
        }
    }

    /// Drops `part` while the device refuses to release memory: it stays, until the device does.
    fn comes_back(hook: &Refusing, place: usize, part: impl FnOnce()) {
        let before = totals();
        hook.refusals.store(0, SeqCst);
        hook.is_on.store(true, SeqCst);
        part();
        wait_until("nobody asks the device again", || {
            retry_all();
            hook.refusals.load(SeqCst) > 1
        });
        wait_until("it is not counted", || {
            let now = totals();
            now.0 > before.0 && now.1 >= before.1 + 4096
        });
        assert!(is_mapped(place), "it was unmapped under the device");
        hook.is_on.store(false, SeqCst);
        wait_until("the device has taken it back", || {
            retry_all();
            !is_mapped(place) && totals() == before
        });
    }

    #[test]
    fn memory_that_a_device_does_not_take_back_stays_mapped_until_it_does() {
        let test = "memory_that_a_device_does_not_take_back_stays_mapped_until_it_does";
        crate::hostile::alone(module_path!(), test, || {
            let hook = Wrapped::new(Device::host().backend().clone(), Refusing::default());
            let device = Device::from_backend(hook.clone());
            let fence_words = SharedPage::private(&device, PAGE_BYTES).unwrap();
            let page = SharedPage::create(Some(&device), 1).unwrap().0;
            let (_made, fd) = Segment::create(&device, 2, [7; 16]).unwrap();
            let segment = Segment::open(&device, fd.as_fd(), 2, 0, [7; 16]).unwrap().0;
            let region = Region::allocate(&device, device.backend().granularity()).unwrap();
            let address = |place: *const u8| place.addr();
            let places = [
                address(std::ptr::from_ref(fence_words.word(0)).cast()),
                address(std::ptr::from_ref(page.at::<AtomicU64>(0)).cast()),
                address(std::ptr::from_ref(segment.header()).cast()),
            ];
            let parts: [Box<dyn FnOnce()>; 3] = [
                Box::new(move || drop(fence_words)),
                Box::new(move || drop(page)),
                Box::new(move || drop(segment)),
            ];
            for (part, place) in parts.into_iter().zip(places) {
                comes_back(hook.hook(), place, part);
            }
            comes_back(hook.hook(), region.ptr() as usize, move || drop(region));
        });
    }

    #[test]
    fn memory_of_others_is_let_go_once_a_device_does_and_what_is_not_open_at_once() {
        let test = "memory_of_others_is_let_go_once_a_device_does_and_what_is_not_open_at_once";
        crate::hostile::alone(module_path!(), test, || {
            let hook = Wrapped::new(Device::host().backend().clone(), Failing::default());
            let device = Device::from_backend(hook.clone());
            let region = Region::allocate(&device, device.backend().granularity()).unwrap();
            let piece = Piece::at(&device, region.ptr()).unwrap();
            let is_kept = |method, part: &mut dyn FnMut()| {
                hook.hook().aim(method, 1);
                part();
                let kept = totals();
                retry_all();
                (kept, totals()) == ((1, 4096), (0, 0))
            };
            let mut piece = Some(piece);
            assert!(is_kept("release_retained", &mut || drop(piece.take())));
            // SAFETY: nothing is open there.
            let mut close = || unsafe { release(device.backend(), Held::Legacy(1, 4096)) };
            assert!(is_kept("close_legacy", &mut close));
        });
    }

    #[test]
    fn the_reaper_asks_again_for_what_a_device_did_not_take_back() {
        let _reactor = Reactor::of_process().unwrap();
        let hook = Wrapped::new(Device::host().backend().clone(), Failing::default());
        let device = Device::from_backend(hook.clone());
        let page = SharedPage::create(Some(&device), 1).unwrap().0;
        let place = std::ptr::from_ref(page.at::<AtomicU64>(0)).addr();
        hook.hook().aim("unregister", 1);
        drop(page);
        wait_until("nobody asks again", || !is_mapped(place));
    }

    /// Refuses to unregister memory once, and panics when it is asked again.
    #[derive(Debug, Default)]
    struct Panicking {
        calls: AtomicU64,
    }

    impl Hook for Panicking {
        fn before(&self, method: &'static str) -> crate::Result<()> {
            if method != "unregister" {
                return Ok(());
            }
            let call = self.calls.fetch_add(1, SeqCst) + 1;
            assert!(call == 1, "the retry panics");
            Err(Error::injected(method, call))
        }
    }

    #[test]
    fn a_device_that_panics_keeps_the_reaper_from_asking_no_other_device() {
        let test = "a_device_that_panics_keeps_the_reaper_from_asking_no_other_device";
        crate::hostile::alone(module_path!(), test, || {
            let _reactor = Reactor::of_process().unwrap();
            let panicking = Wrapped::new(Device::host().backend().clone(), Panicking::default());
            let device = Device::from_backend(panicking.clone());
            drop(SharedPage::create(Some(&device), 1).unwrap().0);
            wait_until("it panics", || panicking.hook().calls.load(SeqCst) == 2);
            let kept = totals();
            let failing = Wrapped::new(Device::host().backend().clone(), Failing::default());
            let device = Device::from_backend(failing.clone());
            let page = SharedPage::create(Some(&device), 1).unwrap().0;
            let place = std::ptr::from_ref(page.at::<AtomicU64>(0)).addr();
            failing.hook().aim("unregister", 1);
            drop(page);
            wait_until("nobody asks again", || !is_mapped(place));
            wait_until("the memory of the other one is counted", || {
                totals() == kept
            });
            assert!(kept.0 == 1);
            assert_eq!(panicking.hook().calls.load(SeqCst), 2);
        });
    }
}
