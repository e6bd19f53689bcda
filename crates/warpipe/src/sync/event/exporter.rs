//! The exporter's side: the events of this process in one domain, served under one name to all
//! importers.

use std::sync::{Arc, Mutex, OnceLock, Weak};

use super::event_slots::{EventSlot, SlotPhase};
use super::event_table::EventTable;
use super::layout::{EventPage, PAGES_MAX};
use super::{EventInner, EventState};
use crate::backend::IPC_EVENTS_MAX;
use crate::device::Device;
use crate::error::{Error, LimitFault, Result};
use crate::fork::per_process::PerProcess;
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::{AccessPolicy, Address, IpcServer, Kind};
use crate::runtime::fence::Fence;
use crate::runtime::reactor::{Reactor, new_generation};

/// The events of one process, domain and device that admit the same users, and their server.
pub(super) struct EventExporter {
    server: Option<IpcServer>,
    pub(super) event_table: Arc<EventTable>,
    pub(super) domain: Domain,
    pub(super) device: Device,
    access: AccessPolicy,
    pub(super) name: EndpointName,
    pub(super) generation: [u8; 16],
}

static EXPORTERS: PerProcess<Mutex<Vec<Weak<EventExporter>>>> = PerProcess::new();

/// The exporters that still have an owner.
fn living() -> Vec<Arc<EventExporter>> {
    let mut all = EXPORTERS.lock();
    all.retain(|known| known.strong_count() > 0);
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
        if let Some(exporter) = living().into_iter().find(matches) {
            return Ok(exporter);
        }
        let exporter = Arc::new(EventExporter::open(domain, device, access)?);
        EXPORTERS.lock().push(Arc::downgrade(&exporter));
        Ok(exporter)
    }

    /// The exporter of this process that a handle names.
    pub(super) fn named(endpoint: &str, generation: [u8; 16]) -> Option<Arc<EventExporter>> {
        living().into_iter().find(|exporter| {
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
            reactor,
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
            domain: domain.clone(),
            device: device.clone(),
            access: access.clone(),
            name,
        })
    }

    /// Takes a slot for an event.
    pub(super) fn take(&self) -> Result<EventState> {
        let mut state = self.event_table.lock();
        while state.free.is_empty() && state.is_full() {
            if state.pages.len() == PAGES_MAX {
                return Err(Error::Limit(LimitFault::Events(IPC_EVENTS_MAX)));
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
        let lane = OnceLock::from((0, slot.signaller.clone()));
        let state = EventState::new(index, slot.serial, slot.event_words.clone());
        Ok(EventState { lane, ..state })
    }

    /// How often other processes have an event open.
    #[cfg(test)]
    pub(super) fn openings(&self, index: u32) -> u32 {
        let state = self.event_table.lock();
        let openings = state.slot(index).openings.iter();
        openings.map(|opening| opening.count).sum()
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
        let fence = Fence::later(self.event_table.streams.clone());
        let exporter = self.clone();
        self.event_table.reactor.call_after(fence, move || {
            exporter.event_table.lock().end(index);
        });
    }
}

impl Drop for EventExporter {
    fn drop(&mut self) {
        drop(self.server.take());
        let state = std::mem::take(&mut *self.event_table.lock());
        let fence = Fence::later(self.event_table.streams.clone());
        self.event_table.reactor.call_after(fence, move || {
            let shared = state.slots.iter().filter(|slot| slot.is_shared);
            shared.for_each(EventSlot::end_all);
        });
    }
}
