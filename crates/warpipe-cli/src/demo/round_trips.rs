//! Round trips with one item in flight, and the floor under them: the same kernels ordered by bare
//! words.
//!
//! One end asks: its kernel fills a small tensor, the other's kernel checks it and fills one of its
//! own, and the asking end's CPU sees that this one is complete. A hand-over is half of that. In
//! the floor both know the memory and no channel is between them: two words of shared memory tell
//! the streams of each other, as in `warpipe-bench handoff`.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use warpipe::{Device, DeviceKind, DevicePtr, Domain, Layout, Publisher, Stream, Subscriber};

use super::orders::send_event;
use super::protocol::Event;
use super::{ITEM_PATIENCE, START_PATIENCE};
use crate::raw::{Memory, Words, enqueue};
use crate::registered::RegisteredPage;
use crate::statistics::Histogram;

/// Of the tensors: a hand-over's cost is measured, not a kernel's.
pub const ITEM_BYTES: u64 = 4096;
/// Words of shared memory that the floor takes.
pub const WORDS: usize = 2;
/// Round trips of the floor that the answering end enqueues ahead.
const AHEAD: u64 = 4;
/// How long a receiver of a GPU's items polls, as in `warpipe-bench handoff`, where there are so
/// many cores.
const POLL: Duration = Duration::from_millis(5);
const CORES_TO_POLL: usize = 4;

const PING: usize = 0;
const PONG: usize = 1;

/// Which end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It fills first, and measures.
    Asking,
    /// It checks and fills back.
    Answering,
}

/// One end, with its channels there and back.
pub struct RoundTrips {
    stream: Stream,
    publisher: Publisher,
    subscriber: Subscriber,
    layout: Layout,
    /// Counts wrong words. Never unregistered: after a fault, checks may still be running.
    page: &'static RegisteredPage,
    floor: Option<(Words, Memory)>,
    /// Of all trips of the floor.
    turn: u64,
}

impl RoundTrips {
    /// Opens this end, while the other process opens the other.
    pub fn open(
        end: End,
        domain: &Domain,
        device: &Device,
        floor: Option<PathBuf>,
    ) -> anyhow::Result<RoundTrips> {
        let names = ["demo/there", "demo/back"];
        let (out, back) = if end == End::Asking {
            (names[0], names[1])
        } else {
            (names[1], names[0])
        };
        let publisher = Publisher::builder(out)
            .domain(domain)
            .device(device)
            .build()?;
        let subscriber = subscriber(back, domain, device)?;
        publisher.wait_for_subscribers(1, START_PATIENCE)?;
        let floor = floor.map(|path| open_floor(device, &path)).transpose()?;
        Ok(RoundTrips {
            stream: device.stream()?,
            publisher,
            subscriber,
            layout: Layout::bytes_only(ITEM_BYTES)?,
            page: Box::leak(Box::new(RegisteredPage::new(device)?)),
            floor,
            turn: 0,
        })
    }

    /// So many trips of each kind, asking; reports how long they took.
    pub fn ask(&mut self, trips: u32) -> anyhow::Result<()> {
        let (mut ours, mut floor) = (Histogram::default(), Histogram::default());
        for _ in 0..trips {
            if let Some(taken) = self.ask_floor()? {
                floor.record(taken);
            }
        }
        for trip in 0..trips {
            let begun = Instant::now();
            self.send(u64::from(trip))?;
            let back = self.subscriber.receive(&self.stream)?;
            back.wait(ITEM_PATIENCE)?;
            ours.record(begun.elapsed());
            self.check(back.ptr(), !u64::from(trip))?;
        }
        self.conclude()?;
        Ok(send_event(&Event::RoundTrips { ours, floor })?)
    }

    /// The same, answering.
    pub fn answer(&mut self, trips: u32) -> anyhow::Result<()> {
        self.answer_floor(u64::from(trips))?;
        for trip in 0..trips {
            let sample = self.subscriber.receive(&self.stream)?;
            self.check(sample.ptr(), u64::from(trip))?;
            self.send(!u64::from(trip))?;
        }
        self.conclude()?;
        Ok(send_event(&Event::RoundTrips {
            ours: Histogram::default(),
            floor: Histogram::default(),
        })?)
    }

    fn send(&self, seed: u64) -> anyhow::Result<()> {
        let loan = self.publisher.loan(&self.layout)?;
        self.fill(loan.ptr(), seed)?;
        loan.send(&self.stream).map_err(warpipe::Error::from)?;
        Ok(())
    }

    /// The stream's work is done, and every word was right.
    fn conclude(&self) -> anyhow::Result<()> {
        self.stream.synchronize(ITEM_PATIENCE)?;
        let wrong = self.page.word(0).load();
        anyhow::ensure!(wrong == 0, "{wrong} wrong words in the round trips");
        Ok(())
    }

    fn fill(&self, words: DevicePtr, seed: u64) -> warpipe::Result<()> {
        // SAFETY: the memory is a loan's or this end's own, and as long; it is sent or kept behind
        // the stream's work.
        unsafe { warpipe_kernels::fill(&self.stream, words, ITEM_BYTES / 8, seed) }
    }

    fn check(&self, words: DevicePtr, seed: u64) -> warpipe::Result<()> {
        // SAFETY: the memory is a sample's that is released behind this kernel, or this end's own;
        // the page is never unregistered, and nothing else than checks writes the word.
        unsafe {
            warpipe_kernels::check(
                &self.stream,
                words,
                ITEM_BYTES / 8,
                seed,
                self.page.address(0),
            )
        }
    }

    fn ask_floor(&mut self) -> anyhow::Result<Option<Duration>> {
        let Some((words, own)) = &self.floor else {
            return Ok(None);
        };
        self.turn += 1;
        let begun = Instant::now();
        self.fill(own.ptr(), self.turn)?;
        // SAFETY: the words live until the last of them has been awaited.
        unsafe { enqueue(&self.stream, &[words.signal(PING, self.turn)]) }?;
        words.await_word(PONG, self.turn)?;
        let taken = begun.elapsed();
        self.check(own.ptr(), self.turn)?;
        Ok(Some(taken))
    }

    fn answer_floor(&mut self, trips: u64) -> anyhow::Result<()> {
        let Some((words, own)) = &self.floor else {
            return Ok(());
        };
        let (first, last) = (self.turn + 1, self.turn + trips);
        for turn in first..=last {
            // SAFETY: the words live until the last of them has been awaited, below.
            unsafe { enqueue(&self.stream, &[words.wait(PING, turn)]) }?;
            self.check(own.ptr(), turn - 1)?;
            self.fill(own.ptr(), turn)?;
            // SAFETY: as above.
            unsafe { enqueue(&self.stream, &[words.signal(PONG, turn)]) }?;
            words.await_word(PONG, turn.saturating_sub(AHEAD).max(first - 1))?;
        }
        words.await_word(PONG, last)?;
        self.turn = last;
        Ok(())
    }
}

/// A subscriber that polls if there is a core for it: a hand-over's cost is measured, not that of a
/// wake-up.
fn subscriber(name: &str, domain: &Domain, device: &Device) -> warpipe::Result<Subscriber> {
    let builder = Subscriber::builder(name)
        .domain(domain)
        .device(device)
        .timeout(ITEM_PATIENCE);
    let builder = builder.wait_for_publisher(Some(START_PATIENCE));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let polls = device.info().id.kind == DeviceKind::Cuda && cores >= CORES_TO_POLL;
    if polls { builder.spin(POLL) } else { builder }.build()
}

/// Shared words, and memory of this process's own.
fn open_floor(device: &Device, path: &PathBuf) -> anyhow::Result<(Words, Memory)> {
    let file = std::fs::File::options().read(true).write(true).open(path)?;
    let words = Words::open(device, file.into(), WORDS)?;
    let own = Memory::allocate(device, ITEM_BYTES)?;
    let stream = device.stream()?;
    // SAFETY: the memory is this long, and used by nothing else yet.
    unsafe { warpipe_kernels::fill(&stream, own.ptr(), ITEM_BYTES / 8, 0) }?;
    stream.synchronize(ITEM_PATIENCE)?;
    Ok((words, own))
}
