//! `warpipe.weights.publish`: a dictionary of tensors becomes a version, in one call.
//!
//! Each tensor is found once. Those that are published where they lie are added together, the others
//! are copied into one new memory. **This module is marked for unsafe**: it names ranges of that memory
//! by address.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use pyo3::prelude::*;
use warpipe::weights::{BaseVersion, Hashing, TensorsInPlace, Weights, WeightsBuilder};
use warpipe::{Error, Layout, Wait};

use crate::copies::{CopyContext, refuse_capture};
use crate::detached::{OwnStream, call};
use crate::device::{Device, is_cuda};
use crate::domain::{Domain, place};
use crate::errors::{Fault, Outcome};
use crate::in_place::ZeroCopy;
use crate::interpreter_exit::LibraryHeld;
use crate::memory_owner::{MemoryOwner, OwnedMemory, Range, await_stream};
use crate::source::{PlainTorch, Source, SourceOwner, Wanted, in_words};
use crate::stream::Consumer;
use crate::view::View;
use crate::wait::{WaitLimit, waiting};
use crate::weights::{LOOK, PublishedWeights, SharedWeights};

/// How often a loop over tensors looks for signals.
const LOOK_EVERY: usize = 4096;

/// A tensor to be published.
struct Found<'py> {
    name: String,
    object: Bound<'py, PyAny>,
    source: Source,
}

impl Found<'_> {
    /// The address of its bytes, if they lie as the layout says; `None` without bytes.
    fn address(&self) -> Option<u64> {
        let has_bytes = self.source.layout.bytes() > 0;
        self.source.address().filter(|_| has_bytes)
    }
}

/// The seconds of each step of a call, by its name.
pub type Phases = Vec<(&'static str, f64)>;

/// What [`_publish_weights`] returns.
type Publication = (Py<PublishedWeights>, usize, Vec<String>, Phases);

/// A clock that names the time since it was asked last.
pub struct PhaseClock {
    last: Instant,
    pub phases: Phases,
}

impl PhaseClock {
    /// From now on.
    pub fn new() -> PhaseClock {
        PhaseClock {
            last: Instant::now(),
            phases: Vec::new(),
        }
    }

    /// Names the time since the last phase ended.
    pub fn end(&mut self, phase: &'static str) {
        let now = Instant::now();
        self.phases
            .push((phase, now.duration_since(self.last).as_secs_f64()));
        self.last = now;
    }
}

/// Publishes tensors: the publication, their number, why some were copied that were to be published
/// where they lie, and the seconds of each step.
#[pyfunction]
pub fn _publish_weights(
    py: Python<'_>,
    name: &str,
    names: Vec<String>,
    tensors: Vec<Bound<'_, PyAny>>,
    device: Option<Device>,
    domain: Option<Domain>,
    wait: WaitLimit,
    zero_copy: ZeroCopy,
    hash: &str,
    row_major: bool,
    metadata: Vec<u8>,
    base: Option<Base>,
) -> PyResult<Publication> {
    let mut clock = PhaseClock::new();
    let hashing = Hashing::from_name(hash)
        .ok_or_else(|| Fault::argument("hash", hash, "'device', 'later' or 'none'"))?;
    let (domain, device) = place(domain, device)?;
    let own = OwnStream::new(py, &device)?;
    let search = Search {
        context: CopyContext::of_memory(&device, &own),
        torch: PlainTorch::of(py, &device)?,
        row_major,
        zero_copy,
    };
    let (found, aliases) = search.find_all(py, names, tensors)?;
    let count = found.len();
    clock.end("find");
    let (lying, found, refused) = search.split(py, found)?;
    clock.end("export");
    // The builder counts those in place behind the others.
    let mut numbers = vec![0; count];
    let order = found.iter().map(|(index, _)| *index);
    for (at, index) in order.chain(lying.numbers).enumerate() {
        numbers[index] = at;
    }
    let laid = found
        .iter()
        .map(|(_, tensor)| (tensor.name.clone(), tensor.source.layout));
    let laid: Vec<(String, Layout)> = laid.collect();
    let copied: u64 = laid.iter().map(|(_, layout)| layout.bytes()).sum();
    let build = || -> Result<WeightsBuilder, Error> {
        let laid = laid.iter().map(|(name, layout)| (name.as_str(), *layout));
        let mut builder = Weights::builder(&device, laid)?;
        (builder.in_place, builder.hashing) = (Some(lying.tensors), hashing);
        builder.metadata = metadata;
        let named = aliases.into_iter();
        builder.aliases = named.map(|(name, index)| (numbers[index], name)).collect();
        Ok(builder)
    };
    let mut builder = call(py, build)?;
    clock.end("allocate");
    search.fill(py, &mut builder, found)?;
    clock.end("copy");
    let publish = |wait: Wait<'_>| {
        if let Some(base) = base {
            builder.base = Some(base.find(&domain, name, &wait)?);
        }
        let weights = builder.finish()?;
        clock.end("describe");
        let published = weights.publish(&domain, name, &wait)?;
        clock.end("offer");
        Ok((published, weights.bytes(), clock.phases))
    };
    let (published, nbytes, phases) = waiting(py, wait.0, || Ok(()), publish)?;
    let published = PublishedWeights::of(py, name, published, nbytes, copied)?;
    Ok((published, count, refused, phases))
}

/// A version that the new one shares tensors with.
#[derive(FromPyObject)]
pub enum Base {
    Published(Py<PublishedWeights>),
    Open(Py<SharedWeights>),
    /// Of the version that the keeper offers.
    Number(u64),
}

impl Base {
    fn find(self, domain: &warpipe::Domain, name: &str, wait: &Wait<'_>) -> Outcome<BaseVersion> {
        match self {
            Base::Published(published) => published.get().as_base(),
            Base::Open(weights) => weights.get().as_base(),
            Base::Number(number) => Ok(BaseVersion::find(domain, name, number, wait)?),
        }
    }
}

/// How tensors are found and copied.
struct Search<'py> {
    context: CopyContext,
    torch: Option<PlainTorch<'py>>,
    row_major: bool,
    zero_copy: ZeroCopy,
}

/// Tensors that are published where they lie, and their places in the dictionary.
struct Lying {
    tensors: TensorsInPlace,
    numbers: Vec<usize>,
}

type Copied<'py> = Vec<(usize, Found<'py>)>;

/// Further names of tensors, and the tensors' places in the list of those that were found.
type Aliases = Vec<(String, usize)>;

impl<'py> Search<'py> {
    /// Each tensor once, and the further names of those that have several: with the index of the
    /// tensor.
    fn find_all(
        &self,
        py: Python<'py>,
        names: Vec<String>,
        tensors: Vec<Bound<'py, PyAny>>,
    ) -> PyResult<(Vec<Found<'py>>, Aliases)> {
        let mut all: Vec<Found<'py>> = Vec::with_capacity(tensors.len());
        let mut aliases = Vec::new();
        // The first one of each layout at each address.
        let mut known: HashMap<(u64, Layout), usize> = HashMap::new();
        let lasting = self.zero_copy != ZeroCopy::No;
        for (index, (name, object)) in names.into_iter().zip(tensors).enumerate() {
            if index % LOOK_EVERY == LOOK_EVERY - 1 {
                py.check_signals()?;
            }
            let source = self.find(&name, &object, lasting)?;
            let tensor = Found {
                name,
                object,
                source,
            };
            let layout = tensor.source.layout;
            let address = tensor.address().map(|address| (address, layout));
            match address.map(|address| *known.entry(address).or_insert(all.len())) {
                Some(first) if first < all.len() => aliases.push((tensor.name, first)),
                _ => all.push(tensor),
            }
        }
        Ok((all, aliases))
    }

    /// Finds a tensor as it is to be published: without gaps, and row-major if that was asked for.
    fn find(&self, name: &str, object: &Bound<'py, PyAny>, lasting: bool) -> PyResult<Source> {
        let found = self.found(object, lasting);
        found.map_err(|error| in_words(object.py(), "unpublished", (name, error, object)))
    }

    fn found(&self, object: &Bound<'py, PyAny>, lasting: bool) -> PyResult<Source> {
        let py = object.py();
        if lasting
            && let Ok(view) = object.cast::<View>()
            && let Some(source) = self.of_view(py, view)?
        {
            return Ok(source);
        }
        let wanted = |packed, lasting| Wanted {
            packed,
            lasting,
            ..self.context.wanted(None)
        };
        let find = |wanted: Wanted<'_>| {
            let plain = self.torch.as_ref();
            let plain = plain.map(|torch| wanted.of_plain_torch(torch, object));
            match plain.transpose()?.flatten() {
                Some(source) => Ok(source),
                None => wanted.find(object),
            }
        };
        let source = find(wanted(self.row_major, lasting))?;
        if let SourceOwner::Bytes(_) = source.owner {
            return Err(Fault::Own("NotATensorError", "it is bytes".into()).into());
        }
        if source.layout.is_dense() && source.layout.offset() == 0 {
            return Ok(source);
        }
        // It runs backwards, or has elements more than once.
        drop(source);
        find(wanted(true, false))
    }

    /// Memory of this package on the device, when all work on it is done.
    fn of_view(&self, py: Python<'py>, view: &Bound<'py, View>) -> PyResult<Option<Source>> {
        let memory = view.get().tensor.memory()?;
        let layout = memory.layout;
        let is_kept = !self.row_major || layout.is_contiguous();
        if memory.device.info().id != self.context.device.info().id
            || !layout.is_dense()
            || layout.offset() != 0
            || !is_kept
        {
            return Ok(None);
        }
        view.get().owner()?.settle(py, None)?;
        Ok(Some(Source {
            layout,
            lowest: memory.lowest,
            rows: None,
            reader: None,
            owner: SourceOwner::Memory(memory),
        }))
    }

    /// Adds the tensors that can be published where they lie; returns the others, with their indices,
    /// and why they cannot.
    fn split(
        &self,
        py: Python<'py>,
        found: Vec<Found<'py>>,
    ) -> PyResult<(Lying, Copied<'py>, Vec<String>)> {
        let mut lying = Lying {
            tensors: TensorsInPlace::new(&self.context.device),
            numbers: Vec::new(),
        };
        if self.zero_copy == ZeroCopy::No {
            return Ok((lying, found.into_iter().enumerate().collect(), Vec::new()));
        }
        settle_readers(py, found.iter())?;
        // One value keeps the memory of all tensors allocated: the drop of each of many would wait
        // for the interpreter.
        let owners = Arc::new(OnceLock::new());
        let lies = |tensor: &Found<'py>| {
            Some((tensor.name.clone(), tensor.source.layout, tensor.address()?))
        };
        let todo: Vec<Option<(String, Layout, u64)>> = found.iter().map(lies).collect();
        let tensors = &mut lying.tensors;
        let added: Vec<Option<Outcome<()>>> = py.detach(|| {
            let mut add = |(name, layout, address): (String, Layout, u64)| {
                // SAFETY: the owners keep the tensor's memory allocated, and the caller of
                // `publish` writes it no more, as its documentation says.
                Ok(unsafe { tensors.add(&name, layout, address, Box::new(owners.clone())) }?)
            };
            todo.into_iter().map(|one| one.map(&mut add)).collect()
        });
        let (mut kept, mut others, mut refused) = (Vec::new(), Vec::new(), Vec::new());
        for (index, (mut tensor, added)) in found.into_iter().zip(added).enumerate() {
            match added {
                Some(Ok(())) => {
                    lying.numbers.push(index);
                    kept.push(tensor.source);
                    continue;
                }
                Some(Err(fault)) => {
                    refused.push((tensor.name.clone(), PyErr::from(fault)));
                    tensor.source = self.find(&tensor.name, &tensor.object, false)?;
                }
                // There is nothing to copy.
                None if tensor.source.layout.bytes() == 0 => {}
                None => {
                    let said = "it has gaps, or is no array; make it a contiguous one first";
                    refused.push((tensor.name.clone(), Fault::layout(said).into()));
                }
            }
            others.push((index, tensor));
        }
        let _ = owners.set(LibraryHeld::new(kept));
        let is_required = self.zero_copy == ZeroCopy::Require;
        let words = py.import("warpipe._tensors")?;
        let refused = words.call_method1("copied", (refused, is_required))?;
        Ok((lying, others, refused.extract()?))
    }

    /// The address of a tensor that the device can copy as it is.
    fn lies_whole(&self, tensor: &Found<'py>) -> Option<u64> {
        let is_reached = tensor.source.reader.is_some() || !is_cuda(&self.context.device);
        tensor.source.address().filter(|_| is_reached)
    }

    /// Copies tensors to their places in the builder's memory, and waits until all are there: those
    /// that lie whole together, the others one after another, each as it has to be read.
    fn fill(
        &self,
        py: Python<'py>,
        builder: &mut WeightsBuilder,
        found: Copied<'py>,
    ) -> PyResult<()> {
        let numbered = found.iter().enumerate();
        let whole = numbered.filter_map(|(at, (_, tensor))| Some((at, self.lies_whole(tensor)?)));
        let whole: Vec<(usize, u64)> = whole.collect();
        settle_readers(py, found.iter().map(|(_, tensor)| tensor))?;
        // SAFETY: the tensors are complete, as the streams' work is done, and `found` keeps them. What
        // may be copied still after an error is kept for good.
        let copied = py.detach(|| unsafe { builder.copy_from(&whole) });
        let Some(memory) = builder.memory() else {
            return Ok(copied.map_err(Fault::from)?);
        };
        if let Err(error) = copied {
            // Waits for the stream of the copies.
            if py.detach(|| memory.copy_to(0, &mut [], LOOK)).is_err() {
                let sources = found.into_iter().map(|(_, tensor)| tensor.source);
                std::mem::forget(LibraryHeld::new(sources.collect::<Vec<_>>()));
            }
            return Err(Fault::from(error).into());
        }
        let owner = MemoryOwner::new(OwnedMemory::Own(memory.clone()));
        owner.admit(py, &Consumer::own(&self.context.stream))?;
        for (at, (_, tensor)) in found.into_iter().enumerate() {
            if self.lies_whole(&tensor).is_some() {
                continue;
            }
            if at % LOOK_EVERY == LOOK_EVERY - 1 {
                py.check_signals()?;
            }
            let Found { name, source, .. } = tensor;
            let lowest = memory.ptr() + builder.offsets()[at];
            // SAFETY: the builder laid the tensor there, and nothing else writes the memory. Its owner
            // keeps it until the streams that it admits are past the copy.
            let mut range =
                unsafe { Range::new(&self.context.device, lowest, source.layout.bytes()) };
            let filled = self.context.fill(py, &mut range, source);
            let filled_on = filled.map_err(|error| in_words(py, "unpublished", (&name, error)))?;
            if filled_on.raw() != self.context.stream.raw() {
                owner.admit(py, &Consumer::own(&filled_on))?;
            }
        }
        owner.settle(py, None)
    }
}

/// Waits for the work so far of the streams that tensors are read on.
fn settle_readers<'a, 'py: 'a>(
    py: Python<'py>,
    tensors: impl Iterator<Item = &'a Found<'py>>,
) -> PyResult<()> {
    let mut settled: Vec<&Consumer> = Vec::new();
    for tensor in tensors {
        if let Some(reader) = &tensor.source.reader
            && !settled.iter().any(|one| one.is_same(reader))
        {
            let behind = reader.follow(py)?.clone();
            refuse_capture(&behind)?;
            await_stream(py, &behind, None)?;
            settled.push(reader);
        }
    }
    Ok(())
}
