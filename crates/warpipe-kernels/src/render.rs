//! Drawing triangles: a vertex kernel, a visibility buffer with depth, a fragment kernel.
//!
//! [`draw`] enqueues four kernels. A vertex is turned and projected; each triangle that faces the
//! camera leaves its depth and number in every pixel that it covers, and the nearest stays (one
//! atomic minimum, so that the order of the triangles does not matter); each pixel then finds its
//! triangle, and from that its colour and light. Colours run evenly between the corners, light is
//! one for a triangle.
//!
//! The camera stands at (0, 0, 4) and looks at the origin, of which it sees one unit above and one
//! below. Triangles with counter-clockwise corners face it; what is nearer than one unit, or
//! names no vertex, is not drawn.
//!
//! `render.cu` is the source, `render.ptx` what NVRTC 12.0 made of it; the host versions give the same
//! bits.

mod host;

use std::ffi::CStr;

use warpipe::{Device, DevicePtr, Kernel, Result, Stream};

use crate::{BLOCK, grid_for};

const TEXT: &str = concat!(include_str!("render.ptx"), "\0");

/// A static, so that it has one address.
static MODULE: &CStr = match CStr::from_bytes_with_nul(TEXT.as_bytes()) {
    Ok(text) => text,
    Err(_) => panic!("render.ptx holds a NUL byte; run `cargo xtask ptx`"),
};

static VERTICES: Kernel = Kernel::new(c"render_vertices", MODULE, host::vertices);
static CLEAR: Kernel = Kernel::new(c"render_clear", MODULE, host::clear);
static TRIANGLES: Kernel = Kernel::new(c"render_triangles", MODULE, host::triangles);
static FRAGMENTS: Kernel = Kernel::new(c"render_fragments", MODULE, host::fragments);

/// Every kernel of this module.
pub static ALL: &[Kernel] = &[VERTICES, CLEAR, TRIANGLES, FRAGMENTS];

/// The bytes of a projected vertex.
const VERTEX_BYTES: u64 = 32;

/// The mesh to draw: device addresses and counts.
#[derive(Debug, Clone, Copy)]
pub struct Mesh {
    /// Nine `f32`: the rows of the matrix that turns a position.
    pub rotation: DevicePtr,
    /// Three `f32` for each vertex: x to the right, y up, z towards the camera.
    pub positions: DevicePtr,
    /// A `u32` for each vertex: red in the lowest byte, then green and blue.
    pub colours: DevicePtr,
    /// Three `u32` for each triangle, the numbers of its vertices.
    pub indices: DevicePtr,
    /// How many vertices.
    pub vertices: u64,
    /// How many triangles, less than 2^32.
    pub triangles: u64,
}

/// The image to draw on.
#[derive(Debug, Clone, Copy)]
pub struct Canvas {
    /// Four bytes for each pixel, in rows from the top: red, green, blue and 255.
    pub pixels: DevicePtr,
    /// Memory that only the drawing uses: [`workspace_bytes`] of it, aligned to 8 bytes.
    pub workspace: DevicePtr,
    /// Pixels in a row, at most 16384.
    pub width: u64,
    /// Rows, at most 16384.
    pub height: u64,
}

/// How much workspace a mesh of so many vertices takes on a canvas of this size.
pub const fn workspace_bytes(vertices: u64, width: u64, height: u64) -> u64 {
    vertices * VERTEX_BYTES + width * height * 8
}

/// `cuModuleLoadData` of the drawing kernels, so that no later launch loads them behind a stream
/// that waits.
///
/// # Errors
/// [`warpipe::Error::Driver`].
pub fn preload(device: &Device) -> Result<()> {
    ALL.iter()
        .try_for_each(|kernel| device.backend().preload(kernel))
}

/// `cuLaunchKernel`, four times: draws the mesh on the canvas, whatever was there before.
///
/// # Errors
/// [`warpipe::Error::Driver`].
///
/// # Safety
/// Until the kernels are done, the mesh's addresses name as many readable elements as it says,
/// aligned to 4 bytes, and the canvas's name memory that is writable, of the stated size, and used
/// by nothing else.
pub unsafe fn draw(stream: &Stream, mesh: &Mesh, canvas: &Canvas) -> Result<()> {
    let Mesh {
        rotation,
        positions,
        colours,
        indices,
        vertices,
        triangles,
    } = *mesh;
    let Canvas {
        pixels,
        workspace: visibility,
        width,
        height,
    } = *canvas;
    let all = width * height;
    let screen = visibility + all * 8;
    let turn = [
        screen, rotation, positions, colours, vertices, width, height,
    ];
    let cover = [
        visibility, width, height, screen, vertices, indices, triangles,
    ];
    let paint = [pixels, visibility, width, height, screen, vertices, indices];
    // SAFETY: each kernel's own arguments; the memory is the caller's promise, and the workspace is
    // split as `workspace_bytes` adds it up.
    unsafe {
        stream.launch(&VERTICES, grid_for(vertices), BLOCK, &turn)?;
        stream.launch(&CLEAR, grid_for(all), BLOCK, &[visibility, all])?;
        // A triangle is much work: no thread should have more than one.
        stream.launch(
            &TRIANGLES,
            grid_for(triangles * crate::PER_THREAD),
            BLOCK,
            &cover,
        )?;
        stream.launch(&FRAGMENTS, grid_for(all), BLOCK, &paint)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warpipe::KernelLaunch;

    const SIZE: u64 = 32;
    const UPRIGHT: [f32; 9] = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0];
    const RED: u32 = 0xff;
    const BLUE: u32 = 0xff_0000;
    /// A triangle about the middle, counter-clockwise.
    const MIDDLE: [[f32; 3]; 3] = [[-0.5, -0.5, 0.0], [0.5, -0.5, 0.0], [0.0, 0.6, 0.0]];

    fn address<T>(values: &[T]) -> u64 {
        values.as_ptr().expose_provenance() as u64
    }

    /// Draws with the host versions, on memory of this function's own.
    fn drawn(positions: &[[f32; 3]], colours: &[u32], indices: &[[u32; 3]]) -> Vec<u32> {
        let (device, all) = (Device::host(), (SIZE * SIZE) as usize);
        let mut pixels = vec![0u32; all];
        let mut workspace =
            vec![0u64; workspace_bytes(positions.len() as u64, SIZE, SIZE) as usize / 8];
        let mesh = Mesh {
            rotation: address(&UPRIGHT),
            positions: address(positions),
            colours: address(colours),
            indices: address(indices),
            vertices: positions.len() as u64,
            triangles: indices.len() as u64,
        };
        let (pixels_at, workspace_at) = (pixels.as_mut_ptr(), workspace.as_mut_ptr());
        let canvas = Canvas {
            pixels: pixels_at.expose_provenance() as u64,
            workspace: workspace_at.expose_provenance() as u64,
            width: SIZE,
            height: SIZE,
        };
        let stream = device.stream().unwrap();
        // SAFETY: everything is as long as is said, and lives beyond the synchronisation below.
        unsafe { draw(&stream, &mesh, &canvas).unwrap() };
        stream
            .synchronize(std::time::Duration::from_secs(60))
            .unwrap();
        pixels
    }

    fn at(pixels: &[u32], column: u64, row: u64) -> u32 {
        pixels[(row * SIZE + column) as usize]
    }

    fn is_mostly(colour: u32, pixel: u32) -> bool {
        let bytes = |pixel: u32| pixel.to_le_bytes();
        let (red, blue) = (bytes(pixel)[0], bytes(pixel)[2]);
        if colour == RED {
            red > 2 * blue
        } else {
            blue > 2 * red
        }
    }

    #[test]
    fn a_triangle_covers_its_pixels_and_no_others() {
        let (nothing, one) = (
            drawn(&MIDDLE, &[RED; 3], &[]),
            drawn(&MIDDLE, &[RED; 3], &[[0, 1, 2]]),
        );
        assert!(is_mostly(RED, at(&one, 16, 18)), "{:#x}", at(&one, 16, 18));
        let differing = nothing
            .iter()
            .zip(&one)
            .filter(|(before, after)| before != after)
            .count();
        // Half of the base of 16 pixels by the height of 17.6.
        assert!((130..152).contains(&differing), "{differing} pixels");
        assert!((0..SIZE).all(|column| at(&one, column, 0) == at(&nothing, column, 0)));
    }

    #[test]
    fn the_nearer_triangle_hides_the_other_in_either_order() {
        let mut positions = MIDDLE.to_vec();
        positions.extend(MIDDLE.map(|[x, y, z]| [x, y, z + 0.5]));
        let colours = [RED, RED, RED, BLUE, BLUE, BLUE];
        let ahead = drawn(&positions, &colours, &[[3, 4, 5], [0, 1, 2]]);
        assert!(
            is_mostly(BLUE, at(&ahead, 16, 17)),
            "{:#x}",
            at(&ahead, 16, 17)
        );
        assert_eq!(ahead, drawn(&positions, &colours, &[[0, 1, 2], [3, 4, 5]]));
    }

    #[test]
    fn a_triangle_that_is_turned_away_too_near_or_of_no_vertex_is_not_drawn() {
        let nothing = drawn(&MIDDLE, &[RED; 3], &[]);
        assert_eq!(
            drawn(&MIDDLE, &[RED; 3], &[[2, 1, 0]]),
            nothing,
            "turned away"
        );
        assert_eq!(
            drawn(&MIDDLE, &[RED; 3], &[[0, 1, 3], [u32::MAX, 0, 1]]),
            nothing,
            "no such vertex"
        );
        let behind = MIDDLE.map(|[x, y, z]| [x, y, z + 3.5]);
        assert_eq!(drawn(&behind, &[RED; 3], &[[0, 1, 2]]), nothing, "too near");
    }

    #[test]
    fn coordinates_that_are_no_numbers_or_huge_harm_nothing() {
        for odd in [
            f32::NAN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::MAX,
            f32::MIN_POSITIVE,
        ] {
            let positions = [
                [odd, 0.0, 0.0],
                [0.5, odd, 0.0],
                [0.0, 0.6, odd],
                [-9e9, -9e9, 0.0],
                [9e9, -9e9, 0.0],
            ];
            let all = drawn(
                &positions,
                &[RED; 5],
                &[[0, 1, 2], [3, 4, 2], [0, 3, 4], [2, 1, 0]],
            );
            assert_eq!(all.len(), (SIZE * SIZE) as usize);
        }
    }

    #[test]
    fn every_kernel_is_an_entry_of_the_committed_ptx_with_as_many_parameters_as_its_host_version_takes()
     {
        for (kernel, count) in ALL.iter().zip([7, 2, 7, 7]) {
            let name = kernel.name.to_str().unwrap();
            let (_, after) = TEXT
                .split_once(&format!(".visible .entry {name}("))
                .expect(name);
            let list = after.split(')').next().unwrap();
            assert_eq!(
                (
                    list.matches(".param .u64").count(),
                    list.matches(".param").count()
                ),
                (count, count),
                "{name}"
            );
            let wrong = std::panic::catch_unwind(|| {
                // SAFETY: a wrong number of arguments stops the host version before it touches memory.
                unsafe {
                    (kernel.host)(KernelLaunch {
                        grid: 1,
                        block: 256,
                        args: &[0; 3],
                    })
                }
            });
            assert!(wrong.is_err(), "{name}");
        }
        assert_eq!(TEXT.matches(".visible .entry").count(), ALL.len());
    }
}
