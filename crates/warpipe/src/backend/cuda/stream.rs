//! Stream order: memory operations on words, functions on the CPU, events.

use std::cell::Cell;
use std::ffi::{c_uint, c_void};
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::Ordering;

use super::backend::CudaBackend;
use super::backend::broadcast::WORDS_MAX;
use super::backend::legacy::EVENTS;
use super::sys::*;
use super::{shutdown_gate, waits};
use crate::backend::{RawEvent, RawStream, StreamOp, Streams};
use crate::error::Result;

/// The most operations that the driver accepts in one call.
const BATCH_MAX: usize = 256;

/// Longer runs of signals go through the broadcast kernel. On an H200 its launch takes the GPU 3.5
/// to 3.8 us for any number, and the CPU 2 us more than a batch, which takes the GPU 4.0 us for 4
/// words, 5.3 us for 6 and 45 us for 64 (`warpipe-bench fanout`, results/history/h200-channels).
const BROADCAST_ABOVE: usize = 4;

thread_local! {
    /// The context that was current on this thread, without a push, at its last capture query; null
    /// for another context. See [`Streams::batch_at_once`].
    static FOUND_CURRENT: Cell<CUcontext> = const { Cell::new(CUcontext(ptr::null_mut())) };
}

type HostFunction = Box<dyn FnOnce() + Send>;

impl Streams for CudaBackend {
    fn create_stream(&self) -> Result<RawStream> {
        let _current = self.enter()?;
        Ok(RawStream(self.driver.cuStreamCreate(STREAM_NON_BLOCKING)?))
    }

    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<()> {
        let Some(_current) = self.enter_unless_gone()? else {
            return Ok(());
        };
        // SAFETY: the caller's promise.
        Ok(unsafe { self.driver.cuStreamDestroy_v2(stream.0) }?)
    }

    #[inline]
    unsafe fn batch(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()> {
        // SAFETY: the caller's promise; the context is current.
        self.enqueued(|_| unsafe { self.enqueue(stream.0, ops) })
    }

    unsafe fn batch_at_once(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()> {
        if FOUND_CURRENT.get() != self.context || self.is_reset.load(Ordering::Relaxed) {
            // SAFETY: the caller's promise.
            return unsafe { self.batch(stream, ops) };
        }
        let _guard = shutdown_gate::enter();
        // SAFETY: the caller's promise; the context is still current.
        unsafe { self.enqueue(stream.0, ops) }.map_err(|error| self.explain(error))
    }

    unsafe fn call(&self, stream: RawStream, function: Box<dyn FnOnce() + Send>) -> Result<()> {
        // A trait object is two words wide and the driver passes one: hence the second box.
        let argument = Box::into_raw(Box::new(function)).cast::<c_void>();
        // SAFETY: the trampoline takes exactly such a pointer, once; the stream is the caller's
        // promise.
        self.enqueued(|driver| unsafe { driver.cuLaunchHostFunc(stream.0, run_on_cpu, argument) })
            .inspect_err(|_| {
                // SAFETY: the driver did not take the call, so the box is still ours alone.
                drop(unsafe { Box::from_raw(argument.cast::<HostFunction>()) });
            })
    }

    unsafe fn is_capturing(&self, stream: RawStream) -> Result<bool> {
        let current = self.enter_to_enqueue()?;
        FOUND_CURRENT.set(if current.pushed {
            CUcontext(ptr::null_mut())
        } else {
            self.context
        });
        // SAFETY: the caller's promise.
        unsafe { self.driver.stream_is_capturing(stream.0) }
            .map_err(|fault| self.explain(fault.into()))
    }

    unsafe fn query(&self, stream: RawStream) -> Result<bool> {
        let _current = self.enter()?;
        // SAFETY: the caller's promise.
        Ok(unsafe { self.driver.stream_query(stream.0) }?)
    }

    fn create_event(&self) -> Result<RawEvent> {
        let _current = self.enter()?;
        Ok(RawEvent(self.driver.cuEventCreate(EVENT_DISABLE_TIMING)?))
    }

    unsafe fn destroy_event(&self, event: RawEvent) -> Result<()> {
        EVENTS.get().forget(event.0);
        let Some(_current) = self.enter_unless_gone()? else {
            return Ok(());
        };
        // SAFETY: the caller's promise.
        Ok(unsafe { self.driver.cuEventDestroy_v2(event.0) }?)
    }

    unsafe fn record_event(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        // SAFETY: the caller's promise.
        self.enqueued(|driver| unsafe { driver.cuEventRecord(event.0, stream.0) })
    }

    unsafe fn wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        // SAFETY: the caller's promise.
        self.enqueued(|driver| unsafe { driver.cuStreamWaitEvent(stream.0, event.0, 0) })
    }

    unsafe fn query_event(&self, event: RawEvent) -> Result<bool> {
        let _current = self.enter()?;
        // SAFETY: the caller's promise.
        Ok(unsafe { self.driver.event_query(event.0) }?)
    }
}

impl CudaBackend {
    /// The operations, by memory operations and broadcasts. The context is current, and the caller
    /// inside the gate.
    ///
    /// # Safety
    /// As for [`Streams::batch`].
    #[inline]
    unsafe fn enqueue(&self, stream: CUstream, ops: &[StreamOp]) -> Result<()> {
        let mut rest = ops;
        while !rest.is_empty() {
            let signals = leading_signals(rest);
            let done = if signals > BROADCAST_ABOVE {
                let count = signals.min(WORDS_MAX);
                // SAFETY: the caller's promise; these are signals.
                unsafe { self.signal_at_once(stream, &rest[..count]) }?;
                count
            } else {
                let count = before_long_run(rest);
                waits::enqueueing(self.opening, &rest[..count]);
                // SAFETY: the caller's promise; at most BATCH_MAX.
                unsafe { self.enqueue_batch(stream, &rest[..count]) }
                    .inspect_err(|_| waits::refused(self.opening, &rest[..count]))?;
                count
            };
            rest = &rest[done..];
        }
        Ok(())
    }

    /// # Safety
    /// As for `enqueue`; at most [`BATCH_MAX`] operations.
    unsafe fn enqueue_batch(&self, stream: CUstream, ops: &[StreamOp]) -> Result<(), Fault> {
        let driver = self.driver;
        match *ops {
            [StreamOp::Signal { word, value }] => {
                let flags = STREAM_WRITE_VALUE_DEFAULT;
                // SAFETY: the caller's promise on stream and word.
                unsafe { driver.cuStreamWriteValue64_v2(stream, word, value, flags) }
            }
            [StreamOp::Wait { word, value }] => {
                let compare = STREAM_WAIT_VALUE_GEQ;
                // SAFETY: as above.
                unsafe { driver.cuStreamWaitValue64_v2(stream, word, value, compare) }
            }
            _ => {
                let mut parameters = [const { MaybeUninit::uninit() }; BATCH_MAX];
                let filled = fill(&mut parameters, ops);
                let (count, first) = (filled.len() as c_uint, filled.as_mut_ptr());
                // SAFETY: as above, for every word; pointer and count are those of one slice.
                unsafe { driver.cuStreamBatchMemOp_v2(stream, count, first, 0) }
            }
        }
    }
}

/// Called by the driver on a thread of its own.
unsafe extern "C" fn run_on_cpu(argument: *mut c_void) {
    // SAFETY: made by `Box::into_raw` in `call_on_cpu`, and the driver calls back once.
    let function = unsafe { Box::from_raw(argument.cast::<HostFunction>()) };
    // A panic must not unwind into the driver. The panic hook has reported it.
    let _ = catch_unwind(AssertUnwindSafe(function));
}

fn is_signal(op: &StreamOp) -> bool {
    matches!(op, StreamOp::Signal { .. })
}

fn leading_signals(ops: &[StreamOp]) -> usize {
    ops.iter().take_while(|op| is_signal(op)).count()
}

/// The number of operations before the next run of signals that is worth a broadcast, at most one
/// batch.
fn before_long_run(ops: &[StreamOp]) -> usize {
    let mut run = 0;
    for (index, op) in ops.iter().enumerate().take(BATCH_MAX) {
        run = if is_signal(op) { run + 1 } else { 0 };
        if run > BROADCAST_ABOVE {
            return index + 1 - run;
        }
    }
    ops.len().min(BATCH_MAX)
}

/// The driver's form of `ops`, in the needed part of `room`.
fn fill<'a>(
    room: &'a mut [MaybeUninit<CUstreamBatchMemOpParams>; BATCH_MAX],
    ops: &[StreamOp],
) -> &'a mut [CUstreamBatchMemOpParams] {
    let count = ops.len().min(BATCH_MAX);
    let write = (STREAM_MEM_OP_WRITE_VALUE_64, STREAM_WRITE_VALUE_DEFAULT);
    let wait = (STREAM_MEM_OP_WAIT_VALUE_64, STREAM_WAIT_VALUE_GEQ);
    for (parameter, op) in room.iter_mut().zip(ops) {
        let ((operation, flags), address, value) = match *op {
            StreamOp::Signal { word, value } => (write, word, value),
            StreamOp::Wait { word, value } => (wait, word, value),
        };
        parameter.write(CUstreamBatchMemOpParams {
            operation,
            address,
            value,
            flags,
            alias: 0,
            pad: 0,
        });
    }
    // SAFETY: the loop wrote the first `count` entries, and MaybeUninit has its content's layout.
    unsafe { std::slice::from_raw_parts_mut(room.as_mut_ptr().cast(), count) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signals(count: usize) -> Vec<StreamOp> {
        (0..count as u64)
            .map(|value| StreamOp::Signal {
                word: 8 * value,
                value,
            })
            .collect()
    }

    #[test]
    fn waits_before_a_long_run_of_signals_stay_before_it() {
        let mut ops = vec![StreamOp::Wait { word: 0, value: 1 }; 3];
        ops.extend(signals(BROADCAST_ABOVE + 1));
        assert_eq!(leading_signals(&ops), 0);
        assert_eq!(before_long_run(&ops), 3);
    }

    #[test]
    fn a_short_run_of_signals_shares_the_batch_with_its_neighbours() {
        let mut ops = signals(BROADCAST_ABOVE);
        ops.push(StreamOp::Wait { word: 0, value: 1 });
        ops.extend(signals(BROADCAST_ABOVE));
        assert_eq!(before_long_run(&ops), ops.len());
    }

    #[test]
    fn a_batch_never_exceeds_what_the_driver_takes() {
        let ops = vec![StreamOp::Wait { word: 0, value: 1 }; BATCH_MAX + 1];
        assert_eq!(before_long_run(&ops), BATCH_MAX);
        let mut room = [const { MaybeUninit::uninit() }; BATCH_MAX];
        assert_eq!(fill(&mut room, &ops).len(), BATCH_MAX);
    }
}
