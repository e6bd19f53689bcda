//! A name that this process holds: its lock, and the socket that listens under it.
//!
//! Other programs may remove the files: a cleaner of old files, a logout, a person. So the owner
//! looks for them now and then, and puts them back. Until then its [`NamePlace`] keeps the name.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rustix::fs::Stat;

use super::lock::LockFile;
use super::place::NamePlace;
use super::{Domain, EndpointName};
use crate::error::Result;
use crate::fork::leak_on_fork::LeakOnFork;
use crate::mutex::LockUnpoisoned;
use crate::runtime::closer::Listener;

/// A name held by this process. Dropping the claim releases the name.
#[derive(Debug)]
pub(crate) struct NameClaim {
    name: EndpointName,
    is_open_to_others: bool,
    files: LeakOnFork<Mutex<Files>>,
    /// Of the directory that the files are in.
    identity: [AtomicU64; 2],
}

/// The files of a name, and where they are.
#[derive(Debug)]
struct Files {
    domain: Domain,
    place: NamePlace,
    lock: LockFile,
    listener: Arc<Listener>,
    /// The file of the listener.
    socket: Stat,
    /// They are known to have vanished, and are not back yet.
    are_missing: bool,
    is_withdrawn: bool,
}

/// What a [look](NameClaim::look) at the files of a name found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FilesSeen {
    /// They are there, or as the last look found them.
    Unchanged,
    /// They had vanished, and are back, with a new listener.
    PutBack,
    /// They have vanished since the last look, and cannot be put back for now.
    Vanished,
}

impl NameClaim {
    pub(super) fn new(
        domain: &Domain,
        name: &EndpointName,
        is_open_to_others: bool,
    ) -> Result<NameClaim> {
        Ok(NameClaim {
            identity: domain.identity().map(AtomicU64::new),
            name: name.clone(),
            is_open_to_others,
            files: LeakOnFork::new(Mutex::new(Files::make(domain, name, is_open_to_others)?)),
        })
    }

    /// The [identity](Domain::identity) of the domain that the name is in now, by the last look.
    pub(crate) fn domain_identity(&self) -> [u64; 2] {
        self.identity
            .each_ref()
            .map(|word| word.load(Ordering::Relaxed))
    }

    /// The socket that listens under the name.
    pub(crate) fn listener(&self) -> Arc<Listener> {
        self.files.locked().listener.clone()
    }

    #[cfg(test)]
    pub(super) fn leave_place(&self) {
        self.files.locked().place.leave();
    }

    /// Looks whether the files are there, and puts them back if not. May wait for a cleaner.
    pub(crate) fn look(&self) -> FilesSeen {
        let Ok(files) = self.files.get() else {
            return FilesSeen::Unchanged;
        };
        let mut files = files.locked();
        if files.is_withdrawn || files.are_there(&self.name) {
            return FilesSeen::Unchanged;
        }
        let is_news = !std::mem::replace(&mut files.are_missing, true);
        match files.put_back(&self.name, self.is_open_to_others) {
            Ok(()) => {
                let now = files.domain.identity();
                (self.identity.iter().zip(now))
                    .for_each(|(word, now)| word.store(now, Ordering::Relaxed));
                FilesSeen::PutBack
            }
            Err(_) if is_news => FilesSeen::Vanished,
            Err(_) => FilesSeen::Unchanged,
        }
    }

    /// Removes the endpoint's files, once. No new client can connect, and the name is free.
    pub(crate) fn withdraw(&self) {
        // In a forked child the files are still the parent's.
        let Ok(files) = self.files.get() else { return };
        let mut files = files.locked();
        if std::mem::replace(&mut files.is_withdrawn, true) {
            return;
        }
        // First: a process that finds the name free has to find its place free, too.
        files.place.leave();
        files.remove(&self.name);
    }
}

impl Drop for NameClaim {
    fn drop(&mut self) {
        self.withdraw();
    }
}

impl Files {
    fn make(domain: &Domain, name: &EndpointName, is_open_to_others: bool) -> Result<Files> {
        let place = domain.place(name)?;
        let (lock, listener, socket) =
            Files::create(domain, name, is_open_to_others, Some(&place))?;
        Ok(Files {
            domain: domain.clone(),
            place,
            lock,
            listener,
            socket,
            are_missing: false,
            is_withdrawn: false,
        })
    }

    /// Locks the name, and listens under it. An error leaves no file.
    fn create(
        domain: &Domain,
        name: &EndpointName,
        is_open_to_others: bool,
        place: Option<&NamePlace>,
    ) -> Result<(LockFile, Arc<Listener>, Stat)> {
        let lock = domain.lock(name, place)?;
        let listening = domain.listen(name, is_open_to_others);
        let (listener, socket) = listening.inspect_err(|_| lock.unlink(domain, name))?;
        Ok((lock, Arc::new(listener), socket))
    }

    fn are_there(&self, name: &EndpointName) -> bool {
        let socket = name.file("", ".sock");
        self.domain.leads_to(&socket, &self.socket) && self.lock.is_at(&self.domain, name)
    }

    /// Removes the files that are this owner's still.
    fn remove(&self, name: &EndpointName) {
        let socket = name.file("", ".sock");
        if self.domain.leads_to(&socket, &self.socket) {
            self.domain.unlink(&socket);
        }
        self.lock.unlink(&self.domain, name);
    }

    fn put_back(&mut self, name: &EndpointName, is_open_to_others: bool) -> Result<()> {
        if self.domain.is_removed() {
            // Another process may have made the directory again. This one does not: its removal may
            // have been meant.
            *self = Files::make(&self.domain.made_again(false)?, name, is_open_to_others)?;
            return Ok(());
        }
        // One file of two would stand for a dead owner, or for another program. The place keeps
        // the name meanwhile.
        self.remove(name);
        (self.lock, self.listener, self.socket) =
            Files::create(&self.domain, name, is_open_to_others, None)?;
        self.are_missing = false;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn a_process_that_waits_for_the_lock_of_a_name_keeps_nobody_from_the_name() {
        let folder = std::env::temp_dir().join(format!("warpipe-waits-{}", std::process::id()));
        let domain = Domain::at(&folder).unwrap();
        let name = EndpointName::new("a").unwrap();
        // As one that is stopped there.
        let waits = domain.place(&name).unwrap();
        domain.claim(&name, false).unwrap();
        drop(waits);
        std::fs::remove_dir(folder).unwrap();
    }

    #[test]
    fn one_at_a_time_has_a_name_that_many_take_while_others_remove_its_files() {
        let folder = std::env::temp_dir().join(format!("warpipe-many-{}", std::process::id()));
        let domain = Domain::at(&folder).unwrap();
        let name = EndpointName::new("a").unwrap();
        let (owners, at_work) = (AtomicU32::new(0), AtomicU32::new(3));
        let take = || {
            let mut most = 0;
            for _ in 0..20 {
                if let Ok(claim) = domain.claim(&name, false) {
                    most = most.max(1 + owners.fetch_add(1, Ordering::SeqCst));
                    claim.look();
                    owners.fetch_sub(1, Ordering::SeqCst);
                }
            }
            at_work.fetch_sub(1, Ordering::SeqCst);
            most
        };
        let remove = || {
            for file in ["a.lock", "a.sock", "a.lock"].iter().cycle() {
                let _ = std::fs::remove_file(folder.join(file));
                std::thread::yield_now();
                if at_work.load(Ordering::SeqCst) == 0 {
                    return;
                }
            }
        };
        let most = std::thread::scope(|scope| {
            scope.spawn(remove);
            let all = [(); 3].map(|()| scope.spawn(take));
            all.map(|one| one.join().unwrap())
        });
        assert_eq!(most.iter().max(), Some(&1), "owners at a time");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_look_leaves_a_foreign_file_and_puts_the_name_back_when_that_is_gone() {
        let folder = std::env::temp_dir().join(format!("warpipe-look-{}", std::process::id()));
        let domain = Domain::at(&folder).unwrap();
        let name = EndpointName::new("a").unwrap();
        let claim = domain.claim(&name, false).unwrap();
        let before = claim.listener();
        assert_eq!(claim.look(), FilesSeen::Unchanged);
        assert!(Arc::ptr_eq(&before, &claim.listener()));
        let socket = folder.join("a.sock");
        std::fs::remove_file(&socket).unwrap();
        std::fs::write(&socket, "somebody's").unwrap();
        assert_eq!(claim.look(), FilesSeen::Vanished, "told once");
        assert_eq!(claim.look(), FilesSeen::Unchanged);
        assert_eq!(std::fs::read(&socket).unwrap(), b"somebody's");
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
        std::fs::remove_file(&socket).unwrap();
        assert_eq!(claim.look(), FilesSeen::PutBack);
        assert_eq!(claim.look(), FilesSeen::Unchanged);
        assert!(!Arc::ptr_eq(&before, &claim.listener()));
        claim.withdraw();
        assert_eq!(claim.look(), FilesSeen::Unchanged);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
        std::fs::remove_dir(folder).unwrap();
    }
}
