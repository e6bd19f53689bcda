//! Queues, workers and leases through the C interface, used in ways that must be refused.

use std::ffi::c_void;
use std::sync::Barrier;
use std::time::Duration;

use crate::common::jobs::{Jobs, create_queue, info};
use crate::common::{Fixture, LONG, SHORT, Shared, bytes_layout, none, zeroed};
use warpipe_c::*;
use warpipe_testkit::eventually;

/// Waits at a barrier.
extern "C" fn wait_at(barrier: *mut c_void) {
    // SAFETY: a `Barrier` of the test, which ends after it has met this call.
    unsafe { &*barrier.cast::<Barrier>() }.wait();
}

#[test]
fn a_loan_of_another_endpoint_is_refused_and_stays_usable() {
    let jobs = Jobs::new();
    let (queue, stream) = (jobs.queue, jobs.fixture.stream);
    let other = create_queue(&jobs.fixture, c"other", options!(warpipe_queue_options {}));
    let (publisher, subscriber) = jobs.fixture.channel(c"frames");
    let of_publisher = get!(warpipe_publisher_loan(publisher, &bytes_layout(4)));
    let of_queue = jobs.loan(b"data");

    let mut job = none();
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_queue_submit(other, of_queue, stream, WARPIPE_USUAL_TIMEOUT, &mut job)
    );
    fails!(
        WARPIPE_INVALID_STATE,
        warpipe_loan_send(of_queue, stream, WARPIPE_USUAL_TIMEOUT, none())
    );
    fails!(
        WARPIPE_INVALID_STATE,
        warpipe_queue_submit(queue, of_publisher, stream, WARPIPE_USUAL_TIMEOUT, &mut job)
    );
    ok!(warpipe_queue_submit(
        queue,
        of_queue,
        stream,
        WARPIPE_USUAL_TIMEOUT,
        &mut job
    ));
    fails!(
        WARPIPE_INVALID_OBJECT,
        warpipe_queue_submit(queue, of_queue, stream, WARPIPE_USUAL_TIMEOUT, &mut job)
    );
    let lease = jobs.lease();
    fails!(
        WARPIPE_INVALID_STATE,
        warpipe_lease_complete(lease, of_publisher, stream, WARPIPE_USUAL_TIMEOUT)
    );
    fails!(
        WARPIPE_INVALID_OBJECT,
        warpipe_lease_complete(lease, of_queue, stream, WARPIPE_USUAL_TIMEOUT)
    );
    jobs.complete(lease);
    ok!(warpipe_loan_send(
        of_publisher,
        stream,
        WARPIPE_USUAL_TIMEOUT,
        none()
    ));
    ok!(warpipe_close(subscriber));
    ok!(warpipe_close(publisher));
    ok!(warpipe_close(other));
    jobs.close();
}

#[test]
fn an_output_of_another_lease_is_refused_and_both_are_answered_after_it() {
    let jobs = Jobs::new();
    let stream = jobs.fixture.stream;
    let (one, two) = (jobs.submit(b"1"), jobs.submit(b"2"));
    let (first, second) = (jobs.lease(), jobs.lease());
    let (for_first, for_second) = (jobs.output(first, b"one"), jobs.output(second, b"two"));
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_lease_complete(first, for_second, stream, WARPIPE_USUAL_TIMEOUT)
    );
    ok!(warpipe_lease_complete(
        second,
        for_second,
        stream,
        WARPIPE_USUAL_TIMEOUT
    ));
    ok!(warpipe_lease_complete(
        first,
        for_first,
        stream,
        WARPIPE_USUAL_TIMEOUT
    ));
    for (job, expected) in [(one, b"one"), (two, b"two")] {
        let result = jobs.wait(job);
        assert_eq!(jobs.fixture.read(result), expected);
        ok!(warpipe_sample_finish(result, LONG));
        ok!(warpipe_close(job));
    }
    jobs.close();
}

/// A job that is leased and not answered, of a queue that has gone.
struct LeftBehind {
    jobs: Jobs,
    job: *mut warpipe_job,
    lease: *mut warpipe_lease,
    input: *mut warpipe_sample,
    output: *mut warpipe_loan,
}

impl LeftBehind {
    /// The link of the answers ends a little after its queue, and an answer that is sent before closes
    /// the lease: then there is none.
    fn new() -> Option<LeftBehind> {
        let jobs = Jobs::new();
        let job = jobs.submit(b"job");
        let (lease, input) = jobs.lease_and_input();
        let output = jobs.output(lease, b"late");
        ok!(warpipe_close(jobs.queue));
        let (mut next, mut other, stream) = (none(), none(), jobs.fixture.stream);
        fails!(
            WARPIPE_PEER_GONE,
            warpipe_worker_lease(jobs.worker, stream, LONG, &mut next, &mut other)
        );
        if call!(warpipe_lease_requeue(lease, LONG)) == warpipe_status::WARPIPE_PEER_GONE {
            return Some(LeftBehind {
                jobs,
                job,
                lease,
                input,
                output,
            });
        }
        ok!(warpipe_close(input));
        ok!(warpipe_loan_discard(output, stream));
        ok!(warpipe_close(job));
        ok!(warpipe_close(jobs.worker));
        None
    }
}

#[test]
fn a_lease_of_a_queue_that_has_gone_stays_the_callers_until_it_is_closed() {
    let left_behind = (0..100).find_map(|_| LeftBehind::new());
    let LeftBehind {
        jobs,
        job,
        lease,
        input,
        output,
    } = left_behind.expect("an answer after the end of the link");
    let stream = jobs.fixture.stream;
    fails!(
        WARPIPE_PEER_GONE,
        warpipe_lease_complete(lease, output, stream, WARPIPE_USUAL_TIMEOUT)
    );
    fails!(
        WARPIPE_PEER_GONE,
        warpipe_lease_fail(lease, c"never mind".as_ptr(), WARPIPE_USUAL_TIMEOUT)
    );
    assert_eq!(info(input).job, 1);
    ok!(warpipe_sample_finish(input, LONG));
    let mut sample = none();
    fails!(
        WARPIPE_INVALID_STATE,
        warpipe_job_wait(job, stream, LONG, &mut sample)
    );
    ok!(warpipe_loan_discard(output, stream));
    ok!(warpipe_close(lease));
    fails!(WARPIPE_INVALID_OBJECT, warpipe_close(lease));
    ok!(warpipe_close(job));
    ok!(warpipe_close(jobs.worker));
}

#[test]
fn an_input_stays_behind_the_work_of_the_stream_that_it_is_released_on() {
    const BYTES: u64 = 2 << 20;
    let jobs = Jobs::with(options!(warpipe_queue_options {
        memory_limit: BYTES,
        submit_timeout_ns: SHORT,
    }));
    let (fixture, stream) = (&jobs.fixture, jobs.fixture.stream);
    let layout = bytes_layout(BYTES);
    let loan = get!(warpipe_queue_loan(jobs.queue, &layout));
    let job = get!(warpipe_queue_submit(
        jobs.queue,
        loan,
        stream,
        WARPIPE_USUAL_TIMEOUT
    ));
    let (lease, input) = jobs.lease_and_input();

    let reading = fixture.another_stream();
    let barrier = Barrier::new(2);
    let argument = (&raw const barrier).cast_mut().cast();
    ok!(warpipe_stream_wait_for(fixture.device, reading, stream));
    ok!(warpipe_stream_call(
        fixture.device,
        reading,
        Some(wait_at),
        argument
    ));
    ok!(warpipe_sample_release_on(input, reading, none()));
    ok!(warpipe_close(lease));
    jobs.complete(jobs.lease());
    ok!(warpipe_sample_finish(jobs.wait(job), LONG));

    let mut next = none();
    fails!(
        WARPIPE_LIMIT_REACHED,
        warpipe_queue_loan(jobs.queue, &layout, &mut next)
    );
    barrier.wait();
    ok!(warpipe_stream_synchronize(fixture.device, reading, LONG));
    assert!(eventually(Duration::from_nanos(LONG), || {
        call!(warpipe_queue_loan(jobs.queue, &layout, &mut next)) == warpipe_status::WARPIPE_OK
    }));
    ok!(warpipe_loan_discard(next, stream));
    ok!(warpipe_close(job));
    fixture.destroy(reading);
    jobs.close();
}

#[test]
fn a_second_thread_may_not_use_a_worker_that_leases() {
    let jobs = Jobs::new();
    let (worker, stream) = (Shared::new(jobs.worker), Shared::new(jobs.fixture.stream));
    let leasing = std::thread::spawn(move || {
        let (mut lease, mut input) = (none(), none());
        // This thread may come while the other one is in its short call.
        while call!(warpipe_worker_lease(
            worker.get(),
            stream.get(),
            LONG,
            &mut lease,
            &mut input
        )) == warpipe_status::WARPIPE_INVALID_STATE
        {
            std::thread::yield_now();
        }
        assert!(!lease.is_null(), "{}", crate::common::message());
        ok!(warpipe_close(input));
        Shared::new(lease)
    });
    let mut fd = 0;
    assert!(eventually(Duration::from_nanos(LONG), || {
        call!(warpipe_get_fd(jobs.worker.cast(), &mut fd)) == warpipe_status::WARPIPE_INVALID_STATE
    }));
    let (mut lease, mut input) = (none(), none());
    let stream = jobs.fixture.stream;
    fails!(
        WARPIPE_INVALID_STATE,
        warpipe_worker_lease(jobs.worker, stream, 0, &mut lease, &mut input)
    );
    // The call under way keeps it.
    ok!(warpipe_close(jobs.worker));
    let job = jobs.submit(b"job");
    let lease = leasing.join().expect("no panic").get();
    jobs.complete(lease);
    ok!(warpipe_sample_finish(jobs.wait(job), LONG));
    ok!(warpipe_close(job));
    ok!(warpipe_close(jobs.queue));
}

#[test]
fn options_that_are_not_valid_are_refused() {
    let fixture = Fixture::new();
    let mut queue = none();
    let mut refused = |options: &warpipe_queue_options| {
        let (name, place) = (c"jobs".as_ptr(), &mut queue);
        let status = call!(warpipe_queue_create(name, options, place));
        assert!(queue.is_null());
        (status, crate::common::message())
    };
    let options = options!(warpipe_queue_options {
        domain: fixture.domain,
        device: fixture.device,
    });
    let invalid = warpipe_status::WARPIPE_INVALID_INPUT;
    for wrong in [
        warpipe_queue_options { size: 0, ..options },
        warpipe_queue_options {
            size: usize::MAX,
            ..options
        },
        warpipe_queue_options {
            order: 2,
            ..options
        },
        warpipe_queue_options {
            prefetch: 257,
            ..options
        },
    ] {
        let (status, said) = refused(&wrong);
        assert_eq!(status, invalid, "{said}");
    }

    /// The options of a later version.
    #[repr(C)]
    struct Later {
        known: warpipe_queue_options,
        new: u64,
    }
    let later = |new| Later {
        known: warpipe_queue_options {
            size: size_of::<Later>(),
            ..options
        },
        new,
    };
    let (unknown, unused) = (later(1), later(0));
    let name = c"jobs".as_ptr();
    let of = |later: &Later| std::ptr::from_ref(later).cast::<warpipe_queue_options>();
    fails!(
        WARPIPE_PROTOCOL,
        warpipe_queue_create(name, of(&unknown), &mut queue)
    );
    ok!(warpipe_queue_create(name, of(&unused), &mut queue));
    // Those of an earlier version end before the last field.
    let earlier = warpipe_worker_options {
        spin_ns: u64::MAX,
        ..options!(warpipe_worker_options {
            domain: fixture.domain,
            device: fixture.device,
            size: size_of::<warpipe_worker_options>() - 8,
        })
    };
    let worker = get!(warpipe_worker_open(name, &earlier));
    ok!(warpipe_close(worker));

    let mut worker = none();
    let missing = options!(warpipe_worker_options {
        domain: fixture.domain,
        device: fixture.device
    });
    let said = fails!(
        WARPIPE_NOT_FOUND,
        warpipe_worker_open(c"elsewhere".as_ptr(), &missing, &mut worker)
    );
    assert!(said.contains("wait_ns"), "{said}");
    let mut second = none();
    fails!(
        WARPIPE_NAME_CONFLICT,
        warpipe_queue_create(name, &options, &mut second)
    );
    ok!(warpipe_close(queue));
}

#[test]
fn null_places_and_texts_are_invalid_input_and_null_objects_are_no_objects() {
    let jobs = Jobs::new();
    let (queue, stream) = (jobs.queue, jobs.fixture.stream);
    let options = options!(warpipe_queue_options {});
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_queue_create(c"name".as_ptr(), &options, none())
    );
    let mut place = none();
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_queue_create(none(), &options, &mut place)
    );
    let mut loan = none();
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_queue_loan(queue, none(), &mut loan)
    );
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_queue_get_state(queue, none(), none(), 0)
    );
    let mut state = zeroed();
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_queue_get_state(queue, &mut state, none(), 1)
    );
    let (mut lease, mut input) = (none(), none());
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_worker_lease(jobs.worker, stream, 0, none(), &mut input)
    );
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_worker_lease(jobs.worker, stream, 0, &mut lease, none())
    );
    let job = jobs.submit(b"job");
    let lease = jobs.lease();
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_lease_fail(lease, none(), WARPIPE_USUAL_TIMEOUT)
    );
    jobs.complete(lease);

    let mut job_place = none();
    fails!(
        WARPIPE_INVALID_OBJECT,
        warpipe_queue_submit(
            none(),
            none(),
            stream,
            WARPIPE_USUAL_TIMEOUT,
            &mut job_place
        )
    );
    fails!(
        WARPIPE_INVALID_OBJECT,
        warpipe_queue_submit(queue, none(), stream, WARPIPE_USUAL_TIMEOUT, &mut job_place)
    );
    fails!(
        WARPIPE_INVALID_OBJECT,
        warpipe_lease_complete(none(), none(), stream, WARPIPE_USUAL_TIMEOUT)
    );
    fails!(WARPIPE_INVALID_OBJECT, warpipe_lease_requeue(none(), 0));
    ok!(warpipe_close(none::<c_void>()));
    ok!(warpipe_close(job));
    jobs.close();
}

#[test]
fn a_pointer_of_another_type_or_a_closed_one_is_no_object() {
    let jobs = Jobs::new();
    let stream = jobs.fixture.stream;
    let job = jobs.submit(b"job");
    let said = fails!(
        WARPIPE_INVALID_OBJECT,
        warpipe_queue_drain(job.cast(), LONG)
    );
    assert_eq!(said, "a warpipe_job was passed for a warpipe_queue");
    let local = 0u64;
    let said = fails!(
        WARPIPE_INVALID_OBJECT,
        warpipe_close((&raw const local).cast_mut())
    );
    assert!(said.contains("is no object"), "{said}");
    let lease = jobs.lease();
    jobs.complete(lease);
    fails!(
        WARPIPE_INVALID_OBJECT,
        warpipe_lease_complete(lease, none(), stream, WARPIPE_USUAL_TIMEOUT)
    );
    ok!(warpipe_close(job));
    fails!(WARPIPE_INVALID_OBJECT, warpipe_close(job));
    let (queue, worker) = (jobs.queue, jobs.worker);
    jobs.close();
    fails!(WARPIPE_INVALID_OBJECT, warpipe_close(queue));
    fails!(WARPIPE_INVALID_OBJECT, warpipe_close(worker));
    fails!(WARPIPE_INVALID_OBJECT, warpipe_queue_drain(queue, 0));
}
