//! A further process of this program, which publishes or subscribes on a case's orders.
//!
//! Orders go to its standard input, answers come from its standard output, one line each; its
//! standard error joins the case's own. Every wait for it has a limit, and it is killed when its
//! handle is dropped.

mod actor;
mod holder;
mod hung;
mod order;
mod orphan;
mod semaphore;
mod signals;
mod worker;

pub use actor::act;
pub(crate) use actor::{describe_layout, digest};
pub use holder::HolderOrder;
pub use hung::{FOREIGN_SEED, FOREIGN_WORDS, HungOrder, WAITING};
pub use order::{
    Answer, Batch, Fault, Item, Order, PolicyPlan, PublisherPlan, Reply, SubscriberPlan, Task,
    kind_of,
};
pub use orphan::THREAD as ORPHAN;
pub use semaphore::{Board, SemaphoreOrder};
pub use signals::SignalOrder;

use std::io::Write as _;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Pid, Signal};

use crate::PATIENCE;
use crate::context::Settings;
use crate::process::{self, wait_readable};

/// A peer, as its case holds it.
#[derive(Debug)]
pub struct Peer {
    child: Child,
    orders: Option<ChildStdin>,
    answers: ChildStdout,
    /// The part of the next line received so far.
    pending: Vec<u8>,
    is_over: bool,
}

impl Peer {
    /// Starts one.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start(settings: &Settings, folder: PathBuf, ordinal: u32) -> Result<Peer> {
        let program = std::env::current_exe().context("the path of this program")?;
        let mut command = Command::new(program);
        command
            .arg("--peer")
            .arg("--folder")
            .arg(folder)
            .arg("--ordinal")
            .arg(ordinal.to_string());
        command
            .arg("--backend")
            .arg(settings.backend.name())
            .arg("--seed")
            .arg(settings.seed.to_string());
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting a peer")?;
        let (orders, answers) = (
            child.stdin.take(),
            child.stdout.take().context("a piped standard output")?,
        );
        Ok(Peer {
            child,
            orders,
            answers,
            pending: Vec::new(),
            is_over: false,
        })
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Its process.
    ///
    /// # Errors
    /// None in practice.
    pub fn pid(&self) -> Result<Pid> {
        process::pid(self.id())
    }

    /// Gives an order without waiting for the answer.
    ///
    /// # Errors
    /// The peer has ended.
    pub fn send(&mut self, order: &Order) -> Result<()> {
        let mut line = serde_json::to_vec(order)?;
        line.push(b'\n');
        self.orders
            .as_mut()
            .context("the orders are open")?
            .write_all(&line)
            .context("sending an order to a peer")
    }

    /// The next line that the peer writes; `None` when it has ended.
    ///
    /// # Errors
    /// None came in time.
    pub fn line(&mut self, timeout: Duration) -> Result<Option<String>> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(end) = self.pending.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.pending.drain(..=end).collect();
                return Ok(Some(String::from_utf8_lossy(&line[..end]).into_owned()));
            }
            if self.is_over {
                return Ok(None);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            ensure!(
                wait_readable(self.answers.as_fd(), left),
                "the peer did not write a line within {timeout:?}"
            );
            let mut bytes = [0; 16 << 10];
            match rustix::io::read(&self.answers, &mut bytes) {
                Ok(0) => self.is_over = true,
                Ok(length) => self.pending.extend_from_slice(&bytes[..length]),
                Err(error) => bail!("reading from a peer: {error}"),
            }
        }
    }

    /// The answer to an order.
    ///
    /// # Errors
    /// None came in time, or the peer died of it.
    pub fn answer(&mut self) -> Result<Result<Answer, Fault>> {
        let Some(line) = self.line(2 * PATIENCE)? else {
            bail!("the peer ended ({}) instead of answering", self.ended()?)
        };
        Ok(
            match serde_json::from_str(&line)
                .with_context(|| format!("a peer's answer: {line:?}"))?
            {
                Answer::Fault(fault) => Err(fault),
                answer => Ok(answer),
            },
        )
    }

    /// Gives an order and waits for its answer, which may be a fault.
    ///
    /// # Errors
    /// As [`answer`](Self::answer).
    pub fn try_ask(&mut self, order: &Order) -> Result<Result<Answer, Fault>> {
        self.send(order)?;
        self.answer()
    }

    /// Gives an order that must succeed.
    ///
    /// # Errors
    /// The [`Fault`], or as [`answer`](Self::answer).
    pub fn ask(&mut self, order: &Order) -> Result<Answer> {
        self.try_ask(order)?
            .with_context(|| format!("a peer's {order:?}"))
    }

    /// Lets it publish.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn publish(&mut self, plan: PublisherPlan) -> Result<()> {
        self.ask(&Order::Publish(plan)).map(drop)
    }

    /// Lets it subscribe; returns the subscriber's number there.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn subscribe(&mut self, name: &str) -> Result<usize> {
        self.subscribe_as(SubscriberPlan::of(name))
    }

    /// Lets it subscribe by a plan.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn subscribe_as(&mut self, plan: SubscriberPlan) -> Result<usize> {
        Ok(self.number(&Order::Subscribe(plan))? as usize)
    }

    /// Lets its first subscriber receive, check and release.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn receive(&mut self, count: u64) -> Result<Vec<Item>> {
        self.items(&Order::Receive {
            subscriber: 0,
            count,
            hold: false,
        })
    }

    /// Lets its first subscriber receive and hold.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn hold(&mut self, count: u64) -> Result<Vec<Item>> {
        self.items(&Order::Receive {
            subscriber: 0,
            count,
            hold: true,
        })
    }

    /// Lets it check and release what it holds, in random order.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn release(&mut self) -> Result<Vec<Item>> {
        self.items(&Order::Release)
    }

    /// An order that is answered with samples.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn items(&mut self, order: &Order) -> Result<Vec<Item>> {
        match self.ask(order)? {
            Answer::Items(items) => Ok(items),
            other => bail!("{other:?} instead of samples"),
        }
    }

    /// An order that is answered with a number.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn number(&mut self, order: &Order) -> Result<u64> {
        match self.ask(order)? {
            Answer::Number(number) => Ok(number),
            other => bail!("{other:?} instead of a number"),
        }
    }

    /// Lets it work at a queue or a service.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn task(&mut self, task: Task) -> Result<Answer> {
        self.ask(&Order::Task(task))
    }

    /// Lets it lease one job, or accept one request, and hold it. Returns its number and the
    /// attempt.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn lease(&mut self, task: Task) -> Result<(u64, u32)> {
        match self.task(task)? {
            Answer::Leased { job, attempt } => Ok((job, attempt)),
            other => bail!("{other:?} instead of a lease"),
        }
    }

    /// An order that is answered with a word.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn text(&mut self, order: &Order) -> Result<String> {
        match self.ask(order)? {
            Answer::Text(text) => Ok(text),
            other => bail!("{other:?} instead of a word"),
        }
    }

    /// An order about timelines or events that must succeed.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn signals(&mut self, order: SignalOrder) -> Result<Answer> {
        self.ask(&Order::Signals(order))
    }

    /// One that must fail, with this kind of fault.
    ///
    /// # Errors
    /// It succeeds, or fails otherwise.
    pub fn refuses(&mut self, order: SignalOrder, kind: &str) -> Result<Fault> {
        match self.try_ask(&Order::Signals(order.clone()))? {
            Err(fault) if fault.kind == kind => Ok(fault),
            other => bail!("{order:?} gave {other:?} where {kind} is due"),
        }
    }

    /// Stops it (SIGSTOP), and waits until it stands.
    ///
    /// # Errors
    /// It does not stand.
    pub fn stop(&self) -> Result<()> {
        process::signal(self.pid()?, Signal::STOP)?;
        let stat = format!("/proc/{}/stat", self.id());
        let stands = || std::fs::read_to_string(&stat).is_ok_and(|text| text.contains(") T "));
        ensure!(
            process::eventually(PATIENCE, stands),
            "a stopped process stands"
        );
        Ok(())
    }

    /// Lets it go on (SIGCONT).
    ///
    /// # Errors
    /// It is gone.
    pub fn go_on(&self) -> Result<()> {
        process::signal(self.pid()?, Signal::CONT)
    }

    /// Sends SIGKILL, and nothing more.
    ///
    /// # Errors
    /// It is gone.
    pub fn strike(&self) -> Result<()> {
        process::signal(self.pid()?, Signal::KILL)
    }

    /// Kills it (SIGKILL) and waits until it is dead.
    ///
    /// # Errors
    /// It was dead already.
    pub fn kill(&mut self) -> Result<()> {
        self.strike()?;
        let status = self.ended()?;
        ensure!(!status.success(), "a killed peer does not end well");
        Ok(())
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It lives on.
    pub fn ended(&mut self) -> Result<ExitStatus> {
        if let Some(status) = self.child.try_wait()? {
            return Ok(status);
        }
        let pidfd = process::pidfd(self.pid()?)?;
        ensure!(wait_readable(&pidfd, PATIENCE), "the peer does not end");
        Ok(self.child.wait()?)
    }

    /// Takes in what it had still written when it ended.
    ///
    /// # Errors
    /// As [`line`](Self::line).
    pub fn last_lines(&mut self) -> Result<Vec<String>> {
        let mut lines = Vec::new();
        while let Some(line) = self.line(PATIENCE)? {
            lines.push(line);
        }
        Ok(lines)
    }

    /// Ends its orders, whereupon it drops everything, and waits for its good end.
    ///
    /// # Errors
    /// It does not end, or not well.
    pub fn dismiss(mut self) -> Result<()> {
        self.orders = None;
        let status = self.ended()?;
        ensure!(status.success(), "the peer ended with {status}");
        Ok(())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
