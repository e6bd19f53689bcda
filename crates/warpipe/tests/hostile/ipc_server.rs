//! Raw clients against a server, and raw servers against a client: wrong messages end their own
//! session alone.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use warpipe_testkit::Rng;

use super::descriptors::{descriptors, settled_descriptors};
use super::stage::{
    LONG, Scratch, alone, eventually, hear, name, packet, pipe, random_bytes, send_raw,
};
use crate::ipc::limits::PeerLimits;
use crate::ipc::message::{Message, Received};
use crate::ipc::{
    AccessPolicy, Address, BODY_BYTES_MAX, ClientInfo, ClientSession, Disconnected, IpcServer,
    Kind, OutgoingReply, Rejection, RequestHandler, ServerCore, SessionObserver,
};
use crate::{Error, HandleFault, HandshakeFault, NameFault, Result};

/// Counts its clients; echoes requests.
#[derive(Default)]
pub(super) struct Book {
    pub(super) here: AtomicU64,
    suspects: AtomicU64,
}

impl RequestHandler for Book {
    fn on_connect(
        &self,
        _: &ServerCore,
        _: &ClientInfo,
        body: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        self.here.fetch_add(1, SeqCst);
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
        Ok(OutgoingReply {
            body: body.to_vec(),
            fds: vec![],
        })
    }

    fn on_suspect(&self, _: &ServerCore, _: &ClientInfo) -> bool {
        self.suspects.fetch_add(1, SeqCst);
        true
    }

    fn on_disconnect(&self, _: &ServerCore, _: &ClientInfo, _: Disconnected) {
        self.here.fetch_sub(1, SeqCst);
    }
}

struct Deaf;

impl SessionObserver for Deaf {}

pub(super) fn open(scratch: &Scratch, admission: AccessPolicy) -> (IpcServer, Arc<Book>) {
    let book = Arc::new(Book::default());
    let at = Address {
        domain: &scratch.domain,
        name: &name(),
        kind: Kind::Pool,
    };
    (IpcServer::open(&at, admission, book.clone()).unwrap(), book)
}

pub(super) fn attach(scratch: &Scratch) -> Result<ClientSession> {
    let at = Address {
        domain: &scratch.domain,
        name: &name(),
        kind: Kind::Pool,
    };
    let (session, _) = ClientSession::attach(&at, None, b"", Duration::ZERO)?;
    session.observe(Arc::new(Deaf))?;
    Ok(session)
}

fn assert_answers(session: &ClientSession) {
    assert_eq!(session.request(b"hello", LONG).unwrap().body, b"hello");
}

pub(super) fn visit() -> Message {
    Message::Hello {
        device: None,
        kind: Kind::Pool,
        body: vec![],
    }
}

fn ends(socket: &OwnedFd) -> bool {
    loop {
        match hear(socket) {
            Received::End => return true,
            Received::Nothing => return false,
            Received::Message(..) => {}
        }
    }
}

#[test]
fn a_client_that_sends_garbage_is_disconnected_alone() {
    alone(
        module_path!(),
        "a_client_that_sends_garbage_is_disconnected_alone",
        || {
            // A newer kernel would not accept the descriptors.
            crate::os::IS_OLD_KERNEL.store(true, std::sync::atomic::Ordering::SeqCst);
            let scratch = Scratch::new();
            let (_server, book) = open(&scratch, AccessPolicy::default());
            let good = attach(&scratch).unwrap();
            let before = settled_descriptors();
            let ask = |body: Vec<u8>| packet(&Message::Request { serial: 1, body });
            let first: [(&str, Vec<u8>); 6] = [
                ("a hello", packet(&super::publisher_handshake::hello())),
                ("a question before it is in", ask(vec![1])),
                ("garbage", b"WARP\x01\0\0\0\xff\xff".to_vec()),
                ("no frame", vec![0; 3]),
                ("oversized", vec![b'W'; 4096]),
                (
                    "a server's word",
                    packet(&Message::RequestFailed {
                        serial: 1,
                        text: String::new(),
                    }),
                ),
            ];
            for (what, bytes) in &first {
                let socket = scratch.connection();
                send_raw(&socket, bytes, &[]).unwrap();
                assert!(ends_or_refused(&socket), "{what}");
            }
            assert_eq!(book.here.load(SeqCst), 1, "none of them was admitted");
            for second in [packet(&visit()), packet(&Message::Attached), vec![9; 40]] {
                let socket = scratch.connection();
                send_raw(&socket, &packet(&visit()), &[]).unwrap();
                assert!(matches!(
                    hear(&socket),
                    Received::Message(Message::SessionOpened { .. }, _)
                ));
                send_raw(&socket, &second, &[]).unwrap();
                assert!(ends(&socket));
            }
            // This process is the clients', too: memory that they might still touch stays until it
            // dies.
            eventually("all three are suspect", || book.suspects.load(SeqCst) == 3);
            let pipes = pipe();
            let socket = scratch.connection();
            send_raw(&socket, &packet(&visit()), &[pipes.as_fd()]).unwrap();
            assert!(ends_or_refused(&socket), "descriptors where none are due");
            drop((socket, pipes));
            // Three suspects keep a socket each. Their process, which is this one, keeps
            // everything.
            eventually("every other descriptor is closed", || {
                descriptors() <= before + 3
            });
            assert_answers(&good);
        },
    );
}

/// Refused, or closed; a refused silent client is closed with the test's end of the connection.
fn ends_or_refused(socket: &OwnedFd) -> bool {
    matches!(
        hear(socket),
        Received::End | Received::Message(Message::Refused { .. } | Message::OtherKind { .. }, _)
    )
}

#[test]
fn random_packets_neither_panic_nor_hang_a_server() {
    let scratch = Scratch::new();
    let (_server, _book) = open(&scratch, AccessPolicy::default());
    let good = attach(&scratch).unwrap();
    let mut random = Rng::with_seed(7);
    for _ in 0..300 {
        let socket = scratch.connection();
        if random.u64(..2) == 0 {
            send_raw(&socket, &packet(&visit()), &[]).unwrap();
        }
        for _ in 0..random.u64(..4) {
            let length = random.usize(..1200);
            let mut bytes = [&b"WARP\x01\0\0\0"[..], &random_bytes(&mut random, length)].concat();
            bytes.truncate(length.max(1));
            let _ = send_raw(&socket, &bytes, &[]);
        }
    }
    assert_answers(&good);
}

#[test]
fn a_client_that_does_not_read_is_disconnected_and_blocks_no_other() {
    let scratch = Scratch::new();
    let (_server, book) = open(&scratch, AccessPolicy::default());
    let good = attach(&scratch).unwrap();
    let socket = scratch.connection();
    send_raw(&socket, &packet(&visit()), &[]).unwrap();
    // It sends requests, and never reads an answer.
    let question = packet(&Message::Request {
        serial: 1,
        body: vec![0; 512],
    });
    eventually("the server stops reading", || {
        send_raw(&socket, &question, &[]).is_err()
    });
    eventually("it is put out", || book.suspects.load(SeqCst) > 0);
    assert_eq!(book.suspects.load(SeqCst), 1);
    assert_answers(&good);
}

#[test]
fn a_full_server_says_so_and_silent_connections_exclude_no_client() {
    let scratch = Scratch::new();
    let (_server, book) = open(
        &scratch,
        AccessPolicy {
            limits: PeerLimits {
                all: 2,
                ..PeerLimits::default()
            },
            ..AccessPolicy::default()
        },
    );
    let silent: Vec<OwnedFd> = (0..100).map(|_| scratch.connection()).collect();
    let first = attach(&scratch).unwrap();
    let second = attach(&scratch).unwrap();
    let refused = attach(&scratch).unwrap_err();
    assert!(
        matches!(
            &refused,
            Error::Handshake {
                fault: HandshakeFault::Full {
                    limit: crate::PeerLimit::All,
                    max: 2
                },
                ..
            }
        ),
        "{refused}"
    );
    drop(first);
    eventually("one has left", || book.here.load(SeqCst) == 1);
    assert_answers(&attach(&scratch).unwrap());
    drop((silent, second));
}

/// A server under the test's control.
struct Liar {
    claim: crate::ipc::domain::NameClaim,
}

impl Liar {
    fn new(scratch: &Scratch) -> Liar {
        Liar {
            claim: scratch.domain.claim(&name(), false).unwrap(),
        }
    }

    /// Answers one client's first message with `packets`, and keeps the connection.
    fn receive(&self, packets: &[(Vec<u8>, usize)]) -> OwnedFd {
        use rustix::net::{SocketFlags, accept_with};
        crate::ipc::message::wait_readable(self.claim.listener().as_fd(), LONG);
        let socket = accept_with(
            self.claim.listener(),
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        )
        .unwrap();
        assert!(matches!(
            hear(&socket),
            Received::Message(Message::Hello { .. }, _)
        ));
        for (bytes, fds) in packets {
            let pipes: Vec<OwnedFd> = (0..*fds).map(|_| pipe()).collect();
            let borrowed: Vec<_> = pipes.iter().map(AsFd::as_fd).collect();
            send_raw(&socket, bytes, &borrowed).unwrap();
        }
        socket
    }
}

#[test]
fn a_client_refuses_an_invalid_admission() {
    let scratch = Scratch::new();
    let liar = Liar::new(&scratch);
    let granted = |fds| {
        packet(&Message::SessionOpened {
            generation: [1; 16],
            body: vec![1; 8],
            fds,
        })
    };
    let descriptors = |error: &Error| {
        matches!(
            error,
            Error::Handshake {
                fault: HandshakeFault::Descriptors { .. },
                ..
            }
        )
    };
    type Check<'a> = &'a (dyn Fn(&Error) -> bool + Sync);
    type Lie<'a> = (&'a str, (Vec<u8>, usize), Check<'a>);
    let cases: [Lie<'_>; 6] = [
        ("too few descriptors", (granted(2), 1), &descriptors),
        ("too many descriptors", (granted(0), 3), &descriptors),
        (
            "more descriptors than can be",
            (granted(200), 4),
            &descriptors,
        ),
        (
            "another message",
            (packet(&Message::Attached), 0),
            &|error| matches!(error, Error::Handshake { .. }),
        ),
        ("garbage", (vec![7; 100], 0), &|error| {
            matches!(
                error,
                Error::Handshake {
                    fault: HandshakeFault::Magic,
                    ..
                }
            )
        }),
        (
            "something else",
            (
                packet(&Message::OtherKind {
                    found: Kind::Timeline,
                }),
                0,
            ),
            &|error| matches!(error, Error::Name(NameFault::OtherKind { .. })),
        ),
    ];
    for (what, answer, is_right) in cases {
        std::thread::scope(|scope| {
            let visiting = scope.spawn(|| attach(&scratch).unwrap_err());
            let _socket = liar.receive(&[answer]);
            let error = visiting.join().unwrap();
            assert!(is_right(&error), "{what}: {error}");
        });
    }
}

#[test]
fn a_server_of_another_incarnation_than_the_tickets_is_refused() {
    use crate::memory::ticket::{Ticket, Wanted};
    let scratch = Scratch::new();
    let liar = Liar::new(&scratch);
    let wanted = Wanted {
        id: 0,
        offset: 0,
        bytes: None,
    };
    let ticket = Ticket::new(
        &scratch.domain,
        &name(),
        Kind::Pool,
        Some([2; 16]),
        wanted,
        None,
    )
    .unwrap();
    std::thread::scope(|scope| {
        let visiting = scope.spawn(|| {
            ticket
                .attach(&crate::Device::host(), &[], &Duration::ZERO.into())
                .map(drop)
        });
        let granted = packet(&Message::SessionOpened {
            generation: [1; 16],
            body: vec![],
            fds: 0,
        });
        let _socket = liar.receive(&[(granted, 0)]);
        let error = visiting.join().unwrap().unwrap_err();
        assert!(
            matches!(
                error,
                Error::Handle {
                    fault: HandleFault::Expired { .. },
                    ..
                }
            ),
            "{error}"
        );
    });
}

#[test]
fn unrequested_answers_are_dropped_and_a_silent_server_times_out() {
    alone(
        module_path!(),
        "unrequested_answers_are_dropped_and_a_silent_server_times_out",
        || {
            let scratch = Scratch::new();
            let liar = Liar::new(&scratch);
            let granted = packet(&Message::SessionOpened {
                generation: [1; 16],
                body: vec![],
                fds: 0,
            });
            let (session, socket) = std::thread::scope(|scope| {
                let visiting = scope.spawn(|| attach(&scratch).unwrap());
                let socket = liar.receive(&[(granted, 0)]);
                (visiting.join().unwrap(), socket)
            });
            let before = settled_descriptors();
            let (one, two) = (pipe(), pipe());
            for serial in 0..50 {
                let stray = packet(&Message::Reply {
                    serial: 1000 + serial,
                    body: vec![],
                    fds: 2,
                });
                send_raw(&socket, &stray, &[one.as_fd(), two.as_fd()]).unwrap();
            }
            drop((one, two));
            let late = session
                .request(b"anybody?", Duration::from_millis(100))
                .unwrap_err();
            assert!(matches!(late, Error::Timeout { .. }), "{late}");
            eventually("stray descriptors are closed", || descriptors() <= before);
            let _ = send_raw(&socket, b"nonsense", &[]);
            eventually("nonsense is the end", || session.is_over());
            assert!(matches!(
                session.request(b"?", LONG),
                Err(Error::PeerGone {
                    graceful: false,
                    ..
                })
            ));
        },
    );
}

#[test]
fn a_disconnected_client_gets_the_reason() {
    let scratch = Scratch::new();
    let liar = Liar::new(&scratch);
    let granted = packet(&Message::SessionOpened {
        generation: [1; 16],
        body: vec![],
        fds: 0,
    });
    let (session, socket) = std::thread::scope(|scope| {
        let visiting = scope.spawn(|| attach(&scratch).unwrap());
        let socket = liar.receive(&[(granted, 0)]);
        (visiting.join().unwrap(), socket)
    });
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| session.request(b"anything?", LONG).unwrap_err());
        assert!(matches!(
            hear(&socket),
            Received::Message(Message::Request { .. }, _)
        ));
        send_raw(
            &socket,
            &packet(&Message::Refused {
                denied: false,
                text: "enough".into(),
            }),
            &[],
        )
        .unwrap();
        drop(socket);
        let error = asking.join().unwrap();
        assert!(
            matches!(&error, Error::Refused { denied: false, text, .. } if text == "enough"),
            "{error}"
        );
    });
    for error in [
        session.request(b"?", LONG).unwrap_err(),
        session.post(b"?").unwrap_err(),
        session.owner_gone(),
    ] {
        assert!(
            matches!(&error, Error::Refused { denied: false, text, .. } if text == "enough"),
            "{error}"
        );
    }
}

#[test]
fn a_servers_death_is_reported_when_its_process_is_proven_dead() {
    /// Records its notifications, in order.
    #[derive(Default)]
    struct Witness(Mutex<Vec<&'static str>>);

    impl SessionObserver for Witness {
        fn on_closed(&self, graceful: bool) {
            self.0
                .lock()
                .unwrap()
                .push(if graceful { "closed" } else { "suspect" });
        }

        fn on_proven_dead(&self) {
            self.0.lock().unwrap().push("dead");
        }
    }
    use std::io::{BufRead, BufReader};
    let test = "a_servers_death_is_reported_when_its_process_is_proven_dead";
    if super::stage::role().as_deref() == Some("server") {
        let domain = crate::Domain::from_environment().unwrap();
        let at = Address {
            domain: &domain,
            name: &name(),
            kind: Kind::Pool,
        };
        let _server =
            IpcServer::open(&at, AccessPolicy::default(), Arc::new(Book::default())).unwrap();
        println!("ready");
        let _ = std::io::stdin().read_line(&mut String::new());
        return;
    }
    let scratch = Scratch::new();
    let mut command = super::stage::command(module_path!(), test, "server");
    command
        .env("WARPIPE_DOMAIN", &scratch.path)
        .stdin(std::process::Stdio::piped());
    let mut child = super::stage::Guarded(
        command
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap(),
    );
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
    while !lines.next().unwrap().unwrap().contains("ready") {}
    let at = Address {
        domain: &scratch.domain,
        name: &name(),
        kind: Kind::Pool,
    };
    let (session, _) =
        ClientSession::attach(&at, None, &[1; BODY_BYTES_MAX], Duration::ZERO).unwrap();
    let witness = Arc::new(Witness::default());
    session.observe(witness.clone()).unwrap();
    assert_eq!(session.pid() as u32, child.0.id());
    child.0.kill().unwrap();
    eventually("the death is reported", || {
        witness.0.lock().unwrap().contains(&"dead")
    });
    assert_eq!(*witness.0.lock().unwrap(), ["suspect", "dead"]);
    assert!(session.is_dead());
    let absent = attach(&scratch).unwrap_err();
    assert!(
        matches!(
            absent,
            Error::NotFound {
                was_there: true,
                ..
            }
        ),
        "{absent}"
    );
}
