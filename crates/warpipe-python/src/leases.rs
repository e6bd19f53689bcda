//! `_Leases`, the base of `Worker` and `Server`: takes jobs, or requests.

use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use pyo3::prelude::*;
use warpipe::{Error, OptionalExtension, Wait};

use crate::closeable::Closeable;
use crate::copies::CopyContext;
use crate::detached::call;
use crate::device::Device;
use crate::domain::{Domain, place};
use crate::inbox::{Calls, Inbox};
use crate::lease::Lease;
use crate::stream::stream_of;
use crate::subscriber::end_if_graceful;
use crate::wait::{Given, Limit, SLICE, Seconds, Timeout, WaitLimit, optional, seconds, waiting};

/// The library's endpoint.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "one for each endpoint, which is boxed"
)]
enum Source {
    Worker(warpipe::Worker),
    Server(warpipe::Server),
}

impl Source {
    fn take(&mut self, stream: &warpipe::Stream, limit: Duration) -> Result<warpipe::Lease, Error> {
        match self {
            Source::Worker(worker) => worker.lease(stream, limit),
            Source::Server(server) => server.accept(stream, limit),
        }
    }

    fn ring(&self) {
        match self {
            Source::Worker(worker) => worker.ring(),
            Source::Server(server) => server.ring(),
        }
    }
}

/// Takes the jobs of a queue, or the requests of a service.
#[pyclass(frozen, subclass, extends = Closeable, module = "warpipe", name = "_Leases")]
#[derive(Debug)]
pub struct Leases {
    inbox: Inbox<Source, Lease>,
    /// What a late wait has waited for, before the name.
    thing: &'static str,
    context: CopyContext,
}

impl Leases {
    fn next_within(
        &self,
        py: Python<'_>,
        timeout: Option<Duration>,
        waited: Option<Duration>,
    ) -> PyResult<Py<Lease>> {
        let take = |inner: &mut Source, limit| inner.take(&self.context.stream, limit);
        self.inbox
            .next(py, timeout, waited, self.thing, take, |lease| {
                Lease::new(py, lease, &self.context)
            })
    }
}

#[pymethods]
impl Leases {
    /// Of a ``server``, or of a worker.
    #[new]
    #[expect(
        clippy::too_many_arguments,
        reason = "the options of the classes in Python"
    )]
    fn new(
        py: Python<'_>,
        server: bool,
        name: &str,
        domain: Option<Domain>,
        device: Option<Device>,
        timeout: Option<Seconds>,
        answer_timeout: Option<Seconds>,
        spin: Option<Seconds>,
        memory_limit: u64,
        handshake_timeout: Seconds,
        stream: Given<'_, '_>,
        wait: WaitLimit,
        clients_max: usize,
    ) -> PyResult<PyClassInitializer<Leases>> {
        let (domain, device) = place(domain, device)?;
        let timeout = optional(timeout, "timeout")?;
        let patience = optional(answer_timeout, "answer_timeout")?;
        // In slices, with a look at the signals in between.
        let answer_timeout = patience.unwrap_or(SLICE).min(SLICE);
        let handshake_timeout = seconds(handshake_timeout, "handshake_timeout")?;
        let spin = optional(spin, "spin")?.map(|spin| spin.min(SLICE));
        let stream = stream_of(py, &device, stream)?;
        let (what, thing, source) = if server {
            let default: warpipe::ServerOptions = domain.on(&device);
            let options = warpipe::ServerOptions {
                answer_timeout,
                memory_limit,
                handshake_timeout,
                clients_max,
                spin: spin.unwrap_or(default.spin),
                ..default
            };
            let server = call(py, || warpipe::Server::new(name, options))?;
            ("server", "a request to", Source::Server(server))
        } else {
            let default: warpipe::WorkerOptions = domain.on(&device);
            let options = warpipe::WorkerOptions {
                answer_timeout,
                memory_limit,
                handshake_timeout,
                spin: spin.unwrap_or(default.spin),
                ..default
            };
            let attach = |wait: Wait<'_>| Ok(warpipe::Worker::open(name, options, wait)?);
            let worker = waiting(py, wait.0, || Ok(()), attach)?;
            ("worker", "a job of", Source::Worker(worker))
        };
        let context = CopyContext::new(device.inner, stream, patience);
        let calls = Calls {
            ring: Source::ring,
            take_back: Lease::return_all,
        };
        let inbox = Inbox::new(what, name, timeout, source, calls)?;
        let base = inbox.base();
        Ok(base.add_subclass(Leases {
            inbox,
            thing,
            context,
        }))
    }

    #[getter]
    fn _name(&self) -> &str {
        &self.inbox.name
    }

    /// The device that it works with.
    #[getter]
    fn device(&self) -> Device {
        Device::of(&self.context.device)
    }

    /// How many clients a server is attached to.
    #[getter]
    fn _clients(&self, py: Python<'_>) -> PyResult<usize> {
        self.inbox.ask(py, |source| match source {
            Source::Worker(_) => 0,
            Source::Server(server) => server.clients(),
        })
    }

    /// The default limit of a wait, in seconds; None for no limit.
    #[pyo3(text_signature = "($self, timeout)")]
    fn _limit(&self, timeout: Timeout) -> Option<f64> {
        self.inbox.limit(timeout)
    }

    /// The next lease, without a wait; if there is none, the error of a wait of ``waited`` seconds.
    #[pyo3(signature = (waited, /))]
    fn _last(&self, py: Python<'_>, waited: Limit) -> PyResult<Py<Lease>> {
        self.next_within(py, Some(Duration::ZERO), waited.0)
    }

    /// Waits for the next lease.
    fn _next(&self, py: Python<'_>, timeout: Timeout) -> PyResult<Py<Lease>> {
        let timeout = timeout.or(self.inbox.timeout);
        self.next_within(py, timeout, timeout)
    }

    /// The next lease if there is one, else None.
    fn _try(&self, py: Python<'_>) -> PyResult<Option<Py<Lease>>> {
        let stream = &self.context.stream;
        let take = |source: &mut Source| source.take(stream, Duration::ZERO).optional();
        self.inbox
            .try_next(py, take, |lease| Lease::new(py, lease, &self.context))
    }

    /// A descriptor that is readable when ``try_lease``, or ``try_accept``, is worth a call (an
    /// epoll descriptor, which nests); a server's is so once a second, too. Call it until it gives
    /// None before waiting on the descriptor.
    ///
    /// Raises ``ClosedError``.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        self.inbox.ask(py, |source| match source {
            Source::Worker(worker) => worker.as_fd().as_raw_fd(),
            Source::Server(server) => server.as_fd().as_raw_fd(),
        })
    }

    /// Takes no more jobs, or requests. Leases stay valid, and can still be answered. Closing twice
    /// is no error.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.inbox.close(py)?;
        self.context.settle(py)
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// The next lease. A worker's iteration ends when the queue is shut down and its jobs are done,
    /// or when it closes gracefully.
    fn __next__(&self, py: Python<'_>) -> PyResult<Py<Lease>> {
        self.next_within(py, self.inbox.timeout, self.inbox.timeout)
            .map_err(end_if_graceful)
    }
}
