//! Server and client in one process. The conformance suite covers other processes and their deaths,
//! and memory in pieces.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::allocations::shares::Shares;
use crate::backend::testing::{Counting, Wrapped};
use crate::backend::{Access, DevicePtr};
use crate::error::{Error, HandleFault};
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::peer::Process;
use crate::ipc::{AccessPolicy, Address, ClientSession, IpcServer, Kind};
use crate::lend::session::LendSession;
use crate::lend::share_words::{SLOTS, slot};
use crate::wait::Wait;
use crate::{Device, Stream};

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
        let server = AllocationServer::new("tensors", domain.on(&device)).unwrap();
        Stage {
            domain,
            device,
            server,
        }
    }

    fn client(&self) -> AllocationClient {
        AllocationClient::open("tensors", self.domain.on(&self.device), Duration::ZERO).unwrap()
    }

    /// A client with a session of its own, as in another process.
    fn another_client(&self) -> AllocationClient {
        another_client(&self.domain, "tensors", &self.device)
    }

    /// Shares memory that is freed when the share is over.
    fn share(&self, stream: &Stream, contents: &[u8]) -> (u64, Receiver<()>) {
        let tensor = Tensor::new(&self.device, contents, stream);
        let (ptr, told) = (tensor.0.ptr, tensor.1);
        // SAFETY: the memory is freed by its owner's drop.
        let number = unsafe {
            self.server
                .share(stream, ptr, BYTES, Access::ReadWrite, Box::new(tensor.0))
        };
        (number.unwrap(), told)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.domain.path());
    }
}

fn another_client(domain: &Domain, name: &str, device: &Device) -> AllocationClient {
    let at = Address {
        domain,
        name: &EndpointName::new(name).unwrap(),
        kind: Kind::Allocations,
    };
    let (ipc, reply) = ClientSession::attach(&at, None, &[], Duration::ZERO).unwrap();
    let session = LendSession::open(ipc, reply, device, &session::TERMS).unwrap();
    AllocationClient {
        session: Arc::new(session),
    }
}

/// Claims a share, and does not open it.
fn claims(client: &AllocationClient, number: u64) -> bool {
    let session = &client.session;
    let claimed = session
        .share_words()
        .claim(session.words(), number, "tensors");
    claimed.unwrap().is_some()
}

fn is_gone(opened: &crate::Result<crate::LentBuffer>) -> bool {
    matches!(
        opened,
        Err(Error::NotFound {
            was_there: true,
            ..
        })
    )
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
fn the_owner_lives_until_the_receivers_streams_are_past_the_memory() {
    let stage = Stage::new("streams");
    let writing = stage.device.stream().unwrap();
    let reading = stage.device.stream().unwrap();
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
fn of_receivers_that_race_for_a_share_one_has_it() {
    let stage = Stage::new("race");
    let stream = stage.device.stream().unwrap();
    // Two threads of each process.
    let clients = [stage.another_client(), stage.another_client()];
    let clients = [&clients[0], &clients[0], &clients[1], &clients[1]];
    for _ in 0..30 {
        let (number, told) = stage.share(&stream, b"raced for");
        let start = std::sync::Barrier::new(clients.len());
        let open = |client: &AllocationClient| {
            start.wait();
            client.open_share(number, WAIT)
        };
        let opened: Vec<_> = thread::scope(|scope| {
            let threads = clients.map(|client| scope.spawn(|| open(client)));
            threads.into_iter().map(|it| it.join().unwrap()).collect()
        });
        assert_eq!(
            opened.iter().filter(|it| it.is_ok()).count(),
            1,
            "{opened:?}"
        );
        assert!(
            opened.iter().all(|it| it.is_ok() || is_gone(it)),
            "{opened:?}"
        );
        stage.server.stats();
        assert!(told.try_recv().is_err(), "it is open");
        drop(opened);
        stage.server.stats();
        told.recv_timeout(WAIT).unwrap();
    }
}

#[test]
fn a_share_that_is_given_back_again_and_again_is_still_there() {
    let stage = Stage::new("again");
    let stream = stage.device.stream().unwrap();
    let (go, held) = channel::<()>();
    stream.call(move || assert!(held.recv().is_err())).unwrap();
    let (number, told) = stage.share(&stream, b"late");
    let client = stage.client();
    // As after many turns: the next ones begin anew.
    let state = client.session.share_words().state(number);
    state.fetch_add(u64::from(SLOTS) - 1000, SeqCst);
    thread::scope(|scope| {
        let opener = scope.spawn(|| {
            for turn in 0..1000 {
                let opened = client.open_share(number, Duration::ZERO);
                assert!(
                    matches!(opened, Err(Error::Timeout { .. })),
                    "{turn}: {opened:?}"
                );
            }
        });
        while !opener.is_finished() {
            assert_eq!(stage.server.is_opened(number).unwrap(), Some(false));
            stage.server.stats();
        }
    });
    drop(go);
    drop(client.open_share(number, WAIT).unwrap());
    stage.server.stats();
    told.recv_timeout(WAIT).unwrap();
}

#[test]
fn what_a_receiver_claimed_and_never_opened_is_let_go_by_the_proof_of_its_death_alone() {
    let stage = Stage::new("claimed");
    let (stream, client) = (stage.device.stream().unwrap(), stage.another_client());
    let (number, told) = stage.share(&stream, b"claimed");
    let (unclaimed, kept) = stage.share(&stream, b"unclaimed");
    assert!(claims(&client, number));
    let (alive, writer) = rustix::pipe::pipe().unwrap();
    stage
        .server
        .shares()
        .end_clients_as(&Process::of_pipe(alive));
    assert!(is_kept(&told), "its receiver lives");
    assert!(
        !claims(&client, unclaimed),
        "the owner looks at its page no more"
    );
    drop(writer);
    told.recv_timeout(WAIT).unwrap();
    assert_eq!(stage.server.stats().clients, 0);
    assert!(kept.try_recv().is_err());
    drop(stage.another_client().open_share(unclaimed, WAIT).unwrap());
}

#[test]
fn an_evicted_receiver_that_lives_has_its_shares_until_it_releases_them() {
    let stage = Stage::new("evicted");
    let (stream, client) = (stage.device.stream().unwrap(), stage.another_client());
    let (number, told) = stage.share(&stream, b"open");
    let memory = client.open_share(number, WAIT).unwrap();
    let (alive, _writer) = rustix::pipe::pipe().unwrap();
    stage
        .server
        .shares()
        .end_clients_as(&Process::of_pipe(alive));
    assert!(is_kept(&told));
    assert_eq!(stage.server.stats().clients, 1);
    drop(memory);
    told.recv_timeout(WAIT).unwrap();
    assert!(eventually(|| stage.server.stats().clients == 0));
}

#[test]
fn what_a_wrong_receiver_writes_frees_no_memory_that_another_one_has() {
    let stage = Stage::new("wrong");
    let stream = stage.device.stream().unwrap();
    let honest = stage.another_client();
    let other = stage.another_client();
    let wrong = stage.another_client();
    let words = |number: u64| {
        let session = &wrong.session;
        let slot = number % u64::from(SLOTS);
        (
            session.share_words().state(number),
            session.words().word(slot as usize),
        )
    };
    let clean = |number: u64| number & !u64::from(SLOTS - 1);
    let values = |number: u64| [0, 1, clean(number), clean(number) + 1, number, u64::MAX];
    for turn in 0..36 {
        let (number, told) = stage.share(&stream, b"open");
        let memory = honest.open_share(number, WAIT).unwrap();
        let (state, claim) = words(number);
        // As free: then another one opens it, too.
        state.store(values(number)[turn % 6], SeqCst);
        claim.store(values(number)[turn / 6]);
        stage.server.stats();
        let second = other.open_share(number, WAIT);
        stage.server.stats();
        assert!(told.try_recv().is_err(), "{turn}: it is open");
        drop(memory);
        stage.server.stats();
        if second.is_ok() {
            assert!(told.try_recv().is_err(), "{turn}: it is open elsewhere");
        }
        drop(second);
        stage.server.stats();
        told.recv_timeout(WAIT).unwrap();
    }
}

#[test]
fn what_a_wrong_receiver_takes_and_never_claims_is_over() {
    let stage = Stage::new("stolen");
    let (stream, wrong) = (stage.device.stream().unwrap(), stage.another_client());
    for value in [0, 1, u64::MAX] {
        let (number, told) = stage.share(&stream, b"stolen");
        let state = wrong.session.share_words().state(number);
        state.store(value, SeqCst);
        stage.server.stats();
        told.recv_timeout(WAIT).unwrap();
        assert!(is_gone(&stage.client().open_share(number, WAIT)));
    }
}

#[test]
fn legacy_memory_whose_contents_are_not_ready_is_not_opened() {
    let stage = Stage::new("legacy");
    let counting = Wrapped::new(stage.device.backend().clone(), Counting::default());
    let stream = stage.device.stream().unwrap();
    let client = AllocationClient::open(
        "tensors",
        stage.domain.on(&Device::from_backend(counting.clone())),
        Duration::ZERO,
    )
    .unwrap();
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
    let another = AllocationServer::new("another", stage.domain.on(&stage.device)).unwrap();
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

#[test]
fn a_client_that_is_admitted_when_the_server_has_given_up_its_shares_opens_none() {
    let stage = Stage::new("ended");
    let stream = stage.device.stream().unwrap();
    let name = EndpointName::new("ending").unwrap();
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
    let number = shared.unwrap();
    // As the drop of an `AllocationServer` does, if it did not close the name before.
    assert!(shares.has_ended(server.server_core().reactor()));
    let client = another_client(&stage.domain, "ending", &stage.device);
    let opened = client.open_share(number, WAIT);
    drop((server, shares));
    told.recv_timeout(WAIT).unwrap();
    assert!(is_gone(&opened), "given up while open: {opened:?}");
}

#[test]
fn memory_that_cannot_be_shared_is_refused_and_its_owner_dropped() {
    let stage = Stage::new("refused");
    let stream = stage.device.stream().unwrap();
    let local = [0u8; 64];
    for (ptr, bytes) in [(0, 8), (local.as_ptr().addr() as u64, 8), (64, 8)] {
        let (tell, told) = channel::<()>();
        // SAFETY: refused, as it is no device memory.
        let refused = unsafe {
            stage
                .server
                .share(&stream, ptr, bytes, Access::ReadWrite, Box::new(tell))
        };
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
    let empty = unsafe {
        stage
            .server
            .share(&stream, 64, 0, Access::ReadWrite, Box::new(()))
    };
    assert!(matches!(empty, Err(Error::Argument { .. })), "{empty:?}");
    assert_eq!(stage.server.stats().unclaimed, 0);
}

#[test]
fn an_owner_whose_drop_panics_leaves_no_share_whose_number_is_lost() {
    struct Panicking;
    impl Drop for Panicking {
        fn drop(&mut self) {
            panic!("an owner's drop");
        }
    }
    let stage = Stage::new("panics");
    let stream = stage.device.stream().unwrap();
    let tensor = Tensor::new(&stage.device, b"kept", &stream).0;
    stream.synchronize(WAIT).unwrap();
    let share = |owner: Box<dyn Any + Send>| {
        let (server, access) = (&stage.server, Access::ReadWrite);
        // SAFETY: the tensor lives until the end of this test, behind all uses.
        unsafe { server.share(&stream, tensor.ptr, BYTES, access, owner) }.unwrap()
    };
    let (client, first) = (stage.client(), share(Box::new(Panicking)));
    assert!(claims(&client, first));
    let released = client.session.words().word(slot(first) as usize);
    released.store(first);
    // The thread that looks now and then may be the first.
    let shares = (0..2).filter(|_| catch_unwind(AssertUnwindSafe(|| share(Box::new(())))).is_ok());
    let shares = shares.count();
    assert_eq!(stage.server.stats().unclaimed, shares);
}

#[test]
fn there_may_be_many_shares_and_words_of_released_ones_are_used_again() {
    let stage = Stage::new("many");
    let (stream, client) = (stage.device.stream().unwrap(), stage.client());
    let tensor = Tensor::new(&stage.device, b"many", &stream).0;
    stream.synchronize(WAIT).unwrap();
    // SAFETY: the tensor lives until the end of this test, behind all uses.
    let share = || unsafe {
        stage
            .server
            .share(&stream, tensor.ptr, 64, Access::ReadWrite, Box::new(()))
    };
    for _ in 0..2 {
        let all: Vec<_> = (1..SLOTS).map(|_| share().unwrap()).collect();
        let full = share().unwrap_err();
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
        let (opened, unopened) = all.split_at(1000);
        let open = opened.iter().map(|&number| client.open_share(number, WAIT));
        drop(open.collect::<Result<Vec<_>, _>>().unwrap());
        for &number in unopened {
            assert!(stage.server.withdraw(number).unwrap());
        }
        // The next round takes as many as there may be.
        assert!(eventually(|| stage.server.stats().claimed == 0));
        assert_eq!(stage.server.stats().unclaimed, 0);
    }
}
