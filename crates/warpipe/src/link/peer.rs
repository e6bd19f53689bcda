//! The process at the other end, and the proof of its death.
//!
//! A socket that closes only makes a peer *suspect*: in which order a dying process's descriptors close is
//! nobody's promise, and its GPU may still be writing. Its pidfd becomes readable after all of them are closed,
//! the GPU's among them: that is the proof.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, PidfdFlags};

use crate::error::{Error, HandshakeFault, Result};
use crate::fork::PrivateFd;
use crate::os;

/// Who a connected socket leads to.
#[derive(Debug)]
pub(crate) struct Peer {
    /// As this PID namespace sees it; 0 when it does not.
    pub(crate) pid: i32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pidfd: PrivateFd,
}

impl Peer {
    /// Asks the kernel, not the peer: `SO_PEERCRED` and `SO_PEERPIDFD` (or `pidfd_open` before Linux 6.5).
    pub(crate) fn of(socket: BorrowedFd<'_>, name: &str) -> Result<Peer> {
        let credentials =
            os::peer_credentials(socket).map_err(|e| Error::os("getsockopt(SO_PEERCRED)", name.to_string(), e))?;
        let pidfd = PrivateFd::open(|| os::peer_pidfd(socket)).or_else(|error| match error {
            // Only where the kernel does not know the option: of a peer that is dead already the number may by now
            // be somebody else's.
            rustix::io::Errno::NOPROTOOPT => open_pidfd(credentials.pid),
            other => Err(other),
        });
        let pidfd = pidfd.map_err(|error| match error.raw_os_error() {
            libc::EMFILE | libc::ENFILE => Error::os("pidfd_open", name.to_string(), error),
            _ => Error::Handshake { name: name.to_string(), fault: HandshakeFault::Unwatchable(error.to_string()) },
        })?;
        Ok(Peer { pid: credentials.pid, uid: credentials.uid, gid: credentials.gid, pidfd })
    }

    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Whether the process is proven dead, asked of the kernel now.
    pub(crate) fn is_proven_dead(&self) -> bool {
        let mut poll = [PollFd::new(&self.pidfd, PollFlags::IN)];
        rustix::event::poll(&mut poll, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|n| n > 0)
    }
}

/// The fallback: a process that dies and is replaced between the two calls would be mistaken, so the caller's
/// socket must still be open afterwards; it is read from right after this.
fn open_pidfd(pid: i32) -> std::result::Result<PrivateFd, rustix::io::Errno> {
    let pid = Pid::from_raw(pid).ok_or(rustix::io::Errno::SRCH)?;
    PrivateFd::open(|| rustix::process::pidfd_open(pid, PidfdFlags::empty()))
}
