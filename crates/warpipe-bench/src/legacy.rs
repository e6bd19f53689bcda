//! Opening a legacy handle that is open already, compared with the driver's own open and close of
//! the same handle.

use std::time::Instant;

use serde::{Deserialize, Serialize};
use warpipe::backend::testing::{Counting, Wrapped};
use warpipe::{Device, LegacyHandle};
use warpipe_testkit::figure::{Figure, Quantiles, Wanted};

use super::Role;
use super::peer_process::{Control, PeerProcess};
use super::setup::{BenchDomain, PATIENCE, Setup};

/// The exporter's parameters.
#[derive(Debug, Serialize, Deserialize)]
pub struct Terms {
    place: BenchDomain,
    bytes: u64,
}

pub fn run(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    let terms = Terms {
        place: setup.place(),
        bytes: 64 << 20,
    };
    let peer = PeerProcess::start(&Role::Legacy(terms))?;
    let handle: LegacyHandle = peer.control.hear()?;
    let figures = measure(setup, &handle)?;
    peer.control.send(&())?;
    peer.end()?;
    Ok(figures)
}

/// The exporter's part: its memory exists until the other side is done.
pub fn export(terms: &Terms, control: &Control) -> anyhow::Result<()> {
    let (device, _) = terms.place.open()?;
    let ptr = device.backend().allocate_plain(terms.bytes)?;
    // SAFETY: the memory is freed below, when nobody opens it any more.
    control.send(&unsafe { LegacyHandle::export(&device, ptr, terms.bytes) }?)?;
    control.hear::<()>()?;
    // SAFETY: allocated above and freed once; no work ever used it.
    Ok(unsafe { device.backend().free_plain(ptr) }?)
}

fn measure(setup: &Setup, handle: &LegacyHandle) -> anyhow::Result<Vec<Figure>> {
    let [mut cached, mut first, mut bare] = [const { Samples::new() }; 3];
    for round in 0..=setup.rounds() {
        let is_counted = round > 0;
        bare.round(is_counted, setup.times(200), || {
            open_bare(&setup.device, handle)
        })?;
        first.round(is_counted, setup.times(200), || {
            Ok(handle.open(&setup.device)?.close(PATIENCE)?)
        })?;
        // The driver counts what is open: the others would be cheap while this one is there.
        let open = handle.open(&setup.device)?;
        cached.round(is_counted, setup.times(20_000), || {
            drop(handle.open(&setup.device)?);
            Ok(())
        })?;
        open.close(PATIENCE)?;
    }
    let first = Figure::new(
        "legacy",
        "first open and close, 64 MiB",
        "us",
        &first.rounds,
    )
    .beside(&bare.rounds)
    .spread(first.all, bare.all.clone())
    .note("the floor is cuIpcOpenMemHandle + cuIpcCloseMemHandle");
    let cached = Figure::new(
        "legacy",
        "cached open and close, 64 MiB",
        "us",
        &cached.rounds,
    )
    .beside(&bare.rounds)
    .spread(cached.all, bare.all)
    .note("the floor is cuIpcOpenMemHandle + cuIpcCloseMemHandle");
    Ok(vec![first, cached, calls(setup, handle)?])
}

fn open_bare(device: &Device, handle: &LegacyHandle) -> anyhow::Result<()> {
    let info = handle.info();
    let base = device
        .backend()
        .open_legacy(&info.raw, info.allocation_bytes, info.device)?;
    // SAFETY: opened above, closed once; no work uses it.
    Ok(unsafe { device.backend().close_legacy(base) }?)
}

/// The backend's calls of cached opens, counted.
fn calls(setup: &Setup, handle: &LegacyHandle) -> anyhow::Result<Figure> {
    let counting = Wrapped::new(setup.device.backend().clone(), Counting::default());
    let device = Device::from_backend(counting.clone());
    let open = handle.open(&device)?;
    let count = || counting.hook().calls().values().sum::<u64>();
    let (before, times) = (count(), setup.times(1000));
    for _ in 0..times {
        drop(handle.open(&device)?);
    }
    let calls = count() - before;
    open.close(PATIENCE)?;
    Ok(Figure::new(
        "legacy",
        "driver calls of a cached open",
        "calls",
        &[calls as f64],
    )
    .wanted(Wanted::AtMost(0.0))
    .note(format!("in {times} cached opens; {before} before them")))
}

/// Single measurements, in nanoseconds, and the medians of their rounds, in microseconds.
struct Samples {
    all: Vec<u64>,
    rounds: Vec<f64>,
}

impl Samples {
    const fn new() -> Samples {
        Samples {
            all: Vec::new(),
            rounds: Vec::new(),
        }
    }

    fn round(
        &mut self,
        is_counted: bool,
        times: usize,
        mut work: impl FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut samples = Vec::with_capacity(times);
        for _ in 0..times {
            let start = Instant::now();
            work()?;
            samples.push(start.elapsed().as_nanos() as u64);
        }
        if is_counted {
            self.rounds
                .extend(Quantiles::of(samples.clone()).map(|quantiles| quantiles.p50 as f64 / 1e3));
            self.all.extend(samples);
        }
        Ok(())
    }
}
