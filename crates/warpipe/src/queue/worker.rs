//! The worker: it leases jobs of a queue and answers each.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use super::lease::{AnswerPublisher, Lease};
use super::wire::DeliveryTag;
use crate::clock::now_ns;
use crate::device::Device;
use crate::error::{Error, Result, StateFault};
use crate::ipc::domain::Domain;
use crate::ipc::{HANDSHAKE_TIMEOUT, Kind};
use crate::nvtx;
use crate::options::{MEMORY_LIMIT, chosen_place, in_domain};
use crate::pubsub::{Policy, Publisher, PublisherOptions, Sample, Subscriber, SubscriberOptions};
use crate::runtime::spin::SPIN;
use crate::stream::Stream;
use crate::wait::Wait;

/// The options of a [`Worker`].
#[derive(Debug, Clone)]
pub struct WorkerOptions {
    /// The domain to look in; the environment's by default.
    pub domain: Option<Domain>,
    /// The device to work with, which holds the results; [`Device::preferred`] by default.
    pub device: Option<Device>,
    /// The most device memory that results may take, in bytes: 4 GiB by default.
    pub memory_limit: u64,
    /// How long a wait polls before it sleeps: as [`SubscriberOptions::spin`].
    pub spin: Duration,
    /// How long the queue may take to answer: 5 s by default.
    pub handshake_timeout: Duration,
    /// How long an answer may wait for the owner to release earlier results, and for memory: 10 s
    /// by default.
    pub answer_timeout: Duration,
}

in_domain!(WorkerOptions, device);

impl Default for WorkerOptions {
    fn default() -> WorkerOptions {
        WorkerOptions {
            domain: None,
            device: None,
            memory_limit: MEMORY_LIMIT,
            spin: SPIN,
            handshake_timeout: HANDSHAKE_TIMEOUT,
            answer_timeout: Duration::from_secs(10),
        }
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
    /// Waits for the queue to exist, and attaches: [`Duration::ZERO`] asks for one that is there.
    ///
    /// # Errors
    /// [`Error::NotFound`] when the queue does not exist; [`Error::Name`] when the name is
    /// no queue's; those of [`Publisher::new`](crate::Publisher::new) and [`Subscriber::open`].
    pub fn open<'w>(
        queue: &str,
        options: WorkerOptions,
        wait: impl Into<Wait<'w>>,
    ) -> Result<Worker> {
        // One domain and one device for both of its ends, also where they are the defaults.
        let (domain, device) = chosen_place(&options.domain, &options.device)?;
        let receiving = SubscriberOptions {
            spin: options.spin,
            handshake_timeout: options.handshake_timeout,
            ..domain.on(&device)
        };
        let jobs = Subscriber::to_kind(queue, receiving, (Kind::Queue, true), wait)?;
        let timeout = options.answer_timeout;
        let answering = PublisherOptions {
            memory_limit: options.memory_limit,
            handshake_timeout: options.handshake_timeout,
            policy: Policy::Block { timeout },
            loan_timeout: timeout,
            ..domain.on(&device)
        };
        let answers = Publisher::over(&jobs, answering, Kind::Results)?;
        let queue_pid = jobs.publisher().map(|it| it.pid).unwrap_or_default();
        Ok(Worker {
            jobs,
            answers: Arc::new(AnswerPublisher::new(answers, queue_pid, timeout)),
        })
    }

    /// The queue's name.
    pub(crate) fn queue(&self) -> &str {
        self.answers.queue()
    }

    /// Takes the next job, and waits for it if there is none. `stream` will wait, on the device,
    /// until the input is complete.
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::PeerGone`], which is `graceful` after the queue's
    /// [shutdown](super::Queue::shutdown) or close: then a worker's loop is done;
    /// [`StateFault::LinkClosed`] when the queue, which lives, has ended this worker's link;
    /// [`Error::Protocol`]; [`Error::State`]; errors of the device.
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
            Error::State(StateFault::LinkClosed { reason, .. }) => {
                let (kind, name) = (Kind::Queue, self.queue().to_string());
                Error::State(StateFault::LinkClosed { kind, name, reason })
            }
            other => other,
        }
    }
}

impl Worker {
    /// Makes the descriptor of [`AsFd`] readable once: for a caller that keeps a lease aside for an
    /// event loop.
    #[doc(hidden)] // For the Python package.
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
