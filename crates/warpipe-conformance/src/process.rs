//! Processes of this suite: identity, signals, and the members of a group.

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal};

/// A process by its number.
///
/// # Errors
/// A number that no process can have.
pub fn pid(number: u32) -> Result<Pid> {
    Pid::from_raw(number as i32).with_context(|| format!("{number} is a process id"))
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
