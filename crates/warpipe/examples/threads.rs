//! Threads of one process: each sees the publisher's own memory, at an address of its own.
//!
//! A name works within a process as it does between two. Each thread subscribes and reads every
//! frame where the publisher wrote it: the same bytes of memory, mapped once more for each
//! subscriber. Two facts show that no frame was copied: a thread's address of a frame differs from
//! the publisher's by the same number for each frame, and however many threads read, the
//! publisher's device memory stays what it was.
//!
//! ```text
//! cargo run -p warpipe --example threads
//! ```
//!
//! It ends with `ok: 4 threads read 20 frames each in the publisher's own memory; nothing was
//! copied`.

mod stage;

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::thread;

use stage::{Outcome, PATIENCE, Stage, ensure, play};
use warpipe::{Publisher, Result, Subscriber};

const NAME: &str = "board";
const THREADS: usize = 4;
const FRAMES: u64 = 20;
const BYTES: usize = 1 << 16;

/// The frames that a thread read: the address of each, and whether it was right.
type Seen = Vec<(u64, bool)>;

fn main() -> ExitCode {
    play(&[], run)
}

fn run(stage: &Stage) -> Outcome<String> {
    let publisher = Publisher::new(NAME, stage.domain.on(&stage.device))?;
    let (written, seen, memory) = thread::scope(|scope| {
        let readers: Vec<_> = (0..THREADS).map(|_| scope.spawn(|| read(stage))).collect();
        publisher.wait_for_subscribers(THREADS, PATIENCE)?;
        let written = write(stage, &publisher)?;
        let memory = publisher.stats()?.memory_bytes;
        let seen: Result<Vec<Seen>> = readers
            .into_iter()
            .map(|reader| reader.join().expect("no panic"))
            .collect();
        Ok::<_, warpipe::Error>((written, seen?, memory))
    })?;
    for (number, seen) in seen.iter().enumerate() {
        ensure(seen.len() as u64 == FRAMES, || {
            format!("thread {number} saw {} frames", seen.len())
        })?;
        ensure(seen.iter().all(|&(_, right)| right), || {
            format!("thread {number} read a wrong byte")
        })?;
        let pairs = written.iter().zip(seen);
        let shifts: BTreeSet<i64> = pairs
            .map(|(own, (theirs, _))| theirs.wrapping_sub(*own) as i64)
            .collect();
        ensure(shifts.len() == 1, || {
            format!("thread {number} read other memory than was written: {shifts:?}")
        })?;
        println!(
            "thread {number}: its addresses are the publisher's {:+} bytes",
            shifts.first().unwrap_or(&0)
        );
    }
    let region = publisher.stats()?.memory_bytes;
    ensure(memory == region, || {
        format!("the readers' end changed the memory from {memory} to {region} bytes")
    })?;
    println!(
        "the publisher holds {} KiB of device memory for all of them",
        memory >> 10
    );
    Ok(format!(
        "{THREADS} threads read {FRAMES} frames each in the publisher's own memory; nothing was copied"
    ))
}

/// Sends the frames and returns the address of each.
fn write(stage: &Stage, publisher: &Publisher) -> Result<Vec<u64>> {
    let stream = stage.device.stream()?;
    let layout = warpipe::Layout::bytes_only(BYTES as u64)?;
    let mut addresses = Vec::new();
    for number in 1..=FRAMES {
        let mut frame = publisher.loan(&layout)?;
        addresses.push(frame.ptr());
        frame.write(&stream, &[number as u8; BYTES])?;
        frame.send(&stream)?;
    }
    stream.synchronize(PATIENCE)?;
    Ok(addresses)
}

/// One thread: a subscriber and a stream of its own.
fn read(stage: &Stage) -> Result<Seen> {
    let mut subscriber = Subscriber::open(
        NAME,
        stage.domain.on(&stage.device),
        std::time::Duration::ZERO,
    )?;
    let stream = stage.device.stream()?;
    let mut seen = Seen::new();
    for number in 1..=FRAMES {
        let frame = subscriber.receive(&stream, PATIENCE)?;
        let bytes = frame.to_vec(PATIENCE)?;
        seen.push((frame.ptr(), bytes == [number as u8; BYTES]));
    }
    Ok(seen)
}
