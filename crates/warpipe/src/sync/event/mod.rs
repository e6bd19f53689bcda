//! Events between processes, as CUDA has them, without two hazards of CUDA's. **This module is
//! marked for unsafe**: it passes events to the device.
//!
//! CUDA's own interprocess events count as complete when they were never recorded, and when the
//! recording process dies before its work is done. Here each event has, beside CUDA's event, an
//! entry in a page: the last recording, and a [lane](crate::shm::counter) for each recorder.
//! Streams wait for the lane. The [`exporter`] creates a domain's events in this process, the
//! [`importer`] opens another process's, and a page that the two share has 256 events;
//! `docs/design/protocol.md` draws it. An importer misleads only itself: it reaches no other
//! process's streams.

mod event_slots;
mod event_table;
mod exporter;
mod handle;
mod importer;
mod layout;
#[cfg(test)]
mod tests;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use self::exporter::EventExporter;
pub use self::handle::EventHandle;
use self::handle::{HandleBody, fault};
use self::importer::EventImporter;
pub use self::layout::Recording;
use self::layout::{EventWords, max_by_time};
use crate::backend::RawEvent;
use crate::clock::now_ns;
use crate::debug::opaque_debug;
use crate::device::Device;
use crate::error::{Error, HandleFault, Loss, Result, StateFault};
use crate::fork::leak_on_fork::LeakOnFork;
use crate::ipc::AccessPolicy;
use crate::ipc::handle::{DriverHandle, path_of};
use crate::options::{CreateOptions, OpenOptions, chosen_device, chosen_place};
use crate::runtime::fence::StreamSet;
use crate::runtime::timed_lock::{TimedGuard, TimedLock};
use crate::shm::counter::{SharedCounter, WaitStatus};
use crate::shm::signaller::Signaller;
use crate::stream::Stream;
use crate::wait::Wait;

crate::ipc::messages!(event_table::EventRequest, event_table::PageRequest);

#[cfg(any(test, feature = "testing"))]
pub(crate) use handle::forged;

/// The time that a dying process may take to close its socket: 205 ms were measured under MPS.
const EXPORTER_DEATH_WAIT: Duration = Duration::from_millis(500);

/// A driver's event that this process has created or opened.
struct OwnedRawEvent {
    raw: RawEvent,
    device: Device,
}

impl Drop for OwnedRawEvent {
    fn drop(&mut self) {
        // SAFETY: created or opened by its owner and destroyed only here; the device keeps the
        // recordings.
        let _ = unsafe { self.device.backend().destroy_event(self.raw) };
    }
}

/// An event of this or another process (`cuEventCreate` with `CU_EVENT_INTERPROCESS`). Cheap to
/// clone.
///
/// ```
/// use std::time::Duration;
/// use warpipe::{Device, Domain, Event, EventHandle};
/// # let folder = std::env::temp_dir().join(format!("warpipe-event-{}", std::process::id()));
/// # let domain = Domain::at(&folder)?;
/// let device = Device::host();
/// let event = Event::new(domain.on(&device))?;
/// let text = event.handle()?.to_string(); // to another process, in any way
///
/// let other = Event::open(&text.parse::<EventHandle>()?, domain.on(&device), Duration::ZERO)?;
/// let (writing, reading) = (device.stream()?, device.stream()?);
/// assert!(other.wait(&reading).is_err()); // never recorded: there is nothing to wait for
/// event.record(&writing, Duration::from_secs(1))?; // behind the work that is on `writing` so far; `other` may record, too
/// let recording = other.wait(&reading)?; // orders later work on `reading` behind it
/// reading.synchronize(Duration::from_secs(1))?;
/// assert!(other.check(recording)?); // an error if the recorder died before its work was done
/// # drop((event, other)); std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), warpipe::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Event {
    inner: LeakOnFork<Arc<EventInner>>,
}

struct EventInner {
    device: Device,
    /// CUDA's own event, for callers outside this library; this library waits for the lane.
    raw: Option<OwnedRawEvent>,
    state: Arc<EventState>,
    role: EventRole,
}

/// The state that this process's handles of an event share, also those that were opened apart.
struct EventState {
    index: u32,
    serial: u64,
    event_words: EventWords,
    /// The lane on which this process records; an importer has it from its first recording on.
    lane: OnceLock<(usize, Arc<Signaller>)>,
    /// Locked while a thread records.
    recording: TimedLock,
}

impl EventState {
    fn new(index: u32, serial: u64, event_words: EventWords) -> EventState {
        EventState {
            index,
            serial,
            event_words,
            lane: OnceLock::new(),
            recording: TimedLock::default(),
        }
    }
}

enum EventRole {
    Exporter(Arc<EventExporter>),
    Importer(Arc<EventImporter>),
}

impl Event {
    /// Creates the event (`cuEventCreate` with `CU_EVENT_INTERPROCESS |
    /// CU_EVENT_DISABLE_TIMING`). The first event of a process takes a name, `events/` and 16
    /// hexadecimal digits; the drop of the last one releases it. Events that admit other users have
    /// a name of their own. An event has no name: [`handle`](Self::handle) names it.
    ///
    /// Admitted users can open every event of this process that was made with the same users and
    /// groups, and record it: a wait for a recording that its stream does not reach lasts until the
    /// recorder leaves or dies.
    ///
    /// # Errors
    /// [`Error::Limit`] when the process has 4096; [`Error::Name`], or an error of the
    /// device or the system.
    pub fn new(options: CreateOptions) -> Result<Event> {
        let (domain, device) = chosen_place(&options.domain, &options.device)?;
        let raw = OwnedRawEvent {
            raw: device.backend().create_ipc_event()?,
            device: device.clone(),
        };
        let access = AccessPolicy::of(options.allow_uids, options.allow_gids);
        let exporter = EventExporter::of(&domain, &device, &access)?;
        let inner = Arc::new(EventInner {
            device,
            raw: Some(raw),
            state: Arc::new(exporter.take()?),
            role: EventRole::Exporter(exporter.clone()),
        });
        exporter.set_live(inner.state.index, &inner);
        Ok(Event {
            inner: LeakOnFork::new(inner),
        })
    }

    /// The handle that names the event to other processes (`cuIpcGetEventHandle`). An opened event
    /// returns the exporter's handle without CUDA's own 64 bytes.
    ///
    /// # Errors
    /// [`Error::State`]; [`Error::Argument`] for a domain with a path that is not text;
    /// [`Error::Driver`].
    pub fn handle(&self) -> Result<EventHandle> {
        let EventInner {
            device,
            raw,
            state,
            role,
        } = &**self.inner.get()?;
        let body = match role {
            EventRole::Exporter(exporter) => {
                // SAFETY: created by `create_ipc_event`, and live as long as self.
                let ipc = raw
                    .as_ref()
                    .map(|owned| unsafe { device.backend().export_event(owned.raw) })
                    .transpose()?;
                let (endpoint, device) = (exporter.name.to_string(), device.info().id);
                let (generation, ipc) = (exporter.generation, ipc.map(DriverHandle));
                HandleBody {
                    domain: path_of(&exporter.domain)?.into(),
                    endpoint,
                    generation,
                    index: state.index,
                    serial: state.serial,
                    device,
                    ipc,
                }
            }
            EventRole::Importer(importer) => importer.body(state.index, state.serial),
        };
        Ok(EventHandle { body })
    }

    /// Opens an event by its handle (`cuIpcOpenEventHandle`), also in the process that created it.
    /// The handle may come from any source: it is checked, and opens nothing outside a domain of
    /// this user. The handle names its domain, unless the options do: one may have another path
    /// here, as in a container. Waits for the answers of its exporter, each 5 s at most.
    ///
    /// # Errors
    /// [`Error::Handle`]; [`Error::NotFound`] when its exporter is gone, or
    /// [`Error::PeerGone`] when it ends meanwhile; [`Error::Timeout`] when it does not answer;
    /// [`Error::Name`], [`Error::Refused`], [`Error::Handshake`], [`Error::Protocol`],
    /// [`Error::Handle`], or an error of the device or the system.
    pub fn open<'w>(
        handle: &EventHandle,
        options: OpenOptions,
        wait: impl Into<Wait<'w>>,
    ) -> Result<Event> {
        let (device, wait) = (&chosen_device(&options.device), &wait.into());
        let body = &handle.body;
        if body.device.kind != device.info().id.kind {
            let (owner, device) = (body.device.to_string(), device.info().id.to_string());
            return Err(fault(HandleFault::Device { owner, device }));
        }
        if let Some(exporter) = EventExporter::named(&body.endpoint, body.generation) {
            let inner = exporter
                .find(body.index, body.serial)
                .ok_or_else(|| fault(HandleFault::Dropped))?;
            return Ok(Event {
                inner: LeakOnFork::new(inner),
            });
        }
        let domain = options.domain.map_or_else(|| handle.domain(), Ok)?;
        let importer = EventImporter::for_body(body, &domain, device, wait)?;
        Event::of_importer(importer, handle, device, wait)
    }

    fn of_importer(
        importer: Arc<EventImporter>,
        handle: &EventHandle,
        device: &Device,
        wait: &Wait<'_>,
    ) -> Result<Event> {
        let body = &handle.body;
        let raw = handle
            .ipc_bytes()
            .map(|bytes| device.backend().open_event(&bytes))
            .transpose();
        // A driver cannot open an event of a dying process, and its error does not give that
        // reason.
        let raw = raw.map_err(
            |error| match importer.session.ends_within(EXPORTER_DEATH_WAIT) {
                true => importer.session.owner_gone(),
                false => error,
            },
        )?;
        let raw = raw.map(|raw| OwnedRawEvent {
            raw,
            device: device.clone(),
        });
        let inner = EventInner {
            device: device.clone(),
            raw,
            state: importer.open(body.index, body.serial, wait)?,
            role: EventRole::Importer(importer),
        };
        Ok(Event {
            inner: LeakOnFork::new(Arc::new(inner)),
        })
    }

    /// CUDA's own event (`CUevent`), for calls that take one. The exporter's recordings record it,
    /// too; an importer's do not. A wait for it has CUDA's semantics: it does not wait for an event
    /// that was never recorded, or lost its exporter. `None` for an event that was opened without
    /// its 64 bytes.
    pub fn raw(&self) -> Option<RawEvent> {
        self.inner.raw.as_ref().map(|owned| owned.raw)
    }

    /// The device with which the event was created or opened.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// Records the stream's work so far (`cuEventRecord`), and returns at once. The exporter and
    /// its importers may record; waits are for the last recording. Recordings by one process on
    /// several streams are reached in the order of the calls. The first recording of an opened
    /// event waits for an answer of its exporter, up to 5 s, and up to 1 s where `wait` is shorter;
    /// without it, nothing is recorded. While a third process has the event open, each recording of
    /// an opened event waits until the exporter has forwarded it.
    ///
    /// # Errors
    /// [`Error::PeerGone`] when its exporter has died or dropped it; [`Error::Refused`] when seven
    /// others record it; [`Error::Argument`] for a stream of another device; [`Error::State`]
    /// for a stream that is being captured; [`Error::Driver`]. [`Error::Timeout`] while another
    /// thread's recording is blocked, by the driver (its stream's launch queue is full) or by the
    /// exporter: nothing was recorded, unless a third process has the event open and its exporter
    /// is stopped. The recording is then made, and its forwarding, which takes up to 5 s whatever
    /// `wait` says, has failed.
    pub fn record<'w>(&self, stream: &Stream, wait: impl Into<Wait<'w>>) -> Result<Recording> {
        let inner = self.inner.get()?;
        stream.check_usable(&inner.device)?;
        let wait = wait.into();
        // Without the turn: the cancellation of `wait` is asked meanwhile.
        let (lane, signaller) = inner.own_lane(&wait)?;
        let turn = (inner.state.recording).lock(wait, || "recording".into())?;
        inner.record(&turn, *lane, signaller, stream)
    }

    /// Has `stream` wait for the last recording (`cuStreamWaitEvent`), and returns that recording
    /// at once. The stream's later work is valid only if [`check`](Self::check) returns true.
    ///
    /// # Errors
    /// [`Error::State`] when it was never recorded, or for a stream that is being captured;
    /// [`Error::Lost`] when the recorder is gone and its work was not done; [`Error::Argument`] for
    /// a stream of another device; [`Error::Driver`].
    pub fn wait(&self, stream: &Stream) -> Result<Recording> {
        stream.check_usable(&self.inner.device)?;
        let recording = self.latest()?;
        // Work that is launched after the CPU has seen the recording complete follows it without a
        // wait on the device.
        if self.check(recording)? {
            return Ok(recording);
        }
        let lane = self.inner.lane(recording.lane);
        lane.wait(stream, recording.count, self.inner.streams())?;
        if let EventRole::Importer(importer) = &self.inner.role
            && importer.is_dead()
        {
            // The reactor may have ended the lane before the wait, and a third process may have
            // written after it.
            lane.end();
        }
        Ok(recording)
    }

    /// Whether the last recording is complete (`cuEventQuery`).
    ///
    /// # Errors
    /// [`Error::State`] when it was never recorded; [`Error::Lost`].
    pub fn query(&self) -> Result<bool> {
        self.check(self.latest()?)
    }

    /// Waits on the CPU until the last recording is complete (`cuEventSynchronize`).
    ///
    /// # Errors
    /// [`Error::State`] when it was never recorded; [`Error::Lost`]; [`Error::Timeout`].
    pub fn synchronize<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<()> {
        let recording = self.latest()?;
        let what = || format!("the work recorded by event {}", self.inner.label());
        let sleep = |slice| {
            let lane = self.inner.lane(recording.lane);
            lane.wait_host(recording.count, slice);
        };
        wait.into().until(what, || self.check(recording), sleep)
    }

    /// Whether this recording is complete: true, or false if it may still complete.
    ///
    /// # Errors
    /// [`Error::Lost`]: it never will be. The stream's work behind its wait is not valid.
    pub fn check(&self, recording: Recording) -> Result<bool> {
        let inner = self.inner.get()?;
        // For the exporter, a recording that it has seen complete counts, whatever the recorder's
        // page says now.
        if inner
            .state
            .event_words
            .lane(recording.lane)
            .wait_status(recording.count)
            == WaitStatus::Reached
        {
            return Ok(true);
        }
        let lane = inner.lane(recording.lane);
        let mut wait_status = lane.wait_status(recording.count);
        if let (WaitStatus::Pending, EventRole::Importer(importer)) = (wait_status, &inner.role)
            && importer.is_dead()
        {
            lane.end();
            wait_status = lane.wait_status(recording.count);
        }
        match wait_status {
            WaitStatus::Reached => Ok(true),
            WaitStatus::Pending => Ok(false),
            WaitStatus::Never => Err(Error::Lost(Loss::Event {
                event: self.inner.label(),
                pid: lane.pid(),
            })),
        }
    }

    fn latest(&self) -> Result<Recording> {
        self.inner
            .get()?
            .latest()
            .ok_or_else(|| Error::State(StateFault::NotRecorded(self.inner.label())))
    }
}

impl EventInner {
    /// The lane on which a recording is waited for.
    fn lane(&self, lane: usize) -> SharedCounter {
        match &self.role {
            EventRole::Exporter(exporter) if lane != 0 => exporter
                .event_table
                .lock()
                .slot(self.state.index)
                .lane(lane),
            _ => self.state.event_words.lane(lane),
        }
    }

    fn latest(&self) -> Option<Recording> {
        let latest = match &self.role {
            EventRole::Exporter(exporter) => {
                exporter.event_table.lock().slot(self.state.index).latest()
            }
            EventRole::Importer(..) => {
                let words = &self.state.event_words;
                max_by_time([words.latest().load(), words.importer_latest().load()])
            }
        };
        latest.map(|(_, recording)| recording)
    }

    fn streams(&self) -> &Arc<StreamSet> {
        match &self.role {
            EventRole::Exporter(exporter) => &exporter.event_table.streams,
            EventRole::Importer(importer) => &importer.streams,
        }
    }

    /// The lane of this process's recordings. An importer asks for it first; an exporter has its
    /// own from the beginning.
    fn own_lane(&self, wait: &Wait<'_>) -> Result<&(usize, Arc<Signaller>)> {
        match (self.state.lane.get(), &self.role) {
            (Some(lane), _) => Ok(lane),
            (None, EventRole::Importer(importer)) => importer.lane(&self.state, wait),
            (None, EventRole::Exporter(_)) => {
                Err(Error::State(StateFault::NotRecorded(self.label())))
            }
        }
    }

    /// The turn keeps the recordings of CUDA's own event and of the lane in one order.
    fn record(
        &self,
        _turn: &TimedGuard<'_>,
        lane: usize,
        signaller: &Signaller,
        stream: &Stream,
    ) -> Result<Recording> {
        let state = &self.state;
        if let EventRole::Importer(importer) = &self.role
            && (importer.session.is_over() || state.event_words.lane(lane).has_ended())
        {
            return Err(importer.dropped());
        }
        // An importer does not touch CUDA's own event. CUDA does not specify the behaviour of an
        // event that a dead process recorded last, or that its exporter has destroyed, and a stream
        // stuck in it could not be released.
        if let (Some(owned), EventRole::Exporter(_)) = (&self.raw, &self.role) {
            // SAFETY: both handles are live.
            unsafe { stream.backend().record_event(owned.raw, stream.raw())? };
        }
        let count = signaller.raise(stream, self.streams(), |last| Ok(last + 1))?;
        let (recording, now_ns) = (Recording { lane, count }, now_ns());
        match &self.role {
            EventRole::Exporter(exporter) => {
                let table = exporter.event_table.lock();
                table.slot(state.index).publish(recording, now_ns);
            }
            EventRole::Importer(importer) => {
                state.event_words.importer_latest().store(now_ns, recording);
                // After that store: a third process that opens the event meanwhile learns of the
                // recording from the exporter.
                if state.event_words.has_other_importers() {
                    importer.send_recording(state.index, recording, now_ns)?;
                }
            }
        }
        Ok(recording)
    }

    fn label(&self) -> String {
        let name = match &self.role {
            EventRole::Exporter(exporter) => exporter.name.as_str(),
            EventRole::Importer(importer) => importer.session.name(),
        };
        format!("{name}#{}", self.state.index)
    }
}

opaque_debug!(EventInner {; label, latest });

impl Drop for EventInner {
    fn drop(&mut self) {
        drop(self.raw.take());
        let EventState { index, serial, .. } = *self.state;
        match &self.role {
            EventRole::Exporter(exporter) => exporter.release(index),
            EventRole::Importer(importer) => importer.close(index, serial),
        }
    }
}
