//! Streams: the library's own, those of other frameworks, and the set of streams that use a piece
//! of memory.
//! **This module is marked for unsafe**: it borrows streams that other frameworks own.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, LazyLock, Mutex};

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyInt};

use crate::detached::{OwnStream, call};
use crate::device::{Device, is_cuda};
use crate::errors::{Fault, Outcome};
use crate::exclusive::locked;
use crate::process::Home;
use crate::torch;
use crate::wait::{Given, Limit, awaited};

/// More streams than this are not remembered: the table starts anew.
const KNOWN_MAX: usize = 256;

/// A stream of a device: the order of its work (``cuStreamCreate``, non-blocking; a thread on the
/// host).
///
/// ``Stream()`` belongs to the first GPU, else the host. Everything that takes a stream takes one
/// of these, a raw ``CUstream`` as an int (0 or 1: the legacy default stream, 2: the per-thread
/// one), anything with ``__cuda_stream__``, and the streams of PyTorch, CuPy and Numba; on the host
/// only one of these. A stream object is referenced while its work is waited for; a stream that is
/// given as an int has to last until everything made on it is dropped.
///
/// Raises ``DeviceError``.
#[pyclass(frozen, module = "warpipe")]
#[derive(Debug)]
pub struct Stream {
    home: Home,
    inner: OwnStream,
}

impl Stream {
    /// The stream, in the process that made it: in another process no thread serves it.
    pub fn inner(&self) -> Outcome<&OwnStream> {
        self.home.check()?;
        Ok(&self.inner)
    }
}

#[pymethods]
impl Stream {
    #[new]
    #[pyo3(signature = (device = None))]
    fn new(py: Python<'_>, device: Option<Device>) -> PyResult<Stream> {
        Ok(Stream {
            home: Home::here(),
            inner: OwnStream::new(py, &Device::or_preferred(device))?,
        })
    }

    /// Its device.
    #[getter]
    fn device(&self) -> Device {
        Device::of(self.inner.device())
    }

    /// The handle: a ``CUstream`` on CUDA.
    #[getter]
    fn ptr(&self) -> usize {
        self.inner.raw().0 as usize
    }

    /// Whether all work enqueued so far is done (``cuStreamQuery``).
    ///
    /// Raises ``DriverError``, also for a fault of earlier work.
    fn is_idle(&self, py: Python<'_>) -> PyResult<bool> {
        let inner = self.inner()?;
        call(py, || inner.is_idle())
    }

    /// Waits on the CPU until all work enqueued so far is done, at most ``timeout`` seconds (None:
    /// no limit).
    ///
    /// Raises ``TimeoutError``, ``DriverError``.
    #[pyo3(signature = (timeout = Limit::TEN), text_signature = "($self, timeout=10.0)")]
    fn synchronize(&self, py: Python<'_>, timeout: Limit) -> PyResult<()> {
        let stream = self.inner()?;
        awaited(py, timeout.0, |wait| stream.synchronize(wait))
    }

    /// Makes this stream wait until the work enqueued on ``other`` so far is done
    /// (``cuStreamWaitEvent``). No CPU waits.
    ///
    /// Raises ``ArgumentError`` for a stream of another device, ``DriverError``.
    fn wait_for(&self, py: Python<'_>, other: &Bound<'_, PyAny>) -> PyResult<()> {
        let inner = self.inner()?;
        let other = Consumer::from_argument(py, inner.device(), other)?;
        call(py, || inner.wait_for(&other.stream))
    }

    /// The CUDA stream protocol: ``(version, handle)``.
    fn __cuda_stream__(&self) -> PyResult<(u32, usize)> {
        if is_cuda(self.inner.device()) {
            return Ok((0, self.ptr()));
        }
        Err(Fault::argument("the stream", "one of the host", "one of a GPU").into())
    }
}

/// A stream that uses memory of this package.
///
/// A foreign stream is known by its number only, and nothing guarantees that it outlives the array
/// that was made on it, while a link has to query its streams when it ends. So a link is given
/// streams of this package, a *relay* for each foreign one, in the same order of work; the foreign
/// stream is used only when an array is made or dropped, or while the object that owns it is
/// referenced here. The legacy default stream and those of PyTorch's pool are never destroyed and
/// need no relay.
#[derive(Debug, Clone)]
pub struct Consumer {
    pub stream: OwnStream,
    relay: Option<OwnStream>,
    /// The owner of the stream, which destroys it when dropped: referenced until this is dropped.
    owner: Option<Arc<Py<PyAny>>>,
}

impl Consumer {
    /// A stream of this package.
    pub fn own(stream: &warpipe::Stream) -> Consumer {
        Consumer::of(&OwnStream::of(stream.clone()))
    }

    fn of(stream: &OwnStream) -> Consumer {
        Consumer {
            stream: stream.clone(),
            relay: None,
            owner: None,
        }
    }

    /// The stream of an argument, see [`Stream`].
    pub fn from_argument(
        py: Python<'_>,
        device: &warpipe::Device,
        found: &Bound<'_, PyAny>,
    ) -> PyResult<Consumer> {
        if let Ok(stream) = found.cast::<Stream>() {
            let stream = stream.get().inner()?;
            if stream.device().info().id != device.info().id {
                let allowed = format!("a stream of {device}");
                return Err(Fault::argument("stream", stream.device(), allowed).into());
            }
            return Ok(Consumer::of(stream));
        }
        match raw_of(found)? {
            Some(raw) if is_cuda(device) => {
                let consumer = Consumer::numbered(py, device, raw)?;
                Ok(if found.is_instance_of::<PyInt>() {
                    consumer
                } else {
                    consumer.owned_by(found)
                })
            }
            Some(_) => Err(Fault::argument("stream", found, "a warpipe.Stream of the host").into()),
            None => {
                let allowed = "a Stream, a raw CUstream, or a framework's stream";
                Err(Fault::argument("stream", found, allowed).into())
            }
        }
    }

    /// A GPU's stream by its number, as DLPack defines it: 0 and 1 are the legacy default stream, 2
    /// the per-thread one. If it is CuPy's current stream, the object is kept, because CuPy
    /// destroys the stream with it.
    pub fn foreign(py: Python<'_>, device: &warpipe::Device, raw: usize) -> PyResult<Consumer> {
        let consumer = Consumer::numbered(py, device, raw)?;
        if consumer.relay.is_some()
            && let Some(current) = cupy_current(py, device)?
            && current.getattr("ptr")?.extract::<usize>()? == raw
        {
            return Ok(consumer.owned_by(&current));
        }
        Ok(consumer)
    }

    fn owned_by(mut self, owner: &Bound<'_, PyAny>) -> Consumer {
        if self.relay.is_some() {
            self.owner = Some(Arc::new(owner.clone().unbind()));
        }
        self
    }

    /// Whether the stream may end before its users are dropped.
    pub fn may_end(&self) -> bool {
        self.relay.is_some() && self.owner.is_none()
    }

    /// The same of an argument that may be missing.
    pub fn optional(
        py: Python<'_>,
        device: &warpipe::Device,
        stream: Given<'_, '_>,
    ) -> PyResult<Option<Consumer>> {
        let find = |stream| Consumer::from_argument(py, device, stream);
        stream.map(find).transpose()
    }

    fn numbered(py: Python<'_>, device: &warpipe::Device, raw: usize) -> PyResult<Consumer> {
        // The per-thread stream is another one for each thread, and memory is dropped on any
        // thread. The legacy stream is ordered with all of those, before and after.
        let raw = if raw <= 2 { 0 } else { raw };
        let ordinal = device.info().ordinal;
        // A permanent stream stays permanent; a later owner of the same number has it from PyTorch,
        // too.
        if let Some(known) = known(&(ordinal, raw, true)) {
            return Ok(known);
        }
        let owns = |torch: Arc<torch::Torch>| torch.owns(py, ordinal, raw);
        let lasting = raw == 0 || torch::found(py)?.map_or(Ok(false), owns)?;
        let key = (ordinal, raw, lasting);
        if let Some(known) = known(&key) {
            return Ok(known);
        }
        // SAFETY: without a relay the stream is never destroyed; with one it is used only while an
        // array that was made on it is made or dropped, which the protocols require to be within
        // the stream's life.
        let stream =
            OwnStream::of(unsafe { warpipe::Stream::borrow_raw(device, raw as *mut c_void) });
        let relay = if lasting {
            None
        } else {
            Some(OwnStream::new(py, device)?)
        };
        let consumer = Consumer {
            stream,
            relay,
            owner: None,
        };
        let mut known = locked(&KNOWN);
        let forgotten = if known.len() >= KNOWN_MAX {
            std::mem::take(&mut *known)
        } else {
            HashMap::new()
        };
        // Another thread may have been faster: both then have the same stream.
        let ours = known.entry(key).or_insert_with(|| consumer.clone()).clone();
        drop(known);
        // Without the lock, as any drop that may block.
        drop((forgotten, consumer));
        Ok(ours)
    }

    /// The stream's number in DLPack.
    pub fn number(&self) -> usize {
        match self.stream.raw().0 as usize {
            0 => 1,
            raw => raw,
        }
    }

    /// Whether both are the same stream.
    pub fn is_same(&self, other: &Consumer) -> bool {
        self.stream.raw() == other.stream.raw()
    }

    /// The stream that a link is given.
    pub fn linked(&self) -> &warpipe::Stream {
        self.relay.as_ref().unwrap_or(&self.stream)
    }

    /// Orders the linked stream after all work that the consumer has enqueued so far.
    pub fn follow(&self, py: Python<'_>) -> Outcome<&warpipe::Stream> {
        if self.relay.is_none() {
            Ok(self.linked())
        } else {
            py.detach(|| self.followed())
        }
    }

    /// Orders the consumer after all work of the linked stream so far.
    pub fn lead(&self, py: Python<'_>) -> Outcome<()> {
        if self.relay.is_none() {
            Ok(())
        } else {
            py.detach(|| self.led())
        }
    }

    /// [`follow`](Self::follow). Call without the interpreter.
    pub fn followed(&self) -> Outcome<&warpipe::Stream> {
        if let Some(relay) = &self.relay {
            relay.wait_for(&self.stream)?;
        }
        Ok(self.linked())
    }

    /// [`lead`](Self::lead). Call without the interpreter.
    pub fn led(&self) -> Outcome<()> {
        if self.relay.is_some() {
            self.stream.wait_for(self.linked())?;
        }
        Ok(())
    }
}

/// The stream of an argument, or a new one.
pub fn stream_of(
    py: Python<'_>,
    device: &warpipe::Device,
    stream: Given<'_, '_>,
) -> PyResult<OwnStream> {
    let Some(stream) = stream else {
        return OwnStream::new(py, device);
    };
    let consumer = Consumer::from_argument(py, device, stream)?;
    Ok(consumer.relay.unwrap_or(consumer.stream))
}

type Known = HashMap<(u32, usize, bool), Consumer>;

static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);

fn known(key: &(u32, usize, bool)) -> Option<Consumer> {
    locked(&KNOWN).get(key).cloned()
}

/// A consumer of one piece of memory, and whether its stream may still be asked for its work.
#[derive(Debug, Clone)]
struct User {
    consumer: Consumer,
    /// Held while a stream that may end is queried, so that it does not end meanwhile. Taken only
    /// without the interpreter.
    asked: Arc<Mutex<()>>,
    /// Arrays that were made on it and are not dropped yet. When the last is dropped, the relay is
    /// ordered after the stream, which is not used after that.
    arrays: usize,
    /// Whether it was named without an array that reports its end: then it lasts until the memory
    /// is released.
    is_named: bool,
}

impl User {
    fn is(&self, consumer: &Consumer) -> bool {
        self.consumer.stream.raw() == consumer.stream.raw()
    }

    /// Whether its stream still exists.
    fn is_there(&self) -> bool {
        self.is_named || self.arrays > 0 || !self.consumer.may_end()
    }
}

/// All streams that use one piece of memory. The methods that query them are called without the
/// interpreter.
#[derive(Debug, Default)]
pub struct Consumers {
    list: Mutex<Vec<User>>,
}

impl Consumers {
    /// Records a consumer. Its stream lasts until the memory is released.
    pub fn note(&self, consumer: &Consumer) {
        self.with(consumer, |user| user.is_named = true);
    }

    /// Records a consumer that makes an array; `leave` reports the array's end.
    pub fn enter(&self, consumer: &Consumer) {
        self.with(consumer, |user| user.arrays += 1);
    }

    fn with(&self, consumer: &Consumer, change: impl FnOnce(&mut User)) {
        let mut list = locked(&self.list);
        let known = list.iter().position(|user| user.is(consumer));
        let at = known.unwrap_or_else(|| {
            list.push(User {
                consumer: consumer.clone(),
                asked: Arc::default(),
                arrays: 0,
                is_named: false,
            });
            list.len() - 1
        });
        let user = &mut list[at];
        // Dropped without the lock: the last reference to a stream of another framework may go.
        let owner = consumer.owner.clone();
        let before = owner.and_then(|owner| user.consumer.owner.replace(owner));
        change(user);
        drop(list);
        drop(before);
    }

    /// An array that was made on its stream is dropped.
    pub fn leave(&self, consumer: &Consumer) {
        let Some(user) = self.find(consumer).filter(|user| user.arrays > 0) else {
            return;
        };
        // After this call the stream may end: no thread is querying it then.
        let _asking = locked(&user.asked);
        // A stream that cannot be followed is queried again at the end, and then the memory stays.
        if user.consumer.followed().is_ok()
            && let Some(user) = locked(&self.list).iter_mut().find(|user| user.is(consumer))
        {
            user.arrays = user.arrays.saturating_sub(1);
        }
    }

    fn find(&self, consumer: &Consumer) -> Option<User> {
        let list = locked(&self.list);
        list.iter().find(|user| user.is(consumer)).cloned()
    }

    /// A stream for each, after all work that it has enqueued so far.
    pub fn followed(&self) -> Outcome<Vec<warpipe::Stream>> {
        let users = locked(&self.list).clone();
        let follow = |user: &User| self.follow(&user.consumer, &user.asked);
        users.iter().map(follow).collect()
    }

    /// A stream of the library that is after all work that the consumer has enqueued so far.
    fn follow(&self, consumer: &Consumer, asked: &Mutex<()>) -> Outcome<warpipe::Stream> {
        if !consumer.may_end() {
            return consumer.followed().cloned();
        }
        let _asking = locked(asked);
        if self.find(consumer).is_some_and(|user| user.is_there()) {
            return consumer.followed().cloned();
        }
        Ok(consumer.linked().clone())
    }

    /// A stream that is after all their work so far; none if there are no consumers.
    pub fn joined(&self) -> Outcome<Option<warpipe::Stream>> {
        behind_all(self.followed()?)
    }

    /// A stream that is after all their work so far: `otherwise` if there are no consumers.
    pub fn join(&self, otherwise: &warpipe::Stream) -> Outcome<warpipe::Stream> {
        Ok(self.joined()?.unwrap_or_else(|| otherwise.clone()))
    }
}

/// The number of another framework's stream; `None` if the object is no stream.
fn raw_of(found: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
    if found.is_instance_of::<PyInt>() {
        let wrong = |_| Fault::argument("stream", found, "a raw CUstream, which is an address");
        return Ok(Some(found.extract().map_err(wrong)?));
    }
    static RAW_OF: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let raw_of = RAW_OF.import(found.py(), "warpipe._devices", "raw_stream_of")?;
    raw_of.call1((found,))?.extract()
}

/// A stream behind all of these, one of them; none if there are none.
pub fn behind_all(streams: Vec<warpipe::Stream>) -> Outcome<Option<warpipe::Stream>> {
    let mut streams = streams.into_iter().rev();
    let Some(last) = streams.next() else {
        return Ok(None);
    };
    streams.try_for_each(|other| last.wait_for(&other))?;
    Ok(Some(last))
}

/// A module, if the program has imported it.
pub fn imported<'py>(py: Python<'py>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
    static MODULES: PyOnceLock<Py<PyDict>> = PyOnceLock::new();
    let found = MODULES.import(py, "sys", "modules")?.get_item(name)?;
    Ok(found.filter(|found| !found.is_none()))
}

/// PyTorch's current stream, if PyTorch is imported and uses the GPU.
pub fn torch_stream(py: Python<'_>, device: &warpipe::Device) -> PyResult<Option<usize>> {
    if !is_cuda(device) {
        return Ok(None);
    }
    torch::found(py)?.map_or(Ok(None), |torch| {
        torch.current_stream(py, device.info().ordinal)
    })
}

/// CuPy's current stream, if CuPy is imported.
pub fn cupy_stream(py: Python<'_>, device: &warpipe::Device) -> PyResult<Option<usize>> {
    let number = |stream: Bound<'_, PyAny>| stream.getattr("ptr")?.extract();
    cupy_current(py, device)?.map(number).transpose()
}

fn cupy_current<'py>(
    py: Python<'py>,
    device: &warpipe::Device,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let current = |cupy: Bound<'py, PyAny>| cupy.getattr("cuda")?.getattr("get_current_stream");
    let cupy = imported(py, "cupy")?.filter(|_| is_cuda(device));
    match cupy.map(current) {
        Some(Ok(current)) => current.call0().map(Some),
        // Also while another thread is in the middle of importing it.
        _ => Ok(None),
    }
}

/// All frameworks' current streams, and the legacy default one: the possible users of memory if no
/// stream is named.
pub fn likely(py: Python<'_>, device: &warpipe::Device) -> PyResult<Vec<Consumer>> {
    let named = [torch_stream(py, device)?, cupy_stream(py, device)?, Some(0)];
    let foreign = |raw| Consumer::foreign(py, device, raw);
    named.into_iter().flatten().map(foreign).collect()
}
