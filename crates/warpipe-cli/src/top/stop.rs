//! Stops of the program, as a shell's job control makes them: the terminal is given back before, and
//! taken again afterwards.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use rustix::process::{
    Pid, Signal, getpgid, getpgrp, getpid, getsid, kill_current_process_group, kill_process,
};
use signal_hook::consts::{SIGCONT, SIGTSTP};

/// The signals of job control, each as a stream that is readable once it has come.
pub struct Stops {
    pub asked: UnixStream,
    pub continued: UnixStream,
}

impl Stops {
    pub fn catch() -> io::Result<Stops> {
        Ok(Stops {
            asked: readable(SIGTSTP)?,
            continued: readable(SIGCONT)?,
        })
    }

    /// As the terminal does for Ctrl-Z when it is not in raw mode.
    pub fn ask(&self) -> io::Result<()> {
        if is_continued_by_a_shell() {
            kill_current_process_group(Signal::TSTP)?;
        }
        Ok(())
    }

    /// Stops this process if it has been asked to. Returns whether it has been stopped, also by a
    /// SIGSTOP, which cannot be caught: then the terminal is as another program left it.
    pub fn obey(&self, screen: &super::Screen) -> io::Result<bool> {
        let is_asked = came(&self.asked) && is_continued_by_a_shell();
        if is_asked {
            screen.give_back();
            kill_process(getpid(), Signal::STOP)?;
        }
        // Both streams: one stop may bring both signals.
        let was_stopped = came(&self.continued) || is_asked;
        if was_stopped {
            screen.take()?;
        }
        Ok(was_stopped)
    }
}

/// A stream that is readable once the signal has come.
pub fn readable(signal: i32) -> io::Result<UnixStream> {
    let (read, write) = UnixStream::pair()?;
    read.set_nonblocking(true)?;
    signal_hook::low_level::pipe::register(signal, write)?;
    Ok(read)
}

/// Whether the signal has come since the last call.
pub fn came(stream: &UnixStream) -> bool {
    let (mut signals, mut came) = ([0; 64], false);
    while matches!(rustix::io::read(stream.as_fd(), &mut signals), Ok(1..)) {
        came = true;
    }
    came
}

/// Whether the process group has a shell that continues it. In one that has none (an orphaned one,
/// as of `ssh -t HOST warpipe top`) the kernel ignores SIGTSTP, but not the SIGSTOP of this program.
fn is_continued_by_a_shell() -> bool {
    let group = getpgrp();
    let stat = std::fs::read(format!("/proc/{}/stat", group.as_raw_pid())).unwrap_or_default();
    let stat = String::from_utf8_lossy(&stat);
    // Behind the name, which may contain anything, come the state and the parent.
    let parent = stat.rsplit_once(')').and_then(|(_, rest)| {
        let number = rest.split_ascii_whitespace().nth(1)?;
        Pid::from_raw(number.parse().ok()?)
    });
    parent.is_some_and(|parent| {
        let is_of_session = getsid(Some(parent)).is_ok_and(|it| Ok(it) == getsid(None));
        is_of_session && getpgid(Some(parent)).is_ok_and(|it| it != group)
    })
}
