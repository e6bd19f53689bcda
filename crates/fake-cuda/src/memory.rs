//! Device memory: memfds, mapped into reserved ranges of this process.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};

use crate::config;
use crate::device;
use crate::host;
use crate::ipc;
use crate::status::*;

/// Lengths are multiples of this, as on most GPUs.
const GRANULARITY: usize = 2 << 20;
const NAME: &str = "warpipe-fake-cuda-";

/// Bytes created by this process and still held by a handle or a mapping.
pub static USED: AtomicU64 = AtomicU64::new(0);

struct Allocation {
    fd: OwnedFd,
    bytes: usize,
    /// The fixed number of its device.
    device: usize,
    /// Whether it counts as this process's use: imported memory belongs to another process.
    counted: bool,
    /// Whether it was made to be exported.
    exportable: bool,
    /// The value of its handle, as long as it is there.
    handle: u64,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.counted {
            USED.fetch_sub(self.bytes as u64, Ordering::AcqRel);
        }
    }
}

/// An allocation, mapped at an address inside a reserved range.
struct Mapping {
    bytes: usize,
    allocation: Arc<Allocation>,
    writable: bool,
    readable: bool,
    /// The device that was last given access.
    reader: usize,
}

#[derive(Default)]
struct Memory {
    last_handle: u64,
    /// Allocations by handle, and how often each is held.
    handles: HashMap<u64, (Arc<Allocation>, u32)>,
    /// Reserved ranges: their lengths by address.
    ranges: BTreeMap<usize, usize>,
    /// By address. Each lies in one reserved range, and none overlaps another.
    mappings: BTreeMap<usize, Mapping>,
}

impl Memory {
    /// The mapping in which `address` lies.
    fn mapping_at(&self, address: usize) -> Option<(usize, &Mapping)> {
        let (&start, mapping) = self.mappings.range(..=address).next_back()?;
        (address - start < mapping.bytes).then_some((start, mapping))
    }

    /// Whether adjacent mappings cover these bytes, and each is as wanted.
    fn covers(&self, address: usize, bytes: usize, is_so: impl Fn(&Mapping) -> bool) -> bool {
        let Some(end) = address.checked_add(bytes) else {
            return false;
        };
        let mut at = address;
        loop {
            match self.mapping_at(at) {
                Some((start, mapping)) if is_so(mapping) => at = start + mapping.bytes,
                _ => return false,
            }
            if at >= end {
                return true;
            }
        }
    }

    /// The mappings that make up exactly these bytes.
    fn exactly(&mut self, address: u64, bytes: usize) -> Outcome<Vec<usize>> {
        let start = address as usize;
        let end = start.checked_add(bytes).ok_or(INVALID_VALUE)?;
        let mut at = start;
        for (&next, mapping) in self.mappings.range(start..end) {
            if next != at {
                return Err(INVALID_VALUE);
            }
            at = next + mapping.bytes;
        }
        if at != end || bytes == 0 {
            return Err(INVALID_VALUE);
        }
        Ok(self.mappings.range(start..end).map(|(&at, _)| at).collect())
    }
}

static MEMORY: Mutex<Option<Memory>> = Mutex::new(None);

fn with<T>(body: impl FnOnce(&mut Memory) -> T) -> T {
    let mut memory: MutexGuard<'_, Option<Memory>> =
        MEMORY.lock().unwrap_or_else(PoisonError::into_inner);
    body(memory.get_or_insert_default())
}

/// Destroys a device's mappings and handles in this process. Other processes keep their imports.
pub fn end_all(device: usize) {
    with(|memory| {
        memory
            .handles
            .retain(|_, (allocation, _)| allocation.device != device);
        memory.mappings.retain(|&address, mapping| {
            let is_ended = mapping.allocation.device == device;
            if is_ended {
                // The addresses stay reserved. The device's streams have ended.
                let _ = clear(address as u64, mapping.bytes);
            }
            !is_ended
        });
    });
}

/// Whether work may use these bytes: mapped with that access here, or registered host memory.
pub fn usable(address: u64, bytes: usize, write: bool) -> bool {
    is_device(address, bytes, write) || host::is_registered(address, bytes)
}

/// Whether a kernel of the device may use these bytes: its own, those of another device that it was
/// given access to, registered host memory.
pub fn reached_by(device: usize, address: u64, bytes: usize, write: bool) -> bool {
    usable(address, bytes, write)
        && ipc::is_reached(device, address)
        && with(|memory| {
            memory
                .mapping_at(address as usize)
                .is_none_or(|(_, mapping)| mapping.reader == device)
        })
}

/// Whether these bytes are mapped device memory with that access.
pub fn is_device(address: u64, bytes: usize, write: bool) -> bool {
    if ipc::is_block(address, bytes) {
        return true;
    }
    with(|memory| {
        memory.covers(address as usize, bytes, |mapping| {
            if write {
                mapping.writable
            } else {
                mapping.readable
            }
        })
    })
}

/// The fields of `CUmemAllocationProp` that are checked.
#[repr(C)]
struct Properties {
    kind: u32,
    handle_types: u32,
    location_kind: u32,
    location: c_int,
}

/// The device that the properties name, if they are ones that the fake driver can serve, and whether
/// memory with them can be exported.
///
/// # Safety
/// `properties` is null or valid for reads.
unsafe fn device_in(properties: *const Properties) -> Outcome<(usize, bool)> {
    // SAFETY: the caller's promise.
    let properties = unsafe { properties.as_ref() }.ok_or(INVALID_VALUE)?;
    let is_exportable = match properties.handle_types {
        0 => false,
        1 => true,
        _ => return Err(INVALID_VALUE),
    };
    if (properties.kind, properties.location_kind) != (1, 1) {
        return Err(INVALID_VALUE);
    }
    Ok((device::physical(properties.location)?, is_exportable))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetAllocationGranularity(
    granularity: *mut usize,
    properties: *const c_void,
    _option: u32,
) -> c_int {
    answer("cuMemGetAllocationGranularity", Needs::Init, || {
        // SAFETY: the caller's pointers.
        unsafe {
            device_in(properties.cast())?;
            give(granularity, GRANULARITY)
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int {
    answer("cuMemGetInfo_v2", Needs::Context, || {
        let all = config::get().memory_bytes;
        // SAFETY: the caller's out pointers.
        unsafe {
            give(
                free,
                all.saturating_sub(USED.load(Ordering::Acquire)) as usize,
            )?;
            give(total, all as usize)
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemCreate(
    handle: *mut u64,
    bytes: usize,
    properties: *const c_void,
    flags: u64,
) -> c_int {
    answer("cuMemCreate", Needs::Context, || {
        // SAFETY: the caller's pointer.
        let (device, exportable) = unsafe { device_in(properties.cast()) }?;
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) || flags != 0 {
            return Err(INVALID_VALUE);
        }
        let mut allocation = create(bytes, device)?;
        allocation.exportable = exportable;
        // SAFETY: the caller's out pointer.
        unsafe { give(handle, hold(allocation)) }
    })
}

fn create(bytes: usize, device: usize) -> Outcome<Allocation> {
    let limit = config::get().memory_bytes;
    let room = |used: u64| used.checked_add(bytes as u64).filter(|&sum| sum <= limit);
    USED.fetch_update(Ordering::AcqRel, Ordering::Acquire, room)
        .map_err(|_| OUT_OF_MEMORY)?;
    let made = rustix::fs::memfd_create(
        format!("{NAME}{device}"),
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )
    .and_then(|fd| rustix::fs::ftruncate(&fd, bytes as u64).map(|()| fd));
    match made {
        Ok(fd) => Ok(Allocation {
            fd,
            bytes,
            device,
            counted: true,
            exportable: true,
            handle: 0,
        }),
        Err(_) => {
            USED.fetch_sub(bytes as u64, Ordering::AcqRel);
            Err(OPERATING_SYSTEM)
        }
    }
}

fn hold(mut allocation: Allocation) -> u64 {
    with(|memory| {
        memory.last_handle += 1;
        allocation.handle = memory.last_handle;
        memory
            .handles
            .insert(memory.last_handle, (Arc::new(allocation), 1));
        memory.last_handle
    })
}

impl Memory {
    fn held(&self, handle: u64) -> Outcome<Arc<Allocation>> {
        let held = self.handles.get(&handle);
        held.map(|(allocation, _)| allocation.clone())
            .ok_or(INVALID_VALUE)
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemRelease(handle: u64) -> c_int {
    answer("cuMemRelease", Needs::Context, || {
        let released = with(|memory| {
            let (_, times) = memory.handles.get_mut(&handle).ok_or(INVALID_VALUE)?;
            *times -= 1;
            Ok((*times == 0).then(|| memory.handles.remove(&handle)))
        });
        released.map(drop)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemExportToShareableHandle(
    out: *mut c_int,
    handle: u64,
    kind: u32,
    _flags: u64,
) -> c_int {
    answer("cuMemExportToShareableHandle", Needs::Context, || {
        let allocation = with(|memory| memory.held(handle))?;
        // As on an H200: an imported allocation cannot be exported.
        if kind != 1 || !allocation.exportable {
            return Err(INVALID_VALUE);
        }
        // Without close-on-exec, like the driver's own.
        let fd = rustix::io::dup(&allocation.fd).map_err(|_| OPERATING_SYSTEM)?;
        // SAFETY: the caller's out pointer.
        unsafe { give(out, fd.into_raw_fd()) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemImportFromShareableHandle(
    handle: *mut u64,
    shareable: *mut c_void,
    kind: u32,
) -> c_int {
    answer("cuMemImportFromShareableHandle", Needs::Context, || {
        let fd = c_int::try_from(shareable.addr())
            .ok()
            .filter(|&fd| fd >= 0)
            .ok_or(INVALID_VALUE)?;
        if kind != 1 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller holds the descriptor open during this call, or it is none and every
        // use fails.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        // SAFETY: the caller's out pointer.
        unsafe { give(handle, hold(open(fd)?)) }
    })
}

/// The driver's answer to a descriptor that is not its own is "unknown error".
fn open(fd: BorrowedFd<'_>) -> Outcome<Allocation> {
    let seals: SealFlags = rustix::fs::fcntl_get_seals(fd).map_err(|_| UNKNOWN)?;
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
    let link = std::fs::read_link(path).map_err(|_| UNKNOWN)?;
    let device = device_named(&link.to_string_lossy())
        .filter(|_| seals.is_empty())
        .ok_or(UNKNOWN)?;
    let bytes = rustix::fs::fstat(fd).map_err(|_| UNKNOWN)?.st_size as usize;
    let fd = rustix::io::fcntl_dupfd_cloexec(fd.as_fd(), 3).map_err(|_| OPERATING_SYSTEM)?;
    Ok(Allocation {
        fd,
        bytes,
        device,
        counted: false,
        exportable: false,
        handle: 0,
    })
}

/// The device's number in the name of a memfd, `/memfd:NAME0 (deleted)`.
fn device_named(link: &str) -> Option<usize> {
    let digits = link.strip_prefix("/memfd:")?.strip_prefix(NAME)?;
    digits.split(' ').next()?.parse().ok()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAddressReserve(
    address: *mut u64,
    bytes: usize,
    _alignment: usize,
    _hint: u64,
    _flags: u64,
) -> c_int {
    answer("cuMemAddressReserve", Needs::Context, || {
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
            return Err(INVALID_VALUE);
        }
        // SAFETY: a new private mapping that nobody can access, placed by the kernel.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                ptr::null_mut(),
                bytes,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .map_err(|_| OUT_OF_MEMORY)?;
        with(|memory| memory.ranges.insert(start.expose_provenance(), bytes));
        // SAFETY: the caller's out pointer.
        unsafe { give(address, start.addr() as u64) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAddressFree(address: u64, bytes: usize) -> c_int {
    answer("cuMemAddressFree", Needs::Context, || {
        with(|memory| {
            let start = address as usize;
            let is_mapped = |memory: &Memory| {
                let last = memory.mappings.range(..start + bytes).next_back();
                last.is_some_and(|(&at, mapping)| at + mapping.bytes > start)
            };
            if memory.ranges.get(&start) != Some(&bytes) || is_mapped(memory) {
                return Err(INVALID_VALUE);
            }
            memory.ranges.remove(&start);
            // SAFETY: a range that `cuMemAddressReserve` mapped, and nothing else is mapped in it.
            unsafe { rustix::mm::munmap(place(address), bytes) }.map_err(|_| OPERATING_SYSTEM)
        })
    })
}

/// This library mapped the range's memory, and the mapping exposed its provenance.
fn place(address: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address as usize)
}

/// Puts the empty reservation back over a mapping.
fn clear(address: u64, bytes: usize) -> Outcome<()> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
    // SAFETY: over this library's own mapping, in a range that it has reserved.
    let reserved =
        unsafe { rustix::mm::mmap_anonymous(place(address), bytes, ProtFlags::empty(), flags) };
    reserved.map(drop).map_err(|_| OPERATING_SYSTEM)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemMap(
    address: u64,
    bytes: usize,
    offset: usize,
    handle: u64,
    flags: u64,
) -> c_int {
    answer("cuMemMap", Needs::Context, || {
        with(|memory| {
            let allocation = memory.held(handle)?;
            let start = address as usize;
            let end = start.checked_add(bytes).ok_or(INVALID_VALUE)?;
            let range = memory.ranges.range(..=start).next_back();
            let is_reserved = range.is_some_and(|(&at, &length)| end <= at + length);
            let below = memory.mappings.range(..end).next_back();
            let is_mapped = below.is_some_and(|(&at, mapping)| at + mapping.bytes > start);
            if !is_reserved || is_mapped || flags != 0 {
                return Err(INVALID_VALUE);
            }
            if offset != 0 || bytes != allocation.bytes {
                return Err(NOT_SUPPORTED);
            }
            // SAFETY: replaces the reservation, which is this library's own and empty.
            let mapped = unsafe {
                rustix::mm::mmap(
                    place(address),
                    bytes,
                    ProtFlags::empty(),
                    MapFlags::SHARED | MapFlags::FIXED,
                    &allocation.fd,
                    0,
                )
            };
            mapped.map_err(|_| OPERATING_SYSTEM)?;
            let mapping = Mapping {
                bytes,
                allocation,
                writable: false,
                readable: false,
                reader: 0,
            };
            memory.mappings.insert(start, mapping);
            Ok(())
        })
    })
}

/// A whole mapping, or several adjacent ones; never a part of one.
#[unsafe(no_mangle)]
extern "C" fn cuMemUnmap(address: u64, bytes: usize) -> c_int {
    answer("cuMemUnmap", Needs::Context, || {
        with(|memory| {
            for at in memory.exactly(address, bytes)? {
                memory.mappings.remove(&at);
            }
            clear(address, bytes)
        })
    })
}

/// The handle of the allocation that is mapped at an address, held once more: the same value,
/// also if every other hold has been released.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemRetainAllocationHandle(handle: *mut u64, address: *mut c_void) -> c_int {
    answer("cuMemRetainAllocationHandle", Needs::Context, || {
        let retained = with(|memory| {
            let (_, mapping) = memory.mapping_at(address.addr()).ok_or(INVALID_VALUE)?;
            let allocation = mapping.allocation.clone();
            let handle = allocation.handle;
            let (_, times) = memory.handles.entry(handle).or_insert((allocation, 0));
            *times += 1;
            Ok(handle)
        })?;
        // SAFETY: the caller's out pointer.
        unsafe { give(handle, retained) }
    })
}

/// `CUmemAccessDesc`.
#[repr(C)]
struct AccessDescription {
    location_kind: u32,
    location: c_int,
    flags: u32,
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemSetAccess(
    address: u64,
    bytes: usize,
    access: *const c_void,
    count: usize,
) -> c_int {
    answer("cuMemSetAccess", Needs::Context, || {
        // SAFETY: the caller's pointer to `count` descriptions, of which one is served.
        let access = unsafe { access.cast::<AccessDescription>().as_ref() }.ok_or(INVALID_VALUE)?;
        if count != 1 || access.location_kind != 1 {
            return Err(INVALID_VALUE);
        }
        let reader = device::physical(access.location)?;
        let (protection, readable, writable) = match access.flags {
            1 => (MprotectFlags::READ, true, false),
            3 => (MprotectFlags::READ | MprotectFlags::WRITE, true, true),
            _ => return Err(INVALID_VALUE),
        };
        with(|memory| {
            let mappings = memory.exactly(address, bytes)?;
            let owners = |at: &usize| memory.mappings[at].allocation.device;
            if mappings.iter().any(|at| owners(at) != reader) && !config::get().peers {
                return Err(INVALID_DEVICE);
            }
            // SAFETY: this library's own mappings of device memory.
            unsafe { rustix::mm::mprotect(place(address), bytes, protection) }
                .map_err(|_| OPERATING_SYSTEM)?;
            for at in mappings {
                let mapping = memory.mappings.get_mut(&at).ok_or(INVALID_VALUE)?;
                (mapping.readable, mapping.writable, mapping.reader) = (readable, writable, reader);
            }
            Ok(())
        })
    })
}

/// The device of mapped memory.
pub fn device_at(address: u64) -> Option<usize> {
    with(|memory| {
        let (_, mapping) = memory.mapping_at(address as usize)?;
        Some(mapping.allocation.device)
    })
}

/// Base and length of the mapping in which an address lies.
pub fn mapping_of(address: u64) -> Option<(u64, usize)> {
    with(|memory| {
        let (start, mapping) = memory.mapping_at(address as usize)?;
        Some((start as u64, mapping.bytes))
    })
}

/// Not a function of CUDA: the resources of this process, for tests of roll-back. Bytes created,
/// handles, ranges, mappings.
#[unsafe(no_mangle)]
unsafe extern "C" fn fakeCudaCensus(out: *mut [u64; 4]) -> c_int {
    answer("fakeCudaCensus", Needs::Nothing, || {
        let census = with(|memory| {
            [
                USED.load(Ordering::Acquire),
                memory.handles.len() as u64,
                memory.ranges.len() as u64,
                memory.mappings.len() as u64,
            ]
        });
        // SAFETY: the caller's out pointer.
        unsafe { give(out, census) }
    })
}
