//! One queue, exported to one peer: ordinary workers here, with jobs that the peer's workers do.
//!
//! Each thread has a worker of the local queue and carries one job at a time: it sends the input,
//! and the thread of the lane of results answers it. As many of them take jobs as the peer has
//! workers. A job goes back to the local queue when the peer gave no word for the lease.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use warpipe::{
    AnswerError, AnswerHandle, Error as Local, Lease, LimitFault, Loan, Sample, Stream, Worker,
    WorkerOptions,
};
use zenoh::bytes::ZBytes;

use crate::error::Result;
use crate::lane::{
    Assembly, Content, Ending, LaneCounts, LaneReceiver, LaneSender, SLICE, Target, upload,
};
use crate::message::{End, Id, Message, Part, Tag, Tensor, bounded};
use crate::options::Options;

/// Jobs of a queue that one peer may have.
pub(crate) const CARRIERS_MAX: usize = 16;

/// The number of the next job that goes to a peer. No two jobs of a run have one number, whatever
/// becomes of their export: the importer may still have the outcome of an earlier one.
static NEXT_JOB: AtomicU64 = AtomicU64::new(1);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
pub(crate) struct QueueExport {
    pub(crate) name: String,
    pub(crate) peer: Id,
    options: Arc<Options>,
    jobs_lane: Mutex<JobsLane>,
    jobs: Mutex<HashMap<u64, Arc<Job>>>,
    /// Outcomes that came late or again.
    repeated: AtomicU64,
    is_queue: AtomicBool,
    is_over: AtomicBool,
}

/// The last lane of jobs, and what was said about it: of another lane that says nothing.
#[derive(Debug, Default)]
struct JobsLane {
    sender: Option<Arc<LaneSender>>,
    /// Workers that the peer has.
    workers: usize,
    /// Whether it has its lane of results.
    has_results: bool,
}

impl JobsLane {
    fn is(&self, lane: &Id) -> bool {
        self.sender.as_ref().is_some_and(|it| it.lane == *lane)
    }
}

/// A job that the peer does.
#[derive(Debug)]
struct Job {
    answer: Mutex<JobAnswer>,
    answered: Condvar,
}

#[derive(Debug)]
enum JobAnswer {
    Waiting(AnswerHandle),
    /// A thread has the handle.
    UnderWay,
    Given,
}

impl Job {
    fn new(answer: AnswerHandle) -> Job {
        Job {
            answer: Mutex::new(JobAnswer::Waiting(answer)),
            answered: Condvar::new(),
        }
    }

    /// The handle, for the first that answers. Followed by [`put`](Self::put).
    fn take(&self) -> Option<AnswerHandle> {
        let mut answer = lock(&self.answer);
        match std::mem::replace(&mut *answer, JobAnswer::UnderWay) {
            JobAnswer::Waiting(handle) => Some(handle),
            other => {
                *answer = other;
                None
            }
        }
    }

    /// The handle comes back from an answer for which there was no room, or the job is answered.
    fn put(&self, back: Option<AnswerHandle>) {
        *lock(&self.answer) = back.map_or(JobAnswer::Given, JobAnswer::Waiting);
        self.answered.notify_all();
    }

    /// Whether it is answered, at the latest after a slice.
    fn wait(&self) -> bool {
        let is_open = |answer: &mut JobAnswer| !matches!(answer, JobAnswer::Given);
        let waited = self
            .answered
            .wait_timeout_while(lock(&self.answer), SLICE, is_open);
        let (answer, _) = waited.unwrap_or_else(PoisonError::into_inner);
        matches!(*answer, JobAnswer::Given)
    }
}

/// What became of memory for a result.
enum Output {
    Slot(Box<Loan>),
    /// Nobody waits for it.
    Unwanted,
    /// There will be none.
    Refused(String),
    /// There was none in time: the result is left out, and sent again on another lane.
    NoRoom,
}

impl QueueExport {
    pub(crate) fn new(name: &str, peer: Id, options: &Arc<Options>) -> QueueExport {
        QueueExport {
            name: name.into(),
            peer,
            options: options.clone(),
            jobs_lane: Mutex::default(),
            jobs: Mutex::default(),
            repeated: AtomicU64::new(0),
            is_queue: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
        }
    }

    /// Whether the name was found to be a queue's.
    pub(crate) fn is_queue(&self) -> bool {
        self.is_queue.load(Ordering::Acquire)
    }

    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    pub(crate) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        // Also one that has ended here: the peer may not know of it.
        if let Some(lane) = lock(&self.jobs_lane).sender.take() {
            let (end, id) = (End::Closed, lane.lane);
            lane.post(Message::End { lane: id, end });
            lane.end("the queue is exported no more");
        }
    }

    /// The lane of jobs, if it lives.
    pub(crate) fn lane(&self) -> Option<Arc<LaneSender>> {
        let lane = lock(&self.jobs_lane).sender.clone();
        lane.filter(|lane| lane.ended().is_none())
    }

    /// Jobs go over this lane from now on, also those that the peer has.
    pub(crate) fn connect(&self, lane: Arc<LaneSender>) -> Option<Arc<LaneSender>> {
        let begun = JobsLane {
            sender: Some(lane),
            ..JobsLane::default()
        };
        std::mem::replace(&mut *lock(&self.jobs_lane), begun).sender
    }

    /// The peer has that many workers for a lane of jobs. Does not wait.
    pub(crate) fn announced(&self, jobs: &Id, workers: u32) {
        let mut lane = lock(&self.jobs_lane);
        if lane.is(jobs) {
            lane.workers = (workers as usize).min(CARRIERS_MAX);
        }
    }

    pub(crate) fn workers(&self) -> usize {
        lock(&self.jobs_lane).workers
    }

    pub(crate) fn repeated(&self) -> u64 {
        self.repeated.load(Ordering::Relaxed)
    }

    pub(crate) fn held(&self) -> usize {
        lock(&self.jobs).len()
    }

    /// The lane, while the peer is reachable and has a worker for this carrier.
    fn lane_of(&self, carrier: usize) -> Option<Arc<LaneSender>> {
        self.lane().filter(|_| carrier < self.workers())
    }

    /// Carries jobs one by one, until the export is over.
    pub(crate) fn carry_all(&self, carrier: usize) {
        let Ok(stream) = self.options.device.stream() else {
            return self.end();
        };
        if carrier == 0 {
            match self.worker() {
                Ok(_) => self.is_queue.store(true, Ordering::Release),
                Err(_) => return self.end(),
            }
        }
        let mut worker = None;
        while !self.is_over() {
            if self.lane_of(carrier).is_none() {
                // What was given to it and not leased goes to other workers.
                worker = None;
                std::thread::park_timeout(SLICE);
                continue;
            }
            let current = match worker.take().map_or_else(|| self.worker(), Ok) {
                Ok(current) => worker.insert(current),
                Err(_) => {
                    std::thread::park_timeout(SLICE);
                    continue;
                }
            };
            match current.lease(&stream, SLICE) {
                Ok(lease) => self.carry(carrier, lease, &stream),
                Err(Local::Timeout { .. }) => {}
                Err(_) => worker = None,
            }
        }
    }

    fn worker(&self) -> Result<Worker> {
        let worker = Worker::open(
            &self.name,
            WorkerOptions {
                memory_limit: self.options.memory_limit,
                answer_timeout: SLICE,
                ..self.options.domain.on(&self.options.device)
            },
            Duration::ZERO,
        )?;
        Ok(worker)
    }

    fn carry(&self, carrier: usize, lease: Lease, stream: &Stream) {
        let metadata = lease.metadata().to_vec();
        let (input, answer) = (lease.input, lease.answer_handle);
        let number = NEXT_JOB.fetch_add(1, Ordering::Relaxed);
        let job = Arc::new(Job::new(answer));
        lock(&self.jobs).insert(number, job.clone());
        let mut last_word = Instant::now();
        let mut sent_on = None;
        while !job.wait_briefly(sent_on.is_none()) {
            // A peer with fewer workers than before still does the jobs that it has.
            let lane = if sent_on.is_none() {
                self.lane_of(carrier)
            } else {
                self.lane().filter(|_| self.workers() > 0)
            };
            let is_lost = lane.is_none() && last_word.elapsed() >= self.options.lease;
            if self.is_over() || is_lost {
                self.give_back(&job, number);
                continue;
            }
            let Some(lane) = lane else {
                sent_on = sent_on.or(Some(Id::default()));
                continue;
            };
            if sent_on != Some(lane.lane) {
                sent_on = Some(lane.lane);
                if let Err(reason) = self.send(&lane, &job, &input, number, &metadata, stream) {
                    self.reply(&job, |answer, wait| answer.fail(&reason, wait));
                }
            }
            // However long the job was on its way: if the lane has ended, that was just now.
            last_word = Instant::now();
        }
        lock(&self.jobs).remove(&number);
    }

    /// Answers a job, however long the queue's owner has no room for the answer.
    fn reply(
        &self,
        job: &Job,
        mut reply: impl FnMut(AnswerHandle, Duration) -> std::result::Result<(), AnswerError>,
    ) {
        let mut tries = 0;
        while let Some(answer) = job.take() {
            job.put(try_reply(answer, false, &mut reply));
            tries += 1;
            if self.is_over() && tries >= LAST_TRIES {
                return job.put(None);
            }
        }
    }

    fn give_back(&self, job: &Job, number: u64) {
        self.reply(job, |answer, wait| answer.requeue(wait));
        if let Some(lane) = self.lane() {
            let lane_id = lane.lane;
            let _ = lane.send(&Message::Taken {
                lane: lane_id,
                number,
            });
        }
    }

    /// Sends the input. An error for a job that cannot be sent at all; a lane that ends is none.
    fn send(
        &self,
        lane: &LaneSender,
        job: &Job,
        input: &Sample,
        number: u64,
        metadata: &[u8],
        stream: &Stream,
    ) -> Result<(), String> {
        let bytes = input.layout().bytes();
        if bytes > self.options.tensor_bytes_max {
            return Err(format!("its {bytes} bytes are more than the bridge takes"));
        }
        loop {
            match input.wait(SLICE) {
                Ok(()) => break,
                Err(Local::Timeout { .. }) if lane.ended().is_none() => {}
                Err(Local::Timeout { .. }) => return Ok(()),
                Err(error) => return Err(error.to_string()),
            }
        }
        let Some(_turn) = lane.turn() else {
            return Ok(());
        };
        // On a new lane its outcome may come while others are sent.
        if matches!(*lock(&job.answer), JobAnswer::Given) {
            return Ok(());
        }
        let tensor = Tensor::new(Tag::Job { number }, input.layout(), metadata);
        // SAFETY: the data is complete, and the caller keeps the input, which keeps its slot mapped
        // and unwritten.
        let content = unsafe { Content::device(input.slot_ptr(), bytes, stream, None) };
        if let Err(error) = lane.send_tensor(tensor, &content, self.options.part_bytes) {
            lane.end(&error.to_string());
        }
        Ok(())
    }

    /// The lane of jobs has its lane of results.
    pub(crate) fn has_results(&self) -> bool {
        lock(&self.jobs_lane).has_results
    }

    /// Whether this is the present lane of jobs.
    fn is_present(&self, jobs: &Id) -> bool {
        self.lane().is_some_and(|lane| lane.lane == *jobs)
    }

    /// Answers jobs with the results that a lane brings, until it ends, or the lane of jobs that it
    /// belongs to.
    pub(crate) fn take_results(&self, lane: &LaneReceiver, jobs: &Id) {
        let mut lane_of_jobs = lock(&self.jobs_lane);
        lane_of_jobs.has_results |= lane_of_jobs.is(jobs);
        drop(lane_of_jobs);
        let ended = self.answer_all(lane, jobs);
        let reason = match ended {
            Ok(Ending::Fault(reason)) => reason,
            Ok(_) => "the results' lane ended".to_owned(),
            Err(error) => error.to_string(),
        };
        let lane_id = lane.lane;
        let reason = bounded(&reason);
        let _ = lane.send(&Message::Stop {
            lane: lane_id,
            reason: reason.clone(),
        });
        // Jobs without results help nobody: both lanes begin anew.
        if let Some(of) = self.lane().filter(|of| of.lane == *jobs) {
            of.end(&reason);
        }
    }

    fn answer_all(&self, lane: &LaneReceiver, jobs: &Id) -> Result<Ending> {
        let stream = self.options.device.stream()?;
        lane.accept(0)?;
        let (mut assembly, mut left_out, mut behind) = (None, false, 0);
        loop {
            let is_last = match lane.next() {
                Err(ending) => return Ok(ending),
                Ok(_) if self.is_over() => return Ok(Ending::Cut),
                Ok(Some((part, payload))) => {
                    if let Err(reason) =
                        self.take_part(lane, &mut assembly, &mut left_out, part, &payload, &stream)?
                    {
                        return Ok(Ending::Fault(reason));
                    }
                    drop(payload);
                    lane.taken()?;
                    false
                }
                Ok(None) if !self.is_present(jobs) => return Ok(Ending::Cut),
                Ok(None) => true,
            };
            // Those behind it that had come are taken: both lanes begin anew, and it is sent again.
            if left_out && assembly.is_none() {
                if is_last || behind == CARRIERS_MAX {
                    let reason = "there was no room for a result, which is sent again";
                    return Ok(Ending::Fault(reason.into()));
                }
                behind += 1;
            }
        }
    }

    fn take_part(
        &self,
        lane: &LaneReceiver,
        assembly: &mut Option<Assembly<ResultTarget>>,
        left_out: &mut bool,
        mut part: Part,
        payload: &ZBytes,
        stream: &Stream,
    ) -> Result<Result<(), String>> {
        if let Some(tensor) = part.tensor.take() {
            if assembly.is_some() {
                return Ok(Err(
                    "a result began before the one before it was whole".into()
                ));
            }
            let layout = match tensor.layout(None) {
                Ok(layout) => layout,
                Err(reason) => return Ok(Err(reason)),
            };
            let (mut slot, mut fate) = (None, ResultFate::Answers);
            match tensor.tag {
                Tag::Result { number } => match self.output(lane, number, &layout, *left_out)? {
                    Output::Slot(loan) => slot = Some(*loan),
                    Output::Unwanted => {}
                    Output::Refused(reason) => fate = ResultFate::Refused(reason),
                    Output::NoRoom => fate = ResultFate::LeftOut,
                },
                Tag::Failed { .. } if layout.bytes() == 0 => {}
                Tag::Failed { .. } => return Ok(Err("a failure came with bytes".into())),
                Tag::Sample { .. } | Tag::Job { .. } => {
                    return Ok(Err("a lane of results brought something else".into()));
                }
            }
            let stream = stream.clone();
            let target = ResultTarget {
                target: Target { slot, stream },
                fate,
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
            // SAFETY: `add` found the range inside the slot, which is this loan's alone until the
            // answer, or until it is given back, behind the same stream.
            unsafe {
                upload(
                    payload,
                    &self.options.device,
                    stream,
                    loan.slot_ptr() + part.offset,
                )?;
            }
        }
        if !current.is_whole() {
            return Ok(Ok(()));
        }
        match assembly.take() {
            Some(whole) => {
                *left_out |= !self.answer(lane, whole, *left_out)?;
                Ok(Ok(()))
            }
            None => Ok(Ok(())),
        }
    }

    /// Memory for the result of a job that waits for it.
    fn output(
        &self,
        lane: &LaneReceiver,
        number: u64,
        layout: &warpipe::Layout,
        is_behind: bool,
    ) -> Result<Output> {
        let Some(job) = lock(&self.jobs).get(&number).cloned() else {
            return Ok(Output::Unwanted);
        };
        let (bytes, most) = (layout.bytes(), self.options.tensor_bytes_max);
        if bytes > most {
            let reason = format!("its result has {bytes} bytes, the bridge takes {most}");
            return Ok(Output::Refused(reason));
        }
        for _ in 0..slices(is_behind) {
            let Some(handle) = job.take() else {
                return Ok(Output::Unwanted);
            };
            let tried = handle.output(layout);
            job.put(Some(handle));
            match tried {
                Ok(loan) => return Ok(Output::Slot(Box::new(loan))),
                Err(Local::Limit(LimitFault::Memory { bytes, limit, .. })) if bytes > limit => {
                    let reason = format!("its result has {bytes} bytes, the bridge has {limit}");
                    return Ok(Output::Refused(reason));
                }
                Err(Local::Limit(LimitFault::Memory { .. }) | Local::Timeout { .. }) => {}
                Err(Local::Limit(LimitFault::Device { .. })) => lane.wait_for_end(SLICE),
                Err(Local::PeerGone { .. }) => return Ok(Output::Unwanted),
                Err(error) => return Err(error.into()),
            }
            if self.is_over() || lane.is_cut() {
                break;
            }
        }
        Ok(Output::NoRoom)
    }

    /// Answers the job of an outcome. False for one that is left out, as there was no room.
    fn answer(
        &self,
        lane: &LaneReceiver,
        mut whole: Assembly<ResultTarget>,
        is_behind: bool,
    ) -> Result<bool> {
        let (Tag::Result { number } | Tag::Failed { number, .. }) = whole.tag else {
            return Ok(true);
        };
        let job = lock(&self.jobs).get(&number).cloned();
        match (whole.tag, &whole.target.fate) {
            (_, ResultFate::LeftOut) => return Ok(false),
            (_, ResultFate::Refused(reason)) => {
                let reply = |answer: AnswerHandle, wait| answer.fail(reason, wait);
                if !self.reply_once(job.as_deref(), is_behind, reply) {
                    return Ok(false);
                }
            }
            (
                Tag::Failed {
                    reason, is_final, ..
                },
                _,
            ) => {
                let reply = |answer: AnswerHandle, wait| match is_final {
                    true => answer.reject(&reason, wait),
                    false => answer.fail(&reason, wait),
                };
                if !self.reply_once(job.as_deref(), is_behind, reply) {
                    return Ok(false);
                }
            }
            _ => match (
                job.as_ref().and_then(|job| job.take().map(|it| (job, it))),
                whole.target.target.slot.take(),
            ) {
                (Some((job, answer)), Some(mut loan)) => {
                    let _ = loan.set_metadata(&whole.metadata);
                    let back = try_reply(answer, is_behind, |answer, wait| {
                        answer.complete(Some(loan), &whole.target.target.stream, wait)
                    });
                    let is_answered = back.is_none();
                    job.put(back);
                    if !is_answered {
                        return Ok(false);
                    }
                    LaneCounts::add(&lane.counts.tensors, 1);
                    LaneCounts::add(&lane.counts.bytes, whole.layout.bytes());
                }
                // The queue's owner has gone: its slot could not be had.
                (Some((job, answer)), None) => {
                    let back = try_reply(answer, is_behind, |answer, wait| answer.requeue(wait));
                    let is_answered = back.is_none();
                    job.put(back);
                    if !is_answered {
                        return Ok(false);
                    }
                }
                // It came a second time, or after the job had gone back.
                (None, _) => LaneCounts::add(&self.repeated, 1),
            },
        }
        if let Some(jobs) = self.lane() {
            let taken = Message::Taken {
                lane: jobs.lane,
                number,
            };
            jobs.send(&taken)?;
        }
        Ok(true)
    }

    /// Answers without a result. False if there was no room for it.
    fn reply_once(
        &self,
        job: Option<&Job>,
        is_behind: bool,
        reply: impl FnOnce(AnswerHandle, Duration) -> std::result::Result<(), AnswerError>,
    ) -> bool {
        let taken = job.and_then(|job| job.take().map(|answer| (job, answer)));
        let Some((job, answer)) = taken else {
            LaneCounts::add(&self.repeated, 1);
            return true;
        };
        let back = try_reply(answer, is_behind, reply);
        let is_answered = back.is_none();
        job.put(back);
        is_answered
    }
}

/// Where the bytes of a result go, and what becomes of it.
struct ResultTarget {
    target: Target<Loan>,
    fate: ResultFate,
}

enum ResultFate {
    Answers,
    /// The attempt fails for this reason.
    Refused(String),
    /// There was no room: it is sent again on another lane.
    LeftOut,
}

impl Job {
    /// As [`wait`](Self::wait); at once before the job was sent at all.
    fn wait_briefly(&self, is_first: bool) -> bool {
        !is_first && self.wait()
    }
}

/// How many slices an answer, or memory for it, is waited for that has no room: the outcomes behind it
/// wait meanwhile. Only one behind one that was left out.
fn slices(is_behind: bool) -> u32 {
    if is_behind { 1 } else { 10 }
}

/// How often all of that is tried when the export has ended.
const LAST_TRIES: u32 = 5;

/// Answers. The handle comes back if there was no room.
fn try_reply(
    answer: AnswerHandle,
    is_behind: bool,
    reply: impl FnOnce(AnswerHandle, Duration) -> std::result::Result<(), AnswerError>,
) -> Option<AnswerHandle> {
    match reply(answer, slices(is_behind) * SLICE) {
        Err(failed) if matches!(failed.error, Local::Timeout { .. }) => {
            failed.returned.answer_handle.map(|handle| *handle)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use warpipe::{DType, Layout, Queue};

    use super::*;
    use crate::lane::ReceiveMemory;
    use crate::lane::tests::{blocked, comes_back_behind, options, window};
    use crate::session;

    #[test]
    fn a_lane_of_results_ends_with_its_lane_of_jobs_and_ends_no_other_one() {
        let (_folder, options) = options();
        let (_session, outbox) = session::alone(&options);
        let export = QueueExport::new("work", [2; 16], &options);
        let jobs = |id: u8| Arc::new(LaneSender::new([id; 16], [2; 16], outbox.clone()));
        export.connect(jobs(1));
        let results = LaneReceiver::new([3; 16], [2; 16], window(), outbox.clone());
        std::thread::scope(|scope| {
            let taking = scope.spawn(|| export.take_results(&results, &[1; 16]));
            while !export.has_results() {
                std::thread::yield_now();
            }
            assert!(!taking.is_finished());
            export.connect(jobs(4));
        });
        assert_eq!(export.lane().unwrap().lane, [4; 16], "it lives");
        assert!(!export.has_results());
    }

    #[test]
    fn a_result_without_room_is_sent_again_however_many_others_come_behind_it() {
        let (_folder, options) = options();
        let mut options = Options::clone(&options);
        options.memory_limit = 2 << 20;
        let options = Arc::new(options);
        let (_session, outbox) = session::alone(&options);
        let queue = Queue::new("work", options.domain.on(&options.device)).unwrap();
        let stream = options.device.stream().unwrap();
        let _job = queue.submit_bytes(b"work", &stream).unwrap();
        let export = QueueExport::new("work", [2; 16], &options);
        let mut worker = export.worker().unwrap();
        let long = Duration::from_secs(300);
        let lease = worker.lease(&stream, long).unwrap();
        let (_input, answer) = (lease.input, lease.answer_handle);
        let _full = answer
            .output(&Layout::bytes_only(2 << 20).unwrap())
            .unwrap();
        lock(&export.jobs).insert(1, Arc::new(Job::new(answer)));
        let jobs = Arc::new(LaneSender::new([1; 16], [2; 16], outbox.clone()));
        export.connect(jobs.clone());
        let window = ReceiveMemory::new(64, 1 << 20, 256 << 20).window();
        let results = LaneReceiver::new([3; 16], [2; 16], window, outbox);
        results.accept(0).unwrap();
        let layout = Layout::contiguous(DType::U8, &[1]).unwrap();
        for number in 1..=64 {
            // Of the others nobody waits for any.
            let tensor = Tensor::new(Tag::Result { number }, &layout, b"");
            let part = Part {
                lane: [3; 16],
                number,
                offset: 0,
                tensor: Some(tensor),
                more: Vec::new(),
            };
            results.put(part, vec![7].into());
        }
        export.take_results(&results, &[1; 16]);
        let reason = jobs.ended().unwrap();
        assert!(reason.contains("is sent again"), "{reason}");
        assert_eq!(export.repeated(), CARRIERS_MAX as u64);
        assert_eq!(export.held(), 1);
    }

    #[test]
    fn what_is_said_of_a_lane_of_jobs_says_nothing_of_the_next_one() {
        let (_folder, options) = options();
        let (_session, outbox) = session::alone(&options);
        let export = QueueExport::new("work", [2; 16], &options);
        let jobs = |id: u8| Arc::new(LaneSender::new([id; 16], [2; 16], outbox.clone()));
        export.connect(jobs(1));
        export.announced(&[1; 16], 3);
        assert_eq!(export.workers(), 3);
        export.connect(jobs(2));
        export.announced(&[1; 16], 3);
        let results = LaneReceiver::new([3; 16], [2; 16], window(), outbox.clone());
        export.take_results(&results, &[1; 16]);
        assert_eq!((export.workers(), export.has_results()), (0, false));
        export.announced(&[2; 16], 1000);
        assert_eq!(export.workers(), CARRIERS_MAX);
    }

    /// Ends the export also when an assertion fails.
    struct Ends<'a>(&'a QueueExport);

    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            self.0.end();
        }
    }

    #[test]
    fn a_job_that_is_on_its_way_for_longer_than_the_lease_does_not_go_back_while_its_lane_lives() {
        let (_folder, options) = options();
        let mut options = Options::clone(&options);
        options.lease = 2 * SLICE;
        let options = Arc::new(options);
        let (_session, outbox) = session::alone(&options);
        let queue = Queue::new("work", options.domain.on(&options.device)).unwrap();
        let given = options.device.stream().unwrap();
        let job = queue.submit_bytes(b"work", &given).unwrap();
        let export = QueueExport::new("work", [2; 16], &options);
        let lane = Arc::new(LaneSender::new([1; 16], [2; 16], outbox));
        lane.ready(0, 0);
        export.connect(lane.clone());
        export.announced(&[1; 16], 1);
        std::thread::scope(|scope| {
            scope.spawn(|| export.carry_all(0));
            let _ends = Ends(&export);
            while export.held() == 0 {
                std::thread::yield_now();
            }
            // No credit comes for longer than the lease.
            assert!(!lane.wait_credit(4 * SLICE));
            lane.grant(8);
            while lane.counts.tensors.load(Ordering::Relaxed) == 0 {
                std::thread::yield_now();
            }
            let outcome = job.wait(&given, 4 * SLICE);
            assert!(matches!(outcome, Err(Local::Timeout { .. })), "{outcome:?}");
            let sent = lane.counts.tensors.load(Ordering::Relaxed);
            // The lane lives: it was sent once, and has not gone back.
            assert_eq!((sent, export.held()), (1, 1));
            lane.end("the peer is unreachable");
            while queue.state().unwrap().waiting == 0 {
                std::thread::yield_now();
            }
        });
    }

    #[test]
    fn the_slot_of_a_result_that_is_cut_off_goes_back_behind_the_copy_to_it() {
        let (_folder, options) = options();
        let (_session, outbox) = session::alone(&options);
        let lane = LaneReceiver::new([1; 16], [2; 16], window(), outbox);
        let queue = Queue::new("work", options.domain.on(&options.device)).unwrap();
        let export = QueueExport::new("work", [2; 16], &options);
        let mut worker = export.worker().unwrap();
        let layout = Layout::contiguous(DType::U8, &[16]).unwrap();
        let given = options.device.stream().unwrap();
        let _job = queue.submit(queue.loan(&layout).unwrap(), &given).unwrap();
        let long = Duration::from_secs(300);
        let lease = worker.lease(&given, long).unwrap();
        let (_input, answer) = (lease.input, lease.answer_handle);
        lock(&export.jobs).insert(1, Arc::new(Job::new(answer)));
        let part = Part {
            lane: [1; 16],
            number: 1,
            offset: 0,
            tensor: Some(Tensor::new(Tag::Result { number: 1 }, &layout, b"")),
            more: Vec::new(),
        };
        let (stream, go) = blocked(&options.device);
        let (mut result, half) = (None, vec![7; 8].into());
        let took = export.take_part(&lane, &mut result, &mut false, part, &half, &stream);
        took.unwrap().unwrap();
        let returned = result
            .as_ref()
            .unwrap()
            .target
            .target
            .slot
            .as_ref()
            .unwrap()
            .returned();
        drop(result);
        comes_back_behind(go, &returned);
    }
}
