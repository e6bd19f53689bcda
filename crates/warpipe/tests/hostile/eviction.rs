//! Users that send descriptors that cannot be closed, or connect many times and stay silent: this
//! uses up their own connections, and no other user's. **This module is marked for unsafe**: it
//! gives threads other users.

use std::fs::Permissions;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::lingering::{Lingering, throw};
use super::publisher_handshake::hello;
use super::stage::{
    LONG, Scratch, alone, assert_delivers, eventually, hear, packet, pipe, send_raw,
};
use crate::ipc::limits::eviction_candidate;
use crate::ipc::message::{Message, Received};
use crate::runtime::closer::{PENDING_OF_OTHERS_MAX, pending_closes};
use crate::{
    Device, Domain, Error, HandshakeFault, Publisher, PublisherOptions, Subscriber,
    SubscriberOptions,
};

/// Two users in lanes of their own.
const BAD: u32 = 60_001;
const GOOD: u32 = 60_002;

/// Runs `work` on a thread of another user: its connections have that user. It makes the system
/// call directly, since the library function changes all threads, and one of them may hang.
pub(super) fn as_user<T: Send>(uid: u32, work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let user = scope.spawn(|| {
            // SAFETY: a plain system call that changes this thread alone, which ends soon.
            let answer = unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) };
            assert_eq!(answer, 0);
            work()
        });
        user.join().unwrap()
    })
}

fn open_to_both() -> (Scratch, Publisher) {
    let scratch = Scratch::new();
    std::fs::set_permissions(&scratch.path, Permissions::from_mode(0o755)).unwrap();
    let publisher = scratch.publisher(|it| PublisherOptions {
        allow_uids: vec![BAD, GOOD],
        ..it
    });
    (scratch, publisher)
}

fn subscribe(scratch: &Scratch) -> crate::Result<Subscriber> {
    let domain = Domain::of_user(&scratch.path, 0)?;
    Subscriber::open(
        "a",
        SubscriberOptions {
            handshake_timeout: LONG,
            ..domain.on(&Device::host())
        },
        Duration::ZERO,
    )
}

/// Sends the read end of a pipe where no descriptor is due. Returns the other end.
fn send_pipe(scratch: &Scratch) -> OwnedFd {
    let (end, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    send_raw(scratch.connection(), b"nonsense", &[end.as_fd()]).unwrap();
    writer
}

fn is_closed(writer: &OwnedFd) -> bool {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut [PollFd::new(writer, PollFlags::empty())], Some(&now)).unwrap() == 1
}

#[test]
fn descriptors_of_one_user_that_do_not_close_affect_no_other_user() {
    alone(
        module_path!(),
        "descriptors_of_one_user_that_do_not_close_affect_no_other_user",
        || {
            if !rustix::process::geteuid().is_root() {
                return println!("skipped: only root can become another user");
            }
            let (scratch, publisher) = open_to_both();
            let mut thrown: Vec<Lingering> = Vec::new();
            as_user(BAD, || {
                eventually("many hang", || {
                    if thrown.len() < 2 * PENDING_OF_OTHERS_MAX {
                        throw(scratch.connection(), b"nonsense", &mut thrown);
                    }
                    pending_closes() > 16
                });
            });
            let [good, own] = [as_user(GOOD, || send_pipe(&scratch)), send_pipe(&scratch)];
            eventually("others' descriptors are closed", || {
                is_closed(&good) && is_closed(&own)
            });
            as_user(BAD, || {
                // A thread that only got no processor may count as stuck, so each of these may take
                // a while.
                eventually("it is refused", || {
                    if pending_closes() < PENDING_OF_OTHERS_MAX + 4
                        && thrown.len() < 4 * PENDING_OF_OTHERS_MAX
                    {
                        throw(scratch.connection(), b"nonsense", &mut thrown);
                    }
                    let socket = scratch.connection();
                    send_raw(&socket, b"nonsense", &[]).unwrap_or_default();
                    matches!(hear(&socket), Received::Message(Message::Refused { denied: false, text }, _)
                    if text.contains(&format!("that uid {BAD} sent cannot be closed")))
                });
                assert!(pending_closes() >= PENDING_OF_OTHERS_MAX);
                eventually("it cannot come in", || {
                    let error = subscribe(&scratch).map(drop).err();
                    matches!(
                        error,
                        Some(Error::Handshake {
                            fault: HandshakeFault::Refused(_),
                            ..
                        })
                    )
                });
            });
            if crate::os::let_descriptors_in(scratch.connection().as_fd(), true) {
                let pipe = pipe();
                eventually("what it sends does not even come", || {
                    let socket = as_user(BAD, || scratch.connection());
                    send_raw(&socket, b"nonsense", &[pipe.as_fd()]) == Err(Errno::PERM)
                });
            }
            assert_delivers(
                &publisher,
                &mut as_user(GOOD, || subscribe(&scratch)).unwrap(),
                b"to another user",
            );
            assert_delivers(&publisher, &mut scratch.subscriber(), b"and to its own");
            thrown.clear();
            eventually("what hung is closed", || pending_closes() == 0);
            eventually("it may come again", || {
                as_user(BAD, || subscribe(&scratch)).is_ok()
            });
        },
    );
}

#[test]
fn one_users_silent_connections_are_evicted_for_other_users() {
    alone(
        module_path!(),
        "one_users_silent_connections_are_evicted_for_other_users",
        || {
            if !rustix::process::geteuid().is_root() {
                return println!("skipped: only root can become another user");
            }
            let scratch = Scratch::new();
            std::fs::set_permissions(&scratch.path, Permissions::from_mode(0o755)).unwrap();
            let _publisher = scratch.publisher(|it| PublisherOptions {
                allow_uids: vec![BAD],
                handshake_timeout: 10 * LONG,
                ..it
            });
            // The first and slowest connection.
            let slow = scratch.connection();
            let connections: Vec<OwnedFd> =
                as_user(BAD, || (0..200).map(|_| scratch.connection()).collect());
            // Some connections were refused: so the publisher has seen all but the last ones.
            let is_refused = |socket: &OwnedFd| is_readable(socket);
            eventually("they are evicted", || {
                connections
                    .iter()
                    .filter(|socket| is_refused(socket))
                    .count()
                    >= 100
            });
            send_raw(&slow, &packet(&hello()), &[]).unwrap();
            let welcome = hear(&slow);
            assert!(
                matches!(welcome, Received::Message(Message::Welcome { .. }, _)),
                "{welcome:?}"
            );
        },
    );
}

fn is_readable(socket: &OwnedFd) -> bool {
    crate::ipc::message::wait_readable(socket.as_fd(), Duration::ZERO)
}

#[test]
fn the_oldest_connection_of_the_user_with_the_most_is_evicted() {
    assert_eq!(eviction_candidate([].into_iter()), None);
    assert_eq!(
        eviction_candidate([(7, 1), (3, 2), (9, 2), (5, 2), (4, 1)].into_iter()),
        Some(3)
    );
    assert_eq!(
        eviction_candidate([(7, 1), (3, 2)].into_iter()),
        Some(3),
        "of as many, the oldest of all"
    );
}
