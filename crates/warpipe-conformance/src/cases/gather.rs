//! Copies between tensors of different layouts: crops, transposed, reversed and repeated ones, and
//! back. **This module is marked for unsafe**: it names the tensors by address.

use std::sync::mpsc::channel;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use warpipe::{DType, Error, Layout, Memory};
use warpipe_testkit::{Rng, pick};

use super::Case;
use crate::PATIENCE;
use crate::context::Context;
use crate::device_words::fill;

pub(super) const CASES: &[Case] = &[
    Case::new(
        "any tensor is copied into any other of its shape, and nothing beside it is written",
        any_layouts,
    )
    .long(600),
    Case::new(
        "a copy of elements is ordered behind its stream's work, and the CPU does not wait",
        behind_work,
    ),
    Case::new(
        "elements that would be written twice, or while they are read, are refused",
        refusals,
    ),
];

const ROOM: u64 = 4 << 20;
const DTYPES: [DType; 5] = [DType::U8, DType::F16, DType::F32, DType::C64, DType::C128];

/// Up to 8 dimensions of a few thousand elements; sometimes with rows that are long enough for the
/// driver's own copy.
fn shape(rng: &mut Rng) -> Vec<u64> {
    let mut left = 4096;
    let mut shape: Vec<u64> = (0..rng.u64(..9))
        .map(|_| {
            let length = if rng.u64(..40) == 0 {
                0
            } else {
                *pick(rng, &[1, 1, 2, 3, 4, 7, 16])
            };
            if length > left {
                return 1;
            }
            left /= length.max(1);
            length
        })
        .collect();
    if let Some(last) = shape.last_mut().filter(|&&mut last| last > 0 && rng.bool()) {
        *last = (*last).max(rng.u64(1..=left.max(1)).min(1500));
    }
    shape
}

/// A layout of this shape: dimensions in any order, with gaps, reversed, and, of a source,
/// repeated.
fn layout(rng: &mut Rng, dtype: DType, shape: &[u64], may_repeat: bool) -> Result<Layout> {
    let mut order: Vec<usize> = (0..shape.len()).rev().collect();
    if rng.bool() {
        (1..order.len()).for_each(|at| order.swap(at, rng.u64(..at as u64 + 1) as usize));
    }
    let (mut strides, mut step, mut first) = (vec![0i64; shape.len()], 1i64, 0i64);
    let gaps = rng.bool();
    for &axis in &order {
        let length = shape[axis].max(1) as i64;
        if length == 1 {
            strides[axis] = rng.u64(0..=10) as i64 - 5;
            continue;
        }
        if may_repeat && rng.u64(..6) == 0 {
            continue;
        }
        if gaps && rng.bool() {
            step += rng.u64(0..=3) as i64 * if rng.bool() { 1 } else { 64 };
        }
        strides[axis] = if rng.u64(..4) == 0 { -step } else { step };
        first += (length - 1) * if strides[axis] < 0 { step } else { 0 };
        step *= length;
    }
    let beginning = (first + rng.u64(..3) as i64) as u64 * dtype.bytes();
    Ok(Layout::strided(dtype, shape, &strides, beginning)?)
}

fn any_layouts(context: &Context) -> Result<()> {
    let mut rng = Rng::with_seed(context.settings.seed);
    let stream = context.stream()?;
    let (from, to) = (
        Memory::allocate(&context.device, ROOM)?,
        Memory::allocate(&context.device, ROOM)?,
    );
    let (mut before, mut copied) = (vec![0u8; ROOM as usize], 0u64);
    for round in 0..if context.settings.long { 20_000 } else { 400 } {
        let (dtype, shape) = (*pick(&mut rng, &DTYPES), shape(&mut rng));
        let source = layout(&mut rng, dtype, &shape, true)?;
        let into = match rng.bool() {
            true => Layout::contiguous(dtype, &shape)?,
            false => layout(&mut rng, dtype, &shape, false)?,
        };
        if source.bytes().max(into.bytes()) > ROOM {
            continue;
        }
        let bytes: Vec<u8> = (0..source.bytes()).map(|_| rng.u64(..) as u8).collect();
        from.write(&stream, 0, &bytes)?;
        let mut due = before[..into.bytes() as usize].to_vec();
        let width = dtype.bytes() as usize;
        for (to, from) in into.offsets().zip(source.offsets()) {
            due[to as usize..][..width].copy_from_slice(&bytes[from as usize..][..width]);
        }
        // SAFETY: both layouts fit their memory, which lives until the stream is synchronised.
        unsafe { stream.copy_elements(to.ptr(), &into, from.ptr(), &source)? };
        stream.synchronize(PATIENCE)?;
        before[..due.len()].copy_from_slice(&due);
        // All of it now and then; of the rest what was to be written, and what lies between.
        let found = if round % 50 == 0 {
            to.to_vec(PATIENCE)?
        } else {
            read(&to, &stream, due.len())?
        };
        ensure!(
            found[..] == before[..found.len()],
            "round {round}: {source:?} into {into:?}"
        );
        copied += into.elements();
    }
    context.figure("elements", copied);
    Ok(())
}

/// The first bytes of a memory that its stream is done with.
fn read(memory: &Memory, stream: &warpipe::Stream, bytes: usize) -> Result<Vec<u8>> {
    let mut found = vec![0; bytes];
    // SAFETY: the memory is longer than that.
    unsafe {
        memory
            .device()
            .backend()
            .download(stream.raw(), &mut found, memory.ptr())?
    };
    Ok(found)
}

fn behind_work(context: &Context) -> Result<()> {
    const SIDE: u64 = 64;
    let square = Layout::contiguous(DType::U64, &[SIDE, SIDE])?;
    let turned = Layout::strided(DType::U64, &[SIDE, SIDE], &[1, SIDE as i64], 0)?;
    let stream = context.stream()?;
    let (from, to) = (
        Memory::allocate(&context.device, square.bytes())?,
        Memory::allocate(&context.device, square.bytes())?,
    );
    let (go, gate) = channel::<()>();
    stream.call(move || assert!(gate.recv_timeout(PATIENCE).is_err()))?;
    fill(&from, &stream, 5, Duration::ZERO, true)?;
    to.used_on(&stream);
    // SAFETY: both live until the stream is past the copy.
    unsafe { stream.copy_elements(to.ptr(), &square, from.ptr(), &turned)? };
    ensure!(!stream.is_idle()?, "the copy waited for the work before it");
    drop(go);
    stream.synchronize(PATIENCE)?;
    let found = to.to_vec(PATIENCE)?;
    for (at, word) in found
        .chunks_exact(8)
        .take(square.elements() as usize)
        .enumerate()
    {
        let (row, column) = (at as u64 / SIDE, at as u64 % SIDE);
        let due = warpipe_kernels::pattern(5, column * SIDE + row);
        ensure!(
            word == due.to_le_bytes(),
            "word {at} was copied before it was written"
        );
    }
    Ok(())
}

fn refusals(context: &Context) -> Result<()> {
    let stream = context.stream()?;
    let memory = Memory::allocate(&context.device, 4096)?;
    let (ptr, row) = (memory.ptr(), Layout::bytes_only(8)?);
    let copy = |into: &Layout, from: u64, source: &Layout| {
        // SAFETY: both lie in the memory, which lives until the stream is synchronised.
        unsafe { stream.copy_elements(ptr, into, from, source) }
    };
    for from in [ptr, ptr + 7] {
        match copy(&row, from, &row) {
            Err(Error::Argument {
                argument: "from", ..
            }) => {}
            other => bail!(
                "a tensor {} bytes behind its copy gave {other:?}",
                from - ptr
            ),
        }
    }
    let upon = Layout::strided(DType::U8, &[2, 4], &[2, 1], 0)?;
    match copy(&upon, ptr + 64, &Layout::contiguous(DType::U8, &[2, 4])?) {
        Err(Error::Argument {
            argument: "tensor layout",
            ..
        }) => {}
        other => bail!("elements upon each other gave {other:?}"),
    }
    match copy(&row, ptr + 64, &Layout::bytes_only(9)?) {
        Err(Error::Argument {
            argument: "tensor layout",
            ..
        }) => {}
        other => bail!("another shape gave {other:?}"),
    }
    copy(&row, ptr + 8, &row)?;
    Ok(stream.synchronize(PATIENCE)?)
}
