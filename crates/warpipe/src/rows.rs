//! A copy between tensors of different layouts, as rows of bytes without gaps. **This module is
//! marked for unsafe**: it copies by address.
//!
//! Every backend gets the same rows: dimensions of length 1 are left out, dimensions that are
//! contiguous on both sides are joined, and the order is that of the target, so that bytes are
//! written in sequence.

use crate::backend::DevicePtr;
use crate::error::{Error, Result};
use crate::tensor::{Layout, RANK_MAX};

/// A dimension along which rows are repeated. Strides are in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Axis {
    /// The number of rows, at least 2.
    pub length: u64,
    /// The distance between rows where they are written; more than 0.
    pub to: i64,
    /// The distance between rows where they are read.
    pub from: i64,
}

/// The rows of one copy: the argument of
/// [`Copies::copy_rows`](crate::backend::Copies::copy_rows)(crate::backend::Copies::copy_rows).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    to: DevicePtr,
    from: DevicePtr,
    bytes: u64,
    rank: usize,
    axes: [Axis; RANK_MAX],
}

impl Rows {
    /// One row: `bytes` bytes that lie together on both sides.
    pub(crate) fn one(to: DevicePtr, from: DevicePtr, bytes: u64) -> Rows {
        Rows {
            to,
            from,
            bytes,
            rank: 0,
            axes: [Axis::default(); RANK_MAX],
        }
    }

    /// The rows that copy the tensor of layout `source` in the slot at `from` into the tensor of
    /// layout `into` in the slot at `to`.
    ///
    /// # Errors
    /// [`Error::Argument`]: another shape or element type; elements of `into` that lie on each
    /// other, or between those of another dimension; a tensor that reaches further than an address
    /// can.
    pub fn between(to: DevicePtr, into: &Layout, from: DevicePtr, source: &Layout) -> Result<Rows> {
        if (into.dtype(), into.shape()) != (source.dtype(), source.shape()) {
            return Err(Error::layout(format!("{source:?} does not fit {into:?}")));
        }
        let end = |ptr: DevicePtr, layout: &Layout| {
            ptr.checked_add(layout.bytes())
                .map(|_| ptr + layout.offset())
        };
        let (Some(to), Some(from)) = (end(to, into), end(from, source)) else {
            return Err(Error::layout("it reaches further than an address can"));
        };
        let width = into.dtype().bytes();
        let mut rows = Rows::one(to, from, width);
        if into.elements() == 0 {
            return Ok(Rows { bytes: 0, ..rows });
        }
        for ((&length, &to), &from) in into
            .shape()
            .iter()
            .zip(into.strides())
            .zip(source.strides())
        {
            if length > 1 {
                // A layout's reach was checked when it was made: a stride that is used is far from
                // overflow.
                rows.push(Axis {
                    length,
                    to: to * width as i64,
                    from: from * width as i64,
                });
            }
        }
        rows.axes[..rows.rank].sort_by_key(|axis| std::cmp::Reverse(axis.to));
        rows.check_apart().map_err(|stride| {
            let said = format!("elements of {into:?} lie on each other, or between each other");
            Error::layout(format!(
                "{said} ({stride} bytes apart); copy into a tensor with dimensions that do not"
            ))
        })?;
        rows.join();
        Ok(rows)
    }

    /// Adds an axis. An axis that is written backwards is reversed.
    fn push(&mut self, mut axis: Axis) {
        if axis.to < 0 {
            let steps = axis.length as i64 - 1;
            self.to = self.to.wrapping_add_signed(axis.to * steps);
            self.from = self.from.wrapping_add_signed(axis.from * steps);
            axis = Axis {
                length: axis.length,
                to: -axis.to,
                from: -axis.from,
            };
        }
        self.axes[self.rank] = axis;
        self.rank += 1;
    }

    /// Checks that each dimension of the target steps over all bytes inside of it. The error is the
    /// stride that does not.
    fn check_apart(&self) -> Result<(), i64> {
        let mut inside = self.bytes as i64;
        for axis in self.axes().iter().rev() {
            if axis.to < inside {
                return Err(axis.to);
            }
            inside += axis.to * (axis.length as i64 - 1);
        }
        Ok(())
    }

    /// Joins axes that are contiguous on both sides.
    fn join(&mut self) {
        let mut rank = 0;
        for index in 0..self.rank {
            let inner = self.axes[index];
            let spans = |stride: i64, inner_stride: i64| {
                inner_stride
                    .checked_mul(inner.length as i64)
                    .is_some_and(|reach| reach == stride)
            };
            match self.axes[..rank].last_mut() {
                Some(outer) if spans(outer.to, inner.to) && spans(outer.from, inner.from) => {
                    *outer = Axis {
                        length: outer.length * inner.length,
                        ..inner
                    };
                }
                _ => {
                    self.axes[rank] = inner;
                    rank += 1;
                }
            }
        }
        if let Some(&Axis { length, to, from }) = self.axes[..rank].last()
            && (to, from) == (self.bytes as i64, self.bytes as i64)
        {
            self.bytes *= length;
            rank -= 1;
        }
        self.rank = rank;
    }

    /// The address where the first row is written.
    pub fn to(&self) -> DevicePtr {
        self.to
    }

    /// The address where the first row is read.
    pub fn from(&self) -> DevicePtr {
        self.from
    }

    /// The length of a row in bytes; 0 if there is nothing to copy.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The dimensions of the rows, outermost first. None: there is one row.
    pub fn axes(&self) -> &[Axis] {
        &self.axes[..self.rank]
    }

    /// Whether a byte between the first and the last one that is read may lie between the first and
    /// the last one that is written.
    pub fn meet(&self) -> bool {
        let extent = |first: DevicePtr, stride: fn(&Axis) -> i64| {
            let mut low = i128::from(first);
            let mut high = i128::from(first) + i128::from(self.bytes);
            for axis in self.axes() {
                let reach = i128::from(stride(axis)) * i128::from(axis.length - 1);
                if reach < 0 {
                    low += reach
                } else {
                    high += reach
                }
            }
            low..high
        };
        let to = extent(self.to, |axis| axis.to);
        let from = extent(self.from, |axis| axis.from);
        self.bytes > 0 && to.start < from.end && from.start < to.end
    }

    /// Copies the rows, on the CPU and before it returns.
    ///
    /// # Safety
    /// All rows are readable where they are read, and writable where they are written, and no byte
    /// is both.
    pub unsafe fn copy(&self) {
        if self.bytes > 0 {
            // SAFETY: the caller promises it.
            unsafe { self.copy_axes(self.axes(), self.to, self.from) };
        }
    }

    /// # Safety
    /// As for `copy`, for the part of the rows that `axes` are left of.
    unsafe fn copy_axes(&self, axes: &[Axis], to: DevicePtr, from: DevicePtr) {
        match axes {
            // SAFETY: the caller promises it.
            [] => unsafe { copy_row(self.bytes as usize, to, from) },
            // SAFETY: the caller promises it.
            [inner] => unsafe { self.copy_inner(*inner, to, from) },
            [outer, rest @ ..] => {
                for (to, from) in outer.places(to, from) {
                    // SAFETY: the caller promises it.
                    unsafe { self.copy_axes(rest, to, from) };
                }
            }
        }
    }

    /// The innermost loop, instantiated for each element type.
    ///
    /// # Safety
    /// As for `copy_axes`.
    unsafe fn copy_inner(&self, axis: Axis, to: DevicePtr, from: DevicePtr) {
        // SAFETY: the caller promises it, in each arm.
        unsafe {
            match self.bytes as usize {
                1 => copy_rows(1, axis, to, from),
                2 => copy_rows(2, axis, to, from),
                4 => copy_rows(4, axis, to, from),
                8 => copy_rows(8, axis, to, from),
                16 => copy_rows(16, axis, to, from),
                bytes => copy_rows(bytes, axis, to, from),
            }
        }
    }
}

impl Axis {
    /// The addresses where each row is written and read, if the first is at `to` and `from`.
    #[inline(always)]
    fn places(
        self,
        to: DevicePtr,
        from: DevicePtr,
    ) -> impl Iterator<Item = (DevicePtr, DevicePtr)> {
        let at = |first: DevicePtr, stride: i64, index: i64| {
            first.wrapping_add_signed(stride.wrapping_mul(index))
        };
        (0..self.length as i64)
            .map(move |index| (at(to, self.to, index), at(from, self.from, index)))
    }
}

/// # Safety
/// As for `Rows::copy_axes`.
#[inline(always)]
unsafe fn copy_rows(bytes: usize, axis: Axis, to: DevicePtr, from: DevicePtr) {
    for (to, from) in axis.places(to, from) {
        // SAFETY: the caller promises it.
        unsafe { copy_row(bytes, to, from) };
    }
}

/// # Safety
/// As for `Rows::copy_axes`.
#[inline(always)]
unsafe fn copy_row(bytes: usize, to: DevicePtr, from: DevicePtr) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;

    fn strided(dtype: DType, shape: &[u64], strides: &[i64], offset: u64) -> Layout {
        Layout::strided(dtype, shape, strides, offset).unwrap()
    }

    /// Rows of a gather into a slot at 0x1000 from one at 0x9000.
    fn gathered(source: &Layout) -> Rows {
        let into = Layout::contiguous(source.dtype(), source.shape()).unwrap();
        Rows::between(0x1000, &into, 0x9000, source).unwrap()
    }

    fn axes(rows: &Rows) -> Vec<(u64, i64, i64)> {
        rows.axes()
            .iter()
            .map(|axis| (axis.length, axis.to, axis.from))
            .collect()
    }

    #[test]
    fn a_crop_is_rows_of_its_width_and_what_lies_as_one_is_one() {
        // 2 images of 100 x 100 x 3 floats; 10 x 20 pixels of each.
        let crop = gathered(&strided(
            DType::F32,
            &[2, 10, 20, 3],
            &[30_000, 300, 3, 1],
            4 * 909,
        ));
        assert_eq!((crop.bytes(), crop.from()), (240, 0x9000 + 4 * 909));
        assert_eq!(axes(&crop), [(2, 2400, 120_000), (10, 240, 1200)]);
        let whole = gathered(&Layout::contiguous(DType::F32, &[2, 10, 20, 3]).unwrap());
        assert_eq!((whole.bytes(), whole.axes()), (4800, &[][..]));
        // Whole planes with gaps between them.
        let planes = gathered(&strided(DType::U8, &[4, 5, 6], &[100, 6, 1], 0));
        assert_eq!((planes.bytes(), axes(&planes)), (30, vec![(4, 30, 100)]));
    }

    #[test]
    fn dimensions_without_a_step_are_left_out_whatever_their_strides() {
        let odd = gathered(&strided(
            DType::I16,
            &[1, 3, 1, 4],
            &[i64::MAX, 7, -5, 1],
            0,
        ));
        assert_eq!((odd.bytes(), axes(&odd)), (8, vec![(3, 8, 14)]));
        let number = gathered(&strided(DType::C128, &[], &[], 16));
        assert_eq!(
            (number.bytes(), number.from(), number.axes()),
            (16, 0x9010, &[][..])
        );
        assert_eq!(
            gathered(&strided(DType::F64, &[3, 0], &[1, 1], 0)).bytes(),
            0
        );
    }

    #[test]
    fn a_target_is_written_in_its_own_order_and_forwards() {
        let source = strided(DType::U8, &[2, 3], &[3, 1], 0);
        let into = strided(DType::U8, &[2, 3], &[1, -2], 4);
        let rows = Rows::between(0x1000, &into, 0x9000, &source).unwrap();
        assert_eq!((rows.to(), rows.from()), (0x1000, 0x9002));
        assert_eq!(
            (rows.bytes(), axes(&rows)),
            (1, vec![(3, 2, -1), (2, 1, 3)])
        );
    }

    #[test]
    fn a_target_whose_elements_lie_on_each_other_is_refused() {
        let source = Layout::contiguous(DType::U8, &[2, 4]).unwrap();
        for strides in [[0, 1], [2, 1], [3, 2]] {
            let into = strided(DType::U8, &[2, 4], &strides, 0);
            assert!(
                matches!(
                    Rows::between(0, &into, 64, &source),
                    Err(Error::Argument {
                        argument: "tensor layout",
                        ..
                    })
                ),
                "{strides:?}"
            );
        }
    }

    #[test]
    fn tensors_of_another_shape_or_type_or_beyond_all_addresses_are_refused() {
        let of = |dtype, shape: &[u64]| Layout::contiguous(dtype, shape).unwrap();
        let into = of(DType::F32, &[2, 3]);
        for (source, from) in [
            (of(DType::F32, &[3, 2]), 0),
            (of(DType::I32, &[2, 3]), 0),
            (of(DType::F32, &[2, 3]), u64::MAX - 8),
        ] {
            assert!(
                matches!(
                    Rows::between(0x1000, &into, from, &source),
                    Err(Error::Argument {
                        argument: "tensor layout",
                        ..
                    })
                ),
                "{source:?}"
            );
        }
    }

    #[test]
    fn ranges_that_touch_are_apart_and_ranges_that_share_a_byte_meet() {
        let into = Layout::bytes_only(8).unwrap();
        let source = strided(DType::U8, &[8], &[-2], 14);
        let meet = |to| Rows::between(to, &into, 100, &source).unwrap().meet();
        assert_eq!([92, 93, 114, 115].map(meet), [false, true, true, false]);
    }

    #[test]
    fn the_copy_is_what_a_naive_gather_gives() {
        let layouts = [
            strided(DType::U8, &[3, 4, 5], &[1, 3, 12], 0),
            strided(DType::I16, &[4, 4], &[-9, 2], 60),
            strided(DType::F32, &[2, 3, 2], &[0, 8, -1], 4),
            strided(DType::F64, &[5, 2], &[3, 1], 0),
            strided(DType::C128, &[2, 2, 2], &[9, -4, 2], 64),
            strided(DType::U8, &[3, 5], &[-20, 1], 40),
            strided(DType::U8, &[0, 5], &[-20, 1], 40),
        ];
        for source in layouts {
            let bytes: Vec<u8> = (0..source.bytes()).map(|at| at as u8).collect();
            let packed = Layout::contiguous(source.dtype(), source.shape()).unwrap();
            let mut found = vec![0; packed.bytes() as usize];
            let to = found.as_mut_ptr().expose_provenance();
            let from = bytes.as_ptr().expose_provenance();
            let rows = Rows::between(to as u64, &packed, from as u64, &source).unwrap();
            // SAFETY: both slots are as long as their layouts, and apart.
            unsafe { rows.copy() };
            let width = source.dtype().bytes();
            let due: Vec<u8> = source
                .offsets()
                .flat_map(|at| &bytes[at as usize..][..width as usize])
                .copied()
                .collect();
            assert_eq!(found, due, "{source:?}");
        }
    }
}
