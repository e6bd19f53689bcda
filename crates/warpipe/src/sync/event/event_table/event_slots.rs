//! The event slots of an exporter, with the pages and lanes of its importers. No driver call is
//! made here: the reactor's thread uses the slots, too.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Weak};

use super::super::layout::{EVENTS_PER_PAGE, EventPage, EventWords, FROM_MAX, LANES_PER_EVENT};
use super::super::recording::LatestRecording as _;
use super::super::{EventInner, Recording};
use super::recorder_watch::RecorderWatch;
use super::{EventTable, LaneReply};
use crate::clock::now_ns;
use crate::ipc::{Disconnected, Rejection, ServerCore};
use crate::shm::counter::SharedCounter;
use crate::shm::page::UnsealedPage;
use crate::shm::signaler::Signaler;

#[derive(Default)]
pub(in crate::sync::event) struct ExporterState {
    /// The exporter's own pages.
    pub(in crate::sync::event) pages: Vec<EventPage>,
    /// Pages that importers have not sealed, and pages that are shared with them; by client and
    /// number.
    pub(in crate::sync::event) drafts: HashMap<(u64, u32), UnsealedPage>,
    pub(in crate::sync::event) shared: HashMap<(u64, u32), EventPage>,
    pub(in crate::sync::event) slots: Vec<EventSlot>,
    pub(in crate::sync::event) free: Vec<u32>,
    /// The clients that have a lane.
    recorders: HashMap<u64, RecorderWatch>,
    /// Signalers with latest counts that have not reached all late importers.
    pub(in crate::sync::event) lagging: Vec<Arc<Signaler>>,
}

/// A signaler of an event, and an importer's lane that it signals from now on.
pub(in crate::sync::event) struct NewListener {
    pub(in crate::sync::event) signaler: Arc<Signaler>,
    pub(in crate::sync::event) lane: SharedCounter,
}

pub(in crate::sync::event) struct EventSlot {
    pub(in crate::sync::event) event_words: EventWords,
    pub(in crate::sync::event) serial: u64,
    pub(in crate::sync::event) phase: SlotPhase,
    /// The signaler of lane 0. It outlives the event: pending signals of its streams belong to its
    /// count.
    pub(in crate::sync::event) signaler: Arc<Signaler>,
    /// How often each importer has the event open.
    pub(in crate::sync::event) importers: HashMap<u64, u32>,
    /// The importer that has each lane.
    pub(in crate::sync::event) lanes: [Option<u64>; LANES_PER_EVENT],
    /// The numbers of the last grants, of each lane and overall.
    pub(in crate::sync::event) grants: [u64; LANES_PER_EVENT],
    pub(in crate::sync::event) granted: u64,
    /// Whether any importer has ever opened it.
    pub(in crate::sync::event) is_shared: bool,
    /// Recordings of importers are being forwarded.
    pub(in crate::sync::event) is_forwarding: bool,
}

pub(in crate::sync::event) enum SlotPhase {
    Free,
    Live(Weak<EventInner>),
    /// Dropped; waits for its recordings continue.
    Disconnected,
    /// All lanes have ended; free as soon as no importer has it open.
    Ended,
}

impl EventSlot {
    fn is_live_with(&self, serial: u64) -> bool {
        self.serial == serial && matches!(self.phase, SlotPhase::Live(_))
    }
}

impl ExporterState {
    pub(in crate::sync::event) fn is_full(&self) -> bool {
        self.slots.len() == EVENTS_PER_PAGE * self.pages.len()
    }

    /// Adds a slot, in a page that has room.
    pub(in crate::sync::event) fn grow(&mut self) -> u32 {
        let index = self.slots.len();
        let (event_page, index) = (&self.pages[index / EVENTS_PER_PAGE], index as u32);
        self.slots.push(EventSlot {
            event_words: event_page.event_words(index),
            serial: 1,
            phase: SlotPhase::Free,
            signaler: Arc::new(event_page.signaler(index, 0, 0)),
            importers: HashMap::new(),
            lanes: [None; LANES_PER_EVENT],
            grants: [0; LANES_PER_EVENT],
            granted: 0,
            is_shared: false,
            is_forwarding: false,
        });
        index
    }

    /// An event's words in the page that an importer shares with this process.
    pub(in crate::sync::event) fn event_words_of(
        &self,
        index: u32,
        importer: u64,
    ) -> Option<EventWords> {
        self.shared
            .get(&(importer, index / EVENTS_PER_PAGE as u32))
            .map(|event_page| event_page.event_words(index))
    }

    /// An event's words in the pages of all importers that have it open.
    fn all_event_words(&self, index: u32) -> impl Iterator<Item = (u64, EventWords)> + '_ {
        let importers = self.slots[index as usize].importers.keys();
        importers
            .filter_map(move |&importer| Some((importer, self.event_words_of(index, importer)?)))
    }

    /// The last recording that an importer claims, if it may record.
    pub(in crate::sync::event) fn recorded_by(
        &self,
        slot: &EventSlot,
        index: u32,
        importer: u64,
    ) -> Option<(u64, Recording)> {
        // A peer's time is at most the present time.
        let recorded = self
            .event_words_of(index, importer)?
            .importer_latest()
            .map(|(at_ns, last)| (at_ns.min(now_ns()), last));
        recorded.filter(|(_, recording)| slot.lanes[recording.lane] == Some(importer))
    }

    /// Writes a recording to the exporter's page and to all importers' pages but that of its
    /// recorder.
    pub(in crate::sync::event) fn publish(
        &self,
        index: u32,
        recording: Recording,
        now_ns: u64,
        but: Option<u64>,
    ) {
        self.slots[index as usize]
            .event_words
            .set_latest(now_ns, recording);
        let others = self
            .all_event_words(index)
            .filter(|(importer, _)| Some(*importer) != but);
        others.for_each(|(_, event_words)| event_words.set_latest(now_ns, recording));
    }

    /// Forwards the progress of importers' recordings; true once nothing is left to forward.
    pub(in crate::sync::event) fn forward(&self, index: u32) -> bool {
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

    /// Ends a lane, at the exporter's copy of its count, in all pages.
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

    /// Ends the lanes of an importer that is proven dead: its pending recordings never come.
    pub(in crate::sync::event) fn end_lanes_of(&self, client: u64) {
        for index in 0..self.slots.len() {
            let lanes = self.slots[index].lanes;
            (0..LANES_PER_EVENT)
                .filter(|&lane| lanes[lane] == Some(client))
                .for_each(|lane| self.end_lane(index as u32, lane));
        }
    }

    pub(in crate::sync::event) fn end_all(&self, index: usize) {
        self.slots[index].signaler.end();
        (1..LANES_PER_EVENT).for_each(|lane| self.end_lane(index as u32, lane));
    }

    /// Ends a dropped event once its own work is done: remaining waits are released.
    pub(in crate::sync::event) fn end(&mut self, index: u32) {
        self.end_all(index as usize);
        self.slots[index as usize].phase = SlotPhase::Ended;
        self.clear(index);
    }

    /// Resets an ended event's slot, once no importer's stream can wait there.
    pub(in crate::sync::event) fn clear(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        if !matches!(slot.phase, SlotPhase::Ended) || !slot.importers.is_empty() {
            return;
        }
        slot.event_words.lanes().for_each(|lane| lane.reset());
        slot.lanes = [None; LANES_PER_EVENT];
        slot.is_shared = false;
        slot.signaler =
            Arc::new(self.pages[index as usize / EVENTS_PER_PAGE].signaler(index, 0, 0));
        self.free_slot(index);
    }

    pub(in crate::sync::event) fn free_slot(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.serial += 1;
        slot.phase = SlotPhase::Free;
        self.free.push(index);
    }

    /// Counts an opening. An importer's first opening writes the event's recordings to its page,
    /// and later ones follow.
    ///
    /// It returns the lane to signal for this importer.
    pub(in crate::sync::event) fn open(
        &mut self,
        client: u64,
        index: u32,
        serial: u64,
    ) -> Option<Option<NewListener>> {
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
        // The slot may hold words of an earlier event. No stream waits there: importers closed it
        // behind their streams, and the exporter's streams are past it.
        if !event_words.is_of(serial) {
            event_words.lanes().for_each(|lane| lane.reset());
            event_words.forget_latest(serial);
        }
        let (signaler, own) = (slot.signaler.clone(), slot.event_words.clone());
        let many = slot.importers.len() > 1;
        self.all_event_words(index)
            .for_each(|(_, event_words)| event_words.set_other_importers(many));
        // After that: a recorder that has not seen the flag has recorded before, and that recording
        // is forwarded here.
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
            signaler,
            lane: event_words.lane(0),
        }))
    }

    pub(in crate::sync::event) fn lane(
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

    /// Takes back a lane that an importer has not used, unless it has been granted anew since then.
    pub(in crate::sync::event) fn return_lane(
        &mut self,
        client: u64,
        (index, serial): (u32, u64),
        lane: usize,
        grant: u64,
    ) {
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

    /// Takes over an importer's lane: its progress and its last recording.
    fn take_over_lane(&mut self, client: u64, index: u32, number: usize) {
        let slot = &self.slots[index as usize];
        let recorded = self.recorded_by(slot, index, client);
        self.forward(index);
        if let Some((now_ns, recording)) =
            recorded.filter(|(_, recording)| recording.lane == number)
        {
            self.publish(index, recording, now_ns, None);
        }
        // An importer that leaves has completed its recordings, or has lied: no wait for them lasts
        // for ever.
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

    /// Closes one opening. Returns the event's signaler if it was the importer's last.
    pub(in crate::sync::event) fn close(
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
        let signaler = is_last.then(|| self.remove_importer(client, index));
        self.clear(index);
        signaler
    }

    /// Removes an importer that has an event open no more.
    fn remove_importer(&mut self, client: u64, index: u32) -> Arc<Signaler> {
        let lanes = self.slots[index as usize].lanes;
        (0..LANES_PER_EVENT)
            .filter(|&lane| lanes[lane] == Some(client))
            .for_each(|lane| self.take_over_lane(client, index, lane));
        let slot = &mut self.slots[index as usize];
        slot.importers.remove(&client);
        let (signaler, many) = (slot.signaler.clone(), slot.importers.len() > 1);
        self.all_event_words(index)
            .for_each(|(_, event_words)| event_words.set_other_importers(many));
        signaler
    }

    /// Removes a client. The pending recordings of a dead client's device never come. Returns the
    /// signalers that signal to it, and the pages shared with it.
    pub(in crate::sync::event) fn gone(
        &mut self,
        client: u64,
        disconnected: Disconnected,
    ) -> (Vec<Arc<Signaler>>, Vec<EventPage>) {
        if disconnected == Disconnected::ProcessDied {
            self.end_lanes_of(client);
        }
        self.recorders.remove(&client);
        let mut signalers = Vec::new();
        for index in 0..self.slots.len() as u32 {
            if self.slots[index as usize].importers.contains_key(&client) {
                signalers.push(self.remove_importer(client, index));
                self.clear(index);
            }
        }
        self.drafts.retain(|(importer, _), _| *importer != client);
        (
            signalers,
            self.shared
                .extract_if(|(importer, _), _| *importer == client)
                .map(|(_, event_page)| event_page)
                .collect(),
        )
    }

    /// Brings late importers up to date; true once all have every earlier recording.
    pub(in crate::sync::event) fn catch_up(&mut self) -> bool {
        self.lagging.retain(|signaler| !signaler.catch_up());
        self.lagging.is_empty()
    }
}
