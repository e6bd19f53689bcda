//! GPU memory and streams of tensors, handed between processes without a copy, surviving the death of any of them.
#![deny(missing_docs)]

pub mod backend;
mod channel;
pub mod clock;
pub mod device;
mod domain;
mod error;
mod fork;
#[cfg(feature = "cudarc")]
pub mod interop_cudarc;
pub mod kernel;
mod link;
mod memory;
mod os;
mod stream;
pub mod tensor;

pub use channel::{
    Announced, Applicant, Discontinuity, Policy, Publisher, PublisherBuilder, Receipt, Sample, SampleMut, Samples,
    SendError, Subscriber, SubscriberBuilder, SubscriberInfo,
};
pub use device::Device;
pub use domain::{Domain, Endpoint, EndpointName, NAME_BYTES_MAX};
pub use error::{Error, HandshakeFault, Holder, Result};
pub use kernel::Kernel;
pub use link::PeerState;
pub use stream::Stream;
pub use tensor::{DType, Layout};
