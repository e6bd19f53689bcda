//! The memory of a version before it has a manifest: its parts, their pieces and their leases.

use std::sync::Arc;

use super::exports::PieceFd;
use super::manifest::{LEASES_MAX, Manifest, Part, TensorInfo};
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::runtime::closer::PeerFd;

/// The memory of weights.
#[derive(Default)]
pub(super) struct Storage {
    /// Of all parts, or as far as tensors lie in the last one.
    pub(super) bytes: u64,
    pub(super) parts: Vec<Part>,
    pub(super) pieces: Vec<Arc<PieceFd>>,
    pub(super) leases: Vec<Arc<PeerFd>>,
}

impl Storage {
    /// Begins with this memory.
    pub(super) fn add_memory(&mut self, memory: &Memory) -> Result<()> {
        self.add_part(Part::whole(memory.info().mapped_bytes));
        self.pieces.push(PieceFd::own(memory.private_export()?));
        Ok(())
    }

    pub(super) fn add_part(&mut self, part: Part) {
        self.bytes += part.bytes();
        self.parts.push(part);
    }

    /// Adds a lease, and returns its number.
    pub(super) fn add_lease(&mut self, lease: Arc<PeerFd>) -> Result<u32> {
        let known = self.leases.iter().position(|it| Arc::ptr_eq(it, &lease));
        let index = known.unwrap_or(self.leases.len());
        if index == LEASES_MAX {
            let found = format!("tensors in place of more than {LEASES_MAX} versions");
            let allowed = "a version that has all of its tensors itself";
            return Err(Error::argument("base", found, allowed));
        }
        if known.is_none() {
            self.leases.push(lease);
        }
        Ok(index as u32 + 1)
    }

    /// The manifest of tensors in it, in the order of their offsets.
    pub(super) fn describe(&self, tensors: Vec<TensorInfo>) -> Result<Manifest> {
        let described = Manifest::new(self.bytes, self.parts.clone(), tensors);
        described.map_err(|found| {
            let allowed = "up to 1,048,576 tensors with unique names of 1 to 1,024 bytes, in up to \
                           16,384 pieces";
            Error::argument("tensors", found, allowed)
        })
    }
}
