//! Owners of names, and their successors.

use anyhow::{Result, bail, ensure};
use std::time::Duration;
use warpipe::{
    Error, NameFault, PeerState, Publisher, PublisherOptions, Sample, Stream, Subscriber,
    SubscriberOptions,
};
use warpipe_testkit::eventually;

use super::Case;
use crate::PATIENCE;
use crate::context::Context;
use crate::peer::{Batch, Order, Peer, PolicyPlan, PublisherPlan, SubscriberPlan};
use warpipe::OptionalExtension;

pub(super) const CASES: &[Case] = &[
    Case::new(
        "a second live publisher of a name gets an error with the first one's pid",
        taken_names_tell_their_holder,
    ),
    Case::new(
        "a killed publisher's name can be taken at once",
        dead_names_are_free,
    ),
    Case::new(
        "a closed publisher's name can be taken at once",
        closed_names_are_free,
    ),
    Case::new(
        "a subscriber finds no publisher, or waits for one",
        nobody_and_somebody,
    ),
    Case::new(
        "reconnect follows a killed publisher's next incarnation and reports the gap",
        reconnect_after_death,
    )
    .ends_clients(),
    Case::new(
        "reconnect follows a closed publisher's next incarnation and reports the gap",
        reconnect_after_goodbye,
    ),
    Case::new(
        "what is missing of the next incarnation's samples is counted after its first one",
        gaps_of_the_next,
    )
    .ends_clients(),
    Case::new(
        "the next incarnation's first sample that is not lost reports the one before",
        lost_first_sample,
    )
    .ends_clients(),
];

fn taken_names_tell_their_holder(context: &Context) -> Result<()> {
    let mut peer = context.peer()?;
    peer.publish(PublisherPlan::of("camera/front"))?;
    match context.publisher("camera/front") {
        Err(Error::Name(NameFault::Taken { name, holder })) => {
            ensure!(name == "camera/front", "the name {name:?}");
            ensure!(
                holder.pid == Some(peer.id() as i32),
                "held by {holder}, not by process {}",
                peer.id()
            );
        }
        other => bail!("a taken name gave {other:?}"),
    }
    let mut subscriber = context.subscriber("camera/front")?;
    ensure!(
        subscriber.publisher().map(|it| it.pid) == Some(peer.id() as i32),
        "the publisher's pid is the peer's"
    );
    peer.ask(&Order::Send(Batch::of(1, 64, 1)))?;
    let stream = context.stream()?;
    ensure!(
        context
            .error_counters()?
            .finish(subscriber.receive(&stream, PATIENCE)?)?
            == 0,
        "the first publisher is undisturbed"
    );
    peer.dismiss()
}

fn dead_names_are_free(context: &Context) -> Result<()> {
    for _ in 0..3 {
        let mut peer = context.peer()?;
        peer.publish(PublisherPlan::of("heir"))?;
        peer.kill()?;
        let publisher = context.publisher("heir")?;
        let mut subscriber = context.subscriber("heir")?;
        let stream = context.stream()?;
        publisher.send_bytes(&stream, b"mine")?;
        ensure!(
            subscriber.receive(&stream, PATIENCE)?.to_vec(PATIENCE)? == b"mine",
            "the heir's data"
        );
        let files = std::fs::read_dir(context.domain.path())?.count();
        ensure!(
            files == 2,
            "a name is a socket and a lock, not {files} files"
        );
    }
    Ok(())
}

fn closed_names_are_free(context: &Context) -> Result<()> {
    for _ in 0..20 {
        drop(context.publisher("again")?);
    }
    let left = std::fs::read_dir(context.domain.path())?.count();
    ensure!(left == 0, "a closed publisher leaves no file, not {left}");
    Ok(())
}

fn nobody_and_somebody(context: &Context) -> Result<()> {
    match context.subscriber("nobody") {
        Err(Error::NotFound { name, .. }) => ensure!(name == "nobody", "the name {name:?}"),
        other => bail!("a name that nobody publishes gave {other:?}"),
    }
    let mut early = context.peer()?;
    let wait_ms = Some(PATIENCE.as_millis() as u64);
    early.send(&Order::Subscribe(SubscriberPlan {
        wait_ms,
        ..SubscriberPlan::of("somebody")
    }))?;
    let options = PublisherOptions {
        history: 1,
        ..context.domain.on(&context.device)
    };
    let publisher = Publisher::new("somebody", options)?;
    publisher.wait_for_subscribers(1, PATIENCE)?;
    early.answer()??;
    crate::payload::Payload::of(64, 3).send(&publisher, &context.stream()?)?;
    ensure!(
        early.receive(1)?[0].is_whole(),
        "an early subscriber receives like any other"
    );
    early.dismiss()
}

fn reconnect_after_death(context: &Context) -> Result<()> {
    reconnect(context, false)
}

fn reconnect_after_goodbye(context: &Context) -> Result<()> {
    reconnect(context, true)
}

fn reconnect(context: &Context, graceful: bool) -> Result<()> {
    let stream = context.stream()?;
    let mut error_counters = context.error_counters()?;
    let mut previous = None;
    let mut subscriber = None;
    for incarnation in 0..4 {
        let mut peer = context.peer()?;
        // With history, because no subscriber reconnects before it looks.
        peer.publish(PublisherPlan {
            history: Some(3),
            ..PublisherPlan::of("phoenix")
        })?;
        peer.ask(&Order::SendAndWait(Batch::of(3, 64, 10 * incarnation)))?;
        if subscriber.is_none() {
            subscriber = Some(Subscriber::open(
                "phoenix",
                SubscriberOptions {
                    reconnect: true,
                    ..context.domain.on(&context.device)
                },
                Duration::ZERO,
            )?);
        }
        let Some(subscriber) = &mut subscriber else {
            unreachable!("made above")
        };
        for sequence in 1..=3 {
            let sample = subscriber.receive(&stream, PATIENCE)?;
            ensure!(
                sample.sequence() == sequence,
                "sample {} where {sequence} is due",
                sample.sequence()
            );
            let gap = sample
                .info()
                .discontinuity
                .map(|gap| (gap.missing, gap.previous.map(|it| (it.pid, it.graceful))));
            let due = previous.filter(|_| sequence == 1).map(|it| (0, Some(it)));
            ensure!(
                gap == due,
                "incarnation {incarnation}, sample {sequence}: gap {gap:?} where {due:?} is due"
            );
            ensure!(
                error_counters.finish(sample)? == 0,
                "sample {sequence} of incarnation {incarnation} is whole"
            );
        }
        previous = Some((peer.id() as i32, graceful));
        if graceful {
            peer.dismiss()?
        } else {
            peer.kill()?
        }
    }
    Ok(())
}

/// A subscriber that has received the only sample of a publisher that was killed, and now has the
/// next one, which has sent nothing; and the process of the one before.
struct Succession {
    subscriber: Subscriber,
    stream: Stream,
    next: Peer,
    before: i32,
}

impl Succession {
    fn begin(context: &Context, next_plan: PublisherPlan) -> Result<Succession> {
        let stream = context.stream()?;
        let mut first = context.peer()?;
        first.publish(PublisherPlan::of("phoenix"))?;
        let mut subscriber = Subscriber::open(
            "phoenix",
            SubscriberOptions {
                reconnect: true,
                ..context.domain.on(&context.device)
            },
            Duration::ZERO,
        )?;
        first.ask(&Order::SendAndWait(Batch::of(1, 64, 1)))?;
        let sample = subscriber.receive(&stream, PATIENCE)?;
        ensure!(
            sample.info().discontinuity.is_none(),
            "nothing before {sample:?}"
        );
        drop(sample);
        first.kill()?;
        let mut next = context.peer()?;
        next.publish(next_plan)?;
        let due = Some(next.id() as i32);
        let mut follow = || {
            let looked = subscriber.receive(&stream, Duration::ZERO).optional();
            matches!(looked, Ok(None)) && subscriber.publisher().map(|it| it.pid) == due
        };
        ensure!(eventually(PATIENCE, &mut follow), "it follows the next one");
        Ok(Succession {
            subscriber,
            stream,
            next,
            before: first.id() as i32,
        })
    }
}

/// How many are missing before it, and the process of the publisher before.
fn gap(sample: &Sample) -> Option<(u64, Option<i32>)> {
    let gap = sample.info().discontinuity?;
    Some((gap.missing, gap.previous.map(|previous| previous.pid)))
}

fn gaps_of_the_next(context: &Context) -> Result<()> {
    let mut all = Succession::begin(
        context,
        PublisherPlan {
            depth: Some(4),
            policy: Some(PolicyPlan::DropOldest),
            ..PublisherPlan::of("phoenix")
        },
    )?;
    let mut error_counters = context.error_counters()?;
    let (mut received, mut sent, mut last, mut missing) = (0, 0, 0, 0);
    // There is room for the last one, whatever was dropped before it.
    for count in [10, 10, 1] {
        all.next
            .ask(&Order::SendAndWait(Batch::of(count, 64, sent)))?;
        sent += count;
        while received + all.subscriber.dropped() < sent {
            let sample = all.subscriber.receive(&all.stream, PATIENCE)?;
            let due = match (last, sample.sequence() - last - 1) {
                (0, _) => Some((0, Some(all.before))),
                (_, 0) => None,
                (_, missing) => Some((missing, None)),
            };
            let found = gap(&sample);
            ensure!(
                found == due,
                "{found:?} where {due:?} is due before {sample:?}"
            );
            (received, last) = (received + 1, sample.sequence());
            missing += found.map_or(0, |(missing, _)| missing);
            ensure!(error_counters.finish(sample)? == 0, "it is whole");
        }
    }
    ensure!(
        last == sent && missing > 0,
        "{missing} were missing to {last}"
    );
    all.next.dismiss()
}

fn lost_first_sample(context: &Context) -> Result<()> {
    let mut all = Succession::begin(context, PublisherPlan::of("phoenix"))?;
    all.next.ask(&Order::SendBehindGate(Batch::of(1, 64, 1)))?;
    all.next.ask(&Order::SendAside(Batch::of(2, 64, 2)))?;
    all.next.kill()?;
    let is_proven = || all.subscriber.publisher().map(|it| it.state) == Some(PeerState::Dead);
    ensure!(eventually(PATIENCE, is_proven), "its death is proven");
    let mut dues = vec![Some((0, Some(all.before))), None];
    let mut sample = all.subscriber.receive(&all.stream, PATIENCE)?;
    // Else the rescue comes by after this one was taken.
    if sample.sequence() == 1 {
        dues.insert(1, None);
    }
    let first = sample.sequence();
    for (due, sequence) in dues.into_iter().zip(first..) {
        if sequence > first {
            sample = all.subscriber.receive(&all.stream, PATIENCE)?;
        }
        let found = gap(&sample);
        ensure!(
            sample.sequence() == sequence && found == due,
            "{found:?} where {due:?} is due before {sample:?}"
        );
    }
    Ok(())
}
