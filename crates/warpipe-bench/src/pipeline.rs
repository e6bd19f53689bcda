//! One direction, eight items in flight.

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
        let measured = fanout::measure(setup, place, 1, setup.times(2000))?;
        let name = format!("per item, 8 in flight, {name}");
        figures.push(
            Figure::new("pipeline", name, "us", &measured.ours)
                .beside(&measured.floor)
                .spread(measured.ours_ns, measured.floor_ns)
                .wanted(Wanted::RatioAtMost(1.15))
                .note("the distribution is that of the gaps between items sent"),
        );
    }
    Ok(figures)
}
