//! One direction, eight items in flight; on GPUs also in steps from the floor to the library.

pub mod steps;

use warpipe_testkit::figure::{Figure, Wanted};

use super::fanout;
use super::setup::Setup;

pub fn run(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    let mut places = vec![("one device", setup.place())];
    places.extend(
        setup
            .second
            .map(|second| ("two devices", setup.place_on(second))),
    );
    let mut figures = Vec::new();
    for (name, place) in places {
        let measured = fanout::measure(setup, place.clone(), 1, setup.times(2000))?;
        let title = format!("per item, 8 in flight, {name}");
        figures.push(
            Figure::new("pipeline", title, "us", &measured.ours)
                .beside(&measured.floor)
                .spread(measured.ours_ns, measured.floor_ns)
                .wanted(Wanted::RatioAtMost(1.10))
                .note("the distribution is that of the gaps between items sent"),
        );
        if !setup.is_host() {
            figures.extend(steps::run(setup, name, place)?);
        }
    }
    Ok(figures)
}
