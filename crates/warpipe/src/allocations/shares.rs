//! The shares of a server, their owners, and the clients that have them. **This module is marked
//! for unsafe**: it enqueues stores of words by address.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::CLAIMS_MAX;
use crate::backend::{Access, DevicePtr, PointerKind};
use crate::debug::opaque_debug;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::ipc::{ClientInfo, Rejection, ServerCore};
use crate::lend::claims::{Borrowers, Ended};
use crate::lend::server::{Lender, Lending};
use crate::lend::{LendReply, Offer, OfferPlace};
use crate::memory::legacy::LegacyHandle;
use crate::memory::pieces::Run;
use crate::mutex::LockUnpoisoned;
use crate::runtime::drop_after_fence::DropAfterFence;
use crate::runtime::reactor::Reactor;
use crate::shm::page::{SharedPage, words_bytes};
use crate::stream::Stream;

/// The most shares of a server that wait for their streams at once.
const READY_MAX: u32 = 16_384;

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
pub(super) struct Share {
    number: u64,
    offer: Offer,
    /// Where it lies, if not in memory of a legacy handle.
    _run: Option<Arc<HeldRun>>,
    /// Keeps the memory allocated.
    _owner: Box<dyn Any + Send>,
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
    /// Words that the sharing streams store when the contents are complete.
    ready: DropAfterFence<SharedPage>,
    lending: Lending,
    /// Never held during a driver call.
    state: Mutex<State>,
}

opaque_debug!(Shares { device });

struct State {
    last_share: u64,
    /// Shares since the clients' words were looked at.
    shared: usize,
    unclaimed: HashMap<u64, Share>,
    clients: Borrowers<Share>,
    last_run: u32,
    /// By the handles of its pieces. The instant is the first at which no share was seen in it.
    runs: HashMap<Vec<u64>, (Arc<HeldRun>, Option<Instant>)>,
    /// Ready words without a share, and the value that each reaches.
    unused_words: Vec<(u32, u64)>,
    next_word: u32,
    last_ready: u64,
}

impl Shares {
    pub(super) fn new(device: Device) -> Result<Shares> {
        let (ready, fd) = SharedPage::publish(Some(&device), words_bytes(READY_MAX as usize))?;
        Ok(Shares {
            lending: Lending::new(device.info().id, CLAIMS_MAX, (&ready, fd)),
            device,
            ready: DropAfterFence::new(Arc::default(), ready)?,
            state: Mutex::new(State {
                last_share: 0,
                shared: 0,
                unclaimed: HashMap::new(),
                clients: Borrowers::new(CLAIMS_MAX),
                last_run: 0,
                runs: HashMap::new(),
                unused_words: vec![],
                next_word: 0,
                last_ready: 0,
            }),
        })
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// Adds a share. Returns its number, and whether clients' words should be looked at.
    ///
    /// # Safety
    /// The memory stays allocated as long as `owner` lives.
    pub(super) unsafe fn share(
        &self,
        stream: &Stream,
        (ptr, bytes): (DevicePtr, u64),
        access: Access,
        owner: Box<dyn Any + Send>,
    ) -> Result<(u64, bool)> {
        // SAFETY: the caller's promise.
        let (place, run) = unsafe { self.place(ptr, bytes, access) }?;
        let ready = self.announce(stream)?;
        let mut state = self.lock();
        state.last_share += 1;
        let number = state.last_share;
        let share = Share {
            number,
            offer: Offer {
                bytes,
                place,
                ready,
            },
            _run: run,
            _owner: owner,
        };
        state.unclaimed.insert(number, share);
        // Each look costs as much as there are shares, so it comes after as many.
        state.shared += 1;
        let is_due = state.shared > state.clients.lent().count();
        Ok((number, is_due))
    }

    /// Removes a share that no client has opened.
    pub(super) fn withdraw(&self, number: u64) -> Option<Share> {
        let mut state = self.lock();
        let share = state.unclaimed.remove(&number)?;
        state.unused_words.extend(share.offer.ready);
        Some(share)
    }

    /// Whether a client has opened a share, and its contents are complete: it may give the share
    /// back before. `None` once it is over.
    pub(super) fn is_opened(&self, number: u64) -> Option<bool> {
        let state = self.lock();
        if state.unclaimed.contains_key(&number) {
            return Some(false);
        }
        let share = state.clients.lent().find(|share| share.number == number)?;
        Some(share.offer.ready.is_none_or(|ready| self.is_past(ready)))
    }

    pub(super) fn stats(&self) -> AllocationStats {
        let state = self.lock();
        let all = state.unclaimed.values().chain(state.clients.lent());
        AllocationStats {
            unclaimed: state.unclaimed.len(),
            claimed: state.clients.lent().count(),
            bytes: all.map(|share| share.offer.bytes).sum(),
            runs: state.runs.len(),
            clients: state.clients.len(),
        }
    }

    /// For a server that has closed: takes what no client has, or can open any more. Returns whether
    /// no client has a share.
    pub(super) fn has_ended(&self, reactor: &Reactor) -> bool {
        let mut state = self.lock();
        state.clients.leave_all();
        let mut dropped = state.collect();
        dropped.extend(state.unclaimed.drain().map(|(_, share)| share));
        let has_ended = state.clients.len() == 0;
        drop(state);
        drop_deferred(dropped, reactor);
        has_ended
    }

    /// Has a share's client open its handle, as a client in another process does.
    #[cfg(test)]
    pub(super) fn pose_as_of_another_process(&self, number: u64) {
        let mut state = self.lock();
        let share = state.unclaimed.get_mut(&number).unwrap();
        let OfferPlace::Legacy(bytes) = &mut share.offer.place else {
            panic!("memory of cudaMalloc");
        };
        let handle = LegacyHandle::from_bytes(bytes).unwrap();
        *bytes = handle.of_another_process().to_bytes();
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
        match self.device.backend().locate(ptr)?.kind {
            PointerKind::Device if access == Access::Read => Err(Error::argument(
                "memory",
                "of cudaMalloc, which every process that opens it can write",
                "memory of cuMemMap",
            )),
            PointerKind::Device => {
                // SAFETY: the caller's promise.
                let handle = unsafe { LegacyHandle::export(&self.device, ptr, bytes) }?;
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

    /// Has `stream` store a ready word behind its work so far. `None` if it has none.
    fn announce(&self, stream: &Stream) -> Result<Option<(u32, u64)>> {
        if stream.is_idle()? {
            return Ok(None);
        }
        let mut state = self.lock();
        let is_past = |&ready: &(u32, u64)| self.is_past(ready);
        let free = state.unused_words.iter().position(is_past);
        let word = match free {
            Some(at) => state.unused_words.swap_remove(at).0,
            None if state.next_word < READY_MAX => {
                state.next_word += 1;
                state.next_word - 1
            }
            None => {
                let allowed = format!("at most {READY_MAX} with streams at work");
                return Err(Error::argument("shares", u64::from(READY_MAX) + 1, allowed));
            }
        };
        // Values only grow, whatever the word.
        state.last_ready += 1;
        let value = state.last_ready;
        drop(state);
        let signal = self.ready.signal(word as usize, value);
        self.ready.streams().record_use(stream);
        // SAFETY: the page is dropped only when this stream, recorded above, is past its stores.
        let stored = unsafe { stream.batch(&[signal]) };
        if let Err(error) = stored {
            self.lock().unused_words.push((word, 0));
            return Err(error);
        }
        Ok(Some((word, value)))
    }

    fn is_past(&self, (word, value): (u32, u64)) -> bool {
        self.ready.word(word as usize).reached(value)
    }

    /// Takes what clients have released.
    pub(super) fn collect(&self, reactor: &Reactor) {
        let dropped = self.lock().collect();
        drop_deferred(dropped, reactor);
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

    /// Removes what clients have released, or had when they died, and returns it. What they have
    /// returned can be opened again.
    fn collect(&mut self) -> Vec<Share> {
        self.shared = 0;
        let Ended {
            released: mut dropped,
            returned,
            dead,
        } = self.clients.collect();
        let returned = returned.into_iter().map(|share| (share.number, share));
        self.unclaimed.extend(returned);
        dropped.extend(dead);
        self.unused_words
            .extend(dropped.iter().filter_map(|share| share.offer.ready));
        dropped
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
    type Lent = Share;
    type Request = u64;
    type Refusal = ();

    fn lending(&self) -> &Lending {
        &self.lending
    }

    fn with_borrowers<R>(&self, call: impl FnOnce(&mut Borrowers<Share>) -> R) -> R {
        call(&mut self.lock().clients)
    }

    fn lend(&self, client: &ClientInfo, number: u64) -> Result<LendReply<()>, Rejection> {
        let mut state = self.lock();
        let share = state.unclaimed.remove(&number).or_else(|| {
            let returned = |share: &Share| share.number == number;
            state.clients.take_returned(client.id, returned)
        });
        let Some(share) = share else {
            return Ok(LendReply::Gone);
        };
        let mut offer = share.offer.clone();
        offer.ready = offer.ready.filter(|&ready| !self.is_past(ready));
        let lent = (self.lending).lend(&mut state.clients, client, share, offer);
        Ok(lent.unwrap_or_else(|share| {
            state.unclaimed.insert(number, share);
            LendReply::TooMany
        }))
    }

    fn export(&self, number: u32, first: u32) -> Result<Vec<CloseOnForkFd>> {
        let state = self.lock();
        let held = state.runs.values().find(|(run, _)| run.number == number);
        let held = held.map(|(run, _)| run.clone());
        drop(state);
        held.map_or(Ok(vec![]), |held| held.run.export(first, PIECES_AT_ONCE))
    }

    fn take_back(&self, share: Share) {
        self.lock().unclaimed.insert(share.number, share);
    }

    fn collect(&self, server_core: &ServerCore) {
        Shares::collect(self, server_core.reactor());
    }

    fn on_tick(&self, server_core: &ServerCore) {
        let mut state = self.lock();
        let (dropped, ended) = (state.collect(), state.end_idle_runs(Instant::now()));
        drop(state);
        drop_deferred(dropped, server_core.reactor());
        for run in ended {
            self.lending.end_run(run.number);
            server_core.reactor().defer_drop(Box::new(run));
        }
    }
}
