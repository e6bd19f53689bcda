//! Creators that do not do what a creator does.

use std::os::fd::OwnedFd;

use rustix::fs::MemfdFlags;
use serde::Serialize;

use super::signals::Signals;
use super::survivor::Survivor;
use super::warden::Welcome;
use super::*;
use crate::fork::PrivateFd;
use crate::link::closer::PeerFd;
use crate::link::peer::Process;
use crate::rendezvous::{Answer, Caller, Desk, Ending, Keep, Refusal};

/// Lets anybody in, with this.
struct Wrong {
    body: Vec<u8>,
    page_bytes: usize,
}

impl Keep for Wrong {
    fn admit(&self, _: &Desk, _: &Caller, _: &[u8]) -> Result<Answer, Refusal> {
        let (_, fd) = Page::create(None, self.page_bytes)?;
        Ok(Answer { body: self.body.clone(), fds: vec![fd] })
    }

    fn answer(&self, _: &Desk, _: &Caller, _: &[u8]) -> Result<Answer, Refusal> {
        Err(Refusal("never".into()))
    }

    fn holds(&self, _: &Caller) -> bool {
        true
    }

    fn gone(&self, _: &Desk, _: &Caller, _: Ending) {}
}

fn opened(title: &str, body: &impl Serialize, page_bytes: usize) -> Result<Semaphore> {
    let folder = std::env::temp_dir().join(format!("warpipe-semaphore-wrong-{title}-{}", std::process::id()));
    let (domain, name) = (Domain::at(&folder)?, EndpointName::new("turns")?);
    let at = Address { domain: &domain, name: &name, kind: Kind::Semaphore };
    let wrong = Wrong { body: crate::rendezvous::encode(body)?, page_bytes };
    let keeper = Keeper::open(&at, Admission::default(), Arc::new(wrong))?;
    let opened = Semaphore::open(&domain, "turns", &Device::host());
    drop(keeper);
    let _ = std::fs::remove_dir_all(folder);
    opened
}

#[test]
fn an_admission_that_makes_no_sense_is_a_typed_error() {
    let right = room::bytes_for(2);
    assert!(opened("right", &Welcome { member: 1, permits: 2 }, right).is_ok());
    let wrong = [
        ("none", Welcome { member: 1, permits: 0 }, right),
        ("many", Welcome { member: 1, permits: u32::MAX }, right),
        ("nobody", Welcome { member: 0, permits: 2 }, right),
        ("creator", Welcome { member: CREATOR, permits: 2 }, right),
        ("short", Welcome { member: 1, permits: 2 }, right - 4096),
        ("long", Welcome { member: 1, permits: 2 }, right + 4096),
    ];
    for (title, welcome, bytes) in wrong {
        let error = opened(title, &welcome, bytes).unwrap_err();
        assert!(matches!(error, Error::Protocol { .. }), "{title}: {error}");
    }
    assert!(matches!(opened("garbled", &7u8, right), Err(Error::Protocol { field: "message", .. })));
}

#[test]
fn descriptors_that_are_no_pidfd_or_no_lifeline_are_not_taken_for_a_members_death() {
    let room = Arc::new(Room::new(Page::create(None, room::bytes_for(1)).unwrap().0, 1));
    let watcher = Watcher::of_process().unwrap();
    let signals = Signals::new(1, 1, "turns", &Device::host(), &watcher).unwrap();
    let survivor = Survivor::new(room.clone(), signals, 1);
    room.take_free(2, 0).unwrap();
    room.promise(0, 2);
    // Always readable.
    let (readable, writer) = rustix::pipe::pipe().unwrap();
    drop(writer);
    let memfd = rustix::fs::memfd_create(c"no-pidfd", MemfdFlags::CLOEXEC).unwrap();
    let own = rustix::process::pidfd_open(rustix::process::getpid(), rustix::process::PidfdFlags::empty()).unwrap();
    let (end, open) = rustix::pipe::pipe().unwrap();
    let fds =
        |pidfd: &OwnedFd, end: &OwnedFd| [pidfd, end, end].map(|fd| PeerFd::from(PrivateFd::duplicate(fd).unwrap()));
    for wrong in [fds(&readable, &end), fds(&memfd, &end), fds(&own, &memfd), fds(&own, &own), fds(&own, &open)] {
        // In a process that this one has links to, what is known of it counts.
        let error = Process::relayed(wrong).map(|_| ()).unwrap_err();
        assert!(matches!(error, crate::HandshakeFault::Lifeline(_)), "{error}");
    }
    let error = survivor.learn(2, fds(&readable, &end), "turns").unwrap_err();
    assert!(matches!(error, Error::Protocol { field: "descriptors of a member", .. }), "{error}");
    assert!(!survivor.knows(2));
    survivor.learn(2, fds(&own, &end), "turns").unwrap();
    assert!(survivor.knows(2));
    assert_eq!(room.word(0).load(), 0, "who lives owes what it promised");
}
