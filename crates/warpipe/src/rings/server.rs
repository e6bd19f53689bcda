//! The producer's memory and its server: it gives each consumer the slots and words of its own,
//! takes the consumer's words, and says to the kernels which consumers have ended.

use std::os::fd::AsFd;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Release;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::layout::WORDS_BYTES;
use super::{RingEnd, RingGrant, WordsOffer, allocate, gone_offset};
use crate::backend::Access;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::ipc::{
    ClientInfo, Disconnected, IpcServer, OutgoingReply, Rejection, RequestHandler, ServerCore,
    decode,
};
use crate::memory::region::Region;
use crate::runtime::closer::PeerFd;
use crate::shm::page::SharedPage;

/// The longest memory that a consumer may bring for its words.
const OFFER_BYTES_MAX: u64 = 64 << 20;

/// The producer's name and its memory, once its kernels are done.
pub(super) struct ProducerMemory {
    /// Dropped first: that tells the consumers.
    pub(super) _server: IpcServer,
    pub(super) ring_server: OwnedPlaces,
    pub(super) slots: Region,
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
}

#[derive(Default)]
struct RingState {
    places: Vec<Option<Place>>,
    /// The kernels have the addresses of all places: none changes any more.
    has_started: bool,
}

pub(super) struct RingServer {
    device: Device,
    page: Arc<SharedPage>,
    grant: RingGrant,
    slots: CloseOnForkFd,
    state: Mutex<RingState>,
    /// A consumer has come.
    changed: Condvar,
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
        timeout: Duration,
        name: &str,
        write: impl FnOnce(&[(u64, u64)]) -> Result<()>,
    ) -> Result<()> {
        let start = Instant::now();
        let mut state = self.lock();
        loop {
            if state.has_started {
                return Ok(());
            }
            let words: Option<Vec<(u64, u64)>> = state
                .places
                .iter()
                .map(|place| {
                    let place = place.as_ref()?;
                    Some((place.mine.ptr(), place.theirs.as_ref()?.ptr()))
                })
                .collect();
            if let Some(words) = words {
                // Under the lock: no consumer's end takes a place away meanwhile. Only the control
                // thread and callers of this wait for it, and the copy has a limit.
                write(&words)?;
                state.has_started = true;
                return Ok(());
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                let places = state.places.iter().flatten();
                let came = places.filter(|place| place.theirs.is_some()).count();
                let wanted = state.places.len();
                return Err(Error::Timeout {
                    what: format!("{wanted} consumers of {name:?} ({came} came)"),
                    waited: timeout,
                });
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// A consumer's end: before the start its place is free again, afterwards the kernels are told.
    fn on_end(&self, client: &ClientInfo, end: RingEnd) {
        let mut state = self.lock();
        let is_theirs = |place: &Option<Place>| {
            place
                .as_ref()
                .is_some_and(|place| place.client == client.id)
        };
        let Some(index) = state.places.iter().position(is_theirs) else {
            return;
        };
        if state.has_started {
            let gone: &AtomicU64 = self.page.at(gone_offset(index));
            return gone.store(end.status(), Release);
        }
        let freed = state.places[index].take();
        drop(state);
        drop(freed);
    }
}

impl RequestHandler for RingServer {
    fn on_connect(
        &self,
        _: &ServerCore,
        client: &ClientInfo,
        _: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        let mine = allocate(&self.device, WORDS_BYTES)?;
        let mut grant = self.grant.clone();
        grant.words_bytes = mine.bytes();
        let fds = vec![CloseOnForkFd::duplicate(&self.slots)?, mine.export()?];
        let reply = OutgoingReply::new(&grant, fds)?;
        let mut state = self.lock();
        if state.has_started {
            return Err(Rejection::new(
                "the ring has started, and takes no consumer any more",
            ));
        }
        let consumers = state.places.len();
        let Some(free) = state.places.iter_mut().find(|place| place.is_none()) else {
            return Err(Rejection::new(format!(
                "the ring has its {consumers} consumers"
            )));
        };
        *free = Some(Place {
            client: client.id,
            mine,
            theirs: None,
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
        let WordsOffer { bytes } = decode(body, server_core.name())?;
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
        let theirs = Region::import(
            &self.device,
            memory.as_fd(),
            bytes,
            Access::ReadWrite,
            owner,
        )?;
        memory.approve();
        let mut state = self.lock();
        let mut places = state.places.iter_mut().flatten();
        let place = places.find(|place| place.client == client.id);
        match place {
            Some(place) if place.theirs.is_none() => place.theirs = Some(theirs),
            _ => return Err(Rejection::new("it has brought its words")),
        }
        drop(state);
        self.changed.notify_all();
        Ok(OutgoingReply::default())
    }

    /// Before the start nothing of the ring has the consumer's memory.
    fn on_suspect(&self, _: &ServerCore, client: &ClientInfo) {
        if !self.has_started() {
            self.on_end(client, RingEnd::Died);
        }
    }

    fn on_orphaned(&self, _: &ServerCore, client: &ClientInfo) {
        self.on_end(client, RingEnd::Orphaned);
    }

    fn holds_anything(&self, client: &ClientInfo) -> bool {
        let state = self.lock();
        let mut places = state.places.iter().flatten();
        places.any(|place| place.client == client.id)
    }

    fn on_disconnect(&self, _: &ServerCore, client: &ClientInfo, disconnected: Disconnected) {
        self.on_end(
            client,
            match disconnected {
                Disconnected::Closed => RingEnd::Closed,
                Disconnected::ProcessDied => RingEnd::Died,
            },
        );
    }
}
