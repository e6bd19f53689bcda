//! One queue, imported from one machine: an ordinary queue here, with jobs that come over lanes.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use warpipe::{
    Error as Local, JobEnd, JobHandle, JobResult, Layout, LimitFault, Loan, NameFault, Queue,
    QueueOptions, ResultOrder, Stream, SubmitError,
};
use zenoh::bytes::ZBytes;

use crate::error::{Error, Result};
use crate::lane::{
    Assembly, Content, Ending, LaneCounts, LaneReceiver, LaneSender, SLICE, Target, upload,
};
use crate::message::{Id, Message, Part, Purpose, Tag, Tensor, bounded};
use crate::options::Options;

/// Jobs of one exporter that are not forgotten yet: more than it may have under way.
const JOBS_MAX: usize = 256;
/// Runs of exporters that have no lane and keep their jobs for the lease.
const LOST_MAX: usize = 64;
/// Acknowledgements of one exporter that wait.
const TAKEN_MAX: usize = 4 * JOBS_MAX;
/// How often a name that is taken is tried again, a slice apart.
const TAKEN_ATTEMPTS: u32 = 10;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
pub(crate) struct QueueImport {
    pub(crate) name: String,
    pub(crate) node: String,
    options: Arc<Options>,
    queue: Mutex<Option<Arc<Queue>>>,
    state: Mutex<State>,
    /// An outcome has come.
    changed: Condvar,
    /// By the exporter's run: numbers of jobs of which it wants nothing more.
    taken: Mutex<HashMap<Id, Vec<u64>>>,
    /// Each job that has begun to come has a clone.
    begun: Arc<()>,
    workers: AtomicUsize,
    /// Jobs of the present lane that the status has counted.
    counted: AtomicU64,
    is_over: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    /// By the exporter's run.
    sessions: HashMap<Id, Session>,
    /// By the job's number in the queue here: the exporter's run, and the number there.
    jobs: HashMap<u64, (Id, u64)>,
}

#[derive(Debug)]
struct Session {
    lane: Id,
    results: Id,
    /// The lanes themselves, until they have ended: they hold a window of memory, and a thread.
    lanes: Option<(Arc<LaneReceiver>, Arc<LaneSender>)>,
    known: HashMap<u64, Known>,
    /// The last jobs that were taken. One may come again: it was to be sent on a new lane when its
    /// outcome came.
    taken: VecDeque<u64>,
    /// The number of workers that was said on this lane.
    told: Option<usize>,
    /// Since when there is no lane.
    lost: Option<Instant>,
}

/// A job that came.
#[derive(Debug)]
enum Known {
    Waiting(JobHandle),
    /// Its outcome, and the lane that it was sent on. It stays until it is taken.
    Done(Arc<Answer>, Option<Id>),
}

#[derive(Debug)]
enum Answer {
    Result(JobResult),
    Failed { reason: String, is_final: bool },
}

impl QueueImport {
    pub(crate) fn new(name: &str, node: &str, options: &Arc<Options>) -> QueueImport {
        QueueImport {
            name: name.into(),
            node: node.into(),
            options: options.clone(),
            queue: Mutex::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
            taken: Mutex::default(),
            begun: Arc::default(),
            workers: AtomicUsize::new(0),
            counted: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    pub(crate) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
    }

    /// The exporter wants nothing more of a job. Does not wait; false if too many are waiting.
    pub(crate) fn put_taken(&self, peer: Id, number: u64) -> bool {
        let mut taken = lock(&self.taken);
        let taken = taken.entry(peer).or_default();
        taken.len() < TAKEN_MAX && {
            taken.push(number);
            true
        }
    }

    /// A lane of jobs begins, with a lane of results beside it.
    pub(crate) fn connect(&self, lane: &Arc<LaneReceiver>, results: &Arc<LaneSender>) {
        let mut state = lock(&self.state);
        let (known, taken) = match state.sessions.remove(&lane.peer) {
            Some(older) => {
                if let Some((lane, results)) = older.lanes {
                    lane.end(Ending::Cut);
                    results.end("a new lane replaces it");
                }
                (older.known, older.taken)
            }
            None => Default::default(),
        };
        let session = Session {
            lane: lane.lane,
            results: results.lane,
            lanes: Some((lane.clone(), results.clone())),
            known,
            taken,
            told: None,
            lost: None,
        };
        state.sessions.insert(lane.peer, session);
    }

    /// Submits the jobs that a lane brings, and sends their outcomes, until it ends.
    pub(crate) fn take_jobs(&self, lane: &LaneReceiver, results: &LaneSender) {
        std::thread::scope(|scope| {
            // A thread for each lane: one that gives no credit holds up no other.
            let sending = std::thread::Builder::new().name("bridge-send".into());
            let sending = sending.spawn_scoped(scope, || self.send_outcomes(lane, results));
            let sending = sending.map_err(|source| Error::Thread {
                purpose: "the results of a queue",
                source,
            });
            let ending = match sending.and_then(|_| self.submit_all(lane, results)) {
                Ok(ending) => ending,
                Err(error) => Ending::Fault(error.to_string()),
            };
            self.leave(lane, results, &ending);
        });
    }

    /// A lane of jobs has ended.
    pub(crate) fn leave(&self, lane: &LaneReceiver, results: &LaneSender, ending: &Ending) {
        let reason = match ending {
            Ending::Fault(reason) => Some(bounded(reason)),
            // The exporter may not know of it: it would keep the lane, and wait.
            Ending::Cut => Some("the import of the queue has ended".into()),
            Ending::Sender(_) => None,
        };
        if let Some(reason) = reason {
            let lane = lane.lane;
            let _ = results.send(&Message::Stop { lane, reason });
        }
        results.end("the lane of jobs has ended");
        let mut state = lock(&self.state);
        let is_closed = matches!(ending, Ending::Sender(_));
        if let Some(session) = state.sessions.get_mut(&lane.peer)
            && session.lane == lane.lane
        {
            (session.lost, session.lanes) = (Some(Instant::now()), None);
            if is_closed {
                // The exporter has ended: nobody waits for these jobs.
                state.drop_session(&lane.peer);
            }
        }
        state.bound_lost();
    }

    fn submit_all(&self, lane: &LaneReceiver, results: &LaneSender) -> Result<Ending> {
        let Some(queue) = self.open(lane)? else {
            return Ok(Ending::Cut);
        };
        let stream = self.options.device.stream()?;
        lane.accept(0)?;
        let (begun, purpose) = (results.lane, Purpose::Results { jobs: lane.lane });
        results.send(&Message::Begin {
            lane: begun,
            purpose,
        })?;
        let mut assembly = None;
        loop {
            match lane.next() {
                Ok(Some((part, payload))) => {
                    let took =
                        self.take_part(lane, &queue, &mut assembly, part, &payload, &stream)?;
                    if let Err(reason) = took {
                        return Ok(lane.ending().unwrap_or(Ending::Fault(reason)));
                    }
                    drop(payload);
                    lane.taken()?;
                }
                // The exporter began it, so it must keep it.
                Ok(None) => match results.ended() {
                    Some(reason) => return Ok(Ending::Fault(reason)),
                    None if self.is_over() => return Ok(Ending::Cut),
                    None => {}
                },
                Err(ending) => return Ok(ending),
            }
        }
    }

    /// The queue: under the name here, or `remote/HOST/NAME` where another process has it.
    fn open(&self, lane: &LaneReceiver) -> Result<Option<Arc<Queue>>> {
        let build = |name: &str| {
            Queue::new(
                name,
                QueueOptions {
                    memory_limit: self.options.memory_limit,
                    // The exporter's queue tries again.
                    max_attempts: 1,
                    prefetch: 1,
                    order: ResultOrder::Completion,
                    submit_timeout: SLICE,
                    ..self.options.domain.on(&self.options.device)
                },
            )
        };
        let mut open = lock(&self.queue);
        if let Some(queue) = open.as_ref() {
            return Ok(Some(queue.clone()));
        }
        let mut attempts = 0;
        let queue = loop {
            if lane.is_cut() || self.is_over() {
                return Ok(None);
            }
            match build(&self.name) {
                Err(Local::Name(NameFault::Taken { .. })) if attempts < TAKEN_ATTEMPTS => {
                    lane.wait_for_cut(SLICE);
                    attempts += 1;
                }
                Err(Local::Name(NameFault::Taken { .. })) => {
                    break build(&format!("remote/{}/{}", self.node, self.name))?;
                }
                other => break other?,
            }
        };
        Ok(Some(open.insert(Arc::new(queue)).clone()))
    }

    fn take_part(
        &self,
        lane: &LaneReceiver,
        queue: &Queue,
        assembly: &mut Option<Assembly<JobTarget>>,
        mut part: Part,
        payload: &ZBytes,
        stream: &Stream,
    ) -> Result<Result<(), String>> {
        if let Some(tensor) = part.tensor.take() {
            if assembly.is_some() {
                return Ok(Err("a job began before the one before it was whole".into()));
            }
            let Tag::Job { number } = tensor.tag else {
                return Ok(Err("a lane of jobs brought something else".into()));
            };
            let layout = match tensor.layout(None) {
                Ok(layout) => layout,
                Err(reason) => return Ok(Err(reason)),
            };
            let (is_known, count) = {
                let state = lock(&self.state);
                let session = state.sessions.get(&lane.peer);
                session.map_or((true, 0), |it| (it.knows(number), it.known.len()))
            };
            if count >= JOBS_MAX {
                return Ok(Err(format!("{JOBS_MAX} jobs are here already")));
            }
            let (mut slot, mut refused) = (None, None);
            if is_known {
                LaneCounts::add(&lane.counts.repeated, 1);
            } else {
                match self.loan(lane, queue, &layout)? {
                    Some(Ok(loan)) => slot = Some(loan),
                    Some(Err(reason)) => refused = Some(reason),
                    None => return Ok(Err("the lane has ended".into())),
                }
            }
            let stream = stream.clone();
            let target = JobTarget {
                target: Target { slot, stream },
                refused,
                _begun: self.begun.clone(),
            };
            *assembly = Some(Assembly::new(tensor, layout, target));
        }
        let Some(current) = assembly else {
            return Ok(Err("a part came without its tensor".into()));
        };
        if let Err(reason) = current.add(&part, payload.len() as u64) {
            return Ok(Err(reason));
        }
        if let Some(loan) = &current.target.target.slot {
            // SAFETY: `add` found the range inside the slot, which is this loan's alone until it is
            // submitted or given back, behind the same stream.
            unsafe {
                upload(
                    payload,
                    &self.options.device,
                    stream,
                    loan.slot_ptr() + part.offset,
                )?;
            }
        }
        if current.is_whole()
            && let Some(whole) = assembly.take()
        {
            self.submit(lane, queue, whole)?;
        }
        Ok(Ok(()))
    }

    /// Memory for a job, or the reason why there never is. `None` if the lane ends first.
    fn loan(
        &self,
        lane: &LaneReceiver,
        queue: &Queue,
        layout: &Layout,
    ) -> Result<Option<std::result::Result<Loan, String>>> {
        let (bytes, most) = (layout.bytes(), self.options.tensor_bytes_max);
        let refused = |most: u64| {
            let node = &self.options.node;
            Ok(Some(Err(format!(
                "the bridge on {node:?} takes {most} bytes, it has {bytes}"
            ))))
        };
        if bytes > most {
            return refused(most);
        }
        let mut used = Instant::now();
        while lane.ending().is_none() && !self.is_over() {
            let reason = match queue.loan(layout) {
                Ok(loan) => return Ok(Some(Ok(loan))),
                Err(Local::Limit(LimitFault::Memory { bytes, limit, .. })) if bytes > limit => {
                    return refused(limit);
                }
                Err(error @ (Local::Limit(LimitFault::Memory { .. }) | Local::Timeout { .. })) => {
                    error
                }
                Err(error @ Local::Limit(LimitFault::Device { .. })) => {
                    lane.wait_for_end(SLICE);
                    error
                }
                Err(error) => return Err(error.into()),
            };
            // The memory that it has comes back with jobs and in pieces, of which none may do. If no
            // job has any, none will: those behind this one wait for nothing.
            let is_idle = queue
                .state()
                .is_ok_and(|it| it.waiting + it.leased == 0 && Arc::strong_count(&self.begun) == 1);
            if !is_idle {
                used = Instant::now();
            } else if used.elapsed() >= self.options.lease {
                return Ok(Some(Err(format!(
                    "the bridge on {:?} has no memory for it: {reason}",
                    self.options.node
                ))));
            }
        }
        Ok(None)
    }

    fn submit(
        &self,
        lane: &LaneReceiver,
        queue: &Queue,
        mut whole: Assembly<JobTarget>,
    ) -> Result<()> {
        let Tag::Job { number } = whole.tag else {
            return Ok(());
        };
        if let Some(reason) = whole.target.refused.take() {
            self.refuse(lane, number, reason);
            return Ok(());
        }
        let target = &mut whole.target.target;
        let Some(loan) = &mut target.slot else {
            return Ok(());
        };
        loan.set_metadata(&whole.metadata)?;
        while lane.ending().is_none() && !self.is_over() {
            // Under the lock: its result finds it there.
            let mut state = lock(&self.state);
            // A lane that has taken this one's place may have brought it, too.
            let Some(session) = state.session_of(lane, number) else {
                return Ok(());
            };
            let Some(loan) = target.slot.take() else {
                return Ok(());
            };
            match queue.submit_within(loan, &target.stream, Duration::ZERO) {
                Ok(job) => {
                    let id = job.id();
                    session.known.insert(number, Known::Waiting(job));
                    state.jobs.insert(id, (lane.peer, number));
                    LaneCounts::add(&lane.counts.tensors, 1);
                    LaneCounts::add(&lane.counts.bytes, whole.layout.bytes());
                    return Ok(());
                }
                Err(SubmitError {
                    error: Local::Limit(LimitFault::Jobs { .. }) | Local::Timeout { .. },
                    returned: Some(back),
                }) => {
                    target.slot = Some(*back);
                    // Taking an outcome makes room.
                    drop(self.changed.wait_timeout(state, SLICE));
                }
                Err(failed) => return Err(failed.error.into()),
            }
        }
        Ok(())
    }

    /// A job that never can be done here has failed.
    fn refuse(&self, lane: &LaneReceiver, number: u64, reason: String) {
        let mut state = lock(&self.state);
        if let Some(session) = state.session_of(lane, number) {
            let failed = Answer::Failed {
                reason: bounded(&reason),
                is_final: false,
            };
            session
                .known
                .insert(number, Known::Done(Arc::new(failed), None));
            self.changed.notify_all();
        }
    }

    /// Takes outcomes, and says the number of workers, until the import is over: when no exporter
    /// had a lane for the lease. It waits for no exporter.
    pub(crate) fn take_results(&self) {
        let Ok(stream) = self.options.device.stream() else {
            return self.end();
        };
        let start = Instant::now();
        while !self.is_over() {
            self.forget();
            if lock(&self.state).sessions.is_empty() && start.elapsed() >= self.options.lease {
                break;
            }
            let queue = lock(&self.queue).clone();
            let Some(queue) = queue else {
                std::thread::park_timeout(SLICE);
                continue;
            };
            let outcome = queue.next_result(&stream, SLICE);
            self.keep(outcome);
            let workers = queue.state().map_or(0, |state| state.workers.len());
            self.workers.store(workers, Ordering::Relaxed);
            self.announce(workers);
        }
        self.end();
        let mut state = lock(&self.state);
        for (lane, _) in state.sessions.values().filter_map(|it| it.lanes.as_ref()) {
            lane.end(Ending::Cut);
        }
        *state = State::default();
        drop(state);
        *lock(&self.queue) = None;
    }

    /// Forgets what was taken, and exporters that gave no word for the lease.
    fn forget(&self) {
        let taken = std::mem::take(&mut *lock(&self.taken));
        let mut state = lock(&self.state);
        for (peer, numbers) in taken {
            let state = &mut *state;
            let Some(session) = state.sessions.get_mut(&peer) else {
                continue;
            };
            for number in numbers {
                if let Some(Known::Waiting(job)) = session.take(number) {
                    let _ = job.cancel();
                    state.jobs.remove(&job.id());
                }
            }
        }
        let is_lost =
            |it: &Session| (it.lost).is_some_and(|lost| lost.elapsed() >= self.options.lease);
        let sessions = state.sessions.iter();
        let lost: Vec<Id> = sessions
            .filter(|(_, it)| is_lost(it))
            .map(|(id, _)| *id)
            .collect();
        lost.iter().for_each(|peer| state.drop_session(peer));
    }

    fn failed(&self, reason: &str, is_final: bool) -> Answer {
        let reason = bounded(&format!("on {:?}: {reason}", self.options.node));
        Answer::Failed { reason, is_final }
    }

    fn keep(&self, outcome: std::result::Result<JobResult, Local>) {
        let (job, answer) = match outcome {
            Ok(result) => (result.job, Answer::Result(result)),
            Err(Local::Job {
                job,
                end: JobEnd::DeadLettered { reasons },
                ..
            }) => {
                let reason = reasons.last().map_or("no reason", String::as_str);
                (job, self.failed(reason, false))
            }
            Err(Local::Job {
                job,
                end: JobEnd::Rejected { reason },
                ..
            }) => (job, self.failed(&reason, true)),
            Err(Local::Timeout { .. }) => return,
            // It may come again at once, each time.
            Err(_) => return std::thread::park_timeout(SLICE),
        };
        let mut state = lock(&self.state);
        if let Some((peer, number)) = state.jobs.remove(&job)
            && let Some(session) = state.sessions.get_mut(&peer)
        {
            let done = Known::Done(Arc::new(answer), None);
            session.known.insert(number, done);
            self.changed.notify_all();
        }
    }

    /// Tells the number of workers to those that were told another one.
    fn announce(&self, workers: usize) {
        for session in lock(&self.state).sessions.values_mut() {
            let Some((_, results)) = &session.lanes else {
                continue;
            };
            if session.told != Some(workers) && results.wait_ready(Duration::ZERO).is_some() {
                let (lane, count) = (session.lane, workers.min(256) as u32);
                if results.post(Message::Workers { lane, count }) {
                    session.told = Some(workers);
                }
            }
        }
    }

    /// Sends the outcomes for a lane until it ends.
    fn send_outcomes(&self, lane: &LaneReceiver, results: &LaneSender) {
        let stream = match self.options.device.stream() {
            Ok(stream) => stream,
            Err(error) => return results.end(&error.to_string()),
        };
        while results.ended().is_none() && !self.is_over() {
            if results.wait_ready(SLICE).is_none() {
                continue;
            }
            for (number, answer) in self.unsent(&lane.peer, &results.lane) {
                if let Err(error) = self.send(results, number, &answer, &stream) {
                    results.end(&error.to_string());
                }
            }
        }
    }

    /// Outcomes that were not sent on this lane of results, at the latest after a slice.
    fn unsent(&self, peer: &Id, results: &Id) -> Vec<(u64, Arc<Answer>)> {
        let is_unsent = |known: &Known| match known {
            Known::Done(_, sent) => *sent != Some(*results),
            Known::Waiting(_) => false,
        };
        let waits = |state: &mut State| {
            let session = state.sessions.get(peer);
            !session.is_some_and(|session| session.known.values().any(is_unsent))
        };
        let waited = self
            .changed
            .wait_timeout_while(lock(&self.state), SLICE, waits);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let mut unsent = Vec::new();
        let session = state.sessions.get_mut(peer);
        // A lane that another has replaced sends none of that one's.
        let Some(session) = session.filter(|session| session.results == *results) else {
            return unsent;
        };
        for (number, known) in &mut session.known {
            if let Known::Done(answer, sent) = known
                && *sent != Some(*results)
            {
                *sent = Some(*results);
                unsent.push((*number, answer.clone()));
            }
        }
        unsent
    }

    fn send(
        &self,
        lane: &LaneSender,
        number: u64,
        answer: &Answer,
        stream: &Stream,
    ) -> Result<bool> {
        match answer {
            Answer::Result(result) if result.layout().bytes() <= self.options.tensor_bytes_max => {
                let tag = Tag::Result { number };
                let tensor = Tensor::new(tag, result.layout(), result.metadata());
                let part_bytes = self.options.part_bytes;
                let (address, bytes) = (result.slot_ptr(), result.layout().bytes());
                // SAFETY: a result's data is complete, and it keeps its slot mapped and unwritten
                // until it is released.
                let content = unsafe { Content::device(address, bytes, stream, None) };
                let sent = lane.send_tensor(tensor, &content, part_bytes);
                if sent.is_err() {
                    // It is released behind a copy that may not be done.
                    let _ = result.stream().wait_for(stream);
                }
                sent
            }
            Answer::Result(result) => {
                let bytes = result.layout().bytes();
                let reason = format!("its result of {bytes} bytes is more than the bridge takes");
                self.send_failure(lane, number, &reason, false)
            }
            Answer::Failed { reason, is_final } => {
                self.send_failure(lane, number, reason, *is_final)
            }
        }
    }

    fn send_failure(
        &self,
        lane: &LaneSender,
        number: u64,
        reason: &str,
        is_final: bool,
    ) -> Result<bool> {
        let tag = Tag::Failed {
            number,
            reason: reason.into(),
            is_final,
        };
        let tensor = Tensor::new(tag, &Layout::bytes_only(0)?, &[]);
        let content = Content::Host(Bytes::new());
        lane.send_tensor(tensor, &content, self.options.part_bytes)
    }

    /// Whether a lane brings jobs to it.
    pub(crate) fn has(&self, lane: &LaneReceiver) -> bool {
        let state = lock(&self.state);
        let session = state.sessions.get(&lane.peer);
        session.is_some_and(|session| session.lane == lane.lane)
    }

    pub(crate) fn workers(&self) -> usize {
        self.workers.load(Ordering::Relaxed)
    }

    /// The jobs that came since the last call, of those that a lane has brought in all.
    pub(crate) fn new_jobs(&self, jobs: u64) -> u64 {
        jobs.saturating_sub(self.counted.swap(jobs, Ordering::Relaxed))
    }

    /// The name that the queue has here.
    pub(crate) fn local_name(&self) -> String {
        let queue = self.queue.try_lock().ok().and_then(|queue| queue.clone());
        queue.map_or_else(|| self.name.clone(), |queue| queue.name().to_owned())
    }
}

/// Where the bytes of a job go.
#[derive(Debug)]
struct JobTarget {
    target: Target<Loan>,
    /// Why it has no slot, and fails.
    refused: Option<String>,
    /// While it lives, memory of the queue may be its own.
    _begun: Arc<()>,
}

impl Session {
    /// Whether that job has come before.
    fn knows(&self, number: u64) -> bool {
        self.known.contains_key(&number) || self.taken.contains(&number)
    }

    /// The exporter wants nothing more of that job.
    fn take(&mut self, number: u64) -> Option<Known> {
        let known = self.known.remove(&number);
        if known.is_some() {
            if self.taken.len() == JOBS_MAX {
                self.taken.pop_front();
            }
            self.taken.push_back(number);
        }
        known
    }
}

impl State {
    /// The session of a lane that nothing has replaced, if it has no such job yet.
    fn session_of(&mut self, lane: &LaneReceiver, number: u64) -> Option<&mut Session> {
        let session = self.sessions.get_mut(&lane.peer)?;
        let is_new = session.lane == lane.lane && !session.knows(number);
        is_new.then_some(session)
    }

    /// Drops the exporters' runs that have been without a lane for the longest, beyond the most.
    fn bound_lost(&mut self) {
        let lost = |(id, session): (&Id, &Session)| session.lost.map(|lost| (lost, *id));
        let mut lost: Vec<(Instant, Id)> = self.sessions.iter().filter_map(lost).collect();
        lost.sort_unstable();
        let over = lost.len().saturating_sub(LOST_MAX);
        lost[..over]
            .iter()
            .for_each(|(_, id)| self.drop_session(id));
    }

    fn drop_session(&mut self, peer: &Id) {
        self.jobs.retain(|_, (of, _)| of != peer);
        let Some(session) = self.sessions.remove(peer) else {
            return;
        };
        for known in session.known.into_values() {
            if let Known::Waiting(job) = known {
                let _ = job.cancel();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use warpipe::DType;

    use super::*;
    use crate::lane::tests::{blocked, comes_back_behind, options, window};
    use crate::session;

    #[test]
    fn a_job_that_was_taken_is_not_done_again_when_it_comes_once_more_on_a_new_lane() {
        let (_folder, options) = options();
        let (_session, outbox) = session::alone(&options);
        let import = QueueImport::new("work", "there", &options);
        let connect = |id: u8| {
            let lane = LaneReceiver::new([id; 16], [2; 16], window(), outbox.clone());
            let results = LaneSender::new([id + 1; 16], [2; 16], outbox.clone());
            let (lane, results) = (Arc::new(lane), Arc::new(results));
            import.connect(&lane, &results);
            lane
        };
        let layout = Layout::contiguous(DType::U8, &[8]).unwrap();
        let stream = options.device.stream().unwrap();
        let brings = |lane: &LaneReceiver, number: u64| {
            let part = Part {
                lane: lane.lane,
                number: 1,
                offset: 0,
                tensor: Some(Tensor::new(Tag::Job { number }, &layout, b"")),
                more: Vec::new(),
            };
            let queue = import.open(lane).unwrap().unwrap();
            let bytes = vec![7; 8].into();
            let took = import.take_part(lane, &queue, &mut None, part, &bytes, &stream);
            took.unwrap().unwrap();
            queue.state().unwrap().waiting
        };
        let lane = connect(1);
        assert_eq!(brings(&lane, 1), 1);
        let lane = connect(3);
        // Its outcome came, and another exporter floods.
        for _ in 0..2 * TAKEN_MAX {
            import.put_taken([9; 16], 1);
        }
        assert!(import.put_taken([2; 16], 1));
        import.forget();
        assert_eq!(brings(&lane, 1), 0);
        assert_eq!(brings(&lane, 2), 1);
    }

    #[test]
    fn a_job_for_which_there_never_is_memory_fails_instead_of_holding_up_those_behind_it() {
        let (_folder, options) = options();
        let mut options = Options::clone(&options);
        (options.memory_limit, options.lease) = (4 << 20, 2 * SLICE);
        let options = Arc::new(options);
        let (_session, outbox) = session::alone(&options);
        let import = QueueImport::new("work", "there", &options);
        let lane = LaneReceiver::new([1; 16], [2; 16], window(), outbox);
        let queue = import.open(&lane).unwrap().unwrap();
        let layout = |mib: u64| Layout::bytes_only(mib << 20).unwrap();
        // One is kept: what is left is too short for three.
        let [held, kept] = [2, 2].map(|mib| queue.loan(&layout(mib)).unwrap());
        let stream = options.device.stream().unwrap();
        let job = queue.submit(held, &stream).unwrap();
        std::thread::scope(|scope| {
            let loaned = scope.spawn(|| import.loan(&lane, &queue, &layout(3)));
            // A job that waits for a worker may give it back.
            assert!(lane.next().unwrap().is_none() && lane.next().unwrap().is_none());
            assert!(lane.next().unwrap().is_none() && lane.next().unwrap().is_none());
            assert!(!loaned.is_finished());
            assert!(job.cancel().unwrap());
            let start = Instant::now();
            while !loaned.is_finished() && start.elapsed() < Duration::from_secs(60) {
                lane.wait_for_end(SLICE);
            }
            lane.end(Ending::Cut);
            let refused = loaned.join().unwrap().unwrap();
            let reason = refused.expect("it waits no more").unwrap_err();
            assert!(reason.contains("has no memory for it"), "{reason}");
        });
        drop(kept);
    }

    #[test]
    fn the_slot_of_a_job_that_is_cut_off_goes_back_behind_the_copy_to_it() {
        let (_folder, options) = options();
        let (_session, outbox) = session::alone(&options);
        let lane = Arc::new(LaneReceiver::new(
            [1; 16],
            [2; 16],
            window(),
            outbox.clone(),
        ));
        let results = Arc::new(LaneSender::new([3; 16], [2; 16], outbox));
        let import = QueueImport::new("work", "there", &options);
        import.connect(&lane, &results);
        let queue = import.open(&lane).unwrap().unwrap();
        let layout = Layout::contiguous(DType::U8, &[16]).unwrap();
        let part = Part {
            lane: [1; 16],
            number: 1,
            offset: 0,
            tensor: Some(Tensor::new(Tag::Job { number: 1 }, &layout, b"")),
            more: Vec::new(),
        };
        let (stream, go) = blocked(&options.device);
        let (mut job, half) = (None, vec![7; 8].into());
        let took = import.take_part(&lane, &queue, &mut job, part, &half, &stream);
        took.unwrap().unwrap();
        let returned = job
            .as_ref()
            .unwrap()
            .target
            .target
            .slot
            .as_ref()
            .unwrap()
            .returned();
        drop(job);
        comes_back_behind(go, &returned);
    }
}
