//! The CUDA driver's files in a forked child. **This module is marked for unsafe**: it makes system
//! calls in the child. Everything here is async-signal-safe.
//!
//! CUDA does not survive a fork, but the driver's open files do, and as long as a child holds them
//! the parent's device work goes on after the parent's death. So the child puts `/dev/null` in
//! their places: the numbers stay taken, since the driver's library in the child knows them.
//!
//! Exported memory leads to the same files and is left alone, since the user may want to give it to
//! the child. Such a descriptor was made here ([`EXPORTED`]), or is not close-on-exec, which all of
//! the driver's own are.

use std::ffi::CStr;
use std::os::fd::RawFd;

use super::fd_table::FdSet;

/// Descriptors of memory that users of this library got. A number stays here when it is closed, so
/// a later file of the driver under that number is left alone, too: then the child keeps the
/// lifeline ([`release`]).
pub(crate) static EXPORTED: FdSet = FdSet::new();

/// Where the driver's files lie; the second is the fake driver's.
const FILES: [&[u8]; 2] = [b"/dev/nvidia", b"/memfd:/dev/nvidia"];

/// A file that is open in processes that have started CUDA, and in no other: NVML opens the others,
/// too, and goes on in a child.
const STARTED: &[u8] = b"nvidia-uvm";

/// Puts `/dev/null` in the places of the driver's files, if CUDA was started. Returns whether the
/// child is known to hold none of them any more; false without procfs.
pub(super) fn release() -> bool {
    let Some(list) = open_list() else {
        return false;
    };
    let mut has_started = false;
    let mut is_read = for_each(list, |_, file| {
        has_started |= file.windows(STARTED.len()).any(|part| part == STARTED)
    });
    let mut is_released = true;
    if has_started {
        is_released = open(c"/dev/null", libc::O_RDWR).is_some_and(|null| {
            let mut all = true;
            // SAFETY: a seek on our own descriptor.
            is_read &= unsafe { libc::lseek(list, 0, libc::SEEK_SET) } == 0;
            is_read &= for_each(list, |fd, _| all &= replace(fd, null));
            close(null);
            all
        });
    }
    close(list);
    is_read && is_released
}

/// The lowest number of a file of the driver's.
pub(super) fn lowest() -> Option<RawFd> {
    let list = open_list()?;
    let mut lowest = None;
    for_each(list, |fd, _| {
        lowest = Some(lowest.map_or(fd, |lowest: RawFd| lowest.min(fd)))
    });
    close(list);
    lowest
}

/// The directory of this process's descriptors, if that is what stands there.
fn open_list() -> Option<RawFd> {
    let list = open(c"/proc/self/fd", libc::O_RDONLY | libc::O_DIRECTORY)?;
    // SAFETY: `statfs` is plain data, for which zeros are valid.
    let mut system: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one `statfs`, which lives across the call.
    let code = unsafe { libc::fstatfs(list, &mut system) };
    if code == 0 && system.f_type == libc::PROC_SUPER_MAGIC {
        return Some(list);
    }
    close(list);
    None
}

/// False if it is left alone.
fn replace(fd: RawFd, null: RawFd) -> bool {
    // SAFETY: asks for the flags of a number, whatever it is.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
    if flags < 0 || flags & libc::FD_CLOEXEC == 0 || EXPORTED.may_have(fd) {
        return false;
    }
    // SAFETY: the child's copy of the driver's file, which no call of the driver works with after a
    // fork.
    unsafe { libc::dup3(null, fd, libc::O_CLOEXEC) == fd }
}

/// Calls `work` with each descriptor that leads to one of the driver's files, and the file's name.
/// False if not all of the list could be read.
fn for_each(list: RawFd, mut work: impl FnMut(RawFd, &[u8])) -> bool {
    // Entries of `getdents64` begin at multiples of 8.
    let mut space = [0u64; 256];
    loop {
        let bytes = size_of_val(&space);
        // SAFETY: the kernel writes at most `bytes` bytes of entries into `space`.
        let length =
            unsafe { libc::syscall(libc::SYS_getdents64, list, space.as_mut_ptr(), bytes) };
        let Ok(length) = usize::try_from(length) else {
            return false;
        };
        if length == 0 {
            return true;
        }
        // SAFETY: `u64` has no padding, and the bytes of `space` are initialised.
        let entries = unsafe { std::slice::from_raw_parts(space.as_ptr().cast::<u8>(), bytes) };
        let mut offset = 0;
        while offset < length {
            // d_ino (8 bytes), d_off (8), d_reclen (2), d_type (1), d_name.
            let reclen = usize::from(u16::from_ne_bytes([
                entries[offset + 16],
                entries[offset + 17],
            ]));
            let name = &entries[offset + 19..offset + reclen];
            offset += reclen;
            let Some(fd) = number(name) else { continue };
            let mut target = [0u8; 64];
            let file = match target_of(list, name, &mut target) {
                Ok(file) => file,
                // Closed by another thread since: not in a forked child, which has one.
                Err(libc::ENOENT) => continue,
                Err(_) => return false,
            };
            if FILES.iter().any(|prefix| file.starts_with(prefix)) {
                work(fd, file);
            }
        }
    }
}

/// The number that an entry is called after.
fn number(name: &[u8]) -> Option<RawFd> {
    let digits = name.split(|&byte| byte == 0).next()?;
    let is_number = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    is_number.then(|| {
        digits.iter().fold(0, |number: RawFd, digit| {
            number * 10 + RawFd::from(digit - b'0')
        })
    })
}

/// The beginning of the path that an entry leads to, or the error's number.
fn target_of<'a>(list: RawFd, name: &[u8], target: &'a mut [u8; 64]) -> Result<&'a [u8], i32> {
    let name = CStr::from_bytes_until_nul(name).map_err(|_| libc::EINVAL)?;
    // SAFETY: reads a terminated name, and writes at most the length of `target`.
    let length = unsafe {
        libc::readlinkat(
            list,
            name.as_ptr(),
            target.as_mut_ptr().cast(),
            target.len(),
        )
    };
    let length = usize::try_from(length);
    let error = |_| {
        std::io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EIO)
    };
    target.get(..length.map_err(error)?).ok_or(libc::EINVAL)
}

fn open(path: &CStr, flags: libc::c_int) -> Option<RawFd> {
    // SAFETY: reads a terminated path.
    let fd = unsafe { libc::open(path.as_ptr(), flags | libc::O_CLOEXEC) };
    (fd >= 0).then_some(fd)
}

fn close(fd: RawFd) {
    // SAFETY: opened in this module, and closed once.
    unsafe { libc::close(fd) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_that_are_no_numbers_are_passed_over() {
        assert_eq!(number(b"1023\0\0\0"), Some(1023));
        assert!(
            [b".\0".as_slice(), b"..\0", b"\0", b"", b"7x\0"]
                .iter()
                .all(|name| number(name).is_none())
        );
    }

    #[test]
    fn files_that_are_not_the_drivers_are_not_listed() {
        let list = open(c"/proc/self/fd", libc::O_RDONLY | libc::O_DIRECTORY).unwrap();
        let file =
            rustix::fs::memfd_create(c"/dev/nvidia-of-this-test", rustix::fs::MemfdFlags::CLOEXEC)
                .unwrap();
        let mut found = Vec::new();
        assert!(for_each(list, |fd, name| found.push((fd, name.to_vec()))));
        close(list);
        assert_eq!(
            found,
            [(
                std::os::fd::AsRawFd::as_raw_fd(&file),
                b"/memfd:/dev/nvidia-of-this-test (deleted)".to_vec()
            )]
        );
    }
}
