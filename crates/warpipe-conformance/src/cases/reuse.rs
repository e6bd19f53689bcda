//! Slots may be lent again only after the work enqueued on them is done, whatever call failed
//! meanwhile.

use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use warpipe::backend::testing::{Failing, Hook, Wrapped};
use warpipe::backend::{Backend, StreamOp};
use warpipe::{
    DType, Device, Error, Layout, LimitFault, Loss, Policy, Publisher, PublisherOptions, RawStream,
    SampleMut, Stream, Subscriber,
};
use warpipe_testkit::eventually;

use super::Case;
use crate::PATIENCE;
use crate::context::Context;
use crate::payload::Payload;

pub(super) const CASES: &[Case] = &[
    Case::new(
        "a slot is reused behind the copy of a send that failed",
        failed_copy,
    ),
    Case::new(
        "a sample is lost at once if its signal is refused, its slot reused behind its writer",
        refused_send,
    )
    .needs_queues(),
    Case::new(
        "a loan that was written on two streams is reused behind both",
        two_writers,
    ),
    Case::new(
        "a slot is reused behind the stream's work if its fence is refused",
        refused_fence,
    ),
    Case::new(
        "a slot is reused behind the stream's work if its only reader leaves during the send",
        departed_reader,
    ),
];

/// A quarter of the publisher's memory.
const WORDS: u64 = (512 << 10) / 8;
const SLOTS: usize = 4;

/// A publisher of four slots that does not wait for one, and a stream that is blocked until the
/// gate is opened.
struct Tight {
    failing: Arc<Wrapped<Failing>>,
    publisher: Publisher,
    held: Stream,
    gate: mpsc::Sender<()>,
}

impl Tight {
    fn new(context: &Context) -> Result<Tight> {
        let failing = Wrapped::new(context.device.backend().clone(), Failing::default());
        let device = Device::from_backend(failing.clone());
        let options = PublisherOptions {
            device: Some(device.clone()),
            memory_limit: 8 * WORDS * SLOTS as u64,
            depth: 1,
            policy: Policy::Fail,
            loan_timeout: Duration::ZERO,
            ..context.domain.on(&context.device)
        };
        let publisher = Publisher::new("tight", options)?;
        let (gate, opened) = mpsc::channel::<()>();
        let held = device.stream()?;
        let tight = Tight {
            failing,
            publisher,
            held,
            gate,
        };
        ensure!(tight.free()? == SLOTS, "nothing is in use yet");
        tight.held.call(move || _ = opened.recv_timeout(PATIENCE))?;
        Ok(tight)
    }

    fn loan(&self) -> warpipe::Result<SampleMut> {
        self.publisher
            .loan(&Layout::contiguous(DType::U64, &[WORDS])?)
    }

    /// How many slots can be lent just now.
    fn free(&self) -> Result<usize> {
        let mut loans = Vec::new();
        loop {
            match self.loan() {
                Ok(loan) => loans.push(loan),
                Err(Error::Limit(LimitFault::Memory { .. })) => return Ok(loans.len()),
                Err(other) => bail!(other),
            }
        }
    }

    /// One slot stays in use until the gate is opened, and dropping it writes no samples in the
    /// others.
    fn check(self, context: &Context) -> Result<()> {
        let subscriber = context.subscriber("tight")?;
        self.check_with(context, subscriber)
    }

    fn check_with(self, context: &Context, mut subscriber: Subscriber) -> Result<()> {
        ensure!(
            self.free()? == SLOTS - 1,
            "{} slots can be lent while one is still to be written",
            self.free()?
        );
        let (stream, mut error_counters) = (context.stream()?, context.error_counters()?);
        let others = self.publisher.device().stream()?;
        let loans: Vec<SampleMut> = (1..SLOTS as u64)
            .map(|seed| Payload::of(WORDS, seed).loan(&self.publisher, &others))
            .collect::<warpipe::Result<_>>()?;
        others.synchronize(PATIENCE)?;
        self.gate.send(())?;
        self.held.synchronize(PATIENCE)?;
        ensure!(
            eventually(PATIENCE, || self.publisher.subscribers()[0].in_flight == 0),
            "nothing is in flight any more"
        );
        for loan in loans {
            loan.send(&others)?;
            ensure!(
                error_counters.finish(subscriber.receive(&stream, PATIENCE)?)? == 0,
                "the next samples are whole"
            );
            ensure!(
                eventually(PATIENCE, || self.publisher.subscribers()[0].in_flight == 0),
                "it is released"
            );
        }
        let mut free = 0;
        let is_back = || {
            free = self.free().unwrap_or_default();
            free == SLOTS
        };
        ensure!(eventually(PATIENCE, is_back), "{free} slots are back");
        Ok(())
    }
}

fn failed_copy(context: &Context) -> Result<()> {
    let tight = Tight::new(context)?;
    let mut full = context.subscriber("tight")?;
    let stream = context.stream()?;
    // It has no room for more.
    Payload::of(WORDS, 98).send(&tight.publisher, &tight.publisher.device().stream()?)?;
    let bytes = vec![7; 8 * WORDS as usize];
    match tight.publisher.send_slice(
        &tight.held,
        &Layout::contiguous(DType::U64, &[WORDS])?,
        &bytes,
    ) {
        Err(Error::Limit(LimitFault::Depth { .. })) => {}
        other => bail!("a full subscriber gave {other:?}"),
    }
    full.receive(&stream, PATIENCE)?.finish(PATIENCE)?;
    stream.synchronize(PATIENCE)?;
    ensure!(
        eventually(PATIENCE, || tight.publisher.subscribers()[0].in_flight == 0),
        "it has released the sample"
    );
    // It stays: behind a function that blocks, which the library does not see, the driver
    // unregisters no segment of a link that has ended, and registers nothing else meanwhile.
    tight.check_with(context, full)
}

fn refused_send(context: &Context) -> Result<()> {
    let tight = Tight::new(context)?;
    let mut subscriber = context.subscriber("tight")?;
    let stream = context.stream()?;
    let loan = Payload::of(WORDS, 99).loan(&tight.publisher, &tight.held)?;
    tight.failing.hook().aim("batch", 1);
    match loan.send(&tight.held) {
        Err(failed) => ensure!(
            failed.returned.is_none(),
            "its subscriber has got an error: {failed}"
        ),
        Ok(sequence) => bail!("a refused signal sent {sequence}"),
    }
    let sample = subscriber.receive(&stream, PATIENCE)?;
    match sample.is_complete() {
        Err(Error::Lost(Loss::Sample { sequence: 1, .. })) => {}
        other => bail!("a sample without a signal gave {other:?}"),
    }
    ensure!(
        !stream.is_idle()?,
        "the reader's stream goes on while the sample is still written"
    );
    drop(sample);
    // It stays, as in `failed_copy`.
    tight.check_with(context, subscriber)?;
    Ok(stream.synchronize(PATIENCE)?)
}

fn two_writers(context: &Context) -> Result<()> {
    let tight = Tight::new(context)?;
    let idle = tight.publisher.device().stream()?;
    let bytes = vec![7; 8 * WORDS as usize];
    let mut loan = tight.loan()?;
    loan.write(&tight.held, &bytes)?;
    loan.write(&idle, &bytes)?;
    drop(loan);
    tight.check(context)
}

fn refused_fence(context: &Context) -> Result<()> {
    let tight = Tight::new(context)?;
    let loan = Payload::of(WORDS, 99).loan(&tight.publisher, &tight.held)?;
    tight.failing.hook().aim("batch", 1);
    ensure!(
        loan.discard(&tight.held).is_err(),
        "the driver refused its fence"
    );
    tight.check(context)
}

/// Drops a subscriber when the signals of a sample for it are about to be enqueued.
#[derive(Debug, Default)]
struct Departing(Mutex<Option<(Subscriber, Arc<Publisher>)>>);

impl Hook for Departing {
    fn before(&self, _method: &'static str) -> warpipe::Result<()> {
        Ok(())
    }

    fn batch(
        &self,
        _: &dyn Backend,
        _: RawStream,
        ops: &[StreamOp],
    ) -> warpipe::Result<Vec<StreamOp>> {
        let leaving = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((subscriber, publisher)) = leaving {
            drop(subscriber);
            eventually(PATIENCE, || publisher.subscribers().is_empty());
        }
        Ok(ops.to_vec())
    }
}

fn departed_reader(context: &Context) -> Result<()> {
    let backend = Wrapped::new(context.device.backend().clone(), Departing::default());
    let device = Device::from_backend(backend.clone());
    let layout = Layout::bytes_only(2 << 20)?;
    let publisher = Arc::new(Publisher::new(
        "departed",
        PublisherOptions {
            device: Some(device.clone()),
            memory_limit: 2 << 20,
            loan_timeout: Duration::ZERO,
            ..context.domain.on(&context.device)
        },
    )?);
    let subscriber = context.subscriber("departed")?;
    let (gate, opened) = mpsc::channel::<()>();
    let held = device.stream()?;
    let loan = publisher.loan(&layout)?;
    held.call(move || _ = opened.recv_timeout(PATIENCE))?;
    *backend
        .hook()
        .0
        .lock()
        .unwrap_or_else(PoisonError::into_inner) = Some((subscriber, publisher.clone()));
    loan.send(&held)?;
    ensure!(
        publisher.subscribers().is_empty(),
        "the subscriber has left during the send"
    );
    match publisher.loan(&layout) {
        Err(Error::Limit(LimitFault::Memory { .. })) => {}
        other => bail!("a slot was asked for before its stream had written it: {other:?}"),
    }
    drop(gate);
    held.synchronize(PATIENCE)?;
    ensure!(
        eventually(PATIENCE, || publisher.loan(&layout).is_ok()),
        "the slot does not come back"
    );
    Ok(())
}
