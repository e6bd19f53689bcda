//! `warpipe weights serve`: the keeper, and the child process that loads or checks a version.
//!
//! This process opens no device. It sleeps in one `poll` for a signal, for the request to end, and
//! for what its child says.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStdout};
use std::time::Instant;

use anyhow::{Context, anyhow};
use rustix::event::{PollFd, PollFlags, poll};
use serde::Serialize;
use warpipe::Domain;
use warpipe::weights::{Keeper, NamedWeights};

use super::child::{self, ChildLine, OfferedVersion, Task};
use super::counted;
use super::progress::Progress;
use crate::announcer::Announcer;
use crate::args::WeightsServeArgs;
use crate::exit::Exit;
use crate::interrupt::Interrupt;
use crate::output::{Style, bytes, duration, printable, styled};
use crate::process::ending;

#[derive(Serialize)]
struct Checking<'a> {
    event: &'static str,
    name: &'a str,
    version: u64,
    holders: usize,
}

#[derive(Serialize)]
struct NotTaken<'a> {
    /// `damaged`, `unhashed` or `elsewhere`.
    event: &'static str,
    name: &'a str,
    version: u64,
    /// The tensors that differ.
    #[serde(skip_serializing_if = "Option::is_none")]
    damaged: Option<&'a [String]>,
    /// The device that the version lies on.
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<&'a str>,
}

#[derive(Serialize)]
struct Ready<'a> {
    event: &'static str,
    name: &'a str,
    version: u64,
    tensors: usize,
    bytes: u64,
    device: &'a str,
    /// `files`, or `processes` that had the weights open.
    from: &'static str,
    seconds: f64,
    /// Of these, until the device was open, and to read the files or to check the hashes.
    open_seconds: f64,
    read_seconds: f64,
    pid: u32,
}

#[derive(Serialize)]
struct Waiting<'a> {
    event: &'static str,
    name: &'a str,
    pid: u32,
}

#[derive(Serialize)]
struct Ended<'a> {
    event: &'static str,
    name: &'a str,
    /// `dropped` or `interrupted`.
    reason: &'static str,
}

pub fn run(args: &WeightsServeArgs) -> anyhow::Result<Exit> {
    let interrupt = Interrupt::install()?;
    let domain = super::domain(&args.domain)?;
    let keeper = Keeper::builder(&args.name)
        .domain(&domain)
        .allow_uids(&args.allow_uids)
        .allow_gids(&args.allow_gids)
        .build()?;
    let serve = Serve {
        args,
        announcer: Announcer::start(args.json)?,
        signals: interrupt.readable()?,
        interrupt,
        domain,
        keeper,
    };
    serve.run()
}

struct Serve<'a> {
    args: &'a WeightsServeArgs,
    announcer: Announcer,
    interrupt: Interrupt,
    /// Readable once a signal has come.
    signals: UnixStream,
    domain: Domain,
    keeper: Keeper,
}

/// How a child ended.
enum Outcome {
    Offered(OfferedVersion),
    /// The candidate cannot be taken over.
    NotTaken,
    /// This process is to end.
    Ended(Exit),
}

impl Serve<'_> {
    fn run(&self) -> anyhow::Result<Exit> {
        if self.keeper.unanswered() > 0 {
            let silent = counted(self.keeper.unanswered(), "process", "processes");
            let fact = format!("{silent} with weights of this name did not answer");
            self.announcer.errors(crate::complaint(&fact, None));
        }
        while let Some(version) = self.keeper.candidate()? {
            let start = Instant::now();
            self.say_checking(version)?;
            match self.run_child(Task::Verify)? {
                Outcome::Offered(offered) => return self.keep(&offered, "processes", start),
                Outcome::Ended(exit) => return Ok(exit),
                Outcome::NotTaken if self.keeper.candidate()? == Some(version) => break,
                // An older version is the candidate, or none.
                Outcome::NotTaken => {}
            }
        }
        if self.args.paths.is_empty() {
            return self.wait_for_publishers();
        }
        let start = Instant::now();
        match self.run_child(Task::Load)? {
            Outcome::Offered(offered) => self.keep(&offered, "files", start),
            Outcome::Ended(exit) => Ok(exit),
            Outcome::NotTaken => Err(anyhow!("the loading process checked a version")),
        }
    }

    /// Says that the weights are ready, and keeps them.
    fn keep(
        &self,
        offered: &OfferedVersion,
        from: &'static str,
        start: Instant,
    ) -> anyhow::Result<Exit> {
        let (name, taken) = (&self.args.name, start.elapsed());
        let ready = Ready {
            event: "ready",
            name,
            version: offered.version,
            tensors: offered.tensors,
            bytes: offered.bytes,
            device: &offered.device,
            from,
            seconds: taken.as_secs_f64(),
            open_seconds: offered.open_seconds,
            read_seconds: offered.read_seconds,
            pid: std::process::id(),
        };
        let text = || {
            let how = match from {
                "files" => "loaded from files",
                _ => "taken over from processes that have them open, no file was read,",
            };
            format!(
                "{name}: {}, version {}: {}, {} on {}, {how} in {}",
                styled(Style::Green, "ready"),
                offered.version,
                counted(offered.tensors, "tensor", "tensors"),
                bytes(offered.bytes),
                offered.device,
                duration(taken),
            )
        };
        self.announcer.say(text, &ready);
        self.sleep()
    }

    /// Says that there is a keeper, and keeps what other processes publish.
    fn wait_for_publishers(&self) -> anyhow::Result<Exit> {
        let name = &self.args.name;
        let waiting = Waiting {
            event: "waiting",
            name,
            pid: std::process::id(),
        };
        let text = || format!("{name}: no version yet; what processes publish is kept");
        self.announcer.say(text, &waiting);
        self.sleep()
    }

    /// Sleeps until this process is to end.
    fn sleep(&self) -> anyhow::Result<Exit> {
        loop {
            self.wait(None)?;
            if let Some(exit) = self.end()? {
                return Ok(exit);
            }
        }
    }

    fn say_checking(&self, version: u64) -> anyhow::Result<()> {
        let name = &self.args.name;
        let found = NamedWeights::find(&self.domain, name)?;
        let holders = found.map_or(0, |found| found.holders);
        let text = || {
            let holders = counted(holders, "process has", "processes have");
            format!(
                "{name}: {holders} weights of this name open; checking the hashes of version \
                 {version}, to take it over"
            )
        };
        let checking = Checking {
            event: "checking",
            name,
            version,
            holders,
        };
        self.announcer.say(text, &checking);
        Ok(())
    }

    /// Starts a child, shows its progress, and waits for its end. A child that is left behind by an
    /// error is killed.
    fn run_child(&self, task: Task) -> anyhow::Result<Outcome> {
        let child = child::command(task, self.args, &self.domain).spawn();
        let mut child = RunningChild(child.context("cannot start the loading process")?);
        let stdout = child.0.stdout.take();
        let mut lines = Lines::new(stdout.context("the loading process has no output")?);
        let mut progress = Progress::new(self.args.quiet || self.args.json);
        let mut last = None;
        while lines.is_open {
            self.wait(Some(&lines.out))?;
            for line in lines.read()? {
                match line {
                    ChildLine::Progress { done, total } => {
                        let text = progress.text(done, total);
                        text.into_iter()
                            .for_each(|text| self.announcer.errors(text));
                    }
                    line => last = Some(line),
                }
            }
            if self.interrupt.came() || self.keeper.is_asked_to_end()? {
                progress
                    .end()
                    .into_iter()
                    .for_each(|text| self.announcer.errors(text));
            }
            if let Some(exit) = self.end()? {
                return Ok(Outcome::Ended(exit));
            }
        }
        progress
            .end()
            .into_iter()
            .for_each(|text| self.announcer.errors(text));
        let status = child.0.wait()?;
        let name = &self.args.name;
        match last {
            Some(ChildLine::Offered(offered)) => Ok(Outcome::Offered(offered)),
            Some(ChildLine::Damaged { version, tensors }) => {
                self.say_damaged(version, &tensors);
                Ok(Outcome::NotTaken)
            }
            Some(ChildLine::Unhashed { version }) => {
                let row = NotTaken {
                    event: "unhashed",
                    name,
                    version,
                    damaged: None,
                    device: None,
                };
                let text = || {
                    format!(
                        "{name}: version {version} has no content hashes to compare and is not offered"
                    )
                };
                self.announcer.say(text, &row);
                Ok(Outcome::NotTaken)
            }
            Some(ChildLine::Elsewhere { version, device }) => {
                let row = NotTaken {
                    event: "elsewhere",
                    name,
                    version,
                    damaged: None,
                    device: Some(&device),
                };
                let asked = self.args.device;
                let text = || {
                    format!(
                        "{name}: version {version} lies on {device} and not on {asked}; not taken over"
                    )
                };
                self.announcer.say(text, &row);
                Ok(Outcome::NotTaken)
            }
            Some(ChildLine::Failed { exit, fact, next }) => {
                self.announcer
                    .errors(crate::complaint(&fact, next.as_deref()));
                Ok(Outcome::Ended(Exit::of_code(exit).unwrap_or(Exit::Failed)))
            }
            Some(ChildLine::Progress { .. }) | None => {
                let work = match task {
                    Task::Load => "loads the files",
                    Task::Verify => "checks the version",
                };
                let ending = ending(status);
                let fact = format!("the process that {work} {ending}; nothing is offered");
                let next = "if nobody killed it, look for the out-of-memory killer in the kernel's \
                            log, and serve again";
                self.announcer.errors(crate::complaint(&fact, Some(next)));
                Ok(Outcome::Ended(Exit::Failed))
            }
        }
    }

    fn say_damaged(&self, version: u64, tensors: &[String]) {
        let name = &self.args.name;
        let row = NotTaken {
            event: "damaged",
            name,
            version,
            damaged: Some(tensors),
            device: None,
        };
        let text = || {
            let differ = counted(tensors.len(), "tensor differs", "tensors differ");
            let names = tensors
                .iter()
                .map(|name| format!("\n  {}", printable(name)));
            let names: String = names.collect();
            format!(
                "{name}: version {version} is {} and is not offered: {differ}{names}",
                styled(Style::Red, "damaged")
            )
        };
        self.announcer.say(text, &row);
    }

    /// Sleeps until there is a signal, a request to end, or something to read.
    fn wait(&self, out: Option<&ChildStdout>) -> io::Result<()> {
        let mut fds = vec![
            PollFd::new(&self.signals, PollFlags::IN),
            PollFd::new(&self.keeper, PollFlags::IN),
        ];
        fds.extend(out.map(|out| PollFd::new(out, PollFlags::IN)));
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Says why this process ends, if it is to end.
    fn end(&self) -> anyhow::Result<Option<Exit>> {
        let (exit, reason, text) = if self.keeper.is_asked_to_end()? {
            let text = "`warpipe weights drop` told this keeper to end";
            (Exit::Done, "dropped", text)
        } else if self.interrupt.came() {
            (Exit::Interrupted, "interrupted", "interrupted")
        } else {
            return Ok(None);
        };
        let name = &self.args.name;
        let ended = Ended {
            event: "ended",
            name,
            reason,
        };
        let text = || format!("{name}: {text}; processes that have the weights open keep them");
        self.announcer.say(text, &ended);
        Ok(Some(exit))
    }
}

/// A child, killed and reaped when it is dropped.
struct RunningChild(Child);

impl Drop for RunningChild {
    fn drop(&mut self) {
        // It may have been reaped: both calls do nothing then.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The lines of a child, as they come.
struct Lines {
    out: ChildStdout,
    pending: Vec<u8>,
    is_open: bool,
}

impl Lines {
    fn new(out: ChildStdout) -> Lines {
        Lines {
            out,
            pending: Vec::new(),
            is_open: true,
        }
    }

    /// Reads what has come, if anything has.
    fn read(&mut self) -> anyhow::Result<Vec<ChildLine>> {
        let mut ready = [PollFd::new(&self.out, PollFlags::IN)];
        let now = rustix::event::Timespec::default();
        match poll(&mut ready, Some(&now)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(Vec::new()),
            other => other?,
        };
        let mut part = [0; 65_536];
        let count = self.out.read(&mut part)?;
        self.is_open = count > 0;
        self.pending.extend_from_slice(&part[..count]);
        let mut lines = Vec::new();
        while let Some(end) = self.pending.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = self.pending.drain(..=end).collect();
            lines.push(serde_json::from_slice(&line)?);
        }
        Ok(lines)
    }
}
