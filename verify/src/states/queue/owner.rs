//! The queue's owner: the library's state of a queue, and links to its workers that are the model's.
//! Answers come one after the other, their data later.

use std::cell::{RefCell, RefMut};
use std::collections::{HashSet, VecDeque};
use std::rc::{Rc, Weak};
use std::sync::Mutex;

use super::super::delivery::{AddOutcome, Input, add};
use super::super::dispatcher::{State, StateGuard};
use super::super::job_table::QueueRules;
use super::super::wire::DeliveryTag;
use super::super::worker_session::WorkerSession;
use super::{Fault, JOBS_MAX, Truth, World};
use crate::error::{Error, Result};
use crate::ipc::Kind;
use crate::pubsub::entry::{Metadata, Violation};
use crate::pubsub::{Forwarded, Reply, ReplyLink};
use crate::runtime::releasable::ReleasableGuard;

/// The outcome of an answer's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Data {
    UnderWay,
    Complete,
    Lost,
}

/// A worker's link of answers.
#[derive(Debug, Default)]
pub(super) struct Line {
    pub(super) answers: VecDeque<(Vec<u8>, Rc<RefCell<Data>>)>,
    /// It ended; the flag says whether gracefully.
    pub(super) end: Option<bool>,
    pub(super) is_proven_dead: bool,
}

#[derive(Debug)]
pub(super) struct Answers(Rc<RefCell<Line>>);

impl ReplyLink for Answers {
    type Reply = AnswerData;

    fn take(&mut self) -> Result<Option<AnswerData>> {
        let mut line = self.0.borrow_mut();
        match (line.answers.pop_front(), line.end) {
            (Some((metadata, data)), _) => Ok(Some(AnswerData { metadata, data })),
            (None, Some(graceful)) => Err(Error::peer_gone(Kind::Queue, "jobs", 1, graceful)),
            (None, None) => Ok(None),
        }
    }

    fn fail(&self, wrong: Violation) -> Error {
        panic!("an honest worker is told that {wrong:?} breaks the protocol");
    }

    fn is_sender_dead(&self) -> bool {
        self.0.borrow().is_proven_dead
    }

    fn may_have_news(&self) -> bool {
        true
    }
}

#[derive(Debug)]
pub(super) struct AnswerData {
    metadata: Vec<u8>,
    data: Rc<RefCell<Data>>,
}

impl Reply for AnswerData {
    fn metadata(&self) -> &[u8] {
        &self.metadata
    }

    fn is_complete(&self) -> Result<bool> {
        match *self.data.borrow() {
            Data::UnderWay => Ok(false),
            Data::Complete => Ok(true),
            Data::Lost => Err(Error::argument("data", "lost", "complete")),
        }
    }

    fn make_room(&mut self) {}
}

/// A job's input.
pub(super) struct Slot(Weak<Owner>);

impl Input for Slot {
    fn forward(&self, worker: u64, metadata: &Metadata) -> Result<Forwarded> {
        let owner = self.0.upgrade().expect("its owner is there");
        let position = owner.world().put(worker, metadata.as_bytes());
        Ok(position.map_or(Forwarded::NoRoom, Forwarded::At))
    }
}

/// A queue, and all that happens to it.
pub(super) struct Owner {
    state: Mutex<State<Answers, Slot>>,
    world: RefCell<World>,
    known: RefCell<HashSet<u64>>,
    fault: Fault,
    me: Weak<Owner>,
}

type Guard<'a> = StateGuard<'a, Answers, Slot>;

impl Owner {
    pub(super) fn new(rules: QueueRules, fault: Fault) -> Rc<Owner> {
        Rc::new_cyclic(|me| Owner {
            state: Mutex::new(State::new(rules)),
            world: RefCell::default(),
            known: RefCell::default(),
            fault,
            me: me.clone(),
        })
    }

    pub(super) fn world(&self) -> RefMut<'_, World> {
        self.world.borrow_mut()
    }

    pub(super) fn lock(&self) -> Guard<'_> {
        // One thread plays all parts: a lock that is held is a fault.
        let state = self.state.try_lock();
        let state =
            state.unwrap_or_else(|_| panic!("the state is locked across a call of the driver"));
        ReleasableGuard::new(&self.state, state)
    }

    /// As `Dispatcher::add_job`.
    pub(super) fn submit(&self) {
        let mut guard = self.lock();
        if guard.table.is_submitting() || self.world().jobs.len() as u64 >= JOBS_MAX {
            return;
        }
        let (job, _) = guard.table.next_job();
        self.world().jobs.insert(job, Truth::default());
        let tag = DeliveryTag {
            job,
            number: 1,
            attempt: 1,
            deadline_ns: 0,
        };
        let told = tag.encode(&[]).expect("no metadata");
        let post = |to: Option<u64>| {
            self.world().is_submit = to.is_some();
            let position = to.and_then(|id| self.world().put(id, told.as_bytes()));
            self.meanwhile();
            Ok::<_, ()>((Slot(self.me.clone()), position))
        };
        let added = add(&mut guard, tag, Vec::new(), post, |()| false);
        assert!(matches!(added, AddOutcome::Added));
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
    pub(super) fn process_events(&self) {
        let mut guard = self.lock();
        self.update_workers(&mut guard);
        guard.receive();
        if guard.sessions.iter().any(|session| session.end.is_some()) {
            self.remove_disconnected(&mut guard);
        }
        guard.dispatch();
    }

    /// As `Dispatcher::update_workers`.
    fn update_workers(&self, state: &mut Guard<'_>) {
        self.return_untaken(state);
        let members = self.world().members();
        for session in &mut state.sessions {
            session.is_leaving = !members.iter().any(|(id, _)| *id == session.id);
        }
        let mut known = self.known.borrow_mut();
        known.retain(|id| members.iter().any(|(member, _)| member == id));
        for (id, line) in members {
            if known.insert(id) {
                let session = WorkerSession::new(id, id as i32, Answers(line));
                state.sessions.push(session);
                state.table.add_worker(id, id as i32);
            }
        }
    }

    /// As `Dispatcher::remove_disconnected`.
    fn remove_disconnected(&self, state: &mut Guard<'_>) {
        for session in &state.sessions {
            if session.end.is_some() {
                self.world().expel(session.id);
            }
        }
        self.return_untaken(state);
        match self.fault {
            Fault::ForgetsLeases | Fault::NotesEveryEnd | Fault::NotesNoEnd => {
                self.remove_ended_wrongly(state);
            }
            _ => drop(state.remove_ended()),
        }
    }

    fn return_untaken(&self, state: &mut Guard<'_>) {
        let untaken = self.world().take_disconnects();
        match self.fault {
            Fault::ForgetsUntaken => untaken
                .into_iter()
                .for_each(|(id, position)| state.table.record_untaken(id, position)),
            Fault::NotesNoUntaken => untaken
                .into_iter()
                .for_each(|(id, position)| state.table.return_untaken(id, position)),
            _ => state.return_untaken(untaken),
        }
    }

    /// As `State::remove_ended`, with a fault.
    fn remove_ended_wrongly(&self, state: &mut Guard<'_>) {
        let State {
            table, sessions, ..
        } = &mut **state;
        for session in sessions.extract_if(.., |session| session.has_ended()) {
            let reason = session.end_reason();
            let (undone, is_being_submitted) = table.remove_worker(session.id);
            if self.fault != Fault::ForgetsLeases {
                undone
                    .into_iter()
                    .for_each(|job| table.record_failure(job, reason.clone()));
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
}
