//! Attaches to the answers of new workers. A worker's `Hello` carries the generation that names its
//! publisher.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::Dispatcher;
use crate::error::{Error, Result};
use crate::ipc::Kind;
use crate::ipc::peer::ProcessId;
use crate::pubsub::{LinkedSubscriber, Subscriber};
use crate::queue::results_name;

/// The most new workers that are attached to at once, each on a thread: a stopped worker occupies
/// its thread for as long as a handshake may take, even if it has gone.
pub(in crate::queue) const ATTACHING_MAX: usize = 16;

/// Workers with attached answers and no session yet.
#[derive(Debug, Default)]
pub(in crate::queue) struct PendingWorkers {
    ready: Mutex<Vec<(LinkedSubscriber, Subscriber)>>,
    attaching: AtomicUsize,
}

/// One of [`ATTACHING_MAX`] slots. When the attach ends, the next new worker is handled.
struct AttachSlot(Weak<Dispatcher>);

impl Drop for AttachSlot {
    fn drop(&mut self) {
        if let Some(dispatcher) = self.0.upgrade() {
            dispatcher.pending_workers.attaching.fetch_sub(1, SeqCst);
            dispatcher.observer.tell();
        }
    }
}

impl PendingWorkers {
    /// Whether another new worker can be attached to. Called with the job table locked.
    pub(in crate::queue) fn has_free_slot(&self) -> bool {
        self.attaching.load(SeqCst) < ATTACHING_MAX
    }

    #[cfg(test)]
    pub(in crate::queue) fn attaching(&self) -> usize {
        self.attaching.load(SeqCst)
    }

    pub(in crate::queue) fn take(&self) -> Vec<(LinkedSubscriber, Subscriber)> {
        std::mem::take(&mut *self.lock())
    }

    pub(in crate::queue) fn add(&self, member: LinkedSubscriber, subscriber: Subscriber) {
        self.lock().push((member, subscriber));
    }

    #[cfg(test)]
    pub(in crate::queue) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(LinkedSubscriber, Subscriber)>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Dispatcher {
    /// Attaches to a new worker's answers, on a thread of its own: the worker may be stopped, and
    /// other workers must not wait for it. Called when [a slot is
    /// free](PendingWorkers::has_free_slot). A worker is told where there is no thread for it.
    pub(in crate::queue) fn attach_worker(self: &Arc<Self>, member: LinkedSubscriber) {
        self.pending_workers.attaching.fetch_add(1, SeqCst);
        let slot = AttachSlot(Arc::downgrade(self));
        let attach = self.attachment(member);
        let spawned = std::thread::Builder::new()
            .name("warpipe-workers".into())
            .spawn(move || attach(slot));
        if let Err(error) = spawned {
            let reason = format!("its queue has no thread left to attach to it: {error}");
            self.publisher.expel(member.id, &reason);
        }
    }

    /// What the thread does.
    fn attachment(&self, member: LinkedSubscriber) -> impl FnOnce(AttachSlot) + Send + 'static {
        let domain = self.domain.clone();
        let (name, device) = (
            self.publisher.name().to_string(),
            self.publisher.device().clone(),
        );
        let timeout = self.options.shared.handshake_timeout;
        move |slot| {
            let attached = results_name(&name, member.generation).and_then(|answers| {
                let builder = Subscriber::builder(answers.as_str())
                    .kind(Kind::Results)
                    .domain(&domain)
                    .device(&device);
                check_process(builder.handshake_timeout(timeout).build()?, member.process)
            });
            // The queue has gone meanwhile: the new link is dropped, too.
            let Some(dispatcher) = slot.0.upgrade() else {
                return;
            };
            match attached {
                Ok(subscriber) => dispatcher.pending_workers.add(member, subscriber),
                Err(error) => {
                    dispatcher.publisher.expel(
                        member.id,
                        &format!("{name:?} is a queue, for workers only: {error}"),
                    );
                }
            }
        }
    }
}

/// Checks that the publisher of the answers is the process that subscribes to the jobs.
fn check_process(subscriber: Subscriber, process: ProcessId) -> Result<Subscriber> {
    match subscriber.publisher_process() {
        Some(found) if found == process => Ok(subscriber),
        _ => {
            let found = format!("process {}", subscriber.publisher_pid().unwrap_or_default());
            let (name, allowed) = (
                subscriber.name().to_string(),
                "the worker's own process".to_string(),
            );
            Err(Error::Protocol {
                name,
                field: "publisher of answers",
                found,
                allowed,
            })
        }
    }
}
