//! Part 1: the cost of a hand-over with one item in flight, and the floor under it.

use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::Part;
use crate::demo::protocol::{Event, Order};
use crate::demo::round_trips::{ITEM_BYTES, WORDS};
use crate::demo::stage::Stage;
use crate::output::{bytes, count, duration};
use crate::raw::SharedMemory;
use crate::statistics::Histogram;

pub const PART: Part = Part {
    event: "latency",
    heading: |_| "latency: one item in flight".to_owned(),
    run,
};

/// Trips that warm up, and say how many there is time for; and the least that there are in a turn.
const WARM_UP: u32 = 20;
/// How often ours and the floor take turns.
const TURNS: u32 = 4;
/// The time limit of each turn.
const TURN: Duration = Duration::from_millis(80);
const TRIPS_MAX: u128 = 250;
/// Beyond this no further turn begins: where other programs have the cores, the turns take longer.
const TURNS_LIMIT: Duration = Duration::from_millis(800);

fn run(stage: &mut Stage) -> anyhow::Result<Value> {
    // Both processes open it by this one's descriptor. Without shared memory there is no floor.
    let memory = SharedMemory::create(WORDS);
    let floor = memory
        .as_ref()
        .ok()
        .map(|memory| descriptor_path(memory.fd().as_raw_fd()));
    let (warm, _) = round_trips(stage, WARM_UP, floor.as_ref())?;
    // Of the slow ones there is still time for so many; single slower ones show nothing.
    let each = warm
        .quantile(900)
        .unwrap_or(TURN)
        .max(Duration::from_nanos(1));
    let trips = (TURN.as_nanos() / each.as_nanos()).clamp(u128::from(WARM_UP), TRIPS_MAX) as u32;
    let (mut ours, mut bare) = (Histogram::default(), Histogram::default());
    let (start, mut turns) = (Instant::now(), 0);
    while turns < TURNS && start.elapsed() < TURNS_LIMIT {
        turns += 1;
        let (our_turn, bare_turn) = round_trips(stage, trips, floor.as_ref())?;
        ours.merge(&our_turn);
        bare.merge(&bare_turn);
    }
    let all = u64::from(trips * turns);
    report(stage, &ours, &bare, all)
}

fn report(
    stage: &mut Stage,
    ours: &Histogram,
    bare: &Histogram,
    trips: u64,
) -> anyhow::Result<Value> {
    let half =
        |histogram: &Histogram, permille| histogram.quantile(permille).map(|taken| taken / 2);
    let (p50, p99) = (half(ours, 500), half(ours, 990));
    let (floor_p50, floor_p99) = (half(bare, 500), half(bare, 990));
    stage.claim(
        "a hand-over was timed",
        p50.is_some() && p99.is_some(),
        String::new,
    );
    let text = |p50: Duration, p99: Duration| {
        format!("p50 {:>8}   p99 {:>8}", duration(p50), duration(p99))
    };
    if let (Some(p50), Some(p99)) = (p50, p99) {
        let how = format!(
            "kernel to kernel, {}, half of {} round trips",
            bytes(ITEM_BYTES),
            count(trips)
        );
        stage.line(format_args!("   hand-over   {}   ({how})", text(p50, p99)))?;
    }
    if let (Some(p50), Some(p99)) = (floor_p50, floor_p99) {
        let how = "same kernels, same run, ordered by bare words";
        stage.line(format_args!("   floor       {}   ({how})", text(p50, p99)))?;
    }
    let us = |taken: Option<Duration>| taken.map(|taken| taken.as_nanos() as f64 / 1e3);
    Ok(json!({
        "trips": trips,
        "p50_us": us(p50),
        "p99_us": us(p99),
        "floor_p50_us": us(floor_p50),
        "floor_p99_us": us(floor_p99),
    }))
}

fn round_trips(
    stage: &mut Stage,
    trips: u32,
    floor: Option<&PathBuf>,
) -> anyhow::Result<(Histogram, Histogram)> {
    let ends = [stage.publisher, stage.subscribers[0]];
    let order = Order::RoundTrips {
        trips,
        floor: floor.cloned(),
    };
    ends.iter().try_for_each(|&id| stage.order(id, &order))?;
    let figures = ends.map(|id| {
        stage.wait(id, "its round trips are done", |event| match event {
            Event::RoundTrips { ours, floor } => Some((ours.clone(), floor.clone())),
            _ => None,
        })
    });
    let [asking, answering] = figures;
    answering?;
    asking
}

fn descriptor_path(fd: i32) -> PathBuf {
    format!("/proc/{}/fd/{fd}", std::process::id()).into()
}
