//! Runs the built command in a domain of its own.
#![allow(dead_code)]

pub mod pty;
pub mod weights;

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStderr, ChildStdout, Command, Output, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use warpipe_testkit::{ChildProcess, TempDir, temporary_folder};

/// Far beyond what any step takes: only a hang reaches it.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// Where the tensors lie: the host, unless the machine that runs the tests says otherwise.
pub fn device() -> String {
    std::env::var("WARPIPE_TEST_DEVICE").unwrap_or_else(|_| "host".to_owned())
}

/// One test's domain and files.
pub struct World {
    directory: TempDir,
}

impl World {
    pub fn new() -> World {
        World {
            directory: temporary_folder().unwrap(),
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn write(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    /// A copy of a program where each user may start it.
    pub fn for_all_users(&self, program: impl AsRef<Path>) -> PathBuf {
        let readable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(self.directory.path(), readable).unwrap();
        let copy = self.path(&program.as_ref().file_name().unwrap().to_string_lossy());
        // Not by this process: a child that another test forks meanwhile would have the copy open
        // for writing, and what is open for writing cannot be executed.
        let mut cp = Command::new("cp");
        let status = cp.arg(program.as_ref()).arg(&copy).status().unwrap();
        assert!(status.success(), "cp {status}");
        copy
    }

    /// The command, in this world's domain.
    pub fn warpipe(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_warpipe"));
        command
            .args(arguments)
            .env("WARPIPE_DOMAIN", self.path("domain"))
            .env_remove("RUST_BACKTRACE");
        command
    }

    /// The command, started by a shell behind `first`, which changes what it inherits.
    pub fn by_shell(&self, first: &str, arguments: &[&str]) -> Command {
        let (script, command) = (format!("{first}; exec \"$@\""), self.warpipe(arguments));
        let mut shell = Command::new("sh");
        shell.args(["-c", &script, "sh"]).arg(command.get_program());
        shell.args(arguments);
        shell.env("WARPIPE_DOMAIN", self.path("domain"));
        shell
    }

    /// Runs it to its end.
    pub fn run(&self, arguments: &[&str]) -> Ended {
        Running::start(self.warpipe(arguments)).end()
    }

    /// Starts it.
    pub fn start(&self, arguments: &[&str]) -> Running {
        Running::start(self.warpipe(arguments))
    }
}

/// A command's output, and how it ended.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Ended {
    /// Its output as JSON lines; every line must be one.
    pub fn json(&self) -> Vec<Value> {
        let parse = |line: &str| {
            serde_json::from_str(line).unwrap_or_else(|error| panic!("{line:?}: {error}"))
        };
        self.out.lines().map(parse).collect()
    }

    /// The JSON lines with this `event`.
    pub fn events(&self, event: &str) -> Vec<Value> {
        self.json()
            .into_iter()
            .filter(|line| line["event"] == event)
            .collect()
    }

    /// Its only JSON line of this `event`.
    pub fn event(&self, event: &str) -> Value {
        let mut events = self.events(event);
        assert_eq!(events.len(), 1, "one {event} is due: {self:?}");
        events.remove(0)
    }
}

/// A command that runs; killed if the test ends first.
pub struct Running {
    child: ChildProcess,
    out: BufReader<ChildStdout>,
    err: ChildStderr,
    said: String,
}

impl Running {
    pub fn start(mut command: Command) -> Running {
        command.stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = ChildProcess::start(&mut command).unwrap();
        Running {
            out: BufReader::new(child.take_stdout().unwrap()),
            err: child.take_stderr().unwrap(),
            child,
            said: String::new(),
        }
    }

    /// Reads on until `count` JSON lines of this `event` have come.
    pub fn wait_for(&mut self, event: &str, count: usize) -> Vec<Value> {
        let mut found = Vec::new();
        while found.len() < count {
            let mut line = String::new();
            assert_ne!(
                self.out.read_line(&mut line).unwrap(),
                0,
                "it ended without {event:?}: {}",
                self.said
            );
            let value: Value = serde_json::from_str(&line).unwrap();
            found.extend((value["event"] == event).then_some(value));
            self.said.push_str(&line);
        }
        found
    }

    /// Reads on until a line has this word, and returns all that was said.
    pub fn wait_for_line(&mut self, word: &str) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(
                self.out.read_line(&mut line).unwrap(),
                0,
                "it ended without {word:?}: {}",
                self.said
            );
            self.said.push_str(&line);
            if line.contains(word) {
                return self.said.clone();
            }
        }
    }

    pub fn pid(&self) -> i32 {
        self.child.pid().as_raw_nonzero().get()
    }

    pub fn signal(&self, signal: Signal) {
        self.child.signal(signal).unwrap();
    }

    pub fn stop(&self) {
        self.child.stop().unwrap();
    }

    /// Waits for its end. Its output must fit the pipes while it runs.
    pub fn end(mut self) -> Ended {
        let status = self.child.wait(PATIENCE).unwrap();
        let mut err = String::new();
        self.out.read_to_string(&mut self.said).unwrap();
        self.err.read_to_string(&mut err).unwrap();
        Ended {
            code: status.code(),
            out: self.said,
            err,
        }
    }
}

/// The files of a directory, sorted by name.
pub fn files(directory: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap());
    let mut files: Vec<_> = entries
        .map(|entry| {
            (
                entry.file_name().into_string().unwrap(),
                std::fs::read(entry.path()).unwrap(),
            )
        })
        .collect();
    files.sort();
    files
}

/// A `.npy` file as NumPy's `save` writes it.
pub fn npy(descr: &str, fortran_order: bool, shape: &[u64], data: &[u8]) -> Vec<u8> {
    let dimensions: Vec<String> = shape.iter().map(u64::to_string).collect();
    let tuple = if let [one] = &dimensions[..] {
        format!("({one},)")
    } else {
        format!("({})", dimensions.join(", "))
    };
    let order = if fortran_order { "True" } else { "False" };
    let mut text = format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {tuple}, }}");
    if let Some(growing) = if fortran_order {
        dimensions.last()
    } else {
        dimensions.first()
    } {
        text.push_str(&" ".repeat(21 - growing.len()));
    }
    let length = (10 + text.len() + 1).next_multiple_of(64) - 10;
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend_from_slice(&(length as u16).to_le_bytes());
    file.extend_from_slice(format!("{text:<width$}\n", width = length - 1).as_bytes());
    file.extend_from_slice(data);
    file
}

/// Bytes that differ from their neighbours.
pub fn bytes(count: usize) -> Vec<u8> {
    (0..count)
        .map(|index| (index.wrapping_mul(151) ^ (index >> 8)) as u8)
        .collect()
}

/// For tests that need the plain result.
pub fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A pipe without room.
pub fn full_pipe() -> (std::io::PipeReader, std::io::PipeWriter) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    let flags = rustix::fs::fcntl_getfl(&writer).unwrap();
    rustix::fs::fcntl_setfl(&writer, flags | rustix::fs::OFlags::NONBLOCK).unwrap();
    while writer.write(&[b'.'; 4096]).is_ok() {}
    rustix::fs::fcntl_setfl(&writer, flags).unwrap();
    (reader, writer)
}
