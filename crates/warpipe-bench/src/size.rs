//! 4 KiB and 1 GiB: the same hand-over, since nothing is copied.

use warpipe_testkit::figure::{Figure, Wanted};

use super::handoff::{Answer, Measured, Terms, measure, p50_us};
use super::setup::Setup;

const SMALL: u64 = 4 << 10;
const LARGE: u64 = 1 << 30;

/// Round trips under way, for both sizes: all of them have memory of their own.
const DEPTH: u32 = 2;

/// "The same within noise".
const RATIO_MAX: f64 = 1.10;

pub fn run(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    let (mut small, mut large) = (Measured::default(), Measured::default());
    for _ in 0..if setup.quick { 1 } else { 3 } {
        for (into, bytes) in [(&mut small, SMALL), (&mut large, LARGE)] {
            let measured = measure(setup, &terms(setup, bytes))?;
            into.ours.extend(measured.ours);
            into.ours_single.extend(measured.ours_single);
        }
    }
    let (p50_large, p50_small) = (p50_us(&large.ours_single), p50_us(&small.ours_single));
    let note = format!(
        "the floor is the 4 KiB figure; single, awaited: {p50_large:.1} us and {p50_small:.1} us (p50)"
    );
    Ok(vec![
        Figure::new(
            "size",
            "round trip of 1 GiB beside 4 KiB",
            "us",
            &large.ours,
        )
        .beside(&small.ours)
        .spread(large.ours_single, small.ours_single)
        .wanted(Wanted::RatioAtMost(RATIO_MAX))
        .note(note),
    ])
}

fn terms(setup: &Setup, bytes: u64) -> Terms {
    let (piped, single) = (setup.times(400), setup.times(200));
    let answer = Answer::Kernel;
    Terms {
        place: setup.place(),
        answer,
        bytes,
        depth: DEPTH,
        rounds: setup.rounds().min(3),
        piped,
        single,
        cpus: None,
    }
}
