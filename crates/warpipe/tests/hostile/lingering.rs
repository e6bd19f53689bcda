//! Descriptors with a `close` that takes as long as their sender wants: they block only the thread that
//! closes them.
//!
//! Each test runs twice: with the kernel as it is (from Linux 6.16 on it rejects most of these
//! descriptors), and as with an older one, where all of them are received. A failure here is a
//! hang.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc;
use std::time::Duration;

use rustix::io::Errno;

use super::fake_publisher::{Offer, meet};
use super::publisher_handshake::hello;
use super::stage::{
    LONG, SIZE_SEALS, Scratch, alone, assert_delivers, domain_of_test, eventually, hear, memfd,
    name, packet, role, send_raw, stream,
};
use crate::ipc::PeerState;
use crate::ipc::message::{Message, Received};
use crate::ipc::{
    AccessPolicy, Address, ClientInfo, ClientSession, IpcServer, Kind, OutgoingReply, Rejection,
    RequestHandler, ServerCore,
};
use crate::os::IS_OLD_KERNEL;
use crate::runtime::closer::pending_closes;
use crate::{Device, Error, Loss, Publisher, PublisherOptions, Subscriber};

/// A TCP socket with `SO_LINGER` and unread data: its last `close` returns when this is dropped.
pub(super) struct Lingering {
    socket: Option<OwnedFd>,
    _reader: TcpStream,
}

impl Lingering {
    pub(super) fn new() -> Lingering {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        // Its connections accept no more than this, for any length of time.
        rustix::net::sockopt::set_socket_recv_buffer_size(&listener, 1024).unwrap();
        let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (reader, _) = listener.accept().unwrap();
        socket.set_nonblocking(true).unwrap();
        while socket.write(&[0; 1 << 16]).is_ok() {}
        rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::from_secs(3600))).unwrap();
        Lingering {
            socket: Some(socket.into()),
            _reader: reader,
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_ref().unwrap().as_fd()
    }

    /// Closes this process's own copy: a sender keeps none.
    fn let_go(&mut self) {
        // The last copy if the kernel rejected it, or the peer has closed its own by now.
        let socket = self.socket.take();
        std::thread::spawn(move || drop(socket));
    }
}

/// As [`alone`], once for each kind of kernel.
fn on_both_kernels(test: &str, body: impl Fn()) {
    if role().as_deref() == Some("victim") {
        return victim();
    }
    if role().is_some() {
        IS_OLD_KERNEL.store(
            std::env::var_os("WARPIPE_HOSTILE_OLD_KERNEL").is_some(),
            SeqCst,
        );
        return alone(module_path!(), test, body);
    }
    for is_old in [false, true] {
        let mut command = super::stage::command(module_path!(), test, "alone");
        if is_old {
            command.env("WARPIPE_HOSTILE_OLD_KERNEL", "1");
        }
        // A failure here is a hang, and is killed.
        command.stdout(std::process::Stdio::null());
        let mut process = super::stage::Guarded(command.spawn().unwrap());
        let start = std::time::Instant::now();
        let status = loop {
            match process.0.try_wait().unwrap() {
                Some(status) => break status,
                None => assert!(start.elapsed() < 4 * LONG, "old kernel: {is_old}: it hangs"),
            }
            std::thread::park_timeout(Duration::from_millis(5));
        };
        assert!(status.success(), "old kernel: {is_old}");
    }
}

/// Sends a lingering descriptor with a packet. Returns whether it was accepted: a kernel may reject
/// it.
pub(super) fn throw(socket: impl AsFd, bytes: &[u8], thrown: &mut Vec<Lingering>) -> bool {
    let mut lingering = Lingering::new();
    let sent = send_raw(socket, bytes, &[lingering.fd()]);
    assert!(
        matches!(
            sent,
            Ok(()) | Err(Errno::PERM | Errno::PIPE | Errno::CONNRESET)
        ),
        "{sent:?}"
    );
    lingering.let_go();
    thrown.push(lingering);
    sent.is_ok()
}

/// Runs `work` on a thread of its own, to show that it returns.
pub(super) fn returns<T: Send + 'static>(
    what: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (tell, hears) = mpsc::channel();
    std::thread::spawn(move || tell.send(work()));
    hears
        .recv_timeout(LONG)
        .unwrap_or_else(|error| panic!("{what}: {error}"))
}

/// Checks that hanging threads of this process show only in the count.
pub(super) fn assert_all_goes_on(
    victim: Victim,
    scratch: &Scratch,
    publisher: &Publisher,
    good: &mut Subscriber,
) {
    assert_delivers(publisher, good, b"delivers");
    let beat = |publisher: &Publisher| {
        publisher
            .subscribers()
            .iter()
            .map(|it| it.silent_for)
            .min()
            .unwrap()
    };
    eventually("the reactor writes heartbeats", || {
        beat(publisher) < Duration::from_millis(500)
    });
    assert_eq!(good.publisher().map(|it| it.state), Some(PeerState::Alive));
    // The control thread's work; the rescue is the reactor's.
    assert_delivers(publisher, &mut scratch.subscriber(), b"to somebody new");
    drop(good.receive(&stream(), LONG).unwrap());
    victim.assert_rescue();
}

/// A publisher in another process, which announces a sample that is never complete. It starts
/// before anything lingers: a child has copies of all open descriptors, and `exec` closes them.
pub(super) struct Victim {
    scratch: Scratch,
    process: super::stage::Guarded,
}

impl Victim {
    pub(super) fn start(module: &str, test: &str) -> Victim {
        use std::io::{BufRead, BufReader};
        use std::process::Stdio;
        let scratch = Scratch::new();
        let mut command = super::stage::command(module, test, "victim");
        command
            .env("WARPIPE_HOSTILE_PATH", &scratch.path)
            .stdout(Stdio::piped())
            .stdin(Stdio::piped());
        let mut process = super::stage::Guarded(command.spawn().unwrap());
        let mut lines = BufReader::new(process.0.stdout.take().unwrap()).lines();
        while !lines.next().unwrap().unwrap().contains("ready") {}
        Victim { scratch, process }
    }

    /// A waiting stream of this process is released when it is killed.
    fn assert_rescue(mut self) {
        let (mut subscriber, stream) = (self.scratch.subscriber(), stream());
        writeln!(self.process.0.stdin.as_mut().unwrap()).unwrap();
        let sample = subscriber.receive(&stream, LONG).unwrap();
        self.process.0.kill().unwrap();
        assert!(
            matches!(sample.finish(LONG), Err(Error::Lost(Loss::Sample { .. }))),
            "the rescue comes"
        );
    }
}

/// Announces a sample that is never complete, and waits to be killed.
pub(super) fn victim() {
    let domain = domain_of_test();
    let publisher = Publisher::new("a", domain.on(&Device::host())).unwrap();
    println!("ready");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    let stream = stream();
    stream
        .call(|| std::thread::sleep(Duration::from_secs(3600)))
        .unwrap();
    let sent = publisher.send_bytes(&stream, b"never complete");
    assert!(sent.is_ok(), "{sent:?}");
    loop {
        std::thread::park();
    }
}

#[test]
fn lingering_descriptors_block_no_publisher() {
    let test = "lingering_descriptors_block_no_publisher";
    on_both_kernels(test, || {
        let (scratch, victim) = (Scratch::new(), Victim::start(module_path!(), test));
        let publisher = scratch.publisher(|it| PublisherOptions {
            handshake_timeout: Duration::from_millis(300),
            ..it
        });
        let mut good = scratch.subscriber();
        let (mut thrown, mut came) = (Vec::new(), 0);
        let attached = |scratch: &Scratch| {
            let socket = scratch.connection();
            send_raw(&socket, &packet(&hello()), &[]).unwrap();
            assert!(matches!(
                hear(&socket),
                Received::Message(Message::Welcome { .. }, _)
            ));
            socket
        };
        let words = [
            packet(&hello()),
            packet(&Message::Attached),
            b"nonsense".to_vec(),
            vec![],
        ];
        for first in &words {
            let socket = scratch.connection();
            came += usize::from(throw(&socket, first, &mut thrown));
        }
        for second in &words {
            let socket = attached(&scratch);
            came += usize::from(throw(&socket, second, &mut thrown));
        }
        // Behind a close message, so that it stays unread; and in the wake channel.
        let socket = attached(&scratch);
        send_raw(
            &socket,
            &packet(&Message::Close(crate::ipc::message::CloseReason::Closed)),
            &[],
        )
        .unwrap();
        came += usize::from(throw(&socket, &words[2], &mut thrown));
        let socket = scratch.connection();
        send_raw(&socket, &packet(&hello()), &[]).unwrap();
        let Received::Message(Message::Welcome { .. }, fds) = hear(&socket) else {
            panic!("no welcome")
        };
        came += usize::from(throw(&fds[1], &[1], &mut thrown));
        drop((socket, fds));
        assert_all_goes_on(victim, &scratch, &publisher, &mut good);
        match IS_OLD_KERNEL.load(SeqCst) {
            true => eventually("a thread hangs, and nobody else", || {
                // This test has the last copy of some, and closes it itself.
                throw(scratch.connection(), b"nonsense", &mut thrown);
                pending_closes() > 0
            }),
            false if came == 0 => assert_eq!(pending_closes(), 0),
            false => println!("this kernel lets descriptors in"),
        }
        // A connection that was not accepted goes with the listener.
        returns("the end of the publisher", move || drop(publisher));
        while good.receive(&stream(), LONG).is_ok() {}
        thrown.clear();
        eventually("what hung is closed", || pending_closes() == 0);
    });
}

/// Admits every client.
pub(super) struct Open;

impl RequestHandler for Open {
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
        true
    }
}

/// A handler that runs on the reactor itself.
pub(super) struct Quick;

impl RequestHandler for Quick {
    fn on_connect(
        &self,
        server_core: &ServerCore,
        client: &ClientInfo,
        body: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        Open.on_connect(server_core, client, body)
    }

    fn on_request(
        &self,
        server_core: &ServerCore,
        client: &ClientInfo,
        body: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        Open.on_request(server_core, client, body)
    }

    fn on_suspect(&self, _: &ServerCore, _: &ClientInfo) -> bool {
        true
    }

    fn runs_on_reactor(&self) -> bool {
        true
    }
}

#[test]
fn lingering_descriptors_block_no_server() {
    let test = "lingering_descriptors_block_no_server";
    on_both_kernels(test, || {
        let keeps: [Arc<dyn RequestHandler>; 2] = [Arc::new(Open), Arc::new(Quick)];
        for keep in keeps {
            let (scratch, elsewhere, victim) = (
                Scratch::new(),
                Scratch::new(),
                Victim::start(module_path!(), test),
            );
            let at = Address {
                domain: &scratch.domain,
                name: &name(),
                kind: Kind::Pool,
            };
            let server = IpcServer::open(&at, AccessPolicy::default(), keep).unwrap();
            let publisher = elsewhere.publisher(|it| it);
            let (mut good, mut thrown) = (elsewhere.subscriber(), Vec::new());
            let visit = Message::Hello {
                device: None,
                kind: Kind::Pool,
                body: vec![],
            };
            let words = [
                packet(&visit),
                packet(&Message::Request {
                    serial: 1,
                    body: vec![],
                }),
                b"nonsense".to_vec(),
            ];
            for word in &words {
                let first = scratch.connection();
                throw(&first, word, &mut thrown);
                let second = scratch.connection();
                send_raw(&second, &packet(&visit), &[]).unwrap();
                assert!(matches!(
                    hear(&second),
                    Received::Message(Message::SessionOpened { .. }, _)
                ));
                throw(&second, word, &mut thrown);
            }
            assert_all_goes_on(victim, &elsewhere, &publisher, &mut good);
            let (session, _) = ClientSession::attach(&at, None, b"", Duration::ZERO).unwrap();
            drop(session);
            returns("the drop of the server", move || drop(server));
            thrown.clear();
            eventually("what hung is closed", || pending_closes() == 0);
        }
    });
}

/// Attaches to a publisher that then controls the link: its socket, and both ends of the wake
/// channel.
pub(super) fn misled(
    scratch: &Scratch,
    mislead: impl FnOnce(&OwnedFd, &Offer) + Send,
) -> Subscriber {
    let subscriber = meet(scratch, LONG, |socket| {
        let mut offer = Offer::new();
        offer.regions = 1;
        offer.send(socket);
        let memory = memfd(2 << 20, SIZE_SEALS);
        let region = packet(&Message::Region {
            id: 0,
            bytes: 2 << 20,
        });
        send_raw(socket, &region, &[memory.as_fd()]).unwrap();
        assert!(matches!(
            hear(socket),
            Received::Message(Message::Attached, _)
        ));
        send_raw(socket, &packet(&Message::Attached), &[]).unwrap();
        mislead(socket, &offer);
    });
    subscriber.unwrap()
}

#[test]
fn lingering_descriptors_block_no_subscriber() {
    let test = "lingering_descriptors_block_no_subscriber";
    on_both_kernels(test, || {
        let [one, two, three] = [
            Victim::start(module_path!(), test),
            Victim::start(module_path!(), test),
            Victim::start(module_path!(), test),
        ];
        let (scratch, elsewhere) = (Scratch::new(), Scratch::new());
        let publisher = elsewhere.publisher(|it| it);
        let (mut good, mut thrown) = (elsewhere.subscriber(), Vec::new());
        // In the handshake: in place of the segment, the wake channel and a region, and where no
        // descriptor is due.
        for place in 0..4 {
            let error = meet(&scratch, Duration::from_millis(300), |socket| {
                let mut offer = Offer::new();
                if place < 2 {
                    let mut lingering = Lingering::new();
                    offer.fds[place] = lingering.fd().try_clone_to_owned().unwrap();
                    offer.send(socket);
                    offer.fds.clear();
                    lingering.let_go();
                    thrown.push(lingering);
                } else {
                    offer.regions = 1;
                    offer.send(socket);
                    let due = [
                        Message::Region {
                            id: 0,
                            bytes: 2 << 20,
                        },
                        Message::Attached,
                    ];
                    throw(socket, &packet(&due[place - 2]), &mut thrown);
                }
            });
            assert!(error.is_err(), "{place}");
        }
        assert_all_goes_on(one, &elsewhere, &publisher, &mut good);
        // On an established link.
        let due = [
            packet(&Message::Region {
                id: 1,
                bytes: 2 << 20,
            }),
            packet(&Message::Attached),
            b"nonsense".to_vec(),
        ];
        for bytes in due {
            let mut misled = misled(&scratch, |socket, _| {
                assert!(throw(socket, &bytes, &mut thrown))
            });
            let end = returns("a link's end", move || {
                (misled.receive(&stream(), LONG).map(drop), misled)
            });
            assert!(end.0.is_err());
            returns("the end of a subscriber", move || drop(end));
        }
        assert_all_goes_on(two, &elsewhere, &publisher, &mut good);
        // In the wake channel: the publisher has its other end, and a copy of this one.
        let mut misled = misled(&scratch, |_, offer| {
            let theirs = offer.fds[1].as_fd();
            crate::os::let_descriptors_in(theirs, true);
            throw(offer.wake.as_fd(), &[1], &mut thrown);
        });
        let short = Duration::from_millis(100);
        let misled = returns("a sleep on the wake channel", move || {
            let _ = misled.receive(&stream(), short);
            misled
        });
        returns("the end of a subscriber", move || drop(misled));
        assert_all_goes_on(three, &elsewhere, &publisher, &mut good);
        thrown.clear();
        eventually("what hung is closed", || pending_closes() == 0);
    });
}

#[test]
fn many_lingering_descriptors_are_closed_in_the_end() {
    let test = "many_lingering_descriptors_are_closed_in_the_end";
    on_both_kernels(test, || {
        IS_OLD_KERNEL.store(true, SeqCst);
        let (scratch, victim) = (Scratch::new(), Victim::start(module_path!(), test));
        let publisher = scratch.publisher(|it| it);
        let (mut good, mut thrown) = (scratch.subscriber(), Vec::new());
        // This test has the last copy of some of them: its threads hang then.
        eventually("many hang", || {
            assert!(throw(scratch.connection(), b"nonsense", &mut thrown));
            pending_closes() > 16
        });
        assert_all_goes_on(victim, &scratch, &publisher, &mut good);
        thrown.clear();
        eventually("what hung is closed", || pending_closes() == 0);
    });
}
