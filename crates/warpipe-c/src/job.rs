//! Jobs that were submitted to a queue.

use std::ffi::c_void;
use std::sync::Arc;

use warpipe::JobHandle;

use crate::arguments::{out, out_object, put_unless_null, timeout};
use crate::failure::{Failure, run, warpipe_status};
use crate::handle::{self, Found};
use crate::sample::{insert_sample, warpipe_sample};
use crate::streams::Streams;

/// A job that was submitted. Any number of threads may use it; one of them gets the result.
pub struct warpipe_job(());

/// A job, and the streams of its queue's device.
#[derive(Debug)]
pub(crate) struct JobObject {
    handle: JobHandle,
    streams: Arc<Streams>,
}

/// Submits a job and gives it to C, unless that wants no handle of it. Its pointer comes first: a job
/// is not submitted that has none.
///
/// # Safety
/// `job` is null or the address of a pointer.
pub(crate) unsafe fn give_job(
    streams: &Arc<Streams>,
    job: *mut *mut warpipe_job,
    submit: impl FnOnce() -> Result<JobHandle, Failure>,
) -> Result<(), Failure> {
    let entry = handle::reserve_if::<JobObject>(!job.is_null())?;
    let handle = submit()?;
    if let Some(entry) = entry {
        let streams = streams.clone();
        // SAFETY: the caller's promise.
        unsafe { put_unless_null(job, entry.fill(JobObject { handle, streams })) };
    }
    Ok(())
}

/// Closes a job's handle. The job continues, and `warpipe_queue_next_result` gives its result, if
/// that was not taken. Null is ignored.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_job_close(job: *mut warpipe_job) -> warpipe_status {
    run(|| handle::close::<JobObject>(job))
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
    run(|| {
        // SAFETY: the caller's promise.
        let place = unsafe { out("id", id) }?;
        let job: Found<JobObject> = handle::get(job)?;
        place.put(job.handle.id());
        Ok(())
    })
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
    run(|| {
        // SAFETY: the caller's promise.
        let place = unsafe { out_object("sample", sample) }?;
        let job: Found<JobObject> = handle::get(job)?;
        // SAFETY: the caller's promise.
        let stream = unsafe { job.streams.get(stream) }?;
        let wait = || {
            let result = job.handle.wait(&stream, timeout(timeout_ns))?;
            Ok(result.into())
        };
        place.put(insert_sample(&job.streams, wait)?);
        Ok(())
    })
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
    run(|| {
        // SAFETY: the caller's promise.
        let place = unsafe { out("is_done", is_done) }?;
        let job: Found<JobObject> = handle::get(job)?;
        place.put(job.handle.is_done()?);
        Ok(())
    })
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
    run(|| {
        let job: Found<JobObject> = handle::get(job)?;
        let cancelled = job.handle.cancel()?;
        // SAFETY: the caller's promise.
        unsafe { put_unless_null(was_cancelled, cancelled) };
        Ok(())
    })
}
