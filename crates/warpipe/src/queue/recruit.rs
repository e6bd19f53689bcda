//! How a queue finds a worker's answers: a subscriber of its jobs says in its greeting under which name it publishes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::answers_of;
use super::desk::Desk;
use crate::channel::{Member, Subscriber};
use crate::error::{Error, Result};

/// Workers whose answers have been attached to and who have no seat yet.
#[derive(Debug, Default)]
pub(super) struct Recruits(Mutex<Vec<(Member, Subscriber)>>);

impl Recruits {
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
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Desk {
    /// Attaches to a new worker's answers, on a thread of its own: it may be stopped, and others are not to wait for it.
    pub(super) fn recruit(self: &Arc<Self>, member: Member) {
        let (desk, domain) = (Arc::downgrade(self), self.domain.clone());
        let (name, device) = (self.publisher.name().to_string(), self.publisher.device().clone());
        let timeout = self.options.handshake_timeout;
        let meet = move || {
            let met = answers_of(&name, member.generation).and_then(|answers| {
                let builder = Subscriber::builder(answers.as_str()).domain(&domain).device(&device);
                same_process(builder.handshake_timeout(timeout).build()?, member.pid)
            });
            // Gone meanwhile: what was attached goes, too.
            let Some(desk) = desk.upgrade() else { return };
            match met {
                Ok(subscriber) => desk.recruits.add(member, subscriber),
                Err(error) => {
                    desk.publisher.expel(member.id, &format!("{name:?} is a queue, for workers only: {error}"));
                }
            }
            desk.observer.tell();
        };
        if std::thread::Builder::new().name("warpipe-recruit".into()).spawn(meet).is_err() {
            self.publisher.expel(member.id, "its queue has no thread left to attach to it");
        }
    }
}

/// That it is the one who said so, and not somebody who speaks for another.
fn same_process(subscriber: Subscriber, pid: i32) -> Result<Subscriber> {
    match subscriber.publisher_pid() {
        Some(found) if found == pid => Ok(subscriber),
        found => {
            let found = format!("process {}", found.unwrap_or_default());
            let (name, allowed) = (subscriber.name().to_string(), format!("process {pid}"));
            Err(Error::Protocol { name, field: "publisher of answers", found, allowed })
        }
    }
}
