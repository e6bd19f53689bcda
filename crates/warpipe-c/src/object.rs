//! What objects of several types have.

use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use crate::arguments::out;
use crate::handle::{self, Handle};
use crate::{
    Result, run, warpipe_members, warpipe_server, warpipe_status, warpipe_subscriber,
    warpipe_watch, warpipe_worker,
};

/// Closes an object of any type, once; a type says what that ends. It may be called while another
/// thread is in a call on the object, which ends when that call returns. Null is ignored.
///
/// `WARPIPE_INVALID_OBJECT` for a pointer that is closed, was consumed by a call, or is no object
/// of this library: nothing is read there.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_close(object: *mut c_void) -> warpipe_status {
    run(|| handle::close(object))
}

/// A descriptor for `poll(2)` and `epoll(7)` of a subscriber, a worker, a server, a watch or
/// members: readable when its next call with a timeout of 0 (`warpipe_subscriber_receive`,
/// `warpipe_worker_lease`, `warpipe_server_accept`, `warpipe_members_next_change`) is worth making,
/// a server's also once a second for a look at new clients. Call until that says `WARPIPE_TIMEOUT`
/// before waiting on it; for a watch see `warpipe_watch_quiet`. It is the object's, and ends with
/// it.
///
/// # Safety
/// `fd` is the address of a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_get_fd(object: *const c_void, fd: *mut i32) -> warpipe_status {
    run(|| {
        // SAFETY: the caller's promise.
        let place = unsafe { out("fd", fd) }?;
        place.put(match handle::number_of(object) {
            warpipe_subscriber::TYPE => fd_of::<warpipe_subscriber>(object, |it| it.as_fd()),
            warpipe_worker::TYPE => fd_of::<warpipe_worker>(object, |it| it.as_fd()),
            warpipe_server::TYPE => fd_of::<warpipe_server>(object, |it| it.as_fd()),
            warpipe_watch::TYPE => fd_of::<warpipe_watch>(object, |it| it.as_fd()),
            warpipe_members::TYPE => fd_of::<warpipe_members>(object, |it| it.as_fd()),
            _ => Err(handle::no_key(
                "warpipe object with a descriptor",
                object.addr(),
            )),
        }?);
        Ok(())
    })
}

fn fd_of<P: Handle>(
    object: *const c_void,
    fd: impl FnOnce(&P::Object) -> BorrowedFd<'_>,
) -> Result<i32> {
    Ok(fd(&*handle::find::<P>(object.cast())?).as_raw_fd())
}
