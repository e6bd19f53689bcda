//! Kills at random moments, many of them.

use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use warpipe::{
    Error, Loss, Publisher, PublisherOptions, Sample, Stream, Subscriber, SubscriberOptions,
};
use warpipe_testkit::{Rng, eventually, pick};

use super::Case;
use crate::PATIENCE;
use crate::context::Context;
use crate::guard::PublisherGuard;
use crate::payload::{ErrorCounters, Payload};
use crate::peer::{Batch, Order, Peer, PolicyPlan, PublisherPlan};
use warpipe::OptionalExtension;

pub(super) const CASES: &[Case] = &[
    Case::new(
        "publishers killed at random: nothing torn, doubled, or lost that was ready",
        publishers,
    )
    .ends_clients()
    .long(1800),
    Case::new(
        "publishers killed at random under one reconnecting subscriber",
        reconnecting,
    )
    .ends_clients()
    .long(1800),
    Case::new(
        "publishers killed at random under a reconnecting subscriber that sleeps until one is back",
        sleeping,
    )
    .ends_clients()
    .long(1800),
    Case::new(
        "subscribers killed at random: the publisher continues and leaks nothing",
        subscribers,
    )
    .ends_clients()
    .long(1800),
];

const WORDS: u64 = 2048;

/// The survivors' observations, over all kills.
#[derive(Debug, Default)]
struct Toll {
    received: u64,
    lost: u64,
}

/// Shorter than any wait inside the library, and longer.
const SHORT: Duration = Duration::from_millis(20);
const LONG: Duration = Duration::from_secs(3600);

/// The samples of one incarnation, as its survivor sees them.
#[derive(Debug, Default)]
struct Seen {
    /// The highest sequence number that was whole.
    whole: u64,
    /// How many were lost behind it.
    lost: u64,
}

impl Seen {
    /// Releases a sample, mostly checked.
    fn add(
        &mut self,
        sample: Sample,
        error_counters: &mut ErrorCounters,
        rng: &mut Rng,
    ) -> Result<()> {
        let sequence = sample.sequence();
        let finished = if rng.u64(..4) == 0 {
            // Without a check of ours in between: released, and then asked.
            sample.finish(PATIENCE).map(|()| 0).map_err(Into::into)
        } else {
            error_counters.finish(sample)
        };
        match finished {
            Ok(wrong) => ensure!(wrong == 0, "sample {sequence} is torn: {wrong} wrong words"),
            Err(error)
                if matches!(error.downcast_ref(), Some(Error::Lost(Loss::Sample { .. }))) =>
            {
                self.lost += 1;
                return Ok(());
            }
            Err(error) => return Err(error),
        }
        ensure!(
            self.lost == 0,
            "sample {sequence} is whole behind a lost one of the same stream"
        );
        ensure!(
            sequence == self.whole + 1,
            "sample {sequence} after sample {}: doubled or skipped",
            self.whole
        );
        self.whole = sequence;
        Ok(())
    }
}

/// Receives and checks until the publisher's end.
fn drain(
    subscriber: &mut Subscriber,
    stream: &Stream,
    error_counters: &mut ErrorCounters,
    mut rng: Rng,
) -> Result<Seen> {
    let mut seen = Seen::default();
    loop {
        match subscriber.receive(stream, SHORT) {
            Ok(sample) => seen.add(sample, error_counters, &mut rng)?,
            Err(Error::PeerGone {
                graceful: false, ..
            }) => return Ok(seen),
            // With `reconnect` the end shows as the absence of a publisher.
            Err(Error::Timeout { .. }) if subscriber.publisher().map(|it| it.state).is_none() => {
                return Ok(seen);
            }
            Err(Error::Timeout { .. }) => {}
            Err(error) => bail!(error),
        }
    }
}

/// Receives and checks from one incarnation after the other, each wait as long as it takes. Tells
/// of each once the next one's first sample has come, and ends with the `last`.
fn follow(
    mut subscriber: Subscriber,
    stream: &Stream,
    mut error_counters: ErrorCounters,
    mut rng: Rng,
    last: u32,
    seen_sender: &Sender<Result<Seen>>,
) -> Result<()> {
    let mut seen = Seen::default();
    let mut reported = 0;
    while reported < last {
        let sample = subscriber.receive(stream, LONG)?;
        let previous = sample.info().discontinuity.and_then(|gap| gap.previous);
        if previous.is_some() {
            seen_sender.send(Ok(std::mem::take(&mut seen)))?;
            reported += 1;
        }
        seen.add(sample, &mut error_counters, &mut rng)?;
    }
    Ok(())
}

/// A publisher of random depth, ready to stream.
fn streamer(context: &Context, rng: &mut Rng, reconnects: bool) -> Result<Peer> {
    // One that holds everything holds the name's lock.
    context.orphans_end()?;
    let mut peer = context.mortal(rng)?;
    peer.publish(plan(rng, reconnects))?;
    Ok(peer)
}

fn plan(rng: &mut Rng, reconnects: bool) -> PublisherPlan {
    let depth = rng.u64(2..=16) as u32;
    let policy = Some(PolicyPlan::Block(PATIENCE.as_millis() as u64));
    // A reconnecting subscriber comes late; the history holds what the ring does.
    let history = reconnects.then_some(depth);
    PublisherPlan {
        depth: Some(depth),
        history,
        policy,
        ..PublisherPlan::of("storm")
    }
}

fn ready_in(lines: impl IntoIterator<Item = String>) -> Result<u64> {
    let number = |line: String| {
        line.strip_prefix("ready ")
            .and_then(|number| number.parse::<u64>().ok())
    };
    let numbers = lines
        .into_iter()
        .map(|line| number(line.clone()).with_context(|| format!("the line {line:?}")));
    numbers
        .collect::<Result<Vec<_>>>()
        .map(|numbers| numbers.into_iter().max().unwrap_or(0))
}

/// Lets it stream, and kills it once it has reported that `least` samples are ready. Returns the
/// last that it reported.
fn stream_and_strike(peer: &mut Peer, rng: &mut Rng, least: u64) -> Result<u64> {
    start_stream(peer, rng)?;
    let mut ready = 0;
    while ready < least {
        ready = ready_in(peer.line(PATIENCE)?)?;
    }
    strike(peer, rng, ready)
}

fn start_stream(peer: &mut Peer, rng: &mut Rng) -> Result<()> {
    let slow = Duration::from_micros(*pick(rng, &[0, 0, 50, 300, 2000]));
    peer.send(&Order::Stream(
        Batch::of(1, WORDS, rng.u64(..) >> 16).slow(slow),
    ))
}

fn strike(peer: &mut Peer, rng: &mut Rng, ready: u64) -> Result<u64> {
    std::thread::park_timeout(Duration::from_micros(rng.u64(..3000)));
    peer.kill()?;
    Ok(ready_in(peer.last_lines()?)?.max(ready))
}

/// One kill under a subscriber that receives meanwhile. Everything that was ready must have come.
fn one_kill(
    peer: &mut Peer,
    drain: impl FnOnce() -> Result<Seen> + Send,
    rng: &mut Rng,
    toll: &mut Toll,
) -> Result<()> {
    let (ready, seen) = std::thread::scope(|scope| -> Result<_> {
        let drained = scope.spawn(drain);
        let least = rng.u64(..3);
        let ready = stream_and_strike(peer, rng, least)?;
        Ok((
            ready,
            drained.join().map_err(|_| anyhow::anyhow!("a panic"))??,
        ))
    })?;
    toll.add(ready, &seen)
}

impl Toll {
    fn add(&mut self, ready: u64, seen: &Seen) -> Result<()> {
        ensure!(
            seen.whole >= ready,
            "sample {ready} was ready, and {} is the last received",
            seen.whole
        );
        self.received += seen.whole;
        self.lost += seen.lost;
        Ok(())
    }
}

fn publishers(context: &Context) -> Result<()> {
    let (mut rng, stream) = (context.rng(), context.stream()?);
    let mut error_counters = context.error_counters()?;
    let mut toll = Toll::default();
    let guard = context.guard();
    let kills = context.kills(25, 500, 100);
    for kill in 1..=kills {
        let mut peer = streamer(context, &mut rng, false)?;
        let mut subscriber = context.subscriber("storm")?;
        let dice = Rng::with_seed(rng.u64(..));
        let drain = || drain(&mut subscriber, &stream, &mut error_counters, dice);
        one_kill(&mut peer, drain, &mut rng, &mut toll).with_context(|| format!("kill {kill}"))?;
        drop((subscriber, peer));
        context.orphans_end()?;
        context.domain.clean()?;
        guard
            .settles()
            .with_context(|| format!("after kill {kill}"))?;
    }
    report(context, kills, &toll)
}

fn reconnecting(context: &Context) -> Result<()> {
    let (mut rng, stream) = (context.rng(), context.stream()?);
    let mut error_counters = context.error_counters()?;
    let mut toll = Toll::default();
    let mut peer = streamer(context, &mut rng, true)?;
    let options = SubscriberOptions {
        reconnect: true,
        ..context.domain.on(&context.device)
    };
    let mut subscriber = Subscriber::open("storm", options, Duration::ZERO)?;
    let kills = context.kills(15, 200, 50);
    for kill in 1..=kills {
        if kill > 1 {
            peer = streamer(context, &mut rng, true)?;
            // Attached before the first sample, so that nothing is missed.
            let follows = || {
                subscriber
                    .receive(&stream, Duration::ZERO)
                    .optional()
                    .is_ok()
                    && subscriber.publisher().map(|it| it.state).is_some()
            };
            ensure!(
                eventually(PATIENCE, follows),
                "kill {kill}: it follows the next incarnation"
            );
            peer.ask(&Order::AwaitSubscribers(1))?;
        }
        let dice = Rng::with_seed(rng.u64(..));
        let drain = || drain(&mut subscriber, &stream, &mut error_counters, dice);
        one_kill(&mut peer, drain, &mut rng, &mut toll).with_context(|| format!("kill {kill}"))?;
    }
    report(context, kills, &toll)
}

/// No wait of the subscriber ends by itself within the case: without a wake-up it never returns.
fn sleeping(context: &Context) -> Result<()> {
    let mut rng = context.rng();
    let mut toll = Toll::default();
    let mut peer = speaker(context, &mut rng)?;
    let subscriber = Subscriber::open(
        "storm",
        SubscriberOptions {
            reconnect: true,
            ..context.domain.on(&context.device)
        },
        Duration::ZERO,
    )?;
    // Only then has it received the history.
    peer.ask(&Order::AwaitSubscribers(1))?;
    let (stream, error_counters, dice) = (
        context.stream()?,
        context.error_counters()?,
        Rng::with_seed(rng.u64(..)),
    );
    let (seen_sender, seen_receiver) = channel();
    let kills = context.kills(15, 200, 50);
    // Joined only if all went well: else it sleeps until this process ends.
    let following = std::thread::spawn(move || {
        let ended = follow(
            subscriber,
            &stream,
            error_counters,
            dice,
            kills,
            &seen_sender,
        );
        let _ = ended.map_err(|error| seen_sender.send(Err(error)));
    });
    for kill in 1..=kills {
        let mut one = || -> Result<()> {
            start_stream(&mut peer, &mut rng)?;
            let ready = strike(&mut peer, &mut rng, 1)?;
            peer = speaker(context, &mut rng)?;
            let seen = seen_receiver
                .recv_timeout(PATIENCE)
                .context("the next publisher's first sample did not come")??;
            toll.add(ready, &seen)
        };
        one().with_context(|| format!("kill {kill}"))?;
    }
    following.join().map_err(|_| anyhow::anyhow!("a panic"))?;
    drop(peer);
    report(context, kills, &toll)
}

/// A publisher that has sent one sample, mostly before its subscriber has come, and keeps still
/// then: its memory is announced with the handshake, so that nothing but the sample can ring.
/// Returned once it has its subscriber.
fn speaker(context: &Context, rng: &mut Rng) -> Result<Peer> {
    context.orphans_end()?;
    let mut peer = context.mortal(rng)?;
    peer.send(&Order::Publish(plan(rng, true)))?;
    peer.send(&Order::SendAndWait(Batch::of(1, WORDS, rng.u64(..) >> 16)))?;
    for _ in 0..2 {
        peer.answer()??;
    }
    Ok(peer)
}

fn subscribers(context: &Context) -> Result<()> {
    let mut rng = context.rng();
    let slots = 8;
    let options = PublisherOptions {
        depth: 4,
        memory_limit: slots * (256 << 10),
        loan_timeout: PATIENCE,
        ..context.domain.on(&context.device)
    };
    let publisher = Publisher::new("storm", options)?;
    let stream = context.stream()?;
    let mut error_counters = context.error_counters()?;
    let mut witness = context.subscriber("storm")?;
    let mut send = |count: u64| -> Result<()> {
        for _ in 0..count {
            let sequence = Payload::of((256 << 10) / 8, count).send(&publisher, &stream)?;
            let sample = witness.receive(&stream, PATIENCE)?;
            ensure!(
                sample.sequence() == sequence,
                "sample {} where {sequence} is due",
                sample.sequence()
            );
            ensure!(
                error_counters.finish(sample)? == 0,
                "sample {sequence} is torn"
            );
        }
        Ok(())
    };
    send(slots)?;
    let mut guard = PublisherGuard::take(&publisher, &context.domain);
    let kills = context.kills(25, 500, 100);
    let mut checked = 0;
    for kill in 1..=kills {
        let mut victim = context.mortal(&mut rng)?;
        victim.subscribe("storm")?;
        victim.send(&Order::Consume {
            subscriber: 0,
            hold: rng.u64(..4) as usize,
        })?;
        send(rng.u64(1..=12))?;
        std::thread::park_timeout(Duration::from_micros(rng.u64(..2000)));
        victim.strike()?;
        send(slots + 4).with_context(|| format!("kill {kill}"))?;
        victim.ended()?;
        for line in victim.last_lines()? {
            ensure!(
                line.starts_with("got ") && line.ends_with(" 0"),
                "kill {kill}: the victim saw {line:?}"
            );
            checked += 1;
        }
        drop(victim);
        ensure!(
            eventually(PATIENCE, || publisher.subscribers().len() == 1),
            "kill {kill}: the dead are forgotten"
        );
        guard
            .settles()
            .with_context(|| format!("after kill {kill}"))?;
    }
    context.figure_storm(kills)?;
    context.figure("checked_by_victims", checked);
    Ok(())
}

fn report(context: &Context, kills: u32, toll: &Toll) -> Result<()> {
    context.figure_storm(kills)?;
    context.figure("received_whole", toll.received);
    context.figure("lost_unready", toll.lost);
    ensure!(toll.received > 0, "the storm let something through");
    Ok(())
}
