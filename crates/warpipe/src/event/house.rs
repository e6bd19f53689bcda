//! The maker's side: the events of this process in one domain, kept under one name for all who open them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use serde::{Deserialize, Serialize};

use super::layout::{BYTES, EVENTS, FROM_MAX, LANES, PAGES_MAX, Spot, Words};
use super::{Inner, Later as _, Recording};
use crate::backend::IPC_EVENTS_MAX;
use crate::clock::now_ns;
use crate::device::Device;
use crate::domain::{Domain, EndpointName};
use crate::error::{Error, Result};
use crate::fork::Home;
use crate::fork::own::Own;
use crate::link::peer::{ORPHAN_TIMEOUT, Process, Sign};
use crate::link::proof::{Proof, Streams};
use crate::link::watcher::{Next, Usage, Watch, Watched, Watcher, new_generation};
use crate::memory::lane::Lane;
use crate::memory::page::Draft;
use crate::memory::raiser::Raiser;
use crate::rendezvous::{Address, Admission, Answer, Caller, Desk, Ending, Keep, Keeper, Kind, Refusal, decode};

/// What a guest asks.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Ask {
    /// A page of this number, to share; answered with [`PageOf`] and its descriptor.
    Page(u32),
    /// It is mapped and sealed; answered with nothing once it is in use.
    Sealed(u32),
    /// To be counted among those who use an event; answered with whether it is there.
    Open { index: u32, serial: u64 },
    /// A lane to record on; answered with a [`LaneOf`].
    Lane { index: u32, serial: u64 },
    /// One opening less; its lane, if it had one, is nobody's.
    Close { index: u32, serial: u64, lane: Option<u8> },
    /// A recording that others are to know of; answered with nothing when they do.
    Recorded { index: u32, serial: u64, lane: u8, count: u64, now_ns: u64 },
    /// A lane that was granted too late to be used; the opening stays.
    Return { index: u32, serial: u64, lane: u8, grant: u64 },
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct PageOf;

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum LaneOf {
    /// This one, which stands at `from`. No two grants of an event have the same number.
    Granted { lane: u8, from: u64, grant: u64 },
    /// All are somebody's, or were somebody's who died.
    Full,
    /// The event is no more.
    Dropped,
}

/// Events of one process, domain and device, and their keeper.
pub(super) struct House {
    home: Home,
    keeper: Option<Keeper>,
    rooms: Arc<Rooms>,
    watcher: Arc<Watcher>,
    pub(super) domain: Domain,
    pub(super) device: Device,
    pub(super) name: EndpointName,
    pub(super) generation: [u8; 16],
}

/// What the keeper's thread looks at, too, and the watcher: no call of the driver is made under its lock.
struct Rooms {
    state: Mutex<State>,
    streams: Arc<Streams>,
    device: Device,
    watcher: Arc<Watcher>,
    me: Weak<Rooms>,
}

#[derive(Default)]
struct State {
    /// Our own.
    pages: Vec<Words>,
    /// Pages that visitors have not sealed, and those that are shared with them; by visitor and number.
    drafts: HashMap<(u64, u32), Draft>,
    shared: HashMap<(u64, u32), Words>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Those visitors that have a lane.
    recorders: HashMap<u64, Recorder>,
    /// Who signals to guests that came late.
    late: Vec<Arc<Raiser>>,
}

/// Who signals an event, and a guest's lane that it is to signal, too.
struct Follow {
    raiser: Arc<Raiser>,
    lane: Lane,
}

/// A visitor that records, and whose death is seen by the watcher, too: the attendant may be held up by the driver, behind
/// the very streams that wait for what will never be recorded.
struct Recorder {
    _watch: Watch,
    _process: Arc<Process>,
    _mourner: Arc<Mourner>,
}

/// Ends the lanes of one visitor.
struct Mourner {
    rooms: Weak<Rooms>,
    caller: u64,
    is_over: AtomicBool,
}

impl Mourner {
    fn end_lanes(&self) {
        if let Some(rooms) = self.rooms.upgrade() {
            rooms.lock().end_lanes_of(self.caller);
        }
    }
}

impl Watched for Mourner {
    /// On the watcher's thread: CPU stores alone.
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

impl Recorder {
    fn of(desk: &Desk, rooms: &Weak<Rooms>, caller: u64) -> Result<Recorder, Refusal> {
        let process = desk.process_of(caller).ok_or_else(|| Refusal("it is there no more".into()))?;
        let mourner = Arc::new(Mourner { rooms: rooms.clone(), caller, is_over: AtomicBool::new(false) });
        let watched: Weak<dyn Watched> = Arc::downgrade(&mourner) as Weak<dyn Watched>;
        let watch = process.watch(Sign::Over(ORPHAN_TIMEOUT), &watched, 0)?;
        desk.watcher().tick(watched);
        Ok(Recorder { _watch: watch, _process: process, _mourner: mourner })
    }
}

struct Slot {
    spot: Spot,
    serial: u64,
    phase: Phase,
    /// Of lane 0. It outlives the event: what its streams have yet to signal belongs to its count.
    raiser: Arc<Raiser>,
    /// How often each visitor has it open.
    guests: HashMap<u64, u32>,
    /// Whose each lane is.
    lanes: [Option<u64>; LANES],
    /// The numbers of the last grants of each lane, and of all.
    grants: [u64; LANES],
    granted: u64,
    /// Whether anybody has ever opened it.
    is_shared: bool,
    /// What guests record is being passed on.
    is_forwarding: bool,
}

enum Phase {
    Free,
    Live(Weak<Inner>),
    /// Dropped; who waits for it may still do so.
    Ending,
    /// All lanes have ended; free as soon as no guest has it open.
    Ended,
}

static HOUSES: Own<Mutex<Vec<Weak<House>>>> = Own::new();

fn houses() -> Vec<Arc<House>> {
    let mut all = HOUSES.lock();
    all.retain(|house| house.strong_count() > 0);
    all.iter().filter_map(Weak::upgrade).collect()
}

impl House {
    /// The house of this process for a domain and a device; made if there is none.
    pub(super) fn of(domain: &Domain, device: &Device) -> Result<Arc<House>> {
        let is_it = |house: &Arc<House>| {
            house.domain.path() == domain.path() && Arc::ptr_eq(house.device.backend(), device.backend())
        };
        if let Some(house) = houses().into_iter().find(is_it) {
            return Ok(house);
        }
        let house = Arc::new(House::open(domain, device)?);
        HOUSES.lock().push(Arc::downgrade(&house));
        Ok(house)
    }

    /// The house of this process that a handle names.
    pub(super) fn named(endpoint: &str, generation: [u8; 16]) -> Option<Arc<House>> {
        houses().into_iter().find(|house| house.generation == generation && house.name.as_str() == endpoint)
    }

    fn open(domain: &Domain, device: &Device) -> Result<House> {
        let tag: String = new_generation()[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        let name = EndpointName::new(&format!("events/{tag}"))?;
        let watcher = Watcher::of_process()?;
        let rooms = Arc::new_cyclic(|me: &Weak<Rooms>| Rooms {
            state: Mutex::default(),
            streams: Arc::default(),
            device: device.clone(),
            watcher: watcher.clone(),
            me: me.clone(),
        });
        let at = Address { domain, name: &name, kind: Kind::Events };
        let keeper = Keeper::open(&at, Admission::default(), rooms.clone())?;
        Ok(House {
            home: Home::here(),
            generation: keeper.desk().generation(),
            keeper: Some(keeper),
            rooms,
            watcher,
            domain: domain.clone(),
            device: device.clone(),
            name,
        })
    }

    pub(super) fn streams(&self) -> &Arc<Streams> {
        &self.rooms.streams
    }

    /// A place for an event, its number and how many have lain there.
    pub(super) fn take(&self) -> Result<Place> {
        let mut state = self.rooms.lock();
        while state.free.is_empty() && state.is_full() {
            if state.pages.len() == PAGES_MAX {
                return Err(Error::EventLimit { limit: IPC_EVENTS_MAX });
            }
            drop(state);
            let page = Words::create(&self.device)?;
            state = self.rooms.lock();
            if state.is_full() {
                state.pages.push(page);
            } else {
                // Somebody else was quicker. Not dropped here: that calls the driver.
                self.watcher.bury(Box::new(page));
            }
        }
        let index = match state.free.pop() {
            Some(index) => index,
            None => state.grow(),
        };
        let slot = &mut state.slots[index as usize];
        slot.phase = Phase::Live(Weak::new());
        slot.spot.forget_latest(slot.serial);
        Ok(Place { index, serial: slot.serial, spot: slot.spot.clone(), raiser: slot.raiser.clone() })
    }

    /// Says what the maker has recorded.
    pub(super) fn recorded(&self, index: u32, recording: Recording, now_ns: u64) {
        self.rooms.lock().publish(index, recording, now_ns, None);
    }

    /// How often others have an event open.
    #[cfg(test)]
    pub(super) fn openings(&self, index: u32) -> u32 {
        self.rooms.lock().slots[index as usize].guests.values().sum()
    }

    /// The last recording of an event by anybody.
    pub(super) fn latest(&self, index: u32) -> Option<(u64, Recording)> {
        let state = self.rooms.lock();
        let slot = &state.slots[index as usize];
        let guests = slot.guests.keys().filter_map(|&guest| state.recorded_by(slot, index, guest));
        guests.fold(slot.spot.latest(), |latest, guest| latest.max_by_time(Some(guest)))
    }

    /// The lane of a guest that records, or what is left of it.
    pub(super) fn lane(&self, index: u32, lane: usize) -> Lane {
        let state = self.rooms.lock();
        let slot = &state.slots[index as usize];
        slot.lanes[lane]
            .and_then(|guest| state.spot_of(index, guest))
            .map_or_else(|| slot.spot.lane(lane), |spot| spot.lane(lane))
    }

    /// Whom a handle of this event leads to within this process.
    pub(super) fn settle(&self, index: u32, inner: &Arc<Inner>) {
        self.rooms.lock().slots[index as usize].phase = Phase::Live(Arc::downgrade(inner));
    }

    /// The event itself, for who opens it in its maker's process.
    pub(super) fn find(&self, index: u32, serial: u64) -> Option<Arc<Inner>> {
        match self.rooms.lock().slots.get(index as usize) {
            Some(Slot { phase: Phase::Live(inner), serial: found, .. }) if *found == serial => inner.upgrade(),
            _ => None,
        }
    }

    /// The event's last handle here is gone.
    pub(super) fn release(self: &Arc<Self>, index: u32) {
        let mut state = self.rooms.lock();
        if !state.slots[index as usize].is_shared {
            // Nobody else ever saw it, and counts go on: what is still to be signalled harms nobody.
            return state.vacate(index);
        }
        state.slots[index as usize].phase = Phase::Ending;
        drop(state);
        let (house, mut proof) = (self.clone(), None);
        self.watcher.retire(move || {
            let is_over = passed(&mut proof, house.streams());
            if is_over {
                house.rooms.lock().end(index);
            }
            is_over
        });
    }
}

/// Where a new event lies.
pub(super) struct Place {
    pub(super) index: u32,
    pub(super) serial: u64,
    pub(super) spot: Spot,
    pub(super) raiser: Arc<Raiser>,
}

impl Drop for House {
    fn drop(&mut self) {
        if !self.home.is_here() {
            return std::mem::forget((self.keeper.take(), self.rooms.clone()));
        }
        drop(self.keeper.take());
        let mut state = std::mem::take(&mut *self.rooms.lock());
        let (streams, mut proof) = (self.rooms.streams.clone(), None);
        self.watcher.retire(move || {
            if !passed(&mut proof, &streams) {
                return Usage::Busy;
            }
            (0..state.slots.len()).filter(|&index| state.slots[index].is_shared).for_each(|index| state.end_all(index));
            state.slots.clear();
            let mut all = state.pages.iter().chain(state.shared.values());
            if all.all(Words::is_last) { Usage::Over } else { Usage::Held }
        });
    }
}

pub(super) fn passed(proof: &mut Option<Proof>, streams: &Streams) -> bool {
    proof.get_or_insert_with(|| streams.mark()).is_passed()
}

impl Slot {
    fn is_there(&self, serial: u64) -> bool {
        self.serial == serial && matches!(self.phase, Phase::Live(_))
    }
}

impl State {
    fn is_full(&self) -> bool {
        self.slots.len() == EVENTS * self.pages.len()
    }

    /// One more slot, in a page that has room.
    fn grow(&mut self) -> u32 {
        let index = self.slots.len();
        let (words, index) = (&self.pages[index / EVENTS], index as u32);
        self.slots.push(Slot {
            spot: words.spot(index),
            serial: 1,
            phase: Phase::Free,
            raiser: Arc::new(words.raiser(index, 0, 0)),
            guests: HashMap::new(),
            lanes: [None; LANES],
            grants: [0; LANES],
            granted: 0,
            is_shared: false,
            is_forwarding: false,
        });
        index
    }

    /// An event's place in the page that a guest shares with us.
    fn spot_of(&self, index: u32, guest: u64) -> Option<Spot> {
        self.shared.get(&(guest, index / EVENTS as u32)).map(|words| words.spot(index))
    }

    /// The places of all who have an event open.
    fn spots(&self, index: u32) -> impl Iterator<Item = (u64, Spot)> + '_ {
        let guests = self.slots[index as usize].guests.keys();
        guests.filter_map(move |&guest| Some((guest, self.spot_of(index, guest)?)))
    }

    /// What a guest says that it has recorded, if it may.
    fn recorded_by(&self, slot: &Slot, index: u32, guest: u64) -> Option<(u64, Recording)> {
        // No time of a peer's is ahead of ours.
        let recorded = self.spot_of(index, guest)?.guests().map(|(at_ns, last)| (at_ns.min(now_ns()), last));
        recorded.filter(|(_, recording)| slot.lanes[recording.lane] == Some(guest))
    }

    /// Writes down a recording for ourselves and all guests but the one that made it.
    fn publish(&self, index: u32, recording: Recording, now_ns: u64, but: Option<u64>) {
        self.slots[index as usize].spot.set_latest(now_ns, recording);
        let others = self.spots(index).filter(|(guest, _)| Some(*guest) != but);
        others.for_each(|(_, spot)| spot.set_latest(now_ns, recording));
    }

    /// Passes on how far guests' recordings have come; true once nothing is due.
    fn forward(&self, index: u32) -> bool {
        let slot = &self.slots[index as usize];
        let mut is_done = true;
        for (number, holder) in slot.lanes.iter().enumerate() {
            let Some((holder, spot)) = holder.and_then(|guest| Some((guest, self.spot_of(index, guest)?))) else {
                continue;
            };
            let (lane, mirror) = (spot.lane(number), slot.spot.lane(number));
            let value = lane.value();
            if lane.has_ended() || value > FROM_MAX {
                continue;
            }
            let others = self.spots(index).filter(|(guest, _)| *guest != holder).map(|(_, spot)| spot.lane(number));
            for copy in others.chain([mirror]) {
                copy.sign_as(&lane);
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
        let holder = slot.lanes[number].and_then(|guest| self.spot_of(index, guest));
        let (mirror, holders) = (slot.spot.lane(number), holder.map(|spot| spot.lane(number)));
        let value = holders.as_ref().map_or(0, Lane::value).max(mirror.value());
        for lane in self.spots(index).map(|(_, spot)| spot.lane(number)).chain([mirror]) {
            holders.iter().for_each(|holder| lane.sign_as(holder));
            lane.end_at(value);
        }
    }

    /// A visitor is proven dead: what it had yet to record never comes.
    fn end_lanes_of(&self, caller: u64) {
        for index in 0..self.slots.len() {
            let lanes = self.slots[index].lanes;
            (0..LANES).filter(|&lane| lanes[lane] == Some(caller)).for_each(|lane| self.end_lane(index as u32, lane));
        }
    }

    fn end_all(&self, index: usize) {
        self.slots[index].raiser.end();
        (1..LANES).for_each(|lane| self.end_lane(index as u32, lane));
    }

    /// A dropped event whose own work is done: whoever still waits for it is let go.
    fn end(&mut self, index: u32) {
        self.end_all(index as usize);
        self.slots[index as usize].phase = Phase::Ended;
        self.clear(index);
    }

    /// Makes an ended event's slot as new, once no guest's stream can wait there.
    fn clear(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        if !matches!(slot.phase, Phase::Ended) || !slot.guests.is_empty() {
            return;
        }
        slot.spot.lanes().for_each(|lane| lane.reset());
        slot.lanes = [None; LANES];
        slot.is_shared = false;
        slot.raiser = Arc::new(self.pages[index as usize / EVENTS].raiser(index, 0, 0));
        self.vacate(index);
    }

    fn vacate(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.serial += 1;
        slot.phase = Phase::Free;
        self.free.push(index);
    }

    /// Counts an opening. A guest's first one tells it all that is known of the event, and from then on what comes.
    ///
    /// The lane that is to be signalled for it is returned then.
    fn open(&mut self, caller: u64, index: u32, serial: u64) -> Option<Option<Follow>> {
        let spot = self.spot_of(index, caller)?;
        let slot = self.slots.get_mut(index as usize).filter(|slot| slot.is_there(serial))?;
        slot.is_shared = true;
        let count = slot.guests.entry(caller).or_default();
        *count += 1;
        if *count > 1 {
            return Some(None);
        }
        // An earlier event may have lain here. Nobody waits there: who had it open has closed it behind its streams, and
        // our own are past it.
        if !spot.is_of(serial) {
            spot.lanes().for_each(|lane| lane.reset());
            spot.forget_latest(serial);
        }
        let (raiser, own) = (slot.raiser.clone(), slot.spot.clone());
        let many = slot.guests.len() > 1;
        self.spots(index).for_each(|(_, spot)| spot.set_others(many));
        // After that: whoever has not seen it has recorded before, which is passed on here.
        let known: Vec<_> = {
            let slot = &self.slots[index as usize];
            slot.guests.keys().filter_map(|&guest| self.recorded_by(slot, index, guest)).collect()
        };
        let latest = known.into_iter().fold(own.latest(), |latest, guest| latest.max_by_time(Some(guest)));
        latest.into_iter().for_each(|(now_ns, recording)| spot.set_latest(now_ns, recording));
        for number in 1..LANES {
            let (mirror, lane) = (own.lane(number), spot.lane(number));
            if mirror.has_ended() { lane.end_at(mirror.value()) } else { lane.bring_up(mirror.value()) }
        }
        Some(Some(Follow { raiser, lane: spot.lane(0) }))
    }

    fn lane(
        &mut self,
        rooms: &Weak<Rooms>,
        desk: &Desk,
        caller: u64,
        index: u32,
        serial: u64,
    ) -> Result<LaneOf, Refusal> {
        let known = |slot: &&Slot| slot.is_there(serial) && slot.guests.contains_key(&caller);
        let Some((slot, spot)) = self.slots.get(index as usize).filter(known).zip(self.spot_of(index, caller)) else {
            return Ok(LaneOf::Dropped);
        };
        let is_sound = |lane: Lane| !lane.has_ended() && lane.value() <= FROM_MAX;
        let is_free = |lane: &usize| slot.lanes[*lane].is_none() && is_sound(slot.spot.lane(*lane));
        let Some(number) = (1..LANES).find(is_free) else { return Ok(LaneOf::Full) };
        let from = slot.spot.lane(number).value();
        spot.lane(number).bring_up(from);
        if let Entry::Vacant(place) = self.recorders.entry(caller) {
            place.insert(Recorder::of(desk, rooms, caller)?);
        }
        let slot = &mut self.slots[index as usize];
        slot.granted += 1;
        slot.lanes[number] = Some(caller);
        slot.grants[number] = slot.granted;
        Ok(LaneOf::Granted { lane: number as u8, from, grant: slot.granted })
    }

    /// A guest has not used a lane. One that has been granted anew since then stays.
    fn take_back(&mut self, caller: u64, (index, serial): (u32, u64), lane: usize, grant: u64) {
        let slot = self.slots.get(index as usize).filter(|slot| slot.serial == serial);
        if slot.is_some_and(|slot| slot.lanes.get(lane) == Some(&Some(caller)) && slot.grants[lane] == grant) {
            self.keep_lane(caller, index, lane);
        }
    }

    /// What is left of a guest's lane is ours: all that it has reached, and its last recording.
    fn keep_lane(&mut self, caller: u64, index: u32, number: usize) {
        let slot = &self.slots[index as usize];
        let recorded = self.recorded_by(slot, index, caller);
        self.forward(index);
        if let Some((now_ns, recording)) = recorded.filter(|(_, recording)| recording.lane == number) {
            self.publish(index, recording, now_ns, None);
        }
        // Who leaves has come to all that it recorded, or lied: nobody waits for that for ever.
        let reached = self.slots[index as usize].spot.lane(number).value();
        let is_short = recorded.is_some_and(|(_, last)| last.lane == number && last.count > reached);
        if is_short || self.spot_of(index, caller).is_some_and(|spot| spot.lane(number).value() > FROM_MAX) {
            self.end_lane(index, number);
        }
        self.slots[index as usize].lanes[number] = None;
    }

    /// One opening less. Returns who signals an event that the guest has open no more.
    fn close(&mut self, caller: u64, index: u32, serial: u64, lane: Option<u8>) -> Option<Arc<Raiser>> {
        let slot = self.slots.get_mut(index as usize).filter(|slot| slot.serial == serial)?;
        let count = slot.guests.get_mut(&caller)?;
        *count -= 1;
        let is_last = *count == 0;
        if let Some(number) = lane.map(usize::from).filter(|&lane| slot.lanes.get(lane) == Some(&Some(caller))) {
            self.keep_lane(caller, index, number);
        }
        let raiser = is_last.then(|| self.leave(caller, index));
        self.clear(index);
        raiser
    }

    /// A guest has an event open no more.
    fn leave(&mut self, caller: u64, index: u32) -> Arc<Raiser> {
        let lanes = self.slots[index as usize].lanes;
        (0..LANES).filter(|&lane| lanes[lane] == Some(caller)).for_each(|lane| self.keep_lane(caller, index, lane));
        let slot = &mut self.slots[index as usize];
        slot.guests.remove(&caller);
        let (raiser, many) = (slot.raiser.clone(), slot.guests.len() > 1);
        self.spots(index).for_each(|(_, spot)| spot.set_others(many));
        raiser
    }

    /// A visitor is there no more. What a dead one's device had yet to record never comes. Returns who signals to it, and
    /// what was shared with it.
    fn gone(&mut self, caller: u64, ending: Ending) -> (Vec<Arc<Raiser>>, Vec<Words>) {
        if ending == Ending::Died {
            self.end_lanes_of(caller);
        }
        self.recorders.remove(&caller);
        let mut raisers = Vec::new();
        for index in 0..self.slots.len() as u32 {
            if self.slots[index as usize].guests.contains_key(&caller) {
                raisers.push(self.leave(caller, index));
                self.clear(index);
            }
        }
        self.drafts.retain(|(guest, _), _| *guest != caller);
        (raisers, self.shared.extract_if(|(guest, _), _| *guest == caller).map(|(_, words)| words).collect())
    }

    /// Brings guests up that came late; true once all have everything that was recorded before.
    fn catch_up(&mut self) -> bool {
        self.late.retain(|raiser| !raiser.catch_up());
        self.late.is_empty()
    }
}

impl Rooms {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a page to share with a visitor.
    fn offer(&self, caller: &Caller, number: u32) -> Result<Answer, Refusal> {
        let mut state = self.lock();
        if number as usize >= state.pages.len() || state.shared.contains_key(&(caller.id, number)) {
            return Err(Refusal("there is no such page to share".into()));
        }
        let draft = Draft::create(BYTES)?;
        let answer = Answer::new(&PageOf, vec![draft.descriptor()?])?;
        state.drafts.insert((caller.id, number), draft);
        Ok(answer)
    }

    fn confirm(&self, desk: &Desk, caller: &Caller, number: u32) -> Result<Answer, Refusal> {
        let draft = self.lock().drafts.remove(&(caller.id, number));
        let draft = draft.ok_or_else(|| Refusal("it was offered no such page".into()))?;
        let words = Words::confirm(&self.device, draft, desk.name())?;
        self.lock().shared.insert((caller.id, number), words);
        Ok(Answer::default())
    }

    fn open(&self, caller: &Caller, index: u32, serial: u64) -> Result<Answer, Refusal> {
        let mut state = self.lock();
        let opened = state.open(caller.id, index, serial);
        if let Some(Some(Follow { raiser, lane })) = &opened
            && !raiser.add(caller.id, lane)
        {
            state.late.push(raiser.clone());
            let rooms = self.me.clone();
            self.watcher.retire(move || rooms.upgrade().is_none_or(|rooms| rooms.lock().catch_up()));
        }
        self.forward(&mut state, index);
        Answer::new(&opened.is_some(), vec![])
    }

    fn recorded(&self, caller: &Caller, (index, serial): (u32, u64), recording: Recording, at_ns: u64) {
        let mut state = self.lock();
        let holds = |slot: &&Slot| slot.serial == serial && slot.lanes.get(recording.lane) == Some(&Some(caller.id));
        if state.slots.get(index as usize).filter(holds).is_some() {
            state.publish(index, recording, at_ns.min(now_ns()), Some(caller.id));
            self.forward(&mut state, index);
        }
    }

    /// Passes on what guests have recorded, and goes on with it until nothing is due.
    fn forward(&self, state: &mut State, index: u32) {
        if state.slots.get(index as usize).is_none_or(|slot| slot.is_forwarding) || state.forward(index) {
            return;
        }
        state.slots[index as usize].is_forwarding = true;
        let rooms = self.me.clone();
        self.watcher.retire(move || {
            let Some(rooms) = rooms.upgrade() else { return true };
            let mut state = rooms.lock();
            let is_over = state.slots.get(index as usize).is_none() || state.forward(index);
            if let Some(slot) = state.slots.get_mut(index as usize).filter(|_| is_over) {
                slot.is_forwarding = false;
            }
            is_over
        });
    }

    fn unfollow(&self, caller: &Caller, raisers: impl IntoIterator<Item = Arc<Raiser>>) {
        raisers.into_iter().for_each(|raiser| drop(raiser.remove(caller.id)));
    }
}

impl Keep for Rooms {
    fn admit(&self, _: &Desk, _: &Caller, _: &[u8]) -> Result<Answer, Refusal> {
        Ok(Answer::default())
    }

    fn answer(&self, desk: &Desk, caller: &Caller, body: &[u8]) -> Result<Answer, Refusal> {
        match decode::<Ask>(body, desk.name())? {
            Ask::Page(number) => self.offer(caller, number),
            Ask::Sealed(number) => self.confirm(desk, caller, number),
            Ask::Open { index, serial } => self.open(caller, index, serial),
            Ask::Lane { index, serial } => {
                Answer::new(&self.lock().lane(&self.me, desk, caller.id, index, serial)?, vec![])
            }
            Ask::Close { index, serial, lane } => {
                let raiser = self.lock().close(caller.id, index, serial, lane);
                self.unfollow(caller, raiser);
                Ok(Answer::default())
            }
            Ask::Recorded { index, serial, lane, count, now_ns } => {
                self.recorded(caller, (index, serial), Recording { lane: lane.into(), count }, now_ns);
                Ok(Answer::default())
            }
            Ask::Return { index, serial, lane, grant } => {
                self.lock().take_back(caller.id, (index, serial), lane.into(), grant);
                Ok(Answer::default())
            }
        }
    }

    fn holds(&self, caller: &Caller) -> bool {
        self.lock().slots.iter().any(|slot| slot.guests.contains_key(&caller.id))
    }

    fn gone(&self, _: &Desk, caller: &Caller, ending: Ending) {
        let (raisers, shared) = self.lock().gone(caller.id, ending);
        self.unfollow(caller, raisers);
        for words in shared {
            let (streams, mut proof) = (self.streams.clone(), None);
            self.watcher.retire(move || {
                // A device may write once more after its process's end, and our streams may wait there.
                words.end_again();
                if !words.is_last() {
                    return Usage::Held;
                }
                passed(&mut proof, &streams).into()
            });
        }
    }

    /// On the watcher's thread, which no driver holds up: CPU stores alone.
    fn tick(&self, _: &Desk, _: u64) {
        let mut state = self.lock();
        state.catch_up();
        (0..state.slots.len()).filter(|&index| state.slots[index].is_forwarding).for_each(|index| {
            state.forward(index as u32);
        });
    }
}
