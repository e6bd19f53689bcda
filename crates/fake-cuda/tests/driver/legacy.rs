//! Legacy handles, the kinds of pointers, and interprocess events, over the fake driver.

use std::ffi::c_void;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use warpipe::backend::IPC_EVENTS_MAX;
use warpipe::{
    Device, DeviceFault, Error, HandleFault, LegacyHandle, LegacyMemory, LimitFault, PointerKind,
};

use warpipe_testkit::eventually;

use super::cases::{MIB, PATIENCE, download, driver_library, gpu, release, words};
use super::process::{self, CASE};

const BYTES: u64 = 3000;
const OFFSET: u64 = 1000;

fn pattern() -> Vec<u8> {
    (0..BYTES)
        .map(|index| (index * 7 + index / 256) as u8)
        .collect()
}

fn plain(device: &Device) -> u64 {
    let ptr = device.backend().allocate_plain(BYTES).unwrap();
    let stream = device.stream().unwrap();
    // SAFETY: an allocation of that length.
    unsafe { device.backend().upload(stream.raw(), ptr, &pattern()) }.unwrap();
    stream.synchronize(PATIENCE).unwrap();
    ptr
}

fn export(device: &Device, ptr: u64, bytes: u64) -> Result<LegacyHandle, Error> {
    // SAFETY: what is exported here is freed when nobody opens it any more, or to see what becomes
    // of that.
    unsafe { LegacyHandle::export(device, ptr, bytes) }
}

fn assert_whole(device: &Device, memory: &LegacyMemory) {
    let found = download(
        device,
        &device.stream().unwrap(),
        memory.ptr(),
        memory.bytes() as usize,
    );
    assert_eq!(found, pattern()[OFFSET as usize..]);
}

/// The other process: exports memory, frees it when ordered, and lives until its orders end.
pub fn exporter() {
    let device = gpu();
    let ptr = plain(&device);
    println!(
        "\nexported: {}",
        export(&device, ptr + OFFSET, BYTES - OFFSET).unwrap()
    );
    for _order in std::io::stdin().lines() {
        // SAFETY: allocated above, freed once.
        unsafe { device.backend().free_plain(ptr) }.unwrap();
        println!("\nfreed: {ptr:#x}");
    }
}

struct Exporter {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
    handle: LegacyHandle,
}

impl Exporter {
    /// One with these GPUs visible.
    fn start(visible: &str) -> Exporter {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(process::CHILD)
            .env(CASE, "exporter")
            .env("CUDA_VISIBLE_DEVICES", visible);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let orders = child.stdin.take().unwrap();
        let mut answers = BufReader::new(child.stdout.take().unwrap());
        let handle = hear(&mut answers, "exported: ").parse().unwrap();
        Exporter {
            child,
            orders,
            answers,
            handle,
        }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn hear(answers: &mut impl BufRead, word: &str) -> String {
    let mut lines = answers.lines().map(Result::unwrap);
    lines
        .find_map(|line| line.strip_prefix(word).map(str::to_owned))
        .expect(word)
}

pub fn legacy() {
    let device = gpu();
    let mut exporter = Exporter::start("0");
    let (first, second) = (
        exporter.handle.open(&device).unwrap(),
        exporter.handle.open(&device).unwrap(),
    );
    assert_eq!(first.ptr(), second.ptr());
    assert_eq!(device.backend().bytes_held(), BYTES);
    first.close(PATIENCE).unwrap();
    assert_whole(&device, &second);
    exporter.kill();
    assert_whole(&device, &second);
    second.close(PATIENCE).unwrap();
    assert_eq!(device.backend().bytes_held(), 0);
    match exporter.handle.open(&device) {
        Err(Error::PeerGone { pid, .. }) => assert_eq!(pid, exporter.child.id() as i32),
        other => panic!("{other:?}"),
    }
}

/// The driver refuses twice to close it, and then once what is shorter than its handle says.
pub fn legacy_refused_close() {
    let device = gpu();
    let exporter = Exporter::start("0");
    let memory = exporter.handle.open(&device).unwrap();
    let (ptr, backend) = (memory.ptr(), device.backend());
    let kind = || backend.locate(ptr).unwrap().kind;
    let refused = memory.close(PATIENCE).unwrap_err();
    assert!(matches!(refused, Error::Driver { .. }), "{refused:?}");
    assert!(
        eventually(PATIENCE, || kind() == PointerKind::Unknown),
        "it is open"
    );
    let (raw, owner) = (exporter.handle.info().raw, device.info().id);
    let longer = backend.open_legacy(&raw, BYTES + 1, owner);
    assert!(matches!(longer, Err(Error::Handle { .. })), "{longer:?}");
    let is_open = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.contains("warpipe-fake-cuda-block")
    };
    assert!(eventually(PATIENCE, || !is_open()), "the short one is open");
    let kept = || warpipe::process_stats().kept;
    assert!(eventually(PATIENCE, || kept() == 0), "{}", kept());
    assert_eq!(backend.bytes_held(), 0);
}

pub fn legacy_freed() {
    let device = gpu();
    let mut exporter = Exporter::start("0");
    exporter.orders.write_all(b"free\n").unwrap();
    hear(&mut exporter.answers, "freed: ");
    match exporter.handle.open(&device) {
        Err(Error::Handle {
            what: "legacy handle",
            fault: HandleFault::Stale { pid, .. },
        }) => assert_eq!(pid, exporter.handle.info().pid),
        other => panic!("{other:?}"),
    }
}

pub fn legacy_raw() {
    let device = gpu();
    let backend = device.backend();
    let exporter = Exporter::start("0");
    let handle = &exporter.handle;
    for garbage in [[0; 64], [0xa5; 64]] {
        let refused = backend.open_legacy(&garbage, BYTES, device.info().id);
        assert!(
            matches!(
                refused,
                Err(Error::Handle {
                    what: "legacy handle",
                    fault: HandleFault::Refused(_)
                })
            ),
            "{refused:?}"
        );
    }
    let longer = backend.open_legacy(&handle.info().raw, BYTES + 1, device.info().id);
    assert!(
        matches!(
            longer,
            Err(Error::Handle {
                what: "legacy handle",
                fault: HandleFault::Range { .. }
            })
        ),
        "{longer:?}"
    );
    let base = backend
        .open_legacy(&handle.info().raw, BYTES, device.info().id)
        .unwrap();
    // SAFETY: opened above; no stream used it; the second is what is tried.
    let closes = unsafe { [backend.close_legacy(base), backend.close_legacy(base)] };
    let [
        Ok(()),
        Err(Error::Handle {
            what: "legacy handle",
            fault: HandleFault::NotOpen(ptr),
        }),
    ] = closes
    else {
        panic!("{closes:?}")
    };
    assert_eq!((ptr, backend.bytes_held()), (base, 0));
}

pub fn legacy_own() {
    let device = gpu();
    let ptr = plain(&device);
    let handle = export(&device, ptr + OFFSET, BYTES - OFFSET).unwrap();
    assert_eq!(
        (handle.info().offset, handle.info().allocation_bytes),
        (OFFSET, BYTES)
    );
    let memory = handle.open(&device).unwrap();
    assert_eq!(memory.ptr(), ptr + OFFSET);
    drop(memory);
    // SAFETY: allocated above, freed once.
    unsafe { device.backend().free_plain(ptr) }.unwrap();
    let stale = handle.open(&device);
    assert!(
        matches!(
            stale,
            Err(Error::Handle {
                what: "legacy handle",
                fault: HandleFault::Stale { .. }
            })
        ),
        "{stale:?}"
    );
}

/// Memory that the backend does not make itself, by the driver's functions.
fn allocate_by(function: &str, last: u64) -> u64 {
    let library = driver_library();
    let mut ptr = 0;
    // SAFETY: both functions of that kind take a place for the address, a length, and a word: flags
    // or a stream.
    unsafe {
        let allocate = library
            .get::<unsafe extern "C" fn(*mut u64, usize, u64) -> i32>(function.as_bytes())
            .unwrap();
        assert_eq!(allocate(&mut ptr, 4096, last), 0);
    }
    ptr
}

pub fn legacy_kinds() {
    let device = gpu();
    let set_current: i32 = {
        let library = driver_library();
        let mut context: *mut c_void = std::ptr::null_mut();
        // SAFETY: the driver's functions with their signatures.
        unsafe {
            let retain = library.get::<unsafe extern "C" fn(*mut *mut c_void, i32) -> i32>(
                b"cuDevicePrimaryCtxRetain",
            );
            assert_eq!(retain.unwrap()(&mut context, 0), 0);
            library
                .get::<unsafe extern "C" fn(*mut c_void) -> i32>(b"cuCtxSetCurrent")
                .unwrap()(context)
        }
    };
    assert_eq!(set_current, 0);
    let region = device.backend().allocate(2 * MIB).unwrap();
    let local = [0u64; 4];
    let exporter = Exporter::start("0");
    let import = exporter.handle.open(&device).unwrap();
    let pooled = allocate_by("cuMemAllocAsync", 0);
    let managed = allocate_by("cuMemAllocManaged", 1);
    let pinned = words(&device).1;
    // Last of all, lest its address mean something else.
    let freed = plain(&device);
    // SAFETY: allocated above, freed once.
    unsafe { device.backend().free_plain(freed) }.unwrap();
    let cases = [
        (0, PointerKind::Null),
        (local.as_ptr() as u64, PointerKind::Host),
        (pinned, PointerKind::Pinned),
        (managed, PointerKind::Managed),
        (pooled, PointerKind::Pool),
        (region.ptr + 4096, PointerKind::Vmm),
        (freed, PointerKind::Unknown),
        (import.ptr(), PointerKind::Import),
    ];
    for (ptr, due) in cases {
        match export(&device, ptr, 8) {
            Err(Error::Handle {
                fault: HandleFault::NotExportable { ptr: told, kind },
                ..
            }) => assert_eq!((told, kind), (ptr, due)),
            other => panic!("{due:?}: {other:?}"),
        }
    }
    release(device.backend(), region);
}

pub fn legacy_peers() {
    let exporter = Exporter::start("0,1");
    let device = Device::cuda(1).unwrap();
    assert_whole(&device, &exporter.handle.open(&device).unwrap());
}

pub fn legacy_peers_apart() {
    let exporter = Exporter::start("0,1");
    match exporter.handle.open(&Device::cuda(1).unwrap()) {
        Err(Error::Device {
            fault: DeviceFault::OutOfReach,
            text,
        }) => {
            assert!(
                text.contains(&exporter.handle.info().device.to_string()),
                "{text}"
            )
        }
        other => panic!("{other:?}"),
    }
    exporter
        .handle
        .open(&Device::cuda(0).unwrap())
        .unwrap()
        .close(PATIENCE)
        .unwrap();
}

pub fn legacy_hidden() {
    let exporter = Exporter::start("0");
    match exporter.handle.open(&gpu()) {
        Err(Error::Device {
            fault: DeviceFault::NoSuchDevice,
            text,
        }) => {
            assert!(
                text.contains(&exporter.handle.info().device.to_string()),
                "{text}"
            )
        }
        other => panic!("{other:?}"),
    }
}

pub fn legacy_other_device() {
    let (owner, other) = (gpu(), Device::cuda(1).unwrap());
    let ptr = plain(&owner);
    let refused = export(&other, ptr, 8);
    assert!(
        matches!(
            refused,
            Err(Error::Handle {
                what: "legacy handle",
                fault: HandleFault::Device { .. }
            })
        ),
        "{refused:?}"
    );
    export(&owner, ptr, 8).unwrap();
}

pub fn ipc_events() {
    let device = gpu();
    let backend = device.backend();
    let mut events: Vec<_> = (0..IPC_EVENTS_MAX)
        .map(|_| backend.create_ipc_event().unwrap())
        .collect();
    assert!(matches!(
        backend.create_ipc_event(),
        Err(Error::Limit(LimitFault::Events(IPC_EVENTS_MAX)))
    ));
    // SAFETY: each event is live and destroyed once.
    unsafe {
        let handle = backend.export_event(events[0]).unwrap();
        backend.destroy_event(events.pop().unwrap()).unwrap();
        events.push(backend.create_ipc_event().unwrap());
        let opened = backend.open_event(&handle).unwrap();
        assert!(backend.query_event(opened).unwrap());
        backend.destroy_event(opened).unwrap();
        assert!(
            matches!(
                backend.create_ipc_event(),
                Err(Error::Limit(LimitFault::Events(_)))
            ),
            "an opened one counts not"
        );
    }
    let refused = backend.open_event(&[3; 64]);
    assert!(
        matches!(
            refused,
            Err(Error::Handle {
                what: "legacy handle",
                fault: HandleFault::Refused(_)
            })
        ),
        "{refused:?}"
    );
}

pub fn ipc_events_of_others() {
    let backend = gpu().backend().clone();
    for _ in 0..2 {
        assert!(matches!(
            backend.create_ipc_event(),
            Err(Error::Limit(LimitFault::Events(_)))
        ));
    }
    backend.create_ipc_event().unwrap();
}
