//! The library's descriptors across `fork`. **This module is marked for unsafe**: it hooks `fork`.
//!
//! A forked child inherits every descriptor and mapping but not the reactor's threads, and its parent's
//! descriptors are *the same open files*: a child that keeps a listening socket keeps a dead parent's name
//! taken, one that keeps a link's socket hides its parent's death. So the child's side of `fork` closes what
//! is registered here, and every handle made before it answers [`Error::Forked`]. The child may open new ones
//! (on the host backend; CUDA does not survive a fork).
//!
//! A descriptor is made and registered within one [`NoForkSection`], which `fork` waits for: no child gets a descriptor
//! between the two. Nothing in a section waits for anybody.
//!
//! Two things are inherited with a purpose, and the child releases them in this order: the CUDA driver's files
//! ([`driver_files`]), then the [`lifeline`], which tells peers that nobody holds those files any more.

pub(crate) mod driver_files;
mod fd_table;
mod gate;
pub(crate) mod lifeline;
pub(crate) mod per_process;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;

use self::fd_table::{CLOSING, FileId, OPEN};
pub(crate) use self::gate::{NoForkSection, excluded};
use crate::error::{Error, Result};

/// What a system call says.
type FdResult<T> = std::result::Result<T, Errno>;

/// How many forks lie between this process and the one that first used the library.
static GENERATION: AtomicU64 = AtomicU64::new(0);

/// The process that a handle was made in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OwnerProcess(u64);

impl OwnerProcess {
    pub(crate) fn current() -> OwnerProcess {
        install();
        OwnerProcess(GENERATION.load(Ordering::Relaxed))
    }

    /// Whether this still is the process that the handle was made in.
    #[inline]
    pub(crate) fn is_current(self) -> bool {
        self.0 == GENERATION.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn check(self) -> Result<()> {
        if self.is_current() {
            Ok(())
        } else {
            Err(Error::Forked)
        }
    }
}

pub(crate) fn generation() -> u64 {
    GENERATION.load(Ordering::Relaxed)
}

/// A descriptor that a forked child does not keep.
#[derive(Debug)]
pub(crate) struct CloseOnForkFd {
    /// `None` only while dropping.
    fd: Option<OwnedFd>,
    owner_process: OwnerProcess,
}

impl CloseOnForkFd {
    /// Makes a descriptor and registers it. `make` is one system call that waits for nobody.
    pub(crate) fn open(make: impl FnOnce() -> FdResult<OwnedFd>) -> FdResult<CloseOnForkFd> {
        let section = NoForkSection::enter();
        section.adopt(make()?)
    }

    /// A close-on-exec duplicate, numbered from 3 on: `fcntl(F_DUPFD_CLOEXEC)`.
    pub(crate) fn duplicate(fd: impl AsFd) -> FdResult<CloseOnForkFd> {
        CloseOnForkFd::open(|| rustix::io::fcntl_dupfd_cloexec(fd, 3))
    }

    /// Registers what others have made, the driver for one. A fork before this call gives the child a copy.
    pub(crate) fn new(fd: OwnedFd) -> FdResult<CloseOnForkFd> {
        CloseOnForkFd::open(|| Ok(fd))
    }

    /// For who closes it elsewhere: a child that is forked from here on keeps its copy.
    pub(crate) fn release(mut self) -> OwnedFd {
        let _section = NoForkSection::enter();
        let fd = self.fd.take().expect("present until dropped");
        OPEN.clear(fd.as_raw_fd());
        fd
    }
}

impl AsFd for CloseOnForkFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("present until dropped").as_fd()
    }
}

impl Drop for CloseOnForkFd {
    fn drop(&mut self) {
        let Some(fd) = self.fd.take() else { return };
        if !self.owner_process.is_current() {
            // The child's copy was closed at the fork; the number may be somebody else's by now.
            std::mem::forget(fd);
            return;
        }
        let section = NoForkSection::enter();
        // A registered number that is closed already could be somebody else's, which a child of a fork in between would
        // close. So the file is named instead of the number. What has no name of its own (an eventfd, an epoll set)
        // closes without waiting; a socket may take as long as the descriptors in its queue do.
        let named = identity(fd.as_fd());
        let entry = named.and_then(|file| CLOSING.put(fd.as_raw_fd(), file));
        OPEN.clear(fd.as_raw_fd());
        if named.is_none() {
            return drop(fd);
        }
        drop(section);
        drop(fd);
        if let Some(entry) = entry {
            // The kernel copies a parent's descriptors before its memory: a fork that is under way must find the entry.
            let _section = NoForkSection::enter();
            CLOSING.take(entry);
        }
    }
}

/// Which file it is, without asking a file system; `None` for an anonymous inode, which all of its kind share.
pub(crate) fn identity(fd: BorrowedFd<'_>) -> Option<FileId> {
    fd_table::identity(fd.as_raw_fd())
}

fn install() {
    // Done when the library is loaded: no child finds another thread here.
    static INSTALL: Once = Once::new();
    INSTALL.call_once(|| {
        // An allocator may register handlers with its first allocation (jemalloc does), which take its locks before a
        // fork. Those of the last to register come first: were that the allocator, `before_fork` would wait for sections
        // that wait for its locks. So it has allocated before we register.
        drop(std::hint::black_box(Box::new(
            GENERATION.load(Ordering::Relaxed),
        )));
        gate::begin_in_this_process();
        // SAFETY: the three handlers are async-signal-safe: atomics, sleeps, and system calls. They stay
        // valid because this library is never unloaded while its handles exist.
        let code = unsafe {
            libc::pthread_atfork(
                Some(before_fork),
                Some(after_in_parent),
                Some(after_in_child),
            )
        };
        assert_eq!(code, 0, "pthread_atfork fails only without memory");
    });
}

extern "C" fn before_fork() {
    gate::close();
}

extern "C" fn after_in_parent() {
    gate::open(lifeline::separate_from_child);
}

extern "C" fn after_in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    CLOSING.close_all();
    OPEN.close_all();
    // The other way round the lifeline would end while the driver's files still keep the parent's device work going.
    if driver_files::release() {
        lifeline::release_in_child();
    } else {
        lifeline::keep_in_child();
    }
    gate::begin_anew();
}
