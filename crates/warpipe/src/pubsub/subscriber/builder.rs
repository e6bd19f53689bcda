//! The builder of a subscriber.

use std::time::Duration;

use super::Subscriber;
use crate::device::Device;
use crate::error::Result;
use crate::ipc::Kind;
use crate::ipc::domain::{Domain, EndpointName};
use crate::options::{EndpointOptions, option_setters};
use crate::wait::Wait;

/// The options of a subscriber. See [`Subscriber::builder`].
#[derive(Debug, Clone)]
pub struct SubscriberBuilder {
    pub(super) name: String,
    pub(super) shared: EndpointOptions,
    pub(super) reconnect: bool,
    pub(super) kind: Kind,
    pub(super) orphan_timeout: Duration,
    pub(super) has_replies: bool,
}

impl SubscriberBuilder {
    option_setters! { (shared):
        shared,
        /// The domain to look in; the environment's by default.
        domain,
        /// The device to read with; [`Device::preferred`] by default. Another GPU than the
        /// publisher's reads over NVLink or PCIe, if it can.
        device,
        spin,
        /// How long a publisher may take to answer: 5 s by default.
        handshake_timeout,
    }

    /// Follow the next incarnation when the publisher goes, and attach again when this end has
    /// closed its link; off by default. The first sample of the next link carries a
    /// [`Discontinuity`](crate::Discontinuity), which says whether that is another publisher's. A
    /// sample that the publisher has in its history and that was received before the link ended is
    /// not received again. The handshake runs on a thread of its own: a stopped publisher delays no
    /// receive beyond its wait.
    pub fn reconnect(mut self, reconnect: bool) -> Self {
        self.reconnect = reconnect;
        self
    }

    /// How long a publisher that has exited may leave streams waiting while a child that it forked
    /// keeps its device work running: 30 s by default. After that they are rescued and their
    /// samples are lost. The memory of such a publisher is not used again before that work is
    /// proven to be over.
    pub fn orphan_timeout(mut self, timeout: Duration) -> Self {
        self.orphan_timeout = timeout;
        self
    }

    /// The kind of endpoint that is expected under the name.
    pub(crate) fn kind(mut self, kind: Kind) -> Self {
        self.kind = kind;
        self
    }

    /// It sends replies, to a publisher that expects them.
    pub(crate) fn with_replies(mut self) -> Self {
        self.has_replies = true;
        self
    }

    /// Finds the publisher and attaches.
    ///
    /// # Errors
    /// [`NotFound`](crate::Error::NotFound), [`OtherKind`](crate::Error::OtherKind),
    /// [`Handshake`](crate::Error::Handshake), [`Refused`](crate::Error::Refused),
    /// [`Device`](crate::Error::Device), [`Os`](crate::Error::Os), or an error of the driver. On an
    /// error nothing is left behind.
    pub fn build(self) -> Result<Subscriber> {
        self.wait_for_publisher(Duration::ZERO)
    }

    /// Waits for a publisher of the name, and attaches.
    ///
    /// # Errors
    /// As [`build`](Self::build); [`Timeout`](crate::Error::Timeout) when the wait is cancelled
    /// while a publisher does not answer.
    pub fn wait_for_publisher<'w>(self, wait: impl Into<Wait<'w>>) -> Result<Subscriber> {
        let name = EndpointName::new(&self.name)?;
        let domain = self.shared.domain()?;
        let device = self.shared.device();
        Subscriber::new(self, name, domain, device, &wait.into())
    }
}
