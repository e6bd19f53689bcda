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
mod ring;
mod semaphore;
mod signals;
mod weights;
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
pub use ring::{RingOrder, RingPair, RingSide, WORDS as RING_WORDS};
pub use semaphore::{Board, SemaphoreOrder};
pub use signals::SignalOrder;
pub use weights::WeightsOrder;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{ChildStdin, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Pid, Signal};
use warpipe_testkit::{ChildProcess, LineReader, pidfd, this_program, wait_readable};

use crate::PATIENCE;
use crate::context::Settings;
use crate::process;

/// A peer, as its case holds it.
#[derive(Debug)]
pub struct Peer {
    child: ChildProcess,
    orders: Option<ChildStdin>,
    answers: LineReader,
}

impl Peer {
    /// Starts one.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start(settings: &Settings, folder: PathBuf, ordinal: u32) -> Result<Peer> {
        let mut command = this_program();
        command.arg("--peer").arg("--folder").arg(folder);
        command.args(["--ordinal", &ordinal.to_string()]);
        command.args(["--backend", settings.backend.name()]);
        command.args(["--seed", &settings.seed.to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = ChildProcess::start(&mut command).context("starting a peer")?;
        let answers = child.take_stdout().context("a piped standard output")?;
        Ok(Peer {
            orders: child.take_stdin(),
            answers: LineReader::new(answers),
            child,
        })
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.pid().as_raw_nonzero().get() as u32
    }

    /// Its process.
    pub fn pid(&self) -> Pid {
        self.child.pid()
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
        self.answers.next(timeout).context("reading from a peer")
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

    /// Lets it fork a child, in the library's sight (`Order::Fork`) or behind its back
    /// (`Order::ForkUnseen`). The child holds all that its parent held.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn orphan(&mut self, order: &Order) -> Result<Orphan> {
        process::pid(self.number(order)? as u32).map(Orphan)
    }

    /// Stops it (SIGSTOP), and waits until all its threads have stopped.
    ///
    /// # Errors
    /// It does not stop.
    pub fn stop(&self) -> Result<()> {
        Ok(self.child.stop()?)
    }

    /// Lets it go on (SIGCONT).
    ///
    /// # Errors
    /// It is gone.
    pub fn go_on(&self) -> Result<()> {
        Ok(self.child.signal(Signal::CONT)?)
    }

    /// Sends SIGKILL, and nothing more.
    ///
    /// # Errors
    /// It is gone.
    pub fn strike(&self) -> Result<()> {
        Ok(self.child.signal(Signal::KILL)?)
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
        self.child.wait(PATIENCE).context("the end of a peer")
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

/// A child that a peer has forked, and that outlives the peer. Killed when it is dropped.
#[derive(Debug)]
pub struct Orphan(Pid);

impl Orphan {
    /// Whether it lives.
    pub fn is_alive(&self) -> bool {
        rustix::process::test_kill_process(self.0).is_ok()
    }

    /// Kills it.
    pub fn end(self) {}
}

impl Drop for Orphan {
    fn drop(&mut self) {
        let fd = pidfd(self.0);
        let _ = process::signal(self.0, Signal::KILL);
        let _ = fd.and_then(|fd| wait_readable(fd, PATIENCE));
    }
}
