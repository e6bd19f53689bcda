//! GPU memory and streams of tensors, handed between processes without a copy, surviving the death
//! of any of them.
//!
//! One process publishes tensors in its GPU's memory; other processes on the same machine receive
//! them in place. Streams wait for each other on the device: no CPU waits for a GPU, and no byte of
//! a tensor is copied. Without a GPU the same programs run on memory that is shared through memfds.
//!
//! ```
//! use std::time::Duration;
//! use warpipe::{Device, Domain, Publisher, PublisherOptions, Subscriber, SubscriberOptions};
//! # let folder = std::env::temp_dir().join(format!("warpipe-tour-{}", std::process::id()));
//! let domain = Domain::at(&folder)?; // `PublisherOptions::default()` takes the environment's,
//! let device = Device::host(); // and the first GPU, else the host
//! let publisher = Publisher::new("tour", domain.on(&device))?;
//! let mut subscriber = Subscriber::open("tour", domain.on(&device), Duration::ZERO)?;
//!
//! let stream = device.stream()?;
//! publisher.send_bytes(&stream, b"a tensor of seven and more")?;
//!
//! let sample = subscriber.receive(&stream, Duration::from_secs(1))?;
//! assert_eq!(sample.to_vec(Duration::from_secs(1))?, b"a tensor of seven and more");
//! sample.finish(Duration::from_secs(1))?; // an error if the sender died before completion
//! # drop((subscriber, publisher)); std::fs::remove_dir_all(folder).ok();
//! # Ok::<(), warpipe::Error>(())
//! ```
//!
//! Here both ends are in one process, so that the example runs as it stands; in two processes the
//! lines are the same. The example programs in `examples/` start their processes themselves. Options
//! are structs with public fields: name those that you set, and end with
//! `..domain.on(&device)` or `..PublisherOptions::default()`.
//!
//! # Choose by the job
//!
//! | to hand over | use |
//! | --- | --- |
//! | a stream of tensors | [`Publisher`], [`Subscriber`], with a [`Policy`] for slow subscribers |
//! | jobs, each done once even if workers die | [`Queue`], [`Worker`] |
//! | requests and replies | [`Client`], [`Server`] |
//! | memory of your own | [`Memory`], opened elsewhere by a [`Ticket`] |
//! | memory of another allocator | [`LegacyHandle`], a CUDA IPC handle that knows its owner |
//! | a model's weights, for all its engines | [`weights`] |
//! | blocks of one process's memory | [`Pool`], [`PoolClient`] |
//! | the order of streams | [`Timeline`] (a number that grows), [`Event`], [`Semaphore`] |
//! | items, from kernel to kernel without a CPU | [`KernelRing`] |
//! | the list of live processes | [`Member`], [`Members`] |
//!
//! Names live in a [`Domain`], a directory of this user. A [`Device`] is a GPU or the host, a
//! [`Stream`] the order of its work, a [`Layout`] the element type, shape and strides of a tensor.
//! [`SampleMut`] and [`Loan`] are memory to write and send, [`Sample`], [`Lease`] and [`JobResult`]
//! memory that was received. [`Error::kind`] says what
//! to do about an error.
//!
//! The guides (`docs/guide/`), `ARCHITECTURE.md` and the design documents (`docs/design/`) lie in
//! the repository; `cargo xtask book` makes a book of them.
//!
//! # Guarantees
//!
//! * A sample is delivered whole or not at all. If its sender died, or gave up, before its data was
//!   complete, [`Sample::finish`], [`Sample::wait`] and [`Receipt::check`] return
//!   [`Loss::Sample`]. Call one of them before you use results that were computed from a sample.
//! * A subscriber still receives the samples that were complete when its publisher died, then
//!   [`Error::PeerGone`].
//! * Memory held by a killed subscriber is used again once its death is proven. Memory held by a
//!   stopped subscriber stays untouched.
//! * Every call that waits for another process takes a timeout. Calls of the driver take as long as
//!   the driver does.
//!
//! # Errors
//!
//! One [`enum`](Error) with context for each case. [`Error::kind`] says what a program can do next,
//! the text what happened, and [`Error::hint`] the next step for a person. Nothing that comes from
//! outside this process (a file, an argument, a peer's bytes or descriptors, the
//! driver's answers) makes the library panic.
//!
//! # Threads
//!
//! A [`Publisher`] may be used from any number of threads at once. A [`Subscriber`] belongs to one
//! thread at a time; its samples may go anywhere. The first endpoint of a process starts four
//! threads, one of each for all endpoints: a reactor that sees sockets and deaths, a control thread
//! that makes links, a fence thread that checks whether memory is still in use, and a reaper that
//! returns it to the driver. On the host device each [`Stream`] is a thread, too, and each
//! [`Queue`] has one, which sleeps while nothing happens.
//!
//! # Fork
//!
//! A forked child's handles return [`StateFault::Forked`], and using or dropping them does not
//! affect the parent. The child may open endpoints of its own on the host device; CUDA does not
//! survive a fork. `fork` followed by `exec` is no concern: every descriptor is close-on-exec. In
//! the child of a process that has started CUDA, `/dev/null` replaces the driver's files: a child
//! that held them would keep its parent's device work running after the parent's death.
//!
//! # Features
//!
//! * `cudarc`: conversions from streams and slices of the `cudarc` crate, in `interop_cudarc` (off
//!   by default).
//! * `testing`: wrappers that delay, fail or count a backend's calls (off by default). For tests
//!   and measurements alone: with it safe code can break memory safety.
#![cfg_attr(not(loom), deny(missing_docs))]

// The package `verify/` compiles this library with the atomics of a model checker.
#[cfg_attr(loom, path = "../../../verify/src/atomic.rs")]
mod atomic;
#[doc(hidden)]
pub mod backend;
mod backoff;
pub mod clock;
mod debug;
mod device;
mod device_types;
mod error;
mod fork;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod fuzzing;
// A tree of its own beside the sources: as unit tests its files reach the library's internals.
mod allocations;
#[cfg(test)]
#[path = "../tests/hostile/mod.rs"]
mod hostile;
#[cfg(feature = "cudarc")]
pub mod interop_cudarc;
mod ipc;
mod kernel;
mod kind;
mod lend;
mod members;
mod memory;
mod mutex;
pub mod nvtx;
mod options;
mod origin;
mod os;
mod pool;
mod pubsub;
mod queue;
mod rings;
mod rows;
mod rpc;
mod runtime;
mod shm;
mod slow_path;
#[doc(hidden)]
pub mod statistics;
mod stats;
mod stream;
mod sync;
mod tensor;
mod trace;
#[cfg(loom)]
#[doc(hidden)]
#[path = "../../../verify/src/mod.rs"]
pub mod verify;
mod wait;
pub mod weights;

pub use allocations::{AllocationClient, AllocationServer, AllocationStats};
pub use device::{Device, PreferredDevice};
pub use device_types::{Access, DeviceId, DeviceInfo, DeviceKind, DevicePtr, RawEvent, RawStream};
pub use error::{
    DeviceFault, Error, ErrorKind, Expiry, HandleFault, HandshakeFault, Holder, JobEnd, Language,
    LimitFault, Loss, NameFault, PeerLimit, PointerKind, Result, Returned, StateFault,
    WeightsDifference, WeightsFault, WeightsFileFault,
};
#[doc(hidden)] // For the C interface.
pub use fork::per_process::PerProcess;
pub use ipc::PeerState;
pub use ipc::domain::{Domain, Endpoint, EndpointName, NAME_BYTES_MAX};
pub use kernel::{HostKernel, Kernel, KernelLaunch};
pub use kind::Kind;
pub use lend::session::LentBuffer;
pub use members::{Change, Member, MemberInfo, MemberOptions, Members, MembersOptions};
pub use memory::legacy::{LegacyHandle, LegacyInfo, LegacyMemory};
pub use memory::{
    DeviceSlice, Memory, MemoryInfo, PublishOptions, Published, SharedMemory, Ticket, TicketInfo,
};
pub use options::{CreateOptions, DeviceOptions, DomainOptions, OpenOptions};
pub use pool::{Buffer, Pool, PoolClient, PoolOptions, PoolStats, PoolUsage, Quota};
#[doc(hidden)] // For the bridge.
pub use pubsub::lay_out_parts;
pub use pubsub::{
    Discontinuity, PART_NAME_BYTES_MAX, PARTS_MAX, Part, PeerCredentials, Policy,
    PreviousPublisher, Publisher, PublisherInfo, PublisherOptions, PublisherStats, Receipt, Sample,
    SampleInfo, SampleMut, Samples, SendError, SlotHold, SlotReturn, Subscriber, SubscriberInfo,
    SubscriberOptions,
};
pub use queue::{
    AnswerError, AnswerHandle, JobHandle, JobResult, Lease, Loan, Queue, QueueOptions, QueueState,
    QueueWatch, ResultOrder, SubmitError, Unanswered, Worker, WorkerOptions,
};
#[doc(hidden)] // For the fake driver, which runs their CPU versions.
pub use rings::RING_STEPS;
pub use rings::{HostRing, KernelRing, KernelRingOptions, RingEnd, RingInfo};
pub use rpc::{Client, ClientOptions, Pending, Server, ServerOptions};
#[doc(hidden)] // For the bridge.
pub use runtime::reactor::new_generation;
pub use stats::{ProcessStats, process_stats};
pub use stream::Stream;
pub use sync::event::{Event, EventHandle, Recording};
pub use sync::semaphore::{Permit, Semaphore, SemaphoreState};
pub use sync::timeline::Timeline;
pub use tensor::{DType, Layout, RANK_MAX};
pub use wait::{OptionalExtension, Wait};

/// Tests the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// Tests the examples of the guides.
#[cfg(doctest)]
#[doc = include_str!("../docs/guide/members.md")]
#[doc = include_str!("../docs/guide/channels.md")]
#[doc = include_str!("../docs/guide/timeline.md")]
#[doc = include_str!("../docs/guide/kernel-rings.md")]
#[doc = include_str!("../docs/guide/handles.md")]
#[doc = include_str!("../docs/guide/pool.md")]
#[doc = include_str!("../docs/guide/queue.md")]
#[doc = include_str!("../docs/guide/service.md")]
#[doc = include_str!("../docs/guide/weights.md")]
struct Guide;
