//! Members that misbehave, played by this process.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::*;
use crate::error::NameFault;
use crate::fork::CloseOnForkFd;
use crate::ipc::domain::{Author, Domain};
use crate::ipc::message::{self, CloseReason, Message};
use crate::shm::page::{PAGE_BYTES, SharedPage};

const WAIT: Duration = Duration::from_secs(10);

/// Listens under a member's name and answers at will.
struct Impostor {
    domain: Domain,
    listener: OwnedFd,
    page: SharedPage,
    fd: CloseOnForkFd,
}

impl Impostor {
    fn new(title: &str) -> Impostor {
        let folder =
            std::env::temp_dir().join(format!("warpipe-impostor-{title}-{}", std::process::id()));
        let domain = Domain::at(&folder).unwrap();
        let listener = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        let path = domain.path().join("members+impostor.sock");
        rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&listener, 8).unwrap();
        let (page, fd) = SharedPage::create(None, PAGE_BYTES).unwrap();
        Impostor {
            domain,
            listener,
            page,
            fd,
        }
    }

    fn introduction(&self) -> Introduction {
        let author = Author::own();
        Introduction {
            role: "impostor".into(),
            author,
            since_ns: 1,
            page_bytes: PAGE_BYTES as u32,
        }
    }

    /// Accepts a watch and grants it its request.
    fn grant(&self, introduction: &Introduction, generation: [u8; 16]) -> OwnedFd {
        assert!(
            message::wait_readable(self.listener.as_fd(), WAIT),
            "nobody calls"
        );
        let socket = rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC).unwrap();
        let body = postcard::to_stdvec(introduction).unwrap();
        let granted = Message::SessionOpened {
            generation,
            body,
            fds: 1,
        };
        message::send(socket.as_fd(), &granted, &[self.fd.as_fd()]).unwrap();
        socket
    }
}

impl Drop for Impostor {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.domain.path());
    }
}

fn joined(members: &Members) -> MemberInfo {
    match members.changes(WAIT).unwrap() {
        Some(Change::Joined(member)) => member,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_member_whose_socket_closes_while_its_process_lives_is_suspect_and_not_dead() {
    let impostor = Impostor::new("suspect");
    std::thread::scope(|scope| {
        let watching = scope.spawn(|| Members::new(impostor.domain.options()).unwrap());
        let socket = impostor.grant(&impostor.introduction(), [7; 16]);
        let members = watching.join().unwrap();
        assert_eq!(joined(&members).name, "impostor");
        drop(socket);
        // The watch connects again, and the incarnation is the same: the only change is that its
        // heartbeat, which never beat, stalls.
        let socket = impostor.grant(&impostor.introduction(), [7; 16]);
        assert!(matches!(
            members.changes(WAIT).unwrap(),
            Some(Change::Stalled(_))
        ));
        drop(socket);
        // Another incarnation joins; the first is still suspect, for its process is alive.
        let socket = impostor.grant(&impostor.introduction(), [8; 16]);
        assert_eq!(joined(&members).generation, [8; 16]);
        let states: Vec<PeerState> = members.states();
        assert!(
            states.contains(&PeerState::Suspect) && states.len() == 2,
            "{states:?}"
        );
        message::send(socket.as_fd(), &Message::Close(CloseReason::Closed), &[]).unwrap();
        drop(socket);
        // Its heartbeat does not beat either.
        let told = std::iter::from_fn(|| members.changes(WAIT).unwrap())
            .find(|change| !change.is_of_heartbeat());
        assert!(matches!(told, Some(Change::Left(member)) if member.generation == [8; 16]));
    });
}

#[test]
fn a_heartbeat_from_the_future_is_none() {
    let impostor = Impostor::new("future");
    impostor
        .page
        .at::<AtomicU64>(HEARTBEAT)
        .store(u64::MAX, Relaxed);
    std::thread::scope(|scope| {
        let watching = scope.spawn(|| Members::new(impostor.domain.options()).unwrap());
        let _socket = impostor.grant(&impostor.introduction(), [7; 16]);
        let members = watching.join().unwrap();
        joined(&members);
        assert!(
            matches!(members.changes(WAIT).unwrap(), Some(Change::Stalled(_))),
            "it does not beat"
        );
        impostor.page.at::<AtomicU64>(HEARTBEAT).store(0, Relaxed);
        assert!(
            matches!(members.changes(WAIT).unwrap(), Some(Change::Recovered(_))),
            "it has beaten, whatever it says"
        );
    });
}

#[test]
fn an_introduction_that_no_member_would_make_is_no_member() {
    let impostor = Impostor::new("lies");
    let right = impostor.introduction();
    let lies = [
        Introduction {
            role: "x".repeat(ROLE_BYTES_MAX + 1),
            ..right.clone()
        },
        Introduction {
            role: "two\nlines".into(),
            ..right.clone()
        },
        Introduction {
            author: Author {
                pid: 0,
                ..Author::own()
            },
            ..right.clone()
        },
        Introduction {
            page_bytes: 0,
            ..right.clone()
        },
        Introduction {
            page_bytes: u32::MAX,
            ..right.clone()
        },
        Introduction {
            page_bytes: 2 * PAGE_BYTES as u32,
            ..right.clone()
        },
    ];
    for lie in lies {
        std::thread::scope(|scope| {
            let watching = scope.spawn(|| Members::new(impostor.domain.options()).unwrap());
            let _socket = impostor.grant(&lie, [7; 16]);
            let members = watching.join().unwrap();
            assert!(members.list().unwrap().is_empty(), "{lie:?}");
            assert_eq!(members.changes(Duration::ZERO).unwrap(), None, "{lie:?}");
        });
    }
}

#[test]
fn a_role_or_a_name_that_cannot_be_is_refused_before_anything_is_made() {
    let folder = std::env::temp_dir().join(format!("warpipe-member-names-{}", std::process::id()));
    let domain = Domain::at(&folder).unwrap();
    let long = "n".repeat(crate::NAME_BYTES_MAX);
    for name in ["", "../up", "a//b", &long] {
        assert!(
            matches!(
                Member::new(name, domain.options()),
                Err(Error::Name(NameFault::Invalid { .. }))
            ),
            "{name:?}"
        );
    }
    for role in ["\u{7}", &"r".repeat(ROLE_BYTES_MAX + 1)] {
        assert!(
            matches!(
                Member::new(
                    "a",
                    MemberOptions {
                        role: role.into(),
                        ..domain.options()
                    }
                ),
                Err(Error::Argument {
                    argument: "role",
                    ..
                })
            ),
            "{role:?}"
        );
    }
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
    std::fs::remove_dir(folder).unwrap();
}
