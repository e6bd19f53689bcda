//! `Client` and `Pending`: requests to a service.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::exceptions::{PyBaseException, PyTimeoutError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use warpipe::clock::now_ns;

use crate::detached::DropDetached;
use crate::device::Device;
use crate::domain::Domain;
use crate::dtype;
use crate::errors::{Fault, Outcome};
use crate::future::{Future, Source};
use crate::job::{self, Waits, Watch};
use crate::job_endpoint::{JobEndpoint, QueueOrClient};
use crate::loan::Loan;
use crate::queue::QueueState;
use crate::wait::{SLICE, Timeout, late, optional};

/// Sends requests to the servers of a service: ``call`` waits for the reply, ``request`` returns a
/// ``Pending``.
///
/// ``service``: as a publisher's name, at most 40 bytes. ``device``: the device of the requests'
/// memory (default: the first GPU, else the host). ``timeout``: seconds within which a reply must
/// come (None: no limit). ``max_attempts``: how many servers may fail or die on a request before it
/// is dead-lettered. ``prefetch``: requests that one server may hold. ``lease_timeout``: seconds
/// that a server may hold requests without answering any; then they go to other servers. ``limit``:
/// the most requests without a reply. ``memory_limit``: bytes of device memory for requests.
/// ``loan_timeout``: seconds to wait for memory that is in use.
///
/// Any number of threads may use it. A server need not exist yet.
///
/// Raises ``InvalidNameError``, ``DomainError``, ``ArgumentError``, ``DeviceError``.
#[pyclass(frozen, module = "warpipe", weakref)]
#[derive(Debug)]
pub struct Client {
    endpoint: Arc<JobEndpoint>,
    timeout: Option<Duration>,
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (service, *, domain = None, device = None, timeout = Some(10.0), max_attempts = 3, prefetch = 2,
        lease_timeout = None, limit = 1024, memory_limit = 4 << 30, loan_timeout = Some(5.0), spin = None),
        text_signature = "(service, *, domain=None, device=None, timeout=10.0, max_attempts=3, prefetch=2, \
        lease_timeout=None, limit=1024, memory_limit=4294967296, loan_timeout=5.0, spin=None)")]
    #[expect(
        clippy::too_many_arguments,
        reason = "keyword arguments, each with a default"
    )]
    fn new(
        py: Python<'_>,
        service: &str,
        domain: Option<&Bound<'_, PyAny>>,
        device: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
        max_attempts: u32,
        prefetch: u32,
        lease_timeout: Option<f64>,
        limit: usize,
        memory_limit: u64,
        loan_timeout: Option<f64>,
        spin: Option<f64>,
    ) -> PyResult<Client> {
        let (domain, device) = (
            Domain::from_argument(domain)?,
            Device::from_argument(device)?.inner,
        );
        let (timeout, loan_timeout) = (
            optional(timeout, "timeout")?,
            optional(loan_timeout, "loan_timeout")?,
        );
        let builder = warpipe::Client::builder(service)
            .domain(&domain)
            .device(&device)
            .max_attempts(max_attempts)
            .prefetch(prefetch)
            .lease_timeout(optional(lease_timeout, "lease_timeout")?)
            .limit(limit)
            .memory_limit(memory_limit)
            .loan_timeout(loan_timeout.unwrap_or(SLICE).min(SLICE));
        let spin = optional(spin, "spin")?.map(|spin| spin.min(SLICE));
        let builder = spin.into_iter().fold(builder, warpipe::ClientBuilder::spin);
        let client = py.detach(|| builder.build()).map_err(Fault::from)?;
        let endpoint = JobEndpoint::open(
            py,
            "client",
            service,
            &device,
            loan_timeout,
            QueueOrClient::Client(client),
        )?;
        Ok(Client { endpoint, timeout })
    }

    /// The service's name.
    #[getter]
    fn service(&self) -> &str {
        &self.endpoint.name
    }

    /// Its device.
    #[getter]
    fn device(&self) -> Device {
        self.endpoint.device()
    }

    /// Whether the client is closed.
    #[getter]
    fn closed(&self) -> PyResult<bool> {
        Ok(self.endpoint.is_closed()?)
    }

    /// Sends a request and waits for the reply, which must come within ``timeout`` seconds
    /// (default: the client's; None: no limit): see ``request``.
    ///
    /// Raises as ``request`` and ``Pending.result``.
    #[pyo3(signature = (tensor, *, metadata = None, stream = None, timeout = Timeout::Usual),
        text_signature = "($self, tensor, *, metadata=None, stream=None, timeout=...)")]
    fn call(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        metadata: Option<&Bound<'_, PyAny>>,
        stream: Option<&Bound<'_, PyAny>>,
        timeout: Timeout,
    ) -> PyResult<Py<job::Result>> {
        self.request(py, tensor, metadata, stream, timeout)?
            .result(py, None)
    }

    /// Sends a request. Its reply must come within ``timeout`` seconds (default: the client's;
    /// None: no limit); no server begins with it later. A tensor is copied, as ``Publisher.send``
    /// does; a ``loan`` of this client is sent without a copy. ``metadata``: a dict (as JSON) or
    /// bytes, at most 200 bytes, for the server.
    ///
    /// Raises ``QueueFullError``; ``NotATensorError``, ``DTypeError``, ``LayoutError``,
    /// ``WrongDeviceError``, ``MetadataError``; ``MemoryLimitError``, ``ClosedError``,
    /// ``DriverError``.
    #[pyo3(signature = (tensor, *, metadata = None, stream = None, timeout = Timeout::Usual),
        text_signature = "($self, tensor, *, metadata=None, stream=None, timeout=...)")]
    fn request(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        metadata: Option<&Bound<'_, PyAny>>,
        stream: Option<&Bound<'_, PyAny>>,
        timeout: Timeout,
    ) -> PyResult<Pending> {
        let timeout = timeout.or(self.timeout);
        let nanoseconds = timeout.and_then(|timeout| u64::try_from(timeout.as_nanos()).ok());
        let deadline_ns =
            nanoseconds.map_or(u64::MAX, |nanoseconds| now_ns().saturating_add(nanoseconds));
        let input = self.endpoint.input(py, tensor, metadata, stream)?;
        let pending = self
            .endpoint
            .submit(py, input, timeout, |end, loan, stream| {
                end.client()
                    .request_before(loan, stream, deadline_ns, Duration::ZERO)
            })?;
        let (endpoint, job) = (self.endpoint.clone(), pending.id());
        Ok(Pending {
            endpoint,
            job,
            deadline_ns,
            future: Future::default(),
            inner: Mutex::new(Some(Arc::new(DropDetached::new(pending)))),
            waits: Waits::default(),
        })
    }

    /// Lends memory for a request, to be filled in place and given to ``call`` or ``request``: no
    /// copy.
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

    /// Waits until there are ``count`` servers, at most ``timeout`` seconds (None: no limit).
    ///
    /// Raises ``TimeoutError``, ``ClosedError``.
    #[pyo3(signature = (count = 1, timeout = Some(10.0)), text_signature = "($self, count=1, timeout=10.0)")]
    fn wait_for_servers(&self, py: Python<'_>, count: usize, timeout: Option<f64>) -> PyResult<()> {
        self.endpoint.wait_for(py, "server", count, timeout)
    }

    /// The state of the requests now. Its workers are the servers.
    ///
    /// Raises ``ClosedError``.
    #[getter]
    fn state(&self, py: Python<'_>) -> PyResult<QueueState> {
        Ok(py.detach(|| QueueState::of(&self.endpoint))?)
    }

    /// Closes the client. Waits for replies end with an error. Received replies stay valid. Closing
    /// twice is no error.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.endpoint.close(py)
    }

    fn __enter__(slf: Py<Client>) -> Py<Client> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __repr__(&self) -> String {
        format!("Client({:?}, {})", self.endpoint.name, self.endpoint.device)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.endpoint.abandon();
    }
}

/// A request, with the methods of a ``concurrent.futures.Future``; ``await pending`` in asyncio.
/// Dropping or cancelling it cancels the request. It keeps the reply as long as it lives.
#[pyclass(frozen, module = "warpipe", weakref)]
#[derive(Debug)]
pub struct Pending {
    endpoint: Arc<JobEndpoint>,
    job: u64,
    deadline_ns: u64,
    future: Future,
    /// `None` once the request is cancelled.
    inner: Mutex<Option<Arc<DropDetached<warpipe::Pending>>>>,
    waits: Waits,
}

impl Pending {
    fn slot(&self) -> Outcome<MutexGuard<'_, Option<Arc<DropDetached<warpipe::Pending>>>>> {
        self.endpoint.check()?;
        Ok(self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn inner(&self) -> Outcome<Arc<DropDetached<warpipe::Pending>>> {
        let gone = || {
            Fault::from(warpipe::Error::NoSuchJob {
                name: self.endpoint.name.clone(),
                job: self.job,
            })
        };
        self.slot()?.clone().ok_or_else(gone)
    }

    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let timeout = optional(timeout, "timeout")?;
        if self.future.wait(py, &self.endpoint, self, timeout)? {
            return Ok(());
        }
        Err(late(format!("the reply to request {}", self.job), timeout).into())
    }
}

impl Source for Pending {
    fn job(&self) -> u64 {
        self.job
    }

    fn look(&self, slice: Duration) -> Outcome<Option<warpipe::JobResult>> {
        Ok(self.inner()?.wait_timeout(&self.endpoint.stream, slice)?)
    }

    fn is_done(&self) -> Outcome<bool> {
        Ok(self.inner()?.is_done()?)
    }

    fn call_off(&self) -> Outcome<()> {
        let inner = self.slot()?.take();
        drop(inner);
        Ok(())
    }
}

#[pymethods]
impl Pending {
    /// The request's number, from 1.
    #[getter]
    fn job(&self) -> u64 {
        self.job
    }

    /// The deadline of the reply, in nanoseconds of ``time.monotonic_ns()``.
    #[getter]
    fn deadline_ns(&self) -> PyResult<u64> {
        self.endpoint.check()?;
        Ok(self.deadline_ns)
    }

    /// Waits for the reply, at most ``timeout`` seconds (None: until its deadline). Its data is complete.
    /// Each call gives the same object.
    ///
    /// Raises ``TimeoutError``, after which it may be called again; ``DeadLetteredError`` when all
    /// attempts failed, ``RejectedError``; ``concurrent.futures.CancelledError``;
    /// ``DeadlinePassedError`` (a TimeoutError), ``QueueClosedError`` when the client was closed.
    #[pyo3(signature = (timeout = None))]
    pub fn result(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Py<job::Result>> {
        self.wait(py, timeout)?;
        self.future.result(py, &self.endpoint)
    }

    /// Waits as ``result``, and gives the exception that it raises; None if there is a result.
    ///
    /// Raises ``TimeoutError``, ``concurrent.futures.CancelledError``.
    #[pyo3(signature = (timeout = None))]
    fn exception(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
    ) -> PyResult<Option<Py<PyBaseException>>> {
        match self.wait(py, timeout) {
            Ok(()) => self.future.exception(py, &self.endpoint),
            // Of a queue that is closed, or an outcome that ``Queue.results`` gave.
            Err(error) if self.done(py)? && !error.is_instance_of::<PyTimeoutError>(py) => {
                Ok(Some(error.into_value(py)))
            }
            Err(error) => Err(error),
        }
    }

    /// Whether ``result()`` would return, or raise, at once.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        self.future.is_done(py, &self.endpoint, self)
    }

    /// Whether it was cancelled.
    fn cancelled(&self) -> PyResult<bool> {
        self.future.is_cancelled(&self.endpoint, self)
    }

    /// Calls ``fn(self)`` once it is done, in the order in which callbacks were added: on the
    /// package's thread ``warpipe-callbacks``, or on the thread that cancels it, or, if it is done
    /// already, at once on this thread. An exception of a callback is logged (logger ``warpipe``)
    /// and stops no other. The object is kept until then.
    #[pyo3(signature = (r#fn, /), text_signature = "($self, fn, /)")]
    fn add_done_callback(slf: &Bound<'_, Self>, r#fn: &Bound<'_, PyAny>) -> PyResult<()> {
        slf.get().endpoint.check()?;
        let module = slf.py().import("warpipe._futures")?;
        module.call_method1("add", (slf, r#fn)).map(drop)
    }

    /// Cancels it: no server gets it any more, and the answer of one that has it is discarded.
    /// Returns whether it is cancelled: False if it was done before.
    fn cancel(slf: &Bound<'_, Self>) -> PyResult<bool> {
        let (py, this) = (slf.py(), slf.get());
        let (is_cancelled, by_this) = this.future.cancel(py, &this.endpoint, this)?;
        if by_this {
            py.import("warpipe._futures")?.call_method1("run", (slf,))?;
        }
        Ok(is_cancelled)
    }

    /// The result if it has come, else None.
    fn _poll(&self, py: Python<'_>) -> PyResult<Option<Py<job::Result>>> {
        let come = self
            .future
            .wait(py, &self.endpoint, self, Some(Duration::ZERO))?;
        come.then(|| self.future.result(py, &self.endpoint))
            .transpose()
    }

    fn _watch(&self, py: Python<'_>) -> PyResult<Watch> {
        Watch::of(py, &self.endpoint)
    }

    #[getter]
    fn _queue(&self) -> u64 {
        self.endpoint.number
    }

    fn __await__<'py>(slf: &Bound<'py, Pending>) -> PyResult<Bound<'py, PyAny>> {
        job::outcome_of(slf.as_any())
    }

    /// One step of the asyncio task that wraps this object: see ``asyncio.create_task``.
    #[pyo3(signature = (value, /))]
    fn send<'py>(slf: &Bound<'py, Self>, value: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        slf.get()
            .waits
            .step(slf.as_any(), "send", &PyTuple::new(slf.py(), [value])?)
    }

    /// Ends a step of that task with an error, as a cancellation does.
    #[pyo3(signature = (*error), text_signature = "($self, *error)")]
    fn throw<'py>(
        slf: &Bound<'py, Self>,
        error: &Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, PyAny>> {
        slf.get().waits.step(slf.as_any(), "throw", error)
    }

    /// Ends the wait of that task; the request itself stays pending.
    fn close<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.get()
            .waits
            .step(slf.as_any(), "close", &PyTuple::empty(slf.py()))
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> std::result::Result<(), PyTraverseError> {
        self.future.traverse(&visit)?;
        self.waits.traverse(&visit)
    }

    fn __clear__(&self) {
        self.waits.clear();
    }

    fn __repr__(&self) -> String {
        format!("Pending({:?}, job={})", self.endpoint.name, self.job)
    }
}
