//! The imports of this process: each allocation is opened once, however many handles it has, and
//! closed when no stream uses it. **This module is marked for unsafe**: it closes mappings, and
//! makes slices of them.

use std::sync::Arc;

use super::LegacyHandle;
use crate::backend::unreclaimed::Held;
use crate::backend::{Access, DeviceId, DevicePtr, IpcBytes, unreclaimed};
use crate::device::Device;
use crate::error::{Error, HandleFault, Result};
use crate::fork::leak_on_fork::LeakOnFork;
use crate::memory::slice::{DeviceSlice, MappedMemory, deref_to_slice, wait_for};
use crate::memory::weak_cache::WeakCache;
use crate::origin::ProcessOrigin;
use crate::runtime::reactor::Reactor;
use crate::wait::Wait;

/// The open allocations of this process.
static OPEN: WeakCache<LegacyImportKey, Import> = WeakCache::new();

/// One allocation of another process, as one device of this process sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct LegacyImportKey {
    reader: DeviceId,
    owner: DeviceId,
    origin: ProcessOrigin,
    allocation: u64,
    raw: IpcBytes,
}

/// One open allocation. Its drop calls the driver, which counts how often it was opened: one that
/// is being closed may be opened again.
#[derive(Debug)]
pub(crate) struct Import {
    device: Device,
    reactor: Arc<Reactor>,
    /// `None` once it is closed.
    base: Option<DevicePtr>,
    /// Its length, which was checked when it was opened.
    bytes: u64,
}

impl Import {
    fn close(&mut self) -> Result<()> {
        let Some(base) = self.base.take() else {
            return Ok(());
        };
        // SAFETY: opened once, in `open`, and closed once: the base is taken. The last owner gave it
        // up when the streams that used the memory were proven to be past their work.
        let closed = unsafe { self.device.backend().close_legacy(base) };
        closed.inspect_err(|error| {
            // It is open, unless the driver says that it is not.
            self.base = (!matches!(error, Error::Handle { .. })).then_some(base);
        })
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        if let Some(base) = self.base {
            // SAFETY: as above.
            unsafe { unreclaimed::release(self.device.backend(), Held::Legacy(base, self.bytes)) };
        }
    }
}

/// An open range of another process's memory, or of this process's own if it is the exporter. Its
/// methods to read and write are those of [`DeviceSlice`].
///
/// The memory stays mapped until the last handle of its allocation is dropped *and* the streams
/// that were recorded by [`used_on`](DeviceSlice::used_on) are past their work. It may be read and
/// written: with legacy handles there is no other way.
#[derive(Debug)]
pub struct LegacyMemory {
    slice: DeviceSlice,
    /// `None` for this process's own memory, which needs no close, and while dropping.
    import: LeakOnFork<Option<Arc<Import>>>,
}

deref_to_slice!(LegacyMemory);

impl LegacyMemory {
    /// # Safety
    /// `bytes` bytes at `ptr` may be written as long as `import`, or are this process's own.
    pub(super) unsafe fn new(
        devices: (&Device, DeviceId),
        (ptr, bytes): (DevicePtr, u64),
        import: Option<Arc<Import>>,
    ) -> LegacyMemory {
        let memory = MappedMemory::kept_by_caller(devices);
        let name = "memory of a legacy handle".into();
        // SAFETY: the caller's promise; the drop keeps the import until the streams are past it.
        let slice = unsafe { DeviceSlice::new(memory, ptr, bytes, Access::ReadWrite, &name) };
        LegacyMemory {
            slice: slice.waiting_for_all(),
            import: LeakOnFork::new(import),
        }
    }

    /// `cuIpcCloseMemHandle`, if this is the last handle of its allocation: waits until the
    /// recorded streams are past their work, and closes. Dropping the handle does the same later,
    /// without waiting.
    ///
    /// # Errors
    /// [`Error::Timeout`] when a stream is not done in time; it is closed when it is.
    /// [`Error::State`], [`Error::Driver`].
    pub fn close<'w>(mut self, wait: impl Into<Wait<'w>>) -> Result<()> {
        self.import.get()?;
        // After an error the drop closes it.
        wait_for(self.slice.streams(), &wait.into())?;
        let import = self.import.take().and_then(Arc::into_inner);
        import.map_or(Ok(()), |mut last| last.close())
    }
}

impl Drop for LegacyMemory {
    fn drop(&mut self) {
        // In a forked child the mapping is the parent's to close, and its locks may be held for
        // ever.
        if self.import.get().is_err() {
            return;
        }
        let Some(import) = self.import.take() else {
            return;
        };
        let (reactor, mut fence) = (import.reactor.clone(), self.slice.streams().fence_busy());
        // Only what calls the driver, or has to wait, is left to other threads.
        if !fence.is_reached() {
            reactor.drop_value_after(fence, import);
        } else if let Some(last) = Arc::into_inner(import) {
            reactor.defer_drop(Box::new(last));
        }
    }
}

/// Opens what a handle of another process names, or holds once more what is open: the allocation's
/// base, and what keeps it open.
pub(super) fn open(handle: &LegacyHandle, device: &Device) -> Result<(DevicePtr, Arc<Import>)> {
    let fields = &handle.fields;
    let (owner, bytes) = (fields.owner, fields.allocation_bytes);
    let key = LegacyImportKey {
        reader: device.info().id,
        owner,
        origin: fields.origin,
        allocation: fields.allocation,
        raw: fields.raw.0,
    };
    let import = OPEN.get_or(
        &key,
        |_| true,
        || {
            let reactor = Reactor::of_process()?;
            let base = device.backend().open_legacy(&key.raw, bytes, owner)?;
            Ok(Arc::new(Import {
                device: device.clone(),
                reactor,
                base: Some(base),
                bytes,
            }))
        },
    )?;
    // A handle that says something else of what is open is not to reach beyond it.
    let Some(base) = import.base.filter(|_| import.bytes == bytes) else {
        return Err(Error::legacy(HandleFault::Range {
            offset: 0,
            bytes,
            allocation: import.bytes,
        }));
    };
    Ok((base, import))
}
