//! Processes with device work, or files, that outlive them: with a forked child that holds
//! everything, and by `exec`.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use warpipe::{Error, LimitFault, Loss, Pool, PoolOptions, Subscriber, SubscriberOptions};
use warpipe_testkit::eventually;

use super::Case;
use crate::PATIENCE;
use crate::context::Context;
use crate::device_words::{fill, wrong_words};
use crate::payload::Payload;
use crate::peer::{Batch, HolderOrder, Order, Peer, PublisherPlan, Task};

pub(super) const CASES: &[Case] = &[
    Case::new(
        "a publisher that calls exec is dead: a reader's stream continues, the sample is lost",
        exec,
    )
    .ends_clients(),
    Case::new(
        "a subscriber that calls exec returns its slots",
        exec_of_a_holder,
    )
    .ends_clients(),
    Case::new(
        "a stream that waits for a killed process is rescued in time although its orphan lives",
        rescued,
    )
    .ends_clients(),
    Case::new(
        "slots of a killed subscriber stay out of use while its orphan holds its files",
        quarantined,
    )
    .ends_clients(),
    Case::new(
        "a worker and its orphan leave no files in the domain",
        no_names,
    )
    .ends_clients(),
    Case::new(
        "a killed writer's block is used again after its last store",
        after_the_last_store,
    )
    .ends_clients(),
    Case::new(
        "a killed writer's block is used again after its last store, with an orphan",
        after_the_orphan,
    )
    .ends_clients(),
    Case::new(
        "a killed writer's block is used again after its last store, its child's files closed",
        after_the_child,
    )
    .ends_clients(),
    Case::new(
        "a writer's block is used again after its last store when it calls exec",
        after_exec,
    )
    .ends_clients(),
];

const WORDS: u64 = 1024;

/// Longer than anything here takes: work that ends by itself would prove nothing.
const LONG: Duration = Duration::from_secs(10);

/// In which a block or slot that is out of use would be seen to come back, if it did.
const LOOK: Duration = Duration::from_millis(1500);

/// A peer that publishes `name`, has sent one whole sample, and has its device at work on the next
/// one.
fn publisher_at_work(context: &Context, name: &str) -> Result<Peer> {
    let mut peer = context.peer()?;
    peer.publish(PublisherPlan::of(name))?;
    Ok(peer)
}

fn exec(context: &Context) -> Result<()> {
    let mut peer = publisher_at_work(context, "mortal")?;
    let mut subscriber = context.subscriber("mortal")?;
    let stream = context.stream()?;
    let mut error_counters = context.error_counters()?;
    peer.ask(&Order::SendAndWait(Batch::of(1, WORDS, 1)))?;
    peer.ask(&Order::Send(Batch::of(1, WORDS, 2).slow(LONG)))?;
    ensure!(
        error_counters.finish(subscriber.receive(&stream, PATIENCE)?)? == 0,
        "the first sample is whole"
    );
    let unfinished = subscriber.receive(&stream, PATIENCE)?;
    peer.send(&Order::Exec)?;
    match unfinished.finish(LONG / 2) {
        Err(Error::Lost(Loss::Sample { sequence: 2, .. })) => {}
        other => bail!("the sample of a publisher that called exec gave {other:?}"),
    }
    stream
        .synchronize(PATIENCE)
        .context("the reader's stream goes on")?;
    match subscriber.receive(&stream, PATIENCE) {
        Err(Error::PeerGone {
            graceful: false, ..
        }) => {}
        other => bail!("after the exec came {other:?}"),
    }
    drop(context.publisher("mortal").context("the name is free")?);
    ensure!(
        rustix::process::test_kill_process(peer.pid()).is_ok(),
        "the new program runs"
    );
    Ok(())
}

fn exec_of_a_holder(context: &Context) -> Result<()> {
    let publisher = context.publisher("held")?;
    let (stream, mut peer) = (context.stream()?, context.peer()?);
    peer.subscribe("held")?;
    let loan = Payload::of(WORDS, 1).loan(&publisher, &stream)?;
    let returned = loan.returned();
    loan.send(&stream)?;
    peer.hold(1)?;
    ensure!(!returned.is_back()?, "it is held");
    peer.send(&Order::Exec)?;
    ensure!(
        eventually(PATIENCE, || returned.is_back().unwrap_or(false)),
        "the slot comes back"
    );
    ensure!(
        rustix::process::test_kill_process(peer.pid()).is_ok(),
        "the new program runs"
    );
    Ok(())
}

fn rescued(context: &Context) -> Result<()> {
    let mut peer = publisher_at_work(context, "mortal")?;
    let options = SubscriberOptions {
        orphan_timeout: Duration::from_millis(300),
        ..context.domain.on(&context.device)
    };
    let mut subscriber = Subscriber::open("mortal", options, Duration::ZERO)?;
    let stream = context.stream()?;
    peer.ask(&Order::Send(Batch::of(1, WORDS, 1).slow(LONG)))?;
    let unfinished = subscriber.receive(&stream, PATIENCE)?;
    let orphan = peer.orphan(&Order::ForkUnseen)?;
    peer.kill()?;
    match unfinished.finish(LONG / 2) {
        Err(Error::Lost(Loss::Sample { sequence: 1, .. })) => {}
        other => bail!("a sample of a dead publisher with a living orphan gave {other:?}"),
    }
    stream
        .synchronize(PATIENCE)
        .context("the reader's stream goes on")?;
    orphan.end();
    Ok(())
}

fn quarantined(context: &Context) -> Result<()> {
    let publisher = context.publisher("held")?;
    let (stream, mut peer) = (context.stream()?, context.peer()?);
    peer.subscribe("held")?;
    let loan = Payload::of(WORDS, 1).loan(&publisher, &stream)?;
    let returned = loan.returned();
    loan.send(&stream)?;
    peer.hold(1)?;
    let orphan = peer.orphan(&Order::ForkUnseen)?;
    peer.kill()?;
    ensure!(
        !eventually(LOOK, || returned.is_back().unwrap_or(true)),
        "the slot is out of use while the orphan lives"
    );
    ensure!(warpipe::process_stats().orphaned == 1, "it is counted");
    orphan.end();
    ensure!(
        eventually(PATIENCE, || returned.is_back().unwrap_or(false)),
        "and comes back with the orphan's end"
    );
    Ok(())
}

fn no_names(context: &Context) -> Result<()> {
    let queue = context.queue("jobs")?;
    let files = || std::fs::read_dir(context.domain.path()).map_or(0, Iterator::count);
    let (own, mut peer) = (files(), context.peer()?);
    peer.task(Task::Attach("jobs".into()))?;
    queue.wait_for_workers(1, PATIENCE)?;
    let attached = files();
    let orphan = peer.orphan(&Order::ForkUnseen)?;
    peer.kill()?;
    let killed = files();
    orphan.end();
    ensure!(
        attached == own && killed == own,
        "{own} files are the queue's own; with a worker there were {attached}, then {killed}"
    );
    Ok(())
}

/// How a writer ends.
enum End {
    Killed,
    /// A forked child holds its files for so long.
    Orphaned(Duration),
    /// A forked child lives that the library knows of.
    WithChild,
    Exec,
}

/// A borrower ends while its device writes a block of a pool. The block is used again, and nothing
/// is stored in it any more.
fn killed_while_it_writes(context: &Context, end: &End) -> Result<()> {
    const BYTES: u64 = 2 << 20;
    let pool = Pool::new(
        "pool",
        PoolOptions {
            memory_limit: BYTES,
            ..context.domain.on(&context.device)
        },
    )?;
    let (stream, mut error_counters) = (context.stream()?, context.error_counters()?);
    let mut peer = context.peer()?;
    let block = pool.allocate(BYTES, Duration::ZERO)?;
    let ticket = block.lend(warpipe::Access::ReadWrite)?;
    let number = peer.number(&Order::Hold(HolderOrder::Borrow(ticket)))? as usize;
    drop(block);
    let start = Instant::now();
    let slow_us = LONG.as_micros() as u64;
    peer.ask(&Order::Hold(HolderOrder::FillAndFree {
        number,
        seed: 1,
        slow_us,
        is_behind: true,
    }))?;
    let mut child = None;
    match *end {
        End::Killed => peer.kill()?,
        End::WithChild => {
            child = Some(peer.orphan(&Order::Fork)?);
            peer.kill()?;
        }
        End::Exec => peer.send(&Order::Exec)?,
        End::Orphaned(lives) => {
            let orphan = peer.orphan(&Order::ForkUnseen)?;
            peer.kill()?;
            match pool.allocate(BYTES, lives) {
                Err(Error::Limit(LimitFault::Memory { .. })) => orphan.end(),
                other => bail!("the block of a dead writer with a living orphan gave {other:?}"),
            }
        }
    }
    let next = pool
        .allocate(BYTES, PATIENCE)
        .context("the block comes back")?;
    ensure!(
        start.elapsed() < LONG,
        "the writer's own end brought it back: this machine is too slow for this case"
    );
    fill(&next, &stream, 2, Duration::ZERO, true)?;
    stream.synchronize(PATIENCE)?;
    // Until well after the time at which the writer would have stored.
    while start.elapsed() < LONG + Duration::from_secs(1) {
        ensure!(
            wrong_words(&next, &stream, &mut error_counters, 2)? == 0,
            "a dead writer has stored in a block that is used"
        );
        std::thread::park_timeout(Duration::from_millis(50));
    }
    drop(child);
    Ok(())
}

fn after_the_last_store(context: &Context) -> Result<()> {
    killed_while_it_writes(context, &End::Killed)
}

fn after_the_orphan(context: &Context) -> Result<()> {
    killed_while_it_writes(context, &End::Orphaned(LOOK))
}

fn after_the_child(context: &Context) -> Result<()> {
    killed_while_it_writes(context, &End::WithChild)
}

fn after_exec(context: &Context) -> Result<()> {
    killed_while_it_writes(context, &End::Exec)
}
