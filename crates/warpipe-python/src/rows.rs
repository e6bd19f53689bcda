//! Tensors with gaps, or in another order, copied into row-major bytes.
//! **This module is marked for unsafe**: it reads memory that others name.

use warpipe::Layout;

use crate::errors::{Fault, Outcome};

/// The elements of a tensor in memory of the host, in row-major order, as runs of bytes without gaps.
#[derive(Debug)]
pub struct Rows {
    /// Of the element with all indices 0.
    address: u64,
    /// Bytes without a gap.
    run: usize,
    /// The other dimensions, outermost first: how many, and how far apart in bytes.
    axes: Vec<Axis>,
    bytes: usize,
}

#[derive(Debug, Clone, Copy)]
struct Axis {
    length: u64,
    stride: i64,
}

impl Rows {
    /// Of elements of `width` bytes; `strides` are in elements.
    pub fn new(address: u64, width: u64, shape: &[u64], strides: &[i64]) -> Rows {
        let bytes = shape.iter().product::<u64>() * width;
        let width = width as i64;
        let mut axes: Vec<Axis> = Vec::with_capacity(shape.len());
        for (&length, &stride) in shape.iter().zip(strides).filter(|&(&length, _)| length != 1) {
            let stride = stride * width;
            match axes.last_mut() {
                // Two that lie as one.
                Some(outer) if outer.stride == stride.wrapping_mul(length as i64) => {
                    *outer = Axis { length: outer.length * length, stride };
                }
                _ => axes.push(Axis { length, stride }),
            }
        }
        let run = match axes.last() {
            Some(&Axis { length, stride }) if stride == width => {
                axes.pop();
                width as usize * length as usize
            }
            _ => width as usize,
        };
        Rows { address, run, axes, bytes: bytes as usize }
    }

    /// Of a layout in bytes that begin at `lowest`.
    pub fn of(layout: &Layout, lowest: u64) -> Rows {
        Rows::new(lowest + layout.offset(), layout.dtype().bytes(), layout.shape(), layout.strides())
    }

    /// Whether any of them may lie among the `bytes` from `lowest` on.
    pub fn meet(&self, lowest: u64, bytes: u64) -> bool {
        let reach = |axis: &Axis| axis.stride.wrapping_mul(axis.length as i64 - 1);
        let below: i64 = self.axes.iter().map(reach).filter(|&reach| reach < 0).sum();
        let above: i64 = self.axes.iter().map(reach).filter(|&reach| reach > 0).sum();
        let (low, high) = (self.address.wrapping_add_signed(below), self.address.wrapping_add_signed(above));
        low < lowest.saturating_add(bytes) && lowest < high.saturating_add(self.run as u64)
    }

    /// How many bytes all elements are.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies all elements to `to`.
    ///
    /// # Safety
    /// The elements are readable, `to` is writable for [`bytes`](Self::bytes) bytes, and the two do not overlap.
    pub unsafe fn copy_to(&self, to: *mut u8) {
        if self.bytes == 0 {
            return;
        }
        let mut to = to;
        // SAFETY: the caller's promise.
        unsafe { self.copy_axis(&self.axes, self.address as *const u8, &mut to) };
    }

    /// The same into a vector.
    ///
    /// # Safety
    /// The elements are readable.
    pub unsafe fn to_vec(&self) -> Outcome<Vec<u8>> {
        let mut bytes = Vec::new();
        let no_room = |_| Fault::Own("DeviceMemoryError", format!("this process has no room for {} bytes", self.bytes));
        bytes.try_reserve_exact(self.bytes).map_err(no_room)?;
        // SAFETY: the caller's promise; the reserve above is as long, and all of it is written.
        unsafe {
            self.copy_to(bytes.as_mut_ptr());
            bytes.set_len(self.bytes);
        }
        Ok(bytes)
    }

    /// # Safety
    /// As for `copy_to`, for the part of the tensor from `from` on that `axes` are left of.
    unsafe fn copy_axis(&self, axes: &[Axis], from: *const u8, to: &mut *mut u8) {
        match axes {
            // SAFETY: the caller's promise.
            [] => unsafe { copy_run(self.run, from, to) },
            // SAFETY: the caller's promise.
            [inner] => unsafe { self.copy_inner(*inner, from, to) },
            [outer, rest @ ..] => {
                for index in 0..outer.length as i64 {
                    // SAFETY: an element of the tensor, whose extent was checked.
                    unsafe { self.copy_axis(rest, from.wrapping_offset((index * outer.stride) as isize), to) };
                }
            }
        }
    }

    /// The innermost loop, of which each element type gets its own.
    ///
    /// # Safety
    /// As for `copy_axis`.
    unsafe fn copy_inner(&self, axis: Axis, from: *const u8, to: &mut *mut u8) {
        // SAFETY: the caller's promise, in each arm.
        unsafe {
            match self.run {
                1 => copy_runs(1, axis, from, to),
                2 => copy_runs(2, axis, from, to),
                4 => copy_runs(4, axis, from, to),
                8 => copy_runs(8, axis, from, to),
                16 => copy_runs(16, axis, from, to),
                run => copy_runs(run, axis, from, to),
            }
        }
    }
}

/// # Safety
/// As for `Rows::copy_axis`.
#[inline(always)]
unsafe fn copy_runs(run: usize, axis: Axis, from: *const u8, to: &mut *mut u8) {
    for index in 0..axis.length as i64 {
        // SAFETY: the caller's promise.
        unsafe { copy_run(run, from.wrapping_offset((index * axis.stride) as isize), to) };
    }
}

/// # Safety
/// As for `Rows::copy_axis`.
#[inline(always)]
unsafe fn copy_run(run: usize, from: *const u8, to: &mut *mut u8) {
    // SAFETY: the caller's promise.
    unsafe {
        std::ptr::copy_nonoverlapping(from, *to, run);
        *to = to.add(run);
    }
}
