//! Peers that remove pages of shared files: a device that registered them keeps the old pages, and
//! a CPU store would not reach any stream. **This module is marked for unsafe.**

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::fs::{FallocateFlags, Mode, OFlags, SealFlags};

use super::fake_publisher::{Offer, meet};
use super::publisher_handshake::hello;
use super::scribbler::Words;
use super::stage::{LONG, Scratch, assert_delivers, eventually, hear, packet, send_raw};
use crate::ipc::message::{Message, Received};
use crate::shm::seal;
use crate::{Error, HandshakeFault};

/// A second open file of the same inode, with write access.
pub(crate) fn reopened(fd: BorrowedFd<'_>) -> OwnedFd {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap()
}

fn punch(fd: impl AsFd, offset: u64) -> bool {
    rustix::fs::fallocate(
        fd,
        FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
        offset,
        4096,
    )
    .is_ok()
}

/// The inode of the file that `word` lies in, and whether this process can remove its page through
/// any mapping.
pub(crate) fn removes_page_of<T>(word: &T) -> (u64, bool) {
    let page = std::ptr::from_ref(word) as u64 & !4095;
    let all = mapped("");
    let (_, inode) = *all
        .iter()
        .find(|(at, _)| *at == page)
        .expect("the word is in a file's first page");
    (
        inode,
        all.iter().any(|&(at, other)| other == inode && removes(at)),
    )
}

/// Whether a page that is mapped here can be removed through its mapping.
fn removes(at: u64) -> bool {
    // SAFETY: a shared mapping of the file under test, which consists of atomics alone: a page that
    // is removed reads as zeros.
    unsafe {
        rustix::mm::madvise(
            at as *mut std::ffi::c_void,
            4096,
            rustix::mm::Advice::LinuxRemove,
        )
    }
    .is_ok()
}

/// The ways to remove a page of the file: through `fd`, a descriptor opened now, those opened
/// `earlier`, and every mapping of it in this process.
pub(crate) fn ways_to_remove(
    fd: BorrowedFd<'_>,
    earlier: &[OwnedFd],
    offset: u64,
) -> Vec<&'static str> {
    let mut ways = Vec::new();
    let mut note = |what, works| {
        if works {
            ways.push(what)
        }
    };
    note("fallocate", punch(fd, offset));
    note("fallocate, reopened", punch(reopened(fd), offset));
    earlier
        .iter()
        .for_each(|fd| note("fallocate, opened earlier", punch(fd, offset)));
    let file = rustix::fs::fstat(fd).unwrap().st_ino;
    for (at, _) in mapped("").into_iter().filter(|(_, inode)| *inode == file) {
        note("madvise(MADV_REMOVE)", removes(at + offset));
    }
    ways
}

/// The addresses and inodes of this process's mappings of files with such a name.
fn mapped(name: &str) -> Vec<(u64, u64)> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let of = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let at = u64::from_str_radix(words.first()?.split_once('-')?.0, 16).ok()?;
        words
            .get(5)?
            .contains(name)
            .then_some((at, words.get(4)?.parse().ok()?))
    };
    maps.lines().filter_map(of).collect()
}

/// A client that was welcomed, with the segment's descriptor.
fn welcomed(scratch: &Scratch) -> (OwnedFd, OwnedFd) {
    let socket = scratch.connection();
    send_raw(&socket, &packet(&hello()), &[]).unwrap();
    let Received::Message(Message::Welcome { regions, .. }, mut fds) = hear(&socket) else {
        panic!("no welcome")
    };
    (0..regions).for_each(|_| {
        assert!(matches!(
            hear(&socket),
            Received::Message(Message::Region { .. }, _)
        ))
    });
    (socket, fds.swap_remove(0).accept().release())
}

#[test]
fn a_link_goes_live_only_behind_the_seal_that_keeps_its_pages() {
    let scratch = Scratch::new();
    let publisher = scratch.publisher(|it| it);
    for seals in [SealFlags::empty(), SealFlags::SEAL] {
        let (socket, segment) = welcomed(&scratch);
        rustix::fs::fcntl_add_seals(&segment, seals).unwrap();
        send_raw(&socket, &packet(&Message::Attached), &[]).unwrap();
        let answer = hear(&socket);
        assert!(
            matches!(&answer, Received::Message(Message::Refused { text, .. }, _) if text.contains("holes")),
            "{seals:?}: {answer:?}"
        );
        assert!(matches!(hear(&socket), Received::End));
    }
    eventually("they are forgotten", || publisher.subscribers().is_empty());
    assert_delivers(&publisher, &mut scratch.subscriber(), b"one that seals");
}

#[test]
fn no_page_of_a_live_link_can_be_removed_by_its_subscriber() {
    let scratch = Scratch::new();
    let publisher = scratch.publisher(|it| it);
    let (socket, segment) = welcomed(&scratch);
    let (words, early) = (
        Words::map(&segment),
        [reopened(segment.as_fd()), segment.try_clone().unwrap()],
    );
    // Until the end of the handshake a hole does no harm: nothing is registered.
    assert!(!ways_to_remove(segment.as_fd(), &early, 4096).is_empty());
    seal::close(segment.as_fd()).unwrap();
    send_raw(&socket, &packet(&Message::Attached), &[]).unwrap();
    assert!(matches!(
        hear(&socket),
        Received::Message(Message::Attached, _)
    ));
    for offset in [0, 4096] {
        assert_eq!(ways_to_remove(segment.as_fd(), &early, offset), [""; 0]);
    }
    publisher
        .send_bytes(&super::stage::stream(), b"it is the same page")
        .unwrap();
    eventually("the entry is seen through the earlier mapping", || {
        words.is_published(1)
    });
}

#[test]
fn no_page_of_a_live_link_can_be_removed_by_its_publisher() {
    let scratch = Scratch::new();
    let mut offered = None;
    let subscriber = meet(&scratch, LONG, |socket| {
        let offer = Offer::new();
        offer.send(socket);
        assert!(matches!(
            hear(socket),
            Received::Message(Message::Attached, _)
        ));
        offered = Some(offer);
        send_raw(socket, &packet(&Message::Attached), &[]).unwrap();
    });
    let (_subscriber, offer) = (subscriber.unwrap(), offered.unwrap());
    for offset in [0, 4096] {
        assert_eq!(ways_to_remove(offer.fds[0].as_fd(), &[], offset), [""; 0]);
    }
}

#[test]
fn a_segment_that_cannot_be_sealed_against_holes_is_declined() {
    let scratch = Scratch::new();
    let subscriber = meet(&scratch, Duration::from_secs(2), |socket| {
        let offer = Offer::new();
        rustix::fs::fcntl_add_seals(&offer.fds[0], SealFlags::SEAL).unwrap();
        offer.send(socket);
    });
    let error = subscriber.map(drop).unwrap_err();
    assert!(
        matches!(
            &error,
            Error::Handshake {
                fault: HandshakeFault::Segment(_),
                ..
            }
        ),
        "{error}"
    );
}
