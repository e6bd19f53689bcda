//! Kills at random moments, many of them.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use warpipe::{Error, Stream, Subscriber};

use super::Case;
use crate::PATIENCE;
use crate::chance::Chance;
use crate::context::Context;
use crate::guard::PublisherGuard;
use crate::payload::{Payload, Tally};
use crate::peer::{Batch, Order, Peer, PolicyPlan, PublisherPlan};
use crate::process::eventually;

pub(super) const CASES: &[Case] = &[
    Case::new("publishers killed at random: nothing torn, doubled, or lost that was ready", publishers)
        .ends_clients()
        .long(1800),
    Case::new("publishers killed at random under one reconnecting subscriber", reconnecting).ends_clients().long(1800),
    Case::new("subscribers killed at random: the publisher goes on and leaks nothing", subscribers)
        .ends_clients()
        .long(1800),
];

const WORDS: u64 = 2048;

/// What survivors saw, over all kills.
#[derive(Debug, Default)]
struct Toll {
    received: u64,
    lost: u64,
}

/// What one incarnation sent, as its survivor sees it.
struct Survivor<'a> {
    subscriber: &'a mut Subscriber,
    stream: &'a Stream,
    tally: &'a mut Tally,
    chance: Chance,
}

impl Survivor<'_> {
    /// Receives and checks until the publisher's end. Returns the highest sequence number that was whole, and how
    /// many samples were lost behind it.
    fn drain(&mut self) -> Result<(u64, u64)> {
        let (mut whole, mut lost) = (0, 0);
        loop {
            let sample = match self.subscriber.receive_timeout(self.stream, Duration::from_millis(20)) {
                Ok(sample) => sample,
                Err(Error::PublisherGone { graceful: false, .. }) => return Ok((whole, lost)),
                // With `reconnect` the end is told by there being no publisher any more.
                Err(Error::Timeout { .. }) if self.subscriber.publisher_state().is_none() => return Ok((whole, lost)),
                Err(Error::Timeout { .. }) => continue,
                Err(error) => bail!(error),
            };
            let sequence = sample.sequence();
            if self.chance.once_in(4) {
                // Without a check of ours in between: released, and then asked.
                match sample.finish(PATIENCE) {
                    Ok(()) => {}
                    Err(Error::SampleLost { .. }) => {
                        lost += 1;
                        continue;
                    }
                    Err(error) => bail!(error),
                }
            } else {
                match self.tally.finish(sample) {
                    Ok(wrong) => ensure!(wrong == 0, "sample {sequence} is torn: {wrong} wrong words"),
                    Err(error) => match error.downcast_ref::<Error>() {
                        Some(Error::SampleLost { .. }) => {
                            lost += 1;
                            continue;
                        }
                        _ => return Err(error),
                    },
                }
            }
            ensure!(lost == 0, "sample {sequence} is whole behind a lost one of the same stream");
            ensure!(sequence == whole + 1, "sample {sequence} after sample {whole}: doubled or skipped");
            whole = sequence;
        }
    }
}

/// A publisher of random depth, ready to stream.
fn streamer(context: &Context, chance: &mut Chance, reconnects: bool) -> Result<Peer> {
    let mut peer = context.peer()?;
    let depth = chance.between(2, 16) as u32;
    let policy = Some(PolicyPlan::Block(PATIENCE.as_millis() as u64));
    // A reconnecting subscriber comes late; the history holds what the ring does.
    let history = reconnects.then_some(depth);
    peer.publish(PublisherPlan { depth: Some(depth), history, policy, ..PublisherPlan::of("storm") })?;
    Ok(peer)
}

fn ready_in(lines: impl IntoIterator<Item = String>) -> Result<u64> {
    let number = |line: String| line.strip_prefix("ready ").and_then(|number| number.parse::<u64>().ok());
    let numbers = lines.into_iter().map(|line| number(line.clone()).with_context(|| format!("the line {line:?}")));
    numbers.collect::<Result<Vec<_>>>().map(|numbers| numbers.into_iter().max().unwrap_or(0))
}

/// Lets it stream, and kills it. Returns the last sample that it told ready.
fn stream_and_strike(peer: &mut Peer, chance: &mut Chance) -> Result<u64> {
    let slow = Duration::from_micros(*chance.pick(&[0, 0, 50, 300, 2000]));
    peer.tell(&Order::Stream(Batch::of(1, WORDS, chance.any() >> 16).slow(slow)))?;
    let mut ready = 0;
    for _ in 0..chance.below(3) {
        ready = ready_in(peer.line(PATIENCE)?)?;
    }
    std::thread::park_timeout(Duration::from_micros(chance.below(3000)));
    peer.kill()?;
    Ok(ready_in(peer.last_lines()?)?.max(ready))
}

/// One kill under a subscriber that receives meanwhile. Everything that was ready must have come.
fn one_kill(peer: &mut Peer, mut survivor: Survivor<'_>, chance: &mut Chance, toll: &mut Toll) -> Result<()> {
    let (ready, (whole, lost)) = std::thread::scope(|scope| -> Result<_> {
        let drained = scope.spawn(move || survivor.drain());
        let ready = stream_and_strike(peer, chance)?;
        Ok((ready, drained.join().map_err(|_| anyhow::anyhow!("a panic"))??))
    })?;
    ensure!(whole >= ready, "sample {ready} was ready, and {whole} is the last received");
    toll.received += whole;
    toll.lost += lost;
    Ok(())
}

fn publishers(context: &Context) -> Result<()> {
    let (mut chance, stream) = (context.chance(), context.stream()?);
    let mut tally = context.tally()?;
    let mut toll = Toll::default();
    let guard = context.guard();
    let kills = context.rounds(25, 500, 100);
    for kill in 1..=kills {
        let mut peer = streamer(context, &mut chance, false)?;
        let mut subscriber = context.subscriber("storm").build()?;
        let dice = Chance::new(chance.any());
        let survivor = Survivor { subscriber: &mut subscriber, stream: &stream, tally: &mut tally, chance: dice };
        one_kill(&mut peer, survivor, &mut chance, &mut toll).with_context(|| format!("kill {kill}"))?;
        drop((subscriber, peer));
        context.domain.clean()?;
        guard.settles().with_context(|| format!("after kill {kill}"))?;
    }
    tell(context, kills, &toll)
}

fn reconnecting(context: &Context) -> Result<()> {
    let (mut chance, stream) = (context.chance(), context.stream()?);
    let mut tally = context.tally()?;
    let mut toll = Toll::default();
    let mut peer = streamer(context, &mut chance, true)?;
    let mut subscriber = context.subscriber("storm").reconnect(true).build()?;
    let kills = context.rounds(15, 200, 50);
    for kill in 1..=kills {
        if kill > 1 {
            peer = streamer(context, &mut chance, true)?;
            // Attached before the first sample, so that nothing is missed.
            let follows = || subscriber.try_receive(&stream).is_ok() && subscriber.publisher_state().is_some();
            ensure!(eventually(PATIENCE, follows), "kill {kill}: it follows the next incarnation");
        }
        let dice = Chance::new(chance.any());
        let survivor = Survivor { subscriber: &mut subscriber, stream: &stream, tally: &mut tally, chance: dice };
        one_kill(&mut peer, survivor, &mut chance, &mut toll).with_context(|| format!("kill {kill}"))?;
    }
    tell(context, kills, &toll)
}

fn subscribers(context: &Context) -> Result<()> {
    let mut chance = context.chance();
    let slots = 8;
    let builder = context.publisher("storm").depth(4).memory_limit(slots * (256 << 10)).loan_timeout(PATIENCE);
    let publisher = builder.build()?;
    let stream = context.stream()?;
    let mut tally = context.tally()?;
    let mut witness = context.subscriber("storm").build()?;
    let mut send = |count: u64| -> Result<()> {
        for _ in 0..count {
            let sequence = Payload::of((256 << 10) / 8, count).send(&publisher, &stream)?;
            let sample = witness.receive(&stream)?;
            ensure!(sample.sequence() == sequence, "sample {} where {sequence} is due", sample.sequence());
            ensure!(tally.finish(sample)? == 0, "sample {sequence} is torn");
        }
        Ok(())
    };
    send(slots)?;
    let mut guard = PublisherGuard::take(&publisher, &context.domain);
    let kills = context.rounds(25, 500, 100);
    let mut checked = 0;
    for kill in 1..=kills {
        let mut victim = context.peer()?;
        victim.subscribe("storm")?;
        victim.tell(&Order::Consume { subscriber: 0, hold: chance.below(4) as usize })?;
        send(chance.between(1, 12))?;
        std::thread::park_timeout(Duration::from_micros(chance.below(2000)));
        victim.strike()?;
        send(slots + 4).with_context(|| format!("kill {kill}"))?;
        victim.ended()?;
        for line in victim.last_lines()? {
            ensure!(line.starts_with("got ") && line.ends_with(" 0"), "kill {kill}: the victim saw {line:?}");
            checked += 1;
        }
        drop(victim);
        ensure!(eventually(PATIENCE, || publisher.subscribers().len() == 1), "kill {kill}: the dead are forgotten");
        guard.settles().with_context(|| format!("after kill {kill}"))?;
    }
    context.figure("kills", kills);
    context.figure("checked_by_victims", checked);
    Ok(())
}

fn tell(context: &Context, kills: u32, toll: &Toll) -> Result<()> {
    context.figure("kills", kills);
    context.figure("received_whole", toll.received);
    context.figure("lost_unready", toll.lost);
    ensure!(toll.received > 0, "the storm let something through");
    Ok(())
}
