//! Semaphores: a limited number of permits, held in any number of processes.

use std::ffi::{c_char, c_void};

use warpipe::{Semaphore, Stream};

use crate::arguments::{text, timeout};
use crate::call::{get, make_beside, make_on};
use crate::{
    OnDevice, create, handle, open_named, run, warpipe_create_options, warpipe_open_options,
    warpipe_status,
};

/// A limited number of permits, held in any number of processes of one machine. Permits go to the
/// thread that has waited longest. Any number of threads may use it. Closed by its maker, it ends
/// when its permits are closed, too, and their streams are past their work: waits end with
/// `WARPIPE_PEER_GONE` then.
pub struct warpipe_semaphore(());

/// A permit of a semaphore. It returns when it is released or closed, or when its holder's death is
/// proven. Closed, it is released behind the work of the stream that it was acquired on, or at once
/// if it was acquired on the CPU.
pub struct warpipe_permit(());

/// The state of a semaphore at this moment: it may have changed when the call returns.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_semaphore_info {
    /// The number of permits.
    pub permits: u32,
    /// The number of free ones.
    pub available: u32,
    /// The number of waiting threads.
    pub waiting: u32,
}

/// Makes a semaphore of `name` (1 to 80 bytes of `a-z A-Z 0-9 _ - .` in parts joined by `/`), with
/// this number of `permits`, 1 to 1024, all free. `options` may be null.
///
/// `*semaphore` is the caller's, to be closed by `warpipe_close`.
///
/// `WARPIPE_NAME_CONFLICT` when another process, or this one, has the name;
/// `WARPIPE_INVALID_INPUT`, also for the number of permits; `WARPIPE_SYSTEM`;
/// `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `name` is a text, `options` null or the address of options, which name arrays of as many
/// elements as they say; `semaphore` is the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_semaphore_create(
    name: *const c_char,
    permits: u32,
    options: *const warpipe_create_options,
    semaphore: *mut *mut warpipe_semaphore,
) -> warpipe_status {
    let build = |options| {
        // SAFETY: the caller's promise.
        let name = unsafe { text("name", name) }?;
        Ok(Semaphore::new(name, permits, options)?)
    };
    // SAFETY: the caller's promises.
    unsafe { create("semaphore", semaphore, options, build) }
}

/// Opens the semaphore of this name, of any process, including this one. `options` may be null.
///
/// `*semaphore` is the caller's, to be closed by `warpipe_close`.
///
/// `WARPIPE_NOT_FOUND` when there is none, after `wait_ns`; `WARPIPE_REFUSED`, also for another
/// kind of device; `WARPIPE_NAME_CONFLICT` when something else has the name;
/// `WARPIPE_INVALID_INPUT`; `WARPIPE_PROTOCOL`; `WARPIPE_SYSTEM`; `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// As for `warpipe_semaphore_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_semaphore_open(
    name: *const c_char,
    options: *const warpipe_open_options,
    semaphore: *mut *mut warpipe_semaphore,
) -> warpipe_status {
    // SAFETY: the caller's promises.
    unsafe { open_named("semaphore", semaphore, name, options, Semaphore::open) }
}

/// Waits up to `timeout_ns` nanoseconds for a permit, and makes the stream wait, on the device, for
/// the device work of its last holder (`cuStreamWaitValue64`). No CPU waits for that work. With 0
/// it takes a permit that is free and that no thread waits for.
///
/// `*permit` is the caller's, to be closed by `warpipe_permit_release`,
/// `warpipe_permit_release_now` or `warpipe_close`.
///
/// `WARPIPE_TIMEOUT`; `WARPIPE_PEER_GONE` when the semaphore's maker is gone;
/// `WARPIPE_INVALID_INPUT` for a stream of another device; `WARPIPE_INVALID_STATE` for a stream
/// that is being captured; `WARPIPE_DEVICE_FAILED`: the permit is free again.
///
/// # Safety
/// `stream` is a stream of the semaphore's device, `permit` the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_semaphore_acquire(
    semaphore: *const warpipe_semaphore,
    stream: *mut c_void,
    timeout_ns: u64,
    permit: *mut *mut warpipe_permit,
) -> warpipe_status {
    let timeout = timeout(timeout_ns);
    let acquire = |semaphore: &Semaphore, stream: &Stream| Ok(semaphore.acquire(stream, timeout)?);
    // SAFETY: the caller's promises.
    unsafe { make_on(semaphore, stream, "permit", permit, acquire) }
}

/// As `warpipe_semaphore_acquire`, and waits on the CPU for the device work of the permit's last
/// holder, too: the permit is for work of the CPU.
///
/// # Safety
/// `permit` is the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_semaphore_acquire_host(
    semaphore: *const warpipe_semaphore,
    timeout_ns: u64,
    permit: *mut *mut warpipe_permit,
) -> warpipe_status {
    let timeout = timeout(timeout_ns);
    // SAFETY: the caller's promise.
    unsafe {
        make_beside(semaphore, "permit", permit, |semaphore| {
            Ok(semaphore.acquire_host(timeout)?)
        })
    }
}

/// Reads how many permits there are, how many are free, and how many threads wait.
///
/// # Safety
/// `info` is the address of such a structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_semaphore_get_info(
    semaphore: *const warpipe_semaphore,
    info: *mut warpipe_semaphore_info,
) -> warpipe_status {
    let info_of = |semaphore: &Semaphore| {
        let state = semaphore.state();
        warpipe_semaphore_info {
            permits: state.permits,
            available: state.available,
            waiting: state.waiting,
        }
    };
    // SAFETY: the caller's promise.
    unsafe { get(semaphore, "info", info, |semaphore| info_of(semaphore)) }
}

/// Releases a permit behind the stream's work so far (`cuStreamWriteValue64`), and returns at once:
/// the next holder gets it now, and its stream waits for that work. `stream` may be another one
/// than the permit was acquired on; the caller orders work on further streams before it. Closes
/// `permit`, whatever the result.
///
/// `WARPIPE_INVALID_INPUT` for a stream of another device, `WARPIPE_INVALID_STATE` for one that is
/// being captured: the permit is released as by `warpipe_close`. `WARPIPE_DEVICE_FAILED`:
/// the next holder gets it when the stream's work is known to be done.
///
/// # Safety
/// `stream` is a stream of the semaphore's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_permit_release(
    permit: *mut warpipe_permit,
    stream: *mut c_void,
) -> warpipe_status {
    run(|| {
        let OnDevice { object, streams } = handle::find(permit)?.take();
        // SAFETY: the caller's promise.
        let stream = unsafe { streams.get(stream) }?;
        Ok(object.release(&stream)?)
    })
}

/// Releases a permit now: the next holder does not wait for this holder's device work. Closes
/// `permit`.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_permit_release_now(permit: *mut warpipe_permit) -> warpipe_status {
    run(|| {
        let permit = handle::find(permit)?.take().object;
        permit.release_now();
        Ok(())
    })
}
