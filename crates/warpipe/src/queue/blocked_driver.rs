//! The other calls of a queue make progress while the driver blocks a call that submits a job.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::tests::QueueFixture;
use super::{JobHandle, Loan, Queue, QueueOptions, SubmitError, Worker};
use crate::backend::testing::{FullQueue, Hook, Wrapped};
use crate::device::Device;
use crate::error::Error;
use crate::stream::Stream;
use crate::tensor::Layout;

/// The timeout of a bounded call that is to time out.
const SHORT: Duration = Duration::from_millis(50);

/// A call that has not returned within this time is blocked.
const PATIENCE: Duration = Duration::from_secs(60);

type Submitted = Result<JobHandle, SubmitError>;

/// A queue on a device that can block a call.
struct Scene {
    hook: Arc<Wrapped<FullQueue>>,
    fixture: QueueFixture,
    queue: Arc<Queue>,
}

impl Scene {
    fn new(pick_worker: impl FnOnce(QueueOptions) -> QueueOptions) -> Scene {
        let (hook, device) = FullQueue::device();
        let fixture = QueueFixture::on(device);
        Scene {
            hook,
            queue: Arc::new(fixture.build(pick_worker)),
            fixture,
        }
    }

    fn worker(&self) -> Worker {
        let count = self.queue.state().unwrap().workers.len() + 1;
        let worker = self.fixture.worker();
        self.queue.wait_for_workers(count, PATIENCE).unwrap();
        worker
    }

    fn loan(&self, bytes: &[u8]) -> Loan {
        let mut loan = self
            .queue
            .loan(&Layout::bytes_only(bytes.len() as u64).unwrap())
            .unwrap();
        loan.write(&self.fixture.stream, bytes).unwrap();
        loan
    }

    /// Submits on a thread of its own, which is blocked in the driver when this returns.
    fn submit_held_up(&self) -> mpsc::Receiver<Submitted> {
        let (queue, stuck) = (self.queue.clone(), self.fixture.device.stream().unwrap());
        let (told, submitted) = mpsc::channel();
        let loan = queue.loan(&Layout::bytes_only(4).unwrap()).unwrap();
        self.hook.hook().hold(&stuck);
        std::thread::spawn(move || told.send(queue.submit(loan, &stuck)));
        self.hook.hook().wait_until_held_up();
        submitted
    }

    /// Submits jobs with data that is not complete until the sender is dropped, and has every call
    /// block that makes a stream wait.
    fn submit_late<const N: usize>(&self, jobs: [&[u8]; N]) -> ([JobHandle; N], mpsc::Sender<()>) {
        let (go, gate) = mpsc::channel::<()>();
        let late = self.fixture.device.stream().unwrap();
        late.call(move || assert!(gate.recv().is_err())).unwrap();
        let jobs = jobs.map(|bytes| self.queue.submit_bytes(bytes, &late).unwrap());
        self.hook.hook().hold_waits();
        (jobs, go)
    }

    fn let_go(&self, submitted: &mpsc::Receiver<Submitted>) -> Submitted {
        assert!(submitted.try_recv().is_err(), "nothing holds it up");
        self.hook.hook().unblock();
        submitted.recv_timeout(PATIENCE).unwrap()
    }
}

/// The result of `call` on another thread, which must return.
fn in_time<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> T {
    let (told, done) = mpsc::channel();
    std::thread::spawn(move || told.send(call()));
    done.recv_timeout(PATIENCE)
        .expect("it waits for what the driver holds up")
}

/// Leases one job and completes it. Returns the worker.
fn work(mut worker: Worker, stream: &Stream) -> (Worker, u64, Vec<u8>) {
    let stream = stream.clone();
    in_time(move || {
        let lease = worker.lease(&stream, PATIENCE).unwrap();
        let (job, bytes) = (lease.job, lease.to_vec(PATIENCE).unwrap());
        lease.complete(None, &stream).unwrap();
        (worker, job, bytes)
    })
}

#[test]
fn other_calls_of_a_queue_go_on_while_a_full_launch_queue_holds_up_a_submit() {
    let scene = Scene::new(|it| QueueOptions { prefetch: 1, ..it });
    let (queue, stream) = (scene.queue.clone(), scene.fixture.stream.clone());
    let first = scene.worker();
    let early = queue.submit_bytes(b"early", &stream).unwrap();
    let second = scene.worker();
    let submitted = scene.submit_held_up();
    let state = in_time(move || queue.state().unwrap());
    assert_eq!(
        (state.workers.len(), state.waiting, state.leased),
        (2, 0, 2)
    );
    let (first, done, _) = work(first, &stream);
    assert_eq!(done, early.id());
    let on = stream.clone();
    assert_eq!(
        in_time(move || early.wait(&on, PATIENCE).unwrap().job),
        done
    );
    let (queue, third) = (scene.queue.clone(), scene.fixture.worker());
    in_time(move || queue.wait_for_workers(3, PATIENCE).unwrap());
    let queue = scene.queue.clone();
    let late = in_time(move || queue.shutdown(SHORT).unwrap_err());
    assert!(matches!(late, Error::Timeout { .. }), "{late}");
    let job = scene.let_go(&submitted).unwrap();
    let (_second, done, _) = work(second, &stream);
    assert_eq!(done, job.id());
    scene.queue.shutdown(PATIENCE).unwrap();
    assert_eq!(job.wait(&stream, PATIENCE).unwrap().attempt, 1);
    let state = scene.queue.state().unwrap();
    assert_eq!((state.waiting, state.leased, state.finished), (0, 0, 0));
    drop((first, third));
}

#[test]
fn a_submit_behind_one_that_is_held_up_times_out_and_gives_its_loan_back_unharmed() {
    let scene = Scene::new(|it| it);
    let stream = scene.fixture.stream.clone();
    let worker = scene.worker();
    let submitted = scene.submit_held_up();
    let (queue, on, loan) = (scene.queue.clone(), stream.clone(), scene.loan(b"unharmed"));
    let refused = in_time(move || queue.submit_within(loan, &on, SHORT).unwrap_err());
    assert!(
        matches!(refused.error, Error::Timeout { .. }),
        "{}",
        refused.error
    );
    let queue = scene.queue.clone();
    let on = stream.clone();
    let loan = *refused.returned.unwrap();
    let other = std::thread::spawn(move || queue.submit_within(loan, &on, PATIENCE).unwrap());
    let job = scene.let_go(&submitted).unwrap();
    let other = other.join().unwrap();
    let (worker, done, _) = work(worker, &stream);
    assert_eq!(done, job.id());
    let (_worker, done, bytes) = work(worker, &stream);
    assert_eq!((done, &bytes[..]), (other.id(), &b"unharmed"[..]));
}

#[test]
fn a_worker_that_leaves_while_its_job_is_held_up_costs_the_job_no_attempt() {
    let scene = Scene::new(|it| QueueOptions {
        max_attempts: 1,
        ..it
    });
    let leaver = scene.worker();
    let submitted = scene.submit_held_up();
    drop(leaver);
    let start = Instant::now();
    while !scene.queue.dispatcher.lock().sessions.is_empty() {
        let queue = scene.queue.clone();
        let _ = in_time(move || queue.state().unwrap());
        assert!(start.elapsed() < PATIENCE, "the worker does not leave");
    }
    let job = scene.let_go(&submitted).unwrap();
    let (_worker, done, _) = work(scene.worker(), &scene.fixture.stream);
    assert_eq!(done, job.id());
    assert_eq!(
        job.wait(&scene.fixture.stream, PATIENCE).unwrap().attempt,
        1
    );
}

/// The worker gets the job, answers and leaves before the submitting thread has recorded the
/// delivery.
#[test]
fn an_answer_that_comes_before_its_submit_returns_counts_once_though_its_worker_leaves() {
    for (is_given_back, attempt) in [(true, 1), (false, 2)] {
        let scene = Scene::new(|it| QueueOptions {
            max_attempts: attempt,
            ..it
        });
        let mut leaver = scene.worker();
        let submitted = scene.submit_held_up();
        let mut guard = scene.queue.dispatcher.lock();
        scene.hook.hook().unblock();
        let lease = leaver.lease(&scene.fixture.stream, PATIENCE).unwrap();
        if is_given_back {
            lease.requeue().unwrap()
        } else {
            lease.fail("once").unwrap()
        }
        drop(leaver);
        let start = Instant::now();
        while !guard.sessions.is_empty() {
            scene.queue.dispatcher.process_events(&mut guard);
            assert!(start.elapsed() < PATIENCE, "the worker does not leave");
        }
        drop(guard);
        let job = submitted.recv_timeout(PATIENCE).unwrap().unwrap();
        let (_worker, done, _) = work(scene.worker(), &scene.fixture.stream);
        assert_eq!(done, job.id());
        assert_eq!(
            job.wait(&scene.fixture.stream, PATIENCE).unwrap().attempt,
            attempt
        );
    }
}

#[test]
fn an_answer_waits_for_another_one_as_long_as_it_is_told_to_and_can_be_given_again() {
    let scene = Scene::new(|it| QueueOptions {
        max_attempts: 1,
        ..it
    });
    let (mut worker, stream) = (scene.worker(), scene.fixture.stream.clone());
    let jobs = [1, 2].map(|byte| scene.queue.submit_bytes(&[byte], &stream).unwrap());
    let [first, second] = [0; 2].map(|_| worker.lease(&stream, PATIENCE).unwrap());
    let (first, mut second) = (first.answer_handle, second.answer_handle);
    let stuck = scene.fixture.device.stream().unwrap();
    scene.hook.hook().hold(&stuck);
    let (told, answered) = mpsc::channel();
    std::thread::spawn(move || told.send(first.complete(None, &stuck, PATIENCE)));
    scene.hook.hook().wait_until_held_up();
    for timeout in [Duration::ZERO, SHORT] {
        let on = stream.clone();
        let refused = in_time(move || second.complete(None, &on, timeout).unwrap_err());
        assert!(
            matches!(refused.error, Error::Timeout { waited, .. } if waited == timeout),
            "{}",
            refused.error
        );
        second = *refused.returned.answer_handle.unwrap();
    }
    assert!(answered.try_recv().is_err(), "nothing holds it up");
    scene.hook.hook().unblock();
    answered.recv_timeout(PATIENCE).unwrap().unwrap();
    second.complete(None, &stream, PATIENCE).unwrap();
    for job in jobs {
        assert_eq!(job.wait(&stream, PATIENCE).unwrap().attempt, 1);
    }
}

#[test]
fn a_submit_that_the_driver_refuses_in_the_end_leaves_no_job_behind() {
    for has_worker in [false, true] {
        let scene = Scene::new(|it| it);
        let stream = scene.fixture.stream.clone();
        let worker = has_worker.then(|| scene.worker());
        let submitted = scene.submit_held_up();
        scene.hook.hook().fail();
        let refused = submitted.recv_timeout(PATIENCE).unwrap().unwrap_err();
        assert!(
            matches!(
                refused.error,
                Error::Driver {
                    code: Error::INJECTED,
                    ..
                }
            ),
            "{}",
            refused.error
        );
        scene.queue.drain(PATIENCE).unwrap();
        let state = scene.queue.state().unwrap();
        assert_eq!((state.waiting, state.finished), (0, 0));
        let job = scene.queue.submit_bytes(b"next", &stream).unwrap();
        let mut worker = worker.unwrap_or_else(|| scene.worker());
        // It may have been given the other job, and its data never comes.
        while !job.is_done().unwrap() {
            match worker.lease(&stream, SHORT) {
                Ok(lease) => lease.complete(None, &stream).unwrap(),
                Err(Error::Timeout { .. }) => {}
                Err(other) => panic!("{other}"),
            }
        }
        assert_eq!(job.wait(&stream, PATIENCE).unwrap().attempt, 1);
    }
}

/// No thread of the queue gives a stream work for a job that waited.
#[test]
fn a_job_that_waited_is_given_out_once_its_data_is_complete_and_not_before() {
    let scene = Scene::new(|it| QueueOptions { prefetch: 1, ..it });
    let (mut worker, stream) = (scene.worker(), scene.fixture.stream.clone());
    let early = scene.queue.submit_bytes(b"early", &stream).unwrap();
    let lease = worker.lease(&stream, PATIENCE).unwrap();
    let ([late, last], go) = scene.submit_late([b"late", b"last"]);
    lease.complete(None, &stream).unwrap();
    let (queue, on) = (scene.queue.clone(), stream.clone());
    let late = in_time(move || {
        assert_eq!(early.wait(&on, PATIENCE).unwrap().job, early.id());
        assert!(
            !late.is_done().unwrap()
                && matches!(late.wait(&on, Duration::ZERO), Err(Error::Timeout { .. }))
        );
        let state = queue.state().unwrap();
        assert_eq!((state.waiting, state.leased), (2, 0));
        assert!(last.cancel().unwrap() && last.is_done().unwrap());
        late
    });
    let next = worker.lease(&stream, SHORT);
    assert!(matches!(next, Err(Error::Timeout { .. })), "{next:?}");
    drop(go);
    let (_worker, done, bytes) = work(worker, &stream);
    assert_eq!((done, &bytes[..]), (late.id(), &b"late"[..]));
    assert_eq!(late.wait(&stream, PATIENCE).unwrap().attempt, 1);
    scene.queue.drain(PATIENCE).unwrap();
}

#[test]
fn an_event_loop_is_notified_of_a_result_while_the_data_of_another_job_is_not_complete() {
    let scene = Scene::new(|it| QueueOptions { prefetch: 1, ..it });
    let (mut worker, stream) = (scene.worker(), scene.fixture.stream.clone());
    let early = scene.queue.submit_bytes(b"early", &stream).unwrap();
    let lease = worker.lease(&stream, PATIENCE).unwrap();
    let (_late, go) = scene.submit_late([b"late"]);
    let watch = scene.queue.watch().unwrap();
    lease.complete(None, &stream).unwrap();
    let patience = crate::os::timespec(PATIENCE);
    loop {
        let mut readable = [rustix::event::PollFd::new(
            &watch,
            rustix::event::PollFlags::IN,
        )];
        let rung = rustix::event::poll(&mut readable, Some(&patience)).unwrap();
        assert_eq!(rung, 1, "the queue's own thread does not look");
        watch.quiet();
        // Looked at without doing the queue's work.
        if scene.queue.dispatcher.lock().table.is_settled(early.id()) {
            break;
        }
    }
    drop(go);
}

/// Panics in one batch of operations.
#[derive(Debug, Default)]
struct Panicking(AtomicBool);

impl Hook for Panicking {
    fn before(&self, method: &'static str) -> crate::error::Result<()> {
        let is_due = method == "batch" && self.0.swap(false, Relaxed);
        assert!(!is_due, "on purpose");
        Ok(())
    }
}

#[test]
fn a_call_that_panicked_in_the_driver_polls_no_more_and_the_queue_goes_on() {
    let hook = Wrapped::new(Device::host().backend().clone(), Panicking::default());
    let fixture = QueueFixture::on(Device::from_backend(hook.clone()));
    let queue = fixture.build(|builder| builder);
    let worker = fixture.worker();
    queue.wait_for_workers(1, PATIENCE).unwrap();
    let loan = queue.loan(&Layout::bytes_only(4).unwrap()).unwrap();
    hook.hook().0.store(true, Relaxed);
    let submit = || drop(queue.submit(loan, &fixture.stream));
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(submit)).is_err());
    assert_eq!(queue.dispatcher.lock().waiters.polling, 0);
    let job = queue.submit_bytes(b"next", &fixture.stream).unwrap();
    let (_worker, id, bytes) = work(worker, &fixture.stream);
    assert_eq!((id, bytes), (job.id(), b"next".to_vec()));
    assert_eq!(job.wait(&fixture.stream, PATIENCE).unwrap().job, id);
}
