//! A peer's side: what it has of another process's pool. **This module is marked for unsafe**: it copies to and from
//! blocks, and enqueues stores of words, by address.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::allocator::check_bytes;
use super::{
    AllocReply, AllocRequest, BlockGrant, Hello, HelloReply, PAGE_BYTES, PAIRS_MAX, cleared_at,
    released_at,
};
use crate::backend::{Access, DeviceId, DevicePtr, StreamOp, TimelineWord};
use crate::clock::Stopwatch;
use crate::device::Device;
use crate::error::{Error, Expiry, Result};
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::{
    Address, ClientSession, IncomingReply, Kind, REPLY_TIMEOUT, SessionObserver, decode, encode,
};
use crate::memory::mapped_region::{ImportKey, MappedRegion, check_range, wait_for};
use crate::memory::region::Region;
use crate::memory::ticket::Ticket;
use crate::memory::weak_cache::WeakCache;
use crate::runtime::drop_after_fence::DropAfterFence;
use crate::runtime::fence::StreamSet;
use crate::shm::page::SharedPage;
use crate::stream::{Backoff, Stream};

/// How long a peer that waits for memory leaves between its questions.
const RETRY_INTERVAL: Duration = Duration::from_millis(2);

/// How long the owner may take to clear a block.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(10);

/// The pools that this process visits, so that all their blocks share one page and one mapping of each region.
static SESSIONS: WeakCache<ImportKey, PoolSession> = WeakCache::new();

/// A visit at a pool.
#[derive(Debug)]
struct PoolSession {
    device: Device,
    owner: DeviceId,
    /// What was mapped of it, by number and whether it may be written.
    regions: Mutex<HashMap<(u32, bool), Arc<MappedRegion>>>,
    /// It says goodbye when this process's streams have let everything go.
    visit: DropAfterFence<SessionParts>,
}

#[derive(Debug)]
struct SessionParts {
    words: Arc<SharedPage>,
    session: ClientSession,
}

/// Lets go the blocks that come when who asked for them has given up.
struct StaleGrantHandler(Arc<SharedPage>);

impl SessionObserver for StaleGrantHandler {
    /// On the reactor's thread: a CPU store alone. Nothing has been enqueued on such a block.
    fn on_stale_reply(&self, _: &[u8], incoming: IncomingReply) {
        if let Ok(AllocReply::Block(BlockGrant { pair, value, .. })) =
            decode(&incoming.body, "a pool")
            && pair < PAIRS_MAX
        {
            self.0.at::<TimelineWord>(released_at(pair)).store(value);
        }
    }
}

impl PoolSession {
    /// Takes in what the admission brought. `None` if this is another run of the pool than was wanted.
    fn of(
        session: ClientSession,
        incoming: IncomingReply,
        device: &Device,
    ) -> Result<Option<PoolSession>> {
        let name = session.name().to_string();
        let HelloReply::Welcome { owner, page_bytes } = decode(&incoming.body, &name)? else {
            return Ok(None);
        };
        if page_bytes != PAGE_BYTES as u64 {
            return Err(wrong(
                &name,
                "page",
                format!("{page_bytes} bytes"),
                format!("{PAGE_BYTES} bytes"),
            ));
        }
        let (_, [fd]) = incoming.open::<HelloReply, 1>(&name)?;
        let words = Arc::new(SharedPage::open(Some(device), fd, PAGE_BYTES, &name)?);
        session.observe(Arc::new(StaleGrantHandler(words.clone())))?;
        let parts = SessionParts { words, session };
        let visit = DropAfterFence::new(Arc::default(), parts)?;
        Ok(Some(PoolSession {
            device: device.clone(),
            owner,
            regions: Mutex::default(),
            visit,
        }))
    }

    /// Whether its owner can still be asked.
    fn is_connected(&self) -> bool {
        !self.visit.session.is_over()
    }

    fn name(&self) -> &str {
        self.visit.session.name()
    }

    /// Asks for a block; what is told instead is for the caller.
    fn ask(
        self: &Arc<PoolSession>,
        request: AllocRequest,
        is_called_off: &dyn Fn() -> bool,
    ) -> Result<std::result::Result<LentBuffer, AllocReply>> {
        self.visit.owner_process().check()?;
        let incoming =
            self.visit
                .session
                .ask_unless(&encode(&request)?, REPLY_TIMEOUT, is_called_off)?;
        match decode(&incoming.body, self.name())? {
            AllocReply::Block(grant) => self.open_grant(grant, incoming).map(Ok),
            other => Ok(Err(other)),
        }
    }

    /// Checks a block and maps its region, if it is not mapped yet.
    fn open_grant(
        self: &Arc<PoolSession>,
        grant: BlockGrant,
        incoming: IncomingReply,
    ) -> Result<LentBuffer> {
        let BlockGrant {
            pair,
            value,
            offset,
            bytes,
            mapped,
            ..
        } = grant;
        if pair >= PAIRS_MAX {
            return Err(wrong(
                self.name(),
                "pair",
                pair.to_string(),
                format!("below {PAIRS_MAX}"),
            ));
        }
        // From here on the owner is told that the block is let go, whatever becomes of it.
        let guard = BlockGuard {
            pool_session: self.clone(),
            pair,
            value,
            is_released: false,
        };
        check_range(self.name(), offset, bytes, mapped)?;
        let mapping = self.region(&grant, &incoming)?;
        if grant.is_being_cleared {
            self.wait_until_clear(pair, value)?;
        }
        Ok(LentBuffer {
            guard,
            mapping,
            streams: Arc::default(),
            access: grant.access,
            offset,
            bytes,
        })
    }

    fn region(&self, grant: &BlockGrant, incoming: &IncomingReply) -> Result<Arc<MappedRegion>> {
        let BlockGrant {
            region,
            mapped,
            access,
            ..
        } = *grant;
        let mut regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (region, access == Access::ReadWrite);
        if let Some(known) = regions.get(&key) {
            if known.bytes != mapped {
                return Err(wrong(
                    self.name(),
                    "region",
                    format!("{mapped} bytes"),
                    format!("{} bytes", known.bytes),
                ));
            }
            return Ok(known.clone());
        }
        let [fd] = &incoming.fds[..] else {
            return Err(wrong(
                self.name(),
                "descriptors",
                incoming.fds.len().to_string(),
                "1".into(),
            ));
        };
        let imported = Region::import(&self.device, fd.as_fd(), mapped, access, self.owner)?;
        fd.approve();
        let mapping = Arc::new(MappedRegion::of(
            imported,
            &self.device,
            self.owner,
            access,
            mapped,
        )?);
        regions.insert(key, mapping.clone());
        Ok(mapping)
    }

    fn wait_until_clear(&self, pair: u32, value: u64) -> Result<()> {
        let word: &TimelineWord = self.visit.words.at(cleared_at(pair));
        let (start, mut backoff) = (Instant::now(), Backoff::default());
        while !word.reached(value) {
            if self.visit.session.is_over() {
                return Err(self.visit.session.owner_gone());
            }
            if start.elapsed() > CLEAR_TIMEOUT {
                return Err(Error::Timeout {
                    what: "the clearing of a block".into(),
                    waited: CLEAR_TIMEOUT,
                });
            }
            backoff.pause();
        }
        Ok(())
    }

    fn too_many(&self) -> Error {
        let allowed = format!("up to {PAIRS_MAX} of {:?}; let some go", self.name());
        Error::argument(
            "blocks",
            format!("{} in one process", PAIRS_MAX + 1),
            allowed,
        )
    }
}

fn wrong(name: &str, field: &'static str, found: String, allowed: String) -> Error {
    Error::Protocol {
        name: name.to_string(),
        field,
        found,
        allowed,
    }
}

/// A block that the owner counts as ours, until its word has come to the value. Dropped, it is released by the CPU.
#[derive(Debug)]
struct BlockGuard {
    pool_session: Arc<PoolSession>,
    pair: u32,
    value: u64,
    is_released: bool,
}

impl BlockGuard {
    /// Has `stream` release it.
    fn release_behind(&mut self, stream: &Stream) -> Result<()> {
        let visit = &self.pool_session.visit;
        visit.streams().record_use(stream);
        let Some(word) = visit.words.device_ptr(released_at(self.pair)) else {
            return Ok(());
        };
        // SAFETY: the page goes only when this stream, noted above, is past its stores.
        unsafe {
            stream.batch(&[StreamOp::Signal {
                word,
                value: self.value,
            }])?
        };
        self.is_released = true;
        Ok(())
    }
}

impl Drop for BlockGuard {
    fn drop(&mut self) {
        if !self.pool_session.visit.owner_process().is_current() {
            // A forked child: the parent's blocks are not ours to give up.
            return std::mem::forget(self.pool_session.clone());
        }
        if !std::mem::replace(&mut self.is_released, true) {
            self.pool_session
                .visit
                .words
                .at::<TimelineWord>(released_at(self.pair))
                .store(self.value);
        }
    }
}

/// A peer of a pool that allocates of its owner's memory.
///
/// ```
/// use std::time::Duration;
/// use warpipe::{Device, Domain, Pool, PoolClient};
/// # let folder = std::env::temp_dir().join(format!("warpipe-client-{}", std::process::id()));
/// # let (domain, device) = (Domain::at(&folder)?, Device::host());
/// let pool = Pool::builder("scratch").domain(&domain).device(&device).build()?;
///
/// let client = PoolClient::open(&domain, "scratch", &device)?; // in any process of this user
/// let block = client.allocate(4096)?;
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
    /// Comes to the pool of this name, to use its memory on `device`.
    ///
    /// # Errors
    /// [`Error::NoOwner`] when nobody keeps it, or its owner has died (`was_there`); [`Error::OtherKind`],
    /// [`Error::AccessDenied`], [`Error::Refused`] (also for a device that cannot reach its memory); [`Error::Name`].
    pub fn open(domain: &Domain, name: &str, device: &Device) -> Result<PoolClient> {
        PoolClient::open_timeout(domain, name, device, Duration::ZERO)
    }

    /// [`open`](Self::open), but waits up to `timeout` for the pool to be there.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_timeout(
        domain: &Domain,
        name: &str,
        device: &Device,
        timeout: Duration,
    ) -> Result<PoolClient> {
        let name = EndpointName::new(name)?;
        let at = Address {
            domain,
            name: &name,
            kind: Kind::Pool,
        };
        let hello = encode(&Hello { incarnation: None })?;
        let (session, incoming) =
            ClientSession::attach(&at, Some(device.info().id), &hello, timeout)?;
        let key = ImportKey::new(session.uid(), session.generation(), 0, device);
        // One visit for all: should there be one already, this one ends here.
        let pool_session = SESSIONS.get_or(&key, PoolSession::is_connected, || {
            match PoolSession::of(session, incoming, device)? {
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

    /// The pool's name.
    pub fn name(&self) -> &str {
        self.pool_session.name()
    }

    #[cfg(test)]
    pub(super) fn words(&self) -> &SharedPage {
        &self.pool_session.visit.words
    }

    #[cfg(test)]
    pub(super) fn session(&self) -> &ClientSession {
        &self.pool_session.visit.session
    }

    /// The owner's process.
    pub fn owner_pid(&self) -> i32 {
        self.pool_session.visit.session.pid()
    }

    /// Whether the owner has closed the pool, or has died. Blocks of it stay good.
    pub fn is_owner_gone(&self) -> bool {
        self.pool_session.visit.session.is_over()
    }

    /// A block of `bytes` bytes of the owner's memory, for reading and writing, cleared if another user had it. It is the
    /// owner's again when it is let go here, or this process has died.
    ///
    /// # Errors
    /// [`Error::MemoryLimit`] when what is in use leaves no room; [`Error::OwnerGone`]; [`Error::Refused`];
    /// [`Error::Argument`] for 0 bytes, or beyond 1024 blocks at once; [`Error::Timeout`], [`Error::DescriptorLimit`],
    /// [`Error::DeviceMemory`], [`Error::PeerAccess`], [`Error::Driver`].
    pub fn allocate(&self, bytes: u64) -> Result<LentBuffer> {
        self.allocate_timeout(bytes, Duration::ZERO)
    }

    /// [`allocate`](Self::allocate), waiting at most `timeout` for others to let go.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub fn allocate_timeout(&self, bytes: u64, timeout: Duration) -> Result<LentBuffer> {
        self.allocate_unless(bytes, timeout, &|| false)
    }

    /// [`allocate_timeout`](Self::allocate_timeout), for a caller that may give up while the owner does not answer:
    /// `is_called_off` is asked then, each 50 ms, and ends it with [`Error::Timeout`]. A block that comes later goes back.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub fn allocate_unless(
        &self,
        bytes: u64,
        timeout: Duration,
        is_called_off: &dyn Fn() -> bool,
    ) -> Result<LentBuffer> {
        check_bytes(bytes)?;
        let mut clock = Stopwatch::default();
        loop {
            match self
                .pool_session
                .ask(AllocRequest::Block { bytes }, is_called_off)?
            {
                Ok(block) => return Ok(block),
                Err(AllocReply::Full { used, limit }) => {
                    let left = timeout.saturating_sub(clock.elapsed());
                    if left.is_zero() || bytes > limit {
                        return Err(Error::MemoryLimit {
                            name: self.name().to_string(),
                            bytes,
                            used,
                            limit,
                        });
                    }
                    // The owner cannot know when a device will have let a block go: to ask again is all there is.
                    std::thread::park_timeout(left.min(RETRY_INTERVAL));
                }
                Err(_) => return Err(self.pool_session.too_many()),
            }
        }
    }
}

/// A block of another process's pool. Dropped, it is let go: the owner hands it out again when the streams that were named
/// are past it. It stays good when its owner closes the pool, or dies.
#[derive(Debug)]
pub struct LentBuffer {
    guard: BlockGuard,
    mapping: Arc<MappedRegion>,
    streams: Arc<StreamSet>,
    access: Access,
    offset: u64,
    bytes: u64,
}

impl LentBuffer {
    /// Opens what [`Buffer::lend`](crate::Buffer::lend) gave a ticket for. Its region is mapped once in a process
    /// (`cuMemImportFromShareableHandle`), whatever the number of blocks.
    ///
    /// # Errors
    /// [`Error::TicketExpired`]: the owner has let the block go, or is gone. [`Error::OtherKind`] for another ticket than
    /// a pool's, [`Error::Ticket`] for one of another machine. [`Error::AccessDenied`], [`Error::Refused`],
    /// [`Error::OwnerGone`], [`Error::Timeout`]; [`Error::Argument`] beyond 1024 blocks at once;
    /// [`Error::DescriptorLimit`], [`Error::PeerAccess`], [`Error::DeviceMemory`], [`Error::Driver`].
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
                let (session, incoming) = ticket.attach(device, &hello, Duration::ZERO)?;
                let pool_session = PoolSession::of(session, incoming, device)?;
                pool_session
                    .map(Arc::new)
                    .ok_or_else(|| ticket.expired(Expiry::Replaced))
            },
        )?;
        match pool_session.ask(AllocRequest::Lent(ticket.wanted().id), &|| false) {
            Ok(Ok(block)) => Ok(block),
            Ok(Err(AllocReply::TooMany)) => Err(pool_session.too_many()),
            Ok(Err(_)) => Err(ticket.expired(Expiry::Returned)),
            Err(Error::OwnerGone { graceful, .. }) => {
                Err(ticket.expired(Expiry::Gone { died: !graceful }))
            }
            Err(other) => Err(other),
        }
    }

    /// Its device address in this process.
    pub fn ptr(&self) -> DevicePtr {
        self.mapping.ptr() + self.offset
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What its owner lets this process do with it.
    pub fn access(&self) -> Access {
        self.access
    }

    /// The device that it is mapped on.
    pub fn device(&self) -> &Device {
        self.mapping.device()
    }

    /// The pool's name.
    pub fn name(&self) -> &str {
        self.guard.pool_session.name()
    }

    /// Says that `stream` is given work on this block. To be called before the work is enqueued: the block is neither
    /// handed out again nor unmapped before the stream has done it.
    pub fn used_on(&self, stream: &Stream) {
        self.streams.record_use(stream);
        self.mapping.record_use(stream);
    }

    /// Enqueues a copy from host memory to byte `offset` (`cuMemcpyHtoDAsync`); `bytes` may be reused at once.
    ///
    /// # Errors
    /// [`Error::Range`]; [`Error::Argument`] for a block that was lent for reading, or a stream of another device;
    /// [`Error::Timeout`] when too much is on its way behind streams that stand still; [`Error::Driver`];
    /// [`Error::Forked`].
    pub fn write(&self, stream: &Stream, offset: u64, bytes: &[u8]) -> Result<()> {
        check_range(self.name(), offset, bytes.len() as u64, self.bytes)?;
        if self.access == Access::Read {
            return Err(Error::argument(
                "block",
                "lent for reading",
                "a block lent for writing, too",
            ));
        }
        self.streams.record_use(stream);
        self.mapping.write(stream, self.offset + offset, bytes)
    }

    /// Waits for the streams that were named, at most `timeout`, and copies all of it to host memory
    /// (`cuMemcpyDtoHAsync`).
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::DeviceMemory`] when the host has no room; [`Error::Driver`]; [`Error::Forked`].
    pub fn to_vec(&self, timeout: Duration) -> Result<Vec<u8>> {
        wait_for(&self.streams, timeout)?;
        self.mapping.read(self.offset, self.bytes)
    }

    /// Lets the block go behind the work enqueued on `stream` so far, and on the other streams that were named
    /// (`cuStreamWriteValue64`). Does not wait: the owner hands it out again when that work is done.
    ///
    /// # Errors
    /// [`Error::Driver`], [`Error::Argument`] for a stream of another device, and the block is let go as if it were
    /// dropped; [`Error::Forked`].
    pub fn free(mut self, stream: &Stream) -> Result<()> {
        self.mapping.check_owner_process()?;
        stream.check_of(self.device())?;
        self.used_on(stream);
        self.streams.join(stream)?;
        self.guard.release_behind(stream)
    }
}

impl Drop for LentBuffer {
    fn drop(&mut self) {
        if self.guard.is_released || !self.guard.pool_session.visit.owner_process().is_current() {
            return;
        }
        let mut fence = self.streams.fence_busy();
        if fence.is_reached() {
            // The claim releases it.
            return;
        }
        let BlockGuard {
            pool_session,
            pair,
            value,
            ..
        } = &self.guard;
        let guard = BlockGuard {
            pool_session: pool_session.clone(),
            pair: *pair,
            value: *value,
            is_released: false,
        };
        pool_session.visit.reactor().drop_after(move || {
            let _released_when_dropped = &guard;
            fence.is_reached()
        });
        self.guard.is_released = true;
    }
}
