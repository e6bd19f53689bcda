//! One item there and one back; one way is half of that.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::ensure;
use serde::{Deserialize, Serialize};
use warpipe::Domain;
use warpipe_bench::peer_process::{Control, PeerProcess};
use warpipe_bench::raw::LINE_BYTES;
use warpipe_bench::rings::Payload;
use warpipe_testkit::figure::{Figure, Quantiles, Wanted};
use warpipe_testkit::temporary_folder;

use super::link::{
    BareConsumer, BareParts, BareProducer, Consumer, Iceoryx, Library, OurConsumer, OurProducer,
    Producer, Wait, bare_patience,
};
use super::place::Placement;
use super::{Length, Measured, Role};

/// The parameters of both processes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Terms {
    domain: PathBuf,
    /// The names of both directions, there and back.
    names: [String; 2],
    placement: Placement,
    wait: Wait,
    rounds: usize,
    trips: usize,
}

pub fn run(placement: Placement, sleeps: bool, length: Length) -> anyhow::Result<Vec<Figure>> {
    let folder = temporary_folder()?;
    let wait = match sleeps {
        true => Wait::Sleep,
        false if placement.is_shared_by(2) => Wait::PollAndYield,
        false => Wait::Poll,
    };
    let own = std::process::id();
    let terms = Terms {
        domain: folder.path().join("domain"),
        names: [
            format!("comparison/{own}-there"),
            format!("comparison/{own}-back"),
        ],
        placement,
        wait,
        rounds: length.rounds,
        trips: length.times(if sleeps { 2000 } else { 20_000 }),
    };
    let measured = measure(&terms)?;
    let how = if sleeps { "receiver asleep" } else { "polling" };
    let name = format!("128 bytes one way, {how}, {placement}");
    let limit = match (placement, sleeps) {
        (Placement::One { .. }, _) => 2.0,
        (_, true) => 0.9,
        (_, false) => 0.85,
    };
    let beside_bare = match (placement, sleeps) {
        (Placement::Near { .. }, false) => Wanted::BesideFloorAtMost(200.0),
        (Placement::Apart { .. }, false) => Wanted::RatioAtMost(2.2),
        _ => Wanted::Nothing,
    };
    Ok(measured.figures(&name, limit, beside_bare))
}

/// One process's ends of one library.
struct Ends<'a> {
    library: Library,
    out: Box<dyn Producer + 'a>,
    back: Box<dyn Consumer + 'a>,
}

/// The ends of all libraries in one process. Both processes make their producers first: a consumer
/// waits for its producer.
fn ends<'a>(
    terms: &Terms,
    bare: &'a [BareParts; 2],
    [out, back]: [usize; 2],
    iceoryx: &Iceoryx,
) -> anyhow::Result<Vec<Ends<'a>>> {
    let domain = Domain::at(&terms.domain)?;
    let mut all = Vec::new();
    if let Some(patience) = bare_patience(terms.wait) {
        all.push(Ends {
            library: Library::Bare,
            out: Box::new(BareProducer::new(
                std::slice::from_ref(&bare[out]),
                patience,
            )),
            back: Box::new(BareConsumer::new(&bare[back], patience)),
        });
    }
    let ours = OurProducer::new(&domain, &terms.names[out])?;
    let peer = iceoryx.producer(&terms.names[out], terms.wait)?;
    all.push(Ends {
        library: Library::Warpipe,
        out: Box::new(ours),
        back: Box::new(OurConsumer::new(&domain, &terms.names[back], terms.wait)?),
    });
    all.push(Ends {
        library: Library::Iceoryx2,
        out: Box::new(peer),
        back: Box::new(iceoryx.consumer(&terms.names[back], terms.wait)?),
    });
    Ok(all)
}

const THERE: Payload = [1; LINE_BYTES];
const BACK: Payload = [2; LINE_BYTES];

fn measure(terms: &Terms) -> anyhow::Result<Measured> {
    let bare = [BareParts::create()?, BareParts::create()?];
    let peer = PeerProcess::start(&Role::OneWay(terms.clone()))?;
    bare.iter()
        .try_for_each(|parts| parts.send_to(&peer.control))?;
    let iceoryx = Iceoryx::new()?;
    let mut all = ends(terms, &bare, [0, 1], &iceoryx)?;
    // Both have all ends.
    peer.control.hear::<()>()?;
    peer.control.send(&())?;
    let mut measured = Measured::default();
    let settled = terms.placement.settle(0, 2)?;
    for round in 0..=terms.rounds {
        for ends in &mut all {
            let ns = trips(ends, terms.trips)?;
            // The first round warms up.
            if round > 0 {
                measured.add(ends.library, ns);
            }
        }
    }
    drop(settled);
    // The peer's last answer may lie in memory of its own.
    peer.control.send(&())?;
    peer.end()?;
    Ok(measured)
}

/// The median of half a trip, in nanoseconds.
fn trips(ends: &mut Ends<'_>, trips: usize) -> anyhow::Result<f64> {
    let mut samples = Vec::with_capacity(trips);
    for _ in 0..trips {
        let start = Instant::now();
        ends.out.send(&THERE)?;
        let payload = ends.back.receive()?;
        samples.push(start.elapsed().as_nanos() as u64 / 2);
        ensure!(payload == BACK, "other bytes came back");
    }
    Ok(Quantiles::of(samples).map_or(f64::NAN, |all| all.p50 as f64))
}

/// The other process's part: gives everything back.
pub fn answer(terms: &Terms, control: &Control) -> anyhow::Result<()> {
    let bare = [
        BareParts::receive_from(control)?,
        BareParts::receive_from(control)?,
    ];
    let iceoryx = Iceoryx::new()?;
    let mut all = ends(terms, &bare, [1, 0], &iceoryx)?;
    control.send(&())?;
    control.hear::<()>()?;
    let _settled = terms.placement.settle(1, 2)?;
    for _ in 0..=terms.rounds {
        for ends in &mut all {
            for _ in 0..terms.trips {
                ensure!(ends.back.receive()? == THERE, "other bytes came");
                ends.out.send(&BACK)?;
            }
        }
    }
    control.hear()
}
