//! The content hash of a tensor, and the threads that read tensors to compute it.
//!
//! A tensor is hashed in blocks, and its content hash is that of its blocks' hashes: so several
//! threads share a large tensor, which one of them would still read when all others were done.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use twox_hash::XxHash3_128;

use super::manifest::ContentHash;
use super::staging::{BUFFERS, Staging};
use crate::device::Device;
use crate::error::Result;
use crate::memory::slice::DeviceSlice;

/// All blocks of a tensor but its last are this long. Part of the manifest's format.
pub(super) const BLOCK_BYTES: u64 = 16 << 20;

/// The most threads. More of them do not read faster: the device's bus is full.
const READERS_MAX: usize = 16;

/// Each staging buffer of a reader. Small enough for all of them to stay in a core's cache, where
/// the bytes are hashed after they were copied from the file; large enough for a copy of the device.
pub(super) const PART_BYTES: usize = 512 << 10;

/// How long a reader waits for a copy.
pub(super) const COPY_TIMEOUT: Duration = Duration::from_secs(60);

/// A part of a tensor that one thread reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Block {
    /// The tensor's index.
    pub(super) tensor: usize,
    /// Where the block begins in the tensor.
    pub(super) begin: u64,
    pub(super) bytes: u64,
}

/// The content hash of a tensor with these bytes.
pub(super) fn content_hash(bytes: &[u8]) -> ContentHash {
    let blocks = bytes.chunks(BLOCK_BYTES as usize);
    of_blocks(
        &blocks
            .map(|block| XxHash3_128::oneshot(block).to_be_bytes())
            .collect::<Vec<_>>(),
    )
}

/// The content hash of a tensor with blocks of these hashes.
fn of_blocks(blocks: &[ContentHash]) -> ContentHash {
    XxHash3_128::oneshot(blocks.as_flattened()).to_be_bytes()
}

/// The blocks of tensors of these lengths.
fn blocks(lengths: &[u64]) -> Vec<Block> {
    let of_tensor = |(tensor, &length): (usize, &u64)| {
        let begins = (0..length.div_ceil(BLOCK_BYTES)).map(|index| index * BLOCK_BYTES);
        begins.map(move |begin| Block {
            tensor,
            begin,
            bytes: BLOCK_BYTES.min(length - begin),
        })
    };
    lengths.iter().enumerate().flat_map(of_tensor).collect()
}

/// The content hashes of tensors of these lengths. `read` is called once for each block, on several
/// threads, each with buffers of its own, and returns the block's hash. After the first error no
/// block is begun any more, and the error is returned when all threads have ended.
pub(super) fn hash_in_parallel(
    device: &Device,
    lengths: &[u64],
    read: impl Fn(&Block, &mut Staging) -> Result<ContentHash> + Sync,
) -> Result<Vec<ContentHash>> {
    let blocks = blocks(lengths);
    let largest = blocks.iter().map(|block| block.bytes).max().unwrap_or(0);
    let buffer_bytes = largest.min(PART_BYTES as u64) as usize;
    let (next, has_failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let hashes = Mutex::new(vec![[0; 16]; blocks.len()]);
    let run = || -> Result<()> {
        let mut staging = Staging::new(device, buffer_bytes)?;
        while !has_failed.load(Relaxed) {
            let index = next.fetch_add(1, Relaxed);
            let Some(block) = blocks.get(index) else {
                break;
            };
            let hash = read(block, &mut staging)?;
            hashes.lock().unwrap_or_else(PoisonError::into_inner)[index] = hash;
        }
        staging.finish(COPY_TIMEOUT)
    };
    in_parallel(blocks.len(), || {
        let done = run();
        has_failed.fetch_or(done.is_err(), Relaxed);
        done
    })?;
    let hashes = hashes.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut of_tensors = blocks.chunk_by(|a, b| a.tensor == b.tensor);
    let (mut due, mut first) = (of_tensors.next(), 0);
    let of_tensor = |tensor| match due {
        Some(blocks) if blocks[0].tensor == tensor => {
            let of_blocks_of_it = &hashes[first..first + blocks.len()];
            (due, first) = (of_tensors.next(), first + blocks.len());
            of_blocks(of_blocks_of_it)
        }
        // A tensor of no bytes has no blocks.
        _ => of_blocks(&[]),
    };
    Ok((0..lengths.len()).map(of_tensor).collect())
}

/// The content hashes of tensors that lie in a device's memory: of each the memory, where it begins
/// there, and its length.
pub(super) fn hash_memory(tensors: &[(&DeviceSlice, u64, u64)]) -> Result<Vec<ContentHash>> {
    let Some((first, ..)) = tensors.first() else {
        return Ok(Vec::new());
    };
    let lengths: Vec<u64> = tensors.iter().map(|&(_, _, bytes)| bytes).collect();
    hash_in_parallel(first.device(), &lengths, |block, staging| {
        let (memory, begin, _) = tensors[block.tensor];
        hash_block(memory, begin + block.begin, block.bytes, staging)
    })
}

/// Hashes `bytes` bytes from `begin` on: one part while the device copies the next ones.
fn hash_block(
    memory: &DeviceSlice,
    begin: u64,
    bytes: u64,
    staging: &mut Staging,
) -> Result<ContentHash> {
    let length = |index: usize| {
        let left = bytes.saturating_sub(index as u64 * PART_BYTES as u64);
        left.min(PART_BYTES as u64) as usize
    };
    let fetch = |index: usize, staging: &mut Staging| match length(index) {
        0 => Ok(()),
        part => {
            let from = begin + index as u64 * PART_BYTES as u64;
            staging.copy_from(index, memory, from, part)
        }
    };
    let mut hasher = XxHash3_128::new();
    for index in 0..BUFFERS - 1 {
        fetch(index, staging)?;
    }
    for index in 0..bytes.div_ceil(PART_BYTES as u64) as usize {
        fetch(index + BUFFERS - 1, staging)?;
        hasher.write(&staging.fetched(index, COPY_TIMEOUT)?[..length(index)]);
    }
    Ok(hasher.finish_128().to_be_bytes())
}

/// Calls `run` on several threads, on no more than there are blocks, and returns the first error.
fn in_parallel(blocks: usize, run: impl Fn() -> Result<()> + Sync) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let readers = READERS_MAX.min(cores).min(blocks);
    std::thread::scope(|scope| -> Result<()> {
        let mut started = Vec::new();
        for _ in 1..readers {
            let reader = std::thread::Builder::new().name("warpipe-loader".into());
            // Without more threads, those that run read everything.
            started.extend(reader.spawn_scoped(scope, &run));
        }
        let own = if readers > 0 { run() } else { Ok(()) };
        let others = started.into_iter().map(|reader| match reader.join() {
            Ok(read) => read,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        others.fold(own, Result::and)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_each_tensor_once_and_in_order() {
        let lengths = [0, 1, BLOCK_BYTES, 0, 2 * BLOCK_BYTES + 5, 0];
        let block = |tensor, begin, bytes| Block {
            tensor,
            begin,
            bytes,
        };
        assert_eq!(
            blocks(&lengths),
            [
                block(1, 0, 1),
                block(2, 0, BLOCK_BYTES),
                block(4, 0, BLOCK_BYTES),
                block(4, BLOCK_BYTES, BLOCK_BYTES),
                block(4, 2 * BLOCK_BYTES, 5),
            ]
        );
    }

    #[test]
    fn the_hash_of_a_tensor_does_not_depend_on_its_neighbours_or_on_who_reads_it() {
        let device = Device::host();
        let large: Vec<u8> = (0..BLOCK_BYTES + 3_000_000)
            .map(|at| (at % 251) as u8)
            .collect();
        let tensors: [&[u8]; 5] = [b"", b"abc", &large, b"", b"d"];
        let mut bytes = Vec::new();
        let offsets = tensors.map(|tensor| {
            bytes.resize(bytes.len().next_multiple_of(512), 0);
            bytes.extend_from_slice(tensor);
            (bytes.len() - tensor.len()) as u64
        });
        let memory = crate::Memory::allocate(&device, bytes.len() as u64).unwrap();
        let stream = device.stream().unwrap();
        memory.write(&stream, 0, &bytes).unwrap();
        stream.synchronize(COPY_TIMEOUT).unwrap();
        let lengths = tensors.map(|tensor| tensor.len() as u64);
        let places: Vec<(&DeviceSlice, u64, u64)> = offsets
            .into_iter()
            .zip(lengths)
            .map(|(offset, bytes)| (&*memory, offset, bytes))
            .collect();
        let found = hash_memory(&places).unwrap();
        assert_eq!(found, tensors.map(content_hash));
        assert_ne!(
            content_hash(&large),
            XxHash3_128::oneshot(&large).to_be_bytes()
        );
    }
}
