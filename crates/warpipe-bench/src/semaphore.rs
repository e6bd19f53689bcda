//! A permit taken and given back on the CPU beside a pair of compare-and-swaps, and handed from the
//! device work of one process to that of another beside kernels that spin on a flag in device
//! memory, which both map.
//!
//! The two processes take strict turns at one permit. Their CPUs run ahead of their devices, as far
//! as the semaphore lets them; with the spinning kernels they enqueue all turns at once. Each turn
//! is one kernel in both.

use std::os::fd::AsFd;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::time::{Duration, Instant};

use anyhow::ensure;
use serde::{Deserialize, Serialize};
use warpipe::{Access, Device, DeviceId, Domain, Semaphore, Stream};
use warpipe_bench::raw::{Memory, SharedMemory};
use warpipe_testkit::figure::{Figure, Wanted};

use super::Role;
use super::peer_process::{Control, PeerProcess};
use super::setup::{BenchDomain, PATIENCE, Setup};

const NAME: &str = "bench/semaphore";

/// An uncontended pair, in nanoseconds: pure atomics, and no system call.
const PAIR_NS_MAX: f64 = 1_000.0;

/// Under MPS, where both kernels that spin run at the same time. A hand-over that starts a thread
/// or sleeps takes longer.
const TIMES_A_SPIN: f64 = 4.0;

/// How long a kernel spins for its turn: nothing hangs when it does not come.
const SPIN_MAX: Duration = Duration::from_secs(1);

/// The parameters of both processes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Terms {
    place: BenchDomain,
    rounds: usize,
    /// Round trips of one round by the semaphore.
    trips: u64,
    /// And by the spinning kernels, which take longer.
    spins: u64,
}

pub fn run(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    Ok(vec![uncontended(setup)?, handed_over(setup)?])
}

fn uncontended(setup: &Setup) -> anyhow::Result<Figure> {
    let _creator = Semaphore::new(NAME, 1, setup.domain.on(&setup.device))?;
    let member = Semaphore::open(NAME, setup.domain.on(&setup.device), Duration::ZERO)?;
    let memory = SharedMemory::create(1)?;
    let [word, ..] = memory.line(0);
    let pairs = setup.times(200_000) as u64;
    let (mut ours, mut floor) = (Vec::new(), Vec::new());
    for round in 0..=setup.rounds() {
        let bare = nanoseconds_each(pairs, || bare_pair(word))?;
        let pair = nanoseconds_each(pairs, || {
            member.acquire_host(PATIENCE)?.release_now();
            Ok(())
        })?;
        if round > 0 {
            floor.push(bare);
            ours.push(pair);
        }
    }
    Ok(Figure::new("semaphore", "acquire and release, CPU, uncontended", "ns", &ours)
        .beside(&floor)
        .wanted(Wanted::AtMost(PAIR_NS_MAX))
        .note("the floor is a compare-and-swap there and back on one shared word, with neither line nor deaths"))
}

fn bare_pair(word: &AtomicU64) -> anyhow::Result<()> {
    ensure!(
        word.compare_exchange(0, 1, SeqCst, Relaxed).is_ok(),
        "the word is taken"
    );
    ensure!(
        word.compare_exchange(1, 0, SeqCst, Relaxed).is_ok(),
        "the word is free"
    );
    Ok(())
}

fn nanoseconds_each(
    times: u64,
    mut work: impl FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<f64> {
    let start = Instant::now();
    for _ in 0..times {
        work()?;
    }
    Ok(start.elapsed().as_nanos() as f64 / times as f64)
}

fn handed_over(setup: &Setup) -> anyhow::Result<Figure> {
    let terms = Terms {
        place: setup.place(),
        rounds: setup.rounds().min(5),
        trips: setup.times(2_000) as u64,
        spins: setup.times(40) as u64,
    };
    let _creator = Semaphore::new(NAME, 1, setup.domain.on(&setup.device))?;
    let (flag, board) = (
        Memory::allocate(&setup.device, 8)?,
        SharedMemory::create(1)?,
    );
    let peer = PeerProcess::start(&Role::Semaphore(terms.clone()))?;
    peer.control.send_fd(board.fd())?;
    let (fd, bytes, owner) = flag.export()?;
    peer.control.send(&(bytes, owner))?;
    peer.control.send_fd(fd.as_fd())?;
    let mut end = End::new(&setup.device, &setup.domain, flag, board, 0)?;
    peer.control.hear::<()>()?;
    let (mut ours, mut floor) = (Vec::new(), Vec::new());
    for round in 0..=terms.rounds {
        peer.control.send(&())?;
        let spun = end.spin(terms.spins)?;
        peer.control.hear::<()>()?;
        peer.control.send(&())?;
        let handed = end.hand_over(terms.trips)?;
        peer.control.hear::<()>()?;
        if round > 0 {
            floor.push(spun.as_nanos() as f64 / 1e3 / terms.spins as f64);
            ours.push(handed.as_nanos() as f64 / 1e3 / terms.trips as f64);
        }
    }
    peer.end()?;
    let figure = Figure::new(
        "semaphore",
        "there and back, kernel to kernel, two processes",
        "us",
        &ours,
    )
    .beside(&floor)
    .wanted(Wanted::RatioAtMost(TIMES_A_SPIN));
    let times = figure.ratio.map_or(f64::NAN, |ratio| 1.0 / ratio);
    Ok(figure.note(format!(
        "beside it, not a floor: kernels that spin on device memory, which take {times:.1} times as long"
    )))
}

/// The other process's part.
pub fn answer(terms: &Terms, control: &Control) -> anyhow::Result<()> {
    let (device, domain) = terms.place.open()?;
    let board = SharedMemory::open(control.receive_fd()?, 1)?;
    let (bytes, owner): (u64, DeviceId) = control.hear()?;
    let flag = Memory::import_for(
        Access::ReadWrite,
        &device,
        control.receive_fd()?,
        bytes,
        owner,
    )?;
    let mut end = End::new(&device, &domain, flag, board, 1)?;
    control.send(&())?;
    for _ in 0..=terms.rounds {
        control.hear::<()>()?;
        end.spin(terms.spins)?;
        control.send(&())?;
        control.hear::<()>()?;
        end.hand_over(terms.trips)?;
        control.send(&())?;
    }
    Ok(())
}

/// One process's end of both.
struct End {
    semaphore: Semaphore,
    stream: Stream,
    /// The memory that the kernels under a permit change.
    cell: Memory,
    flag: Memory,
    board: SharedMemory,
    /// Which of the two turns of each trip is this one's.
    parity: u64,
    spun: u64,
    handed: u64,
}

impl End {
    fn new(
        device: &Device,
        domain: &Domain,
        flag: Memory,
        board: SharedMemory,
        parity: u64,
    ) -> anyhow::Result<End> {
        Ok(End {
            semaphore: Semaphore::open(NAME, domain.on(device), Duration::ZERO)?,
            stream: device.stream()?,
            cell: Memory::allocate(device, 8)?,
            flag,
            board,
            parity,
            spun: 0,
            handed: 0,
        })
    }

    /// Takes its turns by kernels that spin, and waits for the last of the other's.
    fn spin(&mut self, trips: u64) -> anyhow::Result<Duration> {
        let start = Instant::now();
        let pass = |due: u64, next: u64| {
            // SAFETY: the flag is used by these kernels alone, and kept until the stream has been
            // waited for.
            unsafe { warpipe_kernels::pass_on(&self.stream, self.flag.ptr(), due, next, SPIN_MAX) }
        };
        for trip in 0..trips {
            let due = 2 * (self.spun + trip) + self.parity;
            pass(due, due + 1)?;
        }
        self.spun += trips;
        pass(2 * self.spun, 2 * self.spun)?;
        self.stream.synchronize(PATIENCE)?;
        let took = start.elapsed();
        // A kernel that timed out has passed nothing on, and all kernels after it have waited as
        // long.
        ensure!(
            took < SPIN_MAX * trips as u32,
            "a spinning kernel did not get its turn within {SPIN_MAX:?}"
        );
        Ok(took)
    }

    /// Takes its turns by the semaphore, and waits for the other's last work.
    fn hand_over(&mut self, trips: u64) -> anyhow::Result<Duration> {
        let [turn, ..] = self.board.line(0);
        let start = Instant::now();
        for trip in 0..trips {
            let own = 2 * (self.handed + trip) + self.parity;
            await_turn(turn, own)?;
            let permit = self.semaphore.acquire(&self.stream, PATIENCE)?;
            // SAFETY: the cell is this stream's alone, and kept until it has been waited for.
            unsafe { warpipe_kernels::touch(&self.stream, self.cell.ptr(), 1) }?;
            permit.release(&self.stream)?;
            turn.store(own + 1, Release);
        }
        self.handed += trips;
        await_turn(turn, 2 * self.handed)?;
        self.semaphore.acquire_host(PATIENCE)?.release_now();
        self.stream.synchronize(PATIENCE)?;
        Ok(start.elapsed())
    }
}

fn await_turn(turn: &AtomicU64, due: u64) -> anyhow::Result<()> {
    let start = Instant::now();
    while turn.load(Acquire) < due {
        for _ in 0..1_000 {
            std::hint::spin_loop();
            if turn.load(Acquire) >= due {
                return Ok(());
            }
        }
        // The two may have one CPU between them.
        std::thread::yield_now();
        ensure!(
            start.elapsed() < PATIENCE,
            "the other process did not take its turn"
        );
    }
    Ok(())
}
