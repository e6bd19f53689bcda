//! `View`: memory as a tensor, the base of all objects that own memory.
//! **This module is marked for unsafe**: it writes memory by address.

use std::sync::Arc;

use pyo3::PyClass;
use pyo3::prelude::*;
use warpipe::{DType, Layout};

use crate::copies::CopyContext;
use crate::dtype;
use crate::errors::{Fault, Outcome};
use crate::memory::{Memory, MemoryHolder};
use crate::memory_owner::{DEFAULT_TIMEOUT, MemoryOwner, OwnedMemory, Range, await_stream};
use crate::source::Wanted;
use crate::stream::Consumer;
use crate::tensor::{Held, Holding};
use crate::wait::{Given, Limit};

/// A tensor in held memory, as ``view(shape, dtype)`` gives it. ``Memory``, ``SharedMemory``,
/// ``Buffer``, ``LentBuffer`` and ``LegacyMemory`` are views of their bytes.
///
/// It is an array of any framework: ``torch()``, ``cupy()``, ``jax()``, ``numpy()`` (a copy of GPU
/// memory), or any consumer of DLPack or ``__cuda_array_interface__``; ``copy_from(tensor)`` copies
/// any tensor in. The memory stays while this object, a view, or an array of them lives, and is
/// released after the work that the streams of those arrays have been given by then. Its users
/// order their writes, with a ``Timeline`` for example.
#[pyclass(frozen, subclass, extends = Held, module = "warpipe")]
#[derive(Debug)]
pub struct View {
    pub tensor: Arc<Holding>,
}

impl View {
    /// All of it, as bytes.
    pub fn of(what: &'static str, place: OwnedMemory) -> Outcome<PyClassInitializer<View>> {
        let (lowest, bytes, read_only) = place.range();
        let device = place.device();
        let layout = Layout::contiguous(DType::U8, &[bytes])?;
        let hold = MemoryHolder::Owned(Arc::new(MemoryOwner::new(place)));
        let memory = Memory {
            layout,
            lowest,
            device,
            read_only,
            hold,
        };
        Ok(View::over(what, memory))
    }

    /// An object of a class of such memory.
    pub fn object<'py, C: PyClass<BaseType = View>>(
        py: Python<'py>,
        what: &'static str,
        place: OwnedMemory,
        class: C,
    ) -> PyResult<Bound<'py, C>> {
        Bound::new(py, View::of(what, place)?.add_subclass(class))
    }

    /// A tensor of held memory.
    pub fn over(what: &'static str, memory: Memory) -> PyClassInitializer<View> {
        let tensor = Holding::new(what, None, None, memory);
        Held::of(&tensor).add_subclass(View { tensor })
    }

    /// The held memory.
    pub fn owner(&self) -> Outcome<Arc<MemoryOwner>> {
        match self.tensor.memory()?.hold {
            MemoryHolder::Owned(owner) => Ok(owner),
            _ => unreachable!("a view is of held memory"),
        }
    }

    fn check_writable(&self) -> Outcome<()> {
        let next = "memory given for writing; ask its owner to share it for writing, too";
        match self.tensor.read_only {
            true => Err(Fault::argument("memory", "given for reading", next)),
            false => Ok(()),
        }
    }
}

#[pymethods]
impl View {
    /// Whether it is read only.
    #[getter]
    fn read_only(&self) -> bool {
        self.tensor.read_only
    }

    /// The same memory as a tensor of this shape and element type, row-major, from byte ``offset``
    /// on.
    ///
    /// Raises ``ArgumentError``, ``LayoutError``, ``DTypeError``, ``ReleasedError``.
    #[pyo3(signature = (shape, dtype, offset = 0))]
    fn view(
        &self,
        py: Python<'_>,
        shape: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
        offset: u64,
    ) -> PyResult<Py<View>> {
        let memory = self.tensor.memory()?;
        let layout = Layout::contiguous(dtype::from_argument(dtype)?, &dtype::shape(shape)?)
            .map_err(Fault::from)?;
        let (bytes, available) = (layout.bytes(), self.tensor.layout.bytes());
        check_range(self.tensor.what, offset, bytes, available)?;
        let lowest = memory.lowest + offset;
        if !lowest.is_multiple_of(layout.dtype().bytes()) {
            let width = layout.dtype().bytes();
            let said = format!("elements of {width} bytes do not begin at byte {offset}");
            return Err(Fault::layout(said).into());
        }
        let memory = Memory {
            layout,
            lowest,
            ..memory
        };
        Py::new(py, View::over("the view", memory))
    }

    /// Copies a tensor of the same shape and element type in, on ``stream``, by default the current
    /// stream of the tensor's framework. The tensor may be changed in that stream's order; a host
    /// tensor at once, unless it is a ``View`` and a stream is given. A copy from the host without a
    /// stream is complete when this returns. A tensor that overlaps this memory is read before the
    /// memory is written; a GPU allocates as much memory again for that, for a moment.
    ///
    /// Raises ``LayoutError``, ``DTypeError``, ``NotATensorError``, ``WrongDeviceError``,
    /// ``ArgumentError``, also for read-only memory, ``ReleasedError``, ``DriverError``, ``TimeoutError``
    /// if the work before it takes over 10 s; the copy is still done then.
    #[pyo3(signature = (tensor, *, stream = None))]
    fn copy_from(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        stream: Given<'_, '_>,
    ) -> PyResult<()> {
        self.check_writable()?;
        let (memory, owner) = (self.tensor.memory()?, self.owner()?);
        let consumer = Consumer::optional(py, &self.tensor.device, stream)?;
        let own = match &consumer {
            Some(consumer) => consumer.follow(py)?.clone(),
            None => py.detach(|| owner.stream().cloned())?,
        };
        let context = CopyContext::of_memory(&self.tensor.device, &own);
        let wanted = Wanted {
            packed: true,
            ..context.wanted(consumer.as_ref())
        };
        let source = wanted.find(tensor)?;
        if source.layout != self.tensor.layout {
            let next = "use view(shape, dtype) of it, or write(bytes)";
            let (given, own) = (source.layout, self.tensor.layout);
            return Err(Fault::layout(format!("{given:?} does not fit {own:?}; {next}")).into());
        }
        owner.admit(py, &Consumer::own(&own))?;
        let is_to_be_awaited = consumer.is_none() && source.reader.is_none();
        let bytes = self.tensor.layout.bytes();
        // SAFETY: the view's range. The hold keeps it until the streams that it has recorded are
        // past the copy.
        let mut range = unsafe { Range::new(&self.tensor.device, memory.lowest, bytes) };
        let filled_on = context.fill(py, &mut range, source)?;
        owner.admit(py, &Consumer::own(&filled_on))?;
        if is_to_be_awaited {
            return await_stream(py, &filled_on, Some(DEFAULT_TIMEOUT));
        }
        Ok(consumer.map_or(Ok(()), |consumer| consumer.lead(py))?)
    }

    /// Records work on this memory on ``stream``, beside that of arrays: the memory is not released
    /// before the work is done. Call it before the work is enqueued.
    ///
    /// Raises ``ArgumentError`` for a stream of another device, ``ReleasedError``.
    #[pyo3(signature = (*, stream))]
    fn used_on(&self, py: Python<'_>, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        let consumer = Consumer::from_argument(py, &self.tensor.device, stream)?;
        Ok(self.owner()?.admit(py, &consumer)?)
    }

    /// Waits on the CPU until the streams that were given work on this memory are past it, at most
    /// ``timeout`` seconds (None: no limit).
    ///
    /// Raises ``TimeoutError``, ``ReleasedError``, ``DriverError``.
    #[pyo3(signature = (timeout = Limit::TEN), text_signature = "($self, timeout=10.0)")]
    fn wait(&self, py: Python<'_>, timeout: Limit) -> PyResult<()> {
        self.owner()?.settle(py, timeout.0)
    }
}

/// Checks that bytes lie inside of memory.
fn check_range(what: &str, offset: u64, bytes: u64, available: u64) -> Result<(), Fault> {
    let end = u128::from(offset) + u128::from(bytes);
    if end <= u128::from(available) {
        return Ok(());
    }
    let allowed = format!("0..{available} of {what:?}");
    Err(Fault::argument(
        "range",
        format!("{offset}..{end}"),
        allowed,
    ))
}
