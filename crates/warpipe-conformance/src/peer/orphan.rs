//! Children that a peer forks. **This module is marked for unsafe**: it forks.

use std::fs::File;
use std::os::fd::{AsRawFd as _, RawFd};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};

/// The name of the thread that forks an orphan, and so that of the orphan.
pub const THREAD: &str = "orphan";

/// How an orphan lives.
#[derive(Clone, Copy)]
pub(super) struct After {
    /// So much longer than its parent.
    longer: Duration,
    /// Here it writes a byte when it begins.
    error_counters: RawFd,
}

/// Forks an orphan `in_us` microseconds from now.
pub(super) fn start(error_counters: &Path, in_us: u64, after_ms: u64, unseen: bool) -> Result<()> {
    let error_counters = File::options()
        .append(true)
        .create(true)
        .open(error_counters)
        .context("the file of orphans")?;
    let fork = move || {
        std::thread::park_timeout(Duration::from_micros(in_us));
        let after = After {
            longer: Duration::from_millis(after_ms),
            error_counters: error_counters.as_raw_fd(),
        };
        if let Err(error) = fork_and_live(unseen, Some(after)) {
            eprintln!("no orphan: {error:#}");
        }
    };
    std::thread::Builder::new()
        .name(THREAD.into())
        .spawn(fork)
        .context("a thread that forks")?;
    Ok(())
}

/// Forks a child that only lives: until it is killed, or for so long after its parent; `unseen` by
/// the handlers of `pthread_atfork`.
pub(super) fn fork_and_live(unseen: bool, after: Option<After>) -> Result<i32> {
    // SAFETY: it returns a number, and cannot fail.
    let parent = unsafe { libc::getpid() };
    let child = if unseen {
        // SAFETY: a fork, without a stack of its own; the child calls only async-signal-safe
        // functions.
        unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) as i32 }
    } else {
        // SAFETY: as above.
        unsafe { libc::fork() }
    };
    match child {
        -1 => Err(std::io::Error::last_os_error()).context("fork"),
        0 => live(parent, after),
        child => Ok(child),
    }
}

/// Calls the system itself. A sanitizer puts functions of its own before those of libc; they take
/// locks, and in a child of a fork that no library saw another thread's lock is never released.
fn live(parent: i32, after: Option<After>) -> ! {
    // SAFETY: closing the standard streams lets the case see that its peer has ended; what is
    // written is one byte of the program's text.
    unsafe {
        libc::syscall(libc::SYS_close, 0);
        libc::syscall(libc::SYS_close, 1);
        if let Some(After { error_counters, .. }) = after {
            libc::syscall(libc::SYS_write, error_counters, c"o".as_ptr(), 1usize);
        }
    }
    let Some(After { longer, .. }) = after else {
        loop {
            pause(Duration::from_secs(600));
        }
    };
    // SAFETY: it takes nothing and returns a number.
    while unsafe { libc::syscall(libc::SYS_getppid) } == libc::c_long::from(parent) {
        pause(Duration::from_millis(2));
    }
    pause(longer);
    loop {
        // SAFETY: the process ends here.
        unsafe { libc::syscall(libc::SYS_exit_group, 0) };
    }
}

/// Sleeps, by the system call alone.
fn pause(limit: Duration) {
    let mut limit = libc::timespec {
        tv_sec: limit.as_secs() as _,
        tv_nsec: limit.subsec_nanos() as _,
    };
    let none = std::ptr::null::<libc::pollfd>();
    let mask = std::ptr::null::<libc::sigset_t>();
    // SAFETY: no descriptor and no mask is named; the time is ours to be read and written.
    unsafe { libc::syscall(libc::SYS_ppoll, none, 0usize, &raw mut limit, mask, 0usize) };
}
