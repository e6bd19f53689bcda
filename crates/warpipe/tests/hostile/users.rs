//! Connections of another user. **This module is marked for unsafe**: it changes a child process's
//! user.

use std::fs::Permissions;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::stage::{
    LONG, Scratch, alone, assert_delivers, command, domain_of_test, eventually, name, next_order,
    role, stream,
};
use crate::weights::KeeperOptions;
use crate::{Device, Domain, Error, PublisherOptions, Subscriber};

const NOBODY: u32 = 65534;

/// A user without any other process.
const OTHER_USER: u32 = 61_234;

/// Becomes the user nobody, subscribes, and prints the result.
fn other_user() {
    // SAFETY: plain system calls; this process has one test and no other thread that depends on the
    // user.
    let codes = unsafe { [libc::setgid(NOBODY), libc::setuid(NOBODY)] };
    assert_eq!(codes, [0, 0]);
    let path = std::env::var("WARPIPE_HOSTILE_PATH").unwrap();
    let domain = match Domain::of_user(&path, 0) {
        Ok(domain) => domain,
        Err(error) => return println!("outcome: {error}"),
    };
    // A user without permission is refused before the publisher has read a byte.
    if std::env::var_os("WARPIPE_HOSTILE_SILENT").is_some() {
        let socket = match domain.connect(
            &name(),
            crate::Kind::Publisher,
            Some(&crate::ipc::client_handshake::HandshakeLimit::of(LONG)),
        ) {
            Ok(socket) => socket,
            Err(error) => return println!("outcome: {error}"),
        };
        return println!("outcome: {:?}", super::stage::hear(socket));
    }
    match Subscriber::open("a", domain.on(&Device::host()), Duration::ZERO) {
        Ok(mut subscriber) => {
            println!("attached");
            let bytes = subscriber
                .receive(&stream(), LONG)
                .and_then(|sample| sample.to_vec(LONG));
            println!("outcome: {:?}", bytes.map(String::from_utf8));
        }
        Err(Error::Refused {
            denied: true,
            text: detail,
            ..
        }) => println!("outcome: denied, {detail}"),
        Err(error) => println!("outcome: {error:?}"),
    }
}

/// Runs `work` with another effective user: its connections have that user. Only in a process of
/// one test.
pub(super) fn as_user<T>(uid: u32, work: impl FnOnce() -> T) -> T {
    // SAFETY: plain system calls; the caller's process has one test.
    assert_eq!(unsafe { libc::seteuid(uid) }, 0);
    let done = work();
    // SAFETY: as above.
    assert_eq!(unsafe { libc::seteuid(0) }, 0);
    done
}

fn visit(test: &str, scratch: &Scratch, silent: bool) -> String {
    let mut command = command(module_path!(), test, "other_user");
    command.env("WARPIPE_HOSTILE_PATH", &scratch.path);
    if silent {
        command.env("WARPIPE_HOSTILE_SILENT", "1");
    }
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let outcome = text
        .lines()
        .find_map(|line| line.split_once("outcome: "))
        .map(|(_, outcome)| outcome.to_owned());
    outcome.unwrap_or_else(|| panic!("{text}\n{}", String::from_utf8_lossy(&output.stderr)))
}

#[test]
fn another_user_is_refused_before_a_byte_is_read_and_admitted_when_on_the_list() {
    let test = "another_user_is_refused_before_a_byte_is_read_and_admitted_when_on_the_list";
    if role().as_deref() == Some("other_user") {
        return other_user();
    }
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    let scratch = Scratch::new();
    std::fs::set_permissions(&scratch.path, Permissions::from_mode(0o700)).unwrap();
    let publisher = scratch.publisher(|it| PublisherOptions {
        history: 1,
        allow_uids: vec![NOBODY],
        ..it
    });
    assert!(
        visit(test, &scratch, false).contains("lets others not pass"),
        "the directory keeps everybody out"
    );
    std::fs::set_permissions(&scratch.path, Permissions::from_mode(0o755)).unwrap();
    assert_delivers(&publisher, &mut scratch.subscriber(), b"for nobody");
    assert_eq!(visit(test, &scratch, false), "Ok(Ok(\"for nobody\"))");
    drop(publisher);

    let publisher = scratch.publisher(|it| it);
    assert_eq!(
        visit(test, &scratch, false),
        "denied, the socket's permissions"
    );
    drop(publisher);

    // The socket is open for another list, so that the publisher has to check.
    let publisher = scratch.publisher(|it| PublisherOptions {
        allow_uids: vec![12345],
        allow_gids: vec![54321],
        ..it
    });
    let mut good = scratch.subscriber();
    assert_eq!(
        visit(test, &scratch, false),
        format!("denied, uid {NOBODY} is not on its list")
    );
    let unasked = visit(test, &scratch, true);
    assert!(
        unasked.contains("Refused") && unasked.contains("denied: true"),
        "{unasked}"
    );
    assert_delivers(&publisher, &mut good, b"untouched");
    drop(publisher);

    let publisher = scratch.publisher(|it| PublisherOptions {
        history: 1,
        allow_gids: vec![NOBODY],
        ..it
    });
    assert_delivers(&publisher, &mut scratch.subscriber(), b"by group");
    assert_eq!(visit(test, &scratch, false), "Ok(Ok(\"by group\"))");
}

/// Starts a command in a user namespace of its own, in which root alone has a number. False where
/// that is forbidden.
fn in_a_namespace_of_root(
    command: &mut std::process::Command,
) -> std::io::Result<std::process::Child> {
    use std::os::unix::process::CommandExt;
    let enter = || {
        // SAFETY: a plain system call; the forked child has one thread.
        if unsafe { libc::unshare(libc::CLONE_NEWUSER) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        std::fs::write("/proc/self/setgroups", "deny")?;
        std::fs::write("/proc/self/gid_map", "0 0 1")?;
        std::fs::write("/proc/self/uid_map", "0 0 1")
    };
    // SAFETY: the closure opens and writes files, and allocates: this process forks with no other
    // test in it (see `alone`), so no other thread holds the allocator.
    unsafe { command.pre_exec(enter) };
    command.spawn()
}

#[test]
fn a_user_that_the_namespace_does_not_map_cannot_be_admitted() {
    let test = "a_user_that_the_namespace_does_not_map_cannot_be_admitted";
    let path = || std::env::var("WARPIPE_HOSTILE_PATH").unwrap();
    match role().as_deref() {
        Some("other_user") => return other_user(),
        Some("server") => {
            // All users that the namespace does not map read as this number here.
            let domain = Domain::at(path()).unwrap();
            let options = crate::PublisherOptions {
                allow_uids: vec![NOBODY],
                allow_gids: vec![NOBODY],
                ..domain.on(&Device::host())
            };
            let _publisher = crate::Publisher::new("a", options).unwrap();
            let of_nobody = Domain::of_user("/", NOBODY).unwrap_err().to_string();
            println!("outcome: ready, {of_nobody}");
            loop {
                std::thread::park();
            }
        }
        _ => {}
    }
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    alone(module_path!(), test, || {
        let scratch = Scratch::new();
        std::fs::set_permissions(&scratch.path, Permissions::from_mode(0o755)).unwrap();
        let mut command = command(module_path!(), test, "server");
        command
            .env("WARPIPE_HOSTILE_PATH", &scratch.path)
            .stdout(std::process::Stdio::piped());
        let mut server = match in_a_namespace_of_root(&mut command) {
            Ok(server) => super::stage::Guarded(server),
            Err(error) => return println!("skipped: no user namespace of its own: {error}"),
        };
        let stdout = std::io::BufReader::new(server.0.stdout.take().unwrap());
        let mut lines = std::io::BufRead::lines(stdout).map_while(Result::ok);
        let ready = lines
            .find(|line| line.contains("outcome: ready"))
            .expect("a publisher in the namespace");
        assert!(ready.contains("does not map"), "{ready}");
        assert_eq!(
            visit(test, &scratch, false),
            format!("denied, uid {} is not on its list", u32::MAX)
        );
    });
}

#[test]
fn another_users_living_endpoint_is_not_shown_as_stale() {
    let test = "another_users_living_endpoint_is_not_shown_as_stale";
    if role().as_deref() == Some("other_user") {
        // SAFETY: plain system calls; this process has one test and no other thread that depends on
        // the user.
        let answer = unsafe { [libc::setgid(NOBODY), libc::setuid(NOBODY)] };
        assert_eq!(answer, [0, 0]);
        let domain = Domain::of_user(std::env::var("WARPIPE_HOSTILE_PATH").unwrap(), 0).unwrap();
        let holders = domain
            .endpoints()
            .unwrap()
            .into_iter()
            .map(|endpoint| (endpoint.name, endpoint.holder));
        let holders: Vec<_> = holders
            .map(|(name, holder)| (name.to_string(), holder.map(|it| it.pid)))
            .collect();
        assert!(
            domain.clean().unwrap().is_empty(),
            "none of them is its to clean"
        );
        return println!("outcome: {holders:?}");
    }
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    let scratch = Scratch::new();
    std::fs::set_permissions(&scratch.path, Permissions::from_mode(0o755)).unwrap();
    let options = || scratch.domain.on(&Device::host());
    let _open = crate::Publisher::new(
        "a",
        crate::PublisherOptions {
            allow_uids: vec![NOBODY],
            ..options()
        },
    )
    .unwrap();
    let _closed = crate::Publisher::new("b", options()).unwrap();
    let dead = std::os::unix::net::UnixListener::bind(scratch.path.join("c.sock"));
    std::fs::set_permissions(scratch.path.join("c.sock"), Permissions::from_mode(0o666)).unwrap();
    drop(dead.unwrap());
    std::fs::write(scratch.path.join("c.lock"), "warpipe 999999999 \n").unwrap();
    std::fs::set_permissions(scratch.path.join("c.lock"), Permissions::from_mode(0o600)).unwrap();
    let own = std::process::id();
    // An endpoint that this user may not connect to proves nothing, and so it is not called stale.
    let seen = format!("[(\"a\", Some(Some({own}))), (\"b\", Some(None)), (\"c\", None)]");
    assert_eq!(visit(test, &scratch, false), seen);
}

#[test]
fn a_publisher_of_another_user_in_a_domain_of_mine_is_not_trusted() {
    let test = "a_publisher_of_another_user_in_a_domain_of_mine_is_not_trusted";
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    if role().as_deref() == Some("impostor") {
        let domain = domain_of_test();
        // The credentials of a listening socket are those of the caller of `listen`.
        // SAFETY: a plain system call; this process has one test.
        assert_eq!(unsafe { libc::seteuid(NOBODY) }, 0);
        let socket = rustix::net::socket(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            None,
        );
        let socket = socket.unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { libc::seteuid(0) }, 0);
        let address = rustix::net::SocketAddrUnix::new(domain.path().join("a.sock")).unwrap();
        rustix::net::bind(&socket, &address).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { libc::seteuid(NOBODY) }, 0);
        rustix::net::listen(&socket, 8).unwrap();
        println!("listening");
        loop {
            std::thread::park();
        }
    }
    let scratch = Scratch::new();
    let mut command = command(module_path!(), test, "impostor");
    command
        .env("WARPIPE_HOSTILE_PATH", &scratch.path)
        .stdout(std::process::Stdio::piped());
    let mut impostor = super::stage::Guarded(command.spawn().unwrap());
    let stdout = std::io::BufReader::new(impostor.0.stdout.take().unwrap());
    assert!(
        std::io::BufRead::lines(stdout)
            .map_while(Result::ok)
            .any(|line| line.contains("listening"))
    );
    let error = scratch.try_subscriber().map(drop).unwrap_err();
    assert!(
        matches!(&error, Error::Refused { denied: true, text: detail, .. } if detail.contains("65534")),
        "{error}"
    );
}

/// Becomes a user without any other right, in a process of one test.
fn become_user(uid: u32) {
    // SAFETY: plain system calls; this process has one test and no other thread that depends on the
    // user.
    let codes = unsafe {
        [
            libc::setgroups(0, [].as_ptr()),
            libc::setgid(uid),
            libc::setuid(uid),
        ]
    };
    assert_eq!(codes, [0, 0, 0]);
}

#[test]
fn a_folder_with_mode_711_lets_admitted_users_open_its_names_and_list_none() {
    let test = "a_folder_with_mode_711_lets_admitted_users_open_its_names_and_list_none";
    let path = || std::env::var("WARPIPE_HOSTILE_PATH").unwrap();
    match role().as_deref() {
        Some("owner") => {
            become_user(OTHER_USER);
            let domain = domain_of_test();
            println!("outcome: {}", next_order().is_some());
            let options = crate::PoolOptions {
                allow_uids: vec![NOBODY],
                ..domain.on(&Device::host())
            };
            let _pool = crate::Pool::new("pool", options).unwrap();
            // Last: the other user waits for it alone.
            let publisher = crate::Publisher::new(
                "a",
                crate::PublisherOptions {
                    history: 1,
                    allow_uids: vec![NOBODY],
                    ..domain.on(&Device::host())
                },
            )
            .unwrap();
            publisher.send_bytes(&stream(), b"for nobody").unwrap();
            println!("outcome: ready");
            next_order();
            return;
        }
        Some("other_user") => {
            become_user(NOBODY);
            let domain = Domain::of_user(path(), OTHER_USER);
            let domain = match domain {
                Ok(domain) => domain,
                Err(error) => return println!("outcome: {error}; {}", error.hint().unwrap()),
            };
            println!("outcome: waiting");
            let mut subscriber = Subscriber::open("a", domain.on(&Device::host()), LONG).unwrap();
            let sample = subscriber.receive(&stream(), LONG).unwrap();
            let text = String::from_utf8(sample.to_vec(LONG).unwrap());
            let pool = crate::PoolClient::open("pool", domain.on(&Device::host()), Duration::ZERO)
                .map(drop);
            let listed = domain.endpoints().unwrap_err();
            let is_denied = matches!(listed, Error::Refused { denied: true, .. })
                && listed.to_string().contains("chmod 755");
            println!("outcome: {text:?} {pool:?} {is_denied}");
            return;
        }
        _ => {}
    }
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    let scratch = Scratch::new();
    std::os::unix::fs::chown(&scratch.path, Some(OTHER_USER), Some(OTHER_USER)).unwrap();
    std::fs::set_permissions(&scratch.path, Permissions::from_mode(0o711)).unwrap();
    let start = |role| super::stage::TestProcess::start(module_path!(), test, role, &scratch);
    let (mut owner, mut other) = (start("owner"), start("other_user"));
    assert_eq!(other.hear("outcome:"), "waiting");
    owner.order("go");
    assert_eq!(owner.hear("outcome:"), "true");
    assert_eq!(owner.hear("outcome:"), "ready");
    assert_eq!(other.hear("outcome:"), "Ok(\"for nobody\") Ok(()) true");
    // Behind a folder that lets nobody pass, the error says what its owner has to do.
    let closed = scratch.path.join("closed");
    std::fs::create_dir(&closed).unwrap();
    std::fs::set_permissions(&closed, Permissions::from_mode(0o700)).unwrap();
    let inner = closed.join("domain");
    std::fs::create_dir(&inner).unwrap();
    for path in [inner, closed] {
        std::os::unix::fs::chown(&path, Some(OTHER_USER), Some(OTHER_USER)).unwrap();
        let mut command = command(module_path!(), test, "other_user");
        command.env("WARPIPE_HOSTILE_PATH", &path);
        let mut other = super::stage::TestProcess::run(&mut command);
        let outcome = other.hear("outcome:");
        assert!(outcome.contains("chmod 711"), "{outcome}");
    }
}

/// Weights of one tensor, under the name `w`.
fn some_weights(device: &Device) -> crate::weights::Weights {
    let layout = crate::Layout::bytes_only(4).unwrap();
    crate::weights::Weights::from_bytes(device, [("a", layout, &[7; 4][..])]).unwrap()
}

#[test]
fn users_that_a_keeper_admits_open_its_weights_and_do_nothing_else() {
    use crate::weights::{Keeper, SharedWeights};
    let test = "users_that_a_keeper_admits_open_its_weights_and_do_nothing_else";
    let device = Device::host();
    let open = |domain: &Domain| SharedWeights::open("w", domain.on(&device), LONG);
    match role().as_deref() {
        Some("owner") => {
            become_user(OTHER_USER);
            let domain = domain_of_test();
            let closed = Keeper::new("w", domain.options()).unwrap();
            println!("outcome: {}", next_order().is_some());
            drop(closed);
            let options = KeeperOptions {
                allow_uids: vec![NOBODY],
                ..domain.options()
            };
            let _keeper = Keeper::new("w", options).unwrap();
            some_weights(&device).publish(&domain, "w", LONG).unwrap();
            println!("outcome: {}", next_order().is_some());
            some_weights(&device).publish(&domain, "w", LONG).unwrap();
            next_order();
            return;
        }
        Some("other_user") => {
            become_user(NOBODY);
            let path = std::env::var("WARPIPE_HOSTILE_PATH").unwrap();
            let domain = Domain::of_user(path, OTHER_USER).unwrap();
            let refused = SharedWeights::open("w", domain.on(&device), Duration::ZERO).unwrap_err();
            println!("outcome: {refused}; {}", refused.hint().unwrap());
            next_order();
            let weights = open(&domain).unwrap();
            let bytes = weights.tensor("a").unwrap().memory.to_vec(LONG).unwrap();
            println!("outcome: {bytes:?}");
            println!(
                "outcome: {:?}",
                Keeper::end(&domain, "w", LONG).map_err(|it| it.kind())
            );
            let published = some_weights(&device).publish(&domain, "w", LONG);
            println!("outcome: {}", published.is_err());
            // It hears of the next version.
            println!("outcome: {}", weights.newer(LONG).unwrap().info().version);
            return;
        }
        _ => {}
    }
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    let scratch = Scratch::new();
    std::os::unix::fs::chown(&scratch.path, Some(OTHER_USER), Some(OTHER_USER)).unwrap();
    std::fs::set_permissions(&scratch.path, Permissions::from_mode(0o711)).unwrap();
    let start = |role| super::stage::TestProcess::start(module_path!(), test, role, &scratch);
    let mut owner = start("owner");
    // It waits for an order first, which comes when the other user was refused.
    eventually("the keeper", || scratch.path.join("w.sock").exists());
    let mut other = start("other_user");
    let refused = other.hear("outcome:");
    assert!(
        refused.contains("does not admit") && refused.contains("allow"),
        "{refused}"
    );
    owner.order("admit");
    assert_eq!(owner.hear("outcome:"), "true");
    eventually("the next keeper", || {
        let socket = std::fs::metadata(scratch.path.join("w.sock"));
        socket.is_ok_and(|it| it.permissions().mode() & 0o777 == 0o666)
    });
    other.order("open");
    assert_eq!(other.hear("outcome:"), "[7, 7, 7, 7]");
    assert_eq!(other.hear("outcome:"), "Err(Refused)");
    assert_eq!(other.hear("outcome:"), "true");
    owner.order("publish");
    assert_eq!(other.hear("outcome:"), "2");
}

/// Sends descriptors that are never received, until this user may send no more. Returns the sockets
/// that hold them.
fn fill_what_is_in_flight() -> Option<Vec<OwnedFd>> {
    let none = rustix::process::Rlimit {
        current: Some(64),
        maximum: Some(64),
    };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, none).unwrap();
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (sender, holder) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let stdin = std::io::stdin();
    let fds = [stdin.as_fd(); 40];
    let mut sent = (0..16).map(|_| super::send_raw(&sender, b"x", &fds));
    let limit = sent.find(|sent| *sent != Ok(()))?;
    (limit == Err(Errno::TOOMANYREFS)).then_some(vec![sender, holder])
}

#[test]
fn a_user_with_too_many_descriptors_in_flight_gets_a_limit_error() {
    let test = "a_user_with_too_many_descriptors_in_flight_gets_a_limit_error";
    if role().as_deref() == Some("other_user") {
        // SAFETY: plain system calls; this process has one test and no other thread that depends on
        // the user.
        let answer = unsafe { [libc::setgid(OTHER_USER), libc::setuid(OTHER_USER)] };
        assert_eq!(answer, [0, 0]);
        let domain = domain_of_test();
        let publisher = crate::Publisher::new("a", domain.on(&Device::host())).unwrap();
        let Some(held) = fill_what_is_in_flight() else {
            return println!("outcome: no limit");
        };
        let subscribe = || Subscriber::open("a", domain.on(&Device::host()), Duration::ZERO);
        let error = subscribe().map(drop).unwrap_err();
        assert!(
            error.is_descriptor_limit() && error.to_string().contains("(soft limit 64)"),
            "{error:?}"
        );
        drop(held);
        assert_delivers(&publisher, &mut subscribe().unwrap(), b"afterwards");
        return println!("outcome: {error}");
    }
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    let scratch = Scratch::new();
    std::os::unix::fs::chown(&scratch.path, Some(OTHER_USER), Some(OTHER_USER)).unwrap();
    let outcome = visit(test, &scratch, false);
    assert!(
        outcome == "no limit" || outcome.contains("RLIMIT_NOFILE (soft limit 64)"),
        "{outcome}"
    );
}
