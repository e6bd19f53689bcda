//! Nine small tensors go through POSIX pipes, and arrive with their values.
//!
//! A parent starts a producer and a consumer, and connects them with pipes as a shell does:
//!
//! ```text
//! parent --stdin--> producer --stdout--> stdin of the consumer
//! ```
//!
//! The pipe carries lines of text. Each tensor `[n, 2n]`, n from 1 to 9, goes twice: as a *legacy
//! handle*, for memory that another allocator made (`cudaMalloc`; here all nine lie in one block,
//! as a caching allocator packs them), and as a *ticket*, for memory of this library.
//!
//! Programs like this are known to print zeros: a handle is no tensor, and orders no work. Two
//! steps make it right, and each is one line here. The producer *completes* its writes before it
//! sends a handle. And it *keeps* the memory until the consumer is done: then the parent closes the
//! producer's standard input. (A ticket's memory stays once it is open; a legacy handle's memory is
//! gone with its producer.)
//!
//! **This module is marked for unsafe**: it allocates and copies device memory by address.
//!
//! ```text
//! cargo run -p warpipe --example pipes
//! ```
//!
//! It ends with `ok: 9 tensors came by legacy handles and 9 by tickets, each with its values`.

mod stage;

use std::os::fd::AsFd;
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use stage::talk::Talk;
use stage::{Actor, Outcome, PATIENCE, Stage, ensure, play};
use warpipe::{Device, DevicePtr, LegacyHandle, Memory, Stream, Ticket};

/// The tensors are [n, 2n] for n from 1 to this.
const TENSORS: i64 = 9;
/// Two 64-bit integers.
const TENSOR_BYTES: u64 = 16;
/// The distance between two tensors in a block.
const SPACING: u64 = 512;

fn main() -> ExitCode {
    play(&[], |stage| match stage.role() {
        "producer" => produce(stage),
        "consumer" => consume(stage),
        _ => lay_pipes(stage),
    })
}

fn lay_pipes(stage: &Stage) -> Outcome<String> {
    let mut producer = Actor::start(
        "producer",
        stage
            .command("producer")?
            .stdin(Stdio::piped())
            .stdout(Stdio::piped()),
    )?;
    let tensors = producer
        .child()
        .stdout
        .take()
        .ok_or("the producer has no standard output")?;
    let consumer = Actor::start(
        "consumer",
        stage.command("consumer")?.stdin(Stdio::from(tensors)),
    )?;
    consumer.finish()?;
    drop(producer.child().stdin.take()); // signals the producer that its memory may be freed
    producer.finish()?;
    Ok(format!(
        "{TENSORS} tensors came by legacy handles and {TENSORS} by tickets, each with its values"
    ))
}

fn tensor(n: i64) -> [i64; 2] {
    [n, 2 * n]
}

/// The contents of the block: tensor n at (n - 1) * SPACING.
fn image() -> Vec<u8> {
    let mut bytes = vec![0; (TENSORS as u64 * SPACING) as usize];
    for (n, place) in (1..=TENSORS).zip(bytes.chunks_exact_mut(SPACING as usize)) {
        place[..TENSOR_BYTES as usize].copy_from_slice(&tensor(n).map(i64::to_ne_bytes).concat());
    }
    bytes
}

fn produce(stage: &Stage) -> Outcome<String> {
    let stream = stage.device.stream()?;
    let image = image();
    let foreign = Foreign::allocate(&stage.device, image.len() as u64)?;
    // SAFETY: the block is as long as the image, and no other process has it yet.
    unsafe {
        stage
            .device
            .backend()
            .upload(stream.raw(), foreign.ptr, &image)?
    };
    let memory = Memory::allocate(&stage.device, image.len() as u64)?;
    memory.write(&stream, 0, &image)?;
    stream.synchronize(PATIENCE)?; // complete, before anybody hears of it

    let published = memory.publish("tensors", stage.domain.options())?;
    let mut pipe = Talk::over(std::io::stdout().as_fd().try_clone_to_owned()?); // to the consumer
    for n in 1..=TENSORS {
        let at = (n - 1) as u64 * SPACING;
        // SAFETY: the block is freed below, when the consumer has done.
        let handle =
            unsafe { LegacyHandle::export(&stage.device, foreign.ptr + at, TENSOR_BYTES)? };
        pipe.tell(handle)?;
        pipe.tell(published.ticket(at..at + TENSOR_BYTES)?)?;
    }

    // No line is ever written to it: the parent closes standard input when the consumer is done.
    let word = Talk::with_parent()?.hear_or_end()?;
    ensure(word.is_none(), || format!("the parent said {word:?}"))?;
    Ok(format!(
        "{} bytes of memory were kept until the consumer had done",
        foreign.bytes + memory.bytes()
    ))
}

fn consume(stage: &Stage) -> Outcome<String> {
    let mut pipe = Talk::with_parent()?;
    let stream = stage.device.stream()?;
    for n in 1..=TENSORS {
        let legacy = by_handle(stage, &stream, &pipe.hear()?.parse()?)?;
        let ticket = by_ticket(stage, &pipe.hear()?.parse()?)?;
        println!("tensor {n}: {legacy:?} by a legacy handle, {ticket:?} by a ticket");
        ensure(legacy == tensor(n) && ticket == tensor(n), || {
            format!("tensor {n} should be {:?}", tensor(n))
        })?;
    }
    Ok(format!(
        "{TENSORS} tensors came twice, each with its values"
    ))
}

fn by_handle(stage: &Stage, stream: &Stream, handle: &LegacyHandle) -> Outcome<[i64; 2]> {
    // The nine lie in one block. The driver opens it once, however often it is opened here.
    let memory = handle.open(&stage.device)?;
    ensure(memory.bytes() == TENSOR_BYTES, || {
        format!("a tensor of {} bytes came", memory.bytes())
    })?;
    memory.used_on(stream);
    let mut bytes = [0; TENSOR_BYTES as usize];
    // SAFETY: as long as the memory, which the producer keeps until this process has ended.
    unsafe {
        stage
            .device
            .backend()
            .download(stream.raw(), &mut bytes, memory.ptr())?
    };
    values(&bytes)
}

fn by_ticket(stage: &Stage, ticket: &Ticket) -> Outcome<[i64; 2]> {
    values(
        &ticket
            .open(&stage.device, Duration::ZERO)?
            .to_vec(PATIENCE)?,
    )
}

fn values(bytes: &[u8]) -> Outcome<[i64; 2]> {
    let (numbers, rest) = bytes.as_chunks::<8>();
    ensure(rest.is_empty(), || {
        format!("a tensor of {} bytes came", bytes.len())
    })?;
    let numbers: Vec<i64> = numbers
        .iter()
        .map(|bytes| i64::from_ne_bytes(*bytes))
        .collect();
    Ok(numbers
        .try_into()
        .map_err(|numbers| format!("a tensor {numbers:?} came"))?)
}

/// Memory that another allocator made, such as PyTorch, or your own `cudaMalloc`.
struct Foreign<'a> {
    device: &'a Device,
    ptr: DevicePtr,
    bytes: u64,
}

impl Foreign<'_> {
    fn allocate(device: &Device, bytes: u64) -> Outcome<Foreign<'_>> {
        Ok(Foreign {
            device,
            ptr: device.backend().allocate_plain(bytes)?,
            bytes,
        })
    }
}

impl Drop for Foreign<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated above and freed once, behind all work: the upload was waited for, and
        // the consumer has ended.
        let _ = unsafe { self.device.backend().free_plain(self.ptr) };
    }
}
