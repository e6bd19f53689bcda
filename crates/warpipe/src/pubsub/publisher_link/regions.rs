//! Regions that a publisher announces, or closes, while its link is in use. The control thread maps
//! and unmaps them in order.
//!
//! A region that this process cannot take or map, for want of descriptors or memory, closes the
//! link with that error.
//!
//! A region is unmapped only when no sample in it is held, whatever the publisher says, and when
//! the streams that read samples of this link are past their work.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use super::handshake::{OPEN_MAX, OpenRegion, check_id, import, take_out, wrong};
use super::{LinkState, PublisherLink};
use crate::error::Result;
use crate::ipc::message::{self, Message};
use crate::os::is_shortage;
use crate::runtime::closer::PeerFd;
use crate::runtime::fence::LazyFence;
use crate::runtime::reactor::DropReadiness;

/// The changes of a publisher's regions that it has announced and that have not been made here yet.
#[derive(Debug, Default)]
pub(super) struct AnnouncedRegions {
    count: AtomicUsize,
    waiting: Mutex<VecDeque<RegionChange>>,
    /// Regions that the publisher has closed and that are still mapped.
    closing: Arc<AtomicUsize>,
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

impl PublisherLink {
    /// Leaves a change to the control thread, which makes them in order.
    pub(super) fn change_soon(&self, change: RegionChange) {
        if self.announced.count.fetch_add(1, SeqCst) >= OPEN_MAX {
            let (found, allowed) = ("more".to_string(), format!("{OPEN_MAX} at a time"));
            return self.fail(wrong(&self.name, "region changes", found, allowed));
        }
        lock(&self.announced.waiting).push_back(change);
        let link = self.me.clone();
        self.reactor.run_on_control_thread(Box::new(move || {
            link.upgrade()
                .into_iter()
                .for_each(|link| link.make_change())
        }));
    }

    /// Makes the first change that waits: one for each task, so that a publisher that announces
    /// without end does not keep the control thread from others' tasks.
    fn make_change(&self) {
        let Some(next) = lock(&self.announced.waiting).pop_front() else {
            return;
        };
        let made = match &next {
            RegionChange::Open { id, bytes, fds } => self.map_region(*id, *bytes, fds),
            RegionChange::Close { id } => self.close_region(*id),
        };
        if let Err(error) = made
            && self.link_state() != LinkState::Failed
        {
            self.fail(error);
        }
        self.announced.count.fetch_sub(1, SeqCst);
        self.doorbell.ring();
    }

    /// Whether regions have been announced that are not mapped yet.
    pub(in crate::pubsub) fn is_mapping(&self) -> bool {
        self.announced.count.load(SeqCst) > 0
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
                Err(error) if error == Errno::AGAIN || is_shortage(error) => DropReadiness::Held,
                _ => {
                    closing.fetch_sub(1, SeqCst);
                    DropReadiness::Ready
                }
            }
        });
        Ok(())
    }
}
