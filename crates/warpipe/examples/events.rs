//! A stream of one process waits for a slow kernel of another; and two traps of CUDA's events
//! become errors.
//!
//! The parent launches a kernel that takes 300 ms, and records an event behind it. The child's
//! stream waits for that event on the device: the child's CPU continues at once, and the stream's
//! next work sees the whole result.
//!
//! CUDA's own interprocess events have two traps. One that *was never recorded* counts as complete,
//! and so does one after its *recorder died* before its work was done: the waiting stream continues
//! with missing data. This example provokes both, and both are errors.
//!
//! **This module is marked for unsafe**: it launches kernels on device memory, and asks the driver
//! for an event.
//!
//! ```text
//! cargo run -p warpipe --example events
//! ```
//!
//! It ends with `ok: the child's stream waited, and 65536 words are right; never recorded and lost
//! are errors`.

mod stage;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use stage::talk::Talk;
use stage::{Outcome, PATIENCE, Stage, ensure, play};
use warpipe::{Error, Event, EventHandle, Loss, Memory, StateFault, Ticket};

const WORDS: u64 = 1 << 16;
const SEED: u64 = 3;
/// How long the parent's kernel takes.
const SLOW: Duration = Duration::from_millis(300);
/// How long the kernel of the process that dies would take.
const ENDLESS: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    play(&[], |stage| match stage.role() {
        "child" => wait(stage, Talk::with_parent()?),
        "doomed" => die(stage, Talk::with_parent()?),
        _ => {
            // Before any stream waits: loading a kernel may have to wait for that stream.
            warpipe_kernels::preload(&stage.device)?;
            let event = Event::new(stage.domain.on(&stage.device))?;
            record(stage, &event)?;
            lose(stage, &event)?;
            Ok(format!(
                "the child's stream waited, and {WORDS} words are right; never recorded and lost are errors"
            ))
        }
    })
}

/// The parent's role in the first half.
fn record(stage: &Stage, event: &Event) -> Outcome {
    let memory = Memory::allocate(&stage.device, WORDS * 8)?;
    let published = memory.publish("words", stage.domain.options())?;
    let stream = stage.device.stream()?;
    let (child, mut talk) = stage.start_talking("child")?;
    talk.tell(event.handle()?)?;
    talk.tell(published.ticket(..)?)?;
    talk.expect("I saw that nothing was recorded")?;

    memory.used_on(&stream);
    // SAFETY: the memory has WORDS words, and is read by the child only behind the event that is
    // recorded next.
    unsafe { warpipe_kernels::slow_fill(&stream, memory.ptr(), WORDS, SEED, SLOW)? };
    event.record(&stream, PATIENCE)?;
    talk.tell("recorded")?; // record first: an earlier wait fails with `NotRecorded`
    child.finish()
}

fn wait(stage: &Stage, mut talk: Talk) -> Outcome<String> {
    warpipe_kernels::preload(&stage.device)?;
    let event = Event::open(
        &talk.hear()?.parse::<EventHandle>()?,
        stage.domain.on(&stage.device),
        Duration::ZERO,
    )?;
    let memory = talk
        .hear()?
        .parse::<Ticket>()?
        .open(&stage.device, Duration::ZERO)?;
    let wrong = Memory::allocate(&stage.device, 8)?; // a counter, zero so far
    let stream = stage.device.stream()?;
    never_recorded(&event)?;
    talk.tell("I saw that nothing was recorded")?;
    talk.expect("recorded")?;

    let start = Instant::now();
    let recording = event.wait(&stream)?; // the stream waits, not this CPU
    memory.used_on(&stream);
    wrong.used_on(&stream);
    // SAFETY: WORDS words that are complete by the time the stream gets here, and one of our own to
    // count into.
    unsafe { warpipe_kernels::check(&stream, memory.ptr(), WORDS, SEED, wrong.ptr())? };
    let enqueued = start.elapsed();
    stream.synchronize(PATIENCE)?;
    println!(
        "the stream waited and read for {:?}; to enqueue that took the CPU {enqueued:?}",
        start.elapsed()
    );

    // Without this check, a stream that was released because the parent died would look like one
    // that waited.
    ensure(event.check(recording)?, || {
        "the stream went on before the recording was complete".into()
    })?;
    let wrong = wrong.to_vec(PATIENCE)?;
    ensure(wrong == [0; 8], || {
        format!(
            "{} words are wrong",
            u64::from_ne_bytes(wrong.try_into().unwrap_or_default())
        )
    })?;
    Ok(format!("waited, and {WORDS} words are right"))
}

/// The first trap.
fn never_recorded(event: &Event) -> Outcome {
    let raw = event.raw().ok_or("the event has none of CUDA's")?;
    // SAFETY: live as long as `event`.
    let complete = unsafe { event.device().backend().query_event(raw)? };
    println!(
        "never recorded: CUDA's own event says that it is {}",
        if complete { "complete" } else { "not complete" }
    );
    match event.query() {
        Err(error @ Error::State(StateFault::NotRecorded(_))) => {
            println!("never recorded: {error}")
        }
        other => return Err(format!("an event that was never recorded says {other:?}").into()),
    }
    ensure(complete, || {
        "this driver has not the trap that the example is about".into()
    })
}

/// The second trap: a stream waits for a process that is killed.
fn lose(stage: &Stage, event: &Event) -> Outcome {
    let (doomed, mut talk) = stage.start_talking("doomed")?;
    talk.tell(event.handle()?)?;
    talk.expect("recorded")?;
    let stream = stage.device.stream()?;
    let recording = event.wait(&stream)?;
    doomed.kill()?;
    // The stream is released as soon as the death is proven, and does not hang for ever.
    stream.synchronize(PATIENCE)?;
    match event.check(recording) {
        Err(error @ Error::Lost(Loss::Event { .. })) => println!("recorder killed: {error}"),
        other => return Err(format!("an event with a killed recorder says {other:?}").into()),
    }
    Ok(())
}

/// Records the same event behind work that outlives the process.
fn die(stage: &Stage, mut talk: Talk) -> Outcome<String> {
    let event = Event::open(
        &talk.hear()?.parse::<EventHandle>()?,
        stage.domain.on(&stage.device),
        Duration::ZERO,
    )?;
    let stream = stage.device.stream()?;
    warpipe_kernels::spin(&stream, ENDLESS)?;
    event.record(&stream, PATIENCE)?;
    talk.tell("recorded")?;
    talk.hear()?; // which the parent never says
    Err("this process should have been killed".into())
}
