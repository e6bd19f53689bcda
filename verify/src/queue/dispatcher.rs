//! Stand-in for a queue's dispatcher: the upkeep of the job table, as in `queue/dispatcher.rs`, and
//! the links to its workers.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::delivery::JobTableGuard;
use super::job_table::{JobTable, QueueRules};
use super::states::{Fault, World};
use super::worker_session::{JobEvent, WorkerSession};
use crate::error::{Error, Result};
use crate::pubsub::entry::Metadata;
use crate::pubsub::{RetainedSlot, Subscriber};
use crate::stream::Stream;

pub(crate) struct Options {
    pub(crate) limit: usize,
}

pub(crate) struct Publisher;

impl Publisher {
    pub(crate) fn name(&self) -> &'static str {
        "queue"
    }
}

pub(crate) struct Dispatcher {
    pub(crate) options: Options,
    pub(crate) publisher: Publisher,
    pub(crate) table: Mutex<JobTable>,
    pub(crate) world: Mutex<World>,
    fault: Fault,
    changed: Condvar,
    me: Weak<Dispatcher>,
}

/// A job's input before it is submitted.
#[derive(Clone)]
pub(crate) struct Sample(pub(crate) Weak<Dispatcher>);

impl std::fmt::Debug for Sample {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a sample")
    }
}

/// A failed send.
pub(crate) struct SendError {
    pub(crate) error: Error,
    pub(crate) sample: Option<Box<Sample>>,
}

impl Sample {
    pub(crate) fn post(
        self,
        to: Option<u64>,
        told: &Metadata,
        _: &Stream,
    ) -> Result<(RetainedSlot, Option<u64>), SendError> {
        let dispatcher = self.0.upgrade().expect("its desk is there");
        let position = to.and_then(|id| dispatcher.put(id, told));
        dispatcher.meanwhile();
        Ok((RetainedSlot(self), position))
    }

    pub(crate) fn forward(&self, id: u64, told: &Metadata) -> Result<Option<u64>> {
        let dispatcher = self.0.upgrade().expect("its desk is there");
        let position = dispatcher.put(id, told);
        dispatcher.meanwhile();
        Ok(position)
    }
}

impl Dispatcher {
    pub(crate) fn new(rules: QueueRules, fault: Fault, world: World) -> Arc<Dispatcher> {
        Arc::new_cyclic(|me| Dispatcher {
            options: Options { limit: 16 },
            publisher: Publisher,
            table: Mutex::new(JobTable::new(rules)),
            world: Mutex::new(world),
            fault,
            changed: Condvar::new(),
            me: me.clone(),
        })
    }

    pub(crate) fn sample(&self) -> Sample {
        Sample(self.me.clone())
    }

    pub(crate) fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn lock(&self) -> JobTableGuard<'_> {
        JobTableGuard::new(self, self.lock_table())
    }

    pub(crate) fn lock_table(&self) -> MutexGuard<'_, JobTable> {
        // One thread plays all parts: a lock that is held is a fault.
        self.table
            .try_lock()
            .unwrap_or_else(|_| panic!("the books are locked across a call of the driver"))
    }

    pub(crate) fn gone(&self) -> Error {
        Error::Argument("closed".into())
    }

    /// Puts a job into a worker's ring, if that has room and the worker is a member.
    fn put(&self, id: u64, told: &Metadata) -> Option<u64> {
        self.world().put(id, told.as_bytes())
    }

    /// What happens while a job is given out.
    fn meanwhile(&self) {
        loop {
            let next = self.world().next_meanwhile();
            match next {
                Some(act) => self.act(act),
                None => return,
            }
        }
    }

    /// As `Dispatcher::process_events`.
    pub(crate) fn process_events(&self, guard: &mut JobTableGuard<'_>) {
        let table = &mut **guard;
        let mut events = Vec::new();
        self.update_workers(table, &mut events);
        let (timeout, now) = (table.rules.lease_timeout, table.now());
        for session in &mut table.sessions {
            if session.end.is_none() {
                session.receive_answers(now, &mut events);
            }
            session.collect_results(&mut events);
            if let Some(timeout) = timeout.filter(|_| !session.leases.is_empty()) {
                session.expire(timeout, now, &mut events);
            }
        }
        if table.sessions.iter().any(|session| session.end.is_some()) {
            self.remove_disconnected(table, &mut events);
        }
        events.into_iter().for_each(|event| table.apply(event));
        self.dispatch(guard);
    }

    /// As `Dispatcher::update_workers`.
    fn update_workers(&self, table: &mut JobTable, events: &mut Vec<JobEvent>) {
        self.return_undelivered(table, events);
        let members = self.world().members();
        for session in &mut table.sessions {
            session.is_leaving = !members.iter().any(|(id, _)| *id == session.id);
        }
        table
            .known
            .retain(|id| members.iter().any(|(member, _)| member == id));
        for (id, line) in members {
            if table.known.insert(id) {
                table
                    .sessions
                    .push(WorkerSession::new(id, id as i32, Subscriber(line)));
            }
        }
    }

    /// As `Dispatcher::remove_disconnected`.
    fn remove_disconnected(&self, table: &mut JobTable, events: &mut Vec<JobEvent>) {
        for session in table
            .sessions
            .iter()
            .filter(|session| session.end.is_some())
        {
            self.world().expel(session.id);
        }
        self.return_undelivered(table, events);
        for mut session in table
            .sessions
            .extract_if(.., |session| session.has_ended())
            .collect::<Vec<_>>()
        {
            let mut left = Vec::new();
            let reason = session.abandon_leases(&mut left);
            if self.fault != Fault::ForgetsLeases {
                events.append(&mut left);
            }
            let reason = if self.fault == Fault::NotesEveryEnd {
                reason.or(Some(String::new()))
            } else {
                reason
            };
            if let Some(reason) = reason.filter(|_| self.fault != Fault::NotesNoEnd) {
                table.record_worker_end(session.id, reason);
            }
        }
    }

    /// As `Dispatcher::return_undelivered`.
    fn return_undelivered(&self, table: &mut JobTable, events: &mut Vec<JobEvent>) {
        let untaken = self.world().take_disconnects();
        for (id, position) in untaken {
            if self.fault != Fault::ForgetsUntaken {
                table
                    .session(id)
                    .into_iter()
                    .for_each(|session| session.undo_delivery(position, events));
            }
            if self.fault != Fault::NotesNoUntaken {
                table.record_untaken(id, position);
            }
        }
    }

    pub(crate) fn wait_until<T>(
        self: &Arc<Self>,
        _: Duration,
        mut look: impl FnMut(&mut JobTableGuard<'_>) -> Option<Result<T>>,
        late: impl FnOnce() -> Error,
    ) -> Result<T> {
        let mut guard = self.lock();
        self.process_events(&mut guard);
        look(&mut guard).unwrap_or_else(|| Err(late()))
    }

    pub(crate) fn wait_for_change(&self, table: &mut JobTableGuard<'_>, _: Duration) {
        table.sleep(&self.changed, Duration::ZERO);
    }

    pub(crate) fn notify_submitters(&self, _: &mut JobTable) {}

    pub(crate) fn schedule_dispatch(&self, _: &mut JobTable) {}
}
