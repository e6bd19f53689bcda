//! The options that several builders share, and their setters.
//!
//! A builder keeps an [`EndpointOptions`] in a field, and [`option_setters!`] writes the setters it
//! has of them: as methods of its own, so that its documentation shows each one and no trait has to
//! be imported. A builder that makes another endpoint passes the whole on ([`QueueBuilder`] to its
//! publisher, [`ServerBuilder`] to its workers).
//!
//! [`QueueBuilder`]: crate::QueueBuilder
//! [`ServerBuilder`]: crate::ServerBuilder

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use crate::device::Device;
use crate::error::Result;
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::{
    AccessPolicy, Address, ClientSession, HANDSHAKE_TIMEOUT, IncomingReply, IpcServer, Kind,
    REPLY_TIMEOUT, RequestHandler, until_open,
};
use crate::runtime::spin::SPIN;
use crate::wait::Wait;

/// The options that an endpoint is made or opened with. Each kind of endpoint has setters for the
/// options that it has; the others keep their defaults, and it does not read them.
#[derive(Debug, Clone)]
pub(crate) struct EndpointOptions {
    domain: Option<Domain>,
    device: Option<Device>,
    pub(crate) memory_limit: u64,
    pub(crate) spin: Duration,
    pub(crate) handshake_timeout: Duration,
    pub(crate) access: AccessPolicy,
}

impl Default for EndpointOptions {
    fn default() -> EndpointOptions {
        EndpointOptions {
            domain: None,
            device: None,
            memory_limit: 4 << 30,
            spin: SPIN,
            handshake_timeout: HANDSHAKE_TIMEOUT,
            access: AccessPolicy::default(),
        }
    }
}

impl EndpointOptions {
    /// The chosen domain, or the environment's.
    ///
    /// # Errors
    /// As [`Domain::from_environment`].
    pub(crate) fn domain(&self) -> Result<Domain> {
        self.domain
            .clone()
            .map_or_else(Domain::from_environment, Ok)
    }

    /// The chosen device, or [`Device::preferred`].
    pub(crate) fn device(&self) -> Device {
        let preferred = || Device::preferred().device;
        self.device.clone().unwrap_or_else(preferred)
    }

    /// Takes the name in the chosen domain and serves it.
    pub(crate) fn serve(
        self,
        name: &EndpointName,
        kind: Kind,
        handler: Arc<dyn RequestHandler>,
    ) -> Result<IpcServer> {
        let at = Address {
            domain: &self.domain()?,
            name,
            kind,
        };
        IpcServer::open(&at, self.access, handler)
    }

    pub(crate) fn set_domain(&mut self, domain: &Domain) {
        self.domain = Some(domain.clone());
    }

    pub(crate) fn set_device(&mut self, device: &Device) {
        self.device = Some(device.clone());
    }

    /// The same options in this domain and on this device.
    pub(crate) fn at(mut self, domain: &Domain, device: &Device) -> EndpointOptions {
        self.set_domain(domain);
        self.set_device(device);
        self
    }
}

/// Setters of shared options, as methods of the builder that has the `impl`. The first
/// argument is the path of the builder's [`EndpointOptions`]; a setter's documentation stands
/// before its name, and may be left out for `domain`, `spin`, `allow_uids` and `allow_gids`.
macro_rules! option_setters {
    ($path:tt: $($(#[$doc:meta])* $setter:ident),+ $(,)?) => {
        $(option_setters! { @$setter $path $(#[$doc])* })+
    };

    (@shared ($($path:ident).+)) => {
        /// All shared options, as the builder of another endpoint has been given them.
        pub(crate) fn shared(mut self, shared: &EndpointOptions) -> Self {
            self.$($path).+ = shared.clone();
            self
        }
    };
    (@domain $path:tt) => {
        option_setters! { @domain $path
            /// The domain of its name; the environment's by default.
        }
    };
    (@domain ($($path:ident).+) $(#[$doc:meta])+) => {
        $(#[$doc])+
        pub fn domain(mut self, domain: &Domain) -> Self {
            self.$($path).+.set_domain(domain);
            self
        }
    };
    (@device ($($path:ident).+) $(#[$doc:meta])+) => {
        $(#[$doc])+
        pub fn device(mut self, device: &Device) -> Self {
            self.$($path).+.set_device(device);
            self
        }
    };
    (@memory_limit ($($path:ident).+) $(#[$doc:meta])+) => {
        $(#[$doc])+
        pub fn memory_limit(mut self, bytes: u64) -> Self {
            self.$($path).+.memory_limit = bytes;
            self
        }
    };
    (@handshake_timeout ($($path:ident).+) $(#[$doc:meta])+) => {
        $(#[$doc])+
        pub fn handshake_timeout(mut self, timeout: Duration) -> Self {
            self.$($path).+.handshake_timeout = timeout;
            self
        }
    };
    (@spin ($($path:ident).+)) => {
        /// How long a wait polls before it sleeps: 20 µs by default. A polling wait saves the
        /// latency of a wake-up and costs CPU time, but gives its CPU away to threads that are
        /// ready to run; a sleeping wait costs none.
        pub fn spin(mut self, spin: Duration) -> Self {
            self.$($path).+.spin = spin;
            self
        }
    };
    (@allow_uids $path:tt) => {
        option_setters! { @allow_uids $path
            /// Admits these users beside this process's own. The domain directory must admit them,
            /// too.
        }
    };
    (@allow_uids ($($path:ident).+) $(#[$doc:meta])+) => {
        $(#[$doc])+
        pub fn allow_uids(mut self, uids: &[u32]) -> Self {
            self.$($path).+.access.uids.extend(uids);
            self
        }
    };
    (@allow_gids ($($path:ident).+)) => {
        /// Admits processes with one of these as their effective group. The kernel reports no
        /// supplementary groups of a peer, so those do not count.
        pub fn allow_gids(mut self, gids: &[u32]) -> Self {
            self.$($path).+.access.gids.extend(gids);
            self
        }
    };
}
pub(crate) use option_setters;

/// The options with which an endpoint of another process, or of this one, is opened by its name:
/// from [`Timeline::opener`](crate::Timeline::opener),
/// [`Semaphore::opener`](crate::Semaphore::opener),
/// [`PoolClient::opener`](crate::PoolClient::opener),
/// [`KernelRing::opener`](crate::KernelRing::opener) and
/// [`SharedWeights::opener`](crate::weights::SharedWeights::opener).
///
/// Opening waits for the name to exist: [`Duration::ZERO`] asks for what is there. An owner that
/// closes, or dies, before the object is open counts as none: the wait goes on. A wait that is
/// cancelled ends with the error of a name that is not there, or with `Timeout` where its owner
/// does not answer.
#[derive(Debug, Clone)]
pub struct Opener<T> {
    name: String,
    shared: EndpointOptions,
    opens: PhantomData<fn() -> T>,
}

/// A session with the owner of a name, and the owner's first reply.
pub(crate) struct Attachment<'w> {
    pub(crate) name: EndpointName,
    pub(crate) device: Device,
    pub(crate) session: ClientSession,
    pub(crate) reply: IncomingReply,
    /// For further answers of the owner.
    pub(crate) wait: Wait<'w>,
}

impl<T> Opener<T> {
    pub(crate) fn new(name: &str) -> Opener<T> {
        Opener {
            name: name.to_string(),
            shared: EndpointOptions::default(),
            opens: PhantomData,
        }
    }

    option_setters! { (shared):
        /// The domain to look in; the environment's by default.
        domain,
        /// The device to use it with; [`Device::preferred`] by default.
        device,
    }

    /// The chosen domain.
    pub(crate) fn chosen_domain(&self) -> Result<Domain> {
        self.shared.domain()
    }

    /// The chosen device.
    pub(crate) fn chosen_device(&self) -> Device {
        self.shared.device()
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Asks the owner of the name, which has to be of this kind, and has `open` make the object of
    /// its answer; both once more with the next owner, if this one ends meanwhile.
    pub(crate) fn open_with<'w, O>(
        &self,
        kind: Kind,
        hello: &[u8],
        wait: &Wait<'w>,
        open: impl Fn(Attachment<'w>) -> Result<O>,
    ) -> Result<O> {
        let name = EndpointName::new(&self.name)?;
        let (domain, device) = (self.shared.domain()?, self.shared.device());
        let at = Address {
            domain: &domain,
            name: &name,
            kind,
        };
        until_open(wait, || {
            let (session, reply) = ClientSession::attach(&at, Some(device.info().id), hello, wait)?;
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
