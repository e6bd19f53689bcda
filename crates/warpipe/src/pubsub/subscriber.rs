//! The public subscriber: its handle, receiving, and the next publisher after one has gone. How it
//! sleeps and is woken: [`wait`]; the samples of one link, and replies: [`link_receiver`].

mod link_receiver;
mod options;
#[cfg(test)]
mod tests;
mod wait;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

pub(crate) use link_receiver::LinkReceiver;
pub use options::SubscriberOptions;

use self::link_receiver::EndedLink;
use self::wait::{DOORBELL, TickRinger, WAKE};
use super::publisher_link::{ConnectOptions, PublisherLink};
use super::sample::{PreviousPublisher, Sample};
use crate::error::{Error, ErrorKind, HandshakeFault, Result, StateFault};
use crate::fork::OwnerProcess;
use crate::fork::leak_on_fork::LeakOnFork;
use crate::ipc::Kind;
use crate::ipc::client_handshake::HandshakeLimit;
use crate::ipc::domain::{Arrivals, EndpointName};
use crate::ipc::{self, PeerState, until_found};
use crate::nvtx;
use crate::options::chosen_place;
use crate::pubsub::entry::Violation;
use crate::pubsub::observer::ReplyLink;
use crate::runtime::attempt::Attempt;
use crate::runtime::doorbell::LocalDoorbell;
use crate::runtime::epoll::{EpollSet, EventFlags};
use crate::runtime::reactor::Reactor;
use crate::runtime::spin::Polls;
use crate::statistics::{self, EndpointRow, EndpointWords, Role};
use crate::stream::Stream;
use crate::wait::{OptionalExtension, Wait};

/// How often attaching is tried again without a sign of a new publisher, while a name cannot be
/// attached to for the moment.
const RETRY: Duration = Duration::from_millis(100);

/// What [`Subscriber::publisher`] reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PublisherInfo {
    /// The publisher's process id.
    pub pid: i32,
    /// The publisher's state.
    pub state: PeerState,
}

/// Receives the tensors of one publisher.
///
/// Not shared between threads (a cursor has one owner), but its samples may go anywhere. It can be
/// polled: [`AsFd`](std::os::fd::AsFd) gives a descriptor that is readable when a
/// [`receive`](Self::receive) without a wait is worth a call. Receive until it says
/// [`Error::Timeout`] before waiting on it.
///
/// ```
/// # use std::time::Duration;
/// # use warpipe::{Device, Domain, Publisher, Subscriber, SubscriberOptions};
/// # let folder = std::env::temp_dir().join(format!("warpipe-async-{}", std::process::id()));
/// # let (domain, device) = (Domain::at(&folder)?, Device::host());
/// # let publisher = Publisher::new("a", domain.on(&device))?;
/// # let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
/// # runtime.block_on(async {
/// use tokio::io::unix::AsyncFd;
///
/// let subscriber = Subscriber::open("a", domain.on(&device), Duration::ZERO)?;
/// let stream = device.stream()?;
/// publisher.send_bytes(&stream, b"hello")?;
///
/// let mut readable = AsyncFd::new(subscriber).unwrap();
/// let sample = loop {
///     let mut guard = readable.readable_mut().await.unwrap();
///     match guard.get_inner_mut().receive(&stream, Duration::ZERO) {
///         Err(warpipe::Error::Timeout { .. }) => guard.clear_ready(),
///         received => break received?,
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
    options: SubscriberOptions,
    at: ConnectOptions,
    /// Rings the doorbell when a new publisher may have appeared. Only with `reconnect`.
    arrivals: Option<Arrivals>,
    /// Everything that can end a wait, in one descriptor.
    pub(crate) readable: EpollSet,
    /// An event loop polls `readable`: this end counts as asleep whenever no call of this type
    /// runs.
    is_polled: AtomicBool,
    /// Publishers are asked to ring for their samples: the attached one, and every one that is
    /// attached next.
    is_asleep: AtomicBool,
    /// Ends the sleeps of an event loop while only another poll can help.
    ringer: Option<Arc<TickRinger>>,
    /// The sources that have ended a sleep and are not drained.
    rung: u64,
    attached: Option<LeakOnFork<LinkReceiver>>,
    /// The handshake with the next publisher, while it has not answered.
    attempt: Option<Attempt<Arc<PublisherLink>>>,
    /// The link of the samples received last, once it has ended, until the next sample.
    ended: Option<EndedLink>,
    dropped_before: u64,
    /// Its row of this process's statistics page.
    row: Arc<EndpointRow>,
}

impl Subscriber {
    /// Waits for a publisher of the name, and attaches: [`Duration::ZERO`] asks for one that is
    /// there.
    ///
    /// # Errors
    /// [`NotFound`](crate::Error::NotFound), [`Name`](crate::Error::Name),
    /// [`Handshake`](crate::Error::Handshake), [`Refused`](crate::Error::Refused),
    /// [`Device`](crate::Error::Device), [`Os`](crate::Error::Os), or an error of the driver;
    /// [`Timeout`](crate::Error::Timeout) when the wait is cancelled while a publisher does not
    /// answer. On an error nothing is left behind.
    pub fn open<'w>(
        name: &str,
        options: SubscriberOptions,
        wait: impl Into<Wait<'w>>,
    ) -> Result<Subscriber> {
        Subscriber::to_kind(name, options, (Kind::Publisher, false), wait)
    }

    /// A subscriber to an endpoint of this kind, and whether it sends replies to it.
    pub(crate) fn to_kind<'w>(
        name: &str,
        options: SubscriberOptions,
        (kind, has_replies): (Kind, bool),
        wait: impl Into<Wait<'w>>,
    ) -> Result<Subscriber> {
        let name = EndpointName::new(name)?;
        let (domain, device) = chosen_place(&options.domain, &options.device)?;
        let wait = &wait.into();
        let doorbell = Arc::new(LocalDoorbell::new()?);
        let readable = EpollSet::new("a subscriber")?;
        readable.add(&*doorbell, DOORBELL, EventFlags::IN)?;
        let rings = || domain.ring_at_arrivals(doorbell.clone());
        let arrivals = options.reconnect.then(rings).transpose()?;
        let row = EndpointRow::open(&EndpointWords {
            kind,
            role: Role::Peer,
            name: name.as_str(),
            domain: domain.identity(),
            device: Some(device.info().id),
            generation: [0; 16],
            depth: 0,
            memory_max: 0,
        });
        let at = ConnectOptions {
            domain,
            name,
            device,
            doorbell,
            timeout: options.handshake_timeout,
            orphan_timeout: options.orphan_timeout,
            kind,
            has_replies,
        };
        let mut subscriber = Subscriber {
            owner_process: OwnerProcess::current(),
            options,
            at,
            arrivals,
            readable,
            is_polled: AtomicBool::new(false),
            is_asleep: AtomicBool::new(false),
            ringer: None,
            rung: 0,
            attached: None,
            attempt: None,
            ended: None,
            dropped_before: 0,
            row: Arc::new(row),
        };
        subscriber.attach_first(wait)?;
        Ok(subscriber)
    }

    fn attach_first(&mut self, wait: &Wait<'_>) -> Result<()> {
        let domain = self.at.domain.clone();
        // Of this wait alone, unless the subscriber keeps one to reconnect.
        let mut arrivals = self.arrivals.take();
        let keeps = arrivals.is_some();
        let found = until_found(&domain, wait, &mut arrivals, is_transient, || {
            let attached = self.at.attach(wait);
            let link = attached.inspect_err(|_| statistics::write_slow_paths())?;
            self.attach_to(link)
        });
        self.arrivals = arrivals.filter(|_| keeps);
        found
    }

    fn attach_to(&mut self, link: Arc<PublisherLink>) -> Result<()> {
        self.readable
            .add(&*link.end.peer_doorbell, WAKE, EventFlags::IN)
            .inspect_err(|_| link.leave())?;
        self.row.set_domain(self.at.domain.identity());
        self.row.attach_to(link.terms.generation);
        // The numbers of the link before go on.
        let last_received = match &self.ended {
            Some(ended) if ended.source == link.terms.source => ended.last_received,
            _ => 0,
        };
        let attached = LinkReceiver::new(link, last_received, self.row.clone());
        // Set before this ring is first polled: an end that is about to sleep polls once more after
        // this.
        if self.is_asleep.load(Ordering::Relaxed) {
            attached.set_asleep(true);
        }
        self.attached = Some(LeakOnFork::new(attached));
        Ok(())
    }

    /// The name of the publisher that this subscribes to.
    pub(crate) fn name(&self) -> &str {
        self.at.name.as_str()
    }

    /// The domain of the publisher's name.
    pub(super) fn domain_identity(&self) -> [u64; 2] {
        self.at.domain.identity()
    }

    fn link(&self) -> Option<&Arc<PublisherLink>> {
        self.attached.as_ref().map(|attached| &attached.link)
    }

    /// Its publisher; `None` while there is none.
    pub fn publisher(&self) -> Option<PublisherInfo> {
        let link = self.link()?;
        Some(PublisherInfo {
            pid: link.end.peer.pid,
            state: link.peer_state(),
        })
    }

    /// Random bytes that name the incarnation of the publisher that gave the samples their numbers:
    /// that of this subscriber's publisher, or of the one that it
    /// [forwards](crate::PublisherOptions::forwards). `None` while there is no publisher.
    #[doc(hidden)] // For the bridge.
    pub fn publisher_source(&self) -> Option<[u8; 16]> {
        self.link().map(|link| link.terms.source)
    }

    /// The link of its replies.
    pub(super) fn link_of_replies(&self) -> Result<Arc<PublisherLink>> {
        self.link().cloned().ok_or_else(|| self.not_found())
    }

    /// Closes the link because of the publisher's violation.
    pub(crate) fn fail(&self, violation: Violation) -> Error {
        match &self.attached {
            Some(attached) => attached.fail(violation),
            None => self.not_found(),
        }
    }

    fn not_found(&self) -> Error {
        Error::NotFound {
            kind: self.at.kind,
            name: self.at.name.to_string(),
            domain: self.at.domain.path().to_owned(),
            was_there: false,
        }
    }

    /// Samples that this subscriber did not get because of the publisher's policy.
    pub fn dropped(&self) -> u64 {
        // The peer states this number, so it may have any value.
        let dropped = self.link().map_or(0, |link| link.dropped());
        self.dropped_before.saturating_add(dropped)
    }

    /// Takes the next sample, and waits for it if there is none. `stream` will wait, on the device,
    /// until the sample's data is complete.
    ///
    /// # Errors
    /// * [`Error::Timeout`]; errors of the device; [`Error::State`], also for a stream that is
    ///   being captured, and nothing is taken.
    /// * [`Error::PeerGone`] once every sample that the publisher completed has been received (not
    ///   with `reconnect`); [`StateFault::LinkClosed`] when the publisher has closed this link
    ///   alone.
    /// * [`Error::Protocol`], and [`Error::Os`] or [`Error::Limit`] when this process has no
    ///   room for a region: these close the link, and later calls return
    ///   [`StateFault::LinkClosed`].
    /// * For a sample [in place](crate::SampleInfo::is_in_place) with memory that cannot be opened:
    ///   the errors of [`LegacyHandle::open`](crate::LegacyHandle::open) and
    ///   [`Ticket::open`](crate::Ticket::open), or [`Error::Lost`] where those are of
    ///   [`ErrorKind::PeerGone`]. That sample alone is missing. While its owner does not answer,
    ///   which is [`Error::Handshake`] after 5 s, it stays the next.
    pub fn receive<'w>(&mut self, stream: &Stream, wait: impl Into<Wait<'w>>) -> Result<Sample> {
        self.receive_behind(stream, &mut None, wait)
    }

    /// Drops `previous`, and [receives](Self::receive) the next sample with its stream. While the
    /// data of both is not complete, release and wait are one call of the driver
    /// (`cuStreamBatchMemOp`), which the device executes faster than two. Whatever the result,
    /// `previous` is released, and its release waits for no other sample.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use warpipe::{Device, Domain, Publisher, Subscriber};
    /// # let folder = std::env::temp_dir().join(format!("warpipe-next-{}", std::process::id()));
    /// # let (domain, device) = (Domain::at(&folder)?, Device::host());
    /// # let publisher = Publisher::new("a", domain.on(&device))?;
    /// # let mut subscriber = Subscriber::open("a", domain.on(&device), Duration::ZERO)?;
    /// # let stream = device.stream()?;
    /// # for byte in 0..3 { publisher.send_bytes(&stream, &[byte])?; }
    /// # let limit = Duration::from_secs(5);
    /// let mut sample = subscriber.receive(&stream, limit)?;
    /// for _ in 0..2 {
    ///     // Enqueue the work that reads `sample` on `stream`.
    ///     sample = subscriber.receive_next(sample, limit)?;
    /// }
    /// assert_eq!(sample.to_vec(limit)?, [2]);
    /// # drop((sample, publisher)); std::fs::remove_dir_all(folder).ok();
    /// # Ok::<(), warpipe::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`receive`](Self::receive).
    pub fn receive_next<'w>(
        &mut self,
        previous: Sample,
        wait: impl Into<Wait<'w>>,
    ) -> Result<Sample> {
        let stream = previous.stream().clone();
        self.receive_behind(&stream, &mut Some(previous), wait)
    }

    #[inline]
    fn receive_behind<'w>(
        &mut self,
        stream: &Stream,
        previous: &mut Option<Sample>,
        wait: impl Into<Wait<'w>>,
    ) -> Result<Sample> {
        let _range = nvtx::range(nvtx::RECEIVE);
        self.check_stream(stream)?;
        if let Some(attached) = &mut self.attached {
            attached.note_released(previous.as_ref());
        }
        // The clock is read only if there is something to wait for.
        match self.poll(stream, previous)? {
            Some(sample) => Ok(sample),
            None => self.wait_for_sample(stream, previous, &wait.into()),
        }
    }

    /// As [`poll`](Self::poll), and opens the memory of a sample that does not lie in its slot.
    fn poll_opening(
        &mut self,
        stream: &Stream,
        previous: &mut Option<Sample>,
    ) -> Result<Option<Sample>> {
        match self.poll(stream, previous)? {
            None => {
                *previous = None;
                self.open_next(stream)
            }
            polled => Ok(polled),
        }
    }

    /// The next sample, if its memory had to be opened first, and is open.
    fn open_next(&mut self, stream: &Stream) -> Result<Option<Sample>> {
        while let Some(attached) = &mut self.attached
            && let opened = attached.open_taken(&self.at)
            && opened.optional()? == Some(true)
        {
            if let Some(sample) = self.poll(stream, &mut None)? {
                return Ok(Some(sample));
            }
        }
        Ok(None)
    }

    fn wait_for_sample(
        &mut self,
        stream: &Stream,
        previous: &mut Option<Sample>,
        wait: &Wait<'_>,
    ) -> Result<Sample> {
        if self.attached.as_ref().is_some_and(|at| at.taken.is_some())
            && let Some(sample) = self.poll_opening(stream, previous)?
        {
            return Ok(sample);
        }
        let is_polled = self.is_polled.load(Ordering::Relaxed);
        if wait.limit().is_zero() && !is_polled {
            return Err(self.nothing_within(wait));
        }
        loop {
            let polls = Polls::for_at_most(self.options.spin.min(wait.time_left()));
            if let Some(sample) = self.poll_while(polls, stream, previous, wait)? {
                return Ok(sample);
            }
            *previous = None;
            match is_polled {
                true => self.drain(),
                false => self.drain_rung(),
            }
            self.set_asleep(true);
            // A sample published before the flag was set did not ring.
            if let Some(sample) = self.poll_opening(stream, previous)? {
                self.set_asleep(false);
                return Ok(sample);
            }
            let pause = wait.slice();
            if pause.is_zero() {
                return self.end_wait(wait);
            }
            self.sleep(pause.min(self.longest_sleep()));
            self.set_asleep(false);
            if let Some(sample) = self.poll_opening(stream, previous)? {
                return Ok(sample);
            }
        }
    }

    /// Ends a wait without a sample.
    fn end_wait<T>(&mut self, wait: &Wait<'_>) -> Result<T> {
        self.set_asleep(false);
        if !(self.is_polled.load(Ordering::Relaxed) && self.must_look_again()) {
            self.ringer = None;
        } else if self.ringer.is_none() {
            let (reactor, doorbell) = (Reactor::of_process()?, self.at.doorbell.clone());
            let ringer = self.ringer.insert(Arc::new(TickRinger(doorbell)));
            let me: Weak<TickRinger> = Arc::downgrade(ringer);
            reactor.register_ticks(me);
        }
        Err(self.nothing_within(wait))
    }

    /// All samples until the publisher has gone, each waited for as long as `limit`: the iterator
    /// ends when the publisher closed gracefully, and returns the error once for any other end. A
    /// timeout is no end, nor is a sample that is lost, or with memory that is gone
    /// ([`Error::Handle`]); behind another error of one sample
    /// [`receive`](Self::receive) gives the next one.
    pub fn samples<'a>(&'a mut self, stream: &'a Stream, limit: Duration) -> Samples<'a> {
        Samples {
            subscriber: self,
            stream,
            limit,
            is_over: false,
        }
    }

    /// The error of a wait that ended without a sample.
    fn nothing_within(&self, wait: &Wait<'_>) -> Error {
        wait.timed_out(|| {
            let is_asked = |at: &LeakOnFork<LinkReceiver>| at.asked.is_some();
            let pid = self.publisher().map(|publisher| publisher.pid);
            let cause = match pid {
                Some(_) if self.attached.as_ref().is_some_and(is_asked) => {
                    "the owner of its memory has not answered".into()
                }
                Some(pid) => format!("process {pid} publishes it, and has sent no other"),
                None => "it has no publisher now".into(),
            };
            format!("a sample of {:?} ({cause})", self.at.name)
        })
    }

    /// Checked once for each receive: a thread that waits in it begins no capture.
    fn check_stream(&self, stream: &Stream) -> Result<()> {
        self.owner_process.check()?;
        stream.check_usable(&self.at.device)
    }

    /// Polls once, for a stream that was [checked](Self::check_stream). With `reconnect`, also
    /// polls a publisher that is attached during the call: samples that it sent before it was asked
    /// to ring did not ring.
    #[inline]
    fn poll(&mut self, stream: &Stream, previous: &mut Option<Sample>) -> Result<Option<Sample>> {
        match self.attached.as_ref().is_some_and(|at| at.is_quiet()) {
            true => Ok(None),
            false => self.poll_link(stream, previous),
        }
    }

    /// Not inline: a poll that finds nothing would set up the frame of one that takes a sample.
    #[inline(never)]
    fn poll_link(
        &mut self,
        stream: &Stream,
        previous: &mut Option<Sample>,
    ) -> Result<Option<Sample>> {
        loop {
            if let Some(attached) = &mut self.attached {
                match attached.poll(stream, previous, &mut self.ended) {
                    Err(error) if self.options.reconnect && is_an_end(&error) => {
                        self.detach(&error)
                    }
                    polled => return polled,
                }
            }
            // Once more at most: an attempt that begins in this call has no result in it.
            match self.follow() {
                Ok(true) => {}
                Err(error) if !is_transient(&error) => return Err(error),
                Ok(false) | Err(_) => return Ok(None),
            }
        }
    }

    /// Continues attaching to the next publisher, without waiting for it. Returns whether it is
    /// attached.
    fn follow(&mut self) -> Result<bool> {
        let Some(attempt) = &self.attempt else {
            self.attempt = Some(self.reconnect()?);
            return Ok(false);
        };
        let Some(result) = attempt.result() else {
            return Ok(false);
        };
        self.attempt = None;
        let link = result.inspect_err(|_| statistics::write_slow_paths())?;
        self.attach_to(link).map(|()| true)
    }

    /// Begins the handshake with the next publisher.
    fn reconnect(&self) -> Result<Attempt<Arc<PublisherLink>>> {
        let options = self.at.clone();
        let socket = self.at.domain.connect(&self.at.name, self.at.kind, None)?;
        let reach = move |wait: &Wait<'_>| {
            options.shake_hands(socket, &HandshakeLimit::new(options.timeout, wait))
        };
        let leave = |link: Arc<PublisherLink>| link.leave();
        Attempt::start(
            self.at.name.as_str(),
            self.at.doorbell.clone(),
            reach,
            leave,
        )
    }

    fn detach(&mut self, end: &Error) {
        if let Some(old) = self.attached.take() {
            self.row.detach();
            self.dropped_before = self.dropped_before.saturating_add(old.link.dropped());
            let publisher = PreviousPublisher {
                pid: old.link.end.peer.pid,
                graceful: matches!(end, Error::PeerGone { graceful: true, .. }),
            };
            let ended = self.ended.get_or_insert(EndedLink {
                generation: old.link.terms.generation,
                source: old.link.terms.source,
                publisher,
                last_received: old.last_received,
            });
            // Links that ended before any of their samples was received change nothing, but for
            // what they say of the same publisher's end.
            if ended.generation == old.link.terms.generation {
                ended.publisher = publisher;
            }
            self.readable.remove(&*old.link.end.peer_doorbell);
        }
    }
}

impl Subscriber {
    /// Makes the descriptor of [`AsFd`](std::os::fd::AsFd) readable once: for a caller that keeps a
    /// sample aside for an event loop.
    #[doc(hidden)] // For the Python package.
    pub fn ring(&self) {
        self.at.doorbell.ring();
    }
}

/// See [`Subscriber::samples`].
#[derive(Debug)]
pub struct Samples<'a> {
    subscriber: &'a mut Subscriber,
    stream: &'a Stream,
    limit: Duration,
    is_over: bool,
}

impl Iterator for Samples<'_> {
    type Item = Result<Sample>;

    fn next(&mut self) -> Option<Result<Sample>> {
        if self.is_over {
            return None;
        }
        match self.subscriber.receive(self.stream, self.limit) {
            Err(Error::PeerGone { graceful: true, .. }) => {
                self.is_over = true;
                None
            }
            Err(error) => {
                let is_end = error.kind() != ErrorKind::Timeout;
                self.is_over = is_end && !error.is_of_one_sample();
                Some(Err(error))
            }
            Ok(sample) => Some(Ok(sample)),
        }
    }
}

/// Whether trying again later can help: also where a stopped publisher may have a successor.
fn is_transient(error: &Error) -> bool {
    let silent = |fault: &HandshakeFault| matches!(fault, HandshakeFault::Silent(_));
    ipc::is_transient(error) || matches!(error, Error::Handshake { fault, .. } if silent(fault))
}

/// Whether the error is the end of one link: ended by its publisher, or closed by this end, which
/// has reported why.
fn is_an_end(error: &Error) -> bool {
    matches!(
        error,
        Error::PeerGone { .. } | Error::State(StateFault::LinkClosed { .. })
    )
}
