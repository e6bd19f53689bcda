//! The first process: the solid of each frame, and how a mesh lies in a sample.
//!
//! A sample holds, without gaps: the rotation (9 `f32`), positions (3 `f32` a vertex), colours (4
//! bytes a vertex), indices (3 `u32` a triangle). Its metadata are three `u64`: the frame's number,
//! vertices, triangles.

use std::f32::consts::TAU;

use warpipe::{Layout, Sample};
use warpipe_kernels::render::Mesh;

use crate::stage::{Outcome, PATIENCE, Stage, ensure};
use crate::{TURN, frames, publisher};

/// Vertices around the torus's ring, and around its tube.
const RING: u32 = 192;
const TUBE: u32 = 96;
/// No mesh of this example is larger.
const ELEMENTS_MAX: u64 = 1 << 20;

pub fn run(stage: &Stage) -> Outcome<String> {
    let publisher = publisher(stage, "mesh")?;
    let stream = stage.device.stream()?;
    let indices: Vec<u8> = triangles().flat_map(u32::to_ne_bytes).collect();
    let frames = frames(stage)?;
    for number in 0..frames {
        let phase = TAU * number as f32 / TURN as f32;
        let (positions, colours) = vertices(phase);
        let floats = rotation(phase).into_iter().chain(positions);
        let mut mesh: Vec<u8> = floats.flat_map(f32::to_ne_bytes).collect();
        let counts = [number, colours.len() as u64 / 4, indices.len() as u64 / 12];
        mesh.extend(colours);
        mesh.extend(&indices);

        let mut sample = publisher.loan(&Layout::bytes_only(mesh.len() as u64)?)?;
        sample.set_metadata(&counts.map(u64::to_ne_bytes).concat())?;
        sample.write(&stream, &mesh)?;
        // While the renderer is being started again there is no subscriber.
        publisher.wait_for_subscribers(1, PATIENCE)?;
        sample.send(&stream)?;
    }
    stream.synchronize(PATIENCE)?;
    Ok(format!(
        "made {frames} meshes of {} vertices and {} triangles",
        RING * TUBE,
        2 * RING * TUBE
    ))
}

/// The renderer's input: the frame's number, and the mesh in place. Another process wrote it: the
/// counts must fit the memory before a kernel relies on them.
pub fn received(sample: &Sample) -> Outcome<(u64, Mesh)> {
    let metadata: &[u8; 24] = sample.metadata().try_into()?;
    let word =
        |index: usize| u64::from_ne_bytes(std::array::from_fn(|byte| metadata[8 * index + byte]));
    let [number, vertices, triangles] = [0, 1, 2].map(word);
    ensure(
        vertices <= ELEMENTS_MAX && triangles <= ELEMENTS_MAX,
        || format!("{vertices} vertices are too many"),
    )?;
    let bytes = 36 + 16 * vertices + 12 * triangles;
    ensure(sample.layout().bytes() == bytes, || {
        format!("a mesh of {} bytes, not {bytes}", sample.layout().bytes())
    })?;
    let rotation = sample.ptr();
    let positions = rotation + 36;
    let colours = positions + 12 * vertices;
    let indices = colours + 4 * vertices;
    Ok((
        number,
        Mesh {
            rotation,
            positions,
            colours,
            indices,
            vertices,
            triangles,
        },
    ))
}

/// Positions and colours of a torus with a tube that swells and shrinks in three places.
fn vertices(phase: f32) -> (Vec<f32>, Vec<u8>) {
    let (mut positions, mut colours) = (Vec::new(), Vec::new());
    for along in (0..RING).map(|step| TAU * step as f32 / RING as f32) {
        let radius = 0.26 + 0.06 * (3.0 * along + 2.0 * phase).sin();
        for around in (0..TUBE).map(|step| TAU * step as f32 / TUBE as f32) {
            let from_middle = 0.64 + radius * around.cos();
            positions.extend([
                from_middle * along.cos(),
                from_middle * along.sin(),
                radius * around.sin(),
            ]);
            let stripe = 0.86 + 0.14 * (3.0 * (4.0 * around + 6.0 * along).sin()).clamp(-1.0, 1.0);
            let hue = |shift: f32| (stripe * (135.0 + 115.0 * (along + shift).cos())) as u8;
            colours.extend([hue(0.0), hue(TAU / 3.0), hue(2.0 * TAU / 3.0), 255]);
        }
    }
    (positions, colours)
}

/// Two triangles between each four neighbours, counter-clockwise as seen from outside.
fn triangles() -> impl Iterator<Item = u32> {
    let vertex = |along: u32, around: u32| (along % RING) * TUBE + around % TUBE;
    (0..RING).flat_map(move |i| {
        (0..TUBE).flat_map(move |j| {
            let corners = [
                vertex(i, j),
                vertex(i + 1, j),
                vertex(i + 1, j + 1),
                vertex(i, j + 1),
            ];
            [
                corners[0], corners[1], corners[2], corners[0], corners[2], corners[3],
            ]
        })
    })
}

/// Once about the upright axis in a turn, tilted towards the camera.
fn rotation(phase: f32) -> [f32; 9] {
    let ((sin, cos), (tilt_sin, tilt_cos)) =
        (phase.sin_cos(), (0.9 + 0.25 * phase.sin()).sin_cos());
    [
        cos,
        0.0,
        sin,
        tilt_sin * sin,
        tilt_cos,
        -tilt_sin * cos,
        -tilt_cos * sin,
        tilt_sin,
        tilt_cos * cos,
    ]
}
