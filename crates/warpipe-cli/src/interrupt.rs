//! Ctrl-C and SIGTERM as a flag that every loop looks at: nothing is torn down in the middle.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

/// The longest that any wait goes without a look at the flag.
pub const LOOK: Duration = Duration::from_millis(100);

/// Set once by the first signal; a second one ends the process the hard way.
#[derive(Debug, Clone)]
pub struct Interrupt {
    flag: Arc<AtomicBool>,
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
        let flag = Arc::new(AtomicBool::new(false));
        for &signal in signals {
            // In this order: the first signal finds the flag unset and only sets it.
            signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&flag))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&flag)))
                .map_err(not_caught)?;
        }
        Ok(Interrupt { flag, signals })
    }

    /// A stream that is readable once a signal has come, for `poll`. The flag is set before that.
    pub fn readable(&self) -> std::io::Result<UnixStream> {
        let (read, write) = UnixStream::pair().map_err(not_caught)?;
        for &signal in self.signals {
            let write = write.try_clone().map_err(not_caught)?;
            signal_hook::low_level::pipe::register(signal, write).map_err(not_caught)?;
        }
        Ok(read)
    }

    /// Whether a signal came.
    pub fn came(&self) -> bool {
        self.flag.load(Ordering::Relaxed)
    }
}

/// Mostly the process may open no more descriptors.
fn not_caught(error: std::io::Error) -> std::io::Error {
    let text = format!(
        "signals cannot be caught: {error}; raise the limit of open descriptors (`ulimit -n`)"
    );
    std::io::Error::new(error.kind(), text)
}
