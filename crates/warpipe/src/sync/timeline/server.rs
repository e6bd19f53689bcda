//! The owner's server: it gives each importer a page and stops the signals to importers that leave.

use std::sync::Arc;

use super::LANE_OFFSET;
use crate::device::Device;
use crate::error::Result;
use crate::fork::CloseOnForkFd;
use crate::ipc::{
    ClientInfo, Disconnected, OutgoingReply, Rejection, RequestHandler, ServerCore, decode,
};
use crate::runtime::closer::PeerFd;
use crate::runtime::fence::{Fence, StreamSet};
use crate::runtime::reactor::DropReadiness;
use crate::shm::counter::SharedCounter;
use crate::shm::page::{PAGE_BYTES, SharedPage};
use crate::shm::signaller::Signaller;

/// Signals to each importer in a page of its own.
pub(super) struct TimelineServer {
    pub(super) device: Device,
    pub(super) signaller: Arc<Signaller>,
    /// The streams that signal it.
    pub(super) signalling: Arc<StreamSet>,
    pub(super) published: CloseOnForkFd,
}

impl TimelineServer {
    /// Stops signals to an importer, and drops its page behind the enqueued ones. A living
    /// importer's streams are released.
    fn remove_importer(&self, server_core: &ServerCore, client: &ClientInfo) {
        let Some(copy) = self.signaller.remove(client.id) else {
            return;
        };
        let signaller = self.signaller.clone();
        let mut fence = Fence::later(self.signalling.clone());
        server_core.reactor().drop_after(move || {
            // Before the fence: a signal that is being enqueued holds the page.
            if Arc::strong_count(copy.page()) > 1 {
                return DropReadiness::Held;
            }
            if !fence.is_reached() {
                return DropReadiness::Busy;
            }
            copy.end_at(signaller.own().value());
            DropReadiness::Ready
        });
    }
}

impl RequestHandler for TimelineServer {
    fn on_connect(
        &self,
        _: &ServerCore,
        _: &ClientInfo,
        _: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        OutgoingReply::new(&(), vec![CloseOnForkFd::duplicate(&self.published)?])
    }

    fn takes_memory(&self) -> bool {
        true
    }

    fn on_memory(
        &self,
        server_core: &ServerCore,
        client: &ClientInfo,
        body: &[u8],
        memory: PeerFd,
    ) -> Result<OutgoingReply, Rejection> {
        let () = decode(body, server_core.name())?;
        let page = SharedPage::seal(&self.device, memory, PAGE_BYTES, server_core.name())?;
        let copy = SharedCounter::new(&Arc::new(page), LANE_OFFSET);
        // It may have sent one before.
        self.remove_importer(server_core, client);
        (self.signaller).add_late(client.id, &copy, server_core.reactor());
        Ok(OutgoingReply::default())
    }

    fn on_disconnect(&self, server_core: &ServerCore, client: &ClientInfo, _: Disconnected) {
        self.remove_importer(server_core, client);
    }
}
