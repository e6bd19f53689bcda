//! What nobody rings for, and what comes when it is not looked for: each would cost a wait, or a job, if it were missed.

use std::os::fd::AsFd;
use std::sync::mpsc;
use std::time::Instant;

use super::super::tests::{Place, SOON};
use super::super::{Queue, Worker};
use super::*;
use crate::channel::{Member, Subscriber};
use crate::link::message::wait_readable;
use crate::link::peer::ProcessId;

/// Longer than any of these tests waits.
const LONG: Duration = Duration::from_secs(600);

/// Makes the queue's own thread leave everything to a thread of a user's that does not exist.
fn with_a_leader(queue: &Queue) -> Books<'_> {
    let desk = &queue.desk;
    desk.lock().has_leader = true;
    desk.observer.bell.ring();
    let start = Instant::now();
    loop {
        let ledger = desk.lock();
        if ledger.is_parked {
            desk.observer.bell.drain();
            return ledger;
        }
        drop(ledger);
        assert!(start.elapsed() < SOON, "the queue's thread does not leave");
        std::thread::yield_now();
    }
}

fn has_rung(desk: &Desk) -> bool {
    wait_readable(desk.observer.bell.as_fd(), Duration::ZERO)
}

fn one_worker(place: &Place, queue: &Queue) -> Worker {
    let worker = place.worker();
    queue.wait_for_workers(1, SOON).unwrap();
    worker
}

#[test]
fn who_waits_for_room_is_woken_when_an_outcome_is_taken_or_a_job_called_off() {
    let place = Place::new("room");
    let queue = place.queue();
    let job = queue.submit_bytes(b"work", &place.stream).unwrap();
    let (told, woken) = mpsc::channel();
    let desk = queue.desk.clone();
    std::thread::spawn(move || {
        let mut ledger = desk.lock();
        desk.follow(&mut ledger, LONG);
        drop(ledger);
        let _ = told.send(());
    });
    while queue.desk.lock().sleepers == 0 {
        std::thread::yield_now();
    }
    assert!(job.call_off().unwrap());
    assert!(woken.recv_timeout(SOON).is_ok(), "it sleeps although there is room");
}

#[test]
fn who_sleeps_on_the_descriptors_is_woken_for_an_answer_that_came_while_another_polled() {
    let place = Place::new("polled");
    let queue = place.queue();
    let mut worker = one_worker(&place, &queue);
    queue.submit_bytes(b"work", &place.stream).unwrap();
    let lease = worker.lease(&place.stream).unwrap();
    let (desk, mut ledger) = (&queue.desk, with_a_leader(&queue));
    ledger.sleeps_long = false;
    desk.begin_polling(&mut ledger);
    lease.complete(&place.stream).unwrap();
    while !ledger.seats[0].subscriber.may_have_news() {
        std::thread::yield_now();
    }
    assert!(!has_rung(desk), "who is polled does not ring");
    desk.end_polling(&mut ledger);
    assert!(has_rung(desk), "nobody looks at the answer");
    ledger.has_leader = false;
}

#[test]
fn a_job_left_waiting_is_looked_at_soon() {
    let place = Place::new("credit");
    let queue = place.build(|it| it.credits(1));
    let mut worker = one_worker(&place, &queue);
    let jobs = [0, 1].map(|_| queue.submit_bytes(b"work", &place.stream).unwrap());
    let lease = worker.lease(&place.stream).unwrap();
    let (desk, mut ledger) = (&queue.desk, with_a_leader(&queue));
    assert_eq!(ledger.waiting(), 1);
    ledger.sleeps_idle = true;
    desk.look_soon(&mut ledger);
    assert!(has_rung(desk), "nobody looks whether there is room now");
    // Whom it woke was another thread, and the queue's own still sleeps.
    desk.observer.bell.drain();
    desk.look_soon(&mut ledger);
    assert!(has_rung(desk), "it sleeps on");
    ledger.has_leader = false;
    drop((ledger, lease, jobs));
}

#[test]
fn a_worker_that_left_before_it_got_its_seat_gets_none() {
    let place = Place::new("phantom");
    let queue = place.queue();
    let name = answers_of("jobs", [7; 16]).unwrap();
    let answers = Publisher::builder(name.as_str()).domain(&place.domain).device(&place.device).build().unwrap();
    let subscriber = Subscriber::builder(name.as_str()).domain(&place.domain).device(&place.device).build().unwrap();
    let (pid, process) = (std::process::id() as i32, ProcessId::own());
    queue.desk.recruits.add(Member { id: 99, pid, process, generation: [7; 16] }, subscriber);
    queue.desk.observer.tell();
    let start = Instant::now();
    while !queue.desk.recruits.is_empty() {
        let _ = queue.state().unwrap();
        assert!(start.elapsed() < SOON);
    }
    assert_eq!(queue.state().unwrap().workers, [], "nobody would ever say that it is gone");
    drop(answers);
}

#[test]
fn a_lease_without_an_end_is_no_overflow() {
    let place = Place::new("endless");
    let queue = place.build(|it| it.lease_timeout(Some(Duration::MAX)));
    let mut worker = one_worker(&place, &queue);
    let job = queue.submit_bytes(b"work", &place.stream).unwrap();
    let lease = worker.lease(&place.stream).unwrap();
    assert!(queue.desk.lock().patience() <= Duration::from_secs(10));
    lease.complete(&place.stream).unwrap();
    assert_eq!(job.wait(&place.stream, SOON).unwrap().attempt(), 1);
}

#[test]
fn a_lease_does_not_run_out_while_its_queue_stands_still() {
    let place = Place::new("frozen");
    let queue = place.build(|it| it.lease_timeout(Some(LONG)));
    let mut worker = one_worker(&place, &queue);
    let job = queue.submit_bytes(b"work", &place.stream).unwrap();
    let lease = worker.lease(&place.stream).unwrap();
    // Both go on together.
    queue.desk.lock().uptime.freeze(2 * LONG);
    let state = queue.state().unwrap();
    assert_eq!((state.leased, state.waiting), (1, 0));
    lease.complete(&place.stream).unwrap();
    assert_eq!(job.wait(&place.stream, SOON).unwrap().attempt(), 1);
}

#[test]
fn jobs_that_were_called_off_leave_nothing_behind() {
    let place = Place::new("off");
    let queue = place.queue();
    for _ in 0..100 {
        assert!(queue.submit_bytes(b"work", &place.stream).unwrap().call_off().unwrap());
    }
    assert_eq!(queue.state().unwrap().waiting, 0, "jobs wait that nobody wants");
    let left = queue.desk.lock().waiting.len();
    assert!(left <= 32, "{left} numbers of jobs that nobody wants");
    let mut worker = one_worker(&place, &queue);
    for _ in 0..100 {
        let job = queue.submit_bytes(b"work", &place.stream).unwrap();
        worker.lease(&place.stream).unwrap().complete(&place.stream).unwrap();
        queue.drain(SOON).unwrap();
        assert!(job.call_off().unwrap());
    }
    let left = queue.desk.lock().finished.len();
    assert!(left <= 32, "{left} outcomes that nobody can take");
}

#[test]
fn what_was_under_way_when_its_worker_said_goodbye_counts_however_long_it_takes() {
    let place = Place::new("goodbye");
    let queue = place.build(|it| it.max_attempts(1));
    let mut worker = one_worker(&place, &queue);
    let job = queue.submit_bytes(b"work", &place.stream).unwrap();
    let slow = place.device.stream().unwrap();
    let (go, wait) = mpsc::channel::<()>();
    let lease = worker.lease(&slow).unwrap();
    slow.call(move || assert!(wait.recv().is_err())).unwrap();
    lease.complete(&slow).unwrap();
    drop(worker);
    let start = Instant::now();
    while queue.desk.lock().seats.iter().all(|seat| seat.end.is_none()) {
        let _ = queue.state().unwrap();
        assert!(start.elapsed() < SOON);
    }
    // As if it had been a while.
    queue.desk.lock().seats.iter_mut().filter_map(|seat| seat.end.as_mut()).for_each(|end| end.2 -= SOON);
    let _ = queue.state().unwrap();
    drop(go);
    assert_eq!(job.wait(&place.stream, SOON).unwrap().attempt(), 1);
}

#[test]
fn a_job_that_found_all_places_held_is_given_out_once_results_are_released() {
    let place = Place::new("held");
    let queue = place.queue();
    let mut worker = one_worker(&place, &queue);
    let mut held = Vec::new();
    for _ in 0..63 {
        let job = queue.submit_bytes(b"work", &place.stream).unwrap();
        worker.lease(&place.stream).unwrap().complete(&place.stream).unwrap();
        held.push(job.wait(&place.stream, SOON).unwrap());
    }
    // The oldest gets the last place, and the next one none.
    let jobs = [0, 1].map(|_| queue.submit_bytes(b"work", &place.stream).unwrap());
    let lease = worker.lease(&place.stream).unwrap();
    assert_eq!(queue.desk.lock().waiting(), 1);
    drop(held);
    let next = worker.lease_timeout(&place.stream, SOON / 2).unwrap();
    assert_eq!(next.job(), jobs[1].id());
    drop((lease, next));
}
