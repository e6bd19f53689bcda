//! Stand-in for a page of shared words: zeros on the heap.

use std::alloc::Layout;

use crate::atomic::{AtomicU32, AtomicU64};
use crate::backend::{DevicePtr, TimelineWord};

pub(crate) const PAGE_BYTES: usize = 4096;

/// What may lie in shared memory.
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

pub(crate) struct SharedPage {
    base: *mut u8,
    bytes: usize,
}

/// Not where it lies: states are compared by what is printed of them.
impl std::fmt::Debug for SharedPage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.bytes)
    }
}

// SAFETY: memory of atomics alone, at a fixed address until drop.
unsafe impl Send for SharedPage {}
// SAFETY: as above.
unsafe impl Sync for SharedPage {}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, PAGE_BYTES).expect("a page")
}

impl SharedPage {
    pub(crate) fn new(bytes: usize) -> SharedPage {
        let bytes = bytes.next_multiple_of(PAGE_BYTES);
        // SAFETY: of more than no bytes.
        SharedPage {
            base: unsafe { std::alloc::alloc_zeroed(layout(bytes)) },
            bytes,
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn at<T: AtomicsOnly>(&self, offset: usize) -> &T {
        assert!(offset.is_multiple_of(align_of::<T>()) && offset + size_of::<T>() <= self.bytes);
        // SAFETY: inside the allocation and aligned; of atomics for which every bit pattern is
        // valid (`AtomicsOnly`).
        unsafe { &*self.base.add(offset).cast::<T>() }
    }

    pub(crate) fn device_ptr(&self, _: usize) -> Option<DevicePtr> {
        None
    }
}

impl Drop for SharedPage {
    fn drop(&mut self) {
        // SAFETY: what `new` allocated.
        unsafe { std::alloc::dealloc(self.base, layout(self.bytes)) };
    }
}
