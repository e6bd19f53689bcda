//! `_Jobs`, the base of `Queue` and `Client`: submits jobs, or requests.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use warpipe::clock::now_ns;
use warpipe::{OptionalExtension, ResultOrder};

use crate::closeable::Closeable;
use crate::detached::call;
use crate::device::Device;
use crate::domain::{Domain, place};
use crate::dtype;
use crate::errors::{Fault, Outcome};
use crate::future;
use crate::job::Results;
use crate::job_endpoint::{JobEndpoint, QueueOrClient};
use crate::loan::Loan;
use crate::metadata::Metadata;
use crate::tuples::{self, Info};
use crate::wait::{Given, Limit, Seconds, Timeout, optional, seconds, waiting};

/// Submits jobs to a queue of its own, or requests to a service.
#[pyclass(frozen, subclass, extends = Closeable, module = "warpipe", name = "_Jobs")]
#[derive(Debug)]
pub struct Jobs {
    endpoint: Arc<JobEndpoint>,
    /// How long a job may wait for room, or a request for its reply.
    timeout: Option<Duration>,
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
        order: &str,
        workers_max: u32,
        handshake_timeout: Seconds,
    ) -> PyResult<PyClassInitializer<Jobs>> {
        let (domain, device) = place(domain, device)?;
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
                order: self::order(order)?,
                workers_max,
                handshake_timeout: seconds(handshake_timeout, "handshake_timeout")?,
                spin: spin.unwrap_or(default.spin),
                ..default
            };
            let queue = call(py, || warpipe::Queue::new(name, options))?;
            ("queue", QueueOrClient::of(queue))
        };
        let endpoint = JobEndpoint::open(py, kind, name, &device, loan_timeout, inner)?;
        let base = endpoint.base();
        Ok(base.add_subclass(Jobs { endpoint, timeout }))
    }

    #[getter]
    fn _name(&self) -> &str {
        &self.endpoint.name
    }

    /// Its device.
    #[getter]
    fn device(&self) -> Device {
        self.endpoint.device()
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
        let input = self.endpoint.input(py, tensor, metadata, stream)?;
        let submitted = self.endpoint.submit(py, input, timeout, deadline_ns)?;
        future::of(py, &self.endpoint, submitted)
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
        self.endpoint
            .loan(py, &dtype::layout(shape, dtype)?, metadata)
    }

    fn _results(&self, timeout: Limit, follow: bool) -> PyResult<Results> {
        Ok(Results::new(&self.endpoint, timeout.0, follow))
    }

    fn _drain(&self, py: Python<'_>, timeout: Limit) -> PyResult<()> {
        let goes_on = || self.endpoint.end().map(drop);
        waiting(py, timeout.0, goes_on, |wait| {
            let drained = self.endpoint.end()?.queue()?.drain(wait);
            let what = || format!("the end of the jobs of {:?}", self.endpoint.name);
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
            let end = self.endpoint.end()?;
            let shut = end.queue()?.shutdown(Duration::ZERO).optional()?;
            if cancel_waiting {
                self.endpoint.cancel_waiting()?;
            }
            Ok(shut)
        })?;
        self.endpoint.shut();
        if shut.is_some() || !wait {
            Ok(())
        } else {
            self._drain(py, timeout)
        }
    }

    /// Waits until there are ``count`` workers, or servers: ``what``.
    fn _wait_for(&self, py: Python<'_>, what: &str, count: usize, timeout: Limit) -> PyResult<()> {
        self.endpoint.wait_for(py, what, count, timeout)
    }

    /// The present state of its jobs, or requests. A client's workers are the servers.
    ///
    /// Raises ``ClosedError``.
    #[getter]
    fn state(&self, py: Python<'_>) -> PyResult<Info<warpipe::QueueState>> {
        let state = py.detach(|| Outcome::Ok(self.endpoint.end()?.jobs().state()?))?;
        Ok(Info(state))
    }

    #[getter]
    fn _memory_in_use<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let state = py.detach(|| Outcome::Ok(self.endpoint.end()?.queue()?.state()?))?;
        tuples::memory_use(py, (state.memory_bytes, state.memory_limit))
    }

    /// Closes it: workers are notified, and waits for outcomes end with an error. Received results
    /// stay valid. Closing twice is no error.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.endpoint.close(py)
    }
}

impl Drop for Jobs {
    fn drop(&mut self) {
        self.endpoint.abandon();
    }
}
