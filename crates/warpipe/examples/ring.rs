//! A stream of frames to a slow reader: no frame is lost, and the sender waits.
//!
//! The sender makes frames as fast as it can; the reader's device is busy for 2 ms with each of
//! them. At most 4 frames are in flight. Under `Policy::Block` the sender then waits inside `send`,
//! and each frame arrives, in order. (`DropOldest`, `DropNewest` and `Fail` are the other
//! policies.)
//!
//! **This module is marked for unsafe**: it launches kernels on device memory.
//!
//! ```text
//! cargo run -p warpipe --example ring                   # both processes
//! cargo run -p warpipe --example ring -- --role reader  # or: one terminal each, in any order
//! cargo run -p warpipe --example ring -- --role sender
//! ```
//!
//! It ends with `ok: 200 of 200 frames in order, none lost; the sender found the ring full N
//! times`, N above 0.

mod stage;

use std::process::ExitCode;
use std::time::Duration;

use stage::{Outcome, PATIENCE, Stage, ensure, play};
use warpipe::{DType, Layout, Policy, Publisher, PublisherOptions, Subscriber};

const NAME: &str = "frames";
const FRAMES: u64 = 200;
const DEPTH: u32 = 4;
const WORDS: u64 = 8192;

fn main() -> ExitCode {
    play(&[], |stage| match stage.role() {
        "sender" => send(stage),
        "reader" => read(stage),
        _ => {
            let sender = stage.start("sender")?;
            let line = read(stage)?;
            sender.finish()?;
            Ok(line)
        }
    })
}

fn send(stage: &Stage) -> Outcome<String> {
    let options = PublisherOptions {
        depth: DEPTH,
        policy: Policy::Block { timeout: PATIENCE },
        ..stage.domain.on(&stage.device)
    };
    let publisher = Publisher::new(NAME, options)?;
    publisher.wait_for_subscribers(1, PATIENCE)?;
    let stream = stage.device.stream()?;
    let layout = Layout::contiguous(DType::U64, &[WORDS])?;
    let mut waits: u64 = 0;
    for number in 1..=FRAMES {
        waits += u64::from(
            publisher
                .subscribers()
                .iter()
                .any(|reader| reader.in_flight == DEPTH),
        );
        let mut frame = publisher.loan(&layout)?;
        frame.set_metadata(&waits.to_ne_bytes())?;
        // SAFETY: the loan has WORDS words, and is ours alone until the stream has passed the
        // kernel.
        unsafe { warpipe_kernels::fill(&stream, frame.ptr(), WORDS, number)? };
        frame.send(&stream)?;
    }
    stream.synchronize(PATIENCE)?;
    Ok(format!(
        "sent {FRAMES} frames, and found the ring full {waits} times"
    ))
}

fn read(stage: &Stage) -> Outcome<String> {
    let mut subscriber = Subscriber::open(NAME, stage.domain.on(&stage.device), PATIENCE)?;
    let stream = stage.device.stream()?;
    let (mut frames, mut waits) = (0, 0);
    // The iterator ends when the sender has closed gracefully and every frame has been received.
    for frame in subscriber.samples(&stream, PATIENCE) {
        let frame = frame?;
        frames += 1;
        ensure(frame.sequence() == frames, || {
            format!("frame {} came where {frames} was due", frame.sequence())
        })?;
        let words = frame.to_vec(PATIENCE)?;
        let words = words
            .chunks_exact(8)
            .map(|word| u64::from_ne_bytes(word.try_into().expect("chunks of 8 bytes")));
        let right = words
            .zip(0..)
            .all(|(word, index)| word == warpipe_kernels::pattern(frames, index));
        ensure(right, || format!("frame {frames} has a wrong word"))?;
        waits = u64::from_ne_bytes(frame.metadata().try_into()?);
        // The slow part. The frame returns to the sender when the device has finished it, not
        // earlier.
        warpipe_kernels::spin(&stream, Duration::from_millis(2))?;
        drop(frame);
    }
    ensure(frames == FRAMES, || {
        format!("only {frames} of {FRAMES} frames came")
    })?;
    ensure(waits > 0, || "the sender never found the ring full".into())?;
    Ok(format!(
        "{frames} of {FRAMES} frames in order, none lost; the sender found the ring full {waits} times"
    ))
}
