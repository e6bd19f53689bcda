//! What all handles of one publisher share: its state, how a sample goes out, and what the watcher does for it.

mod delivery;
mod direct;
mod history;
mod reception;
mod room;
#[cfg(test)]
mod tests;
mod turn;

pub(super) use direct::Recipients;
pub(crate) use direct::{Departures, Member, Observer, Parcel};

use std::collections::{HashMap, VecDeque};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use self::history::Due;
use self::turn::{Turn, Turns};
use super::outlet::{Outlet, Parts, Phase, share_memory};
use super::publisher::{Policy, PublisherBuilder, SlotHold, SlotReturn, SubscriberInfo};
use crate::backend::{Access, DeviceKind, StreamOp};
use crate::clock::{Stopwatch, now_ns};
use crate::device::Device;
use crate::domain::Claim;
use crate::error::{Error, HandshakeFault, Result};
use crate::fork::{Home, PrivateFd};
use crate::link::closer::PeerSocket;
use crate::link::entry::{Description, Metadata};
use crate::link::limits::{Seat, Seats};
use crate::link::message::{self, Farewell, Message, Received};
use crate::link::peer::{Peer, ProcessId, Sign};
use crate::link::proof::Streams;
use crate::link::pulse::Uptime;
use crate::link::wake::{Bell, Wake};
use crate::link::watcher::{Next, Usage, Watch, Watched, Watcher, new_generation};
use crate::memory::arena::{Arena, SLOTS_MAX, SlotId};
use crate::memory::board::Board;
use crate::nvtx;
use crate::stream::{Backoff, Stream};
use crate::tensor::Layout;

/// Looks for room before a sender sleeps: a few milliseconds, in which a pipeline that is full moves on. Each is short,
/// because what is seen late is sent late.
const LOOKS: u32 = 16_000;

/// A wait in slices, so that a wake-up taken by another thread of this process costs a slice and not a hang.
const SLICE: Duration = Duration::from_millis(50);

/// Connections that have not said who they are.
const GREETINGS_MAX: usize = 64;

const CROWDED: &str = "too many connect and say nothing; try again";

/// Connections accepted before others have their turn.
const ACCEPTED_AT_ONCE: usize = 32;

/// How often the socket of one that does no more is read, [`MESSAGES_AT_ONCE`] each time.
const LAST_WORDS: usize = 16;

/// Messages taken from one socket before the others have their turn.
const MESSAGES_AT_ONCE: usize = 16;

const LISTENER: u64 = 0;
const SOCKET: u64 = 0;
const PROVEN: u64 = 1;
const SUSPECT: u64 = 2;

fn tag(id: u64, kind: u64) -> u64 {
    id << 2 | kind
}

/// The shared part of a publisher.
pub(super) struct Core {
    pub(super) home: Home,
    pub(super) options: PublisherBuilder,
    pub(super) name: String,
    pub(super) device: Device,
    generation: [u8; 16],
    this: Weak<Core>,
    me: Weak<dyn Watched>,
    watcher: Arc<Watcher>,
    /// Never held across a call of the driver that gives a stream work or asks one: see [`turn`].
    state: Mutex<State>,
    turn_is_over: Condvar,
    turns: Arc<Turns>,
    /// The last value of a fence: no word of the board has reached a later one.
    fences: AtomicU64,
    /// All that have worked on the links or the board.
    streams: Arc<Streams>,
    greetings: Mutex<HashMap<u64, Greeting>>,
    seats: Seats,
    next_id: AtomicU64,
    bell: Bell,
    board: Board,
    /// The board's memory, for subscribers of a history.
    completions: Option<PrivateFd>,
    /// Repeats `ready` for who gets a sample later, behind the sample's own. Only with an observer.
    forward_stream: Option<Stream>,
    listener_watch: Mutex<Option<Watch>>,
    /// The listener is not watched until the next tick.
    is_deaf: AtomicBool,
    claim: Claim,
}

pub(super) struct State {
    arena: Arena,
    /// Every link has been told of all of its regions.
    is_announced: bool,
    outlets: Vec<Outlet>,
    next_sequence: u64,
    history: VecDeque<Kept>,
    closed: bool,
    /// One thread has the turn.
    is_sending: bool,
    awaiting_turn: u32,
    /// Links that wait for the history until the turn is over.
    joiners: VecDeque<u64>,
    /// What late joiners have been given and is not complete.
    due: Vec<Due>,
    /// The prover looks whether it is.
    is_looking_out: bool,
    ops: Vec<StreamOp>,
    places: Vec<Place>,
    /// One of the places is a subscriber's of this process; one, of another user's.
    is_any_local: bool,
    is_any_foreign: bool,
    /// Somebody who sleeps has been handed something.
    is_any_asleep: bool,
    /// Of those who have gone. Only with an observer.
    departures: Departures,
}

/// Where one sample goes on one link.
#[derive(Debug, Clone, Copy)]
struct Place {
    /// Where the link was found.
    index: usize,
    id: u64,
    position: u64,
    /// The entry has been published there.
    is_told: bool,
}

/// A sample of the history.
struct Kept {
    slot: SlotId,
    description: Description,
    /// Its data will never be complete.
    is_lost: bool,
}

/// Why a sample did not go out, and whether anybody had heard of it by then.
pub(super) enum Unsent {
    /// Nobody: the loan is as it was.
    Untold(Error),
    /// The subscribers, who are told that it is lost; the slot is theirs to release.
    Told(Error),
}

/// A connection whose `Hello` is due.
struct Greeting {
    /// Declared first: it ends before the socket is closed.
    watch: Watch,
    clock: Uptime,
    peer: Peer,
    socket: Arc<PeerSocket>,
    /// From its `Hello` on.
    seat: Option<Seat>,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Publisher").field("name", &self.name).field("device", &self.device).finish_non_exhaustive()
    }
}

impl Core {
    pub(super) fn new(options: PublisherBuilder, name: String, device: Device, claim: Claim) -> Result<Arc<Core>> {
        let watcher = Watcher::of_process()?;
        let (board, completions) = if options.history > 0 {
            let (board, fd) = Board::published(&device, SLOTS_MAX)?;
            (board, Some(fd))
        } else {
            (Board::new(&device, SLOTS_MAX)?, None)
        };
        let bell = Bell::new()?;
        let forward_stream = options.observer.as_ref().map(|_| device.stream()).transpose()?;
        let streams = Streams::default();
        forward_stream.iter().for_each(|stream| streams.note(stream));
        let core = Arc::new_cyclic(|me: &Weak<Core>| Core {
            home: Home::here(),
            generation: new_generation(),
            this: me.clone(),
            me: me.clone(),
            watcher: watcher.clone(),
            state: Mutex::new(State {
                arena: Arena::new(&device, options.memory_limit),
                is_announced: true,
                outlets: Vec::new(),
                next_sequence: 1,
                history: VecDeque::new(),
                closed: false,
                is_sending: false,
                awaiting_turn: 0,
                joiners: VecDeque::new(),
                due: Vec::new(),
                is_looking_out: false,
                ops: Vec::new(),
                places: Vec::new(),
                is_any_local: false,
                is_any_foreign: false,
                is_any_asleep: false,
                departures: Departures::default(),
            }),
            turn_is_over: Condvar::new(),
            turns: Arc::default(),
            fences: AtomicU64::new(0),
            streams: Arc::new(streams),
            greetings: Mutex::default(),
            seats: Seats::new(options.limits),
            next_id: AtomicU64::new(1),
            bell,
            board,
            completions,
            forward_stream,
            listener_watch: Mutex::new(None),
            is_deaf: AtomicBool::new(false),
            claim,
            options,
            name,
            device,
        });
        core.listen()?;
        watcher.tick(core.me.clone());
        Ok(core)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn note(&self, stream: &Stream) {
        self.streams.note(stream);
    }

    /// Takes a slot for `bytes`: a free one, a new region, or what is released within the loan's timeout.
    pub(super) fn take_slot(&self, bytes: u64) -> Result<(SlotId, u64)> {
        self.home.check()?;
        let mut clock = Stopwatch::default();
        let mut backoff = Backoff::spinning(LOOKS);
        let mut state = self.lock();
        loop {
            self.reclaim(&mut state, false);
            // A sample in a region that a subscriber cannot be told of would be the end of its link.
            state.announce(&self.name)?;
            if let Some(slot) = state.arena.take(bytes) {
                return Ok((slot, state.address(slot)));
            }
            // Memory is taken only when nothing comes back, also not behind a sample that is held long.
            self.reclaim(&mut state, true);
            if let Some(slot) = state.arena.take(bytes) {
                return Ok((slot, state.address(slot)));
            }
            let exempt = state.quarantined();
            if let Some(growth) = state.arena.plan(bytes, exempt) {
                // Without the lock: a driver may take its time, and the watcher must not wait for it.
                drop(state);
                let made = growth.make(&self.device);
                state = self.lock();
                state.arena.adopt(growth, made)?;
                state.is_announced = false;
                continue;
            }
            let (used, limit) = (state.arena.total(), state.arena.limit());
            let left = self.options.loan_timeout.saturating_sub(clock.elapsed());
            if left.is_zero() || bytes > limit {
                return Err(Error::MemoryLimit { name: self.name.clone(), bytes, used, limit });
            }
            state = self.wait_for_release(state, left, &mut backoff, |_| true);
        }
    }

    /// Keeps the region of a slot mapped.
    pub(super) fn hold(&self, slot: SlotId) -> SlotHold {
        let state = self.lock();
        let region = state.arena.chunks()[state.arena.slot(slot).region as usize].region.clone();
        SlotHold { region: Some(region), streams: self.streams.clone(), watcher: self.watcher.clone(), home: self.home }
    }

    /// Tells when the slot is free again.
    pub(super) fn watch_slot(&self, slot: SlotId) -> SlotReturn {
        SlotReturn { core: self.this.clone(), home: self.home, slot, serial: self.lock().arena.serial(slot) }
    }

    /// Whether nobody holds the slot any more that was taken as this one.
    pub(super) fn is_back(&self, slot: SlotId, serial: u64) -> bool {
        let mut state = self.lock();
        self.reclaim(&mut state, true);
        state.arena.serial(slot) != serial
    }

    /// Returns a slot that was loaned and not sent. What is enqueued on the streams `behind` may still write it: it is
    /// free when they are past that.
    ///
    /// # Errors
    /// No fence was to be had. The slot is free when the streams are proven to be past what they have.
    pub(super) fn return_slot(&self, slot: SlotId, behind: &[Stream]) -> Result<()> {
        let Some((last, others)) = behind.split_last() else {
            self.lock().arena.let_go(slot);
            return Ok(());
        };
        let fenced = others.iter().try_for_each(|other| last.wait_for(other)).and_then(|()| self.fence(slot, last));
        match fenced {
            Ok(value) => {
                let mut state = self.lock();
                state.arena.fence(slot, value);
                state.arena.let_go(slot);
            }
            Err(_) => self.once_past(behind, move |core| core.lock().arena.let_go(slot)),
        }
        fenced.map(drop)
    }

    /// Has `stream` signal a slot's own word behind the work that it has been given. Returns the value.
    fn fence(&self, slot: SlotId, stream: &Stream) -> Result<u64> {
        self.note(stream);
        let value = self.next_fence();
        let op = StreamOp::Signal { word: self.board.device_word(slot as usize), value };
        // SAFETY: the board outlives its signals: the caller has the core, and `close` waits for that, and then for the
        // stream, noted above.
        unsafe { stream.batch(&[op]) }?;
        Ok(value)
    }

    /// Calls `then`, on the prover, when the streams are proven to be past what they have been given so far. Where
    /// the driver has refused a fence there is no other way to know.
    fn once_past(&self, streams: &[Stream], then: impl FnOnce(&Core) + Send + 'static) {
        let Some(core) = self.this.upgrade() else { return };
        let past = Streams::default();
        streams.iter().for_each(|stream| past.note(stream));
        let (mut proof, mut then) = (None, Some(then));
        // However long they take: who waits for the slot, or for the sample's end, has nobody else.
        self.watcher.retire(move || {
            let is_past = proof.get_or_insert_with(|| past.mark()).is_passed();
            if is_past && let Some(then) = then.take() {
                then(&core);
                core.ring();
            }
            is_past
        });
    }

    /// A value that no word of the board has reached: words only grow.
    fn next_fence(&self) -> u64 {
        self.fences.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Takes back every slot that nobody uses any more.
    fn reclaim(&self, state: &mut State, thorough: bool) {
        let State { arena, outlets, .. } = state;
        outlets.iter_mut().for_each(|outlet| outlet.reclaim(thorough, |slot| arena.let_go(slot)));
        arena.collect(|slot, value| self.board.word(slot as usize).reached(value));
    }

    pub(super) fn subscribers(&self) -> Vec<SubscriberInfo> {
        if !self.home.is_here() {
            // Another thread of the parent may have held the lock at the fork: it is not to be touched here.
            return Vec::new();
        }
        let mut state = self.lock();
        self.reclaim(&mut state, true);
        state.outlets.iter().filter(|outlet| outlet.phase != Phase::Attaching).map(Outlet::info).collect()
    }

    /// Waits until `count` subscribers are attached.
    pub(super) fn wait_for_subscribers(&self, count: usize, timeout: Duration) -> Result<()> {
        self.home.check()?;
        let start = Instant::now();
        loop {
            if self.lock().outlets.iter().filter(|outlet| outlet.is_live()).count() >= count {
                return Ok(());
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                let what = format!("subscriber {count} of {:?}", self.name);
                return Err(Error::Timeout { what, waited: timeout });
            }
            message::wait_readable(self.bell.as_fd(), left.min(SLICE));
            self.bell.drain();
        }
    }

    pub(super) fn memory_in_use(&self) -> (u64, u64) {
        if !self.home.is_here() {
            return (0, self.options.memory_limit);
        }
        let state = self.lock();
        (state.arena.total(), state.arena.limit())
    }

    /// Gives the name up, says goodbye, and keeps the memory until no stream of this process writes it any more. The
    /// goodbyes are in their sockets when this returns, for the process may end then. Once; what follows does nothing.
    pub(super) fn close(self: &Arc<Core>) {
        self.claim.withdraw();
        *self.listener_watch.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.greetings.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let mut state = self.lock();
        if std::mem::replace(&mut state.closed, true) {
            return;
        }
        for outlet in &mut state.outlets {
            let _ = message::send(outlet.socket(), &Message::Bye(Farewell::Closed), &[]);
            outlet.watches.clear();
        }
        drop(state);
        self.ring();
        // Never here, even if all is quiet: to unregister memory, a driver may wait for a stream that waits for a peer.
        let (core, mut proof) = (self.clone(), None);
        self.watcher.retire(move || {
            if Arc::strong_count(&core) > 1 {
                return Usage::Held;
            }
            let is_past = proof.get_or_insert_with(|| core.streams.mark()).is_passed();
            Usage::from(is_past && core.look_out(&mut core.lock()))
        });
    }
}

impl State {
    fn address(&self, slot: SlotId) -> u64 {
        let slot = self.arena.slot(slot);
        self.arena.chunks()[slot.region as usize].region.ptr() + slot.offset
    }

    /// Finds a place at every live recipient, and leaves the signals that complete the sample there in `ops`; who has no
    /// place misses this sample. All that a send needs of a link beside its entry is looked at here, once.
    fn place(&mut self, to: Recipients) {
        let State { arena, outlets, places, ops, .. } = self;
        let (mut is_any_local, mut is_any_foreign) = (false, false);
        places.clear();
        ops.clear();
        let is_meant = |outlet: &Outlet| outlet.is_live() && to.include(outlet);
        for (index, outlet) in outlets.iter_mut().enumerate().filter(|(_, outlet)| is_meant(outlet)) {
            if let Some(position) = outlet.place(|slot| arena.let_go(slot)) {
                places.push(Place { index, id: outlet.id, position, is_told: false });
                ops.push(outlet.ready_op(position));
                is_any_local |= outlet.is_local;
                is_any_foreign |= outlet.is_foreign;
            }
        }
        (self.is_any_local, self.is_any_foreign) = (is_any_local, is_any_foreign);
    }

    /// The first recipient that must not miss a sample and has no room for one.
    fn first_full(&self, to: Recipients) -> Option<&Outlet> {
        self.outlets.iter().find(|outlet| to.await_it(outlet))
    }

    /// Tells every subscriber of the regions that it does not know. Who does not read its socket loses its link.
    ///
    /// # Errors
    /// This process has no room for that; nobody loses anything by it, and it is done later.
    fn announce(&mut self, name: &str) -> Result<()> {
        if self.is_announced {
            return Ok(());
        }
        let State { arena, outlets, .. } = self;
        let is_heard = |outlet: &&mut Outlet| matches!(outlet.phase, Phase::Live | Phase::Joining | Phase::Attaching);
        let mut own = Ok(());
        for outlet in outlets.iter_mut().filter(is_heard) {
            match outlet.announce(arena.chunks()) {
                Ok(()) => {}
                Err(error) if message::is_own(error) => {
                    let context = format!("memory of {name:?}, to process {}", outlet.peer.pid);
                    own = Err(Error::os("sendmsg", context, error));
                }
                Err(_) => outlet.leave(Some(Farewell::Evicted("it does not read its socket".into()))),
            }
        }
        self.is_announced = own.is_ok();
        own
    }

    /// Bytes that leavers hold: they do not count against the limit, up to the limit once more, so that a
    /// stopped process cannot stop the publisher.
    fn quarantined(&self) -> u64 {
        let leaving = self.outlets.iter().filter(|outlet| matches!(outlet.phase, Phase::Leaving | Phase::Suspect));
        let bytes: u64 = leaving.flat_map(Outlet::holds).map(|slot| self.arena.slot(slot).bytes()).sum();
        bytes.min(self.arena.limit())
    }

    fn remember(&mut self, slot: SlotId, description: Description, length: usize) {
        self.arena.hold(slot);
        self.history.push_back(Kept { slot, description, is_lost: false });
        while self.history.len() > length {
            let forgotten = self.history.pop_front();
            forgotten.into_iter().for_each(|kept| self.arena.let_go(kept.slot));
        }
    }

    /// Wakes every subscriber that sleeps and has been handed something.
    fn wake_sleepers(&mut self) {
        if std::mem::take(&mut self.is_any_asleep) {
            self.outlets.iter_mut().for_each(Outlet::wake_sleeper);
        }
    }

    /// A number that changes whenever something was freed.
    fn freed_count(&self) -> u64 {
        self.arena.changes()
    }

    fn find(&mut self, id: u64) -> Option<&mut Outlet> {
        self.outlets.iter_mut().find(|outlet| outlet.id == id)
    }
}

fn own_pid() -> i32 {
    std::process::id() as i32
}
