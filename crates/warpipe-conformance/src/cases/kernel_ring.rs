//! Kernel rings between processes: items, ends, deaths, graphs.

use anyhow::{Context as _, Result, bail, ensure};
use warpipe::{Error, KernelRing, KernelRingOptions, RingEnd};
use warpipe_kernels::checksum_of;

use super::Case;
use crate::context::Context;
use crate::graph::Graphs;
use crate::peer::{Order, Peer, RING_WORDS, RingOrder, RingPair, RingSide};

pub(super) const CASES: &[Case] = &[
    Case::new(
        "kernels of three processes hand over items on a ring, each whole and once",
        handed_over,
    ),
    Case::new(
        "a ring's producer is killed: a waiting consumer's kernel has what was published and ends",
        killed_producer,
    )
    .ends_clients(),
    Case::new(
        "a ring's consumer is killed: a waiting producer's kernel ends",
        killed_consumer,
    )
    .ends_clients(),
    Case::new(
        "a ring's consumer that closes ends a waiting producer's kernel without harm",
        closed_consumer,
    ),
    Case::new(
        "a ring between two processes on one GPU is refused in time slices, and open under MPS",
        refused_in_time_slices,
    ),
    Case::new(
        "a ring whose side stops ends that side's waiting kernel, and then its peer's",
        stopped,
    ),
    Case::new(
        "graphs replay a ring's steps in two processes, and every item is right and comes once",
        replayed,
    )
    .limit(300),
    Case::new(
        "a round trip by a ring's steps goes on in replays of a graph where single launches left it",
        round_trips,
    )
    .limit(300),
];

const NAME: &str = "ring";

fn number(peer: &mut Peer, order: RingOrder) -> Result<u64> {
    peer.number(&Order::Ring(order))
}

fn order(peer: &mut Peer, order: RingOrder) -> Result<()> {
    peer.ask(&Order::Ring(order)).map(drop)
}

fn handed_over(context: &Context) -> Result<()> {
    // Where processes take turns, each full ring costs a slice of the GPU's time.
    let count = context.rounds(400, 4000, 400).into();
    let producer = RingSide::create(context, NAME, 2)?;
    let mut consumers = [context.peer()?, context.peer()?];
    for peer in &mut consumers {
        order(peer, RingOrder::Open(NAME.into()))?;
    }
    producer.ring.wait_for_consumers(crate::PATIENCE)?;
    for (blocks, peer) in [1, 2].into_iter().zip(&mut consumers) {
        order(peer, RingOrder::Launch { count, blocks })?;
    }
    producer.launch(count, 2)?;
    for peer in &mut consumers {
        let status = number(peer, RingOrder::Finish)?;
        let wrong = number(peer, RingOrder::Wrong)?;
        ensure!(
            (status, wrong) == (0, 0),
            "status {status}, {wrong} wrong words"
        );
    }
    let status = producer.finish()?;
    ensure!(status == 0, "the producer's status is {status}");
    drop(producer);
    consumers.into_iter().try_for_each(Peer::dismiss)
}

fn killed_producer(context: &Context) -> Result<()> {
    for _ in 0..context.rounds(3, 30, 10) {
        let mut victim = context.peer()?;
        let create = RingOrder::Create {
            name: NAME.into(),
            consumers: 1,
        };
        order(&mut victim, create)?;
        let consumer = RingSide::open(context, NAME)?;
        order(&mut victim, RingOrder::Start)?;
        let (count, blocks) = (5, 1);
        order(&mut victim, RingOrder::Launch { count, blocks })?;
        let status = number(&mut victim, RingOrder::Finish)?;
        ensure!(status == 0, "the producer's status is {status}");
        consumer.launch(count + 1, 1)?;
        victim.kill()?;
        let status = consumer.finish()?;
        ensure!(
            RingEnd::of_status(status) == Some(RingEnd::Died),
            "the consumer's status is {status}"
        );
        let wrong = consumer.wrong()?;
        ensure!(wrong == 0, "{wrong} wrong words");
        consumer.ring.wait_on(&consumer.stream)?;
        consumer.finish()?;
        match consumer.ring.check() {
            Err(Error::PeerGone {
                pid,
                graceful: false,
                ..
            }) if pid == victim.id() as i32 => {}
            other => bail!("a step behind the producer's death gave {other:?}"),
        }
        drop(consumer);
        context.domain.clean()?;
    }
    Ok(())
}

fn killed_consumer(context: &Context) -> Result<()> {
    for round in 0..context.rounds(3, 30, 10) {
        // A producer's name is free when its kernels are done.
        let name = format!("{NAME}-{round}");
        let producer = RingSide::create(context, &name, 1)?;
        let mut victim = context.peer()?;
        order(&mut victim, RingOrder::Open(name))?;
        producer.ring.wait_for_consumers(crate::PATIENCE)?;
        producer.launch(producer.ring.info().depth + 1, 1)?;
        victim.kill()?;
        let status = producer.finish()?;
        ensure!(
            RingEnd::of_status(status) == Some(RingEnd::Died),
            "the producer's status is {status}"
        );
    }
    Ok(())
}

fn closed_consumer(context: &Context) -> Result<()> {
    let producer = RingSide::create(context, NAME, 1)?;
    let mut peer = context.peer()?;
    order(&mut peer, RingOrder::Open(NAME.into()))?;
    producer.ring.wait_for_consumers(crate::PATIENCE)?;
    producer.launch(producer.ring.info().depth + 1, 1)?;
    order(&mut peer, RingOrder::Close)?;
    let status = producer.finish()?;
    ensure!(
        RingEnd::of_status(status) == Some(RingEnd::Closed),
        "the producer's status is {status}"
    );
    peer.dismiss()
}

fn refused_in_time_slices(context: &Context) -> Result<()> {
    let runs_beside = context.device.backend().runs_beside_other_processes();
    let producer = KernelRing::new(NAME, context.domain.on(&context.device))?;
    let mut peer = context.peer()?;
    match peer.try_ask(&Order::Ring(RingOrder::Open(NAME.into())))? {
        Ok(_) => ensure!(runs_beside, "it was opened in time slices"),
        Err(fault) => ensure!(
            !runs_beside && fault.kind == "Argument" && fault.text.contains("MPS"),
            "the refusal is {fault:?}"
        ),
    }
    context.figure("runs_beside_other_processes", runs_beside);
    order(&mut peer, RingOrder::Close)?;
    drop(producer);
    peer.dismiss()
}

fn stopped(context: &Context) -> Result<()> {
    let producer = RingSide::create(context, NAME, 1)?;
    let mut peer = context.peer()?;
    order(&mut peer, RingOrder::Open(NAME.into()))?;
    producer.ring.wait_for_consumers(crate::PATIENCE)?;
    let (count, blocks) = (1, 1);
    order(&mut peer, RingOrder::Launch { count, blocks })?;
    producer.launch(producer.ring.info().depth + 2, 1)?;
    producer.ring.stop();
    let status = producer.finish()?;
    ensure!(
        RingEnd::of_status(status) == Some(RingEnd::Stopped),
        "the producer's status is {status}"
    );
    // The consumer's next wait ends when the producer has closed.
    let status = number(&mut peer, RingOrder::Finish)?;
    ensure!(status == 0, "the consumer's status is {status}");
    let count = producer.ring.info().depth + 1;
    order(&mut peer, RingOrder::Launch { count, blocks })?;
    drop(producer);
    let status = number(&mut peer, RingOrder::Finish)?;
    ensure!(
        RingEnd::of_status(status) == Some(RingEnd::Closed),
        "the consumer's status is {status}"
    );
    order(&mut peer, RingOrder::Close)?;
    peer.dismiss()
}

fn replayed(context: &Context) -> Result<()> {
    drop(Graphs::of(context)?);
    let times = u64::from(context.rounds(250, 250, 10_000));
    let producer = RingSide::create(context, NAME, 1)?;
    let mut peer = context.peer()?;
    order(&mut peer, RingOrder::Open(NAME.into()))?;
    producer.ring.wait_for_consumers(crate::PATIENCE)?;
    peer.send(&Order::Ring(RingOrder::Replay(times)))?;
    producer.replay(context, times)?;
    peer.answer()?.context("the consumer's replays")?;
    let items = times * producer.ring.info().depth;
    let of = |value: u64| checksum_of(&[value; RING_WORDS as usize]);
    let due = (1..=items).fold(0u64, |sum, value| sum.wrapping_add(of(value)));
    let sum = number(&mut peer, RingOrder::Wrong)?;
    order(&mut peer, RingOrder::Check)?;
    producer.ring.check()?;
    ensure!(
        sum == due,
        "the sum of {items} items is {sum:#x}, not {due:#x}"
    );
    context.figure("items", items);
    drop(producer);
    peer.dismiss()
}

/// Alternates between single launches and replays, which share the position. The figures are of
/// the whole trips, in the order of the measurements: launches and replays take turns.
fn round_trips(context: &Context) -> Result<()> {
    drop(Graphs::of(context)?);
    // In time slices of one GPU each trip costs each side a slice.
    let trips = match context.device.backend().runs_beside_other_processes() {
        true => u64::from(context.rounds(100, 100, 2000)),
        false => 20,
    };
    let options = KernelRingOptions {
        allow_time_slices: true,
        ..context.domain.on(&context.device)
    };
    let out = KernelRing::new("out", options)?;
    let mut peer = context.peer()?;
    let pair = RingOrder::Pair("out".into(), "back".into());
    peer.send(&Order::Ring(pair))?;
    let pair = RingPair::begin(context, out, "back")?;
    peer.answer()?.context("the other side's rings")?;
    let mut each_us = [Vec::new(), Vec::new()];
    for round in 0..6 {
        let replays = round % 2 == 1;
        peer.send(&Order::Ring(RingOrder::Echo { trips, replays }))?;
        let took = pair.travel(context, trips, replays)?;
        peer.answer()?.context("the other side's trips")?;
        each_us[usize::from(replays)].push(took.as_nanos() as f64 / 1e3 / trips as f64);
    }
    let [launched, replayed] = each_us;
    context.figure("launched_us", launched);
    context.figure("replayed_us", replayed);
    drop(pair);
    order(&mut peer, RingOrder::Close)?;
    peer.dismiss()
}
