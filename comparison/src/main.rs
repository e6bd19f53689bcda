//! `warpipe-comparison`: 128 bytes of host memory between processes, by a bare ring, warpipe and
//! iceoryx2 in one run.
//!
//! All three do the same: copy the payload into a slot, give the slot to every consumer, copy the
//! payload out, give the slot back. They take turns in rounds in the same processes, and the
//! medians of the rounds are compared. The bare ring has no checks, no death and one reader.

mod link;
mod one_way;
mod place;
mod streaming;

use std::path::PathBuf;
use std::time::SystemTime;

use anyhow::Context;
use clap::Parser;
use serde::{Deserialize, Serialize};
use warpipe_bench::peer_process::Control;
use warpipe_testkit::figure::{Figure, Wanted};

use link::Library;
use place::Placement;

/// Compares warpipe's host path with a bare ring and iceoryx2
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Runs each case for a moment: shows that it runs, not how fast it is
    #[arg(long)]
    quick: bool,
    /// Writes all figures to this file, as JSON
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// The part of a child process, in JSON
    #[arg(long, hide = true)]
    role: Option<String>,
}

/// How long the cases run.
#[derive(Debug, Clone, Copy)]
struct Length {
    rounds: usize,
    is_quick: bool,
}

impl Length {
    fn times(self, full: usize) -> usize {
        if self.is_quick { full / 20 } else { full }
    }
}

/// The role of a child process.
#[derive(Debug, Serialize, Deserialize)]
enum Role {
    OneWay(one_way::Terms),
    Streaming(streaming::Terms),
}

/// What one case measured: each library's median of each round, in nanoseconds an item.
#[derive(Debug, Default)]
struct Measured {
    /// `None` where a bare ring would wait for its own CPU.
    bare: Option<Vec<f64>>,
    ours: Vec<f64>,
    iceoryx2: Vec<f64>,
}

impl Measured {
    fn add(&mut self, library: Library, ns: f64) {
        match library {
            Library::Bare => self.bare.get_or_insert_default().push(ns),
            Library::Warpipe => self.ours.push(ns),
            Library::Iceoryx2 => self.iceoryx2.push(ns),
        }
    }

    /// The figures of a case: beside iceoryx2, and beside the bare ring.
    fn figures(&self, name: &str, beside_iceoryx2: f64, beside_bare: Wanted) -> Vec<Figure> {
        let figure = |peer: &str, floor: &[f64], wanted| {
            let name = format!("{name}, beside {peer}");
            Figure::new("host path", name, "ns", &self.ours)
                .beside(floor)
                .wanted(wanted)
        };
        let wanted = Wanted::RatioAtMost(beside_iceoryx2);
        let mut figures = vec![figure("iceoryx2", &self.iceoryx2, wanted)];
        let bare = self.bare.as_deref();
        figures.extend(bare.map(|bare| figure("a bare ring", bare, beside_bare)));
        figures
    }
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    iceoryx2::prelude::set_log_level(iceoryx2::prelude::LogLevel::Error);
    if let Some(role) = &args.role {
        let control = Control::inherited()?;
        return match serde_json::from_str(role).context("the role")? {
            Role::OneWay(terms) => one_way::answer(&terms, &control),
            Role::Streaming(terms) => streaming::consume(&terms, &control),
        };
    }
    let length = Length {
        rounds: if args.quick { 2 } else { 7 },
        is_quick: args.quick,
    };
    let mut figures = Vec::new();
    let mut add = |case: anyhow::Result<Vec<Figure>>| -> anyhow::Result<()> {
        for figure in case? {
            print(&figure);
            figures.push(figure);
        }
        Ok(())
    };
    for placement in Placement::all()? {
        add(one_way::run(placement, false, length))?;
        add(one_way::run(placement, true, length))?;
        for consumers in placement.consumers() {
            add(streaming::run(placement, *consumers, length))?;
        }
    }
    if let Some(path) = &args.out {
        write(path, &figures, args.quick)?;
    }
    Ok(())
}

fn print(figure: &Figure) {
    let ratio = figure.ratio.unwrap_or(f64::NAN);
    let verdict = match figure.met {
        Some(true) => "met",
        Some(false) => "NOT MET",
        None => "no target",
    };
    println!(
        "{}: {:.0} and {:.0} ns, ratio {ratio:.2}, {} {verdict}",
        figure.name,
        figure.ours,
        figure.floor.unwrap_or(f64::NAN),
        figure.target().unwrap_or_default(),
    );
}

/// The report, with the fields of the other benchmarks' reports.
#[derive(Serialize)]
struct Report<'a> {
    version: &'static str,
    /// Seconds since 1970.
    time: u64,
    device: &'static str,
    device_id: &'static str,
    why: &'static str,
    mode: &'static str,
    devices: u32,
    quick: bool,
    cpus: usize,
    figures: &'a [Figure],
}

fn write(path: &std::path::Path, figures: &[Figure], quick: bool) -> anyhow::Result<()> {
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        time: SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |since| since.as_secs()),
        device: "host",
        device_id: "host",
        why: "the host path is measured",
        mode: "host",
        devices: 1,
        quick,
        cpus: std::thread::available_parallelism().map_or(1, usize::from),
        figures,
    };
    let mut text = serde_json::to_string_pretty(&report)?;
    text.push('\n');
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
