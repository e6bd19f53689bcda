//! Uploads and downloads, and the calls that block for them.

use std::sync::mpsc::channel;
use std::time::Duration;

use rustix::mm::{MapFlags, ProtFlags};
use warpipe::backend::{StreamOp, TimelineWord};
use warpipe::{Device, Error, Stream};

use super::cases::{MIB, PATIENCE, REGION_BYTES, batch, download, driver_library, gpu, words};

pub fn upload() {
    let device = gpu();
    let (words, _) = words(&device);
    let region = device.backend().allocate(REGION_BYTES).unwrap();
    let stream = device.stream().unwrap();
    words[0].store(42);
    warpipe_kernels::spin(&stream, Duration::from_millis(50)).unwrap();
    // SAFETY: the page of words is readable for as long as the process lives; the region is long
    // enough.
    unsafe {
        let page = std::slice::from_raw_parts(words.as_ptr().cast::<u8>(), 8);
        device
            .backend()
            .upload(stream.raw(), region.ptr, page)
            .unwrap();
    }
    words[0].store(43);
    assert_eq!(
        download(&device, &stream, region.ptr, 8),
        42u64.to_le_bytes()
    );
}

/// A stream that waits until the first word is at 1.
pub fn held_stream(device: &Device) -> (Stream, &'static [TimelineWord]) {
    let ((words, base), stream) = (words(device), device.stream().unwrap());
    batch(
        device,
        stream.raw(),
        &[StreamOp::Wait {
            word: base,
            value: 1,
        }],
    )
    .unwrap();
    (stream, words)
}

pub fn write(device: &Device, stream: &Stream, dst: u64, bytes: &[u8]) -> Result<(), Error> {
    // SAFETY: the regions written here are as long as what is written.
    unsafe { device.backend().upload(stream.raw(), dst, bytes) }
}

pub fn upload_behind_a_wait() {
    let device = gpu();
    let (stream, words) = held_stream(&device);
    let lengths = [4, 4096, 4097, 65_536, 65_537, 1 << 20, 5 * (1 << 20) + 3];
    let region = device.backend().allocate(16 * MIB).unwrap();
    let (mut at, mut expected) = (region.ptr, Vec::new());
    for round in 0..3 {
        for (index, &length) in
            lengths
                .iter()
                .enumerate()
                .take(if round == 0 { lengths.len() } else { 5 })
        {
            let mut bytes: Vec<u8> = (0..length)
                .map(|place| (place * 31 + index + round) as u8)
                .collect();
            write(&device, &stream, at, &bytes).unwrap();
            at += length as u64;
            expected.extend_from_slice(&bytes);
            bytes.fill(0xff);
        }
    }
    assert!(!stream.is_idle().unwrap(), "nothing has let it go");
    words[0].store(1);
    stream.synchronize(PATIENCE).unwrap();
    assert!(
        download(&device, &stream, region.ptr, expected.len()) == expected,
        "other bytes came"
    );
    // The staging memory is free again, for copies of any length.
    for length in lengths {
        write(&device, &stream, region.ptr, &vec![7; length]).unwrap();
        assert!(download(&device, &stream, region.ptr, length) == vec![7; length]);
    }
}

pub fn pageable_control() {
    let device = gpu();
    let (stream, words) = held_stream(&device);
    let (raw, region) = (
        stream.raw().0.addr(),
        device.backend().allocate(REGION_BYTES).unwrap(),
    );
    let (begin, begun) = channel();
    let copy = std::thread::spawn(move || {
        let (library, bytes) = (driver_library(), [1u8; 4]);
        device.stream().unwrap();
        // SAFETY: the driver's function; the context is the device's, since the call above has made
        // it current and the one below does so again; the region is live.
        unsafe {
            let copy = library.get::<unsafe extern "C" fn(u64, *const u8, usize, usize) -> i32>(
                "cuMemcpyHtoDAsync_v2",
            );
            let push = library
                .get::<unsafe extern "C" fn(usize) -> i32>("cuCtxPushCurrent_v2")
                .unwrap();
            let retain = library
                .get::<unsafe extern "C" fn(*mut usize, i32) -> i32>("cuDevicePrimaryCtxRetain");
            let mut context = 0;
            assert_eq!((retain.unwrap()(&mut context, 0), push(context)), (0, 0));
            begin.send(()).unwrap();
            assert_eq!(
                copy.unwrap()(region.ptr, bytes.as_ptr(), bytes.len(), raw),
                0
            );
        }
        assert!(
            words[0].load() >= 1,
            "the copy returned while its stream stood still: the test of uploads proves nothing"
        );
    });
    begun.recv_timeout(PATIENCE).unwrap();
    // Not for order: the longer this is, the likelier a test catches a copy that does not block.
    std::thread::sleep(Duration::from_millis(50));
    words[0].store(1);
    copy.join().unwrap();
    stream.synchronize(PATIENCE).unwrap();
}

pub fn upload_limit() {
    let device = gpu();
    let (stream, words) = held_stream(&device);
    let region = device.backend().allocate(64 * MIB).unwrap();
    let bytes = vec![3; 32 << 20];
    write(&device, &stream, region.ptr, &bytes).unwrap();
    write(&device, &stream, region.ptr + 32 * MIB, &bytes).unwrap();
    let refused = write(&device, &stream, region.ptr, &[1]);
    assert!(matches!(refused, Err(Error::Timeout { .. })), "{refused:?}");
    // Copies of another stream to the host proceed.
    let other = device.stream().unwrap();
    assert_eq!(download(&device, &other, region.ptr + 64 * MIB - 1, 1), [0]);
    words[0].store(1);
    stream.synchronize(PATIENCE).unwrap();
    batch(
        &device,
        stream.raw(),
        &[StreamOp::Wait {
            word: words.as_ptr().addr() as u64,
            value: 2,
        }],
    )
    .unwrap();
    write(&device, &stream, region.ptr, &[1]).unwrap();
    words[0].store(2);
    assert_eq!(download(&device, &stream, region.ptr, 2), [1, 3]);
}

pub fn download_limit() {
    let device = gpu();
    let region = device.backend().allocate(8 * MIB).unwrap();
    let (stream, words) = held_stream(&device);
    write(&device, &stream, region.ptr, &vec![5; 6 << 20]).unwrap();
    let mut out = vec![0; 6 << 20];
    // SAFETY: the region is longer.
    let refused = unsafe {
        device
            .backend()
            .download(stream.raw(), &mut out, region.ptr)
    };
    assert!(matches!(refused, Err(Error::Timeout { .. })), "{refused:?}");
    words[0].store(1);
    stream.synchronize(PATIENCE).unwrap();
    assert!(
        out.iter().all(|&byte| byte == 0),
        "written after it was given up"
    );
    assert!(download(&device, &stream, region.ptr, 6 << 20) == vec![5; 6 << 20]);
}

pub fn download_in_place() {
    const BYTES: usize = 4 << 20;
    let device = gpu();
    let backend = device.backend();
    let region = backend.allocate(BYTES as u64).unwrap();
    let (stream, words) = held_stream(&device);
    write(&device, &stream, region.ptr, &vec![5; BYTES]).unwrap();
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, placed by the kernel and never unmapped.
    let page = unsafe {
        rustix::mm::mmap_anonymous(std::ptr::null_mut(), BYTES, protection, MapFlags::SHARED)
    }
    .unwrap();
    // SAFETY: whole pages that stay; the slice is the only way to them.
    let out = unsafe {
        backend.register(page.cast(), BYTES).unwrap();
        std::slice::from_raw_parts_mut(page.cast::<u8>(), BYTES)
    };
    // SAFETY: the region is as long.
    let refused = unsafe { backend.download(stream.raw(), out, region.ptr) };
    assert!(matches!(refused, Err(Error::Timeout { .. })), "{refused:?}");
    words[0].store(1);
    stream.synchronize(PATIENCE).unwrap();
    assert!(
        out.iter().all(|&byte| byte == 0),
        "written after it was given up"
    );
    // SAFETY: as above.
    unsafe { backend.download(stream.raw(), out, region.ptr) }.unwrap();
    assert!(out.iter().all(|&byte| byte == 5));
}

pub fn download_all() {
    // More pieces, and more bytes, than are under way at once.
    let sizes: Vec<usize> = (0..20).map(|it| it * 4096 + 1).collect();
    let sizes = [sizes, vec![0, 3 << 20, 5, 4 << 20]].concat();
    let device = gpu();
    let region = device.backend().allocate(32 * MIB).unwrap();
    let stream = device.stream().unwrap();
    let bytes: Vec<u8> = (0..32 * MIB).map(|at| (at >> 8 ^ at) as u8).collect();
    write(&device, &stream, region.ptr, &bytes).unwrap();
    // Backwards, so that no piece lies behind the one before it.
    let mut found: Vec<Vec<u8>> = sizes.iter().map(|&size| vec![0; size]).collect();
    let (mut pieces, mut end) = (Vec::new(), 32 << 20);
    for out in &mut found {
        end -= out.len();
        pieces.push((&mut out[..], region.ptr + end as u64));
    }
    // SAFETY: the pieces lie in the region.
    unsafe { device.backend().download_all(stream.raw(), &mut pieces) }.unwrap();
    let mut end = 32 << 20;
    for out in &found {
        end -= out.len();
        assert!(*out == bytes[end..end + out.len()], "{} bytes", out.len());
    }
}
