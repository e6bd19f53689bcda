//! The CUDA driver's files in a forked child. **This module is marked for unsafe**: it replaces
//! them by number. Everything here is async-signal-safe.
//!
//! CUDA does not survive a fork, but the driver's open files do, and as long as a child holds them
//! the parent's device work goes on after the parent's death. So the child puts `/dev/null` in
//! their places: the numbers stay taken, since the driver's library in the child knows them.
//!
//! Exported memory leads to the same files and is left alone, since the user may want to give it to
//! the child. Such a descriptor was made here ([`EXPORTED`]), or is not close-on-exec, which all of
//! the driver's own are.

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use rustix::fs::{Mode, OFlags, RawDir, SeekFrom};
use rustix::io::Errno;

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
    let mut is_read = for_each(&list, |_, file| {
        has_started |= file.windows(STARTED.len()).any(|part| part == STARTED)
    });
    let mut is_released = true;
    if has_started {
        is_released = open(c"/dev/null", OFlags::RDWR).is_ok_and(|null| {
            let mut all = true;
            is_read &= rustix::fs::seek(&list, SeekFrom::Start(0)).is_ok();
            is_read &= for_each(&list, |fd, _| all &= replace(fd, &null));
            all
        });
    }
    is_read && is_released
}

/// The lowest number of a file of the driver's.
pub(super) fn lowest() -> Option<RawFd> {
    let mut lowest = None;
    for_each(&open_list()?, |fd, _| {
        lowest = Some(lowest.map_or(fd, |lowest: RawFd| lowest.min(fd)))
    });
    lowest
}

/// The directory of this process's descriptors, if that is what stands there.
fn open_list() -> Option<OwnedFd> {
    let list = open(c"/proc/self/fd", OFlags::RDONLY | OFlags::DIRECTORY).ok()?;
    let system = rustix::fs::fstatfs(&list).ok()?;
    (system.f_type as i64 == libc::PROC_SUPER_MAGIC).then_some(list)
}

fn open(path: &CStr, flags: OFlags) -> Result<OwnedFd, Errno> {
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())
}

/// False if it is left alone.
fn replace(fd: RawFd, null: &OwnedFd) -> bool {
    // SAFETY: asks for the flags of a number, whatever it is.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
    if flags < 0 || flags & libc::FD_CLOEXEC == 0 || EXPORTED.may_have(fd) {
        return false;
    }
    // SAFETY: the child's copy of the driver's file, which no call of the driver works with after a
    // fork.
    unsafe { libc::dup3(null.as_raw_fd(), fd, libc::O_CLOEXEC) == fd }
}

/// Calls `work` with each descriptor that leads to one of the driver's files, and the beginning of
/// the file's name. False if not all of the list could be read.
fn for_each(list: &OwnedFd, mut work: impl FnMut(RawFd, &[u8])) -> bool {
    let mut space = [MaybeUninit::uninit(); 2048];
    let mut entries = RawDir::new(list, &mut space);
    while let Some(entry) = entries.next() {
        let Ok(entry) = entry else { return false };
        let Some(fd) = number(entry.file_name()) else {
            continue;
        };
        let mut target = [0u8; 64];
        match rustix::fs::readlinkat_raw(list, entry.file_name(), &mut target) {
            Ok(length) if FILES.iter().any(|file| target[..length].starts_with(file)) => {
                work(fd, &target[..length]);
            }
            // Closed by another thread since: not in a forked child, which has one.
            Ok(_) | Err(Errno::NOENT) => {}
            Err(_) => return false,
        }
    }
    true
}

/// The number that an entry is called after.
fn number(name: &CStr) -> Option<RawFd> {
    name.to_str().ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_that_are_no_numbers_are_passed_over() {
        assert_eq!(number(c"1023"), Some(1023));
        assert!(
            [c".", c"..", c"", c"7x"]
                .iter()
                .all(|name| number(name).is_none())
        );
    }

    #[test]
    fn files_that_are_not_the_drivers_are_not_listed() {
        let list = open_list().unwrap();
        let file =
            rustix::fs::memfd_create(c"/dev/nvidia-of-this-test", rustix::fs::MemfdFlags::CLOEXEC)
                .unwrap();
        let mut found = Vec::new();
        assert!(for_each(&list, |fd, name| found.push((fd, name.to_vec()))));
        assert_eq!(
            found,
            [(
                std::os::fd::AsRawFd::as_raw_fd(&file),
                b"/memfd:/dev/nvidia-of-this-test (deleted)".to_vec()
            )]
        );
    }
}
