//! Random channels against a simple model.

use anyhow::{Context as _, Result, ensure};
use std::sync::Arc;
use std::time::Duration;
use warpipe::{Error, LimitFault, Policy, Publisher, PublisherOptions};
use warpipe_testkit::{Rng, pick};

use super::Case;
use crate::PATIENCE;
use crate::context::Context;
use crate::payload::Payload;
use warpipe::OptionalExtension;

pub(super) const CASES: &[Case] = &[Case::new(
    "random policies, depths, sizes and release orders keep the channel's promises",
    random_channels,
)
.long(900)];

fn random_channels(context: &Context) -> Result<()> {
    let mut rng = context.rng();
    let rounds = context.rounds(25, 2000, 500);
    let mut totals = Totals::default();
    for round in 0..rounds {
        let seed = rng.u64(..);
        one_channel(context, Rng::with_seed(seed), &mut totals)
            .with_context(|| format!("round {round}, seed {} of the run", context.settings.seed))?;
    }
    context.figure("channels", rounds);
    context.figure("sent", totals.sent);
    context.figure("received", totals.received);
    context.figure("dropped", totals.dropped);
    Ok(())
}

#[derive(Debug, Default)]
struct Totals {
    sent: u64,
    received: u64,
    dropped: u64,
}

/// One subscriber's view: what it holds, and what it has seen.
struct View {
    subscriber: warpipe::Subscriber,
    policy: Policy,
    held: Vec<warpipe::Sample>,
    last: u64,
    received: u64,
}

fn one_channel(context: &Context, mut rng: Rng, totals: &mut Totals) -> Result<()> {
    let depth = rng.u64(1..=9);
    let policies = [
        Policy::Block {
            timeout: std::time::Duration::ZERO,
        },
        Policy::DropOldest,
        Policy::DropNewest,
        Policy::Fail,
    ];
    let (streams, mut error_counters) = (
        [context.stream()?, context.stream()?],
        context.error_counters()?,
    );
    let next = std::sync::Arc::new(std::sync::Mutex::new(policies[0]));
    let choose = {
        let next = next.clone();
        move |_: &warpipe::PeerCredentials| next.lock().map_or(Policy::Fail, |policy| *policy)
    };
    let options = PublisherOptions {
        depth: depth as u32,
        policy_of: Some(Arc::new(choose)),
        ..context.domain.on(&context.device)
    };
    let publisher = Publisher::new("model", options)?;
    let mut views = Vec::new();
    for _ in 0..rng.u64(1..=3) {
        let policy = *pick(&mut rng, &policies);
        *next.lock().map_err(|_| anyhow::anyhow!("a panic"))? = policy;
        let subscriber = context.subscriber("model")?;
        views.push(View {
            subscriber,
            policy,
            held: Vec::new(),
            last: 0,
            received: 0,
        });
    }
    let mut sent = 0;
    for _ in 0..rng.u64(20..=80) {
        if rng.bool() {
            let words = *pick(&mut rng, &[0, 1, 64, 512, 5000, 40_000]);
            let slow = std::time::Duration::from_micros(*pick(&mut rng, &[0, 0, 0, 300]));
            match Payload::of(words, rng.u64(..) >> 8)
                .slow(slow)
                .send(&publisher, &streams[0])
            {
                Ok(sequence) => {
                    ensure!(
                        sequence == sent + 1,
                        "sample {sequence} was sent after {sent}"
                    );
                    sent = sequence;
                }
                Err(Error::Timeout { .. } | Error::Limit(LimitFault::Depth { .. })) => {}
                Err(error) => return Err(error.into()),
            }
            continue;
        }
        let index = rng.u64(..views.len() as u64) as usize;
        step(
            &mut views[index],
            &streams[1],
            &mut error_counters,
            &mut rng,
        )?;
    }
    streams[0].synchronize(PATIENCE)?;
    for view in &mut views {
        drain(view, &streams[1], &mut error_counters, sent)?;
        totals.received += view.received;
        totals.dropped += view.subscriber.dropped();
    }
    totals.sent += sent;
    let counted: Vec<u64> = publisher
        .subscribers()
        .iter()
        .map(|one| one.dropped)
        .collect();
    let seen: Vec<u64> = views.iter().map(|view| view.subscriber.dropped()).collect();
    ensure!(
        counted == seen,
        "the publisher counts {counted:?} drops, the subscribers {seen:?}"
    );
    Ok(())
}

/// Receives or releases something.
fn step(
    view: &mut View,
    stream: &warpipe::Stream,
    error_counters: &mut crate::payload::ErrorCounters,
    rng: &mut Rng,
) -> Result<()> {
    if rng.bool() && !view.held.is_empty() {
        let sample = view
            .held
            .swap_remove(rng.u64(..view.held.len() as u64) as usize);
        let sequence = sample.sequence();
        if rng.u64(..3) == 0 {
            drop(sample);
        } else {
            ensure!(
                error_counters.finish(sample)? == 0,
                "sample {sequence} has wrong words"
            );
        }
        return Ok(());
    }
    if let Some(sample) = view.subscriber.receive(stream, Duration::ZERO).optional()? {
        note(view, &sample)?;
        view.held.push(sample);
    }
    Ok(())
}

fn note(view: &mut View, sample: &warpipe::Sample) -> Result<()> {
    let (sequence, last) = (sample.sequence(), view.last);
    let lossless = matches!(view.policy, Policy::Block { .. } | Policy::Fail);
    ensure!(sequence > last, "sample {sequence} after {last}");
    ensure!(
        !lossless || sequence == last + 1,
        "sample {sequence} after {last} under {:?}",
        view.policy
    );
    view.last = sequence;
    view.received += 1;
    Ok(())
}

/// Takes the rest. Then everything that was sent was either received or dropped.
fn drain(
    view: &mut View,
    stream: &warpipe::Stream,
    error_counters: &mut crate::payload::ErrorCounters,
    sent: u64,
) -> Result<()> {
    while let Some(sample) = view.held.pop() {
        let sequence = sample.sequence();
        ensure!(
            error_counters.finish(sample)? == 0,
            "sample {sequence} has wrong words"
        );
    }
    while view.received + view.subscriber.dropped() < sent {
        let sample = view.subscriber.receive(stream, PATIENCE)?;
        note(view, &sample)?;
        ensure!(
            error_counters.finish(sample)? == 0,
            "sample {} has wrong words",
            view.last
        );
    }
    ensure!(
        view.subscriber
            .receive(stream, Duration::ZERO)
            .optional()?
            .is_none(),
        "no more comes than was sent"
    );
    let (received, dropped) = (view.received, view.subscriber.dropped());
    ensure!(
        received + dropped == sent,
        "{received} received and {dropped} dropped of {sent} sent"
    );
    Ok(())
}
