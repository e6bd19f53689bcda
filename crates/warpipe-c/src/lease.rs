//! Leases: jobs and requests that this process does, and the answers that it owes for them.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use warpipe::{AnswerError, AnswerHandle, Error, Lease, Loan, Stream};

use crate::arguments::{out, out_object, slice_mut, text, timeout};
use crate::failure::{Failure, run, warpipe_status};
use crate::handle::{self, Locked, Object};
use crate::layout::{layout_of, warpipe_layout};
use crate::loan::{LoanKind, Unpassed, insert_loan, pass, warpipe_loan};
use crate::sample::{JobInput, ReceivedSample, SampleKind, warpipe_sample, warpipe_sample_info};
use crate::streams::Streams;

/// A job of a queue or a request of a client: its input, and the answer that this process owes.
pub struct warpipe_lease {
    _private: [u8; 0],
}

/// The answer that is owed for a job or request, apart from its input.
pub struct warpipe_answer {
    _private: [u8; 0],
}

/// An answer that is owed, and the input if it is not split off.
#[derive(Debug)]
pub(crate) struct Owed<I> {
    /// Declared first: the answer is sent before the input is released.
    answer: AnswerHandle,
    input: I,
    streams: Arc<Streams>,
}

/// The input of an answer that is owed.
pub(crate) trait Input {
    /// Sets the stream of an answer: its work reads the input.
    fn stay_behind(&mut self, stream: &Stream);

    /// Releases it behind the stream that it was leased with, or that of the last answer.
    fn release(self) -> Result<(), Error>;
}

/// The input of a lease.
#[derive(Debug)]
pub(crate) struct LeasedInput {
    /// `None` once it is released or split off.
    input: Option<JobInput>,
    /// The stream of the last answer that was tried; `None` is the one of the lease.
    behind: Option<Stream>,
}

impl LeasedInput {
    fn job(&self) -> &JobInput {
        self.input.as_ref().expect("a lease has its input")
    }

    fn release_once(&mut self) -> Result<(), Error> {
        let Some(JobInput { sample, .. }) = self.input.take() else {
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

impl Input for LeasedInput {
    fn stay_behind(&mut self, stream: &Stream) {
        self.behind = Some(stream.clone());
    }

    fn release(mut self) -> Result<(), Error> {
        self.release_once()
    }
}

/// No input: it was split off.
impl Input for () {
    fn stay_behind(&mut self, _stream: &Stream) {}

    fn release(self) -> Result<(), Error> {
        Ok(())
    }
}

/// Gives a lease to C, of a job or request that a process submitted. Its pointer comes first: a
/// job is not leased that has none.
pub(crate) fn insert_lease(
    streams: &Arc<Streams>,
    lease: impl FnOnce() -> Result<(Lease, i32), Failure>,
) -> Result<*mut warpipe_lease, Failure> {
    let entry = handle::reserve::<Owed<LeasedInput>>()?;
    let (lease, pid) = lease()?;
    let (input, answer) = JobInput::split(lease, pid);
    Ok(entry.fill(Owed {
        answer,
        input: LeasedInput {
            input: Some(input),
            behind: None,
        },
        streams: streams.clone(),
    }))
}

/// Runs `work` on a lease or an answer that stays the caller's.
fn with<I, P, R>(
    owed: *const P,
    work: impl FnOnce(&Owed<I>) -> Result<R, Failure>,
) -> Result<R, Failure>
where
    Owed<I>: Object<Pointee = P>,
{
    work(&*handle::lock(owed)?)
}

fn with_lease<R>(
    lease: *const warpipe_lease,
    work: impl FnOnce(&Owed<LeasedInput>) -> Result<R, Failure>,
) -> Result<R, Failure> {
    with(lease, work)
}

/// Lends memory for the result.
///
/// # Safety
/// `layout` is the address of a layout, `loan` that of a pointer.
unsafe fn output<I, P>(
    owed: *const P,
    layout: *const warpipe_layout,
    loan: *mut *mut warpipe_loan,
) -> Result<(), Failure>
where
    Owed<I>: Object<Pointee = P>,
{
    // SAFETY: the caller's promises.
    let (place, layout) = unsafe { (out_object("loan", loan)?, layout_of(layout)?) };
    with(owed, |owed: &Owed<I>| {
        let take = || Ok(LoanKind::Job(owed.answer.output(&layout)?));
        place.put(insert_loan(&owed.streams, take)?);
        Ok(())
    })
}

/// Completes a job behind the stream's work, with a result if there is one.
///
/// # Safety
/// `stream` is a stream of the worker's device.
unsafe fn complete<I: Input, P>(
    owed: *mut P,
    loan: Option<*mut warpipe_loan>,
    stream: *mut c_void,
) -> Result<(), Failure>
where
    Owed<I>: Object<Pointee = P>,
{
    let mut owed: Locked<Owed<I>> = handle::lock(owed)?;
    // SAFETY: the caller's promise.
    let stream = unsafe { owed.streams.get(stream) }?.into_owned();
    // Whatever the result: work that is enqueued there reads the input.
    owed.input.stay_behind(&stream);
    let mut send = |loan: Option<Loan>| answer(&mut owed, |answer| answer.complete(loan, &stream));
    match loan {
        Some(loan) => pass(loan, |loan| send(Some(loan))),
        None => send(None).map_err(|unpassed| unpassed.failure),
    }
}

/// Answers without a result.
fn refuse<I: Input, P>(
    owed: *mut P,
    send: impl FnOnce(AnswerHandle) -> Result<(), AnswerError>,
) -> Result<(), Failure>
where
    Owed<I>: Object<Pointee = P>,
{
    answer(&mut handle::lock(owed)?, send).map_err(|unpassed| unpassed.failure)
}

/// Sends an answer, and releases the input. An answer that could not be sent is put back, with the
/// input.
fn answer<I: Input>(
    owed: &mut Locked<Owed<I>>,
    send: impl FnOnce(AnswerHandle) -> Result<(), AnswerError>,
) -> Result<(), Unpassed> {
    let Owed {
        answer,
        input,
        streams,
    } = owed.take();
    let (failure, loan) = match send(answer) {
        Ok(()) => (None, None),
        Err(AnswerError {
            error,
            answer_handle: Some(answer),
            output,
        }) => {
            owed.put_back(Owed {
                answer: *answer,
                input,
                streams,
            });
            return Err(Unpassed {
                failure: error.into(),
                loan: output,
            });
        }
        // The queue has received it all the same.
        Err(sent) => (Some(sent.error), sent.output),
    };
    let released = input.release();
    match failure.or(released.err()) {
        None => Ok(()),
        Some(error) => Err(Unpassed {
            failure: error.into(),
            loan,
        }),
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
    run(|| {
        // SAFETY: the caller's promise.
        let place = unsafe { out("info", info) }?;
        with_lease(lease, |owed| {
            place.put(owed.input.job().info());
            Ok(())
        })
    })
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
    run(|| {
        with_lease(lease, |owed| {
            // SAFETY: the caller's promise.
            let stream = unsafe { owed.streams.get(stream) }?;
            Ok(owed.input.job().sample.wait_on(&stream)?)
        })
    })
}

/// Waits on the CPU until the input is complete. Device work needs no such wait.
///
/// `WARPIPE_DATA_LOST` when the submitter died first; `WARPIPE_TIMEOUT`.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_lease_wait(
    lease: *const warpipe_lease,
    timeout_ns: u64,
) -> warpipe_status {
    run(|| {
        with_lease(lease, |owed| {
            Ok(owed.input.job().sample.wait(timeout(timeout_ns))?)
        })
    })
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
    run(|| {
        // SAFETY: the caller's promise; bytes of any value are valid.
        let buffer = unsafe { slice_mut("buffer", buffer.cast::<u8>(), bytes) }?;
        with_lease(lease, |owed| {
            let sample = &owed.input.job().sample;
            Ok(sample.copy_to(buffer, timeout(timeout_ns))?)
        })
    })
}

/// Lends memory of this process for the result, a tensor of this layout, with undefined contents.
///
/// `*loan` is the caller's, to be closed by `warpipe_lease_complete_with` of this lease or
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
    run(|| unsafe { output::<LeasedInput, _>(lease, layout, loan) })
}

/// Waits until an answer would not have to wait for the submitter to release earlier results. Sends
/// no answer.
///
/// `WARPIPE_PEER_GONE` when the submitter has; `WARPIPE_TIMEOUT`.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_lease_wait_for_room(
    lease: *const warpipe_lease,
    timeout_ns: u64,
) -> warpipe_status {
    run(|| {
        with_lease(lease, |owed| {
            Ok(owed.answer.wait_for_room(timeout(timeout_ns))?)
        })
    })
}

/// Completes the job without a result, once the work enqueued on `stream` so far is done, and
/// releases the input behind that work. `stream` is the stream that the job was leased with, or was
/// made to wait for that one. Does not wait for the device.
///
/// Closes `lease` when it succeeds, and also when the driver fails after the submitter has seen the
/// answer (`WARPIPE_DEVICE_FAILED`). Else the lease stays the caller's, to be answered again or
/// closed: `WARPIPE_PEER_GONE` when the submitter has; `WARPIPE_TIMEOUT` when it holds too many
/// earlier results for longer than the answer's timeout; `WARPIPE_INVALID_INPUT` for a stream of
/// another device; `WARPIPE_INVALID_STATE` for one that is being captured.
///
/// # Safety
/// `stream` is a stream of the worker's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_lease_complete(
    lease: *mut warpipe_lease,
    stream: *mut c_void,
) -> warpipe_status {
    // SAFETY: the caller's promise.
    run(|| unsafe { complete::<LeasedInput, _>(lease, None, stream) })
}

/// `warpipe_lease_complete` with a result: a loan of `warpipe_lease_output` of this lease, which the
/// work on `stream` fills.
///
/// Closes `loan` with `lease`. `WARPIPE_INVALID_INPUT` for a loan of another lease, and
/// `WARPIPE_INVALID_STATE` for one of a publisher: both stay the caller's, as after the other errors
/// of `warpipe_lease_complete`.
///
/// # Safety
/// As for `warpipe_lease_complete`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_lease_complete_with(
    lease: *mut warpipe_lease,
    loan: *mut warpipe_loan,
    stream: *mut c_void,
) -> warpipe_status {
    // SAFETY: the caller's promise.
    run(|| unsafe { complete::<LeasedInput, _>(lease, Some(loan), stream) })
}

/// Fails this attempt: another worker tries, as often as the queue allows. At most 200 bytes of the
/// reason are sent. Closes `lease`, or fails, as `warpipe_lease_complete`.
///
/// # Safety
/// `reason` is a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_lease_fail(
    lease: *mut warpipe_lease,
    reason: *const c_char,
) -> warpipe_status {
    run(|| {
        // SAFETY: the caller's promise.
        let reason = unsafe { text("reason", reason) }?;
        refuse::<LeasedInput, _>(lease, |answer| answer.fail(reason))
    })
}

/// Rejects the job: no worker tries it again, and its submitter gets `WARPIPE_JOB_FAILED`. At most
/// 200 bytes of the reason are sent. Closes `lease`, or fails, as `warpipe_lease_complete`.
///
/// # Safety
/// `reason` is a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_lease_reject(
    lease: *mut warpipe_lease,
    reason: *const c_char,
) -> warpipe_status {
    run(|| {
        // SAFETY: the caller's promise.
        let reason = unsafe { text("reason", reason) }?;
        refuse::<LeasedInput, _>(lease, |answer| answer.reject(reason))
    })
}

/// Returns the job for another worker, at no cost of an attempt: for a worker that leaves. Closes
/// `lease`, or fails, as `warpipe_lease_complete`.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_lease_requeue(lease: *mut warpipe_lease) -> warpipe_status {
    run(|| refuse::<LeasedInput, _>(lease, AnswerHandle::requeue))
}

/// Splits a lease into its input and its answer: for a caller that reads the input beyond the
/// answer. Closes `lease`.
///
/// `*sample` is the caller's, to be closed by `warpipe_sample_finish`, `warpipe_sample_release` or
/// `warpipe_sample_release_on`: behind every stream with work that reads it. `*answer` is the
/// caller's, to be closed by the answer, or `warpipe_answer_close`.
///
/// # Safety
/// `sample` and `answer` are the addresses of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_lease_split(
    lease: *mut warpipe_lease,
    sample: *mut *mut warpipe_sample,
    answer: *mut *mut warpipe_answer,
) -> warpipe_status {
    run(|| {
        // SAFETY: the caller's promises.
        let (sample, place) =
            unsafe { (out_object("sample", sample)?, out_object("answer", answer)?) };
        let mut lease = handle::lock::<Owed<LeasedInput>>(lease)?;
        // Before the lease is taken apart: without both pointers it stays as it is.
        let (half, other) = (handle::reserve::<Owed<()>>()?, handle::reserve()?);
        let Owed {
            answer,
            mut input,
            streams,
        } = lease.take();
        let input = input.input.take().expect("a lease has its input");
        place.put(half.fill(Owed {
            answer,
            input: (),
            streams: streams.clone(),
        }));
        sample.put(other.fill(ReceivedSample {
            sample: SampleKind::Input(input),
            streams,
        }));
        Ok(())
    })
}

/// Closes a lease that was not answered, which is a failed attempt: another worker tries. While
/// another thread is in a call on it, it ends when that call returns. Null is ignored.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_lease_close(lease: *mut warpipe_lease) -> warpipe_status {
    run(|| handle::close::<Owed<LeasedInput>>(lease))
}

/// As `warpipe_lease_output`; the loan is closed by `warpipe_answer_complete_with` of this answer or
/// `warpipe_loan_discard`.
///
/// # Safety
/// As for `warpipe_lease_output`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_answer_output(
    answer: *const warpipe_answer,
    layout: *const warpipe_layout,
    loan: *mut *mut warpipe_loan,
) -> warpipe_status {
    // SAFETY: the caller's promises.
    run(|| unsafe { output::<(), _>(answer, layout, loan) })
}

/// As `warpipe_lease_wait_for_room`.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_answer_wait_for_room(
    answer: *const warpipe_answer,
    timeout_ns: u64,
) -> warpipe_status {
    run(|| {
        with(answer, |owed: &Owed<()>| {
            Ok(owed.answer.wait_for_room(timeout(timeout_ns))?)
        })
    })
}

/// As `warpipe_lease_complete`; the input is the caller's own to release.
///
/// # Safety
/// As for `warpipe_lease_complete`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_answer_complete(
    answer: *mut warpipe_answer,
    stream: *mut c_void,
) -> warpipe_status {
    // SAFETY: the caller's promise.
    run(|| unsafe { complete::<(), _>(answer, None, stream) })
}

/// As `warpipe_lease_complete_with`, with a loan of `warpipe_answer_output` of this answer, or of
/// `warpipe_lease_output` of the lease that it was split from.
///
/// # Safety
/// As for `warpipe_lease_complete`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_answer_complete_with(
    answer: *mut warpipe_answer,
    loan: *mut warpipe_loan,
    stream: *mut c_void,
) -> warpipe_status {
    // SAFETY: the caller's promise.
    run(|| unsafe { complete::<(), _>(answer, Some(loan), stream) })
}

/// As `warpipe_lease_fail`.
///
/// # Safety
/// `reason` is a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_answer_fail(
    answer: *mut warpipe_answer,
    reason: *const c_char,
) -> warpipe_status {
    run(|| {
        // SAFETY: the caller's promise.
        let reason = unsafe { text("reason", reason) }?;
        refuse::<(), _>(answer, |answer| answer.fail(reason))
    })
}

/// As `warpipe_lease_reject`.
///
/// # Safety
/// `reason` is a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_answer_reject(
    answer: *mut warpipe_answer,
    reason: *const c_char,
) -> warpipe_status {
    run(|| {
        // SAFETY: the caller's promise.
        let reason = unsafe { text("reason", reason) }?;
        refuse::<(), _>(answer, |answer| answer.reject(reason))
    })
}

/// As `warpipe_lease_requeue`.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_answer_requeue(answer: *mut warpipe_answer) -> warpipe_status {
    run(|| refuse::<(), _>(answer, AnswerHandle::requeue))
}

/// Closes an answer that was not given, which is a failed attempt: another worker tries. While
/// another thread is in a call on it, it ends when that call returns. Null is ignored.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_answer_close(answer: *mut warpipe_answer) -> warpipe_status {
    run(|| handle::close::<Owed<()>>(answer))
}
