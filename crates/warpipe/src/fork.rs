//! What happens to this library when its process forks. **This module is marked for unsafe**: it hooks `fork`.
//!
//! A forked child inherits every descriptor and mapping but not the watcher's thread, and its parent's
//! descriptors are *the same open files*: a child that keeps a listening socket keeps a dead parent's name
//! taken, one that keeps a link's socket hides its parent's death. So the child's side of `fork` closes what
//! is registered here, and every handle made before it answers [`Error::Forked`]. The child may open new ones
//! (on the host backend; CUDA does not survive a fork).

use std::os::fd::AsFd;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::error::{Error, Result};

/// How many forks lie between this process and the one that first used the library.
static GENERATION: AtomicU64 = AtomicU64::new(0);

/// The descriptors to close in a child. A spin lock, because a child can release it again.
static LOCK: AtomicBool = AtomicBool::new(false);
static mut OPEN: Vec<RawFd> = Vec::new();

/// The process that a handle was made in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Home(u64);

impl Home {
    pub(crate) fn here() -> Home {
        install();
        Home(GENERATION.load(Ordering::Relaxed))
    }

    /// Whether this still is the process that the handle was made in.
    #[inline]
    pub(crate) fn is_here(self) -> bool {
        self.0 == GENERATION.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn check(self) -> Result<()> {
        if self.is_here() { Ok(()) } else { Err(Error::Forked) }
    }
}

pub(crate) fn generation() -> u64 {
    GENERATION.load(Ordering::Relaxed)
}

/// A descriptor that a forked child does not keep.
#[derive(Debug)]
pub(crate) struct PrivateFd {
    /// `None` only while dropping.
    fd: Option<OwnedFd>,
    home: Home,
}

impl PrivateFd {
    pub(crate) fn new(fd: OwnedFd) -> PrivateFd {
        let home = Home::here();
        let raw = fd.as_raw_fd();
        with_open(|open| open.push(raw));
        PrivateFd { fd: Some(fd), home }
    }
}

impl AsFd for PrivateFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("present until dropped").as_fd()
    }
}

impl Drop for PrivateFd {
    fn drop(&mut self) {
        let Some(fd) = self.fd.take() else { return };
        if !self.home.is_here() {
            // The child's copy was closed at the fork; the number may be somebody else's by now.
            std::mem::forget(fd);
            return;
        }
        let raw = fd.as_raw_fd();
        // The number leaves the list before it is closed, or a fork in between could close its next user.
        with_open(|open| open.retain(|&other| other != raw));
    }
}

fn with_open<R>(work: impl FnOnce(&mut Vec<RawFd>) -> R) -> R {
    lock();
    // SAFETY: LOCK gives exclusive access to OPEN; `fork` takes it too (see `before_fork`).
    let result = work(unsafe { &mut *std::ptr::addr_of_mut!(OPEN) });
    LOCK.store(false, Ordering::Release);
    result
}

fn lock() {
    while LOCK.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
        std::hint::spin_loop();
    }
}

fn install() {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(|| {
        // SAFETY: the three handlers are async-signal-safe: atomics, and `close` in the child. They stay valid
        // because this library is never unloaded while its handles exist.
        let code = unsafe { libc::pthread_atfork(Some(before_fork), Some(after_in_parent), Some(after_in_child)) };
        assert_eq!(code, 0, "pthread_atfork fails only without memory");
    });
}

extern "C" fn before_fork() {
    lock();
}

extern "C" fn after_in_parent() {
    LOCK.store(false, Ordering::Release);
}

extern "C" fn after_in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the lock is held since `before_fork`, and the child has one thread. The descriptors are the child's
    // copies, which nothing in the child uses from now on (`Home::check`); the vector's memory is kept.
    unsafe {
        let open = &mut *std::ptr::addr_of_mut!(OPEN);
        for &fd in open.iter() {
            libc::close(fd);
        }
        open.clear();
    }
    LOCK.store(false, Ordering::Release);
}
