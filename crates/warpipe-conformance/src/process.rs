//! Processes: identity, stops, kills, and waits for their ends.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal};

/// Waits until `fd` is readable (or closed at its other end); false when `timeout` ran out first.
pub fn wait_readable(fd: impl AsFd, timeout: Duration) -> bool {
    let deadline = Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let limit = Timespec {
            tv_sec: left.as_secs() as _,
            tv_nsec: left.subsec_nanos() as _,
        };
        match rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit)) {
            Ok(0) => return false,
            Ok(_) => return true,
            Err(_) => {}
        }
    }
}

/// A process by its number.
///
/// # Errors
/// A number that no process can have.
pub fn pid(number: u32) -> Result<Pid> {
    Pid::from_raw(number as i32).with_context(|| format!("{number} is a process id"))
}

/// A descriptor that is readable once the process has ended (`pidfd_open(2)`).
///
/// # Errors
/// No such process, or no descriptor left.
pub fn pidfd(process: Pid) -> Result<OwnedFd> {
    rustix::process::pidfd_open(process, PidfdFlags::empty()).context("pidfd_open")
}

/// Sends a signal to one process of this suite.
///
/// # Errors
/// No such process.
pub fn signal(process: Pid, signal: Signal) -> Result<()> {
    rustix::process::kill_process(process, signal).context("kill")
}

/// The processes of a group that are alive (not zombies), beside `leader`.
pub fn group_members(leader: Pid) -> Vec<i32> {
    let leader = leader.as_raw_nonzero().get();
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    let numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    let of_group = |&number: &i32| {
        let stat = std::fs::read_to_string(format!("/proc/{number}/stat")).unwrap_or_default();
        // After the name, which ends with the last parenthesis: state, parent, group.
        let mut fields = stat
            .rsplit_once(") ")
            .map_or("", |(_, rest)| rest)
            .split(' ');
        let (state, group) = (fields.next(), fields.nth(1));
        number != leader && state != Some("Z") && group == Some(leader.to_string().as_str())
    };
    numbers.filter(of_group).collect()
}

/// Looks at `is_so` until it is true; false when `timeout` ran out first. For what cannot wake
/// anybody: the state of another process, of /proc, of a device.
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
