//! How a queue finds a worker's answers: a subscriber of its jobs says in its greeting under which name it publishes.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::answers_of;
use super::desk::Desk;
use crate::channel::{Member, Subscriber};
use crate::error::{Error, Result};
use crate::link::peer::ProcessId;
use crate::rendezvous::Kind;

/// The most newcomers that are attached to at once, each on a thread: one that is stopped keeps its own for as long as a
/// handshake may take, whether it is still there or not.
pub(super) const AT_ONCE: usize = 16;

/// Workers whose answers have been attached to and who have no seat yet.
#[derive(Debug, Default)]
pub(super) struct Recruits {
    ready: Mutex<Vec<(Member, Subscriber)>>,
    under_way: AtomicUsize,
}

/// One of those [`AT_ONCE`]; when it ends, the next newcomer is looked at.
struct Turn(Weak<Desk>);

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(desk) = self.0.upgrade() {
            desk.recruits.under_way.fetch_sub(1, SeqCst);
            desk.observer.tell();
        }
    }
}

impl Recruits {
    /// Whether another newcomer can be attached to. Asked by one at a time, who has the ledger.
    pub(super) fn has_turn(&self) -> bool {
        self.under_way.load(SeqCst) < AT_ONCE
    }

    #[cfg(test)]
    pub(super) fn under_way(&self) -> usize {
        self.under_way.load(SeqCst)
    }

    pub(super) fn take(&self) -> Vec<(Member, Subscriber)> {
        std::mem::take(&mut *self.lock())
    }

    pub(super) fn add(&self, member: Member, subscriber: Subscriber) {
        self.lock().push((member, subscriber));
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(Member, Subscriber)>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Desk {
    /// Attaches to a new worker's answers, on a thread of its own: it may be stopped, and others are not to wait for it.
    /// To be called when [it has a turn](Recruits::has_turn).
    pub(super) fn recruit(self: &Arc<Self>, member: Member) {
        self.recruits.under_way.fetch_add(1, SeqCst);
        let (turn, domain) = (Turn(Arc::downgrade(self)), self.domain.clone());
        let (name, device) = (self.publisher.name().to_string(), self.publisher.device().clone());
        let timeout = self.options.handshake_timeout;
        let meet = move || {
            let met = answers_of(&name, member.generation).and_then(|answers| {
                let builder = Subscriber::builder(answers.as_str()).kind(Kind::Results).domain(&domain).device(&device);
                same_process(builder.handshake_timeout(timeout).build()?, member.process)
            });
            // Gone meanwhile: what was attached goes, too.
            let Some(desk) = turn.0.upgrade() else { return };
            match met {
                Ok(subscriber) => desk.recruits.add(member, subscriber),
                Err(error) => {
                    desk.publisher.expel(member.id, &format!("{name:?} is a queue, for workers only: {error}"));
                }
            }
        };
        if std::thread::Builder::new().name("warpipe-recruit".into()).spawn(meet).is_err() {
            self.publisher.expel(member.id, "its queue has no thread left to attach to it");
        }
    }
}

/// That it is the one who said so, and not somebody who speaks for another.
fn same_process(subscriber: Subscriber, process: ProcessId) -> Result<Subscriber> {
    match subscriber.publisher_process() {
        Some(found) if found == process => Ok(subscriber),
        _ => {
            let found = format!("process {}", subscriber.publisher_pid().unwrap_or_default());
            let (name, allowed) = (subscriber.name().to_string(), "the worker's own process".to_string());
            Err(Error::Protocol { name, field: "publisher of answers", found, allowed })
        }
    }
}
