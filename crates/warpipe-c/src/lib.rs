//! The C interface: `warpipe.h`, made from this crate by cbindgen (`cargo xtask c header`), is its
//! documentation.
//!
//! Every function catches panics, checks its arguments and returns a [`warpipe_status`]; the
//! message of a thread's last error is `warpipe_error_message`'s. An object's pointer is a key of a
//! table ([`handle`]), never an address: a pointer that is null, closed or of another type is an
//! error. Objects that one thread at a time may use say `WARPIPE_INVALID_STATE` to a second one.
//!
//! The names of C are one flat namespace, and modules take them from this root.
//!
//! **Unsafe**: addresses of strings, structures and arrays that the caller passes ([`arguments`]),
//! and streams, are used as they are given; each function says how long they must be valid.
#![deny(missing_docs)]
#![allow(non_camel_case_types, reason = "the names are those of C")]

mod allocations;
mod arguments;
mod call;
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
mod object;
mod open;
mod parts;
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

pub use self::{
    allocations::*, arguments::WARPIPE_USUAL_TIMEOUT, channel::*, device::*, dlpack::*, domain::*,
    event::*, failure::*, job::*, layout::*, lease::*, legacy::*, loan::*, members::*, memory::*,
    object::*, open::*, parts::*, pool::*, queue::*, sample::*, semaphore::*, service::*,
    ticket::*, timeline::*, version::*, watch::*, worker::*,
};

use streams::OnDevice;

handle::handles! {
    1 warpipe_domain: Found<warpipe::Domain>;
    2 warpipe_device: Found<OnDevice<()>>;
    3 warpipe_publisher: Found<OnDevice<warpipe::Publisher>>;
    4 warpipe_subscriber: Locked<OnDevice<warpipe::Subscriber>>;
    5 warpipe_sample: Locked<OnDevice<sample::Received>>;
    6 warpipe_receipt: Found<warpipe::Receipt>;
    7 warpipe_loan: Locked<OnDevice<loan::LoanKind>>;
    8 warpipe_queue: Found<OnDevice<warpipe::Queue>>;
    9 warpipe_job: Found<OnDevice<job::Submitted>>;
    10 warpipe_worker: Locked<OnDevice<warpipe::Worker>>;
    11 warpipe_lease: Locked<OnDevice<warpipe::AnswerHandle>>;
    13 warpipe_client: Found<OnDevice<warpipe::Client>>;
    15 warpipe_server: Locked<OnDevice<warpipe::Server>>;
    16 warpipe_watch: Found<warpipe::QueueWatch>;
    20 warpipe_memory: Found<memory::MemoryObject>;
    21 warpipe_published: Found<warpipe::Published>;
    22 warpipe_pool: Found<OnDevice<warpipe::Pool>>;
    23 warpipe_pool_client: Found<OnDevice<warpipe::PoolClient>>;
    24 warpipe_timeline: Found<OnDevice<warpipe::Timeline>>;
    25 warpipe_event: Found<OnDevice<warpipe::Event>>;
    26 warpipe_semaphore: Found<OnDevice<warpipe::Semaphore>>;
    27 warpipe_permit: Locked<OnDevice<warpipe::Permit>>;
    28 warpipe_member: Found<warpipe::Member>;
    29 warpipe_members: Found<warpipe::Members>;
    30 warpipe_allocation_server: Found<OnDevice<warpipe::AllocationServer>>;
    31 warpipe_allocation_client: Found<OnDevice<warpipe::AllocationClient>>;
}
