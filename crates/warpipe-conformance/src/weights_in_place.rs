//! Weights that are published where another allocator has put them. **This module is marked for
//! unsafe**: it publishes tensors by address.

use std::sync::mpsc::Sender;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use warpipe::weights::{Hashing, SharedWeights, TensorsInPlace, Weights};
use warpipe::{DType, Device, DevicePtr, Error, HandleFault, Layout, Memory};

use crate::PATIENCE;
use crate::context::{Backend, Context};
use crate::device_malloc::{DeviceMalloc, OFFSET};
use crate::device_words::wrong_words;
use crate::expandable_segment::ExpandableSegment;
use crate::payload::{ErrorCounters, fill_words};

/// What lies before and behind a tensor in its segment.
const MARGIN: u64 = 512;

/// Segments with one tensor in each, over all of its pieces.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Segments {
    /// How many.
    pub count: u64,
    /// The pieces of each. On the host a segment is one allocation of the library.
    pub pieces: u64,
    /// The most words of a tensor.
    pub words_max: u64,
}

/// Memory of one segment. Says so when it is freed.
struct Segment {
    ptr: DevicePtr,
    bytes: u64,
    _memory: Allocated,
    _freed: Sender<()>,
}

enum Allocated {
    Segment { _memory: ExpandableSegment },
    Library { _memory: Memory },
}

impl Segment {
    fn new(context: &Context, pieces: u64, freed: &Sender<()>) -> Result<Segment> {
        let device = &context.device;
        let (ptr, bytes, memory) = if context.settings.backend == Backend::Host {
            let memory = Memory::allocate(device, pieces * device.backend().granularity())?;
            let (ptr, bytes) = (memory.ptr(), memory.bytes());
            (ptr, bytes, Allocated::Library { _memory: memory })
        } else {
            let memory = ExpandableSegment::new(device, pieces)?;
            let (ptr, bytes) = (memory.ptr, memory.bytes);
            (ptr, bytes, Allocated::Segment { _memory: memory })
        };
        Ok(Segment {
            ptr,
            bytes,
            _memory: memory,
            _freed: freed.clone(),
        })
    }
}

fn words(count: u64) -> Result<Layout> {
    Ok(Layout::contiguous(DType::U64, &[count])?)
}

/// Weights in segments. Tensor `tN` has the words of `seed + N`.
///
/// # Errors
/// Those of the device, and of the library.
pub fn weights(
    context: &Context,
    segments: Segments,
    seed: u64,
    freed: &Sender<()>,
) -> Result<Weights> {
    let (stream, mut tensors) = (context.stream()?, TensorsInPlace::new(&context.device));
    for number in 0..segments.count {
        let segment = Segment::new(context, segments.pieces, freed)?;
        let ptr = segment.ptr + MARGIN;
        let count = ((segment.bytes - 2 * MARGIN) / 8).min(segments.words_max);
        // SAFETY: the words lie in the segment, which lives until they are complete.
        unsafe { fill_words(&stream, ptr, count, seed + number, Duration::from_millis(1))? };
        stream.synchronize(PATIENCE)?;
        let (name, layout) = (format!("t{number}"), words(count)?);
        // SAFETY: the tensor lies in the segment, which is its owner, and nothing writes it.
        unsafe { tensors.add(&name, layout, ptr, Box::new(segment))? };
    }
    let pieces = match context.settings.backend {
        Backend::Host => segments.count,
        Backend::Cuda => segments.count * segments.pieces,
    };
    ensure!(tensors.pieces() as u64 == pieces, "{tensors:?}");
    let mut builder = Weights::builder(&context.device, [])?;
    builder.in_place = Some(tensors);
    Ok(builder.finish()?)
}

/// Weights with one tensor more than `base`, of which they share the others: tensor `tN` has the words
/// of `seed + N`. They are hashed once they are offered.
///
/// # Errors
/// Those of the device, and of the library.
pub fn beside_base(context: &Context, base: &SharedWeights, seed: u64) -> Result<Weights> {
    const COUNT: u64 = 4096;
    let number = base.tensors().len() as u64;
    let name = format!("t{number}");
    let mut builder = Weights::builder(&context.device, [(name.as_str(), words(COUNT)?)])?;
    let (stream, memory) = (
        context.stream()?,
        builder.memory().context("memory of a tensor")?,
    );
    memory.used_on(&stream);
    // SAFETY: the words lie in the builder's memory, which is kept until the stream is past them.
    unsafe { fill_words(&stream, memory.ptr(), COUNT, seed + number, Duration::ZERO)? };
    (builder.base, builder.hashing) = (Some(base.into()), Hashing::Later);
    Ok(builder.finish()?)
}

/// Reads all tensors.
///
/// # Errors
/// One has wrong words, or those of the device.
pub fn check(
    context: &Context,
    counters: &mut ErrorCounters,
    weights: &SharedWeights,
    seed: u64,
) -> Result<()> {
    let stream = context.stream()?;
    for number in 0..weights.tensors().len() as u64 {
        let name = format!("t{number}");
        let tensor = weights
            .tensor(&name)
            .context("a tensor that was published")?;
        let wrong = wrong_words(&tensor.memory, &stream, counters, seed + number)?;
        ensure!(wrong == 0, "{wrong} words of {name} are wrong");
    }
    Ok(())
}

/// Adds tensors that no process can open, beside one that can be.
///
/// # Errors
/// One of them is not refused.
pub fn refused(context: &Context, freed: &Sender<()>) -> Result<()> {
    let device = &context.device;
    let mut tensors = TensorsInPlace::new(device);
    let segment = Segment::new(context, 3, freed)?;
    let (ptr, bytes) = (segment.ptr, segment.bytes);
    let layout = words(MARGIN)?;
    // SAFETY: the tensor lies in the segment, which is its owner.
    unsafe { tensors.add("whole", layout, ptr, Box::new(segment))? };
    let held = tensors.pieces();
    let malloc = DeviceMalloc::new(device, 1 << 16, 0)?;
    let mut places = vec![
        (malloc.ptr + OFFSET, words(8)?),
        (ptr + bytes - 4096, words(1 << 40)?),
    ];
    let private = private_end(device, context.settings.backend)?;
    if let Some(segment) = &private {
        places.push((segment.ptr, words(segment.bytes / 8)?));
    }
    for (at, layout) in places {
        // SAFETY: it is refused, and nothing reads it.
        let added = unsafe { tensors.add("part", layout, at, Box::new(())) };
        ensure!(
            matches!(
                added,
                Err(Error::Handle {
                    fault: HandleFault::NotExportable { .. },
                    ..
                })
            ),
            "{added:?}"
        );
        ensure!(tensors.pieces() == held, "{tensors:?}");
    }
    Ok(())
}

fn private_end(device: &Device, backend: Backend) -> Result<Option<ExpandableSegment>> {
    match backend {
        Backend::Host => Ok(None),
        Backend::Cuda => ExpandableSegment::with_a_private_end(device, 3).map(Some),
    }
}
