//! `warpipe bridge` beside Zenoh's own put and subscribe of the same bytes, in one run: throughput
//! and one-way latency over TCP on loopback.
//!
//! Four processes: a publisher, the bridge of its domain, the bridge of another domain, and a
//! subscriber there. Zenoh's bytes go straight from the first process to the last one. So do those
//! of a channel in one domain, which a bridge cannot outrun. All take turns in rounds, and the
//! medians of the rounds are compared.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, anyhow, ensure};
use clap::Parser;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use warpipe::{Device, Domain, Publisher, PublisherOptions, Stream, Subscriber};
use warpipe_bench::PATIENCE;
use warpipe_bench::peer_process::{Control, PeerProcess};
use warpipe_bridge::{Bridge, Options};
use warpipe_cli::device_arg::DeviceArg;
use warpipe_testkit::figure::{Figure, Wanted};
use zenoh::Wait;
use zenoh::bytes::ZBytes;
use zenoh::qos::CongestionControl;

/// Compares a bridge with Zenoh's own put and subscribe
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Device of the tensors; Zenoh's bytes are the host's
    #[arg(long, default_value_t = DeviceArg::Host)]
    device: DeviceArg,
    /// Runs each case for a moment: shows that it runs, not how fast it is
    #[arg(long)]
    quick: bool,
    /// Only the cases with tensors of this size
    #[arg(long, value_name = "BYTES")]
    only: Option<usize>,
    /// Rounds of each case, behind one that warms up
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Writes all figures to this file, as JSON
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// The part of a child process, in JSON
    #[arg(long, hide = true)]
    role: Option<String>,
}

/// Zenoh's key.
const KEY: &str = "bench/items";
/// The names of the tensors.
const NAMES: &str = "bench/**";

#[derive(Debug, Serialize, Deserialize)]
enum Role {
    Exporter(Terms),
    Importer(Terms),
    Receiver(Terms),
}

/// What all processes know.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Terms {
    near: PathBuf,
    far: PathBuf,
    device: String,
    bridge: String,
    zenoh: String,
    rounds: usize,
    cases: Vec<Case>,
}

impl Terms {
    fn device(&self) -> anyhow::Result<Device> {
        let device: DeviceArg = self.device.parse().map_err(|e| anyhow!("{e}"))?;
        Ok(device.open()?.device)
    }
}

/// `items` tensors of `bytes`: one at a time, or behind each other.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Case {
    bytes: usize,
    items: usize,
    one_at_a_time: bool,
}

impl Case {
    /// The names of the publisher that a bridge exports, and of one that it does not.
    fn names(&self) -> [String; 2] {
        let kind = if self.one_at_a_time { "single" } else { "many" };
        ["bench", "local"].map(|place| format!("{place}/{kind}/{}", self.bytes))
    }

    /// The publisher's ring has room for as many bytes as the queue of Zenoh's session: 16 batches
    /// of 64 KiB.
    fn depth(&self) -> u32 {
        ((1 << 20) / self.bytes).clamp(16, 256) as u32
    }
}

/// Zenoh first, in each round.
const WAYS: [Way; 3] = [Way::Zenoh, Way::Bridge, Way::Channel];

#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    Zenoh,
    Bridge,
    Channel,
}

fn cases(quick: bool) -> Vec<Case> {
    let streamed = |bytes: usize, items: usize| Case {
        bytes,
        items: if quick { (items / 20).max(2) } else { items },
        one_at_a_time: false,
    };
    vec![
        Case {
            bytes: 1 << 10,
            items: if quick { 20 } else { 1000 },
            one_at_a_time: true,
        },
        streamed(4 << 10, 40_000),
        streamed(64 << 10, 10_000),
        streamed(1 << 20, 1_000),
        streamed(64 << 20, 16),
    ]
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    if let Some(role) = &args.role {
        let control = Control::inherited()?;
        return match serde_json::from_str(role).context("the role")? {
            Role::Exporter(terms) => bridge(&terms, &control, true),
            Role::Importer(terms) => bridge(&terms, &control, false),
            Role::Receiver(terms) => receive_all(&terms, &control),
        };
    }
    let folder = warpipe_testkit::temporary_folder()?;
    let terms = Terms {
        near: folder.path().join("near"),
        far: folder.path().join("far"),
        device: args.device.to_string(),
        bridge: free_endpoint()?,
        zenoh: free_endpoint()?,
        rounds: if args.quick { 1 } else { args.rounds.max(1) },
        cases: cases(args.quick)
            .into_iter()
            .filter(|case| args.only.is_none_or(|bytes| bytes == case.bytes))
            .collect(),
    };
    let figures = measure(&terms)?;
    match &args.out {
        Some(path) => write(path, &terms, &figures, args.quick),
        None => Ok(()),
    }
}

/// An address of loopback with a port that nobody uses.
fn free_endpoint() -> anyhow::Result<String> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    Ok(format!("tcp/{}", listener.local_addr()?))
}

fn measure(terms: &Terms) -> anyhow::Result<Vec<Figure>> {
    let device = terms.device()?;
    let domain = Domain::at(&terms.near)?;
    let sender = Sender {
        stream: device.stream()?,
        zenoh: session(&terms.zenoh, "listen")?,
    };
    let exporter = PeerProcess::start(&Role::Exporter(terms.clone()))?;
    let importer = PeerProcess::start(&Role::Importer(terms.clone()))?;
    let receiver = PeerProcess::start(&Role::Receiver(terms.clone()))?;
    let put = sender
        .zenoh
        .declare_publisher(KEY)
        .congestion_control(CongestionControl::Block);
    let put = put.wait().map_err(|e| anyhow!("{e}"))?;
    let start = Instant::now();
    while !put
        .matching_status()
        .wait()
        .map_err(|e| anyhow!("{e}"))?
        .matching()
    {
        ensure!(start.elapsed() < PATIENCE, "Zenoh's subscriber is not seen");
        std::thread::yield_now();
    }
    let mut figures = Vec::new();
    for &case in &terms.cases {
        let build = |name: String| {
            Publisher::new(
                &name,
                PublisherOptions {
                    depth: case.depth(),
                    ..domain.on(&device)
                },
            )
        };
        let [exported, local] = case.names().map(build);
        let (exported, local) = (exported?, local?);
        // The receiver is attached: so are the bridges.
        receiver.control.hear::<()>()?;
        let mut measured = WAYS.map(|_| Vec::new());
        // The first round warms up.
        for round in 0..=terms.rounds {
            for (way, values) in WAYS.iter().zip(&mut measured) {
                let publisher = if *way == Way::Channel {
                    &local
                } else {
                    &exported
                };
                let value = sender.case(case, *way, publisher, &put, &receiver.control)?;
                if round > 0 {
                    values.push(value);
                }
            }
        }
        let [floor, ours, channel] = measured;
        for figure in [figure(case, &ours, &floor), limit(case, &channel)] {
            print(&figure);
            figures.push(figure);
        }
    }
    drop(put);
    for peer in [receiver, importer, exporter] {
        peer.control.send(&())?;
        peer.end()?;
    }
    Ok(figures)
}

impl Case {
    fn title(&self) -> String {
        let size = match self.bytes >> 20 {
            0 => format!("{} KiB", self.bytes >> 10),
            mebibytes => format!("{mebibytes} MiB"),
        };
        match self.one_at_a_time {
            true => format!("{size} one way, one at a time"),
            false => format!("{size} behind each other"),
        }
    }

    fn unit(&self) -> &'static str {
        if self.one_at_a_time { "us" } else { "GB/s" }
    }
}

fn figure(case: Case, ours: &[f64], floor: &[f64]) -> Figure {
    let wanted = match case.one_at_a_time {
        true => Wanted::BesideFloorAtMost(100.0),
        false => Wanted::RatioAtLeast(0.9),
    };
    Figure::new("bridge", case.title(), case.unit(), ours)
        .beside(floor)
        .wanted(wanted)
}

/// The same through a channel of one domain.
fn limit(case: Case, channel: &[f64]) -> Figure {
    let title = format!("{}, one channel without a bridge", case.title());
    Figure::new("bridge", title, case.unit(), channel)
}

fn print(figure: &Figure) {
    let verdict = match figure.met {
        Some(true) => "met",
        Some(false) => "NOT MET",
        None => "no target",
    };
    let Some(floor) = figure.floor else {
        return println!("{}: {:.3} {}", figure.name, figure.ours, figure.unit);
    };
    println!(
        "{}: {:.3} and {floor:.3} {}, ratio {:.2}, {} {verdict}",
        figure.name,
        figure.ours,
        figure.unit,
        figure.ratio.unwrap_or(f64::NAN),
        figure.target().unwrap_or_default(),
    );
}

/// The process that everything begins in.
struct Sender {
    stream: Stream,
    zenoh: zenoh::Session,
}

impl Sender {
    /// Microseconds of an item, or gigabytes a second.
    fn case(
        &self,
        case: Case,
        way: Way,
        publisher: &Publisher,
        put: &zenoh::pubsub::Publisher<'_>,
        receiver: &Control,
    ) -> anyhow::Result<f64> {
        let mut bytes = vec![7; case.bytes];
        // Zenoh's bytes are shared with each put, and not copied.
        let shared = ZBytes::from(bytes.clone());
        let send = |bytes: &[u8], shared: ZBytes| -> anyhow::Result<()> {
            match way {
                Way::Bridge | Way::Channel => {
                    publisher.send_bytes(&self.stream, bytes)?;
                }
                Way::Zenoh => put.put(shared).wait().map_err(|e| anyhow!("{e}"))?,
            }
            Ok(())
        };
        receiver.send(&())?;
        receiver.hear::<()>()?;
        if case.one_at_a_time {
            let mut took = Vec::with_capacity(case.items);
            for _ in 0..case.items {
                bytes[..8].copy_from_slice(&now_ns().to_ne_bytes());
                let stamped = match way {
                    Way::Zenoh => ZBytes::from(bytes.clone()),
                    Way::Bridge | Way::Channel => ZBytes::new(),
                };
                send(&bytes, stamped)?;
                took.push(receiver.hear::<u64>()? as f64 / 1e3);
            }
            return Ok(warpipe_testkit::figure::median(&took));
        }
        let start = Instant::now();
        for _ in 0..case.items {
            send(&bytes, shared.clone())?;
        }
        receiver.hear::<u64>()?;
        Ok((case.bytes * case.items) as f64 / start.elapsed().as_nanos() as f64)
    }
}

/// The monotonic clock, which all processes of a machine share.
fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A session with the settings of a bridge's that count here.
fn session(endpoint: &str, side: &str) -> anyhow::Result<zenoh::Session> {
    let mut config = zenoh::Config::default();
    let mut set = |key: &str, value: String| {
        let set = config.insert_json5(key, &value);
        set.map_err(|error| anyhow!("{key}: {error}"))
    };
    set("mode", "\"peer\"".into())?;
    set("listen/endpoints", "[]".into())?;
    set(&format!("{side}/endpoints"), format!("[\"{endpoint}\"]"))?;
    set("scouting/multicast/enabled", "false".into())?;
    set("scouting/gossip/enabled", "false".into())?;
    set("transport/link/tx/queue/size/data", "16".into())?;
    let wait = "transport/link/tx/queue/congestion_control/block/wait_before_close";
    set(wait, "60000000".into())?;
    zenoh::open(config).wait().map_err(|e| anyhow!("{e}"))
}

/// A bridge, until the parent says so.
fn bridge(terms: &Terms, control: &Control, exports: bool) -> anyhow::Result<()> {
    let folder = if exports { &terms.near } else { &terms.far };
    let mut options = Options::new(&Domain::at(folder)?, &terms.device()?);
    if exports {
        options.listen.push(terms.bridge.clone());
        options.export.push(NAMES.into());
    } else {
        options.connect.push(terms.bridge.clone());
        options.import.push(NAMES.into());
    }
    let _bridge = Bridge::open(options)?;
    loop {
        // While nothing goes wrong in the parent, this takes longer than any patience.
        match control.hear::<()>() {
            Ok(()) => return Ok(()),
            Err(error) if is_timeout(&error) => {}
            Err(error) => return Err(error),
        }
    }
}

fn is_timeout(error: &anyhow::Error) -> bool {
    let kind = error
        .downcast_ref::<std::io::Error>()
        .map(std::io::Error::kind);
    kind == Some(std::io::ErrorKind::WouldBlock)
}

/// The process that everything ends in.
fn receive_all(terms: &Terms, control: &Control) -> anyhow::Result<()> {
    let device = terms.device()?;
    let stream = device.stream()?;
    let zenoh = session(&terms.zenoh, "connect")?;
    let items = zenoh.declare_subscriber(KEY).wait();
    let items = items.map_err(|e| anyhow!("{e}"))?;
    let attach = |name: &str, domain: &Path| {
        Subscriber::open(name, Domain::at(domain)?.on(&device), PATIENCE)
    };
    for case in &terms.cases {
        let [exported, local] = case.names();
        let mut subscriber = attach(&exported, &terms.far)?;
        let mut beside = attach(&local, &terms.near)?;
        control.send(&())?;
        for _ in 0..=terms.rounds {
            for way in WAYS {
                control.hear::<()>()?;
                control.send(&())?;
                let mut bytes = vec![0; case.bytes];
                for _ in 0..case.items {
                    match way {
                        Way::Zenoh => {
                            let item = items.recv_timeout(PATIENCE).map_err(|e| anyhow!("{e}"))?;
                            let item = item.context("no item came")?;
                            ensure!(item.payload().len() == case.bytes, "another item");
                            if case.one_at_a_time {
                                bytes.copy_from_slice(&item.payload().to_bytes());
                            }
                        }
                        Way::Bridge | Way::Channel => {
                            let from = match way {
                                Way::Channel => &mut beside,
                                _ => &mut subscriber,
                            };
                            let sample = from.receive(&stream, PATIENCE)?;
                            ensure!(sample.layout().bytes() == case.bytes as u64, "another item");
                            if case.one_at_a_time {
                                sample.copy_to(&mut bytes, PATIENCE)?;
                            } else {
                                sample.finish(PATIENCE)?;
                            }
                        }
                    }
                    if case.one_at_a_time {
                        let sent = u64::from_ne_bytes(bytes[..8].try_into()?);
                        control.send(&(now_ns() - sent))?;
                    }
                }
                if !case.one_at_a_time {
                    control.send(&(case.items as u64))?;
                }
            }
        }
    }
    control.hear()
}

/// The report, with the fields of the other benchmarks' reports.
#[derive(Serialize)]
struct Report<'a> {
    version: &'static str,
    /// Seconds since 1970.
    time: u64,
    device: String,
    mode: &'static str,
    devices: u32,
    quick: bool,
    cpus: usize,
    figures: &'a [Figure],
}

fn write(path: &Path, terms: &Terms, figures: &[Figure], quick: bool) -> anyhow::Result<()> {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        time: since.unwrap_or(Duration::ZERO).as_secs(),
        device: terms.device()?.info().name.clone(),
        mode: "loopback",
        devices: 1,
        quick,
        cpus: std::thread::available_parallelism().map_or(1, usize::from),
        figures,
    };
    let mut text = serde_json::to_string_pretty(&report)?;
    text.push('\n');
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
