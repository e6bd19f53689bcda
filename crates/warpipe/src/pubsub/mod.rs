//! Streams of tensors: a [`Publisher`] and its [`Subscriber`]s.
//!
//! A publisher [loans](Publisher::loan) a slot of its own device memory, the user's kernels fill it
//! on the user's stream, and [`SampleMut::send`] hands it to every subscriber. A subscriber
//! [receives](Subscriber::receive) it on a stream of its own, which waits on the device until the
//! data is complete. Dropping the [`Sample`] gives the slot back behind the stream's work. A
//! publisher and each subscriber share a *link* that no third process shares: a socket (handshake,
//! messages, descriptors), a sealed memfd (the *link segment*, in which samples are announced) and
//! a wake channel. Each end is named after its peer: the publisher has a `SubscriberLink` for each
//! subscriber, the subscriber a `PublisherLink`. A link *with replies* has a second ring in the
//! other direction (a [`queue`](crate::queue)'s). Each process then has both types for it,
//! *partners*: the `SubscriberLink` of the ring that it fills, which reads the socket for both, and
//! the `PublisherLink` of the other ring. Each end of a ring has a `LinkEnd`: those of one process
//! share the connection. A `PublisherLink` is the handle of a `ReceiverEnd`, which stays until no
//! stream uses its memory; a `LinkReceiver` takes the samples of one. Formats:
//! `docs/design/protocol.md`. Deaths: `docs/design/recovery.md`.

pub(crate) mod entry;
mod link_end;
mod observer;
mod options;
pub(crate) mod parts;
pub(crate) mod place;
mod publisher;
mod publisher_core;
pub(crate) mod publisher_link;
pub(crate) mod ring;
mod sample;
mod subscriber;
mod subscriber_link;
mod unicast;

pub(crate) use observer::{Reply, ReplyLink, SubscriberChanges};
pub(crate) use options::PublisherRole;
pub use options::{PeerCredentials, Policy, PublisherOptions, SubscriberInfo};
pub use parts::{PART_NAME_BYTES_MAX, PARTS_MAX, Part, lay_out_parts};
pub use publisher::{Publisher, PublisherStats, SampleMut, SendError};
pub(crate) use publisher_core::REPLIES;
pub use publisher_core::{SlotHold, SlotReturn};
pub(crate) use sample::RawSample;
pub use sample::{Discontinuity, PreviousPublisher, Receipt, Sample, SampleInfo};
pub(crate) use subscriber::LinkReceiver;
pub use subscriber::{PublisherInfo, Samples, Subscriber, SubscriberOptions};
pub(crate) use unicast::{Forwarded, RetainedSlot};
