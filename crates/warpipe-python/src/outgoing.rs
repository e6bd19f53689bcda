//! A publisher's loan, and its dispatch.

use std::time::Duration;

use pyo3::exceptions::PyBaseException;
use pyo3::prelude::*;
use warpipe::Error;

use crate::errors::Fault;
use crate::loan::Loan;
use crate::slot::Slot;
use crate::wait::{Given, waiting};

/// How long another thread's send is waited for where the policy does not wait, as the library's
/// own send does.
pub const HELD_UP: Duration = Duration::from_secs(10);

/// Sends the sample after `stream`'s work. It waits `patience` at most (None: no limit), for room
/// where the policy blocks, and for another thread's send that the driver blocks. Ctrl-C ends the
/// wait: then nothing was sent.
pub fn dispatch(
    py: Python<'_>,
    slot: Slot,
    stream: &warpipe::Stream,
    patience: Option<Duration>,
) -> PyResult<u64> {
    let sample = match slot {
        Slot::Sample(sample) => sample.into_inner(),
        Slot::Work(_) => {
            return Err(Fault::argument("the loan", "a queue's", "a publisher's").into());
        }
    };
    let goes_on = || Ok(());
    waiting(py, patience, goes_on, |wait| {
        let unsent = match sample.send_within(stream, wait) {
            Ok(sequence) => return Ok(sequence),
            Err(unsent) => unsent,
        };
        if let Some(sample) = unsent.returned {
            // Work that fills the slot may still be pending.
            let _ = sample.discard(stream);
        }
        Err(match unsent.error {
            // The loan's own publisher, which was closed here.
            Error::PeerGone { name, .. } => Fault::closed("publisher", &name),
            error => error.into(),
        })
    })
}

/// A slot on loan: memory of the publisher's device that has no reader yet, to be filled in place.
///
/// In ``with publisher.loan(shape, dtype) as out:`` the end of the block sends it, or discards it
/// if the block raises. Fill it as any ``Loan``.
#[pyclass(frozen, extends = Loan, module = "warpipe", name = "SampleMut")]
#[derive(Debug)]
pub struct Outgoing {}

impl Outgoing {
    /// Wraps a loan of a publisher.
    pub fn new(py: Python<'_>, loan: PyClassInitializer<Loan>) -> PyResult<Py<Outgoing>> {
        Py::new(py, loan.add_subclass(Outgoing {}))
    }
}

#[pymethods]
impl Outgoing {
    /// Sends it to every subscriber, after the work of all streams that arrays of it were made on,
    /// and of ``stream``. Returns its sequence number, from 1. Does not wait for the device. If it
    /// raises, the loan is gone.
    ///
    /// Raises ``TimeoutError`` or ``FullError`` by the publisher's policy, ``ClosedError``,
    /// ``ReleasedError``, ``DriverError``.
    #[pyo3(signature = (*, stream = None), text_signature = "($self, *, stream=None)")]
    fn send(slf: &Bound<'_, Outgoing>, stream: Given<'_, '_>) -> PyResult<u64> {
        let (py, loan) = (slf.py(), slf.as_super().get());
        let (slot, stream) = loan.take_out(py, stream)?;
        dispatch(py, slot, &stream, loan.patience())
    }

    #[pyo3(signature = (kind, _error, _trace), text_signature = "($self, kind, _error, _trace)")]
    fn __exit__(
        slf: &Bound<'_, Outgoing>,
        kind: Given<'_, '_>,
        _error: Option<&Bound<'_, PyBaseException>>,
        _trace: Given<'_, '_>,
    ) -> PyResult<()> {
        let loan = slf.as_super().get();
        if !loan.is_open()? {
            return Ok(());
        }
        if kind.is_some() {
            loan.discard(slf.py(), None)
        } else {
            Outgoing::send(slf, None).map(drop)
        }
    }
}
