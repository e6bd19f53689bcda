//! Creators that break the protocol.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, mpsc};
use std::time::Duration;

use rustix::fs::MemfdFlags;
use serde::Serialize;

use super::member_monitor::MemberMonitor;
use super::member_monitor::SemaphoreNotice;
use super::server::{MemberPresence, SemaphoreRequest, SemaphoreWelcome};
use super::signals::MemberSignals;
use super::*;
use crate::fork::CloseOnForkFd;
use crate::ipc::peer::Process;
use crate::ipc::{
    AccessPolicy, Address, ClientInfo, IpcServer, OutgoingReply, Rejection, RequestHandler,
    ServerCore, decode,
};
use crate::runtime::closer::PeerFd;
use crate::{Device, Domain};

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

    fn on_suspect(&self, _: &ServerCore, _: &ClientInfo) -> bool {
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
    let opened = Semaphore::open("turns", domain.on(&Device::host()), Duration::ZERO);
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

/// How a member ends whose stream owes a signal, while another member connects to it.
#[derive(Debug, Clone, Copy, PartialEq)]
enum MemberEnd {
    /// It dies before the creator can tell it of the page.
    DiesUntold,
    /// It dies when it has been told.
    DiesTold,
    /// It closes when it has been told: it owes nothing, and its process lives.
    Leaves,
    /// It lives and serves nothing, and the creator closes.
    OutlivesTheCreator,
}

/// The member that ends.
const OTHER: u32 = 7;

/// A creator of one permit, whose last holder is a member that is about to end.
struct LastHolder {
    end: MemberEnd,
    page: CloseOnForkFd,
    /// The other end of the member's lifeline, while it lives.
    lifeline: Mutex<Option<OwnedFd>>,
    ends: [OwnedFd; 3],
    told: mpsc::Sender<()>,
}

impl RequestHandler for LastHolder {
    fn on_connect(
        &self,
        _: &ServerCore,
        _: &ClientInfo,
        _: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        let welcome = SemaphoreWelcome {
            member: 1,
            permits: 1,
        };
        OutgoingReply::new(&welcome, vec![CloseOnForkFd::duplicate(&self.page)?])
    }

    fn takes_memory(&self) -> bool {
        true
    }

    fn takes_memory_again(&self) -> bool {
        true
    }

    fn on_memory(
        &self,
        server_core: &ServerCore,
        client: &ClientInfo,
        body: &[u8],
        _: PeerFd,
    ) -> Result<OutgoingReply, Rejection> {
        let SemaphoreRequest { .. } = decode(body, "turns")?;
        let mut lifeline = self.lifeline.lock().unwrap();
        let mut presence = MemberPresence {
            is_here: lifeline.is_some(),
            is_told: true,
        };
        if !presence.is_here {
            return OutgoingReply::new(&presence, vec![]);
        }
        let notice = SemaphoreNotice::Gone { member: OTHER };
        match self.end {
            MemberEnd::OutlivesTheCreator => {}
            MemberEnd::Leaves => {
                let notice = OutgoingReply::new(&notice, vec![])?;
                assert!(server_core.tell(client.id, &notice));
                // Its process lives, and the creator has it as a member no more.
                std::mem::forget(lifeline.take());
            }
            MemberEnd::DiesUntold | MemberEnd::DiesTold => drop(lifeline.take()),
        }
        presence.is_told = self.end != MemberEnd::DiesUntold;
        self.told.send(()).unwrap();
        let ends = self.ends.each_ref().map(CloseOnForkFd::duplicate);
        let ends = ends.into_iter().collect::<std::result::Result<_, _>>()?;
        OutgoingReply::new(&presence, ends)
    }
}

/// What a member gets that acquires the permit of this last holder.
fn acquired_from(end: MemberEnd) -> Result<()> {
    let folder = format!("warpipe-semaphore-{end:?}-{}", std::process::id());
    let folder = std::env::temp_dir().join(folder);
    let (domain, name) = (Domain::at(&folder)?, EndpointName::new("turns")?);
    let (page, fd) = SharedPage::create(None, page::bytes_for(1))?;
    let shared_page = SemaphorePage::new(page, 1);
    shared_page.take_free(OTHER, 0).unwrap();
    shared_page.promise(0, OTHER);
    shared_page.hand_on(0, OTHER);
    let own = rustix::process::getpid();
    let pidfd = rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty()).unwrap();
    let (lifeline, writer) = rustix::pipe::pipe().unwrap();
    let alarm = lifeline.try_clone().unwrap();
    // Else the holder would die with its creator.
    let outlives = end == MemberEnd::OutlivesTheCreator;
    let outliving = outlives.then(|| writer.try_clone().unwrap());
    let (told, is_told) = mpsc::channel();
    let creator = LastHolder {
        end,
        page: fd,
        lifeline: Mutex::new(Some(writer)),
        ends: [pidfd, lifeline, alarm],
        told,
    };
    let at = Address {
        domain: &domain,
        name: &name,
        kind: Kind::Semaphore,
    };
    let server = IpcServer::open(&at, AccessPolicy::default(), Arc::new(creator))?;
    let semaphore = Semaphore::open("turns", domain.on(&Device::host()), Duration::ZERO)?;
    let stream = Device::host().stream()?;
    let patience = Duration::from_secs(60);
    let (tell, outcome) = mpsc::channel();
    std::thread::spawn(move || {
        let permit = semaphore.acquire(&stream, 60 * patience).map(drop);
        let _ = tell.send(permit.and_then(|()| stream.synchronize(patience)));
    });
    is_told.recv_timeout(patience).unwrap();
    let server = Some(server).filter(|_| !outlives);
    let outcome = outcome.recv_timeout(patience).expect("it waits on");
    drop((server, outliving));
    let _ = std::fs::remove_dir_all(folder);
    outcome
}

#[test]
fn a_member_acquires_a_permit_although_its_last_holder_ends_while_the_two_connect() {
    for end in [
        MemberEnd::DiesUntold,
        MemberEnd::DiesTold,
        MemberEnd::Leaves,
    ] {
        let acquired = acquired_from(end);
        assert!(acquired.is_ok(), "{end:?}: {acquired:?}");
    }
}

#[test]
fn a_member_that_waits_for_another_one_to_connect_is_told_of_the_creators_end() {
    let told = acquired_from(MemberEnd::OutlivesTheCreator).unwrap_err();
    assert!(
        matches!(told, Error::PeerGone { graceful: true, .. }),
        "{told}"
    );
}

#[test]
fn descriptors_that_are_no_pidfd_or_no_lifeline_are_not_taken_for_a_members_death() {
    let shared_page = Arc::new(SemaphorePage::new(
        SharedPage::create(None, page::bytes_for(1)).unwrap().0,
        1,
    ));
    let reactor = Reactor::of_process().unwrap();
    let signals = MemberSignals::new(1, 1, "turns", &Device::host(), &reactor).unwrap();
    let monitor = MemberMonitor::new(shared_page.clone(), signals);
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
    monitor.expect_member(2);
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
