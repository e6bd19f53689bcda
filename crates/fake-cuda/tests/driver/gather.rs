//! Copies of elements: which use the driver's 3D copy, which the kernel, and the memory that each
//! reaches.

use warpipe::{DType, Device, Error, Layout, Stream};

use super::cases::{PATIENCE, download, gpu, release};

/// 600 bytes of each of 6 rows, of which every second is left out, in 2 planes: for the driver, and
/// turned for the kernel.
const SHAPE: [u64; 3] = [2, 3, 600];
const CROP: [i64; 3] = [4 << 10, 1 << 10, 1];

fn copy(stream: &Stream, to: u64, from: u64, source: &Layout) -> Result<(), Error> {
    let into = Layout::contiguous(DType::U8, source.shape()).unwrap();
    // SAFETY: the caller gives memory that is long enough, stays, and does not overlap.
    unsafe { stream.copy_elements(to, &into, from, source) }
}

/// A region of distinct bytes, room for a copy behind them, and a stream.
fn filled(device: &Device) -> (warpipe::backend::RawRegion, u64, Stream) {
    let region = device.backend().allocate(2 << 20).unwrap();
    let stream = device.stream().unwrap();
    let bytes: Vec<u8> = (0..8 << 10).map(|at: u32| (at % 251) as u8).collect();
    // SAFETY: the region is longer.
    unsafe { device.backend().upload(stream.raw(), region.ptr, &bytes) }.unwrap();
    (region, region.ptr + (1 << 20), stream)
}

pub fn gather_boxes() {
    let device = gpu();
    let (region, to, stream) = filled(&device);
    let crop = Layout::strided(DType::U8, &SHAPE, &CROP, 7).unwrap();
    copy(&stream, to, region.ptr, &crop).unwrap();
    let found = download(&device, &stream, to, 3600);
    assert!(
        crop.offsets()
            .zip(found)
            .all(|(at, byte)| byte == (at % 251) as u8)
    );
    // The box ends where the region does, and one byte behind it.
    let last = Layout::strided(DType::U8, &[2, 600], &[1 << 10, 1], 0).unwrap();
    let end = region.ptr + region.bytes;
    copy(&stream, to, end - last.bytes(), &last).unwrap();
    copy(&stream, to, end - last.bytes() + 1, &last).unwrap_err();
    stream.synchronize(PATIENCE).unwrap();
    release(device.backend(), region);
}

pub fn gather_kernel() {
    let device = gpu();
    let (region, to, stream) = filled(&device);
    let turned = Layout::strided(DType::U8, &[600, 3, 2], &[1, 1 << 10, 4 << 10], 7).unwrap();
    copy(&stream, to, region.ptr, &turned).unwrap();
    let found = download(&device, &stream, to, 3600);
    assert!(
        turned
            .offsets()
            .zip(found)
            .all(|(at, byte)| byte == (at % 251) as u8)
    );
    let reversed = Layout::strided(DType::U8, &[600], &[-1], 599).unwrap();
    copy(&stream, to, region.ptr + region.bytes - 600, &reversed).unwrap();
    copy(&stream, to, region.ptr + region.bytes - 599, &reversed).unwrap_err();
    stream.synchronize(PATIENCE).unwrap();
    release(device.backend(), region);
}

/// The kernel faults where its device reaches nothing; the driver copies between all devices.
pub fn gather_from_another_gpu() {
    let (device, other) = (gpu(), Device::cuda(1).unwrap());
    let (region, to, stream) = filled(&device);
    let theirs = other.backend().allocate_plain(16 << 10).unwrap();
    let reversed = Layout::strided(DType::U8, &[600], &[-1], 599).unwrap();
    match copy(&stream, to, theirs, &reversed) {
        Err(Error::Driver { code: 700, .. }) => {}
        other => panic!("{other:?}"),
    }
    copy(
        &stream,
        to,
        theirs,
        &Layout::strided(DType::U8, &SHAPE, &CROP, 0).unwrap(),
    )
    .unwrap();
    copy(
        &other.stream().unwrap(),
        theirs + (8 << 10),
        theirs,
        &reversed,
    )
    .unwrap();
    stream.synchronize(PATIENCE).unwrap();
    release(device.backend(), region);
}
