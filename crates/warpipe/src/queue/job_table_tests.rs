//! The job table alone: no queue, no worker, no clock.

use std::time::Duration;

use super::job_table::ResultOrder;
use super::job_table::{DeliveryResult, JobTable, Outcome, QueueRules};
use super::wire::{AnswerKind, DeliveryTag};

type Table = JobTable<&'static str, &'static str>;

const TIMEOUT: Duration = Duration::from_secs(60);

fn table(order: ResultOrder, workers: u64) -> Table {
    let mut table = Table::new(QueueRules {
        prefetch: 2,
        max_attempts: 2,
        lease_timeout: Some(TIMEOUT),
        order,
        limit: 100,
    });
    (1..=workers).for_each(|id| table.add_worker(id, 100 + id as i32));
    table
}

/// Submits a job while no worker is picked for it: it waits.
fn submit(table: &mut Table) -> u64 {
    let (job, _) = table.next_job();
    let tag = DeliveryTag {
        job,
        number: 1,
        attempt: 1,
        deadline_ns: 0,
    };
    table.insert(tag, None, Vec::new());
    table.store_input(job, "input", false);
    table.finish_submit(DeliveryResult::NoWorker, Duration::ZERO);
    job
}

/// Delivers the first job that waits, at `position` of the worker's ring.
fn deliver(table: &mut Table, position: u64, now: Duration) -> Option<(u64, DeliveryTag)> {
    let job = table.first_waiting_after(0)?;
    let worker = table.pick_worker(table.workers.iter().map(|it| it.worker))?;
    let (tag, _) = table.next_delivery(job)?;
    table.deliver(tag, worker, position, now);
    Some((worker, tag))
}

fn answer(table: &mut Table, (worker, tag): (u64, DeliveryTag), kind: AnswerKind) -> bool {
    let lease = (tag.job, tag.number);
    matches!(
        table.answer(worker, lease, kind, Duration::ZERO),
        Ok(Some(_))
    )
}

fn complete(table: &mut Table, (worker, tag): (u64, DeliveryTag)) {
    assert!(answer(table, (worker, tag), AnswerKind::Completed));
    table.complete(worker, tag, "result");
}

fn failed() -> AnswerKind {
    AnswerKind::Failed("broken".into())
}

#[test]
fn a_job_that_fails_as_often_as_it_may_is_dead_lettered_with_every_reason() {
    let mut table = table(ResultOrder::Submission, 1);
    let job = submit(&mut table);
    for attempt in 1..=2 {
        let given = deliver(&mut table, u64::from(attempt), Duration::ZERO).unwrap();
        assert_eq!((given.1.attempt, given.1.number), (attempt, attempt));
        answer(&mut table, given, failed());
    }
    assert!(deliver(&mut table, 3, Duration::ZERO).is_none());
    let reasons = vec!["broken".to_string(); 2];
    assert_eq!(
        table.take_next(),
        Some((job, Outcome::DeadLettered { reasons }))
    );
    assert_eq!((table.len(), table.unfinished(), table.leased()), (0, 0, 0));
}

#[test]
fn jobs_that_come_back_are_delivered_oldest_first() {
    let mut table = table(ResultOrder::Submission, 1);
    let jobs = [0; 3].map(|_| submit(&mut table));
    let given = [1, 2].map(|at| deliver(&mut table, at, Duration::ZERO).unwrap());
    answer(&mut table, given[1], failed());
    answer(&mut table, given[0], AnswerKind::Returned);
    let again = [3, 4].map(|at| deliver(&mut table, at, Duration::ZERO).unwrap());
    assert_eq!(again.map(|(_, tag)| tag.job), jobs[..2]);
    assert_eq!(table.first_waiting_after(0), Some(jobs[2]));
}

#[test]
fn a_job_that_is_given_back_costs_no_attempt_and_goes_before_later_jobs() {
    let mut table = table(ResultOrder::Submission, 1);
    let [first, _] = [submit(&mut table), submit(&mut table)];
    let given = deliver(&mut table, 1, Duration::ZERO).unwrap();
    answer(&mut table, given, AnswerKind::Returned);
    let (_, tag) = deliver(&mut table, 2, Duration::ZERO).unwrap();
    assert_eq!((tag.job, tag.attempt, tag.number), (first, 1, 2));
}

#[test]
fn a_second_answer_and_one_with_another_number_are_refused() {
    let mut table = table(ResultOrder::Submission, 2);
    submit(&mut table);
    let (worker, tag) = deliver(&mut table, 1, Duration::ZERO).unwrap();
    let mut said = |worker, job, number| {
        table
            .answer(worker, (job, number), AnswerKind::Completed, Duration::ZERO)
            .is_ok()
    };
    assert!(!said(worker, tag.job, tag.number + 1));
    assert!(!said(worker, tag.job + 1, tag.number));
    assert!(!said(3 - worker, tag.job, tag.number));
    assert!(said(worker, tag.job, tag.number));
    assert!(!said(worker, tag.job, tag.number));
}

#[test]
fn a_late_worker_gets_no_job_before_it_has_answered_and_its_late_answer_changes_nothing() {
    let mut table = table(ResultOrder::Submission, 1);
    let job = submit(&mut table);
    let late = deliver(&mut table, 1, Duration::ZERO).unwrap();
    assert_eq!(table.next_expiry(TIMEOUT / 2), Some(TIMEOUT / 2));
    table.expire(TIMEOUT / 2);
    assert_eq!(table.waiting(), 0);
    table.expire(TIMEOUT);
    assert_eq!((table.waiting(), table.next_expiry(TIMEOUT)), (1, None));
    assert!(deliver(&mut table, 2, TIMEOUT).is_none());
    complete(&mut table, late);
    assert!(!table.is_settled(job));
    let (_, tag) = deliver(&mut table, 2, TIMEOUT).unwrap();
    assert_eq!((tag.job, tag.attempt), (job, 2));
}

#[test]
fn an_answer_is_progress_for_every_lease_of_its_worker() {
    let mut table = table(ResultOrder::Submission, 1);
    let [_, second] = [submit(&mut table), submit(&mut table)];
    let [first, _] = [1, 2].map(|at| deliver(&mut table, at, Duration::ZERO).unwrap());
    let lease = (first.1.job, first.1.number);
    table.answer(1, lease, failed(), TIMEOUT / 2).unwrap();
    table.expire(TIMEOUT);
    assert_eq!(table.leased(), 1);
    table.expire(TIMEOUT + TIMEOUT / 2);
    assert!(!table.is_settled(second));
    assert_eq!(table.waiting(), 2);
}

#[test]
fn a_worker_that_goes_costs_an_attempt_of_what_it_took_and_none_of_what_it_had_not_taken() {
    let mut table = table(ResultOrder::Submission, 1);
    let jobs = [submit(&mut table), submit(&mut table)];
    for position in [1, 2] {
        deliver(&mut table, position, Duration::ZERO).unwrap();
    }
    table.return_untaken(1, 2);
    let (undone, is_being_submitted) = table.remove_worker(1);
    assert_eq!((&undone[..], is_being_submitted), (&jobs[..1], false));
    table.record_failure(undone[0], "it died".into());
    table.add_worker(2, 102);
    let attempts = [1, 2].map(|at| deliver(&mut table, at, Duration::ZERO).unwrap().1.attempt);
    assert_eq!(attempts, [2, 1]);
}

#[test]
fn the_entry_of_a_worker_that_goes_during_the_submit_decides_whether_an_attempt_was_begun() {
    for (is_taken, attempt) in [(true, 2), (false, 1)] {
        let mut table = table(ResultOrder::Submission, 1);
        let (_, tag) = begin_submit(&mut table, 1);
        assert_eq!(table.remove_worker(1), (Vec::new(), true));
        table.record_worker_end(1, "it died".into());
        if !is_taken {
            table.record_untaken(1, 7);
        }
        assert_eq!(table.waiting(), 0, "it is still being submitted");
        table.store_input(tag.job, "input", true);
        table.finish_submit(DeliveryResult::At(7), Duration::ZERO);
        table.add_worker(2, 102);
        let (_, tag) = deliver(&mut table, 1, Duration::ZERO).unwrap();
        assert_eq!(tag.attempt, attempt);
    }
}

#[test]
fn a_submit_that_panics_leaves_no_lease_and_no_new_job() {
    let mut table = table(ResultOrder::Submission, 1);
    submit(&mut table);
    let (_, tag) = begin_submit(&mut table, 1);
    table.abort_submit();
    assert!(table.take_outcome(tag.job).is_err(), "it was not submitted");
    assert_eq!((table.len(), table.unfinished(), table.leased()), (1, 1, 0));
}

#[test]
fn the_outcome_of_a_job_whose_submit_may_still_fail_is_not_taken() {
    let mut table = table(ResultOrder::Completion, 1);
    let (job, _) = table.next_job();
    let tag = DeliveryTag {
        job,
        number: 1,
        attempt: 1,
        deadline_ns: 0,
    };
    table.insert(tag, Some(1), Vec::new());
    complete(&mut table, (1, tag));
    assert_eq!(table.take_next(), None);
    table.store_input(job, "input", true);
    table.finish_submit(DeliveryResult::At(1), Duration::ZERO);
    assert_eq!(table.take_next(), Some((job, Outcome::Done("result"))));
}

#[test]
fn outcomes_come_in_the_order_that_was_asked_for_and_once() {
    for order in [ResultOrder::Submission, ResultOrder::Completion] {
        let mut table = table(order, 1);
        let jobs = [submit(&mut table), submit(&mut table)];
        let given = [1, 2].map(|at| deliver(&mut table, at, Duration::ZERO).unwrap());
        complete(&mut table, given[1]);
        let early = table.take_next().map(|(job, _)| job);
        complete(&mut table, given[0]);
        let rest = [table.take_next(), table.take_next()].map(|next| next.map(|(job, _)| job));
        match order {
            ResultOrder::Submission => {
                assert_eq!((early, rest), (None, [Some(jobs[0]), Some(jobs[1])]));
            }
            ResultOrder::Completion => {
                assert_eq!((early, rest), (Some(jobs[1]), [Some(jobs[0]), None]));
            }
        }
        assert!(jobs.iter().all(|&job| table.take_outcome(job).is_err()));
    }
}

#[test]
fn a_job_that_is_called_off_is_over_whatever_its_worker_answers() {
    let mut table = table(ResultOrder::Submission, 1);
    let job = submit(&mut table);
    let given = deliver(&mut table, 1, Duration::ZERO).unwrap();
    assert!(table.cancel(job).is_some());
    complete(&mut table, given);
    assert_eq!((table.len(), table.leased()), (0, 0));
    assert!(table.take_next().is_none() && table.cancel(job).is_none());
}

#[test]
fn the_open_worker_with_the_fewest_leases_gets_the_job() {
    let mut table = table(ResultOrder::Submission, 2);
    let _ = [0, 1].map(|_| submit(&mut table));
    let pick = |table: &Table, open: &[u64]| table.pick_worker(open.iter().copied());
    assert_eq!(pick(&table, &[]), None);
    let (busy, _) = deliver(&mut table, 1, Duration::ZERO).unwrap();
    assert_eq!(pick(&table, &[1, 2]), Some(3 - busy));
    assert_eq!(pick(&table, &[9, busy]), Some(busy));
}

/// Begins to submit a job, which is delivered to `worker` at once.
fn begin_submit(table: &mut Table, worker: u64) -> (u64, DeliveryTag) {
    let (job, _) = table.next_job();
    let tag = DeliveryTag {
        job,
        number: 1,
        attempt: 1,
        deadline_ns: 0,
    };
    table.insert(tag, Some(worker), Vec::new());
    (worker, tag)
}

/// The driver refuses the submit of a job that no worker has seen.
fn withdraw(table: &mut Table, job: u64) {
    table.undo_insert(job, true);
    table.finish_submit(DeliveryResult::NoWorker, Duration::ZERO);
}

#[test]
fn a_result_is_there_at_once_behind_a_job_that_is_being_submitted_and_one_that_was_taken() {
    let mut table = table(ResultOrder::Completion, 2);
    let [taken, ready] = [1, 2].map(|position| {
        submit(&mut table);
        deliver(&mut table, position, Duration::ZERO).unwrap()
    });
    let new = begin_submit(&mut table, 2);
    complete(&mut table, new);
    complete(&mut table, taken);
    assert!(table.take_outcome(taken.1.job).unwrap().is_some());
    complete(&mut table, ready);
    let next = table.take_next();
    assert_eq!(next, Some((ready.1.job, Outcome::Done("result"))));
}

/// A worker that breaks the protocol answers a job before it was given one.
#[test]
fn a_job_with_the_number_of_a_withdrawn_one_is_delivered_once_and_ends_in_its_own_place() {
    let mut table = table(ResultOrder::Completion, 2);
    let returned = {
        submit(&mut table);
        deliver(&mut table, 1, Duration::ZERO).unwrap()
    };
    let new = begin_submit(&mut table, 2);
    assert!(!answer(&mut table, new, failed()));
    answer(&mut table, returned, AnswerKind::Returned);
    withdraw(&mut table, new.1.job);
    assert_eq!(submit(&mut table), new.1.job);
    assert_eq!(
        Vec::from_iter(table.waiting.clone()),
        [returned.1.job, new.1.job]
    );

    let new = begin_submit(&mut table, 2);
    complete(&mut table, new);
    withdraw(&mut table, new.1.job);
    assert_eq!(submit(&mut table), new.1.job);
    assert!(table.finished.is_empty(), "{:?}", table.finished);
}

#[test]
fn a_job_that_its_worker_returns_before_its_submit_came_to_nothing_waits_once() {
    let mut table = table(ResultOrder::Submission, 1);
    let given = begin_submit(&mut table, 1);
    answer(&mut table, given, AnswerKind::Returned);
    table.store_input(given.1.job, "input", false);
    table.finish_submit(DeliveryResult::NoWorker, Duration::ZERO);
    assert_eq!(Vec::from_iter(table.waiting.clone()), [given.1.job]);
}
