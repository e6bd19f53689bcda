//! `warpipe bench`: the cost of a hand-over, compared with the bare driver's for the same work in
//! the same run.
//!
//! A floor is the same work with single calls of the backend and words in shared memory, without
//! the engine. Floor and warpipe take turns in rounds and the medians of the rounds are compared,
//! so that clock drift or other load affects both. A missed ratio is a result, and not an error.

mod attach;
mod bandwidth;
mod broadcast;
mod death;
mod fanout;
mod fanout_rings;
mod figure;
mod handoff;
mod idle;
mod legacy;
mod peer_process;
mod pin;
mod pipeline;
mod plot;
mod queue;
pub(crate) mod raw;
mod report;
mod ring;
mod rings;
mod semaphore;
mod send;
mod setup;
mod size;

use std::path::PathBuf;

use anyhow::Context;
use serde::{Deserialize, Serialize};

use figure::Figure;
use peer_process::Control;
use setup::Setup;

/// What `warpipe bench` takes.
#[derive(Debug, clap::Args)]
pub struct BenchArgs {
    /// What to measure.
    #[arg(value_enum, default_value = "all")]
    what: What,
    /// GPUs to spread two processes over: with 2, the hand-over is measured across them, too.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=2))]
    devices: u32,
    /// Where the tensors lie; the first GPU if there is one.
    #[arg(long, value_enum)]
    device: Option<setup::DeviceKindArg>,
    /// A few seconds each: shows that everything runs, not how fast it is.
    #[arg(long)]
    quick: bool,
    /// How the processes share the GPU, for the report; found by itself if left out.
    #[arg(long)]
    mode: Option<String>,
    /// Write all figures to this file, as JSON.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Draw the distributions into this folder, as SVG.
    #[arg(long)]
    svg: Option<PathBuf>,
    /// A child's part, in JSON.
    #[arg(long, hide = true)]
    role: Option<String>,
}

/// One benchmark, or all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// Every one of them.
    All,
    /// There and back between two processes, kernel to kernel, and kernel to copy.
    Handoff,
    /// One direction with 8 items in flight.
    Pipeline,
    /// The CPU's part of a send, for 0 to 64 subscribers.
    Send,
    /// 4 KiB against 1 GiB.
    Size,
    /// One publisher, many subscribers.
    Fanout,
    /// 128 bytes of host memory, polling and blocking.
    Ring,
    /// One job to a worker and back, and four workers beside one.
    Queue,
    /// What a SIGKILL costs the survivors.
    Death,
    /// What a subscriber that waits takes of the CPU.
    Idle,
    /// Bandwidth through an imported mapping, beside that of one's own memory.
    #[value(alias = "dma")]
    Bandwidth,
    /// Opening another process's memory by a ticket.
    Attach,
    /// A permit taken and given back, and handed from one process's GPU work to another's.
    Semaphore,
    /// A legacy handle that is open already, opened again.
    Legacy,
}

type Benchmark = fn(&Setup) -> anyhow::Result<Vec<Figure>>;

const BENCHMARKS: [(What, Benchmark); 13] = [
    (What::Handoff, handoff::run),
    (What::Pipeline, pipeline::run),
    (What::Send, send::run),
    (What::Size, size::run),
    (What::Fanout, fanout::run),
    (What::Ring, ring::run),
    (What::Queue, queue::run),
    (What::Death, death::run),
    (What::Idle, idle::run),
    (What::Bandwidth, bandwidth::run),
    (What::Attach, attach::run),
    (What::Semaphore, semaphore::run),
    (What::Legacy, legacy::run),
];

/// What a child process of a benchmark does.
#[derive(Debug, Serialize, Deserialize)]
enum Role {
    Handoff(handoff::Terms),
    Fanout(fanout::Terms),
    FanoutRings(fanout_rings::Terms),
    Ring(ring::Terms),
    Queue(queue::Terms),
    Victim(death::Terms),
    Idle(setup::BenchDomain),
    Bandwidth(bandwidth::Terms),
    Attach(attach::Terms),
    Semaphore(semaphore::Terms),
    Legacy(legacy::Terms),
}

/// Measures, prints and writes. An error is a benchmark that could not be run.
pub fn run(args: &BenchArgs) -> anyhow::Result<()> {
    if let Some(role) = &args.role {
        return play(serde_json::from_str(role).context("the role")?);
    }
    let setup = Setup::new(args)?;
    report::heading(&setup);
    let mut figures = Vec::new();
    for (_, benchmark) in BENCHMARKS
        .iter()
        .filter(|(what, _)| [*what, What::All].contains(&args.what))
    {
        figures.extend(benchmark(&setup)?.into_iter().inspect(report::figure));
    }
    report::table(&figures);
    if let Some(path) = &args.out {
        report::write(path, &setup, &figures)?;
    }
    if let Some(folder) = &args.svg {
        plot::draw(folder, &figures)?;
    }
    Ok(())
}

fn play(role: Role) -> anyhow::Result<()> {
    let control = Control::inherited()?;
    match role {
        Role::Handoff(terms) => handoff::answer(&terms, &control),
        Role::Fanout(terms) => fanout::consume(&terms, &control),
        Role::FanoutRings(terms) => fanout_rings::consume(&terms, &control),
        Role::Queue(terms) => queue::play(&terms, &control),
        Role::Ring(terms) => ring::answer(&terms, &control),
        Role::Victim(terms) => death::live(&terms, &control),
        Role::Idle(place) => idle::sleep(&place, &control),
        Role::Bandwidth(terms) => bandwidth::copy(&terms, &control),
        Role::Attach(terms) => attach::offer(&terms, &control),
        Role::Semaphore(terms) => semaphore::answer(&terms, &control),
        Role::Legacy(terms) => legacy::export(&terms, &control),
    }
}
