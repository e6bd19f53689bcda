//! The end of a process with open resources, over the fake driver, which aborts on a call after its
//! shutdown.

use std::process::exit;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use warpipe::backend::{Backend, StreamOp};
use warpipe::{Device, Domain, Error, Memory, Publisher, Stream, Subscriber};

use super::cases::{MIB, driver_library, gpu, words};

/// The exit status of a destructor that got the right error. No other exit here has it.
pub const ANSWERED: i32 = 77;
/// `CUDA_ERROR_DEINITIALIZED`.
const DEINITIALIZED: i32 = 4;
/// Printed before a process ends: a case that never ran also ends.
pub const LAST_WORDS: &str = "exits with all of this open";
const FOR_EVER: Duration = Duration::from_secs(3600);

fn end() -> ! {
    eprintln!("{LAST_WORDS}");
    exit(0)
}

/// A stream that never becomes idle.
fn stuck_stream(device: &Device) -> Stream {
    let stream = device.stream().unwrap();
    // SAFETY: the stream is live, the word lies in a page that stays.
    unsafe {
        device.backend().batch(
            stream.raw(),
            &[StreamOp::Wait {
                word: words(device).1,
                value: 1,
            }],
        )
    }
    .unwrap();
    stream
}

/// Memory dropped behind a stream that may use it for ever: the control thread polls its event
/// again and again.
fn retire_memory(device: &Device, stream: &Stream) {
    let memory = Memory::allocate(device, MIB).unwrap();
    memory.write(stream, 0, b"never written").unwrap();
    drop(memory);
}

/// Starts a thread that repeats `work`; returns when it has done it once.
fn repeat(mut work: impl FnMut() + Send + 'static) {
    let (told, done) = channel();
    thread::spawn(move || {
        loop {
            work();
            let _ = told.send(());
        }
    });
    done.recv().unwrap();
}

/// Starts a thread for one call that does not return; it reports just before the call.
fn wait_in(call: impl FnOnce(Sender<()>) + Send + 'static) {
    let (told, there) = channel();
    thread::spawn(move || call(told));
    there.recv().unwrap();
}

/// Every state in which a thread may be in the driver, or about to enter it.
fn occupy(device: &Device) {
    let stream = stuck_stream(device);
    retire_memory(device, &stream);
    let asking = stream.clone();
    repeat(move || assert!(!asking.is_idle().unwrap()));
    let waiting = stream.clone();
    wait_in(move |told| {
        told.send(()).unwrap();
        panic!("{:?}", waiting.synchronize(FOR_EVER));
    });
    let device = device.clone();
    wait_in(move |told| {
        // Registered memory: the upload may return only when the stream has reached it.
        let page = words(&device).0;
        // SAFETY: the page stays.
        let bytes = unsafe { std::slice::from_raw_parts(page.as_ptr().cast::<u8>(), 8) };
        let backend = device.backend();
        let region = backend.allocate(2 * MIB).unwrap();
        told.send(()).unwrap();
        // SAFETY: the region is long enough, and is not released.
        let copied = unsafe { backend.upload(stream.raw(), region.ptr, bytes) };
        panic!("{copied:?}");
    });
}

/// The two ends of a channel, open for ever.
fn open_endpoints(device: &Device) {
    let folder = std::env::temp_dir().join(format!("warpipe-exit-{}", std::process::id()));
    let domain = Domain::at(&folder).unwrap();
    let publisher = Publisher::new("exit", domain.on(device)).unwrap();
    let mut subscriber = Subscriber::open("exit", domain.on(device), Duration::ZERO).unwrap();
    // The process needs the folder no longer, and the test leaves no folder behind.
    std::fs::remove_dir_all(folder).unwrap();
    let stream = device.stream().unwrap();
    repeat(move || {
        publisher.send_bytes(&stream, b"a sample").unwrap();
        drop(
            subscriber
                .receive(&stream, Duration::from_secs(10))
                .unwrap(),
        );
    });
}

/// Only the library's own threads.
pub fn exit_retired() {
    let device = gpu();
    retire_memory(&device, &stuck_stream(&device));
    end();
}

pub fn exit_polling() {
    let device = gpu();
    open_endpoints(&device);
    occupy(&device);
    end();
}

pub fn exit_in_callback() {
    let device = gpu();
    occupy(&device);
    let stream = device.stream().unwrap();
    stream.call(|| end()).unwrap();
    panic!("{:?}", stream.synchronize(FOR_EVER));
}

/// The library's behaviour without its gate.
pub fn exit_without_gate() {
    let _device = gpu();
    repeat(|| {
        let mut count = 0;
        // SAFETY: the driver's function, with an out pointer that is live.
        unsafe {
            let function = driver_library();
            let function = function
                .get::<unsafe extern "C" fn(&mut i32) -> i32>("cuDeviceGetCount")
                .unwrap();
            assert_eq!(function(&mut count), 0);
        }
    });
    end();
}

static BACKEND: OnceLock<Arc<dyn Backend>> = OnceLock::new();

/// Runs after the gate's handler and the driver's own: it was registered before both.
extern "C" fn destructor() {
    let answer = BACKEND.get().map(|backend| backend.create_event());
    let is_due = matches!(
        answer,
        Some(Err(Error::Driver {
            code: DEINITIALIZED,
            ..
        }))
    );
    eprintln!("the destructor was answered {answer:?}");
    // SAFETY: ends the process here and now.
    unsafe { libc::_exit(if is_due { ANSWERED } else { 1 }) }
}

pub fn exit_destructor() {
    // SAFETY: a function of this program.
    assert_eq!(unsafe { libc::atexit(destructor) }, 0);
    let device = gpu();
    assert!(BACKEND.set(device.backend().clone()).is_ok());
    occupy(&device);
    end();
}
