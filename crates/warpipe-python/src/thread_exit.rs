//! Threads that the end of the interpreter would unwind. **This module is marked for unsafe**: it
//! registers a routine that the C library calls when a thread ends.
//!
//! At its end the interpreter ends each thread that wants it back; before CPython 3.14 by
//! `pthread_exit`, which unwinds the thread's stack. Rust's frames must not be unwound that way:
//! their values would be dropped without the interpreter, and code that catches that unwinding ends
//! the process. Any call into Python may lead there, and the interpreter decides. So a thread that
//! has called this package once is stopped before its first frame is left, as CPython does it from
//! 3.14 on.
//!
//! `pthread_exit` calls the routine of a `_pthread_cleanup_push` when it comes to the frame of its
//! buffer. A buffer in no frame is met at once (glibc: the `FRAME_LEFT` of `nptl/unwind.c`; musl
//! calls all and unwinds nothing).

use std::cell::OnceCell;
use std::ffi::{c_int, c_void};

use crate::interpreter_exit;

/// A `struct _pthread_cleanup_buffer`, of both C libraries.
#[repr(C)]
#[derive(Debug, Default)]
struct Buffer([usize; 4]);

unsafe extern "C" {
    fn _pthread_cleanup_push(
        buffer: *mut Buffer,
        routine: extern "C" fn(*mut c_void),
        argument: *mut c_void,
    );
    fn _pthread_cleanup_pop(buffer: *mut Buffer, execute: c_int);
}

/// A thread's buffer, on the heap, as long as the thread lives.
#[derive(Debug)]
struct Registered(*mut Buffer);

impl Registered {
    fn new() -> Registered {
        let buffer = Box::into_raw(Box::<Buffer>::default());
        // SAFETY: the buffer stays where it is until this thread, which enters it in its own list,
        // takes it out.
        unsafe { _pthread_cleanup_push(buffer, stop_at_the_end, std::ptr::null_mut()) };
        Registered(buffer)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: the thread ends, and no frame of it is left that may have entered another buffer;
        // then no list has this one.
        unsafe {
            _pthread_cleanup_pop(self.0, 0);
            drop(Box::from_raw(self.0));
        }
    }
}

thread_local! {
    static REGISTERED: OnceCell<Registered> = const { OnceCell::new() };
}

/// Each thread calls this before it calls Python from here, also where an argument converts itself.
/// After the first call it costs one check.
pub fn prepare_exit() {
    // A thread that is past its own end makes no calls.
    let _ = REGISTERED.try_with(|registered| registered.get_or_init(Registered::new).0);
}

extern "C" fn stop_at_the_end(_: *mut c_void) {
    if interpreter_exit::has_begun() {
        park();
    }
}

/// Never returns.
pub fn park() -> ! {
    loop {
        std::thread::park();
    }
}
