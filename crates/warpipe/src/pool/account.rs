//! A peer's side: what it has of another process's pool. **This module is marked for unsafe**: it copies to and from
//! blocks, and enqueues stores of words, by address.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::core::check_bytes;
use super::{Grant, Hello, Lending, PAGE_BYTES, PAIRS_MAX, Reception, Wish, cleared_at, released_at};
use crate::backend::{Access, DeviceId, DevicePtr, StreamOp, TimelineWord};
use crate::clock::Stopwatch;
use crate::device::Device;
use crate::domain::{Domain, EndpointName};
use crate::error::{Error, Expiry, Result};
use crate::link::proof::Streams;
use crate::memory::mapping::{Key, Mapping, check_range, wait_for};
use crate::memory::page::Page;
use crate::memory::region::Region;
use crate::memory::shelf::Shelf;
use crate::memory::ticket::Ticket;
use crate::memory::tied::Tied;
use crate::rendezvous::{ANSWER_TIMEOUT, Address, Gift, Kind, Visit, Visitor, decode, encode};
use crate::stream::{Backoff, Stream};

/// How long a peer that waits for memory leaves between its questions.
const ASK_AGAIN: Duration = Duration::from_millis(2);

/// How long the owner may take to clear a block.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(10);

/// The pools that this process visits, so that all their blocks share one page and one mapping of each region.
static ACCOUNTS: Shelf<Key, Account> = Shelf::new();

/// A visit at a pool.
#[derive(Debug)]
struct Account {
    device: Device,
    owner: DeviceId,
    /// What was mapped of it, by number and whether it may be written.
    regions: Mutex<HashMap<(u32, bool), Arc<Mapping>>>,
    /// It says goodbye when this process's streams have let everything go.
    visit: Tied<Parts>,
}

#[derive(Debug)]
struct Parts {
    words: Arc<Page>,
    visitor: Visitor,
}

/// Lets go the blocks that come when who asked for them has given up.
struct Porter(Arc<Page>);

impl Visit for Porter {
    /// On the watcher's thread: a CPU store alone. Nothing has been enqueued on such a block.
    fn late(&self, _: &[u8], gift: Gift) {
        if let Ok(Grant::Block(Lending { pair, value, .. })) = decode(&gift.body, "a pool")
            && pair < PAIRS_MAX
        {
            self.0.at::<TimelineWord>(released_at(pair)).store(value);
        }
    }
}

impl Account {
    /// Takes in what the admission brought. `None` if this is another run of the pool than was wanted.
    fn of(visitor: Visitor, gift: Gift, device: &Device) -> Result<Option<Account>> {
        let name = visitor.name().to_string();
        let Reception::Welcome { owner, page_bytes } = decode(&gift.body, &name)? else { return Ok(None) };
        if page_bytes != PAGE_BYTES as u64 {
            return Err(wrong(&name, "page", format!("{page_bytes} bytes"), format!("{PAGE_BYTES} bytes")));
        }
        let (_, [fd]) = gift.open::<Reception, 1>(&name)?;
        let words = Arc::new(Page::open(Some(device), fd, PAGE_BYTES, &name)?);
        visitor.listen(Arc::new(Porter(words.clone())))?;
        let parts = Parts { words, visitor };
        let visit = Tied::to(Arc::default(), parts)?;
        Ok(Some(Account { device: device.clone(), owner, regions: Mutex::default(), visit }))
    }

    /// Whether its owner can still be asked.
    fn is_good(&self) -> bool {
        !self.visit.visitor.is_over()
    }

    fn name(&self) -> &str {
        self.visit.visitor.name()
    }

    /// Asks for a block; what is told instead is for the caller.
    fn ask(
        self: &Arc<Account>,
        wish: Wish,
        is_called_off: &dyn Fn() -> bool,
    ) -> Result<std::result::Result<LentBuffer, Grant>> {
        self.visit.home().check()?;
        let gift = self.visit.visitor.ask_unless(&encode(&wish)?, ANSWER_TIMEOUT, is_called_off)?;
        match decode(&gift.body, self.name())? {
            Grant::Block(lending) => self.take_in(lending, gift).map(Ok),
            other => Ok(Err(other)),
        }
    }

    /// Checks a block and maps its region, if it is not mapped yet.
    fn take_in(self: &Arc<Account>, lending: Lending, gift: Gift) -> Result<LentBuffer> {
        let Lending { pair, value, offset, bytes, mapped, .. } = lending;
        if pair >= PAIRS_MAX {
            return Err(wrong(self.name(), "pair", pair.to_string(), format!("below {PAIRS_MAX}")));
        }
        // From here on the owner is told that the block is let go, whatever becomes of it.
        let claim = Claim { account: self.clone(), pair, value, is_released: false };
        check_range(self.name(), offset, bytes, mapped)?;
        let mapping = self.region(&lending, &gift)?;
        if lending.is_being_cleared {
            self.wait_until_clear(pair, value)?;
        }
        Ok(LentBuffer { claim, mapping, streams: Arc::default(), access: lending.access, offset, bytes })
    }

    fn region(&self, lending: &Lending, gift: &Gift) -> Result<Arc<Mapping>> {
        let Lending { region, mapped, access, .. } = *lending;
        let mut regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (region, access == Access::ReadWrite);
        if let Some(known) = regions.get(&key) {
            if known.bytes != mapped {
                return Err(wrong(self.name(), "region", format!("{mapped} bytes"), format!("{} bytes", known.bytes)));
            }
            return Ok(known.clone());
        }
        let [fd] = &gift.fds[..] else {
            return Err(wrong(self.name(), "descriptors", gift.fds.len().to_string(), "1".into()));
        };
        let imported = Region::import(&self.device, fd.as_fd(), mapped, access, self.owner)?;
        fd.approve();
        let mapping = Arc::new(Mapping::of(imported, &self.device, self.owner, access, mapped)?);
        regions.insert(key, mapping.clone());
        Ok(mapping)
    }

    fn wait_until_clear(&self, pair: u32, value: u64) -> Result<()> {
        let word: &TimelineWord = self.visit.words.at(cleared_at(pair));
        let (start, mut backoff) = (Instant::now(), Backoff::default());
        while !word.reached(value) {
            if self.visit.visitor.is_over() {
                return Err(self.visit.visitor.owner_gone());
            }
            if start.elapsed() > CLEAR_TIMEOUT {
                return Err(Error::Timeout { what: "the clearing of a block".into(), waited: CLEAR_TIMEOUT });
            }
            backoff.pause();
        }
        Ok(())
    }

    fn too_many(&self) -> Error {
        let allowed = format!("up to {PAIRS_MAX} of {:?}; let some go", self.name());
        Error::argument("blocks", format!("{} in one process", PAIRS_MAX + 1), allowed)
    }
}

fn wrong(name: &str, field: &'static str, found: String, allowed: String) -> Error {
    Error::Protocol { name: name.to_string(), field, found, allowed }
}

/// A block that the owner counts as ours, until its word has come to the value. Dropped, it is released by the CPU.
#[derive(Debug)]
struct Claim {
    account: Arc<Account>,
    pair: u32,
    value: u64,
    is_released: bool,
}

impl Claim {
    /// Has `stream` release it.
    fn release_behind(&mut self, stream: &Stream) -> Result<()> {
        let visit = &self.account.visit;
        visit.streams().note(stream);
        let Some(word) = visit.words.device_ptr(released_at(self.pair)) else { return Ok(()) };
        // SAFETY: the page goes only when this stream, noted above, is past its stores.
        unsafe { stream.batch(&[StreamOp::Signal { word, value: self.value }])? };
        self.is_released = true;
        Ok(())
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.account.visit.home().is_here() {
            // A forked child: the parent's blocks are not ours to give up.
            return std::mem::forget(self.account.clone());
        }
        if !std::mem::replace(&mut self.is_released, true) {
            self.account.visit.words.at::<TimelineWord>(released_at(self.pair)).store(self.value);
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
    account: Arc<Account>,
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
    pub fn open_timeout(domain: &Domain, name: &str, device: &Device, timeout: Duration) -> Result<PoolClient> {
        let name = EndpointName::new(name)?;
        let at = Address { domain, name: &name, kind: Kind::Pool };
        let hello = encode(&Hello { incarnation: None })?;
        let (visitor, gift) = Visitor::attach(&at, Some(device.info().id), &hello, timeout)?;
        let key = Key::new(visitor.uid(), visitor.generation(), 0, device);
        // One visit for all: should there be one already, this one ends here.
        let account = ACCOUNTS.get_or(&key, Account::is_good, || match Account::of(visitor, gift, device)? {
            Some(account) => Ok(Arc::new(account)),
            None => Err(wrong(name.as_str(), "reception", "expired".into(), "a welcome".into())),
        })?;
        Ok(PoolClient { account })
    }

    /// The pool's name.
    pub fn name(&self) -> &str {
        self.account.name()
    }

    #[cfg(test)]
    pub(super) fn words(&self) -> &Page {
        &self.account.visit.words
    }

    #[cfg(test)]
    pub(super) fn visitor(&self) -> &Visitor {
        &self.account.visit.visitor
    }

    /// The owner's process.
    pub fn owner_pid(&self) -> i32 {
        self.account.visit.visitor.pid()
    }

    /// Whether the owner has closed the pool, or has died. Blocks of it stay good.
    pub fn is_owner_gone(&self) -> bool {
        self.account.visit.visitor.is_over()
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
            match self.account.ask(Wish::Block { bytes }, is_called_off)? {
                Ok(block) => return Ok(block),
                Err(Grant::Full { used, limit }) => {
                    let left = timeout.saturating_sub(clock.elapsed());
                    if left.is_zero() || bytes > limit {
                        return Err(Error::MemoryLimit { name: self.name().to_string(), bytes, used, limit });
                    }
                    // The owner cannot know when a device will have let a block go: to ask again is all there is.
                    std::thread::park_timeout(left.min(ASK_AGAIN));
                }
                Err(_) => return Err(self.account.too_many()),
            }
        }
    }
}

/// A block of another process's pool. Dropped, it is let go: the owner hands it out again when the streams that were named
/// are past it. It stays good when its owner closes the pool, or dies.
#[derive(Debug)]
pub struct LentBuffer {
    claim: Claim,
    mapping: Arc<Mapping>,
    streams: Arc<Streams>,
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
        let Some(incarnation) = ticket.incarnation() else { return Err(ticket.expired(Expiry::Replaced)) };
        let account = ACCOUNTS.get_or(&Key::new(ticket.owner(), incarnation, 0, device), Account::is_good, || {
            let hello = encode(&Hello { incarnation: Some(incarnation) })?;
            let (visitor, gift) = ticket.attach(device, &hello, Duration::ZERO)?;
            let account = Account::of(visitor, gift, device)?;
            account.map(Arc::new).ok_or_else(|| ticket.expired(Expiry::Replaced))
        })?;
        match account.ask(Wish::Lent(ticket.wanted().id), &|| false) {
            Ok(Ok(block)) => Ok(block),
            Ok(Err(Grant::TooMany)) => Err(account.too_many()),
            Ok(Err(_)) => Err(ticket.expired(Expiry::Returned)),
            Err(Error::OwnerGone { graceful, .. }) => Err(ticket.expired(Expiry::Gone { died: !graceful })),
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
        self.claim.account.name()
    }

    /// Says that `stream` is given work on this block. To be called before the work is enqueued: the block is neither
    /// handed out again nor unmapped before the stream has done it.
    pub fn used_on(&self, stream: &Stream) {
        self.streams.note(stream);
        self.mapping.note(stream);
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
            return Err(Error::argument("block", "lent for reading", "a block lent for writing, too"));
        }
        self.streams.note(stream);
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
        self.mapping.check_home()?;
        stream.check_of(self.device())?;
        self.used_on(stream);
        self.streams.join(stream)?;
        self.claim.release_behind(stream)
    }
}

impl Drop for LentBuffer {
    fn drop(&mut self) {
        if self.claim.is_released || !self.claim.account.visit.home().is_here() {
            return;
        }
        let mut proof = self.streams.mark_busy();
        if proof.is_passed() {
            // The claim releases it.
            return;
        }
        let Claim { account, pair, value, .. } = &self.claim;
        let claim = Claim { account: account.clone(), pair: *pair, value: *value, is_released: false };
        account.visit.watcher().retire(move || {
            let _released_when_dropped = &claim;
            proof.is_passed()
        });
        self.claim.is_released = true;
    }
}
