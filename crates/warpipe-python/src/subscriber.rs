//! `Subscriber`.

use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use pyo3::exceptions::PyStopIteration;
use pyo3::prelude::*;
use warpipe::{OptionalExtension, Wait};

use crate::closeable::Named;
use crate::detached::OwnStream;
use crate::device::Device;
use crate::domain::{Domain, place};
use crate::frame::Frame;
use crate::inbox::{Calls, Inbox};
use crate::parts::FrameParts;
use crate::publisher::word_of;
use crate::stream::stream_of;
use crate::wait::{Given, Limit, SLICE, Seconds, Timeout, WaitLimit, optional, seconds, waiting};

/// The default limit of a receive.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Receives the tensors of one publisher: ``for frame in Subscriber("camera/front"):``,
/// ``receive()``, or ``async for``.
///
/// ``device``: the device it reads with (default: the first GPU, else the host). ``wait``: seconds
/// to wait for a publisher of the name, None for no limit (default: not at all). ``reconnect``:
/// follow the next publisher of the name when this one ends. ``timeout``: seconds that a receive,
/// or each step of an iteration, waits (None: no limit; by default 10 for a receive, and no limit
/// for an iteration). ``spin``: seconds that it polls before it sleeps (default: 20 us).
/// ``orphan_timeout``: seconds after which streams that wait for a dead publisher go
/// on, where a child that it forked keeps its device work running; the samples that they waited for
/// are lost. ``stream``: the stream to receive on; by default one of its own, and every array made
/// of a frame orders its own stream after the data.
///
/// One thread at a time receives; other threads wait. Frames may be used on any thread.
///
/// Raises ``NotFoundError``, ``OtherKindError``, ``HandshakeError``, ``AccessDeniedError``,
/// ``DeviceError``.
#[pyclass(frozen, subclass, extends = Named, module = "warpipe", name = "_Subscriber")]
#[derive(Debug)]
pub struct Subscriber {
    inbox: Inbox<warpipe::Subscriber, Frame>,
    /// The limit of each step of an iteration.
    iteration: Option<Duration>,
    /// The device that it reads with.
    #[pyo3(get)]
    device: Device,
    stream: OwnStream,
}

impl Subscriber {
    fn next_within(
        &self,
        py: Python<'_>,
        timeout: Option<Duration>,
        waited: Option<Duration>,
    ) -> PyResult<Py<Frame>> {
        let take = |inner: &mut warpipe::Subscriber, limit| inner.receive(&self.stream, limit);
        self.inbox
            .next(py, timeout, waited, "a sample of", take, |sample| {
                self.frame(py, sample)
            })
    }

    fn frame(&self, py: Python<'_>, sample: warpipe::Sample) -> PyResult<Py<Frame>> {
        let parts = sample.parts().to_vec();
        let frame = Frame::new(sample, &self.device, self.inbox.timeout);
        match parts.is_empty() {
            true => Py::new(py, frame.whole()),
            false => FrameParts::of(py, frame.whole(), parts),
        }
    }
}

#[pymethods]
impl Subscriber {
    #[new]
    #[pyo3(signature = (name, *, domain = None, device = None, wait = WaitLimit::ZERO, reconnect = false, timeout = Timeout::USUAL,
        spin = None, handshake_timeout = Seconds(5.0), orphan_timeout = Seconds(30.0), stream = None),
        text_signature = "(name, *, domain=None, device=None, wait=0.0, reconnect=False, timeout=..., spin=None, \
        handshake_timeout=5.0, orphan_timeout=30.0, stream=None)")]
    #[expect(
        clippy::too_many_arguments,
        reason = "keyword arguments, each with a default"
    )]
    fn new(
        py: Python<'_>,
        name: &str,
        domain: Option<Domain>,
        device: Option<Device>,
        wait: WaitLimit,
        reconnect: bool,
        timeout: Timeout,
        spin: Option<Seconds>,
        handshake_timeout: Seconds,
        orphan_timeout: Seconds,
        stream: Given<'_, '_>,
    ) -> PyResult<PyClassInitializer<Subscriber>> {
        let (domain, device) = place(domain, device)?;
        let iteration = timeout.or(None);
        let timeout = timeout.or(Some(RECEIVE_TIMEOUT));
        let spin = optional(spin, "spin")?.map(|spin| spin.min(SLICE));
        let default: warpipe::SubscriberOptions = domain.on(&device);
        let options = warpipe::SubscriberOptions {
            reconnect,
            handshake_timeout: seconds(handshake_timeout, "handshake_timeout")?,
            orphan_timeout: seconds(orphan_timeout, "orphan_timeout")?,
            spin: spin.unwrap_or(default.spin),
            ..default
        };
        let stream = stream_of(py, &device, stream)?;
        let attach = |wait: Wait<'_>| Ok(warpipe::Subscriber::open(name, options, wait)?);
        let subscriber = waiting(py, wait.0, || Ok(()), attach)?;
        // A frame that was never returned to Python is released as any other.
        let calls = Calls {
            ring: warpipe::Subscriber::ring,
            take_back: |_, frames| drop(frames),
        };
        let inbox = Inbox::new("subscriber", name, timeout, subscriber, calls)?;
        let base = inbox.named();
        Ok(base.add_subclass(Subscriber {
            inbox,
            iteration,
            device,
            stream,
        }))
    }

    /// The default limit of a wait, in seconds; None for no limit.
    #[pyo3(text_signature = "($self, timeout)")]
    fn _limit(&self, timeout: Timeout) -> Option<f64> {
        self.inbox.limit(timeout)
    }

    /// The next frame, without a wait; if there is none, the error of a wait of ``waited`` seconds.
    #[pyo3(signature = (waited, /))]
    fn _last(&self, py: Python<'_>, waited: Limit) -> PyResult<Py<Frame>> {
        self.next_within(py, Some(Duration::ZERO), waited.0)
    }

    /// How many seconds each step of an iteration lasts at most; None for no limit.
    #[getter]
    fn _iteration(&self) -> Option<f64> {
        self.iteration.map(|timeout| timeout.as_secs_f64())
    }

    /// The state of its publisher: ``"alive"``, ``"stalled"``, ``"leaving"``, ``"suspect"``,
    /// ``"dead"``; None without a publisher.
    ///
    /// Raises ``ClosedError``.
    #[getter]
    fn publisher_state(&self, py: Python<'_>) -> PyResult<Option<&'static str>> {
        self.inbox.ask(py, |subscriber| {
            subscriber.publisher().map(|it| word_of(it.state))
        })
    }

    /// The publisher's process id; None without a publisher.
    ///
    /// Raises ``ClosedError``.
    #[getter]
    fn publisher_pid(&self, py: Python<'_>) -> PyResult<Option<i32>> {
        self.inbox
            .ask(py, |subscriber| subscriber.publisher().map(|it| it.pid))
    }

    /// Frames that it did not get because of the publisher's policy.
    ///
    /// Raises ``ClosedError``.
    #[getter]
    fn dropped(&self, py: Python<'_>) -> PyResult<u64> {
        self.inbox.ask(py, |subscriber| subscriber.dropped())
    }

    /// Waits for the next frame, at most ``timeout`` seconds (default: the subscriber's; None: no
    /// limit).
    ///
    /// Raises ``TimeoutError``; ``PeerGoneError`` once all its completed frames have been
    /// received (not with ``reconnect``); for a tensor that was sent in place
    /// ``SampleLostError``, ``HandleError``, ``TicketExpiredError``, and, of a publisher that is
    /// stopped, ``HandshakeError``: the frame stays the next; ``LinkClosedError``,
    /// ``ProtocolError``, ``ClosedError``, ``DriverError``.
    #[pyo3(signature = (timeout = Timeout::USUAL), text_signature = "($self, timeout=...)")]
    fn receive(&self, py: Python<'_>, timeout: Timeout) -> PyResult<Py<Frame>> {
        let timeout = timeout.or(self.inbox.timeout);
        self.next_within(py, timeout, timeout)
    }

    /// The next frame if there is one, else None.
    ///
    /// Raises as ``receive``, without the timeout.
    fn try_receive(&self, py: Python<'_>) -> PyResult<Option<Py<Frame>>> {
        let take = |subscriber: &mut warpipe::Subscriber| {
            subscriber.receive(&self.stream, Duration::ZERO).optional()
        };
        self.inbox
            .try_next(py, take, |sample| self.frame(py, sample))
    }

    /// A descriptor that is readable when ``try_receive`` is worth a call (an epoll descriptor,
    /// which nests). Receive until it gives None before waiting on it.
    ///
    /// Raises ``ClosedError``.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        self.inbox
            .ask(py, |subscriber| subscriber.as_fd().as_raw_fd())
    }

    /// Closes the link. Received frames stay valid. Closing twice is no error.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        Ok(self.inbox.close(py)?)
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// The next frame; the iteration ends when the publisher closes gracefully.
    fn __next__(&self, py: Python<'_>) -> PyResult<Py<Frame>> {
        self.next_within(py, self.iteration, self.iteration)
            .map_err(end_if_graceful)
    }
}

/// The end of an iteration, if the peer closed gracefully.
pub fn end_if_graceful(error: PyErr) -> PyErr {
    let graceful = Python::attach(|py| {
        let said = error
            .value(py)
            .getattr("graceful")
            .and_then(|graceful| graceful.is_truthy());
        said.unwrap_or(false)
    });
    if graceful {
        PyStopIteration::new_err(())
    } else {
        error
    }
}
