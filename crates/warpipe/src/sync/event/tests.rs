//! Events within one process. The conformance suite covers other processes.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::time::Duration;

use super::event_table::EventRequest;
use super::layout::LANES_PER_EVENT;
use super::*;
use crate::backend::testing::{Holding, Wrapped};
use crate::error::NameFault;
use crate::ipc::domain::Domain;
use crate::wait::Wait;

const WAIT: Duration = Duration::from_secs(10);

struct Stage {
    domain: Domain,
    device: Device,
}

impl Stage {
    /// In the handle's domain.
    fn open(&self, handle: &EventHandle) -> Result<Event> {
        let options = OpenOptions {
            device: Some(self.device.clone()),
            ..OpenOptions::default()
        };
        Event::open(handle, options, Duration::ZERO)
    }

    fn new(title: &str) -> Stage {
        let folder =
            std::env::temp_dir().join(format!("warpipe-event-{title}-{}", std::process::id()));
        Stage {
            domain: Domain::at(folder).unwrap(),
            device: Device::host(),
        }
    }

    fn create(&self) -> Event {
        Event::new(self.domain.on(&self.device)).unwrap()
    }

    /// An importer of its own, like that of another process.
    fn opened(&self, event: &Event) -> Event {
        let handle = event.handle().unwrap();
        let importer = EventImporter::connect(
            &handle.body,
            &self.domain,
            &self.device,
            &Duration::ZERO.into(),
        )
        .unwrap();
        Event::of_importer(importer, &handle, &self.device, &Duration::ZERO.into()).unwrap()
    }

    fn stream(&self) -> Stream {
        self.device.stream().unwrap()
    }

    /// A stream that is blocked until the sender is dropped.
    fn held(&self) -> (Stream, std::sync::mpsc::Sender<()>) {
        let ((go, held), stream) = (channel::<()>(), self.stream());
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
fn a_wait_of_zero_says_which_events_work_is_not_done() {
    let stage = Stage::new("zero");
    let (event, (slow, go)) = (stage.create(), stage.held());
    event.record(&slow, WAIT).unwrap();
    let late = event.synchronize(Duration::ZERO).unwrap_err().to_string();
    assert!(late.starts_with("the work recorded by event"), "{late}");
    drop(go);
    slow.synchronize(WAIT).unwrap();
}

#[test]
fn a_stream_waits_for_the_last_recording() {
    let stage = Stage::new("last");
    let (event, reading) = (stage.create(), stage.device.stream().unwrap());
    let writing = stage.device.stream().unwrap();
    event.record(&writing, WAIT).unwrap();
    event.synchronize(WAIT).unwrap();
    let (go, held) = channel::<()>();
    writing.call(move || assert!(held.recv().is_err())).unwrap();
    let recording = event.record(&writing, WAIT).unwrap();
    assert_eq!(event.wait(&reading).unwrap(), recording);
    assert!(!event.query().unwrap() && !reading.is_idle().unwrap());
    assert!(matches!(
        event.synchronize(Duration::from_millis(1)),
        Err(Error::Timeout { .. })
    ));
    drop(go);
    reading.synchronize(WAIT).unwrap();
    assert!(event.check(recording).unwrap());
}

#[test]
fn an_event_opened_in_its_own_process_is_the_event_itself_until_it_is_dropped() {
    let stage = Stage::new("same");
    let (event, stream) = (stage.create(), stage.device.stream().unwrap());
    let handle = event.handle().unwrap();
    let other = stage.open(&handle).unwrap();
    other.record(&stream, WAIT).unwrap();
    event.synchronize(WAIT).unwrap();
    let next = stage.create();
    drop((event, other));
    let dropped = stage.open(&handle).unwrap_err();
    assert!(
        matches!(
            dropped,
            Error::Handle {
                what: "event handle",
                fault: HandleFault::Dropped
            }
        ),
        "{dropped}"
    );
    drop(next);
    let gone = stage.open(&handle).unwrap_err();
    assert!(
        matches!(
            gone,
            Error::NotFound {
                was_there: false,
                ..
            }
        ),
        "{gone}"
    );
}

#[test]
fn a_reused_slot_holds_an_event_that_was_never_recorded() {
    let stage = Stage::new("again");
    let (keep, stream) = (stage.create(), stage.device.stream().unwrap());
    let (go, held) = channel::<()>();
    stream.call(move || assert!(held.recv().is_err())).unwrap();
    let event = stage.create();
    event.record(&stream, WAIT).unwrap();
    let index = event.inner.state.index;
    drop(event);
    let event = stage.create();
    assert_eq!(
        (event.inner.state.index, event.inner.state.serial),
        (index, 2)
    );
    assert!(matches!(
        event.query(),
        Err(Error::State(StateFault::NotRecorded(_)))
    ));
    let quick = stage.device.stream().unwrap();
    let recording = event.record(&quick, WAIT).unwrap();
    assert!(
        !event.check(recording).unwrap(),
        "the count of the first is still to be reached"
    );
    drop(go);
    event.synchronize(WAIT).unwrap();
    drop(keep);
}

#[test]
fn an_event_of_another_kind_of_device_or_of_nobody_is_not_opened() {
    let stage = Stage::new("foreign");
    let event = stage.create();
    let mut handle = event.handle().unwrap();
    handle.body.device.kind = crate::backend::DeviceKind::Cuda;
    let other = stage.open(&handle).unwrap_err();
    assert!(
        matches!(
            other,
            Error::Handle {
                what: "event handle",
                fault: HandleFault::Device { .. }
            }
        ),
        "{other}"
    );
    let mut handle = event.handle().unwrap();
    handle.body.domain = stage.domain.path().join("nowhere");
    handle.body.generation[0] ^= 1;
    assert!(matches!(
        stage.open(&handle),
        Err(Error::Name(NameFault::Domain { .. }))
    ));
    assert!(
        !handle.body.domain.exists(),
        "a handle makes no directories"
    );
}

#[test]
fn a_handle_of_a_domain_with_a_relative_path_leads_there_from_any_directory() {
    let stage = Stage::new("relative");
    let here = std::env::current_dir().unwrap();
    let up: std::path::PathBuf = here.components().skip(1).map(|_| "..").collect();
    let relative = up.join(stage.domain.path().strip_prefix("/").unwrap());
    let event = Event::new(Domain::at(relative).unwrap().on(&stage.device)).unwrap();
    assert!(event.handle().unwrap().body.domain.is_absolute());
    assert!(event.handle().unwrap().domain().is_ok());
}

#[test]
fn a_recording_by_any_process_is_waited_for_by_all_others() {
    let stage = Stage::new("all");
    let event = stage.create();
    let users = [event.clone(), stage.opened(&event), stage.opened(&event)];
    for recorder in 0..users.len() {
        let (writing, go) = stage.held();
        let recording = users[recorder].record(&writing, WAIT).unwrap();
        let streams: Vec<Stream> = users.iter().map(|_| stage.stream()).collect();
        for (user, stream) in users.iter().zip(&streams) {
            assert_eq!(
                user.wait(stream).unwrap(),
                recording,
                "it is the last one for all of them"
            );
            assert!(!stream.is_idle().unwrap() && !user.query().unwrap());
        }
        drop(go);
        streams
            .iter()
            .for_each(|stream| stream.synchronize(WAIT).unwrap());
        users
            .iter()
            .for_each(|user| user.synchronize(WAIT).unwrap());
    }
}

#[test]
fn no_page_of_an_event_can_be_removed_and_no_importer_has_anothers() {
    let stage = Stage::new("holes");
    let event = stage.create();
    let opened_by_others = [stage.opened(&event), stage.opened(&event)];
    // This process holds both ends of each page: all mappings and descriptors that exist.
    let pages = opened_by_others.each_ref().map(|opened| {
        let word = opened
            .inner
            .state
            .event_words
            .page()
            .at::<std::sync::atomic::AtomicU64>(0);
        crate::hostile::holes::removes_page_of(word)
    });
    assert!(
        pages[0].0 != pages[1].0 && !pages[0].1 && !pages[1].1,
        "{pages:?}"
    );
}

#[test]
fn an_importer_that_scribbles_deceives_itself_alone() {
    use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
    let stage = Stage::new("scribble");
    let event = stage.create();
    let (wrong, honest) = (stage.opened(&event), stage.opened(&event));
    for value in [u64::MAX, 0, i64::MAX as u64, 1 << 56 | 7, 7 << 56 | 7] {
        let ((writing, go), reading) = (stage.held(), stage.stream());
        let recording = event.record(&writing, WAIT).unwrap();
        let page = wrong.inner.state.event_words.page();
        (0..page.bytes() / 8).for_each(|word| page.at::<AtomicU64>(8 * word).store(value, SeqCst));
        assert_eq!(
            (honest.wait(&reading).unwrap(), event.inner.latest()),
            (recording, Some(recording))
        );
        assert!(!reading.is_idle().unwrap());
        drop(go);
        reading.synchronize(WAIT).unwrap();
        assert!(honest.check(recording).unwrap());
        // The stream writes the exporter's own word last.
        writing.synchronize(WAIT).unwrap();
        assert!(event.check(recording).unwrap());
    }
}

#[test]
fn an_importer_that_comes_late_waits_for_what_was_recorded_before() {
    let stage = Stage::new("late");
    let event = stage.create();
    let first = stage.opened(&event);
    let (makers, go) = stage.held();
    event.record(&makers, WAIT).unwrap();
    let (late, reading) = (stage.opened(&event), stage.stream());
    late.wait(&reading).unwrap();
    let (opened_by_others, go_on) = stage.held();
    // No third process has the event open during this recording: the exporter reports it to the one
    // that opens it later.
    drop(late);
    let recording = first.record(&opened_by_others, WAIT).unwrap();
    let (later, waiting) = (stage.opened(&event), stage.stream());
    assert_eq!(later.wait(&waiting).unwrap(), recording);
    assert!(!reading.is_idle().unwrap() && !waiting.is_idle().unwrap());
    drop(go);
    reading.synchronize(WAIT).unwrap();
    drop(go_on);
    waiting.synchronize(WAIT).unwrap();
    assert!(later.check(recording).unwrap());
}

#[test]
fn no_wait_lasts_for_ever_for_an_importer_that_lied_and_left() {
    let stage = Stage::new("liar");
    let event = stage.create();
    let (liar, honest) = (stage.opened(&event), stage.opened(&event));
    let last = liar.record(&stage.stream(), WAIT).unwrap();
    let lie = Recording {
        count: last.count + 5,
        ..last
    };
    liar.inner
        .state
        .event_words
        .importer_latest()
        .store(now_ns(), lie);
    let EventRole::Importer(importer) = &liar.inner.role else {
        panic!("an importer")
    };
    importer
        .send_recording(liar.inner.state.index, lie, now_ns())
        .unwrap();
    let streams = [stage.stream(), stage.stream()];
    assert_eq!(event.wait(&streams[0]).unwrap(), lie);
    assert_eq!(honest.wait(&streams[1]).unwrap(), lie);
    assert!(
        streams.iter().all(|stream| !stream.is_idle().unwrap()),
        "while it is there it may still come"
    );
    drop(liar);
    streams
        .iter()
        .for_each(|stream| stream.synchronize(WAIT).unwrap());
    for user in [&event, &honest] {
        assert!(matches!(
            user.check(lie),
            Err(Error::Lost(Loss::Event { .. }))
        ));
        assert!(user.check(last).unwrap());
    }
}

#[test]
fn a_slot_that_importers_have_used_holds_a_new_event_for_them() {
    let stage = Stage::new("places");
    let keep = stage.create();
    for round in 0..3 {
        let event = stage.create();
        let (opened, other) = (stage.opened(&event), stage.opened(&event));
        assert!(
            matches!(
                opened.query(),
                Err(Error::State(StateFault::NotRecorded(_)))
            ),
            "round {round}"
        );
        event.record(&stage.stream(), WAIT).unwrap();
        opened.record(&stage.stream(), WAIT).unwrap();
        [&event, &opened, &other]
            .iter()
            .for_each(|user| user.synchronize(WAIT).unwrap());
        drop((event, opened, other));
    }
    drop(keep);
}

#[test]
fn a_failed_open_while_the_exporter_ends_is_reported_as_owner_gone() {
    use crate::backend::testing::{Failing, Wrapped};
    let stage = Stage::new("dying");
    let backend = Wrapped::new(stage.device.backend().clone(), Failing::default());
    let device = Device::from_backend(backend.clone());
    let event = stage.create();
    let handle = event.handle().unwrap();
    let open = || {
        backend.hook().aim("open_event", 1);
        let importer =
            EventImporter::connect(&handle.body, &stage.domain, &device, &Duration::ZERO.into())
                .unwrap();
        Event::of_importer(importer, &handle, &device, &Duration::ZERO.into())
            .map(drop)
            .unwrap_err()
    };
    let refused = open();
    assert!(
        matches!(
            refused,
            Error::Driver {
                code: Error::INJECTED,
                ..
            }
        ),
        "its maker lives: {refused}"
    );
    let refused = std::thread::scope(|scope| {
        backend.hook().aim("open_event", 1);
        let importer =
            EventImporter::connect(&handle.body, &stage.domain, &device, &Duration::ZERO.into())
                .unwrap();
        // The driver no longer knows the exporter's event, and the socket is still open.
        let opening = scope.spawn(|| {
            Event::of_importer(importer, &handle, &device, &Duration::ZERO.into())
                .map(drop)
                .unwrap_err()
        });
        drop(event);
        opening.join().unwrap()
    });
    assert!(matches!(refused, Error::PeerGone { .. }), "{refused}");
}

#[test]
fn a_recording_that_the_driver_blocks_delays_no_importer_and_times_another_thread_out() {
    let wrapped = Wrapped::new(Device::host().backend().clone(), Holding::default());
    let (opened_by_others, mut stage) = (Stage::new("held"), Stage::new("held"));
    stage.device = Device::from_backend(wrapped.clone());
    let (event, early) = (stage.create(), stage.create());
    let (writing, other, reading) = (stage.stream(), stage.stream(), opened_by_others.stream());
    event.record(&writing, WAIT).unwrap();
    let leaver = opened_by_others.opened(&event);
    wrapped.hook().hold("batch");
    std::thread::scope(|scope| {
        let held_up = scope.spawn(|| event.record(&writing, WAIT));
        wrapped.hook().wait_for(1);
        let late = event.record(&other, Duration::from_millis(10)).unwrap_err();
        assert!(matches!(late, Error::Timeout { .. }), "{late}");
        let cancelled = event.record(&other, Wait::at_most(WAIT).unless(&|| true));
        assert!(
            matches!(cancelled, Err(Error::Timeout { .. })),
            "{cancelled:?}"
        );
        drop(leaver);
        let opened = opened_by_others.opened(&event);
        assert!(
            matches!(
                opened_by_others.opened(&early).query(),
                Err(Error::State(StateFault::NotRecorded(_)))
            ),
            "the server goes on"
        );
        let first = opened.wait(&reading).unwrap();
        reading.synchronize(WAIT).unwrap();
        wrapped.hook().unblock();
        let second = held_up.join().unwrap().unwrap();
        assert_eq!((first.count + 1, first.lane), (second.count, second.lane));
        assert_eq!(opened.wait(&reading).unwrap(), second);
        reading.synchronize(WAIT).unwrap();
        assert!(
            opened.check(second).unwrap(),
            "an importer that opened it meanwhile gets it, too"
        );
    });
}

#[test]
fn lanes_and_openings_granted_too_late_are_not_lost() {
    let stage = Stage::new("given-back");
    let (event, stream) = (stage.create(), stage.stream());
    let opened = stage.opened(&event);
    let (EventRole::Importer(importer), EventRole::Exporter(exporter)) =
        (&opened.inner.role, &event.inner.role)
    else {
        unreachable!()
    };
    let (index, serial) = (event.inner.state.index, event.inner.state.serial);
    for _ in 1..LANES_PER_EVENT {
        importer.ask_and_give_up(&EventRequest::Open { index, serial });
        importer.ask_and_give_up(&EventRequest::Lane { index });
    }
    opened.record(&stream, WAIT).unwrap();
    let start = std::time::Instant::now();
    while exporter.openings(index) > 1 {
        assert!(
            start.elapsed() < 3 * WAIT,
            "{} openings",
            exporter.openings(index)
        );
        std::thread::yield_now();
    }
    event.synchronize(WAIT).unwrap();
}

#[test]
fn handles_that_a_process_has_opened_apart_record_in_the_order_of_their_calls() {
    let stage = Stage::new("apart");
    let event = stage.create();
    let first = stage.opened(&event);
    let EventRole::Importer(importer) = &first.inner.role else {
        panic!("an importer")
    };
    let importer = importer.clone();
    let again = || {
        let handle = event.handle().unwrap();
        Event::of_importer(
            importer.clone(),
            &handle,
            &stage.device,
            &Duration::ZERO.into(),
        )
        .unwrap()
    };
    let ((slow, go), quick) = (stage.held(), stage.stream());
    first.record(&slow, WAIT).unwrap();
    let second = again();
    let recording = second.record(&quick, WAIT).unwrap();
    // Also behind a handle that is dropped while its recording is under way.
    drop((first, second));
    let third = again();
    assert!(!third.query().unwrap() && !event.check(recording).unwrap());
    let last = third.record(&quick, WAIT).unwrap();
    assert_eq!(last.count, recording.count + 1);
    drop(go);
    event.synchronize(WAIT).unwrap();
    assert!(third.check(last).unwrap() && event.check(recording).unwrap());
}

#[test]
fn the_first_recording_of_an_opened_event_needs_no_wait_and_can_be_cancelled() {
    let stage = Stage::new("zero");
    let event = stage.create();
    let opened = stage.opened(&event);
    let looks = std::cell::Cell::new(0);
    let cancelled = || {
        // Nobody's turn is held meanwhile.
        assert!(opened.inner.state.recording.try_lock().is_some());
        looks.set(looks.get() + 1);
        true
    };
    let wait = Wait::at_most(WAIT).unless(&cancelled);
    let error = opened.record(&stage.stream(), wait).unwrap_err();
    assert!(
        matches!(error, Error::Timeout { .. }) && looks.get() > 0,
        "{error}"
    );
    assert!(matches!(
        event.query(),
        Err(Error::State(StateFault::NotRecorded(_)))
    ));
    opened.record(&stage.stream(), Duration::ZERO).unwrap();
    event.synchronize(WAIT).unwrap();
}

#[test]
fn an_opening_that_is_not_answered_can_be_cancelled_and_so_can_another_behind_it() {
    let wrapped = Wrapped::new(Device::host().backend().clone(), Holding::default());
    let (others, mut stage) = (Stage::new("unanswered"), Stage::new("unanswered"));
    stage.device = Device::from_backend(wrapped.clone());
    let event = stage.create();
    let handle = event.handle().unwrap();
    let wait = Wait::at_most(WAIT);
    let importer = EventImporter::connect(&handle.body, &others.domain, &others.device, &wait);
    let importer = importer.unwrap();
    let open = |wait: Wait<'_>| {
        Event::of_importer(importer.clone(), &handle, &others.device, &wait).map(drop)
    };
    let (first_looks, second_looks) = (AtomicU64::new(0), AtomicU64::new(0));
    let cancel_both = || second_looks.load(SeqCst) > 0 && first_looks.fetch_add(1, SeqCst) > 0;
    wrapped.hook().hold("register");
    std::thread::scope(|scope| {
        let first = scope.spawn(|| open(Wait::at_most(WAIT).unless(&cancel_both)));
        wrapped.hook().wait_for(1);
        let cancel = || second_looks.fetch_add(1, SeqCst) < u64::MAX;
        let second = open(Wait::at_most(WAIT).unless(&cancel));
        for cancelled in [second, first.join().unwrap()] {
            assert!(
                matches!(cancelled, Err(Error::Timeout { .. })),
                "{cancelled:?}"
            );
        }
    });
    assert!(first_looks.load(SeqCst) > 1 && second_looks.load(SeqCst) > 0);
    wrapped.hook().unblock();
    open(WAIT.into()).unwrap();
}

#[test]
fn several_threads_may_make_the_first_recording_of_an_opened_event() {
    let stage = Stage::new("threads");
    let event = stage.create();
    let opened = stage.opened(&event);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..20 {
                    opened.record(&stage.stream(), WAIT).unwrap();
                }
            });
        }
    });
    opened.synchronize(WAIT).unwrap();
    event.synchronize(WAIT).unwrap();
    let last = opened.record(&stage.stream(), WAIT).unwrap();
    assert_eq!(last.count, 81);
}

#[test]
fn a_page_whose_answer_came_too_late_is_shared_anew() {
    let stage = Stage::new("page");
    let event = stage.create();
    let handle = event.handle().unwrap();
    let importer = EventImporter::connect(
        &handle.body,
        &stage.domain,
        &stage.device,
        &Duration::ZERO.into(),
    )
    .unwrap();
    // As while the exporter is stopped, which then finds both requests.
    importer.share_page_and_give_up(0);
    let opened = Event::of_importer(
        importer.clone(),
        &handle,
        &stage.device,
        &Duration::ZERO.into(),
    )
    .unwrap();
    opened.record(&stage.stream(), WAIT).unwrap();
    event.synchronize(WAIT).unwrap();
    // Not while it has an event open there: its streams may wait for the words.
    importer.share_page_and_give_up(0);
    event.record(&stage.stream(), WAIT).unwrap();
    opened.synchronize(WAIT).unwrap();
}
