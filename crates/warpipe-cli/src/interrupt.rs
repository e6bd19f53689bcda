//! Ctrl-C and SIGTERM as a flag that every loop looks at: nothing is torn down in the middle.
//! **This module is marked for unsafe**: it installs a signal handler.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGXFSZ};
use warpipe::{Error, Wait};

use crate::exit::Exit;

/// The longest that any wait goes without a look at the flag.
pub const LOOK: Duration = Duration::from_millis(100);

/// Signals within this time are one request: `timeout` signals its child, and then the group that
/// the child is in.
const ONE_REQUEST: Duration = Duration::from_secs(1);

/// Has a file that grows beyond `RLIMIT_FSIZE` be an error, which says what to do: by default it is
/// `SIGXFSZ`, which ends the process without a word. Has children be waited for, also where the
/// program that started this one ignores `SIGCHLD`. A program that this one executes has the
/// default of both.
pub fn take_signals() {
    for signal in [SIGXFSZ, SIGCHLD] {
        let _ = signal_hook::flag::register(signal, Arc::default());
    }
}

/// The time of the first signal in nanoseconds of the monotonic clock; 0 before it.
static FIRST: AtomicU64 = AtomicU64::new(0);

/// Whether a signal came that an [`Interrupt`] catches.
pub fn came() -> bool {
    FIRST.load(Ordering::Relaxed) != 0
}

/// A wait of at most this long, which such a signal ends.
pub fn within(limit: Duration) -> Wait<'static> {
    Wait::from(limit).unless(&came)
}

/// Set once by the first signal; one that comes later than [`ONE_REQUEST`] after it ends the
/// process the hard way.
#[derive(Debug, Clone)]
pub struct Interrupt {
    signals: &'static [i32],
}

impl Interrupt {
    /// Takes over SIGINT and SIGTERM.
    pub fn install() -> std::io::Result<Interrupt> {
        Interrupt::install_for(&[SIGINT, SIGTERM])
    }

    /// Takes over all signals that ask for an end, also by a terminal: for a command that has to
    /// restore it.
    pub fn install_for_terminal() -> std::io::Result<Interrupt> {
        Interrupt::install_for(&[SIGINT, SIGTERM, SIGHUP, SIGQUIT])
    }

    fn install_for(signals: &'static [i32]) -> std::io::Result<Interrupt> {
        for &signal in signals {
            // SAFETY: the handler reads a clock, uses an atomic number and may call `_exit`: all
            // are safe in a signal handler. It does not panic.
            unsafe { signal_hook::low_level::register(signal, || note(&FIRST, now())) }
                .map_err(not_caught)?;
        }
        Ok(Interrupt { signals })
    }

    /// A stream that is readable once a signal has come, for `poll`. The flag is set before that.
    pub fn readable(&self) -> std::io::Result<UnixStream> {
        stream_of(self.signals)
    }

    /// Whether a signal came.
    pub fn came(&self) -> bool {
        came()
    }

    /// Repeats a call that waits for [`LOOK`] until it returns something else than an error that
    /// passes, at most for `timeout`. None when a signal came before.
    pub fn wait<T>(
        &self,
        timeout: Duration,
        mut call: impl FnMut() -> warpipe::Result<T>,
        passes: impl Fn(&Error) -> bool,
    ) -> warpipe::Result<Option<T>> {
        let deadline = Instant::now() + timeout;
        loop {
            match call() {
                Ok(value) => return Ok(Some(value)),
                Err(error) if !passes(&error) => return Err(error),
                Err(_) if self.came() => return Ok(None),
                Err(_) if Instant::now() < deadline => {}
                Err(Error::Timeout { what, .. }) => {
                    let waited = timeout;
                    return Err(Error::Timeout { what, waited });
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Sleeps for this long. False when a signal came meanwhile, or before.
    pub fn sleep(&self, mut left: Duration) -> bool {
        while !left.is_zero() && !self.came() {
            let step = left.min(LOOK);
            std::thread::sleep(step);
            left -= step;
        }
        !self.came()
    }

    /// How a command that a signal may have ended ends.
    pub fn exit(&self) -> Exit {
        match self.came() {
            true => Exit::Interrupted,
            false => Exit::Done,
        }
    }
}

/// A stream that is readable once one of the signals has come.
pub fn stream_of(signals: &[i32]) -> std::io::Result<UnixStream> {
    let (read, write) = UnixStream::pair().map_err(not_caught)?;
    read.set_nonblocking(true)?;
    for &signal in signals {
        let write = write.try_clone().map_err(not_caught)?;
        signal_hook::low_level::pipe::register(signal, write).map_err(not_caught)?;
    }
    Ok(read)
}

/// Whether a signal has come to its stream since the last call.
pub fn take(mut stream: &UnixStream) -> bool {
    let (mut signals, mut has_come) = ([0; 64], false);
    while matches!(stream.read(&mut signals), Ok(1..)) {
        has_come = true;
    }
    has_come
}

/// The monotonic clock in nanoseconds, never 0.
fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = (time.tv_sec as u64).saturating_mul(1_000_000_000);
    seconds.saturating_add(time.tv_nsec as u64).max(1)
}

/// Notes a signal that comes `now`: in the handler.
fn note(first: &AtomicU64, now: u64) {
    if is_another_request(first, now) {
        signal_hook::low_level::exit(130);
    }
}

/// Whether a signal that comes `now` is not the first, and is no part of its request.
fn is_another_request(first: &AtomicU64, now: u64) -> bool {
    let noted = first.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
    noted.is_err_and(|first| u128::from(now.saturating_sub(first)) >= ONE_REQUEST.as_nanos())
}

/// Mostly the process may open no more descriptors.
fn not_caught(error: std::io::Error) -> std::io::Error {
    let text = format!(
        "signals cannot be caught: {error}; raise the limit of open descriptors (`ulimit -n`)"
    );
    std::io::Error::new(error.kind(), text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_long_after_the_first_is_another_request_and_those_with_it_are_the_same() {
        let (first, one) = (AtomicU64::new(0), ONE_REQUEST.as_nanos() as u64);
        assert!(!is_another_request(&first, 7));
        for (at, is_another) in [(7, false), (6 + one, false), (7 + one, true), (3, false)] {
            assert_eq!(is_another_request(&first, at), is_another, "{at}");
        }
    }
}
