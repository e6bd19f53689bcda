//! The lifeline of this process: what its peers see end when nothing of it runs any more, its device work included.
//! **This module is marked for unsafe**: it runs when the library is loaded, and in forked children.
//!
//! A readable pidfd proves that a process has exited, not that its GPU is quiet: a forked child that holds the driver's
//! files keeps the parent's kernels running. The lifeline is kept and released as those files are: close-on-exec, and
//! inherited by `fork`. It has two pipes, whose read ends every peer gets:
//!
//! * *end*: its write end lies in flight (`SCM_RIGHTS`, never received) in the queue of a socket that the process keeps.
//!   A process that exits, or calls `exec`, releases all of its files in one pass of `task_work`; the socket's release
//!   drops its queue, and what was in flight is released in the next pass, after every file of the first. So when this
//!   pipe reads end of file, the driver's files are released, whatever the numbers of the descriptors were.
//! * *alarm*: its write end is an ordinary descriptor with a high number, which is released early. It tells that the
//!   process is ending, and proves nothing.
//!
//! The socket has the lowest number that was free when the library was loaded. With a number below the driver's the
//! proof comes as soon as the driver is done; otherwise it may come with the pidfd, and is as true.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI32, AtomicU64};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType};
use rustix::pipe::PipeFlags;

use super::table::{File, identity};
use super::{PrivateFd, Section, generation};
use crate::os::above_standard;

/// The read ends.
#[derive(Debug)]
pub(crate) struct Lifeline {
    /// For the proof.
    pub(crate) end: PrivateFd,
    /// For the suspicion.
    pub(crate) alarm: PrivateFd,
}

/// The alarm's number is the first that is free from here on, or below a lower limit of the process.
const ALARM_FROM: u64 = 1000;

/// A descriptor that forked children inherit until [`let_go`], known by its file: a program that closes what it does not
/// own may have closed it, and the number may be another file's.
struct Kept {
    fd: AtomicI32,
    device: AtomicU64,
    inode: AtomicU64,
}

impl Kept {
    const fn none() -> Kept {
        Kept { fd: AtomicI32::new(-1), device: AtomicU64::new(0), inode: AtomicU64::new(0) }
    }

    fn set(&self, fd: OwnedFd) {
        let file = identity(fd.as_raw_fd()).unwrap_or_default();
        self.device.store(file.device, Relaxed);
        self.inode.store(file.inode, Relaxed);
        self.fd.store(fd.into_raw_fd(), Relaxed);
    }

    /// Its number, while that is the file that was kept.
    fn number(&self) -> Option<RawFd> {
        let fd = self.fd.load(Relaxed);
        let file = File { device: self.device.load(Relaxed), inode: self.inode.load(Relaxed) };
        (fd >= 0 && identity(fd) == Some(file)).then_some(fd)
    }

    fn close(&self) {
        let number = self.number();
        self.fd.store(-1, Relaxed);
        // SAFETY: the file is the one that was kept here, which nobody else closes.
        number.into_iter().for_each(|fd| drop(unsafe { OwnedFd::from_raw_fd(fd) }));
    }
}

/// The socket that has the end's write end in its queue. Written within a [`Section`] alone.
static SOCKET: Kept = Kept::none();

/// The alarm's write end. Written within a [`Section`] alone.
static ALARM: Kept = Kept::none();

/// Locked within a [`Section`] alone: no child inherits it locked.
static CURRENT: Mutex<Option<(u64, Arc<Lifeline>)>> = Mutex::new(None);

impl Lifeline {
    /// The lifeline of this process. Made anew in a forked child, and after somebody has closed it.
    pub(crate) fn of_process() -> Result<Arc<Lifeline>, Errno> {
        let section = Section::enter();
        let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((made, lifeline)) = &*current
            && *made == generation()
            && SOCKET.number().is_some()
            && ALARM.number().is_some()
        {
            return Ok(lifeline.clone());
        }
        let lifeline = Arc::new(make(&section)?);
        *current = Some((generation(), lifeline.clone()));
        Ok(lifeline)
    }
}

/// Whether the socket's number is below those of the driver's files, if there are any: then the proof does not wait for
/// other files.
pub(crate) fn is_prompt() -> bool {
    let lowest = super::excluded(super::driver_files::lowest);
    SOCKET.number().is_some_and(|number| lowest.is_none_or(|lowest| number < lowest))
}

fn make(section: &Section) -> Result<Lifeline, Errno> {
    SOCKET.close();
    ALARM.close();
    // First, so that it gets the lowest number.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (socket, sender) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let socket = above_standard(socket)?;
    let pipe = || rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK);
    let (end, end_writer) = pipe()?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    let fds = [end_writer.as_fd()];
    rights.push(SendAncillaryMessage::ScmRights(&fds));
    rustix::net::sendmsg(&sender, &[std::io::IoSlice::new(&[0])], &mut rights, SendFlags::NOSIGNAL)?;
    drop((sender, end_writer));
    let (alarm, alarm_writer) = pipe()?;
    let alarm_writer = above_standard(alarm_writer)?;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    let from = limit.saturating_sub(16).min(ALARM_FROM) as RawFd;
    // Where there is no such number it tells later, and as well.
    let high = rustix::io::fcntl_dupfd_cloexec(&alarm_writer, from).unwrap_or(alarm_writer);
    SOCKET.set(socket);
    ALARM.set(high);
    Ok(Lifeline { end: section.adopt(end)?, alarm: section.adopt(alarm)? })
}

/// In a forked child, once it holds none of the driver's files: its parent's end is the parent's alone. System calls and
/// atomics only.
pub(super) fn let_go() {
    ALARM.close();
    SOCKET.close();
}

/// In a forked child that holds the driver's files still: the copies stay, unknown, until it ends or calls `exec`.
pub(super) fn keep() {
    ALARM.fd.store(-1, Relaxed);
    SOCKET.fd.store(-1, Relaxed);
}

/// Runs when the library is loaded, before anybody can have started CUDA through it.
extern "C" fn reserve() {
    // Without room for it, it is made with the first link.
    let _ = Lifeline::of_process();
}

#[used]
#[unsafe(link_section = ".init_array")]
static RESERVE: extern "C" fn() = reserve;

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn has_ended(fd: &impl AsFd) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(fd, PollFlags::empty())], Some(&now)).unwrap() == 1
    }

    #[test]
    fn it_is_there_when_the_library_is_loaded_and_its_ends_are_open() {
        let lifeline = Lifeline::of_process().unwrap();
        assert!(!has_ended(&lifeline.end) && !has_ended(&lifeline.alarm));
        assert!(Arc::ptr_eq(&lifeline, &Lifeline::of_process().unwrap()), "one a process");
        assert!(SOCKET.number().unwrap() < ALARM.number().unwrap() && is_prompt());
        let flags = rustix::io::fcntl_getfd(lifeline.end.as_fd()).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    }
}
