//! The layer below the channel: memory, words, order; and failed device calls.

use std::collections::BTreeMap;
use std::os::fd::AsRawFd;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use warpipe::backend::testing::{Counting, Delaying, Wrapped};
use warpipe::{Device, Publisher, PublisherOptions, Subscriber, SubscriberOptions};

use super::Case;
use crate::PATIENCE;
use crate::context::Context;
use crate::payload::{ErrorCounters, Payload};
use crate::peer::{Batch, Order, Peer, PublisherPlan};
use crate::words::Words;

pub(super) const CASES: &[Case] = &[
    Case::new(
        "streams of two processes signal each other and wait, both ways",
        words_both_ways,
    ),
    Case::new("a tensor crosses two processes whole, both ways", both_ways),
    Case::new(
        "a reader's stream waits for data that is written late",
        late_data_is_waited_for,
    ),
    Case::new(
        "a reader that does not wait sees wrong words (negative control)",
        without_waits_words_are_wrong,
    ),
    Case::new("a late signal is waited for", late_signals_are_waited_for),
    Case::new(
        "an importer that writes into a sample faults, and the data is unchanged",
        importers_cannot_write,
    )
    .ends_clients(),
    Case::new(
        "a thousand messages allocate, map and register nothing",
        steady_state_is_free,
    ),
];

const WORDS: u64 = 4096;

fn words_both_ways(context: &Context) -> Result<()> {
    const ROUNDS: u64 = 200;
    let memory = rustix::fs::memfd_create(c"words", rustix::fs::MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&memory, Words::BYTES as u64)?;
    let words = Words::map(&context.device, &memory)?;
    let stream = context.stream()?;
    let mut peer = context.peer()?;
    words.play(&stream, ROUNDS, true)?;
    ensure!(
        !stream.is_idle()?,
        "nobody has answered yet, so the stream waits"
    );
    let path = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
    peer.ask(&Order::PlayWords {
        path,
        rounds: ROUNDS,
    })?;
    stream.synchronize(PATIENCE)?;
    ensure!(
        words.values() == [ROUNDS, ROUNDS],
        "the words stand at {:?}",
        words.values()
    );
    peer.dismiss()
}

fn both_ways(context: &Context) -> Result<()> {
    let mut peer = context.peer()?;
    peer.ask(&Order::Guard)?;
    let publisher = context.publisher("there")?;
    peer.subscribe("there")?;
    let stream = context.stream()?;
    for seed in 1..=10 {
        Payload::of(WORDS, seed).send(&publisher, &stream)?;
    }
    let items = peer.receive(10)?;
    ensure!(
        items.iter().all(|item| item.is_whole()),
        "what the peer received: {items:?}"
    );
    ensure!(
        items.iter().map(|item| item.sequence).eq(1..=10),
        "in order: {items:?}"
    );

    peer.publish(PublisherPlan::of("back"))?;
    let mut subscriber = context.subscriber("back")?;
    peer.ask(&Order::Send(Batch::of(10, WORDS, 100)))?;
    let mut error_counters = context.error_counters()?;
    for sequence in 1..=10 {
        let sample = subscriber.receive(&stream, PATIENCE)?;
        ensure!(
            sample.sequence() == sequence,
            "sample {} where {sequence} is due",
            sample.sequence()
        );
        ensure!(
            error_counters.finish(sample)? == 0,
            "sample {sequence} has wrong words"
        );
    }
    drop((publisher, subscriber));
    peer.ask(&Order::Settle)?;
    peer.dismiss()
}

fn late_data_is_waited_for(context: &Context) -> Result<()> {
    let mut peer = context.peer()?;
    peer.publish(PublisherPlan::of("late"))?;
    let mut subscriber = context.subscriber("late")?;
    let stream = context.stream()?;
    let mut error_counters = context.error_counters()?;
    peer.ask(&Order::Send(
        Batch::of(3, WORDS, 7).slow(Duration::from_millis(40)),
    ))?;
    for _ in 0..3 {
        let wrong = error_counters.finish(subscriber.receive(&stream, PATIENCE)?)?;
        ensure!(
            wrong == 0,
            "{wrong} of {WORDS} words were read before they were written"
        );
    }
    peer.dismiss()
}

/// Publisher and subscriber of one process, each behind its own wrapper of the backend.
fn pair(
    context: &Context,
    publishing: &Device,
    receiving: &Device,
) -> Result<(Publisher, Subscriber)> {
    let options = PublisherOptions {
        device: Some(publishing.clone()),
        ..context.domain.on(&context.device)
    };
    let publisher = Publisher::new("pair", options)?;
    let subscriber = Subscriber::open(
        "pair",
        SubscriberOptions {
            device: Some(receiving.clone()),
            ..context.domain.on(&context.device)
        },
        Duration::ZERO,
    )?;
    Ok((publisher, subscriber))
}

fn delaying(context: &Context, signal_late: Duration, waits: bool) -> Device {
    Device::from_backend(Wrapped::new(
        context.device.backend().clone(),
        Delaying { signal_late, waits },
    ))
}

fn without_waits_words_are_wrong(context: &Context) -> Result<()> {
    let blind = delaying(context, Duration::ZERO, false);
    let (publisher, mut subscriber) = pair(context, &context.device, &blind)?;
    let (sending, receiving) = (context.stream()?, blind.stream()?);
    let mut error_counters = ErrorCounters::new(&blind)?;
    let mut wrong = 0;
    for seed in 1..=3 {
        Payload::of(WORDS, seed)
            .slow(Duration::from_millis(100))
            .send(&publisher, &sending)?;
        let sample = subscriber.receive(&receiving, PATIENCE)?;
        let check = error_counters.check_sample(&sample)?.context("a mark")?;
        receiving.synchronize(PATIENCE)?;
        wrong += error_counters.wrong_words(check);
        sample.finish(PATIENCE)?;
    }
    context.figure("wrong_words", wrong);
    ensure!(
        wrong > 0,
        "without its waits a reader saw no wrong word, so the other cases prove nothing"
    );
    Ok(())
}

fn late_signals_are_waited_for(context: &Context) -> Result<()> {
    let late = delaying(context, Duration::from_millis(20), true);
    let (publisher, mut subscriber) = pair(context, &late, &context.device)?;
    let (sending, receiving) = (late.stream()?, context.stream()?);
    let mut error_counters = context.error_counters()?;
    for seed in 1..=5 {
        Payload::of(WORDS, seed).send(&publisher, &sending)?;
        let sample = subscriber.receive(&receiving, PATIENCE)?;
        let wrong = error_counters.finish(sample)?;
        ensure!(wrong == 0, "{wrong} wrong words");
    }
    Ok(())
}

fn importers_cannot_write(context: &Context) -> Result<()> {
    let publisher = context.publisher("read-only")?;
    let stream = context.stream()?;
    let mut reader = context.subscriber("read-only")?;
    let mut vandal = context.peer()?;
    vandal.subscribe("read-only")?;
    Payload::of(WORDS, 5).send(&publisher, &stream)?;
    vandal.send(&Order::Overwrite { subscriber: 0 })?;
    faulted(vandal)?;
    let wrong = context
        .error_counters()?
        .finish(reader.receive(&stream, PATIENCE)?)?;
    ensure!(wrong == 0, "the vandal changed {wrong} words");
    Ok(())
}

/// Has a peer that was told to write into read-only memory fault, and end.
pub(super) fn faulted(mut vandal: Peer) -> Result<()> {
    match vandal.answer() {
        Ok(Ok(answer)) => bail!("a write into an imported region gave {answer:?}"),
        Ok(Err(fault)) => {
            ensure!(
                fault.kind == "Driver",
                "a fault of the device was due, not {fault}"
            );
            vandal.kill()?;
        }
        Err(_) => {
            use std::os::unix::process::ExitStatusExt as _;
            let status = vandal.ended()?;
            let signal = status
                .signal()
                .with_context(|| format!("a fault was due, not {status}"))?;
            ensure!(
                matches!(signal, libc::SIGSEGV | libc::SIGBUS),
                "the writer ended with signal {signal}"
            );
        }
    }
    Ok(())
}

fn steady_state_is_free(context: &Context) -> Result<()> {
    let counting = |device: &Device| Wrapped::new(device.backend().clone(), Counting::default());
    let (out, back) = (counting(&context.device), counting(&context.device));
    let (sender, receiver) = (
        Device::from_backend(out.clone()),
        Device::from_backend(back.clone()),
    );
    let (publisher, mut subscriber) = pair(context, &sender, &receiver)?;
    let (sending, receiving) = (sender.stream()?, receiver.stream()?);
    let mut hand_over = |count: u64| -> Result<()> {
        for seed in 0..count {
            Payload::of(64, seed).send(&publisher, &sending)?;
            drop(subscriber.receive(&receiving, PATIENCE)?);
        }
        Ok(receiving.synchronize(PATIENCE)?)
    };
    hand_over(100)?;
    let before = [out.hook().calls(), back.hook().calls()];
    hand_over(1000)?;
    let after = [out.hook().calls(), back.hook().calls()];
    const DEAR: &[&str] = &[
        "allocate",
        "export",
        "import",
        "release",
        "register",
        "unregister",
        "create_stream",
    ];
    let of = |calls: &BTreeMap<&str, u64>, method: &str| calls.get(method).copied().unwrap_or(0);
    for (side, before, after) in [
        ("publisher", &before[0], &after[0]),
        ("subscriber", &before[1], &after[1]),
    ] {
        for &method in DEAR {
            let more = of(after, method) - of(before, method);
            ensure!(
                more == 0,
                "the {side} called {method} {more} times in 1000 messages"
            );
        }
        let batches = of(after, "batch") - of(before, "batch");
        context.figure(&format!("{side}_batches_per_1000_messages"), batches);
        ensure!(batches >= 1000, "the {side}'s calls were counted");
    }
    Ok(())
}
