//! The handshake with the next publisher, on a thread of its own: a stopped publisher does not
//! answer, and a receive waits no longer than its timeout.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};

use super::super::publisher_link::{ConnectOptions, PublisherLink};
use crate::error::{Error, HandshakeFault, Result};
use crate::fork::leak_on_fork::LeakOnFork;
use crate::ipc::client_handshake::HandshakeLimit;
use crate::ipc::domain::EndpointName;
use crate::runtime::closer::PeerSocket;

/// A handshake attempt. A subscriber has one at a time, for at most the handshake timeout. Dropped,
/// the attempt is cancelled.
#[derive(Debug)]
pub(super) struct ReconnectAttempt {
    name: EndpointName,
    /// The thread holds the other reference until it ends. Its join handle is not kept: dropped in
    /// a forked child, it would detach a thread of the child that has taken its place by then.
    shared: LeakOnFork<Arc<AttemptResult>>,
}

#[derive(Debug, Default)]
struct AttemptResult {
    is_cancelled: AtomicBool,
    result: Mutex<Option<Result<Arc<PublisherLink>>>>,
}

impl ReconnectAttempt {
    /// Rings the subscriber's doorbell when there is a result.
    pub(super) fn start(
        connect_options: ConnectOptions,
        socket: PeerSocket,
    ) -> Result<ReconnectAttempt> {
        let shared = Arc::new(AttemptResult::default());
        let (attempt, name) = (shared.clone(), connect_options.name.clone());
        let run = move || {
            let limit = HandshakeLimit::new(connect_options.timeout);
            let result = connect_options.shake_hands(socket, limit, &attempt.is_cancelled);
            attempt.end(result);
            connect_options.doorbell.ring();
        };
        let spawned = std::thread::Builder::new()
            .name("warpipe-attach".into())
            .spawn(run);
        spawned.map_err(|e| Error::os("clone", "the thread warpipe-attach", e))?;
        Ok(ReconnectAttempt {
            name,
            shared: LeakOnFork::new(shared),
        })
    }

    /// The result of the attempt; returned once.
    pub(super) fn result(&self) -> Option<Result<Arc<PublisherLink>>> {
        let is_finished = Arc::strong_count(&self.shared) == 1;
        let result = self
            .shared
            .result
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        // A panic has ended the thread: another attempt is due.
        let none = || Error::Handshake {
            name: self.name.to_string(),
            fault: HandshakeFault::Closed,
        };
        result.or_else(|| is_finished.then(|| Err(none())))
    }
}

impl AttemptResult {
    fn end(&self, result: Result<Arc<PublisherLink>>) {
        let mut place = self.result.lock().unwrap_or_else(PoisonError::into_inner);
        match result {
            Ok(link) if self.is_cancelled.load(SeqCst) => link.leave(),
            result => *place = Some(result),
        }
    }
}

impl Drop for ReconnectAttempt {
    fn drop(&mut self) {
        let Ok(shared) = self.shared.get() else {
            return;
        };
        shared.is_cancelled.store(true, SeqCst);
        if let Some(Ok(link)) = self.result() {
            link.leave();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::super::publisher_link::SubscriberIdentity;
    use super::*;
    use crate::device::Device;
    use crate::hostile::{alone, in_a_forked_child};
    use crate::ipc::Kind;
    use crate::ipc::domain::Domain;
    use crate::runtime::doorbell::LocalDoorbell;

    #[test]
    fn a_forked_child_that_drops_an_attempt_of_its_parents_leaves_its_own_threads_alone() {
        let test =
            "a_forked_child_that_drops_an_attempt_of_its_parents_leaves_its_own_threads_alone";
        alone(module_path!(), test, || {
            const LONG: Duration = Duration::from_secs(60);
            let folder =
                std::env::temp_dir().join(format!("warpipe-attempt-{}", std::process::id()));
            let (domain, name) = (
                Domain::at(&folder).unwrap(),
                EndpointName::new("a").unwrap(),
            );
            // No connection is accepted.
            let claim = domain.claim(&name, false).unwrap();
            let connect_options = ConnectOptions {
                domain: domain.clone(),
                name: name.clone(),
                device: Device::host(),
                doorbell: Arc::new(LocalDoorbell::new().unwrap()),
                timeout: LONG,
                orphan_timeout: LONG,
                identity: SubscriberIdentity {
                    kind: Kind::Publisher,
                    has_replies: false,
                },
            };
            let socket = domain
                .connect_now(&name, Kind::Publisher)
                .unwrap()
                .expect("the backlog has room");
            let mut attempt = Some(ReconnectAttempt::start(connect_options, socket).unwrap());
            in_a_forked_child(|| {
                // The C library gives these the stacks of the parent's threads, which do not exist
                // in the child.
                let all = Arc::new(std::sync::Barrier::new(17));
                let wait = |all: Arc<std::sync::Barrier>| {
                    std::thread::spawn(move || all.wait().is_leader())
                };
                let threads: Vec<_> = (0..16).map(|_| wait(all.clone())).collect();
                drop(attempt.take());
                all.wait();
                threads.into_iter().all(|thread| thread.join().is_ok())
            });
            drop((attempt, claim));
            std::fs::remove_dir_all(folder).unwrap();
        });
    }
}
