//! The ranges that a profiler gets of a publisher and a subscriber, a queue and its worker. Each case
//! has a process of its own: the profiler and the environment belong to a process.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use warpipe::nvtx::{State, state};
use warpipe::{Device, Domain, Layout, Publisher, Queue, Subscriber, Worker};
use warpipe_testkit::{TempDir, temporary_folder, this_program};

const LIMIT: Duration = Duration::from_secs(60);

/// A process in which `child` runs, and what the profiler wrote down of it.
struct Case {
    folder: TempDir,
    environment: Vec<(&'static str, String)>,
}

impl Case {
    fn new() -> Case {
        Case {
            folder: temporary_folder().unwrap(),
            environment: Vec::new(),
        }
    }

    fn env(mut self, name: &'static str, value: impl Into<String>) -> Case {
        self.environment.push((name, value.into()));
        self
    }

    fn injected(self) -> Case {
        let library = built_library().to_string_lossy().into_owned();
        self.env("NVTX_INJECTION64_PATH", library)
    }

    /// The child's line about the state, and the profiler's lines by thread.
    fn run(self) -> (String, HashMap<String, Vec<String>>) {
        let mut command = this_program();
        command.args(["--exact", "child", "--ignored", "--nocapture"]);
        command
            .env_remove("NVTX_INJECTION64_PATH")
            .env_remove("WARPIPE_NVTX");
        command
            .env("FAKE_NVTX_LOG", self.folder.path().join("log"))
            .env("WARPIPE_DOMAIN", self.folder.path().join("domain"));
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            output.status.success() && text.contains("1 passed"),
            "{text}"
        );
        let said = text
            .lines()
            .find_map(|line| line.split_once("state: "))
            .expect("the child says its state")
            .1;
        let mut threads: HashMap<String, Vec<String>> = HashMap::new();
        let log = std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
        for (thread, words) in log.lines().map(|line| line.split_once(' ').unwrap()) {
            threads.entry(thread.into()).or_default().push(words.into());
        }
        (said.to_owned(), threads)
    }
}

/// The library of this package, which Cargo builds beside its tests.
fn built_library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let places = test
        .ancestors()
        .skip(1)
        .take(2)
        .map(|folder| folder.join("libfake_nvtx.so"));
    places
        .into_iter()
        .find(|path| Path::exists(path))
        .expect("libfake_nvtx.so beside the test")
}

/// The threads' ranges in the order of their beginnings, each with those that it lies in:
/// `outer/inner`.
fn names(threads: &HashMap<String, Vec<String>>) -> Vec<String> {
    let mut names = Vec::new();
    for words in threads.values() {
        let mut open = Vec::new();
        for word in words {
            if word == "pop" {
                assert!(
                    open.pop().is_some(),
                    "nothing is open that could end: {threads:?}"
                );
                continue;
            }
            open.push(word.strip_prefix("push ").expect("a range begins"));
            names.push(open.join("/"));
        }
        assert!(open.is_empty(), "a range is left open: {threads:?}");
    }
    names
}

/// Sends two samples and receives both; then leases a job and completes it.
#[test]
#[ignore = "run by the cases, in a process of its own"]
fn child() {
    let (domain, device) = (Domain::from_environment().unwrap(), Device::host());
    let publisher = Publisher::new("a", domain.on(&device)).unwrap();
    let mut subscriber = Subscriber::open("a", domain.on(&device), Duration::ZERO).unwrap();
    let (sending, receiving) = (device.stream().unwrap(), device.stream().unwrap());
    publisher.send_bytes(&sending, b"one").unwrap();
    publisher
        .loan(&Layout::bytes_only(3).unwrap())
        .unwrap()
        .send(&sending)
        .unwrap();
    let first = subscriber.receive(&receiving, LIMIT).unwrap();
    let second = subscriber.receive(&receiving, LIMIT).unwrap();
    assert_eq!(first.to_vec(LIMIT).unwrap(), b"one");
    second.finish(LIMIT).unwrap();
    let queue = Queue::new("jobs", domain.on(&device)).unwrap();
    let mut worker = Worker::open("jobs", domain.on(&device), Duration::ZERO).unwrap();
    let job = queue.submit_bytes(b"three", &sending).unwrap();
    worker
        .lease(&receiving, LIMIT)
        .unwrap()
        .complete(None, &receiving)
        .unwrap();
    let result = job.wait(&sending, LIMIT).unwrap();
    result.sample.finish(LIMIT).unwrap();
    match state() {
        State::Off => println!("state: off"),
        State::On { library } => println!("state: on {library}"),
        State::Failed(error) => {
            let hint = error.hint().unwrap_or_default();
            println!("state: failed {error}; {hint}");
        }
        other => println!("state: {other:?}"),
    }
}

const ALL: [&str; 7] = [
    "warpipe.send",
    "warpipe.send",
    "warpipe.receive",
    "warpipe.receive",
    "warpipe.lease",
    "warpipe.lease/warpipe.receive",
    "warpipe.complete",
];

#[test]
fn an_injected_profiler_sees_each_range_begin_and_end() {
    let (said, threads) = Case::new().injected().run();
    assert!(
        said.starts_with("on ") && said.contains("libfake_nvtx.so"),
        "{said}"
    );
    assert_eq!(names(&threads), ALL);
}

#[test]
fn a_toolkits_library_is_used_where_it_is_asked_for() {
    let case = Case::new();
    std::fs::copy(
        built_library(),
        case.folder.path().join("libnvToolsExt.so.1"),
    )
    .unwrap();
    let folder = case.folder.path().to_string_lossy().into_owned();
    let (said, threads) = case
        .env("LD_LIBRARY_PATH", folder)
        .env("WARPIPE_NVTX", "1")
        .run();
    assert_eq!(said, "on libnvToolsExt.so.1");
    assert_eq!(names(&threads), ALL);
}

#[test]
fn nobody_sees_ranges_that_are_not_asked_for_or_forbidden() {
    let (said, threads) = Case::new().run();
    assert_eq!((said.as_str(), threads.len()), ("off", 0));
    let (said, threads) = Case::new().injected().env("WARPIPE_NVTX", "0").run();
    assert_eq!((said.as_str(), threads.len()), ("off", 0));
}

#[test]
fn a_profiler_that_refuses_or_is_missing_costs_the_ranges_and_nothing_else() {
    let (said, threads) = Case::new().injected().env("FAKE_NVTX_REFUSE", "1").run();
    assert!(
        said.starts_with("failed ") && said.contains("refused") && threads.is_empty(),
        "{said}"
    );
    let (said, _) = Case::new().env("WARPIPE_NVTX", "1").run();
    assert!(
        said.starts_with("failed ") && said.contains("libnvToolsExt.so.1 cannot be loaded"),
        "{said}"
    );
    let (said, _) = Case::new()
        .env("NVTX_INJECTION64_PATH", "/nowhere.so")
        .run();
    assert!(said.contains("correct NVTX_INJECTION64_PATH"), "{said}");
}
