//! Handles of a process after a fork. **This module is marked for unsafe**: it forks.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use warpipe::{
    Error, Event, EventHandle, Layout, Publisher, PublisherOptions, Sample, SampleMut, Semaphore,
    StateFault, Stream, Subscriber, Timeline,
};
use warpipe_testkit::{eventually, pidfd, wait_readable};

use super::Case;
use crate::PATIENCE;
use crate::context::Context;
use crate::payload::Payload;
use crate::peer::{Batch, Order, PublisherPlan, SemaphoreOrder, SignalOrder};
use crate::process::pid;
use warpipe::OptionalExtension;

pub(super) const CASES: &[Case] = &[
    Case::new(
        "a forked child's handles refuse everything, and dropping them harms nothing",
        handles_refuse,
    ),
    Case::new(
        "a forked child's timelines and events refuse everything, and the parent's continue",
        signals_refuse,
    ),
    Case::new(
        "a killed publisher is seen dead although its forked child lives",
        death_is_seen_despite_a_child,
    )
    .ends_clients(),
    Case::new(
        "a killed subscriber's slots are reclaimed although its forked child lives",
        slots_despite_a_child,
    )
    .ends_clients(),
    Case::new(
        "a forked child's semaphore refuses, and dropping its permit frees nothing",
        semaphore_refuses,
    ),
    Case::new(
        "a killed holder's permit is reclaimed although its forked child lives",
        permit_despite_a_child,
    )
    .ends_clients(),
];

const WORDS: u64 = 256;

/// Forks, lets the child work, and returns the number that it ends with.
pub(super) fn in_a_child(work: impl FnOnce() -> u8) -> Result<u8> {
    // SAFETY: glibc keeps its allocator usable in the child of a process with threads; the child
    // uses it, and handles that only look at the fork's count, and ends by `_exit`.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error()).context("fork"),
        0 => {
            let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or(255);
            // SAFETY: ends the process at once.
            unsafe { libc::_exit(i32::from(code)) }
        }
        child => {
            let child = pid(child as u32)?;
            let ended = wait_readable(pidfd(child)?, PATIENCE)?;
            if !ended {
                crate::process::signal(child, rustix::process::Signal::KILL)?;
            }
            let status =
                rustix::process::waitpid(Some(child), rustix::process::WaitOptions::empty())?;
            ensure!(ended, "the child hangs");
            let (_, status) = status.context("the child's end")?;
            status
                .exit_status()
                .map(|code| code as u8)
                .context("the child ends by itself")
        }
    }
}

fn handles_refuse(context: &Context) -> Result<()> {
    let mut publisher = Some(context.publisher("forked")?);
    let mut subscriber = Some(context.subscriber("forked")?);
    let stream = context.stream()?;
    let mut error_counters = context.error_counters()?;
    let send = |publisher: &Option<Publisher>, seed| -> Result<()> {
        Payload::of(WORDS, seed).send(publisher.as_ref().context("the parent's")?, &stream)?;
        Ok(())
    };
    let receive = |subscriber: &mut Option<Subscriber>| -> Result<Sample> {
        Ok(subscriber
            .as_mut()
            .context("the parent's")?
            .receive(&stream, PATIENCE)?)
    };
    (1..=4).try_for_each(|seed| send(&publisher, seed))?;
    let mut samples = (0..4)
        .map(|_| receive(&mut subscriber))
        .collect::<Result<Vec<_>>>()?;
    let mut loan = Some(Payload::of(WORDS, 5).loan(publisher.as_ref().context("built")?, &stream)?);
    stream.synchronize(PATIENCE)?;
    // The child has copies of everything, to use and to drop.
    let code = in_a_child(|| {
        let (Some(publisher), Some(subscriber), Some(loan)) =
            (publisher.take(), subscriber.take(), loan.take())
        else {
            return 254;
        };
        first_accepted(
            publisher,
            subscriber,
            loan,
            std::mem::take(&mut samples),
            &stream,
        )
    })?;
    ensure!(
        code == 0,
        "operation {code} was not refused in the forked child"
    );
    for sample in samples {
        ensure!(
            error_counters.finish(sample)? == 0,
            "what the parent held is whole"
        );
    }
    loan.context("the parent's")?.send(&stream)?;
    ensure!(
        error_counters.finish(receive(&mut subscriber)?)? == 0,
        "what the parent had loaned is whole"
    );
    for seed in 6..=40 {
        send(&publisher, seed)?;
        ensure!(
            error_counters.finish(receive(&mut subscriber)?)? == 0,
            "the parent goes on"
        );
    }
    Ok(())
}

/// In the child: tries everything and drops everything. The number, from 1, of the first operation
/// that was not refused; 0 if all were.
fn first_accepted(
    publisher: Publisher,
    mut subscriber: Subscriber,
    loan: SampleMut,
    mut samples: Vec<Sample>,
    stream: &Stream,
) -> u8 {
    let is_forked =
        |result: Result<(), Error>| matches!(result, Err(Error::State(StateFault::Forked)));
    let short = Duration::from_millis(1);
    let (Some(sample), Some(released), Some(finished)) =
        (samples.pop(), samples.pop(), samples.pop())
    else {
        return 254;
    };
    let layout = Layout::bytes_only(8);
    let refusals = [
        is_forked(layout.and_then(|layout| publisher.loan(&layout)).map(drop)),
        is_forked(publisher.send_bytes(stream, b"x").map(drop)),
        is_forked(publisher.wait_for_subscribers(1, short)),
        is_forked(subscriber.receive(stream, short).map(drop)),
        is_forked(
            subscriber
                .receive(stream, Duration::ZERO)
                .optional()
                .map(drop),
        ),
        is_forked(sample.wait(short)),
        is_forked(sample.to_vec(short).map(drop)),
        is_forked(released.release().map(drop)),
        is_forked(finished.finish(short)),
        is_forked(loan.send(stream).map(drop).map_err(Error::from)),
    ];
    let _shown = (
        publisher.subscribers(),
        publisher.stats().is_err(),
        subscriber.publisher().map(|it| it.state),
    );
    drop((sample, samples, subscriber, publisher));
    refusals
        .iter()
        .position(|refused| !refused)
        .map_or(0, |index| index as u8 + 1)
}

fn signals_refuse(context: &Context) -> Result<()> {
    let (domain, device, stream) = (&context.domain, &context.device, context.stream()?);
    let mut peer = context.peer()?;
    peer.signals(SignalOrder::CreateTimeline("theirs".into()))?;
    let text = peer.text(&Order::Signals(SignalOrder::CreateEvents(1)))?;
    let mut timelines = vec![
        Timeline::new("ours", domain.on(device))?,
        Timeline::open("theirs", domain.on(device), PATIENCE)?,
    ];
    let mut events = vec![
        Event::new(domain.on(device))?,
        Event::open(
            &text.parse::<EventHandle>()?,
            domain.on(device),
            Duration::ZERO,
        )?,
    ];
    let code = in_a_child(|| {
        let (timelines, events) = (std::mem::take(&mut timelines), std::mem::take(&mut events));
        let is_forked =
            |result: Result<(), Error>| matches!(result, Err(Error::State(StateFault::Forked)));
        let of_timeline = |timeline: &Timeline| {
            is_forked(timeline.signal(&stream, 1, PATIENCE))
                && is_forked(timeline.signal_now(1, PATIENCE))
                && is_forked(timeline.wait(&stream, 1))
                && is_forked(timeline.check(1).map(drop))
                && is_forked(timeline.wait_host(1, PATIENCE))
        };
        let of_event = |event: &Event| {
            is_forked(event.record(&stream, PATIENCE).map(drop))
                && is_forked(event.wait(&stream).map(drop))
                && is_forked(event.query().map(drop))
                && is_forked(event.handle().map(drop))
        };
        let all = timelines.iter().all(of_timeline) && events.iter().all(of_event);
        drop((timelines, events));
        u8::from(!all)
    })?;
    ensure!(code == 0, "a forked child was not refused ({code})");
    timelines[0].signal(&stream, 1, PATIENCE)?;
    peer.signals(SignalOrder::SignalNow(1))?;
    peer.signals(SignalOrder::Record)?;
    timelines
        .iter()
        .try_for_each(|timeline| timeline.wait_host(1, PATIENCE))?;
    events[0].record(&stream, PATIENCE)?;
    events
        .iter()
        .try_for_each(|event| event.synchronize(PATIENCE))?;
    stream.synchronize(PATIENCE)?;
    peer.dismiss()
}

fn death_is_seen_despite_a_child(context: &Context) -> Result<()> {
    let stream = context.stream()?;
    let mut error_counters = context.error_counters()?;
    let mut peer = context.peer()?;
    peer.publish(PublisherPlan::of("parent"))?;
    let mut subscriber = context.subscriber("parent")?;
    peer.ask(&Order::SendAndWait(Batch::of(2, WORDS, 1)))?;
    let orphan = peer.orphan(&Order::Fork)?;
    peer.ask(&Order::SendAndWait(Batch::of(1, WORDS, 3)))?;
    peer.kill()?;
    for sequence in 1..=3 {
        ensure!(
            error_counters.finish(subscriber.receive(&stream, PATIENCE)?)? == 0,
            "sample {sequence} is whole"
        );
    }
    match subscriber.receive(&stream, PATIENCE) {
        Err(Error::PeerGone {
            graceful: false, ..
        }) => {}
        other => anyhow::bail!("after the death came {other:?}"),
    }
    drop(context.publisher("parent").context("the name is free")?);
    ensure!(orphan.is_alive(), "the forked child lives");
    Ok(())
}

fn slots_despite_a_child(context: &Context) -> Result<()> {
    let slot = 1 << 20;
    let options = PublisherOptions {
        memory_limit: 2 * slot,
        loan_timeout: PATIENCE,
        ..context.domain.on(&context.device)
    };
    let publisher = Publisher::new("tight", options)?;
    let stream = context.stream()?;
    let mut peer = context.peer()?;
    peer.subscribe("tight")?;
    for seed in 1..=2 {
        Payload::of(slot / 8, seed).send(&publisher, &stream)?;
    }
    peer.hold(2)?;
    let orphan = peer.orphan(&Order::Fork)?;
    peer.kill()?;
    for seed in 3..=10 {
        Payload::of(slot / 8, seed).send(&publisher, &stream)?;
    }
    ensure!(
        eventually(PATIENCE, || publisher.subscribers().is_empty()),
        "the dead one is forgotten"
    );
    ensure!(orphan.is_alive(), "the forked child lives");
    Ok(())
}

fn semaphore_refuses(context: &Context) -> Result<()> {
    let creator = Semaphore::new("forked", 3, context.domain.on(&context.device))?;
    let member = Semaphore::open("forked", context.domain.on(&context.device), Duration::ZERO)?;
    let stream = context.stream()?;
    let mut held = vec![
        member.acquire(&stream, PATIENCE)?,
        creator.acquire(&stream, PATIENCE)?,
    ];
    let code = in_a_child(|| {
        let (Some(released), Some(dropped)) = (held.pop(), held.pop()) else {
            return 254;
        };
        let refusals = [
            matches!(
                released.release(&stream),
                Err(Error::State(StateFault::Forked))
            ),
            matches!(
                member.acquire(&stream, Duration::ZERO),
                Err(Error::State(StateFault::Forked))
            ),
            matches!(
                member.acquire_host(Duration::ZERO).optional(),
                Err(Error::State(StateFault::Forked))
            ),
            matches!(
                creator.acquire_host(Duration::ZERO),
                Err(Error::State(StateFault::Forked))
            ),
        ];
        drop((dropped, member.clone(), creator.clone()));
        refusals
            .iter()
            .position(|refused| !refused)
            .map_or(0, |index| index as u8 + 1)
    })?;
    ensure!(
        code == 0,
        "operation {code} was not refused in the forked child"
    );
    ensure!(
        creator.state().available == 1,
        "the parent's permits are the parent's"
    );
    held.into_iter()
        .try_for_each(|permit| permit.release(&stream))?;
    stream.synchronize(PATIENCE)?;
    ensure!(creator.state().available == 3, "the parent gave them back");
    Ok(())
}

fn permit_despite_a_child(context: &Context) -> Result<()> {
    let semaphore = Semaphore::new("turns", 1, context.domain.on(&context.device))?;
    let mut peer = context.peer()?;
    peer.ask(&Order::Semaphore(SemaphoreOrder::Open {
        name: "turns".into(),
        waits: true,
    }))?;
    peer.ask(&Order::Semaphore(SemaphoreOrder::Acquire {
        timeout_ms: 1_000,
        on_stream: true,
    }))?;
    let orphan = peer.orphan(&Order::Fork)?;
    peer.kill()?;
    semaphore.acquire_host(PATIENCE)?.release_now();
    ensure!(orphan.is_alive(), "the forked child lives");
    Ok(())
}
