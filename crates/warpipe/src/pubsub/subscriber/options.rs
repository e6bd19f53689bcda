//! The options of a subscriber.

use std::time::Duration;

use crate::device::Device;
use crate::ipc::HANDSHAKE_TIMEOUT;
use crate::ipc::domain::Domain;
use crate::ipc::peer::ORPHAN_TIMEOUT;
use crate::options::in_domain;
use crate::runtime::spin::SPIN;

/// The options of a [`Subscriber`](crate::Subscriber).
#[derive(Debug, Clone)]
pub struct SubscriberOptions {
    /// The domain to look in; the environment's by default.
    pub domain: Option<Domain>,
    /// The device to read with; [`Device::preferred`] by default. Another GPU than the publisher's
    /// reads over NVLink or PCIe, if it can.
    pub device: Option<Device>,
    /// Follow the next incarnation when the publisher goes, and attach again when this end has
    /// closed its link; off by default. The first sample of the next link carries a
    /// [`Discontinuity`](crate::Discontinuity), which says whether that is another publisher's. A
    /// sample that the publisher has in its history and that was received before the link ended is
    /// not received again. The handshake runs on a thread of its own: a stopped publisher delays no
    /// receive beyond its wait.
    pub reconnect: bool,
    /// How long a wait polls before it sleeps: 20 µs by default. A polling wait saves the latency
    /// of a wake-up and costs CPU time, but gives its CPU away to threads that are ready to run; a
    /// sleeping wait costs none.
    pub spin: Duration,
    /// How long a publisher may take to answer: 5 s by default.
    pub handshake_timeout: Duration,
    /// How long a publisher that has exited may leave streams waiting while a child that it forked
    /// keeps its device work running: 30 s by default. After that they are rescued and their
    /// samples are lost. The memory of such a publisher is not used again before that work is
    /// proven to be over.
    pub orphan_timeout: Duration,
}

in_domain!(SubscriberOptions, device);

impl Default for SubscriberOptions {
    fn default() -> SubscriberOptions {
        SubscriberOptions {
            domain: None,
            device: None,
            reconnect: false,
            spin: SPIN,
            handshake_timeout: HANDSHAKE_TIMEOUT,
            orphan_timeout: ORPHAN_TIMEOUT,
        }
    }
}
