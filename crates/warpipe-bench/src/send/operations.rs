//! The CPU time of a loan, a send, a receive and a release. The floor of each is the driver's calls
//! that it makes, alone, so that the difference is the library's own part.

use std::time::Instant;

use warpipe::Stream;
use warpipe_bench::raw::{Words, check_and_enqueue, enqueue};
use warpipe_testkit::figure::{Figure, Wanted, median};

use super::{BURST, SendBench, p50};
use crate::setup::{PATIENCE, Setup};

/// What is timed.
#[derive(Debug, Clone, Copy)]
enum Operation {
    Loan,
    Send,
    /// Of a sample that is complete: the stream has nothing to wait for.
    Receive,
    /// Of a sample that is not complete: the stream waits for it.
    ReceiveEarly,
    Release,
}

use Operation::{Loan, Receive, ReceiveEarly, Release, Send};

/// An operation that is reported, and the most that the library may add to the driver's calls, in
/// nanoseconds.
type Reported = (Operation, Option<f64>);

const OF_ONE: [Reported; 5] = [
    (Loan, None),
    (Send, Some(150.0)),
    (Receive, Some(120.0)),
    (ReceiveEarly, Some(120.0)),
    (Release, Some(80.0)),
];
const OF_MANY: [Reported; 1] = [(Send, Some(1_000.0))];
const MANY: usize = 64;

impl Operation {
    fn name(self, subscribers: usize) -> String {
        let what = match self {
            Loan => "a loan",
            Send => return format!("CPU beside the driver's calls, a send to {subscribers}"),
            Receive => "a receive of a complete sample",
            ReceiveEarly => "a receive of an incomplete sample",
            Release => "a release",
        };
        format!("CPU beside the driver's calls, {what}")
    }
}

/// Nanoseconds of each operation, by its number.
#[derive(Debug, Default)]
struct Times([Vec<u64>; 5]);

impl Times {
    fn time<R>(&mut self, operation: Operation, work: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = work();
        self.0[operation as usize].push(start.elapsed().as_nanos() as u64);
        result
    }

    fn of(&self, operation: Operation) -> &[u64] {
        &self.0[operation as usize]
    }
}

/// Ours and the floor's times of one round.
type Round = [Times; 2];

pub(super) fn run(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    let (of_one, of_many) = (measure(setup, 1)?, measure(setup, MANY)?);
    let of_one = OF_ONE.map(|reported| figure(&of_one, reported, 1));
    let of_many = OF_MANY.map(|reported| figure(&of_many, reported, MANY));
    Ok(of_one.into_iter().chain(of_many).collect())
}

fn figure(rounds: &[Round], (operation, limit): Reported, subscribers: usize) -> Figure {
    let of_side = |side: usize| rounds.iter().map(move |round| round[side].of(operation));
    let medians = |side| -> Vec<f64> { of_side(side).map(|times| p50(times) as f64).collect() };
    let all = |side| -> Vec<u64> { of_side(side).flatten().copied().collect() };
    let (ours, floor) = (medians(0), medians(1));
    let beside = median(&ours) - median(&floor);
    let figure = Figure::new("send", operation.name(subscribers), "ns", &ours)
        .beside(&floor)
        .spread(all(0), all(1))
        .note(format!("beside the driver's calls: {beside:.0} ns"));
    match limit {
        Some(limit) => figure.wanted(Wanted::BesideFloorAtMost(limit)),
        None => figure,
    }
}

fn measure(setup: &Setup, subscribers: usize) -> anyhow::Result<Vec<Round>> {
    let mut bench = SendBench::open(&setup.device, &setup.domain, subscribers)?;
    let reader = setup.device.stream()?;
    let mut barrier = Barrier {
        words: Words::create(&setup.device, 1)?,
        turn: 0,
    };
    let mut bare = Bare {
        words: Words::create(&setup.device, subscribers)?,
        subscribers,
        turn: 0,
    };
    let bursts = setup.times(1600) / BURST + 1;
    let mut rounds = Vec::new();
    for round in 0..=setup.rounds() {
        let mut times = Round::default();
        let [ours, floor] = &mut times;
        for _ in 0..bursts {
            bare.held_burst(&bench.stream, &reader, &mut barrier, floor)?;
            bench.held_burst(&reader, &mut barrier, ours)?;
            bare.complete_burst(&bench.stream, floor)?;
            bench.complete_burst(ours)?;
        }
        if round > 0 {
            rounds.push(times);
        }
    }
    Ok(rounds)
}

/// A word that a stream waits for.
struct Barrier {
    words: Words,
    turn: u64,
}

impl Barrier {
    /// Runs `work` while `stream` waits.
    fn hold<R>(
        &mut self,
        stream: &Stream,
        work: impl FnOnce() -> anyhow::Result<R>,
    ) -> anyhow::Result<R> {
        self.turn += 1;
        // SAFETY: the word lives until the stream is idle: the callers synchronize it.
        unsafe { enqueue(stream, &[self.words.wait(0, self.turn)]) }?;
        let result = work();
        self.words.word(0).store(self.turn);
        result
    }
}

/// The driver's calls alone.
struct Bare {
    words: Words,
    subscribers: usize,
    turn: u64,
}

impl Bare {
    /// The calls of a burst on streams that wait: no call wakes a thread of the driver's.
    fn held_burst(
        &mut self,
        stream: &Stream,
        reader: &Stream,
        barrier: &mut Barrier,
        times: &mut Times,
    ) -> anyhow::Result<()> {
        let first = self.turn + 1;
        self.turn += BURST as u64;
        let turns = first..=self.turn;
        barrier.hold(stream, || {
            for turn in turns.clone() {
                let signals: Vec<_> = (0..self.subscribers)
                    .map(|index| self.words.signal(index, turn))
                    .collect();
                times.time(Loan, || ());
                // SAFETY: the words live until the streams are idle, below.
                times.time(Send, || unsafe { check_and_enqueue(stream, &signals) })?;
            }
            for turn in turns.clone() {
                let wait = [self.words.wait(0, turn)];
                // SAFETY: as above.
                times.time(ReceiveEarly, || unsafe { check_and_enqueue(reader, &wait) })?;
            }
            for turn in turns {
                let signal = [self.words.signal(0, turn)];
                // SAFETY: as above.
                times.time(Release, || unsafe { check_and_enqueue(reader, &signal) })?;
            }
            Ok(())
        })?;
        stream.synchronize(PATIENCE)?;
        Ok(reader.synchronize(PATIENCE)?)
    }

    fn complete_burst(&mut self, stream: &Stream, times: &mut Times) -> anyhow::Result<()> {
        for _ in 0..BURST {
            // SAFETY: nothing is enqueued.
            times.time(Receive, || unsafe { check_and_enqueue(stream, &[]) })?;
        }
        Ok(())
    }
}

impl SendBench {
    /// A burst on streams that wait. The calls of many subscribers come later: they would fill the
    /// reader's launch queue.
    fn held_burst(
        &mut self,
        reader: &Stream,
        barrier: &mut Barrier,
        times: &mut Times,
    ) -> anyhow::Result<()> {
        barrier.hold(&self.stream, || {
            for _ in 0..BURST {
                let loan = times.time(Loan, || self.publisher.loan(&self.layout))?;
                times.time(Send, || loan.send(&self.stream))?;
            }
            if let [subscriber] = &mut self.subscribers[..] {
                let mut held = Vec::with_capacity(BURST);
                for _ in 0..BURST {
                    let receive = || subscriber.receive(reader, PATIENCE);
                    held.push(times.time(ReceiveEarly, receive)?);
                }
                for sample in held {
                    times.time(Release, || drop(sample));
                }
            }
            Ok(())
        })?;
        self.stream.synchronize(PATIENCE)?;
        if self.subscribers.len() > 1 {
            self.read(&mut Times::default())?;
        }
        Ok(reader.synchronize(PATIENCE)?)
    }

    /// Sends a burst, and lets all subscribers read it once it is complete.
    fn complete_burst(&mut self, times: &mut Times) -> anyhow::Result<()> {
        for _ in 0..BURST {
            self.publisher.loan(&self.layout)?.send(&self.stream)?;
        }
        self.stream.synchronize(PATIENCE)?;
        self.read(times)
    }

    fn read(&mut self, times: &mut Times) -> anyhow::Result<()> {
        let mut held = Vec::with_capacity(BURST);
        for subscriber in &mut self.subscribers {
            for _ in 0..BURST {
                let receive = || subscriber.receive(&self.stream, PATIENCE);
                held.push(times.time(Receive, receive)?);
            }
            held.clear();
        }
        Ok(self.stream.synchronize(PATIENCE)?)
    }
}
