//! A worker's or a server's handle of a job: the [`Lease`], which is the input and the
//! [`AnswerHandle`] to answer.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use super::loan::Loan;
use super::wire::{Answer, AnswerKind, DeliveryTag, user_of_job};
use crate::error::{Error, Result, Returned, StateFault};
use crate::fork::OwnerProcess;
use crate::ipc::Kind;
use crate::nvtx;
use crate::pubsub::{Publisher, REPLIES, Sample, SendError};
use crate::stream::Stream;
use crate::tensor::Layout;
use crate::wait::Wait;

/// The worker's end, shared by its leases.
#[derive(Debug)]
pub(super) struct AnswerPublisher {
    pub(super) publisher: Publisher,
    pub(super) queue_pid: i32,
    timeout: Duration,
    owner_process: OwnerProcess,
}

impl AnswerPublisher {
    pub(super) fn new(publisher: Publisher, queue_pid: i32, timeout: Duration) -> AnswerPublisher {
        AnswerPublisher {
            publisher,
            queue_pid,
            timeout,
            owner_process: OwnerProcess::current(),
        }
    }

    /// The queue's name.
    pub(super) fn queue(&self) -> &str {
        self.publisher.name()
    }

    pub(super) fn queue_gone(&self, detail: impl ToString, graceful: bool) -> Error {
        Error::PeerGone {
            kind: Kind::Queue,
            name: self.queue().to_string(),
            pid: self.queue_pid,
            graceful,
            detail: detail.to_string(),
        }
    }

    /// Ends the link of the answers after an answer could not be sent, because its job would
    /// otherwise stay with this worker for ever. Does nothing if the queue has gone.
    fn close_link(&self, error: &Error) {
        if let Ok(owner) = self.owner() {
            self.publisher
                .expel(owner, &format!("an answer could not be given: {error}"));
        }
    }

    /// The subscriber id of the queue's own end.
    fn owner(&self) -> Result<u64> {
        self.owner_process.check()?;
        match self.publisher.has_subscriber(REPLIES) {
            true => Ok(REPLIES),
            false => {
                let detail = format!("process {} takes no answers", self.queue_pid);
                Err(self.queue_gone(detail, false))
            }
        }
    }
}

/// The answer that is owed for a leased job, apart from its input: see [`Lease::answer_handle`].
///
/// Each answer is given a [`Wait`]: for the owner to release earlier results, in place of the
/// worker's [timeout](super::WorkerOptions::answer_timeout), and for another thread's answer that
/// the driver blocks, in place of 10 s. One that had to be given up comes back in the error.
///
/// ```
/// # use std::time::Duration;
/// # use warpipe::{Device, Domain, Queue, Worker, WorkerOptions};
/// # let folder = std::env::temp_dir().join(format!("warpipe-answer-{}", std::process::id()));
/// # let (domain, device) = (Domain::at(&folder)?, Device::host());
/// # let stream = device.stream()?;
/// let queue = Queue::new("jobs", domain.on(&device))?;
/// let mut worker = Worker::open("jobs", domain.on(&device), Duration::ZERO)?;
/// let job = queue.submit_bytes(b"work", &stream)?;
/// let answer = worker.lease(&stream, Duration::from_secs(1))?.answer_handle;
/// answer.complete(None, &stream, Duration::ZERO)?; // or an `AnswerError` with the handle, at once
/// job.wait(&stream, Duration::from_secs(5))?;
/// # drop((worker, queue)); std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), warpipe::Error>(())
/// ```
///
/// Dropped without an answer, it counts as failed.
#[derive(Debug)]
#[must_use = "a dropped answer handle is a failed attempt"]
pub struct AnswerHandle {
    /// The job's number, from 1.
    pub job: u64,
    /// The number of this attempt, from 1.
    pub attempt: u32,
    /// `CLOCK_MONOTONIC` nanoseconds by which the answer is wanted, if at all.
    pub deadline_ns: Option<u64>,
    tag: DeliveryTag,
    stream: Stream,
    answers: Arc<AnswerPublisher>,
    is_done: bool,
}

/// An answer that failed. After [`Error::Timeout`] it can be tried again.
pub type AnswerError = Returned<Unanswered>;

/// The parts of an answer that failed, for another attempt.
#[derive(Debug)]
#[non_exhaustive]
pub struct Unanswered {
    /// `None` if the queue has received the answer all the same. Dropping the answer handle fails
    /// the attempt.
    pub answer_handle: Option<Box<AnswerHandle>>,
    /// The result, if there was one and this worker still owns it.
    pub output: Option<Box<Loan>>,
}

impl AnswerHandle {
    /// As [`Lease::output`].
    ///
    /// # Errors
    /// Those of [`Publisher::loan`](crate::Publisher::loan).
    pub fn output(&self, layout: &Layout) -> Result<Loan> {
        self.answers
            .publisher
            .loan(layout)
            .map(|sample| Loan::of_lease(sample, self.tag))
    }

    /// The worker's [timeout](super::WorkerOptions::answer_timeout). For bindings.
    #[doc(hidden)]
    pub fn answer_timeout(&self) -> Duration {
        self.answers.timeout
    }

    /// [`output`](Self::output) with a wait of its own, which does not borrow the handle: another
    /// thread may answer meanwhile. For bindings.
    #[doc(hidden)]
    pub fn lender(&self) -> impl Fn(&Layout, Wait<'_>) -> Result<Loan> + Send + use<> {
        let (answers, tag) = (self.answers.clone(), self.tag);
        move |layout, wait| {
            let lent = answers.publisher.loan_within(layout, wait);
            lent.map(|sample| Loan::of_lease(sample, tag))
        }
    }

    /// Completes the job, with `output` if there is one, once the work enqueued on `stream` is
    /// done. `stream` must be behind the stream that the job was leased with.
    ///
    /// # Errors
    /// As [`Lease::complete`], with the parts to try again.
    pub fn complete<'w>(
        self,
        output: Option<Loan>,
        stream: &Stream,
        wait: impl Into<Wait<'w>>,
    ) -> Result<(), AnswerError> {
        self.answer(
            AnswerKind::Completed,
            output,
            Some(stream),
            Some(&wait.into()),
        )
    }

    /// As [`Lease::fail`].
    ///
    /// # Errors
    /// As [`complete`](Self::complete).
    pub fn fail<'w>(self, reason: &str, wait: impl Into<Wait<'w>>) -> Result<(), AnswerError> {
        let kind = AnswerKind::Failed(reason.into());
        self.answer(kind, None, None, Some(&wait.into()))
    }

    /// As [`Lease::requeue`].
    ///
    /// # Errors
    /// As [`complete`](Self::complete).
    pub fn requeue<'w>(self, wait: impl Into<Wait<'w>>) -> Result<(), AnswerError> {
        self.answer(AnswerKind::Returned, None, None, Some(&wait.into()))
    }

    /// As [`Lease::reject`].
    ///
    /// # Errors
    /// As [`complete`](Self::complete).
    pub fn reject<'w>(self, reason: &str, wait: impl Into<Wait<'w>>) -> Result<(), AnswerError> {
        let kind = AnswerKind::Rejected(reason.into());
        self.answer(kind, None, None, Some(&wait.into()))
    }

    /// Answers behind the work on `stream`, by default the one that the job was leased with.
    /// Without a `wait` the worker's timeout holds.
    fn answer(
        mut self,
        kind: AnswerKind,
        output: Option<Loan>,
        stream: Option<&Stream>,
        wait: Option<&Wait<'_>>,
    ) -> Result<(), AnswerError> {
        let _range = nvtx::range(nvtx::COMPLETE);
        let stream = stream.unwrap_or(&self.stream).clone();
        let sent = self.send(kind, output, &stream, wait);
        sent.map_err(|mut failed| {
            failed.returned.answer_handle = (!self.is_done).then(|| Box::new(self));
            failed
        })
    }

    /// Sends an answer behind the work on `stream`. `wait` replaces the worker's timeout and the
    /// timeout for another thread's answer. It is done also after an error if the queue has
    /// received the answer all the same, and sees that its data is lost.
    fn send(
        &mut self,
        kind: AnswerKind,
        mut output: Option<Loan>,
        stream: &Stream,
        wait: Option<&Wait<'_>>,
    ) -> Result<(), AnswerError> {
        let failed = |error, output: Option<Loan>| AnswerError {
            error,
            returned: Unanswered {
                answer_handle: None,
                output: output.map(Box::new),
            },
        };
        let check = |output| self.check_output(output);
        let checked = self.answers.owner_process.check();
        if let Err(error) = checked.and_then(|()| output.as_ref().map_or(Ok(()), check)) {
            return Err(failed(error, output));
        }
        // Set whatever the result: the work that fills the output is enqueued.
        output
            .iter_mut()
            .for_each(|output| output.sample.stay_behind(stream));
        let (answers, has_output) = (&self.answers, output.is_some());
        let owner = match answers.owner() {
            Ok(owner) => owner,
            Err(error) => return Err(failed(error, output)),
        };
        let empty = || {
            let layout = Layout::bytes_only(0)?;
            answers.publisher.lend(&layout, wait).map(Loan::new)
        };
        let output = output.map_or_else(empty, Ok);
        let Loan {
            sample,
            metadata,
            lease,
        } = output.map_err(|error| failed(error, None))?;
        let answer = Answer {
            job: self.tag.job,
            number: self.tag.number,
            kind,
        };
        let encoded = answer.encode(&metadata);
        let encoded = encoded.map_err(|error| failed(error, None))?;
        let sent = sample.send_to(owner, &encoded, stream, wait);
        self.is_done = sent.as_ref().err().is_none_or(|it| it.returned.is_none());
        sent.map(drop).map_err(|SendError { error, returned }| {
            let output = returned.filter(|_| has_output).map(|sample| Loan {
                sample: *sample,
                metadata,
                lease,
            });
            match error {
                Error::State(StateFault::LinkClosed { reason, .. }) => {
                    failed(answers.queue_gone(reason, false), output)
                }
                error => failed(error, output),
            }
        })
    }

    /// An error unless this loan is one for a result of this lease.
    fn check_output(&self, output: &Loan) -> Result<()> {
        let describe = |tag: DeliveryTag| format!("of job {}, attempt {}", tag.job, tag.attempt);
        if !self.answers.publisher.lent(&output.sample) {
            let found = format!("a loan of somebody else, {:?}", output.layout());
            let allowed = "an output of this worker's leases";
            return Err(Error::argument("output", found, allowed));
        }
        match output.lease {
            Some(other) if other != self.tag => Err(Error::argument(
                "output",
                format!("one {}", describe(other)),
                format!("one {}", describe(self.tag)),
            )),
            _ => Ok(()),
        }
    }

    fn send_failure(&mut self, stream: &Stream) -> Result<()> {
        let kind = AnswerKind::Failed("its worker dropped it without an answer".into());
        Ok(self.send(kind, None, stream, None)?)
    }
}

impl Drop for AnswerHandle {
    fn drop(&mut self) {
        if self.is_done {
            return;
        }
        let mut sent = self.send_failure(&self.stream.clone());
        if let Err(Error::State(StateFault::Capturing(_))) = sent {
            // The answer has no data to follow, so any stream will do.
            let other = self.answers.publisher.device().stream();
            sent = other.and_then(|stream| self.send_failure(&stream));
        }
        if let Err(error) = sent
            && !self.is_done
        {
            self.answers.close_link(&error);
        }
    }
}

/// A job of a worker, or a request of a server, to be answered: [`complete`](Self::complete),
/// [`fail`](Self::fail), [`requeue`](Self::requeue) or [`reject`](Self::reject).
///
/// Dropped without an answer, as when its thread panics, it counts as failed: a job that fails
/// every worker is dead-lettered in the end instead of being retried for ever.
///
/// It dereferences to its input, a [`Sample`]: `lease.ptr()`, `lease.to_vec(timeout)`,
/// `lease.wait_on(&other_stream)`.
#[derive(Debug)]
#[must_use = "a lease that is dropped is a failed attempt"]
pub struct Lease {
    /// The job's number, from 1.
    pub job: u64,
    /// The number of this attempt, from 1.
    pub attempt: u32,
    /// `CLOCK_MONOTONIC` nanoseconds by which the answer is wanted, if at all.
    pub deadline_ns: Option<u64>,
    /// The process that owns the job's queue: of a request the client.
    pub queue_pid: i32,
    /// The answer that is owed, for an answer with a wait of its own, or one that can be tried
    /// again. Declared before the input: it is sent before the input is released.
    pub answer_handle: AnswerHandle,
    /// The input, for a user that needs it beyond the answer. Its release returns its slot to the
    /// queue and its place in this worker's ring. The first bytes of its
    /// [`metadata`](Sample::metadata) belong to the queue: call [`metadata`](Self::metadata)
    /// instead.
    pub input: Sample,
}

impl Deref for Lease {
    type Target = Sample;

    fn deref(&self) -> &Sample {
        &self.input
    }
}

impl Lease {
    pub(super) fn new(
        input: Sample,
        tag: DeliveryTag,
        stream: &Stream,
        answers: &Arc<AnswerPublisher>,
    ) -> Lease {
        let (job, attempt) = (tag.job, tag.attempt);
        let deadline_ns = (tag.deadline_ns != 0).then_some(tag.deadline_ns);
        Lease {
            job,
            attempt,
            deadline_ns,
            queue_pid: answers.queue_pid,
            answer_handle: AnswerHandle {
                job,
                attempt,
                deadline_ns,
                tag,
                stream: stream.clone(),
                answers: answers.clone(),
                is_done: false,
            },
            input,
        }
    }

    /// The metadata bytes that were sent with the job.
    pub fn metadata(&self) -> &[u8] {
        user_of_job(self.input.metadata())
    }

    /// Lends memory for the result. Each attempt has memory of its own.
    ///
    /// # Errors
    /// Those of [`Publisher::loan`](crate::Publisher::loan).
    pub fn output(&self, layout: &Layout) -> Result<Loan> {
        self.answer_handle.output(layout)
    }

    /// Completes the job, with a result if there is one, once the work enqueued on `stream` is
    /// done. `stream` is the stream that the job was leased with, or has been made to wait for that
    /// stream.
    ///
    /// # Errors
    /// [`Error::PeerGone`]; [`Error::Timeout`] when the owner holds too many earlier results;
    /// [`Error::Argument`] for a stream of another device, or an output of another lease;
    /// [`Error::Driver`]. The attempt has failed then: [`AnswerHandle::complete`] can try again.
    pub fn complete(self, output: impl Into<Option<Loan>>, stream: &Stream) -> Result<()> {
        self.answer(AnswerKind::Completed, output.into(), Some(stream))
    }

    /// Fails this attempt. Another worker tries again, as often as the queue allows. At most 200
    /// bytes of the reason are sent.
    ///
    /// # Errors
    /// As [`complete`](Self::complete).
    pub fn fail(self, reason: &str) -> Result<()> {
        self.answer(AnswerKind::Failed(reason.into()), None, None)
    }

    /// Returns the job to the queue for another worker, at no cost of an attempt: for a worker that
    /// leaves.
    ///
    /// # Errors
    /// As [`complete`](Self::complete).
    pub fn requeue(self) -> Result<()> {
        self.answer(AnswerKind::Returned, None, None)
    }

    /// Rejects the job: no worker tries it again, and the submitter gets
    /// [`JobEnd::Rejected`](crate::JobEnd). At most 200 bytes of the reason are sent.
    ///
    /// # Errors
    /// As [`complete`](Self::complete).
    pub fn reject(self, reason: &str) -> Result<()> {
        self.answer(AnswerKind::Rejected(reason.into()), None, None)
    }

    /// Reports that the deadline had passed before the job was begun.
    pub(super) fn expire(self) -> Result<()> {
        self.answer(AnswerKind::Expired, None, None)
    }

    fn answer(self, kind: AnswerKind, output: Option<Loan>, stream: Option<&Stream>) -> Result<()> {
        let Lease {
            answer_handle,
            input,
            ..
        } = self;
        let answered = answer_handle
            .answer(kind, output, stream, None)
            .map_err(Error::from);
        // Answered or not, the work on `stream` reads the input.
        let released = match stream {
            Some(stream) => input.release_on(stream),
            None => input.release(),
        };
        let released = released.map(drop);
        answered.and(released)
    }
}
