//! Timeline words in memory that two processes share, below any channel.
//! **This module is marked for unsafe**: it maps memory and hands its addresses to streams.

use std::os::fd::AsFd;

use anyhow::{Context as _, Result};
use rustix::mm::{MapFlags, ProtFlags};
use warpipe::backend::{StreamOp, TimelineWord};
use warpipe::{Device, DevicePtr, Stream};

/// Two words: one that the case signals and its peer waits for, and one the other way.
#[derive(Debug)]
pub struct Words {
    device: Device,
    base: *mut u8,
    address: DevicePtr,
}

impl Words {
    /// The mapped length of the file, in bytes.
    pub const BYTES: usize = 4096;

    /// Maps a file of [`Words::BYTES`] bytes and registers it with the device.
    ///
    /// # Errors
    /// Those of `mmap`, or of registering.
    pub fn map(device: &Device, file: impl AsFd) -> Result<Words> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                Words::BYTES,
                protection,
                MapFlags::SHARED,
                file,
                0,
            )
        };
        let base = base.context("mapping the words")?.cast::<u8>();
        // SAFETY: page-aligned mapped memory that stays until `drop` has unregistered it. On an
        // error the process is about to end and the mapping with it.
        let address = unsafe { device.backend().register(base, Words::BYTES)? };
        Ok(Words {
            device: device.clone(),
            base,
            address,
        })
    }

    /// Enqueues `rounds` turns of a game of ping-pong: this side's streams signal one word and wait
    /// for the other. With `begins` this side begins with a signal, else with a wait.
    ///
    /// # Errors
    /// Those of the device.
    pub fn play(&self, stream: &Stream, rounds: u64, begins: bool) -> Result<()> {
        let word = |index: usize| self.address + (index * size_of::<TimelineWord>()) as u64;
        let (own, other) = if begins { (0, 1) } else { (1, 0) };
        for value in 1..=rounds {
            let (signal, wait) = (
                StreamOp::Signal {
                    word: word(own),
                    value,
                },
                StreamOp::Wait {
                    word: word(other),
                    value,
                },
            );
            let ops = if begins {
                [signal, wait]
            } else {
                [wait, signal]
            };
            // SAFETY: the stream is live, and the words stay registered until it has passed: every
            // player synchronises his stream before the words are dropped, or ends his process.
            unsafe { self.device.backend().batch(stream.raw(), &ops)? };
        }
        Ok(())
    }

    /// Both words' values now.
    pub fn values(&self) -> [u64; 2] {
        // SAFETY: both words lie in the mapping, which is zeroed at first, and consist of atomics.
        [0, 1].map(|index| unsafe { (*self.base.cast::<TimelineWord>().add(index)).load() })
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: registered and mapped once in `map`; see `play` for why no stream uses them any
        // more.
        unsafe {
            if self.device.backend().unregister(self.base).is_ok() {
                let _ = rustix::mm::munmap(self.base.cast(), Words::BYTES);
            }
        }
    }
}
