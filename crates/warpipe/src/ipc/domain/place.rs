//! The place of a name: what keeps it for its owner when its files are gone.
//!
//! Others may remove the lock file of a living owner, and the next process would make and lock
//! another one. So an owner also has a lock on the directory itself.

use std::os::fd::AsFd;
use std::time::Duration;

use super::author::Author;
use super::{Domain, EndpointName};
use crate::error::{Error, Holder, NameFault, Result};
use crate::fork::CloseOnForkFd;
use crate::origin::{hash, is_dying_or_dead};
use crate::os::{ofd_is_locked, ofd_read_lock, ofd_unlock};
use crate::runtime::heartbeat::Uptime;

/// How long a claim waits until the lock of a dying or dead owner is free.
pub(super) const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// A socket under a free lock that still answers after this long belongs to another program.
pub(super) const LIVE_AFTER: Duration = Duration::from_millis(200);

/// How long a claim waits for an owner without files to put them back, where a lock on the
/// directory may be another user's. An owner looks for its files more often.
const PUT_BACK_TIMEOUT: Duration = Duration::from_secs(4);

/// The place of a name in its domain: an OFD lock on a byte of the directory, which the name's hash
/// chooses. It lasts as long as its owner, whatever becomes of the files.
///
/// A directory cannot be opened for writing, so the lock is one for reading, which several may
/// have: the one that finds another one's has to go.
#[derive(Debug)]
pub(super) struct NamePlace {
    directory: CloseOnForkFd,
    byte: i64,
}

impl NamePlace {
    /// Whether another process has this place.
    fn is_contested(&self) -> bool {
        ofd_is_locked(self.directory.as_fd(), self.byte).unwrap_or(false)
    }

    /// Whether other users may read the directory, and so lock it: then a lock alone proves no
    /// owner.
    fn is_open_to_others(&self) -> bool {
        rustix::fs::fstat(&self.directory).is_ok_and(|stat| stat.st_mode & 0o044 != 0)
    }

    /// Takes the place, for a process that has the lock file: one that waits for that has no place,
    /// and keeps no process from the name. False if the name has an owner all the same, without a
    /// locked file. The place of a dying owner, which the file names, or of one that leaves, is
    /// free in a moment.
    pub(super) fn take(&self, author: Option<Author>) -> bool {
        let _ = ofd_read_lock(self.directory.as_fd(), self.byte);
        let is_dying_or_dead = || {
            author
                .and_then(Author::pid_here)
                .is_some_and(is_dying_or_dead)
        };
        let is_free = || (!self.is_contested()).then_some(());
        Uptime::look_within(LIVE_AFTER, is_free).is_some()
            || (is_dying_or_dead() && Uptime::look_within(EXIT_TIMEOUT, is_free).is_some())
            // It may have ended between the last look and the question.
            || is_free().is_some()
    }

    /// Gives the place up.
    pub(super) fn leave(&self) {
        let _ = ofd_unlock(self.directory.as_fd(), self.byte);
    }
}

impl Domain {
    /// The place of `name`, which is not taken by that. Where the file system has no such locks,
    /// the lock file alone keeps the name.
    pub(super) fn place(&self, name: &EndpointName) -> Result<NamePlace> {
        let directory = CloseOnForkFd::open(|| self.open_directory())
            .map_err(|error| Error::os("openat", self.inner.path.display().to_string(), error))?;
        let byte = name_byte(name.as_str());
        Ok(NamePlace { directory, byte })
    }

    /// Waits for the owner of a name that has lost its files to put them back.
    ///
    /// # Errors
    /// There is an owner.
    pub(super) fn wait_for_owner_of(&self, name: &EndpointName, place: &NamePlace) -> Result<()> {
        let taken = |holder| {
            Error::Name(NameFault::Taken {
                name: name.to_string(),
                holder,
            })
        };
        if !place.is_open_to_others() {
            return Err(taken(
                self.listener_of(name).unwrap_or(Holder { pid: None }),
            ));
        }
        match Uptime::look_within(PUT_BACK_TIMEOUT, || self.holder(name)) {
            Some(holder) => Err(taken(holder)),
            None => Ok(()),
        }
    }
}

/// The byte of a domain's directory that is locked for a name.
pub(crate) fn name_byte(name: &str) -> i64 {
    (hash(name.as_bytes()) >> 2) as i64
}
