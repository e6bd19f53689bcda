//! A number that only grows, which streams of several processes signal and wait for.
//!
//! The owner signals; other processes open the timeline by name, and their streams wait. The owner
//! shares a [page](crate::shm::page) with each importer alone, sealed against removal. Its streams
//! signal a [lane](crate::shm::counter) in each page, and one in the owner's own memory. So an
//! importer can mislead only itself, and block no stream of another process.
//!
//! At the owner's proven death each importer's reactor records the last value and raises the word
//! in its own page above all others, with CPU stores alone. An owner that closes does the same
//! after its streams have completed their signals.

mod server;
#[cfg(test)]
mod tests;

use std::sync::{Arc, OnceLock};

use self::server::TimelineServer;
use crate::debug::opaque_debug;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::OwnerProcess;
use crate::fork::leak_on_fork::LeakOnFork;
use crate::ipc::domain::EndpointName;
use crate::ipc::{AccessPolicy, ClientSession, IpcServer, Kind, SessionObserver};
use crate::options::{Attachment, CreateOptions, OpenOptions, chosen_device, serve};
use crate::runtime::drop_after_fence::DropAfterFence;
use crate::runtime::fence::{Fence, StreamSet};
use crate::runtime::reactor::Reactor;
use crate::shm::counter::{COUNTER_BYTES, SharedCounter, VALUE_MAX, WaitStatus};
use crate::shm::page::{PAGE_BYTES, SharedPage};
use crate::shm::signaller::Signaller;
use crate::stream::Stream;
use crate::sync::pair;
use crate::wait::Wait;

/// The lane's offset in the page.
const LANE_OFFSET: usize = 0;

impl Timeline {
    fn import(attachment: Attachment<'_>) -> Result<Timeline> {
        let Attachment {
            name,
            device,
            session,
            reply,
            wait,
        } = attachment;
        let ((), [published]) = reply.open::<(), 1>(name.as_str())?;
        let counter = |page| SharedCounter::new(&Arc::new(page), LANE_OFFSET);
        let death_handler = Arc::new(OwnerDeathHandler {
            lane: OnceLock::new(),
            published: counter(SharedPage::read(published, PAGE_BYTES, name.as_str())?),
        });
        session.observe(death_handler.clone())?;
        let lane = counter(pair::share(&session, &device, PAGE_BYTES, &(), wait)?);
        death_handler.set_lane(lane.clone(), &session);
        let waiting = Arc::<StreamSet>::default();
        Ok(Timeline {
            name: name.to_string(),
            device,
            owner_process: OwnerProcess::current(),
            lane,
            role: TimelineRole::Importer {
                session: DropAfterFence::new(waiting.clone(), session)?,
                death_handler,
            },
            waiting,
        })
    }
}

/// A named 64-bit value that only grows, across processes (Vulkan's timeline semaphore; on CUDA
/// `cuStreamWriteValue64` and `cuStreamWaitValue64`).
///
/// ```
/// use std::time::Duration;
/// use warpipe::{Device, Domain, Timeline};
/// # let folder = std::env::temp_dir().join(format!("warpipe-timeline-{}", std::process::id()));
/// # let domain = Domain::at(&folder)?;
/// let device = Device::host();
/// let owner = Timeline::new("frames", domain.on(&device))?;
/// // In another process, as a rule:
/// let frames = Timeline::open("frames", domain.on(&device), Duration::ZERO)?;
///
/// let (writing, reading) = (device.stream()?, device.stream()?);
/// owner.signal(&writing, 1, Duration::from_secs(1))?; // behind the work that is on `writing` so far
/// frames.wait(&reading, 1)?; // orders later work on `reading` behind it; the CPU does not wait
/// reading.synchronize(Duration::from_secs(1))?;
/// assert!(frames.check(1)?); // an error if the owner died, and the stream was released without it
/// # drop((owner, frames)); std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), warpipe::Error>(())
/// ```
pub struct Timeline {
    name: String,
    device: Device,
    owner_process: OwnerProcess,
    /// The owner's own lane, or the copy that an importer shares with the owner.
    lane: SharedCounter,
    /// The streams that wait for it.
    waiting: Arc<StreamSet>,
    role: TimelineRole,
}

enum TimelineRole {
    Owner {
        /// Dropped first: no process opens a timeline that ends.
        _server: IpcServer,
        signals: LeakOnFork<OwnerSignals>,
    },
    Importer {
        /// Open as long as a stream of this process may wait: its reactor releases the stream. The
        /// session's observer keeps the pages.
        session: DropAfterFence<ClientSession>,
        death_handler: Arc<OwnerDeathHandler>,
    },
}

impl Timeline {
    /// The largest value that can be signalled or waited for, 2^63 - 2.
    pub const VALUE_MAX: u64 = VALUE_MAX;

    /// Creates a timeline at 0, which this process owns and signals, and takes its name
    /// (`cuMemHostRegister`). Up to 256 processes may open it, 128 of a user other than this one;
    /// each costs a page of shared memory, and one more device store for each signal. An admitted
    /// user can write the page that it shares with this process, and no other one: it can deceive
    /// itself alone.
    ///
    /// # Errors
    /// [`Error::Name`], or an error of the device or the system. An error leaves
    /// nothing behind.
    pub fn new(name: &str, options: CreateOptions) -> Result<Timeline> {
        let name = EndpointName::new(name)?;
        let device = chosen_device(&options.device);
        let reactor = Reactor::of_process()?;
        let lane = SharedCounter::new(
            &Arc::new(SharedPage::private(&device, COUNTER_BYTES)?),
            LANE_OFFSET,
        );
        let (published, fd) = SharedPage::publish(Some(&device), COUNTER_BYTES)?;
        let signaller = Arc::new(
            Signaller::new(lane.clone(), 0)
                .publishing(SharedCounter::new(&Arc::new(published), LANE_OFFSET)),
        );
        let timeline_server = Arc::new(TimelineServer {
            device: device.clone(),
            signaller,
            signalling: Arc::default(),
            published: fd,
        });
        let access = AccessPolicy::of(options.allow_uids, options.allow_gids);
        let served = timeline_server.clone();
        let server = serve(&options.domain, &name, Kind::Timeline, access, served)?;
        let waiting = Arc::<StreamSet>::default();
        let signals = OwnerSignals {
            timeline_server,
            waiting: waiting.clone(),
            reactor,
        };
        Ok(Timeline {
            name: name.to_string(),
            device,
            owner_process: OwnerProcess::current(),
            lane,
            waiting,
            role: TimelineRole::Owner {
                _server: server,
                signals: LeakOnFork::new(signals),
            },
        })
    }

    /// Opens a timeline of any process, including this one, and waits for it to exist.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Name`], [`Error::Refused`], [`Error::Handshake`],
    /// [`Error::Timeout`], [`Error::Protocol`], or an error of the device or the system.
    pub fn open<'w>(
        name: &str,
        options: OpenOptions,
        wait: impl Into<Wait<'w>>,
    ) -> Result<Timeline> {
        options.open(name, Kind::Timeline, wait, Timeline::import)
    }

    /// Whether this handle may signal.
    #[cfg(test)]
    fn is_owner(&self) -> bool {
        matches!(self.role, TimelineRole::Owner { .. })
    }

    /// Signals `value` behind the stream's work so far (`cuStreamWriteValue64`), and returns at
    /// once. On several streams the values are reached in the order of the calls: each stream waits
    /// on the device for the previous one.
    ///
    /// # Errors
    /// [`Error::Refused`] to all but the owner; [`Error::Argument`] unless it is above the last
    /// value and at most [`VALUE_MAX`](Self::VALUE_MAX), or for a stream of another device;
    /// [`Error::State`] for a stream that is being captured; [`Error::Timeout`] while the
    /// driver blocks another thread's signal (its stream's launch queue is full), and nothing was
    /// signalled; [`Error::Driver`].
    pub fn signal<'w>(&self, stream: &Stream, value: u64, wait: impl Into<Wait<'w>>) -> Result<()> {
        let TimelineServer {
            signaller,
            signalling,
            ..
        } = &*self.signals()?.timeline_server;
        stream.check_usable(&self.device)?;
        signaller
            .raise_within(wait, stream, signalling, &[], |last| {
                self.check_above(value, last)
            })
            .map(drop)
    }

    /// Signals `value` now, from the CPU.
    ///
    /// # Errors
    /// As for [`signal`](Self::signal), and [`Error::Argument`] while a stream has yet to
    /// signal an earlier value.
    pub fn signal_now<'w>(&self, value: u64, wait: impl Into<Wait<'w>>) -> Result<()> {
        let signaller = &self.signals()?.timeline_server.signaller;
        signaller.raise_now(wait, |last, reached| {
            self.above_reached(value, last, reached)
        })
    }

    /// Has `stream` wait for `value` (`cuStreamWaitValue64`), and returns at once. The stream's
    /// later work is valid only if [`check`](Self::check) returns true: a stream is also
    /// released when the owner has died.
    ///
    /// The owner's own streams can wait for values that were signalled, or enqueued to be
    /// signalled. On one GPU, a wait enqueued before its own signal in the same process could block
    /// that signal.
    ///
    /// # Errors
    /// [`Error::PeerGone`] at once, if the owner is gone and did not reach the value;
    /// [`Error::Argument`] above [`VALUE_MAX`](Self::VALUE_MAX), for an owner above its last value,
    /// or for a stream of another device; [`Error::State`] for a stream that is being captured;
    /// [`Error::Driver`].
    pub fn wait(&self, stream: &Stream, value: u64) -> Result<()> {
        self.owner_process.check()?;
        stream.check_usable(&self.device)?;
        let limit = match &self.role {
            TimelineRole::Owner { signals, .. } => signals.timeline_server.signaller.last(),
            TimelineRole::Importer { .. } => VALUE_MAX,
        };
        if value > limit {
            return Err(beyond(value, limit));
        }
        // Work that is launched after the CPU has seen the value follows it without a wait on the
        // device.
        if self.check(value)? {
            return Ok(());
        }
        self.lane.wait(stream, value, &self.waiting)
    }

    /// Waits on the CPU until `value` is reached.
    ///
    /// # Errors
    /// [`Error::PeerGone`], [`Error::Timeout`], [`Error::Argument`] above
    /// [`VALUE_MAX`](Self::VALUE_MAX).
    pub fn wait_host<'w>(&self, value: u64, wait: impl Into<Wait<'w>>) -> Result<()> {
        if value > VALUE_MAX {
            return Err(beyond(value, VALUE_MAX));
        }
        let what = || format!("value {value} of timeline {:?}", self.name);
        let sleep = |slice| _ = self.lane.wait_host(value, slice);
        wait.into().until(what, || self.check(value), sleep)
    }

    /// Whether `value` has been reached: true, or false if it may still be.
    ///
    /// # Errors
    /// [`Error::PeerGone`]: it never will be. The stream's work behind its wait is not valid.
    pub fn check(&self, value: u64) -> Result<bool> {
        self.owner_process.check()?;
        match self.wait_status(value) {
            WaitStatus::Reached => Ok(true),
            WaitStatus::Pending => Ok(false),
            WaitStatus::Never => Err(self.gone()),
        }
    }

    /// The value now, or the last one if the owner is gone.
    pub fn value(&self) -> u64 {
        self.lane.value()
    }

    fn wait_status(&self, value: u64) -> WaitStatus {
        let wait_status = self.lane.wait_status(value);
        if let (
            WaitStatus::Pending,
            TimelineRole::Importer {
                session,
                death_handler,
            },
        ) = (wait_status, &self.role)
            && session.is_over()
            && session.is_dead()
        {
            // The reactor may not have ended the lane yet.
            death_handler.on_orphaned();
            return self.lane.wait_status(value);
        }
        wait_status
    }

    fn signals(&self) -> Result<&OwnerSignals> {
        match &self.role {
            TimelineRole::Owner { signals, .. } => signals.get(),
            TimelineRole::Importer { session, .. } => {
                self.owner_process.check()?;
                let owner = session.pid();
                let text = format!("it belongs to process {owner}, which alone may signal it");
                Err(Error::refused(&self.name, text))
            }
        }
    }

    fn above_reached(&self, value: u64, last: u64, reached: u64) -> Result<u64> {
        if reached < last {
            let (name, next) = (&self.name, "signal it on a stream, or wait for that value");
            let allowed = format!(
                "a signal when timeline {name:?}, which stands at {reached}, has reached {last}, \
                 which a stream has yet to signal: {next}"
            );
            return Err(Error::argument("value", value, allowed));
        }
        self.check_above(value, last)
    }

    fn check_above(&self, value: u64, last: u64) -> Result<u64> {
        match value {
            _ if value > VALUE_MAX => Err(beyond(value, VALUE_MAX)),
            _ if value <= last => Err(Error::argument(
                "value",
                value,
                format!(
                    "above {last}, to which timeline {:?} has been signalled",
                    self.name
                ),
            )),
            _ => Ok(value),
        }
    }

    fn gone(&self) -> Error {
        match &self.role {
            TimelineRole::Importer { session, .. } => session.owner_gone(),
            TimelineRole::Owner { .. } => {
                let (name, pid) = (self.name.clone(), std::process::id() as i32);
                Error::peer_gone(Kind::Timeline, name, pid, false)
            }
        }
    }
}

fn beyond(value: u64, limit: u64) -> Error {
    Error::argument("value", value, format!("up to {limit}"))
}

opaque_debug!(Timeline { name; value });

/// The owner's signals. The drop ends the timeline: first its streams complete their signals, then
/// the lanes end, then the memory is released.
struct OwnerSignals {
    timeline_server: Arc<TimelineServer>,
    /// The streams of this process that wait for it.
    waiting: Arc<StreamSet>,
    reactor: Arc<Reactor>,
}

impl Drop for OwnerSignals {
    fn drop(&mut self) {
        let signaller = self.timeline_server.signaller.clone();
        let mut signalled = Fence::later(self.timeline_server.signalling.clone());
        let mut waited = Fence::later(self.waiting.clone());
        let mut has_ended = false;
        self.reactor.drop_after(move || {
            let is_caught_up = signaller.catch_up();
            if !signalled.is_reached() || !is_caught_up {
                return false;
            }
            if !std::mem::replace(&mut has_ended, true) {
                signaller.end();
            }
            waited.is_reached()
        });
    }
}

/// Handles the owner's end. Runs on the reactor's thread: CPU stores alone.
struct OwnerDeathHandler {
    /// Set once the owner signals it.
    lane: OnceLock<SharedCounter>,
    published: SharedCounter,
}

impl OwnerDeathHandler {
    fn set_lane(&self, lane: SharedCounter, session: &ClientSession) {
        let _ = self.lane.set(lane);
        // Set first, then check: at the owner's death these happen in the opposite order.
        if session.is_dead() {
            self.on_orphaned();
        }
    }
}

impl SessionObserver for OwnerDeathHandler {
    /// The owner is dead. Its streams may have reached the importers one after the other: the last
    /// published value counts for all of them.
    fn on_orphaned(&self) {
        if let Some(lane) = self.lane.get() {
            lane.end_at(self.published.value());
        }
    }
}
