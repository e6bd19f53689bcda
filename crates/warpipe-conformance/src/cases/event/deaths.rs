//! Events of processes that are killed.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use warpipe::backend::testing::{Hook, Wrapped};
use warpipe::{Device, Error, Event, Loss, Pool, PoolClient, PoolOptions};
use warpipe_testkit::eventually;

use super::{exporter, parse, share};
use crate::PATIENCE;
use crate::context::Context;
use crate::peer::{Answer, Order, SignalOrder};

fn lost(result: warpipe::Result<bool>, pid: u32) -> Result<()> {
    match result {
        Err(Error::Lost(Loss::Event { pid: found, .. })) if found == pid as i32 => Ok(()),
        other => bail!("the death of process {pid} gave {other:?}"),
    }
}

pub(super) fn killed_exporter(context: &Context) -> Result<()> {
    for _ in 0..context.rounds(3, 30, 30) {
        let mut victim = context.peer()?;
        let text = victim.text(&Order::Signals(SignalOrder::CreateEvents(1)))?;
        let (event, mut witness) = (
            Event::open(
                &parse(&text)?,
                context.domain.on(&context.device),
                Duration::ZERO,
            )?,
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
        let recorded = event.record(&stream, PATIENCE);
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
        witness.refuses(SignalOrder::CheckEvent, "Loss::Event")?;
        witness.dismiss()?;
        drop(memory);
        context.domain.clean()?;
    }
    Ok(())
}

pub(super) fn killed_importer(context: &Context) -> Result<()> {
    let event = Event::new(context.domain.on(&context.device))?;
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
    witness.refuses(SignalOrder::CheckEvent, "Loss::Event")?;
    event.record(&stream, PATIENCE)?;
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

pub(super) fn blocked_control_thread(context: &Context) -> Result<()> {
    let backend = Wrapped::new(context.device.backend().clone(), Gate::default());
    let (gate, slow) = (backend.hook(), Device::from_backend(backend.clone()));
    let options = PoolOptions {
        memory_limit: 2 << 20,
        ..context.domain.on(&slow)
    };
    let pool = Pool::new("pool", options)?;
    let client = PoolClient::open("pool", context.domain.on(&context.device), Duration::ZERO)?;
    let event = Event::new(context.domain.on(&context.device))?;
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
        scope.spawn(|| drop(client.allocate(4096, Duration::ZERO)));
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

pub(super) fn killed_anywhere(context: &Context) -> Result<()> {
    let mut rng = context.rng();
    let (mut complete, mut lost_ones) = (0u64, 0u64);
    let kills = context.kills(10, 200, 100);
    for round in 0..kills {
        let (mut peer, mut witness) = (context.mortal(&mut rng)?, context.peer()?);
        // The event's creator decides which side releases the waiters: its process or each waiter.
        let own = if round % 2 == 0 {
            Some(Event::new(context.domain.on(&context.device))?)
        } else {
            None
        };
        let text = match &own {
            Some(event) => event.handle()?.to_string(),
            None => peer.text(&Order::Signals(SignalOrder::CreateEvents(1)))?,
        };
        let event = Event::open(
            &parse(&text)?,
            context.domain.on(&context.device),
            Duration::ZERO,
        )?;
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
                Err(Error::Lost(Loss::Event { .. })) => {}
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
                Err(Error::Lost(Loss::Event { .. })) => lost_ones += 1,
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

pub(super) fn complete_before_death(context: &Context) -> Result<()> {
    let (mut victim, event) = exporter(context, &context.device)?;
    victim.signals(SignalOrder::Record)?;
    event.synchronize(PATIENCE)?;
    let stream = context.stream()?;
    let own = context.stream()?;
    let recording = event.wait(&stream)?;
    victim.kill()?;
    let is_over = || matches!(event.record(&own, PATIENCE), Err(Error::PeerGone { .. }));
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
