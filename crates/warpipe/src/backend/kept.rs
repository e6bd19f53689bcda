//! Memory that stays because a device did not take it back. **This module is marked for unsafe**: it unregisters memory.
//!
//! What a driver refuses to unregister it may still use, so it must not be unmapped: it stays until the process ends, and is
//! counted ([`process_stats`](crate::process_stats)).

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use super::Backend;
use crate::fork::own::Own;

/// How many, and their bytes. A forked child has kept nothing.
static KEPT: Own<[AtomicU64; 2]> = Own::new();

/// How many mappings and regions stay, and their bytes.
pub(crate) fn kept() -> (u64, u64) {
    let [count, bytes] = KEPT.get();
    (count.load(Relaxed), bytes.load(Relaxed))
}

/// Counts memory that a device did not take back.
pub(crate) fn keep(bytes: u64) {
    let [count, all] = KEPT.get();
    count.fetch_add(1, Relaxed);
    all.fetch_add(bytes, Relaxed);
}

/// [`Backend::unregister`]. True if the memory may be unmapped; else it is counted as kept, and must stay.
///
/// # Safety
/// As for [`Backend::unregister`].
#[must_use]
pub(crate) unsafe fn unregister(backend: &dyn Backend, base: *mut u8, bytes: usize) -> bool {
    // SAFETY: the caller's promise.
    let is_free = unsafe { backend.unregister(base) }.is_ok();
    if !is_free {
        keep(bytes as u64);
    }
    is_free
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::backend::testing::{Failing, Wrapped};
    use crate::device::Device;
    use crate::link::segment::Segment;
    use crate::memory::board::Board;
    use crate::memory::page::Page;

    fn is_mapped(address: usize) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let range = |line: &str| {
            let (start, end) = line.split_once(' ')?.0.split_once('-')?;
            let parse = |text| usize::from_str_radix(text, 16).ok();
            Some(parse(start)?..parse(end)?)
        };
        maps.lines().filter_map(range).any(|range| range.contains(&address))
    }

    #[test]
    fn a_forked_child_has_kept_nothing() {
        keep(4096);
        assert!(kept().0 > 0);
        crate::hostile::in_a_forked_child(|| kept() == (0, 0));
    }

    #[test]
    fn memory_that_a_device_does_not_take_back_stays_mapped() {
        let hook = Wrapped::new(Device::host().backend().clone(), Failing::default());
        let device = Device::from_backend(hook.clone());
        let board = Board::new(&device, 1).unwrap();
        let page = Page::create(Some(&device), 1).unwrap().0;
        let (_made, fd) = Segment::create(&device, 2, [7; 16]).unwrap();
        let segment = Segment::open(&device, fd.as_fd(), 2, [7; 16]).unwrap();
        let address = |place: *const u8| place.addr();
        let places = [
            address(std::ptr::from_ref(board.word(0)).cast()),
            address(std::ptr::from_ref(page.at::<AtomicU64>(0)).cast()),
            address(std::ptr::from_ref(segment.header()).cast()),
        ];
        let parts: [Box<dyn FnOnce()>; 3] =
            [Box::new(move || drop(board)), Box::new(move || drop(page)), Box::new(move || drop(segment))];
        for (part, place) in parts.into_iter().zip(places) {
            let before = kept();
            hook.hook().aim("unregister", 1);
            part();
            assert!(hook.hook().has_struck());
            assert!(is_mapped(place), "it was unmapped under the device");
            let after = kept();
            assert!(after.0 > before.0 && after.1 >= before.1 + 4096);
        }
    }
}
