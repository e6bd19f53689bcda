//! Policies for a full ring of a subscriber.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use warpipe::{Error, LimitFault, Policy, Publisher, PublisherOptions, Stream};
use warpipe_testkit::eventually;

use super::{Case, all_whole};
use crate::PATIENCE;
use crate::context::Context;
use crate::payload::Payload;
use crate::peer::{Order, Peer};

pub(super) const CASES: &[Case] = &[
    Case::new(
        "block waits, then returns the loan, and the loan can be sent later",
        block,
    ),
    Case::new(
        "block continues as soon as the subscriber releases",
        block_goes_on,
    ),
    Case::new("fail returns the loan at once", fail),
    Case::new(
        "drop-newest keeps the first samples, and both sides count the same drops",
        drop_newest,
    ),
    Case::new(
        "drop-oldest keeps the last samples, and both sides count the same drops",
        drop_oldest,
    ),
    Case::new(
        "the next sample says how many were dropped before it, and the sum is the publisher's",
        drops_are_told,
    ),
    Case::new(
        "drop-oldest takes nothing back that the subscriber holds",
        drop_oldest_spares_the_held,
    ),
    Case::new("each subscriber has its own policy", policy_of_each),
];

const WORDS: u64 = 256;
const DEPTH: u32 = 4;

fn start(context: &Context, policy: Policy) -> Result<(Publisher, Stream, Peer)> {
    let options = PublisherOptions {
        depth: DEPTH,
        policy,
        ..context.domain.on(&context.device)
    };
    let publisher = Publisher::new("full", options)?;
    let mut peer = context.peer()?;
    peer.subscribe("full")?;
    Ok((publisher, context.stream()?, peer))
}

/// Sends samples of the seeds, each complete before the next is sent.
fn send(
    publisher: &Publisher,
    stream: &Stream,
    seeds: std::ops::RangeInclusive<u64>,
) -> Result<()> {
    for seed in seeds {
        Payload::of(WORDS, seed).send(publisher, stream)?;
        stream.synchronize(PATIENCE)?;
    }
    Ok(())
}

/// Both sides' counts of what the peer's subscriber did not get.
fn drops(publisher: &Publisher, peer: &mut Peer) -> Result<(u64, u64)> {
    let here: u64 = publisher
        .subscribers()
        .iter()
        .map(|subscriber| subscriber.dropped)
        .sum();
    Ok((here, peer.number(&Order::Dropped { subscriber: 0 })?))
}

fn block(context: &Context) -> Result<()> {
    let (publisher, stream, mut peer) = start(
        context,
        Policy::Block {
            timeout: Duration::from_millis(50),
        },
    )?;
    send(&publisher, &stream, 1..=4)?;
    peer.hold(4)?;
    let loan = Payload::of(WORDS, 5).loan(&publisher, &stream)?;
    let failed = match loan.send(&stream) {
        Err(failed) => failed,
        Ok(sequence) => bail!("sample {sequence} went into a full ring"),
    };
    ensure!(matches!(failed.error, Error::Timeout { .. }), "{failed}");
    peer.release()?;
    let loan = failed.returned.context("the loan comes back")?;
    ensure!(loan.send(&stream)? == 5, "the same loan is sample 5");
    all_whole(&peer.receive(1)?, [5])?;
    ensure!(
        drops(&publisher, &mut peer)? == (0, 0),
        "blocking drops nothing"
    );
    peer.dismiss()
}

fn block_goes_on(context: &Context) -> Result<()> {
    let (publisher, stream, mut peer) = start(context, Policy::Block { timeout: PATIENCE })?;
    peer.send(&Order::Receive {
        subscriber: 0,
        count: 300,
        hold: false,
    })?;
    for seed in 1..=300 {
        Payload::of(WORDS, seed).send(&publisher, &stream)?;
    }
    match peer.answer()?? {
        crate::peer::Answer::Items(items) => all_whole(&items, 1..=300)?,
        other => bail!("{other:?}"),
    }
    peer.dismiss()
}

fn fail(context: &Context) -> Result<()> {
    let (publisher, stream, mut peer) = start(context, Policy::Fail)?;
    send(&publisher, &stream, 1..=4)?;
    let failed = match Payload::of(WORDS, 5)
        .loan(&publisher, &stream)?
        .send(&stream)
    {
        Err(failed) => failed,
        Ok(sequence) => bail!("sample {sequence} went into a full ring"),
    };
    match &failed.error {
        Error::Limit(LimitFault::Depth {
            subscriber, depth, ..
        }) => {
            ensure!(
                *depth == DEPTH && subscriber.contains(&peer.id().to_string()),
                "{failed}"
            );
        }
        _ => bail!("{failed}"),
    }
    all_whole(&peer.receive(4)?, 1..=4)?;
    let mut loan = failed.returned;
    // On a device the release may take a moment; a full ring gives the loan back each time.
    let sent = eventually(PATIENCE, || {
        match loan.take().map(|loan| loan.send(&stream)) {
            Some(Ok(_)) => true,
            Some(Err(failed)) => {
                loan = failed.returned;
                false
            }
            None => false,
        }
    });
    ensure!(sent, "there is room after the release");
    all_whole(&peer.receive(1)?, [5])?;
    peer.dismiss()
}

fn drop_newest(context: &Context) -> Result<()> {
    let (publisher, stream, mut peer) = start(context, Policy::DropNewest)?;
    send(&publisher, &stream, 1..=10)?;
    ensure!(
        drops(&publisher, &mut peer)? == (6, 6),
        "6 of 10 do not fit: {:?}",
        drops(&publisher, &mut peer)?
    );
    all_whole(&peer.receive(4)?, 1..=4)?;
    send(&publisher, &stream, 11..=11)?;
    all_whole(&peer.receive(1)?, [11])?;
    ensure!(drops(&publisher, &mut peer)? == (6, 6), "no further drop");
    peer.dismiss()
}

fn drop_oldest(context: &Context) -> Result<()> {
    let (publisher, stream, mut peer) = start(context, Policy::DropOldest)?;
    send(&publisher, &stream, 1..=10)?;
    ensure!(
        drops(&publisher, &mut peer)? == (6, 6),
        "6 of 10 do not fit: {:?}",
        drops(&publisher, &mut peer)?
    );
    all_whole(&peer.receive(4)?, 7..=10)?;
    send(&publisher, &stream, 11..=12)?;
    all_whole(&peer.receive(2)?, 11..=12)?;
    ensure!(drops(&publisher, &mut peer)? == (6, 6), "no further drop");
    peer.dismiss()
}

fn drops_are_told(context: &Context) -> Result<()> {
    for policy in [Policy::DropOldest, Policy::DropNewest] {
        let (publisher, stream, mut peer) = start(context, policy)?;
        let (mut last, mut missing) = (0, 0);
        // The first sample comes before any is dropped, and the last one after all of them.
        for count in [1, 10, 2, 4, 5, 7, 1] {
            send(&publisher, &stream, 1..=count)?;
            for item in peer.receive(count.min(DEPTH.into()))? {
                ensure!(
                    item.sequence == last + 1 + item.missing && item.previous.is_none(),
                    "with {policy:?} {item:?} comes after {last}"
                );
                (last, missing) = (item.sequence, missing + item.missing);
            }
        }
        let due = (10, 10);
        ensure!(
            drops(&publisher, &mut peer)? == due && missing == due.0,
            "{missing} are missing, and {:?} dropped, with {policy:?}",
            drops(&publisher, &mut peer)?
        );
        peer.dismiss()?;
    }
    Ok(())
}

fn drop_oldest_spares_the_held(context: &Context) -> Result<()> {
    let (publisher, stream, mut peer) = start(context, Policy::DropOldest)?;
    send(&publisher, &stream, 1..=2)?;
    peer.hold(2)?;
    send(&publisher, &stream, 3..=10)?;
    all_whole(&peer.receive(2)?, 9..=10)?;
    let mut items = peer.release()?;
    items.sort_by_key(|item| item.sequence);
    all_whole(&items, 1..=2)?;
    ensure!(
        drops(&publisher, &mut peer)? == (6, 6),
        "3 to 8 are dropped: {:?}",
        drops(&publisher, &mut peer)?
    );
    peer.dismiss()
}

fn policy_of_each(context: &Context) -> Result<()> {
    let (mut slow, mut fast) = (context.peer()?, context.peer()?);
    let slow_pid = slow.id() as i32;
    let choose = move |peer: &warpipe::PeerCredentials| match peer.pid == slow_pid {
        true => Policy::DropNewest,
        false => Policy::Block { timeout: PATIENCE },
    };
    let options = PublisherOptions {
        depth: DEPTH,
        policy_of: Some(Arc::new(choose)),
        ..context.domain.on(&context.device)
    };
    let publisher = Publisher::new("each", options)?;
    let stream = context.stream()?;
    slow.subscribe("each")?;
    fast.subscribe("each")?;
    for sequence in 1..=20 {
        send(&publisher, &stream, sequence..=sequence)?;
        all_whole(&fast.receive(1)?, [sequence])?;
    }
    all_whole(&slow.receive(4)?, 1..=4)?;
    let (here, there) = (drops(&publisher, &mut slow)?, drops(&publisher, &mut fast)?);
    ensure!(
        here == (16, 16) && there == (16, 0),
        "{here:?} and {there:?}"
    );
    slow.dismiss()?;
    fast.dismiss()
}
