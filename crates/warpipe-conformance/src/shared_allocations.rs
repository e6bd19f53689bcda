//! Memory of another allocator, shared by its process. **This module is marked for unsafe**: it
//! shares addresses.

use std::sync::mpsc::Sender;
use std::time::Duration;

use anyhow::{Result, ensure};
use warpipe::{AllocationServer, Device, DevicePtr, Stream};

use crate::PATIENCE;
use crate::context::{Backend, Context};
use crate::device_malloc::{DeviceMalloc, OFFSET};
use crate::expandable_segment::ExpandableSegment;
use crate::payload::fill_words;

/// The pieces of a segment.
const PIECES: u64 = 3;

/// Memory that the library did not allocate, as far as a server can see. Says so when it is freed.
pub struct ForeignMemory {
    /// Where its words begin.
    pub ptr: DevicePtr,
    words: u64,
    _memory: Allocator,
    _freed: Sender<()>,
}

enum Allocator {
    Malloc { _memory: DeviceMalloc },
    Segment { _memory: ExpandableSegment },
}

impl ForeignMemory {
    /// `cudaMalloc` memory with words of a pattern, which are written late.
    ///
    /// # Errors
    /// Those of the device.
    pub fn malloc(device: &Device, words: u64, freed: Sender<()>) -> Result<ForeignMemory> {
        let memory = DeviceMalloc::new(device, words, 0)?;
        Ok(ForeignMemory {
            ptr: memory.ptr + OFFSET,
            words,
            _memory: Allocator::Malloc { _memory: memory },
            _freed: freed,
        })
    }

    /// A part of an expandable segment, over all of its pieces; on the host, which has none, as
    /// [`malloc`](Self::malloc).
    ///
    /// # Errors
    /// Those of the device.
    pub fn segment(context: &Context, freed: Sender<()>) -> Result<ForeignMemory> {
        let device = &context.device;
        if context.settings.backend == Backend::Host {
            return ForeignMemory::malloc(device, 4096, freed);
        }
        let segment = ExpandableSegment::new(device, PIECES)?;
        let (ptr, bytes) = (segment.ptr, segment.bytes);
        Ok(ForeignMemory {
            ptr: ptr + OFFSET,
            words: (bytes - 2 * OFFSET) / 8,
            _memory: Allocator::Segment { _memory: segment },
            _freed: freed,
        })
    }

    /// Writes the words of a pattern on `stream`, late, and shares them.
    ///
    /// # Errors
    /// Those of the device and of [`AllocationServer::share`].
    pub fn share(self, server: &AllocationServer, stream: &Stream, seed: u64) -> Result<u64> {
        let (ptr, bytes) = self.fill(stream, seed)?;
        // SAFETY: the memory is freed by the owner's drop.
        let number = unsafe {
            server.share(
                stream,
                ptr,
                bytes,
                warpipe::Access::ReadWrite,
                Box::new(self),
            )
        }?;
        stream.synchronize(PATIENCE)?;
        Ok(number)
    }

    /// As [`share`](Self::share), for reading alone.
    ///
    /// # Errors
    /// Those of the device and of [`AllocationServer::share`].
    pub fn share_read_only(
        self,
        server: &AllocationServer,
        stream: &Stream,
        seed: u64,
    ) -> Result<u64> {
        let (ptr, bytes) = self.fill(stream, seed)?;
        // A refusal frees the memory.
        stream.synchronize(PATIENCE)?;
        // SAFETY: the memory is freed by the owner's drop.
        Ok(unsafe { server.share(stream, ptr, bytes, warpipe::Access::Read, Box::new(self)) }?)
    }

    fn fill(&self, stream: &Stream, seed: u64) -> Result<(DevicePtr, u64)> {
        let late = Duration::from_millis(20);
        // SAFETY: the words lie in the memory, which its share keeps.
        unsafe { fill_words(stream, self.ptr, self.words, seed, late)? };
        Ok((self.ptr, 8 * self.words))
    }
}

/// An expandable segment of which single tensors are shared. They are to be released before it, or
/// one of their pieces, goes.
pub struct SharedPieces(ExpandableSegment);

impl SharedPieces {
    /// Three pieces.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new(device: &Device) -> Result<SharedPieces> {
        Ok(SharedPieces(ExpandableSegment::new(device, PIECES)?))
    }

    /// Maps a new allocation as a piece.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn map_anew(&mut self, piece: usize) -> Result<()> {
        self.0.map_anew(piece)
    }

    /// Writes the words of a pattern into a tensor in the second piece, or from there into the
    /// third one, and shares it.
    ///
    /// # Errors
    /// Those of the device and of [`AllocationServer::share`].
    pub fn share(
        &self,
        server: &AllocationServer,
        stream: &Stream,
        is_long: bool,
        seed: u64,
    ) -> Result<u64> {
        let piece = self.0.bytes / PIECES;
        let (begin, words) = match is_long {
            false => (piece, piece / 4 / 8),
            true => (piece + piece / 2, piece / 8),
        };
        let (ptr, late) = (self.0.ptr + begin, Duration::from_millis(2));
        // SAFETY: the words lie in the segment, which outlives its shares.
        unsafe { fill_words(stream, ptr, words, seed, late)? };
        // SAFETY: as above.
        Ok(unsafe {
            server.share(
                stream,
                ptr,
                8 * words,
                warpipe::Access::ReadWrite,
                Box::new(()),
            )
        }?)
    }
}

/// Shares an address with an owner that keeps nothing.
///
/// # Errors
/// Those of [`AllocationServer::share`].
pub fn refused(server: &AllocationServer, stream: &Stream, ptr: DevicePtr) -> Result<()> {
    range_refused(server, stream, ptr, 8)
}

/// As [`refused`], for `bytes` bytes.
///
/// # Errors
/// It is not refused.
pub fn range_refused(
    server: &AllocationServer,
    stream: &Stream,
    ptr: DevicePtr,
    bytes: u64,
) -> Result<()> {
    // SAFETY: it is refused, or withdrawn unopened.
    let shared =
        unsafe { server.share(stream, ptr, bytes, warpipe::Access::ReadWrite, Box::new(())) };
    ensure!(
        matches!(
            shared,
            Err(warpipe::Error::Handle {
                fault: warpipe::HandleFault::NotExportable { .. },
                ..
            })
        ),
        "{shared:?}"
    );
    Ok(())
}
