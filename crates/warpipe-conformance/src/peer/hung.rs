//! A peer in which a function of the driver hangs, while its streams wait for a process that dies.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use warpipe::{
    Event, EventHandle, LegacyHandle, Permit, Publisher, Sample, Semaphore, Stream, Subscriber,
    Timeline,
};
use warpipe_testkit::eventually;

use super::actor::say;
use super::order::Answer;
use crate::PATIENCE;
use crate::context::Context;
use crate::device_malloc;
use crate::fake_driver::FakeDriver;
use crate::workload::{KINDS, Site, Workload};

/// The orders of such a peer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum HungOrder {
    /// Do the work of every primitive once. Answers with the functions of the driver that were
    /// called, in words.
    Calls {
        /// Memory of the case's process.
        foreign: LegacyHandle,
    },
    /// Publish these.
    Publish(Vec<String>),
    /// Let streams wait for another process, and say `rescued` when each goes on: by a sample, a
    /// timeline, an event, and a semaphore.
    Wait {
        /// The channel, the timeline and the semaphore of this name.
        name: String,
        /// The event.
        event: String,
    },
    /// Have every call of this function hang, and do the work of every primitive meanwhile, in
    /// threads. Answers with how many calls hang.
    Hang {
        /// The function.
        function: String,
        /// Memory of the case's process.
        foreign: LegacyHandle,
    },
    /// Let the calls go on, and see that all work is done and right.
    Release,
}

/// The resources of a waiting stream.
struct Waiting {
    _sample: Sample,
    _permit: Permit,
    _kept: (Subscriber, Timeline, Event, Semaphore),
    streams: Vec<Stream>,
}

/// Fields are dropped in this order.
#[derive(Default)]
pub(super) struct Hung {
    waiting: Option<Waiting>,
    publishers: Vec<Publisher>,
    workloads: Vec<Box<dyn Workload>>,
    hanging: Option<Hanging>,
}

struct Hanging {
    fake_driver: Arc<FakeDriver>,
    function: String,
    threads: Vec<(String, JoinHandle<Ended>)>,
}

/// How many streams wait.
pub const WAITING: usize = 4;

/// Turns of every primitive in a thread.
const TURNS: u64 = 2;

/// A workload as far as it was opened, and how its turns went.
type Ended = (Option<Box<dyn Workload>>, Result<()>);

fn site(context: &Context, part: &str) -> Site {
    Site {
        context: Arc::new(context.twin()),
        name: part.into(),
        fake_driver: None,
        patience: 3 * PATIENCE,
    }
}

fn turns(mut workload: Box<dyn Workload>) -> Ended {
    let ended = (2..2 + TURNS).try_for_each(|seed| workload.turn(seed));
    (Some(workload), ended)
}

/// When nothing hangs any more, everything goes on.
fn once_more(mut workload: Box<dyn Workload>) -> Result<Box<dyn Workload>> {
    (2 + TURNS..2 + 2 * TURNS).try_for_each(|seed| workload.turn(seed))?;
    workload.audit()?;
    Ok(workload)
}

impl Hung {
    pub(super) fn carry_out(&mut self, context: &Context, order: HungOrder) -> Result<Answer> {
        match order {
            HungOrder::Calls { foreign } => return calls(context, &foreign),
            HungOrder::Publish(names) => {
                let build = |name: String| context.publisher(&name);
                self.publishers = names
                    .into_iter()
                    .map(build)
                    .collect::<warpipe::Result<_>>()?;
            }
            HungOrder::Wait { name, event } => self.waiting = Some(wait(context, &name, &event)?),
            HungOrder::Hang { function, foreign } => return self.hang(context, function, foreign),
            HungOrder::Release => self.release(context)?,
        }
        Ok(Answer::Done)
    }

    fn hang(
        &mut self,
        context: &Context,
        function: String,
        foreign: LegacyHandle,
    ) -> Result<Answer> {
        let fake_driver = Arc::new(FakeDriver::of(&context.settings)?);
        fake_driver.reset()?;
        let twin = context.twin();
        let mut warm = KINDS
            .iter()
            .map(|kind| kind.open(site(context, "warm")))
            .collect::<Result<Vec<_>>>()?;
        warm.iter_mut().try_for_each(|workload| workload.turn(1))?;
        fake_driver.block(&function)?;
        let mut threads = Vec::new();
        let mut start = |name: String, work: Box<dyn FnOnce() -> Ended + Send>| {
            threads.push((name, std::thread::spawn(work)));
        };
        for (kind, workload) in KINDS.iter().zip(warm) {
            start(
                format!("{} that was there", kind.name),
                Box::new(move || turns(workload)),
            );
            let site = site(context, "cold");
            start(
                format!("new {}", kind.name),
                Box::new(move || match kind.open(site) {
                    Ok(workload) => turns(workload),
                    Err(error) => (None, Err(error)),
                }),
            );
        }
        start(
            "memory of another process".into(),
            Box::new(move || (None, open_foreign(&twin, &foreign))),
        );
        let is_hanging = || fake_driver.hanging(&function).is_ok_and(|count| count > 0);
        eventually(PATIENCE, is_hanging);
        let count = fake_driver.hanging(&function)?;
        self.hanging = Some(Hanging {
            fake_driver,
            function,
            threads,
        });
        Ok(Answer::Number(count))
    }

    fn release(&mut self, context: &Context) -> Result<()> {
        let Hanging {
            fake_driver,
            function,
            threads,
        } = self.hanging.take().context("something hangs")?;
        fake_driver.release(&function)?;
        for (index, (name, thread)) in threads.into_iter().enumerate() {
            ensure!(
                eventually(3 * PATIENCE, || thread.is_finished()),
                "the {name} does not come to an end"
            );
            let (workload, ended) = thread.join().map_err(|_| anyhow::anyhow!("a panic"))?;
            if let Err(error) = ended
                && !is_late(&error)
            {
                return Err(error.context(name));
            }
            // The last one is no primitive's.
            let Some(kind) = KINDS.get(index / 2) else {
                continue;
            };
            let workload = match workload {
                Some(workload) => Ok(workload),
                None => kind.open(site(context, &format!("again{index}"))),
            };
            self.workloads
                .push(workload.and_then(once_more).with_context(|| name)?);
        }
        if let Some(waiting) = self.waiting.take() {
            waiting
                .streams
                .iter()
                .try_for_each(|stream| stream.synchronize(PATIENCE))?;
        }
        Ok(())
    }
}

/// How many words another process's memory has.
pub const FOREIGN_WORDS: u64 = 512;
/// The seed of those words.
pub const FOREIGN_SEED: u64 = 77;

fn open_foreign(context: &Context, handle: &LegacyHandle) -> Result<()> {
    let memory = handle.open(&context.device)?;
    device_malloc::check(&memory, FOREIGN_SEED, &mut context.error_counters()?)?;
    Ok(memory.close(3 * PATIENCE)?)
}

fn calls(context: &Context, foreign: &LegacyHandle) -> Result<Answer> {
    let fake_driver = FakeDriver::of(&context.settings)?;
    fake_driver.reset()?;
    for kind in KINDS {
        let mut workload = kind.open(site(context, "calls"))?;
        (1..=TURNS).try_for_each(|seed| workload.turn(seed))?;
        workload.audit()?;
    }
    open_foreign(context, foreign)?;
    let names: BTreeSet<String> = fake_driver.calls()?.into_keys().collect();
    Ok(Answer::Text(Vec::from_iter(names).join(" ")))
}

/// Whether an endpoint did not answer in time. A handshake may end so, on a machine that took long
/// to bring it about.
fn is_late(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref(),
        Some(warpipe::Error::Handshake { .. } | warpipe::Error::Timeout { .. })
    )
}

fn wait(context: &Context, name: &str, event: &str) -> Result<Waiting> {
    let (domain, device) = (&context.domain, &context.device);
    let streams = (0..WAITING)
        .map(|_| context.stream())
        .collect::<warpipe::Result<Vec<_>>>()?;
    let mut subscriber = context.subscriber(name)?;
    let sample = subscriber.receive(&streams[0], PATIENCE)?;
    let timeline = Timeline::open(&format!("{name}/timeline"), domain.on(device), PATIENCE)?;
    timeline.wait(&streams[1], 1)?;
    let event = Event::open(
        &event.parse::<EventHandle>()?,
        domain.on(device),
        Duration::ZERO,
    )?;
    event.wait(&streams[2])?;
    let semaphore = Semaphore::open(&format!("{name}/semaphore"), domain.on(device), PATIENCE)?;
    let permit = semaphore.acquire(&streams[3], PATIENCE)?;
    for (stream, what) in streams
        .iter()
        .zip(["a sample", "a timeline", "an event", "a semaphore"])
    {
        ensure!(!stream.is_idle()?, "the stream waits for {what}");
        stream.call(move || say(&format!("rescued {what}")))?;
    }
    Ok(Waiting {
        _sample: sample,
        _permit: permit,
        _kept: (subscriber, timeline, event, semaphore),
        streams,
    })
}
