//! The event slots of an exporter, with the pages and lanes of its importers. No driver call is
//! made here: the reactor's thread uses the slots, too.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use super::layout::{
    EVENTS_PER_PAGE, EventPage, EventWords, FROM_MAX, LANES_PER_EVENT, max_by_time,
};
use super::{EventInner, Recording};
use crate::clock::now_ns;
use crate::ipc::peer::Process;
use crate::ipc::{ClientInfo, Disconnected, Rejection};
use crate::runtime::reactor::Reactor;
use crate::shm::counter::SharedCounter;
use crate::shm::signaller::Signaller;

#[derive(Default)]
pub(super) struct ExporterState {
    /// The exporter's own pages.
    pub(super) pages: Vec<EventPage>,
    /// Pages that are shared with importers, by client and number.
    pub(super) shared: HashMap<(u64, u32), EventPage>,
    pub(super) slots: Vec<EventSlot>,
    pub(super) free: Vec<u32>,
    /// The processes of clients that have a lane.
    pub(super) recorders: HashMap<u64, Arc<Process>>,
}

/// A client's use of an event.
pub(super) struct Opening {
    client: u64,
    /// The event's words in the page that is shared with the client.
    words: EventWords,
    /// How often the client has opened it.
    pub(super) count: u32,
    /// The client's lane, once it has recorded.
    lane: Option<usize>,
}

pub(super) struct EventSlot {
    pub(super) event_words: EventWords,
    pub(super) serial: u64,
    pub(super) phase: SlotPhase,
    /// The signaller of lane 0. It outlives the event: pending signals of its streams belong to its
    /// count.
    pub(super) signaller: Arc<Signaller>,
    pub(super) openings: Vec<Opening>,
    /// Whether any importer has ever opened it.
    pub(super) is_shared: bool,
    /// Recordings of importers are being forwarded.
    pub(super) is_forwarding: bool,
}

pub(super) enum SlotPhase {
    Free,
    Live(Weak<EventInner>),
    /// Dropped; waits for its recordings continue.
    Disconnected,
    /// All lanes have ended; free as soon as no importer has it open.
    Ended,
}

impl Opening {
    /// The last recording that the client claims, if it may record.
    fn recorded(&self) -> Option<(u64, Recording)> {
        // A peer's time is at most the present time.
        let recorded =
            (self.words.importer_latest().load()).map(|(at_ns, last)| (at_ns.min(now_ns()), last));
        recorded.filter(|(_, recording)| self.lane == Some(recording.lane))
    }
}

impl EventSlot {
    fn is_live_with(&self, serial: u64) -> bool {
        self.serial == serial && matches!(self.phase, SlotPhase::Live(_))
    }

    pub(super) fn opening_of(&self, client: u64) -> Option<&Opening> {
        (self.openings.iter()).find(|opening| opening.client == client)
    }

    /// The opening that has a lane.
    fn holder(&self, lane: usize) -> Option<&Opening> {
        (self.openings.iter()).find(|opening| opening.lane == Some(lane))
    }

    pub(super) fn is_recorder(&self, client: u64, lane: usize) -> bool {
        self.holder(lane)
            .is_some_and(|holder| holder.client == client)
    }

    /// The words of a lane: those of its holder, or else what has remained.
    pub(super) fn lane(&self, lane: usize) -> SharedCounter {
        let words = self.holder(lane).map(|holder| &holder.words);
        words.unwrap_or(&self.event_words).lane(lane)
    }

    /// The last recording by any process.
    pub(super) fn latest(&self) -> Option<(u64, Recording)> {
        let importers = self.openings.iter().map(Opening::recorded);
        max_by_time(importers.chain([self.event_words.latest().load()]))
    }

    /// Writes a recording to the exporter's page and to all importers' pages but that of its
    /// recorder.
    pub(super) fn publish(&self, recording: Recording, now_ns: u64) {
        self.event_words.latest().store(now_ns, recording);
        (self.openings.iter())
            .filter(|opening| opening.lane != Some(recording.lane))
            .for_each(|opening| opening.words.latest().store(now_ns, recording));
    }

    /// Forwards the progress of importers' recordings; true once nothing is left to forward.
    pub(super) fn forward(&self) -> bool {
        let mut is_done = true;
        for (number, holder) in (1..LANES_PER_EVENT).filter_map(|n| Some((n, self.holder(n)?))) {
            let lane = holder.words.lane(number);
            let value = lane.value();
            if lane.has_ended() || value > FROM_MAX {
                continue;
            }
            let others = (self.openings.iter()).filter(|opening| opening.client != holder.client);
            let others = others.map(|opening| &opening.words);
            for copy in others.chain([&self.event_words]) {
                let copy = copy.lane(number);
                copy.copy_pid(&lane);
                copy.bring_up(value);
            }
            is_done &= (holder.recorded()).is_none_or(|(_, last)| last.count <= value);
        }
        is_done
    }

    /// Ends a lane, at the exporter's copy of its count, in all pages.
    fn end_lane(&self, number: usize) {
        let (held, mirror) = (self.lane(number), self.event_words.lane(number));
        let value = held.value().max(mirror.value());
        let openings = self
            .openings
            .iter()
            .map(|opening| opening.words.lane(number));
        for lane in openings.chain([mirror]) {
            lane.copy_pid(&held);
            lane.end_at(value);
        }
    }

    pub(super) fn end_all(&self) {
        self.signaller.end();
        (1..LANES_PER_EVENT).for_each(|lane| self.end_lane(lane));
    }

    /// Takes over a client's lane: its progress and its last recording.
    fn take_over_lane(&mut self, client: u64) {
        let Some(opening) = self.opening_of(client) else {
            return;
        };
        let (recorded, Some(number)) = (opening.recorded(), opening.lane) else {
            return;
        };
        let claimed = opening.words.lane(number).value();
        self.forward();
        if let Some((now_ns, recording)) = recorded {
            self.publish(recording, now_ns);
        }
        // An importer that leaves has completed its recordings, or has lied: no wait for them lasts
        // for ever.
        let reached = self.event_words.lane(number).value();
        if claimed > FROM_MAX || recorded.is_some_and(|(_, last)| last.count > reached) {
            self.end_lane(number);
        }
    }

    /// Removes a client that has the event open no more.
    fn remove(&mut self, client: u64) {
        self.take_over_lane(client);
        self.openings.retain(|opening| opening.client != client);
        drop(self.signaller.remove(client));
        self.tell_of_others();
    }

    fn tell_of_others(&self) {
        let many = self.openings.len() > 1;
        (self.openings.iter()).for_each(|opening| opening.words.set_other_importers(many));
    }

    /// Adds a client's first opening, and writes the event's recordings to its page; later ones
    /// follow.
    fn add(&mut self, client: u64, words: EventWords, reactor: &Arc<Reactor>) {
        // The slot may hold words of an earlier event. No stream waits there: importers closed it
        // behind their streams, and the exporter's streams are past it.
        if !words.is_of(self.serial) {
            words.lanes().for_each(|lane| lane.reset());
            words.forget_latest(self.serial);
        }
        self.is_shared = true;
        self.openings.push(Opening {
            client,
            words: words.clone(),
            count: 1,
            lane: None,
        });
        self.tell_of_others();
        // After that: a recorder that has not seen the flag has recorded before, and that recording
        // is forwarded here.
        if let Some((now_ns, recording)) = self.latest() {
            words.latest().store(now_ns, recording);
        }
        for number in 1..LANES_PER_EVENT {
            let (mirror, lane) = (self.event_words.lane(number), words.lane(number));
            if mirror.has_ended() {
                lane.end_at(mirror.value())
            } else {
                lane.bring_up(mirror.value())
            }
        }
        self.signaller.add_late(client, &words.lane(0), reactor);
    }
}

impl ExporterState {
    pub(super) fn is_full(&self) -> bool {
        self.slots.len() == EVENTS_PER_PAGE * self.pages.len()
    }

    /// Adds a slot, in a page that has room.
    pub(super) fn grow(&mut self) -> u32 {
        let index = self.slots.len();
        let (event_page, index) = (&self.pages[index / EVENTS_PER_PAGE], index as u32);
        self.slots.push(EventSlot {
            event_words: event_page.event_words(index),
            serial: 1,
            phase: SlotPhase::Free,
            signaller: Arc::new(event_page.signaller(index, 0, 0)),
            openings: Vec::new(),
            is_shared: false,
            is_forwarding: false,
        });
        index
    }

    pub(super) fn slot(&self, index: u32) -> &EventSlot {
        &self.slots[index as usize]
    }

    /// Whether a client has an event of this page open.
    pub(super) fn has_open(&self, client: u64, page: u32) -> bool {
        let slots = self.slots.chunks(EVENTS_PER_PAGE).nth(page as usize);
        slots.is_some_and(|slots| slots.iter().any(|slot| slot.opening_of(client).is_some()))
    }

    /// The slot of an event that a client has open.
    pub(super) fn opened(&mut self, client: u64, index: u32) -> Option<&mut EventSlot> {
        let slot = self.slots.get_mut(index as usize)?;
        slot.opening_of(client).is_some().then_some(slot)
    }

    /// Ends the lanes of an importer that is proven dead: its pending recordings never come.
    pub(super) fn end_lanes_of(&self, client: u64) {
        for slot in &self.slots {
            if let Some(lane) = slot.opening_of(client).and_then(|opening| opening.lane) {
                slot.end_lane(lane);
            }
        }
    }

    /// Ends a dropped event once its own work is done: remaining waits are released.
    pub(super) fn end(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.end_all();
        slot.phase = SlotPhase::Ended;
        self.clear(index);
    }

    /// Resets an ended event's slot, once no importer's stream can wait there.
    fn clear(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        if !matches!(slot.phase, SlotPhase::Ended) || !slot.openings.is_empty() {
            return;
        }
        slot.event_words.lanes().for_each(|lane| lane.reset());
        slot.is_shared = false;
        slot.signaller =
            Arc::new(self.pages[index as usize / EVENTS_PER_PAGE].signaller(index, 0, 0));
        self.free_slot(index);
    }

    pub(super) fn free_slot(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.serial += 1;
        slot.phase = SlotPhase::Free;
        self.free.push(index);
    }

    /// Counts an opening. False if there is no such event, or the client shares no page for it.
    pub(super) fn open(
        &mut self,
        client: u64,
        index: u32,
        serial: u64,
        reactor: &Arc<Reactor>,
    ) -> bool {
        let page = self.shared.get(&(client, index / EVENTS_PER_PAGE as u32));
        let slot = (self.slots.get_mut(index as usize)).filter(|slot| slot.is_live_with(serial));
        let Some((slot, page)) = slot.zip(page) else {
            return false;
        };
        let mut openings = slot.openings.iter_mut();
        if let Some(opening) = openings.find(|opening| opening.client == client) {
            opening.count += 1;
        } else {
            slot.add(client, page.event_words(index), reactor);
        }
        true
    }

    /// The lane of a client, granted with its first recording, and its count. `None` for an event
    /// that has been dropped.
    pub(super) fn lane(
        &mut self,
        client: &ClientInfo,
        index: u32,
    ) -> Result<Option<(u8, u64)>, Rejection> {
        let (process, client) = (client.process.clone(), client.id);
        let slot = self.opened(client, index);
        let Some(slot) = slot.filter(|slot| matches!(slot.phase, SlotPhase::Live(_))) else {
            return Ok(None);
        };
        let is_free = |&lane: &usize| {
            let mirror = slot.event_words.lane(lane);
            slot.holder(lane).is_none() && !mirror.has_ended() && mirror.value() <= FROM_MAX
        };
        let own = slot.opening_of(client).and_then(|opening| opening.lane);
        let Some(number) = own.or_else(|| (1..LANES_PER_EVENT).find(is_free)) else {
            // The others belong to importers, or belonged to some that died.
            return Err(Rejection::new(format!(
                "event {index} has been recorded by {} other processes; make another event",
                LANES_PER_EVENT - 1
            )));
        };
        // A lane that the client has already stands where its own page says.
        let from = slot.lane(number).value();
        let mut openings = slot.openings.iter_mut();
        if let Some(opening) = openings.find(|opening| opening.client == client) {
            opening.words.lane(number).bring_up(from);
            opening.lane = Some(number);
        }
        self.recorders.insert(client, process);
        Ok(Some((number as u8, from)))
    }

    /// Closes one opening.
    pub(super) fn close(&mut self, client: u64, index: u32, serial: u64) {
        let slot = self.opened(client, index);
        let Some(slot) = slot.filter(|slot| slot.serial == serial) else {
            return;
        };
        let mut openings = slot.openings.iter_mut();
        if let Some(opening) = openings.find(|opening| opening.client == client) {
            opening.count -= 1;
            if opening.count == 0 {
                slot.remove(client);
                self.clear(index);
            }
        }
    }

    /// Removes a client. The pending recordings of a dead client's device never come. Returns the
    /// pages shared with it.
    pub(super) fn gone(&mut self, client: u64, disconnected: Disconnected) -> Vec<EventPage> {
        if disconnected == Disconnected::ProcessDied {
            self.end_lanes_of(client);
        }
        self.recorders.remove(&client);
        for index in 0..self.slots.len() as u32 {
            if let Some(slot) = self.opened(client, index) {
                slot.remove(client);
                self.clear(index);
            }
        }
        self.shared
            .extract_if(|(importer, _), _| *importer == client)
            .map(|(_, event_page)| event_page)
            .collect()
    }
}
