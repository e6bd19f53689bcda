//! What all parts of the demo share: its processes, its output, its claims.

use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::{Map, Value, json};
use warpipe::{DeviceKind, clock};

use super::{PATIENCE, Plant};
use crate::args::DemoArgs;
use crate::device_arg::{ChosenDevice, DeviceArg};
use crate::doctor::system::mps_answers;
use crate::exit::Exit;
use crate::interrupt::{Interrupt, LOOK};
use crate::output::{Output, Style, count, duration, styled};
use crate::process;

/// The time limit of processes that were ordered to end.
const END_PATIENCE: Duration = Duration::from_secs(15);

/// Ctrl-C, which is no failure.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
struct Interrupted;

/// Which process, in the order of their starts.
pub type Id = usize;

struct Process {
    role: String,
    child: Child,
    orders: Option<ChildStdin>,
    events: Receiver<Value>,
    /// Events that were not asked for yet.
    kept: Vec<Value>,
    /// The demo has killed it, or has reported its end.
    end_is_known: bool,
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
    pub device: String,
    choice: DeviceArg,
    pub why: String,
    pub is_mps: bool,
    output: Output,
    interrupt: &'a Interrupt,
    pub domain: PathBuf,
    processes: Vec<Process>,
    /// The last counts of each subscriber: verified, wrong, gaps, lost.
    counts: Map<String, Value>,
    claims: Vec<Value>,
    figures: Map<String, Value>,
    started: Instant,
}

impl<'a> Stage<'a> {
    /// Nothing has been started.
    pub fn new(
        args: &'a DemoArgs,
        chosen: &ChosenDevice,
        output: Output,
        interrupt: &'a Interrupt,
        folder: &Path,
    ) -> Stage<'a> {
        Stage {
            args,
            device: chosen.device.to_string(),
            choice: DeviceArg::of(&chosen.device),
            why: chosen.why.clone(),
            is_mps: chosen.device.info().id.kind == DeviceKind::Cuda && mps_answers(),
            output,
            interrupt,
            domain: folder.join("domain"),
            processes: Vec::new(),
            counts: Map::new(),
            claims: Vec::new(),
            figures: Map::new(),
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

    /// Starts a publisher that waits for all subscribers.
    pub fn start_publisher(&mut self) -> anyhow::Result<Id> {
        self.start("publisher", "demo-publisher")
    }

    /// Starts the subscriber of this number.
    pub fn start_subscriber(&mut self, number: u32) -> anyhow::Result<Id> {
        self.start(&format!("subscriber {number}"), "demo-subscriber")
    }

    /// Starts this program again, in the demo's domain.
    fn start(&mut self, role: &str, command: &str) -> anyhow::Result<Id> {
        let plant = self.args.plant.as_ref();
        let plant = plant.and_then(clap::ValueEnum::to_possible_value);
        let mut child = process::child_of_this(command)
            .arg(format!("--device={}", self.choice))
            .arg(format!("--subscribers={}", self.args.subscribers))
            .arg(format!("--item-bytes={}", self.item_bytes()))
            .args(plant.map(|plant| format!("--plant={}", plant.get_name())))
            .env("WARPIPE_DOMAIN", &self.domain)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start the {role}"))?;
        let (sender, events) = channel();
        let (out, orders, pid) = (child.stdout.take(), child.stdin.take(), child.id());
        // From here on the child is reaped whatever happens next.
        self.processes.push(Process {
            role: role.to_owned(),
            child,
            orders,
            events,
            kept: Vec::new(),
            end_is_known: false,
        });
        std::thread::Builder::new()
            .name("demo-events".into())
            .spawn(move || {
                let lines = BufReader::new(out.into_iter().next()?)
                    .lines()
                    .map_while(Result::ok);
                lines
                    .filter_map(|line| serde_json::from_str(&line).ok())
                    .try_for_each(|event| sender.send(event).ok())
            })?;
        self.output
            .json_only(&json!({ "event": "started", "role": role, "pid": pid }))?;
        Ok(self.processes.len() - 1)
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

    /// SIGKILL. When, in nanoseconds of `CLOCK_MONOTONIC`, just before the call.
    pub fn kill(&mut self, id: Id) -> anyhow::Result<u64> {
        let process = &mut self.processes[id];
        process.end_is_known = true;
        let at_ns = clock::now_ns();
        let killed = process.child.kill();
        killed.with_context(|| format!("cannot kill the {}", process.role))?;
        Ok(at_ns)
    }

    /// Waits until a killed process has ended.
    pub fn reap(&mut self, id: Id) -> anyhow::Result<()> {
        process::end(&mut self.processes[id].child, END_PATIENCE)?;
        Ok(())
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

    /// As [`wait`](Self::wait), for an event that `is_it` accepts. All others are kept for later calls.
    pub fn wait_for(
        &mut self,
        id: Id,
        event: &str,
        mut is_it: impl FnMut(&Value) -> bool,
    ) -> anyhow::Result<Value> {
        let deadline = Instant::now() + 2 * PATIENCE + self.args.seconds;
        let mut looked = 0;
        loop {
            let Process {
                kept, events, role, ..
            } = &mut self.processes[id];
            while looked < kept.len() {
                if kept[looked]["event"] == event && is_it(&kept[looked]) {
                    return Ok(kept.remove(looked));
                }
                looked += 1;
            }
            if self.interrupt.came() {
                return Err(Interrupted.into());
            }
            ensure!(
                Instant::now() < deadline,
                "{role} did not say {event:?} in time"
            );
            let found = events.recv_timeout(LOOK);
            let awaited = found.is_ok().then_some(id);
            if let Ok(found) = found {
                self.keep(id, found);
            }
            self.look_for_ends(awaited)?;
        }
    }

    /// A subscriber's counts replace those before in the totals.
    fn keep(&mut self, id: Id, event: Value) {
        if event["event"] == "counts" {
            self.counts.insert(id.to_string(), event.clone());
        }
        self.processes[id].kept.push(event);
    }

    /// Fails if a process has ended by itself. Of the `awaited` one, all events are taken first.
    fn look_for_ends(&mut self, awaited: Option<Id>) -> anyhow::Result<()> {
        for (id, process) in self.processes.iter_mut().enumerate() {
            if process.end_is_known || awaited == Some(id) {
                continue;
            }
            if let Some(status) = process.child.try_wait()? {
                process.end_is_known = true;
                bail!(process.how_it_ended(status));
            }
        }
        Ok(())
    }

    /// The sum of a count over all subscribers that there were.
    pub fn total(&self, count: &str) -> u64 {
        let counts = self.counts.values();
        counts.map(|counts| number(counts, count)).sum()
    }

    /// Records a claim, and `detail` for the case that it does not hold.
    pub fn claim(&mut self, claim: &str, holds: bool, detail: impl FnOnce() -> String) {
        let detail = if holds { String::new() } else { detail() };
        self.claims
            .push(json!({ "claim": claim, "holds": holds, "detail": detail }));
    }

    /// A line for people.
    pub fn line(&self, text: impl fmt::Display) -> anyhow::Result<()> {
        Ok(self.output.human(|| text.to_string())?)
    }

    /// An event for programs.
    pub fn tell(&self, event: Value) -> anyhow::Result<()> {
        Ok(self.output.json_only(&event)?)
    }

    /// The figures of a part, for programs.
    pub fn figures(&mut self, figures: Value) -> anyhow::Result<()> {
        self.output.json_only(&figures)?;
        let name = figures["event"].as_str().unwrap_or_default().to_owned();
        self.figures.insert(name, figures);
        Ok(())
    }

    /// Orders all processes to end, and waits until they have.
    ///
    /// # Errors
    /// One that does not end, or ends with a fault.
    pub fn end_all(&mut self) -> anyhow::Result<()> {
        self.processes
            .iter_mut()
            .for_each(|process| process.orders = None);
        let mut failures = Vec::new();
        for process in &mut self.processes {
            let status = process::end(&mut process.child, END_PATIENCE)?;
            if !status.success() && !process.end_is_known {
                failures.push(process.how_it_ended(status));
            }
        }
        for id in 0..self.processes.len() {
            while let Ok(event) = self.processes[id].events.recv() {
                self.keep(id, event);
            }
        }
        ensure!(failures.is_empty(), "{}", failures.join("; "));
        Ok(())
    }

    /// What each process that was not killed says that it left over, by its role; none where it said
    /// nothing.
    pub fn leftovers(&self) -> Vec<(String, Option<Value>)> {
        let said = |process: &Process| {
            let left = process.kept.iter().find(|event| event["event"] == "left");
            (process.role.clone(), left.cloned())
        };
        let ended = self.processes.iter().filter(|it| !it.end_is_known);
        ended.map(said).collect()
    }

    /// How many processes ended by SIGKILL.
    pub fn killed(&mut self) -> usize {
        let ended = self.processes.iter_mut();
        let ended = ended.filter_map(|process| process.child.try_wait().ok()?);
        ended.filter(|status| status.signal() == Some(9)).count()
    }

    /// Ends those that are left, and says whether all claims hold.
    pub fn finish(mut self, ending: anyhow::Result<()>) -> anyhow::Result<Exit> {
        let mut failures = Vec::new();
        let mut interrupted = false;
        if let Err(error) = ending {
            if crate::exit::is_closed_pipe(&error) {
                return Err(error);
            }
            interrupted = error.is::<Interrupted>();
            failures.extend((!interrupted).then(|| format!("{error:#}")));
            failures.extend(self.end_all().err().map(|error| format!("{error:#}")));
        }
        for claim in self.claims.iter().filter(|claim| claim["holds"] == false) {
            let text = |key: &str| claim[key].as_str().unwrap_or_default();
            failures.push(format!("not true: {}: {}", text("claim"), text("detail")));
        }
        let ok = failures.is_empty() && !interrupted;
        let mut result = json!({
            "event": "result", "ok": ok, "interrupted": interrupted, "device": self.device, "why": self.why,
            "mps": self.is_mps, "subscribers": self.args.subscribers, "item_bytes": self.item_bytes(),
            "seconds": self.started.elapsed().as_secs_f64(), "claims": self.claims, "failures": failures,
        });
        if let Some(result) = result.as_object_mut() {
            for name in ["verified", "wrong", "gaps", "lost"] {
                result.insert(name.into(), self.total(name).into());
            }
            result.extend(self.figures.clone());
        }
        self.output
            .say(|| self.verdict(&failures, interrupted), &result)?;
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

    /// Whether the tests have planted this fault.
    pub fn is_planted(&self, plant: Plant) -> bool {
        self.args.plant == Some(plant)
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

/// The events after a kill: lines in the order of their times.
pub struct Timeline {
    killed_ns: u64,
    lines: Vec<(u64, String)>,
}

impl Timeline {
    /// Nothing yet.
    pub fn new(killed_ns: u64) -> Timeline {
        Timeline {
            killed_ns,
            lines: Vec::new(),
        }
    }

    /// Milliseconds from the kill to a time.
    pub fn ms(&self, at_ns: u64) -> f64 {
        at_ns.saturating_sub(self.killed_ns) as f64 / 1e6
    }

    /// Something that happened then.
    pub fn add(&mut self, at_ns: u64, text: impl fmt::Display) {
        self.lines.push((at_ns, text.to_string()));
    }

    /// Prints what has come since the last call.
    pub fn print(&mut self, stage: &Stage) -> anyhow::Result<()> {
        let mut lines = std::mem::take(&mut self.lines);
        lines.sort();
        lines.iter().try_for_each(|(at_ns, text)| {
            stage.line(format_args!("   {:>8.2} ms  {text}", self.ms(*at_ns)))
        })
    }
}
