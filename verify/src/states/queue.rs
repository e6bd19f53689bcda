//! A queue's table: jobs are dispatched, taken, answered, failed, cancelled and left undone by
//! workers that leave, or are killed at any step, also while a job is on its way to them. The job
//! table, the sessions and the dispatch are the library's.
//!
//! Shown: each job has one outcome; an open job waits or is leased, once; a job that its worker had
//! not taken costs no attempt; and when all workers are gone, one new worker can do everything that
//! is left.

#[path = "queue/owner.rs"]
mod owner;

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::Duration;

use self::owner::{AnswerData, Data, Line, Owner};
use super::job_table::{Outcome, QueueRules, ResultOrder};
use super::wire::{Answer, AnswerKind, DeliveryTag};
use super::worker_session::WorkerResult;

/// Workers at a time.
const WORKERS: usize = 2;
const JOBS_MAX: u64 = 2;
/// Workers that ever come.
const MEMBERS_MAX: u64 = 3;
/// Entries of a worker's ring.
const DEPTH: usize = 2;
const TIMEOUT: Duration = Duration::from_secs(1);

/// The next act.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// A worker comes.
    Join(u8),
    /// It takes the next job out of its ring.
    Take(u8),
    /// It answers that its oldest job is done; the data comes later.
    Done(u8),
    /// ... that it failed.
    Fail(u8),
    /// ... that it has not begun it.
    Return(u8),
    /// Its device has completed the oldest data.
    Complete(u8),
    /// It closes gracefully.
    Leave(u8),
    /// It is killed.
    Die(u8),
    /// It is proven dead: what was under way is lost.
    Prove(u8),
    Submit,
    /// The first job that is there is called off.
    CallOff,
    /// Some thread does the queue's work.
    Work,
    /// The next outcome is taken.
    TakeNext,
    /// The time of all leases is over.
    Expire,
}

/// An act, and whether it happens while the job of the act before is being submitted.
pub type Step = (bool, Act);

/// The planted fault of the owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// It charges for what a worker had not taken.
    ForgetsUntaken,
    /// ... if that was on its way.
    NotesNoUntaken,
    /// It forgets a worker's end while a job is on its way to it.
    NotesNoEnd,
    /// It forgets what a worker leaves undone.
    ForgetsLeases,
    /// It notes a worker's end for a job on its way also where the worker has answered that.
    NotesEveryEnd,
}

/// A worker as it is.
#[derive(Debug, Clone, Default)]
struct Worker {
    id: u64,
    /// Put there, and not taken.
    ring: VecDeque<(u64, DeliveryTag)>,
    positions: u64,
    taken: VecDeque<DeliveryTag>,
    line: Rc<RefCell<Line>>,
    under_way: VecDeque<Rc<RefCell<Data>>>,
    is_dead: bool,
    has_left: bool,
    is_proven: bool,
    /// Its queue knows it no more.
    is_expelled: bool,
}

impl Worker {
    fn is_able(&self) -> bool {
        !self.is_dead && !self.has_left && !self.is_expelled
    }
}

/// The state of a job.
#[derive(Debug, Clone, Default)]
struct Truth {
    /// Times that a worker had it in its hands.
    taken: u32,
    /// Times that its lease may have expired.
    expired: u32,
    outcomes: u32,
    is_called_off: bool,
}

/// Everything but the job table.
#[derive(Debug, Default)]
pub struct World {
    workers: [Option<Worker>; WORKERS],
    members: u64,
    departed: Vec<(u64, u64)>,
    jobs: BTreeMap<u64, Truth>,
    meanwhile: VecDeque<Act>,
    wrong: Option<String>,
    /// The last act submitted a job to a worker.
    pub(crate) is_submit: bool,
}

impl World {
    fn worker(&mut self, id: u64) -> Option<&mut Worker> {
        self.workers
            .iter_mut()
            .flatten()
            .find(|worker| worker.id == id)
    }

    fn members(&self) -> Vec<(u64, Rc<RefCell<Line>>)> {
        let members = self.workers.iter().flatten();
        let members =
            members.filter(|worker| !worker.has_left && !worker.is_proven && !worker.is_expelled);
        members
            .map(|worker| (worker.id, worker.line.clone()))
            .collect()
    }

    fn put(&mut self, id: u64, told: &[u8]) -> Option<u64> {
        let tag = DeliveryTag::decode(told).expect("what was encoded");
        let truth = self.jobs.entry(tag.job).or_default();
        if tag.attempt - 1 > truth.taken + truth.expired {
            self.wrong = Some(format!(
                "{tag:?} counts attempts that nobody made: {truth:?}"
            ));
        }
        if truth.outcomes > 0 || truth.is_called_off {
            self.wrong = Some(format!("{tag:?} is given out, and is over: {truth:?}"));
        }
        let worker = self
            .worker(id)
            .filter(|worker| !worker.has_left && !worker.is_proven && !worker.is_expelled)?;
        if worker.ring.len() >= DEPTH {
            return None;
        }
        worker.positions += 1;
        worker.ring.push_back((worker.positions, tag));
        Some(worker.positions)
    }

    fn next_meanwhile(&mut self) -> Option<Act> {
        self.meanwhile.pop_front()
    }

    /// As `Publisher::expel`: what was not taken is taken back.
    fn expel(&mut self, id: u64) {
        if let Some(worker) = self.worker(id).filter(|worker| !worker.is_expelled) {
            worker.is_expelled = true;
            let untaken: Vec<_> = worker
                .ring
                .drain(..)
                .map(|(position, _)| (id, position))
                .collect();
            self.departed.extend(untaken);
        }
    }

    /// As `Publisher::take_untaken`, which also ends what a dead worker left.
    fn take_disconnects(&mut self) -> Vec<(u64, u64)> {
        let gone = self
            .workers
            .iter()
            .flatten()
            .filter(|worker| worker.has_left || worker.is_proven);
        let gone: Vec<u64> = gone.map(|worker| worker.id).collect();
        gone.into_iter().for_each(|id| self.expel(id));
        std::mem::take(&mut self.departed)
    }

    /// A worker acts.
    fn act(&mut self, act: Act) {
        let (Act::Join(index)
        | Act::Take(index)
        | Act::Done(index)
        | Act::Fail(index)
        | Act::Return(index)
        | Act::Complete(index)
        | Act::Leave(index)
        | Act::Die(index)
        | Act::Prove(index)) = act
        else {
            return;
        };
        let index = usize::from(index);
        if act == Act::Join(index as u8) {
            let is_over = |worker: &Worker| {
                worker.is_proven || worker.has_left && worker.under_way.is_empty()
            };
            let is_free = self.workers[index].as_ref().is_none_or(is_over);
            if is_free && self.members < MEMBERS_MAX {
                self.take_disconnects_of(index);
                self.members += 1;
                self.workers[index] = Some(Worker {
                    id: self.members,
                    ..Worker::default()
                });
            }
            return;
        }
        let World { workers, jobs, .. } = self;
        let Some(worker) = &mut workers[index] else {
            return;
        };
        match act {
            Act::Take(_) if worker.is_able() => {
                if let Some((_, tag)) = worker.ring.pop_front() {
                    jobs.entry(tag.job).or_default().taken += 1;
                    worker.taken.push_back(tag);
                }
            }
            Act::Done(_) => worker.answer(AnswerKind::Completed),
            Act::Fail(_) => worker.answer(AnswerKind::Failed("by itself".into())),
            Act::Return(_) => worker.answer(AnswerKind::Returned),
            Act::Complete(_) if !worker.is_proven => {
                if let Some(data) = worker.under_way.pop_front() {
                    *data.borrow_mut() = Data::Complete;
                }
            }
            Act::Leave(_) if worker.is_able() => {
                worker.has_left = true;
                worker.line.borrow_mut().end = Some(true);
            }
            Act::Die(_) => {
                worker.is_dead = true;
                worker.line.borrow_mut().end.get_or_insert(false);
            }
            Act::Prove(_) if worker.is_dead => {
                worker.is_proven = true;
                worker.line.borrow_mut().is_proven_dead = true;
                worker
                    .under_way
                    .drain(..)
                    .for_each(|data| *data.borrow_mut() = Data::Lost);
            }
            _ => {}
        }
    }

    /// Entries that a worker leaves in its ring stay known when another takes its place.
    fn take_disconnects_of(&mut self, index: usize) {
        if let Some(id) = self.workers[index].as_ref().map(|worker| worker.id) {
            self.expel(id);
        }
    }
}

impl Worker {
    fn answer(&mut self, kind: AnswerKind) {
        if self.is_dead || self.has_left {
            return;
        }
        let Some(DeliveryTag { job, number, .. }) = self.taken.pop_front() else {
            return;
        };
        let data = Rc::new(RefCell::new(Data::UnderWay));
        if kind == AnswerKind::Completed {
            self.under_way.push_back(data.clone());
        }
        let answer = Answer { job, number, kind }
            .encode(&[])
            .expect("a short answer");
        self.line
            .borrow_mut()
            .answers
            .push_back((answer.as_bytes().to_vec(), data));
    }
}

impl Owner {
    /// Makes one act happen.
    fn act(&self, act: Act) {
        match act {
            Act::Submit => self.submit(),
            Act::CallOff => {
                let open = |world: &World| {
                    world
                        .jobs
                        .iter()
                        .find(|(_, job)| !job.is_over())
                        .map(|(&id, _)| id)
                };
                let Some(id) = open(&self.world()) else {
                    return;
                };
                if self.lock().table.cancel(id).is_some() {
                    self.world().jobs.entry(id).or_default().is_called_off = true;
                }
            }
            Act::Work => self.process_events(),
            Act::TakeNext => {
                let next = self.lock().table.take_next();
                next.into_iter()
                    .for_each(|(id, outcome)| self.took(id, outcome));
            }
            Act::Expire => {
                let state = self.lock();
                state.uptime.advance(TIMEOUT);
                let ends = state.sessions.iter().filter_map(|it| it.end.as_ref());
                ends.for_each(|end| end.clock.advance(TIMEOUT));
                for (_, job) in self.world().jobs.iter_mut() {
                    job.expired += 1;
                }
            }
            of_worker => self.world().act(of_worker),
        }
    }

    fn took(&self, id: u64, outcome: Outcome<WorkerResult<AnswerData>>) {
        let mut world = self.world();
        let truth = world.jobs.entry(id).or_default();
        truth.outcomes += 1;
        let attempts = match &outcome {
            Outcome::DeadLettered { reasons } => reasons.len() as u32,
            Outcome::Done(result) => result.tag.attempt,
            _ => 0,
        };
        let is_wrong =
            truth.outcomes > 1 || truth.is_called_off || attempts > truth.taken + truth.expired;
        if is_wrong {
            world.wrong = Some(format!(
                "job {id} ends with {outcome:?}: {truth:?}",
                truth = world.jobs[&id]
            ));
        }
    }

    /// The invariant of every state.
    fn check(&self) -> Result<(), String> {
        let (state, world) = (self.lock(), self.world());
        let table = &state.table;
        if let Some(wrong) = &world.wrong {
            return Err(wrong.clone());
        }
        for (&id, truth) in world.jobs.iter().filter(|(_, truth)| !truth.is_over()) {
            let waiting = table.waiting.iter().filter(|&&other| other == id).count();
            let leases = table.workers.iter().flat_map(|worker| &worker.leases);
            let leased = leases
                .filter(|lease| lease.tag.job == id && !lease.is_late)
                .count();
            let wanted = usize::from(!table.is_settled(id));
            if waiting + leased != wanted {
                return Err(format!(
                    "job {id} waits {waiting} times and is leased {leased} times: {truth:?}"
                ));
            }
        }
        let open = world
            .jobs
            .iter()
            .filter(|(_, truth)| !truth.is_over())
            .count();
        if table.len() != open || table.is_submitting() {
            return Err(format!("{} jobs are in the books, of {open}", table.len()));
        }
        Ok(())
    }

    /// All workers go, and one comes that does everything.
    fn finish(&self) -> Result<(), String> {
        for index in 0..WORKERS as u8 {
            self.act(Act::Die(index));
            self.act(Act::Prove(index));
        }
        self.act(Act::Work);
        self.world().members = 0;
        self.act(Act::Work);
        let id = MEMBERS_MAX + 1;
        self.world().workers[0] = Some(Worker {
            id,
            ..Worker::default()
        });
        for _ in 0..4 * JOBS_MAX {
            for act in [
                Act::Work,
                Act::Take(0),
                Act::Done(0),
                Act::Complete(0),
                Act::Work,
                Act::TakeNext,
            ] {
                self.act(act);
                self.check()?;
            }
        }
        match self.lock().table.len() {
            0 => Ok(()),
            left => Err(format!("{left} jobs have no outcome in the end")),
        }
    }

    /// All that tells one state from another.
    fn print(&self) -> String {
        let (state, world) = (self.lock(), self.world());
        let table = &state.table;
        let sessions: Vec<_> = state
            .sessions
            .iter()
            .map(|session| {
                let pending_results: Vec<_> =
                    session.pending_results.iter().map(|it| it.tag).collect();
                let leases = table.workers.iter().find(|it| it.worker == session.id);
                let leases = leases.map(|it| &it.leases);
                let end = session
                    .end
                    .as_ref()
                    .map(|end| (&end.reason, end.is_settled));
                format!(
                    "{} {leases:?} {pending_results:?} {end:?} {}",
                    session.id, session.is_leaving
                )
            })
            .collect();
        let jobs: Vec<_> = (1..=JOBS_MAX)
            .map(|id| {
                (
                    table.next_delivery(id).map(|(tag, _)| tag),
                    table.is_settled(id),
                )
            })
            .collect();
        format!(
            "{sessions:?} {jobs:?} {:?} {:?} {world:?} {:?}",
            table.waiting,
            table.finished.values(),
            state.now()
        )
    }
}

impl Truth {
    fn is_over(&self) -> bool {
        self.outcomes > 0 || self.is_called_off
    }
}

/// Everything that may happen.
pub fn steps() -> Vec<Step> {
    let of_worker = |worker: u8| {
        use Act::{Complete, Die, Done, Fail, Join, Leave, Prove, Return, Take};
        [Join, Take, Done, Fail, Return, Complete, Leave, Die, Prove]
            .map(|act: fn(u8) -> Act| act(worker))
    };
    let acts = (0..WORKERS as u8).flat_map(of_worker);
    let acts = acts.chain([
        Act::Submit,
        Act::CallOff,
        Act::Work,
        Act::TakeNext,
        Act::Expire,
    ]);
    acts.flat_map(|act| [(false, act), (true, act)])
        .filter(|step| *step != (true, Act::Submit))
        .collect()
}

/// Plays a row of steps.
///
/// # Errors
/// The violation, if any.
fn play(row: &[Step], order: ResultOrder, fault: Fault) -> Result<Rc<Owner>, String> {
    let rules = QueueRules {
        prefetch: 2,
        max_attempts: 2,
        lease_timeout: Some(TIMEOUT),
        order,
        limit: 100,
    };
    let owner = Owner::new(rules, fault);
    let mut rest = row;
    while let Some((&(_, act), behind)) = rest.split_first() {
        let during = behind
            .iter()
            .take_while(|(is_during, _)| *is_during)
            .count();
        owner.world().is_submit = false;
        owner.world().meanwhile = behind[..during].iter().map(|&(_, act)| act).collect();
        owner.act(act);
        owner.world().meanwhile.clear();
        owner.check()?;
        rest = &behind[during..];
    }
    Ok(owner)
}

/// A panic is a finding, too.
fn sound<T>(play: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(play)).unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<String>().cloned();
        Err(said
            .or_else(|| panic.downcast_ref::<&str>().map(|said| said.to_string()))
            .unwrap_or_default())
    })
}

/// Plays every row of steps up to a length, each state once. How many states there were.
///
/// # Errors
/// The violation, and the steps before it.
pub fn search(length: usize, is_in_order: bool, fault: Fault) -> Result<usize, String> {
    let order = if is_in_order {
        ResultOrder::Submission
    } else {
        ResultOrder::Completion
    };
    let (steps, mut seen, mut open) = (
        steps(),
        HashSet::new(),
        VecDeque::from([(Vec::new(), false)]),
    );
    while let Some((row, is_submit)) = open.pop_front() {
        for &step in steps
            .iter()
            .filter(|(is_during, _)| is_submit || !is_during)
        {
            let mut row: Vec<Step> = row.clone();
            row.push(step);
            let wrong = |wrong| format!("{wrong}\nafter {row:?}");
            let owner = sound(|| play(&row, order, fault)).map_err(wrong)?;
            if seen.insert(owner.print()) {
                let is_submit = owner.world().is_submit;
                sound(|| owner.finish()).map_err(wrong)?;
                if row.len() < length {
                    open.push_back((row, is_submit));
                }
            }
        }
    }
    Ok(seen.len())
}
