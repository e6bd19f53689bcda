//! `warpipe-bench`: the cost of a hand-over, compared with the bare driver's for the same work in
//! the same run.
//!
//! A floor is the same work with single calls of the backend and words in shared memory, without
//! the engine. Floor and warpipe take turns in rounds and the medians of the rounds are compared,
//! so that clock drift or other load affects both. A missed ratio is a result, and not an error.

mod attach;
mod bandwidth;
mod broadcast;
mod c_interface;
mod death;
mod fanout;
mod fanout_rings;
mod graph;
mod growth;
mod handoff;
mod idle;
mod kernel_ring;
mod legacy;
mod pipeline;
mod placement;
mod plot;
mod queue;
mod report;
mod ring;
mod semaphore;
mod send;
mod setup;
mod size;
mod statistics;
mod subscribers;

use std::path::PathBuf;

use anyhow::{Context, ensure};
use clap::Parser;
use serde::{Deserialize, Serialize};
use warpipe_bench::{peer_process, pin, rings};
use warpipe_cli::device_arg::DeviceArg;
use warpipe_testkit::figure::Figure;

use peer_process::Control;
use setup::Setup;

/// Measures hand-overs, and the bare driver's time for the same work in the same run
///
/// Each figure has a floor: the same work by single calls of the driver and words in shared memory,
/// without the library. Library and floor take turns in rounds, and the medians of the rounds are
/// compared. A ratio above its target is a result and no error.
#[derive(Debug, Parser)]
#[command(name = "warpipe-bench", version)]
struct BenchArgs {
    /// The benchmarks to run
    #[arg(value_enum, default_value = "all")]
    what: Vec<What>,
    /// Number of GPUs: with 2, the hand-over is also measured from one GPU to the other
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=2))]
    devices: u32,
    /// Device of the tensors: auto (the first GPU, else the host), host, cuda or cuda:N
    #[arg(long, default_value_t = DeviceArg::Auto)]
    device: DeviceArg,
    /// Runs each benchmark for a few seconds: shows that it runs, not how fast it is
    #[arg(long)]
    quick: bool,
    /// How the processes share the GPU, as the report names it; detected by default
    #[arg(long)]
    mode: Option<String>,
    /// Writes all figures to this file, as JSON, after each benchmark; by default none is written
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Draws the distributions into this directory, as SVG; by default nothing is drawn
    #[arg(long, value_name = "DIR")]
    svg: Option<PathBuf>,
    /// The part of a child process, in JSON
    #[arg(long, hide = true)]
    role: Option<String>,
}

/// One benchmark, or all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
enum What {
    /// All benchmarks
    All,
    /// Round trips between two processes: kernel to kernel, and kernel to copy
    Handoff,
    /// One direction, with 8 samples in flight; on GPUs also in steps from the floor to the library
    Pipeline,
    /// CPU time of a send to 0 to 64 subscribers, of a receive and of a release
    Send,
    /// Tensors of 4 KiB beside 1 GiB
    Size,
    /// One publisher and many subscribers
    Fanout,
    /// 128 bytes of host memory, polling and blocking
    Ring,
    /// One job to a worker and back; four workers beside one
    Queue,
    /// Time until the survivors of a SIGKILL go on
    Death,
    /// CPU time of a subscriber that waits
    Idle,
    /// 1,000 subscribers in one process: attaching, sending, idle CPU time, memory
    Subscribers,
    /// Bandwidth of memory imported from another process, beside the process's own memory
    #[value(alias = "dma")]
    Bandwidth,
    /// Opening another process's memory by a ticket
    Attach,
    /// A permit acquired and released, and passed from one process's GPU work to another's
    Semaphore,
    /// Opening a legacy handle that is open already
    Legacy,
    /// Items from kernel to kernel by a ring, beside bare words
    KernelRing,
    /// CPU time of a hand-over through the C interface, beside Rust's
    C,
    /// Round trips with both processes kept to CPUs near the GPU, or far from it
    Placement,
    /// CPU time of a hand-over that is counted in the statistics page, beside one that is not
    Statistics,
    /// The cost of a further tensor of a version, name of a domain, and engine that follows a name
    Growth,
}

type Benchmark = fn(&Setup) -> anyhow::Result<Vec<Figure>>;

const BENCHMARKS: [(What, Benchmark); 22] = [
    (What::Handoff, handoff::run),
    (What::Pipeline, pipeline::run),
    (What::Send, send::run),
    (What::Size, size::run),
    (What::Fanout, fanout::run),
    (What::Ring, ring::run),
    (What::Queue, queue::run),
    (What::Death, death::run),
    (What::Idle, idle::run),
    (What::Subscribers, subscribers::run),
    (What::Bandwidth, bandwidth::run),
    (What::Attach, attach::run),
    (What::Semaphore, semaphore::run),
    (What::Legacy, legacy::run),
    (What::KernelRing, kernel_ring::run),
    (What::KernelRing, kernel_ring::replays),
    (What::C, c_interface::run),
    (What::Placement, placement::run),
    (What::Statistics, statistics::run),
    (What::Growth, growth::of_tensors),
    (What::Growth, growth::of_names),
    (What::Growth, growth::of_engines),
];

/// The role of a child process of a benchmark.
#[derive(Debug, Serialize, Deserialize)]
enum Role {
    Handoff(handoff::Terms),
    Fanout(fanout::Terms),
    FanoutRings(fanout_rings::Terms),
    PipelineSteps(pipeline::steps::Terms),
    Ring(ring::Terms),
    Queue(queue::Terms),
    Victim(death::Terms),
    Idle(setup::BenchDomain),
    Subscribers(subscribers::Terms),
    Bandwidth(bandwidth::Terms),
    Attach(attach::Terms),
    Semaphore(semaphore::Terms),
    Legacy(legacy::Terms),
    KernelRing(kernel_ring::Terms),
    KernelRingSteps(kernel_ring::Terms),
    Statistics(statistics::Terms),
    GrowthEngine(growth::EngineTerms),
    GrowthNames(growth::NamesTerms),
}

/// Measures, prints and writes. A benchmark that could not be run is an error at the end, once the
/// figures of the others are written.
fn main() -> anyhow::Result<()> {
    let args = BenchArgs::parse();
    if let Some(role) = &args.role {
        return play(serde_json::from_str(role).context("the role")?);
    }
    let setup = Setup::new(&args)?;
    report::heading(&setup);
    let (mut figures, mut failed) = (Vec::new(), Vec::new());
    for (what, benchmark) in BENCHMARKS
        .iter()
        .filter(|(what, _)| args.what.contains(what) || args.what.contains(&What::All))
    {
        match benchmark(&setup) {
            Ok(measured) => {
                figures.extend(measured.into_iter().inspect(report::figure));
                // A run that is killed in a later one keeps these.
                if let Some(path) = &args.out {
                    report::write(path, &setup, &figures)?;
                }
            }
            // The figures of the others count all the same.
            Err(error) => {
                eprintln!("{what:?} could not be run: {error:#}");
                failed.push(what);
            }
        }
    }
    report::table(&figures);
    if let Some(path) = &args.out {
        report::write(path, &setup, &figures)?;
    }
    if let Some(folder) = &args.svg {
        plot::draw(folder, &figures)?;
    }
    ensure!(failed.is_empty(), "could not be run: {failed:?}; see above");
    Ok(())
}

fn play(role: Role) -> anyhow::Result<()> {
    let control = Control::inherited()?;
    match role {
        Role::Handoff(terms) => handoff::answer(&terms, &control),
        Role::Fanout(terms) => fanout::consume(&terms, &control),
        Role::FanoutRings(terms) => fanout_rings::consume(&terms, &control),
        Role::PipelineSteps(terms) => pipeline::steps::consume(&terms, &control),
        Role::Queue(terms) => queue::play(&terms, &control),
        Role::Ring(terms) => ring::answer(&terms, &control),
        Role::Victim(terms) => death::live(&terms, &control),
        Role::Idle(place) => idle::sleep(&place, &control),
        Role::Subscribers(terms) => subscribers::live(&terms, &control),
        Role::Bandwidth(terms) => bandwidth::copy(&terms, &control),
        Role::Attach(terms) => attach::offer(&terms, &control),
        Role::Semaphore(terms) => semaphore::answer(&terms, &control),
        Role::KernelRing(terms) => kernel_ring::answer(&terms, &control),
        Role::KernelRingSteps(terms) => kernel_ring::answer_replays(&terms, &control),
        Role::Legacy(terms) => legacy::export(&terms, &control),
        Role::Statistics(terms) => statistics::measure(&terms, &control),
        Role::GrowthEngine(terms) => growth::follow(&terms, &control),
        Role::GrowthNames(terms) => growth::own(&terms, &control),
    }
}
