//! The options of a queue, and how they make one.

use std::sync::Arc;
use std::time::Duration;

use super::dispatcher::Dispatcher;
use super::job_table::{QueueRules, ResultOrder};
use super::owner::Queue;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::leak_on_fork::LeakOnFork;
use crate::ipc::domain::Domain;
use crate::ipc::{HANDSHAKE_TIMEOUT, Kind};
use crate::options::{MEMORY_LIMIT, chosen_domain, in_domain};
use crate::pubsub::{Policy, Publisher, PublisherOptions, PublisherRole, SubscriberChanges};
use crate::runtime::spin::SPIN;

/// The most jobs that one worker may hold.
const PREFETCH_MAX: u32 = 256;

/// The default of [`QueueOptions::limit`].
const LIMIT: usize = 1 << 20;

/// The depth of the ring of one worker's answers. Complete results that the owner keeps are set
/// aside, and hold no entry.
const ANSWERS: u32 = 64;

/// The options of a [`Queue`].
///
/// It admits workers of its own user alone: the names of a domain are its user's.
#[derive(Debug, Clone)]
pub struct QueueOptions {
    /// The domain to make it in; the environment's by default.
    pub domain: Option<Domain>,
    /// The device that holds the inputs; [`Device::preferred`] by default.
    pub device: Option<Device>,
    /// The most device memory that inputs may take, in bytes: 4 GiB by default.
    pub memory_limit: u64,
    /// How long a wait polls before it sleeps: as [`SubscriberOptions::spin`].
    ///
    /// [`SubscriberOptions::spin`]: crate::SubscriberOptions::spin
    pub spin: Duration,
    /// How many jobs a worker may hold at once, 1 to 256: 2 by default, so that the next job is at
    /// hand when one is done.
    pub prefetch: u32,
    /// How often a job is tried before it is dead-lettered: 3 by default.
    pub max_attempts: u32,
    /// How long a worker may hold jobs without answering any. Then they go to other workers, its
    /// late answers do not count, and it gets no new job before it has answered. Time in which the
    /// queue's own process is stopped does not count. `None`, the default, waits for the worker's
    /// death.
    pub lease_timeout: Option<Duration>,
    /// The most jobs that are pending or have an outcome not taken yet: 1,048,576 by default, more
    /// than the memory limits of most inputs and results allow.
    pub limit: usize,
    /// The order in which results are returned: [`ResultOrder::Submission`] by default.
    pub order: ResultOrder,
    /// How long [`Queue::submit`](crate::Queue::submit) waits for room, and
    /// [`Queue::loan`](crate::Queue::loan) for memory: 5 s by default.
    pub submit_timeout: Duration,
    /// How long a worker may take to attach: 5 s by default.
    pub handshake_timeout: Duration,
    /// The most workers at once: 256 by default.
    pub workers_max: u32,
}

in_domain!(QueueOptions, device);

impl Default for QueueOptions {
    fn default() -> QueueOptions {
        QueueOptions {
            domain: None,
            device: None,
            memory_limit: MEMORY_LIMIT,
            spin: SPIN,
            prefetch: 2,
            max_attempts: 3,
            lease_timeout: None,
            limit: LIMIT,
            order: ResultOrder::Submission,
            submit_timeout: Duration::from_secs(5),
            handshake_timeout: HANDSHAKE_TIMEOUT,
            workers_max: 256,
        }
    }
}

impl Queue {
    /// Takes the name and accepts workers.
    ///
    /// # Errors
    /// [`Error::Argument`] and those of [`Publisher::new`](crate::Publisher::new). On an error
    /// nothing is left behind.
    pub fn new(name: &str, options: QueueOptions) -> Result<Queue> {
        Queue::of_service(name, name, options)
    }

    /// The queue `name` of a client's requests to `service`.
    pub(crate) fn of_service(name: &str, service: &str, options: QueueOptions) -> Result<Queue> {
        let rules = QueueRules {
            prefetch: options.prefetch,
            max_attempts: options.max_attempts,
            lease_timeout: options.lease_timeout,
            order: options.order,
            limit: options.limit,
        };
        rules.check()?;
        let (domain, submit_timeout) = (chosen_domain(&options.domain)?, options.submit_timeout);
        let observer = Arc::new(SubscriberChanges::new()?);
        let publishing = PublisherOptions {
            domain: Some(domain.clone()),
            device: options.device,
            memory_limit: options.memory_limit,
            handshake_timeout: options.handshake_timeout,
            policy: Policy::DropNewest,
            // More than the prefetch: samples that a late worker has not released occupy entries.
            depth: (2 * rules.prefetch).next_power_of_two().max(16),
            loan_timeout: submit_timeout,
            subscribers_max: options.workers_max,
            ..PublisherOptions::default()
        };
        let role = PublisherRole {
            kind: Kind::Queue,
            observer: Some(observer.clone()),
            replies: ANSWERS,
        };
        let publisher = Publisher::with_role(name, publishing, role)?;
        let spin = options.spin;
        let dispatcher = Dispatcher::new(rules, spin, service, domain, publisher, observer)?;
        Ok(Queue {
            dispatcher: LeakOnFork::new(dispatcher),
            submit_timeout,
        })
    }
}

impl QueueRules {
    fn check(&self) -> Result<()> {
        if self.prefetch == 0 || self.prefetch > PREFETCH_MAX {
            let allowed = format!("1 to {PREFETCH_MAX}");
            return Err(Error::argument("prefetch", self.prefetch, allowed));
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
