//! Failures: a driver that is missing or too old, exhausted memory, failed calls, bad descriptors.

use std::os::fd::AsFd;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use warpipe::backend::StreamOp;
use warpipe::{Access, AllocationServer, Device, DeviceFault, Domain, Error, LimitFault};
use warpipe_testkit::{eventually, temporary_folder};

use super::cases::{MIB, PATIENCE, REGION_BYTES, census, download, export, gpu, import, release};
use super::transfers::{held_stream, write};

pub fn missing_symbol() {
    let error = gpu().backend().allocate(REGION_BYTES).unwrap_err();
    assert!(
        matches!(
            &error,
            Error::Device {
                fault: DeviceFault::OldDriver, text } if text.ends_with("lacks cuMemCreate")
        ),
        "{error}"
    );
}

pub fn no_device() {
    let error = Device::cuda(0).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Device {
                fault: DeviceFault::NoGpu,
                ..
            }
        ),
        "{error:?}"
    );
    assert!(
        error.to_string().contains("CUDA_VISIBLE_DEVICES is \"\""),
        "{error}"
    );
}

pub fn no_driver() {
    let error = Device::cuda(0).unwrap_err();
    assert!(
        matches!(&error, Error::Device { fault: DeviceFault::NoDriver, text } if text.contains("libcuda.so.1")),
        "{error:?}"
    );
}

pub fn mismatch() {
    let error = Device::cuda(0).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Driver {
                call: "cuInit",
                code: 803,
                ..
            }
        ),
        "{error:?}"
    );
    let (text, hint) = (error.to_string(), error.hint().unwrap_or_default());
    assert!(
        text.contains("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH") && hint.contains("reboot"),
        "{text}; {hint}"
    );
}

pub fn exhaustion() {
    let device = gpu();
    let backend = device.backend();
    let held = backend.allocate(REGION_BYTES).unwrap();
    let error = backend.allocate(4 * MIB).unwrap_err();
    assert!(
        matches!(error, Error::Limit(LimitFault::Device { bytes, .. }) if bytes == 4 * MIB),
        "{error:?}"
    );
    assert!(
        error
            .to_string()
            .contains("2097152 of 4194304 bytes are free"),
        "{error}"
    );
    let rest = backend.allocate(REGION_BYTES).unwrap();
    release(backend, held);
    release(backend, rest);
    assert_eq!((backend.bytes_held(), census()), (0, [0; 4]));
}

pub fn failed_allocation() {
    let device = gpu();
    device.backend().allocate(REGION_BYTES).unwrap_err();
    assert_eq!((device.backend().bytes_held(), census()), (0, [0; 4]));
    device.backend().allocate(REGION_BYTES).unwrap();
}

pub fn failed_import() {
    let device = gpu();
    let backend = device.backend();
    let region = backend.allocate(REGION_BYTES).unwrap();
    let fd = export(backend, &region);
    let before = census();
    import(backend, fd.as_fd(), REGION_BYTES).unwrap_err();
    assert_eq!((backend.bytes_held(), census()), (REGION_BYTES, before));
    import(backend, fd.as_fd(), REGION_BYTES).unwrap();
}

pub fn failed_retain() {
    let (device, folder) = (gpu(), temporary_folder().unwrap());
    let (backend, domain) = (device.backend(), Domain::at(folder.path()).unwrap());
    let region = backend.allocate(REGION_BYTES).unwrap();
    let server = AllocationServer::new("a", domain.on(&device)).unwrap();
    let (stream, owner) = (device.stream().unwrap(), Box::new(()));
    // SAFETY: the region is released behind the server.
    let shared = unsafe { server.share(&stream, region.ptr, 8, Access::Read, owner) };
    shared.unwrap_err();
    drop(server);
    release(backend, region);
    assert!(
        eventually(PATIENCE, || census() == [0; 4]),
        "{:?}",
        census()
    );
    assert_eq!(backend.bytes_held(), 0);
}

pub fn failed_register() {
    let device = gpu();
    let mut page = std::mem::ManuallyDrop::new(vec![0u8; 8192]);
    let start = page
        .as_mut_ptr()
        .map_addr(|address| address.next_multiple_of(4096));
    // SAFETY: a page inside memory that is never freed.
    unsafe {
        device.backend().register(start, 4096).unwrap_err();
        device
            .backend()
            .register(start, 4096)
            .expect("the first was undone");
        device.backend().unregister(start).unwrap();
        device.backend().unregister(start).unwrap_err();
    }
}

pub fn failed_staging() {
    let (device, folder) = (gpu(), temporary_folder().unwrap());
    let region = device.backend().allocate(REGION_BYTES).unwrap();
    let domain = Domain::at(folder.path()).unwrap();
    // A process with an endpoint has a reaper.
    let _server = AllocationServer::new("a", domain.on(&device)).unwrap();
    let (stream, words) = held_stream(&device);
    // The kB that a forked child does not get: those for copies.
    let mapped = || {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut kb = 0;
        let sums = maps.lines().filter_map(|line| match line.split_once(':')? {
            ("Size", size) => {
                kb = size.trim().trim_end_matches(" kB").parse().unwrap();
                None
            }
            ("VmFlags", flags) => flags.contains(" dc").then_some(kb),
            _ => None,
        });
        sums.sum::<u64>()
    };
    let before = mapped();
    let refused = write(&device, &stream, region.ptr, &[1]);
    assert!(matches!(refused, Err(Error::Driver { .. })), "{refused:?}");
    write(&device, &stream, region.ptr, &[2]).unwrap();
    let both = mapped() - before;
    words[0].store(1);
    let is_one = || mapped() - before == both / 2;
    assert!(eventually(PATIENCE, is_one), "{both} and {}", mapped());
    assert_eq!(download(&device, &stream, region.ptr, 1), [2]);
}

pub fn unmapped_words() {
    let device = gpu();
    let (backend, stream) = (device.backend(), device.stream().unwrap());
    let page = || {
        let (bytes, access) = (4096, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a new mapping, placed by the kernel.
        let page =
            unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, access, MapFlags::PRIVATE) }
                .unwrap();
        // SAFETY: mapped above, and unregistered before it is unmapped.
        (
            page,
            unsafe { backend.register(page.cast(), bytes) }.unwrap(),
        )
    };
    let ((first, word), (_kept, other)) = (page(), page());
    let wait = |word| {
        // SAFETY: the stream is live; the word is registered, and at 0 already.
        unsafe { backend.batch(stream.raw(), &[StreamOp::Wait { word, value: 0 }]) }.unwrap();
    };
    wait(word);
    stream.synchronize(PATIENCE).unwrap();
    // SAFETY: registered above, and its stream is idle.
    unsafe { backend.unregister(first.cast()) }.unwrap();
    // SAFETY: mapped above, and used by nobody any more.
    unsafe { munmap(first, 4096) }.unwrap();
    (0..8).for_each(|_| wait(other));
    stream.synchronize(PATIENCE).unwrap();
}

pub fn failed_open() {
    let error = Device::cuda(0).unwrap_err();
    assert!(matches!(error, Error::Driver { .. }), "{error:?}");
    gpu().backend().allocate(REGION_BYTES).unwrap();
}

pub fn foreign_descriptors() {
    let device = gpu();
    let backend = device.backend();
    let region = backend.allocate(REGION_BYTES).unwrap();
    let own = export(backend, &region);
    let before = census();
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let memfd = rustix::fs::memfd_create("another", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let folder = std::fs::File::open("/").unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    let strangers = [
        pipe.as_fd(),
        socket.as_fd(),
        memfd.as_fd(),
        folder.as_fd(),
        null.as_fd(),
    ];
    for stranger in strangers {
        let error = import(backend, stranger, REGION_BYTES).unwrap_err();
        assert!(
            matches!(
                error,
                Error::Device {
                    fault: DeviceFault::NotShareable,
                    ..
                }
            ),
            "{error:?}"
        );
    }
    for lie in [2 * REGION_BYTES, REGION_BYTES / 2, 0, u64::MAX, 1 << 62] {
        let error = import(backend, own.as_fd(), lie).unwrap_err();
        assert!(
            matches!(
                error,
                Error::Device {
                    fault: DeviceFault::NotShareable,
                    ..
                } | Error::Limit(LimitFault::Device { .. })
            ),
            "{lie}: {error:?}"
        );
        assert!(
            lie != 2 * REGION_BYTES || error.to_string().contains("not its size"),
            "{error}"
        );
    }
    assert_eq!((backend.bytes_held(), census()), (REGION_BYTES, before));
}

/// Ends in a fault of the stream's thread; every return from here is a failure of the test.
pub fn read_only() {
    let device = gpu();
    let backend = device.backend();
    let region = backend.allocate(REGION_BYTES).unwrap();
    let fd = export(backend, &region);
    let alias = backend
        .import(&[fd.as_fd()], REGION_BYTES, Access::Read, backend.info().id)
        .unwrap();
    let stream = device.stream().unwrap();
    assert_eq!(download(&device, &stream, alias.ptr, 8), [0; 8]);
    // SAFETY: the region has room for the words; that it may not be written is the point.
    unsafe { warpipe_kernels::fill(&stream, alias.ptr, 1000, 5) }.unwrap();
    let _ = stream.synchronize(PATIENCE);
}
