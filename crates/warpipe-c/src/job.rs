//! Jobs that were submitted to a queue, and requests to a service.

use std::ffi::c_void;
use std::ops::Deref;

use warpipe::{JobHandle, Pending, Stream};

use crate::arguments::{put_unless_null, timeout};
use crate::call::{call, get, make_on, read};
use crate::{warpipe_sample, warpipe_status};

/// A job that was submitted to a queue, or a request that was sent to a service. Any number of
/// threads may use it; one of them gets the result. A job outlives it: `warpipe_queue_next_result`
/// gives the result, if that was not taken. A request ends with it, if its reply was not taken.
pub struct warpipe_job(());

/// A job or a request that was submitted.
#[derive(Debug)]
pub(crate) enum Submitted {
    Job(JobHandle),
    Request(Pending),
}

impl Deref for Submitted {
    type Target = JobHandle;

    fn deref(&self) -> &JobHandle {
        match self {
            Submitted::Job(job) => job,
            Submitted::Request(request) => request,
        }
    }
}

/// The job's number in its queue, or the request's in its client, from 1.
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
/// after which it can be waited for again, unless a request's deadline has passed, which
/// `warpipe_job_is_done` says; `WARPIPE_NOT_FOUND` when its outcome was taken, or the
/// job was cancelled; `WARPIPE_INVALID_STATE` when the queue or client is closed.
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
    let wait = |job: &Submitted, stream: &Stream| Ok(job.wait(stream, timeout(timeout_ns))?.into());
    // SAFETY: the caller's promises.
    unsafe { make_on(job, stream, "sample", sample, wait) }
}

/// Whether `warpipe_job_wait` would return at once: the outcome is there, or was taken, or the
/// deadline of a request has passed.
///
/// `WARPIPE_INVALID_STATE` when the queue or client is closed.
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
/// `WARPIPE_INVALID_STATE` when the queue or client is closed.
///
/// # Safety
/// `was_cancelled` is null or the address of a `bool`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_job_cancel(
    job: *const warpipe_job,
    was_cancelled: *mut bool,
) -> warpipe_status {
    call(job, |job| {
        // SAFETY: the caller's promise.
        unsafe { put_unless_null(was_cancelled, job.cancel()?) };
        Ok(())
    })
}
