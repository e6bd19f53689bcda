//! A pool and its peers in one process. The conformance suite has the tests that need another
//! process.

use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex, OnceLock, Weak, mpsc};
use std::time::{Duration, Instant};

use super::allocator::PoolAllocator;
use super::*;
use crate::backend::Access;
use crate::backend::testing::{Hook, Wrapped};
use crate::error::{Expiry, HandleFault, NameFault};
use crate::ipc::domain::EndpointName;
use crate::ipc::peer::Process;
use crate::ipc::{Address, ClientSession, encode};
use crate::lend::LendRequest;
use crate::lend::share_words::ShareWords;
use crate::runtime::closer::PeerFd;
use crate::runtime::reactor::EventSource;
use crate::{Device, Domain, Error, Kind, LentBuffer, Memory, Stream, Ticket};

pub(super) const WAIT: Duration = Duration::from_secs(10);
pub(super) const MIB: u64 = 1 << 20;

pub(super) struct Stage {
    folder: PathBuf,
    pub(super) domain: Domain,
    pub(super) device: Device,
    pub(super) pool: Pool,
}

impl Stage {
    /// A pool of one region of 2 MiB.
    pub(super) fn new(title: &str) -> Stage {
        Stage::on(title, Device::host())
    }

    fn on(title: &str, device: Device) -> Stage {
        let folder =
            std::env::temp_dir().join(format!("warpipe-pool-{title}-{}", std::process::id()));
        let domain = Domain::at(&folder).unwrap();
        let options = PoolOptions {
            memory_limit: 2 * MIB,
            ..domain.on(&device)
        };
        let pool = Pool::new("pool", options).unwrap();
        Stage {
            folder,
            domain,
            device,
            pool,
        }
    }

    fn client(&self) -> PoolClient {
        PoolClient::open("pool", self.domain.on(&self.device), Duration::ZERO).unwrap()
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// A stream that is stuck until the sender is dropped.
pub(super) fn busy(device: &Device) -> (Stream, mpsc::Sender<()>) {
    let stream = device.stream().unwrap();
    let (go, wait) = mpsc::channel::<()>();
    stream.call(move || assert!(wait.recv().is_err())).unwrap();
    (stream, go)
}

pub(super) fn eventually(is_so: impl Fn() -> bool) -> bool {
    let (start, mut backoff) = (Instant::now(), crate::backoff::Backoff::default());
    while !is_so() {
        if start.elapsed() > WAIT {
            return false;
        }
        backoff.pause();
    }
    true
}

fn is_limit<T: std::fmt::Debug>(result: crate::Result<T>) -> bool {
    matches!(result, Err(Error::Limit(LimitFault::Memory { used, limit, .. }))
        if used == limit && limit == 2 * MIB)
}

#[test]
fn blocks_come_back_and_the_limit_is_an_error_that_says_what_is_used() {
    let stage = Stage::new("limit");
    let blocks: Vec<_> = (0..2)
        .map(|_| stage.pool.allocate(MIB, Duration::ZERO).unwrap())
        .collect();
    assert!(is_limit(stage.pool.allocate(1, Duration::ZERO)));
    let stats = stage.pool.stats();
    assert_eq!(
        (stats.regions, stats.total_bytes, stats.in_use_bytes),
        (1, 2 * MIB, 2 * MIB)
    );
    drop(blocks);
    let stats = stage.pool.stats();
    assert_eq!(
        (
            stats.in_use_bytes,
            stats.high_water_bytes,
            stats.allocations
        ),
        (0, 2 * MIB, 2)
    );
    drop(stage.pool.allocate(2 * MIB, Duration::ZERO).unwrap());
    assert!(matches!(
        stage.pool.allocate(0, Duration::ZERO),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(
        stage.pool.allocate(3 * MIB, Duration::ZERO),
        Err(Error::Limit(LimitFault::Memory { .. }))
    ));
    assert!(matches!(
        stage.pool.allocate(u64::MAX, Duration::ZERO),
        Err(Error::Limit(LimitFault::Memory { .. }))
    ));
}

#[test]
fn a_block_is_not_handed_out_before_the_stream_that_frees_it_is_past_it() {
    let stage = Stage::new("fence");
    for is_freed_on_it in [true, false] {
        let (stream, go) = busy(&stage.device);
        let idle = stage.device.stream().unwrap();
        let block = stage.pool.allocate(2 * MIB, Duration::ZERO).unwrap();
        block
            .free(if is_freed_on_it { &stream } else { &idle })
            .unwrap();
        // The control: freed on another stream, the block is free at once.
        assert_eq!(
            is_limit(stage.pool.allocate(1, Duration::ZERO)),
            is_freed_on_it
        );
        assert_eq!(
            stage.pool.stats().waiting_bytes,
            if is_freed_on_it { 2 * MIB } else { 0 }
        );
        drop(go);
        drop(stage.pool.allocate(2 * MIB, WAIT).unwrap());
    }
}

#[test]
fn every_stream_that_was_named_is_waited_for() {
    let stage = Stage::new("named");
    for is_dropped in [true, false] {
        let (stream, go) = busy(&stage.device);
        let block = stage.pool.allocate(2 * MIB, Duration::ZERO).unwrap();
        block.used_on(&stream);
        if is_dropped {
            drop(block);
        } else {
            block.free(&stage.device.stream().unwrap()).unwrap();
        }
        assert!(is_limit(stage.pool.allocate(1, Duration::from_millis(30))));
        drop(go);
        drop(stage.pool.allocate(2 * MIB, WAIT).unwrap());
    }
    // Two waits time out. Whether the two others wait depends on the machine.
    assert!((2..=4).contains(&stage.pool.stats().waits));
}

#[test]
fn a_borrowers_stream_is_waited_for_too() {
    let stage = Stage::new("borrower");
    let client = stage.client();
    for way in ["free", "drop", "unnamed"] {
        let (stream, go) = busy(&stage.device);
        let lent = client.allocate(2 * MIB, Duration::ZERO).unwrap();
        match way {
            "free" => lent.free(&stream).unwrap(),
            "drop" => {
                lent.used_on(&stream);
                drop(lent);
            }
            // The control: a stream that was not recorded is not waited for.
            _ => drop(lent),
        }
        let early = stage.pool.allocate(1, Duration::from_millis(30));
        assert_eq!(is_limit(early), way != "unnamed", "{way}");
        drop(go);
        drop(stage.pool.allocate(2 * MIB, WAIT).unwrap());
    }
}

#[test]
fn a_ticket_is_good_as_long_as_its_owner_has_the_block() {
    let stage = Stage::new("ticket");
    let block = stage.pool.allocate(100, Duration::ZERO).unwrap();
    let ticket = block.lend(Access::ReadWrite).unwrap();
    assert_eq!(
        ticket,
        block.lend(Access::ReadWrite).unwrap(),
        "lent again, it is the same"
    );
    assert!(matches!(
        ticket.open(&stage.device, Duration::ZERO),
        Err(Error::Name(NameFault::OtherKind {
            wanted: Kind::Memory,
            ..
        }))
    ));
    let text: Ticket = ticket.to_string().parse().unwrap();
    let one = LentBuffer::open(&text, &stage.device, Duration::ZERO).unwrap();
    let two = LentBuffer::open(&ticket, &stage.device, Duration::ZERO).unwrap();
    assert_eq!(
        (one.ptr(), one.bytes()),
        (two.ptr(), 100),
        "a region is mapped once"
    );
    drop(block);
    let returned = LentBuffer::open(&ticket, &stage.device, Duration::ZERO).unwrap_err();
    assert!(
        matches!(
            returned,
            Error::Handle {
                fault: HandleFault::Expired {
                    expiry: Expiry::Returned,
                    ..
                },
                ..
            }
        ),
        "{returned}"
    );
    drop((one, two));
    let memory = Memory::allocate(&stage.device, 8)
        .unwrap()
        .publish("memory", stage.domain.options())
        .unwrap();
    let other =
        LentBuffer::open(&memory.ticket(..).unwrap(), &stage.device, Duration::ZERO).unwrap_err();
    assert!(
        matches!(
            other,
            Error::Name(NameFault::OtherKind {
                wanted: Kind::Pool,
                ..
            })
        ),
        "{other}"
    );
}

#[test]
fn a_pool_that_has_ended_lends_and_grants_nothing() {
    let mut stage = Stage::new("ended");
    let client = stage.client();
    let block = stage.pool.allocate(8, Duration::ZERO).unwrap();
    let ticket = block.lend(Access::Read).unwrap();
    let lent = client.allocate(8, Duration::ZERO).unwrap();
    let other = Pool::new("other", stage.domain.on(&stage.device)).unwrap();
    drop(std::mem::replace(&mut stage.pool, other));
    assert!(matches!(
        block.lend(Access::Read),
        Err(Error::PeerGone {
            kind: Kind::Pool,
            ..
        })
    ));
    assert!(eventually(|| client.is_owner_gone()));
    assert!(matches!(
        client.allocate(8, Duration::ZERO),
        Err(Error::PeerGone { graceful: true, .. })
    ));
    let gone = LentBuffer::open(&ticket, &stage.device, Duration::ZERO).unwrap_err();
    assert!(
        matches!(
            gone,
            Error::Handle {
                fault: HandleFault::Expired {
                    expiry: Expiry::Gone { died: false },
                    ..
                },
                ..
            }
        ),
        "{gone}"
    );
    assert_eq!(
        (lent.to_vec(WAIT).unwrap(), block.to_vec(WAIT).unwrap()),
        (vec![0; 8], vec![0; 8])
    );
}

#[test]
fn a_client_waits_for_what_others_let_go_and_has_a_limit_of_blocks() {
    let stage = Stage::new("client");
    let client = stage.client();
    let lent = client.allocate(2 * MIB, Duration::ZERO).unwrap();
    assert!(is_limit(client.allocate(1, Duration::ZERO)));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| client.allocate(MIB, WAIT).map(drop));
        assert!(is_limit(stage.pool.allocate(1, Duration::ZERO)));
        drop(lent);
        waiting.join().unwrap().unwrap();
    });
    let blocks: Vec<_> = (0..CLAIMS_MAX)
        .map(|_| client.allocate(1, Duration::ZERO).unwrap())
        .collect();
    assert!(matches!(
        client.allocate(1, Duration::ZERO),
        Err(Error::Argument {
            argument: "blocks",
            ..
        })
    ));
    drop(blocks);
    drop(client.allocate(1, Duration::ZERO).unwrap());
    assert!(matches!(
        client.allocate(0, Duration::ZERO),
        Err(Error::Argument { .. })
    ));
    drop(client);
    assert!(
        eventually(|| stage.pool.stats().peers == 0),
        "a peer that has closed without a block is removed"
    );
}

#[test]
fn a_block_that_passes_to_another_user_is_cleared_and_else_it_is_not() {
    let stage = Stage::new("clear");
    let allocator = stage.pool.allocator();
    let stream = stage.device.stream().unwrap();
    for (uid, is_cleared) in [(allocator.uid, false), (allocator.uid + 1, true)] {
        let block = stage.pool.allocate(2 * MIB, Duration::ZERO).unwrap();
        block.write(&stream, MIB, b"secret").unwrap();
        block.free(&stream).unwrap();
        let Ok((slot, cleared_at)) = allocator.take(MIB + 8, uid, true).unwrap() else {
            panic!("it is free");
        };
        assert_eq!(cleared_at.is_some(), is_cleared);
        allocator.wait_until_clear(slot, cleared_at).unwrap();
        // SAFETY: the block is mapped as long as the pool is.
        let bytes = unsafe {
            crate::memory::slice::copy_out(&stage.device, allocator.lock().address(slot), MIB + 8)
        }
        .unwrap();
        assert_eq!(
            &bytes[MIB as usize..],
            if is_cleared { &[0; 8] } else { b"secret\0\0" }
        );
        allocator.release(slot);
    }
    let again = stage.pool.allocate(8, Duration::ZERO).unwrap();
    assert_eq!(
        again.to_vec(WAIT).unwrap(),
        [0; 8],
        "what the other user had is cleared for us, too"
    );
}

/// Records whether a pool's lock is held during device calls.
#[derive(Debug, Default)]
struct Unlocked {
    allocator: OnceLock<Weak<PoolAllocator>>,
    calls: AtomicU32,
    is_held: AtomicBool,
}

impl Hook for Unlocked {
    fn before(&self, method: &'static str) -> crate::Result<()> {
        if let Some(allocator) = self
            .allocator
            .get()
            .and_then(Weak::upgrade)
            .filter(|_| ["zero", "batch"].contains(&method))
        {
            self.calls.fetch_add(1, Relaxed);
            // Another thread may hold the lock for a moment; this thread would hold it until the
            // call returns.
            self.is_held
                .fetch_or(!eventually(|| allocator.try_lock().is_some()), Relaxed);
        }
        Ok(())
    }
}

#[test]
fn a_pools_lock_is_free_during_the_device_call_that_clears_a_block() {
    let wrapped = Wrapped::new(Device::host().backend().clone(), Unlocked::default());
    let stage = Stage::on("unlocked", Device::from_backend(wrapped.clone()));
    let allocator = stage.pool.allocator();
    let Ok((slot, _)) = allocator.take(2 * MIB, allocator.uid + 1, true).unwrap() else {
        panic!("it is free");
    };
    allocator.release(slot);
    let client =
        PoolClient::open("pool", stage.domain.on(&Device::host()), Duration::ZERO).unwrap();
    wrapped.hook().allocator.set(allocator.me.clone()).unwrap();
    let lent = client.allocate(2 * MIB, Duration::ZERO).unwrap();
    assert_eq!(lent.to_vec(WAIT).unwrap()[..8], [0; 8]);
    let hook = wrapped.hook();
    // The zeros, and their completion.
    assert_eq!(
        (hook.calls.load(Relaxed), hook.is_held.load(Relaxed)),
        (2, false)
    );
}

#[test]
fn ranges_and_access_are_kept_to() {
    let stage = Stage::new("ranges");
    let stream = stage.device.stream().unwrap();
    let block = stage.pool.allocate(8, Duration::ZERO).unwrap();
    assert!(matches!(
        block.write(&stream, 1, &[0; 8]),
        Err(Error::Argument { argument: "range", found, allowed }) if found == "1..9" && allowed.starts_with("0..8 of ")
    ));
    assert!(matches!(
        block.write(&stream, u64::MAX, &[0]),
        Err(Error::Argument {
            argument: "range",
            ..
        })
    ));
    let read = LentBuffer::open(
        &block.lend(Access::Read).unwrap(),
        &stage.device,
        Duration::ZERO,
    )
    .unwrap();
    assert!(matches!(
        read.write(&stream, 0, &[1]),
        Err(Error::Argument { .. })
    ));
    let write = LentBuffer::open(
        &block.lend(Access::ReadWrite).unwrap(),
        &stage.device,
        Duration::ZERO,
    )
    .unwrap();
    assert!(matches!(
        write.write(&stream, 8, &[1]),
        Err(Error::Argument {
            argument: "range",
            ..
        })
    ));
    write.write(&stream, 7, &[1]).unwrap();
    stream.synchronize(WAIT).unwrap();
    assert_eq!(read.to_vec(WAIT).unwrap(), [0, 0, 0, 0, 0, 0, 0, 1]);
}

#[test]
fn garbage_in_a_peers_page_frees_nothing() {
    let stage = Stage::new("scribble");
    let client = stage.client();
    let own = stage.pool.allocate(MIB, Duration::ZERO).unwrap();
    let lent = client.allocate(MIB, Duration::ZERO).unwrap();
    for value in [0, 2, 1 << 40, u64::MAX] {
        (0..WORDS).for_each(|word| {
            let words = client.session().words();
            words.word(word as usize).store(value)
        });
        assert!(is_limit(stage.pool.allocate(1, Duration::ZERO)), "{value}");
    }
    drop(lent);
    drop(stage.pool.allocate(MIB, Duration::ZERO).unwrap());
    drop(own);
}

/// A block of half the pool, lent to a peer that has the region mapped.
fn lent(stage: &Stage) -> (Buffer, Ticket) {
    let block = stage.pool.allocate(MIB, Duration::ZERO).unwrap();
    let ticket = block.lend(Access::ReadWrite).unwrap();
    drop(open(stage, &ticket));
    (block, ticket)
}

#[test]
fn a_pools_pages_are_as_long_as_what_it_uses_and_a_peer_takes_no_others() {
    let stage = Stage::new("lengths");
    let at = Address {
        domain: &stage.domain,
        name: &EndpointName::new("pool").unwrap(),
        kind: Kind::Pool,
    };
    let device = Some(stage.device.info().id);
    let (_session, mut hello) = ClientSession::attach(&at, device, &[], Duration::ZERO).unwrap();
    let bytes = |fd: &PeerFd| rustix::fs::fstat(fd).unwrap().st_size;
    let lengths: Vec<_> = hello.fds.iter().map(bytes).collect();
    assert_eq!(lengths, [64 << 10, 128 << 10, 1 << 20]);
    let offers = hello.fds.pop().unwrap();
    let opened = ShareWords::open(2 * WORDS, None, offers, "pool");
    assert!(matches!(opened, Err(Error::Protocol { .. })), "{opened:?}");
}

fn open(stage: &Stage, ticket: &Ticket) -> LentBuffer {
    LentBuffer::open(ticket, &stage.device, Duration::ZERO).unwrap()
}

#[test]
fn a_lent_block_is_opened_without_an_answer_of_its_owner() {
    let stage = Stage::new("words");
    let _client = stage.client();
    let (block, ticket) = lent(&stage);
    let held = stage.pool.allocator().lock();
    drop(open(&stage, &ticket));
    let again = open(&stage, &ticket);
    drop(held);
    assert_eq!(stage.pool.stats().lent_bytes, MIB);
    drop(again);
    assert_eq!(stage.pool.stats().lent_bytes, 0);
    drop(block);
}

#[test]
fn a_block_that_was_opened_without_an_answer_comes_back_behind_its_peers_stream() {
    let stage = Stage::new("words-streams");
    let _client = stage.client();
    for way in ["free", "drop", "unnamed"] {
        let (stream, go) = busy(&stage.device);
        let (block, ticket) = lent(&stage);
        let theirs = open(&stage, &ticket);
        let other = stage.pool.allocate(MIB, Duration::ZERO).unwrap();
        drop(block);
        assert!(
            is_limit(stage.pool.allocate(1, Duration::ZERO)),
            "it is open"
        );
        match way {
            "free" => theirs.free(&stream).unwrap(),
            "drop" => {
                theirs.used_on(&stream);
                drop(theirs);
            }
            // The control: a stream that was not recorded is not waited for.
            _ => drop(theirs),
        }
        let early = stage.pool.allocate(1, Duration::from_millis(30));
        assert_eq!(is_limit(early), way != "unnamed", "{way}");
        drop(go);
        drop(stage.pool.allocate(MIB, WAIT).unwrap());
        drop(other);
    }
}

#[test]
fn a_block_is_opened_again_while_its_release_waits_for_a_stream() {
    let stage = Stage::new("words-again");
    let _client = stage.client();
    let (stream, go) = busy(&stage.device);
    let (block, ticket) = lent(&stage);
    open(&stage, &ticket).free(&stream).unwrap();
    let again = open(&stage, &ticket);
    drop((block, go));
    stream.synchronize(WAIT).unwrap();
    let other = stage.pool.allocate(MIB, Duration::ZERO).unwrap();
    assert!(
        is_limit(stage.pool.allocate(1, Duration::ZERO)),
        "it is open"
    );
    drop(again);
    drop(stage.pool.allocate(MIB, Duration::ZERO).unwrap());
    drop(other);
}

#[test]
fn what_a_dead_peer_had_opened_without_an_answer_comes_back() {
    let stage = Stage::new("words-death");
    let client = stage.client();
    let (block, ticket) = lent(&stage);
    let theirs = open(&stage, &ticket);
    let other = stage.pool.allocate(MIB, Duration::ZERO).unwrap();
    drop(block);
    let allocator = stage.pool.allocator();
    let (alive, writer) = rustix::pipe::pipe().unwrap();
    let process = Process::of_pipe(alive);
    (allocator.lock().borrowers.all()).for_each(|peer| peer.leave_as(process.clone()));
    // Ticks pass while the process is alive.
    assert!(is_limit(stage.pool.allocate(1, Duration::from_millis(500))));
    drop(writer);
    drop(stage.pool.allocate(MIB, WAIT).unwrap());
    drop((theirs, other, client));
}

#[test]
fn a_peer_of_another_user_holds_nothing_by_words_that_it_writes() {
    let stage = Stage::new("words-user");
    let client = stage.client();
    let (block, ticket) = lent(&stage);
    let theirs = open(&stage, &ticket);
    drop(block);
    assert_eq!(stage.pool.stats().lent_bytes, MIB);
    let allocator = stage.pool.allocator();
    (allocator.lock().borrowers.all()).for_each(|peer| peer.is_of_another_user());
    assert_eq!(stage.pool.stats().lent_bytes, 0);
    drop((theirs, client));
}

/// Reports every tick.
struct Clock(Mutex<mpsc::Sender<()>>);

impl EventSource for Clock {
    fn on_tick(&self, _: u64) {
        let _ = self.0.lock().unwrap().send(());
    }
}

#[test]
fn the_reactor_does_not_wait_for_a_pools_lock_held_in_a_driver_call() {
    let stage = Stage::new("tick");
    let allocator = stage.pool.allocator();
    let held = allocator.lock();
    let (tell, told) = mpsc::channel();
    let clock: Arc<dyn EventSource> = Arc::new(Clock(Mutex::new(tell)));
    allocator.reactor().register_ticks(Arc::downgrade(&clock));
    // The second tick comes after the pool had its tick in between.
    (0..2).for_each(|_| told.recv_timeout(WAIT).expect("the reactor goes on"));
    drop(held);
}

#[test]
fn a_block_granted_after_its_client_gave_up_comes_back() {
    let stage = Stage::new("late");
    let client = stage.client();
    let held = stage.pool.allocator().lock();
    let wish = encode(&LendRequest::Memory(PoolRequest::Block { bytes: MIB })).unwrap();
    let late = client
        .session()
        .ipc()
        .request(&wish, Duration::from_millis(10))
        .unwrap_err();
    assert!(matches!(late, Error::Timeout { .. }), "{late}");
    drop(held);
    assert!(
        eventually(|| stage.pool.stats().allocations == 1),
        "it is granted"
    );
    assert!(
        eventually(|| stage.pool.stats().lent_bytes == 0),
        "and given back"
    );
    drop(client.allocate(2 * MIB, Duration::ZERO).unwrap());
}

#[test]
fn a_block_of_a_peer_that_closed_gracefully_comes_back_at_its_death() {
    let stage = Stage::new("close");
    let client = stage.client();
    let block = client.allocate(2 * MIB, Duration::ZERO).unwrap();
    let allocator = stage.pool.allocator();
    let close = |process| {
        let mut state = allocator.lock();
        let mut borrowers = state.borrowers.all();
        borrowers.next().unwrap().leave_as(process);
    };
    let (alive, writer) = rustix::pipe::pipe().unwrap();
    close(Process::of_pipe(alive));
    // Ticks pass while the process is alive.
    assert!(is_limit(stage.pool.allocate(1, Duration::from_millis(500))));
    drop(writer);
    drop(stage.pool.allocate(2 * MIB, WAIT).unwrap());
    drop(block);
}

/// Another session of this process: one of another device object.
fn other_device() -> Device {
    Device::from_backend(Wrapped::new(
        Device::host().backend().clone(),
        Unlocked::default(),
    ))
}

#[test]
fn what_a_dead_peer_has_by_words_and_by_answers_comes_back_once_and_others_keep_it() {
    let stage = Stage::new("words-both");
    let dying = stage.client();
    let device = other_device();
    let _living = PoolClient::open("pool", stage.domain.on(&device), Duration::ZERO).unwrap();
    let block = stage.pool.allocate(MIB, Duration::ZERO).unwrap();
    let tickets = [Access::Read, Access::ReadWrite].map(|it| block.lend(it).unwrap());
    // The first two by words, the others by answers.
    let dead = [0, 1, 0, 1].map(|it| open(&stage, &tickets[it]));
    let theirs = LentBuffer::open(&tickets[0], &device, Duration::ZERO).unwrap();
    let other = stage.pool.allocate(MIB, Duration::ZERO).unwrap();
    drop(block);
    let allocator = stage.pool.allocator();
    let (alive, writer) = rustix::pipe::pipe().unwrap();
    drop(writer);
    let process = Process::of_pipe(alive);
    // The one that connected first.
    (allocator.lock().borrowers.all().take(1)).for_each(|peer| peer.leave_as(process.clone()));
    assert!(eventually(|| stage.pool.stats().peers == 1));
    assert!(is_limit(stage.pool.allocate(1, Duration::from_millis(100))));
    drop(theirs);
    drop(stage.pool.allocate(MIB, WAIT).unwrap());
    drop((other, dead, dying));
    assert_eq!(stage.pool.usage(allocator.uid).blocks, 0);
}

#[test]
fn a_block_is_never_another_one_while_a_peer_has_it_whatever_ends_meanwhile() {
    let stage = Stage::new("words-stress");
    let devices = [stage.device.clone(), other_device(), other_device()];
    let clients: Vec<_> = (devices.iter())
        .map(|it| PoolClient::open("pool", stage.domain.on(it), Duration::ZERO).unwrap())
        .collect();
    let offered: Mutex<Vec<Option<(Ticket, u64)>>> = Mutex::new(vec![None; 16]);
    let is_over = AtomicBool::new(false);
    let opened = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for (number, device) in devices.iter().enumerate() {
            for half in 0..2 {
                let (offered, is_over, opened) = (&offered, &is_over, &opened);
                scope.spawn(move || {
                    let stream = device.stream().unwrap();
                    let mut at = number * 7 + half;
                    while !is_over.load(Relaxed) {
                        at = at
                            .wrapping_mul(6364136223846793005)
                            .wrapping_add(1442695040888963407);
                        let wanted = offered.lock().unwrap()[(at >> 33) % 16].clone();
                        let Some((ticket, stamp)) = wanted else {
                            continue;
                        };
                        let Ok(block) = LentBuffer::open(&ticket, device, Duration::ZERO) else {
                            continue;
                        };
                        opened.fetch_add(1, Relaxed);
                        for _ in 0..(at >> 40) % 4 + 1 {
                            let bytes = block.to_vec(WAIT).unwrap();
                            assert_eq!(bytes[..8], stamp.to_le_bytes());
                        }
                        if at >> 45 & 1 == 0 {
                            block.free(&stream).unwrap();
                        }
                    }
                });
            }
        }
        let stream = stage.device.stream().unwrap();
        let mut held: Vec<Option<Buffer>> = (0..16).map(|_| None).collect();
        for stamp in 1..=20_000_u64 {
            let at = (stamp.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as usize % 16;
            held[at] = None;
            let block = stage.pool.allocate(512, WAIT).unwrap();
            block.write(&stream, 0, &stamp.to_le_bytes()).unwrap();
            stream.synchronize(WAIT).unwrap();
            let access = [Access::Read, Access::ReadWrite][stamp as usize & 1];
            let ticket = block.lend(access).unwrap();
            offered.lock().unwrap()[at] = Some((ticket, stamp));
            held[at] = Some(block);
        }
        is_over.store(true, Relaxed);
        assert_ne!(opened.load(Relaxed), 0);
    });
    let uid = stage.pool.allocator().uid;
    assert!(eventually(|| stage.pool.usage(uid).blocks == 0));
    assert_eq!(stage.pool.stats().lent_bytes, 0);
    drop(stage.pool.allocate(2 * MIB, WAIT).unwrap());
    drop(clients);
}
