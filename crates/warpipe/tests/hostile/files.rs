//! Files in the place of an endpoint's: stale ones are removed, all others stay.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, symlink};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::Path;
use std::process::Stdio;
use std::sync::Barrier;

use super::descriptors::{descriptors, settled_descriptors};
use super::stage::{
    Guarded, Scratch, alone, assert_delivers, command, domain_of_test, eventually, name, role,
};
use crate::{Device, Error, NameFault, Publisher, PublisherOptions};

fn build(scratch: &Scratch) -> crate::Result<Publisher> {
    Publisher::new("a", scratch.domain.on(&Device::host()))
}

/// The kind and the contents of a path, without following it.
fn portrait(path: &Path) -> (String, u64, Vec<u8>) {
    use std::os::unix::fs::MetadataExt;
    let metadata = fs::symlink_metadata(path).unwrap();
    let contents = if metadata.is_file() {
        fs::read(path).unwrap()
    } else {
        Vec::new()
    };
    (
        format!("{:?} {:o}", metadata.file_type(), metadata.mode()),
        metadata.ino(),
        contents,
    )
}

fn fifo(path: &Path) {
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
}

/// Creates an obstacle; returns the descriptors that keep it alive.
type Obstacle = fn(&Path) -> Vec<OwnedFd>;

const OBSTACLES: [(&str, Obstacle); 8] = [
    ("a regular file", |path| {
        fs::write(path, b"somebody's").unwrap();
        Vec::new()
    }),
    ("a fifo", |path| {
        fifo(path);
        Vec::new()
    }),
    ("a directory", |path| {
        fs::create_dir(path).unwrap();
        Vec::new()
    }),
    ("a dangling symlink", |path| {
        symlink("/nowhere", path).unwrap();
        Vec::new()
    }),
    ("a symlink to a file", |path| {
        symlink("/etc/passwd", path).unwrap();
        Vec::new()
    }),
    ("a live stream socket", |path| {
        vec![UnixListener::bind(path).unwrap().into()]
    }),
    ("a live datagram socket", |path| {
        vec![UnixDatagram::bind(path).unwrap().into()]
    }),
    ("a live socket with a full backlog", full_backlog),
];

#[test]
fn foreign_files_in_place_of_the_socket_or_the_lock_are_left_unchanged() {
    for file in ["a.sock", ".a.new", "a.lock"] {
        for (what, make) in OBSTACLES {
            let scratch = Scratch::new();
            let path = scratch.path.join(file);
            let _kept = make(&path);
            let before = portrait(&path);
            let error = build(&scratch).unwrap_err();
            assert!(
                matches!(&error, Error::Name(NameFault::Foreign { path: p, .. }) if *p == path),
                "{what} at {file}: {error}"
            );
            assert!(
                scratch.domain.clean().unwrap().is_empty(),
                "{what} at {file} is not for cleaning"
            );
            assert_eq!(portrait(&path), before, "{what} at {file}");
            assert_eq!(
                fs::read_dir(&scratch.path).unwrap().count(),
                1,
                "nothing was left beside {what} at {file}"
            );
            if fs::symlink_metadata(&path).unwrap().is_dir() {
                fs::remove_dir(&path)
            } else {
                fs::remove_file(&path)
            }
            .unwrap();
            let publisher = build(&scratch).unwrap();
            assert_delivers(&publisher, &mut scratch.subscriber(), b"usable afterwards");
        }
    }
}

/// A listening socket of our own type with a full backlog: connecting answers `EAGAIN`.
fn full_backlog(path: &Path) -> Vec<OwnedFd> {
    use rustix::net::*;
    let socket = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
    };
    let address = SocketAddrUnix::new(path).unwrap();
    let mut sockets = vec![socket()];
    bind(&sockets[0], &address).unwrap();
    listen(&sockets[0], 0).unwrap();
    loop {
        let client = socket();
        match connect(&client, &address) {
            Ok(()) => sockets.push(client),
            Err(error) => {
                assert_eq!(error, rustix::io::Errno::AGAIN);
                return sockets;
            }
        }
    }
}

#[test]
fn a_lock_of_another_tool_is_not_taken_for_a_dead_endpoint() {
    let scratch = Scratch::new();
    for (file, contents) in [
        ("Cargo.lock", "version = 4\n"),
        ("yarn.lock", "1234\n"),
        ("x.lock", "warpipe is great"),
    ] {
        fs::write(scratch.path.join(file), contents).unwrap();
    }
    assert!(scratch.domain.clean().unwrap().is_empty());
    assert_eq!(
        fs::read_to_string(scratch.path.join("Cargo.lock")).unwrap(),
        "version = 4\n"
    );
    assert_eq!(fs::read_dir(&scratch.path).unwrap().count(), 3);
}

#[test]
fn a_dead_socket_is_cleared_away() {
    for file in ["a.sock", ".a.new"] {
        let scratch = Scratch::new();
        drop(UnixListener::bind(scratch.path.join(file)).unwrap());
        assert!(
            fs::symlink_metadata(scratch.path.join(file))
                .unwrap()
                .file_type()
                .is_socket()
        );
        let publisher = build(&scratch).unwrap();
        assert_delivers(&publisher, &mut scratch.subscriber(), b"behind the dead");
    }
}

#[test]
fn a_killed_publishers_name_is_cleaned_or_taken_over() {
    let test = "a_killed_publishers_name_is_cleaned_or_taken_over";
    if role().as_deref() == Some("victim") {
        let domain = domain_of_test();
        let _publisher = Publisher::new("a", domain.on(&Device::host())).unwrap();
        println!("ready");
        loop {
            std::thread::park();
        }
    }
    for clean_first in [false, true] {
        let scratch = Scratch::new();
        let mut command = command(module_path!(), test, "victim");
        command
            .env("WARPIPE_HOSTILE_PATH", &scratch.path)
            .stdout(Stdio::piped());
        let mut victim = Guarded(command.spawn().unwrap());
        let stdout = std::io::BufReader::new(victim.0.stdout.take().unwrap());
        assert!(
            std::io::BufRead::lines(stdout)
                .map_while(Result::ok)
                .any(|line| line.contains("ready"))
        );
        let pid = victim.0.id() as i32;
        assert!(
            matches!(build(&scratch), Err(Error::Name(NameFault::Taken { holder, .. })) if holder.pid == Some(pid))
        );
        assert!(
            scratch.domain.clean().unwrap().is_empty(),
            "the living is not cleaned"
        );
        drop(victim);
        assert_eq!(scratch.domain.endpoints().unwrap()[0].holder, None);
        if clean_first {
            assert_eq!(scratch.domain.clean().unwrap(), [name()]);
            assert_eq!(fs::read_dir(&scratch.path).unwrap().count(), 0);
        }
        let publisher = build(&scratch).unwrap();
        assert_delivers(
            &publisher,
            &mut scratch.subscriber(),
            b"the next incarnation",
        );
    }
}

#[test]
fn of_two_that_race_for_a_name_one_wins_and_the_other_gets_an_error() {
    let (ours, theirs) = (Scratch::new(), Barrier::new(2));
    for round in 0..200 {
        if round % 2 == 0 {
            // The files of a dead publisher, so that both want to remove them.
            drop(UnixListener::bind(ours.path.join("a.sock")).unwrap());
            fs::write(ours.path.join("a.lock"), "warpipe 999999999 \n").unwrap();
        }
        // Each opens the directory itself; locks belong to open files, so threads behave like
        // processes.
        let contend = || {
            let domain = crate::Domain::at(&ours.path).unwrap();
            theirs.wait();
            let claim = domain.claim(&name(), false);
            theirs.wait();
            claim
        };
        let (one, other) = std::thread::scope(|scope| {
            let other = scope.spawn(contend);
            (contend(), other.join().unwrap())
        });
        let (winner, loser) = if one.is_ok() {
            (one, other)
        } else {
            (other, one)
        };
        let Ok(winner) = winner else {
            panic!("round {round}: nobody won: {winner:?} {loser:?}")
        };
        assert!(
            matches!(loser, Err(Error::Name(NameFault::Taken { .. }))),
            "round {round}: {loser:?}"
        );
        ours.domain
            .connect(
                &name(),
                crate::Kind::Publisher,
                Some(&crate::ipc::client_handshake::HandshakeLimit::of(
                    super::stage::LONG,
                )),
            )
            .unwrap();
        drop(winner);
        assert_eq!(
            fs::read_dir(&ours.path).unwrap().count(),
            0,
            "round {round}"
        );
    }
}

#[test]
fn listing_the_names_never_costs_a_publisher_its_name() {
    let scratch = Scratch::new();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                scratch.domain.endpoints().unwrap();
            }
        });
        let claims: Vec<_> = (0..500)
            .map(|_| scratch.domain.claim(&name(), false).map(drop))
            .collect();
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        claims
            .into_iter()
            .collect::<crate::Result<Vec<()>>>()
            .unwrap();
    });
}

#[test]
fn a_build_that_fails_behind_the_claim_leaves_no_file_and_no_descriptor() {
    alone(
        module_path!(),
        "a_build_that_fails_behind_the_claim_leaves_no_file_and_no_descriptor",
        || {
            use crate::backend::testing::{Failing, Wrapped};
            let scratch = Scratch::new();
            let backend = Wrapped::new(
                crate::backend::host::HostBackend::shared(),
                Failing::default(),
            );
            let device = Device::from_backend(backend.clone());
            drop(build(&scratch).unwrap());
            let before = settled_descriptors();
            backend.hook().aim("register", 1);
            let options = PublisherOptions {
                history: 1,
                ..scratch.domain.on(&device)
            };
            let error = Publisher::new("a", options).unwrap_err();
            assert!(
                matches!(
                    error,
                    Error::Driver {
                        code: Error::INJECTED,
                        ..
                    }
                ),
                "{error}"
            );
            assert_eq!(fs::read_dir(&scratch.path).unwrap().count(), 0);
            eventually("every descriptor is closed", || descriptors() <= before);
            assert_delivers(
                &build(&scratch).unwrap(),
                &mut scratch.subscriber(),
                b"after all",
            );
        },
    );
}

/// The files of a dead publisher, unless they exist.
fn leave_dead(scratch: &Scratch) -> std::io::Result<()> {
    fs::write(scratch.path.join("a.lock"), "warpipe 999999999 \n")?;
    UnixListener::bind(scratch.path.join("a.sock")).map(drop)
}

#[test]
fn a_cleaner_never_costs_a_publisher_its_name() {
    let scratch = Scratch::new();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let domain = crate::Domain::at(&scratch.path).unwrap();
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    domain.clean().unwrap();
                    domain.clean_name(&name());
                }
            });
        }
        let claim = |round| {
            if round % 3 == 0 {
                let _ = leave_dead(&scratch);
            }
            let _claim = scratch.domain.claim(&name(), false)?;
            scratch
                .domain
                .connect(
                    &name(),
                    crate::Kind::Publisher,
                    Some(&crate::ipc::client_handshake::HandshakeLimit::of(
                        super::stage::LONG,
                    )),
                )
                .map(drop)
        };
        let claims: Vec<crate::Result<()>> = (0..300).map(claim).collect();
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        claims
            .into_iter()
            .collect::<crate::Result<Vec<()>>>()
            .unwrap();
    });
}

#[test]
fn of_several_cleaners_one_reports_the_removed_files() {
    let scratch = Scratch::new();
    for round in 0..100 {
        leave_dead(&scratch).unwrap();
        let barrier = Barrier::new(4);
        let clean = || {
            let domain = crate::Domain::at(&scratch.path).unwrap();
            barrier.wait();
            domain.clean().unwrap().len()
        };
        let removed: usize = std::thread::scope(|scope| {
            let cleaners: Vec<_> = (0..4).map(|_| scope.spawn(clean)).collect();
            cleaners
                .into_iter()
                .map(|cleaner| cleaner.join().unwrap())
                .sum()
        });
        assert_eq!(removed, 1, "round {round}");
        assert_eq!(
            fs::read_dir(&scratch.path).unwrap().count(),
            0,
            "round {round}"
        );
    }
}

#[test]
fn listing_an_absent_domain_creates_nothing() {
    let scratch = Scratch::new();
    assert!(!scratch.domain.clean_name(&name()));
    assert_eq!(fs::read_dir(&scratch.path).unwrap().count(), 0);
    // Without a lock it is unknown whether the next owner is about to come.
    drop(UnixListener::bind(scratch.path.join("a.sock")).unwrap());
    assert!(scratch.domain.clean().unwrap().is_empty());
    assert_eq!(fs::read_dir(&scratch.path).unwrap().count(), 1);
    assert_delivers(
        &build(&scratch).unwrap(),
        &mut scratch.subscriber(),
        b"cleared by its next owner",
    );
}
