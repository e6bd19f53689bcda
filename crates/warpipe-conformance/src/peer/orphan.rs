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
    tally: RawFd,
}

/// Forks an orphan `in_us` microseconds from now.
pub(super) fn start(tally: &Path, in_us: u64, after_ms: u64, unseen: bool) -> Result<()> {
    let tally = File::options().append(true).create(true).open(tally).context("the file of orphans")?;
    let fork = move || {
        std::thread::park_timeout(Duration::from_micros(in_us));
        let after = After { longer: Duration::from_millis(after_ms), tally: tally.as_raw_fd() };
        if let Err(error) = fork_and_live(unseen, Some(after)) {
            eprintln!("no orphan: {error:#}");
        }
    };
    std::thread::Builder::new().name(THREAD.into()).spawn(fork).context("a thread that forks")?;
    Ok(())
}

/// Forks a child that only lives: until it is killed, or for so long after its parent; `unseen` by the handlers of
/// `pthread_atfork`.
pub(super) fn fork_and_live(unseen: bool, after: Option<After>) -> Result<i32> {
    // SAFETY: it returns a number, and cannot fail.
    let parent = unsafe { libc::getpid() };
    let child = if unseen {
        // SAFETY: a fork, without a stack of its own; the child calls only async-signal-safe functions.
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

fn live(parent: i32, after: Option<After>) -> ! {
    // SAFETY: closing the standard streams lets the case see that its peer has ended; the others are system calls on
    // numbers and on one byte of the program's text, all of them async-signal-safe.
    unsafe {
        libc::close(0);
        libc::close(1);
        let Some(After { longer, tally }) = after else {
            loop {
                libc::pause();
            }
        };
        libc::write(tally, c"o".as_ptr().cast(), 1);
        while libc::getppid() == parent {
            libc::usleep(2_000);
        }
        libc::usleep(longer.as_micros() as libc::useconds_t);
        libc::_exit(0)
    }
}
