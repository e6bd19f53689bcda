//! The publisher's memory: loans, growth, limits.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use warpipe::{Error, Layout, LimitFault, Publisher, PublisherOptions};
use warpipe_testkit::eventually;

use super::{Case, all_whole};
use crate::context::Context;
use crate::payload::Payload;

pub(super) const CASES: &[Case] = &[
    Case::new(
        "a growing publisher's new regions reach connected subscribers",
        growth,
    ),
    Case::new(
        "the memory limit is an error, and memory given back is used again",
        limit,
    ),
    Case::new(
        "samples that grow and shrink are sent in what the limit leaves beside those that are held",
        changing_lengths,
    ),
    Case::new(
        "what a subscriber holds counts against the limit until it is released",
        limit_by_holders,
    ),
    Case::new(
        "a loan that is dropped or discarded returns its slot",
        loans_return,
    ),
    Case::new(
        "without subscribers samples are sent and their slots are reused",
        nobody_listens,
    ),
];

const MIB: u64 = 1 << 20;

fn growth(context: &Context) -> Result<()> {
    let options = PublisherOptions {
        memory_limit: 256 * MIB,
        ..context.domain.on(&context.device)
    };
    let publisher = Publisher::new("growing", options)?;
    let stream = context.stream()?;
    let mut peer = context.peer()?;
    peer.subscribe("growing")?;
    let mut memory = 0;
    let mut growths = 0;
    for (index, mebibytes) in [1, 1, 2, 4, 8, 16, 32].into_iter().enumerate() {
        Payload::of(mebibytes * MIB / 8, index as u64).send(&publisher, &stream)?;
        let stats = publisher.stats()?;
        let (used, allowed) = (stats.memory_bytes, stats.memory_limit);
        ensure!(used <= allowed, "{used} bytes of {allowed}");
        growths += u32::from(used > memory);
        memory = used;
    }
    ensure!(growths >= 4, "the case needs growth, not {growths} regions");
    peer.hold(7)?;
    let mut items = peer.release()?;
    items.sort_by_key(|item| item.sequence);
    all_whole(&items, 1..=7)?;
    peer.dismiss()
}

fn limit(context: &Context) -> Result<()> {
    let publisher = Publisher::new(
        "limited",
        PublisherOptions {
            memory_limit: 4 * MIB,
            loan_timeout: Duration::from_millis(20),
            ..context.domain.on(&context.device)
        },
    )?;
    let layout = Layout::bytes_only(MIB)?;
    let mut loans = (0..4)
        .map(|_| publisher.loan(&layout))
        .collect::<warpipe::Result<Vec<_>>>()?;
    match publisher.loan(&layout) {
        Err(Error::Limit(LimitFault::Memory {
            bytes: MIB,
            used,
            limit,
            ..
        })) => {
            ensure!(
                (used, limit) == (4 * MIB, 4 * MIB),
                "{used} of {limit} bytes in use"
            );
        }
        other => bail!("a fifth loan gave {other:?}"),
    }
    loans.pop();
    loans.push(publisher.loan(&layout)?);
    match publisher.loan(&Layout::bytes_only(5 * MIB)?) {
        Err(Error::Limit(LimitFault::Memory { .. })) => {}
        other => bail!("a loan beyond the limit gave {other:?}"),
    }
    drop(loans);
    drop(publisher.loan(&Layout::bytes_only(2 * MIB)?)?);
    Ok(())
}

/// Memory that no process holds goes back to the device where it is in the way.
fn changing_lengths(context: &Context) -> Result<()> {
    let limit = 64 * MIB;
    let publisher = Publisher::new(
        "lengths",
        PublisherOptions {
            memory_limit: limit,
            ..context.domain.on(&context.device)
        },
    )?;
    let stream = context.stream()?;
    let mut peer = context.peer()?;
    peer.subscribe("lengths")?;
    Payload::of(8, 1).send(&publisher, &stream)?;
    peer.hold(1)?;
    for round in 0..40 {
        let mebibytes = 1 + 7 * round % 41;
        Payload::of(mebibytes * MIB / 8, round + 2).send(&publisher, &stream)?;
        all_whole(&peer.receive(1)?, round + 2..=round + 2)?;
        let used = publisher.stats()?.memory_bytes;
        ensure!(used <= 2 * limit, "{used} bytes are mapped");
    }
    all_whole(&peer.release()?, 1..=1)?;
    let is_within = || {
        let _ = publisher.subscribers();
        publisher.stats().is_ok_and(|it| it.memory_bytes <= limit)
    };
    ensure!(
        eventually(crate::PATIENCE, is_within),
        "regions that were given back are mapped"
    );
    peer.dismiss()
}

fn limit_by_holders(context: &Context) -> Result<()> {
    let publisher = Publisher::new(
        "held",
        PublisherOptions {
            memory_limit: 2 * MIB,
            loan_timeout: Duration::from_millis(50),
            ..context.domain.on(&context.device)
        },
    )?;
    let stream = context.stream()?;
    let mut peer = context.peer()?;
    peer.subscribe("held")?;
    let words = MIB / 2 / 8;
    for round in 0..3 {
        for index in 1..=4 {
            Payload::of(words, 4 * round + index).send(&publisher, &stream)?;
        }
        peer.hold(4)?;
        match publisher.loan(&Layout::bytes_only(8)?) {
            Err(Error::Limit(LimitFault::Memory { .. })) => {}
            other => bail!("a loan while all memory is held gave {other:?}"),
        }
        let mut items = peer.release()?;
        items.sort_by_key(|item| item.sequence);
        all_whole(&items, 4 * round + 1..=4 * round + 4)?;
    }
    peer.dismiss()
}

fn loans_return(context: &Context) -> Result<()> {
    let options = PublisherOptions {
        memory_limit: 2 * MIB,
        loan_timeout: Duration::from_secs(5),
        ..context.domain.on(&context.device)
    };
    let publisher = Publisher::new("returned", options)?;
    let stream = context.stream()?;
    for round in 0..20 {
        drop(publisher.loan(&Layout::bytes_only(2 * MIB)?)?);
        let slow = Payload::of(2 * MIB / 8, round).slow(Duration::from_millis(3));
        slow.loan(&publisher, &stream)?.discard(&stream)?;
    }
    Ok(())
}

fn nobody_listens(context: &Context) -> Result<()> {
    let publisher = Publisher::new(
        "alone",
        PublisherOptions {
            memory_limit: 2 * MIB,
            ..context.domain.on(&context.device)
        },
    )?;
    let stream = context.stream()?;
    for seed in 1..=50 {
        ensure!(
            Payload::of(MIB / 8, seed).send(&publisher, &stream)? == seed,
            "the sequence goes on"
        );
    }
    let idle = eventually(crate::PATIENCE, || {
        publisher
            .loan(&Layout::bytes_only(2 * MIB).unwrap())
            .is_ok()
    });
    ensure!(idle, "all memory is free again");
    Ok(())
}
