//! The content hash of a tensor, computed by the device that has the tensor. **This module is marked
//! for unsafe**: it gives a kernel addresses to read and to write.
//!
//! A tensor is hashed in leaves of 16 KiB, each by four threads of a GPU (`leaves.cu`). The hashes of
//! the leaves of a block of 16 MiB are hashed in the same way, and the content hash is that of the
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
use crate::kernel::{Kernel, KernelLaunch};
use crate::memory::slice::check_range;
use crate::memory::{DeviceSlice, Memory};
use crate::stream::Stream;

/// Part of the manifest's format, as the next.
const LEAF_BYTES: u64 = 16 << 10;

const HASH_BYTES: u64 = size_of::<ContentHash>() as u64;

/// What a warp hashes: eight leaves.
const RUN_BYTES: u64 = 8 * LEAF_BYTES;

/// Threads of a block, and of a warp.
const THREADS: u64 = 128;
const WARP: u64 = 32;

/// The most leaves, and blocks, that are hashed at once: 8 GiB of content in long tensors. The device
/// gives up to 14 MiB of memory meanwhile.
const LEAVES_AT_ONCE: u64 = 1 << 19;
const BLOCKS_AT_ONCE: usize = 1 << 16;

/// A static, so that it has one address, and the module is loaded once.
static PTX: &CStr =
    match CStr::from_bytes_with_nul(concat!(include_str!("leaves.ptx"), "\0").as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("leaves.ptx has a NUL inside"),
    };

static HASH_LEAVES: Kernel = Kernel::new(c"warpipe_hash_leaves", PTX, hash_leaves);
static COPY_LEAVES: Kernel = Kernel::new(c"warpipe_copy_leaves", PTX, copy_leaves);

/// The kernels of this module, for the fake driver.
pub static CONTENT_HASH: &[Kernel] = &[
    Kernel::new(c"warpipe_hash_leaves", PTX, hash_leaves),
    Kernel::new(c"warpipe_copy_leaves", PTX, copy_leaves),
];

/// Bytes of one tensor, whole leaves but for the last: up to eight of them.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Run {
    address: u64,
    bytes: u64,
    /// The number of its first leaf: where its hash goes.
    leaf: u64,
    /// Where a copy goes.
    copy: u64,
}

/// The words of a run, as the kernel reads them.
const RUN_WORDS: usize = size_of::<Run>() / size_of::<u64>();

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
/// As for [`each_run`].
unsafe fn hash_leaves(launch: KernelLaunch<'_>) {
    // SAFETY: the caller's promise.
    unsafe { each_run(launch, |_, _| {}) };
}

/// The CPU version of `warpipe_copy_leaves`.
///
/// # Safety
/// As for [`each_run`], and as many bytes are writable where a run's copy goes.
unsafe fn copy_leaves(launch: KernelLaunch<'_>) {
    // SAFETY: the caller's promise; the copies lie in other memory.
    let copy = |run: Run, bytes: &[u8]| unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), run.copy as *mut u8, bytes.len());
    };
    // SAFETY: the caller's promise.
    unsafe { each_run(launch, copy) };
}

/// Hashes the leaves of runs, by as many threads as read a file, and calls `also` for each run.
///
/// # Safety
/// The arguments are the address of runs, their number, and where the hashes go. The runs' bytes are
/// readable, and so many hashes writable; nothing else writes them meanwhile.
unsafe fn each_run(launch: KernelLaunch<'_>, also: impl Fn(Run, &[u8]) + Sync) {
    let &[runs, count, hashes] = launch.args else {
        return;
    };
    let next = AtomicU64::new(0);
    let work = || {
        loop {
            let index = next.fetch_add(1, Relaxed);
            if index >= count {
                break;
            }
            // SAFETY: the caller's promise: `count` runs lie there, each four words long.
            let run: Run = unsafe { (runs as *const Run).add(index as usize).read() };
            // SAFETY: the caller's promise.
            let bytes =
                unsafe { std::slice::from_raw_parts(run.address as *const u8, run.bytes as usize) };
            also(run, bytes);
            for (leaf, bytes) in (run.leaf..).zip(bytes.chunks(LEAF_BYTES as usize)) {
                let hash = leaf_hash(bytes).to_le_bytes();
                // SAFETY: the caller's promise: the leaf's hash has its place there, and each leaf is
                // of one run.
                unsafe { (hashes as *mut ContentHash).add(leaf as usize).write(hash) };
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..readers(count as usize) {
            // Without more threads, this one hashes everything.
            let _ = std::thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
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

/// The content hashes of tensors that lie in a device's memory: of each the memory, where it begins
/// there, a multiple of 512, and its length. The contents are complete.
///
/// # Errors
/// [`Error::DeviceMemory`] when the device has no room for the hashes, at most 12 MiB;
/// [`Error::Timeout`] when the device is busy for a minute; [`Error::Driver`].
pub(super) fn hash_memory(tensors: &[(&DeviceSlice, u64, u64)]) -> Result<Vec<ContentHash>> {
    let Some((first, ..)) = tensors.first() else {
        return Ok(Vec::new());
    };
    let mut places = Vec::with_capacity(tensors.len());
    for &(memory, begin, bytes) in tensors {
        check_range(memory.name(), begin, bytes, memory.bytes())?;
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
    unsafe { hash_places(&stream, &HASH_LEAVES, &places) }
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

/// Copies tensors on `stream`, which has nothing else to do, waits for that, and returns their content
/// hashes: the device reads them once.
///
/// # Errors
/// As [`hash_memory`].
///
/// # Safety
/// The contents are complete and readable on the stream's device, and not written before this
/// returns; the places of the copies are writable, used by nothing else, and recorded for the stream.
/// After an error that may be so until the stream has ended.
pub(super) unsafe fn copy_places(stream: &Stream, places: &[Place]) -> Result<Vec<ContentHash>> {
    // SAFETY: the caller's promise.
    unsafe { hash_places(stream, &COPY_LEAVES, places) }
}

/// The content hashes of what lies at these places.
///
/// # Safety
/// The places are such as `kernel` needs until it has run.
unsafe fn hash_places(
    stream: &Stream,
    kernel: &'static Kernel,
    places: &[Place],
) -> Result<Vec<ContentHash>> {
    let lengths: Vec<u64> = places.iter().map(|place| place.bytes).collect();
    let blocks = blocks(&lengths);
    let batches = batches(&blocks);
    let scratch = Scratch::for_batches(stream.device(), &batches)?;
    scratch.memory.used_on(stream);
    let mut of_all = Vec::with_capacity(blocks.len() * HASH_BYTES as usize);
    for batch in batches {
        let runs = scratch.runs(places, batch);
        // SAFETY: the caller's promise.
        unsafe { scratch.hash(stream, kernel, &runs, batch.len()) }?;
        of_all.extend(scratch.hashes(stream, batch.len())?);
    }
    let mut begin = 0;
    let of_tensor = |&length: &u64| {
        let end = begin + length.div_ceil(BLOCK_BYTES) as usize * HASH_BYTES as usize;
        let hash = of_blocks(&of_all[begin..end], length);
        begin = end;
        hash
    };
    Ok(lengths.iter().map(of_tensor).collect())
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

/// What a batch is hashed by: the runs of its contents, then one run of leaves' hashes a block.
struct Runs {
    words: Vec<[u64; RUN_WORDS]>,
    of_contents: usize,
}

/// Memory of the device for hashes and runs: those of leaves, those of blocks, the runs.
struct Scratch {
    memory: Memory,
    blocks_at: u64,
    runs_at: u64,
}

impl Scratch {
    fn for_batches(device: &Device, batches: &[&[Block]]) -> Result<Scratch> {
        let most =
            |of: &dyn Fn(&[Block]) -> u64| batches.iter().map(|it| of(it)).max().unwrap_or(0);
        let leaves = most(&|batch| batch.iter().map(leaves_of).sum());
        let blocks = most(&|batch| batch.len() as u64);
        let runs_of = |block: &Block| block.bytes.div_ceil(RUN_BYTES) + 1;
        let runs = most(&|batch| batch.iter().map(runs_of).sum());
        let blocks_at = leaves * HASH_BYTES;
        let runs_at = blocks_at + blocks * HASH_BYTES;
        let bytes = runs_at + runs * size_of::<Run>() as u64;
        Ok(Scratch {
            memory: Memory::allocate(device, bytes.max(ALIGNMENT))?,
            blocks_at,
            runs_at,
        })
    }

    fn runs(&self, places: &[Place], batch: &[Block]) -> Runs {
        let (mut words, mut of_leaves, mut leaf) = (Vec::new(), Vec::new(), 0);
        for (number, block) in batch.iter().enumerate() {
            let place = places[block.tensor];
            let (address, copy) = (place.address + block.begin, place.copy + block.begin);
            let parts = (0..block.bytes.div_ceil(RUN_BYTES)).map(|part| part * RUN_BYTES);
            words.extend(parts.map(|at| {
                let bytes = RUN_BYTES.min(block.bytes - at);
                [address + at, bytes, leaf + at / LEAF_BYTES, copy + at]
            }));
            let leaves = leaves_of(block);
            let at = self.memory.ptr() + leaf * HASH_BYTES;
            of_leaves.push([at, leaves * HASH_BYTES, number as u64, 0]);
            leaf += leaves;
        }
        let of_contents = words.len();
        words.append(&mut of_leaves);
        Runs { words, of_contents }
    }

    /// Has `kernel` hash the leaves, hashes the blocks by them, and waits for it.
    ///
    /// # Safety
    /// The places of the runs are such as `kernel` needs.
    unsafe fn hash(
        &self,
        stream: &Stream,
        kernel: &'static Kernel,
        runs: &Runs,
        blocks: usize,
    ) -> Result<()> {
        let words = runs.words.as_flattened();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.memory.write(stream, self.runs_at, &bytes)?;
        let memory = self.memory.ptr();
        let of_leaves_at = memory + self.runs_at + (runs.of_contents * size_of::<Run>()) as u64;
        let steps = [
            (
                kernel,
                memory + self.runs_at,
                runs.of_contents as u64,
                memory,
            ),
            (
                &HASH_LEAVES,
                of_leaves_at,
                blocks as u64,
                memory + self.blocks_at,
            ),
        ];
        for (kernel, runs, count, hashes) in steps {
            let grid = (count * WARP).div_ceil(THREADS) as u32;
            // SAFETY: the runs were written above, and lie in memory that this stream is recorded for,
            // as the hashes do; `for_batches` made room for them. The rest is the caller's promise.
            unsafe { stream.launch(kernel, grid, THREADS as u32, &[runs, count, hashes]) }?;
        }
        stream.synchronize(COPY_TIMEOUT)
    }

    /// The blocks' hashes, when the stream has computed them: it has nothing else to do.
    fn hashes(&self, stream: &Stream, blocks: usize) -> Result<Vec<u8>> {
        let mut hashes = vec![0; blocks * HASH_BYTES as usize];
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
        let large: Vec<u8> = (0..2 * BLOCK_BYTES + RUN_BYTES + LEAF_BYTES + 5)
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
        let found = hash_memory(&places).unwrap();
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
        // A GPU, if there is one.
        check(&Device::preferred().device);
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
