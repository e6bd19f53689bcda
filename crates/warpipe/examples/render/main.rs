//! A rendering pipeline of three processes that hand over every frame without a copy.
//!
//! ```text
//! geometry --vertices, colours, indices--> renderer --frames, 1280x720--> encoder --> PNG files, a GIF
//! ```
//!
//! The geometry process makes the solid of each frame: a coloured torus that changes its thickness,
//! and its rotation. Its vertex, colour and index buffers are one sample, so that they arrive
//! together or not at all. The renderer runs a vertex and a fragment kernel on them, in the
//! geometry's memory, into a slot of its own. The encoder copies every frame to the host, and when
//! all have arrived writes every 5th of the first turn (120 frames): `frame-NNNN.png` and
//! `turn.gif`. Frame 10, reduced to 320x180, is compared with a stored picture: at most 1 pixel in
//! 1000 may be off by more than 3 levels of 255.
//!
//! ```text
//! cargo run --release -p warpipe --example render                     # all three
//! cargo run --release -p warpipe --example render -- --kill           # the renderer dies half way, and comes back
//! cargo run --release -p warpipe --example render -- --role encoder   # or: one terminal each, in any order
//! cargo run --release -p warpipe --example render -- --role renderer
//! cargo run --release -p warpipe --example render -- --role geometry
//! ```
//!
//! `--frames N` (600, without a GPU 24), `--out FOLDER` (`render-out`), `--reference FILE.png`
//! instead of the stored one.
//!
//! It ends with `ok: N of N frames, L lost, R frames/s, as in the reference`. The rate is that of
//! geometry, renderer and encoder with its copy of each frame to the host; writing the files comes
//! after it and is not in it. After `--kill` it contains the new renderer's start, and L is at most
//! 5: the 4 frames in the dead one's ring, and the one that was just being sent.

mod encoder;
mod geometry;
mod picture;
mod renderer;
#[path = "../stage/mod.rs"]
mod stage;

use std::process::ExitCode;

use stage::{Outcome, PATIENCE, Stage, play};
use warpipe::{
    DeviceKind, Policy, Publisher, PublisherOptions, Result, Subscriber, SubscriberOptions,
};

const WIDTH: u32 = 1280;
const HEIGHT: u32 = 720;
/// Frames in which the solid turns once.
const TURN: u64 = 120;
const DEPTH: u32 = 4;

fn main() -> ExitCode {
    play(
        &["--frames", "--kill", "--out", "--reference"],
        |stage| match stage.role() {
            "geometry" => geometry::run(stage),
            "renderer" => renderer::run(stage),
            "encoder" => encoder::run(stage, &mut Vec::new()),
            _ => {
                let geometry = stage.start("geometry")?;
                let line = encoder::run(stage, &mut vec![stage.start("renderer")?])?;
                geometry.finish()?;
                Ok(line)
            }
        },
    )
}

/// The number of frames to make.
fn frames(stage: &Stage) -> Outcome<u64> {
    let is_gpu = stage.device.info().id.kind == DeviceKind::Cuda;
    Ok(stage
        .number("--frames", if is_gpu { 600 } else { 24 })?
        .max(picture::REFERENCE_FRAME + 1))
}

fn publisher(stage: &Stage, name: &str) -> Result<Publisher> {
    let policy = Policy::Block { timeout: PATIENCE };
    Publisher::new(
        name,
        PublisherOptions {
            depth: DEPTH,
            policy,
            ..stage.domain.on(&stage.device)
        },
    )
}

fn subscriber(stage: &Stage, name: &str, reconnect: bool) -> Result<Subscriber> {
    Subscriber::open(
        name,
        SubscriberOptions {
            reconnect,
            ..stage.domain.on(&stage.device)
        },
        PATIENCE,
    )
}
