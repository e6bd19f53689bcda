//! What the statistics pages of processes say of their memory and of the paths of their data.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use warpipe::statistics::{Observer, Process, RegionId, Role, SlowPath};
use warpipe::{Device, Error, Memory, Subscriber, SubscriberOptions, Timeline};
use warpipe_testkit::eventually;

use super::Case;
use crate::PATIENCE;
use crate::context::{Backend, Context};
use crate::payload::Payload;

pub(super) const CASES: &[Case] = &[
    Case::new(
        "memory has one identity in the pages of its owner and of all importers",
        identity,
    ),
    Case::new(
        "copies that are staged and memory that cannot be mapped are counted",
        slow_paths,
    )
    .needs_queues(),
];

fn identity(context: &Context) -> Result<()> {
    let publisher = context.publisher("seen")?;
    let mut peers = [context.peer()?, context.peer()?];
    for peer in &mut peers {
        peer.subscribe("seen")?;
    }
    let stream = context.stream()?;
    Payload::of(4096, 1).send(&publisher, &stream)?;
    for peer in &mut peers {
        ensure!(peer.receive(1)?.iter().all(|item| item.is_whole()));
    }
    let importers = peers
        .each_ref()
        .map(|peer| peer.pid().as_raw_nonzero().get());
    let mut observer = Observer::new();
    let mut seen: HashMap<RegionId, Vec<(i32, Role)>> = HashMap::new();
    let own = std::process::id() as i32;
    let is_whole = eventually(PATIENCE, || {
        seen.clear();
        for process in observer.observe().processes {
            if process.pid == own || importers.contains(&process.pid) {
                for region in &process.regions {
                    let of = seen.entry(region.id).or_default();
                    of.push((process.pid, region.role));
                }
            }
        }
        // The region of the sample: one owner, and every importer under the same identity.
        seen.values().any(|of| {
            of.contains(&(own, Role::Owner))
                && importers.iter().all(|&pid| of.contains(&(pid, Role::Peer)))
        })
    });
    ensure!(is_whole, "regions by identity: {seen:?}");
    peers.into_iter().try_for_each(|peer| peer.dismiss())
}

/// The count and the bytes of a slow path in this process's page.
fn counted(process: &Process, path: SlowPath) -> (u64, u64) {
    let found = process.slow_paths.iter().find(|it| it.path == path);
    found.map_or((0, 0), |it| (it.count, it.bytes))
}

fn own_page() -> Result<Process> {
    let own = std::process::id() as i32;
    let found = Observer::new().observe().processes;
    let found = found.into_iter().find(|process| process.pid == own);
    found.context("this process has no statistics page")
}

fn slow_paths(context: &Context) -> Result<()> {
    const BYTES: usize = 100_000;
    // An endpoint that ticks: the page is written with its ticks.
    let _publisher = context.publisher("ticks")?;
    let timeline = Timeline::new("blocks", context.domain.on(&context.device))?;
    let blocks = Timeline::open("blocks", context.domain.on(&context.device), Duration::ZERO)?;
    let before = own_page()?;
    let stream = context.stream()?;
    let memory = Memory::allocate(&context.device, BYTES as u64)?;
    let mut bytes = vec![7; BYTES];
    memory.write(&stream, 0, &bytes)?;
    stream.synchronize(PATIENCE)?;
    blocks.wait(&stream, 1)?;
    memory.write(&stream, 0, &bytes)?;
    timeline.signal_now(1, PATIENCE)?;
    stream.synchronize(PATIENCE)?;
    memory.copy_to(0, &mut bytes, PATIENCE)?;
    let is_cuda = context.settings.backend == Backend::Cuda;
    if is_cuda {
        let options = SubscriberOptions {
            device: Some(Device::host()),
            ..context.domain.on(&context.device)
        };
        let refused = Subscriber::open("ticks", options, Duration::ZERO);
        ensure!(
            matches!(refused, Err(Error::Handshake { .. })),
            "a subscriber on the host of a GPU's publisher: {refused:?}"
        );
    }
    let due = |path: SlowPath| match (is_cuda, path) {
        (false, _) => (0, 0),
        (true, SlowPath::NoPeerAccess) => (1, 0),
        (true, _) => (1, BYTES as u64),
    };
    let paths = [
        SlowPath::PageableUpload,
        SlowPath::StagedUpload,
        SlowPath::StagedDownload,
        SlowPath::NoPeerAccess,
    ];
    let mut found = vec![];
    let mut look = || -> Result<bool> {
        let page = own_page()?;
        found = paths
            .iter()
            .map(|&path| {
                let (now, then) = (counted(&page, path), counted(&before, path));
                (path, (now.0 - then.0, now.1 - then.1))
            })
            .collect();
        Ok(found.iter().all(|&(path, taken)| taken == due(path)))
    };
    let is_due = eventually(PATIENCE, || look().unwrap_or(false));
    ensure!(is_due, "counted: {found:?}");
    Ok(())
}
