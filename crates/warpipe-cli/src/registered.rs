//! A page of host memory that the device's work can reach: words to order by, and counters.
//! **This module is marked for unsafe**: it maps and registers memory.

use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use warpipe::backend::TimelineWord;
use warpipe::{Device, DevicePtr};

const PAGE_BYTES: usize = 65_536;

/// Zeroed memory, registered with a device (`cuMemHostRegister`) until it is dropped.
#[derive(Debug)]
pub struct RegisteredPage {
    device: Device,
    page: NonNull<u8>,
    address: DevicePtr,
}

// SAFETY: what is shared are its words, which are atomics at a fixed address, and that address.
unsafe impl Sync for RegisteredPage {}

impl RegisteredPage {
    /// Maps and registers one page.
    pub fn new(device: &Device) -> anyhow::Result<RegisteredPage> {
        // SAFETY: a null hint lets the kernel choose the place, so nothing mapped is touched.
        let mapped = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                PAGE_BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
            )
        }?;
        let page = NonNull::new(mapped.cast::<u8>())
            .ok_or_else(|| anyhow::anyhow!("mmap gave the null page"))?;
        // SAFETY: the page was mapped above, is page-aligned, and stays until `drop`, which
        // unregisters it first.
        match unsafe { device.backend().register(page.as_ptr(), PAGE_BYTES) } {
            Ok(address) => Ok(RegisteredPage {
                device: device.clone(),
                page,
                address,
            }),
            Err(error) => {
                // SAFETY: mapped above, and known to nobody else.
                let _ = unsafe { munmap(mapped, PAGE_BYTES) };
                Err(error.into())
            }
        }
    }

    /// The word at `index`, as the CPU sees it.
    pub fn word(&self, index: usize) -> &TimelineWord {
        assert!(
            index < PAGE_BYTES / size_of::<TimelineWord>(),
            "a page has no word {index}"
        );
        // SAFETY: in bounds by the line above, aligned because the page is, zeroed or written as a
        // word ever since, and mapped as long as self.
        unsafe { self.page.cast::<TimelineWord>().add(index).as_ref() }
    }

    /// The same word's address for the device. Work that uses it must be done before this page is
    /// dropped.
    pub fn address(&self, index: usize) -> DevicePtr {
        self.address + (index * size_of::<TimelineWord>()) as u64
    }
}

impl Drop for RegisteredPage {
    fn drop(&mut self) {
        // SAFETY: registered in `new`; the caller that enqueued work on it has promised that it is done.
        if unsafe { self.device.backend().unregister(self.page.as_ptr()) }.is_ok() {
            // SAFETY: mapped in `new`, of this size, and no longer registered.
            let _ = unsafe { munmap(self.page.as_ptr().cast(), PAGE_BYTES) };
        }
    }
}
