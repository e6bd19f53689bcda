//! The most connections that peers may have at once: in all, for each user, for each process. A
//! user or process at its limit leaves room for the others, and cannot exhaust this user's
//! descriptors in flight (`RLIMIT_NOFILE`, `unix(7)`).

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};

use crate::error::PeerLimit;
use crate::ipc::peer::{Peer, ProcessId};
use crate::mutex::LockUnpoisoned;
use crate::os::unread_by_peer;
use crate::runtime::closer::PeerSocket;

/// The limits of one endpoint.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PeerLimits {
    pub(crate) all: u32,
    pub(crate) user: u32,
    pub(crate) process: u32,
}

impl Default for PeerLimits {
    fn default() -> PeerLimits {
        PeerLimits::of(256)
    }
}

impl PeerLimits {
    /// So many peers: no other user, and no other process, may take all the places.
    pub(crate) fn of(all: u32) -> PeerLimits {
        PeerLimits {
            all,
            user: all.div_ceil(2),
            process: all.min(64).max(all / 4),
        }
    }
}

/// The connections of one endpoint, counted.
#[derive(Debug)]
pub(crate) struct ConnectionQuota {
    limits: PeerLimits,
    table: Arc<QuotaTable>,
}

#[derive(Debug, Default)]
struct QuotaTable {
    /// One for each connection.
    taken: Mutex<Vec<QuotaKey>>,
    /// Connections that ended before their peers had read what was sent to them.
    unread: Mutex<Vec<(Arc<PeerSocket>, QuotaKey)>>,
}

/// A process: whether it is known by its number alone, and that number or its pidfd's inode.
type ProcessKey = (bool, u64);

/// The user and process that a connection counts for.
#[derive(Debug, Clone, Copy, PartialEq)]
struct QuotaKey {
    uid: u32,
    process: ProcessKey,
}

/// The permit of one connection. Messages that its peer has not read stay in the peer's queue when
/// the connection ends, with their descriptors, which count for this user. So the permit counts,
/// however the connection ended, until the peer has read them or closed.
#[derive(Debug)]
pub(crate) struct QuotaPermit {
    table: Arc<QuotaTable>,
    key: QuotaKey,
    socket: Arc<PeerSocket>,
}

impl ConnectionQuota {
    pub(crate) fn new(limits: PeerLimits) -> ConnectionQuota {
        ConnectionQuota {
            limits,
            table: Arc::default(),
        }
    }

    /// A permit for a connection to `peer` over `socket`, or the limit that is reached, and its
    /// value. Connections of this user have no limit per user, and those within this process none
    /// per process.
    pub(crate) fn take(
        &self,
        peer: &Peer,
        socket: &Arc<PeerSocket>,
    ) -> Result<QuotaPermit, (PeerLimit, u32)> {
        self.release_closed();
        // Processes that this PID namespace does not see, on kernels before 6.9, count as one.
        let process = match peer.id {
            ProcessId::Inode(inode) => (false, inode),
            ProcessId::Number(pid) => (true, u64::from(pid.unsigned_abs())),
        };
        let uid = peer.uid;
        let is_foreign = uid != rustix::process::geteuid().as_raw();
        let limits = &self.limits;
        let mut taken = self.table.taken.locked();
        let count = |is_meant: &dyn Fn(&QuotaKey) -> bool| {
            taken.iter().filter(|key| is_meant(key)).count() as u64
        };
        let full = |applies, count, max| applies && count >= u64::from(max);
        if full(true, taken.len() as u64, limits.all) {
            return Err((PeerLimit::All, limits.all));
        }
        if full(is_foreign, count(&|key| key.uid == uid), limits.user) {
            return Err((PeerLimit::User, limits.user));
        }
        let of_process = count(&|key| key.process == process);
        if full(!peer.is_own(), of_process, limits.process) {
            return Err((PeerLimit::Process, limits.process));
        }
        let key = QuotaKey { uid, process };
        taken.push(key);
        Ok(QuotaPermit {
            table: self.table.clone(),
            key,
            socket: socket.clone(),
        })
    }

    /// Releases the permits of connections with peers that have read their queues or closed by now.
    pub(crate) fn release_closed(&self) {
        let mut unread = self.table.unread.locked();
        let read: Vec<_> = unread
            .extract_if(.., |(socket, _)| unread_by_peer(socket.as_fd()) == 0)
            .collect();
        drop(unread);
        read.iter().for_each(|(_, key)| self.table.release(*key));
    }
}

impl Drop for QuotaPermit {
    fn drop(&mut self) {
        // After the shutdown nothing is added to the unread queue.
        let _ = rustix::net::shutdown(&*self.socket, rustix::net::Shutdown::Both);
        if unread_by_peer(self.socket.as_fd()) == 0 {
            return self.table.release(self.key);
        }
        let mut unread = self.table.unread.locked();
        unread.push((self.socket.clone(), self.key));
    }
}

impl QuotaTable {
    fn release(&self, key: QuotaKey) {
        let mut taken = self.taken.locked();
        if let Some(index) = taken.iter().position(|&other| other == key) {
            taken.swap_remove(index);
        }
    }
}

/// The idle connection to evict for a new one: the oldest of the user with the most idle
/// connections. `connections` are pairs of connection number, which grows, and user.
pub(crate) fn eviction_candidate(connections: impl Iterator<Item = (u64, u32)>) -> Option<u64> {
    let mut users: HashMap<u32, (usize, u64)> = HashMap::new();
    for (id, uid) in connections {
        let (count, oldest) = users.entry(uid).or_insert((0, id));
        (*count, *oldest) = (*count + 1, id.min(*oldest));
    }
    users
        .into_values()
        .max_by_key(|&(count, oldest)| (count, u64::MAX - oldest))
        .map(|(_, oldest)| oldest)
}
