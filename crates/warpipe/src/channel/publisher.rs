//! The publisher as users hold it: builder, handle, loan.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::core::{Core, Observer, Pending, Unsent};
use crate::backend::DevicePtr;
use crate::device::Device;
use crate::domain::{Domain, EndpointName};
use crate::error::{Error, Result};
use crate::fork::Home;
use crate::link::PeerState;
use crate::link::entry::Metadata;
use crate::link::peer::Peer;
use crate::link::proof::Streams;
use crate::link::segment::DEPTH_MAX;
use crate::link::watcher::Watcher;
use crate::memory::arena::SlotId;
use crate::memory::region::Region;
use crate::stream::Stream;
use crate::tensor::Layout;

/// What happens when a subscriber's ring is full. Declared by the publisher, for each subscriber.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// `send` waits for it, then fails with [`Error::Timeout`] and nobody gets the sample.
    Block {
        /// How long.
        timeout: Duration,
    },
    /// It loses the oldest sample that it has not received yet; what it holds stays.
    DropOldest,
    /// It does not get this sample.
    DropNewest,
    /// `send` fails at once with [`Error::Full`] and nobody gets the sample.
    Fail,
}

impl Policy {
    /// Whether a subscriber under this policy sees every sample.
    pub(crate) fn is_lossless(self) -> bool {
        matches!(self, Policy::Block { .. } | Policy::Fail)
    }
}

/// A subscriber that asks to attach: what its publisher's policy can depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Applicant {
    /// Its process id.
    pub pid: i32,
    /// Its effective user id.
    pub uid: u32,
    /// Its effective group id.
    pub gid: u32,
}

type PolicyOf = Arc<dyn Fn(&Applicant) -> Policy + Send + Sync>;

/// What a publisher is made with. See [`Publisher::builder`].
#[derive(Clone)]
pub struct PublisherBuilder {
    name: String,
    domain: Option<Domain>,
    device: Option<Device>,
    policy: Policy,
    policy_of: Option<PolicyOf>,
    uids: Vec<u32>,
    gids: Vec<u32>,
    pub(super) depth: u32,
    pub(super) history: u32,
    pub(super) memory_limit: u64,
    pub(super) loan_timeout: Duration,
    pub(super) evict_after: Option<Duration>,
    pub(super) subscribers_max: u32,
    pub(super) handshake_timeout: Duration,
    /// Told who comes and goes; what is sent is kept so that it can be forwarded.
    pub(super) observer: Option<Arc<Observer>>,
}

impl PublisherBuilder {
    fn new(name: &str) -> PublisherBuilder {
        PublisherBuilder {
            name: name.to_string(),
            domain: None,
            device: None,
            policy: Policy::Block { timeout: Duration::from_secs(5) },
            policy_of: None,
            uids: Vec::new(),
            gids: Vec::new(),
            depth: 16,
            history: 0,
            memory_limit: 4 << 30,
            loan_timeout: Duration::from_secs(5),
            evict_after: None,
            subscribers_max: 256,
            handshake_timeout: super::HANDSHAKE_TIMEOUT,
            observer: None,
        }
    }

    /// The domain to publish in; the environment's by default.
    pub fn domain(mut self, domain: &Domain) -> Self {
        self.domain = Some(domain.clone());
        self
    }

    /// The device whose memory the samples lie in; [`Device::preferred`] by default.
    pub fn device(mut self, device: &Device) -> Self {
        self.device = Some(device.clone());
        self
    }

    /// How many samples each subscriber may have been given and not released: 1 to 4096, 16 by default.
    pub fn depth(mut self, samples: u32) -> Self {
        self.depth = samples;
        self
    }

    /// What happens when a subscriber's ring is full: [`Policy::Block`] for 5 s by default.
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// A policy for each subscriber, by who it is.
    pub fn policy_of(mut self, choose: impl Fn(&Applicant) -> Policy + Send + Sync + 'static) -> Self {
        self.policy_of = Some(Arc::new(choose));
        self
    }

    /// How many of the last samples a late subscriber gets first: 0 by default, at most the depth.
    pub fn history(mut self, samples: u32) -> Self {
        self.history = samples;
        self
    }

    /// The most device memory that the samples may take, in bytes: 4 GiB by default. It is taken as needed, in
    /// regions that double. What stopped or leaving subscribers hold may come on top, at most as much again.
    pub fn memory_limit(mut self, bytes: u64) -> Self {
        self.memory_limit = bytes;
        self
    }

    /// How long [`Publisher::loan`] waits for memory that is in use: 5 s by default.
    pub fn loan_timeout(mut self, timeout: Duration) -> Self {
        self.loan_timeout = timeout;
        self
    }

    /// Close the link of a subscriber that has given no sign of life for this long; never by default. What it
    /// holds stays untouched until it releases it or dies. At least 500 ms: a heartbeat comes every 200 ms.
    pub fn evict_after(mut self, silence: Option<Duration>) -> Self {
        self.evict_after = silence;
        self
    }

    /// The most subscribers at once: 256 by default.
    pub fn subscribers_max(mut self, subscribers: u32) -> Self {
        self.subscribers_max = subscribers;
        self
    }

    /// How long a subscriber may take to attach before its connection is closed: 5 s by default.
    pub fn handshake_timeout(mut self, timeout: Duration) -> Self {
        self.handshake_timeout = timeout;
        self
    }

    /// For a face that chooses who gets what: `observer` is told who comes and goes.
    pub(crate) fn observed_by(mut self, observer: &Arc<Observer>) -> Self {
        self.observer = Some(observer.clone());
        self
    }

    /// Admit these users beside the own one. The domain directory must let them in, too.
    pub fn allow_uids(mut self, uids: &[u32]) -> Self {
        self.uids.extend(uids);
        self
    }

    /// Admit processes whose effective group is one of these.
    pub fn allow_gids(mut self, gids: &[u32]) -> Self {
        self.gids.extend(gids);
        self
    }

    /// Takes the name and starts to listen.
    ///
    /// # Errors
    /// [`Error::Name`], [`Error::NameTaken`] (with the holder's pid), [`Error::ForeignFile`], [`Error::Domain`],
    /// [`Error::Argument`], or what the device or the system says. Nothing is left behind.
    pub fn build(mut self) -> Result<Publisher> {
        self.check()?;
        let name = EndpointName::new(&self.name)?;
        let domain = self.domain.take().map_or_else(Domain::from_environment, Ok)?;
        let device = self.device.take().unwrap_or_else(|| Device::preferred().device);
        let claim = domain.claim(&name, !(self.uids.is_empty() && self.gids.is_empty()))?;
        let core = Core::new(self, name.to_string(), device, claim)?;
        Ok(Publisher { core })
    }

    fn check(&self) -> Result<()> {
        if self.depth == 0 || self.depth > DEPTH_MAX {
            return Err(Error::argument("depth", self.depth, format!("1 to {DEPTH_MAX}")));
        }
        if self.history > self.depth {
            return Err(Error::argument("history", self.history, format!("0 to the depth, {}", self.depth)));
        }
        if let Some(silence) = self.evict_after.filter(|&silence| silence < Duration::from_millis(500)) {
            return Err(Error::argument("evict_after", format!("{silence:?}"), "at least 500 ms, or none"));
        }
        Ok(())
    }

    pub(super) fn policy_for(&self, peer: &Peer) -> Policy {
        let applicant = Applicant { pid: peer.pid, uid: peer.uid, gid: peer.gid };
        self.policy_of.as_ref().map_or(self.policy, |choose| choose(&applicant))
    }

    pub(super) fn admits(&self, uid: u32, gid: u32) -> bool {
        uid == rustix::process::geteuid().as_raw() || self.uids.contains(&uid) || self.gids.contains(&gid)
    }
}

impl fmt::Debug for PublisherBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PublisherBuilder").field("name", &self.name).field("depth", &self.depth).finish_non_exhaustive()
    }
}

/// A subscriber, as [`Publisher::subscribers`] shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubscriberInfo {
    /// Its process id.
    pub pid: i32,
    /// Its effective user id.
    pub uid: u32,
    /// Alive, stalled, leaving, suspect or dead.
    pub state: PeerState,
    /// Since its last sign of life.
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
    pub(super) core: Arc<Core>,
}

impl Publisher {
    /// A publisher of `name`, to be built.
    pub fn builder(name: &str) -> PublisherBuilder {
        PublisherBuilder::new(name)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.core.name
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.core.device
    }

    /// Lends a slot for a tensor of this layout: memory of this device that nobody reads. Its contents are
    /// whatever was there. No allocation while a free slot fits.
    ///
    /// # Errors
    /// [`Error::MemoryLimit`] when the limit is in use for longer than the loan's timeout; [`Error::DeviceMemory`];
    /// [`Error::Forked`].
    pub fn loan(&self, layout: &Layout) -> Result<SampleMut> {
        let (slot, address) = self.core.take_slot(layout.bytes())?;
        Ok(SampleMut { core: self.core.clone(), slot: Some(slot), address, layout: *layout, metadata: Metadata::EMPTY })
    }

    /// Loans, copies `bytes` in and sends, as a one-dimensional `uint8` tensor. Returns the sequence number.
    ///
    /// # Errors
    /// As [`loan`](Self::loan) and [`SampleMut::send`].
    pub fn send_bytes(&self, stream: &Stream, bytes: &[u8]) -> Result<u64> {
        self.send_slice(stream, &Layout::bytes_only(bytes.len() as u64)?, bytes)
    }

    /// Loans, copies the slot's whole contents from host memory and sends. Returns the sequence number.
    ///
    /// # Errors
    /// As [`loan`](Self::loan), [`SampleMut::write`] and [`SampleMut::send`].
    pub fn send_slice(&self, stream: &Stream, layout: &Layout, bytes: &[u8]) -> Result<u64> {
        check_length(layout, bytes)?;
        // As a loan would, but by hand: a loan carries its layout along, and nobody sees this one.
        let (slot, address) = self.core.take_slot(layout.bytes())?;
        let sent = self.fill(stream, address, bytes).map_err(Unsent::Untold);
        let sent = sent.and_then(|()| self.core.send(slot, layout, &Metadata::EMPTY, stream));
        sent.map_err(|unsent| match unsent {
            Unsent::Untold(error) => {
                let _ = self.core.return_slot(slot, None);
                error
            }
            Unsent::Told(error) => error,
        })
    }

    /// Copies `bytes` to the slot at `address`, which is taken and at least as long.
    fn fill(&self, stream: &Stream, address: DevicePtr, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the stream is live; the slot is the caller's alone and as long as the layout, which was compared with
        // `bytes`, and stays so until the stream has passed this copy: `send` gives it on behind the stream's work.
        unsafe { stream.backend().upload(stream.raw(), address, bytes) }
    }

    /// Loans, copies from another device pointer on `stream` and sends. Returns the sequence number.
    ///
    /// # Errors
    /// As [`loan`](Self::loan) and [`SampleMut::send`].
    ///
    /// # Safety
    /// `source` is readable by the device for `layout.bytes()` bytes until the stream has done the copy.
    pub unsafe fn send_device(&self, stream: &Stream, layout: &Layout, source: DevicePtr) -> Result<u64> {
        let sample = self.loan(layout)?;
        if layout.bytes() > 0 {
            // SAFETY: the slot is this loan's alone and as long as the layout; the source is the caller's promise.
            unsafe { stream.copy(sample.slot_ptr(), source, layout.bytes())? };
        }
        Ok(sample.send(stream)?)
    }

    /// Who is subscribed, and how each of them fares.
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

    /// Device memory taken so far and its limit, in bytes.
    pub fn memory_in_use(&self) -> (u64, u64) {
        self.core.memory_in_use()
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        if self.core.home.is_here() {
            self.core.close();
        } else {
            // A forked child: the parent's link is not ours to close.
            std::mem::forget(self.core.clone());
        }
    }
}

/// A slot on loan. Fill it on a stream, then [`send`](Self::send) it on that stream.
///
/// Dropped without being sent, it returns at once: if kernels may still be writing it, [`discard`](Self::discard)
/// it on their stream instead.
#[must_use = "a loan that is not sent goes back"]
pub struct SampleMut {
    pub(super) core: Arc<Core>,
    /// `None` once it is sent or discarded.
    pub(super) slot: Option<SlotId>,
    address: DevicePtr,
    pub(super) layout: Layout,
    pub(super) metadata: Metadata,
}

impl SampleMut {
    /// The device address of the element with all indices 0.
    pub fn ptr(&self) -> DevicePtr {
        self.address + self.layout.offset()
    }

    /// The device address of the slot's first byte; it is `layout().bytes()` long.
    pub fn slot_ptr(&self) -> DevicePtr {
        self.address
    }

    /// The tensor's layout.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// A hold on the memory behind this slot: it stays mapped in this process while the hold lives, also when the
    /// sample is sent and the publisher is gone. It gives no right to write: that ends with the loan.
    pub fn hold(&self) -> SlotHold {
        self.core.hold(self.slot.expect("a loan has its slot until it is consumed"))
    }

    /// Tells, at any time later, whether the slot is free again: nobody is going to read it, and the streams of all who
    /// did are past it. For who sends a name of other memory, which must stay as long.
    ///
    /// ```
    /// # use warpipe::{Device, Domain, Publisher};
    /// # let folder = std::env::temp_dir().join(format!("warpipe-returned-{}", std::process::id()));
    /// # let (domain, device) = (Domain::at(&folder)?, Device::host());
    /// let publisher = Publisher::builder("a").domain(&domain).device(&device).build()?;
    /// let loan = publisher.loan(&warpipe::Layout::bytes_only(8)?)?;
    /// let returned = loan.returned();
    /// assert!(!returned.is_back()?);
    /// drop(loan);
    /// assert!(returned.is_back()?);
    /// # drop(publisher); std::fs::remove_dir_all(folder).ok();
    /// # Ok::<(), warpipe::Error>(())
    /// ```
    pub fn returned(&self) -> SlotReturn {
        self.core.watch_slot(self.slot.expect("a loan has its slot until it is consumed"))
    }

    /// Sets up to 256 bytes that travel with the sample.
    ///
    /// # Errors
    /// [`Error::Argument`] for more.
    pub fn set_metadata(&mut self, bytes: &[u8]) -> Result<()> {
        self.metadata = Metadata::new(bytes)?;
        Ok(())
    }

    /// Copies the slot's whole contents from host memory, in the stream's order. `bytes` may be reused at once.
    ///
    /// # Errors
    /// [`Error::Argument`] unless there are exactly `layout().bytes()` bytes; [`Error::Driver`].
    pub fn write(&mut self, stream: &Stream, bytes: &[u8]) -> Result<()> {
        check_length(&self.layout, bytes)?;
        self.core.home.check()?;
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the stream is live; the slot is this loan's alone and as long as the layout, and stays so until
        // the stream has passed this copy (`send` and `discard` say when).
        unsafe { stream.backend().upload(stream.raw(), self.address, bytes) }
    }

    /// Hands the tensor to every subscriber, behind the work enqueued on `stream` so far
    /// (`cuStreamBatchMemOp`). Returns its sequence number, from 1. Does not wait for the device.
    ///
    /// # Errors
    /// Gives the loan back inside the error, and nobody has got the sample: [`Error::Timeout`] or [`Error::Full`]
    /// by the subscribers' [`Policy`], [`Error::Forked`]. When the driver itself fails ([`Error::Driver`]) there is
    /// no loan to give back: whoever was told of the sample is told that it is lost.
    pub fn send(mut self, stream: &Stream) -> Result<u64, SendError> {
        let slot = self.slot.take().expect("a loan has its slot until it is consumed");
        match self.core.send(slot, &self.layout, &self.metadata, stream) {
            Ok(sequence) => Ok(sequence),
            Err(unsent) => Err(self.unsent(slot, unsent)),
        }
    }

    /// Tells every subscriber of the tensor *before* the work that fills it is enqueued, so that their streams are
    /// waiting, their kernels launched, by the time it is done: what costs the most in a chain of processes on one
    /// GPU is their CPUs taking turns.
    ///
    /// Enqueue that work at once and then [`Announced::send`]: until then the subscribers' streams stand still. A
    /// stream that received the sample must not be the one that fills it; and with a subscriber in this very process,
    /// the two streams must not share a hardware queue (the driver gives a context 8, more with
    /// `CUDA_DEVICE_MAX_CONNECTIONS`), or the wait stands before the work that it waits for. [`send`](Self::send) has
    /// no such conditions.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn announce(mut self) -> Result<Announced, SendError> {
        let slot = self.slot.take().expect("a loan has its slot until it is consumed");
        match self.core.announce(slot, &self.layout, &self.metadata) {
            Ok(pending) => Ok(Announced { address: self.ptr(), core: self.core.clone(), slot, pending: Some(pending) }),
            Err(unsent) => Err(self.unsent(slot, unsent)),
        }
    }

    pub(super) fn unsent(mut self, slot: SlotId, unsent: Unsent) -> SendError {
        match unsent {
            Unsent::Untold(error) => {
                self.slot = Some(slot);
                SendError { error, sample: Some(Box::new(self)) }
            }
            Unsent::Told(error) => SendError { error, sample: None },
        }
    }

    /// Gives the slot back unsent, once the work enqueued on `stream` so far is done.
    ///
    /// # Errors
    /// [`Error::Driver`]; the slot is back all the same.
    pub fn discard(mut self, stream: &Stream) -> Result<()> {
        self.core.home.check()?;
        self.slot.take().map_or(Ok(()), |slot| self.core.return_slot(slot, Some(stream)))
    }
}

/// Tells when a slot is free again. See [`SampleMut::returned`].
#[derive(Debug, Clone)]
pub struct SlotReturn {
    pub(super) core: Weak<Core>,
    pub(super) home: Home,
    pub(super) slot: SlotId,
    pub(super) serial: u64,
}

impl SlotReturn {
    /// Whether it is. Looks, and does not wait.
    ///
    /// # Errors
    /// [`Error::PublisherGone`] when the publisher was dropped before: nobody is left to know. [`Error::Forked`].
    pub fn is_back(&self) -> Result<bool> {
        self.home.check()?;
        let pid = std::process::id() as i32;
        let core = self.core.upgrade();
        let core = core.ok_or_else(|| Error::PublisherGone { name: String::new(), pid, graceful: true })?;
        Ok(core.is_back(self.slot, self.serial))
    }
}

/// Keeps the memory of a loan mapped in this process. See [`SampleMut::hold`].
pub struct SlotHold {
    /// `None` only while dropping.
    pub(super) region: Option<Arc<Region>>,
    pub(super) streams: Arc<Streams>,
    pub(super) watcher: Arc<Watcher>,
    pub(super) home: Home,
}

impl fmt::Debug for SlotHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotHold").field("region", &self.region).finish_non_exhaustive()
    }
}

impl Drop for SlotHold {
    fn drop(&mut self) {
        let Some(region) = self.region.take() else { return };
        if !self.home.is_here() {
            // A forked child: the parent's mapping is not ours to give up.
            return std::mem::forget(region);
        }
        if Arc::strong_count(&region) > 1 {
            return;
        }
        // The publisher has gone and this is the last hold: as there, our own streams first have to be past it.
        let (streams, mut proof) = (self.streams.clone(), None);
        self.watcher.retire(move || {
            let _held = &region;
            proof.get_or_insert_with(|| streams.mark()).is_passed()
        });
    }
}

impl Drop for SampleMut {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take().filter(|_| self.core.home.is_here()) {
            let _ = self.core.return_slot(slot, None);
        }
    }
}

impl fmt::Debug for SampleMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SampleMut").field("layout", &self.layout).field("publisher", &self.core.name).finish()
    }
}

/// A sample that its subscribers know of and whose data is not complete yet. See [`SampleMut::announce`].
///
/// Dropped without being sent, the sample is lost: its readers' streams go on and their [`finish`](crate::Sample::finish)
/// says so.
#[derive(Debug)]
#[must_use = "an announced sample that is not sent is lost to its readers"]
pub struct Announced {
    core: Arc<Core>,
    slot: SlotId,
    address: DevicePtr,
    /// `None` once it is sent.
    pending: Option<Pending>,
}

impl Announced {
    /// The device address of the element with all indices 0.
    pub fn ptr(&self) -> DevicePtr {
        self.address
    }

    /// Completes the sample behind the work enqueued on `stream` so far. Returns its sequence number.
    ///
    /// # Errors
    /// [`Error::Driver`], and the sample is lost to its readers; [`Error::Forked`].
    pub fn send(mut self, stream: &Stream) -> Result<u64> {
        let Some(pending) = &self.pending else { unreachable!("consumed by this call only") };
        self.core.complete(self.slot, pending, stream)?;
        let sequence = pending.sequence;
        self.pending = None;
        Ok(sequence)
    }
}

impl Drop for Announced {
    fn drop(&mut self) {
        if let Some(pending) = self.pending.take().filter(|_| self.core.home.is_here()) {
            self.core.give_up(self.slot, &pending);
        }
    }
}

fn check_length(layout: &Layout, bytes: &[u8]) -> Result<()> {
    if bytes.len() as u64 == layout.bytes() {
        return Ok(());
    }
    let allowed = format!("exactly {}", layout.bytes());
    Err(Error::argument("bytes", format!("{} bytes", bytes.len()), allowed))
}

/// A send that did not happen, and the loan, to try again with.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct SendError {
    /// Why.
    #[source]
    pub error: Error,
    /// What was to be sent; `None` if the driver failed after subscribers had been told of it.
    pub sample: Option<Box<SampleMut>>,
}

impl From<SendError> for Error {
    fn from(failed: SendError) -> Error {
        failed.error
    }
}
