//! The exports of this process: the driver opens no handle in the process that made it, so the
//! memory is found here.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};

use super::{LegacyHandle, other_device};
use crate::backend::{DeviceId, DevicePtr, IpcBytes, PointerInfo, PointerKind};
use crate::device::Device;
use crate::error::{Error, HandleFault, Result};
use crate::fork::per_process::PerProcess;

/// The most allocations that may be exported at once.
const EXPORTS_MAX: usize = 1 << 16;

/// By device and base: an address that is allocated and exported anew replaces what was there.
type Exports = HashMap<(DeviceId, DevicePtr), (u64, IpcBytes)>;

fn exports() -> MutexGuard<'static, Exports> {
    static EXPORTS: PerProcess<Mutex<Exports>> = PerProcess::new();
    EXPORTS.lock()
}

/// The driver's handle of an allocation, if it was exported before. A driver that gives allocations
/// no numbers is asked again.
pub(super) fn known(found: &PointerInfo) -> Option<IpcBytes> {
    let exports = exports();
    let (allocation, raw) = exports.get(&(found.owner, found.base))?;
    (*allocation == found.allocation && found.allocation != 0).then_some(*raw)
}

/// Which allocation lies at its base from now on, and the driver's handle of it, which is returned.
pub(super) fn remember(found: &PointerInfo, raw: IpcBytes) -> Result<IpcBytes> {
    let mut exports = exports();
    let key = (found.owner, found.base);
    if exports.len() >= EXPORTS_MAX && !exports.contains_key(&key) {
        return Err(Error::argument(
            "exported allocations",
            exports.len() + 1,
            format!("at most {EXPORTS_MAX}"),
        ));
    }
    exports.insert(key, (found.allocation, raw));
    Ok(raw)
}

/// The base of an allocation of this process, if it still is the one that was exported.
pub(super) fn find(handle: &LegacyHandle, device: &Device) -> Result<DevicePtr> {
    if handle.fields.owner != device.info().id {
        return Err(other_device(handle.fields.owner, device));
    }
    let mut exports = exports();
    let wanted = (handle.fields.allocation, handle.fields.raw.0);
    let known = exports
        .iter()
        .find(|((owner, _), known)| *owner == handle.fields.owner && **known == wanted);
    let stale = |reason: &str| {
        Error::legacy(HandleFault::Stale {
            pid: handle.fields.origin.pid,
            reason: reason.into(),
        })
    };
    let Some((&(_, base), _)) = known else {
        return Err(stale("it is not exported by this process"));
    };
    let found = device.backend().locate(base)?;
    if (found.kind, found.base, found.allocation)
        != (PointerKind::Device, base, handle.fields.allocation)
    {
        exports.remove(&(handle.fields.owner, base));
        return Err(stale("it was freed here"));
    }
    if found.bytes < handle.fields.allocation_bytes {
        return Err(stale("it is shorter than the handle says"));
    }
    Ok(base)
}
