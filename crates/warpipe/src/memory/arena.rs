//! The memory of a publisher or a pool: regions that grow up to a limit, cut into slots.
//! Bookkeeping of one process, without shared state.

use std::sync::Arc;

use super::free_ranges::FreeRanges;
use super::region::Region;
use crate::device::Device;
use crate::error::{Error, LimitFault, Result};
use crate::fork::CloseOnForkFd;

/// The most slots that may be in use at once, unless [more are allowed](Arena::allow_slots).
pub(crate) const SLOTS_MAX: usize = 8192;

/// The most regions: each one costs every link a descriptor in passing.
pub(crate) const REGIONS_MAX: usize = 512;

/// Slots begin at multiples of this: the alignment of `cuMemAlloc`, and more than any element
/// needs.
const ALIGNMENT: u64 = 512;

/// A slot's number.
pub(crate) type SlotId = u32;

/// A range of a region in use.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot {
    pub(crate) region: u32,
    pub(crate) offset: u64,
    /// The length of the range, a multiple of the alignment.
    bytes: u64,
    /// The number of holders: a loan, links, the history. 0 for a number not in use.
    pub(crate) holders: u32,
    /// The value that the slot's fence word must reach before it is free; 0 for none.
    fence: u64,
    /// Counts the slots that were taken, this one included; 0 once it is free.
    serial: u64,
}

impl Slot {
    /// The slot's length in its region, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// A region with its free ranges.
#[derive(Debug)]
pub(crate) struct Chunk {
    /// Its name among peers. Unlike its number in the arena, no other region gets it. 0 until the
    /// arena [adopts](Arena::adopt) it.
    pub(crate) id: u32,
    pub(crate) region: Arc<Region>,
    pub(crate) export: CloseOnForkFd,
    free: FreeRanges,
    /// Slots of it that are not free, and their bytes.
    slots: u32,
    used: u64,
}

/// The arena.
#[derive(Debug)]
pub(crate) struct Arena {
    device: Device,
    limit: u64,
    total: u64,
    /// By their ids.
    chunks: Vec<Chunk>,
    next_id: u32,
    slots: Vec<Slot>,
    unused: Vec<SlotId>,
    /// Slots without holders, with a fence that has not been reached.
    waiting: Vec<SlotId>,
    /// Counts what was taken.
    taken: u64,
    slots_max: usize,
}

/// A region that has been counted and not been made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Growth {
    least: u64,
    generous: u64,
}

impl Growth {
    /// The bytes that are counted for it.
    pub(crate) fn bytes(&self) -> u64 {
        self.generous
    }

    /// Allocates and exports it; the least that will do when the device has no more.
    pub(crate) fn make(&self, device: &Device) -> Result<Chunk> {
        match Chunk::new(device, self.generous) {
            Err(Error::Limit(LimitFault::Device { .. })) if self.generous > self.least => {
                Chunk::new(device, self.least)
            }
            other => other,
        }
    }
}

impl Chunk {
    fn new(device: &Device, bytes: u64) -> Result<Chunk> {
        let region = Region::allocate(device, bytes)?;
        let export = region.export()?;
        Ok(Chunk {
            id: 0,
            free: FreeRanges::new(region.bytes()),
            region: Arc::new(region),
            export,
            slots: 0,
            used: 0,
        })
    }

    /// Slots that are held, or wait for their fence.
    pub(crate) fn slots(&self) -> u32 {
        self.slots
    }

    /// Bytes of these slots.
    pub(crate) fn used(&self) -> u64 {
        self.used
    }
}

/// The unit of regions. A page of host memory would make a region of every small slot; a GPU's 2
/// MiB is right for both.
fn unit_of(device: &Device) -> u64 {
    device.backend().granularity().max(2 << 20)
}

/// Whether anything can be allocated within a limit: memory is taken in units.
pub(crate) fn check_limit(device: &Device, limit: u64) -> Result<()> {
    let unit = unit_of(device);
    if limit < unit {
        let allowed = format!("at least {unit} bytes, the unit in which memory is taken");
        let found = format!("{limit} bytes");
        return Err(Error::argument("memory_limit", found, allowed));
    }
    Ok(())
}

impl Arena {
    pub(crate) fn new(device: &Device, limit: u64) -> Arena {
        let device = device.clone();
        let (total, taken) = (0, 0);
        let (chunks, slots, unused, waiting) = Default::default();
        Arena {
            device,
            limit,
            total,
            chunks,
            next_id: 0,
            slots,
            unused,
            waiting,
            taken,
            slots_max: SLOTS_MAX,
        }
    }

    pub(crate) fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    pub(crate) fn slot(&self, id: SlotId) -> &Slot {
        &self.slots[id as usize]
    }

    /// All slots, also those that are not in use, which no one holds.
    pub(crate) fn slots(&self) -> impl Iterator<Item = (SlotId, &Slot)> {
        (0..).zip(&self.slots)
    }

    /// Bytes of regions, used and free.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Takes a slot of `bytes` from the free ranges, with one holder; none if no range is long
    /// enough.
    #[inline]
    pub(crate) fn take(&mut self, bytes: u64) -> Option<SlotId> {
        self.take_in(bytes, |_| true)
    }

    /// As [`take`](Self::take), from the regions with numbers that `may_use` accepts.
    #[inline]
    pub(crate) fn take_in(
        &mut self,
        bytes: u64,
        may_use: impl Fn(usize) -> bool,
    ) -> Option<SlotId> {
        if self.is_out_of_slots() {
            return None;
        }
        let length = needed(bytes)?;
        let found = self.find_range(length, &may_use).or_else(|| {
            let allowed = self.chunks.iter_mut().enumerate();
            let allowed = allowed.filter(|(index, _)| may_use(*index));
            // All of them: a later search then begins with as much.
            let has_joined = allowed.fold(false, |any, (_, chunk)| chunk.free.join() | any);
            has_joined.then(|| self.find_range(length, &may_use))?
        });
        let (bytes, (region, offset)) = match found {
            Some(place) => (length, place),
            None if bytes == 0 => (0, self.find_region(&may_use)?),
            None => return None,
        };
        self.taken += 1;
        let slot = Slot {
            region,
            offset,
            bytes,
            holders: 1,
            fence: 0,
            serial: self.taken,
        };
        match self.unused.pop() {
            Some(id) => {
                self.slots[id as usize] = slot;
                Some(id)
            }
            None => {
                self.slots.push(slot);
                Some(self.slots.len() as SlotId - 1)
            }
        }
    }

    /// A region for a slot without bytes: a sample without data needs no free range.
    fn find_region(&mut self, may_use: impl Fn(usize) -> bool) -> Option<(u32, u64)> {
        let index = (0..self.chunks.len()).find(|&index| may_use(index))?;
        self.chunks[index].slots += 1;
        Some((index as u32, 0))
    }

    /// Takes `bytes` in the first region that has a range for them.
    #[inline]
    fn find_range(&mut self, bytes: u64, may_use: impl Fn(usize) -> bool) -> Option<(u32, u64)> {
        let chunks = self.chunks.iter_mut().enumerate();
        let mut allowed = chunks.filter(|(index, _)| may_use(*index));
        allowed.find_map(|(index, chunk)| {
            let offset = chunk.free.take(bytes)?;
            chunk.slots += 1;
            chunk.used += bytes;
            Some((index as u32, offset))
        })
    }

    /// A region in which `bytes` fit, counted from now on: as much as there is `so_far`, if `room`
    /// allows. `None` when it does not.
    pub(crate) fn plan(&mut self, bytes: u64, so_far: u64, room: u64) -> Option<Growth> {
        let unit = self.granularity();
        let least = self.region_for(bytes)?;
        if least > room || self.is_out_of_regions() || self.is_out_of_slots() {
            return None;
        }
        let generous = so_far
            .checked_next_multiple_of(unit)?
            .clamp(least, room - room % unit);
        self.total += generous;
        Some(Growth { least, generous })
    }

    /// The length of the smallest region in which `bytes` fit.
    pub(crate) fn region_for(&self, bytes: u64) -> Option<u64> {
        needed(bytes)?.checked_next_multiple_of(self.granularity())
    }

    /// Bytes that the limit leaves for new regions.
    pub(crate) fn room(&self) -> u64 {
        self.limit.saturating_sub(self.total)
    }

    pub(crate) fn is_out_of_regions(&self) -> bool {
        self.chunks.len() >= REGIONS_MAX || self.next_id == u32::MAX
    }

    /// Allows so many slots at once: [`SLOTS_MAX`] at first.
    pub(crate) fn allow_slots(&mut self, slots: usize) {
        self.slots_max = self.slots_max.max(slots);
    }

    pub(crate) fn is_out_of_slots(&self) -> bool {
        self.unused.is_empty() && self.slots.len() >= self.slots_max
    }

    /// Bytes of the regions with slots that are not free.
    pub(crate) fn bytes_in_use(&self) -> u64 {
        let in_use = self.chunks.iter().filter(|chunk| chunk.slots > 0);
        in_use.map(|chunk| chunk.region.bytes()).sum()
    }

    /// The numbers of regions without slots, of those that `may_go` accepts: at least one, and
    /// `missing` bytes of them; none if there are not as many. The last one comes first, so that
    /// each can be [removed](Self::remove) in turn.
    pub(crate) fn removable(&self, may_go: impl Fn(usize) -> bool, missing: u64) -> Vec<usize> {
        let bytes_of = |number: usize| self.chunks[number].region.bytes();
        let numbers = 0..self.chunks.len();
        let mut numbers: Vec<usize> = numbers
            .filter(|&number| self.chunks[number].slots == 0 && may_go(number))
            .collect();
        // The largest first: the fewest are made anew.
        numbers.sort_by_key(|&number| std::cmp::Reverse(bytes_of(number)));
        let (mut freed, mut needed) = (0_u64, 0);
        while freed < missing || needed == 0 {
            let Some(&number) = numbers.get(needed) else {
                return Vec::new();
            };
            freed = freed.saturating_add(bytes_of(number));
            needed += 1;
        }
        numbers.truncate(needed);
        numbers.sort_unstable_by(|a, b| b.cmp(a));
        numbers
    }

    /// Takes out a region without slots, for the caller to drop. Each region behind it has the
    /// number of the one before it from now on.
    pub(crate) fn remove(&mut self, region: usize) -> Option<Chunk> {
        if self.chunks.get(region)?.slots > 0 {
            return None;
        }
        let removed = self.chunks.remove(region);
        self.total -= removed.region.bytes();
        self.slots
            .iter_mut()
            .filter(|slot| slot.serial != 0 && slot.region as usize > region)
            .for_each(|slot| slot.region -= 1);
        Some(removed)
    }

    /// Takes in what became of a plan. Returns the new region's number.
    pub(crate) fn adopt(&mut self, growth: Growth, made: Result<Chunk>) -> Result<u32> {
        self.total -= growth.generous;
        let mut chunk = made?;
        chunk.id = self.next_id;
        self.next_id += 1;
        self.total += chunk.region.bytes();
        self.chunks.push(chunk);
        Ok(self.chunks.len() as u32 - 1)
    }

    /// The unit of regions.
    pub(crate) fn granularity(&self) -> u64 {
        unit_of(&self.device)
    }

    #[inline]
    pub(crate) fn hold(&mut self, id: SlotId) {
        self.slots[id as usize].holders += 1;
    }

    /// The slot is not free before its fence word reaches `value`.
    pub(crate) fn fence(&mut self, id: SlotId, value: u64) {
        self.slots[id as usize].fence = value;
    }

    /// Whether the slot has one holder, so that its release would free the slot at once.
    pub(crate) fn is_sole(&self, id: SlotId) -> bool {
        let slot = &self.slots[id as usize];
        slot.holders == 1 && slot.fence == 0
    }

    pub(crate) fn fence_of(&self, id: SlotId) -> u64 {
        self.slots[id as usize].fence
    }

    /// One holder less; without holders the slot is free, or waits for its fence.
    #[inline]
    pub(crate) fn release(&mut self, id: SlotId) {
        let slot = &mut self.slots[id as usize];
        slot.holders -= 1;
        if slot.holders == 0 {
            if slot.fence == 0 {
                self.free(id)
            } else {
                self.waiting.push(id)
            }
        }
    }

    /// Distinguishes this use of a slot from every later one.
    pub(crate) fn serial(&self, id: SlotId) -> u64 {
        self.slots[id as usize].serial
    }

    /// Frees each slot once its fence `is_reached`.
    #[inline]
    pub(crate) fn collect(&mut self, is_reached: impl Fn(SlotId, u64) -> bool) {
        let mut index = 0;
        while index < self.waiting.len() {
            let id = self.waiting[index];
            if is_reached(id, self.slots[id as usize].fence) {
                self.waiting.swap_remove(index);
                self.free(id);
            } else {
                index += 1;
            }
        }
    }

    /// Bytes without holders that wait for a fence.
    pub(crate) fn waiting_bytes(&self) -> u64 {
        self.waiting
            .iter()
            .map(|&id| self.slots[id as usize].bytes)
            .sum()
    }

    fn free(&mut self, id: SlotId) {
        let Slot {
            region,
            offset,
            bytes,
            ..
        } = self.slots[id as usize];
        self.slots[id as usize].serial = 0;
        let chunk = &mut self.chunks[region as usize];
        (chunk.slots, chunk.used) = (chunk.slots - 1, chunk.used - bytes);
        if bytes > 0 {
            chunk.free.give_back(offset, bytes);
        }
        self.unused.push(id);
    }
}

/// The length of a slot for `bytes`: at least one unit, so that an empty tensor has an address.
pub(crate) fn needed(bytes: u64) -> Option<u64> {
    bytes.max(1).checked_next_multiple_of(ALIGNMENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena(limit: u64) -> Arena {
        Arena::new(&Device::host(), limit)
    }

    fn grow(arena: &mut Arena, bytes: u64, exempt: u64) -> Option<u32> {
        let room = (arena.limit() + exempt).saturating_sub(arena.total());
        let growth = arena.plan(bytes, arena.total(), room)?;
        let made = growth.make(&Device::host());
        Some(arena.adopt(growth, made).unwrap())
    }

    #[test]
    fn a_region_that_could_not_be_made_is_not_counted() {
        let mut arena = arena(u64::MAX);
        let growth = arena.plan(1 << 60, 0, u64::MAX).unwrap();
        let made = growth.make(&Device::host());
        assert!(matches!(
            arena.adopt(growth, made),
            Err(Error::Limit(LimitFault::Device { .. }))
        ));
        assert_eq!(arena.total(), 0);
    }

    #[test]
    fn freed_neighbours_become_one_range_again() {
        let mut arena = arena(2 << 20);
        grow(&mut arena, 1, 0).unwrap();
        let slots: Vec<_> = (0..4).map(|_| arena.take(512 << 10).unwrap()).collect();
        assert!(arena.take(1).is_none());
        for id in [1, 3, 0, 2] {
            arena.release(slots[id]);
        }
        assert!(arena.take(2 << 20).is_some(), "four quarters make a whole");
    }

    #[test]
    fn the_limit_holds_and_says_what_is_used() {
        let mut arena = arena(4 << 20);
        grow(&mut arena, 3 << 20, 0).unwrap();
        assert_eq!((arena.total(), arena.limit()), (4 << 20, 4 << 20));
        assert!(grow(&mut arena, 1, 0).is_none());
        assert!(grow(&mut arena, u64::MAX, 0).is_none());
        assert!(
            grow(&mut arena, 1, 2 << 20).is_some(),
            "what the dead and the evicted hold does not count"
        );
    }

    #[test]
    fn a_fenced_slot_is_free_only_when_its_word_is_reached() {
        let mut arena = arena(2 << 20);
        grow(&mut arena, 1, 0).unwrap();
        let slot = arena.take(2 << 20).unwrap();
        arena.fence(slot, 7);
        arena.release(slot);
        arena.collect(|_, value| value < 7);
        assert!(arena.take(1).is_none());
        arena.collect(|_, value| value <= 7);
        assert!(arena.take(1).is_some());
    }

    #[test]
    fn a_region_is_removed_only_without_slots_and_the_others_keep_theirs() {
        let mut arena = arena(8 << 20);
        let slots: Vec<_> = (0..3)
            .map(|region| {
                assert_eq!(grow(&mut arena, 1, 0), Some(region));
                arena.take_in(2 << 20, |it| it == region as usize).unwrap()
            })
            .collect();
        let addresses = |arena: &Arena| {
            [0, 2].map(|it| {
                let slot = arena.slot(slots[it]);
                arena.chunks()[slot.region as usize].region.ptr() + slot.offset
            })
        };
        let before = addresses(&arena);
        assert!(arena.remove(1).is_none() && arena.remove(3).is_none());
        arena.fence(slots[1], 5);
        arena.release(slots[1]);
        assert!(arena.remove(1).is_none(), "its slot waits for its fence");
        arena.collect(|_, _| true);
        let total = arena.total();
        let removed = arena.remove(1).unwrap();
        assert_eq!(arena.total(), total - removed.region.bytes());
        assert_eq!(addresses(&arena), before);
        slots[2..].iter().for_each(|&slot| arena.release(slot));
        assert_eq!(
            (arena.chunks()[1].slots(), arena.chunks()[0].slots()),
            (0, 1)
        );
    }

    #[test]
    fn no_region_gets_the_id_of_one_that_was_removed_and_they_stay_in_order() {
        let mut arena = arena(64 << 20);
        let ids = |arena: &Arena| arena.chunks().iter().map(|it| it.id).collect::<Vec<_>>();
        assert_eq!(
            [1; 3].map(|bytes| grow(&mut arena, bytes, 0)),
            [0, 1, 2].map(Some)
        );
        arena.remove(1).unwrap();
        grow(&mut arena, 1, 0);
        arena.remove(2).unwrap();
        grow(&mut arena, 1, 0);
        assert_eq!(ids(&arena), [0, 2, 4]);
    }

    #[test]
    fn as_few_empty_regions_are_removable_as_make_the_room_and_none_if_all_do_not() {
        let mut arena = arena(64 << 20);
        for bytes in [2 << 20, 16 << 20, 4 << 20] {
            let growth = arena.plan(bytes, 0, u64::MAX).unwrap();
            let made = growth.make(&Device::host());
            arena.adopt(growth, made).unwrap();
        }
        assert_eq!(arena.removable(|_| true, 1), [1]);
        assert_eq!(arena.removable(|_| true, 20 << 20), [2, 1]);
        assert!(arena.removable(|_| true, 64 << 20).is_empty());
        let held = arena.take_in(1, |it| it == 1).unwrap();
        assert_eq!(arena.removable(|_| true, 5 << 20), [2, 0]);
        assert_eq!(arena.bytes_in_use(), 16 << 20);
        arena.release(held);
    }

    #[test]
    fn a_limit_in_which_nothing_can_be_allocated_is_refused() {
        let device = Device::host();
        for limit in [0, 4096, (2 << 20) - 1] {
            let refused = check_limit(&device, limit).unwrap_err().to_string();
            assert!(refused.contains("at least 2097152 bytes"), "{refused}");
        }
        check_limit(&device, 2 << 20).unwrap();
        let mut arena = arena(2 << 20);
        assert!(grow(&mut arena, 16, 0).is_some());
    }

    #[test]
    fn an_empty_slot_is_there_also_without_memory_and_takes_none() {
        let mut arena = arena(2 << 20);
        assert_eq!(arena.take(0), None);
        grow(&mut arena, 0, 0).unwrap();
        let all = arena.take(2 << 20).unwrap();
        let empty = [0, 0].map(|bytes| arena.take(bytes).unwrap());
        assert_eq!(arena.take(1), None);
        arena.release(all);
        assert!(arena.remove(0).is_none(), "it is a place of two slots");
        empty.iter().for_each(|&slot| arena.release(slot));
        let all = arena.take(2 << 20).unwrap();
        arena.release(all);
        assert!(arena.remove(0).is_some());
    }

    #[test]
    fn an_empty_slot_still_has_a_place_of_its_own() {
        let mut arena = arena(2 << 20);
        grow(&mut arena, 0, 0).unwrap();
        let (a, b) = (arena.take(0).unwrap(), arena.take(0).unwrap());
        assert_ne!(arena.slot(a).offset, arena.slot(b).offset);
    }
}
