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
use super::stream::HostEvent;
use super::{HostBackend, event, raw};
use crate::backend::pointer::{IpcEventCount, OpenMemory, kind_outside, mapping_at, wrong_owner};
use crate::backend::{
    DeviceId, DevicePtr, Ipc, IpcBytes, PointerInfo, PointerKind, RawEvent, Streams,
};
use crate::error::{Error, HandleFault, Result};
use crate::fork::per_process::InheritedOnFork;
use crate::fork::{CloseOnForkFd, OwnerProcess};
use crate::origin::{Liveness, ProcessOrigin};

const MEMORY: u64 = u64::from_le_bytes(*b"WPHOSTM1");
const EVENT: u64 = u64::from_le_bytes(*b"WPHOSTE1");

/// The name of such a memfd, for `/proc/PID/maps`.
const NAME: &std::ffi::CStr = c"warpipe-plain";

/// The file system and the inode of a memfd: its identity among all existing files.
type File = [u64; 2];

/// The memory that this process allocated and opened, by address.
#[derive(Debug, Default)]
pub(super) struct DeviceMalloc {
    allocated: InheritedOnFork<BTreeMap<DevicePtr, Allocation>>,
    opened: InheritedOnFork<OpenMemory<File>>,
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

impl Ipc for HostBackend {
    fn create_ipc_event(&self) -> Result<RawEvent> {
        self.malloc.events.add()?;
        Ok(RawEvent(raw(HostEvent::new(true))))
    }

    unsafe fn export_event(&self, on: RawEvent) -> Result<IpcBytes> {
        // SAFETY: the caller promises a live handle.
        if !unsafe { event(on) }.is_interprocess {
            let (found, allowed) = ("an event of this process alone", "one of create_ipc_event");
            return Err(Error::argument("event", found, allowed));
        }
        write(EVENT, 0, [on.0.addr() as u64, 0])
    }

    fn open_event(&self, handle: &IpcBytes) -> Result<RawEvent> {
        let found = read(EVENT, handle);
        let (origin, ..) = found.ok_or_else(|| refused("it is no handle of a host event"))?;
        match origin.life(&ProcessOrigin::here()?) {
            Liveness::Gone => Err(refused("its process is gone")),
            _ => self.create_event(),
        }
    }

    fn allocate_plain(&self, bytes: u64) -> Result<DevicePtr> {
        self.reserved(bytes, || {
            let length = page_multiple(bytes)?;
            let fd = sealed_memfd(NAME, length, SEALS)?;
            let base = map(&fd, length, ProtFlags::READ | ProtFlags::WRITE)?;
            let allocation = Allocation {
                fd,
                bytes,
                number: self.malloc.last.fetch_add(1, Ordering::Relaxed) + 1,
                owner_process: OwnerProcess::current(),
            };
            self.malloc.allocated.lock().insert(base, allocation);
            Ok(base)
        })
    }

    unsafe fn free_plain(&self, base: DevicePtr) -> Result<()> {
        let allocation = self.malloc.allocated.lock().remove(&base).ok_or_else(|| {
            let allowed = "what allocate_plain returned, once";
            Error::argument("ptr", format!("{base:#x}"), allowed)
        })?;
        // SAFETY: the caller's promise; `allocate_plain` mapped exactly this range.
        unsafe { unmap(base, allocation.bytes) }?;
        self.allocated
            .fetch_sub(allocation.bytes, Ordering::Relaxed);
        Ok(())
    }

    fn locate(&self, ptr: DevicePtr) -> Result<PointerInfo> {
        let info = |kind| PointerInfo::of_kind(kind, self.info.id);
        let allocated = self.malloc.allocated.lock();
        if let Some((&base, allocation)) = allocated.range(..=ptr).next_back()
            && ptr - base < allocation.bytes
        {
            allocation.owner_process.check()?;
            return Ok(PointerInfo {
                base,
                bytes: allocation.bytes,
                allocation: allocation.number,
                ..info(PointerKind::Device)
            });
        }
        drop(allocated);
        if self.malloc.opened.lock().has(ptr) {
            return Ok(info(PointerKind::Import));
        }
        let is_region = |name: &str| name.contains("/memfd:warpipe-region");
        Ok(info(match mapping_at(ptr) {
            Some(mapping) if is_region(&mapping.name) => PointerKind::Vmm,
            _ => kind_outside(ptr),
        }))
    }

    unsafe fn export_legacy(&self, base: DevicePtr) -> Result<IpcBytes> {
        let allocated = self.malloc.allocated.lock();
        let unknown = || Error::not_exportable(base, PointerKind::Unknown);
        let allocation = allocated.get(&base).ok_or_else(unknown)?;
        allocation.owner_process.check()?;
        let fd = allocation.fd.as_fd();
        let stat = rustix::fs::fstat(fd).map_err(|e| Error::os("fstat", "plain memory", e))?;
        write(MEMORY, fd.as_raw_fd() as u32, file_of(&stat))
    }

    fn open_legacy(&self, handle: &IpcBytes, bytes: u64, owner: DeviceId) -> Result<DevicePtr> {
        if owner != self.info.id {
            return Err(wrong_owner(owner, self.info.id));
        }
        let found = read(MEMORY, handle);
        let (origin, number, file) =
            found.ok_or_else(|| refused("it is no handle of host memory"))?;
        let here = ProcessOrigin::here()?;
        let reason = if origin == here {
            "it names memory of this process"
        } else if (origin.host, origin.namespace) != (here.host, here.namespace) {
            "its process is not of this machine's PID namespace"
        } else if origin.life(&here) == Liveness::Gone {
            "its process is gone"
        } else {
            ""
        };
        if !reason.is_empty() {
            return Err(refused(reason));
        }
        let fd = open_file(origin.pid, number, file)?;
        // A process that began after the check above would have another file there.
        let length = page_multiple(bytes)?;
        check_sealed_memfd(fd.as_fd(), length).map_err(|found| refused(&found))?;
        let mut opened = self.malloc.opened.lock();
        let known = opened.0.iter().find(|(_, open)| open.identity == file);
        let base = match known {
            Some((&base, _)) => base,
            None => map(&fd, length, ProtFlags::READ | ProtFlags::WRITE)?,
        };
        let imported = opened.open(base, bytes, file);
        self.imported.fetch_add(imported, Ordering::Relaxed);
        Ok(base)
    }

    unsafe fn close_legacy(&self, base: DevicePtr) -> Result<()> {
        let mut opened = self.malloc.opened.lock();
        if let Some(bytes) = opened.close(base)? {
            // SAFETY: the caller's promise; `open_legacy` mapped exactly this range, and it was open
            // no more than once.
            unsafe { unmap(base, bytes) }?;
            self.imported.fetch_sub(bytes, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// # Safety
/// No code uses the memory, which was mapped for so many bytes.
unsafe fn unmap(base: DevicePtr, bytes: u64) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { rustix::mm::munmap(base as *mut _, page_multiple(bytes)? as usize) }
        .map_err(|e| Error::os("munmap", "plain memory", e))
}

fn file_of(stat: &rustix::fs::Stat) -> File {
    [stat.st_dev, stat.st_ino]
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
    if file_of(&stat) != file {
        return Err(other());
    }
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let fd = CloseOnForkFd::open(|| rustix::fs::open(&path, flags, Mode::empty()))
        .map_err(|error| failed("open", error))?;
    let stat = rustix::fs::fstat(&fd).map_err(|error| failed("fstat", error))?;
    (file_of(&stat) == file).then_some(fd).ok_or_else(other)
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
fn write(of: u64, number: u32, [first, second]: File) -> Result<IpcBytes> {
    let here = ProcessOrigin::here()?;
    let place = u64::from(here.pid as u32) | u64::from(number) << 32;
    let words = [
        of,
        here.host,
        here.namespace,
        here.started,
        place,
        first,
        second,
        0,
    ];
    let mut bytes = [0; 64];
    bytes.copy_from_slice(words.map(u64::to_le_bytes).as_flattened());
    Ok(bytes)
}

/// What [`write`] wrote.
fn read(of: u64, bytes: &IpcBytes) -> Option<(ProcessOrigin, u32, File)> {
    let (words, _) = bytes.as_chunks();
    let words = std::array::from_fn(|index| u64::from_le_bytes(words[index]));
    let [found, host, namespace, started, place, first, second, 0] = words else {
        return None;
    };
    let pid = place as u32 as i32;
    let origin = ProcessOrigin {
        host,
        namespace,
        started,
        pid,
    };
    (found == of).then_some((origin, (place >> 32) as u32, [first, second]))
}
