//! The owner's server: it gives each importer a page and stops the signals to importers that leave.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{LANE_OFFSET, PageSealed, TimelineGrant};
use crate::device::Device;
use crate::error::Result;
use crate::fork::CloseOnForkFd;
use crate::ipc::{
    ClientInfo, Disconnected, OutgoingReply, Rejection, RequestHandler, ServerCore, decode,
};
use crate::runtime::fence::{Fence, StreamSet};
use crate::runtime::reactor::DropReadiness;
use crate::shm::counter::{COUNTER_BYTES, SharedCounter};
use crate::shm::page::UnsealedPage;
use crate::shm::signaler::Signaler;

/// Gives each importer a page of its own.
pub(super) struct TimelineServer {
    pub(super) device: Device,
    pub(super) signaler: Arc<Signaler>,
    pub(super) signalling: Arc<StreamSet>,
    pub(super) published: CloseOnForkFd,
    /// Pages that their importers have not sealed.
    pub(super) drafts: Mutex<HashMap<u64, UnsealedPage>>,
}

impl TimelineServer {
    fn drafts(&self) -> MutexGuard<'_, HashMap<u64, UnsealedPage>> {
        self.drafts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stops signals to an importer, and drops its page behind the enqueued ones. A living
    /// importer's streams are released.
    fn remove_importer(&self, server_core: &ServerCore, client: &ClientInfo) {
        self.drafts().remove(&client.id);
        let Some(copy) = self.signaler.remove(client.id) else {
            return;
        };
        let signaler = self.signaler.clone();
        let mut fence = Fence::later(self.signalling.clone());
        server_core.reactor().drop_after(move || {
            // Before the fence: a signal that is being enqueued holds the page.
            if Arc::strong_count(copy.page()) > 1 {
                return DropReadiness::Held;
            }
            if !fence.is_reached() {
                return DropReadiness::Busy;
            }
            copy.end_at(signaler.own().value());
            DropReadiness::Ready
        });
    }
}

impl RequestHandler for TimelineServer {
    fn on_connect(
        &self,
        _: &ServerCore,
        client: &ClientInfo,
        _: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        let draft = UnsealedPage::create(COUNTER_BYTES)?;
        let fds = vec![
            draft.descriptor()?,
            CloseOnForkFd::duplicate(&self.published)?,
        ];
        let answer = OutgoingReply::new(
            &TimelineGrant {
                bytes: draft.bytes() as u64,
            },
            fds,
        )?;
        self.drafts().insert(client.id, draft);
        Ok(answer)
    }

    fn on_request(
        &self,
        server_core: &ServerCore,
        client: &ClientInfo,
        body: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        let PageSealed = decode(body, server_core.name())?;
        let draft = self
            .drafts()
            .remove(&client.id)
            .ok_or_else(|| Rejection::new("it has its page"))?;
        let copy = SharedCounter::new(
            &Arc::new(draft.confirm(&self.device, server_core.name())?),
            LANE_OFFSET,
        );
        if !self.signaler.add(client.id, &copy) {
            let signaler = self.signaler.clone();
            server_core
                .reactor()
                .drop_after(move || signaler.catch_up());
        }
        Ok(OutgoingReply::default())
    }

    fn on_suspect(&self, server_core: &ServerCore, client: &ClientInfo) {
        self.remove_importer(server_core, client);
    }

    fn on_disconnect(&self, server_core: &ServerCore, client: &ClientInfo, _: Disconnected) {
        self.remove_importer(server_core, client);
    }

    /// Runs on the reactor's thread, which no driver call blocks: CPU stores alone.
    fn on_server_tick(&self, _: &ServerCore, _: u64) {
        self.signaler.catch_up();
    }
}
