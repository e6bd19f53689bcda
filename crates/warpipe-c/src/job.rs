//! Jobs that were submitted to a queue.

use std::ffi::c_void;

use warpipe::{JobHandle, Stream};

use crate::arguments::timeout;
use crate::call::{get, make_on, read, read_optional};
use crate::{handle, run, warpipe_sample, warpipe_status};

/// A job that was submitted. Any number of threads may use it; one of them gets the result.
pub struct warpipe_job(());

/// Closes a job's handle. The job continues, and `warpipe_queue_next_result` gives its result, if
/// that was not taken. Null is ignored.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_job_close(job: *mut warpipe_job) -> warpipe_status {
    run(|| handle::close(job))
}

/// The job's number in its queue, from 1.
///
/// # Safety
/// `id` is the address of a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_job_get_id(
    job: *const warpipe_job,
    id: *mut u64,
) -> warpipe_status {
    // SAFETY: the caller's promise.
    unsafe { get(job, "id", id, |job| job.id()) }
}

/// Waits for the job's result, up to `timeout_ns` nanoseconds; 0 takes it if it is there. It is
/// complete: work on `stream` may read it at once. The job's handle stays the caller's.
///
/// `*sample` is the caller's, to be closed by `warpipe_sample_finish`, `warpipe_sample_release` or
/// `warpipe_sample_release_on`.
///
/// `WARPIPE_JOB_FAILED`, once: every attempt failed, or a worker rejected it; `WARPIPE_TIMEOUT`,
/// after which it can be waited for again; `WARPIPE_NOT_FOUND` when its outcome was taken, or the
/// job was cancelled; `WARPIPE_INVALID_STATE` when the queue is closed.
///
/// # Safety
/// `stream` is a stream of the queue's device, `sample` the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_job_wait(
    job: *const warpipe_job,
    stream: *mut c_void,
    timeout_ns: u64,
    sample: *mut *mut warpipe_sample,
) -> warpipe_status {
    let wait = |job: &JobHandle, stream: &Stream| Ok(job.wait(stream, timeout(timeout_ns))?.into());
    // SAFETY: the caller's promises.
    unsafe { make_on(job, stream, "sample", sample, wait) }
}

/// Whether `warpipe_job_wait` would return at once: the outcome is there, or was taken.
///
/// `WARPIPE_INVALID_STATE` when the queue is closed.
///
/// # Safety
/// `is_done` is the address of a `bool`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_job_is_done(
    job: *const warpipe_job,
    is_done: *mut bool,
) -> warpipe_status {
    // SAFETY: the caller's promise.
    unsafe { read(job, "is_done", is_done, |job| job.is_done()) }
}

/// Cancels the job: it is delivered no more, and the answer of a worker that has it is discarded.
/// `*was_cancelled`, which may be null, becomes false if its outcome was taken before.
///
/// `WARPIPE_INVALID_STATE` when the queue is closed.
///
/// # Safety
/// `was_cancelled` is null or the address of a `bool`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_job_cancel(
    job: *const warpipe_job,
    was_cancelled: *mut bool,
) -> warpipe_status {
    // SAFETY: the caller's promise.
    unsafe { read_optional(job, was_cancelled, |job| Ok(job.cancel()?)) }
}
