//! Peers that end, answer wrongly or are asked at a bad moment.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::SocketFlags;

use super::{SeqCst, Stage, WAIT, byte_of, in_a_forked_child};
use crate::device_types::{DeviceId, DeviceKind};
use crate::error::{Error, StateFault};
use crate::fork::CloseOnForkFd;
use crate::ipc::domain::{EndpointName, NameClaim};
use crate::ipc::{
    AccessPolicy, Address, ClientInfo, IpcServer, Kind, OutgoingReply, REPLY_TIMEOUT, Rejection,
    RequestHandler, ServerCore, decode,
};
use crate::mutex::LockUnpoisoned;
use crate::runtime::closer::PeerFd;
use crate::wait::Wait;
use crate::weights::SharedWeights;
use crate::weights::exports::PieceFd;
use crate::weights::held::{Held, Version};
use crate::weights::holder;
use crate::weights::keeper::{KeeperNotice, KeeperReply, KeeperRequest};
use crate::weights::keeper_session::{KeeperSession, offer_to_keeper};
use crate::weights::{NamedWeights, takeover, weights_name};

type Script =
    dyn Fn(&ServerCore, u64, KeeperRequest) -> Result<OutgoingReply, Rejection> + Send + Sync;

/// A keeper that answers as a test says.
struct Scripted(Box<Script>);

impl RequestHandler for Scripted {
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
        core: &ServerCore,
        client: &ClientInfo,
        body: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        (self.0)(core, client.id, decode(body, core.name())?)
    }
}

impl Stage {
    pub(super) fn scripted(
        &self,
        script: impl Fn(&ServerCore, u64, KeeperRequest) -> Result<OutgoingReply, Rejection>
        + Send
        + Sync
        + 'static,
    ) -> IpcServer {
        let at = Address {
            domain: &self.domain,
            name: &weights_name("w").unwrap(),
            kind: Kind::Weights,
        };
        let handler = Arc::new(Scripted(Box::new(script)));
        IpcServer::open(&at, AccessPolicy::default(), handler).unwrap()
    }

    fn holders(&self) -> usize {
        self.domain.names_after("w/held-").unwrap().len()
    }
}

fn noted() -> Result<OutgoingReply, Rejection> {
    OutgoingReply::new(&KeeperReply::Noted, vec![])
}

fn notice(notice: KeeperNotice) -> OutgoingReply {
    OutgoingReply::new(&notice, vec![]).unwrap()
}

fn version(held: &Held) -> Result<OutgoingReply, Rejection> {
    held.reply(&KeeperReply::Version(held.describe()))
}

#[test]
fn a_keeper_that_ends_before_a_publishers_holder_is_there_has_not_taken_the_version() {
    let stage = Stage::new();
    let (took, taken): (Sender<u64>, _) = channel();
    let server = stage.scripted(move |_, client, request| match request {
        KeeperRequest::Take { .. } => {
            let _ = took.send(client);
            noted()
        }
        _ => Err(Rejection::new("it ends")),
    });
    let (weights, has_ended) = (stage.weights(1), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let publisher = scope.spawn(|| {
            let cancelled = || has_ended.load(SeqCst);
            let wait = Wait::at_most(WAIT).unless(&cancelled);
            weights.publish(&stage.domain, "w", wait).map(|_| ())
        });
        let client = taken.recv().unwrap();
        let number = 5;
        server
            .server_core()
            .tell(client, &notice(KeeperNotice::Taken { number }));
        drop(server);
        has_ended.store(true, SeqCst);
        let told = publisher.join().unwrap();
        // Its next keeper may have searched before the holder was there, and not know the version.
        assert!(told.is_err(), "{told:?}");
    });
    assert_eq!(stage.holders(), 0);
}

#[test]
fn a_reader_tells_its_number_once_its_holder_is_there_and_to_the_next_keeper_if_one_has_ended() {
    let stage = Stage::new();
    let weights = stage.weights(1);
    let held = weights.held_for_tests(9);
    let domain = stage.domain.clone();
    let (told, tells): (Sender<(u64, usize)>, _) = channel();
    let _server = stage.scripted(move |_, _, request| match request {
        KeeperRequest::Holding { number } => {
            let holders = domain
                .names_after("w/held-9-")
                .map_or(0, |names| names.len());
            let _ = told.send((number, holders));
            // As a keeper that has ended: the reader asks whichever keeper has the name.
            Err(Rejection::new("it has ended"))
        }
        _ => version(&held),
    });
    let shared = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    assert_eq!((shared.info().version, byte_of(&shared)), (9, 1));
    assert_eq!(tells.try_iter().collect::<Vec<_>>(), [(9, 1), (9, 1)]);
}

#[test]
fn a_reader_that_is_cancelled_does_not_wait_for_a_keeper_to_note_what_it_holds() {
    let stage = Stage::new();
    let weights = stage.weights(1);
    let held = weights.held_for_tests(9);
    let is_asked = Arc::new(AtomicBool::new(false));
    let asked = is_asked.clone();
    let (go, held_up) = channel::<()>();
    let held_up = Mutex::new(held_up);
    let _server = stage.scripted(move |_, _, request| match request {
        KeeperRequest::Holding { .. } => {
            asked.store(true, SeqCst);
            let _ended = held_up.locked().recv();
            noted()
        }
        _ => version(&held),
    });
    let cancelled = || is_asked.load(SeqCst);
    let start = Instant::now();
    let shared = SharedWeights::open(
        "w",
        stage.options(),
        Wait::at_most(Duration::MAX).unless(&cancelled),
    );
    let took = start.elapsed();
    drop(go);
    assert_eq!(byte_of(&shared.unwrap()), 1);
    assert!(took < REPLY_TIMEOUT / 2, "{took:?}");
}

#[test]
fn a_keeper_gives_no_number_that_a_process_holds_which_it_did_not_find() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    let name = weights_name("w").unwrap();
    let session = KeeperSession::open(&stage.domain, &name, &WAIT.into()).unwrap();
    assert_eq!(stage.publish(1).version, 1);
    session.tell_holding(9, &WAIT.into()).unwrap();
    session.tell_holding(4, &WAIT.into()).unwrap();
    assert_eq!(stage.publish(2).version, 10);
    // Numbers have an end. A number behind it counts for nothing.
    session.tell_holding(u64::MAX, &WAIT.into()).unwrap();
    assert_eq!(stage.publish(3).version, 11);
    session.tell_holding(1 << 48, &WAIT.into()).unwrap();
    let full = stage.weights(3).publish(&stage.domain, "w", WAIT);
    assert!(
        matches!(&full, Err(Error::Refused { denied: false, text, .. }) if text.contains("281474976710656")),
        "{full:?}"
    );
}

#[test]
fn a_number_that_no_version_has_is_no_answer_to_a_publisher() {
    for number in [0, (1 << 48) + 1, u64::MAX] {
        let stage = Stage::new();
        let _server = stage.scripted(move |core, client, request| {
            if let KeeperRequest::Take { .. } = request {
                core.tell(client, &notice(KeeperNotice::Taken { number }));
            }
            noted()
        });
        let told = stage.weights(1).publish(&stage.domain, "w", WAIT);
        assert!(matches!(told, Err(Error::Protocol { .. })), "{told:?}");
    }
}

#[test]
fn a_check_waits_for_a_keeper_that_still_asks_its_holders() {
    let stage = Stage::new();
    let weights = stage.weights(1);
    let held = weights.held_for_tests(3);
    let asked = AtomicUsize::new(0);
    let _server = stage.scripted(move |core, client, request| match request {
        KeeperRequest::Candidate if asked.fetch_add(1, SeqCst) == 0 => {
            // The candidate is there before the reply that says there is none arrives.
            core.tell(client, &notice(KeeperNotice::Offered));
            OutgoingReply::new(&KeeperReply::Nothing { candidate: None }, vec![])
        }
        KeeperRequest::Candidate => version(&held),
        _ => noted(),
    });
    assert_eq!(
        SharedWeights::verify("w", stage.options(), WAIT).unwrap(),
        3
    );
}

#[test]
fn a_descriptor_whose_close_may_block_is_no_memory_of_a_gpu() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    let weights = stage.weights(1);
    let directory = std::fs::File::open("/").unwrap();
    let mut hostile = weights.held_for_tests(0);
    hostile.device = DeviceId {
        kind: DeviceKind::Cuda,
        uuid: [1; 16],
    };
    let directory = PeerFd::from(CloseOnForkFd::new(directory.into()).unwrap());
    hostile.pieces = Arc::new([PieceFd::of_peer(directory)]);
    let offer = holder::offer(&stage.domain, "w", Arc::new(hostile)).unwrap();
    let name = weights_name("w").unwrap();
    let told = offer_to_keeper(&stage.domain, &name, &offer.1, &WAIT.into()).map(|_| ());
    assert!(
        matches!(&told, Err(Error::Refused { denied: false, text, .. }) if text.contains("memory")),
        "{told:?}"
    );
}

#[test]
fn holders_without_a_keeper_are_asked_at_the_same_time_and_one_that_answers_is_listed() {
    let stage = Stage::new();
    let weights = stage.weights(1);
    let held = Arc::new(weights.held_for_tests(1));
    let _answers = holder::serve(&stage.domain, "w", held).unwrap();
    let claim = |number: u64| {
        let name = EndpointName::new(&format!("w/held-{number:x}-1")).unwrap();
        stage.domain.claim(&name, false).unwrap()
    };
    // As stopped processes: the system takes their connections, and they answer nothing.
    let silent: Vec<_> = (2..14).map(claim).collect();
    let listed = std::thread::scope(|scope| {
        let listed = scope.spawn(|| NamedWeights::list(&stage.domain, "w"));
        let accept = |claim: &NameClaim| {
            let listener = claim.listener();
            let mut fds = [PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)];
            rustix::event::poll(&mut fds, None).unwrap();
            rustix::net::accept_with(&listener, SocketFlags::CLOEXEC).unwrap()
        };
        let connected: Vec<OwnedFd> = silent.iter().map(accept).collect();
        let mut first = [PollFd::new(&connected[0], PollFlags::empty())];
        rustix::event::poll(&mut first, Some(&Timespec::default())).unwrap();
        let is_over = first[0].revents().contains(PollFlags::HUP);
        drop(connected);
        assert!(
            !is_over,
            "the first one was given up before the last was asked"
        );
        listed.join().unwrap().unwrap().remove(0)
    });
    assert_eq!(listed.version.map(|version| version.number), Some(1));
    assert_eq!((listed.keeper, listed.holders), (None, 1));
}

#[test]
fn the_newest_versions_alone_are_taken_over() {
    const VERSIONS: u8 = 12;
    let stage = Stage::new();
    let keeper = stage.keeper();
    let _held: Vec<_> = (1..=VERSIONS).map(|byte| stage.publish(byte)).collect();
    drop(keeper);
    let found = takeover::find(&stage.domain, &weights_name("w").unwrap()).unwrap();
    let numbers: Vec<u64> = found.versions.iter().map(|v| v.version.number).collect();
    assert_eq!(numbers, [5, 6, 7, 8, 9, 10, 11, 12]);
    assert_eq!((found.last_number, found.unanswered), (12, 0));
}

#[test]
fn the_result_of_a_check_that_changes_nothing_wakes_nobody() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    let name = weights_name("w").unwrap();
    let session = KeeperSession::open(&stage.domain, &name, &WAIT.into()).unwrap();
    let _published = stage.publish(1);
    // A publisher has its reply before the other sessions have their notice.
    assert_eq!(session.wait_for_offers_for_tests(1, WAIT), 1);
    for is_sound in [true, false] {
        let version = Version {
            number: 7,
            id: [7; 16],
        };
        let checked = KeeperRequest::Checked { version, is_sound };
        session.request(&checked, &WAIT.into()).unwrap();
    }
    // A notice would have come before the reply.
    assert_eq!(session.wait_for_offers_for_tests(0, WAIT), 1);
    let _published = stage.publish(2);
    assert_eq!(session.wait_for_offers_for_tests(2, WAIT), 2);
}

#[test]
fn a_forked_child_cannot_use_its_parents_weights_and_removes_no_file_of_them() {
    let stage = Stage::new();
    let keeper = stage.keeper();
    let weights = stage.weights(1);
    let published = weights.publish(&stage.domain, "w", WAIT).unwrap();
    let shared = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    let mut all = Some((keeper, published, shared));
    in_a_forked_child(|| {
        let (_, _, shared) = all.as_ref().unwrap();
        let results = [
            weights.publish(&stage.domain, "w", WAIT).err(),
            shared.newer(WAIT).err(),
        ];
        drop(all.take());
        results
            .iter()
            .all(|error| matches!(error, Some(Error::State(StateFault::Forked))))
    });
    assert_eq!(stage.holders(), 2);
    assert_eq!(
        byte_of(&SharedWeights::open("w", stage.options(), WAIT).unwrap()),
        1
    );
}
