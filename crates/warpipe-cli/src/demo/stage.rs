//! What all parts of the demo share: its processes, its output, its claims.

use std::fmt;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::{Map, Value, json};
use warpipe::{DeviceKind, clock};

use super::PATIENCE;
use crate::args::DemoArgs;
use crate::device_arg::{ChosenDevice, DeviceArg};
use crate::doctor::system::mps_answers;
use crate::exit::{self, Exit};
use crate::interrupt::{self, LOOK};
use crate::output::{Output, Style, count, duration, styled};
use crate::process::{self, Reaped};

/// The time limit of processes that were ordered to end.
const END_PATIENCE: Duration = Duration::from_secs(15);

type Facts = Map<String, Value>;

/// Which process, in the order of their starts.
pub type Id = usize;

struct Process {
    role: String,
    child: Reaped,
    orders: Option<ChildStdin>,
    /// What it has reported: facts by their names, each as it was said last.
    facts: Facts,
    is_killed: bool,
    has_ended: bool,
}

impl Process {
    fn how_it_ended(&self, status: ExitStatus) -> String {
        let (role, pid) = (&self.role, self.child.0.id());
        format!("{role} (process {pid}) {}", process::ending(status))
    }
}

/// The processes, and what they have shown so far. Those that are left are killed with it.
pub struct Stage<'a> {
    pub args: &'a DemoArgs,
    pub chosen: &'a ChosenDevice,
    pub is_mps: bool,
    pub output: Output,
    pub domain: PathBuf,
    processes: Vec<Process>,
    /// The publisher and the subscribers that are now.
    pub publisher: Id,
    pub subscribers: Vec<Id>,
    /// What all processes report; none from one that has ended.
    reports: Receiver<(Id, Option<Facts>)>,
    sender: Sender<(Id, Option<Facts>)>,
    /// When the last kill was, in nanoseconds of `CLOCK_MONOTONIC`.
    killed_ns: u64,
    claims: Vec<Value>,
    /// The last line for programs.
    result: Value,
    started: Instant,
}

impl<'a> Stage<'a> {
    /// Nothing has been started.
    pub fn new(args: &'a DemoArgs, chosen: &'a ChosenDevice, folder: &Path) -> Stage<'a> {
        let (sender, reports) = channel();
        Stage {
            args,
            chosen,
            is_mps: chosen.device.info().id.kind == DeviceKind::Cuda && mps_answers(),
            output: Output::new(args.json),
            domain: folder.join("domain"),
            processes: Vec::new(),
            publisher: 0,
            subscribers: Vec::new(),
            reports,
            sender,
            killed_ns: 0,
            claims: Vec::new(),
            result: json!({ "event": "result" }),
            started: Instant::now(),
        }
    }

    /// Whether processes are killed in the middle of work of the device. Under MPS that would end
    /// all others.
    pub fn is_busy(&self) -> bool {
        !self.is_mps && !self.args.idle
    }

    /// Starts one more subscriber.
    pub fn start_subscriber(&mut self) -> anyhow::Result<()> {
        let role = format!("subscriber {}", self.subscribers.len() + 1);
        let id = self.start("demo-subscriber", &role)?;
        self.subscribers.push(id);
        Ok(())
    }

    /// Starts this program again, in the demo's domain.
    pub fn start(&mut self, command: &str, role: &str) -> anyhow::Result<Id> {
        let mut child = process::child_of_this(command)
            .arg(format!("--device={}", DeviceArg::of(&self.chosen.device)))
            .arg(format!("--subscribers={}", self.args.subscribers))
            .arg(format!("--megabytes={}", self.args.megabytes))
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
            child: Reaped(child),
            orders,
            facts: Facts::new(),
            is_killed: false,
            has_ended: false,
        });
        let thread = std::thread::Builder::new().name("demo-reports".into());
        thread.spawn(move || {
            let lines = out.into_iter().flat_map(|out| BufReader::new(out).lines());
            let reports = lines.map_while(|line| serde_json::from_str(&line.ok()?).ok());
            let mut reports = reports.map(Some).chain([None]);
            reports.try_for_each(|report| sender.send((id, report)))
        })?;
        let started = json!({ "event": "started", "role": role, "pid": pid });
        self.output.json_only(&started)?;
        Ok(id)
    }

    /// A process's number.
    pub fn pid(&self, id: Id) -> u32 {
        self.processes[id].child.0.id()
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
        let killed = process.child.0.kill();
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
        process::end(&mut self.processes[id].child.0, END_PATIENCE)?;
        Ok(())
    }

    /// A fact that a process has reported; null before.
    pub fn said(&self, id: Id, fact: &str) -> &Value {
        self.processes[id].facts.get(fact).unwrap_or(&Value::Null)
    }

    /// As [`said`](Self::said), for a number; 0 before.
    pub fn number(&self, id: Id, fact: &str) -> u64 {
        self.said(id, fact).as_u64().unwrap_or(0)
    }

    /// Waits until a process has reported a number other than 0.
    ///
    /// # Errors
    /// A process that ends meanwhile, an interrupt, or nothing within all patience.
    pub fn wait(&mut self, id: Id, fact: &str) -> anyhow::Result<u64> {
        self.wait_until(id, fact, |number| number > 0)
    }

    /// As [`wait`](Self::wait), for a time, with a line about it. How many milliseconds it was
    /// after the kill.
    pub fn wait_ms(&mut self, id: Id, fact: &str, text: &str) -> anyhow::Result<f64> {
        let at_ns = self.wait(id, fact)?;
        self.moment(at_ns, text)
    }

    /// As [`wait`](Self::wait), for a number that `is_it` accepts.
    pub fn wait_until(
        &mut self,
        id: Id,
        fact: &str,
        is_it: impl Fn(u64) -> bool,
    ) -> anyhow::Result<u64> {
        let deadline = Instant::now() + 2 * PATIENCE + self.args.seconds;
        while !is_it(self.number(id, fact)) {
            if interrupt::came() {
                return Err(io::Error::from(io::ErrorKind::Interrupted).into());
            }
            let (role, is_late) = (&self.processes[id].role, Instant::now() > deadline);
            ensure!(!is_late, "{role} did not say {fact} in time");
            let ended = self.take_report().map(|id| &mut self.processes[id]);
            if let Some(process) = ended.filter(|it| it.has_ended && !it.is_killed) {
                let status = process::end(&mut process.child.0, END_PATIENCE)?;
                bail!(process.how_it_ended(status));
            }
        }
        Ok(self.number(id, fact))
    }

    /// Waits a while for a report of any process, and says of which.
    fn take_report(&mut self) -> Option<Id> {
        let (id, report) = self.reports.recv_timeout(LOOK).ok()?;
        match report {
            Some(facts) => self.processes[id].facts.extend(facts),
            None => self.processes[id].has_ended = true,
        }
        Some(id)
    }

    /// The sum of a count over all subscribers that there were.
    pub fn total(&self, count: &str) -> u64 {
        let all = 0..self.processes.len();
        all.map(|id| self.number(id, count)).sum()
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

    /// The figures of a part, for programs.
    pub fn figures(&mut self, figures: Value) -> anyhow::Result<()> {
        self.output.json_only(&figures)?;
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
        for process in &mut self.processes {
            let status = process::end(&mut process.child.0, END_PATIENCE)?;
            let is_due = match process.is_killed {
                true => status.signal() == Some(9),
                false => status.success(),
            };
            ensure!(is_due, process.how_it_ended(status));
        }
        while self.processes.iter().any(|process| !process.has_ended) {
            self.take_report();
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
            "subscribers": self.args.subscribers, "item_bytes": self.args.item_bytes(),
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
            lines.extend([&done, left].map(|text| styled(Style::Green, text)));
            lines.push(format!("{} in all", duration(self.started.elapsed())));
        }
        format!("\n{}", lines.join("\n"))
    }
}
