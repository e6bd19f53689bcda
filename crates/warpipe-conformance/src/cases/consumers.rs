//! Further users of a sample or a loan beside its own stream: frameworks with streams of their own.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use warpipe::backend::testing::{Delaying, Failing, Wrapped};
use warpipe::{Device, Error, Loss, Publisher, PublisherOptions};

use super::Case;
use crate::PATIENCE;
use crate::context::Context;
use crate::payload::Payload;
use crate::peer::{Batch, Order, PublisherPlan};

pub(super) const CASES: &[Case] = &[
    Case::new(
        "a second stream reads whole data if it waits for the sample, and too early if not",
        second_stream,
    ),
    Case::new(
        "a slot is returned behind the second stream's work",
        released_behind,
    ),
    Case::new(
        "a hold keeps a loan's memory mapped after its publisher",
        held_memory,
    ),
    Case::new(
        "a second stream of a lost sample gets an error",
        lost_sample,
    ),
];

const WORDS: u64 = 512;
const SLOW: Duration = Duration::from_millis(400);

/// No time is relied on: nobody begins to write before the careless one has read. Nor does any
/// stream of this process wait by then: those of one context share hardware queues, and the
/// careless one might stand behind the wait.
fn second_stream(context: &Context) -> Result<()> {
    let mut peer = context.peer()?;
    peer.publish(PublisherPlan::of("second"))?;
    let mut subscriber = context.subscriber("second")?;
    let blind = Delaying {
        signal_late: Duration::ZERO,
        waits: false,
    };
    let careless =
        Device::from_backend(Wrapped::new(context.device.backend().clone(), blind)).stream()?;
    let admitted = context.stream()?;
    let mut error_counters = context.error_counters()?;
    peer.ask(&Order::SendBehindGate(Batch::of(1, WORDS, 1)))?;
    let sample = subscriber.receive(&careless, PATIENCE)?;
    ensure!(
        !sample.is_complete()?,
        "the data is there before it is written"
    );
    let early = error_counters.check_sample_on(&sample, &careless)?;
    careless.synchronize(PATIENCE)?;
    sample.wait_on(&admitted)?;
    let whole = error_counters.check_sample_on(&sample, &admitted)?;
    ensure!(
        !admitted.is_idle()?,
        "the stream that was let in does not wait"
    );
    peer.ask(&Order::OpenGate)?;
    sample.release_on(&admitted)?.wait(PATIENCE)?;
    admitted.synchronize(PATIENCE)?;
    let (early, whole) = (
        early.map(|check| error_counters.wrong_words(check)),
        whole.map(|check| error_counters.wrong_words(check)),
    );
    ensure!(
        whole == Some(0),
        "the stream that was let in saw {whole:?} wrong words"
    );
    ensure!(
        early.is_some_and(|wrong| wrong > 0),
        "the control saw {early:?} wrong words: it proves nothing"
    );
    peer.dismiss()
}

fn released_behind(context: &Context) -> Result<()> {
    let publisher = context.publisher("behind")?;
    let mut subscriber = context.subscriber("behind")?;
    let (stream, busy) = (context.stream()?, context.stream()?);
    Payload::of(WORDS, 1).send(&publisher, &stream)?;
    let sample = subscriber.receive(&stream, PATIENCE)?;
    sample.wait_on(&busy)?;
    warpipe_kernels::spin(&busy, SLOW)?;
    sample.release_on(&busy)?.wait(PATIENCE)?;
    ensure!(
        publisher.subscribers()[0].in_flight == 1,
        "it was given back before the stream's work was done"
    );
    busy.synchronize(PATIENCE)?;
    ensure!(
        publisher.subscribers()[0].in_flight == 0,
        "it is given back by now"
    );
    Ok(())
}

fn held_memory(context: &Context) -> Result<()> {
    let publisher = context.publisher("hold")?;
    let stream = context.stream()?;
    let mut error_counters = context.error_counters()?;
    let loan = Payload::of(WORDS, 5).loan(&publisher, &stream)?;
    let (hold, words) = (loan.hold(), loan.slot_ptr());
    loan.send(&stream)?;
    drop(publisher);
    let check = error_counters.check_words(&stream, words, WORDS, 5, &hold)?;
    stream.synchronize(PATIENCE)?;
    ensure!(
        error_counters.wrong_words(check) == 0,
        "the memory is as it was sent"
    );
    Ok(())
}

fn lost_sample(context: &Context) -> Result<()> {
    let failing = Wrapped::new(context.device.backend().clone(), Failing::default());
    let device = Device::from_backend(failing.clone());
    let options = PublisherOptions {
        device: Some(device.clone()),
        ..context.domain.on(&context.device)
    };
    let publisher = Publisher::new("lost", options)?;
    let mut subscriber = context.subscriber("lost")?;
    let (sending, stream, late) = (device.stream()?, context.stream()?, context.stream()?);
    failing.hook().aim("batch", 1);
    ensure!(
        Payload::of(WORDS, 1).send(&publisher, &sending).is_err(),
        "the driver refused its signal"
    );
    let sample = subscriber.receive(&stream, PATIENCE)?;
    match sample.is_complete() {
        Err(Error::Lost(Loss::Sample { sequence: 1, .. })) => {}
        other => bail!("its signal was refused, and there came {other:?}"),
    }
    // Nothing is left to wait for: the stream must not be held for ever.
    sample.wait_on(&late)?;
    late.synchronize(PATIENCE)?;
    drop(sample);
    Ok(stream.synchronize(PATIENCE)?)
}
