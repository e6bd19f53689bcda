//! The models, and the faults that each must find.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use warpipe::verify::models::{
    self, Model, counter, gate, kernel_ring, rescue, ring, room, shares, sleep, table, timeline,
};
use warpipe::verify::plant::Effect::{Omitted, Order, Says, Split};
use warpipe::verify::plant::{Effect, Op, Plant};

macro_rules! hold {
    ($($test:ident: $model:expr;)*) => {
        $(#[test]
        fn $test() {
            holds($model);
        })*
    };
}

fn holds(model: Model) {
    let start = std::time::Instant::now();
    let executions = models::check(model).unwrap_or_else(|error| panic!("{}: {error}", model.name));
    println!(
        "{}: {executions} executions in {:.1} s",
        model.name,
        start.elapsed().as_secs_f64()
    );
    assert!(
        executions > 1,
        "a model in which nothing can happen in two orders"
    );
}

hold! {
    a_sample_that_is_taken_is_of_one_piece: ring::ONE_PIECE;
    a_sample_for_several_that_is_taken_is_of_one_piece: ring::ONE_PIECE_FOR_MANY;
    a_sample_is_taken_or_taken_back: ring::REVOKED;
    an_entry_that_is_held_is_stepped_over: ring::STEPPED_OVER;
    the_dead_readers_entries_are_used_again: ring::DROPPED;
    a_receiver_that_sleeps_is_woken_by_a_sample: sleep::RECEIVER;
    a_receiver_that_sleeps_is_woken_by_a_sample_for_several: sleep::ONE_OF_MANY;
    a_receiver_that_sleeps_is_woken_by_its_next_sender: sleep::NEWCOMER;
    who_parks_on_a_word_goes_on_when_it_is_reached: timeline::PARKED;
    who_parks_goes_on_when_a_survivor_stores_what_is_owed: timeline::ADVANCED;
    of_several_who_store_what_is_owed_none_takes_the_word_back: timeline::TAKEN_BACK;
    what_a_counter_reached_it_has_reached_ended_or_not: counter::ENDED;
    a_counter_that_two_end_has_one_last_value: counter::TWICE;
    a_copy_is_brought_up_and_never_back: counter::BROUGHT_UP;
    who_waits_for_a_permit_gets_it: room::HANDED_ON;
    a_wait_that_ends_has_a_permit_or_none: room::WITHDRAWN;
    of_two_who_take_a_permit_one_has_it: room::TAKEN;
    a_stream_that_waits_for_the_dead_is_let_go: rescue::LET_GO;
    what_was_complete_counts: rescue::WHOLE;
    what_was_not_complete_is_lost_to_everybody: rescue::LOST;
    a_share_is_claimed_or_withdrawn: shares::WITHDRAWN;
    memory_whose_offer_ends_is_not_let_go_while_a_receiver_has_it: shares::ENDED;
    a_block_whose_lend_ends_is_not_let_go_while_one_of_its_peers_has_it: shares::LENT;
    a_page_that_is_closed_while_its_receiver_claims_says_so_or_has_the_claim: shares::CLOSED;
    a_share_that_is_given_back_and_claimed_again_is_not_over: shares::GIVEN_BACK;
    an_object_is_whole_until_its_last_user_has_left_it: table::SHARED;
    an_object_that_is_locked_is_used_by_one_thread: table::ALONE;
    an_object_is_taken_or_dropped_and_once: table::TAKEN;
    an_object_that_is_put_back_behind_its_end_is_dropped: table::PUT_BACK;
    an_entry_holds_one_object: table::REUSED;
    an_item_is_read_whole_and_written_over_behind_its_release: kernel_ring::WHOLE;
    a_slot_is_written_again_when_every_consumer_has_released_it: kernel_ring::EVERY_CONSUMER;
    an_item_of_two_blocks_is_published_when_both_have_written: kernel_ring::SHARED;
    the_next_item_of_two_blocks_is_published_when_both_have_written: kernel_ring::SHARED_AGAIN;
    an_item_published_before_the_end_counts: kernel_ring::ENDED;
    the_end_of_a_process_waits_for_the_threads_inside: gate::APART;
    the_end_of_a_process_waits_for_all_of_one_entrance: gate::SHARED;
}

/// Plants a fault and runs a model, which must notice.
fn catches(model: Model, file: &'static str, line: &'static str, op: Op, effect: Effect) {
    let _planted = Plant {
        file,
        line,
        op,
        effect,
    }
    .sow();
    match models::check(model) {
        Ok(executions) => panic!(
            "{}: {executions} executions, and nothing was noticed",
            model.name
        ),
        Err(error) => println!("noticed: {}", error.lines().next().unwrap_or_default()),
    }
}

/// How a subscriber once slept: with no link it told nobody, and attached its next publisher
/// afterwards.
#[test]
fn a_receiver_that_does_not_tell_its_next_sender_that_it_sleeps_is_noticed() {
    let error = models::check(sleep::UNTOLD).expect_err("it is not woken");
    println!("noticed: {}", error.lines().next().unwrap_or_default());
}

macro_rules! catch {
    ($($test:ident: $model:expr, $file:expr, $line:expr, $op:ident, $effect:expr;)*) => {
        mod plants {
            use super::*;

            $(#[test]
            fn $test() {
                catches($model, $file, $line, Op::$op, $effect);
            })*
        }
    };
}

catch! {
    a_sample_published_without_release: ring::ONE_PIECE, "pubsub/ring.rs", ".swap(state_word(position, PUBLISHED), SeqCst)", Rmw, Order(Relaxed);
    a_state_word_read_without_acquire: ring::ONE_PIECE, "pubsub/ring.rs", "let now = entry.state_word.load(Acquire);", Load, Order(Relaxed);
    a_description_left_unwritten: ring::ONE_PIECE, "pubsub/entry.rs", "entry.sequence.store(self.sequence", Store, Omitted;
    a_sample_that_is_not_published: ring::ONE_PIECE, "pubsub/ring.rs", ".swap(state_word(position, PUBLISHED), SeqCst)", Rmw, Omitted;
    a_sample_for_several_published_without_release: ring::ONE_PIECE_FOR_MANY, "pubsub/ring.rs", ".store(state_word(position, PUBLISHED), Release)", Store, Order(Relaxed);
    a_sample_for_several_that_is_not_published: ring::ONE_PIECE_FOR_MANY, "pubsub/ring.rs", ".store(state_word(position, PUBLISHED), Release)", Store, Omitted;
    a_sample_taken_in_two_steps: ring::REVOKED, "pubsub/ring.rs", "state_word(position, TAKEN), AcqRel", Rmw, Split;
    a_sample_revoked_in_two_steps: ring::REVOKED, "pubsub/ring.rs", ".compare_exchange(from, to, AcqRel, Acquire)", Rmw, Split;
    a_sample_taken_without_a_word: ring::REVOKED, "pubsub/ring.rs", "state_word(position, TAKEN), AcqRel", Rmw, Omitted;
    an_entry_stepped_over_without_a_word: ring::STEPPED_OVER, "pubsub/ring.rs", "state_word(skipped, SKIPPED)", Store, Omitted;
    an_entry_that_counts_as_released: ring::DROPPED, "backend/word.rs", "self.value.load(Ordering::Acquire)", Load, Says(1);
    a_receiver_that_sleeps_without_a_fence: sleep::RECEIVER, "pubsub/ring.rs", "        fence(SeqCst);", Fence, Omitted;
    a_receiver_that_does_not_say_that_it_sleeps: sleep::RECEIVER, "pubsub/ring.rs", "receiver.asleep.store(1", Store, Omitted;
    a_sample_published_before_the_look_at_the_sleeper_in_no_order: sleep::RECEIVER, "pubsub/ring.rs", ".swap(state_word(position, PUBLISHED), SeqCst)", Rmw, Order(AcqRel);
    a_look_at_the_sleeper_in_no_order: sleep::RECEIVER, "pubsub/ring.rs", "receiver.asleep.load(SeqCst) != 0", Load, Order(Acquire);
    a_look_at_several_sleepers_without_a_fence: sleep::ONE_OF_MANY, "pubsub/ring.rs", "atomic::fence(SeqCst);", Fence, Omitted;
    a_newcomer_that_sleeps_without_a_fence: sleep::NEWCOMER, "pubsub/ring.rs", "        fence(SeqCst);", Fence, Omitted;
    who_parks_without_a_fence: timeline::PARKED, "backend/word.rs", "fence(Ordering::SeqCst);", Fence, Omitted;
    who_parks_without_being_counted: timeline::PARKED, "backend/word.rs", "self.parked.fetch_add(1", Rmw, Omitted;
    a_word_stored_in_no_order: timeline::PARKED, "backend/word.rs", "self.value.swap(value", Rmw, Order(AcqRel);
    a_look_at_who_is_parked_in_no_order: timeline::PARKED, "backend/word.rs", "if self.parked.load(Ordering::SeqCst)", Load, Order(Relaxed);
    a_wake_up_left_out: timeline::PARKED, "backend/word.rs", "atomic::wake(", Wake, Omitted;
    what_is_owed_stored_in_two_steps: timeline::TAKEN_BACK, "backend/word.rs", ".compare_exchange(from, value, Ordering::SeqCst", Rmw, Split;
    what_is_owed_stored_in_no_order: timeline::ADVANCED, "backend/word.rs", ".compare_exchange(from, value, Ordering::SeqCst", Rmw, Order(AcqRel);
    a_counter_ended_without_its_last_value: counter::ENDED, "shm/counter.rs", ".compare_exchange(0, value.min(VALUE_MAX)", Rmw, Omitted;
    a_copy_brought_up_in_two_steps: counter::BROUGHT_UP, "backend/word.rs", ".compare_exchange(from, value, Ordering::SeqCst", Rmw, Split;
    a_permit_freed_in_no_order: room::HANDED_ON, "sync/semaphore/page.rs", "                    self.owner(permit).store(0, SeqCst);", Store, Order(Release);
    a_waiter_that_is_not_seen: room::HANDED_ON, "sync/semaphore/page.rs", "fetch_or(1 <<", Rmw, Omitted;
    a_bell_that_is_not_rung: room::HANDED_ON, "sync/semaphore/page.rs", "futex.fetch_add(1, SeqCst)", Rmw, Omitted;
    a_permit_taken_in_two_steps: room::TAKEN, "sync/semaphore/page.rs", "owner.compare_exchange(0, me.into()", Rmw, Split;
    a_permit_granted_in_two_steps: room::WITHDRAWN, "sync/semaphore/page.rs", "compare_exchange(seen, granted", Rmw, Split;
    a_share_claimed_in_two_steps: shares::WITHDRAWN, "lend/share_words.rs", ".compare_exchange(found, found + 1", Rmw, Split;
    a_share_withdrawn_without_a_word: shares::WITHDRAWN, "lend/share_words.rs", ".compare_exchange(found, 0, SeqCst", Rmw, Omitted;
    a_claim_that_is_not_written: shares::ENDED, "backend/word.rs", "self.value.swap(value", Rmw, Omitted;
    an_offer_that_is_not_ended: shares::ENDED, "lend/share_words.rs", "self.offer_words(number)[0].store(0, SeqCst);", Store, Omitted;
    a_claim_of_a_block_that_is_not_written: shares::LENT, "backend/word.rs", "self.value.swap(value", Rmw, Omitted;
    a_lend_that_is_not_ended: shares::LENT, "lend/share_words.rs", "self.offer_words(number)[0].store(0, SeqCst);", Store, Omitted;
    a_turn_that_is_not_raised: shares::GIVEN_BACK, "lend/share_words.rs", "state.compare_exchange(found, next, SeqCst", Rmw, Omitted;
    a_sample_held_in_no_order: rescue::LET_GO, "pubsub/publisher_link/monitor.rs", "self.held[self.index(position)].store(position", Store, Order(Relaxed);
    a_look_at_the_dead_in_no_order: rescue::LET_GO, "pubsub/publisher_link/monitor.rs", "self.dead.load(SeqCst)", Load, Order(Relaxed);
    a_death_told_in_no_order: rescue::LET_GO, "pubsub/publisher_link/monitor.rs", "held.load(SeqCst)", Load, Order(Relaxed);
    a_death_that_is_not_told: rescue::LET_GO, "pubsub/publisher_link/monitor.rs", "self.dead.store(true", Store, Omitted;
    a_loss_that_is_not_noted: rescue::LOST, "pubsub/publisher_link/monitor.rs", "self.lost[self.index(position)].fetch_max(position", Rmw, Omitted;
    an_object_opened_before_it_is_written: table::SHARED, "handle/table.rs", "slot.state.store(state | OPEN, Release)", Store, Order(Relaxed);
    an_object_left_in_two_steps: table::SHARED, "handle/table.rs", "self.slot.state.fetch_sub(units, AcqRel)", Rmw, Split;
    an_object_used_without_a_word: table::SHARED, "handle/table.rs", "self.state.compare_exchange(state, next, AcqRel, Acquire)", Rmw, Omitted;
    an_object_locked_in_two_steps: table::ALONE, "handle/table.rs", "self.state.compare_exchange(state, next, AcqRel, Acquire)", Rmw, Split;
    an_object_locked_in_no_order: table::ALONE, "handle/table.rs", "self.state.compare_exchange(state, next, AcqRel, Acquire)", Rmw, Order(Relaxed);
    an_object_closed_in_two_steps: table::TAKEN, "handle/table.rs", "self.state.compare_exchange(state, next, AcqRel, Acquire)", Rmw, Split;
    a_taken_object_whose_key_stays_open: table::REUSED, "handle/table.rs", "slot.state.store(next, Release)", Store, Omitted;
    an_object_put_back_in_two_steps: table::PUT_BACK, "handle/table.rs", "self.slot.state.fetch_sub(units, AcqRel)", Rmw, Split;
    an_entry_given_in_two_steps: table::REUSED, "handle/table.rs", ".compare_exchange(head, changed(head, next), AcqRel, Acquire)", Rmw, Split;
    an_entry_freed_in_two_steps: table::REUSED, "handle/table.rs", ".compare_exchange(head, changed(head, slot.index + 1), AcqRel, Relaxed)", Rmw, Split;
    an_item_awaited_in_no_order: kernel_ring::WHOLE, "rings/host_ring.rs", "while word.load(Acquire) < due", Load, Order(Relaxed);
    an_item_that_is_not_awaited: kernel_ring::WHOLE, "rings/host_ring.rs", "while word.load(Acquire) < due", Load, Says(9);
    an_item_passed_on_without_a_fence: kernel_ring::WHOLE, "rings/host_ring.rs", "fence(AcqRel);", Fence, Omitted;
    a_release_awaited_in_no_order: kernel_ring::EVERY_CONSUMER, "rings/host_ring.rs", "while word.load(Acquire) < due", Load, Order(Relaxed);
    a_part_finished_in_no_order: kernel_ring::SHARED, "rings/host_ring.rs", "if arrivals.fetch_add(1, AcqRel) + 1 < blocks", Rmw, Order(Relaxed);
    parts_that_are_counted_on: kernel_ring::SHARED_AGAIN, "rings/host_ring.rs", "arrivals.store(0, Relaxed)", Store, Omitted;
    an_end_told_in_no_order: kernel_ring::ENDED, "rings/host_ring.rs", "peer::GONE)).load(Acquire)", Load, Order(Relaxed);
    an_entry_in_no_order: gate::APART, "backend/cuda/shutdown_gate/entrances.rs", "inside.fetch_add(1, SeqCst)", Rmw, Order(AcqRel);
    an_entry_that_is_not_counted: gate::APART, "backend/cuda/shutdown_gate/entrances.rs", "inside.fetch_add(1, SeqCst)", Rmw, Omitted;
    an_entry_counted_in_two_steps: gate::SHARED, "backend/cuda/shutdown_gate/entrances.rs", "inside.fetch_add(1, SeqCst)", Rmw, Split;
    a_look_at_a_closed_gate_in_no_order: gate::APART, "backend/cuda/shutdown_gate/entrances.rs", "self.is_closed.load(SeqCst)", Load, Order(Acquire);
    a_gate_closed_in_no_order: gate::APART, "backend/cuda/shutdown_gate/entrances.rs", "self.is_closed.swap(true, SeqCst)", Rmw, Order(AcqRel);
    a_gate_that_is_not_closed: gate::APART, "backend/cuda/shutdown_gate/entrances.rs", "self.is_closed.swap(true, SeqCst)", Rmw, Omitted;
    a_look_at_the_threads_inside_in_no_order: gate::APART, "backend/cuda/shutdown_gate/entrances.rs", "entrance.inside.load(SeqCst)", Load, Order(Relaxed);
    a_thread_that_leaves_its_entrance_in_no_order: gate::APART, "backend/cuda/shutdown_gate/entrances.rs", "own.inside.store(", Store, Order(Relaxed);
    a_thread_that_leaves_in_no_order: gate::APART, "backend/cuda/shutdown_gate/entrances.rs", "inside.fetch_sub(1, Release)", Rmw, Order(Relaxed);
    a_thread_that_leaves_in_two_steps: gate::SHARED, "backend/cuda/shutdown_gate/entrances.rs", "inside.fetch_sub(1, Release)", Rmw, Split;
    a_loss_seen_behind_its_word_in_no_order: rescue::LOST, "backend/word.rs", "self.value.load(Ordering::Acquire)", Load, Order(Relaxed);
}
