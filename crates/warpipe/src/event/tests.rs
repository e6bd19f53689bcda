//! Events within one process; other processes' are the conformance suite's.

use std::sync::mpsc::channel;

use super::*;

const WAIT: Duration = Duration::from_secs(10);

struct Stage {
    domain: Domain,
    device: Device,
}

impl Stage {
    fn new(title: &str) -> Stage {
        let folder = std::env::temp_dir().join(format!("warpipe-event-{title}-{}", std::process::id()));
        Stage { domain: Domain::at(folder).unwrap(), device: Device::host() }
    }

    fn create(&self) -> Event {
        Event::create(&self.domain, &self.device).unwrap()
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.domain.path());
    }
}

#[test]
fn an_event_that_was_never_recorded_is_an_error_and_not_complete() {
    let stage = Stage::new("never");
    let (event, stream) = (stage.create(), stage.device.stream().unwrap());
    assert!(matches!(event.wait(&stream), Err(Error::EventNotRecorded { .. })));
    assert!(matches!(event.query(), Err(Error::EventNotRecorded { .. })));
    assert!(matches!(event.synchronize(WAIT), Err(Error::EventNotRecorded { .. })));
}

#[test]
fn a_stream_waits_for_the_last_recording() {
    let stage = Stage::new("last");
    let (event, reading) = (stage.create(), stage.device.stream().unwrap());
    let writing = stage.device.stream().unwrap();
    event.record(&writing).unwrap();
    event.synchronize(WAIT).unwrap();
    let (go, held) = channel::<()>();
    writing.call(move || assert!(held.recv().is_err())).unwrap();
    let recording = event.record(&writing).unwrap();
    assert_eq!(event.wait(&reading).unwrap(), recording);
    assert!(!event.query().unwrap() && !reading.is_idle().unwrap());
    assert!(matches!(event.synchronize(Duration::from_millis(1)), Err(Error::Timeout { .. })));
    drop(go);
    reading.synchronize(WAIT).unwrap();
    assert!(event.check(recording).unwrap());
}

#[test]
fn an_event_opened_in_its_own_process_is_the_event_itself_until_it_is_dropped() {
    let stage = Stage::new("same");
    let (event, stream) = (stage.create(), stage.device.stream().unwrap());
    let handle = event.handle().unwrap();
    let other = Event::open(&handle, &stage.device).unwrap();
    other.record(&stream).unwrap();
    event.synchronize(WAIT).unwrap();
    let next = stage.create();
    drop((event, other));
    let dropped = Event::open(&handle, &stage.device).unwrap_err();
    assert!(matches!(dropped, Error::EventHandle { fault: EventHandleFault::Dropped }), "{dropped}");
    drop(next);
    let gone = Event::open(&handle, &stage.device).unwrap_err();
    assert!(matches!(gone, Error::NoOwner { was_there: false, .. }), "{gone}");
}

#[test]
fn a_place_that_is_used_again_holds_an_event_that_nobody_has_recorded() {
    let stage = Stage::new("again");
    let (keep, stream) = (stage.create(), stage.device.stream().unwrap());
    let (go, held) = channel::<()>();
    stream.call(move || assert!(held.recv().is_err())).unwrap();
    let event = stage.create();
    event.record(&stream).unwrap();
    let index = event.inner.index;
    drop(event);
    let event = stage.create();
    assert_eq!((event.inner.index, event.inner.serial), (index, 2));
    assert!(matches!(event.query(), Err(Error::EventNotRecorded { .. })));
    let quick = stage.device.stream().unwrap();
    let recording = event.record(&quick).unwrap();
    assert!(!event.check(recording).unwrap(), "the count of the first is still to be reached");
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
    let other = Event::open(&handle, &stage.device).unwrap_err();
    assert!(matches!(other, Error::EventHandle { fault: EventHandleFault::Device { .. } }), "{other}");
    let mut handle = event.handle().unwrap();
    handle.body.domain = stage.domain.path().join("nowhere");
    handle.body.generation[0] ^= 1;
    assert!(matches!(Event::open(&handle, &stage.device), Err(Error::Domain { .. })));
    assert!(!handle.body.domain.exists(), "a handle makes no directories");
}

#[test]
fn a_handle_of_a_domain_with_a_relative_path_leads_there_from_any_directory() {
    let stage = Stage::new("relative");
    let here = std::env::current_dir().unwrap();
    let up: std::path::PathBuf = here.components().skip(1).map(|_| "..").collect();
    let relative = up.join(stage.domain.path().strip_prefix("/").unwrap());
    let event = Event::create(&Domain::at(relative).unwrap(), &stage.device).unwrap();
    assert!(event.handle().unwrap().body.domain.is_absolute());
    assert!(event.handle().unwrap().domain().is_ok());
}
