//! Memory of the library that Python holds, and the streams that use it.
//! **This module is marked for unsafe**: it copies from and to such memory by address.

use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use pyo3::prelude::*;
use warpipe::backend::{Access, DevicePtr, room_for};
use warpipe::weights::{HeldVersion, SharedWeights};

use crate::copies::Target;
use crate::detached::{OwnStream, detached};
use crate::errors::{Fault, Outcome};
use crate::exclusive::locked;
use crate::process::Home;
use crate::stream::{Consumer, Consumers};
use crate::wait::awaited;

/// The default limit of the CPU's wait for the streams that use memory.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// The kinds of memory.
#[derive(Debug)]
pub enum OwnedMemory {
    Own(warpipe::Memory),
    Shared(warpipe::SharedMemory),
    Legacy(warpipe::LegacyMemory),
    Block(warpipe::Buffer),
    Lent(warpipe::LentBuffer),
    /// With this process's place among the holders of the version.
    Weights(OpenWeights),
    /// Memory without a descriptor, for tests.
    Malloc(DeviceMalloc),
}

/// The version of weights that lies at some addresses now: a follower takes others there.
#[derive(Debug)]
pub struct OpenWeights(pub Mutex<SharedWeights>);

impl OpenWeights {
    /// The version that is there now.
    pub fn now(&self) -> SharedWeights {
        locked(&self.0).clone()
    }

    /// Takes the version `next` at these addresses if there is one that is later than the one that is
    /// there: as `Follower::update`. Another thread's call is waited for. Call without the
    /// interpreter.
    pub fn take(
        &self,
        next: Option<&HeldVersion>,
        stream: &warpipe::Stream,
        timeout: Duration,
    ) -> Result<Option<u64>, warpipe::Error> {
        let mut now = locked(&self.0);
        let mut follower = now.clone().follow();
        if !now.is_whole() {
            // An earlier call could not.
            follower.take(&now, stream, timeout)?;
        }
        // Another thread may have taken this version meanwhile, or a later one.
        let Some(next) = next.filter(|next| next.number() > now.info().version) else {
            return Ok(None);
        };
        let number = follower.take_held(next, stream, timeout)?;
        *now = follower.weights().clone();
        Ok(Some(number))
    }
}

/// An allocation as another allocator makes it, for tests.
#[derive(Debug)]
pub struct DeviceMalloc {
    device: warpipe::Device,
    ptr: DevicePtr,
    bytes: u64,
}

impl DeviceMalloc {
    /// Allocates it.
    pub fn allocate(device: &warpipe::Device, bytes: u64) -> Outcome<DeviceMalloc> {
        Ok(DeviceMalloc {
            device: device.clone(),
            ptr: device.backend().allocate_plain(bytes)?,
            bytes,
        })
    }
}

impl Drop for DeviceMalloc {
    fn drop(&mut self) {
        // SAFETY: allocated above, freed once; the owner of this value has waited for the streams
        // that used it.
        let _ = unsafe { self.device.backend().free_plain(self.ptr) };
    }
}

/// Memory that is released after all its users when the last array of it is dropped. That may be on
/// any thread, and without the interpreter.
#[derive(Debug)]
pub struct MemoryOwner {
    home: Home,
    device: warpipe::Device,
    /// The users that are asked before it is released.
    pub consumers: Consumers,
    /// The stream of copies without a stream of their own; the first such copy makes it.
    own: OnceLock<OwnStream>,
    /// `None` only while dropping.
    memory: Option<OwnedMemory>,
}

/// What memory is made of.
enum Parts<'a> {
    /// One range, which the library keeps mapped for its streams.
    One(&'a warpipe::DeviceSlice),
    Weights(&'a OpenWeights),
    Malloc(&'a DeviceMalloc),
}

impl OwnedMemory {
    fn parts(&self) -> Parts<'_> {
        match self {
            OwnedMemory::Own(inner) => Parts::One(inner),
            OwnedMemory::Shared(inner) => Parts::One(inner),
            OwnedMemory::Legacy(inner) => Parts::One(inner),
            OwnedMemory::Block(block) => Parts::One(block),
            OwnedMemory::Lent(block) => Parts::One(block),
            OwnedMemory::Weights(weights) => Parts::Weights(weights),
            OwnedMemory::Malloc(malloc) => Parts::Malloc(malloc),
        }
    }

    /// The address of the first byte, the length in bytes, and whether it may only be read: of
    /// weights, which may lie in several ranges, nothing.
    pub fn range(&self) -> (DevicePtr, u64, bool) {
        match self.parts() {
            Parts::One(slice) => (slice.ptr(), slice.bytes(), slice.access == Access::Read),
            Parts::Weights(_) => (0, 0, true),
            Parts::Malloc(malloc) => (malloc.ptr, malloc.bytes, false),
        }
    }

    /// The device that it is mapped on.
    pub fn device(&self) -> warpipe::Device {
        match self.parts() {
            Parts::One(slice) => slice.device().clone(),
            Parts::Weights(weights) => weights.now().device().clone(),
            Parts::Malloc(malloc) => malloc.device.clone(),
        }
    }

    fn used_on(&self, stream: &warpipe::Stream) {
        match self.parts() {
            Parts::One(slice) => slice.used_on(stream),
            Parts::Weights(weights) => {
                let now = weights.now();
                now.parts().for_each(|(_, part)| part.used_on(stream));
            }
            Parts::Malloc(_) => {}
        }
    }

    /// Releases it after `stream`, which is after all users.
    fn release_on(self, stream: &warpipe::Stream) {
        // A stream that a block cannot be ordered after has lost its context, and all memory with
        // it.
        match self {
            OwnedMemory::Block(block) => drop(block.free(stream)),
            OwnedMemory::Lent(block) => drop(block.free(stream)),
            OwnedMemory::Malloc(malloc) => {
                if stream.synchronize(DEFAULT_TIMEOUT).is_err() {
                    std::mem::forget(malloc);
                }
            }
            other => other.used_on(stream),
        }
    }
}

impl MemoryOwner {
    /// Wraps memory.
    pub fn new(memory: OwnedMemory) -> MemoryOwner {
        MemoryOwner {
            home: Home::here(),
            device: memory.device(),
            consumers: Consumers::default(),
            own: OnceLock::new(),
            memory: Some(memory),
        }
    }

    /// The memory.
    pub fn memory(&self) -> &OwnedMemory {
        self.memory.as_ref().expect("present until dropped")
    }

    /// A stream for this package's copies, after all users so far. Call without the interpreter.
    pub fn stream(&self) -> Outcome<&warpipe::Stream> {
        self.home.check()?;
        let own = match self.own.get() {
            Some(own) => own,
            None => {
                let made = self.device.stream()?;
                self.own.get_or_init(|| OwnStream::of(made))
            }
        };
        for other in self.consumers.followed()? {
            own.wait_for(&other)?;
        }
        Ok(own)
    }

    /// The stream that this package's copies may still be on; none if they are done. Call without
    /// the interpreter.
    pub fn copying(&self) -> Outcome<Option<&warpipe::Stream>> {
        let Some(own) = self.own.get() else {
            return Ok(None);
        };
        Ok(if own.is_idle()? { None } else { Some(own) })
    }

    /// Lets `consumer` use the memory: orders it after this package's copies, and the memory's
    /// release after its work. Its stream lasts until then.
    pub fn admit(&self, py: Python<'_>, consumer: &Consumer) -> Outcome<()> {
        self.home.check()?;
        self.consumers.note(consumer);
        py.detach(|| self.fence(consumer))
    }

    /// Orders `consumer` after this package's copies. Call without the interpreter.
    pub fn fence(&self, consumer: &Consumer) -> Outcome<()> {
        self.home.check()?;
        self.memory().used_on(consumer.linked());
        let copying = self.copying()?;
        if let Some(own) = copying.filter(|own| own.raw() != consumer.linked().raw()) {
            consumer.linked().wait_for(own)?;
            consumer.led()?;
        }
        Ok(())
    }

    /// Waits on the CPU until all users are done with the work that they were given so far.
    pub fn settle(&self, py: Python<'_>, timeout: Option<Duration>) -> PyResult<()> {
        self.home.check()?;
        let followed = py.detach(|| self.consumers.followed())?;
        let mut all = followed.iter();
        all.try_for_each(|stream| await_stream(py, stream, timeout))
    }
}

impl Drop for MemoryOwner {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else {
            return;
        };
        if !self.home.is_here() {
            // The library keeps the parent's memory away from the child; a test's allocation is the
            // parent's to free.
            return if let OwnedMemory::Malloc(_) = memory {
                std::mem::forget(memory)
            } else {
                drop(memory)
            };
        }
        detached(|| match self.consumers.joined() {
            Ok(None) => drop(memory),
            Ok(Some(stream)) => memory.release_on(&stream),
            // The device does not report when the users are done: the memory must stay.
            Err(_) => std::mem::forget(memory),
        });
    }
}

/// Waits on the CPU until `stream` has done the work that it was given so far.
pub fn await_stream(
    py: Python<'_>,
    stream: &warpipe::Stream,
    timeout: Option<Duration>,
) -> PyResult<()> {
    awaited(py, timeout, |wait| stream.synchronize(wait))
}

/// A range of memory that is the target of a write.
#[derive(Debug, Clone, Copy)]
pub struct Range<'a> {
    device: &'a warpipe::Device,
    lowest: DevicePtr,
    bytes: u64,
}

impl<'a> Range<'a> {
    /// # Safety
    /// `bytes` bytes from `lowest` on are memory of `device` that may be written, and stay until
    /// all streams that are given copies to them are past those.
    pub unsafe fn new(device: &'a warpipe::Device, lowest: DevicePtr, bytes: u64) -> Range<'a> {
        Range {
            device,
            lowest,
            bytes,
        }
    }
}

impl Target for Range<'_> {
    fn lowest(&self) -> DevicePtr {
        self.lowest
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn is_private(&self) -> bool {
        // Another mapping of the same memory, opened by a ticket, has other addresses.
        false
    }

    fn write(&mut self, stream: &warpipe::Stream, bytes: &[u8]) -> Outcome<()> {
        if bytes.len() as u64 != self.bytes {
            let said = format!("{} bytes for {}", bytes.len(), self.bytes);
            return Err(Fault::layout(said));
        }
        if bytes.is_empty() {
            return Ok(());
        }
        let backend = self.device.backend();
        // SAFETY: the range is writable and as long, and stays until the stream is past the copy
        // (`Range::new`).
        Ok(unsafe { backend.upload(stream.raw(), self.lowest, bytes) }?)
    }

    /// It does not go back: see [`Range::new`].
    fn stay_behind(&mut self, _: &warpipe::Stream) {}
}

/// A copy on the host of memory that has no writer any more.
///
/// `used_on` is called with a stream that may still read them: a copy that was not done in time.
///
/// # Safety
/// `bytes` bytes from `lowest` on are memory of `device` that can be read during the call, and, once
/// `used_on` has been called, until its stream is past its work.
pub unsafe fn download(
    device: &warpipe::Device,
    lowest: DevicePtr,
    bytes: u64,
    used_on: impl FnOnce(&warpipe::Stream),
) -> Outcome<Vec<u8>> {
    let mut copy = room_for(bytes)?;
    copy.resize(bytes as usize, 0);
    if bytes > 0 {
        // Not a stream of the user: its work may be blocked, and this copy must not be.
        let stream = device.stream()?;
        // SAFETY: the stream is live and has nothing else to do; the range is the caller's promise.
        let copied = unsafe { device.backend().download(stream.raw(), &mut copy, lowest) };
        if copied.is_err() {
            used_on(&stream);
        }
        copied?;
    }
    Ok(copy)
}
