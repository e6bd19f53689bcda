//! Weights that this process has: loaded from files, or copied from its own memory.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::base::BaseVersion;
use super::blocks::{Block, COPY_TIMEOUT, read_in_parallel};
use super::contents::Contents;
use super::held::Held;
use super::holder::{self, clear_dead};
use super::keeper_session::offer_to_keeper;
use super::later::{Current, Unhashed};
use super::manifest::{ALIGNMENT, Hashing, Manifest, TensorInfo, read_exact};
use super::safetensors::TENSORS_MAX;
use super::source::{Source, SourceFile, SourceTensor, of_file, unreadable};
use super::staging::Staging;
use super::storage::Storage;
use super::weights_name;
use crate::device::Device;
use crate::error::{Error, Result, WeightsFileFault};
use crate::fork::OwnerProcess;
use crate::ipc::domain::Domain;
use crate::ipc::until_open;
use crate::memory::Memory;
use crate::runtime::reactor::new_generation;
use crate::tensor::Layout;
use crate::wait::Wait;

/// The bytes of host memory that are enqueued at once.
const WRITTEN_AT_ONCE: usize = 4 << 20;

/// Model weights in memory of this process, complete and never written again. Publish them under a
/// name to give them to other processes.
#[derive(Debug)]
pub struct Weights {
    /// Mapped as long as this object: the memory itself is kept by every descriptor of it. `None`
    /// if no tensor was copied.
    _memory: Option<Memory>,
    held: Held,
    /// The tensors that are hashed once they are published.
    unhashed: Option<Arc<Unhashed>>,
    owner_process: OwnerProcess,
}

impl Weights {
    /// Loads a source into one allocation of the device, with several readers. Each tensor starts
    /// at a multiple of 512 bytes. The device hashes them when all are there.
    ///
    /// Calls `progress` with the number of bytes that have been read so far, after each part.
    /// Several readers call it, each in a thread of its own, and each number once: a smaller one
    /// may come after a larger one. A slow `progress` delays the load.
    ///
    /// # Errors
    /// [`Error::Limit`] when the device, or this process, has no room;
    /// [`Error::Weights`] when a process wrote to a file since it was opened; [`Error::Os`] when
    /// it cannot be read; [`Error::Timeout`] when the device copies nothing; [`Error::Driver`].
    pub fn load(
        device: &Device,
        source: &Source,
        progress: impl Fn(u64) + Sync,
    ) -> Result<Weights> {
        let tensors = source.tensors.iter().map(|from| &from.tensor);
        let tensors = tensors.map(|tensor| (tensor.name.as_str(), tensor.layout));
        let lengths: Vec<u64> = tensors.clone().map(|(_, layout)| layout.bytes()).collect();
        let builder = Weights::builder(device, tensors)?;
        let bytes_read = AtomicU64::new(0);
        if let Some(memory) = builder.memory() {
            read_in_parallel(device, &lengths, |block, staging| {
                let from = &source.tensors[block.tensor];
                let to = builder.offsets()[block.tensor] + block.begin;
                let progress = |bytes| progress(bytes_read.fetch_add(bytes, Relaxed) + bytes);
                let file = &source.files[from.file];
                read_block(from, file, block, (memory, to), staging, &progress)
            })?;
        }
        source.check_unchanged()?;
        builder.finish()
    }

    /// Copies tensors of this process's host memory into one allocation of the device. Each layout
    /// is [dense](Layout::is_dense), and as long as its bytes.
    ///
    /// # Errors
    /// [`Error::Argument`] for two tensors of one name, a name of no or more than 1,024 bytes, a
    /// layout with gaps or of another length, or more than 1,048,576 tensors;
    /// [`Error::Limit`]; [`Error::Timeout`]; [`Error::Driver`].
    pub fn from_bytes<'a>(
        device: &Device,
        tensors: impl IntoIterator<Item = (&'a str, Layout, &'a [u8])>,
    ) -> Result<Weights> {
        let tensors: Vec<_> = tensors.into_iter().collect();
        for (name, layout, bytes) in &tensors {
            if layout.bytes() != bytes.len() as u64 {
                let found = format!("{layout:?} with {} bytes", bytes.len());
                let allowed = format!("a dense layout of tensor {name:?}, and its bytes");
                return Err(Error::argument("tensors", found, allowed));
            }
        }
        let named = tensors.iter().map(|&(name, layout, _)| (name, layout));
        let builder = Weights::builder(device, named)?;
        if let Some(memory) = builder.memory() {
            let stream = device.stream()?;
            for ((_, _, bytes), &offset) in tensors.iter().zip(builder.offsets()) {
                for (index, part) in bytes.chunks(WRITTEN_AT_ONCE).enumerate() {
                    memory.write(&stream, offset + (index * WRITTEN_AT_ONCE) as u64, part)?;
                }
            }
            stream.synchronize(COPY_TIMEOUT)?;
        }
        builder.finish()
    }

    /// Weights with this manifest. The contents that have no hashes are kept, to be hashed later.
    pub(super) fn in_storage(
        device: &Device,
        storage: Storage,
        manifest: Manifest,
        contents: Contents,
    ) -> Result<Weights> {
        let (id, memory) = (new_generation(), contents.memory.clone());
        let Storage { pieces, leases, .. } = storage;
        let held = Held::new(id, device.info().id, pieces, leases, manifest)?;
        if let Some(memory) = &memory {
            // It is the first part.
            memory.identify(id, 0);
        }
        let is_later = held.manifest.hashing() == Hashing::Later;
        Ok(Weights {
            _memory: memory,
            held,
            unhashed: is_later.then(|| Arc::new(Unhashed::new(contents))),
            owner_process: OwnerProcess::current(),
        })
    }

    /// The tensors, in the order of their offsets.
    pub fn tensors(&self) -> &[TensorInfo] {
        self.held.manifest.tensors()
    }

    /// The length of the memory.
    pub fn bytes(&self) -> u64 {
        self.held.manifest.bytes()
    }

    /// Hands the descriptors to the keeper of `name`, which offers them as its next version: a
    /// worker gets all of the previous version or all of this one. Waits for the keeper to exist
    /// and to answer. This object may be dropped afterwards.
    ///
    /// # Errors
    /// [`Error::NotFound`] when no keeper has the name; [`Error::Name`]; [`Error::PeerGone`] when
    /// the keeper ends and no time is left for the next one; [`Error::Timeout`]; [`Error::Refused`]
    /// when the keeper cannot take it, or fetches 8 offers already; [`Error::Protocol`] when its
    /// answer is damaged; [`Error::Os`], [`Error::State`]. After `PeerGone` and `Timeout` the
    /// version may be offered. Publish once more then: a keeper that offers it gives it no second
    /// number.
    pub fn publish<'w>(
        &self,
        domain: &Domain,
        name: &str,
        wait: impl Into<Wait<'w>>,
    ) -> Result<PublishedWeights> {
        // In a forked child the numbers of the descriptors may belong to other files.
        self.owner_process.check()?;
        let name = weights_name(name)?;
        let offered = Arc::new(self.held.numbered(0));
        let offer = holder::offer(domain, name.as_str(), offered)?;
        let wait = wait.into();
        let (number, held, holder) = until_open(&wait, || {
            let (keeper, number) = offer_to_keeper(domain, &name, &offer.1, &wait)?;
            let held = Arc::new(self.held.numbered(number));
            let holder = holder::serve(domain, name.as_str(), held.clone())?;
            // The next keeper may have begun before the holder was there: it lacks the version.
            keeper.tell_holding(number, &wait)?;
            Ok((number, held, holder))
        })?;
        // Readers need not wait for that.
        clear_dead(domain, name.as_str());
        Ok(PublishedWeights {
            version: number,
            current: Current::new(holder, held, self.unhashed.clone(), (domain, &name)),
            owner_process: OwnerProcess::current(),
        })
    }
}

#[cfg(test)]
impl Weights {
    pub(super) fn held_for_tests(&self, number: u64) -> Held {
        self.held.numbered(number)
    }

    pub(super) fn manifest_for_tests(&self) -> &Manifest {
        &self.held.manifest
    }

    pub(super) fn memory_for_tests(&self) -> &Memory {
        self._memory.as_ref().unwrap()
    }
}

/// Weights that a keeper has taken. As long as it lives, this process is one of those that a later
/// keeper can take the version over from; dropping it takes nothing back.
#[derive(Debug)]
pub struct PublishedWeights {
    /// The number of the version: 1 more than the previous one of this name.
    pub version: u64,
    current: Arc<Current>,
    owner_process: OwnerProcess,
}

impl PublishedWeights {
    /// Whether each tensor of the version has a content hash. Waits for those that are computed
    /// [later](Hashing::Later), until the keeper has them, too.
    ///
    /// # Errors
    /// [`Error::Timeout`]; once, the error for which there will be none; [`Error::State`].
    pub fn wait_for_hashes<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<bool> {
        // The thread, and its lock, are the parent's.
        self.owner_process.check()?;
        self.current.wait_for_hashes(&wait.into())?;
        Ok(self.current.held().is_hashed())
    }
}

impl From<&Weights> for BaseVersion {
    fn from(weights: &Weights) -> BaseVersion {
        BaseVersion(Arc::new(weights.held.numbered(0)))
    }
}

impl From<&PublishedWeights> for BaseVersion {
    fn from(published: &PublishedWeights) -> BaseVersion {
        BaseVersion(published.current.held().clone())
    }
}

/// Where tensors lie in one memory.
#[derive(Debug)]
pub(super) struct Placement {
    pub(super) bytes: u64,
    pub(super) offsets: Vec<u64>,
}

impl Placement {
    pub(super) fn of(layouts: impl Iterator<Item = Layout>) -> Result<Placement> {
        let too_many = |found: String| {
            Error::argument(
                "tensors",
                found,
                format!("up to {TENSORS_MAX}, in 2^62 bytes"),
            )
        };
        let (mut bytes, mut offsets) = (0u64, Vec::new());
        for layout in layouts {
            offsets.push(bytes);
            bytes = bytes
                .checked_add(layout.bytes())
                .and_then(|end| end.checked_next_multiple_of(ALIGNMENT))
                .filter(|&end| end <= 1 << 62)
                .ok_or_else(|| too_many("more bytes".into()))?;
        }
        if offsets.len() > TENSORS_MAX {
            return Err(too_many(offsets.len().to_string()));
        }
        // Memory of no bytes cannot be allocated.
        let bytes = bytes.max(ALIGNMENT);
        Ok(Placement { bytes, offsets })
    }
}

/// Reads the block of a source's tensor, and enqueues its copy to byte `to` of `memory`.
fn read_block(
    from: &SourceTensor,
    file: &SourceFile,
    block: &Block,
    (memory, to): (&Memory, u64),
    staging: &mut Staging,
    progress: &dyn Fn(u64),
) -> Result<()> {
    let mut done = 0;
    while done < block.bytes {
        let buffer = staging.fill(COPY_TIMEOUT)?;
        let part_bytes = (block.bytes - done).min(buffer.len() as u64) as usize;
        let part = &mut buffer[..part_bytes];
        let at = from.tensor.begin.checked_add(block.begin + done);
        let at = at.ok_or_else(|| of_file(&file.path, WeightsFileFault::changed()))?;
        read_exact(file.fd.as_fd(), part, at).map_err(|error| unreadable(&file.path, error))?;
        staging.copy_to(memory, to + done, part_bytes)?;
        done += part_bytes as u64;
        progress(part_bytes as u64);
    }
    Ok(())
}
