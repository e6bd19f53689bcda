//! A producer and a consumer in two terminals, started in either order, exchange a text file.
//!
//! The producer fills device memory, publishes it under a name, and writes a *ticket* for it to a
//! file: a few hundred letters that name this memory of this process. The file is readable by its
//! owner alone (mode 0600) and appears at once, so that a consumer that started first, and waits
//! for it, never reads half of it. The consumer opens the ticket, which maps the producer's own
//! memory into its device, and verifies every word.
//!
//! **This module is marked for unsafe**: it launches a kernel on device memory.
//!
//! ```text
//! cargo run -p warpipe --example producer_consumer                     # both processes
//! cargo run -p warpipe --example producer_consumer -- --role consumer  # or: one terminal each, in any order
//! cargo run -p warpipe --example producer_consumer -- --role producer
//! ```
//!
//! `--file PATH` is where the ticket goes; left out, it is a file in the domain. It ends with `ok:
//! the consumer opened the ticket, and 1048576 words are right`.

mod stage;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use stage::{Outcome, PATIENCE, Stage, ensure, play};
use warpipe::{Memory, Ticket};

const NAME: &str = "words";
const WORDS: u64 = 1 << 20;
const SEED: u64 = 7;

fn main() -> ExitCode {
    play(&["--file"], |stage| match stage.role() {
        "producer" => produce(stage),
        "consumer" => consume(stage),
        _ => {
            let consumer = stage.start("consumer")?;
            produce(stage)?;
            consumer.finish()?;
            Ok(format!(
                "the consumer opened the ticket, and {WORDS} words are right"
            ))
        }
    })
}

/// The file of the ticket, and the file in which the consumer acknowledges it.
fn files(stage: &Stage) -> (PathBuf, PathBuf) {
    let own = || stage.domain.path().join("producer_consumer.ticket");
    let ticket = stage.option("--file").map_or_else(own, PathBuf::from);
    (ticket.clone(), ticket.with_extension("received"))
}

fn produce(stage: &Stage) -> Outcome<String> {
    let memory = Memory::allocate(&stage.device, WORDS * 8)?;
    let stream = stage.device.stream()?;
    memory.used_on(&stream);
    // SAFETY: the memory has WORDS words, is kept until the stream has passed the kernel, and no
    // other process has it yet.
    unsafe { warpipe_kernels::fill(&stream, memory.ptr(), WORDS, SEED)? };
    // A ticket orders no work. The words are complete before the ticket is published.
    stream.synchronize(PATIENCE)?;

    let published = memory.publish(NAME, stage.domain.options())?;
    let (file, received) = files(stage);
    let ticket = published.ticket(..)?;
    let _ = std::fs::remove_file(&received); // of an earlier run that was killed
    ticket.write_file(&file)?;
    println!("the ticket is in {}", file.display());

    // Dropping `published` admits no further process. The consumer returns the ticket to confirm
    // that it has the memory.
    let returned = Ticket::read_file(&received, PATIENCE)?;
    std::fs::remove_file(file)?;
    std::fs::remove_file(received)?;
    ensure(returned == ticket, || {
        format!("the consumer returned another ticket, {returned}")
    })?;
    Ok(format!(
        "the consumer has opened {} MiB of this process",
        memory.bytes() >> 20
    ))
}

fn consume(stage: &Stage) -> Outcome<String> {
    let (file, received) = files(stage);
    println!("looking for {}", file.display());
    let ticket = Ticket::read_file(&file, PATIENCE)?;
    // From here on the memory stays, even if the producer ends. A ticket that an earlier producer
    // has left behind gives an error that says so.
    let memory = ticket.open(&stage.device, Duration::ZERO)?;
    ticket.write_file(received)?;

    // A kernel would read it at `memory.ptr()`; this check runs on the CPU and copies it.
    let bytes = memory.to_vec(PATIENCE)?;
    let words: Vec<u64> = bytes
        .chunks_exact(8)
        .map(|word| u64::from_ne_bytes(word.try_into().expect("chunks of 8 bytes")))
        .collect();
    println!(
        "the first words of {:?}: {:x?}",
        ticket.info().name,
        &words[..4]
    );
    let wrong = words
        .iter()
        .zip(0..)
        .filter(|&(&word, index)| word != warpipe_kernels::pattern(SEED, index))
        .count();
    ensure(words.len() as u64 == WORDS, || {
        format!("{} words came, not {WORDS}", words.len())
    })?;
    ensure(wrong == 0, || format!("{wrong} words are wrong"))?;
    Ok(format!("{WORDS} words are right"))
}
