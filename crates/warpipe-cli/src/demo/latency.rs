//! Part 1: the cost of a hand-over with one item in flight.
//!
//! The publisher asks: its kernel fills a small tensor, a subscriber's kernel checks it and fills
//! one of its own, and the publisher's CPU sees that this one is complete. A hand-over is half of
//! that; `warpipe-bench handoff` measures it beside its floor.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use warpipe::{
    DeviceKind, DevicePtr, Layout, Publisher, PublisherOptions, Stream, Subscriber,
    SubscriberOptions,
};

use super::PATIENCE;
use super::child::{Child, tell};
use super::stage::{Id, Stage};
use crate::output::{bytes, count, duration};
use crate::registered::RegisteredPage;

/// Of the tensors: a hand-over's cost is measured, not a kernel's.
const ITEM_BYTES: u64 = 4096;
const WARM_UP: u64 = 20;
const TRIPS: u64 = 300;
/// How long a receiver of a GPU's items polls, where there are so many cores.
const POLL: Duration = Duration::from_millis(5);
const CORES_TO_POLL: usize = 4;

/// In the parent: has two processes measure, and prints what the asking one says.
pub fn measure(stage: &mut Stage, asking: Id, answering: Id) -> anyhow::Result<Value> {
    stage.order(asking, "ask");
    stage.order(answering, "answer");
    let latency = stage.wait(asking, "latency")?;
    let [p50, p99] = ["p50_us", "p99_us"].map(|name| {
        let us = latency[name].as_f64().unwrap_or_default();
        duration(Duration::from_secs_f64(us / 1e6))
    });
    let (size, trips) = (bytes(ITEM_BYTES), count(TRIPS));
    let how = format!("kernel to kernel, {size}, half of {trips} round trips");
    stage.line(format_args!(
        "   hand-over   p50 {p50}   p99 {p99}   ({how})"
    ))?;
    Ok(latency)
}

/// In the publisher.
pub fn ask(child: &Child) -> anyhow::Result<()> {
    let mut end = End::open(child, "demo/there", "demo/back")?;
    let times = (0..WARM_UP + TRIPS).map(|trip| end.ask(trip));
    let mut times = times.collect::<anyhow::Result<Vec<_>>>()?;
    end.close()?;
    let times = &mut times[WARM_UP as usize..];
    times.sort();
    let half_us = |permille: usize| times[times.len() * permille / 1000].as_nanos() as f64 / 2e3;
    tell(json!({
        "event": "latency", "trips": TRIPS, "p50_us": half_us(500), "p99_us": half_us(990),
    }))
}

/// In a subscriber.
pub fn answer(child: &Child) -> anyhow::Result<()> {
    let mut end = End::open(child, "demo/back", "demo/there")?;
    (0..WARM_UP + TRIPS).try_for_each(|trip| end.answer(trip))?;
    end.close()
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
    fn open(child: &Child, out: &str, back: &str) -> anyhow::Result<End> {
        let Child { domain, device, .. } = child;
        let publisher = Publisher::new(out, PublisherOptions::at(domain, device))?;
        // A hand-over's cost is measured, not that of a wake-up, where there is a core to poll on.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let polls = device.info().id.kind == DeviceKind::Cuda && cores >= CORES_TO_POLL;
        let options = SubscriberOptions {
            spin: if polls { POLL } else { Duration::ZERO },
            ..SubscriberOptions::at(domain, device)
        };
        let subscriber = Subscriber::wait_for(back, options, PATIENCE)?;
        publisher.wait_for_subscribers(1, PATIENCE)?;
        Ok(End {
            stream: device.stream()?,
            publisher,
            subscriber,
            layout: Layout::bytes_only(ITEM_BYTES)?,
            page: Box::leak(Box::new(RegisteredPage::new(device)?)),
        })
    }

    /// What it has sent is complete then: the other end gets it all the same.
    fn close(self) -> anyhow::Result<()> {
        self.stream.synchronize(PATIENCE)?;
        let wrong = self.page.word(0).load();
        anyhow::ensure!(wrong == 0, "{wrong} wrong words in the round trips");
        Ok(())
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
