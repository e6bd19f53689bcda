//! Events between processes: order, and two pitfalls of CUDA's own events.

mod deaths;

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use warpipe::backend::testing::{Counting, Delaying, Wrapped};
use warpipe::{Device, Error, Event, EventHandle, LimitFault, StateFault};
use warpipe_testkit::eventually;

use self::deaths::{
    blocked_control_thread, complete_before_death, killed_anywhere, killed_exporter,
    killed_importer,
};
use super::Case;
use crate::PATIENCE;
use crate::context::Context;
use crate::payload::ErrorCounters;
use crate::peer::{Answer, Order, Peer, SignalOrder};
use crate::shared::Shared;

pub(super) const CASES: &[Case] = &[
    Case::new(
        "an event's waiter reads the data of its recorder's late kernel, in both directions",
        either_side_records,
    ),
    Case::new(
        "an event's waiter that does not wait reads wrong words (negative control)",
        without_waits,
    ),
    Case::new(
        "a wait for an event that was never recorded is an error, not complete",
        never_recorded,
    ),
    Case::new(
        "an event is lost when its exporter is killed in the kernel, and waiters are released",
        killed_exporter,
    )
    .ends_clients(),
    Case::new(
        "an event is lost when an importer is killed in the kernel, and can be recorded again",
        killed_importer,
    )
    .ends_clients(),
    Case::new(
        "a killed importer's waiters are released though the exporter's control thread is blocked",
        blocked_control_thread,
    )
    .ends_clients(),
    Case::new(
        "an exporter's recording records CUDA's own event too, an importer's does not",
        untouched_raw,
    ),
    Case::new(
        "an event's recorders killed at any moment leave it complete or lost, no stream waiting",
        killed_anywhere,
    )
    .ends_clients()
    .long(600),
    Case::new(
        "a recording that was complete when its exporter died stays complete",
        complete_before_death,
    )
    .ends_clients(),
    Case::new(
        "an event that its exporter drops completes its last recording, and then closes",
        dropped_event,
    ),
    Case::new(
        "a process has 4096 events with 1024 descriptors, and the next one is a typed error",
        limit_of_events,
    ),
    Case::new(
        "an eighth importer that records an event is refused, until another importer leaves",
        limit_of_recorders,
    ),
    Case::new(
        "an event handle that is truncated, changed, foreign or of the dead is a typed error",
        wrong_handles,
    ),
];

fn parse(text: &str) -> Result<EventHandle> {
    Ok(text.parse()?)
}

/// A peer that has made an event, and the event as it is seen from here.
fn exporter(context: &Context, device: &Device) -> Result<(Peer, Event)> {
    let mut peer = context.peer()?;
    let text = peer.text(&Order::Signals(SignalOrder::CreateEvents(1)))?;
    let event = Event::open(&parse(&text)?, context.domain.on(device), Duration::ZERO)?;
    Ok((peer, event))
}

fn share(context: &Context, peers: &mut [&mut Peer]) -> Result<Shared> {
    let (memory, fd) = Shared::create(&context.device)?;
    for peer in peers {
        peer.signals(SignalOrder::Map(Shared::path(&fd)))?;
    }
    Ok(memory)
}

fn either_side_records(context: &Context) -> Result<()> {
    let (mut peer, event) = exporter(context, &context.device)?;
    let memory = share(context, &mut [&mut peer])?;
    let (stream, mut error_counters) = (context.stream()?, context.error_counters()?);
    for seed in 1..=5 {
        peer.signals(SignalOrder::Write {
            seed,
            slow_us: 40_000,
        })?;
        peer.signals(SignalOrder::Record)?;
        let recording = event.wait(&stream)?;
        let wrong = memory.wrong(&mut error_counters, &stream, seed)?;
        ensure!(
            wrong == 0 && event.check(recording)?,
            "{wrong} words were read before they were written"
        );

        memory.write(&stream, 100 + seed, Duration::from_millis(40))?;
        event.record(&stream, PATIENCE)?;
        peer.signals(SignalOrder::WaitEvent)?;
        let wrong = peer.number(&Order::Signals(SignalOrder::Read { seed: 100 + seed }))?;
        ensure!(
            wrong == 0,
            "the exporter read {wrong} words before they were written"
        );
        ensure!(
            peer.signals(SignalOrder::CheckEvent)? == Answer::Number(1),
            "and its check says so"
        );
        stream.synchronize(PATIENCE)?;
    }
    peer.dismiss()
}

fn without_waits(context: &Context) -> Result<()> {
    let delaying = Delaying {
        signal_late: Duration::ZERO,
        waits: false,
    };
    let blind = Device::from_backend(Wrapped::new(context.device.backend().clone(), delaying));
    let (mut peer, event) = exporter(context, &blind)?;
    let memory = share(context, &mut [&mut peer])?;
    let (stream, mut error_counters) = (blind.stream()?, ErrorCounters::new(&blind)?);
    let mut wrong = 0;
    for seed in 1..=3 {
        peer.signals(SignalOrder::Write {
            seed,
            slow_us: 200_000,
        })?;
        peer.signals(SignalOrder::Record)?;
        event.wait(&stream)?;
        wrong += memory.wrong(&mut error_counters, &stream, seed)?;
        event.synchronize(PATIENCE)?;
    }
    context.figure("wrong_words", wrong);
    ensure!(
        wrong > 0,
        "without its waits a reader saw no wrong word, so the other cases prove nothing"
    );
    peer.dismiss()
}

fn never_recorded(context: &Context) -> Result<()> {
    let (mut peer, event) = exporter(context, &context.device)?;
    let stream = context.stream()?;
    for result in [
        event.wait(&stream).map(drop),
        event.query().map(drop),
        event.synchronize(PATIENCE),
    ] {
        ensure!(
            matches!(result, Err(Error::State(StateFault::NotRecorded(_)))),
            "it gave {result:?}"
        );
    }
    peer.refuses(SignalOrder::WaitEvent, "StateFault::NotRecorded")?;
    peer.refuses(SignalOrder::Query, "StateFault::NotRecorded")?;
    ensure!(stream.is_idle()?, "nothing was enqueued");
    peer.dismiss()
}

fn untouched_raw(context: &Context) -> Result<()> {
    let backend = Wrapped::new(context.device.backend().clone(), Counting::default());
    let device = Device::from_backend(backend.clone());
    let recorded = || {
        backend
            .hook()
            .calls()
            .get("record_event")
            .copied()
            .unwrap_or(0)
    };
    let (peer, event) = exporter(context, &device)?;
    let stream = device.stream()?;
    event.record(&stream, PATIENCE)?;
    ensure!(recorded() == 0, "an importer recorded CUDA's own event");
    event.synchronize(PATIENCE)?;
    // It lives until the count is taken: dropping values records events, too.
    let own = Event::new(context.domain.on(&device))?;
    own.record(&stream, PATIENCE)?;
    ensure!(
        recorded() == 1,
        "an exporter records CUDA's own event along"
    );
    stream.synchronize(PATIENCE)?;
    peer.dismiss()
}

fn dropped_event(context: &Context) -> Result<()> {
    let (mut peer, event) = exporter(context, &context.device)?;
    let memory = share(context, &mut [&mut peer])?;
    let (stream, mut error_counters) = (context.stream()?, context.error_counters()?);
    peer.signals(SignalOrder::Write {
        seed: 3,
        slow_us: 100_000,
    })?;
    peer.signals(SignalOrder::Record)?;
    let recording = event.wait(&stream)?;
    peer.signals(SignalOrder::Close)?;
    let wrong = memory.wrong(&mut error_counters, &stream, 3)?;
    ensure!(
        wrong == 0 && event.check(recording)?,
        "{wrong} wrong words behind what was recorded"
    );
    let is_over = || {
        matches!(
            event.record(&stream, PATIENCE),
            Err(Error::PeerGone { graceful: true, .. })
        )
    };
    ensure!(
        eventually(PATIENCE, is_over),
        "recording it is an error by and by"
    );
    stream.synchronize(PATIENCE)?;
    let handle = event.handle()?;
    drop(event);
    match Event::open(&handle, context.domain.on(&context.device), Duration::ZERO) {
        Err(
            Error::NotFound { .. }
            | Error::PeerGone { graceful: true, .. }
            | Error::Handle {
                what: "event handle",
                ..
            },
        ) => {}
        other => bail!("opening a dropped event gave {other:?}"),
    }
    peer.dismiss()
}

fn limit_of_events(context: &Context) -> Result<()> {
    let before = getrlimit(Resource::Nofile);
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: Some(1024),
            ..before
        },
    )
    .context("setrlimit")?;
    let stream = context.stream()?;
    let mut events = (0..4096)
        .map(|_| Event::new(context.domain.on(&context.device)))
        .collect::<warpipe::Result<Vec<Event>>>()
        .context("4096 events")?;
    match Event::new(context.domain.on(&context.device)) {
        Err(Error::Limit(LimitFault::Events(4096))) => {}
        other => bail!("the 4097th event gave {other:?}"),
    }
    let mut peer = context.peer()?;
    for index in [0, 255, 256, 4095] {
        events[index].record(&stream, PATIENCE)?;
        peer.signals(SignalOrder::OpenEvent(events[index].handle()?.to_string()))?;
        peer.signals(SignalOrder::WaitEvent)?;
        peer.signals(SignalOrder::Synchronize)?;
        ensure!(
            peer.signals(SignalOrder::CheckEvent)? == Answer::Number(1),
            "event {index} is complete"
        );
    }
    // One that nobody else has open: what others use is free when they are done.
    drop(events.swap_remove(1000));
    drop(
        Event::new(context.domain.on(&context.device))
            .context("one was dropped, so there is room")?,
    );
    stream.synchronize(PATIENCE)?;
    drop(events);
    setrlimit(Resource::Nofile, before).context("setrlimit")?;
    peer.dismiss()
}

fn limit_of_recorders(context: &Context) -> Result<()> {
    let event = Event::new(context.domain.on(&context.device))?;
    let text = event.handle()?.to_string();
    let mut peers = Vec::new();
    for _ in 0..8 {
        let mut peer = context.peer()?;
        peer.signals(SignalOrder::OpenEvent(text.clone()))?;
        peers.push(peer);
    }
    let mut last = peers.pop().context("eight peers")?;
    for peer in &mut peers {
        peer.signals(SignalOrder::Record)?;
    }
    last.refuses(SignalOrder::Record, "Refused")?;
    event.synchronize(PATIENCE)?;
    peers[0].signals(SignalOrder::Close)?;
    let again = || {
        let recorded = last.try_ask(&Order::Signals(SignalOrder::Record));
        recorded.is_ok_and(|recorded| recorded.is_ok())
    };
    ensure!(
        eventually(PATIENCE, again),
        "the lane of an importer that left is free"
    );
    last.signals(SignalOrder::Synchronize)?;
    peers.push(last);
    peers.into_iter().try_for_each(Peer::dismiss)
}

fn wrong_handles(context: &Context) -> Result<()> {
    let event = Event::new(context.domain.on(&context.device))?;
    let text = event.handle()?.to_string();
    let mut peer = context.peer()?;
    for wrong in [
        "",
        "garbage",
        "warpipe-event:00",
        &text[..text.len() - 2],
        &format!("{text}00"),
    ] {
        peer.refuses(SignalOrder::OpenEvent(wrong.to_string()), "Handle")?;
    }
    let mut changed = text.clone().into_bytes();
    for digit in changed.iter_mut().skip(50).step_by(7) {
        *digit = if *digit == b'0' { b'1' } else { b'0' };
    }
    peer.refuses(
        SignalOrder::OpenEvent(String::from_utf8(changed)?),
        "Handle",
    )?;
    peer.signals(SignalOrder::OpenEvent(text))?;

    let mut victim = context.peer()?;
    let text = victim.text(&Order::Signals(SignalOrder::CreateEvents(2)))?;
    peer.signals(SignalOrder::OpenEvent(text.clone()))?;
    victim.kill()?;
    let gone = peer.try_ask(&Order::Signals(SignalOrder::OpenEvent(text.clone())))?;
    let kind = gone.as_ref().map_err(|fault| fault.kind.as_str());
    ensure!(
        matches!(kind, Err("NotFound" | "PeerGone" | "Handle")),
        "a dead exporter's handle gave {gone:?}"
    );
    match Event::open(
        &parse(&text)?,
        context.domain.on(&context.device),
        Duration::ZERO,
    ) {
        Err(Error::NotFound {
            was_there: true, ..
        }) => {}
        other => bail!("a dead exporter's handle gave {other:?}"),
    }
    peer.dismiss()
}
