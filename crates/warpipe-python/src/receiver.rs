//! `_Receiver`, the base of `Subscriber`, `Worker` and `Server`: endpoints from which one thread at a
//! time receives samples, jobs or requests.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use pyo3::exceptions::PyStopIteration;
use pyo3::prelude::*;
use warpipe::{Error, OptionalExtension, Wait};

use crate::copies::CopyContext;
use crate::detached::call;
use crate::device::Device;
use crate::domain::{Domain, place};
use crate::errors::{Fault, Outcome};
use crate::exclusive::{Exclusive, locked};
use crate::frame::{Frame, FrameParts};
use crate::handle::{Closeable, CloseableHandle};
use crate::lease::Lease;
use crate::publisher::word_of;
use crate::stream::stream_of;
use crate::thread_exit::prepare_exit;
use crate::wait::{
    Given, Limit, SLICE, Seconds, Timeout, WaitLimit, awaited, hand_over, in_slices, late,
    none_if_late, optional, seconds,
};

/// The default limit of a subscriber's receive.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a try waits for another thread's call. A call that lasts longer waits for an item.
const TURN: Duration = Duration::from_millis(1);

/// The library's endpoint.
#[derive(Debug)]
enum Source {
    Subscriber(warpipe::Subscriber),
    Worker(warpipe::Worker),
    Server(warpipe::Server),
}

/// An item on its way to Python.
enum Item {
    Sample(warpipe::Sample),
    Lease(warpipe::Lease),
    /// Of an interrupted wait.
    Unused(Py<Frame>),
}

impl Source {
    fn take(&mut self, stream: &warpipe::Stream, limit: Duration) -> Result<Item, Error> {
        Ok(match self {
            Source::Subscriber(subscriber) => Item::Sample(subscriber.receive(stream, limit)?),
            Source::Worker(worker) => Item::Lease(worker.lease(stream, limit)?),
            Source::Server(server) => Item::Lease(server.accept(stream, limit)?),
        })
    }

    /// Makes its descriptor readable.
    fn ring(&self) {
        match self {
            Source::Subscriber(subscriber) => subscriber.ring(),
            Source::Worker(worker) => worker.ring(),
            Source::Server(server) => server.ring(),
        }
    }
}

/// The endpoint, and items that are returned before it is asked.
#[derive(Debug)]
struct Shared {
    source: Exclusive<Source>,
    /// Items of interrupted waits: the next to be returned.
    unused: Mutex<VecDeque<Py<Frame>>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        let unused = std::mem::take(&mut *locked(&self.unused));
        if !unused.is_empty() {
            // While the link is there that leases go back on.
            prepare_exit();
            let _ = Python::try_attach(|py| Lease::return_all(py, unused));
        }
    }
}

/// Receives the samples of a publisher, or takes the jobs of a queue, or the requests of a service.
#[pyclass(frozen, subclass, extends = Closeable, module = "warpipe", name = "_Receiver")]
#[derive(Debug)]
pub struct Receiver {
    #[pyo3(get, name = "_name")]
    name: String,
    /// What a late wait has waited for, before the name.
    thing: &'static str,
    /// The default limit of a wait.
    timeout: Option<Duration>,
    /// The limit of each step of an iteration.
    iteration: Option<Duration>,
    context: CopyContext,
    handle: CloseableHandle<Shared>,
}

impl Receiver {
    /// Asks for something that is there at once, as soon as no other thread has the endpoint.
    fn ask<A: Send>(
        &self,
        py: Python<'_>,
        work: impl Fn(&mut Source) -> A + Send + Sync,
    ) -> PyResult<A> {
        let said = in_slices(py, None, |slice| {
            Ok(self.handle.get()?.source.with(slice, |source| work(source)))
        })?;
        Ok(said.ok_or_else(|| late("its turn".into(), None))?)
    }

    /// Waits for the next item. An interrupted wait has taken nothing. The error of one that is late
    /// says that it was waited for as long as `waited`.
    fn next_within(
        &self,
        py: Python<'_>,
        timeout: Option<Duration>,
        waited: Option<Duration>,
    ) -> PyResult<Py<Frame>> {
        let mut cause = None;
        let found = in_slices(py, timeout, |slice| {
            let (start, shared) = (Instant::now(), self.handle.get()?);
            let look = |source: &mut Source| {
                // Not zero: the error of a mere poll does not say the cause.
                let left = slice.saturating_sub(start.elapsed());
                let found = self.look(&shared, source, left.max(Duration::from_nanos(1)));
                none_if_late(found.map_err(Fault::from), &mut cause)
            };
            Ok(shared.source.with(slice, look).transpose()?.flatten())
        })?;
        let what = || format!("{} {:?}", self.thing, self.name);
        let found = found.ok_or_else(|| late(cause.unwrap_or_else(what), waited))?;
        self.give(py, found)
    }

    fn look(&self, shared: &Shared, source: &mut Source, limit: Duration) -> Result<Item, Error> {
        let first = locked(&shared.unused).pop_front();
        let take = || source.take(&self.context.stream, limit);
        first.map_or_else(take, |first| Ok(Item::Unused(first)))
    }

    /// The item as Python has it.
    fn give(&self, py: Python<'_>, found: Item) -> PyResult<Py<Frame>> {
        let context = &self.context;
        let made = match found {
            Item::Sample(sample) => {
                let parts = sample.parts().to_vec();
                let frame = Frame::new(sample, None, &context.device, context.patience);
                match parts.is_empty() {
                    true => Py::new(py, frame)?,
                    false => FrameParts::of(py, frame, parts)?,
                }
            }
            Item::Lease(lease) => Lease::object(py, lease, context)?,
            Item::Unused(made) => made,
        };
        hand_over(py, made, |made| {
            let Ok(shared) = self.handle.get() else {
                return Lease::return_all(py, [made]);
            };
            locked(&shared.unused).push_front(made);
            // Wakes pollers of the descriptor. A thread that waits in this endpoint needs no
            // wake-up: it looks within a slice.
            py.detach(|| shared.source.with(Duration::ZERO, |source| source.ring()));
        })
    }
}

#[pymethods]
impl Receiver {
    /// Of a ``"subscriber"``, a ``"worker"`` or a ``"server"``. The options after ``stream`` are not
    /// for all of them.
    #[new]
    #[pyo3(signature = (kind, name, domain, device, wait, timeout, spin, handshake_timeout, stream, *, reconnect = false,
        orphan_timeout = Seconds(30.0), answer_timeout = None, memory_limit = 0, clients_max = 0))]
    fn new(
        py: Python<'_>,
        kind: &str,
        name: &str,
        domain: Option<Domain>,
        device: Option<Device>,
        wait: WaitLimit,
        timeout: Timeout,
        spin: Option<Seconds>,
        handshake_timeout: Seconds,
        stream: Given<'_, '_>,
        reconnect: bool,
        orphan_timeout: Seconds,
        answer_timeout: Option<Seconds>,
        memory_limit: u64,
        clients_max: usize,
    ) -> PyResult<PyClassInitializer<Receiver>> {
        let (domain, device) = place(domain, device)?;
        let iteration = timeout.or(None);
        let mut patience = optional(answer_timeout, "answer_timeout")?;
        // In slices, with a look at the signals in between.
        let answer_timeout = patience.unwrap_or(SLICE).min(SLICE);
        let handshake_timeout = seconds(handshake_timeout, "handshake_timeout")?;
        let orphan_timeout = seconds(orphan_timeout, "orphan_timeout")?;
        let spin = optional(spin, "spin")?.map(|spin| spin.min(SLICE));
        let stream = stream_of(py, &device, stream)?;
        let (kind, thing, source) = match kind {
            "subscriber" => {
                patience = timeout.or(Some(RECEIVE_TIMEOUT));
                let default: warpipe::SubscriberOptions = domain.on(&device);
                let options = warpipe::SubscriberOptions {
                    reconnect,
                    handshake_timeout,
                    orphan_timeout,
                    spin: spin.unwrap_or(default.spin),
                    ..default
                };
                let attach = |wait: Wait<'_>| warpipe::Subscriber::open(name, options, wait);
                let subscriber = awaited(py, wait.0, attach)?;
                ("subscriber", "a sample of", Source::Subscriber(subscriber))
            }
            "worker" => {
                let default: warpipe::WorkerOptions = domain.on(&device);
                let options = warpipe::WorkerOptions {
                    answer_timeout,
                    memory_limit,
                    handshake_timeout,
                    spin: spin.unwrap_or(default.spin),
                    ..default
                };
                let attach = |wait: Wait<'_>| warpipe::Worker::open(name, options, wait);
                let worker = awaited(py, wait.0, attach)?;
                ("worker", "a job of", Source::Worker(worker))
            }
            _ => {
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
            }
        };
        let shared = Shared {
            source: Exclusive::new(source),
            unused: Mutex::default(),
        };
        let handle = CloseableHandle::new(kind, name, shared)?;
        Ok(handle.base().add_subclass(Receiver {
            name: name.to_owned(),
            thing,
            timeout: if kind == "subscriber" {
                patience
            } else {
                iteration
            },
            iteration,
            context: CopyContext::new(device.inner, stream, patience),
            handle,
        }))
    }

    /// The device that it works with.
    #[getter]
    fn device(&self) -> Device {
        Device::of(&self.context.device)
    }

    /// The default limit of a wait, in seconds; None for no limit.
    #[pyo3(text_signature = "($self, timeout)")]
    fn _limit(&self, timeout: Timeout) -> Option<f64> {
        let timeout = timeout.or(self.timeout);
        timeout.map(|timeout| timeout.as_secs_f64())
    }

    /// How many seconds each step of an iteration lasts at most; None for no limit.
    #[getter]
    fn _iteration(&self) -> Option<f64> {
        self.iteration.map(|timeout| timeout.as_secs_f64())
    }

    /// Of a subscriber its publisher's state and process id, if there is one, and how many frames it
    /// did not get; of a server the number of its clients.
    ///
    /// Raises ``ClosedError``.
    fn _facts(&self, py: Python<'_>) -> PyResult<(Option<&'static str>, Option<i32>, u64)> {
        self.ask(py, |source| match source {
            Source::Subscriber(subscriber) => {
                let publisher = subscriber.publisher();
                let state = publisher.as_ref().map(|it| word_of(it.state));
                (state, publisher.map(|it| it.pid), subscriber.dropped())
            }
            Source::Worker(_) => (None, None, 0),
            Source::Server(server) => (None, None, server.clients() as u64),
        })
    }

    /// Waits for the next item.
    fn _next(&self, py: Python<'_>, timeout: Timeout) -> PyResult<Py<Frame>> {
        let timeout = timeout.or(self.timeout);
        self.next_within(py, timeout, timeout)
    }

    /// The next item, without a wait; if there is none, the error of a wait of ``waited`` seconds.
    #[pyo3(signature = (waited, /))]
    fn _last(&self, py: Python<'_>, waited: Limit) -> PyResult<Py<Frame>> {
        self.next_within(py, Some(Duration::ZERO), waited.0)
    }

    /// The next item if there is one, else None; also while another thread waits for one.
    fn _try(&self, py: Python<'_>) -> PyResult<Option<Py<Frame>>> {
        let found = py.detach(|| -> Outcome<_> {
            let shared = self.handle.get()?;
            let look = |source: &mut Source| self.look(&shared, source, Duration::ZERO).optional();
            Ok(shared.source.with(TURN, look).transpose()?.flatten())
        })?;
        found.map(|found| self.give(py, found)).transpose()
    }

    /// A descriptor that is readable when a try for an item is worth a call (an epoll descriptor,
    /// which nests); a server's is so once a second, too. Try until that gives None before waiting on
    /// the descriptor.
    ///
    /// Raises ``ClosedError``.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        self.ask(py, |source| match source {
            Source::Subscriber(subscriber) => subscriber.as_fd().as_raw_fd(),
            Source::Worker(worker) => worker.as_fd().as_raw_fd(),
            Source::Server(server) => server.as_fd().as_raw_fd(),
        })
    }

    /// Closes the link: it takes no more items. Received samples and leases stay valid, and leases can
    /// still be answered. Closing twice is no error.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.handle.close(py)?;
        self.context.settle(py)
    }

    /// The next item. The iteration ends when the publisher closes gracefully, when the queue is shut
    /// down and its jobs are done, or when it closes gracefully.
    fn __next__(&self, py: Python<'_>) -> PyResult<Py<Frame>> {
        let is_graceful = |error: &PyErr| {
            let said = error.value(py).getattr("graceful");
            said.and_then(|said| said.is_truthy()).unwrap_or(false)
        };
        self.next_within(py, self.iteration, self.iteration)
            .map_err(|error| match is_graceful(&error) {
                true => PyStopIteration::new_err(()),
                false => error,
            })
    }
}
