use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::state::{PendingRequest, REQUESTS_MAX};
use super::{is_transient, until_found};
use crate::error::{Error, HandshakeFault};
use crate::ipc::connection::{ConnectionEvent, ConnectionUser};
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::message::{Message, wait_readable};
use crate::ipc::{
    AccessPolicy, Address, ClientInfo, ClientSession, Disconnected, IncomingReply, IpcServer, Kind,
    OutgoingReply, Rejection, RequestHandler, ServerCore, SessionObserver,
};
use crate::mutex::LockUnpoisoned;
use crate::runtime::reactor::{EventSource, Next};
use crate::wait::Wait;

#[derive(Default)]
struct SilentHandler {
    /// Requests are answered when this is free.
    gate: Arc<Mutex<()>>,
    ends: Option<Sender<Disconnected>>,
}

impl RequestHandler for SilentHandler {
    fn on_connect(
        &self,
        _: &ServerCore,
        _: &ClientInfo,
        _: &[u8],
    ) -> std::result::Result<OutgoingReply, Rejection> {
        Ok(OutgoingReply::default())
    }

    fn on_request(
        &self,
        _: &ServerCore,
        _: &ClientInfo,
        _: &[u8],
    ) -> std::result::Result<OutgoingReply, Rejection> {
        drop(self.gate.lock());
        Ok(OutgoingReply::default())
    }

    fn on_suspect(&self, _: &ServerCore, _: &ClientInfo) -> bool {
        true
    }

    fn on_disconnect(&self, _: &ServerCore, _: &ClientInfo, disconnected: Disconnected) {
        self.ends
            .iter()
            .for_each(|ends| ends.send(disconnected).unwrap());
    }
}

/// A server in a domain of its own, and a session at it without an observer.
fn connect(title: &str) -> (PathBuf, IpcServer, ClientSession) {
    connect_to(title, SilentHandler::default())
}

fn connect_to(title: &str, handler: SilentHandler) -> (PathBuf, IpcServer, ClientSession) {
    let file = format!("warpipe-session-{title}-{}", std::process::id());
    let folder = std::env::temp_dir().join(file);
    let domain = Domain::at(&folder).unwrap();
    let name = EndpointName::new(title).unwrap();
    let at = Address {
        domain: &domain,
        name: &name,
        kind: Kind::Timeline,
    };
    let server = IpcServer::open(&at, AccessPolicy::default(), Arc::new(handler)).unwrap();
    let (session, _) = ClientSession::attach(&at, None, &[], Duration::ZERO).unwrap();
    (folder, server, session)
}

#[test]
fn a_request_to_a_server_that_has_just_closed_reports_a_graceful_close() {
    // The session has no observer: this test reads the socket instead of the reactor, after the
    // request.
    let (folder, server, session) = connect("left");
    drop(server);
    let result = std::thread::scope(|scope| {
        let request = scope.spawn(|| session.request(b"anybody?", Duration::from_secs(10)));
        while session.inner.requests.locked().open.is_empty() && !request.is_finished() {
            std::thread::yield_now();
        }
        while session.inner.on_message(0) == Next::Keep {
            std::thread::yield_now();
        }
        request.join().unwrap()
    });
    assert!(
        matches!(result, Err(Error::PeerGone { graceful: true, .. })),
        "{result:?}"
    );
    let _ = std::fs::remove_dir_all(folder);
}

#[test]
fn owner_gone_waits_until_the_graceful_close_has_been_read() {
    // This test reads the socket instead of the reactor, late.
    let (folder, server, session) = connect("bye");
    drop(server);
    let result = std::thread::scope(|scope| {
        let (started_tx, started) = channel();
        let session = &session;
        let request = scope.spawn(move || {
            started_tx.send(()).unwrap();
            session.owner_gone()
        });
        started.recv().unwrap();
        while session.inner.on_message(0) == Next::Keep {
            std::thread::yield_now();
        }
        request.join().unwrap()
    });
    assert!(
        matches!(result, Error::PeerGone { graceful: true, .. }),
        "{result:?}"
    );
    let _ = std::fs::remove_dir_all(folder);
}

#[test]
fn a_dead_server_is_dead_although_another_process_holds_its_socket_open() {
    let (folder, server, session) = connect("held");
    let (inner, (tx, rx)) = (session.inner.clone(), channel());
    // As the reactor does when the lifeline ends. The socket is open and silent.
    std::thread::spawn(move || tx.send(inner.on_ready(ConnectionEvent::Proven.tag(0))));
    assert_eq!(rx.recv_timeout(Duration::from_secs(10)), Ok(Next::Stop));
    assert!(session.is_dead() && session.is_over());
    drop((session, server));
    let _ = std::fs::remove_dir_all(folder);
}

#[test]
fn a_session_that_is_over_takes_no_reply_that_lies_unread() {
    let (folder, server, session) = connect("unread");
    let (inner, serial) = (&session.inner, 7);
    let waiting = PendingRequest::Waiting;
    inner.requests.locked().open.insert(serial, waiting);
    let body = vec![];
    inner.send(&Message::Request { serial, body }).unwrap();
    assert!(wait_readable(inner.socket.as_fd(), Duration::from_secs(10)));
    inner.on_close(0);
    assert_eq!(inner.on_message(0), Next::Stop);
    let open = &inner.requests.locked().open;
    assert!(matches!(open[&serial], PendingRequest::Waiting));
    drop(server);
    let _ = std::fs::remove_dir_all(folder);
}

struct IgnoresAll;

impl SessionObserver for IgnoresAll {}

#[test]
fn a_request_beyond_the_limit_waits_until_another_one_is_answered() {
    let (folder, server, session) = connect("many");
    session.observe(Arc::new(IgnoresAll)).unwrap();
    let others = (0..REQUESTS_MAX as u64).map(|other| u64::MAX - other);
    session
        .inner
        .requests
        .locked()
        .open
        .extend(others.map(|other| (other, PendingRequest::Waiting)));
    let (timeout, start) = (Duration::from_millis(100), Instant::now());
    let result = session.request(b"a place?", timeout).map(drop);
    assert!(
        matches!(result, Err(Error::Timeout { waited, .. }) if waited == timeout),
        "{result:?}"
    );
    assert!(
        start.elapsed() >= timeout,
        "it waits until another request ends"
    );
    std::thread::scope(|scope| {
        let request = scope.spawn(|| {
            session
                .request(b"a place?", Duration::from_secs(60))
                .map(drop)
        });
        session.inner.on_reply(
            u64::MAX,
            Ok(IncomingReply {
                body: Vec::new(),
                fds: Vec::new(),
            }),
        );
        let none = Wait::from(Duration::ZERO);
        session.inner.wait_for((u64::MAX, &[]), &none).unwrap();
        request.join().unwrap().unwrap();
    });
    drop((session, server));
    let _ = std::fs::remove_dir_all(folder);
}

#[test]
fn a_request_waits_for_room_at_a_server_that_does_not_read_for_a_while() {
    let gate = Arc::<Mutex<()>>::default();
    let handler = SilentHandler {
        gate: gate.clone(),
        ends: None,
    };
    let held = gate.locked();
    let (folder, server, session) = connect_to("busy", handler);
    session.observe(Arc::new(IgnoresAll)).unwrap();
    while session.post(b"a word").is_ok() {}
    let timeout = Duration::from_millis(20);
    let result = session.request(b"anybody?", timeout).map(drop);
    assert!(
        matches!(result, Err(Error::Timeout { waited, .. }) if waited == timeout),
        "{result:?}"
    );
    std::thread::scope(|scope| {
        let request = scope.spawn(|| session.request(b"room?", Duration::from_secs(60)).map(drop));
        while session.inner.requests.locked().open.is_empty() && !request.is_finished() {
            std::thread::yield_now();
        }
        drop(held);
        request.join().unwrap().unwrap();
    });
    drop((session, server));
    let _ = std::fs::remove_dir_all(folder);
}

#[test]
fn a_cancelled_request_ends_with_a_timeout_wherever_it_waits() {
    // The session has no observer, so no reply is read.
    let (folder, server, session) = connect("off");
    // The callback may use the session, since nothing is locked.
    let is_cancelled = || !session.inner.requests.locked().is_over;
    let is_asked = || !session.inner.requests.locked().open.is_empty();
    let result = session
        .request(b"anybody?", Wait::at_most(Duration::MAX).unless(&is_asked))
        .map(drop);
    assert!(matches!(result, Err(Error::Timeout { .. })), "{result:?}");
    let others = (0..REQUESTS_MAX as u64).map(|other| u64::MAX - other);
    session
        .inner
        .requests
        .locked()
        .open
        .extend(others.map(|other| (other, PendingRequest::Waiting)));
    let result = session
        .request(
            b"a place?",
            Wait::at_most(Duration::MAX).unless(&is_cancelled),
        )
        .map(drop);
    assert!(matches!(result, Err(Error::Timeout { .. })), "{result:?}");
    drop((session, server));
    let _ = std::fs::remove_dir_all(folder);
}

#[test]
fn a_request_looks_whether_it_is_cancelled_before_it_sleeps_however_short_its_sleeps_are() {
    let (folder, server, session) = connect("looks");
    let open_at_first = std::cell::Cell::new(None);
    let cancelled = || {
        let open = session.inner.requests.locked().open.len();
        open_at_first.set(open_at_first.get().or(Some(open)));
        true
    };
    let wait = Wait::at_most(Duration::MAX).unless(&cancelled);
    let result = session.request(b"anybody?", wait).map(drop);
    assert!(matches!(result, Err(Error::Timeout { .. })), "{result:?}");
    assert_eq!(open_at_first.get(), Some(0));
    let requests = session.inner.requests.locked();
    assert!(requests.open.is_empty(), "nothing was asked");
    drop(requests);
    drop((session, server));
    let _ = std::fs::remove_dir_all(folder);
}

#[test]
fn a_cancelled_wait_for_a_session_ends_although_the_server_is_stopped() {
    let folder = format!("warpipe-session-stopped-{}", std::process::id());
    let folder = std::env::temp_dir().join(folder);
    let domain = Domain::at(&folder).unwrap();
    let name = EndpointName::new("a").unwrap();
    // It accepts no connection.
    let claim = domain.claim(&name, false).unwrap();
    let at = Address {
        domain: &domain,
        name: &name,
        kind: Kind::Timeline,
    };
    let cancelled = || true;
    for limit in [Duration::ZERO, Duration::MAX] {
        let wait = Wait::at_most(limit).unless(&cancelled);
        let result = ClientSession::attach(&at, None, &[], wait).map(drop);
        assert!(
            matches!(result, Err(Error::Timeout { waited, .. }) if waited == limit),
            "{result:?}"
        );
    }
    drop(claim);
    let _ = std::fs::remove_dir_all(folder);
}

/// Records stale replies.
struct RecordsStaleReplies(Mutex<Sender<Vec<u8>>>);

impl SessionObserver for RecordsStaleReplies {
    fn on_stale_reply(&self, request: &[u8], _: IncomingReply) {
        self.0.lock().unwrap().send(request.to_vec()).unwrap();
    }
}

#[test]
fn a_stale_reply_comes_with_its_request_which_counts_until_then() {
    // This test reads the socket instead of the reactor, after the timeout.
    let (folder, server, session) = connect("late");
    let (tx, rx) = channel();
    *session.inner.observer.lock().unwrap() = Some(Arc::new(RecordsStaleReplies(Mutex::new(tx))));
    let asked = session.request(b"in time?", Duration::ZERO).map(drop);
    assert!(matches!(asked, Err(Error::Timeout { .. })), "{asked:?}");
    assert_eq!(session.inner.requests.locked().open.len(), 1);
    let answer = loop {
        assert_eq!(session.inner.on_message(0), Next::Keep);
        match rx.try_recv() {
            Ok(answer) => break answer,
            Err(_) => std::thread::yield_now(),
        }
    };
    assert_eq!(
        (answer, session.inner.requests.locked().open.len()),
        (b"in time?".to_vec(), 0)
    );
    drop((session, server));
    let _ = std::fs::remove_dir_all(folder);
}

#[test]
fn a_session_that_is_dropped_before_a_reply_closes_when_its_observer_has_that_reply() {
    let (gate, (ends, end)) = (Arc::new(Mutex::new(())), channel());
    let handler = SilentHandler {
        gate: gate.clone(),
        ends: Some(ends),
    };
    let (folder, server, session) = connect_to("dropped", handler);
    let (tx, rx) = channel();
    let observer = RecordsStaleReplies(Mutex::new(tx));
    session.observe(Arc::new(observer)).unwrap();
    let closed = gate.lock().unwrap();
    let asked = session.request(b"in time?", Duration::ZERO).map(drop);
    assert!(matches!(asked, Err(Error::Timeout { .. })), "{asked:?}");
    let inner = Arc::downgrade(&session.inner);
    drop(session);
    drop(closed);
    let wait = Duration::from_secs(10);
    assert_eq!(rx.recv_timeout(wait), Ok(b"in time?".to_vec()));
    assert_eq!(end.recv_timeout(wait), Ok(Disconnected::Closed));
    let start = Instant::now();
    while inner.strong_count() > 0 {
        assert!(start.elapsed() < wait, "it keeps itself");
        std::thread::yield_now();
    }
    drop(server);
    let _ = std::fs::remove_dir_all(folder);
}

#[test]
fn a_session_that_is_dropped_before_a_reply_ends_with_a_server_that_closes_without_one() {
    // The requests are never answered.
    let (folder, server, session) = connect("unanswered");
    session.observe(Arc::new(IgnoresAll)).unwrap();
    let unanswered = PendingRequest::Abandoned(Vec::new());
    session
        .inner
        .requests
        .locked()
        .open
        .insert(u64::MAX, unanswered);
    let inner = Arc::downgrade(&session.inner);
    drop(session);
    assert!(inner.strong_count() > 0);
    drop(server);
    let start = Instant::now();
    while inner.strong_count() > 0 {
        assert!(start.elapsed() < Duration::from_secs(10), "it keeps itself");
        std::thread::yield_now();
    }
    let _ = std::fs::remove_dir_all(folder);
}

#[test]
fn a_client_that_waits_for_a_name_outlasts_its_owners_shortage_and_its_end() {
    let folder = format!("warpipe-session-found-{}", std::process::id());
    let folder = std::env::temp_dir().join(folder);
    let domain = Domain::at(&folder).unwrap();
    let fault = |fault| Error::Handshake {
        name: "a".into(),
        fault,
    };
    let mut answers = vec![
        Ok("found"),
        Err(fault(HandshakeFault::Closed)),
        Err(fault(HandshakeFault::NoRoom("none".into()))),
    ];
    let found = until_found(
        &domain,
        Duration::from_secs(10),
        &mut None,
        is_transient,
        || answers.pop().unwrap(),
    );
    assert_eq!(found.unwrap(), "found");
    let mut count = 0;
    let refused = until_found(
        &domain,
        Duration::from_secs(10),
        &mut None,
        is_transient,
        || {
            count += 1;
            Err::<(), _>(fault(HandshakeFault::Refused("no".into())))
        },
    );
    assert!(refused.is_err() && count == 1);
    let late = until_found(&domain, Duration::ZERO, &mut None, is_transient, || {
        Err::<(), _>(fault(HandshakeFault::NoRoom("none".into())))
    });
    assert!(late.is_err());
    let _ = std::fs::remove_dir_all(folder);
}
