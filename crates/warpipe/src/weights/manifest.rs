//! The manifest of weights: the parts of their memory, which tensor lies where in it, and its
//! content hash.
//!
//! It travels in a sealed memfd beside the memory's descriptors. A receiver copies it once and uses
//! the copy alone, after it has been checked.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::fs::SealFlags;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::safetensors::{TENSORS_MAX, check_name};
use crate::backend::host;
use crate::error::{Error, Result, WeightsDifference, WeightsFault, WeightsFileFault};
use crate::fork::CloseOnForkFd;
use crate::os::without_size_signal;
use crate::shm::seal;
use crate::tensor::Layout;

mod encoding;

/// The longest manifest.
const MANIFEST_BYTES_MAX: u64 = 256 << 20;

/// Every tensor starts at a multiple of this.
pub(super) const ALIGNMENT: u64 = 512;

/// The longest metadata of a version.
pub(super) const METADATA_BYTES_MAX: usize = 1 << 20;

/// The most leases of a version: of the publishers of the tensors in place that it has.
pub(super) const LEASES_MAX: usize = 64;

/// The most pieces of a version, each of which is a descriptor: the memory of the largest GPUs in
/// pieces of 20 MiB.
pub(super) const PIECES_MAX: usize = 1 << 14;

/// The receiver reads the file with `pread`: the content must be final, too.
const FINAL: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::WRITE)
    .union(SealFlags::SEAL);

/// A content hash: 128 bits of XXH3 over those of the content's leaves, as
/// `docs/design/weights.md` says. It shows damage, and is no signature.
pub type ContentHash = [u8; 16];

/// When the content hashes of a version are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Hashing {
    /// By the device, before the version is offered.
    #[default]
    Device,
    /// By the device, on a thread of the publisher, once the version is offered. Until then the
    /// version has none, and so it stays when the publisher dies before.
    Later,
    /// Never. Nothing can be compared: a keeper that takes over does not offer the version.
    None,
}

impl Hashing {
    /// `device`, `later` or `none`.
    pub fn name(self) -> &'static str {
        match self {
            Hashing::Device => "device",
            Hashing::Later => "later",
            Hashing::None => "none",
        }
    }

    /// The value of this [name](Hashing::name).
    pub fn from_name(name: &str) -> Option<Hashing> {
        let all = [Hashing::Device, Hashing::Later, Hashing::None];
        all.into_iter().find(|hashing| hashing.name() == name)
    }
}

/// One tensor of published weights.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TensorInfo {
    /// The tensor's name.
    pub name: Arc<str>,
    /// The element type, the shape and the strides: without gaps, the dimensions in any order.
    pub layout: Layout,
    /// Where its first byte lies in the memory: a multiple of 512.
    pub offset: u64,
    /// The hash of its bytes; `None` if it has not been computed: see [`Hashing`].
    pub hash: Option<ContentHash>,
}

impl TensorInfo {
    /// Whether it is another name of the same tensor.
    fn is_same_bytes(&self, other: &TensorInfo) -> bool {
        (self.offset, self.layout, self.hash) == (other.offset, other.layout, other.hash)
    }
}

/// A part of the memory: allocations of one length, side by side. A reader maps it into one range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Part {
    pub(super) pieces: u32,
    pub(super) piece_bytes: u64,
    /// The number, from 1 on, of the lease that keeps its owner. 0: no lease is needed.
    pub(super) lease: u32,
    /// `None`: the memory is this version's.
    pub(super) base: Option<PartId>,
}

/// Under which all processes know a part's memory, whatever version it comes with: the version that it
/// was memory of first, and its number there; or what its publisher drew for the pieces of its
/// allocator, and 0. Only a claim of the publisher.
pub(super) type PartId = ([u8; 16], u32);

impl Part {
    /// A part that is one allocation of this library.
    pub(super) fn whole(bytes: u64) -> Part {
        Part {
            pieces: 1,
            piece_bytes: bytes,
            lease: 0,
            base: None,
        }
    }

    /// Under which all processes know it, as part `number` of the version `id`.
    pub(super) fn id(self, id: [u8; 16], number: u32) -> PartId {
        self.base.unwrap_or((id, number))
    }

    /// Its length, of a part that was checked.
    pub(super) fn bytes(self) -> u64 {
        u64::from(self.pieces) * self.piece_bytes
    }

    fn check(self) -> Option<u64> {
        let is_one = (1..=PIECES_MAX).contains(&(self.pieces as usize));
        let bytes = self.piece_bytes.checked_mul(u64::from(self.pieces))?;
        let is_leased = self.lease as usize <= LEASES_MAX;
        let is_whole = bytes > 0 && self.piece_bytes.is_multiple_of(ALIGNMENT);
        (is_one && is_leased && is_whole).then_some(bytes)
    }
}

/// The tensors of a version, in the order of their offsets. The parts of its memory follow each
/// other without a gap.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Manifest {
    bytes: u64,
    parts: Vec<Part>,
    /// Where each part begins.
    begins: Vec<u64>,
    tensors: Vec<TensorInfo>,
    /// Indices of `tensors`, by name.
    by_name: HashMap<Arc<str>, u32>,
    /// Whether every tensor has a hash.
    is_hashed: bool,
    hashing: Hashing,
    metadata: Vec<u8>,
}

impl Manifest {
    /// Checks the tensors of a memory of `bytes` bytes, which end in the last of its parts: names
    /// are unique, each range lies inside one part, aligned and in order, and none overlaps
    /// another. Tied weights are one tensor under several names: they follow each other, with the
    /// same offset, layout and hash.
    pub(super) fn new(
        bytes: u64,
        parts: Vec<Part>,
        tensors: Vec<TensorInfo>,
    ) -> Result<Manifest, String> {
        let begins = begins_of(bytes, &parts)?;
        if tensors.len() > TENSORS_MAX {
            return Err(format!("more than {TENSORS_MAX} tensors"));
        }
        let mut by_name = HashMap::with_capacity(tensors.len());
        let mut end_of_last = 0;
        let mut last: Option<&TensorInfo> = None;
        for (index, tensor) in (0..).zip(&tensors) {
            let TensorInfo { name, offset, .. } = tensor;
            check_name(name)?;
            match by_name.entry(name.clone()) {
                Entry::Vacant(place) => place.insert(index),
                Entry::Occupied(_) => return Err(format!("two tensors {name:?}")),
            };
            if tensor.layout.offset() != 0 || !tensor.layout.is_dense() {
                return Err(format!("tensor {name:?} of {:?}", tensor.layout));
            }
            let end = offset.checked_add(tensor.layout.bytes());
            let Some(end) = end.filter(|&end| end <= bytes) else {
                return Err(format!("tensor {name:?} outside of the memory"));
            };
            let part = part_at(&begins, *offset);
            if end > begins[part] + parts[part].bytes() {
                return Err(format!("tensor {name:?} in two parts of the memory"));
            }
            let is_alias = last.is_some_and(|last| tensor.is_same_bytes(last));
            if !is_alias && (offset % ALIGNMENT != 0 || *offset < end_of_last) {
                return Err(format!("tensor {name:?} at byte {offset}"));
            }
            end_of_last = end;
            last = Some(tensor);
        }
        Ok(Manifest {
            bytes,
            parts,
            begins,
            is_hashed: are_hashed(&tensors),
            tensors,
            by_name,
            hashing: Hashing::default(),
            metadata: Vec::new(),
        })
    }

    /// Says when the hashes are computed.
    pub(super) fn with_hashing(self, hashing: Hashing) -> Manifest {
        Manifest { hashing, ..self }
    }

    /// Has the version carry these bytes.
    pub(super) fn with_metadata(self, metadata: Vec<u8>) -> Manifest {
        Manifest { metadata, ..self }
    }

    /// Has the tensors have these hashes, each by the tensor's number in its order.
    pub(super) fn add_hashes(&mut self, hashes: impl IntoIterator<Item = (usize, ContentHash)>) {
        for (number, hash) in hashes {
            self.tensors[number].hash = Some(hash);
        }
        self.is_hashed = are_hashed(&self.tensors);
    }

    /// Keeps what serving a version needs. The tensors, about 0.3 KB each, and the metadata go: its
    /// readers decode the sealed manifest themselves.
    pub(super) fn forget_tensors(&mut self) {
        (self.tensors, self.by_name) = (Vec::new(), HashMap::new());
        self.metadata = Vec::new();
    }

    /// When the hashes are computed.
    pub(super) fn hashing(&self) -> Hashing {
        self.hashing
    }

    /// Whether every tensor has a hash.
    pub(super) fn is_hashed(&self) -> bool {
        self.is_hashed
    }

    /// What its publisher gave with it; empty if it gave nothing.
    pub(super) fn metadata(&self) -> &[u8] {
        &self.metadata
    }

    /// The number of leases.
    pub(super) fn leases(&self) -> usize {
        let numbers = self.parts.iter().map(|part| part.lease as usize);
        numbers.max().unwrap_or(0)
    }

    /// For each part of `other` the one of this version in whose place it can be, so that all tensors
    /// are where they were: of the same length, in pieces of the same length, with the same tensors at
    /// the same places. Else how its tensors differ, apart from their contents.
    pub(super) fn places_of(&self, other: &Manifest) -> Result<Vec<u32>, WeightsDifference> {
        let shapes = |manifest: &Manifest| -> Vec<(u32, u64)> {
            let parts = manifest.parts.iter();
            parts.map(|part| (part.pieces, part.piece_bytes)).collect()
        };
        let place = |tensor: &TensorInfo| (tensor.offset, tensor.layout);
        // Behind the last tensor a memory may have more: of copies its length is told without that, of
        // tensors in place with it.
        let (ours, theirs) = (shapes(self), shapes(other));
        let is_alike = ours == theirs
            && self.tensors.len() == other.tensors.len()
            && self
                .tensors
                .iter()
                .zip(&other.tensors)
                .all(|(one, two)| place(one) == place(two) && one.name == two.name);
        if is_alike {
            return Ok((0..ours.len() as u32).collect());
        }
        let mut places: Vec<Option<u32>> = vec![None; theirs.len()];
        let mut of_ours: Vec<Option<usize>> = vec![None; ours.len()];
        let mut difference = WeightsDifference::default();
        for tensor in &self.tensors {
            let Some(found) = other.tensor(&tensor.name) else {
                difference.missing.push(tensor.name.to_string());
                continue;
            };
            let (at, begin) = self.part_at(tensor.offset);
            let (to, other_begin) = other.part_at(found.offset);
            let is_free = of_ours[at].is_none() && places[to].is_none();
            let is_there = of_ours[at] == Some(to) || (is_free && ours[at] == theirs[to]);
            // One without elements is nowhere.
            let is_empty = tensor.layout.bytes() == 0;
            let is_placed = is_empty || (begin == other_begin && is_there);
            if tensor.layout != found.layout || !is_placed {
                difference.different.push(tensor.name.to_string());
            } else if !is_empty {
                (of_ours[at], places[to]) = (Some(to), Some(at as u32));
            }
        }
        let unknown = |tensor: &&TensorInfo| self.tensor(&tensor.name).is_none();
        let unexpected = other.tensors.iter().filter(unknown);
        difference.unexpected = unexpected.map(|tensor| tensor.name.to_string()).collect();
        let is_same = difference == WeightsDifference::default() && ours.len() == theirs.len();
        let places = places.into_iter().collect::<Option<Vec<u32>>>();
        places.filter(|_| is_same).ok_or(difference)
    }

    /// The parts of the memory, and where each begins.
    pub(super) fn parts(&self) -> impl Iterator<Item = (u64, Part)> {
        self.begins.iter().copied().zip(self.parts.iter().copied())
    }

    /// The index of the part in which a tensor at this offset lies, and its offset there.
    pub(super) fn part_at(&self, offset: u64) -> (usize, u64) {
        let part = part_at(&self.begins, offset);
        (part, offset - self.begins[part])
    }

    /// The length of each piece, in the order of their descriptors.
    pub(super) fn pieces(&self) -> impl Iterator<Item = u64> + Clone {
        let of_part = |part: &Part| std::iter::repeat_n(part.piece_bytes, part.pieces as usize);
        self.parts.iter().flat_map(of_part)
    }

    /// The length of the memory.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    pub(super) fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        Some(&self.tensors[*self.by_name.get(name)? as usize])
    }

    /// Writes it to a sealed memfd.
    ///
    /// # Errors
    /// [`Error::Weights`] when it is too long; [`Error::Os`].
    pub(super) fn seal(&self, name: &str) -> Result<SealedManifest> {
        let bytes = self.encode();
        if bytes.len() as u64 > MANIFEST_BYTES_MAX {
            return Err(Error::Weights(WeightsFault::File {
                path: name.into(),
                fault: WeightsFileFault::limit("bytes of tensors' names", MANIFEST_BYTES_MAX),
            }));
        }
        let fd = seal::memfd(c"warpipe-manifest", bytes.len() as u64)?;
        write_all(fd.as_fd(), &bytes).map_err(|e| Error::os("pwrite", "a manifest", e))?;
        rustix::fs::fcntl_add_seals(&fd, FINAL)
            .map_err(|e| Error::os("fcntl(F_ADD_SEALS)", "a manifest", e))?;
        Ok(SealedManifest {
            fd,
            bytes: bytes.len() as u64,
        })
    }

    /// Copies and checks the manifest that a peer sent.
    pub(super) fn receive(fd: BorrowedFd<'_>, bytes: u64) -> Result<Manifest, String> {
        if bytes > MANIFEST_BYTES_MAX {
            return Err(format!("{bytes} bytes, at most {MANIFEST_BYTES_MAX}"));
        }
        host::check_memfd(fd, bytes, FINAL)?;
        let mut copy = vec![0; bytes as usize];
        read_exact(fd, &mut copy, 0).map_err(|error| error.to_string())?;
        Manifest::decode(&copy)
    }
}

fn are_hashed(tensors: &[TensorInfo]) -> bool {
    tensors.iter().all(|tensor| tensor.hash.is_some())
}

/// The reason, if any, why these bytes are no JSON text.
pub(super) fn check_json(bytes: &[u8]) -> Result<(), String> {
    let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let read = serde_json::from_str::<serde::de::IgnoredAny>(text);
    read.map(drop).map_err(|error| error.to_string())
}

/// Where the parts of a memory of `bytes` bytes begin.
fn begins_of(bytes: u64, parts: &[Part]) -> Result<Vec<u64>, String> {
    let (mut begins, mut end, mut pieces) = (Vec::with_capacity(parts.len()), 0u64, 0);
    for part in parts {
        let wrong = || format!("a part of {} times {} bytes", part.pieces, part.piece_bytes);
        begins.push(end);
        let after = part.check().and_then(|length| end.checked_add(length));
        end = after.ok_or_else(wrong)?;
        pieces += part.pieces as usize;
    }
    if pieces > PIECES_MAX {
        return Err(format!("{pieces} pieces, at most {PIECES_MAX}"));
    }
    match begins.last() {
        Some(&last) if last < bytes && bytes <= end => Ok(begins),
        _ => Err(format!("{bytes} bytes in parts of {end}")),
    }
}

fn part_at(begins: &[u64], offset: u64) -> usize {
    begins.partition_point(|&begin| begin <= offset).max(1) - 1
}

/// A manifest in a file that no process can change.
#[derive(Debug)]
pub(super) struct SealedManifest {
    pub(super) fd: CloseOnForkFd,
    pub(super) bytes: u64,
}

/// `pread` until `bytes` is full.
///
/// # Errors
/// `UnexpectedEof` when the file ends before.
pub(super) fn read_exact(fd: BorrowedFd<'_>, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match rustix::io::pread(fd, &mut bytes[done..], offset + done as u64) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => done += count,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn write_all(fd: BorrowedFd<'_>, bytes: &[u8]) -> Result<(), Errno> {
    let mut done = 0;
    while done < bytes.len() {
        match without_size_signal(|| rustix::io::pwrite(fd, &bytes[done..], done as u64)) {
            Ok(0) => return Err(Errno::IO),
            Ok(count) => done += count,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
