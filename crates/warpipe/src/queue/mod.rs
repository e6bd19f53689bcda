//! Units of work: a [`Queue`] of jobs, each done once by one of any number of [`Worker`] processes.
//!
//! A job is a tensor in the queue owner's memory. A worker leases it, computes on its own stream,
//! and completes it with a tensor in its own memory, the [`JobResult`]. When a worker dies, hangs
//! or fails, the job goes to another one. Each attempt's result lies in other memory, so a late
//! worker cannot write into an accepted one.
//!
//! A queue is a publisher whose subscribers are its workers. A worker's link has two rings: the
//! queue's jobs, and the worker's answers, which [`pubsub`](crate::pubsub) calls replies. An answer
//! says how a delivery ended ([`wire`]); one that completes its job is a result. A job's way:
//!
//! 1. [`Queue::submit`] waits for room (`wait_to_submit`). Then `Dispatcher::add_job`
//!    ([`delivery`]) adds the job to the [`job_table`], and posts its slot: to a worker with
//!    capacity, or to none. Then the job waits, until `dispatch` forwards the slot to a worker.
//! 2. [`Worker::lease`] receives the sample; the [`Lease`] ([`lease`]) sends the answer over the
//!    link's second ring.
//! 3. Any thread that waits for the queue, or the queue's own, processes events ([`dispatcher`],
//!    its `waiters`): the worker's session ([`worker_session`]) takes the answer, the table its
//!    lease ([`worker_leases`]), and once the result's data is complete the job has its outcome.
//! 4. [`JobHandle::wait`] or [`Queue::next_result`] takes the outcome.

#[cfg(test)]
mod blocked_driver;
mod delivery;
mod dispatcher;
mod job_handle;
mod job_result;
mod job_table;
#[cfg(test)]
mod job_table_tests;
mod lease;
mod loan;
mod options;
mod owner;
#[cfg(loom)]
#[path = "../../../../verify/src/states/queue.rs"]
pub mod states;
#[cfg(test)]
mod tests;
mod watch;
pub(crate) mod wire;
mod worker;
mod worker_leases;
mod worker_session;

pub use job_handle::JobHandle;
pub use job_result::JobResult;
pub use job_table::ResultOrder;
pub use lease::{AnswerError, AnswerHandle, Lease, Unanswered};
pub use loan::Loan;
pub use options::QueueOptions;
pub use owner::{Queue, QueueState, SubmitError};
pub use watch::QueueWatch;
pub use worker::{Worker, WorkerOptions};
