//! `Publisher`.

use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyMapping;
use warpipe::{Error, Layout, PeerState, Policy, SampleMut};

use crate::copies::CopyContext;
use crate::detached::{DropDetached, OwnStream, call};
use crate::device::Device;
use crate::domain::{Domain, place};
use crate::dtype;
use crate::errors::{Fault, Outcome};
use crate::frame;
use crate::handle::{CloseableHandle, Named};
use crate::in_place::{self, NotInPlace, PublishedPool, ZeroCopy};
use crate::loan::{Loan, Slot};
use crate::metadata::Metadata;
use crate::source::{Source, Wanted};
use crate::stream::{Consumer, behind_all};
use crate::tuples::{self, Info};
use crate::wait::{Given, HELD_UP, Limit, Seconds, optional, seconds, until, waiting};

/// Publishes tensors in device memory to any number of subscribers.
///
/// ``name``: 1 to 80 bytes of ``a-z A-Z 0-9 _ - .`` in parts joined by ``/``. ``device``: the
/// device of the tensors' memory (default: the first GPU, else the host). ``depth``: how many
/// frames each subscriber may hold unreleased, 1 to 4096. ``policy``: the reaction to a subscriber
/// that holds that many: ``"block"`` (``send`` waits ``timeout`` seconds, None: no limit),
/// ``"drop_oldest"``, ``"drop_newest"``, ``"fail"``. A ``send`` of another thread that the driver
/// blocks is waited for as long, with the other policies at least 10 s. ``history``: how many of
/// the last frames a late subscriber gets first. ``timestamps``: whether frames say when they were
/// sent and received. ``memory_limit``: bytes of device memory,
/// allocated as needed. ``loan_timeout``: seconds to wait for memory that is in use.
/// ``evict_after``: seconds of silence after which a subscriber loses its link.
/// ``subscribers_max``: the most at once, of which half may be of one other user, and a quarter, or
/// 64, of one other process. ``allow_uids``, ``allow_gids``: users and groups that are admitted
/// beside this user.
///
/// Any number of threads may use it. ``close()``, the end of a ``with`` block, or dropping it
/// closes gracefully.
///
/// Raises ``InvalidNameError``, ``NameTakenError``, ``ForeignFileError``, ``DomainError``,
/// ``ArgumentError``, ``DeviceError``.
#[pyclass(frozen, extends = Named, module = "warpipe")]
#[derive(Debug)]
pub struct Publisher {
    pub handle: CloseableHandle<warpipe::Publisher>,
    /// Its limit is that of `send`'s wait for room.
    context: CopyContext,
    pool: PublishedPool,
    /// The reaction to a subscriber that holds ``depth`` frames: ``"block"``, ``"drop_oldest"``,
    /// ``"drop_newest"`` or ``"fail"``.
    #[pyo3(get)]
    policy: String,
    /// How many frames a subscriber may have received and not released.
    #[pyo3(get)]
    depth: u32,
    /// How many of the last frames a late subscriber gets first.
    #[pyo3(get)]
    history: u32,
    /// The limit of the whole wait: with a policy that does not wait for room, for another thread's
    /// send.
    patience: Option<Duration>,
    loan_timeout: Option<Duration>,
}

/// Tensors to be sent, with their names if they are several.
type Sources<'a> = Vec<(&'a str, Source)>;

/// The name of a peer's state.
pub fn word_of(state: PeerState) -> &'static str {
    match state {
        PeerState::Alive => "alive",
        PeerState::Stalled => "stalled",
        PeerState::Leaving => "leaving",
        PeerState::Suspect => "suspect",
        PeerState::Dead => "dead",
        _ => "unknown",
    }
}

/// The policy of this name.
fn policy_of(name: &str) -> Outcome<Policy> {
    Ok(match name {
        // `dispatch` waits, and sees signals meanwhile.
        "block" => Policy::Block {
            timeout: Duration::ZERO,
        },
        "drop_oldest" => Policy::DropOldest,
        "drop_newest" => Policy::DropNewest,
        "fail" => Policy::Fail,
        _ => {
            let allowed = "\"block\", \"drop_oldest\", \"drop_newest\" or \"fail\"";
            return Err(Fault::argument("policy", format!("{name:?}"), allowed));
        }
    })
}

impl Publisher {
    /// How many tensors that were sent where they lie are kept.
    fn in_place_now(&self) -> Outcome<usize> {
        let open = self.handle.open()?;
        open.map_or(Ok(0), |publisher| Ok(publisher.stats()?.in_place))
    }

    /// A slot, waiting for one up to the loan's timeout: for several tensors by their names, or for
    /// the first of `parts`.
    fn take(&self, py: Python<'_>, parts: &[(&str, Layout)], several: bool) -> PyResult<Slot> {
        let handle = &self.handle;
        let sample = handle.wait(py, self.loan_timeout, |publisher, wait| match parts {
            [(_, layout)] if !several => publisher.loan_within(layout, wait),
            parts => publisher.loan_parts_within(parts, wait),
        })?;
        Ok(Slot::Sample(DropDetached::new(sample)))
    }

    /// A loan for Python.
    fn lend(
        &self,
        py: Python<'_>,
        parts: &[(&str, Layout)],
        several: bool,
        metadata: Option<Metadata>,
    ) -> PyResult<Py<Outgoing>> {
        let mut slot = self.take(py, parts, several)?;
        slot.set_metadata(metadata)?;
        let context = CopyContext {
            patience: self.patience,
            ..self.context.clone()
        };
        Py::new(py, Loan::new(slot, &context).add_subclass(Outgoing))
    }

    /// Copies tensors into a slot, and sends it.
    fn send_copies(
        &self,
        py: Python<'_>,
        sources: Sources<'_>,
        several: bool,
        metadata: Option<Metadata>,
    ) -> PyResult<u64> {
        let layouts = sources.iter().map(|(name, source)| (*name, source.layout));
        let mut slot = self.take(py, &layouts.collect::<Vec<_>>(), several)?;
        slot.set_metadata(metadata)?;
        // The slot stays behind the copies on each stream, whatever fails.
        let mut last = (*self.context.stream).clone();
        for (name, source) in sources {
            let mut target = slot.target(several.then_some(name))?;
            last = self.context.fill(py, &mut target, source)?;
        }
        dispatch(py, slot, &last, self.patience)
    }

    /// Sends tensors where they lie, if all of them can be.
    fn send_in_place(
        &self,
        py: Python<'_>,
        sources: Sources<'_>,
        several: bool,
        metadata: Option<Metadata>,
        stream: Option<&Consumer>,
    ) -> PyResult<Result<u64, NotInPlace>> {
        let readers = sources.iter();
        let readers = readers.filter_map(|(_, source)| source.reader.as_ref().or(stream).cloned());
        let readers: Vec<Consumer> = readers.collect();
        let publisher = self.handle.get()?;
        let lent = if several {
            let Slot::Sample(mut loan) = self.take(py, &[], true)? else {
                unreachable!("a publisher's slot is a sample's")
            };
            py.detach(|| {
                let mut sources = sources.into_iter();
                let add = |(name, source)| in_place::add_part(&mut loan, name, source, &self.pool);
                sources.try_for_each(add).map(|()| loan)
            })
        } else {
            let source = sources.into_iter().next().expect("there is one").1;
            let lent = py.detach(|| in_place::loan(&publisher, source, &self.pool));
            lent.map(DropDetached::new)
        };
        let set = |mut loan: DropDetached<SampleMut>| {
            let metadata = metadata.as_ref().map_or(&[][..], |metadata| &metadata.0);
            in_place::set_metadata(&mut loan, metadata).map(|()| loan)
        };
        let loan = match lent.and_then(set) {
            Ok(loan) => loan,
            Err(why) => return Ok(Err(why)),
        };
        let behind = py.detach(|| {
            let streams = readers.iter().map(|reader| reader.followed().cloned());
            let behind = behind_all(streams.collect::<Outcome<_>>()?)?;
            Outcome::Ok(behind.unwrap_or_else(|| (*self.context.stream).clone()))
        })?;
        dispatch(py, Slot::Sample(loan), &behind, self.patience).map(Ok)
    }
}

/// Warns why a tensor is copied in spite of `zero_copy`.
fn warn_of_copy(py: Python<'_>, why: PyErr) -> PyResult<()> {
    let words = py.import("warpipe._tensors")?;
    words.call_method1("warn_of_copy", (why,)).map(drop)
}

#[pymethods]
impl Publisher {
    #[new]
    #[pyo3(signature = (name, *, domain = None, device = None, depth = 16, policy = "block", timeout = Seconds(5.0),
        history = 0, timestamps = false, memory_limit = 4 << 30, loan_timeout = Seconds(5.0), evict_after = None, subscribers_max = 256,
        handshake_timeout = Seconds(5.0), allow_uids = Vec::new(), allow_gids = Vec::new()),
        text_signature = "(name, *, domain=None, device=None, depth=16, policy='block', timeout=5.0, history=0, \
        timestamps=False, memory_limit=4294967296, loan_timeout=5.0, evict_after=None, subscribers_max=256, \
        handshake_timeout=5.0, allow_uids=(), \
        allow_gids=())")]
    fn new(
        py: Python<'_>,
        name: &str,
        domain: Option<Domain>,
        device: Option<Device>,
        depth: u32,
        policy: &str,
        timeout: Option<Seconds>,
        history: u32,
        timestamps: bool,
        memory_limit: u64,
        loan_timeout: Option<Seconds>,
        evict_after: Option<Seconds>,
        subscribers_max: u32,
        handshake_timeout: Seconds,
        allow_uids: Vec<u32>,
        allow_gids: Vec<u32>,
    ) -> PyResult<PyClassInitializer<Publisher>> {
        let (domain, device) = place(domain, device)?;
        let block = optional(timeout, "timeout")?;
        let loan_timeout = optional(loan_timeout, "loan_timeout")?;
        let chosen = policy_of(policy)?;
        let blocks = matches!(chosen, Policy::Block { .. });
        let patience = block.map(|block| if blocks { block } else { block.max(HELD_UP) });
        let publications = warpipe::PublishOptions {
            allow_uids: allow_uids.clone(),
            allow_gids: allow_gids.clone(),
            ..domain.options()
        };
        let options = warpipe::PublisherOptions {
            depth,
            policy: chosen,
            history,
            timestamps,
            memory_limit,
            evict_after: optional(evict_after, "evict_after")?,
            subscribers_max,
            handshake_timeout: seconds(handshake_timeout, "handshake_timeout")?,
            allow_uids,
            allow_gids,
            ..domain.on(&device)
        };
        let stream = OwnStream::new(py, &device)?;
        let made = call(py, || warpipe::Publisher::new(name, options))?;
        let handle = CloseableHandle::new("publisher", name, made)?;
        Ok(handle.named().add_subclass(Publisher {
            handle,
            context: CopyContext::new(device.inner, stream, block),
            policy: policy.to_owned(),
            depth,
            history,
            patience,
            loan_timeout,
            pool: PublishedPool::new(publications),
        }))
    }

    /// Its device.
    #[getter]
    fn device(&self) -> Device {
        Device::of(&self.context.device)
    }

    /// How many seconds ``send`` waits for room; None for no limit.
    #[getter]
    fn timeout(&self) -> Option<f64> {
        self.context.patience.map(|block| block.as_secs_f64())
    }

    /// Copies a tensor into a slot and sends it to every subscriber. Returns its sequence number,
    /// from 1.
    ///
    /// ``tensor`` is anything with ``__dlpack__``, ``__array_interface__`` or
    /// ``__cuda_array_interface__`` (PyTorch, CuPy, JAX, NumPy, Numba, ...), or bytes. On a GPU it
    /// is copied on ``stream``, by default the current stream of its framework, and may be changed
    /// in that stream's order; no CPU waits. On the host it may be changed at once. A tensor
    /// without gaps keeps its strides; one with gaps is gathered, on its own device.
    ///
    /// A mapping of names to tensors, at most 127, goes as one message, which arrives as
    /// ``SampleParts``. With ``zero_copy`` all of them are sent in place, or all are copied.
    ///
    /// ``metadata``: a dict (as JSON) or any buffer, at most 4,096 bytes, less what describes
    /// several tensors, or one in place.
    ///
    /// ``zero_copy``: nothing is copied; subscribers read the tensor in place, and it is kept until
    /// all of them have released it: see ``in_place``. Do not write it before. It must lie in
    /// memory of ``warpipe.torch.pool()``, which subscribers map read-only and have as long as they
    /// use it; or in memory of ``cudaMalloc``, as PyTorch's caching allocator's does, which they
    /// open by a legacy handle. A tensor in host, pooled or ``expandable_segments`` memory is
    /// copied, with a ``CopyWarning`` that says why, or is an error with ``zero_copy="require"``.
    /// The whole allocation around it is accessible to subscribers: memory of ``cudaMalloc`` must
    /// not go back to the driver while they exist.
    ///
    /// Raises ``NotATensorError``, ``DTypeError``, ``LayoutError``, ``WrongDeviceError``,
    /// ``MetadataError``; ``NotExportableError``, ``ExportError`` with ``"require"``;
    /// ``TimeoutError`` or ``FullError`` by the policy; ``MemoryLimitError``, ``ClosedError``,
    /// ``DriverError``.
    #[pyo3(signature = (tensor, *, metadata = None, stream = None, zero_copy = ZeroCopy::No),
        text_signature = "($self, tensor, *, metadata=None, stream=None, zero_copy=False)")]
    fn send(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        metadata: Option<Metadata>,
        stream: Given<'_, '_>,
        zero_copy: ZeroCopy,
    ) -> PyResult<u64> {
        self.handle.get()?;
        let stream = Consumer::optional(py, &self.context.device, stream)?;
        let several = tensor.cast::<PyMapping>().ok();
        let several: Option<Vec<(String, Bound<'_, PyAny>)>> = several
            .map(|mapping| frame::items("tensor", mapping))
            .transpose()?;
        let is_several = several.is_some();
        let find = |lasting| -> PyResult<Sources<'_>> {
            let wanted = Wanted {
                lasting,
                ..self.context.wanted(stream.as_ref())
            };
            match &several {
                None => Ok(vec![("", wanted.find(tensor)?)]),
                Some(all) => all
                    .iter()
                    .map(|(name, one)| Ok((&**name, frame::noted(py, name, wanted.find(one))?)))
                    .collect(),
            }
        };
        if zero_copy != ZeroCopy::No {
            let sources = find(true)?;
            let bytes = sources.iter().map(|(_, source)| source.layout.bytes());
            let bytes = bytes.sum();
            let data = metadata.clone();
            match self.send_in_place(py, sources, is_several, data, stream.as_ref())? {
                Ok(sequence) => return Ok(sequence),
                Err(why) if zero_copy == ZeroCopy::Require => return Err(why.fault.into()),
                Err(why) => {
                    let publisher = self.handle.get()?;
                    call(py, || publisher.count_copy(why.reason, bytes))?;
                    warn_of_copy(py, why.fault.into())?;
                }
            }
        }
        self.send_copies(py, find(false)?, is_several, metadata)
    }

    /// Lends a slot for a tensor of this shape and element type, to be filled in place: see
    /// ``SampleMut``. ``dtype`` is a name (``"float32"``, ``"bfloat16"``, ...) or a dtype of NumPy,
    /// ml_dtypes, PyTorch or JAX.
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
    ) -> PyResult<Py<Outgoing>> {
        self.handle.get()?;
        let layout = dtype::layout(shape, dtype)?;
        self.lend(py, &[("", layout)], false, metadata)
    }

    /// Lends a slot for several tensors, to be filled in place and sent as one message. ``parts``:
    /// a mapping of names to ``(shape, dtype)``. ``out[name]`` is a ``Part``, and ``out[name] =
    /// tensor`` copies one in, until it is sent.
    ///
    /// Raises as ``loan``, and ``ArgumentError`` for names that are empty or too long.
    #[pyo3(signature = (parts, *, metadata = None))]
    fn loan_parts(
        &self,
        py: Python<'_>,
        parts: &Bound<'_, PyMapping>,
        metadata: Option<Metadata>,
    ) -> PyResult<Py<Outgoing>> {
        self.handle.get()?;
        type Described<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>);
        let described: Vec<(String, Described<'_>)> = frame::items("parts", parts)?;
        let layouts = described
            .iter()
            .map(|(name, (shape, dtype))| Ok((&**name, dtype::layout(shape, dtype)?)));
        let layouts: Vec<(&str, Layout)> = layouts.collect::<PyResult<_>>()?;
        self.lend(py, &layouts, true, metadata)
    }

    /// How many tensors that were sent with ``zero_copy`` are still kept, because a subscriber may
    /// be reading them. Those that are free again are dropped by this call, if not before.
    ///
    /// Raises ``ForkedError``.
    #[getter]
    fn in_place(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(py.detach(|| self.in_place_now())?)
    }

    /// All subscribers, and their states.
    ///
    /// Raises ``ClosedError``.
    #[getter]
    fn subscribers(&self, py: Python<'_>) -> PyResult<Vec<Info<warpipe::SubscriberInfo>>> {
        let found = py.detach(|| Outcome::Ok(self.handle.get()?.subscribers()))?;
        Ok(found.into_iter().map(Info).collect())
    }

    /// Waits until ``count`` subscribers are attached, at most ``timeout`` seconds (None: no
    /// limit).
    ///
    /// Raises ``TimeoutError``, ``ClosedError``.
    #[pyo3(signature = (count = 1, timeout = Limit::TEN), text_signature = "($self, count=1, timeout=10.0)")]
    fn wait_for_subscribers(&self, py: Python<'_>, count: usize, timeout: Limit) -> PyResult<()> {
        self.handle.wait(py, timeout.0, |publisher, wait| {
            publisher.wait_for_subscribers(count, wait)
        })
    }

    /// Device memory allocated so far and its limit, in bytes: a ``MemoryUse``.
    ///
    /// Raises ``ClosedError``.
    #[getter]
    fn memory_in_use<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let stats = py.detach(|| Outcome::Ok(self.handle.get()?.stats()?))?;
        tuples::memory_use(py, (stats.memory_bytes, stats.memory_limit))
    }

    /// Releases the name and closes gracefully. Sent frames can still be received. Closing twice is
    /// no error.
    /// Waits, as long as ``send`` waits for room, for tensors that were sent with ``zero_copy``;
    /// those that are still read after that are kept until they are not.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if let Some(open) = self.handle.open()? {
            // Which would keep tensors for subscribers to come.
            call(py, move || open.end_history())?;
        }
        until(py, self.context.patience, || Ok(self.in_place_now()? == 0))?;
        py.detach(|| self.pool.clear());
        self.handle.close(py)?;
        self.context.settle(py)
    }
}

/// Sends the sample after `stream`'s work. It waits `patience` at most (None: no limit), for room
/// where the policy blocks, and for another thread's send that the driver blocks. Ctrl-C ends the
/// wait: then nothing was sent.
pub fn dispatch(
    py: Python<'_>,
    slot: Slot,
    stream: &warpipe::Stream,
    patience: Option<Duration>,
) -> PyResult<u64> {
    let sample = match slot {
        Slot::Sample(sample) => sample.into_inner(),
        Slot::Work(_) => {
            return Err(Fault::argument("the loan", "a queue's", "a publisher's").into());
        }
    };
    let goes_on = || Ok(());
    waiting(py, patience, goes_on, |wait| {
        let unsent = match sample.send_within(stream, wait) {
            Ok(sequence) => return Ok(sequence),
            Err(unsent) => unsent,
        };
        if let Some(sample) = unsent.returned {
            // Work that fills the slot may still be pending.
            let _ = sample.discard(stream);
        }
        Err(match unsent.error {
            // The loan's own publisher, which was closed here.
            Error::PeerGone { name, .. } => Fault::closed("publisher", &name),
            error => error.into(),
        })
    })
}

/// A slot on loan: memory of the publisher's device that has no reader yet, to be filled in place.
///
/// In ``with publisher.loan(shape, dtype) as out:`` the end of the block sends it, or discards it
/// if the block raises. Fill it as any ``Loan``.
#[pyclass(frozen, extends = Loan, module = "warpipe", name = "SampleMut")]
#[derive(Debug)]
pub struct Outgoing;

#[pymethods]
impl Outgoing {
    /// Sends it to every subscriber, after the work of all streams that arrays of it were made on,
    /// and of ``stream``. Returns its sequence number, from 1. Does not wait for the device. If it
    /// raises, the loan is gone.
    ///
    /// Raises ``TimeoutError`` or ``FullError`` by the publisher's policy, ``ClosedError``,
    /// ``ReleasedError``, ``DriverError``.
    #[pyo3(signature = (*, stream = None), text_signature = "($self, *, stream=None)")]
    fn send(slf: &Bound<'_, Outgoing>, stream: Given<'_, '_>) -> PyResult<u64> {
        let (py, loan) = (slf.py(), slf.as_super().get());
        let (slot, stream) = loan.take_out(py, stream)?;
        dispatch(py, slot, &stream, loan.context.patience)
    }
}
