//! The sharing process's handle.

use std::any::Any;
use std::sync::Arc;

use super::shares::{AllocationStats, Shares};
use crate::backend::{Access, DevicePtr};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::leak_on_fork::LeakOnFork;
use crate::ipc::domain::EndpointName;
use crate::ipc::{AccessPolicy, IpcServer, Kind};
use crate::options::{CreateOptions, chosen_device, serve};
use crate::runtime::reactor::DropReadiness;
use crate::stream::Stream;

/// Shares memory that other libraries allocate in this process.
///
/// [`share`](Self::share) gives a number for a range of memory, and keeps an owner until the
/// receiver is done: an object that keeps the memory allocated. The number goes to one other
/// process by any means, which opens it with an [`AllocationClient`](crate::AllocationClient).
///
/// ```
/// use std::time::Duration;
/// use warpipe::{
///     Access, AllocationClient, AllocationServer, Device, Domain, OpenOptions,
/// };
/// # let folder = std::env::temp_dir().join(format!("warpipe-alloc-{}", std::process::id()));
/// # let (domain, device) = (Domain::at(&folder)?, Device::host());
/// let server = AllocationServer::new("tensors", domain.on(&device))?;
/// let stream = device.stream()?;
/// let pointer = device.backend().allocate_plain(4096)?; // another library's cudaMalloc
/// // SAFETY: the memory is freed below, after the receiver has released it.
/// let number = unsafe { server.share(&stream, pointer, 4096, Access::ReadWrite, Box::new(()))? };
///
/// // In another process, as a rule:
/// let client = AllocationClient::open("tensors", domain.on(&device), Duration::ZERO)?;
/// let memory = client.open_share(number, Duration::from_secs(1))?;
/// assert_eq!(memory.bytes(), 4096);
/// # drop((memory, client, server));
/// # unsafe { device.backend().free_plain(pointer)? };
/// # std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), warpipe::Error>(())
/// ```
#[derive(Debug)]
pub struct AllocationServer {
    inner: LeakOnFork<Inner>,
}

#[derive(Debug)]
struct Inner {
    server: IpcServer,
    shares: Arc<Shares>,
}

impl AllocationServer {
    /// Takes the name and serves it. An admitted user can open each share once, as this user can, and
    /// can end shares that no process has open.
    ///
    /// # Errors
    /// [`Error::Name`], [`Error::Driver`].
    pub fn new(name: &str, options: CreateOptions) -> Result<AllocationServer> {
        let name = EndpointName::new(name)?;
        let shares = Arc::new(Shares::new(chosen_device(&options.device))?);
        let access = AccessPolicy::of(options.allow_uids, options.allow_gids);
        let server = serve(
            &options.domain,
            &name,
            Kind::Allocations,
            access,
            shares.clone(),
        )?;
        Ok(AllocationServer {
            inner: LeakOnFork::new(Inner { server, shares }),
        })
    }

    /// The device of the memory that it shares.
    pub fn device(&self) -> &Device {
        self.inner.shares.device()
    }

    /// Shares `bytes` bytes at `ptr` and returns the number that another process opens once. The
    /// contents are complete behind the work of `stream` so far.
    ///
    /// `owner` is dropped, on a thread of this library or in a later call of this function, when the
    /// receiver has released the memory and its device is past it, also after the server's end; when
    /// the receiver is proven dead; of a share that is not open, when it is
    /// [withdrawn](Self::withdraw), or with the server. A receiver keeps released memory of a legacy
    /// handle open for some milliseconds more, for the next share of the same allocation.
    ///
    /// The memory may be of `cudaMalloc` (the receiver gets a legacy handle) or of the virtual
    /// memory functions (`cuMemMap`; the receiver gets descriptors, if the allocations were made
    /// with them, as PyTorch's expandable segments are). With [`Access::Read`], for which only the
    /// latter will do, a store faults in the receiver, enforced by the MMU.
    ///
    /// # Errors
    /// [`Error::Handle`] for other memory; [`Error::Argument`] for 0 bytes, for a stream of another
    /// device, for memory of `cudaMalloc` to be read alone, or beyond 65,535 shares;
    /// [`Error::State`], [`Error::Driver`].
    ///
    /// # Safety
    /// The memory stays allocated as long as `owner` lives.
    pub unsafe fn share(
        &self,
        stream: &Stream,
        ptr: DevicePtr,
        bytes: u64,
        access: Access,
        owner: Box<dyn Any + Send>,
    ) -> Result<u64> {
        let Inner { shares, .. } = self.inner.get()?;
        if bytes == 0 {
            return Err(Error::argument("bytes", bytes, "at least 1"));
        }
        stream.check_usable(shares.device())?;
        // Here and not by the reaper, beside which an owner of an interpreter would have to wait
        // for this thread's call. First: a drop that panics leaves no share without its number.
        shares.drop_released();
        // SAFETY: the caller's promise.
        unsafe { shares.share(stream, (ptr, bytes), access, owner) }
    }

    /// Takes back a share that no client has opened, and drops its owner. False if a client has
    /// opened it, or it was withdrawn.
    ///
    /// # Errors
    /// [`Error::State`].
    pub fn withdraw(&self, number: u64) -> Result<bool> {
        let Inner { shares, .. } = self.inner.get()?;
        Ok(shares.withdraw(number))
    }

    /// Whether a client has opened the share. False while it waits for one, or a client for its
    /// contents, which may give it back; `None` once it is over.
    ///
    /// # Errors
    /// [`Error::State`].
    pub fn is_opened(&self, number: u64) -> Result<Option<bool>> {
        Ok(self.inner.get()?.shares.is_opened(number))
    }

    #[cfg(test)]
    pub(super) fn shares(&self) -> &Shares {
        &self.inner.shares
    }

    /// Shares, clients and bytes now.
    pub fn stats(&self) -> AllocationStats {
        let shares = &self.inner.shares;
        shares.collect(self.inner.server.server_core().reactor());
        shares.stats()
    }
}

impl Drop for Inner {
    /// A client that has shares goes on with them: their owners stay until it has released them,
    /// or is proven dead.
    fn drop(&mut self) {
        // First: a client that was admitted later would have shares that are not looked at.
        self.server.close();
        let shares = self.shares.clone();
        let reactor = self.server.server_core().reactor();
        let reaper = reactor.clone();
        reactor.drop_after(move || match shares.has_ended(&reaper) {
            true => DropReadiness::Ready,
            false => DropReadiness::Held,
        });
    }
}
