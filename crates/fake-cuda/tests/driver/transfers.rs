//! Uploads and downloads, and the calls that block for them.

use std::sync::mpsc::channel;
use std::time::Duration;

use rustix::mm::{MapFlags, ProtFlags};
use warpipe::backend::{RawStream, StreamOp, TimelineWord};
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

/// Uploads of this length, between bytes that stay as they are.
fn upload_between(device: &Device, stream: &Stream, length: usize) -> Result<(), Error> {
    const MARGIN: usize = 16;
    let region = device.backend().allocate(REGION_BYTES)?;
    let around = vec![0xee; length + 2 * MARGIN];
    // More than a short upload, so that it is the driver's own.
    let all = [around.clone(), vec![0; 70_000]].concat();
    let bytes: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
    let first = write(device, stream, region.ptr, &all);
    first.and_then(|()| write(device, stream, region.ptr + MARGIN as u64, &bytes))?;
    let found = download(device, stream, region.ptr, around.len());
    assert_eq!(found[..MARGIN], around[..MARGIN]);
    assert_eq!(found[MARGIN..][..length], bytes, "{length} bytes");
    assert_eq!(found[MARGIN + length..], around[..MARGIN]);
    Ok(())
}

pub fn short_uploads() {
    let device = gpu();
    let stream = device.stream().unwrap();
    let region = device.backend().allocate(REGION_BYTES).unwrap();
    // The driver's copy of one row fails once: none of these is one.
    for length in [2, 3, 4, 5, 255, 4095, 4096, 4097, 65_535, 65_536] {
        let bytes: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
        write(&device, &stream, region.ptr, &bytes).unwrap();
        assert_eq!(download(&device, &stream, region.ptr, length), bytes);
    }
    let row = write(&device, &stream, region.ptr, &[0; 65_537]);
    assert!(row.is_err(), "a long upload was no row: {row:?}");
    for length in [1, 2, 3, 4097, 65_535, 65_536, 65_537] {
        upload_between(&device, &stream, length).unwrap();
    }
    // Behind a stream that waits, too, and from memory that is used again at once.
    let (held, words) = held_stream(&device);
    let mut bytes = vec![1; 1000];
    write(&device, &held, region.ptr, &bytes).unwrap();
    bytes.fill(2);
    words[0].store(1);
    assert_eq!(download(&device, &held, region.ptr, 1000), [1; 1000]);
}

pub fn short_uploads_under_mps() {
    let device = gpu();
    let stream = device.stream().unwrap();
    for length in [1, 2, 3, 4097, 65_535, 65_536, 65_537] {
        upload_between(&device, &stream, length).unwrap();
    }
}

pub fn upload_pieces() {
    let device = gpu();
    let region = device.backend().allocate(16 * MIB).unwrap();
    let bytes: Vec<u8> = (0..9 * MIB).map(|at| (at >> 8 ^ at) as u8).collect();
    let (held, words) = held_stream(&device);
    for stream in [&device.stream().unwrap(), &held] {
        for sizes in [
            vec![],
            vec![0, 0],
            vec![1],
            vec![3, 0, 5, 4096],
            vec![65_535, 65_535, 9],
            vec![1 << 20, 1, (1 << 20) - 1, 3 << 20, 70_000],
        ] {
            let (mut pieces, mut at) = (Vec::new(), 0);
            for size in sizes {
                pieces.push(&bytes[at..at + size]);
                at += size;
            }
            let start = region.ptr + 7;
            words[0].store(0);
            // SAFETY: the region is longer than all pieces.
            unsafe { device.backend().upload_pieces(stream.raw(), start, &pieces) }.unwrap();
            words[0].store(1);
            assert!(
                download(&device, stream, start, at) == bytes[..at],
                "{at} bytes"
            );
        }
    }
}

pub fn copy_to_host() {
    let sizes: Vec<usize> = (0..20).map(|it| it * 4096 + 1).collect();
    let sizes = [sizes, vec![0, 3 << 20, 5, 4 << 20]].concat();
    let device = gpu();
    let region = device.backend().allocate(32 * MIB).unwrap();
    let stream = device.stream().unwrap();
    let bytes: Vec<u8> = (0..32 * MIB).map(|at| (at >> 8 ^ at) as u8).collect();
    write(&device, &stream, region.ptr, &bytes).unwrap();
    // Backwards, so that no range lies behind the one before it.
    let (mut ranges, mut expected, mut end) = (Vec::new(), Vec::new(), 32 << 20);
    for size in sizes {
        end -= size;
        ranges.push((region.ptr + end as u64, size as u64));
        expected.extend_from_slice(&bytes[end..end + size]);
    }
    // Many times what is lent at once: what is not given back would be missed.
    for round in 0..40 {
        // SAFETY: the ranges lie in the region, which stays, as the stream does.
        let copy = unsafe { device.backend().copy_to_host(stream.raw(), &ranges) }.unwrap();
        if round % 2 == 1 {
            drop(copy);
            continue;
        }
        let pieces = copy.wait().unwrap();
        let found: Vec<u8> = pieces
            .iter()
            .flat_map(|piece| piece.as_ref())
            .copied()
            .collect();
        assert!(found == expected, "round {round}");
    }
    // SAFETY: no bytes.
    let nothing = unsafe { device.backend().copy_to_host(stream.raw(), &[]) }.unwrap();
    assert!(
        nothing
            .wait()
            .unwrap()
            .iter()
            .all(|piece| piece.as_ref().is_empty())
    );
}

pub fn copies_to_host_that_are_kept() {
    let device = gpu();
    let bytes: Vec<u8> = (0..4 * MIB).map(|at| (at >> 8 ^ at) as u8).collect();
    let region = device.backend().allocate(4 * MIB).unwrap();
    let stream = device.stream().unwrap();
    write(&device, &stream, region.ptr, &bytes).unwrap();
    // More than all page-locked memory: a caller that keeps one copy while it asks for the next
    // waits for no other caller that does the same.
    let copy = |_| {
        // SAFETY: the range lies in the region, which stays, as the stream does.
        unsafe {
            device
                .backend()
                .copy_to_host(stream.raw(), &[(region.ptr, 4 * MIB)])
        }
        .unwrap()
    };
    let copies: Vec<_> = (0..40).map(copy).collect();
    assert!(download(&device, &stream, region.ptr, 4 << 20) == bytes);
    for copy in copies {
        let pieces = copy.wait().unwrap();
        let found: Vec<u8> = pieces
            .iter()
            .flat_map(|piece| piece.as_ref())
            .copied()
            .collect();
        assert!(found == bytes, "other bytes came");
    }
}

pub fn copy_to_host_limit() {
    let device = gpu();
    let region = device.backend().allocate(REGION_BYTES).unwrap();
    let (stream, words) = held_stream(&device);
    // SAFETY: the range lies in the region, which stays, as the stream does.
    let copy = unsafe {
        device
            .backend()
            .copy_to_host(stream.raw(), &[(region.ptr, 9)])
    }
    .unwrap();
    let refused = copy.wait().map(|pieces| pieces.len());
    assert!(matches!(refused, Err(Error::Timeout { .. })), "{refused:?}");
    words[0].store(1);
    // SAFETY: as above.
    let copy = unsafe {
        device
            .backend()
            .copy_to_host(stream.raw(), &[(region.ptr, 9)])
    }
    .unwrap();
    assert_eq!(copy.wait().unwrap()[0].as_ref(), [0; 9]);
}

pub fn refused_copy_to_host() {
    let device = gpu();
    let region = device.backend().allocate(REGION_BYTES).unwrap();
    let (stream, words) = held_stream(&device);
    let raw = stream.raw().0.expose_provenance();
    let (tell, told) = channel();
    let backend = device.backend().clone();
    let copying = std::thread::spawn(move || {
        let stream = RawStream(std::ptr::with_exposed_provenance_mut(raw));
        let ranges = [(region.ptr, 9), (region.ptr + 9, 9)];
        // SAFETY: the ranges lie in the region, which stays, as the stream does.
        let refused = unsafe { backend.copy_to_host(stream, &ranges) }.map(|_| ());
        tell.send(()).unwrap();
        refused
    });
    // The first copy waits with its stream, and so does the call that was refused.
    let early = told.recv_timeout(Duration::from_millis(300));
    assert!(early.is_err(), "it did not wait for the copy before it");
    words[0].store(1);
    let refused = copying.join().unwrap();
    assert!(matches!(refused, Err(Error::Driver { .. })), "{refused:?}");
}
