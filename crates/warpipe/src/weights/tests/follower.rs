//! Versions that come in at the addresses of the one before. **This module is marked for unsafe**: it
//! publishes tensors by address.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use super::{Stage, WAIT, byte_of};
use crate::OpenOptions;
use crate::backend::testing::{Failing, Hook, Wrapped};
use crate::device::Device;
use crate::error::{Error, StateFault, WeightsFault};
use crate::hostile::in_a_forked_child;
use crate::memory::Memory;
use crate::statistics::{Observer, RegionId, Role, file_of};
use crate::tensor::{DType, Layout};
use crate::weights::holder::held_prefix;
use crate::weights::{Follower, Keeper, PublishedWeights, SharedWeights, TensorsInPlace, Weights};

impl Stage {
    /// The numbers of the versions that this process holds for a later keeper.
    fn held(&self) -> Vec<String> {
        let names = self.domain.names().unwrap();
        let held = names.iter().filter_map(|name| {
            let rest = name.as_str().strip_prefix(&held_prefix("w"))?;
            Some(rest.split_once('-')?.0.to_owned())
        });
        held.collect()
    }

    /// Two tensors in memory of their own, so in two parts, every byte `byte`.
    fn publish_in_place(&self, byte: u8) -> (PublishedWeights, Receiver<()>) {
        let stream = self.device.stream().unwrap();
        let (tell, told) = channel();
        let mut tensors = TensorsInPlace::new(&self.device);
        // Of two lengths: each is a part of its own, wherever they lie.
        for (name, bytes) in [("a", 4096), ("b", 4 << 20)] {
            let memory = Memory::allocate(&self.device, bytes).unwrap();
            memory.write(&stream, 0, &[byte; 900]).unwrap();
            stream.synchronize(WAIT).unwrap();
            let layout = Layout::contiguous(DType::U8, &[3, 300]).unwrap();
            let (ptr, owner) = (memory.ptr(), Box::new((memory, tell.clone())));
            // SAFETY: the tensor lies in the memory of its owner, which nothing writes.
            unsafe { tensors.add(name, layout, ptr, owner) }.unwrap();
        }
        let mut builder = Weights::builder(&self.device, []).unwrap();
        builder.in_place = Some(tensors);
        let weights = builder.finish().unwrap();
        (weights.publish(&self.domain, "w", WAIT).unwrap(), told)
    }
}

fn update(follower: &mut Follower) -> Result<Option<u64>, Error> {
    let stream = follower.weights().device().stream().unwrap();
    follower.update(&stream, WAIT)
}

#[test]
fn a_follower_takes_each_version_at_the_same_addresses_and_gives_the_former_one_up() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    drop(stage.publish(1));
    let opened = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    let (clone, tensor) = (opened.clone(), opened.tensor("a").unwrap());
    let mut follower = opened.follow();
    assert_eq!(update(&mut follower).unwrap(), None);
    drop(clone);
    for version in 2..6u8 {
        drop(stage.publish(version));
        assert_eq!(update(&mut follower).unwrap(), Some(version.into()));
        let weights = follower.weights();
        assert_eq!(
            (weights.info().version, byte_of(weights)),
            (version.into(), version)
        );
        assert_eq!(
            weights.tensor("a").unwrap().memory.ptr(),
            tensor.memory.ptr()
        );
        assert_eq!(tensor.memory.to_vec(WAIT).unwrap(), [version; 900]);
        assert_eq!(stage.held(), [version.to_string()]);
        // What it says of the contents is the new version's.
        let fresh = SharedWeights::open("w", stage.options(), WAIT).unwrap();
        assert_eq!(fresh.tensors(), weights.tensors());
    }
    assert_eq!(update(&mut follower).unwrap(), None);
}

#[test]
fn a_version_of_other_tensors_changes_nothing_and_a_later_one_that_fits_is_taken() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    drop(stage.publish(1));
    let mut follower = SharedWeights::open("w", stage.options(), WAIT)
        .unwrap()
        .follow();
    let layout = |shape: &[u64]| Layout::contiguous(DType::U8, shape).unwrap();
    let other = [
        ("a", layout(&[300, 3]), &[2; 900][..]),
        ("c", layout(&[1]), &[2][..]),
    ];
    let other = Weights::from_bytes(&stage.device, other).unwrap();
    drop(other.publish(&stage.domain, "w", WAIT).unwrap());
    match update(&mut follower).unwrap_err() {
        Error::Weights(WeightsFault::Mismatch {
            version,
            difference,
            ..
        }) => {
            assert_eq!(version, 2);
            assert_eq!(
                (&*difference.missing, &*difference.unexpected),
                (&["b".into()][..], &["c".into()][..])
            );
            assert_eq!(difference.different, ["a"]);
        }
        error => panic!("{error:?}"),
    }
    assert_eq!(
        (
            follower.weights().info().version,
            byte_of(follower.weights())
        ),
        (1, 1)
    );
    assert_eq!(stage.held(), ["1"]);
    drop(stage.publish(3));
    assert_eq!(update(&mut follower).unwrap(), Some(3));
    assert_eq!(byte_of(follower.weights()), 3);
}

#[test]
fn a_version_whose_memory_is_divided_otherwise_changes_nothing() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    drop(stage.publish(1));
    let mut follower = SharedWeights::open("w", stage.options(), WAIT)
        .unwrap()
        .follow();
    let (_published, _told) = stage.publish_in_place(2);
    let failed = update(&mut follower).unwrap_err();
    assert!(
        matches!(
            failed,
            Error::Weights(WeightsFault::Mismatch { version: 2, .. })
        ),
        "{failed}"
    );
    assert_eq!(byte_of(follower.weights()), 1);
}

#[test]
fn an_update_waits_for_the_work_of_the_stream_and_of_recorded_ones_and_changes_nothing_when_that_lasts()
 {
    for recorded in [false, true] {
        let stage = Stage::new();
        let _keeper = stage.keeper();
        drop(stage.publish(1));
        let mut follower = SharedWeights::open("w", stage.options(), WAIT)
            .unwrap()
            .follow();
        drop(stage.publish(2));
        let named = stage.device.stream().unwrap();
        let other = stage.device.stream().unwrap();
        let ((started, is_started), (end, ends)) = (channel(), channel::<()>());
        let work = move || {
            started.send(()).unwrap();
            let _ = ends.recv();
        };
        if recorded {
            follower
                .weights()
                .tensor("b")
                .unwrap()
                .memory
                .used_on(&other);
            other.call(work).unwrap();
        } else {
            named.call(work).unwrap();
        }
        is_started.recv().unwrap();
        let failed = follower
            .update(&named, Duration::from_millis(20))
            .unwrap_err();
        assert!(matches!(failed, Error::Timeout { .. }), "{failed}");
        assert_eq!(follower.weights().info().version, 1);
        if !recorded {
            assert_eq!(byte_of(follower.weights()), 1);
        }
        drop(end);
        assert_eq!(follower.update(&named, WAIT).unwrap(), Some(2));
        assert_eq!(byte_of(follower.weights()), 2);
    }
}

#[test]
fn a_device_that_fails_at_any_part_leaves_the_former_version_there() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    let (first, first_told) = stage.publish_in_place(1);
    let backend = Wrapped::new(stage.device.backend().clone(), Failing::default());
    let device = Device::from_backend(backend.clone());
    let mut follower = SharedWeights::open(
        "w",
        OpenOptions {
            device: Some(device.clone()),
            ..stage.options()
        },
        WAIT,
    )
    .unwrap()
    .follow();
    drop(first);
    let (_second, _told) = stage.publish_in_place(2);
    for part in [1, 2] {
        backend.hook().aim("import_over", part);
        let failed = update(&mut follower).unwrap_err();
        assert!(
            matches!(
                failed,
                Error::Driver {
                    code: Error::INJECTED,
                    ..
                }
            ),
            "{failed}"
        );
        assert_eq!(
            (
                follower.weights().info().version,
                byte_of(follower.weights())
            ),
            (1, 1)
        );
        assert!(
            first_told
                .try_recv()
                .is_err_and(|it| it == std::sync::mpsc::TryRecvError::Empty)
        );
    }
    assert_eq!(update(&mut follower).unwrap(), Some(2));
    assert_eq!(byte_of(follower.weights()), 2);
    // The publisher may use the first version's memory again.
    let told = first_told.recv_timeout(WAIT);
    assert_eq!(told, Err(std::sync::mpsc::RecvTimeoutError::Disconnected));
}

#[test]
fn a_follower_whose_addresses_another_one_has_updated_says_so() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    drop(stage.publish(1));
    let opened = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    let (mut one, mut two) = (opened.clone().follow(), opened.follow());
    drop(stage.publish(2));
    assert_eq!(update(&mut one).unwrap(), Some(2));
    let failed = update(&mut two).unwrap_err();
    assert!(failed.to_string().contains("another follower"), "{failed}");
    assert_eq!(byte_of(one.weights()), 2);
}

#[test]
fn weights_of_another_name_are_refused_and_an_earlier_version_that_is_open_can_be_taken_again() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    drop(stage.publish(1));
    let first = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    let mut follower = SharedWeights::open("w", stage.options(), WAIT)
        .unwrap()
        .follow();
    drop(stage.publish(2));
    assert_eq!(update(&mut follower).unwrap(), Some(2));
    let stream = stage.device.stream().unwrap();
    assert_eq!(follower.take(&first, &stream, WAIT).unwrap(), 1);
    assert_eq!(byte_of(follower.weights()), 1);
    assert_eq!(update(&mut follower).unwrap(), Some(2));

    let _other = Keeper::new("v", stage.domain.options()).unwrap();
    drop(stage.weights(3).publish(&stage.domain, "v", WAIT).unwrap());
    let other = SharedWeights::open("v", stage.domain.on(&stage.device), WAIT).unwrap();
    let failed = follower.take(&other, &stream, WAIT).unwrap_err();
    assert!(matches!(failed, Error::Argument { .. }), "{failed}");
    assert_eq!(byte_of(follower.weights()), 2);
}

#[test]
fn a_forked_child_cannot_update_its_parents_weights() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    drop(stage.publish(1));
    let mut follower = SharedWeights::open("w", stage.options(), WAIT)
        .unwrap()
        .follow();
    let stream = stage.device.stream().unwrap();
    drop(stage.publish(2));
    in_a_forked_child(|| {
        let failed = follower.update(&stream, Duration::ZERO);
        matches!(failed, Err(Error::State(StateFault::Forked)))
    });
    assert_eq!(byte_of(follower.weights()), 1);
}

/// Fails the second to the last of so many calls of `import_over`, counted down.
#[derive(Debug, Default)]
struct Refusing(AtomicU64);

impl Hook for Refusing {
    fn before(&self, method: &'static str) -> Result<(), Error> {
        let left = match method {
            "import_over" => self.0.load(SeqCst),
            _ => 0,
        };
        self.0.fetch_sub(left.min(1), SeqCst);
        match left {
            1 | 2 => Err(Error::injected(method, left)),
            _ => Ok(()),
        }
    }
}

#[test]
fn an_update_after_one_that_could_not_restore_the_former_version_restores_it_before_it_says_none() {
    let stage = Stage::new();
    let keeper = stage.keeper();
    let (_first, _first_told) = stage.publish_in_place(1);
    let backend = Wrapped::new(stage.device.backend().clone(), Refusing::default());
    let device = Device::from_backend(backend.clone());
    let mut follower = SharedWeights::open(
        "w",
        OpenOptions {
            device: Some(device.clone()),
            ..stage.options()
        },
        WAIT,
    )
    .unwrap()
    .follow();
    let (_second, _second_told) = stage.publish_in_place(2);
    // The first part of the new version, not its second, and not the first of the former one.
    backend.hook().0.store(3, SeqCst);
    update(&mut follower).unwrap_err();
    assert_eq!(follower.weights().info().version, 1);
    drop(keeper);
    backend.hook().0.store(1, SeqCst);
    let failed = update(&mut follower).unwrap_err();
    assert!(
        matches!(
            failed,
            Error::Driver {
                code: Error::INJECTED,
                ..
            }
        ),
        "{failed}"
    );
    assert_eq!(update(&mut follower).unwrap(), None);
    assert_eq!(byte_of(follower.weights()), 1);
}

#[test]
fn the_statistics_say_which_memory_lies_at_the_addresses() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    let file_of = |follower: &Follower| {
        let held = &follower.weights().inner.held;
        file_of(held.pieces[0].as_fd(), held.device)
    };
    // Other tests of this process have memory, too.
    let is_mapped = |file: [u64; 2]| {
        let found = Observer::new().observe_one(std::process::id() as i32);
        let mut regions = found.processes[0].regions.iter();
        regions.any(|it| it.role == Role::Peer && it.id == RegionId::File(file))
    };
    drop(stage.publish(1));
    let mut follower = SharedWeights::open("w", stage.options(), WAIT)
        .unwrap()
        .follow();
    let former = file_of(&follower);
    assert!(is_mapped(former));
    drop(stage.publish(2));
    assert_eq!(update(&mut follower).unwrap(), Some(2));
    assert!(is_mapped(file_of(&follower)) && !is_mapped(former));
}
