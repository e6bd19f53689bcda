//! Regression tests for lost wake-ups of a subscriber that follows one publisher after the other.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::Instant;

use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with};

use super::*;
use crate::backend::RawStream;
use crate::backend::testing::{Counting, Failing, Holding, Hook, Wrapped};
use crate::error::Loss;
use crate::hostile::alone;
use crate::ipc::domain::watch::tests::MADE;
use crate::ipc::message::wait_readable;
use crate::pubsub::{Policy, Publisher, PublisherOptions, RawSample};
use crate::tensor::Layout;
use crate::wait::OptionalExtension;
use crate::{Device, Domain, SubscriberOptions};

const LONG: Duration = Duration::from_secs(20);

impl Subscriber {
    /// As [`LinkReceiver::take`].
    pub(crate) fn take_raw_sample(&mut self) -> Result<Option<RawSample>> {
        match &mut self.attached {
            Some(attached) => attached.take(),
            None => Err(self.not_found()),
        }
    }
}

struct Place {
    folder: PathBuf,
    domain: Domain,
    device: Device,
}

impl Place {
    fn new(title: &str) -> Place {
        let folder =
            std::env::temp_dir().join(format!("warpipe-follow-{title}-{}", std::process::id()));
        Place {
            domain: Domain::at(&folder).unwrap(),
            folder,
            device: Device::host(),
        }
    }

    /// A publisher that has allocated its memory already, because the announcement of a region
    /// rings, too.
    fn publisher(&self) -> Publisher {
        let publisher = Publisher::new("camera", self.domain.on(&self.device)).unwrap();
        drop(publisher.loan(&Layout::bytes_only(8).unwrap()).unwrap());
        publisher
    }

    fn subscriber(&self) -> Subscriber {
        Subscriber::open(
            "camera",
            SubscriberOptions {
                reconnect: true,
                ..self.domain.on(&self.device)
            },
            Duration::ZERO,
        )
        .unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Polls as an event loop does: receives until there is no sample, then sleeps on the descriptor.
fn receive_polled(subscriber: &mut Subscriber, stream: &Stream) -> Sample {
    let start = Instant::now();
    loop {
        if let Some(sample) = subscriber
            .receive(stream, Duration::ZERO)
            .optional()
            .unwrap()
        {
            return sample;
        }
        assert!(
            start.elapsed() < LONG && wait_readable(subscriber.readable.as_fd(), LONG),
            "nobody rings"
        );
    }
}

#[test]
fn a_subscriber_that_sleeps_is_woken_by_the_first_sample_of_its_next_publisher() {
    const ROUNDS: u8 = 3;
    let place = Place::new("sleeping");
    let stream = place.device.stream().unwrap();
    let mut publisher = Some(place.publisher());
    let (mut subscriber, receiving, (tell, told)) = (
        place.subscriber(),
        stream.clone(),
        std::sync::mpsc::channel(),
    );
    // Longer than the test waits: a receive polls once more when its timeout ends.
    std::thread::spawn(move || {
        for _ in 0..ROUNDS {
            let sample = subscriber
                .receive(&receiving, Duration::from_secs(3600))
                .unwrap();
            tell.send(sample.to_vec(LONG).unwrap()).unwrap();
        }
    });
    for round in 0..ROUNDS {
        drop(publisher.take());
        let publisher = publisher.insert(place.publisher());
        publisher.wait_for_subscribers(1, LONG).unwrap();
        publisher.send_bytes(&stream, &[round]).unwrap();
        assert_eq!(told.recv_timeout(LONG).expect("a sample"), [round]);
    }
}

#[test]
fn a_polled_subscriber_is_rung_by_a_publisher_that_came_while_it_looked() {
    let place = Place::new("polled");
    let stream = place.device.stream().unwrap();
    let first = place.publisher();
    let mut subscriber = place.subscriber();
    let _ = subscriber.as_fd();
    // The publisher goes and another follows before the next poll.
    drop(first);
    let next = place.publisher();
    let received = std::thread::scope(|scope| {
        let receiving = scope.spawn(|| receive_polled(&mut subscriber, &stream));
        next.wait_for_subscribers(1, LONG).unwrap();
        // The poll that attached is over: only the descriptor can report the next sample.
        next.send_bytes(&stream, b"hello").unwrap();
        receiving.join().unwrap()
    });
    assert_eq!(received.to_vec(LONG).unwrap(), b"hello");
}

/// Holds the name and does nothing on its own.
struct Silent {
    listener: OwnedFd,
    path: PathBuf,
}

impl Silent {
    fn at(place: &Place, backlog: i32) -> Silent {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .unwrap();
        let path = place.domain.path().join("camera.sock");
        rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&listener, backlog).unwrap();
        Silent { listener, path }
    }

    /// Fills the backlog.
    fn connections(&self) -> Vec<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let dial = || {
            let socket =
                rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                    .unwrap();
            rustix::net::connect(&socket, &SocketAddrUnix::new(&self.path).unwrap())
                .map(|()| socket)
        };
        std::iter::from_fn(|| dial().ok()).collect()
    }

    fn accept(&self) -> Option<OwnedFd> {
        accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK).ok()
    }

    fn leave(self) {
        std::fs::remove_file(&self.path).unwrap();
    }
}

/// Runs `work` and fails if it takes as long as a handshake may.
fn returns<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || tell.send(work()));
    told.recv_timeout(3 * LONG)
        .expect("it waits for a stopped publisher")
}

#[test]
fn a_publisher_that_stands_still_holds_up_no_receive_beyond_its_timeout() {
    let place = Place::new("standing");
    let stream = place.device.stream().unwrap();
    let first = place.publisher();
    let options = SubscriberOptions {
        reconnect: true,
        handshake_timeout: Duration::from_secs(3600),
        ..place.domain.on(&place.device)
    };
    let mut subscriber = Subscriber::open("camera", options, Duration::ZERO).unwrap();
    drop(first);
    let silent = Silent::at(&place, 8);
    let receiving = stream.clone();
    let mut subscriber = returns(move || {
        for _ in 0..20 {
            assert!(
                subscriber
                    .receive(&receiving, Duration::ZERO)
                    .optional()
                    .unwrap()
                    .is_none()
            );
            let waited = subscriber.receive(&receiving, Duration::from_millis(1));
            assert!(matches!(waited, Err(Error::Timeout { .. })), "{waited:?}");
        }
        subscriber
    });
    assert!(subscriber.publisher().map(|it| it.state).is_none());
    let caller = silent.accept().expect("it has called");
    assert!(silent.accept().is_none(), "once");
    drop(caller);
    silent.leave();
    let next = place.publisher();
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| subscriber.receive(&stream, LONG).unwrap());
        next.wait_for_subscribers(1, LONG).unwrap();
        next.send_bytes(&stream, b"hello").unwrap();
        assert_eq!(receiving.join().unwrap().to_vec(LONG).unwrap(), b"hello");
    });
}

#[test]
fn a_subscriber_that_is_dropped_hangs_up_on_a_publisher_that_has_not_answered() {
    let place = Place::new("hanging-up");
    let stream = place.device.stream().unwrap();
    let first = place.publisher();
    let mut subscriber = Subscriber::open(
        "camera",
        SubscriberOptions {
            reconnect: true,
            handshake_timeout: Duration::from_secs(3600),
            ..place.domain.on(&place.device)
        },
        Duration::ZERO,
    )
    .unwrap();
    drop(first);
    let silent = Silent::at(&place, 8);
    let caller = returns(move || {
        loop {
            assert!(
                subscriber
                    .receive(&stream, Duration::ZERO)
                    .optional()
                    .unwrap()
                    .is_none()
            );
            if let Some(caller) = silent.accept() {
                break caller;
            }
        }
    });
    // The end follows its `Hello`.
    let mut packet = [0; 1024];
    let start = Instant::now();
    while rustix::net::recv(&caller, &mut packet, RecvFlags::DONTWAIT)
        .map_or(true, |(bytes, _)| bytes > 0)
    {
        assert!(start.elapsed() < 3 * LONG, "it holds on");
        wait_readable(caller.as_fd(), Duration::from_millis(1));
    }
}

#[test]
fn a_full_backlog_is_no_error_of_who_follows_a_name() {
    let place = Place::new("backlog");
    let stream = place.device.stream().unwrap();
    let first = place.publisher();
    let brief = || SubscriberOptions {
        handshake_timeout: Duration::from_millis(1),
        ..place.domain.on(&place.device)
    };
    let patient = SubscriberOptions {
        handshake_timeout: LONG,
        reconnect: true,
        ..brief()
    };
    let mut subscriber = Subscriber::open("camera", patient, Duration::ZERO).unwrap();
    subscriber.at.timeout = Duration::from_millis(1);
    drop(first);
    let silent = Silent::at(&place, 1);
    let connections = silent.connections();
    for _ in 0..3 {
        let waited = subscriber.receive(&stream, Duration::from_millis(20));
        assert!(matches!(waited, Err(Error::Timeout { .. })), "{waited:?}");
        assert!(
            subscriber
                .receive(&stream, Duration::ZERO)
                .optional()
                .unwrap()
                .is_none()
        );
    }
    let newcomer = Subscriber::open("camera", brief(), Duration::ZERO);
    let fault = |error| {
        matches!(
            error,
            Error::Handshake {
                fault: crate::HandshakeFault::Silent(_),
                ..
            }
        )
    };
    assert!(newcomer.is_err_and(fault), "nobody is taken in");
    drop(connections);
    silent.leave();
    subscriber.at.timeout = LONG;
    let next = place.publisher();
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| subscriber.receive(&stream, LONG).unwrap());
        next.wait_for_subscribers(1, LONG).unwrap();
        next.send_bytes(&stream, b"hello").unwrap();
        assert_eq!(receiving.join().unwrap().to_vec(LONG).unwrap(), b"hello");
    });
}

#[test]
fn a_subscriber_that_follows_a_name_attaches_again_after_it_has_closed_its_link() {
    let place = Place::new("own-end");
    let stream = place.device.stream().unwrap();
    let publisher = place.publisher();
    let mut subscriber = place.subscriber();
    let own = Error::os("recvmsg", "a link", rustix::io::Errno::MFILE);
    subscriber.attached.as_ref().unwrap().link.fail(own);
    let told = subscriber.receive(&stream, Duration::ZERO).optional();
    assert!(
        told.as_ref().is_err_and(Error::is_descriptor_limit),
        "{told:?}"
    );
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| subscriber.receive(&stream, LONG).unwrap());
        let is_back = || {
            publisher
                .subscribers()
                .iter()
                .any(|one| one.state == PeerState::Alive)
        };
        let start = Instant::now();
        while !is_back()
            || publisher.send_bytes(&stream, b"hello").is_err()
            || !receiving.is_finished()
        {
            assert!(start.elapsed() < 3 * LONG, "it has not come back");
            std::thread::park_timeout(Duration::from_millis(1));
        }
        let sample = receiving.join().unwrap();
        // It is the same publisher, and nothing was received of it before.
        let gap = sample.info().discontinuity.expect("it has attached again");
        assert_eq!((gap.missing, gap.previous), (0, None));
        assert_eq!(sample.to_vec(LONG).unwrap(), b"hello");
    });
}

#[test]
fn a_subscriber_that_attaches_again_to_its_publisher_is_told_how_many_it_has_missed() {
    let place = Place::new("missed");
    let stream = place.device.stream().unwrap();
    let publisher = Publisher::new(
        "camera",
        PublisherOptions {
            history: 2,
            ..place.domain.on(&place.device)
        },
    )
    .unwrap();
    let mut subscriber = place.subscriber();
    let send = |count: u8| {
        for _ in 0..count {
            publisher.send_bytes(&stream, b"hello").unwrap();
        }
    };
    let mut attach_again = |before: u8| {
        let own = Error::os("recvmsg", "a link", rustix::io::Errno::MFILE);
        subscriber.attached.as_ref().unwrap().link.fail(own);
        subscriber
            .receive(&stream, Duration::ZERO)
            .optional()
            .unwrap_err();
        // Nothing attaches before the next receive.
        send(before);
        let sample = subscriber.receive(&stream, LONG).unwrap();
        let gap = sample.info().discontinuity.expect("it has attached again");
        assert_eq!(gap.previous, None, "the same publisher");
        (sample.sequence(), gap.missing)
    };
    send(1);
    assert_eq!(attach_again(0), (1, 0));
    // 2 and 3 are no longer in the history.
    assert_eq!(attach_again(4), (4, 2));
    // 4 and 5 come again: the history; 4 was received.
    assert_eq!(attach_again(0), (5, 0));
    assert_eq!(attach_again(3), (7, 1));
    let sample = subscriber.receive(&stream, LONG).unwrap();
    assert_eq!((sample.sequence(), sample.info().discontinuity), (8, None));
}

#[test]
fn the_next_forwarder_of_a_source_continues_its_numbers_and_no_number_comes_twice() {
    let place = Place::new("forwarders");
    let stream = place.device.stream().unwrap();
    let forwarder = |source: u8| {
        Publisher::new(
            "camera",
            PublisherOptions {
                history: 4,
                forwards: Some([source; 16]),
                ..place.domain.on(&place.device)
            },
        )
        .unwrap()
    };
    let send = |publisher: &Publisher, numbers: &[u64]| {
        for &number in numbers {
            publisher.skip_to(number).unwrap();
            publisher
                .send_bytes(&stream, &number.to_le_bytes())
                .unwrap();
        }
    };
    let receive = |subscriber: &mut Subscriber| {
        let sample = subscriber.receive(&stream, LONG).unwrap();
        let gap = sample.info().discontinuity;
        let bytes = sample.to_vec(LONG).unwrap();
        assert_eq!(bytes, sample.sequence().to_le_bytes());
        let is_another = gap.is_some_and(|gap| gap.previous.is_some());
        (
            sample.sequence(),
            gap.map_or(0, |gap| gap.missing),
            is_another,
        )
    };
    let first = forwarder(1);
    let mut subscriber = place.subscriber();
    assert_eq!(subscriber.publisher_source(), Some([1; 16]));
    send(&first, &[5, 6]);
    assert_eq!(receive(&mut subscriber), (5, 0, false));
    assert_eq!(receive(&mut subscriber), (6, 0, false));
    drop(first);
    // One that gives the subscriber nothing new changes nothing, and its samples go back although
    // the subscriber's stream does not go on.
    let silent = forwarder(1);
    send(&silent, &[4, 6]);
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let blocked = place.device.stream().unwrap();
    let hold = move || {
        let _ = wait.recv();
    };
    blocked.call(hold).unwrap();
    let has_released = || {
        let nothing = subscriber.receive(&blocked, Duration::from_millis(50));
        assert!(matches!(nothing, Err(Error::Timeout { .. })), "{nothing:?}");
        silent.subscribers().iter().any(|one| one.in_flight == 0)
    };
    assert!(warpipe_testkit::eventually(LONG, has_released));
    drop((silent, go));
    let second = forwarder(1);
    send(&second, &[3, 6, 9, 10]);
    assert_eq!(receive(&mut subscriber), (9, 2, true));
    assert_eq!(receive(&mut subscriber), (10, 0, false));
    drop(second);
    // Another source's numbers begin anew.
    let other = forwarder(2);
    send(&other, &[2, 10]);
    assert_eq!(receive(&mut subscriber), (2, 0, true));
    assert_eq!(receive(&mut subscriber), (10, 7, false));
}

#[test]
fn numbers_that_stay_below_those_received_before_are_received_again_after_the_longest_history() {
    let place = Place::new("anew");
    let stream = place.device.stream().unwrap();
    let forwarder = || {
        Publisher::new(
            "camera",
            PublisherOptions {
                policy: Policy::Block { timeout: LONG },
                forwards: Some([1; 16]),
                ..place.domain.on(&place.device)
            },
        )
        .unwrap()
    };
    let first = forwarder();
    let mut subscriber = place.subscriber();
    first.skip_to(1 << 62).unwrap();
    first.send_bytes(&stream, b"hello").unwrap();
    assert_eq!(
        subscriber.receive(&stream, LONG).unwrap().sequence(),
        1 << 62
    );
    drop(first);
    let second = forwarder();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let stream = place.device.stream().unwrap();
            second.wait_for_subscribers(1, LONG).unwrap();
            for _ in 0..4098 {
                second.send_bytes(&stream, b"hello").unwrap();
            }
        });
        let sample = subscriber.receive(&stream, LONG).unwrap();
        let gap = sample
            .info()
            .discontinuity
            .expect("it is another publisher's");
        assert_eq!((sample.sequence(), gap.missing), (4097, 0));
        assert!(gap.previous.is_some());
        let sample = subscriber.receive(&stream, LONG).unwrap();
        assert_eq!(
            (sample.sequence(), sample.info().discontinuity),
            (4098, None)
        );
    });
}

/// The device of the publisher refuses its signals.
#[test]
fn a_receipt_says_that_its_sample_was_lost_however_late_it_is_asked() {
    let place = Place::new("receipts");
    let failing = Wrapped::new(place.device.backend().clone(), Failing::default());
    let refusing = Device::from_backend(failing.clone());
    let options = PublisherOptions {
        depth: 1,
        ..place.domain.on(&refusing)
    };
    let publisher = Publisher::new("camera", options).unwrap();
    let mut subscriber =
        Subscriber::open("camera", place.domain.on(&place.device), Duration::ZERO).unwrap();
    let (sending, receiving) = (refusing.stream().unwrap(), place.device.stream().unwrap());
    let mut send = |is_refused: bool| {
        if is_refused {
            failing.hook().aim("batch", 1);
        }
        assert_eq!(
            publisher.send_bytes(&sending, b"sample").is_err(),
            is_refused
        );
        subscriber
            .receive(&receiving, LONG)
            .unwrap()
            .release()
            .unwrap()
    };
    let refused = [
        false, true, true, false, true, true, true, false, false, true,
    ];
    let receipts = refused.map(&mut send);
    for (receipt, is_lost) in receipts.iter().zip(refused) {
        let verdict = receipt.wait(LONG);
        assert_eq!(
            matches!(verdict, Err(Error::Lost(Loss::Sample { .. }))),
            is_lost,
            "{verdict:?}"
        );
    }
    // So many that the history no longer reaches back.
    (0..32).for_each(|_| drop(send(false)));
    drop(send(true));
    assert!(
        receipts
            .iter()
            .all(|receipt| matches!(receipt.check(), Err(Error::Lost(Loss::Sample { .. }))))
    );
}

/// First the call that would release it is refused by the driver, then it is of another subscriber,
/// then there is no next one.
#[test]
fn a_sample_given_for_the_next_one_is_released_whatever_becomes_of_that() {
    let place = Place::new("next");
    let failing = Wrapped::new(place.device.backend().clone(), Failing::default());
    let refusing = Device::from_backend(failing.clone());
    let publisher = Publisher::new("camera", place.domain.on(&place.device)).unwrap();
    let subscribe = || Subscriber::open("camera", place.domain.on(&refusing), Duration::ZERO);
    let (mut one, mut other) = (subscribe().unwrap(), subscribe().unwrap());
    let (sending, stream) = (place.device.stream().unwrap(), refusing.stream().unwrap());
    let send = |byte| _ = publisher.send_bytes(&sending, &[byte]).unwrap();
    let are_in_flight = |count| {
        let of_all = || publisher.subscribers().into_iter().map(|it| it.in_flight);
        warpipe_testkit::eventually(LONG, || of_all().sum::<u32>() == count)
    };
    send(1);
    let first = one.receive(&stream, LONG).unwrap();
    let of_other = other.receive(&stream, LONG).unwrap();
    let (gate, opened) = std::sync::mpsc::channel::<()>();
    sending.call(move || _ = opened.recv()).unwrap();
    send(2);
    failing.hook().aim("batch", 1);
    let refused = one.receive_next(first, LONG);
    assert!(matches!(refused, Err(Error::Driver { .. })), "{refused:?}");
    assert!(are_in_flight(3), "the first one is back");
    // The stream waits for the second one's data behind this release.
    let second = one.receive_next(of_other, LONG).unwrap();
    assert!(are_in_flight(2), "the other one's is back");
    assert!(!second.is_complete().unwrap());
    drop(gate);
    assert_eq!(second.to_vec(LONG).unwrap(), [2]);
    let nothing = one.receive_next(second, Duration::from_millis(1));
    assert!(matches!(nothing, Err(Error::Timeout { .. })), "{nothing:?}");
    assert!(are_in_flight(1), "the second one is back");
}

/// The thread polls until the next sample comes. The first one's data is not complete meanwhile;
/// the second one's is, before there is a third.
#[test]
fn a_release_is_held_back_for_the_next_sample_until_the_data_is_complete() {
    let place = Place::new("held-back");
    let counting = Wrapped::new(place.device.backend().clone(), Counting::default());
    let device = Device::from_backend(counting.clone());
    let publisher = Publisher::new("camera", place.domain.on(&place.device)).unwrap();
    let options = SubscriberOptions {
        spin: LONG,
        ..place.domain.on(&device)
    };
    let mut subscriber = Subscriber::open("camera", options, Duration::ZERO).unwrap();
    let (sending, stream) = (place.device.stream().unwrap(), device.stream().unwrap());
    let send = |byte| _ = publisher.send_bytes(&sending, &[byte]).unwrap();
    let batches = || counting.hook().calls().get("batch").copied().unwrap_or(0);
    // A thread that runs late finds the second one at once.
    for round in 0..20 {
        let before = batches();
        let (gate, opened) = std::sync::mpsc::channel::<()>();
        sending.call(move || _ = opened.recv()).unwrap();
        send(1);
        let first = subscriber.receive(&stream, LONG).unwrap();
        assert_eq!(batches() - before, 1, "the wait, in round {round}");
        std::thread::scope(|scope| {
            let receiver = scope.spawn(|| {
                let second = subscriber.receive_next(first, LONG).unwrap();
                subscriber.receive_next(second, LONG).unwrap()
            });
            send(2);
            let is_done = || batches() - before == 2;
            assert!(
                warpipe_testkit::eventually(LONG, is_done),
                "{} calls",
                batches()
            );
            drop(gate);
            // The thread does not return before there is a third one.
            let has_released = || publisher.subscribers()[0].in_flight == 0;
            assert!(warpipe_testkit::eventually(LONG, has_released));
            assert_eq!(batches() - before, 3, "the second one's release");
            send(3);
            assert_eq!(receiver.join().unwrap().to_vec(LONG).unwrap(), [3]);
        });
    }
}

#[test]
fn a_polled_subscriber_tries_a_name_again_that_closed_on_it() {
    let place = Place::new("closing");
    let stream = place.device.stream().unwrap();
    let first = place.publisher();
    let mut subscriber = place.subscriber();
    let _ = subscriber.as_fd();
    drop(first);
    // Accepts and closes each connection unanswered, as a publisher that is closing does.
    let silent = Silent::at(&place, 8);
    std::thread::scope(|scope| {
        let polling = scope.spawn(|| receive_polled(&mut subscriber, &stream));
        for _ in 0..3 {
            assert!(
                wait_readable(silent.listener.as_fd(), LONG),
                "it does not come again"
            );
            drop(silent.accept().unwrap());
        }
        silent.leave();
        let next = place.publisher();
        next.wait_for_subscribers(1, LONG).unwrap();
        next.send_bytes(&stream, b"hello").unwrap();
        assert_eq!(polling.join().unwrap().to_vec(LONG).unwrap(), b"hello");
    });
}

#[test]
fn a_subscriber_that_finds_its_one_publisher_at_once_makes_no_inotify_instance() {
    let name = "a_subscriber_that_finds_its_one_publisher_at_once_makes_no_inotify_instance";
    alone(module_path!(), name, || {
        let place = Place::new("at-once");
        let waits =
            |wait: Wait<'_>| Subscriber::open("camera", place.domain.on(&place.device), wait);
        let publisher = place.publisher();
        let before = MADE.load(Ordering::SeqCst);
        drop(waits(LONG.into()).unwrap());
        assert_eq!(MADE.load(Ordering::SeqCst), before);
        drop(publisher);
        let is_made = || MADE.load(Ordering::SeqCst) > before;
        let absent = waits(Wait::at_most(LONG).unless(&is_made)).unwrap_err();
        assert!(matches!(absent, Error::NotFound { .. }), "{absent}");
        assert_eq!(MADE.load(Ordering::SeqCst), before + 1);
    });
}

#[test]
fn a_receive_that_polls_for_long_is_cancelled_meanwhile() {
    let place = Place::new("polls");
    let _publisher = place.publisher();
    let mut subscriber = Subscriber::open(
        "camera",
        SubscriberOptions {
            spin: Duration::MAX,
            ..place.domain.on(&place.device)
        },
        Duration::ZERO,
    )
    .unwrap();
    let stream = place.device.stream().unwrap();
    let start = Instant::now();
    let wait = Wait::at_most(LONG).unless(&|| true);
    let late = subscriber.receive(&stream, wait);
    assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
    assert!(start.elapsed() < LONG);
}

#[test]
fn a_receive_ends_in_time_while_the_driver_holds_up_the_mapping_of_a_region() {
    let place = Place::new("mapping");
    let holding = Wrapped::new(place.device.backend().clone(), Holding::default());
    let device = Device::from_backend(holding.clone());
    let publisher = place.publisher();
    let mut subscriber =
        Subscriber::open("camera", place.domain.on(&device), Duration::ZERO).unwrap();
    let stream = device.stream().unwrap();
    holding.hook().hold("import");
    let mut loan = publisher
        .loan(&Layout::bytes_only(64 << 20).unwrap())
        .unwrap();
    loan.set_metadata(b"in a new region").unwrap();
    loan.send(&place.device.stream().unwrap()).unwrap();
    holding.hook().wait_for(1);
    let (told, late) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let (subscriber, stream) = (&mut subscriber, &stream);
        scope.spawn(move || {
            let late = subscriber.receive(stream, Duration::from_millis(20));
            told.send(late.map(drop)).unwrap();
        });
        let late = late.recv_timeout(LONG);
        holding.hook().unblock();
        assert!(matches!(late, Ok(Err(Error::Timeout { .. }))), "{late:?}");
    });
    let sample = subscriber.receive(&stream, LONG).unwrap();
    assert_eq!(sample.metadata(), b"in a new region");
}

/// The thread polls, for all that the test knows, for an hour.
#[test]
fn a_wait_that_polls_ends_with_its_publisher_or_finds_the_next_one() {
    const HOUR: Duration = Duration::from_secs(3600);
    for reconnect in [false, true] {
        let place = Place::new(&format!("polling-{reconnect}"));
        let stream = place.device.stream().unwrap();
        let publisher = place.publisher();
        let options = SubscriberOptions {
            reconnect,
            spin: HOUR,
            ..place.domain.on(&place.device)
        };
        let mut subscriber = Subscriber::open("camera", options, Duration::ZERO).unwrap();
        publisher.send_bytes(&stream, b"first").unwrap();
        let first = subscriber.receive(&stream, LONG).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || _ = tell.send(subscriber.receive_next(first, HOUR)));
        // It polls.
        let has_released = || publisher.subscribers()[0].in_flight == 0;
        assert!(warpipe_testkit::eventually(LONG, has_released));
        drop(publisher);
        let publisher = place.publisher();
        if reconnect {
            publisher.wait_for_subscribers(1, LONG).unwrap();
            publisher.send_bytes(&stream, b"second").unwrap();
        }
        match told.recv_timeout(LONG).expect("a result") {
            Ok(second) => assert_eq!(second.to_vec(LONG).unwrap(), b"second"),
            end => assert!(matches!(end, Err(Error::PeerGone { .. })), "{end:?}"),
        }
    }
}

/// Another thread begins the capture while this one polls. The graph would record the release.
#[test]
fn a_capture_that_begins_while_a_release_is_held_back_does_not_get_it() {
    #[derive(Debug, Default)]
    struct Capturing(AtomicBool);
    impl Hook for Capturing {
        fn before(&self, _: &'static str) -> Result<()> {
            Ok(())
        }
        fn is_capturing(&self, _: RawStream) -> bool {
            self.0.load(Ordering::Relaxed)
        }
    }
    let place = Place::new("captured");
    let wrapped = Wrapped::new(place.device.backend().clone(), Capturing::default());
    let (device, is_capturing) = (Device::from_backend(wrapped.clone()), &wrapped.hook().0);
    let publisher = Publisher::new("camera", place.domain.on(&place.device)).unwrap();
    let options = SubscriberOptions {
        spin: LONG,
        ..place.domain.on(&device)
    };
    let mut subscriber = Subscriber::open("camera", options, Duration::ZERO).unwrap();
    let (sending, stream) = (place.device.stream().unwrap(), device.stream().unwrap());
    let (gate, opened) = std::sync::mpsc::channel::<()>();
    sending.call(move || _ = opened.recv()).unwrap();
    publisher.send_bytes(&sending, &[1]).unwrap();
    let first = subscriber.receive(&stream, LONG).unwrap();
    // Asked by a thread that polls.
    let begin = || {
        if !is_capturing.swap(true, Ordering::Relaxed) {
            publisher.send_bytes(&sending, &[2]).unwrap();
        }
        false
    };
    let refused = subscriber.receive_next(first, Wait::from(LONG).unless(&begin));
    let is_of_capture = matches!(refused, Err(Error::State(StateFault::Capturing(_))));
    assert!(is_of_capture, "{refused:?}");
    is_capturing.store(false, Ordering::Relaxed);
    drop(gate);
    let second = subscriber.receive(&stream, LONG).unwrap();
    assert_eq!(second.to_vec(LONG).unwrap(), [2]);
    let is_back = || publisher.subscribers()[0].in_flight == 1;
    assert!(warpipe_testkit::eventually(LONG, is_back));
}
