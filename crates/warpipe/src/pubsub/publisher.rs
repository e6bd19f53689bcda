//! The public publisher.

mod in_place;
mod loan;
mod loan_parts;

use std::sync::Arc;

pub use self::loan::{SampleMut, SendError};
use super::options::{PublisherOptions, PublisherRole, SubscriberInfo};
use super::publisher_core::{Given, PublisherCore, Recipients, SendFailure};
use super::subscriber::Subscriber;
use super::subscriber_link::{LinkPhase, SubscriberLink};
use crate::backend::DevicePtr;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::leak_on_fork::LeakOnFork;
use crate::ipc::Kind;
use crate::ipc::domain::EndpointName;
use crate::memory::arena::check_limit;
use crate::options::{chosen_device, chosen_place};
use crate::pubsub::entry::{Head, Metadata};
use crate::slow_path::SlowPath;
use crate::stream::Stream;
use crate::tensor::Layout;
use crate::wait::Wait;

/// The highest number that may be skipped to.
const SEQUENCE_MAX: u64 = 1 << 62;

/// What [`Publisher::stats`] reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PublisherStats {
    /// Device memory in regions, in bytes. Regions that were given back count until no process has
    /// them mapped.
    pub memory_bytes: u64,
    /// The most that may be taken.
    pub memory_limit: u64,
    /// Samples, and parts of samples, that were sent where they lie and are kept, because a
    /// subscriber may read them.
    pub in_place: usize,
}

/// Hands tensors in device memory to any number of subscribers.
///
/// ```
/// use std::time::Duration;
/// use warpipe::{
///     DType, Device, Domain, Layout, Publisher, Subscriber, SubscriberOptions,
/// };
/// # let folder = std::env::temp_dir().join(format!("warpipe-doc-{}", std::process::id()));
/// # let (domain, device) = (Domain::at(&folder)?, Device::host());
/// let publisher = Publisher::new("camera/front", domain.on(&device))?;
/// let mut subscriber = Subscriber::open("camera/front", domain.on(&device), Duration::ZERO)?;
///
/// let stream = device.stream()?;
/// let mut frame = publisher.loan(&Layout::contiguous(DType::U8, &[2, 3])?)?;
/// frame.write(&stream, &[1, 2, 3, 4, 5, 6])?; // or a kernel of yours, on frame.ptr()
/// frame.send(&stream)?;
///
/// let sample = subscriber.receive(&stream, Duration::from_secs(1))?;
/// assert_eq!(sample.to_vec(Duration::from_secs(1))?, [1, 2, 3, 4, 5, 6]);
/// # drop((sample, subscriber, publisher)); std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), warpipe::Error>(())
/// ```
#[derive(Debug)]
pub struct Publisher {
    pub(super) core: LeakOnFork<Arc<PublisherCore>>,
}

impl Publisher {
    /// Takes the name and starts to listen.
    ///
    /// # Errors
    /// [`Error::Name`](crate::Error::Name) (of one that is held, with the holder's pid),
    /// [`Error::Argument`](crate::Error::Argument), or
    /// an error of the device or the system. On an error nothing is left behind.
    pub fn new(name: &str, options: PublisherOptions) -> Result<Publisher> {
        Publisher::with_role(name, options, PublisherRole::of(Kind::Publisher))
    }

    /// A publisher in this role: by itself, or as the part of another endpoint.
    pub(crate) fn with_role(
        name: &str,
        options: PublisherOptions,
        role: PublisherRole,
    ) -> Result<Publisher> {
        options.check()?;
        let name = EndpointName::new(name)?;
        let (domain, device) = chosen_place(&options.domain, &options.device)?;
        check_limit(&device, options.memory_limit)?;
        let claim = domain.claim(&name, options.access_policy().is_open_to_others())?;
        let core = PublisherCore::new(name.as_str(), options, role, device, claim)?;
        Ok(Publisher {
            core: LeakOnFork::new(core),
        })
    }

    /// The sender of replies to what `subscriber` receives, over its link. It has no name of its
    /// own.
    pub(crate) fn over(
        subscriber: &Subscriber,
        options: PublisherOptions,
        kind: Kind,
    ) -> Result<Publisher> {
        options.check()?;
        let device = chosen_device(&options.device);
        check_limit(&device, options.memory_limit)?;
        let core = PublisherCore::of_replies(subscriber, options, PublisherRole::of(kind), device)?;
        Ok(Publisher {
            core: LeakOnFork::new(core),
        })
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
    /// [`Error::Limit`](crate::Error::Limit) when the device has no room, or the limit is in use
    /// for longer than the loan's timeout; [`Error::State`](crate::Error::State).
    pub fn loan(&self, layout: &Layout) -> Result<SampleMut> {
        self.lend(layout, None)
    }

    /// [`loan`](Self::loan) with `wait` in place of the loan's timeout.
    ///
    /// # Errors
    /// As [`loan`](Self::loan).
    #[doc(hidden)] // For bindings.
    pub fn loan_within<'w>(&self, layout: &Layout, wait: impl Into<Wait<'w>>) -> Result<SampleMut> {
        self.lend(layout, Some(&wait.into()))
    }

    pub(crate) fn lend(&self, layout: &Layout, wait: Option<&Wait<'_>>) -> Result<SampleMut> {
        let (slot, address) = self.core.take_slot(layout.bytes(), wait)?;
        Ok(SampleMut {
            core: Arc::clone(&self.core),
            slot,
            is_given: false,
            address,
            layout: *layout,
            metadata: Metadata::EMPTY,
            head_bytes: 0,
            parts: None,
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
        layout.check_length(bytes.len())?;
        // Without a `SampleMut`: moving its layout and metadata takes longer than a small send.
        let (slot, address) = self.core.take_slot(layout.bytes(), None)?;
        let given = Given {
            slot,
            layout,
            metadata: &Metadata::EMPTY,
            head: Head::None,
        };
        let filled = self.fill(stream, address, bytes).map_err(SendFailure::from);
        let sent = filled.and_then(|()| self.core.send(given, stream, Recipients::All, None));
        match sent {
            Ok(delivery) => Ok(delivery.sequence),
            Err(SendFailure::AfterPublish(error)) => Err(error),
            Err(SendFailure::BeforePublish(error)) => {
                // Behind the copy, which may be enqueued even if a later step failed.
                let device = stream.check_of(&self.core.device);
                let behind = device.map_or(&[][..], |()| std::slice::from_ref(stream));
                let _ = self.core.return_slot(slot, behind);
                Err(error)
            }
        }
    }

    fn fill(&self, stream: &Stream, slot: DevicePtr, bytes: &[u8]) -> Result<()> {
        stream.check_of(&self.core.device)?;
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the stream is live; the caller has taken the slot, which is as long as the
        // layout that was compared with `bytes`, and keeps it until the stream has passed this
        // copy: it is sent or returned behind the stream's work.
        unsafe { stream.upload(slot, bytes) }
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
    /// Subscribers see the gap in the samples' numbers.
    /// [`Subscriber::dropped`](crate::Subscriber::dropped) does not count it: no policy dropped a
    /// sample.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use warpipe::{Device, Domain, Publisher, PublisherOptions, Subscriber};
    /// # let folder = std::env::temp_dir().join(format!("warpipe-skip-{}", std::process::id()));
    /// # let (domain, device) = (Domain::at(&folder)?, Device::host());
    /// let first = Publisher::new("a", domain.on(&device))?;
    /// let mut from = Subscriber::open("a", domain.on(&device), Duration::ZERO)?;
    /// let source = from.publisher_source().unwrap();
    /// let options = PublisherOptions { forwards: Some(source), ..domain.on(&device) };
    /// let forwarder = Publisher::new("b", options)?;
    /// let mut subscriber = Subscriber::open("b", domain.on(&device), Duration::ZERO)?;
    ///
    /// let stream = device.stream()?;
    /// for number in 1..=3 {
    ///     first.send_bytes(&stream, &[number])?;
    ///     let sample = from.receive(&stream, Duration::from_secs(1))?;
    ///     // Leaves out the second.
    ///     if number != 2 {
    ///         forwarder.skip_to(sample.sequence())?;
    ///         forwarder.send_bytes(&stream, &sample.to_vec(Duration::from_secs(1))?)?;
    ///     }
    /// }
    /// assert_eq!(subscriber.receive(&stream, Duration::from_secs(1))?.sequence(), 1);
    /// let third = subscriber.receive(&stream, Duration::from_secs(1))?;
    /// assert_eq!((third.sequence(), third.info().discontinuity.unwrap().missing), (3, 1));
    /// # drop((third, subscriber, forwarder, from, first)); std::fs::remove_dir_all(folder).ok();
    /// # Ok::<(), warpipe::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) for a number that has been given, or is 0, and
    /// for a publisher without [`forwards`](PublisherOptions::forwards) among its options;
    /// [`Error::State`](crate::Error::State).
    #[doc(hidden)] // For the bridge.
    pub fn skip_to(&self, sequence: u64) -> Result<()> {
        let core = self.core.get()?;
        let mut state = core.lock();
        // No count of samples reaches the limit, so the next numbers do not overflow either.
        let allowed = state.next_sequence..=SEQUENCE_MAX;
        let is_forwarder = core.options.forwards.is_some();
        if !is_forwarder || !allowed.contains(&sequence) {
            let allowed = match is_forwarder {
                true => format!("{} to {}", allowed.start(), allowed.end()),
                false => "a publisher with the option `forwards`".into(),
            };
            return Err(Error::argument("sequence", sequence, allowed));
        }
        state.next_sequence = sequence;
        Ok(())
    }

    /// The subscribers and the state of each.
    pub fn subscribers(&self) -> Vec<SubscriberInfo> {
        let Ok(core) = self.core.get() else {
            // Another thread of the parent may have held the lock at the fork, so the child must
            // not take it.
            return Vec::new();
        };
        let mut state = core.lock();
        state.reclaim(&core.fences, true);
        let known = state.links.iter();
        let known = known.filter(|link| link.phase != LinkPhase::Attaching);
        known.map(SubscriberLink::info).collect()
    }

    /// Waits until `count` subscribers are attached.
    ///
    /// # Errors
    /// [`Error::Timeout`](crate::Error::Timeout); [`Error::State`](crate::Error::State).
    pub fn wait_for_subscribers<'w>(&self, count: usize, wait: impl Into<Wait<'w>>) -> Result<()> {
        let (core, wait) = (self.core.get()?, wait.into());
        loop {
            let seen = core.changes_seen();
            let attached = core.lock().live().count();
            if attached >= count {
                return Ok(());
            }
            let slice = wait.slice();
            if slice.is_zero() {
                let noun = match count {
                    1 => "subscriber",
                    _ => "subscribers",
                };
                let what = format!("{count} {noun} of {:?} ({attached} attached)", core.name);
                return Err(Error::timeout(what, wait.limit()));
            }
            core.sleep_until_changed(slice, seen);
        }
    }

    /// Counts a tensor of `bytes` that its user wanted to send where it lies, and that has to be
    /// copied: `warpipe ls -v` shows the count, and the last reason. For bindings.
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State).
    #[doc(hidden)]
    pub fn count_copy(&self, reason: SlowPath, bytes: u64) -> Result<()> {
        self.core.get()?.lock().row.copied(reason, bytes);
        Ok(())
    }

    /// Its memory now, and what it keeps for subscribers. Drops the owners of samples that were
    /// sent where they lie and that no subscriber reads any more.
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State).
    pub fn stats(&self) -> Result<PublisherStats> {
        let core = self.core.get()?;
        let in_place = core.drop_free_owners();
        let state = core.lock();
        Ok(PublisherStats {
            memory_bytes: state.region_bytes(),
            memory_limit: state.arena.limit(),
            in_place,
        })
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        if let Ok(core) = self.core.get() {
            core.close();
        }
    }
}
