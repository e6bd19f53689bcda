//! A kernel ring beside kernels that talk by bare words: round trips of 8 bytes and of 4 KiB, and
//! 1 MiB slots one way.
//!
//! Each measurement is one launch on either side. The floor's words lie as the ring's do: each side
//! spins in its own memory, and a slot lies with the side that writes it.
//!
//! On a GPU also the ring's steps on a stream, replayed from a CUDA graph; the floor is the same
//! steps launched one by one.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::ensure;
use serde::{Deserialize, Serialize};
use warpipe::{Access, Device, DeviceId, DevicePtr, Domain, KernelRing, KernelRingOptions, Stream};
use warpipe_bench::raw::Memory;
use warpipe_cli::device_arg::DeviceArg;
use warpipe_kernels::ring::{self, Bare, Items};
use warpipe_testkit::figure::{Figure, Wanted};

use super::Role;
use super::graph::Graphs;
use super::peer_process::{Control, PeerProcess};
use super::setup::{BenchDomain, PATIENCE, Setup};

/// Words of an item that is handed there and back.
const SIZES: [(u64, &str); 2] = [(1, "8 bytes"), (512, "4 KiB")];
/// Words of an item that is streamed.
const STREAMED: u64 = 1 << 17;
/// Blocks that read the streamed ring, and those that write it: enough not to be what is measured.
const READERS: u32 = 64;
const WRITERS: u32 = 2 * READERS;
/// Slots of the streamed ring, and of the floor's memory, a power of two: more than blocks on both
/// sides, so that none waits for a slot in another's hands.
const SLOTS: u32 = 256;
/// Bytes from one launch's word of the floor to the next one's.
const WORD_STRIDE: u64 = 128;
/// Where the floor's slot lies, behind its words.
const BARE_SLOT: u64 = 1 << 16;
/// Looks of the floor's kernels: nothing hangs if the other side is gone.
const LOOKS: u64 = 1 << 26;

/// The parameters of both processes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Terms {
    place: BenchDomain,
    rounds: usize,
    trips: u64,
    items: u64,
}

impl Terms {
    fn of(setup: &Setup, place: BenchDomain) -> Terms {
        // Time-sliced on one GPU, a trip costs each side a slice.
        let sliced = setup.mode == "time-sliced" && setup.second.is_none();
        Terms {
            place,
            rounds: setup.rounds(),
            trips: if sliced {
                20
            } else {
                setup.times(2_000) as u64
            },
            items: if setup.is_host() {
                64
            } else {
                setup.times(4_000) as u64
            },
        }
    }
}

pub fn run(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    let (place, between) = places(setup);
    let terms = Terms::of(setup, place);
    let own = create(&setup.domain, &setup.device, "bench/ring-out", 1 << 12, 8)?;
    let peer = PeerProcess::start(&Role::KernelRing(terms.clone()))?;
    let streamed = Memory::allocate(&setup.device, u64::from(READERS) * STREAMED * 8)?;
    let side = Side::new(
        &setup.device,
        &setup.domain,
        &peer.control,
        own,
        "bench/ring-back",
    )?;
    let stream_ring = open(&setup.domain, &setup.device, "bench/ring-stream")?;
    side.own.wait_for_consumers(PATIENCE)?;
    peer.control.hear::<()>()?;
    let mut figures = Vec::new();
    let mut launches = 0;
    for (words, name) in SIZES {
        let (mut ours, mut floor) = (Vec::new(), Vec::new());
        for round in 0..=terms.rounds {
            let items = Items {
                count: terms.trips,
                words,
                seed: 0,
            };
            peer.control.hear::<()>()?;
            let bare = side.timed(|| side.bare_ping(items, launches))?;
            launches += 1;
            peer.control.hear::<()>()?;
            let ringed = side.timed(|| side.ping(items))?;
            side.check()?;
            if round > 0 {
                let each = |took: Duration| took.as_nanos() as f64 / 1e3 / terms.trips as f64;
                floor.push(each(bare));
                ours.push(each(ringed));
            }
        }
        let what = format!("{name} there and back between two kernels, {between}");
        figures.push(
            Figure::new("kernel_ring", &what, "us", &ours)
                .beside(&floor)
                .wanted(Wanted::RatioAtMost(1.3))
                .note("the floor is two kernels with a bare word and one slot each way"),
        );
    }
    let (mut ours, mut floor) = (Vec::new(), Vec::new());
    let items = Items {
        count: terms.items,
        words: STREAMED,
        seed: 0,
    };
    let gigabytes = |took: Duration| (terms.items * STREAMED * 8) as f64 / took.as_nanos() as f64;
    for round in 0..=terms.rounds {
        let copied = side.timed(|| side.bare_drain(items, streamed.ptr()))?;
        peer.control.hear::<()>()?;
        let drained = side.timed(|| side.drain(&stream_ring, items, streamed.ptr()))?;
        side.check()?;
        if round > 0 {
            floor.push(gigabytes(copied));
            ours.push(gigabytes(drained));
        }
    }
    let what = format!("1 MiB slots written, and copied by the consumer, {between}");
    figures.push(
        Figure::new("kernel_ring", what, "GB/s", &ours)
            .beside(&floor)
            .wanted(Wanted::RatioAtLeast(0.9))
            .note("the floor is the same copy of the other process's memory, without a ring and without a writer"),
    );
    peer.end()?;
    Ok(figures)
}

/// The other process's part.
pub fn answer(terms: &Terms, control: &Control) -> anyhow::Result<()> {
    let (device, domain) = terms.place.open()?;
    let own = create(&domain, &device, "bench/ring-back", 1 << 12, 8)?;
    let streamed = create(&domain, &device, "bench/ring-stream", STREAMED * 8, SLOTS)?;
    let side = Side::new(&device, &domain, control, own, "bench/ring-out")?;
    side.own.wait_for_consumers(PATIENCE)?;
    streamed.wait_for_consumers(PATIENCE)?;
    control.send(&())?;
    let mut launches = 0;
    for (words, _) in SIZES {
        for _ in 0..=terms.rounds {
            let items = Items {
                count: terms.trips,
                words,
                seed: 0,
            };
            side.bare_echo(items, launches)?;
            launches += 1;
            control.send(&())?;
            side.stream.synchronize(PATIENCE)?;
            side.echo(items)?;
            control.send(&())?;
            side.stream.synchronize(PATIENCE)?;
            side.check()?;
        }
    }
    let items = Items {
        count: terms.items,
        words: STREAMED,
        seed: 0,
    };
    for _ in 0..=terms.rounds {
        side.send(&streamed, items)?;
        control.send(&())?;
        side.stream.synchronize(PATIENCE)?;
        side.check()?;
    }
    Ok(())
}

/// The steps on a stream; nothing on the host, the streams of which record no graphs.
pub fn replays(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    let DeviceArg::Cuda(ordinal) = setup.choice else {
        return Ok(Vec::new());
    };
    let (place, between) = places(setup);
    let terms = Terms::of(setup, place);
    let peer = PeerProcess::start(&Role::KernelRingSteps(terms.clone()))?;
    let steps = Steps::begin(&setup.device, &setup.domain)?;
    let (mut replayed, mut launched) = (Vec::new(), Vec::new());
    let each = |took: Duration| took.as_nanos() as f64 / 1e3 / terms.trips as f64;
    steps.travel(ordinal, &terms, &peer.control, |replays, took| {
        let rounds = match replays {
            true => &mut replayed,
            false => &mut launched,
        };
        rounds.push(each(took));
    })?;
    peer.end()?;
    let what = format!("steps on a stream, there and back, replayed from a graph, {between}");
    Ok(vec![
        Figure::new("kernel_ring", what, "us", &replayed)
            .beside(&launched)
            .wanted(Wanted::RatioAtMost(1.3))
            .note("the floor is the same steps launched one by one"),
    ])
}

/// The other process's part.
pub fn answer_replays(terms: &Terms, control: &Control) -> anyhow::Result<()> {
    let (device, domain) = terms.place.open()?;
    let DeviceArg::Cuda(ordinal) = terms.place.device else {
        anyhow::bail!("a graph needs a GPU");
    };
    let steps = Steps::answer(&device, &domain)?;
    steps.travel(ordinal, terms, control, |_, _| ())
}

/// Where the other process works, and its words.
fn places(setup: &Setup) -> (BenchDomain, &'static str) {
    match setup.second {
        Some(second) => (setup.place_on(second), "two devices"),
        None => (setup.place(), "one device"),
    }
}

/// Two rings with steps enqueued on a stream: one process sends, and the other sends back.
struct Steps {
    sends: KernelRing,
    receives: KernelRing,
    stream: Stream,
    capturing: Stream,
    begins: bool,
}

impl Steps {
    fn begin(device: &Device, domain: &Domain) -> anyhow::Result<Steps> {
        let sends = create(domain, device, "bench/ring-steps-out", 1 << 12, 8)?;
        let receives = open(domain, device, "bench/ring-steps-back")?;
        Steps::of(device, sends, receives, true)
    }

    fn answer(device: &Device, domain: &Domain) -> anyhow::Result<Steps> {
        let sends = create(domain, device, "bench/ring-steps-back", 1 << 12, 8)?;
        let receives = open(domain, device, "bench/ring-steps-out")?;
        Steps::of(device, sends, receives, false)
    }

    fn of(
        device: &Device,
        sends: KernelRing,
        receives: KernelRing,
        begins: bool,
    ) -> anyhow::Result<Steps> {
        sends.wait_for_consumers(PATIENCE)?;
        Ok(Steps {
            sends,
            receives,
            stream: device.stream()?,
            capturing: device.stream()?,
            begins,
        })
    }

    /// Launched one by one and replayed in turns; each turn's time, but for the first two.
    fn travel(
        &self,
        ordinal: u32,
        terms: &Terms,
        control: &Control,
        mut took: impl FnMut(bool, Duration),
    ) -> anyhow::Result<()> {
        let graphs = Graphs::of(ordinal)?;
        let graph = graphs.record(&self.capturing, || self.trip(&self.capturing))?;
        self.receives.params(&self.stream)?;
        self.sends.params(&self.stream)?;
        for turn in 0..2 * (terms.rounds + 1) {
            let replays = turn % 2 == 1;
            // Both begin together.
            control.send(&())?;
            control.hear::<()>()?;
            let start = Instant::now();
            for _ in 0..terms.trips {
                match replays {
                    true => graph.launch(&self.stream)?,
                    false => self.trip(&self.stream)?,
                }
            }
            self.stream.synchronize(PATIENCE)?;
            let elapsed = start.elapsed();
            self.receives.check()?;
            self.sends.check()?;
            if turn > 1 {
                took(replays, elapsed);
            }
        }
        Ok(())
    }

    /// One trip, as this side sees it.
    fn trip(&self, stream: &Stream) -> anyhow::Result<()> {
        if self.begins {
            self.send(stream)?;
            self.receive(stream)
        } else {
            self.receive(stream)?;
            self.send(stream)
        }
    }

    fn send(&self, stream: &Stream) -> anyhow::Result<()> {
        self.sends.wait_on(stream)?;
        Ok(self.sends.publish_on(stream)?)
    }

    fn receive(&self, stream: &Stream) -> anyhow::Result<()> {
        self.receives.wait_on(stream)?;
        Ok(self.receives.release_on(stream)?)
    }
}

fn create(
    domain: &Domain,
    device: &Device,
    name: &str,
    slot_bytes: u64,
    depth: u32,
) -> anyhow::Result<KernelRing> {
    Ok(KernelRing::new(
        name,
        KernelRingOptions {
            slot_bytes,
            depth,
            allow_time_slices: true,
            ..domain.on(device)
        },
    )?)
}

fn open(domain: &Domain, device: &Device, name: &str) -> anyhow::Result<KernelRing> {
    Ok(KernelRing::open(name, domain.on(device), PATIENCE)?)
}

/// One process's end of both.
struct Side {
    own: KernelRing,
    others: KernelRing,
    stream: Stream,
    /// Words and a slot of the floor: this side's, and the other's.
    bare: [Memory; 2],
    /// Wrong words, and the statuses of waits.
    results: warpipe::Memory,
}

impl Side {
    fn new(
        device: &Device,
        domain: &Domain,
        control: &Control,
        own: KernelRing,
        others: &str,
    ) -> anyhow::Result<Side> {
        let ours = Memory::allocate(device, u64::from(SLOTS) * STREAMED * 8)?;
        let (fd, bytes, owner) = ours.export()?;
        control.send(&(bytes, owner))?;
        control.send_fd(fd.as_fd())?;
        let (bytes, owner): (u64, DeviceId) = control.hear()?;
        let fd = control.receive_fd()?;
        let theirs = Memory::import_for(Access::ReadWrite, device, fd, bytes, owner)?;
        Ok(Side {
            own,
            others: open(domain, device, others)?,
            stream: device.stream()?,
            bare: [ours, theirs],
            results: warpipe::Memory::allocate(device, 16)?,
        })
    }

    fn timed(&self, launch: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<Duration> {
        let start = Instant::now();
        launch()?;
        self.stream.synchronize(PATIENCE)?;
        Ok(start.elapsed())
    }

    /// No wait failed, and no word was wrong.
    fn check(&self) -> anyhow::Result<()> {
        let results = self.results.to_vec(PATIENCE)?;
        ensure!(
            results.iter().all(|&byte| byte == 0),
            "wrong words or a failed wait: {results:?}"
        );
        Ok(())
    }

    fn errors(&self) -> DevicePtr {
        self.results.ptr()
    }

    fn statuses(&self) -> DevicePtr {
        self.results.ptr() + 8
    }

    /// The parameters of a ring for this side's stream.
    fn params(&self, ring: &KernelRing) -> anyhow::Result<DevicePtr> {
        Ok(ring.params(&self.stream)?)
    }

    /// The floor's memory for one launch: its words are 0 at first, so each has its own.
    fn bare(&self, launch: u64, begins: bool) -> Bare {
        let [ours, theirs] = [&self.bare[0], &self.bare[1]].map(Memory::ptr);
        let (out, back) = match begins {
            true => (ours, theirs),
            false => (theirs, ours),
        };
        Bare {
            mine: ours + launch * WORD_STRIDE,
            theirs: theirs + launch * WORD_STRIDE,
            out: out + BARE_SLOT,
            back: back + BARE_SLOT,
        }
    }

    fn bare_ping(&self, items: Items, launch: u64) -> anyhow::Result<()> {
        let bare = self.bare(launch, true);
        // SAFETY: both memories live until the stream has been waited for, as in all of these; the
        // words and slots are these kernels' alone.
        unsafe { ring::bare_ping(&self.stream, bare, items, self.errors(), LOOKS)? };
        Ok(())
    }

    fn bare_echo(&self, items: Items, launch: u64) -> anyhow::Result<()> {
        // SAFETY: as in `bare_ping`.
        unsafe { ring::bare_echo(&self.stream, self.bare(launch, false), items, LOOKS)? };
        Ok(())
    }

    fn bare_drain(&self, items: Items, places: DevicePtr) -> anyhow::Result<()> {
        let from = (self.bare[1].ptr(), u64::from(SLOTS));
        // SAFETY: as in `bare_ping`; there are as many places as blocks.
        unsafe { ring::bare_drain(&self.stream, from, items, READERS, places)? };
        Ok(())
    }

    fn ping(&self, items: Items) -> anyhow::Result<()> {
        let rings = [self.params(&self.own)?, self.params(&self.others)?];
        // SAFETY: the rings are this side's, for this stream; the results live as long as it.
        unsafe { ring::ping(&self.stream, rings, items, self.errors(), self.statuses())? };
        Ok(())
    }

    fn echo(&self, items: Items) -> anyhow::Result<()> {
        let rings = [self.params(&self.others)?, self.params(&self.own)?];
        // SAFETY: as in `ping`.
        unsafe { ring::echo(&self.stream, rings, items, self.statuses())? };
        Ok(())
    }

    fn send(&self, ring: &KernelRing, items: Items) -> anyhow::Result<()> {
        let params = self.params(ring)?;
        // SAFETY: as in `ping`; a GPU runs so many blocks at the same time.
        unsafe { ring::send(&self.stream, params, items, WRITERS, self.statuses())? };
        Ok(())
    }

    fn drain(&self, ring: &KernelRing, items: Items, places: DevicePtr) -> anyhow::Result<()> {
        let params = self.params(ring)?;
        // SAFETY: as in `send`; there are as many places as blocks.
        unsafe {
            ring::drain(
                &self.stream,
                params,
                items,
                READERS,
                places,
                self.statuses(),
            )?
        };
        Ok(())
    }
}
