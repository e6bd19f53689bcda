//! The importer's side: events of one other process that this process has opened.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use serde::de::DeserializeOwned;

use super::Recording;
use super::event_table::{EventRequest, LaneReply, PageReply};
use super::handle::{HandleBody, fault};
use super::layout::{EVENTS_PER_PAGE, EventPage, EventWords, FROM_MAX, LANES_PER_EVENT, PAGES_MAX};
use crate::device::Device;
use crate::error::{Error, EventHandleFault, Result};
use crate::fork::per_process::PerProcess;
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::{
    Address, ClientSession, IncomingReply, Kind, REPLY_TIMEOUT, SessionObserver, decode, encode,
};
use crate::runtime::fence::{Fence, StreamSet};
use crate::runtime::reactor::{DropReadiness, EventSource, Next, Reactor};
use crate::shm::signaler::Signaler;
use crate::wait::Wait;

/// The session with another process's events, shared by all events that this process has opened
/// there.
pub(super) struct EventImporter {
    /// Every event has been closed, each behind its streams' work, when this is dropped.
    session: ClientSession,
    /// The part that all handles from that exporter have in common.
    body: HandleBody,
    open_events: Arc<OpenEvents>,
    pages: Mutex<Vec<Option<EventPage>>>,
    pub(super) streams: Arc<StreamSet>,
    device: Device,
    reactor: Arc<Reactor>,
}

/// The open events that the reactor checks; it releases waiting streams at the exporter's death.
#[derive(Default)]
struct OpenEvents {
    opened: Mutex<Vec<(u64, EventWords)>>,
    next_id: AtomicU64,
    importer: OnceLock<Weak<EventImporter>>,
}

/// An event that was opened.
pub(super) struct OpenedEvent {
    pub(super) event_words: EventWords,
    /// The key in the table of open events.
    pub(super) open_id: u64,
}

static IMPORTERS: PerProcess<Mutex<Vec<Weak<EventImporter>>>> = PerProcess::new();

impl EventImporter {
    /// The session with the process that a handle names; opened if there is none.
    pub(super) fn for_body(
        body: &HandleBody,
        domain: &Domain,
        device: &Device,
    ) -> Result<Arc<EventImporter>> {
        if let Some(importer) = EventImporter::known(body, device) {
            return Ok(importer);
        }
        let importer = EventImporter::connect(body, domain, device)?;
        IMPORTERS.lock().push(Arc::downgrade(&importer));
        Ok(importer)
    }

    pub(super) fn connect(
        body: &HandleBody,
        domain: &Domain,
        device: &Device,
    ) -> Result<Arc<EventImporter>> {
        let name = EndpointName::new(&body.endpoint)?;
        let at = Address {
            domain,
            name: &name,
            kind: Kind::Events,
        };
        let (session, _) = ClientSession::attach(&at, Some(device.info().id), &[], Duration::ZERO)?;
        if session.generation() != body.generation {
            return Err(fault(EventHandleFault::Dropped));
        }
        let open_events = Arc::new(OpenEvents::default());
        session.observe(open_events.clone())?;
        let reactor = session.reactor().clone();
        reactor.register_ticks(Arc::downgrade(&open_events) as Weak<dyn EventSource>);
        let importer = Arc::new(EventImporter {
            session,
            body: HandleBody {
                ipc: None,
                domain: domain.path().to_path_buf(),
                ..body.clone()
            },
            open_events,
            pages: Mutex::default(),
            streams: Arc::default(),
            device: device.clone(),
            reactor,
        });
        let _ = importer.open_events.importer.set(Arc::downgrade(&importer));
        Ok(importer)
    }

    fn known(body: &HandleBody, device: &Device) -> Option<Arc<EventImporter>> {
        let mut all = IMPORTERS.lock();
        all.retain(|importer| importer.strong_count() > 0);
        let all: Vec<_> = all.iter().filter_map(Weak::upgrade).collect();
        all.into_iter().find(|importer| {
            importer.body.generation == body.generation
                && importer.body.endpoint == body.endpoint
                && Arc::ptr_eq(importer.device.backend(), device.backend())
                && !importer.is_over()
        })
    }

    fn ask<T: DeserializeOwned>(&self, ask: &EventRequest) -> Result<T> {
        self.ask_within(ask, REPLY_TIMEOUT.into())
    }

    fn ask_within<T: DeserializeOwned>(&self, ask: &EventRequest, wait: Wait<'_>) -> Result<T> {
        let incoming = self.session.request(&encode(ask)?, wait)?;
        Ok(incoming.open::<T, 0>(self.session.name())?.0)
    }

    /// Opens an event: from here on its slot is not reused.
    pub(super) fn open(&self, index: u32, serial: u64) -> Result<OpenedEvent> {
        if index as usize >= EVENTS_PER_PAGE * PAGES_MAX {
            return Err(fault(EventHandleFault::Dropped));
        }
        // The page comes first: the exporter reports the event there from the moment of the
        // opening.
        let event_page = match self.page(index as usize / EVENTS_PER_PAGE) {
            // A page that does not exist has no such event.
            Err(Error::Refused { .. }) => return Err(fault(EventHandleFault::Dropped)),
            event_page => event_page?,
        };
        if !self.ask::<bool>(&EventRequest::Open { index, serial })? {
            return Err(fault(EventHandleFault::Dropped));
        }
        let (event_words, open) = (event_page.event_words(index), &self.open_events);
        let open_id = open.next_id.fetch_add(1, SeqCst);
        open.lock().push((open_id, event_words.clone()));
        // Insert first, then check: at the exporter's death these happen in the opposite order.
        if self.session.is_dead() {
            event_words.lanes().for_each(|lane| lane.end());
        }
        Ok(OpenedEvent {
            event_words,
            open_id,
        })
    }

    /// Requests a lane for recording.
    pub(super) fn lane(
        &self,
        index: u32,
        serial: u64,
        wait: &Wait<'_>,
    ) -> Result<(usize, Arc<Signaler>)> {
        let wait = wait.no_longer_than(REPLY_TIMEOUT);
        match self.ask_within(&EventRequest::Lane { index, serial }, wait)? {
            LaneReply::Granted { lane, from, .. }
                if (1..LANES_PER_EVENT).contains(&usize::from(lane)) && from <= FROM_MAX =>
            {
                let lane = usize::from(lane);
                let signaler = self
                    .page(index as usize / EVENTS_PER_PAGE)?
                    .signaler(index, lane, from);
                Ok((lane, Arc::new(signaler)))
            }
            LaneReply::Granted { lane, from, .. } => Err(Error::Protocol {
                name: self.name().to_string(),
                field: "lane",
                found: format!("{lane} at {from}"),
                allowed: format!("1 to {}, at 0 to {FROM_MAX}", LANES_PER_EVENT - 1),
            }),
            LaneReply::Full => {
                let text = format!(
                    "event {index} has been recorded by {} openings of other processes; make another event",
                    LANES_PER_EVENT - 1
                );
                Err(Error::Refused {
                    name: self.name().to_string(),
                    text,
                })
            }
            LaneReply::Dropped => Err(self.dropped()),
        }
    }

    /// Has the exporter forward this importer's recording to the event's other users.
    pub(super) fn send_recording(
        &self,
        index: u32,
        serial: u64,
        recording: Recording,
        now_ns: u64,
    ) -> Result<()> {
        let Recording { lane, count } = recording;
        self.ask::<()>(&EventRequest::Recorded {
            index,
            serial,
            lane: lane as u8,
            count,
            now_ns,
        })
    }

    fn page(&self, number: usize) -> Result<EventPage> {
        let mut pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Some(event_page)) = pages.get(number) {
            return Ok(event_page.clone());
        }
        let incoming = self
            .session
            .request(&encode(&EventRequest::Page(number as u32))?, REPLY_TIMEOUT)?;
        let (PageReply, [fd]) = incoming.open::<PageReply, 1>(self.name())?;
        let event_page = EventPage::share(&self.device, fd, self.name())?;
        self.session.request(
            &encode(&EventRequest::Sealed(number as u32))?,
            REPLY_TIMEOUT,
        )?;
        if pages.len() <= number {
            pages.resize(number + 1, None);
        }
        pages[number] = Some(event_page.clone());
        Ok(event_page)
    }

    /// Closes an opened event. Pending work of its streams keeps it open.
    pub(super) fn close(
        self: &Arc<Self>,
        open_id: u64,
        index: u32,
        serial: u64,
        lane: Option<usize>,
    ) {
        let lane = lane.map(|lane| lane as u8);
        let Ok(close) = encode(&EventRequest::Close {
            index,
            serial,
            lane,
        }) else {
            return;
        };
        let (importer, mut fence) = (self.clone(), Fence::later(self.streams.clone()));
        self.reactor.drop_after(move || {
            if !fence.is_reached() {
                return DropReadiness::Busy;
            }
            if let Err(Error::Timeout { .. }) = importer.session.post(&close) {
                // The exporter does not read its socket.
                return DropReadiness::Held;
            }
            importer
                .open_events
                .lock()
                .retain(|(known, _)| *known != open_id);
            DropReadiness::Ready
        });
    }

    /// Sends a request to the exporter as soon as its socket has room, without waiting.
    fn post_deferred(self: &Arc<Self>, ask: &EventRequest) {
        let Ok(body) = encode(ask) else { return };
        let importer = self.clone();
        self.reactor
            .drop_after(move || match importer.session.post(&body) {
                Err(Error::Timeout { .. }) => DropReadiness::Held,
                _ => DropReadiness::Ready,
            });
    }

    /// Sends a request and does not wait for the answer.
    #[cfg(test)]
    pub(super) fn ask_and_give_up(&self, ask: &EventRequest) {
        let question = encode(ask).unwrap();
        if let Ok(incoming) = self.session.request(&question, Duration::ZERO) {
            self.open_events.on_stale_reply(&question, incoming);
        }
    }

    /// The handle's contents for one of the exporter's events.
    pub(super) fn body(&self, index: u32, serial: u64) -> HandleBody {
        HandleBody {
            index,
            serial,
            ..self.body.clone()
        }
    }

    pub(super) fn name(&self) -> &str {
        self.session.name()
    }

    /// Whether the exporter is gone.
    pub(super) fn is_over(&self) -> bool {
        self.session.is_over()
    }

    /// Whether the exporter is proven dead.
    pub(super) fn is_dead(&self) -> bool {
        self.session.is_over() && self.session.is_dead()
    }

    /// The error for an exporter that is gone, or ends within `limit`.
    pub(super) fn owner_gone_within(&self, limit: Duration) -> Option<Error> {
        self.session.ends_within(limit).then(|| self.owner_gone())
    }

    pub(super) fn owner_gone(&self) -> Error {
        self.session.owner_gone()
    }

    /// The error of a recording on an event that its exporter has dropped.
    pub(super) fn dropped(&self) -> Error {
        if self.is_over() {
            return self.owner_gone();
        }
        let (name, pid) = (self.name().to_string(), self.session.pid());
        Error::peer_gone(Kind::Events, name, pid, true)
    }
}

impl OpenEvents {
    fn lock(&self) -> MutexGuard<'_, Vec<(u64, EventWords)>> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The request that undoes a grant which arrives too late.
fn undo_request(question: &[u8], incoming: &IncomingReply) -> Option<EventRequest> {
    let of = "events";
    match decode(question, of).ok()? {
        EventRequest::Open { index, serial } => decode(&incoming.body, of)
            .is_ok_and(|opened: bool| opened)
            .then_some(EventRequest::Close {
                index,
                serial,
                lane: None,
            }),
        EventRequest::Lane { index, serial } => match decode(&incoming.body, of).ok()? {
            LaneReply::Granted { lane, grant, .. } => Some(EventRequest::Return {
                index,
                serial,
                lane,
                grant,
            }),
            LaneReply::Full | LaneReply::Dropped => None,
        },
        _ => None,
    }
}

impl SessionObserver for OpenEvents {
    fn on_stale_reply(&self, question: &[u8], incoming: IncomingReply) {
        // The end of the session returns everything.
        let importer = self.importer.get().and_then(Weak::upgrade);
        if let Some((importer, back)) = importer.zip(undo_request(question, &incoming)) {
            importer.post_deferred(&back);
        }
    }

    /// An event ends with its exporter. This includes recordings of third processes: their deaths
    /// would go unreported from now on.
    fn on_orphaned(&self) {
        self.lock()
            .iter()
            .flat_map(|(_, event_words)| event_words.lanes())
            .for_each(|lane| lane.end());
    }
}

impl EventSource for OpenEvents {
    fn on_ready(&self, _: u64) -> Next {
        Next::Stop
    }

    /// Ends the lanes again: a device may have written lower values after the end.
    fn on_tick(&self, _: u64) {
        let open = self.lock();
        let lanes = open
            .iter()
            .flat_map(|(_, event_words)| (0..LANES_PER_EVENT).map(|lane| event_words.lane(lane)));
        lanes
            .filter(|lane| lane.has_ended())
            .for_each(|lane| lane.end());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_of_a_dead_exporters_device_after_its_events_end_block_no_stream() {
        let device = Device::host();
        let (exporters, importers) = (
            EventPage::create(&device).unwrap(),
            EventPage::create(&device).unwrap(),
        );
        let (event_words, streams) = (importers.event_words(7), StreamSet::default());
        let (stream, late) = (device.stream().unwrap(), device.stream().unwrap());
        let open = OpenEvents::default();
        open.lock().push((0, event_words.clone()));
        let maker = exporters.signaler(7, 0, 0);
        assert!(maker.add(1, &event_words.lane(0)));
        open.on_orphaned();
        // The word is set back, below the value that other streams wait for.
        maker.raise(&late, &streams, |last| Ok(last + 1)).unwrap();
        late.synchronize(REPLY_TIMEOUT).unwrap();
        event_words.lane(0).wait(&stream, 2, &streams).unwrap();
        assert!(!stream.is_idle().unwrap());
        open.on_tick(0);
        stream.synchronize(REPLY_TIMEOUT).unwrap();
    }
}
