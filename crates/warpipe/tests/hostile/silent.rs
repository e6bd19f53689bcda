//! Descriptors of a file system that does not answer: they block no thread, since no code queries
//! it.
//!
//! **This module is marked for unsafe**: it forks. A failure here is a hang, on a thread of its own
//! that ends with the process.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::pipe::PipeFlags;
use rustix::process::PidfdFlags;

use super::fake_publisher::{Offer, meet};
use super::fuse::{Closing, Silent};
use super::lingering::{Open, Quick, Victim, assert_all_goes_on, misled, returns, victim};
use super::publisher_handshake::hello;
use super::stage::{
    LONG, SIZE_SEALS, Scratch, alone, assert_delivers, eventually, hear, memfd, name, packet, pipe,
    role, send_raw, stream,
};
use crate::backend::{Access, DeviceId};
use crate::fork::CloseOnForkFd;
use crate::ipc::message::{Message, Received, wait_readable};
use crate::ipc::peer::Process;
use crate::ipc::{AccessPolicy, Address, ClientSession, IpcServer, Kind, RequestHandler};
use crate::memory::region::Region;
use crate::runtime::closer::{PeerFd, pending_closes};
use crate::runtime::doorbell::PeerDoorbell;
use crate::shm::page::{PAGE_BYTES, SharedPage};
use crate::{Device, Subscriber};

/// Two descriptors of such a file: opened, and merely located.
fn silent() -> Option<(Silent, [OwnedFd; 2])> {
    let mut silent = Silent::new()?;
    let located = silent.locate();
    let opened = silent.open(1, Closing::Returns).remove(0);
    Some((silent, [opened, located]))
}

/// As [`alone`], with a role for the process that dies.
fn in_a_process(test: &str, body: impl Fn(Silent, [OwnedFd; 2])) {
    if role().as_deref() == Some("victim") {
        return victim();
    }
    alone(module_path!(), test, || {
        silent()
            .into_iter()
            .for_each(|(silent, files)| body(silent, files))
    });
}

fn start(test: &str) -> Victim {
    Victim::start(module_path!(), test)
}

#[test]
fn checking_a_descriptor_calls_no_file_system() {
    let test = "checking_a_descriptor_calls_no_file_system";
    in_a_process(test, |silent, files| {
        type Taker = fn(&dyn Fn() -> PeerFd) -> bool;
        let takers: [(&str, Taker); 6] = [
            ("a page", |fd| {
                SharedPage::open(None, fd(), PAGE_BYTES, "test").is_err()
            }),
            ("a page to be read, or the words of a history", |fd| {
                SharedPage::read(fd(), PAGE_BYTES, "test").is_err()
            }),
            ("a page of two", |fd| {
                SharedPage::seal(&Device::host(), fd(), PAGE_BYTES, "test").is_err()
            }),
            ("a region", |fd| {
                let owner: DeviceId = Device::host().info().id;
                Region::import(
                    &Device::host(),
                    &[fd().as_fd()],
                    2 << 20,
                    Access::Read,
                    owner,
                )
                .is_err()
            }),
            ("a wake channel", |fd| PeerDoorbell::adopt(fd()).is_err()),
            ("a process", |fd| {
                let own = || {
                    let own = rustix::process::getpid();
                    PeerFd::from(
                        CloseOnForkFd::open(|| {
                            rustix::process::pidfd_open(own, PidfdFlags::empty())
                        })
                        .unwrap(),
                    )
                };
                let live = || PeerFd::from(CloseOnForkFd::new(pipe()).unwrap());
                [
                    [fd(), live(), live()],
                    [own(), fd(), live()],
                    [own(), live(), fd()],
                ]
                .into_iter()
                .all(|process| Process::relayed(process).is_err())
            }),
        ];
        for (what, take) in takers {
            for file in &files {
                let file = file.try_clone().unwrap();
                let copy = move || PeerFd::from(CloseOnForkFd::duplicate(&file).unwrap());
                assert!(returns(what, move || take(&copy)), "{what}");
            }
        }
        drop(files);
        silent.abort();
    });
}

#[test]
fn files_that_do_not_answer_block_no_publisher() {
    let test = "files_that_do_not_answer_block_no_publisher";
    in_a_process(test, |silent, files| {
        let (scratch, victim) = (Scratch::new(), start(test));
        let publisher = scratch.publisher(|it| it);
        let (mut good, live) = (scratch.subscriber(), pipe());
        for file in &files {
            for lifeline in [[file.as_fd(), file.as_fd()], [live.as_fd(), file.as_fd()]] {
                let socket = scratch.connection();
                send_raw(&socket, &packet(&hello()), &lifeline).unwrap();
                assert!(matches!(
                    hear(&socket),
                    Received::Message(Message::Refused { .. }, _)
                ));
            }
        }
        assert_all_goes_on(victim, &scratch, &publisher, &mut good);
        silent.abort();
    });
}

#[test]
fn files_that_do_not_answer_block_no_server() {
    let test = "files_that_do_not_answer_block_no_server";
    in_a_process(test, |silent, files| {
        let keeps: [Arc<dyn RequestHandler>; 2] = [Arc::new(Open), Arc::new(Quick)];
        for keep in keeps {
            let (scratch, elsewhere, victim) = (Scratch::new(), Scratch::new(), start(test));
            let at = Address {
                domain: &scratch.domain,
                name: &name(),
                kind: Kind::Pool,
            };
            let server = IpcServer::open(&at, AccessPolicy::default(), keep).unwrap();
            let publisher = elsewhere.publisher(|it| it);
            let mut good = elsewhere.subscriber();
            let visit = Message::Hello {
                device: None,
                kind: Kind::Pool,
                body: vec![],
            };
            for file in &files {
                let socket = scratch.connection();
                send_raw(&socket, &packet(&visit), &[file.as_fd(), file.as_fd()]).unwrap();
                assert!(matches!(
                    hear(&socket),
                    Received::Message(Message::Refused { .. }, _)
                ));
            }
            assert_all_goes_on(victim, &elsewhere, &publisher, &mut good);
            drop(ClientSession::attach(&at, None, b"", Duration::ZERO).unwrap());
            drop(server);
        }
        silent.abort();
    });
}

/// A publisher that offers this file as one descriptor of its welcome, or as its region.
fn offered(file: OwnedFd, place: usize) -> crate::Result<Subscriber> {
    let scratch = Scratch::new();
    meet(&scratch, Duration::from_secs(2), |socket| {
        let mut offer = Offer::new();
        let ends = [pipe(), pipe()];
        offer.fds.extend(ends);
        offer.regions = 1;
        if place < 4 {
            offer.fds[place] = file;
            return offer.send(socket);
        }
        // The lifeline of this process: a pipe has ended when its writer is closed.
        offer.fds.truncate(2);
        offer.send(socket);
        let due = [
            Message::Region {
                id: 0,
                bytes: 2 << 20,
            },
            Message::Completions { bytes: 4096 },
        ];
        send_raw(socket, &packet(&due[place - 4]), &[file.as_fd()]).unwrap();
    })
}

#[test]
fn files_that_do_not_answer_block_no_subscriber() {
    let test = "files_that_do_not_answer_block_no_subscriber";
    in_a_process(test, |silent, files| {
        let [one, two] = [start(test), start(test)];
        let (scratch, elsewhere) = (Scratch::new(), Scratch::new());
        let publisher = elsewhere.publisher(|it| it);
        let mut good = elsewhere.subscriber();
        for place in 0..6 {
            for file in &files {
                let file = file.try_clone().unwrap();
                assert!(
                    returns("a handshake", move || offered(file, place)).is_err(),
                    "{place}"
                );
            }
        }
        assert_all_goes_on(one, &elsewhere, &publisher, &mut good);
        // The control thread handles a region on an established link.
        for file in &files {
            let mut misled = misled(&scratch, |socket, _| {
                send_raw(
                    socket,
                    &packet(&Message::Region {
                        id: 1,
                        bytes: 2 << 20,
                    }),
                    &[file.as_fd()],
                )
                .unwrap();
            });
            let end = returns("a link's end", move || {
                (misled.receive(&stream(), LONG).map(drop), misled)
            });
            assert!(end.0.is_err());
        }
        assert_all_goes_on(two, &elsewhere, &publisher, &mut good);
        silent.abort();
    });
}

/// The result of a connection to a server that answers with these descriptors, the last two as its
/// lifeline.
fn visited(fds: Vec<OwnedFd>) -> crate::Result<()> {
    let scratch = Scratch::new();
    let claim = scratch.domain.claim(&name(), false)?;
    std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            assert!(wait_readable(claim.listener().as_fd(), LONG));
            let socket = rustix::net::accept(claim.listener()).unwrap();
            assert!(matches!(
                hear(&socket),
                Received::Message(Message::Hello { .. }, _)
            ));
            let granted = Message::SessionOpened {
                generation: [7; 16],
                body: vec![],
                fds: fds.len() as u8 - 2,
            };
            let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
            send_raw(&socket, &packet(&granted), &fds).unwrap();
            socket
        });
        let at = Address {
            domain: &scratch.domain,
            name: &name(),
            kind: Kind::Pool,
        };
        let visit = ClientSession::attach(&at, None, b"", Duration::ZERO).map(drop);
        drop(server.join().unwrap());
        visit
    })
}

#[test]
fn files_that_do_not_answer_block_no_client() {
    let test = "files_that_do_not_answer_block_no_client";
    in_a_process(test, |silent, files| {
        let (scratch, victim) = (Scratch::new(), start(test));
        let publisher = scratch.publisher(|it| it);
        let mut good = scratch.subscriber();
        for file in &files {
            let copy = || file.try_clone().unwrap();
            let [lifeline, all] = [
                vec![copy(), copy()],
                vec![memfd(4096, SIZE_SEALS), copy(), copy()],
            ];
            for fds in [lifeline, all] {
                assert!(returns("a visit", move || visited(fds)).is_err());
            }
        }
        assert_all_goes_on(victim, &scratch, &publisher, &mut good);
        silent.abort();
    });
}

#[test]
fn a_process_forks_while_many_files_cannot_be_closed() {
    const LIFELINES: usize = 20;
    alone(
        module_path!(),
        "a_process_forks_while_many_files_cannot_be_closed",
        || {
            let Some(mut silent) = Silent::new() else {
                return;
            };
            let mut files = silent.open(1, Closing::Hangs);
            let file = files.remove(0);
            let scratch = Scratch::new();
            let publisher = scratch.publisher(|it| it);
            let mut good = scratch.subscriber();
            for _ in 0..LIFELINES {
                let socket = scratch.connection();
                send_raw(&socket, &packet(&hello()), &[file.as_fd(), file.as_fd()]).unwrap();
                assert!(matches!(
                    hear(&socket),
                    Received::Message(Message::Refused { .. }, _)
                ));
            }
            eventually("all of them wait", || pending_closes() == 2 * LIFELINES);
            let (ready_reader, ready_writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).unwrap();
            let child = returns("fork", move || {
                // SAFETY: the child makes system calls alone.
                match unsafe { libc::fork() } {
                    0 => {
                        let _ = rustix::io::write(&ready_writer, b"x");
                        // SAFETY: ends the process, or waits for the end of the connection, since
                        // it has those files.
                        unsafe { libc::_exit(0) }
                    }
                    child => child,
                }
            });
            assert!(
                wait_readable(ready_reader.as_fd(), LONG),
                "the child is there"
            );
            assert_eq!(rustix::io::read(&ready_reader, &mut [0; 2]), Ok(1));
            assert_delivers(&publisher, &mut good, b"and so is its parent");
            silent.abort();
            // SAFETY: waits for a child of this process.
            let answer = unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
            assert_eq!(answer, child);
            eventually("what hung is closed", || pending_closes() == 0);
            drop(file);
        },
    );
}
