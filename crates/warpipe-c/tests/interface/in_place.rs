//! Tensors that are sent where they lie, through the C interface: what may be lent, and when the
//! caller's function is called.

use std::ffi::c_void;
use std::ptr::from_ref;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use crate::common::{Fixture, LONG, Malloc, bytes_layout, none};
use warpipe_c::*;
use warpipe_testkit::eventually;

unsafe extern "C" fn count(calls: *mut c_void) {
    // SAFETY: every argument is a counter of a test, which waits for the call.
    unsafe { &*calls.cast::<AtomicU32>() }.fetch_add(1, SeqCst);
}

fn argument(calls: &AtomicU32) -> *mut c_void {
    from_ref(calls).cast_mut().cast()
}

/// Published memory of 4096 bytes.
struct Lent {
    memory: *mut warpipe_memory,
    published: *mut warpipe_published,
}

impl Lent {
    fn new(fixture: &Fixture) -> Lent {
        let memory = get!(warpipe_memory_allocate(fixture.device, 4096));
        let options = options!(warpipe_publish_options {
            domain: fixture.domain,
        });
        let published = get!(warpipe_memory_publish(memory, c"memory".as_ptr(), &options));
        Lent { memory, published }
    }

    fn close(self) {
        ok!(warpipe_close(self.published));
        ok!(warpipe_close(self.memory));
    }
}

#[test]
fn the_owner_of_a_loan_that_is_refused_is_released_in_the_call() {
    let (fixture, elsewhere) = (Fixture::new(), Fixture::new());
    let (publisher, subscriber) = fixture.channel(c"frames");
    let (lent, foreign, plain) = (
        Lent::new(&fixture),
        Lent::new(&elsewhere),
        Malloc::new(4096),
    );
    let (closed, _) = fixture.channel(c"closed");
    ok!(warpipe_close(closed));
    let (calls, layout, mut loan) = (AtomicU32::new(0), bytes_layout(4096), none());
    let call = argument(&calls);
    let mut released = 0;
    let mut refused = || {
        released += 1;
        assert_eq!(calls.load(SeqCst), released);
    };
    for from in [none(), closed, subscriber.cast()] {
        fails!(
            WARPIPE_INVALID_OBJECT,
            warpipe_publisher_loan_in(
                from,
                lent.published,
                0,
                &layout,
                Some(count),
                call,
                &mut loan
            )
        );
        refused();
        fails!(
            WARPIPE_INVALID_OBJECT,
            warpipe_publisher_loan_in(from, none(), plain.1, &layout, Some(count), call, &mut loan)
        );
        refused();
    }
    let memory = lent.memory.cast();
    fails!(
        WARPIPE_INVALID_OBJECT,
        warpipe_publisher_loan_in(publisher, memory, 0, &layout, Some(count), call, &mut loan)
    );
    refused();
    let own = lent.published;
    let ranges = [
        (own, 1),
        (own, 4096),
        (own, u64::MAX),
        (foreign.published, 0),
    ];
    for (memory, offset) in ranges {
        fails!(
            WARPIPE_INVALID_INPUT,
            warpipe_publisher_loan_in(
                publisher,
                memory,
                offset,
                &layout,
                Some(count),
                call,
                &mut loan
            )
        );
        refused();
    }
    for data in [0, plain.1 + 1, u64::MAX] {
        fails!(
            WARPIPE_INVALID_INPUT,
            warpipe_publisher_loan_in(
                publisher,
                none(),
                data,
                &layout,
                Some(count),
                call,
                &mut loan
            )
        );
        refused();
    }
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_publisher_loan_in(publisher, own, 0, none(), Some(count), call, &mut loan)
    );
    refused();
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_publisher_loan_in(
            publisher,
            none(),
            plain.1,
            &layout,
            Some(count),
            call,
            none()
        )
    );
    refused();
    assert!(loan.is_null());
    ok!(warpipe_close(subscriber));
    ok!(warpipe_close(publisher));
    lent.close();
    foreign.close();
}

#[test]
fn an_owner_is_released_once_by_a_loan_that_is_closed_and_by_the_last_reader() {
    let fixture = Fixture::new();
    let (publisher, subscriber) = fixture.channel(c"frames");
    let (lent, calls, layout) = (Lent::new(&fixture), AtomicU32::new(0), bytes_layout(4096));
    let lend = |release| -> *mut warpipe_loan {
        let call = argument(&calls);
        get!(warpipe_publisher_loan_in(
            publisher,
            lent.published,
            0,
            &layout,
            release,
            call
        ))
    };
    ok!(warpipe_close(lend(Some(count))));
    let is_released =
        |times| eventually(Duration::from_nanos(LONG), || calls.load(SeqCst) == times);
    assert!(is_released(1));
    // No function is nothing to call.
    for release in [None, Some(count as unsafe extern "C" fn(*mut c_void))] {
        let loan = lend(release);
        ok!(warpipe_loan_send(
            loan,
            fixture.stream,
            WARPIPE_USUAL_TIMEOUT,
            none()
        ));
        let sample: *mut warpipe_sample =
            get!(warpipe_subscriber_receive(subscriber, fixture.stream, LONG));
        assert_eq!(calls.load(SeqCst), 1);
        ok!(warpipe_sample_finish(sample, LONG));
    }
    assert!(is_released(2));
    // A closed publisher keeps it as long as it is read.
    ok!(warpipe_loan_send(
        lend(Some(count)),
        fixture.stream,
        WARPIPE_USUAL_TIMEOUT,
        none()
    ));
    let sample: *mut warpipe_sample =
        get!(warpipe_subscriber_receive(subscriber, fixture.stream, LONG));
    ok!(warpipe_close(publisher));
    assert_eq!(calls.load(SeqCst), 2);
    ok!(warpipe_sample_finish(sample, LONG));
    assert!(is_released(3));
    ok!(warpipe_close(subscriber));
    lent.close();
}

/// What a function that is called calls.
struct Returned {
    publisher: *mut warpipe_publisher,
    lent: Lent,
    calls: AtomicU32,
    next: AtomicPtr<warpipe_loan>,
}

/// Lends the memory once more, then closes it and the publisher.
unsafe extern "C" fn use_the_library(argument: *mut c_void) {
    // SAFETY: the argument of the test, which waits for the calls.
    let returned = unsafe { &*argument.cast::<Returned>() };
    let Returned {
        publisher, lent, ..
    } = returned;
    if returned.calls.fetch_add(1, SeqCst) == 0 {
        let loan: *mut warpipe_loan = get!(warpipe_publisher_loan_in(
            *publisher,
            lent.published,
            0,
            &bytes_layout(8),
            Some(use_the_library),
            argument
        ));
        returned.next.store(loan, SeqCst);
        return;
    }
    ok!(warpipe_close(*publisher));
    ok!(warpipe_close(lent.published));
    ok!(warpipe_close(lent.memory));
    returned.calls.fetch_add(1, SeqCst);
}

#[test]
fn the_function_of_an_owner_may_use_the_publisher_and_close_it() {
    let fixture = Fixture::new();
    let (publisher, subscriber) = fixture.channel(c"frames");
    let returned = Returned {
        publisher,
        lent: Lent::new(&fixture),
        calls: AtomicU32::new(0),
        next: AtomicPtr::new(none()),
    };
    let send = |loan| {
        let timeout = WARPIPE_USUAL_TIMEOUT;
        ok!(warpipe_loan_send(loan, fixture.stream, timeout, none()));
        let sample: *mut warpipe_sample =
            get!(warpipe_subscriber_receive(subscriber, fixture.stream, LONG));
        ok!(warpipe_sample_finish(sample, LONG));
    };
    send(get!(warpipe_publisher_loan_in(
        publisher,
        returned.lent.published,
        0,
        &bytes_layout(8),
        Some(use_the_library),
        from_ref(&returned).cast_mut().cast()
    )));
    let soon = Duration::from_nanos(LONG);
    assert!(eventually(soon, || !returned.next.load(SeqCst).is_null()));
    send(returned.next.load(SeqCst));
    assert!(eventually(soon, || returned.calls.load(SeqCst) == 3));
    ok!(warpipe_close(subscriber));
}
