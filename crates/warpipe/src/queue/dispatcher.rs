//! Runs a queue: receives answers, follows which workers are attached, and applies both to the job
//! table ([`Dispatcher::process_events`]). Any thread may do this work, under the queue's lock.

mod waiters;

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use self::waiters::{OWN_DOORBELL, Waiters};
use super::job_table::{JobTable, QueueRules, Stage};
use super::worker_session::{Jobs, WorkerSession};
use crate::error::{Error, Result, StateFault};
use crate::fork::OwnerProcess;
use crate::fork::thread::Thread;
use crate::ipc::domain::Domain;
use crate::mutex::LockUnpoisoned;
use crate::pubsub::{LinkReceiver, Publisher, ReplyLink, RetainedSlot, SubscriberChanges};
use crate::runtime::epoll::{EpollSet, EventFlags};
use crate::runtime::heartbeat::Uptime;
use crate::runtime::releasable::ReleasableGuard;
use crate::runtime::timed_lock::TimedLock;

/// Each ring wakes one sleeper, once.
const EPOLL_FLAGS: EventFlags = EventFlags::IN.union(EventFlags::ET);

/// All that the queue's lock guards. The lock is never held across a call of the driver that gives
/// a stream work: see [`delivery`](super::delivery).
#[derive(Debug)]
pub(super) struct State<A: ReplyLink = LinkReceiver, I = RetainedSlot> {
    pub(super) table: Jobs<A, I>,
    pub(super) sessions: Vec<WorkerSession<A>>,
    pub(super) waiters: Waiters,
    /// A worker could have the first job that waits, but its data is not complete.
    pub(super) is_input_due: bool,
    /// The clock of leases.
    pub(super) uptime: Uptime,
}

pub(super) type StateGuard<'a, A = LinkReceiver, I = RetainedSlot> =
    ReleasableGuard<'a, State<A, I>>;

impl<A: ReplyLink, I> State<A, I> {
    pub(super) fn new(rules: QueueRules) -> State<A, I> {
        State {
            table: JobTable::new(rules),
            sessions: Vec::new(),
            waiters: Waiters::default(),
            is_input_due: false,
            uptime: Uptime::default(),
        }
    }

    /// The current time of the lease clock; zero where leases have no limit, since it is not used
    /// there.
    pub(super) fn now(&self) -> Duration {
        match self.table.rules.lease_timeout {
            Some(_) => self.uptime.ran(),
            None => Duration::ZERO,
        }
    }

    /// The worker that gets the next job, unless it is one of `but`.
    pub(super) fn pick_worker(&self, but: &[u64]) -> Option<u64> {
        let is_open = |session: &&WorkerSession<A>| session.is_open() && !but.contains(&session.id);
        let open = self.sessions.iter().filter(is_open);
        self.table.pick_worker(open.map(|session| session.id))
    }

    /// The number of workers that get jobs.
    pub(super) fn workers(&self) -> usize {
        let open = self.sessions.iter().filter(|session| session.is_open());
        open.count()
    }

    /// The jobs that no worker has, without a look at each.
    pub(super) fn jobs_without_worker(&self) -> usize {
        self.table.unfinished().saturating_sub(self.table.leased())
    }

    /// Why a result may not come: for an error.
    pub(super) fn outlook(&self) -> String {
        let table = &self.table;
        let kept = table.len() - table.unfinished();
        format!(
            "attached workers: {}, jobs that wait: {}, with workers: {}, results not taken: {kept}",
            self.workers(),
            table.waiting(),
            table.leased(),
        )
    }

    pub(super) fn session(&mut self, id: u64) -> Option<&mut WorkerSession<A>> {
        self.sessions.iter_mut().find(|session| session.id == id)
    }

    /// Takes in the answers that have come, the results that are complete, and the leases that
    /// have expired.
    pub(super) fn receive(&mut self) {
        let now = self.now();
        for session in &mut self.sessions {
            if session.has_news() {
                session.receive_answers(&mut self.table, now);
            }
            session.collect_results(&mut self.table);
        }
        self.table.expire(now);
    }

    /// Returns jobs that gone workers had not taken: by worker, the positions.
    pub(super) fn return_untaken(&mut self, untaken: impl IntoIterator<Item = (u64, u64)>) {
        for (id, position) in untaken {
            self.table.return_untaken(id, position);
            self.table.record_untaken(id, position);
        }
    }

    /// Removes workers after the end of their answers: each unanswered job has failed an attempt.
    pub(super) fn remove_ended(&mut self) -> Vec<WorkerSession<A>> {
        let ended = self.sessions.extract_if(.., |session| session.has_ended());
        let ended: Vec<_> = ended.collect();
        for session in &ended {
            let reason = session.end_reason();
            let (undone, is_being_submitted) = self.table.remove_worker(session.id);
            for job in undone {
                self.table.record_failure(job, reason.clone());
            }
            if is_being_submitted {
                self.table.record_worker_end(session.id, reason);
            }
        }
        ended
    }
}

/// The part that all handles of one queue share.
#[derive(Debug)]
pub(super) struct Dispatcher {
    pub(super) owner_process: OwnerProcess,
    /// The queue's name, or the service's, in errors.
    pub(super) name: String,
    pub(super) domain: Domain,
    pub(super) publisher: Publisher,
    pub(super) observer: Arc<SubscriberChanges>,
    pub(super) spin: Duration,
    state: Mutex<State>,
    pub(super) changed: Condvar,
    /// Wakes the queue's own thread when no other thread leads any more.
    pub(super) resume: Condvar,
    pub(super) submit_lock: TimedLock,
    pub(super) readable: EpollSet,
}

impl Dispatcher {
    pub(super) fn new(
        rules: QueueRules,
        spin: Duration,
        name: &str,
        domain: Domain,
        publisher: Publisher,
        observer: Arc<SubscriberChanges>,
    ) -> Result<Arc<Dispatcher>> {
        let readable = EpollSet::new("a queue")?;
        readable.add(&*observer.doorbell, OWN_DOORBELL, EPOLL_FLAGS)?;
        let dispatcher = Arc::new(Dispatcher {
            owner_process: OwnerProcess::current(),
            spin,
            name: name.to_string(),
            domain,
            publisher,
            observer,
            state: Mutex::new(State::new(rules)),
            changed: Condvar::new(),
            resume: Condvar::new(),
            submit_lock: TimedLock::default(),
            readable,
        });
        let runner = dispatcher.clone();
        Thread::start("warpipe-queue", move || runner.run())?;
        Ok(dispatcher)
    }

    pub(super) fn lock(&self) -> StateGuard<'_> {
        let state = self.state.locked();
        ReleasableGuard::new(&self.state, state)
    }

    pub(super) fn gone(&self) -> Error {
        Error::State(StateFault::QueueClosed(self.name.clone()))
    }

    /// Does all pending work, and makes no call that the driver may hold up.
    pub(super) fn process_events(self: &Arc<Self>, guard: &mut StateGuard<'_>) {
        if guard.table.is_closed() {
            return;
        }
        let before = guard.table.revision;
        if self.observer.take_news() {
            self.update_workers(guard);
        }
        guard.receive();
        if guard.sessions.iter().any(|session| session.end.is_some()) {
            self.remove_disconnected(guard);
        }
        guard.dispatch();
        if guard.table.revision != before {
            self.notify_waiters(&mut guard.waiters);
        }
        self.observer.note_waiting(guard.jobs_without_worker());
        self.end_if_drained(guard);
    }

    /// After a shutdown, once the last job is done: releases the queue's name, and closes the
    /// workers' links gracefully. Their results stay.
    pub(super) fn end_if_drained(&self, guard: &mut StateGuard<'_>) {
        if guard.table.stage != Stage::Shut || guard.table.unfinished() > 0 {
            return;
        }
        guard.table.stage = Stage::Draining;
        for session in &mut guard.sessions {
            session.is_leaving = true;
        }
        guard.unlocked(|| self.publisher.close());
        if guard.table.stage == Stage::Draining {
            guard.table.stage = Stage::Drained;
            self.notify_waiters(&mut guard.waiters);
        }
    }

    /// Workers came or went.
    fn update_workers(&self, state: &mut State) {
        state.return_untaken(self.publisher.take_untaken());
        let subscribers = self.publisher.linked_subscribers();
        let is_drained = state.table.stage >= Stage::Draining;
        for session in &mut state.sessions {
            let is_linked = subscribers.iter().any(|it| it.id == session.id);
            session.is_leaving = is_drained || !is_linked;
        }
        for subscriber in subscribers {
            let (id, pid) = (subscriber.id, subscriber.pid);
            if state.sessions.iter().any(|session| session.id == id) {
                continue;
            }
            let name = self.publisher.name();
            let Some(answers) = subscriber.receive_replies(name, &self.domain) else {
                continue;
            };
            let watched = self.readable.add(answers.descriptor(), id, EPOLL_FLAGS);
            if watched.is_err() {
                let reason = "its queue has no room for it";
                self.publisher.expel(id, reason);
                continue;
            }
            answers.set_asleep(state.waiters.polling == 0);
            let mut session = WorkerSession::new(id, pid, answers);
            session.is_leaving = is_drained;
            state.sessions.push(session);
            state.table.add_worker(id, pid);
        }
    }

    /// Removes workers after the end of their answers. Jobs that they had not taken return at no
    /// cost.
    fn remove_disconnected(&self, state: &mut State) {
        for session in &state.sessions {
            if let Some(end) = &session.end
                && self.publisher.has_subscriber(session.id)
            {
                self.publisher.expel(session.id, &end.reason);
            }
        }
        state.return_untaken(self.publisher.take_untaken());
        for session in state.remove_ended() {
            self.readable.remove(session.answers.descriptor());
        }
    }

    /// Ends the queue: notifies waiting threads and workers, and drops the data of unfinished jobs.
    pub(super) fn close(&self) {
        let mut guard = self.lock();
        let rules = guard.table.rules;
        // Dropped without the lock: this sends `Close` to workers and defers the drop of memory.
        let old_jobs = std::mem::replace(&mut guard.table, JobTable::new(rules));
        let old_sessions = std::mem::take(&mut guard.sessions);
        guard.table.stage = Stage::Closed;
        guard.waiters.notify_watches();
        drop(guard);
        drop((old_jobs, old_sessions));
        self.changed.notify_all();
        // Closed now: the last holder of the state is the queue's own thread, which may not run
        // again if `main` returns.
        self.publisher.close();
        self.observer.doorbell.ring();
    }
}
