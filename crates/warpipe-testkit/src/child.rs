//! A child process, and the lines that it writes.

use std::io::{self, ErrorKind, Read as _};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

use crate::wait::{eventually, pidfd, wait_readable};

/// How long a process may take to stop: a thread of it may wait for a processor or a disk.
const STOP_LIMIT: Duration = Duration::from_secs(60);

/// A command that runs the executable of this process again.
pub fn this_program() -> Command {
    // Not the path that this was started by: a build may have replaced the file.
    Command::new("/proc/self/exe")
}

/// A child process; killed and reaped when it is dropped.
#[derive(Debug)]
pub struct ChildProcess(Child);

impl ChildProcess {
    /// Starts it.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start(command: &mut Command) -> io::Result<ChildProcess> {
        command.spawn().map(ChildProcess)
    }

    /// Its process id.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    /// Its standard input, if that is a pipe: the first call has it.
    pub fn take_stdin(&mut self) -> Option<ChildStdin> {
        self.0.stdin.take()
    }

    /// Its standard output, likewise.
    pub fn take_stdout(&mut self) -> Option<ChildStdout> {
        self.0.stdout.take()
    }

    /// Its standard error, likewise.
    pub fn take_stderr(&mut self) -> Option<ChildStderr> {
        self.0.stderr.take()
    }

    /// A descriptor that is readable once it has ended (`pidfd_open(2)`).
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn pidfd(&self) -> io::Result<OwnedFd> {
        pidfd(self.pid())
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// It has been reaped.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        Ok(kill_process(self.pid(), signal)?)
    }

    /// Stops it (SIGSTOP), and waits until all its threads have stopped: until then one of them can
    /// still answer a peer.
    ///
    /// # Errors
    /// It has ended. `TimedOut`: it runs on.
    pub fn stop(&self) -> io::Result<()> {
        self.signal(Signal::STOP)?;
        // The kernel reports a stop when the last thread has stopped. The report is left where it
        // is; a SIGCONT removes it.
        let options = WaitIdOptions::STOPPED
            | WaitIdOptions::EXITED
            | WaitIdOptions::NOHANG
            | WaitIdOptions::NOWAIT;
        let mut report = None;
        let is_over = || {
            report = waitid(WaitId::Pid(self.pid()), options).transpose();
            report.is_some()
        };
        if !eventually(STOP_LIMIT, is_over) {
            let words = format!("process {} does not stop", self.0.id());
            return Err(io::Error::new(ErrorKind::TimedOut, words));
        }
        match report.transpose()? {
            Some(report) if report.stopped() => Ok(()),
            _ => Err(io::Error::from(rustix::io::Errno::SRCH)),
        }
    }

    /// Waits for its end, and reaps it.
    ///
    /// # Errors
    /// `TimedOut`: it lives on.
    pub fn wait(&mut self, timeout: Duration) -> io::Result<ExitStatus> {
        if let Some(status) = self.0.try_wait()? {
            return Ok(status);
        }
        if !wait_readable(self.pidfd()?, timeout)? {
            let words = format!("process {} does not end within {timeout:?}", self.0.id());
            return Err(io::Error::new(ErrorKind::TimedOut, words));
        }
        self.0.wait()
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Reads lines from a pipe or a socket, each within a time limit.
#[derive(Debug)]
pub struct LineReader {
    source: std::fs::File,
    /// The part of the next line received so far.
    unread: Vec<u8>,
}

impl LineReader {
    /// Reads from this pipe or socket.
    pub fn new(source: impl Into<OwnedFd>) -> LineReader {
        LineReader {
            source: source.into().into(),
            unread: Vec::new(),
        }
    }

    /// The next line; `None` at the end, where a line that was cut off is dropped.
    ///
    /// # Errors
    /// `TimedOut`: no whole line came.
    pub fn next(&mut self, timeout: Duration) -> io::Result<Option<String>> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(end) = self.unread.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=end).collect();
                return Ok(Some(String::from_utf8_lossy(&line[..end]).into_owned()));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if !wait_readable(self.source.as_fd(), left)? {
                let words = format!("no line came within {timeout:?}");
                return Err(io::Error::new(ErrorKind::TimedOut, words));
            }
            let mut bytes = [0; 16 << 10];
            match self.source.read(&mut bytes)? {
                0 => return Ok(None),
                length => self.unread.extend_from_slice(&bytes[..length]),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::Stdio;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn a_child_that_lives_on_is_reported_and_a_killed_one_reaped() -> io::Result<()> {
        let mut child = ChildProcess::start(Command::new("cat").stdin(Stdio::piped()))?;
        let error = child.wait(Duration::from_millis(1)).err();
        assert_eq!(error.map(|error| error.kind()), Some(ErrorKind::TimedOut));
        child.signal(Signal::KILL)?;
        assert_eq!(child.wait(PATIENCE)?.signal(), Some(9));
        Ok(())
    }

    #[test]
    fn lines_come_whole_and_a_torn_one_is_dropped_at_the_end() -> io::Result<()> {
        let (mut ours, theirs) = UnixStream::pair()?;
        let mut lines = LineReader::new(theirs);
        ours.write_all(b"one\ntw")?;
        assert_eq!(lines.next(PATIENCE)?.as_deref(), Some("one"));
        let error = lines.next(Duration::from_millis(1)).err();
        assert_eq!(error.map(|error| error.kind()), Some(ErrorKind::TimedOut));
        ours.write_all(b"o\nthr")?;
        drop(ours);
        assert_eq!(lines.next(PATIENCE)?.as_deref(), Some("two"));
        assert_eq!(lines.next(PATIENCE)?, None);
        Ok(())
    }
}
