//! What all parts of the demo share: its processes, its output, its claims.

use std::fmt;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};
use warpipe::{DeviceKind, clock};

use super::PATIENCE;
use crate::args::DemoArgs;
use crate::device_arg::{ChosenDevice, DeviceArg};
use crate::doctor::system::mps_answers;
use crate::exit::{self, Exit};
use crate::interrupt::{Interrupt, LOOK};
use crate::output::{Output, Style, count, duration, styled};
use crate::process;

/// The time limit of processes that were ordered to end.
const END_PATIENCE: Duration = Duration::from_secs(15);

/// Which process, in the order of their starts.
pub type Id = usize;

struct Process {
    role: String,
    child: Child,
    orders: Option<ChildStdin>,
    /// Its last event of each name.
    said: Value,
    is_killed: bool,
    has_ended: bool,
}

impl Process {
    fn how_it_ended(&self, status: ExitStatus) -> String {
        let (role, pid) = (&self.role, self.child.id());
        format!("{role} (process {pid}) {}", process::ending(status))
    }
}

/// The processes, and what they have shown so far. Dropped, it kills and reaps those that are left.
pub struct Stage<'a> {
    pub args: &'a DemoArgs,
    pub chosen: &'a ChosenDevice,
    pub is_mps: bool,
    output: Output,
    interrupt: &'a Interrupt,
    pub domain: PathBuf,
    processes: Vec<Process>,
    /// Events of all processes; of one that has ended, none.
    events: Receiver<(Id, Option<Value>)>,
    sender: Sender<(Id, Option<Value>)>,
    /// When the last kill was, in nanoseconds of `CLOCK_MONOTONIC`.
    killed_ns: u64,
    claims: Vec<Value>,
    /// The last line for programs.
    result: Value,
    started: Instant,
}

impl<'a> Stage<'a> {
    /// Nothing has been started.
    pub fn new(
        args: &'a DemoArgs,
        chosen: &'a ChosenDevice,
        interrupt: &'a Interrupt,
        folder: &Path,
    ) -> Stage<'a> {
        let (sender, events) = channel();
        Stage {
            args,
            chosen,
            is_mps: chosen.device.info().id.kind == DeviceKind::Cuda && mps_answers(),
            output: Output::new(args.json),
            interrupt,
            domain: folder.join("domain"),
            processes: Vec::new(),
            events,
            sender,
            killed_ns: 0,
            claims: Vec::new(),
            result: json!({ "event": "result" }),
            started: Instant::now(),
        }
    }

    /// The size of each tensor.
    pub fn item_bytes(&self) -> u64 {
        self.args.megabytes << 20
    }

    /// Whether processes are killed in the middle of work of the device. Under MPS that would end
    /// all others.
    pub fn is_busy(&self) -> bool {
        !self.is_mps && !self.args.idle
    }

    /// Starts this program again, in the demo's domain.
    pub fn start(&mut self, command: &str, role: &str) -> anyhow::Result<Id> {
        let mut child = process::child_of_this(command)
            .arg(format!("--device={}", DeviceArg::of(&self.chosen.device)))
            .arg(format!("--subscribers={}", self.args.subscribers))
            .arg(format!("--item-bytes={}", self.item_bytes()))
            .args(self.args.plant.iter().map(|it| format!("--plant={it}")))
            .env("WARPIPE_DOMAIN", &self.domain)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start the {role}"))?;
        let (id, sender) = (self.processes.len(), self.sender.clone());
        let (out, orders, pid) = (child.stdout.take(), child.stdin.take(), child.id());
        // From here on the child is reaped whatever happens next.
        self.processes.push(Process {
            role: role.to_owned(),
            child,
            orders,
            said: json!({}),
            is_killed: false,
            has_ended: false,
        });
        let thread = std::thread::Builder::new().name("demo-events".into());
        thread.spawn(move || {
            let lines = out.into_iter().flat_map(|out| BufReader::new(out).lines());
            let events = lines.map_while(|line| serde_json::from_str(&line.ok()?).ok());
            events
                .map(Some)
                .chain([None])
                .try_for_each(|event| sender.send((id, event)))
        })?;
        let started = json!({ "event": "started", "role": role, "pid": pid });
        self.output.json_only(&started)?;
        Ok(id)
    }

    /// A process's number.
    pub fn pid(&self, id: Id) -> u32 {
        self.processes[id].child.id()
    }

    /// A process's role: `publisher`, `subscriber 1`.
    pub fn role(&self, id: Id) -> String {
        self.processes[id].role.clone()
    }

    /// Gives an order. If the process has ended, the next wait says so.
    pub fn order(&mut self, id: Id, order: &str) {
        if let Some(orders) = &mut self.processes[id].orders {
            let _ = orders.write_all(format!("{order}\n").as_bytes());
        }
    }

    /// SIGKILL.
    pub fn kill(&mut self, id: Id) -> anyhow::Result<()> {
        let process = &mut self.processes[id];
        process.is_killed = true;
        self.killed_ns = clock::now_ns();
        let killed = process.child.kill();
        killed.with_context(|| format!("cannot kill the {}", process.role))
    }

    /// A line about something that happened after the last kill, and how many milliseconds after.
    pub fn moment(&self, at_ns: u64, text: impl fmt::Display) -> anyhow::Result<f64> {
        let ms = at_ns.saturating_sub(self.killed_ns) as f64 / 1e6;
        self.line(format_args!("   {ms:>8.2} ms  {text}"))?;
        Ok(ms)
    }

    /// Waits until a killed process has ended.
    pub fn reap(&mut self, id: Id) -> anyhow::Result<()> {
        process::end(&mut self.processes[id].child, END_PATIENCE)?;
        Ok(())
    }

    /// The last event of this name of a process; null without one.
    pub fn said(&self, id: Id, event: &str) -> &Value {
        &self.processes[id].said[event]
    }

    /// Waits until a process has an event of this name.
    ///
    /// # Errors
    /// A process that ends meanwhile, an interrupt, or nothing within all patience.
    pub fn wait(&mut self, id: Id, event: &str) -> anyhow::Result<Value> {
        self.wait_for(id, event, |_| true)
    }

    /// As [`wait`](Self::wait): when that was.
    pub fn time_of(&mut self, id: Id, event: &str) -> anyhow::Result<u64> {
        Ok(number(&self.wait(id, event)?, "at_ns"))
    }

    /// As [`wait`](Self::wait), for an event that `is_it` accepts.
    pub fn wait_for(
        &mut self,
        id: Id,
        event: &str,
        is_it: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<Value> {
        let deadline = Instant::now() + 2 * PATIENCE + self.args.seconds;
        loop {
            let said = self.said(id, event);
            if !said.is_null() && is_it(said) {
                return Ok(said.clone());
            }
            if self.interrupt.came() {
                return Err(io::Error::from(io::ErrorKind::Interrupted).into());
            }
            let (role, is_late) = (&self.processes[id].role, Instant::now() > deadline);
            ensure!(!is_late, "{role} did not say {event:?} in time");
            if let Some(process) = self.take_event().map(|id| &mut self.processes[id])
                && process.has_ended
                && !process.is_killed
            {
                let status = process::end(&mut process.child, END_PATIENCE)?;
                bail!(process.how_it_ended(status));
            }
        }
    }

    /// Waits a while for an event of any process, and says of which.
    fn take_event(&mut self) -> Option<Id> {
        let (id, event) = self.events.recv_timeout(LOOK).ok()?;
        let process = &mut self.processes[id];
        match event {
            Some(event) => process.said[event["event"].as_str()?] = event.clone(),
            None => process.has_ended = true,
        }
        Some(id)
    }

    /// The sum of a count over all subscribers that there were.
    pub fn total(&self, count: &str) -> u64 {
        let ids = 0..self.processes.len();
        ids.map(|id| number(self.said(id, "counts"), count)).sum()
    }

    /// Records a claim, and `detail` for the case that it does not hold.
    pub fn claim(&mut self, claim: &str, holds: bool, detail: String) {
        let claim = json!({ "claim": claim, "holds": holds, "detail": detail });
        self.claims.push(claim);
    }

    /// A line for people.
    pub fn line(&self, text: impl fmt::Display) -> anyhow::Result<()> {
        Ok(self.output.human(|| text.to_string())?)
    }

    /// An event for programs.
    pub fn tell(&self, event: &Value) -> anyhow::Result<()> {
        Ok(self.output.json_only(event)?)
    }

    /// The figures of a part, for programs.
    pub fn figures(&mut self, figures: Value) -> anyhow::Result<()> {
        self.tell(&figures)?;
        self.result[figures["event"].as_str().unwrap_or_default()] = figures.clone();
        Ok(())
    }

    /// Orders all processes to end, and waits until they have.
    ///
    /// # Errors
    /// One that does not end, or ends with a fault.
    pub fn end_all(&mut self) -> anyhow::Result<()> {
        for process in &mut self.processes {
            process.orders = None;
        }
        let deadline = Instant::now() + END_PATIENCE;
        while self.processes.iter().any(|it| !it.has_ended) && Instant::now() < deadline {
            self.take_event();
        }
        for process in &mut self.processes {
            let status = process::end(&mut process.child, LOOK)?;
            let is_due = match process.is_killed {
                true => status.signal() == Some(9),
                false => status.success(),
            };
            ensure!(is_due, process.how_it_ended(status));
        }
        Ok(())
    }

    /// Kills those that are left, and says whether all claims hold.
    pub fn finish(mut self, ending: anyhow::Result<()>) -> anyhow::Result<Exit> {
        let (mut failures, mut interrupted) = (Vec::new(), false);
        match ending {
            Err(error) if exit::is_closed_pipe(&error) => return Err(error),
            Err(error) if exit::is_interrupted(&error) => interrupted = true,
            Err(error) => failures.push(format!("{error:#}")),
            Ok(()) => {}
        }
        for claim in self.claims.iter().filter(|claim| claim["holds"] == false) {
            let text = |key: &str| claim[key].as_str().unwrap_or_default();
            failures.push(format!("not true: {}: {}", text("claim"), text("detail")));
        }
        let ok = failures.is_empty() && !interrupted;
        let figures = json!({
            "ok": ok, "interrupted": interrupted, "failures": failures, "claims": self.claims,
            "device": self.chosen.device.to_string(), "why": self.chosen.why, "mps": self.is_mps,
            "subscribers": self.args.subscribers, "item_bytes": self.item_bytes(),
            "seconds": self.started.elapsed().as_secs_f64(), "verified": self.total("verified"),
            "wrong": self.total("wrong"), "gaps": self.total("gaps"), "lost": self.total("lost"),
        });
        for (name, figure) in figures.as_object().into_iter().flatten() {
            self.result[name] = figure.clone();
        }
        self.output
            .say(|| self.verdict(&failures, interrupted), &self.result)?;
        Ok(match (interrupted, ok) {
            (true, _) => Exit::Interrupted,
            (false, true) => Exit::Done,
            (false, false) => Exit::Failed,
        })
    }

    fn verdict(&self, failures: &[String], interrupted: bool) -> String {
        let failed = |failure| styled(Style::Red, &format!("failed: {failure}"));
        let mut lines: Vec<_> = failures.iter().map(failed).collect();
        if interrupted {
            let text = "interrupted: every process was ended, every file removed";
            lines.push(styled(Style::Yellow, text));
        } else if lines.is_empty() {
            let verified = count(self.total("verified"));
            let done =
                format!("{verified} items verified, every word right, two processes killed,");
            let left = "nothing lost that was complete, nothing left over";
            let taken = format!("{} in all", duration(self.started.elapsed()));
            lines.extend([&done, left].map(|text| styled(Style::Green, text)));
            lines.push(styled(Style::Dim, &taken));
        }
        format!("\n{}", lines.join("\n"))
    }
}

impl Drop for Stage<'_> {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
    }
}

/// A number of an event; 0 if it has none of this name.
pub fn number(event: &Value, name: &str) -> u64 {
    event[name].as_u64().unwrap_or(0)
}
