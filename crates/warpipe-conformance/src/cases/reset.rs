//! A device that is reset while it is in use (`cudaDeviceReset`).

use std::fmt::Debug;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use warpipe::{Device, DeviceFault, Error, Memory, Publisher, Subscriber, Timeline};
use warpipe_testkit::eventually;

use super::Case;
use crate::PATIENCE;
use crate::context::Context;
use crate::device_words::{fill, wrong_words};
use crate::graph::Graphs;
use crate::payload::{ErrorCounters, Payload};

pub(super) const CASES: &[Case] = &[Case::new(
    "a device is opened anew after a reset, and objects made before the reset touch nothing",
    reset,
)];

const WORDS: u64 = 4096;

fn is_reset<T: Debug>(what: &str, outcome: Result<T, impl Into<Error>>) -> Result<()> {
    match outcome.map_err(Into::into) {
        Err(Error::Device {
            fault: DeviceFault::Reset,
            ..
        }) => Ok(()),
        other => bail!("{what} gave {other:?}"),
    }
}

fn reset(context: &Context) -> Result<()> {
    let graphs = Graphs::of(context)?;
    let stream = context.stream()?;
    let publisher = context.publisher("before")?;
    let mut subscriber = context.subscriber("before")?;
    Payload::of(WORDS, 1).send(&publisher, &stream)?;
    let sample = subscriber.receive(&stream, PATIENCE)?;
    let timeline = Timeline::new("steps", context.domain.on(&context.device))?;
    let memory = Memory::allocate(&context.device, 8 * WORDS)?;
    fill(&memory, &stream, 2, Duration::ZERO, true)?;
    stream.synchronize(PATIENCE)?;
    graphs.reset_device()?;
    is_reset("allocate", Memory::allocate(&context.device, 8 * WORDS))?;
    let device = Device::cuda(0)?;
    warpipe_kernels::preload(&device)?;
    is_reset("stream", context.stream())?;
    is_reset("is_idle", stream.is_idle())?;
    is_reset("send_bytes", publisher.send_bytes(&stream, b"lost"))?;
    is_reset("receive", subscriber.receive(&stream, PATIENCE))?;
    is_reset("signal", timeline.signal(&stream, 1, PATIENCE))?;
    is_reset("a write", memory.write(&stream, 0, b"lost"))?;

    let stream_after = device.stream()?;
    let after = Memory::allocate(&device, 8 * WORDS)?;
    fill(&after, &stream_after, 3, Duration::ZERO, true)?;
    drop((sample, subscriber, publisher, timeline, memory, stream));
    let is_over = || warpipe::process_stats().dropping == 0;
    ensure!(
        eventually(PATIENCE, is_over),
        "what was made before still waits: {:?}",
        warpipe::process_stats()
    );
    let mut error_counters = ErrorCounters::new(&device)?;
    let wrong = wrong_words(&after, &stream_after, &mut error_counters, 3)?;
    ensure!(
        wrong == 0,
        "{wrong} wrong words: the old memory was freed in the new context"
    );
    let publisher = Publisher::new("after", context.domain.on(&device))?;
    let mut subscriber = Subscriber::open("after", context.domain.on(&device), Duration::ZERO)?;
    Payload::of(WORDS, 4).send(&publisher, &stream_after)?;
    let wrong = error_counters.finish(subscriber.receive(&stream_after, PATIENCE)?)?;
    ensure!(
        wrong == 0,
        "{wrong} wrong words in a sample after the reset"
    );
    drop((subscriber, publisher));
    // Some memory of before may stay: the publisher's, the subscriber's mapping of it, and its
    // own.
    let is_over = || warpipe::process_stats().dropping == 0 && warpipe::process_stats().kept <= 3;
    ensure!(
        eventually(PATIENCE, is_over),
        "more than the memory of before is kept: {:?}",
        warpipe::process_stats()
    );
    Ok(())
}
