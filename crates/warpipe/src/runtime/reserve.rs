//! Descriptors that this process holds in reserve. Where the table is full, some are given up for
//! what a peer has sent, or for a connection that is to be refused. Each tick of the reactor fills
//! the reserve up again. A connection for which even the reserve has no room is closed with
//! [`Error::Os`].

use std::sync::Mutex;

use rustix::event::{EventfdFlags, eventfd};

use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::fork::per_process::PerProcess;

/// The descriptors in reserve: most messages bring one.
pub(crate) const RESERVE_MAX: usize = 8;

static RESERVE: PerProcess<Mutex<Vec<CloseOnForkFd>>> = PerProcess::new();

/// Opens what the reserve lacks.
///
/// # Errors
/// [`Error::Os`]; what could be opened is kept.
pub(crate) fn fill() -> Result<()> {
    let mut reserve = RESERVE.lock();
    while reserve.len() < RESERVE_MAX {
        let one = CloseOnForkFd::open(|| eventfd(0, EventfdFlags::CLOEXEC));
        reserve.push(one.map_err(|error| Error::os("eventfd", "the reserve", error))?);
    }
    Ok(())
}

/// Gives up all.
pub(crate) fn give_up() {
    give(usize::MAX);
}

/// Gives up as many descriptors, or all that there are. False if there are none.
pub(crate) fn give(count: usize) -> bool {
    let mut reserve = RESERVE.lock();
    let left = reserve.len().saturating_sub(count);
    !reserve.split_off(left).is_empty()
}
