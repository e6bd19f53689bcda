//! Leases: jobs and requests that this process does, and the answers that it owes for them.

use std::ffi::{c_char, c_void};
use std::time::Duration;

use warpipe::{AnswerError, AnswerHandle, Lease, Loan, Stream};

use crate::arguments::{out_object, text, timeout_unless_usual};
use crate::call::call;
use crate::handle::{self, Handle, Locked};
use crate::{
    LoanKind, OnDevice, Received, Result, Unpassed, lend, pass, run, warpipe_layout, warpipe_loan,
    warpipe_sample, warpipe_status,
};

/// The answer that this process owes for a job of a queue or a request of a client. Closed without
/// an answer, it is a failed attempt: another worker tries. The input is a sample of its own.
pub struct warpipe_lease(());

/// Writes the pointers of a lease and of its input, by a worker or a server.
///
/// # Safety
/// As for [`out_object`] and [`Streams::get`](crate::streams::Streams::get).
pub(crate) unsafe fn make_lease<S, T: 'static>(
    source: *mut S,
    stream: *mut c_void,
    lease: *mut *mut warpipe_lease,
    input: *mut *mut warpipe_sample,
    take: impl FnOnce(&mut T, &Stream) -> warpipe::Result<Lease>,
) -> warpipe_status
where
    S: Handle<Object = OnDevice<T>, Guard = Locked<OnDevice<T>>>,
{
    run(|| {
        // SAFETY: the caller's promise.
        let (lease, input) = unsafe { (out_object("lease", lease)?, out_object("input", input)?) };
        let (owed, received) = (handle::reserve()?, handle::reserve()?);
        let mut found = handle::find(source)?;
        let OnDevice { object, streams } = &mut *found;
        // SAFETY: the caller's promise.
        let leased = take(object, &*unsafe { streams.get(stream) }?)?;
        let (sample, answer) = Received::split(leased);
        lease.put(owed.fill(found.beside(answer)));
        input.put(received.fill(found.beside(sample)));
        Ok(())
    })
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

/// Sends an answer. One that could not be sent is put back.
fn answer(
    owed: &mut Locked<OnDevice<AnswerHandle>>,
    timeout_ns: u64,
    send: impl FnOnce(AnswerHandle, Duration) -> Result<(), AnswerError>,
) -> Result<(), Unpassed> {
    let OnDevice { object, streams } = owed.take();
    let wait = timeout_unless_usual(timeout_ns).unwrap_or(object.answer_timeout());
    send(object, wait).map_err(|AnswerError { error, returned }| {
        // Without one, the queue has received the answer all the same.
        if let Some(object) = returned.answer_handle.map(|answer| *answer) {
            owed.put_back(OnDevice { object, streams });
        }
        let (failure, loan) = (error.into(), returned.output);
        Unpassed { failure, loan }
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
    // SAFETY: the caller's promises.
    unsafe { lend(lease, layout, loan, AnswerHandle::output, LoanKind::Job) }
}

/// Completes the job, once the work enqueued on `stream` so far is done. `stream` is the stream
/// that the job was leased with, or was made to wait for that one. `loan` is the result, a loan of
/// `warpipe_lease_output` of this lease, which the work on `stream` fills; or null, for none. Waits
/// up to `timeout_ns` nanoseconds for the submitter to release earlier results
/// (`WARPIPE_USUAL_TIMEOUT`: as long as the worker's options say), but not for the device.
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
