//! The cost of a process's death to the survivors. **This module is marked for unsafe**: it forks.
//!
//! Times run from the SIGKILL, or from the order to call `exec`. Where a forked child holds the
//! victim's files, the proof is timed from the SIGKILL that ends that child, and a proof that comes
//! before it is an error. The victim's pidfd is the independent witness.

use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rustix::process::{Pid, PidfdFlags, Signal};
use serde::{Deserialize, Serialize};
use warpipe::clock::now_ns;
use warpipe::{Error, Layout, Loss, NameFault, PeerState, Publisher, PublisherOptions, Subscriber};
use warpipe_testkit::figure::{Figure, Quantiles, Wanted};
use warpipe_testkit::wait_readable;

use super::Role;
use super::peer_process::{Control, PeerProcess};
use super::setup::{BenchDomain, PATIENCE, Setup};

const NAME: &str = "bench/victim";

/// The time that the victim's kernel would take if the victim lived.
const KERNEL: Duration = Duration::from_secs(9);

/// The publisher's whole memory, and the two slots that it is cut into.
const MEMORY_BYTES: u64 = 2 << 20;
const SLOTS: u64 = 2;

/// The polling interval of a survivor that polls its subscribers.
const ASK_EVERY: Duration = Duration::from_micros(50);

/// How long a forked child outlives its parent: it is killed then.
const ORPHAN: Duration = Duration::from_secs(2);

/// A forked child that is not killed ends by itself.
const ORPHAN_MAX: Duration = Duration::from_secs(60);

const TOLD_MS_MAX: f64 = 2.0;

/// Time-sliced, and under MPS.
const PROVEN_MS_MAX: [f64; 2] = [40.0, 200.0];

/// The process that is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Victim {
    Publisher,
    Subscriber,
}

/// The kind of its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Way {
    Killed,
    /// Killed, while a child that was forked behind the library's back holds its files for
    /// [`ORPHAN`].
    Orphaned,
    Exec,
}

impl Way {
    fn words(self, busy: bool) -> String {
        let when = if busy { "mid-kernel" } else { "idle" };
        match self {
            Way::Killed => format!("killed {when}"),
            Way::Orphaned => format!("killed {when}, its child lives {} s", ORPHAN.as_secs()),
            Way::Exec => format!("calls exec {when}"),
        }
    }

    /// The event that its proof waits for.
    fn origin(self) -> &'static str {
        match self {
            Way::Killed => "kill",
            Way::Orphaned => "kill of the child",
            Way::Exec => "exec",
        }
    }
}

/// The victim's parameters.
#[derive(Debug, Serialize, Deserialize)]
pub struct Terms {
    place: BenchDomain,
    victim: Victim,
    way: Way,
    /// Ends in the middle of a kernel, or with nothing on the device.
    busy: bool,
}

pub fn run(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    // Under MPS the death of a client in the middle of a kernel is the death of all, this process
    // included.
    let busy = !setup.is_mps();
    let mut figures = Vec::new();
    for way in [Way::Killed, Way::Orphaned, Way::Exec] {
        figures.extend(of_one_way(setup, way, busy)?);
    }
    Ok(figures)
}

fn of_one_way(setup: &Setup, way: Way, busy: bool) -> anyhow::Result<Vec<Figure>> {
    let runs = match (setup.quick, way) {
        (true, Way::Orphaned) => 1,
        (true, _) => 3,
        // Each takes two lives of a child.
        (false, Way::Orphaned) => 6,
        (false, _) => 12,
    };
    let (mut reported, mut lost, mut shown, mut reused, mut pidfd) =
        (vec![], vec![], vec![], vec![], vec![]);
    for _ in 0..runs {
        let after = kill_publisher(setup, way, busy)?;
        reported.push(after.reported_ns);
        lost.extend(after.lost_ns);
        pidfd.extend(after.pidfd_ns);
        let after = kill_subscriber(setup, way, busy)?;
        shown.push(after.shown_ns);
        reused.push(after.reused_ns);
        pidfd.extend(after.pidfd_ns);
    }
    let proven = PROVEN_MS_MAX[usize::from(setup.is_mps())];
    let (words, origin) = (way.words(busy), way.origin());
    let began = if way == Way::Exec { "exec" } else { "kill" };
    let mut figures = vec![
        figure(
            format!("publisher {words}: {began} -> receive() returns PeerGone"),
            reported,
            TOLD_MS_MAX,
        ),
        figure(
            format!("subscriber {words}: {began} -> subscribers() reports"),
            shown,
            TOLD_MS_MAX,
        ),
        figure(
            format!("subscriber {words}: {origin} -> its slots are lent again"),
            reused,
            proven,
        ),
    ];
    if !lost.is_empty() {
        let name = format!("publisher {words}: {origin} -> the stuck stream is free, SampleLost");
        figures.push(figure(name, lost, proven));
    }
    pidfd.sort_unstable();
    if let (Some(&first), Some(&last)) = (pidfd.first(), pidfd.last()) {
        let pidfd = format!(
            "; its pidfd is readable {:.1} to {:.1} ms after the kill",
            ms(first),
            ms(last)
        );
        figures.iter_mut().for_each(|figure| figure.note += &pidfd);
    }
    Ok(figures)
}

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

/// The worst of all runs counts.
fn figure(name: String, samples: Vec<u64>, limit_ms: f64) -> Figure {
    let worst = samples.iter().max().map_or(f64::NAN, |&ns| ns as f64 / 1e6);
    let all: Vec<f64> = samples.iter().map(|&ns| ns as f64 / 1e6).collect();
    let quantiles = Quantiles::of(samples);
    let mut figure = Figure::new("death", name, "ms", &[worst]).wanted(Wanted::AtMost(limit_ms));
    figure.note = format!("the worst of {} runs", all.len());
    figure.ours_rounds = all;
    figure.ours_ns = quantiles;
    figure
}

/// The times of the events.
struct Witness {
    /// The kill, or the order to call `exec`.
    began_ns: u64,
    /// The earliest time of its proof.
    released_ns: u64,
    /// The victim's pidfd, after the kill.
    pidfd_ns: Option<u64>,
}

impl Witness {
    /// The time since the last holder of the victim's files was ordered to end.
    fn since_released(&self, proven_ns: u64) -> anyhow::Result<u64> {
        proven_ns
            .checked_sub(self.released_ns)
            .context("a proof of death came while a process still held the files")
    }
}

fn witness(
    peer: &PeerProcess,
    way: Way,
    began_ns: u64,
    child: Option<&OwnedFd>,
) -> anyhow::Result<Witness> {
    let mut witness = Witness {
        began_ns,
        released_ns: began_ns,
        pidfd_ns: None,
    };
    if way != Way::Exec {
        ensure!(
            wait_readable(peer.pidfd()?, PATIENCE)?,
            "the victim does not die"
        );
        witness.pidfd_ns = Some(now_ns() - began_ns);
    }
    if let Some(child) = child {
        std::thread::sleep(ORPHAN);
        witness.released_ns = now_ns();
        rustix::process::pidfd_send_signal(child, Signal::KILL).context("pidfd_send_signal")?;
    }
    Ok(witness)
}

/// Ends the victim and joins the witness's times with those of two survivors.
fn end_beside<A: Send, B: Send>(
    peer: &PeerProcess,
    way: Way,
    first: impl FnOnce() -> anyhow::Result<A> + Send,
    second: impl FnOnce() -> anyhow::Result<B> + Send,
) -> anyhow::Result<(Witness, A, B)> {
    let child = match way {
        Way::Orphaned => {
            peer.control.send(&())?;
            let child = Pid::from_raw(peer.control.hear()?).context("the victim's child")?;
            Some(rustix::process::pidfd_open(child, PidfdFlags::empty()).context("pidfd_open")?)
        }
        _ => None,
    };
    std::thread::scope(|scope| {
        let (first, second) = (scope.spawn(first), scope.spawn(second));
        let began_ns = now_ns();
        if way == Way::Exec {
            peer.control.send(&())?
        } else {
            peer.kill()?
        }
        let witness = witness(peer, way, began_ns, child.as_ref())?;
        let gone = |_| anyhow::anyhow!("a survivor's thread has panicked");
        Ok((
            witness,
            first.join().map_err(gone)??,
            second.join().map_err(gone)??,
        ))
    })
}

struct AfterPublisher {
    reported_ns: u64,
    lost_ns: Option<u64>,
    pidfd_ns: Option<u64>,
}

fn kill_publisher(setup: &Setup, way: Way, busy: bool) -> anyhow::Result<AfterPublisher> {
    let peer = PeerProcess::start(&Role::Victim(Terms {
        place: setup.place(),
        victim: Victim::Publisher,
        way,
        busy,
    }))?;
    peer.control.hear::<()>()?;
    let mut subscriber = subscriber(&setup.place())?;
    let stream = setup.device.stream()?;
    peer.control.send(&())?;
    let whole = subscriber.receive(&stream, PATIENCE)?;
    whole.finish(PATIENCE)?;
    let late = if busy {
        Some(subscriber.receive(&stream, PATIENCE)?)
    } else {
        None
    };
    peer.control.hear::<()>()?;
    let reported = || match subscriber.receive(&stream, PATIENCE) {
        Err(Error::PeerGone { .. }) => Ok(now_ns()),
        Err(error) => Err(error).context("instead of PeerGone"),
        Ok(_) => bail!("a sample came from the dead"),
    };
    let lost = || match late.map(|sample| sample.finish(PATIENCE)) {
        None => Ok(None),
        Some(Err(Error::Lost(Loss::Sample { .. }))) => Ok(Some(now_ns())),
        Some(other) => bail!("{other:?} instead of Loss::Sample"),
    };
    let (witness, reported, lost) = end_beside(&peer, way, reported, lost)?;
    stream.synchronize(PATIENCE)?;
    Ok(AfterPublisher {
        reported_ns: reported.saturating_sub(witness.began_ns),
        lost_ns: lost.map(|lost| witness.since_released(lost)).transpose()?,
        pidfd_ns: witness.pidfd_ns,
    })
}

struct AfterSubscriber {
    shown_ns: u64,
    reused_ns: u64,
    pidfd_ns: Option<u64>,
}

fn kill_subscriber(setup: &Setup, way: Way, busy: bool) -> anyhow::Result<AfterSubscriber> {
    let publisher = publisher_once_free(PublisherOptions {
        memory_limit: MEMORY_BYTES,
        loan_timeout: PATIENCE,
        ..setup.domain.on(&setup.device)
    })?;
    let peer = PeerProcess::start(&Role::Victim(Terms {
        place: setup.place(),
        victim: Victim::Subscriber,
        way,
        busy,
    }))?;
    publisher.wait_for_subscribers(1, PATIENCE)?;
    let stream = setup.device.stream()?;
    let layout = Layout::bytes_only(MEMORY_BYTES / SLOTS)?;
    let mut slots = Vec::new();
    for _ in 0..SLOTS {
        let loan = publisher.loan(&layout)?;
        slots.push(loan.ptr());
        loan.send(&stream)?;
    }
    peer.control.hear::<()>()?;
    let (publisher, victim) = (&publisher, peer.pid());
    let shown = || loop {
        let all = publisher.subscribers();
        let is_well = |state| {
            matches!(
                state,
                PeerState::Alive | PeerState::Stalled | PeerState::Leaving
            )
        };
        if !all
            .iter()
            .any(|subscriber| subscriber.pid == victim && is_well(subscriber.state))
        {
            return Ok(now_ns());
        }
        std::thread::sleep(ASK_EVERY);
    };
    // Meanwhile the publisher grows: what a suspect holds does not count against its limit.
    let reused = || {
        let mut grown = Vec::new();
        loop {
            let loan = publisher.loan(&layout)?;
            if slots.contains(&loan.ptr()) {
                return Ok(now_ns());
            }
            grown.push(loan);
        }
    };
    let (witness, shown, reused) = end_beside(&peer, way, shown, reused)?;
    Ok(AfterSubscriber {
        shown_ns: shown.saturating_sub(witness.began_ns),
        reused_ns: witness.since_released(reused)?,
        pidfd_ns: witness.pidfd_ns,
    })
}

/// A publisher, once the victim before it, or that victim's child, no longer holds the name.
fn publisher_once_free(options: PublisherOptions) -> anyhow::Result<Publisher> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match Publisher::new(NAME, options.clone()) {
            Err(Error::Name(NameFault::Taken { .. })) if Instant::now() < deadline => {
                std::thread::sleep(ASK_EVERY)
            }
            made => return Ok(made?),
        }
    }
}

fn subscriber(place: &BenchDomain) -> anyhow::Result<Subscriber> {
    let (device, domain) = place.open()?;
    Ok(Subscriber::open(NAME, domain.on(&device), PATIENCE)?)
}

/// The victim's part, up to its death.
pub fn live(terms: &Terms, control: &Control) -> anyhow::Result<()> {
    match terms.victim {
        Victim::Publisher => publish(terms, control)?,
        Victim::Subscriber => hold(terms, control)?,
    }
    // Nothing but the end comes any more.
    control.hear::<()>()
}

/// The victim's end, as far as it has a part in it.
fn end(way: Way, control: &Control) -> anyhow::Result<()> {
    control.hear::<()>()?;
    if way == Way::Exec {
        let error = std::process::Command::new("sleep").arg("60").exec();
        return Err(error).context("exec of sleep");
    }
    control.send(&fork_unseen()?)?;
    control.hear::<()>()
}

/// A child of which no library learns: it holds all that its parent holds, until it is killed.
fn fork_unseen() -> anyhow::Result<i32> {
    let time = libc::timespec {
        tv_sec: ORPHAN_MAX.as_secs() as _,
        tv_nsec: 0,
    };
    // SAFETY: a fork without a stack of its own; the child makes two system calls.
    match unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } {
        -1 => Err(std::io::Error::last_os_error()).context("clone"),
        // SAFETY: reads one `timespec` of this stack; `_exit` ends the child.
        0 => unsafe {
            libc::nanosleep(&time, std::ptr::null_mut());
            libc::_exit(0)
        },
        child => Ok(child as i32),
    }
}

fn publish(terms: &Terms, control: &Control) -> anyhow::Result<()> {
    let (device, domain) = terms.place.open()?;
    let publisher = publisher_once_free(domain.on(&device))?;
    control.send(&())?;
    control.hear::<()>()?;
    publisher.wait_for_subscribers(1, PATIENCE)?;
    let stream = device.stream()?;
    publisher.send_bytes(&stream, b"whole")?;
    if terms.busy {
        stream.synchronize(PATIENCE)?;
        warpipe_kernels::spin(&stream, KERNEL)?;
        publisher.loan(&Layout::bytes_only(64)?)?.send(&stream)?;
    }
    control.send(&())?;
    end(terms.way, control)
}

fn hold(terms: &Terms, control: &Control) -> anyhow::Result<()> {
    let (device, _) = terms.place.open()?;
    let mut subscriber = subscriber(&terms.place)?;
    let stream = device.stream()?;
    let held = (0..SLOTS)
        .map(|_| subscriber.receive(&stream, PATIENCE))
        .collect::<warpipe::Result<Vec<_>>>()?;
    held.iter().try_for_each(|sample| sample.wait(PATIENCE))?;
    if terms.busy {
        warpipe_kernels::spin(&stream, KERNEL)?;
    }
    control.send(&())?;
    end(terms.way, control)
}
