//! 128 bytes of host memory from one process to another: polling, and with the receiver asleep.
//!
//! One way is half of there and back. The floor is a bare ring each way. Each process is pinned to
//! a CPU of its own: a scheduler that puts both on one, for a while, would change the measurement.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use warpipe::OptionalExtension;
use warpipe::{Device, Domain, Publisher, PublisherOptions, Stream, Subscriber, SubscriberOptions};
use warpipe_bench::raw::{LINE_BYTES, SharedMemory};
use warpipe_cli::device_arg::DeviceArg;
use warpipe_testkit::figure::{Figure, Quantiles, Wanted};

use super::Role;
use super::peer_process::{Control, PeerProcess};
use super::pin;
use super::rings::{DEPTH, LINES, Patience, Payload, Ring, doorbell};
use super::setup::{BenchDomain, PATIENCE, Setup};

const PING: &str = "bench/ring-ping";
const PONG: &str = "bench/ring-pong";

/// The parameters of both processes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Terms {
    place: BenchDomain,
    rounds: usize,
    trips: usize,
    sleeps: bool,
}

impl Terms {
    fn patience(&self) -> Patience {
        if self.sleeps {
            Patience::Sleep { spins: 0 }
        } else {
            Patience::Spin
        }
    }
}

pub fn run(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    let case = |name: &str, sleeps: bool, trips: usize, limit: f64| -> anyhow::Result<Figure> {
        let place = setup.place_on(DeviceArg::Host);
        let measured = measure(
            setup,
            &Terms {
                place,
                rounds: setup.rounds(),
                trips: setup.times(trips),
                sleeps,
            },
        )?;
        Ok(Figure::new("ring", name, "ns", &measured.ours_p50)
            .beside(&measured.floor_p50)
            .spread(measured.ours, measured.floor)
            .wanted(Wanted::RatioAtMost(limit)))
    };
    Ok(vec![
        case("128 bytes one way, host, polling", false, 20_000, 2.0)?,
        case("128 bytes one way, host, receiver asleep", true, 2_000, 1.5)?,
    ])
}

#[derive(Default)]
struct Measured {
    ours: Vec<u64>,
    floor: Vec<u64>,
    ours_p50: Vec<f64>,
    floor_p50: Vec<f64>,
}

fn measure(setup: &Setup, terms: &Terms) -> anyhow::Result<Measured> {
    let memory = SharedMemory::create(2 * LINES)?;
    let doorbells = [doorbell()?, doorbell()?, doorbell()?, doorbell()?];
    let device = Device::host();
    let publisher = publisher(PING, &setup.domain, &device)?;
    let peer = PeerProcess::start(&Role::Ring(terms.clone()))?;
    peer.control.send_fd(memory.fd())?;
    doorbells
        .iter()
        .try_for_each(|doorbell| peer.control.send_fd(doorbell.as_fd()))?;
    let mut end = End {
        out: Ring::new(&memory, 0, &doorbells[0], &doorbells[1]),
        back: Ring::new(&memory, LINES, &doorbells[2], &doorbells[3]),
        subscriber: subscriber(PONG, terms, &setup.domain, &device)?,
        publisher,
        stream: device.stream()?,
        patience: terms.patience(),
    };
    end.publisher.wait_for_subscribers(1, PATIENCE)?;
    peer.control.send(&())?;
    let _here = pin::this_thread(0)?;
    let mut measured = Measured::default();
    for round in 0..=terms.rounds {
        let floor = timed(terms.trips, || end.floor_trip())?;
        let ours = timed(terms.trips, || end.our_trip())?;
        if round > 0 {
            let p50 = |samples: &[u64]| {
                Quantiles::of(samples.to_vec()).map_or(f64::NAN, |all| all.p50 as f64)
            };
            measured.floor_p50.push(p50(&floor));
            measured.ours_p50.push(p50(&ours));
            measured.floor.extend(floor);
            measured.ours.extend(ours);
        }
    }
    peer.end()?;
    Ok(measured)
}

/// Half of what each trip takes, in nanoseconds.
fn timed(trips: usize, mut trip: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<Vec<u64>> {
    let mut samples = Vec::with_capacity(trips);
    for _ in 0..trips {
        let start = Instant::now();
        trip()?;
        samples.push(start.elapsed().as_nanos() as u64 / 2);
    }
    Ok(samples)
}

/// One process's end of both.
struct End<'a> {
    out: Ring<'a>,
    back: Ring<'a>,
    publisher: Publisher,
    subscriber: Subscriber,
    stream: Stream,
    patience: Patience,
}

impl End<'_> {
    fn floor_trip(&mut self) -> anyhow::Result<()> {
        let mut bytes = [0; LINE_BYTES];
        self.out.push(&[1; LINE_BYTES], self.patience)?;
        self.back.pop(&mut bytes, self.patience)?;
        anyhow::ensure!(bytes == [2; LINE_BYTES], "the bare ring gave other bytes");
        Ok(())
    }

    fn our_trip(&mut self) -> anyhow::Result<()> {
        self.publisher.send_bytes(&self.stream, &[1; LINE_BYTES])?;
        let bytes = self.receive()?;
        anyhow::ensure!(bytes == [2; LINE_BYTES], "the channel gave other bytes");
        Ok(())
    }

    fn receive(&mut self) -> anyhow::Result<Payload> {
        if self.patience == Patience::Spin {
            self.poll()
        } else {
            receive(&mut self.subscriber, &self.stream)
        }
    }

    fn poll(&mut self) -> anyhow::Result<Payload> {
        let start = Instant::now();
        loop {
            for _ in 0..100_000 {
                if let Some(sample) = self
                    .subscriber
                    .receive(&self.stream, Duration::ZERO)
                    .optional()?
                {
                    return copy_out(&sample);
                }
                std::hint::spin_loop();
            }
            anyhow::ensure!(start.elapsed() < PATIENCE, "no sample came");
        }
    }
}

/// Receives a sample of 128 bytes and copies it out.
pub fn receive(subscriber: &mut Subscriber, stream: &Stream) -> anyhow::Result<Payload> {
    copy_out(&subscriber.receive(stream, PATIENCE)?)
}

fn copy_out(sample: &warpipe::Sample) -> anyhow::Result<Payload> {
    let mut bytes = [0; LINE_BYTES];
    sample.copy_to(&mut bytes, PATIENCE)?;
    Ok(bytes)
}

fn publisher(name: &str, domain: &Domain, device: &Device) -> anyhow::Result<Publisher> {
    Ok(Publisher::new(
        name,
        PublisherOptions {
            depth: DEPTH as u32,
            ..domain.on(device)
        },
    )?)
}

fn subscriber(
    name: &str,
    terms: &Terms,
    domain: &Domain,
    device: &Device,
) -> anyhow::Result<Subscriber> {
    let spin = if terms.sleeps {
        Duration::ZERO
    } else {
        Duration::from_millis(1)
    };
    Ok(Subscriber::open(
        name,
        SubscriberOptions {
            spin,
            ..domain.on(device)
        },
        PATIENCE,
    )?)
}

/// The other process's part: gives everything back.
pub fn answer(terms: &Terms, control: &Control) -> anyhow::Result<()> {
    let (device, domain) = terms.place.open()?;
    let memory = SharedMemory::open(control.receive_fd()?, 2 * LINES)?;
    let doorbells = (0..4)
        .map(|_| control.receive_fd())
        .collect::<anyhow::Result<Vec<OwnedFd>>>()?;
    let publisher = publisher(PONG, &domain, &device)?;
    let mut end = End {
        out: Ring::new(&memory, LINES, &doorbells[2], &doorbells[3]),
        back: Ring::new(&memory, 0, &doorbells[0], &doorbells[1]),
        subscriber: subscriber(PING, terms, &domain, &device)?,
        publisher,
        stream: device.stream()?,
        patience: terms.patience(),
    };
    control.hear::<()>()?;
    let _here = pin::this_thread(1)?;
    for _ in 0..=terms.rounds {
        for _ in 0..terms.trips {
            let mut bytes = [0; LINE_BYTES];
            end.back.pop(&mut bytes, end.patience)?;
            anyhow::ensure!(bytes == [1; LINE_BYTES], "the bare ring gave other bytes");
            end.out.push(&[2; LINE_BYTES], end.patience)?;
        }
        for _ in 0..terms.trips {
            let bytes = end.receive()?;
            anyhow::ensure!(bytes == [1; LINE_BYTES], "the channel gave other bytes");
            end.publisher.send_bytes(&end.stream, &[2; LINE_BYTES])?;
        }
    }
    // The last answer is complete on the device before this process ends: it was sent from an idle
    // stream.
    Ok(end.stream.synchronize(PATIENCE)?)
}
