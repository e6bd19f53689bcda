//! The maker's side: the events of this process in one domain, kept under one name for all who open them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use serde::{Deserialize, Serialize};

use super::Inner;
use super::layout::{EVENTS, FROM_MAX, LANES, PAGES_MAX, Spot, Words};
use crate::backend::IPC_EVENTS_MAX;
use crate::device::Device;
use crate::domain::{Domain, EndpointName};
use crate::error::{Error, Result};
use crate::fork::{self, Home, PrivateFd};
use crate::link::peer::{ORPHAN_TIMEOUT, Process, Sign};
use crate::link::proof::{Proof, Streams};
use crate::link::watcher::{Next, Usage, Watch, Watched, Watcher, new_generation};
use crate::memory::lane::{Lane, Raiser};
use crate::rendezvous::{Address, Admission, Answer, Caller, Desk, Ending, Keep, Keeper, Kind, Refusal, decode};

/// What a guest asks.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Ask {
    /// The page of this number; answered with [`PageOf`] and its descriptor.
    Page(u32),
    /// To be counted among those who use an event; answered with whether it is there.
    Open { index: u32, serial: u64 },
    /// A lane to record on; answered with a [`LaneOf`].
    Lane { index: u32, serial: u64 },
    /// One opening less; its lane, if it had one, is nobody's.
    Close { index: u32, serial: u64, lane: Option<u8> },
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct PageOf;

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum LaneOf {
    /// This one, which stands at `from`.
    Granted { lane: u8, from: u64 },
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

/// What the keeper's thread looks at, too.
struct Rooms {
    state: Mutex<State>,
    streams: Arc<Streams>,
}

#[derive(Default)]
struct State {
    pages: Vec<(Words, PrivateFd)>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Those visitors that have a lane.
    recorders: HashMap<u64, Recorder>,
}

/// A visitor that records, and whose death is seen by the watcher, too: the attendant may be held up by the driver, behind
/// the very streams that wait for what will never be recorded.
struct Recorder {
    _watch: Watch,
    _process: Arc<Process>,
    lanes: Arc<Mourner>,
}

/// The lanes of one visitor: the event's number, the lane's, and the lane.
#[derive(Default)]
struct Mourner(Mutex<Vec<(u32, usize, Lane)>>);

impl Mourner {
    fn lock(&self) -> MutexGuard<'_, Vec<(u32, usize, Lane)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watched for Mourner {
    /// On the watcher's thread: CPU stores alone.
    fn on_ready(&self, _: u64) -> Next {
        self.lock().iter().for_each(|(.., lane)| lane.end());
        Next::Stop
    }

    /// Device work that a forked child keeps running may signal an ended lane once more, and set its word back.
    fn on_tick(&self, _: u64) {
        self.lock().iter().filter(|(.., lane)| lane.has_ended()).for_each(|(.., lane)| lane.end());
    }
}

impl Recorder {
    fn of(desk: &Desk, caller: u64) -> Result<Recorder, Refusal> {
        let process = desk.process_of(caller).ok_or_else(|| Refusal("it is there no more".into()))?;
        let lanes = Arc::new(Mourner::default());
        let mourner: Weak<dyn Watched> = Arc::downgrade(&lanes) as Weak<dyn Watched>;
        let watch = process.watch(Sign::Over(ORPHAN_TIMEOUT), &mourner, 0)?;
        desk.watcher().tick(mourner);
        Ok(Recorder { _watch: watch, _process: process, lanes })
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
    /// Whether anybody has ever opened it.
    is_shared: bool,
}

enum Phase {
    Free,
    Live(Weak<Inner>),
    /// Dropped; who waits for it may still do so.
    Ending,
    /// All lanes have ended; free as soon as no guest has it open.
    Ended,
}

static HOUSES: Mutex<Vec<(u64, Weak<House>)>> = Mutex::new(Vec::new());

fn houses() -> Vec<Arc<House>> {
    let mut all = HOUSES.lock().unwrap_or_else(PoisonError::into_inner);
    all.retain(|(generation, house)| *generation == fork::generation() && house.strong_count() > 0);
    all.iter().filter_map(|(_, house)| house.upgrade()).collect()
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
        HOUSES.lock().unwrap_or_else(PoisonError::into_inner).push((fork::generation(), Arc::downgrade(&house)));
        Ok(house)
    }

    /// The house of this process that a handle names.
    pub(super) fn named(endpoint: &str, generation: [u8; 16]) -> Option<Arc<House>> {
        houses().into_iter().find(|house| house.generation == generation && house.name.as_str() == endpoint)
    }

    fn open(domain: &Domain, device: &Device) -> Result<House> {
        let tag: String = new_generation()[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        let name = EndpointName::new(&format!("events/{tag}"))?;
        let rooms = Arc::new(Rooms { state: Mutex::default(), streams: Arc::default() });
        let at = Address { domain, name: &name, kind: Kind::Events };
        let keeper = Keeper::open(&at, Admission::default(), rooms.clone())?;
        Ok(House {
            home: Home::here(),
            generation: keeper.desk().generation(),
            keeper: Some(keeper),
            rooms,
            watcher: Watcher::of_process()?,
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
        let index = match state.free.pop() {
            Some(index) => index,
            None => state.grow(&self.device)?,
        };
        let slot = &mut state.slots[index as usize];
        slot.phase = Phase::Live(Weak::new());
        slot.spot.forget_latest(slot.serial);
        Ok(Place { index, serial: slot.serial, spot: slot.spot.clone(), raiser: slot.raiser.clone() })
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
            state.slots.drain(..).filter(|slot| slot.is_shared).for_each(|slot| slot.end());
            if state.pages.iter().all(|(words, _)| words.is_last()) { Usage::Over } else { Usage::Held }
        });
    }
}

pub(super) fn passed(proof: &mut Option<Proof>, streams: &Streams) -> bool {
    proof.get_or_insert_with(|| streams.mark()).is_passed()
}

impl Slot {
    fn end(&self) {
        self.spot.lanes().for_each(|lane| lane.end());
    }

    fn is_there(&self, serial: u64) -> bool {
        self.serial == serial && matches!(self.phase, Phase::Live(_))
    }
}

impl State {
    /// One more slot, and a page for it where the others are full.
    fn grow(&mut self, device: &Device) -> Result<u32> {
        let index = self.slots.len();
        if index / EVENTS == self.pages.len() {
            if self.pages.len() == PAGES_MAX {
                return Err(Error::EventLimit { limit: IPC_EVENTS_MAX });
            }
            self.pages.push(Words::create(device)?);
        }
        let (words, index) = (&self.pages[index / EVENTS].0, index as u32);
        self.slots.push(Slot {
            spot: words.spot(index),
            serial: 1,
            phase: Phase::Free,
            raiser: Arc::new(words.raiser(index, 0, 0)),
            guests: HashMap::new(),
            lanes: [None; LANES],
            is_shared: false,
        });
        Ok(index)
    }

    /// A dropped event whose own work is done: whoever still waits for it is let go.
    fn end(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.end();
        slot.phase = Phase::Ended;
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
        self.recorders.values().for_each(|recorder| recorder.lanes.lock().retain(|(event, ..)| *event != index));
        slot.is_shared = false;
        slot.raiser = Arc::new(self.pages[index as usize / EVENTS].0.raiser(index, 0, 0));
        self.vacate(index);
    }

    fn vacate(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.serial += 1;
        slot.phase = Phase::Free;
        self.free.push(index);
    }

    fn open(&mut self, caller: u64, index: u32, serial: u64) -> bool {
        match self.slots.get_mut(index as usize).filter(|slot| slot.is_there(serial)) {
            Some(slot) => {
                slot.is_shared = true;
                *slot.guests.entry(caller).or_default() += 1;
                true
            }
            None => false,
        }
    }

    fn lane(&mut self, desk: &Desk, caller: u64, index: u32, serial: u64) -> Result<LaneOf, Refusal> {
        let known = |slot: &&mut Slot| slot.is_there(serial) && slot.guests.contains_key(&caller);
        let Some(slot) = self.slots.get_mut(index as usize).filter(known) else {
            return Ok(LaneOf::Dropped);
        };
        let is_sound = |lane: Lane| !lane.has_ended() && lane.value() <= FROM_MAX;
        let is_free = |lane: &usize| slot.lanes[*lane].is_none() && is_sound(slot.spot.lane(*lane));
        let Some(number) = (1..LANES).find(is_free) else { return Ok(LaneOf::Full) };
        let recorder = match self.recorders.entry(caller) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => place.insert(Recorder::of(desk, caller)?),
        };
        let lane = slot.spot.lane(number);
        slot.lanes[number] = Some(caller);
        let from = lane.value();
        recorder.lanes.lock().push((index, number, lane));
        Ok(LaneOf::Granted { lane: number as u8, from })
    }

    fn close(&mut self, caller: u64, index: u32, serial: u64, lane: Option<u8>) {
        let Some(slot) = self.slots.get_mut(index as usize).filter(|slot| slot.serial == serial) else { return };
        let Some(count) = slot.guests.get_mut(&caller) else { return };
        *count -= 1;
        if *count == 0 {
            slot.guests.remove(&caller);
        }
        let number = lane.map(usize::from);
        if let Some(holder) = number.and_then(|lane| slot.lanes.get_mut(lane))
            && *holder == Some(caller)
        {
            *holder = None;
            let mourned = self.recorders.get(&caller).map(|recorder| recorder.lanes.lock());
            mourned
                .into_iter()
                .for_each(|mut lanes| lanes.retain(|(event, of, _)| (*event, Some(*of)) != (index, number)));
        }
        self.clear(index);
    }

    /// A visitor is there no more. What a dead one's device had yet to record never comes.
    fn gone(&mut self, caller: u64, ending: Ending) {
        self.recorders.remove(&caller);
        for index in 0..self.slots.len() {
            let slot = &mut self.slots[index];
            if slot.guests.remove(&caller).is_none() {
                continue;
            }
            for (lane, holder) in slot.lanes.iter_mut().enumerate().filter(|(_, holder)| **holder == Some(caller)) {
                if ending == Ending::Died {
                    slot.spot.lane(lane).end();
                }
                *holder = None;
            }
            self.clear(index as u32);
        }
    }
}

impl Rooms {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Keep for Rooms {
    fn admit(&self, _: &Desk, _: &Caller, _: &[u8]) -> Result<Answer, Refusal> {
        Ok(Answer::default())
    }

    fn answer(&self, desk: &Desk, caller: &Caller, body: &[u8]) -> Result<Answer, Refusal> {
        let mut state = self.lock();
        match decode::<Ask>(body, desk.name())? {
            Ask::Page(number) => {
                let page = state.pages.get(number as usize).ok_or_else(|| Refusal("there is no such page".into()))?;
                Answer::new(&PageOf, vec![PrivateFd::duplicate(&page.1)?])
            }
            Ask::Open { index, serial } => Answer::new(&state.open(caller.id, index, serial), vec![]),
            Ask::Lane { index, serial } => Answer::new(&state.lane(desk, caller.id, index, serial)?, vec![]),
            Ask::Close { index, serial, lane } => {
                state.close(caller.id, index, serial, lane);
                Ok(Answer::default())
            }
        }
    }

    fn gone(&self, _: &Desk, caller: &Caller, ending: Ending) {
        self.lock().gone(caller.id, ending);
    }
}
