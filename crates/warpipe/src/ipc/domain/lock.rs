//! The lock of a name: its owner, and the removal of files that a dead owner left.
//!
//! `NAME.lock` has two bytes that are locked (`fcntl(F_OFD_SETLK)`); a lock ends with its holder's
//! last descriptor. The owner locks [`OWNER`] as long as it has the name. A process that removes
//! files locks [`CLEARING`] for a moment, never takes [`OWNER`], and removes nothing while
//! [`OWNER`] is locked. A new owner takes [`OWNER`] first, so no further cleaner begins, then waits
//! for [`CLEARING`] and keeps it. So no cleaner costs an owner its name or removes the files of a
//! living one. A cleaner opens existing files and makes none.
//!
//! An owner also has the [`NamePlace`] of its name, which no other program can remove.

use std::os::fd::AsFd;
use std::time::Duration;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::author::{Author, LOCK_BYTES_MAX};
use super::place::{EXIT_TIMEOUT, LIVE_AFTER, NamePlace};
use super::{Domain, EndpointName};
use crate::backoff::Backoff;
use crate::error::{Error, Holder, NameFault, Result};
use crate::fork::CloseOnForkFd;
use crate::origin::is_dying_or_dead;
use crate::os::{is_shortage, ofd_is_locked, ofd_write_lock, without_size_signal};
use crate::runtime::heartbeat::Uptime;

/// The bytes that are locked; see the [module](self).
const OWNER: u8 = 0;
const CLEARING: u8 = 1;

/// Claims are retried when a dying owner or a cleaner removes the lock file under this process.
/// More retries than this are no accident.
const CLAIM_TRIES: u32 = 64;

/// How long a claim waits for a cleaner, which may be stopped while it holds the lock.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(5);

/// The mode of a lock file: any process that may read it could lock it.
const LOCK_MODE: u32 = 0o600;

/// What a lock file says, with its last author.
pub(super) enum LockState {
    Owned(Option<Author>),
    Free(Option<Author>),
    Absent,
    /// Another user's, which may not be read.
    Forbidden,
    /// This process lacks what it takes to look.
    Unknown,
}

/// An open lock file, and what it was when it was opened.
#[derive(Debug)]
pub(super) struct LockFile {
    fd: CloseOnForkFd,
    stat: Stat,
}

impl LockFile {
    fn open(
        domain: &Domain,
        name: &EndpointName,
        how: OFlags,
    ) -> std::result::Result<LockFile, Errno> {
        let flags = how | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let (file, mode) = (name.file("", ".lock"), Mode::from_raw_mode(LOCK_MODE));
        let directory = &domain.inner.directory;
        let fd = CloseOnForkFd::open(|| rustix::fs::openat(directory, &file, flags, mode))?;
        let stat = rustix::fs::fstat(&fd)?;
        Ok(LockFile { fd, stat })
    }

    fn is_regular(&self) -> bool {
        FileType::from_raw_mode(self.stat.st_mode) == FileType::RegularFile
    }

    /// Locks one byte; false if another process has it.
    fn lock(&self, byte: u8) -> std::result::Result<bool, Errno> {
        match ofd_write_lock(self.fd.as_fd(), byte) {
            Ok(()) => Ok(true),
            Err(Errno::AGAIN | Errno::ACCESS) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether a process holds the name. Queried, not tried: a lock taken for a query could cost a
    /// new owner its name.
    fn is_owned(&self) -> bool {
        // If the query fails, nothing is proven.
        ofd_is_locked(self.fd.as_fd(), OWNER.into()).unwrap_or(true)
    }

    fn write_author(&self) -> std::result::Result<(), Errno> {
        let line = Author::own().line();
        without_size_signal(|| rustix::io::pwrite(&self.fd, line.as_bytes(), 0)).map(drop)
    }

    fn author(&self) -> Option<Author> {
        let mut text = [0u8; LOCK_BYTES_MAX + 1];
        let length = rustix::io::pread(&self.fd, &mut text, 0).ok()?;
        Author::parse(&text[..length])
    }

    /// Whether it says that it is this library's, or is one that its maker did not live to write.
    fn is_ours(&self) -> bool {
        let is_unwritten = self.stat.st_size == 0 && self.stat.st_mode & 0o7777 & !LOCK_MODE == 0;
        is_unwritten || self.author().is_some()
    }

    /// Whether the name still leads to this file. It may have been removed, by hand or by a cleaner
    /// of old files, and the name may be another process's.
    pub(super) fn is_at(&self, domain: &Domain, name: &EndpointName) -> bool {
        domain.leads_to(&name.file("", ".lock"), &self.stat)
    }

    /// Removes the file while both its locks are held: no other process can have the name while the
    /// name leads to this file. A process that has opened the file meanwhile sees that the name
    /// leads to another file by now.
    pub(super) fn unlink(&self, domain: &Domain, name: &EndpointName) {
        if self.is_at(domain, name) {
            domain.unlink(&name.file("", ".lock"));
        }
    }
}

impl Domain {
    /// Takes the lock of `name` for its next owner, and removes the files that a dead one left.
    /// `place` is that of the next owner; `None` for an owner that has it already, and has lost its
    /// files.
    pub(super) fn lock(&self, name: &EndpointName, place: Option<&NamePlace>) -> Result<LockFile> {
        let mut contested = place;
        let (dying, mut backoff) = (Uptime::default(), Backoff::default());
        let mut tries = 0;
        while tries < CLAIM_TRIES {
            let locked = match self.try_lock(name) {
                // Its death may be known before the lock is free.
                Err(Error::Name(NameFault::Taken {
                    holder: Holder { pid: Some(pid) },
                    ..
                })) if dying.ran() < EXIT_TIMEOUT && is_dying_or_dead(pid) => {
                    backoff.pause();
                    continue;
                }
                other => other?,
            };
            tries += 1;
            let Some(lock) = locked else { continue };
            let author = lock.author();
            if let Some(place) = contested.take()
                && !place.take(author)
            {
                if author.is_none() {
                    lock.unlink(self, name);
                }
                drop(lock);
                self.wait_for_owner_of(name, place)?;
                continue;
            }
            let shown = self.shown(&name.file("", ".lock"));
            let written = lock
                .write_author()
                .map_err(|e| Error::os("pwrite", shown, e));
            // Also when the claim fails in the end: without a lock file no cleaner would remove the
            // files that a dead owner left.
            let cleared = self.clear(name);
            // For the same reason the lock file stays.
            let stays = cleared.is_err() && author.is_some();
            let made = cleared.and(written);
            if made.is_err() && !stays {
                lock.unlink(self, name);
            }
            return made.map(|()| lock);
        }
        Err(Error::Name(NameFault::Taken {
            name: name.to_string(),
            holder: Holder { pid: None },
        }))
    }

    /// One try; `None` when the file was removed between opening and locking it.
    fn try_lock(&self, name: &EndpointName) -> Result<Option<LockFile>> {
        let file = name.file("", ".lock");
        let failed = |error| Error::os("fcntl(F_OFD_SETLK)", self.shown(&file), error);
        let lock = match LockFile::open(self, name, OFlags::RDWR | OFlags::CREATE) {
            Ok(lock) if lock.is_regular() => lock,
            Ok(_) => return Err(self.foreign(&file, "no regular file")),
            Err(Errno::LOOP) => return Err(self.foreign(&file, "a symlink")),
            Err(Errno::ISDIR) => return Err(self.foreign(&file, "a directory")),
            Err(Errno::NXIO) => return Err(self.foreign(&file, "a socket")),
            Err(error) => return Err(Error::os("openat", self.shown(&file), error)),
        };
        if !lock.lock(OWNER).map_err(failed)? {
            if !lock.is_at(self, name) {
                return Ok(None);
            }
            return Err(Error::Name(NameFault::Taken {
                name: name.to_string(),
                holder: self.holder_by(lock.author(), name),
            }));
        }
        let taken = || match lock.lock(CLEARING) {
            Ok(false) => None,
            taken => Some(taken),
        };
        let cleared = Uptime::look_within(CLEAR_TIMEOUT, taken).transpose();
        if cleared.map_err(failed)?.is_none() {
            let name = name.as_str();
            let what = format!("another process to remove what a dead owner of {name:?} left");
            return Err(Error::timeout(what, CLEAR_TIMEOUT));
        }
        if !lock.is_at(self, name) {
            return Ok(None);
        }
        // Only now, when no process of this library can be about to write it.
        if !lock.is_ours() {
            return Err(self.foreign(&file, OTHER_CONTENTS));
        }
        Ok(Some(lock))
    }

    /// Removes the files of a dead owner of `name`, if they exist and its death is proven. Returns
    /// whether this call did.
    pub(super) fn remove_dead(&self, name: &EndpointName) -> bool {
        let Ok(lock) = LockFile::open(self, name, OFlags::RDWR) else {
            return false;
        };
        // Once CLEARING is locked, a new owner waits for this lock to be released, and then checks
        // whether its file still exists.
        lock.is_regular()
            && lock.lock(CLEARING) == Ok(true)
            && !lock.is_owned()
            && lock.is_at(self, name)
            && lock.is_ours()
            && self.clear(name).is_ok()
            && rustix::fs::unlinkat(
                &self.inner.directory,
                name.file("", ".lock"),
                AtFlags::empty(),
            )
            .is_ok()
    }

    /// Whether this file is still the one behind its name.
    pub(super) fn leads_to(&self, file: &str, stat: &Stat) -> bool {
        rustix::fs::statat(&self.inner.directory, file, AtFlags::SYMLINK_NOFOLLOW)
            .is_ok_and(|now| (now.st_dev, now.st_ino) == (stat.st_dev, stat.st_ino))
    }

    /// What the lock file of a name says.
    pub(super) fn lock_state(&self, name: &EndpointName) -> LockState {
        match LockFile::open(self, name, OFlags::RDONLY) {
            Ok(lock) if lock.is_owned() => LockState::Owned(lock.author()),
            Ok(lock) => LockState::Free(lock.author()),
            Err(Errno::ACCESS | Errno::PERM) => LockState::Forbidden,
            Err(error) if is_shortage(error) => LockState::Unknown,
            Err(_) => LockState::Absent,
        }
    }

    /// Removes a dead owner's sockets. This process holds [`CLEARING`], and no other one holds
    /// [`OWNER`]: no living owner can exist.
    pub(super) fn clear(&self, name: &EndpointName) -> Result<()> {
        for file in [name.file("", ".sock"), name.new_file()] {
            match self.kind_of(&file) {
                None => {}
                Some(FileType::Socket) if self.is_dead(&file)? => self.unlink(&file),
                Some(kind) => return Err(self.foreign(&file, described(kind))),
            }
        }
        Ok(())
    }

    /// What stands in the place of the files of a name without an owner, if no owner could remove
    /// it: it is no file of this library.
    pub(super) fn foreign_file(&self, name: &EndpointName) -> Option<&'static str> {
        match self.kind_of(&name.file("", ".lock")) {
            None => {}
            Some(FileType::RegularFile) => {
                let lock = LockFile::open(self, name, OFlags::RDONLY).ok()?;
                if !lock.is_ours() {
                    return Some(OTHER_CONTENTS);
                }
            }
            Some(kind) => return Some(described(kind)),
        }
        let sockets = [name.file("", ".sock"), name.new_file()];
        let found = sockets.iter().filter_map(|file| self.kind_of(file));
        let mut others = found.filter(|kind| *kind != FileType::Socket);
        others.next().map(described)
    }

    /// The kind of a file, which is not followed.
    fn kind_of(&self, file: &str) -> Option<FileType> {
        let stat = rustix::fs::statat(&self.inner.directory, file, AtFlags::SYMLINK_NOFOLLOW);
        Some(FileType::from_raw_mode(stat.ok()?.st_mode))
    }

    /// Whether no process listens on a socket. A socket that answers is tried again for a while: a
    /// child that its dead owner had just forked holds it open until it calls `exec`.
    ///
    /// # Errors
    /// This process lacks a descriptor or memory to find that out.
    fn is_dead(&self, file: &str) -> Result<bool> {
        let dead = Uptime::look_within(LIVE_AFTER, || match self.dial(file) {
            Err(Errno::CONNREFUSED) => Some(Ok(true)),
            Err(error) if is_shortage(error) => {
                Some(Err(Error::os("connect", self.shown(file), error)))
            }
            // The socket answers, or is of another type, or its backlog is full.
            _ => None,
        });
        dead.unwrap_or(Ok(false))
    }
}

const OTHER_CONTENTS: &str = "a file with somebody else's contents";

/// A foreign file, in words.
fn described(kind: FileType) -> &'static str {
    match kind {
        FileType::Socket => "a live socket of another program",
        FileType::Fifo => "a FIFO",
        FileType::Symlink => "a symlink",
        FileType::Directory => "a directory",
        _ => "a regular file",
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use std::os::fd::AsRawFd;

    use rustix::fs::inotify;

    use super::*;

    #[test]
    fn a_claim_waits_while_a_dead_owners_files_are_removed_and_then_has_the_name() {
        let folder = std::env::temp_dir().join(format!("warpipe-clearing-{}", std::process::id()));
        let domain = Domain::at(&folder).unwrap();
        let name = EndpointName::new("a").unwrap();
        for removes in [false, true] {
            std::fs::write(folder.join("a.lock"), "warpipe 999999999 \n").unwrap();
            let lock = LockFile::open(&domain, &name, OFlags::RDWR).unwrap();
            assert_eq!(lock.lock(CLEARING), Ok(true));
            std::thread::scope(|scope| {
                let coming = scope.spawn(|| domain.claim(&name, false));
                let start = Instant::now();
                while domain.holder(&name).is_none() {
                    assert!(start.elapsed() < CLEAR_TIMEOUT);
                    std::thread::yield_now();
                }
                assert!(!domain.remove_dead(&name), "no other cleaner begins");
                if removes {
                    std::fs::remove_file(folder.join("a.lock")).unwrap();
                }
                drop(lock);
                let claim = coming.join().unwrap().expect("the name");
                assert!(!domain.remove_dead(&name));
                assert!(folder.join("a.sock").exists() && domain.clean().unwrap().is_empty());
                drop(claim);
            });
            assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
        }
        std::fs::remove_dir(folder).unwrap();
    }

    #[test]
    fn a_claim_waits_until_a_child_that_the_dead_owner_had_just_forked_closes_its_copy_of_the_lock()
    {
        let folder = std::env::temp_dir().join(format!("warpipe-copied-{}", std::process::id()));
        let domain = Domain::at(&folder).unwrap();
        let name = EndpointName::new("a").unwrap();
        let mut owner = std::process::Command::new("true").spawn().unwrap();
        owner.wait().unwrap();
        let file = folder.join("a.lock");
        std::fs::write(&file, Author::seen(owner.id() as i32).line()).unwrap();
        let copy = LockFile::open(&domain, &name, OFlags::RDWR).unwrap();
        assert_eq!(copy.lock(OWNER), Ok(true));
        let opened = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
        inotify::add_watch(&opened, &file, inotify::WatchFlags::OPEN).unwrap();
        std::thread::scope(|scope| {
            let coming = scope.spawn(|| domain.claim(&name, false));
            let mut seen = 0;
            // One that is not free has not been waited for before the second look.
            while seen < 2 && !coming.is_finished() {
                seen += usize::from(rustix::io::read(&opened, &mut [0; 16]).is_ok());
                std::thread::yield_now();
            }
            drop(copy);
            drop(coming.join().unwrap().expect("the name"));
        });
        std::fs::remove_dir(folder).unwrap();
    }

    #[test]
    fn a_close_removes_no_file_of_a_successor() {
        let folder = std::env::temp_dir().join(format!("warpipe-successor-{}", std::process::id()));
        let domain = Domain::at(&folder).unwrap();
        let name = EndpointName::new("a").unwrap();
        let remove = |file: &str| std::fs::remove_file(folder.join(file)).unwrap();
        let first = domain.claim(&name, false).unwrap();
        ["a.sock", "a.lock"].into_iter().for_each(remove);
        // As on a file system without such locks.
        first.leave_place();
        let second = domain.claim(&name, false).unwrap();
        drop(first);
        domain
            .connect(
                &name,
                crate::Kind::Publisher,
                Some(&crate::ipc::client_handshake::HandshakeLimit::of(
                    Duration::ZERO,
                )),
            )
            .unwrap();
        assert!(matches!(
            domain.claim(&name, false),
            Err(Error::Name(NameFault::Taken { .. }))
        ));
        // The socket alone is another program's.
        remove("a.sock");
        let socket = std::os::unix::net::UnixListener::bind(folder.join("a.sock")).unwrap();
        drop(second);
        assert!(folder.join("a.sock").exists() && !folder.join("a.lock").exists());
        drop(socket);
        remove("a.sock");
        // The lock file alone has been removed.
        let third = domain.claim(&name, false).unwrap();
        remove("a.lock");
        drop(third);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
        std::fs::remove_dir(folder).unwrap();
    }

    #[test]
    fn a_claim_that_fails_removes_no_lock_of_a_successor() {
        let folder =
            std::env::temp_dir().join(format!("warpipe-failed-claim-{}", std::process::id()));
        let domain = Domain::at(&folder).unwrap();
        let name = EndpointName::new("a").unwrap();
        let place = domain.place(&name).unwrap();
        let failing = domain.lock(&name, Some(&place)).unwrap();
        place.leave();
        std::fs::remove_file(folder.join("a.lock")).unwrap();
        let second = domain.claim(&name, false).unwrap();
        failing.unlink(&domain, &name);
        assert!(folder.join("a.lock").exists());
        drop(second);
        std::fs::remove_dir(folder).unwrap();
    }

    #[test]
    fn a_lock_file_that_cannot_be_written_does_not_stay() {
        crate::hostile::alone(
            module_path!(),
            "a_lock_file_that_cannot_be_written_does_not_stay",
            || {
                let folder =
                    std::env::temp_dir().join(format!("warpipe-unwritten-{}", std::process::id()));
                let domain = Domain::at(&folder).unwrap();
                let name = EndpointName::new("a").unwrap();
                let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize);
                let none = rustix::process::Rlimit {
                    current: Some(0),
                    ..limit
                };
                rustix::process::setrlimit(rustix::process::Resource::Fsize, none).unwrap();
                let claimed = domain.claim(&name, false).map(drop);
                rustix::process::setrlimit(rustix::process::Resource::Fsize, limit).unwrap();
                assert!(
                    matches!(claimed, Err(Error::Os { call: "pwrite", .. })),
                    "{claimed:?}"
                );
                assert!(domain.endpoints().unwrap().is_empty());
                std::fs::remove_dir(folder).unwrap();
            },
        );
    }

    #[test]
    fn a_claim_without_a_free_descriptor_fails_and_leaves_the_dead_owners_files_removable() {
        let test =
            "a_claim_without_a_free_descriptor_fails_and_leaves_the_dead_owners_files_removable";
        crate::hostile::alone(module_path!(), test, || {
            let folder =
                std::env::temp_dir().join(format!("warpipe-lacking-{}", std::process::id()));
            let domain = Domain::at(&folder).unwrap();
            let name = EndpointName::new("a").unwrap();
            std::fs::write(folder.join("a.lock"), "warpipe 999999999 \n").unwrap();
            drop(std::os::unix::net::UnixListener::bind(folder.join("a.sock")).unwrap());
            let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
            // Two more can be made: the place's and the lock's.
            let free = [(); 2]
                .map(|()| rustix::io::fcntl_dupfd_cloexec(&domain.inner.directory, 3).unwrap());
            let last = rustix::process::Rlimit {
                current: Some(free[1].as_raw_fd() as u64 + 1),
                ..limit
            };
            drop(free);
            rustix::process::setrlimit(rustix::process::Resource::Nofile, last).unwrap();
            let claimed = domain.claim(&name, false).map(drop);
            let last = rustix::process::Rlimit {
                current: last.current.map(|limit| limit - 1),
                ..limit
            };
            rustix::process::setrlimit(rustix::process::Resource::Nofile, last).unwrap();
            let is_cleared = domain.clean_name(&name);
            let none = rustix::process::Rlimit {
                current: Some(0),
                ..limit
            };
            rustix::process::setrlimit(rustix::process::Resource::Nofile, none).unwrap();
            let is_cleared_at_once = domain.clean_name(&name);
            rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
            assert!(
                !is_cleared && !is_cleared_at_once,
                "what it could not see is kept"
            );
            assert!(
                claimed.as_ref().is_err_and(Error::is_descriptor_limit),
                "{claimed:?}"
            );
            assert_eq!(domain.clean().unwrap(), [name]);
            assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
            std::fs::remove_dir(folder).unwrap();
        });
    }

    #[test]
    fn a_process_without_a_free_descriptor_takes_no_owner_for_dead_and_no_domain_for_unfit() {
        let test =
            "a_process_without_a_free_descriptor_takes_no_owner_for_dead_and_no_domain_for_unfit";
        crate::hostile::alone(module_path!(), test, || {
            let folder = std::env::temp_dir().join(format!("warpipe-blind-{}", std::process::id()));
            let domain = Domain::at(&folder).unwrap();
            let name = EndpointName::new("a").unwrap();
            let claim = domain.claim(&name, false).unwrap();
            let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
            let none = rustix::process::Rlimit {
                current: Some(0),
                ..limit
            };
            rustix::process::setrlimit(rustix::process::Resource::Nofile, none).unwrap();
            let (holder, opened) = (domain.holder(&name), Domain::at(&folder).map(drop));
            rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
            assert_eq!(holder, Some(crate::error::Holder { pid: None }));
            assert!(
                opened.as_ref().is_err_and(Error::is_descriptor_limit),
                "{opened:?}"
            );
            drop(claim);
            std::fs::remove_dir(folder).unwrap();
        });
    }
}
