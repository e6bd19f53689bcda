//! Owner and importers in one process. The conformance suite covers deaths of other processes.

use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use std::os::fd::AsFd;

use super::*;
use crate::Domain;
use crate::backend::testing::{Holding, Wrapped};
use crate::ipc::{Address, ClientSession};
use crate::shm::page::UnsealedPage;

const WAIT: Duration = Duration::from_secs(10);

struct Stage {
    domain: Domain,
    device: Device,
}

impl Stage {
    fn new(title: &str) -> Stage {
        let folder =
            std::env::temp_dir().join(format!("warpipe-timeline-{title}-{}", std::process::id()));
        Stage {
            domain: Domain::at(folder).unwrap(),
            device: Device::host(),
        }
    }

    fn create(&self) -> Timeline {
        Timeline::new("steps", self.domain.on(&self.device)).unwrap()
    }

    fn open(&self) -> Timeline {
        Timeline::open("steps", self.domain.on(&self.device), Duration::ZERO).unwrap()
    }

    fn stream(&self) -> Stream {
        self.device.stream().unwrap()
    }

    /// A stream that is blocked until the sender is dropped.
    fn held(&self) -> (Stream, Sender<()>) {
        let (go, held) = channel::<()>();
        let stream = self.stream();
        stream.call(move || assert!(held.recv().is_err())).unwrap();
        (stream, go)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.domain.path());
    }
}

#[test]
fn a_wait_of_zero_says_which_value_or_whose_work_is_not_there() {
    let stage = Stage::new("zero");
    let (owner, (slow, go)) = (stage.create(), stage.held());
    owner.signal(&slow, 1, WAIT).unwrap();
    let late = owner.wait_host(1, Duration::ZERO).unwrap_err().to_string();
    assert!(late.starts_with("value 1 of timeline"), "{late}");
    let late = slow.synchronize(Duration::ZERO).unwrap_err().to_string();
    assert!(late.starts_with("the end of the stream's work"), "{late}");
    drop(go);
    slow.synchronize(WAIT).unwrap();
}

#[test]
fn a_value_that_does_not_grow_is_refused_and_changes_nothing() {
    let stage = Stage::new("backwards");
    let (owner, stream) = (stage.create(), stage.stream());
    owner.signal(&stream, 5, WAIT).unwrap();
    for value in [0, 4, 5] {
        let signalled = owner.signal(&stream, value, WAIT);
        assert!(
            matches!(&signalled, Err(Error::Argument { argument: "value", allowed, .. }) if allowed.starts_with("above 5,")),
            "{signalled:?}"
        );
        assert!(matches!(
            owner.signal_now(value, WAIT),
            Err(Error::Argument {
                argument: "value",
                ..
            })
        ));
    }
    assert!(matches!(
        owner.signal(&stream, Timeline::VALUE_MAX + 1, WAIT),
        Err(Error::Argument { .. })
    ));
    stream.synchronize(WAIT).unwrap();
    assert_eq!(owner.value(), 5);
    owner.signal_now(Timeline::VALUE_MAX, WAIT).unwrap();
    assert_eq!(owner.value(), Timeline::VALUE_MAX);
}

#[test]
fn only_the_owner_signals() {
    let stage = Stage::new("owner");
    let (_owner, importer) = (stage.create(), stage.open());
    let pid = std::process::id() as i32;
    let refused = importer.signal(&stage.stream(), 1, WAIT).unwrap_err();
    assert!(
        matches!(&refused, Error::Refused { text, .. } if text.contains(&format!("process {pid},"))),
        "{refused}"
    );
    assert!(matches!(
        importer.signal_now(1, WAIT),
        Err(Error::Refused { .. })
    ));
    assert!(!importer.is_owner());
}

#[test]
fn the_cpu_cannot_overtake_a_stream() {
    let stage = Stage::new("overtake");
    let owner = stage.create();
    let (slow, go) = stage.held();
    owner.signal(&slow, 3, WAIT).unwrap();
    let pending = owner.signal_now(4, WAIT).unwrap_err();
    assert!(
        matches!(&pending, Error::Argument { found, allowed, .. }
            if found == "4" && allowed.contains("stands at 0, has reached 3,")),
        "{pending}"
    );
    drop(go);
    owner.wait_host(3, WAIT).unwrap();
    slow.synchronize(WAIT).unwrap();
    owner.signal_now(4, WAIT).unwrap();
    assert_eq!(owner.value(), 4);
}

#[test]
fn an_owner_waits_only_for_what_was_signalled() {
    let stage = Stage::new("own-wait");
    let (owner, stream) = (stage.create(), stage.stream());
    assert!(matches!(
        owner.wait(&stream, 1),
        Err(Error::Argument { .. })
    ));
    owner.signal_now(1, WAIT).unwrap();
    owner.wait(&stream, 1).unwrap();
    assert!(matches!(
        owner.wait_host(2, Duration::from_millis(1)),
        Err(Error::Timeout { .. })
    ));
}

#[test]
fn an_owner_that_closes_signals_what_it_promised_and_lets_the_others_go() {
    let stage = Stage::new("close");
    let (owner, importer) = (stage.create(), stage.open());
    let ((slow, go), early, late) = (stage.held(), stage.stream(), stage.stream());
    owner.signal(&slow, 3, WAIT).unwrap();
    importer.wait(&early, 3).unwrap();
    importer.wait(&late, 4).unwrap();
    drop(owner);
    assert!(!importer.check(3).unwrap(), "it is still to come");
    drop(go);
    early.synchronize(WAIT).unwrap();
    assert!(importer.check(3).unwrap());
    late.synchronize(WAIT).unwrap();
    let gone = importer.check(4).unwrap_err();
    assert!(
        matches!(
            gone,
            Error::PeerGone {
                kind: Kind::Timeline,
                graceful: true,
                ..
            }
        ),
        "{gone}"
    );
    assert!(matches!(
        importer.wait(&late, 4),
        Err(Error::PeerGone { .. })
    ));
    assert!(matches!(
        importer.wait_host(4, WAIT),
        Err(Error::PeerGone { .. })
    ));
    assert_eq!(importer.value(), 3);
    assert!(matches!(
        Timeline::open("steps", stage.domain.on(&stage.device), Duration::ZERO),
        Err(Error::NotFound { .. })
    ));
}

#[test]
fn an_importer_that_leaves_early_leaves_its_stream_waiting_for_the_right_value() {
    let stage = Stage::new("leave");
    let (owner, importer, stream) = (stage.create(), stage.open(), stage.stream());
    importer.wait(&stream, 1).unwrap();
    drop(importer);
    assert!(!stream.is_idle().unwrap());
    owner.signal_now(1, WAIT).unwrap();
    stream.synchronize(WAIT).unwrap();
}

#[test]
fn a_wait_for_a_timeline_finds_one_that_is_created_later() {
    let stage = Stage::new("later");
    let absent =
        Timeline::open("steps", stage.domain.on(&stage.device), Duration::ZERO).unwrap_err();
    assert!(
        matches!(
            absent,
            Error::NotFound {
                kind: Kind::Timeline,
                ..
            }
        ),
        "{absent}"
    );
    std::thread::scope(|scope| {
        let importer =
            scope.spawn(|| Timeline::open("steps", stage.domain.on(&stage.device), WAIT).unwrap());
        let owner = stage.create();
        owner.signal_now(7, WAIT).unwrap();
        importer.join().unwrap().wait_host(7, WAIT).unwrap();
    });
}

#[test]
fn handles_go_between_threads() {
    fn is_free<T: Send + Sync>() {}
    is_free::<Timeline>();
    is_free::<crate::Event>();
}

#[test]
fn an_importer_that_scribbles_harms_neither_the_owner_nor_the_other_importers() {
    let stage = Stage::new("scribble");
    let (owner, importer, honest) = (stage.create(), stage.open(), stage.open());
    let word = || {
        importer
            .lane
            .page()
            .at::<crate::backend::TimelineWord>(LANE_OFFSET)
    };
    let streams = [stage.stream(), stage.stream()];
    for value in 1..=20 {
        owner
            .signal(&streams[value as usize % 2], value, WAIT)
            .unwrap();
        word().store(if value % 3 == 0 { u64::MAX } else { 0 });
    }
    streams
        .iter()
        .for_each(|stream| stream.synchronize(WAIT).unwrap());
    owner.signal_now(21, WAIT).unwrap();
    word().store(3);
    let (waiting, other) = (stage.stream(), stage.stream());
    importer.wait(&waiting, 21).unwrap();
    assert!(!waiting.is_idle().unwrap(), "it can hold up itself");
    honest.wait(&other, 21).unwrap();
    other.synchronize(WAIT).unwrap();
    assert_eq!((honest.value(), owner.value()), (21, 21));
    assert!(!honest.check(22).unwrap());
    drop(owner);
    waiting.synchronize(WAIT).unwrap();
    assert!(
        importer.check(21).unwrap(),
        "the owner's own word counts in the end"
    );
    assert!(matches!(importer.check(22), Err(Error::PeerGone { .. })));
}

#[test]
fn no_page_of_a_timeline_can_be_removed_and_no_importer_has_anothers() {
    let stage = Stage::new("holes");
    let (owner, importers) = (stage.create(), [stage.open(), stage.open()]);
    let streams = [stage.stream(), stage.stream()];
    importers
        .iter()
        .zip(&streams)
        .for_each(|(importer, stream)| importer.wait(stream, 1).unwrap());
    // This process holds both ends of each page: all mappings and descriptors that exist.
    let pages = importers.each_ref().map(|importer| {
        let word = importer
            .lane
            .page()
            .at::<crate::backend::TimelineWord>(LANE_OFFSET);
        crate::hostile::holes::removes_page_of(word)
    });
    assert!(
        pages[0].0 != pages[1].0 && !pages[0].1 && !pages[1].1,
        "{pages:?}"
    );
    owner.signal_now(1, WAIT).unwrap();
    streams
        .iter()
        .for_each(|stream| stream.synchronize(WAIT).unwrap());
}

#[test]
fn importers_agree_on_the_last_value_of_an_owner_that_died_between_their_copies() {
    let stage = Stage::new("agree");
    let (owner, importers) = (stage.create(), [stage.open(), stage.open()]);
    owner.signal_now(3, WAIT).unwrap();
    // Its stream has signalled 4, and to the first importer alone.
    let TimelineRole::Owner { signals, .. } = &owner.role else {
        panic!("the owner")
    };
    signals.timeline_server.signaller.reach_in_part(4, 1);
    for importer in &importers {
        let TimelineRole::Importer { death_handler, .. } = &importer.role else {
            panic!("an opened timeline")
        };
        death_handler.on_proven_dead();
        assert_eq!((importer.value(), importer.check(4).unwrap()), (4, true));
        assert_eq!(importer.wait_status(5), WaitStatus::Never);
    }
}

#[test]
fn an_importer_whose_page_is_none_gets_no_signals_and_a_second_page_takes_the_place_of_the_first() {
    let stage = Stage::new("unsealed");
    let (owner, honest) = (stage.create(), stage.open());
    let name = EndpointName::new("steps").unwrap();
    let at = Address {
        domain: &stage.domain,
        name: &name,
        kind: Kind::Timeline,
    };
    let (session, incoming) =
        ClientSession::attach(&at, Some(stage.device.info().id), &[], Duration::ZERO).unwrap();
    let ((), [published]) = incoming.open::<(), 1>("steps").unwrap();
    let published = SharedPage::read(published, PAGE_BYTES, "steps").unwrap();
    let published = SharedCounter::new(&Arc::new(published), LANE_OFFSET);
    let lane = OnceLock::new();
    session
        .observe(Arc::new(OwnerDeathHandler { lane, published }))
        .unwrap();
    let longer = UnsealedPage::create(2 * PAGE_BYTES).unwrap();
    let refused = session
        .request_with(&[], Some(longer.as_fd()), WAIT)
        .unwrap_err();
    assert!(
        matches!(refused, Error::Refused { denied: false, .. }),
        "{refused}"
    );
    owner.signal_now(1, WAIT).unwrap();
    let pages = [(); 2].map(|()| UnsealedPage::create(PAGE_BYTES).unwrap());
    for page in &pages {
        // A kernel that can lets no second descriptor in.
        let _ = session.request_with(&[], Some(page.as_fd()), WAIT);
    }
    owner.signal_now(2, WAIT).unwrap();
    drop(pages);
    drop(session);
    owner.signal_now(3, WAIT).unwrap();
    honest.wait_host(3, WAIT).unwrap();
}

#[test]
fn an_importer_that_comes_late_sees_values_between_as_they_are_reached() {
    let stage = Stage::new("late");
    let owner = stage.create();
    let ((slow, go), (slower, go_on), reading) = (stage.held(), stage.held(), stage.stream());
    owner.signal(&slow, 3, WAIT).unwrap();
    owner.signal(&slower, 5, WAIT).unwrap();
    let importer = stage.open();
    importer.wait(&reading, 2).unwrap();
    drop(go);
    reading.synchronize(WAIT).unwrap();
    assert!(importer.check(3).unwrap() && !importer.check(4).unwrap());
    drop(go_on);
    importer.wait_host(5, WAIT).unwrap();
    slower.synchronize(WAIT).unwrap();
}

#[test]
fn while_the_driver_holds_up_a_signal_importers_come_and_go_and_miss_nothing() {
    let stage = Stage::new("held-up");
    let wrapped = Wrapped::new(stage.device.backend().clone(), Holding::default());
    let device = Device::from_backend(wrapped.clone());
    let owner = Timeline::new("steps", stage.domain.on(&device)).unwrap();
    let (writing, reading) = (device.stream().unwrap(), stage.stream());
    let leaver = stage.open();
    owner.signal(&writing, 3, WAIT).unwrap();
    wrapped.hook().hold("batch");
    std::thread::scope(|scope| {
        let held_up = scope.spawn(|| owner.signal(&writing, 5, WAIT));
        wrapped.hook().wait_for(1);
        drop(leaver);
        let importer = stage.open();
        importer.wait_host(3, WAIT).unwrap();
        assert!(!importer.check(4).unwrap(), "before its time");
        importer.wait(&reading, 5).unwrap();
        drop(stage.open());
        wrapped.hook().unblock();
        held_up.join().unwrap().unwrap();
        reading.synchronize(WAIT).unwrap();
        assert!(importer.check(5).unwrap() && !importer.check(6).unwrap());
    });
}

#[test]
fn an_opener_that_waits_goes_on_with_the_next_owner_when_one_closes_during_the_attachment() {
    let stage = Stage::new("next-owner");
    let first = stage.create();
    let held = Wrapped::new(stage.device.backend().clone(), Holding::default());
    let device = Device::from_backend(held.clone());
    // The importer has its answer by then, and has not sealed its page.
    held.hook().hold("register");
    std::thread::scope(|scope| {
        let opening = scope.spawn(|| Timeline::open("steps", stage.domain.on(&device), WAIT));
        held.hook().wait_for(1);
        drop(first);
        let next = stage.create();
        held.hook().unblock();
        let importer = opening.join().unwrap().unwrap();
        next.signal_now(7, WAIT).unwrap();
        importer.wait_host(7, WAIT).unwrap();
    });
}
