//! Names and their owners: a domain is a directory, an endpoint is a socket in it.
//!
//! Beside the socket `NAME.sock` lies `NAME.lock`, on which the living owner holds an OFD lock
//! (`fcntl(F_OFD_SETLK)`). The lock ends with its owner's last descriptor, so a socket with a free
//! lock was left by a dead process, and only such files are removed. Any other file stays: a lock
//! is this library's if it says so (`warpipe PID NAMESPACE`), or is empty with the mode that only
//! this library gives it; a socket is dead if the kernel refuses a connection to it.
//!
//! All paths are walked from the directory's own descriptor, verified when it is opened
//! (`O_DIRECTORY | O_NOFOLLOW`, owner, mode), so no other process can swap the directory
//! underneath. A directory that was removed is opened and verified again. That of an own domain is
//! locked (`flock(LOCK_SH)`), so that systemd-tmpfiles leaves what is in use alone; that of another
//! user's is opened with `O_PATH`, since it may let others pass and not read.

mod author;
mod claim;
mod endpoint_name;
mod lock;
mod place;
pub(crate) mod watch;

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

pub(crate) use self::author::Author;
pub(crate) use self::claim::{FilesSeen, NameClaim};
pub(crate) use self::endpoint_name::DERIVED_NAME_BYTES_MAX;
pub use self::endpoint_name::{EndpointName, NAME_BYTES_MAX};
use self::lock::LockState;
#[cfg(test)]
pub(crate) use self::place::name_byte;
pub(crate) use self::watch::Arrivals;
use crate::error::{Error, Holder, NameFault, Result};
use crate::fork::CloseOnForkFd;
use crate::ipc::Kind;
use crate::ipc::client_handshake::HandshakeLimit;
use crate::os;
use crate::runtime::closer::{Listener, PeerSocket};
use crate::runtime::doorbell::LocalDoorbell;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 128;

/// The directory in which names live. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Domain {
    inner: Arc<DomainInner>,
}

#[derive(Debug)]
struct DomainInner {
    path: PathBuf,
    directory: OwnedFd,
    owner: u32,
    /// How often the directory was read.
    #[cfg(test)]
    reads: std::sync::atomic::AtomicUsize,
}

/// An endpoint that [`Domain::endpoints`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Endpoint {
    /// The endpoint's name.
    pub name: EndpointName,
    /// The living owner; `None` for an endpoint that a dead process left. For another user's
    /// endpoint, the process that listens there.
    pub holder: Option<Holder>,
    /// What stands in the place of the endpoint's files, if that is something else, which keeps
    /// owners away: for example `a symlink`.
    pub foreign: Option<&'static str>,
}

impl Domain {
    /// The domain of the environment: `$WARPIPE_DOMAIN`, else `$XDG_RUNTIME_DIR/warpipe`, else
    /// `/run/user/UID/warpipe`, else `/tmp/warpipe-UID`. An empty variable counts as none, and so
    /// does an `XDG_RUNTIME_DIR` that is relative or another user's.
    ///
    /// # Errors
    /// [`Error::Name`] when the directory cannot be made or trusted, or `WARPIPE_DOMAIN` is
    /// relative.
    pub fn from_environment() -> Result<Domain> {
        Domain::at(Domain::environment_path()?)
    }

    /// The directory of [`from_environment`](Self::from_environment), which may not exist. For a
    /// program that looks at a domain and makes none: [`of_user`](Self::of_user) opens it.
    ///
    /// # Errors
    /// [`Error::Name`]: `WARPIPE_DOMAIN` is relative.
    #[doc(hidden)] // For the command line.
    pub fn environment_path() -> Result<PathBuf> {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        if let Some(path) = variable("WARPIPE_DOMAIN").map(PathBuf::from) {
            if path.is_absolute() {
                return Ok(path);
            }
            let reason = "WARPIPE_DOMAIN has to be an absolute path: each process would find \
                          another directory from its own";
            return Err(unusable(&path, reason.into()));
        }
        let uid = rustix::process::geteuid().as_raw();
        let of_session = variable("XDG_RUNTIME_DIR").map(PathBuf::from);
        let of_user = PathBuf::from(format!("/run/user/{uid}"));
        // `sudo -E` keeps the variable of the user, who owns that directory.
        let is_own = |path: &PathBuf| {
            let found = std::fs::metadata(path);
            path.is_absolute() && found.is_ok_and(|it| it.is_dir() && it.uid() == uid)
        };
        let runtime = of_session.into_iter().chain([of_user]).find(is_own);
        Ok(match runtime {
            Some(runtime) => runtime.join("warpipe"),
            None => PathBuf::from(format!("/tmp/warpipe-{uid}")),
        })
    }

    /// A domain of this user. Makes the directory with mode 0700 if it does not exist.
    ///
    /// # Errors
    /// [`Error::Name`]: a symlink, no directory, another owner, writable by group or others.
    pub fn at(path: impl AsRef<Path>) -> Result<Domain> {
        Domain::owned_by(path.as_ref(), rustix::process::geteuid().as_raw(), true)
    }

    /// A domain of another user, with endpoints that may admit this one. Trusts that user's names.
    ///
    /// # Errors
    /// As for [`Domain::at`].
    pub fn of_user(path: impl AsRef<Path>, owner_uid: u32) -> Result<Domain> {
        Domain::owned_by(path.as_ref(), owner_uid, false)
    }

    fn owned_by(path: &Path, owner: u32, create: bool) -> Result<Domain> {
        // Absolute: it is opened again if the directory is removed. Without a trailing `/` or `/.`,
        // behind which the kernel would follow a symlink in spite of O_NOFOLLOW.
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let path: &Path = &path.components().collect::<PathBuf>();
        let fail = |reason| unusable(path, reason);
        if create {
            match rustix::fs::mkdir(path, Mode::RWXU) {
                // A umask such as 0177 has taken this user's own rights.
                Ok(()) => _ = rustix::fs::chmod(path, Mode::RWXU),
                Err(Errno::EXIST) => {}
                Err(error) => return Err(fail(format!("it cannot be made: {error}"))),
            }
        }
        let is_own = owner == rustix::process::geteuid().as_raw();
        let directory = open_domain(path, is_own)?;
        let stat = rustix::fs::fstat(&directory).map_err(|e| fail(format!("fstat: {e}")))?;
        let failed = |error| Error::os("open", "/proc/self/uid_map", error);
        if os::is_unmapped_user(owner).map_err(failed)? {
            return Err(fail(format!(
                "uid {owner} stands for every user that this user namespace does not map"
            )));
        }
        if stat.st_uid != owner {
            return Err(fail(format!(
                "uid {} owns it, not uid {owner}",
                stat.st_uid
            )));
        }
        if stat.st_mode & 0o022 != 0 {
            return Err(fail(format!(
                "group or others may write to it (mode {:o})",
                stat.st_mode & 0o7777
            )));
        }
        let inside = rustix::fs::statat(&directory, ".", AtFlags::empty());
        if !is_own && inside.is_err_and(|error| error == Errno::ACCESS) {
            return Err(no_way_through(path));
        }
        if is_own {
            // A file system without such locks has no cleaner that heeds them.
            let _ = rustix::fs::flock(&directory, FlockOperation::NonBlockingLockShared);
        }
        Ok(Domain {
            inner: Arc::new(DomainInner {
                path: path.to_owned(),
                directory,
                owner,
                #[cfg(test)]
                reads: Default::default(),
            }),
        })
    }

    /// How often the directory was read, through this handle and its clones.
    #[cfg(test)]
    pub(crate) fn reads(&self) -> usize {
        self.inner.reads.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// The device and the inode of the directory: the same for every process that uses it.
    pub(crate) fn identity(&self) -> [u64; 2] {
        let now = self.current();
        rustix::fs::fstat(&now.inner.directory).map_or([0; 2], |stat| [stat.st_dev, stat.st_ino])
    }

    /// Every endpoint in the domain, of living and of dead processes, sorted by name.
    ///
    /// # Errors
    /// [`Error::Os`] when the directory cannot be read.
    pub fn endpoints(&self) -> Result<Vec<Endpoint>> {
        let now = self.current();
        let names = now.names()?;
        Ok(names
            .into_iter()
            .map(|name| {
                let holder = now.holder(&name);
                let foreign = holder.is_none().then(|| now.foreign_file(&name)).flatten();
                Endpoint {
                    holder,
                    foreign,
                    name,
                }
            })
            .collect())
    }

    /// Removes the files of dead endpoints, and no other. Returns their names.
    ///
    /// # Errors
    /// [`Error::Os`] when the directory cannot be read.
    pub fn clean(&self) -> Result<Vec<EndpointName>> {
        let now = self.current();
        let mut names = now.names()?;
        names.retain(|name| now.clean_name(name));
        Ok(names)
    }

    /// Removes the files of one dead endpoint, as [`clean`](Self::clean) does. Returns whether this
    /// call removed them: not if a process holds the name, or if they are no files of this library.
    #[doc(hidden)] // For the command line.
    pub fn clean_name(&self, name: &EndpointName) -> bool {
        self.current().remove_dead(name)
    }

    /// What dead processes have left, by the author in the lock files: the endpoints that name one
    /// of these, and are held by none. A false author, or a number reused by now, does no harm: as
    /// in [`clean`](Self::clean), no file is removed while its lock is held. One pass, which opens
    /// every lock, however many the dead are.
    pub(crate) fn left_by(
        &self,
        dead: &HashSet<Author>,
    ) -> Result<HashMap<Author, Vec<EndpointName>>> {
        let now = self.current();
        let mut left: HashMap<Author, Vec<EndpointName>> = HashMap::new();
        for name in now.names()? {
            if let LockState::Free(Some(author)) = now.lock_state(&name)
                && dead.contains(&author)
            {
                left.entry(author).or_default().push(name);
            }
        }
        Ok(left)
    }

    /// Every name in the domain, sorted, whether its owner lives or not.
    pub(crate) fn names(&self) -> Result<Vec<EndpointName>> {
        let mut names: Vec<_> = self
            .files()?
            .iter()
            .filter_map(|file| EndpointName::from_file(file))
            .collect();
        names.sort();
        names.dedup();
        Ok(names)
    }

    /// The names, of living or dead processes, that are `prefix` and one further part or piece of a
    /// part.
    pub(crate) fn names_after(&self, prefix: &str) -> Result<Vec<EndpointName>> {
        let names = self
            .files()?
            .into_iter()
            .filter(|file| file.ends_with(".sock"));
        let names = names.filter_map(|file| EndpointName::from_file(&file));
        let is_meant = |name: &EndpointName| {
            name.as_str()
                .strip_prefix(prefix)
                .is_some_and(|rest| !rest.contains('/'))
        };
        Ok(names.filter(is_meant).collect())
    }

    fn files(&self) -> Result<Vec<String>> {
        #[cfg(test)]
        self.inner
            .reads
            .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let failed = |e| Error::os("getdents", self.inner.path.display().to_string(), e);
        let directory = match self.current().open_directory() {
            Err(Errno::ACCESS) => {
                let path = self.inner.path.display();
                let text = "its folder lets others open names; to list them they need chmod 755";
                return Err(Error::denied(path, text));
            }
            opened => opened.map_err(failed)?,
        };
        let mut files = Vec::new();
        for entry in rustix::fs::Dir::new(directory).map_err(failed)? {
            if let Ok(file) = entry.map_err(failed)?.file_name().to_str() {
                files.push(file.to_owned());
            }
        }
        Ok(files)
    }

    /// The directory, opened once more, for reading.
    fn open_directory(&self) -> std::result::Result<OwnedFd, Errno> {
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::RDONLY;
        let opened = rustix::fs::openat(&self.inner.directory, ".", flags, Mode::empty());
        opened.and_then(os::above_standard)
    }

    /// Whether the directory itself has been removed.
    fn is_removed(&self) -> bool {
        rustix::fs::fstat(&self.inner.directory).is_ok_and(|stat| stat.st_nlink == 0)
    }

    /// This domain, or the one that another process has made in its place since its directory was
    /// removed. A method of several steps calls this once, so that all are in one directory.
    fn current(&self) -> Domain {
        let is_removed = self.is_removed();
        let made_again = is_removed.then(|| self.made_again(false));
        made_again
            .and_then(Result::ok)
            .unwrap_or_else(|| self.clone())
    }

    /// The domain that lies in the place of this one, which was [removed](Self::is_removed).
    fn made_again(&self, create: bool) -> Result<Domain> {
        Domain::owned_by(&self.inner.path, self.inner.owner, create)
    }

    /// The holder of a name, if there is one. Where another user's lock file may not be read, its
    /// socket shows the holder.
    pub(crate) fn holder(&self, name: &EndpointName) -> Option<Holder> {
        let now = self.current();
        match now.lock_state(name) {
            LockState::Owned(author) => Some(now.holder_by(author, name)),
            LockState::Free(_) | LockState::Absent => None,
            LockState::Forbidden => now.listener_of(name),
            // Nothing is proven dead by a process that cannot look.
            LockState::Unknown => Some(Holder { pid: None }),
        }
    }

    /// The holder of a name, by the author of its lock. The author's number counts in its own PID
    /// namespace; for another namespace the kernel reports the number here.
    fn holder_by(&self, author: Option<Author>, name: &EndpointName) -> Holder {
        match author.map(Author::pid_here) {
            Some(None) => self.listener_of(name).unwrap_or(Holder { pid: None }),
            pid => Holder { pid: pid.flatten() },
        }
    }

    /// The held names, with the author of each lock. For another user's name it is the process that
    /// listens.
    pub(crate) fn held(&self) -> Result<Vec<(EndpointName, Author)>> {
        let now = self.current();
        let author = |name: &EndpointName| match now.lock_state(name) {
            LockState::Owned(author) => author,
            LockState::Forbidden => now.listener_of(name)?.pid.map(Author::seen),
            LockState::Free(_) | LockState::Absent | LockState::Unknown => None,
        };
        Ok(now
            .names()?
            .into_iter()
            .filter_map(|name| author(&name).map(|author| (name, author)))
            .collect())
    }

    /// The process that listens under a name. A socket that may not be connected to is not proven
    /// dead.
    fn listener_of(&self, name: &EndpointName) -> Option<Holder> {
        match self.dial(&name.file("", ".sock")) {
            Ok(socket) => {
                let pid = os::peer_credentials(socket.as_fd())
                    .ok()
                    .map(|peer| peer.pid);
                Some(Holder {
                    pid: pid.filter(|&pid| pid > 0),
                })
            }
            Err(Errno::CONNREFUSED | Errno::NOENT) => None,
            Err(_) => Some(Holder { pid: None }),
        }
    }

    /// The last author of the lock file of a name without an owner.
    pub(crate) fn last_holder(&self, name: &EndpointName) -> Option<Author> {
        match self.current().lock_state(name) {
            LockState::Free(author) => author,
            _ => None,
        }
    }

    /// Claims `name` for this process: its lock, and a listening socket under it. Makes the
    /// directory again if it was removed.
    pub(crate) fn claim(&self, name: &EndpointName, open_to_others: bool) -> Result<NameClaim> {
        match self.is_removed() {
            true => NameClaim::new(&self.made_again(true)?, name, open_to_others),
            false => NameClaim::new(self, name, open_to_others),
        }
    }

    /// Makes a listening socket under `name`, which appears there ready to be connected to. Returns
    /// it and its file.
    fn listen(&self, name: &EndpointName, open_to_others: bool) -> Result<(Listener, Stat)> {
        let mode = if open_to_others { 0o666 } else { 0o600 };
        let (new, file) = (name.new_file(), name.file("", ".sock"));
        let failed = |call| move |e: Errno| Error::os(call, format!("endpoint {name}"), e);
        let socket = Listener::new(seqpacket().map_err(failed("socket"))?);
        rustix::net::bind(&socket, &self.address(&new)?).map_err(failed("bind"))?;
        let ready = rustix::fs::chmodat(
            &self.inner.directory,
            &new,
            Mode::from_raw_mode(mode),
            AtFlags::empty(),
        )
        .map_err(failed("fchmodat"))
        .and_then(|()| rustix::net::listen(&socket, BACKLOG).map_err(failed("listen")))
        .and_then(|()| {
            let directory = &self.inner.directory;
            let stat = rustix::fs::statat(directory, &new, AtFlags::SYMLINK_NOFOLLOW)
                .map_err(failed("statat"))?;
            rustix::fs::renameat(directory, &new, directory, &file).map_err(failed("renameat"))?;
            Ok(stat)
        });
        let stat = ready.inspect_err(|_| self.unlink(&new))?;
        Ok((socket, stat))
    }

    /// Connects to the endpoint `name`, which is to be of that kind. Tries again within the limit
    /// while its backlog is full.
    pub(crate) fn connect(
        &self,
        name: &EndpointName,
        kind: Kind,
        limit: Option<&HandshakeLimit<'_>>,
    ) -> Result<PeerSocket> {
        let file = name.file("", ".sock");
        let now = self.current();
        let mut backoff = crate::backoff::Backoff::default();
        let error = loop {
            match now.dial(&file) {
                Ok(socket) => return Ok(socket),
                Err(Errno::AGAIN) if limit.is_some_and(|limit| !limit.left().is_zero()) => {
                    backoff.pause()
                }
                Err(error) => break error,
            }
        };
        Err(match error {
            Errno::NOENT | Errno::CONNREFUSED => Error::NotFound {
                kind,
                name: name.to_string(),
                domain: self.inner.path.clone(),
                was_there: error == Errno::CONNREFUSED,
            },
            // The listener accepts no connection: it is stopped, or hung.
            Errno::AGAIN => {
                let now = HandshakeLimit::of(Duration::ZERO);
                limit.unwrap_or(&now).error(name.as_str())
            }
            Errno::ACCESS | Errno::PERM => Error::denied(name, "the socket's permissions"),
            Errno::PROTOTYPE | Errno::NOTSOCK => self.foreign(&file, "no endpoint's socket"),
            error => Error::os("connect", format!("endpoint {name}"), error),
        })
    }

    fn dial(&self, file: &str) -> std::result::Result<PeerSocket, Errno> {
        let socket = PeerSocket::from(seqpacket()?);
        if let Ok(address) = self.address(file) {
            rustix::net::connect(&socket, &address)?;
            return Ok(socket);
        }
        // The path is too long for a socket's address: by a descriptor of the socket's file.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let there = CloseOnForkFd::open(|| {
            rustix::fs::openat(&self.inner.directory, file, flags, Mode::empty())
        })?;
        let path = format!("/proc/self/fd/{}", there.as_fd().as_raw_fd());
        rustix::net::connect(&socket, &SocketAddrUnix::new(path.as_str())?)?;
        Ok(socket)
    }

    /// The uid that owns the domain.
    pub(crate) fn owner(&self) -> u32 {
        self.inner.owner
    }

    /// Becomes readable when a new file appears in the directory.
    pub(crate) fn arrivals(&self) -> Result<Arrivals> {
        self.ring_at_arrivals(Arc::new(LocalDoorbell::new()?))
    }

    /// As [`arrivals`](Self::arrivals), with a doorbell that others ring, too.
    pub(crate) fn ring_at_arrivals(&self, doorbell: Arc<LocalDoorbell>) -> Result<Arrivals> {
        let now = self.current();
        let directory = &now.inner.directory;
        let stat = rustix::fs::fstat(directory)
            .map_err(|e| Error::os("fstat", "the domain's directory", e))?;
        let path = format!("/proc/self/fd/{}/.", directory.as_raw_fd());
        watch::arrivals((stat.st_dev, stat.st_ino), path.as_ref(), doorbell)
    }

    fn address(&self, file: &str) -> Result<SocketAddrUnix> {
        let path = format!("/proc/self/fd/{}/{file}", self.inner.directory.as_raw_fd());
        SocketAddrUnix::new(path.as_str()).map_err(|e| Error::os("bind", path, e))
    }

    fn unlink(&self, file: &str) {
        let _ = rustix::fs::unlinkat(&self.inner.directory, file, AtFlags::empty());
    }

    fn shown(&self, file: &str) -> String {
        self.inner.path.join(file).display().to_string()
    }

    fn foreign(&self, file: &str, found: &'static str) -> Error {
        Error::Name(NameFault::Foreign {
            path: self.inner.path.join(file),
            found,
        })
    }
}

/// The error for a directory of another user's that this one may not pass.
fn no_way_through(path: &Path) -> Error {
    Error::denied(
        path.display(),
        "its folder, or one above, lets others not pass",
    )
}

fn unusable(path: &Path, reason: String) -> Error {
    Error::Name(NameFault::Domain {
        path: path.to_owned(),
        reason,
    })
}

/// Opens the directory of a domain.
fn open_domain(path: &Path, is_own: bool) -> Result<OwnedFd> {
    let fail = |reason| unusable(path, reason);
    let access = if is_own { OFlags::RDONLY } else { OFlags::PATH };
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | access;
    match rustix::fs::open(path, flags, Mode::empty()).and_then(os::above_standard) {
        Ok(fd) => Ok(fd),
        Err(Errno::LOOP | Errno::NOTDIR) => Err(fail("it is a symlink or no directory".into())),
        // The directory may be as it should be.
        Err(error) if os::is_shortage(error) => {
            Err(Error::os("open", path.display().to_string(), error))
        }
        Err(Errno::ACCESS) if !is_own => Err(no_way_through(path)),
        Err(error) => Err(fail(format!("it cannot be opened: {error}"))),
    }
}

fn seqpacket() -> std::result::Result<CloseOnForkFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    CloseOnForkFd::open(|| {
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
    })
}
