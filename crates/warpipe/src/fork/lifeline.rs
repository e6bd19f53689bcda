//! The lifeline of this process: two pipes that end when it dies. Every peer gets their read ends.
//! **This module is marked for unsafe**: it runs when the library is loaded, and in forked
//! children.
//!
//! A readable pidfd proves that a process has exited, not that its GPU is quiet: a forked child
//! that holds the driver's files keeps the parent's kernels running. So the lifeline is kept and
//! released as those files are: close-on-exec, and inherited by `fork`. The *end* proves that the
//! driver's files are released, because the kernel releases descriptors in flight after all others.
//! The *alarm* ends earlier; it shows that the process is ending, and proves nothing.
//! `docs/design/recovery.md`, "The lifeline", has the reasons and the measured order.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI32, AtomicU64};
use std::sync::{Arc, Mutex};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType,
};
use rustix::pipe::PipeFlags;

use super::fd_table::{FileId, identity};
use super::per_process::PerProcess;
use super::{CloseOnForkFd, NoForkSection};
use crate::os::{self, above_standard, descriptor_limit};

/// The read ends of the pipes.
#[derive(Debug)]
pub(crate) struct Lifeline {
    /// Its end of file proves the death. Its write end lies in flight (`SCM_RIGHTS`, never
    /// received) in the queue of a socket that the process keeps. A process that exits, or calls
    /// `exec`, releases all of its files in one pass of `task_work`; the socket's release drops its
    /// queue, and the descriptors in flight are released in the next pass.
    pub(crate) end: CloseOnForkFd,
    /// Its end of file makes the process suspect. Its write end is an ordinary descriptor with a
    /// high number, which is released early.
    pub(crate) alarm: CloseOnForkFd,
}

/// The alarm gets the first number that is free from here on, or below a lower limit of the
/// process.
const ALARM_FROM: u64 = 1000;

/// A table of descriptors with this much room is not made larger for the alarm: a number near its
/// end is above the driver's files.
const ROOM_ENOUGH: u64 = 256;

/// A descriptor that forked children inherit until [`release_in_child`], identified by its file: a
/// program that closes descriptors that it does not own may have closed it, and another file may
/// have the number.
struct InheritedFd {
    fd: AtomicI32,
    device: AtomicU64,
    inode: AtomicU64,
}

impl InheritedFd {
    const fn none() -> InheritedFd {
        InheritedFd {
            fd: AtomicI32::new(-1),
            device: AtomicU64::new(0),
            inode: AtomicU64::new(0),
        }
    }

    fn set(&self, fd: OwnedFd) {
        self.set_identity(identity(fd.as_raw_fd()).unwrap_or_default());
        self.fd.store(fd.into_raw_fd(), Relaxed);
    }

    fn set_identity(&self, file: FileId) {
        self.device.store(file.device, Relaxed);
        self.inode.store(file.inode, Relaxed);
    }

    /// The descriptor's number, while it still leads to the kept file.
    fn number(&self) -> Option<RawFd> {
        let fd = self.fd.load(Relaxed);
        let file = FileId {
            device: self.device.load(Relaxed),
            inode: self.inode.load(Relaxed),
        };
        (fd >= 0 && identity(fd) == Some(file)).then_some(fd)
    }

    fn close(&self) {
        let number = self.number();
        self.fd.store(-1, Relaxed);
        // SAFETY: the file is the one that was kept here, which no other code closes.
        number
            .into_iter()
            .for_each(|fd| drop(unsafe { OwnedFd::from_raw_fd(fd) }));
    }
}

/// The socket that has the end's write end in its queue, once there is a [`Lifeline`]. Written only
/// within a [`NoForkSection`], as all of these.
///
/// It has the lowest number (from 3 on) that was free when the library was loaded. With a number
/// below the driver's the proof comes as soon as the driver is done; otherwise it may come with the
/// pidfd, and is as true. A child that was forked before the write end was put in flight shares the
/// socket all the same, and so holds the descriptors that come into its queue.
static SOCKET: InheritedFd = InheritedFd::none();

/// The socket's other end, until the write end has been sent.
static SENDER: InheritedFd = InheritedFd::none();

/// The alarm's write end.
static ALARM: InheritedFd = InheritedFd::none();

static CURRENT: PerProcess<Mutex<Option<Arc<Lifeline>>>> = PerProcess::new();

impl Lifeline {
    /// The lifeline of this process. Made anew in a forked child, and after other code has closed
    /// it.
    ///
    /// # Errors
    /// `ETOOMANYREFS` when this user has too many descriptors in flight.
    pub(crate) fn of_process() -> Result<Arc<Lifeline>, Errno> {
        let section = NoForkSection::enter();
        let mut current = CURRENT.lock();
        let known = current.as_ref().filter(|_| SOCKET.number().is_some());
        let lifeline = match known {
            Some(lifeline) if ALARM.number().is_some() => return Ok(lifeline.clone()),
            // Peers that have this lifeline see the process as suspect. To close its socket would
            // be a false proof.
            Some(lifeline) => alarmed(&section, || CloseOnForkFd::duplicate(&lifeline.end))?,
            None => {
                // First, so that it gets the lowest number.
                make_sockets()?;
                alarmed(&section, || put_in_flight(&section))?
            }
        };
        let lifeline = Arc::new(lifeline);
        *current = Some(lifeline.clone());
        Ok(lifeline)
    }
}

/// Whether the socket's number is below those of the driver's files, if there are any: then the
/// proof does not wait for other files.
pub(crate) fn is_prompt() -> bool {
    let lowest = super::excluded(super::driver_files::lowest);
    SOCKET
        .number()
        .is_some_and(|number| lowest.is_none_or(|lowest| number < lowest))
}

fn pipe() -> Result<(OwnedFd, OwnedFd), Errno> {
    let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    Ok((reader, above_standard(writer)?))
}

/// A lifeline with an alarm of its own, and the end that `make` makes.
fn alarmed(
    section: &NoForkSection,
    make: impl FnOnce() -> Result<CloseOnForkFd, Errno>,
) -> Result<Lifeline, Errno> {
    let (alarm, writer) = pipe()?;
    let alarm = section.adopt(alarm)?;
    let from = alarm_from(status("FDSize:"), descriptor_limit());
    // Without such a number the alarm ends later, and is as true.
    let writer = rustix::io::fcntl_dupfd_cloexec(&writer, from).unwrap_or(writer);
    let end = make()?;
    ALARM.set(writer);
    Ok(Lifeline { end, alarm })
}

/// The lowest number for the alarm, in a process with room for `room` descriptors in its table. To
/// make the table larger while other threads use it takes 10 ms and more: the kernel waits until no
/// CPU reads the old one (`synchronize_rcu`).
fn alarm_from(room: Option<u64>, limit: u64) -> RawFd {
    let in_table = room
        .filter(|&room| room >= ROOM_ENOUGH)
        .map_or(ALARM_FROM, |room| room - 32);
    limit.saturating_sub(16).min(ALARM_FROM).min(in_table) as RawFd
}

/// A number of `/proc/self/status`.
fn status(name: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().parse().ok()
}

/// Makes the table of descriptors large enough for the alarm, where no other thread uses it yet.
fn make_room() {
    if status("Threads:") != Some(1) {
        return;
    }
    if let Some(socket) = SOCKET.number() {
        // SAFETY: it is open, and this library's (`number` has checked); no other code closes it.
        let socket = unsafe { BorrowedFd::borrow_raw(socket) };
        let from = alarm_from(None, descriptor_limit());
        // A refusal costs time later, and nothing else.
        let _ = rustix::io::fcntl_dupfd_cloexec(socket, from);
    }
}

fn pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// Makes the pair of sockets, unless it exists. Nothing is in flight.
fn make_sockets() -> Result<(), Errno> {
    if SOCKET.number().is_some() && SENDER.number().is_some() {
        return Ok(());
    }
    SOCKET.close();
    SENDER.close();
    let (socket, sender) = pair()?;
    // In this order, so that the socket gets the lowest number.
    SOCKET.set(above_standard(socket)?);
    SENDER.set(above_standard(sender)?);
    Ok(())
}

/// Makes the end, and puts its write end into the socket's queue. This is the last step, so a
/// failure leaves nothing in flight. Called for the first link: descriptors in flight count for the
/// user, in all its processes together (`RLIMIT_NOFILE`), and loading the library must use none.
fn put_in_flight(section: &NoForkSection) -> Result<CloseOnForkFd, Errno> {
    let (end, writer) = pipe()?;
    let end = section.adopt(end)?;
    let sender = SENDER.number().ok_or(Errno::BADF)?;
    // SAFETY: it is open, and this library's (`number` has checked); no other code closes it.
    let sender = unsafe { BorrowedFd::borrow_raw(sender) };
    send(sender, writer.as_fd())?;
    SENDER.close();
    Ok(end)
}

fn send(sender: BorrowedFd<'_>, fd: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    rights.push(SendAncillaryMessage::ScmRights(&fds));
    let byte = [IoSlice::new(&[0])];
    rustix::net::sendmsg(sender, &byte, &mut rights, SendFlags::NOSIGNAL).map(drop)
}

/// A socket with a copy of the descriptor in its queue: a process that ends releases the copy
/// behind its other files. Called within a [`NoForkSection`], or by a fork.
pub(crate) fn in_flight(fd: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let (socket, sender) = pair()?;
    send(sender.as_fd(), fd).map(|()| socket)
}

/// In a parent, after a fork: puts the write end in flight once more, in a socket of its own under
/// the old number, and closes the one that it shares with the child. Otherwise the child's release
/// may close the last copy of the shared socket while the parent is about to exit and has closed
/// the socket, but not yet the driver's files, which have higher numbers. Makes system calls and
/// uses atomics only. No other thread forks meanwhile, nor is in a [`NoForkSection`].
pub(super) fn separate_from_child() {
    // A failure leaves the shared socket in place. A socket with an empty queue stays shared.
    if let Some(number) = SOCKET.number().filter(|_| SENDER.number().is_none()) {
        let _ = move_to_own_socket(number);
    }
}

fn move_to_own_socket(number: RawFd) -> Result<(), Errno> {
    // SAFETY: it is open, and this library's (`number` has checked); no other code closes it.
    let shared = unsafe { BorrowedFd::borrow_raw(number) };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut rights = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    rustix::net::recvmsg(shared, &mut [IoSliceMut::new(&mut [0])], &mut rights, flags)?;
    let writer = os::received_fds(&mut rights).next().ok_or(Errno::BADF)?;
    let own = in_flight(writer.as_fd())?;
    let file = identity(own.as_raw_fd()).ok_or(Errno::BADF)?;
    // SAFETY: replaces the shared socket, which is this library's.
    if unsafe { libc::dup3(own.as_raw_fd(), number, libc::O_CLOEXEC) } != number {
        return Err(Errno::BADF);
    }
    SOCKET.set_identity(file);
    Ok(())
}

/// In a forked child, once it holds none of the driver's files: only the parent holds the parent's
/// end any more. Makes system calls and uses atomics only.
pub(super) fn release_in_child() {
    ALARM.close();
    SENDER.close();
    SOCKET.close();
}

/// In a forked child that still holds the driver's files: its copy of the socket stays, untracked,
/// until the child ends or calls `exec`. Only the parent keeps the alarm: the parent may call
/// `exec`, and then only the alarm shows it.
pub(super) fn keep_in_child() {
    ALARM.close();
    SENDER.close();
    SOCKET.fd.store(-1, Relaxed);
}

/// Runs when the library is loaded, before any code can have started CUDA through it.
extern "C" fn on_load() {
    // If this fails for want of room, the first link makes the lifeline's sockets.
    let _ = super::excluded(|| make_sockets().map(|()| make_room()));
}

// Miri does not support some of its calls, and would stop here in every program.
#[cfg(not(miri))]
#[used]
#[unsafe(link_section = ".init_array")]
static ON_LOAD: extern "C" fn() = on_load;

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;
    use crate::hostile::alone;

    fn has_ended(fd: &impl AsFd) -> bool {
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        poll(&mut [PollFd::new(fd, PollFlags::empty())], Some(&now)).unwrap() == 1
    }

    #[test]
    fn it_is_one_for_a_process_and_its_ends_are_open() {
        let lifeline = Lifeline::of_process().unwrap();
        assert!(!has_ended(&lifeline.end) && !has_ended(&lifeline.alarm));
        assert!(
            Arc::ptr_eq(&lifeline, &Lifeline::of_process().unwrap()),
            "one a process"
        );
        assert!(SOCKET.number().unwrap() < ALARM.number().unwrap() && is_prompt());
        let flags = rustix::io::fcntl_getfd(lifeline.end.as_fd()).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    }

    #[test]
    fn the_first_lifeline_does_not_make_the_table_of_descriptors_larger() {
        let test = "the_first_lifeline_does_not_make_the_table_of_descriptors_larger";
        alone(module_path!(), test, || {
            let room = || status("FDSize:").unwrap();
            let before = room();
            Lifeline::of_process().unwrap();
            assert_eq!(room(), before);
        });
    }

    #[test]
    fn the_alarm_has_a_high_number_within_the_limit_and_in_a_large_table() {
        assert_eq!(alarm_from(Some(64), 20_000), 1000);
        assert_eq!(alarm_from(None, 20_000), 1000);
        assert_eq!(alarm_from(Some(256), 20_000), 224);
        assert_eq!(alarm_from(Some(4096), 20_000), 1000);
        assert_eq!(alarm_from(Some(64), 100), 84);
        assert_eq!(alarm_from(Some(64), 3), 0);
    }

    #[test]
    fn a_program_that_closes_the_alarm_is_suspect_and_not_dead() {
        let test = "a_program_that_closes_the_alarm_is_suspect_and_not_dead";
        alone(module_path!(), test, || {
            let first = Lifeline::of_process().unwrap();
            ALARM.close();
            assert!(has_ended(&first.alarm));
            let second = Lifeline::of_process().unwrap();
            assert!(!has_ended(&first.end), "a false proof");
            assert!(!has_ended(&second.end) && !has_ended(&second.alarm));
            // To close the socket, too, is to end it.
            SOCKET.close();
            assert!(has_ended(&first.end) && has_ended(&second.end));
            let third = Lifeline::of_process().unwrap();
            assert!(!has_ended(&third.end) && !has_ended(&third.alarm));
        });
    }

    /// How many descriptors lie in the queues of this process's sockets; `None` where the kernel
    /// does not report it.
    fn count_in_flight() -> Option<usize> {
        let files = std::fs::read_dir("/proc/self/fdinfo").unwrap();
        let texts = files.filter_map(|file| std::fs::read_to_string(file.ok()?.path()).ok());
        let texts: Vec<String> = texts.collect();
        let lines = texts.iter().flat_map(|text| text.lines());
        let counts: Vec<&str> = lines
            .filter_map(|line| line.strip_prefix("scm_fds:"))
            .collect();
        let counts = counts
            .into_iter()
            .map(|count| count.trim().parse::<usize>().unwrap());
        counts
            .map(Some)
            .reduce(|sum, one| Some(sum? + one?))
            .flatten()
    }

    #[test]
    fn after_a_fork_the_parents_socket_is_its_own_and_its_lifeline_the_same() {
        let test = "after_a_fork_the_parents_socket_is_its_own_and_its_lifeline_the_same";
        alone(module_path!(), test, || {
            let lifeline = Lifeline::of_process().unwrap();
            let (number, before) = (SOCKET.number().unwrap(), count_in_flight());
            let shared = identity(number);
            // SAFETY: the child makes no call but `_exit`.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: ends the process at once.
                unsafe { libc::_exit(0) };
            }
            assert_eq!(SOCKET.number(), Some(number), "prompt as before");
            assert_ne!(identity(number), shared, "the child releases another one");
            // SAFETY: reaps our own child.
            let answer = unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
            assert_eq!(answer, child);
            assert!(!has_ended(&lifeline.end) && !has_ended(&lifeline.alarm));
            assert!(Arc::ptr_eq(&lifeline, &Lifeline::of_process().unwrap()));
            assert_eq!(count_in_flight(), before);
            SOCKET.close();
            assert!(has_ended(&lifeline.end), "nobody else has it");
        });
    }

    #[test]
    fn nothing_is_in_flight_before_the_lifeline_is_needed() {
        let test = "nothing_is_in_flight_before_the_lifeline_is_needed";
        alone(module_path!(), test, || {
            let Some(at_load) = count_in_flight() else {
                return println!("skipped: the kernel does not say");
            };
            assert_eq!(at_load, 0);
            assert!(
                SOCKET.number().is_some() && is_prompt(),
                "the number is kept"
            );
            let before = SOCKET.number();
            let _lifeline = Lifeline::of_process().unwrap();
            assert_eq!((count_in_flight(), SOCKET.number()), (Some(1), before));
        });
    }
}
