//! `Client`: requests to a service.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use warpipe::clock::now_ns;

use crate::closeable::Closeable;
use crate::device::Device;
use crate::domain::Domain;
use crate::dtype;
use crate::errors::{Fault, Outcome};
use crate::future::Pending;
use crate::job;
use crate::job_endpoint::{JobEndpoint, QueueOrClient};
use crate::loan::Loan;
use crate::tuples::Info;
use crate::wait::{Timeout, optional};

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
#[pyclass(frozen, extends = Closeable, module = "warpipe")]
#[derive(Debug)]
pub struct Client {
    endpoint: Arc<JobEndpoint>,
    timeout: Option<Duration>,
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (service, *, domain = None, device = None, timeout = Some(10.0), max_attempts = 3, prefetch = 2,
        lease_timeout = None, limit = 1 << 20, memory_limit = 4 << 30, loan_timeout = Some(5.0), spin = None),
        text_signature = "(service, *, domain=None, device=None, timeout=10.0, max_attempts=3, prefetch=2, \
        lease_timeout=None, limit=1048576, memory_limit=4294967296, loan_timeout=5.0, spin=None)")]
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
    ) -> PyResult<PyClassInitializer<Client>> {
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
            .memory_limit(memory_limit);
        let spin = optional(spin, "spin")?;
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
        let base = endpoint.base();
        Ok(base.add_subclass(Client { endpoint, timeout }))
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
        let pending = self.request(py, tensor, metadata, stream, timeout)?;
        pending.bind(py).as_super().get().result(py, None)
    }

    /// Sends a request. Its reply must come within ``timeout`` seconds (default: the client's;
    /// None: no limit); no server begins with it later. A tensor is copied, as ``Publisher.send``
    /// does; a ``loan`` of this client is sent without a copy. ``metadata``: a dict (as JSON) or
    /// any buffer, at most 200 bytes, for the server.
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
    ) -> PyResult<Py<Pending>> {
        let timeout = timeout.or(self.timeout);
        let nanoseconds = timeout.and_then(|timeout| u64::try_from(timeout.as_nanos()).ok());
        let deadline_ns =
            nanoseconds.map_or(u64::MAX, |nanoseconds| now_ns().saturating_add(nanoseconds));
        let input = self.endpoint.input(py, tensor, metadata, stream)?;
        let pending = self
            .endpoint
            .submit(py, input, timeout, |end, loan, stream, wait| {
                end.client().request_before(loan, stream, deadline_ns, wait)
            })?;
        Pending::new(py, &self.endpoint, pending)
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
    fn state(&self, py: Python<'_>) -> PyResult<Info<warpipe::QueueState>> {
        let state = py.detach(|| Outcome::Ok(self.endpoint.end()?.state()?))?;
        Ok(Info(state))
    }

    /// Closes the client. Waits for replies end with an error. Received replies stay valid. Closing
    /// twice is no error.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.endpoint.close(py)
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
