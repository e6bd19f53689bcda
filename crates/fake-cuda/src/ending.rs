//! The driver's shutdown: from a handler of `exit` on, only the exiting thread may call it, and
//! gets an error.

use std::io::Write;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::time::Duration;

use crate::status::*;

/// The duration of a teardown: long enough that a thread that still polls the driver does so once
/// more.
const TEARDOWN: Duration = Duration::from_millis(100);

/// The process that initialised the driver: a forked child of it ends without a teardown.
static HOME: AtomicU32 = AtomicU32::new(0);
/// The thread that ends the process, by its number; 0 until one does.
static EXITING: AtomicI32 = AtomicI32::new(0);

/// `cuInit`'s part: registers the end with `atexit`, once.
pub fn expect() -> Outcome {
    static EXPECTED: Once = Once::new();
    static REFUSED: AtomicBool = AtomicBool::new(false);
    EXPECTED.call_once(|| {
        HOME.store(std::process::id(), Ordering::SeqCst);
        // SAFETY: the handler takes nothing and returns; `exit` and `dlclose` run it before this
        // library is unloaded.
        let code = unsafe { libc::atexit(end) };
        REFUSED.store(code != 0, Ordering::SeqCst);
    });
    if REFUSED.load(Ordering::SeqCst) {
        Err(OUT_OF_MEMORY)
    } else {
        Ok(())
    }
}

extern "C" fn end() {
    if HOME.load(Ordering::SeqCst) == std::process::id() {
        EXITING.store(this_thread(), Ordering::SeqCst);
        std::thread::sleep(TEARDOWN);
    }
}

/// Whether the driver can still be called.
pub fn check(call: &'static str) -> Outcome {
    match EXITING.load(Ordering::SeqCst) {
        0 => Ok(()),
        thread if thread == this_thread() => Err(DEINITIALIZED),
        _ => {
            let _ = writeln!(
                std::io::stderr(),
                "fake-cuda: {call} while the driver is torn down"
            );
            std::process::abort()
        }
    }
}

fn this_thread() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}
