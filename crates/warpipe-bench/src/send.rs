//! The CPU's part of `send`, compared with the bare driver call that it contains: a batch of as
//! many signals.
//!
//! The subscribers are in this process and read between the measurements, so that `send` neither
//! waits nor wakes.

mod operations;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use warpipe::backend::testing::{Counting, Wrapped};
use warpipe::{DType, Device, Domain, Layout, Publisher, PublisherOptions, Stream, Subscriber};
use warpipe_bench::raw::{Words, enqueue};
use warpipe_testkit::figure::{Figure, Quantiles, Wanted, median};

use super::setup::{PATIENCE, Setup};

const COUNTS: [usize; 8] = [0, 1, 2, 4, 8, 16, 32, 64];

/// Sends between two looks at the stream: its queue must not fill up, or the driver would wait in
/// the call.
const BURST: usize = 16;

/// The budget of a send beyond the driver's call.
const FIRST_NS: f64 = 2_500.0;
const FURTHER_NS: f64 = 500.0;

const NAME: &str = "bench/send";

/// Calls that may not happen once a channel runs.
const FORBIDDEN: [&str; 6] = [
    "allocate",
    "export",
    "import",
    "register",
    "create_stream",
    "create_event",
];

pub fn run(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for subscribers in COUNTS {
        figures.push(cost(setup, subscribers)?);
    }
    figures.extend(operations::run(setup)?);
    figures.extend(calls(setup)?);
    Ok(figures)
}

fn cost(setup: &Setup, subscribers: usize) -> anyhow::Result<Figure> {
    let mut bench = SendBench::open(&setup.device, &setup.domain, subscribers)?;
    let words = Words::create(&setup.device, subscribers.max(1))?;
    let bursts = setup.times(1600) / BURST + 1;
    let [mut ours, mut bare, mut ours_rounds, mut bare_rounds] =
        [const { Vec::new() }; 4].map(|v: Vec<u64>| v);
    let mut turn = 0;
    for round in 0..=setup.rounds() {
        let (mut our_round, mut bare_round) = (Vec::new(), Vec::new());
        for _ in 0..bursts {
            bare_burst(
                &bench.stream,
                &words,
                subscribers.max(1),
                &mut turn,
                &mut bare_round,
            )?;
            bench.burst(&mut our_round)?;
        }
        if round > 0 {
            ours_rounds.push(p50(&our_round));
            bare_rounds.push(p50(&bare_round));
            ours.extend(our_round);
            bare.extend(bare_round);
        }
    }
    let as_f64 = |rounds: &[u64]| rounds.iter().map(|&ns| ns as f64).collect::<Vec<_>>();
    let (ours_rounds, bare_rounds) = (as_f64(&ours_rounds), as_f64(&bare_rounds));
    let beside = median(&ours_rounds) - median(&bare_rounds);
    let limit = FIRST_NS + FURTHER_NS * subscribers.saturating_sub(1) as f64;
    Ok(Figure::new(
        "send",
        format!("CPU of a send, {subscribers} subscribers"),
        "ns",
        &ours_rounds,
    )
    .beside(&bare_rounds)
    .spread(ours, bare)
    .wanted(Wanted::BesideFloorAtMost(limit))
    .note(format!("beside the driver's call: {beside:.0} ns")))
}

fn p50(samples: &[u64]) -> u64 {
    Quantiles::of(samples.to_vec()).map_or(0, |quantiles| quantiles.p50)
}

/// A publisher and its subscribers.
struct SendBench {
    stream: Stream,
    publisher: Publisher,
    subscribers: Vec<Subscriber>,
    layout: Layout,
}

impl SendBench {
    fn open(device: &Device, domain: &Domain, subscribers: usize) -> anyhow::Result<SendBench> {
        let depth = 2 * BURST as u32;
        let options = PublisherOptions {
            depth,
            ..domain.on(device)
        };
        let publisher = Publisher::new(NAME, options)?;
        let subscriber = |_| Subscriber::open(NAME, domain.on(device), std::time::Duration::ZERO);
        let subscribers = (0..subscribers)
            .map(subscriber)
            .collect::<warpipe::Result<Vec<_>>>()?;
        publisher.wait_for_subscribers(subscribers.len(), PATIENCE)?;
        let layout = Layout::contiguous(DType::F32, &[16, 64])?;
        Ok(SendBench {
            stream: device.stream()?,
            publisher,
            subscribers,
            layout,
        })
    }

    /// Sends a burst, timing each, and lets all subscribers read it.
    fn burst(&mut self, samples: &mut Vec<u64>) -> anyhow::Result<()> {
        for _ in 0..BURST {
            let loan = self.publisher.loan(&self.layout)?;
            let start = Instant::now();
            loan.send(&self.stream)?;
            samples.push(start.elapsed().as_nanos() as u64);
        }
        for subscriber in &mut self.subscribers {
            for _ in 0..BURST {
                drop(subscriber.receive(&self.stream, PATIENCE)?);
            }
        }
        Ok(self.stream.synchronize(PATIENCE)?)
    }
}

fn bare_burst(
    stream: &Stream,
    words: &Words,
    count: usize,
    turn: &mut u64,
    samples: &mut Vec<u64>,
) -> anyhow::Result<()> {
    for _ in 0..BURST {
        *turn += 1;
        let ops: Vec<_> = (0..count).map(|index| words.signal(index, *turn)).collect();
        let start = Instant::now();
        // SAFETY: the words live until the stream is idle, below.
        unsafe { enqueue(stream, &ops) }?;
        samples.push(start.elapsed().as_nanos() as u64);
    }
    Ok(stream.synchronize(PATIENCE)?)
}

/// The backend's calls for a message from loan to release, counted.
fn calls(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    let counting = Wrapped::new(setup.device.backend().clone(), Counting::default());
    let device = Device::from_backend(counting.clone());
    let mut bench = SendBench::open(&device, &setup.domain, 1)?;
    // The first bursts make the arena and everything else that is made once.
    (0..4).try_for_each(|_| bench.burst(&mut Vec::new()))?;
    let (before, bursts) = (counting.hook().calls(), setup.times(1000).div_ceil(BURST));
    for _ in 0..bursts {
        bench.burst(&mut Vec::new())?;
    }
    let messages = (bursts * BURST) as f64;
    let counted = difference(&counting, &before);
    let forbidden: u64 = FORBIDDEN
        .iter()
        .filter_map(|method| counted.get(method))
        .sum();
    let shown = counted.iter().filter(|(method, _)| **method != "query");
    let each: Vec<_> = shown
        .map(|(method, &count)| format!("{method} {:.2}", count as f64 / messages))
        .collect();
    Ok(vec![
        Figure::new(
            "send",
            "allocations, openings and registrations",
            "calls",
            &[forbidden as f64],
        )
        .wanted(Wanted::AtMost(0.0))
        .note(format!(
            "calls a message, loan to release: {}",
            each.join(", ")
        )),
    ])
}

fn difference(
    counting: &Arc<Wrapped<Counting>>,
    before: &BTreeMap<&'static str, u64>,
) -> BTreeMap<&'static str, u64> {
    let now = counting.hook().calls();
    let since = |(method, count): (&'static str, u64)| {
        (method, count - before.get(method).copied().unwrap_or(0))
    };
    now.into_iter()
        .map(since)
        .filter(|&(_, count)| count > 0)
        .collect()
}
