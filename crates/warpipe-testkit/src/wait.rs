//! Waits with a time limit.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// A descriptor that is readable once the process has ended (`pidfd_open(2)`).
///
/// # Errors
/// No such process, or no descriptor left.
pub fn pidfd(process: Pid) -> io::Result<OwnedFd> {
    Ok(pidfd_open(process, PidfdFlags::empty())?)
}

/// Waits until `fd` is readable, or closed at its other end; false when `timeout` ran out first.
///
/// # Errors
/// `poll(2)` failed.
pub fn wait_readable(fd: impl AsFd, timeout: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let limit = Timespec {
            tv_sec: left.as_secs() as _,
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit)) {
            Err(Errno::INTR) => {}
            ready => return Ok(ready? > 0),
        }
    }
}

/// Asks `is_so` without a pause until it is true, so that this thread goes on at the same moment as
/// the one that makes it true. One that has no CPU gets this one's.
pub fn spin_until(mut is_so: impl FnMut() -> bool) {
    let mut polls = 0;
    while !is_so() {
        polls += 1;
        match polls {
            ..1_000 => std::hint::spin_loop(),
            _ => std::thread::yield_now(),
        }
    }
}

/// Asks `is_so` until it is true; false when `timeout` ran out first. For a state that wakes no
/// waiter: of another process, of /proc, of a device.
pub fn eventually(timeout: Duration, mut is_so: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + timeout;
    loop {
        if is_so() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::park_timeout(Duration::from_millis(1));
    }
}
