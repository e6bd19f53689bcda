//! The common state of all parts of the demo: the processes, the output, the claims.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Map, Value, json};
use warpipe::DeviceKind;

use super::processes::{Id, Processes};
use super::protocol::{Counts, Event, Order};
use super::{ITEM_PATIENCE, Plant, START_PATIENCE};
use crate::args::DemoArgs;
use crate::device_arg::{ChosenDevice, DeviceArg};
use crate::doctor::system::mps_answers;
use crate::exit::Exit;
use crate::interrupt::{Interrupt, LOOK};
use crate::output::{Output, Style, count, duration, styled};

/// The time limit of processes that were ordered to end.
const END_PATIENCE: Duration = Duration::from_secs(15);

/// Ctrl-C, which is no failure.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
struct Interrupted;

/// A claim of the demo, and whether it holds.
#[derive(Debug, Serialize)]
pub struct Claim {
    pub claim: &'static str,
    pub holds: bool,
    pub detail: String,
}

/// A publisher and its subscribers, and their counts so far.
pub struct Stage<'a> {
    pub args: &'a DemoArgs,
    pub device: String,
    choice: DeviceArg,
    pub why: String,
    pub is_mps: bool,
    output: Output,
    interrupt: &'a Interrupt,
    pub folder: PathBuf,
    processes: Processes,
    /// The publisher that is now.
    pub publisher: Id,
    /// The subscribers that are now.
    pub subscribers: Vec<Id>,
    /// The last counts of each process that has some.
    counts: Vec<(Id, Counts)>,
    /// Processes that ended by SIGKILL.
    pub killed: u32,
    /// Resources that are left over.
    pub left: Vec<String>,
    claims: Vec<Claim>,
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
            folder: folder.to_owned(),
            processes: Processes::new(),
            publisher: 0,
            subscribers: Vec::new(),
            counts: Vec::new(),
            killed: 0,
            left: Vec::new(),
            claims: Vec::new(),
            figures: Map::new(),
            started: Instant::now(),
        }
    }

    /// The size of each tensor.
    pub fn item_bytes(&self) -> u64 {
        self.args.megabytes << 20
    }

    /// The domain of all processes.
    pub fn domain(&self) -> PathBuf {
        self.folder.join("domain")
    }

    /// Whether processes are killed in the middle of work of the device. Under MPS that would end
    /// all others.
    pub fn is_busy(&self) -> bool {
        !self.is_mps && !self.args.idle
    }

    /// Starts a publisher that waits for so many subscribers.
    pub fn start_publisher(&mut self, subscribers: usize) -> anyhow::Result<Id> {
        self.start("publisher", "demo-publisher", subscribers)
    }

    /// Starts the subscriber of this number.
    pub fn start_subscriber(&mut self, number: usize) -> anyhow::Result<Id> {
        self.start(&format!("subscriber {number}"), "demo-subscriber", 0)
    }

    fn start(&mut self, role: &str, command: &str, subscribers: usize) -> anyhow::Result<Id> {
        let mut arguments = vec![
            command.to_owned(),
            format!("--parent={}", std::process::id()),
            format!("--device={}", self.choice),
            format!("--subscribers={subscribers}"),
            format!("--item-bytes={}", self.item_bytes()),
        ];
        let plant = self
            .args
            .plant
            .and_then(|plant| clap::ValueEnum::to_possible_value(&plant));
        arguments.extend(plant.map(|plant| format!("--plant={}", plant.get_name())));
        let id = self.processes.start(role, &self.domain(), &arguments)?;
        self.tell_started(role, self.pid(id))?;
        Ok(id)
    }

    /// For the JSON output: a process was started.
    pub fn tell_started(&self, role: &str, pid: u32) -> anyhow::Result<()> {
        Ok(self
            .output
            .json_only(&json!({ "event": "started", "role": role, "pid": pid }))?)
    }

    /// A process's number.
    pub fn pid(&self, id: Id) -> u32 {
        self.processes.of(id).pid
    }

    /// A process's role.
    pub fn role(&self, id: Id) -> String {
        self.processes.of(id).role.clone()
    }

    /// The subscribers without one of them.
    pub fn others(&self, without: Id) -> Vec<Id> {
        self.subscribers
            .iter()
            .copied()
            .filter(|&id| id != without)
            .collect()
    }

    /// Whether the tests have planted this fault.
    pub fn is_planted(&self, plant: Plant) -> bool {
        self.args.plant == Some(plant)
    }

    /// Gives an order.
    pub fn order(&mut self, id: Id, order: &Order) -> anyhow::Result<()> {
        self.processes.order(id, order)
    }

    /// SIGKILL. When.
    pub fn kill(&mut self, id: Id) -> anyhow::Result<u64> {
        self.processes.kill(id)
    }

    /// Waits until a process has an event that `pick` accepts.
    ///
    /// # Errors
    /// A process that ends meanwhile, an interrupt, or nothing within all patience.
    pub fn wait<T>(
        &mut self,
        id: Id,
        what: &str,
        mut pick: impl FnMut(&Event) -> Option<T>,
    ) -> anyhow::Result<T> {
        let deadline = Instant::now() + START_PATIENCE + ITEM_PATIENCE + self.args.seconds;
        loop {
            if let Some(found) = self.processes.take(id, &mut pick) {
                return Ok(found);
            }
            if self.interrupt.came() {
                return Err(Interrupted.into());
            }
            anyhow::ensure!(
                Instant::now() < deadline,
                "{} did not say: {what}",
                self.processes.named(id)
            );
            self.processes.listen(LOOK)?;
        }
    }

    /// Waits until processes are ready.
    pub fn wait_ready(&mut self, ids: &[Id]) -> anyhow::Result<()> {
        ids.iter().try_for_each(|&id| {
            self.wait(id, "it is ready", |event| {
                (*event == Event::Ready).then_some(())
            })
        })
    }

    /// Keeps a process's counts.
    pub fn record(&mut self, id: Id, counts: Counts) {
        self.counts.retain(|(known, _)| *known != id);
        self.counts.push((id, counts));
    }

    /// All counts of all processes together.
    pub fn total(&self) -> Counts {
        self.counts
            .iter()
            .fold(Counts::default(), |sum, (_, counts)| Counts {
                verified: sum.verified + counts.verified,
                wrong: sum.wrong + counts.wrong,
                gaps: sum.gaps + counts.gaps,
                lost: sum.lost + counts.lost,
                last_ns: sum.last_ns.max(counts.last_ns),
            })
    }

    /// Records a claim, and `detail` for the case that it does not hold.
    pub fn claim(&mut self, claim: &'static str, holds: bool, detail: impl FnOnce() -> String) {
        let detail = if holds { String::new() } else { detail() };
        self.claims.push(Claim {
            claim,
            holds,
            detail,
        });
    }

    /// A line for people.
    pub fn line(&self, text: impl fmt::Display) -> anyhow::Result<()> {
        Ok(self.output.human(|| text.to_string())?)
    }

    /// An event that a process has sent and `pick` accepts, if there is one yet.
    pub fn take<T>(&mut self, id: Id, pick: impl FnMut(&Event) -> Option<T>) -> Option<T> {
        self.processes.take(id, pick)
    }

    /// The figures of a part, for programs.
    pub fn figures(&mut self, event: &'static str, figures: Value) -> anyhow::Result<()> {
        let mut line = Map::from_iter([("event".to_owned(), Value::from(event))]);
        line.extend(figures.as_object().cloned().unwrap_or_default());
        self.output.json_only(&line)?;
        if event != "demo" {
            self.figures.insert(event.to_owned(), figures);
        }
        Ok(())
    }

    /// Orders all processes to end, and waits until they have. Returns their last events.
    pub fn end_all(&mut self) -> anyhow::Result<Vec<(Id, Event)>> {
        let living = self.processes.living();
        self.processes.end();
        let deadline = Instant::now() + END_PATIENCE;
        while !self.processes.living().is_empty() {
            if Instant::now() > deadline {
                self.processes.kill_all();
                anyhow::bail!("the processes did not end in time and were killed");
            }
            self.processes.listen(LOOK)?;
        }
        self.killed = self.processes.reap_killed()?;
        let mut said = Vec::new();
        for id in living {
            while let Some(event) = self.processes.take(id, |event| Some(event.clone())) {
                said.push((id, event));
            }
        }
        Ok(said)
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
            // They may fail one after the other: each is named.
            while let Err(error) = self.end_all() {
                failures.push(format!("{error:#}"));
            }
        }
        failures.extend(
            self.claims
                .iter()
                .filter(|claim| !claim.holds)
                .map(|claim| {
                    let Claim { claim, detail, .. } = claim;
                    if detail.is_empty() {
                        format!("not true: {claim}")
                    } else {
                        format!("not true: {claim}: {detail}")
                    }
                }),
        );
        let ok = failures.is_empty() && !interrupted;
        self.output.say(
            || self.verdict(&failures, interrupted),
            &self.result(&failures, ok, interrupted),
        )?;
        Ok(match (interrupted, ok) {
            (true, _) => Exit::Interrupted,
            (false, true) => Exit::Done,
            (false, false) => Exit::Failed,
        })
    }

    fn verdict(&self, failures: &[String], interrupted: bool) -> String {
        let mut lines: Vec<_> = failures
            .iter()
            .map(|failure| styled(Style::Red, &format!("failed: {failure}")))
            .collect();
        if interrupted {
            lines.push(styled(
                Style::Yellow,
                "interrupted: every process was ended, every file removed",
            ));
        } else if lines.is_empty() {
            let text = format!(
                "{} items verified, every word right, {} processes killed,\n\
                 nothing lost that was complete, nothing left over",
                count(self.total().verified),
                self.killed
            );
            let green = text.lines().map(|line| styled(Style::Green, line));
            lines.push(green.collect::<Vec<_>>().join("\n"));
            lines.push(styled(
                Style::Dim,
                &format!("{} in all", duration(self.started.elapsed())),
            ));
        }
        format!("\n{}", lines.join("\n"))
    }

    fn result(&self, failures: &[String], ok: bool, interrupted: bool) -> Value {
        let total = self.total();
        let mut result = json!({
            "event": "result",
            "ok": ok,
            "interrupted": interrupted,
            "device": self.device,
            "why": self.why,
            "subscribers": self.args.subscribers,
            "item_bytes": self.item_bytes(),
            "seconds": self.started.elapsed().as_secs_f64(),
            "verified": total.verified,
            "wrong": total.wrong,
            "gaps": total.gaps,
            "lost": total.lost,
            "killed": self.killed,
            "left": self.left,
            "claims": self.claims,
            "failures": failures,
        });
        if let Some(result) = result.as_object_mut() {
            result.extend(self.figures.clone());
        }
        result
    }
}

/// The events after a kill: lines in the order of their times.
#[derive(Debug)]
pub struct Timeline {
    pub killed_ns: u64,
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
        self.lines
            .push((at_ns.saturating_sub(self.killed_ns), text.to_string()));
    }

    /// Prints what has come since the last call.
    pub fn print(&mut self, stage: &Stage) -> anyhow::Result<()> {
        self.lines.sort();
        self.lines.drain(..).try_for_each(|(since_ns, text)| {
            stage.line(format_args!("   {:>8.2} ms  {text}", since_ns as f64 / 1e6))
        })
    }
}
