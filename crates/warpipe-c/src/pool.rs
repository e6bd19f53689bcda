//! Pools: device memory that is handed out in blocks, to this process and to others.

use std::ffi::c_char;

use warpipe::{Device, Pool, PoolClient, PoolOptions, Quota};

use crate::arguments::{number, slice, text, timeout};
use crate::call::get;
use crate::{
    MemoryKind, device_options, domain_of, make_memory_of, make_with, open_named, warpipe_allow,
    warpipe_device, warpipe_domain, warpipe_memory, warpipe_open_options, warpipe_status,
};

/// Device memory that is handed out in blocks, to this process and to others. Any number of threads
/// may use it. Closed, it releases its name, and clients get no more memory; blocks in use stay
/// valid until they are closed.
pub struct warpipe_pool(());

/// A client of another process's pool. Any number of threads may use it. Its blocks outlive it.
pub struct warpipe_pool_client(());

/// Options of a pool. Begin with `{.size = sizeof(warpipe_pool_options)}`; a field that is 0 has
/// its default.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_pool_options {
    /// `sizeof(warpipe_pool_options)`.
    pub size: usize,
    /// The domain of its name; the environment's by default.
    pub domain: *const warpipe_domain,
    /// The device of its memory; the first GPU by default, else the host.
    pub device: *const warpipe_device,
    /// The most device memory that the pool allocates, in bytes; 4 GiB by default. It grows as
    /// needed, in regions that double, and keeps them until it is closed, or another user needs the
    /// room.
    pub memory_limit: u64,
    /// Bytes that are allocated at once; none by default.
    pub reserve: u64,
    /// The most clients at once; 256 by default.
    pub peers_max: u32,
    /// Other users that are admitted; none by default. Each user gets regions of its own, so that no
    /// process of another one can map its blocks.
    pub allow: warpipe_allow,
    /// The most bytes in blocks that each user other than the pool's own may have at once, each
    /// block rounded up to a multiple of 512; no limit by default. A user's regions take at most as
    /// many, rounded up to 2 MiB.
    pub user_bytes_max: u64,
    /// The most blocks that each such user may have at once; no limit by default.
    pub user_blocks_max: u32,
    /// What single users may have instead.
    pub quotas: *const warpipe_pool_quota,
    /// How many those are.
    pub quotas_count: usize,
}

/// The most that one user may have of a pool at once, whatever the number of its processes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_pool_quota {
    /// The user; it may be the pool's own, which has no limit otherwise.
    pub uid: u32,
    /// The most blocks; 0 for no limit.
    pub blocks_max: u32,
    /// The most bytes in blocks; 0 for no limit.
    pub bytes_max: u64,
}

/// The part of a pool that one user has.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_pool_usage {
    /// Bytes in blocks that are not free.
    pub bytes: u64,
    /// The most bytes that the user may have; 0 for no limit.
    pub bytes_max: u64,
    /// Bytes of the user's regions.
    pub region_bytes: u64,
    /// The number of blocks that are not free.
    pub blocks: u32,
    /// The most blocks that the user may have; 0 for no limit.
    pub blocks_max: u32,
}

fn quota_of(bytes_max: u64, blocks_max: u32) -> Quota {
    let none = Quota::default();
    Quota {
        bytes: number(bytes_max, none.bytes),
        blocks: number(blocks_max, none.blocks),
    }
}

/// A limit, or 0 if it is `none`.
fn unless<T: PartialEq + Default>(none: T, limit: T) -> T {
    if limit == none { T::default() } else { limit }
}

device_options!(warpipe_pool_options);

/// The present state of a pool. A block that the owner and a client both have counts in both.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_pool_stats {
    /// Regions allocated on the device.
    pub regions: u64,
    /// Bytes of these regions.
    pub total_bytes: u64,
    /// The limit for these bytes.
    pub limit_bytes: u64,
    /// Bytes in the owner's blocks.
    pub in_use_bytes: u64,
    /// Bytes in clients' blocks.
    pub lent_bytes: u64,
    /// Bytes in released blocks that a stream has not completed its work on.
    pub waiting_bytes: u64,
    /// The most bytes that were not free at one time.
    pub high_water_bytes: u64,
    /// Blocks handed out so far.
    pub allocations: u64,
    /// Allocations that had to wait for others.
    pub waits: u64,
    /// Clients that are connected, or still have blocks.
    pub peers: u64,
}

/// Makes a pool of `name` (1 to 80 bytes of `a-z A-Z 0-9 _ - .` in parts joined by `/`). `options`
/// may be null.
///
/// `*pool` is the caller's, to be closed by `warpipe_close`.
///
/// `WARPIPE_NAME_CONFLICT` when another process, or this one, has the name;
/// `WARPIPE_LIMIT_REACHED` for a reserve above the limit, or when the device has no room;
/// `WARPIPE_INVALID_INPUT`; `WARPIPE_SYSTEM`; `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `name` is a text, `options` null or the address of options, which name arrays of as many
/// elements as they say; `pool` is the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_pool_create(
    name: *const c_char,
    options: *const warpipe_pool_options,
    pool: *mut *mut warpipe_pool,
) -> warpipe_status {
    let build = |options: &warpipe_pool_options, device: &Device| {
        // SAFETY: the caller's promises.
        let (name, (allow_uids, allow_gids), quotas) = unsafe {
            let quotas = slice("options->quotas", options.quotas, options.quotas_count)?;
            (text("name", name)?, options.allow.admitted()?, quotas)
        };
        let quotas = quotas.iter();
        let quotas = quotas.map(|it| (it.uid, quota_of(it.bytes_max, it.blocks_max)));
        let default = PoolOptions::default();
        let options = PoolOptions {
            domain: domain_of(options.domain)?,
            device: Some(device.clone()),
            memory_limit: number(options.memory_limit, default.memory_limit),
            reserve: options.reserve,
            user_quota: quota_of(options.user_bytes_max, options.user_blocks_max),
            quota_for: quotas.collect(),
            peers_max: number(options.peers_max, default.peers_max),
            allow_uids,
            allow_gids,
        };
        Ok(Pool::new(name, options)?)
    };
    // SAFETY: the caller's promises.
    unsafe { make_with("pool", pool, options, build) }
}

/// Allocates a block of `bytes` bytes, aligned to 512, and waits up to `timeout_ns` nanoseconds for
/// other blocks to be freed. Its contents are what this user left there, or zeros.
///
/// `*memory` is the caller's, to be closed by `warpipe_memory_free_on`, behind a stream's work, or
/// `warpipe_close`: the block is used again when the streams that it was used on are past
/// it, and all processes that opened it have closed it, too. It stays valid when the pool is
/// closed.
///
/// `WARPIPE_LIMIT_REACHED` when the blocks in use leave no room, or the device has none;
/// `WARPIPE_INVALID_INPUT` for 0 bytes; `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `memory` is the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_pool_allocate(
    pool: *const warpipe_pool,
    bytes: u64,
    timeout_ns: u64,
    memory: *mut *mut warpipe_memory,
) -> warpipe_status {
    let timeout = timeout(timeout_ns);
    let allocate = |pool: &Pool| pool.allocate(bytes, timeout).map(MemoryKind::Block);
    // SAFETY: the caller's promise.
    unsafe { make_memory_of(pool, memory, allocate) }
}

/// As `warpipe_pool_allocate`, in a region of the user `uid`: its processes, and no others, can
/// open the block's ticket (`warpipe_memory_lend`). The block counts in that user's quota until it
/// is free. That user can read and write all that lies in its regions.
///
/// `WARPIPE_LIMIT_REACHED` also for that quota.
///
/// # Safety
/// `memory` is the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_pool_allocate_for(
    pool: *const warpipe_pool,
    uid: u32,
    bytes: u64,
    timeout_ns: u64,
    memory: *mut *mut warpipe_memory,
) -> warpipe_status {
    let timeout = timeout(timeout_ns);
    let allocate = |pool: &Pool| {
        pool.allocate_for(uid, bytes, timeout)
            .map(MemoryKind::Block)
    };
    // SAFETY: the caller's promise.
    unsafe { make_memory_of(pool, memory, allocate) }
}

/// Reads which part of a pool the user `uid` has.
///
/// # Safety
/// `usage` is the address of such a structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_pool_get_usage(
    pool: *const warpipe_pool,
    uid: u32,
    usage: *mut warpipe_pool_usage,
) -> warpipe_status {
    let usage_of = |pool: &Pool| {
        let (found, none) = (pool.usage(uid), Quota::default());
        let limit = found.quota;
        warpipe_pool_usage {
            bytes: found.bytes,
            bytes_max: unless(none.bytes, limit.bytes),
            region_bytes: found.region_bytes,
            blocks: found.blocks,
            blocks_max: unless(none.blocks, limit.blocks),
        }
    };
    // SAFETY: the caller's promise.
    unsafe { get(pool, "usage", usage, |pool| usage_of(pool)) }
}

/// Reads a pool's present state.
///
/// # Safety
/// `stats` is the address of such a structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_pool_get_stats(
    pool: *const warpipe_pool,
    stats: *mut warpipe_pool_stats,
) -> warpipe_status {
    let stats_of = |pool: &Pool| {
        let stats = pool.stats();
        warpipe_pool_stats {
            regions: stats.regions as u64,
            total_bytes: stats.total_bytes,
            limit_bytes: stats.limit_bytes,
            in_use_bytes: stats.in_use_bytes,
            lent_bytes: stats.lent_bytes,
            waiting_bytes: stats.waiting_bytes,
            high_water_bytes: stats.high_water_bytes,
            allocations: stats.allocations,
            waits: stats.waits,
            peers: stats.peers as u64,
        }
    };
    // SAFETY: the caller's promise.
    unsafe { get(pool, "stats", stats, |pool| stats_of(pool)) }
}

/// Connects to the pool of this name in another process, to allocate from its memory. `options` may
/// be null. A block that its owner lends needs no client: `warpipe_ticket_open`.
///
/// `*client` is the caller's, to be closed by `warpipe_close`.
///
/// `WARPIPE_NOT_FOUND` when there is none, after `wait_ns`; `WARPIPE_REFUSED`, also for a device
/// that cannot reach its memory; `WARPIPE_NAME_CONFLICT` when something else has the name;
/// `WARPIPE_INVALID_INPUT`.
///
/// # Safety
/// `name` is a text, `options` null or the address of options, `client` that of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_pool_client_open(
    name: *const c_char,
    options: *const warpipe_open_options,
    client: *mut *mut warpipe_pool_client,
) -> warpipe_status {
    // SAFETY: the caller's promises.
    unsafe { open_named("client", client, name, options, PoolClient::open) }
}

/// Allocates a block of `bytes` bytes of the owner's memory, for reading and writing, and waits up
/// to `timeout_ns` nanoseconds for other blocks to be freed. The block is cleared if another user
/// had it.
///
/// `*memory` is the caller's, to be closed by `warpipe_memory_free_on`, behind a stream's work, or
/// `warpipe_close`: then, or when this process has died, the block returns to its owner. It
/// stays valid when its owner closes the pool, or dies.
///
/// `WARPIPE_LIMIT_REACHED` when the blocks in use, or this user's quota, leave no room, or the
/// device has none; `WARPIPE_PEER_GONE`; `WARPIPE_REFUSED`; `WARPIPE_INVALID_INPUT` for 0 bytes, or
/// beyond 1024 blocks at once; `WARPIPE_TIMEOUT` when the owner does not answer;
/// `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `memory` is the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_pool_client_allocate(
    client: *const warpipe_pool_client,
    bytes: u64,
    timeout_ns: u64,
    memory: *mut *mut warpipe_memory,
) -> warpipe_status {
    let timeout = timeout(timeout_ns);
    let allocate = |client: &PoolClient| client.allocate(bytes, timeout).map(MemoryKind::Lent);
    // SAFETY: the caller's promise.
    unsafe { make_memory_of(client, memory, allocate) }
}
