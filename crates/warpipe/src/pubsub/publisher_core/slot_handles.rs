//! What outlives a loan: a hold on its memory, and the answer whether its slot is free again.

use std::sync::{Arc, Weak};

use super::PublisherCore;
use super::state::HeldRegion;
use crate::error::{Error, Result};
use crate::fork::OwnerProcess;
use crate::ipc::Kind;
use crate::memory::arena::SlotId;

/// Reports when a slot is free again. See [`SampleMut::returned`](crate::SampleMut::returned).
#[derive(Debug, Clone)]
pub struct SlotReturn {
    pub(super) core: Weak<PublisherCore>,
    pub(super) owner_process: OwnerProcess,
    pub(super) slot: SlotId,
    pub(super) serial: u64,
}

impl SlotReturn {
    /// Whether the slot is free again. Does not wait.
    ///
    /// # Errors
    /// [`Error::PeerGone`] when the publisher was dropped before: the answer is no longer
    /// known. [`Error::Forked`].
    pub fn is_back(&self) -> Result<bool> {
        self.owner_process.check()?;
        let pid = std::process::id() as i32;
        let core = self.core.upgrade();
        let core = core.ok_or_else(|| Error::peer_gone(Kind::Publisher, "", pid, true))?;
        Ok(core.is_back(self.slot, self.serial))
    }
}

/// Keeps the memory of a loan mapped in this process. See [`SampleMut::hold`](crate::SampleMut::hold).
#[derive(Debug)]
pub struct SlotHold {
    /// `None` in a forked child.
    pub(super) _region: Option<Arc<HeldRegion>>,
}
