//! The producer's memory and its server: it gives each consumer the slots and words of its own,
//! takes the consumer's words, and says to the kernels which consumers have ended.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use super::layout::WORDS_BYTES;
use super::{RingEnd, RingGrant, Seat, WordsOffer, allocate, gone_offset, take_turns};
use crate::backend::Access;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::ipc::peer::{DeathEvidence, Process};
use crate::ipc::{
    ClientInfo, Disconnected, IpcServer, OutgoingReply, Rejection, RequestHandler, ServerCore,
    decode,
};
use crate::memory::region::Region;
use crate::runtime::closer::PeerFd;
use crate::shm::page::SharedPage;
use crate::wait::Wait;

/// The longest memory that a consumer may bring for its words.
const OFFER_BYTES_MAX: u64 = 64 << 20;

/// The producer's name and its memory, once its kernels are done.
pub(super) struct ProducerMemory {
    /// Dropped first: that tells the consumers. `None` once they have been told.
    pub(super) server: Mutex<Option<IpcServer>>,
    pub(super) ring_server: OwnedPlaces,
    pub(super) slots: Region,
}

impl ProducerMemory {
    /// Tells the consumers that the kernels of this side are done, and frees the name.
    pub(super) fn close(&self) {
        let server = self.lock().take();
        drop(server);
    }

    fn lock(&self) -> MutexGuard<'_, Option<IpcServer>> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    pub(super) fn server_core(&self) -> Arc<ServerCore> {
        self.lock().as_ref().unwrap().server_core().clone()
    }
}

/// The memory of all places, dropped here: the reactor may hold the server's handler for a moment
/// longer, and must not unmap memory.
pub(super) struct OwnedPlaces(pub(super) Arc<RingServer>);

impl Drop for OwnedPlaces {
    fn drop(&mut self) {
        let places = std::mem::take(&mut self.0.lock().places);
        drop(places);
    }
}

/// One consumer.
struct Place {
    client: u64,
    /// Where the producer spins. The consumer writes it.
    mine: Region,
    /// Where the consumer spins, once it has brought that.
    theirs: Option<Region>,
    /// As the consumer states it.
    seat: Option<Seat>,
    process: Weak<Process>,
}

/// A consumer of a started ring, as the reactor looks at it.
struct Watched {
    process: Weak<Process>,
    /// The tick before this one saw the proof.
    was_dead: AtomicBool,
}

#[derive(Default)]
struct RingState {
    places: Vec<Option<Place>>,
    /// The kernels have the addresses of all places: none changes any more.
    has_started: bool,
}

impl RingState {
    /// The words of all consumers, once these have come: the producer's, and the consumer's.
    fn words(&self) -> Option<Vec<(u64, u64)>> {
        let words = self.places.iter().map(|place| {
            let place = place.as_ref()?;
            Some((place.mine.ptr(), place.theirs.as_ref()?.ptr()))
        });
        words.collect()
    }
}

pub(super) struct RingServer {
    device: Device,
    page: Arc<SharedPage>,
    grant: RingGrant,
    slots: CloseOnForkFd,
    state: Mutex<RingState>,
    /// A consumer has come.
    changed: Condvar,
    /// The consumers, once the ring has started.
    watched: OnceLock<Vec<Watched>>,
}

impl RingServer {
    pub(super) fn new(
        device: &Device,
        page: Arc<SharedPage>,
        grant: RingGrant,
        slots: &Region,
        consumers: u32,
    ) -> Result<RingServer> {
        let state = RingState {
            places: (0..consumers).map(|_| None).collect(),
            has_started: false,
        };
        Ok(RingServer {
            device: device.clone(),
            page,
            grant,
            slots: slots.export()?,
            state: Mutex::new(state),
            changed: Condvar::new(),
            watched: OnceLock::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, RingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn has_started(&self) -> bool {
        self.lock().has_started
    }

    /// Waits for all consumers, and then starts the ring with the addresses of each one's words:
    /// the producer's, and the consumer's. Does nothing once that has been done.
    pub(super) fn start(
        &self,
        wait: &Wait<'_>,
        name: &str,
        write: impl FnOnce(&[(u64, u64)]) -> Result<()>,
    ) -> Result<()> {
        loop {
            let mut state = self.lock();
            if state.has_started {
                return Ok(());
            }
            if let Some(words) = state.words() {
                // Under the lock: no consumer's end takes a place away meanwhile. Only the control
                // thread and callers of this wait for it, and the copy has a limit.
                write(&words)?;
                state.has_started = true;
                let watched = state.places.iter().flatten().map(|place| Watched {
                    process: place.process.clone(),
                    was_dead: AtomicBool::new(false),
                });
                let _ = self.watched.set(watched.collect());
                return Ok(());
            }
            let places = state.places.iter().flatten();
            let came = places.filter(|place| place.theirs.is_some()).count();
            let wanted = state.places.len();
            drop(state);
            let slice = wait.slice();
            if slice.is_zero() {
                let what = format!("{wanted} consumers of {name:?} ({came} came)");
                return Err(Error::timeout(what, wait.limit()));
            }
            let lacks_words = |state: &mut RingState| state.words().is_none();
            drop((self.changed).wait_timeout_while(self.lock(), slice, lacks_words));
        }
    }

    /// Before the start, the consumer's place is free again. Afterwards the place stays its own:
    /// this is its number.
    fn leave(&self, server_core: &ServerCore, client: &ClientInfo) -> Option<usize> {
        let mut state = self.lock();
        let is_theirs = |place: &Option<Place>| {
            place
                .as_ref()
                .is_some_and(|place| place.client == client.id)
        };
        let index = state.places.iter().position(is_theirs)?;
        if state.has_started {
            return Some(index);
        }
        let freed = state.places[index].take();
        drop(state);
        // Not on this thread: the driver may wait for a kernel of another ring, and it is
        // this thread that tells that kernel of its peer's end.
        server_core.reactor().defer_drop(Box::new(freed));
        None
    }

    /// A consumer's end: before the start its place is free again, afterwards the kernels are told.
    fn on_end(&self, server_core: &ServerCore, client: &ClientInfo, end: RingEnd) {
        if let Some(index) = self.leave(server_core, client) {
            self.tell(index, end);
        }
    }

    /// Says to the kernels that a consumer has ended. An end stays as it is, but for an orphan's.
    fn tell(&self, index: usize, end: RingEnd) {
        let gone: &AtomicU64 = self.page.at(gone_offset(index));
        let orphaned = RingEnd::Orphaned as u64;
        let _ = gone.fetch_update(AcqRel, Acquire, |now| {
            (now == 0 || now == orphaned).then_some(end as u64)
        });
    }

    /// The place of a consumer that has not brought its words.
    fn awaited<'a>(
        state: &'a mut RingState,
        client: &ClientInfo,
    ) -> Result<&'a mut Place, Rejection> {
        let mut places = state.places.iter_mut().flatten();
        places
            .find(|place| place.client == client.id && place.theirs.is_none())
            .ok_or_else(|| Rejection::new("it has brought its words"))
    }

    /// Refuses a GPU on which a consumer would take turns with one of another process.
    fn check_turns(
        &self,
        server_core: &ServerCore,
        state: &RingState,
        client: &ClientInfo,
        seat: Seat,
    ) -> Result<(), Rejection> {
        let is_same = |other: ClientInfo| other.process_id == client.process_id;
        let takes_turns = |other: &Place| {
            other.seat.is_some_and(|other| take_turns(other, seat))
                && !server_core.client(other.client).is_some_and(is_same)
        };
        if self.grant.allows_time_slices || !state.places.iter().flatten().any(takes_turns) {
            return Ok(());
        }
        let (device, _) = seat;
        Err(Rejection::new(format!(
            "another consumer runs on {device}, where the two would take turns in time slices; \
             allowed are another GPU, MPS with both processes its clients, or a ring of \
             a producer that allows time slices"
        )))
    }

    /// The number of the place that a new consumer gets.
    fn free_place(state: &RingState) -> Result<usize, Rejection> {
        if state.has_started {
            return Err(Rejection::new(
                "the ring has started, and takes no consumer any more",
            ));
        }
        let free = state.places.iter().position(Option::is_none);
        free.ok_or_else(|| {
            let consumers = state.places.len();
            Rejection::new(format!("the ring has its {consumers} consumers"))
        })
    }
}

impl RequestHandler for RingServer {
    fn on_connect(
        &self,
        _: &ServerCore,
        client: &ClientInfo,
        _: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        // First: kernels of this ring may run, and the driver may wait for them.
        Self::free_place(&self.lock())?;
        let mine = allocate(&self.device, WORDS_BYTES)?;
        let mut grant = self.grant.clone();
        grant.words_bytes = mine.bytes();
        let fds = vec![CloseOnForkFd::duplicate(&self.slots)?, mine.export()?];
        let reply = OutgoingReply::new(&grant, fds)?;
        let mut state = self.lock();
        let free = Self::free_place(&state)?;
        state.places[free] = Some(Place {
            client: client.id,
            mine,
            theirs: None,
            seat: None,
            process: Weak::new(),
        });
        Ok(reply)
    }

    fn takes_memory(&self) -> bool {
        true
    }

    fn on_memory(
        &self,
        server_core: &ServerCore,
        client: &ClientInfo,
        body: &[u8],
        memory: PeerFd,
    ) -> Result<OutgoingReply, Rejection> {
        let WordsOffer { bytes, runs_beside } = decode(body, server_core.name())?;
        let unit = self.device.backend().granularity();
        if !(WORDS_BYTES..=OFFER_BYTES_MAX).contains(&bytes) || !bytes.is_multiple_of(unit) {
            return Err(Rejection::new(format!(
                "words of {bytes} bytes; allowed are {WORDS_BYTES} to {OFFER_BYTES_MAX}, in units \
                 of {unit}"
            )));
        }
        let owner = client
            .device
            .ok_or_else(|| Rejection::new("a consumer names its device"))?;
        let seat = (owner, runs_beside);
        let mut state = self.lock();
        Self::awaited(&mut state, client)?;
        self.check_turns(server_core, &state, client, seat)?;
        drop(state);
        let theirs = Region::import(
            &self.device,
            &[memory.as_fd()],
            bytes,
            Access::ReadWrite,
            owner,
        )?;
        memory.approve();
        let mut state = self.lock();
        let place = Self::awaited(&mut state, client)?;
        place.theirs = Some(theirs);
        place.seat = Some(seat);
        place.process = Arc::downgrade(&client.process);
        drop(state);
        self.changed.notify_all();
        Ok(OutgoingReply::default())
    }

    /// Before the start nothing of the ring has the consumer's memory. Afterwards its kernels may
    /// still run: only the proof is its end.
    fn on_suspect(&self, server_core: &ServerCore, client: &ClientInfo) -> bool {
        self.leave(server_core, client).is_some()
    }

    fn on_orphaned(&self, server_core: &ServerCore, client: &ClientInfo) {
        // Also called on the way to the proof. A producer of several consumers goes on behind that,
        // and must not see an orphan in between.
        if !client.process.shows(DeathEvidence::Proven) {
            self.on_end(server_core, client, RingEnd::Orphaned);
        }
    }

    fn on_disconnect(
        &self,
        server_core: &ServerCore,
        client: &ClientInfo,
        disconnected: Disconnected,
    ) {
        let end = match disconnected {
            Disconnected::Closed => RingEnd::Closed,
            Disconnected::ProcessDied => RingEnd::Died,
        };
        self.on_end(server_core, client, end);
    }

    /// Tells the kernels of a death that the control thread has not told of since the last tick: a
    /// driver may hold that thread up until the kernels end.
    fn on_server_tick(&self, _: &ServerCore, _: u64) {
        for (index, consumer) in self.watched.get().into_iter().flatten().enumerate() {
            let process = consumer.process.upgrade();
            let is_dead = process.is_some_and(|process| process.shows(DeathEvidence::Proven));
            if is_dead && consumer.was_dead.swap(true, Relaxed) {
                self.tell(index, RingEnd::Died);
            }
        }
    }
}
