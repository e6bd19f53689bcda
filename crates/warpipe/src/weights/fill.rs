//! Weights that the caller copies into their memory itself, on streams of its own.

use super::blocks::{COPY_TIMEOUT, hash_memory};
use super::load::{Placement, Weights};
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

    /// Another name of a tensor, by its index: tied weights lie in the memory once. An index
    /// without a tensor is reported by [`finish`](WeightsBuilder::finish).
    pub fn alias(mut self, name: &str, tensor: usize) -> WeightsBuilder {
        self.aliases.push((tensor, name.to_string()));
        self
    }

    /// Waits for the streams that [`memory`](WeightsBuilder::memory) has recorded, hashes what lies
    /// in the memory, and seals the description. Several threads read the memory once, each
    /// through two buffers of 1 MiB.
    ///
    /// # Errors
    /// [`Error::Argument`] for two tensors of one name, a name of no or more than 1,024 bytes, or an
    /// alias of no tensor; [`Error::Timeout`]; [`Error::DescriptorLimit`]; [`Error::Driver`].
    pub fn finish(self) -> Result<Weights> {
        let WeightsBuilder {
            memory,
            tensors,
            placed,
            mut aliases,
        } = self;
        if let Some((index, name)) = aliases.iter().find(|alias| alias.0 >= tensors.len()) {
            let found = format!("tensor {index} for {name:?}");
            let allowed = format!("one of {} tensors", tensors.len());
            return Err(Error::argument("alias", found, allowed));
        }
        // Stable: the aliases of a tensor keep their order.
        aliases.sort_by_key(|alias| alias.0);
        let mut aliases = aliases.into_iter().peekable();
        let mut named = Vec::new();
        let (mut offsets, mut hashes) = (Vec::new(), Vec::new());
        wait_for(memory.streams(), COPY_TIMEOUT)?;
        let lengths: Vec<u64> = tensors.iter().map(|tensor| tensor.1.bytes()).collect();
        let hashed = hash_memory(&memory, &placed.offsets, &lengths)?;
        for (index, (name, layout)) in tensors.into_iter().enumerate() {
            let (offset, hash) = (placed.offsets[index], hashed[index]);
            let mut add = |name| {
                named.push((name, layout));
                offsets.push(offset);
                hashes.push(hash);
            };
            add(name);
            while let Some((_, name)) = aliases.next_if(|alias| alias.0 == index) {
                add(name);
            }
        }
        let placed = Placement {
            bytes: placed.bytes,
            offsets,
        };
        Weights::of(memory, named.into_iter(), placed, hashes)
    }
}
