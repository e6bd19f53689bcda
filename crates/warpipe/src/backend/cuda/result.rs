//! One function for each driver call that the backend uses, with Rust's types and a [`Fault`] for a
//! failure.
//!
//! Functions are `unsafe` where the driver would follow a handle or pointer that the caller must
//! vouch for.

use std::ffi::{c_int, c_uint};
use std::ptr;

use super::fault::Fault;
use super::shutdown_gate;
use super::sys::*;

type DriverAnswer<T = ()> = Result<T, Fault>;

/// Calls a function of the table if the driver has it, and turns a failure into a `Fault`. The call
/// is unsafe: every use is in an unsafe block with its safety argument.
macro_rules! call {
    ($driver:expr, $name:ident($($argument:expr),* $(,)?)) => {{
        debug_assert!(shutdown_gate::is_inside(), "{} outside the gate", stringify!($name));
        match $driver.$name {
            None => Err(Fault::Symbol(stringify!($name))),
            Some(function) => match function($($argument),*) {
                CUresult::SUCCESS => Ok(()),
                code => Err(Fault::Call { call: stringify!($name), code }),
            },
        }
    }};
}

mod memory;
mod modules;
mod order;

/// A status in which "not ready" is an answer, not a failure.
fn ready(answer: DriverAnswer) -> DriverAnswer<bool> {
    match answer {
        Ok(()) => Ok(true),
        Err(fault) if fault.is(&[CUresult::NOT_READY]) => Ok(false),
        Err(fault) => Err(fault),
    }
}

impl Driver {
    pub fn init(&self) -> DriverAnswer {
        // SAFETY: plain values.
        unsafe { call!(self, cuInit(0)) }
    }

    pub fn device_count(&self) -> DriverAnswer<u32> {
        let mut count = 0;
        // SAFETY: the out pointer is a live local.
        unsafe { call!(self, cuDeviceGetCount(&mut count)) }?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    pub fn device(&self, ordinal: u32) -> DriverAnswer<CUdevice> {
        let mut device = 0;
        let ordinal = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: the out pointer is a live local; the driver checks the ordinal.
        unsafe { call!(self, cuDeviceGet(&mut device, ordinal)) }?;
        Ok(device)
    }

    pub fn device_name(&self, device: CUdevice) -> DriverAnswer<String> {
        let mut name = [0u8; 128];
        // SAFETY: the buffer has the length given, less one that keeps it terminated whatever is
        // written.
        unsafe {
            call!(
                self,
                cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as c_int - 1, device)
            )
        }?;
        let end = name
            .iter()
            .position(|&byte| byte == 0)
            .unwrap_or(name.len());
        Ok(String::from_utf8_lossy(&name[..end]).into_owned())
    }

    pub fn device_uuid(&self, device: CUdevice) -> DriverAnswer<[u8; 16]> {
        let mut uuid = CUuuid::default();
        // `_v2` tells the parts of a partitioned GPU (MIG) apart, the older one does not.
        if self.cuDeviceGetUuid_v2.is_some() {
            // SAFETY: the out pointer is a live local.
            unsafe { call!(self, cuDeviceGetUuid_v2(&mut uuid, device)) }?;
        } else {
            // SAFETY: as above.
            unsafe { call!(self, cuDeviceGetUuid(&mut uuid, device)) }?;
        }
        Ok(uuid.bytes)
    }

    pub fn device_memory(&self, device: CUdevice) -> DriverAnswer<u64> {
        let mut bytes = 0;
        // SAFETY: the out pointer is a live local.
        unsafe { call!(self, cuDeviceTotalMem_v2(&mut bytes, device)) }?;
        Ok(bytes as u64)
    }

    pub fn device_attribute(&self, device: CUdevice, attribute: c_uint) -> DriverAnswer<i32> {
        let mut value = 0;
        // SAFETY: the out pointer is a live local.
        unsafe { call!(self, cuDeviceGetAttribute(&mut value, attribute, device)) }?;
        Ok(value)
    }

    pub fn can_access_peer(&self, device: CUdevice, peer: CUdevice) -> DriverAnswer<bool> {
        let mut can = 0;
        // SAFETY: the out pointer is a live local.
        unsafe { call!(self, cuDeviceCanAccessPeer(&mut can, device, peer)) }?;
        Ok(can != 0)
    }

    pub fn primary_context_retain(&self, device: CUdevice) -> DriverAnswer<CUcontext> {
        let mut context = CUcontext(ptr::null_mut());
        // SAFETY: the out pointer is a live local.
        unsafe { call!(self, cuDevicePrimaryCtxRetain(&mut context, device)) }?;
        Ok(context)
    }

    pub fn primary_context_release(&self, device: CUdevice) -> DriverAnswer {
        // SAFETY: plain values; the driver counts the holds.
        unsafe { call!(self, cuDevicePrimaryCtxRelease_v2(device)) }
    }

    /// Whether a device's primary context exists, and has not been reset since.
    pub fn primary_context_is_active(&self, device: CUdevice) -> DriverAnswer<bool> {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: the out pointers are live locals.
        unsafe {
            call!(
                self,
                cuDevicePrimaryCtxGetState(device, &mut flags, &mut active)
            )
        }?;
        Ok(active != 0)
    }

    /// A number that no other context in the process's life has.
    ///
    /// # Safety
    /// The context is live.
    pub unsafe fn context_id(&self, context: CUcontext) -> DriverAnswer<u64> {
        let mut id = 0;
        // SAFETY: the out pointer is a live local; the context is the caller's promise.
        unsafe { call!(self, cuCtxGetId(context, &mut id)) }?;
        Ok(id)
    }

    #[inline]
    pub fn context_current(&self) -> DriverAnswer<CUcontext> {
        let mut context = CUcontext(ptr::null_mut());
        // SAFETY: the out pointer is a live local.
        unsafe { call!(self, cuCtxGetCurrent(&mut context)) }?;
        Ok(context)
    }

    /// # Safety
    /// The context is live.
    pub unsafe fn context_push(&self, context: CUcontext) -> DriverAnswer {
        // SAFETY: the caller's promise.
        unsafe { call!(self, cuCtxPushCurrent_v2(context)) }
    }

    pub fn context_pop(&self) -> DriverAnswer {
        let mut context = CUcontext(ptr::null_mut());
        // SAFETY: the out pointer is a live local; an empty stack is an error, not a fault.
        unsafe { call!(self, cuCtxPopCurrent_v2(&mut context)) }
    }

    /// Free and total bytes of the current context's device.
    pub fn memory_info(&self) -> DriverAnswer<(u64, u64)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the out pointers are live locals.
        unsafe { call!(self, cuMemGetInfo_v2(&mut free, &mut total)) }?;
        Ok((free as u64, total as u64))
    }
}
