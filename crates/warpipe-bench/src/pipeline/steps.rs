//! From the floor of a pipeline to the library in steps, so that one run tells which of them costs
//! how much: each row differs from the row above in one point.

use std::os::fd::AsFd;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use warpipe::backend::StreamOp;
use warpipe::{
    DType, DeviceId, Layout, Publisher, PublisherOptions, Stream, Subscriber, SubscriberOptions,
};
use warpipe_bench::raw::{Memory, Words, enqueue};
use warpipe_testkit::figure::{Figure, median};

use crate::Role;
use crate::fanout::{await_releases, per_item};
use crate::peer_process::{Control, PeerProcess};
use crate::setup::{BenchDomain, IN_FLIGHT, PATIENCE, Setup};

/// 64-bit words that the kernels fill and check.
const WORDS: u64 = 512;
const SLOT_BYTES: u64 = WORDS * 8;

/// The channel of a subscriber as it comes, of one that polls on, and of one that releases a sample
/// and receives the next one in one call.
const NAMES: [&str; 3] = [
    "bench/pipeline",
    "bench/pipeline-polls",
    "bench/pipeline-next",
];

/// Of [`NAMES`].
const NEXT: usize = 2;

/// The words of both processes, each in a line of its own, and as many as slots: `ready` and the
/// consumer's `done`, which streams signal; the entry, which the producer's CPU writes.
const READY: usize = 0;
const DONE: usize = IN_FLIGHT as usize;
const ENTRY: usize = 2 * IN_FLIGHT as usize;
const LINES: usize = 3 * IN_FLIGHT as usize;

/// Where the entry lies in its line, or in that of `ready`: behind the word.
const ENTRY_WORD: usize = 4;

/// How an item is handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// The consumer enqueues the wait for an item together with the signal of the item before it.
    OneCall,
    /// In two calls of the driver.
    TwoCalls,
    /// And the wait only once the consumer's CPU has seen an entry, which the producer's CPU writes
    /// ahead of its signal; not at all for an item that is complete by then.
    EntryFirst,
    /// And the entry lies in the line of `ready`, which the GPU writes.
    SharedLine,
    /// And each slot has words of its own, as the entries of a ring have.
    SlotWords,
    /// By the library.
    Library,
    /// And the subscriber polls for as long as it takes.
    Polling,
    /// By the library, with the release of a sample and the wait for the next in one call.
    Next,
}

const STEPS: [(Step, &str); 8] = [
    (Step::OneCall, "the floor: signal and wait in one call"),
    (Step::TwoCalls, "in two calls"),
    (Step::EntryFirst, "the wait behind a look at an entry"),
    (Step::SharedLine, "the entry in the line of `ready`"),
    (Step::SlotWords, "words for each slot"),
    (Step::Library, "the library"),
    (Step::Polling, "the library, a subscriber that polls on"),
    (Step::Next, "the library, `receive_next`"),
];

/// The parameters of the consumer's process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Terms {
    place: BenchDomain,
    rounds: usize,
    items: usize,
}

/// What both processes have: words and slots.
struct Shared {
    stream: Stream,
    words: Words,
    memory: Memory,
    turn: u64,
}

impl Shared {
    fn slot(&self, turn: u64) -> u64 {
        self.memory.ptr() + turn % u64::from(IN_FLIGHT) * SLOT_BYTES
    }

    /// The line of an item's word: of all items, or of the item's slot.
    fn line(step: Step, first: usize, turn: u64) -> usize {
        match step {
            Step::SlotWords => first + (turn % u64::from(IN_FLIGHT)) as usize,
            _ => first,
        }
    }

    fn entry(&self, step: Step, turn: u64) -> &AtomicU64 {
        let first = match step {
            Step::EntryFirst => ENTRY,
            _ => READY,
        };
        &self.words.line(Shared::line(step, first, turn))[ENTRY_WORD]
    }

    fn enqueue(&self, ops: &[StreamOp]) -> warpipe::Result<()> {
        // SAFETY: the words live until the last of them has been awaited, at the end of a step.
        unsafe { enqueue(&self.stream, ops) }
    }
}

/// Measures with this process as the producer: a figure for each step.
pub fn run(setup: &Setup, name: &str, place: BenchDomain) -> anyhow::Result<Vec<Figure>> {
    let (rounds, items) = (setup.rounds(), setup.times(2000));
    let publishers = NAMES
        .iter()
        .map(|name| {
            Publisher::new(
                name,
                PublisherOptions {
                    depth: IN_FLIGHT,
                    ..setup.domain.on(&setup.device)
                },
            )
        })
        .collect::<warpipe::Result<Vec<_>>>()?;
    let shared = Shared {
        stream: setup.device.stream()?,
        words: Words::create(&setup.device, LINES)?,
        memory: Memory::allocate(&setup.device, u64::from(IN_FLIGHT) * SLOT_BYTES)?,
        turn: 0,
    };
    let terms = Terms {
        place,
        rounds,
        items,
    };
    let peer = PeerProcess::start(&Role::PipelineSteps(terms))?;
    let (fd, bytes, owner) = shared.memory.export()?;
    peer.control.send_fd(shared.words.fd())?;
    peer.control.send(&(bytes, owner))?;
    peer.control.send_fd(fd.as_fd())?;
    for publisher in &publishers {
        publisher.wait_for_subscribers(1, PATIENCE)?;
    }
    let mut producer = Producer {
        shared,
        publishers,
        layout: Layout::contiguous(DType::U64, &[WORDS])?,
    };
    let mut measured = STEPS.map(|_| Vec::new());
    for round in 0..=rounds {
        for ((step, _), us) in STEPS.iter().zip(&mut measured) {
            let took = producer.produce(*step, items)?;
            if round > 0 {
                us.push(took);
            }
        }
    }
    let wrong: u64 = peer.control.hear()?;
    anyhow::ensure!(wrong == 0, "the consumer saw {wrong} wrong words");
    peer.end()?;
    Ok(figures(name, &measured))
}

fn figures(name: &str, measured: &[Vec<f64>; STEPS.len()]) -> Vec<Figure> {
    let mut above = None;
    let rows = STEPS.iter().zip(measured).map(|((_, what), us)| {
        let more = above.replace(median(us)).map(|above| median(us) - above);
        let figure = Figure::new("pipeline", format!("in steps, {name}: {what}"), "us", us)
            .beside(&measured[0]);
        match more {
            Some(more) => figure.note(format!("{more:+.2} us beside the row above")),
            None => figure,
        }
    });
    rows.collect()
}

struct Producer {
    shared: Shared,
    publishers: Vec<Publisher>,
    layout: Layout,
}

impl Producer {
    /// Microseconds an item.
    fn produce(&mut self, step: Step, items: usize) -> anyhow::Result<f64> {
        match step {
            Step::Library => self.send(0, items),
            Step::Polling => self.send(1, items),
            Step::Next => self.send(NEXT, items),
            _ => self.signal(step, items),
        }
    }

    fn fill(&self, slot: u64, seed: u64) -> warpipe::Result<()> {
        // SAFETY: every slot here is SLOT_BYTES long, is not written before its reader is done, and
        // is kept until that is done with the last.
        unsafe { warpipe_kernels::fill(&self.shared.stream, slot, WORDS, seed) }
    }

    fn await_done(&self, step: Step, turn: u64) -> anyhow::Result<()> {
        // Nothing was done in front of the step's first item, and another word says so.
        if turn == self.shared.turn {
            return Ok(());
        }
        let done = Shared::line(step, DONE, turn);
        self.shared.words.await_word(done, turn)
    }

    fn signal(&mut self, step: Step, items: usize) -> anyhow::Result<f64> {
        let first = self.shared.turn;
        let last = first + items as u64;
        let start = Instant::now();
        for turn in first + 1..=last {
            let over = turn.saturating_sub(u64::from(IN_FLIGHT)).max(first);
            self.await_done(step, over)?;
            self.fill(self.shared.slot(turn), turn)?;
            if !matches!(step, Step::OneCall | Step::TwoCalls) {
                self.shared.entry(step, turn).store(turn, Release);
            }
            let ready = Shared::line(step, READY, turn);
            self.shared
                .enqueue(&[self.shared.words.signal(ready, turn)])?;
        }
        self.await_done(step, last)?;
        self.shared.turn = last;
        Ok(per_item(start, items))
    }

    fn send(&mut self, which: usize, items: usize) -> anyhow::Result<f64> {
        let publisher = &self.publishers[which];
        let start = Instant::now();
        for item in 0..items {
            let loan = publisher.loan(&self.layout)?;
            self.fill(loan.slot_ptr(), item as u64)?;
            loan.send(&self.shared.stream)?;
        }
        await_releases(publisher)?;
        Ok(per_item(start, items))
    }
}

/// The consumer's part.
pub fn consume(terms: &Terms, control: &Control) -> anyhow::Result<()> {
    let (device, domain) = terms.place.open()?;
    let words = Words::open(&device, control.receive_fd()?, LINES)?;
    let (bytes, owner): (u64, DeviceId) = control.hear()?;
    let memory = Memory::import(&device, control.receive_fd()?, bytes, owner)?;
    let options: SubscriberOptions = domain.on(&device);
    let spinning = SubscriberOptions {
        spin: PATIENCE,
        ..options.clone()
    };
    let subscribers = vec![
        Subscriber::open(NAMES[0], options.clone(), std::time::Duration::ZERO)?,
        Subscriber::open(NAMES[1], spinning, std::time::Duration::ZERO)?,
        Subscriber::open(NAMES[NEXT], options, std::time::Duration::ZERO)?,
    ];
    let mut consumer = Consumer {
        shared: Shared {
            stream: device.stream()?,
            words,
            memory,
            turn: 0,
        },
        subscribers,
        errors: Words::create(&device, 1)?,
    };
    for _ in 0..=terms.rounds {
        for (step, _) in STEPS {
            consumer.consume(step, terms.items)?;
        }
    }
    consumer.shared.stream.synchronize(PATIENCE)?;
    control.send(&consumer.errors.word(0).load())
}

struct Consumer {
    shared: Shared,
    subscribers: Vec<Subscriber>,
    errors: Words,
}

impl Consumer {
    fn consume(&mut self, step: Step, items: usize) -> anyhow::Result<()> {
        match step {
            Step::OneCall | Step::TwoCalls => self.wait_ahead(step, items),
            Step::EntryFirst | Step::SharedLine | Step::SlotWords => {
                self.wait_behind_entry(step, items)
            }
            Step::Library => self.receive(0, items),
            Step::Polling => self.receive(1, items),
            Step::Next => self.receive_next(items),
        }
    }

    fn check(&self, slot: u64, seed: u64) -> warpipe::Result<()> {
        // SAFETY: the slot is SLOT_BYTES long and complete behind the wait that was enqueued, or
        // seen so; the counter and the memory live until the stream is idle.
        unsafe {
            warpipe_kernels::check(
                &self.shared.stream,
                slot,
                WORDS,
                seed,
                self.errors.address(0),
            )
        }
    }

    fn wait_ahead(&mut self, step: Step, items: usize) -> anyhow::Result<()> {
        let shared = &self.shared;
        let (first, last) = (shared.turn + 1, shared.turn + items as u64);
        shared.enqueue(&[shared.words.wait(READY, first)])?;
        for turn in first..=last {
            self.check(shared.slot(turn), turn)?;
            let ops = [
                shared.words.signal(DONE, turn),
                shared.words.wait(READY, turn + 1),
            ];
            // Behind the last item nothing is waited for.
            let ops = &ops[..if turn < last { 2 } else { 1 }];
            match step {
                Step::OneCall => shared.enqueue(ops)?,
                _ => ops.chunks(1).try_for_each(|op| shared.enqueue(op))?,
            }
            let over = turn.saturating_sub(u64::from(IN_FLIGHT)).max(first - 1);
            shared.words.await_word(DONE, over)?;
        }
        self.shared.turn = last;
        self.shared.words.await_word(DONE, last)
    }

    fn wait_behind_entry(&mut self, step: Step, items: usize) -> anyhow::Result<()> {
        let shared = &self.shared;
        let (first, last) = (shared.turn + 1, shared.turn + items as u64);
        for turn in first..=last {
            await_entry(shared.entry(step, turn), turn)?;
            let ready = Shared::line(step, READY, turn);
            if !shared.words.word(ready).reached(turn) {
                shared.enqueue(&[shared.words.wait(ready, turn)])?;
            }
            self.check(shared.slot(turn), turn)?;
            let done = Shared::line(step, DONE, turn);
            shared.enqueue(&[shared.words.signal(done, turn)])?;
        }
        self.shared.turn = last;
        self.shared
            .words
            .await_word(Shared::line(step, DONE, last), last)
    }

    fn receive(&mut self, which: usize, items: usize) -> anyhow::Result<()> {
        for item in 0..items {
            let sample = self.subscribers[which].receive(&self.shared.stream, PATIENCE)?;
            self.check(sample.slot_ptr(), item as u64)?;
        }
        Ok(())
    }

    fn receive_next(&mut self, items: usize) -> anyhow::Result<()> {
        let mut sample = self.subscribers[NEXT].receive(&self.shared.stream, PATIENCE)?;
        for item in 0..items as u64 {
            if item > 0 {
                sample = self.subscribers[NEXT].receive_next(sample, PATIENCE)?;
            }
            self.check(sample.slot_ptr(), item)?;
        }
        Ok(())
    }
}

/// Polls an entry, as a subscriber does that does not sleep.
fn await_entry(entry: &AtomicU64, turn: u64) -> anyhow::Result<()> {
    let is_there = || entry.load(Acquire) >= turn;
    let start = Instant::now();
    while !is_there() {
        if (0..256).any(|_| {
            std::hint::spin_loop();
            is_there()
        }) {
            return Ok(());
        }
        anyhow::ensure!(start.elapsed() < PATIENCE, "entry {turn} does not come");
        // Where both processes share a CPU, the other one has to run.
        std::thread::yield_now();
    }
    Ok(())
}
