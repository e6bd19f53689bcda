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
/// Nothing reports that one is freed, so all are looked up when there is no room.
pub(super) fn remember(found: &PointerInfo, raw: IpcBytes, device: &Device) -> Result<IpcBytes> {
    let (key, export) = ((found.owner, found.base), (found.allocation, raw));
    let is_live = |key: &_, allocation| is_live(device, key, allocation);
    insert(&mut exports(), EXPORTS_MAX, key, export, is_live)?;
    Ok(raw)
}

/// Whether it is still there, as far as the device can tell: a GPU knows the others' addresses.
fn is_live(device: &Device, &(owner, base): &(DeviceId, DevicePtr), allocation: u64) -> bool {
    let found = || device.backend().locate(base);
    owner.kind != device.info().id.kind
        || found().map_or(true, |found| is_of(&found, base, allocation))
}

fn insert(
    exports: &mut Exports,
    max: usize,
    key: (DeviceId, DevicePtr),
    export: (u64, IpcBytes),
    is_live: impl Fn(&(DeviceId, DevicePtr), u64) -> bool,
) -> Result<()> {
    let is_full = |exports: &Exports| exports.len() >= max && !exports.contains_key(&key);
    if is_full(exports) {
        exports.retain(|key, (allocation, _)| is_live(key, *allocation));
    }
    if is_full(exports) {
        let allowed = format!("at most {max}");
        return Err(Error::argument("exported allocations", max + 1, allowed));
    }
    exports.insert(key, export);
    Ok(())
}

fn is_of(found: &PointerInfo, base: DevicePtr, allocation: u64) -> bool {
    (found.kind, found.base, found.allocation) == (PointerKind::Device, base, allocation)
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
    if !is_of(&found, base, handle.fields.allocation) {
        exports.remove(&(handle.fields.owner, base));
        return Err(stale("it was freed here"));
    }
    if found.bytes < handle.fields.allocation_bytes {
        return Err(stale("it is shorter than the handle says"));
    }
    Ok(base)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::DeviceKind;
    use crate::backend::testing::{Failing, Wrapped};

    #[test]
    fn freed_allocations_make_room_for_others_and_live_ones_do_not() {
        let owner = Device::host().info().id;
        let mut exports = Exports::new();
        let mut add = |base, freed: &[u64]| {
            let export = (base, [0; 64]);
            let is_live = |&(_, base): &(DeviceId, DevicePtr), allocation| {
                assert_eq!(base, allocation);
                !freed.contains(&base)
            };
            insert(&mut exports, 2, (owner, base), export, is_live).map(|()| exports.len())
        };
        assert_eq!((add(1, &[]).unwrap(), add(2, &[]).unwrap()), (1, 2));
        assert_eq!(add(2, &[]).unwrap(), 2, "the same address");
        assert!(add(3, &[]).unwrap_err().to_string().contains("at most 2"));
        assert_eq!(add(3, &[1]).unwrap(), 2);
        assert!(add(4, &[1]).is_err(), "1 is forgotten, 2 and 3 are live");
    }

    #[test]
    fn an_allocation_makes_room_once_it_is_known_to_be_freed_on_whichever_gpu() {
        let hook = Wrapped::new(Device::host().backend().clone(), Failing::default());
        let device = Device::from_backend(hook.clone());
        let base = device.backend().allocate_plain(64).unwrap();
        let found = device.backend().locate(base).unwrap();
        let (kind, uuid) = (found.owner.kind, [9; 16]);
        let owners = [found.owner, DeviceId { kind, uuid }];
        let live = || owners.map(|owner| is_live(&device, &(owner, base), found.allocation));
        assert_eq!(live(), [true; 2]);
        // SAFETY: allocated above, and used by nothing.
        unsafe { device.backend().free_plain(base) }.unwrap();
        hook.hook().aim("locate", 1);
        assert_eq!(live(), [true, false], "the first look-up failed");
        assert_eq!(live(), [false; 2]);
        let kind = DeviceKind::Cuda;
        let of_a_gpu = (DeviceId { kind, uuid }, base);
        assert!(is_live(&device, &of_a_gpu, 1), "the host cannot tell");
    }
}
