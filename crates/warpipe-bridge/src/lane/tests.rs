use std::sync::mpsc::{Sender, channel};
use std::time::Instant;

use warpipe::backend::testing::{Failing, Wrapped};
use warpipe::backend::{HostCopy, HostPiece};
use warpipe::{Device, Domain, Layout, Publisher, SlotReturn, Stream, Subscriber};

use super::outgoing::Copying;
use super::*;
use crate::message::Tag;
use crate::options::Options;
use crate::session;

/// A wait that only a hang reaches.
const LONG: Duration = Duration::from_secs(300);

/// A domain of its own on the host, for the folder's life.
pub(crate) fn options() -> (tempfile::TempDir, Arc<Options>) {
    let folder = tempfile::tempdir().unwrap();
    let domain = Domain::at(folder.path().join("domain")).unwrap();
    let options = Options::new(&domain, &Device::host());
    (folder, Arc::new(options))
}

/// A window of two parts.
pub(crate) fn window() -> Window {
    ReceiveMemory::new(2, 1 << 20, 8 << 20).window()
}

/// A stream that does nothing until the sender is dropped.
pub(crate) fn blocked(device: &Device) -> (Stream, Sender<()>) {
    let stream = device.stream().unwrap();
    let (go, wait) = channel();
    let work = move || {
        let _ = wait.recv();
    };
    stream.call(work).unwrap();
    (stream, go)
}

/// That a slot comes back, but not before a stream goes on.
pub(crate) fn comes_back_behind(go: Sender<()>, returned: &SlotReturn) {
    assert!(!returned.is_back().unwrap(), "its stream still copies");
    drop(go);
    let start = Instant::now();
    while !returned.is_back().unwrap() {
        assert!(start.elapsed() < LONG, "it is not back");
        std::thread::yield_now();
    }
}

#[test]
fn a_sample_with_a_copy_that_failed_or_was_given_up_is_released_behind_that_copy() {
    struct Unfinished;
    impl HostCopy for Unfinished {
        fn wait(self: Box<Self>) -> warpipe::Result<Vec<HostPiece>> {
            unreachable!("it is dropped")
        }
    }

    let (_folder, options) = options();
    let (_session, outbox) = session::alone(&options);
    let failing = Wrapped::new(Device::host().backend().clone(), Failing::default());
    let device = Device::from_backend(failing.clone());
    let publisher = Publisher::new("a", options.domain.on(&device)).unwrap();
    let mut subscriber = Subscriber::open("a", options.domain.on(&device), Duration::ZERO).unwrap();
    let sender = LaneSender::new([1; 16], [2; 16], outbox);
    sender.ready(0, WINDOW_MAX);
    let layout = Layout::bytes_only(8).unwrap();
    let receiving = device.stream().unwrap();
    for is_dropped in [false, true] {
        let (copying, go) = blocked(&device);
        let loan = publisher.loan(&layout).unwrap();
        let returned = loan.returned();
        loan.send(&receiving).unwrap();
        let sample = subscriber.receive(&receiving, LONG).unwrap();
        sample.wait(LONG).unwrap();
        let (tensor, address) = (
            Tensor::new(Tag::Job { number: 1 }, &layout, b""),
            sample.slot_ptr(),
        );
        // SAFETY: the sample is complete, and is the keeper.
        let content = unsafe { Content::device(address, 8, &copying, Some(sample)) };
        if is_dropped {
            let Content::Device(content) = content else {
                unreachable!("as made")
            };
            drop(Copying {
                copy: Some(Box::new(Unfinished)),
                contents: vec![content],
            });
        } else {
            failing.hook().aim("download", 1);
            sender.send_tensor(tensor, &content, 8).unwrap_err();
            assert!(failing.hook().has_struck());
            drop(content);
        }
        comes_back_behind(go, &returned);
    }
}

#[test]
fn a_wait_for_a_cut_goes_on_when_the_sender_has_ended_the_lane() {
    let (_folder, options) = options();
    let (_session, outbox) = session::alone(&options);
    let lane = LaneReceiver::new([1; 16], [2; 16], window(), outbox);
    lane.end(Ending::Sender(crate::message::End::Closed));
    let start = Instant::now();
    lane.wait_for_end(LONG);
    lane.wait_for_cut(SLICE);
    assert!(start.elapsed() >= SLICE);
    lane.end(Ending::Cut);
    lane.wait_for_cut(LONG);
}

#[test]
fn a_thread_that_waits_for_its_turn_waits_no_more_when_the_lane_ends() {
    let (_folder, options) = options();
    let (_session, outbox) = session::alone(&options);
    let sender = LaneSender::new([1; 16], [2; 16], outbox);
    drop(sender.turn().unwrap());
    let first = sender.turn().unwrap();
    std::thread::scope(|scope| {
        let second = scope.spawn(|| sender.turn().is_none());
        sender.end("the peer is unreachable");
        assert!(second.join().unwrap());
    });
    drop(first);
    assert!(sender.turn().is_none());
}
