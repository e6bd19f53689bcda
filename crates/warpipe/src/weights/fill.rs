//! Weights that the caller copies into their memory itself, on streams of its own, beside tensors
//! that are published where they lie.

use std::collections::HashMap;
use std::sync::Arc;

use super::base::BaseVersion;
use super::blocks::COPY_TIMEOUT;
use super::content::{ADDRESS_UNIT, Place, copy_places};
use super::contents::Contents;
use super::in_place::{LaidTensor, TensorsInPlace};
use super::load::{Placement, Weights};
use super::manifest::{ContentHash, Hashing, METADATA_BYTES_MAX, TensorInfo, check_json};
use super::storage::Storage;
use crate::backend::DevicePtr;
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
/// let mut builder = Weights::builder(&device, [("embed", layout), ("norm", layout)])?;
/// builder.aliases = vec![(0, "head".into())];
/// let (stream, memory) = (device.stream()?, builder.memory().expect("there are tensors"));
/// for (&offset, bytes) in builder.offsets().iter().zip([b"abc", b"def"]) {
///     memory.write(&stream, offset, bytes)?;
/// }
/// let weights = builder.finish()?;
/// let names: Vec<&str> = weights.tensors().iter().map(|tensor| &*tensor.name).collect();
/// assert_eq!(names, ["embed", "head", "norm"]);
/// assert_eq!(weights.tensors()[0].offset, weights.tensors()[1].offset);
/// # Ok::<(), warpipe::Error>(())
/// ```
#[derive(Debug)]
pub struct WeightsBuilder {
    device: Device,
    /// `None` without tensors to copy.
    memory: Option<Memory>,
    tensors: Vec<(Arc<str>, Layout)>,
    placed: Placement,
    /// Of tensors that were hashed as they were copied, by their index.
    hashes: HashMap<usize, ContentHash>,
    /// Tensors that are published, too, without a copy. They are counted behind the others.
    pub in_place: Option<TensorsInPlace>,
    /// Further names of tensors, by their index: tied weights lie in the memory once. An index
    /// without a tensor is reported by [`finish`](WeightsBuilder::finish).
    pub aliases: Vec<(usize, String)>,
    /// Shares all tensors of another version but those of the names that this one gives itself: they
    /// are neither copied nor hashed, and readers see one whole version. Their memory is kept as long
    /// as a process has this version, also when the other one is replaced, or its publisher dies.
    ///
    /// ```
    /// use std::time::Duration;
    /// use warpipe::weights::{Keeper, SharedWeights, Weights};
    /// use warpipe::{DType, Device, Domain, Layout};
    /// # let folder = std::env::temp_dir().join(format!("warpipe-base-{}", std::process::id()));
    /// # let (domain, device, wait) = (Domain::at(&folder)?, Device::host(), Duration::from_secs(5));
    /// # let keeper = Keeper::new("llama", domain.options())?;
    /// let layout = Layout::contiguous(DType::U8, &[3])?;
    /// let whole = [("embed", layout, &b"abc"[..]), ("lora", layout, &b"old"[..])];
    /// let base = Weights::from_bytes(&device, whole)?.publish(&domain, "llama", wait)?;
    ///
    /// let mut builder = Weights::builder(&device, [("lora", layout)])?;
    /// builder.base = Some((&base).into());
    /// builder.metadata = br#"{"step": 1}"#.to_vec();
    /// let (stream, memory) = (device.stream()?, builder.memory().expect("there is a tensor"));
    /// memory.write(&stream, builder.offsets()[0], b"new")?;
    /// builder.finish()?.publish(&domain, "llama", wait)?;
    ///
    /// let shared = SharedWeights::open("llama", domain.on(&device), wait)?;
    /// for (name, bytes) in [("embed", b"abc"), ("lora", b"new")] {
    ///     assert_eq!(shared.tensor(name).expect("it has all").memory.to_vec(wait)?, bytes);
    /// }
    /// assert_eq!(shared.info().metadata, br#"{"step": 1}"#);
    /// # drop((shared, base, keeper)); std::fs::remove_dir_all(folder).ok();
    /// # Ok::<(), warpipe::Error>(())
    /// ```
    pub base: Option<BaseVersion>,
    /// When the content hashes are computed; set it before [`copy_from`](Self::copy_from).
    pub hashing: Hashing,
    /// A JSON text that every process gets with the version, up to 1 MiB; empty without any.
    pub metadata: Vec<u8>,
}

impl Weights {
    /// Allocates the memory of these tensors, for the caller to fill. Each layout is
    /// [dense](Layout::is_dense): a tensor is copied as its elements lie.
    ///
    /// # Errors
    /// [`Error::Argument`] for a layout with gaps, or too many tensors;
    /// [`Error::Limit`]; [`Error::Driver`].
    pub fn builder<'a>(
        device: &Device,
        tensors: impl IntoIterator<Item = (&'a str, Layout)>,
    ) -> Result<WeightsBuilder> {
        let tensors: Vec<(Arc<str>, Layout)> = tensors
            .into_iter()
            .map(|(name, layout)| (name.into(), layout))
            .collect();
        for (name, layout) in &tensors {
            if layout.offset() != 0 || !layout.is_dense() {
                let allowed = format!("a dense layout of tensor {name:?}");
                return Err(Error::argument("tensors", format!("{layout:?}"), allowed));
            }
        }
        let placed = Placement::of(tensors.iter().map(|tensor| tensor.1))?;
        let memory = (!tensors.is_empty()).then(|| Memory::allocate(device, placed.bytes));
        Ok(WeightsBuilder {
            device: device.clone(),
            memory: memory.transpose()?,
            tensors,
            placed,
            hashes: HashMap::new(),
            in_place: None,
            aliases: Vec::new(),
            base: None,
            hashing: Hashing::default(),
            metadata: Vec::new(),
        })
    }
}

impl WeightsBuilder {
    /// The memory to fill; `None` without tensors to copy. Nothing may write it after
    /// [`finish`](WeightsBuilder::finish): readers would see that, and a later check of the hashes
    /// would find it.
    pub fn memory(&self) -> Option<&Memory> {
        self.memory.as_ref()
    }

    /// Where each tensor begins in the memory, in the order in which they were given.
    pub fn offsets(&self) -> &[u64] {
        &self.placed.offsets
    }

    /// Copies tensors that lie on the device, each by its index from the address of its first byte, and
    /// waits for that. With [`Hashing::Device`], which is to be chosen before, the device hashes them at
    /// the same time, and reads them once. Nothing may write their places in the memory afterwards.
    ///
    /// # Errors
    /// [`Error::Argument`] for an index without a tensor; [`Error::Timeout`] when the device copies
    /// nothing for a minute; [`Error::Limit`], [`Error::Driver`].
    ///
    /// # Safety
    /// Each tensor's bytes are complete, and readable on the device from one range of addresses outside
    /// of [`memory`](WeightsBuilder::memory). Nothing writes or frees them before this returns; after an error, before
    /// the device is idle.
    pub unsafe fn copy_from(&mut self, tensors: &[(usize, DevicePtr)]) -> Result<()> {
        let Some(memory) = &self.memory else {
            let found = format!("{} to copy", tensors.len());
            return match tensors {
                [] => Ok(()),
                _ => Err(Error::argument("tensors", found, "none")),
            };
        };
        let stream = self.device.stream()?;
        memory.used_on(&stream);
        let (mut hashed, mut places) = (Vec::new(), Vec::new());
        for &(index, address) in tensors {
            let Some((_, layout)) = self.tensors.get(index) else {
                let allowed = format!("one of {} tensors", self.tensors.len());
                return Err(Error::argument("tensors", index, allowed));
            };
            let place = Place {
                address,
                bytes: layout.bytes(),
                copy: memory.ptr() + self.placed.offsets[index],
            };
            if self.hashing == Hashing::Device && address.is_multiple_of(ADDRESS_UNIT) {
                hashed.push(index);
                places.push(place);
            } else if place.bytes > 0 {
                // SAFETY: the caller's promise; the builder laid the tensor there.
                unsafe { stream.copy(place.copy, address, place.bytes) }?;
            }
        }
        if hashed.is_empty() {
            return stream.synchronize(COPY_TIMEOUT);
        }
        // SAFETY: the caller's promise; the builder laid the tensors there, in memory that the stream
        // is recorded for.
        let hashes = unsafe { copy_places(stream, &places) }?.finish(&COPY_TIMEOUT.into())?;
        self.hashes.extend(hashed.into_iter().zip(hashes));
        Ok(())
    }

    /// Waits for the streams that [`memory`](WeightsBuilder::memory) has recorded, has the device hash
    /// what lies in the memory, and seals the description.
    ///
    /// # Errors
    /// [`Error::Argument`] for two tensors of one name, a name of no or more than 1,024 bytes, an
    /// alias of no tensor, metadata that is no JSON text or too long, or a base on another device;
    /// [`Error::Timeout`]; [`Error::Os`]; [`Error::Driver`].
    pub fn finish(mut self) -> Result<Weights> {
        check_metadata(&self.metadata)?;
        if let Some(memory) = &self.memory {
            wait_for(memory.streams(), &COPY_TIMEOUT.into())?;
        }
        let in_place = self.in_place.take();
        let in_place = in_place.filter(|it| !it.tensors.is_empty());
        self.check_device(in_place.as_ref())?;
        let (mut storage, mut contents) = (Storage::default(), Contents::default());
        if let Some(memory) = self.memory.take() {
            storage.add_memory(&memory)?;
            contents.memory = Some(memory);
        }
        if let Some(in_place) = in_place {
            contents.lying = in_place.lay(&mut storage)?;
        }
        let mut tensors = self.described(&contents.lying)?;
        if let Some(base) = self.base.take() {
            let changed = tensors.iter().map(|tensor| tensor.name.clone()).collect();
            tensors.extend(base.lay(&changed, &mut storage)?);
        }
        if storage.parts.is_empty() {
            // A version without tensors has memory all the same.
            let memory = Memory::allocate(&self.device, self.placed.bytes)?;
            storage.add_memory(&memory)?;
            contents.memory = Some(memory);
        }
        if let [_] = storage.parts[..]
            && contents.memory.is_some()
        {
            storage.bytes = self.placed.bytes;
        }
        let is_hashed = self.hashing == Hashing::Device;
        let hashes = is_hashed.then(|| contents.begin_to_hash(&tensors));
        let hashes = hashes.transpose()?;
        let manifest = storage.describe(tensors)?;
        let mut manifest = manifest
            .with_hashing(self.hashing)
            .with_metadata(self.metadata);
        if let Some(hashes) = hashes {
            manifest.add_hashes(hashes.finish()?);
        }
        Weights::in_storage(&self.device, storage, manifest, contents)
    }

    fn check_device(&self, in_place: Option<&TensorsInPlace>) -> Result<()> {
        let device = self.device.info().id;
        let others = [
            ("tensors in place", in_place.map(|it| it.device().info().id)),
            ("base", self.base.as_ref().map(|base| base.0.device)),
        ];
        for (name, other) in others {
            if let Some(other) = other.filter(|&other| other != device) {
                return Err(Error::argument(name, other, device));
            }
        }
        Ok(())
    }

    /// The tensors of this version's own, with all names of each.
    fn described(&mut self, lying: &[LaidTensor]) -> Result<Vec<TensorInfo>> {
        let copies = std::mem::take(&mut self.tensors);
        let copied = copies.len();
        let mut names = names_of(copied + lying.len(), std::mem::take(&mut self.aliases))?;
        let copies = copies.into_iter().zip(&self.placed.offsets).enumerate();
        let copies =
            copies.map(|(number, ((name, layout), &offset))| (number, name, layout, offset));
        let lying = lying.iter().map(|LaidTensor { tensor, offset, .. }| {
            let (number, name) = (copied + tensor.number, tensor.name.clone());
            (number, name, tensor.layout, *offset)
        });
        let mut infos = Vec::with_capacity(names.len());
        for (number, name, layout, offset) in copies.chain(lying) {
            // A tensor that is copied has its index as its number.
            let hash = self.hashes.get(&number).copied();
            let tensor = |name| TensorInfo {
                name,
                layout,
                offset,
                hash,
            };
            infos.push(tensor(name));
            let others = names.remove(&number).unwrap_or_default();
            infos.extend(others.into_iter().map(|name| tensor(name.into())));
        }
        Ok(infos)
    }
}

/// The further names of tensors, by their number.
fn names_of(tensors: usize, aliases: Vec<(usize, String)>) -> Result<HashMap<usize, Vec<String>>> {
    let mut names: HashMap<usize, Vec<String>> = HashMap::new();
    for (index, name) in aliases {
        if index >= tensors {
            let found = format!("tensor {index} for {name:?}");
            let allowed = format!("one of {tensors} tensors");
            return Err(Error::argument("alias", found, allowed));
        }
        names.entry(index).or_default().push(name);
    }
    Ok(names)
}

fn check_metadata(json: &[u8]) -> Result<()> {
    if json.is_empty() {
        return Ok(());
    }
    let allowed = "a JSON text of up to 1,048,576 bytes";
    if json.len() > METADATA_BYTES_MAX {
        let found = format!("{} bytes", json.len());
        return Err(Error::argument("metadata", found, allowed));
    }
    check_json(json).map_err(|found| Error::argument("metadata", found, allowed))
}
