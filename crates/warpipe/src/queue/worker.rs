//! The worker: it leases jobs of a queue and answers each.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use super::lease::{AnswerPublisher, Lease};
use super::wire::DeliveryTag;
use crate::clock::now_ns;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::ipc::Kind;
use crate::ipc::domain::Domain;
use crate::nvtx;
use crate::options::{EndpointOptions, option_setters};
use crate::pubsub::{Policy, Publisher, Sample, Subscriber};
use crate::stream::Stream;
use crate::wait::Wait;

/// The options of a worker. See [`Worker::builder`].
#[derive(Debug, Clone)]
pub struct WorkerBuilder {
    name: String,
    shared: EndpointOptions,
    answer_timeout: Duration,
}

impl WorkerBuilder {
    option_setters! { (shared):
        shared,
        /// The domain to look in; the environment's by default.
        domain,
        /// The device to work with, which holds the results; [`Device::preferred`] by default.
        device,
        spin,
        /// The most device memory that results may take, in bytes: 4 GiB by default.
        memory_limit,
        /// How long the queue may take to answer: 5 s by default.
        handshake_timeout,
    }

    /// How long an answer may wait for the owner to release earlier results, and for memory: 10 s
    /// by default.
    pub fn answer_timeout(mut self, timeout: Duration) -> Self {
        self.answer_timeout = timeout;
        self
    }

    /// Finds the queue and attaches.
    ///
    /// # Errors
    /// [`Error::NotFound`] when the queue does not exist; [`Error::OtherKind`] when the name is
    /// no queue's; those of [`PublisherBuilder::build`](crate::PublisherBuilder::build) and
    /// [`SubscriberBuilder::build`](crate::SubscriberBuilder::build).
    pub fn build(self) -> Result<Worker> {
        self.wait_for_queue(Duration::ZERO)
    }

    /// Waits for the queue to exist, and attaches.
    ///
    /// # Errors
    /// As [`build`](Self::build); [`Error::Timeout`] when the wait is cancelled while a queue does
    /// not answer.
    pub fn wait_for_queue<'w>(self, wait: impl Into<Wait<'w>>) -> Result<Worker> {
        // One domain and one device for both of its ends, also where they are the defaults.
        let shared = (self.shared.clone()).at(&self.shared.domain()?, &self.shared.device());
        let jobs = Subscriber::builder(&self.name)
            .shared(&shared)
            .kind(Kind::Queue)
            .with_replies()
            .wait_for_publisher(wait)?;
        let answers = Publisher::builder(&self.name)
            .shared(&shared)
            .kind(Kind::Results)
            .policy(Policy::Block {
                timeout: self.answer_timeout,
            })
            .loan_timeout(self.answer_timeout)
            .build_over(&jobs)?;
        let queue_pid = jobs.publisher_pid().unwrap_or_default();
        Ok(Worker {
            jobs,
            answers: Arc::new(AnswerPublisher::new(answers, queue_pid)),
        })
    }
}

/// Takes jobs of one queue and answers them. Belongs to one thread at a time; its leases may go
/// anywhere.
///
/// Dropped, it takes no more jobs: jobs that it was given and has not leased go to other workers at
/// no cost of an attempt, and leased jobs can still be answered. For an example see
/// [`Queue`](super::Queue).
#[derive(Debug)]
pub struct Worker {
    /// Declared first: the jobs end before the answers.
    pub(crate) jobs: Subscriber,
    pub(super) answers: Arc<AnswerPublisher>,
}

impl Worker {
    /// A builder for a worker of this queue.
    pub fn builder(name: &str) -> WorkerBuilder {
        WorkerBuilder {
            name: name.to_string(),
            shared: EndpointOptions::default(),
            answer_timeout: Duration::from_secs(10),
        }
    }

    /// The queue's name.
    pub fn queue(&self) -> &str {
        self.answers.queue()
    }

    /// The process that owns the queue.
    pub fn queue_pid(&self) -> i32 {
        self.answers.queue_pid
    }

    /// Takes the next job, and waits for it if there is none. `stream` will wait, on the device,
    /// until the input is complete.
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::PeerGone`], which is `graceful` after the queue's
    /// [shutdown](super::Queue::shutdown) or close: then a worker's loop is done;
    /// [`Error::LinkClosed`] when the queue, which lives, has ended this worker's link;
    /// [`Error::Protocol`]; [`Error::Forked`]; errors of the device.
    pub fn lease<'w>(&mut self, stream: &Stream, wait: impl Into<Wait<'w>>) -> Result<Lease> {
        let _range = nvtx::range(nvtx::LEASE);
        let wait = wait.into();
        loop {
            let received = self.jobs.receive(stream, &wait);
            let sample = received.map_err(|error| self.as_worker_error(error, &wait))?;
            if let Some(lease) = self.begin(sample, stream)? {
                return Ok(lease);
            }
        }
    }

    /// Checks the queue's metadata. A job past its deadline is answered and not begun.
    fn begin(&mut self, sample: Sample, stream: &Stream) -> Result<Option<Lease>> {
        let tag = DeliveryTag::decode(sample.metadata()).map_err(|wrong| self.jobs.fail(wrong))?;
        let lease = Lease::new(sample, tag, stream, &self.answers);
        if tag.deadline_ns != 0 && tag.deadline_ns <= now_ns() {
            return match lease.expire() {
                // Dropped, the lease has failed, or has ended the link: this wait goes on.
                Ok(()) | Err(Error::Timeout { .. }) => Ok(None),
                Err(error) => Err(error),
            };
        }
        Ok(Some(lease))
    }

    /// The error of a subscriber, in a worker's words.
    fn as_worker_error(&self, error: Error, wait: &Wait<'_>) -> Error {
        match error {
            Error::Timeout { .. } => wait
                .timed_out(|| format!("a job of {:?} (its queue has none to give)", self.queue())),
            Error::PeerGone { graceful, .. } => self.answers.queue_gone("", graceful),
            // The queue lives, and goes on without this worker.
            Error::LinkClosed { reason, .. } => Error::LinkClosed {
                kind: Kind::Queue,
                name: self.queue().to_string(),
                reason,
            },
            other => other,
        }
    }
}

impl Worker {
    /// Makes the descriptor of [`AsFd`] readable once: for a caller that keeps a lease aside for an
    /// event loop.
    pub fn ring(&self) {
        self.jobs.ring();
    }
}

impl AsFd for Worker {
    /// A descriptor that is readable when a [`lease`](Worker::lease) without a wait is worth a
    /// call; lease until it says [`Error::Timeout`] before waiting on it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.jobs.as_fd()
    }
}
