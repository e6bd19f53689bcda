//! A server and its clients, in one process.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use std::os::fd::AsFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::domain::watch::tests::MADE;
use super::*;
use crate::error::NameFault;
use crate::hostile::alone;
use crate::runtime::closer::PeerSocket;

/// Replies with the request's body, and records each disconnect.
struct Echo(Mutex<Sender<String>>);

impl RequestHandler for Echo {
    fn on_connect(
        &self,
        _: &ServerCore,
        client: &ClientInfo,
        body: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        if body == b"refused" {
            return Err(Rejection::new("no strangers"));
        }
        assert_eq!(client.uid, rustix::process::geteuid().as_raw());
        Ok(OutgoingReply {
            body: body.to_vec(),
            fds: vec![],
        })
    }

    fn on_request(
        &self,
        _: &ServerCore,
        _: &ClientInfo,
        body: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        if body == b"no" {
            Err(Rejection::new("I will not"))
        } else {
            Ok(OutgoingReply {
                body: body.to_vec(),
                fds: vec![],
            })
        }
    }

    fn on_suspect(&self, _: &ServerCore, _: &ClientInfo) -> bool {
        true
    }

    fn on_disconnect(&self, _: &ServerCore, _: &ClientInfo, disconnected: Disconnected) {
        let _ = self.0.lock().unwrap().send(format!("{disconnected:?}"));
    }
}

struct RecordingObserver(Mutex<Sender<String>>);

impl SessionObserver for RecordingObserver {
    fn on_closed(&self, graceful: bool) {
        let _ = self.0.lock().unwrap().send(format!("ended {graceful}"));
    }
}

struct Stage {
    domain: Domain,
    name: EndpointName,
    seen: Receiver<String>,
    server: Option<IpcServer>,
    heard: Receiver<String>,
    observer: Arc<RecordingObserver>,
}

const WAIT: Duration = Duration::from_secs(10);

impl Stage {
    fn new(title: &str) -> Stage {
        let folder =
            std::env::temp_dir().join(format!("warpipe-rendezvous-{title}-{}", std::process::id()));
        let domain = Domain::at(folder).unwrap();
        let name = EndpointName::new("kept").unwrap();
        let ((saw, seen), (hears, heard)) = (channel(), channel());
        let at = Address {
            domain: &domain,
            name: &name,
            kind: Kind::Timeline,
        };
        let server = IpcServer::open(
            &at,
            AccessPolicy::default(),
            Arc::new(Echo(Mutex::new(saw))),
        )
        .unwrap();
        Stage {
            server: Some(server),
            seen,
            heard,
            observer: Arc::new(RecordingObserver(Mutex::new(hears))),
            domain,
            name,
        }
    }

    fn open_session(&self, kind: Kind, body: &[u8]) -> Result<(ClientSession, IncomingReply)> {
        let at = Address {
            domain: &self.domain,
            name: &self.name,
            kind,
        };
        let (session, incoming) = ClientSession::attach(&at, None, body, Duration::ZERO)?;
        session.observe(self.observer.clone())?;
        Ok((session, incoming))
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.server = None;
        let _ = std::fs::remove_dir_all(self.domain.path());
    }
}

#[test]
fn a_client_is_admitted_answered_and_seen_off() {
    let stage = Stage::new("visit");
    let (session, incoming) = stage.open_session(Kind::Timeline, b"hello").unwrap();
    assert_eq!(incoming.body, b"hello");
    assert_eq!(session.request(b"what?", WAIT).unwrap().body, b"what?");
    let refused = session.request(b"no", WAIT).unwrap_err();
    assert!(
        matches!(&refused, Error::Refused { denied: false, text, .. } if text == "I will not"),
        "{refused}"
    );
    drop(session);
    assert_eq!(stage.seen.recv_timeout(WAIT).unwrap(), "Closed");
}

#[test]
fn a_client_of_another_kind_or_a_refused_one_gets_the_reason() {
    let stage = Stage::new("refused");
    let other = stage.open_session(Kind::Pool, b"").unwrap_err();
    assert!(
        matches!(&other, Error::Name(NameFault::OtherKind { found, .. }) if found == "timeline"),
        "{other}"
    );
    let refused = stage.open_session(Kind::Timeline, b"refused").unwrap_err();
    assert!(
        matches!(&refused, Error::Refused { denied: false, text, .. } if text == "no strangers"),
        "{refused}"
    );
    assert!(
        stage.seen.try_recv().is_err(),
        "nobody was admitted, so nobody is gone"
    );
}

#[test]
fn a_client_hears_of_a_graceful_end_and_asks_in_vain_afterwards() {
    let mut stage = Stage::new("end");
    let (session, _) = stage.open_session(Kind::Timeline, b"").unwrap();
    stage.server = None;
    assert_eq!(stage.heard.recv_timeout(WAIT).unwrap(), "ended true");
    let gone = session.request(b"still there?", WAIT).unwrap_err();
    assert!(
        matches!(gone, Error::PeerGone { graceful: true, .. }),
        "{gone}"
    );
    let nobody = stage.open_session(Kind::Timeline, b"").unwrap_err();
    assert!(
        matches!(
            nobody,
            Error::NotFound {
                was_there: false,
                ..
            }
        ),
        "{nobody}"
    );
}

#[test]
fn a_client_that_waits_finds_the_server_that_comes_later() {
    let mut stage = Stage::new("wait");
    stage.server = None;
    let at = Address {
        domain: &stage.domain,
        name: &stage.name,
        kind: Kind::Timeline,
    };
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            ClientSession::attach(&at, None, b"early", WAIT).map(|(_, incoming)| incoming.body)
        });
        let server = IpcServer::open(
            &at,
            AccessPolicy::default(),
            Arc::new(Echo(Mutex::new(channel().0))),
        )
        .unwrap();
        assert_eq!(waiting.join().unwrap().unwrap(), b"early");
        drop(server);
    });
    let absent = ClientSession::attach(&at, None, b"", Duration::from_millis(50)).unwrap_err();
    assert!(matches!(absent, Error::NotFound { .. }), "{absent}");
}

#[test]
fn a_client_that_finds_its_server_at_once_makes_no_inotify_instance() {
    let name = "a_client_that_finds_its_server_at_once_makes_no_inotify_instance";
    alone(module_path!(), name, || {
        let mut stage = Stage::new("at-once");
        let at = Address {
            domain: &stage.domain,
            name: &stage.name,
            kind: Kind::Timeline,
        };
        let before = MADE.load(Ordering::SeqCst);
        drop(ClientSession::attach(&at, None, b"", WAIT).unwrap());
        assert_eq!(MADE.load(Ordering::SeqCst), before);
        stage.server = None;
        let at = Address {
            domain: &stage.domain,
            name: &stage.name,
            kind: Kind::Timeline,
        };
        ClientSession::attach(&at, None, b"", Duration::from_millis(100)).unwrap_err();
        assert_eq!(MADE.load(Ordering::SeqCst), before + 1);
    });
}

#[test]
fn bodies_that_are_too_long_or_garbled_are_errors() {
    let stage = Stage::new("bodies");
    let (session, incoming) = stage.open_session(Kind::Timeline, b"\xff\xff").unwrap();
    assert!(matches!(
        session.request(&[0; BODY_BYTES_MAX + 1], WAIT),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(
        incoming.open::<u8, 0>("kept"),
        Err(Error::Protocol {
            field: "message",
            ..
        })
    ));
    let incoming = session.request(&encode(&7u64).unwrap(), WAIT).unwrap();
    assert!(matches!(
        incoming.open::<u64, 1>("kept"),
        Err(Error::Protocol {
            field: "descriptors",
            ..
        })
    ));
    assert!(encode(&vec![0u8; 2 * BODY_BYTES_MAX]).is_err());
}

/// Opens the endpoints of every kind as every kind that can be opened by a name.
#[test]
fn every_kind_of_endpoint_refuses_clients_of_another_kind_by_name() {
    use crate::{
        Device, Member, Memory, Pool, PoolClient, Publisher, Queue, Semaphore, Subscriber,
        Timeline, Worker,
    };

    let folder =
        std::env::temp_dir().join(format!("warpipe-rendezvous-kinds-{}", std::process::id()));
    let (domain, device) = (Domain::at(&folder).unwrap(), Device::host());
    let publisher = Publisher::new("publisher", domain.on(&device)).unwrap();
    let queue = Queue::new("queue", domain.on(&device)).unwrap();
    let timeline = Timeline::new("timeline", domain.on(&device)).unwrap();
    let semaphore = Semaphore::new("semaphore", 1, domain.on(&device)).unwrap();
    let pool = Pool::new("pool", domain.on(&device)).unwrap();
    let member = Member::new("x", domain.options()).unwrap();
    let memory = Memory::allocate(&device, 8).unwrap();
    let published = memory.publish("memory", domain.options()).unwrap();

    let names = [
        "publisher",
        "queue",
        "timeline",
        "semaphore",
        "pool",
        "member",
        "memory",
    ];
    let path = |name: &str| {
        if name == "member" {
            "members/x".to_owned()
        } else {
            name.to_owned()
        }
    };
    type Open<'a> = &'a dyn Fn(&str) -> Option<Error>;
    let opens: [(Kind, Open<'_>); 5] = [
        (Kind::Publisher, &|at| {
            Subscriber::open(at, domain.on(&device), Duration::ZERO).err()
        }),
        (Kind::Queue, &|at| {
            Worker::open(at, domain.on(&device), Duration::ZERO).err()
        }),
        (Kind::Timeline, &|at| {
            Timeline::open(at, domain.on(&device), Duration::ZERO).err()
        }),
        (Kind::Semaphore, &|at| {
            Semaphore::open(at, domain.on(&device), Duration::ZERO).err()
        }),
        (Kind::Pool, &|at| {
            PoolClient::open(at, domain.on(&device), Duration::ZERO).err()
        }),
    ];
    for (kind, open) in opens {
        for name in names {
            match open(&path(name)) {
                None => assert_eq!(kind.to_string(), name),
                Some(Error::Name(NameFault::OtherKind { wanted, found, .. })) => {
                    assert_eq!((wanted, found.as_str()), (kind, name))
                }
                Some(other) => panic!("a {name} as a {kind}: {other}"),
            }
        }
    }
    assert!(
        publisher.subscribers().len() <= 1,
        "the one that was right may be on its way out"
    );
    assert!(queue.state().is_ok());
    drop((
        publisher, queue, timeline, semaphore, pool, member, published,
    ));
    let _ = std::fs::remove_dir_all(folder);
}

#[test]
fn every_reply_that_lies_unread_behind_one_without_room_is_found_and_stays_there() {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let [ours, theirs] = [ours, theirs].map(|fd| PeerSocket::from(CloseOnForkFd::new(fd).unwrap()));
    let reply = |serial: u64, fds: &[CloseOnForkFd]| {
        let (body, fds_count) = (vec![serial as u8; 600], fds.len() as u8);
        let reply = Message::Reply {
            serial,
            body,
            fds: fds_count,
        };
        message::send_owned(&theirs, &reply, fds).unwrap();
    };
    reply(1, &[CloseOnForkFd::duplicate(&ours).unwrap()]);
    reply(NOTIFICATION, &[]);
    reply(2, &[]);
    let failed = Message::RequestFailed {
        serial: 3,
        text: "no".into(),
    };
    message::send_owned(&theirs, &failed, &[]).unwrap();
    reply(4, &[]);
    let found = message::unread_replies(ours.as_fd());
    let serials: Vec<u8> = found.iter().map(|body| body[0]).collect();
    assert_eq!(serials, [1, 2, 4]);
    assert!(crate::os::unread_by_peer(theirs.as_fd()) > 0, "they stay");
    // Its drop must see the descriptor, whose close may hang.
    let first = crate::runtime::closer::peek(ours.as_fd(), &mut [0]);
    assert!(matches!(first, Ok((1, flags)) if flags.contains(rustix::net::ReturnFlags::CTRUNC)));
}
