//! The maker's side: the events of this process in one domain, kept under one name for all who open them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use serde::{Deserialize, Serialize};

use super::layout::{
    EVENTS_PER_PAGE, EventPage, EventWords, FROM_MAX, LANES_PER_EVENT, PAGE_BYTES, PAGES_MAX,
};
use super::{EventInner, LatestRecording as _, Recording};
use crate::backend::IPC_EVENTS_MAX;
use crate::clock::now_ns;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::OwnerProcess;
use crate::fork::per_process::PerProcess;
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::peer::{DeathEvidence, ORPHAN_TIMEOUT, Process};
use crate::ipc::{
    AccessPolicy, Address, ClientInfo, Disconnected, IpcServer, Kind, OutgoingReply, Rejection,
    RequestHandler, ServerCore, decode,
};
use crate::runtime::fence::{Fence, StreamSet};
use crate::runtime::reactor::{
    DropReadiness, EventSource, Next, Reactor, Registration, new_generation,
};
use crate::shm::counter::SharedCounter;
use crate::shm::page::UnsealedPage;
use crate::shm::signaler::Signaler;

/// What an importer asks.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum EventRequest {
    /// A page of this number, to share; answered with [`PageReply`] and its descriptor.
    Page(u32),
    /// It is mapped and sealed; answered with nothing once it is in use.
    Sealed(u32),
    /// To be counted among those who use an event; answered with whether it is there.
    Open { index: u32, serial: u64 },
    /// A lane to record on; answered with a [`LaneReply`].
    Lane { index: u32, serial: u64 },
    /// One opening less; its lane, if it had one, is nobody's.
    Close {
        index: u32,
        serial: u64,
        lane: Option<u8>,
    },
    /// A recording that others are to know of; answered with nothing when they do.
    Recorded {
        index: u32,
        serial: u64,
        lane: u8,
        count: u64,
        now_ns: u64,
    },
    /// A lane that was granted too late to be used; the opening stays.
    Return {
        index: u32,
        serial: u64,
        lane: u8,
        grant: u64,
    },
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct PageReply;

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum LaneReply {
    /// This one, which stands at `from`. No two grants of an event have the same number.
    Granted { lane: u8, from: u64, grant: u64 },
    /// All are somebody's, or were somebody's who died.
    Full,
    /// The event is no more.
    Dropped,
}

/// Events of one process, domain and device, and their keeper.
pub(super) struct EventExporter {
    owner_process: OwnerProcess,
    server: Option<IpcServer>,
    event_table: Arc<EventTable>,
    reactor: Arc<Reactor>,
    pub(super) domain: Domain,
    pub(super) device: Device,
    pub(super) name: EndpointName,
    pub(super) generation: [u8; 16],
}

/// What the keeper's thread looks at, too, and the reactor: no call of the driver is made under its lock.
struct EventTable {
    state: Mutex<ExporterState>,
    streams: Arc<StreamSet>,
    device: Device,
    reactor: Arc<Reactor>,
    weak_self: Weak<EventTable>,
}

#[derive(Default)]
struct ExporterState {
    /// Our own.
    pages: Vec<EventPage>,
    /// Pages that visitors have not sealed, and those that are shared with them; by visitor and number.
    drafts: HashMap<(u64, u32), UnsealedPage>,
    shared: HashMap<(u64, u32), EventPage>,
    slots: Vec<EventSlot>,
    free: Vec<u32>,
    /// Those visitors that have a lane.
    recorders: HashMap<u64, RecorderWatch>,
    /// Who signals to importers that came late.
    lagging: Vec<Arc<Signaler>>,
}

/// Who signals an event, and an importer's lane that it is to signal, too.
struct NewListener {
    raiser: Arc<Signaler>,
    lane: SharedCounter,
}

/// A visitor that records, and whose death is seen by the reactor, too: the control thread may be held up by the driver, behind
/// the very streams that wait for what will never be recorded.
struct RecorderWatch {
    _watch: Registration,
    _process: Arc<Process>,
    _death_handler: Arc<RecorderDeathHandler>,
}

/// Ends the lanes of one visitor.
struct RecorderDeathHandler {
    event_table: Weak<EventTable>,
    client: u64,
    is_over: AtomicBool,
}

impl RecorderDeathHandler {
    fn end_lanes(&self) {
        if let Some(event_table) = self.event_table.upgrade() {
            event_table.lock().end_lanes_of(self.client);
        }
    }
}

impl EventSource for RecorderDeathHandler {
    /// On the reactor's thread: CPU stores alone.
    fn on_ready(&self, _: u64) -> Next {
        self.is_over.store(true, Ordering::SeqCst);
        self.end_lanes();
        Next::Stop
    }

    /// Device work that a forked child keeps running may signal an ended lane once more, and set its word back.
    fn on_tick(&self, _: u64) {
        if self.is_over.load(Ordering::SeqCst) {
            self.end_lanes();
        }
    }
}

impl RecorderWatch {
    fn of(
        server_core: &ServerCore,
        event_table: &Weak<EventTable>,
        client: u64,
    ) -> Result<RecorderWatch, Rejection> {
        let process = server_core
            .process_of(client)
            .ok_or_else(|| Rejection("it is there no more".into()))?;
        let death_handler = Arc::new(RecorderDeathHandler {
            event_table: event_table.clone(),
            client,
            is_over: AtomicBool::new(false),
        });
        let watched: Weak<dyn EventSource> =
            Arc::downgrade(&death_handler) as Weak<dyn EventSource>;
        let watch = process.watch(DeathEvidence::Orphaned(ORPHAN_TIMEOUT), &watched, 0)?;
        server_core.reactor().register_ticks(watched);
        Ok(RecorderWatch {
            _watch: watch,
            _process: process,
            _death_handler: death_handler,
        })
    }
}

struct EventSlot {
    event_words: EventWords,
    serial: u64,
    phase: SlotPhase,
    /// Of lane 0. It outlives the event: what its streams have yet to signal belongs to its count.
    raiser: Arc<Signaler>,
    /// How often each visitor has it open.
    importers: HashMap<u64, u32>,
    /// Whose each lane is.
    lanes: [Option<u64>; LANES_PER_EVENT],
    /// The numbers of the last grants of each lane, and of all.
    grants: [u64; LANES_PER_EVENT],
    granted: u64,
    /// Whether anybody has ever opened it.
    is_shared: bool,
    /// What importers record is being passed on.
    is_forwarding: bool,
}

enum SlotPhase {
    Free,
    Live(Weak<EventInner>),
    /// Dropped; who waits for it may still do so.
    Disconnected,
    /// All lanes have ended; free as soon as no importer has it open.
    Ended,
}

static EXPORTERS: PerProcess<Mutex<Vec<Weak<EventExporter>>>> = PerProcess::new();

fn exporters() -> Vec<Arc<EventExporter>> {
    let mut all = EXPORTERS.lock();
    all.retain(|exporter| exporter.strong_count() > 0);
    all.iter().filter_map(Weak::upgrade).collect()
}

impl EventExporter {
    /// The exporter of this process for a domain and a device; made if there is none.
    pub(super) fn of(domain: &Domain, device: &Device) -> Result<Arc<EventExporter>> {
        let matches = |exporter: &Arc<EventExporter>| {
            exporter.domain.path() == domain.path()
                && Arc::ptr_eq(exporter.device.backend(), device.backend())
        };
        if let Some(exporter) = exporters().into_iter().find(matches) {
            return Ok(exporter);
        }
        let exporter = Arc::new(EventExporter::open(domain, device)?);
        EXPORTERS.lock().push(Arc::downgrade(&exporter));
        Ok(exporter)
    }

    /// The exporter of this process that a handle names.
    pub(super) fn named(endpoint: &str, generation: [u8; 16]) -> Option<Arc<EventExporter>> {
        exporters().into_iter().find(|exporter| {
            exporter.generation == generation && exporter.name.as_str() == endpoint
        })
    }

    fn open(domain: &Domain, device: &Device) -> Result<EventExporter> {
        let tag: String = new_generation()[..8]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let name = EndpointName::new(&format!("events/{tag}"))?;
        let reactor = Reactor::of_process()?;
        let event_table = Arc::new_cyclic(|weak_self: &Weak<EventTable>| EventTable {
            state: Mutex::default(),
            streams: Arc::default(),
            device: device.clone(),
            reactor: reactor.clone(),
            weak_self: weak_self.clone(),
        });
        let at = Address {
            domain,
            name: &name,
            kind: Kind::Events,
        };
        let server = IpcServer::open(&at, AccessPolicy::default(), event_table.clone())?;
        Ok(EventExporter {
            owner_process: OwnerProcess::current(),
            generation: server.server_core().generation(),
            server: Some(server),
            event_table,
            reactor,
            domain: domain.clone(),
            device: device.clone(),
            name,
        })
    }

    pub(super) fn streams(&self) -> &Arc<StreamSet> {
        &self.event_table.streams
    }

    /// A place for an event, its number and how many have lain there.
    pub(super) fn take(&self) -> Result<NewEvent> {
        let mut state = self.event_table.lock();
        while state.free.is_empty() && state.is_full() {
            if state.pages.len() == PAGES_MAX {
                return Err(Error::EventLimit {
                    limit: IPC_EVENTS_MAX,
                });
            }
            drop(state);
            let page = EventPage::create(&self.device)?;
            state = self.event_table.lock();
            if state.is_full() {
                state.pages.push(page);
            } else {
                // Somebody else was quicker. Not dropped here: that calls the driver.
                self.reactor.defer_drop(Box::new(page));
            }
        }
        let index = match state.free.pop() {
            Some(index) => index,
            None => state.grow(),
        };
        let slot = &mut state.slots[index as usize];
        slot.phase = SlotPhase::Live(Weak::new());
        slot.event_words.forget_latest(slot.serial);
        Ok(NewEvent {
            index,
            serial: slot.serial,
            event_words: slot.event_words.clone(),
            raiser: slot.raiser.clone(),
        })
    }

    /// Says what the maker has recorded.
    pub(super) fn recorded(&self, index: u32, recording: Recording, now_ns: u64) {
        self.event_table
            .lock()
            .publish(index, recording, now_ns, None);
    }

    /// How often others have an event open.
    #[cfg(test)]
    pub(super) fn openings(&self, index: u32) -> u32 {
        self.event_table.lock().slots[index as usize]
            .importers
            .values()
            .sum()
    }

    /// The last recording of an event by anybody.
    pub(super) fn latest(&self, index: u32) -> Option<(u64, Recording)> {
        let state = self.event_table.lock();
        let slot = &state.slots[index as usize];
        let importers = slot
            .importers
            .keys()
            .filter_map(|&importer| state.recorded_by(slot, index, importer));
        importers.fold(slot.event_words.latest(), |latest, importer| {
            latest.max_by_time(Some(importer))
        })
    }

    /// The lane of an importer that records, or what is left of it.
    pub(super) fn lane(&self, index: u32, lane: usize) -> SharedCounter {
        let state = self.event_table.lock();
        let slot = &state.slots[index as usize];
        slot.lanes[lane]
            .and_then(|importer| state.event_words_of(index, importer))
            .map_or_else(
                || slot.event_words.lane(lane),
                |event_words| event_words.lane(lane),
            )
    }

    /// Whom a handle of this event leads to within this process.
    pub(super) fn set_live(&self, index: u32, inner: &Arc<EventInner>) {
        self.event_table.lock().slots[index as usize].phase =
            SlotPhase::Live(Arc::downgrade(inner));
    }

    /// The event itself, for who opens it in its maker's process.
    pub(super) fn find(&self, index: u32, serial: u64) -> Option<Arc<EventInner>> {
        match self.event_table.lock().slots.get(index as usize) {
            Some(EventSlot {
                phase: SlotPhase::Live(inner),
                serial: found,
                ..
            }) if *found == serial => inner.upgrade(),
            _ => None,
        }
    }

    /// The event's last handle here is gone.
    pub(super) fn release(self: &Arc<Self>, index: u32) {
        let mut state = self.event_table.lock();
        if !state.slots[index as usize].is_shared {
            // Nobody else ever saw it, and counts go on: what is still to be signalled harms nobody.
            return state.free_slot(index);
        }
        state.slots[index as usize].phase = SlotPhase::Disconnected;
        drop(state);
        let (exporter, mut fence) = (self.clone(), None);
        self.reactor.drop_after(move || {
            let is_over = is_fence_passed(&mut fence, exporter.streams());
            if is_over {
                exporter.event_table.lock().end(index);
            }
            is_over
        });
    }
}

/// Where a new event lies.
pub(super) struct NewEvent {
    pub(super) index: u32,
    pub(super) serial: u64,
    pub(super) event_words: EventWords,
    pub(super) raiser: Arc<Signaler>,
}

impl Drop for EventExporter {
    fn drop(&mut self) {
        if !self.owner_process.is_current() {
            return std::mem::forget((self.server.take(), self.event_table.clone()));
        }
        drop(self.server.take());
        let mut state = std::mem::take(&mut *self.event_table.lock());
        let (streams, mut fence) = (self.event_table.streams.clone(), None);
        self.reactor.drop_after(move || {
            if !is_fence_passed(&mut fence, &streams) {
                return DropReadiness::Busy;
            }
            (0..state.slots.len())
                .filter(|&index| state.slots[index].is_shared)
                .for_each(|index| state.end_all(index));
            state.slots.clear();
            let mut all = state.pages.iter().chain(state.shared.values());
            if all.all(EventPage::is_last) {
                DropReadiness::Ready
            } else {
                DropReadiness::Held
            }
        });
    }
}

pub(super) fn is_fence_passed(fence: &mut Option<Fence>, streams: &StreamSet) -> bool {
    fence.get_or_insert_with(|| streams.fence()).is_reached()
}

impl EventSlot {
    fn is_live_with(&self, serial: u64) -> bool {
        self.serial == serial && matches!(self.phase, SlotPhase::Live(_))
    }
}

impl ExporterState {
    fn is_full(&self) -> bool {
        self.slots.len() == EVENTS_PER_PAGE * self.pages.len()
    }

    /// One more slot, in a page that has room.
    fn grow(&mut self) -> u32 {
        let index = self.slots.len();
        let (event_page, index) = (&self.pages[index / EVENTS_PER_PAGE], index as u32);
        self.slots.push(EventSlot {
            event_words: event_page.event_words(index),
            serial: 1,
            phase: SlotPhase::Free,
            raiser: Arc::new(event_page.raiser(index, 0, 0)),
            importers: HashMap::new(),
            lanes: [None; LANES_PER_EVENT],
            grants: [0; LANES_PER_EVENT],
            granted: 0,
            is_shared: false,
            is_forwarding: false,
        });
        index
    }

    /// An event's place in the page that an importer shares with us.
    fn event_words_of(&self, index: u32, importer: u64) -> Option<EventWords> {
        self.shared
            .get(&(importer, index / EVENTS_PER_PAGE as u32))
            .map(|event_page| event_page.event_words(index))
    }

    /// The places of all who have an event open.
    fn all_event_words(&self, index: u32) -> impl Iterator<Item = (u64, EventWords)> + '_ {
        let importers = self.slots[index as usize].importers.keys();
        importers
            .filter_map(move |&importer| Some((importer, self.event_words_of(index, importer)?)))
    }

    /// What an importer says that it has recorded, if it may.
    fn recorded_by(&self, slot: &EventSlot, index: u32, importer: u64) -> Option<(u64, Recording)> {
        // No time of a peer's is ahead of ours.
        let recorded = self
            .event_words_of(index, importer)?
            .importer_latest()
            .map(|(at_ns, last)| (at_ns.min(now_ns()), last));
        recorded.filter(|(_, recording)| slot.lanes[recording.lane] == Some(importer))
    }

    /// Writes down a recording for ourselves and all importers but the one that made it.
    fn publish(&self, index: u32, recording: Recording, now_ns: u64, but: Option<u64>) {
        self.slots[index as usize]
            .event_words
            .set_latest(now_ns, recording);
        let others = self
            .all_event_words(index)
            .filter(|(importer, _)| Some(*importer) != but);
        others.for_each(|(_, event_words)| event_words.set_latest(now_ns, recording));
    }

    /// Passes on how far importers' recordings have come; true once nothing is due.
    fn forward(&self, index: u32) -> bool {
        let slot = &self.slots[index as usize];
        let mut is_done = true;
        for (number, holder) in slot.lanes.iter().enumerate() {
            let Some((holder, event_words)) =
                holder.and_then(|importer| Some((importer, self.event_words_of(index, importer)?)))
            else {
                continue;
            };
            let (lane, mirror) = (event_words.lane(number), slot.event_words.lane(number));
            let value = lane.value();
            if lane.has_ended() || value > FROM_MAX {
                continue;
            }
            let others = self
                .all_event_words(index)
                .filter(|(importer, _)| *importer != holder)
                .map(|(_, event_words)| event_words.lane(number));
            for copy in others.chain([mirror]) {
                copy.copy_pid(&lane);
                copy.bring_up(value);
            }
            let recorded = self.recorded_by(slot, index, holder);
            is_done &= recorded.is_none_or(|(_, last)| last.lane != number || last.count <= value);
        }
        is_done
    }

    /// Ends a lane at what we have of it, for all.
    fn end_lane(&self, index: u32, number: usize) {
        let slot = &self.slots[index as usize];
        let holder = slot.lanes[number].and_then(|importer| self.event_words_of(index, importer));
        let (mirror, holders) = (
            slot.event_words.lane(number),
            holder.map(|event_words| event_words.lane(number)),
        );
        let value = holders
            .as_ref()
            .map_or(0, SharedCounter::value)
            .max(mirror.value());
        for lane in self
            .all_event_words(index)
            .map(|(_, event_words)| event_words.lane(number))
            .chain([mirror])
        {
            holders.iter().for_each(|holder| lane.copy_pid(holder));
            lane.end_at(value);
        }
    }

    /// A visitor is proven dead: what it had yet to record never comes.
    fn end_lanes_of(&self, client: u64) {
        for index in 0..self.slots.len() {
            let lanes = self.slots[index].lanes;
            (0..LANES_PER_EVENT)
                .filter(|&lane| lanes[lane] == Some(client))
                .for_each(|lane| self.end_lane(index as u32, lane));
        }
    }

    fn end_all(&self, index: usize) {
        self.slots[index].raiser.end();
        (1..LANES_PER_EVENT).for_each(|lane| self.end_lane(index as u32, lane));
    }

    /// A dropped event whose own work is done: whoever still waits for it is let go.
    fn end(&mut self, index: u32) {
        self.end_all(index as usize);
        self.slots[index as usize].phase = SlotPhase::Ended;
        self.clear(index);
    }

    /// Makes an ended event's slot as new, once no importer's stream can wait there.
    fn clear(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        if !matches!(slot.phase, SlotPhase::Ended) || !slot.importers.is_empty() {
            return;
        }
        slot.event_words.lanes().for_each(|lane| lane.reset());
        slot.lanes = [None; LANES_PER_EVENT];
        slot.is_shared = false;
        slot.raiser = Arc::new(self.pages[index as usize / EVENTS_PER_PAGE].raiser(index, 0, 0));
        self.free_slot(index);
    }

    fn free_slot(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.serial += 1;
        slot.phase = SlotPhase::Free;
        self.free.push(index);
    }

    /// Counts an opening. An importer's first one tells it all that is known of the event, and from then on what comes.
    ///
    /// The lane that is to be signalled for it is returned then.
    fn open(&mut self, client: u64, index: u32, serial: u64) -> Option<Option<NewListener>> {
        let event_words = self.event_words_of(index, client)?;
        let slot = self
            .slots
            .get_mut(index as usize)
            .filter(|slot| slot.is_live_with(serial))?;
        slot.is_shared = true;
        let count = slot.importers.entry(client).or_default();
        *count += 1;
        if *count > 1 {
            return Some(None);
        }
        // An earlier event may have lain here. Nobody waits there: who had it open has closed it behind its streams, and
        // our own are past it.
        if !event_words.is_of(serial) {
            event_words.lanes().for_each(|lane| lane.reset());
            event_words.forget_latest(serial);
        }
        let (raiser, own) = (slot.raiser.clone(), slot.event_words.clone());
        let many = slot.importers.len() > 1;
        self.all_event_words(index)
            .for_each(|(_, event_words)| event_words.set_other_importers(many));
        // After that: whoever has not seen it has recorded before, which is passed on here.
        let known: Vec<_> = {
            let slot = &self.slots[index as usize];
            slot.importers
                .keys()
                .filter_map(|&importer| self.recorded_by(slot, index, importer))
                .collect()
        };
        let latest = known.into_iter().fold(own.latest(), |latest, importer| {
            latest.max_by_time(Some(importer))
        });
        latest
            .into_iter()
            .for_each(|(now_ns, recording)| event_words.set_latest(now_ns, recording));
        for number in 1..LANES_PER_EVENT {
            let (mirror, lane) = (own.lane(number), event_words.lane(number));
            if mirror.has_ended() {
                lane.end_at(mirror.value())
            } else {
                lane.bring_up(mirror.value())
            }
        }
        Some(Some(NewListener {
            raiser,
            lane: event_words.lane(0),
        }))
    }

    fn lane(
        &mut self,
        event_table: &Weak<EventTable>,
        server_core: &ServerCore,
        client: u64,
        index: u32,
        serial: u64,
    ) -> Result<LaneReply, Rejection> {
        let known =
            |slot: &&EventSlot| slot.is_live_with(serial) && slot.importers.contains_key(&client);
        let Some((slot, event_words)) = self
            .slots
            .get(index as usize)
            .filter(known)
            .zip(self.event_words_of(index, client))
        else {
            return Ok(LaneReply::Dropped);
        };
        let is_sound = |lane: SharedCounter| !lane.has_ended() && lane.value() <= FROM_MAX;
        let is_free =
            |lane: &usize| slot.lanes[*lane].is_none() && is_sound(slot.event_words.lane(*lane));
        let Some(number) = (1..LANES_PER_EVENT).find(is_free) else {
            return Ok(LaneReply::Full);
        };
        let from = slot.event_words.lane(number).value();
        event_words.lane(number).bring_up(from);
        if let Entry::Vacant(vacant) = self.recorders.entry(client) {
            vacant.insert(RecorderWatch::of(server_core, event_table, client)?);
        }
        let slot = &mut self.slots[index as usize];
        slot.granted += 1;
        slot.lanes[number] = Some(client);
        slot.grants[number] = slot.granted;
        Ok(LaneReply::Granted {
            lane: number as u8,
            from,
            grant: slot.granted,
        })
    }

    /// An importer has not used a lane. One that has been granted anew since then stays.
    fn return_lane(&mut self, client: u64, (index, serial): (u32, u64), lane: usize, grant: u64) {
        let slot = self
            .slots
            .get(index as usize)
            .filter(|slot| slot.serial == serial);
        if slot.is_some_and(|slot| {
            slot.lanes.get(lane) == Some(&Some(client)) && slot.grants[lane] == grant
        }) {
            self.take_over_lane(client, index, lane);
        }
    }

    /// What is left of an importer's lane is ours: all that it has reached, and its last recording.
    fn take_over_lane(&mut self, client: u64, index: u32, number: usize) {
        let slot = &self.slots[index as usize];
        let recorded = self.recorded_by(slot, index, client);
        self.forward(index);
        if let Some((now_ns, recording)) =
            recorded.filter(|(_, recording)| recording.lane == number)
        {
            self.publish(index, recording, now_ns, None);
        }
        // Who leaves has come to all that it recorded, or lied: nobody waits for that for ever.
        let reached = self.slots[index as usize].event_words.lane(number).value();
        let is_short =
            recorded.is_some_and(|(_, last)| last.lane == number && last.count > reached);
        if is_short
            || self
                .event_words_of(index, client)
                .is_some_and(|event_words| event_words.lane(number).value() > FROM_MAX)
        {
            self.end_lane(index, number);
        }
        self.slots[index as usize].lanes[number] = None;
    }

    /// One opening less. Returns who signals an event that the importer has open no more.
    fn close(
        &mut self,
        client: u64,
        index: u32,
        serial: u64,
        lane: Option<u8>,
    ) -> Option<Arc<Signaler>> {
        let slot = self
            .slots
            .get_mut(index as usize)
            .filter(|slot| slot.serial == serial)?;
        let count = slot.importers.get_mut(&client)?;
        *count -= 1;
        let is_last = *count == 0;
        if let Some(number) = lane
            .map(usize::from)
            .filter(|&lane| slot.lanes.get(lane) == Some(&Some(client)))
        {
            self.take_over_lane(client, index, number);
        }
        let raiser = is_last.then(|| self.remove_importer(client, index));
        self.clear(index);
        raiser
    }

    /// An importer has an event open no more.
    fn remove_importer(&mut self, client: u64, index: u32) -> Arc<Signaler> {
        let lanes = self.slots[index as usize].lanes;
        (0..LANES_PER_EVENT)
            .filter(|&lane| lanes[lane] == Some(client))
            .for_each(|lane| self.take_over_lane(client, index, lane));
        let slot = &mut self.slots[index as usize];
        slot.importers.remove(&client);
        let (raiser, many) = (slot.raiser.clone(), slot.importers.len() > 1);
        self.all_event_words(index)
            .for_each(|(_, event_words)| event_words.set_other_importers(many));
        raiser
    }

    /// A visitor is there no more. What a dead one's device had yet to record never comes. Returns who signals to it, and
    /// what was shared with it.
    fn gone(
        &mut self,
        client: u64,
        disconnected: Disconnected,
    ) -> (Vec<Arc<Signaler>>, Vec<EventPage>) {
        if disconnected == Disconnected::ProcessDied {
            self.end_lanes_of(client);
        }
        self.recorders.remove(&client);
        let mut raisers = Vec::new();
        for index in 0..self.slots.len() as u32 {
            if self.slots[index as usize].importers.contains_key(&client) {
                raisers.push(self.remove_importer(client, index));
                self.clear(index);
            }
        }
        self.drafts.retain(|(importer, _), _| *importer != client);
        (
            raisers,
            self.shared
                .extract_if(|(importer, _), _| *importer == client)
                .map(|(_, event_page)| event_page)
                .collect(),
        )
    }

    /// Brings importers up that came late; true once all have everything that was recorded before.
    fn catch_up(&mut self) -> bool {
        self.lagging.retain(|raiser| !raiser.catch_up());
        self.lagging.is_empty()
    }
}

impl EventTable {
    fn lock(&self) -> MutexGuard<'_, ExporterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a page to share with a visitor.
    fn offer(&self, client: &ClientInfo, number: u32) -> Result<OutgoingReply, Rejection> {
        let mut state = self.lock();
        if number as usize >= state.pages.len() || state.shared.contains_key(&(client.id, number)) {
            return Err(Rejection("there is no such page to share".into()));
        }
        let draft = UnsealedPage::create(PAGE_BYTES)?;
        let answer = OutgoingReply::new(&PageReply, vec![draft.descriptor()?])?;
        state.drafts.insert((client.id, number), draft);
        Ok(answer)
    }

    fn confirm(
        &self,
        server_core: &ServerCore,
        client: &ClientInfo,
        number: u32,
    ) -> Result<OutgoingReply, Rejection> {
        let draft = self.lock().drafts.remove(&(client.id, number));
        let draft = draft.ok_or_else(|| Rejection("it was offered no such page".into()))?;
        let event_page = EventPage::confirm(&self.device, draft, server_core.name())?;
        self.lock().shared.insert((client.id, number), event_page);
        Ok(OutgoingReply::default())
    }

    fn open(
        &self,
        client: &ClientInfo,
        index: u32,
        serial: u64,
    ) -> Result<OutgoingReply, Rejection> {
        let mut state = self.lock();
        let opened = state.open(client.id, index, serial);
        if let Some(Some(NewListener { raiser, lane })) = &opened
            && !raiser.add(client.id, lane)
        {
            state.lagging.push(raiser.clone());
            let event_table = self.weak_self.clone();
            self.reactor.drop_after(move || {
                event_table
                    .upgrade()
                    .is_none_or(|event_table| event_table.lock().catch_up())
            });
        }
        self.forward(&mut state, index);
        OutgoingReply::new(&opened.is_some(), vec![])
    }

    fn recorded(
        &self,
        client: &ClientInfo,
        (index, serial): (u32, u64),
        recording: Recording,
        at_ns: u64,
    ) {
        let mut state = self.lock();
        let holds = |slot: &&EventSlot| {
            slot.serial == serial && slot.lanes.get(recording.lane) == Some(&Some(client.id))
        };
        if state.slots.get(index as usize).filter(holds).is_some() {
            state.publish(index, recording, at_ns.min(now_ns()), Some(client.id));
            self.forward(&mut state, index);
        }
    }

    /// Passes on what importers have recorded, and goes on with it until nothing is due.
    fn forward(&self, state: &mut ExporterState, index: u32) {
        if state
            .slots
            .get(index as usize)
            .is_none_or(|slot| slot.is_forwarding)
            || state.forward(index)
        {
            return;
        }
        state.slots[index as usize].is_forwarding = true;
        let event_table = self.weak_self.clone();
        self.reactor.drop_after(move || {
            let Some(event_table) = event_table.upgrade() else {
                return true;
            };
            let mut state = event_table.lock();
            let is_over = state.slots.get(index as usize).is_none() || state.forward(index);
            if let Some(slot) = state.slots.get_mut(index as usize).filter(|_| is_over) {
                slot.is_forwarding = false;
            }
            is_over
        });
    }

    fn stop_signaling(
        &self,
        client: &ClientInfo,
        raisers: impl IntoIterator<Item = Arc<Signaler>>,
    ) {
        raisers
            .into_iter()
            .for_each(|raiser| drop(raiser.remove(client.id)));
    }
}

impl RequestHandler for EventTable {
    fn on_connect(
        &self,
        _: &ServerCore,
        _: &ClientInfo,
        _: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        Ok(OutgoingReply::default())
    }

    fn on_request(
        &self,
        server_core: &ServerCore,
        client: &ClientInfo,
        body: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        match decode::<EventRequest>(body, server_core.name())? {
            EventRequest::Page(number) => self.offer(client, number),
            EventRequest::Sealed(number) => self.confirm(server_core, client, number),
            EventRequest::Open { index, serial } => self.open(client, index, serial),
            EventRequest::Lane { index, serial } => OutgoingReply::new(
                &self
                    .lock()
                    .lane(&self.weak_self, server_core, client.id, index, serial)?,
                vec![],
            ),
            EventRequest::Close {
                index,
                serial,
                lane,
            } => {
                let raiser = self.lock().close(client.id, index, serial, lane);
                self.stop_signaling(client, raiser);
                Ok(OutgoingReply::default())
            }
            EventRequest::Recorded {
                index,
                serial,
                lane,
                count,
                now_ns,
            } => {
                self.recorded(
                    client,
                    (index, serial),
                    Recording {
                        lane: lane.into(),
                        count,
                    },
                    now_ns,
                );
                Ok(OutgoingReply::default())
            }
            EventRequest::Return {
                index,
                serial,
                lane,
                grant,
            } => {
                self.lock()
                    .return_lane(client.id, (index, serial), lane.into(), grant);
                Ok(OutgoingReply::default())
            }
        }
    }

    fn holds_anything(&self, client: &ClientInfo) -> bool {
        self.lock()
            .slots
            .iter()
            .any(|slot| slot.importers.contains_key(&client.id))
    }

    fn on_disconnect(&self, _: &ServerCore, client: &ClientInfo, disconnected: Disconnected) {
        let (raisers, shared) = self.lock().gone(client.id, disconnected);
        self.stop_signaling(client, raisers);
        for event_page in shared {
            let (streams, mut fence) = (self.streams.clone(), None);
            self.reactor.drop_after(move || {
                // A device may write once more after its process's end, and our streams may wait there.
                event_page.end_again();
                if !event_page.is_last() {
                    return DropReadiness::Held;
                }
                is_fence_passed(&mut fence, &streams).into()
            });
        }
    }

    /// On the reactor's thread, which no driver holds up: CPU stores alone.
    fn on_server_tick(&self, _: &ServerCore, _: u64) {
        let mut state = self.lock();
        state.catch_up();
        (0..state.slots.len())
            .filter(|&index| state.slots[index].is_forwarding)
            .for_each(|index| {
                state.forward(index as u32);
            });
    }
}
