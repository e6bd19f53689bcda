//! Signals to `warpipe run`, passed on to its program.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, ExitStatus};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};

use crate::job::Job;

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
            let (read, write) = UnixStream::pair()?;
            read.set_nonblocking(true)?;
            signal_hook::low_level::pipe::register(number, write)?;
            let signal = Signal::from_named_raw(number).ok_or(io::ErrorKind::InvalidInput)?;
            Ok((signal, read))
        });
        Ok(Signals(caught.collect::<io::Result<_>>()?))
    }

    /// Waits until a stream is readable, or at its end. Returns the signal that asked for this
    /// process's end before.
    pub fn wait_unless_asked_to_end(&self, stream: &impl AsFd) -> io::Result<Option<Signal>> {
        let asks = |it: &&(Signal, UnixStream)| !matches!(it.0, Signal::USR1 | Signal::USR2);
        loop {
            let mut waited = vec![PollFd::new(stream, PollFlags::IN)];
            waited.extend(
                self.0
                    .iter()
                    .filter(asks)
                    .map(|(_, read)| PollFd::new(read, PollFlags::IN)),
            );
            match poll(&mut waited, None) {
                Err(rustix::io::Errno::INTR) => continue,
                other => other?,
            };
            let came = self.0.iter().filter(asks).zip(&waited[1..]);
            let mut came = came.filter(|(_, waited)| !waited.revents().is_empty());
            return Ok(came.next().map(|((signal, _), _)| *signal));
        }
    }

    /// Waits for the program's end.
    pub fn pass_on_until_end(&self, child: &mut Child) -> io::Result<ExitStatus> {
        let pid = Pid::from_child(child);
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        loop {
            let mut waited = vec![PollFd::new(&pidfd, PollFlags::IN)];
            waited.extend(
                self.0
                    .iter()
                    .map(|(_, read)| PollFd::new(read, PollFlags::IN)),
            );
            match poll(&mut waited, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            if let Some(status) = child.try_wait()? {
                return Ok(status);
            }
            for (signal, mut read) in self.0.iter().map(|(signal, read)| (*signal, read)) {
                let mut bytes = [0; 64];
                let came = matches!(read.read(&mut bytes), Ok(1..));
                if came && !is_from_terminal(signal) {
                    // The child is not reaped, so the number is its own.
                    let _ = kill_process(pid, signal);
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
