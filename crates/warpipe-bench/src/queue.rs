//! A job to a worker and back, compared with a round trip over two bare channels; and four workers
//! compared with one.
//!
//! The round trips run the same kernels in the same two processes and take turns. Each is awaited
//! by the submitter's CPU, as a result is. The queue adds its bookkeeping: the lease, the credit,
//! the result's completion.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use warpipe::{
    DType, Device, Domain, Error, Layout, Publisher, Queue, QueueOptions, ResultOrder, Stream,
    Subscriber, Worker, WorkerOptions,
};
use warpipe_testkit::figure;
use warpipe_testkit::figure::{Figure, Wanted};

use super::Role;
use super::handoff::{p50_us, subscriber};
use super::peer_process::{Control, PeerProcess};
use super::setup::{BenchDomain, PATIENCE, Setup};

/// Floats that the kernels work on.
const FLOATS: u64 = 1024;

const QUEUE: &str = "bench/queue";
const WORKERS: &str = "bench/workers";
const PING: &str = "bench/queue-ping";
const PONG: &str = "bench/queue-pong";

/// The GPU time of one job of the workers.
const JOB: Duration = Duration::from_millis(1);

/// Four workers' time for a job against one's, so that they do 3.5 times as much.
const WORKERS_RATIO: f64 = 4.0 / 3.5;

/// The other process's work.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Terms {
    /// Answer so many round trips over channels and as many jobs, in turns.
    Answer {
        place: BenchDomain,
        rounds: usize,
        trips: usize,
    },
    /// Work for the workers' queue until it ends.
    Work { place: BenchDomain },
}

pub fn run(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    Ok(vec![round_trip(setup)?, several_workers(setup)?])
}

/// The polling time: the round trip's cost is measured, not that of a sleep.
fn spin(device: &Device) -> Duration {
    Duration::from_micros(if Device::host().info().id == device.info().id {
        20
    } else {
        5_000
    })
}

fn layout() -> warpipe::Result<Layout> {
    Layout::contiguous(DType::F32, &[FLOATS])
}

fn round_trip(setup: &Setup) -> anyhow::Result<Figure> {
    let (rounds, trips) = (setup.rounds(), setup.times(300));
    let peer = PeerProcess::start(&Role::Queue(Terms::Answer {
        place: setup.place(),
        rounds,
        trips,
    }))?;
    let (device, domain) = (&setup.device, &setup.domain);
    let publisher = Publisher::new(PING, domain.on(device))?;
    let options = QueueOptions {
        spin: spin(device),
        ..domain.on(device)
    };
    let queue = Queue::new(QUEUE, options)?;
    peer.control.send(&())?;
    let mut pong = subscriber(PONG, domain, device)?;
    publisher.wait_for_subscribers(1, PATIENCE)?;
    queue.wait_for_workers(1, PATIENCE)?;
    peer.control.send(&())?;
    let stream = device.stream()?;
    let (mut floor, mut ours, mut floor_ns, mut ours_ns) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    // The first round warms up.
    for round in 0..=rounds {
        let mut bare = Vec::with_capacity(trips);
        for trip in 0..trips {
            bare.push(channel_trip(&publisher, &mut pong, &stream, trip)?);
        }
        let mut jobs = Vec::with_capacity(trips);
        for trip in 0..trips {
            jobs.push(job_trip(&queue, &stream, trip)?);
        }
        if round > 0 {
            floor.push(p50_us(&bare));
            ours.push(p50_us(&jobs));
            floor_ns.extend(bare);
            ours_ns.extend(jobs);
        }
    }
    drop(queue);
    peer.end()?;
    Ok(Figure::new("queue", "one job to a worker and back", "us", &ours)
        .beside(&floor)
        .spread(ours_ns, floor_ns)
        .wanted(Wanted::RatioAtMost(1.2))
        .note("beside a round trip over two channels; both awaited by the CPU, medians of the rounds' p50"))
}

/// Nanoseconds of one round trip over the channels.
fn channel_trip(
    publisher: &Publisher,
    pong: &mut Subscriber,
    stream: &Stream,
    trip: usize,
) -> anyhow::Result<u64> {
    let begun = Instant::now();
    let loan = publisher.loan(&layout()?)?;
    // SAFETY: the slot is this loan's alone and FLOATS * 4 bytes long; it is sent behind the
    // kernel.
    unsafe { warpipe_kernels::fill(stream, loan.slot_ptr(), FLOATS / 2, trip as u64) }?;
    loan.send(stream)?;
    let sample = pong.receive(stream, PATIENCE)?;
    sample.wait(PATIENCE)?;
    let took = begun.elapsed().as_nanos() as u64;
    anyhow::ensure!(
        sample.layout().bytes() == FLOATS * 4,
        "an answer of another size"
    );
    Ok(took)
}

/// Nanoseconds of one job.
fn job_trip(queue: &Queue, stream: &Stream, trip: usize) -> anyhow::Result<u64> {
    let begun = Instant::now();
    let input = queue.loan(&layout()?)?;
    // SAFETY: as in `channel_trip`; it is submitted behind the kernel.
    unsafe { warpipe_kernels::fill(stream, input.slot_ptr(), FLOATS / 2, trip as u64) }?;
    let job = queue.submit(input, stream).map_err(Error::from)?;
    let result = job.wait(stream, PATIENCE)?;
    let took = begun.elapsed().as_nanos() as u64;
    anyhow::ensure!(
        result.attempt == 1 && result.layout().bytes() == FLOATS * 4,
        "another result"
    );
    Ok(took)
}

/// The other process's part.
pub fn play(terms: &Terms, control: &Control) -> anyhow::Result<()> {
    match terms {
        Terms::Answer {
            place,
            rounds,
            trips,
        } => answer(place, *rounds, *trips, control),
        Terms::Work { place } => work(place),
    }
}

fn answer(
    place: &BenchDomain,
    rounds: usize,
    trips: usize,
    control: &Control,
) -> anyhow::Result<()> {
    let (device, domain) = place.open()?;
    let stream = device.stream()?;
    let pong = Publisher::new(PONG, domain.on(&device))?;
    control.hear::<()>()?;
    let mut ping = subscriber(PING, &domain, &device)?;
    let mut worker = worker(QUEUE, &domain, &device)?;
    control.hear::<()>()?;
    for _ in 0..=rounds {
        for _ in 0..trips {
            let sample = ping.receive(&stream, PATIENCE)?;
            let loan = pong.loan(&layout()?)?;
            // SAFETY: both are FLOATS floats; the input is lent until it is released behind the
            // kernel, the output is this loan's alone.
            unsafe {
                warpipe_kernels::scale(&stream, loan.slot_ptr(), sample.slot_ptr(), FLOATS, 0.5)
            }?;
            loan.send(&stream)?;
        }
        for _ in 0..trips {
            let lease = worker.lease(&stream, PATIENCE)?;
            let output = lease.output(lease.layout())?;
            // SAFETY: as above.
            unsafe {
                warpipe_kernels::scale(&stream, output.slot_ptr(), lease.slot_ptr(), FLOATS, 0.5)
            }?;
            lease.complete(output, &stream)?;
        }
    }
    Ok(stream.synchronize(PATIENCE)?)
}

fn worker(queue: &str, domain: &Domain, device: &Device) -> anyhow::Result<Worker> {
    Ok(Worker::open(
        queue,
        WorkerOptions {
            answer_timeout: PATIENCE,
            spin: spin(device),
            ..domain.on(device)
        },
        PATIENCE,
    )?)
}

/// Jobs of one millisecond: four workers beside one.
fn several_workers(setup: &Setup) -> anyhow::Result<Figure> {
    let jobs = setup.times(400);
    let one = workers_rate(setup, 1, jobs)?;
    let four = workers_rate(setup, 4, jobs)?;
    let quarter: Vec<f64> = one.iter().map(|time| time / 4.0).collect();
    let speed_up = figure::median(&one) / figure::median(&four);
    let figure =
        Figure::new("queue", "per job of 1 ms of GPU, 4 workers", "us", &four).beside(&quarter);
    let figure = figure.note(format!(
        "beside a quarter of one worker's {:.0} us; {speed_up:.2} times as many jobs",
        figure::median(&one)
    ));
    // Only where kernels of several processes run at once can four do four times as much.
    Ok(if setup.is_mps() {
        figure.wanted(Wanted::RatioAtMost(WORKERS_RATIO))
    } else {
        figure
    })
}

/// Microseconds a job, for each round.
fn workers_rate(setup: &Setup, workers: usize, jobs: usize) -> anyhow::Result<Vec<f64>> {
    let (device, domain) = (&setup.device, &setup.domain);
    let options = QueueOptions {
        order: ResultOrder::Completion,
        ..domain.on(device)
    };
    let queue = Queue::new(WORKERS, options)?;
    let terms = || {
        Role::Queue(Terms::Work {
            place: setup.place(),
        })
    };
    let partners = (0..workers)
        .map(|_| PeerProcess::start(&terms()))
        .collect::<anyhow::Result<Vec<_>>>()?;
    queue.wait_for_workers(workers, PATIENCE)?;
    let stream = device.stream()?;
    let mut rounds = Vec::new();
    for round in 0..=setup.rounds() {
        let start = Instant::now();
        for _ in 0..jobs {
            queue.submit_bytes(b"", &stream)?;
        }
        for _ in 0..jobs {
            let result = queue.next_result(&stream, PATIENCE)?;
            result.sample.finish(PATIENCE)?;
        }
        if round > 0 {
            rounds.push(start.elapsed().as_secs_f64() * 1e6 / jobs as f64);
        }
    }
    drop(queue);
    partners.into_iter().try_for_each(PeerProcess::end)?;
    Ok(rounds)
}

fn work(place: &BenchDomain) -> anyhow::Result<()> {
    let (device, domain) = place.open()?;
    let stream = device.stream()?;
    let mut worker = worker(WORKERS, &domain, &device)?;
    loop {
        match worker.lease(&stream, PATIENCE) {
            Ok(lease) => {
                warpipe_kernels::spin(&stream, JOB)?;
                lease.complete(None, &stream)?;
            }
            Err(Error::PeerGone { .. }) => return Ok(stream.synchronize(PATIENCE)?),
            Err(error) => return Err(error.into()),
        }
    }
}
