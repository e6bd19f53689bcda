//! Part 1: the cost of a hand-over with one item in flight.
//!
//! One end asks: its kernel fills a small tensor, the other's kernel checks it and fills one of its
//! own, and the asking end's CPU sees that this one is complete. A hand-over is half of that;
//! `warpipe-bench handoff` measures it beside its floor.

use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};
use warpipe::{DeviceKind, DevicePtr, Layout, Publisher, Stream, Subscriber};

use super::PATIENCE;
use super::child::{Child, ChildArgs, tell};
use super::stage::Stage;
use crate::exit::Exit;
use crate::output::{bytes, count, duration};
use crate::registered::RegisteredPage;

/// Of the tensors: a hand-over's cost is measured, not a kernel's.
const ITEM_BYTES: u64 = 4096;
const WARM_UP: u64 = 20;
const TRIPS: u64 = 300;
/// How long a receiver of a GPU's items polls, where there are so many cores.
const POLL: Duration = Duration::from_millis(5);
const CORES_TO_POLL: usize = 4;

/// The arguments of an end.
#[derive(Debug, Args)]
pub struct EndArgs {
    #[command(flatten)]
    child: ChildArgs,
    /// It fills first, and measures.
    #[arg(long)]
    asks: bool,
}

/// In the parent: starts both ends, and prints what the asking one says.
pub fn measure(stage: &mut Stage) -> anyhow::Result<Value> {
    let asking = stage.start("asking end", "demo-end", &["--asks"])?;
    let answering = stage.start("answering end", "demo-end", &[])?;
    let latency = stage.wait(asking, "latency")?;
    stage.wait(answering, "latency")?;
    let [p50, p99] = ["p50_us", "p99_us"].map(|name| {
        let us = latency[name].as_f64().unwrap_or_default();
        duration(Duration::from_secs_f64(us / 1e6))
    });
    let how = format!(
        "kernel to kernel, {}, half of {} round trips",
        bytes(ITEM_BYTES),
        count(TRIPS)
    );
    stage.line(format_args!(
        "   hand-over   p50 {p50}   p99 {p99}   ({how})"
    ))?;
    Ok(latency)
}

/// In a child.
pub fn run(args: &EndArgs) -> anyhow::Result<Exit> {
    let child = Child::begin(&args.child)?;
    let mut end = End::open(args, &child)?;
    let mut times = Vec::new();
    for trip in 0..WARM_UP + TRIPS {
        match args.asks {
            true => times.push(end.ask(trip)?),
            false => end.answer(trip)?,
        }
    }
    end.stream.synchronize(PATIENCE)?;
    let wrong = end.page.word(0).load();
    anyhow::ensure!(wrong == 0, "{wrong} wrong words in the round trips");
    let mut times = times.split_off(times.len().min(WARM_UP as usize));
    times.sort();
    let half_us = |permille: usize| {
        let time = times.get(times.len() * permille / 1000);
        time.map(|time: &Duration| time.as_nanos() as f64 / 2e3)
    };
    tell(json!({
        "event": "latency", "trips": TRIPS, "p50_us": half_us(500), "p99_us": half_us(990),
    }))?;
    // The other end may still wait for what this one has sent: the parent ends both.
    let _ = child.orders.recv();
    drop(end);
    child.tell_leftovers()?;
    Ok(Exit::Done)
}

/// One end, with its channels there and back.
struct End {
    stream: Stream,
    publisher: Publisher,
    subscriber: Subscriber,
    layout: Layout,
    /// Counts wrong words. Never unregistered: after a fault, checks may still be running.
    page: &'static RegisteredPage,
}

impl End {
    /// Opens this end, while the other process opens the other.
    fn open(args: &EndArgs, child: &Child) -> anyhow::Result<End> {
        let Child { domain, device, .. } = child;
        let (out, back) = match args.asks {
            true => ("demo/there", "demo/back"),
            false => ("demo/back", "demo/there"),
        };
        let publisher = Publisher::builder(out)
            .domain(domain)
            .device(device)
            .build()?;
        let subscriber = Subscriber::builder(back).domain(domain).device(device);
        // A hand-over's cost is measured, not that of a wake-up, where there is a core to poll on.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let polls = device.info().id.kind == DeviceKind::Cuda && cores >= CORES_TO_POLL;
        let subscriber = subscriber
            .spin(if polls { POLL } else { Duration::ZERO })
            .wait_for_publisher(PATIENCE)?;
        publisher.wait_for_subscribers(1, PATIENCE)?;
        Ok(End {
            stream: device.stream()?,
            publisher,
            subscriber,
            layout: Layout::bytes_only(ITEM_BYTES)?,
            page: Box::leak(Box::new(RegisteredPage::new(device)?)),
        })
    }

    fn ask(&mut self, trip: u64) -> anyhow::Result<Duration> {
        let begun = Instant::now();
        self.send(trip)?;
        let back = self.subscriber.receive(&self.stream, PATIENCE)?;
        back.wait(PATIENCE)?;
        let taken = begun.elapsed();
        self.check(back.ptr(), !trip)?;
        Ok(taken)
    }

    fn answer(&mut self, trip: u64) -> anyhow::Result<()> {
        let sample = self.subscriber.receive(&self.stream, PATIENCE)?;
        self.check(sample.ptr(), trip)?;
        self.send(!trip)
    }

    fn send(&self, seed: u64) -> anyhow::Result<()> {
        let loan = self.publisher.loan(&self.layout)?;
        // SAFETY: the memory is the loan's, and as long; it is sent behind the stream's work.
        unsafe { warpipe_kernels::fill(&self.stream, loan.ptr(), ITEM_BYTES / 8, seed) }?;
        loan.send(&self.stream).map_err(warpipe::Error::from)?;
        Ok(())
    }

    fn check(&self, words: DevicePtr, seed: u64) -> warpipe::Result<()> {
        let wrong = self.page.address(0);
        // SAFETY: the memory is a sample's that is released behind this kernel; the page is never
        // unregistered, and nothing else than checks writes the word.
        unsafe { warpipe_kernels::check(&self.stream, words, ITEM_BYTES / 8, seed, wrong) }
    }
}
