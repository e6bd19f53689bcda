//! There and back: process A's kernel, process B's kernel on what A wrote, and A again on what B
//! wrote.
//!
//! The floor and ours run the same kernels on the same kind of memory (each reads the other's over
//! an import). In the floor both CPUs enqueue ahead, at most [`IN_FLIGHT`] round trips, and only
//! words tell the streams of each other; in ours two channels do. The single round trips are timed
//! by A's CPU, which waits for each.

use std::time::Instant;

use serde::{Deserialize, Serialize};
use warpipe::{
    DType, Device, DeviceId, DevicePtr, Domain, Layout, Publisher, PublisherOptions, Sample,
    Stream, Subscriber, SubscriberOptions,
};
use warpipe_bench::raw::{Memory, Words, enqueue};
use warpipe_testkit::figure;
use warpipe_testkit::figure::{Figure, Wanted};

use super::Role;
use super::peer_process::{Control, PeerProcess};
use super::pin;
use super::setup::{BenchDomain, IN_FLIGHT, PATIENCE, Setup};

/// Floats that the kernels work on: a hand-over's cost, not theirs, is measured.
const FLOATS: u64 = 1024;
const KERNEL_BYTES: u64 = FLOATS * 4;

const PING: usize = 0;
const PONG: usize = 1;

/// B's use of the items that it receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// A kernel that reads it and writes B's own memory.
    Kernel,
    /// A copy to host memory.
    Copy,
}

/// The parameters of both processes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Terms {
    pub place: BenchDomain,
    pub answer: Answer,
    /// Of A's tensors, of which the kernels touch the first 4 KiB.
    pub bytes: u64,
    /// Round trips that may be under way in the channels.
    pub depth: u32,
    pub rounds: usize,
    /// Round trips of a round, enqueued ahead.
    pub piped: usize,
    /// Round trips of a round that A's CPU waits for, each.
    pub single: usize,
    /// The CPUs to which A's and B's threads are kept.
    pub cpus: Option<[usize; 2]>,
}

/// The results: microseconds a round trip for each round, and nanoseconds of single ones.
#[derive(Debug, Default)]
pub struct Measured {
    pub floor: Vec<f64>,
    pub ours: Vec<f64>,
    pub floor_single: Vec<u64>,
    pub ours_single: Vec<u64>,
}

pub fn run(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    let mut places = vec![("one device", setup.place())];
    places.extend(
        setup
            .second
            .map(|second| ("two devices", setup.place_on(second))),
    );
    let mut figures = Vec::new();
    for (name, place) in places {
        for (answer, hop) in [
            (Answer::Kernel, "kernel -> kernel"),
            (Answer::Copy, "kernel -> copy to host"),
        ] {
            figures.push(case(
                setup,
                format!("{hop}, {name}, sent"),
                place.clone(),
                answer,
            )?);
        }
    }
    Ok(figures)
}

fn case(setup: &Setup, name: String, place: BenchDomain, answer: Answer) -> anyhow::Result<Figure> {
    let (piped, single) = (setup.times(1000), setup.times(200));
    let terms = Terms {
        place,
        answer,
        bytes: KERNEL_BYTES,
        depth: IN_FLIGHT,
        rounds: setup.rounds(),
        piped,
        single,
        cpus: None,
    };
    let measured = measure(setup, &terms)?;
    let note = format!(
        "single, awaited by the CPU: {:.1} us beside {:.1} us (p50)",
        p50_us(&measured.ours_single),
        p50_us(&measured.floor_single)
    );
    Ok(Figure::new("handoff", name, "us", &measured.ours)
        .beside(&measured.floor)
        .spread(measured.ours_single, measured.floor_single)
        .wanted(Wanted::RatioAtMost(1.10))
        .note(note))
}

pub fn p50_us(samples: &[u64]) -> f64 {
    figure::Quantiles::of(samples.to_vec()).map_or(f64::NAN, |quantiles| quantiles.p50 as f64 / 1e3)
}

/// One process's end: its stream, the bare words and buffers, and its channels.
struct End {
    stream: Stream,
    words: Words,
    /// Written here in the floor.
    own: Memory,
    /// The other's, imported.
    theirs: Memory,
    /// The last value that the floor's words have reached.
    turn: u64,
    publisher: Publisher,
    subscriber: Subscriber,
    layout: Layout,
}

/// Measures with this process as A.
pub fn measure(setup: &Setup, terms: &Terms) -> anyhow::Result<Measured> {
    let words = Words::create(&setup.device, 2)?;
    let own = Memory::allocate(&setup.device, KERNEL_BYTES)?;
    let peer = PeerProcess::start(&Role::Handoff(terms.clone()))?;
    let _here = terms
        .cpus
        .map(|[a, _]| pin::this_thread_to(a))
        .transpose()?;
    let control = &peer.control;
    control.send_fd(words.fd())?;
    let theirs = exchange(control, &setup.device, &own)?;
    let layout = Layout::bytes_only(terms.bytes)?;
    // Room for what is in flight and the loan beside it.
    let limit = (terms.bytes * u64::from(terms.depth + 2)).max(64 << 20);
    let options = PublisherOptions {
        depth: terms.depth,
        memory_limit: limit,
        loan_timeout: PATIENCE,
        ..setup.domain.on(&setup.device)
    };
    let publisher = Publisher::new("bench/ping", options)?;
    control.send(&())?;
    let subscriber = subscriber("bench/pong", &setup.domain, &setup.device)?;
    publisher.wait_for_subscribers(1, PATIENCE)?;
    control.send(&())?;
    let mut end = End {
        stream: setup.device.stream()?,
        words,
        own,
        theirs,
        turn: 0,
        publisher,
        subscriber,
        layout,
    };
    let mut measured = Measured::default();
    // The first round warms up.
    for round in 0..=terms.rounds {
        let floor = end.floor_piped(terms)?;
        let ours = end.ours(terms, terms.piped, None)?;
        let mut ours_single = Vec::with_capacity(terms.single);
        let floor_single = end.floor_single(terms)?;
        end.ours(terms, terms.single, Some(&mut ours_single))?;
        if round > 0 {
            measured.floor.push(floor);
            measured.ours.push(ours);
            measured.floor_single.extend(floor_single);
            measured.ours_single.extend(ours_single);
        }
    }
    peer.end()?;
    Ok(measured)
}

/// Each gives the other its memory to read.
fn exchange(control: &Control, device: &Device, own: &Memory) -> anyhow::Result<Memory> {
    let (fd, bytes, id) = own.export()?;
    control.send(&(bytes, id))?;
    control.send_fd(std::os::fd::AsFd::as_fd(&fd))?;
    let (bytes, owner): (u64, DeviceId) = control.hear()?;
    let fd = control.receive_fd()?;
    Memory::import(device, fd, bytes, owner)
}

/// A subscriber that polls: the round trip's cost is measured, not that of a sleep.
pub fn subscriber(name: &str, domain: &Domain, device: &Device) -> anyhow::Result<Subscriber> {
    let spin = if Device::host().info().id == device.info().id {
        20
    } else {
        5_000
    };
    Ok(Subscriber::open(
        name,
        SubscriberOptions {
            spin: std::time::Duration::from_micros(spin),
            ..domain.on(device)
        },
        PATIENCE,
    )?)
}

/// A's part.
impl End {
    /// A's kernel: reads B's answer, or if B copies, writes a pattern that B can check.
    fn work(
        &self,
        answer: Answer,
        out: DevicePtr,
        input: DevicePtr,
        seed: u64,
    ) -> warpipe::Result<()> {
        // SAFETY: both are at least KERNEL_BYTES long; the memory is kept until the stream's last
        // word is reached; the words order the writer and the reader.
        unsafe {
            match answer {
                Answer::Kernel => warpipe_kernels::scale(&self.stream, out, input, FLOATS, 2.0),
                Answer::Copy => warpipe_kernels::fill(&self.stream, out, KERNEL_BYTES / 8, seed),
            }
        }
    }

    /// Microseconds a round trip.
    fn floor_piped(&mut self, terms: &Terms) -> anyhow::Result<f64> {
        let (first, ahead) = (self.turn, u64::from(IN_FLIGHT));
        let start = Instant::now();
        for turn in first + 1..=first + terms.piped as u64 {
            self.floor_trip(terms.answer, turn)?;
            self.words
                .await_word(PONG, turn.saturating_sub(ahead).max(first))?;
        }
        self.turn = first + terms.piped as u64;
        self.words.await_word(PONG, self.turn)?;
        Ok(start.elapsed().as_secs_f64() * 1e6 / terms.piped as f64)
    }

    fn floor_trip(&self, answer: Answer, turn: u64) -> anyhow::Result<()> {
        self.work(answer, self.own.ptr(), self.theirs.ptr(), turn)?;
        // SAFETY: the words live until the last of them has been awaited.
        Ok(unsafe {
            enqueue(
                &self.stream,
                &[self.words.signal(PING, turn), self.words.wait(PONG, turn)],
            )
        }?)
    }

    /// Nanoseconds of each round trip, until A's CPU sees its end.
    fn floor_single(&mut self, terms: &Terms) -> anyhow::Result<Vec<u64>> {
        let mut samples = Vec::with_capacity(terms.single);
        for _ in 0..terms.single {
            self.turn += 1;
            let start = Instant::now();
            self.work(terms.answer, self.own.ptr(), self.theirs.ptr(), self.turn)?;
            // SAFETY: the words live until the last of them has been awaited.
            unsafe { enqueue(&self.stream, &[self.words.signal(PING, self.turn)]) }?;
            self.words.await_word(PONG, self.turn)?;
            samples.push(start.elapsed().as_nanos() as u64);
        }
        Ok(samples)
    }

    /// Round trips over the channels, in microseconds each; with `singles`, each awaited and timed
    /// by the CPU.
    fn ours(
        &mut self,
        terms: &Terms,
        trips: usize,
        mut singles: Option<&mut Vec<u64>>,
    ) -> anyhow::Result<f64> {
        let mut last: Option<Sample> = None;
        let start = Instant::now();
        for trip in 0..trips {
            let begun = Instant::now();
            let loan = self.publisher.loan(&self.layout)?;
            let input = last.as_ref().map_or(self.theirs.ptr(), Sample::slot_ptr);
            self.work(terms.answer, loan.slot_ptr(), input, trip as u64)?;
            loan.send(&self.stream)?;
            drop(last.take());
            let pong = self.subscriber.receive(&self.stream, PATIENCE)?;
            if let Some(singles) = &mut singles {
                pong.wait(PATIENCE)?;
                singles.push(begun.elapsed().as_nanos() as u64);
            }
            last = Some(pong);
        }
        let Some(last) = last else {
            anyhow::bail!("no round trips were asked for")
        };
        last.wait(PATIENCE)?;
        let each = start.elapsed().as_secs_f64() * 1e6 / trips as f64;
        if terms.answer == Answer::Kernel {
            let answer = last.to_vec(PATIENCE)?;
            anyhow::ensure!(
                answer[..4] == 1f32.to_le_bytes(),
                "the data of the last round trip is wrong"
            );
        }
        Ok(each)
    }
}

/// B's part: the same phases in the same order.
pub fn answer(terms: &Terms, control: &Control) -> anyhow::Result<()> {
    let (device, domain) = terms.place.open()?;
    let _here = terms
        .cpus
        .map(|[_, b]| pin::this_thread_to(b))
        .transpose()?;
    let words = Words::open(&device, control.receive_fd()?, 2)?;
    let own = Memory::allocate(&device, KERNEL_BYTES)?;
    let stream = device.stream()?;
    fill_with_ones(&stream, &own)?;
    let theirs = exchange(control, &device, &own)?;
    let layout = Layout::contiguous(DType::F32, &[FLOATS])?;
    let options = PublisherOptions {
        depth: terms.depth,
        ..domain.on(&device)
    };
    let publisher = Publisher::new("bench/pong", options)?;
    control.hear::<()>()?;
    let subscriber = subscriber("bench/ping", &domain, &device)?;
    control.hear::<()>()?;
    let mut end = End {
        stream,
        words,
        own,
        theirs,
        turn: 0,
        publisher,
        subscriber,
        layout,
    };
    let host = Words::create(
        &device,
        KERNEL_BYTES as usize / warpipe_bench::raw::LINE_BYTES,
    )?;
    for _ in 0..=terms.rounds {
        end.floor_answers(terms, terms.piped, &host)?;
        end.our_answers(terms, terms.piped, &host)?;
        end.floor_answers(terms, terms.single, &host)?;
        end.our_answers(terms, terms.single, &host)?;
    }
    // The device may still write what A waits for, and the words in which this process releases A's
    // memory.
    Ok(end.stream.synchronize(PATIENCE)?)
}

fn fill_with_ones(stream: &Stream, memory: &Memory) -> anyhow::Result<()> {
    let ones: Vec<u8> = (0..FLOATS).flat_map(|_| 1f32.to_le_bytes()).collect();
    // SAFETY: the memory is that long, ours, and used by nobody yet.
    unsafe {
        stream
            .device()
            .backend()
            .upload(stream.raw(), memory.ptr(), &ones)
    }?;
    Ok(stream.synchronize(PATIENCE)?)
}

impl End {
    fn answer_with(
        &self,
        answer: Answer,
        out: DevicePtr,
        input: DevicePtr,
        host: &Words,
    ) -> warpipe::Result<()> {
        // SAFETY: as in `work`; the host page is KERNEL_BYTES long and lives until the last word is
        // reached.
        unsafe {
            match answer {
                Answer::Kernel => warpipe_kernels::scale(&self.stream, out, input, FLOATS, 0.5),
                Answer::Copy => self.stream.copy(host.address(0), input, KERNEL_BYTES),
            }
        }
    }

    fn floor_answers(&mut self, terms: &Terms, trips: usize, host: &Words) -> anyhow::Result<()> {
        let (first, last) = (self.turn + 1, self.turn + trips as u64);
        // SAFETY: the words live until the last of them has been awaited, below.
        unsafe { enqueue(&self.stream, &[self.words.wait(PING, first)]) }?;
        for turn in first..=last {
            self.answer_with(terms.answer, self.own.ptr(), self.theirs.ptr(), host)?;
            let ops = [
                self.words.signal(PONG, turn),
                self.words.wait(PING, turn + 1),
            ];
            // SAFETY: as above. Behind the last trip nothing is waited for.
            unsafe { enqueue(&self.stream, &ops[..if turn < last { 2 } else { 1 }]) }?;
            self.words.await_word(
                PONG,
                turn.saturating_sub(u64::from(IN_FLIGHT)).max(first - 1),
            )?;
        }
        self.turn = last;
        self.words.await_word(PONG, last)
    }

    fn our_answers(&mut self, terms: &Terms, trips: usize, host: &Words) -> anyhow::Result<()> {
        for trip in 0..trips {
            let ping = self.subscriber.receive(&self.stream, PATIENCE)?;
            let loan = self.publisher.loan(&self.layout)?;
            self.answer_with(terms.answer, loan.slot_ptr(), ping.slot_ptr(), host)?;
            loan.send(&self.stream)?;
            if terms.answer == Answer::Copy && trip + 1 == trips {
                self.check_copy(&ping, trip as u64, host)?;
            }
        }
        Ok(())
    }

    fn check_copy(&self, ping: &Sample, seed: u64, host: &Words) -> anyhow::Result<()> {
        ping.wait(PATIENCE)?;
        self.stream.synchronize(PATIENCE)?;
        let (found, due) = (host.word(0).load(), warpipe_kernels::pattern(seed, 0));
        anyhow::ensure!(
            found == due,
            "the last copy holds {found:#x} instead of {due:#x}"
        );
        Ok(())
    }
}
