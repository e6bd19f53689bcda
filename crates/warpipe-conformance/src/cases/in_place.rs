//! Tensors that are sent where they lie. **This module is marked for unsafe**: it lends memory of
//! another allocator.

use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use rustix::event::epoll;
use warpipe::{
    DType, Layout, Memory, OptionalExtension, Published, Publisher, PublisherOptions, Stream,
};
use warpipe_testkit::{eventually, wait_readable};

use super::{Case, all_whole};
use crate::PATIENCE;
use crate::context::Context;
use crate::device_malloc::{DeviceMalloc, OFFSET};
use crate::payload::Payload;
use crate::peer::{Batch, Order, PublisherPlan};

pub(super) const CASES: &[Case] = &[
    Case::new(
        "another process reads tensors where they lie, and their owners go with its releases",
        read_in_place,
    ),
    Case::new(
        "the owner of a tensor in place is dropped at the death of its reader, and not before",
        killed_reader,
    ),
    Case::new(
        "a tensor in published memory stays readable where it lies when its publisher is killed",
        killed_publisher,
    ),
    Case::new(
        "the owner of a tensor in place outlives its publisher until the reader's death",
        closed_publisher,
    ),
    Case::new(
        "a publisher that is closed evicts a stopped subscriber, and drops what that has not taken",
        closed_before_a_stopped_subscriber,
    ),
    Case::new(
        "a poll for a tensor in memory of a stopped process waits for nothing, and gets it later",
        stopped_owner,
    ),
];

const WORDS: u64 = 1 << 16;

/// Memory for one tensor behind another, published.
fn publish(context: &Context) -> Result<Published> {
    let memory = Memory::allocate(&context.device, 16 * WORDS)?;
    Ok(memory.publish("memory", context.domain.options())?)
}

fn layout() -> warpipe::Result<Layout> {
    Layout::contiguous(DType::U64, &[WORDS])
}

/// Fills the second half of the memory, and sends it.
fn send(
    publisher: &Publisher,
    memory: &Published,
    owner: &Arc<()>,
    stream: &Stream,
) -> Result<u64> {
    let mut loan = publisher.loan_in(memory, 8 * WORDS, &layout()?, owner.clone())?;
    Payload::of(WORDS, 7).fill(&mut loan, stream)?;
    Ok(loan.send(stream)?)
}

fn is_dropped<T>(owner: &Arc<T>) -> Result<()> {
    let is_sole = eventually(PATIENCE, || Arc::strong_count(owner) == 1);
    ensure!(is_sole, "the owner of a tensor that nobody reads is kept");
    Ok(())
}

fn read_in_place(context: &Context) -> Result<()> {
    let publisher = context.publisher("in-place")?;
    let (stream, memory) = (context.stream()?, publish(context)?);
    let mut peer = context.peer()?;
    peer.subscribe("in-place")?;
    let owner = Arc::new(());
    for sequence in 1..=20 {
        ensure!(send(&publisher, &memory, &owner, &stream)? == sequence);
        all_whole(&peer.receive(1)?, [sequence])?;
    }
    let plain = Arc::new(DeviceMalloc::new(&context.device, WORDS, 1)?);
    // SAFETY: the memory is freed behind the peer.
    let loan = unsafe { publisher.loan_at(plain.ptr + OFFSET, &layout()?, plain.clone()) };
    let mut loan = loan?;
    Payload::of(WORDS, 8).fill(&mut loan, &stream)?;
    loan.send(&stream)?;
    all_whole(&peer.receive(1)?, [21])?;
    is_dropped(&owner)?;
    is_dropped(&plain)?;
    // An owner counts until its drop is over.
    let is_none_kept = || publisher.stats().is_ok_and(|stats| stats.in_place == 0);
    ensure!(eventually(PATIENCE, is_none_kept), "an owner still counts");
    peer.dismiss()
}

fn killed_reader(context: &Context) -> Result<()> {
    let publisher = context.publisher("in-place")?;
    let (stream, memory) = (context.stream()?, publish(context)?);
    let mut peer = context.peer()?;
    peer.subscribe("in-place")?;
    let owner = Arc::new(());
    send(&publisher, &memory, &owner, &stream)?;
    peer.hold(1)?;
    ensure!(publisher.stats()?.in_place == 1 && Arc::strong_count(&owner) == 2);
    peer.kill()?;
    is_dropped(&owner)
}

fn killed_publisher(context: &Context) -> Result<()> {
    let mut peer = context.peer()?;
    peer.publish(PublisherPlan::of("in-place"))?;
    let mut subscriber = context.subscriber("in-place")?;
    let (stream, mut error_counters) = (context.stream()?, context.error_counters()?);
    peer.ask(&Order::SendInPlace(Batch::of(2, WORDS, 3)))?;
    let samples = [
        subscriber.receive(&stream, PATIENCE)?,
        subscriber.receive(&stream, PATIENCE)?,
    ];
    peer.kill()?;
    for sample in samples {
        ensure!(sample.info().is_in_place);
        ensure!(error_counters.finish(sample)? == 0, "it is whole");
    }
    Ok(())
}

fn closed_publisher(context: &Context) -> Result<()> {
    let publisher = context.publisher("in-place")?;
    let (stream, memory) = (context.stream()?, publish(context)?);
    let mut peer = context.peer()?;
    peer.subscribe("in-place")?;
    let owner = Arc::new(());
    send(&publisher, &memory, &owner, &stream)?;
    peer.hold(1)?;
    drop(publisher);
    ensure!(Arc::strong_count(&owner) == 2, "it is still read");
    peer.kill()?;
    is_dropped(&owner)
}

fn closed_before_a_stopped_subscriber(context: &Context) -> Result<()> {
    let options = PublisherOptions {
        evict_after: Some(Duration::from_secs(1)),
        ..context.domain.on(&context.device)
    };
    let publisher = Publisher::new("in-place", options)?;
    let (stream, memory) = (context.stream()?, publish(context)?);
    let mut peer = context.peer()?;
    peer.subscribe("in-place")?;
    peer.stop()?;
    let owner = Arc::new(());
    send(&publisher, &memory, &owner, &stream)?;
    drop(publisher);
    is_dropped(&owner)?;
    peer.go_on()?;
    peer.dismiss()
}

fn stopped_owner(context: &Context) -> Result<()> {
    let mut peer = context.peer()?;
    peer.publish(PublisherPlan::of("in-place"))?;
    let mut subscriber = context.subscriber("in-place")?;
    let (stream, mut error_counters) = (context.stream()?, context.error_counters()?);
    peer.ask(&Order::SendInPlace(Batch::of(1, WORDS, 3)))?;
    peer.stop()?;
    for _ in 0..10 {
        let none = subscriber.receive(&stream, Duration::ZERO).optional()?;
        ensure!(none.is_none(), "its owner does not answer");
    }
    let edges = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
    epoll::add(&edges, &subscriber, epoll::EventData::new_u64(0), flags)?;
    let sleeps = eventually(PATIENCE, || {
        let none = subscriber.receive(&stream, Duration::ZERO).optional();
        matches!(none, Ok(None)) && wait_readable(&subscriber, Duration::ZERO).is_ok_and(|it| !it)
    });
    ensure!(sleeps, "an event loop sleeps until the answer");
    peer.go_on()?;
    let sample = loop {
        ensure!(wait_readable(&edges, PATIENCE)?, "the answer is told");
        epoll::wait(&edges, &mut [MaybeUninit::uninit()], None)?;
        if let Some(sample) = subscriber.receive(&stream, Duration::ZERO).optional()? {
            break sample;
        }
    };
    ensure!(sample.info().is_in_place && error_counters.finish(sample)? == 0);
    peer.dismiss()
}
