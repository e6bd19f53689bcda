//! Many subscribers of one publisher in one other process: the time to attach them, the CPU time of
//! a send to all, and both processes' CPU time and memory while nothing is sent.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use warpipe::OptionalExtension;
use warpipe::{DType, Layout, Publisher, PublisherOptions, Stream, Subscriber};
use warpipe_testkit::figure::{Figure, Quantiles, median};

use super::Role;
use super::idle::percent;
use super::peer_process::{Control, PeerProcess};
use super::setup::{BenchDomain, PATIENCE, Setup};

const NAME: &str = "bench/subscribers";

const BENCH: &str = "subscribers";

/// More descriptors than a process has beside its subscribers, and than it has for each of them or
/// of those of another process.
const DESCRIPTORS: u64 = 256;
const DESCRIPTORS_EACH: u64 = 8;

/// Sends between two rounds in which all subscribers receive.
const BURST: usize = 8;

/// The parameters of the subscribers' process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Terms {
    place: BenchDomain,
    subscribers: usize,
}

/// The next act of the subscribers' process.
#[derive(Debug, Serialize, Deserialize)]
enum Step {
    /// Each subscriber receives so many samples.
    Receive(usize),
    /// All wait for so long, in one `poll`.
    Wait(Duration),
    End,
}

/// A process's own figures before its endpoints are made, and with them.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Footprint {
    resident_kib: [f64; 2],
    descriptors: [usize; 2],
}

impl Footprint {
    /// Kibibytes and descriptors for each of `count`.
    fn each(&self, count: usize) -> (f64, f64) {
        let [before, now] = self.resident_kib;
        let [few, many] = self.descriptors;
        let share = |sum: f64| sum / count as f64;
        (share(now - before), share(many as f64 - few as f64))
    }
}

/// The attachment of all subscribers.
#[derive(Debug, Serialize, Deserialize)]
struct Attached {
    ns: Vec<u64>,
    footprint: Footprint,
}

pub fn run(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    let counts: &[usize] = if setup.quick {
        &[1, 20]
    } else {
        &[1, 100, 1_000]
    };
    let mut figures = Vec::new();
    for &count in counts {
        figures.extend(measure(setup, count).with_context(|| format!("{count} subscribers"))?);
    }
    Ok(figures)
}

fn measure(setup: &Setup, count: usize) -> anyhow::Result<Vec<Figure>> {
    let wait = Duration::from_millis(if setup.quick { 300 } else { 2_000 });
    allow_descriptors(count)?;
    let before = footprint()?;
    let limit = count as u32 + 1;
    let options = PublisherOptions {
        depth: 2 * BURST as u32,
        subscribers_max: 4 * limit,
        ..setup.domain.on(&setup.device)
    };
    let publisher = Publisher::new(NAME, options)?;
    let peer = PeerProcess::start(&Role::Subscribers(Terms {
        place: setup.place(),
        subscribers: count,
    }))?;
    let attached: Attached = peer.control.hear()?;
    publisher.wait_for_subscribers(count, PATIENCE)?;
    let after = footprint()?;
    let ours = Footprint {
        resident_kib: [before.0, after.0],
        descriptors: [before.1, after.1],
    };
    let rounds = send(setup, &publisher, &peer.control)?;
    peer.control.send(&Step::Wait(wait))?;
    let publisher_idle = percent(|| sleep(&peer.control, wait))?;
    let idle: f64 = peer.control.hear()?;
    peer.control.send(&Step::End)?;
    peer.end()?;
    let each_us = attached.ns.iter().sum::<u64>() as f64 / 1e3 / count as f64;
    let slowest = Quantiles::of(attached.ns.clone()).map_or(0, |all| all.max) as f64 / 1e3;
    let (their_kib, their_descriptors) = attached.footprint.each(count);
    let (our_kib, our_descriptors) = ours.each(count);
    let name = |what: &str| format!("{what}, {count} subscribers in a process");
    Ok(vec![
        Figure::new(BENCH, name("attaching each"), "us", &[each_us])
            .note(format!("the slowest took {slowest:.0} us")),
        Figure::new(BENCH, name("CPU of a send"), "us", &rounds)
            .note(format!("{:.3} us for each", median(&rounds) / count as f64)),
        Figure::new(BENCH, name("CPU while nothing is sent"), "%", &[idle]).note(format!(
            "over {wait:.1?}, in one `poll` for all; the publisher's process took \
             {publisher_idle:.3} %"
        )),
        Figure::new(BENCH, name("resident memory of each"), "KiB", &[their_kib]).note(format!(
            "{:.0} KiB in all; {their_descriptors:.1} descriptors each; the publisher's process \
             {our_kib:.1} KiB and {our_descriptors:.1} descriptors for each",
            attached.footprint.resident_kib[1]
        )),
    ])
}

/// Microseconds of this thread's CPU time a send, for each round.
fn send(setup: &Setup, publisher: &Publisher, control: &Control) -> anyhow::Result<Vec<f64>> {
    let stream = setup.device.stream()?;
    let layout = Layout::contiguous(DType::U8, &[128])?;
    let mut rounds = Vec::new();
    for round in 0..=setup.rounds() {
        let us = burst(publisher, &stream, &layout)?;
        control.send(&Step::Receive(BURST))?;
        control.hear::<()>()?;
        // The first round makes the memory, and the subscribers open it.
        if round > 0 {
            rounds.push(us);
        }
    }
    Ok(rounds)
}

fn burst(publisher: &Publisher, stream: &Stream, layout: &Layout) -> anyhow::Result<f64> {
    let start = thread_cpu_us();
    for _ in 0..BURST {
        publisher.loan(layout)?.send(stream)?;
    }
    Ok((thread_cpu_us() - start) / BURST as f64)
}

fn thread_cpu_us() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
}

/// Waits for so long, or until the other process speaks or ends.
fn sleep(control: &Control, wait: Duration) -> anyhow::Result<()> {
    wait_for(
        &mut [PollFd::from_borrowed_fd(control.socket(), PollFlags::IN)],
        wait,
    )
}

/// `poll`, once.
fn wait_for(fds: &mut [PollFd<'_>], wait: Duration) -> anyhow::Result<()> {
    let limit = Timespec {
        tv_sec: wait.as_secs() as _,
        tv_nsec: wait.subsec_nanos() as _,
    };
    poll(fds, Some(&limit))?;
    Ok(())
}

/// Raises this process's limit of descriptors to what `endpoints` need, as far as it may.
pub fn allow_descriptors(endpoints: usize) -> anyhow::Result<()> {
    let needed = DESCRIPTORS + endpoints as u64 * DESCRIPTORS_EACH;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_some_and(|current| current < needed) {
        let current = Some(maximum.map_or(needed, |maximum| maximum.min(needed)));
        let raised = Rlimit { current, maximum };
        setrlimit(Resource::Nofile, raised).context("the limit of open files")?;
    }
    Ok(())
}

/// Resident memory in KiB, and open descriptors.
pub fn footprint() -> anyhow::Result<(f64, usize)> {
    let pages = std::fs::read_to_string("/proc/self/statm")?;
    let pages: f64 = pages
        .split(' ')
        .nth(1)
        .context("/proc/self/statm has no second number")?
        .parse()?;
    let descriptors = std::fs::read_dir("/proc/self/fd")?.count();
    Ok((
        pages * rustix::param::page_size() as f64 / 1024.0,
        descriptors,
    ))
}

/// The child's part.
pub fn live(terms: &Terms, control: &Control) -> anyhow::Result<()> {
    allow_descriptors(terms.subscribers)?;
    let (device, domain) = terms.place.open()?;
    let stream = device.stream()?;
    let (mut subscribers, mut ns) = (Vec::new(), Vec::new());
    let before = footprint()?;
    for _ in 0..terms.subscribers {
        let start = Instant::now();
        let subscriber = Subscriber::open(NAME, domain.on(&device), Duration::ZERO)?;
        ns.push(start.elapsed().as_nanos() as u64);
        subscribers.push(subscriber);
    }
    let after = footprint()?;
    let footprint = Footprint {
        resident_kib: [before.0, after.0],
        descriptors: [before.1, after.1],
    };
    control.send(&Attached { ns, footprint })?;
    loop {
        match control.hear()? {
            Step::Receive(count) => {
                for subscriber in &mut subscribers {
                    for _ in 0..count {
                        drop(subscriber.receive(&stream, PATIENCE)?);
                    }
                }
                control.send(&())?;
            }
            Step::Wait(wait) => {
                // From here on publishers ring for their samples.
                let fds = subscribers.iter().map(Subscriber::as_fd);
                anyhow::ensure!(fds.count() == terms.subscribers);
                receive_nothing(&mut subscribers, &stream)?;
                let idle = percent(|| {
                    let start = Instant::now();
                    loop {
                        let left = wait.saturating_sub(start.elapsed());
                        if left.is_zero() {
                            return Ok(());
                        }
                        let mut fds: Vec<_> = subscribers
                            .iter()
                            .map(|one| PollFd::from_borrowed_fd(one.as_fd(), PollFlags::IN))
                            .collect();
                        wait_for(&mut fds, left)?;
                        drop(fds);
                        receive_nothing(&mut subscribers, &stream)?;
                    }
                });
                control.send(&idle?)?;
            }
            Step::End => return Ok(()),
        }
    }
}

/// As an event loop does that was woken for nothing.
fn receive_nothing(subscribers: &mut [Subscriber], stream: &Stream) -> anyhow::Result<()> {
    for subscriber in subscribers {
        anyhow::ensure!(
            subscriber
                .receive(stream, Duration::ZERO)
                .optional()?
                .is_none(),
            "nothing was sent"
        );
    }
    Ok(())
}
