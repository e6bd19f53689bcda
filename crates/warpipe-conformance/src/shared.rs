//! Memory that two processes write and check with kernels, ordered by the primitive under test
//! only. **This module is marked for unsafe**: it maps memory and hands its addresses to kernels.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::mm::{MapFlags, ProtFlags};
use warpipe::{Device, DevicePtr, Stream};

use crate::PATIENCE;
use crate::payload::{Check, ErrorCounters, fill_words};

/// A memfd's words, mapped and registered with a device.
#[derive(Debug)]
pub struct Shared {
    device: Device,
    base: *mut u8,
    address: DevicePtr,
}

// SAFETY: the words are written and read by kernels alone, from whatever thread launches them.
unsafe impl Send for Shared {}

impl Shared {
    /// How many words there are.
    pub const WORDS: u64 = 8192;

    const BYTES: usize = Shared::WORDS as usize * 8;

    /// Makes it. The descriptor is to be kept while others map it by [`path`](Self::path).
    ///
    /// # Errors
    /// Those of the system and of registering.
    pub fn create(device: &Device) -> Result<(Shared, OwnedFd)> {
        let memory = rustix::fs::memfd_create(c"shared", rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&memory, Shared::BYTES as u64)?;
        Ok((Shared::map(device, &memory)?, memory))
    }

    /// Where another process finds it.
    pub fn path(memory: &OwnedFd) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd())
    }

    /// Maps that of another process.
    ///
    /// # Errors
    /// As for [`create`](Self::create).
    pub fn open(device: &Device, path: &str) -> Result<Shared> {
        let file = File::options()
            .read(true)
            .write(true)
            .open(path)
            .context("opening shared memory")?;
        ensure!(
            file.metadata()?.len() == Shared::BYTES as u64,
            "shared memory of the right length"
        );
        Shared::map(device, file)
    }

    fn map(device: &Device, file: impl AsFd) -> Result<Shared> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                Shared::BYTES,
                protection,
                MapFlags::SHARED,
                file,
                0,
            )
        };
        let base = base.context("mapping shared memory")?.cast::<u8>();
        // SAFETY: page-aligned mapped memory that stays until `drop` has unregistered it. On an
        // error the process is about to end and the mapping with it.
        let address = unsafe { device.backend().register(base, Shared::BYTES)? };
        Ok(Shared {
            device: device.clone(),
            base,
            address,
        })
    }

    /// Enqueues a kernel that writes the pattern of `seed` into all words, `slow` late.
    ///
    /// # Errors
    /// Those of a launch.
    pub fn write(&self, stream: &Stream, seed: u64, slow: Duration) -> Result<()> {
        // SAFETY: the words stay mapped until the stream has passed: every user synchronises it
        // before this is dropped, or ends its process. That nothing else writes them meanwhile is
        // what the cases try.
        unsafe { fill_words(stream, self.address, Shared::WORDS, seed, slow)? };
        Ok(())
    }

    /// Enqueues a kernel that checks all words.
    ///
    /// # Errors
    /// Those of a launch.
    pub fn check(
        &self,
        error_counters: &mut ErrorCounters,
        stream: &Stream,
        seed: u64,
    ) -> Result<Check> {
        // SAFETY: as for `write`.
        Ok(unsafe { error_counters.check(stream, self.address, Shared::WORDS, seed)? })
    }

    /// Checks all words behind the stream's work, and says how many were wrong.
    ///
    /// # Errors
    /// As for [`check`](Self::check); the stream does not end.
    pub fn wrong(
        &self,
        error_counters: &mut ErrorCounters,
        stream: &Stream,
        seed: u64,
    ) -> Result<u64> {
        let check = self.check(error_counters, stream, seed)?;
        stream.synchronize(PATIENCE)?;
        Ok(error_counters.wrong_words(check))
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: registered and mapped once in `map`; see `write` for why no stream uses it any
        // more.
        unsafe {
            if self.device.backend().unregister(self.base).is_ok() {
                let _ = rustix::mm::munmap(self.base.cast(), Shared::BYTES);
            }
        }
    }
}
