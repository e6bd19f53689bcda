//! Members of a domain through the C interface.

use std::ffi::{CStr, c_char};
use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::common::{Fixture, LONG, none, text};
use warpipe_c::*;
use warpipe_testkit::wait_readable;

fn watch(fixture: &Fixture) -> *mut warpipe_members {
    let options = options!(warpipe_members_options {
        domain: fixture.domain,
    });
    get!(warpipe_members_open(&options))
}

fn join(fixture: &Fixture, name: &CStr, role: &CStr) -> *mut warpipe_member {
    let options = options!(warpipe_member_options {
        domain: fixture.domain,
        role: role.as_ptr(),
    });
    get!(warpipe_member_create(name.as_ptr(), &options))
}

fn next(members: *mut warpipe_members) -> warpipe_change {
    get!(warpipe_members_next_change(members, LONG))
}

fn field(text: &[c_char]) -> &str {
    // SAFETY: a field of a structure ends with a zero.
    let text = unsafe { CStr::from_ptr(text.as_ptr()) };
    text.to_str().expect("UTF-8")
}

#[test]
fn a_domain_lists_what_stands_in_the_place_of_an_endpoint() {
    let fixture = Fixture::new();
    let (mut path, mut length) = ([0 as c_char; 4096], 0);
    ok!(warpipe_domain_get_path(
        fixture.domain,
        path.as_mut_ptr(),
        path.len(),
        &mut length
    ));
    let taken = std::path::Path::new(field(&path)).join("taken.lock");
    std::os::unix::fs::symlink("/dev/null", taken).expect("a symlink");
    let member = join(&fixture, c"worker", c"worker");
    let (mut found, mut count): ([warpipe_endpoint; 4], _) = ([crate::common::zeroed(); 4], 0);
    ok!(warpipe_domain_list(
        fixture.domain,
        found.as_mut_ptr(),
        found.len(),
        &mut count
    ));
    let listed = found[..count]
        .iter()
        .map(|one| (field(&one.name), field(&one.foreign)));
    let listed: Vec<_> = listed.collect();
    assert!(listed.contains(&("taken", "a symlink")), "{listed:?}");
    assert!(
        listed.iter().any(|(_, foreign)| foreign.is_empty()),
        "{listed:?}"
    );
    ok!(warpipe_close(member));
}

#[test]
fn a_watch_lists_members_and_reports_that_they_join_and_leave() {
    let fixture = Fixture::new();
    let members = watch(&fixture);
    let mut change = crate::common::zeroed();
    fails!(
        WARPIPE_TIMEOUT,
        warpipe_members_next_change(members, 0, &mut change)
    );
    let member = join(&fixture, c"worker/1", c"worker");
    let joined = next(members);
    assert_eq!(
        joined.kind,
        warpipe_change_kind::WARPIPE_CHANGE_JOINED as u32
    );
    let found = joined.member;
    assert_eq!(
        (field(&found.name), field(&found.role)),
        ("worker/1", "worker")
    );
    assert_eq!(found.pid, std::process::id() as i32);
    assert_ne!(found.generation, [0; 16]);
    assert_eq!(found.state, warpipe_peer_state::WARPIPE_PEER_ALIVE as u32);
    assert_ne!(found.since_ns, 0);

    let second = join(&fixture, c"worker/2", c"");
    assert_eq!(field(&next(members).member.name), "worker/2");
    let (mut list, mut count) = ([crate::common::zeroed::<warpipe_member_info>(); 3], 0);
    ok!(warpipe_members_list(members, none(), 0, &mut count));
    assert_eq!(count, 2);
    ok!(warpipe_members_list(
        members,
        list.as_mut_ptr(),
        1,
        &mut count
    ));
    assert_eq!(
        (count, field(&list[0].name), list[1].pid),
        (2, "worker/1", 0)
    );
    ok!(warpipe_members_list(
        members,
        list.as_mut_ptr(),
        3,
        &mut count
    ));
    assert_eq!(
        (count, field(&list[1].name), list[2].pid),
        (2, "worker/2", 0)
    );

    ok!(warpipe_close(member));
    let left = next(members);
    assert_eq!(left.kind, warpipe_change_kind::WARPIPE_CHANGE_LEFT as u32);
    assert_eq!(left.member.generation, found.generation);
    assert_eq!(
        left.member.state,
        warpipe_peer_state::WARPIPE_PEER_LEAVING as u32
    );
    ok!(warpipe_close(second));
    ok!(warpipe_close(members));
}

#[test]
fn the_descriptor_is_readable_while_a_change_is_there() {
    let fixture = Fixture::new();
    let members = watch(&fixture);
    let fd: i32 = get!(warpipe_get_fd(members.cast()));
    // SAFETY: the watch, which is closed below, keeps it open.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let is_readable = |timeout| wait_readable(fd, timeout).expect("poll(2)");
    assert!(!is_readable(Duration::ZERO));
    let member = join(&fixture, c"worker", c"");
    assert!(is_readable(Duration::from_nanos(LONG)));
    let change: warpipe_change = get!(warpipe_members_next_change(members, 0));
    assert_eq!(field(&change.member.name), "worker");
    assert!(!is_readable(Duration::ZERO));
    ok!(warpipe_close(members));
    ok!(warpipe_close(member));
}

#[test]
fn a_name_that_is_taken_and_an_invalid_role_are_refused() {
    let fixture = Fixture::new();
    let member = join(&fixture, c"worker", c"worker");
    let mut second = none();
    let mut options = options!(warpipe_member_options {
        domain: fixture.domain,
    });
    fails!(
        WARPIPE_NAME_CONFLICT,
        warpipe_member_create(c"worker".as_ptr(), &options, &mut second)
    );
    let long = text(&"r".repeat(WARPIPE_ROLE_BYTES_MAX + 1));
    for role in [long.as_c_str(), c"a\nb", c"\xff"] {
        options.role = role.as_ptr();
        fails!(
            WARPIPE_INVALID_INPUT,
            warpipe_member_create(c"other".as_ptr(), &options, &mut second)
        );
    }
    let role = text(&"r".repeat(WARPIPE_ROLE_BYTES_MAX));
    options.role = role.as_ptr();
    ok!(warpipe_member_create(
        c"other".as_ptr(),
        &options,
        &mut second
    ));
    let members = watch(&fixture);
    // The two are found in any order.
    let found = [next(members).member, next(members).member];
    let other = found.iter().find(|member| field(&member.name) == "other");
    let other = other.expect("it is a member");
    assert_eq!(field(&other.role), role.to_str().expect("ASCII"));
    ok!(warpipe_close(second));
    ok!(warpipe_close(member));
    fails!(WARPIPE_INVALID_OBJECT, warpipe_close(member));
    ok!(warpipe_close(members));
    fails!(WARPIPE_INVALID_OBJECT, warpipe_close(members));
}

#[test]
fn null_and_options_of_a_wrong_size_are_refused() {
    let fixture = Fixture::new();
    let mut member = none();
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_member_create(none(), none(), &mut member)
    );
    let mut options = options!(warpipe_members_options {
        domain: fixture.domain,
    });
    let mut members = none();
    options.keeps_files = 2;
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_members_open(&options, &mut members)
    );
    options.size = 0;
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_members_open(&options, &mut members)
    );
    assert!(members.is_null());
    let mut count = 0;
    fails!(
        WARPIPE_INVALID_OBJECT,
        warpipe_members_list(none(), none(), 0, &mut count)
    );
    let members = watch(&fixture);
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_members_list(members, none(), 1, &mut count)
    );
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_members_next_change(members, 0, none())
    );
    ok!(warpipe_close(members));
    ok!(warpipe_close(none::<u8>()));
}
