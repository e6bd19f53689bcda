//! Stops of the program, as a shell's job control makes them: the terminal is given back before, and
//! taken again afterwards.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use rustix::process::{Signal, getpid, kill_current_process_group, kill_process};
use signal_hook::consts::{SIGCONT, SIGTSTP};

use crate::job::Job;

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
    let Some(this) = Job::of_this_process() else {
        return false;
    };
    // The leader's parent is the shell; the others of a pipeline may have any parent.
    let leader = Job::of(this.group).unwrap_or(this);
    Job::of(leader.parent)
        .is_some_and(|shell| shell.session == this.session && shell.group != this.group)
}
