//! The state that all handles of one pool share: its memory and the users of each block. **This
//! module is marked for unsafe**: it enqueues work on blocks by address.

pub(super) mod users;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError, Weak};
use std::time::Duration;

use self::users::{Quotas, Room, Users};
use super::last_writers::LastWriter;
use super::{CLAIMS_MAX, PoolRefusal, WORDS};
use crate::backend::{Access, DevicePtr};
use crate::backoff::Backoff;
use crate::debug::opaque_debug;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::{Kind, ServerCore};
use crate::lend::claims::{Borrowers, Ended};
use crate::lend::server::Lending;
use crate::lend::share_words::{SLOTS, ShareWords, has_claim};
use crate::lend::{Offer, OfferPlace};
use crate::memory::DeviceSlice;
use crate::memory::arena::{Arena, Chunk, SLOTS_MAX, Slot, SlotId};
use crate::memory::slice::MappedMemory;
use crate::memory::ticket::{Incarnation, Ticket, Wanted};
use crate::mutex::LockUnpoisoned;
use crate::runtime::drop_after_fence::DropAfterFence;
use crate::runtime::fence::StreamSet;
use crate::runtime::reactor::Reactor;
use crate::shm::page::{SharedPage, words_bytes};
use crate::stream::Stream;
use crate::wait::Wait;

/// The limit for clearing a block. Memory is written at terabytes a second; the limit allows for
/// other processes' time slices.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(10);

/// The part of a pool that its handles and its server share.
pub(super) struct PoolAllocator {
    pub(super) name: EndpointName,
    /// The name, in the errors of its blocks.
    label: Arc<str>,
    pub(super) domain: Domain,
    pub(super) device: Device,
    pub(super) uid: u32,
    pub(super) me: Weak<PoolAllocator>,
    /// Set when the endpoint's name is taken.
    pub(super) generation: OnceLock<Incarnation>,
    /// Set with it. Notifies peers of removed regions.
    pub(super) server_core: OnceLock<Weak<ServerCore>>,
    pub(super) lending: Lending,
    /// The stream that clears blocks before they pass to another user.
    pub(super) scrubber: Stream,
    memory: DropAfterFence<PoolMemory>,
}

/// The memory that is dropped when this process's streams are past it.
struct PoolMemory {
    state: Mutex<PoolState>,
    fence_words: SharedPage,
}

pub(super) struct PoolState {
    pub(super) arena: Arena,
    /// The blocks that this process has itself, and the numbers that each is lent under: one for
    /// each access.
    pub(super) owned: HashMap<SlotId, Vec<u64>>,
    pub(super) lent_blocks: HashMap<u64, LentBlock>,
    pub(super) borrowers: Borrowers<SlotId>,
    /// By which peers of this process's user claim lent blocks.
    offers: ShareWords,
    /// Lends that have ended while a peer had claimed them so. Each holds its block.
    ended_lends: HashMap<u64, EndedLend>,
    pub(super) counts: PoolCounts,
    pub(super) is_closed: bool,
    pub(super) users: Users,
    fences: u64,
    next_lend: u64,
}

/// A block that is lent under a number.
#[derive(Debug, Clone, Copy)]
pub(super) struct LentBlock {
    pub(super) slot: SlotId,
    pub(super) bytes: u64,
    pub(super) access: Access,
}

/// The block of a lend that has ended, and a peer that has it: the first one that is asked.
#[derive(Debug, Clone, Copy)]
struct EndedLend {
    slot: SlotId,
    client: u64,
}

/// Counters for [`Pool::stats`](crate::Pool::stats).
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PoolCounts {
    pub(super) allocations: u64,
    pub(super) waits: u64,
    pub(super) high_water: u64,
}

/// A block that was taken, and the value of the fence word at which it is cleared.
pub(super) type Taken = (SlotId, Option<u64>);

opaque_debug!(PoolAllocator { name, device });

impl PoolAllocator {
    pub(super) fn new(
        name: EndpointName,
        domain: Domain,
        device: Device,
        limit: u64,
        quotas: Quotas,
    ) -> Result<Arc<PoolAllocator>> {
        let scrubber = device.stream()?;
        let uid = rustix::process::geteuid().as_raw();
        let (offers, offers_fd) = ShareWords::for_many(WORDS)?;
        let state = PoolState::new(&device, limit, Users::new(uid, quotas), offers);
        let (fence_words, fd) = SharedPage::publish(Some(&device), words_bytes(SLOTS_MAX))?;
        let pages = vec![fd, offers_fd];
        let lending = Lending::new(device.info().id, WORDS, &fence_words, pages);
        let memory = PoolMemory {
            state: Mutex::new(state),
            fence_words,
        };
        let memory = DropAfterFence::new(Arc::default(), memory)?;
        Ok(Arc::new_cyclic(|me| PoolAllocator {
            uid,
            me: me.clone(),
            generation: OnceLock::new(),
            server_core: OnceLock::new(),
            lending,
            label: name.as_str().into(),
            name,
            domain,
            device,
            scrubber,
            memory,
        }))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.memory.state.locked()
    }

    /// Locks the state, unless another thread holds the lock, possibly during a driver call.
    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, PoolState>> {
        match self.memory.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Every stream that has worked on the pool's memory or words.
    pub(super) fn streams(&self) -> &Arc<StreamSet> {
        self.memory.streams()
    }

    pub(super) fn reactor(&self) -> &Arc<Reactor> {
        self.memory.reactor()
    }

    /// Allocates a block for this process in a region of the user `uid`: a free one, one in a new
    /// region, or one that is released before the wait is over.
    pub(super) fn allocate(&self, uid: u32, bytes: u64, wait: &Wait<'_>) -> Result<SlotId> {
        self.memory.owner_process().check()?;
        check_bytes(bytes)?;
        let (mut backoff, mut has_waited) = (Backoff::default(), false);
        loop {
            match self.take(bytes, uid, true)? {
                Ok((slot, cleared_at)) => {
                    self.wait_until_clear(slot, cleared_at)?;
                    return Ok(slot);
                }
                Err(refusal) => {
                    let error = refusal.error(self.name.as_str(), bytes, wait.is_over());
                    error.map_or(Ok(()), Err)?;
                }
            }
            if !std::mem::replace(&mut has_waited, true) {
                self.lock().counts.waits += 1;
            }
            // A device or a peer's device that completes a release cannot wake a thread, so this
            // polls.
            backoff.pause();
        }
    }

    pub(super) fn wait_until_clear(&self, slot: SlotId, cleared_at: Option<u64>) -> Result<()> {
        let Some(value) = cleared_at else {
            return Ok(());
        };
        let word = self.memory.fence_words.word(slot as usize);
        if word.wait(value, CLEAR_TIMEOUT, self.device.is_gpu()) {
            return Ok(());
        }
        self.release(slot);
        Err(Error::timeout("the clearing of a block", CLEAR_TIMEOUT))
    }

    /// Takes a free block for the user `uid`, or makes a new region for it. One that is not owned
    /// is to be lent.
    pub(super) fn take(
        &self,
        bytes: u64,
        uid: u32,
        is_owned: bool,
    ) -> Result<Result<Taken, PoolRefusal>> {
        let mut state = self.lock();
        loop {
            self.reclaim(&mut state);
            // Again after each driver call, during which other blocks may have been taken.
            if let Some(over) = state.over_quota(uid, bytes) {
                return Ok(Err(PoolRefusal::OverQuota(over)));
            }
            if let Some(slot) = state.take_for(uid, bytes) {
                // From here on the block belongs to this caller, also while the lock is free.
                if is_owned {
                    state.owned.insert(slot, vec![]);
                }
                let cleared_at = self.clear_for(state, slot, uid)?;
                return Ok(Ok((slot, cleared_at)));
            }
            match state.make_room(uid, bytes) {
                Room::Growth(growth) => {
                    // Without the lock: the driver call may take long.
                    drop(state);
                    let made = growth.make(&self.device);
                    state = self.lock();
                    state.adopt_for(uid, growth, made, self.generation.get().copied())?;
                }
                Room::Removed(removed) => {
                    drop(state);
                    for chunk in removed {
                        self.notify_removed(chunk.id);
                        // Unmapped at once, so that the device has it for the next region. It has
                        // no blocks: each was released behind this process's own fence word, event
                        // or proof of death, so no recorded stream works on it.
                        drop(chunk);
                    }
                    state = self.lock();
                }
                Room::Refused(refusal) => return Ok(Err(refusal)),
            }
        }
    }

    /// Has the processes that may have mapped it unmap a region that the pool no longer has. That
    /// releases its memory; it is not what keeps users apart, since no other user ever gets this
    /// region.
    fn notify_removed(&self, region: u32) {
        self.lending.end_run(region);
        if let Some(server_core) = self.server_core.get().and_then(Weak::upgrade) {
            self.lending.tell_ended(&server_core);
        }
    }

    /// Makes a first region that holds `bytes`.
    pub(super) fn reserve(&self, bytes: u64) -> Result<()> {
        let slot = self.allocate(self.uid, bytes, &Duration::ZERO.into())?;
        self.release(slot);
        self.lock().counts = PoolCounts::default();
        Ok(())
    }

    /// Enqueues the clearing of a block if a user other than `uid` has had it. The block does not
    /// become free before the clearing is done. Releases the lock before it calls the driver: a
    /// full launch queue may block the call.
    fn clear_for<'a>(
        &'a self,
        mut state: MutexGuard<'a, PoolState>,
        slot: SlotId,
        uid: u32,
    ) -> Result<Option<u64>> {
        let (region, range) = state.range_of(slot);
        let mut cleared_at = None;
        let last_writers = &state.users.region(region).last_writers;
        if last_writers.are_foreign_to(uid, &range) {
            let (value, address) = (state.next_fence(), state.address(slot));
            state.arena.fence(slot, value);
            drop(state);
            let cleared = self.clear(address, range.end - range.start, slot, value);
            state = self.lock();
            if let Err(error) = cleared {
                // The device has failed. How much of the block is cleared is unknown, so the block
                // stays unusable.
                state.owned.insert(slot, vec![]);
                return Err(error);
            }
            cleared_at = Some(value);
        }
        // The region may have got another number meanwhile.
        let (region, range) = state.range_of(slot);
        let last_writers = &mut state.users.region(region).last_writers;
        last_writers.set(range, LastWriter::User(uid));
        state.counts.allocations += 1;
        state.counts.high_water = state.counts.high_water.max(state.used());
        Ok(cleared_at)
    }

    fn clear(&self, ptr: DevicePtr, bytes: u64, slot: SlotId, value: u64) -> Result<()> {
        self.streams().record_use(&self.scrubber);
        let signal = self.memory.fence_words.signal(slot as usize, value);
        // SAFETY: the stream is live. No user has the block yet. The block lies in a region that is
        // dropped, as the fence words are, only when this stream, recorded above, is past it.
        unsafe {
            self.device
                .backend()
                .zero(self.scrubber.raw(), ptr, bytes)?;
            self.scrubber.batch(&[signal])
        }
    }

    /// Releases the owner's use of a block.
    pub(super) fn release(&self, slot: SlotId) {
        self.lock().release_owner(slot);
    }

    /// Releases the owner's use of a block behind the work of `stream`.
    pub(super) fn release_behind(&self, slot: SlotId, stream: &Stream) -> Result<()> {
        self.streams().record_use(stream);
        let value = self.lock().next_fence();
        let signal = self.memory.fence_words.signal(slot as usize, value);
        // Without the lock, which the control thread takes: a full launch queue may block this
        // call. The slot stays the owner's until it is released below.
        // SAFETY: the fence words are dropped only when this stream, recorded above, is past its
        // signals.
        unsafe { stream.batch(&[signal])? };
        let mut state = self.lock();
        state.arena.fence(slot, value);
        state.release_owner(slot);
        Ok(())
    }

    /// Lends a block. The ticket is valid as long as the owner has the block.
    pub(super) fn lend(&self, slot: SlotId, bytes: u64, access: Access) -> Result<Ticket> {
        self.memory.owner_process().check()?;
        let mut state = self.lock();
        let Some(&incarnation) = self.generation.get().filter(|_| !state.is_closed) else {
            let (name, pid) = (self.name.to_string(), std::process::id() as i32);
            return Err(Error::peer_gone(Kind::Pool, name, pid, true));
        };
        let wanted = Wanted {
            id: state.lend(slot, bytes, access)?,
            offset: 0,
            bytes: Some(bytes),
        };
        drop(state);
        let device = Some(self.device.info().id);
        Ticket::new(
            &self.domain,
            &self.name,
            Kind::Pool,
            Some(incarnation),
            wanted,
            device,
        )
    }

    /// The first `bytes` bytes of a block, which the caller has allocated with that length.
    pub(super) fn slice(self: &Arc<Self>, slot: SlotId, bytes: u64) -> DeviceSlice {
        let ptr = self.lock().address(slot);
        let devices = (&self.device, self.device.info().id);
        let mapped = MappedMemory::new(devices, &self.memory, self.clone());
        // SAFETY: the block is that long, and its region is one of the arena's, which `memory`
        // keeps, and its streams after it.
        unsafe { DeviceSlice::new(mapped, ptr, bytes, Access::ReadWrite, &self.label) }
    }

    /// Takes back every block without users, and removes peers that have closed and have no block.
    pub(super) fn reclaim(&self, state: &mut PoolState) {
        let dead = state.collect_released();
        if !dead.is_empty() {
            self.free_deferred(dead);
        }
        state
            .arena
            .collect(|slot, value| self.memory.fence_words.word(slot as usize).reached(value));
    }
}

impl PoolState {
    pub(super) fn new(device: &Device, limit: u64, users: Users, offers: ShareWords) -> PoolState {
        PoolState {
            arena: Arena::new(device, limit),
            owned: HashMap::new(),
            lent_blocks: HashMap::new(),
            borrowers: Borrowers::new(CLAIMS_MAX),
            offers,
            ended_lends: HashMap::new(),
            counts: PoolCounts::default(),
            is_closed: false,
            users,
            fences: 0,
            next_lend: 1,
        }
    }

    pub(super) fn address(&self, slot: SlotId) -> DevicePtr {
        let slot = self.arena.slot(slot);
        self.arena.chunks()[slot.region as usize].region.ptr() + slot.offset
    }

    /// The user whose region the slot lies in.
    pub(super) fn user_of(&mut self, slot: SlotId) -> u32 {
        let (region, _) = self.range_of(slot);
        self.users.region(region).uid
    }

    fn range_of(&self, slot: SlotId) -> (usize, std::ops::Range<u64>) {
        let slot = self.arena.slot(slot);
        (
            slot.region as usize,
            slot.offset..slot.offset + slot.bytes(),
        )
    }

    /// A value that no fence word has reached: the words only grow.
    fn next_fence(&mut self) -> u64 {
        self.fences += 1;
        self.fences
    }

    fn lend(&mut self, slot: SlotId, bytes: u64, access: Access) -> Result<u64> {
        let mut lends = self.owned.get(&slot).into_iter().flatten();
        if let Some(&id) = lends.find(|id| self.lent_blocks[id].access == access) {
            return Ok(id);
        }
        let (user, own_uid) = (self.user_of(slot), self.users.own_uid);
        let word = offer_word(slot, access).filter(|_| user == own_uid);
        // No number comes again, and the low bits say the word.
        let id = self.next_lend * u64::from(SLOTS) + u64::from(word.unwrap_or(0));
        if word.is_some() {
            self.offers.offer(id, &self.offer(slot, bytes, access))?;
        }
        self.next_lend += 1;
        let lent = LentBlock {
            slot,
            bytes,
            access,
        };
        self.lent_blocks.insert(id, lent);
        self.owned.entry(slot).or_default().push(id);
        Ok(id)
    }

    /// What a borrower of a block is told.
    pub(super) fn offer(&self, slot: SlotId, bytes: u64, access: Access) -> Offer {
        let place = *self.arena.slot(slot);
        let chunk = &self.arena.chunks()[place.region as usize];
        let place = OfferPlace::Run {
            run: chunk.id,
            pieces: 1,
            piece: chunk.region.bytes(),
            offset: place.offset,
            access,
        };
        let ready = None;
        Offer {
            bytes,
            place,
            ready,
        }
    }

    /// Takes back the blocks that peers have released, and returns those of dead ones.
    pub(super) fn collect_released(&mut self) -> Vec<SlotId> {
        let PoolState {
            arena,
            borrowers,
            lent_blocks,
            ended_lends,
            ..
        } = self;
        let Ended { released, dead } = borrowers.collect(|page, is_dead| {
            let claimed: Vec<_> = claimed(lent_blocks, ended_lends, page).collect();
            // It is released as what the dead was lent by answers.
            claimed
                .iter()
                .filter(|_| is_dead)
                .for_each(|&slot| arena.hold(slot));
            claimed
        });
        let ended = ended_lends.extract_if(|&number, lend| {
            let page = borrowers.page(lend.client);
            if page.is_some_and(|page| has_claim(page, number)) {
                return false;
            }
            let other = claimant(borrowers, number);
            lend.client = other.unwrap_or(lend.client);
            other.is_none()
        });
        let released = released.into_iter().chain(ended.map(|(_, lend)| lend.slot));
        released.for_each(|slot| arena.release(slot));
        dead
    }

    /// Ends what peers may open of a block. Those that have it keep it.
    pub(super) fn end_lends(&mut self, slot: SlotId) {
        let lends = self.owned.get_mut(&slot).map(std::mem::take);
        for number in lends.into_iter().flatten() {
            self.lent_blocks.remove(&number);
            self.offers.end(number);
            if let Some(client) = claimant(&self.borrowers, number) {
                self.arena.hold(slot);
                self.ended_lends.insert(number, EndedLend { slot, client });
            }
        }
    }

    fn claimed(&self, page: &SharedPage) -> impl Iterator<Item = SlotId> {
        claimed(&self.lent_blocks, &self.ended_lends, page)
    }

    /// Whether a peer has claimed such a block by words.
    pub(super) fn has_claim_in(&self, client: u64, is_such: impl Fn(SlotId) -> bool) -> bool {
        let page = self.borrowers.page(client);
        page.is_some_and(|page| self.claimed(page).any(is_such))
    }

    pub(super) fn release_owner(&mut self, slot: SlotId) {
        self.end_lends(slot);
        if self.owned.remove(&slot).is_some() {
            self.arena.release(slot);
        }
    }

    /// Bytes that are not free: a user has them, or a stream has not completed its work on them.
    pub(super) fn used(&self) -> u64 {
        self.arena.chunks().iter().map(Chunk::used).sum()
    }

    /// Bytes of the owner's blocks, and of the peers'. A block that both have counts in both.
    pub(super) fn held(&self) -> (u64, u64) {
        let owned = self.owned.keys().map(|&slot| self.arena.slot(slot).bytes());
        let pages = self.borrowers.pages();
        let claimed: HashSet<_> = pages.flat_map(|(_, page)| self.claimed(page)).collect();
        let is_lent = |(id, slot): &(SlotId, &Slot)| {
            slot.holders > self.owned.contains_key(id).into() || claimed.contains(id)
        };
        let lent = self.arena.slots().filter(is_lent);
        (owned.sum(), lent.map(|(_, slot)| slot.bytes()).sum())
    }

    /// Records that a second user has the block: its contents are foreign to every user from now
    /// on.
    pub(super) fn set_several_writers(&mut self, slot: SlotId) {
        let (region, range) = self.range_of(slot);
        let last_writers = &mut self.users.region(region).last_writers;
        last_writers.set(range, LastWriter::Several);
    }
}

/// The word of a block's offer in the pages of peers. `None` for one beyond those that are offered.
fn offer_word(slot: SlotId, access: Access) -> Option<u32> {
    let word = CLAIMS_MAX + 1 + 2 * slot + u32::from(access == Access::ReadWrite);
    (word < WORDS).then_some(word)
}

/// A peer that has claimed a block by words.
fn claimant(borrowers: &Borrowers<SlotId>, number: u64) -> Option<u64> {
    let mut pages = borrowers.pages();
    let claims = |&(_, page): &(u64, &SharedPage)| has_claim(page, number);
    pages.find(claims).map(|(client, _)| client)
}

/// The blocks that the peer of this page has claimed by words.
fn claimed(
    lent_blocks: &HashMap<u64, LentBlock>,
    ended_lends: &HashMap<u64, EndedLend>,
    page: &SharedPage,
) -> impl Iterator<Item = SlotId> {
    let lent = lent_blocks
        .iter()
        .map(|(number, lend)| (*number, lend.slot));
    let ended = ended_lends
        .iter()
        .map(|(number, lend)| (*number, lend.slot));
    let claimed = lent
        .chain(ended)
        .filter(|&(number, _)| has_claim(page, number));
    claimed.map(|(_, slot)| slot)
}

pub(super) fn check_bytes(bytes: u64) -> Result<()> {
    if bytes == 0 {
        Err(Error::argument("bytes", bytes, "at least 1"))
    } else {
        Ok(())
    }
}
