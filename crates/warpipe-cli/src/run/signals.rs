//! Signals to `warpipe run`, passed on to its program.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, ExitStatus};

use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};

use crate::interrupt::{stream_of, take};
use crate::job::Job;
use crate::poll::poll;

/// Each signal with a stream that is readable once it has come.
pub struct Signals(Vec<(Signal, UnixStream)>);

impl Signals {
    /// From now on they do not end this process.
    pub fn catch() -> io::Result<Signals> {
        let all = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];
        // Ignored signals stay so, here and in the program: `nohup` and `&` of a shell ask for that.
        let ignored = ignored()?;
        let wanted = all
            .into_iter()
            .filter(|number| ignored & (1 << (number - 1)) == 0);
        let caught = wanted.map(|number| {
            let signal = Signal::from_named_raw(number).ok_or(io::ErrorKind::InvalidInput)?;
            Ok((signal, stream_of(&[number])?))
        });
        Ok(Signals(caught.collect::<io::Result<_>>()?))
    }

    /// Waits until a stream is readable, or at its end. Returns the signal that asked for this
    /// process's end before.
    pub fn wait_unless_asked_to_end(&self, stream: &impl AsFd) -> io::Result<Option<Signal>> {
        let asking = self.0.iter();
        let asking = asking.filter(|(it, _)| !matches!(*it, Signal::USR1 | Signal::USR2));
        loop {
            let mut waited = vec![PollFd::new(stream, PollFlags::IN)];
            waited.extend(
                asking
                    .clone()
                    .map(|(_, read)| PollFd::new(read, PollFlags::IN)),
            );
            if poll(&mut waited, None)? {
                let mut came = asking.zip(&waited[1..]);
                let came = came.find(|(_, waited)| !waited.revents().is_empty());
                return Ok(came.map(|((signal, _), _)| *signal));
            }
        }
    }

    /// Waits for the program's end.
    pub fn pass_on_until_end(&self, child: &mut Child) -> io::Result<ExitStatus> {
        let pid = Pid::from_child(child);
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        loop {
            let mut waited = vec![PollFd::new(&pidfd, PollFlags::IN)];
            let streams = self.0.iter().map(|(_, read)| read);
            waited.extend(streams.map(|read| PollFd::new(read, PollFlags::IN)));
            poll(&mut waited, None)?;
            if let Some(status) = child.try_wait()? {
                return Ok(status);
            }
            for (signal, read) in &self.0 {
                if take(read) && !is_from_terminal(*signal) {
                    // The child is not reaped, so the number is its own.
                    let _ = kill_process(pid, *signal);
                }
            }
        }
    }
}

/// The signals that this process ignores, one bit each.
fn ignored() -> io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.ok_or_else(|| io::Error::other("/proc/self/status names no ignored signals"))
}

/// Whether the terminal has sent the signal to the program as well: to its foreground processes.
fn is_from_terminal(signal: Signal) -> bool {
    let is_key = matches!(signal, Signal::INT | Signal::QUIT);
    is_key && Job::of_this_process().is_some_and(|job| job.is_foreground())
}
