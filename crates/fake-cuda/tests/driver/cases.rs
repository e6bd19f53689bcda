//! The cases, run in children: the CUDA backend through its trait, over the fake driver.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use rustix::mm::{MapFlags, ProtFlags};
use warpipe::backend::{Backend, RawRegion, StreamOp, TimelineWord};
use warpipe::{Access, Device, DeviceFault, DeviceId, Error, RawStream, Stream};

use super::control::{control, refused_download, reset_beside_a_wait};
use super::exit::*;
use super::failures::*;
use super::gather::*;
use super::legacy::*;
use super::transfers::*;

pub const MIB: u64 = 1 << 20;
pub const REGION_BYTES: u64 = 2 * MIB;
/// Long enough for a busy machine; nothing here takes a thousandth of it.
pub const PATIENCE: Duration = Duration::from_secs(20);

macro_rules! cases {
    ($($name:ident = $function:ident;)*) => {
        $(pub const $name: &str = stringify!($function);)*

        pub fn run(name: &str) {
            match name {
                $(stringify!($function) => $function(),)*
                "exporter" => exporter(),
                _ => panic!("no case {name}"),
            }
        }
    };
}

cases! {
    OPEN = open;
    REGION = region;
    TIMELINE = timeline;
    BROADCAST = broadcast;
    KERNEL = kernel;
    GATHER_BOXES = gather_boxes;
    GATHER_KERNEL = gather_kernel;
    GATHER_FROM_ANOTHER_GPU = gather_from_another_gpu;
    UPLOAD = upload;
    UPLOAD_BEHIND_A_WAIT = upload_behind_a_wait;
    PAGEABLE_CONTROL = pageable_control;
    UPLOAD_LIMIT = upload_limit;
    DOWNLOAD_IN_PLACE = download_in_place;
    SHORT_UPLOADS = short_uploads;
    SHORT_UPLOADS_UNDER_MPS = short_uploads_under_mps;
    UPLOAD_PIECES = upload_pieces;
    COPY_TO_HOST = copy_to_host;
    COPIES_TO_HOST_THAT_ARE_KEPT = copies_to_host_that_are_kept;
    COPY_TO_HOST_LIMIT = copy_to_host_limit;
    REFUSED_COPY_TO_HOST = refused_copy_to_host;
    DOWNLOAD_LIMIT = download_limit;
    REFUSED_DOWNLOAD = refused_download;
    CALL = call;
    CONTROL = control;
    RESET_BESIDE_A_WAIT = reset_beside_a_wait;
    EVENT = event;
    MISSING_SYMBOL = missing_symbol;
    NO_DEVICE = no_device;
    NO_DRIVER = no_driver;
    MISMATCH = mismatch;
    EXHAUSTION = exhaustion;
    FAILED_ALLOCATION = failed_allocation;
    FAILED_IMPORT = failed_import;
    FAILED_RETAIN = failed_retain;
    FAILED_REGISTER = failed_register;
    FAILED_STAGING = failed_staging;
    UNMAPPED_WORDS = unmapped_words;
    FAILED_OPEN = failed_open;
    FOREIGN_DESCRIPTORS = foreign_descriptors;
    READ_ONLY = read_only;
    PEERS_APART = peers_apart;
    PEERS = peers;
    IDENTITY = identity;
    LEGACY = legacy;
    LEGACY_REFUSED_CLOSE = legacy_refused_close;
    LEGACY_FREED = legacy_freed;
    LEGACY_RAW = legacy_raw;
    LEGACY_OWN = legacy_own;
    LEGACY_KINDS = legacy_kinds;
    LEGACY_PEERS = legacy_peers;
    LEGACY_PEERS_APART = legacy_peers_apart;
    LEGACY_HIDDEN = legacy_hidden;
    LEGACY_OTHER_DEVICE = legacy_other_device;
    IPC_EVENTS = ipc_events;
    IPC_EVENTS_OF_OTHERS = ipc_events_of_others;
    EXIT_RETIRED = exit_retired;
    EXIT_POLLING = exit_polling;
    EXIT_IN_CALLBACK = exit_in_callback;
    EXIT_WITHOUT_GATE = exit_without_gate;
    EXIT_DESTRUCTOR = exit_destructor;
}

pub fn gpu() -> Device {
    Device::cuda(0).unwrap()
}

pub fn export(backend: &Arc<dyn Backend>, region: &RawRegion) -> OwnedFd {
    // SAFETY: every region here comes from `allocate` and is released after its export.
    unsafe { backend.export(region) }.unwrap()
}

pub fn release(backend: &Arc<dyn Backend>, mut region: RawRegion) {
    // SAFETY: every region here is released once, with its streams idle.
    unsafe { backend.release(&mut region) }.unwrap();
}

pub fn import(
    backend: &Arc<dyn Backend>,
    fd: BorrowedFd<'_>,
    bytes: u64,
) -> Result<RawRegion, Error> {
    backend.import(&[fd], bytes, Access::ReadWrite, backend.info().id)
}

pub fn download(device: &Device, stream: &Stream, src: u64, bytes: usize) -> Vec<u8> {
    let mut out = vec![0; bytes];
    // SAFETY: the regions read here are as long as what is asked for.
    unsafe { device.backend().download(stream.raw(), &mut out, src) }.unwrap();
    out
}

/// A page of words, registered; lives until the process ends.
pub fn words(device: &Device) -> (&'static [TimelineWord], u64) {
    let flags = MapFlags::SHARED;
    // SAFETY: a new mapping, placed by the kernel and never unmapped.
    let page = unsafe {
        rustix::mm::mmap_anonymous(
            std::ptr::null_mut(),
            4096,
            ProtFlags::READ | ProtFlags::WRITE,
            flags,
        )
    }
    .unwrap();
    // SAFETY: a whole mapped page that stays.
    let address = unsafe { device.backend().register(page.cast(), 4096) }.unwrap();
    // SAFETY: zeros are valid words, the page is aligned and lives on.
    let words = unsafe {
        std::slice::from_raw_parts(
            page.cast::<TimelineWord>(),
            4096 / size_of::<TimelineWord>(),
        )
    };
    (words, address)
}

pub fn word_address(base: u64, index: usize) -> u64 {
    base + (index * size_of::<TimelineWord>()) as u64
}

pub fn batch(device: &Device, stream: RawStream, ops: &[StreamOp]) -> Result<(), Error> {
    // SAFETY: the streams here are live, the words lie in pages that are never unmapped.
    unsafe { device.backend().batch(stream, ops) }
}

/// Of the fake driver: bytes created, handles, reserved ranges, mapped ranges.
pub fn census() -> [u64; 4] {
    let library = driver_library();
    let mut census = [0; 4];
    // SAFETY: the fake driver has this function with this signature.
    unsafe {
        let count = library
            .get::<unsafe extern "C" fn(*mut [u64; 4]) -> i32>("fakeCudaCensus")
            .unwrap();
        assert_eq!(count(&mut census), 0);
    }
    census
}

/// The fake driver that the backend loaded: the same name gives the same library.
pub fn driver_library() -> libloading::Library {
    // SAFETY: loaded before, so nothing is initialised again.
    unsafe { libloading::Library::new("libcuda.so.1") }.unwrap()
}

pub fn current_context() -> usize {
    let library = driver_library();
    let mut context = 0;
    // SAFETY: the driver's function, with an out pointer the size of a pointer.
    unsafe {
        let get = library
            .get::<unsafe extern "C" fn(*mut usize) -> i32>("cuCtxGetCurrent")
            .unwrap();
        assert_eq!(get(&mut context), 0);
    }
    context
}

pub fn make_primary_current(device: i32) {
    let library = driver_library();
    let mut context = 0;
    // SAFETY: the driver's functions, with their signatures.
    unsafe {
        let retain = library
            .get::<unsafe extern "C" fn(*mut usize, i32) -> i32>("cuDevicePrimaryCtxRetain")
            .unwrap();
        let set = library
            .get::<unsafe extern "C" fn(usize) -> i32>("cuCtxSetCurrent")
            .unwrap();
        assert_eq!((retain(&mut context, device), set(context)), (0, 0));
    }
}

fn open() {
    let device = gpu();
    assert!(Arc::ptr_eq(device.backend(), gpu().backend()));
    assert_eq!(device.info().name, "Fake CUDA 0");
    assert_eq!(device.backend().granularity(), REGION_BYTES);
    assert!(matches!(
        Device::cuda(2),
        Err(Error::Device {
            fault: DeviceFault::NoSuchDevice,
            ..
        })
    ));
    assert_eq!(current_context(), 0, "none was current before");
    make_primary_current(1);
    let others = current_context();
    let region = device.backend().allocate(REGION_BYTES).unwrap();
    assert_eq!(current_context(), others);
    let backend = device.backend().clone();
    std::thread::spawn(move || release(&backend, region))
        .join()
        .unwrap();
}

fn region() {
    let device = gpu();
    let backend = device.backend();
    let region = backend.allocate(2 * REGION_BYTES).unwrap();
    let fd = export(backend, &region);
    assert!(
        rustix::io::fcntl_getfd(&fd)
            .unwrap()
            .contains(rustix::io::FdFlags::CLOEXEC)
    );
    let alias = import(backend, fd.as_fd(), region.bytes).unwrap();
    assert_ne!(alias.ptr, region.ptr);
    assert_eq!(backend.bytes_held(), 4 * REGION_BYTES);
    let stream = device.stream().unwrap();
    let sent: Vec<u8> = (0..=255).collect();
    assert_eq!(
        download(&device, &stream, region.ptr, 256),
        [0; 256],
        "new memory is zeroed"
    );
    // SAFETY: both are mapped and long enough; the download waits for the upload.
    unsafe { backend.upload(stream.raw(), region.ptr + 100, &sent) }.unwrap();
    assert_eq!(download(&device, &stream, alias.ptr + 100, 256), sent);
    release(backend, region);
    assert_eq!(
        download(&device, &stream, alias.ptr + 100, 256),
        sent,
        "the memory outlives its owner"
    );
    release(backend, alias);
    assert_eq!((backend.bytes_held(), census()), (0, [0; 4]));
}

fn timeline() {
    let device = gpu();
    let (words, base) = words(&device);
    let (first, second) = (device.stream().unwrap(), device.stream().unwrap());
    let (ready, answer) = (word_address(base, 0), word_address(base, 1));
    let ops = [
        StreamOp::Wait {
            word: ready,
            value: 3,
        },
        StreamOp::Signal {
            word: answer,
            value: 7,
        },
    ];
    batch(&device, first.raw(), &ops).unwrap();
    batch(
        &device,
        second.raw(),
        &[StreamOp::Signal {
            word: ready,
            value: 2,
        }],
    )
    .unwrap();
    assert!(words[0].wait(2, PATIENCE, true));
    assert!(!first.is_idle().unwrap(), "2 is not 3");
    assert!(!words[1].wait(7, Duration::from_millis(1), true));
    batch(
        &device,
        second.raw(),
        &[StreamOp::Signal {
            word: ready,
            value: 4,
        }],
    )
    .unwrap();
    assert!(words[1].wait(7, PATIENCE, true), "at or above is enough");
    batch(
        &device,
        first.raw(),
        &[StreamOp::Wait {
            word: ready,
            value: 9,
        }],
    )
    .unwrap();
    words[0].store(9);
    first.synchronize(PATIENCE).unwrap();
}

fn broadcast() {
    let device = gpu();
    let (words, base) = words(&device);
    let stream = device.stream().unwrap();
    let gate = word_address(base, 0);
    batch(
        &device,
        stream.raw(),
        &[StreamOp::Wait {
            word: gate,
            value: 1,
        }],
    )
    .unwrap();
    let signals: Vec<StreamOp> = (1..101)
        .map(|index| StreamOp::Signal {
            word: word_address(base, index),
            value: index as u64,
        })
        .collect();
    batch(&device, stream.raw(), &signals).unwrap();
    assert!(
        words[1..101].iter().all(|word| word.load() == 0),
        "stored before the work ahead of them was done"
    );
    words[0].store(1);
    stream.synchronize(PATIENCE).unwrap();
    assert!(
        words[1..101]
            .iter()
            .enumerate()
            .all(|(index, word)| word.load() == index as u64 + 1)
    );
    assert_eq!(words[101].load(), 0);
}

fn kernel() {
    let device = gpu();
    warpipe_kernels::preload(&device).unwrap();
    let region = device.backend().allocate(REGION_BYTES).unwrap();
    let stream = device.stream().unwrap();
    // SAFETY: the region has room for the words.
    unsafe { warpipe_kernels::fill(&stream, region.ptr, 1000, 5) }.unwrap();
    let bytes = download(&device, &stream, region.ptr, 8000);
    for (index, word) in bytes.chunks_exact(8).enumerate() {
        assert_eq!(
            u64::from_le_bytes(word.try_into().unwrap()),
            warpipe_kernels::pattern(5, index as u64)
        );
    }
    // Cleared in the stream's order, and nothing beside.
    let backend = device.backend();
    // SAFETY: the range lies in the region.
    unsafe { backend.zero(stream.raw(), region.ptr + 8, 16) }.unwrap();
    let cleared = download(&device, &stream, region.ptr, 8000);
    assert_eq!(
        (&cleared[8..24], &cleared[..8], &cleared[24..]),
        (&[0; 16][..], &bytes[..8], &bytes[24..])
    );
    // SAFETY: none is claimed: it is refused, or there would be nothing to test.
    assert!(unsafe { backend.zero(stream.raw(), region.ptr, REGION_BYTES + 1) }.is_err());
}

fn call() {
    let stream = gpu().stream().unwrap();
    let (send, receive) = channel();
    stream.call(|| panic!("on purpose")).unwrap();
    stream.call(move || send.send(5).unwrap()).unwrap();
    assert_eq!(receive.recv_timeout(PATIENCE), Ok(5));
    stream.synchronize(PATIENCE).unwrap();
}

fn event() {
    let device = gpu();
    let backend = device.backend();
    let (words, base) = words(&device);
    let (first, second) = (device.stream().unwrap(), device.stream().unwrap());
    let event = backend.create_event().unwrap();
    batch(
        &device,
        first.raw(),
        &[StreamOp::Wait {
            word: base,
            value: 1,
        }],
    )
    .unwrap();
    // SAFETY: the handles are live until the end of this block.
    unsafe {
        assert!(
            backend.query_event(event).unwrap(),
            "never recorded is complete"
        );
        backend.record_event(event, first.raw()).unwrap();
        backend.wait_event(second.raw(), event).unwrap();
        assert!(!backend.query_event(event).unwrap());
        assert!(!second.is_idle().unwrap());
        words[0].store(1);
        second.synchronize(PATIENCE).unwrap();
        assert!(backend.query_event(event).unwrap());
        for _ in 0..2000 {
            backend.record_event(event, first.raw()).unwrap();
            while !backend.query_event(event).unwrap() {
                std::hint::spin_loop();
            }
            assert!(
                first.is_idle().unwrap(),
                "the event was the last of its work"
            );
        }
        backend.destroy_event(event).unwrap();
    }
}

fn region_of_the_second_gpu() -> (OwnedFd, DeviceId) {
    let second = Device::cuda(1).unwrap();
    let region = second.backend().allocate(REGION_BYTES).unwrap();
    (export(second.backend(), &region), second.info().id)
}

fn peers_apart() {
    let (fd, owner) = region_of_the_second_gpu();
    let device = gpu();
    let error = device
        .backend()
        .import(&[fd.as_fd()], REGION_BYTES, Access::Read, owner)
        .unwrap_err();
    assert!(
        matches!(&error, Error::Device { fault: DeviceFault::OutOfReach, text } if text.contains("CanAccessPeer")),
        "{error:?}"
    );
    let hidden = DeviceId {
        uuid: [9; 16],
        ..owner
    };
    let error = device
        .backend()
        .import(&[fd.as_fd()], REGION_BYTES, Access::Read, hidden)
        .unwrap_err();
    assert!(
        matches!(&error, Error::Device { fault: DeviceFault::OutOfReach, text } if text.contains("cuMemSetAccess")),
        "{error:?}"
    );
    assert_eq!(device.backend().bytes_held(), 0);
}

fn peers() {
    let (fd, owner) = region_of_the_second_gpu();
    let device = gpu();
    let region = device
        .backend()
        .import(&[fd.as_fd()], REGION_BYTES, Access::Read, owner)
        .unwrap();
    assert_eq!(
        download(&device, &device.stream().unwrap(), region.ptr, 8),
        [0; 8]
    );
}

fn identity() {
    let (first, second) = (gpu(), Device::cuda(1).unwrap());
    assert_eq!(
        (first.info().name.as_str(), second.info().name.as_str()),
        ("Fake CUDA 1", "Fake CUDA 0")
    );
    assert_ne!(first.info().id, second.info().id);
    assert_eq!(
        Device::by_uuid(second.info().id.uuid)
            .unwrap()
            .info()
            .ordinal,
        1
    );
    assert!(matches!(
        Device::by_uuid([1; 16]),
        Err(Error::Device {
            fault: DeviceFault::NoSuchDevice,
            ..
        })
    ));
}
