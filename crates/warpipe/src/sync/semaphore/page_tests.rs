//! The shared words of a semaphore alone, with threads and numbers as members.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

use super::page::{WaitProgress, WaitSlot};
use super::*;

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
    let early = shared_page.begin_wait(2).unwrap();
    let late = shared_page.begin_wait(3).unwrap();
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
    // Member 1 is dead: as a holder, as a waiter, with a grant that it has not taken over, with one
    // that it has.
    let is_here = |member| member != 1;
    let holding = shared_page(1);
    holding.take_free(1, 0).unwrap();
    let slot = holding.begin_wait(2).unwrap();
    holding.sweep(is_here);
    assert_eq!(
        granted(holding.check_wait(slot, 2)),
        0,
        "passed on to the waiter"
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
fn a_waiter_whose_granter_died_before_the_wake_up_is_woken_by_the_sweep() {
    let shared_page = shared_page(1);
    shared_page.take_free(1, 0).unwrap();
    let slot = shared_page.begin_wait(2).unwrap();
    shared_page.grant_without_wake_up(0);
    assert_eq!(shared_page.wake_ups(slot), 0);
    shared_page.sweep(|member| member == 2);
    assert!(shared_page.wake_ups(slot) > 0);
    assert_eq!(granted(shared_page.check_wait(slot, 2)), 0);
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
            // Half of the rounds use few distinct values: phases and owners that look valid.
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

/// Threads as members that take, wait, give up and die at any point, beside a thread that sweeps.
#[test]
fn never_more_than_the_maximum_are_inside_and_all_permits_are_back_at_the_end() {
    const PERMITS: u32 = 3;
    let shared_page = shared_page(PERMITS);
    let next = AtomicU32::new(1);
    let here = Mutex::new(BTreeSet::from([CREATOR]));
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
                        // stays in place, for the sweep of a dead member
                        WaitProgress::Waiting if once_in(500) => return None,
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
