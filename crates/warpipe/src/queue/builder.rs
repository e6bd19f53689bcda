//! The options of a queue, and of a client, which owns one.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use super::dispatcher::Dispatcher;
use super::job_table::{QueueRules, ResultOrder};
use super::owner::Queue;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::leak_on_fork::LeakOnFork;
use crate::ipc::Kind;
use crate::ipc::domain::Domain;
use crate::options::{EndpointOptions, option_setters};
use crate::pubsub::{Policy, Publisher, SubscriberChanges};

/// The most jobs that one worker may hold.
const PREFETCH_MAX: u32 = 256;

/// The default of [`QueueBuilder::limit`].
const LIMIT: usize = 1 << 20;

/// The depth of the ring of one worker's answers. Complete results that the owner keeps are set
/// aside, and hold no entry.
const ANSWERS: u32 = 64;

/// The options of a queue, or of a [`Client`](crate::Client): its requests are the jobs of a queue,
/// and its servers the workers. See [`Queue::builder`](crate::Queue::builder) and
/// [`Client::builder`](crate::Client::builder).
///
/// It admits workers of its own user alone: the names of a domain are its user's.
#[derive(Debug)]
pub struct QueueBuilder<T = Queue> {
    pub(crate) name: String,
    shared: EndpointOptions,
    rules: QueueRules,
    pub(crate) submit_timeout: Duration,
    workers_max: u32,
    builds: PhantomData<fn() -> T>,
}

impl<T> Clone for QueueBuilder<T> {
    fn clone(&self) -> QueueBuilder<T> {
        QueueBuilder {
            name: self.name.clone(),
            shared: self.shared.clone(),
            ..*self
        }
    }
}

impl<T> QueueBuilder<T> {
    pub(crate) fn new(name: &str) -> QueueBuilder<T> {
        QueueBuilder {
            name: name.to_string(),
            shared: EndpointOptions::default(),
            rules: QueueRules {
                prefetch: 2,
                max_attempts: 3,
                lease_timeout: None,
                order: ResultOrder::Submission,
                limit: LIMIT,
            },
            submit_timeout: Duration::from_secs(5),
            workers_max: 256,
            builds: PhantomData,
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
    }

    /// How many jobs a worker may hold at once, 1 to 256: 2 by default, so that the next job is at
    /// hand when one is done.
    pub fn prefetch(mut self, jobs: u32) -> Self {
        self.rules.prefetch = jobs;
        self
    }

    /// How often a job is tried before it is dead-lettered: 3 by default.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.rules.max_attempts = attempts;
        self
    }

    /// How long a worker may hold jobs without answering any. Then they go to other workers, its
    /// late answers do not count, and it gets no new job before it has answered. Time in which the
    /// queue's own process is stopped does not count. `None`, the default, waits for the worker's
    /// death.
    pub fn lease_timeout(mut self, timeout: Option<Duration>) -> Self {
        self.rules.lease_timeout = timeout;
        self
    }

    /// The most jobs that are pending or have an outcome not taken yet: 1,048,576 by default, more
    /// than the memory limits of most inputs and results allow.
    pub fn limit(mut self, jobs: usize) -> Self {
        self.rules.limit = jobs;
        self
    }

    /// Takes this name for a queue, and accepts workers.
    pub(crate) fn build_queue(&self, name: &str) -> Result<Queue> {
        self.rules.check()?;
        let (domain, rules) = (self.shared.domain()?, self.rules);
        let observer = Arc::new(SubscriberChanges::new()?);
        let publisher = Publisher::builder(name)
            .shared(&self.shared)
            .domain(&domain)
            .policy(Policy::DropNewest)
            // More than the prefetch: samples that a late worker has not released occupy entries.
            .depth((2 * rules.prefetch).next_power_of_two().max(16))
            .loan_timeout(self.submit_timeout)
            .subscribers_max(self.workers_max)
            .kind(Kind::Queue)
            .observed_by(&observer)
            .replies(ANSWERS)
            .build()?;
        let (spin, service) = (self.shared.spin, &self.name);
        let dispatcher = Dispatcher::new(rules, spin, service, domain, publisher, observer)?;
        Ok(Queue {
            dispatcher: LeakOnFork::new(dispatcher),
            submit_timeout: self.submit_timeout,
        })
    }
}

impl QueueBuilder {
    option_setters! { (shared):
        /// How long a worker may take to attach: 5 s by default.
        handshake_timeout,
    }

    /// The order in which results are returned: [`ResultOrder::Submission`] by default.
    pub fn order(mut self, order: ResultOrder) -> Self {
        self.rules.order = order;
        self
    }

    /// How long [`Queue::submit`](crate::Queue::submit) waits for room, and
    /// [`Queue::loan`](crate::Queue::loan) for memory: 5 s by default.
    pub fn submit_timeout(mut self, timeout: Duration) -> Self {
        self.submit_timeout = timeout;
        self
    }

    /// The most workers at once: 256 by default.
    pub fn workers_max(mut self, workers: u32) -> Self {
        self.workers_max = workers;
        self
    }

    /// Takes the name and accepts workers.
    ///
    /// # Errors
    /// [`Error::Argument`] and those of
    /// [`PublisherBuilder::build`](crate::PublisherBuilder::build). On an error nothing is left
    /// behind.
    pub fn build(self) -> Result<Queue> {
        self.build_queue(&self.name)
    }
}

impl QueueRules {
    fn check(&self) -> Result<()> {
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

impl Queue {
    /// A builder for a queue of this name.
    pub fn builder(name: &str) -> QueueBuilder {
        QueueBuilder::new(name)
    }
}
