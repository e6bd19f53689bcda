//! PyTorch's current stream, and its import of capsules.
//!
//! Every hand-over uses both, and half of PyTorch's time for them is its own Python code. Below
//! that code lie `torch._C._cuda_getCurrentRawStream` and `torch._C._from_dlpack`, which are
//! private: they are used where they exist and behave as expected, else the public functions are.

use std::sync::{Arc, Mutex, OnceLock};

use pyo3::prelude::*;

use crate::device::is_cuda;
use crate::dlpack;
use crate::memory::Memory;
use crate::process::Home;
use crate::stream::{Consumer, imported};

/// The functions of one `torch`, looked up once.
#[derive(Debug)]
pub struct Torch {
    module: Py<PyAny>,
    cuda: Option<Py<PyAny>>,
    /// Gives the current stream of a GPU by its ordinal.
    raw_stream: Option<Py<PyAny>>,
    /// Makes a tensor of a bare capsule.
    of_capsule: Py<PyAny>,
    /// Whether `torch.from_dlpack` asks for capsules that have a version. Known once it has asked.
    versioned: OnceLock<bool>,
    /// The process in which CUDA is initialised in PyTorch. Only a fork ends that.
    started: OnceLock<Home>,
}

static FOUND: Mutex<Option<Arc<Torch>>> = Mutex::new(None);

/// The imported `torch`, if any. None while another thread is in the middle of importing it: it
/// lacks functions then.
pub fn found(py: Python<'_>) -> PyResult<Option<Arc<Torch>>> {
    Ok(imported(py, "torch")?.and_then(|module| Torch::of(&module).ok()))
}

impl Torch {
    fn of(module: &Bound<'_, PyAny>) -> PyResult<Arc<Torch>> {
        // Never blocks on the lock: a forked child may find it held for ever, and the cache only
        // saves time.
        let known = FOUND.try_lock().ok().and_then(|known| known.clone());
        if let Some(known) = known.filter(|known| known.module.is(module)) {
            return Ok(known);
        }
        let private = |name: &str| module.getattr("_C").ok()?.getattr(name).ok();
        let raw_stream = private("_cuda_getCurrentRawStream");
        // Defined behind all others that are used here.
        let from_dlpack = module.getattr("from_dlpack")?;
        let of_capsule = private("_from_dlpack").unwrap_or(from_dlpack);
        let cuda = module.getattr("cuda").ok();
        let complete = cuda.is_some();
        let torch = Arc::new(Torch {
            module: module.clone().unbind(),
            cuda: cuda.map(Bound::unbind),
            raw_stream: raw_stream.map(Bound::unbind),
            of_capsule: of_capsule.unbind(),
            versioned: OnceLock::new(),
            started: OnceLock::new(),
        });
        // Not while another thread is in the middle of importing it. The old value is dropped
        // without the lock: its drop may run Python code.
        let known = complete.then(|| FOUND.try_lock().ok()).flatten();
        let before = known.and_then(|mut known| known.replace(torch.clone()));
        drop(before);
        Ok(torch)
    }

    /// `torch.cuda`, if it is initialised in this process. A query for a stream would initialise
    /// it.
    fn at_work<'py>(&self, py: Python<'py>) -> PyResult<Option<&Bound<'py, PyAny>>> {
        let Some(cuda) = self.cuda.as_ref().map(|cuda| cuda.bind(py)) else {
            return Ok(None);
        };
        if self.started.get().is_some_and(|home| home.is_here()) {
            return Ok(Some(cuda));
        }
        if !cuda.call_method0("is_initialized")?.is_truthy()? {
            return Ok(None);
        }
        let _ = self.started.set(Home::here());
        Ok(Some(cuda))
    }

    /// Its current stream on a GPU, 0 for the legacy default one; `None` if it does not use GPUs
    /// here.
    pub fn current_stream(&self, py: Python<'_>, ordinal: u32) -> PyResult<Option<usize>> {
        let Some(cuda) = self.at_work(py)? else {
            return Ok(None);
        };
        if let Some(raw) = &self.raw_stream
            && let Ok(raw) = raw.bind(py).call1((ordinal,)).and_then(|raw| raw.extract())
        {
            return Ok(Some(raw));
        }
        let current = cuda.call_method1("current_stream", (ordinal,))?;
        Ok(Some(current.getattr("cuda_stream")?.extract()?))
    }

    /// Whether its current stream is this one and from its pool: streams of the pool are never
    /// destroyed. An external stream (`torch.cuda.ExternalStream`) has its own number as its
    /// identity, and its owner may destroy it.
    pub fn owns(&self, py: Python<'_>, ordinal: u32, stream: usize) -> PyResult<bool> {
        let Some(cuda) = self.at_work(py)? else {
            return Ok(false);
        };
        let current = cuda.call_method1("current_stream", (ordinal,))?;
        if current.getattr("cuda_stream")?.extract::<usize>()? != stream {
            return Ok(false);
        }
        // An old version does not report it; a stream that may end is the safe assumption.
        let Ok(identity) = current.getattr("stream_id") else {
            return Ok(false);
        };
        Ok(identity.extract::<i64>()? != stream as i64)
    }

    /// As `torch.from_dlpack`, on an object that records the requests.
    fn ask<'py>(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let arrays = tensor.py().import("warpipe._arrays")?;
        let asked = arrays.call_method1("ask_torch", (&self.module, tensor))?;
        let (made, versioned) = asked.extract::<(Bound<'_, PyAny>, Option<bool>)>()?;
        if let Some(versioned) = versioned {
            let _ = self.versioned.set(versioned);
        }
        Ok(made)
    }

    /// As `torch.from_dlpack`, in fewer steps. `None` where `torch.from_dlpack` itself has to be
    /// called.
    fn import<'py>(&self, py: Python<'py>, memory: &Memory) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Some(&versioned) = self.versioned.get() else {
            return Ok(None);
        };
        let stay = if is_cuda(&memory.device) {
            let Some(raw) = self.current_stream(py, memory.device.info().ordinal)? else {
                return Ok(None);
            };
            memory.admit(py, &Consumer::foreign(py, &memory.device, raw)?)?
        } else {
            memory.settle(py)?;
            None
        };
        let capsule = dlpack::export(py, memory, stay, versioned, false)?;
        // A refusal is reported by the public function, which may also accept the capsule if this
        // one has changed.
        Ok(self.of_capsule.bind(py).call1((capsule,)).ok())
    }
}

/// A tensor of this package in place, on PyTorch's current stream.
pub fn tensor<'py>(tensor: &Bound<'py, PyAny>, memory: &Memory) -> PyResult<Bound<'py, PyAny>> {
    let py = tensor.py();
    let torch = match found(py)? {
        Some(torch) => torch,
        None => Torch::of(py.import("torch")?.as_any())?,
    };
    match torch.import(py, memory)? {
        Some(made) => Ok(made),
        None => torch.ask(tensor),
    }
}
