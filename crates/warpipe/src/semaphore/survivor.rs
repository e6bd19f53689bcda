//! What a member does by itself when others die: the creator may be among them.
//!
//! A stream of ours may wait for what another member's device has not signalled yet, on a [page](super::signals) of the
//! two of us: nobody else could let it go. So before a stream of ours is made to wait, we have asked the creator for
//! pidfd and lifeline of everybody it waits for, and watch these ourselves.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::room::{CREATOR, Room};
use super::signals::Signals;
use super::warden::Notice;
use crate::error::{Error, Result};
use crate::fork::Home;
use crate::link::closer::PeerFd;
use crate::link::peer::{ORPHAN_TIMEOUT, Process, Sign};
use crate::link::watcher::{Next, Watch, Watched};
use crate::rendezvous::{Gift, Visit, decode};

/// What the creator has told us and the attendant has not come to: two for each member that there can be.
const NOTICES_MAX: usize = 512;

/// Watches the creator and those whose signals our streams wait for.
pub(super) struct Survivor {
    home: Home,
    room: Arc<Room>,
    signals: Arc<Signals>,
    me: Weak<Survivor>,
    member: u32,
    /// The creator is there no more.
    is_over: AtomicBool,
    notices: AtomicUsize,
    /// Proven dead, and perhaps owing something behind the work of the living.
    dead: Mutex<BTreeSet<u32>>,
    /// By member.
    known: Mutex<BTreeMap<u32, (Watch, Arc<Process>)>>,
}

impl std::fmt::Debug for Survivor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Survivor").field("member", &self.member).finish_non_exhaustive()
    }
}

impl Survivor {
    pub(super) fn new(room: Arc<Room>, signals: Arc<Signals>, member: u32) -> Arc<Survivor> {
        Arc::new_cyclic(|me: &Weak<Survivor>| Survivor {
            home: Home::here(),
            room,
            signals,
            me: me.clone(),
            member,
            is_over: AtomicBool::new(false),
            notices: AtomicUsize::new(0),
            dead: Mutex::default(),
            known: Mutex::default(),
        })
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(SeqCst)
    }

    pub(super) fn watched(&self) -> Weak<dyn Watched> {
        self.me.clone()
    }

    /// Whether this process will hear of the member's death.
    pub(super) fn knows(&self, member: u32) -> bool {
        member == self.member || member == CREATOR || self.known().contains_key(&member)
    }

    /// Begins to watch a member. At once [`Watched::on_ready`] if it is dead already.
    pub(super) fn learn(&self, member: u32, process: [PeerFd; 3], name: &str) -> Result<()> {
        let process = Process::relayed(process).map_err(|fault| Error::Protocol {
            name: name.to_string(),
            field: "descriptors of a member",
            found: fault.to_string(),
            allowed: "a pidfd and a lifeline".into(),
        })?;
        let watch = process.watch(Sign::Over(ORPHAN_TIMEOUT), &self.watched(), member.into())?;
        let forgotten = self.known().insert(member, (watch, process));
        drop(forgotten);
        Ok(())
    }

    /// The member is here no more: what it owes is stored, and nothing of it kept. Not on the watcher's thread.
    pub(super) fn forget(&self, member: u32) {
        let forgotten = self.known().remove(&member);
        drop(forgotten);
        self.bury(member);
        self.signals.forget(member);
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<u32, (Watch, Arc<Process>)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn dead(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.dead.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The member is proven dead, or has left and owes nothing.
    pub(super) fn bury(&self, member: u32) {
        self.signals.lift(member);
        self.dead().insert(member);
        self.settle();
    }

    fn on_notice(&self, mut gift: Gift) {
        let name = self.signals.name();
        match (decode(&gift.body, name), gift.fds.pop()) {
            // Who asked times out if it fails.
            (Ok(Notice::Serve { member }), Some(page)) => drop(self.signals.serve(member, page)),
            (Ok(Notice::Gone { member }), None) => self.forget(member),
            _ => {}
        }
    }

    fn settle(&self) {
        let mut dead = self.dead();
        if !dead.is_empty() {
            self.room.settle(|member| dead.contains(&member));
            // The creator's death concerns whatever is promised by then, and it promises nothing afterwards.
            dead.retain(|&member| self.room.owes(member));
        }
    }
}

impl Visit for Survivor {
    fn ended(&self, _graceful: bool) {
        self.is_over.store(true, SeqCst);
        self.room.ring_own(self.member);
    }

    fn orphaned(&self) {
        self.bury(CREATOR);
    }

    /// On the watcher's thread: what follows calls the driver.
    fn told(&self, gift: Gift) {
        let Some(me) = self.me.upgrade() else { return };
        // More than an honest creator sends are dropped.
        if self.notices.fetch_add(1, SeqCst) >= NOTICES_MAX {
            self.notices.fetch_sub(1, SeqCst);
            return;
        }
        self.signals.watcher().attend(Box::new(move || {
            me.on_notice(gift);
            me.notices.fetch_sub(1, SeqCst);
        }));
    }
}

impl Watched for Survivor {
    fn on_ready(&self, tag: u64) -> Next {
        if self.home.is_here()
            && let Ok(member) = u32::try_from(tag)
        {
            self.bury(member);
        }
        Next::Stop
    }

    fn on_tick(&self, _now_ns: u64) {
        self.settle();
        self.signals.tick();
    }
}
