use std::sync::mpsc::{Receiver, Sender, channel};

use super::*;
use crate::backoff::Backoff;
use crate::error::NameFault;
use crate::fuzzing::packet;
use crate::hostile::{in_a_forked_child, leave_descriptors, raise_descriptor_limit, send_raw};
use crate::ipc::Address;
use crate::ipc::HANDSHAKE_TIMEOUT;
use crate::ipc::client_handshake::{ClientHandshake, HandshakeLimit};
use crate::ipc::domain::{Domain, EndpointName};
use crate::runtime::reactor::CLOSED_BEFORE;

const LONG: Duration = Duration::from_secs(60);

/// Keeps its connections. All pending ones are too late while it takes one.
struct Owner {
    acceptor: Arc<Acceptor>,
    connections: Mutex<Sender<Connection>>,
}

impl EventSource for Owner {
    fn on_ready(&self, _: u64) -> Next {
        Next::Stop
    }
}

impl ConnectionOwner for Owner {
    fn on_connection(&self, connection: Connection, _: Hello) {
        self.acceptor.state.locked().pending.clear();
        self.connections.lock().unwrap().send(connection).unwrap();
    }
}

struct Scene {
    folder: std::path::PathBuf,
    domain: Domain,
    name: EndpointName,
    owner: Arc<Owner>,
    connections: Receiver<Connection>,
}

impl Scene {
    fn new(title: &str) -> Scene {
        let scene = Scene::before_listening(title);
        scene.owner.acceptor.listen().unwrap();
        scene
    }

    /// Connections wait in the backlog until [`Acceptor::listen`] is called.
    fn before_listening(title: &str) -> Scene {
        let folder = format!("warpipe-acceptor-{title}-{}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        let domain = Domain::at(&folder).unwrap();
        let name = EndpointName::new("a").unwrap();
        let claim = domain.claim(&name, false).unwrap();
        let options = AcceptorOptions {
            name: "a".into(),
            kind: Kind::Timeline,
            access_policy: AccessPolicy::default(),
            handshake_timeout: HANDSHAKE_TIMEOUT,
            runs_on_control_thread: false,
        };
        let (tx, connections) = channel();
        let reactor = Reactor::of_process().unwrap();
        let owner = Arc::new_cyclic(|me: &Weak<Owner>| Owner {
            acceptor: Acceptor::new(claim, options, &reactor, me.clone()),
            connections: Mutex::new(tx),
        });
        Scene {
            folder,
            domain,
            name,
            owner,
            connections,
        }
    }

    /// A connection of this process that has sent nothing.
    fn pending(&self) -> ClientHandshake {
        let at = Address {
            domain: &self.domain,
            name: &self.name,
            kind: Kind::Timeline,
        };
        let limit = HandshakeLimit::of(LONG);
        let before = self.owner.acceptor.state.locked().pending.len();
        let socket = self
            .domain
            .connect(&self.name, Kind::Publisher, Some(&limit))
            .unwrap();
        let mut backoff = Backoff::default();
        while self.owner.acceptor.state.locked().pending.len() == before {
            backoff.pause();
        }
        ClientHandshake::new(&at, socket).unwrap()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.owner.acceptor.close();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[test]
fn a_handshake_does_not_time_out_because_this_process_stood_still() {
    let scene = Scene::new("frozen");
    let client = scene.pending();
    for pending in scene.owner.acceptor.state.locked().pending.values() {
        pending.clock.freeze(100 * HANDSHAKE_TIMEOUT);
    }
    // The client stood still, too, and sends its `Hello` when both go on.
    scene.owner.acceptor.tick();
    assert_eq!(scene.owner.acceptor.state.locked().pending.len(), 1);
    client.hello(None, &[], &HandshakeLimit::of(LONG)).unwrap();
    scene.connections.recv_timeout(LONG).unwrap();
}

/// Otherwise another thread's descriptor with the same number is watched no longer.
#[test]
fn the_registration_of_a_refused_connection_ends_before_its_socket_is_closed() {
    let scene = Scene::new("refused");
    let (before, mut others) = (CLOSED_BEFORE.load(Ordering::Relaxed), Vec::new());
    for _ in 0..10 {
        let mut client = scene.pending();
        client.kind = Kind::Pool;
        client.hello(None, &[], &HandshakeLimit::of(LONG)).unwrap();
        let refused = client.wait(&HandshakeLimit::of(LONG)).unwrap_err();
        assert!(
            matches!(refused, Error::Name(NameFault::OtherKind { .. })),
            "{refused}"
        );
        // The thread that accepts this one is through with the one before.
        others.push(scene.pending());
    }
    assert_eq!(CLOSED_BEFORE.load(Ordering::Relaxed), before);
}

#[test]
fn a_connection_with_its_owner_is_ended_neither_by_a_tick_nor_by_an_eviction() {
    let scene = Scene::new("owned");
    let client = scene.pending();
    let silent = scene.pending();
    client
        .hello(None, b"body", &HandshakeLimit::of(LONG))
        .unwrap();
    let connection = scene.connections.recv_timeout(LONG).unwrap();
    let socket = connection.socket.as_fd();
    message::send(socket, &Message::Attached, &[]).unwrap();
    let (answer, _) = client.wait(&HandshakeLimit::of(LONG)).unwrap();
    assert_eq!(answer, Message::Attached);
    assert!(
        silent.wait(&HandshakeLimit::of(LONG)).is_err(),
        "it was too late"
    );
}

#[test]
fn an_acceptor_that_is_closed_takes_no_connection_that_comes_meanwhile() {
    let scene = Scene::new("closed");
    let client = scene.pending();
    scene.owner.acceptor.close();
    let limit = HandshakeLimit::of(Duration::ZERO);
    assert!(
        scene
            .domain
            .connect(&scene.name, Kind::Publisher, Some(&limit))
            .is_err()
    );
    assert!(client.wait(&HandshakeLimit::of(LONG)).is_err());
    assert!(scene.connections.try_recv().is_err());
}

/// Sends a `Hello` to the acceptor. It is not that of this process's lifeline, so that the acceptor
/// has to make it.
fn connect(scene: &Scene) -> (PeerSocket, impl Drop) {
    let limit = HandshakeLimit::of(LONG);
    let client = scene
        .domain
        .connect(&scene.name, Kind::Publisher, Some(&limit))
        .unwrap();
    let hello = Message::Hello {
        device: None,
        kind: Kind::Timeline,
        body: Vec::new(),
    };
    let pipes = [(); 2].map(|()| rustix::pipe::pipe().unwrap());
    let ends = pipes.each_ref().map(|(end, _)| end.as_fd());
    send_raw(client.as_fd(), &packet(&hello), &ends).unwrap();
    (client, Vec::from(pipes))
}

/// Whether a peer that comes when the acceptor has room for `spare` descriptors, in a process
/// without a link so far, is admitted or refused for that reason, and the next one is admitted.
fn is_refused_without_room(spare: usize) -> bool {
    let scene = Scene::before_listening(&format!("short-{spare}"));
    let (client, _lifeline) = connect(&scene);
    leave_descriptors(spare);
    scene.owner.acceptor.listen().unwrap();
    let mut backoff = Backoff::default();
    let is_answered = || message::wait_readable(client.as_fd(), Duration::ZERO);
    let early = loop {
        match scene.connections.try_recv() {
            Ok(connection) => break Some(connection),
            Err(_) if is_answered() => break None,
            Err(_) => backoff.pause(),
        }
    };
    raise_descriptor_limit();
    let answer = message::receive(client.as_fd(), "a");
    let is_refused = matches!(answer, Ok(Received::Message(Message::NoRoom { .. }, _)));
    assert_ne!(early.is_some(), is_refused, "{spare}: {answer:?}");
    let _next = connect(&scene);
    let mut next = None;
    while next.is_none() {
        // As a tick does.
        scene.owner.acceptor.listen().unwrap();
        next = scene.connections.try_recv().ok();
        backoff.pause();
    }
    true
}

#[test]
fn a_peer_without_room_for_it_is_refused_and_the_next_one_is_admitted() {
    // The first for the reserve, in the place of which the connection comes; the others for the
    // pidfd, both lifelines and the pair of sockets that this process's own lifeline is kept in.
    for spare in 1..=12 {
        in_a_forked_child(|| is_refused_without_room(spare));
    }
}
