//! `Worker`: takes jobs of a queue.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use warpipe::{OptionalExtension, Wait};

use crate::closeable::Closeable;
use crate::copies::Copies;
use crate::device::Device;
use crate::domain::Domain;
use crate::inbox::{Calls, Inbox};
use crate::lease::{Lease, LeaseContext};
use crate::stream::stream_of;
use crate::subscriber::end_if_graceful;
use crate::wait::{SLICE, Timeout, optional, seconds, waiting};

/// Takes jobs of a ``Queue`` and answers each: ``for lease in Worker("jobs"):``, ``lease()``, or
/// ``async for``.
///
/// ``device``: the device it works with, and of the results' memory (default: the first GPU, else
/// the host). ``wait``: seconds to wait until the queue exists, None for no limit (default: not at
/// all). ``timeout``: seconds to wait for a job (default: None, no limit). ``answer_timeout``:
/// seconds that an answer may wait for the owner to release earlier results, and for memory.
/// ``memory_limit``: bytes of device memory for results. ``stream``: the stream to lease on; by
/// default one of its own, and every array made of a lease orders its own stream after the data.
///
/// One thread at a time leases; other threads wait. Leases may be used on any thread. ``close()``,
/// or the end of a ``with`` block: jobs that it has not leased go to other workers; leased jobs can
/// still be answered.
///
/// Raises ``NotFoundError``, ``OtherKindError``, ``HandshakeError``, ``AccessDeniedError``,
/// ``PeerAccessError``, ``DeviceError``.
#[pyclass(frozen, subclass, extends = Closeable, module = "warpipe", name = "_Worker")]
#[derive(Debug)]
pub struct Worker {
    inbox: Inbox<warpipe::Worker, Lease>,
    queue_pid: i32,
    context: LeaseContext,
}

impl Worker {
    fn next_within(
        &self,
        py: Python<'_>,
        timeout: Option<Duration>,
        waited: Option<Duration>,
    ) -> PyResult<Py<Lease>> {
        let take = |inner: &mut warpipe::Worker, limit| inner.lease(&self.context.stream, limit);
        self.inbox
            .next(py, timeout, waited, "a job of", take, |lease| {
                Lease::new(py, lease, &self.context)
            })
    }
}

#[pymethods]
impl Worker {
    #[new]
    #[pyo3(signature = (queue, *, domain = None, device = None, wait = Some(0.0), timeout = None,
        answer_timeout = Some(10.0), spin = None, memory_limit = 4 << 30, handshake_timeout = 5.0, stream = None),
        text_signature = "(queue, *, domain=None, device=None, wait=0.0, timeout=None, answer_timeout=10.0, spin=None, \
        memory_limit=4294967296, handshake_timeout=5.0, stream=None)")]
    #[expect(
        clippy::too_many_arguments,
        reason = "keyword arguments, each with a default"
    )]
    fn new(
        py: Python<'_>,
        queue: &str,
        domain: Option<&Bound<'_, PyAny>>,
        device: Option<&Bound<'_, PyAny>>,
        wait: Option<f64>,
        timeout: Option<f64>,
        answer_timeout: Option<f64>,
        spin: Option<f64>,
        memory_limit: u64,
        handshake_timeout: f64,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyClassInitializer<Worker>> {
        let (domain, device) = (
            Domain::from_argument(domain)?,
            Device::from_argument(device)?.inner,
        );
        let (wait, timeout) = (optional(wait, "wait")?, optional(timeout, "timeout")?);
        let patience = optional(answer_timeout, "answer_timeout")?;
        let builder = warpipe::Worker::builder(queue)
            .domain(&domain)
            .device(&device)
            // In slices, with a look at the signals in between.
            .answer_timeout(patience.unwrap_or(SLICE).min(SLICE))
            .memory_limit(memory_limit)
            .handshake_timeout(seconds(handshake_timeout, "handshake_timeout")?);
        let spin = optional(spin, "spin")?.map(|spin| spin.min(SLICE));
        let builder = spin.into_iter().fold(builder, warpipe::WorkerBuilder::spin);
        let stream = stream_of(py, &device, stream)?;
        let attach = |wait: Wait<'_>| Ok(builder.wait_for_queue(wait)?);
        let worker = waiting(py, wait, || Ok(()), attach)?;
        let context = LeaseContext {
            device,
            stream,
            copies: Arc::new(Copies::default()),
            patience,
        };
        let queue_pid = worker.queue_pid();
        let calls = Calls {
            ring: warpipe::Worker::ring,
            take_back: Lease::return_all,
        };
        let inbox = Inbox::new("worker", queue, timeout, worker, calls)?;
        let base = inbox.base();
        Ok(base.add_subclass(Worker {
            inbox,
            queue_pid,
            context,
        }))
    }

    /// The queue's name.
    #[getter]
    fn queue(&self) -> &str {
        &self.inbox.name
    }

    /// The process id of the queue's owner.
    #[getter]
    fn queue_pid(&self) -> i32 {
        self.queue_pid
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

    /// The next job, without a wait; if there is none, the error of a wait of ``waited`` seconds.
    #[pyo3(signature = (waited, /))]
    fn _last(&self, py: Python<'_>, waited: Option<f64>) -> PyResult<Py<Lease>> {
        self.next_within(py, Some(Duration::ZERO), optional(waited, "waited")?)
    }

    /// Waits for the next job, at most ``timeout`` seconds (default: the worker's; None: no limit).
    ///
    /// Raises ``TimeoutError``; ``PeerGoneError``, which is ``graceful`` after the queue's
    /// ``shutdown`` or ``close``; ``LinkClosedError`` when the queue, which lives, has ended this
    /// worker's link; ``ProtocolError``, ``ClosedError``, ``DriverError``.
    #[pyo3(signature = (timeout = Timeout::Usual), text_signature = "($self, timeout=...)")]
    fn lease(&self, py: Python<'_>, timeout: Timeout) -> PyResult<Py<Lease>> {
        let timeout = timeout.or(self.inbox.timeout);
        self.next_within(py, timeout, timeout)
    }

    /// The next job if there is one, else None.
    ///
    /// Raises as ``lease``, without the timeout.
    fn try_lease(&self, py: Python<'_>) -> PyResult<Option<Py<Lease>>> {
        let take = |worker: &mut warpipe::Worker| {
            worker
                .lease(&self.context.stream, Duration::ZERO)
                .optional()
        };
        self.inbox
            .try_next(py, take, |lease| Lease::new(py, lease, &self.context))
    }

    /// A descriptor that is readable when ``try_lease`` is worth a call (an epoll descriptor, which
    /// nests). Lease until it gives None before waiting on it.
    ///
    /// Raises ``ClosedError``.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        self.inbox.ask(py, |worker| worker.as_fd().as_raw_fd())
    }

    /// Takes no more jobs. Leases stay valid. Closing twice is no error.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.inbox.close(py)?;
        self.context.copies.settle(py, self.context.patience)
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// The next job; the iteration ends when the queue is shut down and its jobs are done, or when
    /// it closes gracefully.
    fn __next__(&self, py: Python<'_>) -> PyResult<Py<Lease>> {
        self.next_within(py, self.inbox.timeout, self.inbox.timeout)
            .map_err(end_if_graceful)
    }

    fn __repr__(&self) -> String {
        format!("Worker({:?}, {})", self.inbox.name, self.context.device)
    }
}
