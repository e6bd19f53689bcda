//! The exporter's side: the events of this process in one domain, served under one name to all
//! importers.

use std::sync::{Arc, Mutex, Weak};

use super::event_table::EventTable;
use super::event_table::event_slots::{EventSlot, SlotPhase};
use super::layout::{EventPage, EventWords, PAGES_MAX};
use super::recording::LatestRecording as _;
use super::{EventInner, Recording};
use crate::backend::IPC_EVENTS_MAX;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::per_process::PerProcess;
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::{AccessPolicy, Address, IpcServer, Kind};
use crate::runtime::fence::{Fence, StreamSet};
use crate::runtime::reactor::{Reactor, new_generation};
use crate::shm::counter::SharedCounter;
use crate::shm::signaler::Signaler;

/// The events of one process, domain and device that admit the same users, and their server.
pub(super) struct EventExporter {
    server: Option<IpcServer>,
    pub(super) event_table: Arc<EventTable>,
    pub(super) reactor: Arc<Reactor>,
    pub(super) domain: Domain,
    pub(super) device: Device,
    access: AccessPolicy,
    pub(super) name: EndpointName,
    pub(super) generation: [u8; 16],
}

static EXPORTERS: PerProcess<Mutex<Vec<Weak<EventExporter>>>> = PerProcess::new();

fn exporters() -> Vec<Arc<EventExporter>> {
    let mut all = EXPORTERS.lock();
    all.retain(|exporter| exporter.strong_count() > 0);
    all.iter().filter_map(Weak::upgrade).collect()
}

impl EventExporter {
    /// The exporter of this process for a domain, a device and the users that it admits; created if
    /// there is none.
    pub(super) fn of(
        domain: &Domain,
        device: &Device,
        access: &AccessPolicy,
    ) -> Result<Arc<EventExporter>> {
        let matches = |exporter: &Arc<EventExporter>| {
            exporter.domain.path() == domain.path()
                && exporter.access.admits_the_same_as(access)
                && Arc::ptr_eq(exporter.device.backend(), device.backend())
        };
        if let Some(exporter) = exporters().into_iter().find(matches) {
            return Ok(exporter);
        }
        let exporter = Arc::new(EventExporter::open(domain, device, access)?);
        EXPORTERS.lock().push(Arc::downgrade(&exporter));
        Ok(exporter)
    }

    /// The exporter of this process that a handle names.
    pub(super) fn named(endpoint: &str, generation: [u8; 16]) -> Option<Arc<EventExporter>> {
        exporters().into_iter().find(|exporter| {
            exporter.generation == generation && exporter.name.as_str() == endpoint
        })
    }

    fn open(domain: &Domain, device: &Device, access: &AccessPolicy) -> Result<EventExporter> {
        let tag: String = new_generation()[..8]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let name = EndpointName::new(&format!("events/{tag}"))?;
        let reactor = Reactor::of_process()?;
        let event_table = Arc::new_cyclic(|weak_self: &Weak<EventTable>| EventTable {
            state: Mutex::default(),
            streams: Arc::default(),
            device: device.clone(),
            reactor: reactor.clone(),
            weak_self: weak_self.clone(),
        });
        let at = Address {
            domain,
            name: &name,
            kind: Kind::Events,
        };
        let server = IpcServer::open(&at, access.clone(), event_table.clone())?;
        Ok(EventExporter {
            generation: server.server_core().generation(),
            server: Some(server),
            event_table,
            reactor,
            domain: domain.clone(),
            device: device.clone(),
            access: access.clone(),
            name,
        })
    }

    pub(super) fn streams(&self) -> &Arc<StreamSet> {
        &self.event_table.streams
    }

    /// Takes a slot for an event, with its number and serial.
    pub(super) fn take(&self) -> Result<NewEvent> {
        let mut state = self.event_table.lock();
        while state.free.is_empty() && state.is_full() {
            if state.pages.len() == PAGES_MAX {
                return Err(Error::EventLimit {
                    limit: IPC_EVENTS_MAX,
                });
            }
            drop(state);
            let page = EventPage::create(&self.device)?;
            state = self.event_table.lock();
            // Unless another thread has added a page meanwhile.
            if state.is_full() {
                state.pages.push(page);
            }
        }
        let index = match state.free.pop() {
            Some(index) => index,
            None => state.grow(),
        };
        let slot = &mut state.slots[index as usize];
        slot.phase = SlotPhase::Live(Weak::new());
        slot.event_words.forget_latest(slot.serial);
        Ok(NewEvent {
            index,
            serial: slot.serial,
            event_words: slot.event_words.clone(),
            signaler: slot.signaler.clone(),
        })
    }

    /// Publishes a recording of the exporter.
    pub(super) fn recorded(&self, index: u32, recording: Recording, now_ns: u64) {
        self.event_table
            .lock()
            .publish(index, recording, now_ns, None);
    }

    /// How often other processes have an event open.
    #[cfg(test)]
    pub(super) fn openings(&self, index: u32) -> u32 {
        self.event_table.lock().slots[index as usize]
            .importers
            .values()
            .sum()
    }

    /// The last recording of an event by any process.
    pub(super) fn latest(&self, index: u32) -> Option<(u64, Recording)> {
        let state = self.event_table.lock();
        let slot = &state.slots[index as usize];
        let importers = slot
            .importers
            .keys()
            .filter_map(|&importer| state.recorded_by(slot, index, importer));
        importers.fold(slot.event_words.latest(), |latest, importer| {
            latest.max_by_time(Some(importer))
        })
    }

    /// The lane of an importer that records, or its remaining state.
    pub(super) fn lane(&self, index: u32, lane: usize) -> SharedCounter {
        let state = self.event_table.lock();
        let slot = &state.slots[index as usize];
        slot.lanes[lane]
            .and_then(|importer| state.event_words_of(index, importer))
            .map_or_else(
                || slot.event_words.lane(lane),
                |event_words| event_words.lane(lane),
            )
    }

    /// Sets the event that a handle resolves to within this process.
    pub(super) fn set_live(&self, index: u32, inner: &Arc<EventInner>) {
        self.event_table.lock().slots[index as usize].phase =
            SlotPhase::Live(Arc::downgrade(inner));
    }

    /// The event itself, for an open in its own process.
    pub(super) fn find(&self, index: u32, serial: u64) -> Option<Arc<EventInner>> {
        match self.event_table.lock().slots.get(index as usize) {
            Some(EventSlot {
                phase: SlotPhase::Live(inner),
                serial: found,
                ..
            }) if *found == serial => inner.upgrade(),
            _ => None,
        }
    }

    /// Releases an event after its last handle here is dropped.
    pub(super) fn release(self: &Arc<Self>, index: u32) {
        let mut state = self.event_table.lock();
        if !state.slots[index as usize].is_shared {
            // No other process ever saw it, and counts continue: pending signals do no harm.
            return state.free_slot(index);
        }
        state.slots[index as usize].phase = SlotPhase::Disconnected;
        drop(state);
        let (exporter, fence) = (self.clone(), Fence::later(self.streams().clone()));
        self.reactor.call_after(fence, move || {
            exporter.event_table.lock().end(index);
        });
    }
}

/// The slot of a new event.
pub(super) struct NewEvent {
    pub(super) index: u32,
    pub(super) serial: u64,
    pub(super) event_words: EventWords,
    pub(super) signaler: Arc<Signaler>,
}

impl Drop for EventExporter {
    fn drop(&mut self) {
        drop(self.server.take());
        let state = std::mem::take(&mut *self.event_table.lock());
        let fence = Fence::later(self.event_table.streams.clone());
        self.reactor.call_after(fence, move || {
            (0..state.slots.len())
                .filter(|&index| state.slots[index].is_shared)
                .for_each(|index| state.end_all(index));
        });
    }
}
