//! `poll(2)` with a limit of time.

use std::io;
use std::time::Duration;

use rustix::event::{PollFd, Timespec};
use rustix::io::Errno;

/// Waits until one of the descriptors is ready. False when none is within `limit` (none: without an
/// end), or when a signal ended the wait early.
pub fn poll(descriptors: &mut [PollFd<'_>], limit: Option<Duration>) -> io::Result<bool> {
    // A time beyond the range of the kernel's clock has no end.
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    match rustix::event::poll(descriptors, limit.as_ref()) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
