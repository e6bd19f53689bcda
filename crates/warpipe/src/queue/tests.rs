//! A queue against workers that break the protocol, and a worker against such a queue.

use std::cell::Cell;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use warpipe_testkit::{TempDir, temporary_folder};

use super::wire::{Answer, AnswerKind, DeliveryTag};
use super::{Queue, QueueOptions, Worker, WorkerOptions};
use crate::device::Device;
use crate::error::{Error, JobEnd, LimitFault, Result, StateFault};
use crate::hostile::alone;
use crate::ipc::Kind;
use crate::ipc::domain::Domain;
use crate::memory::arena::SLOTS_MAX;
use crate::pubsub::PublisherRole;
use crate::pubsub::entry::Metadata;
use crate::pubsub::{Policy, Publisher, REPLIES, Sample, Subscriber, SubscriberChanges};
use crate::runtime::reactor::Reactor;
use crate::stream::Stream;
use crate::tensor::Layout;
use crate::wait::Wait;
use crate::{PublisherOptions, SubscriberOptions};

pub(super) const SOON: Duration = Duration::from_secs(10);

/// The domain and devices of one test.
pub(super) struct QueueFixture {
    _folder: TempDir,
    pub(super) domain: Domain,
    pub(super) device: Device,
    pub(super) stream: Stream,
}

impl QueueFixture {
    pub(super) fn new() -> QueueFixture {
        QueueFixture::on(Device::host())
    }

    pub(super) fn on(device: Device) -> QueueFixture {
        let folder = temporary_folder().unwrap();
        QueueFixture {
            domain: Domain::at(folder.path()).unwrap(),
            stream: device.stream().unwrap(),
            _folder: folder,
            device,
        }
    }

    pub(super) fn queue(&self) -> Queue {
        self.build(|it| it)
    }

    pub(super) fn build(&self, pick_worker: impl FnOnce(QueueOptions) -> QueueOptions) -> Queue {
        Queue::new("jobs", pick_worker(self.domain.on(&self.device))).unwrap()
    }

    pub(super) fn worker(&self) -> Worker {
        Worker::open(
            "jobs",
            WorkerOptions {
                answer_timeout: SOON,
                ..self.domain.on(&self.device)
            },
            Duration::ZERO,
        )
        .unwrap()
    }
}

/// A worker of a bare subscriber and publisher, which sends the answers that a test chooses.
struct FakeWorker<'a> {
    fixture: &'a QueueFixture,
    answers: Publisher,
    jobs: Subscriber,
}

impl<'a> FakeWorker<'a> {
    fn new(fixture: &'a QueueFixture) -> FakeWorker<'a> {
        let at = (&fixture.domain, &fixture.device);
        let options: SubscriberOptions = at.0.on(at.1);
        let jobs = Subscriber::to_kind("jobs", options, (Kind::Queue, true), Duration::ZERO);
        let jobs = jobs.unwrap();
        let options = PublisherOptions {
            policy: Policy::Block { timeout: SOON },
            ..at.0.on(at.1)
        };
        let answers = Publisher::over(&jobs, options, Kind::Publisher).unwrap();
        FakeWorker {
            fixture,
            answers,
            jobs,
        }
    }

    fn take(&mut self) -> (Sample, DeliveryTag) {
        let sample = self.jobs.receive(&self.fixture.stream, SOON).unwrap();
        let tag = DeliveryTag::decode(sample.metadata()).unwrap();
        (sample, tag)
    }

    fn say(&self, metadata: &Metadata) {
        let empty = self.answers.loan(&Layout::bytes_only(0).unwrap()).unwrap();
        // The queue may have closed the link by now.
        let _ = empty.send_to(REPLIES, metadata, &self.fixture.stream, None);
    }

    fn answer(&self, job: u64, number: u32, kind: AnswerKind) {
        self.say(&Answer { job, number, kind }.encode(b"").unwrap());
    }

    /// Its link has failed, in both directions.
    fn is_thrown_out(&mut self) {
        let start = Instant::now();
        loop {
            match self.jobs.receive(&self.fixture.stream, SOON) {
                Ok(job) => drop(job),
                Err(Error::State(StateFault::LinkClosed { .. })) => break,
                Err(other) => panic!("a liar was told {other}"),
            }
        }
        while self.answers.has_subscriber(REPLIES) {
            assert!(start.elapsed() < SOON, "the queue still listens to a liar");
            std::thread::yield_now();
        }
    }
}

/// A job that a hostile worker was given, and broke its link over, is then done by a correct
/// worker.
fn survives(lie: impl FnOnce(&FakeWorker<'_>, DeliveryTag)) {
    let fixture = QueueFixture::new();
    let queue = fixture.queue();
    let mut fake_worker = FakeWorker::new(&fixture);
    queue.wait_for_workers(1, SOON).unwrap();
    let job = queue.submit_bytes(b"work", &fixture.stream).unwrap();
    let (sample, tag) = fake_worker.take();
    lie(&fake_worker, tag);
    fake_worker.is_thrown_out();
    drop(sample);
    let mut honest = fixture.worker();
    let lease = honest.lease(&fixture.stream, SOON).unwrap();
    assert_eq!((lease.job, lease.attempt), (job.id(), 2));
    lease.complete(None, &fixture.stream).unwrap();
    assert_eq!(job.wait(&fixture.stream, SOON).unwrap().attempt, 2);
}

#[test]
fn an_answer_to_a_job_that_its_worker_does_not_hold_ends_its_link_alone() {
    survives(|fake_worker, tag| fake_worker.answer(tag.job + 1, tag.number, AnswerKind::Completed));
}

#[test]
fn an_answer_with_a_tag_that_was_not_delivered_ends_its_link_alone() {
    survives(|fake_worker, tag| fake_worker.answer(tag.job, tag.number + 1, AnswerKind::Returned));
}

#[test]
fn a_second_answer_to_the_same_job_ends_its_link_alone() {
    let fixture = QueueFixture::new();
    let queue = fixture.queue();
    let mut fake_worker = FakeWorker::new(&fixture);
    queue.wait_for_workers(1, SOON).unwrap();
    let job = queue.submit_bytes(b"work", &fixture.stream).unwrap();
    let (sample, tag) = fake_worker.take();
    fake_worker.answer(tag.job, tag.number, AnswerKind::Completed);
    fake_worker.answer(
        tag.job,
        tag.number,
        AnswerKind::Failed("no, it was not".into()),
    );
    fake_worker.is_thrown_out();
    drop(sample);
    assert_eq!(
        job.wait(&fixture.stream, SOON).unwrap().attempt,
        1,
        "the first answer counts"
    );
}

#[test]
fn garbage_for_an_answer_ends_its_link_alone() {
    for bytes in [&b""[..], &[0; 13], &[9; 40], &[1; 12], &[255; 256]] {
        survives(|fake_worker, _| fake_worker.say(&Metadata::new(bytes).unwrap()));
    }
}

#[test]
fn a_worker_that_gets_garbage_for_a_job_says_so_and_closes_its_link() {
    let fixture = QueueFixture::new();
    let changes = Arc::new(SubscriberChanges::new().unwrap());
    let role = PublisherRole {
        kind: Kind::Queue,
        observer: Some(changes.clone()),
        replies: 4,
    };
    let queue = Publisher::with_role("jobs", fixture.domain.on(&fixture.device), role).unwrap();
    for bytes in [&b""[..], &[0; 25], &[1; 24], &[1; 256]] {
        let mut worker = fixture.worker();
        let mut sample = queue.loan(&Layout::bytes_only(8).unwrap()).unwrap();
        sample.set_metadata(bytes).unwrap();
        sample.send(&fixture.stream).unwrap();
        let told: Result<_> = worker.lease(&fixture.stream, SOON);
        assert!(
            matches!(told, Err(Error::Protocol { .. })),
            "garbage for a job gave {told:?}"
        );
        let after = worker.lease(&fixture.stream, SOON);
        assert!(
            matches!(after, Err(Error::State(StateFault::LinkClosed { .. }))),
            "after that came {after:?}"
        );
    }
}

#[test]
fn a_loan_of_another_queue_is_refused_and_given_back() {
    let fixture = QueueFixture::new();
    let queue = fixture.queue();
    let other = Queue::new("other", fixture.domain.on(&fixture.device)).unwrap();
    let loan = other.loan(&Layout::bytes_only(8).unwrap()).unwrap();
    let refused = queue.submit(loan, &fixture.stream).unwrap_err();
    assert!(matches!(refused.error, Error::Argument { .. }));
    assert!(
        other
            .submit(*refused.returned.unwrap(), &fixture.stream)
            .is_ok()
    );
}

#[test]
fn an_output_of_another_lease_is_refused_and_given_back() {
    let fixture = QueueFixture::new();
    let (queue, mut worker) = (fixture.queue(), fixture.worker());
    let jobs = [0, 1].map(|_| queue.submit_bytes(b"work", &fixture.stream).unwrap());
    let [a, b] = [0, 1].map(|_| worker.lease(&fixture.stream, SOON).unwrap());
    let (first, second) = (a.answer_handle, b.answer_handle);
    let mut output = first.output(&Layout::bytes_only(5).unwrap()).unwrap();
    output.write(&fixture.stream, b"first").unwrap();
    let refused = second
        .complete(Some(output), &fixture.stream, SOON)
        .unwrap_err();
    let text = refused.error.to_string();
    assert!(
        matches!(
            refused.error,
            Error::Argument {
                argument: "output",
                ..
            }
        ),
        "{text}"
    );
    assert!(
        jobs.iter()
            .all(|job| text.contains(&format!("of job {}, attempt 1", job.id()))),
        "{text}"
    );
    first
        .complete(
            refused.returned.output.map(|output| *output),
            &fixture.stream,
            SOON,
        )
        .unwrap();
    refused
        .returned
        .answer_handle
        .unwrap()
        .complete(None, &fixture.stream, SOON)
        .unwrap();
    let results = jobs.map(|job| {
        job.wait(&fixture.stream, SOON)
            .unwrap()
            .to_vec(SOON)
            .unwrap()
    });
    assert_eq!(results, [b"first".to_vec(), vec![]]);
}

#[test]
fn many_threads_submit_and_wait_at_once_and_each_gets_its_own() {
    let fixture = QueueFixture::new();
    let queue = fixture.queue();
    let working = |fixture: &QueueFixture| {
        let (mut worker, stream) = (fixture.worker(), fixture.device.stream().unwrap());
        let mut done = 0;
        loop {
            match worker.lease(&stream, SOON) {
                Ok(lease) => {
                    let mut output = lease.output(lease.layout()).unwrap();
                    output.write(&stream, &lease.to_vec(SOON).unwrap()).unwrap();
                    lease.complete(output, &stream).unwrap();
                    done += 1;
                }
                Err(Error::PeerGone { .. }) => return done,
                Err(other) => panic!("{other}"),
            }
        }
    };
    let queue = Arc::new(queue);
    let submitting = |thread: u8, queue: Arc<Queue>, stream: Stream| {
        for round in 0..100 {
            let job = queue.submit_bytes(&[thread, round], &stream).unwrap();
            assert_eq!(
                job.wait(&stream, SOON).unwrap().to_vec(SOON).unwrap(),
                [thread, round]
            );
        }
    };
    let done: u32 = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..2).map(|_| scope.spawn(|| working(&fixture))).collect();
        let submit = |thread| {
            let (queue, stream) = (queue.clone(), fixture.device.stream().unwrap());
            scope.spawn(move || submitting(thread, queue, stream))
        };
        let submitters: Vec<_> = (0..4).map(submit).collect();
        submitters
            .into_iter()
            .for_each(|submitter| submitter.join().unwrap());
        drop(queue);
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap())
            .sum()
    });
    assert_eq!(done, 400);
}

/// More results than a worker's ring has entries, and more than one packet returns.
const KEPT: usize = 300;

#[test]
fn results_that_are_kept_hold_up_no_job() {
    let fixture = QueueFixture::new();
    let queue = fixture.queue();
    let worker = fixture.worker();
    let answers = worker.answers.clone();
    let working = std::thread::spawn({
        let (mut worker, stream) = (worker, fixture.stream.clone());
        move || {
            for _ in 0..KEPT {
                let lease = worker.lease(&stream, SOON).unwrap();
                let bytes = lease.to_vec(SOON).unwrap();
                let mut output = lease.output(lease.layout()).unwrap();
                output.write(&stream, &bytes).unwrap();
                lease.complete(output, &stream).unwrap();
            }
            worker
        }
    });
    let submit = |number: usize| {
        let bytes = number.to_le_bytes();
        queue.submit_bytes(&bytes, &fixture.stream).unwrap()
    };
    let jobs: Vec<_> = (0..KEPT).map(submit).collect();
    let kept: Vec<_> = jobs
        .iter()
        .map(|job| job.wait(&fixture.stream, SOON).unwrap())
        .collect();
    let worker = working.join().unwrap();
    for (number, result) in kept.iter().enumerate() {
        assert_eq!(result.to_vec(SOON).unwrap(), number.to_le_bytes());
    }
    let in_flight = || answers.publisher.subscribers()[0].in_flight;
    assert_eq!(
        in_flight(),
        KEPT as u32,
        "each is lent as long as it is kept"
    );
    drop(kept);
    let start = Instant::now();
    while in_flight() > 0 {
        assert!(start.elapsed() < SOON, "{} are not back", in_flight());
        std::thread::yield_now();
    }
    drop((worker, queue));
}

#[test]
fn more_jobs_wait_for_a_worker_than_a_publisher_has_slots_at_first() {
    const COUNT: usize = SLOTS_MAX + 10;
    let fixture = QueueFixture::new();
    let queue = fixture.queue();
    (0..COUNT).for_each(|_| drop(queue.submit_bytes(b"1", &fixture.stream).unwrap()));
    assert_eq!(queue.state().unwrap().waiting, COUNT);
    let mut worker = fixture.worker();
    for _ in 0..COUNT {
        let lease = worker.lease(&fixture.stream, SOON).unwrap();
        lease.complete(None, &fixture.stream).unwrap();
    }
    queue.drain(SOON).unwrap();
    assert_eq!(queue.state().unwrap().finished, COUNT);
}

#[test]
fn a_job_that_waits_for_its_data_holds_up_none_behind_it() {
    let fixture = QueueFixture::new();
    let queue = fixture.queue();
    let late = fixture.device.stream().unwrap();
    let (go, gate) = std::sync::mpsc::channel::<()>();
    late.call(move || assert!(gate.recv().is_err())).unwrap();
    let first = queue.submit_bytes(b"late", &late).unwrap();
    let second = queue.submit_bytes(b"early", &fixture.stream).unwrap();
    let mut worker = fixture.worker();
    let mut next = || worker.lease(&fixture.stream, SOON).unwrap();
    let lease = next();
    assert_eq!(lease.job, second.id());
    lease.complete(None, &fixture.stream).unwrap();
    drop(go);
    let lease = next();
    assert_eq!(lease.job, first.id());
    lease.complete(None, &fixture.stream).unwrap();
    queue.drain(SOON).unwrap();
}

#[test]
fn an_attempt_whose_worker_has_no_memory_left_fails_with_words() {
    let fixture = QueueFixture::new();
    let queue = fixture.build(|it| QueueOptions {
        max_attempts: 1,
        ..it
    });
    // Memory for one region.
    let options = WorkerOptions {
        memory_limit: 2 << 20,
        answer_timeout: Duration::from_millis(20),
        ..fixture.domain.on(&fixture.device)
    };
    let mut worker = Worker::open("jobs", options, Duration::ZERO).unwrap();
    let [first, second] = [0, 1].map(|_| queue.submit_bytes(b"work", &fixture.stream).unwrap());
    let all = Layout::bytes_only(2 << 20).unwrap();
    let mut lease = worker.lease(&fixture.stream, SOON).unwrap();
    let output = lease.output(&all).unwrap();
    lease.complete(output, &fixture.stream).unwrap();
    let kept = first.wait(&fixture.stream, SOON).unwrap();
    lease = worker.lease(&fixture.stream, SOON).unwrap();
    let short = lease.output(&all).unwrap_err();
    assert!(
        matches!(short, Error::Limit(LimitFault::Memory { .. })),
        "{short}"
    );
    lease.fail(&short.to_string()).unwrap();
    let lost = second.wait(&fixture.stream, SOON).unwrap_err();
    assert!(
        lost.to_string().contains("has no room for 2097152 bytes"),
        "{lost}"
    );
    drop(kept);
    let third = queue.submit_bytes(b"work", &fixture.stream).unwrap();
    lease = worker.lease(&fixture.stream, SOON).unwrap();
    lease.complete(None, &fixture.stream).unwrap();
    assert_eq!(third.wait(&fixture.stream, SOON).unwrap().attempt, 1);
}

#[test]
fn an_answer_waits_for_memory_as_long_as_it_is_told_to_and_sleeps_meanwhile() {
    let fixture = QueueFixture::new();
    let queue = fixture.queue();
    let mut worker = Worker::open(
        "jobs",
        WorkerOptions {
            answer_timeout: Duration::ZERO,
            ..fixture.domain.on(&fixture.device)
        },
        Duration::ZERO,
    )
    .unwrap();
    let job = queue.submit_bytes(b"work", &fixture.stream).unwrap();
    let lease = worker.lease(&fixture.stream, SOON).unwrap();
    let answer = lease.answer_handle;
    let nothing = Layout::bytes_only(0).unwrap();
    let outputs: Vec<_> = std::iter::from_fn(|| answer.output(&nothing).ok()).collect();
    let asked = Cell::new(0);
    let cancelled = || asked.replace(asked.get() + 1) == 3;
    let wait = Wait::at_most(SOON).unless(&cancelled);
    let start = Instant::now();
    let failed = answer.complete(None, &fixture.stream, wait).unwrap_err();
    let text = failed.error.to_string();
    assert!(
        matches!(failed.error, Error::Limit(LimitFault::Memory { .. })),
        "{text}"
    );
    assert!(
        start.elapsed() >= 2 * crate::wait::SLICE,
        "it does not sleep"
    );
    let answer = *failed.returned.answer_handle.unwrap();
    drop(outputs);
    answer.complete(None, &fixture.stream, SOON).unwrap();
    drop(job.wait(&fixture.stream, SOON).unwrap());
}

#[test]
fn results_that_nobody_has_taken_yet_hold_up_no_job() {
    let fixture = QueueFixture::new();
    let queue = fixture.queue();
    let mut worker = fixture.worker();
    (0..KEPT).for_each(|_| drop(queue.submit_bytes(b"work", &fixture.stream).unwrap()));
    for _ in 0..KEPT {
        let lease = worker.lease(&fixture.stream, SOON).unwrap();
        lease.complete(None, &fixture.stream).unwrap();
    }
    queue.drain(SOON).unwrap();
    // A result that outlives its worker, and one that is never taken.
    drop(worker);
    let result = queue.next_result(&fixture.stream, SOON).unwrap();
    assert_eq!((result.job, result.to_vec(SOON).unwrap().len()), (1, 0));
    drop(queue);
    result.sample.finish(SOON).unwrap();
}

#[test]
fn a_worker_that_cannot_send_its_answer_loses_its_link_and_not_the_job() {
    // A worker's ring, and one answer more.
    const ANSWERS: u32 = 65;
    let fixture = QueueFixture::new();
    let queue = fixture.build(|it| QueueOptions {
        prefetch: ANSWERS,
        ..it
    });
    let options = WorkerOptions {
        answer_timeout: Duration::from_millis(20),
        ..fixture.domain.on(&fixture.device)
    };
    let mut silent = Worker::open("jobs", options, Duration::ZERO).unwrap();
    queue.wait_for_workers(1, SOON).unwrap();
    let submit = |_| queue.submit_bytes(b"work", &fixture.stream).unwrap();
    let jobs: Vec<_> = (0..ANSWERS).map(submit).collect();
    let mut lease = |_| silent.lease(&fixture.stream, SOON).unwrap();
    let mut leases: Vec<_> = (0..ANSWERS).map(&mut lease).collect();
    // No thread of the queue takes answers meanwhile.
    let guard = queue.dispatcher.lock();
    let last = leases.pop().unwrap();
    for lease in leases {
        lease.complete(None, &fixture.stream).unwrap();
    }
    assert!(matches!(
        last.complete(None, &fixture.stream),
        Err(Error::Timeout { .. })
    ));
    drop(guard);
    let mut other = fixture.worker();
    let lease = other.lease(&fixture.stream, SOON).unwrap();
    assert_eq!(lease.attempt, 2);
    assert!(jobs.iter().any(|job| job.id() == lease.job));
    drop(silent);
}

#[test]
fn jobs_and_results_that_grow_are_carried_in_what_the_limits_leave() {
    let fixture = QueueFixture::new();
    let queue = fixture.build(|it| QueueOptions {
        memory_limit: 64 << 20,
        ..it
    });
    let mut worker = Worker::open(
        "jobs",
        WorkerOptions {
            memory_limit: 64 << 20,
            ..fixture.domain.on(&fixture.device)
        },
        Duration::ZERO,
    )
    .unwrap();
    for mebibytes in [40, 41, 30] {
        let layout = Layout::bytes_only(mebibytes << 20).unwrap();
        let job = queue.loan(&layout).unwrap();
        let job = queue.submit(job, &fixture.stream).unwrap();
        let lease = worker.lease(&fixture.stream, SOON).unwrap();
        let result = lease.output(&layout).unwrap();
        lease.complete(result, &fixture.stream).unwrap();
        let result = job.wait(&fixture.stream, SOON).unwrap();
        assert_eq!(result.layout().bytes(), mebibytes << 20);
    }
}

#[test]
fn a_result_that_comes_after_the_cancellation_stays_also_while_the_wait_polls() {
    for has_handle in [false, true] {
        let fixture = QueueFixture::new();
        let queue = fixture.build(|it| QueueOptions { spin: SOON, ..it });
        let stream = &fixture.stream;
        let mut worker = fixture.worker();
        let job = queue.submit_bytes(b"job", stream).unwrap();
        let lease = worker.lease(stream, SOON).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let is_cancelled = &AtomicBool::new(false);
        let cancelled = || {
            let _ = tell.send(());
            is_cancelled.load(SeqCst)
        };
        std::thread::scope(|scope| {
            scope.spawn(move || {
                told.recv().unwrap();
                is_cancelled.store(true, SeqCst);
                lease.complete(None, stream).unwrap();
            });
            let wait = Wait::at_most(SOON).unless(&cancelled);
            let late = match has_handle {
                true => job.wait(stream, wait),
                false => queue.next_result(stream, wait),
            };
            assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
        });
        let result = match has_handle {
            true => queue.next_result(stream, SOON),
            false => job.wait(stream, SOON),
        };
        assert_eq!(result.unwrap().job, job.id());
    }
}

/// Leases and completes jobs until the queue's graceful end. Returns how many there were.
fn works_until_the_end(mut worker: Worker, stream: Stream) -> std::thread::JoinHandle<usize> {
    std::thread::spawn(move || {
        for done in 0.. {
            match worker.lease(&stream, SOON) {
                Ok(lease) => lease.complete(None, &stream).unwrap(),
                Err(Error::PeerGone { graceful, .. }) => {
                    assert!(graceful, "a shutdown is no loss");
                    return done;
                }
                Err(error) => panic!("{error}"),
            }
        }
        unreachable!("the loop has no other end")
    })
}

#[test]
fn a_shutdown_ends_the_workers_loops_after_the_last_job_and_frees_the_name() {
    let fixture = QueueFixture::new();
    let queue = fixture.queue();
    let jobs: Vec<_> = (0..8u8)
        .map(|n| queue.submit_bytes(&[n], &fixture.stream).unwrap())
        .collect();
    // While jobs wait it returns late, and a worker may still attach.
    let late = queue.shutdown(Duration::ZERO);
    assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
    let workers = [fixture.worker(), fixture.worker()]
        .map(|worker| works_until_the_end(worker, fixture.device.stream().unwrap()));
    // The workers' own links end without another call of this thread.
    let done: usize = workers
        .into_iter()
        .map(|worker| worker.join().unwrap())
        .sum();
    assert_eq!(done, 8);
    queue.shutdown(SOON).unwrap();
    let state = queue.state().unwrap();
    assert_eq!((state.workers, state.finished), (Vec::new(), 8));
    for job in &jobs {
        drop(job.wait(&fixture.stream, SOON).unwrap());
    }
    let after = Worker::open("jobs", fixture.domain.on(&fixture.device), Duration::ZERO);
    assert!(matches!(after, Err(Error::NotFound { .. })), "{after:?}");
    let next = fixture.queue();
    assert_eq!(next.name(), "jobs");
}

#[test]
fn a_shutdown_waits_for_the_job_that_a_worker_holds() {
    let fixture = QueueFixture::new();
    let queue = fixture.queue();
    let job = queue.submit_bytes(b"held", &fixture.stream).unwrap();
    let mut worker = fixture.worker();
    let lease = worker.lease(&fixture.stream, SOON).unwrap();
    let late = queue.shutdown(Duration::from_millis(1));
    assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
    let idle = worker.lease(&fixture.stream, Duration::from_millis(1));
    assert!(matches!(idle, Err(Error::Timeout { .. })), "{idle:?}");
    lease.complete(None, &fixture.stream).unwrap();
    let end = worker.lease(&fixture.stream, SOON);
    let is_graceful = matches!(end, Err(Error::PeerGone { graceful: true, .. }));
    assert!(is_graceful, "{end:?}");
    assert_eq!(job.wait(&fixture.stream, SOON).unwrap().attempt, 1);
}

#[test]
fn a_shutdown_without_jobs_ends_the_workers_at_once() {
    let fixture = QueueFixture::new();
    let queue = fixture.queue();
    let worker = works_until_the_end(fixture.worker(), fixture.device.stream().unwrap());
    queue.wait_for_workers(1, SOON).unwrap();
    queue.shutdown(SOON).unwrap();
    assert_eq!(worker.join().unwrap(), 0);
}

#[test]
fn jobs_that_no_worker_holds_are_cancelled_and_let_a_shutdown_end() {
    let fixture = QueueFixture::new();
    let queue = fixture.build(|it| QueueOptions { prefetch: 1, ..it });
    let jobs: Vec<_> = (0..3u8)
        .map(|n| queue.submit_bytes(&[n], &fixture.stream).unwrap())
        .collect();
    let mut worker = fixture.worker();
    let lease = worker.lease(&fixture.stream, SOON).unwrap();
    assert_eq!(lease.job, 1);
    assert!(queue.shutdown(Duration::ZERO).is_err());
    assert_eq!(queue.cancel_waiting().unwrap(), [2, 3]);
    lease.complete(None, &fixture.stream).unwrap();
    queue.shutdown(SOON).unwrap();
    drop(jobs[0].wait(&fixture.stream, SOON).unwrap());
    let gone = jobs[1].wait(&fixture.stream, SOON);
    assert!(matches!(
        gone,
        Err(Error::Job {
            job: 2,
            end: JobEnd::Taken,
            ..
        })
    ));
    // The last job that is cancelled ends the workers' loops, too.
    let queue = fixture.queue();
    let job = queue.submit_bytes(b"alone", &fixture.stream).unwrap();
    assert!(queue.shutdown(Duration::ZERO).is_err());
    assert!(job.cancel().unwrap());
    assert!(matches!(
        Worker::open("jobs", fixture.domain.on(&fixture.device), Duration::ZERO),
        Err(Error::NotFound { .. })
    ));
}

#[test]
fn a_wait_that_is_cancelled_while_it_sleeps_does_not_take_the_result_that_ends_the_sleep() {
    let fixture = QueueFixture::new();
    let (queue, mut worker) = (fixture.queue(), fixture.worker());
    let job = queue.submit_bytes(b"work", &fixture.stream).unwrap();
    let lease = worker.lease(&fixture.stream, SOON).unwrap();
    let is_cancelled = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let cancelled = || is_cancelled.load(SeqCst);
        let wait = Wait::at_most(SOON).unless(&cancelled);
        scope.spawn(|| {
            let is_asleep = || {
                let state = queue.dispatcher.lock();
                // Under the lock, without which it does not go on.
                is_cancelled.store(state.waiters.has_sleeper(), SeqCst);
                state.waiters.has_sleeper()
            };
            while !is_asleep() {
                std::thread::yield_now();
            }
            lease.complete(None, &fixture.stream).unwrap();
        });
        let late = job.wait(&fixture.stream, wait);
        assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
    });
    assert_eq!(job.wait(&fixture.stream, SOON).unwrap().attempt, 1);
}

#[test]
fn a_result_that_comes_while_a_wait_asks_whether_it_is_cancelled_ends_it_at_once() {
    let fixture = QueueFixture::new();
    let queue = fixture.build(|it| QueueOptions {
        spin: Duration::ZERO,
        ..it
    });
    let mut worker = fixture.worker();
    let mut shortest = SOON;
    for _ in 0..20 {
        let job = queue.submit_bytes(b"work", &fixture.stream).unwrap();
        let lease = Cell::new(Some(worker.lease(&fixture.stream, SOON).unwrap()));
        let asked = Cell::new(None);
        let cancelled = || {
            if let Some(lease) = lease.take() {
                lease.complete(None, &fixture.stream).unwrap();
                // Another thread, say, takes the answer in.
                while !job.is_done().unwrap() {}
                asked.set(Some(Instant::now()));
            }
            false
        };
        let wait = Wait::at_most(SOON).unless(&cancelled);
        drop(job.wait(&fixture.stream, wait).unwrap());
        shortest = shortest.min(asked.get().unwrap().elapsed());
    }
    assert!(shortest < Duration::from_millis(25), "{shortest:?}");
}

#[test]
fn workers_ring_while_a_wait_asks_whether_it_is_cancelled() {
    let fixture = QueueFixture::new();
    let (queue, _worker) = (fixture.queue(), fixture.worker());
    queue.wait_for_workers(1, SOON).unwrap();
    let job = queue.submit_bytes(b"work", &fixture.stream).unwrap();
    let polling = Cell::new(None);
    let cancelled = || {
        polling.set(Some(queue.dispatcher.lock().waiters.polling));
        true
    };
    let late = job.wait(&fixture.stream, Wait::at_most(SOON).unless(&cancelled));
    assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
    assert_eq!(polling.get(), Some(0));
    // Nor does a panic there leave the thread counted.
    let cancelled = || panic!("a signal's handler");
    let wait = Wait::at_most(SOON).unless(&cancelled);
    let asked = AssertUnwindSafe(|| job.wait(&fixture.stream, wait).map(drop));
    assert!(std::panic::catch_unwind(asked).is_err());
    assert_eq!(queue.dispatcher.lock().waiters.polling, 0);
}

/// The thread that reads the announcement is in a call of the driver, as long as that takes. All
/// tests of a process have that thread.
#[test]
fn a_job_in_memory_whose_announcement_is_not_read_yet_is_waited_for() {
    let test = "a_job_in_memory_whose_announcement_is_not_read_yet_is_waited_for";
    alone(module_path!(), test, || {
        let fixture = QueueFixture::new();
        let (queue, mut worker) = (fixture.queue(), fixture.worker());
        queue.wait_for_workers(1, SOON).unwrap();
        let (begin, begun) = std::sync::mpsc::channel();
        let (go, held) = std::sync::mpsc::channel::<()>();
        let task = move || {
            begin.send(()).unwrap();
            let _ = held.recv();
        };
        let reactor = Reactor::of_process().unwrap();
        reactor.run_on_control_thread(Box::new(task));
        begun.recv().unwrap();
        let input = queue.loan(&Layout::bytes_only(1 << 20).unwrap()).unwrap();
        let job = queue.submit(input, &fixture.stream).unwrap();
        let early = worker.lease(&fixture.stream, Duration::from_secs(5));
        assert!(matches!(early, Err(Error::Timeout { .. })), "{early:?}");
        drop(go);
        let lease = worker.lease(&fixture.stream, SOON).unwrap();
        lease.complete(None, &fixture.stream).unwrap();
        drop(job.wait(&fixture.stream, SOON).unwrap());
    });
}
