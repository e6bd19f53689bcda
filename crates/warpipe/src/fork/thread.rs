//! The library's threads. **This module is marked for unsafe**: it calls `pthread_create(3)`.
//!
//! The standard library's threads are not used. In a program in Rust each takes, as it begins and
//! as it ends, a lock of the standard library's (of the table of guard pages). If another thread
//! forks meanwhile, that lock stays locked in the child, and no such thread begins there any more.
//!
//! A thread takes none of the program's signals. Else one that the program has blocked in its own
//! threads, to read it (`signalfd(2)`, `sigwait(3)`), would have its action here: by default, that
//! ends the process.

use std::ffi::{CString, c_void};
use std::mem::{MaybeUninit, forget};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::error::{Error, Result};
use crate::os::without_signals;

/// As the standard library's threads have.
const STACK_BYTES: usize = 2 << 20;

/// The part of a thread's name that the kernel keeps.
const NAME_BYTES_MAX: usize = 15;

type Work = Box<dyn FnOnce() + Send>;

/// A thread. Dropped, it goes on by itself.
#[derive(Debug)]
pub(crate) struct Thread(libc::pthread_t);

impl Thread {
    /// Starts a thread. Its panic ends it alone.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub(crate) fn start(name: &str, run: impl FnOnce() + Send + 'static) -> Result<Thread> {
        Thread::with_stack(name, STACK_BYTES, run)
    }

    /// [`start`](Self::start) with another size of the stack, in bytes.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub(crate) fn with_stack(
        name: &str,
        stack_bytes: usize,
        run: impl FnOnce() + Send + 'static,
    ) -> Result<Thread> {
        without_signals(|| Thread::with_signals(name, stack_bytes, run))
    }

    /// [`start`](Self::start), with the calling thread's signals: for functions of users, which may
    /// start processes that inherit what is blocked.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub(crate) fn start_for_users(
        name: &str,
        run: impl FnOnce() + Send + 'static,
    ) -> Result<Thread> {
        Thread::with_signals(name, STACK_BYTES, run)
    }

    fn with_signals(
        name: &str,
        stack_bytes: usize,
        run: impl FnOnce() + Send + 'static,
    ) -> Result<Thread> {
        let kept = &name.as_bytes()[..name.len().min(NAME_BYTES_MAX)];
        let comm = CString::new(kept).unwrap_or_default();
        let work: Work = Box::new(move || {
            let _ = rustix::thread::set_name(&comm);
            run();
        });
        let data = Box::into_raw(Box::new(work));
        create(stack_bytes, data).map(Thread).map_err(|code| {
            // SAFETY: no thread has begun, so this is the box's only owner.
            drop(unsafe { Box::from_raw(data) });
            let error = std::io::Error::from_raw_os_error(code);
            Error::os("clone", format!("the thread {name}"), error)
        })
    }

    /// Waits until it has ended.
    pub(crate) fn join(self) {
        // SAFETY: started here, joined once, and not detached: its drop is left out.
        unsafe { libc::pthread_join(self.0, ptr::null_mut()) };
        forget(self);
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        // SAFETY: started here, and not joined.
        unsafe { libc::pthread_detach(self.0) };
    }
}

fn create(stack_bytes: usize, work: *mut Work) -> std::result::Result<libc::pthread_t, i32> {
    let (mut attributes, mut thread) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: the attributes are initialised before they are used and destroyed once; `begin` takes
    // `work` over, which nothing else has then; the number of the thread is read if it was written.
    unsafe {
        libc::pthread_attr_init(attributes.as_mut_ptr());
        libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), stack_bytes);
        let (at, with) = (thread.as_mut_ptr(), attributes.as_ptr());
        let code = libc::pthread_create(at, with, begin, work.cast());
        libc::pthread_attr_destroy(attributes.as_mut_ptr());
        match code {
            0 => Ok(thread.assume_init()),
            code => Err(code),
        }
    }
}

extern "C" fn begin(work: *mut c_void) -> *mut c_void {
    // SAFETY: the box that `with_stack` made for this thread alone.
    let work = unsafe { Box::from_raw(work.cast::<Work>()) };
    // The panic hook has reported it.
    let _ = catch_unwind(AssertUnwindSafe(work));
    ptr::null_mut()
}

/// Calls `work` on this thread and on `more` others, or on as many as can be started. Returns once
/// all calls have.
///
/// # Panics
/// If one of the calls has.
pub(crate) fn on_several(name: &str, more: usize, work: &(dyn Fn() + Sync)) {
    /// Joined also where `work` panics on this thread.
    struct Joined(Vec<Thread>);

    impl Drop for Joined {
        fn drop(&mut self) {
            self.0.drain(..).for_each(Thread::join);
        }
    }

    let has_panicked = AtomicBool::new(false);
    let call = || {
        let result = catch_unwind(AssertUnwindSafe(work));
        has_panicked.fetch_or(result.is_err(), Relaxed);
    };
    let call: &(dyn Fn() + Sync) = &call;
    // SAFETY: the threads are joined before this function ends, and with it what they borrow.
    let call: &'static (dyn Fn() + Sync) = unsafe { std::mem::transmute(call) };
    let mut others = Joined(Vec::new());
    others
        .0
        .extend((0..more).map_while(|_| Thread::start(name, call).ok()));
    work();
    drop(others);
    assert!(!has_panicked.load(Relaxed), "a thread {name} has panicked");
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn a_thread_that_panics_ends_alone_and_can_be_joined() {
        let thread = Thread::start("warpipe-a-long-name", || {
            let name = std::fs::read_to_string("/proc/thread-self/comm").unwrap();
            assert_eq!(name.trim(), "warpipe-a-long-", "and so it panics not here");
            panic!("here");
        });
        thread.unwrap().join();
    }

    #[test]
    fn a_thread_takes_no_signal_of_the_program_unless_it_is_for_users() {
        let blocked = || {
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
            u64::from_str_radix(mask.unwrap().trim(), 16).unwrap()
        };
        let (own, (tell, told)) = (blocked(), std::sync::mpsc::channel());
        let say = |tell: std::sync::mpsc::Sender<u64>| move || tell.send(blocked()).unwrap();
        Thread::start("warpipe-test", say(tell.clone()))
            .unwrap()
            .join();
        let thread = Thread::start_for_users("warpipe-test", say(tell));
        thread.unwrap().join();
        let bit = |signal: i32| 1u64 << (signal - 1);
        let of_program = bit(libc::SIGTERM) | bit(libc::SIGINT) | bit(libc::SIGALRM);
        let [library, users] = [(); 2].map(|()| told.recv().unwrap());
        assert_eq!(library & of_program, of_program);
        assert_eq!(library & bit(libc::SIGSEGV), 0, "its own faults");
        assert_eq!([users, blocked()], [own; 2]);
    }

    #[test]
    fn work_on_several_threads_is_done_once_all_calls_have_returned() {
        let (all, calls) = (std::sync::Barrier::new(4), AtomicUsize::new(0));
        on_several("warpipe-test", 3, &|| {
            all.wait();
            calls.fetch_add(1, Relaxed);
        });
        assert_eq!(calls.into_inner(), 4);
    }

    #[test]
    fn a_panic_on_one_of_several_threads_is_the_callers() {
        let is_first = AtomicBool::new(true);
        let own = rustix::thread::gettid();
        let work = || {
            let other = rustix::thread::gettid() != own;
            assert!(
                !other || !is_first.swap(false, Relaxed),
                "the first of the others"
            );
        };
        let panicked = catch_unwind(AssertUnwindSafe(|| on_several("warpipe-test", 2, &work)));
        assert!(panicked.is_err());
    }
}
