//! Streams of tensors: a [`Publisher`] and its [`Subscriber`]s.
//!
//! A publisher [loans](Publisher::loan) a slot of its own device memory, the user's kernels fill it on the user's
//! stream, and [`SampleMut::send`] hands it to every subscriber. A subscriber [receives](Subscriber::receive) it on
//! a stream of its own, which waits on the device until the data is complete; dropping the [`Sample`] gives the
//! slot back behind the stream's work. Nothing is copied, and no CPU waits for a device.

mod core;
mod direct;
mod inlet;
mod outlet;
mod publisher;
mod sample;
mod subscriber;

pub(crate) use direct::{Departures, Member, Observer, Parcel};
pub use publisher::{
    Applicant, Policy, Publisher, PublisherBuilder, SampleMut, SendError, SlotHold, SlotReturn, SubscriberInfo,
};
pub use sample::{Discontinuity, Receipt, Sample};
pub(crate) use subscriber::{Arrival, Awaited};
pub use subscriber::{Samples, Subscriber, SubscriberBuilder};

use std::time::Duration;

/// How long a handshake may take.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
