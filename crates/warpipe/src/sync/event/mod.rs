//! Events between processes, as CUDA has them, without the two traps that CUDA's have.
//! **This module is marked for unsafe**: it hands events to the device.
//!
//! CUDA's own interprocess events count as complete when they were never recorded, and when the process that recorded
//! them dies before its work is done. Here each event has, beside the one of CUDA, a place in a page: the last recording,
//! and a [lane](crate::shm::counter) for each who records. Streams wait for the lane.
//!
//! A process that makes events in a domain keeps one endpoint there for all of them ([`exporter`]), and a process that
//! opens any of them visits it once ([`importer`]); 256 events lie in one page. The maker has pages of its own, and shares
//! one with each importer and with nobody else: its streams record in all of them, an importer's in the one that the two share.
//! What one importer records reaches another by the maker's CPU.
//!
//! **Who can do what to whom.** An importer can write the pages that it shares with the maker. So it can lie about its own
//! recordings, and deceive itself. It reaches nobody else's streams, and cannot remove a page under one.

mod exporter;
mod handle;
mod importer;
mod layout;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use self::exporter::{EventExporter, NewEvent};
pub use self::handle::{EventHandle, EventHandleFault};
use self::handle::{HandleBody, fault, halves};
use self::importer::EventImporter;
use self::layout::EventWords;
use crate::backend::RawEvent;
use crate::clock::now_ns;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::OwnerProcess;
use crate::ipc::domain::Domain;
use crate::runtime::fence::StreamSet;
use crate::runtime::timed_lock::{LOCK_TIMEOUT, TimedGuard, TimedLock};
use crate::shm::counter::{SharedCounter, WaitStatus};
use crate::shm::signaler::Signaler;
use crate::stream::Stream;

crate::ipc::messages!(
    exporter::EventRequest,
    exporter::LaneReply,
    exporter::PageReply
);

#[cfg(any(test, feature = "testing"))]
pub(crate) use handle::forged;

/// How long a process may be dying before its socket closes: 205 ms were seen under MPS.
const MAKER_DEATH_WAIT: Duration = Duration::from_millis(500);

/// An event of this or another process (`cuEventCreate` with `CU_EVENT_INTERPROCESS`). Cheap to clone.
///
/// ```
/// use std::time::Duration;
/// use warpipe::{Device, Domain, Event, EventHandle};
/// # let folder = std::env::temp_dir().join(format!("warpipe-event-{}", std::process::id()));
/// # let domain = Domain::at(&folder)?;
/// let device = Device::host();
/// let event = Event::create(&domain, &device)?;
/// let text = event.handle()?.to_string(); // to another process, in any way
///
/// let other = Event::open(&text.parse::<EventHandle>()?, &device)?;
/// let (writing, reading) = (device.stream()?, device.stream()?);
/// assert!(other.wait(&reading).is_err()); // never recorded: there is nothing to wait for
/// event.record(&writing)?; // behind the work that is on `writing` so far; `other` may record, too
/// let recording = other.wait(&reading)?; // what is enqueued on `reading` from here on comes after it
/// reading.synchronize(Duration::from_secs(1))?;
/// assert!(other.check(recording)?); // an error if the recorder died, and the stream was let go without it
/// # drop((event, other)); std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), warpipe::Error>(())
/// ```
#[derive(Clone)]
pub struct Event {
    inner: Arc<EventInner>,
}

/// Of two recordings the later one.
trait LatestRecording: Sized {
    fn max_by_time(self, other: Self) -> Self;
}

impl LatestRecording for Option<(u64, Recording)> {
    fn max_by_time(self, other: Self) -> Self {
        match (self, other) {
            (Some((ours, _)), Some((theirs, _))) if theirs > ours => other,
            (None, _) => other,
            _ => self,
        }
    }
}

/// One recording of an event: what a stream waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Recording {
    lane: usize,
    count: u64,
}

struct EventInner {
    device: Device,
    owner_process: OwnerProcess,
    /// CUDA's own, for others; ours waits for the lane.
    raw: Option<RawEvent>,
    index: u32,
    serial: u64,
    event_words: EventWords,
    /// Where this handle records: of an importer, from its first time on.
    lane: OnceLock<(usize, Arc<Signaler>)>,
    /// Held by who records.
    recording: TimedLock,
    role: EventRole,
}

enum EventRole {
    Exporter(Arc<EventExporter>),
    Importer(Arc<EventImporter>, u64),
}

impl Event {
    /// Makes an event in `domain` (`cuEventCreate` with `CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING`). The first
    /// of a process takes a name there, `events/` and 16 hexadecimal digits, which the last one gives up.
    ///
    /// # Errors
    /// [`Error::EventLimit`] when the process has 4096; [`Error::Domain`], or what the device or the system says.
    pub fn create(domain: &Domain, device: &Device) -> Result<Event> {
        let raw = device.backend().create_ipc_event()?;
        match EventExporter::of(domain, device)
            .and_then(|exporter| Ok((exporter.take()?, exporter)))
        {
            Ok((new_event, exporter)) => {
                let NewEvent {
                    index,
                    serial,
                    event_words,
                    raiser,
                } = new_event;
                let inner = Arc::new(EventInner {
                    device: device.clone(),
                    owner_process: OwnerProcess::current(),
                    raw: Some(raw),
                    index,
                    serial,
                    event_words,
                    lane: OnceLock::from((0, raiser)),
                    recording: TimedLock::default(),
                    role: EventRole::Exporter(exporter.clone()),
                });
                exporter.set_live(index, &inner);
                Ok(Event { inner })
            }
            Err(error) => {
                // SAFETY: made above, and nobody has seen it.
                let _ = unsafe { device.backend().destroy_event(raw) };
                Err(error)
            }
        }
    }

    /// What names it to other processes (`cuIpcGetEventHandle`). Of an event that was opened, the same as its maker's,
    /// without CUDA's own 64 bytes.
    ///
    /// # Errors
    /// [`Error::Forked`]; [`Error::Argument`] for a domain whose path is no text; [`Error::Driver`].
    pub fn handle(&self) -> Result<EventHandle> {
        self.inner.owner_process.check()?;
        let EventInner {
            device,
            raw,
            index,
            serial,
            role,
            ..
        } = &*self.inner;
        let body = match role {
            EventRole::Exporter(exporter) => {
                // Who opens it may be in another directory.
                let domain = std::path::absolute(exporter.domain.path()).map_err(|e| {
                    Error::os(
                        "getcwd",
                        format!("the domain {}", exporter.domain.path().display()),
                        e,
                    )
                })?;
                if domain.to_str().is_none() {
                    return Err(Error::argument(
                        "domain",
                        domain.display(),
                        "a path in UTF-8",
                    ));
                }
                // SAFETY: made by `create_ipc_event`, and live as long as self.
                let ipc = raw
                    .map(|raw| unsafe { device.backend().export_event(raw) })
                    .transpose()?;
                let (endpoint, device) = (exporter.name.to_string(), device.info().id);
                let (generation, ipc) = (exporter.generation, ipc.as_ref().map(halves));
                HandleBody {
                    domain,
                    endpoint,
                    generation,
                    index: *index,
                    serial: *serial,
                    device,
                    ipc,
                }
            }
            EventRole::Importer(importer, _) => importer.body(*index, *serial),
        };
        Ok(EventHandle { body })
    }

    /// Opens an event by its handle (`cuIpcOpenEventHandle`), also in the process that made it. The handle may come
    /// from anywhere: it is checked, and opens nothing outside a domain of this user.
    ///
    /// # Errors
    /// [`Error::EventHandle`]; [`Error::NoOwner`] when its maker is gone, or [`Error::OwnerGone`] when it goes
    /// meanwhile; [`Error::Timeout`] when it does not answer; [`Error::Domain`], [`Error::AccessDenied`],
    /// [`Error::Handshake`], [`Error::Protocol`], [`Error::LegacyHandle`], or what the device or the system says.
    pub fn open(handle: &EventHandle, device: &Device) -> Result<Event> {
        let domain = || handle.domain();
        Event::open_with(handle, domain, device)
    }

    /// The same, where the maker's domain lies at another path here, as in a container.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn open_in(domain: &Domain, handle: &EventHandle, device: &Device) -> Result<Event> {
        Event::open_with(handle, || Ok(domain.clone()), device)
    }

    fn open_with(
        handle: &EventHandle,
        domain: impl FnOnce() -> Result<Domain>,
        device: &Device,
    ) -> Result<Event> {
        let body = &handle.body;
        if body.device.kind != device.info().id.kind {
            let (owner, device) = (body.device.to_string(), device.info().id.to_string());
            return Err(fault(EventHandleFault::Device { owner, device }));
        }
        if let Some(exporter) = EventExporter::named(&body.endpoint, body.generation) {
            let inner = exporter
                .find(body.index, body.serial)
                .ok_or_else(|| fault(EventHandleFault::Dropped))?;
            return Ok(Event { inner });
        }
        let importer = EventImporter::for_body(body, &domain()?, device)?;
        Event::of_importer(importer, handle, device)
    }

    fn of_importer(
        importer: Arc<EventImporter>,
        handle: &EventHandle,
        device: &Device,
    ) -> Result<Event> {
        let body = &handle.body;
        let raw = handle
            .ipc_bytes()
            .map(|bytes| device.backend().open_event(&bytes))
            .transpose();
        // A driver cannot open what a dying process made, and says only that it cannot.
        let raw = raw.map_err(|error| {
            importer
                .owner_gone_within(MAKER_DEATH_WAIT)
                .unwrap_or(error)
        })?;
        match importer.open(body.index, body.serial) {
            Ok(opened) => {
                let inner = EventInner {
                    device: device.clone(),
                    owner_process: OwnerProcess::current(),
                    raw,
                    index: body.index,
                    serial: body.serial,
                    event_words: opened.event_words,
                    lane: OnceLock::new(),
                    recording: TimedLock::default(),
                    role: EventRole::Importer(importer, opened.open_id),
                };
                Ok(Event {
                    inner: Arc::new(inner),
                })
            }
            Err(error) => {
                // SAFETY: opened above, and nobody has seen it.
                raw.map(|raw| unsafe { device.backend().destroy_event(raw) });
                Err(error)
            }
        }
    }

    /// CUDA's own event (`CUevent`), for calls that take one. Recorded along with what its maker records; a recording by
    /// another process is none of it. What waits for it waits as CUDA does: not at all for an event that was never
    /// recorded, or whose maker died. None of an event that was opened without its 64 bytes.
    pub fn raw(&self) -> Option<RawEvent> {
        self.inner.raw
    }

    /// The device it was made or opened with.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// Records the stream's work so far (`cuEventRecord`), and returns at once. Who made the event may, and who opened
    /// it; the last recording is what others wait for. Recordings by one handle on several streams are reached in
    /// the order of the calls. The first one of an opened event asks its maker for a lane, which may take a moment; while
    /// a third process has the event open, each recording of one that was opened waits for its maker to tell that one.
    ///
    /// # Errors
    /// [`Error::OwnerGone`] when its maker has died or dropped it; [`Error::Refused`] when seven others record it;
    /// [`Error::Argument`] for a stream of another device; [`Error::Capturing`] for one that is being captured;
    /// [`Error::Timeout`] after 10 s in which another thread's recording is held up, by the driver (its stream's launch
    /// queue is full) or by the maker; [`Error::Driver`].
    pub fn record(&self, stream: &Stream) -> Result<Recording> {
        self.record_within(stream, LOCK_TIMEOUT)
    }

    /// [`record`](Self::record), unless another thread's recording is under way: then `None`, and nothing was done. See
    /// [`wait_for_turn`](Self::wait_for_turn).
    ///
    /// # Errors
    /// As for [`record`](Self::record).
    pub fn try_record(&self, stream: &Stream) -> Result<Option<Recording>> {
        self.inner.owner_process.check()?;
        stream.check_usable(&self.inner.device)?;
        let Ok(turn) = self.inner.recording.lock(Duration::ZERO, String::new) else {
            return Ok(None);
        };
        self.record_in(&turn, stream).map(Some)
    }

    /// Waits until no other thread's recording is under way, at most `timeout`, and says whether that is so.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn wait_for_turn(&self, timeout: Duration) -> Result<bool> {
        self.inner.owner_process.check()?;
        Ok(self.inner.recording.lock(timeout, String::new).is_ok())
    }

    /// Whether [`record`](Self::record) has its maker's word already, and need not ask: see [`prepare`](Self::prepare).
    pub fn is_prepared(&self) -> bool {
        self.inner.lane.get().is_some()
    }

    /// Asks its maker for what the first recording of an opened event asks for, and waits for the answer.
    ///
    /// # Errors
    /// As for [`record`](Self::record).
    pub fn prepare(&self) -> Result<()> {
        self.inner.owner_process.check()?;
        let turn = self
            .inner
            .recording
            .lock(LOCK_TIMEOUT, || "recording".into())?;
        self.inner.lane_in(&turn).map(drop)
    }

    /// [`record`](Self::record), with another limit for the wait for a thread that records.
    fn record_within(&self, stream: &Stream, limit: Duration) -> Result<Recording> {
        self.inner.owner_process.check()?;
        stream.check_usable(&self.inner.device)?;
        let turn = self.inner.recording.lock(limit, || "recording".into())?;
        self.record_in(&turn, stream)
    }

    /// CUDA's own event and the lane are recorded in one order.
    fn record_in(&self, turn: &TimedGuard<'_>, stream: &Stream) -> Result<Recording> {
        let inner = &*self.inner;
        let (lane, raiser) = inner.lane_in(turn)?;
        if let EventRole::Importer(importer, _) = &inner.role
            && (importer.is_over() || inner.event_words.lane(*lane).has_ended())
        {
            return Err(importer.dropped());
        }
        // An importer leaves CUDA's own alone: what a driver does with one that a dead process recorded last, or that its
        // maker has destroyed, is not said, and a stream that got stuck in it could not be let go.
        if let (Some(raw), EventRole::Exporter(_)) = (inner.raw, &inner.role) {
            // SAFETY: both are live.
            unsafe { stream.backend().record_event(raw, stream.raw())? };
        }
        let count = raiser.raise(stream, inner.streams(), |last| Ok(last + 1))?;
        let (recording, now_ns) = (Recording { lane: *lane, count }, now_ns());
        match &inner.role {
            EventRole::Exporter(exporter) => exporter.recorded(inner.index, recording, now_ns),
            EventRole::Importer(importer, _) => {
                inner.event_words.set_importer_latest(now_ns, recording);
                // After that store: a third process that opens the event meanwhile is told of it by the maker.
                if inner.event_words.has_other_importers() {
                    importer.send_recording(inner.index, inner.serial, recording, now_ns)?;
                }
            }
        }
        Ok(recording)
    }

    /// Has `stream` wait for the last recording (`cuStreamWaitEvent`), and returns at once, with what it waits for.
    /// What the stream did afterwards counts when [`check`](Self::check) says so.
    ///
    /// # Errors
    /// [`Error::EventNotRecorded`]; [`Error::EventLost`] when the recorder is gone and its work was not done;
    /// [`Error::Argument`] for a stream of another device; [`Error::Capturing`] for one that is being captured;
    /// [`Error::Driver`].
    pub fn wait(&self, stream: &Stream) -> Result<Recording> {
        stream.check_usable(&self.inner.device)?;
        let recording = self.latest()?;
        // Work that is launched after the CPU has seen it complete is behind it without a wait on the device.
        if self.check(recording)? {
            return Ok(recording);
        }
        let lane = self.inner.lane(recording.lane);
        lane.wait(stream, recording.count, self.inner.streams())?;
        if let EventRole::Importer(importer, _) = &self.inner.role
            && importer.is_dead()
        {
            // The reactor may have come by before the wait, and a third process after it.
            lane.end();
        }
        Ok(recording)
    }

    /// Whether the last recording is complete (`cuEventQuery`).
    ///
    /// # Errors
    /// [`Error::EventNotRecorded`], [`Error::EventLost`].
    pub fn query(&self) -> Result<bool> {
        self.check(self.latest()?)
    }

    /// Waits on the CPU until the last recording is complete (`cuEventSynchronize`).
    ///
    /// # Errors
    /// [`Error::EventNotRecorded`], [`Error::EventLost`], [`Error::Timeout`].
    pub fn synchronize(&self, timeout: Duration) -> Result<()> {
        let recording = self.latest()?;
        if self.check(recording)? {
            return Ok(());
        }
        self.inner
            .lane(recording.lane)
            .wait_host(&self.inner.device, recording.count, timeout)?;
        if self.check(recording)? {
            return Ok(());
        }
        Err(Error::Timeout {
            what: format!("the work recorded by event {}", self.label()),
            waited: timeout,
        })
    }

    /// Whether this recording is complete: true, or false if it may still be.
    ///
    /// # Errors
    /// [`Error::EventLost`]: it is not, and never will be. What a stream did behind its wait does not count.
    pub fn check(&self, recording: Recording) -> Result<bool> {
        self.inner.owner_process.check()?;
        // Of the maker, what it has seen before counts, whatever the recorder's page says now.
        if self
            .inner
            .event_words
            .lane(recording.lane)
            .wait_status(recording.count)
            == WaitStatus::Reached
        {
            return Ok(true);
        }
        let lane = self.inner.lane(recording.lane);
        let mut wait_status = lane.wait_status(recording.count);
        if let (WaitStatus::Pending, EventRole::Importer(importer, _)) =
            (wait_status, &self.inner.role)
            && importer.is_dead()
        {
            lane.end();
            wait_status = lane.wait_status(recording.count);
        }
        match wait_status {
            WaitStatus::Reached => Ok(true),
            WaitStatus::Pending => Ok(false),
            WaitStatus::Never => Err(Error::EventLost {
                event: self.label(),
                pid: lane.pid(),
            }),
        }
    }

    fn latest(&self) -> Result<Recording> {
        self.inner.owner_process.check()?;
        self.inner.latest().ok_or_else(|| Error::EventNotRecorded {
            event: self.label(),
        })
    }

    fn label(&self) -> String {
        match &self.inner.role {
            EventRole::Exporter(exporter) => format!("{}#{}", exporter.name, self.inner.index),
            EventRole::Importer(importer, _) => format!("{}#{}", importer.name(), self.inner.index),
        }
    }
}

impl EventInner {
    /// The lane that a recording is to be waited for on.
    fn lane(&self, lane: usize) -> SharedCounter {
        match &self.role {
            EventRole::Exporter(exporter) if lane != 0 => exporter.lane(self.index, lane),
            _ => self.event_words.lane(lane),
        }
    }

    fn latest(&self) -> Option<Recording> {
        let latest = match &self.role {
            EventRole::Exporter(exporter) => exporter.latest(self.index),
            EventRole::Importer(..) => self
                .event_words
                .latest()
                .max_by_time(self.event_words.importer_latest()),
        };
        latest.map(|(_, recording)| recording)
    }

    fn streams(&self) -> &Arc<StreamSet> {
        match &self.role {
            EventRole::Exporter(exporter) => exporter.streams(),
            EventRole::Importer(importer, _) => &importer.streams,
        }
    }

    /// What its recordings are told in: asked for once.
    fn lane_in(&self, _turn: &TimedGuard<'_>) -> Result<&(usize, Arc<Signaler>)> {
        if let Some(lane) = self.lane.get() {
            return Ok(lane);
        }
        let lane = self.request_lane()?;
        Ok(self.lane.get_or_init(|| lane))
    }

    fn request_lane(&self) -> Result<(usize, Arc<Signaler>)> {
        match &self.role {
            EventRole::Importer(importer, _) => importer.lane(self.index, self.serial),
            // A maker has its own from the beginning.
            EventRole::Exporter(_) => Err(Error::EventNotRecorded {
                event: self.index.to_string(),
            }),
        }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event")
            .field("event", &self.label())
            .field("latest", &self.inner.latest())
            .finish_non_exhaustive()
    }
}

impl Drop for EventInner {
    fn drop(&mut self) {
        if !self.owner_process.is_current() {
            return;
        }
        if let Some(raw) = self.raw {
            // SAFETY: ours, destroyed here only; what was recorded of it is the device's own.
            let _ = unsafe { self.device.backend().destroy_event(raw) };
        }
        let lane = self.lane.take();
        match &self.role {
            EventRole::Exporter(exporter) => exporter.release(self.index),
            EventRole::Importer(importer, open_id) => {
                importer.close(
                    *open_id,
                    self.index,
                    self.serial,
                    lane.map(|(lane, _)| lane),
                );
            }
        }
    }
}
