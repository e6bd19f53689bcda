//! The words that members' streams wait for: each pair of members that needs one has its own page,
//! sealed against removal. (Any member can write and remove pages of the semaphore's own page.)
//!
//! A member that releases a permit behind a stream counts that release in its own memory
//! ([`Signaller`]). Its stream signals the count there and to every *listener*, a member with
//! streams that have had to wait for it. A stream that gets a permit waits for all releases that
//! its last signallers have *promised*: the signaller's CPU stores a promise in the listener's page
//! before the permit is handed on. A third member can change only the list of signallers: then a
//! stream may continue too early, but never hangs. A signaller's proven death raises all words that
//! it owed.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use crate::backend::StreamOp;
use crate::backoff::Backoff;
use crate::clock::Stopwatch;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::mutex::LockUnpoisoned;
use crate::runtime::closer::PeerFd;
use crate::runtime::fence::StreamSet;
use crate::runtime::reactor::Reactor;
use crate::runtime::timed_lock::LOCK_TIMEOUT;
use crate::shm::counter::{COUNTER_BYTES, SharedCounter, VALUE_MAX};
use crate::shm::page::{SharedPage, UnsealedPage};
use crate::shm::signaller::Signaller;
use crate::stream::Stream;

/// The most listeners of one member: the creator and all others.
pub(super) const LISTENERS_MAX: usize = 257;

/// The offset of the counts in a page.
const LANES_AT: usize = 64;

/// Bytes of a pair's page, for this many permits.
pub(super) fn bytes_for(permits: u32) -> usize {
    (LANES_AT + permits as usize * (COUNTER_BYTES + 8))
        .next_multiple_of(crate::shm::page::PAGE_BYTES)
}

/// The offset of a permit's promise in a page for this many permits.
pub(super) fn promised_at(permits: u32, permit: u32) -> usize {
    LANES_AT + permits as usize * COUNTER_BYTES + permit as usize * 8
}

/// Polls until `is_so`, which no other thread notifies of, at most for this long.
pub(super) fn wait_until(timeout: Duration, is_so: &dyn Fn() -> bool) {
    let (mut clock, mut backoff) = (Stopwatch::default(), Backoff::default());
    while !is_so() && clock.elapsed() < timeout {
        backoff.pause();
    }
}

/// The page of a signaller and a listener.
#[derive(Debug, Clone)]
struct PairPage {
    page: Arc<SharedPage>,
    permits: u32,
}

impl PairPage {
    /// 1 once the signaller signals here.
    fn is_served(&self) -> &AtomicU32 {
        self.page.at(0)
    }

    /// The signaller's releases of a permit that its streams have reached.
    fn lane(&self, permit: u32) -> SharedCounter {
        debug_assert!(permit < self.permits);
        SharedCounter::new(&self.page, LANES_AT + permit as usize * COUNTER_BYTES)
    }

    /// The signaller's releases of a permit that are enqueued.
    fn promised(&self, permit: u32) -> &AtomicU64 {
        self.page.at(promised_at(self.permits, permit))
    }

    fn end_waits(&self) {
        (0..self.permits).for_each(|permit| self.lane(permit).end());
    }
}

/// Waits for a stream, and the pages of their words: each stays mapped until the stream, which was
/// recorded before, has been given the waits.
#[derive(Debug, Default)]
pub(super) struct Waits {
    pub(super) ops: Vec<StreamOp>,
    pages: Vec<Arc<SharedPage>>,
}

/// A member that this process's streams wait for, and the page on which it signals.
#[derive(Debug)]
struct AwaitedMember {
    pair_page: PairPage,
    is_dead: bool,
}

/// One member's signals and listeners.
#[derive(Debug)]
pub(super) struct MemberSignals {
    pub(super) member: u32,
    pub(super) name: String,
    device: Device,
    /// The streams that have work for the semaphore.
    pub(super) streams: Arc<StreamSet>,
    pub(super) reactor: Arc<Reactor>,
    /// This member's releases, for each permit.
    releases: Vec<Arc<Signaller>>,
    listeners: Mutex<Vec<(u32, PairPage)>>,
    /// Pages of former listeners, which stay until this process's streams are past their work.
    replaced: Mutex<Vec<Weak<SharedPage>>>,
    /// No driver call is made under this lock: the reactor takes it.
    awaited: Mutex<BTreeMap<u32, AwaitedMember>>,
}

impl MemberSignals {
    pub(super) fn new(
        member: u32,
        permits: u32,
        name: &str,
        device: &Device,
        reactor: &Arc<Reactor>,
    ) -> Result<Arc<MemberSignals>> {
        let own = Arc::new(SharedPage::private(
            device,
            permits as usize * COUNTER_BYTES,
        )?);
        let releases = (0..permits as usize)
            .map(|permit| Signaller::new(SharedCounter::new(&own, permit * COUNTER_BYTES), 0))
            .map(Arc::new);
        Ok(Arc::new(MemberSignals {
            member,
            name: name.to_string(),
            device: device.clone(),
            streams: Arc::default(),
            reactor: reactor.clone(),
            releases: releases.collect(),
            listeners: Mutex::default(),
            replaced: Mutex::default(),
            awaited: Mutex::default(),
        }))
    }

    fn permits(&self) -> u32 {
        self.releases.len() as u32
    }

    /// Signals a release of `permit` behind the stream's work, after `before`. The permit is not
    /// handed on here.
    pub(super) fn release(&self, permit: u32, stream: &Stream, before: &[StreamOp]) -> Result<()> {
        let signaller = &self.releases[permit as usize];
        let next = |last| Ok(last + 1);
        let count = signaller.raise_within(LOCK_TIMEOUT, stream, &self.streams, before, next)?;
        for (_, pair_page) in self.listeners.locked().iter() {
            pair_page.promised(permit).fetch_max(count, SeqCst);
        }
        Ok(())
    }

    /// The waits for a stream that gets `permit`: all releases that `signallers` have promised so
    /// far.
    pub(super) fn waits(&self, permit: u32, signallers: impl Iterator<Item = u32>) -> Waits {
        let mut waits = Waits::default();
        for signaller in signallers {
            let wait = if signaller == self.member {
                let releases = &self.releases[permit as usize];
                releases.own().wait_op(releases.last())
            } else {
                self.awaited.locked().get(&signaller).and_then(|awaited| {
                    let pair_page = &awaited.pair_page;
                    waits.pages.push(pair_page.page.clone());
                    // No lane reaches a larger value, not even by its end: such a promise is
                    // garbage.
                    let promised = pair_page.promised(permit).load(SeqCst).min(VALUE_MAX);
                    pair_page.lane(permit).wait_op(promised)
                })
            };
            (waits.ops).extend(wait.filter(|wait| !waits.ops.contains(wait)));
        }
        waits
    }

    /// Whether this process's streams can wait for the member's.
    pub(super) fn is_connected(&self, member: u32) -> bool {
        member == self.member || self.awaited.locked().contains_key(&member)
    }

    /// Makes a page that this member and one that signals to it are to share.
    pub(super) fn draft(&self) -> Result<UnsealedPage> {
        UnsealedPage::create(bytes_for(self.permits()))
    }

    /// Waits until `member` has sealed the page and signals there. False if the time is over
    /// before, or `is_pointless`.
    pub(super) fn connect(
        &self,
        member: u32,
        draft: UnsealedPage,
        timeout: Duration,
        is_pointless: &dyn Fn() -> bool,
    ) -> Result<bool> {
        let mut clock = Stopwatch::default();
        let mut wait = |is_done: &dyn Fn() -> bool| {
            let left = timeout.saturating_sub(clock.elapsed());
            wait_until(left, &|| is_done() || is_pointless());
            is_done()
        };
        if !wait(&|| draft.is_closed()) {
            return Ok(false);
        }
        let pair_page = PairPage {
            page: Arc::new(draft.confirm(&self.device, &self.name)?),
            permits: self.permits(),
        };
        if !wait(&|| pair_page.is_served().load(SeqCst) == 1) {
            self.drop_page_deferred(pair_page);
            return Ok(false);
        }
        let earlier = self.awaited.locked().insert(
            member,
            AwaitedMember {
                pair_page,
                is_dead: false,
            },
        );
        earlier
            .into_iter()
            .for_each(|awaited| self.drop_page_deferred(awaited.pair_page));
        Ok(true)
    }

    /// Starts to signal to a member, on a page that it has mapped. Runs on the control thread: it
    /// calls the driver.
    pub(super) fn add_listener(&self, member: u32, fd: PeerFd) -> Result<()> {
        self.remove_listener(member);
        let replaced = {
            let mut replaced = self.replaced.locked();
            replaced.retain(|page| page.strong_count() > 0);
            replaced.len()
        };
        if self.listeners.locked().len() + replaced >= LISTENERS_MAX {
            let allowed = format!("one of {LISTENERS_MAX}");
            return Err(Error::argument("listener", member, allowed));
        }
        let page = SharedPage::seal(&self.device, fd, bytes_for(self.permits()), &self.name)?;
        let pair_page = PairPage {
            page: Arc::new(page),
            permits: self.permits(),
        };
        self.listeners.locked().push((member, pair_page.clone()));
        for (permit, signaller) in (0..).zip(&self.releases) {
            signaller.add_late(member.into(), &pair_page.lane(permit), &self.reactor);
            pair_page
                .promised(permit)
                .fetch_max(signaller.last(), SeqCst);
        }
        pair_page.is_served().store(1, SeqCst);
        Ok(())
    }

    /// Stops the signals to a member.
    fn remove_listener(&self, member: u32) {
        let mut listeners = self.listeners.locked();
        let Some(index) = listeners
            .iter()
            .position(|(listener, _)| *listener == member)
        else {
            return;
        };
        let (_, pair_page) = listeners.swap_remove(index);
        drop(listeners);
        self.releases
            .iter()
            .for_each(|signaller| drop(signaller.remove(member.into())));
        self.replaced.locked().push(Arc::downgrade(&pair_page.page));
        self.drop_page_deferred(pair_page);
    }

    /// Runs on the reactor's thread, which no driver call blocks: CPU stores alone. A dead member's
    /// device may have written a lower value after its page was raised.
    pub(super) fn tick(&self) {
        self.awaited
            .locked()
            .values()
            .filter(|awaited| awaited.is_dead)
            .for_each(|awaited| awaited.pair_page.end_waits());
    }

    /// Whether listeners have every count that this process's streams have reached.
    pub(super) fn catch_up(&self) -> bool {
        self.releases
            .iter()
            .filter(|signaller| !signaller.catch_up())
            .count()
            == 0
    }

    /// The member is proven dead, or has completed all its signals: streams that wait for it are
    /// released. CPU stores alone.
    pub(super) fn end_waits(&self, member: u32) {
        if let Some(awaited) = self.awaited.locked().get_mut(&member) {
            awaited.is_dead = true;
            awaited.pair_page.end_waits();
        }
    }

    /// Removes a member in both roles.
    pub(super) fn remove_member(&self, member: u32) {
        self.end_waits(member);
        self.remove_listener(member);
        let awaited = self.awaited.locked().remove(&member);
        awaited
            .into_iter()
            .for_each(|awaited| self.drop_page_deferred(awaited.pair_page));
    }

    /// Drops a page behind the enqueued work of its streams.
    fn drop_page_deferred(&self, pair_page: PairPage) {
        let streams = self.streams.clone();
        pair_page.page.drop_after_streams(streams, &self.reactor);
    }

    /// For tests: the pages shared with `member`, in either role.
    #[cfg(test)]
    pub(super) fn shared_with(&self, member: u32) -> Vec<Arc<SharedPage>> {
        let listeners = self.listeners.locked();
        let served = listeners
            .iter()
            .filter(|(listener, _)| *listener == member)
            .map(|(_, pair_page)| pair_page.page.clone());
        served
            .chain(
                self.awaited
                    .locked()
                    .get(&member)
                    .map(|awaited| awaited.pair_page.page.clone()),
            )
            .collect()
    }
}
