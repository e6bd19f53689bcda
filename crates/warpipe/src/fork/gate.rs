//! Sections, and forks of one thread at a time. **This module is marked for unsafe**: it makes
//! system calls by number.
//!
//! A fork holds the gate from its prepare handler to the end of the parent's handler, in which the
//! library changes descriptors that no table has ([`lifeline`](super::lifeline)): a child that
//! another thread forked meanwhile would inherit them. A thread waits here with no lock of the C
//! library: glibc calls the handlers without its own (2.36 and later), or holds it from the first
//! handler to the last (older, and musl), so that no second thread gets here. Other handlers' locks
//! are no danger either: handlers that run before this library's release after it, so each thread
//! takes both in the same order.

use std::cell::Cell;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};

use super::fd_table::OPEN;
use super::{CloseOnForkFd, FdResult, OwnerProcess, install};
use crate::os::above_standard;

/// While a section exists, no thread forks. A section covers one system call that makes
/// descriptors, and their registration.
pub(crate) struct NoForkSection {
    /// False within a fork of this thread, where another handler or a signal handler may enter a
    /// section: that fork does not wait for it.
    is_counted: bool,
}

thread_local! {
    /// Sections of this thread: a signal handler that forks inside one must not wait for itself.
    /// The count needs no lock, and the child has this thread's.
    static DEPTH: Cell<u64> = const { Cell::new(0) };

    /// Forks of this thread that are under way: more than one when a signal handler forks within
    /// `fork`.
    static FORKS: Cell<u32> = const { Cell::new(0) };
}

/// The lower half counts sections of threads that do not fork; the upper half is the number of the
/// thread that forks.
static GATE: AtomicU64 = AtomicU64::new(0);

/// The process that [`GATE`] counts for.
static PROCESS: AtomicU32 = AtomicU32::new(0);

const ONE_FORK: u64 = 1 << 32;
const SECTIONS: u64 = ONE_FORK - 1;

impl NoForkSection {
    pub(crate) fn enter() -> NoForkSection {
        install();
        if FORKS.get() > 0 {
            return NoForkSection { is_counted: false };
        }
        let mut pause = Pause::default();
        while !is_entered() {
            if pause.is_long() {
                forget_other_process();
            }
            pause.step();
        }
        NoForkSection { is_counted: true }
    }

    /// Registers a descriptor that was made in this section, under a number above the standard
    /// ones.
    pub(crate) fn adopt(&self, fd: OwnedFd) -> FdResult<CloseOnForkFd> {
        Ok(self.register(above_standard(fd)?))
    }

    /// As [`adopt`](Self::adopt), for a descriptor that a peer sent. It keeps its number, since to
    /// move it would close it. It was received while [`take_standard`](crate::os::take_standard)
    /// held the standard numbers.
    pub(crate) fn adopt_from_peer(&self, fd: OwnedFd) -> CloseOnForkFd {
        self.register(fd)
    }

    fn register(&self, fd: OwnedFd) -> CloseOnForkFd {
        OPEN.set(fd.as_raw_fd());
        CloseOnForkFd {
            fd: Some(fd),
            owner_process: OwnerProcess::current(),
        }
    }
}

impl Drop for NoForkSection {
    fn drop(&mut self) {
        if self.is_counted {
            without_signals(|| {
                DEPTH.set(DEPTH.get() - 1);
                GATE.fetch_sub(1, Release);
            });
        }
    }
}

/// Counts one more section of this thread; false while another one forks. No signal's handler comes
/// between the two counts: one that forks takes its thread's sections from the gate, and would miss
/// one.
fn is_entered() -> bool {
    let mut is_entered = false;
    without_signals(|| {
        let depth = DEPTH.get();
        // A forking thread waits for threads that are inside already: this one continues.
        let one_more = |seen| (seen < ONE_FORK || depth > 0).then_some(seen + 1);
        is_entered = GATE.fetch_update(Acquire, Relaxed, one_more).is_ok();
        DEPTH.set(depth + u64::from(is_entered));
    });
    is_entered
}

/// In a child of a bare system call, for which no handler ran: the sections and forks are those of
/// its parent's threads, which are not there.
fn forget_other_process() {
    let here = std::process::id();
    if PROCESS.swap(here, Relaxed) != here {
        GATE.store(if FORKS.get() == 0 { DEPTH.get() } else { 0 }, Release);
    }
}

/// Runs `work`, which opens and closes descriptors of its own and does not wait, in a section.
pub(crate) fn excluded<R>(work: impl FnOnce() -> R) -> R {
    let _section = NoForkSection::enter();
    work()
}

/// Before a fork: waits for the forks of other threads, and for their sections.
pub(super) fn close() {
    without_signals(|| {
        FORKS.set(FORKS.get() + 1);
        // A signal's handler that forks inside a section must wait neither for itself nor for
        // another one that does the same.
        if FORKS.get() == 1 {
            GATE.fetch_sub(DEPTH.get(), Release);
        }
    });
    let mut pause = Pause::default();
    loop {
        // Each time: a signal's handler that forks here goes on in its child as another thread.
        let (me, seen) = (this_thread(), GATE.load(Acquire));
        let (forks, sections) = (seen / ONE_FORK, seen & SECTIONS);
        if forks == me && sections == 0 {
            return;
        }
        if pause.is_long() {
            forget_other_process();
        }
        // A thread that has ended without its handler.
        let is_free = forks == 0 || forks != me && pause.is_long() && !is_of_process(forks);
        if is_free
            && GATE
                .compare_exchange(seen, sections + me * ONE_FORK, AcqRel, Relaxed)
                .is_ok()
        {
            continue;
        }
        pause.step();
    }
}

/// In a parent, after a fork: does `last` before another thread forks. A signal's handler that
/// forked within `fork` leaves that to the outer one.
pub(super) fn open(last: impl FnOnce()) {
    without_signals(|| {
        // None was counted when the handlers were registered while this fork was under way.
        let Some(left) = FORKS.get().checked_sub(1) else {
            return;
        };
        let me = this_thread();
        // A signal handler that forks may have interrupted the thread that makes the lifeline.
        if left == 0 && DEPTH.get() == 0 {
            last();
        }
        FORKS.set(left);
        if left == 0 {
            let opened = |seen| {
                Some(
                    DEPTH.get()
                        + if seen / ONE_FORK == me {
                            seen & SECTIONS
                        } else {
                            seen
                        },
                )
            };
            let _ = GATE.fetch_update(Release, Relaxed, opened);
        }
    });
}

/// When the handlers are registered.
pub(super) fn begin_in_this_process() {
    PROCESS.store(std::process::id(), Relaxed);
}

/// In a forked child, which has this thread alone.
pub(super) fn begin_anew() {
    begin_in_this_process();
    let left = FORKS.get().saturating_sub(1);
    FORKS.set(left);
    GATE.store(if left == 0 { DEPTH.get() } else { 0 }, Release);
}

fn this_thread() -> u64 {
    u64::from(
        rustix::thread::gettid()
            .as_raw_nonzero()
            .get()
            .unsigned_abs(),
    )
}

fn is_of_process(thread: u64) -> bool {
    // SAFETY: signal 0 is none: the call looks whether there is such a thread.
    let code = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread as libc::pid_t, 0) };
    code == 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
}

/// Does `work` with no signal's handler in between, and leaves `errno` as it was, since the code
/// that forks reads it.
fn without_signals(work: impl FnOnce()) {
    // SAFETY: this thread's own `errno`.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let code = unsafe { *errno };
    // SAFETY: plain data, for which zeros are valid.
    let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = unsafe { std::mem::zeroed() };
    // SAFETY: writes one set, and changes this thread's mask, which is put back below.
    unsafe {
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
    }
    work();
    // SAFETY: the mask that was there before, and this thread's own `errno`.
    unsafe {
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        *errno = code;
    }
}

/// Waits for a few system calls of other threads, by async-signal-safe means.
#[derive(Default)]
pub(super) struct Pause(u32);

impl Pause {
    pub(super) fn step(&mut self) {
        self.0 = self.0.saturating_add(1);
        match self.0 {
            ..100 => std::hint::spin_loop(),
            100..200 => rustix::thread::sched_yield(),
            _ => {
                let short = libc::timespec {
                    tv_sec: 0,
                    tv_nsec: 50_000,
                };
                // SAFETY: reads one `timespec`, which lives across the call.
                unsafe { libc::nanosleep(&short, std::ptr::null_mut()) };
            }
        }
    }

    fn is_long(&self) -> bool {
        self.0 >= 200
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicI32};

    use super::*;
    use crate::fork::per_process::InheritedOnFork;
    use crate::hostile::{alone, in_a_forked_child};

    #[test]
    fn a_fork_within_a_fork_of_its_thread_waits_for_none_and_the_outer_one_ends_both() {
        let test = "a_fork_within_a_fork_of_its_thread_waits_for_none_and_the_outer_one_ends_both";
        alone(module_path!(), test, || {
            install();
            // As a signal's handler that forks within a section, and is interrupted by another one.
            let section = NoForkSection::enter();
            close();
            let inner = NoForkSection::enter();
            close();
            open(|| panic!("the outer one's"));
            drop(inner);
            assert_eq!(GATE.load(Acquire), this_thread() * ONE_FORK, "still closed");
            open(|| panic!("the thread inside a section may be making it"));
            assert_eq!(GATE.load(Acquire), 1);
            drop(section);
            close();
            let mut is_done = false;
            open(|| is_done = true);
            assert!(is_done && GATE.load(Acquire) == 0);
            open(|| panic!("registered in between"));
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
                        in_a_forked_child(|| GATE.load(Acquire) == 1);
                    });
                }
            });
            assert_eq!(GATE.load(Acquire), 0);
        });
    }

    #[test]
    fn a_thread_that_has_ended_does_not_block_forks() {
        let test = "a_thread_that_has_ended_does_not_block_forks";
        alone(module_path!(), test, || {
            install();
            let gone = std::thread::spawn(this_thread).join().unwrap();
            GATE.store(gone * ONE_FORK, Release);
            in_a_forked_child(|| GATE.load(Acquire) == 0);
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
            // SAFETY: ends a process that hangs.
            unsafe { libc::alarm(60) };
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
                for count in 0..2_000 {
                    // SAFETY: the thread is joined at the end of the scope.
                    unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
                    while HANDLED.load(Acquire) <= count {
                        std::hint::spin_loop();
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
                    tell.send(this_thread()).unwrap();
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

    static IS_INTERRUPTED: AtomicBool = AtomicBool::new(false);
    static IS_HANDLERS_CHILD: AtomicBool = AtomicBool::new(false);
    static HANDLERS_CHILD_ENDED: AtomicI32 = AtomicI32::new(-1);

    extern "C" fn forks_and_goes_on(_: libc::c_int) {
        IS_INTERRUPTED.store(true, Release);
        // SAFETY: the child goes on where its parent was interrupted, or is ended by its alarm.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::alarm(20);
                return IS_HANDLERS_CHILD.store(true, Release);
            }
            let mut status = 0;
            libc::waitpid(child, &mut status, 0);
            HANDLERS_CHILD_ENDED.store(status, Release);
        }
    }

    #[test]
    fn a_handlers_child_goes_on_with_the_fork_that_the_handler_interrupted() {
        let test = "a_handlers_child_goes_on_with_the_fork_that_the_handler_interrupted";
        alone(module_path!(), test, || {
            install();
            on_signal(forks_and_goes_on);
            let section = NoForkSection::enter();
            let forking = std::thread::spawn(|| {
                in_a_forked_child(|| true);
                if IS_HANDLERS_CHILD.load(Acquire) {
                    drop(NoForkSection::enter());
                    // SAFETY: ends the process, which has no other threads.
                    unsafe { libc::_exit(i32::from(GATE.load(Acquire) != 0)) };
                }
            });
            until(|| GATE.load(Acquire) >= ONE_FORK);
            let thread = std::os::unix::thread::JoinHandleExt::as_pthread_t(&forking);
            // SAFETY: the thread is joined below.
            unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
            until(|| IS_INTERRUPTED.load(Acquire));
            drop(section);
            forking.join().unwrap();
            assert_eq!(
                HANDLERS_CHILD_ENDED.load(Acquire),
                0,
                "it hangs, or the gate stays closed"
            );
        });
    }

    #[test]
    fn a_child_of_a_bare_system_call_waits_for_no_thread_of_its_parent() {
        let test = "a_child_of_a_bare_system_call_waits_for_no_thread_of_its_parent";
        alone(module_path!(), test, || {
            install();
            for left in [ONE_FORK * this_thread(), 1] {
                // As if another thread were forking, or in a section.
                GATE.store(left, Release);
                let flags = libc::SIGCHLD;
                // SAFETY: as `fork`, without its handlers; the child ends by itself, or by its
                // alarm.
                let child = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
                let child = child as libc::pid_t;
                if child == 0 {
                    // SAFETY: as above.
                    unsafe { libc::alarm(20) };
                    drop(NoForkSection::enter());
                    close();
                    open(|| {});
                    // SAFETY: as above.
                    unsafe { libc::_exit(i32::from(GATE.load(Acquire) != 0)) };
                }
                let mut status = 0;
                // SAFETY: waits for our own child, and writes one `int`.
                assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
                assert_eq!(status, 0, "the child hangs, or the gate stays closed");
                GATE.store(0, Release);
            }
        });
    }
}
