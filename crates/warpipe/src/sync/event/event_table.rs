//! The event table of an exporter: it answers the requests of importers.

use std::sync::{Arc, Mutex, MutexGuard, Weak};

use serde::{Deserialize, Serialize};

use super::Recording;
use super::event_slots::ExporterState;
use super::layout::EventPage;
use crate::clock::now_ns;
use crate::device::Device;
use crate::error::Result;
use crate::ipc::peer::{DeathEvidence, ORPHAN_TIMEOUT};
use crate::ipc::{
    ClientInfo, Disconnected, OutgoingReply, Rejection, RequestHandler, ServerCore, decode,
};
use crate::mutex::LockUnpoisoned;
use crate::runtime::closer::PeerFd;
use crate::runtime::fence::{Fence, StreamSet};
use crate::runtime::reactor::{DropReadiness, Reactor};

/// The request that comes with an importer's page: to share it for the events of this number.
/// Answered with an empty reply.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct PageRequest(pub(super) u32);

/// A request of an importer.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum EventRequest {
    /// Counts the importer among the users of an event; answered with whether the event exists.
    Open { index: u32, serial: u64 },
    /// Requests the importer's lane for recording; answered with its number and its count, or with
    /// nothing if the event does not exist any more. Refused without a free lane.
    Lane { index: u32 },
    /// Closes one opening; with the last one the importer's lane becomes free.
    Close { index: u32, serial: u64 },
    /// Reports a recording to forward; answered with an empty reply when the others have it.
    Recorded {
        index: u32,
        lane: u8,
        count: u64,
        now_ns: u64,
    },
}

/// The event table, shared with the control thread and the reactor: no driver call is made under
/// its lock.
pub(super) struct EventTable {
    pub(super) state: Mutex<ExporterState>,
    pub(super) streams: Arc<StreamSet>,
    pub(super) device: Device,
    pub(super) reactor: Arc<Reactor>,
    pub(super) weak_self: Weak<EventTable>,
}

impl EventTable {
    pub(super) fn lock(&self) -> MutexGuard<'_, ExporterState> {
        self.state.locked()
    }

    fn open(&self, client: &ClientInfo, index: u32, serial: u64) -> bool {
        let mut state = self.lock();
        let is_open = state.open(client.id, index, serial, &self.reactor);
        if is_open {
            self.forward(&mut state, index);
        }
        is_open
    }

    fn recorded(&self, client: &ClientInfo, index: u32, recording: Recording, at_ns: u64) {
        let mut state = self.lock();
        let Some(slot) = state.opened(client.id, index) else {
            return;
        };
        if slot.is_recorder(client.id, recording.lane) {
            slot.publish(recording, at_ns.min(now_ns()));
            self.forward(&mut state, index);
        }
    }

    /// Drops a page that no client has any more, behind the streams that work on it.
    fn drop_page(&self, event_page: EventPage) {
        let mut fence = Fence::later(self.streams.clone());
        self.reactor.drop_after(move || {
            // A device may write once more after its process's end, and streams of this process may
            // wait there.
            event_page.end_again();
            if !event_page.is_last() {
                return DropReadiness::Held;
            }
            fence.is_reached().into()
        });
    }

    /// Forwards importers' recordings, and repeats it until nothing is left to forward.
    fn forward(&self, state: &mut ExporterState, index: u32) {
        let slot = &mut state.slots[index as usize];
        if slot.is_forwarding || slot.forward() {
            return;
        }
        slot.is_forwarding = true;
        let event_table = self.weak_self.clone();
        self.reactor.drop_after(move || {
            let Some(event_table) = event_table.upgrade() else {
                return true;
            };
            let mut state = event_table.lock();
            let slot = state.slots.get_mut(index as usize);
            slot.is_none_or(|slot| {
                slot.is_forwarding = !slot.forward();
                !slot.is_forwarding
            })
        });
    }
}

impl RequestHandler for EventTable {
    fn takes_memory(&self) -> bool {
        true
    }

    fn takes_memory_again(&self) -> bool {
        true
    }

    fn on_memory(
        &self,
        server_core: &ServerCore,
        client: &ClientInfo,
        body: &[u8],
        memory: PeerFd,
    ) -> Result<OutgoingReply, Rejection> {
        let PageRequest(number) = decode(body, server_core.name())?;
        let key = (client.id, number);
        let state = self.lock();
        if number as usize >= state.pages.len() || state.has_open(client.id, number) {
            return Err(Rejection::new("there is no such page to share"));
        }
        drop(state);
        let event_page = EventPage::seal(&self.device, memory, server_core.name())?;
        // It sends another one where the answer to the first one came too late.
        let former = self.lock().shared.insert(key, event_page);
        former.into_iter().for_each(|page| self.drop_page(page));
        Ok(OutgoingReply::default())
    }

    fn on_request(
        &self,
        server_core: &ServerCore,
        client: &ClientInfo,
        body: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        match decode::<EventRequest>(body, server_core.name())? {
            EventRequest::Open { index, serial } => {
                OutgoingReply::new(&self.open(client, index, serial), vec![])
            }
            EventRequest::Lane { index } => {
                let reply = self.lock().lane(client, index)?;
                OutgoingReply::new(&reply, vec![])
            }
            EventRequest::Close { index, serial } => {
                self.lock().close(client.id, index, serial);
                Ok(OutgoingReply::default())
            }
            EventRequest::Recorded {
                index,
                lane,
                count,
                now_ns,
            } => {
                let lane = lane.into();
                self.recorded(client, index, Recording { lane, count }, now_ns);
                Ok(OutgoingReply::default())
            }
        }
    }

    fn on_suspect(&self, _: &ServerCore, client: &ClientInfo) -> bool {
        let state = self.lock();
        (state.slots.iter()).any(|slot| slot.opening_of(client.id).is_some())
    }

    fn on_orphaned(&self, _: &ServerCore, client: &ClientInfo) {
        self.lock().end_lanes_of(client.id);
    }

    fn on_disconnect(&self, _: &ServerCore, client: &ClientInfo, disconnected: Disconnected) {
        let shared = self.lock().gone(client.id, disconnected);
        shared.into_iter().for_each(|page| self.drop_page(page));
    }

    /// Runs on the reactor's thread, which no driver call blocks: CPU stores alone.
    fn on_server_tick(&self, _: &ServerCore, _: u64) {
        let recorders = self.lock().recorders.clone();
        // The driver may block the control thread behind the very streams that wait for recordings
        // which never come. And device work that a forked child keeps running may signal an ended
        // lane once more and set its word back.
        let dead = recorders
            .into_iter()
            .filter(|(_, process)| process.shows(DeathEvidence::Orphaned(ORPHAN_TIMEOUT)));
        let dead: Vec<u64> = dead.map(|(client, _)| client).collect();
        let state = self.lock();
        dead.into_iter()
            .for_each(|client| state.end_lanes_of(client));
        (state.slots.iter())
            .filter(|slot| slot.is_forwarding)
            .for_each(|slot| _ = slot.forward());
    }
}
