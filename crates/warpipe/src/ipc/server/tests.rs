use std::sync::atomic::AtomicU64;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::*;
use crate::fork::CloseOnForkFd;
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::limits::ConnectionQuota;
use crate::ipc::peer::Peer;
use crate::mutex::LockUnpoisoned;

struct Willing;

impl RequestHandler for Willing {
    fn on_connect(
        &self,
        _: &ServerCore,
        _: &ClientInfo,
        _: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        Ok(OutgoingReply {
            body: vec![],
            fds: vec![],
        })
    }

    fn on_request(
        &self,
        _: &ServerCore,
        _: &ClientInfo,
        _: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        Err(Rejection::new("none is expected"))
    }

    fn on_disconnect(&self, _: &ServerCore, _: &ClientInfo, _: Disconnected) {}
}

#[test]
fn a_client_that_is_admitted_while_the_server_closes_is_told_of_the_close() {
    let folder = std::env::temp_dir().join(format!("warpipe-closing-{}", std::process::id()));
    let domain = Domain::at(&folder).unwrap();
    let name = EndpointName::new("a").unwrap();
    let at = Address {
        domain: &domain,
        name: &name,
        kind: crate::ipc::Kind::Timeline,
    };
    let policy = AccessPolicy::default();
    let quota = ConnectionQuota::new(policy.limits);
    let server = IpcServer::open(&at, policy, Arc::new(Willing)).unwrap();
    let server_core = server.server_core().clone();
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let socket = Arc::new(PeerSocket::from(CloseOnForkFd::new(theirs).unwrap()));
    let peer = Peer::of(socket.as_fd(), "a").unwrap();
    let first = Message::Hello {
        device: None,
        kind: crate::ipc::Kind::Timeline,
        body: vec![],
    };
    message::send(ours.as_fd(), &first, &[]).unwrap();
    let Ok(Received::Message(_, mut fds)) = message::receive(socket.as_fd(), "a") else {
        panic!("no first message");
    };
    peer.adopt(message::take_lifeline(&mut fds).unwrap())
        .unwrap();
    let quota_permit = Arc::new(quota.take(&peer, &socket).unwrap());
    let connection = Connection {
        id: 1,
        peer,
        socket,
        quota_permit,
    };
    let hello = Hello {
        device: None,
        body: vec![],
    };
    // Between the check of `on_connection` and the admission.
    drop(server);
    server_core.admit(connection, hello);
    let told = message::receive(ours.as_fd(), "a");
    assert!(
        matches!(
            told,
            Ok(Received::Message(Message::Close(CloseReason::Closed), _))
        ),
        "{told:?}"
    );
    assert!(
        server_core.sessions.locked().is_empty(),
        "its socket is closed"
    );
    let _ = std::fs::remove_dir_all(folder);
}

/// `close` takes the connections out first, and tells the clients then.
#[test]
fn a_request_that_is_read_while_the_server_closes_is_not_refused_before_the_close_is_told() {
    let folder = std::env::temp_dir().join(format!("warpipe-taken-out-{}", std::process::id()));
    let domain = Domain::at(&folder).unwrap();
    let name = EndpointName::new("a").unwrap();
    let at = Address {
        domain: &domain,
        name: &name,
        kind: crate::ipc::Kind::Timeline,
    };
    let server = IpcServer::open(&at, AccessPolicy::default(), Arc::new(Willing)).unwrap();
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (_ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let socket = PeerSocket::from(CloseOnForkFd::new(theirs).unwrap());
    let request = Message::Request {
        serial: 1,
        body: vec![],
    };
    assert!(
        server
            .server_core()
            .on_request(1, &socket, request, vec![])
            .is_ok()
    );
    drop(server);
    let _ = std::fs::remove_dir_all(folder);
}

/// Refuses every client, while its server closes.
struct Overtaken;

impl RequestHandler for Overtaken {
    fn on_connect(
        &self,
        server_core: &ServerCore,
        _: &ClientInfo,
        _: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        server_core.close();
        Err(Rejection::new("it is there no more"))
    }
}

#[test]
fn a_client_that_the_closing_server_cannot_admit_any_more_is_not_refused() {
    let folder = std::env::temp_dir().join(format!("warpipe-overtaken-{}", std::process::id()));
    let domain = Domain::at(&folder).unwrap();
    let name = EndpointName::new("a").unwrap();
    let at = Address {
        domain: &domain,
        name: &name,
        kind: crate::ipc::Kind::Allocations,
    };
    let server = IpcServer::open(&at, AccessPolicy::default(), Arc::new(Overtaken)).unwrap();
    let attached = crate::ipc::ClientSession::attach(&at, None, &[], std::time::Duration::ZERO);
    let closed = attached.map(drop).unwrap_err();
    assert!(
        matches!(closed, Error::NotFound { .. }),
        "the name is free: {closed}"
    );
    drop(server);
    let _ = std::fs::remove_dir_all(folder);
}

/// Gives something away with each answer, and closes the client's socket before it is sent.
#[derive(Default)]
struct Unheard {
    taken_back: AtomicBool,
}

impl RequestHandler for Unheard {
    fn on_connect(
        &self,
        _: &ServerCore,
        _: &ClientInfo,
        _: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        Ok(OutgoingReply::default())
    }

    fn on_request(
        &self,
        server_core: &ServerCore,
        client: &ClientInfo,
        _: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        let socket = server_core.socket_of(client.id).unwrap();
        rustix::net::shutdown(&*socket, rustix::net::Shutdown::Both)?;
        Ok(OutgoingReply::default())
    }

    fn take_back(&self, _: &ClientInfo, _: &[u8]) -> bool {
        self.taken_back.store(true, Ordering::SeqCst);
        true
    }
}

#[test]
fn what_a_client_was_given_by_an_answer_that_it_never_gets_is_taken_back() {
    let folder = std::env::temp_dir().join(format!("warpipe-unheard-{}", std::process::id()));
    let domain = Domain::at(&folder).unwrap();
    let name = EndpointName::new("a").unwrap();
    let at = Address {
        domain: &domain,
        name: &name,
        kind: crate::ipc::Kind::Allocations,
    };
    let handler = Arc::new(Unheard::default());
    let server = IpcServer::open(&at, AccessPolicy::default(), handler.clone()).unwrap();
    let wait = std::time::Duration::from_secs(20);
    let (session, _) = crate::ipc::ClientSession::attach(&at, None, &[], wait).unwrap();
    session.post(b"one, please").unwrap();
    let is_back = || handler.taken_back.load(Ordering::SeqCst);
    assert!(warpipe_testkit::eventually(wait, is_back));
    drop((session, server));
    let _ = std::fs::remove_dir_all(folder);
}

/// Admits each client with more descriptors than a message may bring.
struct Overloaded;

impl RequestHandler for Overloaded {
    fn on_connect(
        &self,
        _: &ServerCore,
        _: &ClientInfo,
        _: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        let fd = |_| CloseOnForkFd::open(|| eventfd(0, EventfdFlags::CLOEXEC));
        Ok(OutgoingReply {
            body: vec![],
            fds: (0..=FDS_MAX).map(fd).collect::<Result<_, _>>()?,
        })
    }
}

#[test]
fn a_client_whose_admission_cannot_be_sent_hears_the_reason_and_no_notification_before_it() {
    let folder = std::env::temp_dir().join(format!("warpipe-unadmitted-{}", std::process::id()));
    let domain = Domain::at(&folder).unwrap();
    let name = EndpointName::new("a").unwrap();
    let at = Address {
        domain: &domain,
        name: &name,
        kind: crate::ipc::Kind::Timeline,
    };
    let server = IpcServer::open(&at, AccessPolicy::default(), Arc::new(Overloaded)).unwrap();
    let client = AtomicU64::new(1);
    std::thread::scope(|scope| {
        let (server_core, next) = (server.server_core(), &client);
        scope.spawn(move || {
            let notice = OutgoingReply::default();
            loop {
                match next.load(Ordering::SeqCst) {
                    0 => break,
                    id => assert!(!server_core.tell(id, &notice), "it was not admitted"),
                }
            }
        });
        for id in 1..=200 {
            client.store(id, Ordering::SeqCst);
            let attached = crate::ipc::ClientSession::attach(&at, None, &[], Duration::ZERO);
            let refused = attached.map(drop).unwrap_err();
            if !matches!(refused, Error::Refused { denied: false, .. }) {
                client.store(0, Ordering::SeqCst);
                panic!("{refused}");
            }
        }
        client.store(0, Ordering::SeqCst);
    });
    drop(server);
    let _ = std::fs::remove_dir_all(folder);
}
