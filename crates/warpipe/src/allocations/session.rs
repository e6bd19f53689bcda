//! The receiver's handles.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ipc::Kind;
use crate::lend::Terms;
use crate::lend::session::{LendSession, LentBuffer};
use crate::lend::share_words::SLOTS;
use crate::options::OpenOptions;
use crate::wait::Wait;

pub(super) static TERMS: Terms = Terms {
    kind: Kind::Allocations,
    lent: "shares",
    claims_max: SLOTS,
    words: SLOTS,
    has_shares: true,
};

/// Opens what an [`AllocationServer`](crate::AllocationServer) of another process shares.
#[derive(Debug, Clone)]
pub struct AllocationClient {
    pub(super) session: Arc<LendSession>,
}

impl AllocationClient {
    /// Connects to the server of this name, to open its shares on the device of the options.
    ///
    /// # Errors
    /// [`Error::NotFound`] when no process serves it; [`Error::Name`], [`Error::Refused`] for a
    /// device that cannot reach its memory; [`Error::Name`].
    pub fn open<'w>(
        name: &str,
        options: OpenOptions,
        wait: impl Into<Wait<'w>>,
    ) -> Result<AllocationClient> {
        options.open(name, Kind::Allocations, wait, |attachment| {
            let session = LendSession::of(attachment, &TERMS)?;
            Ok(AllocationClient { session })
        })
    }

    /// The server's name.
    pub(crate) fn name(&self) -> &str {
        self.session.name()
    }

    /// Whether the server has closed, or its process has died.
    pub fn is_owner_gone(&self) -> bool {
        self.session.ipc().is_over()
    }

    /// Opens a share, which is this process's from then on, and waits until its
    /// contents are complete. A share that is not opened in time can be opened again. It is for
    /// reading and writing, as in the process that shared it, or for reading alone, as that says.
    ///
    /// # Errors
    /// [`Error::NotFound`] for a share that was opened already, or withdrawn; [`Error::Timeout`];
    /// [`Error::PeerGone`], [`Error::Device`], [`Error::Handle`], [`Error::Os`],
    /// [`Error::Driver`].
    pub fn open_share<'w>(&self, number: u64, wait: impl Into<Wait<'w>>) -> Result<LentBuffer> {
        let wait = wait.into();
        let claimed = self.session.claim(number, &wait)?;
        claimed.ok_or_else(|| Error::NotFound {
            name: format!("{}, share {number}", self.name()),
            kind: Kind::Allocations,
            domain: Default::default(),
            was_there: true,
        })
    }
}
