//! A slot on loan: filled by the user, then sent to the subscribers or returned.

use std::sync::Arc;

use crate::backend::DevicePtr;
use crate::debug::opaque_debug;
use crate::error::{Result, Returned};
use crate::memory::arena::SlotId;
use crate::pubsub::entry::{Head, Metadata};
use crate::pubsub::parts::Part;
use crate::pubsub::publisher_core::{
    Delivery, Given, PublisherCore, Recipients, SendFailure, SlotHold, SlotReturn,
};
use crate::stream::Stream;
use crate::tensor::Layout;
use crate::wait::Wait;

/// A slot on loan. Fill it on a stream, then [`send`](Self::send) it on that stream.
///
/// A loan that is dropped without being sent returns at once. If kernels may still be writing it,
/// [`discard`](Self::discard) it on their stream instead. After [`write`](Self::write), or after a
/// send that failed, it returns once the work enqueued on those streams is done.
#[must_use = "a loan that is not sent goes back"]
pub struct SampleMut {
    pub(in crate::pubsub) core: Arc<PublisherCore>,
    pub(in crate::pubsub) slot: SlotId,
    /// It is sent or discarded: the slot is no longer this loan's.
    pub(super) is_given: bool,
    pub(super) address: DevicePtr,
    pub(in crate::pubsub) layout: Layout,
    pub(in crate::pubsub) metadata: Metadata,
    /// How many bytes of the metadata are its [head](Head): the list of the parts, or the place of
    /// a tensor that does not lie in the slot.
    pub(in crate::pubsub) head_bytes: u16,
    /// `None` of a loan of one tensor.
    pub(in crate::pubsub) parts: Option<Vec<Part>>,
    /// The stream that last got work on this loan. A dropped loan returns behind this stream and
    /// `earlier`.
    pub(super) behind: Option<Stream>,
    /// Further streams that got work on this loan: mostly none.
    pub(super) earlier: Vec<Stream>,
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

    /// A hold on the memory behind this slot: it stays mapped in this process while the hold lives,
    /// even after the sample is sent and the publisher is gone; the memory of a tensor in place is
    /// its owner's. It gives no right to write: that right ends with the loan.
    pub fn hold(&self) -> SlotHold {
        self.core.hold(self.slot)
    }

    /// A handle that reports, at any later time, whether the slot is free again: no subscriber is
    /// going to read it, and the streams of all its readers are past it. Use this to keep memory
    /// alive that the payload refers to.
    ///
    /// ```
    /// # use warpipe::{Device, Domain, Publisher};
    /// # let folder = std::env::temp_dir().join(format!("warpipe-returned-{}", std::process::id()));
    /// # let (domain, device) = (Domain::at(&folder)?, Device::host());
    /// let publisher = Publisher::new("a", domain.on(&device))?;
    /// let loan = publisher.loan(&warpipe::Layout::bytes_only(8)?)?;
    /// let returned = loan.returned();
    /// assert!(!returned.is_back()?);
    /// drop(loan);
    /// assert!(returned.is_back()?);
    /// # drop(publisher); std::fs::remove_dir_all(folder).ok();
    /// # Ok::<(), warpipe::Error>(())
    /// ```
    pub fn returned(&self) -> SlotReturn {
        self.core.watch_slot(self.slot)
    }

    /// Sets up to 4,096 bytes that travel with the sample, less what describes its
    /// [parts](crate::Publisher::loan_parts), or the place of a tensor [in
    /// place](crate::Publisher::loan_in). Up to 256 bytes in all need no memory of their own.
    ///
    /// # Errors
    /// [`Error::Argument`] for more.
    ///
    /// [`Error::Argument`]: crate::Error::Argument
    pub fn set_metadata(&mut self, bytes: &[u8]) -> Result<()> {
        let head = &self.metadata.as_bytes()[..self.head_bytes.into()];
        self.metadata = Metadata::behind(head, bytes)?;
        Ok(())
    }

    fn head(&self) -> Head {
        match (self.head_bytes, &self.parts) {
            (0, _) => Head::None,
            (_, None) => Head::Place,
            (_, Some(_)) => Head::Parts,
        }
    }

    /// Copies the slot's whole contents from host memory, in the stream's order. `bytes` may be
    /// reused at once.
    ///
    /// # Errors
    /// [`Error::Argument`] unless there are exactly `layout().bytes()` bytes and the stream is one
    /// of the publisher's device; [`Error::Timeout`] when too much is on its way behind streams
    /// that are blocked; [`Error::Driver`].
    ///
    /// [`Error::Argument`]: crate::Error::Argument
    /// [`Error::Driver`]: crate::Error::Driver
    /// [`Error::Timeout`]: crate::Error::Timeout
    pub fn write(&mut self, stream: &Stream, bytes: &[u8]) -> Result<()> {
        let layout = self.layout;
        self.write_at(stream, (self.address, &layout), bytes)
    }

    pub(in crate::pubsub) fn write_at(
        &mut self,
        stream: &Stream,
        (address, layout): (DevicePtr, &Layout),
        bytes: &[u8],
    ) -> Result<()> {
        layout.check_length(bytes.len())?;
        self.core.owner_process.check()?;
        stream.check_of(&self.core.device)?;
        if bytes.is_empty() {
            return Ok(());
        }
        self.stay_behind(stream);
        // SAFETY: the stream is live; the slot, or the tensor in place, is this loan's alone; the
        // caller has the address and the layout of all of it, or of a part; it stays so until the
        // stream has passed this copy (`send` and `discard` say when).
        unsafe { stream.upload(address, bytes) }
    }

    /// Hands the tensor to every subscriber, behind the work enqueued on `stream` so far
    /// (`cuStreamBatchMemOp`), and behind what [`write`](Self::write) enqueued on others. Returns
    /// its sequence number, from 1. Does not wait for the device.
    ///
    /// # Errors
    /// The error contains the loan, and no subscriber has got the sample: [`Error::Timeout`] or
    /// [`Error::Limit`] by the subscribers' [`Policy`](crate::Policy), [`Error::Argument`] for a
    /// stream of another device than the publisher's, [`Error::State`]. When the driver itself
    /// fails ([`Error::Driver`]) the error contains no loan: subscribers see that the sample is
    /// lost. While another thread's send of the same publisher is held up by the driver (its
    /// stream's launch queue is full), `Timeout` after 10 s.
    ///
    /// [`Error::Argument`]: crate::Error::Argument
    /// [`Error::Driver`]: crate::Error::Driver
    /// [`Error::Limit`]: crate::Error::Limit
    /// [`Error::State`]: crate::Error::State
    /// [`Error::Timeout`]: crate::Error::Timeout
    pub fn send(self, stream: &Stream) -> Result<u64, SendError> {
        let to = Recipients::All;
        self.give(None, stream, to, None, |_, sent| sent.sequence)
    }

    /// [`send`](Self::send) with another wait for room, and for another thread's send: `wait`
    /// replaces the timeout of [`Policy::Block`](crate::Policy::Block), and of the 10 s.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_within<'w>(
        self,
        stream: &Stream,
        wait: impl Into<Wait<'w>>,
    ) -> Result<u64, SendError> {
        let (to, wait) = (Recipients::All, wait.into());
        self.give(None, stream, to, Some(&wait), |_, sent| sent.sequence)
    }

    /// [`send`](Self::send), or [`send_within`](Self::send_within), of a loan that stays where it
    /// is: a move costs more than the rest of a call from C. After an error, [`is_given`] says
    /// whether the loan is used up.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    ///
    /// # Safety
    /// A loan that [`is_given`] is dropped next.
    ///
    /// [`is_given`]: Self::is_given
    #[doc(hidden)] // For the C interface.
    pub unsafe fn send_in_place(&mut self, stream: &Stream, wait: Option<Wait<'_>>) -> Result<u64> {
        let sent = self.give_in_place(None, stream, Recipients::All, wait.as_ref())?;
        Ok(sent.sequence)
    }

    /// Whether it was sent, so that its slot is no longer this loan's.
    #[doc(hidden)] // For the C interface.
    pub fn is_given(&self) -> bool {
        self.is_given
    }

    /// As [`give_in_place`](Self::give_in_place). If that fails, the loan goes back to the caller.
    #[inline]
    pub(in crate::pubsub) fn give<T>(
        mut self,
        metadata: Option<&Metadata>,
        stream: &Stream,
        to: Recipients,
        wait: Option<&Wait<'_>>,
        then: impl FnOnce(&SampleMut, Delivery) -> T,
    ) -> Result<T, SendError> {
        match self.give_in_place(metadata, stream, to, wait) {
            Ok(delivery) => Ok(then(&self, delivery)),
            Err(error) => {
                let is_returned = !self.is_given;
                let returned = is_returned.then(|| Box::new(self));
                Err(SendError { error, returned })
            }
        }
    }

    /// Has `stream` wait for all work on the loan, and sends it, with its own metadata or these.
    /// `is_given` says after an error whether the sample was announced.
    #[inline]
    fn give_in_place(
        &mut self,
        metadata: Option<&Metadata>,
        stream: &Stream,
        to: Recipients,
        wait: Option<&Wait<'_>>,
    ) -> Result<Delivery> {
        // Until it is known to be unsent, also where a call panics.
        self.is_given = true;
        let sent = self.gather(stream).and_then(|()| {
            let given = Given {
                slot: self.slot,
                layout: &self.layout,
                metadata: metadata.unwrap_or(&self.metadata),
                head: match metadata {
                    None => self.head(),
                    Some(_) => Head::None,
                },
            };
            self.core.send(given, stream, to, wait)
        });
        sent.map_err(|failure| match failure {
            SendFailure::BeforePublish(error) => {
                self.is_given = false;
                self.stay_behind(stream);
                error
            }
            SendFailure::AfterPublish(error) => error,
        })
    }

    /// Makes `stream` wait for the other streams that got work on the loan.
    #[inline]
    fn gather(&self, stream: &Stream) -> Result<(), SendFailure> {
        stream.check_of(&self.core.device)?;
        let earlier = self.behind.iter().chain(&self.earlier);
        for other in earlier.filter(|other| !other.is_same(stream)) {
            stream.wait_for(other)?;
        }
        Ok(())
    }

    /// Notes that the work on `stream` may be writing the slot, so that a dropped loan returns
    /// behind it. A caller that passes a loan and a stream to a failing call has no other way to
    /// say so.
    #[doc(hidden)] // For the Python package.
    pub fn stay_behind(&mut self, stream: &Stream) {
        let is_known = |known: &Stream| known.is_same(stream);
        if self.behind.as_ref().is_some_and(is_known) || stream.check_of(&self.core.device).is_err()
        {
            return;
        }
        self.core.record_use(stream);
        self.earlier.retain(|known| !is_known(known));
        self.earlier.extend(self.behind.replace(stream.clone()));
    }

    /// Gives the slot back unsent, once the work enqueued on `stream` so far is done.
    ///
    /// # Errors
    /// [`Error::Driver`]: the slot is back once the stream is known to have done that work.
    /// [`Error::Argument`] for a stream of another device: the slot is back as if the loan were
    /// dropped.
    ///
    /// [`Error::Argument`]: crate::Error::Argument
    /// [`Error::Driver`]: crate::Error::Driver
    pub fn discard(mut self, stream: &Stream) -> Result<()> {
        self.core.owner_process.check()?;
        let foreign = stream.check_of(&self.core.device);
        self.stay_behind(stream);
        self.give_back().and(foreign)
    }

    fn give_back(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.is_given, true) {
            return Ok(());
        }
        self.earlier.extend(self.behind.take());
        self.core.return_slot(self.slot, &self.earlier)
    }
}

impl Drop for SampleMut {
    fn drop(&mut self) {
        if self.core.owner_process.is_current() {
            // Without a fence the slot still returns, later.
            let _ = self.give_back();
        }
    }
}

opaque_debug!(SampleMut { layout, core });

/// A send that failed. The loan comes back, unless the driver failed after the sample was announced
/// to subscribers.
pub type SendError = Returned<Option<Box<SampleMut>>>;
