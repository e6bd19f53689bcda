//! A fake publisher: its offer, and its part of a handshake.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use super::stage::{LONG, Scratch, hear, name, packet, send_raw};
use crate::backend::{Access, DeviceId, DeviceKind};
use crate::ipc::message::{Message, Received, wait_readable};
use crate::runtime::doorbell::PeerDoorbell;
use crate::shm::segment::Segment;
use crate::{Device, Subscriber, SubscriberOptions};

/// A fake publisher's offer, valid until a test changes one part.
pub(super) struct Offer {
    pub(super) generation: [u8; 16],
    pub(super) device: DeviceId,
    pub(super) depth: u32,
    pub(super) lossless: bool,
    pub(super) regions: u32,
    pub(super) replies: u32,
    pub(super) fds: Vec<OwnedFd>,
    /// Kept, so that this side can write the segment.
    pub(super) segment: Arc<Segment>,
    pub(super) wake: PeerDoorbell,
}

impl Offer {
    pub(super) fn new() -> Offer {
        let (generation, depth) = ([9; 16], 4);
        let (segment, segment_fd) = Segment::create(&Device::host(), depth, generation).unwrap();
        let (wake, their_wake) = PeerDoorbell::pair().unwrap();
        let device = DeviceId {
            kind: DeviceKind::Host,
            uuid: [0; 16],
        };
        let fds = vec![segment_fd.release(), their_wake.release()];
        Offer {
            generation,
            device,
            depth,
            lossless: true,
            regions: 0,
            replies: 0,
            fds,
            segment: Arc::new(segment),
            wake,
        }
    }

    pub(super) fn send(&self, socket: &OwnedFd) {
        let Offer {
            generation,
            device,
            depth,
            lossless,
            regions,
            replies,
            ..
        } = *self;
        let welcome = Message::Welcome {
            generation,
            device,
            depth,
            access: Access::Read,
            lossless,
            source: generation,
            regions,
            replies,
        };
        let fds: Vec<BorrowedFd<'_>> = self.fds.iter().map(AsFd::as_fd).collect();
        let _ = send_raw(socket, &packet(&welcome), &fds);
    }
}

/// Runs `script` as the publisher of `a` for one subscriber, and returns the subscriber's result.
pub(super) fn meet(
    scratch: &Scratch,
    timeout: Duration,
    script: impl FnOnce(&OwnedFd) + Send,
) -> crate::Result<Subscriber> {
    let claim = scratch.domain.claim(&name(), false).unwrap();
    std::thread::scope(|scope| {
        let publisher = scope.spawn(|| {
            assert!(wait_readable(claim.listener().as_fd(), LONG));
            let socket = rustix::net::accept(claim.listener()).unwrap();
            assert!(matches!(
                hear(&socket),
                Received::Message(Message::Hello { .. }, _)
            ));
            script(&socket);
            // Until the subscriber has decided, so that the end of the connection does not decide.
            socket
        });
        let options = SubscriberOptions {
            handshake_timeout: timeout,
            ..scratch.domain.on(&Device::host())
        };
        let result = Subscriber::open("a", options, Duration::ZERO);
        drop(publisher.join().unwrap());
        result
    })
}
