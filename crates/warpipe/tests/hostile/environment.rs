//! The environment of a process: variables that name a domain, limits of files, time namespaces.
//! **This module is marked for unsafe**: it changes a process's variables and its user.

use std::os::unix::fs::chown;
use std::path::Path;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use warpipe_testkit::refuse_calls;

use super::stage::{
    LONG, Scratch, TestProcess, alone, assert_delivers, command, domain_of_test, eventually,
    next_order, role, stream,
};
use crate::statistics::Observer;
use crate::{Client, Device, Domain, Error, Layout, Publisher, Server};

const USER: u32 = 61_234;
const OTHER_USER: u32 = 65_534;

fn set(variable: &str, value: impl AsRef<std::ffi::OsStr>) {
    // SAFETY: this process has one test, and no other thread reads the environment.
    unsafe { std::env::set_var(variable, value) };
}

#[test]
fn an_empty_domain_variable_counts_as_none_and_a_relative_one_is_refused() {
    let test = "an_empty_domain_variable_counts_as_none_and_a_relative_one_is_refused";
    alone(module_path!(), test, || {
        let scratch = Scratch::new();
        set("XDG_RUNTIME_DIR", &scratch.path);
        set("WARPIPE_DOMAIN", "");
        assert_eq!(
            Domain::environment_path().unwrap(),
            scratch.path.join("warpipe")
        );
        for relative in ["domain", "./domain", "."] {
            set("WARPIPE_DOMAIN", relative);
            let error = Domain::from_environment().unwrap_err();
            let said = format!("{error}; {}", error.hint().unwrap());
            assert!(said.contains("absolute path"), "{said}");
            assert!(!Path::new("domain").exists());
        }
        set("WARPIPE_DOMAIN", scratch.path.join("domain"));
        assert_eq!(
            Domain::environment_path().unwrap(),
            scratch.path.join("domain")
        );
    });
}

#[test]
fn a_runtime_directory_of_another_user_is_passed_over() {
    let test = "a_runtime_directory_of_another_user_is_passed_over";
    if let Some(user) = role() {
        let user: u32 = user.parse().unwrap();
        if user != 0 {
            // SAFETY: plain system calls; this process has one test and no other thread that
            // depends on the user.
            let codes = unsafe { [libc::setgid(user), libc::setuid(user)] };
            assert_eq!(codes, [0, 0]);
        }
        let path = Domain::environment_path().unwrap();
        return println!("outcome: {}", path.display());
    }
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    let scratch = Scratch::new();
    chown(&scratch.path, Some(USER), Some(USER)).unwrap();
    let outcome = |user: u32| {
        let mut command = command(module_path!(), test, &user.to_string());
        command.env("XDG_RUNTIME_DIR", &scratch.path);
        command.env_remove("WARPIPE_DOMAIN");
        TestProcess::run(&mut command).hear("outcome:")
    };
    let inside = scratch.path.join("warpipe").display().to_string();
    assert_eq!(outcome(USER), inside, "its own");
    // Root, as with `sudo -E`, and another plain user.
    for user in [0, OTHER_USER] {
        let found = outcome(user);
        let own = [
            format!("/run/user/{user}/warpipe"),
            format!("/tmp/warpipe-{user}"),
        ];
        assert!(own.contains(&found), "{found}");
    }
}

#[test]
fn memory_beyond_the_limit_of_file_sizes_is_an_error_and_no_signal() {
    let test = "memory_beyond_the_limit_of_file_sizes_is_an_error_and_no_signal";
    alone(module_path!(), test, || {
        let scratch = Scratch::new();
        let before = getrlimit(Resource::Fsize);
        let build = || Publisher::new("a", scratch.domain.on(&Device::host()));
        let send = |publisher: &Publisher| publisher.send_bytes(&stream(), &[0; 4 << 20]);
        for bytes in [0, 1 << 10, 64 << 10, 1 << 20] {
            let limit = Rlimit {
                current: Some(bytes),
                ..before
            };
            setrlimit(Resource::Fsize, limit).unwrap();
            let sent = build().and_then(|publisher| send(&publisher));
            setrlimit(Resource::Fsize, before).unwrap();
            let error = sent.map(drop).unwrap_err();
            assert!(matches!(error, Error::Os { .. }), "{error:?}");
            assert!(error.hint().unwrap().contains("ulimit -f"), "{error}");
            assert_eq!(std::fs::read_dir(&scratch.path).unwrap().count(), 0);
        }
        send(&build().unwrap()).expect("without the limit");
    });
}

#[test]
fn a_sandbox_without_random_numbers_and_inotify_has_channels_and_waits_for_names() {
    let test = "a_sandbox_without_random_numbers_and_inotify_has_channels_and_waits_for_names";
    for error in [libc::ENOSYS, libc::EPERM] {
        let mut process = match role() {
            Some(error) => {
                let error = error.parse().unwrap();
                refuse_calls(&[
                    (libc::SYS_getrandom, error),
                    (libc::SYS_inotify_init1, error),
                ]);
                let scratch = Scratch::new();
                let options = scratch.domain.on(&Device::host());
                let wait = Duration::from_millis(1);
                let none = crate::Subscriber::open("a", options, wait).unwrap_err();
                assert!(matches!(none, Error::NotFound { .. }), "{none}");
                println!("waited");
                let publisher = scratch.publisher(|it| it);
                assert_delivers(&publisher, &mut scratch.subscriber(), b"here");
                return println!("delivered");
            }
            None => TestProcess::run(&mut command(module_path!(), test, &error.to_string())),
        };
        process.hear("waited");
        process.hear("delivered");
    }
}

/// A process in a time namespace of its own, in which the clocks are far ahead. `None` where that is
/// forbidden.
fn in_another_time(test: &str, role: &str, scratch: &Scratch) -> Option<TestProcess> {
    let inner = command(module_path!(), test, role);
    let mut command = std::process::Command::new("unshare");
    command.args([
        "--user",
        "--map-root-user",
        "--time",
        "--fork",
        "--kill-child",
    ]);
    command.args(["--monotonic=1000000", "--boottime=1000000"]);
    let probe = std::process::Command::new(command.get_program())
        .args(command.get_args())
        .arg("true")
        .status();
    if !probe.is_ok_and(|status| status.success()) {
        println!("skipped: no time namespace of its own");
        return None;
    }
    let program = std::env::current_exe().unwrap();
    command.arg(program).args(inner.get_args());
    command.env("WARPIPE_HOSTILE_ROLE", role);
    command.env("WARPIPE_HOSTILE_PATH", &scratch.path);
    Some(TestProcess::run(&mut command))
}

#[test]
fn a_peer_in_another_time_namespace_is_seen_and_keeps_the_deadlines_of_this_one() {
    let test = "a_peer_in_another_time_namespace_is_seen_and_keeps_the_deadlines_of_this_one";
    let device = Device::host();
    let answer = |domain: &Domain| {
        let mut server = Server::new("service", domain.on(&device))?;
        let request = server.accept(&stream(), LONG)?;
        let output = request.output(&Layout::bytes_only(4)?)?;
        request.complete(output, &stream())
    };
    let call = |client: &Client| {
        let input = client.loan(&Layout::bytes_only(4)?)?;
        client.call(input, &stream(), LONG).map(drop)
    };
    let client = |domain: &Domain| Client::new("service", domain.on(&device));
    match role().as_deref() {
        Some("server") => {
            let _publisher = Publisher::new("a", domain_of_test().on(&device));
            println!("outcome: {}", std::process::id());
            next_order();
            return println!("outcome: {:?}", answer(&domain_of_test()));
        }
        Some("client") => {
            let client = client(&domain_of_test()).unwrap();
            println!("outcome: {:?}", call(&client));
            return;
        }
        _ => {}
    }
    let scratch = Scratch::new();
    let Some(mut server) = in_another_time(test, "server", &scratch) else {
        return;
    };
    let pid: i32 = server.hear("outcome:").parse().unwrap();
    // Its heartbeat counts by the clock of this process.
    eventually("its heartbeat", || {
        let seen = Observer::new().observe_one(pid);
        let [process] = &seen.processes[..] else {
            panic!("{seen:?}")
        };
        crate::clock::now_ns().abs_diff(process.beat_ns) < 100_000_000_000
    });
    server.order("serve");
    call(&client(&scratch.domain).unwrap()).unwrap();
    assert_eq!(server.hear("outcome:"), "Ok(())");
    let mut other = in_another_time(test, "client", &scratch).unwrap();
    answer(&scratch.domain).unwrap();
    assert_eq!(other.hear("outcome:"), "Ok(())");
}
