//! The users of a pool: the quota of each, and the regions that are its own.
//!
//! A region is the unit of mapping, and a process that has mapped it can write all of it. So each
//! region holds blocks of one user alone. A mapping cannot be revoked either: a region never passes
//! to another user. Where one without blocks is in the way of its own user or of another one, it goes
//! back to the device, and that user gets a new region.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::super::last_writers::{LastWriter, LastWriters};
use super::{PoolRefusal, PoolState};
use crate::error::{Error, LimitFault};
use crate::memory::arena::{Chunk, Growth, SlotId, needed};
use crate::memory::ticket::Incarnation;

/// The most that one user may have of a [`Pool`](crate::Pool) at once, whatever the number of its
/// processes. A block counts until it is free again: released, with the work on it done, or the
/// process that had it proven dead.
///
/// The user's regions together take at most `bytes`, rounded up to the unit in which the device
/// gives memory (2 MiB). So a quota can be used up by fewer bytes in blocks, if the free ones lie
/// apart. Regions without blocks are in no block's way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quota {
    /// Bytes in blocks, each rounded up to a multiple of 512. No limit by default. With 0 the user
    /// gets none.
    pub bytes: u64,
    /// The number of blocks; no limit by default. A pool has 8192 in all, and 512 regions.
    pub blocks: u32,
}

impl Default for Quota {
    fn default() -> Quota {
        PoolUsage::NONE.quota
    }
}

/// The part of a pool that one user has, from [`Pool::usage`](crate::Pool::usage).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolUsage {
    /// Bytes in blocks that are not free.
    pub bytes: u64,
    /// The number of these blocks.
    pub blocks: u32,
    /// Bytes of the user's regions.
    pub region_bytes: u64,
    /// The user's quota.
    pub quota: Quota,
}

impl PoolUsage {
    /// Of a user that has nothing and no quota.
    pub(in crate::pool) const NONE: PoolUsage = PoolUsage {
        bytes: 0,
        blocks: 0,
        region_bytes: 0,
        quota: Quota {
            bytes: u64::MAX,
            blocks: u32::MAX,
        },
    };
}

/// The quotas of a pool.
#[derive(Debug, Clone, Default)]
pub(in crate::pool) struct Quotas {
    /// For every user but the pool's own.
    pub(in crate::pool) each: Quota,
    pub(in crate::pool) of_users: HashMap<u32, Quota>,
}

impl Quotas {
    fn of(&self, uid: u32, own_uid: u32) -> Quota {
        let default = if uid == own_uid {
            Quota::default()
        } else {
            self.each
        };
        self.of_users.get(&uid).copied().unwrap_or(default)
    }
}

/// A user's quota that leaves no room, and what is used of it.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(in crate::pool) struct OverQuota {
    uid: u32,
    used: u64,
    limit: u64,
    blocks: u32,
    blocks_max: u32,
}

impl OverQuota {
    /// Whether no release of blocks makes room for `bytes`.
    pub(in crate::pool) fn is_final(&self, bytes: u64) -> bool {
        needed(bytes).is_none_or(|bytes| bytes > self.limit) || self.blocks_max == 0
    }

    pub(in crate::pool) fn error(self, name: &str, bytes: u64) -> Error {
        Error::Limit(LimitFault::Quota {
            name: name.to_string(),
            uid: self.uid,
            bytes,
            used: self.used,
            limit: self.limit,
            blocks: self.blocks,
            blocks_max: self.blocks_max,
        })
    }
}

/// A region of the arena: the user whose blocks alone it holds, and its last writers.
#[derive(Debug)]
pub(in crate::pool) struct UserRegion {
    pub(in crate::pool) uid: u32,
    pub(in crate::pool) last_writers: LastWriters,
}

/// The regions of all users, and the quotas.
#[derive(Debug)]
pub(in crate::pool) struct Users {
    pub(in crate::pool) own_uid: u32,
    quotas: Quotas,
    /// By number in the arena.
    regions: Vec<UserRegion>,
    /// Bytes that are planned for regions that are being made, by user.
    growing: HashMap<u32, u64>,
    /// A region has gone back to the device, which may give the same memory again.
    has_removed: bool,
}

impl Users {
    pub(in crate::pool) fn new(own_uid: u32, quotas: Quotas) -> Users {
        Users {
            own_uid,
            quotas,
            regions: Vec::new(),
            growing: HashMap::new(),
            has_removed: false,
        }
    }

    pub(in crate::pool) fn region(&mut self, number: usize) -> &mut UserRegion {
        &mut self.regions[number]
    }

    #[cfg(test)]
    pub(in crate::pool) fn has_removed(&self) -> bool {
        self.has_removed
    }

    fn add_region(&mut self, uid: u32, bytes: u64) {
        let mut last_writers = LastWriters::default();
        if self.has_removed {
            // That new memory is zeroed is no promise of every driver's.
            last_writers.set(0..bytes, LastWriter::Several);
        }
        self.regions.push(UserRegion { uid, last_writers });
    }
}

/// A way to get room for a block.
pub(in crate::pool) enum Room {
    /// A region to be made, without the lock.
    Growth(Growth),
    /// Regions without blocks that were in the way, for the caller to drop without the lock.
    Removed(Vec<Chunk>),
    Refused(PoolRefusal),
}

impl PoolState {
    /// The user's part of the pool.
    pub(in crate::pool) fn usage(&self, uid: u32) -> PoolUsage {
        let of_user = self.users.regions.iter().zip(self.arena.chunks());
        let mut usage = PoolUsage {
            quota: self.users.quotas.of(uid, self.users.own_uid),
            ..PoolUsage::NONE
        };
        for (_, chunk) in of_user.filter(|(region, _)| region.uid == uid) {
            usage.bytes += chunk.used();
            usage.blocks += chunk.slots();
            usage.region_bytes += chunk.region.bytes();
        }
        usage
    }

    /// The user's quota, if it leaves no room for a block of `bytes`.
    pub(in crate::pool) fn over_quota(&self, uid: u32, bytes: u64) -> Option<OverQuota> {
        let usage = self.usage(uid);
        let sum = needed(bytes).map(|bytes| usage.bytes.saturating_add(bytes));
        // A length beyond all numbers exceeds every quota that is one.
        let is_over = sum.map_or(usage.quota.bytes < u64::MAX, |sum| sum > usage.quota.bytes);
        (is_over || usage.blocks >= usage.quota.blocks).then(|| over(uid, usage))
    }

    /// Takes a slot in a region of the user's.
    pub(in crate::pool) fn take_for(&mut self, uid: u32, bytes: u64) -> Option<SlotId> {
        let regions = &self.users.regions;
        self.arena.take_in(bytes, |it| regions[it].uid == uid)
    }

    /// Makes room for a block of the user's, none of whose regions has any.
    pub(in crate::pool) fn make_room(&mut self, uid: u32, bytes: u64) -> Room {
        let usage = self.usage(uid);
        let growing = self.users.growing.get(&uid).copied().unwrap_or(0);
        let share = usage.region_bytes.saturating_add(growing);
        let unit = self.arena.granularity();
        let most = usage
            .quota
            .bytes
            .checked_next_multiple_of(unit)
            .unwrap_or(u64::MAX);
        let room = most.saturating_sub(share);
        let Some(least) = self.arena.region_for(bytes) else {
            return self.full();
        };
        if least > room {
            // Room that the user's own regions without blocks take.
            return match self.remove_regions(|it| it == uid, least - room) {
                removed if removed.is_empty() => {
                    Room::Refused(PoolRefusal::OverQuota(over(uid, usage)))
                }
                removed => Room::Removed(removed),
            };
        }
        if let Some(growth) = self.arena.plan(bytes, share, room.min(self.arena.room())) {
            *self.users.growing.entry(uid).or_default() += growth.bytes();
            return Room::Growth(growth);
        }
        let missing = least.saturating_sub(self.arena.room());
        if missing == 0 && !self.arena.is_out_of_regions() {
            return self.full();
        }
        // Others' regions first: this user may use its own ones again as they are.
        let mut removed = self.remove_regions(|it| it != uid, missing);
        if removed.is_empty() {
            removed = self.remove_regions(|_| true, missing);
        }
        match removed {
            removed if removed.is_empty() => self.full(),
            removed => Room::Removed(removed),
        }
    }

    fn full(&self) -> Room {
        let (used, limit) = (self.used(), self.arena.limit());
        Room::Refused(PoolRefusal::Full { used, limit })
    }

    /// Adds the region that a growth has become to the user's.
    pub(in crate::pool) fn adopt_for(
        &mut self,
        uid: u32,
        growth: Growth,
        made: crate::error::Result<Chunk>,
        generation: Option<Incarnation>,
    ) -> crate::error::Result<()> {
        if let Some(growing) = self.users.growing.get_mut(&uid) {
            *growing -= growth.bytes();
            if *growing == 0 {
                self.users.growing.remove(&uid);
            }
        }
        let number = self.arena.adopt(growth, made)? as usize;
        let Chunk { id, region, .. } = &self.arena.chunks()[number];
        self.users.add_region(uid, region.bytes());
        if let Some(generation) = generation {
            region.identify(generation, (*id).into());
        }
        Ok(())
    }

    /// Takes out regions without blocks of the users that `is_of` accepts, at least one and
    /// `missing` bytes of them; none if there are not as many.
    fn remove_regions(&mut self, is_of: impl Fn(u32) -> bool, missing: u64) -> Vec<Chunk> {
        let regions = &self.users.regions;
        let numbers = self.arena.removable(|it| is_of(regions[it].uid), missing);
        let removed: Vec<Chunk> = numbers
            .into_iter()
            .filter_map(|number| {
                let chunk = self.arena.remove(number)?;
                self.users.regions.remove(number);
                Some(chunk)
            })
            .collect();
        self.users.has_removed |= !removed.is_empty();
        removed
    }
}

fn over(uid: u32, usage: PoolUsage) -> OverQuota {
    OverQuota {
        uid,
        used: usage.bytes,
        limit: usage.quota.bytes,
        blocks: usage.blocks,
        blocks_max: usage.quota.blocks,
    }
}
