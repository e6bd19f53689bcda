//! Streams: threads that run enqueued work later.

use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::capture::{self, Capture};
use crate::status::*;
use crate::work::Work;
use crate::{config, device, host, memory};

/// The code of the first work that failed: every later call on streams returns it.
static FAULT: AtomicI32 = AtomicI32::new(0);

/// Pieces of work that fit in a stream's launch queue behind the running one, as measured on an
/// H200. A call that finds no room blocks in the driver, and so does every other call for that
/// stream.
const LAUNCH_QUEUE: usize = 1_020;

pub struct Stream {
    /// Held by a call that gives the stream work, or queries it.
    calls: Mutex<()>,
    /// The fixed number of its device.
    pub device: usize,
    /// Whether it is ordered with the legacy default stream (made without
    /// `CU_STREAM_NON_BLOCKING`).
    pub is_blocking: bool,
    capture: Mutex<Option<Arc<Capture>>>,
    queue: Mutex<Queue>,
    grown: Condvar,
    shrunk: Condvar,
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    /// Enqueued and not yet done, the piece being worked on included.
    unfinished: usize,
    /// Enqueued so far.
    given: u64,
    closed: bool,
}

impl Stream {
    fn start(device: usize, is_blocking: bool) -> Outcome<Arc<Stream>> {
        let stream = Arc::new(Stream {
            device,
            is_blocking,
            capture: Mutex::default(),
            queue: Mutex::default(),
            grown: Condvar::new(),
            shrunk: Condvar::new(),
            calls: Mutex::default(),
        });
        let worker = stream.clone();
        std::thread::Builder::new()
            .name("fake-cuda".into())
            .spawn(move || worker.work())
            .map_err(|_| OPERATING_SYSTEM)?;
        Ok(stream)
    }

    /// The stream's capture, if any.
    pub fn capture(&self) -> Option<Arc<Capture>> {
        let mut capture = self.capture.lock().unwrap_or_else(PoisonError::into_inner);
        if capture.as_ref().is_some_and(|capture| capture.is_over()) {
            *capture = None;
        }
        capture.clone()
    }

    /// Makes the stream join a capture.
    pub fn begin(&self, capture: &Arc<Capture>) -> Outcome {
        if self.capture().is_some() {
            return Err(ILLEGAL_STATE);
        }
        *self.capture.lock().unwrap_or_else(PoisonError::into_inner) = Some(capture.clone());
        Ok(())
    }

    /// Enqueues work, or records it.
    pub fn push(&self, work: Work) -> Outcome {
        check_fault()?;
        if let Some(capture) = self.capture() {
            return capture.record(work);
        }
        let _calls = self.calls();
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let is_full = |queue: &mut Queue| queue.work.len() >= LAUNCH_QUEUE;
        let mut queue = self
            .shrunk
            .wait_while(queue, is_full)
            .unwrap_or_else(PoisonError::into_inner);
        queue.work.push_back(work);
        queue.unfinished += 1;
        queue.given += 1;
        self.grown.notify_one();
        Ok(())
    }

    fn calls(&self) -> MutexGuard<'_, ()> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits, without a limit, until all work so far is done.
    pub fn finish(&self) -> Outcome {
        if let Some(capture) = self.capture() {
            capture.invalidate();
            return Err(STREAM_CAPTURE_UNSUPPORTED);
        }
        if self.is_idle() {
            return Ok(());
        }
        let (told, done) = std::sync::mpsc::channel();
        self.push(Work::Tell(told))?;
        done.recv().map_err(|_| LAUNCH_FAILED)
    }

    fn close(&self) {
        self.queue
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .closed = true;
        self.grown.notify_one();
    }

    fn is_idle(&self) -> bool {
        self.queue
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .unfinished
            == 0
    }

    /// How many pieces of work it was given, and how many of them are done.
    fn progress(&self) -> (u64, u64) {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        (queue.given, queue.given - queue.unfinished as u64)
    }

    fn work(&self) {
        while let Some(work) = self.next() {
            // A notified thread that queries the stream finds the count without this work, as on a
            // GPU.
            let telling = matches!(work, Work::Record { .. } | Work::Tell(_));
            let telling =
                telling.then(|| self.queue.lock().unwrap_or_else(PoisonError::into_inner));
            // SAFETY: that memory outlives the work enqueued on it is the program's duty, as on a
            // GPU.
            let ran = catch_unwind(AssertUnwindSafe(|| unsafe { work.run() }));
            if ran.is_err() {
                FAULT.store(LAUNCH_FAILED.0, Ordering::Release);
            }
            telling
                .unwrap_or_else(|| self.queue.lock().unwrap_or_else(PoisonError::into_inner))
                .unfinished -= 1;
        }
    }

    /// The next piece of work; none once the stream is closed and empty.
    fn next(&self) -> Option<Work> {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let mut queue = self
            .grown
            .wait_while(queue, |queue| queue.work.is_empty() && !queue.closed)
            .unwrap_or_else(PoisonError::into_inner);
        let work = queue.work.pop_front();
        self.shrunk.notify_one();
        work
    }
}

pub fn check_fault() -> Outcome {
    match FAULT.load(Ordering::Acquire) {
        0 => Ok(()),
        code => Err(Status(code)),
    }
}

/// Destroys the streams of a device with the work that they were given since they
/// [were settled](settle_device), and waits for their running work.
pub fn end_all(device: usize) {
    let ended: Vec<_> = with(|streams| {
        streams
            .extract_if(|_, stream| stream.device == device)
            .collect()
    });
    for (_, stream) in ended {
        let mut queue = stream.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.unfinished -= queue.work.len();
        queue.work.clear();
        drop(queue);
        stream.close();
        while !stream.is_idle() {
            std::thread::sleep(std::time::Duration::from_micros(50));
        }
    }
}

/// Waits until every stream has done what it was given before this call.
pub fn settle() {
    settle_those(|_| true);
}

/// Likewise, the streams of one device.
pub fn settle_device(device: usize) {
    settle_those(|stream| stream.device == device);
}

fn settle_those(is_meant: impl Fn(&Stream) -> bool) {
    let all: Vec<Arc<Stream>> = with(|streams| {
        let meant = streams.values().filter(|stream| is_meant(stream));
        meant.cloned().collect()
    });
    for (stream, given) in all.iter().map(|stream| (stream, stream.progress().0)) {
        while stream.progress().1 < given {
            std::thread::sleep(std::time::Duration::from_micros(50));
        }
    }
}

/// Live streams by handle. The default stream of a device has the device's number for a key.
static STREAMS: Mutex<Option<HashMap<usize, Arc<Stream>>>> = Mutex::new(None);

fn with<T>(body: impl FnOnce(&mut HashMap<usize, Arc<Stream>>) -> T) -> T {
    body(
        STREAMS
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert_default(),
    )
}

/// Whether the handle names the legacy default stream.
pub fn is_legacy(handle: *mut c_void) -> bool {
    handle.addr() < 2
}

/// [`find`], for a call that gives the stream work: the legacy default stream takes none while a
/// stream that is ordered with it captures.
pub fn find_for_work(handle: *mut c_void) -> Outcome<Arc<Stream>> {
    let stream = find(handle)?;
    match capture::of_blocking_streams(stream.device).filter(|_| is_legacy(handle)) {
        Some(capture) => {
            capture.invalidate();
            Err(STREAM_CAPTURE_IMPLICIT)
        }
        None => Ok(stream),
    }
}

/// The stream of a handle, if it is one of the current context. Null, 1 and 2 are its default
/// stream.
pub fn find(handle: *mut c_void) -> Outcome<Arc<Stream>> {
    let device = device::current()?;
    with(|streams| {
        if handle.addr() > 2 {
            return streams
                .get(&handle.addr())
                .filter(|stream| stream.device == device)
                .cloned()
                .ok_or(INVALID_HANDLE);
        }
        if let Some(stream) = streams.get(&device) {
            return Ok(stream.clone());
        }
        let stream = Stream::start(device, true)?;
        streams.insert(device, stream.clone());
        Ok(stream)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(out: *mut *mut c_void, flags: u32) -> c_int {
    answer("cuStreamCreate", Needs::Context, || {
        if flags > 1 {
            return Err(INVALID_VALUE);
        }
        let stream = Stream::start(device::current()?, flags == 0)?;
        let handle = Arc::as_ptr(&stream).addr();
        with(|streams| streams.insert(handle, stream));
        // SAFETY: the caller's out pointer.
        unsafe { give(out, ptr::without_provenance_mut(handle)) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: *mut c_void) -> c_int {
    answer("cuStreamDestroy_v2", Needs::Context, || {
        let stream = with(|streams| streams.remove(&stream.addr())).ok_or(INVALID_HANDLE)?;
        stream.close();
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamQuery(stream: *mut c_void) -> c_int {
    answer("cuStreamQuery", Needs::Context, || {
        check_fault()?;
        let stream = find_for_work(stream)?;
        if let Some(capture) = stream.capture() {
            capture.invalidate();
            return Err(STREAM_CAPTURE_UNSUPPORTED);
        }
        capture::check_unsafe_call()?;
        let _calls = stream.calls();
        if stream.is_idle() {
            Ok(())
        } else {
            Err(NOT_READY)
        }
    })
}

/// The operations of a batch, wait and write, in the driver's layout.
#[repr(C)]
#[derive(Clone, Copy)]
struct Operation {
    kind: u32,
    word: u64,
    value: u64,
    flags: u32,
    alias: u64,
    pad: u64,
}

impl Operation {
    fn work(self) -> Outcome<Work> {
        let Operation {
            kind,
            word,
            value,
            flags,
            ..
        } = self;
        if flags != 0 {
            return Err(NOT_SUPPORTED);
        }
        if !word.is_multiple_of(8) || !memory::usable(word, 8, kind == 5) {
            return Err(INVALID_VALUE);
        }
        match kind {
            4 => Ok(Work::Wait { word, value }),
            5 => Ok(Work::Write { word, value }),
            _ => Err(NOT_SUPPORTED),
        }
    }
}

fn enqueue(stream: *mut c_void, operations: &[Operation]) -> Outcome {
    let stream = find_for_work(stream)?;
    std::thread::sleep(config::get().call);
    // All are checked before one is enqueued: a batch is taken whole or not at all.
    let work: Outcome<Vec<Work>> = operations
        .iter()
        .map(|operation| operation.work())
        .collect();
    work?.into_iter().try_for_each(|work| stream.push(work))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitValue64_v2(
    stream: *mut c_void,
    word: u64,
    value: u64,
    flags: u32,
) -> c_int {
    answer("cuStreamWaitValue64_v2", Needs::Context, || {
        enqueue(
            stream,
            &[Operation {
                kind: 4,
                word,
                value,
                flags,
                alias: 0,
                pad: 0,
            }],
        )
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWriteValue64_v2(
    stream: *mut c_void,
    word: u64,
    value: u64,
    flags: u32,
) -> c_int {
    answer("cuStreamWriteValue64_v2", Needs::Context, || {
        enqueue(
            stream,
            &[Operation {
                kind: 5,
                word,
                value,
                flags,
                alias: 0,
                pad: 0,
            }],
        )
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamBatchMemOp_v2(
    stream: *mut c_void,
    count: u32,
    operations: *mut c_void,
    flags: u32,
) -> c_int {
    answer("cuStreamBatchMemOp_v2", Needs::Context, || {
        if operations.is_null() || count > 256 || flags != 0 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's array of `count` operations.
        enqueue(stream, unsafe {
            std::slice::from_raw_parts(operations.cast::<Operation>(), count as usize)
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyAsync(dst: u64, src: u64, bytes: usize, stream: *mut c_void) -> c_int {
    answer("cuMemcpyAsync", Needs::Context, || {
        if !memory::usable(dst, bytes, true) || !memory::usable(src, bytes, false) {
            return Err(INVALID_VALUE);
        }
        find_for_work(stream)?.push(Work::Copy { dst, src, bytes })
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoDAsync_v2(dst: u64, src: u64, bytes: usize, stream: *mut c_void) -> c_int {
    answer("cuMemcpyDtoDAsync_v2", Needs::Context, || {
        if !memory::is_device(dst, bytes, true) || !memory::is_device(src, bytes, false) {
            return Err(INVALID_VALUE);
        }
        find_for_work(stream)?.push(Work::Copy { dst, src, bytes })
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: *mut c_void) -> c_int {
    answer("cuStreamSynchronize", Needs::Context, || {
        check_fault()?;
        let stream = find_for_work(stream)?;
        capture::check_unsafe_call()?;
        stream.finish()
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> c_int {
    answer("cuCtxSynchronize", Needs::Context, || {
        check_fault()?;
        capture::check_unsafe_call()?;
        let device = device::current()?;
        let streams: Vec<_> = with(|streams| {
            let of_device = streams.values().filter(|stream| stream.device == device);
            of_device.cloned().collect()
        });
        streams.iter().try_for_each(|stream| stream.finish())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8Async(dst: u64, value: u8, bytes: usize, stream: *mut c_void) -> c_int {
    answer("cuMemsetD8Async", Needs::Context, || {
        if !memory::usable(dst, bytes, true) {
            return Err(INVALID_VALUE);
        }
        find_for_work(stream)?.push(Work::Set { dst, value, bytes })
    })
}

/// Pageable memory is read before the call returns, and not before the stream has done its earlier
/// work: the driver may block for that, so the fake driver does. Registered memory is read when the
/// stream gets there.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    dst: u64,
    src: *const c_void,
    bytes: usize,
    stream: *mut c_void,
) -> c_int {
    answer("cuMemcpyHtoDAsync_v2", Needs::Context, || {
        if src.is_null() || !memory::is_device(dst, bytes, true) {
            return Err(INVALID_VALUE);
        }
        let stream = find_for_work(stream)?;
        if host::is_registered(src.addr() as u64, bytes) {
            return stream.push(Work::Copy {
                dst,
                src: src.expose_provenance() as u64,
                bytes,
            });
        }
        stream.finish()?;
        // SAFETY: the caller's memory of that length.
        let bytes = unsafe { std::slice::from_raw_parts(src.cast::<u8>(), bytes) }.to_vec();
        stream.push(Work::Staged { dst, bytes })
    })
}

/// Pageable memory is written before the call returns, registered memory when the stream gets
/// there.
#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoHAsync_v2(
    dst: *mut c_void,
    src: u64,
    bytes: usize,
    stream: *mut c_void,
) -> c_int {
    answer("cuMemcpyDtoHAsync_v2", Needs::Context, || {
        if dst.is_null() || !memory::is_device(src, bytes, false) {
            return Err(INVALID_VALUE);
        }
        let stream = find_for_work(stream)?;
        let dst = dst.expose_provenance() as u64;
        stream.push(Work::Copy { dst, src, bytes })?;
        if host::is_registered(dst, bytes) {
            return Ok(());
        }
        stream.finish()
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuLaunchHostFunc(
    stream: *mut c_void,
    function: Option<unsafe extern "C" fn(*mut c_void)>,
    argument: *mut c_void,
) -> c_int {
    answer("cuLaunchHostFunc", Needs::Context, || {
        let function = function.ok_or(INVALID_VALUE)?;
        find_for_work(stream)?.push(Work::Function {
            function,
            argument: argument.expose_provenance(),
        })
    })
}
