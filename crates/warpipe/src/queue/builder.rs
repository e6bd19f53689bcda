//! The options of a queue.

use std::time::Duration;

use super::job_table::ResultOrder;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::ipc::domain::Domain;
use crate::options::{EndpointOptions, option_setters};

/// The most jobs that one worker may hold.
const PREFETCH_MAX: u32 = 256;

/// The default of [`QueueBuilder::limit`].
const LIMIT: usize = 1 << 20;

/// The options of a queue. See [`Queue::builder`](crate::Queue::builder).
///
/// It admits workers of its own user alone.
#[derive(Debug, Clone)]
pub struct QueueBuilder {
    pub(super) name: String,
    pub(crate) shared: EndpointOptions,
    pub(super) prefetch: u32,
    pub(super) max_attempts: u32,
    pub(super) lease_timeout: Option<Duration>,
    pub(super) order: ResultOrder,
    pub(super) limit: usize,
    pub(super) submit_timeout: Duration,
    pub(super) workers_max: u32,
}

impl QueueBuilder {
    pub(super) fn new(name: &str) -> QueueBuilder {
        QueueBuilder {
            name: name.to_string(),
            shared: EndpointOptions::default(),
            prefetch: 2,
            max_attempts: 3,
            lease_timeout: None,
            order: ResultOrder::Submission,
            limit: LIMIT,
            submit_timeout: Duration::from_secs(5),
            workers_max: 256,
        }
    }

    option_setters! { (shared):
        /// The domain to make it in; the environment's by default.
        domain,
        /// The device that holds the inputs; [`Device::preferred`] by default.
        device,
        /// The most device memory that inputs may take, in bytes: 4 GiB by default.
        memory_limit,
        spin,
        /// How long a worker may take to attach: 5 s by default.
        handshake_timeout,
    }

    /// How many jobs a worker may hold at once, 1 to 256: 2 by default, so that the next job is at
    /// hand when one is done.
    pub fn prefetch(mut self, jobs: u32) -> Self {
        self.prefetch = jobs;
        self
    }

    /// How often a job is tried before it is dead-lettered: 3 by default.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = attempts;
        self
    }

    /// How long a worker may hold jobs without answering any. Then they go to other workers, its
    /// late answers do not count, and it gets no new job before it has answered. Time in which the
    /// queue's own process is stopped does not count. `None`, the default, waits for the worker's
    /// death.
    pub fn lease_timeout(mut self, timeout: Option<Duration>) -> Self {
        self.lease_timeout = timeout;
        self
    }

    /// The order in which results are returned: [`ResultOrder::Submission`] by default.
    pub fn order(mut self, order: ResultOrder) -> Self {
        self.order = order;
        self
    }

    /// The most jobs that are pending or have an outcome not taken yet: 1,048,576 by default, more
    /// than the memory limits of most inputs and results allow.
    pub fn limit(mut self, jobs: usize) -> Self {
        self.limit = jobs;
        self
    }

    /// How long [`Queue::submit`](crate::Queue::submit) waits for room, and [`Queue::loan`](crate::Queue::loan) for memory: 5 s by default.
    pub fn submit_timeout(mut self, timeout: Duration) -> Self {
        self.submit_timeout = timeout;
        self
    }

    /// The most workers at once: 256 by default.
    pub fn workers_max(mut self, workers: u32) -> Self {
        self.workers_max = workers;
        self
    }

    /// The same options with another name.
    pub(crate) fn named(mut self, name: &str) -> Self {
        self.name = name.to_string();
        self
    }

    pub(super) fn check(&self) -> Result<()> {
        if self.prefetch == 0 || self.prefetch > PREFETCH_MAX {
            return Err(Error::argument(
                "prefetch",
                self.prefetch,
                format!("1 to {PREFETCH_MAX}"),
            ));
        }
        if self.max_attempts == 0 {
            return Err(Error::argument("max_attempts", 0, "at least 1"));
        }
        if self.limit == 0 {
            return Err(Error::argument("limit", 0, "at least 1"));
        }
        if self.lease_timeout.is_some_and(|timeout| timeout.is_zero()) {
            return Err(Error::argument("lease_timeout", "0 s", "more, or none"));
        }
        Ok(())
    }
}
