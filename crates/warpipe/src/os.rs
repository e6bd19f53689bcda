//! The system calls that `rustix` does not wrap. **This module is marked for unsafe**: it calls libc.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Errno;

/// `fcntl(fd, F_OFD_SETLK)` with a write lock on one byte: it belongs to the open file description, so it ends with the
/// last descriptor of its owner, however that dies. `fcntl_locking(2)`.
pub(crate) fn ofd_write_lock(fd: BorrowedFd<'_>, byte: u8) -> Result<(), Errno> {
    let lock = write_lock(byte);
    // SAFETY: F_OFD_SETLK reads one `flock`, which lives across the call.
    let code = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &lock) };
    if code == 0 { Ok(()) } else { Err(last_error()) }
}

/// Whether anybody else holds a lock on that byte: `fcntl(fd, F_OFD_GETLK)`. Takes none.
pub(crate) fn ofd_is_locked(fd: BorrowedFd<'_>, byte: u8) -> Result<bool, Errno> {
    let mut lock = write_lock(byte);
    // SAFETY: F_OFD_GETLK reads and writes one `flock`, which lives across the call.
    let code = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_GETLK, &mut lock) };
    if code == 0 { Ok(lock.l_type != libc::F_UNLCK as libc::c_short) } else { Err(last_error()) }
}

fn write_lock(byte: u8) -> libc::flock {
    // SAFETY: `flock` is plain data, for which zeros are valid (l_pid must be 0 for OFD locks).
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as _;
    lock.l_whence = libc::SEEK_SET as _;
    (lock.l_start, lock.l_len) = (byte.into(), 1);
    lock
}

/// Who is at the other end of a connected Unix socket: `getsockopt(SO_PEERCRED)`, `unix(7)`.
pub(crate) fn peer_credentials(socket: BorrowedFd<'_>) -> Result<libc::ucred, Errno> {
    let mut credentials = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    socket_option(socket, libc::SO_PEERCRED, &mut credentials)?;
    Ok(credentials)
}

/// A pidfd of the process at the other end, without its number ever being looked up:
/// `getsockopt(SO_PEERPIDFD)`, Linux 6.5.
pub(crate) fn peer_pidfd(socket: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let mut fd: libc::c_int = -1;
    socket_option(socket, SO_PEERPIDFD, &mut fd)?;
    // SAFETY: the call succeeded, so `fd` is a fresh descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// `asm-generic/socket.h`; libc names it on some targets only.
const SO_PEERPIDFD: libc::c_int = 77;

/// As above.
const SO_PASSRIGHTS: libc::c_int = 83;

/// Whether descriptors may be sent to this Unix socket: `setsockopt(SO_PASSRIGHTS)`, Linux 6.16. If not, `sendmsg` fails
/// there with `EPERM`; what is in the queue already stays there. A connection inherits it from its listener. False
/// where the kernel does not know it: descriptors come as they always did.
pub(crate) fn let_descriptors_in(socket: BorrowedFd<'_>, yes: bool) -> bool {
    #[cfg(test)]
    if IS_OLD_KERNEL.load(std::sync::atomic::Ordering::SeqCst) {
        return false;
    }
    let value = libc::c_int::from(yes);
    let (pointer, length) = (std::ptr::from_ref(&value).cast(), size_of_val(&value) as libc::socklen_t);
    // SAFETY: the kernel reads one `int`, which lives across the call.
    unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, pointer, length) == 0 }
}

/// Plays a kernel before 6.16.
#[cfg(test)]
pub(crate) static IS_OLD_KERNEL: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

/// Bytes, counted with what the kernel needs for them, that were sent through this Unix socket and that its peer has not
/// read: `ioctl(SIOCOUTQ)`. Descriptors that were sent stay in flight, and count for this user, until it is 0.
pub(crate) fn unread_by_peer(socket: BorrowedFd<'_>) -> u32 {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes one `int`, which lives across the call.
    let code = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &mut bytes) };
    if code == 0 { bytes.unsigned_abs() } else { 0 }
}

fn socket_option<T: Copy>(socket: BorrowedFd<'_>, option: libc::c_int, value: &mut T) -> Result<(), Errno> {
    let mut length = size_of::<T>() as libc::socklen_t;
    let pointer = std::ptr::from_mut(value).cast();
    // SAFETY: the kernel writes at most `length` bytes, the size of `value`, which is plain data.
    let code = unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, pointer, &mut length) };
    if code == 0 && length as usize == size_of::<T>() { Ok(()) } else { Err(last_error()) }
}

fn last_error() -> Errno {
    std::io::Error::last_os_error().raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}
