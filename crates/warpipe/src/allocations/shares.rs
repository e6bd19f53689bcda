//! The shares of a server, their owners, and the clients that have them. **This module is marked
//! for unsafe**: it enqueues stores of words by address.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::backend::{Access, DevicePtr, PointerKind};
use crate::debug::opaque_debug;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
#[cfg(test)]
use crate::ipc::peer::Process;
use crate::ipc::{ClientInfo, Rejection, ServerCore};
use crate::lend::claims::Claimant;
use crate::lend::server::{Lender, Lending};
use crate::lend::share_words::{Claims, SLOTS, ShareWords, has_claim, slot};
use crate::lend::{LendReply, Offer, OfferPlace};
use crate::memory::legacy::LegacyHandle;
use crate::memory::pieces::Run;
use crate::mutex::LockUnpoisoned;
use crate::runtime::drop_after_fence::DropAfterFence;
use crate::runtime::reactor::Reactor;
use crate::shm::page::{SharedPage, words_bytes};
use crate::stream::Stream;

/// How long a run is held that no share lies in: a sender of many small tensors of one allocation
/// exports it once.
const RUN_IDLE: Duration = Duration::from_secs(1);

/// The most pieces in one reply: each is exported for it, on the control thread.
const PIECES_AT_ONCE: usize = 4;

/// The state of a server, from [`AllocationServer::stats`](crate::AllocationServer::stats).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct AllocationStats {
    /// Shares that no client has opened.
    pub unclaimed: usize,
    /// Shares that a client has open.
    pub claimed: usize,
    /// Bytes of both.
    pub bytes: u64,
    /// Runs of allocations that are held, for shares or for a second after the last one.
    pub runs: usize,
    /// Clients that are connected, or still have shares.
    pub clients: usize,
}

/// A range that is shared once.
struct Share {
    offer: Offer,
    /// It was withdrawn, released, or had by the dead: it is dropped when no client has a claim.
    is_over: bool,
    /// Where it lies, if not in memory of a legacy handle.
    run: Option<Arc<HeldRun>>,
    /// Keeps the memory allocated.
    _owner: Box<dyn Any + Send>,
}

impl Share {
    /// Its slot, and the number that the ready word there reaches.
    fn slot(&self, number: u64) -> (u32, u64) {
        (slot(number), self.offer.ready.map_or(0, |(_, value)| value))
    }
}

/// A run that clients know by its number.
#[derive(Debug)]
struct HeldRun {
    number: u32,
    run: Run,
}

/// The shares of a server.
pub(super) struct Shares {
    device: Device,
    /// A word for each slot, in which the sharing stream stores the number of the share there when
    /// the contents are complete.
    ready: DropAfterFence<SharedPage>,
    words: ShareWords,
    lending: Lending,
    /// Never held during a driver call.
    state: Mutex<State>,
}

opaque_debug!(Shares { device });

struct State {
    /// The share of each number.
    shares: HashMap<u64, Share>,
    /// Shares since the clients' words were looked at.
    shared: usize,
    /// A number's bits above its slot.
    last_lap: u64,
    /// Slots without a share, and the number that its ready word reaches.
    unused: Vec<(u32, u64)>,
    last_slot: u32,
    clients: BTreeMap<u64, Claimant>,
    is_closed: bool,
    last_run: u32,
    /// By the handles of its pieces. The instant is the first at which no share was seen in it.
    runs: HashMap<Vec<u64>, (Arc<HeldRun>, Option<Instant>)>,
}

impl Shares {
    pub(super) fn new(device: Device) -> Result<Shares> {
        let (ready, ready_fd) = SharedPage::publish(Some(&device), words_bytes(SLOTS as usize))?;
        let (words, [states_fd, offers_fd]) = ShareWords::create()?;
        let pages = vec![ready_fd, states_fd, offers_fd];
        Ok(Shares {
            lending: Lending::new(device.info().id, SLOTS, &ready, pages),
            device,
            ready: DropAfterFence::new(Arc::default(), ready)?,
            words,
            state: Mutex::new(State {
                shares: HashMap::new(),
                shared: 0,
                last_lap: 0,
                unused: vec![],
                last_slot: 0,
                clients: BTreeMap::new(),
                is_closed: false,
                last_run: 0,
                runs: HashMap::new(),
            }),
        })
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// Adds a share. Returns its number.
    ///
    /// # Safety
    /// The memory stays allocated as long as `owner` lives.
    pub(super) unsafe fn share(
        &self,
        stream: &Stream,
        (ptr, bytes): (DevicePtr, u64),
        access: Access,
        owner: Box<dyn Any + Send>,
    ) -> Result<u64> {
        // SAFETY: the caller's promise.
        let (place, run) = unsafe { self.place(ptr, bytes, access) }?;
        let is_complete = stream.is_idle()?;
        let number = self.take_number()?;
        if !is_complete && let Err(error) = self.announce(stream, number) {
            self.lock().unused.push((slot(number), 0));
            return Err(error);
        }
        let offer = Offer {
            bytes,
            place,
            ready: (!is_complete).then_some((slot(number), number)),
        };
        self.words.offer(number, &offer)?;
        let share = Share {
            offer,
            is_over: false,
            run,
            _owner: owner,
        };
        let mut state = self.lock();
        state.shares.insert(number, share);
        state.shared += 1;
        Ok(number)
    }

    /// Removes a share that no client has opened. False if it is another one.
    pub(super) fn withdraw(&self, number: u64) -> bool {
        let mut state = self.lock();
        let claims = self.claims(&state, number);
        let share = state.shares.get_mut(&number);
        let Some(share) = share.filter(|share| !share.is_over && !claims.is_over) else {
            return false;
        };
        if claims.is_held || !self.words.withdraw(number) {
            return false;
        }
        share.is_over = true;
        // One that is about to give it back is waited for.
        let dropped = match self.claims(&state, number).is_held {
            true => None,
            false => state.shares.remove(&number),
        };
        if let Some(share) = &dropped {
            state.unused.push(share.slot(number));
        }
        drop(state);
        true
    }

    /// Whether a client has opened a share, and its contents are complete: it may give the share
    /// back before. `None` once it is over.
    pub(super) fn is_opened(&self, number: u64) -> Option<bool> {
        let state = self.lock();
        let share = state.shares.get(&number).filter(|share| !share.is_over)?;
        match self.claims(&state, number) {
            Claims { is_held: true, .. } => {
                Some(share.offer.ready.is_none_or(|ready| self.is_past(ready)))
            }
            Claims { is_over, .. } => (!is_over).then_some(false),
        }
    }

    pub(super) fn stats(&self) -> AllocationStats {
        let state = self.lock();
        let is_held = |number: &&u64| self.claims(&state, **number).is_held;
        let claimed = state.shares.keys().filter(is_held).count();
        AllocationStats {
            unclaimed: state.shares.len() - claimed,
            claimed,
            bytes: state.shares.values().map(|share| share.offer.bytes).sum(),
            runs: state.runs.len(),
            clients: state.clients.len(),
        }
    }

    /// For a server that has closed: takes what no client has, or can open any more. Returns whether
    /// no client has a share.
    pub(super) fn has_ended(&self, reactor: &Reactor) -> bool {
        let mut state = self.lock();
        state.is_closed = true;
        let clients = state.clients.values_mut();
        clients.for_each(|client| client.leave(false));
        let dropped = state.collect(&self.words);
        let has_ended = state.shares.is_empty();
        drop(state);
        drop_deferred(dropped, reactor);
        has_ended
    }

    /// Has a share's client open its handle, as a client in another process does.
    #[cfg(test)]
    pub(super) fn pose_as_of_another_process(&self, number: u64) {
        let mut state = self.lock();
        let share = state.shares.get_mut(&number).unwrap();
        let OfferPlace::Legacy(bytes) = &mut share.offer.place else {
            panic!("memory of cudaMalloc");
        };
        let handle = LegacyHandle::from_bytes(bytes).unwrap();
        *bytes = handle.of_another_process().to_bytes();
        self.words.offer(number, &share.offer).unwrap();
    }

    /// Ends all sessions, as of a process that lives until the other end of a pipe is closed.
    #[cfg(test)]
    pub(super) fn end_clients_as(&self, process: &Arc<Process>) {
        let clients: Vec<_> = self.lock().clients.keys().copied().collect();
        for client in clients {
            self.leave(client, false);
            let mut state = self.lock();
            let client = state.clients.get_mut(&client).unwrap();
            client.leave_as(process.clone());
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.locked()
    }

    /// # Safety
    /// The memory stays allocated as long as the place is used.
    unsafe fn place(
        &self,
        ptr: DevicePtr,
        bytes: u64,
        access: Access,
    ) -> Result<(OfferPlace, Option<Arc<HeldRun>>)> {
        let found = self.device.backend().locate(ptr)?;
        match found.kind {
            PointerKind::Device if access == Access::Read => Err(Error::argument(
                "memory",
                "of cudaMalloc, which every process that opens it can write",
                "memory of cuMemMap",
            )),
            PointerKind::Device => {
                // SAFETY: the caller's promise.
                let handle = unsafe { LegacyHandle::of_located(&self.device, found, ptr, bytes) }?;
                Ok((OfferPlace::Legacy(handle.to_bytes()), None))
            }
            _ => {
                let (run, offset) = Run::around(&self.device, ptr, bytes)?;
                let held = self.known(run)?;
                let place = OfferPlace::Run {
                    run: held.number,
                    pieces: held.run.len(),
                    piece: held.run.piece_bytes(),
                    offset,
                    access,
                };
                Ok((place, Some(held)))
            }
        }
    }

    /// The run that is held already, or this one.
    fn known(&self, run: Run) -> Result<Arc<HeldRun>> {
        let handles = run.handles();
        let known = self.lock().known(&handles);
        if let Some(known) = known {
            // The second hold of each piece ends with `run`, without the lock.
            return Ok(known);
        }
        // Memory that cannot be exported is refused here, and not in its receiver. Each piece was
        // made on its own. One at a time: a run may have more pieces than this process may have
        // descriptors.
        for piece in 0..run.len() {
            drop(run.export(piece, 1)?);
        }
        let mut state = self.lock();
        if let Some(known) = state.known(&handles) {
            // Another thread has shared a part of it meanwhile.
            drop(state);
            return Ok(known);
        }
        let number = state.last_run.checked_add(1).ok_or_else(|| {
            Error::argument(
                "runs of allocations",
                u64::from(u32::MAX) + 1,
                "at most 2^32 - 1",
            )
        })?;
        state.last_run = number;
        let held = Arc::new(HeldRun { number, run });
        state.runs.insert(handles, (held.clone(), None));
        Ok(held)
    }

    /// The number of a new share, in a slot that its next stream alone stores the ready word of.
    fn take_number(&self) -> Result<u64> {
        let mut state = self.lock();
        // The last ones first: their words are in the caches.
        let free = state.unused.iter().rposition(|&ready| self.is_past(ready));
        let slot = match free {
            Some(at) => state.unused.swap_remove(at).0,
            None if state.last_slot + 1 < SLOTS => {
                state.last_slot += 1;
                state.last_slot
            }
            None => {
                let allowed = format!("at most {} that are not released", SLOTS - 1);
                return Err(Error::argument("shares", SLOTS, allowed));
            }
        };
        state.last_lap += u64::from(SLOTS);
        Ok(state.last_lap + u64::from(slot))
    }

    /// Has `stream` store a share's ready word behind its work so far.
    fn announce(&self, stream: &Stream, number: u64) -> Result<()> {
        let signal = self.ready.signal(slot(number) as usize, number);
        self.ready.streams().record_use(stream);
        // SAFETY: the page is dropped only when this stream, recorded above, is past its stores.
        unsafe { stream.batch(&[signal]) }
    }

    fn claims(&self, state: &State, number: u64) -> Claims {
        self.words.look(state.pages(), number)
    }

    fn is_past(&self, (word, value): (u32, u64)) -> bool {
        self.ready.word(word as usize).reached(value)
    }

    /// Drops what clients have released, once there are so many new shares that a look is due: each
    /// costs as much as there are shares.
    pub(super) fn drop_released(&self) {
        let mut state = self.lock();
        let is_due = 2 * state.shared > state.shares.len();
        let released = is_due.then(|| state.collect(&self.words));
        drop(state);
        drop(released);
    }

    /// Has the reaper drop what clients have released.
    pub(super) fn collect(&self, reactor: &Reactor) {
        let released = self.lock().collect(&self.words);
        drop_deferred(released, reactor);
    }
}

/// Has the reaper drop shares: an owner's drop is foreign code, and a run's calls the driver.
fn drop_deferred(shares: Vec<Share>, reactor: &Reactor) {
    if !shares.is_empty() {
        reactor.defer_drop(Box::new(shares));
    }
}

impl State {
    /// The run of these pieces, which is in use from now on.
    fn known(&mut self, handles: &[u64]) -> Option<Arc<HeldRun>> {
        let (known, idle) = self.runs.get_mut(handles)?;
        *idle = None;
        Some(known.clone())
    }

    fn pages(&self) -> impl Iterator<Item = &SharedPage> {
        self.clients.values().map(|client| &*client.page)
    }

    /// Whether a client has a claim on such a share.
    fn has_any(&self, client: u64, is_such: impl Fn(&Share) -> bool) -> bool {
        let client = self.clients.get(&client);
        client.is_some_and(|Claimant { page, .. }| {
            let mut shares = self.shares.iter();
            shares.any(|(&number, share)| is_such(share) && has_claim(page, number))
        })
    }

    /// Removes what clients have released, or had when they died, and returns it.
    fn collect(&mut self, words: &ShareWords) -> Vec<Share> {
        self.shared = 0;
        self.clients.retain(|_, client| !client.is_gone());
        // Before the shares, where the last release of each is seen.
        let has_left = |&id: &u64| self.clients[&id].is_leaving && !self.has_any(id, |_| true);
        let left: Vec<_> = self.clients.keys().copied().filter(has_left).collect();
        let (clients, is_closed) = (&self.clients, self.is_closed);
        let look = |number| words.look(clients.values().map(|client| &*client.page), number);
        let ended = self.shares.extract_if(|&number, share| {
            let claims = look(number);
            if claims.is_over || is_closed && !claims.is_held {
                share.is_over = true;
                words.end(number);
            }
            share.is_over && !look(number).is_held
        });
        let ended = ended.map(|(number, share)| {
            self.unused.push(share.slot(number));
            share
        });
        let ended = ended.collect();
        self.clients.retain(|id, _| !left.contains(id));
        ended
    }

    /// Removes and returns the runs in which no share has been for [`RUN_IDLE`].
    fn end_idle_runs(&mut self, now: Instant) -> Vec<Arc<HeldRun>> {
        let is_over = |_: &Vec<u64>, (run, idle): &mut (Arc<HeldRun>, Option<Instant>)| {
            if Arc::strong_count(run) > 1 {
                *idle = None;
                return false;
            }
            now.duration_since(*idle.get_or_insert(now)) >= RUN_IDLE
        };
        self.runs
            .extract_if(is_over)
            .map(|(_, (run, _))| run)
            .collect()
    }
}

impl Lender for Shares {
    type Request = ();
    type Refusal = ();

    fn lending(&self) -> &Lending {
        &self.lending
    }

    fn admit(&self, client: &ClientInfo, claimant: Claimant) {
        self.lock().clients.insert(client.id, claimant);
    }

    fn has_any(&self, client: u64) -> bool {
        self.lock().has_any(client, |_| true)
    }

    fn has_claim_in(&self, client: u64, run: u32) -> bool {
        let is_in = |share: &Share| share.run.as_ref().is_some_and(|it| it.number == run);
        self.lock().has_any(client, is_in)
    }

    fn leave(&self, client: u64, is_dead: bool) {
        if let Some(client) = self.lock().clients.get_mut(&client) {
            client.leave(is_dead);
        }
    }

    /// A share is claimed without a request.
    fn lend(&self, _: &ClientInfo, (): ()) -> Result<LendReply<()>, Rejection> {
        Ok(LendReply::Gone)
    }

    fn export(&self, number: u32, first: u32) -> Result<Vec<CloseOnForkFd>> {
        let state = self.lock();
        let held = state.runs.values().find(|(run, _)| run.number == number);
        let held = held.map(|(run, _)| run.clone());
        drop(state);
        held.map_or(Ok(vec![]), |held| held.run.export(first, PIECES_AT_ONCE))
    }

    fn take_back(&self, _: u64, _: (u32, u64)) {}

    fn collect(&self, server_core: &ServerCore) {
        Shares::collect(self, server_core.reactor());
    }

    fn on_tick(&self, server_core: &ServerCore) {
        let mut state = self.lock();
        let dropped = state.collect(&self.words);
        let ended = state.end_idle_runs(Instant::now());
        drop(state);
        drop_deferred(dropped, server_core.reactor());
        for run in ended {
            self.lending.end_run(run.number);
            server_core.reactor().defer_drop(Box::new(run));
        }
    }
}
