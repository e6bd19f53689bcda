//! Loading the driver, and the devices that it has.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::shutdown_gate::Wait;
use super::sys::{self, CUdevice, CUresult, Driver, Fault};
use super::{fault, shutdown_gate};
use crate::backend::{DeviceId, DeviceInfo, DeviceKind};
use crate::error::{DeviceFault, Error, Result, StateFault};

/// The limit for an MPS server that is not ready.
const MPS_PATIENCE: Duration = Duration::from_secs(5);

/// Loads and initialises the driver: `cuInit`, which returns at once when it has been called
/// before. The caller is inside the gate.
pub(super) fn driver() -> Result<&'static Driver> {
    let driver = sys::driver().map_err(|reason| {
        let names = sys::LIBRARY_NAMES.join(", ");
        let text = format!("no CUDA driver: {names} could not be loaded ({reason})");
        Error::device(DeviceFault::NoDriver, text)
    })?;
    if shutdown_gate::forked() {
        return Err(Error::State(StateFault::Forked));
    }
    init(driver).map_err(fault::init_error)?;
    shutdown_gate::remember_process();
    close_at_exit()?;
    Ok(driver)
}

/// Once for a process. If two threads come at once both do it, before either continues.
fn close_at_exit() -> Result<()> {
    static IS_DONE: AtomicBool = AtomicBool::new(false);
    if !IS_DONE.load(Ordering::Acquire) {
        shutdown_gate::close_before_the_driver()?;
        IS_DONE.store(true, Ordering::Release);
    }
    Ok(())
}

/// `cuInit`. An MPS server that has lost a client takes a moment before it accepts the next one, so
/// this retries.
fn init(driver: &Driver) -> Result<(), Fault> {
    let mut wait = Wait::new(MPS_PATIENCE);
    let is_starting = |fault: Fault| fault.is(&[CUresult::MPS_SERVER_NOT_READY]);
    loop {
        match driver.cuInit(0) {
            Err(fault) if is_starting(fault) && wait.pause(String::new).is_ok() => {}
            other => return other,
        }
    }
}

/// `cuDeviceGetCount`: the number of GPUs that this process may use (the driver honours
/// `CUDA_VISIBLE_DEVICES`).
///
/// # Errors
/// [`Error::Device`], [`Error::Driver`].
pub fn device_count() -> Result<u32> {
    let _guard = shutdown_gate::enter();
    Ok(u32::try_from(driver()?.cuDeviceGetCount()?).unwrap_or(0))
}

/// `cuDeviceGetUuid`: the identity of the GPU with this ordinal.
///
/// # Errors
/// As for [`device_count`], and [`Error::Device`].
pub fn device_uuid(ordinal: u32) -> Result<[u8; 16]> {
    let _guard = shutdown_gate::enter();
    let driver = driver()?;
    Ok(driver.device_uuid(find(driver, ordinal)?)?)
}

/// `cuDeviceGet`, with an error that gives the number of devices.
pub(super) fn find(driver: &Driver, ordinal: u32) -> Result<CUdevice> {
    let count = driver.cuDeviceGetCount()?;
    if count <= 0 {
        return Err(fault::no_device());
    }
    match c_int::try_from(ordinal) {
        Ok(ordinal) if ordinal < count => Ok(driver.cuDeviceGet(ordinal)?),
        _ => {
            let text = format!(
                "no device with ordinal {ordinal}; there are {count} visible GPUs, ordinals from 0"
            );
            Err(Error::device(DeviceFault::NoSuchDevice, text))
        }
    }
}

pub(super) fn describe(driver: &Driver, device: CUdevice, ordinal: u32) -> Result<DeviceInfo> {
    let id = DeviceId {
        kind: DeviceKind::Cuda,
        uuid: driver.device_uuid(device)?,
    };
    Ok(DeviceInfo {
        id,
        ordinal,
        name: driver.device_name(device)?,
        memory_bytes: driver.cuDeviceTotalMem_v2(device)? as u64,
    })
}

/// The library needs these three abilities; opening a GPU without one is an error that names it.
pub(super) fn check_abilities(driver: &Driver, device: CUdevice) -> Result<()> {
    let needed = [
        (
            sys::DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            "virtual memory management",
        ),
        (
            sys::DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            "memory shared as file descriptors",
        ),
        (
            sys::DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
            "64-bit stream memory operations",
        ),
    ];
    for (attribute, ability) in needed {
        if driver.cuDeviceGetAttribute(attribute, device)? == 0 {
            return Err(Error::Driver {
                call: "cuDeviceGetAttribute",
                code: CUresult::NOT_SUPPORTED.0,
                name: "CUDA_ERROR_NOT_SUPPORTED".into(),
                message: format!("this GPU or its driver has no {ability}"),
                next: "use another GPU, a newer driver, or Device::host()",
            });
        }
    }
    Ok(())
}
