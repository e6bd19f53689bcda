//! Every order of steps, with a death at any of them; and the faults that each search must find.

use warpipe::verify::plant::Effect::{Omitted, Says, Split};
use warpipe::verify::plant::{Effect, Op, Plant};
use warpipe::verify::states::pool::{self, Fault};
use warpipe::verify::states::queue;
use warpipe::verify::states::semaphore::Patience::{GivesUp, Waits};
use warpipe::verify::states::semaphore::{Semaphore, Sweeps};
use warpipe::verify::steps::{self, Found, Model};

const STATES_MAX: usize = 3_000_000;

fn search<M: Model>(name: &str, deaths: usize, make: impl Fn() -> M) {
    let start = std::time::Instant::now();
    match steps::search(make, deaths, STATES_MAX) {
        Ok(Found { states, steps }) => {
            println!(
                "{name}: {states} states, {steps} steps in {:.1} s",
                start.elapsed().as_secs_f64()
            );
        }
        Err(error) => panic!("{name}: {error}"),
    }
}

fn caught<M: Model>(deaths: usize, make: impl Fn() -> M) {
    match steps::search(make, deaths, STATES_MAX) {
        Ok(Found { states, .. }) => panic!("{states} states, and nothing was noticed"),
        Err(error) if error.starts_with("more than") => panic!("{error}, and nothing was noticed"),
        Err(error) => println!("noticed: {}", error.lines().next().unwrap_or_default()),
    }
}

#[test]
fn of_two_members_with_one_permit_both_may_be_killed_at_any_step() {
    search("two members, one permit, two deaths", 2, || {
        Semaphore::new(&[Waits, Waits], 1, Sweeps::Proven)
    });
}

#[test]
fn a_wait_may_end_by_itself_and_any_member_be_killed() {
    search("an impatient one", 1, || {
        Semaphore::new(&[Waits, GivesUp], 1, Sweeps::Proven)
    });
}

#[test]
fn a_permit_is_handed_on_and_swept_while_a_third_one_tries() {
    search("a third one", 2, Semaphore::handing_on);
}

#[test]
fn nobody_sweeps_and_permits_are_lost() {
    caught(1, || Semaphore::new(&[Waits, Waits], 1, Sweeps::Never));
}

#[test]
fn a_sweep_before_the_proof_doubles_a_permit() {
    caught(0, || Semaphore::new(&[Waits, Waits], 1, Sweeps::Early));
}

/// One of them may leave.
fn two() -> Semaphore {
    Semaphore::new(&[Waits, GivesUp], 1, Sweeps::Proven)
}

/// Plants a fault in the semaphore's page and searches, which must find it.
fn catches(
    make: impl Fn() -> Semaphore,
    file: &'static str,
    line: &'static str,
    op: Op,
    effect: Effect,
) {
    let _planted = Plant {
        file,
        line,
        op,
        effect,
    }
    .sow();
    caught(1, make);
}

macro_rules! catch {
    ($($test:ident: $make:expr, $file:expr, $line:expr, $op:ident, $effect:expr;)*) => {
        mod plants {
            use super::*;

            $(#[test]
            fn $test() {
                catches($make, $file, $line, Op::$op, $effect);
            })*
        }
    };
}

catch! {
    a_permit_taken_in_two_steps: two, "sync/semaphore/page.rs", "owner.compare_exchange(0, me.into()", Rmw, Split;
    a_permit_granted_in_two_steps: two, "sync/semaphore/page.rs", "compare_exchange(seen, granted", Rmw, Split;
    a_wait_ended_in_two_steps: two, "sync/semaphore/page.rs", "compare_exchange(waiting, claimed", Rmw, Split;
    a_permit_that_is_not_freed: two, "sync/semaphore/page.rs", "                    self.owner(permit).store(0, SeqCst);", Store, Omitted;
    a_permit_that_is_not_taken_over: two, "sync/semaphore/page.rs", "self.owner(permit).store(me.into(), SeqCst)", Store, Omitted;
    a_grant_that_a_sweep_overlooks: Semaphore::handing_on, "sync/semaphore/page.rs", "            .map(|slot| self.slot_state(slot).load(SeqCst))", Load, Says(0);
    a_place_that_is_left_occupied: two, "sync/semaphore/page.rs", "fetch_and(!(1 << (slot % 64))", Rmw, Omitted;
    a_place_that_is_not_given_back: two, "sync/semaphore/page.rs", "self.slot_state(slot).store(FREE", Store, Omitted;
    a_waiter_that_is_not_seen: two, "sync/semaphore/page.rs", "fetch_or(1 <<", Rmw, Omitted;
    a_promise_without_a_name: two, "sync/semaphore/page.rs", "self.signaller(permit, value).store(me", Store, Omitted;
    a_debt_that_nobody_stores: two, "backend/word.rs", ".compare_exchange(from, value", Rmw, Omitted;
    a_dead_waiters_place_that_is_not_taken: two, "sync/semaphore/page.rs", "compare_exchange(seen, ours", Rmw, Says(0);
    a_dead_holders_permit_that_is_not_taken: two, "sync/semaphore/page.rs", "compare_exchange(owner, CREATOR", Rmw, Says(0);
}

#[test]
fn every_row_of_grants_to_two_peers_keeps_each_block_its_users() {
    let start = std::time::Instant::now();
    let states = pool::search(2, 6, Fault::None).unwrap_or_else(|wrong| panic!("{wrong}"));
    println!(
        "a pool of two blocks and two peers: {states} states in {:.1} s",
        start.elapsed().as_secs_f64()
    );
}

#[test]
fn every_fault_of_a_pool_is_found() {
    use Fault::{
        ClearsNothing, ForgetsBorrowers, FreesAtDeath, FreesAtGoodbye, GivesUncleared, NotesOneUser,
    };
    for fault in [
        FreesAtDeath,
        FreesAtGoodbye,
        ForgetsBorrowers,
        ClearsNothing,
        GivesUncleared,
        NotesOneUser,
    ] {
        match pool::search(2, 6, fault) {
            Ok(states) => panic!("{fault:?}: {states} states, and nothing was noticed"),
            Err(error) => println!("{fault:?} noticed: {error}"),
        }
    }
}

/// The longest rows of steps of a queue that are tried.
fn queue_steps() -> usize {
    if std::env::var_os("VERIFY_DEEPER").is_some() {
        8
    } else {
        7
    }
}

#[test]
fn every_row_of_steps_of_a_queue_keeps_each_job_one_outcome() {
    for is_in_order in [true, false] {
        let start = std::time::Instant::now();
        let states = queue::search(queue_steps(), is_in_order, queue::Fault::None);
        let states = states.unwrap_or_else(|wrong| panic!("{wrong}"));
        println!(
            "a queue, in order: {is_in_order}: {states} states in {:.1} s",
            start.elapsed().as_secs_f64()
        );
    }
}

#[test]
fn every_fault_of_a_queue_is_found() {
    use queue::Fault::{ForgetsLeases, ForgetsUntaken, NotesEveryEnd, NotesNoEnd, NotesNoUntaken};
    for fault in [
        ForgetsUntaken,
        NotesNoUntaken,
        NotesNoEnd,
        ForgetsLeases,
        NotesEveryEnd,
    ] {
        match queue::search(7, false, fault) {
            Ok(states) => panic!("{fault:?}: {states} states, and nothing was noticed"),
            Err(error) => println!("{fault:?} noticed: {error}"),
        }
    }
}
