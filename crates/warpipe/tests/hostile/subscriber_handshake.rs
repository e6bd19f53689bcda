//! Fake publishers against a real subscriber: it declines every wrong offer with the reason and
//! keeps nothing.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc;
use std::time::Duration;

use rustix::fs::SealFlags;
use warpipe_testkit::Rng;

use super::descriptors::{descriptors, settled_descriptors};
use super::fake_publisher::{Offer, meet};
use super::stage::{
    LONG, SIZE_SEALS, Scratch, alone, assert_delivers, eventually, hear, hugetlb_memfd, memfd,
    packet, pipe, random_bytes, send_raw,
};
use crate::backend::{DeviceId, DeviceKind};
use crate::ipc::message::{Message, Received};
use crate::runtime::reactor::Reactor;
use crate::shm::segment::bytes_for;
use crate::{DeviceFault, Error, HandshakeFault};

type Script = Box<dyn FnOnce(&OwnedFd) + Send>;
type Judge = fn(&Error) -> bool;

fn offer(spoil: impl FnOnce(&mut Offer) + Send + 'static) -> Script {
    Box::new(|socket| {
        let mut offer = Offer::new();
        spoil(&mut offer);
        offer.send(socket);
    })
}

/// A valid welcome, and then one region made by `region`.
fn region(id: u32, bytes: u64, fd: impl FnOnce() -> Vec<OwnedFd> + Send + 'static) -> Script {
    Box::new(move |socket| {
        let mut offer = Offer::new();
        offer.regions = 1;
        offer.send(socket);
        let fds = fd();
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        let _ = send_raw(socket, &packet(&Message::Region { id, bytes }), &fds);
    })
}

/// Two good regions with these numbers.
fn regions(ids: [u32; 2]) -> Script {
    Box::new(move |socket| {
        let mut offer = Offer::new();
        offer.regions = 2;
        offer.send(socket);
        for id in ids {
            let (bytes, memory) = (2 << 20, memfd(2 << 20, SIZE_SEALS));
            let region = packet(&Message::Region { id, bytes });
            let _ = send_raw(socket, &region, &[memory.as_fd()]);
        }
    })
}

fn say(bytes: Vec<u8>) -> Script {
    Box::new(move |socket| assert!(send_raw(socket, &bytes, &[]).is_ok()))
}

fn write_ends() -> [OwnedFd; 2] {
    let writer = || {
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
            .unwrap()
            .1
    };
    [writer(), writer()]
}

/// A named pipe can be opened for writing through a descriptor.
fn named_pipes() -> [OwnedFd; 2] {
    use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat, open};
    let path = std::env::temp_dir().join(format!("warpipe-hostile-fifo-{}", std::process::id()));
    mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let reader = || {
        open(
            &path,
            OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .unwrap()
    };
    let ends = [reader(), reader()];
    std::fs::remove_file(path).unwrap();
    ends
}

fn regular_file() -> OwnedFd {
    let path = std::env::temp_dir().join(format!("warpipe-regular-{}", std::process::id()));
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .unwrap();
    file.set_len(bytes_for(4)).unwrap();
    std::fs::remove_file(path).unwrap();
    file.into()
}

fn run(cases: Vec<(&'static str, Script, Judge)>) {
    let scratch = Scratch::new();
    // Descriptors that this process opens once stay open from here on.
    {
        let publisher = scratch.publisher(|it| it);
        assert_delivers(&publisher, &mut scratch.subscriber(), b"before");
    }
    let before = settled_descriptors();
    for (what, script, judge) in cases {
        // Only a silent publisher needs a short timeout.
        let is_silent = judge(&Error::Handshake {
            name: String::new(),
            fault: HandshakeFault::Silent(LONG),
        });
        let timeout = if is_silent {
            Duration::from_millis(300)
        } else {
            LONG
        };
        let error = meet(&scratch, timeout, script).map(drop).unwrap_err();
        assert!(judge(&error), "{what}: {error:?}");
        eventually(&format!("every descriptor is closed after {what}"), || {
            descriptors() <= before
        });
    }
    let publisher = scratch.publisher(|it| it);
    assert_delivers(
        &publisher,
        &mut scratch.subscriber(),
        b"a good one afterwards",
    );
}

macro_rules! fault {
    ($pattern:pat) => {
        |error| {
            matches!(
                error,
                Error::Handshake {
                    fault: $pattern,
                    ..
                }
            )
        }
    };
}

#[test]
fn an_answer_that_is_no_welcome_is_declined() {
    alone(
        module_path!(),
        "an_answer_that_is_no_welcome_is_declined",
        || {
            let mut version = packet(&Message::Attached);
            version[4] = 77;
            let refused = Message::Refused {
                denied: true,
                text: "no".into(),
            };
            run(vec![
                (
                    "another version",
                    say(version),
                    fault!(HandshakeFault::Version { theirs: 77, .. }),
                ),
                (
                    "wrong magic",
                    say(b"HTTP/1.1 400 Bad Request".to_vec()),
                    fault!(HandshakeFault::Magic),
                ),
                (
                    "truncated",
                    say(packet(&Message::Attached)[..6].to_vec()),
                    fault!(HandshakeFault::Garbled(_)),
                ),
                (
                    "oversized",
                    say(vec![0; 70_000]),
                    fault!(HandshakeFault::Oversized(_)),
                ),
                (
                    "an empty packet",
                    say(Vec::new()),
                    fault!(HandshakeFault::Closed),
                ),
                (
                    "silence",
                    Box::new(|_| ()),
                    fault!(HandshakeFault::Silent(_)),
                ),
                (
                    "attached at once",
                    say(packet(&Message::Attached)),
                    fault!(HandshakeFault::Unexpected { .. }),
                ),
                ("a refusal", say(packet(&refused)), |error| {
                    matches!(error, Error::Refused { denied: true, .. })
                }),
            ]);
        },
    );
}

#[test]
fn a_welcome_with_the_wrong_descriptors_is_declined() {
    alone(
        module_path!(),
        "a_welcome_with_the_wrong_descriptors_is_declined",
        || {
            let count = |count: usize| {
                offer(move |offer| {
                    let spare = offer.fds[0].try_clone().unwrap();
                    offer.fds.truncate(count);
                    while offer.fds.len() < count {
                        offer.fds.push(spare.try_clone().unwrap());
                    }
                })
            };
            let segment = |fd: fn() -> OwnedFd| offer(move |offer| offer.fds[0] = fd());
            let wake = |fd: fn() -> OwnedFd| offer(move |offer| offer.fds[1] = fd());
            let lifeline =
                |ends: fn() -> [OwnedFd; 2]| offer(move |offer| offer.fds.extend(ends()));
            run(vec![
                (
                    "no descriptor",
                    count(0),
                    fault!(HandshakeFault::Descriptors {
                        found: 0,
                        wanted: 4
                    }),
                ),
                // The kernel reports the same for a descriptor that was cut off for lack of room.
                (
                    "one",
                    count(1),
                    fault!(HandshakeFault::Descriptors {
                        found: 1,
                        wanted: 4
                    }),
                ),
                (
                    "three",
                    count(3),
                    fault!(HandshakeFault::Descriptors {
                        found: 3,
                        wanted: 4
                    }),
                ),
                (
                    "eight",
                    count(8),
                    fault!(HandshakeFault::Descriptors {
                        found: 8,
                        wanted: 4
                    }),
                ),
                (
                    "a hundred",
                    count(100),
                    fault!(HandshakeFault::Descriptors { .. }),
                ),
                (
                    "a segment as lifeline",
                    count(4),
                    fault!(HandshakeFault::Lifeline(_)),
                ),
                (
                    "write ends as lifeline",
                    lifeline(write_ends),
                    fault!(HandshakeFault::Lifeline(_)),
                ),
                (
                    "a named pipe as lifeline",
                    lifeline(named_pipes),
                    fault!(HandshakeFault::Lifeline(_)),
                ),
                (
                    "a lifeline that has ended",
                    lifeline(|| [pipe(), pipe()]),
                    fault!(HandshakeFault::Closed),
                ),
                (
                    "a pipe as segment",
                    segment(pipe),
                    fault!(HandshakeFault::Segment(_)),
                ),
                (
                    "a file as segment",
                    segment(regular_file),
                    fault!(HandshakeFault::Segment(_)),
                ),
                (
                    "unsealed",
                    segment(|| memfd(bytes_for(4), SealFlags::empty())),
                    fault!(HandshakeFault::Segment(_)),
                ),
                (
                    "half sealed",
                    segment(|| memfd(bytes_for(4), SealFlags::GROW)),
                    fault!(HandshakeFault::Segment(_)),
                ),
                (
                    "too small",
                    segment(|| memfd(4096, SIZE_SEALS)),
                    fault!(HandshakeFault::Segment(_)),
                ),
                (
                    "too large",
                    segment(|| memfd(1 << 40, SIZE_SEALS)),
                    fault!(HandshakeFault::Segment(_)),
                ),
                (
                    "sealed too far",
                    segment(|| memfd(bytes_for(4), SIZE_SEALS)),
                    fault!(HandshakeFault::Segment(_)),
                ),
                (
                    "zeros",
                    segment(|| memfd(bytes_for(4), SIZE_SEALS.difference(SealFlags::SEAL))),
                    |error| matches!(error, Error::Handshake { fault: HandshakeFault::Segment(why), .. } if why.contains("magic")),
                ),
                (
                    "a segment that cannot be written",
                    segment(|| memfd(bytes_for(4), SIZE_SEALS | SealFlags::WRITE)),
                    |error| matches!(error, Error::Os { call: "mmap", .. }),
                ),
                (
                    "a pipe as wake channel",
                    wake(pipe),
                    fault!(HandshakeFault::Wake(_)),
                ),
                (
                    "a stream socket as wake channel",
                    wake(stream_socket),
                    fault!(HandshakeFault::Wake(_)),
                ),
                (
                    "a TCP socket as wake channel",
                    wake(tcp_socket),
                    fault!(HandshakeFault::Wake(_)),
                ),
                (
                    "exchanged",
                    offer(|offer| offer.fds.swap(0, 1)),
                    fault!(HandshakeFault::Segment(_)),
                ),
            ]);
        },
    );
}

fn stream_socket() -> OwnedFd {
    std::os::unix::net::UnixStream::pair().unwrap().0.into()
}

fn tcp_socket() -> OwnedFd {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().into()
}

#[test]
fn a_welcome_with_false_fields_is_declined() {
    alone(
        module_path!(),
        "a_welcome_with_false_fields_is_declined",
        || {
            let depth = |depth: u32| offer(move |offer| offer.depth = depth);
            run(vec![
                ("depth 0", depth(0), fault!(HandshakeFault::Segment(_))),
                (
                    "another depth",
                    depth(5),
                    fault!(HandshakeFault::Segment(_)),
                ),
                (
                    "the same pages, another depth",
                    depth(3),
                    fault!(HandshakeFault::Segment(_)),
                ),
                (
                    "huge depth",
                    depth(u32::MAX),
                    fault!(HandshakeFault::Segment(_)),
                ),
                (
                    "depth above the limit",
                    depth(4097),
                    fault!(HandshakeFault::Segment(_)),
                ),
                (
                    "another generation",
                    offer(|offer| offer.generation = [8; 16]),
                    fault!(HandshakeFault::Segment(_)),
                ),
                (
                    "replies that this end does not send",
                    offer(|offer| offer.replies = 4),
                    fault!(HandshakeFault::Segment(_)),
                ),
                (
                    "a GPU",
                    offer(|offer| {
                        offer.device = DeviceId {
                            kind: DeviceKind::Cuda,
                            uuid: [1; 16],
                        }
                    }),
                    fault!(HandshakeFault::Device { .. }),
                ),
                (
                    "regions that never come",
                    offer(|offer| offer.regions = 3),
                    fault!(HandshakeFault::Silent(_)),
                ),
                (
                    "countless regions",
                    offer(|offer| offer.regions = u32::MAX),
                    fault!(HandshakeFault::Silent(_)),
                ),
                (
                    "a second welcome",
                    Box::new(|socket| {
                        let offer = Offer::new();
                        offer.send(socket);
                        offer.send(socket);
                    }),
                    fault!(HandshakeFault::Unexpected { .. }),
                ),
            ]);
        },
    );
}

#[test]
fn a_descriptor_that_is_no_region_is_declined() {
    alone(
        module_path!(),
        "a_descriptor_that_is_no_region_is_declined",
        || {
            let good = || vec![memfd(2 << 20, SIZE_SEALS)];
            let protocol: Judge = |error| matches!(error, Error::Protocol { .. });
            let memory: Judge = |error| {
                matches!(
                    error,
                    Error::Device {
                        fault: DeviceFault::NotShareable,
                        ..
                    }
                )
            };
            run(vec![
                ("out of order", regions([1, 0]), protocol),
                ("a number that comes twice", regions([7, 7]), protocol),
                (
                    "behind the last number",
                    regions([u32::MAX, u32::MAX]),
                    protocol,
                ),
                ("no length", region(0, 0, good), protocol),
                ("an odd length", region(0, (2 << 20) + 1, good), protocol),
                ("a negative length", region(0, 1 << 63, good), protocol),
                ("a length of all ones", region(0, u64::MAX, good), protocol),
                ("larger than it is", region(0, 4 << 20, good), memory),
                ("smaller than it is", region(0, 1 << 20, good), memory),
                ("a pipe", region(0, 2 << 20, || vec![pipe()]), memory),
                (
                    "a file",
                    region(0, 1 << 12, || vec![regular_file()]),
                    memory,
                ),
                (
                    "unsealed",
                    region(0, 2 << 20, || vec![memfd(2 << 20, SealFlags::empty())]),
                    memory,
                ),
                (
                    "more than the address space",
                    region(0, 1 << 62, || vec![memfd(1 << 62, SIZE_SEALS)]),
                    |error| matches!(error, Error::Os { call: "mmap", .. }),
                ),
                (
                    "no descriptor",
                    region(0, 2 << 20, Vec::new),
                    fault!(HandshakeFault::Descriptors { .. }),
                ),
                (
                    "two descriptors",
                    region(0, 2 << 20, || vec![memfd(2 << 20, SIZE_SEALS), pipe()]),
                    fault!(HandshakeFault::Descriptors {
                        found: 2,
                        wanted: 1
                    }),
                ),
            ]);
        },
    );
}

#[test]
fn memory_of_huge_pages_is_declined_before_it_is_mapped() {
    alone(
        module_path!(),
        "memory_of_huge_pages_is_declined_before_it_is_mapped",
        || {
            const HUGE: u64 = 2 << 20;
            /// The depth that makes a segment one huge page long.
            const DEPTH: u32 = 3270;
            assert_eq!(bytes_for(DEPTH), HUGE);
            if hugetlb_memfd(HUGE).is_none() {
                return println!("skipped: no memfds of huge pages here");
            }
            let segment = offer(|offer| {
                offer.depth = DEPTH;
                offer.fds[0] = hugetlb_memfd(HUGE).unwrap();
            });
            run(vec![
                (
                    "a segment",
                    segment,
                    |error| matches!(error, Error::Handshake { fault: HandshakeFault::Segment(why), .. } if why.contains("huge")),
                ),
                (
                    "a region",
                    region(0, HUGE, || vec![hugetlb_memfd(HUGE).unwrap()]),
                    |error| matches!(error, Error::Device { fault: DeviceFault::NotShareable, text } if text.contains("huge")),
                ),
            ]);
        },
    );
}

#[test]
fn a_garbage_answer_is_an_error_and_never_a_panic() {
    let (scratch, mut random) = (Scratch::new(), Rng::with_seed(2));
    for round in 0..600 {
        let mut bytes = packet(&Message::Refused {
            denied: false,
            text: "a text of some length".into(),
        });
        if round % 2 == 0 {
            let length = 1 + random.usize(..1500);
            bytes = random_bytes(&mut random, length);
        } else {
            for _ in 0..=random.u64(..4) {
                let at = random.usize(..bytes.len());
                bytes[at] ^= random.u8(..);
            }
        }
        // Closed behind it: the end answers garbage that is by chance a message of another kind.
        let result = meet(&scratch, Duration::from_millis(300), |socket| {
            let _ = send_raw(socket, &bytes, &[]);
            let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Write);
        });
        assert!(
            matches!(
                result,
                Err(Error::Handshake { .. } | Error::Refused { denied: true, .. })
            ),
            "{result:?}"
        );
    }
}

/// What the reaper drops, and does not get past before the other end is dropped.
struct Stuck(mpsc::Receiver<()>);

impl Drop for Stuck {
    fn drop(&mut self) {
        let _ = self.0.recv();
    }
}

#[test]
fn a_publisher_sees_the_end_of_a_handshake_that_failed_while_the_reaper_is_held_up() {
    let test = "a_publisher_sees_the_end_of_a_handshake_that_failed_while_the_reaper_is_held_up";
    alone(module_path!(), test, || {
        let (go, wait) = mpsc::channel();
        let reactor = Reactor::of_process().unwrap();
        reactor.defer_drop(Box::new(Stuck(wait)));
        let met = meet(&Scratch::new(), LONG, |socket| {
            Offer::new().send(socket);
            assert!(matches!(
                hear(socket),
                Received::Message(Message::Attached, _)
            ));
            let undue = Message::RegionClosed { id: 0 };
            send_raw(socket, &packet(&undue), &[]).unwrap();
            let end = hear(socket);
            assert!(matches!(end, Received::End), "{end:?}");
        });
        assert!(
            matches!(
                met,
                Err(Error::Handshake {
                    fault: HandshakeFault::Unexpected { .. },
                    ..
                })
            ),
            "{met:?}"
        );
        drop(go);
    });
}
