//! Graceful closes reach the peers, however soon the process ends after them.

use anyhow::{Context as _, Result, bail};
use std::time::Duration;
use warpipe::{Error, Stream, Timeline};

use super::Case;
use crate::PATIENCE;
use crate::context::Context;
use crate::peer::{Order, Peer, PublisherPlan, SignalOrder, Task};

pub(super) const CASES: &[Case] = &[
    Case::new(
        "a queue is dropped and main returns at once: its workers see a graceful close",
        queues,
    )
    .limit(180)
    .long(600),
    Case::new(
        "a timeline is dropped and main returns at once: its users see a graceful close",
        timelines,
    )
    .limit(180)
    .long(600),
    Case::new(
        "a publisher is dropped and main returns at once: its subscribers see a graceful close",
        publishers,
    )
    .limit(180)
    .long(600),
];

/// In each round one process starts, and ends.
fn rounds(
    context: &Context,
    own: impl Fn(&mut Peer) -> Result<()>,
    observe: impl Fn(Peer, &Stream) -> Result<Error>,
) -> Result<()> {
    let stream = context.stream()?;
    let rounds = context.rounds(40, 500, 100);
    for round in 1..=rounds {
        let mut peer = context.peer()?;
        own(&mut peer)?;
        let error = observe(peer, &stream).with_context(|| format!("round {round}"))?;
        match error {
            Error::PeerGone { graceful: true, .. } => {}
            other => bail!("round {round}: {other:?}"),
        }
    }
    context.figure("rounds", rounds);
    Ok(())
}

fn queues(context: &Context) -> Result<()> {
    let own = |peer: &mut Peer| peer.task(Task::Own("brief".into())).map(drop);
    rounds(context, own, |peer, stream| {
        let mut worker = context.worker("brief")?;
        peer.dismiss()?;
        worker
            .lease(stream, PATIENCE)
            .map(|_| ())
            .err()
            .context("there is no job")
    })
}

fn timelines(context: &Context) -> Result<()> {
    let own = |peer: &mut Peer| {
        peer.ask(&Order::Signals(SignalOrder::CreateTimeline("brief".into())))
            .map(drop)
    };
    rounds(context, own, |peer, _| {
        let timeline = Timeline::open("brief", context.domain.on(&context.device), Duration::ZERO)?;
        peer.dismiss()?;
        timeline
            .wait_host(1, PATIENCE)
            .err()
            .context("it was not signalled")
    })
}

fn publishers(context: &Context) -> Result<()> {
    let own = |peer: &mut Peer| peer.publish(PublisherPlan::of("brief"));
    rounds(context, own, |peer, stream| {
        let mut subscriber = context.subscriber("brief")?;
        peer.dismiss()?;
        subscriber
            .receive(stream, PATIENCE)
            .map(|_| ())
            .err()
            .context("there is no sample")
    })
}
