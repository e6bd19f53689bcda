//! Memory on loan: to be filled, then sent, submitted, or given as an answer.

use std::ffi::{c_char, c_void};
use std::ops::Deref;

use warpipe::{Layout, Loan, SampleMut, Stream, Wait};

use crate::arguments::{put_unless_null, slice, text_or_null, timeout_unless_usual};
use crate::call::{call, get, make_beside};
use crate::handle::{self, Handle, Locked};
use crate::{Failure, OnDevice, Result, layout_copy, warpipe_layout, warpipe_status};

/// Memory on loan from a publisher, a queue, a client or a lease: for the caller to fill, on the
/// device, then to send, to submit, or to answer with. Its contents are undefined at first. Closed,
/// it returns unused, behind the work of the streams that it was written on or passed with; if the
/// caller's own kernels may be writing it, discard it with their stream (`warpipe_loan_discard`)
/// instead.
pub struct warpipe_loan(());

/// The memory of a loan.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_loan_info {
    /// The device address of the element with all indices 0: a `CUdeviceptr`, or on the host an
    /// address of this process.
    pub data: u64,
    /// The device address of the first byte of `layout.bytes`.
    pub slot: u64,
    /// The tensor's layout.
    pub layout: warpipe_layout,
}

/// A loan, by what may be done with it.
#[derive(Debug)]
pub(crate) enum LoanKind {
    /// Of a publisher.
    Sample(SampleMut),
    /// Of a queue, a client or a lease.
    Job(Loan),
}

impl Deref for LoanKind {
    type Target = SampleMut;

    fn deref(&self) -> &SampleMut {
        match self {
            LoanKind::Sample(sample) => sample,
            LoanKind::Job(loan) => loan,
        }
    }
}

impl LoanKind {
    /// The loan, if it is a publisher's.
    pub(crate) fn of_publisher(&mut self) -> Result<&mut SampleMut> {
        match self {
            LoanKind::Sample(sample) => Ok(sample),
            LoanKind::Job(_) => Err(Failure::state("this loan is not a publisher's")),
        }
    }

    pub(crate) fn write(&mut self, stream: &Stream, data: &[u8]) -> Result<()> {
        match self {
            LoanKind::Sample(sample) => Ok(sample.write(stream, data)?),
            LoanKind::Job(loan) => Ok(loan.write(stream, data)?),
        }
    }

    /// Notes that work on the stream may fill it: it goes back behind that.
    pub(crate) fn stay_behind(&mut self, stream: &Stream) {
        match self {
            LoanKind::Sample(sample) => sample.stay_behind(stream),
            LoanKind::Job(loan) => loan.stay_behind(stream),
        }
    }
}

/// Lends memory of an object's device to C, for a tensor of the caller's layout.
///
/// # Safety
/// As for [`layout_copy`] and [`make_beside`].
#[inline(always)]
pub(crate) unsafe fn lend<S: Handle<Object = OnDevice<T>>, T, L, E: Into<Failure>>(
    source: *const S,
    layout: *const warpipe_layout,
    loan: *mut *mut warpipe_loan,
    take: impl FnOnce(&T, &Layout) -> Result<L, E>,
    kind: impl FnOnce(L) -> LoanKind,
) -> warpipe_status {
    let take = |found: &mut S::Guard| {
        let take = |layout: &Layout| Ok(kind(take(&found.object, layout).map_err(E::into)?));
        // SAFETY: the caller's promise.
        unsafe { layout_copy(layout) }?.checked(take)
    };
    // SAFETY: the caller's promise.
    unsafe { make_beside(source, "loan", loan, take) }
}

/// A loan that was not taken.
pub(crate) struct Unpassed {
    pub(crate) failure: Failure,
    /// It, unless it is used up all the same.
    pub(crate) loan: Option<Box<Loan>>,
}

/// Passes a loan of a queue, a client or a lease to `work`. One that `work` returns with its
/// failure stays the caller's.
pub(crate) fn pass<R, E: Into<Unpassed>>(
    loan: *mut warpipe_loan,
    work: impl FnOnce(Loan) -> Result<R, E>,
) -> Result<R> {
    let mut lent = handle::find(loan)?;
    let OnDevice { object, streams } = lent.take();
    let (failure, returned) = match object {
        LoanKind::Job(loan) => match work(loan).map_err(E::into) {
            Ok(passed) => return Ok(passed),
            Err(Unpassed { failure, loan }) => (failure, loan.map(|loan| LoanKind::Job(*loan))),
        },
        sample => {
            let failure = Failure::state("this loan is a publisher's; send it");
            (failure, Some(sample))
        }
    };
    if let Some(object) = returned {
        lent.put_back(OnDevice { object, streams });
    }
    Err(failure)
}

/// A loan in a call that sends it: closed once it is sent, also where the call panics.
struct Sending<'a>(&'a mut Locked<OnDevice<LoanKind>>);

impl Drop for Sending<'_> {
    fn drop(&mut self) {
        if matches!(&self.0.object, LoanKind::Sample(sample) if sample.is_given()) {
            self.0.close();
        }
    }
}

/// Describes a loan: its address and layout.
///
/// # Safety
/// `info` is the address of such a structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_loan_get_info(
    loan: *const warpipe_loan,
    info: *mut warpipe_loan_info,
) -> warpipe_status {
    let info_of = |loan: &SampleMut| warpipe_loan_info {
        data: loan.ptr(),
        slot: loan.slot_ptr(),
        layout: warpipe_layout::of(loan.layout()),
    };
    // SAFETY: the caller's promise.
    unsafe { get(loan, "info", info, |loan| info_of(loan)) }
}

/// Sets bytes that travel with the tensor: up to 4,096 of a publisher's loan,
/// less what describes its parts, or the place of a tensor in place; up to 200 of another.
///
/// `WARPIPE_INVALID_INPUT` for more.
///
/// # Safety
/// `metadata` is the address of `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_loan_set_metadata(
    loan: *mut warpipe_loan,
    metadata: *const c_void,
    bytes: usize,
) -> warpipe_status {
    call(loan, |lent| {
        // SAFETY: the caller's promise.
        let metadata = unsafe { slice("metadata", metadata.cast::<u8>(), bytes) }?;
        match &mut lent.object {
            LoanKind::Sample(sample) => Ok(sample.set_metadata(metadata)?),
            LoanKind::Job(loan) => Ok(loan.set_metadata(metadata)?),
        }
    })
}

/// Copies the slot's whole contents, `layout.bytes` bytes, or those of the part with this name,
/// from memory of the host, in the stream's order; `part` may be null. The source may be reused
/// when the call returns.
///
/// `WARPIPE_INVALID_INPUT` unless `bytes` is that many, or if there is no such part;
/// `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `part` is null or a text, `data` the address of `bytes` bytes; `stream` is a stream of the
/// endpoint's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_loan_write(
    loan: *mut warpipe_loan,
    stream: *mut c_void,
    part: *const c_char,
    data: *const c_void,
    bytes: usize,
) -> warpipe_status {
    call(loan, |lent| {
        let OnDevice { object, streams } = &mut **lent;
        // SAFETY: the caller's promises.
        let (part, data, stream) = unsafe {
            let data = slice("data", data.cast::<u8>(), bytes)?;
            (text_or_null("part", part)?, data, streams.get(stream)?)
        };
        match part {
            Some(part) => Ok(object.of_publisher()?.write_part(&stream, part, data)?),
            None => object.write(&stream, data),
        }
    })
}

/// Sends a publisher's loan to every subscriber, behind the work enqueued on `stream` so far.
/// `*sequence`, which may be null, becomes its number, from 1. Does not wait for the device, but up
/// to `timeout_ns` nanoseconds for room where the policy is `WARPIPE_POLICY_BLOCK`:
/// `WARPIPE_USUAL_TIMEOUT` as long as that says.
///
/// Closes `loan` when it succeeds, and also when the driver fails (`WARPIPE_DEVICE_FAILED`:
/// subscribers see that the sample is lost). Else the loan stays the caller's, to be sent again or
/// discarded: `WARPIPE_TIMEOUT` or `WARPIPE_LIMIT_REACHED` by the publisher's policy,
/// `WARPIPE_INVALID_INPUT`, `WARPIPE_INVALID_STATE` for a loan that is not a publisher's or a
/// stream that is being captured.
///
/// # Safety
/// `stream` is a stream of the publisher's device; `sequence` is null or the address of a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_loan_send(
    loan: *mut warpipe_loan,
    stream: *mut c_void,
    timeout_ns: u64,
    sequence: *mut u64,
) -> warpipe_status {
    call(loan, |lent| {
        let sending = Sending(lent);
        let OnDevice { object, streams } = &mut **sending.0;
        let LoanKind::Sample(sample) = object else {
            let said = "this loan is not a publisher's; submit it, or answer with it";
            return Err(Failure::state(said));
        };
        let wait = timeout_unless_usual(timeout_ns).map(Wait::from);
        // SAFETY: the caller's promise of the stream; `sending` closes a loan that is given.
        let sent = unsafe { sample.send_in_place(&*streams.get(stream)?, wait) }?;
        // SAFETY: the caller's promise.
        unsafe { put_unless_null(sequence, sent) };
        Ok(())
    })
}

/// Returns a loan unused, once the work enqueued on `stream` so far is done. Closes `loan`, also
/// when the driver fails.
///
/// # Safety
/// `stream` is a stream of the endpoint's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_loan_discard(
    loan: *mut warpipe_loan,
    stream: *mut c_void,
) -> warpipe_status {
    call(loan, |lent| {
        // SAFETY: the caller's promise.
        let stream = unsafe { lent.streams.get(stream) }?.into_owned();
        match lent.take().object {
            LoanKind::Sample(sample) => Ok(sample.discard(&stream)?),
            LoanKind::Job(loan) => Ok(loan.discard(&stream)?),
        }
    })
}
