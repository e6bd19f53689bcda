//! `Queue`: jobs on the owner's side.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use warpipe::{OptionalExtension, ResultOrder};

use crate::closeable::Closeable;
use crate::device::Device;
use crate::domain::Domain;
use crate::dtype;
use crate::errors::{Fault, Outcome};
use crate::future::JobHandle;
use crate::job::Results;
use crate::job_endpoint::{JobEndpoint, QueueOrClient};
use crate::loan::Loan;
use crate::tuples::{self, Info};
use crate::wait::{Timeout, optional, seconds, waiting};

/// Gives each job to one worker, and gets each job's result once, even if processes die: see
/// ``Worker``.
///
/// ``name``: as a publisher's. ``device``: the device of the inputs' memory
/// (default: the first GPU, else the host). ``prefetch``: jobs that one worker may hold at once, 1
/// to 256. ``max_attempts``: how often a job is tried before it is dead-lettered.
/// ``lease_timeout``: seconds that a worker may hold jobs without answering any; then they go to
/// other workers (None: wait for its death). ``order``: of ``results()``, ``"submission"`` or
/// ``"completion"``. ``limit``: the most jobs without a taken outcome.
/// ``submit_timeout``: seconds to wait for room, and for memory (None: no limit). ``memory_limit``:
/// bytes of device memory for inputs.
///
/// Any number of threads may use it. ``close()``, the end of a ``with`` block, or dropping it
/// closes it: unfinished jobs are discarded.
///
/// Raises ``InvalidNameError``, ``NameTakenError``, ``ForeignFileError``, ``DomainError``,
/// ``ArgumentError``, ``DeviceError``.
#[pyclass(frozen, extends = Closeable, module = "warpipe")]
#[derive(Debug)]
pub struct Queue {
    endpoint: Arc<JobEndpoint>,
    submit_timeout: Option<Duration>,
}

fn order(name: &str) -> Outcome<ResultOrder> {
    match name {
        "submission" => Ok(ResultOrder::Submission),
        "completion" => Ok(ResultOrder::Completion),
        _ => Err(Fault::argument(
            "order",
            format!("{name:?}"),
            "\"submission\" or \"completion\"",
        )),
    }
}

#[pymethods]
impl Queue {
    #[new]
    #[pyo3(signature = (name, *, domain = None, device = None, prefetch = 2, max_attempts = 3, lease_timeout = None,
        order = "submission", limit = 1 << 20, submit_timeout = Some(5.0), memory_limit = 4 << 30, workers_max = 256,
        spin = None, handshake_timeout = 5.0),
        text_signature = "(name, *, domain=None, device=None, prefetch=2, max_attempts=3, lease_timeout=None, \
        order='submission', limit=1048576, submit_timeout=5.0, memory_limit=4294967296, workers_max=256, spin=None, \
        handshake_timeout=5.0)")]
    #[expect(
        clippy::too_many_arguments,
        reason = "keyword arguments, each with a default"
    )]
    fn new(
        py: Python<'_>,
        name: &str,
        domain: Option<&Bound<'_, PyAny>>,
        device: Option<&Bound<'_, PyAny>>,
        prefetch: u32,
        max_attempts: u32,
        lease_timeout: Option<f64>,
        order: &str,
        limit: usize,
        submit_timeout: Option<f64>,
        memory_limit: u64,
        workers_max: u32,
        spin: Option<f64>,
        handshake_timeout: f64,
    ) -> PyResult<PyClassInitializer<Queue>> {
        let (domain, device) = (
            Domain::from_argument(domain)?,
            Device::from_argument(device)?.inner,
        );
        let submit_timeout = optional(submit_timeout, "submit_timeout")?;
        let builder = warpipe::Queue::builder(name)
            .domain(&domain)
            .device(&device)
            .prefetch(prefetch)
            .max_attempts(max_attempts)
            .lease_timeout(optional(lease_timeout, "lease_timeout")?)
            .order(self::order(order)?)
            .limit(limit)
            .memory_limit(memory_limit)
            .workers_max(workers_max)
            .handshake_timeout(seconds(handshake_timeout, "handshake_timeout")?);
        let spin = optional(spin, "spin")?;
        let builder = spin.into_iter().fold(builder, warpipe::QueueBuilder::spin);
        let queue = py.detach(|| builder.build()).map_err(Fault::from)?;
        let endpoint = JobEndpoint::open(
            py,
            "queue",
            name,
            &device,
            submit_timeout,
            QueueOrClient::of(queue),
        )?;
        let base = endpoint.base();
        Ok(base.add_subclass(Queue {
            endpoint,
            submit_timeout,
        }))
    }

    /// Its name.
    #[getter]
    fn name(&self) -> &str {
        &self.endpoint.name
    }

    /// Its device.
    #[getter]
    fn device(&self) -> Device {
        self.endpoint.device()
    }

    /// Submits a job: copies a tensor into the queue's memory, as ``Publisher.send`` does, or takes
    /// a ``loan`` of this queue without a copy. Waits for room, at most ``timeout`` seconds
    /// (default: the queue's; None: no limit), and neither for a worker nor for the device.
    ///
    /// ``metadata``: a dict (as JSON) or any buffer, at most 200 bytes, for the worker.
    ///
    /// Raises ``QueueFullError``; ``TimeoutError`` if the driver blocks another thread's
    /// ``submit``; ``NotATensorError``, ``DTypeError``, ``LayoutError``, ``WrongDeviceError``,
    /// ``MetadataError``; ``MemoryLimitError``, ``QueueClosedError``, ``DriverError``.
    #[pyo3(signature = (tensor, *, metadata = None, stream = None, timeout = Timeout::Usual),
        text_signature = "($self, tensor, *, metadata=None, stream=None, timeout=...)")]
    fn submit(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        metadata: Option<&Bound<'_, PyAny>>,
        stream: Option<&Bound<'_, PyAny>>,
        timeout: Timeout,
    ) -> PyResult<Py<JobHandle>> {
        let input = self.endpoint.input(py, tensor, metadata, stream)?;
        let handle = self.endpoint.submit(
            py,
            input,
            timeout.or(self.submit_timeout),
            |end, loan, stream, wait| end.queue().submit_within(loan, stream, wait),
        )?;
        JobHandle::new(py, &self.endpoint, handle)
    }

    /// Lends memory for a job's input, to be filled in place and given to ``submit``: no copy.
    ///
    /// Raises ``LayoutError``, ``DTypeError``, ``MetadataError``, ``MemoryLimitError``,
    /// ``DeviceMemoryError``, ``ClosedError``.
    #[pyo3(signature = (shape, dtype, *, metadata = None))]
    fn loan(
        &self,
        py: Python<'_>,
        shape: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
        metadata: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<Loan>> {
        self.endpoint
            .loan(py, &dtype::layout(shape, dtype)?, metadata)
    }

    /// Iterates, with ``for`` or ``async for``, over the results that no handle has taken, in the
    /// queue's ``order``. It ends when there is no job left; with ``follow``, only once
    /// ``shutdown`` was called, too, so that another thread may go on submitting. Each is waited
    /// for at most ``timeout`` seconds (None: no limit). A job that was dead-lettered or rejected
    /// raises in its place; the same iterator can go on with the others.
    ///
    /// Raises ``DeadLetteredError``, ``RejectedError``, ``TimeoutError``, ``ClosedError``.
    #[pyo3(signature = (timeout = None, *, follow = false))]
    fn results(&self, timeout: Option<f64>, follow: bool) -> PyResult<Results> {
        Ok(Results::new(
            &self.endpoint,
            optional(timeout, "timeout")?,
            follow,
        ))
    }

    /// Waits until every job is done or dead-lettered, at most ``timeout`` seconds (None: no
    /// limit). The outcomes can still be taken.
    ///
    /// Raises ``TimeoutError``, ``ClosedError``.
    #[pyo3(signature = (timeout = None))]
    fn drain(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let timeout = optional(timeout, "timeout")?;
        let goes_on = || self.endpoint.end().map(drop);
        waiting(py, timeout, goes_on, |wait| {
            let drained = self.endpoint.end()?.queue().drain(wait);
            let what = || format!("the end of the jobs of {:?}", self.endpoint.name);
            drained.map_err(|late| Fault::from(late).of(what))
        })
    }

    /// Accepts no more jobs, as ``concurrent.futures.Executor.shutdown``. Once every job is done or
    /// dead-lettered, the queue's name is free and the workers' loops end: ``for lease in worker``
    /// stops, and ``lease()`` raises ``PeerGoneError`` with ``graceful``. Until then workers may
    /// still attach. Outcomes can be taken until the queue is closed.
    ///
    /// ``wait``: wait for that, at most ``timeout`` seconds (None: no limit). ``cancel_futures``:
    /// cancel the jobs that no worker holds.
    ///
    /// Raises ``TimeoutError`` (the queue is shut all the same), ``ClosedError``.
    #[pyo3(signature = (wait = true, *, cancel_futures = false, timeout = None),
        text_signature = "($self, wait=True, *, cancel_futures=False, timeout=None)")]
    fn shutdown(
        &self,
        py: Python<'_>,
        wait: bool,
        cancel_futures: bool,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        optional(timeout, "timeout")?;
        let shut = py.detach(|| -> Outcome<_> {
            let end = self.endpoint.end()?;
            let shut = end.queue().shutdown(Duration::ZERO).optional()?;
            if cancel_futures {
                self.endpoint.cancel_waiting()?;
            }
            Ok(shut)
        })?;
        self.endpoint.shut();
        if shut.is_some() || !wait {
            Ok(())
        } else {
            self.drain(py, timeout)
        }
    }

    /// Waits until there are ``count`` workers, at most ``timeout`` seconds (None: no limit).
    ///
    /// Raises ``TimeoutError``, ``ClosedError``.
    #[pyo3(signature = (count = 1, timeout = Some(10.0)), text_signature = "($self, count=1, timeout=10.0)")]
    fn wait_for_workers(&self, py: Python<'_>, count: usize, timeout: Option<f64>) -> PyResult<()> {
        self.endpoint.wait_for(py, "worker", count, timeout)
    }

    /// The present state.
    ///
    /// Raises ``ClosedError``.
    #[getter]
    fn state(&self, py: Python<'_>) -> PyResult<Info<warpipe::QueueState>> {
        let state = py.detach(|| Outcome::Ok(self.endpoint.end()?.state()?))?;
        Ok(Info(state))
    }

    /// Device memory allocated for inputs so far and its limit, in bytes: a ``MemoryUse``.
    ///
    /// Raises ``ClosedError``.
    #[getter]
    fn memory_in_use<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let used = py.detach(|| Outcome::Ok(self.endpoint.end()?.queue().memory_in_use()))?;
        tuples::memory_use(py, used)
    }

    /// Closes the queue: workers are notified, and waits for jobs end with an error. Received
    /// results stay valid. Closing twice is no error.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.endpoint.close(py)
    }

    fn __repr__(&self) -> String {
        format!("Queue({:?}, {})", self.endpoint.name, self.endpoint.device)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.endpoint.abandon();
    }
}
