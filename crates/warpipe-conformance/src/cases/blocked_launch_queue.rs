//! The process goes on while a full launch queue blocks a call of the driver.
//!
//! A stream that waits for a peer takes about a thousand further operations; the call that gives it
//! one more blocks in the driver, and so does every other call for that stream. The library's own
//! threads must not block there: they release the stream when that peer dies.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use warpipe::backend::StreamOp;
use warpipe::backend::host::HostBackend;
use warpipe::backend::testing::{Hook, Wrapped};
use warpipe::{
    DType, Device, Error, Layout, Loss, PeerState, Policy, Publisher, PublisherOptions, RawStream,
    Sample, Stream, Subscriber, SubscriberOptions,
};
use warpipe_testkit::eventually;

use super::Case;
use crate::PATIENCE;
use crate::context::{Backend, Context};
use crate::payload::Payload;
use crate::peer::{Batch, Order, Peer, PublisherPlan};
use warpipe::OptionalExtension;

pub(super) const CASES: &[Case] = &[
    Case::new(
        "a send blocked by a full launch queue stops no heartbeat and ends at a peer's death",
        held_up_send,
    )
    .ends_clients(),
    Case::new(
        "subscribers attach, leave and die while a full launch queue blocks a send",
        subscribers,
    )
    .ends_clients(),
    Case::new(
        "a late joiner gets a sample in mid-send, and the history waits for no signal",
        joiner,
    )
    .needs_queues(),
];

const WORDS: u64 = 64;
/// More operations than any driver queues behind one that waits.
const SENDS: u64 = 8_000;

/// A stream that waits for another process's sample, and a thread with sends that it blocks.
struct HeldUp {
    upstream: Peer,
    waiting: Sample,
    _subscriber: Subscriber,
    /// Has used the stream, too: dropping its memory queries that stream.
    aside: Option<Subscriber>,
    /// Kept: a driver that unregisters memory waits for all streams, and lets nothing be registered
    /// meanwhile.
    _other: Publisher,
    stream: Stream,
    publisher: Arc<Publisher>,
    sent: Arc<AtomicU64>,
    sender: JoinHandle<warpipe::Result<()>>,
}

impl HeldUp {
    fn new(context: &Context) -> Result<HeldUp> {
        // The host's own streams take more than anybody sends.
        let device = match context.settings.backend {
            Backend::Host => Device::from_backend(HostBackend::with_short_queues()),
            Backend::Cuda => context.device.clone(),
        };
        let mut upstream = context.peer()?;
        upstream.publish(PublisherPlan::of("upstream"))?;
        let options = SubscriberOptions {
            device: Some(device.clone()),
            ..context.domain.on(&context.device)
        };
        let mut subscriber = Subscriber::open("upstream", options, Duration::ZERO)?;
        let stream = device.stream()?;
        let other = Publisher::new(
            "aside",
            PublisherOptions {
                device: Some(device.clone()),
                ..context.domain.on(&context.device)
            },
        )?;
        let mut aside = Subscriber::open(
            "aside",
            SubscriberOptions {
                device: Some(device.clone()),
                ..context.domain.on(&context.device)
            },
            Duration::ZERO,
        )?;
        other.send_bytes(&stream, b"before")?;
        aside.receive(&stream, PATIENCE)?.finish(PATIENCE)?;
        upstream.ask(&Order::SendBehindGate(Batch::of(1, WORDS, 1)))?;
        let waiting = subscriber.receive(&stream, PATIENCE)?;
        let publisher = Arc::new(Publisher::new(
            "downstream",
            PublisherOptions {
                device: Some(device.clone()),
                policy: Policy::DropNewest,
                depth: 4,
                ..context.domain.on(&context.device)
            },
        )?);
        let sent = Arc::new(AtomicU64::new(0));
        let sender = std::thread::spawn({
            let (publisher, stream, sent) = (publisher.clone(), stream.clone(), sent.clone());
            move || {
                let layout = Layout::contiguous(DType::U64, &[1])?;
                for _ in 0..SENDS {
                    publisher.loan(&layout)?.send(&stream)?;
                    sent.fetch_add(1, SeqCst);
                }
                Ok(())
            }
        });
        Ok(HeldUp {
            upstream,
            waiting,
            _subscriber: subscriber,
            aside: Some(aside),
            _other: other,
            stream,
            publisher,
            sent,
            sender,
        })
    }

    /// Waits until no send has come through for a while.
    fn settle(&self) -> Result<()> {
        let (mut last, mut since) = (0, Instant::now());
        let is_held_up = || {
            let now = self.sent.load(SeqCst);
            if now != last {
                (last, since) = (now, Instant::now());
            }
            now > 0 && since.elapsed() > Duration::from_millis(300)
        };
        ensure!(
            eventually(PATIENCE, is_held_up),
            "the sends do not come to a halt"
        );
        ensure!(
            last < SENDS && !self.sender.is_finished(),
            "nothing was held up by {last} sends"
        );
        Ok(())
    }

    /// Kills the process that the stream waits for: everything goes on.
    fn release(self) -> Result<()> {
        let HeldUp {
            mut upstream,
            waiting,
            stream,
            sender,
            ..
        } = self;
        upstream.kill()?;
        ensure!(
            eventually(PATIENCE, || sender.is_finished()),
            "the stream is not let go"
        );
        sender
            .join()
            .map_err(|_| anyhow::anyhow!("a panic"))?
            .context("the sends that were held up")?;
        stream.synchronize(PATIENCE)?;
        match waiting.finish(PATIENCE) {
            Err(Error::Lost(Loss::Sample { .. })) => Ok(()),
            other => bail!("the sample of a dead process gave {other:?}"),
        }
    }
}

fn held_up_send(context: &Context) -> Result<()> {
    let held = HeldUp::new(context)?;
    let mut witness = context.peer()?;
    witness.subscribe("downstream")?;
    held.settle()?;
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(1_500) {
        let state = witness.text(&Order::PublisherState { subscriber: 0 })?;
        ensure!(
            state == "Some(Alive)",
            "its subscriber sees the publisher {state}"
        );
    }
    held.release()?;
    witness.dismiss()
}

fn subscribers(context: &Context) -> Result<()> {
    let mut held = HeldUp::new(context)?;
    let (mut mortal, mut leaver, mut late) = (context.peer()?, context.peer()?, context.peer()?);
    mortal.subscribe("downstream")?;
    leaver.subscribe("downstream")?;
    held.settle()?;
    // Newcomers first: when a link has ended, the driver unregisters its segment only behind every
    // stream of the context, and registers nothing meanwhile.
    late.subscribe("downstream")?;
    let other = context.publisher("other")?;
    late.subscribe("other")?;
    drop(held.aside.take());
    mortal.kill()?;
    leaver.dismiss()?;
    let is_alive = |one: &&warpipe::SubscriberInfo| one.state == PeerState::Alive;
    let alive = || held.publisher.subscribers().iter().filter(is_alive).count();
    ensure!(
        eventually(PATIENCE, || alive() == 1),
        "{} subscribers are alive instead of one",
        alive()
    );
    drop(other);
    held.release()?;
    late.dismiss()
}

/// Holds up the first signals, and writes down in what order signals and waits come to the driver.
#[derive(Debug, Default)]
struct HeldSignals {
    state: Mutex<(bool, Vec<&'static str>)>,
    changed: Condvar,
}

impl HeldSignals {
    fn lock(&self) -> MutexGuard<'_, (bool, Vec<&'static str>)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Hook for HeldSignals {
    fn before(&self, _method: &'static str) -> warpipe::Result<()> {
        Ok(())
    }

    fn batch(
        &self,
        _: &dyn warpipe::backend::Backend,
        _: RawStream,
        ops: &[StreamOp],
    ) -> warpipe::Result<Vec<StreamOp>> {
        let waits = ops.iter().any(|op| matches!(op, StreamOp::Wait { .. }));
        let mut state = self.lock();
        state.1.push(if waits {
            "wait begins"
        } else {
            "signals begin"
        });
        self.changed.notify_all();
        if !waits {
            let held = self
                .changed
                .wait_timeout_while(state, PATIENCE, |(is_open, _)| !*is_open);
            held.unwrap_or_else(PoisonError::into_inner)
                .0
                .1
                .push("signals end");
        }
        Ok(ops.to_vec())
    }
}

fn joiner(context: &Context) -> Result<()> {
    let backend = Wrapped::new(context.device.backend().clone(), HeldSignals::default());
    let (hook, device) = (backend.hook(), Device::from_backend(backend.clone()));
    let options = PublisherOptions {
        device: Some(device.clone()),
        history: 2,
        ..context.domain.on(&context.device)
    };
    let publisher = Publisher::new("joined", options)?;
    let (sending, receiving) = (device.stream()?, context.stream()?);
    let (gate, opened) = std::sync::mpsc::channel::<()>();
    // The sample is not complete when the joiner gets it: a stream has to wait for it.
    sending.call(move || _ = opened.recv_timeout(PATIENCE))?;
    let mut late = std::thread::scope(|scope| {
        let sender = scope.spawn(|| Payload::of(WORDS, 1).send(&publisher, &sending));
        let late = (|| {
            let is_held_up = || !hook.lock().1.is_empty();
            ensure!(
                eventually(PATIENCE, is_held_up),
                "the send comes to the driver"
            );
            let mut late = context.subscriber("joined")?;
            ensure!(
                late.receive(&receiving, Duration::ZERO)
                    .optional()?
                    .is_none(),
                "it is not let in while a sample is on its way"
            );
            Ok(late)
        })();
        hook.lock().0 = true;
        hook.changed.notify_all();
        sender.join().map_err(|_| anyhow::anyhow!("a panic"))??;
        late
    })?;
    let sample = late.receive(&receiving, PATIENCE)?;
    ensure!(
        hook.lock().1 == ["signals begin", "signals end"],
        "{:?}",
        hook.lock().1
    );
    drop(gate);
    ensure!(context.error_counters()?.finish(sample)? == 0, "whole");
    Payload::of(WORDS, 2).send(&publisher, &sending)?;
    ensure!(
        context
            .error_counters()?
            .finish(late.receive(&receiving, PATIENCE)?)?
            == 0,
        "what is sent afterwards comes, too"
    );
    Ok(())
}
