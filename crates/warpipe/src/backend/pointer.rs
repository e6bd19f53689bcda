//! The kind of memory behind an address. A legacy handle can export one kind of them.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use super::{DeviceId, DevicePtr};
pub use crate::error::PointerKind;
use crate::error::{Error, HandleFault, LimitFault, Result};

/// The bytes of a `CUipcMemHandle` or a `CUipcEventHandle`.
pub type IpcBytes = [u8; 64];

/// The most interprocess events that one process may have: the driver's limit.
pub const IPC_EVENTS_MAX: u32 = 4096;

/// How many interprocess events a process has.
#[derive(Debug, Default)]
pub(crate) struct IpcEventCount(AtomicU32);

impl IpcEventCount {
    /// Counts one more, unless that is too many.
    pub(crate) fn add(&self) -> Result<()> {
        let room = |count: u32| (count < IPC_EVENTS_MAX).then_some(count + 1);
        match self.0.fetch_update(Relaxed, Relaxed, room) {
            Ok(_) => Ok(()),
            Err(limit) => Err(Error::Limit(LimitFault::Events(limit))),
        }
    }

    pub(crate) fn remove(&self) {
        self.0.fetch_sub(1, Relaxed);
    }

    pub(crate) fn is_zero(&self) -> bool {
        self.0.load(Relaxed) == 0
    }
}

/// The allocation in which an address lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PointerInfo {
    /// The kind of memory. For every kind but [`PointerKind::Device`] the other fields are zero.
    pub kind: PointerKind,
    /// The device that owns it. For a kind that is neither [`PointerKind::Device`] nor
    /// [`PointerKind::Pool`], the device that was asked.
    pub owner: DeviceId,
    /// The allocation's first byte.
    pub base: DevicePtr,
    /// Its length in bytes.
    pub bytes: u64,
    /// A number that no other allocation in this process's life has
    /// (`CU_POINTER_ATTRIBUTE_BUFFER_ID`).
    pub allocation: u64,
}

/// The error of a handle of memory that `device` cannot open, as `owner` has it.
pub(crate) fn wrong_owner(owner: DeviceId, device: DeviceId) -> Error {
    let (owner, device) = (owner.to_string(), device.to_string());
    Error::legacy(HandleFault::Device { owner, device })
}

impl PointerInfo {
    /// Memory that cannot be exported.
    pub(crate) fn of_kind(kind: PointerKind, owner: DeviceId) -> PointerInfo {
        PointerInfo {
            kind,
            owner,
            base: 0,
            bytes: 0,
            allocation: 0,
        }
    }
}

/// Legacy memory of other processes that is open here, by its base.
#[derive(Debug, Default)]
pub(crate) struct OpenMemory<T>(pub(crate) BTreeMap<DevicePtr, Opening<T>>);

#[derive(Debug)]
pub(crate) struct Opening<T> {
    bytes: u64,
    times: u32,
    /// What identifies the memory, but for its base.
    pub(crate) identity: T,
}

impl<T> OpenMemory<T> {
    pub(crate) fn has(&self, ptr: DevicePtr) -> bool {
        let mut before = self.0.range(..=ptr);
        before.any(|(&base, open)| ptr - base < open.bytes)
    }

    /// Counts one opening more. Returns the bytes if it is the first one, else 0.
    pub(crate) fn open(&mut self, base: DevicePtr, bytes: u64, identity: T) -> u64 {
        let first = Opening {
            bytes,
            times: 0,
            identity,
        };
        let open = self.0.entry(base).or_insert(first);
        open.times += 1;
        if open.times == 1 { bytes } else { 0 }
    }

    /// Counts one opening less. Returns the bytes if it was the last one.
    pub(crate) fn close(&mut self, base: DevicePtr) -> Result<Option<u64>> {
        let Entry::Occupied(mut entry) = self.0.entry(base) else {
            return Err(Error::legacy(HandleFault::NotOpen(base)));
        };
        entry.get_mut().times -= 1;
        Ok((entry.get().times == 0).then(|| entry.remove().bytes))
    }
}

/// The process's mapping at an address: a line of `/proc/self/maps`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MapsEntry {
    pub(crate) is_readable: bool,
    pub(crate) name: String,
}

/// The mapping in which `address` lies. Looked up only when no device knows the address.
pub(crate) fn mapping_at(address: u64) -> Option<MapsEntry> {
    let maps = std::fs::read("/proc/self/maps").ok()?;
    String::from_utf8_lossy(&maps)
        .lines()
        .find_map(|line| mapping_of(line, address))
}

pub(crate) fn mapping_of(line: &str, address: u64) -> Option<MapsEntry> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    let permissions = fields.next()?;
    let name = fields.skip(3).collect::<Vec<_>>().join(" ");
    (number(start)?..number(end)?)
        .contains(&address)
        .then(|| MapsEntry {
            is_readable: permissions.starts_with('r'),
            name,
        })
}

/// The kind of an address that no device knows: memory of the process, or none. (A driver reserves
/// addresses that are not readable: those count as none.)
pub(crate) fn kind_outside(address: u64) -> PointerKind {
    match mapping_at(address) {
        _ if address == 0 => PointerKind::Null,
        Some(mapping) if mapping.is_readable => PointerKind::Host,
        _ => PointerKind::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_maps_names_its_range_and_no_other() {
        let line = "7f00-7f10 rw-s 00000000 00:01 1026                       /memfd:warpipe plain (deleted)";
        let mapping = mapping_of(line, 0x7f0f).unwrap();
        assert_eq!(
            (mapping.is_readable, mapping.name.as_str()),
            (true, "/memfd:warpipe plain (deleted)")
        );
        assert_eq!(mapping_of(line, 0x7f10), None);
        assert_eq!(mapping_of("garbage", 0x7f10), None);
    }

    #[test]
    fn what_no_device_knows_is_told_apart() {
        let local = 7u8;
        assert_eq!(
            kind_outside(std::ptr::from_ref(&local) as u64),
            PointerKind::Host
        );
        assert_eq!(kind_outside(0), PointerKind::Null);
        assert_eq!(kind_outside(64), PointerKind::Unknown);
    }
}
