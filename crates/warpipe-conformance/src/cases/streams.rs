//! Streams of the user: which are refused, and which calls must not wait for them. **This module is
//! marked for unsafe**: it names a device address to a publisher that is to refuse it.

use std::fmt::Debug;
use std::time::Duration;

use anyhow::{Result, ensure};
use warpipe::backend::testing::{Counting, Wrapped};
use warpipe::{
    Access, Device, DeviceId, Error, Event, Layout, LentBuffer, Memory, Pool, Semaphore, Stream,
    Timeline,
};

use super::Case;
use crate::PATIENCE;
use crate::context::Context;
use warpipe::OptionalExtension;

pub(super) const CASES: &[Case] = &[
    Case::new(
        "a channel refuses a stream of another device, and loses nothing by it",
        channels,
    ),
    Case::new(
        "a queue and a service refuse a stream of another device, and lose nothing by it",
        queues,
    ),
    Case::new(
        "bytes are written behind a stream that waits for a later signal of the same thread",
        written_behind,
    ),
    Case::new(
        "timelines, events, semaphores and memory refuse a stream of another device",
        words_and_memory,
    ),
];

/// A stream that is said to belong to another device of this kind.
fn foreign(context: &Context) -> Result<Stream> {
    let id = DeviceId {
        uuid: [0xee; 16],
        ..context.device.info().id
    };
    let posing = Wrapped::posing_as(context.device.backend().clone(), Counting::default(), id);
    Ok(Device::from_backend(posing).stream()?)
}

fn refused<T: Debug>(what: &str, outcome: Result<T, impl Into<Error>>) -> Result<()> {
    match outcome.map_err(Into::into) {
        Err(Error::Argument {
            argument: "stream", ..
        }) => Ok(()),
        other => anyhow::bail!("{what} gave {other:?}"),
    }
}

fn channels(context: &Context) -> Result<()> {
    let (stream, foreign) = (context.stream()?, foreign(context)?);
    let publisher = context.publisher("frames")?;
    let mut subscriber = context.subscriber("frames")?;
    let layout = Layout::bytes_only(4)?;
    refused("send_bytes", publisher.send_bytes(&foreign, b"lost"))?;
    let mut loan = publisher.loan(&layout)?;
    refused("write", loan.write(&foreign, b"lost"))?;
    loan.write(&stream, b"kept")?;
    // SAFETY: the source is this loan's own slot, as long as the layout; it is not read, since the
    // stream is refused.
    refused("send_device", unsafe {
        publisher.send_device(&foreign, &layout, loan.slot_ptr())
    })?;
    let failed = loan.send(&foreign).err();
    let failed = failed.ok_or_else(|| anyhow::anyhow!("send took the stream"))?;
    let loan = failed.returned;
    refused("send", Err::<(), _>(failed.error))?;
    let loan = loan.ok_or_else(|| anyhow::anyhow!("send kept the loan"))?;
    refused("discard", publisher.loan(&layout)?.discard(&foreign))?;
    ensure!(
        subscriber
            .receive(&stream, Duration::ZERO)
            .optional()?
            .is_none(),
        "something was sent all the same"
    );

    ensure!(loan.send(&stream)? == 1, "a refused send used a number up");
    refused("receive", subscriber.receive(&foreign, PATIENCE))?;
    let sample = subscriber.receive(&stream, PATIENCE)?;
    refused("wait_on", sample.wait_on(&foreign))?;
    ensure!(
        sample.to_vec(PATIENCE)? == b"kept",
        "the sample has changed"
    );
    refused("release_on", sample.release_on(&foreign))?;
    publisher.loan(&layout)?.send(&stream)?;
    subscriber.receive(&stream, PATIENCE)?.finish(PATIENCE)?;
    stream.synchronize(PATIENCE)?;
    Ok(())
}

fn queues(context: &Context) -> Result<()> {
    let (stream, foreign) = (context.stream()?, foreign(context)?);
    let queue = context.queue("jobs")?;
    let mut worker = context.worker("jobs")?;
    let mut loan = queue.loan(&Layout::bytes_only(3)?)?;
    refused("write", loan.write(&foreign, b"job"))?;
    loan.write(&stream, b"job")?;
    let failed = queue
        .submit(loan, &foreign)
        .err()
        .ok_or_else(|| anyhow::anyhow!("submit took the stream"))?;
    let loan = failed.returned;
    refused("submit", Err::<(), _>(failed.error))?;
    let job = queue.submit(
        *loan.ok_or_else(|| anyhow::anyhow!("submit kept the loan"))?,
        &stream,
    )?;
    refused("lease", worker.lease(&foreign, PATIENCE))?;
    let lease = worker.lease(&stream, PATIENCE)?;
    let (input, answer_handle) = (lease.input, lease.answer_handle);
    let failed = answer_handle
        .complete(None, &foreign, PATIENCE)
        .err()
        .ok_or_else(|| anyhow::anyhow!("complete took the stream"))?;
    let answer_handle = failed.returned.answer_handle;
    refused("complete", Err::<(), _>(failed.error))?;
    answer_handle
        .ok_or_else(|| anyhow::anyhow!("complete ended the answer handle"))?
        .complete(None, &stream, PATIENCE)?;
    drop(input);
    refused("wait", job.wait(&foreign, PATIENCE))?;
    refused("next_result", queue.next_result(&foreign, PATIENCE))?;
    job.wait(&stream, PATIENCE)?.sample.finish(PATIENCE)?;

    let mut server = context.server("answers")?;
    refused("accept", server.accept(&foreign, Duration::ZERO))?;
    Ok(())
}

fn words_and_memory(context: &Context) -> Result<()> {
    let (stream, foreign, device, domain) = (
        context.stream()?,
        foreign(context)?,
        &context.device,
        &context.domain,
    );
    let timeline = Timeline::new("steps", domain.on(device))?;
    refused("signal", timeline.signal(&foreign, 1, PATIENCE))?;
    timeline.signal(&stream, 1, PATIENCE)?;
    refused("wait", timeline.wait(&foreign, 1))?;

    let event = Event::new(domain.on(device))?;
    refused("record", event.record(&foreign, PATIENCE))?;
    event.record(&stream, PATIENCE)?;
    refused("wait", event.wait(&foreign))?;
    event.synchronize(PATIENCE)?;

    let semaphore = Semaphore::new("permits", 1, domain.on(device))?;
    refused("acquire", semaphore.acquire(&foreign, PATIENCE))?;
    refused(
        "release",
        semaphore.acquire(&stream, PATIENCE)?.release(&foreign),
    )?;

    let memory = Memory::allocate(device, 4)?;
    refused("a write", memory.write(&foreign, 0, b"lost"))?;
    let pool = Pool::new("scratch", domain.on(device))?;
    let block = pool.allocate(4, Duration::ZERO)?;
    refused("a block's write", block.write(&foreign, 0, b"lost"))?;
    let lent = LentBuffer::open(&block.lend(Access::ReadWrite)?, device, Duration::ZERO)?;
    refused("a lent block's write", lent.write(&foreign, 0, b"lost"))?;
    refused("a lent block's free", lent.free(&foreign))?;
    refused("a block's free", block.free(&foreign))?;
    ensure!(memory.to_vec(PATIENCE)? == [0; 4], "the memory was written");
    stream.synchronize(PATIENCE)?;
    Ok(())
}

/// The CPU must get through all of it before the stream goes on: nothing else releases it.
fn written_behind(context: &Context) -> Result<()> {
    let (stream, device) = (context.stream()?, &context.device);
    let steps = Timeline::new("steps", context.domain.on(device))?;
    let waiting = Timeline::open("steps", context.domain.on(device), Duration::ZERO)?;
    let bytes: Vec<u8> = (0..3 << 20).map(|place: u32| (place % 251) as u8).collect();
    let (mut written, mut memory) = (Vec::new(), Vec::new());
    for length in [4, 4096, 65_536, 65_537, 1 << 20, bytes.len()] {
        memory.push(Memory::allocate(device, length as u64)?);
        written.push(&bytes[..length]);
    }
    let publisher = context.publisher("frames")?;
    let mut subscriber = context.subscriber("frames")?;
    // Everything made on a first use is made before the stream blocks.
    publisher.send_bytes(&stream, &bytes[..8])?;
    subscriber.receive(&stream, PATIENCE)?.finish(PATIENCE)?;

    waiting.wait(&stream, 1)?;
    for (memory, bytes) in memory.iter().zip(&written) {
        memory.write(&stream, 0, bytes)?;
    }
    publisher.send_bytes(&stream, &bytes[..100_000])?;
    ensure!(!stream.is_idle()?, "nobody has let the stream go");
    steps.signal_now(1, PATIENCE)?;
    for (memory, bytes) in memory.iter().zip(&written) {
        ensure!(
            memory.to_vec(PATIENCE)? == *bytes,
            "other bytes came than the {} written",
            bytes.len()
        );
    }
    let sample = subscriber.receive(&context.stream()?, PATIENCE)?;
    ensure!(
        sample.to_vec(PATIENCE)? == bytes[..100_000],
        "the sample has other bytes"
    );
    drop(sample);
    stream.synchronize(PATIENCE)?;
    Ok(())
}
