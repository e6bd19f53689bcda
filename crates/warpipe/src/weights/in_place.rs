//! Tensors that are published where they lie: the descriptors of the pieces that another allocator
//! of this process has put them in. **This module is marked for unsafe**: it makes slices of memory
//! by address.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use super::exports::PieceFd;
use super::lease;
use super::manifest::{ALIGNMENT, PIECES_MAX, Part};
use super::room::check_room;
use super::storage::Storage;
use crate::backend::{Access, DevicePtr};
use crate::debug::opaque_debug;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::memory::DeviceSlice;
use crate::memory::slice::MappedMemory;
use crate::mutex::LockUnpoisoned;
use crate::runtime::drop_after_fence::DropAfterFence;
use crate::tensor::Layout;

/// So many pieces are exported before there is another look at the limit of descriptors.
const LOOK_EVERY: usize = 64;

/// Tensors to be published where they lie, beside those of a
/// [`WeightsBuilder`](super::WeightsBuilder) or alone: nothing of them is copied.
///
/// They lie in memory that this process has a descriptor of, or can make one: [`Memory`], and what
/// another allocator has made with the virtual memory functions to be exported (PyTorch's
/// expandable segments). A version of such weights has a descriptor for each allocation that a
/// tensor lies in. Readers map these whole: they see what else lies there.
///
/// The owner of each tensor is kept until no process has the version: the keeper has another one or
/// has ended, and each reader and publisher has given it up or is dead. Then it is dropped on a
/// thread of the library.
///
/// ```
/// use std::time::Duration;
/// use warpipe::weights::{Keeper, SharedWeights, TensorsInPlace, Weights};
/// use warpipe::{DType, Device, Domain, Layout, Memory};
/// # let folder = std::env::temp_dir().join(format!("warpipe-in-place-{}", std::process::id()));
/// # let (domain, device, wait) = (Domain::at(&folder)?, Device::host(), Duration::from_secs(5));
/// # let keeper = Keeper::new("llama", domain.options())?;
/// let memory = Memory::allocate(&device, 4096)?;
/// let stream = device.stream()?;
/// memory.write(&stream, 512, b"abc")?;
/// stream.synchronize(wait)?;
///
/// let mut tensors = TensorsInPlace::new(&device);
/// let (layout, ptr) = (Layout::contiguous(DType::U8, &[3])?, memory.ptr() + 512);
/// // SAFETY: the tensor lies in `memory`, which its owner keeps.
/// unsafe { tensors.add("bias", layout, ptr, Box::new(memory))? };
/// let mut builder = Weights::builder(&device, [])?;
/// builder.in_place = Some(tensors);
/// let weights = builder.finish()?;
/// weights.publish(&domain, "llama", wait)?;
///
/// let shared = SharedWeights::open("llama", domain.on(&device), wait)?;
/// assert_eq!(shared.tensor("bias").expect("it was published").memory.to_vec(wait)?, b"abc");
/// # drop((shared, weights, keeper)); std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), warpipe::Error>(())
/// ```
///
/// [`Memory`]: crate::Memory
pub struct TensorsInPlace {
    device: Device,
    /// By address.
    pub(super) tensors: BTreeMap<DevicePtr, TensorInPlace>,
    pieces: BTreeMap<DevicePtr, (u64, Arc<PieceFd>)>,
    /// How many of them were exported for these tensors.
    new_pieces: usize,
    owners: Owners,
}

/// A piece's address, its length and its descriptor.
type PieceInPlace = (DevicePtr, (u64, Arc<PieceFd>));

/// What keeps tensors allocated.
type Owners = Mutex<Vec<Box<dyn Any + Send>>>;

pub(super) struct TensorInPlace {
    pub(super) name: Arc<str>,
    pub(super) layout: Layout,
    /// Counted from 0 as they were added.
    pub(super) number: usize,
}

opaque_debug!(TensorsInPlace { device });

impl TensorsInPlace {
    /// None yet.
    pub fn new(device: &Device) -> TensorsInPlace {
        TensorsInPlace {
            device: device.clone(),
            tensors: BTreeMap::new(),
            pieces: BTreeMap::new(),
            new_pieces: 0,
            owners: Mutex::default(),
        }
    }

    /// The number of descriptors that their version has.
    #[doc(hidden)] // For the conformance suite.
    pub fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Adds a tensor with its contents, which are complete. After an error the tensor has not been
    /// added: it can be published as a copy.
    ///
    /// # Safety
    /// The tensor's bytes at `ptr` lie on the device and are allocated as long as `owner` lives.
    /// Nothing writes them meanwhile: readers would see that.
    ///
    /// # Errors
    /// [`Error::Handle`] for memory of another kind, `cudaMalloc`'s for example;
    /// [`Error::Argument`] for a layout that is not [dense](Layout::is_dense), a tensor without
    /// elements, an address that is no multiple of 512 bytes from its allocation's first, a tensor
    /// that overlaps one that was added, or lies in allocations of several lengths, or more than
    /// 16,384 pieces; [`Error::Os`], [`Error::Driver`].
    pub unsafe fn add(
        &mut self,
        name: &str,
        layout: Layout,
        ptr: DevicePtr,
        owner: Box<dyn Any + Send>,
    ) -> Result<()> {
        self.check(name, &layout, ptr)?;
        let new = self.cover(name, ptr, layout.bytes())?;
        self.pieces.extend(new);
        let tensor = TensorInPlace {
            name: name.into(),
            layout,
            number: self.tensors.len(),
        };
        self.tensors.insert(ptr, tensor);
        self.owners.locked().push(owner);
        Ok(())
    }

    fn check(&self, name: &str, layout: &Layout, ptr: DevicePtr) -> Result<()> {
        let refused = |found: String, allowed: &str| {
            let found = format!("{name:?}, {found}");
            let allowed = format!("{allowed}; or publish a copy of it");
            Err(Error::argument("tensor", found, allowed))
        };
        if layout.offset() != 0 || !layout.is_dense() {
            return refused(format!("of {layout:?}"), "one without gaps");
        }
        let end = ptr.checked_add(layout.bytes()).filter(|&end| end > ptr);
        let Some(end) = end else {
            return refused(format!("of {} bytes", layout.bytes()), "one with elements");
        };
        let before = self.tensors.range(..end).next_back();
        if let Some((&at, other)) = before
            && at + other.layout.bytes() > ptr
        {
            let found = format!("which overlaps {:?}", other.name);
            return refused(found, "one that shares no memory with another");
        }
        Ok(())
    }

    /// Those of the pieces that a tensor lies in that are not held yet.
    fn cover(&mut self, name: &str, ptr: DevicePtr, bytes: u64) -> Result<Vec<PieceInPlace>> {
        let (mut at, mut length_of_first, mut new) = (ptr, None, Vec::new());
        while at < ptr + bytes {
            let known = self.pieces.range(..=at).next_back();
            let known = known.map(|(&base, &(length, _))| (base, length));
            let known = known.filter(|&(base, length)| at - base < length);
            let (base, length) = match known {
                Some(known) => known,
                None => {
                    let count = self.pieces.len() + new.len();
                    let (base, length, fd) = self.hold(name, at, count)?;
                    new.push((base, (length, fd)));
                    (base, length)
                }
            };
            if at == ptr && !(ptr - base).is_multiple_of(ALIGNMENT) {
                let found = format!("{name:?}, {} bytes behind its allocation", ptr - base);
                let allowed =
                    format!("at a multiple of {ALIGNMENT} bytes; or publish a copy of it");
                return Err(Error::argument("tensor", found, allowed));
            }
            // A reader maps them into one range, which is pieces of one length.
            let first = *length_of_first.get_or_insert(length);
            if length != first {
                let found = format!("{name:?}, in allocations of {first} and of {length} bytes");
                let allowed = "one in allocations of one length; or publish a copy of it";
                return Err(Error::argument("tensor", found, allowed));
            }
            at = base + length;
        }
        Ok(new)
    }

    /// The piece at this address, beside `count` others.
    fn hold(
        &mut self,
        name: &str,
        at: DevicePtr,
        count: usize,
    ) -> Result<(DevicePtr, u64, Arc<PieceFd>)> {
        if count == PIECES_MAX {
            let found = format!("{} for {name:?}", count + 1);
            let allowed = format!("up to {PIECES_MAX} in a version; publish a copy of it");
            return Err(Error::argument("pieces", found, allowed));
        }
        let (base, bytes, fd) = PieceFd::export(&self.device, at)?;
        // Where another version has it already, no descriptor was opened.
        if Arc::strong_count(&fd) == 1 {
            self.new_pieces += 1;
            if self.new_pieces.is_multiple_of(LOOK_EVERY) {
                check_room(LOOK_EVERY, name)?;
            }
        }
        Ok((base, bytes, fd))
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// Adds the parts of their memory to a version's, with a lease of it, and returns the tensors
    /// in the order of their offsets.
    pub(super) fn lay(self, storage: &mut Storage) -> Result<Vec<LaidTensor>> {
        let lengths = self.pieces.iter().map(|(&base, &(bytes, _))| (base, bytes));
        let (parts, begins) = parts_of(lengths, storage.bytes);
        let pieces: Vec<_> = self.pieces.into_values().map(|(_, fd)| fd).collect();
        // Dropped once the streams that were given work on the tensors are past that.
        let owners = Arc::new(DropAfterFence::new(Arc::default(), self.owners)?);
        let lease = storage.add_lease(lease::grant(owners.clone())?)?;
        let mut rest = &pieces[..];
        for part in parts {
            let (of_it, behind) = rest.split_at(part.pieces as usize);
            rest = behind;
            let base = PieceFd::part_of(of_it);
            storage.add_part(Part {
                lease,
                base,
                ..part
            });
        }
        storage.pieces.extend_from_slice(&pieces);
        let devices = (&self.device, self.device.info().id);
        let memory = MappedMemory::new(devices, &owners, owners.clone());
        let label: Arc<str> = "weights in place".into();
        let tensors = self.tensors.into_iter().map(|(ptr, tensor)| {
            let bytes = tensor.layout.bytes();
            let begins = begins.range(..=ptr).next_back();
            let offset = begins.map_or(0, |(base, begin)| begin + (ptr - base));
            // SAFETY: the promise of `add`: allocated as long as the owners, which `memory` keeps.
            let slice =
                unsafe { DeviceSlice::new(memory.clone(), ptr, bytes, Access::Read, &label) };
            LaidTensor {
                tensor,
                offset,
                slice,
            }
        });
        Ok(tensors.collect())
    }
}

/// The parts that pieces at these addresses make, in their order: each as long as it can be,
/// because no tensor lies in two of them. Also where each part begins in the version's memory, by
/// its address.
fn parts_of(
    pieces: impl Iterator<Item = (DevicePtr, u64)>,
    begin: u64,
) -> (Vec<Part>, BTreeMap<DevicePtr, u64>) {
    let mut parts: Vec<Part> = Vec::new();
    let (mut begins, mut next, mut end_of_last) = (BTreeMap::new(), begin, None);
    for (base, bytes) in pieces {
        match parts.last_mut() {
            Some(part) if end_of_last == Some(base) && part.piece_bytes == bytes => {
                part.pieces += 1;
            }
            _ => {
                parts.push(Part::whole(bytes));
                begins.insert(base, next);
            }
        }
        next += bytes;
        end_of_last = Some(base + bytes);
    }
    (parts, begins)
}

/// A tensor with its place in a version's memory.
pub(super) struct LaidTensor {
    pub(super) tensor: TensorInPlace,
    pub(super) offset: u64,
    pub(super) slice: DeviceSlice,
}

#[cfg(test)]
mod tests;
