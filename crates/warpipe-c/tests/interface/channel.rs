//! Channels through the C interface, and what a pointer may not be.

use crate::common::{Fixture, LONG, bytes_layout, metadata, none};
use warpipe_c::*;

#[test]
fn a_sample_arrives_with_its_bytes_and_metadata() {
    let fixture = Fixture::new();
    let (publisher, subscriber) = fixture.channel(c"frames");
    let loan = get!(warpipe_publisher_loan(publisher, &bytes_layout(4)));
    fixture.write(loan, b"data");
    ok!(warpipe_loan_set_metadata(loan, b"tag".as_ptr().cast(), 3));
    let sequence: u64 = get!(warpipe_loan_send(
        loan,
        fixture.stream,
        WARPIPE_USUAL_TIMEOUT
    ));
    let sample: *mut warpipe_sample =
        get!(warpipe_subscriber_receive(subscriber, fixture.stream, LONG));
    let info: warpipe_sample_info = get!(warpipe_sample_get_info(sample));
    assert_eq!((sequence, info.sequence), (1, 1));
    assert_eq!(metadata(&info), b"tag");
    assert_eq!(fixture.read(sample), b"data");
    ok!(warpipe_sample_finish(sample, LONG));
    ok!(warpipe_close(subscriber));
    ok!(warpipe_close(publisher));
}

#[test]
fn a_loan_that_is_refused_stays_the_callers_and_one_that_is_sent_is_closed() {
    let fixture = Fixture::new();
    let options = options!(warpipe_publisher_options {
        domain: fixture.domain,
        device: fixture.device,
        depth: 1,
        policy: warpipe_policy::WARPIPE_POLICY_FAIL as u32,
    });
    let publisher = get!(warpipe_publisher_create(c"frames".as_ptr(), &options));
    let options = options!(warpipe_subscriber_options {
        domain: fixture.domain,
        device: fixture.device,
    });
    let subscriber = get!(warpipe_subscriber_open(c"frames".as_ptr(), &options));
    let usual = WARPIPE_USUAL_TIMEOUT;
    let lend =
        || -> *mut warpipe_loan { get!(warpipe_publisher_loan(publisher, &bytes_layout(4))) };
    let (first, second) = (lend(), lend());
    ok!(warpipe_loan_send(first, fixture.stream, usual, none()));
    fails!(
        WARPIPE_LIMIT_REACHED,
        warpipe_loan_send(second, fixture.stream, usual, none())
    );
    fixture.write(second, b"data");
    let sample = get!(warpipe_subscriber_receive(subscriber, fixture.stream, LONG));
    ok!(warpipe_sample_finish(sample, LONG));
    // There is room once the stream has released it.
    fixture.synchronize();
    ok!(warpipe_loan_send(second, fixture.stream, usual, none()));
    for sent in [first, second] {
        fails!(
            WARPIPE_INVALID_OBJECT,
            warpipe_loan_send(sent, fixture.stream, usual, none())
        );
    }
    let sample = get!(warpipe_subscriber_receive(subscriber, fixture.stream, LONG));
    assert_eq!(fixture.read(sample), b"data");
    ok!(warpipe_sample_finish(sample, LONG));
    ok!(warpipe_close(subscriber));
    ok!(warpipe_close(publisher));
}

#[test]
fn a_timeout_of_zero_takes_only_a_sample_that_is_there() {
    let fixture = Fixture::new();
    let (publisher, subscriber) = fixture.channel(c"frames");
    let mut sample = none();
    fails!(
        WARPIPE_TIMEOUT,
        warpipe_subscriber_receive(subscriber, fixture.stream, 0, &mut sample)
    );
    assert!(sample.is_null());
    ok!(warpipe_close(subscriber));
    ok!(warpipe_close(publisher));
}

#[test]
fn a_sample_says_how_many_are_missing_before_it_and_whether_its_publisher_is_another_one() {
    let fixture = Fixture::new();
    let publish = || -> *mut warpipe_publisher {
        let options = options!(warpipe_publisher_options {
            domain: fixture.domain,
            device: fixture.device,
            depth: 2,
            history: 1,
            policy: warpipe_policy::WARPIPE_POLICY_DROP_NEWEST as u32,
        });
        get!(warpipe_publisher_create(c"frames".as_ptr(), &options))
    };
    let mut publisher = publish();
    let options = options!(warpipe_subscriber_options {
        domain: fixture.domain,
        device: fixture.device,
        reconnect: 1,
    });
    let subscriber: *mut warpipe_subscriber =
        get!(warpipe_subscriber_open(c"frames".as_ptr(), &options));
    let send = |publisher| {
        let loan = get!(warpipe_publisher_loan(publisher, &bytes_layout(4)));
        let _: u64 = get!(warpipe_loan_send(
            loan,
            fixture.stream,
            WARPIPE_USUAL_TIMEOUT
        ));
    };
    // The number of the next sample, how many are missing, whether there is a break, and the process
    // of another publisher before.
    let receive = |timeout| {
        let mut sample = none();
        // SAFETY: the handles are open, and there is a place for the sample.
        let status =
            unsafe { warpipe_subscriber_receive(subscriber, fixture.stream, timeout, &mut sample) };
        (status == warpipe_status::WARPIPE_OK).then(|| {
            let info: warpipe_sample_info = get!(warpipe_sample_get_info(sample));
            ok!(warpipe_sample_finish(sample, LONG));
            let previous = info.previous_pid;
            assert!(info.is_discontinuity || previous == 0);
            (info.sequence, info.missing, info.is_discontinuity, previous)
        })
    };
    (0..5).for_each(|_| send(publisher));
    assert_eq!(receive(LONG), Some((1, 0, false, 0)));
    assert_eq!(receive(LONG), Some((2, 0, false, 0)));
    // There is room once the stream has released them.
    fixture.synchronize();
    send(publisher);
    assert_eq!(receive(LONG), Some((6, 3, true, 0)));
    ok!(warpipe_close(publisher));
    assert_eq!(receive(0), None);
    publisher = publish();
    send(publisher);
    let own = std::process::id() as i32;
    assert_eq!(receive(LONG), Some((1, 0, true, own)), "of another one");
    ok!(warpipe_close(subscriber));
    ok!(warpipe_close(publisher));
}

#[test]
fn a_pointer_that_is_null_or_closed_or_of_another_type_is_an_invalid_object() {
    let fixture = Fixture::new();
    let (publisher, subscriber) = fixture.channel(c"frames");
    let layout = bytes_layout(4);
    let mut loan = none();
    let null = none();
    fails!(
        WARPIPE_INVALID_OBJECT,
        warpipe_publisher_loan(null, &layout, &mut loan)
    );
    let wrong = fails!(
        WARPIPE_INVALID_OBJECT,
        warpipe_publisher_loan(subscriber.cast(), &layout, &mut loan)
    );
    assert_eq!(
        wrong,
        "a warpipe_subscriber was passed for a warpipe_publisher"
    );
    ok!(warpipe_close(publisher));
    fails!(WARPIPE_INVALID_OBJECT, warpipe_close(publisher));
    fails!(
        WARPIPE_INVALID_OBJECT,
        warpipe_publisher_loan(publisher, &layout, &mut loan)
    );
    ok!(warpipe_close(subscriber));
    ok!(warpipe_close(none::<u8>()));
}
