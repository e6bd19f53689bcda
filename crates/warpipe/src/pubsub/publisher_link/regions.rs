//! Regions that a publisher announces while its link is in use. The control thread maps them in
//! order.
//!
//! A lack of descriptors or memory in this process is no fault of the publisher's. An announcement
//! that cannot be read stays in the socket, a region that cannot be mapped stays here; both are
//! tried again with each tick.

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

/// The most regions announced and not mapped yet. Memory doubles with each region, so a correct
/// publisher stays far below.
const MAPPING_MAX: u32 = 128;

/// Regions that are announced and not mapped yet.
#[derive(Debug, Default)]
pub(super) struct AnnouncedRegions {
    count: AtomicU32,
    waiting: Mutex<VecDeque<AnnouncedRegion>>,
    /// The socket holds a message for which this process lacks resources.
    is_unread: AtomicBool,
    /// The first waiting region could not be mapped because this process lacked a resource.
    is_stuck: AtomicBool,
    /// The resource that this process lacked last.
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

/// Whether a region could not be mapped because this process lacked a resource.
fn is_own_want(error: &Error) -> bool {
    message::is_short(error) || matches!(error, Error::DeviceMemory { .. })
}

impl AnnouncedRegions {
    /// Records that the socket holds a message for which this process lacks resources.
    pub(super) fn leave_unread(&self, error: Error) {
        *lock(&self.want) = Some(error);
        self.is_unread.store(true, SeqCst);
    }

    /// Records that the socket has been read. Called after [`map_soon`](PublisherLink::map_soon),
    /// so that at any time one of the two shows that a region is due.
    pub(super) fn has_been_read(&self) {
        self.is_unread.store(false, SeqCst);
    }
}

impl PublisherLink {
    /// Leaves the mapping of a region to the control thread, which takes them in order.
    pub(super) fn map_soon(&self, id: u32, bytes: u64, fds: Vec<PeerFd>) {
        // Each waiting region holds a descriptor of this process: a publisher that announces
        // without end must not take them all.
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

    /// Maps the waiting regions, up to the first for which this process lacks resources.
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

    /// Tries again to read and map the regions for which this process lacked resources.
    pub(super) fn map_again(&self) {
        if self.announced.is_stuck.swap(false, SeqCst) {
            self.map_on_control_thread();
        }
    }

    /// Whether regions have been announced that are not mapped yet.
    pub(in crate::pubsub) fn is_mapping(&self) -> bool {
        // In this order: a message that is read between the two loads is counted before the socket
        // counts as read.
        self.announced.is_unread.load(SeqCst) || self.announced.count.load(SeqCst) > 0
    }

    /// The error that last kept this process from taking an announced region. Each is returned
    /// once.
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
        region.identify(self.generation, id.into());
        regions.push(region);
        Ok(())
    }
}
