//! The subscriber's side of the handshake beyond `Hello`: receives the parts of the link and maps
//! them.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use super::PublisherLink;
use super::regions::PublisherRegions;
use crate::device::Device;
use crate::error::{Error, HandshakeFault, Result};
use crate::ipc::client_handshake::{ClientHandshake, HandshakeLimit};
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::message::Message;
use crate::ipc::{Address, Kind};
use crate::pubsub::link_end::LinkEnd;
use crate::runtime::closer::{PeerFd, PeerSocket};
use crate::runtime::doorbell::{LocalDoorbell, PeerDoorbell};
use crate::runtime::reactor::Reactor;
use crate::shm::fence_words::FenceWords;
use crate::shm::segment::{OpenError, Segment};

/// The publisher's answers in the handshake.
pub(super) struct Welcome {
    pub(super) segment: Segment,
    /// The ring of the replies, of which this end is the sender.
    pub(super) replies: Option<Segment>,
    pub(super) lossless: bool,
    pub(super) regions: PublisherRegions,
    /// How many regions it announces before it waits for this end.
    pub(super) region_count: usize,
    /// Set by a publisher with a history.
    pub(super) completions: Option<FenceWords>,
    pub(super) source: [u8; 16],
}

/// Everything needed to attach to the publisher of a name.
#[derive(Debug, Clone)]
pub(in crate::pubsub) struct ConnectOptions {
    pub(in crate::pubsub) domain: Domain,
    pub(in crate::pubsub) name: EndpointName,
    pub(in crate::pubsub) device: Device,
    pub(in crate::pubsub) doorbell: Arc<LocalDoorbell>,
    pub(in crate::pubsub) timeout: Duration,
    pub(in crate::pubsub) orphan_timeout: Duration,
    /// The kind of endpoint that it expects under the name.
    pub(in crate::pubsub) kind: Kind,
    /// It sends replies, and its publisher expects them.
    pub(in crate::pubsub) has_replies: bool,
}

impl ConnectOptions {
    /// Connects, shakes hands and maps everything. An error leaves nothing behind on either side.
    pub(in crate::pubsub) fn attach(&self) -> Result<Arc<PublisherLink>> {
        let limit = HandshakeLimit::new(self.timeout);
        let socket = self.domain.connect(&self.name, self.kind, Some(&limit))?;
        self.shake_hands(socket, limit, &AtomicBool::new(false))
    }

    /// [`attach`](Self::attach) over a connected socket. Cancellation ends it early.
    pub(in crate::pubsub) fn shake_hands(
        &self,
        socket: PeerSocket,
        limit: HandshakeLimit,
        is_cancelled: &AtomicBool,
    ) -> Result<Arc<PublisherLink>> {
        let at = Address {
            domain: &self.domain,
            name: &self.name,
            kind: self.kind,
        };
        let handshake = LinkHandshake {
            client: ClientHandshake::new(&at, socket, limit)?,
            options: self,
            is_cancelled,
        };
        let device = self.device.info().id;
        handshake.client.hello(Some(device), &[])?;
        let (mut welcome, peer_doorbell) = handshake.welcome()?;
        if let Err(error) = handshake.settle(&mut welcome) {
            // Not on this thread: unregistering memory may make the driver wait for a stream that
            // waits for a peer.
            Reactor::of_process()?.defer_drop(Box::new(welcome));
            return Err(error);
        }
        let ClientHandshake { socket, peer, .. } = handshake.client;
        let end = LinkEnd::new(peer, peer_doorbell, Arc::new(socket));
        PublisherLink::assemble(welcome, end, &self.doorbell, None, self.orphan_timeout)
    }
}

/// The handshake with a publisher: receives the parts of the link and maps them.
struct LinkHandshake<'a> {
    client: ClientHandshake,
    options: &'a ConnectOptions,
    is_cancelled: &'a AtomicBool,
}

impl LinkHandshake<'_> {
    fn fault(&self, fault: HandshakeFault) -> Error {
        self.client.fault(fault)
    }

    fn receive(&self) -> Result<(Message, Vec<PeerFd>)> {
        self.client.wait(|| self.is_cancelled.load(SeqCst))
    }

    /// Maps the announced memory, and waits until the publisher confirms that samples go to this
    /// link from now on. Regions that it adds meanwhile are mapped, too: a subscriber that attaches
    /// before a send gets that sample.
    fn settle(&self, welcome: &mut Welcome) -> Result<()> {
        let mut is_attached = false;
        loop {
            if !is_attached && welcome.regions.open().len() >= welcome.region_count {
                self.client.send(&Message::Attached)?;
                is_attached = true;
            }
            let (message, mut fds) = self.receive()?;
            match message {
                Message::Attached if is_attached => return Ok(()),
                Message::Region { id, bytes } => welcome.regions.map(id, bytes, &fds)?,
                // No sample has come yet.
                Message::CloseRegion { id } => {
                    welcome.regions.take_out(id)?;
                    self.client.send(&Message::RegionClosed { id })?;
                }
                Message::Completions { bytes } if welcome.completions.is_none() => {
                    let fd = fds.pop().ok_or_else(|| {
                        let (found, wanted) = (0, 1);
                        self.fault(HandshakeFault::Descriptors { found, wanted })
                    })?;
                    welcome.completions = Some(FenceWords::read(fd, bytes, &self.client.name)?);
                }
                other => return Err(self.fault(other.unexpected("Region or Attached"))),
            }
        }
    }

    fn welcome(&self) -> Result<(Welcome, PeerDoorbell)> {
        let (message, mut fds) = self.receive()?;
        let Message::Welcome {
            generation,
            device: owner,
            depth,
            access,
            lossless,
            source,
            regions,
            replies,
        } = message
        else {
            return Err(self.fault(message.unexpected("Welcome")));
        };
        let device = &self.options.device;
        let reader = device.info().id;
        if owner.kind != reader.kind {
            let fault = HandshakeFault::Device {
                publisher: owner.to_string(),
                subscriber: reader.to_string(),
            };
            return Err(self.fault(fault));
        }
        self.client.adopt_lifeline(&mut fds)?;
        let Ok([memory, wake]) = <[PeerFd; 2]>::try_from(fds) else {
            let (found, wanted) = (0, 2);
            return Err(self.fault(HandshakeFault::Descriptors { found, wanted }));
        };
        if (replies > 0) != self.options.has_replies {
            let fault = HandshakeFault::Segment(format!("replies of a depth of {replies}"));
            return Err(self.fault(fault));
        }
        let opened = Segment::open(device, memory.as_fd(), depth, replies, generation);
        let (segment, replies) = opened.map_err(|error| match error {
            OpenError::Fault(fault) => self.fault(fault),
            OpenError::Local(error) => error,
        })?;
        memory.approve();
        let peer_doorbell = PeerDoorbell::adopt(wake).map_err(|fault| self.fault(fault))?;
        let welcome = Welcome {
            segment,
            replies,
            lossless,
            regions: PublisherRegions::new(&self.client.name, device, generation, owner, access),
            region_count: regions as usize,
            completions: None,
            source,
        };
        Ok((welcome, peer_doorbell))
    }
}
