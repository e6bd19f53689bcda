//! `gc`: what it shows, what it removes, and what it never touches.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use crate::support::World;
use serde_json::Value;
use warpipe::{Device, Domain, Publisher, Timeline};

/// Set for the process that a test starts to own names.
const DOMAIN: &str = "WARPIPE_TEST_OWNER_IN";
/// The extension of the file that the owner makes once it owns all names.
const READY: &str = "ready";
const NAMES: [&str; 3] = ["camera/front", "camera/rear", "steps"];

/// The owner of [`NAMES`], in a process of its own: this program once more.
fn owner(world: &World) -> Owner {
    owner_by(world, Command::new(std::env::current_exe().unwrap()))
}

/// The same, started by a command that ends with this program.
fn owner_by(world: &World, mut command: Command) -> Owner {
    command
        .args(["--ignored", "--exact", "gc::an_owner_of_names"])
        .env(DOMAIN, world.path("domain"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut owner = Owner(command.spawn().unwrap());
    // Not once the names are there: the last one's temporary file may be there, too.
    while !world.path("domain").with_extension(READY).exists() {
        let ended = owner.0.try_wait().unwrap();
        assert!(ended.is_none(), "the owner has ended: {ended:?}");
        std::thread::yield_now();
    }
    owner
}

/// Killed when it is dropped.
struct Owner(Child);

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "the part of the owner, for the other tests to start"]
fn an_owner_of_names() {
    let folder = PathBuf::from(std::env::var_os(DOMAIN).expect("started by another test"));
    let domain = Domain::at(&folder).unwrap();
    let device = Device::host();
    let build = |name: &str| Timeline::new(name, domain.on(&device));
    let _owned: Vec<_> = NAMES.iter().map(|name| build(name).unwrap()).collect();
    fs::write(folder.with_extension(READY), "").unwrap();
    loop {
        // Until it is killed.
        std::thread::park();
    }
}

/// The rows of names and files, and the total behind them.
fn rows(world: &World, arguments: &[&str]) -> (Vec<Value>, Value) {
    let ended = world.run(&[&["gc", "--json"], arguments].concat());
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let mut rows = ended.json();
    let total = rows.pop().unwrap();
    (rows, total)
}

fn files(world: &World) -> BTreeSet<String> {
    let entries = fs::read_dir(world.path("domain")).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[test]
fn a_lock_file_that_another_program_wrote_is_not_shown_as_one_that_would_be_removed() {
    let world = World::new();
    drop(owner(&world));
    let files = [("notes.lock", "of an editor"), ("empty.lock", "")];
    for (file, content) in files {
        let path = world.path("domain").join(file);
        fs::write(&path, content).unwrap();
        // A lock of warpipe's is for its user alone.
        fs::set_permissions(path, fs::Permissions::from_mode(0o644)).unwrap();
    }
    let (shown, total) = rows(&world, &[]);
    assert_eq!(
        (total["dead"].as_u64(), total["kept"].as_u64()),
        (Some(3), Some(2)),
        "{shown:?}"
    );
    let (_, total) = rows(&world, &["--yes"]);
    assert_eq!(
        (total["removed"].as_u64(), total["kept"].as_u64()),
        (Some(3), Some(2))
    );
    assert_eq!(
        fs::read(world.path("domain").join("notes.lock")).unwrap(),
        b"of an editor"
    );
}

#[test]
fn what_is_younger_than_a_week_can_be_left_out() {
    let world = World::new();
    drop(owner(&world));
    let week = 7 * 24 * 60 * 60;
    let (shown, _) = rows(&world, &["--older-than", &week.to_string()]);
    assert!(shown.is_empty(), "{shown:?}");
    let lock = fs::File::options()
        .write(true)
        .open(world.path("domain").join("steps.lock"));
    let (lock, socket) = (lock.unwrap(), world.path("domain").join("steps.sock"));
    lock.set_modified(SystemTime::now() - Duration::from_secs(2 * week))
        .unwrap();
    // The newest file of a name counts.
    fs::remove_file(socket).unwrap();
    let (shown, _) = rows(&world, &["--older-than", &week.to_string()]);
    let names: Vec<_> = shown.iter().map(|row| &row["name"]).collect();
    assert_eq!(names, ["steps"]);
}

#[test]
fn a_long_name_does_not_push_the_columns_of_others_off_the_screen() {
    let world = World::new();
    drop(owner(&world));
    fs::write(world.path("domain").join("x".repeat(255)), "").unwrap();
    let text = world.run(&["gc"]).out;
    let line = text.lines().find(|line| line.contains(NAMES[0])).unwrap();
    assert!(line.len() < 100, "{line:?}");
}

#[test]
fn names_of_a_dead_process_are_shown_and_removed_when_told_so() {
    let world = World::new();
    let living = owner(&world);
    let (shown, _) = rows(&world, &["--yes"]);
    assert!(shown.is_empty(), "the owner lives: {shown:?}");
    assert_eq!(files(&world).len(), 2 * NAMES.len());
    drop(living);

    let before = files(&world);
    let (shown, total) = rows(&world, &[]);
    let names: Vec<_> = shown
        .iter()
        .map(|row| row["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, NAMES);
    assert!(shown.iter().all(|row| row["state"] == "dead"), "{shown:?}");
    assert_eq!(
        (total["dead"].as_u64(), total["removed"].as_u64()),
        (Some(3), Some(0))
    );
    assert_eq!(files(&world), before, "a look removes nothing");
    let (young, _) = rows(&world, &["--older-than", "3600", "--yes"]);
    assert!(young.is_empty() && files(&world) == before, "{young:?}");

    let ended = world.run(&["gc", "--yes"]);
    assert!(ended.out.contains("camera/front  removed") && ended.out.contains("3 removed, 0 kept"));
    assert!(files(&world).is_empty());
    let ended = world.run(&["gc"]);
    assert!(
        ended.out.contains("nothing is left by dead processes"),
        "{}",
        ended.out
    );
}

#[test]
fn files_of_other_programs_are_shown_and_kept() {
    let world = World::new();
    drop(owner(&world));
    let at = |file: &str| world.path("domain").join(file);
    let _socket = UnixListener::bind(at("alone.sock")).unwrap();
    fs::write(at("notes.txt"), "a user's").unwrap();
    fs::write(at("text.lock"), "a user's, under the name of a lock").unwrap();
    fs::create_dir(at("folder.lock")).unwrap();
    symlink(at("notes.txt"), at("link.lock")).unwrap();
    symlink(at("notes.txt"), at("link")).unwrap();
    fs::write(at("esc\u{1b}[2J.txt"), "").unwrap();
    // A dead name's socket that another program has replaced by a file.
    fs::remove_file(at("camera+rear.sock")).unwrap();
    fs::write(at("camera+rear.sock"), "a user's").unwrap();
    let before = files(&world);

    let (shown, total) = rows(&world, &["--yes"]);
    let removed: Vec<_> = shown
        .iter()
        .filter(|row| row["state"] == "removed")
        .collect();
    let removed: Vec<_> = removed
        .iter()
        .map(|row| row["name"].as_str().unwrap())
        .collect();
    assert_eq!(removed, ["camera/front", "steps"]);
    assert_eq!(total["kept"].as_u64(), Some(shown.len() as u64 - 2));
    let gone = [
        "camera+front.lock",
        "camera+front.sock",
        "steps.lock",
        "steps.sock",
    ];
    let expected: BTreeSet<_> = before
        .into_iter()
        .filter(|file| !gone.contains(&file.as_str()))
        .collect();
    assert_eq!(files(&world), expected);
    let reasons = shown
        .iter()
        .filter(|row| row["state"] == "kept")
        .map(|row| &row["reason"]);
    assert!(reasons.clone().all(Value::is_string), "{shown:?}");
    let ended = world.run(&["gc"]);
    assert!(
        !ended.out.contains('\u{1b}') && ended.out.contains("notes.txt"),
        "{}",
        ended.out
    );
}

#[test]
fn files_of_another_user_are_kept_with_the_reason() {
    if !rustix::process::geteuid().is_root() {
        return println!("declared skip: only root can give a file to another user");
    }
    let world = World::new();
    drop(owner(&world));
    let foreign = ["camera+rear.lock", "camera+rear.sock"];
    for file in foreign {
        chown(world.path("domain").join(file), Some(65_534), None).unwrap();
    }
    let (shown, total) = rows(&world, &["--yes"]);
    let kept: Vec<_> = shown.iter().filter(|row| row["state"] == "kept").collect();
    assert_eq!(kept.len(), 1, "{shown:?}");
    assert_eq!(kept[0]["name"], "camera/rear");
    let reason = kept[0]["reason"].as_str().unwrap();
    assert!(reason.contains("another user"), "{reason}");
    assert_eq!(total["removed"].as_u64(), Some(2), "{total}");
    assert_eq!(files(&world), foreign.map(str::to_owned).into());
}

#[test]
fn names_of_a_process_in_another_pid_namespace_stay_until_it_is_dead() {
    const UNSHARE: [&str; 5] = [
        "--user",
        "--map-root-user",
        "--pid",
        "--fork",
        "--kill-child",
    ];
    let unshare = || {
        let mut command = Command::new("unshare");
        command.args(UNSHARE);
        command
    };
    if !unshare()
        .arg("true")
        .status()
        .is_ok_and(|status| status.success())
    {
        return println!("declared skip: this user may make no namespaces");
    }
    let world = World::new();
    let mut command = unshare();
    command.arg(std::env::current_exe().unwrap());
    let living = owner_by(&world, command);
    let (shown, _) = rows(&world, &["--yes"]);
    assert!(shown.is_empty(), "the owner lives: {shown:?}");
    assert_eq!(files(&world).len(), 2 * NAMES.len());
    drop(living);
    // The process ends a moment after `unshare`.
    let domain = Domain::at(world.path("domain")).unwrap();
    while domain
        .endpoints()
        .unwrap()
        .iter()
        .any(|it| it.holder.is_some())
    {
        std::thread::yield_now();
    }
    let (_, total) = rows(&world, &["--yes"]);
    assert_eq!(
        total["removed"].as_u64(),
        Some(NAMES.len() as u64),
        "{total}"
    );
    assert!(files(&world).is_empty());
}

#[test]
fn a_directory_that_vanishes_meanwhile_is_no_fault_of_the_command() {
    let world = World::new();
    drop(owner(&world));
    let (dead, domain) = (world.path("dead"), world.path("domain"));
    fs::rename(&domain, &dead).unwrap();
    for _ in 0..30 {
        fs::create_dir_all(&domain).unwrap();
        for name in NAMES.map(|name| name.replace('/', "+")) {
            fs::copy(
                dead.join(format!("{name}.lock")),
                domain.join(format!("{name}.lock")),
            )
            .unwrap();
            drop(UnixListener::bind(domain.join(format!("{name}.sock"))).unwrap());
        }
        let running = world.start(&["gc", "--yes"]);
        // The command removes files beside this.
        while domain.exists() {
            let _ = fs::remove_dir_all(&domain);
        }
        let ended = running.end();
        assert!(!ended.err.contains("panicked"), "{}", ended.err);
        assert!(matches!(ended.code, Some(0 | 2)), "{ended:?}");
        let _ = fs::remove_dir_all(&domain);
    }
}

#[test]
fn names_that_cannot_be_removed_are_an_error_that_says_why() {
    // Also root may remove nothing there.
    let read_only = |world: &World, line: &str| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "sh", "-c"]);
        let mounts = "mount --bind \"$1\" \"$1\" && mount -o remount,ro,bind \"$1\" && ";
        command
            .arg(format!("{mounts}{line}"))
            .arg(env!("CARGO_BIN_EXE_warpipe"))
            .arg(world.path("domain"))
            .env("WARPIPE_DOMAIN", world.path("domain"));
        command
    };
    let world = World::new();
    drop(owner(&world));
    let before = files(&world);
    let may_mount = read_only(&world, "true").stderr(Stdio::null()).status();
    if !may_mount.is_ok_and(|status| status.success()) {
        return println!("declared skip: this user may make no namespaces");
    }
    let ended = read_only(&world, "exec \"$0\" gc --yes").output().unwrap();
    let said = String::from_utf8_lossy(&ended.stdout);
    assert_eq!(ended.status.code(), Some(7), "{ended:?}");
    let why = "its directory may not be written";
    assert_eq!(said.matches(why).count(), NAMES.len(), "{said}");
    assert!(said.contains("0 removed, 3 kept"), "{said}");
    assert_eq!(files(&world), before);
}

#[test]
fn a_look_at_a_domain_without_a_directory_makes_none() {
    let world = World::new();
    let folder = world.path("domain");
    for (arguments, word) in [
        (&["gc"][..], "nothing is left by dead processes"),
        (&["gc", "--yes"], "nothing is left by dead processes"),
        (&["ls"], "there is no directory"),
        (&["ls", "-v"], "there is no directory"),
        (&["weights", "ls"], "there is no directory"),
        (&["members"], "there is no directory"),
        (
            &["top", "--once", "--interval", "0.1"],
            "there is no directory",
        ),
    ] {
        let ended = world.run(arguments);
        assert_eq!(ended.code, Some(0), "{arguments:?} {ended:?}");
        assert!(ended.out.contains(word), "{arguments:?} {ended:?}");
        assert!(!folder.exists(), "{arguments:?} made {folder:?}");
    }
    for command in ["verify", "drop"] {
        let ended = world.run(&["weights", command, "w"]);
        assert_eq!(ended.code, Some(3), "{command} {ended:?}");
        assert!(
            ended.err.contains("no weights' keeper named \"w\""),
            "{ended:?}"
        );
        assert!(!folder.exists(), "{command} made {folder:?}");
    }
    assert!(world.run(&["ls", "--json"]).out.is_empty());
    // What is there and cannot be a domain is an error as before.
    symlink(world.path("elsewhere"), &folder).unwrap();
    for command in ["gc", "ls", "members", "top"] {
        let once: &[&str] = if command == "top" { &["--once"] } else { &[] };
        let ended = world.run(&[&[command], once].concat());
        assert_eq!(ended.code, Some(2), "{command} {ended:?}");
    }
}

#[test]
fn a_domain_that_cannot_be_read_is_an_error() {
    let world = World::new();
    world.write("domain", b"no folder");
    let ended = world.run(&["gc", "--yes"]);
    assert_eq!(ended.code, Some(2), "{}", ended.err);
}

#[test]
fn removals_beside_processes_that_take_and_release_names_cost_none_its_name() {
    let world = World::new();
    let (domain, device) = (Domain::at(world.path("domain")).unwrap(), Device::host());
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let cleaners: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut rounds = 0;
                    while !is_over.load(Ordering::Relaxed) {
                        assert_eq!(world.run(&["gc", "--yes"]).code, Some(0));
                        rounds += 1;
                    }
                    rounds
                })
            })
            .collect();
        for round in 0..300 {
            let name = NAMES[round % NAMES.len()];
            let publisher = Publisher::new(name, domain.on(&device));
            let publisher = publisher.unwrap_or_else(|error| panic!("round {round}: {error}"));
            let found = domain.endpoints().unwrap();
            assert!(
                found
                    .iter()
                    .any(|at| at.name.as_str() == name && at.holder.is_some()),
                "round {round}: {found:?}"
            );
            drop(publisher);
        }
        is_over.store(true, Ordering::Relaxed);
        let rounds: usize = cleaners
            .into_iter()
            .map(|cleaner| cleaner.join().unwrap())
            .sum();
        assert!(rounds > 0, "no removal ran beside the names");
    });
    assert!(files(&world).is_empty(), "{:?}", files(&world));
}
