//! The handshake with the next publisher, on a thread of its own: one that stands still answers nobody, and whoever receives
//! waits no longer than asked to.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::super::inlet::{Approach, Inlet};
use crate::domain::EndpointName;
use crate::error::{Error, HandshakeFault, Result};
use crate::fork::Home;
use crate::link::closer::PeerSocket;

/// One of a subscriber at a time, for as long as its handshake's timeout. Dropped, it is called off.
#[derive(Debug)]
pub(super) struct Attempt {
    home: Home,
    name: EndpointName,
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct Shared {
    is_called_off: AtomicBool,
    result: Mutex<Option<Result<Arc<Inlet>>>>,
}

impl Attempt {
    /// Rings the subscriber's bell when there is a result.
    pub(super) fn start(approach: Approach, socket: PeerSocket) -> Result<Attempt> {
        let shared = Arc::new(Shared::default());
        let (told, name) = (shared.clone(), approach.name.clone());
        let run = move || {
            let result = approach.shake_hands(socket, &told.is_called_off);
            told.end(result);
            approach.bell.ring();
        };
        let spawned = std::thread::Builder::new().name("warpipe-attach".into()).spawn(run);
        let thread = spawned.map_err(|e| Error::os("clone", "the thread warpipe-attach", e))?;
        Ok(Attempt { home: Home::here(), name, shared, thread })
    }

    /// How it ended; told once.
    pub(super) fn result(&self) -> Option<Result<Arc<Inlet>>> {
        let is_finished = self.thread.is_finished();
        let result = self.shared.result.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A panic has ended it: another attempt is due.
        let none = || Error::Handshake { name: self.name.to_string(), fault: HandshakeFault::Closed };
        result.or_else(|| is_finished.then(|| Err(none())))
    }
}

impl Shared {
    fn end(&self, result: Result<Arc<Inlet>>) {
        let mut place = self.result.lock().unwrap_or_else(PoisonError::into_inner);
        match result {
            Ok(inlet) if self.is_called_off.load(SeqCst) => inlet.leave(),
            result => *place = Some(result),
        }
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if !self.home.is_here() {
            // A forked child: whatever it came to is the parent's.
            return std::mem::forget(self.shared.clone());
        }
        self.shared.is_called_off.store(true, SeqCst);
        if let Some(Ok(inlet)) = self.result() {
            inlet.leave();
        }
    }
}
