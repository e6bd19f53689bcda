//! One version of weights as a process holds it: descriptors and their description. Nothing of it
//! needs a device.
//!
//! A reply brings a version's description with its manifest and the first of its pieces. A
//! process that wants the others asks for them: see [`PartialVersion`].

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::lease;
use super::manifest::{Manifest, SealedManifest};
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

/// A version's description. Descriptors go along: the manifest, the lease if there is one, and as
/// many of the first pieces as there is room for.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct VersionReply {
    pub(super) version: Version,
    device: DeviceId,
    manifest_bytes: u64,
    has_lease: bool,
}

/// The descriptors of one version.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) version: Version,
    pub(super) device: DeviceId,
    /// The length of the memory, as its tensors use it.
    pub(super) bytes: u64,
    /// The length of each part, which a keeper says in its statistics.
    parts: Arc<[u64]>,
    pub(super) pieces: Arc<[PeerFd]>,
    /// Of memory that its publisher must not use again as long as any process has this.
    pub(super) lease: Option<Arc<PeerFd>>,
    manifest: Arc<SealedManifest>,
    /// In a keeper: say in this process's statistics that it has the memory.
    rows: Vec<RegionRow>,
}

impl Held {
    /// A publisher's version, which has no number yet.
    pub(super) fn new(
        id: [u8; 16],
        device: DeviceId,
        pieces: Vec<PeerFd>,
        lease: Option<Arc<PeerFd>>,
        manifest: &Manifest,
    ) -> Result<Held> {
        pieces.iter().for_each(PeerFd::approve);
        Ok(Held {
            version: Version { number: 0, id },
            device,
            bytes: manifest.bytes(),
            parts: manifest.parts().map(|(_, part)| part.bytes()).collect(),
            pieces: pieces.into(),
            lease,
            manifest: Arc::new(manifest.seal("weights")?),
            rows: Vec::new(),
        })
    }

    /// Says in this process's statistics that it keeps the memory without mapping it.
    pub(super) fn keep(&mut self) {
        let (device, id) = (self.device, self.version.id);
        let kept = (0..).zip(&*self.parts).map(|(number, &bytes)| {
            let row = match &self.pieces[..] {
                [only] => RegionRow::keep(only.as_fd(), bytes, device),
                _ => RegionRow::keep_many(bytes, device),
            };
            row.identify(id, number);
            row
        });
        self.rows = kept.collect();
    }

    /// The same descriptors, for a version with this number.
    pub(super) fn numbered(&self, number: u64) -> Held {
        Held {
            version: Version {
                number,
                ..self.version
            },
            device: self.device,
            bytes: self.bytes,
            parts: self.parts.clone(),
            pieces: self.pieces.clone(),
            lease: self.lease.clone(),
            manifest: self.manifest.clone(),
            rows: Vec::new(),
        }
    }

    /// The description of this version, as a part of a [`reply`](Self::reply).
    pub(super) fn describe(&self) -> VersionReply {
        VersionReply {
            version: self.version,
            device: self.device,
            manifest_bytes: self.manifest.bytes,
            has_lease: self.lease.is_some(),
        }
    }

    /// A reply with this version. `body` contains [`describe`](Self::describe).
    pub(super) fn reply(&self, body: &impl Serialize) -> Result<OutgoingReply, Rejection> {
        let first = [
            Some(self.manifest.fd.as_fd()),
            self.lease.as_deref().map(AsFd::as_fd),
        ];
        let pieces = self.pieces.iter().map(AsFd::as_fd);
        let fds = first.into_iter().flatten().chain(pieces).take(FDS_MAX);
        OutgoingReply::new(body, duplicates(fds)?)
    }

    /// A reply with pieces from number `first` on, as many as fit.
    pub(super) fn reply_pieces(
        &self,
        body: &impl Serialize,
        first: u32,
    ) -> Result<OutgoingReply, Rejection> {
        let from = self.pieces.get(first as usize..);
        let Some(from @ [_, ..]) = from else {
            let pieces = self.pieces.len();
            return Err(Rejection::new(format!(
                "it has {pieces} pieces, and no {first}"
            )));
        };
        let fds = from.iter().take(FDS_MAX).map(AsFd::as_fd);
        OutgoingReply::new(body, duplicates(fds)?)
    }
}

fn duplicates<'a>(fds: impl Iterator<Item = BorrowedFd<'a>>) -> Result<Vec<CloseOnForkFd>> {
    fds.map(|fd| {
        CloseOnForkFd::duplicate(fd)
            .map_err(|e| Error::os("fcntl(F_DUPFD_CLOEXEC)", "a version of weights", e))
    })
    .collect()
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
    lease: Option<PeerFd>,
    pieces: Vec<PeerFd>,
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
            has_lease,
        } = *reply;
        let wrong = |field, found: String, allowed: &str| wrong(name, field, found, allowed);
        let count = fds.len();
        let mut fds = fds.into_iter();
        let few = || wrong("descriptors", count.to_string(), "more");
        if version.number > NUMBER_MAX {
            return Err(wrong("version", version.number.to_string(), "up to 2^48"));
        }
        let sealed = fds.next().ok_or_else(few)?;
        let lease = has_lease.then(|| fds.next().ok_or_else(few)).transpose()?;
        if let Some(lease) = &lease {
            lease::check(lease.as_fd()).map_err(|found| wrong("lease", found, "a pipe"))?;
            lease.approve();
        }
        let manifest = Manifest::receive(sealed.as_fd(), manifest_bytes)
            .map_err(|found| wrong("manifest", found, "a sealed and whole one"))?;
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
            lease,
            pieces: Vec::new(),
        };
        partial.add(fds.collect())?;
        Ok(partial)
    }

    /// Whether no piece is missing.
    pub(super) fn is_whole(&self) -> bool {
        self.manifest.pieces().count() == self.pieces.len()
    }

    /// Adds the next pieces.
    fn add(&mut self, fds: Vec<PeerFd>) -> Result<()> {
        let lengths = self.manifest.pieces().skip(self.pieces.len());
        let left = lengths.clone().count();
        if fds.is_empty() || fds.len() > left {
            let allowed = format!("1 to {left} of its pieces");
            return Err(wrong(
                &self.name,
                "descriptors",
                fds.len().to_string(),
                &allowed,
            ));
        }
        for (fd, bytes) in fds.iter().zip(lengths) {
            self.check_piece(fd, bytes)?;
        }
        self.pieces.extend(fds);
        Ok(())
    }

    fn check_piece(&self, fd: &PeerFd, bytes: u64) -> Result<()> {
        let wrong = |found, allowed| wrong(&self.name, "memory", found, allowed);
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
    /// [`Error::DescriptorLimit`] when this process has no room for them, before any is asked for.
    pub(super) fn complete(
        mut self,
        mut ask: impl FnMut(u32) -> Result<Option<IncomingReply>>,
    ) -> Result<Option<(Held, Manifest)>> {
        let missing = self.manifest.pieces().count() - self.pieces.len();
        check_room(missing, &self.name)?;
        while !self.is_whole() {
            let Some(reply) = ask(self.pieces.len() as u32)? else {
                return Ok(None);
            };
            self.add(reply.fds)?;
        }
        let held = Held {
            version: self.version,
            device: self.device,
            bytes: self.manifest.bytes(),
            parts: self
                .manifest
                .parts()
                .map(|(_, part)| part.bytes())
                .collect(),
            pieces: self.pieces.into(),
            lease: self.lease.map(Arc::new),
            manifest: Arc::new(self.sealed),
            rows: Vec::new(),
        };
        Ok(Some((held, self.manifest)))
    }
}

fn wrong(name: &str, field: &'static str, found: String, allowed: &str) -> Error {
    Error::Protocol {
        name: name.to_string(),
        field,
        found,
        allowed: allowed.to_string(),
    }
}
