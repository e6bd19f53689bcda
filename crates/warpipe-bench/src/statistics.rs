//! The cost of the statistics page: the CPU time of a hand-over between endpoints that count in it,
//! beside the same one in the same process without a page.
//!
//! A process may not make the page where files of its length are forbidden (`RLIMIT_FSIZE`). Its
//! first endpoints are opened under such a limit and count nothing, then or later; the others are
//! opened without it. Publisher and subscriber are in this process and take turns in bursts, so
//! that neither waits. Host memory alone: a driver's calls would hide the difference.

use std::time::Instant;

use anyhow::ensure;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};
use warpipe::statistics::Observer;
use warpipe::{DType, Device, Domain, Layout, Publisher, PublisherOptions, Stream, Subscriber};
use warpipe_cli::device_arg::DeviceArg;
use warpipe_testkit::figure::{Figure, Wanted, median};

use super::Role;
use super::peer_process::{Control, PeerProcess};
use super::setup::{BenchDomain, PATIENCE, Setup};

/// Messages between two looks at the clock.
const BURST: usize = 16;

/// Pairs of each sort: none is lucky with its addresses in all of them.
const PAIRS: usize = 4;

/// The budget of an item: what its publisher and its subscriber count.
const BESIDE_NS: f64 = 10.0;

/// More than any memory of the pairs, and less than a page.
const FILE_BYTES_MAX: u64 = 3 << 20;

/// What the other process measures.
#[derive(Debug, Serialize, Deserialize)]
pub struct Terms {
    place: BenchDomain,
    rounds: usize,
    bursts: usize,
}

/// Nanoseconds an item in each round.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Rounds {
    counted: Vec<f64>,
    bare: Vec<f64>,
}

pub fn run(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    let peer = PeerProcess::start(&Role::Statistics(Terms {
        place: setup.place_on(DeviceArg::Host),
        rounds: setup.rounds(),
        bursts: setup.times(16_000) / BURST + 1,
    }))?;
    let Rounds { counted, bare } = peer.control.hear()?;
    peer.end()?;
    let beside = median(&counted) - median(&bare);
    let name = "CPU of a hand-over that is counted, host";
    Ok(vec![
        Figure::new("statistics", name, "ns", &counted)
            .beside(&bare)
            .wanted(Wanted::BesideFloorAtMost(BESIDE_NS))
            .note(format!(
                "the floor is the same without a page; beside it: {beside:.1} ns, of both sides"
            )),
    ])
}

/// The other process's part.
pub fn measure(terms: &Terms, control: &Control) -> anyhow::Result<()> {
    let (device, domain) = terms.place.open()?;
    let open = |sort: &str| -> anyhow::Result<Vec<Pair>> {
        let names = (0..PAIRS).map(|number| format!("bench/statistics/{sort}/{number}"));
        names
            .map(|name| Pair::open(&device, &domain, &name))
            .collect()
    };
    let limit = getrlimit(Resource::Fsize);
    let least = limit.maximum.unwrap_or(u64::MAX).min(FILE_BYTES_MAX);
    setrlimit(
        Resource::Fsize,
        Rlimit {
            current: Some(least),
            ..limit
        },
    )?;
    let mut bare = open("bare")?;
    ensure!(observed() == 0, "a page was made in spite of the limit");
    setrlimit(Resource::Fsize, limit)?;
    let mut counted = open("counted")?;
    let seen = observed();
    ensure!(
        seen == 2 * PAIRS,
        "{seen} endpoints are counted instead of {}: no page can be made",
        2 * PAIRS
    );
    let mut rounds = Rounds::default();
    for round in 0..=terms.rounds {
        let (mut of_counted, mut of_bare) = (Vec::new(), Vec::new());
        for burst in 0..terms.bursts {
            let (counted, bare) = (&mut counted[burst % PAIRS], &mut bare[burst % PAIRS]);
            // Neither is always the one that finds the other's cache lines.
            if (burst / PAIRS).is_multiple_of(2) {
                of_bare.push(bare.burst()?);
                of_counted.push(counted.burst()?);
            } else {
                of_counted.push(counted.burst()?);
                of_bare.push(bare.burst()?);
            }
        }
        // The first round makes what is made once.
        if round > 0 {
            rounds.counted.push(median(&of_counted));
            rounds.bare.push(median(&of_bare));
        }
    }
    control.send(&rounds)
}

/// The endpoints in this process's page; 0 without one.
fn observed() -> usize {
    let found = Observer::new().observe().processes;
    let own = |pid: i32| u32::try_from(pid) == Ok(std::process::id());
    let page = found.iter().find(|process| own(process.pid));
    page.map_or(0, |page| page.endpoints.len())
}

/// A publisher and its subscriber.
struct Pair {
    stream: Stream,
    publisher: Publisher,
    subscriber: Subscriber,
    layout: Layout,
}

impl Pair {
    fn open(device: &Device, domain: &Domain, name: &str) -> anyhow::Result<Pair> {
        let options = PublisherOptions {
            depth: 2 * BURST as u32,
            ..domain.on(device)
        };
        let publisher = Publisher::new(name, options)?;
        let subscriber = Subscriber::open(name, domain.on(device), std::time::Duration::ZERO)?;
        publisher.wait_for_subscribers(1, PATIENCE)?;
        let mut pair = Pair {
            stream: device.stream()?,
            publisher,
            subscriber,
            layout: Layout::contiguous(DType::F32, &[4, 8])?,
        };
        // Its memory is made now, under the limit that there is.
        pair.burst()?;
        Ok(pair)
    }

    /// Nanoseconds a message, from the loan to the release.
    fn burst(&mut self) -> anyhow::Result<f64> {
        let start = Instant::now();
        for _ in 0..BURST {
            self.publisher.loan(&self.layout)?.send(&self.stream)?;
        }
        for _ in 0..BURST {
            let sample = self.subscriber.receive(&self.stream, PATIENCE)?;
            drop(sample.release()?);
        }
        let took = start.elapsed().as_nanos() as f64 / BURST as f64;
        self.stream.synchronize(PATIENCE)?;
        Ok(took)
    }
}
