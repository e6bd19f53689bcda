//! The demo's publisher: fills tensors on the device and sends them, as fast as they are taken.

use std::time::{Duration, Instant};

use warpipe::{Domain, Error, Layout, Policy, Publisher, Stream, clock};

use super::event::{Event, Published};
use super::{ChildArgs, DEPTH, ENDPOINT, ITEM_PATIENCE, START_PATIENCE, TELL_EVERY};
use crate::exit::Exit;
use crate::interrupt::{Interrupt, LOOK};
use crate::output::Output;
use crate::process;

/// What the library allows by itself.
const MEMORY_LIMIT_LEAST: u64 = 4 << 30;

/// In the child.
pub fn run(args: &ChildArgs) -> anyhow::Result<Exit> {
    process::follow_parent(args.parent)?;
    let interrupt = Interrupt::install()?;
    let device = args.device.open()?.device;
    warpipe_kernels::preload(&device)?;
    let stream = device.stream()?;
    let publisher = Publisher::builder(ENDPOINT)
        .domain(&Domain::from_environment()?)
        .device(&device)
        .depth(DEPTH)
        .memory_limit(MEMORY_LIMIT_LEAST.max(args.item_bytes * 4 * u64::from(DEPTH)))
        .loan_timeout(ITEM_PATIENCE)
        .policy(Policy::Block { timeout: ITEM_PATIENCE })
        .build()?;
    let mut published = Published::default();
    if everybody_came(&publisher, args.subscribers, &interrupt)? {
        let ending = publish(&publisher, &stream, args, &interrupt, &mut published);
        // Told even after a fault: what was sent until then was sent.
        tell(published)?;
        ending?;
    }
    // Whoever is late still reads what this process's device wrote.
    stream.synchronize(ITEM_PATIENCE)?;
    Ok(Exit::Done)
}

fn everybody_came(publisher: &Publisher, subscribers: u32, interrupt: &Interrupt) -> anyhow::Result<bool> {
    let deadline = Instant::now() + START_PATIENCE;
    loop {
        match publisher.wait_for_subscribers(subscribers as usize, LOOK) {
            Ok(()) => return Ok(true),
            Err(Error::Timeout { .. }) if interrupt.came() => return Ok(false),
            Err(Error::Timeout { .. }) if Instant::now() < deadline => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn publish(
    publisher: &Publisher,
    stream: &Stream,
    args: &ChildArgs,
    interrupt: &Interrupt,
    published: &mut Published,
) -> anyhow::Result<()> {
    let layout = Layout::bytes_only(args.item_bytes)?;
    let deadline = Instant::now() + Duration::from_millis(args.milliseconds);
    let mut told = Instant::now();
    published.first_ns = clock::now_ns();
    while Instant::now() < deadline && !interrupt.came() && args.items.is_none_or(|items| published.items < items) {
        let number = published.items + 1;
        send(publisher, stream, &layout, number, args.sabotage == Some(number))?;
        published.items = number;
        if told.elapsed() >= TELL_EVERY {
            told = Instant::now();
            tell(*published)?;
        }
    }
    Ok(())
}

/// The pattern depends on the item's number, which goes along as metadata.
fn send(publisher: &Publisher, stream: &Stream, layout: &Layout, number: u64, spoil: bool) -> anyhow::Result<()> {
    let mut sample = publisher.loan(layout)?;
    let seed = if spoil { !number } else { number };
    // SAFETY: the slot is this sample's until it is sent, and what is sent is ordered behind the stream's work.
    unsafe { warpipe_kernels::fill(stream, sample.ptr(), layout.bytes() / 8, seed) }?;
    sample.set_metadata(&number.to_le_bytes())?;
    sample.send(stream).map_err(Error::from)?;
    Ok(())
}

fn tell(published: Published) -> std::io::Result<()> {
    Output::new(true).say(String::new, &Event::Published(published))
}
