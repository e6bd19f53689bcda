//! Stops of the program, as a shell's job control makes them: the terminal is given back before, and
//! taken again afterwards.

use std::io;
use std::os::unix::net::UnixStream;

use rustix::process::{Signal, getpid, kill_current_process_group, kill_process};
use signal_hook::consts::{SIGCONT, SIGTSTP};

use crate::interrupt::{stream_of, take};
use crate::job::Job;

/// The signals of job control, each as a stream that is readable once it has come.
pub struct Stops {
    pub asked: UnixStream,
    pub continued: UnixStream,
}

impl Stops {
    pub fn catch() -> io::Result<Stops> {
        Ok(Stops {
            asked: stream_of(&[SIGTSTP])?,
            continued: stream_of(&[SIGCONT])?,
        })
    }

    /// As the terminal does for Ctrl-Z when it is not in raw mode.
    pub fn ask(&self) -> io::Result<()> {
        if is_continued_by_a_shell() {
            kill_current_process_group(Signal::TSTP)?;
        }
        Ok(())
    }

    /// Stops this process if it has been asked to, and takes the terminal over again after a stop,
    /// also after a SIGSTOP, which cannot be caught: it is as another program left it.
    pub fn obey(&self, screen: &mut super::Screen) -> io::Result<()> {
        let is_asked = take(&self.asked) && is_continued_by_a_shell();
        if is_asked {
            screen.give_back();
            kill_process(getpid(), Signal::STOP)?;
        }
        // Both streams: one stop may bring both signals.
        if take(&self.continued) || is_asked {
            screen.take()?;
        }
        Ok(())
    }
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
