//! Regions that a publisher announces, or closes, while its link is in use. The control thread maps
//! and unmaps them in order.
//!
//! A lack of descriptors or memory in this process is no fault of the publisher's. An announcement
//! that cannot be read stays in the socket, a region that cannot be mapped stays here; both are
//! tried again with each tick.
//!
//! A region is unmapped only when no sample in it is held, whatever the publisher says, and when
//! the streams that read samples of this link are past their work.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use super::handshake::{OpenRegion, check_id, import, take_out};
use super::{LinkState, PublisherLink};
use crate::error::{Error, Result};
use crate::ipc::message::{self, Message};
use crate::runtime::closer::PeerFd;
use crate::runtime::fence::LazyFence;
use crate::runtime::reactor::DropReadiness;

/// The most changes that wait here: each new region holds a descriptor of this process. All others
/// stay in the socket.
const WAITING_MAX: usize = 128;

/// The changes of a publisher's regions that it has announced and that have not been made here yet.
#[derive(Debug, Default)]
pub(super) struct AnnouncedRegions {
    count: AtomicUsize,
    waiting: Mutex<VecDeque<RegionChange>>,
    /// Regions that the publisher has closed and that are still mapped.
    closing: Arc<AtomicUsize>,
    /// The socket holds a message for which this process lacks resources.
    is_unread: AtomicBool,
    /// The first waiting region could not be mapped because this process lacked a resource.
    is_stuck: AtomicBool,
    /// The resource that this process lacked last.
    want: Mutex<Option<Error>>,
}

/// A change of a publisher's regions.
#[derive(Debug)]
pub(super) enum RegionChange {
    Open {
        id: u32,
        bytes: u64,
        fds: Vec<PeerFd>,
    },
    Close {
        id: u32,
    },
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

    /// Whether no further change may be read from the socket for now.
    pub(super) fn is_full(&self) -> bool {
        self.count.load(SeqCst) >= WAITING_MAX
    }

    /// Records that the socket has been read. Called after
    /// [`change_soon`](PublisherLink::change_soon), so that at any time one of the two shows that a
    /// region is due.
    pub(super) fn has_been_read(&self) {
        self.is_unread.store(false, SeqCst);
    }
}

impl PublisherLink {
    /// Leaves a change to the control thread, which makes them in order.
    pub(super) fn change_soon(&self, change: RegionChange) {
        self.announced.count.fetch_add(1, SeqCst);
        lock(&self.announced.waiting).push_back(change);
        self.map_on_control_thread();
    }

    fn map_on_control_thread(&self) {
        let link = self.me.clone();
        self.reactor.run_on_control_thread(Box::new(move || {
            link.upgrade()
                .into_iter()
                .for_each(|link| link.make_changes())
        }));
    }

    /// Makes the changes that wait, up to the first for which this process lacks resources.
    fn make_changes(&self) {
        loop {
            let Some(next) = lock(&self.announced.waiting).pop_front() else {
                return;
            };
            let made = match &next {
                RegionChange::Open { id, bytes, fds } => self.map_region(*id, *bytes, fds),
                RegionChange::Close { id } => self.close_region(*id),
            };
            match made {
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

    fn map_region(&self, id: u32, bytes: u64, fds: &[PeerFd]) -> Result<()> {
        let mut regions = self.regions();
        let closing = self.announced.closing.load(SeqCst);
        check_id(id, &regions, closing, &self.name)?;
        let (device, access, owner) = (&self.device, self.access, self.owner);
        let region = import(device, bytes, fds, access, owner, &self.name)?;
        region.identify(self.generation, id.into());
        regions.push(OpenRegion { id, region });
        Ok(())
    }

    /// Unmaps a region once no sample in it is held and the streams are past their work, and tells
    /// the publisher.
    fn close_region(&self, id: u32) -> Result<()> {
        let region = take_out(id, &mut self.regions(), &self.name)?;
        let closing = self.announced.closing.clone();
        closing.fetch_add(1, SeqCst);
        let (socket, mut fence) = (
            self.socket.clone(),
            LazyFence::new(self.memory.streams().clone()),
        );
        self.reactor.drop_after(move || {
            if Arc::strong_count(&region) > 1 {
                return DropReadiness::Held;
            }
            if !fence.is_reached() {
                return DropReadiness::Busy;
            }
            match message::send(socket.as_fd().as_fd(), &Message::RegionClosed { id }, &[]) {
                // Said again later: until then the publisher counts the region.
                Err(error) if error == Errno::AGAIN || message::is_own(error) => {
                    DropReadiness::Held
                }
                _ => {
                    closing.fetch_sub(1, SeqCst);
                    DropReadiness::Ready
                }
            }
        });
        Ok(())
    }
}
