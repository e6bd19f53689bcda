//! A job of a worker, or a request of a server: the input, the answer, and memory for the result.

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use pyo3::prelude::*;
use warpipe::{AnswerError, AnswerHandle, Error, Layout, Wait};

use crate::copies::CopyContext;
use crate::detached::DropDetached;
use crate::dtype;
use crate::errors::{Fault, Outcome};
use crate::exclusive::locked;
use crate::frame::Frame;
use crate::loan::{Loan, Slot, slot_of};
use crate::metadata::Metadata;
use crate::process::Home;
use crate::stream::Consumer;
use crate::wait::{Given, waiting};

/// The limit for giving a job back that was never returned to Python.
const RETURN_TIMEOUT: Duration = Duration::from_secs(10);

/// A job of a worker, or a request of a server, to be answered once: ``complete``, ``fail``,
/// ``requeue`` or ``reject``. Its input is an array, lent as any ``Sample`` is, and given back with the
/// answer; arrays made of it keep it longer.
///
/// In ``with lease:`` an exception in the block fails the job with that reason, is logged, and ends
/// the block alone; an exception that ends the program (``KeyboardInterrupt``, ``SystemExit``) gives
/// the job back, which costs no attempt. A lease that is left, or dropped, without an answer has
/// failed.
#[pyclass(frozen, extends = Frame, module = "warpipe")]
#[derive(Debug)]
pub struct Lease {
    home: Home,
    context: CopyContext,
    /// `None` once it is answered.
    answer_handle: Mutex<Option<DropDetached<AnswerHandle>>>,
    /// The job's number, from 1.
    #[pyo3(get)]
    job: u64,
    /// Which attempt this is, from 1.
    #[pyo3(get)]
    attempt: u32,
    /// The process id of the queue's owner: of a request the client.
    #[pyo3(get)]
    queue_pid: i32,
    /// The deadline of the answer, in nanoseconds of ``time.monotonic_ns()``; None if there is
    /// none.
    #[pyo3(get)]
    deadline_ns: Option<u64>,
}

impl Lease {
    /// A lease as Python has it.
    pub fn object(
        py: Python<'_>,
        lease: warpipe::Lease,
        context: &CopyContext,
    ) -> PyResult<Py<Frame>> {
        let (metadata, queue_pid) = (lease.metadata().to_vec(), lease.queue_pid);
        let (input, answer_handle) = (lease.input, lease.answer_handle);
        let frame = Frame::new(input, Some(metadata), &context.device, context.patience);
        let lease = Lease {
            home: Home::here(),
            context: context.clone(),
            job: answer_handle.job,
            attempt: answer_handle.attempt,
            queue_pid,
            deadline_ns: answer_handle.deadline_ns,
            answer_handle: Mutex::new(Some(DropDetached::new(answer_handle))),
        };
        let whole = Bound::new(py, frame.add_subclass(lease))?;
        Ok(whole.into_super().unbind())
    }

    /// Gives back leases that were never returned to Python; other frames are released as any. No
    /// signal interrupts this: an attempt would have failed.
    pub fn return_all(py: Python<'_>, unused: impl IntoIterator<Item = Py<Frame>>) {
        for frame in unused {
            // A lease that cannot be given back counts as failed when it is dropped: no caller is
            // left to get the error.
            if let Ok(lease) = frame.bind(py).cast::<Lease>() {
                let _ = lease.get().return_unused(py);
                let _ = frame.get().owner.release(py, None);
            }
        }
    }

    fn return_unused(&self, py: Python<'_>) -> Outcome<()> {
        py.detach(|| {
            let owed = self.answer_handle()?.take().map(DropDetached::into_inner);
            let patience = self.context.patience.unwrap_or(RETURN_TIMEOUT);
            owed.map_or(Ok(()), |owed| owed.requeue(patience.min(RETURN_TIMEOUT)))
                .map_err(Error::from)?;
            Ok(())
        })
    }

    /// Call without the interpreter: the lock is held while memory for an output is taken, which
    /// may last.
    fn answer_handle(&self) -> Outcome<MutexGuard<'_, Option<DropDetached<AnswerHandle>>>> {
        self.home.check()?;
        Ok(locked(&self.answer_handle))
    }

    fn answered(&self) -> Fault {
        let next = "answer once, and ask for its output before";
        let said = format!("job {} has been answered; {next}", self.job);
        Fault::Own("ReleasedError", said)
    }

    /// Lends memory for the result.
    fn borrow(
        &self,
        py: Python<'_>,
        layout: &Layout,
        metadata: Option<Metadata>,
    ) -> PyResult<Slot> {
        // Without the lock: a signal's handler may use the lease, and another thread answer.
        let lender = || -> Outcome<_> {
            let answer_handle = self.answer_handle()?;
            let answer_handle = answer_handle.as_ref().ok_or_else(|| self.answered())?;
            Ok(answer_handle.lender())
        };
        let lend = py.detach(lender)?;
        let goes_on = || lender().map(drop);
        let patience = self.context.patience;
        let loan = waiting(py, patience, goes_on, |wait| Ok(lend(layout, wait)?))?;
        Ok(Slot::of_work(loan, metadata)?)
    }

    /// The result, and the stream that completes it: nothing, a loan of `output`, or
    /// a copy.
    fn result(
        slf: &Bound<'_, Lease>,
        tensor: Given<'_, '_>,
        metadata: Option<Metadata>,
        stream: Given<'_, '_>,
    ) -> PyResult<(Option<warpipe::Loan>, warpipe::Stream)> {
        let (py, lease) = (slf.py(), slf.get());
        let context = &lease.context;
        let borrow = |layout: &Layout, metadata| lease.borrow(py, layout, metadata);
        let (slot, stream) = match tensor {
            Some(tensor) => slot_of(py, context, tensor, metadata, stream, borrow)?,
            None => {
                let lent = slf.as_super().get().lent()?;
                if let Some(stream) = stream {
                    let consumer = Consumer::from_argument(py, &context.device, stream)?;
                    lent.consumers.note(&consumer);
                }
                let behind = lent.behind(py)?;
                if metadata.is_none() {
                    return Ok((None, behind));
                }
                let nothing = Layout::bytes_only(0).map_err(Fault::from)?;
                (lease.borrow(py, &nothing, metadata)?, behind)
            }
        };
        let output = slot.into_work("one of this lease's `output`")?;
        Ok((Some(output), stream))
    }

    /// Sends an answer, and releases the input. One that was not sent can be sent again, or replaced by
    /// another; its output stays in `output`.
    fn answer(
        slf: &Bound<'_, Lease>,
        output: &mut Option<warpipe::Loan>,
        send: impl FnOnce(AnswerHandle, Option<warpipe::Loan>, Wait<'_>) -> Result<(), AnswerError>
        + Send,
    ) -> PyResult<()> {
        let (py, lease) = (slf.py(), slf.get());
        // One that came while the output was made.
        py.check_signals()?;
        let owed =
            py.detach(|| Outcome::Ok(lease.answer_handle()?.take().map(DropDetached::into_inner)))?;
        let owed = owed.ok_or_else(|| lease.answered())?;
        let mut back = None;
        let goes_on = || Ok(());
        let said = waiting(py, lease.context.patience, goes_on, |wait| {
            send(owed, output.take(), wait).map_err(|failed| {
                let owed = failed.returned.answer_handle;
                back = owed.map(|owed| DropDetached::new(*owed));
                *output = failed.returned.output.map(|output| *output);
                failed.error.into()
            })
        });
        let has_answer = back.is_none();
        py.detach(|| lease.answer_handle().map(|mut unsaid| *unsaid = back))?;
        if has_answer {
            slf.as_super().get().owner.release(py, None)?;
        }
        said
    }
}

#[pymethods]
impl Lease {
    /// Whether the job has been answered.
    #[getter]
    fn is_answered(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(py.detach(|| Outcome::Ok(self.answer_handle()?.is_none()))?)
    }

    /// Lends memory for the result, to be filled in place: see ``Output``. In ``with
    /// lease.output(shape, dtype) as out:`` the end of the block completes the job with it; without
    /// ``with``, ``lease.complete(out)`` does.
    ///
    /// Raises ``LayoutError``, ``DTypeError``, ``MetadataError``, ``MemoryLimitError``,
    /// ``DeviceMemoryError``, ``ReleasedError``.
    #[pyo3(signature = (shape, dtype, *, metadata = None))]
    fn output(
        slf: &Bound<'_, Lease>,
        shape: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
        metadata: Option<Metadata>,
    ) -> PyResult<Py<Output>> {
        let (py, lease) = (slf.py(), slf.get());
        let layout = dtype::layout(shape, dtype)?;
        let loan = Loan::new(lease.borrow(py, &layout, metadata)?, &lease.context);
        let lease = slf.clone().unbind();
        Py::new(py, loan.add_subclass(Output { lease }))
    }

    /// Completes the job: with a tensor, which is copied as ``Publisher.send`` does; with an
    /// ``output`` of this lease, without a copy; or without any. The result is complete once the
    /// work on the tensor's stream is done; no CPU waits for that. ``metadata``: a dict or any
    /// buffer, at most 200 bytes, for the submitter.
    ///
    /// Raises ``ReleasedError`` when the job was answered before; ``PeerGoneError``;
    /// ``TimeoutError`` when the owner holds too many earlier results; ``NotATensorError``,
    /// ``DTypeError``, ``LayoutError``, ``WrongDeviceError``, ``MetadataError``,
    /// ``MemoryLimitError``, ``DriverError``.
    #[pyo3(signature = (tensor = None, *, metadata = None, stream = None),
        text_signature = "($self, tensor=None, *, metadata=None, stream=None)")]
    fn complete(
        slf: &Bound<'_, Lease>,
        tensor: Given<'_, '_>,
        metadata: Option<Metadata>,
        stream: Given<'_, '_>,
    ) -> PyResult<()> {
        if slf.get().is_answered(slf.py())? {
            return Err(slf.get().answered().into());
        }
        let (mut output, stream) = Lease::result(slf, tensor, metadata, stream)?;
        let answered = Lease::answer(slf, &mut output, |owed, output, wait| {
            owed.complete(output, &stream, wait)
        });
        if let Some(unused) = output {
            // After the work that fills it.
            let _ = slf.py().detach(|| unused.discard(&stream));
        }
        answered
    }

    /// Fails this attempt; another worker tries again, as often as the queue allows. The reason is
    /// cut to 200 bytes.
    ///
    /// Raises ``ReleasedError`` when the job was answered before, ``PeerGoneError``,
    /// ``TimeoutError``.
    #[pyo3(text_signature = "($self, reason)")]
    fn fail(slf: &Bound<'_, Lease>, reason: String) -> PyResult<()> {
        Lease::answer(slf, &mut None, |owed, _, wait| owed.fail(&reason, wait))
    }

    /// Gives the job to another worker, which costs no attempt: for a worker that leaves.
    ///
    /// Raises as ``fail``.
    #[pyo3(text_signature = "($self)")]
    fn requeue(slf: &Bound<'_, Lease>) -> PyResult<()> {
        Lease::answer(slf, &mut None, |owed, _, wait| owed.requeue(wait))
    }

    /// Rejects the job, so that no worker tries it again: the submitter gets ``RejectedError``. The
    /// reason is cut to 200 bytes.
    ///
    /// Raises as ``fail``.
    #[pyo3(text_signature = "($self, reason)")]
    fn reject(slf: &Bound<'_, Lease>, reason: String) -> PyResult<()> {
        Lease::answer(slf, &mut None, |owed, _, wait| owed.reject(&reason, wait))
    }
}

/// Memory on loan for a job's result, of this attempt only: see ``Lease.output``.
///
/// In ``with lease.output(shape, dtype) as out:`` the end of the block completes the job with it;
/// if the block raises, the memory goes back, and the job is still to be answered. Fill it as any
/// ``Loan``.
#[pyclass(frozen, extends = Loan, module = "warpipe")]
#[derive(Debug)]
pub struct Output {
    /// The lease holds no reference to its outputs, so there is no cycle.
    #[pyo3(get, name = "_lease")]
    lease: Py<Lease>,
}
