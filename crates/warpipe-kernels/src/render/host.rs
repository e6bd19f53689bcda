//! The host versions of the drawing kernels: the same steps as in `render.cu`, the same bits.
//!
//! **This module is marked for unsafe**: the arguments are addresses, as for a kernel.

use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};

use warpipe::KernelLaunch;

use crate::host::arguments;

const SUBPIXELS: i64 = 16;
const COORDINATE_MAX: f32 = 524_288.0;
const DEPTH_MAX: f32 = 1_048_575.0;
const NEAR: f32 = 1.0;
const CAMERA: f32 = 4.0;
const NOTHING: u64 = u64::MAX;

/// A vertex on the screen. `depth` is below zero where the vertex cannot be seen.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct Vertex {
    x: i32,
    y: i32,
    depth: i32,
    colour: u32,
    place: [f32; 3],
    unused: u32,
}

const _: () = assert!(size_of::<Vertex>() as u64 == super::VERTEX_BYTES);

/// # Safety
/// `address` names an array of more than `index` readable elements of type `T`, aligned.
unsafe fn read<T: Copy>(address: u64, index: u64) -> T {
    // SAFETY: the caller's promise.
    unsafe {
        with_exposed_provenance::<T>(address as usize)
            .add(index as usize)
            .read()
    }
}

/// # Safety
/// `address` names an array of more than `index` writable elements of type `T`, aligned.
unsafe fn write<T: Copy>(address: u64, index: u64, value: T) {
    // SAFETY: the caller's promise.
    unsafe {
        with_exposed_provenance_mut::<T>(address as usize)
            .add(index as usize)
            .write(value)
    }
}

fn dot(a: [f32; 3], b: [f32; 3]) -> f32 {
    a[0] * b[0] + a[1] * b[1] + a[2] * b[2]
}

fn rounded(value: f32) -> i32 {
    value.round_ties_even() as i32
}

#[expect(
    clippy::manual_clamp,
    reason = "`clamp` keeps what is not a number; here and in the kernel it is the least"
)]
fn fixed(value: f32) -> i32 {
    rounded(value.max(-COORDINATE_MAX).min(COORDINATE_MAX))
}

/// # Safety
/// As for the kernel `render_vertices`: the arguments are its own, and the memory they name is
/// valid.
pub(super) unsafe fn vertices(launch: KernelLaunch<'_>) {
    let [out, rotation, positions, colours, count, width, height] = arguments(&launch);
    let half = [width, height].map(|side| (side * SUBPIXELS as u64 / 2) as f32);
    let focal = half[1] * 4.0;
    // SAFETY: the rotation has nine floats, as the caller promises.
    let row = |axis: u64| unsafe { read::<[f32; 3]>(rotation, axis) };
    let rows = [row(0), row(1), row(2)];
    for index in 0..count {
        // SAFETY: there are `count` positions and colours, as the caller promises.
        let (position, colour) = unsafe {
            (
                read::<[f32; 3]>(positions, index),
                read::<u32>(colours, index),
            )
        };
        let place = rows.map(|row| dot(row, position));
        let distance = CAMERA - place[2];
        let over_distance = 1.0 / distance;
        let scale = focal * over_distance;
        let x = fixed(half[0] + place[0] * scale);
        let y = fixed(half[1] - place[1] * scale);
        let depth = if distance >= NEAR {
            rounded(DEPTH_MAX * (1.0 - over_distance))
        } else {
            -1
        };
        // SAFETY: there is room for `count` vertices, as the caller promises.
        unsafe {
            write(
                out,
                index,
                Vertex {
                    x,
                    y,
                    depth,
                    colour,
                    place,
                    unused: 0,
                },
            )
        };
    }
}

/// # Safety
/// As for the kernel `render_clear`: the arguments are its own, and the memory they name is valid.
pub(super) unsafe fn clear(launch: KernelLaunch<'_>) {
    let [visibility, count] = arguments(&launch);
    for index in 0..count {
        // SAFETY: there are `count` words, as the caller promises.
        unsafe { write(visibility, index, NOTHING) };
    }
}

/// Where the vertices and the indices lie.
#[derive(Clone, Copy)]
struct Scene {
    vertices: u64,
    count: u64,
    indices: u64,
}

/// A triangle to be seen, on the screen.
struct Triangle {
    corner: [Vertex; 3],
    area: i64,
}

fn edge(a: &Vertex, b: &Vertex, x: i64, y: i64) -> i64 {
    let [ax, ay, bx, by] = [a.x, a.y, b.x, b.y].map(i64::from);
    (bx - ax) * (y - ay) - (by - ay) * (x - ax)
}

impl Scene {
    /// # Safety
    /// There are `count` vertices, and three indices for this triangle, as the kernel's caller
    /// promises.
    unsafe fn triangle(self, number: u64) -> Option<Triangle> {
        let mut corner = [Vertex::default(); 3];
        for (corner, place) in corner.iter_mut().zip(3 * number..) {
            // SAFETY: the caller's promise.
            let index = u64::from(unsafe { read::<u32>(self.indices, place) });
            if index >= self.count {
                return None;
            }
            // SAFETY: below the count.
            *corner = unsafe { read(self.vertices, index) };
            if corner.depth < 0 {
                return None;
            }
        }
        let area = edge(
            &corner[0],
            &corner[2],
            corner[1].x.into(),
            corner[1].y.into(),
        );
        (area > 0).then_some(Triangle { corner, area })
    }
}

impl Triangle {
    fn weights(&self, column: i64, row: i64) -> Option<[i64; 3]> {
        let [a, b, c] = &self.corner;
        let (x, y) = (
            column * SUBPIXELS + SUBPIXELS / 2,
            row * SUBPIXELS + SUBPIXELS / 2,
        );
        let weights = [edge(c, b, x, y), edge(a, c, x, y), edge(b, a, x, y)];
        weights.iter().all(|&weight| weight >= 0).then_some(weights)
    }

    /// The pixels that it may cover along one axis, of so many.
    fn range(&self, coordinate: impl Fn(&Vertex) -> i32, limit: u64) -> std::ops::Range<i64> {
        let [a, b, c] = [0, 1, 2].map(|corner| i64::from(coordinate(&self.corner[corner])));
        let (low, high) = (a.min(b).min(c) / SUBPIXELS, a.max(b).max(c) / SUBPIXELS + 1);
        low.clamp(0, limit as i64)..high.clamp(0, limit as i64)
    }

    fn mean(&self, weights: [i64; 3], value: impl Fn(&Vertex) -> i64) -> i64 {
        let sum: i64 = weights
            .iter()
            .zip(&self.corner)
            .map(|(weight, corner)| weight * value(corner))
            .sum();
        sum / self.area
    }

    /// So much light, and so much gloss, of 256.
    fn shade(&self) -> (i32, i32) {
        let [a, b] = [1, 2].map(|corner| {
            [0, 1, 2].map(|axis: usize| {
                self.corner[corner as usize].place[axis] - self.corner[0].place[axis]
            })
        });
        let normal = [
            a[1] * b[2] - a[2] * b[1],
            a[2] * b[0] - a[0] * b[2],
            a[0] * b[1] - a[1] * b[0],
        ];
        let (towards_light, half_way) = ([-0.48, 0.64, 0.6], [-0.27, 0.36, 0.893]);
        let length = dot(normal, normal).sqrt().max(1e-20);
        let facing = (dot(normal, towards_light) / length).max(0.0);
        let shine = (0..5).fold((dot(normal, half_way) / length).max(0.0), |shine, _| {
            shine * shine
        });
        (rounded(56.0 + 200.0 * facing), rounded(96.0 * shine))
    }

    fn pixel(&self, weights: [i64; 3]) -> u32 {
        let (light, gloss) = self.shade();
        let channel = |shift: u32| {
            let colour =
                self.mean(weights, |corner| i64::from((corner.colour >> shift) & 255)) as i32;
            ((colour * light / 256 + gloss).min(255) as u32) << shift
        };
        0xff00_0000 | channel(0) | channel(8) | channel(16)
    }
}

/// # Safety
/// As for the kernel `render_triangles`: the arguments are its own, and the memory they name is
/// valid.
pub(super) unsafe fn triangles(launch: KernelLaunch<'_>) {
    let [
        visibility,
        width,
        height,
        vertices,
        count,
        indices,
        triangles,
    ] = arguments(&launch);
    let scene = Scene {
        vertices,
        count,
        indices,
    };
    for number in 0..triangles {
        // SAFETY: the number is below the count of triangles, for which the caller vouches.
        let Some(triangle) = (unsafe { scene.triangle(number) }) else {
            continue;
        };
        let columns = triangle.range(|corner| corner.x, width);
        for row in triangle.range(|corner| corner.y, height) {
            for column in columns.clone() {
                let Some(weights) = triangle.weights(column, row) else {
                    continue;
                };
                let depth = triangle.mean(weights, |corner| i64::from(corner.depth));
                let (place, word) = (
                    row as u64 * width + column as u64,
                    (depth as u64) << 32 | number,
                );
                // SAFETY: the ranges end at the width and the height, and nothing else uses the
                // words.
                unsafe { write(visibility, place, read::<u64>(visibility, place).min(word)) };
            }
        }
    }
}

/// # Safety
/// As for the kernel `render_fragments`: the arguments are its own, and the memory they name is
/// valid.
pub(super) unsafe fn fragments(launch: KernelLaunch<'_>) {
    let [pixels, visibility, width, height, vertices, count, indices] = arguments(&launch);
    let scene = Scene {
        vertices,
        count,
        indices,
    };
    for place in 0..width * height {
        let (row, column) = (place / width, place % width);
        // SAFETY: the place is within the canvas, for which the caller vouches.
        let word = unsafe { read::<u64>(visibility, place) };
        let number = (word != NOTHING).then_some(word & 0xffff_ffff);
        // SAFETY: the number was a triangle's when it was stored.
        let triangle = number.and_then(|number| unsafe { scene.triangle(number) });
        let seen = triangle.and_then(|triangle| {
            Some(triangle.pixel(triangle.weights(column as i64, row as i64)?))
        });
        let pixel = seen.unwrap_or_else(|| {
            let dusk = (row * 40 / height) as u32;
            0xff00_0000 | (24 + dusk) << 16 | (12 + dusk / 2) << 8 | (10 + dusk / 3)
        });
        // SAFETY: as above; nothing else uses the pixels.
        unsafe { write(pixels, place, pixel) };
    }
}
