//! Copies between tensors of different layouts, each as one operation of its stream: a driver copy
//! if the rows are long and fit its three dimensions, else a kernel.

use std::ffi::CStr;

use super::super::sys::{CUDA_MEMCPY3D, CUdeviceptr, CUstream, CopySide, Driver};
use super::CudaBackend;
use super::kernels::ResidentKernel;
use super::memory::size;
use crate::backend::{Axis, Rows};
use crate::error::Result;
use crate::kernel::module;
use crate::tensor::RANK_MAX;

const PTX: &CStr = module(concat!(include_str!("gather.ptx"), "\0"));

/// The shortest rows that the driver's own copy handles (`python -m warpipe.bench.gather` measures
/// both).
const DRIVERS_ROW_MIN: u64 = 512;

/// The largest step between rows that every driver accepts (`CU_DEVICE_ATTRIBUTE_MAX_PITCH`).
const PITCH_MAX: i64 = i32::MAX as i64;

/// A row of more than one unit is an axis, too.
const AXES_MAX: usize = RANK_MAX + 1;

const UNIT_MAX: u64 = 16;
const THREADS: u32 = 256;
/// Beyond these each thread copies several units.
const BLOCKS_MAX: u64 = 1 << 16;

/// The kernel's one parameter, by value, as in `gather.cu`.
#[repr(C)]
#[derive(Debug, Default)]
struct Work {
    to: CUdeviceptr,
    from: CUdeviceptr,
    units: u64,
    width: u64,
    rank: u64,
    axes: [[u64; 3]; AXES_MAX],
}

const _: () = assert!(size_of::<Work>() == 40 + 24 * AXES_MAX);

impl Work {
    fn of(rows: &Rows) -> Work {
        let strides = rows
            .axes()
            .iter()
            .flat_map(|axis| [axis.to as u64, axis.from as u64]);
        let all = strides.fold(
            rows.to() | rows.from() | rows.bytes() | UNIT_MAX,
            |all, stride| all | stride,
        );
        let width = 1 << all.trailing_zeros();
        let mut work = Work {
            to: rows.to(),
            from: rows.from(),
            units: 1,
            width,
            ..Work::default()
        };
        let row = Axis {
            length: rows.bytes() / width,
            to: width as i64,
            from: width as i64,
        };
        let axes = rows
            .axes()
            .iter()
            .chain((row.length > 1 || rows.axes().is_empty()).then_some(&row));
        for (place, &Axis { length, to, from }) in work.axes.iter_mut().zip(axes) {
            *place = [length, to as u64, from as u64];
            work.units *= length;
            work.rank += 1;
        }
        work
    }
}

/// Loads the kernel. The context is current.
pub(super) fn load(driver: &Driver) -> Result<ResidentKernel> {
    let nothing = Work {
        width: 1,
        ..Work::default()
    };
    // SAFETY: the kernel of `gather.cu`; without units it copies nothing.
    unsafe { ResidentKernel::load(driver, PTX, c"warpipe_gather", nothing) }
}

impl CudaBackend {
    /// # Safety
    /// As for [`crate::backend::Copies::copy_rows`]; the context is current.
    pub(in crate::backend::cuda) unsafe fn enqueue_rows(
        &self,
        stream: CUstream,
        rows: &Rows,
    ) -> Result<()> {
        let driver = self.driver;
        if rows.axes().is_empty() {
            let bytes = size(rows.bytes())?;
            // SAFETY: the caller's promise.
            unsafe { driver.cuMemcpyAsync(rows.to(), rows.from(), bytes, stream) }?;
        } else if let Some(rows) = boxed(rows) {
            // SAFETY: the caller's promise.
            unsafe { driver.cuMemcpy3DAsync_v2(&rows, stream) }?;
        } else {
            let work = Work::of(rows);
            let blocks = work.units.div_ceil(u64::from(THREADS)).clamp(1, BLOCKS_MAX);
            let shape = (blocks as u32, THREADS);
            // SAFETY: the caller vouches for what the rows name.
            unsafe { self.gather.launch(driver, stream, shape, work) }?;
        }
        Ok(())
    }
}

/// The rows as a parameter of the driver's box copy, if it accepts them and they are long enough.
fn boxed(rows: &Rows) -> Option<CUDA_MEMCPY3D> {
    let alone = Axis {
        length: 1,
        to: 0,
        from: 0,
    };
    let (slice, row) = match *rows.axes() {
        [row] => (alone, row),
        [slice, row] => (slice, row),
        _ => return None,
    };
    if rows.bytes() < DRIVERS_ROW_MIN {
        return None;
    }
    Some(CUDA_MEMCPY3D {
        src: side(rows, rows.from(), row, slice, |axis| axis.from)?,
        dst: side(rows, rows.to(), row, slice, |axis| axis.to)?,
        width: rows.bytes() as usize,
        height: row.length as usize,
        depth: slice.length as usize,
    })
}

/// One side of the rows, from this address on; `None` if the driver cannot express it.
fn side(
    rows: &Rows,
    start: CUdeviceptr,
    row: Axis,
    slice: Axis,
    stride: fn(&Axis) -> i64,
) -> Option<CopySide> {
    let pitch = stride(&row);
    if pitch < rows.bytes() as i64 || pitch > PITCH_MAX {
        return None;
    }
    let height = match slice.length {
        1 => row.length as i64,
        _ if stride(&slice) % pitch != 0 => return None,
        _ => stride(&slice) / pitch,
    };
    let is_apart = height >= row.length as i64;
    is_apart.then(|| CopySide::linear(start, pitch as usize, height as usize))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{DType, Layout};

    fn rows(dtype: DType, shape: &[u64], strides: &[i64], offset: u64) -> Rows {
        let into = Layout::contiguous(dtype, shape).unwrap();
        let source = Layout::strided(dtype, shape, strides, offset).unwrap();
        Rows::between(1 << 32, &into, 1 << 40, &source).unwrap()
    }

    #[test]
    fn long_rows_in_up_to_three_dimensions_are_the_drivers() {
        let crop = boxed(&rows(DType::F32, &[100, 128], &[1000, 1], 8)).unwrap();
        assert_eq!(
            (crop.src.device, crop.src.pitch, crop.dst.pitch),
            ((1 << 40) + 8, 4000, 512)
        );
        assert_eq!((crop.width, crop.height, crop.depth), (512, 100, 1));
        let deep = boxed(&rows(DType::U8, &[7, 100, 600], &[200_000, 1000, 1], 0)).unwrap();
        assert_eq!((deep.src.height, deep.dst.height), (200, 100));
        assert_eq!((deep.width, deep.height, deep.depth), (600, 100, 7));
    }

    #[test]
    fn what_the_driver_cannot_be_told_is_the_kernels() {
        let cases: [(&[u64], &[i64]); 6] = [
            (&[100, 511], &[1000, 1]),
            (&[2, 100, 600], &[100_500, 1000, 1]),
            (&[2, 3, 4, 600], &[64_000_000, 8_000_000, 1000, 1]),
            (&[100, 600], &[0, 1]),
            (&[3, 100, 600], &[0, 1000, 1]),
            (&[2, 600], &[1 << 31, 1]),
        ];
        for (shape, strides) in cases {
            assert_eq!(
                boxed(&rows(DType::U8, shape, strides, 0)).map(|found| found.width),
                None,
                "{shape:?}"
            );
        }
        assert!(boxed(&rows(DType::U8, &[100, 600], &[-1000, 1], 99_000)).is_none());
    }

    #[test]
    fn the_kernel_copies_in_the_largest_units_that_divide_everything() {
        let width = |dtype, shape: &[u64], strides: &[i64], offset| {
            let work = Work::of(&rows(dtype, shape, strides, offset));
            (work.width, work.units, work.rank)
        };
        assert_eq!(width(DType::U8, &[10, 48], &[64, 1], 0), (16, 30, 2));
        assert_eq!(width(DType::U8, &[10, 48], &[64, 1], 3), (1, 480, 2));
        assert_eq!(width(DType::F32, &[10, 16], &[1, 10], 0), (4, 160, 2));
        assert_eq!(width(DType::F64, &[6], &[-2], 80), (8, 6, 1));
        assert_eq!(width(DType::C128, &[4], &[0], 0), (16, 4, 1));
        let eight = width(
            DType::C128,
            &[2; 8],
            &[-1, -2, -4, -8, -16, -32, -64, -128],
            16 * 255 + 8,
        );
        assert_eq!(eight, (8, 512, 9));
    }
}
