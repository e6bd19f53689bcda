//! The worker: it leases jobs of a queue and answers each.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::answers_of;
use super::loan::Loan;
use super::wire::{Answer, Ticket, Verdict, user_of_job};
use crate::backend::DevicePtr;
use crate::channel::{Policy, Publisher, Sample, Subscriber};
use crate::clock::now_ns;
use crate::device::Device;
use crate::domain::Domain;
use crate::error::{Error, Result};
use crate::fork::Home;
use crate::link::watcher::new_generation;
use crate::nvtx;
use crate::stream::Stream;
use crate::tensor::Layout;

/// Results of one worker that the queue's owner may have taken and not released.
const DEPTH: u32 = 64;

/// What a worker is made with. See [`Worker::builder`].
#[derive(Debug, Clone)]
pub struct WorkerBuilder {
    name: String,
    domain: Option<Domain>,
    device: Option<Device>,
    wait: Option<Duration>,
    timeout: Duration,
    spin: Duration,
    memory_limit: u64,
    handshake_timeout: Duration,
}

impl WorkerBuilder {
    /// The domain to look in; the environment's by default.
    pub fn domain(mut self, domain: &Domain) -> Self {
        self.domain = Some(domain.clone());
        self
    }

    /// The device to work with, in whose memory the results lie; [`Device::preferred`] by default.
    pub fn device(mut self, device: &Device) -> Self {
        self.device = Some(device.clone());
        self
    }

    /// Wait this long for the queue to be there; not at all by default.
    pub fn wait_for_queue(mut self, timeout: Option<Duration>) -> Self {
        self.wait = timeout;
        self
    }

    /// How long [`Worker::lease`] waits for a job, and [`Lease::complete`] for the owner to release earlier results:
    /// 10 s by default.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How long a wait polls before it sleeps: 20 µs by default.
    pub fn spin(mut self, spin: Duration) -> Self {
        self.spin = spin;
        self
    }

    /// The most device memory that results may take, in bytes: 4 GiB by default.
    pub fn memory_limit(mut self, bytes: u64) -> Self {
        self.memory_limit = bytes;
        self
    }

    /// How long the queue may take to answer: 5 s by default.
    pub fn handshake_timeout(mut self, timeout: Duration) -> Self {
        self.handshake_timeout = timeout;
        self
    }

    /// Finds the queue and attaches.
    ///
    /// # Errors
    /// [`Error::NoPublisher`] when nobody has the queue; those of a publisher's and a subscriber's building.
    pub fn build(self) -> Result<Worker> {
        let domain = self.domain.clone().map_or_else(Domain::from_environment, Ok)?;
        let device = self.device.clone().unwrap_or_else(|| Device::preferred().device);
        let generation = new_generation();
        let answers = Publisher::builder(answers_of(&self.name, generation)?.as_str())
            .domain(&domain)
            .device(&device)
            .depth(DEPTH)
            .policy(Policy::Block { timeout: self.timeout })
            .memory_limit(self.memory_limit)
            .loan_timeout(self.timeout)
            .build()?;
        let jobs = Subscriber::builder(&self.name)
            .domain(&domain)
            .device(&device)
            .wait_for_publisher(self.wait)
            .timeout(self.timeout)
            .spin(self.spin)
            .handshake_timeout(self.handshake_timeout)
            .generation(generation)
            .build()?;
        let queue_pid = jobs.publisher_pid().unwrap_or_default();
        Ok(Worker {
            jobs,
            desk: Arc::new(Answers { publisher: answers, queue: self.name, queue_pid, home: Home::here() }),
        })
    }
}

/// The worker's own end, as its leases share it.
#[derive(Debug)]
struct Answers {
    publisher: Publisher,
    queue: String,
    queue_pid: i32,
    home: Home,
}

impl Answers {
    fn gone(&self, reason: impl ToString) -> Error {
        Error::QueueGone { name: self.queue.clone(), reason: reason.to_string() }
    }

    /// Ends the link of the answers: one could not be said, and its job would be this worker's for ever. If the queue has
    /// gone there is nobody to tell.
    fn fall_silent(&self, error: &Error) {
        if self.home.is_here()
            && let Some(owner) = self.publisher.member_of(self.queue_pid)
        {
            self.publisher.expel(owner, &format!("an answer could not be given: {error}"));
        }
    }

    /// Sends an answer behind the work on `stream`.
    fn send(&self, ticket: Ticket, verdict: Verdict, output: Option<Loan>, stream: &Stream) -> Result<(), Unsaid> {
        self.home.check()?;
        let owner = self.publisher.member_of(self.queue_pid);
        let owner = owner.ok_or_else(|| self.gone(format!("process {} takes no answers", self.queue_pid)))?;
        let answer = Answer { job: ticket.job, number: ticket.number, verdict };
        let Loan { sample, metadata } = match output {
            Some(output) => output,
            None => Loan::new(self.publisher.loan(&Layout::bytes_only(0)?)?),
        };
        let sent = sample.send_to(owner, &answer.encode(&metadata)?, stream);
        sent.map(drop).map_err(|failed| {
            let is_told = failed.sample.is_none();
            let error = match failed.error {
                Error::LinkClosed { reason, .. } => self.gone(reason),
                other => other,
            };
            Unsaid { error, is_told }
        })
    }
}

/// An answer that failed.
#[derive(Debug)]
struct Unsaid {
    error: Error,
    /// The queue has heard it all the same, and that its data is lost: there is nothing more to be said.
    is_told: bool,
}

impl From<Error> for Unsaid {
    fn from(error: Error) -> Unsaid {
        Unsaid { error, is_told: false }
    }
}

/// Takes jobs of one queue and answers them. Belongs to one thread at a time; its leases may go anywhere.
///
/// Dropped, it takes no more: jobs that it was given and has not leased go to others as if nothing had been, and those
/// that are leased can still be answered. For an example see [`Queue`](super::Queue).
#[derive(Debug)]
pub struct Worker {
    /// Declared first: no more jobs, before the answers end.
    jobs: Subscriber,
    desk: Arc<Answers>,
}

impl Worker {
    /// A worker for this queue, to be built.
    pub fn builder(name: &str) -> WorkerBuilder {
        WorkerBuilder {
            name: name.to_string(),
            domain: None,
            device: None,
            wait: None,
            timeout: Duration::from_secs(10),
            spin: Duration::from_micros(20),
            memory_limit: 4 << 30,
            handshake_timeout: Duration::from_secs(5),
        }
    }

    /// The queue's name.
    pub fn queue(&self) -> &str {
        &self.desk.queue
    }

    /// The process that owns the queue.
    pub fn queue_pid(&self) -> i32 {
        self.desk.queue_pid
    }

    /// Waits for the next job, as long as the builder's timeout says. `stream` will wait, on the device, until the
    /// input is complete.
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::QueueGone`]; [`Error::Protocol`]; [`Error::Forked`]; what the device says.
    pub fn lease(&mut self, stream: &Stream) -> Result<Lease> {
        let timeout = self.jobs.timeout();
        self.lease_timeout(stream, timeout)
    }

    /// [`lease`](Self::lease) with another timeout.
    ///
    /// # Errors
    /// As [`lease`](Self::lease).
    pub fn lease_timeout(&mut self, stream: &Stream, timeout: Duration) -> Result<Lease> {
        let _range = nvtx::range(nvtx::LEASE);
        let start = Instant::now();
        loop {
            let left = timeout.saturating_sub(start.elapsed());
            let sample = self.jobs.receive_timeout(stream, left).map_err(|error| match error {
                Error::Timeout { .. } => {
                    Error::Timeout { what: format!("a job of {:?}", self.queue()), waited: timeout }
                }
                other => self.told(other),
            })?;
            if let Some(lease) = self.begin(sample, stream)? {
                return Ok(lease);
            }
        }
    }

    /// The next job if there is one.
    ///
    /// # Errors
    /// As [`lease`](Self::lease), without the timeout.
    pub fn try_lease(&mut self, stream: &Stream) -> Result<Option<Lease>> {
        let _range = nvtx::range(nvtx::LEASE);
        loop {
            let received = self.jobs.try_receive(stream);
            let Some(sample) = received.map_err(|error| self.told(error))? else { return Ok(None) };
            if let Some(lease) = self.begin(sample, stream)? {
                return Ok(Some(lease));
            }
        }
    }

    /// Checks what the queue wrote; a job whose deadline has passed is answered and not begun.
    fn begin(&mut self, sample: Sample, stream: &Stream) -> Result<Option<Lease>> {
        let ticket = Ticket::decode(sample.metadata()).map_err(|wrong| self.jobs.fail(wrong))?;
        let lease = Lease { input: Some(sample), ticket, stream: stream.clone(), desk: self.desk.clone() };
        if ticket.deadline_ns != 0 && ticket.deadline_ns <= now_ns() {
            return lease.answer(Verdict::Expired, None, stream).map(|()| None);
        }
        Ok(Some(lease))
    }

    fn told(&self, error: Error) -> Error {
        match error {
            Error::PublisherGone { .. } | Error::Evicted { .. } | Error::LinkClosed { .. } => self.desk.gone(error),
            other => other,
        }
    }
}

/// For who looks at many queues at once.
impl Worker {
    /// Whether [`try_lease`](Self::try_lease) is worth a call; cheap.
    pub(crate) fn may_have_news(&self) -> bool {
        self.jobs.may_have_news()
    }

    /// Whether the queue is asked to ring in [`descriptor`](Self::descriptor).
    pub(crate) fn set_asleep(&self, asleep: bool) {
        self.jobs.set_asleep(asleep);
    }

    /// What becomes readable when this end is rung.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.jobs.descriptor()
    }

    /// Takes in what rang.
    pub(crate) fn quiet(&self) {
        self.jobs.quiet();
    }
}

impl AsFd for Worker {
    /// A descriptor that is readable when [`try_lease`](Worker::try_lease) is worth a call; lease until it gives `None`
    /// before waiting on it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.jobs.as_fd()
    }
}

/// A job, to be answered: [`complete`](Self::complete), [`fail`](Self::fail), [`give_back`](Self::give_back) or
/// [`reject`](Self::reject).
///
/// Dropped without an answer, as when its thread panics, it counts as failed: a job that makes every worker stumble is
/// buried in the end and does not go round for ever.
#[derive(Debug)]
#[must_use = "a lease that is dropped is a failed attempt"]
pub struct Lease {
    /// `None` once it is answered.
    input: Option<Sample>,
    ticket: Ticket,
    stream: Stream,
    desk: Arc<Answers>,
}

impl Lease {
    fn input(&self) -> &Sample {
        self.input.as_ref().expect("present until answered")
    }

    /// The device address of the input's element with all indices 0. Memory that this process may only read.
    pub fn ptr(&self) -> DevicePtr {
        self.input().ptr()
    }

    /// The device address of the input's first byte; it is `layout().bytes()` long.
    pub fn slot_ptr(&self) -> DevicePtr {
        self.input().slot_ptr()
    }

    /// The input's layout.
    pub fn layout(&self) -> &Layout {
        self.input().layout()
    }

    /// The bytes that travelled with it.
    pub fn metadata(&self) -> &[u8] {
        user_of_job(self.input().metadata())
    }

    /// The job's number, from 1.
    pub fn job(&self) -> u64 {
        self.ticket.job
    }

    /// Which attempt this is, from 1.
    pub fn attempt(&self) -> u32 {
        self.ticket.attempt
    }

    /// `CLOCK_MONOTONIC` nanoseconds by which the answer is wanted, if at all.
    pub fn deadline_ns(&self) -> Option<u64> {
        (self.ticket.deadline_ns != 0).then_some(self.ticket.deadline_ns)
    }

    /// The stream that waits for the input.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Waits for the input and copies all of it to host memory.
    ///
    /// # Errors
    /// Those of [`Sample::to_vec`].
    pub fn to_vec(&self, timeout: Duration) -> Result<Vec<u8>> {
        self.input().to_vec(timeout)
    }

    /// Lends memory for the result: a place of this attempt's own.
    ///
    /// # Errors
    /// Those of [`Publisher::loan`](crate::Publisher::loan).
    pub fn output(&self, layout: &Layout) -> Result<Loan> {
        self.desk.publisher.loan(layout).map(Loan::new)
    }

    /// The job is done once the work enqueued on `stream` is; there is no output. `stream` is the one that it was
    /// leased with, or has been made to wait for that one.
    ///
    /// # Errors
    /// [`Error::QueueGone`]; [`Error::Timeout`] when the owner holds too many earlier results; [`Error::Driver`].
    pub fn complete(self, stream: &Stream) -> Result<()> {
        self.answer(Verdict::Completed, None, stream)
    }

    /// The job is done, with this result, once the work enqueued on `stream` is.
    ///
    /// # Errors
    /// As [`complete`](Self::complete).
    pub fn complete_with(self, output: Loan, stream: &Stream) -> Result<()> {
        self.answer(Verdict::Completed, Some(output), stream)
    }

    /// This attempt has failed; another worker tries again, as often as the queue allows. Of the reason, 200 bytes.
    ///
    /// # Errors
    /// As [`complete`](Self::complete).
    pub fn fail(self, reason: &str) -> Result<()> {
        let stream = self.stream.clone();
        self.answer(Verdict::Failed(reason.into()), None, &stream)
    }

    /// Somebody else is to do it, and it costs no attempt: for a worker that leaves.
    ///
    /// # Errors
    /// As [`complete`](Self::complete).
    pub fn give_back(self) -> Result<()> {
        let stream = self.stream.clone();
        self.answer(Verdict::Returned, None, &stream)
    }

    /// Nobody is to do it: the submitter gets [`Error::Rejected`]. Of the reason, 200 bytes.
    ///
    /// # Errors
    /// As [`complete`](Self::complete).
    pub fn reject(self, reason: &str) -> Result<()> {
        let stream = self.stream.clone();
        self.answer(Verdict::Rejected(reason.into()), None, &stream)
    }

    fn answer(mut self, verdict: Verdict, output: Option<Loan>, stream: &Stream) -> Result<()> {
        let _range = nvtx::range(nvtx::COMPLETE);
        if let Some(output) = &output
            && !self.desk.publisher.lent(&output.sample)
        {
            return Err(Error::argument("output", "a loan of somebody else", "one of this worker's `Lease::output`"));
        }
        match self.desk.send(self.ticket, verdict, output, stream) {
            Ok(()) => self.input.take().map_or(Ok(()), |input| input.release_on(stream).map(drop)),
            Err(Unsaid { error, is_told }) => {
                // If it was not told, the drop says that this attempt has failed.
                if is_told {
                    drop(self.input.take());
                }
                Err(error)
            }
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(input) = self.input.take() {
            let verdict = Verdict::Failed("its worker dropped it without an answer".into());
            if let Err(Unsaid { error, is_told: false }) = self.desk.send(self.ticket, verdict, None, &self.stream) {
                self.desk.fall_silent(&error);
            }
            drop(input);
        }
    }
}
