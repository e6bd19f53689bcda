//! Stand-in for a queue's dispatcher: it applies answers and ends of workers to the job table as
//! `queue/dispatcher.rs` does, and its links to the workers are the model's.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::job_table::{JobTable, QueueRules};
use super::states::{self, Fault, World};
use super::worker_session::{Jobs, WorkerSession};
use crate::error::{Error, Result};
use crate::pubsub::entry::Metadata;
use crate::pubsub::{Forwarded, Replies, RetainedSlot};
use crate::runtime::releasable::ReleasableGuard;
use crate::stream::Stream;

pub(crate) struct Dispatcher {
    pub(super) state: Mutex<State>,
    pub(crate) world: Mutex<World>,
    fault: Fault,
    me: Weak<Dispatcher>,
}

/// As the library's, with the model's clock.
#[derive(Debug)]
pub(super) struct State {
    pub(super) table: Jobs,
    pub(super) sessions: Vec<WorkerSession>,
    known: HashSet<u64>,
    pub(super) is_input_due: bool,
}

pub(super) type StateGuard<'a> = ReleasableGuard<'a, State>;

impl State {
    pub(super) fn now(&self) -> Duration {
        states::now()
    }

    pub(super) fn pick_worker(&self, but: &[u64]) -> Option<u64> {
        let open = self
            .sessions
            .iter()
            .filter(|session| session.is_open() && !but.contains(&session.id));
        self.table.pick_worker(open.map(|session| session.id))
    }
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
        dispatcher.world().is_submit = to.is_some();
        let position = to.and_then(|id| dispatcher.put(id, told));
        dispatcher.meanwhile();
        Ok((RetainedSlot(self), position))
    }

    pub(crate) fn forward(&self, id: u64, told: &Metadata) -> Result<Forwarded> {
        let dispatcher = self.0.upgrade().expect("its desk is there");
        let position = dispatcher.put(id, told);
        Ok(position.map_or(Forwarded::NoRoom, Forwarded::At))
    }
}

impl Dispatcher {
    pub(super) fn new(rules: QueueRules, fault: Fault, world: World) -> Arc<Dispatcher> {
        Arc::new_cyclic(|me| Dispatcher {
            state: Mutex::new(State {
                table: JobTable::new(rules),
                sessions: Vec::new(),
                known: HashSet::new(),
                is_input_due: false,
            }),
            world: Mutex::new(world),
            fault,
            me: me.clone(),
        })
    }

    pub(crate) fn sample(&self) -> Sample {
        Sample(self.me.clone())
    }

    pub(crate) fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lock(&self) -> StateGuard<'_> {
        // One thread plays all parts: a lock that is held is a fault.
        let state = self.state.try_lock();
        let state =
            state.unwrap_or_else(|_| panic!("the state is locked across a call of the driver"));
        ReleasableGuard::new(&self.state, state)
    }

    pub(crate) fn gone(&self) -> Error {
        Error::Argument("closed".into())
    }

    /// Puts a job into a worker's ring, if that has room and the worker is a member.
    fn put(&self, id: u64, told: &Metadata) -> Option<u64> {
        self.world().put(id, told.as_bytes())
    }

    /// What happens while a job is submitted.
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
    pub(super) fn process_events(&self, guard: &mut StateGuard<'_>) {
        self.update_workers(guard);
        let now = guard.now();
        let State {
            table, sessions, ..
        } = &mut **guard;
        for session in &mut *sessions {
            if session.has_news() {
                session.receive_answers(table, now);
            }
            session.collect_results(table);
        }
        table.expire(now);
        if sessions.iter().any(|session| session.end.is_some()) {
            self.remove_disconnected(guard);
        }
        self.dispatch(guard);
    }

    /// As `Dispatcher::update_workers`.
    fn update_workers(&self, state: &mut State) {
        self.return_undelivered(&mut state.table);
        let members = self.world().members();
        for session in &mut state.sessions {
            session.is_leaving = !members.iter().any(|(id, _)| *id == session.id);
        }
        state
            .known
            .retain(|id| members.iter().any(|(member, _)| member == id));
        for (id, line) in members {
            if state.known.insert(id) {
                let session = WorkerSession::new(id, id as i32, Replies(line));
                state.sessions.push(session);
                state.table.add_worker(id, id as i32);
            }
        }
    }

    /// As `Dispatcher::remove_disconnected`.
    fn remove_disconnected(&self, state: &mut State) {
        for session in &state.sessions {
            if session.end.is_some() {
                self.world().expel(session.id);
            }
        }
        let table = &mut state.table;
        self.return_undelivered(table);
        for session in state.sessions.extract_if(.., |session| session.has_ended()) {
            let reason = session.end_reason();
            let (undone, is_being_submitted) = table.remove_worker(session.id);
            for job in undone {
                if self.fault != Fault::ForgetsLeases {
                    table.record_failure(job, reason.clone());
                }
            }
            let is_noted = match self.fault {
                Fault::NotesEveryEnd => true,
                Fault::NotesNoEnd => false,
                _ => is_being_submitted,
            };
            if is_noted {
                table.record_worker_end(session.id, reason);
            }
        }
    }

    /// As `Dispatcher::return_undelivered`.
    fn return_undelivered(&self, table: &mut Jobs) {
        let untaken = self.world().take_disconnects();
        for (id, position) in untaken {
            if self.fault != Fault::ForgetsUntaken {
                table.return_untaken(id, position);
            }
            if self.fault != Fault::NotesNoUntaken {
                table.record_untaken(id, position);
            }
        }
    }
}
