//! The process of an object, checked before any lock is touched: a forked child may find a lock
//! held for ever.

use warpipe::Error;

use crate::errors::Outcome;
use crate::thread_exit;

/// The process that an object was made in.
#[derive(Debug, Clone, Copy)]
pub struct Home(u32);

impl Home {
    /// The current process.
    pub fn here() -> Home {
        thread_exit::prepare_exit();
        Home(std::process::id())
    }

    /// Whether this is still the process.
    pub fn is_here(self) -> bool {
        self.0 == std::process::id()
    }

    /// An error in a forked child.
    pub fn check(self) -> Outcome<()> {
        thread_exit::prepare_exit();
        if self.is_here() {
            Ok(())
        } else {
            Err(Error::Forked.into())
        }
    }
}
