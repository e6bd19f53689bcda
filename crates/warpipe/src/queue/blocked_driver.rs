//! The other calls of a queue make progress while the driver blocks a call that delivers a job.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::tests::QueueFixture;
use super::{JobHandle, Loan, Queue, QueueBuilder, SubmitError, Worker};
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
    fn new(title: &str, pick_worker: impl FnOnce(QueueBuilder) -> QueueBuilder) -> Scene {
        let (hook, device) = FullQueue::device();
        let fixture = QueueFixture::on(&format!("held-up-{title}"), device);
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

    /// Has the queue deliver a job that is not complete until the sender is dropped: the delivery
    /// thread is blocked in the driver when this returns.
    fn give_held_up(&self) -> (Worker, JobHandle, mpsc::Sender<()>) {
        let (go, gate) = mpsc::channel::<()>();
        self.fixture
            .stream
            .call(move || assert!(gate.recv().is_err()))
            .unwrap();
        let job = self
            .queue
            .submit_bytes(b"late", &self.fixture.stream)
            .unwrap();
        self.hook.hook().hold_waits();
        let worker = self.fixture.worker();
        self.hook.hook().wait_until_held_up();
        (worker, job, go)
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
        let lease = worker.lease_timeout(&stream, PATIENCE).unwrap();
        let (job, bytes) = (lease.job(), lease.to_vec(PATIENCE).unwrap());
        lease.complete(&stream).unwrap();
        (worker, job, bytes)
    })
}

#[test]
fn other_calls_of_a_queue_go_on_while_a_full_launch_queue_holds_up_a_submit() {
    let scene = Scene::new("submit", |it| it.prefetch(1));
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
        in_time(move || early.wait(&on, PATIENCE).unwrap().job()),
        done
    );
    let (queue, third) = (scene.queue.clone(), scene.fixture.worker());
    in_time(move || queue.wait_for_workers(3, PATIENCE).unwrap());
    for refused in [Queue::wait_for_room, Queue::shutdown] {
        let queue = scene.queue.clone();
        let late = in_time(move || refused(&queue, SHORT).unwrap_err());
        assert!(matches!(late, Error::Timeout { .. }), "{late}");
    }
    let job = scene.let_go(&submitted).unwrap();
    let (_second, done, _) = work(second, &stream);
    assert_eq!(done, job.id());
    scene.queue.shutdown(PATIENCE).unwrap();
    assert_eq!(job.wait(&stream, PATIENCE).unwrap().attempt(), 1);
    let state = scene.queue.state().unwrap();
    assert_eq!((state.waiting, state.leased, state.finished), (0, 0, 0));
    drop((first, third));
}

#[test]
fn a_submit_behind_one_that_is_held_up_times_out_and_gives_its_loan_back_unharmed() {
    let scene = Scene::new("loan", |it| it);
    let stream = scene.fixture.stream.clone();
    let worker = scene.worker();
    let submitted = scene.submit_held_up();
    let (queue, on, loan) = (scene.queue.clone(), stream.clone(), scene.loan(b"unharmed"));
    let refused = in_time(move || queue.submit_timeout(loan, &on, SHORT).unwrap_err());
    assert!(
        matches!(refused.error, Error::Timeout { .. }),
        "{}",
        refused.error
    );
    let (queue, on, loan) = (scene.queue.clone(), stream.clone(), *refused.loan.unwrap());
    let other = std::thread::spawn(move || queue.submit_timeout(loan, &on, PATIENCE).unwrap());
    while scene.queue.dispatcher.lock().waiters.submitting == 0 {
        std::thread::yield_now();
    }
    let job = scene.let_go(&submitted).unwrap();
    let other = other.join().unwrap();
    let (worker, done, _) = work(worker, &stream);
    assert_eq!(done, job.id());
    let (_worker, done, bytes) = work(worker, &stream);
    assert_eq!((done, &bytes[..]), (other.id(), &b"unharmed"[..]));
    assert_eq!(scene.queue.dispatcher.lock().waiters.submitting, 0);
}

#[test]
fn a_worker_that_leaves_while_its_job_is_held_up_costs_the_job_no_attempt() {
    let scene = Scene::new("leaver", |it| it.max_attempts(1));
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
        job.wait(&scene.fixture.stream, PATIENCE).unwrap().attempt(),
        1
    );
}

/// The worker gets the job, answers and leaves before the submitting thread has recorded the
/// delivery.
#[test]
fn an_answer_that_comes_before_its_submit_returns_counts_once_though_its_worker_leaves() {
    for (is_given_back, attempt) in [(true, 1), (false, 2)] {
        let scene = Scene::new(&format!("early-{attempt}"), |it| it.max_attempts(attempt));
        let mut leaver = scene.worker();
        let submitted = scene.submit_held_up();
        let mut guard = scene.queue.dispatcher.lock();
        scene.hook.hook().unblock();
        let lease = leaver
            .lease_timeout(&scene.fixture.stream, PATIENCE)
            .unwrap();
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
            job.wait(&scene.fixture.stream, PATIENCE).unwrap().attempt(),
            attempt
        );
    }
}

#[test]
fn an_answer_waits_for_another_one_as_long_as_it_is_told_to_and_can_be_given_again() {
    let scene = Scene::new("answer", |it| it.max_attempts(1));
    let (mut worker, stream) = (scene.worker(), scene.fixture.stream.clone());
    let jobs = [1, 2].map(|byte| scene.queue.submit_bytes(&[byte], &stream).unwrap());
    let [(_first, first), (_second, mut second)] =
        [0; 2].map(|_| worker.lease_timeout(&stream, PATIENCE).unwrap().split());
    let stuck = scene.fixture.device.stream().unwrap();
    scene.hook.hook().hold(&stuck);
    let (told, answered) = mpsc::channel();
    std::thread::spawn(move || told.send(first.complete(None, &stuck)));
    scene.hook.hook().wait_until_held_up();
    for timeout in [Duration::ZERO, SHORT] {
        second.set_timeout(timeout);
        let on = stream.clone();
        let refused = in_time(move || second.complete(None, &on).unwrap_err());
        assert!(
            matches!(refused.error, Error::Timeout { waited, .. } if waited == timeout),
            "{}",
            refused.error
        );
        second = *refused.answer_handle.unwrap();
    }
    assert!(answered.try_recv().is_err(), "nothing holds it up");
    scene.hook.hook().unblock();
    answered.recv_timeout(PATIENCE).unwrap().unwrap();
    second.set_timeout(PATIENCE);
    second.complete(None, &stream).unwrap();
    for job in jobs {
        assert_eq!(job.wait(&stream, PATIENCE).unwrap().attempt(), 1);
    }
}

#[test]
fn a_submit_that_the_driver_refuses_in_the_end_leaves_no_job_behind() {
    for has_worker in [false, true] {
        let scene = Scene::new(&format!("refused-{has_worker}"), |it| it);
        let stream = scene.fixture.stream.clone();
        let worker = has_worker.then(|| scene.worker());
        let submitted = scene.submit_held_up();
        scene.hook.hook().fail();
        let refused = submitted.recv_timeout(PATIENCE).unwrap().unwrap_err();
        assert!(
            matches!(refused.error, Error::Injected { .. }),
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
            match worker.lease_timeout(&stream, SHORT) {
                Ok(lease) => lease.complete(&stream).unwrap(),
                Err(Error::Timeout { .. }) => {}
                Err(other) => panic!("{other}"),
            }
        }
        assert_eq!(job.wait(&stream, PATIENCE).unwrap().attempt(), 1);
    }
}

#[test]
fn a_job_whose_way_out_the_driver_holds_up_holds_up_nobody_else() {
    let scene = Scene::new("given", |it| it);
    let (worker, job, go) = scene.give_held_up();
    let queue = scene.queue.clone();
    let state = in_time(move || queue.state().unwrap());
    assert_eq!(
        (state.workers.len(), state.waiting, state.leased),
        (1, 0, 1)
    );
    let (queue, stream) = (scene.queue.clone(), scene.fixture.device.stream().unwrap());
    let (loan, on) = (
        scene.queue.loan(&Layout::bytes_only(4).unwrap()).unwrap(),
        stream.clone(),
    );
    let refused = in_time(move || queue.submit_timeout(loan, &on, SHORT).unwrap_err());
    assert!(
        matches!(refused.error, Error::Timeout { .. }) && refused.loan.is_some(),
        "{}",
        refused.error
    );
    scene.hook.hook().unblock();
    drop(go);
    let (_worker, done, bytes) = work(worker, &stream);
    assert_eq!((done, &bytes[..]), (job.id(), &b"late"[..]));
    assert_eq!(job.wait(&stream, PATIENCE).unwrap().attempt(), 1);
}

/// A caller does all of the queue's work before it looks: here it finds the answer that makes room
/// for a job with data that is not complete.
#[test]
fn a_caller_with_a_timeout_makes_no_delivery_that_the_driver_may_hold_up() {
    let scene = Scene::new("caller", |it| it.prefetch(1));
    let (mut worker, stream) = (scene.worker(), scene.fixture.stream.clone());
    let early = scene.queue.submit_bytes(b"early", &stream).unwrap();
    let lease = worker.lease_timeout(&stream, PATIENCE).unwrap();
    let (go, gate) = mpsc::channel::<()>();
    let late_stream = scene.fixture.device.stream().unwrap();
    late_stream
        .call(move || assert!(gate.recv().is_err()))
        .unwrap();
    let jobs = [b"late", b"last"].map(|it| scene.queue.submit_bytes(it, &late_stream).unwrap());
    scene.hook.hook().hold_waits();
    let queue = scene.queue.clone();
    in_time(move || {
        // No other thread of the queue can find the answer meanwhile.
        let mut guard = queue.dispatcher.lock();
        lease.complete(&stream).unwrap();
        while !guard.table.is_settled(early.id()) {
            queue.dispatcher.process_events(&mut guard);
        }
    });
    scene.hook.hook().wait_until_held_up();
    let [late, last] = jobs;
    let (queue, on) = (scene.queue.clone(), late_stream.clone());
    let late = in_time(move || {
        assert!(!late.is_done().unwrap());
        assert!(late.try_wait(&on).unwrap().is_none());
        let state = queue.state().unwrap();
        assert_eq!((state.waiting, state.leased), (1, 1));
        assert!(late.cancel().unwrap() && late.is_done().unwrap());
        assert_eq!(queue.cancel_waiting().unwrap(), [last.id()]);
        late
    });
    drop(go);
    scene.hook.hook().unblock();
    let (_worker, done, _) = work(worker, &late_stream);
    assert_eq!(done, late.id(), "it was on its way when it was cancelled");
    scene.queue.drain(PATIENCE).unwrap();
}

#[test]
fn an_event_loop_is_notified_of_a_result_while_the_driver_holds_up_another_jobs_delivery() {
    let scene = Scene::new("watch", |it| it.prefetch(1));
    let (mut worker, stream) = (scene.worker(), scene.fixture.device.stream().unwrap());
    let early = scene.queue.submit_bytes(b"early", &stream).unwrap();
    let lease = worker.lease_timeout(&stream, PATIENCE).unwrap();
    let (_second, _late, go) = scene.give_held_up();
    let watch = scene.queue.watch().unwrap();
    lease.complete(&stream).unwrap();
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
    scene.hook.hook().unblock();
    drop(go);
}

#[test]
fn a_queue_ends_at_once_while_the_driver_holds_up_a_job_that_is_given_out() {
    let scene = Scene::new("end", |it| it);
    let (mut worker, job, go) = scene.give_held_up();
    let (hook, stream) = (scene.hook.clone(), scene.fixture.device.stream().unwrap());
    let Scene { queue, fixture, .. } = scene;
    in_time(move || drop(queue));
    let told = worker.lease_timeout(&stream, PATIENCE).unwrap_err();
    assert!(
        matches!(told, Error::PeerGone { graceful: true, .. }),
        "{told}"
    );
    hook.hook().unblock();
    drop(go);
    assert!(matches!(
        job.wait(&stream, PATIENCE),
        Err(Error::QueueClosed { .. })
    ));
    drop(fixture);
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
    let fixture = QueueFixture::on("panicked", Device::from_backend(hook.clone()));
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
    assert_eq!(job.wait(&fixture.stream, PATIENCE).unwrap().job(), id);
}

#[test]
fn a_delivery_that_panicked_in_the_driver_costs_an_attempt_and_the_job_is_delivered_again() {
    let hook = Wrapped::new(Device::host().backend().clone(), Panicking::default());
    let fixture = QueueFixture::on("panicked-late", Device::from_backend(hook.clone()));
    let queue = fixture.build(|builder| builder.max_attempts(2));
    let (go, gate) = mpsc::channel::<()>();
    fixture
        .stream
        .call(move || assert!(gate.recv().is_err()))
        .unwrap();
    let job = queue.submit_bytes(b"late", &fixture.stream).unwrap();
    hook.hook().0.store(true, Relaxed);
    let worker = fixture.worker();
    while hook.hook().0.load(Relaxed) {
        let _ = queue.state().unwrap();
    }
    drop(go);
    let (_worker, id, bytes) = work(worker, &fixture.device.stream().unwrap());
    assert_eq!((id, bytes), (job.id(), b"late".to_vec()));
    assert_eq!(job.wait(&fixture.stream, PATIENCE).unwrap().attempt(), 2);
}
