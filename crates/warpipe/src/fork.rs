//! The library's descriptors across `fork`. **This module is marked for unsafe**: it hooks `fork`.
//!
//! The descriptors that a child inherits are *the same open files*: a child that keeps a listening
//! socket keeps a dead parent's name taken, and one that keeps a link's socket hides its parent's
//! death. So the child's side of `fork` closes every descriptor registered here, and every handle
//! made before returns [`StateFault::Forked`]. The child may open new ones (not with CUDA, which
//! does not survive a fork). A descriptor is made and registered within one [`NoForkSection`],
//! which `fork` waits for and which never waits itself. The CUDA driver's files ([`driver_files`])
//! and the [`lifeline`] are inherited on purpose; the child releases them in this order.
//!
//! A fork is three calls, at the end of this file: [`before_fork`] closes the gate ([`gate`]),
//! which waits for sections and for other threads' forks; [`after_in_parent`] gives the parent's
//! lifeline a socket that the child does not have, and opens the gate; [`after_in_child`] makes the
//! parent's handles void, closes, and releases.

pub(crate) mod driver_files;
mod fd_table;
mod gate;
pub(crate) mod leak_on_fork;
pub(crate) mod lifeline;
pub(crate) mod per_process;
pub(crate) mod thread;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;

use self::fd_table::{FileId, OPEN};
pub(crate) use self::gate::{NoForkSection, excluded};
use crate::error::{Error, Result, StateFault};

/// The result of a system call.
type FdResult<T> = std::result::Result<T, Errno>;

/// How many forks lie between this process and the one that first used the library.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// The process that a handle was made in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OwnerProcess(u64);

impl OwnerProcess {
    pub(crate) fn current() -> OwnerProcess {
        install();
        OwnerProcess(FORKS.load(Ordering::Relaxed))
    }

    /// Whether this still is the process that the handle was made in.
    #[inline]
    pub(crate) fn is_current(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn check(self) -> Result<()> {
        if self.is_current() {
            Ok(())
        } else {
            Err(Error::State(StateFault::Forked))
        }
    }
}

/// See [`FORKS`]: tells a process from those that forked it, as a number for keys.
pub(crate) fn forks() -> u64 {
    FORKS.load(Ordering::Relaxed)
}

/// A descriptor that a forked child does not keep.
#[derive(Debug)]
pub(crate) struct CloseOnForkFd {
    /// `None` only while dropping.
    fd: Option<OwnedFd>,
    owner_process: OwnerProcess,
}

impl CloseOnForkFd {
    /// Makes a descriptor and registers it. `make` is one system call that does not wait.
    pub(crate) fn open(make: impl FnOnce() -> FdResult<OwnedFd>) -> FdResult<CloseOnForkFd> {
        let section = NoForkSection::enter();
        section.adopt(make()?)
    }

    /// A close-on-exec duplicate, numbered from 3 on: `fcntl(F_DUPFD_CLOEXEC)`.
    pub(crate) fn duplicate(fd: impl AsFd) -> FdResult<CloseOnForkFd> {
        CloseOnForkFd::open(|| rustix::io::fcntl_dupfd_cloexec(fd, 3))
    }

    /// Registers a descriptor made elsewhere, by the driver for one. A fork before this call gives
    /// the child a copy.
    pub(crate) fn new(fd: OwnedFd) -> FdResult<CloseOnForkFd> {
        CloseOnForkFd::open(|| Ok(fd))
    }

    /// Has forked children close their copies. Called within a section.
    pub(crate) fn close_in_child(&self) {
        OPEN.insert(self.as_fd().as_raw_fd());
    }

    /// Whether it has not been [taken](Self::take), and this still is the process that made it.
    pub(crate) fn is_own(&self) -> bool {
        self.fd.is_some() && self.owner_process.is_current()
    }

    /// Takes the descriptor out, for an owner that is being dropped.
    pub(crate) fn take(&mut self) -> CloseOnForkFd {
        CloseOnForkFd {
            fd: self.fd.take(),
            owner_process: self.owner_process,
        }
    }

    /// Gives the descriptor to code that closes it elsewhere. A child that is forked from here on
    /// keeps its copy.
    pub(crate) fn release(mut self) -> OwnedFd {
        let _section = NoForkSection::enter();
        let fd = self.fd.take().expect("present until dropped");
        OPEN.remove(fd.as_raw_fd());
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
            // The child's copy was closed at the fork; another file may have the number by now.
            std::mem::forget(fd);
            return;
        }
        // A number that is closed stays registered for no other file, and a child has no copy of a
        // file that is being closed. Code with a `close` that may take long releases the descriptor
        // before.
        let _section = NoForkSection::enter();
        OPEN.remove(fd.as_raw_fd());
        drop(fd);
    }
}

/// The file's identity, without a call to a file system; `None` for an anonymous inode, which all
/// files of its kind share.
pub(crate) fn identity(fd: BorrowedFd<'_>) -> Option<FileId> {
    fd_table::identity(fd.as_raw_fd())
}

fn install() {
    // Done when the library is loaded, so that no child finds another thread in `call_once`.
    static INSTALL: Once = Once::new();
    INSTALL.call_once(|| {
        // An allocator may register handlers with its first allocation (jemalloc does), which take
        // its locks before a fork. `fork` calls the handlers registered last first. If the
        // allocator registered after this library, `before_fork` would wait for sections that wait
        // for the allocator's locks. So the allocator allocates here, before this library
        // registers.
        drop(std::hint::black_box(Box::new(
            FORKS.load(Ordering::Relaxed),
        )));
        // SAFETY: the three handlers are async-signal-safe: atomics, sleeps, and system calls. They
        // stay valid because this library is never unloaded while its handles exist.
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
    FORKS.fetch_add(1, Ordering::Relaxed);
    OPEN.close_all();
    // In the other order the lifeline would end while the driver's files still keep the parent's
    // device work running.
    if driver_files::release() {
        lifeline::release_in_child();
    } else {
        lifeline::keep_in_child();
    }
    gate::begin_anew();
}
