//! `Server`: takes requests of a service.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use warpipe::OptionalExtension;

use crate::closeable::Closeable;
use crate::copies::Copies;
use crate::device::Device;
use crate::domain::Domain;
use crate::errors::Fault;
use crate::inbox::{Calls, Inbox};
use crate::lease::{Lease, LeaseContext};
use crate::stream::stream_of;
use crate::wait::{SLICE, Timeout, optional, seconds};

/// Takes the requests of all clients of a service, together with its other servers, and answers
/// each, a ``Lease``: ``for request in Server("embed"):``, ``accept()``, or ``async for``. It finds new
/// clients by itself.
///
/// ``device``: the device it works with, and of the replies' memory (default: the first GPU, else
/// the host). ``timeout``: seconds to wait for a request (default: None, no limit).
/// ``answer_timeout``: seconds that a reply may wait for the client to release earlier ones, and
/// for memory. ``memory_limit``: bytes of device memory for the replies to one client.
/// ``handshake_timeout``: the limit of a client's handshake in seconds. ``clients_max``: the most
/// clients at once. ``stream``: the stream to accept on; by default one of its own, and every array
/// made of a request orders its own stream after the data.
///
/// One thread at a time accepts; other threads wait. Requests may be used on any thread.
/// ``close()``, or the end of a ``with`` block: requests that it has not accepted go to other
/// servers.
///
/// Raises ``InvalidNameError``, ``DomainError``, ``DeviceError``.
#[pyclass(frozen, subclass, extends = Closeable, module = "warpipe", name = "_Server")]
#[derive(Debug)]
pub struct Server {
    inbox: Inbox<warpipe::Server, Lease>,
    context: LeaseContext,
}

impl Server {
    fn next_within(
        &self,
        py: Python<'_>,
        timeout: Option<Duration>,
        waited: Option<Duration>,
    ) -> PyResult<Py<Lease>> {
        let take = |inner: &mut warpipe::Server, limit| inner.accept(&self.context.stream, limit);
        self.inbox
            .next(py, timeout, waited, "a request to", take, |lease| {
                Lease::new(py, lease, &self.context)
            })
    }
}

#[pymethods]
impl Server {
    #[new]
    #[pyo3(signature = (service, *, domain = None, device = None, timeout = None, answer_timeout = Some(10.0),
        spin = None, memory_limit = 4 << 30, handshake_timeout = 5.0, clients_max = 256, stream = None),
        text_signature = "(service, *, domain=None, device=None, timeout=None, answer_timeout=10.0, spin=None, \
        memory_limit=4294967296, handshake_timeout=5.0, clients_max=256, stream=None)")]
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
        answer_timeout: Option<f64>,
        spin: Option<f64>,
        memory_limit: u64,
        handshake_timeout: f64,
        clients_max: usize,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyClassInitializer<Server>> {
        let (domain, device) = (
            Domain::from_argument(domain)?,
            Device::from_argument(device)?.inner,
        );
        let (timeout, patience) = (
            optional(timeout, "timeout")?,
            optional(answer_timeout, "answer_timeout")?,
        );
        let builder = warpipe::Server::builder(service)
            .domain(&domain)
            .device(&device)
            .answer_timeout(patience.unwrap_or(SLICE).min(SLICE))
            .memory_limit(memory_limit)
            .handshake_timeout(seconds(handshake_timeout, "handshake_timeout")?)
            .clients_max(clients_max);
        let spin = optional(spin, "spin")?.map(|spin| spin.min(SLICE));
        let builder = spin.into_iter().fold(builder, warpipe::ServerBuilder::spin);
        let stream = stream_of(py, &device, stream)?;
        let server = py.detach(|| builder.build()).map_err(Fault::from)?;
        let context = LeaseContext {
            device,
            stream,
            copies: Arc::new(Copies::default()),
            patience,
        };
        let calls = Calls {
            ring: warpipe::Server::ring,
            take_back: Lease::return_all,
        };
        let inbox = Inbox::new("server", service, timeout, server, calls)?;
        let base = inbox.base();
        Ok(base.add_subclass(Server { inbox, context }))
    }

    /// The service's name.
    #[getter]
    fn service(&self) -> &str {
        &self.inbox.name
    }

    /// The device that it works with.
    #[getter]
    fn device(&self) -> Device {
        Device::of(&self.context.device)
    }

    /// The default limit of a wait, in seconds; None for no limit.
    #[pyo3(text_signature = "($self, timeout)")]
    fn _limit(&self, timeout: Timeout) -> Option<f64> {
        self.inbox.limit(timeout)
    }

    /// The next request, without a wait; if there is none, the error of a wait of ``waited`` seconds.
    #[pyo3(signature = (waited, /))]
    fn _last(&self, py: Python<'_>, waited: Option<f64>) -> PyResult<Py<Lease>> {
        self.next_within(py, Some(Duration::ZERO), optional(waited, "waited")?)
    }

    /// How many clients it is attached to. It attaches to new clients while it waits for requests.
    ///
    /// Raises ``ClosedError``.
    #[getter]
    fn clients(&self, py: Python<'_>) -> PyResult<usize> {
        self.inbox.ask(py, |server| server.clients())
    }

    /// Waits for the next request of any client, at most ``timeout`` seconds (default: the
    /// server's; None: no limit); clients take turns. A request after its deadline is not
    /// delivered.
    ///
    /// Raises ``TimeoutError``, ``SystemCallError``, ``ClosedError``, ``DriverError``.
    #[pyo3(signature = (timeout = Timeout::Usual), text_signature = "($self, timeout=...)")]
    fn accept(&self, py: Python<'_>, timeout: Timeout) -> PyResult<Py<Lease>> {
        let timeout = timeout.or(self.inbox.timeout);
        self.next_within(py, timeout, timeout)
    }

    /// The next request if there is one, else None. It attaches to new clients as ``accept`` does.
    ///
    /// Raises as ``accept``, without the timeout.
    fn try_accept(&self, py: Python<'_>) -> PyResult<Option<Py<Lease>>> {
        let take = |server: &mut warpipe::Server| {
            server
                .accept(&self.context.stream, Duration::ZERO)
                .optional()
        };
        self.inbox
            .try_next(py, take, |lease| Lease::new(py, lease, &self.context))
    }

    /// A descriptor that is readable when ``try_accept`` is worth a call (an epoll descriptor,
    /// which nests), and once a second. Accept until it gives None before waiting on it.
    ///
    /// Raises ``ClosedError``.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        self.inbox.ask(py, |server| server.as_raw_fd())
    }

    /// Accepts no more requests. Accepted requests can still be answered. Closing twice is no
    /// error.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.inbox.close(py)?;
        self.context.copies.settle(py, self.context.patience)
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// The next request.
    fn __next__(&self, py: Python<'_>) -> PyResult<Py<Lease>> {
        self.next_within(py, self.inbox.timeout, self.inbox.timeout)
    }

    fn __repr__(&self) -> String {
        format!("Server({:?}, {})", self.inbox.name, self.context.device)
    }
}
