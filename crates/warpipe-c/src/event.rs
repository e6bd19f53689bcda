//! Events: marks in a stream's work that streams of other processes wait for.

use std::ffi::{c_char, c_void};
use std::time::Duration;

use warpipe::{Event, Recording, Stream};

use crate::arguments::{put_text, put_unless_null, timeout};
use crate::call::{call, call_on, read};
use crate::{
    Failure, OnDevice, create, open_named, warpipe_create_options, warpipe_open_options,
    warpipe_status,
};

/// An event of this or another process. Any number of threads may use it. Closed, recordings that
/// are enqueued still complete.
pub struct warpipe_event(());

/// Makes an event (`cuEventCreate` with `CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING`). It has
/// no name: `warpipe_event_get_handle` names it to other processes. `options` may be null.
///
/// `*event` is the caller's, to be closed by `warpipe_close`.
///
/// `WARPIPE_LIMIT_REACHED` when the process has 4096; `WARPIPE_SYSTEM`; `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `options` is null or the address of options, which name arrays of as many elements as they say;
/// `event` is the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_event_create(
    options: *const warpipe_create_options,
    event: *mut *mut warpipe_event,
) -> warpipe_status {
    // SAFETY: the caller's promises.
    unsafe { create("event", event, options, |options| Ok(Event::new(options)?)) }
}

/// The text that names an event to other processes (`cuIpcGetEventHandle`), to be sent in any way.
/// It gives no right: the event's domain must admit the process that opens it.
///
/// The text is written to `buffer` with a zero at its end. `*length` becomes its length without
/// that, also if the buffer is too short; `length` may be null.
///
/// `WARPIPE_INVALID_INPUT`: `capacity` is too small, or the domain's path is not UTF-8;
/// `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `buffer` is the address of `capacity` bytes, `length` null or that of a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_event_get_handle(
    event: *const warpipe_event,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> warpipe_status {
    call(event, |event| {
        // SAFETY: the caller's promises.
        unsafe { put_text(event.handle()?, buffer, capacity, length) }
    })
}

/// Opens an event by its handle (`cuIpcOpenEventHandle`), also in the process that made it.
/// `options` may be null; the handle names the domain unless they do.
///
/// `*event` is the caller's, to be closed by `warpipe_close`.
///
/// `WARPIPE_INVALID_INPUT` for a text that is no handle of an event; `WARPIPE_NOT_FOUND` when the
/// event is closed or its exporter gone, or `WARPIPE_PEER_GONE` when it ends meanwhile;
/// `WARPIPE_TIMEOUT` when it does not answer; `WARPIPE_REFUSED`; `WARPIPE_PROTOCOL`;
/// `WARPIPE_SYSTEM`; `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `event_handle` is a text, `options` null or the address of options, `event` that of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_event_open(
    event_handle: *const c_char,
    options: *const warpipe_open_options,
    event: *mut *mut warpipe_event,
) -> warpipe_status {
    let open = |handle: &str, options, wait| Event::open(&handle.parse()?, options, wait);
    // SAFETY: the caller's promises.
    unsafe { open_named("event", event, event_handle, options, open) }
}

/// Records the stream's work so far (`cuEventRecord`), and returns at once. Exporter and importers
/// may record; waits are for the last recording. The first recording of an opened event asks its
/// exporter, which may take a moment. `*recording`, which may be null, becomes the recording's
/// number, never 0, for `warpipe_event_query`.
///
/// `WARPIPE_PEER_GONE` when its exporter has died or closed it; `WARPIPE_REFUSED` when seven others
/// record it; `WARPIPE_INVALID_INPUT` for a stream of another device; `WARPIPE_INVALID_STATE` for a
/// stream that is being captured; `WARPIPE_TIMEOUT` after 10 s in which another thread's recording
/// is blocked; `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `stream` is a stream of the event's device, `recording` null or the address of a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_event_record(
    event: *const warpipe_event,
    stream: *mut c_void,
    recording: *mut u64,
) -> warpipe_status {
    let record = |event: &Event, stream: &Stream| {
        let recorded = event.record(stream, Duration::from_secs(10))?;
        // SAFETY: the caller's promise.
        unsafe { put_unless_null(recording, recorded.to_bits()) };
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { call_on(event, stream, record) }
}

/// Makes the stream wait, on the device, for the event's last recording (`cuStreamWaitEvent`), and
/// returns at once. `*recording`, which may be null, becomes that recording's number: the stream's
/// later work is valid only if `warpipe_event_query` says so afterwards.
///
/// `WARPIPE_INVALID_STATE` when the event was never recorded, or for a stream that is being
/// captured; `WARPIPE_DATA_LOST` when the recorder is gone and its work was not done;
/// `WARPIPE_INVALID_INPUT` for a stream of another device; `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `stream` is a stream of the event's device, `recording` null or the address of a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_event_wait(
    event: *const warpipe_event,
    stream: *mut c_void,
    recording: *mut u64,
) -> warpipe_status {
    let wait = |event: &Event, stream: &Stream| {
        let waited_for = event.wait(stream)?;
        // SAFETY: the caller's promise.
        unsafe { put_unless_null(recording, waited_for.to_bits()) };
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { call_on(event, stream, wait) }
}

/// Whether this recording, of `warpipe_event_record` or `warpipe_event_wait` on this event, is
/// complete (`cuEventQuery`); with 0, whether the last one is. False if it may still be.
///
/// `WARPIPE_DATA_LOST`: it never will be, and a stream's work behind its wait is not valid;
/// `WARPIPE_INVALID_STATE` when the event was never recorded; `WARPIPE_INVALID_INPUT` for a number
/// that no recording has.
///
/// # Safety
/// `is_complete` is the address of a `bool`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_event_query(
    event: *const warpipe_event,
    recording: u64,
    is_complete: *mut bool,
) -> warpipe_status {
    let allowed = "0, or a number that warpipe_event_record or warpipe_event_wait gave";
    let query = |event: &OnDevice<Event>| match Recording::from_bits(recording) {
        Some(known) => Ok::<_, Failure>(event.check(known)?),
        None if recording == 0 => Ok(event.query()?),
        None => Err(Failure::argument("recording", recording, allowed)),
    };
    // SAFETY: the caller's promise.
    unsafe { read(event, "is_complete", is_complete, query) }
}

/// Waits on the CPU, up to `timeout_ns` nanoseconds, until the last recording is complete
/// (`cuEventSynchronize`).
///
/// `WARPIPE_TIMEOUT`; as `warpipe_event_query`.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_event_synchronize(
    event: *const warpipe_event,
    timeout_ns: u64,
) -> warpipe_status {
    call(event, |event| Ok(event.synchronize(timeout(timeout_ns))?))
}
