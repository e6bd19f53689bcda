//! The watch for the death of an importer that records.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use super::EventTable;
use crate::ipc::peer::{DeathEvidence, ORPHAN_TIMEOUT, Process};
use crate::ipc::{Rejection, ServerCore};
use crate::runtime::reactor::{EventSource, Next, Registration};

/// An importer with a lane. The reactor watches for its death, too: the driver may block the
/// control thread behind the very streams that wait for recordings which never come.
pub(in crate::sync::event) struct RecorderWatch {
    _watch: Registration,
    _process: Arc<Process>,
    _death_handler: Arc<RecorderDeathHandler>,
}

/// Ends the lanes of one dead importer.
struct RecorderDeathHandler {
    pub(in crate::sync::event) event_table: Weak<EventTable>,
    pub(in crate::sync::event) client: u64,
    pub(in crate::sync::event) is_over: AtomicBool,
}

impl RecorderDeathHandler {
    fn end_lanes(&self) {
        if let Some(event_table) = self.event_table.upgrade() {
            event_table.lock().end_lanes_of(self.client);
        }
    }
}

impl EventSource for RecorderDeathHandler {
    /// Runs on the reactor's thread: CPU stores alone.
    fn on_ready(&self, _: u64) -> Next {
        self.is_over.store(true, Ordering::SeqCst);
        self.end_lanes();
        Next::Stop
    }

    /// Device work that a forked child keeps running may signal an ended lane once more and set its
    /// word back.
    fn on_tick(&self, _: u64) {
        if self.is_over.load(Ordering::SeqCst) {
            self.end_lanes();
        }
    }
}

impl RecorderWatch {
    pub(in crate::sync::event) fn of(
        server_core: &ServerCore,
        event_table: &Weak<EventTable>,
        client: u64,
    ) -> Result<RecorderWatch, Rejection> {
        let process = server_core
            .process_of(client)
            .ok_or_else(|| Rejection::new("it is there no more"))?;
        let death_handler = Arc::new(RecorderDeathHandler {
            event_table: event_table.clone(),
            client,
            is_over: AtomicBool::new(false),
        });
        let watched: Weak<dyn EventSource> =
            Arc::downgrade(&death_handler) as Weak<dyn EventSource>;
        let watch = process.watch(DeathEvidence::Orphaned(ORPHAN_TIMEOUT), &watched, 0)?;
        server_core.reactor().register_ticks(watched);
        Ok(RecorderWatch {
            _watch: watch,
            _process: process,
            _death_handler: death_handler,
        })
    }
}
