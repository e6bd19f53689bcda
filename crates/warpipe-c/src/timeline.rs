//! Timelines: named values that only grow, which streams of other processes wait for.

use std::ffi::{c_char, c_void};
use std::time::Duration;

use warpipe::{Stream, Timeline};

use crate::arguments::{text, timeout};
use crate::call::{call, call_on, get, read};
use crate::{create, open_named, warpipe_create_options, warpipe_open_options, warpipe_status};

/// A named 64-bit value that only grows, across processes: Vulkan's timeline semaphore. Any number
/// of threads may use it. Closed by its maker, it ends: signals that are enqueued are still given,
/// and waits for later values end with `WARPIPE_PEER_GONE`.
pub struct warpipe_timeline(());

/// The largest value that can be signalled or waited for, 2^63 - 2.
pub const WARPIPE_TIMELINE_VALUE_MAX: u64 = 0x7FFF_FFFF_FFFF_FFFE;
const _: () = assert!(WARPIPE_TIMELINE_VALUE_MAX == Timeline::VALUE_MAX);

/// Makes a timeline of `name` (1 to 80 bytes of `a-z A-Z 0-9 _ - .` in parts joined by `/`) at 0,
/// which this process signals and up to 256 processes may open, 128 of them of each other user.
/// `options` may be null.
///
/// `*timeline` is the caller's, to be closed by `warpipe_close`.
///
/// `WARPIPE_NAME_CONFLICT` when another process, or this one, has the name;
/// `WARPIPE_INVALID_INPUT`; `WARPIPE_SYSTEM`; `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `name` is a text, `options` null or the address of options, which name arrays of as many
/// elements as they say; `timeline` is the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_timeline_create(
    name: *const c_char,
    options: *const warpipe_create_options,
    timeline: *mut *mut warpipe_timeline,
) -> warpipe_status {
    // SAFETY: the caller's promise.
    let build = |options| Ok(Timeline::new(unsafe { text("name", name) }?, options)?);
    // SAFETY: the caller's promises.
    unsafe { create("timeline", timeline, options, build) }
}

/// Opens the timeline of this name, of any process, including this one. It can be waited for, and
/// not signalled. `options` may be null.
///
/// `*timeline` is the caller's, to be closed by `warpipe_close`.
///
/// `WARPIPE_NOT_FOUND` when there is none, after `wait_ns`; `WARPIPE_REFUSED`;
/// `WARPIPE_LIMIT_REACHED`; `WARPIPE_NAME_CONFLICT` when something else has the name;
/// `WARPIPE_INVALID_INPUT`; `WARPIPE_PROTOCOL` for another version; `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// As for `warpipe_timeline_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_timeline_open(
    name: *const c_char,
    options: *const warpipe_open_options,
    timeline: *mut *mut warpipe_timeline,
) -> warpipe_status {
    // SAFETY: the caller's promises.
    unsafe { open_named("timeline", timeline, name, options, Timeline::open) }
}

/// Signals `value` behind the stream's work so far (`cuStreamWriteValue64`), and returns at once.
/// On several streams the values are reached in the order of the calls: each stream waits on the
/// device for the previous one.
///
/// `WARPIPE_INVALID_INPUT` unless the value is above the last one and at most
/// `WARPIPE_TIMELINE_VALUE_MAX`, or for a stream of another device; `WARPIPE_REFUSED` for a
/// timeline that was opened; `WARPIPE_INVALID_STATE` for a stream that is being captured;
/// `WARPIPE_TIMEOUT` after 10 s in which the driver blocks another thread's signal;
/// `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `stream` is a stream of the timeline's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_timeline_signal(
    timeline: *const warpipe_timeline,
    stream: *mut c_void,
    value: u64,
) -> warpipe_status {
    let wait = Duration::from_secs(10);
    let signal = |timeline: &Timeline, stream: &Stream| Ok(timeline.signal(stream, value, wait)?);
    // SAFETY: the caller's promise.
    unsafe { call_on(timeline, stream, signal) }
}

/// Signals `value` now, from the CPU.
///
/// As `warpipe_timeline_signal`; `WARPIPE_INVALID_INPUT` also while a stream has yet to signal an
/// earlier value.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_timeline_signal_now(
    timeline: *const warpipe_timeline,
    value: u64,
) -> warpipe_status {
    let wait = Duration::from_secs(10);
    call(timeline, |timeline| Ok(timeline.signal_now(value, wait)?))
}

/// Makes the stream wait, on the device, for `value` (`cuStreamWaitValue64`), and returns at once.
/// The stream's later work is valid only if `warpipe_timeline_is_reached` says so afterwards: a
/// stream is released, too, when the timeline's owner has died.
///
/// In the owner, the value must have been signalled or enqueued to be signalled before.
///
/// `WARPIPE_PEER_GONE` at once, if the owner is gone and did not reach the value;
/// `WARPIPE_INVALID_INPUT` above `WARPIPE_TIMELINE_VALUE_MAX`, for an owner above its last value,
/// or for a stream of another device; `WARPIPE_INVALID_STATE` for a stream that is being captured;
/// `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `stream` is a stream of the timeline's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_timeline_wait(
    timeline: *const warpipe_timeline,
    stream: *mut c_void,
    value: u64,
) -> warpipe_status {
    let wait = |timeline: &Timeline, stream: &Stream| Ok(timeline.wait(stream, value)?);
    // SAFETY: the caller's promise.
    unsafe { call_on(timeline, stream, wait) }
}

/// Waits on the CPU, up to `timeout_ns` nanoseconds, until `value` is reached.
///
/// `WARPIPE_TIMEOUT`; `WARPIPE_PEER_GONE`: it never will be; `WARPIPE_INVALID_INPUT` above
/// `WARPIPE_TIMELINE_VALUE_MAX`.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_timeline_wait_host(
    timeline: *const warpipe_timeline,
    value: u64,
    timeout_ns: u64,
) -> warpipe_status {
    let timeout = timeout(timeout_ns);
    call(timeline, |timeline| Ok(timeline.wait_host(value, timeout)?))
}

/// Whether `value` has been reached; false if it may still be.
///
/// `WARPIPE_PEER_GONE`: it never will be, and a stream's work behind its wait is not valid.
///
/// # Safety
/// `is_reached` is the address of a `bool`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_timeline_is_reached(
    timeline: *const warpipe_timeline,
    value: u64,
    is_reached: *mut bool,
) -> warpipe_status {
    // SAFETY: the caller's promise.
    unsafe { read(timeline, "is_reached", is_reached, |it| it.check(value)) }
}

/// The value now, or the last one if the owner is gone.
///
/// # Safety
/// `value` is the address of a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_timeline_get_value(
    timeline: *const warpipe_timeline,
    value: *mut u64,
) -> warpipe_status {
    // SAFETY: the caller's promise.
    unsafe { get(timeline, "value", value, |timeline| timeline.value()) }
}
