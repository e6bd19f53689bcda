//! Memory of `cuMemAlloc` and its kin, and the driver's older IPC: handles of memory and of events.
//!
//! A memory handle names the allocation's memfd: process, descriptor, inode. It is opened through
//! `/proc/PID/fd`, so only the same user can open it, and it dies with its process.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use rustix::fs::{MemfdFlags, Mode, OFlags, Stat};
use rustix::mm::{MapFlags, ProtFlags};

use crate::memory::{self, USED};
use crate::status::*;
use crate::{capture, config, device, host, stream};

/// Addresses are multiples of this; lengths may be anything.
const PAGE: usize = 4096;

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Plain,
    Pool,
    Managed,
}

/// The block at an address.
struct Block {
    kind: Kind,
    bytes: usize,
    /// The fixed number of its device.
    device: usize,
    /// Counts up for the life of the process.
    number: u64,
    /// `None` for opened memory, which another process owns.
    fd: Option<OwnedFd>,
    /// Device and inode of its memfd.
    file: [u64; 2],
    /// How often it was opened; 0 for this process's own.
    opened: u32,
}

#[derive(Default)]
struct Blocks {
    last: u64,
    by_address: BTreeMap<usize, Block>,
}

static BLOCKS: Mutex<Option<Blocks>> = Mutex::new(None);

fn with<T>(body: impl FnOnce(&mut Blocks) -> T) -> T {
    body(
        BLOCKS
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert_default(),
    )
}

impl Blocks {
    fn at(&self, address: u64, bytes: usize) -> Option<(usize, &Block)> {
        let address = address as usize;
        let (&base, block) = self.by_address.range(..=address).next_back()?;
        address
            .checked_add(bytes.max(1))
            .is_some_and(|end| end <= base + block.bytes)
            .then_some((base, block))
    }
}

/// Whether all these bytes lie in one such allocation.
pub fn is_block(address: u64, bytes: usize) -> bool {
    with(|blocks| blocks.at(address, bytes).is_some())
}

/// Whether a kernel of the device reaches such an allocation: its device's own, opened memory
/// (which enables peers), and managed memory.
pub fn is_reached(device: usize, address: u64) -> bool {
    let reaches =
        |block: &Block| block.device == device || block.opened > 0 || block.kind == Kind::Managed;
    with(|blocks| {
        blocks
            .at(address, 1)
            .is_none_or(|(_, block)| reaches(block))
    })
}

/// The attributes of a block.
pub struct Facts {
    pub kind: Kind,
    pub number: u64,
    pub device: usize,
    /// Its first byte, and its length.
    pub range: (u64, usize),
}

pub fn facts(address: u64) -> Option<Facts> {
    with(|blocks| {
        let (base, block) = blocks.at(address, 1)?;
        Some(Facts {
            kind: block.kind,
            number: block.number,
            device: block.device,
            range: (base as u64, block.bytes),
        })
    })
}

fn file_of(stat: &Stat) -> [u64; 2] {
    [stat.st_dev, stat.st_ino]
}

fn pages(bytes: usize) -> Outcome<usize> {
    bytes
        .checked_next_multiple_of(PAGE)
        .filter(|&bytes| bytes > 0)
        .ok_or(INVALID_VALUE)
}

fn map(fd: &OwnedFd, bytes: usize) -> Outcome<usize> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, placed by the kernel.
    let mapped = unsafe {
        rustix::mm::mmap(
            ptr::null_mut(),
            pages(bytes)?,
            protection,
            MapFlags::SHARED,
            fd,
            0,
        )
    };
    mapped
        .map(|start| start.expose_provenance())
        .map_err(|_| OPERATING_SYSTEM)
}

/// The addresses stay reserved for the device, as a driver's do: a later unrelated mapping, a
/// thread's stack perhaps, never has an address that was device memory.
fn unmap(base: usize, bytes: usize) -> Outcome {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
    let (start, bytes) = (ptr::with_exposed_provenance_mut(base), pages(bytes)?);
    // SAFETY: this library's own mapping of that length, which was in the table once, is replaced.
    let replaced = unsafe { rustix::mm::mmap_anonymous(start, bytes, ProtFlags::empty(), flags) };
    replaced.map(|_| ()).map_err(|_| OPERATING_SYSTEM)
}

fn allocate(kind: Kind, bytes: usize) -> Outcome<u64> {
    let (device, length) = (device::current()?, pages(bytes)?);
    let limit = config::get().memory_bytes;
    let room = |used: u64| used.checked_add(bytes as u64).filter(|&sum| sum <= limit);
    USED.fetch_update(
        std::sync::atomic::Ordering::AcqRel,
        std::sync::atomic::Ordering::Acquire,
        room,
    )
    .map_err(|_| OUT_OF_MEMORY)?;
    let made = rustix::fs::memfd_create("warpipe-fake-cuda-block", MemfdFlags::CLOEXEC)
        .and_then(|fd| rustix::fs::ftruncate(&fd, length as u64).map(|()| fd))
        .and_then(|fd| rustix::fs::fstat(&fd).map(|stat| (fd, file_of(&stat))))
        .map_err(|_| OPERATING_SYSTEM)
        .and_then(|(fd, file)| Ok((map(&fd, bytes)?, fd, file)));
    let (base, fd, file) = made.inspect_err(|_| give_back(bytes))?;
    with(|blocks| {
        blocks.last += 1;
        let block = Block {
            kind,
            bytes,
            device,
            number: blocks.last,
            fd: Some(fd),
            file,
            opened: 0,
        };
        blocks.by_address.insert(base, block);
    });
    Ok(base as u64)
}

fn give_back(bytes: usize) {
    USED.fetch_sub(bytes as u64, std::sync::atomic::Ordering::AcqRel);
}

fn free(address: u64) -> Outcome {
    let base = address as usize;
    let bytes = with(|blocks| {
        let block = blocks
            .by_address
            .get(&base)
            .filter(|block| block.opened == 0)
            .ok_or(INVALID_VALUE)?;
        let bytes = block.bytes;
        blocks.by_address.remove(&base);
        Ok(bytes)
    })?;
    give_back(bytes);
    unmap(base, bytes)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> c_int {
    answer("cuMemAlloc_v2", Needs::Context, || {
        capture::check_unsafe_call()?;
        let _turn = host::allocation();
        // SAFETY: the caller's out pointer.
        unsafe { give(address, allocate(Kind::Plain, bytes)?) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocManaged(address: *mut u64, bytes: usize, _flags: u32) -> c_int {
    // SAFETY: the caller's out pointer.
    answer("cuMemAllocManaged", Needs::Context, || unsafe {
        give(address, allocate(Kind::Managed, bytes)?)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocAsync(
    address: *mut u64,
    bytes: usize,
    _stream: *mut c_void,
) -> c_int {
    // SAFETY: the caller's out pointer.
    answer("cuMemAllocAsync", Needs::Context, || unsafe {
        give(address, allocate(Kind::Pool, bytes)?)
    })
}

/// The stream's earlier work is done before the memory goes: the driver need not wait for that in the
/// call, and may.
#[unsafe(no_mangle)]
extern "C" fn cuMemFreeAsync(address: u64, stream: *mut c_void) -> c_int {
    answer("cuMemFreeAsync", Needs::Context, || {
        stream::find_for_work(stream)?.finish()?;
        free(address)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> c_int {
    answer("cuMemFree_v2", Needs::Context, || {
        capture::check_unsafe_call()?;
        free(address)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetAddressRange_v2(
    base: *mut u64,
    bytes: *mut usize,
    address: u64,
) -> c_int {
    answer("cuMemGetAddressRange_v2", Needs::Context, || {
        // The driver looks in the current context alone.
        let (start, length) = match facts(address) {
            Some(found) if found.device == device::current()? => found.range,
            Some(_) => return Err(NOT_FOUND),
            None => memory::mapping_of(address).ok_or(INVALID_VALUE)?,
        };
        // SAFETY: the caller's out pointers.
        unsafe {
            give(base, start)?;
            give(bytes, length)
        }
    })
}

/// A handle's bytes: magic, pid and descriptor, start of the process, file, length and device.
#[repr(C)]
#[derive(Clone, Copy)]
struct Handle {
    magic: [u8; 8],
    pid: i32,
    fd: i32,
    started: u64,
    file: [u64; 2],
    bytes: u64,
    device: u64,
    zero: u64,
}

const _: () = assert!(size_of::<Handle>() == 64);
const MEMORY: [u8; 8] = *b"CUDBLMEM";
const EVENT: [u8; 8] = *b"CUDBLEVT";

impl Handle {
    fn here(magic: [u8; 8]) -> Outcome<Handle> {
        let pid = std::process::id() as i32;
        let started = started(pid).ok_or(OPERATING_SYSTEM)?;
        Ok(Handle {
            magic,
            pid,
            fd: -1,
            started,
            file: [0, 0],
            bytes: 0,
            device: 0,
            zero: 0,
        })
    }

    fn is_alive(&self) -> bool {
        started(self.pid) == Some(self.started)
    }
}

/// The start time of a process; none if it does not exist, or is a zombie.
fn started(pid: i32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = text.rsplit_once(") ")?.1.split(' ');
    match fields.next()? {
        "Z" | "X" => None,
        _ => fields.nth(18)?.parse().ok(),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuIpcGetMemHandle(out: *mut Handle, address: u64) -> c_int {
    answer("cuIpcGetMemHandle", Needs::Context, || {
        let handle = with(|blocks| {
            let (_, block) = blocks.at(address, 1).ok_or(INVALID_VALUE)?;
            let fd = block
                .fd
                .as_ref()
                .filter(|_| block.kind == Kind::Plain)
                .ok_or(INVALID_VALUE)?
                .as_raw_fd();
            let (bytes, device) = (block.bytes as u64, block.device as u64);
            Ok(Handle {
                fd,
                file: block.file,
                bytes,
                device,
                ..Handle::here(MEMORY)?
            })
        })?;
        // SAFETY: the caller's out pointer.
        unsafe { give(out, handle) }
    })
}

fn open(handle: Handle) -> Outcome<u64> {
    if handle.magic != MEMORY || handle.zero != 0 || handle.bytes == 0 {
        return Err(INVALID_VALUE);
    }
    if handle.pid == std::process::id() as i32 {
        return Err(INVALID_CONTEXT);
    }
    let owner = usize::try_from(handle.device)
        .ok()
        .filter(|device| config::get().visible.contains(device));
    if owner.ok_or(INVALID_DEVICE)? != device::current()? && !config::get().peers {
        return Err(PEER_ACCESS_UNSUPPORTED);
    }
    if !handle.is_alive() {
        return Err(INVALID_HANDLE);
    }
    let fd = open_file(&handle).ok_or(INVALID_HANDLE)?;
    with(|blocks| {
        if let Some((&base, block)) = blocks
            .by_address
            .iter_mut()
            .find(|(_, block)| block.opened > 0 && block.file == handle.file)
        {
            block.opened += 1;
            return Ok(base as u64);
        }
        let bytes = handle.bytes as usize;
        let base = map(&fd, bytes)?;
        blocks.last += 1;
        let (number, device) = (blocks.last, handle.device as usize);
        let block = Block {
            kind: Kind::Plain,
            bytes,
            device,
            number,
            fd: None,
            file: handle.file,
            opened: 1,
        };
        blocks.by_address.insert(base, block);
        Ok(base as u64)
    })
}

fn open_file(handle: &Handle) -> Option<OwnedFd> {
    let path = format!("/proc/{}/fd/{}", handle.pid, handle.fd);
    let is_it = |stat: Stat| file_of(&stat) == handle.file && stat.st_size as u64 >= handle.bytes;
    rustix::fs::stat(&path).ok().filter(|&stat| is_it(stat))?;
    let fd = rustix::fs::open(
        &path,
        OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK,
        Mode::empty(),
    )
    .ok()?;
    rustix::fs::fstat(&fd).ok().filter(|&stat| is_it(stat))?;
    Some(fd)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuIpcOpenMemHandle_v2(address: *mut u64, handle: Handle, flags: u32) -> c_int {
    answer("cuIpcOpenMemHandle_v2", Needs::Context, || {
        if flags != 1 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's out pointer.
        unsafe { give(address, open(handle)?) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuIpcCloseMemHandle(address: u64) -> c_int {
    answer("cuIpcCloseMemHandle", Needs::Context, || {
        let base = address as usize;
        let last = with(|blocks| {
            let block = blocks
                .by_address
                .get_mut(&base)
                .filter(|block| block.opened > 0)
                .ok_or(INVALID_VALUE)?;
            block.opened -= 1;
            let is_last = block.opened == 0;
            Ok(if is_last {
                blocks.by_address.remove(&base)
            } else {
                None
            })
        })?;
        last.map_or(Ok(()), |block| unmap(base, block.bytes))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuIpcGetEventHandle(out: *mut Handle, event: *mut c_void) -> c_int {
    answer("cuIpcGetEventHandle", Needs::Context, || {
        if !crate::event::is_interprocess(event)? {
            return Err(INVALID_HANDLE);
        }
        let handle = Handle {
            bytes: event.addr() as u64,
            ..Handle::here(EVENT)?
        };
        // SAFETY: the caller's out pointer.
        unsafe { give(out, handle) }
    })
}

/// An event of this process that was never recorded: it is complete.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuIpcOpenEventHandle(out: *mut *mut c_void, handle: Handle) -> c_int {
    answer("cuIpcOpenEventHandle", Needs::Context, || {
        if handle.magic != EVENT || handle.zero != 0 {
            return Err(INVALID_VALUE);
        }
        if !handle.is_alive() {
            return Err(INVALID_HANDLE);
        }
        // SAFETY: the caller's out pointer.
        unsafe { give(out, crate::event::create(false)?) }
    })
}
