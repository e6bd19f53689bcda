//! Channels without deaths.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::event::epoll;
use warpipe::backend::testing::{Counting, Failing, Wrapped};
use warpipe::{Device, Error, Loss, Publisher, PublisherOptions, Subscriber};
use warpipe_testkit::{eventually, wait_readable};

use super::{Case, all_whole, skip};
use crate::PATIENCE;
use crate::context::Context;
use crate::payload::Payload;
use crate::peer::{Answer, Batch, Order, PublisherPlan};
use warpipe::OptionalExtension;

pub(super) const CASES: &[Case] = &[
    Case::new(
        "several samples are held at once and released in random order",
        held_and_released_at_random,
    ),
    Case::new(
        "a sample that is held for long does not block the others",
        held_long,
    ),
    Case::new("a late joiner gets the history first", history),
    Case::new(
        "a late joiner waits for history that is not complete yet",
        history_in_flight,
    ),
    Case::new(
        "sixty-four subscribers of eight processes receive everything",
        sixty_four_subscribers,
    ),
    Case::new("publisher and subscriber share one thread", one_thread),
    Case::new(
        "publishers and subscribers share one process in several threads",
        several_threads,
    ),
    Case::new(
        "the iterator ends when the publisher closes gracefully",
        iterator_ends,
    ),
    Case::new(
        "poll and epoll wake up for a sample and for the publisher's end",
        pollable,
    ),
    Case::new("a receipt reports when the data was complete", receipts),
    Case::new(
        "a sample is released in one call with the wait for the next one, and before it",
        released_before_the_next,
    ),
    Case::new(
        "a sample is lost to its readers if the driver refuses its signal",
        refused_signal,
    ),
    Case::new(
        "an abandoned sample keeps its position in the history, as lost",
        lost_history,
    ),
    Case::new(
        "samples outlive their subscriber, and a loan its publisher",
        handles_outlive_each_other,
    ),
    Case::new(
        "a receive without a sample times out, and a try returns at once",
        timeouts,
    ),
    Case::new("a subscriber on each other device receives", other_devices),
];

const WORDS: u64 = 512;

fn held_and_released_at_random(context: &Context) -> Result<()> {
    let options = PublisherOptions {
        depth: 8,
        ..context.domain.on(&context.device)
    };
    let publisher = Publisher::new("held", options)?;
    let stream = context.stream()?;
    let mut peer = context.peer()?;
    peer.subscribe("held")?;
    for round in 0..20u64 {
        for index in 1..=8 {
            Payload::of(WORDS, 8 * round + index).send(&publisher, &stream)?;
        }
        peer.hold(8)?;
        let mut items = peer.release()?;
        items.sort_by_key(|item| item.sequence);
        all_whole(&items, 8 * round + 1..=8 * round + 8)?;
    }
    peer.dismiss()
}

fn held_long(context: &Context) -> Result<()> {
    let publisher = Publisher::new(
        "long",
        PublisherOptions {
            depth: 4,
            ..context.domain.on(&context.device)
        },
    )?;
    let stream = context.stream()?;
    let mut peer = context.peer()?;
    peer.subscribe("long")?;
    for seed in 1..=3 {
        Payload::of(WORDS, seed).send(&publisher, &stream)?;
    }
    peer.hold(3)?;
    for sequence in 4..=60 {
        Payload::of(WORDS, sequence).send(&publisher, &stream)?;
        all_whole(&peer.receive(1)?, [sequence])?;
    }
    let mut items = peer.release()?;
    items.sort_by_key(|item| item.sequence);
    all_whole(&items, 1..=3)?;
    peer.dismiss()
}

fn history(context: &Context) -> Result<()> {
    let publisher = Publisher::new(
        "history",
        PublisherOptions {
            history: 3,
            ..context.domain.on(&context.device)
        },
    )?;
    let stream = context.stream()?;
    for seed in 1..=5 {
        Payload::of(WORDS, seed).send(&publisher, &stream)?;
    }
    stream.synchronize(PATIENCE)?;
    for _ in 0..2 {
        let mut peer = context.peer()?;
        peer.subscribe("history")?;
        all_whole(&peer.receive(3)?, 3..=5)?;
        peer.dismiss()?;
    }
    let mut peer = context.peer()?;
    peer.subscribe("history")?;
    Payload::of(WORDS, 6).send(&publisher, &stream)?;
    all_whole(&peer.receive(4)?, 3..=6)?;
    peer.dismiss()
}

fn history_in_flight(context: &Context) -> Result<()> {
    let publisher = Publisher::new(
        "history",
        PublisherOptions {
            history: 2,
            ..context.domain.on(&context.device)
        },
    )?;
    let stream = context.stream()?;
    let mut peer = context.peer()?;
    for seed in 1..=3 {
        Payload::of(WORDS, seed)
            .slow(Duration::from_millis(100))
            .send(&publisher, &stream)?;
    }
    peer.subscribe("history")?;
    all_whole(&peer.receive(2)?, 2..=3)?;
    peer.dismiss()
}

fn sixty_four_subscribers(context: &Context) -> Result<()> {
    let publisher = context.publisher("many")?;
    let stream = context.stream()?;
    let mut peers = (0..8).map(|_| context.peer()).collect::<Result<Vec<_>>>()?;
    for peer in &mut peers {
        (0..8).try_for_each(|_| peer.subscribe("many").map(drop))?;
    }
    publisher.wait_for_subscribers(64, PATIENCE)?;
    for seed in 1..=8 {
        Payload::of(WORDS, seed).send(&publisher, &stream)?;
    }
    for subscriber in 0..8 {
        peers.iter_mut().try_for_each(|peer| {
            peer.send(&Order::Receive {
                subscriber,
                count: 8,
                hold: false,
            })
        })?;
        for peer in &mut peers {
            match peer.answer()?? {
                Answer::Items(items) => all_whole(&items, 1..=8)?,
                other => bail!("{other:?} instead of samples"),
            }
        }
    }
    let subscribers = publisher.subscribers();
    ensure!(
        subscribers.len() == 64,
        "{} of 64 subscribers",
        subscribers.len()
    );
    peers.into_iter().try_for_each(|peer| peer.dismiss())
}

fn one_thread(context: &Context) -> Result<()> {
    let publisher = Publisher::new(
        "alone",
        PublisherOptions {
            timestamps: true,
            ..context.domain.on(&context.device)
        },
    )?;
    let mut subscriber = context.subscriber("alone")?;
    let stream = context.stream()?;
    let mut error_counters = context.error_counters()?;
    for sequence in 1..=100 {
        ensure!(
            Payload::of(WORDS, sequence).send(&publisher, &stream)? == sequence,
            "the sequence number"
        );
        let sample = subscriber.receive(&stream, PATIENCE)?;
        ensure!(
            sample.info().sent_at_ns.is_some()
                && sample.info().sent_at_ns <= sample.info().received_at_ns,
            "sent before it is received"
        );
        ensure!(
            sample.sequence() == sequence && error_counters.finish(sample)? == 0,
            "sample {sequence}"
        );
    }
    Ok(())
}

fn several_threads(context: &Context) -> Result<()> {
    const EACH: u64 = 100;
    let publisher = context.publisher("threads")?;
    let subscribers = (0..3)
        .map(|_| context.subscriber("threads"))
        .collect::<warpipe::Result<Vec<_>>>()?;
    std::thread::scope(|scope| {
        let senders: Vec<_> = (0..2)
            .map(|sender| {
                let (publisher, device) = (&publisher, &context.device);
                scope.spawn(move || -> Result<()> {
                    let stream = device.stream()?;
                    for index in 0..EACH {
                        Payload::of(WORDS, sender * EACH + index).send(publisher, &stream)?;
                    }
                    Ok(stream.synchronize(PATIENCE)?)
                })
            })
            .collect();
        let receivers: Vec<_> = subscribers
            .into_iter()
            .map(|mut subscriber| {
                let device = &context.device;
                scope.spawn(move || -> Result<()> {
                    let (stream, mut error_counters) = (
                        device.stream()?,
                        crate::payload::ErrorCounters::new(device)?,
                    );
                    for sequence in 1..=2 * EACH {
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
                    Ok(())
                })
            })
            .collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Result<()>>| {
            thread.join().unwrap_or_else(|_| bail!("a panic"))
        };
        senders.into_iter().chain(receivers).try_for_each(join)
    })
}

fn iterator_ends(context: &Context) -> Result<()> {
    let mut peer = context.peer()?;
    peer.publish(PublisherPlan::of("finite"))?;
    let mut subscriber = context.subscriber("finite")?;
    let stream = context.stream()?;
    let mut error_counters = context.error_counters()?;
    peer.ask(&Order::SendAndWait(Batch::of(5, WORDS, 1)))?;
    peer.dismiss()?;
    let mut received = 0;
    for sample in subscriber.samples(&stream, PATIENCE) {
        ensure!(
            error_counters.finish(sample?)? == 0,
            "a sample sent before the close is whole"
        );
        received += 1;
    }
    ensure!(received == 5, "{received} samples of 5 before the end");
    match subscriber.receive(&stream, PATIENCE) {
        Err(Error::PeerGone { graceful: true, .. }) => Ok(()),
        other => bail!("after the close came {other:?}"),
    }
}

fn pollable(context: &Context) -> Result<()> {
    let mut peer = context.peer()?;
    peer.publish(PublisherPlan::of("polled"))?;
    let mut subscriber = context.subscriber("polled")?;
    let stream = context.stream()?;
    let mut error_counters = context.error_counters()?;
    let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(
        &set,
        subscriber.as_fd(),
        epoll::EventData::new_u64(1),
        epoll::EventFlags::IN,
    )?;
    for round in 0..20 {
        // The peer has answered, so it has rung for all samples so far. It rings behind their
        // publication: one ring may have come after its sample had been received.
        ensure!(
            subscriber
                .receive(&stream, Duration::ZERO)
                .optional()?
                .is_none(),
            "a sample that was not sent, in round {round}"
        );
        ensure!(
            !wait_readable(&subscriber, Duration::ZERO)?,
            "readable without a sample, in round {round}"
        );
        peer.send(&Order::Send(Batch::of(2, WORDS, round)))?;
        let mut received = 0;
        while received < 2 {
            let woken = if round % 2 == 0 {
                wait_readable(&subscriber, PATIENCE)?
            } else {
                wait_readable(&set, PATIENCE)?
            };
            ensure!(woken, "no wake-up for a sample in round {round}");
            while let Some(sample) = subscriber.receive(&stream, Duration::ZERO).optional()? {
                ensure!(
                    error_counters.finish(sample)? == 0,
                    "a polled sample is whole"
                );
                received += 1;
            }
        }
        ensure!(received == 2, "{received} samples of 2");
        peer.answer()??;
    }
    peer.kill()?;
    ensure!(wait_readable(&set, PATIENCE)?, "no wake-up for the end");
    let gone = || {
        matches!(
            subscriber.receive(&stream, Duration::ZERO).optional(),
            Err(Error::PeerGone {
                graceful: false,
                ..
            })
        )
    };
    ensure!(eventually(PATIENCE, gone), "the end is reported");
    Ok(())
}

fn receipts(context: &Context) -> Result<()> {
    let mut peer = context.peer()?;
    peer.publish(PublisherPlan::of("receipts"))?;
    let mut subscriber = context.subscriber("receipts")?;
    let stream = context.stream()?;
    peer.ask(&Order::Send(
        Batch::of(1, WORDS, 1).slow(Duration::from_millis(300)),
    ))?;
    let receipt = subscriber.receive(&stream, PATIENCE)?.release()?;
    ensure!(
        !receipt.check()?,
        "nothing is complete at once that is written in 300 ms"
    );
    match receipt.wait(Duration::from_millis(1)) {
        Err(Error::Timeout { .. }) => {}
        other => bail!("a wait of 1 ms gave {other:?}"),
    }
    receipt.wait(PATIENCE)?;
    ensure!(receipt.check()?, "complete after the wait");
    peer.dismiss()
}

/// The publisher has two slots: it gets the first one back while the second one's data, for which
/// the stream waits behind the release, is not complete.
fn released_before_the_next(context: &Context) -> Result<()> {
    let mut peer = context.peer()?;
    peer.publish(PublisherPlan {
        depth: Some(2),
        ..PublisherPlan::of("next")
    })?;
    let counting = Wrapped::new(context.device.backend().clone(), Counting::default());
    let device = Device::from_backend(counting.clone());
    let batches = || counting.hook().calls().get("batch").copied();
    let mut subscriber = Subscriber::open("next", context.domain.on(&device), PATIENCE)?;
    let (stream, mut counters) = (device.stream()?, context.error_counters()?);
    peer.ask(&Order::SendAndWait(Batch::of(1, WORDS, 1)))?;
    let first = subscriber.receive(&stream, PATIENCE)?;
    let of_first = counters.check_sample(&first)?;
    peer.ask(&Order::SendBehindGate(Batch::of(1, WORDS, 2)))?;
    let before = batches();
    let second = subscriber.receive_next(first, PATIENCE)?;
    ensure!(batches() == Some(before.unwrap_or(0) + 1), "one call");
    let of_second = counters.check_sample(&second)?;
    // Where no slot is free, this fails.
    peer.ask(&Order::SendAside(Batch::of(1, WORDS, 3)))?;
    ensure!(
        !second.is_complete()?,
        "its publisher's stream stands still"
    );
    peer.ask(&Order::OpenGate)?;
    second.wait(PATIENCE)?;
    let third = subscriber.receive_next(second, PATIENCE)?;
    let of_third = counters.check_sample(&third)?;
    let nothing = subscriber.receive_next(third, Duration::ZERO);
    ensure!(
        matches!(nothing, Err(Error::Timeout { .. })),
        "{nothing:?} behind the last sample"
    );
    stream.synchronize(PATIENCE)?;
    for check in [of_first, of_second, of_third] {
        let wrong = check.map(|check| counters.wrong_words(check));
        ensure!(wrong == Some(0), "{wrong:?} wrong words");
    }
    // All three are back: there is room for two more.
    peer.ask(&Order::Send(Batch::of(2, WORDS, 4)))?;
    peer.dismiss()
}

/// A publisher's device of which one call of the driver can be made to fail.
fn failing_device(context: &Context) -> (Arc<Wrapped<Failing>>, Device) {
    let failing = Wrapped::new(context.device.backend().clone(), Failing::default());
    let device = Device::from_backend(failing.clone());
    (failing, device)
}

fn refused_signal(context: &Context) -> Result<()> {
    let (failing, device) = failing_device(context);
    let options = PublisherOptions {
        device: Some(device.clone()),
        ..context.domain.on(&context.device)
    };
    let publisher = Publisher::new("refused", options)?;
    let (sending, receiving) = (device.stream()?, context.stream()?);
    let mut subscriber = context.subscriber("refused")?;
    let mut error_counters = context.error_counters()?;
    for round in 0..3 {
        failing.hook().aim("batch", 1);
        match Payload::of(WORDS, round).send(&publisher, &sending) {
            Err(Error::Driver {
                call: "batch",
                code: Error::INJECTED,
                ..
            }) => {}
            other => bail!("a refused signal gave {other:?}"),
        }
        match subscriber.receive(&receiving, PATIENCE)?.finish(PATIENCE) {
            Err(Error::Lost(Loss::Sample { sequence, .. })) => {
                ensure!(sequence == 2 * round + 1, "sample {sequence} is lost")
            }
            other => bail!("a sample without its signal gave {other:?}"),
        }
        Payload::of(WORDS, round).send(&publisher, &sending)?;
        ensure!(
            error_counters.finish(subscriber.receive(&receiving, PATIENCE)?)? == 0,
            "the next one is whole"
        );
    }
    Ok(())
}

fn lost_history(context: &Context) -> Result<()> {
    let (failing, device) = failing_device(context);
    let publisher = Publisher::new(
        "lost-history",
        PublisherOptions {
            device: Some(device.clone()),
            history: 3,
            ..context.domain.on(&context.device)
        },
    )?;
    let (sending, stream) = (device.stream()?, context.stream()?);
    Payload::of(WORDS, 1).send(&publisher, &sending)?;
    failing.hook().aim("batch", 1);
    ensure!(
        Payload::of(WORDS, 2).send(&publisher, &sending).is_err(),
        "the driver refused its signal"
    );
    Payload::of(WORDS, 3).send(&publisher, &sending)?;
    // Under the blocking policy a number that is missing would be a broken protocol.
    let mut late = context.subscriber("lost-history")?;
    let mut error_counters = context.error_counters()?;
    ensure!(
        error_counters.finish(late.receive(&stream, PATIENCE)?)? == 0,
        "the first is whole"
    );
    match late.receive(&stream, PATIENCE)?.finish(PATIENCE) {
        Err(Error::Lost(Loss::Sample { sequence: 2, .. })) => {}
        other => bail!("the one that was given up gave {other:?}"),
    }
    ensure!(
        error_counters.finish(late.receive(&stream, PATIENCE)?)? == 0,
        "the third is whole"
    );
    Ok(())
}

fn handles_outlive_each_other(context: &Context) -> Result<()> {
    let publisher = context.publisher("outlived")?;
    let mut subscriber = context.subscriber("outlived")?;
    let stream = context.stream()?;
    let mut error_counters = context.error_counters()?;
    Payload::of(WORDS, 1).send(&publisher, &stream)?;
    Payload::of(WORDS, 2).send(&publisher, &stream)?;
    let (first, second) = (
        subscriber.receive(&stream, PATIENCE)?,
        subscriber.receive(&stream, PATIENCE)?,
    );
    drop(subscriber);
    ensure!(
        error_counters.finish(first)? == 0,
        "a sample is whole after its subscriber"
    );
    let loan = Payload::of(WORDS, 3).loan(&publisher, &stream)?;
    drop(publisher);
    ensure!(
        error_counters.finish(second)? == 0,
        "a sample is whole after its publisher"
    );
    match loan.send(&stream) {
        Err(failed) => ensure!(matches!(failed.error, Error::PeerGone { .. }), "{failed}"),
        Ok(sequence) => bail!("a closed publisher sent {sequence}"),
    }
    Ok(stream.synchronize(PATIENCE)?)
}

fn timeouts(context: &Context) -> Result<()> {
    let publisher = context.publisher("silent")?;
    let mut subscriber = context.subscriber("silent")?;
    let stream = context.stream()?;
    ensure!(
        subscriber
            .receive(&stream, Duration::ZERO)
            .optional()?
            .is_none(),
        "nothing was sent"
    );
    match subscriber.receive(&stream, Duration::from_millis(20)) {
        Err(Error::Timeout { waited, .. }) => {
            ensure!(waited == Duration::from_millis(20), "waited {waited:?}")
        }
        other => bail!("nothing was sent, and there came {other:?}"),
    }
    match publisher.wait_for_subscribers(2, Duration::from_millis(20)) {
        Err(Error::Timeout { .. }) => {}
        other => bail!("a second subscriber gave {other:?}"),
    }
    Payload::of(WORDS, 1).send(&publisher, &stream)?;
    // The first sample's region is new, and may arrive a moment behind it.
    let mut received = None;
    let came = || {
        received = subscriber
            .receive(&stream, Duration::ZERO)
            .optional()
            .transpose();
        received.is_some()
    };
    ensure!(eventually(PATIENCE, came), "what was sent comes");
    let sample = received.context("it came")??;
    ensure!(context.error_counters()?.finish(sample)? == 0, "whole");
    Ok(())
}

fn other_devices(context: &Context) -> Result<()> {
    if context.settings.devices < 2 {
        return skip("a second GPU is needed; say --devices 2");
    }
    let options = PublisherOptions {
        history: 2,
        ..context.domain.on(&context.device)
    };
    let publisher = Publisher::new("across", options)?;
    let stream = context.stream()?;
    let mut peers = Vec::new();
    for ordinal in 1..context.settings.devices {
        let mut peer = context.peer_on(ordinal)?;
        if let Err(fault) =
            peer.try_ask(&Order::Subscribe(crate::peer::SubscriberPlan::of("across")))?
        {
            ensure!(
                fault.kind == "Device" && fault.text.contains("cannot read memory"),
                "{fault}"
            );
            return skip(fault.text);
        }
        peers.push(peer);
    }
    for sequence in 1..=20 {
        Payload::of(1 << 20, sequence)
            .slow(Duration::from_millis(2))
            .send(&publisher, &stream)?;
        for peer in &mut peers {
            all_whole(&peer.receive(1)?, [sequence])?;
        }
    }
    peers.into_iter().try_for_each(|peer| peer.dismiss())
}
