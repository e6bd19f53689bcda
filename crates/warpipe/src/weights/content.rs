//! The content hash of a tensor, computed by the device that has the tensor. **This module is marked
//! for unsafe**: it gives a kernel addresses to read and to write.
//!
//! A tensor is hashed in leaves of 16 KiB, each by a warp of a GPU (`leaves.cu`). The hashes of the
//! leaves of a block of 16 MiB are hashed in the same way, and the content hash is that of the
//! blocks' hashes and the length. So no content crosses a bus, and 16 bytes a block do. The host
//! backend runs the same function on the CPU.

use std::ffi::CStr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use twox_hash::XxHash3_128;

use super::blocks::{BLOCK_BYTES, Block, COPY_TIMEOUT, blocks, readers};
use super::manifest::{ALIGNMENT, ContentHash};
use crate::backend::DevicePtr;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::thread::on_several;
use crate::kernel::{Kernel, KernelLaunch, module};
use crate::memory::slice::check_range;
use crate::memory::{DeviceSlice, Memory};
use crate::stream::Stream;
use crate::wait::Wait;

/// Part of the manifest's format, as the next.
const LEAF_BYTES: u64 = 16 << 10;

const HASH_BYTES: u64 = size_of::<ContentHash>() as u64;

/// Threads of a block, and of a warp.
const THREADS: u64 = 128;
const WARP: u64 = 32;

/// The most leaves, and blocks, that are hashed at once: 8 GiB of content in long tensors. The device
/// gives up to 12 MiB of memory meanwhile, and 16 bytes for each block of all of them.
const LEAVES_AT_ONCE: u64 = 1 << 19;
const BLOCKS_AT_ONCE: usize = 1 << 16;

/// A static, so that it has one address, and the module is loaded once.
static PTX: &CStr = module(concat!(include_str!("leaves.ptx"), "\0"));

static HASH_LEAVES: Kernel = Kernel::new(c"warpipe_hash_leaves", PTX, hash_leaves);
static COPY_LEAVES: Kernel = Kernel::new(c"warpipe_copy_leaves", PTX, copy_leaves);

/// The kernels of this module, for the fake driver.
pub static CONTENT_HASH: &[Kernel] = &[
    Kernel::new(c"warpipe_hash_leaves", PTX, hash_leaves),
    Kernel::new(c"warpipe_copy_leaves", PTX, copy_leaves),
];

/// Bytes of one tensor, whole leaves but for the last.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Span {
    address: u64,
    /// Where a copy goes.
    copy: u64,
    bytes: u64,
    /// The number of its first leaf: where its hash goes. The next span has the next numbers.
    leaf: u64,
}

impl Span {
    fn words(self) -> [u64; 4] {
        [self.address, self.copy, self.bytes, self.leaf]
    }
}

/// The hash of a leaf: of its bytes and of zeros up to its length.
fn leaf_hash(bytes: &[u8]) -> u128 {
    if bytes.len() as u64 == LEAF_BYTES {
        return XxHash3_128::oneshot(bytes);
    }
    let mut leaf = [0; LEAF_BYTES as usize];
    leaf[..bytes.len()].copy_from_slice(bytes);
    XxHash3_128::oneshot(&leaf)
}

/// The CPU version of `warpipe_hash_leaves`.
///
/// # Safety
/// As for [`each_leaf`].
unsafe fn hash_leaves(launch: KernelLaunch<'_>) {
    // SAFETY: the caller's promise.
    unsafe { each_leaf(launch, |_, _| {}) };
}

/// The CPU version of `warpipe_copy_leaves`.
///
/// # Safety
/// As for [`each_leaf`], and as many bytes are writable where a span's copy goes.
unsafe fn copy_leaves(launch: KernelLaunch<'_>) {
    // SAFETY: the caller's promise; the copies lie in other memory.
    let copy = |to: u64, bytes: &[u8]| unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len());
    };
    // SAFETY: the caller's promise.
    unsafe { each_leaf(launch, copy) };
}

/// How many leaves a thread takes at once.
const LEAVES_A_TURN: u64 = 64;

/// Hashes the leaves of spans, by as many threads as read a file, and calls `also` for each leaf with
/// where its copy goes.
///
/// # Safety
/// The arguments are the address of spans, their number, that of their leaves, and where the hashes go.
/// The spans' bytes are readable, and so many hashes writable; nothing else writes them meanwhile. The
/// spans have all numbers from 0 on.
unsafe fn each_leaf(launch: KernelLaunch<'_>, also: impl Fn(u64, &[u8]) + Sync) {
    let &[spans, count, leaves, hashes] = launch.args else {
        return;
    };
    // SAFETY: the caller's promise.
    let spans = unsafe { std::slice::from_raw_parts(spans as *const Span, count as usize) };
    let next = AtomicU64::new(0);
    let work = || {
        loop {
            let first = next.fetch_add(LEAVES_A_TURN, Relaxed);
            if first >= leaves {
                break;
            }
            for number in first..leaves.min(first + LEAVES_A_TURN) {
                let span = spans[spans.partition_point(|span| span.leaf <= number) - 1];
                let begin = (number - span.leaf) * LEAF_BYTES;
                let (bytes, at) = (span.bytes - begin, (span.address + begin) as *const u8);
                let bytes = bytes.min(LEAF_BYTES) as usize;
                // SAFETY: the caller's promise: the leaf lies in the span.
                let bytes = unsafe { std::slice::from_raw_parts(at, bytes) };
                also(span.copy + begin, bytes);
                let hash = leaf_hash(bytes).to_le_bytes();
                // SAFETY: the caller's promise: each leaf's hash has its place there.
                unsafe {
                    (hashes as *mut ContentHash)
                        .add(number as usize)
                        .write(hash)
                };
            }
        }
    };
    let threads = readers(leaves.div_ceil(LEAVES_A_TURN) as usize);
    on_several("warpipe-loader", threads.saturating_sub(1), &work);
}

/// The content hash of a tensor with these bytes.
#[cfg(test)]
pub(super) fn content_hash(bytes: &[u8]) -> ContentHash {
    let hashes_of = |bytes: &[u8]| {
        let leaves = bytes.chunks(LEAF_BYTES as usize);
        leaves
            .flat_map(|leaf| leaf_hash(leaf).to_le_bytes())
            .collect::<Vec<u8>>()
    };
    let blocks = bytes.chunks(BLOCK_BYTES as usize);
    let blocks = blocks.flat_map(|block| hashes_of(&hashes_of(block)));
    of_blocks(&blocks.collect::<Vec<u8>>(), bytes.len() as u64)
}

/// The content hash of a tensor of this length, with blocks of these hashes.
fn of_blocks(blocks: &[u8], length: u64) -> ContentHash {
    let mut hasher = XxHash3_128::new();
    hasher.write(blocks);
    hasher.write(&length.to_le_bytes());
    hasher.finish_128().to_be_bytes()
}

/// Has the device hash tensors that lie in its memory, and does not wait for it. Of each: the
/// memory, where it begins there, a multiple of 512, and its length. The contents are complete.
///
/// # Errors
/// [`Error::Limit`] when the device has no room for the hashes; [`Error::Driver`].
pub(super) fn begin_to_hash(tensors: &[(&DeviceSlice, u64, u64)]) -> Result<PendingHashes> {
    let Some((first, ..)) = tensors.first() else {
        return Ok(PendingHashes(None));
    };
    let mut places = Vec::with_capacity(tensors.len());
    for &(memory, begin, bytes) in tensors {
        check_range(&memory.name, begin, bytes, memory.bytes())?;
        let (address, copy) = (memory.ptr() + begin, 0);
        if !address.is_multiple_of(HASH_BYTES) {
            let allowed = format!("at a multiple of {HASH_BYTES} bytes");
            let found = format!("at {address:#x}");
            return Err(Error::argument("tensor", found, allowed));
        }
        places.push(Place {
            address,
            bytes,
            copy,
        });
    }
    let stream = first.device().stream()?;
    for &(memory, ..) in tensors {
        memory.used_on(&stream);
    }
    // SAFETY: the contents lie in slices, as checked above, for which this stream is recorded.
    unsafe { hash_places(stream, &HASH_LEAVES, &places) }
}

/// The content of a tensor on a device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// A multiple of [`ADDRESS_UNIT`].
    pub(super) address: DevicePtr,
    pub(super) bytes: u64,
    /// Where a copy of it goes.
    pub(super) copy: DevicePtr,
}

/// A content that is hashed begins at a multiple of this.
pub(super) const ADDRESS_UNIT: u64 = HASH_BYTES;

/// Copies tensors on `stream`, which has nothing else to do, and has the device hash them: it reads them
/// once.
///
/// # Errors
/// As [`begin_to_hash`].
///
/// # Safety
/// The contents are complete and readable on the stream's device, and not written before
/// [`PendingHashes::finish`] returns; the places of the copies are writable, used by nothing else, and
/// recorded for the stream. After an error, or without that, it is so until the stream has ended.
pub(super) unsafe fn copy_places(stream: Stream, places: &[Place]) -> Result<PendingHashes> {
    // SAFETY: the caller's promise.
    unsafe { hash_places(stream, &COPY_LEAVES, places) }
}

/// Content hashes that a device computes; `None` of no tensor.
pub(super) struct PendingHashes(Option<Enqueued>);

struct Enqueued {
    stream: Stream,
    scratch: Scratch,
    /// Of the tensors.
    lengths: Vec<u64>,
}

impl PendingHashes {
    /// Waits for them, for up to a minute, and until the wait is cancelled.
    ///
    /// # Errors
    /// [`Error::Timeout`] when the device is busy for that long; [`Error::Driver`].
    pub(super) fn finish(self, wait: &Wait<'_>) -> Result<Vec<ContentHash>> {
        let Some(Enqueued {
            stream,
            scratch,
            lengths,
        }) = self.0
        else {
            return Ok(Vec::new());
        };
        stream.synchronize(wait.cancellable_within(COPY_TIMEOUT))?;
        let of_all = scratch.of_blocks(&stream)?;
        let mut rest = &of_all[..];
        let of_tensor = |&length: &u64| {
            let blocks = length.div_ceil(BLOCK_BYTES) as usize * HASH_BYTES as usize;
            let (own, behind) = rest.split_at(blocks);
            rest = behind;
            of_blocks(own, length)
        };
        Ok(lengths.iter().map(of_tensor).collect())
    }
}

/// Has `kernel` hash what lies at these places.
///
/// # Safety
/// The places are such as `kernel` needs until it has run.
unsafe fn hash_places(
    stream: Stream,
    kernel: &'static Kernel,
    places: &[Place],
) -> Result<PendingHashes> {
    let lengths: Vec<u64> = places.iter().map(|place| place.bytes).collect();
    let blocks = blocks(&lengths);
    let batches = batches(&blocks);
    let scratch = Scratch::for_batches(stream.device(), blocks.len() as u64, &batches)?;
    scratch.memory.used_on(&stream);
    let mut first = 0;
    for batch in batches {
        let spans = Spans::of(places, batch, &scratch.memory);
        // SAFETY: the caller's promise; `for_batches` made room for this batch.
        unsafe { scratch.hash(&stream, kernel, &spans, first) }?;
        first += batch.len() as u64;
    }
    Ok(PendingHashes(Some(Enqueued {
        stream,
        scratch,
        lengths,
    })))
}

fn leaves_of(block: &Block) -> u64 {
    block.bytes.div_ceil(LEAF_BYTES)
}

/// The blocks in parts that are hashed at once.
fn batches(blocks: &[Block]) -> Vec<&[Block]> {
    let (mut batches, mut begin, mut leaves) = (Vec::new(), 0, 0);
    for (index, block) in blocks.iter().enumerate() {
        let is_full = leaves + leaves_of(block) > LEAVES_AT_ONCE;
        if is_full || index - begin == BLOCKS_AT_ONCE {
            batches.push(&blocks[begin..index]);
            (begin, leaves) = (index, 0);
        }
        leaves += leaves_of(block);
    }
    if begin < blocks.len() {
        batches.push(&blocks[begin..]);
    }
    batches
}

/// The spans of a batch: one of contents for each tensor, and one of its leaves' hashes. A leaf of those
/// is a block.
struct Spans {
    contents: Vec<Span>,
    hashes: Vec<Span>,
    leaves: u64,
    blocks: u64,
}

impl Spans {
    fn of(places: &[Place], batch: &[Block], scratch: &Memory) -> Spans {
        let (mut contents, mut hashes) = (Vec::new(), Vec::new());
        let (mut leaves, mut blocks) = (0, 0);
        for of_tensor in batch.chunk_by(|a, b| a.tensor == b.tensor) {
            let (place, begin) = (places[of_tensor[0].tensor], of_tensor[0].begin);
            contents.push(Span {
                address: place.address + begin,
                copy: place.copy + begin,
                bytes: of_tensor.iter().map(|block| block.bytes).sum(),
                leaf: leaves,
            });
            let own: u64 = of_tensor.iter().map(leaves_of).sum();
            hashes.push(Span {
                address: scratch.ptr() + leaves * HASH_BYTES,
                copy: 0,
                bytes: own * HASH_BYTES,
                leaf: blocks,
            });
            leaves += own;
            blocks += of_tensor.len() as u64;
        }
        Spans {
            contents,
            hashes,
            leaves,
            blocks,
        }
    }
}

/// Memory of the device: the hashes of a batch's leaves, its spans, and the hashes of all blocks.
struct Scratch {
    memory: Memory,
    spans_at: u64,
    blocks_at: u64,
    blocks: u64,
}

impl Scratch {
    fn for_batches(device: &Device, blocks: u64, batches: &[&[Block]]) -> Result<Scratch> {
        let most = |of: &dyn Fn(&&[Block]) -> u64| batches.iter().map(of).max().unwrap_or(0);
        let spans_at = most(&|batch| batch.iter().map(leaves_of).sum()) * HASH_BYTES;
        // Two for each tensor, which has a block at least.
        let spans = most(&|batch| 2 * batch.len() as u64);
        let blocks_at = spans_at + spans * size_of::<Span>() as u64;
        let bytes = blocks_at + blocks * HASH_BYTES;
        Ok(Scratch {
            memory: Memory::allocate(device, bytes.max(ALIGNMENT))?,
            spans_at,
            blocks_at,
            blocks,
        })
    }

    /// Has `kernel` hash the leaves of a batch, and hashes its blocks by them. Their hashes have the
    /// numbers from `first` on.
    ///
    /// # Safety
    /// The places of the spans are such as `kernel` needs, and there is room for all of it.
    unsafe fn hash(
        &self,
        stream: &Stream,
        kernel: &'static Kernel,
        spans: &Spans,
        first: u64,
    ) -> Result<()> {
        let Spans {
            contents,
            hashes,
            leaves,
            blocks,
        } = spans;
        let words = contents.iter().chain(hashes).flat_map(|span| span.words());
        let mut bytes = Vec::with_capacity(2 * contents.len() * size_of::<Span>());
        words.for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
        self.memory.write(stream, self.spans_at, &bytes)?;
        let memory = self.memory.ptr();
        let contents_at = memory + self.spans_at;
        let hashes_at = contents_at + size_of_val(&contents[..]) as u64;
        let to = memory + self.blocks_at + first * HASH_BYTES;
        let count = contents.len() as u64;
        let steps = [
            (kernel, [contents_at, count, *leaves, memory]),
            (&HASH_LEAVES, [hashes_at, count, *blocks, to]),
        ];
        for (kernel, arguments) in steps {
            let [_, _, leaves, _] = arguments;
            let grid = (leaves * WARP).div_ceil(THREADS) as u32;
            // SAFETY: the spans were written above, and lie in memory that this stream is recorded for,
            // as the hashes do. The rest is the caller's promise.
            unsafe { stream.launch(kernel, grid, THREADS as u32, &arguments) }?;
        }
        Ok(())
    }

    /// The hashes of all blocks, when the stream has computed them: it has nothing else to do.
    fn of_blocks(&self, stream: &Stream) -> Result<Vec<u8>> {
        let mut hashes = vec![0; (self.blocks * HASH_BYTES) as usize];
        let at = self.memory.ptr() + self.blocks_at;
        // SAFETY: the blocks' hashes lie there (`for_batches`), in memory that this stream is recorded
        // for.
        unsafe { stream.backend().download(stream.raw(), &mut hashes, at) }?;
        Ok(hashes)
    }
}

const _: () = assert!(BLOCK_BYTES / LEAF_BYTES * HASH_BYTES == LEAF_BYTES);

#[cfg(test)]
mod tests {
    use super::*;

    fn memory_with(device: &Device, tensors: &[&[u8]]) -> (Memory, Vec<u64>) {
        let mut bytes = Vec::new();
        let mut offsets = Vec::new();
        for tensor in tensors {
            bytes.resize(bytes.len().next_multiple_of(ALIGNMENT as usize), 0xee);
            offsets.push(bytes.len() as u64);
            bytes.extend_from_slice(tensor);
        }
        // What lies behind the last one does not count.
        bytes.extend([0xee; 64]);
        let memory = Memory::allocate(device, bytes.len() as u64).unwrap();
        let stream = device.stream().unwrap();
        memory.write(&stream, 0, &bytes).unwrap();
        stream.synchronize(COPY_TIMEOUT).unwrap();
        (memory, offsets)
    }

    fn check(device: &Device) {
        let large: Vec<u8> = (0..2 * BLOCK_BYTES + 9 * LEAF_BYTES + 5)
            .map(|at| (at % 251) as u8)
            .collect();
        let lengths = [
            0, 1, 15, 16, 17, 63, 1024, 16383, 16384, 16385, 131_072, 131_073,
        ];
        let mut tensors: Vec<&[u8]> = lengths.iter().map(|&bytes| &large[..bytes]).collect();
        tensors.extend([&large[..BLOCK_BYTES as usize], &large, b"", &large[1..17]]);
        let (memory, offsets) = memory_with(device, &tensors);
        let places: Vec<(&DeviceSlice, u64, u64)> = tensors
            .iter()
            .zip(offsets)
            .map(|(tensor, offset)| (&*memory, offset, tensor.len() as u64))
            .collect();
        let found = begin_to_hash(&places).unwrap();
        let found = found.finish(&COPY_TIMEOUT.into()).unwrap();
        for (tensor, found) in tensors.iter().zip(found) {
            assert_eq!(found, content_hash(tensor), "{} bytes", tensor.len());
        }
        let zeros = [0; 20];
        assert_ne!(
            content_hash(&zeros[..1]),
            content_hash(&zeros),
            "of another length"
        );
    }

    #[test]
    fn a_device_hashes_each_tensor_as_the_cpu_does_whatever_its_length() {
        check(&Device::host());
        let preferred = Device::preferred().device;
        if preferred.is_gpu() {
            check(&preferred);
        }
    }

    #[test]
    fn batches_have_every_block_once_and_end_at_their_limits() {
        let lengths = vec![1; BLOCKS_AT_ONCE + 1];
        let small = blocks(&lengths);
        assert_eq!(
            batches(&small)
                .iter()
                .map(|it| it.len())
                .collect::<Vec<_>>(),
            [BLOCKS_AT_ONCE, 1]
        );
        let per_batch = (LEAVES_AT_ONCE * LEAF_BYTES / BLOCK_BYTES) as usize;
        let large = blocks(&[BLOCK_BYTES * (per_batch as u64 + 1)]);
        assert_eq!(
            batches(&large)
                .iter()
                .map(|it| it.len())
                .collect::<Vec<_>>(),
            [per_batch, 1]
        );
        assert!(batches(&[]).is_empty());
    }
}
