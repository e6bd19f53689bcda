//! Timelines, events and semaphores through the C interface.

use std::ffi::{CStr, CString};

use crate::common::{Fixture, LONG, SHORT, Shared, none, text};
use warpipe_c::*;

fn opening(fixture: &Fixture) -> warpipe_open_options {
    options!(warpipe_open_options {
        domain: fixture.domain,
        device: fixture.device,
    })
}

fn timeline(fixture: &Fixture, name: &CStr) -> *mut warpipe_timeline {
    let options = options!(warpipe_create_options {
        domain: fixture.domain,
        device: fixture.device,
    });
    get!(warpipe_timeline_create(name.as_ptr(), &options))
}

fn value(timeline: *mut warpipe_timeline) -> u64 {
    get!(warpipe_timeline_get_value(timeline))
}

#[test]
fn a_timeline_opened_in_the_same_process_sees_what_its_owner_signals() {
    let fixture = Fixture::new();
    let owner = timeline(&fixture, c"frames");
    let opened = get!(warpipe_timeline_open(
        c"frames".as_ptr(),
        &opening(&fixture)
    ));
    let reading = get!(warpipe_stream_create(fixture.device));
    ok!(warpipe_timeline_wait(opened, reading, 1));
    ok!(warpipe_timeline_signal(owner, fixture.stream, 1));
    ok!(warpipe_timeline_wait_host(opened, 1, LONG));
    ok!(warpipe_stream_synchronize(fixture.device, reading, LONG));
    assert!(get!(warpipe_timeline_is_reached(opened, 1)));
    ok!(warpipe_timeline_signal_now(owner, 5));
    ok!(warpipe_timeline_wait_host(opened, 5, LONG));
    assert_eq!((value(owner), value(opened)), (5, 5));
    assert!(!get!(warpipe_timeline_is_reached(opened, 6)));
    ok!(warpipe_close(owner));
    fails!(
        WARPIPE_PEER_GONE,
        warpipe_timeline_wait_host(opened, 6, LONG)
    );
    assert_eq!(value(opened), 5, "the last value stays");
    ok!(warpipe_close(opened));
    ok!(warpipe_stream_destroy(fixture.device, reading));
}

#[test]
fn a_value_is_signalled_by_its_owner_alone_and_only_grows() {
    let fixture = Fixture::new();
    let owner = timeline(&fixture, c"frames");
    let opened = get!(warpipe_timeline_open(
        c"frames".as_ptr(),
        &opening(&fixture)
    ));
    fails!(
        WARPIPE_REFUSED,
        warpipe_timeline_signal(opened, fixture.stream, 1)
    );
    fails!(WARPIPE_REFUSED, warpipe_timeline_signal_now(opened, 1));
    ok!(warpipe_timeline_signal_now(owner, 2));
    for wrong in [0, 2, WARPIPE_TIMELINE_VALUE_MAX + 1, u64::MAX] {
        fails!(
            WARPIPE_INVALID_INPUT,
            warpipe_timeline_signal_now(owner, wrong)
        );
        fails!(
            WARPIPE_INVALID_INPUT,
            warpipe_timeline_signal(owner, fixture.stream, wrong)
        );
    }
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_timeline_wait(owner, fixture.stream, 3)
    );
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_timeline_wait_host(opened, u64::MAX, LONG)
    );
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_timeline_wait(opened, fixture.device.cast(), 1)
    );
    ok!(warpipe_close(opened));
    ok!(warpipe_close(owner));
}

#[test]
fn a_wait_for_zero_is_done_and_one_with_a_timeout_of_zero_does_not_wait() {
    let fixture = Fixture::new();
    let owner = timeline(&fixture, c"frames");
    ok!(warpipe_timeline_wait(owner, fixture.stream, 0));
    ok!(warpipe_timeline_wait_host(owner, 0, 0));
    assert!(get!(warpipe_timeline_is_reached(owner, 0)));
    for timeout in [0, SHORT] {
        fails!(
            WARPIPE_TIMEOUT,
            warpipe_timeline_wait_host(owner, 1, timeout)
        );
    }
    fixture.synchronize();
    ok!(warpipe_close(owner));
    fails!(
        WARPIPE_INVALID_OBJECT,
        warpipe_timeline_wait_host(owner, 0, 0)
    );
    fails!(WARPIPE_INVALID_OBJECT, warpipe_close(owner));
    ok!(warpipe_close(none::<u8>()));
}

#[test]
fn an_endpoint_of_another_kind_or_of_no_name_is_not_opened() {
    let fixture = Fixture::new();
    let owner = timeline(&fixture, c"frames");
    let (mut options, mut semaphore) = (opening(&fixture), none());
    fails!(
        WARPIPE_NAME_CONFLICT,
        warpipe_semaphore_open(c"frames".as_ptr(), &options, &mut semaphore)
    );
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_semaphore_open(c"no name".as_ptr(), &options, &mut semaphore)
    );
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_semaphore_open(none(), &options, &mut semaphore)
    );
    options.wait_ns = SHORT;
    fails!(
        WARPIPE_NOT_FOUND,
        warpipe_semaphore_open(c"other".as_ptr(), &options, &mut semaphore)
    );
    options.size = 0;
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_semaphore_open(c"frames".as_ptr(), &options, &mut semaphore)
    );
    assert!(semaphore.is_null());
    let wrong = fails!(
        WARPIPE_INVALID_OBJECT,
        warpipe_permit_release_now(owner.cast())
    );
    assert_eq!(wrong, "a warpipe_timeline was passed for a warpipe_permit");
    let mut second = none();
    let creating = options!(warpipe_create_options {
        domain: fixture.domain,
        device: fixture.device,
    });
    fails!(
        WARPIPE_NAME_CONFLICT,
        warpipe_timeline_create(c"frames".as_ptr(), &creating, &mut second)
    );
    ok!(warpipe_close(owner));
}

fn event(fixture: &Fixture) -> *mut warpipe_event {
    let options = options!(warpipe_create_options {
        domain: fixture.domain,
        device: fixture.device,
    });
    get!(warpipe_event_create(&options))
}

fn handle_of(event: *mut warpipe_event) -> CString {
    let mut length = 0;
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_event_get_handle(event, none(), 0, &mut length)
    );
    let mut buffer = vec![0; length + 1];
    ok!(warpipe_event_get_handle(
        event,
        buffer.as_mut_ptr(),
        buffer.len(),
        none()
    ));
    let bytes: Vec<u8> = buffer.iter().map(|&byte| byte as u8).collect();
    CString::from_vec_with_nul(bytes).expect("a text that ends where its length says")
}

#[test]
fn an_event_orders_a_stream_behind_the_recorded_work() {
    let fixture = Fixture::new();
    let own = event(&fixture);
    let handle = handle_of(own);
    let opened = get!(warpipe_event_open(handle.as_ptr(), &opening(&fixture)));
    let reading = get!(warpipe_stream_create(fixture.device));
    let mut is_complete = false;
    fails!(
        WARPIPE_INVALID_STATE,
        warpipe_event_wait(opened, reading, none())
    );
    fails!(
        WARPIPE_INVALID_STATE,
        warpipe_event_query(opened, 0, &mut is_complete)
    );
    fails!(
        WARPIPE_INVALID_STATE,
        warpipe_event_synchronize(opened, LONG)
    );

    let recorded: u64 = get!(warpipe_event_record(own, fixture.stream));
    let waited_for: u64 = get!(warpipe_event_wait(opened, reading));
    assert_ne!(recorded, 0);
    assert_eq!(recorded, waited_for);
    ok!(warpipe_event_synchronize(opened, LONG));
    ok!(warpipe_stream_synchronize(fixture.device, reading, LONG));
    assert!(get!(warpipe_event_query(opened, 0)));
    assert!(get!(warpipe_event_query(opened, waited_for)));

    let second: u64 = get!(warpipe_event_record(opened, reading));
    assert_ne!(second, recorded);
    ok!(warpipe_event_synchronize(own, LONG));
    assert!(get!(warpipe_event_query(own, second)));
    ok!(warpipe_event_record(own, fixture.stream, none()));
    ok!(warpipe_event_synchronize(own, LONG));
    ok!(warpipe_close(opened));
    ok!(warpipe_close(own));
    fails!(WARPIPE_INVALID_OBJECT, warpipe_close(own));
    ok!(warpipe_stream_destroy(fixture.device, reading));
}

#[test]
fn a_recording_that_no_event_gave_and_a_garbled_handle_are_refused() {
    let fixture = Fixture::new();
    let own = event(&fixture);
    let mut is_complete = true;
    for wrong in [255 << 56 | 1, 8 << 56 | 1, 1 << 56] {
        fails!(
            WARPIPE_INVALID_INPUT,
            warpipe_event_query(own, wrong, &mut is_complete)
        );
    }
    let handle = handle_of(own);
    let handle = handle.to_str().expect("ASCII");
    let mut opened = none();
    for garbled in ["", "event", &handle[1..], &handle[..handle.len() - 1]] {
        let garbled = text(garbled);
        fails!(
            WARPIPE_INVALID_INPUT,
            warpipe_event_open(garbled.as_ptr(), &opening(&fixture), &mut opened)
        );
    }
    let handle = text(handle);
    ok!(warpipe_close(own));
    fails!(
        WARPIPE_NOT_FOUND,
        warpipe_event_open(handle.as_ptr(), &opening(&fixture), &mut opened)
    );
    assert!(opened.is_null());
    let mut options = options!(warpipe_create_options {
        domain: fixture.domain,
    });
    options.size = 7;
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_event_create(&options, &mut opened)
    );
}

fn semaphore(fixture: &Fixture, permits: u32) -> *mut warpipe_semaphore {
    let options = options!(warpipe_create_options {
        domain: fixture.domain,
        device: fixture.device,
    });
    get!(warpipe_semaphore_create(
        c"turns".as_ptr(),
        permits,
        &options
    ))
}

fn counts(semaphore: *mut warpipe_semaphore) -> (u32, u32) {
    let info: warpipe_semaphore_info = get!(warpipe_semaphore_get_info(semaphore));
    (info.permits, info.available)
}

#[test]
fn permits_are_taken_and_returned_in_every_way() {
    let fixture = Fixture::new();
    let own = semaphore(&fixture, 2);
    let opened = get!(warpipe_semaphore_open(
        c"turns".as_ptr(),
        &opening(&fixture)
    ));
    assert_eq!(counts(opened), (2, 2));
    let first: *mut warpipe_permit = get!(warpipe_semaphore_acquire(opened, fixture.stream, LONG));
    let second: *mut warpipe_permit = get!(warpipe_semaphore_acquire_host(own, LONG));
    assert_eq!(counts(own), (2, 0));
    let mut third = none();
    for timeout in [0, SHORT] {
        fails!(
            WARPIPE_TIMEOUT,
            warpipe_semaphore_acquire(own, fixture.stream, timeout, &mut third)
        );
        fails!(
            WARPIPE_TIMEOUT,
            warpipe_semaphore_acquire_host(own, timeout, &mut third)
        );
    }
    assert!(third.is_null());
    ok!(warpipe_permit_release(first, fixture.stream));
    fails!(
        WARPIPE_INVALID_OBJECT,
        warpipe_permit_release(first, fixture.stream)
    );
    ok!(warpipe_permit_release_now(second));
    fails!(WARPIPE_INVALID_OBJECT, warpipe_permit_release_now(second));
    fixture.synchronize();
    let host: *mut warpipe_permit = get!(warpipe_semaphore_acquire_host(own, LONG));
    let other: *mut warpipe_permit = get!(warpipe_semaphore_acquire_host(opened, LONG));
    ok!(warpipe_close(host));
    ok!(warpipe_close(other));
    ok!(warpipe_close(none::<u8>()));
    fails!(WARPIPE_INVALID_OBJECT, warpipe_close(host));
    assert_eq!(counts(own), (2, 2));
    ok!(warpipe_close(opened));
    ok!(warpipe_close(own));
}

#[test]
fn a_waiting_thread_gets_the_permit_that_another_one_returns() {
    let fixture = Fixture::new();
    let own = semaphore(&fixture, 1);
    assert_eq!(counts(own), (1, 1), "one permit by default");
    let permit: *mut warpipe_permit = get!(warpipe_semaphore_acquire(own, fixture.stream, 0));
    let shared = Shared::new(own);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(move || {
            let permit = get!(warpipe_semaphore_acquire_host(shared.get(), LONG));
            ok!(warpipe_permit_release_now(permit));
        });
        ok!(warpipe_permit_release(permit, fixture.stream));
        waiting.join().expect("the permit is handed on");
    });
    ok!(warpipe_close(own));
}

#[test]
fn a_semaphore_has_at_most_1024_permits_and_a_stream_that_exists() {
    let fixture = Fixture::new();
    let mut options = options!(warpipe_create_options {
        domain: fixture.domain,
        device: fixture.device,
    });
    let mut refused = none();
    for permits in [0, 1025] {
        fails!(
            WARPIPE_INVALID_INPUT,
            warpipe_semaphore_create(c"turns".as_ptr(), permits, &options, &mut refused)
        );
    }
    options.size = 65 * 1024;
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_semaphore_create(c"turns".as_ptr(), 1, &options, &mut refused)
    );
    assert!(refused.is_null());
    let own = semaphore(&fixture, 1);
    let (mut permit, wrong) = (none(), fixture.device.cast());
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_semaphore_acquire(own, wrong, LONG, &mut permit)
    );
    let held = get!(warpipe_semaphore_acquire_host(own, LONG));
    fails!(WARPIPE_INVALID_INPUT, warpipe_permit_release(held, wrong));
    fails!(WARPIPE_INVALID_OBJECT, warpipe_close(held));
    assert_eq!(counts(own), (1, 1), "a failed release releases the permit");
    ok!(warpipe_close(own));
}

#[test]
fn a_timeout_of_all_bits_is_a_long_one() {
    let fixture = Fixture::new();
    let owner = timeline(&fixture, c"frames");
    ok!(warpipe_timeline_signal(owner, fixture.stream, 1));
    ok!(warpipe_timeline_wait_host(owner, 1, u64::MAX));
    let mut options = opening(&fixture);
    options.wait_ns = u64::MAX;
    let opened: *mut warpipe_timeline = get!(warpipe_timeline_open(c"frames".as_ptr(), &options));
    let event = event(&fixture);
    ok!(warpipe_event_record(event, fixture.stream, none()));
    ok!(warpipe_event_synchronize(event, u64::MAX));
    let semaphore = semaphore(&fixture, 1);
    let permit = get!(warpipe_semaphore_acquire(
        semaphore,
        fixture.stream,
        u64::MAX
    ));
    ok!(warpipe_permit_release(permit, fixture.stream));
    let permit = get!(warpipe_semaphore_acquire_host(semaphore, u64::MAX));
    ok!(warpipe_permit_release_now(permit));
    ok!(warpipe_close(semaphore));
    ok!(warpipe_close(event));
    ok!(warpipe_close(opened));
    ok!(warpipe_close(owner));
}

/// Creates an endpoint that admits other users: with arrays that are there, and with one that is
/// null but counted.
macro_rules! admits {
    ($create:ident($($name:expr),*), $options:ident, $close:ident) => {{
        let fixture = Fixture::new();
        let (uids, gids) = ([1, 2], [3]);
        let mut options = options!($options {
            domain: fixture.domain,
            allow: warpipe_allow {
                uids: uids.as_ptr(),
                uids_count: uids.len(),
                gids: gids.as_ptr(),
                gids_count: gids.len(),
            },
        });
        ok!($close(get!($create($($name,)* &options))));
        let mut refused = none();
        options.allow.gids = none();
        let said = fails!(WARPIPE_INVALID_INPUT, $create($($name,)* &options, &mut refused));
        assert!(said.starts_with("options->allow.gids is null"), "{said}");
        options.allow.uids = none();
        let said = fails!(WARPIPE_INVALID_INPUT, $create($($name,)* &options, &mut refused));
        assert!(said.starts_with("options->allow.uids is null"), "{said}");
        assert!(refused.is_null());
    }};
}

#[test]
fn other_users_are_admitted_by_arrays_that_are_there() {
    let name = c"shared".as_ptr();
    admits!(
        warpipe_timeline_create(name),
        warpipe_create_options,
        warpipe_close
    );
    admits!(
        warpipe_event_create(),
        warpipe_create_options,
        warpipe_close
    );
    admits!(
        warpipe_semaphore_create(name, 1),
        warpipe_create_options,
        warpipe_close
    );
    admits!(
        warpipe_member_create(name),
        warpipe_member_options,
        warpipe_close
    );
}
