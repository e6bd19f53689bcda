//! Tensors that are published where they lie: several pieces, leases, and peers that send wrong
//! ones. **This module is marked for unsafe**: it publishes tensors by address.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};

use super::{Stage, WAIT, byte_of};
use crate::device_types::DeviceKind;
use crate::error::{DeviceFault, Error, HandleFault, PointerKind};
use crate::fork::CloseOnForkFd;
use crate::hostile::in_a_forked_child;
use crate::ipc::OutgoingReply;
use crate::memory::Memory;
use crate::runtime::closer::PeerFd;
use crate::tensor::{DType, Layout};
use crate::weights::exports::PieceFd;
use crate::weights::held::Held;
use crate::weights::holder;
use crate::weights::keeper::{KeeperReply, KeeperRequest};
use crate::weights::keeper_session::offer_to_keeper;
use crate::weights::{SharedWeights, TensorsInPlace, Weights, takeover, weights_name};

/// Memory of a tensor, which says when its owner is dropped.
struct Tensor {
    _memory: Memory,
    _dropped: Sender<()>,
}

type Change<'a> = dyn Fn(&mut Held) + 'a;

fn bytes(count: u64) -> Layout {
    Layout::contiguous(DType::U8, &[count]).unwrap()
}

pub(super) fn is_dropped(told: &Receiver<()>) -> bool {
    told.recv_timeout(WAIT) == Err(RecvTimeoutError::Disconnected)
}

pub(super) fn is_kept(told: &Receiver<()>) -> bool {
    told.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty)
}

impl Stage {
    /// `count` tensors in memory of their own, the number's low byte in all bytes of each. The
    /// receiver says when all of it is free.
    fn in_place(&self, count: usize) -> (TensorsInPlace, Receiver<()>) {
        self.in_place_from(0, count)
    }

    /// As [`in_place`](Self::in_place), counted from `first` on.
    pub(super) fn in_place_from(
        &self,
        first: usize,
        count: usize,
    ) -> (TensorsInPlace, Receiver<()>) {
        self.in_place_at(512, first, count)
    }

    /// As [`in_place_from`](Self::in_place_from), each at byte `begin` of its memory.
    pub(super) fn in_place_at(
        &self,
        begin: u64,
        first: usize,
        count: usize,
    ) -> (TensorsInPlace, Receiver<()>) {
        let ((tell, told), stream) = (channel(), self.device.stream().unwrap());
        let mut tensors = TensorsInPlace::new(&self.device);
        for number in first..first + count {
            let memory = Memory::allocate(&self.device, 4096).unwrap();
            memory.write(&stream, begin, &[number as u8; 100]).unwrap();
            stream.synchronize(WAIT).unwrap();
            let (ptr, _dropped) = (memory.ptr() + begin, tell.clone());
            let owner = Box::new(Tensor {
                _memory: memory,
                _dropped,
            });
            // SAFETY: the tensor lies in the memory of its owner, which nothing writes.
            unsafe { tensors.add(&format!("t{number}"), bytes(100), ptr, owner) }.unwrap();
        }
        (tensors, told)
    }

    pub(super) fn weights_in_place(&self, count: usize) -> (Weights, Receiver<()>) {
        let (tensors, told) = self.in_place(count);
        let mut builder = Weights::builder(&self.device, []).unwrap();
        builder.in_place = Some(tensors);
        (builder.finish().unwrap(), told)
    }
}

fn check(shared: &SharedWeights, count: usize) {
    assert_eq!(shared.tensors().len(), count);
    for number in 0..count {
        let tensor = shared.tensor(&format!("t{number}")).unwrap();
        assert_eq!(tensor.memory.to_vec(WAIT).unwrap(), [number as u8; 100]);
    }
}

#[test]
fn tensors_are_read_where_their_publisher_has_them_beside_some_that_are_copied() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    let (tensors, told) = stage.in_place(3);
    assert_eq!((tensors.tensors.len(), tensors.pieces()), (3, 3));
    let mut builder = Weights::builder(&stage.device, [("copied", bytes(5))]).unwrap();
    let stream = stage.device.stream().unwrap();
    let memory = builder.memory().unwrap();
    memory.write(&stream, 0, b"bytes").unwrap();
    builder.aliases = vec![(2, "tied".into()), (0, "also copied".into())];
    builder.in_place = Some(tensors);
    let weights = builder.finish().unwrap();
    let names: Vec<_> = weights
        .tensors()
        .iter()
        .map(|it| it.name.as_ref())
        .collect();
    assert_eq!(names.len(), 6);
    assert_eq!(names[..2], ["copied", "also copied"]);
    let published = weights.publish(&stage.domain, "w", WAIT).unwrap();
    drop(weights);
    let readers = [0, 1].map(|_| SharedWeights::open("w", stage.options(), WAIT).unwrap());
    for shared in &readers {
        for number in 0..3u8 {
            let tensor = shared.tensor(&format!("t{number}")).unwrap();
            assert_eq!(tensor.memory.to_vec(WAIT).unwrap(), [number; 100]);
        }
        assert_eq!(
            shared.tensor("tied").unwrap().memory.to_vec(WAIT).unwrap(),
            [1; 100]
        );
        assert_eq!(
            shared
                .tensor("also copied")
                .unwrap()
                .memory
                .to_vec(WAIT)
                .unwrap(),
            b"bytes"
        );
        let parts: Vec<_> = shared
            .parts()
            .map(|(begin, part)| (begin, part.bytes()))
            .collect();
        assert_eq!(parts[0], (0, 4096));
        assert_eq!(
            parts.iter().map(|part| part.1).sum::<u64>(),
            shared.info().bytes
        );
        assert!(
            shared
                .parts()
                .all(|(_, part)| part.access == crate::backend::Access::Read)
        );
    }
    assert_eq!(
        SharedWeights::verify("w", stage.options(), WAIT).unwrap(),
        published.version
    );
    assert!(is_kept(&told));
}

#[test]
fn what_owns_the_tensors_is_kept_until_no_process_has_the_version() {
    let stage = Stage::new();
    let keeper = stage.keeper();
    let (weights, told) = stage.weights_in_place(3);
    let published = weights.publish(&stage.domain, "w", WAIT).unwrap();
    drop(weights);
    let shared = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    let tensor = shared.tensor("t2").unwrap();
    // The keeper has another version, and the publisher gives this one up.
    stage.publish(7);
    drop(published);
    check(&shared, 3);
    drop(shared);
    // A tensor of it is in use.
    assert!(is_kept(&told));
    assert_eq!(tensor.memory.to_vec(WAIT).unwrap(), [2; 100]);
    drop(tensor);
    assert!(is_dropped(&told), "nobody has the version");
    // The keeper's end, too, gives a version up; and one that nobody took is nobody's.
    let (weights, told) = stage.weights_in_place(2);
    weights.publish(&stage.domain, "w", WAIT).unwrap();
    drop(weights);
    assert!(is_kept(&told), "the keeper offers it");
    drop(keeper);
    assert!(is_dropped(&told));
    let (weights, told) = stage.weights_in_place(1);
    assert!(is_kept(&told));
    drop(weights);
    assert!(is_dropped(&told));
}

#[test]
fn a_forked_child_keeps_no_version_of_its_parent() {
    let stage = Stage::new();
    let keeper = stage.keeper();
    let (weights, told) = stage.weights_in_place(2);
    let published = weights.publish(&stage.domain, "w", WAIT).unwrap();
    let shared = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    let mut all = Some((weights, published, shared, keeper));
    in_a_forked_child(|| {
        drop(all.take());
        true
    });
    assert!(is_kept(&told), "the child's drops are not the parent's");
    drop(all);
    assert!(is_dropped(&told));
}

#[test]
fn a_version_of_many_pieces_is_taken_over_whole_from_many_holders() {
    const PIECES: usize = 300;
    let stage = Stage::new();
    let keeper = stage.keeper();
    let (weights, told) = stage.weights_in_place(PIECES);
    let published = weights.publish(&stage.domain, "w", WAIT).unwrap();
    drop(weights);
    let shared = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    check(&shared, PIECES);
    drop(keeper);
    let found = takeover::find(&stage.domain, &weights_name("w").unwrap()).unwrap();
    assert_eq!(found.versions.len(), 1);
    assert_eq!(found.versions[0].pieces.len(), PIECES);
    drop(found);
    let next = stage.keeper();
    assert_eq!(
        (
            next.state().unwrap().candidate,
            next.state().unwrap().unanswered
        ),
        (Some(1), 0)
    );
    assert_eq!(
        SharedWeights::verify("w", stage.options(), WAIT).unwrap(),
        1
    );
    drop((shared, published));
    let again = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    check(&again, PIECES);
    assert!(is_kept(&told));
    drop((again, next));
    assert!(is_dropped(&told));
}

#[test]
fn a_reader_whose_version_is_replaced_while_it_asks_for_pieces_opens_the_next_one() {
    let stage = Stage::new();
    let ((old, _told), new) = (stage.weights_in_place(9), stage.weights(5));
    let (old, new) = (old.held_for_tests(1), new.held_for_tests(2));
    let asked = AtomicUsize::new(0);
    let version = |held: &Held| held.reply(&KeeperReply::Version(held.describe()));
    let _server = stage.scripted(move |_, _, request| match request {
        KeeperRequest::Pieces { .. } => OutgoingReply::new(&KeeperReply::Replaced, vec![]),
        KeeperRequest::Offered if asked.fetch_add(1, SeqCst) < 3 => version(&old),
        KeeperRequest::Offered => version(&new),
        _ => OutgoingReply::new(&KeeperReply::Noted, vec![]),
    });
    let shared = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    assert_eq!((shared.info().version, byte_of(&shared)), (2, 5));
}

#[test]
fn pieces_of_a_wrong_number_length_or_kind_are_refused_before_anything_is_mapped() {
    let stage = Stage::new();
    let keeper = stage.keeper();
    let name = weights_name("w").unwrap();
    let (whole, _told) = stage.weights_in_place(9);
    let offered = |change: &dyn Fn(&mut Held)| {
        let mut held = whole.held_for_tests(0);
        change(&mut held);
        let offer = holder::offer(&stage.domain, "w", Arc::new(held)).unwrap();
        offer_to_keeper(&stage.domain, &name, &offer.1, &WAIT.into()).map(|_| ())
    };
    let with = |held: &Held, last: OwnedFd| -> Arc<[Arc<PieceFd>]> {
        let last = PieceFd::own(CloseOnForkFd::new(last).unwrap());
        held.pieces.iter().take(8).cloned().chain([last]).collect()
    };
    let longer = || {
        Memory::allocate(&stage.device, 8192)
            .unwrap()
            .export_fd()
            .unwrap()
    };
    let file = || OwnedFd::from(std::fs::File::open("/").unwrap());
    let pipe = || rustix::pipe::pipe().unwrap().0;
    let changes: [(&Change<'_>, &str); 6] = [
        (
            &|held| held.pieces = with(held, longer()),
            "a memfd of 8192 bytes",
        ),
        (&|held| held.pieces = with(held, file()), "memory"),
        (&|held| held.pieces = with(held, pipe()), "memory"),
        (
            &|held| {
                held.leases = Arc::new([]);
                held.pieces = Arc::new([]);
            },
            "it has 0 pieces",
        ),
        (
            &|held| held.pieces = held.pieces.iter().take(7).cloned().collect(),
            "it has 7 pieces",
        ),
        (
            &|held| {
                let file = PeerFd::from(CloseOnForkFd::new(file()).unwrap());
                held.leases = Arc::new([Arc::new(file)]);
            },
            "lease",
        ),
    ];
    for (change, words) in changes {
        let told = offered(change);
        assert!(
            matches!(&told, Err(Error::Refused { denied: false, text, .. }) if text.contains(words)),
            "{words}: {told:?}"
        );
    }
    assert_eq!(keeper.state().unwrap().version, None);
    let more = offered(&|held| {
        let twice = held.pieces.iter().chain(&*held.pieces);
        held.pieces = twice.cloned().collect();
    });
    assert!(
        matches!(&more, Err(Error::Refused { denied: false, text, .. }) if text.contains("descriptors")),
        "{more:?}"
    );
    // A keeper cannot tell memory of a GPU: the device does.
    offered(&|held| held.device.kind = DeviceKind::Cuda).unwrap();
    let refused = SharedWeights::open("w", stage.options(), WAIT).unwrap_err();
    assert!(
        matches!(
            refused,
            Error::Device {
                fault: DeviceFault::OutOfReach,
                ..
            }
        ),
        "{refused}"
    );
}

#[test]
fn memory_that_no_process_can_open_or_that_does_not_fit_is_refused_with_the_tensors_name() {
    let stage = Stage::new();
    let mut tensors = TensorsInPlace::new(&stage.device);
    let memory = Memory::allocate(&stage.device, 8192).unwrap();
    let imported = Memory::import_fd(
        &stage.device,
        memory.export_fd().unwrap(),
        &memory.info(),
        crate::backend::Access::Read,
    )
    .unwrap();
    let plain = stage.device.backend().allocate_plain(4096).unwrap();
    // SAFETY: the memory lives until the end, and nothing writes it.
    let mut add = |layout, ptr| unsafe { tensors.add("norm", layout, ptr, Box::new(())) };
    let kinds = [
        (plain, PointerKind::Device),
        (imported.ptr(), PointerKind::VmmPrivate),
        (std::ptr::from_ref(&stage) as u64 & !511, PointerKind::Host),
        (512, PointerKind::Unknown),
    ];
    for (at, wanted) in kinds {
        match add(bytes(4), at) {
            Err(Error::Handle {
                fault: HandleFault::NotExportable { ptr, kind },
                ..
            }) => assert_eq!((ptr, kind), (at, wanted)),
            other => panic!("{other:?}"),
        }
    }
    let gaps = Layout::strided(DType::U8, &[2, 2], &[4, 1], 0).unwrap();
    let ptr = memory.ptr();
    add(bytes(1000), ptr + 512).unwrap();
    let wrong = [
        (gaps, ptr, "without gaps"),
        (bytes(0), ptr, "with elements"),
        (bytes(4), u64::MAX, "with elements"),
        (bytes(4), ptr + 2048 + 8, "512 bytes"),
        (bytes(4), ptr + 1024, "overlaps \"norm\""),
        (bytes(513), ptr, "overlaps \"norm\""),
    ];
    for (layout, at, words) in wrong {
        let told = add(layout, at).unwrap_err();
        let text = told.to_string();
        assert!(matches!(told, Error::Argument { .. }), "{text}");
        assert!(text.contains(words) && text.contains("\"norm\""), "{text}");
        assert!(text.contains("publish a copy"), "{text}");
    }
    // A range that goes on behind its memory, where memory of another length may lie.
    let beyond = add(bytes(1 << 40), ptr + 4096).unwrap_err();
    let is_refused = matches!(
        beyond,
        Error::Handle {
            fault: HandleFault::NotExportable { .. },
            ..
        } | Error::Argument { .. }
    );
    assert!(is_refused, "{beyond}");
    assert_eq!((tensors.tensors.len(), tensors.pieces()), (1, 1));
    // SAFETY: allocated above, used by nothing.
    unsafe { stage.device.backend().free_plain(plain) }.unwrap();
}
