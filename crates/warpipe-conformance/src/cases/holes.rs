//! Peers that remove pages of what they share, and then die: a device keeps the pages that it
//! registered, so a store of the CPU would release no stream any more.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use warpipe::{Error, Event, Loss, Semaphore, Timeline};

use super::Case;
use crate::PATIENCE;
use crate::context::Context;
use crate::peer::{Batch, Order, Peer, PublisherPlan, SemaphoreOrder, SignalOrder};
use crate::shared::Shared;

pub(super) const CASES: &[Case] = &[
    Case::new(
        "a publisher that removes pages and is killed leaves no reader's stream waiting",
        link,
    )
    .ends_clients(),
    Case::new(
        "a timeline's waiter and owner that remove pages and are killed leave no stream waiting",
        timeline,
    )
    .ends_clients(),
    Case::new(
        "an event's two ends that remove pages and are killed leave no stream waiting",
        event,
    )
    .ends_clients(),
    Case::new(
        "a semaphore's member that removes all pages of every member blocks no rescue",
        semaphore,
    )
    .ends_clients(),
];

const SLOW_US: u64 = 5_000_000;

/// Has a peer remove what it can.
fn remove_pages(peer: &mut Peer) -> Result<u64> {
    peer.number(&Order::Signals(SignalOrder::RemovePages))
}

fn link(context: &Context) -> Result<()> {
    let mut peer = context.peer()?;
    peer.publish(PublisherPlan::of("holes"))?;
    let mut subscriber = context.subscriber("holes")?;
    let (stream, mut error_counters) = (context.stream()?, context.error_counters()?);
    peer.ask(&Order::Send(
        Batch::of(1, 64, 1).slow(Duration::from_micros(SLOW_US)),
    ))?;
    let sample = subscriber.receive(&stream, PATIENCE)?;
    error_counters.check_sample(&sample)?;
    ensure!(
        remove_pages(&mut peer)? == 0,
        "a page of the link could be removed"
    );
    ensure!(!stream.is_idle()?, "the stream waits");
    peer.kill()?;
    stream
        .synchronize(PATIENCE)
        .context("the reader's stream goes on")?;
    match sample.finish(PATIENCE) {
        Err(Error::Lost(Loss::Sample { .. })) => Ok(()),
        other => bail!("an unfinished sample gave {other:?}"),
    }
}

fn timeline(context: &Context) -> Result<()> {
    let (mut owner, mut waiter) = (context.peer()?, context.peer()?);
    owner.signals(SignalOrder::CreateTimeline("holes".into()))?;
    waiter.signals(SignalOrder::OpenTimeline("holes".into()))?;
    let timeline = Timeline::open("holes", context.domain.on(&context.device), PATIENCE)?;
    let (stream, (memory, fd)) = (context.stream()?, Shared::create(&context.device)?);
    owner.signals(SignalOrder::Map(Shared::path(&fd)))?;
    owner.signals(SignalOrder::Write {
        seed: 1,
        slow_us: SLOW_US,
    })?;
    owner.signals(SignalOrder::Signal(1))?;
    timeline.wait(&stream, 1)?;
    for peer in [&mut waiter, &mut owner] {
        ensure!(
            remove_pages(peer)? == 0,
            "a page of the timeline could be removed"
        );
    }
    waiter.kill()?;
    ensure!(!stream.is_idle()?, "a waiter's death ends nothing");
    owner.kill()?;
    stream
        .synchronize(PATIENCE)
        .context("a waiting stream is released")?;
    drop(memory);
    Ok(())
}

fn event(context: &Context) -> Result<()> {
    let (mut exporter, mut importer) = (context.peer()?, context.peer()?);
    let text = exporter.text(&Order::Signals(SignalOrder::CreateEvents(1)))?;
    importer.signals(SignalOrder::OpenEvent(text.clone()))?;
    let event = Event::open(
        &text.parse()?,
        context.domain.on(&context.device),
        Duration::ZERO,
    )?;
    let (stream, (memory, fd)) = (context.stream()?, Shared::create(&context.device)?);
    exporter.signals(SignalOrder::Map(Shared::path(&fd)))?;
    exporter.signals(SignalOrder::Write {
        seed: 1,
        slow_us: SLOW_US,
    })?;
    exporter.signals(SignalOrder::Record)?;
    let recording = event.wait(&stream)?;
    for peer in [&mut importer, &mut exporter] {
        ensure!(
            remove_pages(peer)? == 0,
            "a page of the event could be removed"
        );
    }
    importer.kill()?;
    ensure!(!stream.is_idle()?, "a importer's death ends nothing");
    exporter.kill()?;
    stream
        .synchronize(PATIENCE)
        .context("a waiting stream is released")?;
    ensure!(
        matches!(event.check(recording), Err(Error::Lost(Loss::Event { .. }))),
        "the recording is lost"
    );
    drop(memory);
    Ok(())
}

fn semaphore(context: &Context) -> Result<()> {
    let semaphore = Semaphore::new("holes", 1, context.domain.on(&context.device))?;
    let (mut holder, mut wrong) = (context.peer()?, context.peer()?);
    let stream = context.stream()?;
    for peer in [&mut holder, &mut wrong] {
        peer.ask(&Order::Semaphore(SemaphoreOrder::Open {
            name: "holes".into(),
            waits: true,
        }))?;
    }
    holder.ask(&Order::Semaphore(SemaphoreOrder::BeSlow {
        slow_us: SLOW_US,
    }))?;
    semaphore.acquire(&stream, PATIENCE)?.release(&stream)?;
    ensure!(!stream.is_idle()?, "the stream waits for the holder's");
    ensure!(
        remove_pages(&mut wrong)? > 0,
        "the page of all is everybody's; no stream may depend on it"
    );
    wrong.kill()?;
    ensure!(!stream.is_idle()?, "the wrong one's death ends nothing");
    match holder.kill() {
        Ok(()) => stream
            .synchronize(PATIENCE)
            .context("a waiting stream is released"),
        Err(error) => Err(error),
    }
}
