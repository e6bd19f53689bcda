//! Units of work: a [`Queue`] of jobs, each done once by one of any number of [`Worker`] processes.
//!
//! A job is a tensor in the queue owner's memory. A worker leases it, computes on its own stream,
//! and completes it with a tensor in its own memory, the [`JobResult`]. When a worker dies, hangs
//! or fails, the job goes to another one. Each attempt's result lies in other memory, so a late
//! worker cannot write into an accepted one. A worker's link has two rings: the queue's jobs, and the
//! worker's answers. [`job_table`] decides which job is where, [`dispatcher`] applies
//! what workers do, its `waiters` is how threads wait, [`wire`] is the metadata's format.

#[cfg(test)]
mod blocked_driver;
mod builder;
mod delivery;
mod dispatcher;
mod job_handle;
mod job_result;
mod job_table;
#[cfg(test)]
mod job_table_tests;
mod lease;
mod loan;
mod owner;
#[cfg(test)]
mod tests;
mod watch;
pub(crate) mod wire;
mod worker;
mod worker_leases;
mod worker_session;

pub use builder::QueueBuilder;
pub use job_handle::JobHandle;
pub use job_result::JobResult;
pub use job_table::ResultOrder;
pub use lease::{AnswerError, AnswerHandle, Lease};
pub use loan::Loan;
pub use owner::{Queue, QueueState, SubmitError};
pub use watch::QueueWatch;
pub use worker::{Worker, WorkerBuilder};
