//! Semaphores with all members in one process.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc;
use std::time::Duration;
use std::time::Instant;

use super::driver_failures::eventually;
use super::*;
use crate::error::NameFault;
use crate::fork::CloseOnForkFd;
use crate::runtime::fence::Fence;
use crate::wait::OptionalExtension;
use crate::wait::Wait;
use crate::{Device, Domain};

const WAIT: Duration = Duration::from_secs(20);

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
        let creator = Semaphore::new("turns", permits, self.domain.on(device)).unwrap();
        (
            creator,
            Semaphore::open("turns", self.domain.on(device), Duration::ZERO).unwrap(),
        )
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.domain.path());
    }
}

#[test]
fn a_try_does_not_wait_to_connect_to_the_last_holder_and_holds_no_permit_meanwhile() {
    let (stage, device) = (Stage::new("unknowns"), Device::host());
    let (creator, member) = stage.both(&device, 1);
    let ((go, held), (busy, stream)) = (
        mpsc::channel::<()>(),
        (device.stream().unwrap(), device.stream().unwrap()),
    );
    busy.call(move || assert!(held.recv().is_err())).unwrap();
    member.acquire(&busy, WAIT).unwrap().release(&busy).unwrap();
    // As during a last holder's stop.
    let connecting = creator.local.block_connecting(member.local.member);
    for _ in 0..3 {
        assert!(
            creator
                .acquire(&stream, Duration::ZERO)
                .optional()
                .unwrap()
                .is_none()
        );
        assert_eq!(creator.state().available, 1);
    }
    drop(connecting);
    let start = Instant::now();
    let permit = loop {
        assert!(start.elapsed() < 3 * WAIT, "known by now");
        match creator.acquire(&stream, Duration::ZERO).optional().unwrap() {
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
fn a_member_is_connected_to_although_its_work_ends_before_the_thread_that_connects_begins() {
    let (stage, device) = (Stage::new("gone-ahead"), Device::host());
    let (creator, member) = stage.both(&device, 1);
    let ((go, held), busy) = (mpsc::channel::<()>(), device.stream().unwrap());
    busy.call(move || assert!(held.recv().is_err())).unwrap();
    member.acquire(&busy, WAIT).unwrap().release(&busy).unwrap();
    let local = &creator.local;
    let unconnected = local.unconnected_signallers(0);
    assert_eq!(unconnected, [member.local.member]);
    drop(go);
    busy.synchronize(WAIT).unwrap();
    assert!(
        local.unconnected_signallers(0).is_empty(),
        "nothing is owed"
    );
    local.start_connecting(unconnected).unwrap();
    let start = Instant::now();
    while !local.is_connected_to(member.local.member) {
        assert!(start.elapsed() < WAIT, "connected to");
        std::thread::yield_now();
    }
}

#[test]
fn a_try_takes_a_permit_of_members_that_are_known_beside_one_of_a_unknown() {
    let (stage, device) = (Stage::new("beside"), Device::host());
    let (creator, member) = stage.both(&device, 2);
    let ((go, held), (busy, stream)) = (
        mpsc::channel::<()>(),
        (device.stream().unwrap(), device.stream().unwrap()),
    );
    busy.call(move || assert!(held.recv().is_err())).unwrap();
    let own = creator.acquire(&busy, WAIT).unwrap();
    let others = member.acquire(&busy, WAIT).unwrap();
    let (known, unknown) = (own.index, others.index);
    own.release(&busy).unwrap();
    others.release(&busy).unwrap();
    // The other member does not respond.
    let connecting = creator.local.block_connecting(member.local.member);
    creator.local.hint.store(unknown, Relaxed);
    let permit = creator
        .acquire(&stream, Duration::ZERO)
        .optional()
        .unwrap()
        .expect("a permit is free");
    assert_eq!(permit.index, known);
    assert!(
        creator
            .acquire(&stream, Duration::ZERO)
            .optional()
            .unwrap()
            .is_none()
            && creator.state().available == 1
    );
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
        let waiter = scope.spawn(|| {
            let cancelled = || called_off.load(SeqCst);
            creator.acquire_host(Wait::at_most(WAIT).unless(&cancelled))
        });
        while creator.state().waiting == 0 {
            std::thread::yield_now();
        }
        called_off.store(true, SeqCst);
        let error = waiter.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
    });
    assert_eq!((creator.state().available, creator.state().waiting), (0, 0));
    drop(held);
    let stream = device.stream().unwrap();
    called_off.store(false, SeqCst);
    drop(
        creator
            .acquire(
                &stream,
                Wait::at_most(WAIT).unless(&|| called_off.load(SeqCst)),
            )
            .unwrap(),
    );
}

#[test]
fn a_wait_whose_cancellation_panics_leaves_the_line() {
    let (stage, device) = (Stage::new("panics"), Device::host());
    let (creator, member) = stage.both(&device, 1);
    let held = Cell::new(Some(member.acquire_host(WAIT).unwrap()));
    for is_granted in [false, true] {
        let cancelled = || {
            is_granted.then(|| held.take());
            panic!("a signal's handler")
        };
        let wait = Wait::at_most(WAIT).unless(&cancelled);
        let asked = AssertUnwindSafe(|| creator.acquire_host(wait).map(drop));
        assert!(std::panic::catch_unwind(asked).is_err());
        let free = u32::from(is_granted);
        assert_eq!(
            (creator.state().available, creator.state().waiting),
            (free, 0)
        );
    }
}

#[test]
fn waits_end_when_the_creator_closes_and_held_permits_stay_valid() {
    let (stage, device) = (Stage::new("closing"), Device::host());
    let (creator, member) = stage.both(&device, 1);
    let held = member.acquire_host(WAIT).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| member.acquire_host(WAIT).unwrap_err());
        let start = Instant::now();
        while creator.state().waiting == 0 && start.elapsed() < WAIT {
            std::thread::yield_now();
        }
        drop(creator);
        let told = waiter.join().unwrap();
        assert!(
            matches!(
                told,
                Error::PeerGone {
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
        member.acquire_host(Duration::ZERO).optional(),
        Err(Error::PeerGone { .. })
    ));
}

#[test]
fn another_kind_of_device_a_wrong_number_and_a_wrong_name_are_typed_errors() {
    let (stage, device) = (Stage::new("wrong"), Device::host());
    for permits in [0, PERMITS_MAX + 1] {
        let error = Semaphore::new("turns", permits, stage.domain.on(&device)).unwrap_err();
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
    let nobody = Semaphore::open("turns", stage.domain.on(&device), Duration::ZERO).unwrap_err();
    assert!(
        matches!(
            nobody,
            Error::NotFound {
                kind: Kind::Semaphore,
                ..
            }
        ),
        "{nobody}"
    );
    let first = Semaphore::new("turns", 1, stage.domain.on(&device)).unwrap();
    let taken = Semaphore::new("turns", 1, stage.domain.on(&device)).unwrap_err();
    assert!(
        matches!(taken, Error::Name(NameFault::Taken { .. })),
        "{taken}"
    );
    drop(first);
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
    assert!(
        creator
            .acquire(&stream, Duration::ZERO)
            .optional()
            .unwrap()
            .is_none()
    );
    let full = creator
        .acquire(&stream, Duration::from_millis(20))
        .unwrap_err();
    assert!(matches!(full, Error::Timeout { .. }), "{full}");
    drop(go);
    drop(creator.acquire(&stream, WAIT).unwrap());
    stream.synchronize(WAIT).unwrap();
}

/// Each member of `all` in turn acquires the permit on a stream of its own while the previous one
/// has work in progress.
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
    let third = Semaphore::open("turns", stage.domain.on(&device), Duration::ZERO).unwrap();
    let (streams, go) = chain(&[&creator, &member, &third, &creator], &device);
    assert!(
        streams[1..].iter().all(|stream| !stream.is_idle().unwrap()),
        "each waits for the one before"
    );
    // This process holds both ends of each page: all mappings and descriptors that exist.
    let mut inodes = BTreeSet::new();
    for (one, with) in [(&creator, &member), (&member, &third), (&third, &creator)] {
        let pages = one.local.signals.shared_with(with.local.member);
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
    // The third member removes all of the common page, behind the registrations of the devices, and
    // fills it with garbage.
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
    // A third member claims that the creator is about to signal, which never happens.
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
    let third = Semaphore::open("turns", stage.domain.on(&device), Duration::ZERO).unwrap();
    let (streams, go) = chain(&[&member, &creator, &third], &device);
    let more = device.stream().unwrap();
    drop(third.acquire(&more, WAIT).unwrap());
    // Each reactor does this at the proof of the member's death.
    creator.local.monitor.handle_death(member.local.member);
    streams[1].synchronize(WAIT).unwrap();
    third.local.monitor.handle_death(member.local.member);
    streams[2].synchronize(WAIT).unwrap();
    more.synchronize(WAIT).unwrap();
    drop(go);
    streams[0].synchronize(WAIT).unwrap();
}

#[test]
fn a_member_that_asks_again_and_again_holds_no_more_pages_than_all_members_could() {
    let (stage, device) = (Stage::new("again"), Device::host());
    let (creator, _member) = stage.both(&device, 1);
    let (streams, go) = chain(&[&creator], &device);
    let signals = &creator.local.signals;
    let ask = || {
        let draft = signals.draft()?;
        let page = CloseOnForkFd::duplicate(&draft).unwrap();
        signals.add_listener(7, page.into())
    };
    let asked = (0..1000).map(|_| ask()).take_while(Result::is_ok).count();
    assert_eq!(asked, super::signals::LISTENERS_MAX);
    drop(go);
    streams[0].synchronize(WAIT).unwrap();
    let start = Instant::now();
    while ask().is_err() {
        assert!(start.elapsed() < WAIT);
        std::thread::park_timeout(Duration::from_millis(1));
    }
}

#[test]
fn a_page_stays_while_a_stream_is_being_given_waits_on_it() {
    let (stage, device) = (Stage::new("given"), Device::host());
    let (creator, member) = stage.both(&device, 1);
    let (streams, go) = chain(&[&creator, &member, &creator, &member], &device);
    let signals = creator.local.signals.clone();
    let number = member.local.member;
    let pages: Vec<_> = (signals.shared_with(number).iter().map(Arc::downgrade)).collect();
    let left = || pages.iter().filter(|page| page.strong_count() > 0).count();
    assert_eq!(
        left(),
        2,
        "one that it signals on, and one that it waits on"
    );
    let waits = creator.local.waits(0);
    drop((go, member));
    streams
        .iter()
        .for_each(|stream| stream.synchronize(WAIT).unwrap());
    eventually("it has left", || signals.shared_with(number).is_empty());
    eventually("one page is no longer needed", || left() <= 1);
    // Behind the other one's turn.
    let (tell, told) = mpsc::channel();
    (signals.reactor).call_after(Fence::later(Arc::default()), move || tell.send(()).unwrap());
    told.recv_timeout(WAIT).unwrap();
    assert_eq!(left(), 1);
    drop(waits);
    eventually("no page is needed", || left() == 0);
}

#[test]
fn members_that_leave_take_their_pages_with_them() {
    let (stage, device) = (Stage::new("leavers"), Device::host());
    let creator = Semaphore::new("turns", 1, stage.domain.on(&device)).unwrap();
    for _ in 0..3 {
        let member = Semaphore::open("turns", stage.domain.on(&device), Duration::ZERO).unwrap();
        let number = member.local.member;
        let (streams, go) = chain(
            &[&creator, &creator, &member, &member, &creator, &creator],
            &device,
        );
        assert!(!creator.local.signals.shared_with(number).is_empty());
        drop((go, member));
        streams
            .iter()
            .for_each(|stream| stream.synchronize(WAIT).unwrap());
        let start = Instant::now();
        while !creator.local.signals.shared_with(number).is_empty() {
            assert!(start.elapsed() < WAIT);
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }
}
