//! Tensors that are sent where they lie: what is received, and how long their owners are kept.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Place;
use crate::runtime::doorbell::LocalDoorbell;
use crate::{
    DType, Device, Domain, Error, Layout, Memory, Policy, Published, Publisher, PublisherOptions,
    Sample, Stream, Subscriber,
};

const SOON: Duration = Duration::from_secs(20);
/// Where the tensors begin in their memory.
const OFFSET: u64 = 512;

struct Scene {
    folder: PathBuf,
    domain: Domain,
    device: Device,
    stream: Stream,
    published: Published,
}

impl Scene {
    fn new(title: &str) -> Scene {
        let folder =
            std::env::temp_dir().join(format!("warpipe-place-{title}-{}", std::process::id()));
        let (domain, device) = (Domain::at(&folder).unwrap(), Device::host());
        let stream = device.stream().unwrap();
        let memory = Memory::allocate(&device, 4096).unwrap();
        memory.write(&stream, OFFSET, &[1, 2, 3, 4, 5, 6]).unwrap();
        stream.synchronize(SOON).unwrap();
        Scene {
            published: memory.publish("memory", domain.options()).unwrap(),
            folder,
            domain,
            device,
            stream,
        }
    }

    fn options(&self) -> PublisherOptions {
        self.domain.on(&self.device)
    }

    fn subscriber(&self) -> Subscriber {
        Subscriber::open("a", self.domain.on(&self.device), Duration::ZERO).unwrap()
    }

    /// Sends the tensor where it lies. Returns its owner, which the publisher has, too.
    fn send(&self, publisher: &Publisher) -> Arc<()> {
        let owner = Arc::new(());
        let layout = Layout::contiguous(DType::U8, &[2, 3]).unwrap();
        let loan = publisher.loan_in(&self.published, OFFSET, &layout, owner.clone());
        let mut loan = loan.unwrap();
        loan.set_metadata(b"meta").unwrap();
        loan.send(&self.stream).unwrap();
        owner
    }

    fn receive(&self, subscriber: &mut Subscriber) -> Sample {
        subscriber.receive(&self.stream, SOON).unwrap()
    }

    fn assert_is_tensor(&self, sample: &Sample) {
        assert!(sample.info().is_in_place);
        assert_eq!(sample.ptr(), self.published.memory().ptr() + OFFSET);
        assert_eq!(sample.layout().shape(), [2, 3]);
        assert_eq!(sample.metadata(), b"meta");
        assert_eq!(sample.to_vec(SOON).unwrap(), [1, 2, 3, 4, 5, 6]);
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < SOON, "{what}");
        std::thread::yield_now();
    }
}

fn is_kept(owner: &Arc<()>) -> bool {
    Arc::strong_count(owner) > 1
}

#[test]
fn an_owner_is_kept_until_every_reader_has_released_its_tensor() {
    let scene = Scene::new("readers");
    let publisher = Publisher::new("a", scene.options()).unwrap();
    let (mut first, mut second) = (scene.subscriber(), scene.subscriber());
    let owner = scene.send(&publisher);
    publisher.send_bytes(&scene.stream, b"a copy").unwrap();
    let samples = [scene.receive(&mut first), scene.receive(&mut second)];
    samples.iter().for_each(|one| scene.assert_is_tensor(one));
    let copy = scene.receive(&mut first);
    assert!(!copy.info().is_in_place && copy.info().discontinuity.is_none());
    let [one, other] = samples;
    one.finish(SOON).unwrap();
    assert_eq!(publisher.stats().unwrap().in_place, 1);
    assert!(is_kept(&owner));
    other.finish(SOON).unwrap();
    // Without a call on the publisher.
    eventually("the owner is dropped", || !is_kept(&owner));
    // It counts until its drop is over.
    eventually("no owner counts", || {
        publisher.stats().unwrap().in_place == 0
    });
}

#[test]
fn an_owner_goes_with_a_loan_that_is_not_sent_and_with_a_sample_that_nobody_gets() {
    let scene = Scene::new("unsent");
    let publisher = Publisher::new(
        "a",
        PublisherOptions {
            policy: Policy::DropOldest,
            depth: 1,
            ..scene.options()
        },
    )
    .unwrap();
    let without_subscribers = scene.send(&publisher);
    eventually("no subscriber reads it", || {
        publisher.stats().unwrap().in_place == 0
    });
    assert!(!is_kept(&without_subscribers));
    let _subscriber = scene.subscriber();
    let (revoked, last) = (scene.send(&publisher), scene.send(&publisher));
    eventually("the older one is taken back", || !is_kept(&revoked));
    assert!(is_kept(&last));
    let (layout, unsent) = (Layout::bytes_only(8).unwrap(), Arc::new(()));
    let loan = publisher.loan_in(&scene.published, 0, &layout, unsent.clone());
    let mut loan = loan.unwrap();
    loan.write(&scene.stream, &[7; 8]).unwrap();
    assert!(is_kept(&unsent));
    drop(loan);
    eventually("the loan is back", || !is_kept(&unsent));
    assert_eq!(scene.published.memory().to_vec(SOON).unwrap()[..8], [7; 8]);
}

#[test]
fn an_owner_outlives_its_publisher_until_the_last_reader_releases_the_tensor_or_leaves() {
    let scene = Scene::new("closed");
    let publisher = Publisher::new(
        "a",
        PublisherOptions {
            history: 2,
            ..scene.options()
        },
    )
    .unwrap();
    let (mut reader, leaver) = (scene.subscriber(), scene.subscriber());
    let (read, unread) = (scene.send(&publisher), scene.send(&publisher));
    let sample = scene.receive(&mut reader);
    drop(publisher);
    assert!(is_kept(&read) && is_kept(&unread));
    drop(leaver);
    scene.assert_is_tensor(&sample);
    drop(sample);
    eventually("the tensor that was read", || !is_kept(&read));
    let last = scene.receive(&mut reader);
    scene.assert_is_tensor(&last);
    assert!(is_kept(&unread));
    drop((last, reader));
    eventually("the tensor that one did not read", || !is_kept(&unread));
}

#[test]
fn a_late_subscriber_gets_the_tensor_of_the_history() {
    let scene = Scene::new("history");
    let publisher = Publisher::new(
        "a",
        PublisherOptions {
            history: 1,
            ..scene.options()
        },
    )
    .unwrap();
    let owner = scene.send(&publisher);
    assert_eq!(publisher.stats().unwrap().in_place, 1);
    scene.assert_is_tensor(&scene.receive(&mut scene.subscriber()));
    publisher.send_bytes(&scene.stream, b"the next").unwrap();
    eventually("it is no history any more", || !is_kept(&owner));
}

#[test]
fn memory_that_cannot_be_opened_is_an_error_of_its_sample_alone() {
    let scene = Scene::new("freed");
    let publisher = Publisher::new("a", scene.options()).unwrap();
    let mut subscriber = scene.subscriber();
    let backend = scene.device.backend();
    let plain = backend.allocate_plain(4096).unwrap();
    let layout = Layout::bytes_only(16).unwrap();
    let owner = Arc::new(());
    // SAFETY: the subscriber of this process does not open it before it is freed.
    let loan = unsafe { publisher.loan_at(plain + 64, &layout, owner.clone()) };
    loan.unwrap().send(&scene.stream).unwrap();
    // SAFETY: allocated above; no stream works on it.
    unsafe { backend.free_plain(plain) }.unwrap();
    scene.send(&publisher);
    let refused = subscriber.receive(&scene.stream, SOON).unwrap_err();
    assert!(
        matches!(
            refused,
            Error::Handle {
                what: "legacy handle",
                ..
            }
        ),
        "{refused}"
    );
    let next = scene.receive(&mut subscriber);
    scene.assert_is_tensor(&next);
    let _ = next.info().discontinuity;
    eventually("it is released", || !is_kept(&owner));
}

#[test]
fn what_a_publisher_cannot_offer_is_refused_before_anything_is_kept() {
    let scene = Scene::new("refused");
    let elsewhere = Scene::new("elsewhere");
    let publisher = Publisher::new("a", scene.options()).unwrap();
    let (layout, owner) = (Layout::bytes_only(4096).unwrap(), Arc::new(()));
    let beyond = publisher.loan_in(&scene.published, 1, &layout, owner.clone());
    assert!(
        matches!(
            beyond,
            Err(Error::Argument {
                argument: "range",
                ..
            })
        ),
        "{beyond:?}"
    );
    let foreign = publisher.loan_in(&elsewhere.published, 0, &layout, owner.clone());
    assert!(
        matches!(foreign, Err(Error::Argument { .. })),
        "{foreign:?}"
    );
    assert!(!is_kept(&owner));
    let loan = publisher.loan_in(&scene.published, 0, &layout, owner.clone());
    let mut loan = loan.unwrap();
    let refused = loan.set_metadata(&[0; 4096]).unwrap_err();
    assert!(
        refused.to_string().contains("that describe tensors"),
        "{refused}"
    );
    loan.set_metadata(&[0; 3900]).unwrap();
}

/// No mistake in the receiver's arguments, which would end a server that polls its clients.
#[test]
fn a_place_beyond_its_memory_is_a_fault_of_its_sender() {
    let scene = Scene::new("beyond");
    let doorbell = Arc::new(LocalDoorbell::new().unwrap());
    for offset in [4090, u64::MAX - 7] {
        let place = Place::Published {
            name: "memory",
            incarnation: scene.published.incarnation(),
            offset,
        };
        let mut asked = None;
        let mut open = || place.open(16, (&scene.domain, &scene.device), &mut asked, &doorbell);
        let mut opened = open();
        eventually("the memory's owner answers", || {
            if matches!(opened, Err(Error::Timeout { .. })) {
                opened = open();
            }
            !matches!(opened, Err(Error::Timeout { .. }))
        });
        let Err(refused) = opened else {
            panic!("it is beyond the end");
        };
        assert!(matches!(refused, Error::Handle { .. }), "{refused}");
    }
}
