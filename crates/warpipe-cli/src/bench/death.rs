//! What a SIGKILL costs those who go on living.
//!
//! The socket between the two benchmark processes is the independent witness of the death: it closes with the
//! victim's other descriptors. The victim's pidfd is the proof.

use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};
use warpipe::clock::now_ns;
use warpipe::{Error, Layout, PeerState, Publisher, Subscriber};

use super::Role;
use super::figure::{Figure, Quantiles, Wanted};
use super::partner::{Control, Partner, wait_readable};
use super::setup::{PATIENCE, Place, Setup};

const NAME: &str = "bench/victim";

/// What the victim's kernel would take if it lived.
const KERNEL: Duration = Duration::from_secs(9);

/// The publisher's whole memory, and the two slots that it is cut into.
const MEMORY_BYTES: u64 = 2 << 20;
const SLOTS: u64 = 2;

/// How often a survivor that asks for its subscribers asks.
const ASK_EVERY: Duration = Duration::from_micros(50);

const TOLD_MS_MAX: f64 = 5.0;
const REUSED_MS_MAX: f64 = 10.0;

/// Who is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Victim {
    Publisher,
    Subscriber,
}

/// What the victim agrees on.
#[derive(Debug, Serialize, Deserialize)]
pub struct Terms {
    place: Place,
    victim: Victim,
    /// Killed in the middle of a kernel, or with nothing on the device.
    busy: bool,
}

pub fn run(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    // Under MPS the death of a client in the middle of a kernel is the death of all, this process included.
    let busy = !setup.is_mps();
    let when = if busy { "mid-kernel" } else { "idle (under MPS a busy client's death kills all)" };
    let runs = if setup.quick { 3 } else { 12 };
    let (mut told, mut lost, mut shown, mut reused) = (vec![], vec![], vec![], vec![]);
    for _ in 0..runs {
        let after = kill_publisher(setup, busy)?;
        told.push(after.told_ns);
        lost.extend(after.lost_ns);
        let after = kill_subscriber(setup, busy)?;
        shown.push(after.shown_ns);
        reused.push(after.reused_ns);
    }
    let mut figures = vec![
        figure(format!("publisher killed {when}: its socket's end -> PublisherGone"), told, TOLD_MS_MAX),
        figure(format!("subscriber killed {when}: its socket's end -> subscribers() tells"), shown, TOLD_MS_MAX),
        figure(format!("subscriber killed {when}: its pidfd -> its slots are lent again"), reused, REUSED_MS_MAX),
    ];
    if !lost.is_empty() {
        let name = format!("publisher killed {when}: its pidfd -> the stuck stream is free, SampleLost");
        figures.push(figure(name, lost, REUSED_MS_MAX));
    }
    Ok(figures)
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

/// When the witness saw what.
struct Witness {
    socket_end_ns: u64,
    proven_ns: u64,
}

fn witness(partner: &Partner) -> anyhow::Result<Witness> {
    let pidfd = partner.pidfd()?;
    ensure!(wait_readable(partner.control.socket())?, "the victim's socket does not close");
    let socket_end_ns = now_ns();
    ensure!(wait_readable(pidfd.as_fd())?, "the victim does not die");
    Ok(Witness { socket_end_ns, proven_ns: now_ns() })
}

/// Kills the victim and joins the witness with what two survivors did meanwhile.
fn kill_beside<A: Send, B: Send>(
    partner: &Partner,
    first: impl FnOnce() -> anyhow::Result<A> + Send,
    second: impl FnOnce() -> anyhow::Result<B> + Send,
) -> anyhow::Result<(Witness, A, B)> {
    std::thread::scope(|scope| {
        let witness = scope.spawn(|| witness(partner));
        let (first, second) = (scope.spawn(first), scope.spawn(second));
        partner.kill()?;
        let gone = |_| anyhow::anyhow!("a survivor's thread has panicked");
        Ok((witness.join().map_err(gone)??, first.join().map_err(gone)??, second.join().map_err(gone)??))
    })
}

struct AfterPublisher {
    told_ns: u64,
    lost_ns: Option<u64>,
}

fn kill_publisher(setup: &Setup, busy: bool) -> anyhow::Result<AfterPublisher> {
    let partner = Partner::start(&Role::Victim(Terms { place: setup.place(), victim: Victim::Publisher, busy }))?;
    partner.control.hear::<()>()?;
    let mut subscriber = subscriber(&setup.place())?;
    let stream = setup.device.stream()?;
    partner.control.tell(&())?;
    let whole = subscriber.receive(&stream)?;
    whole.finish(PATIENCE)?;
    let late = if busy { Some(subscriber.receive(&stream)?) } else { None };
    partner.control.hear::<()>()?;
    let told = || match subscriber.receive(&stream) {
        Err(Error::PublisherGone { .. }) => Ok(now_ns()),
        Err(error) => Err(error).context("instead of PublisherGone"),
        Ok(_) => bail!("a sample came from the dead"),
    };
    let lost = || match late.map(|sample| sample.finish(PATIENCE)) {
        None => Ok(None),
        Some(Err(Error::SampleLost { .. })) => Ok(Some(now_ns())),
        Some(other) => bail!("{other:?} instead of SampleLost"),
    };
    let (witness, told, lost) = kill_beside(&partner, told, lost)?;
    stream.synchronize(PATIENCE)?;
    Ok(AfterPublisher {
        told_ns: told.saturating_sub(witness.socket_end_ns),
        lost_ns: lost.map(|lost| lost.saturating_sub(witness.proven_ns)),
    })
}

struct AfterSubscriber {
    shown_ns: u64,
    reused_ns: u64,
}

fn kill_subscriber(setup: &Setup, busy: bool) -> anyhow::Result<AfterSubscriber> {
    let publisher = Publisher::builder(NAME)
        .domain(&setup.domain)
        .device(&setup.device)
        .memory_limit(MEMORY_BYTES)
        .loan_timeout(PATIENCE)
        .build()?;
    let partner = Partner::start(&Role::Victim(Terms { place: setup.place(), victim: Victim::Subscriber, busy }))?;
    publisher.wait_for_subscribers(1, PATIENCE)?;
    let stream = setup.device.stream()?;
    let layout = Layout::bytes_only(MEMORY_BYTES / SLOTS)?;
    for _ in 0..SLOTS {
        publisher.loan(&layout)?.send(&stream)?;
    }
    partner.control.hear::<()>()?;
    let (publisher, victim) = (&publisher, partner.pid());
    let shown = || loop {
        let all = publisher.subscribers();
        let is_well = |state| matches!(state, PeerState::Alive | PeerState::Stalled | PeerState::Leaving);
        if !all.iter().any(|subscriber| subscriber.pid == victim && is_well(subscriber.state)) {
            return Ok(now_ns());
        }
        std::thread::sleep(ASK_EVERY);
    };
    let reused = || {
        drop(publisher.loan(&layout)?);
        Ok(now_ns())
    };
    let (witness, shown, reused) = kill_beside(&partner, shown, reused)?;
    Ok(AfterSubscriber {
        shown_ns: shown.saturating_sub(witness.socket_end_ns),
        reused_ns: reused.saturating_sub(witness.proven_ns),
    })
}

fn subscriber(place: &Place) -> anyhow::Result<Subscriber> {
    let (device, domain) = place.open()?;
    let builder = Subscriber::builder(NAME).domain(&domain).device(&device);
    Ok(builder.wait_for_publisher(Some(PATIENCE)).timeout(PATIENCE).build()?)
}

/// The victim's part, up to its death.
pub fn live(terms: &Terms, control: &Control) -> anyhow::Result<()> {
    match terms.victim {
        Victim::Publisher => publish(terms, control)?,
        Victim::Subscriber => hold(terms, control)?,
    }
    // Nothing comes any more but the end.
    control.hear::<()>()
}

fn publish(terms: &Terms, control: &Control) -> anyhow::Result<()> {
    let (device, domain) = terms.place.open()?;
    let publisher = Publisher::builder(NAME).domain(&domain).device(&device).build()?;
    control.tell(&())?;
    control.hear::<()>()?;
    publisher.wait_for_subscribers(1, PATIENCE)?;
    let stream = device.stream()?;
    publisher.send_bytes(&stream, b"whole")?;
    if terms.busy {
        stream.synchronize(PATIENCE)?;
        warpipe_kernels::spin(&stream, KERNEL)?;
        publisher.loan(&Layout::bytes_only(64)?)?.send(&stream)?;
    }
    control.tell(&())?;
    control.hear::<()>()
}

fn hold(terms: &Terms, control: &Control) -> anyhow::Result<()> {
    let (device, _) = terms.place.open()?;
    let mut subscriber = subscriber(&terms.place)?;
    let stream = device.stream()?;
    let held = (0..SLOTS).map(|_| subscriber.receive(&stream)).collect::<warpipe::Result<Vec<_>>>()?;
    held.iter().try_for_each(|sample| sample.wait(PATIENCE))?;
    if terms.busy {
        warpipe_kernels::spin(&stream, KERNEL)?;
    }
    control.tell(&())?;
    control.hear::<()>()
}
