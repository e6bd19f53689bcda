//! The subscriber as users hold it.

use std::mem::MaybeUninit;
mod builder;
mod raw_sample;
mod reconnect;
#[cfg(test)]
mod tests;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::epoll;

pub use builder::SubscriberBuilder;
pub(crate) use raw_sample::{CompletionWait, RawSample};

use self::reconnect::ReconnectAttempt;
use super::publisher_link::{ConnectOptions, LinkState, PublisherLink, SubscriberIdentity};
use super::sample::{Discontinuity, Sample};
use crate::backend::DevicePtr;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::{CloseOnForkFd, OwnerProcess};
use crate::ipc::Kind;
use crate::ipc::PeerState;
use crate::ipc::domain::{Arrivals, Domain, EndpointName};
use crate::ipc::message::{timespec, wait_readable};
use crate::ipc::peer::{ORPHAN_TIMEOUT, ProcessId};
use crate::memory::region::Region;
use crate::nvtx;
use crate::pubsub::entry::{Description, Violation};
use crate::pubsub::ring::ReceiverRing;
use crate::runtime::doorbell::LocalDoorbell;
use crate::runtime::spin::{Came, Spin};
use crate::stream::Stream;

/// How long a sample's region may take to arrive behind the sample itself.
const REGION_TIMEOUT: Duration = Duration::from_secs(2);

/// How often a name that cannot be attached to for the moment is tried again without a sign of a new publisher.
const RETRY: Duration = Duration::from_millis(100);

/// What rings in a subscriber's one descriptor: its own process, its publisher, the domain.
const DOORBELL: u64 = 0;
const WAKE: u64 = 1;
const ARRIVALS: u64 = 2;
const TIMER: u64 = 3;

/// Receives the tensors of one publisher.
///
/// Not shared between threads (a cursor has one owner), but its samples may go anywhere. It can be polled:
/// [`AsFd`] gives a descriptor that is readable when [`try_receive`](Self::try_receive) is worth a call. Receive
/// until it gives `None` before waiting on it.
///
/// ```
/// # use std::time::Duration;
/// # use warpipe::{Device, Domain, Publisher, Subscriber};
/// # let folder = std::env::temp_dir().join(format!("warpipe-async-{}", std::process::id()));
/// # let (domain, device) = (Domain::at(&folder)?, Device::host());
/// # let publisher = Publisher::builder("a").domain(&domain).device(&device).build()?;
/// # let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
/// # runtime.block_on(async {
/// use tokio::io::unix::AsyncFd;
///
/// let subscriber = Subscriber::builder("a").domain(&domain).device(&device).build()?;
/// let stream = device.stream()?;
/// publisher.send_bytes(&stream, b"hello")?;
///
/// let mut readable = AsyncFd::new(subscriber).unwrap();
/// let sample = loop {
///     let mut guard = readable.readable_mut().await.unwrap();
///     match guard.get_inner_mut().try_receive(&stream)? {
///         Some(sample) => break sample,
///         None => guard.clear_ready(),
///     }
/// };
/// assert_eq!(sample.to_vec(Duration::from_secs(1))?, b"hello");
/// # Ok::<(), warpipe::Error>(())
/// # }).unwrap();
/// # drop(publisher); std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), warpipe::Error>(())
/// ```
#[derive(Debug)]
pub struct Subscriber {
    owner_process: OwnerProcess,
    options: SubscriberBuilder,
    name: EndpointName,
    domain: Domain,
    device: Device,
    doorbell: Arc<LocalDoorbell>,
    /// Says that a new publisher may have come. Only with `reconnect`.
    arrivals: Option<Arrivals>,
    /// Everything that can end a wait, in one descriptor.
    readable: CloseOnForkFd,
    /// An event loop polls `readable`: this end is asleep whenever no call of ours runs.
    is_polled: AtomicBool,
    /// Publishers are to ring for their samples: the one that is attached, and every one that is attached next.
    is_asleep: AtomicBool,
    /// Ends the sleep of an event loop when only another look can help. Made when it is first needed.
    timer: Option<CloseOnForkFd>,
    attached: Option<Attached>,
    /// The next publisher, which has not answered yet.
    attempt: Option<ReconnectAttempt>,
    discontinuity: Option<Discontinuity>,
    dropped_before: u64,
    spin: Spin,
}

/// The link to the current incarnation.
#[derive(Debug)]
struct Attached {
    link: Arc<PublisherLink>,
    ring: ReceiverRing,
    regions: Vec<Arc<Region>>,
    last_sequence: u64,
    region_missing_since: Option<Instant>,
    /// Taken from the ring, and the device refused to wait for it: next in turn.
    taken: Option<TakenSample>,
}

/// A sample that is this end's: its position, where its slot lies, what is true of it.
type TakenSample = (u64, DevicePtr, Box<Description>);

impl Subscriber {
    /// A subscriber to `name`, to be built.
    pub fn builder(name: &str) -> SubscriberBuilder {
        SubscriberBuilder {
            name: name.to_string(),
            domain: None,
            device: None,
            wait: None,
            reconnect: false,
            timeout: Duration::from_secs(10),
            spin: None,
            handshake_timeout: super::HANDSHAKE_TIMEOUT,
            kind: Kind::Publisher,
            orphan_timeout: ORPHAN_TIMEOUT,
            generation: None,
        }
    }

    fn new(
        options: SubscriberBuilder,
        name: EndpointName,
        domain: Domain,
        device: Device,
    ) -> Result<Subscriber> {
        let doorbell = Arc::new(LocalDoorbell::new()?);
        let readable = CloseOnForkFd::open(|| epoll::create(epoll::CreateFlags::CLOEXEC));
        let readable = readable.map_err(|e| Error::os("epoll_create1", "a subscriber", e))?;
        let watches_domain = options.reconnect || options.wait.is_some();
        let arrivals = if watches_domain {
            Some(domain.arrivals()?)
        } else {
            None
        };
        listen_to(&readable, doorbell.as_fd(), DOORBELL)?;
        if let Some(arrivals) = arrivals.as_ref().filter(|_| options.reconnect) {
            listen_to(&readable, arrivals.as_fd(), ARRIVALS)?;
        }
        let spin = Spin::new(options.spin);
        let mut subscriber = Subscriber {
            owner_process: OwnerProcess::current(),
            options,
            name,
            domain,
            device,
            doorbell,
            arrivals,
            readable,
            is_polled: AtomicBool::new(false),
            is_asleep: AtomicBool::new(false),
            timer: None,
            attached: None,
            attempt: None,
            discontinuity: None,
            dropped_before: 0,
            spin,
        };
        subscriber.attach_first()?;
        Ok(subscriber)
    }

    fn attach_first(&mut self) -> Result<()> {
        let start = Instant::now();
        let patience = self.options.wait.unwrap_or_default();
        loop {
            let error = match self.attach() {
                Ok(()) => return Ok(()),
                Err(error) if is_passing(&error) => error,
                Err(error) => return Err(error),
            };
            let left = patience.saturating_sub(start.elapsed());
            match &self.arrivals {
                Some(arrivals) if !left.is_zero() => {
                    wait_readable(arrivals.as_fd(), left.min(RETRY));
                    arrivals.drain();
                }
                _ => return Err(error),
            }
        }
    }

    fn attach(&mut self) -> Result<()> {
        let link = self.connect_options().attach()?;
        self.attached_by(link)
    }

    fn connect_options(&self) -> ConnectOptions {
        let generation = self
            .options
            .generation
            .unwrap_or_else(crate::runtime::reactor::new_generation);
        ConnectOptions {
            domain: self.domain.clone(),
            name: self.name.clone(),
            device: self.device.clone(),
            doorbell: self.doorbell.clone(),
            timeout: self.options.handshake_timeout,
            orphan_timeout: self.options.orphan_timeout,
            identity: SubscriberIdentity {
                kind: self.options.kind,
                generation,
            },
        }
    }

    fn attached_by(&mut self, link: Arc<PublisherLink>) -> Result<()> {
        listen_to(&self.readable, link.peer_doorbell.as_fd(), WAKE)
            .inspect_err(|_| link.leave())?;
        let ring = ReceiverRing::new(link.segment().clone());
        // Before the first look at this ring: an end that is about to sleep looks once more behind this.
        if self.is_asleep.load(Ordering::Relaxed) {
            ring.fall_asleep();
        }
        let regions = link.regions().clone();
        self.attached = Some(Attached {
            link,
            ring,
            regions,
            last_sequence: 0,
            region_missing_since: None,
            taken: None,
        });
        Ok(())
    }

    /// The name it listens to.
    pub fn name(&self) -> &str {
        self.name.as_str()
    }

    /// How its publisher fares; `None` while there is none.
    pub fn publisher_state(&self) -> Option<PeerState> {
        self.attached
            .as_ref()
            .map(|attached| attached.link.peer_state())
    }

    /// The publisher's process id; `None` while there is none.
    pub fn publisher_pid(&self) -> Option<i32> {
        self.attached
            .as_ref()
            .map(|attached| attached.link.peer.pid)
    }

    /// The publisher's process; `None` while there is none.
    pub(crate) fn publisher_process(&self) -> Option<ProcessId> {
        self.attached.as_ref().map(|attached| attached.link.peer.id)
    }

    /// Samples that it did not get because of the publisher's policy.
    pub fn dropped(&self) -> u64 {
        // The peer's word: it may be any number.
        self.dropped_before.saturating_add(
            self.attached
                .as_ref()
                .map_or(0, |attached| attached.link.dropped()),
        )
    }

    /// Waits for the next sample, as long as the builder's timeout says. `stream` will wait, on the device, until
    /// the sample's data is complete.
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::DescriptorLimit`] or [`Error::DeviceMemory`] instead when there is a sample, and this
    /// process lacks what it needs for its memory: it comes once there is room; [`Error::PublisherGone`] once everything that it completed has been received (not with
    /// `reconnect`); [`Error::Evicted`]; [`Error::Protocol`]; [`Error::Capturing`] for a stream that is being captured, and
    /// nothing is taken; [`Error::Forked`]; what the device says.
    pub fn receive(&mut self, stream: &Stream) -> Result<Sample> {
        self.receive_timeout(stream, self.options.timeout)
    }

    /// [`receive`](Self::receive) with another timeout.
    ///
    /// # Errors
    /// As [`receive`](Self::receive).
    pub fn receive_timeout(&mut self, stream: &Stream, timeout: Duration) -> Result<Sample> {
        let _range = nvtx::range(nvtx::RECEIVE);
        self.check_stream(stream)?;
        if let Some(sample) = self.poll(stream)? {
            return Ok(sample);
        }
        let start = Instant::now();
        loop {
            let limit = self.spin.limit().min(timeout);
            let polled = Instant::now();
            if let Some(sample) = self.spin_for(limit, stream)? {
                self.spin.tell(
                    limit,
                    Came::Polling {
                        elapsed: polled.elapsed(),
                    },
                );
                return Ok(sample);
            }
            self.fall_asleep();
            // Whatever came before the flag went up did not ring.
            if let Some(sample) = self.poll(stream)? {
                self.wake_up();
                return Ok(sample);
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                self.wake_up();
                return Err(self.nothing_within(timeout));
            }
            let asleep = Instant::now();
            self.sleep(left.min(self.patience()));
            self.wake_up();
            if let Some(sample) = self.poll(stream)? {
                self.spin.tell(
                    limit,
                    Came::Asleep {
                        slept: asleep.elapsed(),
                    },
                );
                return Ok(sample);
            }
        }
    }

    /// The next sample if there is one.
    ///
    /// # Errors
    /// As [`receive`](Self::receive), without the timeout.
    pub fn try_receive(&mut self, stream: &Stream) -> Result<Option<Sample>> {
        let _range = nvtx::range(nvtx::RECEIVE);
        self.check_stream(stream)?;
        if let Some(sample) = self.poll(stream)? {
            return Ok(Some(sample));
        }
        if !self.is_polled.load(Ordering::Relaxed) {
            return Ok(None);
        }
        self.drain();
        self.fall_asleep();
        let found = self.poll(stream)?;
        if found.is_none() && self.must_look_again() {
            self.set_timer(RETRY)?;
        }
        Ok(found)
    }

    /// All samples until the publisher has gone: the iterator ends when it said goodbye, and gives the error
    /// once for any other end.
    pub fn samples<'a>(&'a mut self, stream: &'a Stream) -> Samples<'a> {
        Samples {
            subscriber: self,
            stream,
            is_over: false,
        }
    }

    /// Why a wait has ended without a sample.
    fn nothing_within(&self, waited: Duration) -> Error {
        let held_up = self
            .attached
            .as_ref()
            .filter(|attached| attached.region_missing_since.is_some());
        // There is one: this process has no room for its memory.
        let want = held_up.and_then(|attached| attached.link.want());
        want.unwrap_or_else(|| Error::Timeout {
            what: format!("a sample of {:?}", self.name),
            waited,
        })
    }

    /// How long a sleep may last before the next look without having been woken.
    fn patience(&self) -> Duration {
        if self.must_look_again() {
            RETRY
        } else {
            Duration::from_secs(3600)
        }
    }

    /// Whether something may come that rings nobody: a publisher that could not let this end in, a region that was
    /// never announced.
    fn must_look_again(&self) -> bool {
        self.attached
            .as_ref()
            .is_none_or(|attached| attached.region_missing_since.is_some())
    }

    /// `timerfd_settime`: makes the descriptor readable after `pause`.
    fn set_timer(&mut self, pause: Duration) -> Result<()> {
        use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags};
        let failed = |call| move |e| Error::os(call, "a subscriber's timer", e);
        let timer = match &self.timer {
            Some(timer) => timer,
            None => {
                let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
                let timer = CloseOnForkFd::open(|| {
                    rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)
                });
                let timer = timer.map_err(failed("timerfd_create"))?;
                listen_to(&self.readable, timer.as_fd(), TIMER)?;
                self.timer.insert(timer)
            }
        };
        let once = Itimerspec {
            it_interval: timespec(Duration::ZERO),
            it_value: timespec(pause),
        };
        rustix::time::timerfd_settime(timer, TimerfdTimerFlags::empty(), &once)
            .map_err(failed("timerfd_settime"))?;
        Ok(())
    }

    fn spin_for(&mut self, limit: Duration, stream: &Stream) -> Result<Option<Sample>> {
        let start = Instant::now();
        while start.elapsed() < limit {
            for _ in 0..64 {
                if self
                    .attached
                    .as_ref()
                    .is_some_and(|attached| attached.ring.may_have_news())
                {
                    return self.poll(stream);
                }
                std::hint::spin_loop();
            }
        }
        Ok(None)
    }

    /// Asks to be rung for samples. Look once more before sleeping: whatever came before did not ring.
    fn fall_asleep(&self) {
        self.is_asleep.store(true, Ordering::Relaxed);
        if let Some(attached) = &self.attached {
            attached.ring.fall_asleep();
        }
    }

    fn wake_up(&self) {
        if self.is_polled.load(Ordering::Relaxed) {
            return;
        }
        self.is_asleep.store(false, Ordering::Relaxed);
        if let Some(attached) = &self.attached {
            attached.ring.wake_up();
        }
    }

    /// Sleeps until something rings, and takes in what rang and nothing else: each look at a silent descriptor is
    /// a system call on the way of a sample. What rings later makes the next sleep a short one.
    fn sleep(&self, limit: Duration) {
        let mut room = [const { MaybeUninit::uninit() }; 4];
        let Ok((events, _)) = epoll::wait(&self.readable, &mut room, Some(&timespec(limit))) else {
            return;
        };
        for event in events {
            match event.data.u64() {
                DOORBELL => self.doorbell.drain(),
                WAKE => self.drain_wake(),
                TIMER => self.drain_timer(),
                _ => self.arrivals.iter().for_each(Arrivals::drain),
            }
        }
    }

    /// Takes in everything that rang.
    fn drain(&self) {
        self.doorbell.drain();
        self.drain_wake();
        self.drain_timer();
        self.arrivals.iter().for_each(Arrivals::drain);
    }

    fn drain_timer(&self) {
        if let Some(timer) = &self.timer {
            let _ = rustix::io::read(timer, &mut [0u8; 8]);
        }
    }

    fn drain_wake(&self) {
        if let Some(attached) = &self.attached {
            attached.link.peer_doorbell.drain();
            if attached.link.peer_doorbell.is_closed() {
                // Readable for ever from now on; the end itself is told by the doorbell.
                let _ = epoll::delete(&self.readable, attached.link.peer_doorbell.as_fd());
            }
        }
    }

    /// Once for a receive: a thread that waits in it begins no capture.
    fn check_stream(&self, stream: &Stream) -> Result<()> {
        self.owner_process.check()?;
        stream.check_usable(&self.device)
    }

    /// One look, for a stream that was [checked](Self::check_stream). With `reconnect`, also at a publisher that is attached in its course: whatever that one sent before it
    /// was asked to ring does not ring.
    fn poll(&mut self, stream: &Stream) -> Result<Option<Sample>> {
        if self.attached.is_some()
            && let Some(found) = self.look(stream)?
        {
            return Ok(found);
        }
        match self.follow() {
            Ok(true) => Ok(self.look(stream)?.flatten()),
            Ok(false) => Ok(None),
            Err(error) if is_passing(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Goes on attaching to the next publisher, without waiting for it. Whether it is attached.
    fn follow(&mut self) -> Result<bool> {
        let Some(attempt) = &self.attempt else {
            if let Some(socket) = self.domain.connect_now(&self.name)? {
                self.attempt = Some(ReconnectAttempt::start(self.connect_options(), socket)?);
            }
            return Ok(false);
        };
        let Some(result) = attempt.result() else {
            return Ok(false);
        };
        self.attempt = None;
        self.attached_by(result?).map(|()| true)
    }

    /// One look at the publisher that is attached; `None` when that one is at its end and another is to be followed.
    fn look(&mut self, stream: &Stream) -> Result<Option<Option<Sample>>> {
        let Some(attached) = &mut self.attached else {
            return Ok(None);
        };
        match attached.poll(stream, &mut self.discontinuity) {
            Err(error) if self.options.reconnect && is_an_end(&error) => {
                self.detach(&error);
                Ok(None)
            }
            other => other.map(Some),
        }
    }

    fn detach(&mut self, end: &Error) {
        if let Some(old) = self.attached.take() {
            self.dropped_before = self.dropped_before.saturating_add(old.link.dropped());
            old.link.leave();
            let graceful = matches!(end, Error::PublisherGone { graceful: true, .. });
            self.discontinuity.get_or_insert(Discontinuity {
                previous_pid: old.link.peer.pid,
                graceful,
            });
            let _ = epoll::delete(&self.readable, old.link.peer_doorbell.as_fd());
        }
    }
}

impl Attached {
    fn poll(
        &mut self,
        stream: &Stream,
        discontinuity: &mut Option<Discontinuity>,
    ) -> Result<Option<Sample>> {
        loop {
            // Before the ring: what was sent before the end must be found before the end is told.
            let link_state = self.link.link_state();
            if link_state == LinkState::Failed {
                return Err(self.link.why_over());
            }
            let (position, address, description) = match self
                .taken
                .take()
                .map_or_else(|| self.next(), |it| Ok(Some(it)))
            {
                Ok(Some(next)) => next,
                Ok(None) if link_state == LinkState::Open || self.is_region_due() => {
                    return self.wait_for_region();
                }
                Ok(None) => return Err(self.link.why_over()),
                Err(violation) => return Err(self.fail(violation)),
            };
            match self.link.admit(position, stream) {
                Ok(true) => {
                    let (link, gap) = (self.link.clone(), discontinuity.take());
                    return Ok(Some(Sample::new(
                        link,
                        address,
                        position,
                        description,
                        stream,
                        gap,
                    )));
                }
                Ok(false) => {}
                Err(error) => {
                    self.taken = Some((position, address, description));
                    return Err(error);
                }
            }
        }
    }

    /// Takes and checks the next sample in the ring.
    fn next(&mut self) -> Result<Option<TakenSample>, Violation> {
        let Some(position) = self.take()? else {
            return Ok(None);
        };
        let (address, description) = self.check()?;
        // Whatever becomes of it: one that its publisher left incomplete is lost, and the next one follows it.
        self.last_sequence = description.sequence;
        if let Some(completion) = description.completion {
            self.link.note_completion(position, completion)?;
        }
        Ok(Some((position, address, description)))
    }

    fn take(&mut self) -> Result<Option<u64>, Violation> {
        let (link, regions) = (&self.link, &mut self.regions);
        let missing = &mut self.region_missing_since;
        self.ring.take(|id| {
            if id as usize >= regions.len() {
                regions.clone_from(&link.regions());
            }
            let known = (id as usize) < regions.len();
            *missing = if known {
                None
            } else {
                missing.or_else(|| Some(Instant::now()))
            };
            known
        })
    }

    /// A sample is there, and its region has been announced but not mapped yet.
    fn is_region_due(&self) -> bool {
        // In this order: it may have been mapped since the ring was looked at, and is not on its way any more then.
        self.region_missing_since.is_some()
            && (self.link.is_mapping() || self.link.regions().len() > self.regions.len())
    }

    /// Nothing to take: either nothing was sent, or its region is still on its way, for a while.
    fn wait_for_region(&mut self) -> Result<Option<Sample>> {
        match self.region_missing_since {
            Some(since) if since.elapsed() > REGION_TIMEOUT && !self.is_region_due() => {
                let allowed = format!("one of the {} announced", self.regions.len());
                Err(self.fail(Violation {
                    field: "region",
                    found: "one never announced".into(),
                    allowed,
                }))
            }
            _ => Ok(None),
        }
    }

    /// Judges what was taken last. The link keeps the region mapped.
    fn check(&self) -> Result<(DevicePtr, Box<Description>), Violation> {
        let copy = self.ring.copy();
        let region = &self.regions[copy.region() as usize];
        let description = copy.check(region.bytes())?;
        let follows = match self.last_sequence {
            0 => description.sequence > 0,
            last if self.link.lossless => last.checked_add(1) == Some(description.sequence),
            last => description.sequence > last,
        };
        if !follows {
            let allowed = if self.link.lossless {
                "the next after"
            } else {
                "more than"
            };
            let allowed = format!("{allowed} {}", self.last_sequence);
            return Err(Violation {
                field: "sequence",
                found: description.sequence.to_string(),
                allowed,
            });
        }
        Ok((region.ptr() + description.slot, description))
    }

    fn fail(&self, violation: Violation) -> Error {
        self.link.fail(self.link.violation(violation));
        self.link.why_over()
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        if let Some((position, ..)) = self.taken.take()
            && self.link.owner_process.is_current()
        {
            self.link.give_back(position);
        }
    }
}

impl Subscriber {
    /// Makes the descriptor of [`AsFd`] readable once: for a caller that keeps a sample aside for whoever polls it.
    pub fn ring(&self) {
        self.doorbell.ring();
    }
}

impl AsFd for Subscriber {
    /// A descriptor that is readable when a sample, or the end, may have come (an epoll descriptor; it nests). With
    /// [`reconnect`](SubscriberBuilder::reconnect) also every 100 ms while there is no publisher.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.is_polled.store(true, Ordering::Relaxed);
        self.fall_asleep();
        if self
            .attached
            .as_ref()
            .is_none_or(|at| at.taken.is_some() || at.ring.may_have_news())
        {
            self.doorbell.ring();
        }
        self.readable.as_fd()
    }
}

impl std::os::fd::AsRawFd for Subscriber {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        if let Some(attached) = &self.attached {
            if self.owner_process.is_current() {
                attached.link.leave();
            } else {
                // A forked child: the parent's link is not ours to close.
                std::mem::forget((attached.link.clone(), attached.regions.clone()));
            }
        }
    }
}

/// See [`Subscriber::samples`].
#[derive(Debug)]
pub struct Samples<'a> {
    subscriber: &'a mut Subscriber,
    stream: &'a Stream,
    is_over: bool,
}

impl Iterator for Samples<'_> {
    type Item = Result<Sample>;

    fn next(&mut self) -> Option<Result<Sample>> {
        if self.is_over {
            return None;
        }
        match self.subscriber.receive(self.stream) {
            Err(Error::PublisherGone { graceful: true, .. }) => {
                self.is_over = true;
                None
            }
            Err(error) => {
                self.is_over = !matches!(error, Error::Timeout { .. });
                Some(Err(error))
            }
            Ok(sample) => Some(Ok(sample)),
        }
    }
}

/// Whether trying again later can help.
fn is_passing(error: &Error) -> bool {
    use crate::error::HandshakeFault::{Closed, Silent};
    matches!(
        error,
        Error::NoPublisher { .. }
            | Error::Handshake {
                fault: Closed | Silent(_),
                ..
            }
    )
}

/// Whether the error is the end of one link: its publisher's, or one that this end closed and has told why.
fn is_an_end(error: &Error) -> bool {
    matches!(
        error,
        Error::PublisherGone { .. } | Error::Evicted { .. } | Error::LinkClosed { .. }
    )
}

fn listen_to(readable: &CloseOnForkFd, fd: BorrowedFd<'_>, what: u64) -> Result<()> {
    epoll::add(
        readable,
        fd,
        epoll::EventData::new_u64(what),
        epoll::EventFlags::IN,
    )
    .map_err(|e| Error::os("epoll_ctl", "a subscriber's descriptor", e))
}
