//! Regions that a publisher announces while its link is in use: they are mapped in order, by the control thread.
//!
//! A descriptor or memory that this process lacks is no fault of the publisher's. An announcement that cannot be read
//! stays in the socket, one that cannot be mapped stays here; both are tried again with each tick.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::handshake::import;
use super::{LinkState, PublisherLink};
use crate::error::{Error, Result};
use crate::ipc::message;
use crate::pubsub::entry::Violation;
use crate::runtime::closer::PeerFd;

/// Regions announced and not mapped yet; memory doubles with each, so nobody honest comes near.
const MAPPING_MAX: u32 = 128;

/// What was announced and is not mapped yet.
#[derive(Debug, Default)]
pub(super) struct AnnouncedRegions {
    count: AtomicU32,
    waiting: Mutex<VecDeque<AnnouncedRegion>>,
    /// The socket holds something that this process has no room for.
    is_unread: AtomicBool,
    /// The first that waits could not be mapped for want of something of this process.
    is_stuck: AtomicBool,
    /// What this process lacked last.
    want: Mutex<Option<Error>>,
}

#[derive(Debug)]
struct AnnouncedRegion {
    id: u32,
    bytes: u64,
    fds: Vec<PeerFd>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a region could not be mapped for want of something of this process.
fn is_own_want(error: &Error) -> bool {
    message::is_short(error) || matches!(error, Error::DeviceMemory { .. })
}

impl AnnouncedRegions {
    /// Takes note that the socket holds what this process has no room for.
    pub(super) fn leave_unread(&self, error: Error) {
        *lock(&self.want) = Some(error);
        self.is_unread.store(true, SeqCst);
    }

    /// The socket has been read. To be called behind [`map_soon`](PublisherLink::map_soon): one of the two says that a region is on
    /// its way.
    pub(super) fn has_been_read(&self) {
        self.is_unread.store(false, SeqCst);
    }
}

impl PublisherLink {
    /// Leaves the mapping of a region to the control thread, which takes them in order.
    pub(super) fn map_soon(&self, id: u32, bytes: u64, fds: Vec<PeerFd>) {
        // Each one waiting holds a descriptor of ours: a publisher that announces without end must not take them all.
        if self.announced.count.fetch_add(1, SeqCst) >= MAPPING_MAX {
            let found = "more announcements than can be queued".to_string();
            let violation = Violation {
                field: "regions",
                found,
                allowed: format!("at most {MAPPING_MAX}"),
            };
            return self.fail(self.violation(violation));
        }
        lock(&self.announced.waiting).push_back(AnnouncedRegion { id, bytes, fds });
        self.map_on_control_thread();
    }

    fn map_on_control_thread(&self) {
        let link = self.me.clone();
        self.reactor.run_on_control_thread(Box::new(move || {
            link.upgrade()
                .into_iter()
                .for_each(|link| link.map_waiting())
        }));
    }

    /// Maps what waits, up to what this process has no room for.
    fn map_waiting(&self) {
        loop {
            let Some(next) = lock(&self.announced.waiting).pop_front() else {
                return;
            };
            match self.map_region(&next) {
                _ if self.link_state() == LinkState::Failed => {}
                Ok(()) => {}
                Err(error) if is_own_want(&error) => {
                    lock(&self.announced.waiting).push_front(next);
                    *lock(&self.announced.want) = Some(error);
                    self.announced.is_stuck.store(true, SeqCst);
                    return;
                }
                Err(error) => self.fail(error),
            }
            self.announced.count.fetch_sub(1, SeqCst);
            self.doorbell.ring();
        }
    }

    /// Tries again what this process had no room for.
    pub(super) fn map_again(&self) {
        if self.announced.is_stuck.swap(false, SeqCst) {
            self.map_on_control_thread();
        }
    }

    /// Whether regions have been announced that are not mapped yet.
    pub(in crate::pubsub) fn is_mapping(&self) -> bool {
        // In this order: what is read now is counted before it counts as read.
        self.announced.is_unread.load(SeqCst) || self.announced.count.load(SeqCst) > 0
    }

    /// What this process lacked when it last could not take a region that was announced; told once each time.
    pub(in crate::pubsub) fn want(&self) -> Option<Error> {
        lock(&self.announced.want)
            .take()
            .filter(|_| self.is_mapping())
    }

    fn map_region(&self, announced: &AnnouncedRegion) -> Result<()> {
        let &AnnouncedRegion { id, bytes, ref fds } = announced;
        let mut regions = self.regions();
        let region = import(
            &self.device,
            (id, bytes),
            regions.len(),
            fds,
            self.access,
            self.owner,
            &self.name,
        )?;
        regions.push(region);
        Ok(())
    }
}
