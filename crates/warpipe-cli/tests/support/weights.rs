//! A domain with weights, and processes that have them open.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use warpipe::weights::SharedWeights;
use warpipe::{Device, Domain};
use warpipe_testkit::{ChildProcess, LineReader};

use super::{PATIENCE, Running, World, device};

/// Set for the process that a test starts to be a worker.
pub const DOMAIN: &str = "WARPIPE_TEST_WORKER_OF";

/// Starts a line of a worker.
pub const REPLY: &str = "reply: ";

/// A safetensors file with tensors of U8.
pub fn safetensors(tensors: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut entries, mut data) = (Vec::new(), Vec::new());
    for (name, bytes) in tensors {
        let (begin, length) = (data.len(), bytes.len());
        let end = begin + length;
        entries.push(format!(
            r#""{name}":{{"dtype":"U8","shape":[{length}],"data_offsets":[{begin},{end}]}}"#
        ));
        data.extend_from_slice(bytes);
    }
    let header = format!("{{{}}}", entries.join(","));
    with_header(&header, &data)
}

pub fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(data);
    file
}

/// A domain with a file of weights: tensors `a` of 300,000 bytes and `b` of 5 MiB.
pub struct Stage {
    pub world: World,
    pub file: PathBuf,
}

impl Stage {
    pub fn new() -> Stage {
        let world = World::new();
        let model = safetensors(&[("a", &[1; 300_000]), ("b", &super::bytes(5 << 20))]);
        let file = world.write("model.safetensors", &model);
        Stage { world, file }
    }

    /// `serve` of the file, with further arguments.
    pub fn serve(&self, arguments: &[&str]) -> Running {
        self.world
            .start(&self.serve_arguments(&self.file, arguments))
    }

    pub fn serve_arguments<'a>(&self, path: &'a Path, arguments: &[&'a str]) -> Vec<&'a str> {
        let mut all = vec!["weights", "serve", path.to_str().unwrap()];
        all.extend(["--name", "w", "--json", "--device", leak(device())]);
        all.extend(arguments);
        all
    }

    pub fn domain(&self) -> Domain {
        Domain::at(self.world.path("domain")).unwrap()
    }

    pub fn ls(&self) -> Vec<serde_json::Value> {
        let listed = self.world.run(&["weights", "ls", "--json"]);
        assert_eq!((listed.code, listed.err.as_str()), (Some(0), ""));
        listed.json()
    }

    pub fn assert_nothing_is_left(&self) {
        let files = super::files(&self.world.path("domain"));
        assert!(files.is_empty(), "{files:?}");
    }
}

pub fn leak(text: String) -> &'static str {
    Box::leak(text.into_boxed_str())
}

/// A process that has the weights open: this program once more.
pub struct Worker {
    process: ChildProcess,
    replies: LineReader,
    commands: std::process::ChildStdin,
}

impl Worker {
    pub fn start(stage: &Stage) -> Worker {
        let program = Command::new(std::env::current_exe().unwrap());
        Worker::of(program, "weights::a_worker", &stage.world.path("domain"))
    }

    /// A worker in a domain: a test program's test that is one.
    pub fn of(mut program: Command, test: &str, domain: &Path) -> Worker {
        program
            .args(["--ignored", "--exact", test, "--nocapture"])
            .env(DOMAIN, domain)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut process = ChildProcess::start(&mut program).unwrap();
        Worker {
            replies: LineReader::new(process.take_stdout().unwrap()),
            commands: process.take_stdin().unwrap(),
            process,
        }
    }

    pub fn pid(&self) -> i32 {
        self.process.pid().as_raw_nonzero().get()
    }

    pub fn reply(&mut self) -> String {
        loop {
            let line = self.replies.next(PATIENCE).unwrap().expect("it has ended");
            if let Some((_, reply)) = line.split_once(REPLY) {
                return reply.to_owned();
            }
        }
    }

    /// Has the worker read its tensors again.
    pub fn read(&mut self) -> String {
        use std::io::Write;
        writeln!(self.commands, "read").unwrap();
        self.reply()
    }

    pub fn kill(&mut self) {
        self.process.signal(Signal::KILL).unwrap();
        self.process.wait(PATIENCE).unwrap();
    }
}

pub fn open_device() -> Device {
    let chosen: warpipe_cli::device_arg::DeviceArg = device().parse().unwrap();
    chosen.open().unwrap().device
}

/// What a worker says of a version with the bytes of the file.
pub fn expected(version: u64) -> String {
    let sum: u64 = super::bytes(5 << 20).iter().map(|&b| u64::from(b)).sum();
    format!("{version} 300000 {sum}")
}

/// The children of a process.
pub fn children_of(pid: i32) -> Vec<i32> {
    let path = format!("/proc/{pid}/task/{pid}/children");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace()
        .map(|pid| pid.parse().unwrap())
        .collect()
}

/// The part of a worker.
pub fn be_a_worker() {
    let path = std::env::var_os(DOMAIN).expect("started by another test");
    be_a_worker_in(&Domain::at(path).unwrap());
}

pub fn be_a_worker_in(domain: &Domain) {
    let (device, wait) = (open_device(), Duration::from_secs(60));
    let weights = SharedWeights::open("w", domain.on(&device), wait).unwrap();
    let read = || {
        let sum = |name| -> u64 {
            let bytes = weights.tensor(name).unwrap().memory.to_vec(wait).unwrap();
            bytes.iter().map(|&byte| u64::from(byte)).sum()
        };
        println!(
            "{REPLY}{} {} {}",
            weights.info().version,
            sum("a"),
            sum("b")
        );
    };
    read();
    for _ in std::io::stdin().lines() {
        read();
    }
}
