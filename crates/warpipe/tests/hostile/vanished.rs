//! Files of a living owner that others remove: a cleaner of old files, a logout, a hand.

use std::fs::{self, Permissions};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::ipc::domain::name_byte;

use super::stage::{
    LONG, Scratch, TestProcess, alone, assert_delivers, domain_of_test, eventually, role, stream,
};
use crate::statistics::{Observer, Role};
use crate::wait::OptionalExtension;
use crate::{Device, Domain, Error, NameFault, Publisher, Subscriber, SubscriberOptions};

fn build(domain: &Domain) -> crate::Result<Publisher> {
    Publisher::new("a", domain.on(&Device::host()))
}

fn remove(folder: &Path, files: &[&str]) {
    for file in files {
        fs::remove_file(folder.join(file)).unwrap();
    }
}

const REMOVED: [&[&str]; 3] = [&["a.lock", "a.sock"], &["a.lock"], &["a.sock"]];

#[test]
fn a_name_that_has_lost_its_files_is_never_held_twice() {
    let test = "a_name_that_has_lost_its_files_is_never_held_twice";
    if role().as_deref() == Some("second") {
        let outcome = build(&domain_of_test()).map(drop);
        return println!("outcome: {:?}", outcome.map_err(|error| error.kind()));
    }
    let rounds = [0o700, 0o711, 0o755].map(|mode| REMOVED.map(|files| (mode, files)));
    for (mode, files) in rounds.into_iter().flatten() {
        let scratch = Scratch::new();
        fs::set_permissions(&scratch.path, Permissions::from_mode(mode)).unwrap();
        let publisher = scratch.publisher(|it| it);
        let mut subscriber = scratch.subscriber();
        remove(&scratch.path, files);
        let second = build(&Domain::at(&scratch.path).unwrap()).map(drop);
        assert!(
            matches!(second, Err(Error::Name(NameFault::Taken { .. }))),
            "{second:?}"
        );
        let (text, own) = (second.unwrap_err().to_string(), std::process::id());
        let is_told = text.contains("without its files") || text.contains(&format!("{own}"));
        assert!(is_told, "{files:?}: {text}");
        let mut other = TestProcess::start(module_path!(), test, "second", &scratch);
        assert_eq!(other.hear("outcome:"), "Err(NameConflict)", "{files:?}");
        assert_delivers(&publisher, &mut subscriber, b"as before");
        drop((publisher, subscriber));
        build(&scratch.domain).expect("it is free with its owner's end");
    }
}

#[test]
fn a_name_that_has_lost_its_files_is_free_when_its_owner_is_killed() {
    let test = "a_name_that_has_lost_its_files_is_free_when_its_owner_is_killed";
    if role().as_deref() == Some("owner") {
        let _publisher = build(&domain_of_test()).unwrap();
        println!("outcome: ready");
        loop {
            std::thread::park();
        }
    }
    for round in 0..20 {
        let scratch = Scratch::new();
        let mut owner = TestProcess::start(module_path!(), test, "owner", &scratch);
        owner.hear("outcome:");
        remove(&scratch.path, REMOVED[round % 3]);
        owner.kill();
        let publisher = build(&scratch.domain).unwrap();
        assert_delivers(&publisher, &mut scratch.subscriber(), b"the next one");
    }
}

#[test]
fn an_owner_puts_back_the_files_that_others_removed() {
    for files in REMOVED {
        let scratch = Scratch::new();
        let publisher = scratch.publisher(|it| it);
        let mut before = scratch.subscriber();
        remove(&scratch.path, files);
        eventually("both files are there", || {
            REMOVED[0]
                .iter()
                .all(|file| scratch.path.join(file).exists())
        });
        let mut after = scratch.subscriber();
        let holder = scratch.domain.endpoints().unwrap()[0]
            .holder
            .clone()
            .unwrap();
        assert_eq!(holder.pid, Some(std::process::id() as i32));
        assert!(scratch.domain.clean().unwrap().is_empty());
        publisher.send_bytes(&stream(), b"to both").unwrap();
        for subscriber in [&mut before, &mut after] {
            let sample = subscriber.receive(&stream(), LONG).unwrap();
            assert_eq!(sample.to_vec(LONG).unwrap(), b"to both");
        }
        drop(before);
        drop((publisher, after));
        assert_eq!(fs::read_dir(&scratch.path).unwrap().count(), 0);
    }
}

#[test]
fn another_user_that_may_read_the_folder_keeps_no_name_from_its_owner() {
    let scratch = Scratch::new();
    fs::set_permissions(&scratch.path, Permissions::from_mode(0o755)).unwrap();
    // As another user could: it opens the folder for reading, and locks all of it.
    let folder = fs::File::open(&scratch.path).unwrap();
    for byte in [name_byte("a"), name_byte("b")] {
        crate::os::ofd_read_lock(folder.as_fd(), byte).unwrap();
    }
    let publisher = scratch.publisher(|it| it);
    assert_delivers(&publisher, &mut scratch.subscriber(), b"in the end");
}

#[test]
fn an_owner_appears_in_a_domain_that_was_removed_and_made_again() {
    let scratch = Scratch::new();
    let publisher = scratch.publisher(|it| it);
    fs::remove_dir_all(&scratch.path).unwrap();
    let domain = Domain::at(&scratch.path).unwrap();
    let mut subscriber = Subscriber::open("a", domain.on(&Device::host()), LONG).unwrap();
    publisher.send_bytes(&stream(), b"here").unwrap();
    let sample = subscriber.receive(&stream(), LONG).unwrap();
    assert_eq!(sample.to_vec(LONG).unwrap(), b"here");
    assert!(matches!(
        build(&domain),
        Err(Error::Name(NameFault::Taken { .. }))
    ));
    let pid = std::process::id() as i32;
    eventually("its statistics are of that domain", || {
        let seen = Observer::new().observe_one(pid);
        let mut all = seen.processes.iter().flat_map(|it| &it.endpoints);
        all.any(|it| it.role == Role::Owner && it.domain == domain.identity())
    });
}

#[test]
fn a_handle_of_a_domain_that_was_removed_leads_to_the_one_that_is_made_in_its_place() {
    let test = "a_handle_of_a_domain_that_was_removed_leads_to_the_one_that_is_made_in_its_place";
    alone(module_path!(), test, || {
        let scratch = Scratch::new();
        std::env::set_current_dir(&scratch.path).unwrap();
        let (before, folder) = (Domain::at("d").unwrap(), scratch.path.join("d"));
        std::env::set_current_dir("/").unwrap();
        let make_again = || {
            fs::remove_dir_all(&folder).unwrap();
            build(&Domain::at(&folder).unwrap()).unwrap()
        };
        let first = make_again();
        let options = || before.on(&Device::host());
        let follows = SubscriberOptions {
            reconnect: true,
            ..options()
        };
        let mut subscriber = Subscriber::open("a", follows, LONG).unwrap();
        assert_delivers(&first, &mut subscriber, b"in its place");
        assert_eq!(before.endpoints().unwrap().len(), 1);
        assert!(before.clean().unwrap().is_empty());
        assert!(matches!(
            build(&before),
            Err(Error::Name(NameFault::Taken { .. }))
        ));
        drop(first);
        let second = make_again();
        eventually("it has found the next one", || {
            second.wait_for_subscribers(1, Duration::ZERO).is_ok() || {
                let _ = subscriber.receive(&stream(), Duration::ZERO).optional();
                false
            }
        });
        drop(second);
        fs::remove_dir_all(&folder).unwrap();
        let third = build(&before).expect("its directory is made again");
        assert_delivers(
            &third,
            &mut Subscriber::open("a", options(), Duration::ZERO).unwrap(),
            b"and again",
        );
    });
}

#[test]
fn systemd_tmpfiles_leaves_a_domain_in_use_alone_and_removes_what_the_dead_left() {
    let scratch = Scratch::new();
    let folder = scratch.path.join("warpipe-0");
    let domain = Domain::at(&folder).unwrap();
    let rule = scratch.path.join("rule.conf");
    let clean = || {
        fs::write(&rule, format!("e {} - - - 0\n", scratch.path.display())).unwrap();
        let mut command = Command::new("systemd-tmpfiles");
        command.arg("--clean").arg(&rule).status()
    };
    let publisher = build(&domain).unwrap();
    match clean() {
        Ok(status) => assert!(status.success(), "{status}"),
        Err(error) => return println!("skipped: no systemd-tmpfiles: {error}"),
    }
    for file in REMOVED[0] {
        assert!(folder.join(file).exists(), "{file} is kept");
    }
    drop((publisher, domain));
    // A thread of the library may be about to let go of the folder.
    eventually("the rule removes what is not in use", || {
        assert!(clean().unwrap().success());
        !folder.exists()
    });
}
