//! The thread that follows a domain: it connects to new members, reports changes, and waits for no
//! silent peer.

use std::collections::{HashMap, HashSet};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::changes::ChangeQueue;
use super::table::{MemberDeath, MemberEntry, MemberTable, UnresponsiveMember};
use super::{Change, MEMBERS_MAX, member_name};
use crate::error::{Error, HandshakeFault, Result};
use crate::ipc::client_handshake::{ClientHandshake, HandshakeLimit};
use crate::ipc::domain::{Arrivals, Author, Domain, EndpointName};
use crate::ipc::{Address, ClientSession, Kind, REPLY_TIMEOUT, SessionObserver};
use crate::mutex::LockUnpoisoned;
use crate::os::timespec;
use crate::runtime::doorbell::LocalDoorbell;
use crate::runtime::heartbeat::Uptime;
use crate::runtime::reactor::{STALLED_AFTER, TICK};

/// How often the directory is read without a notification, for members that were busy or over the
/// limit before.
const RESCAN_INTERVAL: Duration = Duration::from_secs(2);

/// How soon a member is tried again that has no room in its backlog. Others that connect to it as
/// fast as they can leave room for moments only.
const BUSY_INTERVAL: Duration = Duration::from_millis(10);

/// How often in a row that is done: a member may also be stopped, with a full backlog.
const BUSY_SCANS_MAX: u32 = 100;

/// The state that a watch's threads and its owner share.
pub(super) struct WatchShared {
    pub(super) domain: Domain,
    pub(super) table: Mutex<MemberTable>,
    pub(super) queue: Arc<ChangeQueue>,
    events: Mutex<Vec<(u64, SessionEvent)>>,
    doorbell: LocalDoorbell,
    is_closed: AtomicBool,
    cleans: bool,
}

/// An event on a member's session, seen by the library's reactor.
enum SessionEvent {
    Ended { graceful: bool },
    Dead,
}

impl WatchShared {
    pub(super) fn new(domain: Domain, cleans: bool) -> Result<WatchShared> {
        Ok(WatchShared {
            domain,
            table: Mutex::default(),
            queue: Arc::new(ChangeQueue::new()?),
            events: Mutex::default(),
            doorbell: LocalDoorbell::new()?,
            is_closed: AtomicBool::new(false),
            cleans,
        })
    }

    pub(super) fn table(&self) -> MutexGuard<'_, MemberTable> {
        self.table.locked()
    }

    pub(super) fn close(&self) {
        self.is_closed.store(true, SeqCst);
        self.doorbell.ring();
    }

    fn push_changes(&self, changes: impl IntoIterator<Item = Change>) {
        changes
            .into_iter()
            .for_each(|change| self.queue.push(change));
    }
}

/// Receives the events of one member's session on the library's reactor thread, and queues them.
struct SessionListener {
    id: u64,
    shared: Weak<WatchShared>,
}

impl SessionListener {
    fn push_event(&self, event: SessionEvent) {
        if let Some(shared) = self.shared.upgrade() {
            shared.events.locked().push((self.id, event));
            shared.doorbell.ring();
        }
    }
}

impl SessionObserver for SessionListener {
    fn on_closed(&self, graceful: bool) {
        self.push_event(SessionEvent::Ended { graceful });
    }

    fn on_proven_dead(&self) {
        self.push_event(SessionEvent::Dead);
    }
}

pub(super) struct DirectoryMonitor {
    shared: Arc<WatchShared>,
    arrivals: Arrivals,
    calls: HashMap<EndpointName, ClientHandshake>,
    next_id: u64,
    /// The time since the watch began.
    clock: Uptime,
    next_scan: Instant,
    /// The scans in a row that found a member without room in its backlog.
    busy_scans: u32,
    last_tick: Instant,
    /// Dropped once each member that was present at the start has answered, or its time to answer
    /// has passed.
    unsettled: Option<Sender<()>>,
}

impl DirectoryMonitor {
    pub(super) fn new(shared: Arc<WatchShared>, unsettled: Sender<()>) -> Result<DirectoryMonitor> {
        let arrivals = shared.domain.arrivals()?;
        let now = Instant::now();
        Ok(DirectoryMonitor {
            shared,
            arrivals,
            calls: HashMap::new(),
            next_id: 0,
            clock: Uptime::default(),
            next_scan: now,
            busy_scans: 0,
            last_tick: now,
            unsettled: Some(unsettled),
        })
    }

    pub(super) fn run(mut self) {
        while !self.shared.is_closed.load(SeqCst) {
            self.take_events();
            if Instant::now() >= self.next_scan {
                self.scan_directory();
            }
            self.finish_handshakes();
            if self.last_tick.elapsed() >= TICK {
                self.last_tick = Instant::now();
                let changes = self.shared.table().refresh_heartbeats();
                self.shared.push_changes(changes);
            }
            let is_done = self.calls.is_empty() && self.busy_scans == 0;
            if is_done || self.clock.ran() > STALLED_AFTER {
                self.unsettled = None;
            }
            if self.sleep() {
                self.arrivals.drain();
                self.next_scan = Instant::now();
            }
        }
        // The sessions close here, not on the thread that drops the watch last.
        let table = std::mem::take(&mut *self.shared.table());
        drop(table);
    }

    /// Sleeps until a descriptor is readable, or the next tick. Returns whether the directory has
    /// changed.
    fn sleep(&self) -> bool {
        let doorbell = &self.shared.doorbell;
        let mut descriptors = vec![
            PollFd::from_borrowed_fd(doorbell.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.arrivals.as_fd(), PollFlags::IN),
        ];
        descriptors.extend(
            self.calls
                .values()
                .map(|call| PollFd::from_borrowed_fd(call.as_fd(), PollFlags::IN)),
        );
        let is_idle = self.calls.is_empty() && self.shared.table().len() == 0;
        let until_scan = self.next_scan.saturating_duration_since(Instant::now());
        let until_tick = TICK.saturating_sub(self.last_tick.elapsed());
        let limit = if is_idle {
            until_scan
        } else {
            until_scan.min(until_tick)
        };
        // A failed poll can only have been interrupted.
        let _ = rustix::event::poll(&mut descriptors, Some(&timespec(limit)));
        doorbell.drain();
        !descriptors[1].revents().is_empty()
    }

    fn take_events(&mut self) {
        let events = std::mem::take(&mut *self.shared.events.locked());
        let mut dead = vec![];
        for (id, event) in events {
            match event {
                SessionEvent::Ended { graceful } => {
                    let change = self.shared.table().ended(id, graceful);
                    // The member may still be there and accept another connection. The delay keeps
                    // a peer that accepts and closes in a loop from setting the pace.
                    self.next_scan = self.next_scan.min(Instant::now() + TICK);
                    self.shared
                        .push_changes(change.map(|(change, _entry)| change));
                }
                SessionEvent::Dead => dead.extend(self.shared.table().died(id)),
            }
        }
        if !dead.is_empty() {
            self.report_deaths(dead);
        }
    }

    /// Reports proven deaths, and then removes what the dead have left: all that are known by now at
    /// once, since each look at the directory opens every lock in it.
    fn report_deaths(&self, dead: Vec<MemberDeath>) {
        let authors = dead.iter().map(|death| death.author).collect();
        let left = self.left_by(&authors);
        for mut death in dead {
            drop(death.removed);
            let endpoints = left.get(&death.author).cloned();
            death.member.endpoints = endpoints.unwrap_or_default();
            for cleanup in death.cleanups {
                self.shared
                    .queue
                    .push_cleanup(cleanup, death.member.clone());
            }
            self.shared.push_changes([Change::Died(death.member)]);
        }
        self.remove(left);
    }

    /// What these processes have left, and this watch is to remove.
    fn left_by(&self, dead: &HashSet<Author>) -> HashMap<Author, Vec<EndpointName>> {
        if dead.is_empty() || !self.shared.cleans {
            return HashMap::new();
        }
        self.shared.domain.left_by(dead).unwrap_or_default()
    }

    /// `Domain::clean` removes the files that cannot be removed now, in a domain of another user.
    fn remove(&self, left: HashMap<Author, Vec<EndpointName>>) {
        let names = left.values().flatten();
        names.for_each(|name| _ = self.shared.domain.clean_name(name));
    }

    /// Connects to every unknown name in the directory.
    fn scan_directory(&mut self) {
        self.next_scan = Instant::now() + RESCAN_INTERVAL;
        let busy_scans = std::mem::take(&mut self.busy_scans);
        let mut is_busy = false;
        let Ok(names) = self.shared.domain.names() else {
            return;
        };
        let (mut overlooked, mut absent) = (0, vec![]);
        let present = self.shared.table().present();
        for name in names.into_iter().filter(|name| member_name(name).is_some()) {
            if self.calls.contains_key(&name) || present.contains(&name) {
                continue;
            }
            if self.shared.table().len() >= MEMBERS_MAX {
                overlooked += 1;
                continue;
            }
            let at = Address {
                domain: &self.shared.domain,
                name: &name,
                kind: Kind::Member,
            };
            match ClientHandshake::begin(&at, None, &[], &HandshakeLimit::of(REPLY_TIMEOUT), false)
            {
                Ok(call) => self.await_answer(name, call),
                Err(Error::NotFound { .. }) => absent.push(name),
                Err(error) => {
                    let silent = HandshakeFault::Silent(Duration::ZERO);
                    is_busy |= matches!(error, Error::Handshake { fault, .. } if fault == silent);
                    overlooked += 1;
                }
            }
        }
        self.shared.table().overlooked = overlooked;
        self.clear(absent);
        if is_busy && busy_scans < BUSY_SCANS_MAX {
            self.busy_scans = busy_scans + 1;
            self.next_scan = Instant::now() + BUSY_INTERVAL;
        }
    }

    fn await_answer(&mut self, name: EndpointName, call: ClientHandshake) {
        let unresponsive = UnresponsiveMember {
            pid: call.peer.pid,
            uid: call.peer.uid,
            clock: Uptime::default(),
        };
        self.shared
            .table()
            .unresponsive
            .insert(name.clone(), unresponsive);
        self.calls.insert(name, call);
    }

    /// Removes what members have left that died before this watch knew them. (For known members,
    /// `report_deaths` does that.)
    fn clear(&self, absent: Vec<EndpointName>) {
        let domain = &self.shared.domain;
        let known = self.shared.table().known();
        let unknown = absent.iter().filter(|name| !known.contains(name));
        let authors = unknown
            .filter_map(|name| domain.last_holder(name))
            .collect();
        self.remove(self.left_by(&authors));
    }

    /// Admits the members that have answered.
    fn finish_handshakes(&mut self) {
        let heard: Vec<_> = self
            .calls
            .iter()
            .filter_map(|(name, call)| Some((name.clone(), call.receive().transpose()?)))
            .collect();
        for (name, answer) in heard {
            let Some(call) = self.calls.remove(&name) else {
                continue;
            };
            self.shared.table().unresponsive.remove(&name);
            let admitted = answer.and_then(|granted| {
                let (session, incoming) = ClientSession::enter(call, granted)?;
                MemberEntry::open(name, session, incoming)
            });
            match admitted {
                Ok(entry) => self.admit(entry),
                // Not a member: another kind, an unknown listener, or a process that ended before
                // it answered. The next scan tries again.
                Err(_) => self.shared.table().overlooked += 1,
            }
        }
    }

    fn admit(&mut self, entry: MemberEntry) {
        self.next_id += 1;
        let listener = Arc::new(SessionListener {
            id: self.next_id,
            shared: Arc::downgrade(&self.shared),
        });
        // The table stays locked until the entry is in it, so the end of the session cannot come
        // first.
        let mut table = self.shared.table();
        if entry.session().observe(listener).is_err() {
            table.overlooked += 1;
            return;
        }
        let change = table.admit(self.next_id, entry);
        drop(table);
        self.shared.push_changes(change);
    }
}
