//! The identity of a process: which process of which boot of which machine made a handle.
//!
//! A process id alone identifies no process: it is used again, and it means another process in
//! another namespace. Together with the process's start time, its namespace and the boot's id it
//! identifies one process for good.

use std::io;
use std::sync::Mutex;

use serde::{Deserialize, Serialize};

use crate::clock;
use crate::error::{Error, Result};
use crate::fork::per_process::PerProcess;

/// The identity of a process, unique among all processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct ProcessOrigin {
    /// The boot of the machine: a hash of `/proc/sys/kernel/random/boot_id`.
    pub(crate) host: u64,
    /// The PID namespace in which `pid` counts: the inode of `/proc/self/ns/pid`.
    pub(crate) namespace: u64,
    /// When the process started, in ticks since the boot (`/proc/PID/stat`, field 22), as the host
    /// counts them.
    pub(crate) started: u64,
    /// The process id.
    pub(crate) pid: i32,
}

/// Whether another process lives, as far as this process can know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Liveness {
    Alive,
    Gone,
    /// The process is in another PID namespace, or on another machine.
    Unknown,
}

impl ProcessOrigin {
    /// The identity of this process; read once, and again after a fork.
    pub(crate) fn here() -> Result<ProcessOrigin> {
        static HERE: PerProcess<Mutex<Option<ProcessOrigin>>> = PerProcess::new();
        let mut here = HERE.lock();
        match *here {
            Some(origin) if origin.pid == std::process::id() as i32 => Ok(origin),
            _ => Ok(*here.insert(ProcessOrigin::read()?)),
        }
    }

    fn read() -> Result<ProcessOrigin> {
        let failed = |what: &'static str| move |error: io::Error| Error::os("read", what, error);
        let boot = std::fs::read("/proc/sys/kernel/random/boot_id")
            .map_err(failed("/proc/sys/kernel/random/boot_id"))?;
        let namespace = rustix::fs::stat("/proc/self/ns/pid")
            .map_err(|e| Error::os("stat", "/proc/self/ns/pid", e))?;
        let pid = std::process::id() as i32;
        let started = Stat::at("/proc/self/stat")
            .map_err(failed("/proc/self/stat"))?
            .started;
        Ok(ProcessOrigin {
            host: hash(boot.trim_ascii()),
            namespace: namespace.st_ino,
            started,
            pid,
        })
    }

    /// Whether the process still lives, as seen from `here`. A zombie does not: its memory has been
    /// released.
    pub(crate) fn life(&self, here: &ProcessOrigin) -> Liveness {
        if (self.host, self.namespace) != (here.host, here.namespace) || !is_proc_of(here.pid) {
            return Liveness::Unknown;
        }
        match Stat::of(self.pid) {
            Ok(stat) if stat.started == self.started && !stat.is_dead() => Liveness::Alive,
            Ok(_) => Liveness::Gone,
            Err(error) if says_gone(&error) => Liveness::Gone,
            Err(_) => Liveness::Unknown,
        }
    }
}

/// Whether `/proc` counts processes as this one does, which has the number `pid`. In a PID
/// namespace with an old mount of `/proc`, the numbers there are other processes'.
fn is_proc_of(pid: i32) -> bool {
    std::fs::read_link("/proc/self").is_ok_and(|link| link.to_str() == Some(&pid.to_string()))
}

/// The fields of `/proc/PID/stat` that are used.
struct Stat {
    state: u8,
    /// `PF_...` of the kernel.
    flags: u64,
    started: u64,
}

/// The unit of start times: `USER_HZ` is 100 on all architectures of this library.
const TICK_NS: i64 = 10_000_000;

/// The kernel ends this thread: `PF_EXITING`.
const EXITING: u64 = 4;

/// Whether the process with this number is dying or dead. Some of its files may still be open: its
/// exit closes one after the other, and a child that it has just forked closes its copies when it
/// first runs. False where that cannot be seen. True also of a process that lives on in other
/// threads than its first one.
pub(crate) fn is_dying_or_dead(pid: i32) -> bool {
    is_proc_of(std::process::id() as i32)
        && match Stat::of(pid) {
            Ok(stat) => stat.flags & EXITING != 0 || stat.is_dead(),
            Err(error) => says_gone(&error),
        }
}

/// Whether the process with this number is stopped: none of its threads answers. False where that
/// cannot be seen.
pub(crate) fn is_stopped(pid: i32) -> bool {
    is_proc_of(std::process::id() as i32) && Stat::of(pid).is_ok_and(|stat| stat.state == b'T')
}

/// Whether an error of a file in `/proc/PID` says that there is no such process.
fn says_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
}

/// When the process with this number started, in ticks since the boot.
pub(crate) fn started_of(pid: i32) -> Option<u64> {
    Stat::of(pid).ok().map(|stat| stat.started)
}

impl Stat {
    fn is_dead(&self) -> bool {
        matches!(self.state, b'Z' | b'X')
    }

    fn of(pid: i32) -> io::Result<Stat> {
        Stat::at(&format!("/proc/{pid}/stat"))
    }

    /// The kernel counts the start in the reader's time namespace; here it counts in the host's.
    fn at(path: &str) -> io::Result<Stat> {
        let text = std::fs::read(path)?;
        let mut stat =
            Stat::parse(&text).ok_or_else(|| io::Error::other("it is not what proc(5) says"))?;
        let ahead = clock::offsets().boottime_ns.div_euclid(TICK_NS);
        stat.started = stat.started.wrapping_sub(ahead as u64);
        Ok(stat)
    }

    /// The name, in parentheses, may itself contain parentheses and blanks: the fields begin behind
    /// the last parenthesis.
    fn parse(text: &[u8]) -> Option<Stat> {
        let end = text.iter().rposition(|&byte| byte == b')')?;
        let mut fields = text
            .get(end + 1..)?
            .split(|&byte| byte == b' ')
            .filter(|field| !field.is_empty());
        let state = *fields.next()?.first()?;
        let number = |field: &[u8]| std::str::from_utf8(field).ok()?.parse().ok();
        let flags = number(fields.nth(5)?)?;
        let started: u64 = number(fields.nth(12)?)?;
        Some(Stat {
            state,
            flags,
            started,
        })
    }
}

/// For [`fuzzing`](crate::fuzzing): reads bytes as the line of a process.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn try_stat(text: &[u8]) {
    if let Some(stat) = Stat::parse(text) {
        assert_ne!(stat.state, b' ', "fields are told apart by blanks");
    }
}

/// FNV-1a (Fowler, Noll and Vo): distinguishes values, but is not cryptographic.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, &byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_lives_and_one_with_its_number_that_started_earlier_is_gone() {
        let here = ProcessOrigin::here().unwrap();
        assert_eq!(here.life(&here), Liveness::Alive);
        assert_eq!(
            ProcessOrigin {
                started: here.started - 1,
                ..here
            }
            .life(&here),
            Liveness::Gone
        );
        assert_eq!(
            ProcessOrigin {
                namespace: 1,
                ..here
            }
            .life(&here),
            Liveness::Unknown
        );
        assert_eq!(
            ProcessOrigin { host: 1, ..here }.life(&here),
            Liveness::Unknown
        );
    }

    #[test]
    fn a_killed_child_is_gone_before_its_parent_has_asked_for_it() {
        let here = ProcessOrigin::here().unwrap();
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let pid = child.id() as i32;
        let origin = ProcessOrigin {
            pid,
            started: Stat::of(pid).unwrap().started,
            ..here
        };
        assert_eq!(origin.life(&here), Liveness::Alive);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(origin.life(&here), Liveness::Gone);
    }

    #[test]
    fn a_process_whose_name_holds_parentheses_is_read_right() {
        let text = b"7 (a) b) c) Z 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20\n";
        let stat = Stat::parse(text).unwrap();
        assert_eq!((stat.state, stat.started), (b'Z', 4711));
        for cut in 0..text.len() - 10 {
            let _no_panic = Stat::parse(&text[..cut]);
        }
    }
}
