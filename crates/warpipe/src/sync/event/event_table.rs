//! The event table of an exporter: it answers the requests of importers.

pub(super) mod event_slots;
mod recorder_watch;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use serde::{Deserialize, Serialize};

use self::event_slots::{EventSlot, ExporterState, NewListener};
use super::Recording;
use super::layout::{EventPage, PAGE_BYTES};
use crate::clock::now_ns;
use crate::device::Device;
use crate::error::Result;
use crate::ipc::{
    ClientInfo, Disconnected, OutgoingReply, Rejection, RequestHandler, ServerCore, decode,
};
use crate::runtime::fence::{Fence, StreamSet};
use crate::runtime::reactor::{DropReadiness, Reactor};
use crate::shm::page::UnsealedPage;
use crate::shm::signaler::Signaler;

/// A request of an importer.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum EventRequest {
    /// Requests a page of this number, to share; answered with [`PageReply`] and its descriptor.
    Page(u32),
    /// The page is mapped and sealed; answered with an empty reply once it is in use.
    Sealed(u32),
    /// Counts the importer among the users of an event; answered with whether the event exists.
    Open { index: u32, serial: u64 },
    /// Requests a lane for recording; answered with a [`LaneReply`].
    Lane { index: u32, serial: u64 },
    /// Closes one opening; its lane, if it has one, becomes free.
    Close {
        index: u32,
        serial: u64,
        lane: Option<u8>,
    },
    /// Reports a recording to forward; answered with an empty reply when the others have it.
    Recorded {
        index: u32,
        serial: u64,
        lane: u8,
        count: u64,
        now_ns: u64,
    },
    /// Returns a lane that was granted too late to be used; the opening stays.
    Return {
        index: u32,
        serial: u64,
        lane: u8,
        grant: u64,
    },
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct PageReply;

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum LaneReply {
    /// This lane, with the count `from`. No two grants of an event have the same number.
    Granted { lane: u8, from: u64, grant: u64 },
    /// All lanes are taken, or belonged to importers that died.
    Full,
    /// The event does not exist any more.
    Dropped,
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
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates a page to share with an importer.
    fn offer(&self, client: &ClientInfo, number: u32) -> Result<OutgoingReply, Rejection> {
        let mut state = self.lock();
        if number as usize >= state.pages.len() || state.shared.contains_key(&(client.id, number)) {
            return Err(Rejection::new("there is no such page to share"));
        }
        let draft = UnsealedPage::create(PAGE_BYTES)?;
        let answer = OutgoingReply::new(&PageReply, vec![draft.descriptor()?])?;
        state.drafts.insert((client.id, number), draft);
        Ok(answer)
    }

    fn confirm(
        &self,
        server_core: &ServerCore,
        client: &ClientInfo,
        number: u32,
    ) -> Result<OutgoingReply, Rejection> {
        let draft = self.lock().drafts.remove(&(client.id, number));
        let draft = draft.ok_or_else(|| Rejection::new("it was offered no such page"))?;
        let event_page = EventPage::confirm(&self.device, draft, server_core.name())?;
        self.lock().shared.insert((client.id, number), event_page);
        Ok(OutgoingReply::default())
    }

    pub(super) fn open(
        &self,
        client: &ClientInfo,
        index: u32,
        serial: u64,
    ) -> Result<OutgoingReply, Rejection> {
        let mut state = self.lock();
        let opened = state.open(client.id, index, serial);
        if let Some(Some(NewListener { signaler, lane })) = &opened
            && !signaler.add(client.id, lane)
        {
            state.lagging.push(signaler.clone());
            let event_table = self.weak_self.clone();
            self.reactor.drop_after(move || {
                event_table
                    .upgrade()
                    .is_none_or(|event_table| event_table.lock().catch_up())
            });
        }
        self.forward(&mut state, index);
        OutgoingReply::new(&opened.is_some(), vec![])
    }

    fn recorded(
        &self,
        client: &ClientInfo,
        (index, serial): (u32, u64),
        recording: Recording,
        at_ns: u64,
    ) {
        let mut state = self.lock();
        let holds = |slot: &&EventSlot| {
            slot.serial == serial && slot.lanes.get(recording.lane) == Some(&Some(client.id))
        };
        if state.slots.get(index as usize).filter(holds).is_some() {
            state.publish(index, recording, at_ns.min(now_ns()), Some(client.id));
            self.forward(&mut state, index);
        }
    }

    /// Forwards importers' recordings, and repeats it until nothing is left to forward.
    pub(super) fn forward(&self, state: &mut ExporterState, index: u32) {
        if state
            .slots
            .get(index as usize)
            .is_none_or(|slot| slot.is_forwarding)
            || state.forward(index)
        {
            return;
        }
        state.slots[index as usize].is_forwarding = true;
        let event_table = self.weak_self.clone();
        self.reactor.drop_after(move || {
            let Some(event_table) = event_table.upgrade() else {
                return true;
            };
            let mut state = event_table.lock();
            let is_over = state.slots.get(index as usize).is_none() || state.forward(index);
            if let Some(slot) = state.slots.get_mut(index as usize).filter(|_| is_over) {
                slot.is_forwarding = false;
            }
            is_over
        });
    }

    fn stop_signaling(
        &self,
        client: &ClientInfo,
        signalers: impl IntoIterator<Item = Arc<Signaler>>,
    ) {
        signalers
            .into_iter()
            .for_each(|signaler| drop(signaler.remove(client.id)));
    }
}

impl RequestHandler for EventTable {
    fn on_connect(
        &self,
        _: &ServerCore,
        _: &ClientInfo,
        _: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        Ok(OutgoingReply::default())
    }

    fn on_request(
        &self,
        server_core: &ServerCore,
        client: &ClientInfo,
        body: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        match decode::<EventRequest>(body, server_core.name())? {
            EventRequest::Page(number) => self.offer(client, number),
            EventRequest::Sealed(number) => self.confirm(server_core, client, number),
            EventRequest::Open { index, serial } => self.open(client, index, serial),
            EventRequest::Lane { index, serial } => OutgoingReply::new(
                &self
                    .lock()
                    .lane(&self.weak_self, server_core, client.id, index, serial)?,
                vec![],
            ),
            EventRequest::Close {
                index,
                serial,
                lane,
            } => {
                let signaler = self.lock().close(client.id, index, serial, lane);
                self.stop_signaling(client, signaler);
                Ok(OutgoingReply::default())
            }
            EventRequest::Recorded {
                index,
                serial,
                lane,
                count,
                now_ns,
            } => {
                self.recorded(
                    client,
                    (index, serial),
                    Recording {
                        lane: lane.into(),
                        count,
                    },
                    now_ns,
                );
                Ok(OutgoingReply::default())
            }
            EventRequest::Return {
                index,
                serial,
                lane,
                grant,
            } => {
                self.lock()
                    .return_lane(client.id, (index, serial), lane.into(), grant);
                Ok(OutgoingReply::default())
            }
        }
    }

    fn holds_anything(&self, client: &ClientInfo) -> bool {
        self.lock()
            .slots
            .iter()
            .any(|slot| slot.importers.contains_key(&client.id))
    }

    fn on_disconnect(&self, _: &ServerCore, client: &ClientInfo, disconnected: Disconnected) {
        let (signalers, shared) = self.lock().gone(client.id, disconnected);
        self.stop_signaling(client, signalers);
        for event_page in shared {
            let mut fence = Fence::later(self.streams.clone());
            self.reactor.drop_after(move || {
                // A device may write once more after its process's end, and streams of this process
                // may wait there.
                event_page.end_again();
                if !event_page.is_last() {
                    return DropReadiness::Held;
                }
                fence.is_reached().into()
            });
        }
    }

    /// Runs on the reactor's thread, which no driver call blocks: CPU stores alone.
    fn on_server_tick(&self, _: &ServerCore, _: u64) {
        let mut state = self.lock();
        state.catch_up();
        (0..state.slots.len())
            .filter(|&index| state.slots[index].is_forwarding)
            .for_each(|index| {
                state.forward(index as u32);
            });
    }
}
