//! The subscriber's side of the handshake beyond `Hello`: receives the parts of the link and maps
//! them.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::Shutdown;

use super::{PublisherLink, RingTerms};
use crate::device::Device;
use crate::error::{HandshakeFault, Result};
use crate::ipc::client_handshake::{ClientHandshake, HandshakeLimit};
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::message::Message;
use crate::ipc::{Address, Kind};
use crate::pubsub::link_end::LinkEnd;
use crate::runtime::closer::{PeerFd, PeerSocket};
use crate::runtime::doorbell::{LocalDoorbell, PeerDoorbell};
use crate::shm::page::SharedPage;
use crate::shm::segment::{OpenError, Segment};
use crate::wait::Wait;

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
    pub(in crate::pubsub) fn attach(&self, wait: &Wait<'_>) -> Result<Arc<PublisherLink>> {
        let limit = HandshakeLimit::new(self.timeout, wait);
        let socket = self.domain.connect(&self.name, self.kind, Some(&limit))?;
        self.shake_hands(socket, &limit)
    }

    /// [`attach`](Self::attach) over a connected socket.
    pub(in crate::pubsub) fn shake_hands(
        &self,
        socket: PeerSocket,
        limit: &HandshakeLimit<'_>,
    ) -> Result<Arc<PublisherLink>> {
        let at = Address {
            domain: &self.domain,
            name: &self.name,
            kind: self.kind,
        };
        let client = ClientHandshake::new(&at, socket)?;
        client.hello(Some(self.device.info().id), &[], limit)?;
        let (welcome, fds) = client.wait(limit)?;
        // On an error its memory is unregistered elsewhere: that may make the driver wait for a
        // stream that waits for a peer. The publisher sees the end at once.
        let (link, regions) = self.open(&client, welcome, fds)?;
        let settled = self.settle(&client, &link, regions, limit);
        settled.inspect_err(|_| _ = rustix::net::shutdown(&client.socket, Shutdown::Both))?;
        Ok(link)
    }

    /// Maps the announced memory, and waits until the publisher confirms that samples go to this
    /// link from now on. Regions that it adds meanwhile are mapped, too: a subscriber that attaches
    /// before a send gets that sample.
    fn settle(
        &self,
        client: &ClientHandshake,
        link: &PublisherLink,
        regions: u32,
        limit: &HandshakeLimit<'_>,
    ) -> Result<()> {
        let mut is_attached = false;
        loop {
            if !is_attached && link.regions().len() >= regions as usize {
                client.send(&Message::Attached)?;
                is_attached = true;
            }
            let (message, fds) = client.wait(limit)?;
            match message {
                Message::Attached if is_attached => return link.watch(self.orphan_timeout),
                Message::Region { id, bytes } => link.map(id, bytes, &fds)?,
                Message::CloseRegion { id } => link.close_region(id)?,
                Message::Completions { bytes } if !link.monitor.has_completions() => {
                    let [fd] = exactly(fds);
                    let words = SharedPage::read(fd, bytes as usize, &client.name)?;
                    link.monitor.set_completions(words);
                }
                other => return Err(client.fault(other.unexpected("Region or Attached"))),
            }
        }
    }

    /// Opens the parts of the link that come with the `Welcome`. Returns also how many regions the
    /// publisher announces before it waits for this end.
    fn open(
        &self,
        client: &ClientHandshake,
        welcome: Message,
        mut fds: Vec<PeerFd>,
    ) -> Result<(Arc<PublisherLink>, u32)> {
        let fault = |fault| client.fault(fault);
        let Message::Welcome {
            generation,
            device: sender_device,
            depth,
            lossless,
            source,
            regions,
            replies,
            ..
        } = welcome
        else {
            return Err(fault(welcome.unexpected("Welcome")));
        };
        let reader = self.device.info().id;
        if sender_device.kind != reader.kind {
            return Err(fault(HandshakeFault::Device {
                publisher: sender_device.to_string(),
                subscriber: reader.to_string(),
            }));
        }
        client.adopt_lifeline(&mut fds)?;
        let [memory, wake] = exactly(fds);
        if (replies > 0) != self.has_replies {
            let found = format!("replies of a depth of {replies}");
            return Err(fault(HandshakeFault::Segment(found)));
        }
        let opened = Segment::open(&self.device, memory.as_fd(), depth, replies, generation);
        let (segment, replies) = opened.map_err(|error| match error {
            OpenError::Fault(found) => fault(found),
            OpenError::Local(error) => error,
        })?;
        memory.approve();
        let wake = PeerDoorbell::adopt(wake).map_err(fault)?;
        let terms = RingTerms {
            name: client.name.clone(),
            device: self.device.clone(),
            sender_device,
            generation,
            source,
            lossless,
        };
        let end = LinkEnd::new(client.peer.clone(), wake, client.socket.clone());
        let link = PublisherLink::of_ring(terms, segment, replies, end, &self.doorbell, None)?;
        Ok((link, regions))
    }
}

/// A message's own descriptors: [`message::receive`](crate::ipc::message::receive) has checked
/// their number.
fn exactly<const N: usize>(fds: Vec<PeerFd>) -> [PeerFd; N] {
    fds.try_into().expect("as many as its kind of message has")
}
