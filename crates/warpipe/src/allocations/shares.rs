//! The shares of a server, their owners, and the clients that have them. **This module is marked
//! for unsafe**: it enqueues stores of words by address.

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::claims::{Claims, Ended};
use super::{
    AllocationNotice, AllocationReply, AllocationRequest, CLAIMS_BYTES, Grant, HelloReply, Place,
    READY_BYTES, READY_MAX, word_at,
};
use crate::backend::{Access, DevicePtr, PointerKind, StreamOp, TimelineWord};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::ipc::ends::Ends;
use crate::ipc::{
    ClientInfo, Disconnected, OutgoingReply, Rejection, RequestHandler, ServerCore, decode,
};
use crate::memory::legacy::LegacyHandle;
use crate::memory::pieces::Run;
use crate::runtime::drop_after_fence::DropAfterFence;
use crate::runtime::fence::StreamSet;
use crate::runtime::reactor::Reactor;
use crate::shm::page::SharedPage;
use crate::stream::Stream;

/// How long a run is held that no share lies in: a sender of many small tensors of one allocation
/// exports it once.
const RUN_IDLE: Duration = Duration::from_secs(1);

/// The most pieces in one reply: each is exported for it, on the reactor's thread.
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
    place: SharedPlace,
    bytes: u64,
    ready: Option<(u32, u64)>,
    /// Keeps the memory allocated.
    _owner: Box<dyn Any + Send>,
}

enum SharedPlace {
    Run {
        run: Arc<HeldRun>,
        offset: u64,
        access: Access,
    },
    Legacy(LegacyHandle),
}

impl fmt::Debug for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Share")
            .field("number", &self.number)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
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
    /// Words that the sharing streams store when the contents are complete.
    ready: DropAfterFence<Arc<SharedPage>>,
    ready_fd: CloseOnForkFd,
    /// Never held during a driver call.
    state: Mutex<State>,
    /// The runs that clients may have mapped.
    runs: Ends,
}

impl fmt::Debug for Shares {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shares")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

#[derive(Default)]
struct State {
    last_share: u64,
    /// Shares since the clients' words were looked at.
    shared: usize,
    unclaimed: HashMap<u64, Share>,
    clients: HashMap<u64, Claims<Share>>,
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
        let (ready, ready_fd) = SharedPage::publish(Some(&device), READY_BYTES)?;
        Ok(Shares {
            device,
            ready: DropAfterFence::new(Arc::<StreamSet>::default(), Arc::new(ready))?,
            ready_fd,
            state: Mutex::default(),
            runs: Ends::default(),
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
        let place = unsafe { self.place(ptr, bytes, access) }?;
        let ready = self.announce(stream)?;
        let mut state = self.lock();
        state.last_share += 1;
        let number = state.last_share;
        let share = Share {
            number,
            place,
            bytes,
            ready,
            _owner: owner,
        };
        state.unclaimed.insert(number, share);
        // Each look costs as much as there are shares, so it comes after as many.
        state.shared += 1;
        let is_due = state.shared > state.clients.values().map(Claims::len).sum::<usize>();
        Ok((number, is_due))
    }

    /// Removes a share that no client has opened.
    pub(super) fn withdraw(&self, number: u64) -> Option<Share> {
        let mut state = self.lock();
        let share = state.unclaimed.remove(&number)?;
        state.unused_words.extend(share.ready);
        Some(share)
    }

    /// Whether a client has opened a share, and its contents are complete: it may give the share
    /// back before. `None` once it is over.
    pub(super) fn is_opened(&self, number: u64) -> Option<bool> {
        let state = self.lock();
        if state.unclaimed.contains_key(&number) {
            return Some(false);
        }
        let mut claimed = state.clients.values().flat_map(Claims::shares);
        let share = claimed.find(|share| share.number == number)?;
        let is_past = |(word, value)| self.word(word).reached(value);
        Some(share.ready.is_none_or(is_past))
    }

    pub(super) fn stats(&self) -> AllocationStats {
        let state = self.lock();
        let claimed = || state.clients.values().flat_map(Claims::shares);
        let all = state.unclaimed.values().chain(claimed());
        AllocationStats {
            unclaimed: state.unclaimed.len(),
            claimed: claimed().count(),
            bytes: all.map(|share| share.bytes).sum(),
            runs: state.runs.len(),
            clients: state.clients.len(),
        }
    }

    /// For a server that has closed: takes what no client has, or can open any more. Returns whether
    /// no client has a share.
    pub(super) fn has_ended(&self, reactor: &Reactor) -> bool {
        let mut state = self.lock();
        let clients = state.clients.values_mut();
        clients.for_each(|claims| claims.is_leaving = true);
        let mut dropped = state.collect();
        dropped.extend(state.unclaimed.drain().map(|(_, share)| share));
        let has_ended = state.clients.is_empty();
        drop(state);
        drop_deferred(dropped, reactor);
        has_ended
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// # Safety
    /// The memory stays allocated as long as the place is used.
    unsafe fn place(&self, ptr: DevicePtr, bytes: u64, access: Access) -> Result<SharedPlace> {
        match self.device.backend().locate(ptr)?.kind {
            PointerKind::Device if access == Access::Read => Err(Error::argument(
                "memory",
                "of cudaMalloc, which every process that opens it can write",
                "memory of cuMemMap",
            )),
            PointerKind::Device => {
                // SAFETY: the caller's promise.
                let handle = unsafe { LegacyHandle::export(&self.device, ptr, bytes) }?;
                Ok(SharedPlace::Legacy(handle))
            }
            _ => {
                let (run, offset) = Run::around(&self.device, ptr, bytes)?;
                let run = self.known(run)?;
                Ok(SharedPlace::Run {
                    run,
                    offset,
                    access,
                })
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
        let is_past = |&(word, value): &(u32, u64)| self.word(word).reached(value);
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
        let Some(address) = self.ready.device_ptr(word_at(word)) else {
            return Ok(None);
        };
        self.ready.streams().record_use(stream);
        // SAFETY: the page is dropped only when this stream, recorded above, is past its stores.
        let stored = unsafe {
            stream.batch(&[StreamOp::Signal {
                word: address,
                value,
            }])
        };
        if let Err(error) = stored {
            self.lock().unused_words.push((word, 0));
            return Err(error);
        }
        Ok(Some((word, value)))
    }

    fn word(&self, index: u32) -> &TimelineWord {
        self.ready.at(word_at(index))
    }

    /// Takes what clients have released.
    pub(super) fn collect(&self, reactor: &Reactor) {
        let dropped = self.lock().collect();
        drop_deferred(dropped, reactor);
    }

    fn open_share(&self, client: &ClientInfo, number: u64) -> Result<OutgoingReply, Rejection> {
        let mut state = self.lock();
        let Some(share) = state.unclaimed.remove(&number) else {
            return OutgoingReply::new(&AllocationReply::Gone, vec![]);
        };
        let (bytes, place, ready) = (share.bytes, share.place(), share.ready);
        let run = match &place {
            &Place::Run { run, .. } => Some(run),
            Place::Legacy(_) => None,
        };
        let ready = ready.filter(|&(word, value)| !self.word(word).reached(value));
        let Some(claims) = state.clients.get_mut(&client.id) else {
            state.unclaimed.insert(number, share);
            return Err(Rejection::new("it is there no more"));
        };
        let (word, value) = match claims.open(share) {
            Ok(claim) => claim,
            Err(share) => {
                state.unclaimed.insert(number, share);
                return OutgoingReply::new(&AllocationReply::TooMany, vec![]);
            }
        };
        run.into_iter()
            .for_each(|run| self.runs.give(client.id, run));
        let grant = Grant {
            word,
            value,
            bytes,
            place,
            ready,
        };
        OutgoingReply::new(&AllocationReply::Opened(grant), vec![])
    }

    fn send_pieces(&self, number: u32, first: u32) -> Result<OutgoingReply, Rejection> {
        let state = self.lock();
        let held = state.runs.values().find(|(run, _)| run.number == number);
        let run = held.map(|(run, _)| run.clone());
        drop(state);
        let run = run.filter(|run| first < run.run.len());
        let Some(run) = run else {
            return OutgoingReply::new(&AllocationReply::Gone, vec![]);
        };
        let fds = run.run.export(first, PIECES_AT_ONCE)?;
        OutgoingReply::new(&AllocationReply::Pieces, fds)
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

    /// Removes what clients have released, with clients that are done, and returns it. What they
    /// have returned can be opened again.
    fn collect(&mut self) -> Vec<Share> {
        self.shared = 0;
        let mut dropped = vec![];
        for claims in self.clients.values_mut() {
            let Ended { released, returned } = claims.collect();
            dropped.extend(released);
            self.unclaimed
                .extend(returned.into_iter().map(|share| (share.number, share)));
        }
        let done = self.clients.extract_if(|_, claims| claims.is_done());
        dropped.extend(done.flat_map(|(_, claims)| claims.into_shares()));
        self.unused_words
            .extend(dropped.iter().filter_map(|share| share.ready));
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

impl Share {
    fn place(&self) -> Place {
        match &self.place {
            SharedPlace::Run {
                run,
                offset,
                access,
            } => Place::Run {
                run: run.number,
                pieces: run.run.len(),
                piece: run.run.piece_bytes(),
                offset: *offset,
                access: *access,
            },
            SharedPlace::Legacy(handle) => Place::Legacy(handle.to_bytes()),
        }
    }
}

impl RequestHandler for Shares {
    fn on_connect(
        &self,
        server_core: &ServerCore,
        client: &ClientInfo,
        _: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        let owner = self.device.info().id;
        if let Some(device) = client.device.filter(|device| device.kind != owner.kind) {
            return Err(Rejection::new(format!(
                "its memory is on {owner}, which {device} cannot reach"
            )));
        }
        let process = server_core.process_of(client.id);
        let process = process.ok_or_else(|| Rejection::new("it is there no more"))?;
        let (page, fd) = SharedPage::create(None, CLAIMS_BYTES)?;
        let reply = HelloReply {
            owner,
            claims_bytes: page.bytes() as u64,
            ready_bytes: self.ready.bytes() as u64,
        };
        let ready_fd = CloseOnForkFd::duplicate(&self.ready_fd)?;
        let reply = OutgoingReply::new(&reply, vec![fd, ready_fd])?;
        self.lock()
            .clients
            .insert(client.id, Claims::new(page, process));
        Ok(reply)
    }

    fn on_request(
        &self,
        server_core: &ServerCore,
        client: &ClientInfo,
        body: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        match decode(body, server_core.name())? {
            AllocationRequest::Open(number) => self.open_share(client, number),
            AllocationRequest::Pieces { run, first } => self.send_pieces(run, first),
        }
    }

    fn holds_anything(&self, client: &ClientInfo) -> bool {
        self.lock()
            .clients
            .get(&client.id)
            .is_some_and(Claims::has_any)
    }

    fn on_disconnect(&self, server_core: &ServerCore, client: &ClientInfo, how: Disconnected) {
        self.runs.forget(client.id);
        let mut state = self.lock();
        let dead = match how {
            // Its words report each release.
            Disconnected::Closed => {
                let claims = state.clients.get_mut(&client.id);
                claims
                    .into_iter()
                    .for_each(|claims| claims.is_leaving = true);
                None
            }
            Disconnected::ProcessDied => state.clients.remove(&client.id),
        };
        let Some(mut dead) = dead else {
            return;
        };
        // Words that it stored before its death count.
        let Ended {
            mut released,
            returned,
        } = dead.collect();
        for share in returned {
            state.unclaimed.insert(share.number, share);
        }
        released.extend(dead.into_shares());
        let words = released.iter().filter_map(|share| share.ready);
        state.unused_words.extend(words);
        drop(state);
        drop_deferred(released, server_core.reactor());
    }

    /// The client has not learned of the share.
    fn take_back(&self, client: &ClientInfo, body: &[u8]) -> bool {
        let Ok(AllocationReply::Opened(Grant { word, .. })) = decode(body, "a server") else {
            // Descriptors of pieces are asked for again.
            return true;
        };
        let mut state = self.lock();
        let claims = state.clients.get_mut(&client.id);
        if let Some(share) = claims.and_then(|claims| claims.take_back(word)) {
            state.unclaimed.insert(share.number, share);
        }
        true
    }

    fn on_server_tick(&self, server_core: &ServerCore, _: u64) {
        let mut state = self.lock();
        let (dropped, ended) = (state.collect(), state.end_idle_runs(Instant::now()));
        drop(state);
        drop_deferred(dropped, server_core.reactor());
        ended.iter().for_each(|run| self.runs.end(run.number));
        self.runs.tell(|client, run| {
            let notice = OutgoingReply::new(&AllocationNotice::RunEnded(run), vec![]);
            notice.is_ok_and(|notice| server_core.tell(client, &notice))
        });
        for run in ended {
            server_core.reactor().defer_drop(Box::new(run));
        }
    }
}
