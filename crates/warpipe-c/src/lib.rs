//! The C interface: `warpipe.h`, made from this crate by cbindgen (`cargo xtask c header`), is its
//! documentation.
//!
//! Every function catches panics, checks its arguments and returns a [`warpipe_status`]; the
//! message of a thread's last error is `warpipe_error_message`'s. An object's pointer is a key of a
//! table ([`handle`]), never an address: a pointer that is null, closed or of another type is an
//! error. Objects that one thread at a time may use say `WARPIPE_INVALID_STATE` to a second one.
//!
//! **Unsafe**: addresses of strings, structures and arrays that the caller passes ([`arguments`]),
//! and streams, are used as they are given; each function says how long they must be valid.
#![deny(missing_docs)]
#![allow(non_camel_case_types, reason = "the names are those of C")]

mod arguments;
mod channel;
mod device;
mod dlpack;
mod domain;
mod event;
mod failure;
mod handle;
mod job;
mod layout;
mod lease;
mod legacy;
mod loan;
mod members;
mod memory;
mod open;
mod pool;
mod queue;
mod sample;
mod semaphore;
mod service;
mod streams;
mod ticket;
mod timeline;
mod version;
mod watch;
mod worker;

pub use arguments::WARPIPE_USUAL_TIMEOUT;
pub use channel::*;
pub use device::*;
pub use dlpack::*;
pub use domain::*;
pub use event::*;
pub use failure::*;
pub use job::*;
pub use layout::*;
pub use lease::*;
pub use legacy::*;
pub use loan::*;
pub use members::*;
pub use memory::*;
pub use open::*;
pub use pool::*;
pub use queue::*;
pub use sample::*;
pub use semaphore::*;
pub use service::*;
pub use ticket::*;
pub use timeline::*;
pub use version::*;
pub use watch::*;
pub use worker::*;

handle::objects! {
    1 warpipe_domain = warpipe::Domain;
    2 warpipe_device = device::DeviceObject;
    3 warpipe_publisher = channel::PublisherObject;
    4 warpipe_subscriber = channel::SubscriberObject;
    5 warpipe_sample = sample::ReceivedSample;
    6 warpipe_receipt = warpipe::Receipt;
    7 warpipe_loan = loan::LentSlot;
    8 warpipe_queue = queue::QueueObject;
    9 warpipe_job = job::JobObject;
    10 warpipe_worker = worker::WorkerObject;
    11 warpipe_lease = lease::Owed;
    13 warpipe_client = service::ClientObject;
    14 warpipe_pending = service::PendingObject;
    15 warpipe_server = service::ServerObject;
    16 warpipe_watch = warpipe::QueueWatch;
    20 warpipe_memory = memory::MemoryObject;
    21 warpipe_published = warpipe::Published;
    22 warpipe_pool = pool::PoolObject;
    23 warpipe_pool_client = pool::PoolClientObject;
    24 warpipe_timeline = timeline::TimelineObject;
    25 warpipe_event = event::EventObject;
    26 warpipe_semaphore = semaphore::SemaphoreObject;
    27 warpipe_permit = semaphore::PermitObject;
    28 warpipe_member = warpipe::Member;
    29 warpipe_members = warpipe::Members;
}
