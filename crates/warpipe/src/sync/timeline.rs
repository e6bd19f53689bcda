//! A number that only grows, and that streams of several processes signal and wait for.
//!
//! One process owns a timeline and signals it; any other opens it by name and has its streams wait. The owner shares a
//! [page](crate::shm::page) with each importer, and with nobody else: its streams signal a [lane](crate::shm::counter)
//! in every one of them, behind which stands a lane in the owner's own memory.
//!
//! **Who can do what to whom.** An importer can write the page that it shares with the owner, and so deceive itself. It
//! cannot write or see the others' pages, cannot hold up the owner's streams, and cannot remove a page under a stream:
//! the page is sealed against that before anybody registers it.
//!
//! The owner's end: at its proven death each importer's reactor writes down the last value and raises the word in its own
//! page above all others, with CPU stores alone. An owner that closes does the same itself when its streams have
//! signalled what they were given.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::{CloseOnForkFd, OwnerProcess};
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::{
    AccessPolicy, Address, ClientInfo, ClientSession, Disconnected, IncomingReply, IpcServer, Kind,
    OutgoingReply, REPLY_TIMEOUT, Rejection, RequestHandler, ServerCore, SessionObserver, decode,
    encode,
};
use crate::runtime::fence::{Fence, StreamSet};
use crate::runtime::reactor::{DropReadiness, Reactor};
use crate::shm::counter::{COUNTER_BYTES, SharedCounter, VALUE_MAX, WaitStatus};
use crate::shm::page::{SharedPage, UnsealedPage};
use crate::shm::signaler::Signaler;
use crate::stream::Stream;

/// Where the lane lies in the page.
const LANE_OFFSET: usize = 0;

/// What an owner says of the page that it shares with an importer.
#[derive(Debug, Serialize, Deserialize)]
struct TimelineGrant {
    bytes: u64,
}

/// What an importer says, once: it has mapped and sealed that page. The answer comes when the page has the value so far.
#[derive(Debug, Serialize, Deserialize)]
struct PageSealed;

crate::ipc::messages!(TimelineGrant, PageSealed);

/// A named 64-bit value that only grows, across processes (Vulkan's timeline semaphore; on CUDA
/// `cuStreamWriteValue64` and `cuStreamWaitValue64`).
///
/// ```
/// use std::time::Duration;
/// use warpipe::{Device, Domain, Timeline};
/// # let folder = std::env::temp_dir().join(format!("warpipe-timeline-{}", std::process::id()));
/// # let domain = Domain::at(&folder)?;
/// let device = Device::host();
/// let owner = Timeline::create(&domain, "frames", &device)?;
/// let frames = Timeline::open(&domain, "frames", &device)?; // in another process, as a rule
///
/// let (writing, reading) = (device.stream()?, device.stream()?);
/// owner.signal(&writing, 1)?; // behind the work that is on `writing` so far
/// frames.wait(&reading, 1)?; // what is enqueued on `reading` from here on comes after it; the CPU does not wait
/// reading.synchronize(Duration::from_secs(1))?;
/// assert!(frames.check(1)?); // an error if the owner died, and the stream was let go without it
/// # drop((owner, frames)); std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), warpipe::Error>(())
/// ```
pub struct Timeline {
    name: String,
    device: Device,
    owner_process: OwnerProcess,
    reactor: Arc<Reactor>,
    /// The owner's own, or the copy of it that an importer shares with the owner.
    lane: SharedCounter,
    /// Those that signal it.
    signalling: Arc<StreamSet>,
    /// Those that wait for it.
    waiting: Arc<StreamSet>,
    role: TimelineRole,
}

enum TimelineRole {
    Owner {
        server: Option<IpcServer>,
        raiser: Arc<Signaler>,
    },
    Importer {
        session: Option<ClientSession>,
        death_handler: Arc<OwnerDeathHandler>,
        pid: i32,
    },
}

impl Timeline {
    /// The largest value that can be signalled or waited for, 2^63 - 2.
    pub const VALUE_MAX: u64 = VALUE_MAX;

    /// Makes a timeline at 0 and takes its name (`cuMemHostRegister`). Up to 256 others may open it, of the same user;
    /// each costs a page of shared memory, and for each signal one store more by the device.
    ///
    /// # Errors
    /// [`Error::Name`], [`Error::NameTaken`], [`Error::ForeignFile`], [`Error::Domain`], or what the device or the
    /// system says. Nothing is left behind.
    pub fn create(domain: &Domain, name: &str, device: &Device) -> Result<Timeline> {
        let name = EndpointName::new(name)?;
        let reactor = Reactor::of_process()?;
        let lane = SharedCounter::new(
            &Arc::new(SharedPage::private(device, COUNTER_BYTES)?),
            LANE_OFFSET,
        );
        let (published, fd) = SharedPage::publish(Some(device), COUNTER_BYTES)?;
        let raiser = Arc::new(
            Signaler::new(lane.clone(), 0)
                .publishing(SharedCounter::new(&Arc::new(published), LANE_OFFSET)),
        );
        let signalling = Arc::new(StreamSet::default());
        let timeline_server = TimelineServer {
            device: device.clone(),
            raiser: raiser.clone(),
            signalling: signalling.clone(),
            drafts: Mutex::default(),
            published: fd,
        };
        let at = Address {
            domain,
            name: &name,
            kind: Kind::Timeline,
        };
        let server = IpcServer::open(&at, AccessPolicy::default(), Arc::new(timeline_server))?;
        let role = TimelineRole::Owner {
            server: Some(server),
            raiser,
        };
        Ok(Timeline::assemble(
            name.to_string(),
            device,
            reactor,
            lane,
            signalling,
            role,
        ))
    }

    /// Opens a timeline that is there, in any process, this one among them.
    ///
    /// # Errors
    /// [`Error::NoOwner`], [`Error::OtherKind`], [`Error::AccessDenied`], [`Error::Handshake`], [`Error::Protocol`],
    /// or what the device or the system says.
    pub fn open(domain: &Domain, name: &str, device: &Device) -> Result<Timeline> {
        Timeline::open_timeout(domain, name, device, Duration::ZERO)
    }

    /// Opens a timeline, and waits up to `timeout` for it to be made.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn open_timeout(
        domain: &Domain,
        name: &str,
        device: &Device,
        timeout: Duration,
    ) -> Result<Timeline> {
        let name = EndpointName::new(name)?;
        let at = Address {
            domain,
            name: &name,
            kind: Kind::Timeline,
        };
        let (session, incoming) = ClientSession::attach(&at, Some(device.info().id), &[], timeout)?;
        let (reactor, pid) = (session.reactor().clone(), session.pid());
        let [lane, published] = map_pages(incoming, device, name.as_str())?;
        let death_handler = Arc::new(OwnerDeathHandler {
            lane: lane.clone(),
            published,
            is_over: AtomicBool::new(false),
        });
        let settled = session
            .observe(death_handler.clone())
            .and_then(|()| session.request(&encode(&PageSealed)?, REPLY_TIMEOUT));
        if let Err(error) = settled {
            // Not dropped here: to unregister memory, a driver may wait for a stream that waits for a peer.
            reactor.defer_drop(Box::new((session, death_handler, lane)));
            return Err(error);
        }
        let role = TimelineRole::Importer {
            session: Some(session),
            death_handler,
            pid,
        };
        Ok(Timeline::assemble(
            name.to_string(),
            device,
            reactor,
            lane,
            Arc::default(),
            role,
        ))
    }

    fn assemble(
        name: String,
        device: &Device,
        reactor: Arc<Reactor>,
        lane: SharedCounter,
        signalling: Arc<StreamSet>,
        role: TimelineRole,
    ) -> Timeline {
        let (device, waiting) = (device.clone(), Arc::default());
        Timeline {
            name,
            device,
            owner_process: OwnerProcess::current(),
            reactor,
            lane,
            signalling,
            waiting,
            role,
        }
    }

    /// The endpoint's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device whose streams signal and wait.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Whether this handle may signal.
    pub fn is_owner(&self) -> bool {
        matches!(self.role, TimelineRole::Owner { .. })
    }

    /// Signals `value` behind the stream's work so far (`cuStreamWriteValue64`), and returns at once. On several
    /// streams the values are reached in the order of the calls: a stream waits, on the device, for the one before.
    ///
    /// # Errors
    /// [`Error::NotOwner`]; [`Error::Backwards`] unless it is above the last value; [`Error::Argument`] above
    /// [`VALUE_MAX`](Self::VALUE_MAX), or for a stream of another device; [`Error::Capturing`] for one that is being
    /// captured; [`Error::Timeout`] after 10 s in which the driver holds up another thread's signal (its stream's launch
    /// queue is full); [`Error::Driver`].
    pub fn signal(&self, stream: &Stream, value: u64) -> Result<()> {
        self.owner_process.check()?;
        let raiser = self.raiser()?;
        stream.check_usable(&self.device)?;
        raiser
            .raise(stream, &self.signalling, |last| {
                self.check_above(value, last)
            })
            .map(drop)
    }

    /// Signals `value` now, from the CPU.
    ///
    /// # Errors
    /// As for [`signal`](Self::signal), and [`Error::SignalPending`] while a stream has yet to signal an earlier value.
    pub fn signal_now(&self, value: u64) -> Result<()> {
        self.owner_process.check()?;
        self.raiser()?
            .raise_now(|last, reached| self.above_reached(value, last, reached))
    }

    /// [`signal`](Self::signal), or without a stream [`signal_now`](Self::signal_now), unless another thread's signal is
    /// under way: then false, and nothing was done. See [`wait_for_turn`](Self::wait_for_turn).
    ///
    /// # Errors
    /// As for these, without the timeout.
    pub fn try_signal(&self, stream: Option<&Stream>, value: u64) -> Result<bool> {
        self.owner_process.check()?;
        let raiser = self.raiser()?;
        let raised = match stream {
            Some(stream) => {
                stream.check_usable(&self.device)?;
                raiser
                    .try_raise(stream, &self.signalling, |last| {
                        self.check_above(value, last)
                    })?
                    .map(drop)
            }
            None => {
                raiser.try_raise_now(|last, reached| self.above_reached(value, last, reached))?
            }
        };
        Ok(raised.is_some())
    }

    /// Waits until no other thread's signal is under way, at most `timeout`, and says whether that is so.
    ///
    /// # Errors
    /// [`Error::NotOwner`], [`Error::Forked`].
    pub fn wait_for_turn(&self, timeout: Duration) -> Result<bool> {
        self.owner_process.check()?;
        Ok(self.raiser()?.wait_for_turn(timeout))
    }

    /// Has `stream` wait for `value` (`cuStreamWaitValue64`), and returns at once. What the stream did afterwards
    /// counts when [`check`](Self::check) says so: a stream whose owner died is let go, too.
    ///
    /// The owner's own streams can wait for what has been signalled, or given to a stream to be signalled. On one
    /// GPU, a wait that stands before its own signal in the same process could hold that signal up.
    ///
    /// # Errors
    /// [`Error::OwnerGone`] at once, if the owner is gone and left the value unreached; [`Error::Argument`] above
    /// [`VALUE_MAX`](Self::VALUE_MAX), of an owner above its last value, or for a stream of another device;
    /// [`Error::Capturing`] for one that is being captured; [`Error::Driver`].
    pub fn wait(&self, stream: &Stream, value: u64) -> Result<()> {
        self.owner_process.check()?;
        stream.check_usable(&self.device)?;
        let limit = if let TimelineRole::Owner { raiser, .. } = &self.role {
            raiser.last()
        } else {
            VALUE_MAX
        };
        if value > limit {
            return Err(Error::argument("value", value, format!("up to {limit}")));
        }
        // Work that is launched after the CPU has seen the value is behind it without a wait on the device.
        if self.check(value)? {
            return Ok(());
        }
        self.lane.wait(stream, value, &self.waiting)
    }

    /// Waits on the CPU until `value` is reached.
    ///
    /// # Errors
    /// [`Error::OwnerGone`], [`Error::Timeout`], [`Error::Argument`] above [`VALUE_MAX`](Self::VALUE_MAX).
    pub fn wait_host(&self, value: u64, timeout: Duration) -> Result<()> {
        self.owner_process.check()?;
        if value > VALUE_MAX {
            return Err(Error::argument(
                "value",
                value,
                format!("up to {VALUE_MAX}"),
            ));
        }
        if self.check(value)? {
            return Ok(());
        }
        self.lane.wait_host(&self.device, value, timeout)?;
        if self.check(value)? {
            return Ok(());
        }
        Err(Error::Timeout {
            what: format!("value {value} of timeline {:?}", self.name),
            waited: timeout,
        })
    }

    /// Whether `value` has been reached: true, or false if it may still be.
    ///
    /// # Errors
    /// [`Error::OwnerGone`]: it has not been, and never will be. What a stream did behind its wait does not count.
    pub fn check(&self, value: u64) -> Result<bool> {
        self.owner_process.check()?;
        match self.wait_status(value) {
            WaitStatus::Reached => Ok(true),
            WaitStatus::Pending => Ok(false),
            WaitStatus::Never => Err(self.gone()),
        }
    }

    /// The value now; the last one, when the owner is gone.
    pub fn value(&self) -> u64 {
        self.lane.value()
    }

    fn wait_status(&self, value: u64) -> WaitStatus {
        let wait_status = self.lane.wait_status(value);
        if let (
            WaitStatus::Pending,
            TimelineRole::Importer {
                session: Some(session),
                death_handler,
                ..
            },
        ) = (wait_status, &self.role)
            && death_handler.is_over.load(SeqCst)
            && session.is_dead()
        {
            // Before the reactor has come to it, perhaps.
            death_handler.end();
            return self.lane.wait_status(value);
        }
        wait_status
    }

    fn raiser(&self) -> Result<&Signaler> {
        match &self.role {
            TimelineRole::Owner { raiser, .. } => Ok(raiser),
            TimelineRole::Importer { pid, .. } => Err(Error::NotOwner {
                name: self.name.clone(),
                pid: *pid,
            }),
        }
    }

    fn above_reached(&self, value: u64, last: u64, reached: u64) -> Result<u64> {
        if reached < last {
            return Err(Error::SignalPending {
                name: self.name.clone(),
                value,
                last,
                reached,
            });
        }
        self.check_above(value, last)
    }

    fn check_above(&self, value: u64, last: u64) -> Result<u64> {
        match value {
            _ if value > VALUE_MAX => Err(Error::argument(
                "value",
                value,
                format!("up to {VALUE_MAX}"),
            )),
            _ if value <= last => Err(Error::Backwards {
                name: self.name.clone(),
                value,
                last,
            }),
            _ => Ok(value),
        }
    }

    fn gone(&self) -> Error {
        match &self.role {
            TimelineRole::Importer {
                session: Some(session),
                ..
            } => session.owner_gone(),
            _ => {
                let (name, pid) = (self.name.clone(), std::process::id() as i32);
                Error::OwnerGone {
                    kind: Kind::Timeline,
                    name,
                    pid,
                    graceful: false,
                }
            }
        }
    }
}

impl fmt::Debug for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timeline")
            .field("name", &self.name)
            .field("is_owner", &self.is_owner())
            .field("value", &self.value())
            .finish_non_exhaustive()
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        if !self.owner_process.is_current() {
            // What the parent has is not ours to end, and its memory may be used by it.
            if let TimelineRole::Owner { server, raiser } = &mut self.role {
                std::mem::forget((server.take(), raiser.clone()));
            }
            if let TimelineRole::Importer { session, .. } = &mut self.role {
                std::mem::forget(session.take());
            }
            return std::mem::forget(self.lane.clone());
        }
        let (signalling, waiting) = (self.signalling.clone(), self.waiting.clone());
        match &mut self.role {
            TimelineRole::Owner { server, raiser } => {
                drop(server.take());
                close_owner(&self.reactor, raiser.clone(), signalling, waiting);
            }
            TimelineRole::Importer { session, .. } => {
                close_importer(&self.reactor, self.lane.clone(), session.take(), waiting)
            }
        }
    }
}

/// An owner's end: first what its streams have yet to signal, then the word of its end, then the memory.
fn close_owner(
    reactor: &Reactor,
    raiser: Arc<Signaler>,
    signalling: Arc<StreamSet>,
    waiting: Arc<StreamSet>,
) {
    let (mut signalled, mut waited, mut has_ended) = (None, None, false);
    reactor.drop_after(move || {
        let is_caught_up = raiser.catch_up();
        if !is_fence_passed(&mut signalled, &signalling) || !is_caught_up {
            return DropReadiness::Busy;
        }
        if !std::mem::replace(&mut has_ended, true) {
            raiser.end();
        }
        if !is_fence_passed(&mut waited, &waiting) {
            return DropReadiness::Busy;
        }
        if Arc::strong_count(&raiser) > 1 {
            DropReadiness::Held
        } else {
            DropReadiness::Ready
        }
    });
}

/// An importer's end. The visit goes on for as long as a stream of ours may wait: its reactor is what lets it go.
fn close_importer(
    reactor: &Reactor,
    lane: SharedCounter,
    mut session: Option<ClientSession>,
    waiting: Arc<StreamSet>,
) {
    let mut waited = None;
    reactor.drop_after(move || {
        if !is_fence_passed(&mut waited, &waiting) {
            return DropReadiness::Busy;
        }
        drop(session.take());
        if Arc::strong_count(lane.page()) > 1 {
            DropReadiness::Held
        } else {
            DropReadiness::Ready
        }
    });
}

fn is_fence_passed(fence: &mut Option<Fence>, streams: &StreamSet) -> bool {
    fence.get_or_insert_with(|| streams.fence()).is_reached()
}

/// Maps the page that the owner made for this process alone, and seals it, so that no other process maps it; and the one
/// that the owner publishes.
fn map_pages(incoming: IncomingReply, device: &Device, name: &str) -> Result<[SharedCounter; 2]> {
    let (grant, [fd, published]) = incoming.open::<TimelineGrant, 2>(name)?;
    let bytes = usize::try_from(grant.bytes).unwrap_or(usize::MAX);
    let published = SharedPage::read(published, bytes, name)?;
    let own = UnsealedPage::open(fd, bytes, name)?.close(device, name)?;
    Ok([own, published].map(|page| SharedCounter::new(&Arc::new(page), LANE_OFFSET)))
}

/// Gives a page of its own to each importer.
struct TimelineServer {
    device: Device,
    raiser: Arc<Signaler>,
    signalling: Arc<StreamSet>,
    published: CloseOnForkFd,
    /// Pages that their importers have not sealed.
    drafts: Mutex<HashMap<u64, UnsealedPage>>,
}

impl TimelineServer {
    fn drafts(&self) -> MutexGuard<'_, HashMap<u64, UnsealedPage>> {
        self.drafts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Signals an importer no more, and lets its page go behind what was enqueued for it. Should the importer live, its streams
    /// are let go.
    fn remove_importer(&self, server_core: &ServerCore, client: &ClientInfo) {
        self.drafts().remove(&client.id);
        let Some(copy) = self.raiser.remove(client.id) else {
            return;
        };
        let (raiser, streams, mut fence) = (self.raiser.clone(), self.signalling.clone(), None);
        server_core.reactor().drop_after(move || {
            // Before the proof: a signal that is on its way to a stream holds it.
            if Arc::strong_count(copy.page()) > 1 {
                return DropReadiness::Held;
            }
            if !is_fence_passed(&mut fence, &streams) {
                return DropReadiness::Busy;
            }
            copy.end_at(raiser.own().value());
            DropReadiness::Ready
        });
    }
}

impl RequestHandler for TimelineServer {
    fn on_connect(
        &self,
        _: &ServerCore,
        client: &ClientInfo,
        _: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        let draft = UnsealedPage::create(COUNTER_BYTES)?;
        let fds = vec![
            draft.descriptor()?,
            CloseOnForkFd::duplicate(&self.published)?,
        ];
        let answer = OutgoingReply::new(
            &TimelineGrant {
                bytes: draft.bytes() as u64,
            },
            fds,
        )?;
        self.drafts().insert(client.id, draft);
        Ok(answer)
    }

    fn on_request(
        &self,
        server_core: &ServerCore,
        client: &ClientInfo,
        body: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        let PageSealed = decode(body, server_core.name())?;
        let draft = self
            .drafts()
            .remove(&client.id)
            .ok_or_else(|| Rejection("it has its page".into()))?;
        let copy = SharedCounter::new(
            &Arc::new(draft.confirm(&self.device, server_core.name())?),
            LANE_OFFSET,
        );
        if !self.raiser.add(client.id, &copy) {
            let raiser = self.raiser.clone();
            server_core.reactor().drop_after(move || raiser.catch_up());
        }
        Ok(OutgoingReply::default())
    }

    fn on_suspect(&self, server_core: &ServerCore, client: &ClientInfo) {
        self.remove_importer(server_core, client);
    }

    fn holds_anything(&self, _: &ClientInfo) -> bool {
        false
    }

    fn on_disconnect(&self, server_core: &ServerCore, client: &ClientInfo, _: Disconnected) {
        self.remove_importer(server_core, client);
    }

    /// On the reactor's thread, which no driver holds up: CPU stores alone.
    fn on_server_tick(&self, _: &ServerCore, _: u64) {
        self.raiser.catch_up();
    }
}

/// Sees the owner's end. On the reactor's thread: CPU stores alone.
struct OwnerDeathHandler {
    lane: SharedCounter,
    published: SharedCounter,
    is_over: AtomicBool,
}

impl OwnerDeathHandler {
    /// The owner is proven dead. Its streams may have come to the importers one after the other: what it published last
    /// counts for all of them.
    fn end(&self) {
        self.lane.end_at(self.published.value());
    }
}

impl SessionObserver for OwnerDeathHandler {
    fn on_closed(&self, _graceful: bool) {
        self.is_over.store(true, SeqCst);
    }

    fn on_orphaned(&self) {
        self.on_proven_dead();
    }

    fn on_proven_dead(&self) {
        self.is_over.store(true, SeqCst);
        self.end();
    }
}
