//! Devices, and the current context of each thread.

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::config::{self, DEVICES_MAX};
use crate::status::*;
use crate::{event, host, memory, stream};

/// How often each device's primary context is retained. A context's handle is the address of its
/// count.
static RETAINED: [AtomicU32; DEVICES_MAX] = [const { AtomicU32::new(0) }; DEVICES_MAX];

/// Whether each primary context has been made, and not been reset since.
static ACTIVE: [AtomicBool; DEVICES_MAX] = [const { AtomicBool::new(false) }; DEVICES_MAX];

/// How often each was reset.
static RESETS: [AtomicU64; DEVICES_MAX] = [const { AtomicU64::new(0) }; DEVICES_MAX];

/// How often a device was reset.
pub fn resets(device: usize) -> u64 {
    RESETS[device].load(Ordering::Acquire)
}

thread_local! {
    /// The stack of contexts, by fixed device number; the last is current.
    static STACK: RefCell<Vec<Option<usize>>> = const { RefCell::new(Vec::new()) };
}

/// The fixed number of the current device of this thread.
pub fn current() -> Outcome<usize> {
    let device = STACK
        .with_borrow(|stack| stack.last().copied().flatten())
        .ok_or(INVALID_CONTEXT)?;
    match RETAINED[device].load(Ordering::Acquire) {
        0 => Err(INVALID_CONTEXT),
        _ if !ACTIVE[device].load(Ordering::Acquire) => Err(CONTEXT_IS_DESTROYED),
        _ => Ok(device),
    }
}

/// The fixed number of the device with this ordinal.
pub fn physical(ordinal: c_int) -> Outcome<usize> {
    let ordinal = usize::try_from(ordinal).map_err(|_| INVALID_DEVICE)?;
    config::get()
        .visible
        .get(ordinal)
        .copied()
        .ok_or(INVALID_DEVICE)
}

/// The ordinal of a device by its fixed number.
pub fn ordinal(device: usize) -> Outcome<c_int> {
    let place = config::get()
        .visible
        .iter()
        .position(|&visible| visible == device);
    place.map(|ordinal| ordinal as c_int).ok_or(INVALID_DEVICE)
}

fn context_of(device: Option<usize>) -> *mut c_void {
    device.map_or(ptr::null_mut(), |device| {
        ptr::from_ref(&RETAINED[device]).cast_mut().cast()
    })
}

fn device_of(context: *mut c_void) -> Outcome<Option<usize>> {
    if context.is_null() {
        return Ok(None);
    }
    (0..DEVICES_MAX)
        .find(|&device| context_of(Some(device)) == context)
        .map(Some)
        .ok_or(INVALID_CONTEXT)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    answer("cuDeviceGetCount", Needs::Init, || {
        // SAFETY: the caller's out pointer.
        unsafe { give(count, config::get().visible.len() as c_int) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    answer("cuDeviceGet", Needs::Init, || {
        physical(ordinal)?;
        // SAFETY: the caller's out pointer.
        unsafe { give(device, ordinal) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int) -> c_int {
    answer("cuDeviceGetName", Needs::Init, || {
        let text = format!("Fake CUDA {}\0", physical(device)?);
        if name.is_null() || (length as usize) < text.len() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's buffer has `length` bytes, and the text is no longer.
        unsafe { ptr::copy_nonoverlapping(text.as_ptr(), name.cast(), text.len()) };
        Ok(())
    })
}

fn uuid(device: usize) -> [u8; 16] {
    let mut uuid = *b"fake-cuda-gpu\0\0\0";
    uuid[15] = device as u8;
    uuid
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid(out: *mut [u8; 16], device: c_int) -> c_int {
    // SAFETY: the caller's out pointer.
    answer("cuDeviceGetUuid", Needs::Init, || unsafe {
        give(out, uuid(physical(device)?))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid_v2(out: *mut [u8; 16], device: c_int) -> c_int {
    // SAFETY: the caller's out pointer.
    answer("cuDeviceGetUuid_v2", Needs::Init, || unsafe {
        give(out, uuid(physical(device)?))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> c_int {
    answer("cuDeviceTotalMem_v2", Needs::Init, || {
        physical(device)?;
        // SAFETY: the caller's out pointer.
        unsafe { give(bytes, config::get().memory_bytes as usize) }
    })
}

/// Every attribute that is queried is supported.
/// `CU_DEVICE_ATTRIBUTE_MPS_ENABLED`.
const MPS_ENABLED: u32 = 133;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    attribute: u32,
    device: c_int,
) -> c_int {
    answer("cuDeviceGetAttribute", Needs::Init, || {
        physical(device)?;
        if attribute == 0 {
            return Err(INVALID_VALUE);
        }
        let is_there = attribute != MPS_ENABLED || config::get().mps;
        // SAFETY: the caller's out pointer.
        unsafe { give(value, c_int::from(is_there)) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) -> c_int {
    answer("cuDeviceCanAccessPeer", Needs::Init, || {
        let other = physical(device)? != physical(peer)?;
        // SAFETY: the caller's out pointer.
        unsafe { give(can, c_int::from(other && config::get().peers)) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) -> c_int {
    answer("cuDevicePrimaryCtxRetain", Needs::Init, || {
        let device = physical(device)?;
        // SAFETY: the caller's out pointer.
        unsafe { give(context, context_of(Some(device))) }?;
        RETAINED[device].fetch_add(1, Ordering::AcqRel);
        ACTIVE[device].store(true, Ordering::Release);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_int {
    answer("cuDevicePrimaryCtxRelease_v2", Needs::Init, || {
        let count = &RETAINED[physical(device)?];
        let taken = count.fetch_update(Ordering::AcqRel, Ordering::Acquire, |count| {
            count.checked_sub(1)
        });
        taken.map(drop).map_err(|_| INVALID_CONTEXT)
    })
}

/// Destroys everything that the context has: its streams, its events, its registrations, its
/// mappings. Does not return while a stream waits for a word, as measured on an H200. Its holders still have to release it; the next retain makes it
/// anew, with the same handle.
#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxReset_v2(device: c_int) -> c_int {
    answer("cuDevicePrimaryCtxReset_v2", Needs::Init, || {
        let device = physical(device)?;
        stream::settle_device(device);
        ACTIVE[device].store(false, Ordering::Release);
        RESETS[device].fetch_add(1, Ordering::AcqRel);
        event::end_all();
        stream::end_all(device);
        host::end_all();
        memory::end_all(device);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxGetState(
    device: c_int,
    flags: *mut u32,
    active: *mut c_int,
) -> c_int {
    answer("cuDevicePrimaryCtxGetState", Needs::Init, || {
        let is_active = ACTIVE[physical(device)?].load(Ordering::Acquire);
        // SAFETY: the caller's out pointers.
        unsafe { give(flags, 0).and_then(|()| give(active, c_int::from(is_active))) }
    })
}

/// A number that no other context of the process's life has.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetId(context: *mut c_void, id: *mut u64) -> c_int {
    answer("cuCtxGetId", Needs::Init, || {
        let device = device_of(context)?.ok_or(INVALID_CONTEXT)?;
        // SAFETY: the caller's out pointer.
        unsafe { give(id, resets(device) * DEVICES_MAX as u64 + device as u64) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(context: *mut *mut c_void) -> c_int {
    answer("cuCtxGetCurrent", Needs::Init, || {
        let device = STACK.with_borrow(|stack| stack.last().copied().flatten());
        // SAFETY: the caller's out pointer.
        unsafe { give(context, context_of(device)) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: *mut c_void) -> c_int {
    answer("cuCtxSetCurrent", Needs::Init, || {
        let device = device_of(context)?;
        STACK.with_borrow_mut(|stack| {
            stack.pop();
            stack.push(device);
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPushCurrent_v2(context: *mut c_void) -> c_int {
    answer("cuCtxPushCurrent_v2", Needs::Init, || {
        let device = device_of(context)?.ok_or(INVALID_CONTEXT)?;
        STACK.with_borrow_mut(|stack| stack.push(Some(device)));
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut *mut c_void) -> c_int {
    answer("cuCtxPopCurrent_v2", Needs::Init, || {
        let popped = STACK.with_borrow_mut(Vec::pop).ok_or(INVALID_CONTEXT)?;
        // SAFETY: the caller's out pointer.
        unsafe { give(context, context_of(popped)) }
    })
}
