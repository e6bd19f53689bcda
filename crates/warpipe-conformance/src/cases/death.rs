//! Channels after kills at chosen points.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use warpipe::{Error, Layout, Loss, PeerState, Publisher, PublisherOptions, Sample, Subscriber};
use warpipe_testkit::eventually;

use super::{Case, all_whole};
use crate::PATIENCE;
use crate::context::Context;
use crate::guard::PublisherGuard;
use crate::payload::Payload;
use crate::peer::{Batch, Order, PolicyPlan, PublisherPlan, SubscriberPlan};

pub(super) const CASES: &[Case] = &[
    Case::new(
        "a killed publisher's ready samples are received, in order, then its end",
        ready_samples_survive,
    )
    .ends_clients(),
    Case::new(
        "a killed publisher's samples stay readable while they are held",
        held_samples_survive,
    )
    .ends_clients(),
    Case::new(
        "a sample is lost when its writer is killed, and the reader's stream continues",
        unfinished_samples_are_lost,
    )
    .ends_clients(),
    Case::new(
        "the parts of a killed publisher's sample are whole together, or lost together",
        parts_after_a_death,
    )
    .ends_clients(),
    Case::new(
        "complete samples after a killed publisher's incomplete one are received in every policy",
        behind_a_lost_one,
    )
    .ends_clients(),
    Case::new(
        "a complete sample of the history reaches a late joiner after its publisher's death",
        history_survives,
    )
    .ends_clients(),
    Case::new(
        "a stream that waits for a killed writer's dropped sample continues",
        left_before_the_death,
    )
    .ends_clients(),
    Case::new(
        "a publisher killed between loan and send has sent nothing",
        killed_between_loan_and_send,
    ),
    Case::new(
        "a subscriber killed while it holds samples returns its slots",
        killed_holder_returns_its_slots,
    )
    .ends_clients(),
    Case::new(
        "a subscriber killed while it waits does not affect others",
        killed_sleeper,
    ),
    Case::new(
        "a subscriber killed in the handshake does not affect others",
        killed_in_the_handshake,
    )
    .limit(180),
    Case::new(
        "a publisher killed in the handshake is a typed error",
        publisher_killed_in_the_handshake,
    )
    .limit(180),
    Case::new(
        "times from a publisher's death to its subscriber's error (a measurement)",
        time_to_error,
    )
    .ends_clients(),
    Case::new(
        "times from a subscriber's death to its slots being free (a measurement)",
        time_to_reclaim,
    )
    .ends_clients(),
];

const WORDS: u64 = 1024;

/// The end of a channel after its publisher was killed.
fn expect_death(received: warpipe::Result<Sample>, pid: u32) -> Result<()> {
    match received {
        Err(Error::PeerGone {
            pid: reported,
            graceful: false,
            ..
        }) => {
            ensure!(
                reported == pid as i32,
                "process {reported} is reported dead, not {pid}"
            );
            Ok(())
        }
        other => bail!("after the publisher's death came {other:?}"),
    }
}

fn ready_samples_survive(context: &Context) -> Result<()> {
    let mut peer = context.peer()?;
    peer.publish(PublisherPlan::of("mortal"))?;
    let mut subscriber = context.subscriber("mortal")?;
    let stream = context.stream()?;
    let mut error_counters = context.error_counters()?;
    peer.ask(&Order::SendAndWait(Batch::of(10, WORDS, 1)))?;
    peer.kill()?;
    for sequence in 1..=10 {
        let sample = subscriber.receive(&stream, PATIENCE)?;
        ensure!(
            sample.sequence() == sequence,
            "sample {} where {sequence} is due",
            sample.sequence()
        );
        ensure!(
            error_counters.finish(sample)? == 0,
            "sample {sequence} is whole"
        );
    }
    expect_death(subscriber.receive(&stream, PATIENCE), peer.id())?;
    expect_death(subscriber.receive(&stream, PATIENCE), peer.id())
}

fn held_samples_survive(context: &Context) -> Result<()> {
    let mut peer = context.peer()?;
    peer.publish(PublisherPlan::of("mortal"))?;
    let mut subscriber = context.subscriber("mortal")?;
    let stream = context.stream()?;
    let mut error_counters = context.error_counters()?;
    peer.ask(&Order::SendAndWait(Batch::of(4, WORDS, 1)))?;
    let held = (0..4)
        .map(|_| subscriber.receive(&stream, PATIENCE))
        .collect::<warpipe::Result<Vec<_>>>()?;
    peer.kill()?;
    expect_death(subscriber.receive(&stream, PATIENCE), peer.id())?;
    drop(subscriber);
    for sample in held {
        let copy = sample.to_vec(PATIENCE)?;
        ensure!(copy.len() as u64 == 8 * WORDS, "all bytes");
        ensure!(
            error_counters.finish(sample)? == 0,
            "a sample is whole after its publisher's death"
        );
    }
    Ok(())
}

fn parts_after_a_death(context: &Context) -> Result<()> {
    let mut peer = context.peer()?;
    peer.publish(PublisherPlan::of("mortal"))?;
    let mut subscriber = context.subscriber("mortal")?;
    let stream = context.stream()?;
    let mut error_counters = context.error_counters()?;
    peer.ask(&Order::SendParts(Batch::of(1, WORDS, 1)))?;
    let slow = Batch::of(1, WORDS, 2).slow(Duration::from_secs(5));
    peer.ask(&Order::SendParts(slow))?;
    let whole = subscriber.receive(&stream, PATIENCE)?;
    ensure!(whole.metadata().len() > 1000, "its metadata came");
    ensure!(whole.part_to_vec("few", PATIENCE)? == [7; 100]);
    ensure!(whole.part("words")?.layout.shape() == [WORDS]);
    ensure!(error_counters.finish(whole)? == 0, "the words are whole");
    let unfinished = subscriber.receive(&stream, PATIENCE)?;
    peer.kill()?;
    match unfinished.part_to_vec("few", PATIENCE) {
        Err(Error::Lost(Loss::Sample { sequence: 2, .. })) => Ok(()),
        other => bail!("a part of an unfinished sample gave {other:?}"),
    }
}

fn unfinished_samples_are_lost(context: &Context) -> Result<()> {
    let mut peer = context.peer()?;
    peer.publish(PublisherPlan::of("mortal"))?;
    let mut subscriber = context.subscriber("mortal")?;
    let stream = context.stream()?;
    let mut error_counters = context.error_counters()?;
    peer.ask(&Order::SendAndWait(Batch::of(2, WORDS, 1)))?;
    peer.ask(&Order::Send(
        Batch::of(3, WORDS, 3).slow(Duration::from_secs(5)),
    ))?;
    // Two ready, one taken before the death that will never be complete, two that were not taken by
    // then.
    for sequence in 1..=2 {
        ensure!(
            error_counters.finish(subscriber.receive(&stream, PATIENCE)?)? == 0,
            "sample {sequence} is whole"
        );
    }
    let unfinished = subscriber.receive(&stream, PATIENCE)?;
    error_counters.check_sample(&unfinished)?;
    peer.kill()?;
    match unfinished.finish(PATIENCE) {
        Err(Error::Lost(Loss::Sample {
            sequence: 3, pid, ..
        })) => ensure!(pid == peer.id() as i32, "lost by process {pid}"),
        other => bail!("an unfinished sample gave {other:?}"),
    }
    loop {
        match subscriber.receive(&stream, PATIENCE) {
            Ok(sample) => match sample.finish(PATIENCE) {
                Err(Error::Lost(Loss::Sample { .. })) => {}
                other => bail!("a further unfinished sample gave {other:?}"),
            },
            end => break expect_death(end, peer.id())?,
        }
    }
    stream
        .synchronize(PATIENCE)
        .context("the reader's stream goes on")
}

/// A publisher with two streams: one of them is blocked when it is killed. Nobody has taken
/// anything before its death is proven.
fn behind_a_lost_one(context: &Context) -> Result<()> {
    let stream = context.stream()?;
    let mut error_counters = context.error_counters()?;
    let policies = [
        PolicyPlan::Block(10_000),
        PolicyPlan::Fail,
        PolicyPlan::DropNewest,
        PolicyPlan::DropOldest,
    ];
    for policy in policies {
        let mut peer = context.peer()?;
        peer.publish(PublisherPlan {
            policy: Some(policy),
            ..PublisherPlan::of("mortal")
        })?;
        let mut subscriber = context.subscriber("mortal")?;
        peer.ask(&Order::SendAndWait(Batch::of(1, WORDS, 1)))?;
        peer.ask(&Order::SendBehindGate(Batch::of(2, WORDS, 2)))?;
        peer.ask(&Order::SendAside(Batch::of(2, WORDS, 4)))?;
        peer.kill()?;
        let is_proven = || subscriber.publisher().map(|it| it.state) == Some(PeerState::Dead);
        ensure!(eventually(PATIENCE, is_proven), "its death is proven");
        let mut last = 0;
        for due in [1, 4, 5] {
            let sample = loop {
                let sample = subscriber
                    .receive(&stream, PATIENCE)
                    .with_context(|| format!("sample {due} with {policy:?}"))?;
                let missing = sample.info().discontinuity.map_or(0, |gap| gap.missing);
                ensure!(
                    sample.sequence() == last + 1 + missing,
                    "{missing} are missing between {last} and {} with {policy:?}",
                    sample.sequence()
                );
                last = sample.sequence();
                if ![2, 3].contains(&sample.sequence()) {
                    break sample;
                }
                // Proven a moment ago: the rescue comes by after this one was taken.
                let lost = sample.finish(PATIENCE);
                ensure!(
                    matches!(lost, Err(Error::Lost(Loss::Sample { .. }))),
                    "an unfinished sample gave {lost:?}"
                );
            };
            ensure!(
                sample.sequence() == due,
                "sample {} where {due} is due with {policy:?}",
                sample.sequence()
            );
            ensure!(error_counters.finish(sample)? == 0, "sample {due} is whole");
        }
        expect_death(subscriber.receive(&stream, PATIENCE), peer.id())?;
    }
    Ok(())
}

fn history_survives(context: &Context) -> Result<()> {
    let mut peer = context.peer()?;
    peer.publish(PublisherPlan {
        history: Some(2),
        ..PublisherPlan::of("mortal")
    })?;
    peer.ask(&Order::SendBehindGate(Batch::of(1, WORDS, 1)))?;
    let (mut early, mut late) = (context.subscriber("mortal")?, context.subscriber("mortal")?);
    let stream = context.stream()?;
    let mut error_counters = context.error_counters()?;
    let held = early.receive(&stream, PATIENCE)?;
    peer.ask(&Order::OpenGate)?;
    peer.ask(&Order::SendAndWait(Batch::of(1, WORDS, 2)))?;
    // Whether it has notified the late joiners by now or not.
    peer.kill()?;
    // One that a stream waited for when its publisher was killed, and one that was not taken by
    // then.
    ensure!(
        error_counters.finish(held)? == 0,
        "what was complete is whole"
    );
    for sequence in 1..=2 {
        let sample = late.receive(&stream, PATIENCE)?;
        ensure!(
            sample.sequence() == sequence,
            "sample {} where {sequence} is due",
            sample.sequence()
        );
        ensure!(
            error_counters.finish(sample)? == 0,
            "sample {sequence} is whole"
        );
    }
    expect_death(late.receive(&stream, PATIENCE), peer.id())
}

fn left_before_the_death(context: &Context) -> Result<()> {
    context.warm_up()?;
    let guard = context.guard();
    let mut peer = context.peer()?;
    peer.publish(PublisherPlan::of("mortal"))?;
    let mut subscriber = context.subscriber("mortal")?;
    let stream = context.stream()?;
    peer.ask(&Order::Send(
        Batch::of(1, WORDS, 1).slow(Duration::from_secs(5)),
    ))?;
    drop(subscriber.receive(&stream, PATIENCE)?);
    drop(subscriber);
    peer.kill()?;
    stream
        .synchronize(PATIENCE)
        .context("the stream that waited for the dead publisher is released")?;
    drop((stream, peer));
    context.domain.clean()?;
    guard.settles()
}

fn killed_between_loan_and_send(context: &Context) -> Result<()> {
    let mut peer = context.peer()?;
    peer.publish(PublisherPlan::of("mortal"))?;
    let mut subscriber = context.subscriber("mortal")?;
    peer.ask(&Order::Loan(Batch::of(3, WORDS, 1)))?;
    peer.kill()?;
    expect_death(subscriber.receive(&context.stream()?, PATIENCE), peer.id())
}

fn killed_holder_returns_its_slots(context: &Context) -> Result<()> {
    let slot = 512 << 10;
    let options = PublisherOptions {
        memory_limit: 4 * slot,
        loan_timeout: PATIENCE,
        ..context.domain.on(&context.device)
    };
    let publisher = Publisher::new("tight", options)?;
    let stream = context.stream()?;
    let mut witness = context.subscriber("tight")?;
    let mut error_counters = context.error_counters()?;
    let mut send = |witness: &mut Subscriber, seed| -> Result<()> {
        let sequence = Payload::of(slot / 8, seed).send(&publisher, &stream)?;
        let sample = witness.receive(&stream, PATIENCE)?;
        ensure!(
            sample.sequence() == sequence && error_counters.finish(sample)? == 0,
            "the witness's sample {sequence}"
        );
        Ok(())
    };
    // From here on the publisher and its witness hold all regions.
    (0..4).try_for_each(|index| send(&mut witness, index))?;
    let mut guard = PublisherGuard::take(&publisher, &context.domain);
    for round in 0..5 {
        let mut holder = context.peer()?;
        holder.subscribe("tight")?;
        (0..4).try_for_each(|index| send(&mut witness, 10 * round + index))?;
        holder.hold(4)?;
        holder.strike()?;
        (0..12).try_for_each(|index| send(&mut witness, 100 * round + index))?;
        ensure!(holder.ended().is_ok(), "the killed one is dead");
        drop(holder);
        ensure!(
            eventually(PATIENCE, || publisher.subscribers().len() == 1),
            "the dead are forgotten"
        );
        guard
            .settles()
            .with_context(|| format!("after kill {round}"))?;
    }
    Ok(())
}

fn killed_sleeper(context: &Context) -> Result<()> {
    let publisher = context.publisher("quiet")?;
    let stream = context.stream()?;
    for round in 0..5 {
        let (mut victim, mut witness) = (context.peer()?, context.peer()?);
        victim.subscribe("quiet")?;
        witness.subscribe("quiet")?;
        victim.send(&Order::Receive {
            subscriber: 0,
            count: 100,
            hold: false,
        })?;
        Payload::of(WORDS, round).send(&publisher, &stream)?;
        victim.kill()?;
        Payload::of(WORDS, round + 1).send(&publisher, &stream)?;
        all_whole(&witness.receive(2)?, 2 * round + 1..=2 * round + 2)?;
        witness.dismiss()?;
    }
    Ok(())
}

fn killed_in_the_handshake(context: &Context) -> Result<()> {
    let publisher = context.publisher("attach")?;
    let stream = context.stream()?;
    Payload::of(WORDS, 0).send(&publisher, &stream)?;
    let guard = context.guard();
    for _ in 0..5 {
        let mut silent = context.peer()?;
        silent.ask(&Order::ConnectOnly("attach".into()))?;
        silent.kill()?;
    }
    // At any moment of a handshake: the order is on its way when the signal comes.
    let mut rng = context.rng();
    for _ in 0..10 {
        let mut victim = context.peer()?;
        victim.ask(&Order::ConnectOnly("attach".into()))?;
        victim.send(&Order::Subscribe(SubscriberPlan::of("attach")))?;
        std::thread::park_timeout(Duration::from_micros(rng.u64(..1500)));
        victim.kill()?;
    }
    let mut witness = context.peer()?;
    witness.subscribe("attach")?;
    Payload::of(WORDS, 1).send(&publisher, &stream)?;
    all_whole(&witness.receive(1)?, [2])?;
    witness.dismiss()?;
    ensure!(
        eventually(PATIENCE, || publisher.subscribers().is_empty()),
        "nobody is left"
    );
    guard.settles()
}

fn publisher_killed_in_the_handshake(context: &Context) -> Result<()> {
    let mut rng = context.rng();
    for round in 0..6 {
        let mut publisher = context.peer()?;
        publisher.publish(PublisherPlan::of("attach"))?;
        // Stopped, it does not answer: the subscriber is in the middle of its handshake when the
        // signal comes.
        if round % 2 == 0 {
            publisher.stop()?;
        }
        let built = std::thread::scope(|scope| {
            let subscriber = scope.spawn(|| context.subscriber("attach"));
            std::thread::park_timeout(Duration::from_micros(rng.u64(..3000)));
            publisher.strike()?;
            publisher.ended()?;
            subscriber.join().map_err(|_| anyhow::anyhow!("a panic"))
        })?;
        match built {
            Err(Error::Handshake { .. } | Error::NotFound { .. }) => {}
            Ok(mut subscriber) if round % 2 == 1 => {
                expect_death(
                    subscriber.receive(&context.stream()?, PATIENCE),
                    publisher.id(),
                )?;
            }
            other => bail!("a publisher that died in the handshake gave {other:?}"),
        }
    }
    Ok(())
}

fn time_to_error(context: &Context) -> Result<()> {
    let stream = context.stream()?;
    let (mut reported_after_eof, mut reported_after_kill) = (Vec::new(), Vec::new());
    for _ in 0..context.rounds(5, 50, 50) {
        let mut peer = context.peer()?;
        peer.publish(PublisherPlan::of("mortal"))?;
        let mut subscriber = context.subscriber("mortal")?;
        let (at, eof, killed) = std::thread::scope(|scope| -> Result<_> {
            let receiver = scope.spawn(|| (subscriber.receive(&stream, PATIENCE), Instant::now()));
            let killed = Instant::now();
            peer.strike()?;
            // The pipe that its answers come up closes when its sockets do.
            peer.last_lines()?;
            let eof = Instant::now();
            let (received, at) = receiver.join().map_err(|_| anyhow::anyhow!("a panic"))?;
            expect_death(received, peer.id())?;
            Ok((at, eof, killed))
        })?;
        reported_after_eof.push(at.saturating_duration_since(eof));
        reported_after_kill.push(at - killed);
    }
    context.figure_times("reported_after_eof", &mut reported_after_eof);
    context.figure_times("reported_after_kill", &mut reported_after_kill);
    Ok(())
}

fn time_to_reclaim(context: &Context) -> Result<()> {
    let slot = 2 << 20;
    let options = PublisherOptions {
        memory_limit: slot,
        loan_timeout: PATIENCE,
        ..context.domain.on(&context.device)
    };
    let publisher = Publisher::new("tight", options)?;
    let stream = context.stream()?;
    let (mut after_pidfd, mut after_kill) = (Vec::new(), Vec::new());
    for round in 0..context.rounds(5, 50, 50) {
        let mut holder = context.peer()?;
        holder.subscribe("tight")?;
        Payload::of(slot / 8, round.into()).send(&publisher, &stream)?;
        holder.hold(1)?;
        let (free, dead, killed) = std::thread::scope(|scope| -> Result<_> {
            let layout = Layout::bytes_only(slot)?;
            let loan = scope.spawn({
                let publisher = &publisher;
                move || publisher.loan(&layout).map(|loan| (Instant::now(), loan).0)
            });
            let killed = Instant::now();
            holder.strike()?;
            holder.ended()?;
            let dead = Instant::now();
            Ok((
                loan.join().map_err(|_| anyhow::anyhow!("a panic"))??,
                dead,
                killed,
            ))
        })?;
        after_pidfd.push(free.saturating_duration_since(dead));
        after_kill.push(free.saturating_duration_since(killed));
    }
    context.figure_times("slot_free_after_pidfd", &mut after_pidfd);
    context.figure_times("slot_free_after_kill", &mut after_kill);
    Ok(())
}
