//! The CUDA implementation of [`Backend`]: opening a device, and entering its context.

pub(super) mod broadcast;
mod gather;
mod kernels;
pub(super) mod legacy;
pub(super) mod memory;

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use self::kernels::{Kernels, ResidentKernel};
use self::legacy::IpcHandleTable;
use self::memory::allocation;
use super::context::{Current, Relaxed, enter, make_current};
use super::device::{check_abilities, describe, driver, find};
use super::staging::Staging;
use super::sys::{
    CUcontext, CUdevice, CUresult, DEVICE_ATTRIBUTE_MPS_ENABLED, Driver,
    MEM_ALLOC_GRANULARITY_MINIMUM,
};
use super::{shutdown_gate, waits};
use crate::backend::{Backend, DeviceInfo};
use crate::error::{DeviceFault, Error, Result};
use crate::fork::per_process::PerProcess;

/// One GPU, through its primary context. See the [module](super).
#[derive(Debug)]
pub struct CudaBackend {
    pub(super) driver: &'static Driver,
    pub(super) device: CUdevice,
    pub(super) context: CUcontext,
    /// `None` for a driver that does not number contexts.
    context_id: Option<u64>,
    /// The context is known to have been reset.
    pub(super) is_reset: AtomicBool,
    pub(super) opening: waits::Context,
    pub(super) info: DeviceInfo,
    pub(super) granularity: u64,
    /// Set for the life of the context.
    pub(super) is_under_mps: bool,
    pub(super) kernels: Kernels,
    pub(super) broadcast: ResidentKernel,
    pub(super) gather: ResidentKernel,
    pub(super) staging: Staging,
    /// Bytes of regions and legacy memory that are allocated and not yet released.
    pub(super) held: AtomicU64,
    pub(super) ipc_handles: IpcHandleTable,
    pub(super) stuck: Mutex<HashSet<usize>>,
    pub(super) me: Weak<CudaBackend>,
}

/// The devices opened so far, by ordinal: one context, one set of modules, for the life of the
/// process.
static OPENED: PerProcess<Mutex<BTreeMap<u32, Arc<CudaBackend>>>> = PerProcess::new();

/// Codes with which a driver answers to handles of a destroyed context.
const STALE: [CUresult; 3] = [
    CUresult::INVALID_CONTEXT,
    CUresult::INVALID_HANDLE,
    CUresult::CONTEXT_IS_DESTROYED,
];

impl CudaBackend {
    /// `cuDevicePrimaryCtxRetain`: the GPU with this ordinal. Opening it again gives the same
    /// backend.
    ///
    /// # Errors
    /// [`Error::Device`], [`Error::Driver`], and [`Error::State`] in a
    /// child of a process that used CUDA.
    pub fn open(ordinal: u32) -> Result<Arc<dyn Backend>> {
        // Before the lock, so that no thread parks while it holds the lock.
        let _guard = shutdown_gate::enter();
        let driver = driver()?;
        let mut opened = OPENED.lock();
        let known = opened.get(&ordinal);
        if let Some(backend) = known.filter(|backend| !backend.is_gone()) {
            return Ok(backend.clone());
        }
        let had_one = known.is_some();
        let device = find(driver, ordinal)?;
        let info = describe(driver, device, ordinal)?;
        check_abilities(driver, device)?;
        let _relaxed = Relaxed::new(driver);
        let context = driver.cuDevicePrimaryCtxRetain(device)?;
        let backend = Self::with_context(driver, device, context, info).inspect_err(|_| {
            let _ = driver.cuDevicePrimaryCtxRelease_v2(device);
        })?;
        if had_one {
            // A reset leaves the retain counts as they are: the previous backend's retain is
            // released now that a new one exists.
            let _ = driver.cuDevicePrimaryCtxRelease_v2(device);
        }
        opened.insert(ordinal, backend.clone());
        Ok(backend)
    }

    fn with_context(
        driver: &'static Driver,
        device: CUdevice,
        context: CUcontext,
        info: DeviceInfo,
    ) -> Result<Arc<CudaBackend>> {
        let _current = enter(driver, context)?;
        let (prop, option) = (allocation(device), MEM_ALLOC_GRANULARITY_MINIMUM);
        // SAFETY: the address is that of a live local.
        let granularity = unsafe { driver.cuMemGetAllocationGranularity(&prop, option) }?;
        let is_under_mps = driver
            .cuDeviceGetAttribute(DEVICE_ATTRIBUTE_MPS_ENABLED, device)
            .is_ok_and(|is_enabled| is_enabled != 0);
        let (broadcast, gather) = (broadcast::load(driver)?, gather::load(driver)?);
        // Once more: the first context may have made the driver register a handler of its own.
        shutdown_gate::close_before_the_driver()?;
        // SAFETY: retained by the caller.
        let context_id = unsafe { driver.cuCtxGetId(context) }.ok();
        Ok(Arc::new_cyclic(|me| CudaBackend {
            driver,
            device,
            context,
            context_id,
            is_reset: AtomicBool::new(false),
            opening: waits::next_context(),
            info,
            granularity: granularity.max(1) as u64,
            is_under_mps,
            kernels: Kernels::default(),
            broadcast,
            gather,
            staging: Staging::default(),
            held: AtomicU64::new(0),
            ipc_handles: IpcHandleTable::default(),
            stuck: Mutex::default(),
            me: me.clone(),
        }))
    }

    /// Makes the device's context current on this thread until the result is dropped, for any call.
    /// It does not disturb a stream that another thread captures: see [`Relaxed`].
    ///
    /// # Errors
    /// [`Error::Device`]: the handles and addresses of a reset context may belong to others in
    /// the next one.
    pub(super) fn enter(&self) -> Result<Current> {
        let _guard = shutdown_gate::enter();
        if self.is_gone() {
            return Err(self.reset_error());
        }
        enter(self.driver, self.context)
    }

    /// Like [`enter`](Self::enter), for calls that only enqueue work. Those disturb no capture, and
    /// are too frequent for [`Relaxed`] and for a check that the retained context still exists. A
    /// known reset is an error here, too.
    #[inline]
    pub(super) fn enter_to_enqueue(&self) -> Result<Current> {
        if self.is_reset.load(Ordering::Relaxed) {
            return Err(self.reset_error());
        }
        make_current(self.driver, self.context).map_err(|error| self.explain(error))
    }

    /// Makes a call that only enqueues work.
    #[inline]
    pub(super) fn enqueued<E: Into<Error>>(
        &self,
        call: impl FnOnce(&'static Driver) -> Result<(), E>,
    ) -> Result<()> {
        let _current = self.enter_to_enqueue()?;
        call(self.driver).map_err(|error| self.explain(error.into()))
    }

    /// [`enter`](Self::enter), for calls that release: `None` if the resource went with the
    /// context.
    pub(super) fn enter_unless_gone(&self) -> Result<Option<Current>> {
        match self.enter() {
            Err(error) if error.is_reset() => Ok(None),
            entered => entered.map(Some),
        }
    }

    #[cold]
    pub(super) fn reset_error(&self) -> Error {
        let text = format!(
            "{} was reset after it was opened (cudaDeviceReset, cuDevicePrimaryCtxReset), and all that was made on it is gone",
            self.info.name
        );
        Error::device(DeviceFault::Reset, text)
    }

    /// Whether the device was reset since this was opened. A context that cannot be queried counts
    /// as present. The caller is inside the gate.
    fn is_gone(&self) -> bool {
        let is_another = || {
            // SAFETY: the primary context is active, and has one handle for the life of the
            // process.
            let now = unsafe { self.driver.cuCtxGetId(self.context) }.ok();
            self.context_id
                .is_some_and(|before| now.is_some_and(|now| now != before))
        };
        let is_gone = self.is_reset.load(Ordering::Relaxed)
            || match self.driver.cuDevicePrimaryCtxGetState(self.device) {
                Ok((_, active)) => active == 0 || is_another(),
                Err(_) => false,
            };
        if is_gone && !self.is_reset.swap(true, Ordering::Relaxed) {
            waits::reset(self.opening);
        }
        is_gone
    }

    /// Replaces an error if the device was reset.
    #[cold]
    pub(super) fn explain(&self, error: Error) -> Error {
        let _guard = shutdown_gate::enter();
        match error {
            Error::Driver { code, .. } if STALE.contains(&CUresult(code)) && self.is_gone() => {
                self.reset_error()
            }
            other => other,
        }
    }
}

impl crate::backend::sealed::Sealed for CudaBackend {}

impl Backend for CudaBackend {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn runs_beside_other_processes(&self) -> bool {
        self.is_under_mps
    }
}
