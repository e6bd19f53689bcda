//! Server and client in one process. The conformance suite covers other processes and their deaths,
//! and memory in pieces.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::allocations::shares::Shares;
use crate::backend::testing::{Counting, Wrapped};
use crate::backend::{Access, DevicePtr};
use crate::error::{Error, HandleFault};
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::{
    AccessPolicy, Address, ClientSession, IpcServer, Kind, SessionObserver, decode, encode,
};
use crate::lend::{LendReply, LendRequest};
use crate::wait::Wait;
use crate::{Device, OpenOptions, Stream};

const WAIT: Duration = Duration::from_secs(10);
const BYTES: u64 = 4096;

struct Stage {
    domain: Domain,
    device: Device,
    server: AllocationServer,
}

impl Stage {
    fn new(title: &str) -> Stage {
        let folder =
            std::env::temp_dir().join(format!("warpipe-alloc-{title}-{}", std::process::id()));
        let (domain, device) = (Domain::at(folder).unwrap(), Device::host());
        let server =
            AllocationServer::new("tensors", AllocationServerOptions::at(&domain, &device))
                .unwrap();
        Stage {
            domain,
            device,
            server,
        }
    }

    fn client(&self) -> AllocationClient {
        AllocationClient::open(
            "tensors",
            OpenOptions::at(&self.domain, &self.device),
            Duration::ZERO,
        )
        .unwrap()
    }

    /// Shares memory that is freed when the share is over.
    fn share(&self, stream: &Stream, contents: &[u8]) -> (u64, Receiver<()>) {
        let tensor = Tensor::new(&self.device, contents, stream);
        let (ptr, told) = (tensor.0.ptr, tensor.1);
        // SAFETY: the memory is freed by its owner's drop.
        let number = unsafe { self.server.share(stream, ptr, BYTES, Box::new(tensor.0)) };
        (number.unwrap(), told)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.domain.path());
    }
}

/// Another library's tensor.
struct Tensor {
    device: Device,
    ptr: DevicePtr,
    tell: Sender<()>,
}

impl Tensor {
    fn new(device: &Device, contents: &[u8], stream: &Stream) -> (Tensor, Receiver<()>) {
        let ptr = device.backend().allocate_plain(BYTES).unwrap();
        // SAFETY: new memory, which is freed when nothing uses it.
        unsafe { device.backend().upload(stream.raw(), ptr, contents) }.unwrap();
        let (tell, told) = channel();
        let device = device.clone();
        (Tensor { device, ptr, tell }, told)
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`, freed once, when its share is over.
        unsafe { self.device.backend().free_plain(self.ptr) }.unwrap();
        let _ = self.tell.send(());
    }
}

fn is_kept(told: &Receiver<()>) -> bool {
    // Two of the server's ticks: a released share would be dropped meanwhile.
    told.recv_timeout(Duration::from_millis(450)).is_err()
}

fn eventually(mut is_so: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while !is_so() {
        if start.elapsed() > WAIT {
            return false;
        }
        thread::yield_now();
    }
    true
}

#[test]
fn a_receiver_reads_the_memory_and_the_owner_lives_until_it_is_released() {
    let stage = Stage::new("read");
    let stream = stage.device.stream().unwrap();
    let (number, told) = stage.share(&stream, b"of another library");
    stream.synchronize(WAIT).unwrap();
    let memory = stage.client().open_share(number, WAIT).unwrap();
    assert_eq!(&memory.to_vec(WAIT).unwrap()[..18], b"of another library");
    memory.check().unwrap();
    assert_eq!(stage.server.is_opened(number).unwrap(), Some(true));
    let stats = stage.server.stats();
    assert_eq!((stats.unclaimed, stats.claimed, stats.bytes), (0, 1, BYTES));
    assert!(is_kept(&told));
    drop(memory);
    told.recv_timeout(WAIT).unwrap();
    assert_eq!(stage.server.is_opened(number).unwrap(), None);
}

#[test]
fn the_owner_lives_until_the_receivers_streams_are_past_the_memory() {
    let stage = Stage::new("streams");
    let (writing, reading) = (
        stage.device.stream().unwrap(),
        stage.device.stream().unwrap(),
    );
    let (number, told) = stage.share(&writing, b"x");
    let memory = stage.client().open_share(number, WAIT).unwrap();
    let (go, held) = channel::<()>();
    reading.call(move || assert!(held.recv().is_err())).unwrap();
    memory.used_on(&reading);
    drop(memory);
    assert!(is_kept(&told));
    drop(go);
    told.recv_timeout(WAIT).unwrap();
}

#[test]
fn contents_are_waited_for_and_a_share_that_is_not_ready_in_time_can_be_opened_again() {
    let stage = Stage::new("ready");
    let stream = stage.device.stream().unwrap();
    let (go, held) = channel::<()>();
    stream.call(move || assert!(held.recv().is_err())).unwrap();
    let (number, _told) = stage.share(&stream, b"late");
    let client = stage.client();
    let late = client
        .open_share(number, Duration::from_millis(20))
        .unwrap_err();
    assert!(matches!(late, Error::Timeout { .. }), "{late}");
    drop(go);
    // At once, before the server looks at what clients have returned.
    let memory = client.open_share(number, WAIT).unwrap();
    assert_eq!(&memory.to_vec(WAIT).unwrap()[..4], b"late");
}

#[test]
fn a_share_whose_answer_comes_too_late_can_be_opened_again_at_once() {
    let stage = Stage::new("answer");
    let (stream, client) = (stage.device.stream().unwrap(), stage.client());
    for _ in 0..20 {
        let (number, told) = stage.share(&stream, b"late");
        // As after a wait for a server that was stopped: it handles both requests, one by one.
        let request = encode(&LendRequest::Memory(number)).unwrap();
        let asked = client.session.ipc().request(&request, Duration::ZERO);
        if asked.is_ok() {
            // It was there already, and this test keeps it.
            continue;
        }
        drop(client.open_share(number, WAIT).unwrap());
        stage.server.stats();
        told.recv_timeout(WAIT).unwrap();
    }
}

#[test]
fn legacy_memory_whose_contents_are_not_ready_is_not_opened() {
    let stage = Stage::new("legacy");
    let counting = Wrapped::new(stage.device.backend().clone(), Counting::default());
    let (stream, client) = (
        stage.device.stream().unwrap(),
        AllocationClient::open(
            "tensors",
            OpenOptions::at(&stage.domain, &Device::from_backend(counting.clone())),
            Duration::ZERO,
        )
        .unwrap(),
    );
    let (go, held) = channel::<()>();
    stream.call(move || assert!(held.recv().is_err())).unwrap();
    let (number, _told) = stage.share(&stream, b"late");
    stage.server.shares().pose_as_of_another_process(number);
    // Its owner may free it once it is given back, when nobody may have it open.
    let late = client.open_share(number, Duration::from_millis(20));
    assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
    let opened = || counting.hook().calls().get("open_legacy").copied();
    assert_eq!(opened(), None);
    drop(go);
    // The device of the host refuses memory of its own process.
    client.open_share(number, WAIT).unwrap_err();
    assert_eq!(opened(), Some(1));
}

#[test]
fn a_share_is_opened_once_and_not_after_it_is_withdrawn() {
    let stage = Stage::new("once");
    let (stream, client) = (stage.device.stream().unwrap(), stage.client());
    let (first, _told) = stage.share(&stream, b"1");
    let (second, gone) = stage.share(&stream, b"2");
    let memory = client.open_share(first, WAIT).unwrap();
    assert!(!stage.server.withdraw(first).unwrap(), "it is open");
    assert!(stage.server.withdraw(second).unwrap());
    gone.recv_timeout(WAIT).unwrap();
    for number in [first, second, 77] {
        let error = client.open_share(number, WAIT).unwrap_err();
        assert!(
            matches!(
                error,
                Error::NotFound {
                    was_there: true,
                    ..
                }
            ),
            "{error}"
        );
    }
    drop(memory);
}

#[test]
fn a_share_whose_receiver_waits_for_its_contents_is_not_opened_yet() {
    let stage = Stage::new("waits");
    let (stream, client) = (stage.device.stream().unwrap(), stage.client());
    let (go, held) = channel::<()>();
    stream.call(move || assert!(held.recv().is_err())).unwrap();
    let (number, _told) = stage.share(&stream, b"late");
    let is_claimed = || {
        // The receiver may still give it back, and does.
        assert_eq!(stage.server.is_opened(number).unwrap(), Some(false));
        stage.server.stats().claimed == 1
    };
    let called_off = client.open_share(number, Wait::at_most(WAIT).unless(&is_claimed));
    assert!(matches!(called_off, Err(Error::Timeout { .. })));
    drop(go);
    assert!(eventually(|| stage.server.stats().unclaimed == 1));
    let memory = client.open_share(number, WAIT).unwrap();
    assert_eq!(stage.server.is_opened(number).unwrap(), Some(true));
    drop(memory);
}

#[test]
fn an_open_that_is_called_off_loses_no_share() {
    let stage = Stage::new("called-off");
    let (stream, client) = (stage.device.stream().unwrap(), stage.client());
    let (number, told) = stage.share(&stream, b"kept");
    for _ in 0..50 {
        let is_asked = std::cell::Cell::new(false);
        let asks = || is_asked.replace(true);
        match client.open_share(number, Wait::at_most(WAIT).unless(&asks)) {
            Ok(memory) => {
                // The reply came before the second question. The share is over.
                drop(memory);
                told.recv_timeout(WAIT).unwrap();
                return;
            }
            Err(error) => assert!(matches!(error, Error::Timeout { .. }), "{error}"),
        }
        assert!(eventually(|| stage.server.stats().unclaimed == 1));
    }
    let memory = client.open_share(number, WAIT).unwrap();
    assert_eq!(&memory.to_vec(WAIT).unwrap()[..4], b"kept");
}

#[test]
fn the_owner_of_an_open_share_outlives_its_server() {
    let mut stage = Stage::new("server");
    let stream = stage.device.stream().unwrap();
    let (open, kept) = stage.share(&stream, b"open");
    let (_unclaimed, gone) = stage.share(&stream, b"unclaimed");
    let client = stage.client();
    let memory = client.open_share(open, WAIT).unwrap();
    let another = AllocationServer::new(
        "another",
        AllocationServerOptions::at(&stage.domain, &stage.device),
    )
    .unwrap();
    drop(std::mem::replace(&mut stage.server, another));
    gone.recv_timeout(WAIT).unwrap();
    assert!(is_kept(&kept));
    assert_eq!(&memory.to_vec(WAIT).unwrap()[..4], b"open");
    let error = client.open_share(open, WAIT).unwrap_err();
    assert!(
        matches!(error, Error::PeerGone { graceful: true, .. }),
        "{error}"
    );
    drop(memory);
    kept.recv_timeout(WAIT).unwrap();
}

struct Unobserved;

impl SessionObserver for Unobserved {}

#[test]
fn a_client_that_is_admitted_when_the_server_has_given_up_its_shares_opens_none() {
    let stage = Stage::new("ended");
    let (stream, name) = (
        stage.device.stream().unwrap(),
        EndpointName::new("ending").unwrap(),
    );
    let shares = Arc::new(Shares::new(stage.device.clone()).unwrap());
    let at = Address {
        domain: &stage.domain,
        name: &name,
        kind: Kind::Allocations,
    };
    let server = IpcServer::open(&at, AccessPolicy::default(), shares.clone()).unwrap();
    let (tensor, told) = Tensor::new(&stage.device, b"raced for", &stream);
    let range = (tensor.ptr, BYTES);
    // SAFETY: the memory is freed by its owner's drop.
    let shared = unsafe { shares.share(&stream, range, Access::ReadWrite, Box::new(tensor)) };
    let number = shared.unwrap().0;
    // As the drop of an `AllocationServer` does, if it did not close the name before.
    assert!(shares.has_ended(server.server_core().reactor()));
    let (session, _) = ClientSession::attach(&at, None, &[], Duration::ZERO).unwrap();
    session.observe(Arc::new(Unobserved)).unwrap();
    let ask = encode(&LendRequest::Memory(number)).unwrap();
    let reply = session.request(&ask, WAIT).unwrap();
    let reply = decode::<LendReply<()>>(&reply.body, "ending").unwrap();
    drop((server, shares));
    told.recv_timeout(WAIT).unwrap();
    assert!(
        matches!(reply, LendReply::Gone),
        "given up while open: {reply:?}"
    );
}

#[test]
fn memory_that_cannot_be_shared_is_refused_and_its_owner_dropped() {
    let stage = Stage::new("refused");
    let stream = stage.device.stream().unwrap();
    let local = [0u8; 64];
    for (ptr, bytes) in [(0, 8), (local.as_ptr().addr() as u64, 8), (64, 8)] {
        let (tell, told) = channel::<()>();
        // SAFETY: refused, as it is no device memory.
        let refused = unsafe { stage.server.share(&stream, ptr, bytes, Box::new(tell)) };
        assert!(
            matches!(
                refused,
                Err(Error::Handle {
                    fault: HandleFault::NotExportable { .. },
                    ..
                })
            ),
            "{refused:?}"
        );
        assert!(told.recv_timeout(WAIT).is_err(), "the owner is dropped");
    }
    // SAFETY: refused, as it has no length.
    let empty = unsafe { stage.server.share(&stream, 64, 0, Box::new(())) };
    assert!(matches!(empty, Err(Error::Argument { .. })), "{empty:?}");
    assert_eq!(stage.server.stats().unclaimed, 0);
}

#[test]
fn a_client_may_have_many_shares_and_words_of_released_ones_are_used_again() {
    let stage = Stage::new("many");
    let (stream, client) = (stage.device.stream().unwrap(), stage.client());
    let tensor = Tensor::new(&stage.device, b"many", &stream).0;
    stream.synchronize(WAIT).unwrap();
    for _ in 0..2 {
        let open: Vec<_> = (0..CLAIMS_MAX)
            .map(|_| {
                // SAFETY: the tensor lives until the end of this test, behind all uses.
                let number = unsafe { stage.server.share(&stream, tensor.ptr, 64, Box::new(())) };
                client.open_share(number.unwrap(), WAIT).unwrap()
            })
            .collect();
        // SAFETY: as above.
        let number = unsafe { stage.server.share(&stream, tensor.ptr, 64, Box::new(())) }.unwrap();
        let full = client.open_share(number, WAIT).unwrap_err();
        assert!(
            matches!(
                full,
                Error::Argument {
                    argument: "shares",
                    ..
                }
            ),
            "{full}"
        );
        drop(open);
        assert!(eventually(|| stage.server.stats().claimed == 0));
        drop(client.open_share(number, WAIT).unwrap());
        // The next round takes as many as there may be.
        assert!(eventually(|| stage.server.stats().claimed == 0));
    }
}
