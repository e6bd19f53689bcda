//! Timelines between processes: order, ends, deaths.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use warpipe::backend::testing::{Delaying, Wrapped};
use warpipe::{Device, Error, Timeline};

use super::Case;
use crate::PATIENCE;
use crate::context::Context;
use crate::payload::ErrorCounters;
use crate::peer::{Answer, Order, Peer, SignalOrder};
use crate::shared::Shared;

pub(super) const CASES: &[Case] = &[
    Case::new(
        "a timeline's waiter reads the data of its owner's late kernel",
        late_kernels_are_waited_for,
    ),
    Case::new(
        "a timeline's waiter that does not wait reads wrong words (negative control)",
        without_waits,
    ),
    Case::new(
        "a timeline's late signal is waited for, on the device and on the CPU",
        late_signals,
    ),
    Case::new(
        "two timelines order alternating writes of two processes",
        ping_pong,
    ),
    Case::new(
        "a timeline's owner killed in a kernel: waiters are released with an error and the value",
        killed_owner,
    )
    .ends_clients(),
    Case::new(
        "a timeline's owner killed at any moment leaves one last value that all survivors see",
        killed_anywhere,
    )
    .ends_clients()
    .long(600),
    Case::new(
        "a wait for a dead owner's timeline is an error at once",
        wait_after_death,
    )
    .ends_clients(),
    Case::new(
        "a timeline's owner that closes completes its signals and releases the waiters",
        closed_owner,
    ),
    Case::new(
        "a timeline's waiter that is killed does not affect others",
        killed_waiter,
    )
    .ends_clients(),
    Case::new(
        "a timeline's waiter that leaves before its owner dies is released",
        left_then_lost,
    )
    .ends_clients(),
];

const NAME: &str = "steps";

fn owner(context: &Context) -> Result<Peer> {
    let mut peer = context.peer()?;
    peer.signals(SignalOrder::CreateTimeline(NAME.into()))?;
    Ok(peer)
}

fn open(context: &Context, device: &Device) -> Result<Timeline> {
    Ok(Timeline::open(NAME, context.domain.on(device), PATIENCE)?)
}

fn late_kernels_are_waited_for(context: &Context) -> Result<()> {
    let mut peer = owner(context)?;
    let (memory, fd) = Shared::create(&context.device)?;
    peer.signals(SignalOrder::Map(Shared::path(&fd)))?;
    let (timeline, stream, mut error_counters) = (
        open(context, &context.device)?,
        context.stream()?,
        context.error_counters()?,
    );
    for seed in 1..=5 {
        peer.signals(SignalOrder::Write {
            seed,
            slow_us: 40_000,
        })?;
        peer.signals(SignalOrder::Signal(seed))?;
        timeline.wait(&stream, seed)?;
        let wrong = memory.wrong(&mut error_counters, &stream, seed)?;
        ensure!(
            wrong == 0,
            "{wrong} words were read before they were written"
        );
        ensure!(
            timeline.check(seed)? && timeline.value() == seed,
            "{timeline:?} after {seed}"
        );
    }
    peer.dismiss()
}

fn delaying(context: &Context, signal_late: Duration, waits: bool) -> Device {
    Device::from_backend(Wrapped::new(
        context.device.backend().clone(),
        Delaying { signal_late, waits },
    ))
}

fn without_waits(context: &Context) -> Result<()> {
    let mut peer = owner(context)?;
    let (memory, fd) = Shared::create(&context.device)?;
    peer.signals(SignalOrder::Map(Shared::path(&fd)))?;
    let blind = delaying(context, Duration::ZERO, false);
    let (timeline, stream, mut error_counters) = (
        open(context, &blind)?,
        blind.stream()?,
        ErrorCounters::new(&blind)?,
    );
    let mut wrong = 0;
    for seed in 1..=3 {
        peer.signals(SignalOrder::Write {
            seed,
            slow_us: 200_000,
        })?;
        peer.signals(SignalOrder::Signal(seed))?;
        timeline.wait(&stream, seed)?;
        wrong += memory.wrong(&mut error_counters, &stream, seed)?;
        timeline.wait_host(seed, PATIENCE)?;
    }
    context.figure("wrong_words", wrong);
    ensure!(
        wrong > 0,
        "without its waits a reader saw no wrong word, so the other cases prove nothing"
    );
    peer.dismiss()
}

fn late_signals(context: &Context) -> Result<()> {
    let late = delaying(context, Duration::from_millis(20), true);
    let timeline = Timeline::new(NAME, context.domain.on(&late))?;
    let (memory, fd) = Shared::create(&context.device)?;
    let mut peer = context.peer()?;
    peer.signals(SignalOrder::OpenTimeline(NAME.into()))?;
    peer.signals(SignalOrder::Map(Shared::path(&fd)))?;
    let streams = [late.stream()?, late.stream()?];
    for value in 1..=6 {
        let stream = &streams[value as usize % 2];
        memory.write(stream, value, Duration::ZERO)?;
        timeline.signal(stream, value, PATIENCE)?;
        peer.signals(SignalOrder::Wait(value))?;
        let wrong = peer.number(&Order::Signals(SignalOrder::Read { seed: value }))?;
        ensure!(wrong == 0, "{wrong} wrong words at {value}");
        peer.signals(SignalOrder::WaitHost(value))?;
        // Orders the next write behind this one within this process, too: ThreadSanitizer does not
        // see the order that the peer makes.
        timeline.wait_host(value, PATIENCE)?;
    }
    streams
        .iter()
        .try_for_each(|stream| stream.synchronize(PATIENCE))?;
    peer.refuses(SignalOrder::Signal(7), "Refused")?;
    peer.dismiss()
}

fn ping_pong(context: &Context) -> Result<()> {
    const ROUNDS: u64 = 50;
    let ping = Timeline::new("ping", context.domain.on(&context.device))?;
    let mut peer = owner(context)?;
    let (pong, stream) = (open(context, &context.device)?, context.stream()?);
    let mut other = context.peer()?;
    other.signals(SignalOrder::OpenTimeline("ping".into()))?;
    for value in 1..=ROUNDS {
        ping.signal(&stream, value, PATIENCE)?;
        other.signals(SignalOrder::Wait(value))?;
        peer.signals(SignalOrder::Signal(value))?;
        pong.wait(&stream, value)?;
    }
    stream.synchronize(PATIENCE)?;
    other.signals(SignalOrder::Synchronize)?;
    ensure!(
        (ping.value(), pong.value()) == (ROUNDS, ROUNDS),
        "{ping:?} {pong:?}"
    );
    other.dismiss()?;
    peer.dismiss()
}

fn gone(result: warpipe::Result<bool>, pid: u32, was_graceful: bool) -> Result<()> {
    match result {
        Err(Error::PeerGone {
            pid: reported,
            graceful,
            ..
        }) if graceful == was_graceful && reported == pid as i32 => Ok(()),
        other => bail!("the end of process {pid} gave {other:?}"),
    }
}

fn killed_owner(context: &Context) -> Result<()> {
    for _ in 0..context.rounds(3, 30, 30) {
        let (mut victim, mut witness) = (owner(context)?, context.peer()?);
        let (memory, fd) = Shared::create(&context.device)?;
        victim.signals(SignalOrder::Map(Shared::path(&fd)))?;
        witness.signals(SignalOrder::OpenTimeline(NAME.into()))?;
        let (timeline, stream) = (open(context, &context.device)?, context.stream()?);
        victim.signals(SignalOrder::SignalNow(5))?;
        victim.signals(SignalOrder::Write {
            seed: 1,
            slow_us: 5_000_000,
        })?;
        victim.signals(SignalOrder::Signal(6))?;
        timeline.wait(&stream, 6)?;
        witness.signals(SignalOrder::Wait(7))?;
        ensure!(
            !timeline.check(6)? && !stream.is_idle()?,
            "the kernel runs, and the stream waits"
        );
        witness.send(&Order::Signals(SignalOrder::WaitHost(6)))?;
        victim.kill()?;
        stream
            .synchronize(PATIENCE)
            .context("a waiting stream is released")?;
        gone(timeline.check(6), victim.id(), false)?;
        ensure!(timeline.check(5)? && timeline.value() == 5, "{timeline:?}");
        let answer = witness.answer()?;
        ensure!(
            answer.as_ref().is_err_and(|fault| fault.kind == "PeerGone"),
            "a wait on the CPU gave {answer:?}"
        );
        witness.signals(SignalOrder::Synchronize)?;
        witness.refuses(SignalOrder::Check(6), "PeerGone")?;
        let value = witness.number(&Order::Signals(SignalOrder::Value))?;
        ensure!(value == 5, "the witness sees {value}");
        witness.dismiss()?;
        drop(memory);
        context.domain.clean()?;
    }
    Ok(())
}

fn killed_anywhere(context: &Context) -> Result<()> {
    let mut rng = context.rng();
    let mut last_values = Vec::new();
    let kills = context.kills(10, 200, 100);
    for _ in 0..kills {
        let (mut victim, mut witness) = (context.mortal(&mut rng)?, context.peer()?);
        victim.signals(SignalOrder::CreateTimeline(NAME.into()))?;
        let (_memory, fd) = Shared::create(&context.device)?;
        victim.signals(SignalOrder::Map(Shared::path(&fd)))?;
        witness.signals(SignalOrder::OpenTimeline(NAME.into()))?;
        let (timeline, streams) = (
            open(context, &context.device)?,
            [context.stream()?, context.stream()?],
        );
        for value in 1..=40 {
            victim.send(&Order::Signals(SignalOrder::Write {
                seed: value,
                slow_us: 150,
            }))?;
            victim.send(&Order::Signals(SignalOrder::Signal(value)))?;
            timeline.wait(&streams[value as usize % 2], value)?;
        }
        timeline.wait(&streams[0], Timeline::VALUE_MAX)?;
        witness.signals(SignalOrder::Wait(Timeline::VALUE_MAX))?;
        let pause = Duration::from_micros(rng.u64(..8000));
        std::thread::park_timeout(pause);
        victim.kill()?;
        for stream in &streams {
            stream
                .synchronize(PATIENCE)
                .context("a waiting stream is released")?;
        }
        witness.signals(SignalOrder::Synchronize)?;
        let last = timeline.value();
        let theirs = witness.number(&Order::Signals(SignalOrder::Value))?;
        ensure!(
            last == theirs && last <= 40,
            "one survivor sees {last}, the other {theirs}"
        );
        ensure!(timeline.check(last)?, "{last} was reached");
        gone(timeline.check(last + 1), victim.id(), false)?;
        last_values.push(last);
        witness.dismiss()?;
        context.orphans_end()?;
        context.domain.clean()?;
    }
    context.figure_storm(kills)?;
    context.figure("last_value_min", last_values.iter().min().copied());
    context.figure("last_value_max", last_values.iter().max().copied());
    Ok(())
}

fn wait_after_death(context: &Context) -> Result<()> {
    let mut victim = owner(context)?;
    let (timeline, stream) = (open(context, &context.device)?, context.stream()?);
    victim.signals(SignalOrder::SignalNow(2))?;
    victim.kill()?;
    // The first notified process knows the last value, and no wait is enqueued that nothing would
    // end.
    gone(
        timeline.wait_host(3, PATIENCE).map(|()| true),
        victim.id(),
        false,
    )?;
    gone(timeline.wait(&stream, 3).map(|()| true), victim.id(), false)?;
    timeline.wait(&stream, 2)?;
    stream.synchronize(PATIENCE)?;
    match Timeline::open(NAME, context.domain.on(&context.device), Duration::ZERO) {
        Err(Error::NotFound {
            was_there: true, ..
        }) => {}
        other => bail!("opening a dead owner's timeline gave {other:?}"),
    }
    let successor = Timeline::new(NAME, context.domain.on(&context.device))?;
    ensure!(
        successor.value() == 0 && timeline.value() == 2,
        "the name's next owner has a timeline of its own"
    );
    Ok(())
}

fn closed_owner(context: &Context) -> Result<()> {
    let mut peer = owner(context)?;
    let (memory, fd) = Shared::create(&context.device)?;
    peer.signals(SignalOrder::Map(Shared::path(&fd)))?;
    let (timeline, mut error_counters) =
        (open(context, &context.device)?, context.error_counters()?);
    let (early, late) = (context.stream()?, context.stream()?);
    peer.signals(SignalOrder::Write {
        seed: 9,
        slow_us: 100_000,
    })?;
    peer.signals(SignalOrder::Signal(1))?;
    timeline.wait(&early, 1)?;
    timeline.wait(&late, 2)?;
    peer.signals(SignalOrder::Close)?;
    let wrong = memory.wrong(&mut error_counters, &early, 9)?;
    ensure!(
        wrong == 0 && timeline.check(1)?,
        "{wrong} wrong words behind what was promised"
    );
    late.synchronize(PATIENCE)?;
    gone(timeline.check(2), peer.id(), true)?;
    ensure!(timeline.value() == 1, "{timeline:?}");
    peer.dismiss()
}

fn killed_waiter(context: &Context) -> Result<()> {
    let timeline = Timeline::new(NAME, context.domain.on(&context.device))?;
    let stream = context.stream()?;
    let (mut victim, mut witness) = (context.peer()?, context.peer()?);
    for peer in [&mut victim, &mut witness] {
        peer.signals(SignalOrder::OpenTimeline(NAME.into()))?;
        peer.signals(SignalOrder::Wait(1))?;
    }
    victim.kill()?;
    timeline.signal(&stream, 1, PATIENCE)?;
    witness.signals(SignalOrder::Synchronize)?;
    let reached = witness.signals(SignalOrder::Check(1))?;
    ensure!(
        reached == Answer::Number(1),
        "the other waiter sees {reached:?}"
    );
    stream.synchronize(PATIENCE)?;
    witness.dismiss()
}

fn left_then_lost(context: &Context) -> Result<()> {
    let mut victim = owner(context)?;
    let (timeline, stream) = (open(context, &context.device)?, context.stream()?);
    timeline.wait(&stream, 1)?;
    drop(timeline);
    ensure!(!stream.is_idle()?, "the stream waits on");
    victim.kill()?;
    Ok(stream.synchronize(PATIENCE)?)
}
