//! A peer's handles: a pool of another process, and a block of it.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use super::allocator::check_bytes;
use super::session::{BlockGuard, LentBuffer, PoolSession, SESSIONS, wrong};
use super::{AllocReply, AllocRequest, Hello};
use crate::device::Device;
use crate::error::{Error, Expiry, Result};
use crate::ipc::{Kind, encode};
use crate::memory::DeviceSlice;
use crate::memory::mapped_region::ImportKey;
use crate::memory::ticket::Ticket;
use crate::options::{Attachment, Opener};
#[cfg(test)]
use crate::shm::page::SharedPage;
use crate::stream::Stream;
use crate::wait::Wait;

/// The pause between two requests of a peer that waits for memory.
const RETRY_INTERVAL: Duration = Duration::from_millis(2);

impl Opener<PoolClient> {
    /// Connects to the pool of this name, to use its memory on the opener's device.
    ///
    /// # Errors
    /// [`Error::NotFound`] when no process serves it, or its owner has died (`was_there`);
    /// [`Error::OtherKind`], [`Error::AccessDenied`], [`Error::Refused`] (also for a device that
    /// cannot reach its memory); [`Error::Name`].
    pub fn open(self) -> Result<PoolClient> {
        let hello = encode(&Hello { incarnation: None })?;
        self.open_with(Kind::Pool, &hello, PoolClient::connect)
    }
}

impl PoolClient {
    fn connect(attachment: Attachment) -> Result<PoolClient> {
        let Attachment {
            name,
            device,
            session,
            reply,
        } = attachment;
        let key = ImportKey::new(session.uid(), session.generation(), 0, &device);
        // All handles share one session. If one exists already, this one ends here.
        let pool_session = SESSIONS.get_or(&key, PoolSession::is_connected, || {
            match PoolSession::of(session, reply, &device)? {
                Some(pool_session) => Ok(Arc::new(pool_session)),
                None => Err(wrong(
                    name.as_str(),
                    "reception",
                    "expired".into(),
                    "a welcome".into(),
                )),
            }
        })?;
        Ok(PoolClient { pool_session })
    }
}

/// A peer of a pool that allocates from the owner's memory.
///
/// ```
/// use std::time::Duration;
/// use warpipe::{Device, Domain, Pool, PoolClient};
/// # let folder = std::env::temp_dir().join(format!("warpipe-client-{}", std::process::id()));
/// # let (domain, device) = (Domain::at(&folder)?, Device::host());
/// let pool = Pool::builder("scratch").domain(&domain).device(&device).build()?;
///
/// // In any process of this user:
/// let client = PoolClient::opener("scratch").domain(&domain).device(&device).open()?;
/// let block = client.allocate(4096, Duration::ZERO)?;
/// assert_eq!(pool.stats().lent_bytes, 4096);
/// drop(block);
/// assert_eq!(pool.stats().lent_bytes, 0);
/// # drop((client, pool)); std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), warpipe::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct PoolClient {
    pool_session: Arc<PoolSession>,
}

impl PoolClient {
    /// Connects to the pool of this name, in the environment's domain and with the preferred
    /// device. [`opener`](Self::opener) has options.
    ///
    /// # Errors
    /// As [`Opener`]`::open`.
    pub fn open(name: &str) -> Result<PoolClient> {
        PoolClient::opener(name).open()
    }

    /// The options with which the pool of this name is connected to.
    pub fn opener(name: &str) -> Opener<PoolClient> {
        Opener::new(name)
    }

    /// The pool's name.
    pub fn name(&self) -> &str {
        self.pool_session.name()
    }

    #[cfg(test)]
    pub(super) fn words(&self) -> &SharedPage {
        &self.pool_session.shared.words
    }

    #[cfg(test)]
    pub(super) fn mapped_regions(&self) -> Vec<Arc<crate::memory::mapped_region::MappedRegion>> {
        self.pool_session.mapped_regions()
    }

    #[cfg(test)]
    pub(super) fn session(&self) -> &crate::ipc::ClientSession {
        &self.pool_session.shared.session
    }

    /// The owner's process.
    pub fn owner_pid(&self) -> i32 {
        self.pool_session.shared.session.pid()
    }

    /// Whether the owner has closed the pool, or has died. Its blocks stay valid.
    pub fn is_owner_gone(&self) -> bool {
        self.pool_session.shared.session.is_over()
    }

    /// Allocates `bytes` bytes of the owner's memory, for reading and writing, in a region of this
    /// process's user, and waits for other blocks to be released where there is no room. A block that
    /// arrives after the wait is released. The block is cleared if another user had it. The block returns to the owner when it is released here, or when
    /// this process has died.
    ///
    /// # Errors
    /// [`Error::MemoryLimit`] when the blocks in use leave no room; [`Error::QuotaExceeded`] when
    /// those of this process's user do; [`Error::PeerGone`];
    /// [`Error::Refused`]; [`Error::Argument`] for 0 bytes, or beyond 1024 blocks at once;
    /// [`Error::Timeout`], [`Error::DescriptorLimit`], [`Error::DeviceMemory`],
    /// [`Error::PeerAccess`], [`Error::Driver`].
    pub fn allocate<'w>(&self, bytes: u64, wait: impl Into<Wait<'w>>) -> Result<LentBuffer> {
        let wait = wait.into();
        check_bytes(bytes)?;
        loop {
            match self
                .pool_session
                .ask(AllocRequest::Block { bytes }, &wait)?
            {
                Ok(block) => return Ok(block),
                Err(AllocReply::Full { used, limit }) => {
                    let left = wait.slice();
                    if left.is_zero() || bytes > limit {
                        return Err(Error::MemoryLimit {
                            name: self.name().to_string(),
                            bytes,
                            used,
                            limit,
                        });
                    }
                    pause(left);
                }
                Err(AllocReply::OverQuota(over)) => {
                    let left = wait.slice();
                    if left.is_zero() || over.is_final(bytes) {
                        return Err(over.error(self.name(), bytes));
                    }
                    pause(left);
                }
                Err(_) => return Err(self.pool_session.too_many()),
            }
        }
    }
}

/// The owner cannot know when a device will release a block, so the peer repeats its request.
fn pause(left: Duration) {
    std::thread::park_timeout(left.min(RETRY_INTERVAL));
}

impl Deref for LentBuffer {
    type Target = DeviceSlice;

    fn deref(&self) -> &DeviceSlice {
        &self.slice
    }
}

impl LentBuffer {
    /// Opens a ticket from [`Buffer::lend`](crate::Buffer::lend). Its region is mapped once in a
    /// process (`cuMemImportFromShareableHandle`), whatever the number of blocks.
    ///
    /// # Errors
    /// [`Error::TicketExpired`]: the owner has released the block, or is gone. [`Error::OtherKind`]
    /// for a ticket that is not a pool's, [`Error::Ticket`] for one of another machine.
    /// [`Error::AccessDenied`], also for a block that was allocated for another user
    /// ([`Pool::allocate_for`](crate::Pool::allocate_for)); [`Error::Refused`],
    /// [`Error::PeerGone`], [`Error::Timeout`]; [`Error::Argument`] beyond 1024 blocks at once; [`Error::DescriptorLimit`],
    /// [`Error::PeerAccess`], [`Error::DeviceMemory`], [`Error::Driver`].
    pub fn open(ticket: &Ticket, device: &Device) -> Result<LentBuffer> {
        ticket.check(Kind::Pool, device)?;
        let Some(incarnation) = ticket.incarnation() else {
            return Err(ticket.expired(Expiry::Replaced));
        };
        let pool_session = SESSIONS.get_or(
            &ImportKey::new(ticket.owner(), incarnation, 0, device),
            PoolSession::is_connected,
            || {
                let hello = encode(&Hello {
                    incarnation: Some(incarnation),
                })?;
                let (session, incoming) = ticket.attach(device, &hello, &Duration::ZERO.into())?;
                let pool_session = PoolSession::of(session, incoming, device)?;
                pool_session
                    .map(Arc::new)
                    .ok_or_else(|| ticket.expired(Expiry::Replaced))
            },
        )?;
        match pool_session.ask(
            AllocRequest::Lent(ticket.wanted().id),
            &Wait::at_most(Duration::MAX),
        ) {
            Ok(Ok(block)) => Ok(block),
            Ok(Err(AllocReply::TooMany)) => Err(pool_session.too_many()),
            Ok(Err(AllocReply::OtherUser(uid))) => Err(pool_session.other_user(uid)),
            Ok(Err(_)) => Err(ticket.expired(Expiry::Returned)),
            Err(Error::PeerGone { graceful, .. }) => {
                Err(ticket.expired(Expiry::Gone { died: !graceful }))
            }
            Err(other) => Err(other),
        }
    }

    /// The pool's name.
    pub fn name(&self) -> &str {
        self.guard.pool_session.name()
    }

    /// Releases the block behind the work enqueued on `stream` so far, and on the other recorded
    /// streams (`cuStreamWriteValue64`). Does not wait: the owner reuses the block when that work
    /// is done.
    ///
    /// # Errors
    /// [`Error::Driver`], [`Error::Argument`] for a stream of another device, and the block is
    /// released as if it were dropped; [`Error::Forked`].
    pub fn free(mut self, stream: &Stream) -> Result<()> {
        self.slice.gather_on(stream)?;
        self.guard.release_behind(stream)
    }
}

impl Drop for LentBuffer {
    fn drop(&mut self) {
        let Ok(guard) = self.guard.get() else { return };
        if guard.is_released {
            return;
        }
        let mut fence = self.slice.streams().fence_busy();
        if fence.is_reached() {
            // The guard releases the block.
            return;
        }
        let BlockGuard {
            pool_session,
            pair,
            value,
            ..
        } = guard;
        let guard = BlockGuard {
            pool_session: pool_session.clone(),
            pair: *pair,
            value: *value,
            is_released: false,
        };
        // The guard releases the block when it is dropped.
        let reactor = pool_session.shared.reactor();
        reactor.drop_value_after(fence, guard);
        self.guard.is_released = true;
    }
}
