//! Regression tests for lost wake-ups: each would cost a wait, or a job.

use std::os::fd::AsFd;
use std::sync::mpsc;
use std::time::Instant;

use super::super::super::job_table::Stage;
use super::super::super::tests::{QueueFixture, SOON};
use super::super::super::worker_session::SessionEnd;
use super::super::super::{Queue, QueueOptions, Worker, WorkerOptions};
use super::*;
use crate::error::{JobEnd, StateFault};
use crate::ipc::message::wait_readable;
use crate::pubsub::ReplyLink;
use crate::runtime::heartbeat::Uptime;
use crate::tensor::Layout;

/// Longer than any of these tests waits.
const LONG: Duration = Duration::from_secs(600);

/// Makes the queue's own thread leave all work to a leader thread that does not exist.
fn with_leader(queue: &Queue) -> StateGuard<'_> {
    let dispatcher = &queue.dispatcher;
    dispatcher.lock().waiters.has_leader = true;
    dispatcher.observer.doorbell.ring();
    let start = Instant::now();
    loop {
        let state = dispatcher.lock();
        if state.waiters.is_parked {
            dispatcher.observer.doorbell.drain();
            return state;
        }
        drop(state);
        assert!(start.elapsed() < SOON, "the queue's thread does not leave");
        std::thread::yield_now();
    }
}

fn has_rung(dispatcher: &Dispatcher) -> bool {
    wait_readable(dispatcher.observer.doorbell.as_fd(), Duration::ZERO)
}

fn one_worker(fixture: &QueueFixture, queue: &Queue) -> Worker {
    let worker = fixture.worker();
    queue.wait_for_workers(1, SOON).unwrap();
    worker
}

#[test]
fn a_wait_for_room_ends_when_an_outcome_is_taken_or_a_job_is_called_off() {
    let fixture = QueueFixture::new();
    let queue = fixture.queue();
    let job = queue.submit_bytes(b"work", &fixture.stream).unwrap();
    let (told, woken) = mpsc::channel();
    let dispatcher = queue.dispatcher.clone();
    std::thread::spawn(move || {
        let mut state = dispatcher.lock();
        dispatcher.wait_for_change(&mut state, LONG);
        drop(state);
        let _ = told.send(());
    });
    while queue.dispatcher.lock().waiters.sleeping == 0 {
        std::thread::yield_now();
    }
    assert!(job.cancel().unwrap());
    assert!(
        woken.recv_timeout(SOON).is_ok(),
        "it sleeps although there is room"
    );
}

#[test]
fn a_thread_that_sleeps_on_the_descriptors_wakes_for_an_answer_that_came_while_another_polled() {
    let fixture = QueueFixture::new();
    let queue = fixture.queue();
    let mut worker = one_worker(&fixture, &queue);
    // The memory of both ends is known before: it rings as well.
    let first = queue.submit_bytes(b"work", &fixture.stream).unwrap();
    let lease = worker.lease(&fixture.stream, SOON).unwrap();
    lease.complete(None, &fixture.stream).unwrap();
    drop(first.wait(&fixture.stream, SOON).unwrap());
    queue.submit_bytes(b"work", &fixture.stream).unwrap();
    let lease = worker.lease(&fixture.stream, SOON).unwrap();
    let (dispatcher, mut state) = (&queue.dispatcher, with_leader(&queue));
    // The driver holds up the queue's own thread, say.
    state.waiters.runner_sleep = Duration::ZERO;
    dispatcher.begin_polling(&mut state);
    lease.complete(None, &fixture.stream).unwrap();
    while !state.sessions[0].answers.may_have_news() {
        std::thread::yield_now();
    }
    assert!(!has_rung(dispatcher), "a polled worker does not ring");
    dispatcher.end_polling(&mut state);
    assert!(has_rung(dispatcher), "nobody looks at the answer");
    state.waiters.has_leader = false;
}

#[test]
fn a_thread_that_leaves_a_job_waiting_wakes_the_queues_own_thread() {
    let fixture = QueueFixture::new();
    let queue = fixture.build(|it| QueueOptions { prefetch: 1, ..it });
    let mut worker = one_worker(&fixture, &queue);
    let jobs = [0, 1].map(|_| queue.submit_bytes(b"work", &fixture.stream).unwrap());
    let lease = worker.lease(&fixture.stream, SOON).unwrap();
    let (dispatcher, mut state) = (&queue.dispatcher, with_leader(&queue));
    assert_eq!(state.table.waiting(), 1);
    state.waiters.runner_sleep = LONG;
    // The second time, the ring before has woken another thread, and the queue's own thread still
    // sleeps.
    for _ in 0..2 {
        dispatcher.begin_polling(&mut state);
        dispatcher.end_polling(&mut state);
        assert!(has_rung(dispatcher), "nobody looks whether there is room");
        dispatcher.observer.doorbell.drain();
    }
    state.waiters.has_leader = false;
    drop((state, lease, jobs));
}

/// It attached when the last outcome was found.
#[test]
fn a_worker_that_gets_its_session_while_the_queue_ends_takes_no_more_jobs() {
    let fixture = QueueFixture::new();
    let queue = fixture.queue();
    let mut guard = queue.dispatcher.lock();
    guard.table.stage = Stage::Draining;
    let _worker = fixture.worker();
    let start = Instant::now();
    while guard.sessions.is_empty() {
        queue.dispatcher.process_events(&mut guard);
        assert!(start.elapsed() < SOON);
    }
    assert!(!guard.sessions[0].is_open());
}

/// Another thread found the last outcome, and closes the publisher.
#[test]
fn a_shutdown_waits_for_the_thread_that_releases_the_name() {
    let fixture = QueueFixture::new();
    let queue = fixture.queue();
    queue.dispatcher.lock().table.stage = Stage::Draining;
    let late = queue.shutdown(Duration::ZERO);
    assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
    queue.dispatcher.lock().table.stage = Stage::Shut;
    queue.shutdown(SOON).unwrap();
    assert_eq!(fixture.queue().name(), "jobs");
}

#[test]
fn a_lease_without_an_end_is_no_overflow() {
    let fixture = QueueFixture::new();
    let queue = fixture.build(|it| QueueOptions {
        lease_timeout: Some(Duration::MAX),
        ..it
    });
    let mut worker = one_worker(&fixture, &queue);
    let job = queue.submit_bytes(b"work", &fixture.stream).unwrap();
    let lease = worker.lease(&fixture.stream, SOON).unwrap();
    assert!(queue.dispatcher.lock().next_look() <= Duration::from_secs(10));
    lease.complete(None, &fixture.stream).unwrap();
    assert_eq!(job.wait(&fixture.stream, SOON).unwrap().attempt, 1);
}

#[test]
fn a_lease_does_not_run_out_while_its_queue_stands_still() {
    let fixture = QueueFixture::new();
    let queue = fixture.build(|it| QueueOptions {
        lease_timeout: Some(LONG),
        ..it
    });
    let mut worker = one_worker(&fixture, &queue);
    let job = queue.submit_bytes(b"work", &fixture.stream).unwrap();
    let lease = worker.lease(&fixture.stream, SOON).unwrap();
    // Both continue together.
    queue.dispatcher.lock().uptime.freeze(2 * LONG);
    let state = queue.state().unwrap();
    assert_eq!((state.leased, state.waiting), (1, 0));
    lease.complete(None, &fixture.stream).unwrap();
    assert_eq!(job.wait(&fixture.stream, SOON).unwrap().attempt, 1);
}

#[test]
fn jobs_that_were_called_off_leave_nothing_behind() {
    let fixture = QueueFixture::new();
    let queue = fixture.queue();
    for _ in 0..100 {
        assert!(
            queue
                .submit_bytes(b"work", &fixture.stream)
                .unwrap()
                .cancel()
                .unwrap()
        );
    }
    assert_eq!(
        queue.state().unwrap().waiting,
        0,
        "jobs wait that nobody wants"
    );
    let left = queue.dispatcher.lock().table.waiting.len();
    assert!(left <= 32, "{left} numbers of jobs that nobody wants");
    let mut worker = one_worker(&fixture, &queue);
    for _ in 0..100 {
        let job = queue.submit_bytes(b"work", &fixture.stream).unwrap();
        worker
            .lease(&fixture.stream, SOON)
            .unwrap()
            .complete(None, &fixture.stream)
            .unwrap();
        queue.drain(SOON).unwrap();
        assert!(job.cancel().unwrap());
    }
    let left = queue.dispatcher.lock().table.finished.len();
    assert!(left <= 32, "{left} outcomes that nobody can take");
}

#[test]
fn an_event_loop_that_waits_for_room_is_notified_that_the_queue_is_shut() {
    let fixture = QueueFixture::new();
    let queue = fixture.build(|it| QueueOptions { limit: 1, ..it });
    let _job = queue.submit_bytes(b"work", &fixture.stream).unwrap();
    let watch = queue.watch().unwrap();
    watch.quiet();
    assert!(queue.shutdown(Duration::ZERO).is_err());
    assert!(wait_readable(watch.as_fd(), Duration::ZERO));
}

#[test]
fn a_worker_whose_socket_closed_keeps_its_leases_while_its_queue_stands_still() {
    let fixture = QueueFixture::new();
    let queue = fixture.build(|it| QueueOptions {
        max_attempts: 1,
        ..it
    });
    let mut worker = one_worker(&fixture, &queue);
    let job = queue.submit_bytes(b"work", &fixture.stream).unwrap();
    let lease = worker.lease(&fixture.stream, SOON).unwrap();
    let end_with = |change: &dyn Fn(&Uptime)| {
        let mut guard = queue.dispatcher.lock();
        let end = guard.sessions[0].end.get_or_insert_with(|| SessionEnd {
            reason: "its socket closed".into(),
            is_settled: false,
            clock: Uptime::default(),
        });
        change(&end.clock);
        queue.dispatcher.process_events(&mut guard);
        guard.sessions.len()
    };
    assert_eq!(end_with(&|clock| clock.freeze(2 * SOON)), 1);
    assert!(!job.is_done().unwrap());
    assert_eq!(end_with(&|clock| clock.advance(SOON)), 0);
    let late = job.wait(&fixture.stream, SOON).unwrap_err();
    assert!(
        matches!(
            late,
            Error::Job {
                end: JobEnd::DeadLettered { .. },
                ..
            }
        ),
        "{late}"
    );
    drop(lease);
}

#[test]
fn a_result_in_flight_when_its_worker_closed_gracefully_counts_however_late_it_completes() {
    let fixture = QueueFixture::new();
    let queue = fixture.build(|it| QueueOptions {
        max_attempts: 1,
        ..it
    });
    let mut worker = one_worker(&fixture, &queue);
    let job = queue.submit_bytes(b"work", &fixture.stream).unwrap();
    let slow = fixture.device.stream().unwrap();
    let (go, wait) = mpsc::channel::<()>();
    let lease = worker.lease(&slow, SOON).unwrap();
    slow.call(move || assert!(wait.recv().is_err())).unwrap();
    lease.complete(None, &slow).unwrap();
    drop(worker);
    let start = Instant::now();
    while queue
        .dispatcher
        .lock()
        .sessions
        .iter()
        .all(|session| session.end.is_none())
    {
        let _ = queue.state().unwrap();
        assert!(start.elapsed() < SOON);
    }
    // Simulates that time has passed.
    queue
        .dispatcher
        .lock()
        .sessions
        .iter_mut()
        .filter_map(|session| session.end.as_mut())
        .for_each(|end| end.clock.advance(SOON));
    let _ = queue.state().unwrap();
    drop(go);
    assert_eq!(job.wait(&fixture.stream, SOON).unwrap().attempt, 1);
}

#[test]
fn a_wait_for_a_job_ends_when_its_queue_is_dropped() {
    let fixture = QueueFixture::new();
    let queue = fixture.queue();
    let jobs: Vec<_> = (0..3)
        .map(|_| queue.submit_bytes(b"never", &fixture.stream).unwrap())
        .collect();
    std::thread::scope(|scope| {
        let (told, waiting) = std::sync::mpsc::channel();
        for job in &jobs {
            let told = told.clone();
            let stream = &fixture.stream;
            scope.spawn(move || told.send(job.wait(stream, SOON)).unwrap());
        }
        drop(queue);
        for _ in &jobs {
            let end = waiting.recv().unwrap();
            assert!(
                matches!(end, Err(Error::State(StateFault::QueueClosed(_)))),
                "{end:?}"
            );
        }
    });
}

#[test]
fn a_cancelled_submit_submits_nothing_although_there_is_room_and_gives_its_loan_back() {
    let fixture = QueueFixture::new();
    let queue = fixture.build(|it| QueueOptions { limit: 1, ..it });
    let first = queue.submit_bytes(b"1", &fixture.stream).unwrap();
    let loan = queue.loan(&Layout::bytes_only(1).unwrap()).unwrap();
    let cancelled = || {
        first.cancel().unwrap();
        true
    };
    let wait = Wait::at_most(LONG).unless(&cancelled);
    let refused = queue.submit_within(loan, &fixture.stream, wait);
    let refused = refused.unwrap_err();
    assert!(matches!(
        refused.error,
        Error::Limit(LimitFault::Jobs { .. })
    ));
    assert_eq!(queue.state().unwrap().waiting, 0);
    let loan = *refused.returned.unwrap();
    let stream = &fixture.stream;
    queue.submit_within(loan, stream, Duration::ZERO).unwrap();
}

#[test]
fn an_expired_job_that_cannot_be_answered_is_no_timeout_of_the_next_lease() {
    let fixture = QueueFixture::new();
    let queue = fixture.build(|it| QueueOptions {
        prefetch: 256,
        ..it
    });
    let stream = &fixture.stream;
    let options = WorkerOptions {
        answer_timeout: Duration::ZERO,
        ..fixture.domain.on(&fixture.device)
    };
    let mut worker = Worker::open("jobs", options, Duration::ZERO).unwrap();
    let room = 64;
    (0..room).for_each(|_| drop(queue.submit_bytes(b"job", stream).unwrap()));
    let leases: Vec<_> = (0..room)
        .map(|_| worker.lease(stream, SOON).unwrap())
        .collect();
    let loan = queue.loan(&Layout::bytes_only(1).unwrap()).unwrap();
    queue.submit_before(loan, stream, 1, &SOON.into()).unwrap();
    // Until this is dropped nothing takes answers.
    let state = queue.dispatcher.lock();
    for lease in leases {
        lease.complete(None, stream).unwrap();
    }
    let late = worker.lease(stream, Duration::from_millis(1)).unwrap_err();
    assert!(late.to_string().starts_with("a job of"), "{late}");
    drop(state);
    // Its failure could not be told, either.
    let end = worker.lease(stream, SOON);
    assert!(
        matches!(end, Err(Error::State(StateFault::LinkClosed { .. }))),
        "{end:?}"
    );
}

#[test]
fn a_shutdown_and_a_wait_of_other_threads_end_with_the_last_job() {
    let fixture = QueueFixture::new();
    let queue = fixture.queue();
    let mut worker = one_worker(&fixture, &queue);
    let jobs = [0, 1].map(|_| queue.submit_bytes(b"work", &fixture.stream).unwrap());
    std::thread::scope(|scope| {
        let waits = jobs
            .each_ref()
            .map(|job| scope.spawn(|| job.wait(&fixture.stream, LONG).unwrap().job));
        let end = scope.spawn(|| queue.shutdown(LONG));
        while queue.dispatcher.lock().table.stage == Stage::Open {
            std::thread::yield_now();
        }
        for _ in 0..2 {
            let lease = worker.lease(&fixture.stream, SOON).unwrap();
            lease.complete(None, &fixture.stream).unwrap();
        }
        assert_eq!(waits.map(|wait| wait.join().unwrap()), [1, 2]);
        end.join().unwrap().unwrap();
    });
    let told = worker.lease(&fixture.stream, SOON);
    assert!(matches!(told, Err(Error::PeerGone { graceful: true, .. })));
}
