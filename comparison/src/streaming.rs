//! One producer that sends as fast as its consumers take: the time of an item.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::ensure;
use serde::{Deserialize, Serialize};
use warpipe::Domain;
use warpipe_bench::peer_process::{Control, PeerProcess};
use warpipe_bench::raw::LINE_BYTES;
use warpipe_bench::rings::Payload;
use warpipe_testkit::figure::{Figure, Wanted};
use warpipe_testkit::temporary_folder;

use super::link::{
    BareConsumer, BareParts, BareProducer, Consumer, Iceoryx, Library, OurConsumer, OurProducer,
    Producer, Wait, bare_patience,
};
use super::place::Placement;
use super::{Length, Measured, Role};

/// The parameters of all processes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Terms {
    domain: PathBuf,
    name: String,
    placement: Placement,
    wait: Wait,
    /// This consumer among so many.
    index: usize,
    consumers: usize,
    rounds: usize,
    items: u64,
}

pub fn run(placement: Placement, consumers: usize, length: Length) -> anyhow::Result<Vec<Figure>> {
    let folder = temporary_folder()?;
    let terms = Terms {
        domain: folder.path().join("domain"),
        name: format!("comparison/{}-stream", std::process::id()),
        placement,
        wait: match placement.is_shared_by(consumers + 1) {
            true => Wait::PollAndYield,
            false => Wait::Poll,
        },
        index: 0,
        consumers,
        rounds: length.rounds,
        items: length.times(50_000) as u64,
    };
    let measured = measure(&terms)?;
    let how = match terms.wait {
        Wait::PollAndYield => "polling and yielding",
        _ => "polling",
    };
    let name = format!("128 bytes pipelined, {consumers} subscribers, {how}, {placement}");
    let limit = match placement {
        Placement::One { .. } => 2.0,
        _ => 0.8,
    };
    Ok(measured.figures(&name, limit, Wanted::Nothing))
}

/// The item `number` of a round.
fn item(number: u64) -> Payload {
    let mut payload = [0; LINE_BYTES];
    payload[..8].copy_from_slice(&number.to_le_bytes());
    payload
}

fn measure(terms: &Terms) -> anyhow::Result<Measured> {
    let mut bare = Vec::new();
    let mut peers = Vec::new();
    for index in 0..terms.consumers {
        let terms = Terms {
            index,
            ..terms.clone()
        };
        let peer = PeerProcess::start(&Role::Streaming(terms))?;
        let parts = BareParts::create()?;
        parts.send_to(&peer.control)?;
        bare.push(parts);
        peers.push(peer);
    }
    let domain = Domain::at(&terms.domain)?;
    let iceoryx = Iceoryx::new()?;
    let mut all: Vec<(Library, Box<dyn Producer + '_>)> = Vec::new();
    if let Some(patience) = bare_patience(terms.wait) {
        all.push((Library::Bare, Box::new(BareProducer::new(&bare, patience))));
    }
    all.push((
        Library::Warpipe,
        Box::new(OurProducer::new(&domain, &terms.name)?),
    ));
    let mut peer = iceoryx.producer(&terms.name, terms.wait)?;
    // Every consumer has all ends; then, it has connected them to those here.
    for _ in 0..2 {
        peers
            .iter()
            .try_for_each(|peer| peer.control.hear::<()>())?;
        peers.iter().try_for_each(|peer| peer.control.send(&()))?;
    }
    let mut measured = Measured::default();
    let settled = terms.placement.settle(0, terms.consumers + 1)?;
    for round in 0..=terms.rounds {
        let mut one = |library, producer: &mut dyn Producer| -> anyhow::Result<()> {
            let start = Instant::now();
            for number in 0..terms.items {
                producer.send(&item(number))?;
            }
            // Each consumer has received the last item.
            peers
                .iter()
                .try_for_each(|peer| peer.control.hear::<()>())?;
            let ns = start.elapsed().as_nanos() as f64 / terms.items as f64;
            if round > 0 {
                measured.add(library, ns);
            }
            Ok(())
        };
        for (library, producer) in &mut all {
            one(*library, producer.as_mut())?;
        }
        one(Library::Iceoryx2, &mut peer)?;
    }
    drop(settled);
    peers.into_iter().try_for_each(PeerProcess::end)?;
    Ok(measured)
}

/// A consumer's part.
pub fn consume(terms: &Terms, control: &Control) -> anyhow::Result<()> {
    let parts = BareParts::receive_from(control)?;
    let domain = Domain::at(&terms.domain)?;
    let iceoryx = Iceoryx::new()?;
    let mut all: Vec<(Library, Box<dyn Consumer + '_>)> = Vec::new();
    if let Some(patience) = bare_patience(terms.wait) {
        all.push((Library::Bare, Box::new(BareConsumer::new(&parts, patience))));
    }
    let ours = OurConsumer::new(&domain, &terms.name, terms.wait)?;
    all.push((Library::Warpipe, Box::new(ours)));
    let peer = iceoryx.consumer(&terms.name, terms.wait)?;
    control.send(&())?;
    control.hear::<()>()?;
    peer.connect()?;
    all.push((Library::Iceoryx2, Box::new(peer)));
    control.send(&())?;
    control.hear::<()>()?;
    let _settled = terms
        .placement
        .settle(terms.index + 1, terms.consumers + 1)?;
    for _ in 0..=terms.rounds {
        for (library, consumer) in &mut all {
            for number in 0..terms.items {
                let payload = consumer.receive()?;
                let wrong =
                    || format!("{library:?}: item {number} begins with {:?}", &payload[..8]);
                ensure!(payload == item(number), wrong());
            }
            control.send(&())?;
        }
    }
    Ok(())
}
