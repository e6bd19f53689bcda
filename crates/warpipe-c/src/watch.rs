//! Tells an event loop that the jobs of a queue, or the requests of a client, have changed.

use crate::call::{call, make};
use crate::{handle, warpipe_client, warpipe_queue, warpipe_status};

/// A descriptor of one event loop for a queue's or a client's results. Any number of threads may
/// use it. Its descriptor ends with it.
pub struct warpipe_watch(());

/// Makes a watch of a queue: its descriptor is readable when a job has changed, and once more when
/// the queue ends. It may be readable without a change.
///
/// `*watch` is the caller's, to be closed by `warpipe_close`.
///
/// `WARPIPE_SYSTEM`; `WARPIPE_LIMIT_REACHED` without a descriptor left.
///
/// # Safety
/// `watch` is the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_queue_watch(
    queue: *const warpipe_queue,
    watch: *mut *mut warpipe_watch,
) -> warpipe_status {
    // SAFETY: the caller's promise.
    unsafe { make("watch", watch, || Ok(handle::find(queue)?.watch()?)) }
}

/// As `warpipe_queue_watch`, for the requests of a client.
///
/// # Safety
/// As for `warpipe_queue_watch`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_client_watch(
    client: *const warpipe_client,
    watch: *mut *mut warpipe_watch,
) -> warpipe_status {
    // SAFETY: the caller's promise.
    unsafe { make("watch", watch, || Ok(handle::find(client)?.watch()?)) }
}

/// Makes the descriptor unreadable until the next change. When it is readable, call this and then,
/// with a timeout of 0, `warpipe_queue_next_result` or `warpipe_job_wait`, in this order.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_watch_quiet(watch: *const warpipe_watch) -> warpipe_status {
    call(watch, |watch| {
        watch.quiet();
        Ok(())
    })
}
