//! Calls that a test has the fake driver hang, fail and count.

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use libloading::{Library, Symbol};
use warpipe::Error;
use warpipe::backend::StreamOp;

use super::cases::{
    MIB, PATIENCE, REGION_BYTES, batch, driver_library, gpu, release, word_address, words,
};
use super::transfers::held_stream;

struct Control(Library);

impl Control {
    fn function<T>(&self, name: &str) -> Symbol<'_, T> {
        // SAFETY: the fake driver has these functions with the signatures that are asked for below.
        unsafe { self.0.get(name).unwrap() }
    }

    fn tell(&self, control: &str, name: &str) {
        let name = CString::new(name).unwrap();
        let function = self.function::<unsafe extern "C" fn(*const c_char) -> c_int>(control);
        // SAFETY: a terminated text.
        assert_eq!(unsafe { function(name.as_ptr()) }, 0);
    }

    fn count(&self, control: &str, name: &str) -> u64 {
        let name = CString::new(name).unwrap();
        let function = self.function::<unsafe extern "C" fn(*const c_char) -> u64>(control);
        // SAFETY: a terminated text.
        unsafe { function(name.as_ptr()) }
    }

    fn fail(&self, name: &str, call: u64, code: c_int) {
        let name = CString::new(name).unwrap();
        let function = self
            .function::<unsafe extern "C" fn(*const c_char, u64, c_int) -> c_int>("fakeCudaFail");
        // SAFETY: a terminated text.
        assert_eq!(unsafe { function(name.as_ptr(), call, code) }, 0);
    }

    fn reset(&self) {
        // SAFETY: it takes nothing.
        unsafe { self.function::<unsafe extern "C" fn()>("fakeCudaReset")() }
    }

    fn exempt(&self, is_exempt: bool) {
        // SAFETY: it takes a number.
        unsafe {
            self.function::<unsafe extern "C" fn(c_int) -> c_int>("fakeCudaExempt")(
                is_exempt.into(),
            )
        };
    }

    fn calls(&self) -> Vec<(String, u64)> {
        unsafe extern "C" fn each(
            name: *const c_char,
            length: usize,
            calls: u64,
            argument: *mut c_void,
        ) {
            // SAFETY: the fake driver's text of that length, and the vector below, which nobody
            // else uses meanwhile.
            let (name, list) = unsafe {
                (
                    std::slice::from_raw_parts(name.cast(), length),
                    &mut *argument.cast::<Vec<(String, u64)>>(),
                )
            };
            list.push((String::from_utf8_lossy(name).into_owned(), calls));
        }
        let mut list: Vec<(String, u64)> = Vec::new();
        type Each = unsafe extern "C" fn(*const c_char, usize, u64, *mut c_void);
        let function = self.function::<unsafe extern "C" fn(Each, *mut c_void)>("fakeCudaCalls");
        // SAFETY: `each` takes what it is given here.
        unsafe { function(each, (&raw mut list).cast()) };
        list
    }
}

fn until(is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "it does not come");
        std::thread::park_timeout(Duration::from_millis(1));
    }
}

pub fn control() {
    let (device, control) = (gpu(), Control(driver_library()));
    let backend = device.backend();
    control.reset();

    control.fail("cuMemCreate", 2, 999);
    release(backend, backend.allocate(2 * MIB).unwrap());
    control.exempt(true);
    release(backend, backend.allocate(2 * MIB).unwrap());
    control.exempt(false);
    let refused = backend.allocate(2 * MIB).unwrap_err();
    assert!(
        matches!(
            refused,
            Error::Driver {
                call: "cuMemCreate",
                code: 999,
                ..
            }
        ),
        "{refused:?}"
    );
    release(backend, backend.allocate(2 * MIB).unwrap());
    assert_eq!(control.count("fakeCudaFailed", "cuMemCreate"), 1);
    let calls = control.calls();
    assert!(
        calls.contains(&("cuMemCreate".into(), 3)) && calls.contains(&("cuMemRelease".into(), 2)),
        "{calls:?}"
    );

    control.tell("fakeCudaBlock", "cuMemCreate");
    let held = std::thread::spawn({
        let backend = backend.clone();
        move || release(&backend, backend.allocate(2 * MIB).unwrap())
    });
    until(|| control.count("fakeCudaHanging", "cuMemCreate") == 1);
    assert!(!held.is_finished());
    control.tell("fakeCudaRelease", "cuMemCreate");
    held.join().unwrap();
    assert_eq!(control.count("fakeCudaHanging", "cuMemCreate"), 0);
    control.reset();
    assert_eq!(control.calls(), []);
}

pub fn refused_download() {
    const WRITE: &str = "cuStreamWriteValue64_v2";
    let (device, control) = (gpu(), Control(driver_library()));
    let (stream, words) = held_stream(&device);
    let region = device.backend().allocate(REGION_BYTES).unwrap();
    control.reset();
    control.fail(WRITE, 1, 999);
    let (returned, is_returned) = channel::<()>();
    let releasing = std::thread::spawn(move || {
        until(|| control.count("fakeCudaFailed", WRITE) == 1);
        // A moment for a download that does not wait. One that does is not late.
        let _ = is_returned.recv_timeout(Duration::from_millis(200));
        words[0].store(1);
    });
    let mut out = vec![0; 4096];
    // SAFETY: the region is longer.
    let refused = unsafe {
        device
            .backend()
            .download(stream.raw(), &mut out, region.ptr)
    };
    let is_idle = stream.is_idle().unwrap();
    drop(returned);
    releasing.join().unwrap();
    assert!(matches!(refused, Err(Error::Driver { .. })), "{refused:?}");
    assert!(
        is_idle,
        "a copy is under way, and its caller may unmap what it reads"
    );
}

pub fn reset_beside_a_wait() {
    const RESET: &str = "cuDevicePrimaryCtxReset_v2";
    let (device, control) = (gpu(), Control(driver_library()));
    control.reset();
    let ((words, base), stream) = (words(&device), device.stream().unwrap());
    let (word, value) = (word_address(base, 0), 1);
    let wait = StreamOp::Wait { word, value };
    let word = word_address(base, 1);
    batch(
        &device,
        stream.raw(),
        &[wait, StreamOp::Signal { word, value }],
    )
    .unwrap();
    let resetting = std::thread::spawn(|| {
        let driver = Control(driver_library());
        let reset = driver.function::<unsafe extern "C" fn(c_int) -> c_int>(RESET);
        // SAFETY: nothing is done on the device afterwards.
        assert_eq!(unsafe { reset(0) }, 0);
        [0, 1].map(|index| words[index].load())
    });
    until(|| control.calls().contains(&(RESET.into(), 1)));
    // A moment for a reset that does not wait. One that does is not late, however long this takes.
    for _ in 0..100 {
        std::thread::park_timeout(Duration::from_millis(1));
    }
    words[0].store(1);
    let at_return = resetting.join().unwrap();
    assert_eq!(at_return, [1, 1], "it has not waited for the stream");
}
