//! A member's reaction to deaths of other members, without the creator, which may be dead, too.
//!
//! A stream of this process may wait for a signal of another member's device, on a
//! [page](super::signals) of the two: only this process could release it. So before such a wait,
//! this process requests pidfd and lifeline of each awaited member from the creator, and watches
//! them itself.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, Weak};

use super::page::{CREATOR, SemaphorePage};
use super::signals::MemberSignals;
use serde::{Deserialize, Serialize};

use crate::debug::opaque_debug;
use crate::error::{Error, Result};
use crate::ipc::peer::{DeathEvidence, ORPHAN_TIMEOUT, Process};
use crate::ipc::{IncomingReply, SessionObserver, decode};
use crate::mutex::LockUnpoisoned;
use crate::runtime::closer::PeerFd;
use crate::runtime::reactor::{EventSource, Next, Registration};

/// A notification of the creator to a member.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum SemaphoreNotice {
    /// This member's streams are to wait for yours: map and seal the attached page, and signal
    /// there.
    Serve { member: u32 },
    /// This member is gone.
    Gone { member: u32 },
}

/// The most notifications that the control thread has not handled: two for each possible member.
const NOTICES_MAX: usize = 512;

type WatchedMember = (Registration, Arc<Process>);

/// Watches the creator, and the members that this process's streams wait for.
pub(super) struct MemberMonitor {
    pub(super) shared_page: Arc<SemaphorePage>,
    pub(super) signals: Arc<MemberSignals>,
    weak_self: Weak<MemberMonitor>,
    /// The creator is gone.
    is_over: AtomicBool,
    notices: AtomicUsize,
    /// Members that are proven dead, and may owe values behind the work of living ones.
    dead: Mutex<BTreeSet<u32>>,
    /// By member; `None` for one that this process is about to watch.
    watched_members: Mutex<BTreeMap<u32, Option<WatchedMember>>>,
}

opaque_debug!(MemberMonitor { is_over });

impl MemberMonitor {
    pub(super) fn new(
        shared_page: Arc<SemaphorePage>,
        signals: Arc<MemberSignals>,
    ) -> Arc<MemberMonitor> {
        Arc::new_cyclic(|weak_self: &Weak<MemberMonitor>| MemberMonitor {
            shared_page,
            signals,
            weak_self: weak_self.clone(),
            is_over: AtomicBool::new(false),
            notices: AtomicUsize::new(0),
            dead: Mutex::default(),
            watched_members: Mutex::default(),
        })
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(SeqCst)
    }

    pub(super) fn watched(&self) -> Weak<dyn EventSource> {
        self.weak_self.clone()
    }

    /// Whether this process will learn of the member's death.
    pub(super) fn watches(&self, member: u32) -> bool {
        member == self.signals.member
            || member == CREATOR
            || matches!(self.watched_members.locked().get(&member), Some(Some(_)))
    }

    /// Whether a member has left or is dead, since [`expect_member`](Self::expect_member). Ask
    /// again behind what is to end with it: its end may have been handled before that was there.
    pub(super) fn has_ended(&self, member: u32) -> bool {
        if member == self.signals.member || member == CREATOR {
            return false;
        }
        let members = self.watched_members.locked();
        let watched = members.get(&member);
        let watched = watched.map(|watched| watched.as_ref().map(|(_, process)| process.clone()));
        drop(members);
        let is_dead =
            |process: Arc<Process>| process.shows(DeathEvidence::Orphaned(ORPHAN_TIMEOUT));
        watched.is_none_or(|process| process.is_some_and(is_dead))
    }

    /// Notes whether the member leaves, from now on.
    pub(super) fn expect_member(&self, member: u32) {
        self.watched_members.locked().entry(member).or_default();
    }

    /// Whether the member is known to be dead, or to have left, and values that it owed are not yet
    /// due.
    pub(super) fn is_dead(&self, member: u32) -> bool {
        self.dead.locked().contains(&member)
    }

    /// Starts to watch an expected member, unless it has left. Calls [`EventSource::on_ready`] at
    /// once if it is dead already.
    pub(super) fn watch_member(&self, member: u32, process: [PeerFd; 3], name: &str) -> Result<()> {
        let process = Process::relayed(process).map_err(|fault| {
            let allowed = "a pidfd and a lifeline";
            Error::protocol(name, "descriptors of a member", fault, allowed)
        })?;
        let watch = process.watch(
            DeathEvidence::Orphaned(ORPHAN_TIMEOUT),
            &self.watched(),
            member.into(),
        )?;
        let mut members = self.watched_members.locked();
        let expected = members.get_mut(&member);
        let forgotten = expected.map(|expected| expected.replace((watch, process)));
        drop(members);
        drop(forgotten);
        Ok(())
    }

    /// The member is gone: its owed values are stored, and its state is removed. Not on the
    /// reactor's thread.
    pub(super) fn remove_member(&self, member: u32) {
        let forgotten = self.watched_members.locked().remove(&member);
        drop(forgotten);
        self.handle_death(member);
        self.signals.remove_member(member);
    }

    /// The member is proven dead, or has left and owes nothing.
    pub(super) fn handle_death(&self, member: u32) {
        self.signals.end_waits(member);
        self.dead.locked().insert(member);
        self.complete_dead_signals();
    }

    fn on_notice(&self, mut incoming: IncomingReply) {
        let name = &self.signals.name;
        match (decode(&incoming.body, name), incoming.fds.pop()) {
            // On a failure the requester times out.
            (Ok(SemaphoreNotice::Serve { member }), Some(page)) => {
                drop(self.signals.add_listener(member, page))
            }
            (Ok(SemaphoreNotice::Gone { member }), None) => self.remove_member(member),
            _ => {}
        }
    }

    fn complete_dead_signals(&self) {
        let mut dead = self.dead.locked();
        if !dead.is_empty() {
            self.shared_page
                .complete_dead_signals(|member| dead.contains(&member));
            // The creator's death covers its promises up to then: it makes none afterwards.
            dead.retain(|&member| self.shared_page.owes_signal(member));
        }
    }
}

impl SessionObserver for MemberMonitor {
    fn on_closed(&self, _graceful: bool) {
        self.is_over.store(true, SeqCst);
        self.shared_page.wake_member(self.signals.member);
    }

    fn on_orphaned(&self) {
        self.handle_death(CREATOR);
    }

    /// On the reactor's thread; the handling calls the driver, so it is deferred.
    fn on_notification(&self, incoming: IncomingReply) {
        let Some(monitor) = self.weak_self.upgrade() else {
            return;
        };
        // An honest creator sends fewer; the rest are dropped.
        if self.notices.fetch_add(1, SeqCst) >= NOTICES_MAX {
            self.notices.fetch_sub(1, SeqCst);
            return;
        }
        self.signals
            .reactor
            .run_on_control_thread(Box::new(move || {
                monitor.on_notice(incoming);
                monitor.notices.fetch_sub(1, SeqCst);
            }));
    }
}

impl EventSource for MemberMonitor {
    fn on_ready(&self, tag: u64) -> Next {
        if let Ok(member) = u32::try_from(tag) {
            self.handle_death(member);
        }
        Next::Stop
    }

    fn on_tick(&self, _now_ns: u64) {
        self.complete_dead_signals();
        self.signals.tick();
    }
}
