//! Memory that was received: samples of a channel, and the inputs and results of jobs and requests.

use std::ffi::{c_char, c_void};

use warpipe::{AnswerHandle, JobResult, Lease, Sample, Stream};

use crate::arguments::{out, slice_mut, text_or_null, timeout};
use crate::call::{call, call_on, make_optional, read};
use crate::{handle, run, warpipe_layout, warpipe_status};

/// A tensor in another process's memory, received from a channel, as the result of a job or a
/// request, or as the input of one. Memory that this process may only read. Closed, it is released
/// behind the work of the stream that it was received with.
pub struct warpipe_sample(());

/// Says later whether the data of a released sample was complete.
pub struct warpipe_receipt(());

/// A received tensor, as `warpipe_sample_get_info` describes it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_sample_info {
    /// The device address of the element with all indices 0: a `CUdeviceptr`, or on the host an
    /// address of this process.
    pub data: u64,
    /// The device address of the first byte of `layout.bytes`.
    pub slot: u64,
    /// The tensor's layout.
    pub layout: warpipe_layout,
    /// The bytes that were sent with the tensor, valid as long as the sample is.
    pub metadata: *const u8,
    /// How many those are.
    pub metadata_bytes: usize,
    /// The sample's number among its publisher's samples, from 1; a gap is samples that this
    /// subscriber did not get, which `missing` counts.
    pub sequence: u64,
    /// When it was sent, in nanoseconds of `CLOCK_MONOTONIC`, as its sender says; 0
    /// if it does not, which is `timestamps` of the publisher's options.
    pub sent_at_ns: u64,
    /// When it was received, in nanoseconds of `CLOCK_MONOTONIC`; 0 where `sent_at_ns` is.
    pub received_at_ns: u64,
    /// Of a job, request or result: the job's number, from 1; else 0.
    pub job: u64,
    /// Of a job, request or result: the number of this attempt, from 1; else 0.
    pub attempt: u32,
    /// Of a result: the worker's process; of a job or request: the process that submitted it; else
    /// 0.
    pub pid: i32,
    /// Of a job or request: `CLOCK_MONOTONIC` nanoseconds by which the answer is wanted; 0 if there
    /// is no such time.
    pub deadline_ns: u64,
    /// How many samples of this publisher are missing between this one and the one received before
    /// it; 0 on the first sample of another incarnation: its numbers begin anew, unless both are
    /// those of a bridge for one source, and the numbers go on.
    pub missing: u64,
    /// Whether there is a break before this sample: samples are missing, or this is the first
    /// sample of another incarnation of the publisher, or of the same one after the link had ended.
    pub is_discontinuity: bool,
    /// On the first sample of another incarnation of the publisher: the process of the one before;
    /// else 0.
    pub previous_pid: i32,
    /// Whether it lies in its sender's own memory: see `warpipe_publisher_loan_in`.
    pub is_in_place: bool,
}

/// A sample of a channel, or the input or the result of a job or a request.
#[derive(Debug)]
pub(crate) struct Received {
    pub(crate) sample: Sample,
    /// How many of the metadata's last bytes are the sender's own.
    own_metadata_bytes: usize,
    /// 0 as the number of no job, and then also below.
    job: u64,
    attempt: u32,
    deadline_ns: u64,
    pid: i32,
}

impl From<Sample> for Received {
    fn from(sample: Sample) -> Received {
        Received {
            own_metadata_bytes: sample.metadata().len(),
            sample,
            job: 0,
            attempt: 0,
            deadline_ns: 0,
            pid: 0,
        }
    }
}

impl From<JobResult> for Received {
    fn from(result: JobResult) -> Received {
        Received {
            own_metadata_bytes: result.metadata().len(),
            job: result.job,
            attempt: result.attempt,
            pid: result.worker_pid,
            ..Received::from(result.sample)
        }
    }
}

impl Received {
    #[inline]
    pub(crate) fn info(&self) -> warpipe_sample_info {
        let (sample, metadata) = (&self.sample, self.sample.metadata());
        let own_metadata = &metadata[metadata.len() - self.own_metadata_bytes..];
        let known = sample.info();
        let gap = known.discontinuity;
        let previous = gap.and_then(|gap| gap.previous);
        warpipe_sample_info {
            data: sample.ptr(),
            slot: sample.slot_ptr(),
            layout: warpipe_layout::of(sample.layout()),
            metadata: own_metadata.as_ptr(),
            metadata_bytes: own_metadata.len(),
            sequence: sample.sequence(),
            sent_at_ns: known.sent_at_ns.unwrap_or_default(),
            received_at_ns: known.received_at_ns.unwrap_or_default(),
            job: self.job,
            attempt: self.attempt,
            pid: self.pid,
            deadline_ns: self.deadline_ns,
            missing: gap.map_or(0, |gap| gap.missing),
            is_discontinuity: gap.is_some(),
            previous_pid: previous.map_or(0, |previous| previous.pid),
            is_in_place: known.is_in_place,
        }
    }

    /// The parts of a lease.
    pub(crate) fn split(lease: Lease) -> (Received, AnswerHandle) {
        let (pid, own_metadata_bytes) = (lease.queue_pid, lease.metadata().len());
        let (sample, answer) = (lease.input, lease.answer_handle);
        let input = Received {
            own_metadata_bytes,
            job: answer.job,
            attempt: answer.attempt,
            deadline_ns: answer.deadline_ns.unwrap_or(0),
            pid,
            sample,
        };
        (input, answer)
    }
}

/// Describes a sample: its address, layout, metadata and origin.
///
/// # Safety
/// `info` is the address of such a structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_sample_get_info(
    sample: *const warpipe_sample,
    info: *mut warpipe_sample_info,
) -> warpipe_status {
    run(|| {
        // SAFETY: the caller's promise.
        let place = unsafe { out("info", info) }?;
        // Not by `read`: a long structure on a fast path is moved once, to its place.
        place.put(handle::find(sample)?.info());
        Ok(())
    })
}

/// Makes another stream wait, on the device, until the sample's data is complete: work that is
/// enqueued there from now on reads complete data. Release the sample with that stream then, after
/// making it wait for the stream that the sample was received with, or that one for it.
///
/// `WARPIPE_DATA_LOST` when the sender died before the data was complete; `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `stream` is a stream of the subscriber's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_sample_wait_on(
    sample: *const warpipe_sample,
    stream: *mut c_void,
) -> warpipe_status {
    let wait_on = |received: &Received, stream: &Stream| Ok(received.sample.wait_on(stream)?);
    // SAFETY: the caller's promise.
    unsafe { call_on(sample, stream, wait_on) }
}

/// Waits on the CPU until the data is complete. Device work needs no such wait: the stream that the
/// sample was received with waits on the device.
///
/// `WARPIPE_DATA_LOST` when the sender died first; `WARPIPE_TIMEOUT`.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_sample_wait(
    sample: *const warpipe_sample,
    timeout_ns: u64,
) -> warpipe_status {
    let timeout = timeout(timeout_ns);
    call(sample, |received| Ok(received.sample.wait(timeout)?))
}

/// Whether the data is complete, as the CPU sees it now.
///
/// `WARPIPE_DATA_LOST` when the sender died first.
///
/// # Safety
/// `is_complete` is the address of a `bool`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_sample_is_complete(
    sample: *const warpipe_sample,
    is_complete: *mut bool,
) -> warpipe_status {
    // SAFETY: the caller's promise.
    unsafe {
        read(sample, "is_complete", is_complete, |found| {
            found.sample.is_complete()
        })
    }
}

/// Waits for the data and copies the whole slot, `layout.bytes` bytes, or those of the part with
/// this name, to memory of the host. `part` may be null.
///
/// `WARPIPE_DATA_LOST`; `WARPIPE_TIMEOUT`; `WARPIPE_INVALID_INPUT` unless `bytes` is that many, or
/// if there is no such part.
///
/// # Safety
/// `part` is null or a text, `buffer` is the address of `bytes` bytes that nothing else uses during
/// the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_sample_copy_to(
    sample: *const warpipe_sample,
    part: *const c_char,
    buffer: *mut c_void,
    bytes: usize,
    timeout_ns: u64,
) -> warpipe_status {
    call(sample, |found| {
        // SAFETY: the caller's promises; bytes of any value are valid.
        let (part, buffer) = unsafe {
            let buffer = slice_mut("buffer", buffer.cast::<u8>(), bytes)?;
            (text_or_null("part", part)?, buffer)
        };
        let (sample, wait) = (&found.sample, timeout(timeout_ns));
        Ok(match part {
            Some(part) => sample.copy_part_to(part, buffer, wait),
            None => sample.copy_to(buffer, wait),
        }?)
    })
}

/// Waits on the CPU until the data is complete, releases the sample behind the work of the stream
/// that it was received with, and reports whether its sender lived until then. Closes `sample`,
/// whatever the result, unless another thread is in a call on it (`WARPIPE_INVALID_STATE`).
///
/// `WARPIPE_DATA_LOST`: discard what was computed from it; `WARPIPE_TIMEOUT`.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_sample_finish(
    sample: *mut warpipe_sample,
    timeout_ns: u64,
) -> warpipe_status {
    run(|| {
        let found = handle::find(sample)?.take();
        Ok(found.object.sample.finish(timeout(timeout_ns))?)
    })
}

/// Releases a sample behind the work of the stream that it was received with, without waiting.
/// Closes `sample`. `*receipt` says later whether the data was complete; it is the caller's, to be
/// closed by `warpipe_close`. `receipt` may be null: then a lost sample goes unnoticed.
///
/// `WARPIPE_DEVICE_FAILED` when the release could not be enqueued: the slot returns later.
///
/// # Safety
/// `receipt` is null or the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_sample_release(
    sample: *mut warpipe_sample,
    receipt: *mut *mut warpipe_receipt,
) -> warpipe_status {
    let release = || {
        let found = handle::find(sample)?.take();
        Ok(found.object.sample.release()?)
    };
    // SAFETY: the caller's promise.
    unsafe { make_optional(receipt, release) }
}

/// As `warpipe_sample_release`, behind the work of another stream, which must have been made to
/// wait for the one that the sample was received with (`warpipe_stream_wait_for`).
///
/// # Safety
/// As for `warpipe_sample_release`; `stream` is a stream of the subscriber's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_sample_release_on(
    sample: *mut warpipe_sample,
    stream: *mut c_void,
    receipt: *mut *mut warpipe_receipt,
) -> warpipe_status {
    let release = || {
        let mut found = handle::find(sample)?;
        // SAFETY: the caller's promise.
        let stream = unsafe { found.streams.get(stream) }?.into_owned();
        Ok(found.take().object.sample.release_on(&stream)?)
    };
    // SAFETY: the caller's promise.
    unsafe { make_optional(receipt, release) }
}

/// Waits until it is known whether the data of the released sample was complete.
///
/// `WARPIPE_DATA_LOST`: it was not; `WARPIPE_TIMEOUT`.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_receipt_wait(
    receipt: *const warpipe_receipt,
    timeout_ns: u64,
) -> warpipe_status {
    call(receipt, |receipt| Ok(receipt.wait(timeout(timeout_ns))?))
}
