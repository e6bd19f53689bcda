//! Invalid names, and directories that cannot be domains.

use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt, chown, symlink};

use rustix::process::Signal;

use super::stage::{LONG, Scratch, TestProcess, alone, domain_of_test, next_order, role, stream};
use crate::{
    Device, Domain, EndpointName, Error, NAME_BYTES_MAX, NameFault, Publisher, Subscriber,
};

const BAD: [&str; 15] = [
    "", "..", ".", "/", "a/", "/a", "a//b", "a/../b", "../a", "a/.b", ".a", "a\0b", "a b", "käse",
    "a+b",
];

#[test]
fn a_name_that_breaks_a_rule_is_refused_by_both_ends() {
    let scratch = Scratch::new();
    let long = "x".repeat(NAME_BYTES_MAX + 1);
    for bad in BAD.iter().copied().chain([long.as_str()]) {
        let publisher = Publisher::new(bad, scratch.domain.on(&Device::host()));
        assert!(
            matches!(publisher, Err(Error::Name(NameFault::Invalid { .. }))),
            "{bad:?}"
        );
        let subscriber = Subscriber::open(
            bad,
            scratch.domain.on(&Device::host()),
            std::time::Duration::ZERO,
        );
        assert!(
            matches!(subscriber, Err(Error::Name(NameFault::Invalid { .. }))),
            "{bad:?}"
        );
    }
    assert_eq!(
        std::fs::read_dir(&scratch.path).unwrap().count(),
        0,
        "nothing was made for any of them"
    );
}

#[test]
fn the_longest_name_can_be_published_and_subscribed_to() {
    let scratch = Scratch::new();
    let long = "x".repeat(NAME_BYTES_MAX);
    let publisher = Publisher::new(&long, scratch.domain.on(&Device::host())).unwrap();
    Subscriber::open(
        &long,
        scratch.domain.on(&Device::host()),
        std::time::Duration::ZERO,
    )
    .unwrap();
    drop(publisher);
    assert_eq!(std::fs::read_dir(&scratch.path).unwrap().count(), 0);
}

#[test]
fn a_name_with_slashes_lies_flat_in_the_directory() {
    let scratch = Scratch::new();
    let _publisher =
        Publisher::new("camera/front.left-1", scratch.domain.on(&Device::host())).unwrap();
    assert!(
        std::fs::read_dir(&scratch.path).unwrap().all(|entry| entry
            .unwrap()
            .file_type()
            .unwrap()
            .is_file()
            || scratch.path.join("camera+front.left-1.sock").exists())
    );
    assert_eq!(
        scratch.domain.endpoints().unwrap()[0].name,
        EndpointName::new("camera/front.left-1").unwrap()
    );
}

#[test]
fn a_huge_name_does_not_make_a_huge_error() {
    let Err(Error::Name(NameFault::Invalid { name, .. })) = EndpointName::new(&"é".repeat(1 << 20))
    else {
        panic!("a bad name")
    };
    assert!(name.len() <= 4 * NAME_BYTES_MAX);
}

fn reason(path: impl AsRef<std::path::Path>) -> String {
    match Domain::at(path) {
        Err(Error::Name(NameFault::Domain { reason, .. })) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_symlink_is_no_domain_however_it_is_spelt() {
    let scratch = Scratch::new();
    let (real, link) = (scratch.path.join("real"), scratch.path.join("link"));
    Domain::at(&real).unwrap();
    symlink(&real, &link).unwrap();
    for spelling in ["link", "link/", "link/.", "link//"] {
        assert!(
            reason(scratch.path.join(spelling)).contains("symlink"),
            "{spelling}"
        );
    }
}

#[test]
fn a_directory_that_others_may_write_is_no_domain() {
    let scratch = Scratch::new();
    for mode in [0o770, 0o720, 0o702, 0o777, 0o1777] {
        std::fs::set_permissions(&scratch.path, Permissions::from_mode(mode)).unwrap();
        assert!(reason(&scratch.path).contains("may write"), "{mode:o}");
    }
    std::fs::set_permissions(&scratch.path, Permissions::from_mode(0o755)).unwrap();
    Domain::at(&scratch.path).unwrap();
}

#[test]
fn a_directory_of_another_user_is_no_domain() {
    let scratch = Scratch::new();
    if chown(&scratch.path, Some(65534), None).is_err() {
        println!("skipped: only root can give a directory away");
        return;
    }
    assert!(reason(&scratch.path).contains("uid 65534 owns it"));
    assert!(Domain::of_user(&scratch.path, 65534).is_ok());
}

#[test]
fn a_path_without_a_directory_or_a_parent_is_no_domain() {
    let scratch = Scratch::new();
    let file = scratch.path.join("file");
    std::fs::write(&file, b"mine").unwrap();
    reason(&file);
    assert_eq!(std::fs::read(&file).unwrap(), b"mine");
    reason(scratch.path.join("none/such"));
    reason("");
    reason("a\0b");
    reason("/proc/none-such");
}

#[test]
fn a_relative_directory_stays_the_same_when_the_process_moves() {
    alone(
        module_path!(),
        "a_relative_directory_stays_the_same_when_the_process_moves",
        || {
            let scratch = Scratch::new();
            std::env::set_current_dir(&scratch.path).unwrap();
            let domain = Domain::at("relative").unwrap();
            std::env::set_current_dir("/").unwrap();
            let publisher = Publisher::new("a", domain.on(&Device::host())).unwrap();
            Subscriber::open("a", domain.on(&Device::host()), std::time::Duration::ZERO).unwrap();
            assert!(scratch.path.join("relative/a.sock").exists());
            drop(publisher);
            assert!(!scratch.path.join("relative/a.sock").exists());
        },
    );
}

/// How many files the exit of a process closes between its lifeline and its lock.
const FILES_BETWEEN: usize = 15_000;

/// Has a lifeline, then many files, then the lock of a name.
fn own_a_name_behind_many_files() {
    let (domain, device) = (domain_of_test(), Device::host());
    let publisher = |name| Publisher::new(name, domain.on(&device)).unwrap();
    let first = publisher("first");
    let mut files = Vec::new();
    while files.len() < FILES_BETWEEN
        && let Ok((one, other)) = std::os::unix::net::UnixStream::pair()
    {
        files.extend([one, other]);
    }
    files.truncate(files.len().saturating_sub(1000));
    let last = publisher("last");
    println!("ready");
    next_order();
    drop((first, files, last));
}

#[test]
fn the_name_of_a_dead_process_is_free_although_its_exit_has_not_closed_the_lock_yet() {
    const TEST: &str =
        "the_name_of_a_dead_process_is_free_although_its_exit_has_not_closed_the_lock_yet";
    if role().as_deref() == Some("owner") {
        return own_a_name_behind_many_files();
    }
    let scratch = Scratch::new();
    let device = Device::host();
    for _ in 0..5 {
        let mut owner = TestProcess::start(module_path!(), TEST, "owner", &scratch);
        owner.hear("ready");
        let mut subscriber = Subscriber::open(
            "first",
            scratch.domain.on(&device),
            std::time::Duration::ZERO,
        )
        .unwrap();
        owner.process.signal(Signal::KILL).unwrap();
        let gone = subscriber.receive(&stream(), LONG).unwrap_err();
        assert!(matches!(gone, Error::PeerGone { .. }), "{gone}");
        let next = Publisher::new("last", scratch.domain.on(&device));
        next.expect("the name is free");
        owner.kill();
    }
}
