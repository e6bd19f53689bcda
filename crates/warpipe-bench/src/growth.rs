//! What each further thing costs: tensors of a version, names of a domain, engines of one name of
//! weights. The floor of each figure is its cost for the smallest count, so a ratio of at most 1 is
//! growth in a straight line or slower. `subscribers` has the same for the subscribers of a channel.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use warpipe::weights::{Keeper, SharedWeights, Weights};
use warpipe::{DType, Layout, Publisher, Subscriber, SubscriberOptions};
use warpipe_testkit::figure::{Figure, Wanted, median};

use super::Role;
use super::peer_process::{Control, PeerProcess};
use super::setup::{BenchDomain, PATIENCE, Setup};
use super::subscribers::{allow_descriptors, footprint};

const BENCH: &str = "growth";

/// More than this beside the smallest count is no straight line; less is what rounds differ by.
const STRAIGHT: f64 = 1.1;

/// So many numbers of 32 bits has each tensor.
const ELEMENTS: u64 = 128;

/// Names of one process: more of them need more descriptors than a process has as a rule.
const NAMES_EACH: usize = 1_000;

/// The parameters of a process that has weights open.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EngineTerms {
    place: BenchDomain,
    name: String,
}

/// The parameters of a process that has some of the names.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NamesTerms {
    place: BenchDomain,
    first: usize,
    count: usize,
}

/// What such a process says: what its names took.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Made {
    us: f64,
    resident_kib: f64,
    descriptors: f64,
}

/// What a process says once it has the first version open.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Opened {
    us: f64,
    resident_kib: f64,
    tensors: usize,
}

/// The next act of such a process.
#[derive(Debug, Serialize, Deserialize)]
enum Step {
    /// It takes this version.
    Take(u64),
    End,
}

/// Figures for one count after the other, each beside the first one's.
struct Table {
    made: Vec<Figure>,
}

impl Table {
    fn add(&mut self, what: &str, unit: &str, count: usize, of: &str, rounds: &[f64]) {
        let first = self
            .made
            .iter()
            .find(|figure| figure.name.starts_with(&format!("{what}, ")));
        let floor = first.map_or_else(|| rounds.to_vec(), |first| first.ours_rounds.clone());
        self.made.push(
            Figure::new(BENCH, format!("{what}, {count} {of}"), unit, rounds)
                .beside(&floor)
                .wanted(Wanted::RatioAtMost(STRAIGHT)),
        );
    }
}

/// The counts, the first of which is the floor.
fn each_of(
    setup: &Setup,
    (quick, full): (&[usize], &[usize]),
    measure: fn(&Setup, usize, &mut Table) -> anyhow::Result<()>,
) -> anyhow::Result<Vec<Figure>> {
    let mut table = Table { made: Vec::new() };
    for &count in if setup.quick { quick } else { full } {
        measure(setup, count, &mut table).with_context(|| format!("{count}"))?;
    }
    Ok(table.made)
}

pub fn of_tensors(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    let counts: (&[usize], &[usize]) = (&[100, 1_000], &[22_274, 222_747, 494_592]);
    each_of(setup, counts, tensors)
}

pub fn of_names(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    each_of(setup, (&[10, 50], &[100, 1_000, 10_000]), names)
}

pub fn of_engines(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    // A GPU takes 48 to 60 clients of MPS at once.
    let most = if setup.is_mps() { 40 } else { 64 };
    each_of(setup, (&[1, 3], &[1, 8, most]), engines)
}

/// One version of many tensors: published here, opened by another process.
fn tensors(setup: &Setup, count: usize, table: &mut Table) -> anyhow::Result<()> {
    let name = format!("growth/tensors-{count}");
    let layout = Layout::contiguous(DType::F32, &[ELEMENTS])?;
    let names: Vec<String> = (0..count)
        .map(|tensor| {
            format!(
                "model.layers.{}.mlp.experts.{tensor}.weight",
                tensor / 1_000
            )
        })
        .collect();
    let keeper = Keeper::new(&name, setup.domain.options())?;
    let each = |taken: Duration| taken.as_secs_f64() * 1e6 / count as f64;
    let (mut publish, mut open, mut memory) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..setup.rounds().min(3) {
        let start = Instant::now();
        let tensors = names.iter().map(|name| (name.as_str(), layout));
        let weights = Weights::builder(&setup.device, tensors)?.finish()?;
        let published = weights.publish(&setup.domain, &name, PATIENCE)?;
        publish.push(each(start.elapsed()));
        let (peer, opened) = engine(setup, &name)?;
        ensure!(opened.tensors == count, "{} tensors", opened.tensors);
        open.push(opened.us / count as f64);
        memory.push(opened.resident_kib * 1024.0 / count as f64);
        peer.control.send(&Step::End)?;
        peer.end()?;
        drop(published);
    }
    drop(keeper);
    table.add("publishing a tensor", "us", count, "tensors", &publish);
    table.add("opening a tensor", "us", count, "tensors", &open);
    table.add(
        "memory of an open tensor",
        "bytes",
        count,
        "tensors",
        &memory,
    );
    Ok(())
}

/// Starts a process that opens weights, and waits until it has.
fn engine(setup: &Setup, name: &str) -> anyhow::Result<(PeerProcess, Opened)> {
    let peer = PeerProcess::start(&Role::GrowthEngine(EngineTerms {
        place: setup.place(),
        name: name.to_owned(),
    }))?;
    let opened = peer.control.hear()?;
    Ok((peer, opened))
}

/// Many publishers in a domain, up to a thousand in a process: making one, opening one, and listing
/// all.
fn names(setup: &Setup, count: usize, table: &mut Table) -> anyhow::Result<()> {
    let starts = (0..count).step_by(NAMES_EACH);
    let owners = starts
        .map(|first| {
            let (place, count) = (setup.place(), NAMES_EACH.min(count - first));
            let peer = PeerProcess::start(&Role::GrowthNames(NamesTerms {
                place,
                first,
                count,
            }))?;
            let made: Made = peer.control.hear()?;
            Ok((peer, made))
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    let of = |field: fn(&Made) -> f64| -> Vec<f64> {
        let last: Vec<f64> = owners.iter().map(|(_, made)| field(made)).collect();
        // Those that came last had all others beside them.
        last[last.len() / 2..].to_vec()
    };
    let (mut open, mut list) = (Vec::new(), Vec::new());
    for round in 0..=setup.rounds() {
        let number = (count - 1) * round / (setup.rounds() + 1);
        let options: SubscriberOptions = setup.domain.on(&setup.device);
        let start = Instant::now();
        let subscriber = Subscriber::open(&name_of(number), options, Duration::ZERO)?;
        let opened = start.elapsed().as_secs_f64() * 1e6;
        drop(subscriber);
        let start = Instant::now();
        let found = setup.domain.endpoints()?.len();
        let listed = start.elapsed().as_secs_f64() * 1e6 / count as f64;
        ensure!(found >= count, "{found} names are listed");
        // The first round warms the caches.
        if round > 0 {
            open.push(opened);
            list.push(listed);
        }
    }
    table.add("making a name", "us", count, "names", &of(|made| made.us));
    table.add(
        "memory of a name",
        "KiB",
        count,
        "names",
        &of(|made| made.resident_kib),
    );
    table.add(
        "descriptors of a name",
        "descriptors",
        count,
        "names",
        &of(|made| made.descriptors),
    );
    table.add("opening a name", "us", count, "names in the domain", &open);
    table.add("listing a name", "us", count, "names in the domain", &list);
    for (owner, _) in owners {
        owner.control.send(&())?;
        owner.end()?;
    }
    Ok(())
}

fn name_of(number: usize) -> String {
    format!("growth/name-{number}")
}

/// The part of a process that has names.
pub fn own(terms: &NamesTerms, control: &Control) -> anyhow::Result<()> {
    allow_descriptors(terms.count)?;
    let (device, domain) = terms.place.open()?;
    let (before, start) = (footprint()?, Instant::now());
    let publishers = (terms.first..terms.first + terms.count)
        .map(|number| Publisher::new(&name_of(number), domain.on(&device)))
        .collect::<warpipe::Result<Vec<_>>>()?;
    let (took, after) = (start.elapsed(), footprint()?);
    let each = |sum: f64| sum / terms.count as f64;
    control.send(&Made {
        us: each(took.as_secs_f64() * 1e6),
        resident_kib: each(after.0 - before.0),
        descriptors: each(after.1 as f64 - before.1 as f64),
    })?;
    control.hear::<()>()?;
    drop(publishers);
    Ok(())
}

/// Processes that follow one name: the time until all have a new version, for each.
fn engines(setup: &Setup, count: usize, table: &mut Table) -> anyhow::Result<()> {
    let name = format!("growth/engines-{count}");
    let keeper = Keeper::new(&name, setup.domain.options())?;
    let layout = Layout::contiguous(DType::F32, &[ELEMENTS])?;
    let publish = || -> anyhow::Result<_> {
        let builder = Weights::builder(&setup.device, [("weight", layout)])?;
        Ok(builder.finish()?.publish(&setup.domain, &name, PATIENCE)?)
    };
    let mut published = publish()?;
    let engines = (0..count)
        .map(|_| engine(setup, &name))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let mut rounds = Vec::new();
    for round in 0..=setup.rounds() {
        let start = Instant::now();
        published = publish()?;
        for (engine, _) in &engines {
            engine.control.send(&Step::Take(published.version))?;
        }
        for (engine, _) in &engines {
            engine.control.hear::<()>()?;
        }
        // The first one opens what all later ones have.
        if round > 0 {
            rounds.push(start.elapsed().as_secs_f64() * 1e6 / count as f64);
        }
    }
    let opened: Vec<f64> = engines.iter().map(|(_, opened)| opened.us).collect();
    for (engine, _) in engines {
        engine.control.send(&Step::End)?;
        engine.end()?;
    }
    drop((published, keeper));
    table.add(
        "opening by an engine",
        "us",
        count,
        "engines",
        &[median(&opened)],
    );
    table.add("a version for an engine", "us", count, "engines", &rounds);
    Ok(())
}

/// The part of a process that has weights open.
pub fn follow(terms: &EngineTerms, control: &Control) -> anyhow::Result<()> {
    let (device, domain) = terms.place.open()?;
    let stream = device.stream()?;
    let (before, start) = (footprint()?, Instant::now());
    let shared = SharedWeights::open(&terms.name, domain.on(&device), PATIENCE)?;
    let us = start.elapsed().as_secs_f64() * 1e6;
    control.send(&Opened {
        us,
        resident_kib: footprint()?.0 - before.0,
        tensors: shared.tensors().len(),
    })?;
    let mut follower = shared.follow();
    while let Step::Take(version) = control.hear()? {
        while follower.weights().info().version < version {
            follower.update(&stream, PATIENCE)?;
        }
        control.send(&())?;
    }
    Ok(())
}
