//! The subscriber's side of the handshake: sends `Hello`, receives the parts of the link and maps
//! them.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use super::PublisherLink;
use crate::backend::{Access, DeviceId};
use crate::device::Device;
use crate::error::{Error, HandshakeFault, Result};
use crate::ipc::Kind;
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::message::{self, Message, Received};
use crate::ipc::peer::Peer;
use crate::memory::arena::REGIONS_MAX;
use crate::memory::region::Region;
use crate::runtime::closer::{PeerFd, PeerSocket};
use crate::runtime::doorbell::{LocalDoorbell, PeerDoorbell};
use crate::runtime::heartbeat::Uptime;
use crate::runtime::reactor::{Reactor, TICK};
use crate::shm::fence_words::FenceWords;
use crate::shm::segment::{OpenError, Segment};

/// The publisher's answers in the handshake.
pub(super) struct Welcome {
    pub(super) segment: Segment,
    pub(super) peer_doorbell: PeerDoorbell,
    pub(super) owner: DeviceId,
    pub(super) access: Access,
    pub(super) lossless: bool,
    pub(super) regions: u32,
    /// Set by a publisher with a history.
    pub(super) completions: Option<FenceWords>,
}

/// How a subscriber describes itself.
#[derive(Debug, Clone, Copy)]
pub(in crate::pubsub) struct SubscriberIdentity {
    /// The kind of endpoint that it expects under the name.
    pub(in crate::pubsub) kind: Kind,
    pub(in crate::pubsub) generation: [u8; 16],
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
        let socket = self.domain.connect(&self.name, self.timeout)?;
        self.shake_hands(socket, &AtomicBool::new(false))
    }

    /// [`attach`](Self::attach) over a connected socket. Cancellation ends it early.
    pub(in crate::pubsub) fn shake_hands(
        &self,
        socket: PeerSocket,
        is_cancelled: &AtomicBool,
    ) -> Result<Arc<PublisherLink>> {
        let reactor = Reactor::of_process()?;
        let peer = Peer::of(socket.as_fd(), self.name.as_str())?;
        if peer.uid != self.domain.owner() {
            let detail = format!(
                "uid {} listens in a domain of uid {}",
                peer.uid,
                self.domain.owner()
            );
            return Err(Error::AccessDenied {
                name: self.name.to_string(),
                detail,
            });
        }
        let SubscriberIdentity { kind, generation } = self.identity;
        let (name, device, timeout) = (&self.name, &self.device, self.timeout);
        let clock = Uptime::default();
        let handshake = Handshake {
            socket: &socket,
            name: name.as_str(),
            kind,
            clock,
            timeout,
            is_cancelled,
        };
        handshake.hello(&Message::Hello {
            generation,
            device: device.info().id,
            kind,
        })?;
        let mut welcome = handshake.welcome(device, &peer)?;
        match handshake.settle(device, &mut welcome) {
            Ok(regions) => {
                let orphan_timeout = self.orphan_timeout;
                PublisherLink::assemble(
                    welcome,
                    regions,
                    name,
                    device,
                    &self.doorbell,
                    socket,
                    peer,
                    reactor,
                    orphan_timeout,
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

/// The handshake, with a deadline.
struct Handshake<'a> {
    socket: &'a PeerSocket,
    name: &'a str,
    kind: Kind,
    clock: Uptime,
    timeout: Duration,
    is_cancelled: &'a AtomicBool,
}

impl Handshake<'_> {
    pub(super) fn fault(&self, fault: HandshakeFault) -> Error {
        Error::Handshake {
            name: self.name.to_string(),
            fault,
        }
    }

    /// The remaining time, counted while this process runs.
    fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.clock.ran())
    }

    pub(super) fn hello(&self, message: &Message) -> Result<()> {
        let said = message::send_first(self.socket.as_fd(), message, self.left());
        said.map_err(|error| {
            Error::os(
                "sendmsg",
                format!("the handshake with {:?}", self.name),
                error,
            )
        })
    }

    fn say(&self, message: &Message) -> Result<()> {
        message::send(self.socket.as_fd(), message, &[]).or_else(|error| match error {
            // A message that explains the refusal may be waiting to be read.
            rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET => Ok(()),
            other => Err(Error::os(
                "sendmsg",
                format!("the handshake with {:?}", self.name),
                other,
            )),
        })
    }

    pub(super) fn receive(&self) -> Result<(Message, Vec<PeerFd>)> {
        loop {
            match message::receive(self.socket.as_fd(), self.name)? {
                Received::Message(Message::Refused { denied: true, text }, _) => {
                    return Err(Error::AccessDenied {
                        name: self.name.to_string(),
                        detail: text,
                    });
                }
                Received::Message(Message::OtherKind { found }, _) => {
                    let (name, found) = (self.name.to_string(), found.to_string());
                    return Err(Error::OtherKind {
                        name,
                        wanted: self.kind,
                        found,
                    });
                }
                Received::Message(Message::Full { limit, max }, _) => {
                    return Err(self.fault(HandshakeFault::Full { limit, max }));
                }
                Received::Message(Message::Refused { text, .. }, _) => {
                    return Err(self.fault(HandshakeFault::Refused(text)));
                }
                Received::Message(Message::Close(_), _) | Received::End => {
                    return Err(self.fault(HandshakeFault::Closed));
                }
                Received::Message(message, fds) => return Ok((message, fds)),
                Received::Nothing => {
                    let left = self.left();
                    if left.is_zero() {
                        return Err(self.fault(HandshakeFault::Silent(self.timeout)));
                    }
                    if self.is_cancelled.load(SeqCst) {
                        return Err(self.fault(HandshakeFault::Closed));
                    }
                    message::wait_readable(self.socket.as_fd(), left.min(TICK));
                }
            }
        }
    }

    /// Maps the announced memory and waits until samples are sent to this link.
    pub(super) fn settle(
        &self,
        device: &Device,
        welcome: &mut Welcome,
    ) -> Result<Vec<Arc<Region>>> {
        let mut regions = self.regions(device, welcome)?;
        self.say(&Message::Attached)?;
        self.admission(device, welcome, &mut regions)?;
        Ok(regions)
    }

    pub(super) fn welcome(&self, device: &Device, peer: &Peer) -> Result<Welcome> {
        let (message, mut fds) = self.receive()?;
        let Message::Welcome {
            generation,
            device: owner,
            depth,
            access,
            lossless,
            regions,
        } = message
        else {
            return Err(self.fault(message.unexpected("Welcome")));
        };
        let reader = device.info().id;
        if owner.kind != reader.kind {
            let fault = HandshakeFault::Device {
                publisher: owner.to_string(),
                subscriber: reader.to_string(),
            };
            return Err(self.fault(fault));
        }
        let lifeline = message::take_lifeline(&mut fds).map_err(|fault| self.fault(fault))?;
        peer.adopt(lifeline).map_err(|fault| self.fault(fault))?;
        let Ok([memory, peer_doorbell]) = <[PeerFd; 2]>::try_from(fds) else {
            return Err(self.fault(HandshakeFault::Descriptors {
                found: 0,
                wanted: 2,
            }));
        };
        let segment = Segment::open(device, memory.as_fd(), depth, generation).map_err(
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
            peer_doorbell,
            owner,
            access,
            lossless,
            regions,
            completions: None,
        })
    }

    pub(super) fn regions(
        &self,
        device: &Device,
        welcome: &mut Welcome,
    ) -> Result<Vec<Arc<Region>>> {
        let mut regions = Vec::new();
        while regions.len() < welcome.regions as usize {
            let (message, fds) = self.receive()?;
            self.map(device, welcome, &mut regions, message, fds, "Region")?;
        }
        Ok(regions)
    }

    /// Waits until the publisher confirms that samples go to this link from now on, and maps the
    /// regions that it adds meanwhile: a subscriber that attaches before a send gets that sample.
    pub(super) fn admission(
        &self,
        device: &Device,
        welcome: &mut Welcome,
        regions: &mut Vec<Arc<Region>>,
    ) -> Result<()> {
        loop {
            match self.receive()? {
                (Message::Attached, _) => return Ok(()),
                (message, fds) => self.map(device, welcome, regions, message, fds, "Attached")?,
            }
        }
    }

    /// Maps the memory of a message: a region, or the words of the history.
    fn map(
        &self,
        device: &Device,
        welcome: &mut Welcome,
        regions: &mut Vec<Arc<Region>>,
        message: Message,
        mut fds: Vec<PeerFd>,
        wanted: &'static str,
    ) -> Result<()> {
        match message {
            Message::Region { id, bytes } => {
                let (access, owner) = (welcome.access, welcome.owner);
                regions.push(import(
                    device,
                    (id, bytes),
                    regions.len(),
                    &fds,
                    access,
                    owner,
                    self.name,
                )?);
            }
            Message::Completions { bytes } if welcome.completions.is_none() => {
                let Some(fd) = fds.pop() else {
                    return Err(self.fault(HandshakeFault::Descriptors {
                        found: 0,
                        wanted: 1,
                    }));
                };
                welcome.completions = Some(FenceWords::read(fd, bytes, self.name)?);
            }
            other => return Err(self.fault(other.unexpected(wanted))),
        }
        Ok(())
    }
}

/// Maps one announced region, the `due`th of its link.
pub(super) fn import(
    device: &Device,
    (id, bytes): (u32, u64),
    due: usize,
    fds: &[PeerFd],
    access: Access,
    owner: DeviceId,
    name: &str,
) -> Result<Arc<Region>> {
    let wrong = |field, found: String, allowed: String| Error::Protocol {
        name: name.to_string(),
        field,
        found,
        allowed,
    };
    if id as usize != due || due >= REGIONS_MAX {
        return Err(wrong(
            "region number",
            id.to_string(),
            format!("{due}, below {REGIONS_MAX}"),
        ));
    }
    let unit = device.backend().granularity();
    if bytes == 0 || !bytes.is_multiple_of(unit) || bytes > i64::MAX as u64 {
        return Err(wrong(
            "region length",
            format!("{bytes} bytes"),
            format!("a multiple of {unit}"),
        ));
    }
    let [fd] = fds else {
        return Err(wrong("descriptors", fds.len().to_string(), "1".into()));
    };
    let region = Region::import(device, fd.as_fd(), bytes, access, owner)?;
    fd.approve();
    Ok(Arc::new(region))
}
