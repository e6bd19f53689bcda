//! The demo's processes: started, listened to, stopped and reaped.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;

use super::event::Event;
use crate::process;

/// What is kept of a child's complaints.
const STDERR_BYTES_MAX: u64 = 16 * 1024;
/// A child that has closed its output has nothing left to do.
const END_PATIENCE: Duration = Duration::from_secs(10);

/// A word from one of the crew, by its index.
#[derive(Debug)]
pub struct Note {
    pub member: usize,
    pub news: News,
}

/// What a member's output said.
#[derive(Debug)]
pub enum News {
    /// A line.
    Event(Event),
    /// A line that is none; a fault of this program.
    Garbled(String),
    /// Its end.
    Closed,
}

/// How a member ended.
#[derive(Debug)]
pub struct Ending {
    pub status: ExitStatus,
    pub complaint: String,
}

/// One process.
#[derive(Debug)]
pub struct Member {
    /// For people: `publisher`, `subscriber 1`.
    pub role: String,
    pub pid: u32,
    child: Child,
    complaints: Option<JoinHandle<String>>,
}

/// All processes of a demo. Dropping it kills and reaps whoever is left.
#[derive(Debug)]
pub struct Crew {
    pub members: Vec<Member>,
    notes: Receiver<Note>,
    sender: Option<Sender<Note>>,
}

impl Crew {
    /// Nobody yet.
    pub fn new() -> Crew {
        let (sender, notes) = channel();
        Crew { members: Vec::new(), notes, sender: Some(sender) }
    }

    /// Starts a member that lives in `domain`.
    pub fn start(&mut self, role: String, domain: &Path, arguments: &[String]) -> anyhow::Result<()> {
        let mut command = process::this_program();
        command.args(arguments).env("WARPIPE_DOMAIN", domain);
        let member = self.members.len();
        let child = spawn(&mut command).with_context(|| format!("cannot start the {role}"))?;
        // From here on the child is the crew's, which reaps it whatever happens next.
        self.members.push(Member { pid: child.id(), role, child, complaints: None });
        let child = &mut self.members[member].child;
        let (out, err) = (child.stdout.take(), child.stderr.take());
        if let (Some(out), Some(sender)) = (out, self.sender.clone()) {
            thread(move || listen(member, out, &sender))?;
        }
        if let Some(err) = err {
            self.members[member].complaints = Some(thread(move || keep(err))?);
        }
        Ok(())
    }

    /// Nobody more is started: notes end with the last member.
    pub fn complete(&mut self) {
        self.sender = None;
    }

    /// The next word, or none within `patience`. An error when all have closed.
    pub fn next(&self, patience: Duration) -> Result<Option<Note>, AllClosed> {
        match self.notes.recv_timeout(patience) {
            Ok(note) => Ok(Some(note)),
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => Ok(None),
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => Err(AllClosed),
        }
    }

    /// Asks everybody to end.
    pub fn terminate(&self) {
        self.members.iter().for_each(|member| process::terminate(&member.child));
    }

    /// Makes everybody end.
    pub fn kill(&mut self) {
        self.members.iter_mut().for_each(|member| drop(member.child.kill()));
    }

    /// Waits for a member whose output has closed.
    pub fn reap(&mut self, member: usize) -> anyhow::Result<Ending> {
        let member = &mut self.members[member];
        let status = process::end(&mut member.child, END_PATIENCE)?;
        let complaint = member.complaints.take().and_then(|thread| thread.join().ok()).unwrap_or_default();
        Ok(Ending { status, complaint })
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        for member in &mut self.members {
            let _ = member.child.kill();
            let _ = member.child.wait();
        }
    }
}

/// Every member has closed its output.
#[derive(Debug)]
pub struct AllClosed;

fn spawn(command: &mut Command) -> std::io::Result<Child> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()
}

fn thread<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> std::io::Result<JoinHandle<T>> {
    std::thread::Builder::new().name("demo-listener".into()).spawn(body)
}

fn listen(member: usize, out: impl Read, notes: &Sender<Note>) {
    for line in BufReader::new(out).lines() {
        let news = match line {
            Ok(line) => serde_json::from_str(&line).map_or_else(|_| News::Garbled(line), News::Event),
            Err(_) => break,
        };
        if notes.send(Note { member, news }).is_err() {
            return;
        }
    }
    let _ = notes.send(Note { member, news: News::Closed });
}

fn keep(err: impl Read) -> String {
    let mut err = err;
    let mut kept = Vec::new();
    let _ = err.by_ref().take(STDERR_BYTES_MAX).read_to_end(&mut kept);
    // The rest is read too: a full pipe would stop the child.
    let _ = std::io::copy(&mut err, &mut std::io::sink());
    String::from_utf8_lossy(&kept).trim().to_owned()
}
