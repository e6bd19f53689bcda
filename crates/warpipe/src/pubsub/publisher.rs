//! The public publisher: builder and handle.

mod loan;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use self::loan::check_length;
pub use self::loan::{SampleMut, SendError, SlotHold, SlotReturn};
use super::publisher_core::{PublisherCore, SendFailure, SubscriberChanges};
use crate::backend::DevicePtr;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::leak_on_fork::LeakOnFork;
use crate::ipc::Kind;
use crate::ipc::PeerState;
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::peer::Peer;
use crate::memory::arena::check_limit;
use crate::options::{EndpointOptions, option_setters};
use crate::pubsub::entry::Metadata;
use crate::shm::segment::DEPTH_MAX;
use crate::slow_path::SlowPath;
use crate::stream::Stream;
use crate::tensor::Layout;

/// The action when a subscriber's ring is full. Declared by the publisher, for each subscriber.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Policy {
    /// `send` waits for room, then fails with [`Error::Timeout`], and no subscriber gets the
    /// sample.
    Block {
        /// The longest wait.
        timeout: Duration,
    },
    /// The subscriber loses the oldest sample that it has not received yet. Samples that it holds
    /// stay.
    DropOldest,
    /// The subscriber does not get this sample.
    DropNewest,
    /// `send` fails at once with [`Error::Full`], and no subscriber gets the sample.
    Fail,
}

impl Policy {
    /// Whether a subscriber under this policy sees every sample.
    pub(crate) fn is_lossless(self) -> bool {
        matches!(self, Policy::Block { .. } | Policy::Fail)
    }
}

/// The credentials of a subscriber that asks to attach. A publisher's policy can depend on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerCredentials {
    /// Its process id.
    pub pid: i32,
    /// Its effective user id.
    pub uid: u32,
    /// Its effective group id.
    pub gid: u32,
}

type PolicyOf = Arc<dyn Fn(&PeerCredentials) -> Policy + Send + Sync>;

/// The options of a publisher. See [`Publisher::builder`].
#[derive(Clone)]
pub struct PublisherBuilder {
    name: String,
    pub(super) kind: Kind,
    pub(super) shared: EndpointOptions,
    policy: Policy,
    policy_of: Option<PolicyOf>,
    pub(super) depth: u32,
    pub(super) history: u32,
    pub(super) timestamps: bool,
    /// The source of the samples that this publisher forwards.
    pub(super) forwards: Option<[u8; 16]>,
    pub(super) loan_timeout: Duration,
    pub(super) evict_after: Option<Duration>,
    /// Receives the changes of the set of subscribers. With an observer, each sample also signals
    /// its slot's fence word, so that it can be forwarded.
    pub(super) observer: Option<Arc<SubscriberChanges>>,
}

impl PublisherBuilder {
    option_setters! { (shared):
        shared,
        /// The domain to publish in; the environment's by default.
        domain,
        /// The device that holds the samples; [`Device::preferred`] by default.
        device,
        /// The most device memory that the samples may take, in bytes: 4 GiB by default. It is taken
        /// as needed, in regions that double. Slots held by stopped or leaving subscribers may come on
        /// top, at most as much again.
        memory_limit,
        /// How long a subscriber may take to attach before its connection is closed: 5 s by default.
        handshake_timeout,
        allow_uids,
        allow_gids,
    }

    fn new(name: &str) -> PublisherBuilder {
        PublisherBuilder {
            name: name.to_string(),
            kind: Kind::Publisher,
            shared: EndpointOptions::default(),
            policy: Policy::Block {
                timeout: Duration::from_secs(5),
            },
            policy_of: None,
            depth: 16,
            history: 0,
            timestamps: false,
            forwards: None,
            loan_timeout: Duration::from_secs(5),
            evict_after: None,
            observer: None,
        }
    }

    /// How many samples each subscriber may have been given and not released: 1 to 4096, 16 by
    /// default.
    pub fn depth(mut self, samples: u32) -> Self {
        self.depth = samples;
        self
    }

    /// The action when a subscriber's ring is full: [`Policy::Block`] for 5 s by default.
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// A policy for each subscriber, chosen by its credentials.
    pub fn policy_of(
        mut self,
        choose: impl Fn(&PeerCredentials) -> Policy + Send + Sync + 'static,
    ) -> Self {
        self.policy_of = Some(Arc::new(choose));
        self
    }

    /// How many of the last samples a late subscriber gets first: 0 by default, at most the depth.
    pub fn history(mut self, samples: u32) -> Self {
        self.history = samples;
        self
    }

    /// Whether samples say when they were sent, and received: see
    /// [`Sample::sent_at_ns`](crate::Sample::sent_at_ns). Not by default: each costs a look
    /// at the clock, and the time is a word more in each entry of the ring.
    pub fn timestamps(mut self, stamps: bool) -> Self {
        self.timestamps = stamps;
        self
    }

    /// This publisher forwards the samples of another one under their numbers: `source` is its
    /// [`publisher_source`](crate::Subscriber::publisher_source). [`Publisher::skip_to`] may leave
    /// out numbers, and subscribers accept a gap under every policy. A subscriber that follows the
    /// name from one forwarder of a source to the next one sees the numbers go on: it is told how
    /// many samples are missing in between, and receives none twice.
    pub fn forwards(mut self, source: [u8; 16]) -> Self {
        self.forwards = Some(source);
        self
    }

    /// How long [`Publisher::loan`] waits for memory that is in use: 5 s by default.
    pub fn loan_timeout(mut self, timeout: Duration) -> Self {
        self.loan_timeout = timeout;
        self
    }

    /// Close the link of a subscriber that has given no sign of life for this long; never by
    /// default. Its samples stay untouched until it releases them or dies. Counted in steps of 200
    /// ms in which this process itself runs; at least 500 ms.
    pub fn evict_after(mut self, silence: Option<Duration>) -> Self {
        self.evict_after = silence;
        self
    }

    /// The most subscribers at once: 256 by default. A subscriber counts from its `Hello` until it
    /// has left and released all its samples, or is proven dead. Beyond the limit a new one gets
    /// [`HandshakeFault::Full`](crate::HandshakeFault::Full).
    pub fn subscribers_max(mut self, subscribers: u32) -> Self {
        self.shared.access.limits.all = subscribers;
        self
    }

    /// The most subscribers of each user other than this process's own: 128 by default.
    pub fn subscribers_per_user_max(mut self, subscribers: u32) -> Self {
        self.shared.access.limits.user = subscribers;
        self
    }

    /// The most subscribers in each other process: 64 by default.
    pub fn subscribers_per_process_max(mut self, subscribers: u32) -> Self {
        self.shared.access.limits.process = subscribers;
        self
    }

    /// The kind of this endpoint, as processes that open it see it.
    pub(crate) fn kind(mut self, kind: Kind) -> Self {
        self.kind = kind;
        self
    }

    /// For an owner that chooses which subscriber gets which sample: `observer` is notified of
    /// every subscriber that comes or goes.
    pub(crate) fn observed_by(mut self, observer: &Arc<SubscriberChanges>) -> Self {
        self.observer = Some(observer.clone());
        self
    }

    /// Takes the name and starts to listen.
    ///
    /// # Errors
    /// [`Error::Name`], [`Error::NameTaken`] (with the holder's pid), [`Error::ForeignFile`],
    /// [`Error::Domain`], [`Error::Argument`], or an error of the device or the system. On an error
    /// nothing is left behind.
    pub fn build(self) -> Result<Publisher> {
        self.check()?;
        let name = EndpointName::new(&self.name)?;
        let domain = self.shared.domain()?;
        let device = self.shared.device();
        check_limit(&device, self.shared.memory_limit)?;
        let claim = domain.claim(&name, self.shared.access.is_open_to_others())?;
        let core = PublisherCore::new(self, name.to_string(), device, claim)?;
        Ok(Publisher {
            core: LeakOnFork::new(core),
        })
    }

    fn check(&self) -> Result<()> {
        if self.depth == 0 || self.depth > DEPTH_MAX {
            return Err(Error::argument(
                "depth",
                self.depth,
                format!("1 to {DEPTH_MAX}"),
            ));
        }
        if self.history > self.depth {
            return Err(Error::argument(
                "history",
                self.history,
                format!("0 to the depth, {}", self.depth),
            ));
        }
        if let Some(silence) = self
            .evict_after
            .filter(|&silence| silence < Duration::from_millis(500))
        {
            return Err(Error::argument(
                "evict_after",
                format!("{silence:?}"),
                "at least 500 ms, or none",
            ));
        }
        Ok(())
    }

    pub(super) fn policy_for(&self, peer: &Peer) -> Policy {
        let peer = PeerCredentials {
            pid: peer.pid,
            uid: peer.uid,
            gid: peer.gid,
        };
        self.policy_of
            .as_ref()
            .map_or(self.policy, |choose| choose(&peer))
    }
}

impl fmt::Debug for PublisherBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PublisherBuilder")
            .field("name", &self.name)
            .field("depth", &self.depth)
            .finish_non_exhaustive()
    }
}

/// The state of one subscriber. See [`Publisher::subscribers`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SubscriberInfo {
    /// Its process id.
    pub pid: i32,
    /// Its effective user id.
    pub uid: u32,
    /// Alive, stalled, leaving, suspect or dead.
    pub state: PeerState,
    /// Time since its last sign of life.
    pub silent_for: Duration,
    /// Samples that it was given and has not released.
    pub in_flight: u32,
    /// Samples that it did not get because of its policy.
    pub dropped: u64,
}

/// Hands tensors in device memory to any number of subscribers.
///
/// ```
/// use std::time::Duration;
/// use warpipe::{DType, Device, Domain, Layout, Publisher, Subscriber};
/// # let folder = std::env::temp_dir().join(format!("warpipe-doc-{}", std::process::id()));
/// # let (domain, device) = (Domain::at(&folder)?, Device::host());
/// let publisher = Publisher::builder("camera/front").domain(&domain).device(&device).build()?;
/// let mut subscriber = Subscriber::builder("camera/front").domain(&domain).device(&device).build()?;
///
/// let stream = device.stream()?;
/// let mut frame = publisher.loan(&Layout::contiguous(DType::U8, &[2, 3])?)?;
/// frame.write(&stream, &[1, 2, 3, 4, 5, 6])?; // or a kernel of yours, on frame.ptr()
/// frame.send(&stream)?;
///
/// let sample = subscriber.receive(&stream)?;
/// assert_eq!(sample.to_vec(Duration::from_secs(1))?, [1, 2, 3, 4, 5, 6]);
/// # drop((sample, subscriber, publisher)); std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), warpipe::Error>(())
/// ```
#[derive(Debug)]
pub struct Publisher {
    pub(super) core: LeakOnFork<Arc<PublisherCore>>,
}

impl Publisher {
    /// A builder for a publisher of `name`.
    pub fn builder(name: &str) -> PublisherBuilder {
        PublisherBuilder::new(name)
    }

    /// The name of this publisher.
    pub fn name(&self) -> &str {
        &self.core.name
    }

    /// The device of this publisher.
    pub fn device(&self) -> &Device {
        &self.core.device
    }

    /// Lends a slot for a tensor of this layout: memory of this device that no subscriber reads.
    /// Its contents are undefined. No memory is allocated while a free slot fits.
    ///
    /// # Errors
    /// [`Error::MemoryLimit`] when the limit is in use for longer than the loan's timeout;
    /// [`Error::DeviceMemory`]; [`Error::Forked`].
    pub fn loan(&self, layout: &Layout) -> Result<SampleMut> {
        let (slot, address) = self.core.take_slot(layout.bytes())?;
        Ok(SampleMut {
            core: Arc::clone(&self.core),
            slot: Some(slot),
            address,
            layout: *layout,
            metadata: Metadata::EMPTY,
            behind: None,
            earlier: Vec::new(),
        })
    }

    /// Loans, copies `bytes` in and sends, as a one-dimensional `uint8` tensor. Returns the
    /// sequence number.
    ///
    /// # Errors
    /// As [`loan`](Self::loan) and [`SampleMut::send`].
    pub fn send_bytes(&self, stream: &Stream, bytes: &[u8]) -> Result<u64> {
        self.send_slice(stream, &Layout::bytes_only(bytes.len() as u64)?, bytes)
    }

    /// Loans, copies the slot's whole contents from host memory and sends. Returns the sequence
    /// number.
    ///
    /// # Errors
    /// As [`loan`](Self::loan), [`SampleMut::write`] and [`SampleMut::send`].
    pub fn send_slice(&self, stream: &Stream, layout: &Layout, bytes: &[u8]) -> Result<u64> {
        check_length(layout, bytes)?;
        // As a loan would, but without `SampleMut`: a loan carries its layout along, and this one
        // is never returned to the caller.
        let (slot, address) = self.core.take_slot(layout.bytes())?;
        let sent = self
            .fill(stream, address, bytes)
            .map_err(SendFailure::BeforePublish);
        let sent = sent.and_then(|()| self.core.send(slot, layout, &Metadata::EMPTY, stream, None));
        sent.map_err(|unsent| match unsent {
            SendFailure::BeforePublish(error) => {
                // Behind the copy, which may be enqueued even if a later step failed.
                let device = stream.check_of(&self.core.device);
                let behind = device.map_or(&[][..], |()| std::slice::from_ref(stream));
                let _ = self.core.return_slot(slot, behind);
                error
            }
            SendFailure::AfterPublish(error) => error,
        })
    }

    /// Copies `bytes` to the slot at `address`, which the caller has taken and which is at least as
    /// long.
    fn fill(&self, stream: &Stream, address: DevicePtr, bytes: &[u8]) -> Result<()> {
        stream.check_of(&self.core.device)?;
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the stream is live; the slot is the caller's alone and as long as the layout,
        // which was compared with `bytes`, and stays so until the stream has passed this copy:
        // `send` publishes it behind the stream's work.
        unsafe { stream.upload(address, bytes) }
    }

    /// Loans, copies from another device pointer on `stream` and sends. Returns the sequence
    /// number.
    ///
    /// # Errors
    /// As [`loan`](Self::loan) and [`SampleMut::send`].
    ///
    /// # Safety
    /// `source` is readable by the device for `layout.bytes()` bytes until the stream has done the
    /// copy.
    pub unsafe fn send_device(
        &self,
        stream: &Stream,
        layout: &Layout,
        source: DevicePtr,
    ) -> Result<u64> {
        stream.check_usable(&self.core.device)?;
        let mut sample = self.loan(layout)?;
        sample.stay_behind(stream);
        if layout.bytes() > 0 {
            // SAFETY: the slot is this loan's alone and as long as the layout; the caller promises
            // that the source is readable.
            unsafe { stream.copy(sample.slot_ptr(), source, layout.bytes())? };
        }
        Ok(sample.send(stream)?)
    }

    /// Gives the next sample this number, for a publisher that forwards the samples of another one.
    /// Subscribers see the gap in the samples' numbers. [`Subscriber::dropped`](crate::Subscriber::dropped)
    /// does not count it: no policy dropped a sample.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use warpipe::{Device, Domain, Publisher, Subscriber};
    /// # let folder = std::env::temp_dir().join(format!("warpipe-skip-{}", std::process::id()));
    /// # let (domain, device) = (Domain::at(&folder)?, Device::host());
    /// let first = Publisher::builder("a").domain(&domain).device(&device).build()?;
    /// let mut from = Subscriber::builder("a").domain(&domain).device(&device).build()?;
    /// let source = from.publisher_source().unwrap();
    /// let builder = Publisher::builder("b").domain(&domain).device(&device);
    /// let forwarder = builder.forwards(source).build()?;
    /// let mut subscriber = Subscriber::builder("b").domain(&domain).device(&device).build()?;
    ///
    /// let stream = device.stream()?;
    /// for number in 1..=3 {
    ///     first.send_bytes(&stream, &[number])?;
    ///     let sample = from.receive(&stream)?;
    ///     // Leaves out the second.
    ///     if number != 2 {
    ///         forwarder.skip_to(sample.sequence())?;
    ///         forwarder.send_bytes(&stream, &sample.to_vec(Duration::from_secs(1))?)?;
    ///     }
    /// }
    /// assert_eq!(subscriber.receive(&stream)?.sequence(), 1);
    /// let third = subscriber.receive(&stream)?;
    /// assert_eq!((third.sequence(), third.discontinuity().unwrap().missing), (3, 1));
    /// # drop((third, subscriber, forwarder, from, first)); std::fs::remove_dir_all(folder).ok();
    /// # Ok::<(), warpipe::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Argument`] for a number that has been given, or is 0, and for a publisher that was
    /// built without [`forwards`](PublisherBuilder::forwards); [`Error::Forked`].
    pub fn skip_to(&self, sequence: u64) -> Result<()> {
        self.core.skip_to(sequence)
    }

    /// The subscribers and the state of each.
    pub fn subscribers(&self) -> Vec<SubscriberInfo> {
        self.core.subscribers()
    }

    /// Waits until `count` subscribers are attached.
    ///
    /// # Errors
    /// [`Error::Timeout`].
    pub fn wait_for_subscribers(&self, count: usize, timeout: Duration) -> Result<()> {
        self.core.wait_for_subscribers(count, timeout)
    }

    /// Counts a tensor of `bytes` that its user wanted to send where it lies, and that has to be
    /// copied: `warpipe ls -v` shows the count, and the last reason. For bindings.
    ///
    /// # Errors
    /// [`Error::Forked`].
    #[doc(hidden)]
    pub fn count_copy(&self, reason: SlowPath, bytes: u64) -> Result<()> {
        self.core.get()?.count_copy(reason, bytes);
        Ok(())
    }

    /// Device memory in regions and its limit, in bytes. Regions that were given back count until no
    /// process has them mapped.
    pub fn memory_in_use(&self) -> (u64, u64) {
        self.core.memory_in_use()
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        if let Ok(core) = self.core.get() {
            core.close();
        }
    }
}
