//! The system calls that `rustix` does not wrap. **This module is marked for unsafe**: it calls
//! libc.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use rustix::fs::{AtFlags, FileType, OFlags, StatxFlags};
use rustix::io::Errno;

/// The properties of a descriptor that can be read without asking a file system: a file on FUSE
/// would ask its server, which may answer as late as it likes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FdKind {
    pub(crate) file: FileType,
    /// The device of the file system, not of a device file.
    pub(crate) device: (u32, u32),
    /// The flags of its `open`.
    pub(crate) flags: OFlags,
}

/// The kind of a descriptor that a peer sent. Nothing else may be asked of it before that is known:
/// `fstat`, `fstatfs`, `poll`, `ioctl` and `mmap` may all ask a file system.
pub(crate) fn kind_of(fd: BorrowedFd<'_>) -> Result<FdKind, Errno> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let status = rustix::fs::statx(fd, c"", flags, StatxFlags::TYPE)?;
    Ok(FdKind {
        file: FileType::from_raw_mode(status.stx_mode.into()),
        device: (status.stx_dev_major, status.stx_dev_minor),
        flags: rustix::fs::fcntl_getfl(fd)?,
    })
}

/// `RLIMIT_NOFILE`, soft.
pub(crate) fn descriptor_limit() -> u64 {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    limit.current.unwrap_or(u64::MAX)
}

/// `fcntl(fd, F_OFD_SETLK)` with a write lock on one byte: it belongs to the open file description,
/// so it ends with the last descriptor of its owner, however that dies. `fcntl_locking(2)`.
pub(crate) fn ofd_write_lock(fd: BorrowedFd<'_>, byte: u8) -> Result<(), Errno> {
    ofd_set(fd, libc::F_WRLCK, byte.into())
}

/// The same with a read lock, which a descriptor for reading suffices for: that of a directory, too.
/// Others may hold read locks on the byte.
pub(crate) fn ofd_read_lock(fd: BorrowedFd<'_>, byte: i64) -> Result<(), Errno> {
    ofd_set(fd, libc::F_RDLCK, byte)
}

/// Releases the lock on one byte, for each copy of the descriptor.
pub(crate) fn ofd_unlock(fd: BorrowedFd<'_>, byte: i64) -> Result<(), Errno> {
    ofd_set(fd, libc::F_UNLCK, byte)
}

fn ofd_set(fd: BorrowedFd<'_>, kind: libc::c_int, byte: i64) -> Result<(), Errno> {
    let lock = lock_of(kind, byte);
    // SAFETY: F_OFD_SETLK reads one `flock`, which lives across the call.
    let code = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &lock) };
    if code == 0 { Ok(()) } else { Err(last_error()) }
}

/// Whether another open file description holds a lock on that byte, for reading or writing:
/// `fcntl(fd, F_OFD_GETLK)`. Takes none.
pub(crate) fn ofd_is_locked(fd: BorrowedFd<'_>, byte: i64) -> Result<bool, Errno> {
    let mut lock = lock_of(libc::F_WRLCK, byte);
    // SAFETY: F_OFD_GETLK reads and writes one `flock`, which lives across the call.
    let code = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_GETLK, &mut lock) };
    if code == 0 {
        Ok(lock.l_type != libc::F_UNLCK as libc::c_short)
    } else {
        Err(last_error())
    }
}

fn lock_of(kind: libc::c_int, byte: i64) -> libc::flock {
    // SAFETY: `flock` is plain data, for which zeros are valid (l_pid must be 0 for OFD locks).
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as _;
    lock.l_whence = libc::SEEK_SET as _;
    (lock.l_start, lock.l_len) = (byte, 1);
    lock
}

/// The credentials of the peer of a connected Unix socket: `getsockopt(SO_PEERCRED)`, `unix(7)`. A
/// user or group that this user namespace does not map is [`UNMAPPED`].
pub(crate) fn peer_credentials(socket: BorrowedFd<'_>) -> Result<libc::ucred, Errno> {
    let mut credentials = kernels_credentials(socket)?;
    if is_unmapped_user(credentials.uid)? {
        credentials.uid = UNMAPPED;
    }
    if is_unmapped(
        "/proc/sys/kernel/overflowgid",
        "/proc/self/gid_map",
        credentials.gid,
    )? {
        credentials.gid = UNMAPPED;
    }
    Ok(credentials)
}

/// The peer's uid alone, as the kernel counts it in this user namespace, whether it is mapped or
/// not.
pub(crate) fn peer_uid(socket: BorrowedFd<'_>) -> Result<u32, Errno> {
    Ok(kernels_credentials(socket)?.uid)
}

fn kernels_credentials(socket: BorrowedFd<'_>) -> Result<libc::ucred, Errno> {
    let mut credentials = libc::ucred {
        pid: 0,
        uid: UNMAPPED,
        gid: UNMAPPED,
    };
    socket_option(socket, libc::SO_PEERCRED, &mut credentials)?;
    Ok(credentials)
}

/// Makes a file so long: `ftruncate(2)`. A length beyond `RLIMIT_FSIZE`, which counts a memfd's, too,
/// is the error `EFBIG`, and no signal.
pub(crate) fn set_length(fd: impl AsFd, bytes: u64) -> Result<(), Errno> {
    without_size_signal(|| rustix::fs::ftruncate(fd, bytes))
}

/// Makes a call that may make a file longer than `RLIMIT_FSIZE` allows. The kernel sends the calling
/// thread `SIGXFSZ` then, beside the error: by default that ends the process without a word.
pub(crate) fn without_size_signal<T>(call: impl FnOnce() -> T) -> T {
    // SAFETY: `sigset_t` is plain data, for which zeros are valid.
    let [mut signal, mut before, mut pending]: [libc::sigset_t; 3] = unsafe { std::mem::zeroed() };
    // SAFETY: the sets live across the calls; the mask is this thread's own.
    let was_pending = unsafe {
        libc::sigemptyset(&mut signal);
        libc::sigaddset(&mut signal, libc::SIGXFSZ);
        libc::pthread_sigmask(libc::SIG_BLOCK, &signal, &mut before);
        libc::sigpending(&mut pending);
        libc::sigismember(&pending, libc::SIGXFSZ) == 1
    };
    let made = call();
    let now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: as above. Takes the signal of this call, if there is one, and no other.
    unsafe {
        if !was_pending {
            libc::sigtimedwait(&signal, std::ptr::null_mut(), &now);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
    }
    made
}

/// Makes a call in which this thread takes no signals. A thread that it starts inherits that. What
/// stays: a thread's own faults, and the timer of profilers.
pub(crate) fn without_signals<T>(call: impl FnOnce() -> T) -> T {
    use libc::{SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGPROF, SIGSEGV, SIGSYS, SIGTRAP};
    // SAFETY: `sigset_t` is plain data, for which zeros are valid.
    let [mut signals, mut before]: [libc::sigset_t; 2] = unsafe { std::mem::zeroed() };
    // SAFETY: the sets live across the calls; the mask is this thread's own.
    unsafe {
        libc::sigfillset(&mut signals);
        for own in [
            SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGPROF, SIGSEGV, SIGSYS, SIGTRAP,
        ] {
            libc::sigdelset(&mut signals, own);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &signals, &mut before);
    }
    let made = call();
    // SAFETY: as above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    made
}

/// No user and no group: `(uid_t) -1`, which no process can have.
pub(crate) const UNMAPPED: u32 = u32::MAX;

/// Whether a uid may be the one that stands for all users that this user namespace does not map:
/// `user_namespaces(7)`. An error where this process cannot read that just now.
pub(crate) fn is_unmapped_user(uid: u32) -> Result<bool, Errno> {
    is_unmapped("/proc/sys/kernel/overflowuid", "/proc/self/uid_map", uid)
}

/// The kernel shows one number, 65534 by default, for every id that has no mapping here. The number
/// identifies a user only where every id is mapped.
fn is_unmapped(overflow: &str, map: &str, id: u32) -> Result<bool, Errno> {
    let read = |path| match std::fs::read_to_string(path) {
        Ok(text) => Ok(text),
        Err(error) => match Errno::from_io_error(&error) {
            Some(code) if is_shortage(code) => Err(code),
            _ => Ok(String::new()),
        },
    };
    let overflow = read(overflow)?.trim().parse().unwrap_or(65534);
    Ok(id == overflow && !maps_all(&read(map)?))
}

/// Whether a map of ids (`inside outside count` in each line) contains every id.
fn maps_all(map: &str) -> bool {
    let counts = map.lines().map(|line| {
        line.split_whitespace()
            .nth(2)
            .and_then(|count| count.parse::<u64>().ok())
    });
    counts
        .sum::<Option<u64>>()
        .is_some_and(|count| count >= u64::from(u32::MAX))
}

/// A pidfd of the process at the other end, without a lookup by process id:
/// `getsockopt(SO_PEERPIDFD)`, Linux 6.5.
pub(crate) fn peer_pidfd(socket: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let mut fd: libc::c_int = -1;
    socket_option(socket, SO_PEERPIDFD, &mut fd)?;
    // SAFETY: the call succeeded, so `fd` is a fresh descriptor without another owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// `asm-generic/socket.h`; libc names it on some targets only.
const SO_PEERPIDFD: libc::c_int = 77;

/// As above.
const SO_PASSRIGHTS: libc::c_int = 83;

/// Whether descriptors may be sent to this Unix socket: `setsockopt(SO_PASSRIGHTS)`, Linux 6.16. If
/// not, `sendmsg` fails there with `EPERM`; messages already queued stay there. A connection
/// inherits it from its listener. False where the kernel lacks the option: descriptors can be sent
/// as before.
pub(crate) fn let_descriptors_in(socket: BorrowedFd<'_>, yes: bool) -> bool {
    #[cfg(test)]
    if IS_OLD_KERNEL.load(std::sync::atomic::Ordering::SeqCst) {
        return false;
    }
    set_option(socket, SO_PASSRIGHTS, yes.into()).is_ok()
}

/// Has each peek of this socket show the packet behind the last one, from the first on; or else the
/// first one: `setsockopt(SO_PEEK_OFF)`.
pub(crate) fn peek_one_after_another(socket: BorrowedFd<'_>, yes: bool) -> Result<(), Errno> {
    let value = if yes { 0 } else { -1 };
    rustix::io::retry_on_intr(|| set_option(socket, libc::SO_PEEK_OFF, value))
}

fn set_option(
    socket: BorrowedFd<'_>,
    option: libc::c_int,
    value: libc::c_int,
) -> Result<(), Errno> {
    let pointer = std::ptr::from_ref(&value).cast();
    let length = size_of_val(&value) as libc::socklen_t;
    let socket = socket.as_raw_fd();
    // SAFETY: the kernel reads one `int`, which lives across the call.
    let code = unsafe { libc::setsockopt(socket, libc::SOL_SOCKET, option, pointer, length) };
    if code == 0 { Ok(()) } else { Err(last_error()) }
}

/// Simulates a kernel before 6.16.
#[cfg(test)]
pub(crate) static IS_OLD_KERNEL: std::sync::atomic::AtomicBool =
    std::sync::atomic::AtomicBool::new(false);

/// Bytes, counted with what the kernel needs for them, that were sent through this Unix socket and
/// that its peer has not read: `ioctl(SIOCOUTQ)`. Descriptors that were sent stay in flight, and
/// count for this user, until it is 0.
pub(crate) fn unread_by_peer(socket: BorrowedFd<'_>) -> u32 {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes one `int`, which lives across the call.
    let code = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &mut bytes) };
    if code == 0 { bytes.unsigned_abs() } else { 0 }
}

fn socket_option<T: Copy>(
    socket: BorrowedFd<'_>,
    option: libc::c_int,
    value: &mut T,
) -> Result<(), Errno> {
    let mut length = size_of::<T>() as libc::socklen_t;
    let pointer = std::ptr::from_mut(value).cast();
    // SAFETY: the kernel writes at most `length` bytes, the size of `value`, which is plain data.
    let code = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            pointer,
            &mut length,
        )
    };
    if code == 0 && length as usize == size_of::<T>() {
        Ok(())
    } else {
        Err(last_error())
    }
}

/// The first number behind those of standard input, output and error.
const BEHIND_STANDARD: libc::c_int = 3;

/// Moves a descriptor away from the numbers of standard input, output and error, by duplicating it.
/// A program may have been started without these, and may read, replace or close them at any time.
pub(crate) fn above_standard(fd: OwnedFd) -> Result<OwnedFd, Errno> {
    if fd.as_raw_fd() >= BEHIND_STANDARD {
        Ok(fd)
    } else {
        rustix::io::fcntl_dupfd_cloexec(fd, BEHIND_STANDARD)
    }
}

/// Occupies the free standard numbers while a call makes descriptors that must not be closed here:
/// `close` of a peer's descriptors may block.
pub(crate) fn take_standard() -> [Option<OwnedFd>; BEHIND_STANDARD as usize] {
    std::array::from_fn(|number| {
        // SAFETY: reads the flags of a number, whatever it refers to.
        let is_free = unsafe { libc::fcntl(number as libc::c_int, libc::F_GETFD) } < 0;
        // The lowest free number is this one. An empty poll set has no data to read, and refuses
        // writes.
        let taken = is_free
            .then(|| rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC));
        taken.and_then(Result::ok)
    })
}

fn last_error() -> Errno {
    std::io::Error::last_os_error()
        .raw_os_error()
        .map_or(Errno::IO, Errno::from_raw_os_error)
}

/// Whether a system call failed because this process lacks descriptors or memory, or its user has
/// too many descriptors in flight.
pub(crate) fn is_shortage(error: Errno) -> bool {
    matches!(
        error,
        Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS | Errno::TOOMANYREFS
    )
}

/// The descriptors of received control data.
pub(crate) fn received_fds(
    control: &mut rustix::net::RecvAncillaryBuffer<'_>,
) -> impl Iterator<Item = OwnedFd> {
    let rights = |message| match message {
        rustix::net::RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    };
    control.drain().filter_map(rights).flatten()
}

/// The duration as the kernel takes it.
pub(crate) fn timespec(duration: Duration) -> rustix::event::Timespec {
    let tv_sec = i64::try_from(duration.as_secs()).unwrap_or(i64::MAX);
    rustix::event::Timespec {
        tv_sec,
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_map_of_everybody_says_who_the_overflow_user_is() {
        assert!(maps_all("         0          0 4294967295\n"));
        assert!(maps_all("0 0 65534\n65534 65534 4294901761\n"));
        for map in [
            "",
            "0 0 1\n",
            "0 100000 65536\n",
            "0 0 4294967294\n",
            "0 0\n",
            "0 0 4294967295\nnonsense\n",
        ] {
            assert!(!maps_all(map), "{map:?}");
        }
        assert!(!is_unmapped_user(0).unwrap());
    }

    #[test]
    fn a_process_without_descriptors_does_not_take_a_user_for_one_that_is_not_mapped() {
        let test = "a_process_without_descriptors_does_not_take_a_user_for_one_that_is_not_mapped";
        crate::hostile::alone(module_path!(), test, || {
            let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
            let mut limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
            limit.current = Some(0);
            rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
            let read = is_unmapped("/proc/sys/kernel/overflowuid", "/proc/self/uid_map", 65534);
            assert_eq!(read, Err(Errno::MFILE));
            let known = peer_credentials(socket.as_fd());
            assert!(matches!(known, Err(Errno::MFILE)), "{known:?}");
        });
    }
}
