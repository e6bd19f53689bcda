//! A queue against workers that say what they have no right to, and a worker against such a queue.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use super::recruit::AT_ONCE;
use super::wire::{Answer, Ticket, Verdict};
use super::{Queue, QueueBuilder, Worker, answers_of};
use crate::channel::{Policy, Publisher, Sample, Subscriber};
use crate::device::Device;
use crate::domain::Domain;
use crate::error::{Error, Result};
use crate::link::entry::Metadata;
use crate::link::peer::ProcessId;
use crate::rendezvous::Kind;
use crate::stream::Stream;
use crate::tensor::Layout;

pub(super) const SOON: Duration = Duration::from_secs(10);

/// A domain of one test, and what it works with.
pub(super) struct Place {
    folder: PathBuf,
    pub(super) domain: Domain,
    pub(super) device: Device,
    pub(super) stream: Stream,
}

impl Place {
    pub(super) fn new(name: &str) -> Place {
        Place::on(name, Device::host())
    }

    pub(super) fn on(name: &str, device: Device) -> Place {
        let folder = std::env::temp_dir().join(format!("warpipe-queue-{name}-{}", std::process::id()));
        Place { domain: Domain::at(&folder).unwrap(), stream: device.stream().unwrap(), folder, device }
    }

    pub(super) fn queue(&self) -> Queue {
        self.build(|it| it)
    }

    pub(super) fn build(&self, choose: impl FnOnce(QueueBuilder) -> QueueBuilder) -> Queue {
        choose(Queue::builder("jobs").domain(&self.domain).device(&self.device)).build().unwrap()
    }

    pub(super) fn worker(&self) -> Worker {
        Worker::builder("jobs").domain(&self.domain).device(&self.device).timeout(SOON).build().unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// A worker made by hand, which says what it is told.
struct Liar<'a> {
    place: &'a Place,
    answers: Publisher,
    jobs: Subscriber,
}

impl<'a> Liar<'a> {
    fn new(place: &'a Place) -> Liar<'a> {
        let generation = crate::link::watcher::new_generation();
        let name = answers_of("jobs", generation).unwrap();
        let answers = Publisher::builder(name.as_str()).kind(Kind::Results).domain(&place.domain).device(&place.device);
        let answers = answers.policy(Policy::Block { timeout: SOON }).build().unwrap();
        let jobs = Subscriber::builder("jobs")
            .domain(&place.domain)
            .device(&place.device)
            .kind(Kind::Queue)
            .generation(generation);
        Liar { place, answers, jobs: jobs.timeout(SOON).build().unwrap() }
    }

    fn take(&mut self) -> (Sample, Ticket) {
        let sample = self.jobs.receive(&self.place.stream).unwrap();
        let ticket = Ticket::decode(sample.metadata()).unwrap();
        (sample, ticket)
    }

    fn say(&self, metadata: &Metadata) {
        let owner = self.answers.member_of(ProcessId::own()).expect("the queue has attached");
        let empty = self.answers.loan(&Layout::bytes_only(0).unwrap()).unwrap();
        // The queue may have had enough by now.
        let _ = empty.send_to(owner, metadata, &self.place.stream, None);
    }

    fn answer(&self, job: u64, number: u32, verdict: Verdict) {
        self.say(&Answer { job, number, verdict }.encode(b"").unwrap());
    }

    /// Its link has failed, on both ways.
    fn is_thrown_out(&mut self) {
        let start = Instant::now();
        loop {
            match self.jobs.receive_timeout(&self.place.stream, SOON) {
                Ok(job) => drop(job),
                Err(Error::Evicted { .. }) => break,
                Err(other) => panic!("a liar was told {other}"),
            }
        }
        while self.answers.member_of(ProcessId::own()).is_some() {
            assert!(start.elapsed() < SOON, "the queue still listens to a liar");
            std::thread::yield_now();
        }
    }
}

/// A job that a liar was given, which it breaks its link over, is done by an honest worker after that.
fn survives(name: &str, lie: impl FnOnce(&Liar<'_>, Ticket)) {
    let place = Place::new(name);
    let queue = place.queue();
    let mut liar = Liar::new(&place);
    queue.wait_for_workers(1, SOON).unwrap();
    let job = queue.submit_bytes(b"work", &place.stream).unwrap();
    let (sample, ticket) = liar.take();
    lie(&liar, ticket);
    liar.is_thrown_out();
    drop(sample);
    let mut honest = place.worker();
    let lease = honest.lease(&place.stream).unwrap();
    assert_eq!((lease.job(), lease.attempt()), (job.id(), 2));
    lease.complete(&place.stream).unwrap();
    assert_eq!(job.wait(&place.stream, SOON).unwrap().attempt(), 2);
}

#[test]
fn an_answer_to_a_job_that_its_worker_does_not_hold_ends_its_link_alone() {
    survives("other-job", |liar, ticket| liar.answer(ticket.job + 1, ticket.number, Verdict::Completed));
}

#[test]
fn an_answer_with_a_ticket_that_was_not_given_ends_its_link_alone() {
    survives("other-ticket", |liar, ticket| liar.answer(ticket.job, ticket.number + 1, Verdict::Returned));
}

#[test]
fn a_second_answer_to_the_same_job_ends_its_link_alone() {
    let place = Place::new("twice");
    let queue = place.queue();
    let mut liar = Liar::new(&place);
    queue.wait_for_workers(1, SOON).unwrap();
    let job = queue.submit_bytes(b"work", &place.stream).unwrap();
    let (sample, ticket) = liar.take();
    liar.answer(ticket.job, ticket.number, Verdict::Completed);
    liar.answer(ticket.job, ticket.number, Verdict::Failed("no, it was not".into()));
    liar.is_thrown_out();
    drop(sample);
    assert_eq!(job.wait(&place.stream, SOON).unwrap().attempt(), 1, "the first answer counts");
}

#[test]
fn garbage_for_an_answer_ends_its_link_alone() {
    for (round, bytes) in [&b""[..], &[0; 13], &[9; 40], &[1; 12], &[255; 256]].into_iter().enumerate() {
        survives(&format!("garbage-{round}"), |liar, _| liar.say(&Metadata::new(bytes).unwrap()));
    }
}

#[test]
fn a_worker_that_gets_garbage_for_a_job_says_so_and_closes_its_link() {
    let place = Place::new("bad-job");
    let queue =
        Publisher::builder("jobs").kind(Kind::Queue).domain(&place.domain).device(&place.device).build().unwrap();
    for bytes in [&b""[..], &[0; 25], &[1; 24], &[1; 256]] {
        let mut worker = place.worker();
        let mut sample = queue.loan(&Layout::bytes_only(8).unwrap()).unwrap();
        sample.set_metadata(bytes).unwrap();
        sample.send(&place.stream).unwrap();
        let told: Result<_> = worker.lease(&place.stream);
        assert!(matches!(told, Err(Error::Protocol { .. })), "garbage for a job gave {told:?}");
        let after = worker.lease(&place.stream);
        assert!(matches!(after, Err(Error::QueueGone { .. })), "after that came {after:?}");
    }
}

#[test]
fn a_loan_of_another_queue_is_refused_and_given_back() {
    let place = Place::new("loans");
    let (queue, other) = (place.queue(), Queue::builder("other").domain(&place.domain).device(&place.device));
    let other = other.build().unwrap();
    let loan = other.loan(&Layout::bytes_only(8).unwrap()).unwrap();
    let refused = queue.submit(loan, &place.stream).unwrap_err();
    assert!(matches!(refused.error, Error::Argument { .. }));
    assert!(other.submit(*refused.loan.unwrap(), &place.stream).is_ok());
}

#[test]
fn an_output_of_another_lease_is_refused_and_given_back() {
    let place = Place::new("outputs");
    let (queue, mut worker) = (place.queue(), place.worker());
    let jobs = [0, 1].map(|_| queue.submit_bytes(b"work", &place.stream).unwrap());
    let [(_a, first), (_b, second)] = [0, 1].map(|_| worker.lease(&place.stream).unwrap().split());
    let mut output = first.output(&Layout::bytes_only(5).unwrap()).unwrap();
    output.write(&place.stream, b"first").unwrap();
    let refused = second.complete(Some(output), &place.stream).unwrap_err();
    let text = refused.error.to_string();
    assert!(matches!(refused.error, Error::Argument { argument: "output", .. }), "{text}");
    assert!(jobs.iter().all(|job| text.contains(&format!("of job {}, attempt 1", job.id()))), "{text}");
    first.complete(refused.output.map(|output| *output), &place.stream).unwrap();
    refused.duty.unwrap().complete(None, &place.stream).unwrap();
    let results = jobs.map(|job| job.wait(&place.stream, SOON).unwrap().to_vec().unwrap());
    assert_eq!(results, [b"first".to_vec(), vec![]]);
}

#[test]
fn many_threads_submit_and_wait_at_once_and_each_gets_its_own() {
    let place = Place::new("threads");
    let queue = place.queue();
    let working = |place: &Place| {
        let (mut worker, stream) = (place.worker(), place.device.stream().unwrap());
        let mut done = 0;
        loop {
            match worker.lease(&stream) {
                Ok(lease) => {
                    let mut output = lease.output(lease.layout()).unwrap();
                    output.write(&stream, &lease.to_vec(SOON).unwrap()).unwrap();
                    lease.complete_with(output, &stream).unwrap();
                    done += 1;
                }
                Err(Error::QueueGone { .. }) => return done,
                Err(other) => panic!("{other}"),
            }
        }
    };
    let queue = Arc::new(queue);
    let submitting = |thread: u8, queue: Arc<Queue>, stream: Stream| {
        for round in 0..100 {
            let job = queue.submit_bytes(&[thread, round], &stream).unwrap();
            assert_eq!(job.wait(&stream, SOON).unwrap().to_vec().unwrap(), [thread, round]);
        }
    };
    let done: u32 = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..2).map(|_| scope.spawn(|| working(&place))).collect();
        let submit = |thread| {
            let (queue, stream) = (queue.clone(), place.device.stream().unwrap());
            scope.spawn(move || submitting(thread, queue, stream))
        };
        let submitters: Vec<_> = (0..4).map(submit).collect();
        submitters.into_iter().for_each(|submitter| submitter.join().unwrap());
        drop(queue);
        workers.into_iter().map(|worker| worker.join().unwrap()).sum()
    });
    assert_eq!(done, 400);
}

#[test]
fn who_waits_for_a_job_is_told_when_its_queue_is_dropped() {
    let place = Place::new("dropped");
    let queue = place.queue();
    let jobs: Vec<_> = (0..3).map(|_| queue.submit_bytes(b"never", &place.stream).unwrap()).collect();
    std::thread::scope(|scope| {
        let (told, waiting) = std::sync::mpsc::channel();
        for job in &jobs {
            let told = told.clone();
            let stream = &place.stream;
            scope.spawn(move || told.send(job.wait(stream, SOON)).unwrap());
        }
        drop(queue);
        for _ in &jobs {
            let end = waiting.recv().unwrap();
            assert!(matches!(end, Err(Error::QueueClosed { .. })), "{end:?}");
        }
    });
}

#[test]
fn names_that_leave_no_room_for_a_worker_are_refused_at_once() {
    let place = Place::new("names");
    let long = "n".repeat(57);
    let built = Queue::builder(&long).domain(&place.domain).device(&place.device).build();
    assert!(matches!(built, Err(Error::Name { .. })), "{built:?}");
    assert!(Queue::builder(&long[1..]).domain(&place.domain).device(&place.device).build().is_ok());
}

#[test]
fn the_oldest_job_gets_a_place_although_the_results_behind_it_fill_all_others() {
    let place = Place::new("oldest");
    let queue = place.build(|it| it.credits(1));
    let mut slow = Liar::new(&place);
    queue.wait_for_workers(1, SOON).unwrap();
    let jobs: Vec<_> = (0..80).map(|_| queue.submit_bytes(b"work", &place.stream).unwrap()).collect();
    let (sample, ticket) = slow.take();
    assert_eq!(ticket.job, jobs[0].id());
    let mut honest = place.worker();
    queue.wait_for_workers(2, SOON).unwrap();
    // Until it is given no more: the slow one's lease is the only one left.
    let is_given_more = || {
        let mut books = queue.desk.lock();
        queue.desk.work(&mut books);
        books.giving.is_some() || books.seats.iter().map(|seat| seat.leases.len()).sum::<usize>() > 1
    };
    while is_given_more() {
        honest.try_lease(&place.stream).unwrap().map_or(Ok(()), |lease| lease.complete(&place.stream)).unwrap();
    }
    assert!(queue.state().unwrap().finished >= 48, "places are left");
    drop((sample, slow));
    let lease = honest.lease(&place.stream).unwrap();
    assert_eq!(lease.job(), jobs[0].id(), "all results wait for this one");
    lease.complete(&place.stream).unwrap();
    // And so for every job that is the oldest one after that.
    assert_eq!(queue.next_result(&place.stream, SOON).unwrap().job(), jobs[0].id());
}

#[test]
fn jobs_that_come_back_are_given_out_oldest_first() {
    let place = Place::new("sorted");
    let queue = place.queue();
    let mut first = Liar::new(&place);
    queue.wait_for_workers(1, SOON).unwrap();
    let jobs = [0, 1, 2].map(|_| queue.submit_bytes(b"work", &place.stream).unwrap().id());
    let tickets = [first.take().1, first.take().1];
    tickets.into_iter().for_each(|ticket| first.answer(ticket.job, ticket.number, Verdict::Failed("no".into())));
    drop(first);
    let mut honest = place.worker();
    for job in jobs {
        let lease = honest.lease(&place.stream).unwrap();
        assert_eq!(lease.job(), job);
        lease.complete(&place.stream).unwrap();
    }
}

#[test]
fn a_worker_that_cannot_say_its_answer_loses_its_link_and_not_the_job() {
    let place = Place::new("mute");
    let queue = place.queue();
    let mute = Worker::builder("jobs").domain(&place.domain).device(&place.device);
    // Memory for one region, and no patience.
    let mut mute = mute.memory_limit(2 << 20).timeout(Duration::from_millis(20)).build().unwrap();
    queue.wait_for_workers(1, SOON).unwrap();
    let job = queue.submit_bytes(b"work", &place.stream).unwrap();
    let lease = mute.lease_timeout(&place.stream, SOON).unwrap();
    let all_its_memory = lease.output(&Layout::bytes_only(2 << 20).unwrap()).unwrap();
    assert!(matches!(lease.complete(&place.stream), Err(Error::MemoryLimit { .. })));
    let mut other = place.worker();
    let lease = other.lease(&place.stream).unwrap();
    assert_eq!((lease.job(), lease.attempt()), (job.id(), 2));
    drop((all_its_memory, mute));
}

#[test]
fn of_more_newcomers_than_are_attached_to_at_once_each_gets_its_seat() {
    const COUNT: usize = 3 * AT_ONCE;
    let place = Place::new("newcomers");
    let queue = place.queue();
    let most = AtomicUsize::new(0);
    let liars: Vec<Liar<'_>> = std::thread::scope(|scope| {
        let coming: Vec<_> = (0..COUNT).map(|_| scope.spawn(|| Liar::new(&place))).collect();
        let start = Instant::now();
        while queue.state().unwrap().workers.len() < COUNT {
            most.fetch_max(queue.desk.recruits.under_way(), SeqCst);
            assert!(start.elapsed() < SOON, "{} seats", queue.state().unwrap().workers.len());
        }
        coming.into_iter().map(|it| it.join().unwrap()).collect()
    });
    assert!((1..=AT_ONCE).contains(&most.load(SeqCst)), "{most:?} at once");
    drop(liars);
}

#[test]
fn a_result_that_is_put_back_is_the_next_one_of_its_handle_and_of_the_queue() {
    for order in [super::Order::Submission, super::Order::Completion] {
        let place = Place::new("put-back");
        let queue = place.build(|it| it.order(order));
        let mut worker = place.worker();
        let handles: Vec<_> = (0..2).map(|n| queue.submit_bytes(&[n], &place.stream).unwrap()).collect();
        (0..2).for_each(|_| worker.lease(&place.stream).unwrap().complete(&place.stream).unwrap());
        let first = queue.next_result(&place.stream, SOON).unwrap();
        queue.put_back(first).unwrap();
        assert!(handles[0].is_done().unwrap());
        let first = handles[0].wait(&place.stream, SOON).unwrap();
        assert!(matches!(handles[0].try_wait(&place.stream), Err(Error::NoSuchJob { .. })));
        queue.put_back(first).unwrap();
        let jobs = [(); 2].map(|()| queue.next_result(&place.stream, SOON).unwrap().job());
        assert_eq!(jobs, [1, 2]);
        assert_eq!(queue.state().unwrap().finished, 0);
    }
}

#[test]
fn a_wait_for_room_submits_nothing() {
    let place = Place::new("room");
    let queue = place.build(|it| it.limit(1));
    queue.wait_for_room(Duration::ZERO).unwrap();
    let handle = queue.submit_bytes(b"1", &place.stream).unwrap();
    assert!(matches!(queue.wait_for_room(Duration::ZERO), Err(Error::QueueFull { .. })));
    assert!(handle.call_off().unwrap());
    queue.wait_for_room(Duration::ZERO).unwrap();
    assert_eq!(queue.state().unwrap().waiting, 0);
}
