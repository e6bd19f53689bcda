//! Leases: jobs and requests that this process does, and the answers that it owes for them.

use std::ffi::{c_char, c_void};
use std::time::Duration;

use warpipe::{AnswerError, AnswerHandle, Error, Layout, Lease, Loan, Stream};

use crate::arguments::{slice_mut, text, timeout, timeout_unless_usual};
use crate::call::{call, call_on, make_of, read};
use crate::handle::{self, Locked};
use crate::{
    Failure, LoanKind, OnDevice, Received, Result, Unpassed, lend, pass, run, warpipe_layout,
    warpipe_loan, warpipe_sample, warpipe_sample_info, warpipe_status,
};

/// A job of a queue or a request of a client: its input, and the answer that this process owes.
pub struct warpipe_lease(());

/// A worker or a server.
#[derive(Debug)]
pub(crate) struct Answering<T> {
    pub(crate) endpoint: T,
    /// How long an answer usually waits.
    pub(crate) answer_timeout: Duration,
}

/// An answer that is owed, and the input if it is not split off.
#[derive(Debug)]
pub(crate) struct Owed {
    /// Declared first: the answer is sent before the input is released.
    answer: AnswerHandle,
    input: LeasedInput,
    /// How long an answer usually waits.
    timeout: Duration,
}

/// The input of a lease.
#[derive(Debug)]
pub(crate) struct LeasedInput {
    /// `None` once it is released or split off.
    input: Option<Received>,
    /// The stream of the last answer that was tried; `None` is the one of the lease.
    behind: Option<Stream>,
}

impl LeasedInput {
    fn was_split() -> Failure {
        Failure::state("the input was split off this lease; use that sample")
    }

    fn job(&self) -> Result<&Received> {
        self.input.as_ref().ok_or_else(LeasedInput::was_split)
    }

    /// Releases it behind the stream that it was leased with, or that of the last answer.
    fn release_once(&mut self) -> Result<(), Error> {
        let Some(Received { sample, .. }) = self.input.take() else {
            return Ok(());
        };
        let released = match self.behind.take() {
            Some(stream) => sample.release_on(&stream),
            None => sample.release(),
        };
        released.map(drop)
    }
}

impl Drop for LeasedInput {
    fn drop(&mut self) {
        let _ = self.release_once();
    }
}

impl Owed {
    pub(crate) fn of(lease: Lease, timeout: Duration) -> Owed {
        let (input, answer) = Received::split(lease);
        Owed {
            answer,
            input: LeasedInput {
                input: Some(input),
                behind: None,
            },
            timeout,
        }
    }
}

/// Answers without a result.
fn refuse(
    lease: *mut warpipe_lease,
    timeout_ns: u64,
    send: impl FnOnce(AnswerHandle, Duration) -> Result<(), AnswerError>,
) -> Result<()> {
    let owed = &mut handle::find(lease)?;
    answer(owed, timeout_ns, send).map_err(|unpassed| unpassed.failure)
}

/// Sends an answer, and releases the input. An answer that could not be sent is put back, with the
/// input.
fn answer(
    owed: &mut Locked<OnDevice<Owed>>,
    timeout_ns: u64,
    send: impl FnOnce(AnswerHandle, Duration) -> Result<(), AnswerError>,
) -> Result<(), Unpassed> {
    let OnDevice { object, streams } = owed.take();
    let Owed {
        answer,
        mut input,
        timeout,
    } = object;
    let wait = timeout_unless_usual(timeout_ns).unwrap_or(timeout);
    let (failure, loan) = match send(answer, wait) {
        Ok(()) => (None, None),
        Err(AnswerError { error, returned }) => {
            let loan = returned.output;
            if let Some(answer) = returned.answer_handle.map(|answer| *answer) {
                let object = Owed {
                    answer,
                    input,
                    timeout,
                };
                owed.put_back(OnDevice { object, streams });
                let failure = error.into();
                return Err(Unpassed { failure, loan });
            }
            // The queue has received it all the same.
            (Some(error), loan)
        }
    };
    let released = input.release_once();
    match failure.or(released.err()) {
        None => Ok(()),
        Some(error) => {
            let failure = error.into();
            Err(Unpassed { failure, loan })
        }
    }
}

/// Describes a lease: its input's address, layout and metadata, and its job.
///
/// # Safety
/// `info` is the address of such a structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_lease_get_info(
    lease: *const warpipe_lease,
    info: *mut warpipe_sample_info,
) -> warpipe_status {
    // SAFETY: the caller's promise.
    unsafe {
        read(lease, "info", info, |owed| {
            owed.input.job().map(Received::info)
        })
    }
}

/// Makes another stream wait, on the device, until the input is complete: as
/// `warpipe_sample_wait_on`.
///
/// `WARPIPE_DATA_LOST` when the submitter died before the input was complete;
/// `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `stream` is a stream of the worker's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_lease_wait_on(
    lease: *const warpipe_lease,
    stream: *mut c_void,
) -> warpipe_status {
    let wait_on = |owed: &Owed, stream: &Stream| Ok(owed.input.job()?.sample.wait_on(stream)?);
    // SAFETY: the caller's promise.
    unsafe { call_on(lease, stream, wait_on) }
}

/// Waits on the CPU until the input is complete. Device work needs no such wait.
///
/// `WARPIPE_DATA_LOST` when the submitter died first; `WARPIPE_TIMEOUT`.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_lease_wait(
    lease: *const warpipe_lease,
    timeout_ns: u64,
) -> warpipe_status {
    let timeout = timeout(timeout_ns);
    call(lease, |owed| Ok(owed.input.job()?.sample.wait(timeout)?))
}

/// Waits for the input and copies the whole slot, `layout.bytes` bytes, to memory of the host.
///
/// `WARPIPE_DATA_LOST`; `WARPIPE_TIMEOUT`; `WARPIPE_INVALID_INPUT` unless `bytes` is that many.
///
/// # Safety
/// `buffer` is the address of `bytes` bytes that nothing else uses during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_lease_copy_to(
    lease: *const warpipe_lease,
    buffer: *mut c_void,
    bytes: usize,
    timeout_ns: u64,
) -> warpipe_status {
    call(lease, |owed| {
        // SAFETY: the caller's promise; bytes of any value are valid.
        let buffer = unsafe { slice_mut("buffer", buffer.cast::<u8>(), bytes) }?;
        let sample = &owed.input.job()?.sample;
        Ok(sample.copy_to(buffer, timeout(timeout_ns))?)
    })
}

/// Lends memory of this process for the result, a tensor of this layout, with undefined contents.
///
/// `*loan` is the caller's, to be closed by `warpipe_lease_complete` of this lease or
/// `warpipe_loan_discard`.
///
/// `WARPIPE_LIMIT_REACHED` when the memory limit is in use for longer than the answer's timeout, or
/// the device is full.
///
/// # Safety
/// `layout` is the address of a layout, `loan` that of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_lease_output(
    lease: *const warpipe_lease,
    layout: *const warpipe_layout,
    loan: *mut *mut warpipe_loan,
) -> warpipe_status {
    let output = |owed: &Owed, layout: &Layout| owed.answer.output(layout);
    // SAFETY: the caller's promises.
    unsafe { lend(lease, layout, loan, output, LoanKind::Job) }
}

/// Completes the job, once the work enqueued on `stream` so far is done, and releases the input
/// behind that work. `stream` is the stream that the job was leased with, or was made to wait for
/// that one. `loan` is the result, a loan of `warpipe_lease_output` of this lease, which the work
/// on `stream` fills; or null, for none. Waits up to `timeout_ns` nanoseconds for the submitter to
/// release earlier results (`WARPIPE_USUAL_TIMEOUT`: as long as the worker's options say), but not
/// for the device.
///
/// Closes `lease` and `loan` when it succeeds, and also when the driver fails after the submitter
/// has seen the answer (`WARPIPE_DEVICE_FAILED`). Else both stay the caller's, to be answered again
/// or closed: `WARPIPE_PEER_GONE` when the submitter has; `WARPIPE_TIMEOUT` when it holds too many
/// earlier results; `WARPIPE_INVALID_INPUT` for a stream of another device, or a loan of another
/// lease; `WARPIPE_INVALID_STATE` for a stream that is being captured, or a loan of a publisher.
///
/// # Safety
/// `stream` is a stream of the worker's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_lease_complete(
    lease: *mut warpipe_lease,
    loan: *mut warpipe_loan,
    stream: *mut c_void,
    timeout_ns: u64,
) -> warpipe_status {
    call(lease, |owed| {
        // SAFETY: the caller's promise.
        let stream = unsafe { owed.streams.get(stream) }?.into_owned();
        // Whatever the result: work that is enqueued there reads the input.
        owed.input.behind = Some(stream.clone());
        let mut send = |loan: Option<Loan>| {
            answer(owed, timeout_ns, |answer, wait| {
                answer.complete(loan, &stream, wait)
            })
        };
        match loan.is_null() {
            false => pass(loan, |loan| send(Some(loan))),
            true => send(None).map_err(|unpassed| unpassed.failure),
        }
    })
}

/// Fails this attempt: another worker tries, as often as the queue allows. At most 200 bytes of the
/// reason are sent. Waits, closes `lease`, or fails, as `warpipe_lease_complete`.
///
/// # Safety
/// `reason` is a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_lease_fail(
    lease: *mut warpipe_lease,
    reason: *const c_char,
    timeout_ns: u64,
) -> warpipe_status {
    run(|| {
        // SAFETY: the caller's promise.
        let reason = unsafe { text("reason", reason) }?;
        refuse(lease, timeout_ns, |answer, wait| answer.fail(reason, wait))
    })
}

/// Rejects the job: no worker tries it again, and its submitter gets `WARPIPE_JOB_FAILED`. At most
/// 200 bytes of the reason are sent. Waits, closes `lease`, or fails, as `warpipe_lease_complete`.
///
/// # Safety
/// `reason` is a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_lease_reject(
    lease: *mut warpipe_lease,
    reason: *const c_char,
    timeout_ns: u64,
) -> warpipe_status {
    run(|| {
        // SAFETY: the caller's promise.
        let reason = unsafe { text("reason", reason) }?;
        refuse(lease, timeout_ns, |answer, wait| {
            answer.reject(reason, wait)
        })
    })
}

/// Returns the job for another worker, at no cost of an attempt: for a worker that leaves. Closes
/// `lease`, or fails, as `warpipe_lease_complete`.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_lease_requeue(
    lease: *mut warpipe_lease,
    timeout_ns: u64,
) -> warpipe_status {
    run(|| refuse(lease, timeout_ns, |answer, wait| answer.requeue(wait)))
}

/// Splits a lease's input off, for a caller that reads it beyond the answer. The lease stays the
/// caller's, to be answered or closed; calls that ask for its input say `WARPIPE_INVALID_STATE`.
///
/// `*sample` is the caller's, to be closed by `warpipe_sample_finish`, `warpipe_sample_release` or
/// `warpipe_sample_release_on`: behind every stream with work that reads it.
///
/// # Safety
/// `sample` is the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_lease_split(
    lease: *mut warpipe_lease,
    sample: *mut *mut warpipe_sample,
) -> warpipe_status {
    let split = |owed: &mut Locked<OnDevice<Owed>>| {
        let input = owed.input.input.take();
        Ok(owed.beside(input.ok_or_else(LeasedInput::was_split)?))
    };
    // SAFETY: the caller's promise.
    unsafe { make_of(lease, "sample", sample, split) }
}

/// Closes a lease that was not answered, which is a failed attempt: another worker tries. While
/// another thread is in a call on it, it ends when that call returns. Null is ignored.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_lease_close(lease: *mut warpipe_lease) -> warpipe_status {
    run(|| handle::close(lease))
}
