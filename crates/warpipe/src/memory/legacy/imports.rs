//! The imports of this process: each allocation is opened once, however many handles it has, and
//! closed when no stream uses it. **This module is marked for unsafe**: it closes mappings.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::LegacyHandle;
use crate::backend::{DeviceId, DevicePtr, IpcBytes};
use crate::backoff::Backoff;
use crate::device::Device;
use crate::error::{Error, LegacyFault, Result};
use crate::fork::leak_on_fork::LeakOnFork;
use crate::fork::per_process::PerProcess;
use crate::origin::ProcessOrigin;
use crate::runtime::fence::{Fence, StreamSet};
use crate::runtime::reactor::Reactor;
use crate::stream::Stream;

/// The most allocations that may be open at once.
const IMPORTS_MAX: usize = 1 << 16;

/// One allocation of another process, as one device of this process sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct LegacyImportKey {
    reader: DeviceId,
    owner: DeviceId,
    origin: ProcessOrigin,
    allocation: u64,
    raw: IpcBytes,
}

/// The open allocations of this process.
type Table = HashMap<LegacyImportKey, Arc<Import>>;

fn table() -> MutexGuard<'static, Table> {
    static TABLE: PerProcess<Mutex<Table>> = PerProcess::new();
    TABLE.lock()
}

/// One allocation. Its lock may be held across driver calls; the table's never is. A thread that
/// holds an import's lock may take the table's, and not the other way round.
struct Import {
    key: LegacyImportKey,
    device: Device,
    reactor: Arc<Reactor>,
    mapping: Mutex<ImportState>,
}

#[derive(Default)]
struct ImportState {
    base: Option<DevicePtr>,
    /// The allocation's length, which was checked when it was opened.
    bytes: u64,
    holds: u64,
    /// It is no longer in the table, and will not be opened again.
    is_over: bool,
}

/// An open range of another process's memory, or of this process's own if it is the exporter.
///
/// The memory stays mapped until the last handle of its allocation is dropped *and* the streams
/// that were recorded by [`used_by`](LegacyMemory::used_by) are past their work. It may be read and
/// written: with legacy handles there is no other way.
#[derive(Debug)]
pub struct LegacyMemory {
    device: Device,
    ptr: DevicePtr,
    bytes: u64,
    streams: StreamSet,
    /// `None` for this process's own memory, and while dropping.
    hold: LeakOnFork<Option<ImportHold>>,
}

impl LegacyMemory {
    /// This process's own memory: nothing to open, nothing to close.
    pub(super) fn own(device: &Device, ptr: DevicePtr, bytes: u64) -> LegacyMemory {
        LegacyMemory::new(device, ptr, bytes, None)
    }

    fn new(device: &Device, ptr: DevicePtr, bytes: u64, hold: Option<ImportHold>) -> LegacyMemory {
        LegacyMemory {
            device: device.clone(),
            ptr,
            bytes,
            streams: StreamSet::default(),
            hold: LeakOnFork::new(hold),
        }
    }

    /// The address of the range's first byte, for kernels and copies of the device.
    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// The range's length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The device with which it was opened.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Records that work of `stream` uses the memory, which is not unmapped before that work is
    /// done, whenever this handle is dropped. Call it before the work is enqueued, once for each
    /// stream.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn used_by(&self, stream: &Stream) -> Result<()> {
        self.hold.get()?;
        self.streams.record_use(stream);
        Ok(())
    }

    /// `cuIpcCloseMemHandle`, if this is the last handle of its allocation: waits until the
    /// recorded streams are past their work, and closes. Dropping the handle does the same later,
    /// without waiting.
    ///
    /// # Errors
    /// [`Error::Timeout`] when a stream is not done within `timeout`; it is closed when it is.
    /// [`Error::Forked`], [`Error::Driver`].
    pub fn close(mut self, timeout: Duration) -> Result<()> {
        self.hold.get()?;
        let Some(hold) = self.hold.take() else {
            return Ok(());
        };
        let (start, mut fence, mut backoff) = (
            Instant::now(),
            self.streams.fence_busy(),
            Backoff::default(),
        );
        while !fence.is_reached() {
            if start.elapsed() >= timeout {
                hold.close_after(fence);
                return Err(Error::Timeout {
                    what: "the work on legacy memory".into(),
                    waited: timeout,
                });
            }
            backoff.pause();
        }
        hold.release()
    }
}

impl Drop for LegacyMemory {
    fn drop(&mut self) {
        // In a forked child the mapping is the parent's to close, and its locks may be held for
        // ever.
        if self.hold.get().is_err() {
            return;
        }
        let Some(hold) = self.hold.take() else { return };
        let mut fence = self.streams.fence_busy();
        let is_quiet = fence.is_reached();
        // Only what calls the driver, or has to wait, is left to other threads.
        if let Some(hold) = if is_quiet {
            hold.split_off()
        } else {
            Some(hold)
        } {
            hold.close_after(fence);
        }
    }
}

/// Opens what a handle of another process names, or holds once more what is open.
pub(super) fn open(handle: &LegacyHandle, device: &Device) -> Result<LegacyMemory> {
    let fields = &handle.fields;
    let key = LegacyImportKey {
        reader: device.info().id,
        owner: fields.owner,
        origin: fields.origin,
        allocation: fields.allocation,
        raw: fields.raw.0,
    };
    loop {
        let import = find(&key, device)?;
        // An import that is over has left the table before its lock was released, so the next
        // look-up finds another.
        if let Some((hold, base)) = ImportHold::take(import, fields.allocation_bytes)? {
            return Ok(LegacyMemory::new(
                device,
                base + fields.offset,
                fields.bytes,
                Some(hold),
            ));
        }
    }
}

/// The import in the table, or a new one in it.
fn find(key: &LegacyImportKey, device: &Device) -> Result<Arc<Import>> {
    if let Some(import) = table().get(key) {
        return Ok(import.clone());
    }
    let reactor = Reactor::of_process()?;
    let mut imports = table();
    if imports.len() >= IMPORTS_MAX && !imports.contains_key(key) {
        return Err(Error::argument(
            "open allocations",
            imports.len() + 1,
            format!("at most {IMPORTS_MAX}"),
        ));
    }
    let new = || {
        Arc::new(Import {
            key: *key,
            device: device.clone(),
            reactor,
            mapping: Mutex::default(),
        })
    };
    Ok(imports.entry(*key).or_insert_with(new).clone())
}

impl Import {
    fn lock(&self) -> MutexGuard<'_, ImportState> {
        self.mapping.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes it out of the table for good.
    fn end(self: &Arc<Self>, mapping: &mut ImportState) {
        mapping.is_over = true;
        let mut imports = table();
        if imports
            .get(&self.key)
            .is_some_and(|known| Arc::ptr_eq(known, self))
        {
            imports.remove(&self.key);
        }
    }
}

/// A share in an import; the last one closes it.
struct ImportHold {
    /// `None` once it is given up.
    import: Option<Arc<Import>>,
}

impl std::fmt::Debug for ImportHold {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hold")
    }
}

impl ImportHold {
    /// `None` if the import is over. The first one opens it.
    fn take(import: Arc<Import>, bytes: u64) -> Result<Option<(ImportHold, DevicePtr)>> {
        let mut mapping = import.lock();
        if mapping.is_over {
            return Ok(None);
        }
        let base = match mapping.base {
            // A handle that says something else of what is open is not to reach beyond it.
            Some(_) if mapping.bytes != bytes => {
                let allocation = mapping.bytes;
                return Err(Error::legacy(LegacyFault::Range {
                    offset: 0,
                    bytes,
                    allocation,
                }));
            }
            Some(base) => base,
            None => {
                let opened =
                    import
                        .device
                        .backend()
                        .open_legacy(&import.key.raw, bytes, import.key.owner);
                opened.inspect_err(|_| import.end(&mut mapping))?
            }
        };
        (mapping.base, mapping.bytes) = (Some(base), bytes);
        mapping.holds += 1;
        drop(mapping);
        Ok(Some((
            ImportHold {
                import: Some(import),
            },
            base,
        )))
    }

    /// Gives it up, unless it is the last one: that is handed back.
    fn split_off(mut self) -> Option<ImportHold> {
        let import = self.import.take()?;
        let mut mapping = import.lock();
        if mapping.holds > 1 {
            mapping.holds -= 1;
            return None;
        }
        drop(mapping);
        Some(ImportHold {
            import: Some(import),
        })
    }

    /// Gives it up once `fence` is reached, on a thread that may be held up by the driver.
    fn close_after(self, fence: Fence) {
        let Some(reactor) = self.import.as_ref().map(|import| import.reactor.clone()) else {
            return;
        };
        reactor.drop_value_after(fence, self);
    }

    /// Gives it up now.
    fn release(mut self) -> Result<()> {
        self.give_up()
    }

    fn give_up(&mut self) -> Result<()> {
        let Some(import) = self.import.take() else {
            return Ok(());
        };
        let mut mapping = import.lock();
        mapping.holds -= 1;
        if mapping.holds > 0 {
            return Ok(());
        }
        let closed = match mapping.base.take() {
            // SAFETY: opened once, in `take`, and closed once: the base is taken. Every hold was
            // given up only when the streams that used the memory were proven to be past their
            // work.
            Some(base) => unsafe { import.device.backend().close_legacy(base) },
            None => Ok(()),
        };
        import.end(&mut mapping);
        closed
    }
}

impl Drop for ImportHold {
    fn drop(&mut self) {
        // Nobody is left to be told.
        let _ = self.give_up();
    }
}
