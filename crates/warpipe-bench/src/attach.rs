//! Opening another process's memory by a ticket, compared with the bare import and mapping of the
//! same memory.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::ensure;
use serde::{Deserialize, Serialize};
use warpipe::{DeviceId, Memory, Ticket};
use warpipe_bench::raw;
use warpipe_testkit::figure::{Figure, Wanted, median};

use super::Role;
use super::peer_process::{Control, PeerProcess};
use super::setup::{BenchDomain, PATIENCE, Setup};

/// The owner's parameters.
#[derive(Debug, Serialize, Deserialize)]
pub struct Terms {
    place: BenchDomain,
    bytes: u64,
}

/// The owner's memory and its ticket.
#[derive(Debug, Serialize, Deserialize)]
struct Offer {
    ticket: Ticket,
    mapped_bytes: u64,
    owner: DeviceId,
}

/// The budget of a ticket beyond the driver's own part, in microseconds.
const BESIDE_US: f64 = 300.0;

pub fn run(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    let bytes = 1 << 30;
    let peer = PeerProcess::start(&Role::Attach(Terms {
        place: setup.place(),
        bytes,
    }))?;
    let offer: Offer = peer.control.hear()?;
    let fd = peer.control.receive_fd()?;
    let (mut ours, mut floors) = (Samples::default(), Samples::default());
    for round in 0..=setup.rounds() {
        // The first one warms the caches, and does not count.
        floors.round(round > 0, setup.times(100), || {
            attach_bare(setup, &offer, &fd)
        })?;
        ours.round(round > 0, setup.times(100), || {
            attach_by_ticket(setup, &offer)
        })?;
    }
    peer.control.send(&())?;
    peer.end()?;
    let difference = median(&ours.rounds) - median(&floors.rounds);
    let note = format!(
        "{difference:.1} us more than the floor, which is the driver's import and mapping of a descriptor"
    );
    let figure = Figure::new("attach", "by ticket, 1 GiB", "us", &ours.rounds)
        .beside(&floors.rounds)
        .spread(ours.all, floors.all)
        .wanted(Wanted::BesideFloorAtMost(BESIDE_US))
        .note(note);
    Ok(vec![figure])
}

/// The owner's part.
pub fn offer(terms: &Terms, control: &Control) -> anyhow::Result<()> {
    let (device, domain) = terms.place.open()?;
    let memory = Memory::allocate(&device, terms.bytes)?;
    let published = memory.publish("attach", domain.options())?;
    let (ticket, info) = (published.ticket(..)?, memory.info());
    control.send(&Offer {
        ticket,
        mapped_bytes: info.mapped_bytes,
        owner: info.device,
    })?;
    control.send_fd(memory.export_fd()?.as_fd())?;
    control.hear::<()>()
}

/// From the text of the ticket to mapped memory. The release is waited for, outside of the
/// measurement.
fn attach_by_ticket(setup: &Setup, offer: &Offer) -> anyhow::Result<Duration> {
    let before = setup.device.backend().bytes_held();
    let start = Instant::now();
    let memory = offer.ticket.open(&setup.device, Duration::ZERO)?;
    let took = start.elapsed();
    ensure!(memory.bytes() == 1 << 30, "{} bytes", memory.bytes());
    drop(memory);
    let start = Instant::now();
    while setup.device.backend().bytes_held() > before {
        ensure!(start.elapsed() < PATIENCE, "the memory is not released");
        std::thread::park_timeout(Duration::from_micros(200));
    }
    Ok(took)
}

fn attach_bare(setup: &Setup, offer: &Offer, fd: &OwnedFd) -> anyhow::Result<Duration> {
    let fd = fd.try_clone()?;
    let start = Instant::now();
    let memory = raw::Memory::import(&setup.device, fd, offer.mapped_bytes, offer.owner)?;
    let took = start.elapsed();
    ensure!(memory.ptr() != 0, "mapped nowhere");
    Ok(took)
}

/// Single measurements, in nanoseconds, and the medians of their rounds, in microseconds.
#[derive(Debug, Default)]
struct Samples {
    all: Vec<u64>,
    rounds: Vec<f64>,
}

impl Samples {
    fn round(
        &mut self,
        is_counted: bool,
        times: usize,
        measure: impl Fn() -> anyhow::Result<Duration>,
    ) -> anyhow::Result<()> {
        let samples = (0..times)
            .map(|_| Ok(measure()?.as_nanos() as u64))
            .collect::<anyhow::Result<Vec<u64>>>()?;
        if is_counted {
            self.rounds.push(median(
                &samples
                    .iter()
                    .map(|&ns| ns as f64 / 1e3)
                    .collect::<Vec<f64>>(),
            ));
            self.all.extend(samples);
        }
        Ok(())
    }
}
