//! What all handles of one pool share: its memory and who has which block. **This module is marked for unsafe**: it
//! enqueues work on blocks by address.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::time::Duration;

use super::block::{Block, Borrower, Counts, Lend};
use super::marks::{Mark, Marks};
use crate::backend::{Access, DevicePtr, StreamOp};
use crate::clock::Stopwatch;
use crate::device::Device;
use crate::domain::{Domain, EndpointName};
use crate::error::{Error, Result};
use crate::fork::Home;
use crate::link::proof::Streams;
use crate::link::watcher::Watcher;
use crate::memory::arena::{Arena, SLOTS_MAX, SlotId};
use crate::memory::board::Board;
use crate::memory::page::Page;
use crate::memory::ticket::{Incarnation, Ticket, Wanted};
use crate::memory::tied::Tied;
use crate::rendezvous::Kind;
use crate::stream::{Backoff, Stream};

/// How long the clearing of a block may take: memory is written at terabytes a second, other processes' turns included.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(10);

/// A pool's shared part.
pub(super) struct Core {
    pub(super) home: Home,
    pub(super) name: EndpointName,
    pub(super) domain: Domain,
    pub(super) device: Device,
    pub(super) uid: u32,
    pub(super) me: Weak<Core>,
    /// Set when the name is held.
    pub(super) generation: OnceLock<Incarnation>,
    /// Clears blocks that go to another user.
    scrubber: Stream,
    owned: Tied<Owned>,
}

/// What goes when this process's streams are past it.
struct Owned {
    state: Mutex<State>,
    board: Board,
}

pub(super) struct State {
    pub(super) arena: Arena,
    pub(super) blocks: HashMap<SlotId, Block>,
    pub(super) lends: HashMap<u64, Lend>,
    pub(super) borrowers: HashMap<u64, Borrower>,
    pub(super) counts: Counts,
    pub(super) is_closed: bool,
    /// By region.
    marks: Vec<Marks>,
    fences: u64,
    next_lend: u64,
}

/// What came of asking for a block.
pub(super) enum Taken {
    Block {
        slot: SlotId,
        /// The value of the board's word at which the block has been cleared.
        cleared_at: Option<u64>,
    },
    Full {
        used: u64,
        limit: u64,
    },
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("name", &self.name).field("device", &self.device).finish_non_exhaustive()
    }
}

impl Core {
    pub(super) fn new(name: EndpointName, domain: Domain, device: Device, limit: u64) -> Result<Arc<Core>> {
        let scrubber = device.stream()?;
        let state = State {
            arena: Arena::new(&device, limit),
            blocks: HashMap::new(),
            lends: HashMap::new(),
            borrowers: HashMap::new(),
            counts: Counts::default(),
            is_closed: false,
            marks: Vec::new(),
            fences: 0,
            next_lend: 1,
        };
        let owned = Owned { state: Mutex::new(state), board: Board::new(&device, SLOTS_MAX)? };
        let owned = Tied::to(Arc::default(), owned)?;
        Ok(Arc::new_cyclic(|me| Core {
            home: Home::here(),
            uid: rustix::process::geteuid().as_raw(),
            me: me.clone(),
            generation: OnceLock::new(),
            name,
            domain,
            device,
            scrubber,
            owned,
        }))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.owned.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock, unless somebody has it, who may be in a call of the driver.
    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, State>> {
        match self.owned.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Every stream that has worked on the pool's memory or words.
    pub(super) fn streams(&self) -> &Arc<Streams> {
        self.owned.streams()
    }

    pub(super) fn watcher(&self) -> &Arc<Watcher> {
        self.owned.watcher()
    }

    /// A block for this process: a free one, a new region, or what comes back within `timeout`.
    pub(super) fn allocate(&self, bytes: u64, timeout: Duration) -> Result<SlotId> {
        self.home.check()?;
        check_bytes(bytes)?;
        let (mut clock, mut backoff, mut has_waited) = (Stopwatch::default(), Backoff::default(), false);
        loop {
            match self.take(bytes, self.uid, Block::owned())? {
                Taken::Block { slot, cleared_at } => {
                    self.wait_until_clear(slot, cleared_at)?;
                    return Ok(slot);
                }
                Taken::Full { used, limit } if clock.elapsed() >= timeout || bytes > limit => {
                    return Err(Error::MemoryLimit { name: self.name.to_string(), bytes, used, limit });
                }
                Taken::Full { .. } => {}
            }
            if !std::mem::replace(&mut has_waited, true) {
                self.lock().counts.waits += 1;
            }
            // A device, or a peer's, that completes a release cannot wake anybody: looking is all there is.
            backoff.pause();
        }
    }

    pub(super) fn wait_until_clear(&self, slot: SlotId, cleared_at: Option<u64>) -> Result<()> {
        let Some(value) = cleared_at else { return Ok(()) };
        if self.device.backend().wait_word(self.owned.board.word(slot as usize), value, CLEAR_TIMEOUT)? {
            return Ok(());
        }
        self.let_go(slot);
        Err(Error::Timeout { what: "the clearing of a block".into(), waited: CLEAR_TIMEOUT })
    }

    /// Takes a block for the user `uid`, if there is one, or room for a new region.
    pub(super) fn take(&self, bytes: u64, uid: u32, block: Block) -> Result<Taken> {
        let mut state = self.lock();
        loop {
            self.reclaim(&mut state);
            if let Some(slot) = state.arena.take(bytes) {
                // From here on it is this caller's, whoever has the lock.
                state.blocks.insert(slot, block);
                let cleared_at = self.clear_for(state, slot, uid)?;
                return Ok(Taken::Block { slot, cleared_at });
            }
            let Some(growth) = state.arena.plan(bytes, 0) else {
                return Ok(Taken::Full { used: state.used(), limit: state.arena.limit() });
            };
            // Without the lock: a driver may take its time.
            drop(state);
            let made = growth.make(&self.device);
            state = self.lock();
            state.arena.adopt(growth, made)?;
            let regions = state.arena.chunks().len();
            state.marks.resize_with(regions, Marks::default);
        }
    }

    /// A first region that holds `bytes`.
    pub(super) fn reserve(&self, bytes: u64) -> Result<()> {
        let slot = match self.take(bytes, self.uid, Block::owned())? {
            Taken::Block { slot, .. } => slot,
            Taken::Full { used, limit } => {
                return Err(Error::MemoryLimit { name: self.name.to_string(), bytes, used, limit });
            }
        };
        self.let_go(slot);
        self.lock().counts = Counts::default();
        Ok(())
    }

    /// Enqueues the clearing of a block in which somebody but `uid` has left something. It is not free, whoever has it,
    /// before that is done. Gives up the lock before the driver is called: a full launch queue may hold that up.
    fn clear_for<'a>(&'a self, mut state: MutexGuard<'a, State>, slot: SlotId, uid: u32) -> Result<Option<u64>> {
        let (region, range) = state.range_of(slot);
        let mut cleared_at = None;
        if state.marks[region].are_foreign_to(uid, &range) {
            let (value, address) = (state.next_fence(), state.address(slot));
            state.arena.fence(slot, value);
            drop(state);
            let cleared = self.clear(address, range.end - range.start, slot, value);
            state = self.lock();
            if let Err(error) = cleared {
                // The block is lost with the device: what of it is still to be cleared is not known.
                state.blocks.insert(slot, Block::owned());
                return Err(error);
            }
            cleared_at = Some(value);
        }
        state.marks[region].set(range, Mark::User(uid));
        state.counts.allocations += 1;
        state.note_use();
        Ok(cleared_at)
    }

    fn clear(&self, ptr: DevicePtr, bytes: u64, slot: SlotId, value: u64) -> Result<()> {
        self.streams().note(&self.scrubber);
        let signal = StreamOp::Signal { word: self.owned.board.device_word(slot as usize), value };
        // SAFETY: the stream is live; the block is nobody's yet and lies in a region that goes, as the board does, only
        // when this stream, noted above, is past it.
        unsafe {
            self.device.backend().zero(self.scrubber.raw(), ptr, bytes)?;
            self.scrubber.batch(&[signal])
        }
    }

    /// Has the scrubber store `value` at `offset` of a peer's page, behind what it clears. To be called without the lock.
    pub(super) fn tell_cleared(&self, page: &Page, offset: usize, value: u64) -> Result<()> {
        let Some(word) = page.device_ptr(offset) else { return Ok(()) };
        self.streams().note(&self.scrubber);
        // SAFETY: a peer's page is let go only behind the proof of the streams noted (`Core::part`).
        unsafe { self.scrubber.batch(&[StreamOp::Signal { word, value }]) }
    }

    /// The owner lets a block go.
    pub(super) fn let_go(&self, slot: SlotId) {
        self.lock().owner_lets_go(slot);
    }

    /// The owner lets a block go behind the work of `stream`.
    pub(super) fn let_go_behind(&self, slot: SlotId, stream: &Stream) -> Result<()> {
        self.streams().note(stream);
        let value = self.lock().next_fence();
        let signal = StreamOp::Signal { word: self.owned.board.device_word(slot as usize), value };
        // Without the lock, which the attendant takes: a full launch queue may hold this up. The slot is the owner's until
        // it is let go below.
        // SAFETY: the board goes only when this stream, noted above, is past its signals.
        unsafe { stream.batch(&[signal])? };
        let mut state = self.lock();
        state.arena.fence(slot, value);
        state.owner_lets_go(slot);
        Ok(())
    }

    /// Lends a block: the ticket is good as long as its owner has it.
    pub(super) fn lend(&self, slot: SlotId, bytes: u64, access: Access) -> Result<Ticket> {
        self.home.check()?;
        let mut state = self.lock();
        let Some(&incarnation) = self.generation.get().filter(|_| !state.is_closed) else {
            let (name, pid) = (self.name.to_string(), std::process::id() as i32);
            return Err(Error::OwnerGone { kind: Kind::Pool, name, pid, graceful: true });
        };
        let wanted = Wanted { id: state.lend(slot, bytes, access), offset: 0, bytes: Some(bytes) };
        drop(state);
        let device = Some(self.device.info().id);
        Ticket::new(&self.domain, &self.name, Kind::Pool, Some(incarnation), wanted, device)
    }

    pub(super) fn address(&self, slot: SlotId) -> DevicePtr {
        self.lock().address(slot)
    }

    /// Takes back every block that nobody uses any more, and forgets the peers that have left with nothing.
    pub(super) fn reclaim(&self, state: &mut State) {
        state.collect_released();
        let done: Vec<u64> = state.borrowers.iter().filter(|(_, b)| b.is_done()).map(|(&id, _)| id).collect();
        done.into_iter().filter_map(|id| state.borrowers.remove(&id)).for_each(|borrower| self.part(borrower.page));
        state.arena.collect(|slot, value| self.owned.board.word(slot as usize).reached(value));
    }

    /// Lets a peer's page go behind the proof of this process's streams.
    pub(super) fn part(&self, page: Arc<Page>) {
        page.retire(self.streams().clone(), self.watcher());
    }
}

impl State {
    pub(super) fn address(&self, slot: SlotId) -> DevicePtr {
        let slot = self.arena.slot(slot);
        self.arena.chunks()[slot.region as usize].region.ptr() + slot.offset
    }

    fn range_of(&self, slot: SlotId) -> (usize, std::ops::Range<u64>) {
        let slot = self.arena.slot(slot);
        (slot.region as usize, slot.offset..slot.offset + slot.bytes())
    }

    /// A value that no word of the board has reached: words only grow.
    fn next_fence(&mut self) -> u64 {
        self.fences += 1;
        self.fences
    }

    fn lend(&mut self, slot: SlotId, bytes: u64, access: Access) -> u64 {
        let known = self.lends.iter().find(|(_, lend)| (lend.slot, lend.access) == (slot, access)).map(|(&id, _)| id);
        known.unwrap_or_else(|| {
            let id = self.next_lend;
            self.next_lend += 1;
            self.lends.insert(id, Lend { slot, bytes, access });
            id
        })
    }

    /// Another user has a block, too: what it leaves there is for neither the next.
    pub(super) fn mark_several(&mut self, slot: SlotId) {
        let (region, range) = self.range_of(slot);
        self.marks[region].set(range, Mark::Several);
    }
}

pub(super) fn check_bytes(bytes: u64) -> Result<()> {
    if bytes == 0 { Err(Error::argument("bytes", bytes, "at least 1")) } else { Ok(()) }
}
