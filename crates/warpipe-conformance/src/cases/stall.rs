//! Channels with a peer that is stopped and not dead.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use warpipe::{PeerState, Policy, Publisher, PublisherOptions};
use warpipe_testkit::eventually;

use super::{Case, all_whole};
use crate::PATIENCE;
use crate::context::Context;
use crate::payload::Payload;
use crate::peer::{Batch, Item, Order, PublisherPlan};
use warpipe::OptionalExtension;

pub(super) const CASES: &[Case] = &[
    Case::new(
        "a stopped subscriber is shown stalled, and continues without a loss",
        stalled_subscriber,
    ),
    Case::new(
        "a stopped publisher is shown stalled, and continues",
        stalled_publisher,
    ),
    Case::new(
        "a subscriber that stays stopped is evicted, and the publisher continues",
        eviction,
    ),
    Case::new(
        "both ends are stopped for long and continued: neither is evicted or shown stalled",
        both_stopped,
    ),
    Case::new(
        "samples that an evicted subscriber holds stay untouched until it releases them",
        evicted_holder,
    ),
];

const WORDS: u64 = 1024;

fn state_becomes(publisher: &Publisher, wanted: PeerState) -> Result<()> {
    let mut last = None;
    let is_so = || {
        last = publisher
            .subscribers()
            .first()
            .map(|subscriber| subscriber.state);
        last == Some(wanted)
    };
    let reached = eventually(PATIENCE, is_so);
    ensure!(reached, "the subscriber is {last:?}, not {wanted:?}");
    Ok(())
}

fn stalled_subscriber(context: &Context) -> Result<()> {
    let options = PublisherOptions {
        depth: 4,
        policy: Policy::Block { timeout: PATIENCE },
        ..context.domain.on(&context.device)
    };
    let publisher = Publisher::new("patient", options)?;
    let stream = context.stream()?;
    let mut peer = context.peer()?;
    peer.subscribe("patient")?;
    state_becomes(&publisher, PeerState::Alive)?;
    peer.stop()?;
    state_becomes(&publisher, PeerState::Stalled)?;
    let sent = std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            (1..=10)
                .try_for_each(|seed| Payload::of(WORDS, seed).send(&publisher, &stream).map(drop))
        });
        peer.go_on()?;
        all_whole(&peer.receive(10)?, 1..=10)?;
        sender.join().map_err(|_| anyhow::anyhow!("a panic"))
    })?;
    sent?;
    state_becomes(&publisher, PeerState::Alive)?;
    peer.dismiss()
}

fn stalled_publisher(context: &Context) -> Result<()> {
    let mut peer = context.peer()?;
    peer.publish(PublisherPlan::of("slow"))?;
    let mut subscriber = context.subscriber("slow")?;
    let stream = context.stream()?;
    let mut error_counters = context.error_counters()?;
    peer.ask(&Order::SendAndWait(Batch::of(1, WORDS, 1)))?;
    peer.stop()?;
    ensure!(
        eventually(PATIENCE, || subscriber.publisher().map(|it| it.state)
            == Some(PeerState::Stalled)),
        "a stopped publisher is {:?}",
        subscriber.publisher().map(|it| it.state)
    );
    ensure!(
        error_counters.finish(subscriber.receive(&stream, PATIENCE)?)? == 0,
        "what it sent before is whole"
    );
    ensure!(
        subscriber
            .receive(&stream, Duration::ZERO)
            .optional()?
            .is_none(),
        "there is no more, and no end"
    );
    peer.go_on()?;
    ensure!(
        eventually(PATIENCE, || subscriber.publisher().map(|it| it.state)
            == Some(PeerState::Alive)),
        "it is alive again"
    );
    peer.ask(&Order::Send(Batch::of(1, WORDS, 2)))?;
    ensure!(
        error_counters.finish(subscriber.receive(&stream, PATIENCE)?)? == 0,
        "what it sends afterwards is whole"
    );
    peer.dismiss()
}

fn the_end(items: &[Item]) -> Result<&str> {
    let Some(Item {
        fault: Some(fault), ..
    }) = items.last()
    else {
        bail!("an end was due: {items:?}")
    };
    Ok(&fault.kind)
}

fn eviction(context: &Context) -> Result<()> {
    let publisher = Publisher::new(
        "strict",
        PublisherOptions {
            depth: 4,
            policy: Policy::Block { timeout: PATIENCE },
            evict_after: Some(Duration::from_secs(1)),
            ..context.domain.on(&context.device)
        },
    )?;
    let stream = context.stream()?;
    let (mut idler, mut worker) = (context.peer()?, context.peer()?);
    idler.subscribe("strict")?;
    worker.subscribe("strict")?;
    idler.stop()?;
    for sequence in 1..=20 {
        Payload::of(WORDS, sequence).send(&publisher, &stream)?;
        all_whole(&worker.receive(1)?, [sequence])?;
    }
    let alive = || {
        publisher
            .subscribers()
            .iter()
            .filter(|one| one.state == PeerState::Alive)
            .count()
    };
    ensure!(
        eventually(PATIENCE, || alive() == 1),
        "one is left: {:?}",
        publisher.subscribers()
    );
    idler.go_on()?;
    let items = idler.items(&Order::ReceiveAll { subscriber: 0 })?;
    ensure!(the_end(&items)? == "StateFault::LinkClosed", "{items:?}");
    ensure!(
        items[..items.len() - 1].iter().all(Item::is_whole),
        "what it got before is whole: {items:?}"
    );
    idler.subscribe("strict")?;
    Payload::of(WORDS, 21).send(&publisher, &stream)?;
    all_whole(&worker.receive(1)?, [21])?;
    all_whole(
        &idler.items(&Order::Receive {
            subscriber: 1,
            count: 1,
            hold: false,
        })?,
        [21],
    )?;
    idler.dismiss()?;
    worker.dismiss()
}

fn both_stopped(context: &Context) -> Result<()> {
    let evict_after = Duration::from_millis(500);
    let (mut sender, mut receiver) = (context.peer()?, context.peer()?);
    let evict_after_ms = Some(evict_after.as_millis() as u64);
    sender.publish(PublisherPlan {
        evict_after_ms,
        ..PublisherPlan::of("frozen")
    })?;
    receiver.subscribe("frozen")?;
    sender.ask(&Order::AwaitSubscribers(1))?;
    for sequence in 1..=4 {
        sender.stop()?;
        receiver.stop()?;
        // The length of the stop is the subject of the case; nothing is waited for.
        std::thread::park_timeout(3 * evict_after);
        sender.go_on()?;
        // It answers, so it runs; the other is behind it by this much and no more.
        sender.ask(&Order::AwaitSubscribers(1))?;
        receiver.go_on()?;
        let state = receiver.ask(&Order::PublisherState { subscriber: 0 })?;
        ensure!(
            format!("{state:?}").contains("Alive"),
            "the publisher is shown as {state:?}"
        );
        sender.ask(&Order::SendAndWait(Batch::of(1, WORDS, sequence)))?;
        all_whole(&receiver.receive(1)?, [sequence])?;
    }
    receiver.dismiss()?;
    sender.dismiss()
}

fn evicted_holder(context: &Context) -> Result<()> {
    let slot = 512 << 10;
    let options = PublisherOptions {
        memory_limit: 4 * slot,
        loan_timeout: PATIENCE,
        evict_after: Some(Duration::from_secs(1)),
        ..context.domain.on(&context.device)
    };
    let publisher = Publisher::new("strict", options)?;
    let stream = context.stream()?;
    let mut holder = context.peer()?;
    holder.subscribe("strict")?;
    for seed in 1..=4 {
        Payload::of(slot / 8, seed).send(&publisher, &stream)?;
    }
    holder.hold(4)?;
    holder.stop()?;
    for seed in 11..=30 {
        Payload::of(slot / 8, seed).send(&publisher, &stream)?;
    }
    holder.go_on()?;
    let mut items = holder.release()?;
    items.sort_by_key(|item| item.sequence);
    all_whole(&items, 1..=4)?;
    let items = holder.items(&Order::ReceiveAll { subscriber: 0 })?;
    ensure!(the_end(&items)? == "StateFault::LinkClosed", "{items:?}");
    ensure!(
        eventually(PATIENCE, || publisher.subscribers().is_empty()),
        "it is forgotten once it holds nothing"
    );
    holder.dismiss()
}
