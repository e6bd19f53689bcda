//! A peer's session with a pool: requests to the owner, mapped regions, and the release of blocks.
//! **This module is marked for unsafe**: it enqueues stores of words by address.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{
    AllocReply, AllocRequest, BlockGrant, HelloReply, PAGE_BYTES, PAIRS_MAX, PoolNotice,
    cleared_at, released_at,
};
use crate::backend::{Access, DeviceId, StreamOp, TimelineWord};
use crate::backoff::Backoff;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::leak_on_fork::LeakOnFork;
use crate::ipc::{ClientSession, IncomingReply, REPLY_TIMEOUT, SessionObserver, decode, encode};
use crate::memory::arena::REGIONS_MAX;
use crate::memory::mapped_region::{ImportKey, MappedRegion};
use crate::memory::region::Region;
use crate::memory::slice::{DeviceSlice, check_range};
use crate::memory::weak_cache::WeakCache;
use crate::runtime::drop_after_fence::DropAfterFence;
use crate::runtime::heartbeat::Uptime;
use crate::runtime::reactor::Reactor;
use crate::shm::page::SharedPage;
use crate::stream::Stream;
use crate::wait::Wait;

/// The limit for the owner's clearing of a block.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(10);

/// The sessions of this process, so that all blocks of a pool share one page and one mapping of
/// each region.
pub(super) static SESSIONS: WeakCache<ImportKey, PoolSession> = WeakCache::new();

/// This process's session with a pool.
#[derive(Debug)]
pub(super) struct PoolSession {
    pub(super) device: Device,
    owner: DeviceId,
    regions: Arc<MappedRegions>,
    /// The session closes when this process's streams are past all blocks.
    pub(super) shared: DropAfterFence<SessionParts>,
}

#[derive(Debug)]
pub(super) struct SessionParts {
    pub(super) words: Arc<SharedPage>,
    pub(super) session: ClientSession,
}

/// The regions that a session has mapped.
#[derive(Debug, Default)]
struct MappedRegions {
    /// By region id and whether the mapping is writable. The lock is held during driver calls.
    mapped: Mutex<HashMap<(u32, bool), Arc<MappedRegion>>>,
    /// The ids of regions that the owner has removed. Never locked during a driver call.
    removed: Mutex<Vec<u32>>,
    is_unmap_requested: AtomicBool,
}

impl MappedRegions {
    fn lock(&self) -> MutexGuard<'_, HashMap<(u32, bool), Arc<MappedRegion>>> {
        self.mapped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the reaper unmap a region. Blocks of it that are still in use keep it mapped.
    fn unmap_deferred(self: &Arc<Self>, region: u32, reactor: &Reactor) {
        let mut removed = self.removed.lock().unwrap_or_else(PoisonError::into_inner);
        // An owner has no more regions than this. More are a mistake of the owner's, and stay
        // mapped.
        if removed.len() < REGIONS_MAX {
            removed.push(region);
        }
        drop(removed);
        if !self.is_unmap_requested.swap(true, Ordering::AcqRel) {
            reactor.defer_drop(Box::new(UnmapTask(self.clone())));
        }
    }
}

/// Dropped by the reaper, it unmaps the regions that the owner has removed.
struct UnmapTask(Arc<MappedRegions>);

impl Drop for UnmapTask {
    fn drop(&mut self) {
        self.0.is_unmap_requested.store(false, Ordering::Release);
        let removed =
            std::mem::take(&mut *(self.0.removed.lock()).unwrap_or_else(PoisonError::into_inner));
        let is_removed = |key: &(u32, bool)| removed.contains(&key.0);
        let unmapped: Vec<_> = self.0.lock().extract_if(|key, _| is_removed(key)).collect();
        drop(unmapped);
    }
}

/// Releases the blocks that arrive after the requester has given up, and unmaps removed regions.
struct PoolObserver {
    words: Arc<SharedPage>,
    regions: Arc<MappedRegions>,
    reactor: Arc<Reactor>,
}

/// Runs on the reactor's thread: CPU stores, and locks that are not held during driver calls.
impl SessionObserver for PoolObserver {
    /// Nothing has been enqueued on such a block.
    fn on_stale_reply(&self, _: &[u8], incoming: IncomingReply) {
        if let Ok(AllocReply::Block(BlockGrant { pair, value, .. })) =
            decode(&incoming.body, "a pool")
            && pair < PAIRS_MAX
        {
            self.words
                .at::<TimelineWord>(released_at(pair))
                .store(value);
        }
    }

    fn on_notification(&self, incoming: IncomingReply) {
        if let Ok(PoolNotice::RegionRemoved(region)) = decode(&incoming.body, "a pool") {
            self.regions.unmap_deferred(region, &self.reactor);
        }
    }
}

/// A block of another process's pool. The drop releases it: the owner reuses it when the recorded
/// streams are past it. It stays valid when its owner closes the pool, or dies. Its methods to read
/// and write are those of [`DeviceSlice`].
#[derive(Debug)]
pub struct LentBuffer {
    pub(super) guard: LeakOnFork<BlockGuard>,
    pub(super) slice: DeviceSlice,
}

impl PoolSession {
    /// Opens the session from the server's reply. `None` if the pool is another incarnation than
    /// the expected one.
    pub(super) fn of(
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
        let regions = Arc::<MappedRegions>::default();
        session.observe(Arc::new(PoolObserver {
            words: words.clone(),
            regions: regions.clone(),
            reactor: Reactor::of_process()?,
        }))?;
        let parts = SessionParts { words, session };
        let shared = DropAfterFence::new(Arc::default(), parts)?;
        Ok(Some(PoolSession {
            device: device.clone(),
            owner,
            regions,
            shared,
        }))
    }

    /// Whether requests can still reach the owner.
    pub(super) fn is_connected(&self) -> bool {
        !self.shared.session.is_over()
    }

    pub(super) fn name(&self) -> &str {
        self.shared.session.name()
    }

    /// Requests a block. The caller handles every other reply.
    pub(super) fn ask(
        self: &Arc<PoolSession>,
        request: AllocRequest,
        wait: &Wait<'_>,
    ) -> Result<std::result::Result<LentBuffer, AllocReply>> {
        self.shared.owner_process().check()?;
        let incoming = self
            .shared
            .session
            .request(&encode(&request)?, wait.cancellable_within(REPLY_TIMEOUT))?;
        match decode(&incoming.body, self.name())? {
            AllocReply::Block(grant) => self.open_grant(grant, incoming).map(Ok),
            other => Ok(Err(other)),
        }
    }

    /// Checks a granted block and maps its region, if it is not mapped yet.
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
        // From here on the guard releases the block to the owner, also on an error.
        let guard = BlockGuard {
            pool_session: self.clone(),
            pair,
            value,
            is_released: false,
        };
        check_range(self.name(), offset, bytes, mapped)?;
        let mapping = self.region(&grant, &incoming)?;
        let slice = mapping.slice(offset, bytes, grant.access, &self.name().into())?;
        if grant.is_being_cleared {
            self.wait_until_clear(pair, value)?;
        }
        Ok(LentBuffer {
            guard: LeakOnFork::new(guard),
            slice,
        })
    }

    fn region(&self, grant: &BlockGrant, incoming: &IncomingReply) -> Result<Arc<MappedRegion>> {
        let BlockGrant {
            region,
            mapped,
            access,
            ..
        } = *grant;
        let mut regions = self.regions.lock();
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
        imported.identify(self.shared.session.generation(), region.into());
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
        let word: &TimelineWord = self.shared.words.at(cleared_at(pair));
        let (clock, mut backoff) = (Uptime::default(), Backoff::default());
        while !word.reached(value) {
            if self.shared.session.is_over() {
                return Err(self.shared.session.owner_gone());
            }
            if clock.ran() > CLEAR_TIMEOUT {
                return Err(Error::Timeout {
                    what: "the clearing of a block".into(),
                    waited: CLEAR_TIMEOUT,
                });
            }
            backoff.pause();
        }
        Ok(())
    }

    /// The regions that are mapped now.
    #[cfg(test)]
    pub(super) fn mapped_regions(&self) -> Vec<Arc<MappedRegion>> {
        self.regions.lock().values().cloned().collect()
    }

    pub(super) fn other_user(&self, uid: u32) -> Error {
        let own = rustix::process::geteuid().as_raw();
        Error::AccessDenied {
            name: self.name().to_string(),
            detail: format!(
                "the block is of user {uid}; its owner makes one for this user by `Pool::allocate_for({own}, ..)`"
            ),
        }
    }

    pub(super) fn too_many(&self) -> Error {
        let allowed = format!("up to {PAIRS_MAX} of {:?}; let some go", self.name());
        Error::argument(
            "blocks",
            format!("{} in one process", PAIRS_MAX + 1),
            allowed,
        )
    }
}

pub(super) fn wrong(name: &str, field: &'static str, found: String, allowed: String) -> Error {
    Error::Protocol {
        name: name.to_string(),
        field,
        found,
        allowed,
    }
}

/// A block that the owner counts as this process's, until its word holds the value. The drop
/// releases it by a CPU store.
#[derive(Debug)]
pub(super) struct BlockGuard {
    pub(super) pool_session: Arc<PoolSession>,
    pub(super) pair: u32,
    pub(super) value: u64,
    pub(super) is_released: bool,
}

impl BlockGuard {
    /// Has `stream` release the block.
    pub(super) fn release_behind(&mut self, stream: &Stream) -> Result<()> {
        let shared = &self.pool_session.shared;
        shared.streams().record_use(stream);
        let Some(word) = shared.words.device_ptr(released_at(self.pair)) else {
            return Ok(());
        };
        // SAFETY: the page is dropped only when this stream, recorded above, is past its stores.
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
        if !std::mem::replace(&mut self.is_released, true) {
            self.pool_session
                .shared
                .words
                .at::<TimelineWord>(released_at(self.pair))
                .store(self.value);
        }
    }
}
