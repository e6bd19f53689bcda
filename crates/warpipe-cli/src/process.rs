//! This program again, as a child: started, watched and always reaped.
//! **This module is marked for unsafe**: it runs code in a forked child before it executes a program.

use std::ffi::{OsStr, OsString};
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::event::{PollFd, PollFlags};
use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, Signal, getpid, getppid, pidfd_open,
    set_parent_process_death_signal,
};

use crate::poll::poll;

/// How a child process starts the command `warpipe` again.
#[derive(Debug, Clone)]
pub struct Program {
    path: OsString,
    name: OsString,
    arguments: Vec<OsString>,
}

impl Program {
    /// The executable of this process, which is the command itself.
    pub fn this_executable() -> Program {
        Program {
            // Not the path that this was started by: it may lead elsewhere by now.
            path: "/proc/self/exe".into(),
            name: "warpipe".into(),
            arguments: Vec::new(),
        }
    }

    /// An interpreter, and the arguments that come before the command line.
    pub fn interpreter(path: OsString, arguments: Vec<OsString>) -> Program {
        Program {
            // An interpreter finds its libraries by this name.
            name: path.clone(),
            path,
            arguments,
        }
    }
}

static PROGRAM: OnceLock<Program> = OnceLock::new();

/// Says how [`this_program`] starts a child. The first call of the process counts.
pub fn set_program(program: Program) {
    let _ = PROGRAM.set(program);
}

/// A command that runs this very program, in a process group of its own: a Ctrl-C on the terminal
/// is for the parent, which then ends its children in order.
pub fn this_program() -> Command {
    let program = PROGRAM.get_or_init(Program::this_executable);
    let mut command = Command::new(&program.path);
    command.arg0(&program.name).args(&program.arguments);
    command.process_group(0);
    command
}

/// A command that starts a hidden subcommand of this very program, which knows its parent.
pub fn child_of_this(subcommand: &str) -> Command {
    let mut command = this_program();
    let parent = std::process::id().to_string();
    command.args([subcommand, "--parent", &parent]);
    command
}

/// A command that runs another program, which gets `signal` when this process ends.
///
/// Only for a process without endpoints: it forks, and those would be closed in the child.
pub fn following(program: &OsStr, signal: Signal) -> Command {
    let (mut command, parent) = (Command::new(program), getpid());
    let follow = move || {
        set_parent_process_death_signal(Some(signal))?;
        // The parent may have died before the kernel was asked for the signal.
        match getppid() == Some(parent) {
            true => Ok(()),
            false => Err(io::ErrorKind::BrokenPipe.into()),
        }
    };
    // SAFETY: between `fork` and `exec` the closure makes two system calls; it allocates nothing
    // and takes no lock.
    unsafe { command.pre_exec(follow) };
    command
}

/// A folder of this user alone, which is removed when it is dropped.
pub fn private_folder(parent: &Path, prefix: &str) -> anyhow::Result<tempfile::TempDir> {
    let private = Permissions::from_mode(0o700);
    let mut folder = tempfile::Builder::new();
    let made = folder
        .prefix(prefix)
        .permissions(private)
        .tempdir_in(parent);
    made.with_context(|| format!("no folder can be made in {}", parent.display()))
}

/// For a child's first step: dies with its parent, and leaves no core file when it is made to
/// fault.
pub fn follow_parent(parent_pid: i32) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    rustix::process::setrlimit(
        Resource::Core,
        Rlimit {
            current: Some(0),
            maximum: Some(0),
        },
    )?;
    // The parent may have died before the kernel was asked for the signal.
    if getppid().map(Pid::as_raw_pid) != Some(parent_pid) {
        return Err(io::Error::other(
            "the process that started this one has gone",
        ));
    }
    Ok(())
}

/// Waits for the end of a child, without a poll in between (`pidfd_open` and `poll`); none when
/// `timeout` ran out.
pub fn wait(child: &mut Child, timeout: Duration) -> io::Result<Option<ExitStatus>> {
    if let Some(status) = child.try_wait()? {
        return Ok(Some(status));
    }
    let pidfd = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    let deadline = Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let has_ended = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(left))?;
        if has_ended || left.is_zero() {
            return child.try_wait();
        }
    }
}

/// A child, killed and reaped when it is dropped.
pub struct Reaped(pub Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        // It may have been reaped: both calls do nothing then.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits for a child to end, and kills it when it does not.
pub fn end(child: &mut Child, patience: Duration) -> io::Result<ExitStatus> {
    if let Some(status) = wait(child, patience)? {
        return Ok(status);
    }
    child.kill()?;
    child.wait()
}

/// How a process ended, for people.
pub fn ending(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with exit code {code}"),
        (None, Some(signal)) => {
            let name = signal_hook::low_level::signal_name(signal).unwrap_or("unknown");
            format!("was killed by signal {signal} ({name})")
        }
        (None, None) => format!("ended: {status}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_that_does_not_end_is_killed_and_reaped() {
        let mut child = Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        assert_eq!(wait(&mut child, Duration::from_millis(1)).unwrap(), None);
        let status = end(&mut child, Duration::from_millis(1)).unwrap();
        assert_eq!(status.signal(), Some(9));
        assert!(ending(status).contains("SIGKILL"), "{}", ending(status));
    }

    #[test]
    fn the_end_of_a_child_is_seen() {
        let mut child = Command::new("false").spawn().unwrap();
        let status = wait(&mut child, Duration::from_secs(30)).unwrap().unwrap();
        assert_eq!(ending(status), "ended with exit code 1");
    }
}
