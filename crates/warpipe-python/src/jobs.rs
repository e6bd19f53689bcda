//! `_Jobs`, the base of `Queue` and `Client`: the library's endpoint, the stream for results, and the
//! conversion of foreign tensors to jobs, or requests.

use std::collections::HashSet;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pyo3::prelude::*;
use warpipe::clock::now_ns;
use warpipe::{Error, Layout, OptionalExtension, ResultOrder, SubmitError, Wait};

use crate::copies::CopyContext;
use crate::detached::{DropDetached, OwnStream, call};
use crate::device::Device;
use crate::domain::{Domain, place};
use crate::errors::{Fault, Outcome};
use crate::exclusive::locked;
use crate::handle::{Closeable, CloseableHandle};
use crate::job::Results;
use crate::loan::{Loan, Slot, slot_of};
use crate::metadata::Metadata;
use crate::tuples::{self, Info};
use crate::wait::{Given, Limit, Seconds, Timeout, optional, seconds, waiting};
use crate::{dtype, future};

/// Submits jobs to a queue of its own, or requests to a service.
#[pyclass(frozen, subclass, extends = Closeable, module = "warpipe", name = "_Jobs")]
#[derive(Debug)]
pub struct Jobs {
    endpoint: Arc<JobEndpoint>,
    /// How long a job may wait for room, or a request for its reply.
    timeout: Option<Duration>,
}

#[pymethods]
impl Jobs {
    /// Of a ``client``, or of a queue, which alone has an ``order`` and what follows it.
    #[new]
    fn new(
        py: Python<'_>,
        client: bool,
        name: &str,
        domain: Option<Domain>,
        device: Option<Device>,
        prefetch: u32,
        max_attempts: u32,
        lease_timeout: Option<Seconds>,
        limit: usize,
        memory_limit: u64,
        spin: Option<Seconds>,
        timeout: Option<Seconds>,
        loan_timeout: Option<Seconds>,
        by_completion: bool,
        workers_max: u32,
        handshake_timeout: Seconds,
    ) -> PyResult<PyClassInitializer<Jobs>> {
        let (domain, device) = place(domain, device)?;
        let orders = [ResultOrder::Submission, ResultOrder::Completion];
        let timeout_name = if client { "timeout" } else { "submit_timeout" };
        let timeout = optional(timeout, timeout_name)?;
        let loan_timeout = optional(loan_timeout, "loan_timeout")?;
        let lease_timeout = optional(lease_timeout, "lease_timeout")?;
        let spin = optional(spin, "spin")?;
        let (kind, inner) = if client {
            let default: warpipe::ClientOptions = domain.on(&device);
            let options = warpipe::ClientOptions {
                prefetch,
                max_attempts,
                lease_timeout,
                limit,
                memory_limit,
                spin: spin.unwrap_or(default.spin),
                ..default
            };
            let client = call(py, || warpipe::Client::new(name, options))?;
            ("client", QueueOrClient::Client(client))
        } else {
            let default: warpipe::QueueOptions = domain.on(&device);
            let options = warpipe::QueueOptions {
                prefetch,
                max_attempts,
                lease_timeout,
                limit,
                memory_limit,
                order: orders[usize::from(by_completion)],
                workers_max,
                handshake_timeout: seconds(handshake_timeout, "handshake_timeout")?,
                spin: spin.unwrap_or(default.spin),
                ..default
            };
            let queue = call(py, || warpipe::Queue::new(name, options))?;
            ("queue", QueueOrClient::Queue(queue))
        };
        let handle = CloseableHandle::new(kind, name, inner)?;
        let base = handle.base();
        let stream = OwnStream::new(py, &device)?;
        let endpoint = Arc::new(JobEndpoint {
            kind,
            context: CopyContext::new(device.inner, stream, loan_timeout),
            number: NEXT_NUMBER.fetch_add(1, Ordering::Relaxed),
            is_shut: AtomicBool::new(false),
            cancelled: Mutex::default(),
            unused: Mutex::default(),
            handle,
        });
        Ok(base.add_subclass(Jobs { endpoint, timeout }))
    }

    #[getter]
    fn _name(&self) -> &str {
        self.endpoint.handle.name()
    }

    /// Its device.
    #[getter]
    fn device(&self) -> Device {
        Device::of(&self.endpoint.context.device)
    }

    /// Submits a job: a ``JobHandle``; or sends a request: a ``Pending``.
    fn _submit(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        metadata: Option<Metadata>,
        stream: Given<'_, '_>,
        timeout: Timeout,
    ) -> PyResult<Py<PyAny>> {
        let timeout = timeout.or(self.timeout);
        let nanoseconds = timeout.and_then(|timeout| u64::try_from(timeout.as_nanos()).ok());
        let deadline_ns =
            nanoseconds.map_or(u64::MAX, |nanoseconds| now_ns().saturating_add(nanoseconds));
        let endpoint = &self.endpoint;
        endpoint.handle.get()?;
        let borrow = |layout: &Layout, metadata| endpoint.borrow(py, layout, metadata);
        // A tensor is copied, a loan of this queue is taken.
        let input = slot_of(py, &endpoint.context, tensor, metadata, stream, borrow)?;
        let submitted = endpoint.submit(py, input, timeout, deadline_ns)?;
        future::of(py, endpoint, submitted)
    }

    /// Lends memory for the input of a job, or of a request, to be filled in place and given to
    /// ``submit``, ``call`` or ``request``: no copy.
    ///
    /// Raises ``LayoutError``, ``DTypeError``, ``MetadataError``, ``MemoryLimitError``,
    /// ``DeviceMemoryError``, ``ClosedError``.
    #[pyo3(signature = (shape, dtype, *, metadata = None))]
    fn loan(
        &self,
        py: Python<'_>,
        shape: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
        metadata: Option<Metadata>,
    ) -> PyResult<Py<Loan>> {
        let endpoint = &self.endpoint;
        let slot = endpoint.borrow(py, &dtype::layout(shape, dtype)?, metadata)?;
        Py::new(py, Loan::new(slot, &endpoint.context))
    }

    fn _results(&self, timeout: Limit, follow: bool) -> PyResult<Results> {
        Ok(Results::new(&self.endpoint, timeout.0, follow))
    }

    fn _drain(&self, py: Python<'_>, timeout: Limit) -> PyResult<()> {
        let handle = &self.endpoint.handle;
        handle.wait(py, timeout.0, |end, wait| {
            let what = || format!("the end of the jobs of {:?}", handle.name());
            let drained = end.queue()?.drain(wait);
            drained.map_err(|late| Fault::from(late).of(what))
        })
    }

    fn _shutdown(
        &self,
        py: Python<'_>,
        wait: bool,
        cancel_waiting: bool,
        timeout: Limit,
    ) -> PyResult<()> {
        let shut = py.detach(|| -> Outcome<_> {
            let end = self.endpoint.handle.get()?;
            let shut = end.queue()?.shutdown(Duration::ZERO).optional()?;
            if cancel_waiting {
                let mut cancelled = locked(&self.endpoint.cancelled);
                cancelled.extend(end.queue()?.cancel_waiting()?);
            }
            Ok(shut)
        })?;
        self.endpoint.is_shut.store(true, Ordering::Release);
        if shut.is_some() || !wait {
            Ok(())
        } else {
            self._drain(py, timeout)
        }
    }

    /// Waits until there are ``count`` workers, or servers: ``what``.
    fn _wait_for(&self, py: Python<'_>, what: &str, count: usize, timeout: Limit) -> PyResult<()> {
        let handle = &self.endpoint.handle;
        handle.wait(py, timeout.0, |end, wait| {
            match end.jobs().wait_for_workers(count, wait) {
                Err(Error::Timeout { waited, .. }) => {
                    let attached = end.jobs().state()?.workers.len();
                    let (name, plural) = (handle.name(), if count == 1 { "" } else { "s" });
                    let what = format!("{count} {what}{plural} of {name:?} ({attached} attached)");
                    Err(Error::Timeout { what, waited })
                }
                come => come,
            }
        })
    }

    /// The present state of its jobs, or requests. A client's workers are the servers.
    ///
    /// Raises ``ClosedError``.
    #[getter]
    fn state(&self, py: Python<'_>) -> PyResult<Info<warpipe::QueueState>> {
        let state = py.detach(|| Outcome::Ok(self.endpoint.handle.get()?.jobs().state()?))?;
        Ok(Info(state))
    }

    #[getter]
    fn _memory_in_use<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let state = py.detach(|| Outcome::Ok(self.endpoint.handle.get()?.queue()?.state()?))?;
        tuples::memory_use(py, (state.memory_bytes, state.memory_limit))
    }

    /// Closes it: workers are notified, and waits for outcomes end with an error. Received results
    /// stay valid. Closing twice is no error.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.endpoint.close(py)?;
        self.endpoint.context.settle(py)
    }
}

impl Drop for Jobs {
    fn drop(&mut self) {
        // No caller is left to get an error.
        let _ = Python::try_attach(|py| self.endpoint.close(py));
    }
}

/// Numbers are never reused, so an event loop's table cannot confuse two endpoints.
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(1);

/// The library's endpoint.
#[derive(Debug)]
pub enum QueueOrClient {
    /// A queue's.
    Queue(warpipe::Queue),
    /// A client's, which contains a queue.
    Client(warpipe::Client),
}

impl QueueOrClient {
    /// A queue's own. A client is no queue: Python may call `Queue.drain(client)`.
    pub fn queue(&self) -> Outcome<&warpipe::Queue> {
        match self {
            QueueOrClient::Queue(queue) => Ok(queue),
            QueueOrClient::Client(_) => Err(Fault::argument("the object", "a client", "a queue")),
        }
    }

    /// The queue of the jobs, or of the requests.
    pub fn jobs(&self) -> &warpipe::Queue {
        match self {
            QueueOrClient::Queue(queue) => queue,
            QueueOrClient::Client(client) => client.queue(),
        }
    }

    fn submit(
        &self,
        loan: warpipe::Loan,
        stream: &warpipe::Stream,
        deadline_ns: u64,
        wait: Wait<'_>,
    ) -> Result<Submitted, SubmitError> {
        Ok(match self {
            QueueOrClient::Queue(queue) => {
                let handle = queue.submit_within(loan, stream, wait)?;
                Submitted::Job(DropDetached::new(handle))
            }
            QueueOrClient::Client(client) => {
                let pending = client.request_before(loan, stream, deadline_ns, wait)?;
                Submitted::Request(DropDetached::new(pending))
            }
        })
    }
}

/// The handle of a job or of a request. A request that is dropped is cancelled.
#[derive(Debug)]
pub enum Submitted {
    Job(DropDetached<warpipe::JobHandle>),
    Request(DropDetached<warpipe::Pending>),
}

impl Deref for Submitted {
    type Target = warpipe::JobHandle;

    fn deref(&self) -> &warpipe::JobHandle {
        match self {
            Submitted::Job(handle) => handle,
            Submitted::Request(pending) => pending,
        }
    }
}

/// Submits jobs and receives results.
#[derive(Debug)]
pub struct JobEndpoint {
    kind: &'static str,
    pub context: CopyContext,
    pub number: u64,
    /// From now on no job is submitted any more, and `results()` may end.
    pub is_shut: AtomicBool,
    /// What shutdowns have cancelled; locked while one does.
    pub cancelled: Mutex<HashSet<u64>>,
    /// Results of interrupted waits: the last one is the next to be returned.
    pub unused: Mutex<Vec<DropDetached<warpipe::JobResult>>>,
    pub handle: CloseableHandle<QueueOrClient>,
}

impl JobEndpoint {
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.handle.close(py)?;
        // Dropped without the lock, which a thread may want that has the interpreter.
        let unused = std::mem::take(&mut *locked(&self.unused));
        drop(unused);
        Ok(())
    }

    fn borrow(
        &self,
        py: Python<'_>,
        layout: &Layout,
        metadata: Option<Metadata>,
    ) -> PyResult<Slot> {
        let patience = self.context.patience;
        let lend = |end: &QueueOrClient, wait: Wait<'_>| end.jobs().loan_within(layout, wait);
        let loan = self.handle.wait(py, patience, lend)?;
        Ok(Slot::of_work(loan, metadata)?)
    }

    /// Submits an input; `patience` is how long that may wait, and `deadline_ns` is for a request.
    /// An interrupted wait has submitted nothing.
    pub fn submit(
        &self,
        py: Python<'_>,
        (slot, stream): (Slot, warpipe::Stream),
        patience: Option<Duration>,
        deadline_ns: u64,
    ) -> PyResult<Submitted> {
        let loan = slot.into_work(&format!("one of this {}", self.kind))?;
        // One that came while the input was made.
        if let Err(interrupt) = py.check_signals() {
            let _ = py.detach(|| loan.discard(&stream));
            return Err(interrupt);
        }
        let goes_on = || self.handle.get().map(drop);
        waiting(py, patience, goes_on, |wait| {
            let (error, unused): (Fault, _) = match self.handle.get() {
                Ok(end) => match end.submit(loan, &stream, deadline_ns, wait) {
                    Ok(submitted) => return Ok(submitted),
                    Err(failed) => (failed.error.into(), failed.returned.map(|loan| *loan)),
                },
                Err(closed) => (closed, Some(loan)),
            };
            if let Some(unused) = unused {
                // Work that fills the input may still be pending.
                let _ = unused.discard(&stream);
            }
            Err(error)
        })
    }
}
