//! Kernel rings.

use pyo3::prelude::*;
use warpipe::Wait;

use crate::detached::call;
use crate::device::Device;
use crate::domain::{Domain, opened, place};
use crate::errors::{Fault, Outcome};
use crate::handle::{CloseableHandle, Named};
use crate::stream::{Consumer, Consumers};
use crate::wait::{Limit, WaitLimit};

/// A ring that kernels of two processes use from inside: the producer's kernel writes a slot and
/// publishes it, the consumers' kernels wait for it and release it, with no launch, no stream
/// operation and no CPU between items.
///
/// ``KernelRing.create(name)`` makes one as its producer, ``KernelRing.open(name)`` opens it as a
/// consumer. Kernels include ``warpipe/device.cuh`` of ``warpipe.include_dir()`` and give
/// ``ring.params(stream=stream)`` to ``warpipe_ring_open``. Or ``wait_on``, ``publish_on`` and ``release_on``
/// launch a tiny kernel each, which a CUDA graph may record and replay.
///
/// A wait of a kernel ends when the peer has closed the ring or is proven dead, when this side stops,
/// and after ``spin_limit`` looks. Both kernels must run at the same time: on two GPUs, or on one
/// under MPS, where a client that is killed in the middle of a kernel ends all clients. A graph is not
/// launched after ``close()``: it holds addresses of memory that is freed then.
#[pyclass(frozen, extends = Named, module = "warpipe")]
#[derive(Debug)]
pub struct KernelRing {
    handle: CloseableHandle<Ring>,
    /// The device of this side's kernels.
    #[pyo3(get)]
    device: Device,
    /// Whether this side writes the items.
    #[pyo3(get)]
    is_producer: bool,
    /// The number of slots.
    #[pyo3(get)]
    depth: u64,
    /// The bytes of a slot.
    #[pyo3(get)]
    slot_bytes: u64,
}

/// The ring, and the streams of other frameworks that its kernels were launched on.
#[derive(Debug)]
struct Ring {
    inner: warpipe::KernelRing,
    consumers: Consumers,
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.inner.stop();
        // The ring knows the streams that follow those of other frameworks: they are brought behind
        // the kernels on these. One that cannot be followed has ended, and its kernels with it.
        let _ = self.consumers.followed();
    }
}

type Capture = fn(&warpipe::KernelRing, &warpipe::Stream, &warpipe::Stream) -> warpipe::Result<()>;

impl KernelRing {
    fn new(
        py: Python<'_>,
        name: &str,
        device: Device,
        inner: warpipe::KernelRing,
    ) -> PyResult<Py<KernelRing>> {
        let info = inner.info();
        let ring = Ring {
            inner,
            consumers: Consumers::default(),
        };
        CloseableHandle::object(py, "kernel ring", name, ring, |handle| KernelRing {
            handle,
            device,
            is_producer: info.is_producer,
            depth: info.depth,
            slot_bytes: info.slot_bytes,
        })
    }

    /// Has the ring launch a kernel on a stream; `capture` does so on a stream of another framework
    /// that is being captured, where the ring records the last of its arguments.
    fn step(
        &self,
        py: Python<'_>,
        stream: &Bound<'_, PyAny>,
        step: fn(&warpipe::KernelRing, &warpipe::Stream) -> warpipe::Result<()>,
        capture: Capture,
    ) -> PyResult<()> {
        let ring = self.handle.get()?;
        let consumer = Consumer::from_argument(py, &self.device, stream)?;
        let linked = match consumer.follow(py) {
            Ok(linked) => linked,
            // No other stream of ours may join the capture, so the step is recorded there itself.
            Err(Fault::Library(warpipe::Error::State(warpipe::StateFault::Capturing(_)))) => {
                ring.consumers.note(&consumer);
                let captured = || capture(&ring.inner, &consumer.stream, consumer.linked());
                return call(py, captured);
            }
            Err(other) => return Err(other.into()),
        };
        call(py, || step(&ring.inner, linked))?;
        Ok(consumer.lead(py)?)
    }
}

#[pymethods]
impl KernelRing {
    /// Makes a ring as its producer, and takes its name, which is free again when the ring was closed and
    /// its kernels are done. ``depth``: slots, a power of two up to 1024.
    /// ``slot_bytes``: bytes of each, rounded up to a multiple of 128. ``consumers``: 1 to 8, each of
    /// which gets every item. ``spin_limit``: looks at a word after which a kernel's wait ends, 2**26
    /// by default. ``allow_time_slices``: two of its processes may use one GPU without MPS, where a kernel
    /// that waits uses up its slice of time. ``allow_uids``, ``allow_gids``: users and groups that may
    /// open it beside this process's own user.
    ///
    /// Raises ``ArgumentError``, ``InvalidNameError``, ``NameTakenError``, ``DomainError``,
    /// ``DeviceMemoryError``, ``DeviceError``.
    #[staticmethod]
    #[pyo3(signature = (name, *, depth = 8, slot_bytes = 4096, consumers = 1, spin_limit = None,
            allow_time_slices = false, domain = None, device = None, allow_uids = Vec::new(), allow_gids = Vec::new()),
        text_signature = "(name, *, depth=8, slot_bytes=4096, consumers=1, spin_limit=None, allow_time_slices=False, domain=None, device=None, allow_uids=(), allow_gids=())")]
    fn create(
        py: Python<'_>,
        name: &str,
        depth: u32,
        slot_bytes: u64,
        consumers: u32,
        spin_limit: Option<u64>,
        allow_time_slices: bool,
        domain: Option<Domain>,
        device: Option<Device>,
        allow_uids: Vec<u32>,
        allow_gids: Vec<u32>,
    ) -> PyResult<Py<KernelRing>> {
        let (domain, device) = place(domain, device)?;
        let default: warpipe::KernelRingOptions = domain.on(&device);
        let options = warpipe::KernelRingOptions {
            depth,
            slot_bytes,
            consumers,
            spin_limit: spin_limit.unwrap_or(default.spin_limit),
            allow_time_slices,
            allow_uids,
            allow_gids,
            ..default
        };
        let made = call(py, || warpipe::KernelRing::new(name, options))?;
        KernelRing::new(py, name, device, made)
    }

    /// Opens a ring as a consumer, waiting up to ``wait`` seconds (None: no limit) until it exists.
    ///
    /// Raises ``NotFoundError``, ``OtherKindError``, ``AccessDeniedError``, ``HandshakeError``,
    /// ``RefusedError`` by a ring that has its consumers, has started, or has one of another process on
    /// this GPU without MPS, ``ArgumentError`` for the producer's GPU without MPS, ``DeviceError``.
    #[staticmethod]
    #[pyo3(signature = (name, *, domain = None, device = None, wait = WaitLimit::ZERO),
        text_signature = "(name, *, domain=None, device=None, wait=0.0)")]
    fn open(
        py: Python<'_>,
        name: &str,
        domain: Option<Domain>,
        device: Option<Device>,
        wait: WaitLimit,
    ) -> PyResult<Py<KernelRing>> {
        let open = |options, wait: Wait<'_>| warpipe::KernelRing::open(name, options, wait);
        let (ring, device) = opened(py, (domain, device), wait, open)?;
        KernelRing::new(py, name, device, ring)
    }

    /// The address of a slot, for work between two steps. A consumer may only read it. Item ``n`` lies
    /// in slot ``n % depth``.
    ///
    /// Raises ``ArgumentError``, ``ClosedError``.
    fn slot(&self, index: u64) -> PyResult<u64> {
        let ring = self.handle.get()?;
        Ok(ring.inner.slot(index).map_err(Fault::from)?)
    }

    /// The producer: waits up to ``timeout`` seconds (None: no limit) for every consumer; then the ring
    /// starts, and admits no other one. A consumer returns at once.
    ///
    /// Raises ``TimeoutError``, ``ClosedError``, ``DriverError``.
    #[pyo3(signature = (timeout = Limit::TEN), text_signature = "($self, timeout=10.0)")]
    fn wait_for_consumers(&self, py: Python<'_>, timeout: Limit) -> PyResult<()> {
        self.handle.wait(py, timeout.0, |ring, wait| {
            ring.inner.wait_for_consumers(wait)
        })
    }

    /// The address of the parameter block, for kernels on ``stream`` and for graphs that are launched
    /// there. The ring's memory lasts until the kernels that the stream has at ``close`` are done; each
    /// stream needs a call of its own.
    ///
    /// Raises ``ArgumentError``, also before ``wait_for_consumers``; ``ClosedError``.
    #[pyo3(signature = (*, stream))]
    fn params(&self, py: Python<'_>, stream: &Bound<'_, PyAny>) -> PyResult<u64> {
        let ring = self.handle.get()?;
        let consumer = Consumer::from_argument(py, &self.device, stream)?;
        let params = ring.inner.params(consumer.linked()).map_err(Fault::from)?;
        ring.consumers.note(&consumer);
        Ok(params)
    }

    /// Has ``stream`` wait for the next item, or a producer's for the next free slot, by a kernel of one
    /// thread. If the wait ends without it, no later step of this side does anything, and ``check``
    /// raises.
    ///
    /// Raises ``ArgumentError``, ``ClosedError``, ``DriverError``.
    #[pyo3(signature = (*, stream))]
    fn wait_on(&self, py: Python<'_>, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        let capture: Capture = warpipe::KernelRing::capture_wait;
        self.step(py, stream, warpipe::KernelRing::wait_on, capture)
    }

    /// The producer: publishes the item that ``wait_on`` waited for, behind the work on ``stream`` so
    /// far. Without such a wait it does nothing.
    ///
    /// Raises as ``wait_on``.
    #[pyo3(signature = (*, stream))]
    fn publish_on(&self, py: Python<'_>, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        let capture: Capture = |ring, stream, user| ring.capture_pass(true, stream, user);
        self.step(py, stream, warpipe::KernelRing::publish_on, capture)
    }

    /// A consumer: releases the item that ``wait_on`` waited for, behind the work on ``stream`` so far.
    ///
    /// Raises as ``wait_on``.
    #[pyo3(signature = (*, stream))]
    fn release_on(&self, py: Python<'_>, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        let capture: Capture = |ring, stream, user| ring.capture_pass(false, stream, user);
        self.step(py, stream, warpipe::KernelRing::release_on, capture)
    }

    /// Returns if every finished wait of a ``wait_on`` was given its item. Synchronize the stream
    /// first.
    ///
    /// Raises ``PeerGoneError``, ``LinkClosedError``, ``ClosedError``.
    fn check(&self) -> PyResult<()> {
        Ok(self.handle.get()?.inner.check().map_err(Fault::from)?)
    }

    /// Has this side's kernels return from their waits. ``close()`` does so, too.
    ///
    /// Raises ``ClosedError``.
    fn stop(&self) -> PyResult<()> {
        Ok(Outcome::Ok(self.handle.get()?.inner.stop())?)
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_package_has_the_librarys_header() {
        let ours = include_str!("../python/warpipe/include/warpipe/device.cuh");
        assert_eq!(
            ours,
            warpipe::KernelRing::HEADER,
            "run `cargo xtask ring-header`, and commit it"
        );
    }
}
