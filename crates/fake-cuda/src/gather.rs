//! Copies of many rows: the driver's 3D copy, and the host version of the backend's own kernel.

use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;

use crate::memory;
use crate::status::*;
use crate::stream;
use crate::work::Work;

/// The kernel's parameter.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Gather {
    to: u64,
    from: u64,
    units: u64,
    width: u64,
    rank: u64,
    axes: [Axis; 9],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Axis {
    length: u64,
    to: i64,
    from: i64,
}

impl Gather {
    fn axes(&self) -> &[Axis] {
        &self.axes[..(self.rank as usize).min(self.axes.len())]
    }

    /// Checks the memory that the kernel will read and write when it is launched: a GPU would fault
    /// later, which a test could not distinguish. A thread of a GPU also faults on a misaligned
    /// address.
    pub fn check(&self, device: usize) -> Outcome {
        if !matches!(self.width, 1 | 2 | 4 | 8 | 16) {
            return Err(INVALID_VALUE);
        }
        if self.units == 0 {
            return Ok(());
        }
        let lengths: Option<u64> = self
            .axes()
            .iter()
            .try_fold(1u64, |all, axis| all.checked_mul(axis.length));
        if self.rank == 0 || self.rank > self.axes.len() as u64 || lengths != Some(self.units) {
            return Err(INVALID_VALUE);
        }
        let reached = |first: u64, stride: fn(&Axis) -> i64, write| {
            let reaches = self
                .axes()
                .iter()
                .map(|axis| stride(axis) * (axis.length as i64 - 1));
            let (down, up): (Vec<i64>, Vec<i64>) = reaches.partition(|&reach| reach < 0);
            let (low, high) = (
                first.wrapping_add_signed(down.iter().sum()),
                first.wrapping_add_signed(up.iter().sum()),
            );
            let is_aligned = self
                .axes()
                .iter()
                .all(|axis| stride(axis) % self.width as i64 == 0);
            let bytes = high.wrapping_sub(low).wrapping_add(self.width) as usize;
            is_aligned
                && first.is_multiple_of(self.width)
                && memory::reached_by(device, low, bytes, write)
        };
        let is_sound =
            reached(self.to, |axis| axis.to, true) && reached(self.from, |axis| axis.from, false);
        if is_sound {
            Ok(())
        } else {
            Err(ILLEGAL_ADDRESS)
        }
    }

    /// The host version of `warpipe_gather`: each unit by its number, as a thread finds it.
    pub fn run(&self) {
        for unit in 0..self.units {
            let (mut rest, mut to, mut from) = (unit, self.to, self.from);
            for axis in self.axes().iter().rev() {
                let at = (rest % axis.length) as i64;
                rest /= axis.length;
                (to, from) = (
                    to.wrapping_add_signed(at * axis.to),
                    from.wrapping_add_signed(at * axis.from),
                );
            }
            // SAFETY: looked at when launched; that it is mapped until now is the program's duty.
            unsafe { copy(to, from, self.width as usize) };
        }
    }
}

/// # Safety
/// Both are mapped; they may overlap, which is the program's fault, as on a GPU.
unsafe fn copy(to: u64, from: u64, bytes: usize) {
    let place = |address: u64| ptr::with_exposed_provenance_mut::<u8>(address as usize);
    // SAFETY: the caller's promise.
    unsafe { ptr::copy(place(from).cast_const(), place(to), bytes) };
}

/// One side of `CUDA_MEMCPY3D`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Side {
    offsets: [usize; 4],
    memory_type: u32,
    host: usize,
    device: u64,
    array: usize,
    reserved: usize,
    pitch: usize,
    height: usize,
}

/// `CUDA_MEMCPY3D`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Boxes {
    from: Side,
    to: Side,
    width: usize,
    height: usize,
    depth: usize,
}

impl Boxes {
    /// The start of each row of one side.
    fn rows(&self, side: Side) -> impl Iterator<Item = u64> + use<> {
        let height = self.height;
        let row = move |index: usize| (index / height * side.height + index % height) * side.pitch;
        (0..self.depth * self.height).map(move |index| side.device + row(index) as u64)
    }

    /// Whether one side is linear memory that the copy may use. Its device does not matter: the
    /// driver copies between all of them.
    fn is_sound(&self, side: Side, write: bool) -> bool {
        const UNIFIED: u32 = 4;
        const PITCH_MAX: usize = i32::MAX as usize;
        let is_linear = side.memory_type == UNIFIED
            && (side.offsets, side.array, side.reserved) == ([0; 4], 0, 0);
        let fits = (self.width..=PITCH_MAX).contains(&side.pitch)
            && (self.depth == 1 || side.height >= self.height);
        let last = (self.depth - 1) * side.height + self.height - 1;
        let bytes = last
            .checked_mul(side.pitch)
            .and_then(|bytes| bytes.checked_add(self.width));
        is_linear && fits && bytes.is_some_and(|bytes| memory::usable(side.device, bytes, write))
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpy3DAsync_v2(
    boxes: *const std::ffi::c_void,
    stream: *mut std::ffi::c_void,
) -> c_int {
    answer("cuMemcpy3DAsync_v2", Needs::Context, || {
        // SAFETY: the caller's structure.
        let boxes = unsafe { boxes.cast::<Boxes>().as_ref() }
            .copied()
            .ok_or(INVALID_VALUE)?;
        if [boxes.width, boxes.height, boxes.depth].contains(&0) {
            return Ok(());
        }
        if !boxes.is_sound(boxes.to, true) || !boxes.is_sound(boxes.from, false) {
            return Err(INVALID_VALUE);
        }
        let copy_all = move || {
            for (to, from) in boxes.rows(boxes.to).zip(boxes.rows(boxes.from)) {
                // SAFETY: looked at when enqueued; that it is mapped until now is the program's
                // duty.
                unsafe { copy(to, from, boxes.width) };
            }
        };
        stream::find_for_work(stream)?.push(Work::Kernel(Arc::new(copy_all)))
    })
}
