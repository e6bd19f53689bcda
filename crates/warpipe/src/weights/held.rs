//! One version of weights as a process holds it: two descriptors and their description. Nothing of
//! it needs a device.

use std::os::fd::AsFd;

use serde::{Deserialize, Serialize};

use super::manifest::{Manifest, SealedManifest};
use crate::backend::host;
use crate::device_types::DeviceKind;
use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::ipc::{IncomingReply, OutgoingReply, Rejection};
use crate::memory::MemoryInfo;
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

/// A version's description. The descriptors go along: the memory, the manifest.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct VersionReply {
    pub(super) version: Version,
    memory: MemoryInfo,
    manifest_bytes: u64,
}

/// The descriptors of one version.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) version: Version,
    pub(super) info: MemoryInfo,
    pub(super) memory: PeerFd,
    pub(super) manifest: SealedManifest,
    /// In a keeper: says in this process's statistics that it has the memory.
    pub(super) row: Option<RegionRow>,
}

/// The number of a version's memory among the memory of its generation.
pub(super) const MEMORY_NUMBER: u64 = 0;

impl Held {
    /// Says in this process's statistics that it keeps the memory without mapping it.
    pub(super) fn keep(&mut self) {
        let MemoryInfo {
            mapped_bytes,
            device,
            ..
        } = self.info;
        let row = RegionRow::keep(self.memory.as_fd(), mapped_bytes, device);
        row.identify(self.version.id, MEMORY_NUMBER);
        self.row = Some(row);
    }

    /// Duplicates the descriptors, for a version with this number.
    pub(super) fn numbered(&self, number: u64) -> Result<Held> {
        let [memory, manifest] = self.duplicates()?;
        Ok(Held {
            version: Version {
                number,
                ..self.version
            },
            info: self.info,
            memory: PeerFd::from(memory),
            manifest: SealedManifest {
                fd: manifest,
                bytes: self.manifest.bytes,
            },
            row: None,
        })
    }

    fn duplicates(&self) -> Result<[CloseOnForkFd; 2]> {
        let duplicate = |fd: std::os::fd::BorrowedFd<'_>| {
            CloseOnForkFd::duplicate(fd)
                .map_err(|e| Error::os("fcntl(F_DUPFD_CLOEXEC)", "a version of weights", e))
        };
        Ok([
            duplicate(self.memory.as_fd())?,
            duplicate(self.manifest.fd.as_fd())?,
        ])
    }

    /// The description of this version, as a part of a reply with [`fds`](Self::fds).
    pub(super) fn describe(&self) -> VersionReply {
        VersionReply {
            version: self.version,
            memory: self.info,
            manifest_bytes: self.manifest.bytes,
        }
    }

    /// A reply with this version. `body` contains [`describe`](Self::describe).
    pub(super) fn reply(&self, body: &impl Serialize) -> Result<OutgoingReply, Rejection> {
        let fds = self.duplicates()?;
        OutgoingReply::new(body, fds.into())
    }

    /// Takes the version that a peer sent, and the checked copy of its manifest. The memory is
    /// checked as far as that needs no device: the device checks the rest when it maps it.
    pub(super) fn receive(
        name: &str,
        reply: &VersionReply,
        fds: Vec<PeerFd>,
    ) -> Result<(Held, Manifest)> {
        let wrong = |field, found: String, allowed: &str| Error::Protocol {
            name: name.to_string(),
            field,
            found,
            allowed: allowed.to_string(),
        };
        let count = fds.len().to_string();
        let Ok([memory, manifest]) = <[PeerFd; 2]>::try_from(fds) else {
            return Err(wrong("descriptors", count, "2"));
        };
        let VersionReply {
            version,
            memory: info,
            manifest_bytes,
        } = *reply;
        if version.number > NUMBER_MAX {
            return Err(wrong("version", version.number.to_string(), "up to 2^48"));
        }
        if info.bytes == 0 || info.bytes > info.mapped_bytes {
            let allowed = format!("1 to {}", info.mapped_bytes);
            return Err(wrong("bytes", info.bytes.to_string(), &allowed));
        }
        if info.device.kind == DeviceKind::Host {
            host::check_sealed_memfd(memory.as_fd(), info.mapped_bytes)
                .map_err(|found| wrong("memory", found, "a sealed memfd"))?;
            memory.approve();
        } else if !closes_at_once_elsewhere(memory.as_fd()) {
            // Replies have copies of it, which the thread of all sockets closes.
            let found = "a file whose close may block".into();
            return Err(wrong("memory", found, "a descriptor of a device's memory"));
        }
        let checked = Manifest::receive(manifest.as_fd(), manifest_bytes)
            .map_err(|found| wrong("manifest", found, "a sealed and whole one"))?;
        if checked.bytes() != info.bytes {
            let found = format!("of {} bytes", checked.bytes());
            let allowed = format!("that of {} bytes", info.bytes);
            return Err(wrong("manifest", found, &allowed));
        }
        let held = Held {
            version,
            info,
            memory,
            manifest: SealedManifest {
                fd: manifest.accept(),
                bytes: manifest_bytes,
            },
            row: None,
        };
        Ok((held, checked))
    }

    /// [`receive`](Self::receive) for a reply that is a description alone.
    pub(super) fn open(name: &str, incoming: IncomingReply) -> Result<(Held, Manifest)> {
        let reply: VersionReply = crate::ipc::decode(&incoming.body, name)?;
        Held::receive(name, &reply, incoming.fds)
    }
}
