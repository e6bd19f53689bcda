//! Memory of other allocators that a process shares: read elsewhere, and freed when its receiver
//! has released it or is dead.

use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use warpipe::{Access, AllocationClient, AllocationServer, Error, Stream};
use warpipe_testkit::eventually;

use super::Case;
use super::backend::faulted;
use crate::PATIENCE;
use crate::context::{Backend, Context};
use crate::device_words::wrong_words;
use crate::expandable_segment::ExpandableSegment;
use crate::peer::{Order, Peer};
use crate::shared_allocations::{ForeignMemory, SharedPieces, range_refused, refused};

pub(super) const CASES: &[Case] = &[
    Case::new(
        "another process reads memory of another allocator, which is freed when it has released it",
        released,
    ),
    Case::new(
        "many tensors of one allocation are mapped once in their receiver",
        mapped_once,
    ),
    Case::new(
        "a piece that its allocator maps anew is the new memory in a receiver that knows the old one",
        mapped_anew,
    ),
    Case::new(
        "threads that share parts of one allocation at the same time share one run",
        shared_at_once,
    ),
    Case::new(
        "a killed receiver's memory of another allocator is freed, and not before its death",
        killed_receiver,
    )
    .ends_clients(),
    Case::new(
        "memory that came in pieces outlives the process that shared it",
        killed_exporter,
    )
    .ends_clients(),
    Case::new(
        "a receiver that writes into memory which is shared for reading faults",
        read_only,
    )
    .ends_clients(),
    Case::new("memory that no process can open is not shared", not_shared),
];

const NAME: &str = "tensors";

fn server(context: &Context) -> Result<AllocationServer> {
    Ok(AllocationServer::new(
        NAME,
        context.domain.on(&context.device),
    )?)
}

fn client(context: &Context) -> Result<AllocationClient> {
    Ok(AllocationClient::open(
        NAME,
        context.domain.on(&context.device),
        Duration::ZERO,
    )?)
}

/// Memory of both kinds; the receiver of each says when it is freed.
fn of_each_kind(context: &Context) -> Result<[(ForeignMemory, Receiver<()>); 2]> {
    let ((malloc, freed), (segment, unmapped)) = (channel(), channel());
    Ok([
        (
            ForeignMemory::malloc(&context.device, 1 << 16, malloc)?,
            freed,
        ),
        (ForeignMemory::segment(context, segment)?, unmapped),
    ])
}

fn open(peer: &mut Peer, number: u64, seed: u64) -> Result<()> {
    let name = NAME.to_string();
    peer.ask(&Order::OpenShare { name, number, seed })?;
    Ok(())
}

fn is_freed(freed: &Receiver<()>) -> bool {
    use std::sync::mpsc::RecvTimeoutError::Disconnected;
    freed.recv_timeout(PATIENCE) == Err(Disconnected)
}

fn is_kept(freed: &Receiver<()>) -> bool {
    freed.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty)
}

fn released(context: &Context) -> Result<()> {
    let (server, stream) = (server(context)?, context.stream()?);
    let mut peer = context.peer()?;
    for (seed, (memory, freed)) in (1..).zip(of_each_kind(context)?) {
        let number = memory.share(&server, &stream, seed)?;
        open(&mut peer, number, seed)?;
        ensure!(
            server.is_opened(number)? == Some(true) && is_kept(&freed),
            "it is open"
        );
        peer.ask(&Order::ReleaseShare)?;
        ensure!(is_freed(&freed), "a released share's memory is not freed");
    }
    ensure!(
        eventually(PATIENCE, || server.stats().runs == 0),
        "allocations are held: {:?}",
        server.stats()
    );
    peer.dismiss()
}

fn mapped_once(context: &Context) -> Result<()> {
    let (server, stream) = (server(context)?, context.stream()?);
    let held = || context.device.backend().bytes_held();
    let client = client(context)?;
    let (tell, freed) = channel();
    let memory = ForeignMemory::segment(context, tell)?;
    let ptr = memory.ptr;
    let number = memory.share(&server, &stream, 7)?;
    let first = client.open_share(number, PATIENCE)?;
    let mut before = held();
    let parts = (0..100u64).map(|part| {
        // The first part's allocation is mapped alone, beside the whole segment.
        if part == 1 {
            before = held();
        }
        // SAFETY: the first share, which is open, keeps the memory.
        let shared = unsafe {
            server.share(
                &stream,
                ptr + 64 * part,
                64,
                Access::ReadWrite,
                Box::new(()),
            )
        };
        Ok(client.open_share(shared?, PATIENCE)?)
    });
    let parts: Vec<_> = parts.collect::<Result<_>>()?;
    ensure!(
        held() == before,
        "{} bytes more are mapped",
        held() - before
    );
    if context.settings.backend != Backend::Host {
        ensure!(server.stats().runs <= 2, "{:?}", server.stats());
    }
    let counters = &mut context.error_counters()?;
    ensure!(
        wrong_words(&first, &stream, counters, 7)? == 0,
        "wrong words"
    );
    drop((first, parts));
    ensure!(is_freed(&freed), "memory of closed shares is not freed");
    Ok(())
}

/// A tensor in one piece, and one in that and its neighbour. Each round begins while both sides
/// know the runs of the one before, at the same addresses.
fn mapped_anew(context: &Context) -> Result<()> {
    if context.settings.backend == Backend::Host {
        // The host has legacy memory alone.
        return Ok(());
    }
    let (server, stream) = (server(context)?, context.stream()?);
    let (client, counters) = (client(context)?, &mut context.error_counters()?);
    let held = || context.device.backend().bytes_held();
    let before = held();
    let mut pieces = SharedPieces::new(&context.device)?;
    for round in 0..4 {
        let mut opened = Vec::new();
        for (is_long, seed) in [(false, 2 * round), (true, 2 * round + 1)] {
            let number = pieces.share(&server, &stream, is_long, seed)?;
            let memory = client.open_share(number, PATIENCE)?;
            opened.push((memory, seed));
        }
        for (memory, seed) in &opened {
            let wrong = wrong_words(memory, &stream, counters, *seed)?;
            ensure!(
                wrong == 0,
                "round {round}, seed {seed}: {wrong} wrong words"
            );
        }
        drop(opened);
        ensure!(
            eventually(PATIENCE, || server.stats().claimed == 0),
            "{:?}",
            server.stats()
        );
        pieces.map_anew(1)?;
    }
    ensure!(
        eventually(PATIENCE, || server.stats().runs == 0 && held() == before),
        "{:?}, {} bytes more are mapped",
        server.stats(),
        held() - before
    );
    Ok(())
}

/// Each round begins with a run that the server does not know.
fn shared_at_once(context: &Context) -> Result<()> {
    const THREADS: u64 = 4;
    let (server, client) = (server(context)?, client(context)?);
    for _ in 0..20 {
        let (tell, freed) = channel();
        let memory = ForeignMemory::segment(context, tell)?;
        let start = std::sync::Barrier::new(THREADS as usize);
        let share = |part: u64| {
            let stream = context.stream()?;
            start.wait();
            // SAFETY: the memory lives until all shares are closed, below.
            let number = unsafe {
                server.share(
                    &stream,
                    memory.ptr + 64 * part,
                    64,
                    Access::ReadWrite,
                    Box::new(()),
                )
            };
            Ok(client.open_share(number?, PATIENCE)?)
        };
        let opened = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS)
                .map(|part| scope.spawn(move || share(part)))
                .collect();
            let joined = threads.into_iter().map(|it| it.join().unwrap());
            joined.collect::<Result<Vec<_>>>()
        })?;
        if context.settings.backend == Backend::Cuda {
            // Runs of earlier rounds are held for a moment.
            let stats = server.stats();
            ensure!(stats.claimed == THREADS as usize, "{stats:?}");
            let first = opened[0].ptr();
            let near = opened
                .iter()
                .all(|it| it.ptr().abs_diff(first) < 64 * THREADS);
            ensure!(near, "parts of one allocation are mapped apart");
        }
        drop((opened, memory));
        ensure!(is_freed(&freed), "the memory is not freed");
    }
    Ok(())
}

fn killed_receiver(context: &Context) -> Result<()> {
    let (server, stream) = (server(context)?, context.stream()?);
    for (seed, (memory, freed)) in (1..).zip(of_each_kind(context)?) {
        let mut peer = context.peer()?;
        let number = memory.share(&server, &stream, seed)?;
        open(&mut peer, number, seed)?;
        ensure!(is_kept(&freed), "it is open");
        peer.kill()?;
        ensure!(is_freed(&freed), "a dead receiver's memory is not freed");
        ensure!(
            eventually(PATIENCE, || server.stats().clients == 0),
            "{:?}",
            server.stats()
        );
    }
    Ok(())
}

fn killed_exporter(context: &Context) -> Result<()> {
    let mut peer = context.peer()?;
    let held = || context.device.backend().bytes_held();
    let before = held();
    let number = peer.number(&Order::ShareSegment {
        name: NAME.into(),
        seed: 3,
    })?;
    let client = client(context)?;
    let memory = client.open_share(number, PATIENCE)?;
    memory.check()?;
    peer.kill()?;
    if context.settings.backend == Backend::Host {
        // The host has legacy memory alone.
        ensure!(
            eventually(PATIENCE, || memory.check().is_err()),
            "memory of the dead counts as valid"
        );
        return Ok(());
    }
    ensure!(
        eventually(PATIENCE, || client.is_owner_gone()),
        "the death is not seen"
    );
    memory.check()?;
    let (stream, counters) = (context.stream()?, &mut context.error_counters()?);
    ensure!(
        wrong_words(&memory, &stream, counters, 3)? == 0,
        "wrong words"
    );
    match client.open_share(number + 1, PATIENCE) {
        Err(Error::PeerGone { .. }) => (),
        other => bail!("a dead process answered {other:?}"),
    }
    // The client is still there. Nobody tells it that the run has ended.
    drop(memory);
    ensure!(
        eventually(PATIENCE, || held() == before),
        "memory of the dead stays mapped: {} bytes",
        held() - before
    );
    Ok(())
}

fn read_only(context: &Context) -> Result<()> {
    let (server, stream) = (server(context)?, context.stream()?);
    let (tell, freed) = channel();
    let memory = ForeignMemory::segment(context, tell)?;
    if context.settings.backend == Backend::Host {
        // The host has legacy memory alone.
        let refused = memory.share_read_only(&server, &stream, 3);
        let fault = refused.map_err(|error| error.downcast::<Error>());
        ensure!(
            matches!(fault, Err(Ok(Error::Argument { .. }))),
            "{fault:?}"
        );
        return Ok(());
    }
    let ptr = memory.ptr;
    let number = memory.share_read_only(&server, &stream, 3)?;
    // SAFETY: the share above keeps the memory.
    let writable = unsafe { server.share(&stream, ptr, 64, Access::ReadWrite, Box::new(())) }?;
    let client = client(context)?;
    let writable = client.open_share(writable, PATIENCE)?;
    ensure!(
        writable.access == Access::ReadWrite,
        "{writable:?} is read-only"
    );
    let mut vandal = context.peer()?;
    open(&mut vandal, number, 3)?;
    vandal.send(&Order::OverwriteShare)?;
    faulted(vandal)?;
    drop(writable);
    ensure!(is_freed(&freed), "a dead receiver's memory is not freed");
    Ok(())
}

fn not_shared(context: &Context) -> Result<()> {
    let (server, stream) = (server(context)?, context.stream()?);
    let local = [0u64; 8];
    for ptr in [0, 64, local.as_ptr().addr() as u64] {
        refused(&server, &stream, ptr).with_context(|| format!("{ptr:#x}"))?;
    }
    if context.settings.backend == Backend::Cuda {
        imported_is_refused(context, &server, &stream)?;
        // A range with one piece that cannot be exported, wherever that lies.
        let segment = ExpandableSegment::with_a_private_end(&context.device, 3)?;
        range_refused(&server, &stream, segment.ptr, segment.bytes).context("a private end")?;
    }
    ensure!(server.stats().unclaimed == 0, "{:?}", server.stats());
    Ok(())
}

/// The driver exports no memory that was imported: the share is refused, and no receiver waits.
fn imported_is_refused(
    context: &Context,
    server: &AllocationServer,
    stream: &Stream,
) -> Result<()> {
    let (tell, freed) = channel();
    let number = ForeignMemory::segment(context, tell)?.share(server, stream, 5)?;
    let client = client(context)?;
    let imported = client.open_share(number, PATIENCE)?;
    refused(server, stream, imported.ptr()).context("imported memory")?;
    drop(imported);
    ensure!(is_freed(&freed), "memory of closed shares is not freed");
    Ok(())
}
