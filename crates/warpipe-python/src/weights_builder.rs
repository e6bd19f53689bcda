//! Weights before they are published: copies in one memory, and tensors that stay where they lie.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use warpipe::weights::{self, Weights};
use warpipe::{DType, Error, Layout};

use crate::detached::OwnStream;
use crate::device::Device;
use crate::domain::Domain;
use crate::dtype;
use crate::errors::{Fault, Outcome};
use crate::in_place::add_in_place;
use crate::interpreter_exit::LibraryHeld;
use crate::memory_owner::OwnedMemory;
use crate::process::Home;
use crate::source::{Source, SourceLocation, Wanted};
use crate::view::View;
use crate::wait::{CallOff, in_slices, none_if_late, on_a_thread, optional};
use crate::weights::{PublishedWeights, more_and_more_patiently};

/// The most that one offer waits for the keeper, which may still ask other processes for what they
/// hold: an offer that is given up is one of few that a keeper takes at once.
const OFFER: Duration = Duration::from_secs(8);

/// Adds the classes.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Builder>()?;
    module.add_class::<TensorsInPlace>()
}

fn layout_of(shape: &Bound<'_, PyAny>, element: &Bound<'_, PyAny>) -> PyResult<Layout> {
    let element: DType = dtype::from_argument(element)?;
    Ok(Layout::contiguous(element, &dtype::shape(shape)?).map_err(Fault::from)?)
}

/// The same error, with the name of the tensor that it is about.
fn of_tensor(py: Python<'_>, name: &str, error: &PyErr) -> PyErr {
    let said = format!("{name:?}: {}", error.value(py));
    PyErr::from_type(error.get_type(py), said)
}

/// Tensors that are published where they lie, for ``publish``.
#[pyclass(frozen, module = "warpipe.weights", name = "_TensorsInPlace")]
#[derive(Debug)]
pub struct TensorsInPlace {
    home: Home,
    device: warpipe::Device,
    stream: OwnStream,
    tensors: Mutex<Option<weights::TensorsInPlace>>,
}

impl TensorsInPlace {
    fn with<R>(
        &self,
        change: impl FnOnce(&mut Option<weights::TensorsInPlace>) -> R,
    ) -> Outcome<R> {
        self.home.check()?;
        let mut tensors = self.tensors.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(change(&mut tensors))
    }

    fn taken() -> Fault {
        Fault::closed("list of tensors in place", "")
    }
}

#[pymethods]
impl TensorsInPlace {
    #[new]
    fn new(py: Python<'_>, device: &Bound<'_, PyAny>) -> PyResult<TensorsInPlace> {
        let device = Device::from_argument(Some(device))?.inner;
        Ok(TensorsInPlace {
            home: Home::here(),
            stream: OwnStream::new(py, &device)?,
            tensors: Mutex::new(Some(weights::TensorsInPlace::new(&device))),
            device,
        })
    }

    /// Adds a tensor, when the streams that write it are done, and keeps its memory allocated.
    fn add(&self, py: Python<'_>, name: &str, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
        if let Ok(view) = tensor.cast::<View>() {
            let memory = view.get().memory()?;
            if memory.device.info().id == self.device.info().id {
                view.get().owner()?.settle(py, None)?;
                let (layout, lowest) = (memory.layout, memory.lowest);
                return self.keep(py, name, layout, lowest, memory);
            }
        }
        let wanted = Wanted {
            device: &self.device,
            stream: None,
            own: &self.stream,
            packed: false,
            lasting: true,
        };
        let Source { place, layout } = wanted.find(tensor)?;
        match place {
            SourceLocation::Host(address, owner) => self.keep(py, name, layout, address, owner),
            SourceLocation::Device(address, reader, owner) => {
                let behind = reader.follow(py)?.clone();
                in_slices(py, None, |slice| none_if_late(behind.synchronize(slice)))?;
                self.keep(py, name, layout, address, owner)
            }
            _ => {
                let said = "it has gaps, or is no array; make it a contiguous one first";
                Err(Fault::layout(said).into())
            }
        }
    }
}

impl TensorsInPlace {
    fn keep(
        &self,
        py: Python<'_>,
        name: &str,
        layout: Layout,
        address: u64,
        owner: impl Send + 'static,
    ) -> PyResult<()> {
        let owner = LibraryHeld::new(owner);
        let add = || {
            self.with(|tensors| {
                let tensors = tensors.as_mut().ok_or_else(TensorsInPlace::taken)?;
                add_in_place(tensors, name, layout, address, owner)
            })?
        };
        Ok(py.detach(add)?)
    }
}

/// The memory of weights before they are complete, for ``publish``.
#[pyclass(frozen, module = "warpipe.weights", name = "_WeightsBuilder")]
#[derive(Debug)]
pub struct Builder {
    home: Home,
    builder: Mutex<Option<weights::WeightsBuilder>>,
    copied: u64,
}

impl Builder {
    fn with<R>(&self, read: impl FnOnce(&mut Option<weights::WeightsBuilder>) -> R) -> Outcome<R> {
        self.home.check()?;
        let mut builder = self.builder.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(read(&mut builder))
    }

    fn taken() -> Fault {
        Fault::closed("memory of these weights", "")
    }
}

#[pymethods]
impl Builder {
    /// ``tensors``: name, shape and element type of each. ``aliases``: a further name, and the index
    /// of its tensor; those of ``in_place`` are behind the others.
    #[new]
    #[pyo3(signature = (device, tensors, aliases, in_place = None))]
    fn new(
        py: Python<'_>,
        device: &Bound<'_, PyAny>,
        tensors: Vec<(String, Bound<'_, PyAny>, Bound<'_, PyAny>)>,
        aliases: Vec<(String, usize)>,
        in_place: Option<&TensorsInPlace>,
    ) -> PyResult<Builder> {
        let device = Device::from_argument(Some(device))?.inner;
        let mut laid = Vec::with_capacity(tensors.len());
        for (name, shape, element) in &tensors {
            let layout = layout_of(shape, element).map_err(|error| of_tensor(py, name, &error))?;
            laid.push((name.as_str(), layout));
        }
        let in_place = match in_place {
            Some(list) => Some(list.with(Option::take)?.ok_or_else(TensorsInPlace::taken)?),
            None => None,
        };
        let copied = laid.iter().map(|(_, layout)| layout.bytes()).sum();
        let build = move || {
            let mut builder = Weights::builder(&device, laid)?;
            if let Some(in_place) = in_place {
                builder = builder.beside(in_place);
            }
            let named = aliases.iter();
            Ok(named.fold(builder, |builder, (name, index)| {
                builder.alias(name, *index)
            }))
        };
        let builder = py
            .detach(build)
            .map_err(|error: Error| Fault::from(error))?;
        Ok(Builder {
            home: Home::here(),
            builder: Mutex::new(Some(builder)),
            copied,
        })
    }

    /// The memory to fill.
    #[getter]
    fn memory(&self, py: Python<'_>) -> PyResult<Py<View>> {
        let memory = self.with(|builder| builder.as_ref().map(|some| some.memory().clone()))?;
        let memory = OwnedMemory::Own(memory.ok_or_else(Builder::taken)?);
        Py::new(py, View::of("the memory", memory)?)
    }

    /// Where each tensor begins.
    #[getter]
    fn offsets(&self) -> PyResult<Vec<u64>> {
        let offsets = self.with(|some| some.as_ref().map(|some| some.offsets().to_vec()))?;
        Ok(offsets.ok_or_else(Builder::taken)?)
    }

    /// Hashes what was copied, and hands it to the keeper. Ends this object.
    fn publish(
        &self,
        py: Python<'_>,
        name: &str,
        domain: Option<&Bound<'_, PyAny>>,
        wait: Option<f64>,
    ) -> PyResult<Py<PublishedWeights>> {
        let (domain, wait) = (Domain::from_argument(domain)?, optional(wait, "wait")?);
        let builder = self.with(Option::take)?.ok_or_else(Builder::taken)?;
        let to = name.to_owned();
        let publish = move |call_off: &CallOff| {
            let weights = builder.finish()?;
            let offer = |slice| weights.publish(&domain, &to, slice);
            let published = more_and_more_patiently(wait, call_off, OFFER, offer)?;
            Ok((published, weights.bytes()))
        };
        let (published, nbytes) = on_a_thread(py, "warpipe-offers", || Ok(()), publish)?;
        PublishedWeights::of(py, name, published, nbytes, self.copied)
    }
}
