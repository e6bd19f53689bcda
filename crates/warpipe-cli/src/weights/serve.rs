//! `warpipe weights serve`: the keeper, and the child process that loads or checks a version.
//!
//! This process opens no device. It sleeps in one `poll` for a signal, for the request to end, and
//! for what its child says.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::process::ChildStdout;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use rustix::event::{PollFd, PollFlags};
use serde_json::{Value, json};
use warpipe::weights::{Keeper, KeeperOptions, NamedWeights};
use warpipe::{Domain, Error, NameFault};

use super::child::{self, ChildLine, NotTaken, OfferedVersion, Refusal, Task};
use super::progress::Progress;
use super::{counted, names};
use crate::announcer::Announcer;
use crate::args::WeightsServeArgs;
use crate::exit::{Exit, UsageError};
use crate::interrupt::Interrupt;
use crate::output::{Style, bytes, duration, styled};
use crate::poll::poll;
use crate::process::{Reaped, ending};

pub fn run(args: &WeightsServeArgs) -> anyhow::Result<Exit> {
    let interrupt = Interrupt::install()?;
    let domain = args.domain.open()?;
    let options = KeeperOptions {
        allow_uids: args.allow_uids.to_vec(),
        allow_gids: args.allow_gids.to_vec(),
        ..domain.options()
    };
    let keeper = Keeper::new(&args.name, options).map_err(with_next_step_for_a_kept_name)?;
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

/// Another keeper would take over the version that processes have open, and load no file.
fn with_next_step_for_a_kept_name(error: Error) -> anyhow::Error {
    match error {
        Error::Name(NameFault::Taken { .. }) => UsageError(format!(
            "{error}; publish a new version to it with `warpipe.weights.publish`, or take another name"
        ))
        .into(),
        other => other.into(),
    }
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
        let unanswered = self.keeper.state()?.unanswered;
        if unanswered > 0 {
            let silent = counted(unanswered, "process", "processes");
            let fact = format!("{silent} with weights of this name did not answer");
            self.complain(&fact, None);
        }
        while let Some(version) = self.keeper.state()?.candidate {
            let start = Instant::now();
            self.say_checking(version)?;
            match self.run_child(Task::Verify)? {
                Outcome::Offered(offered) => return self.keep(&offered, "processes", start),
                Outcome::Ended(exit) => return Ok(exit),
                Outcome::NotTaken if self.keeper.state()?.candidate == Some(version) => break,
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

    /// Says what happened to the weights: as text behind their name, or as JSON with it.
    fn say(&self, event: &str, text: impl FnOnce() -> String, mut json: Value) {
        json["event"] = event.into();
        json["name"] = self.args.name.as_str().into();
        let text = || format!("{}: {}", self.args.name, text());
        self.announcer.say(text, &json);
    }

    /// Says that the weights are ready, and keeps them.
    fn keep(&self, it: &OfferedVersion, from: &str, start: Instant) -> anyhow::Result<Exit> {
        let taken = start.elapsed();
        let ready = json!({
            "version": it.version, "tensors": it.tensors, "bytes": it.bytes, "device": it.device,
            // `files`, or `processes` that had the weights open.
            "from": from, "seconds": taken.as_secs_f64(),
            // Of these, until the device was open, and to read the files or to check the hashes.
            "open_seconds": it.open_seconds, "read_seconds": it.read_seconds,
            "pid": std::process::id(),
        });
        let text = || {
            let how = match from {
                "files" => "loaded from files",
                _ => "taken over from processes that have them open, no file was read,",
            };
            format!(
                "{}, version {}: {}, {} on {}, {how} in {}",
                styled(Style::Green, "ready"),
                it.version,
                counted(it.tensors, "tensor", "tensors"),
                bytes(it.bytes),
                it.device,
                duration(taken),
            )
        };
        self.say("ready", text, ready);
        self.sleep()
    }

    /// Says that there is a keeper, and keeps what other processes publish.
    fn wait_for_publishers(&self) -> anyhow::Result<Exit> {
        let text = || "no version yet; what processes publish is kept".to_owned();
        self.say("waiting", text, json!({ "pid": std::process::id() }));
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
        let found = NamedWeights::list(&self.domain, &*self.args.name)?.pop();
        let holders = found.map_or(0, |found| found.holders);
        let text = || {
            let holders = counted(holders, "process has", "processes have");
            format!(
                "{holders} weights of this name open; checking the hashes of version {version}, \
                 to take it over"
            )
        };
        let checking = json!({ "version": version, "holders": holders });
        self.say("checking", text, checking);
        Ok(())
    }

    /// Starts a child, shows its progress, and waits for its end. A child that is left behind by an
    /// error is killed.
    fn run_child(&self, task: Task) -> anyhow::Result<Outcome> {
        let child = child::command(task, self.args, &self.domain).spawn();
        let mut child = Reaped(child.context("cannot start the loading process")?);
        let stdout = child.0.stdout.take();
        let mut lines = Lines {
            out: stdout.context("the loading process has no output")?,
            pending: Vec::new(),
            is_open: true,
        };
        let mut progress = Progress::new(self.args.quiet || self.args.json);
        let show = |text: Option<String>| {
            if let Some(text) = text {
                self.announcer.errors(text);
            }
        };
        let mut last = None;
        while lines.is_open {
            self.wait(Some(&lines.out))?;
            for line in lines.read()? {
                match line {
                    ChildLine::Progress { done, total } => show(progress.text(done, total)),
                    line => last = Some(line),
                }
            }
            if self.interrupt.came() || self.keeper.state()?.is_asked_to_end {
                show(progress.end());
            }
            if let Some(exit) = self.end()? {
                return Ok(Outcome::Ended(exit));
            }
        }
        show(progress.end());
        let status = child.0.wait()?;
        Ok(match last {
            Some(ChildLine::Offered(offered)) => Outcome::Offered(offered),
            Some(ChildLine::NotTaken(refused)) => self.say_not_taken(&refused),
            Some(ChildLine::Failed { exit, fact, next }) => {
                self.complain(&fact, next.as_deref());
                Outcome::Ended(exit)
            }
            Some(ChildLine::Progress { .. }) | None => {
                let work = match task {
                    Task::Load => "loads the files",
                    Task::Verify => "checks the version",
                };
                let fact = format!(
                    "the process that {work} {}; nothing is offered",
                    ending(status)
                );
                let next = "if nobody killed it, look for the out-of-memory killer in the kernel's \
                            log, and serve again";
                self.complain(&fact, Some(next));
                Outcome::Ended(Exit::Failed)
            }
        })
    }

    fn complain(&self, fact: &str, next: Option<&str>) {
        self.announcer.errors(crate::complaint(fact, next));
    }

    fn say_not_taken(&self, NotTaken { version, reason }: &NotTaken) -> Outcome {
        let head = format!("version {version}");
        match reason {
            Refusal::Damaged { tensors } => {
                let damaged = styled(Style::Red, "damaged");
                let differ = counted(tensors.len(), "tensor differs", "tensors differ");
                let names = names(tensors);
                let text = || format!("{head} is {damaged} and is not offered: {differ}{names}");
                let json = json!({ "version": version, "damaged": tensors });
                self.say("damaged", text, json);
            }
            Refusal::Unhashed => {
                let text = || format!("{head} has no content hashes to compare and is not offered");
                self.say("unhashed", text, json!({ "version": version }));
            }
            Refusal::Elsewhere { device } => {
                let asked = self.args.device;
                let text = || format!("{head} lies on {device} and not on {asked}; not taken over");
                let json = json!({ "version": version, "device": device });
                self.say("elsewhere", text, json);
            }
        }
        Outcome::NotTaken
    }

    /// Sleeps until there is a signal, a request to end, or something to read.
    fn wait(&self, out: Option<&ChildStdout>) -> io::Result<()> {
        let mut fds = vec![
            PollFd::new(&self.signals, PollFlags::IN),
            PollFd::new(&self.keeper, PollFlags::IN),
        ];
        fds.extend(out.map(|out| PollFd::new(out, PollFlags::IN)));
        poll(&mut fds, None).map(drop)
    }

    /// Says why this process ends, if it is to end.
    fn end(&self) -> anyhow::Result<Option<Exit>> {
        let (exit, reason, why) = if self.keeper.state()?.is_asked_to_end {
            let why = "`warpipe weights drop` told this keeper to end";
            (Exit::Done, "dropped", why)
        } else if self.interrupt.came() {
            (Exit::Interrupted, "interrupted", "interrupted")
        } else {
            return Ok(None);
        };
        let text = || format!("{why}; processes that have the weights open keep them");
        self.say("ended", text, json!({ "reason": reason }));
        Ok(Some(exit))
    }
}

/// The lines of a child, as they come.
struct Lines {
    out: ChildStdout,
    pending: Vec<u8>,
    is_open: bool,
}

impl Lines {
    /// Reads what has come, if anything has.
    fn read(&mut self) -> anyhow::Result<Vec<ChildLine>> {
        let mut ready = [PollFd::new(&self.out, PollFlags::IN)];
        if !poll(&mut ready, Some(Duration::ZERO))? {
            return Ok(Vec::new());
        }
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
