//! Sections, and forks of one thread at a time. **This module is marked for unsafe**: it keeps
//! `errno` across a fork.
//!
//! A fork holds the gate from its prepare handler to the end of the parent's handler, in which the
//! library changes descriptors that no table has ([`lifeline`](super::lifeline)): a child that
//! another thread forked meanwhile would inherit them. A thread waits here with no lock of the C
//! library: glibc calls the handlers without its own (2.36 and later), or holds it from the first
//! handler to the last (older, and musl), so that no second thread gets here. Other handlers' locks
//! are no danger either: handlers that run before this library's release after it, so each thread
//! takes both in the same order.
//!
//! A signal handler that interrupts a section, or a fork of its thread, and forks itself passes the
//! gate without a wait. Its child may keep descriptors, and shares the lifeline's socket: such
//! forks, and children of a bare `clone`, are not supervised.

use std::cell::Cell;
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Duration;

use super::{CloseOnForkFd, FdResult, OwnerProcess, install};
use crate::os::above_standard;

/// While a section exists, no thread forks. A section covers a few system calls that make or close
/// descriptors, and their registration.
pub(crate) struct NoForkSection {
    /// A section is its thread's.
    _thread: PhantomData<*const ()>,
}

thread_local! {
    /// The sections and forks of this thread, one within the other.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// The number of threads in sections, and [`FORKING`] while a thread forks.
static GATE: AtomicU32 = AtomicU32::new(0);

const FORKING: u32 = 1 << 31;

impl NoForkSection {
    pub(crate) fn enter() -> NoForkSection {
        install();
        // Before the gate: a signal handler that forks in between must not wait for itself.
        if DEPTH.replace(DEPTH.get() + 1) == 0 {
            let mut pause = Pause::default();
            let one_more = |seen| (seen & FORKING == 0).then_some(seen + 1);
            while GATE.fetch_update(Acquire, Relaxed, one_more).is_err() {
                pause.step();
            }
        }
        NoForkSection {
            _thread: PhantomData,
        }
    }

    /// Registers a descriptor that was made in this section, under a number above the standard
    /// ones.
    pub(crate) fn adopt(&self, fd: OwnedFd) -> FdResult<CloseOnForkFd> {
        let fd = self.hold_from_peer(above_standard(fd)?);
        fd.close_in_child();
        Ok(fd)
    }

    /// Takes a descriptor that a peer sent, which a forked child keeps before
    /// [`close_in_child`](CloseOnForkFd::close_in_child) is called. It keeps its number, since to
    /// move it would close it. It was received while [`take_standard`](crate::os::take_standard)
    /// held the standard numbers.
    pub(crate) fn hold_from_peer(&self, fd: OwnedFd) -> CloseOnForkFd {
        CloseOnForkFd {
            fd: Some(fd),
            owner_process: OwnerProcess::current(),
        }
    }
}

impl Drop for NoForkSection {
    fn drop(&mut self) {
        let depth = DEPTH.get() - 1;
        if depth == 0 {
            // A section that a forked child goes on with is not counted there.
            let one_less = |seen| (seen & !FORKING != 0).then(|| seen - 1);
            let _ = GATE.fetch_update(Release, Relaxed, one_less);
        }
        DEPTH.set(depth);
    }
}

/// Runs `work`, which opens and closes descriptors of its own and does not wait, in a section.
pub(crate) fn excluded<R>(work: impl FnOnce() -> R) -> R {
    let _section = NoForkSection::enter();
    work()
}

/// Before a fork: waits for the forks of other threads, and for their sections.
pub(super) fn close() {
    if DEPTH.replace(DEPTH.get() + 1) > 0 {
        return;
    }
    let mut pause = Pause::default();
    while GATE.fetch_or(FORKING, Acquire) & FORKING != 0 {
        pause.step();
    }
    while GATE.load(Acquire) & !FORKING != 0 {
        pause.step();
    }
}

/// In a parent, after a fork: does `last` before another thread forks.
pub(super) fn open(last: impl FnOnce()) {
    // None was counted when the handlers were registered while this fork was under way.
    let Some(depth) = DEPTH.get().checked_sub(1) else {
        return;
    };
    if depth == 0 {
        // SAFETY: this thread's own `errno`, which the code that forks reads.
        let errno = unsafe { &mut *libc::__errno_location() };
        let code = *errno;
        last();
        *errno = code;
        GATE.fetch_and(!FORKING, Release);
    }
    DEPTH.set(depth);
}

/// In a forked child, which has this thread alone.
pub(super) fn begin_anew() {
    DEPTH.set(DEPTH.get().saturating_sub(1));
    GATE.store(0, Release);
}

/// Waits for a few system calls of other threads, by async-signal-safe means.
#[derive(Default)]
struct Pause(u32);

impl Pause {
    fn step(&mut self) {
        self.0 = self.0.saturating_add(1);
        match self.0 {
            ..100 => std::hint::spin_loop(),
            100..200 => rustix::thread::sched_yield(),
            _ => {
                let short = Duration::from_micros(50);
                let _ = rustix::thread::nanosleep(&crate::os::timespec(short));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64};

    use super::*;
    use crate::fork::per_process::InheritedOnFork;
    use crate::hostile::{alone, in_a_forked_child};

    #[test]
    fn a_fork_of_a_handler_within_a_fork_or_a_section_waits_for_none_and_opens_no_gate() {
        let test =
            "a_fork_of_a_handler_within_a_fork_or_a_section_waits_for_none_and_opens_no_gate";
        alone(module_path!(), test, || {
            install();
            let section = NoForkSection::enter();
            close();
            let inner = NoForkSection::enter();
            open(|| panic!("the thread inside a section may be making it"));
            drop(inner);
            assert_eq!(GATE.load(Acquire), 1);
            drop(section);
            close();
            close();
            open(|| panic!("the outer one's"));
            assert_eq!(GATE.load(Acquire), FORKING, "still closed");
            let mut is_done = false;
            open(|| is_done = true);
            assert!(is_done && GATE.load(Acquire) == 0);
            open(|| panic!("registered in between"));
        });
    }

    #[test]
    fn a_section_that_a_child_goes_on_with_leaves_its_gate_alone() {
        let test = "a_section_that_a_child_goes_on_with_leaves_its_gate_alone";
        alone(module_path!(), test, || {
            let mut section = Some(NoForkSection::enter());
            in_a_forked_child(|| {
                drop(section.take());
                drop(NoForkSection::enter());
                GATE.load(Acquire) == 0 && DEPTH.get() == 0
            });
            assert_eq!(GATE.load(Acquire), 1);
        });
    }

    #[test]
    fn threads_that_fork_inside_sections_do_not_wait_for_each_other() {
        let test = "threads_that_fork_inside_sections_do_not_wait_for_each_other";
        alone(module_path!(), test, || {
            let both = std::sync::Barrier::new(2);
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        let _section = NoForkSection::enter();
                        both.wait();
                        in_a_forked_child(|| GATE.load(Acquire) == 0);
                    });
                }
            });
            assert_eq!(GATE.load(Acquire), 0);
        });
    }

    /// How often the handler has come to its end.
    static HANDLED: AtomicU64 = AtomicU64::new(0);

    extern "C" fn forks(_: libc::c_int) {
        // SAFETY: the child ends at once; the errno of the interrupted code is restored.
        unsafe {
            let place = libc::__errno_location();
            let code = *place;
            let child = libc::fork();
            if child == 0 {
                libc::_exit(0);
            }
            libc::waitpid(child, std::ptr::null_mut(), 0);
            *place = code;
        }
        HANDLED.fetch_add(1, Release);
    }

    fn on_signal(handler: extern "C" fn(libc::c_int)) {
        // SAFETY: installs a handler that makes async-signal-safe calls only.
        unsafe { libc::signal(libc::SIGUSR1, handler as libc::sighandler_t) };
    }

    fn until(holds: impl Fn() -> bool) {
        let start = std::time::Instant::now();
        while !holds() {
            assert!(start.elapsed() < std::time::Duration::from_secs(20));
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_handler_forks_wherever_it_interrupts_its_thread() {
        let test = "a_handler_forks_wherever_it_interrupts_its_thread";
        alone(module_path!(), test, || {
            install();
            on_signal(forks);
            let is_over = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let (tell, told) = std::sync::mpsc::channel();
                let is_over = &is_over;
                scope.spawn(move || {
                    // SAFETY: this thread's own number.
                    tell.send(unsafe { libc::pthread_self() }).unwrap();
                    while !is_over.load(Relaxed) {
                        drop(NoForkSection::enter());
                    }
                });
                let thread = told.recv().unwrap();
                for count in 0..500 {
                    // SAFETY: ends a process that hangs.
                    unsafe { libc::alarm(60) };
                    // SAFETY: the thread is joined at the end of the scope.
                    unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
                    while HANDLED.load(Acquire) <= count {
                        std::thread::yield_now();
                    }
                    (0..count % 1_000).for_each(|_| std::hint::spin_loop());
                }
                is_over.store(true, Relaxed);
            });
            assert_eq!(GATE.load(Acquire), 0);
        });
    }

    #[test]
    fn a_handler_forks_while_its_thread_has_what_another_ones_section_waits_for() {
        static COMMON: InheritedOnFork<u32> = InheritedOnFork::new(0);
        let test = "a_handler_forks_while_its_thread_has_what_another_ones_section_waits_for";
        alone(module_path!(), test, || {
            install();
            on_signal(forks);
            // SAFETY: ends a process that hangs.
            unsafe { libc::alarm(20) };
            std::thread::scope(|scope| {
                let held = COMMON.lock();
                let (tell, told) = std::sync::mpsc::channel();
                scope.spawn(move || {
                    tell.send(rustix::thread::gettid().as_raw_nonzero())
                        .unwrap();
                    *COMMON.lock() += 1;
                });
                let stat = format!("/proc/self/task/{}/stat", told.recv().unwrap());
                until(|| std::fs::read_to_string(&stat).unwrap().contains(") S "));
                // SAFETY: the handler is the one above.
                unsafe { libc::raise(libc::SIGUSR1) };
                drop(held);
            });
            assert_eq!(*COMMON.lock(), 1);
        });
    }
}
