//! The words alone, with threads and numbers as members, and the face in one process.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Mutex, mpsc};
use std::time::Instant;

use super::page::{WaitProgress, WaitSlot};
use super::*;
use crate::backend::testing::{Delaying, Wrapped};

const WAIT: Duration = Duration::from_secs(20);

fn shared_page(permits: u32) -> SemaphorePage {
    SemaphorePage::new(
        SharedPage::create(None, page::bytes_for(permits))
            .unwrap()
            .0,
        permits,
    )
}

fn granted(look: WaitProgress) -> u32 {
    match look {
        WaitProgress::Granted { permit, .. } => permit,
        other => panic!("{other:?}"),
    }
}

#[test]
fn permits_go_to_the_oldest_waiter_and_then_become_free() {
    let shared_page = shared_page(1);
    assert_eq!(shared_page.take_free(7, 0), Some(0));
    assert_eq!(shared_page.take_free(8, 0), None);
    let places: Vec<WaitSlot> = (1..=3)
        .map(|member| shared_page.begin_wait(member).unwrap())
        .collect();
    let mut holder = 7;
    for (member, slot) in (1..=3).zip(places) {
        assert_eq!(shared_page.check_wait(slot, member), WaitProgress::Waiting);
        shared_page.hand_on(0, holder);
        assert_eq!(shared_page.take_free(9, 0), None, "nobody overtakes");
        let WaitProgress::Granted { permit: 0, passed } = shared_page.check_wait(slot, member)
        else {
            panic!("not {member}'s")
        };
        assert_eq!(passed, u64::from(member) - 1);
        holder = member;
    }
    assert!(!shared_page.has_waiters());
    shared_page.hand_on(0, holder);
    assert_eq!(shared_page.available(), 1);
}

#[test]
fn a_waiter_that_gives_up_leaves_nothing_and_keeps_what_it_was_given_meanwhile() {
    let shared_page = shared_page(1);
    shared_page.take_free(1, 0).unwrap();
    let (early, late) = (
        shared_page.begin_wait(2).unwrap(),
        shared_page.begin_wait(3).unwrap(),
    );
    assert_eq!(shared_page.cancel_wait(early, 2), WaitProgress::Waiting);
    shared_page.hand_on(0, 1);
    assert_eq!(granted(shared_page.cancel_wait(late, 3)), 0);
    assert!(!shared_page.has_waiters());
    shared_page.hand_on(0, 3);
    assert_eq!(shared_page.available(), 1);
}

#[test]
fn a_permit_that_became_free_unseen_is_matched_with_a_waiter() {
    let shared_page = shared_page(2);
    let slot = shared_page.begin_wait(5).unwrap();
    shared_page.match_waiters(6);
    granted(shared_page.check_wait(slot, 5));
    assert_eq!(shared_page.available(), 1);
}

#[test]
fn wherever_a_member_dies_its_permit_comes_back_once() {
    // Dead: 1. Holding; waiting; granted to and not taken over; granted to and taken over.
    let is_here = |member| member != 1;
    let holding = shared_page(1);
    holding.take_free(1, 0).unwrap();
    let slot = holding.begin_wait(2).unwrap();
    holding.sweep(is_here);
    assert_eq!(
        granted(holding.check_wait(slot, 2)),
        0,
        "passed on to who waits"
    );

    let waiting = shared_page(1);
    waiting.take_free(2, 0).unwrap();
    waiting.begin_wait(1).unwrap();
    waiting.sweep(is_here);
    waiting.hand_on(0, 2);
    assert_eq!((waiting.available(), waiting.has_waiters()), (1, false));

    for is_taken_over in [false, true] {
        let granted_to = shared_page(1);
        granted_to.take_free(2, 0).unwrap();
        let slot = granted_to.begin_wait(1).unwrap();
        granted_to.hand_on(0, 2);
        if is_taken_over {
            granted(granted_to.check_wait(slot, 1));
        }
        assert_eq!(granted_to.available(), 0);
        granted_to.sweep(is_here);
        assert_eq!(
            (granted_to.available(), granted_to.has_waiters()),
            (1, false)
        );
    }
}

#[test]
fn a_permit_that_a_dead_member_has_handed_over_stays_with_the_living_one() {
    let shared_page = shared_page(1);
    shared_page.take_free(1, 0).unwrap();
    let slot = shared_page.begin_wait(2).unwrap();
    shared_page.hand_on(0, 1);
    shared_page.sweep(|member| member != 1);
    assert_eq!(shared_page.available(), 0);
    assert_eq!(granted(shared_page.check_wait(slot, 2)), 0);
    shared_page.sweep(|member| member != 1);
    assert_eq!(shared_page.available(), 0);
}

#[test]
fn what_the_dead_owe_is_stored_only_behind_what_the_living_do() {
    let shared_page = shared_page(1);
    for member in [1, 2, 3] {
        shared_page.take_free(member, 0).unwrap();
        shared_page.promise(0, member);
        shared_page.hand_on(0, member);
    }
    let is_dead = |member| member == 2;
    shared_page.complete_dead_signals(is_dead);
    assert_eq!(
        shared_page.word(0).load(),
        0,
        "the first is alive and its work under way"
    );
    shared_page.word(0).store(1);
    shared_page.complete_dead_signals(is_dead);
    assert_eq!(
        shared_page.word(0).load(),
        2,
        "the second's, and not the third's"
    );
    shared_page.word(0).store(3);
    shared_page.complete_dead_signals(is_dead);
    assert_eq!(shared_page.word(0).load(), 3, "no word goes back");
}

#[test]
fn no_member_panics_or_loops_whatever_another_one_writes() {
    let mut x = 0x9e37_79b9_7f4a_7c15u64;
    let mut any = move || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x
    };
    for round in 0..60 {
        let (page, _fd) = SharedPage::create(None, page::bytes_for(3)).unwrap();
        for word in 0..page.bytes() / 8 {
            // Few distinct values in half of the rounds: phases and owners that look right.
            let value = if round % 2 == 0 {
                any()
            } else {
                any() & 0x0000_0003_0000_0fff
            };
            page.at::<AtomicU64>(8 * word).store(value, SeqCst);
        }
        let shared_page = SemaphorePage::new(page, 3);
        let slot = shared_page.begin_wait(1);
        shared_page.match_waiters(1);
        if let Some(slot) = slot {
            let _ = (
                shared_page.check_wait(slot, 1),
                shared_page.cancel_wait(slot, 1),
            );
        }
        shared_page.hand_on(2, 1);
        shared_page.promise(1, 1);
        shared_page.complete_dead_signals(|_| true);
        shared_page.sweep(|member| member == 1);
        shared_page.wake_member(1);
        assert!(
            shared_page.available() <= 3
                && shared_page.waiting() <= page::WAIT_SLOTS
                && shared_page.in_flight(0).count() <= 8
        );
    }
}

/// Threads as members that take, wait, give up and die at any point, beside one that sweeps.
#[test]
fn never_more_than_the_maximum_are_inside_and_all_permits_are_back_at_the_end() {
    const PERMITS: u32 = 3;
    let (shared_page, next, here) = (
        shared_page(PERMITS),
        AtomicU32::new(1),
        Mutex::new(BTreeSet::from([CREATOR])),
    );
    let (inside, is_done) = (AtomicU32::new(0), AtomicBool::new(false));
    let arrive = || {
        let member = next.fetch_add(1, SeqCst);
        here.lock().unwrap().insert(member);
        member
    };
    let live = |seed: u64| {
        let (mut x, mut me) = (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, arrive());
        let mut once_in = |times: u64| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x % times == 0
        };
        for _ in 0..3_000 {
            let direct = if shared_page.has_waiters() {
                None
            } else {
                shared_page.take_free(me, 0)
            };
            let permit = direct.or_else(|| {
                let slot = shared_page.begin_wait(me)?;
                shared_page.match_waiters(me);
                loop {
                    if once_in(40) {
                        return match shared_page.cancel_wait(slot, me) {
                            WaitProgress::Granted { permit, .. } => Some(permit),
                            _ => None,
                        };
                    }
                    match shared_page.check_wait(slot, me) {
                        WaitProgress::Granted { permit, .. } => return Some(permit),
                        WaitProgress::Waiting if once_in(500) => return None, // and stays there, for the dead one to be swept
                        WaitProgress::Waiting => std::thread::yield_now(),
                        WaitProgress::Lost => panic!("nobody overwrites places"),
                    }
                }
            });
            let is_dying = once_in(50);
            if let Some(permit) = permit {
                assert!(
                    inside.fetch_add(1, SeqCst) < PERMITS,
                    "more inside than there are permits"
                );
                std::hint::spin_loop();
                inside.fetch_sub(1, SeqCst);
                if !is_dying {
                    shared_page.hand_on(permit, me);
                }
            }
            if is_dying || permit.is_none() {
                here.lock().unwrap().remove(&me);
                me = arrive();
            }
        }
        here.lock().unwrap().remove(&me);
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(SeqCst) {
                let here = here.lock().unwrap();
                shared_page.sweep(|member| here.contains(&member));
                drop(here);
                std::thread::yield_now();
            }
        });
        let live = &live;
        let lives: Vec<_> = (1..=6)
            .map(|seed| scope.spawn(move || live(seed)))
            .collect();
        let ended: Vec<_> = lives.into_iter().map(|life| life.join()).collect();
        is_done.store(true, SeqCst);
        ended.into_iter().for_each(|end| end.unwrap());
    });
    shared_page.sweep(|member| member == CREATOR);
    assert_eq!(
        (
            shared_page.available(),
            shared_page.waiting(),
            shared_page.has_waiters()
        ),
        (PERMITS, 0, false)
    );
}

pub(super) struct Stage {
    pub(super) domain: Domain,
}

impl Stage {
    pub(super) fn new(title: &str) -> Stage {
        let folder =
            std::env::temp_dir().join(format!("warpipe-semaphore-{title}-{}", std::process::id()));
        Stage {
            domain: Domain::at(folder).unwrap(),
        }
    }

    pub(super) fn both(&self, device: &Device, permits: u32) -> (Semaphore, Semaphore) {
        let creator = Semaphore::create(&self.domain, "turns", device, permits).unwrap();
        (
            creator,
            Semaphore::open(&self.domain, "turns", device).unwrap(),
        )
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.domain.path());
    }
}

#[test]
fn a_permit_that_is_held_makes_others_time_out_until_it_is_released() {
    let (stage, device) = (Stage::new("timeout"), Device::host());
    let (creator, member) = stage.both(&device, 1);
    let stream = device.stream().unwrap();
    let held = member.acquire(&stream, WAIT).unwrap();
    assert!(
        creator.try_acquire(&stream).unwrap().is_none()
            && creator.try_acquire_host().unwrap().is_none()
    );
    let late = creator.acquire_host(Duration::from_millis(20)).unwrap_err();
    assert!(matches!(late, Error::Timeout { .. }), "{late}");
    assert_eq!((creator.available(), creator.waiting()), (0, 0));
    held.release(&stream).unwrap();
    drop(creator.acquire_host(WAIT).unwrap());
    assert_eq!(member.available(), 1);
}

#[test]
fn a_try_does_not_wait_to_connect_to_the_last_holder_and_holds_no_permit_meanwhile() {
    let (stage, device) = (Stage::new("strangers"), Device::host());
    let (creator, member) = stage.both(&device, 1);
    let ((go, held), (busy, stream)) = (
        mpsc::channel::<()>(),
        (device.stream().unwrap(), device.stream().unwrap()),
    );
    busy.call(move || assert!(held.recv().is_err())).unwrap();
    member.acquire(&busy, WAIT).unwrap().release(&busy).unwrap();
    // As while the last holder stands still.
    let connecting = creator.local.block_connecting();
    for _ in 0..3 {
        assert!(creator.try_acquire(&stream).unwrap().is_none());
        assert_eq!(creator.available(), 1);
    }
    drop(connecting);
    let start = Instant::now();
    let permit = loop {
        assert!(start.elapsed() < 3 * WAIT, "known by now");
        match creator.try_acquire(&stream).unwrap() {
            Some(permit) => break permit,
            None => std::thread::yield_now(),
        }
    };
    assert!(!stream.is_idle().unwrap(), "behind the last holder's work");
    drop(go);
    stream.synchronize(WAIT).unwrap();
    permit.release(&stream).unwrap();
}

#[test]
fn a_try_takes_a_permit_of_members_that_are_known_beside_one_of_a_stranger() {
    let (stage, device) = (Stage::new("beside"), Device::host());
    let (creator, member) = stage.both(&device, 2);
    let ((go, held), (busy, stream)) = (
        mpsc::channel::<()>(),
        (device.stream().unwrap(), device.stream().unwrap()),
    );
    busy.call(move || assert!(held.recv().is_err())).unwrap();
    let (own, others) = (
        creator.acquire(&busy, WAIT).unwrap(),
        member.acquire(&busy, WAIT).unwrap(),
    );
    let (known, stranger) = (own.index, others.index);
    own.release(&busy).unwrap();
    others.release(&busy).unwrap();
    // The stranger stands still.
    let connecting = creator.local.block_connecting();
    creator.local.hint.store(stranger, Relaxed);
    let permit = creator
        .try_acquire(&stream)
        .unwrap()
        .expect("a permit is free");
    assert_eq!(permit.index, known);
    assert!(creator.try_acquire(&stream).unwrap().is_none() && creator.available() == 1);
    drop((connecting, go));
    permit.release(&stream).unwrap();
    stream.synchronize(WAIT).unwrap();
}

#[test]
fn a_cancelled_wait_leaves_the_line_and_the_next_waiter_is_served() {
    let (stage, device) = (Stage::new("called-off"), Device::host());
    let (creator, member) = stage.both(&device, 1);
    let held = member.acquire_host(WAIT).unwrap();
    let called_off = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| creator.acquire_unless(None, WAIT, &called_off));
        while creator.waiting() == 0 {
            std::thread::yield_now();
        }
        called_off.store(true, SeqCst);
        let error = waiter.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
    });
    assert_eq!((creator.available(), creator.waiting()), (0, 0));
    drop(held);
    let stream = device.stream().unwrap();
    called_off.store(false, SeqCst);
    drop(
        creator
            .acquire_unless(Some(&stream), WAIT, &called_off)
            .unwrap(),
    );
}

#[test]
fn a_waiter_gets_the_permit_and_nobody_overtakes_it() {
    let (stage, device) = (Stage::new("queue"), Device::host());
    let (creator, member) = stage.both(&device, 1);
    let held = creator.acquire_host(WAIT).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| member.acquire_host(WAIT).unwrap().release_now());
        let start = Instant::now();
        while creator.waiting() == 0 && start.elapsed() < WAIT {
            std::thread::yield_now();
        }
        assert!(creator.try_acquire_host().unwrap().is_none());
        held.release_now();
        waiter.join().unwrap();
    });
    assert_eq!(creator.available(), 1);
}

#[test]
fn waits_end_when_the_creator_closes_and_held_permits_stay_valid() {
    let (stage, device) = (Stage::new("closing"), Device::host());
    let (creator, member) = stage.both(&device, 1);
    let held = member.acquire_host(WAIT).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| member.acquire_host(WAIT).unwrap_err());
        let start = Instant::now();
        while creator.waiting() == 0 && start.elapsed() < WAIT {
            std::thread::yield_now();
        }
        drop(creator);
        let told = waiter.join().unwrap();
        assert!(
            matches!(
                told,
                Error::OwnerGone {
                    graceful: true,
                    kind: Kind::Semaphore,
                    ..
                }
            ),
            "{told}"
        );
    });
    held.release_now();
    assert!(matches!(
        member.try_acquire_host(),
        Err(Error::OwnerGone { .. })
    ));
}

#[test]
fn another_kind_of_device_a_wrong_number_and_a_wrong_name_are_typed_errors() {
    let (stage, device) = (Stage::new("wrong"), Device::host());
    for permits in [0, PERMITS_MAX + 1] {
        let error = Semaphore::create(&stage.domain, "turns", &device, permits).unwrap_err();
        assert!(
            matches!(
                error,
                Error::Argument {
                    argument: "permits",
                    ..
                }
            ),
            "{error}"
        );
    }
    let nobody = Semaphore::open(&stage.domain, "turns", &device).unwrap_err();
    assert!(
        matches!(
            nobody,
            Error::NoOwner {
                kind: Kind::Semaphore,
                ..
            }
        ),
        "{nobody}"
    );
    let first = Semaphore::create(&stage.domain, "turns", &device, 1).unwrap();
    let taken = Semaphore::create(&stage.domain, "turns", &device, 1).unwrap_err();
    assert!(matches!(taken, Error::NameTaken { .. }), "{taken}");
    drop(first);
}

/// What the next holder's stream sees of work that is not done until `go` is dropped.
fn seen_by_the_next_holder(stage: &Stage, device: &Device) -> (bool, u64) {
    let (creator, member) = stage.both(device, 1);
    let (first, second) = (device.stream().unwrap(), device.stream().unwrap());
    let (written, seen) = (
        Arc::new(AtomicU64::new(0)),
        Arc::new(AtomicU64::new(u64::MAX)),
    );
    let (go, wait) = mpsc::channel::<()>();
    let permit = creator.acquire(&first, WAIT).unwrap();
    let data = written.clone();
    first
        .call(move || {
            let _ = wait.recv();
            data.store(1, SeqCst);
        })
        .unwrap();
    permit.release(&first).unwrap();
    let permit = member.acquire(&second, WAIT).unwrap();
    let (data, into) = (written.clone(), seen.clone());
    second
        .call(move || into.store(data.load(SeqCst), SeqCst))
        .unwrap();
    let was_early = second.synchronize(Duration::from_millis(50)).is_ok();
    drop(go);
    second.synchronize(WAIT).unwrap();
    permit.release(&second).unwrap();
    first.synchronize(WAIT).unwrap();
    (was_early, seen.load(SeqCst))
}

#[test]
fn the_next_holders_stream_waits_for_the_last_ones_work_and_without_the_wait_it_does_not() {
    let stage = Stage::new("order");
    assert_eq!(seen_by_the_next_holder(&stage, &Device::host()), (false, 1));
    let control = Delaying {
        signal_late: Duration::ZERO,
        waits: false,
    };
    let control = Device::from_backend(Wrapped::new(Device::host().backend().clone(), control));
    assert_eq!(seen_by_the_next_holder(&stage, &control), (true, 0));
}

#[test]
fn a_release_on_another_stream_is_behind_the_last_holders_work_too() {
    let (stage, device) = (Stage::new("other"), Device::host());
    let (creator, member) = stage.both(&device, 1);
    let streams: Vec<Stream> = (0..3).map(|_| device.stream().unwrap()).collect();
    let (go, wait) = mpsc::channel::<()>();
    let first = creator.acquire(&streams[0], WAIT).unwrap();
    streams[0]
        .call(move || assert!(wait.recv().is_err()))
        .unwrap();
    first.release(&streams[0]).unwrap();
    member
        .acquire(&streams[1], WAIT)
        .unwrap()
        .release(&streams[2])
        .unwrap();
    let third = creator.acquire_host(Duration::from_millis(50)).unwrap_err();
    assert!(matches!(third, Error::Timeout { .. }), "{third}");
    drop(go);
    drop(creator.acquire_host(WAIT).unwrap());
    streams
        .iter()
        .for_each(|stream| stream.synchronize(WAIT).unwrap());
}

#[test]
fn no_more_works_than_the_limit_are_in_flight() {
    let (stage, device) = (Stage::new("depth"), Device::host());
    let (creator, _member) = stage.both(&device, 1);
    let stream = device.stream().unwrap();
    let (go, wait) = mpsc::channel::<()>();
    stream.call(move || assert!(wait.recv().is_err())).unwrap();
    for _ in 0..IN_FLIGHT_MAX {
        creator
            .acquire(&stream, WAIT)
            .unwrap()
            .release(&stream)
            .unwrap();
    }
    assert!(creator.try_acquire(&stream).unwrap().is_none());
    let full = creator
        .acquire(&stream, Duration::from_millis(20))
        .unwrap_err();
    assert!(matches!(full, Error::Timeout { .. }), "{full}");
    drop(go);
    drop(creator.acquire(&stream, WAIT).unwrap());
    stream.synchronize(WAIT).unwrap();
}

/// Member `index` of `all` acquires the permit on a stream of its own while the one before it has work under way.
pub(super) fn chain(all: &[&Semaphore], device: &Device) -> (Vec<Stream>, mpsc::Sender<()>) {
    let streams: Vec<Stream> = all.iter().map(|_| device.stream().unwrap()).collect();
    let (go, held) = mpsc::channel::<()>();
    streams[0]
        .call(move || assert!(held.recv().is_err()))
        .unwrap();
    for (member, stream) in all.iter().zip(&streams) {
        member
            .acquire(stream, WAIT)
            .unwrap()
            .release(stream)
            .unwrap();
    }
    (streams, go)
}

#[test]
fn no_page_that_a_members_stream_waits_on_can_be_removed_or_is_anybody_elses() {
    let (stage, device) = (Stage::new("holes"), Device::host());
    let (creator, member) = stage.both(&device, 1);
    let third = Semaphore::open(&stage.domain, "turns", &device).unwrap();
    let (streams, go) = chain(&[&creator, &member, &third, &creator], &device);
    assert!(
        streams[1..].iter().all(|stream| !stream.is_idle().unwrap()),
        "each waits for the one before"
    );
    // This process holds both ends of each page: all mappings and descriptors that there are.
    let mut inodes = BTreeSet::new();
    for (who, with) in [(&creator, &member), (&member, &third), (&third, &creator)] {
        let pages = who.local.signals().shared_with(with.local.member);
        assert!(!pages.is_empty());
        for page in pages {
            let (inode, is_removed) =
                crate::hostile::holes::removes_page_of(page.at::<AtomicU64>(0));
            assert!(!is_removed);
            inodes.insert(inode);
        }
    }
    assert!(inodes.len() >= 3, "a page for each pair: {inodes:?}");
    drop(go);
    streams
        .iter()
        .for_each(|stream| stream.synchronize(WAIT).unwrap());
}

#[test]
fn a_stream_goes_on_in_time_whatever_a_third_member_does_to_the_page_of_all() {
    let (stage, device) = (Stage::new("common"), Device::host());
    let (creator, member) = stage.both(&device, 1);
    let (streams, go) = chain(&[&creator, &member], &device);
    // The third removes all of the common page, behind whatever the devices have registered, and fills it with nonsense.
    let page = creator.local.shared_page.first_word();
    let (_, is_removed) = crate::hostile::holes::removes_page_of(page);
    assert!(
        is_removed,
        "it is everybody's: the streams must not depend on it"
    );
    creator.local.shared_page.scribble(u64::MAX / 3);
    assert!(!streams[1].is_idle().unwrap(), "nothing goes early");
    drop(go);
    streams
        .iter()
        .for_each(|stream| stream.synchronize(WAIT).unwrap());
}

#[test]
fn a_stream_waits_for_nothing_that_a_signaller_has_not_promised() {
    let (stage, device) = (Stage::new("promised"), Device::host());
    let (creator, member) = stage.both(&device, 1);
    let stream = device.stream().unwrap();
    // A third member says that the creator is about to signal, which never comes.
    creator.local.shared_page.promise(0, CREATOR);
    creator.local.shared_page.promise(0, CREATOR);
    member
        .acquire(&stream, WAIT)
        .unwrap()
        .release(&stream)
        .unwrap();
    stream.synchronize(WAIT).unwrap();
}

#[test]
fn streams_go_on_when_the_member_that_they_wait_for_is_dead() {
    let (stage, device) = (Stage::new("dead"), Device::host());
    let (creator, member) = stage.both(&device, 1);
    let third = Semaphore::open(&stage.domain, "turns", &device).unwrap();
    let (streams, go) = chain(&[&member, &creator, &third], &device);
    let more = device.stream().unwrap();
    drop(third.acquire(&more, WAIT).unwrap());
    // What each reactor does at the proof of the member's death.
    creator.local.monitor().handle_death(member.local.member);
    streams[1].synchronize(WAIT).unwrap();
    third.local.monitor().handle_death(member.local.member);
    streams[2].synchronize(WAIT).unwrap();
    more.synchronize(WAIT).unwrap();
    drop(go);
    streams[0].synchronize(WAIT).unwrap();
}

#[test]
fn members_that_leave_take_their_pages_with_them() {
    let (stage, device) = (Stage::new("leavers"), Device::host());
    let creator = Semaphore::create(&stage.domain, "turns", &device, 1).unwrap();
    for _ in 0..3 {
        let member = Semaphore::open(&stage.domain, "turns", &device).unwrap();
        let number = member.local.member;
        let (streams, go) = chain(
            &[&creator, &creator, &member, &member, &creator, &creator],
            &device,
        );
        assert!(!creator.local.signals().shared_with(number).is_empty());
        drop((go, member));
        streams
            .iter()
            .for_each(|stream| stream.synchronize(WAIT).unwrap());
        let start = Instant::now();
        while !creator.local.signals().shared_with(number).is_empty() {
            assert!(start.elapsed() < WAIT);
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }
}
