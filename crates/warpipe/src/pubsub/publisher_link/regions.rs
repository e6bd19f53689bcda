//! The regions of a publisher. Those that it announces, or closes, while its link is in use are
//! mapped and unmapped by the control thread, in order.
//!
//! A region that this process cannot take or map, for want of descriptors or memory, closes the
//! link with that error.
//!
//! A region is unmapped only when no sample in it is held, whatever the publisher says, and when
//! the streams that read samples of this link are past their work.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use rustix::io::Errno;

use super::{Ended, ReceiverEnd, RingTerms};
use crate::backend::Access;
use crate::error::{Error, Result};
use crate::ipc::message::{self, Message};
use crate::memory::arena::REGIONS_MAX;
use crate::memory::region::Region;
use crate::os::is_shortage;
use crate::runtime::closer::PeerFd;
use crate::runtime::fence::Fence;
use crate::runtime::reactor::DropReadiness;
use crate::shm::page::SharedPage;

/// The most regions of a link that are mapped. Threads that grow at the same time may pass the
/// publisher's own limit, and it may see that a region is closed before this end counts it so.
const OPEN_MAX: usize = 2 * REGIONS_MAX;

impl ReceiverEnd {
    fn wrong(&self, field: &'static str, found: impl ToString, allowed: impl ToString) -> Error {
        Error::protocol(&self.terms.name, field, found, allowed)
    }

    /// Maps an announced region; its message has brought one descriptor.
    pub(super) fn map(&self, id: u32, bytes: u64, fds: &[PeerFd]) -> Result<()> {
        let open = self.regions();
        let last = open.last().map(|&(last, _)| last);
        let count = open.len() + self.closing.load(SeqCst);
        drop(open);
        if last >= Some(id) || count >= OPEN_MAX {
            let found = format!("{id} behind {last:?}, beside {count} others");
            let allowed = format!("a larger one, beside fewer than {OPEN_MAX}");
            return Err(self.wrong("region number", found, allowed));
        }
        let RingTerms {
            device,
            sender_device,
            ..
        } = &self.terms;
        let unit = device.backend().granularity();
        if bytes == 0 || !bytes.is_multiple_of(unit) || bytes > i64::MAX as u64 {
            let allowed = format!("a multiple of {unit}");
            return Err(self.wrong("region length", format!("{bytes} bytes"), allowed));
        }
        let region = Region::import(
            device,
            &[fds[0].as_fd()],
            bytes,
            Access::Read,
            *sender_device,
        )?;
        fds[0].approve();
        region.identify(self.terms.generation, id.into());
        self.regions().push((id, Arc::new(region)));
        Ok(())
    }

    /// Maps the metadata page; its message has brought one descriptor.
    pub(super) fn map_cells(&self, fds: Vec<PeerFd>) -> Result<()> {
        let bytes = self.segment.cells_bytes();
        for fd in fds {
            let page = SharedPage::read(fd, bytes, &self.terms.name)?;
            if self.cells.set(page).is_err() {
                return Err(self.wrong("metadata page", "a second one", "one"));
            }
        }
        Ok(())
    }

    /// Leaves a change of the regions to the control thread: one for each task, so that a publisher
    /// that announces without end does not keep it from others' tasks.
    pub(super) fn change_soon(
        &self,
        change: impl FnOnce(&ReceiverEnd) -> Result<()> + Send + 'static,
    ) {
        if self.changes.fetch_add(1, SeqCst) >= OPEN_MAX {
            let allowed = format!("{OPEN_MAX} at a time");
            return self.fail(self.wrong("region changes", "more", allowed));
        }
        let link = self.me.clone();
        self.reactor.run_on_control_thread(Box::new(move || {
            let Some(link) = link.upgrade() else { return };
            let is_needed = || link.ended() != Some(Ended::Failed);
            if is_needed()
                && let Err(error) = change(&link)
                && is_needed()
            {
                link.fail(error);
            }
            link.changes.fetch_sub(1, SeqCst);
            link.doorbell.ring();
            // This may be the last holder of the link, and dropping the link calls the driver.
            link.reactor.clone().drop_on_reaper(link);
        }));
    }

    /// Whether regions have been announced that are not mapped yet.
    pub(in crate::pubsub) fn is_mapping(&self) -> bool {
        self.changes.load(SeqCst) > 0
    }

    /// Unmaps a region once no sample in it is held and the streams are past their work, and tells
    /// the publisher.
    pub(super) fn close_region(&self, id: u32) -> Result<()> {
        let mut open = self.regions();
        let index = open.binary_search_by_key(&id, |&(id, _)| id);
        let index = index.map_err(|_| self.wrong("region number", id, "one that is open"))?;
        let (_, region) = open.remove(index);
        drop(open);
        let closing = self.closing.clone();
        closing.fetch_add(1, SeqCst);
        let socket = self.end.socket.clone();
        let mut fence = Fence::later(self.streams.clone());
        self.reactor.drop_after(move || {
            if Arc::strong_count(&region) > 1 {
                return DropReadiness::Held;
            }
            if !fence.is_reached() {
                return DropReadiness::Busy;
            }
            match message::send(socket.as_fd(), &Message::RegionClosed { id }, &[]) {
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
