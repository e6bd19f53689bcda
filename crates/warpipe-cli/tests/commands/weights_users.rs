//! Weights that plain users serve to plain users.

use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::support::weights::{DOMAIN, Stage, Worker, be_a_worker_in, expected, safetensors};
use crate::support::{Running, World};
use rustix::process::Signal;
use warpipe::weights::SharedWeights;
use warpipe::{Device, Domain};

const OWNER: u32 = 61_201;
const ADMITTED: u32 = 61_202;
const GROUP: u32 = 61_203;
const OTHER: u32 = 61_204;

#[test]
#[ignore = "the part of a reader, for the other test to start"]
fn a_reader() {
    let Ok(path) = std::env::var(DOMAIN) else {
        return;
    };
    let opened = Domain::of_user(path, OWNER)
        .and_then(|domain| SharedWeights::open("w", domain.on(&Device::host()), Duration::ZERO));
    match opened {
        Ok(weights) => println!("outcome: version {}", weights.info().version),
        Err(error) => println!("outcome: {error:?}"),
    }
}

#[test]
#[ignore = "the part of an engine, for another test to start"]
fn an_engine() {
    let path = std::env::var_os(DOMAIN).expect("started by another test");
    be_a_worker_in(&Domain::of_user(path, OWNER).unwrap());
}

const ENGINE: &str = "weights_users::an_engine";

fn read_as(program: &Path, domain: &Path, user: u32, group: u32) -> String {
    let mut command = Command::new(program);
    command.args([
        "--ignored",
        "--exact",
        "weights_users::a_reader",
        "--nocapture",
    ]);
    command.env(DOMAIN, domain).uid(user).gid(group);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let outcome = text.lines().find_map(|line| line.split_once("outcome: "));
    let outcome = outcome.map(|(_, outcome)| outcome.to_owned());
    outcome.unwrap_or_else(|| panic!("{text}{}", String::from_utf8_lossy(&output.stderr)))
}

#[test]
fn weights_are_served_to_the_users_and_groups_that_are_named_and_to_no_others() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can become other users");
    }
    let world = World::new();
    let binary = world.for_all_users(env!("CARGO_BIN_EXE_warpipe"));
    let reader = world.for_all_users(std::env::current_exe().unwrap());
    let domain = world.path("domain");
    let read_as = |user, group| read_as(&reader, &domain, user, group);
    std::fs::create_dir(&domain).unwrap();
    chown(&domain, Some(OWNER), Some(OWNER)).unwrap();
    let file = world.write("model.safetensors", &safetensors(&[("a", &[1; 100])]));
    let mode = |mode| {
        std::fs::set_permissions(&domain, PermissionsExt::from_mode(mode)).unwrap();
    };
    mode(0o700);
    let mut serve = Command::new(binary);
    serve.args(["weights", "serve", file.to_str().unwrap(), "--name", "w"]);
    serve
        .args(["--json", "--device", "host", "--domain"])
        .arg(&domain);
    serve.args(["--allow-uid", &ADMITTED.to_string()]);
    serve.args(["--allow-gid", &GROUP.to_string()]);
    serve.uid(OWNER).gid(OWNER).stderr(Stdio::inherit());
    let mut serve = Running::start(serve);
    serve.wait_for("ready", 1);
    assert_eq!(read_as(OWNER, OWNER), "version 1");
    let refused = read_as(ADMITTED, ADMITTED);
    assert!(refused.contains("chmod 711"), "{refused}");
    for open in [0o711, 0o755] {
        mode(open);
        assert_eq!(read_as(ADMITTED, ADMITTED), "version 1", "{open:o}");
        assert_eq!(read_as(OTHER, GROUP), "version 1", "{open:o}");
        let refused = read_as(OTHER, OTHER);
        assert!(
            refused.contains("is not on its list"),
            "{open:o}: {refused}"
        );
        assert!(
            refused.contains("allow the uid or gid"),
            "{open:o}: {refused}"
        );
    }
}

/// A program as it runs in a container: as one user, in PID and IPC namespaces of its own.
fn container(user: u32, program: &Path) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--pid", "--ipc", "--mount-proc", "--fork"]);
    // It dies with `unshare`: a signal that was asked for before is forgotten with the former user.
    command.args(["setpriv", "--clear-groups", "--pdeathsig=KILL"]);
    command.args([format!("--reuid={user}"), format!("--regid={user}")]);
    command.arg(program);
    command
}

/// The keeper and the engines share a directory, and no namespace.
#[test]
fn containers_of_other_users_open_weights_and_keep_them_when_the_keepers_container_ends() {
    let possible = container(OWNER, Path::new("true")).status();
    if !possible.is_ok_and(|status| status.success()) {
        return println!("declared skip: only root can make namespaces for other users");
    }
    let stage = Stage::new();
    let binary = stage.world.for_all_users(env!("CARGO_BIN_EXE_warpipe"));
    let program = stage.world.for_all_users(std::env::current_exe().unwrap());
    let domain = stage.world.path("domain");
    std::fs::create_dir(&domain).unwrap();
    chown(&domain, Some(OWNER), Some(OWNER)).unwrap();
    std::fs::set_permissions(&domain, PermissionsExt::from_mode(0o711)).unwrap();
    let admitted = ADMITTED.to_string();
    let serve = || {
        let mut serve = container(OWNER, &binary);
        serve.args(stage.serve_arguments(&stage.file, &["--allow-uid", &admitted]));
        serve.env("WARPIPE_DOMAIN", &domain);
        Running::start(serve)
    };
    let mut keeper = serve();
    let ready = keeper.wait_for("ready", 1).remove(0);
    assert_eq!(ready["from"], "files", "{ready}");
    let mut engines = [ADMITTED, ADMITTED, OWNER]
        .map(|user| Worker::of(container(user, &program), ENGINE, &domain));
    for engine in &mut engines {
        assert_eq!(engine.reply(), expected(1));
    }
    keeper.signal(Signal::KILL);
    keeper.end();
    engines[0].kill();
    for engine in &mut engines[1..] {
        assert_eq!(engine.read(), expected(1));
    }
    // From the engine of the keeper's user: the domain takes endpoints of its owner alone.
    let mut next = serve();
    let ready = next.wait_for("ready", 1).remove(0);
    assert_eq!(ready["from"], "processes", "{ready}");
    let mut later = Worker::of(container(ADMITTED, &program), ENGINE, &domain);
    assert_eq!(later.reply(), expected(1));
}
