//! What the options of several endpoints have in common: the chosen domain and device, and the
//! options to create an endpoint, or to open one by its name.

use std::sync::Arc;

use crate::device::Device;
use crate::error::Result;
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::{
    AccessPolicy, Address, ClientSession, IncomingReply, IpcServer, Kind, REPLY_TIMEOUT,
    RequestHandler, until_open,
};
use crate::wait::Wait;

/// The most device memory of an endpoint, unless its options say another limit.
pub(crate) const MEMORY_LIMIT: u64 = 4 << 30;

/// The chosen domain, or the environment's.
///
/// # Errors
/// As [`Domain::from_environment`].
pub(crate) fn chosen_domain(chosen: &Option<Domain>) -> Result<Domain> {
    chosen.clone().map_or_else(Domain::from_environment, Ok)
}

/// The chosen device, or [`Device::preferred`].
pub(crate) fn chosen_device(chosen: &Option<Device>) -> Device {
    let preferred = || Device::preferred().device;
    chosen.clone().unwrap_or_else(preferred)
}

/// The chosen domain and device, or the defaults: see [`chosen_domain`], [`chosen_device`].
pub(crate) fn chosen_place(
    domain: &Option<Domain>,
    device: &Option<Device>,
) -> Result<(Domain, Device)> {
    Ok((chosen_domain(domain)?, chosen_device(device)))
}

/// Options with a domain: see [`Domain::options`].
pub trait DomainOptions: Default {
    #[doc(hidden)]
    fn domain_mut(&mut self) -> &mut Option<Domain>;
}

/// Options with a domain and a device: see [`Domain::on`].
pub trait DeviceOptions: DomainOptions {
    #[doc(hidden)]
    fn device_mut(&mut self) -> &mut Option<Device>;
}

/// Implements [`DomainOptions`] and, for options with a device, [`DeviceOptions`].
macro_rules! in_domain {
    ($options:ty $(, $device:ident)?) => {
        impl $crate::options::DomainOptions for $options {
            fn domain_mut(&mut self) -> &mut Option<$crate::ipc::domain::Domain> {
                &mut self.domain
            }
        }
        $(impl $crate::options::DeviceOptions for $options {
            fn device_mut(&mut self) -> &mut Option<$crate::device::Device> {
                &mut self.$device
            }
        })?
    };
}

pub(crate) use in_domain;

impl Domain {
    /// The default options of an endpoint, in this domain.
    pub fn options<O: DomainOptions>(&self) -> O {
        let mut options = O::default();
        *options.domain_mut() = Some(self.clone());
        options
    }

    /// The default options of an endpoint, in this domain and on this device.
    ///
    /// ```
    /// # use warpipe::{Device, Domain, Publisher, PublisherOptions};
    /// # let folder = std::env::temp_dir().join(format!("warpipe-on-{}", std::process::id()));
    /// # let (domain, device) = (Domain::at(&folder)?, Device::host());
    /// let left = Publisher::new("left", domain.on(&device))?;
    /// let options = PublisherOptions { depth: 2, ..domain.on(&device) };
    /// let right = Publisher::new("right", options)?;
    /// # drop((left, right)); std::fs::remove_dir_all(folder).ok();
    /// # Ok::<(), warpipe::Error>(())
    /// ```
    pub fn on<O: DeviceOptions>(&self, device: &Device) -> O {
        let mut options: O = self.options();
        *options.device_mut() = Some(device.clone());
        options
    }
}

/// Takes the name in the chosen domain and serves it.
pub(crate) fn serve(
    domain: &Option<Domain>,
    name: &EndpointName,
    kind: Kind,
    access: AccessPolicy,
    handler: Arc<dyn RequestHandler>,
) -> Result<IpcServer> {
    let at = Address {
        domain: &chosen_domain(domain)?,
        name,
        kind,
    };
    IpcServer::open(&at, access, handler)
}

/// The options with which a [`Timeline`](crate::Timeline), an [`Event`](crate::Event), a
/// [`Semaphore`](crate::Semaphore) or an [`AllocationServer`](crate::AllocationServer) is created.
#[derive(Debug, Clone, Default)]
pub struct CreateOptions {
    /// The domain in which other processes find it; the environment's by default.
    pub domain: Option<Domain>,
    /// The device of its streams and memory; [`Device::preferred`] by default.
    pub device: Option<Device>,
    /// Admits these users beside this process's own. The domain directory must admit them, too.
    /// The object's `new` says what an admitted user can do to it.
    pub allow_uids: Vec<u32>,
    /// Admits processes with one of these as their effective group. The kernel reports no
    /// supplementary groups of a peer, so those do not count.
    pub allow_gids: Vec<u32>,
}

in_domain!(CreateOptions, device);

/// The options with which an endpoint of another process, or of this one, is opened by its name.
///
/// Opening waits for the name to exist: [`Duration::ZERO`](std::time::Duration::ZERO) asks for what
/// is there. An owner that closes, or dies, before the object is open counts as none: the wait goes
/// on. A wait that is cancelled ends with the error of a name that is not there, or with `Timeout`
/// where its owner does not answer.
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    /// The domain to look in; the environment's by default, or an event handle's own.
    pub domain: Option<Domain>,
    /// The device to use it with; [`Device::preferred`] by default.
    pub device: Option<Device>,
}

in_domain!(OpenOptions, device);

/// A session with the owner of a name, and the owner's first reply.
pub(crate) struct Attachment<'w> {
    pub(crate) name: EndpointName,
    pub(crate) device: Device,
    pub(crate) session: ClientSession,
    pub(crate) reply: IncomingReply,
    /// For further answers of the owner.
    pub(crate) wait: Wait<'w>,
}

impl OpenOptions {
    /// Asks the owner of the name, which has to be of this kind, and has `open` make the object of
    /// its answer; both once more with the next owner, if this one ends meanwhile.
    pub(crate) fn open<'w, O>(
        &self,
        name: &str,
        kind: Kind,
        wait: impl Into<Wait<'w>>,
        open: impl Fn(Attachment<'w>) -> Result<O>,
    ) -> Result<O> {
        let (name, wait) = (EndpointName::new(name)?, &wait.into());
        let (domain, device) = chosen_place(&self.domain, &self.device)?;
        let at = Address {
            domain: &domain,
            name: &name,
            kind,
        };
        until_open(wait, || {
            let (session, reply) = ClientSession::attach(&at, Some(device.info().id), &[], wait)?;
            open(Attachment {
                name: name.clone(),
                device: device.clone(),
                session,
                reply,
                wait: wait.cancellable_within(REPLY_TIMEOUT),
            })
        })
    }
}
