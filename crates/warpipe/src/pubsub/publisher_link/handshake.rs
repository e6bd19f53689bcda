//! The subscriber's side of the handshake beyond `Hello`: receives the parts of the link and maps
//! them.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use super::{PublisherLink, ReceiverEnd, RingKind};
use crate::backend::{Access, DeviceId};
use crate::device::Device;
use crate::error::{Error, HandshakeFault, Result};
use crate::ipc::client_handshake::{ClientHandshake, HandshakeLimit};
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::message::Message;
use crate::ipc::{Address, Kind};
use crate::memory::arena::REGIONS_MAX;
use crate::memory::region::Region;
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
    pub(super) peer_doorbell: Arc<PeerDoorbell>,
    pub(super) owner: DeviceId,
    pub(super) access: Access,
    pub(super) lossless: bool,
    pub(super) regions: u32,
    /// Set by a publisher with a history.
    pub(super) completions: Option<FenceWords>,
    pub(super) generation: [u8; 16],
    pub(super) source: [u8; 16],
}

/// How a subscriber describes itself.
#[derive(Debug, Clone, Copy)]
pub(in crate::pubsub) struct SubscriberIdentity {
    /// The kind of endpoint that it expects under the name.
    pub(in crate::pubsub) kind: Kind,
    /// It sends replies, and its publisher expects them.
    pub(in crate::pubsub) has_replies: bool,
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
    pub(in crate::pubsub) identity: SubscriberIdentity,
}

impl ConnectOptions {
    /// Connects, shakes hands and maps everything. An error leaves nothing behind on either side.
    pub(in crate::pubsub) fn attach(&self) -> Result<Arc<PublisherLink>> {
        let limit = HandshakeLimit::new(self.timeout);
        let kind = self.identity.kind;
        let socket = self.domain.connect(&self.name, kind, Some(&limit))?;
        self.shake_hands(socket, limit, &AtomicBool::new(false))
    }

    /// [`attach`](Self::attach) over a connected socket. Cancellation ends it early.
    pub(in crate::pubsub) fn shake_hands(
        &self,
        socket: PeerSocket,
        limit: HandshakeLimit,
        is_cancelled: &AtomicBool,
    ) -> Result<Arc<PublisherLink>> {
        let reactor = Reactor::of_process()?;
        let SubscriberIdentity { kind, has_replies } = self.identity;
        let at = Address {
            domain: &self.domain,
            name: &self.name,
            kind,
        };
        let handshake = LinkHandshake {
            client: ClientHandshake::new(&at, socket, limit)?,
            device: &self.device,
            has_replies,
            is_cancelled,
        };
        let device = Some(self.device.info().id);
        handshake.client.hello(device, &[])?;
        let mut welcome = handshake.welcome()?;
        match handshake.settle(&mut welcome) {
            Ok(regions) => {
                let ClientHandshake { socket, peer, .. } = handshake.client;
                PublisherLink::assemble(
                    welcome,
                    regions,
                    ReceiverEnd {
                        name: self.name.as_str(),
                        device: &self.device,
                        doorbell: &self.doorbell,
                        socket: Arc::new(socket),
                        peer: Arc::new(peer),
                        orphan_timeout: self.orphan_timeout,
                    },
                    match has_replies {
                        true => RingKind::Samples,
                        false => RingKind::Single,
                    },
                    reactor,
                )
            }
            Err(error) => {
                // Not on this thread: unregistering memory may make the driver wait for a stream
                // that waits for a peer.
                reactor.defer_drop(Box::new(welcome));
                Err(error)
            }
        }
    }
}

/// The handshake with a publisher: receives the parts of the link and maps them.
struct LinkHandshake<'a> {
    client: ClientHandshake,
    device: &'a Device,
    has_replies: bool,
    is_cancelled: &'a AtomicBool,
}

impl LinkHandshake<'_> {
    fn fault(&self, fault: HandshakeFault) -> Error {
        self.client.fault(fault)
    }

    fn receive(&self) -> Result<(Message, Vec<PeerFd>)> {
        self.client.wait(|| self.is_cancelled.load(SeqCst))
    }

    /// Maps the announced memory and waits until samples are sent to this link.
    fn settle(&self, welcome: &mut Welcome) -> Result<Vec<OpenRegion>> {
        let mut regions = self.regions(welcome)?;
        self.client.send(&Message::Attached)?;
        self.admission(welcome, &mut regions)?;
        Ok(regions)
    }

    fn welcome(&self) -> Result<Welcome> {
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
        let reader = self.device.info().id;
        if owner.kind != reader.kind {
            let fault = HandshakeFault::Device {
                publisher: owner.to_string(),
                subscriber: reader.to_string(),
            };
            return Err(self.fault(fault));
        }
        self.client.adopt_lifeline(&mut fds)?;
        let Ok([memory, peer_doorbell]) = <[PeerFd; 2]>::try_from(fds) else {
            return Err(self.fault(HandshakeFault::Descriptors {
                found: 0,
                wanted: 2,
            }));
        };
        if (replies > 0) != self.has_replies {
            let fault = HandshakeFault::Segment(format!("replies of a depth of {replies}"));
            return Err(self.fault(fault));
        }
        let (device, file) = (self.device, memory.as_fd());
        let (segment, replies) = Segment::open(device, file, depth, replies, generation).map_err(
            |error| match error {
                OpenError::Fault(fault) => self.fault(fault),
                OpenError::Local(error) => error,
            },
        )?;
        memory.approve();
        let peer_doorbell =
            PeerDoorbell::adopt(peer_doorbell).map_err(|fault| self.fault(fault))?;
        Ok(Welcome {
            segment,
            replies,
            peer_doorbell: Arc::new(peer_doorbell),
            owner,
            access,
            lossless,
            regions,
            completions: None,
            generation,
            source,
        })
    }

    fn regions(&self, welcome: &mut Welcome) -> Result<Vec<OpenRegion>> {
        let mut regions = Vec::new();
        while regions.len() < welcome.regions as usize {
            let (message, fds) = self.receive()?;
            self.map(welcome, &mut regions, message, fds, "Region")?;
        }
        Ok(regions)
    }

    /// Waits until the publisher confirms that samples go to this link from now on, and maps the
    /// regions that it adds meanwhile: a subscriber that attaches before a send gets that sample.
    fn admission(&self, welcome: &mut Welcome, regions: &mut Vec<OpenRegion>) -> Result<()> {
        loop {
            match self.receive()? {
                (Message::Attached, _) => return Ok(()),
                (message, fds) => self.map(welcome, regions, message, fds, "Attached")?,
            }
        }
    }

    /// Maps the memory of a message: a region, or the words of the history.
    fn map(
        &self,
        welcome: &mut Welcome,
        regions: &mut Vec<OpenRegion>,
        message: Message,
        mut fds: Vec<PeerFd>,
        wanted: &'static str,
    ) -> Result<()> {
        match message {
            Message::Region { id, bytes } => {
                let (access, owner) = (welcome.access, welcome.owner);
                let name = &self.client.name;
                check_id(id, regions, 0, name)?;
                let region = import(self.device, bytes, &fds, access, owner, name)?;
                regions.push(OpenRegion { id, region });
            }
            // No sample has come yet.
            Message::CloseRegion { id } => {
                take_out(id, regions, &self.client.name)?;
                self.client.send(&Message::RegionClosed { id })?;
            }
            Message::Completions { bytes } if welcome.completions.is_none() => {
                let Some(fd) = fds.pop() else {
                    return Err(self.fault(HandshakeFault::Descriptors {
                        found: 0,
                        wanted: 1,
                    }));
                };
                welcome.completions = Some(FenceWords::read(fd, bytes, &self.client.name)?);
            }
            other => return Err(self.fault(other.unexpected(wanted))),
        }
        Ok(())
    }
}

/// The most regions of a link that are mapped. Threads that grow at the same time may pass the
/// publisher's own limit, and it may see that a region is closed before this end counts it so.
pub(super) const OPEN_MAX: usize = 2 * REGIONS_MAX;

/// A region of the publisher's that is mapped here.
#[derive(Debug)]
pub(in crate::pubsub) struct OpenRegion {
    pub(in crate::pubsub) id: u32,
    pub(in crate::pubsub) region: Arc<Region>,
}

pub(super) fn wrong(name: &str, field: &'static str, found: String, allowed: String) -> Error {
    Error::Protocol {
        name: name.to_string(),
        field,
        found,
        allowed,
    }
}

/// Whether a publisher with these open regions, and so many that are being closed, may announce
/// one with this id.
pub(super) fn check_id(id: u32, open: &[OpenRegion], closing: usize, name: &str) -> Result<()> {
    let last = open.last().map(|last| last.id);
    let count = open.len() + closing;
    if last >= Some(id) || count >= OPEN_MAX {
        let found = format!("{id} behind {last:?}, beside {count} others");
        let allowed = format!("a larger one, beside fewer than {OPEN_MAX}");
        return Err(wrong(name, "region number", found, allowed));
    }
    Ok(())
}

/// Takes out a region that its publisher closes.
pub(super) fn take_out(id: u32, open: &mut Vec<OpenRegion>, name: &str) -> Result<Arc<Region>> {
    match open.binary_search_by_key(&id, |region| region.id) {
        Ok(index) => Ok(open.remove(index).region),
        Err(_) => {
            let allowed = "one that is open".to_string();
            Err(wrong(name, "region number", id.to_string(), allowed))
        }
    }
}

/// Maps one announced region.
pub(super) fn import(
    device: &Device,
    bytes: u64,
    fds: &[PeerFd],
    access: Access,
    owner: DeviceId,
    name: &str,
) -> Result<Arc<Region>> {
    let unit = device.backend().granularity();
    if bytes == 0 || !bytes.is_multiple_of(unit) || bytes > i64::MAX as u64 {
        let allowed = format!("a multiple of {unit}");
        return Err(wrong(
            name,
            "region length",
            format!("{bytes} bytes"),
            allowed,
        ));
    }
    let [fd] = fds else {
        let found = fds.len().to_string();
        return Err(wrong(name, "descriptors", found, "1".into()));
    };
    let region = Region::import(device, fd.as_fd(), bytes, access, owner)?;
    fd.approve();
    Ok(Arc::new(region))
}
