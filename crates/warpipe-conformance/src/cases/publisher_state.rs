//! A stream that waits for another process holds up nothing else: neither allocations nor
//! newcomers.

use std::sync::mpsc;

use anyhow::{Context as _, Result, bail, ensure};
use warpipe::{Device, DevicePtr, Publisher, Stream, Timeline};

use super::Case;
use crate::PATIENCE;
use crate::context::Context;
use crate::peer::SignalOrder;

pub(super) const CASES: &[Case] = &[Case::new(
    "while a stream waits for another process, links end, new peers attach and memory is allocated",
    ended_links,
)];

const NAME: &str = "steps";

/// The second newcomer would wait for the first one's segment to be unregistered.
const ROUNDS: usize = 8;

fn ended_links(context: &Context) -> Result<()> {
    let mut peer = context.peer()?;
    peer.signals(SignalOrder::CreateTimeline(NAME.into()))?;
    let timeline = Timeline::open(NAME, context.domain.on(&context.device), PATIENCE)?;
    let (held, stream) = (context.stream()?, context.stream()?);
    let publisher = context.publisher("frames")?;
    timeline.wait(&held, 1)?;
    let (done_sender, done_receiver) = mpsc::channel();
    let (publisher, stream) = (&publisher, &stream);
    let found = std::thread::scope(|scope| {
        let coming_and_going = scope.spawn(move || {
            let done = come_and_go(context, publisher, stream);
            _ = done_sender.send(());
            done
        });
        let is_done = done_receiver.recv_timeout(PATIENCE).is_ok();
        let is_held = !held.is_idle()?;
        // Release the held stream, whatever the outcome.
        peer.signals(SignalOrder::Signal(1))?;
        let allocated = coming_and_going
            .join()
            .map_err(|_| anyhow::anyhow!("the other thread has panicked"))??;
        Ok::<_, anyhow::Error>((is_done, is_held, allocated))
    });
    let (is_done, is_held, allocated) = found?;
    held.synchronize(PATIENCE)?;
    for pointer in allocated {
        // SAFETY: allocated in `come_and_go`, freed once, and given to no stream.
        unsafe { context.device.backend().free_plain(pointer)? };
    }
    ensure!(is_held, "the stream waits until the other process signals");
    ensure!(is_done, "newcomers or allocations waited for the stream");
    peer.dismiss()
}

fn come_and_go(
    context: &Context,
    publisher: &Publisher,
    stream: &Stream,
) -> Result<Vec<DevicePtr>> {
    let mut allocated = Vec::new();
    for round in 0..ROUNDS {
        let mut subscriber = context.subscriber("frames").context("a newcomer")?;
        publisher.wait_for_subscribers(1, PATIENCE)?;
        publisher.send_bytes(stream, &[round as u8])?;
        let sample = subscriber.receive(stream, PATIENCE)?;
        sample.finish(PATIENCE)?;
        allocated.push(allocate(&context.device)?);
        drop(subscriber);
    }
    Ok(allocated)
}

fn allocate(device: &Device) -> Result<DevicePtr> {
    match device.backend().allocate_plain(1 << 20) {
        Ok(pointer) => Ok(pointer),
        Err(error) => bail!("{error} when 1 MiB was allocated"),
    }
}
