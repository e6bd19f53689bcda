//! `warpipe.weights.publish`: a dictionary of tensors becomes a version, in one call.
//!
//! Each tensor is found once. Those that are published where they lie are added together, the others
//! are copied into one new memory. **This module is marked for unsafe**: it names ranges of that memory
//! by address.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use pyo3::prelude::*;
use pyo3::types::{PyInt, PyType};
use warpipe::weights::{BaseVersion, Hashing, TensorsInPlace, Weights, WeightsBuilder};
use warpipe::{Error, Layout, Wait};

use crate::copies::refuse_capture;
use crate::detached::{OwnStream, call};
use crate::device::{Device, is_cuda};
use crate::domain::{Domain, place};
use crate::errors::{Fault, Outcome, is_of_this_package};
use crate::in_place::{ZeroCopy, add_in_place};
use crate::interpreter_exit::LibraryHeld;
use crate::memory::Memory;
use crate::memory_owner::{COPIES, MemoryOwner, OwnedMemory, Range};
use crate::source::{PlainTorch, Source, SourceLocation, Wanted};
use crate::stream::Consumer;
use crate::thread_exit::prepare_exit;
use crate::view::View;
use crate::wait::{WaitLimit, waiting};
use crate::weights::{LOOK, PublishedWeights, SharedWeights};

/// How often a loop over tensors looks for signals.
const LOOK_EVERY: usize = 4096;

/// A tensor to be published.
struct Found<'py> {
    name: String,
    object: Bound<'py, PyAny>,
    layout: Layout,
    place: Place,
}

enum Place {
    Source(SourceLocation),
    /// Memory of this package, complete.
    View(Memory),
}

impl Place {
    /// The address of its bytes, if they lie as the layout says.
    fn address(&self) -> Option<u64> {
        match self {
            Place::View(memory) => Some(memory.lowest),
            Place::Source(SourceLocation::Host(address, _))
            | Place::Source(SourceLocation::Device(address, ..)) => Some(*address),
            Place::Source(_) => None,
        }
    }
}

/// The same error, with the name of the tensor that it is about. Others, as interrupts, stay.
fn naming(py: Python<'_>, name: &str, error: PyErr) -> PyErr {
    if !is_of_this_package(py, &error) {
        return error;
    }
    let said = format!("'{name}': {}", error.value(py));
    let named = PyErr::from_type(error.get_type(py), said);
    named.set_cause(py, Some(error));
    named
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
#[pyo3(signature = (name, names, tensors, *, device = None, domain = None, wait = WaitLimit::NONE, zero_copy = ZeroCopy::No,
    hash = "device", layout = "as_is", metadata = Vec::new(), base = None),
    text_signature = "(name, names, tensors, *, device=None, domain=None, wait=None, zero_copy=False, hash='device', \
    layout='as_is', metadata=b'', base=None)")]
#[expect(
    clippy::too_many_arguments,
    reason = "keyword arguments, each with a default"
)]
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
    layout: &str,
    metadata: Vec<u8>,
    base: Option<Base>,
) -> PyResult<Publication> {
    let mut clock = PhaseClock::new();
    let hashing = Hashing::from_name(hash)
        .ok_or_else(|| Fault::argument("hash", hash, "'device', 'later' or 'none'"))?;
    let row_major = match layout {
        "row_major" => true,
        "as_is" => false,
        _ => return Err(Fault::argument("layout", layout, "'as_is' or 'row_major'").into()),
    };
    let (domain, device) = place(domain, device)?;
    let own = OwnStream::new(py, &device)?;
    let search = Search {
        device: &device,
        own: &own,
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
    let mut numbers: HashMap<usize, usize> = HashMap::new();
    if !aliases.is_empty() {
        let order = found.iter().map(|(index, _)| *index);
        let order = order.chain(lying.numbers.iter().copied());
        numbers.extend(order.enumerate().map(|(at, index)| (index, at)));
    }
    let copied: u64 = found.iter().map(|(_, tensor)| tensor.layout.bytes()).sum();
    let laid: Vec<(String, Layout)> = found
        .iter()
        .map(|(_, tensor)| (tensor.name.clone(), tensor.layout))
        .collect();
    let build = || -> Result<WeightsBuilder, Error> {
        let laid = laid.iter().map(|(name, layout)| (name.as_str(), *layout));
        let mut builder = Weights::builder(&device, laid)?;
        (builder.in_place, builder.hashing) = (Some(lying.tensors), hashing);
        builder.metadata = metadata;
        let named = aliases.into_iter();
        let named = named.map(|(name, index)| (numbers[&index], name));
        builder.aliases = named.collect();
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
pub enum Base {
    Held(BaseVersion),
    /// The keeper offers it.
    Number(u64),
}

impl<'a, 'py> FromPyObject<'a, 'py> for Base {
    type Error = PyErr;

    fn extract(found: Borrowed<'a, 'py, PyAny>) -> PyResult<Base> {
        prepare_exit();
        if let Ok(published) = found.cast::<PublishedWeights>() {
            return Ok(Base::Held(published.get().as_base()?));
        }
        if let Ok(shared) = found.cast::<SharedWeights>() {
            return Ok(Base::Held(shared.get().as_base()?));
        }
        if found.is_exact_instance_of::<PyInt>()
            && let Ok(number) = found.extract()
        {
            return Ok(Base::Number(number));
        }
        let allowed = "a version's number, what `publish` returned, or open weights";
        Err(Fault::argument("base", found.repr()?, allowed).into())
    }
}

impl Base {
    fn find(self, domain: &warpipe::Domain, name: &str, wait: &Wait<'_>) -> Outcome<BaseVersion> {
        match self {
            Base::Held(base) => Ok(base),
            Base::Number(number) => Ok(BaseVersion::find(domain, name, number, wait)?),
        }
    }
}

/// How tensors are found and copied.
struct Search<'a, 'py> {
    device: &'a warpipe::Device,
    own: &'a OwnStream,
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

/// Which tensor lies where.
#[derive(Default)]
struct KnownPlaces {
    /// The first one at each address.
    first: HashMap<u64, (usize, Layout)>,
    /// Others there, with another shape.
    others: HashMap<(u64, Layout), usize>,
}

impl KnownPlaces {
    /// The tensor that is the same elements in the same memory, if it is known; else it is `index`.
    fn first(&mut self, address: u64, layout: &Layout, index: usize) -> Option<usize> {
        let (first, of_first) = *self.first.entry(address).or_insert((index, *layout));
        if of_first == *layout {
            return (first != index).then_some(first);
        }
        let other = *self.others.entry((address, *layout)).or_insert(index);
        (other != index).then_some(other)
    }
}

impl<'py> Search<'_, 'py> {
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
        let mut known = KnownPlaces::default();
        let lasting = self.zero_copy != ZeroCopy::No;
        for (index, (name, object)) in names.into_iter().zip(tensors).enumerate() {
            if index % LOOK_EVERY == LOOK_EVERY - 1 {
                py.check_signals()?;
            }
            let (layout, place) = self.find(&name, &object, lasting)?;
            let address = place.address().filter(|_| layout.bytes() > 0);
            if let Some(address) = address
                && let Some(first) = known.first(address, &layout, all.len())
            {
                aliases.push((name, first));
                continue;
            }
            all.push(Found {
                name,
                object,
                layout,
                place,
            });
        }
        Ok((all, aliases))
    }

    /// Finds a tensor as it is to be published: without gaps, and row-major if that was asked for.
    fn find(
        &self,
        name: &str,
        object: &Bound<'py, PyAny>,
        lasting: bool,
    ) -> PyResult<(Layout, Place)> {
        let found = self.found(object, lasting);
        found.map_err(|error| match check_tensor(name, object) {
            Ok(()) => naming(object.py(), name, error),
            Err(refused) => refused,
        })
    }

    fn found(&self, object: &Bound<'py, PyAny>, lasting: bool) -> PyResult<(Layout, Place)> {
        let py = object.py();
        if lasting
            && let Ok(view) = object.cast::<View>()
            && let Some(memory) = self.of_view(py, view)?
        {
            return Ok((memory.layout, Place::View(memory)));
        }
        let wanted = |packed, lasting| Wanted {
            packed,
            lasting,
            ..Wanted::on(self.device, self.own)
        };
        let find = |wanted: Wanted<'_>| match &self.torch {
            Some(torch) => match wanted.of_plain_torch(torch, object)? {
                Some(source) => Ok(source),
                None => wanted.find(object),
            },
            None => wanted.find(object),
        };
        let Source { layout, place } = find(wanted(self.row_major, lasting))?;
        if matches!(place, SourceLocation::Bytes(_)) {
            check_tensor("it", object)?;
        }
        if layout.is_dense() && layout.offset() == 0 {
            return Ok((layout, Place::Source(place)));
        }
        // It runs backwards, or has elements more than once.
        drop(place);
        let Source { layout, place } = find(wanted(true, false))?;
        Ok((layout, Place::Source(place)))
    }

    /// Memory of this package on the device, when all work on it is done.
    fn of_view(&self, py: Python<'py>, view: &Bound<'py, View>) -> PyResult<Option<Memory>> {
        let memory = view.get().memory()?;
        let layout = memory.layout;
        let is_kept = !self.row_major || layout.is_contiguous();
        if memory.device.info().id != self.device.info().id
            || !layout.is_dense()
            || layout.offset() != 0
            || !is_kept
        {
            return Ok(None);
        }
        view.get().owner()?.settle(py, None)?;
        Ok(Some(memory))
    }

    /// Adds the tensors that can be published where they lie; returns the others, with their indices,
    /// and why they cannot.
    fn split(
        &self,
        py: Python<'py>,
        found: Vec<Found<'py>>,
    ) -> PyResult<(Lying, Copied<'py>, Vec<String>)> {
        let mut lying = Lying {
            tensors: TensorsInPlace::new(self.device),
            numbers: Vec::new(),
        };
        let found = found.into_iter().enumerate();
        if self.zero_copy == ZeroCopy::No {
            return Ok((lying, found.collect(), Vec::new()));
        }
        let (mut owned, mut others, mut refused) = (Vec::new(), Vec::new(), Vec::new());
        let mut streams: Vec<Consumer> = Vec::new();
        for (index, mut tensor) in found {
            if tensor.layout.bytes() == 0 {
                // There is nothing to copy.
                others.push((index, tensor));
                continue;
            }
            let Some(address) = tensor.place.address() else {
                let said = "it has gaps, or is no array; make it a contiguous one first";
                refused.push((tensor.name.clone(), PyErr::from(Fault::layout(said))));
                others.push((index, tensor));
                continue;
            };
            if let Place::Source(SourceLocation::Device(_, reader, _)) = &tensor.place
                && !streams.iter().any(|one| one.is_same(reader))
            {
                streams.push(reader.clone());
            }
            let held = std::mem::replace(
                &mut tensor.place,
                Place::Source(SourceLocation::Bytes(Vec::new())),
            );
            owned.push((index, tensor, address, held));
        }
        settle_streams(py, &streams.iter().collect::<Vec<_>>())?;
        let owners = Arc::new(OnceLock::new());
        let tensors = &mut lying.tensors;
        let todo = owned.iter().map(|(_, tensor, address, _)| {
            let Found { name, layout, .. } = tensor;
            (name.as_str(), *layout, *address)
        });
        let todo: Vec<(&str, Layout, u64)> = todo.collect();
        let added: Vec<Outcome<()>> = py.detach(|| {
            let add = |(name, layout, address)| {
                add_in_place(tensors, name, layout, address, Owners(owners.clone()))
            };
            todo.into_iter().map(add).collect()
        });
        let mut kept = Vec::new();
        for ((index, mut tensor, _, held), added) in owned.into_iter().zip(added) {
            let Err(fault) = added else {
                lying.numbers.push(index);
                kept.push(held);
                continue;
            };
            let error = PyErr::from(fault);
            refused.push((tensor.name.clone(), error));
            (tensor.layout, tensor.place) = self.find(&tensor.name, &tensor.object, false)?;
            others.push((index, tensor));
        }
        let _ = owners.set(LibraryHeld::new(kept));
        others.sort_by_key(|(index, _)| *index);
        let refused = self.refusals(py, refused)?;
        Ok((lying, others, refused))
    }

    /// What is said of tensors that are copied; an error if none may be.
    fn refusals(&self, py: Python<'py>, refused: Vec<(String, PyErr)>) -> PyResult<Vec<String>> {
        let mut texts = Vec::new();
        for (name, error) in refused {
            let told = error.value(py);
            let said = format!("'{name}' cannot be published where it lies: {told}");
            if self.zero_copy == ZeroCopy::Require {
                let said = format!("{said}; {IN_PLACE}, or give zero_copy=True to have it copied");
                let raised = PyErr::from_type(error.get_type(py), said);
                raised.set_cause(py, Some(error));
                return Err(raised);
            }
            texts.push(said);
        }
        Ok(texts)
    }

    /// Copies tensors to their places in the builder's memory, and waits until all are there.
    fn fill(
        &self,
        py: Python<'py>,
        builder: &mut WeightsBuilder,
        found: Copied<'py>,
    ) -> PyResult<()> {
        let (whole, found): (Vec<_>, Vec<_>) = found
            .into_iter()
            .enumerate()
            .partition(|(_, (_, tensor))| self.lies_whole(tensor).is_some());
        self.copy_whole(py, builder, whole)?;
        match found.is_empty() {
            true => Ok(()),
            false => self.fill_others(py, builder, found),
        }
    }

    /// The address of a tensor that the device can copy as it is, and the stream that it is read on.
    fn lies_whole<'a>(&self, tensor: &'a Found<'py>) -> Option<(u64, Option<&'a Consumer>)> {
        match &tensor.place {
            Place::Source(SourceLocation::Device(address, reader, _)) => {
                Some((*address, Some(reader)))
            }
            Place::Source(SourceLocation::Host(address, _)) if !is_cuda(self.device) => {
                Some((*address, None))
            }
            _ => None,
        }
    }

    /// Copies tensors all together, behind the work of the streams that they are read on.
    fn copy_whole(
        &self,
        py: Python<'py>,
        builder: &mut WeightsBuilder,
        found: Vec<(usize, (usize, Found<'py>))>,
    ) -> PyResult<()> {
        let mut streams: Vec<&Consumer> = Vec::new();
        let mut places = Vec::with_capacity(found.len());
        for (at, (_, tensor)) in &found {
            let Some((address, reader)) = self.lies_whole(tensor) else {
                continue;
            };
            places.push((*at, address));
            if let Some(reader) = reader
                && !streams.iter().any(|one| one.is_same(reader))
            {
                streams.push(reader);
            }
        }
        settle_streams(py, &streams)?;
        // SAFETY: the tensors are complete, as the streams' work is done, and `found` keeps them. What
        // may be copied still after an error is kept for good.
        let copied = py.detach(|| unsafe { builder.copy_from(&places) });
        let is_idle = || {
            // Waits for the stream of the copies.
            let memory = builder.memory();
            memory.is_none_or(|memory| memory.copy_to(0, &mut [], LOOK).is_ok())
        };
        if copied.is_err() && !py.detach(is_idle) {
            let places = found.into_iter().map(|(_, (_, tensor))| tensor.place);
            std::mem::forget(LibraryHeld::new(places.collect::<Vec<_>>()));
        }
        Ok(copied.map_err(Fault::from)?)
    }

    /// Copies tensors one after another, each as it has to be read.
    fn fill_others(
        &self,
        py: Python<'py>,
        builder: &WeightsBuilder,
        found: Vec<(usize, (usize, Found<'py>))>,
    ) -> PyResult<()> {
        let Some(memory) = builder.memory() else {
            return Ok(());
        };
        let lowest = memory.ptr();
        let owner = MemoryOwner::new(OwnedMemory::Own(memory.clone()));
        owner.admit(py, &Consumer::own(self.own))?;
        let mut streams = vec![self.own.raw()];
        for (at, (_, tensor)) in found {
            let offset = builder.offsets()[at];
            if at % LOOK_EVERY == LOOK_EVERY - 1 {
                py.check_signals()?;
            }
            let Found {
                name,
                layout,
                place,
                object,
            } = tensor;
            let place = match place {
                Place::Source(place) => place,
                // It was not to be published where it lies after all.
                Place::View(_) => {
                    let (_, place) = self.find(&name, &object, false)?;
                    let Place::Source(place) = place else {
                        return Err(Fault::layout("its memory moved").into());
                    };
                    place
                }
            };
            let source = Source { layout, place };
            // SAFETY: the builder laid the tensor there, and nothing else writes the memory. Its owner
            // keeps it until the streams that it admits are past the copy.
            let mut range = unsafe { Range::new(self.device, lowest + offset, layout.bytes()) };
            let filled = COPIES.fill(py, &mut range, source, self.own, None);
            let filled_on = filled.map_err(|error| naming(py, &name, error))?;
            if !streams.contains(&filled_on.raw()) {
                streams.push(filled_on.raw());
                owner.admit(py, &Consumer::own(&filled_on))?;
            }
        }
        owner.settle(py, None)
    }
}

/// Waits for the work that streams were given so far.
fn settle_streams(py: Python<'_>, streams: &[&Consumer]) -> PyResult<()> {
    for reader in streams {
        let behind = reader.follow(py)?.clone();
        refuse_capture(&behind)?;
        waiting(py, None, || Ok(()), |wait| Ok(behind.synchronize(wait)?))?;
    }
    Ok(())
}

/// The next step for tensors that cannot be published where they lie.
const IN_PLACE: &str =
    "allocate it in warpipe.torch.pool() or in expandable segments, without gaps";

/// What keeps the memory of all tensors allocated: one value, since the drop of each of many would wait
/// for the interpreter.
struct Owners(
    #[allow(dead_code, reason = "held, not used")] Arc<OnceLock<LibraryHeld<Vec<Place>>>>,
);

/// Refuses what is no tensor, whatever bytes it has.
fn check_tensor(name: &str, object: &Bound<'_, PyAny>) -> PyResult<()> {
    // The shape of a tensor that is lazy is an error of its own.
    let has = |what| object.hasattr(what).unwrap_or(true);
    if !object.is_instance_of::<PyType>() && has("shape") && has("dtype") {
        return Ok(());
    }
    let class = object.get_type().name()?;
    let said = format!("'{name}' is a {class} and no tensor; leave it out, or make it an array");
    Err(Fault::Own("NotATensorError", said).into())
}
