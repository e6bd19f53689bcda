//! A slot on loan for a job's input or its result.

use std::ops::Deref;

use super::wire::{DeliveryTag, check_user};
use crate::error::Result;
use crate::pubsub::SampleMut;
use crate::stream::Stream;

/// Device memory on loan: of the queue for a job's input ([`Queue::loan`](super::Queue::loan)), or
/// of the worker for its result ([`Lease::output`](super::Lease::output)). Fill it on a stream,
/// then submit or complete with it on that stream. Dropped, it returns at once, or behind the work
/// on the stream of the last call that took both, even one that failed.
///
/// Its address, its layout and its [`hold`](SampleMut::hold) are those of the [`SampleMut`] that it
/// dereferences to.
#[derive(Debug)]
#[must_use = "a loan that is not used goes back"]
pub struct Loan {
    pub(super) sample: SampleMut,
    pub(super) metadata: Vec<u8>,
    /// For a result: the lease that it answers.
    pub(super) lease: Option<DeliveryTag>,
}

impl Deref for Loan {
    type Target = SampleMut;

    fn deref(&self) -> &SampleMut {
        &self.sample
    }
}

impl Loan {
    pub(super) fn new(sample: SampleMut) -> Loan {
        Loan {
            sample,
            metadata: Vec::new(),
            lease: None,
        }
    }

    pub(super) fn of_lease(sample: SampleMut, lease: DeliveryTag) -> Loan {
        Loan {
            lease: Some(lease),
            ..Loan::new(sample)
        }
    }

    /// Sets up to 200 bytes that travel with the tensor.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) for more.
    pub fn set_metadata(&mut self, bytes: &[u8]) -> Result<()> {
        self.metadata = check_user(bytes)?.to_vec();
        Ok(())
    }

    /// Copies the whole contents from host memory, in the stream's order. `bytes` may be reused at
    /// once.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) unless there are exactly `layout().bytes()`
    /// bytes; [`Error::Driver`](crate::Error::Driver).
    pub fn write(&mut self, stream: &Stream, bytes: &[u8]) -> Result<()> {
        self.sample.write(stream, bytes)
    }

    /// As [`SampleMut::stay_behind`].
    #[doc(hidden)] // For the Python package.
    pub fn stay_behind(&mut self, stream: &Stream) {
        self.sample.stay_behind(stream);
    }

    /// Returns the loan unused, once the work enqueued on `stream` so far is done.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver); the loan is returned all the same.
    pub fn discard(self, stream: &Stream) -> Result<()> {
        self.sample.discard(stream)
    }
}
