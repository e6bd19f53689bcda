//! The blocks of tensors, and the threads that read them.
//!
//! Several threads share a large tensor, which one of them would still read when all others were done.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::staging::Staging;
use crate::device::Device;
use crate::error::Result;
use crate::fork::thread::on_several;
use crate::mutex::LockUnpoisoned;

/// All blocks of a tensor but its last are this long. Part of the manifest's format.
pub(super) const BLOCK_BYTES: u64 = 16 << 20;

/// The most threads. More of them do not read faster: the device's bus is full.
const READERS_MAX: usize = 16;

/// Each staging buffer of a reader: large enough for a copy of the device.
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

/// The blocks of tensors of these lengths.
pub(super) fn blocks(lengths: &[u64]) -> Vec<Block> {
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

/// Calls `read` once for each block of tensors of these lengths, on several threads, each with buffers
/// of its own. After the first error no block is begun any more, and the error is returned when all
/// threads have ended.
pub(super) fn read_in_parallel(
    device: &Device,
    lengths: &[u64],
    read: impl Fn(&Block, &mut Staging) -> Result<()> + Sync,
) -> Result<()> {
    let blocks = blocks(lengths);
    let largest = blocks.iter().map(|block| block.bytes).max().unwrap_or(0);
    let buffer_bytes = largest.min(PART_BYTES as u64) as usize;
    let (next, has_failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let run = || -> Result<()> {
        let mut staging = Staging::new(device, buffer_bytes)?;
        while !has_failed.load(Relaxed) {
            let index = next.fetch_add(1, Relaxed);
            let Some(block) = blocks.get(index) else {
                break;
            };
            read(block, &mut staging)?;
        }
        staging.finish(COPY_TIMEOUT)
    };
    in_parallel(blocks.len(), || {
        let done = run();
        has_failed.fetch_or(done.is_err(), Relaxed);
        done
    })
}

/// How many threads do so many pieces of work.
pub(super) fn readers(count: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    READERS_MAX.min(cores).min(count)
}

/// Calls `run` on several threads, on no more than there are blocks, and returns the first error.
fn in_parallel(blocks: usize, run: impl Fn() -> Result<()> + Sync) -> Result<()> {
    let Some(more) = readers(blocks).checked_sub(1) else {
        return Ok(());
    };
    let done = Mutex::new(Ok(()));
    on_several("warpipe-loader", more, &|| {
        let run = run();
        let mut done = done.locked();
        *done = std::mem::replace(&mut *done, Ok(())).and(run);
    });
    done.into_inner().unwrap_or_else(PoisonError::into_inner)
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
}
