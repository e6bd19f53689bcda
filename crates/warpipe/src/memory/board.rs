//! Timeline words of one process alone: one per slot, reached when the work that filled the slot is done.
//! **This module is marked for unsafe**: it maps and registers memory.

use rustix::mm::{MapFlags, ProtFlags};

use crate::backend::{DevicePtr, TimelineWord, kept};
use crate::device::Device;
use crate::error::{Error, Result};

/// A row of registered words.
#[derive(Debug)]
pub(crate) struct Board {
    device: Device,
    base: *mut TimelineWord,
    device_ptr: DevicePtr,
    words: usize,
}

// SAFETY: the words are atomics at a fixed address until drop.
unsafe impl Send for Board {}
// SAFETY: as above.
unsafe impl Sync for Board {}

impl Board {
    /// `words` words at zero, registered with the device.
    pub(crate) fn new(device: &Device, words: usize) -> Result<Board> {
        let bytes = (words * size_of::<TimelineWord>()).next_multiple_of(4096);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED) };
        let base = base.map_err(|e| Error::os("mmap", format!("{words} timeline words"), e))?;
        // SAFETY: page-aligned mapped memory, unmapped only after `unregister` (see `Drop`).
        match unsafe { device.backend().register(base.cast(), bytes) } {
            Ok(device_ptr) => Ok(Board { device: device.clone(), base: base.cast(), device_ptr, words }),
            Err(error) => {
                // SAFETY: exactly what was mapped above, and nobody has seen it.
                let _ = unsafe { rustix::mm::munmap(base, bytes) };
                Err(error)
            }
        }
    }

    pub(crate) fn word(&self, index: usize) -> &TimelineWord {
        assert!(index < self.words, "a slot's number is below the board's length");
        // SAFETY: index < words, and the mapping of that many zeroed words lives as long as self.
        unsafe { &*self.base.add(index) }
    }

    pub(crate) fn device_word(&self, index: usize) -> DevicePtr {
        self.device_ptr + (index * size_of::<TimelineWord>()) as u64
    }
}

impl Drop for Board {
    fn drop(&mut self) {
        let bytes = (self.words * size_of::<TimelineWord>()).next_multiple_of(4096);
        // SAFETY: registered and mapped in `new`, once each; the owner drops the board only when every signal
        // that it enqueued has been executed.
        unsafe {
            if kept::unregister(&**self.device.backend(), self.base.cast(), bytes) {
                let _ = rustix::mm::munmap(self.base.cast(), bytes);
            }
        }
    }
}
