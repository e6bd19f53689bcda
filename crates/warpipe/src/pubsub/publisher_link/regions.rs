//! The regions of a publisher. Those that it announces, or closes, while its link is in use are
//! mapped and unmapped by the control thread, in order.
//!
//! A region that this process cannot take or map, for want of descriptors or memory, closes the
//! link with that error.
//!
//! A region is unmapped only when no sample in it is held, whatever the publisher says, and when
//! the streams that read samples of this link are past their work.

use std::os::fd::AsFd;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::io::Errno;

use super::{ReceiverEnd, SenderState};
use crate::backend::{Access, DeviceId};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::ipc::message::{self, Message};
use crate::memory::arena::REGIONS_MAX;
use crate::memory::region::Region;
use crate::mutex::LockUnpoisoned;
use crate::os::is_shortage;
use crate::runtime::closer::PeerFd;
use crate::runtime::fence::Fence;
use crate::runtime::reactor::DropReadiness;

/// The most regions of a link that are mapped. Threads that grow at the same time may pass the
/// publisher's own limit, and it may see that a region is closed before this end counts it so.
const OPEN_MAX: usize = 2 * REGIONS_MAX;

/// A region of the publisher's that is mapped here.
#[derive(Debug)]
pub(in crate::pubsub) struct OpenRegion {
    pub(in crate::pubsub) id: u32,
    pub(in crate::pubsub) region: Arc<Region>,
}

/// The regions of one publisher.
#[derive(Debug)]
pub(super) struct PublisherRegions {
    pub(super) name: String,
    pub(super) device: Device,
    pub(super) generation: [u8; 16],
    pub(super) owner: DeviceId,
    pub(super) access: Access,
    /// By their ids. Only one thread at a time changes them, and not under a driver call, which may
    /// take long: every receive takes this lock, and a queue does so while it holds its own.
    open: Mutex<Vec<OpenRegion>>,
    /// Regions that the publisher has closed and that are still mapped.
    closing: Arc<AtomicUsize>,
}

impl PublisherRegions {
    pub(super) fn new(
        name: &str,
        device: &Device,
        generation: [u8; 16],
        owner: DeviceId,
        access: Access,
    ) -> PublisherRegions {
        PublisherRegions {
            name: name.to_string(),
            device: device.clone(),
            generation,
            owner,
            access,
            open: Mutex::default(),
            closing: Arc::default(),
        }
    }

    pub(super) fn open(&self) -> MutexGuard<'_, Vec<OpenRegion>> {
        self.open.locked()
    }

    fn wrong(&self, field: &'static str, found: impl ToString, allowed: String) -> Error {
        Error::Protocol {
            name: self.name.clone(),
            field,
            found: found.to_string(),
            allowed,
        }
    }

    /// Maps an announced region.
    pub(super) fn map(&self, id: u32, bytes: u64, fds: &[PeerFd]) -> Result<()> {
        let open = self.open();
        let last = open.last().map(|last| last.id);
        let count = open.len() + self.closing.load(SeqCst);
        drop(open);
        if last >= Some(id) || count >= OPEN_MAX {
            let found = format!("{id} behind {last:?}, beside {count} others");
            let allowed = format!("a larger one, beside fewer than {OPEN_MAX}");
            return Err(self.wrong("region number", found, allowed));
        }
        let unit = self.device.backend().granularity();
        if bytes == 0 || !bytes.is_multiple_of(unit) || bytes > i64::MAX as u64 {
            let allowed = format!("a multiple of {unit}");
            return Err(self.wrong("region length", format!("{bytes} bytes"), allowed));
        }
        let [fd] = fds else {
            return Err(self.wrong("descriptors", fds.len(), "1".into()));
        };
        let region = Region::import(&self.device, &[fd.as_fd()], bytes, self.access, self.owner)?;
        fd.approve();
        region.identify(self.generation, id.into());
        let region = Arc::new(region);
        self.open().push(OpenRegion { id, region });
        Ok(())
    }

    /// Takes out a region that its publisher closes.
    pub(super) fn take_out(&self, id: u32) -> Result<Arc<Region>> {
        let mut open = self.open();
        match open.binary_search_by_key(&id, |region| region.id) {
            Ok(index) => Ok(open.remove(index).region),
            Err(_) => Err(self.wrong("region number", id, "one that is open".into())),
        }
    }
}

impl ReceiverEnd {
    /// Leaves a change of the regions to the control thread: one for each task, so that a publisher
    /// that announces without end does not keep it from others' tasks.
    pub(super) fn change_soon(
        &self,
        change: impl FnOnce(&ReceiverEnd) -> Result<()> + Send + 'static,
    ) {
        if self.changes.fetch_add(1, SeqCst) >= OPEN_MAX {
            let allowed = format!("{OPEN_MAX} at a time");
            return self.fail(self.regions.wrong("region changes", "more", allowed));
        }
        let link = self.me.clone();
        self.reactor.run_on_control_thread(Box::new(move || {
            let Some(link) = link.upgrade() else { return };
            let is_needed = || link.link_state() != SenderState::Failed;
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
        let region = self.regions.take_out(id)?;
        let closing = self.regions.closing.clone();
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
