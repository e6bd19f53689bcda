//! One exportable allocation, or one import of a peer's. **This module is marked for unsafe**: it
//! owns raw regions.

use std::any::Any;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use crate::backend::unreclaimed::Held;
use crate::backend::{
    Access, DeviceId, DeviceKind, DevicePtr, RawRegion, not_shareable, out_of_reach, unreclaimed,
};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::mutex::LockUnpoisoned;
use crate::statistics::{NO_FILE, RegionRow, Role, file_of};

/// A mapped region; released when dropped. Code that enqueues work on the region keeps it alive
/// until that work is done.
#[derive(Debug)]
pub(crate) struct Region {
    device: Device,
    ptr: DevicePtr,
    bytes: u64,
    row: RegionRow,
    contents: Mutex<Contents>,
}

/// What is mapped at a region's address: see [`Region::replace`].
#[derive(Debug)]
struct Contents {
    raw: RawRegion,
    /// Dropped behind the mapping: see [`hold`](Region::hold).
    held: Option<Kept>,
    /// See [`claim`](Region::claim).
    is_claimed: bool,
}

/// What is kept as long as something is mapped.
pub(crate) type Kept = Arc<dyn Any + Send + Sync>;

impl Region {
    /// Allocates `bytes`, rounded up to the device's granularity.
    pub(crate) fn allocate(device: &Device, bytes: u64) -> Result<Region> {
        let raw = device.backend().allocate(bytes)?;
        let owner = device.info().id;
        let file = match owner.kind {
            DeviceKind::Host => {
                // SAFETY: the handle of an allocation on the host is its open descriptor.
                file_of(unsafe { BorrowedFd::borrow_raw(raw.handle as i32) }, owner)
            }
            DeviceKind::Cuda => NO_FILE,
        };
        let row = RegionRow::open(Role::Owner, raw.bytes, owner, file);
        Ok(Region::of(device, raw, row))
    }

    /// Maps a peer's allocations of `piece` bytes each into one range; the descriptors are checked
    /// by the backend.
    pub(crate) fn import(
        device: &Device,
        fds: &[BorrowedFd<'_>],
        piece: u64,
        access: Access,
        owner: DeviceId,
    ) -> Result<Region> {
        let raw = device.backend().import(fds, piece, access, owner)?;
        let row = RegionRow::open(Role::Peer, raw.bytes, owner, file_of_only(fds, owner));
        Ok(Region::of(device, raw, row))
    }

    /// Keeps `held` as long as the region is mapped.
    pub(crate) fn hold(&mut self, held: Kept) {
        self.contents.locked().held = Some(held);
    }

    /// What is [held](Self::hold), of a region that shows what it did when it was made: nobody
    /// has [claimed](Self::claim) it.
    pub(crate) fn held(&self) -> Option<Kept> {
        let contents = self.contents.locked();
        contents.held.clone().filter(|_| !contents.is_claimed)
    }

    /// Claims the region for its only owner, which may [replace](Self::replace) what it shows from
    /// then on. False if it has another owner.
    pub(crate) fn claim(self: &Arc<Self>) -> bool {
        let mut contents = self.contents.locked();
        // One that becomes an owner meanwhile takes it for what it shows only behind this lock.
        contents.is_claimed |= Arc::strong_count(self) == 1;
        contents.is_claimed
    }

    /// Says in this process's statistics which endpoint shares the region, and under which number.
    pub(crate) fn identify(&self, generation: [u8; 16], number: u64) {
        self.row.identify(generation, number);
    }

    fn of(device: &Device, raw: RawRegion, row: RegionRow) -> Region {
        Region {
            device: device.clone(),
            ptr: raw.ptr,
            bytes: raw.bytes,
            row,
            contents: Mutex::new(Contents {
                raw,
                held: None,
                is_claimed: false,
            }),
        }
    }

    /// Maps other allocations at the address of this region, which was imported with `access`: as
    /// many descriptors of `piece` bytes as fill it. `held` takes the place of what was
    /// [held](Self::hold). After an error the region may have no memory, but for refused
    /// descriptors, which change nothing: replace it again, by what it had.
    ///
    /// # Safety
    /// No enqueued work uses the region.
    pub(crate) unsafe fn replace(
        &self,
        fds: &[BorrowedFd<'_>],
        piece: u64,
        access: Access,
        owner: DeviceId,
        held: Option<Kept>,
    ) -> Result<()> {
        if piece.checked_mul(fds.len() as u64) != Some(self.bytes) {
            let found = format!("{} pieces of {piece} bytes", fds.len());
            return Err(not_shareable(
                &format!("{} bytes of memory", self.bytes),
                found,
            ));
        }
        let mut contents = self.contents.locked();
        let (backend, raw) = (self.device.backend(), &mut contents.raw);
        // SAFETY: live as long as self; the rest is the caller's promise.
        unsafe { backend.import_over(raw, fds, piece, access, owner) }?;
        self.row.replace(file_of_only(fds, owner));
        let _former = std::mem::replace(&mut contents.held, held);
        drop(contents);
        Ok(())
    }

    /// The descriptor that is the right to this memory.
    pub(crate) fn export(&self) -> Result<CloseOnForkFd> {
        // SAFETY: `raw` is live as long as self.
        let fd = unsafe { self.device.backend().export(&self.contents.locked().raw)? };
        CloseOnForkFd::new(fd)
            .map_err(|e| Error::os("fcntl(F_DUPFD_CLOEXEC)", "a region's descriptor", e))
    }

    pub(crate) fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Whether `device` can at all map memory of `owner`: a GPU no memfd, and the host no GPU's memory.
pub(crate) fn check_reach(device: &Device, owner: DeviceId) -> Result<()> {
    let info = device.info();
    if info.id.kind == owner.kind {
        return Ok(());
    }
    let reason = "one is a GPU, the other the host: they have no memory in common";
    Err(out_of_reach(info, owner, reason))
}

/// The file by which statistics tell a region; several pieces have none.
fn file_of_only(fds: &[BorrowedFd<'_>], owner: DeviceId) -> [u64; 2] {
    match fds {
        &[only] => file_of(only, owner),
        _ => NO_FILE,
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let raw = self.contents.locked().raw;
        // SAFETY: allocated or imported once, released here only. That no enqueued work uses it is
        // kept by the owners: a publisher retires its arena, a subscriber its imports (see
        // `Reactor::drop_after`).
        unsafe { unreclaimed::release(self.device.backend(), Held::Region(raw)) };
    }
}
