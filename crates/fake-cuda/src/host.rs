//! Registered host memory. Its device address equals its host address.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::ipc::{self, Kind};
use crate::status::*;
use crate::{capture, device, memory, stream};

static REGISTERED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

fn with<T>(body: impl FnOnce(&mut BTreeMap<usize, usize>) -> T) -> T {
    body(&mut REGISTERED.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Removes all registrations.
pub fn end_all() {
    with(BTreeMap::clear);
}

/// Whether all these bytes lie in one registered range.
pub fn is_registered(address: u64, bytes: usize) -> bool {
    let address = address as usize;
    with(|ranges| {
        let below = ranges.range(..=address).next_back();
        below.is_some_and(|(start, length)| {
            address
                .checked_add(bytes)
                .is_some_and(|end| end <= start + length)
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostRegister_v2(pointer: *mut c_void, bytes: usize, flags: u32) -> c_int {
    answer("cuMemHostRegister_v2", Needs::Context, || {
        let start = pointer.addr();
        let end = start.checked_add(bytes).ok_or(INVALID_VALUE)?;
        if pointer.is_null() || bytes == 0 || flags & !0xf != 0 {
            return Err(INVALID_VALUE);
        }
        capture::check_unsafe_call()?;
        let _turn = allocation();
        with(|ranges| {
            if ranges
                .range(..end)
                .next_back()
                .is_some_and(|(other, length)| other + length > start)
            {
                return Err(HOST_MEMORY_ALREADY_REGISTERED);
            }
            ranges.insert(start, bytes);
            Ok(())
        })
    })
}

/// Held by calls that allocate or register memory while they run.
static ALLOCATION: Mutex<()> = Mutex::new(());

/// A call that allocates or registers memory. It runs when no [`cuMemHostUnregister`] is under way.
pub fn allocation() -> MutexGuard<'static, ()> {
    ALLOCATION.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for all streams of the process, and blocks all allocations meanwhile, as measured on an
/// H200.
#[unsafe(no_mangle)]
extern "C" fn cuMemHostUnregister(pointer: *mut c_void) -> c_int {
    answer("cuMemHostUnregister", Needs::Context, || {
        capture::check_unsafe_call()?;
        let _turn = allocation();
        stream::settle();
        with(|ranges| ranges.remove(&pointer.addr()))
            .map(drop)
            .ok_or(HOST_MEMORY_NOT_REGISTERED)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostGetDevicePointer_v2(
    address: *mut u64,
    pointer: *mut c_void,
    flags: u32,
) -> c_int {
    answer("cuMemHostGetDevicePointer_v2", Needs::Context, || {
        let value = pointer.addr() as u64;
        if flags != 0 || !is_registered(value, 1) {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's out pointer.
        unsafe { give(address, value) }
    })
}

/// The value of each pointer attribute.
struct Attributes {
    memory_type: u32,
    is_managed: u32,
    is_legacy_capable: u32,
    pool: u64,
    buffer: u64,
    ordinal: c_int,
    range: (u64, usize),
}

fn attributes(pointer: u64) -> Outcome<Attributes> {
    const HOST: u32 = 1;
    const DEVICE: u32 = 2;
    let plain = Attributes {
        memory_type: DEVICE,
        is_managed: 0,
        is_legacy_capable: 0,
        pool: 0,
        buffer: 0,
        ordinal: 0,
        range: (pointer, 0),
    };
    if is_registered(pointer, 1) {
        return Ok(Attributes {
            memory_type: HOST,
            ..plain
        });
    }
    if let Some(facts) = ipc::facts(pointer) {
        let is = |kind| u32::from(facts.kind == kind);
        return Ok(Attributes {
            is_managed: is(Kind::Managed),
            is_legacy_capable: is(Kind::Plain),
            pool: u64::from(is(Kind::Pool)),
            buffer: facts.number,
            range: facts.range,
            ordinal: device::ordinal(facts.device)?,
            ..plain
        });
    }
    let owner = memory::device_at(pointer).ok_or(INVALID_VALUE)?;
    Ok(Attributes {
        ordinal: device::ordinal(owner)?,
        ..plain
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuPointerGetAttribute(
    data: *mut c_void,
    attribute: u32,
    pointer: u64,
) -> c_int {
    answer("cuPointerGetAttribute", Needs::Context, || {
        let found = attributes(pointer)?;
        // SAFETY: the caller's out pointer, of the attribute's type.
        unsafe {
            match attribute {
                2 => give(data.cast(), found.memory_type),
                7 => give(data.cast(), found.buffer),
                8 => give(data.cast(), found.is_managed),
                9 => give(data.cast(), found.ordinal),
                10 => give(data.cast(), found.is_legacy_capable),
                11 => give(data.cast(), found.range.0),
                12 => give(data.cast(), found.range.1),
                17 => give(data.cast(), found.pool),
                _ => Err(INVALID_VALUE),
            }
        }
    })
}
