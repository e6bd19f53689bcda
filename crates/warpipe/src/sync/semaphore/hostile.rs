//! Creators that break the protocol.

use std::os::fd::OwnedFd;

use rustix::fs::MemfdFlags;
use serde::Serialize;

use super::member_monitor::MemberMonitor;
use super::server::SemaphoreWelcome;
use super::signals::MemberSignals;
use super::*;
use crate::fork::CloseOnForkFd;
use crate::ipc::peer::Process;
use crate::ipc::{
    AccessPolicy, Address, ClientInfo, IpcServer, OutgoingReply, Rejection, RequestHandler,
    ServerCore,
};
use crate::runtime::closer::PeerFd;

/// Admits every client, with this reply.
struct Wrong {
    body: Vec<u8>,
    page_bytes: usize,
}

impl RequestHandler for Wrong {
    fn on_connect(
        &self,
        _: &ServerCore,
        _: &ClientInfo,
        _: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        let (_, fd) = SharedPage::create(None, self.page_bytes)?;
        Ok(OutgoingReply {
            body: self.body.clone(),
            fds: vec![fd],
        })
    }

    fn on_request(
        &self,
        _: &ServerCore,
        _: &ClientInfo,
        _: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        Err(Rejection::new("never"))
    }

    fn holds_anything(&self, _: &ClientInfo) -> bool {
        true
    }
}

fn opened(title: &str, body: &impl Serialize, page_bytes: usize) -> Result<Semaphore> {
    let folder = std::env::temp_dir().join(format!(
        "warpipe-semaphore-wrong-{title}-{}",
        std::process::id()
    ));
    let (domain, name) = (Domain::at(&folder)?, EndpointName::new("turns")?);
    let at = Address {
        domain: &domain,
        name: &name,
        kind: Kind::Semaphore,
    };
    let wrong = Wrong {
        body: crate::ipc::encode(body)?,
        page_bytes,
    };
    let server = IpcServer::open(&at, AccessPolicy::default(), Arc::new(wrong))?;
    let opened = Semaphore::opener("turns")
        .domain(&domain)
        .device(&Device::host())
        .open();
    drop(server);
    let _ = std::fs::remove_dir_all(folder);
    opened
}

#[test]
fn an_admission_that_makes_no_sense_is_a_typed_error() {
    let right = page::bytes_for(2);
    assert!(
        opened(
            "right",
            &SemaphoreWelcome {
                member: 1,
                permits: 2
            },
            right
        )
        .is_ok()
    );
    let wrong = [
        (
            "none",
            SemaphoreWelcome {
                member: 1,
                permits: 0,
            },
            right,
        ),
        (
            "many",
            SemaphoreWelcome {
                member: 1,
                permits: u32::MAX,
            },
            right,
        ),
        (
            "nobody",
            SemaphoreWelcome {
                member: 0,
                permits: 2,
            },
            right,
        ),
        (
            "creator",
            SemaphoreWelcome {
                member: CREATOR,
                permits: 2,
            },
            right,
        ),
        (
            "short",
            SemaphoreWelcome {
                member: 1,
                permits: 2,
            },
            right - 4096,
        ),
        (
            "long",
            SemaphoreWelcome {
                member: 1,
                permits: 2,
            },
            right + 4096,
        ),
    ];
    for (title, welcome, bytes) in wrong {
        let error = opened(title, &welcome, bytes).unwrap_err();
        assert!(matches!(error, Error::Protocol { .. }), "{title}: {error}");
    }
    assert!(matches!(
        opened("garbled", &7u8, right),
        Err(Error::Protocol {
            field: "message",
            ..
        })
    ));
}

#[test]
fn descriptors_that_are_no_pidfd_or_no_lifeline_are_not_taken_for_a_members_death() {
    let shared_page = Arc::new(SemaphorePage::new(
        SharedPage::create(None, page::bytes_for(1)).unwrap().0,
        1,
    ));
    let reactor = Reactor::of_process().unwrap();
    let signals = MemberSignals::new(1, 1, "turns", &Device::host(), &reactor).unwrap();
    let monitor = MemberMonitor::new(shared_page.clone(), signals, 1);
    shared_page.take_free(2, 0).unwrap();
    shared_page.promise(0, 2);
    // A descriptor that is always readable.
    let (readable, writer) = rustix::pipe::pipe().unwrap();
    drop(writer);
    let memfd = rustix::fs::memfd_create(c"no-pidfd", MemfdFlags::CLOEXEC).unwrap();
    let own = rustix::process::pidfd_open(
        rustix::process::getpid(),
        rustix::process::PidfdFlags::empty(),
    )
    .unwrap();
    let (end, open) = rustix::pipe::pipe().unwrap();
    let fds = |pidfd: &OwnedFd, end: &OwnedFd| {
        [pidfd, end, end].map(|fd| PeerFd::from(CloseOnForkFd::duplicate(fd).unwrap()))
    };
    for wrong in [
        fds(&readable, &end),
        fds(&memfd, &end),
        fds(&own, &memfd),
        fds(&own, &own),
        fds(&own, &open),
    ] {
        // In a process to which this one has links, the known state counts.
        let error = Process::relayed(wrong).map(|_| ()).unwrap_err();
        assert!(
            matches!(error, crate::HandshakeFault::Lifeline(_)),
            "{error}"
        );
    }
    let error = monitor
        .watch_member(2, fds(&readable, &end), "turns")
        .unwrap_err();
    assert!(
        matches!(
            error,
            Error::Protocol {
                field: "descriptors of a member",
                ..
            }
        ),
        "{error}"
    );
    assert!(!monitor.watches(2));
    monitor.watch_member(2, fds(&own, &end), "turns").unwrap();
    assert!(monitor.watches(2));
    assert_eq!(
        shared_page.word(0).load(),
        0,
        "a living member owes its promised signals"
    );
}
