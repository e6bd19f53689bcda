//! Where versions are mapped in this process. A part that is mapped here already, as part of whatever
//! version, is not mapped again, and its descriptors are not asked for.
//!
//! Openers share such a mapping, each with the lease of its own version and with streams of its own. A
//! follower has its mappings to itself, since it changes what they show: see [`Region::claim`].

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};

use super::exports::PieceFd;
use super::held::{Held, KnownParts, PartialVersion, places};
use super::manifest::PartId;
use crate::backend::{Access, DeviceId};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::memory::SharedMemory;
use crate::memory::mapped_region::{ImportKey, MappedRegion};
use crate::memory::region::{Kept, Region, check_reach};
use crate::memory::slice::check_range;
use crate::memory::weak_cache::WeakCache;
use crate::mutex::LockUnpoisoned;
use crate::wait::Wait;

/// The parts that are mapped in this process, by their publishers' user.
static PARTS: WeakCache<ImportKey, Region> = WeakCache::new();

/// What a region of a part shows. The region holds it.
struct ShownPieces {
    piece_bytes: u64,
    pieces: Arc<[Arc<PieceFd>]>,
}

impl ShownPieces {
    /// `None` if a follower may change what the region shows.
    fn of(region: &Region) -> Option<Arc<ShownPieces>> {
        region.held()?.downcast().ok()
    }
}

fn key_of(publisher: u32, (id, number): PartId, device: &Device) -> ImportKey {
    ImportKey::new(publisher, id, number.into(), device)
}

/// The pieces of a version that this process has mapped on `device`. `publisher` is the user of all
/// that publish in its domain.
pub(super) fn known_parts(publisher: u32, device: &Device, version: &PartialVersion) -> KnownParts {
    let mut known = KnownParts::default();
    for (id, _) in version.part_ids() {
        let region = PARTS.get(&key_of(publisher, id, device));
        if let Some(shown) = region.and_then(|region| ShownPieces::of(&region)) {
            known.add(id, shown.piece_bytes, &shown.pieces);
        }
    }
    known
}

/// A part of a version's memory, to be mapped.
pub(super) struct HeldPart<'a> {
    pieces: &'a [Arc<PieceFd>],
    piece_bytes: u64,
    /// The length of all that is used.
    bytes: u64,
    /// The device that it lies on.
    device: DeviceId,
    id: PartId,
    /// Mapped memory is in use, whatever has become of the object that mapped it.
    lease: Option<Kept>,
}

/// The parts of a version's memory.
pub(super) fn parts(held: &Held) -> impl Iterator<Item = HeldPart<'_>> {
    let manifest = &held.manifest;
    let begins = manifest.parts().map(|(begin, _)| begin);
    begins
        .zip(places(manifest))
        .map(|(begin, (number, part, range))| {
            let lease = (part.lease as usize).checked_sub(1);
            HeldPart {
                pieces: &held.pieces[range],
                piece_bytes: part.piece_bytes,
                bytes: part.bytes().min(manifest.bytes() - begin),
                device: held.device,
                id: part.id(held.version.id, number),
                lease: lease.map(|lease| held.leases[lease].clone() as Kept),
            }
        })
}

impl HeldPart<'_> {
    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.pieces.iter().map(|piece| piece.as_fd()).collect()
    }

    /// As the statistics name it.
    fn row(&self) -> ([u8; 16], u64) {
        (self.id.0, self.id.1.into())
    }

    fn shown(&self) -> Kept {
        Arc::new(ShownPieces {
            piece_bytes: self.piece_bytes,
            pieces: self.pieces.into(),
        })
    }

    /// The device has mapped them: their `close` does not block.
    fn approve(&self) {
        self.pieces.iter().for_each(|piece| piece.approve());
    }

    fn import(&self, device: &Device) -> Result<Arc<Region>> {
        let (fds, (generation, number)) = (self.fds(), self.row());
        let mapped_bytes = self.piece_bytes.saturating_mul(fds.len() as u64);
        check_range("a part of weights", 0, self.bytes, mapped_bytes)?;
        let (piece, owner) = (self.piece_bytes, self.device);
        check_reach(device, owner)?;
        let mut region = Region::import(device, &fds, piece, Access::Read, owner)?;
        self.approve();
        region.identify(generation, number);
        region.hold(self.shown());
        Ok(Arc::new(region))
    }

    /// Whether a region shows as many pieces of the same length. That they are the same is the
    /// publishers' claim.
    fn is_shown_by(&self, region: &Region) -> bool {
        ShownPieces::of(region).is_some_and(|shown| {
            (shown.piece_bytes, shown.pieces.len()) == (self.piece_bytes, self.pieces.len())
        })
    }

    /// In a mapping that this process has already, if there is one.
    fn map(self, device: &Device, publisher: u32) -> Result<SharedMemory> {
        let key = key_of(publisher, self.id, device);
        let is_good = |region: &Region| self.is_shown_by(region);
        let region = PARTS.get_or(&key, is_good, || self.import(device))?;
        self.share(region, device)
    }

    /// In a mapping of its own.
    pub(super) fn map_alone(self, device: &Device) -> Result<SharedMemory> {
        let region = self.import(device)?;
        self.share(region, device)
    }

    fn share(self, region: Arc<Region>, device: &Device) -> Result<SharedMemory> {
        let of = (self.device, Access::Read);
        let mapping = MappedRegion::leased(region, device, of, self.bytes, self.lease)?;
        SharedMemory::whole(&Arc::new(mapping), "an imported descriptor")
    }

    /// Maps it at the address of all of a region that shows another part.
    ///
    /// # Safety
    /// The region has been [claimed](Region::claim), and no enqueued work uses any of it.
    unsafe fn show_in(&self, region: &Region) -> Result<()> {
        let (fds, held) = (self.fds(), Some(self.shown()));
        // SAFETY: the caller's promise.
        unsafe { region.replace(&fds, self.piece_bytes, Access::Read, self.device, held) }?;
        let (generation, number) = self.row();
        region.identify(generation, number);
        self.approve();
        Ok(())
    }
}

/// The number of a version, and its parts, in the order of the ranges that they are mapped in.
pub(super) type Placed<'a> = (u64, Vec<HeldPart<'a>>);

/// A version of which each part is mapped in the range of this number.
pub(super) fn placed<'a>(held: &'a Held, places: &[u32]) -> Placed<'a> {
    let mut placed: Vec<_> = places.iter().zip(parts(held)).collect();
    placed.sort_by_key(|&(place, _)| place);
    let parts = placed.into_iter().map(|(_, part)| part).collect();
    (held.version.number, parts)
}

/// Where a version is mapped.
pub(super) struct Mapped {
    /// One range for each part.
    pub(super) memory: Vec<SharedMemory>,
    /// Held while that changes.
    lies: Mutex<Lying>,
    /// Whether a caller may know addresses.
    is_exposed: AtomicBool,
}

/// The version that is mapped somewhere now.
struct Lying {
    number: u64,
    /// Not after a change that failed, and whose undoing failed, too.
    is_whole: bool,
}

impl Mapped {
    /// Maps each part of a version of a domain of `publisher` into one range.
    pub(super) fn of(device: &Device, publisher: u32, held: &Held) -> Result<Mapped> {
        // A follower gives each part other memory: none has its range with another one of the version.
        let mut mapped = HashSet::new();
        let memory = parts(held).map(|part| match mapped.insert(part.id) {
            true => part.map(device, publisher),
            false => part.map_alone(device),
        });
        Ok(Mapped {
            memory: memory.collect::<Result<_>>()?,
            lies: Mutex::new(Lying {
                number: held.version.number,
                is_whole: true,
            }),
            is_exposed: AtomicBool::new(false),
        })
    }

    /// Notes that a caller may know addresses from now on.
    pub(super) fn expose(&self) -> &[SharedMemory] {
        self.is_exposed.store(true, Relaxed);
        &self.memory
    }

    /// Has this version's mappings to itself. Those that other openers have, too, are made anew, unless
    /// a caller may know their addresses: `replace` waits for these.
    pub(super) fn claim(&mut self, device: &Device, parts: Vec<HeldPart<'_>>) {
        let is_exposed = self.is_exposed.load(Relaxed);
        for (memory, part) in self.memory.iter_mut().zip(parts) {
            if memory.mapping.region().claim() || is_exposed {
                continue;
            }
            if let Ok(alone) = part.map_alone(device) {
                *memory = alone;
                memory.mapping.region().claim();
            }
        }
    }

    /// As [`claim`](Self::claim), of what no other opener has.
    pub(super) fn claim_in_place(&self) {
        for memory in &self.memory {
            memory.mapping.region().claim();
        }
    }

    /// Whether a version's memory lies here.
    pub(super) fn is_whole(&self) -> bool {
        self.lies.locked().is_whole
    }

    /// Maps the memory of `next` in place of that of `former`, where it is another one; all of it, or
    /// none. Waits for other openers of that to close it.
    ///
    /// # Safety
    /// No enqueued work uses it.
    pub(super) unsafe fn replace(
        &self,
        (former, former_parts): Placed<'_>,
        (next, next_parts): Placed<'_>,
        wait: &Wait<'_>,
    ) -> Result<()> {
        let mut claimed = None;
        // The lock is not held from one poll to the next: a cancellation is asked in between.
        let what = || CLAIM.into();
        wait.poll(what, || {
            claimed = self.claim_changed(former, &former_parts, &next_parts)?;
            Ok(claimed.is_some())
        })?;
        let Some((mut lies, changed)) = claimed else {
            unreachable!("the poll ends with it");
        };
        // SAFETY: the caller's promise.
        if let Err(error) = unsafe { self.map(&next_parts, &changed) } {
            // The first failure is the one to report.
            // SAFETY: the caller's promise.
            lies.is_whole = unsafe { self.map(&former_parts, &changed) }.is_ok();
            return Err(error);
        }
        for (memory, part) in self.memory.iter().zip(next_parts) {
            memory.mapping.replace_lease(part.lease);
        }
        *lies = Lying {
            number: next,
            is_whole: true,
        };
        Ok(())
    }

    /// Claims the parts that `next` has other memory for, and returns which these are; `None` while
    /// another opener has one.
    fn claim_changed(
        &self,
        former: u64,
        former_parts: &[HeldPart<'_>],
        next_parts: &[HeldPart<'_>],
    ) -> Result<Option<(MutexGuard<'_, Lying>, Vec<bool>)>> {
        let lies = self.lies.locked();
        let number = lies.number;
        if number != former {
            return Err(Error::argument(
                "weights",
                format!("version {former}"),
                format!("version {number}, which another follower took at these addresses"),
            ));
        }
        let parts = former_parts.iter().zip(next_parts);
        let mut changed = Vec::with_capacity(self.memory.len());
        for (memory, (was, is)) in self.memory.iter().zip(parts) {
            // What may have been left without memory was claimed.
            let (is_other, region) = (was.id != is.id, memory.mapping.region());
            changed.push(is_other || (!lies.is_whole && region.claim()));
            if is_other && !region.claim() {
                return Ok(None);
            }
        }
        Ok(Some((lies, changed)))
    }

    /// # Safety
    /// The parts that are `changed` were claimed, and no enqueued work uses them.
    unsafe fn map(&self, parts: &[HeldPart<'_>], changed: &[bool]) -> Result<()> {
        let parts = self.memory.iter().zip(parts).zip(changed);
        for ((memory, part), _) in parts.filter(|(_, changed)| **changed) {
            // SAFETY: the caller's promise.
            unsafe { part.show_in(memory.mapping.region()) }?;
        }
        Ok(())
    }
}

/// What the claim of a part waits for: openers that have closed it still have it while their
/// streams work on it.
const CLAIM: &str = "the close of other weights that this process opened and that share memory with \
                     these: the addresses cannot change. Close those, or call `follow` before \
                     tensors are used";
