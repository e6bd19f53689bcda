//! Room for the descriptors of a version: one that lies in many pieces may have more of them than a
//! process may have open.

use rustix::io::Errno;

use crate::error::{Error, Result};

/// A version of fewer pieces is not looked at: the system says so if there is no room.
const FEW: usize = 8;

/// Room that is left for everything else of the process.
const SPARE: u64 = 64;

/// Checks that this process may open `pieces` more descriptors of the weights `name`, or of their
/// holder.
///
/// # Errors
/// [`Error::Os`].
pub(super) fn check_room(pieces: usize, name: &str) -> Result<()> {
    if pieces <= FEW {
        return Ok(());
    }
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let Some(soft) = limit else { return Ok(()) };
    // Where the system does not say how many are open, it says so when there is no room.
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, |open| open.count() as u64);
    if open + pieces as u64 + SPARE <= soft {
        return Ok(());
    }
    let context = format!(
        "{pieces} pieces of {name:?}: publish a copy, which has one piece, or raise `ulimit -n` there"
    );
    Err(Error::os("open", context, Errno::MFILE))
}
