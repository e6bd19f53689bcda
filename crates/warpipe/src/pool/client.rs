//! A peer's handles: a pool of another process, and a block of it.

use std::sync::Arc;
use std::time::Duration;

use super::allocator::check_bytes;
use super::{CLAIMS_MAX, PoolRefusal, PoolRequest, WORDS};
use crate::device::Device;
use crate::error::{Error, Expiry, Result};
use crate::ipc::{Kind, REPLY_TIMEOUT};
use crate::lend::Terms;
use crate::lend::session::{Answer, LendSession, LentBuffer};
use crate::memory::ticket::Ticket;
use crate::options::OpenOptions;
use crate::wait::Wait;

static TERMS: Terms = Terms {
    kind: Kind::Pool,
    lent: "blocks",
    claims_max: CLAIMS_MAX,
    words: WORDS,
    has_shares: false,
};

/// The limit for the owner's clearing of a block.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(10);

/// The pause between two requests of a peer that waits for memory.
const RETRY_INTERVAL: Duration = Duration::from_millis(2);

/// A peer of a pool that allocates from the owner's memory.
///
/// ```
/// use std::time::Duration;
/// use warpipe::{Device, Domain, Pool, PoolClient};
/// # let folder = std::env::temp_dir().join(format!("warpipe-client-{}", std::process::id()));
/// # let (domain, device) = (Domain::at(&folder)?, Device::host());
/// let pool = Pool::new("scratch", domain.on(&device))?;
///
/// // In any process of this user:
/// let client = PoolClient::open("scratch", domain.on(&device), Duration::ZERO)?;
/// let block = client.allocate(4096, Duration::ZERO)?;
/// assert_eq!(pool.stats().lent_bytes, 4096);
/// drop(block);
/// assert_eq!(pool.stats().lent_bytes, 0);
/// # drop((client, pool)); std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), warpipe::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct PoolClient {
    session: Arc<LendSession>,
}

impl PoolClient {
    /// Connects to the pool of this name, to use its memory on the device of the options.
    ///
    /// # Errors
    /// [`Error::NotFound`] when no process serves it, or its owner has died (`was_there`);
    /// [`Error::Name`], [`Error::Refused`] (also for a device that
    /// cannot reach its memory), [`Error::Timeout`]; [`Error::Name`].
    pub fn open<'w>(
        name: &str,
        options: OpenOptions,
        wait: impl Into<Wait<'w>>,
    ) -> Result<PoolClient> {
        options.open(name, Kind::Pool, wait, |attachment| {
            let session = LendSession::of(attachment, &TERMS)?;
            Ok(PoolClient { session })
        })
    }

    /// The pool's name.
    pub(crate) fn name(&self) -> &str {
        self.session.name()
    }

    #[cfg(test)]
    pub(crate) fn session(&self) -> &LendSession {
        &self.session
    }

    /// Whether the owner has closed the pool, or has died. Its blocks stay valid.
    pub fn is_owner_gone(&self) -> bool {
        self.session.ipc().is_over()
    }

    /// Allocates `bytes` bytes of the owner's memory, for reading and writing, in a region of this
    /// process's user, and waits for other blocks to be released where there is no room. A block
    /// that arrives after the wait is released. The block is cleared if another user had it. The
    /// block returns to the owner when it is released here, or when this process has died.
    ///
    /// # Errors
    /// [`Error::Limit`] when the blocks in use, or those of this process's user, or the device
    /// leave no room; [`Error::PeerGone`]; [`Error::Refused`]; [`Error::Argument`] for 0 bytes, or
    /// beyond 1024 blocks at once; [`Error::Timeout`], [`Error::Os`], [`Error::Device`],
    /// [`Error::Driver`].
    pub fn allocate<'w>(&self, bytes: u64, wait: impl Into<Wait<'w>>) -> Result<LentBuffer> {
        let wait = wait.into();
        check_bytes(bytes)?;
        loop {
            match ask(&self.session, PoolRequest::Block { bytes }, &wait)? {
                Answer::Lent(block) => return Ok(block),
                Answer::Refused(refusal) => {
                    let left = wait.slice();
                    if let Some(error) = refusal.error(self.name(), bytes, left.is_zero()) {
                        return Err(error);
                    }
                    // The owner cannot know when a device will release a block, so the peer repeats
                    // its request.
                    std::thread::park_timeout(left.min(RETRY_INTERVAL));
                }
                Answer::Gone => {
                    let found = "that there is no such block".to_string();
                    return Err(self.session.wrong("reply", found, "a new block"));
                }
            }
        }
    }
}

/// Asks for a block. The cancellation of `wait` ends this, and its time does not: a block that is
/// there comes soon, also where it has to be cleared.
fn ask(
    session: &Arc<LendSession>,
    request: PoolRequest,
    wait: &Wait<'_>,
) -> Result<Answer<PoolRefusal>> {
    let answers = wait.cancellable_within(REPLY_TIMEOUT);
    session.ask(request, &answers, &wait.cancellable_within(CLEAR_TIMEOUT))
}

impl LentBuffer {
    /// Opens a ticket from [`Buffer::lend`](crate::Buffer::lend). Its region is mapped once in a
    /// process (`cuMemImportFromShareableHandle`), whatever the number of blocks.
    ///
    /// # Errors
    /// [`Error::Handle`]: the owner has released the block, or is gone. [`Error::Name`] for a
    /// ticket that is not a pool's, [`Error::Handle`] for one of another machine.
    /// [`Error::Refused`], also for a block that was allocated for another user
    /// ([`Pool::allocate_for`](crate::Pool::allocate_for)); [`Error::Refused`],
    /// [`Error::PeerGone`], [`Error::Timeout`]; [`Error::Argument`] beyond 1024 blocks at once;
    /// [`Error::Os`], [`Error::Device`], [`Error::Limit`], [`Error::Driver`].
    pub fn open<'w>(
        ticket: &Ticket,
        device: &Device,
        wait: impl Into<Wait<'w>>,
    ) -> Result<LentBuffer> {
        let wait = wait.into();
        ticket.check(Kind::Pool, device)?;
        let Some(incarnation) = ticket.incarnation() else {
            return Err(ticket.expired(Expiry::Replaced));
        };
        let key = TERMS.key(ticket.owner(), incarnation, device);
        let session = LendSession::at(&key, || {
            let (session, reply) = ticket.attach(device, &[], &wait)?;
            LendSession::open(session, reply, device, &TERMS)
        })?;
        let (number, answers) = (ticket.wanted().id, wait.cancellable_within(REPLY_TIMEOUT));
        let lent = match session.claim(number, &answers) {
            // The words of an owner that is gone stay.
            Ok(Some(block)) if !session.ipc().has_hung_up() => Ok(Answer::Lent(block)),
            Ok(_) => ask(&session, PoolRequest::Lent(number), &wait),
            Err(error) => Err(error),
        };
        match lent {
            Ok(Answer::Lent(block)) => Ok(block),
            Ok(Answer::Gone) => Err(ticket.expired(Expiry::Returned)),
            Ok(Answer::Refused(refusal)) => {
                let refused = refusal.error(session.name(), 0, true);
                Err(refused.unwrap_or_else(|| ticket.expired(Expiry::Returned)))
            }
            Err(Error::PeerGone { graceful, .. }) => {
                Err(ticket.expired(Expiry::Gone { died: !graceful }))
            }
            Err(other) => Err(other),
        }
    }
}
