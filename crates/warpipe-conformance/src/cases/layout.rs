//! Samples of every type, every layout, every size, and their metadata. **This module is marked for
//! unsafe**: it maps memory and copies by address.

use std::sync::mpsc::channel;

use anyhow::{Result, bail, ensure};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use warpipe::{DType, Error, Layout, LimitFault, Memory, Publisher, PublisherOptions};

use super::{Case, all_whole, skip};
use crate::PATIENCE;
use crate::context::Context;
use crate::payload::{Payload, PayloadMark};
use crate::peer::{describe_layout, digest};

pub(super) const CASES: &[Case] = &[
    Case::new(
        "every element type crosses in every kind of layout",
        every_type_and_layout,
    ),
    Case::new(
        "payloads of any size cross, from nothing to 64 MiB",
        every_size,
    ),
    Case::new(
        "a payload of more than 4 GiB crosses",
        beyond_four_gigabytes,
    ),
    Case::new(
        "metadata of 0 to 4096 bytes crosses and 4097 are refused",
        metadata,
    ),
    Case::new(
        "host bytes, slices and device pointers are copied in",
        copies_in,
    ),
    Case::new(
        "copies from and to the host are whole, of every length, at any address, in any pieces",
        host_copies,
    ),
    Case::new(
        "copies from and to the host are done with page-locked memory of the caller when they return",
        page_locked,
    ),
];

fn layouts(dtype: DType) -> Result<Vec<Layout>> {
    let width = dtype.bytes();
    Ok(vec![
        Layout::contiguous(dtype, &[])?,
        Layout::contiguous(dtype, &[5])?,
        Layout::contiguous(dtype, &[4, 0, 7])?,
        Layout::contiguous(dtype, &[2, 1, 3, 1, 2, 1, 2, 3])?,
        Layout::strided(dtype, &[3, 4], &[1, 3], 0)?,
        Layout::strided(dtype, &[3, 4], &[16, 2], 8 * width)?,
        Layout::strided(dtype, &[3, 4], &[-4, -1], 11 * width)?,
        Layout::strided(dtype, &[6, 5], &[0, 1], 0)?,
    ])
}

fn every_type_and_layout(context: &Context) -> Result<()> {
    let publisher = context.publisher("layouts")?;
    let stream = context.stream()?;
    let mut peer = context.peer()?;
    peer.subscribe("layouts")?;
    let mut rng = context.rng();
    for &dtype in DType::ALL {
        let layouts = layouts(dtype)?;
        let mut due = Vec::new();
        for layout in &layouts {
            let bytes: Vec<u8> = (0..layout.bytes()).map(|_| rng.u64(..) as u8).collect();
            let mut sample = publisher.loan(layout)?;
            sample.write(&stream, &bytes)?;
            sample.send(&stream)?;
            due.push((describe_layout(layout), Some(digest(&bytes))));
        }
        let items = peer.receive(layouts.len() as u64)?;
        let found: Vec<_> = items
            .into_iter()
            .map(|item| (item.layout, item.digest))
            .collect();
        ensure!(found == due, "of {dtype}: received {found:?}, sent {due:?}");
    }
    peer.dismiss()
}

fn every_size(context: &Context) -> Result<()> {
    let publisher = context.publisher("sizes")?;
    let stream = context.stream()?;
    let mut peer = context.peer()?;
    peer.subscribe("sizes")?;
    const MIB: u64 = 1 << 20;
    let sizes = [
        0,
        1,
        7,
        8,
        511,
        512,
        513,
        4095,
        4096,
        2 * MIB - 8,
        2 * MIB,
        2 * MIB + 8,
        64 * MIB,
        3,
        0,
    ];
    for (seed, &bytes) in sizes.iter().enumerate() {
        let mut sample = publisher.loan(&Layout::bytes_only(bytes)?)?;
        Payload::of(bytes / 8, seed as u64).fill(&mut sample, &stream)?;
        sample.send(&stream)?;
        let items = peer.receive(1)?;
        all_whole(&items, [seed as u64 + 1])?;
        let due = describe_layout(&Layout::bytes_only(bytes)?);
        ensure!(
            items[0].layout == due,
            "received {}, sent {due}",
            items[0].layout
        );
    }
    peer.dismiss()
}

/// Touches only both ends of it, so that a machine of little memory can run this, too.
fn beyond_four_gigabytes(context: &Context) -> Result<()> {
    let bytes = (4 << 30) + (6 << 20);
    let options = PublisherOptions {
        memory_limit: 16 << 30,
        ..context.domain.on(&context.device)
    };
    let publisher = Publisher::new("large", options)?;
    let stream = context.stream()?;
    let mut peer = context.peer()?;
    peer.subscribe("large")?;
    for seed in [10, 20] {
        let mut sample = match publisher.loan(&Layout::bytes_only(bytes)?) {
            Err(error @ Error::Limit(LimitFault::Device { .. })) => return skip(error.to_string()),
            other => other?,
        };
        let payload = Payload {
            mark: PayloadMark {
                seed,
                count: 1,
                tail: bytes - 8,
            },
            ..Payload::of(1, seed)
        };
        payload.fill(&mut sample, &stream)?;
        sample.send(&stream)?;
        all_whole(&peer.receive(1)?, [seed / 10])?;
    }
    peer.dismiss()
}

fn metadata(context: &Context) -> Result<()> {
    let publisher = context.publisher("metadata")?;
    let stream = context.stream()?;
    let mut subscriber = context.subscriber("metadata")?;
    let mut peer = context.peer()?;
    peer.subscribe("metadata")?;
    // A peer takes the first bytes for a mark; zeros claim no word.
    let bytes: Vec<u8> = (0..4096)
        .map(|at| if at < PayloadMark::BYTES { 0 } else { at as u8 })
        .collect();
    for length in (0..=258).chain([300, 4095, 4096]) {
        let metadata = &bytes[..length];
        let mut sample = publisher.loan(&Layout::contiguous(DType::U64, &[64])?)?;
        sample.set_metadata(metadata)?;
        sample.send(&stream)?;
        let received = subscriber.receive(&stream, PATIENCE)?;
        ensure!(
            received.metadata() == metadata,
            "{length} bytes became {:?}",
            received.metadata()
        );
        let item = peer.receive(1)?.remove(0);
        ensure!(
            item.metadata == digest(metadata),
            "{length} bytes became others in another process"
        );
    }
    drop(peer);
    let mut sample = publisher.loan(&Layout::bytes_only(1)?)?;
    match sample.set_metadata(&[0; 4097]) {
        Err(Error::Argument {
            argument: "metadata",
            ..
        }) => {}
        other => bail!("4097 bytes of metadata gave {other:?}"),
    }
    sample.send(&stream)?;
    ensure!(
        subscriber.receive(&stream, PATIENCE)?.metadata().is_empty(),
        "refused metadata leaves none behind"
    );
    Ok(())
}

fn copies_in(context: &Context) -> Result<()> {
    let publisher = context.publisher("copies")?;
    let stream = context.stream()?;
    let mut subscriber = context.subscriber("copies")?;
    let bytes: Vec<u8> = (0..40_000u32).map(|i| (i % 251) as u8).collect();
    publisher.send_bytes(&stream, &bytes)?;
    let layout = Layout::contiguous(DType::U8, &[200, 200])?;
    publisher.send_slice(&stream, &layout, &bytes)?;
    let mut source = publisher.loan(&layout)?;
    source.write(&stream, &bytes)?;
    // SAFETY: the source is a loan that lives until the stream has done the copy: the copy is
    // received below.
    unsafe { publisher.send_device(&stream, &layout, source.slot_ptr())? };
    for _ in 0..3 {
        let sample = subscriber.receive(&stream, PATIENCE)?;
        ensure!(
            sample.to_vec(PATIENCE)? == bytes,
            "sample {} is not what was copied in",
            sample.sequence()
        );
    }
    match source.write(&stream, &bytes[1..]) {
        Err(Error::Argument {
            argument: "the data",
            ..
        }) => Ok(()),
        other => bail!("a short slice gave {other:?}"),
    }
}

/// Copies on a stream without work and on one that is held up, each to a range of its own with
/// bytes around it that stay.
fn host_copies(context: &Context) -> Result<()> {
    const EDGES: [usize; 5] = [4 << 10, 32 << 10, 64 << 10, 1 << 20, 3 << 20];
    let (backend, mut rng) = (context.device.backend(), context.rng());
    let around = EDGES
        .into_iter()
        .flat_map(|edge| [edge - 1, edge, edge + 1]);
    let lengths: Vec<usize> = (0..=33).chain(around).collect();
    let room: usize = lengths.iter().map(|length| length + 8).sum();
    let memory = Memory::allocate(&context.device, room as u64)?;
    for is_held_up in [false, true] {
        let (stream, (go, wait)) = (context.stream()?, channel::<()>());
        memory.write(&stream, 0, &vec![0xa5; room])?;
        stream.synchronize(PATIENCE)?;
        if is_held_up {
            stream.call(move || {
                let _ = wait.recv();
            })?;
        }
        let (mut expected, mut ranges, mut at) = (vec![0xa5; room], Vec::new(), 0);
        for (number, &length) in lengths.iter().enumerate() {
            at += rng.usize(1..=4);
            let bytes: Vec<u8> = (0..length).map(|_| rng.u8(..)).collect();
            expected[at..at + length].copy_from_slice(&bytes);
            let to = memory.ptr() + at as u64;
            let (first, rest) = bytes.split_at(rng.usize(0..=length));
            let (second, third) = rest.split_at(rng.usize(0..=rest.len()));
            // SAFETY: the range lies in the memory, which outlives the copies, and only this stream
            // writes there.
            unsafe {
                match number % 2 {
                    0 => backend.upload(stream.raw(), to, &bytes)?,
                    _ => backend.upload_pieces(stream.raw(), to, &[first, &[], second, third])?,
                }
            }
            ranges.push((to, length as u64));
            at += length;
        }
        drop(go);
        stream.synchronize(PATIENCE)?;
        ensure!(
            memory.to_vec(PATIENCE)? == expected,
            "wrong bytes; held up: {is_held_up}"
        );
        // SAFETY: the ranges lie in the memory, where nothing writes.
        let copied = unsafe { backend.copy_to_host(stream.raw(), &ranges)? };
        let found: Vec<u8> = copied
            .wait()?
            .iter()
            .flat_map(|piece| piece.as_ref().to_vec())
            .collect();
        let sent: Vec<u8> = ranges
            .iter()
            .flat_map(|&(from, length)| {
                let from = (from - memory.ptr()) as usize;
                expected[from..from + length as usize].to_vec()
            })
            .collect();
        ensure!(found == sent, "other bytes came to the host");
    }
    Ok(())
}

fn page_locked(context: &Context) -> Result<()> {
    // More than the library's own pieces of such memory.
    const BYTES: usize = 2 << 20;
    let (backend, stream) = (context.device.backend(), context.stream()?);
    let memory = Memory::allocate(&context.device, BYTES as u64)?;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let base = unsafe { mmap_anonymous(std::ptr::null_mut(), BYTES, access, MapFlags::PRIVATE)? };
    // SAFETY: as long, zeroed, and of this function alone, also where the device copies.
    let host = unsafe { std::slice::from_raw_parts_mut(base.cast::<u8>(), BYTES) };
    // SAFETY: page-aligned memory that stays mapped until it is unregistered below.
    unsafe { backend.register(base.cast(), BYTES)? };
    let pattern: Vec<u8> = (0..BYTES).map(|at| (at * 7 + at / 251) as u8).collect();
    host.copy_from_slice(&pattern);
    // SAFETY: the memory is as long; the stream lives.
    unsafe { backend.upload(stream.raw(), memory.ptr(), host)? };
    host.fill(0);
    stream.synchronize(PATIENCE)?;
    ensure!(memory.to_vec(PATIENCE)? == pattern, "wrong bytes there");
    // SAFETY: as above.
    unsafe { backend.download(stream.raw(), host, memory.ptr())? };
    ensure!(*host == pattern, "wrong bytes came back");
    // SAFETY: registered and mapped above; no work uses it any more.
    unsafe {
        backend.unregister(base.cast())?;
        munmap(base, BYTES)?;
    }
    Ok(())
}
