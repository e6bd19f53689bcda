//! A user with the most descriptors in flight that it may have (`RLIMIT_NOFILE`, `unix(7)`): the
//! next send is an error of the sender, not of the receiver.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::eviction::as_user;
use super::stage::{Scratch, alone, assert_delivers, eventually, pipe, send_raw};
use crate::Layout;
use crate::ipc::PeerState;

/// A user with a count of its own.
const SENDER: u32 = 60_003;

/// Sends as many descriptors as this thread's user may have in flight; they stay there until this
/// is dropped.
fn fill() -> Vec<(OwnedFd, OwnedFd)> {
    let (pipe, mut sockets) = (pipe(), Vec::new());
    let fds: Vec<BorrowedFd<'_>> = vec![pipe.as_fd(); 100];
    loop {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .unwrap();
        let sent = send_raw(&pair.0, b"x", &fds);
        sockets.push(pair);
        match sent {
            Ok(()) => assert!(sockets.len() < 100, "no limit"),
            Err(error) => {
                assert_eq!(error, Errno::TOOMANYREFS);
                return sockets;
            }
        }
    }
}

#[test]
fn a_region_that_cannot_be_sent_is_an_error_of_the_loan_and_ends_no_link() {
    alone(
        module_path!(),
        "a_region_that_cannot_be_sent_is_an_error_of_the_loan_and_ends_no_link",
        || {
            if !rustix::process::geteuid().is_root() {
                return println!("skipped: only root can become another user");
            }
            let scratch = Scratch::new();
            let publisher = scratch.publisher(|it| it);
            let mut subscriber = scratch.subscriber();
            assert_delivers(&publisher, &mut subscriber, b"before");
            let maximum = getrlimit(Resource::Nofile).maximum;
            setrlimit(
                Resource::Nofile,
                Rlimit {
                    current: Some(1024),
                    maximum,
                },
            )
            .unwrap();
            let large = Layout::bytes_only(64 << 20).unwrap();
            as_user(SENDER, || {
                let full = fill();
                let error = publisher.loan(&large).map(drop).unwrap_err();
                assert!(
                    error.is_descriptor_limit() && error.to_string().contains("(soft limit 1024)"),
                    "{error}"
                );
                let links = publisher.subscribers();
                assert!(
                    links.iter().all(|it| it.state == PeerState::Alive),
                    "{links:?}"
                );
                drop(full);
            });
            eventually("it gets the region later", || {
                publisher.loan(&large).is_ok()
            });
            assert_delivers(&publisher, &mut subscriber, &vec![7; 64 << 20]);
            assert_eq!(publisher.subscribers().len(), 1);
        },
    );
}
