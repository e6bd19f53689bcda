//! Sections, and forks of one thread at a time. **This module is marked for unsafe**: it makes system calls by number.
//!
//! A fork holds the gate from its prepare handler to the end of the parent's one, in which the library changes descriptors
//! that no table has ([`lifeline`](super::lifeline)): a child that another thread forked meanwhile would inherit them. A thread
//! waits here with no lock of the C library: glibc calls the handlers without its own (2.36 and later), or holds that
//! from the first handler to the last (older, and musl), so that no second thread comes this far. Handlers of others are
//! no danger either: those that run before ours let go after ours, so each thread takes both in the same order.

use std::cell::Cell;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use super::table::OPEN;
use super::{Home, Made, PrivateFd, install};
use crate::os::above_standard;

/// While one exists, no thread forks. For one system call that makes descriptors, and their registration.
pub(crate) struct Section {
    /// Not within a fork of this thread, which another handler or a signal's may do: that waits for nobody here.
    is_counted: bool,
}

thread_local! {
    /// Sections of this thread: a signal handler that forks inside one must not wait for itself. It needs no lock, and the
    /// child has this thread's.
    static DEPTH: Cell<u64> = const { Cell::new(0) };

    /// Forks of this thread that are under way: more than one when a signal's handler forks within `fork`.
    static FORKS: Cell<u32> = const { Cell::new(0) };
}

/// Sections of threads that do not fork in the lower half, the number of the thread that forks in the upper one.
static GATE: AtomicU64 = AtomicU64::new(0);

const ONE_FORK: u64 = 1 << 32;
const SECTIONS: u64 = ONE_FORK - 1;

impl Section {
    pub(crate) fn enter() -> Section {
        install();
        if FORKS.get() > 0 {
            return Section { is_counted: false };
        }
        let depth = DEPTH.get();
        let mut pause = Pause::default();
        loop {
            let seen = GATE.load(Relaxed);
            // A thread that is inside already is waited for by whoever forks: it goes on.
            if seen >= ONE_FORK && depth == 0 {
                pause.step();
            } else if GATE.compare_exchange_weak(seen, seen + 1, Acquire, Relaxed).is_ok() {
                DEPTH.set(depth + 1);
                return Section { is_counted: true };
            }
        }
    }

    /// Registers a descriptor that was made in this section, under a number that no program takes for a standard one.
    pub(crate) fn adopt(&self, fd: OwnedFd) -> Made<PrivateFd> {
        Ok(self.register(above_standard(fd)?))
    }

    /// The same of one that a peer sent, which stays where it is: to move it would close it. It came while
    /// [`take_standard`](crate::os::take_standard) held the standard numbers.
    pub(crate) fn adopt_from_peer(&self, fd: OwnedFd) -> PrivateFd {
        self.register(fd)
    }

    fn register(&self, fd: OwnedFd) -> PrivateFd {
        OPEN.set(fd.as_raw_fd());
        PrivateFd { fd: Some(fd), home: Home::here() }
    }
}

impl Drop for Section {
    fn drop(&mut self) {
        if self.is_counted {
            DEPTH.set(DEPTH.get() - 1);
            GATE.fetch_sub(1, Release);
        }
    }
}

/// Work that opens and closes descriptors of its own, and waits for nobody.
pub(crate) fn excluded<R>(work: impl FnOnce() -> R) -> R {
    let _section = Section::enter();
    work()
}

/// Before a fork: waits for the forks of other threads, and for their sections.
pub(super) fn close() {
    let me = this_thread();
    without_signals(|| {
        FORKS.set(FORKS.get() + 1);
        // A signal's handler that forks inside a section must wait neither for itself nor for another one that does the
        // same.
        if FORKS.get() == 1 {
            GATE.fetch_sub(DEPTH.get(), Release);
        }
    });
    let mut pause = Pause::default();
    loop {
        let seen = GATE.load(Acquire);
        let (forks, sections) = (seen / ONE_FORK, seen & SECTIONS);
        if forks == me && sections == 0 {
            return;
        }
        // A thread that has ended without its handler, or is not of this process, which a child of a bare system call finds.
        let is_free = forks == 0 || forks != me && pause.is_long() && !is_of_process(forks);
        if is_free && GATE.compare_exchange(seen, sections + me * ONE_FORK, AcqRel, Relaxed).is_ok() {
            continue;
        }
        pause.step();
    }
}

/// In a parent, after a fork: does `last` before another thread forks. A signal's handler that forked within `fork` leaves
/// that to the outer one.
pub(super) fn open(last: impl FnOnce()) {
    without_signals(|| {
        // None was counted when the handlers were registered while this fork was under way.
        let Some(left) = FORKS.get().checked_sub(1) else { return };
        let me = this_thread();
        // A signal's handler that forks may have interrupted who makes the lifeline.
        if left == 0 && DEPTH.get() == 0 {
            last();
        }
        FORKS.set(left);
        if left == 0 {
            let opened = |seen| Some(DEPTH.get() + if seen / ONE_FORK == me { seen & SECTIONS } else { seen });
            let _ = GATE.fetch_update(Release, Relaxed, opened);
        }
    });
}

/// In a forked child, which has this thread alone.
pub(super) fn begin_anew() {
    let left = FORKS.get().saturating_sub(1);
    FORKS.set(left);
    GATE.store(if left == 0 { DEPTH.get() } else { 0 }, Release);
}

fn this_thread() -> u64 {
    u64::from(rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs())
}

fn is_of_process(thread: u64) -> bool {
    // SAFETY: signal 0 is none: the call looks whether there is such a thread.
    let code = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread as libc::pid_t, 0) };
    code == 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
}

/// Does `work` with no signal's handler in between, and leaves `errno` as it was: who forks reads it.
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
struct Pause(u32);

impl Pause {
    fn step(&mut self) {
        self.0 = self.0.saturating_add(1);
        match self.0 {
            ..100 => std::hint::spin_loop(),
            100..200 => rustix::thread::sched_yield(),
            _ => {
                let short = libc::timespec { tv_sec: 0, tv_nsec: 50_000 };
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
    use super::*;
    use crate::hostile::{alone, in_a_forked_child};

    #[test]
    fn a_fork_within_a_fork_of_its_thread_waits_for_none_and_the_outer_one_ends_both() {
        let test = "a_fork_within_a_fork_of_its_thread_waits_for_none_and_the_outer_one_ends_both";
        alone(module_path!(), test, || {
            install();
            // As a signal's handler that forks within a section, and is interrupted by another one.
            let section = Section::enter();
            close();
            let inner = Section::enter();
            close();
            open(|| panic!("the outer one's"));
            drop(inner);
            assert_eq!(GATE.load(Acquire), this_thread() * ONE_FORK, "still closed");
            open(|| panic!("who has a section may be making it"));
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
                        let _section = Section::enter();
                        both.wait();
                        in_a_forked_child(|| GATE.load(Acquire) == 1);
                    });
                }
            });
            assert_eq!(GATE.load(Acquire), 0);
        });
    }

    #[test]
    fn a_thread_that_is_not_there_keeps_nobody_from_forking() {
        let test = "a_thread_that_is_not_there_keeps_nobody_from_forking";
        alone(module_path!(), test, || {
            install();
            let gone = std::thread::spawn(this_thread).join().unwrap();
            GATE.store(gone * ONE_FORK, Release);
            in_a_forked_child(|| GATE.load(Acquire) == 0);
            assert_eq!(GATE.load(Acquire), 0);
        });
    }
}
