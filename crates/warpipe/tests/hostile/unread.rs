//! Clients that read nothing: the descriptors sent to them are in flight, and count for the
//! server's user, until they read or close. So each client keeps counting, however it leaves.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use super::ipc_server::{attach, open, visit};
use super::stage::{LONG, Scratch, alone, eventually, hear, packet, send_raw};
use crate::ipc::AccessPolicy;
use crate::ipc::limits::PeerLimits;
use crate::ipc::message::{CloseReason, Message, Received, wait_readable};
use crate::{Error, HandshakeFault};

const PLACES: u32 = 4;

/// How a client ends its session.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    Close,
    CloseAndShutdown,
    /// Its lifeline ends.
    Death,
}

/// Connects, is answered, and leaves; the answer stays in its socket.
fn come_and_go(scratch: &Scratch, way: Way) -> OwnedFd {
    let socket = scratch.connection();
    let (end, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    send_raw(&socket, &packet(&visit()), &[end.as_fd(), end.as_fd()]).unwrap();
    if way != Way::Death {
        let _ = send_raw(&socket, &packet(&Message::Close(CloseReason::Closed)), &[]);
    }
    if way == Way::CloseAndShutdown {
        let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Write);
    }
    assert!(wait_readable(socket.as_fd(), LONG));
    drop(writer);
    socket
}

#[test]
fn a_client_that_reads_nothing_keeps_counting_however_it_leaves() {
    alone(
        module_path!(),
        "a_client_that_reads_nothing_keeps_counting_however_it_leaves",
        || {
            for way in [Way::Close, Way::CloseAndShutdown, Way::Death] {
                let scratch = Scratch::new();
                let limits = PeerLimits {
                    all: PLACES,
                    ..PeerLimits::default()
                };
                let (_server, book) = open(
                    &scratch,
                    AccessPolicy {
                        limits,
                        ..AccessPolicy::default()
                    },
                );
                let mut sockets = Vec::new();
                for _ in 0..3 {
                    sockets.extend((0..PLACES).map(|_| come_and_go(&scratch, way)));
                    eventually("all have left", || book.here.load(SeqCst) == 0);
                }
                let full = attach(&scratch).map(drop).unwrap_err();
                assert!(
                    matches!(
                        full,
                        Error::Handshake {
                            fault: HandshakeFault::Full { .. },
                            ..
                        }
                    ),
                    "{way:?}: {full}"
                );
                let is_granted = |socket: &OwnedFd| match hear(socket) {
                    Received::Message(Message::SessionOpened { .. }, _) => true,
                    Received::Message(Message::Full { .. }, _) => false,
                    other => panic!("{way:?}: {other:?}"),
                };
                let granted = sockets.iter().filter(|socket| is_granted(socket)).count();
                assert_eq!(granted, PLACES as usize, "{way:?}");
                // Read to the end, and closed.
                drop(sockets);
                let comes = || {
                    attach(&scratch)
                        .map(|session| session.request(b"hello", Duration::from_secs(20)).is_ok())
                };
                eventually("there is room again", || matches!(comes(), Ok(true)));
            }
        },
    );
}
