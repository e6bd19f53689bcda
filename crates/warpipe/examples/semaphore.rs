//! Six processes share two sections of device work: one admits two processes at once, the other
//! admits one.
//!
//! Each enqueues 20 rounds. A permit is released while its holder's device work is still pending,
//! and the next holder's *stream* waits for that work; its CPU continues (until the work of 8
//! holders of one permit is pending). Two checks show that the streams wait: functions in the
//! streams' order count the processes inside, never more than two; and under the semaphore of one
//! permit all add to the same numbers on the device, without atomics, so that a concurrent addition
//! would be lost.
//!
//! **This module is marked for unsafe**: it launches kernels on shared device memory, and counts in
//! shared memory.
//!
//! ```text
//! cargo run -p warpipe --example semaphore
//! cargo run -p warpipe --example semaphore -- --without  # without semaphores: more are inside, and it fails
//! ```
//!
//! It ends with `ok: never more than 2 of 6 processes inside; 120 turns, and no addition lost`.

mod stage;

use std::process::ExitCode;
use std::ptr::with_exposed_provenance_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use stage::{Actor, Outcome, PATIENCE, Stage, ensure, play};
use warpipe::{
    Access, Device, Memory, PublishOptions, Publisher, Semaphore, SharedMemory, Stream, Subscriber,
    Ticket,
};

const PROCESSES: u64 = 6;
const ROUNDS: u64 = 20;
/// This many processes may be in the section at once.
const PERMITS: u32 = 2;
/// The numbers that all processes add to, and their bytes.
const NUMBERS: u64 = 4096;
const BYTES: u64 = NUMBERS * 8;

fn main() -> ExitCode {
    play(&["--without"], |stage| match stage.role() {
        "member" => take_part(stage),
        _ => keep(stage),
    })
}

/// Owns the shared objects, in the memory of the first process.
fn keep(stage: &Stage) -> Outcome<String> {
    let _region = Semaphore::new("region", PERMITS, stage.domain.on(&stage.device))?;
    let _turn = Semaphore::new("turn", 1, stage.domain.on(&stage.device))?;
    let numbers = Memory::allocate(&stage.device, BYTES)?;
    let counts = Memory::allocate(&Device::host(), Counts::BYTES)?;
    let publish = |memory: &Memory, name| {
        memory.publish(
            name,
            PublishOptions {
                access: Access::ReadWrite,
                ..stage.domain.options()
            },
        )
    };
    let _published = (publish(&numbers, "numbers")?, publish(&counts, "counts")?);
    let start = Publisher::new("start", stage.domain.on(&stage.device))?;

    let members: Outcome<Vec<Actor>> = (0..PROCESSES).map(|_| stage.start("member")).collect();
    // Starts all processes at once.
    start.wait_for_subscribers(PROCESSES as usize, PATIENCE)?;
    start.send_bytes(&stage.device.stream()?, b"go")?;
    members?.into_iter().try_for_each(Actor::finish)?;

    let [inside, most] = words(&counts.to_vec(PATIENCE)?)[..] else {
        return Err("there are two counts".into());
    };
    println!("at most {most} were inside at once");
    ensure(inside == 0, || format!("{inside} are inside after the end"))?;
    ensure((1..=u64::from(PERMITS)).contains(&most), || {
        format!("{most} were inside, and {PERMITS} may be")
    })?;
    let turns = PROCESSES * ROUNDS;
    let wrong = words(&numbers.to_vec(PATIENCE)?)
        .into_iter()
        .filter(|&number| number != turns)
        .count();
    ensure(wrong == 0, || {
        format!("{wrong} numbers lack additions of the {turns}")
    })?;
    Ok(format!(
        "never more than {PERMITS} of {PROCESSES} processes inside; {turns} turns, and no addition lost"
    ))
}

fn take_part(stage: &Stage) -> Outcome<String> {
    let open = |name, device| Ticket::to(&stage.domain, name)?.open(device, Duration::ZERO);
    let numbers: SharedMemory = open("numbers", &stage.device)?;
    let counts = Counts(open("counts", &Device::host())?);
    let region = Semaphore::open("region", stage.domain.on(&stage.device), Duration::ZERO)?;
    let turn = Semaphore::open("turn", stage.domain.on(&stage.device), Duration::ZERO)?;
    let stream = stage.device.stream()?;
    // Loaded now, and not behind a stream that waits for others.
    warpipe_kernels::preload(&stage.device)?;
    let mut start = Subscriber::open("start", stage.domain.on(&stage.device), Duration::ZERO)?;
    start.receive(&stream, PATIENCE)?.finish(PATIENCE)?;

    let is_with = stage.option("--without").is_none();
    numbers.used_on(&stream);
    for _ in 0..ROUNDS {
        // The section of PERMITS. The stream, not this thread, waits for the work of the permit's
        // last holder.
        let permit = if is_with {
            Some(region.acquire(&stream, PATIENCE)?)
        } else {
            None
        };
        counts.enter(&stream)?;
        warpipe_kernels::spin(&stream, Duration::from_millis(5))?;
        counts.leave(&stream)?;
        // Released now, effective when the device has come to it.
        permit.map_or(Ok(()), |permit| permit.release(&stream))?;

        // The section of one.
        let permit = if is_with {
            Some(turn.acquire(&stream, PATIENCE)?)
        } else {
            None
        };
        // SAFETY: the memory has NUMBERS words, lent for writing, and no other process's stream is
        // past the wait for the permit. (Without a permit additions get lost, which this is to
        // show.)
        unsafe { warpipe_kernels::touch(&stream, numbers.ptr(), NUMBERS)? };
        permit.map_or(Ok(()), |permit| permit.release(&stream))?;
    }
    stream.synchronize(PATIENCE)?;
    Ok(format!(
        "process {} took {ROUNDS} turns",
        std::process::id()
    ))
}

/// The number of processes inside, and its maximum so far: two words of host memory that all
/// processes share.
struct Counts(SharedMemory);

impl Counts {
    const BYTES: u64 = 16;

    /// Counts in the stream's order.
    fn enter(&self, stream: &Stream) -> warpipe::Result<()> {
        let memory = self.0.clone();
        stream.call(move || {
            let inside = Counts::word(&memory, 0).fetch_add(1, Ordering::SeqCst) + 1;
            Counts::word(&memory, 1).fetch_max(inside, Ordering::SeqCst);
        })
    }

    /// Counts in the stream's order.
    fn leave(&self, stream: &Stream) -> warpipe::Result<()> {
        let memory = self.0.clone();
        stream.call(move || _ = Counts::word(&memory, 0).fetch_sub(1, Ordering::SeqCst))
    }

    fn word(memory: &SharedMemory, index: u64) -> &AtomicU64 {
        // SAFETY: one of the two words of this memory, which is mapped as long as the handle. All
        // processes use the words atomically until the members have ended.
        unsafe {
            AtomicU64::from_ptr(with_exposed_provenance_mut(
                (memory.ptr() + 8 * index) as usize,
            ))
        }
    }
}

fn words(bytes: &[u8]) -> Vec<u64> {
    let words = bytes
        .chunks_exact(8)
        .map(|word| u64::from_ne_bytes(word.try_into().expect("chunks of 8 bytes")));
    words.collect()
}
