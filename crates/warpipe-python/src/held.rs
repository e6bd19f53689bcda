//! Memory of the library's that Python holds, and who uses it.
//! **This module is marked for unsafe**: it copies from and to such memory by address.

use std::sync::{LazyLock, OnceLock};
use std::time::Duration;

use pyo3::prelude::*;
use warpipe::backend::{Access, DevicePtr};

use crate::away::{OwnStream, away};
use crate::copies::{Copies, Target};
use crate::errors::{Fault, Outcome};
use crate::process::Home;
use crate::rows::room_for;
use crate::stream::{Consumer, Consumers};
use crate::wait::{in_slices, late, none_if_late};

/// How long the CPU waits for the streams that use memory, where nobody says.
const PATIENCE: Duration = Duration::from_secs(10);

/// Foreign tensors that streams copy into memory of any holder.
pub static COPIES: LazyLock<Copies> = LazyLock::new(Copies::default);

/// What is held.
#[derive(Debug)]
pub enum Place {
    Own(warpipe::Memory),
    Shared(warpipe::SharedMemory),
    Legacy(warpipe::LegacyMemory),
    Block(warpipe::Buffer),
    Lent(warpipe::LentBuffer),
    /// What no descriptor names: of the tests.
    Plain(Plain),
}

/// An allocation as another allocator makes it, for tests.
#[derive(Debug)]
pub struct Plain {
    device: warpipe::Device,
    ptr: DevicePtr,
    bytes: u64,
}

impl Plain {
    /// Allocates it.
    pub fn allocate(device: &warpipe::Device, bytes: u64) -> Outcome<Plain> {
        Ok(Plain { device: device.clone(), ptr: device.backend().allocate_plain(bytes)?, bytes })
    }

    /// Its first byte's address.
    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        // SAFETY: allocated above, freed once; whoever holds it has waited for the streams that used it.
        let _ = unsafe { self.device.backend().free_plain(self.ptr) };
    }
}

/// Memory that is let go behind all who used it, when the last array made of it has gone. That may be on any thread, and
/// without the interpreter.
#[derive(Debug)]
pub struct Held {
    home: Home,
    device: warpipe::Device,
    consumers: Consumers,
    /// For copies that come without a stream; made by the first.
    own: OnceLock<OwnStream>,
    /// `None` only while dropping.
    place: Option<Place>,
}

impl Place {
    /// Its first byte's address.
    pub fn ptr(&self) -> DevicePtr {
        match self {
            Place::Own(memory) => memory.ptr(),
            Place::Shared(memory) => memory.ptr(),
            Place::Legacy(memory) => memory.ptr(),
            Place::Block(block) => block.ptr(),
            Place::Lent(block) => block.ptr(),
            Place::Plain(plain) => plain.ptr,
        }
    }

    /// Its length.
    pub fn bytes(&self) -> u64 {
        match self {
            Place::Own(memory) => memory.bytes(),
            Place::Shared(memory) => memory.bytes(),
            Place::Legacy(memory) => memory.bytes(),
            Place::Block(block) => block.bytes(),
            Place::Lent(block) => block.bytes(),
            Place::Plain(plain) => plain.bytes,
        }
    }

    /// The device that it is mapped on.
    pub fn device(&self) -> &warpipe::Device {
        match self {
            Place::Own(memory) => memory.device(),
            Place::Shared(memory) => memory.device(),
            Place::Legacy(memory) => memory.device(),
            Place::Block(block) => block.device(),
            Place::Lent(block) => block.device(),
            Place::Plain(plain) => &plain.device,
        }
    }

    /// Whether it may only be read.
    pub fn is_read_only(&self) -> bool {
        match self {
            Place::Shared(memory) => memory.access() == Access::Read,
            Place::Lent(block) => block.access() == Access::Read,
            _ => false,
        }
    }

    fn used_on(&self, stream: &warpipe::Stream) -> Outcome<()> {
        match self {
            Place::Own(memory) => memory.used_on(stream),
            Place::Shared(memory) => memory.used_on(stream),
            Place::Legacy(memory) => memory.used_by(stream)?,
            Place::Block(block) => block.used_on(stream),
            Place::Lent(block) => block.used_on(stream),
            Place::Plain(_) => {}
        }
        Ok(())
    }

    /// Lets it go behind `stream`, which is behind all who used it.
    fn let_go(self, stream: &warpipe::Stream) {
        // A stream that cannot be told of a block has lost its context, and all memory with it.
        match self {
            Place::Block(block) => drop(block.free(stream)),
            Place::Lent(block) => drop(block.free(stream)),
            Place::Plain(plain) => {
                if stream.synchronize(PATIENCE).is_err() {
                    std::mem::forget(plain);
                }
            }
            other => {
                if other.used_on(stream).is_err() {
                    std::mem::forget(other);
                }
            }
        }
    }
}

impl Held {
    /// Takes it over.
    pub fn new(place: Place) -> Held {
        let (device, own, consumers) = (place.device().clone(), OnceLock::new(), Consumers::default());
        Held { home: Home::here(), device, consumers, own, place: Some(place) }
    }

    /// What it is.
    pub fn place(&self) -> &Place {
        self.place.as_ref().expect("present until dropped")
    }

    /// A stream for copies of ours, behind all who used the memory so far. For who does not have the interpreter.
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

    /// The stream that copies of ours may still be on; none if they are done. For who does not have the interpreter.
    pub fn copying(&self) -> Outcome<Option<&warpipe::Stream>> {
        let Some(own) = self.own.get() else { return Ok(None) };
        Ok(if own.is_idle()? { None } else { Some(own) })
    }

    /// Lets `consumer` use the memory: it is behind copies of ours, and from now on the memory is not let go before it is
    /// past its work. Its stream lasts until then.
    pub fn admit(&self, py: Python<'_>, consumer: &Consumer) -> Outcome<()> {
        self.home.check()?;
        self.consumers.note(consumer);
        py.detach(|| self.hold_back(consumer))
    }

    /// Who is asked before it is let go.
    pub fn consumers(&self) -> &Consumers {
        &self.consumers
    }

    /// Puts `consumer` behind copies of ours. For who does not have the interpreter.
    pub fn hold_back(&self, consumer: &Consumer) -> Outcome<()> {
        self.home.check()?;
        self.place().used_on(consumer.linked())?;
        if let Some(own) = self.copying()?.filter(|own| own.raw() != consumer.linked().raw()) {
            consumer.linked().wait_for(own)?;
            consumer.led()?;
        }
        Ok(())
    }

    /// Waits on the CPU until all who used it are done with what they were given so far.
    pub fn settle(&self, py: Python<'_>, timeout: Option<Duration>) -> PyResult<()> {
        self.home.check()?;
        let followed = py.detach(|| self.consumers.followed())?;
        followed.iter().try_for_each(|stream| await_stream(py, stream, timeout))
    }

    /// [`settle`](Self::settle), where nobody says how long.
    pub fn settle_soon(&self, py: Python<'_>) -> PyResult<()> {
        self.settle(py, Some(PATIENCE))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let Some(place) = self.place.take() else { return };
        if !self.home.is_here() {
            // The library keeps the parent's memory out of the child's hands; a test's is the parent's to free.
            return if let Place::Plain(_) = place { std::mem::forget(place) } else { drop(place) };
        }
        away(|| match self.consumers.joined() {
            Ok(None) => drop(place),
            Ok(Some(stream)) => place.let_go(&stream),
            // The device does not say when the users are done: the memory must stay.
            Err(_) => std::mem::forget(place),
        });
    }
}

/// Waits on the CPU until a copy of ours is done, and what it is behind.
pub fn await_copy(py: Python<'_>, stream: &warpipe::Stream) -> PyResult<()> {
    await_stream(py, stream, Some(PATIENCE))
}

fn await_stream(py: Python<'_>, stream: &warpipe::Stream, timeout: Option<Duration>) -> PyResult<()> {
    let done = in_slices(py, timeout, |slice| none_if_late(stream.synchronize(slice)))?;
    Ok(done.ok_or_else(|| late("the end of the work on this memory".into(), timeout))?)
}

/// A range of memory that is written now.
#[derive(Debug, Clone, Copy)]
pub struct Range<'a> {
    device: &'a warpipe::Device,
    lowest: DevicePtr,
    bytes: u64,
}

impl<'a> Range<'a> {
    /// # Safety
    /// `bytes` bytes from `lowest` on are memory of `device` that may be written, and stay until all streams that are
    /// given copies to them are past those.
    pub unsafe fn new(device: &'a warpipe::Device, lowest: DevicePtr, bytes: u64) -> Range<'a> {
        Range { device, lowest, bytes }
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
        // Who has the same memory by a ticket has it at other addresses.
        false
    }

    fn write(&mut self, stream: &warpipe::Stream, bytes: &[u8]) -> Outcome<()> {
        if bytes.len() as u64 != self.bytes {
            return Err(Fault::layout(format!("{} bytes for {}", bytes.len(), self.bytes)));
        }
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the range is writable and as long, and stays until the stream is past the copy (`Range::new`).
        Ok(unsafe { self.device.backend().upload(stream.raw(), self.lowest, bytes) }?)
    }
}

/// A copy on the host of memory that nobody writes any more.
///
/// # Safety
/// `bytes` bytes from `lowest` on are memory of `device` that can be read during the call.
pub unsafe fn download(device: &warpipe::Device, lowest: DevicePtr, bytes: u64) -> Outcome<Vec<u8>> {
    let mut copy = room_for(bytes)?;
    copy.resize(bytes as usize, 0);
    if bytes > 0 {
        // Not a stream of the user's: that may be stuck behind something else, and this must not be.
        let stream = device.stream()?;
        // SAFETY: the stream is live and has nothing else to do; the range is the caller's promise.
        unsafe { device.backend().download(stream.raw(), &mut copy, lowest)? };
    }
    Ok(copy)
}
