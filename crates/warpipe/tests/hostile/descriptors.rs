//! The descriptors that this process has open, and limits of them.

use std::os::fd::AsRawFd;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::stage::eventually;
use crate::Error;
use crate::fork::lifeline::Lifeline;
use crate::runtime::reserve;

/// The descriptors that this process has open.
pub(super) fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// The descriptors that this process has open once nothing is being closed any more, including its
/// lifeline's: those come with the first link, and stay.
pub(super) fn settled_descriptors() -> usize {
    let _lifeline = Lifeline::of_process().unwrap();
    let (mut count, mut agreed) = (descriptors(), 0);
    eventually("the count is steady", || {
        let last = std::mem::replace(&mut count, descriptors());
        agreed = if last == count { agreed + 1 } else { 0 };
        agreed == 50
    });
    count
}

/// Sets a soft limit of this process; `None` raises it to the hard limit.
pub(crate) fn set_soft(resource: Resource, soft: Option<u64>) {
    let maximum = getrlimit(resource).maximum;
    setrlimit(
        resource,
        Rlimit {
            current: soft.or(maximum),
            maximum,
        },
    )
    .unwrap();
}

/// Leaves room for `spare` descriptors and no more. Returns the number of open ones.
pub(crate) fn leave_descriptors(spare: usize) -> usize {
    let names = std::fs::read_dir("/proc/self/fd").unwrap();
    let numbers =
        names.filter_map(|entry| entry.unwrap().file_name().to_str()?.parse::<i32>().ok());
    let highest = numbers.max().unwrap();
    // Fills the free numbers below the highest one.
    loop {
        let file = std::fs::File::open("/dev/null").unwrap();
        if file.as_raw_fd() > highest {
            break;
        }
        std::mem::forget(file);
    }
    let open = descriptors();
    set_soft(Resource::Nofile, Some(highest as u64 + 1 + spare as u64));
    open
}

/// Leaves room for none but the reserve, also after pending closes.
pub(super) fn leave_the_reserve() {
    settled_descriptors();
    leave_descriptors(0);
}

/// Leaves room for none, and no reserve.
pub(super) fn leave_no_descriptor() {
    leave_the_reserve();
    // A tick may fill it up again meanwhile.
    while reserve::give(usize::MAX) {
        while let Ok(file) = std::fs::File::open("/dev/null") {
            std::mem::forget(file);
        }
    }
}

/// Raises the limit of descriptors again.
pub(crate) fn raise_descriptor_limit() {
    set_soft(Resource::Nofile, None);
}

pub(super) fn is_descriptor_limit(error: &Error) -> bool {
    matches!(error, Error::Os { source, .. } if source.raw_os_error() == Some(libc::EMFILE))
}
