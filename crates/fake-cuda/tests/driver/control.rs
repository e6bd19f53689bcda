//! Calls that a test has the fake driver hang, fail and count.

use std::ffi::{CString, c_char, c_int, c_void};
use std::time::{Duration, Instant};

use libloading::{Library, Symbol};
use warpipe::Error;

use super::cases::{MIB, PATIENCE, driver_library, gpu, release};

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
