//! Weights across real processes that are really killed: what survives each death.

#[path = "weights/roles.rs"]
mod roles;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use warpipe::weights::{Keeper, PublishedWeights, SharedWeights, Weights};
use warpipe::{DType, Device, Domain, Error, Layout, OpenOptions};
use warpipe_testkit::{ChildProcess, LineReader, TempDir, this_program};

const WAIT: Duration = Duration::from_secs(60);

/// What a child is: `keeper`, `short keeper`, `worker`, `publisher`. It takes a command a line and replies with a
/// line for each.
const ROLE: &str = "WARPIPE_WEIGHTS_ROLE";
const FOLDER: &str = "WARPIPE_WEIGHTS_FOLDER";

/// Lines of a child that are replies. The test harness writes others.
const REPLY: &str = "reply: ";

/// Each version's tensors, and the length of each.
const TENSORS: usize = 5;
const TENSOR_BYTES: usize = 100_000;

#[test]
fn a_killed_keeper_costs_no_worker_anything_and_the_next_one_takes_the_newest_version_over() {
    let stage = Stage::new();
    let mut keeper = stage.child("keeper");
    assert_eq!(keeper.reply(), "candidate None unanswered 0");
    drop(stage.publish(1));
    let mut old = stage.child("worker");
    assert_eq!(old.reply(), "version 1 byte 1");
    // The publisher dies as well: workers alone have the version.
    let mut publisher = stage.child("publisher");
    assert_eq!(publisher.ask("publish 2"), "version 2");
    publisher.kill();
    let mut new = stage.child("worker");
    assert_eq!(new.reply(), "version 2 byte 2");

    keeper.kill();
    assert_eq!(old.ask("read"), "version 1 byte 1");
    assert_eq!(new.ask("read"), "version 2 byte 2");
    let mut keeper = stage.child("keeper");
    assert_eq!(keeper.reply(), "candidate Some(2) unanswered 0");
    let early = SharedWeights::open("w", stage.options(), Duration::ZERO).unwrap_err();
    assert!(matches!(early, Error::Timeout { .. }), "{early}");
    assert_eq!(
        SharedWeights::verify("w", stage.options(), WAIT).unwrap(),
        2
    );
    let mut third = stage.child("worker");
    assert_eq!(third.reply(), "version 2 byte 2");
    assert_eq!(stage.publish(3).version, 3);
    assert_eq!(old.ask("newer"), "version 3 byte 3");
    assert_eq!(new.ask("newer"), "version 3 byte 3");
}

#[test]
fn a_keeper_holds_two_descriptors_of_its_version_maps_no_memory_and_runs_no_thread_for_it() {
    let stage = Stage::new();
    let mut keeper = stage.child("keeper");
    keeper.reply();
    let threads = threads_of(&keeper);
    for byte in 1..=10 {
        stage.publish(byte);
    }
    assert_eq!(keeper.ask("version"), "version Some(10)");
    for kind in ["memfd:warpipe-region", "memfd:warpipe-manifest"] {
        assert_holds_one(&keeper, kind);
    }
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", keeper.pid())).unwrap();
    assert!(!maps.contains("warpipe-region"), "{maps}");
    // The search for holders may still have had threads at first.
    let ended = warpipe_testkit::eventually(WAIT, || threads_of(&keeper) <= threads);
    assert!(ended, "{} threads, {threads} at first", threads_of(&keeper));
}

#[test]
fn versions_of_one_memory_are_whole_for_all_others_whoever_of_trainer_keeper_and_readers_is_killed()
{
    let stage = Stage::new();
    let mut keeper = stage.child("keeper");
    keeper.reply();
    let mut trainer = stage.child("trainer");
    assert_eq!(trainer.ask("fill 1"), "version 1");
    let (mut reader, mut doomed) = (stage.child("worker"), stage.child("worker"));
    assert_eq!(reader.reply(), "version 1 byte 1");
    assert_eq!(doomed.reply(), "version 1 byte 1");
    assert_eq!(trainer.ask("again"), "version 2");
    assert_eq!(reader.ask("newer"), "version 2 byte 1");
    doomed.kill();
    assert_eq!(trainer.ask("again"), "version 3");
    assert_eq!(reader.ask("newer"), "version 3 byte 1");
    // The next keeper has nothing yet: trainer and reader give it all of the version.
    keeper.kill();
    let mut keeper = stage.child("keeper");
    assert_eq!(keeper.reply(), "candidate Some(3) unanswered 0");
    assert_eq!(
        SharedWeights::verify("w", stage.options(), WAIT).unwrap(),
        3
    );
    assert_eq!(trainer.ask("again"), "version 4");
    assert_eq!(reader.ask("newer"), "version 4 byte 1");
    trainer.kill();
    keeper.kill();
    let mut keeper = stage.child("keeper");
    assert_eq!(keeper.reply(), "candidate Some(4) unanswered 0");
    assert_eq!(
        SharedWeights::verify("w", stage.options(), WAIT).unwrap(),
        4
    );
    let mut late = stage.child("worker");
    assert_eq!(late.reply(), "version 4 byte 1");
    // Another trainer's memory is none of the first one's.
    let mut trainer = stage.child("trainer");
    assert_eq!(trainer.ask("fill 2"), "version 5");
    assert_eq!(late.ask("newer"), "version 5 byte 2");
    assert_eq!(reader.ask("read"), "version 4 byte 1");
    assert_eq!(reader.ask("newer"), "version 5 byte 2");
}

#[test]
fn a_process_without_room_for_all_pieces_of_a_version_says_how_many_there_are_and_lives_on() {
    const PIECES: usize = 200;
    let stage = Stage::new();
    let mut keeper = stage.child("narrow keeper");
    assert_eq!(keeper.reply(), "ready");
    let refused = roles::publish_in_place(&stage.domain, PIECES).unwrap_err();
    let text = refused.to_string();
    assert!(
        matches!(refused, Error::Refused { denied: false, .. }),
        "{text}"
    );
    assert!(
        text.contains("200 pieces") && text.contains("ulimit -n"),
        "{text}"
    );
    assert_eq!(stage.publish(1).version, 1);
    assert_eq!(keeper.ask("version"), "version Some(1)");
    keeper.kill();
    let keeper = stage.keeper();
    let version = roles::publish_in_place(&stage.domain, PIECES).unwrap();
    let mut worker = stage.child("narrow worker");
    let told = worker.ask("open");
    assert!(
        told.starts_with("limit: ") && told.contains("200 pieces"),
        "{told}"
    );
    assert!(told.contains("ulimit -n"), "{told}");
    let opened = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    assert_eq!(opened.info().version, version.version);
    let copied = stage.publish(9).version;
    assert_eq!(worker.ask("open"), format!("version {copied}"));
    drop(keeper);
}

#[test]
fn a_killed_worker_goes_unnoticed_and_its_files_go_with_the_next_opening() {
    let stage = Stage::new();
    let mut keeper = stage.child("keeper");
    keeper.reply();
    drop(stage.publish(1));
    let mut survivor = stage.child("worker");
    survivor.reply();
    for _ in 0..10 {
        let mut worker = stage.child("worker");
        assert_eq!(worker.reply(), "version 1 byte 1");
        worker.kill();
        assert_eq!(survivor.ask("read"), "version 1 byte 1");
    }
    assert_eq!(keeper.ask("version"), "version Some(1)");
    let mut last = stage.child("worker");
    assert_eq!(last.reply(), "version 1 byte 1");
    assert_eq!(
        stage.names(),
        stage.names_of(&["w", "w/held-1-", "w/held-1-"])
    );
}

#[test]
fn nothing_is_left_of_weights_with_holders_that_are_all_dead() {
    let stage = Stage::new();
    let mut children = vec![stage.child("keeper")];
    children[0].reply();
    drop(stage.publish(1));
    for _ in 0..3 {
        let mut worker = stage.child("worker");
        worker.reply();
        children.push(worker);
    }
    assert_eq!(
        regions_of(children.iter()),
        4,
        "one descriptor in each process"
    );
    children.iter_mut().for_each(Child::kill);
    let keeper = stage.keeper();
    assert_eq!(
        (
            keeper.state().unwrap().candidate,
            keeper.state().unwrap().version
        ),
        (None, None)
    );
    drop(keeper);
    let files = std::fs::read_dir(stage.folder.path()).unwrap();
    assert_eq!(files.count(), 0);
}

#[test]
fn processes_that_read_while_versions_are_published_see_all_of_one_version() {
    let stage = Stage::new();
    let mut keeper = stage.child("keeper");
    keeper.reply();
    let mut published = stage.publish(1);
    let mut workers: Vec<_> = (0..3).map(|_| stage.child("worker")).collect();
    for worker in &mut workers {
        worker.reply();
        worker.tell("follow 100");
    }
    for byte in 2..=100 {
        let next = stage.publish(byte);
        assert_eq!(next.version, u64::from(byte));
        published = next;
    }
    for worker in &mut workers {
        assert_eq!(worker.reply(), "version 100 byte 100");
        assert_holds_one(worker, "memfd:warpipe-region");
    }
    drop(published);
}

#[test]
fn keepers_killed_while_versions_are_published_lose_none_that_a_publisher_was_told_of() {
    const ROUNDS: u32 = 8;
    const VERSIONS: u32 = 5;
    let stage = Stage::new();
    let mut keeper = stage.child("keeper");
    assert_eq!(keeper.reply(), "candidate None unanswered 0");
    let mut publisher = stage.child("publisher");
    (0..ROUNDS * VERSIONS).for_each(|_| publisher.tell("publish 7"));
    let mut last = 0;
    for _ in 0..ROUNDS {
        for _ in 0..VERSIONS {
            let told = number_in(&publisher.reply()).unwrap();
            assert!(told > last, "{told} after {last}");
            last = told;
        }
        keeper.kill();
        keeper = stage.child("keeper");
        // A version that is published meanwhile replaces the candidate.
        let found = number_in(&keeper.reply()).or_else(|| number_in(&keeper.ask("version")));
        assert!(
            found.is_some_and(|found| found >= last),
            "{found:?} after {last}"
        );
    }
}

#[test]
fn a_stopped_holder_delays_a_new_keeper_and_its_versions_number_is_not_used_again() {
    let stage = Stage::new();
    let mut keeper = stage.child("keeper");
    keeper.reply();
    drop(stage.publish(1));
    drop(stage.publish(2));
    let mut worker = stage.child("worker");
    worker.reply();
    worker.process.stop().unwrap();
    keeper.kill();
    let mut keeper = stage.child("keeper");
    assert_eq!(keeper.reply(), "candidate None unanswered 1");
    assert_eq!(stage.publish(3).version, 3);
    worker.signal(Signal::CONT);
    assert_eq!(worker.ask("read"), "version 2 byte 2");
    assert_eq!(worker.ask("newer"), "version 3 byte 3");
}

#[test]
fn a_stopped_keeper_costs_readers_and_publishers_no_more_than_the_time_that_they_gave() {
    let stage = Stage::new();
    let mut keeper = stage.child("keeper");
    keeper.reply();
    drop(stage.publish(1));
    let waiting = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    std::thread::scope(|scope| {
        keeper.process.stop().unwrap();
        let newer = scope.spawn(|| waiting.newer(WAIT).unwrap().info().version);
        let reader = scope.spawn(|| {
            SharedWeights::open("w", stage.options(), WAIT)
                .unwrap()
                .info()
                .version
        });
        let publisher = scope.spawn(|| stage.publish(2).version);
        let mut follower = waiting.clone().follow();
        let update = scope.spawn(move || {
            let stream = follower.weights().device().stream().unwrap();
            follower.update(&stream, WAIT)
        });
        // Each of these ends after the longest wait for one message: two are more than one.
        for _ in 0..2 {
            let silent = SharedWeights::open("w", stage.options(), Duration::ZERO).unwrap_err();
            assert!(
                matches!(silent, Error::Handshake { .. } | Error::Timeout { .. }),
                "{silent}"
            );
        }
        assert_eq!(update.join().unwrap().unwrap(), None);
        keeper.signal(Signal::CONT);
        assert_eq!(publisher.join().unwrap(), 2);
        assert_eq!(newer.join().unwrap(), 2);
        assert!(reader.join().unwrap() >= 1);
    });
}

#[test]
fn a_holder_killed_with_its_lock_file_alone_leaves_nothing_and_its_number_is_not_used_again() {
    let stage = Stage::new();
    let mut keeper = stage.child("keeper");
    keeper.reply();
    drop(stage.publish(1));
    drop(stage.publish(2));
    let mut worker = stage.child("worker");
    worker.reply();
    worker.kill();
    keeper.kill();
    // As after a death between the two files.
    let files = || std::fs::read_dir(stage.folder.path()).unwrap();
    for file in files().map(|file| file.unwrap().path()) {
        if file.extension().is_some_and(|kind| kind == "sock") {
            std::fs::remove_file(file).unwrap();
        }
    }
    let keeper = stage.keeper();
    assert_eq!(stage.publish(3).version, 3);
    drop(keeper);
    assert_eq!(files().count(), 0);
}

#[test]
fn a_keeper_at_the_limit_of_descriptors_loses_no_version_without_an_error() {
    let stage = Stage::new();
    let keeper = stage.keeper();
    let _published = stage.publish(1);
    drop(keeper);
    let mut short = stage.child("short keeper");
    let (mut errors, mut kept) = (0, 0);
    loop {
        match short.ask("one more descriptor").as_str() {
            "error" => errors += 1,
            "candidate Some(1)" => kept += 1,
            other => panic!("{other}"),
        }
        if kept == 3 {
            break;
        }
    }
    assert!(errors > 3, "the limit was not reached");
}

/// As containers that share the domain's directory alone: each process is number 1 of its own.
#[test]
fn weights_cross_and_are_taken_over_between_processes_without_a_common_pid_or_ipc_namespace() {
    if !Isolated::is_possible() {
        return println!("declared skip: this user may make no namespaces");
    }
    let stage = Stage::new();
    let mut keeper = stage.isolated("keeper");
    assert_eq!(keeper.reply(), "candidate None unanswered 0");
    let mut publisher = stage.isolated("publisher");
    assert_eq!(publisher.ask("publish 1"), "version 1");
    let mut worker = stage.isolated("worker");
    assert_eq!(worker.reply(), "version 1 byte 1");
    assert_eq!(publisher.ask("publish 2"), "version 2");
    assert_eq!(worker.ask("newer"), "version 2 byte 2");
    keeper.kill();
    publisher.kill();
    stage.wait_until_unowned("w");
    assert_eq!(worker.ask("again"), "version 2 byte 2");
    let mut next = stage.isolated("keeper");
    assert_eq!(next.reply(), "candidate Some(2) unanswered 0");
    assert_eq!(
        SharedWeights::verify("w", stage.options(), WAIT).unwrap(),
        2
    );
    let mut later = stage.isolated("worker");
    assert_eq!(later.reply(), "version 2 byte 2");
}

/// A process in user, PID, IPC and mount namespaces of its own (`unshare(1)`).
struct Isolated;

impl Isolated {
    const FLAGS: [&str; 7] = [
        "--user",
        "--map-root-user",
        "--pid",
        "--ipc",
        "--mount-proc",
        "--fork",
        "--kill-child",
    ];

    fn is_possible() -> bool {
        let tried = Command::new("unshare")
            .args(Self::FLAGS)
            .arg("true")
            .status();
        tried.is_ok_and(|status| status.success())
    }

    fn command() -> Command {
        let mut command = Command::new("unshare");
        command
            .args(Self::FLAGS)
            .arg(std::env::current_exe().unwrap());
        command
    }
}

/// A domain, and the processes in it.
struct Stage {
    folder: TempDir,
    domain: Domain,
}

impl Stage {
    fn new() -> Stage {
        let folder = warpipe_testkit::temporary_folder().unwrap();
        let domain = Domain::at(folder.path()).unwrap();
        Stage { folder, domain }
    }

    fn keeper(&self) -> Keeper {
        Keeper::new("w", self.domain.options()).unwrap()
    }

    fn options(&self) -> OpenOptions {
        self.domain.on(&Device::host())
    }

    /// Publishes a version with tensors of this byte, and keeps nothing else of it.
    fn publish(&self, byte: u8) -> PublishedWeights {
        publish(&self.domain, byte).unwrap()
    }

    fn child(&self, role: &str) -> Child {
        Child::start(this_program(), role, self.folder.path())
    }

    fn isolated(&self, role: &str) -> Child {
        Child::start(Isolated::command(), role, self.folder.path())
    }

    /// The names in the domain.
    fn names(&self) -> Vec<String> {
        let endpoints = self.domain.endpoints().unwrap();
        endpoints
            .iter()
            .map(|endpoint| endpoint.name.to_string())
            .collect()
    }

    /// Waits until no process holds the name's lock. A process in a PID namespace of its own ends
    /// a moment after `unshare`, and another namespace cannot see that it is dying.
    fn wait_until_unowned(&self, name: &str) {
        let is_unowned = || {
            let endpoints = self.domain.endpoints().unwrap();
            let mut owned = endpoints.iter().filter(|it| it.holder.is_some());
            owned.all(|it| it.name.to_string() != name)
        };
        assert!(
            warpipe_testkit::eventually(WAIT, is_unowned),
            "{name} stays owned"
        );
    }

    /// The names in the domain that begin so, if there are no others.
    fn names_of(&self, prefixes: &[&str]) -> Vec<String> {
        let names = self.names();
        assert_eq!(names.len(), prefixes.len(), "{names:?}");
        let begins = names
            .iter()
            .zip(prefixes)
            .all(|(name, prefix)| name.starts_with(prefix));
        assert!(begins, "{names:?}");
        names
    }
}

/// The number in a reply; `None` for one that says `None`.
fn number_in(reply: &str) -> Option<u64> {
    let value = reply.split(' ').nth(1)?;
    value
        .trim_matches(|c: char| !c.is_ascii_digit())
        .parse()
        .ok()
}

struct Child {
    process: ChildProcess,
    commands: ChildStdin,
    replies: LineReader,
}

impl Child {
    fn start(mut command: Command, role: &str, folder: &Path) -> Child {
        command
            .args(["--exact", "child_of_another_test", "--nocapture"])
            .env(ROLE, role)
            .env(FOLDER, folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut process = ChildProcess::start(&mut command).unwrap();
        Child {
            commands: process.take_stdin().unwrap(),
            replies: LineReader::new(process.take_stdout().unwrap()),
            process,
        }
    }

    fn tell(&mut self, command: &str) {
        writeln!(self.commands, "{command}").unwrap();
    }

    fn reply(&mut self) -> String {
        loop {
            let line = self
                .replies
                .next(WAIT)
                .unwrap()
                .expect("the child has ended");
            // The harness writes a test's name in front of the first reply, on one line.
            if let Some((_, reply)) = line.split_once(REPLY) {
                return reply.to_string();
            }
        }
    }

    fn ask(&mut self, command: &str) -> String {
        self.tell(command);
        self.reply()
    }

    fn signal(&self, signal: Signal) {
        self.process.signal(signal).unwrap();
    }

    /// Kills it, and waits for its end.
    fn kill(&mut self) {
        self.signal(Signal::KILL);
        self.process.wait(WAIT).unwrap();
    }

    fn pid(&self) -> i32 {
        self.process.pid().as_raw_nonzero().get()
    }
}

fn descriptors(process: &str) -> Vec<String> {
    let fds = std::fs::read_dir(format!("/proc/{process}/fd")).unwrap();
    let link = |path: PathBuf| std::fs::read_link(path).ok();
    fds.filter_map(|fd| link(fd.unwrap().path()))
        .map(|target| target.display().to_string())
        .collect()
}

/// That a child has one descriptor of this kind left: another thread of its process closes those of
/// earlier versions.
fn assert_holds_one(child: &Child, kind: &str) {
    let of_kind = |fds: &[String]| fds.iter().filter(|fd| fd.contains(kind)).count();
    let holds_one = || of_kind(&descriptors_of(child)) == 1;
    assert!(
        warpipe_testkit::eventually(WAIT, holds_one),
        "not one {kind}: {:?}",
        descriptors_of(child)
    );
}

fn descriptors_of(child: &Child) -> Vec<String> {
    descriptors(&child.pid().to_string())
}

fn regions_of<'a>(children: impl Iterator<Item = &'a Child>) -> usize {
    let fds = children.flat_map(descriptors_of);
    fds.filter(|fd| fd.contains("memfd:warpipe-region")).count()
}

fn threads_of(child: &Child) -> usize {
    std::fs::read_dir(format!("/proc/{}/task", child.pid()))
        .unwrap()
        .count()
}

fn publish(domain: &Domain, byte: u8) -> warpipe::Result<PublishedWeights> {
    let layout = Layout::contiguous(DType::U8, &[TENSOR_BYTES as u64])?;
    let bytes = vec![byte; TENSOR_BYTES];
    let names: Vec<String> = (0..TENSORS).map(|index| format!("layer.{index}")).collect();
    let tensors = names.iter().map(|name| (name.as_str(), layout, &bytes[..]));
    Weights::from_bytes(&Device::host(), tensors)?.publish(domain, "w", WAIT)
}

/// The body of every child.
#[test]
fn child_of_another_test() {
    let Some(role) = std::env::var_os(ROLE) else {
        return;
    };
    let domain = Domain::at(std::env::var_os(FOLDER).unwrap()).unwrap();
    let commands = std::io::stdin().lines().map(|line| line.unwrap());
    match role.to_str().unwrap() {
        "keeper" => roles::keeper(&domain, commands),
        "worker" => roles::worker(&domain, commands),
        "short keeper" => roles::short_keeper(&domain, commands),
        "narrow keeper" => roles::narrow_keeper(&domain, commands),
        "narrow worker" => roles::narrow_worker(&domain, commands),
        "trainer" => roles::trainer(&domain, commands),
        _ => roles::publisher(&domain, commands),
    }
}
