//! Memory like another allocator's, and the handles that name it. **This module is marked for
//! unsafe**: it maps and unmaps.
//!
//! A handle names the memory's memfd: process, descriptor, inode. A process that knows the bytes
//! and runs as the same user opens it through `/proc/PID/fd`, where the kernel checks the user. It
//! cannot be opened any more once its process is dead or has freed it. A CUDA legacy handle
//! promises the same, and no more.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::ProtFlags;

use super::memory::{SEALS, check_sealed_memfd, map, sealed_memfd};
use crate::backend::pointer::{IpcEventCount, kind_outside, mapping_at};
use crate::backend::{DeviceId, DevicePtr, IpcBytes, PointerInfo, PointerKind};
use crate::error::{Error, HandleFault, Result};
use crate::fork::per_process::InheritedOnFork;
use crate::fork::{CloseOnForkFd, OwnerProcess};
use crate::origin::{Liveness, ProcessOrigin};

const MEMORY: [u8; 8] = *b"WPHOSTM1";
const EVENT: [u8; 8] = *b"WPHOSTE1";

/// The name of such a memfd, for `/proc/PID/maps`.
const NAME: &std::ffi::CStr = c"warpipe-plain";

/// The memory that this process allocated and opened, by address.
#[derive(Debug, Default)]
pub(super) struct DeviceMalloc {
    allocated: InheritedOnFork<BTreeMap<DevicePtr, Allocation>>,
    opened: InheritedOnFork<BTreeMap<DevicePtr, OpenImport>>,
    last: AtomicU64,
    pub(super) events: IpcEventCount,
}

#[derive(Debug)]
struct Allocation {
    fd: CloseOnForkFd,
    bytes: u64,
    /// Counts up for the life of the process.
    number: u64,
    owner_process: OwnerProcess,
}

#[derive(Debug)]
struct OpenImport {
    file: File,
    bytes: u64,
    times: u32,
}

/// A file's identity among all existing files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct File {
    device: u64,
    inode: u64,
}

impl File {
    fn of(stat: &rustix::fs::Stat) -> File {
        File {
            device: stat.st_dev,
            inode: stat.st_ino,
        }
    }
}

impl DeviceMalloc {
    pub(super) fn allocate(&self, bytes: u64) -> Result<DevicePtr> {
        let length = page_multiple(bytes)?;
        let fd = sealed_memfd(NAME, length, SEALS)?;
        let base = map(&fd, length, ProtFlags::READ | ProtFlags::WRITE)?;
        let number = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let allocation = Allocation {
            fd,
            bytes,
            number,
            owner_process: OwnerProcess::current(),
        };
        self.allocated.lock().insert(base, allocation);
        Ok(base)
    }

    /// Frees the memory and returns its bytes.
    ///
    /// # Safety
    /// `base` came from [`allocate`](Self::allocate), and no code uses the memory any more.
    pub(super) unsafe fn free(&self, base: DevicePtr) -> Result<u64> {
        let unknown = || {
            Error::argument(
                "ptr",
                format!("{base:#x}"),
                "what allocate_plain returned, once",
            )
        };
        let Allocation { bytes, .. } = self.allocated.lock().remove(&base).ok_or_else(unknown)?;
        // SAFETY: the caller's promise; `allocate` mapped exactly this range.
        unsafe { rustix::mm::munmap(base as *mut _, page_multiple(bytes)? as usize) }
            .map_err(|e| Error::os("munmap", "plain memory", e))?;
        Ok(bytes)
    }

    pub(super) fn locate(&self, ptr: DevicePtr, owner: DeviceId) -> Result<PointerInfo> {
        let allocated = self.allocated.lock();
        if let Some((&base, allocation)) = allocated.range(..=ptr).next_back()
            && ptr - base < allocation.bytes
        {
            allocation.owner_process.check()?;
            let Allocation { bytes, number, .. } = *allocation;
            return Ok(PointerInfo {
                kind: PointerKind::Device,
                owner,
                base,
                bytes,
                allocation: number,
            });
        }
        drop(allocated);
        if self
            .opened
            .lock()
            .range(..=ptr)
            .next_back()
            .is_some_and(|(&base, opened)| ptr - base < opened.bytes)
        {
            return Ok(PointerInfo::of_kind(PointerKind::Import, owner));
        }
        let is_region = |name: &str| name.contains("/memfd:warpipe-region");
        let kind = match mapping_at(ptr) {
            Some(mapping) if is_region(&mapping.name) => PointerKind::Vmm,
            _ => kind_outside(ptr),
        };
        Ok(PointerInfo::of_kind(kind, owner))
    }

    pub(super) fn export(&self, base: DevicePtr) -> Result<IpcBytes> {
        let allocated = self.allocated.lock();
        let unknown = || Error::not_exportable(base, PointerKind::Unknown);
        let allocation = allocated.get(&base).ok_or_else(unknown)?;
        allocation.owner_process.check()?;
        let fd = allocation.fd.as_fd();
        let stat = rustix::fs::fstat(fd).map_err(|e| Error::os("fstat", "plain memory", e))?;
        write(MEMORY, fd.as_raw_fd() as u32, [stat.st_dev, stat.st_ino])
    }

    /// Maps the memory, or counts one more opening of it. Returns the base, and whether it was
    /// mapped just now.
    pub(super) fn open(&self, handle: &IpcBytes, bytes: u64) -> Result<(DevicePtr, bool)> {
        let (origin, number, [device, inode]) =
            read(MEMORY, handle).ok_or_else(|| refused("it is no handle of host memory"))?;
        let here = ProcessOrigin::here()?;
        if origin == here {
            return Err(refused("it names memory of this process"));
        }
        if (origin.host, origin.namespace) != (here.host, here.namespace) {
            return Err(refused(
                "its process is not of this machine's PID namespace",
            ));
        }
        if origin.life(&here) == Liveness::Gone {
            return Err(refused("its process is gone"));
        }
        let fd = open_file(origin.pid, number, File { device, inode })?;
        // A process that began after the check above would have another file there.
        let length = page_multiple(bytes)?;
        check_sealed_memfd(fd.as_fd(), length).map_err(|found| refused(&found))?;
        self.map_once(&fd, File { device, inode }, bytes, length)
    }

    fn map_once(
        &self,
        fd: &CloseOnForkFd,
        file: File,
        bytes: u64,
        length: u64,
    ) -> Result<(DevicePtr, bool)> {
        let mut opened = self.opened.lock();
        if let Some((&base, known)) = opened.iter_mut().find(|(_, known)| known.file == file) {
            known.times += 1;
            return Ok((base, false));
        }
        let base = map(fd, length, ProtFlags::READ | ProtFlags::WRITE)?;
        opened.insert(
            base,
            OpenImport {
                file,
                bytes,
                times: 1,
            },
        );
        Ok((base, true))
    }

    /// Closes one opening and returns the bytes that were unmapped.
    ///
    /// # Safety
    /// No code uses the memory, unless it is open more than once.
    pub(super) unsafe fn close(&self, base: DevicePtr) -> Result<u64> {
        let mut opened = self.opened.lock();
        let entry = opened
            .get_mut(&base)
            .ok_or_else(|| Error::legacy(HandleFault::NotOpen(base)))?;
        entry.times -= 1;
        if entry.times > 0 {
            return Ok(0);
        }
        let bytes = entry.bytes;
        opened.remove(&base);
        // SAFETY: the caller's promise; `map_once` mapped exactly this range, and it was open no
        // more than once.
        unsafe { rustix::mm::munmap(base as *mut _, page_multiple(bytes)? as usize) }
            .map_err(|e| Error::os("munmap", "opened memory", e))?;
        Ok(bytes)
    }
}

/// The handle of an interprocess event.
pub(super) fn export_event(event: u64) -> Result<IpcBytes> {
    write(EVENT, 0, [event, 0])
}

/// Checks that the bytes name an event of a living process.
pub(super) fn check_event(handle: &IpcBytes) -> Result<()> {
    let (origin, ..) =
        read(EVENT, handle).ok_or_else(|| refused("it is no handle of a host event"))?;
    match origin.life(&ProcessOrigin::here()?) {
        Liveness::Gone => Err(refused("its process is gone")),
        _ => Ok(()),
    }
}

/// Opens the descriptor of another process, if it is the expected file. The file is checked before
/// it is opened: opening a device or a pipe might have side effects.
fn open_file(pid: i32, number: u32, file: File) -> Result<CloseOnForkFd> {
    let path = format!("/proc/{pid}/fd/{number}");
    let failed = |call, error: Errno| match error {
        Errno::NOENT | Errno::SRCH | Errno::ACCESS | Errno::PERM => {
            refused(&format!("{call} {path}: {error}"))
        }
        error => Error::os(call, path.clone(), error),
    };
    let other = || refused(&format!("{path} is another file by now"));
    let stat = rustix::fs::stat(&path).map_err(|error| failed("stat", error))?;
    if File::of(&stat) != file {
        return Err(other());
    }
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let fd = CloseOnForkFd::open(|| rustix::fs::open(&path, flags, Mode::empty()))
        .map_err(|error| failed("open", error))?;
    let stat = rustix::fs::fstat(&fd).map_err(|error| failed("fstat", error))?;
    if File::of(&stat) == file {
        Ok(fd)
    } else {
        Err(other())
    }
}

fn refused(words: &str) -> Error {
    Error::legacy(HandleFault::Refused(words.into()))
}

fn page_multiple(bytes: u64) -> Result<u64> {
    let wrong = || Error::argument("bytes", bytes, "1 to what an address can count");
    bytes
        .max(1)
        .checked_next_multiple_of(rustix::param::page_size() as u64)
        .ok_or_else(wrong)
}

/// A handle: what it is of, this process, a number and two more.
fn write(magic: [u8; 8], number: u32, [first, second]: [u64; 2]) -> Result<IpcBytes> {
    let here = ProcessOrigin::here()?;
    let place = u64::from(here.pid as u32) | u64::from(number) << 32;
    let fields = [
        here.host,
        here.namespace,
        here.started,
        place,
        first,
        second,
    ];
    let mut bytes = [0; 64];
    bytes[..8].copy_from_slice(&magic);
    bytes[8..56].copy_from_slice(fields.map(u64::to_le_bytes).as_flattened());
    Ok(bytes)
}

/// What [`write`] wrote.
fn read(magic: [u8; 8], bytes: &IpcBytes) -> Option<(ProcessOrigin, u32, [u64; 2])> {
    let (fields, _) = bytes[8..56].as_chunks();
    let [host, namespace, started, place, first, second] =
        *<&[[u8; 8]; 6]>::try_from(fields).ok()?;
    let [host, namespace, started, place, first, second] =
        [host, namespace, started, place, first, second].map(u64::from_le_bytes);
    let pid = place as u32 as i32;
    let origin = ProcessOrigin {
        host,
        namespace,
        started,
        pid,
    };
    let is_one = bytes[..8] == magic && bytes[56..] == [0; 8];
    is_one.then_some((origin, (place >> 32) as u32, [first, second]))
}
