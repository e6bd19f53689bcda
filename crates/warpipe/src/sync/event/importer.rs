//! The importer's side: events of one other process that this process has opened.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use serde::de::DeserializeOwned;

use super::event_table::{EventRequest, PageRequest};
use super::handle::{HandleBody, fault};
use super::layout::{
    EVENTS_PER_PAGE, EventPage, EventWords, FROM_MAX, LANES_PER_EVENT, PAGE_BYTES, PAGES_MAX,
};
use super::{EventState, Recording};
use crate::device::Device;
use crate::error::{Error, HandleFault, Result};
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::{
    Address, ClientSession, IncomingReply, Kind, REPLY_TIMEOUT, SessionObserver, decode, encode,
};
use crate::memory::mapped_region::ImportKey;
use crate::memory::weak_cache::WeakCache;
use crate::mutex::LockUnpoisoned;
use crate::runtime::fence::{Fence, StreamSet};
use crate::runtime::reactor::{DropReadiness, EventSource, Reactor};
use crate::runtime::timed_lock::TimedLock;
use crate::shm::counter::SharedCounter;
use crate::shm::signaller::Signaller;
use crate::sync::pair;
use crate::wait::Wait;

/// The least time for the grant of a lane, which a living exporter answers at once.
const LANE_WAIT_MIN: Duration = Duration::from_secs(1);

/// The session with another process's events, shared by all events that this process has opened
/// there.
pub(super) struct EventImporter {
    /// Every event has been closed, each behind its streams' work, when this is dropped.
    pub(super) session: ClientSession,
    /// The part that all handles from that exporter have in common.
    body: HandleBody,
    open_events: Arc<OpenEvents>,
    pages: Mutex<Vec<Option<EventPage>>>,
    /// Held while a page is shared: a second one would take the place of the first.
    sharing: TimedLock,
    pub(super) streams: Arc<StreamSet>,
    device: Device,
    reactor: Arc<Reactor>,
}

/// The open events that the reactor checks; it releases waiting streams at the exporter's death.
#[derive(Default)]
struct OpenEvents {
    /// By index and serial number.
    opened: Mutex<HashMap<(u32, u64), OpenEvent>>,
    importer: OnceLock<Weak<EventImporter>>,
}

struct OpenEvent {
    page: EventPage,
    state: Arc<EventState>,
    /// The handles that this process has opened, and dropped ones with streams that are not past
    /// it.
    users: u32,
}

static IMPORTERS: WeakCache<ImportKey, EventImporter> = WeakCache::new();

impl EventImporter {
    /// The session with the process that a handle names; opened if there is none.
    pub(super) fn for_body(
        body: &HandleBody,
        domain: &Domain,
        device: &Device,
        wait: &Wait<'_>,
    ) -> Result<Arc<EventImporter>> {
        let key = ImportKey::new(domain.owner(), body.generation, Kind::Events as u64, device);
        let is_good = |known: &EventImporter| {
            known.body.endpoint == body.endpoint && !known.session.is_over()
        };
        let connect = || EventImporter::connect(body, domain, device, wait);
        IMPORTERS.get_or(&key, is_good, connect)
    }

    pub(super) fn connect(
        body: &HandleBody,
        domain: &Domain,
        device: &Device,
        wait: &Wait<'_>,
    ) -> Result<Arc<EventImporter>> {
        let name = EndpointName::new(&body.endpoint)?;
        let at = Address {
            domain,
            name: &name,
            kind: Kind::Events,
        };
        // The name of a handle is there, or gone for good.
        let now = wait.cancellable_within(Duration::ZERO);
        let (session, _) = ClientSession::attach(&at, Some(device.info().id), &[], now)?;
        if session.generation() != body.generation {
            return Err(fault(HandleFault::Dropped));
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
            sharing: TimedLock::default(),
            streams: Arc::default(),
            device: device.clone(),
            reactor,
        });
        let _ = importer.open_events.importer.set(Arc::downgrade(&importer));
        Ok(importer)
    }

    fn ask<'w, T: DeserializeOwned>(
        &self,
        ask: &EventRequest,
        wait: impl Into<Wait<'w>>,
    ) -> Result<T> {
        let incoming = self.session.request(&encode(ask)?, wait)?;
        Ok(incoming.open::<T, 0>(self.session.name())?.0)
    }

    /// Opens an event: from here on its slot is not reused.
    pub(super) fn open(
        self: &Arc<Self>,
        index: u32,
        serial: u64,
        wait: &Wait<'_>,
    ) -> Result<Arc<EventState>> {
        if index as usize >= EVENTS_PER_PAGE * PAGES_MAX {
            return Err(fault(HandleFault::Dropped));
        }
        // The page comes first: the exporter reports the event there from the moment of the
        // opening.
        let event_page = match self.page(index as usize / EVENTS_PER_PAGE, wait) {
            // A page that does not exist has no such event.
            Err(Error::Refused { denied: false, .. }) => return Err(fault(HandleFault::Dropped)),
            event_page => event_page?,
        };
        let wait = wait.cancellable_within(REPLY_TIMEOUT);
        if !self.ask::<bool>(&EventRequest::Open { index, serial }, wait)? {
            return Err(fault(HandleFault::Dropped));
        }
        let mut opened = self.open_events.opened.locked();
        if let Some(open) = opened.get_mut(&(index, serial)) {
            open.users += 1;
            // Its exporter counts it once for this process.
            self.post_deferred(&EventRequest::Close { index, serial });
            return Ok(open.state.clone());
        }
        let state = Arc::new(EventState::new(
            index,
            serial,
            event_page.event_words(index),
        ));
        let open = OpenEvent {
            page: event_page,
            state: state.clone(),
            users: 1,
        };
        opened.insert((index, serial), open);
        drop(opened);
        // Insert first, then check: at the exporter's death these happen in the opposite order.
        if self.session.is_dead() {
            state.event_words.lanes().for_each(|lane| lane.end());
        }
        Ok(state)
    }

    /// This process's lane for recording an event, which the exporter grants first. It is the same
    /// one each time until the event is closed.
    pub(super) fn lane<'s>(
        &self,
        state: &'s EventState,
        wait: &Wait<'_>,
    ) -> Result<&'s (usize, Arc<Signaller>)> {
        let (index, key) = (state.index, (state.index, state.serial));
        let opened = self.open_events.opened.locked();
        let page = opened.get(&key).map(|open| open.page.clone());
        drop(opened);
        let page = page.ok_or_else(|| self.dropped())?;
        let limit = wait.time_left().clamp(LANE_WAIT_MIN, REPLY_TIMEOUT);
        let wait = wait.cancellable_within(limit);
        let granted: Option<(u8, u64)> = self.ask(&EventRequest::Lane { index }, wait)?;
        let (lane, from) = granted.ok_or_else(|| self.dropped())?;
        let number = usize::from(lane);
        if !(1..LANES_PER_EVENT).contains(&number) || from > FROM_MAX {
            let found = format!("{lane} at {from}");
            let allowed = format!("1 to {}, at 0 to {FROM_MAX}", LANES_PER_EVENT - 1);
            return Err(Error::protocol(self.session.name(), "lane", found, allowed));
        }
        // Before anything is recorded there: another thread's grant has the same count.
        let start = || (number, Arc::new(page.signaller(index, number, from)));
        Ok(state.lane.get_or_init(start))
    }

    /// Has the exporter forward this importer's recording to the event's other users.
    pub(super) fn send_recording(
        &self,
        index: u32,
        recording: Recording,
        now_ns: u64,
    ) -> Result<()> {
        let Recording { lane, count } = recording;
        let lane = lane as u8;
        let recorded = EventRequest::Recorded {
            index,
            lane,
            count,
            now_ns,
        };
        self.ask(&recorded, REPLY_TIMEOUT)
    }

    fn page(&self, number: usize, wait: &Wait<'_>) -> Result<EventPage> {
        let known = || self.pages.locked().get(number).cloned().flatten();
        if let Some(event_page) = known() {
            return Ok(event_page);
        }
        let turn = wait.cancellable_within(REPLY_TIMEOUT);
        let _sharing = (self.sharing.lock(turn, String::new))
            .map_err(|_| Error::timeout("another thread's opening of an event", REPLY_TIMEOUT))?;
        if let Some(event_page) = known() {
            return Ok(event_page);
        }
        let request = PageRequest(number as u32);
        let answer = wait.cancellable_within(REPLY_TIMEOUT);
        let page = pair::share(&self.session, &self.device, PAGE_BYTES, &request, answer)?;
        let event_page = EventPage::of_importer(&self.device, page)?;
        let mut pages = self.pages.locked();
        if pages.len() <= number {
            pages.resize(number + 1, None);
        }
        pages[number] = Some(event_page.clone());
        Ok(event_page)
    }

    /// Closes a handle of an opened event. Pending work of its streams keeps it open.
    pub(super) fn close(self: &Arc<Self>, index: u32, serial: u64) {
        let Ok(close) = encode(&EventRequest::Close { index, serial }) else {
            return;
        };
        let (importer, mut fence) = (self.clone(), Fence::later(self.streams.clone()));
        self.reactor.drop_after(move || {
            if !fence.is_reached() {
                return DropReadiness::Busy;
            }
            let mut opened = importer.open_events.opened.locked();
            let users = opened.get_mut(&(index, serial)).map(|open| &mut open.users);
            match users {
                Some(users) if *users > 1 => *users -= 1,
                _ => {
                    if importer.post(&close) == DropReadiness::Held {
                        return DropReadiness::Held;
                    }
                    opened.remove(&(index, serial));
                }
            }
            DropReadiness::Ready
        });
    }

    /// Sends a request without waiting. It is `Held` while the exporter does not read its socket,
    /// or the kernel lacks memory for a message.
    fn post(&self, body: &[u8]) -> DropReadiness {
        match self.session.post(body) {
            Err(Error::Timeout { .. } | Error::Os { .. }) => DropReadiness::Held,
            _ => DropReadiness::Ready,
        }
    }

    /// Sends a request to the exporter as soon as it can be sent, without waiting.
    fn post_deferred(self: &Arc<Self>, ask: &EventRequest) {
        let Ok(body) = encode(ask) else { return };
        let importer = self.clone();
        self.reactor.drop_after(move || importer.post(&body));
    }

    /// Sends a request and does not wait for the answer.
    #[cfg(test)]
    pub(super) fn ask_and_give_up(&self, ask: &EventRequest) {
        let question = encode(ask).unwrap();
        if let Ok(incoming) = self.session.request(&question, Duration::ZERO) {
            self.open_events.on_stale_reply(&question, incoming);
        }
    }

    /// Sends a page and does not wait for the answer.
    #[cfg(test)]
    pub(super) fn share_page_and_give_up(&self, number: u32) {
        use std::os::fd::AsFd;
        let draft = crate::shm::page::UnsealedPage::create(PAGE_BYTES).unwrap();
        let request = encode(&PageRequest(number)).unwrap();
        let _ = (self.session).request_with(&request, Some(draft.as_fd()), Duration::ZERO);
    }

    /// The handle's contents for one of the exporter's events.
    pub(super) fn body(&self, index: u32, serial: u64) -> HandleBody {
        HandleBody {
            index,
            serial,
            ..self.body.clone()
        }
    }

    /// Whether the exporter is proven dead.
    pub(super) fn is_dead(&self) -> bool {
        self.session.is_over() && self.session.is_dead()
    }

    /// The error of a recording on an event that its exporter has dropped.
    pub(super) fn dropped(&self) -> Error {
        if self.session.is_over() {
            return self.session.owner_gone();
        }
        let (name, pid) = (self.session.name().to_string(), self.session.pid());
        Error::peer_gone(Kind::Events, name, pid, true)
    }
}

impl OpenEvents {
    fn for_each_lane(&self, act: impl FnMut(SharedCounter)) {
        let opened = self.opened.locked();
        let words = opened.values().map(|open| &open.state.event_words);
        words.flat_map(EventWords::lanes).for_each(act);
    }
}

impl SessionObserver for OpenEvents {
    /// An opening that was granted too late is undone. The end of the session returns a lane.
    fn on_stale_reply(&self, question: &[u8], incoming: IncomingReply) {
        let importer = self.importer.get().and_then(Weak::upgrade);
        if let (Some(importer), Ok(EventRequest::Open { index, serial }), Ok(true)) = (
            importer,
            decode(question, "events"),
            decode(&incoming.body, "events"),
        ) {
            importer.post_deferred(&EventRequest::Close { index, serial });
        }
    }

    /// An event ends with its exporter. This includes recordings of third processes: their deaths
    /// would go unreported from now on.
    fn on_orphaned(&self) {
        self.for_each_lane(|lane| lane.end());
    }
}

impl EventSource for OpenEvents {
    /// Ends the lanes again: a device may have written lower values after the end.
    fn on_tick(&self, _: u64) {
        self.for_each_lane(|lane| lane.end_again());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_of_a_dead_exporters_device_after_its_events_end_block_no_stream() {
        let device = Device::host();
        let exporters = EventPage::create(&device).unwrap();
        let importers = EventPage::create(&device).unwrap();
        let (event_words, streams) = (importers.event_words(7), StreamSet::default());
        let (stream, late) = (device.stream().unwrap(), device.stream().unwrap());
        let open = OpenEvents::default();
        let opened = OpenEvent {
            page: importers,
            state: Arc::new(EventState::new(7, 1, event_words.clone())),
            users: 1,
        };
        open.opened.locked().insert((7, 1), opened);
        let maker = exporters.signaller(7, 0, 0);
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
