//! A driver that refuses or blocks a call, a member that does not answer, and a member that lies in
//! its own word.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc;
use std::time::Duration;
use std::time::Instant;

use super::page::CREATOR;
use super::tests::{Stage, chain};
use super::*;
use crate::Device;
use crate::backend::testing::{Failing, FullQueue, Panicking, Wrapped};
use crate::runtime::reactor::EventSource;
use crate::shm::counter::VALUE_MAX;
use crate::wait::OptionalExtension;

/// The timeout of a call that is meant to time out.
const SHORT: Duration = Duration::from_millis(50);

/// A result that has not come within this time never comes.
const PATIENCE: Duration = Duration::from_secs(60);

/// The result of `call` on another thread, which must return.
fn in_time<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> T {
    let (told, done) = mpsc::channel();
    std::thread::spawn(move || told.send(call()));
    done.recv_timeout(PATIENCE)
        .expect("it waits for another thread")
}

pub(super) fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "{what}");
        std::thread::yield_now();
    }
}

/// A device that fails at the chosen call.
fn failing() -> (Arc<Wrapped<Failing>>, Device) {
    let wrapped = Wrapped::new(Device::host().backend().clone(), Failing::default());
    (wrapped.clone(), Device::from_backend(wrapped))
}

#[test]
fn a_permit_whose_release_the_driver_refuses_is_handed_on_once_the_work_is_done() {
    for permits in [1, 3] {
        let (stage, (hook, device)) = (Stage::new(&format!("refused-{permits}")), failing());
        let (creator, member) = stage.both(&device, permits);
        let (first, second) = (device.stream().unwrap(), device.stream().unwrap());
        let written = Arc::new(AtomicU64::new(0));
        let seen = Arc::new(AtomicU64::new(u64::MAX));
        let others: Vec<Permit> = (1..permits)
            .map(|_| creator.acquire_host(PATIENCE).unwrap())
            .collect();
        let permit = creator.acquire(&first, PATIENCE).unwrap();
        let (go, wait) = mpsc::channel::<()>();
        let data = written.clone();
        first
            .call(move || {
                assert!(wait.recv().is_err());
                data.store(1, SeqCst);
            })
            .unwrap();
        let (other, on) = (member.clone(), second.clone());
        let waiter = std::thread::spawn(move || other.acquire(&on, PATIENCE).unwrap());
        eventually("the other one waits in line", || {
            creator.state().waiting == 1
        });
        hook.hook().aim("batch", 1);
        let refused = permit.release(&first).unwrap_err();
        assert!(
            matches!(
                refused,
                Error::Driver {
                    code: Error::INJECTED,
                    ..
                }
            ),
            "{refused}"
        );
        assert_eq!(
            (creator.state().available, creator.state().waiting),
            (0, 1),
            "the work is not done"
        );
        assert!(
            member
                .acquire_host(Duration::ZERO)
                .optional()
                .unwrap()
                .is_none()
        );
        drop(go);
        let permit = waiter.join().unwrap();
        let into = seen.clone();
        second
            .call(move || into.store(written.load(SeqCst), SeqCst))
            .unwrap();
        permit.release(&second).unwrap();
        second.synchronize(PATIENCE).unwrap();
        assert_eq!(seen.load(SeqCst), 1);
        // No word waits for a signal that never comes.
        drop(creator.acquire_host(PATIENCE).unwrap());
        drop(member.acquire(&first, PATIENCE).unwrap());
        first.synchronize(PATIENCE).unwrap();
        drop(others);
        assert_eq!(creator.state().available, permits);
    }
}

#[test]
fn sections_follow_each_other_also_where_the_driver_refuses_releases() {
    const ROUNDS: u64 = 60;
    let (stage, (hook, device)) = (Stage::new("sections"), failing());
    let (creator, member) = stage.both(&device, 1);
    let streams: Vec<Stream> = (0..3).map(|_| device.stream().unwrap()).collect();
    let count = Arc::new(AtomicU64::new(0));
    for round in 0..ROUNDS {
        let semaphore = if round % 2 == 0 { &creator } else { &member };
        let stream = &streams[round as usize % 3];
        let permit = semaphore.acquire(stream, PATIENCE).unwrap();
        let count = count.clone();
        stream
            .call(move || {
                let found = count.load(SeqCst);
                (0..20_000).for_each(|_| std::hint::spin_loop());
                count.store(found + 1, SeqCst);
            })
            .unwrap();
        if round % 4 == 3 {
            hook.hook().aim("batch", 1);
            assert!(permit.release(stream).is_err());
        } else {
            // By a different stream each round, which is behind this one.
            let other = &streams[(round / 4) as usize % 3];
            other.wait_for(stream).unwrap();
            permit.release(other).unwrap();
        }
    }
    drop(creator.acquire_host(PATIENCE).unwrap());
    assert_eq!((count.load(SeqCst), creator.state().available), (ROUNDS, 1));
}

#[test]
fn connecting_to_a_member_waits_for_another_thread_that_does_no_longer_than_its_timeout() {
    let (stage, device) = (Stage::new("meeting"), Device::host());
    let (creator, member) = stage.both(&device, 1);
    let (first, second) = (device.stream().unwrap(), device.stream().unwrap());
    let (go, wait) = mpsc::channel::<()>();
    first.call(move || assert!(wait.recv().is_err())).unwrap();
    creator
        .acquire(&first, PATIENCE)
        .unwrap()
        .release(&first)
        .unwrap();
    // As a thread does when its member does not answer.
    let connecting = member.local.block_connecting(CREATOR);
    let (semaphore, on) = (member.clone(), second.clone());
    let late = in_time(move || semaphore.acquire(&on, SHORT).unwrap_err());
    assert!(matches!(late, Error::Timeout { .. }), "{late}");
    assert_eq!(creator.state().available, 1);
    drop(connecting);
    let permit = member.acquire(&second, PATIENCE).unwrap();
    drop(go);
    permit.release(&second).unwrap();
    second.synchronize(PATIENCE).unwrap();
}

#[test]
fn an_acquire_is_held_up_by_a_member_that_does_not_answer_only_until_its_work_is_done() {
    let (stage, device) = (Stage::new("done"), Device::host());
    let (creator, member) = stage.both(&device, 1);
    let (first, second) = (device.stream().unwrap(), device.stream().unwrap());
    let (go, wait) = mpsc::channel::<()>();
    first.call(move || assert!(wait.recv().is_err())).unwrap();
    let permit = creator.acquire(&first, PATIENCE).unwrap();
    permit.release(&first).unwrap();
    let connecting = member.local.block_connecting(CREATOR);
    let start = Instant::now();
    let acquiring = std::thread::spawn(move || member.acquire(&second, PATIENCE).map(drop));
    eventually("it has the permit", || creator.state().available == 0);
    drop(go);
    acquiring.join().unwrap().unwrap();
    assert!(start.elapsed() < PATIENCE / 2, "nothing is owed");
    drop(connecting);
}

#[test]
fn a_member_that_does_not_answer_holds_up_no_connection_to_another_one() {
    let (stage, device) = (Stage::new("other"), Device::host());
    let (creator, silent) = stage.both(&device, 1);
    let member = Semaphore::open("turns", stage.domain.on(&device), Duration::ZERO).unwrap();
    let (first, second) = (device.stream().unwrap(), device.stream().unwrap());
    let (go, wait) = mpsc::channel::<()>();
    first.call(move || assert!(wait.recv().is_err())).unwrap();
    let permit = member.acquire(&first, PATIENCE).unwrap();
    permit.release(&first).unwrap();
    let connecting = creator.local.block_connecting(silent.local.member);
    let permit = creator.acquire(&second, PATIENCE).unwrap();
    drop((go, connecting));
    permit.release(&second).unwrap();
    second.synchronize(PATIENCE).unwrap();
}

/// Has a creator connect to a member that does not answer, and owes a signal until the sender is
/// dropped. In a process of its own.
fn beside_a_silent_member(test: &str, then: impl FnOnce(Semaphore, mpsc::Sender<()>)) {
    crate::hostile::alone(module_path!(), test, || {
        let (stage, device) = (Stage::new("silent"), Device::host());
        let (creator, member) = stage.both(&device, 1);
        let ((go, wait), stream) = (mpsc::channel::<()>(), device.stream().unwrap());
        stream.call(move || assert!(wait.recv().is_err())).unwrap();
        let permit = member.acquire(&stream, PATIENCE).unwrap();
        permit.release(&stream).unwrap();
        // The thread that would answer.
        let (resume, stopped) = mpsc::channel::<()>();
        let stop = Box::new(move || assert!(stopped.recv().is_err()));
        creator.local.signals.reactor.run_on_control_thread(stop);
        let unconnected = creator.local.unconnected_signallers(0);
        assert_eq!(unconnected, [member.local.member]);
        creator.local.start_connecting(unconnected).unwrap();
        then(creator, go);
        drop(resume);
    });
}

#[test]
fn a_member_that_does_not_answer_and_owes_nothing_any_more_is_given_up_soon() {
    let test = "a_member_that_does_not_answer_and_owes_nothing_any_more_is_given_up_soon";
    beside_a_silent_member(test, |creator, go| {
        let start = Instant::now();
        drop(go);
        eventually("the thread ends", || Arc::strong_count(&creator.local) == 1);
        assert!(start.elapsed() < REPLY_TIMEOUT / 2, "{:?}", start.elapsed());
    });
}

#[test]
fn a_semaphore_closes_although_it_connects_to_a_member_that_does_not_answer() {
    let test = "a_semaphore_closes_although_it_connects_to_a_member_that_does_not_answer";
    beside_a_silent_member(test, |creator, go| {
        let (local, start) = (Arc::downgrade(&creator.local), Instant::now());
        drop(creator);
        eventually("it is closed", || local.strong_count() == 0);
        assert!(start.elapsed() < REPLY_TIMEOUT / 2, "{:?}", start.elapsed());
        drop(go);
    });
}

#[test]
fn members_are_connected_to_in_the_background_after_an_attempt_that_panicked() {
    let (stage, device) = (Stage::new("panicked"), Device::host());
    let (creator, _member) = stage.both(&device, 1);
    let panicking = Wrapped::new(device.backend().clone(), Panicking::default());
    let late = Device::from_backend(panicking.clone());
    let late_member = Semaphore::open("turns", stage.domain.on(&late), Duration::ZERO).unwrap();
    let (first, second) = (device.stream().unwrap(), late.stream().unwrap());
    let (go, wait) = mpsc::channel::<()>();
    first.call(move || assert!(wait.recv().is_err())).unwrap();
    let permit = creator.acquire(&first, PATIENCE).unwrap();
    permit.release(&first).unwrap();
    panicking.hook().aim("register", 1);
    let mut permit = None;
    eventually("another attempt is made", || {
        permit = late_member
            .acquire(&second, Duration::ZERO)
            .optional()
            .unwrap();
        permit.is_some()
    });
    assert!(panicking.hook().has_struck());
    drop(go);
    permit.unwrap().release(&second).unwrap();
    second.synchronize(PATIENCE).unwrap();
}

#[test]
fn an_acquire_that_waits_is_told_of_no_failure_from_before_it() {
    let (stage, (hook, device)) = (Stage::new("before"), failing());
    let host = Device::host();
    let creator = Semaphore::new("turns", 1, stage.domain.on(&host)).unwrap();
    let member = Semaphore::open("turns", stage.domain.on(&device), Duration::ZERO).unwrap();
    let (first, second) = (host.stream().unwrap(), device.stream().unwrap());
    let (go, wait) = mpsc::channel::<()>();
    first.call(move || assert!(wait.recv().is_err())).unwrap();
    let permit = creator.acquire(&first, PATIENCE).unwrap();
    permit.release(&first).unwrap();
    hook.hook().aim("register", 1);
    let tried = member.acquire(&second, Duration::ZERO).optional().unwrap();
    assert!(tried.is_none());
    eventually("the thread fails", || {
        hook.hook().has_struck() && Arc::strong_count(&member.local) == 1
    });
    let permit = member.acquire(&second, PATIENCE).unwrap();
    drop(go);
    permit.release(&second).unwrap();
    second.synchronize(PATIENCE).unwrap();
}

#[test]
fn a_release_that_is_held_up_holds_up_no_reactor_and_no_other_thread() {
    let (stage, (hook, device)) = (Stage::new("held-up"), FullQueue::device());
    let (creator, member) = stage.both(&device, 1);
    let (stuck, other) = (device.stream().unwrap(), device.stream().unwrap());
    let permit = member.acquire(&stuck, PATIENCE).unwrap();
    hook.hook().hold(&stuck);
    let on = stuck.clone();
    let release = std::thread::spawn(move || permit.release(&on));
    hook.hook().wait_until_held_up();
    // Only a wrong member does this: the permit goes to others although its holder has not released
    // it.
    creator.local.shared_page.hand_on(0, CREATOR);
    let (semaphore, on) = (member.clone(), other.clone());
    let permit = in_time(move || semaphore.acquire(&on, PATIENCE).unwrap());
    let monitor = member.local.monitor.clone();
    in_time(move || monitor.on_tick(0));
    in_time(move || permit.release_now());
    // Another member gets a page to share with the blocked one.
    let third = Semaphore::open("turns", stage.domain.on(&device), Duration::ZERO).unwrap();
    let (semaphore, on) = (third.clone(), other.clone());
    in_time(move || semaphore.acquire(&on, PATIENCE).unwrap()).release_now();
    assert!(!release.is_finished(), "nothing holds it up");
    hook.hook().unblock();
    release.join().unwrap().unwrap();
    [stuck, other]
        .iter()
        .for_each(|stream| stream.synchronize(PATIENCE).unwrap());
}

#[test]
fn a_members_death_ends_the_waits_for_it_whatever_it_promised() {
    for (round, nonsense) in [VALUE_MAX, VALUE_MAX + 1, 1 << 63, u64::MAX]
        .into_iter()
        .enumerate()
    {
        let (stage, device) = (Stage::new(&format!("nonsense-{round}")), Device::host());
        let (creator, member) = stage.both(&device, 1);
        let (streams, go) = chain(&[&creator, &member], &device);
        let pages = member.local.signals.shared_with(CREATOR);
        pages.iter().for_each(|page| {
            page.at::<AtomicU64>(signals::promised_at(1, 0))
                .store(nonsense, SeqCst)
        });
        let late = device.stream().unwrap();
        drop(member.acquire(&late, PATIENCE).unwrap());
        member.local.monitor.handle_death(CREATOR);
        late.synchronize(PATIENCE).unwrap();
        drop(go);
        streams
            .iter()
            .for_each(|stream| stream.synchronize(PATIENCE).unwrap());
    }
}
