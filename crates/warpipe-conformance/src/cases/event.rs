//! Events between processes: order, and two pitfalls of CUDA's own events.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use warpipe::backend::testing::{Counting, Delaying, Hook, Wrapped};
use warpipe::{Device, Error, Event, EventHandle, Pool, PoolClient};
use warpipe_testkit::eventually;

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
    let event = Event::open(&parse(&text)?, device)?;
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
        event.record(&stream)?;
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
            matches!(result, Err(Error::EventNotRecorded { .. })),
            "it gave {result:?}"
        );
    }
    peer.refuses(SignalOrder::WaitEvent, "EventNotRecorded")?;
    peer.refuses(SignalOrder::Query, "EventNotRecorded")?;
    ensure!(stream.is_idle()?, "nothing was enqueued");
    peer.dismiss()
}

fn lost(result: warpipe::Result<bool>, pid: u32) -> Result<()> {
    match result {
        Err(Error::EventLost { pid: found, .. }) if found == pid as i32 => Ok(()),
        other => bail!("the death of process {pid} gave {other:?}"),
    }
}

fn killed_exporter(context: &Context) -> Result<()> {
    for _ in 0..context.rounds(3, 30, 30) {
        let mut victim = context.peer()?;
        let text = victim.text(&Order::Signals(SignalOrder::CreateEvents(1)))?;
        let (event, mut witness) = (
            Event::open(&parse(&text)?, &context.device)?,
            context.peer()?,
        );
        witness.signals(SignalOrder::OpenEvent(text))?;
        let memory = share(context, &mut [&mut victim])?;
        victim.signals(SignalOrder::Write {
            seed: 1,
            slow_us: 5_000_000,
        })?;
        victim.signals(SignalOrder::Record)?;
        let stream = context.stream()?;
        let recording = event.wait(&stream)?;
        witness.signals(SignalOrder::WaitEvent)?;
        ensure!(
            !event.query()? && !stream.is_idle()?,
            "the kernel runs, and the stream waits"
        );
        victim.kill()?;
        stream
            .synchronize(PATIENCE)
            .context("a waiting stream is released")?;
        lost(event.check(recording), victim.id())?;
        lost(event.query(), victim.id())?;
        lost(event.wait(&stream).map(|_| true), victim.id())?;
        lost(event.synchronize(PATIENCE).map(|()| true), victim.id())?;
        let recorded = event.record(&stream);
        ensure!(
            matches!(
                recorded,
                Err(Error::PeerGone {
                    graceful: false,
                    ..
                })
            ),
            "recording gave {recorded:?}"
        );
        witness.signals(SignalOrder::Synchronize)?;
        witness.refuses(SignalOrder::CheckEvent, "EventLost")?;
        witness.dismiss()?;
        drop(memory);
        context.domain.clean()?;
    }
    Ok(())
}

fn killed_importer(context: &Context) -> Result<()> {
    let event = Event::builder()
        .domain(&context.domain)
        .device(&context.device)
        .build()?;
    let text = event.handle()?.to_string();
    let (mut victim, mut witness) = (context.peer()?, context.peer()?);
    let memory = share(context, &mut [&mut victim])?;
    victim.signals(SignalOrder::OpenEvent(text.clone()))?;
    witness.signals(SignalOrder::OpenEvent(text))?;
    victim.signals(SignalOrder::Write {
        seed: 1,
        slow_us: 5_000_000,
    })?;
    victim.signals(SignalOrder::Record)?;
    let stream = context.stream()?;
    let recording = event.wait(&stream)?;
    witness.signals(SignalOrder::WaitEvent)?;
    victim.kill()?;
    stream
        .synchronize(PATIENCE)
        .context("the exporter's stream is released")?;
    lost(event.check(recording), victim.id())?;
    witness
        .signals(SignalOrder::Synchronize)
        .context("a third one's stream is released")?;
    witness.refuses(SignalOrder::CheckEvent, "EventLost")?;
    event.record(&stream)?;
    witness.signals(SignalOrder::WaitEvent)?;
    witness.signals(SignalOrder::Synchronize)?;
    ensure!(
        witness.signals(SignalOrder::CheckEvent)? == Answer::Number(1),
        "recorded anew it is complete"
    );
    witness.signals(SignalOrder::Record)?;
    event.synchronize(PATIENCE)?;
    drop(memory);
    witness.dismiss()
}

/// Blocks allocations, as a driver may, while it is shut.
#[derive(Debug, Default)]
struct Gate {
    is_shut: Mutex<bool>,
    opened: Condvar,
    has_held: AtomicBool,
}

impl Gate {
    fn set(&self, is_shut: bool) {
        *self.is_shut.lock().unwrap_or_else(PoisonError::into_inner) = is_shut;
        self.opened.notify_all();
    }
}

impl Hook for Gate {
    fn before(&self, method: &'static str) -> warpipe::Result<()> {
        let is_shut = self.is_shut.lock().unwrap_or_else(PoisonError::into_inner);
        if method == "allocate" && *is_shut {
            self.has_held.store(true, SeqCst);
            drop(
                self.opened
                    .wait_timeout_while(is_shut, 3 * PATIENCE, |is_shut| *is_shut),
            );
        }
        Ok(())
    }
}

fn blocked_control_thread(context: &Context) -> Result<()> {
    let backend = Wrapped::new(context.device.backend().clone(), Gate::default());
    let (gate, slow) = (backend.hook(), Device::from_backend(backend.clone()));
    let pool = Pool::builder("pool")
        .domain(&context.domain)
        .device(&slow)
        .memory_limit(2 << 20)
        .build()?;
    let client = PoolClient::opener("pool")
        .domain(&context.domain)
        .device(&context.device)
        .open()?;
    let event = Event::builder()
        .domain(&context.domain)
        .device(&context.device)
        .build()?;
    let mut victim = context.peer()?;
    let _memory = share(context, &mut [&mut victim])?;
    victim.signals(SignalOrder::OpenEvent(event.handle()?.to_string()))?;
    victim.signals(SignalOrder::Write {
        seed: 1,
        slow_us: 5_000_000,
    })?;
    victim.signals(SignalOrder::Record)?;
    let stream = context.stream()?;
    let recording = event.wait(&stream)?;
    gate.set(true);
    let outcome = std::thread::scope(|scope| {
        scope.spawn(|| drop(client.allocate(4096)));
        let mut run = || -> Result<()> {
            ensure!(
                eventually(PATIENCE, || gate.has_held.load(SeqCst)),
                "the control thread is in the driver"
            );
            victim.kill()?;
            stream
                .synchronize(PATIENCE)
                .context("the exporter's stream is released")?;
            lost(event.check(recording), victim.id())
        };
        let outcome = run();
        gate.set(false);
        outcome
    });
    drop((client, pool));
    outcome
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
    event.record(&stream)?;
    ensure!(recorded() == 0, "an importer recorded CUDA's own event");
    event.synchronize(PATIENCE)?;
    // It lives until the count is taken: dropping values records events, too.
    let own = Event::builder()
        .domain(&context.domain)
        .device(&device)
        .build()?;
    own.record(&stream)?;
    ensure!(
        recorded() == 1,
        "an exporter records CUDA's own event along"
    );
    stream.synchronize(PATIENCE)?;
    peer.dismiss()
}

fn killed_anywhere(context: &Context) -> Result<()> {
    let mut rng = context.rng();
    let (mut complete, mut lost_ones) = (0u64, 0u64);
    let kills = context.kills(10, 200, 100);
    for round in 0..kills {
        let (mut peer, mut witness) = (context.mortal(&mut rng)?, context.peer()?);
        // The event's creator decides which side releases the waiters: its process or each waiter.
        let own = if round % 2 == 0 {
            Some(
                Event::builder()
                    .domain(&context.domain)
                    .device(&context.device)
                    .build()?,
            )
        } else {
            None
        };
        let text = match &own {
            Some(event) => event.handle()?.to_string(),
            None => peer.text(&Order::Signals(SignalOrder::CreateEvents(1)))?,
        };
        let event = Event::open(&parse(&text)?, &context.device)?;
        if own.is_some() {
            peer.signals(SignalOrder::OpenEvent(text.clone()))?;
        }
        witness.signals(SignalOrder::OpenEvent(text))?;
        let stream = context.stream()?;
        let _memory = share(context, &mut [&mut peer])?;
        peer.signals(SignalOrder::Record)?;
        for seed in 0..30 {
            peer.send(&Order::Signals(SignalOrder::Write { seed, slow_us: 500 }))?;
            peer.send(&Order::Signals(SignalOrder::Record))?;
        }
        let mut recordings = vec![event.wait(&stream)?];
        witness.signals(SignalOrder::WaitEvent)?;
        std::thread::park_timeout(Duration::from_micros(rng.u64(..12_000)));
        recordings.push(event.wait(&stream)?);
        peer.strike()?;
        for _ in 0..20 {
            match event.wait(&stream) {
                Ok(recording) => recordings.push(recording),
                Err(Error::EventLost { .. }) => {}
                Err(error) => bail!(error),
            }
        }
        peer.ended()?;
        stream
            .synchronize(PATIENCE)
            .context("a waiting stream is released")?;
        witness
            .signals(SignalOrder::Synchronize)
            .context("the other one's, too")?;
        for recording in recordings {
            match event.check(recording) {
                Ok(true) => complete += 1,
                Err(Error::EventLost { .. }) => lost_ones += 1,
                other => bail!("after the recorder's death a recording is {other:?}"),
            }
        }
        witness.dismiss()?;
        context.orphans_end()?;
        context.domain.clean()?;
    }
    context.figure_storm(kills)?;
    context.figure("complete", complete);
    context.figure("lost", lost_ones);
    Ok(())
}

fn complete_before_death(context: &Context) -> Result<()> {
    let (mut victim, event) = exporter(context, &context.device)?;
    victim.signals(SignalOrder::Record)?;
    event.synchronize(PATIENCE)?;
    let stream = context.stream()?;
    let own = context.stream()?;
    let recording = event.wait(&stream)?;
    victim.kill()?;
    let is_over = || matches!(event.record(&own), Err(Error::PeerGone { .. }));
    ensure!(
        eventually(PATIENCE, is_over),
        "the exporter's death is reported"
    );
    ensure!(
        event.check(recording)?,
        "a complete recording stays complete"
    );
    stream.synchronize(PATIENCE)?;
    Ok(own.synchronize(PATIENCE)?)
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
            event.record(&stream),
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
    match Event::open(&handle, &context.device) {
        Err(
            Error::NotFound { .. }
            | Error::PeerGone { graceful: true, .. }
            | Error::EventHandle { .. },
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
        .map(|_| {
            Event::builder()
                .domain(&context.domain)
                .device(&context.device)
                .build()
        })
        .collect::<warpipe::Result<Vec<Event>>>()
        .context("4096 events")?;
    match Event::builder()
        .domain(&context.domain)
        .device(&context.device)
        .build()
    {
        Err(Error::EventLimit { limit: 4096 }) => {}
        other => bail!("the 4097th event gave {other:?}"),
    }
    let mut peer = context.peer()?;
    for index in [0, 255, 256, 4095] {
        events[index].record(&stream)?;
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
        Event::builder()
            .domain(&context.domain)
            .device(&context.device)
            .build()
            .context("one was dropped, so there is room")?,
    );
    stream.synchronize(PATIENCE)?;
    drop(events);
    setrlimit(Resource::Nofile, before).context("setrlimit")?;
    peer.dismiss()
}

fn limit_of_recorders(context: &Context) -> Result<()> {
    let event = Event::builder()
        .domain(&context.domain)
        .device(&context.device)
        .build()?;
    let text = event.handle()?.to_string();
    let mut peer = context.peer()?;
    for _ in 0..7 {
        peer.signals(SignalOrder::OpenEvent(text.clone()))?;
        peer.signals(SignalOrder::Record)?;
    }
    peer.signals(SignalOrder::OpenEvent(text.clone()))?;
    peer.refuses(SignalOrder::Record, "Refused")?;
    event.synchronize(PATIENCE)?;
    peer.signals(SignalOrder::Close)?;
    let again = || -> Result<bool> {
        peer.signals(SignalOrder::OpenEvent(text.clone()))?;
        Ok(peer.try_ask(&Order::Signals(SignalOrder::Record))?.is_ok())
    };
    let mut again = again;
    ensure!(
        eventually(PATIENCE, || again().unwrap_or(false)),
        "the lanes of importers that left are free"
    );
    peer.signals(SignalOrder::Synchronize)?;
    peer.dismiss()
}

fn wrong_handles(context: &Context) -> Result<()> {
    let event = Event::builder()
        .domain(&context.domain)
        .device(&context.device)
        .build()?;
    let text = event.handle()?.to_string();
    let mut peer = context.peer()?;
    for wrong in [
        "",
        "garbage",
        "warpipe-event:00",
        &text[..text.len() - 2],
        &format!("{text}00"),
    ] {
        peer.refuses(SignalOrder::OpenEvent(wrong.to_string()), "EventHandle")?;
    }
    let mut changed = text.clone().into_bytes();
    for digit in changed.iter_mut().skip(50).step_by(7) {
        *digit = if *digit == b'0' { b'1' } else { b'0' };
    }
    peer.refuses(
        SignalOrder::OpenEvent(String::from_utf8(changed)?),
        "EventHandle",
    )?;
    peer.signals(SignalOrder::OpenEvent(text))?;

    let mut victim = context.peer()?;
    let text = victim.text(&Order::Signals(SignalOrder::CreateEvents(2)))?;
    peer.signals(SignalOrder::OpenEvent(text.clone()))?;
    victim.kill()?;
    let gone = peer.try_ask(&Order::Signals(SignalOrder::OpenEvent(text.clone())))?;
    let kind = gone.as_ref().map_err(|fault| fault.kind.as_str());
    ensure!(
        matches!(kind, Err("NotFound" | "PeerGone" | "LegacyHandle")),
        "a dead exporter's handle gave {gone:?}"
    );
    match Event::open(&parse(&text)?, &context.device) {
        Err(Error::NotFound {
            was_there: true, ..
        }) => {}
        other => bail!("a dead exporter's handle gave {other:?}"),
    }
    peer.dismiss()
}
