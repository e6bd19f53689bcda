//! Memory of other allocators, and the driver's older IPC: legacy handles and interprocess events.

use std::collections::{HashMap, HashSet};
use std::ffi::c_int;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use super::super::sys::Fault;
use super::super::sys::*;
use super::CudaBackend;
use super::memory::size;
use crate::backend::pointer::{IpcEventCount, OpenMemory, kind_outside, wrong_owner};
use crate::backend::unreclaimed::{self, Held};
use crate::backend::{
    Backend, DeviceId, DeviceKind, IPC_EVENTS_MAX, Ipc, IpcBytes, PointerInfo, PointerKind,
    RawEvent,
};
use crate::error::{DeviceFault, Error, HandleFault, LimitFault, Result};
use crate::fork::per_process::PerProcess;
use crate::mutex::LockUnpoisoned;

/// Codes with which the driver refuses a handle.
const REFUSED: [CUresult; 7] = [
    CUresult::INVALID_VALUE,
    CUresult::INVALID_DEVICE,
    CUresult::INVALID_CONTEXT,
    CUresult::MAP_FAILED,
    CUresult::OPERATING_SYSTEM,
    CUresult::INVALID_HANDLE,
    CUresult::UNKNOWN,
];

/// Codes with which the driver reports that no interprocess event is left.
const NO_EVENT_LEFT: [CUresult; 2] = [CUresult::OUT_OF_MEMORY, CUresult::MAP_FAILED];

/// Legacy memory by its base: its bytes, and how often it is open.
#[derive(Debug, Default)]
pub(in crate::backend::cuda) struct IpcHandleTable {
    allocated: Mutex<HashMap<CUdeviceptr, u64>>,
    opened: Mutex<OpenMemory<()>>,
}

impl Ipc for CudaBackend {
    fn create_ipc_event(&self) -> Result<RawEvent> {
        let _current = self.enter()?;
        let events = EVENTS.get();
        events.count.add()?;
        let flags = EVENT_INTERPROCESS | EVENT_DISABLE_TIMING;
        let event = self.driver.cuEventCreate(flags).map_err(|fault| {
            events.count.remove();
            // Other code of this process may have some, too.
            let none_left = |_| Error::Limit(LimitFault::Events(IPC_EVENTS_MAX));
            fault.typed(&NO_EVENT_LEFT, none_left)
        })?;
        events.live.locked().insert(event.addr());
        Ok(RawEvent(event))
    }

    unsafe fn export_event(&self, event: RawEvent) -> Result<IpcBytes> {
        let _current = self.enter()?;
        // SAFETY: the caller's promise.
        Ok(unsafe { self.driver.cuIpcGetEventHandle(event.0) }?.reserved)
    }

    fn open_event(&self, handle: &IpcBytes) -> Result<RawEvent> {
        let _current = self.enter()?;
        let refused = |fault: Fault| fault.typed(&REFUSED, refused);
        let handle = CUipcHandle { reserved: *handle };
        let event = self.driver.cuIpcOpenEventHandle(handle).map_err(refused)?;
        Ok(RawEvent(event))
    }

    fn allocate_plain(&self, bytes: u64) -> Result<CUdeviceptr> {
        let _current = self.enter()?;
        let allocated = self.driver.cuMemAlloc_v2(size(bytes)?);
        let base = allocated.map_err(|fault| self.no_room(fault, bytes))?;
        self.ipc_handles.allocated.locked().insert(base, bytes);
        self.held.fetch_add(bytes, Ordering::Relaxed);
        Ok(base)
    }

    unsafe fn free_plain(&self, base: CUdeviceptr) -> Result<()> {
        let current = self.enter_unless_gone()?;
        // Before the driver can give the address to another allocation.
        let bytes = self.ipc_handles.allocated.locked().remove(&base);
        self.held.fetch_sub(bytes.unwrap_or(0), Ordering::Relaxed);
        if current.is_none() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        Ok(unsafe { self.driver.cuMemFree_v2(base) }?)
    }

    fn locate(&self, ptr: CUdeviceptr) -> Result<PointerInfo> {
        let _current = self.enter()?;
        let kind = self.kind_of(ptr)?;
        let mut info = PointerInfo::of_kind(kind, self.info.id);
        if !matches!(kind, PointerKind::Device | PointerKind::Pool) {
            return Ok(info);
        }
        let driver = self.driver;
        if let Some(ordinal) = driver.pointer_attribute(PointerAttribute::DeviceOrdinal, ptr)? {
            let device = driver.cuDeviceGet(ordinal as c_int)?;
            info.owner = DeviceId {
                kind: DeviceKind::Cuda,
                uuid: driver.device_uuid(device)?,
            };
        }
        if kind == PointerKind::Pool {
            return Ok(info);
        }
        // `cuMemGetAddressRange` finds no memory of another GPU.
        let number = |attribute| driver.pointer_attribute(attribute, ptr);
        info.base = number(PointerAttribute::RangeStart)?.unwrap_or(ptr);
        info.bytes = number(PointerAttribute::RangeSize)?.unwrap_or(0);
        info.allocation = number(PointerAttribute::BufferId)?.unwrap_or(0);
        Ok(info)
    }

    unsafe fn export_legacy(&self, base: CUdeviceptr) -> Result<IpcBytes> {
        let _current = self.enter()?;
        let unknown = |_| Error::not_exportable(base, PointerKind::Unknown);
        let exported = self.driver.cuIpcGetMemHandle(base);
        let exported = exported.map_err(|fault| fault.typed(&[CUresult::INVALID_VALUE], unknown));
        Ok(exported?.reserved)
    }

    fn open_legacy(&self, handle: &IpcBytes, bytes: u64, owner: DeviceId) -> Result<CUdeviceptr> {
        if owner.kind != DeviceKind::Cuda {
            return Err(wrong_owner(owner, self.info.id));
        }
        let _current = self.enter()?;
        self.check_peer(owner)?;
        let flags = IPC_MEM_LAZY_ENABLE_PEER_ACCESS;
        let base = self
            .driver
            .cuIpcOpenMemHandle_v2(CUipcHandle { reserved: *handle }, flags)
            .map_err(|fault| self.refusal(fault, owner))?;
        let checked = self.check_length(base, bytes);
        // A wrong length counts for nothing until it is closed.
        let bytes = if checked.is_ok() { bytes } else { 0 };
        let new = self.ipc_handles.opened.locked().open(base, bytes, ());
        self.held.fetch_add(new, Ordering::Relaxed);
        if let (Err(_), Some(me)) = (&checked, self.me.upgrade()) {
            let me: Arc<dyn Backend> = me;
            // SAFETY: opened just now, and nothing was enqueued on it.
            unsafe { unreclaimed::release(&me, Held::Legacy(base, bytes)) };
        }
        checked.map(|()| base)
    }

    unsafe fn close_legacy(&self, base: CUdeviceptr) -> Result<()> {
        let current = self.enter_unless_gone()?;
        // Before the driver can give the address to another allocation.
        let closed = self.ipc_handles.opened.locked().close(base)?;
        self.held.fetch_sub(closed.unwrap_or(0), Ordering::Relaxed);
        if current.is_none() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.driver.cuIpcCloseMemHandle(base) }.map_err(|fault| {
            if fault.is(&[CUresult::INVALID_VALUE, CUresult::INVALID_HANDLE]) {
                return Error::legacy(HandleFault::NotOpen(base));
            }
            // It is open as before.
            let bytes = closed.unwrap_or(0);
            let again = self.ipc_handles.opened.locked().open(base, bytes, ());
            self.held.fetch_add(again, Ordering::Relaxed);
            fault.into()
        })
    }
}

impl CudaBackend {
    fn kind_of(&self, ptr: CUdeviceptr) -> Result<PointerKind> {
        let attribute = |attribute| self.driver.pointer_attribute(attribute, ptr);
        let memory_type = match ptr {
            0 => None,
            _ => attribute(PointerAttribute::MemoryType)?,
        };
        let Some(memory_type) = memory_type else {
            return Ok(kind_outside(ptr));
        };
        let is = |which| Ok::<_, Fault>(attribute(which)?.unwrap_or(0) != 0);
        // Managed memory may report itself as host or as device memory, so this check comes first.
        if is(PointerAttribute::IsManaged)? {
            return Ok(PointerKind::Managed);
        }
        if memory_type == u64::from(MEMORYTYPE_HOST) {
            return Ok(PointerKind::Pinned);
        }
        // Drivers older than the attribute say no.
        if is(PointerAttribute::MempoolHandle)? {
            return Ok(PointerKind::Pool);
        }
        if self.ipc_handles.opened.locked().has(ptr) {
            return Ok(PointerKind::Import);
        }
        // Drivers older than the attribute do not say.
        Ok(match attribute(PointerAttribute::IsLegacyIpcCapable)? {
            Some(0) => PointerKind::Vmm,
            _ => PointerKind::Device,
        })
    }

    /// Checks that the allocation is as long as the handle says, where the driver knows its length.
    fn check_length(&self, base: CUdeviceptr, bytes: u64) -> Result<()> {
        let Ok((start, allocation)) = self.driver.cuMemGetAddressRange_v2(base) else {
            return Ok(());
        };
        // The bytes behind the base; a driver that puts the base outside its own range leaves none.
        let left = base
            .checked_sub(start)
            .and_then(|offset| (allocation as u64).checked_sub(offset))
            .unwrap_or(0);
        if left < bytes {
            return Err(Error::legacy(HandleFault::Range {
                offset: 0,
                bytes,
                allocation: left,
            }));
        }
        Ok(())
    }

    fn refusal(&self, fault: Fault, owner: DeviceId) -> Error {
        if fault.is(&[CUresult::PEER_ACCESS_UNSUPPORTED]) {
            return self.peer_error(owner, fault.words());
        }
        if !fault.is(&REFUSED) {
            return fault.into();
        }
        match self.visible(owner) {
            Ok(None) => {
                let text = format!(
                    "no device {owner}; there are other GPUs alone: the owner of this memory is hidden from this process (CUDA_VISIBLE_DEVICES)"
                );
                Error::device(DeviceFault::NoSuchDevice, text)
            }
            _ => refused(fault),
        }
    }

    /// The device, if this process may use it.
    pub(in crate::backend::cuda) fn visible(
        &self,
        id: DeviceId,
    ) -> Result<Option<CUdevice>, Fault> {
        for ordinal in 0..self.driver.cuDeviceGetCount()? {
            let device = self.driver.cuDeviceGet(ordinal)?;
            if self.driver.device_uuid(device)? == id.uuid {
                return Ok(Some(device));
            }
        }
        Ok(None)
    }
}

fn refused(fault: Fault) -> Error {
    Error::legacy(HandleFault::Refused(fault.words()))
}

/// This process's interprocess events, on all devices: the driver's limit is per process.
pub(in crate::backend::cuda) static EVENTS: PerProcess<Events> = PerProcess::new();

#[derive(Default)]
pub(in crate::backend::cuda) struct Events {
    count: IpcEventCount,
    live: Mutex<HashSet<usize>>,
}

impl Events {
    /// Counts an event as gone, if it is an interprocess event. This comes before its destruction,
    /// since its handle may name another event afterwards.
    pub(in crate::backend::cuda) fn forget(&self, event: CUevent) {
        if !self.count.is_zero() && self.live.locked().remove(&event.addr()) {
            self.count.remove();
        }
    }
}
