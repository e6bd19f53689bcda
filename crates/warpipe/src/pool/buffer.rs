//! The owner's side: the pool and its blocks.

use std::collections::HashMap;
use std::sync::Arc;

use super::allocator::PoolAllocator;
use super::allocator::users::{PoolUsage, Quota, Quotas};
use crate::backend::Access;
use crate::device::Device;
use crate::error::{Error, LimitFault, Result};
use crate::fork::leak_on_fork::LeakOnFork;
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::{AccessPolicy, IpcServer, Kind};
use crate::memory::DeviceSlice;
use crate::memory::arena::{SlotId, check_limit};
use crate::memory::slice::deref_to_slice;
use crate::memory::ticket::Ticket;
use crate::options::{MEMORY_LIMIT, chosen_place, in_domain, serve};
use crate::stream::Stream;
use crate::wait::Wait;

/// The options of a [`Pool`].
#[derive(Debug, Clone)]
pub struct PoolOptions {
    /// The domain of its name; the environment's by default.
    pub domain: Option<Domain>,
    /// The device of its memory; [`Device::preferred`] by default.
    pub device: Option<Device>,
    /// The most device memory that the pool allocates, in bytes: 4 GiB by default. It grows as
    /// needed, in regions that double, and keeps them until the pool ends, or a block that fits
    /// into none of them needs their room.
    pub memory_limit: u64,
    /// Allocates this many bytes at once; nothing by default.
    pub reserve: u64,
    /// The most that each user other than the pool's own may have: no limit by default. The
    /// kernel names a client's user as that of its process when it connected.
    ///
    /// With quotas that add up to no more than `memory_limit`, in multiples of 2 MiB, no user takes
    /// room from another one.
    pub user_quota: Quota,
    /// The most that each of these users may have, whatever `user_quota` says. The pool's own user
    /// may be one of them, and has no quota otherwise.
    pub quota_for: HashMap<u32, Quota>,
    /// The most peers at once: 256 by default. At most 128 of them may be of one user other than the
    /// pool's own, and 64 in one other process.
    pub peers_max: u32,
    /// Admits these users beside the owner's. The domain directory must admit them, too. Each user
    /// gets regions of its own, so that no process of another one can map its blocks; `user_quota`
    /// says how much each may have.
    pub allow_uids: Vec<u32>,
    /// Admits processes with one of these as their effective group. The kernel reports no
    /// supplementary groups of a peer, so those do not count.
    pub allow_gids: Vec<u32>,
}

in_domain!(PoolOptions, device);

impl Default for PoolOptions {
    fn default() -> PoolOptions {
        PoolOptions {
            domain: None,
            device: None,
            memory_limit: MEMORY_LIMIT,
            reserve: 0,
            user_quota: Quota::default(),
            quota_for: HashMap::new(),
            peers_max: 256,
            allow_uids: Vec::new(),
            allow_gids: Vec::new(),
        }
    }
}

/// Memory that is handed out in blocks, to this process and to others. Cheap to clone: all clones
/// are one pool. The drop of its last clone releases its name, and peers get no more memory. Blocks
/// in use stay valid until they are released.
///
/// ```
/// use std::time::Duration;
/// use warpipe::{Device, Domain, LentBuffer, Pool, PoolOptions, backend::Access};
/// # let folder = std::env::temp_dir().join(format!("warpipe-pool-{}", std::process::id()));
/// # let (domain, device) = (Domain::at(&folder)?, Device::host());
/// let options = PoolOptions { memory_limit: 64 << 20, ..domain.on(&device) };
/// let pool = Pool::new("scratch", options)?;
/// let stream = device.stream()?;
/// let buffer = pool.allocate(1 << 20, Duration::ZERO)?;
/// buffer.write(&stream, 0, b"for a peer")?;
/// stream.synchronize(Duration::from_secs(1))?;
/// let ticket = buffer.lend(Access::Read)?; // a text, for a peer
///
/// let lent = LentBuffer::open(&ticket, &device, Duration::ZERO)?; // in any process of this user
/// assert_eq!(&lent.to_vec(Duration::from_secs(1))?[..10], b"for a peer");
/// lent.free(&stream)?; // behind the work on the stream
/// buffer.free(&stream)?; // used again when both are past it
/// # drop(pool); std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), warpipe::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Pool {
    inner: LeakOnFork<Arc<PoolInner>>,
}

#[derive(Debug)]
struct PoolInner {
    /// Dropped first, so that no peer connects any more.
    _server: IpcServer,
    allocator: Arc<PoolAllocator>,
}

impl Drop for PoolInner {
    fn drop(&mut self) {
        self.allocator.lock().is_closed = true;
    }
}

/// The state of a pool, from [`Pool::stats`]. A block that the owner and a peer both have counts in
/// both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Regions allocated on the device.
    pub regions: usize,
    /// Bytes of these regions.
    pub total_bytes: u64,
    /// The limit for these bytes.
    pub limit_bytes: u64,
    /// Bytes in the owner's blocks.
    pub in_use_bytes: u64,
    /// Bytes in peers' blocks.
    pub lent_bytes: u64,
    /// Bytes in released blocks that a stream has not completed its work on.
    pub waiting_bytes: u64,
    /// The most bytes that were not free at one time.
    pub high_water_bytes: u64,
    /// Blocks handed out so far.
    pub allocations: u64,
    /// Allocations that had to wait for others.
    pub waits: u64,
    /// Peers that are connected, or still have blocks.
    pub peers: usize,
}

impl Pool {
    /// Takes the name and opens the pool.
    ///
    /// # Errors
    /// [`Error::Name`]; [`Error::Limit`], also for a reserve above the limit;
    /// [`Error::Driver`].
    pub fn new(name: &str, options: PoolOptions) -> Result<Pool> {
        let name = EndpointName::new(name)?;
        let limit = options.memory_limit;
        if options.reserve > limit {
            return Err(Error::Limit(LimitFault::Memory {
                name: name.to_string(),
                bytes: options.reserve,
                used: 0,
                limit,
            }));
        }
        let (domain, device) = chosen_place(&options.domain, &options.device)?;
        check_limit(&device, limit)?;
        let quotas = Quotas {
            each: options.user_quota,
            of_users: options.quota_for,
        };
        let at = domain.clone();
        let allocator = PoolAllocator::new(name.clone(), at, device, limit, quotas)?;
        if options.reserve > 0 {
            allocator.reserve(options.reserve)?;
        }
        let mut access = AccessPolicy::of(options.allow_uids, options.allow_gids);
        access.limits.all = options.peers_max;
        let server = serve(&Some(domain), &name, Kind::Pool, access, allocator.clone())?;
        let server_core = server.server_core();
        let _ = allocator.server_core.set(Arc::downgrade(server_core));
        let _ = allocator.generation.set(server_core.generation());
        Ok(Pool {
            inner: LeakOnFork::new(Arc::new(PoolInner {
                _server: server,
                allocator,
            })),
        })
    }

    /// Allocates `bytes` bytes, aligned to 512: from free blocks, else from a new region
    /// (`cuMemCreate`), else it waits for other blocks to be released. Its contents are what this user left there, or zeros.
    ///
    /// # Errors
    /// [`Error::Limit`] when the blocks in use, this user's quota or the device leave no room;
    /// [`Error::Argument`] for 0 bytes; [`Error::Driver`]; [`Error::State`].
    pub fn allocate<'w>(&self, bytes: u64, wait: impl Into<Wait<'w>>) -> Result<Buffer> {
        self.allocate_for(self.inner.allocator.uid, bytes, wait)
    }

    /// Like [`allocate`](Self::allocate), in a region of the user `uid`: its
    /// processes, and no others, can open the block's ticket. It counts against that user's quota
    /// until the block is free. Whatever lies in a user's regions, that user can read and write.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate), and [`Error::Limit`] of the user's quota.
    pub fn allocate_for<'w>(
        &self,
        uid: u32,
        bytes: u64,
        wait: impl Into<Wait<'w>>,
    ) -> Result<Buffer> {
        let allocator = &self.inner.allocator;
        let slot = allocator.allocate(uid, bytes, &wait.into())?;
        Ok(Buffer {
            allocator: LeakOnFork::new(allocator.clone()),
            slot,
            slice: allocator.slice(slot, bytes),
            is_free: false,
        })
    }

    #[cfg(test)]
    pub(super) fn allocator(&self) -> &Arc<PoolAllocator> {
        &self.inner.allocator
    }

    /// The part of the pool that the user `uid` has at present, and its quota. Nothing is used in
    /// a forked child.
    pub fn usage(&self, uid: u32) -> PoolUsage {
        let allocator = match self.inner.get() {
            Ok(inner) => &inner.allocator,
            Err(_) => return PoolUsage::NONE,
        };
        let mut state = allocator.lock();
        allocator.reclaim(&mut state);
        state.usage(uid)
    }

    /// The pool's present state. All zeros in a forked child.
    pub fn stats(&self) -> PoolStats {
        let mut stats = PoolStats {
            regions: 0,
            total_bytes: 0,
            limit_bytes: 0,
            in_use_bytes: 0,
            lent_bytes: 0,
            waiting_bytes: 0,
            high_water_bytes: 0,
            allocations: 0,
            waits: 0,
            peers: 0,
        };
        if let Ok(inner) = self.inner.get() {
            let allocator = &inner.allocator;
            let mut state = allocator.lock();
            allocator.reclaim(&mut state);
            (stats.regions, stats.total_bytes) = (state.arena.chunks().len(), state.arena.total());
            (stats.limit_bytes, stats.waiting_bytes) =
                (state.arena.limit(), state.arena.waiting_bytes());
            (stats.in_use_bytes, stats.lent_bytes) = state.held();
            let counts = state.counts;
            (stats.high_water_bytes, stats.allocations, stats.waits) =
                (counts.high_water, counts.allocations, counts.waits);
            stats.peers = state.borrowers.len();
        }
        stats
    }
}

/// A block of a pool of this process. The drop releases it: it is reused when the recorded streams
/// are past it, and all borrowers have released it, too. A stream that is not past it within a
/// minute counts as hung, and the block is not reused; [`free`](Buffer::free) waits as long as it
/// takes. Its methods to read and write are those of [`DeviceSlice`].
#[derive(Debug)]
pub struct Buffer {
    allocator: LeakOnFork<Arc<PoolAllocator>>,
    slot: SlotId,
    slice: DeviceSlice,
    is_free: bool,
}

deref_to_slice!(Buffer);

impl Buffer {
    /// A ticket with which peers may open this block
    /// ([`LentBuffer::open`](crate::LentBuffer::open)), until it is released here. A peer that has
    /// opened it by then keeps it. The peers are processes of the user that the block was allocated
    /// for: this process's own, unless it came from [`Pool::allocate_for`].
    ///
    /// # Errors
    /// [`Error::PeerGone`] when the pool is closed; [`Error::Os`]; [`Error::State`].
    pub fn lend(&self, access: Access) -> Result<Ticket> {
        self.allocator.lend(self.slot, self.bytes(), access)
    }

    /// Releases the block behind the work enqueued on `stream` so far, and on the other recorded
    /// streams (`cuStreamWriteValue64`). Does not wait: the block is reused when that work is done.
    ///
    /// # Errors
    /// [`Error::Driver`], [`Error::Argument`] for a stream of another device, and the block is
    /// released as if it were dropped; [`Error::State`].
    pub fn free(mut self, stream: &Stream) -> Result<()> {
        self.slice.gather_on(stream)?;
        self.allocator.release_behind(self.slot, stream)?;
        self.is_free = true;
        Ok(())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.is_free {
            return;
        }
        let Ok(allocator) = self.allocator.get() else {
            return;
        };
        allocator.lock().end_lends(self.slot);
        let (mut fence, slot) = (self.slice.streams().fence_busy(), self.slot);
        if fence.is_reached() {
            return allocator.release(slot);
        }
        let released = allocator.clone();
        (allocator.reactor()).call_after(fence, move || released.release(slot));
    }
}
