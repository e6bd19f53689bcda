//! The demo's processes on their parent's side: started, ordered, read, killed and reaped.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use rustix::process::Signal;
use warpipe::clock;

use super::protocol::{Event, Order};
use crate::output::printable;
use crate::process;

/// The kept part of a child's standard error.
const STDERR_BYTES_MAX: u64 = 16 * 1024;
/// A child that has closed its output has nothing left to do.
const END_PATIENCE: Duration = Duration::from_secs(10);

/// Which process, in the order of their starts.
pub type Id = usize;

/// A line of a child.
enum Line {
    Event(Event),
    /// No event; a fault of this program.
    Garbled(String),
    Closed,
}

/// The end of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Lives,
    /// By the demo.
    Killed,
    Reaped,
}

/// One process.
#[derive(Debug)]
pub struct Process {
    /// For display: `publisher`, `subscriber 1`.
    pub role: String,
    pub pid: u32,
    /// Its events that were not asked for yet.
    said: VecDeque<Event>,
    child: Child,
    orders: Option<ChildStdin>,
    complaints: Option<JoinHandle<String>>,
    fate: Fate,
}

/// All processes of a demo. Dropping it kills and reaps those that are left.
#[derive(Debug)]
pub struct Processes {
    all: Vec<Process>,
    lines: Receiver<(Id, Line)>,
    sender: Sender<(Id, Line)>,
    /// Reaped ones that ended by SIGKILL.
    by_sigkill: u32,
}

impl Processes {
    /// None yet.
    pub fn new() -> Processes {
        let (sender, lines) = channel();
        Processes {
            all: Vec::new(),
            lines,
            sender,
            by_sigkill: 0,
        }
    }

    /// Starts one that lives in `domain`.
    pub fn start(&mut self, role: &str, domain: &Path, arguments: &[String]) -> anyhow::Result<Id> {
        let mut command = process::this_program();
        command.args(arguments).env("WARPIPE_DOMAIN", domain);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command
            .spawn()
            .with_context(|| format!("cannot start the {role}"))?;
        let (out, err, orders) = (child.stdout.take(), child.stderr.take(), child.stdin.take());
        let (id, pid) = (self.all.len(), child.id());
        // From here on the child is reaped whatever happens next.
        let (said, fate, role) = (VecDeque::new(), Fate::Lives, role.to_owned());
        self.all.push(Process {
            role,
            pid,
            said,
            child,
            orders,
            complaints: None,
            fate,
        });
        if let Some(out) = out {
            let sender = self.sender.clone();
            thread(move || listen(id, out, &sender))?;
        }
        if let Some(err) = err {
            self.all[id].complaints = Some(thread(move || keep(err))?);
        }
        Ok(id)
    }

    /// One of them.
    pub fn of(&self, id: Id) -> &Process {
        &self.all[id]
    }

    /// Gives an order. If the process has ended, its output reports that.
    pub fn order(&mut self, id: Id, order: &Order) -> anyhow::Result<()> {
        let Some(orders) = &mut self.all[id].orders else {
            return Ok(());
        };
        match orders.write_all((serde_json::to_string(order)? + "\n").as_bytes()) {
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
            written => Ok(written?),
        }
    }

    /// Takes in the next line of any process, waiting for it at most `limit`.
    ///
    /// # Errors
    /// A process that ended, and was neither killed nor ordered to end by the demo.
    pub fn listen(&mut self, limit: Duration) -> anyhow::Result<()> {
        match self.lines.recv_timeout(limit) {
            Ok((id, Line::Event(event))) => self.all[id].said.push_back(event),
            Ok((id, Line::Garbled(line))) => anyhow::bail!("{} said {line:?}", self.named(id)),
            Ok((id, Line::Closed)) => return self.closed(id),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
        Ok(())
    }

    /// The first event of a process that `pick` accepts.
    pub fn take<T>(&mut self, id: Id, mut pick: impl FnMut(&Event) -> Option<T>) -> Option<T> {
        let said = &mut self.all[id].said;
        let (index, found) = said
            .iter()
            .enumerate()
            .find_map(|(index, event)| Some((index, pick(event)?)))?;
        said.remove(index);
        Some(found)
    }

    /// SIGKILL. When, in nanoseconds of `CLOCK_MONOTONIC`, just before the call.
    pub fn kill(&mut self, id: Id) -> anyhow::Result<u64> {
        let process = &mut self.all[id];
        process.fate = Fate::Killed;
        let at_ns = clock::now_ns();
        process
            .child
            .kill()
            .with_context(|| format!("cannot kill the {}", process.role))?;
        Ok(at_ns)
    }

    /// Those that were not killed or reaped.
    pub fn living(&self) -> Vec<Id> {
        (0..self.all.len())
            .filter(|&id| self.all[id].fate == Fate::Lives)
            .collect()
    }

    /// Orders all to end.
    pub fn end(&mut self) {
        self.all
            .iter_mut()
            .for_each(|process| process.orders = None);
    }

    /// Makes all end.
    pub fn kill_all(&mut self) {
        for process in self
            .all
            .iter_mut()
            .filter(|process| process.fate == Fate::Lives)
        {
            process.fate = Fate::Killed;
            drop(process.child.kill());
        }
    }

    /// Reaps those that the demo killed. How many of all ended by SIGKILL.
    pub fn reap_killed(&mut self) -> anyhow::Result<u32> {
        for id in 0..self.all.len() {
            if self.all[id].fate == Fate::Killed {
                self.reap(id)?;
            }
        }
        Ok(self.by_sigkill)
    }

    /// Role and number, for a complaint.
    pub fn named(&self, id: Id) -> String {
        format!("{} (process {})", self.all[id].role, self.all[id].pid)
    }

    fn reap(&mut self, id: Id) -> anyhow::Result<ExitStatus> {
        let process = &mut self.all[id];
        let status = process::end(&mut process.child, END_PATIENCE)?;
        process.fate = Fate::Reaped;
        self.by_sigkill += u32::from(status.signal() == Some(Signal::KILL.as_raw()));
        Ok(status)
    }

    fn closed(&mut self, id: Id) -> anyhow::Result<()> {
        let fate = self.all[id].fate;
        if fate == Fate::Reaped {
            return Ok(());
        }
        let (named, status) = (self.named(id), self.reap(id)?);
        if fate == Fate::Killed {
            return Ok(());
        }
        let process = &mut self.all[id];
        let complaint = process
            .complaints
            .take()
            .and_then(|thread| thread.join().ok())
            .unwrap_or_default();
        if status.success() && process.orders.is_none() {
            return Ok(());
        }
        anyhow::bail!("{named} {}", why(status, &complaint))
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for process in &mut self.all {
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
    }
}

fn why(status: ExitStatus, complaint: &str) -> String {
    let complaint = printable(&complaint.lines().collect::<Vec<_>>().join(" "));
    let said = if complaint.is_empty() {
        String::new()
    } else {
        format!(": {complaint}")
    };
    format!("{}{said}", process::ending(status))
}

fn thread<T: Send + 'static>(
    body: impl FnOnce() -> T + Send + 'static,
) -> std::io::Result<JoinHandle<T>> {
    std::thread::Builder::new()
        .name("demo-listener".into())
        .spawn(body)
}

fn listen(id: Id, out: impl Read, lines: &Sender<(Id, Line)>) {
    for line in BufReader::new(out).lines() {
        let Ok(line) = line else { break };
        let line = serde_json::from_str(&line).map_or_else(|_| Line::Garbled(line), Line::Event);
        if lines.send((id, line)).is_err() {
            return;
        }
    }
    let _ = lines.send((id, Line::Closed));
}

fn keep(err: impl Read) -> String {
    let mut err = err;
    let mut kept = Vec::new();
    let _ = err.by_ref().take(STDERR_BYTES_MAX).read_to_end(&mut kept);
    // The rest is read too: a full pipe would stop the child.
    let _ = std::io::copy(&mut err, &mut std::io::sink());
    String::from_utf8_lossy(&kept).trim().to_owned()
}
