//! A demo's subscriber: receives, has every word of every tensor checked on the device, and follows
//! orders.
//!
//! This thread receives; the checker's thread waits for the device. So the end of the publisher is
//! seen at once, also while the device waits for a tensor that will never be complete.

use std::os::fd::AsFd;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

use anyhow::Context;
use warpipe::backend::StreamOp;
use warpipe::{Device, Domain, Sample, Stream, Subscriber, clock};

use super::checker::{CHECKS_MAX, Check, Checker, DONE, Job, wrong_words};
use super::leftovers::Before;
use super::orders::{Next, Orders, send_event, wait_for_order, wait_for_order_or};
use super::protocol::{Event, Order};
use super::round_trips::{End, RoundTrips};
use super::{ChildArgs, ENDPOINT, HELD, START_PATIENCE};
use crate::attach::attach;
use crate::exit::Exit;
use crate::interrupt::{Interrupt, LOOK};
use crate::process;
use crate::registered::RegisteredPage;

/// The length of work that is killed before it ends.
const WORK: std::time::Duration = std::time::Duration::from_secs(9);

/// In the child.
pub fn run(args: &ChildArgs) -> anyhow::Result<Exit> {
    process::follow_parent(args.parent)?;
    let interrupt = Interrupt::install()?;
    let device = args.device.open()?.device;
    warpipe_kernels::preload(&device)?;
    // Never unregistered: after a fault, checks may still be running at the end.
    let page: &'static RegisteredPage = Box::leak(Box::new(RegisteredPage::new(&device)?));
    let before = Before::count(&device, &Domain::from_environment()?)?;
    let Some(subscriber) = attach(ENDPOINT, &device, true, START_PATIENCE, &interrupt)? else {
        return Ok(Exit::Interrupted);
    };
    receive(&device, subscriber, page)?;
    send_event(&Event::Left {
        extra: before.extra()?,
    })?;
    Ok(Exit::Done)
}

fn receive(
    device: &Device,
    subscriber: Subscriber,
    page: &'static RegisteredPage,
) -> anyhow::Result<()> {
    let (jobs, queue) = sync_channel(CHECKS_MAX);
    let checker = Checker::new(device, page);
    let checker = std::thread::Builder::new()
        .name("demo-checker".into())
        .spawn(move || checker.run(&queue))?;
    send_event(&Event::Ready)?;
    let mut receiver = Receiver {
        publisher: subscriber.publisher_pid(),
        stream: device.stream()?,
        subscriber,
        jobs,
        page,
        number: 0,
        turn: 0,
        round_trips: None,
        awaited: None,
        due: None,
        hold: None,
    };
    let ended = receiver.run();
    // Its last job: without a queue it ends.
    let Receiver { jobs, .. } = receiver;
    drop(jobs);
    join(checker)?;
    ended
}

fn join(checker: JoinHandle<anyhow::Result<()>>) -> anyhow::Result<()> {
    checker
        .join()
        .map_err(|_| anyhow::anyhow!("the checker's thread has panicked"))?
}

/// Samples that are kept, as ordered.
struct Hold {
    busy: bool,
    samples: Vec<(u64, Sample)>,
}

struct Receiver {
    subscriber: Subscriber,
    /// The process that the link leads to, as last seen.
    publisher: Option<i32>,
    stream: Stream,
    page: &'static RegisteredPage,
    jobs: SyncSender<Job>,
    /// The last item received of this publisher.
    number: u64,
    /// Checks enqueued so far.
    turn: u64,
    round_trips: Option<RoundTrips>,
    awaited: Option<u64>,
    due: Option<u64>,
    hold: Option<Hold>,
}

impl Receiver {
    /// Until the orders end.
    fn run(&mut self) -> anyhow::Result<()> {
        let mut orders = Orders::default();
        loop {
            match orders.next(std::time::Duration::ZERO)? {
                Next::End => return Ok(()),
                Next::Order(order) => self.follow(order)?,
                Next::Nothing => {}
            }
            if self
                .hold
                .as_ref()
                .is_some_and(|hold| hold.samples.len() >= HELD)
            {
                wait_for_order(LOOK)?;
                continue;
            }
            match self.subscriber.try_receive(&self.stream)? {
                Some(sample) => self.take_in(sample)?,
                None => {
                    self.look_at_publisher()?;
                    wait_for_order_or(self.subscriber.as_fd(), LOOK)?;
                }
            }
            self.answer()?;
        }
    }

    fn follow(&mut self, order: Order) -> anyhow::Result<()> {
        match order {
            Order::RoundTrips { trips, floor } => {
                if self.round_trips.is_none() {
                    let (domain, device) = (Domain::from_environment()?, self.stream.device());
                    self.round_trips =
                        Some(RoundTrips::open(End::Answering, &domain, device, floor)?);
                }
                return self
                    .round_trips
                    .as_mut()
                    .map_or(Ok(()), |ends| ends.answer(trips));
            }
            Order::Hold { busy } => {
                self.hold = Some(Hold {
                    busy,
                    samples: Vec::new(),
                })
            }
            Order::Await { number } => self.awaited = Some(number),
            Order::Reach { number } => self.due = Some(number),
            Order::Since { from_ns, until_ns } => self.job(Job::Since { from_ns, until_ns })?,
            order => anyhow::bail!("no order for a subscriber: {order:?}"),
        }
        self.answer()
    }

    /// Orders that ask for an item are answered once it is there.
    fn answer(&mut self) -> anyhow::Result<()> {
        if self
            .awaited
            .take_if(|awaited| *awaited <= self.number)
            .is_some()
        {
            send_event(&Event::Waiting)?;
        }
        match self.due.take_if(|due| *due <= self.number) {
            Some(_) => self.job(Job::Report),
            None => Ok(()),
        }
    }

    fn take_in(&mut self, sample: Sample) -> anyhow::Result<()> {
        self.round_trips = None;
        self.look_at_publisher()?;
        self.number = sample
            .metadata()
            .try_into()
            .map(u64::from_le_bytes)
            .context("an item came without its number")?;
        let Some(hold) = &mut self.hold else {
            return self.enqueue(sample);
        };
        hold.samples.push((self.number, sample));
        if hold.samples.len() < HELD {
            return Ok(());
        }
        if hold.busy {
            warpipe_kernels::spin(&self.stream, WORK)?;
        } else {
            self.stream.synchronize(super::ITEM_PATIENCE)?;
        }
        let numbers = hold.samples.iter().map(|(number, _)| *number).collect();
        self.job(Job::Held { numbers })
    }

    /// Enqueues the check, behind it its word, and behind both the release.
    fn enqueue(&mut self, sample: Sample) -> anyhow::Result<()> {
        self.turn += 1;
        let (turn, page, number) = (self.turn, self.page, self.number);
        page.word(wrong_words(turn)).store(0);
        let (words, count) = (sample.ptr(), sample.layout().bytes() / 8);
        // SAFETY: the sample's slot is ours until its release, behind this kernel on the same
        // stream; the page is never unregistered, and the last check that counted in this word was
        // concluded before.
        unsafe {
            warpipe_kernels::check(
                &self.stream,
                words,
                count,
                number,
                page.address(wrong_words(turn)),
            )
        }?;
        let done = [StreamOp::Signal {
            word: page.address(DONE),
            value: turn,
        }];
        // SAFETY: the stream is live, and the page is never unregistered.
        unsafe {
            self.stream
                .device()
                .backend()
                .batch(self.stream.raw(), &done)
        }?;
        let before = sample
            .discontinuity()
            .and_then(|gap| gap.previous)
            .map(|before| (before.pid, before.graceful));
        let receipt = sample.release()?;
        self.job(Job::Check(Check {
            receipt,
            number,
            turn,
            before,
        }))
    }

    /// Whether the link has ended, or leads to the next publisher.
    fn look_at_publisher(&mut self) -> anyhow::Result<()> {
        let now = self.subscriber.publisher_pid();
        if self.publisher != now && self.publisher.is_some() {
            send_event(&Event::PublisherGone {
                at_ns: clock::now_ns(),
            })?;
            self.number = 0;
        }
        self.publisher = now;
        Ok(())
    }

    fn job(&self, job: Job) -> anyhow::Result<()> {
        self.jobs.send(job).ok().context("the checker has ended")
    }
}
