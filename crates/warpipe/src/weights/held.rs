//! One version of weights as a process holds it: descriptors and their description. Nothing of it
//! needs a device.
//!
//! A reply brings a version's description with its manifest and the first of its pieces. A
//! process that wants the others asks for them: see [`PartialVersion`].

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::exports::PieceFd;
use super::lease;
use super::manifest::{Manifest, Part, PartId, SealedManifest};
use super::room::check_room;
use crate::backend::host;
use crate::device_types::{DeviceId, DeviceKind};
use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::ipc::{FDS_MAX, IncomingReply, OutgoingReply, Rejection};
use crate::runtime::closer::{PeerFd, closes_at_once_elsewhere};
use crate::statistics::RegionRow;

/// The largest number of a version. A name in the domain's directory says a version's number: a
/// process that writes there could otherwise use the numbers up.
pub(super) const NUMBER_MAX: u64 = 1 << 48;

/// A version of weights. The `id` is of their content: a publisher draws it when it fills the
/// memory. The number is of the keeper, 0 before that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Version {
    pub(super) number: u64,
    pub(super) id: [u8; 16],
}

/// The most descriptors that go with a version's description.
const FIRST_MAX: usize = 4;

/// A version's description. Descriptors go along: the manifest, and all leases and pieces, if they are
/// few; else leases alone, as the receiver may have pieces already.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct VersionReply {
    pub(super) version: Version,
    device: DeviceId,
    manifest_bytes: u64,
}

/// The descriptors of one version.
#[derive(Debug, Clone)]
pub(super) struct Held {
    pub(super) version: Version,
    pub(super) device: DeviceId,
    /// Checked. A keeper's [has no tensors](Manifest::forget_tensors).
    pub(super) manifest: Arc<Manifest>,
    /// As it goes to other processes.
    sealed: Arc<SealedManifest>,
    /// Of memory that its publisher must not use again as long as any process has this. A partial
    /// version has those of its base, too.
    pub(super) leases: Arc<[Arc<PeerFd>]>,
    pub(super) pieces: Arc<[Arc<PieceFd>]>,
    /// In a keeper: say in this process's statistics that it has the memory.
    rows: Arc<[RegionRow]>,
}

impl Held {
    /// A publisher's version, which has no number yet.
    pub(super) fn new(
        id: [u8; 16],
        device: DeviceId,
        pieces: Vec<Arc<PieceFd>>,
        leases: Vec<Arc<PeerFd>>,
        manifest: Manifest,
    ) -> Result<Held> {
        Ok(Held {
            version: Version { number: 0, id },
            device,
            sealed: Arc::new(manifest.seal("weights")?),
            manifest: Arc::new(manifest),
            leases: leases.into(),
            pieces: pieces.into(),
            rows: Arc::default(),
        })
    }

    /// Says in this process's statistics that it keeps the memory without mapping it.
    pub(super) fn keep(&mut self) {
        let (device, id) = (self.device, self.version.id);
        let kept = (0..).zip(self.manifest.parts()).map(|(number, (_, part))| {
            let bytes = part.bytes();
            let row = match &self.pieces[..] {
                [only] => RegionRow::keep((**only).as_fd(), bytes, device),
                _ => RegionRow::keep_many(bytes, device),
            };
            let (id, number) = part.id(id, number);
            row.identify(id, number.into());
            row
        });
        self.rows = kept.collect();
    }

    /// The same descriptors, for a version with this number.
    pub(super) fn numbered(&self, number: u64) -> Held {
        let version = Version {
            number,
            ..self.version
        };
        Held {
            version,
            rows: Arc::default(),
            ..self.clone()
        }
    }

    /// The same descriptors, described by a manifest that has the content hashes.
    pub(super) fn hashed(&self, manifest: Manifest) -> Result<Held> {
        Ok(Held {
            sealed: Arc::new(manifest.seal("weights")?),
            manifest: Arc::new(manifest),
            ..self.numbered(self.version.number)
        })
    }

    /// Whether each tensor has a content hash.
    pub(super) fn is_hashed(&self) -> bool {
        self.manifest.is_hashed()
    }

    /// Takes the content hashes that the publisher of the same version has computed since.
    pub(super) fn take_hashes(&mut self, hashed: &Held) {
        let is_due = !self.is_hashed() && hashed.is_hashed();
        if is_due && self.manifest.parts().eq(hashed.manifest.parts()) {
            (self.manifest, self.sealed) = (hashed.manifest.clone(), hashed.sealed.clone());
        }
    }

    /// The description of this version, as a part of a [`reply`](Self::reply).
    pub(super) fn describe(&self) -> VersionReply {
        VersionReply {
            version: self.version,
            device: self.device,
            manifest_bytes: self.sealed.bytes,
        }
    }

    /// A reply with this version. `body` contains [`describe`](Self::describe).
    pub(super) fn reply(&self, body: &impl Serialize) -> Result<OutgoingReply, Rejection> {
        let first = std::iter::once(self.sealed.fd.as_fd());
        let all = self.leases.len() + self.pieces.len();
        let count = match all < FIRST_MAX {
            true => all,
            false => self.leases.len().min(FIRST_MAX - 1),
        };
        let fds = first.chain(self.leases_and_pieces(0).take(count));
        OutgoingReply::new(body, duplicates(fds)?)
    }

    /// The leases, then the pieces, from number `first` of both on.
    fn leases_and_pieces(&self, first: usize) -> impl Iterator<Item = BorrowedFd<'_>> {
        let leases = self.leases.iter().map(|lease| lease.as_fd());
        leases
            .chain(self.pieces.iter().map(|piece| piece.as_fd()))
            .skip(first)
    }

    /// A reply with leases and pieces from number `first` on, as many as fit.
    pub(super) fn reply_pieces(
        &self,
        body: &impl Serialize,
        first: u32,
    ) -> Result<OutgoingReply, Rejection> {
        let fds = duplicates(self.leases_and_pieces(first as usize).take(FDS_MAX))?;
        if fds.is_empty() {
            let pieces = self.pieces.len();
            return Err(Rejection::new(format!(
                "it has {pieces} pieces, and no {first}"
            )));
        }
        OutgoingReply::new(body, fds)
    }
}

fn duplicates<'a>(fds: impl Iterator<Item = BorrowedFd<'a>>) -> Result<Vec<CloseOnForkFd>> {
    fds.map(|fd| {
        CloseOnForkFd::duplicate(fd)
            .map_err(|e| Error::os("fcntl(F_DUPFD_CLOEXEC)", "a version of weights", e))
    })
    .collect()
}

/// Each part of a version with its number, and the places of its pieces.
pub(super) fn places(manifest: &Manifest) -> impl Iterator<Item = (u32, Part, Range<usize>)> {
    let mut end = 0;
    (0..).zip(manifest.parts()).map(move |(number, (_, part))| {
        let begin = end;
        end += part.pieces as usize;
        (number, part, begin..end)
    })
}

/// The pieces of parts that this process has, and the length of each, by what all processes know the
/// parts under.
#[derive(Debug, Default)]
pub(super) struct KnownParts(HashMap<PartId, (u64, Vec<Arc<PieceFd>>)>);

impl KnownParts {
    /// Adds those of a version.
    pub(super) fn add_version(&mut self, held: &Held) {
        for (number, part, range) in places(&held.manifest) {
            let id = part.id(held.version.id, number);
            self.add(id, part.piece_bytes, &held.pieces[range]);
        }
    }

    /// Adds one.
    pub(super) fn add(&mut self, id: PartId, piece_bytes: u64, pieces: &[Arc<PieceFd>]) {
        self.0.insert(id, (piece_bytes, pieces.to_vec()));
    }

    /// The pieces of a part, if there are as many, each as long.
    pub(super) fn find(&self, id: PartId, part: Part) -> Option<&[Arc<PieceFd>]> {
        let (piece_bytes, pieces) = self.0.get(&id)?;
        let is_alike = (*piece_bytes, pieces.len()) == (part.piece_bytes, part.pieces as usize);
        is_alike.then_some(pieces)
    }
}

/// A version of another process, of which this one may lack pieces. The memory is checked as far as
/// that needs no device: the device checks the rest when it maps it.
#[derive(Debug)]
pub(super) struct PartialVersion {
    name: String,
    pub(super) version: Version,
    pub(super) device: DeviceId,
    pub(super) manifest: Manifest,
    sealed: SealedManifest,
    leases: Vec<PeerFd>,
    /// Those that are there, in their places.
    pieces: Vec<Option<Arc<PieceFd>>>,
}

impl PartialVersion {
    /// Takes the description that a peer sent, and the checked copy of its manifest.
    pub(super) fn receive(
        name: &str,
        reply: &VersionReply,
        fds: Vec<PeerFd>,
    ) -> Result<PartialVersion> {
        let VersionReply {
            version,
            device,
            manifest_bytes,
        } = *reply;
        let mut fds = fds.into_iter();
        if version.number > NUMBER_MAX {
            let number = version.number;
            return Err(Error::protocol(name, "version", number, "up to 2^48"));
        }
        let sealed = fds.next();
        let sealed = sealed.ok_or_else(|| Error::protocol(name, "descriptors", "none", "more"))?;
        let manifest = Manifest::receive(sealed.as_fd(), manifest_bytes)
            .map_err(|found| Error::protocol(name, "manifest", found, "a sealed and whole one"))?;
        let sealed = SealedManifest {
            fd: sealed.accept(),
            bytes: manifest_bytes,
        };
        let mut partial = PartialVersion {
            name: name.to_string(),
            version,
            device,
            manifest,
            sealed,
            leases: Vec::new(),
            pieces: Vec::new(),
        };
        partial
            .pieces
            .resize(partial.manifest.pieces().count(), None);
        let fds: Vec<PeerFd> = fds.collect();
        if !fds.is_empty() {
            partial.add(fds, 0)?;
        }
        Ok(partial)
    }

    /// Takes the pieces of parts that this process has already: they need not be asked for.
    pub(super) fn take_known(&mut self, known: &KnownParts) {
        let id = self.version.id;
        for (number, part, range) in places(&self.manifest) {
            let found = known.find(part.id(id, number), part).unwrap_or_default();
            for (place, piece) in self.pieces[range].iter_mut().zip(found) {
                *place = Some(piece.clone());
            }
        }
    }

    /// Of each part what all processes know it under, and the part.
    pub(super) fn part_ids(&self) -> impl Iterator<Item = (PartId, Part)> {
        let parts = places(&self.manifest);
        parts.map(|(number, part, _)| (part.id(self.version.id, number), part))
    }

    /// How many leases and pieces are missing.
    fn missing(&self) -> usize {
        let pieces = self.pieces.iter().filter(|piece| piece.is_none()).count();
        self.manifest.leases() - self.leases.len() + pieces
    }

    /// Whether nothing is missing.
    pub(super) fn is_whole(&self) -> bool {
        self.missing() == 0
    }

    /// The number of the first lease or piece that is missing.
    fn first_missing(&self) -> Option<usize> {
        let leases = self.manifest.leases();
        if self.leases.len() < leases {
            return Some(self.leases.len());
        }
        let piece = self.pieces.iter().position(Option::is_none)?;
        Some(leases + piece)
    }

    /// Adds leases and pieces from number `first` on, the first that is missing.
    fn add(&mut self, fds: Vec<PeerFd>, first: usize) -> Result<()> {
        let leases = self.manifest.leases();
        let left = leases + self.pieces.len() - first;
        if fds.is_empty() || fds.len() > left {
            let allowed = format!("1 to {left} of its pieces");
            let found = fds.len();
            return Err(Error::protocol(&self.name, "descriptors", found, allowed));
        }
        let mut fds = fds.into_iter();
        for lease in fds.by_ref().take(leases.saturating_sub(first)) {
            lease::check(lease.as_fd())
                .map_err(|found| Error::protocol(&self.name, "lease", found, "a pipe"))?;
            lease.approve();
            self.leases.push(lease);
        }
        let first = first.saturating_sub(leases);
        let pieces: Vec<PeerFd> = fds.collect();
        for (fd, bytes) in pieces.iter().zip(self.manifest.pieces().skip(first)) {
            self.check_piece(fd, bytes)?;
        }
        for (place, fd) in self.pieces[first..].iter_mut().zip(pieces) {
            // One that is known comes with those that are not.
            place.get_or_insert_with(|| PieceFd::of_peer(fd));
        }
        Ok(())
    }

    fn check_piece(&self, fd: &PeerFd, bytes: u64) -> Result<()> {
        let wrong = |found: String, allowed| Error::protocol(&self.name, "memory", found, allowed);
        if self.device.kind == DeviceKind::Host {
            host::check_sealed_memfd(fd.as_fd(), bytes)
                .map_err(|found| wrong(found, "a sealed memfd"))?;
            fd.approve();
        } else if !closes_at_once_elsewhere(fd.as_fd()) {
            // Replies have copies of it, which the thread of all sockets closes.
            let found = "a file with a close that may block".into();
            return Err(wrong(found, "a descriptor of a device's memory"));
        }
        Ok(())
    }

    /// Asks for the missing pieces: `ask` gets the number of the first one, and returns
    /// descriptors; none if the peer has this version no more, and then there is no version.
    ///
    /// # Errors
    /// [`Error::Os`] when this process has no room for them, before any is asked for.
    pub(super) fn complete(
        mut self,
        mut ask: impl FnMut(u32) -> Result<Option<IncomingReply>>,
    ) -> Result<Option<Held>> {
        check_room(self.missing(), &self.name)?;
        while let Some(first) = self.first_missing() {
            let Some(reply) = ask(first as u32)? else {
                return Ok(None);
            };
            self.add(reply.fds, first)?;
        }
        Ok(Some(Held {
            version: self.version,
            device: self.device,
            manifest: Arc::new(self.manifest),
            sealed: Arc::new(self.sealed),
            leases: self.leases.into_iter().map(Arc::new).collect(),
            pieces: self.pieces.into_iter().flatten().collect(),
            rows: Arc::default(),
        }))
    }
}
