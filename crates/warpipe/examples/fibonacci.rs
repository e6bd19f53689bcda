//! One tensor, two processes, no copy: the smallest whole program.
//!
//! The producer fills a tensor of 65536 `uint64` with the Fibonacci numbers and publishes it under
//! a name. The consumer finds the name, receives the tensor in place, and verifies every number.
//! From the 94th on a Fibonacci number does not fit 64 bits; they wrap around there, on both sides.
//!
//! ```text
//! cargo run -p warpipe --example fibonacci                     # both processes
//! cargo run -p warpipe --example fibonacci -- --role consumer  # or: one terminal each, in any order
//! cargo run -p warpipe --example fibonacci -- --role producer
//! ```
//!
//! It ends with `ok: 65536 Fibonacci numbers crossed, every one of them right`.

mod stage;

use std::process::ExitCode;

use stage::{Outcome, PATIENCE, Stage, ensure, play};
use warpipe::{DType, Layout, Publisher, Subscriber};

const NAME: &str = "numbers/fibonacci";
const COUNT: u64 = 1 << 16;

fn main() -> ExitCode {
    play(&[], |stage| match stage.role() {
        "producer" => produce(stage),
        "consumer" => consume(stage),
        _ => {
            let producer = stage.start("producer")?;
            let line = consume(stage)?;
            producer.finish()?;
            Ok(line)
        }
    })
}

fn produce(stage: &Stage) -> Outcome<String> {
    let publisher = Publisher::new(NAME, stage.domain.on(&stage.device))?;
    publisher.wait_for_subscribers(1, PATIENCE)?;

    // A loan is memory of the device that no subscriber reads yet.
    let mut tensor = publisher.loan(&Layout::contiguous(DType::U64, &[COUNT])?)?;
    tensor.set_metadata(b"F(0), F(1), ... modulo 2^64")?;

    // Work on a device goes through a stream: first the numbers, then the send.
    let stream = stage.device.stream()?;
    let bytes: Vec<u8> = fibonacci().flat_map(u64::to_ne_bytes).collect();
    tensor.write(&stream, &bytes)?;
    tensor.send(&stream)?;

    // Sending does not wait. This process must not end before its own device has written the
    // numbers. Afterwards it may: the memory lives as long as a process holds it.
    stream.synchronize(PATIENCE)?;
    Ok(format!("sent {COUNT} numbers"))
}

fn consume(stage: &Stage) -> Outcome<String> {
    let mut subscriber = Subscriber::open(NAME, stage.domain.on(&stage.device), PATIENCE)?;
    let stream = stage.device.stream()?;
    let tensor = subscriber.receive(&stream, PATIENCE)?;

    // A kernel would read the tensor at `tensor.ptr()`; this check runs on the CPU and copies it.
    ensure(tensor.layout().shape() == [COUNT], || {
        format!("its shape is {:?}", tensor.layout().shape())
    })?;
    let bytes = tensor.to_vec(PATIENCE)?;
    println!(
        "received {} numbers: {}",
        tensor.layout().elements(),
        String::from_utf8_lossy(tensor.metadata())
    );
    tensor.finish(PATIENCE)?; // gives the memory back; an error if the producer had died before it was complete

    let words = bytes
        .chunks_exact(8)
        .map(|word| u64::from_ne_bytes(word.try_into().expect("chunks of 8 bytes")));
    let wrong = words
        .zip(fibonacci())
        .filter(|(found, right)| found != right)
        .count();
    ensure(wrong == 0, || format!("{wrong} numbers are wrong"))?;
    Ok(format!(
        "{COUNT} Fibonacci numbers crossed, every one of them right"
    ))
}

fn fibonacci() -> impl Iterator<Item = u64> {
    let pairs = std::iter::successors(Some((0u64, 1u64)), |&(this, next)| {
        Some((next, this.wrapping_add(next)))
    });
    pairs.map(|(this, _)| this).take(COUNT as usize)
}
