//! One publisher and 1 to 64 subscribers on the host: 128 bytes an item, compared with a bare ring
//! to each of them.
//!
//! Up to 8 processes, each with as many threads as needed. A thread with nothing to read sleeps, in
//! both.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use warpipe::{Device, Domain, Publisher, PublisherOptions, Stream, Subscriber, SubscriberOptions};
use warpipe_bench::raw::{LINE_BYTES, SharedMemory};
use warpipe_cli::device_arg::DeviceArg;
use warpipe_testkit::figure::{Figure, Wanted};

use super::Role;
use super::fanout::{Gaps, Measured, await_releases, per_item};
use super::peer_process::{Control, PeerProcess};
use super::rings::{DEPTH, LINES, Patience, Payload, Ring, doorbell};
use super::setup::{BenchDomain, PATIENCE, Setup};

const COUNTS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
const PROCESSES_MAX: usize = 8;

const NAME: &str = "bench/fanout-rings";

/// Both poll this long before they sleep: the subscriber's default, and about as many turns of a
/// spin.
const SPIN: Duration = Duration::from_micros(20);
const SLEEP: Patience = Patience::Sleep { spins: 500 };

/// The parameters of a process of subscribers.
#[derive(Debug, Serialize, Deserialize)]
pub struct Terms {
    place: BenchDomain,
    /// Its threads' numbers.
    first: usize,
    threads: usize,
    subscribers: usize,
    rounds: usize,
    items: usize,
}

pub fn run(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for subscribers in COUNTS {
        let measured = measure(setup, subscribers, setup.times(16_000 / subscribers.max(4)))?;
        figures.push(
            Figure::new(
                "fanout",
                format!("per item, host rings, {subscribers} subscribers"),
                "us",
                &measured.ours,
            )
            .beside(&measured.floor)
            .spread(measured.ours_ns, measured.floor_ns)
            .wanted(Wanted::RatioAtMost(1.15)),
        );
    }
    Ok(figures)
}

fn measure(setup: &Setup, subscribers: usize, items: usize) -> anyhow::Result<Measured> {
    let (memory, emptied) = (SharedMemory::create(subscribers * LINES)?, doorbell()?);
    let device = Device::host();
    let options = PublisherOptions {
        depth: DEPTH as u32,
        ..setup.domain.on(&device)
    };
    let publisher = Publisher::new(NAME, options)?;
    let (mut partners, mut doorbells) = (Vec::new(), Vec::new());
    let processes = subscribers.min(PROCESSES_MAX);
    let threads = subscribers / processes;
    for process in 0..processes {
        let (place, first) = (setup.place_on(DeviceArg::Host), process * threads);
        let terms = Terms {
            place,
            first,
            threads,
            subscribers,
            rounds: setup.rounds(),
            items,
        };
        let peer = PeerProcess::start(&Role::FanoutRings(terms))?;
        peer.control.send_fd(memory.fd())?;
        peer.control.send_fd(emptied.as_fd())?;
        for _ in 0..threads {
            let filled = doorbell()?;
            peer.control.send_fd(filled.as_fd())?;
            doorbells.push(filled);
        }
        partners.push(peer);
    }
    publisher.wait_for_subscribers(subscribers, PATIENCE)?;
    let ring = |(index, filled)| Ring::new(&memory, index * LINES, filled, &emptied);
    let rings = doorbells.iter().enumerate().map(ring).collect();
    let mut source = Source {
        rings,
        publisher,
        stream: device.stream()?,
    };
    let mut measured = Measured::default();
    for round in 0..=setup.rounds() {
        let (floor, floor_ns) = source.floor(items)?;
        let (ours, ours_ns) = source.ours(items)?;
        if round > 0 {
            measured.floor.push(floor);
            measured.ours.push(ours);
            measured.floor_ns.extend(floor_ns);
            measured.ours_ns.extend(ours_ns);
        }
    }
    partners.into_iter().try_for_each(PeerProcess::end)?;
    Ok(measured)
}

struct Source<'a> {
    rings: Vec<Ring<'a>>,
    publisher: Publisher,
    stream: Stream,
}

fn payload(item: usize) -> Payload {
    [item as u8; LINE_BYTES]
}

impl Source<'_> {
    fn floor(&mut self, items: usize) -> anyhow::Result<(f64, Vec<u64>)> {
        let (start, mut gaps) = (Instant::now(), Gaps::new(items));
        for item in 0..items {
            self.rings
                .iter_mut()
                .try_for_each(|ring| ring.push(&payload(item), SLEEP))?;
            gaps.tick();
        }
        self.rings.iter().try_for_each(Ring::await_empty)?;
        Ok((per_item(start, items), gaps.ns))
    }

    fn ours(&mut self, items: usize) -> anyhow::Result<(f64, Vec<u64>)> {
        let (start, mut gaps) = (Instant::now(), Gaps::new(items));
        for item in 0..items {
            self.publisher.send_bytes(&self.stream, &payload(item))?;
            gaps.tick();
        }
        await_releases(&self.publisher)?;
        Ok((per_item(start, items), gaps.ns))
    }
}

/// A process of subscribers.
pub fn consume(terms: &Terms, control: &Control) -> anyhow::Result<()> {
    let (device, domain) = terms.place.open()?;
    let memory = SharedMemory::open(control.receive_fd()?, terms.subscribers * LINES)?;
    let emptied = control.receive_fd()?;
    let doorbells = (0..terms.threads)
        .map(|_| control.receive_fd())
        .collect::<anyhow::Result<Vec<OwnedFd>>>()?;
    std::thread::scope(|scope| {
        let thread = |(index, filled)| {
            let ring = Ring::new(&memory, (terms.first + index) * LINES, filled, &emptied);
            let (device, domain) = (&device, &domain);
            scope.spawn(move || read(terms, ring, device, domain))
        };
        let threads: Vec<_> = doorbells.iter().enumerate().map(thread).collect();
        threads.into_iter().try_for_each(|thread| {
            thread
                .join()
                .unwrap_or_else(|_| Err(anyhow::anyhow!("a subscriber's thread has panicked")))
        })
    })
}

fn read(terms: &Terms, mut ring: Ring<'_>, device: &Device, domain: &Domain) -> anyhow::Result<()> {
    let options = SubscriberOptions {
        spin: SPIN,
        ..domain.on(device)
    };
    let mut subscriber = Subscriber::open(NAME, options, Duration::ZERO)?;
    let stream = device.stream()?;
    for _ in 0..=terms.rounds {
        for item in 0..terms.items {
            let mut bytes = [0; LINE_BYTES];
            ring.pop(&mut bytes, SLEEP)?;
            anyhow::ensure!(bytes == payload(item), "the bare ring gave other bytes");
        }
        for item in 0..terms.items {
            let bytes = super::ring::receive(&mut subscriber, &stream)?;
            anyhow::ensure!(bytes == payload(item), "the channel gave other bytes");
        }
    }
    Ok(())
}
