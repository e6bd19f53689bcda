//! Words and memory that two processes share, and single calls of the backend: the parts of a
//! floor. No engine. **This module is marked for unsafe**: it maps, registers and shares memory.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use warpipe::backend::{RawRegion, StreamOp, TimelineWord};
use warpipe::{Access, Device, DeviceId, DeviceKind, DevicePtr, Stream};

/// Far more than any step takes: only a hang reaches it.
const PATIENCE: Duration = Duration::from_secs(60);

/// A cache-line pair of shared memory.
pub const LINE_BYTES: usize = 128;

/// A memfd mapped here and in another process.
#[derive(Debug)]
pub struct SharedMemory {
    base: *mut u8,
    lines: usize,
    fd: OwnedFd,
}

// SAFETY: shared memory handed out as atomics only, at a fixed address until drop.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// `lines` zeroed lines.
    pub fn create(lines: usize) -> anyhow::Result<SharedMemory> {
        let fd = rustix::fs::memfd_create(
            c"warpipe-bench",
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
        )?;
        rustix::fs::ftruncate(&fd, length(lines) as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
        SharedMemory::open(fd, lines)
    }

    /// The same, in the other process.
    pub fn open(fd: OwnedFd, lines: usize) -> anyhow::Result<SharedMemory> {
        let found = rustix::fs::fstat(&fd)?.st_size;
        ensure!(
            found as usize == length(lines),
            "shared memory of {found} bytes instead of {}",
            length(lines)
        );
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh shared mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                length(lines),
                protection,
                MapFlags::SHARED,
                &fd,
                0,
            )
        };
        Ok(SharedMemory {
            base: base.context("mmap")?.cast(),
            lines,
            fd,
        })
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn at(&self, line: usize) -> *mut u8 {
        assert!(line < self.lines, "line {line} of {}", self.lines);
        // SAFETY: in bounds by the assertion.
        unsafe { self.base.add(line * LINE_BYTES) }
    }

    /// A line as sixteen words.
    pub fn line(&self, line: usize) -> &[AtomicU64; LINE_BYTES / 8] {
        // SAFETY: a whole line inside the mapping, which is aligned to a page and lives as long as
        // self; atomics have no invalid bit patterns and may change at any time.
        unsafe { &*self.at(line).cast() }
    }

    /// A line's first sixteen bytes as a word that streams order themselves by.
    pub fn word(&self, line: usize) -> &TimelineWord {
        // SAFETY: as in `line`.
        unsafe { &*self.at(line).cast() }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: mapped in `open`; every reference borrows self.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), length(self.lines)) };
    }
}

fn length(lines: usize) -> usize {
    (lines * LINE_BYTES).next_multiple_of(4096)
}

/// Shared words that streams can signal and wait for (`cuMemHostRegister`).
#[derive(Debug)]
pub struct Words {
    memory: ManuallyDrop<SharedMemory>,
    device: Device,
    address: DevicePtr,
}

impl Words {
    pub fn create(device: &Device, words: usize) -> anyhow::Result<Words> {
        Words::register(device, SharedMemory::create(words)?)
    }

    pub fn open(device: &Device, fd: OwnedFd, words: usize) -> anyhow::Result<Words> {
        Words::register(device, SharedMemory::open(fd, words)?)
    }

    fn register(device: &Device, memory: SharedMemory) -> anyhow::Result<Words> {
        // SAFETY: page-aligned mapped memory that stays mapped until `drop` has unregistered it.
        let address = unsafe { device.backend().register(memory.base, length(memory.lines)) }?;
        Ok(Words {
            memory: ManuallyDrop::new(memory),
            device: device.clone(),
            address,
        })
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.memory.fd()
    }

    pub fn word(&self, index: usize) -> &TimelineWord {
        self.memory.word(index)
    }

    /// The word's whole line: sixteen bytes of it are the word.
    pub fn line(&self, index: usize) -> &[AtomicU64; LINE_BYTES / 8] {
        self.memory.line(index)
    }

    /// The word's address for the device.
    pub fn address(&self, index: usize) -> DevicePtr {
        assert!(
            index < self.memory.lines,
            "word {index} of {}",
            self.memory.lines
        );
        self.address + (index * LINE_BYTES) as u64
    }

    pub fn signal(&self, index: usize, value: u64) -> StreamOp {
        StreamOp::Signal {
            word: self.address(index),
            value,
        }
    }

    pub fn wait(&self, index: usize, value: u64) -> StreamOp {
        StreamOp::Wait {
            word: self.address(index),
            value,
        }
    }

    /// Waits on the CPU until a word is reached: a GPU's by polling, a thread's as the host backend
    /// does it.
    pub fn await_word(&self, index: usize, value: u64) -> anyhow::Result<()> {
        let word = self.word(index);
        if self.device.info().id.kind == DeviceKind::Host {
            ensure!(
                word.wait(value, PATIENCE, true),
                "word {index} does not reach {value}"
            );
            return Ok(());
        }
        let start = Instant::now();
        while !word.reached(value) {
            for _ in 0..256 {
                std::hint::spin_loop();
                if word.reached(value) {
                    return Ok(());
                }
            }
            ensure!(
                start.elapsed() < PATIENCE,
                "word {index} does not reach {value}"
            );
        }
        Ok(())
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // A host's stream is a thread, which reads the word's sleepers after the store that was
        // awaited: the memory stays mapped.
        if self.device.info().id.kind == DeviceKind::Host {
            return;
        }
        // SAFETY: registered in `register`. The caller that enqueued work on a word has awaited it.
        if unsafe { self.device.backend().unregister(self.memory.base) }.is_ok() {
            // Else it stays mapped: the device may still reach it.
            // SAFETY: dropped here alone, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}

/// `cuStreamBatchMemOp`, one call.
///
/// # Safety
/// The words outlive the operations.
pub unsafe fn enqueue(stream: &Stream, ops: &[StreamOp]) -> warpipe::Result<()> {
    // SAFETY: the stream is live; the words are the caller's promise.
    unsafe { stream.device().backend().batch(stream.raw(), ops) }
}

/// The driver's calls of one operation of the library: `cuStreamIsCapturing`, and then the
/// operations, if there are any, with the context looked up once.
///
/// # Safety
/// The words outlive the operations.
pub unsafe fn check_and_enqueue(stream: &Stream, ops: &[StreamOp]) -> warpipe::Result<()> {
    let backend = stream.device().backend();
    // SAFETY: the stream is live.
    unsafe { backend.is_capturing(stream.raw()) }?;
    if ops.is_empty() {
        return Ok(());
    }
    // SAFETY: as above; the words are the caller's promise.
    unsafe { backend.batch_at_once(stream.raw(), ops) }
}

/// Device memory, allocated here or imported from the other process.
#[derive(Debug)]
pub struct Memory {
    device: Device,
    region: RawRegion,
}

impl Memory {
    pub fn allocate(device: &Device, bytes: u64) -> anyhow::Result<Memory> {
        let bytes = bytes.next_multiple_of(device.backend().granularity().max(1));
        Ok(Memory {
            device: device.clone(),
            region: device.backend().allocate(bytes)?,
        })
    }

    /// Passes it to the other process, which calls [`Memory::import`].
    pub fn export(&self) -> anyhow::Result<(OwnedFd, u64, DeviceId)> {
        // SAFETY: the region is live as long as self.
        let fd = unsafe { self.device.backend().export(&self.region) }?;
        Ok((fd, self.region.bytes, self.device.info().id))
    }

    pub fn import(
        device: &Device,
        fd: OwnedFd,
        bytes: u64,
        owner: DeviceId,
    ) -> anyhow::Result<Memory> {
        Memory::import_for(Access::Read, device, fd, bytes, owner)
    }

    /// The same, to be written by both.
    pub fn import_for(
        access: Access,
        device: &Device,
        fd: OwnedFd,
        bytes: u64,
        owner: DeviceId,
    ) -> anyhow::Result<Memory> {
        let region = device
            .backend()
            .import(&[fd.as_fd()], bytes, access, owner)?;
        Ok(Memory {
            device: device.clone(),
            region,
        })
    }

    pub fn ptr(&self) -> DevicePtr {
        self.region.ptr
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: released once. The benchmarks await their streams' last word before they let
        // memory go.
        let _ = unsafe { self.device.backend().release(&mut self.region) };
    }
}
