//! Weights that the caller copies into their memory itself, on streams of its own.

use std::time::Duration;

use xxhash_rust::xxh3::Xxh3;

use super::load::{Placement, Weights};
use super::manifest::ContentHash;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::memory::slice::zeroed;
use crate::tensor::Layout;

/// The bytes that are copied to the host at once to be hashed.
const HASHED_AT_ONCE: u64 = 4 << 20;

/// How long one such copy may take, after the copies before it.
const COPY_TIMEOUT: Duration = Duration::from_secs(60);

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
    /// in the memory, and seals the description. It reads the memory once, through a buffer of
    /// 4 MiB.
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
        let mut copy = zeroed(HASHED_AT_ONCE)?;
        for (index, (name, layout)) in tensors.into_iter().enumerate() {
            let offset = placed.offsets[index];
            let hash = content_hash(&memory, offset, layout.bytes(), &mut copy)?;
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

/// The hash of `bytes` bytes of the memory, read through `copy`.
fn content_hash(memory: &Memory, offset: u64, bytes: u64, copy: &mut [u8]) -> Result<ContentHash> {
    let (mut hasher, mut done) = (Xxh3::new(), 0);
    while done < bytes {
        let part = (bytes - done).min(copy.len() as u64);
        let part = &mut copy[..part as usize];
        memory.copy_to(offset + done, part, COPY_TIMEOUT)?;
        hasher.update(part);
        done += part.len() as u64;
    }
    Ok(hasher.digest128().to_be_bytes())
}
