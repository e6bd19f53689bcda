//! The second process: draws each mesh, in the memory of the geometry process, into a frame of its
//! own.
//!
//! **This module is marked for unsafe**: it launches kernels on device memory.

use warpipe::{DType, Layout, SampleMut};
use warpipe_kernels::render::{Canvas, draw, preload, workspace_bytes};

use crate::stage::{Outcome, PATIENCE, Stage};
use crate::{HEIGHT, WIDTH, geometry, publisher, subscriber};

const SIZE: (u64, u64) = (WIDTH as u64, HEIGHT as u64);

pub fn run(stage: &Stage) -> Outcome<String> {
    preload(&stage.device)?;
    let mut meshes = subscriber(stage, "mesh", false)?;
    let publisher = publisher(stage, "frames")?;
    publisher.wait_for_subscribers(1, PATIENCE)?;
    let stream = stage.device.stream()?;
    let layout = Layout::contiguous(DType::U8, &[SIZE.1, SIZE.0, 4])?;
    // A loan that is never sent is memory of the device like any other.
    let mut workspace: Option<SampleMut> = None;
    let mut drawn = 0;
    for sample in meshes.samples(&stream, PATIENCE) {
        let sample = sample?;
        let (number, mesh) = geometry::received(&sample)?;
        let bytes = workspace_bytes(mesh.vertices, SIZE.0, SIZE.1);
        if workspace
            .as_ref()
            .is_none_or(|loan| loan.layout().bytes() < bytes)
        {
            let larger = publisher.loan(&Layout::bytes_only(bytes)?)?;
            // Earlier kernels may still use the smaller workspace: it returns behind them.
            workspace
                .replace(larger)
                .map_or(Ok(()), |smaller| smaller.discard(&stream))?;
        }
        let mut frame = publisher.loan(&layout)?;
        frame.set_metadata(&number.to_ne_bytes())?;
        let workspace = workspace.as_ref().map_or(0, SampleMut::ptr);
        let canvas = Canvas {
            pixels: frame.ptr(),
            workspace,
            width: SIZE.0,
            height: SIZE.1,
        };
        // SAFETY: the mesh lies within its sample (`received` has compared the counts with its
        // bytes), the loans are as long as the canvas says and belong to this process alone; all
        // are sent or released behind this stream's work, or kept.
        unsafe { draw(&stream, &mesh, &canvas)? };
        // The mesh is released after the frame is sent, so that a death in between loses neither.
        frame.send(&stream)?;
        drop(sample);
        drawn += 1;
    }
    stream.synchronize(PATIENCE)?;
    Ok(format!("drew {drawn} frames"))
}
