//! The guest's side: the events of one other process that this one has opened.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use serde::de::DeserializeOwned;

use super::Recording;
use super::handle::{Body, EventHandleFault, fault};
use super::house::{Ask, LaneOf, PageOf, passed};
use super::layout::{EVENTS, FROM_MAX, LANES, PAGES_MAX, Spot, Words};
use crate::device::Device;
use crate::domain::{Domain, EndpointName};
use crate::error::{Error, Result};
use crate::fork::Home;
use crate::fork::own::Own;
use crate::link::proof::Streams;
use crate::link::watcher::{Next, Usage, Watched, Watcher};
use crate::memory::raiser::Raiser;
use crate::rendezvous::{ANSWER_TIMEOUT, Address, Gift, Kind, Visit, Visitor, decode, encode};

/// A visit at another process's events, shared by all that this process has opened of them.
pub(super) struct Lodging {
    home: Home,
    visitor: Option<Visitor>,
    /// What every handle from there says.
    body: Body,
    guestbook: Arc<Guestbook>,
    pages: Mutex<Vec<Option<Words>>>,
    pub(super) streams: Arc<Streams>,
    device: Device,
    watcher: Arc<Watcher>,
}

/// What the watcher looks at, which lets waiting streams go.
#[derive(Default)]
struct Guestbook {
    opened: Mutex<Vec<(u64, Spot)>>,
    next: AtomicU64,
    is_over: AtomicBool,
    is_dead: AtomicBool,
    lodging: OnceLock<Weak<Lodging>>,
}

/// An event that was opened.
pub(super) struct Opened {
    pub(super) spot: Spot,
    /// In the guestbook.
    pub(super) entry: u64,
}

static LODGINGS: Own<Mutex<Vec<Weak<Lodging>>>> = Own::new();

impl Lodging {
    /// The visit at the process that a handle names; begun if there is none.
    pub(super) fn at(body: &Body, domain: &Domain, device: &Device) -> Result<Arc<Lodging>> {
        if let Some(lodging) = Lodging::known(body, device) {
            return Ok(lodging);
        }
        let lodging = Lodging::visit(body, domain, device)?;
        LODGINGS.lock().push(Arc::downgrade(&lodging));
        Ok(lodging)
    }

    pub(super) fn visit(body: &Body, domain: &Domain, device: &Device) -> Result<Arc<Lodging>> {
        let name = EndpointName::new(&body.endpoint)?;
        let at = Address { domain, name: &name, kind: Kind::Events };
        let (visitor, _) = Visitor::attach(&at, Some(device.info().id), &[], Duration::ZERO)?;
        if visitor.generation() != body.generation {
            return Err(fault(EventHandleFault::Dropped));
        }
        let guestbook = Arc::new(Guestbook::default());
        visitor.listen(guestbook.clone())?;
        let watcher = visitor.watcher().clone();
        watcher.tick(Arc::downgrade(&guestbook) as Weak<dyn Watched>);
        let lodging = Arc::new(Lodging {
            home: Home::here(),
            visitor: Some(visitor),
            body: Body { ipc: None, domain: domain.path().to_path_buf(), ..body.clone() },
            guestbook,
            pages: Mutex::default(),
            streams: Arc::default(),
            device: device.clone(),
            watcher,
        });
        let _ = lodging.guestbook.lodging.set(Arc::downgrade(&lodging));
        Ok(lodging)
    }

    fn known(body: &Body, device: &Device) -> Option<Arc<Lodging>> {
        let mut all = LODGINGS.lock();
        all.retain(|lodging| lodging.strong_count() > 0);
        let all: Vec<_> = all.iter().filter_map(Weak::upgrade).collect();
        all.into_iter().find(|lodging| {
            lodging.body.generation == body.generation
                && lodging.body.endpoint == body.endpoint
                && Arc::ptr_eq(lodging.device.backend(), device.backend())
                && !lodging.is_over()
        })
    }

    fn visitor(&self) -> &Visitor {
        self.visitor.as_ref().expect("present until dropped")
    }

    fn ask<T: DeserializeOwned>(&self, ask: &Ask) -> Result<T> {
        let gift = self.visitor().ask(&encode(ask)?, ANSWER_TIMEOUT)?;
        Ok(gift.open::<T, 0>(self.visitor().name())?.0)
    }

    /// Opens an event: from here on its place is not used for another.
    pub(super) fn open(&self, index: u32, serial: u64) -> Result<Opened> {
        if index as usize >= EVENTS * PAGES_MAX {
            return Err(fault(EventHandleFault::Dropped));
        }
        // The page first: its maker tells us there of the event from the moment that we have it open.
        let words = match self.page(index as usize / EVENTS) {
            // There is no such page, so no such event.
            Err(Error::Refused { .. }) => return Err(fault(EventHandleFault::Dropped)),
            words => words?,
        };
        if !self.ask::<bool>(&Ask::Open { index, serial })? {
            return Err(fault(EventHandleFault::Dropped));
        }
        let (spot, book) = (words.spot(index), &self.guestbook);
        let entry = book.next.fetch_add(1, SeqCst);
        book.lock().push((entry, spot.clone()));
        // First in the book, then the look: `proven_dead` does it the other way round.
        if book.is_dead.load(SeqCst) {
            spot.lanes().for_each(|lane| lane.end());
        }
        Ok(Opened { spot, entry })
    }

    /// A lane to record on.
    pub(super) fn lane(&self, index: u32, serial: u64) -> Result<(usize, Arc<Raiser>)> {
        match self.ask::<LaneOf>(&Ask::Lane { index, serial })? {
            LaneOf::Granted { lane, from, .. } if (1..LANES).contains(&usize::from(lane)) && from <= FROM_MAX => {
                let lane = usize::from(lane);
                let raiser = self.page(index as usize / EVENTS)?.raiser(index, lane, from);
                Ok((lane, Arc::new(raiser)))
            }
            LaneOf::Granted { lane, from, .. } => Err(Error::Protocol {
                name: self.name().to_string(),
                field: "lane",
                found: format!("{lane} at {from}"),
                allowed: format!("1 to {}, at 0 to {FROM_MAX}", LANES - 1),
            }),
            LaneOf::Full => {
                let text = format!(
                    "event {index} has been recorded by {} openings of other processes; make another event",
                    LANES - 1
                );
                Err(Error::Refused { name: self.name().to_string(), text })
            }
            LaneOf::Dropped => Err(self.dropped()),
        }
    }

    /// Has the maker tell the event's other users of what we have recorded.
    pub(super) fn tell(&self, index: u32, serial: u64, recording: Recording, now_ns: u64) -> Result<()> {
        let Recording { lane, count } = recording;
        self.ask::<()>(&Ask::Recorded { index, serial, lane: lane as u8, count, now_ns })
    }

    fn page(&self, number: usize) -> Result<Words> {
        let mut pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Some(words)) = pages.get(number) {
            return Ok(words.clone());
        }
        let gift = self.visitor().ask(&encode(&Ask::Page(number as u32))?, ANSWER_TIMEOUT)?;
        let (PageOf, [fd]) = gift.open::<PageOf, 1>(self.name())?;
        let words = Words::share(&self.device, fd, self.name())?;
        if let Err(error) = self.visitor().ask(&encode(&Ask::Sealed(number as u32))?, ANSWER_TIMEOUT) {
            // Not dropped here: to unregister memory, a driver may wait for a stream that waits for a peer.
            self.watcher.bury(Box::new(words));
            return Err(error);
        }
        if pages.len() <= number {
            pages.resize(number + 1, None);
        }
        pages[number] = Some(words.clone());
        Ok(words)
    }

    /// The last of an event that was opened. What its streams still do with it keeps it open.
    pub(super) fn close(self: &Arc<Self>, entry: u64, index: u32, serial: u64, lane: Option<usize>) {
        let lane = lane.map(|lane| lane as u8);
        let Ok(close) = encode(&Ask::Close { index, serial, lane }) else { return };
        let (lodging, mut proof) = (self.clone(), None);
        self.watcher.retire(move || {
            if !passed(&mut proof, &lodging.streams) {
                return Usage::Busy;
            }
            if let Err(Error::Timeout { .. }) = lodging.visitor().post(&close) {
                // Its maker does not read its socket.
                return Usage::Held;
            }
            lodging.guestbook.lock().retain(|(known, _)| *known != entry);
            Usage::Over
        });
    }

    /// Tells the maker something without waiting for it, as soon as it reads its socket.
    fn post_soon(self: &Arc<Self>, ask: &Ask) {
        let Ok(body) = encode(ask) else { return };
        let lodging = self.clone();
        self.watcher.retire(move || match lodging.visitor().post(&body) {
            Err(Error::Timeout { .. }) => Usage::Held,
            _ => Usage::Over,
        });
    }

    /// Asks, and does not wait for the answer.
    #[cfg(test)]
    pub(super) fn ask_and_give_up(&self, ask: &Ask) {
        let question = encode(ask).unwrap();
        if let Ok(gift) = self.visitor().ask(&question, Duration::ZERO) {
            self.guestbook.late(&question, gift);
        }
    }

    /// What names one of its events.
    pub(super) fn body(&self, index: u32, serial: u64) -> Body {
        Body { index, serial, ..self.body.clone() }
    }

    pub(super) fn name(&self) -> &str {
        self.visitor().name()
    }

    /// Whether the maker is there no more.
    pub(super) fn is_over(&self) -> bool {
        self.guestbook.is_over.load(SeqCst)
    }

    /// Whether it is proven dead.
    pub(super) fn is_dead(&self) -> bool {
        self.guestbook.is_dead.load(SeqCst) || self.is_over() && self.visitor().is_dead()
    }

    /// The error of a maker that is there no more, or is not within `limit`.
    pub(super) fn owner_gone_within(&self, limit: Duration) -> Option<Error> {
        self.visitor().ends_within(limit).then(|| self.owner_gone())
    }

    pub(super) fn owner_gone(&self) -> Error {
        self.visitor().owner_gone()
    }

    /// The error of who records an event whose maker has dropped it.
    pub(super) fn dropped(&self) -> Error {
        if self.is_over() {
            return self.owner_gone();
        }
        let (name, pid) = (self.name().to_string(), self.visitor().pid());
        Error::OwnerGone { kind: Kind::Events, name, pid, graceful: true }
    }
}

impl Drop for Lodging {
    fn drop(&mut self) {
        let pages = std::mem::take(self.pages.get_mut().unwrap_or_else(PoisonError::into_inner));
        if !self.home.is_here() {
            return std::mem::forget((self.visitor.take(), pages, self.guestbook.clone()));
        }
        // Every event of it has been closed, each behind its streams' work.
        drop(self.visitor.take());
        self.watcher.retire(move || if pages.iter().flatten().all(Words::is_last) { Usage::Over } else { Usage::Held });
    }
}

impl Guestbook {
    fn lock(&self) -> MutexGuard<'_, Vec<(u64, Spot)>> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What gives back what a question has brought too late.
fn give_back(question: &[u8], gift: &Gift) -> Option<Ask> {
    let of = "events";
    match decode(question, of).ok()? {
        Ask::Open { index, serial } => {
            decode(&gift.body, of).is_ok_and(|opened: bool| opened).then_some(Ask::Close { index, serial, lane: None })
        }
        Ask::Lane { index, serial } => match decode(&gift.body, of).ok()? {
            LaneOf::Granted { lane, grant, .. } => Some(Ask::Return { index, serial, lane, grant }),
            LaneOf::Full | LaneOf::Dropped => None,
        },
        _ => None,
    }
}

impl Visit for Guestbook {
    fn late(&self, question: &[u8], gift: Gift) {
        // A visit that ends gives everything back.
        let lodging = self.lodging.get().and_then(Weak::upgrade);
        if let Some((lodging, back)) = lodging.zip(give_back(question, &gift)) {
            lodging.post_soon(&back);
        }
    }

    fn ended(&self, _graceful: bool) {
        self.is_over.store(true, SeqCst);
    }

    fn orphaned(&self) {
        self.proven_dead();
    }

    /// An event ends with its maker: also what a third process has yet to record on it, of whose death nobody would
    /// tell us any more.
    fn proven_dead(&self) {
        self.is_over.store(true, SeqCst);
        self.is_dead.store(true, SeqCst);
        self.lock().iter().flat_map(|(_, spot)| spot.lanes()).for_each(|lane| lane.end());
    }
}

impl Watched for Guestbook {
    fn on_ready(&self, _: u64) -> Next {
        Next::Stop
    }

    /// What a device still wrote after the end stands below it.
    fn on_tick(&self, _: u64) {
        let book = self.lock();
        let lanes = book.iter().flat_map(|(_, spot)| (0..LANES).map(|lane| spot.lane(lane)));
        lanes.filter(|lane| lane.has_ended()).for_each(|lane| lane.end());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_dead_makers_device_signals_after_its_events_end_keeps_nobody_waiting() {
        let device = Device::host();
        let (makers, guests) = (Words::create(&device).unwrap(), Words::create(&device).unwrap());
        let (spot, streams) = (guests.spot(7), Streams::default());
        let (stream, late) = (device.stream().unwrap(), device.stream().unwrap());
        let book = Guestbook::default();
        book.lock().push((0, spot.clone()));
        let maker = makers.raiser(7, 0, 0);
        assert!(maker.add(1, &spot.lane(0)));
        book.proven_dead();
        // The word is set back, below what others wait for.
        maker.raise(&late, &streams, |last| Ok(last + 1)).unwrap();
        late.synchronize(ANSWER_TIMEOUT).unwrap();
        spot.lane(0).wait(&stream, 2, &streams).unwrap();
        assert!(!stream.is_idle().unwrap());
        book.on_tick(0);
        stream.synchronize(ANSWER_TIMEOUT).unwrap();
    }
}
