//! Weights that the caller copies into their memory itself, on streams of its own, beside tensors
//! that are published where they lie.

use super::blocks::COPY_TIMEOUT;
use super::content::hash_memory;
use super::in_place::TensorsInPlace;
use super::lease;
use super::load::{Placement, Storage, Weights};
use super::manifest::TensorInfo;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::memory::slice::wait_for;
use crate::tensor::Layout;

/// The memory of weights that are not complete yet.
///
/// For tensors that lie in a device's memory already: each is copied to its
/// [offset](WeightsBuilder::offsets) on any stream of the caller's.
///
/// ```
/// use warpipe::weights::Weights;
/// use warpipe::{DType, Device, Layout};
/// let (device, layout) = (Device::host(), Layout::contiguous(DType::U8, &[3])?);
/// let builder = Weights::builder(&device, [("embed", layout), ("norm", layout)])?.alias("head", 0);
/// let stream = device.stream()?;
/// for (&offset, bytes) in builder.offsets().iter().zip([b"abc", b"def"]) {
///     builder.memory().write(&stream, offset, bytes)?;
/// }
/// let weights = builder.finish()?;
/// let names: Vec<&str> = weights.tensors().iter().map(|tensor| tensor.name()).collect();
/// assert_eq!(names, ["embed", "head", "norm"]);
/// assert_eq!(weights.tensors()[0].offset(), weights.tensors()[1].offset());
/// # Ok::<(), warpipe::Error>(())
/// ```
#[derive(Debug)]
pub struct WeightsBuilder {
    memory: Memory,
    tensors: Vec<(String, Layout)>,
    placed: Placement,
    in_place: Option<TensorsInPlace>,
    /// Further names of tensors, by their index.
    aliases: Vec<(usize, String)>,
}

impl Weights {
    /// Allocates the memory of these tensors, for the caller to fill. Each layout is row-major
    /// without gaps.
    ///
    /// # Errors
    /// [`Error::Argument`] for a layout with other strides, or too many tensors;
    /// [`Error::DeviceMemory`]; [`Error::Driver`].
    pub fn builder<'a>(
        device: &Device,
        tensors: impl IntoIterator<Item = (&'a str, Layout)>,
    ) -> Result<WeightsBuilder> {
        let tensors: Vec<_> = tensors
            .into_iter()
            .map(|(name, layout)| (name.to_string(), layout))
            .collect();
        for (name, layout) in &tensors {
            if layout.offset() != 0 || !layout.is_contiguous() {
                let allowed = format!("a row-major layout of tensor {name:?}");
                return Err(Error::argument("tensors", format!("{layout:?}"), allowed));
            }
        }
        let placed = Placement::of(tensors.iter().map(|tensor| tensor.1))?;
        let memory = Memory::allocate(device, placed.bytes)?;
        Ok(WeightsBuilder {
            memory,
            tensors,
            placed,
            in_place: None,
            aliases: Vec::new(),
        })
    }
}

impl WeightsBuilder {
    /// The memory to fill. Nothing may write it after [`finish`](WeightsBuilder::finish): readers
    /// would see that, and a later check of the hashes would find it.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Where each tensor begins in the memory, in the order in which they were given.
    pub fn offsets(&self) -> &[u64] {
        &self.placed.offsets
    }

    /// Publishes these tensors, too, without a copy. They are counted behind the others.
    pub fn beside(mut self, tensors: TensorsInPlace) -> WeightsBuilder {
        self.in_place = Some(tensors);
        self
    }

    /// Another name of a tensor, by its index: tied weights lie in the memory once. An index
    /// without a tensor is reported by [`finish`](WeightsBuilder::finish).
    pub fn alias(mut self, name: &str, tensor: usize) -> WeightsBuilder {
        self.aliases.push((tensor, name.to_string()));
        self
    }

    /// Waits for the streams that [`memory`](WeightsBuilder::memory) has recorded, has the device hash
    /// what lies in the memory, and seals the description.
    ///
    /// # Errors
    /// [`Error::Argument`] for two tensors of one name, a name of no or more than 1,024 bytes, or an
    /// alias of no tensor; [`Error::Timeout`]; [`Error::DescriptorLimit`]; [`Error::Driver`].
    pub fn finish(self) -> Result<Weights> {
        let WeightsBuilder {
            memory,
            tensors,
            placed,
            in_place,
            aliases,
        } = self;
        wait_for(memory.streams(), COPY_TIMEOUT)?;
        let in_place = in_place.filter(|tensors| !tensors.is_empty());
        let device = memory.device().clone();
        if let Some(other) = in_place
            .as_ref()
            .filter(|it| it.device().info().id != device.info().id)
        {
            let found = other.device().info().id;
            return Err(Error::argument("tensors in place", found, device.info().id));
        }
        let (copied, mut storage) = (tensors.len(), Storage::default());
        if copied > 0 || in_place.is_none() {
            storage.add_memory(memory.clone())?;
            storage.bytes = placed.bytes;
        }
        let laid = match in_place {
            None => None,
            Some(in_place) => {
                let begin = storage.parts.iter().map(|part| part.bytes()).sum();
                let mut laid = in_place.lay(begin)?;
                storage.parts.append(&mut laid.parts);
                storage.pieces.append(&mut laid.pieces);
                storage.bytes = storage.parts.iter().map(|part| part.bytes()).sum();
                storage.lease = Some(lease::grant(laid.mapping.clone())?);
                Some(laid)
            }
        };
        let copies = tensors.into_iter().zip(&placed.offsets).enumerate();
        let copies = copies.map(|(number, ((name, layout), &offset))| {
            ((number, name, layout, offset), (&*memory, offset))
        });
        let lying = laid.iter().flat_map(|laid| &laid.tensors).map(|tensor| {
            let (number, name) = (copied + tensor.number, tensor.name.clone());
            (
                (number, name, tensor.layout, tensor.offset),
                (&tensor.slice, 0),
            )
        });
        let (described, places): (Vec<_>, Vec<_>) = copies.chain(lying).unzip();
        let mut names = names_of(
            &described.iter().map(|it| it.0).collect::<Vec<_>>(),
            aliases,
        )?;
        let places = places.into_iter().zip(&described);
        let places: Vec<_> = places
            .map(|((memory, begin), (_, _, layout, _))| (memory, begin, layout.bytes()))
            .collect();
        let hashes = hash_memory(&places)?;
        let mut infos = Vec::new();
        for ((number, name, layout, offset), hash) in described.into_iter().zip(hashes) {
            let others = std::mem::take(&mut names[number]);
            let tensor = |name| TensorInfo {
                name,
                layout,
                offset,
                hash,
            };
            infos.push(tensor(name));
            infos.extend(others.into_iter().map(tensor));
        }
        Weights::in_storage(&device, storage, infos)
    }
}

/// The further names of each tensor, by its number.
fn names_of(numbers: &[usize], aliases: Vec<(usize, String)>) -> Result<Vec<Vec<String>>> {
    let mut names = vec![Vec::new(); numbers.len()];
    for (index, name) in aliases {
        let Some(of_it) = names.get_mut(index) else {
            let found = format!("tensor {index} for {name:?}");
            let allowed = format!("one of {} tensors", numbers.len());
            return Err(Error::argument("alias", found, allowed));
        };
        of_it.push(name);
    }
    Ok(names)
}
