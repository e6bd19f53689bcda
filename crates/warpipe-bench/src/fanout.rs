//! One publisher's kernel, a kernel in each of N other processes on what it wrote, eight items in
//! flight.

use std::os::fd::AsFd;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use warpipe::{DType, Device, DeviceId, Layout, Publisher, PublisherOptions, Stream, Subscriber};
use warpipe_bench::raw::{Memory, Words, enqueue};
use warpipe_testkit::figure::{Figure, Wanted};

use super::peer_process::{Control, PeerProcess};
use super::setup::{BenchDomain, IN_FLIGHT, PATIENCE, Setup};
use super::{Role, broadcast, fanout_rings};

/// 64-bit words that the kernels fill and check.
const WORDS: u64 = 512;
const SLOT_BYTES: u64 = WORDS * 8;

const NAME: &str = "bench/fanout";

/// The parameters of a subscriber's process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Terms {
    place: BenchDomain,
    index: usize,
    subscribers: usize,
    rounds: usize,
    items: usize,
}

/// Microseconds an item for each round, and nanoseconds between one item sent and the next.
#[derive(Debug, Default)]
pub struct Measured {
    pub floor: Vec<f64>,
    pub ours: Vec<f64>,
    pub floor_ns: Vec<u64>,
    pub ours_ns: Vec<u64>,
}

pub fn run(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    if !setup.is_host() {
        for subscribers in [1, 2, 4, 8] {
            let measured = measure(setup, setup.place(), subscribers, setup.times(1000))?;
            let name = format!("per item, kernels, {subscribers} subscribers");
            let limit = if subscribers == 1 { 1.10 } else { 1.15 };
            figures.push(
                Figure::new("fanout", name, "us", &measured.ours)
                    .beside(&measured.floor)
                    .spread(measured.ours_ns, measured.floor_ns)
                    .wanted(Wanted::RatioAtMost(limit)),
            );
        }
        figures.extend(broadcast::run(setup)?);
    }
    figures.extend(fanout_rings::run(setup)?);
    Ok(figures)
}

/// The word that signals subscriber `index` that an item is ready.
fn ready(index: usize) -> usize {
    2 * index
}

/// The word that signals that the subscriber is done with it.
fn done(index: usize) -> usize {
    2 * index + 1
}

/// Measures with this process as the publisher.
pub fn measure(
    setup: &Setup,
    place: BenchDomain,
    subscribers: usize,
    items: usize,
) -> anyhow::Result<Measured> {
    let words = Words::create(&setup.device, 2 * subscribers)?;
    let memory = Memory::allocate(&setup.device, u64::from(IN_FLIGHT) * SLOT_BYTES)?;
    let options = PublisherOptions {
        depth: IN_FLIGHT,
        ..setup.domain.on(&setup.device)
    };
    let publisher = Publisher::new(NAME, options)?;
    let rounds = setup.rounds();
    let mut partners = Vec::new();
    for index in 0..subscribers {
        let terms = Terms {
            place: place.clone(),
            index,
            subscribers,
            rounds,
            items,
        };
        let peer = PeerProcess::start(&Role::Fanout(terms))?;
        let (fd, bytes, owner) = memory.export()?;
        peer.control.send_fd(words.fd())?;
        peer.control.send(&(bytes, owner))?;
        peer.control.send_fd(fd.as_fd())?;
        partners.push(peer);
    }
    publisher.wait_for_subscribers(subscribers, PATIENCE)?;
    let stream = setup.device.stream()?;
    let layout = Layout::contiguous(DType::U64, &[WORDS])?;
    let mut source = Source {
        stream,
        words,
        memory,
        publisher,
        layout,
        subscribers,
        turn: 0,
    };
    let mut measured = Measured::default();
    for round in 0..=rounds {
        let (floor, floor_ns) = source.floor(items)?;
        let (ours, ours_ns) = source.ours(items)?;
        if round > 0 {
            measured.floor.push(floor);
            measured.ours.push(ours);
            measured.floor_ns.extend(floor_ns);
            measured.ours_ns.extend(ours_ns);
        }
    }
    for peer in partners {
        let wrong: u64 = peer.control.hear()?;
        anyhow::ensure!(wrong == 0, "a subscriber saw {wrong} wrong words");
        peer.end()?;
    }
    Ok(measured)
}

/// The publisher.
struct Source {
    stream: Stream,
    words: Words,
    memory: Memory,
    publisher: Publisher,
    layout: Layout,
    subscribers: usize,
    turn: u64,
}

impl Source {
    fn fill(&self, slot: u64, seed: u64) -> warpipe::Result<()> {
        // SAFETY: every slot here is SLOT_BYTES long, is not written before its readers are done,
        // and is kept until they are done with the last.
        unsafe { warpipe_kernels::fill(&self.stream, slot, WORDS, seed) }
    }

    fn await_done(&self, turn: u64) -> anyhow::Result<()> {
        (0..self.subscribers).try_for_each(|index| self.words.await_word(done(index), turn))
    }

    /// Microseconds an item, and the gaps in nanoseconds.
    fn floor(&mut self, items: usize) -> anyhow::Result<(f64, Vec<u64>)> {
        let first = self.turn;
        let (start, mut gaps) = (Instant::now(), Gaps::new(items));
        for turn in first + 1..=first + items as u64 {
            self.await_done(turn.saturating_sub(u64::from(IN_FLIGHT)).max(first))?;
            self.fill(
                self.memory.ptr() + turn % u64::from(IN_FLIGHT) * SLOT_BYTES,
                turn,
            )?;
            let ops: Vec<_> = (0..self.subscribers)
                .map(|index| self.words.signal(ready(index), turn))
                .collect();
            // SAFETY: the words live until the last of them has been awaited.
            unsafe { enqueue(&self.stream, &ops) }?;
            gaps.tick();
        }
        self.turn = first + items as u64;
        self.await_done(self.turn)?;
        Ok((per_item(start, items), gaps.ns))
    }

    fn ours(&mut self, items: usize) -> anyhow::Result<(f64, Vec<u64>)> {
        let (start, mut gaps) = (Instant::now(), Gaps::new(items));
        for item in 0..items {
            let loan = self.publisher.loan(&self.layout)?;
            self.fill(loan.slot_ptr(), item as u64)?;
            loan.send(&self.stream)?;
            gaps.tick();
        }
        await_releases(&self.publisher)?;
        Ok((per_item(start, items), gaps.ns))
    }
}

/// Waits until every subscriber has released everything.
pub fn await_releases(publisher: &Publisher) -> anyhow::Result<()> {
    let start = Instant::now();
    while publisher
        .subscribers()
        .iter()
        .any(|subscriber| subscriber.in_flight > 0)
    {
        anyhow::ensure!(
            start.elapsed() < PATIENCE,
            "a subscriber does not release what it holds"
        );
        std::thread::yield_now();
    }
    Ok(())
}

pub fn per_item(start: Instant, items: usize) -> f64 {
    start.elapsed().as_secs_f64() * 1e6 / items as f64
}

/// The times between one item and the next.
pub struct Gaps {
    last: Instant,
    pub ns: Vec<u64>,
}

impl Gaps {
    pub fn new(items: usize) -> Gaps {
        Gaps {
            last: Instant::now(),
            ns: Vec::with_capacity(items),
        }
    }

    pub fn tick(&mut self) {
        let now = Instant::now();
        self.ns.push((now - self.last).as_nanos() as u64);
        self.last = now;
    }
}

/// A subscriber's part.
pub fn consume(terms: &Terms, control: &Control) -> anyhow::Result<()> {
    let (device, domain) = terms.place.open()?;
    let words = Words::open(&device, control.receive_fd()?, 2 * terms.subscribers)?;
    let (bytes, owner): (u64, DeviceId) = control.hear()?;
    let memory = Memory::import(&device, control.receive_fd()?, bytes, owner)?;
    let subscriber = Subscriber::open(NAME, domain.on(&device), std::time::Duration::ZERO)?;
    let errors = Words::create(&device, 1)?;
    let stream = device.stream()?;
    let mut sink = Sink {
        device,
        stream,
        words,
        memory,
        subscriber,
        errors,
        index: terms.index,
        turn: 0,
    };
    for _ in 0..=terms.rounds {
        sink.floor(terms.items)?;
        sink.ours(terms.items)?;
    }
    sink.stream.synchronize(PATIENCE)?;
    control.send(&sink.errors.word(0).load())
}

struct Sink {
    device: Device,
    stream: Stream,
    words: Words,
    memory: Memory,
    subscriber: Subscriber,
    errors: Words,
    index: usize,
    turn: u64,
}

impl Sink {
    fn check(&self, slot: u64, seed: u64) -> warpipe::Result<()> {
        debug_assert_eq!(self.device.info().id, self.stream.device().info().id);
        // SAFETY: the slot is SLOT_BYTES long and complete behind the wait that was enqueued; the
        // counter and the memory live until the stream is idle.
        unsafe { warpipe_kernels::check(&self.stream, slot, WORDS, seed, self.errors.address(0)) }
    }

    fn floor(&mut self, items: usize) -> anyhow::Result<()> {
        let (first, last) = (self.turn + 1, self.turn + items as u64);
        // SAFETY: the words live until the last of them has been awaited, below.
        unsafe { enqueue(&self.stream, &[self.words.wait(ready(self.index), first)]) }?;
        for turn in first..=last {
            self.check(
                self.memory.ptr() + turn % u64::from(IN_FLIGHT) * SLOT_BYTES,
                turn,
            )?;
            let ops = [
                self.words.signal(done(self.index), turn),
                self.words.wait(ready(self.index), turn + 1),
            ];
            // SAFETY: as above. Behind the last item nothing is waited for.
            unsafe { enqueue(&self.stream, &ops[..if turn < last { 2 } else { 1 }]) }?;
            self.words.await_word(
                done(self.index),
                turn.saturating_sub(u64::from(IN_FLIGHT)).max(first - 1),
            )?;
        }
        self.turn = last;
        self.words.await_word(done(self.index), last)
    }

    fn ours(&mut self, items: usize) -> anyhow::Result<()> {
        let mut sample = self.subscriber.receive(&self.stream, PATIENCE)?;
        for item in 0..items as u64 {
            if item > 0 {
                sample = self.subscriber.receive_next(sample, PATIENCE)?;
            }
            self.check(sample.slot_ptr(), item)?;
        }
        Ok(())
    }
}
