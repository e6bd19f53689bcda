//! The public queue.

use std::sync::Arc;
use std::time::Duration;

use super::dispatcher::{Dispatcher, State, StateGuard};
use super::job_handle::{JobHandle, into_result};
use super::job_result::JobResult;
use super::job_table::Stage;
use super::loan::Loan;
use super::watch::QueueWatch;
use crate::device::Device;
use crate::error::{Error, Result, Returned};
use crate::fork::leak_on_fork::LeakOnFork;
use crate::pubsub::PublisherStats;
use crate::runtime::doorbell::LocalDoorbell;
use crate::stream::Stream;
use crate::tensor::Layout;
use crate::wait::Wait;

/// The state of a queue.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueState {
    /// Process ids of the workers that can be given jobs.
    pub workers: Vec<i32>,
    /// Jobs that no worker has leased.
    pub waiting: usize,
    /// Jobs that workers hold.
    pub leased: usize,
    /// Jobs that are done or dead-lettered, with an outcome that was not taken.
    pub finished: usize,
    /// Device memory taken for inputs, in bytes.
    pub memory_bytes: u64,
    /// The most that may be taken.
    pub memory_limit: u64,
}

/// Hands jobs to workers, each to one, and gets each one's result once.
///
/// Owned by the process that submits; the inputs lie in its memory. Its methods may be called from
/// any number of threads.
///
/// ```
/// use std::time::Duration;
/// use warpipe::{DType, Device, Domain, Layout, Queue, Worker};
/// # let folder = std::env::temp_dir().join(format!("warpipe-queue-{}", std::process::id()));
/// # let (domain, device) = (Domain::at(&folder)?, Device::host());
/// let queue = Queue::new("jobs", domain.on(&device))?;
/// // In another process, as a rule:
/// let mut worker = Worker::open("jobs", domain.on(&device), Duration::ZERO)?;
///
/// let stream = device.stream()?;
/// let mut input = queue.loan(&Layout::bytes_only(3)?)?;
/// input.write(&stream, &[1, 2, 3])?; // or a kernel of yours, on input.ptr()
/// let job = queue.submit(input, &stream)?;
///
/// let lease = worker.lease(&stream, Duration::from_secs(1))?;
/// let mut output = lease.output(lease.layout())?;
/// let doubled: Vec<u8> = lease.to_vec(Duration::from_secs(1))?.iter().map(|byte| 2 * byte).collect();
/// output.write(&stream, &doubled)?; // or a kernel of yours, from lease.ptr() to output.ptr()
/// lease.complete(output, &stream)?;
///
/// let result = job.wait(&stream, Duration::from_secs(5))?;
/// assert_eq!((result.to_vec(Duration::from_secs(1))?, result.attempt), (vec![2, 4, 6], 1));
/// # drop((result, worker, queue)); std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), warpipe::Error>(())
/// ```
#[derive(Debug)]
pub struct Queue {
    pub(super) dispatcher: LeakOnFork<Arc<Dispatcher>>,
    pub(super) submit_timeout: Duration,
}

impl Queue {
    /// The name of this queue.
    pub fn name(&self) -> &str {
        self.dispatcher.publisher.name()
    }

    /// The device of this queue.
    pub(crate) fn device(&self) -> &Device {
        self.dispatcher.publisher.device()
    }

    /// Lends memory for a job's input.
    ///
    /// # Errors
    /// Those of [`Publisher::loan`](crate::Publisher::loan): inputs are returned when their jobs
    /// are done.
    pub fn loan(&self, layout: &Layout) -> Result<Loan> {
        self.dispatcher.publisher.loan(layout).map(Loan::new)
    }

    /// [`loan`](Self::loan) with `wait` in place of the queue's timeout.
    ///
    /// # Errors
    /// As [`loan`](Self::loan).
    #[doc(hidden)] // For bindings.
    pub fn loan_within<'w>(&self, layout: &Layout, wait: impl Into<Wait<'w>>) -> Result<Loan> {
        let lent = self.dispatcher.publisher.loan_within(layout, wait);
        lent.map(Loan::new)
    }

    /// Submits a job behind the work enqueued on `stream`. Waits for room, but neither for a worker
    /// nor for the device.
    ///
    /// # Errors
    /// With the loan for another attempt: [`Error::Limit`]; [`Error::Timeout`] while the driver
    /// blocks another thread's submit (its stream's launch queue is full); for a stream of another
    /// device, [`Error::Argument`]. [`Error::State`] of a queue that is shut; [`Error::Driver`].
    pub fn submit(&self, input: Loan, stream: &Stream) -> Result<JobHandle, SubmitError> {
        self.submit_within(input, stream, self.submit_timeout)
    }

    /// [`submit`](Self::submit) with a wait of its own: a [`Wait`] that is cancelled has submitted
    /// nothing.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub fn submit_within<'w>(
        &self,
        input: Loan,
        stream: &Stream,
        wait: impl Into<Wait<'w>>,
    ) -> Result<JobHandle, SubmitError> {
        self.submit_before(input, stream, 0, &wait.into())
    }

    /// Loans, copies `bytes` in and submits, as a one-dimensional `uint8` tensor.
    ///
    /// # Errors
    /// As [`loan`](Self::loan) and [`submit`](Self::submit).
    pub fn submit_bytes(&self, bytes: &[u8], stream: &Stream) -> Result<JobHandle> {
        let mut input = self.loan(&Layout::bytes_only(bytes.len() as u64)?)?;
        input.write(stream, bytes)?;
        Ok(self.submit(input, stream)?)
    }

    /// [`submit_within`](Self::submit_within) with a deadline that is sent to the worker; 0 is
    /// none.
    pub(crate) fn submit_before(
        &self,
        input: Loan,
        stream: &Stream,
        deadline_ns: u64,
        wait: &Wait<'_>,
    ) -> Result<JobHandle, SubmitError> {
        let dispatcher = &self.dispatcher;
        if !dispatcher.publisher.lent(&input.sample) {
            let error = Error::argument(
                "input",
                "a loan of somebody else",
                "one of this queue's `loan`",
            );
            return Err(SubmitError {
                error,
                returned: Some(Box::new(input)),
            });
        }
        let mut input = Some(input);
        let enter = |guard: &mut StateGuard<'_>| {
            if guard.table.is_shut() {
                return Some(Err(SubmitError {
                    error: dispatcher.gone(),
                    returned: None,
                }));
            }
            Some(dispatcher.add_job(guard, input.take()?, stream, deadline_ns))
        };
        let entered = dispatcher.wait_to_submit(wait, enter);
        let failed = match entered {
            Ok(Ok(id)) => return Ok(JobHandle::new(dispatcher, id, deadline_ns)),
            Ok(Err(failed)) => failed,
            Err(error) => SubmitError {
                error,
                returned: None,
            },
        };
        // No worker has the job, and the work that fills the input is enqueued.
        input
            .iter_mut()
            .for_each(|input| input.sample.stay_behind(stream));
        Err(SubmitError {
            returned: failed.returned.or(input.map(Box::new)),
            ..failed
        })
    }

    /// The next result, in the options' [`ResultOrder`](crate::ResultOrder), of a job that its
    /// [`JobHandle`] has not taken. Waits for it.
    ///
    /// # Errors
    /// [`Error::Timeout`], also when there is no job; [`JobEnd::DeadLettered`](crate::JobEnd) and
    /// [`JobEnd::Rejected`](crate::JobEnd), once, in that job's place; [`Error::Argument`] for a
    /// stream of another device; [`Error::State`].
    pub fn next_result<'w>(&self, stream: &Stream, wait: impl Into<Wait<'w>>) -> Result<JobResult> {
        stream.check_of(self.device())?;
        let wait = wait.into();
        let late = |state: &State| {
            wait.timed_out(|| format!("a result of {:?} ({})", self.name(), state.outlook()))
        };
        let take = |state: &mut StateGuard<'_>| state.table.take_next().map(Ok);
        let (id, outcome) = self.dispatcher.wait_until(&wait, take, late)?;
        into_result(&self.dispatcher, id, outcome, stream)
    }

    /// Waits until every job is done or dead-lettered. Their outcomes stay to be taken.
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::State`].
    pub fn drain<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<()> {
        self.wait_for_end(wait.into(), |state| state.table.unfinished() == 0)
    }

    fn wait_for_end(&self, wait: Wait<'_>, is_over: impl Fn(&State) -> bool) -> Result<()> {
        let late = |state: &State| {
            let (name, outlook) = (self.name(), state.outlook());
            wait.timed_out(|| format!("the end of the jobs of {name:?} ({outlook})"))
        };
        self.dispatcher
            .wait_until(&wait, |state| is_over(state).then_some(Ok(())), late)
    }

    /// Takes no more jobs, and waits until every one is done or dead-lettered. Then, also after a
    /// timeout here, the queue's name is free, and each worker's [`lease`](super::Worker::lease)
    /// ends with [`Error::PeerGone`] that says `graceful`. Until then workers may still attach.
    /// The outcomes stay to be taken until the queue is dropped.
    ///
    /// # Errors
    /// As [`drain`](Self::drain); the queue is shut all the same.
    pub fn shutdown<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<()> {
        self.dispatcher.owner_process.check()?;
        let mut guard = self.dispatcher.lock();
        guard.table.shut();
        // Threads and event loops that wait for room need not wait any longer.
        self.dispatcher.notify_waiters(&mut guard.waiters);
        drop(guard);
        self.wait_for_end(wait.into(), |state| state.table.stage >= Stage::Drained)
    }

    /// Cancels every job that no worker holds. Returns their numbers: they have no outcome.
    ///
    /// # Errors
    /// [`Error::State`].
    pub fn cancel_waiting(&self) -> Result<Vec<u64>> {
        // The jobs are dropped here, without the lock.
        let cancelled = self.dispatcher.ask(|state| state.table.cancel_waiting())?;
        Ok(cancelled.into_iter().map(|(id, _)| id).collect())
    }

    /// Waits until there are `count` workers.
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::State`].
    pub fn wait_for_workers<'w>(&self, count: usize, wait: impl Into<Wait<'w>>) -> Result<()> {
        let wait = wait.into();
        let late = |state: &State| {
            let noun = if count == 1 { "worker" } else { "workers" };
            let (name, attached) = (&self.dispatcher.name, state.workers());
            wait.timed_out(|| format!("{count} {noun} of {name:?} ({attached} attached)"))
        };
        let is_there = |state: &State| state.workers() >= count;
        self.dispatcher
            .wait_until(&wait, |state| is_there(state).then_some(Ok(())), late)
    }

    /// The current state.
    ///
    /// # Errors
    /// [`Error::State`].
    pub fn state(&self) -> Result<QueueState> {
        let PublisherStats {
            memory_bytes,
            memory_limit,
            ..
        } = self.dispatcher.publisher.stats()?;
        let mut guard = self.dispatcher.lock();
        self.dispatcher.process_events(&mut guard);
        let open = guard.sessions.iter().filter(|session| session.is_open());
        Ok(QueueState {
            workers: open.map(|session| session.pid).collect(),
            waiting: guard.table.waiting(),
            leased: guard.table.leased(),
            finished: guard.table.len() - guard.table.unfinished(),
            memory_bytes,
            memory_limit,
        })
    }

    /// A descriptor (`eventfd`) that tells an event loop when to poll. See [`QueueWatch`].
    ///
    /// # Errors
    /// [`Error::Os`]; [`Error::State`].
    pub fn watch(&self) -> Result<QueueWatch> {
        self.dispatcher.owner_process.check()?;
        let doorbell = Arc::new(LocalDoorbell::new()?);
        self.dispatcher.lock().waiters.add_watch(&doorbell);
        Ok(QueueWatch::new(doorbell))
    }
}

#[cfg(test)]
impl Queue {
    /// Ends the links of all workers.
    pub(crate) fn expel_all(&self, reason: &str) {
        let publisher = &self.dispatcher.publisher;
        publisher
            .linked_subscribers()
            .iter()
            .for_each(|member| publisher.expel(member.id, reason));
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if let Ok(dispatcher) = self.dispatcher.get() {
            dispatcher.close();
        }
    }
}

/// A job that was not accepted. Its input comes back, unless the driver failed after a worker had
/// seen the job.
pub type SubmitError = Returned<Option<Box<Loan>>>;
