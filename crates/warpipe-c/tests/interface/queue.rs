//! Queues, jobs, workers and leases through the C interface.

use std::ffi::c_void;
use std::time::Duration;

use crate::common::jobs::{Jobs, info, own_pid};
use crate::common::{LONG, SHORT, Shared, becomes_readable, bytes_layout, metadata, none, zeroed};
use warpipe_c::*;
use warpipe_testkit::eventually;

#[test]
fn a_job_goes_to_a_worker_and_its_result_comes_back() {
    let jobs = Jobs::new();
    let stream = jobs.fixture.stream;
    let loan = jobs.loan(b"input");
    ok!(warpipe_loan_set_metadata(loan, b"how".as_ptr().cast(), 3));
    let job = get!(warpipe_queue_submit(
        jobs.queue,
        loan,
        stream,
        WARPIPE_USUAL_TIMEOUT
    ));
    assert_eq!(get!(warpipe_job_get_id(job)), 1u64);
    assert!(!get!(warpipe_job_is_done(job)));

    let (lease, input) = jobs.lease_and_input();
    let asked = info(input);
    assert_eq!((asked.job, asked.attempt, asked.deadline_ns), (1, 1, 0));
    assert_eq!(asked.pid, own_pid());
    assert_eq!(metadata(&asked), b"how");
    ok!(warpipe_sample_wait_on(input, stream));
    ok!(warpipe_sample_wait(input, LONG));
    assert_eq!(jobs.fixture.read(input), b"input");
    let output = jobs.output(lease, b"result");
    ok!(warpipe_loan_set_metadata(
        output,
        b"done".as_ptr().cast(),
        4
    ));
    ok!(warpipe_lease_complete(
        lease,
        output,
        stream,
        WARPIPE_USUAL_TIMEOUT
    ));

    ok!(warpipe_close(input));
    let result = jobs.wait(job);
    let answered: warpipe_sample_info = get!(warpipe_sample_get_info(result));
    assert_eq!((answered.job, answered.attempt), (1, 1));
    assert_eq!(answered.pid, own_pid());
    assert_eq!(metadata(&answered), b"done");
    assert_eq!(jobs.fixture.read(result), b"result");
    ok!(warpipe_sample_finish(result, LONG));
    assert!(get!(warpipe_job_is_done(job)));
    let mut again = none();
    fails!(
        WARPIPE_NOT_FOUND,
        warpipe_job_wait(job, stream, LONG, &mut again)
    );
    ok!(warpipe_close(job));
    jobs.close();
}

#[test]
fn results_come_in_the_order_of_submission_or_of_completion() {
    for (order, expected) in [
        (warpipe_result_order::WARPIPE_ORDER_SUBMISSION, [1, 2]),
        (warpipe_result_order::WARPIPE_ORDER_COMPLETION, [2, 1]),
    ] {
        let jobs = Jobs::with(options!(warpipe_queue_options {
            order: order as u32
        }));
        let (queue, stream) = (jobs.queue, jobs.fixture.stream);
        for byte in [1u8, 2] {
            let (loan, job) = (jobs.loan(&[byte]), none());
            let usual = WARPIPE_USUAL_TIMEOUT;
            ok!(warpipe_queue_submit(queue, loan, stream, usual, job));
        }
        let (first, second) = (jobs.lease(), jobs.lease());
        jobs.complete(second);
        // The queue has taken it when the other answer comes.
        assert!(eventually(Duration::from_nanos(LONG), || {
            jobs.state().finished == 1
        }));
        jobs.complete(first);
        ok!(warpipe_queue_drain(jobs.queue, LONG));
        assert_eq!([jobs.next(), jobs.next()], expected);
        jobs.close();
    }
}

#[test]
fn a_job_that_was_rejected_or_failed_too_often_says_why() {
    let jobs = Jobs::with(options!(warpipe_queue_options { max_attempts: 1 }));
    let stream = jobs.fixture.stream;
    let (failed, rejected) = (jobs.submit(b"1"), jobs.submit(b"2"));
    ok!(warpipe_lease_fail(
        jobs.lease(),
        c"out of ink".as_ptr(),
        WARPIPE_USUAL_TIMEOUT
    ));
    ok!(warpipe_lease_reject(
        jobs.lease(),
        c"not a job".as_ptr(),
        WARPIPE_USUAL_TIMEOUT
    ));

    let mut sample = none();
    let said = fails!(
        WARPIPE_JOB_FAILED,
        warpipe_job_wait(rejected, stream, LONG, &mut sample)
    );
    assert!(said.contains("not a job"), "{said}");
    let mut number = 0;
    let said = fails!(
        WARPIPE_JOB_FAILED,
        warpipe_queue_next_result(jobs.queue, stream, LONG, &mut sample, &mut number)
    );
    assert!(said.contains("out of ink"), "{said}");
    assert_eq!(number, 1);
    assert!(sample.is_null());
    ok!(warpipe_close(failed));
    ok!(warpipe_close(rejected));
    jobs.close();
}

#[test]
fn a_closed_lease_is_a_failed_attempt_and_a_requeued_one_is_not() {
    let jobs = Jobs::new();
    let job = jobs.submit(b"job");
    ok!(warpipe_close(jobs.lease()));
    let (attempt, second) = jobs.attempt();
    assert_eq!(attempt, 2);
    ok!(warpipe_lease_requeue(second, WARPIPE_USUAL_TIMEOUT));
    let (attempt, third) = jobs.attempt();
    assert_eq!(attempt, 2);
    jobs.complete(third);
    ok!(warpipe_sample_release(jobs.wait(job), none()));
    ok!(warpipe_close(job));
    jobs.close();
}

#[test]
fn the_input_of_a_lease_outlives_its_answer() {
    let jobs = Jobs::new();
    let stream = jobs.fixture.stream;
    let loan = jobs.loan(b"input");
    ok!(warpipe_loan_set_metadata(loan, b"how".as_ptr().cast(), 3));
    let job = get!(warpipe_queue_submit(
        jobs.queue,
        loan,
        stream,
        WARPIPE_USUAL_TIMEOUT
    ));
    let (lease, input) = jobs.lease_and_input();
    let first = jobs.output(lease, b"unused");
    let second = get!(warpipe_lease_output(lease, &bytes_layout(6)));
    jobs.fixture.write(second, b"result");
    ok!(warpipe_lease_complete(
        lease,
        second,
        stream,
        WARPIPE_USUAL_TIMEOUT
    ));
    ok!(warpipe_loan_discard(first, stream));
    let result = jobs.wait(job);
    assert_eq!(jobs.fixture.read(result), b"result");
    ok!(warpipe_sample_finish(result, LONG));

    let asked: warpipe_sample_info = get!(warpipe_sample_get_info(input));
    assert_eq!((asked.job, asked.attempt, asked.pid), (1, 1, own_pid()));
    assert_eq!(metadata(&asked), b"how");
    assert_eq!(jobs.fixture.read(input), b"input");
    ok!(warpipe_sample_finish(input, LONG));
    ok!(warpipe_close(job));
    jobs.close();
}

#[test]
fn every_other_answer_is_given_after_the_input_was_released() {
    let jobs = Jobs::new();
    let stream = jobs.fixture.stream;
    let job = jobs.submit(b"job");
    let answer = || jobs.attempt();
    let (_, first) = answer();
    ok!(warpipe_close(first));
    let (attempt, second) = answer();
    assert_eq!(attempt, 2);
    ok!(warpipe_lease_requeue(second, WARPIPE_USUAL_TIMEOUT));
    let (attempt, third) = answer();
    assert_eq!(attempt, 2);
    ok!(warpipe_lease_fail(
        third,
        c"again".as_ptr(),
        WARPIPE_USUAL_TIMEOUT
    ));
    let (attempt, last) = answer();
    assert_eq!(attempt, 3);
    ok!(warpipe_lease_reject(last, c"never".as_ptr(), 0));
    let mut sample = none();
    fails!(
        WARPIPE_JOB_FAILED,
        warpipe_job_wait(job, stream, LONG, &mut sample)
    );
    let other = jobs.submit(b"job");
    let (_, answer) = answer();
    ok!(warpipe_lease_complete(
        answer,
        none(),
        stream,
        WARPIPE_USUAL_TIMEOUT
    ));
    ok!(warpipe_sample_finish(jobs.wait(other), LONG));
    ok!(warpipe_close(other));
    ok!(warpipe_close(job));
    jobs.close();
}

#[test]
fn a_timeout_of_zero_takes_only_what_is_there() {
    let jobs = Jobs::with(options!(warpipe_queue_options { limit: 1 }));
    let (queue, stream) = (jobs.queue, jobs.fixture.stream);
    let (mut lease, mut input, mut sample, mut number) = (none(), none(), none(), 7);
    fails!(
        WARPIPE_TIMEOUT,
        warpipe_worker_lease(jobs.worker, stream, 0, &mut lease, &mut input)
    );
    assert!(lease.is_null() && input.is_null());
    fails!(
        WARPIPE_TIMEOUT,
        warpipe_queue_next_result(queue, stream, 0, &mut sample, &mut number)
    );
    assert_eq!(number, 0);
    fails!(WARPIPE_TIMEOUT, warpipe_queue_wait_for_workers(queue, 2, 0));
    ok!(warpipe_queue_drain(queue, 0));

    let job = jobs.submit(b"one");
    fails!(
        WARPIPE_TIMEOUT,
        warpipe_job_wait(job, stream, 0, &mut sample)
    );
    fails!(WARPIPE_TIMEOUT, warpipe_queue_drain(queue, 0));
    let loan = jobs.loan(b"two");
    let mut other = none();
    fails!(
        WARPIPE_LIMIT_REACHED,
        warpipe_queue_submit(queue, loan, stream, 0, &mut other)
    );
    assert!(other.is_null());
    let cancelled: bool = get!(warpipe_job_cancel(job));
    assert!(cancelled);
    ok!(warpipe_queue_submit(queue, loan, stream, 0, &mut other));
    ok!(warpipe_close(job));
    ok!(warpipe_close(other));
    jobs.close();
}

#[test]
fn the_state_counts_jobs_and_names_workers_and_waiting_jobs_are_cancelled() {
    let jobs = Jobs::with(options!(warpipe_queue_options { prefetch: 1 }));
    let queue = jobs.queue;
    let all = [(); 3].map(|()| jobs.submit(b"job"));
    let lease = jobs.lease();
    let mut state = zeroed::<warpipe_queue_state>();
    let mut workers = [0; 4];
    ok!(warpipe_queue_get_state(
        queue,
        &mut state,
        workers.as_mut_ptr(),
        4
    ));
    assert_eq!((state.workers, workers), (1, [own_pid(), 0, 0, 0]));
    assert_eq!((state.waiting, state.leased, state.finished), (2, 1, 0));

    for waiting in &all[1..] {
        let cancelled: bool = get!(warpipe_job_cancel(*waiting));
        assert!(cancelled);
    }
    assert_eq!(jobs.state().waiting, 0);
    jobs.complete(lease);
    ok!(warpipe_sample_finish(jobs.wait(all[0]), LONG));
    let cancelled: bool = get!(warpipe_job_cancel(all[0]));
    assert!(!cancelled, "its outcome was taken");
    for job in all {
        ok!(warpipe_close(job));
    }
    jobs.close();
}

#[test]
fn a_workers_descriptor_is_readable_when_a_job_comes() {
    let jobs = Jobs::new();
    let stream = jobs.fixture.stream;
    let fd: i32 = get!(warpipe_get_fd(jobs.worker.cast()));
    let (mut lease, mut input): (*mut warpipe_lease, _) = (none(), none());
    fails!(
        WARPIPE_TIMEOUT,
        warpipe_worker_lease(jobs.worker, stream, 0, &mut lease, &mut input)
    );
    let job = jobs.submit(b"job");
    // It may ring without a job.
    while lease.is_null() {
        assert!(becomes_readable(fd));
        let (worker, input) = (jobs.worker, &mut input);
        let status = call!(warpipe_worker_lease(worker, stream, 0, &mut lease, input));
        let is_expected = matches!(
            status,
            warpipe_status::WARPIPE_OK | warpipe_status::WARPIPE_TIMEOUT
        );
        assert!(is_expected, "{}", crate::common::message());
    }
    jobs.complete(lease);
    ok!(warpipe_close(input));
    ok!(warpipe_close(job));
    jobs.close();
}

#[test]
fn a_watchs_descriptor_is_readable_when_a_result_comes_and_when_the_queue_ends() {
    let jobs = Jobs::new();
    let stream = jobs.fixture.stream;
    let watch: *mut warpipe_watch = get!(warpipe_queue_watch(jobs.queue));
    let fd: i32 = get!(warpipe_get_fd(watch.cast()));
    let job = jobs.submit(b"job");
    jobs.complete(jobs.lease());
    let mut sample: *mut warpipe_sample = none();
    while sample.is_null() {
        assert!(becomes_readable(fd));
        ok!(warpipe_watch_quiet(watch));
        let status = call!(warpipe_job_wait(job, stream, 0, &mut sample));
        let is_expected = matches!(
            status,
            warpipe_status::WARPIPE_OK | warpipe_status::WARPIPE_TIMEOUT
        );
        assert!(is_expected, "{}", crate::common::message());
    }
    ok!(warpipe_sample_finish(sample, LONG));
    ok!(warpipe_close(job));
    ok!(warpipe_watch_quiet(watch));
    jobs.close();
    assert!(becomes_readable(fd));
    ok!(warpipe_close(watch));
    fails!(WARPIPE_INVALID_OBJECT, warpipe_watch_quiet(watch));
    ok!(warpipe_close(none::<c_void>()));
}

#[test]
fn one_of_the_threads_that_wait_for_a_job_gets_its_result() {
    let jobs = Jobs::new();
    let job = jobs.submit(b"job");
    let waiting = [(); 4].map(|()| {
        let (job, stream) = (Shared::new(job), Shared::new(jobs.fixture.stream));
        std::thread::spawn(move || {
            let mut sample = none();
            let status = call!(warpipe_job_wait(job.get(), stream.get(), LONG, &mut sample));
            if status == warpipe_status::WARPIPE_OK {
                ok!(warpipe_sample_finish(sample, LONG));
            }
            status
        })
    });
    jobs.complete(jobs.lease());
    let mut statuses = waiting.map(|thread| thread.join().expect("no panic"));
    let not_found = warpipe_status::WARPIPE_NOT_FOUND;
    let expected = [warpipe_status::WARPIPE_OK, not_found, not_found, not_found];
    statuses.sort_by_key(|&status| status != warpipe_status::WARPIPE_OK);
    assert_eq!(statuses, expected);
    ok!(warpipe_close(job));
    jobs.close();
}

#[test]
fn a_queue_that_was_shut_takes_no_jobs_and_gives_its_results() {
    let jobs = Jobs::new();
    let stream = jobs.fixture.stream;
    let (job, late) = (jobs.submit(b"job"), jobs.loan(b"late"));
    fails!(WARPIPE_TIMEOUT, warpipe_queue_shutdown(jobs.queue, SHORT));
    let mut other = none();
    fails!(
        WARPIPE_INVALID_STATE,
        warpipe_queue_submit(jobs.queue, late, stream, WARPIPE_USUAL_TIMEOUT, &mut other)
    );
    ok!(warpipe_loan_discard(late, stream));
    jobs.complete(jobs.lease());
    ok!(warpipe_queue_shutdown(jobs.queue, LONG));
    assert_eq!(jobs.next(), 1);
    ok!(warpipe_close(job));
    jobs.close();
}
