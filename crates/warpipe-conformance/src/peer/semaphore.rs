//! A peer's orders for semaphores, and the memory in which all holders count each other. **This
//! module is marked for unsafe**: it maps memory and hands its addresses to streams.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::mm::{MapFlags, ProtFlags};
use serde::{Deserialize, Serialize};
use warpipe::backend::testing::{Delaying, Wrapped};
use warpipe::{Device, DevicePtr, Permit, Semaphore, Stream};
use warpipe_kernels as kernels;

use super::order::Answer;
use super::signals::hold;
use crate::PATIENCE;
use crate::context::Context;
use crate::payload::{Check, ErrorCounters, fill_words};
use crate::shared::Shared;

/// A peer's orders for a semaphore.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum SemaphoreOrder {
    /// Make one. Answers [`Answer::Done`].
    Create {
        /// Its name.
        name: String,
        /// How many permits.
        permits: u32,
    },
    /// Open one.
    Open {
        /// Its name.
        name: String,
        /// False for the negative control: no stream of this peer waits for anything.
        waits: bool,
    },
    /// Acquire a permit and hold it.
    Acquire {
        /// How long to wait for it.
        timeout_ms: u64,
        /// On the peer's stream, instead of on the CPU.
        on_stream: bool,
    },
    /// Acquire on the stream, give it so much to do, and release behind that. Answers at once.
    BeSlow {
        /// How long its kernel runs.
        slow_us: u64,
    },
    /// Acquire on the stream, keep it, and release behind that. Answers at once.
    HoldUp,
    /// Release what is held.
    Release,
    /// Go in and out, on the CPU, and count. Answers with the most hand-overs to others that one
    /// wait had.
    Compete {
        /// The board's file.
        board: String,
        /// How often.
        rounds: u64,
    },
    /// Go in and out until killed, in a semaphore of one permit, and see that no other live process
    /// is inside.
    CompeteUntilKilled {
        /// The board's file.
        board: String,
        /// Where this peer says that it is inside.
        slot: usize,
    },
    /// Check the board's data and write the next, each time on the stream under a permit. Does not
    /// wait for it.
    Turns {
        /// The board's file.
        board: String,
        /// How many.
        count: u64,
        /// How long each kernel waits before it writes.
        slow_us: u64,
    },
    /// Wait for the stream. Answers with how many words were wrong in all turns so far.
    Wrong,
}

/// Counters and data that all contenders map: a file.
#[derive(Debug)]
pub struct Board {
    device: Device,
    base: *mut u8,
    address: DevicePtr,
    /// Its creator keeps it to be found.
    memory: Option<OwnedFd>,
}

impl Board {
    const BYTES: usize = 8192;
    const DATA: usize = 4096;
    /// Words of data.
    pub const WORDS: u64 = 512;
    /// How many can say that they are inside.
    pub const SLOTS: usize = 64;
    const SLOT: usize = 8;

    /// Makes it, zeroed, and says where others find it for as long as it is kept: a memfd, because
    /// a driver registers no file of a disk.
    ///
    /// # Errors
    /// Those of the system, or of registering.
    pub fn create(device: &Device) -> Result<(Board, PathBuf)> {
        let memory = rustix::fs::memfd_create(c"board", rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&memory, Board::BYTES as u64)?;
        let path = PathBuf::from(Shared::path(&memory));
        let mut board = Board::open(device, &path)?;
        board.memory = Some(memory);
        Ok((board, path))
    }

    /// Maps it and registers it with the device.
    ///
    /// # Errors
    /// Those of `mmap`, or of registering.
    pub fn open(device: &Device, path: &Path) -> Result<Board> {
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .open(path)
            .context("opening the board")?;
        ensure!(
            file.metadata()?.len() == Board::BYTES as u64,
            "a board of its length"
        );
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                Board::BYTES,
                protection,
                MapFlags::SHARED,
                &file,
                0,
            )
        };
        let base = base.context("mapping the board")?.cast::<u8>();
        // SAFETY: page-aligned mapped memory that stays until `drop` has unregistered it. On an
        // error the process is about to end and the mapping with it.
        let address = unsafe { device.backend().register(base, Board::BYTES)? };
        Ok(Board {
            device: device.clone(),
            base,
            address,
            memory: None,
        })
    }

    fn counter(&self, index: usize) -> &AtomicU64 {
        assert!(index < Board::SLOT + Board::SLOTS);
        // SAFETY: inside the first page of the mapping, aligned, and only used atomically.
        unsafe { &*self.base.cast::<AtomicU64>().add(index) }
    }

    /// How many are inside now.
    fn inside(&self) -> &AtomicU64 {
        self.counter(0)
    }

    /// How often there were more inside than may be.
    pub fn crowds(&self) -> &AtomicU64 {
        self.counter(1)
    }

    /// How often a process has been inside.
    pub fn visits(&self) -> &AtomicU64 {
        self.counter(2)
    }

    /// The seed of the data.
    fn turn(&self) -> &AtomicU64 {
        self.counter(3)
    }

    fn slot(&self, index: usize) -> &AtomicU64 {
        self.counter(Board::SLOT + index % Board::SLOTS)
    }

    fn data(&self) -> DevicePtr {
        self.address + Board::DATA as u64
    }

    /// Whether anybody but `slot` says that he is inside, and lives.
    fn is_crowded(&self, slot: usize) -> bool {
        let others = (0..Board::SLOTS)
            .filter(|&other| other != slot)
            .map(|other| self.slot(other).load(SeqCst));
        others.into_iter().any(|pid| pid != 0 && is_alive(pid))
    }
}

/// A process that is proven dead is about to be a zombie, or is one until it is waited for.
fn is_alive(pid: u64) -> bool {
    /// `PF_EXITING` of Linux: it runs no program any more.
    const EXITING: u64 = 4;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // After the name: state, parent, group, session, terminal, its group, flags.
    let mut fields = stat
        .rsplit_once(") ")
        .map_or("", |(_, rest)| rest)
        .split(' ');
    let (state, flags) = (
        fields.next().unwrap_or_default(),
        fields.nth(5).and_then(|flags| flags.parse::<u64>().ok()),
    );
    !matches!(state, "" | "Z" | "X") && flags.is_none_or(|flags| flags & EXITING == 0)
}

impl Drop for Board {
    fn drop(&mut self) {
        // SAFETY: registered and mapped once in `open`; a caller that enqueues work on the data
        // synchronises its stream before it drops the board, or ends its process.
        unsafe {
            if self.device.backend().unregister(self.base).is_ok() {
                let _ = rustix::mm::munmap(self.base.cast(), Board::BYTES);
            }
        }
    }
}

/// The peer's semaphore, and what it holds of it.
#[derive(Default)]
pub(super) struct Contender {
    permits: Vec<(Permit, bool)>,
    post: Option<Post>,
}

/// Fields are dropped in this order.
struct Post {
    semaphore: Semaphore,
    checks: Vec<Check>,
    error_counters: ErrorCounters,
    stream: Stream,
    device: Device,
    board: Option<Board>,
}

impl Contender {
    pub(super) fn carry_out(&mut self, context: &Context, order: SemaphoreOrder) -> Result<Answer> {
        match order {
            SemaphoreOrder::Create { name, permits } => {
                let semaphore = Semaphore::new(&name, permits, context.domain.on(&context.device))?;
                self.post = Some(Post::new(semaphore, &context.device)?);
            }
            SemaphoreOrder::Open { name, waits } => {
                let device = if waits {
                    context.device.clone()
                } else {
                    deaf(&context.device)
                };
                let semaphore = Semaphore::open(&name, context.domain.on(&device), PATIENCE)?;
                self.post = Some(Post::new(semaphore, &device)?);
            }
            SemaphoreOrder::Acquire {
                timeout_ms,
                on_stream,
            } => {
                let permit = self
                    .post()?
                    .acquire(Duration::from_millis(timeout_ms), on_stream)?;
                self.permits.push((permit, on_stream));
            }
            SemaphoreOrder::BeSlow { slow_us } => {
                self.post()?.be_slow(Duration::from_micros(slow_us))?
            }
            SemaphoreOrder::HoldUp => self.post()?.hold_up()?,
            SemaphoreOrder::Release => self.release()?,
            SemaphoreOrder::Compete { board, rounds } => {
                return self
                    .post()?
                    .compete(Path::new(&board), rounds)
                    .map(Answer::Number);
            }
            SemaphoreOrder::CompeteUntilKilled { board, slot } => {
                self.post()?.compete_until_killed(Path::new(&board), slot)?;
            }
            SemaphoreOrder::Turns {
                board,
                count,
                slow_us,
            } => {
                self.post()?
                    .turns(Path::new(&board), count, Duration::from_micros(slow_us))?;
            }
            SemaphoreOrder::Wrong => return self.post()?.wrong().map(Answer::Number),
        }
        Ok(Answer::Done)
    }

    fn post(&mut self) -> Result<&mut Post> {
        self.post.as_mut().context("it has no semaphore")
    }

    fn release(&mut self) -> Result<()> {
        for (permit, on_stream) in std::mem::take(&mut self.permits) {
            if on_stream {
                permit.release(&self.post()?.stream)?
            } else {
                permit.release_now()
            }
        }
        Ok(())
    }
}

/// The same device; its streams never wait.
fn deaf(device: &Device) -> Device {
    let hook = Delaying {
        signal_late: Duration::ZERO,
        waits: false,
    };
    Device::from_backend(Wrapped::new(device.backend().clone(), hook))
}

impl Post {
    fn new(semaphore: Semaphore, device: &Device) -> Result<Post> {
        let (stream, error_counters) = (device.stream()?, ErrorCounters::new(device)?);
        Ok(Post {
            semaphore,
            checks: Vec::new(),
            error_counters,
            stream,
            device: device.clone(),
            board: None,
        })
    }

    fn acquire(&self, timeout: Duration, on_stream: bool) -> warpipe::Result<Permit> {
        if on_stream {
            self.semaphore.acquire(&self.stream, timeout)
        } else {
            self.semaphore.acquire_host(timeout)
        }
    }

    fn be_slow(&self, slow: Duration) -> Result<()> {
        let permit = self.semaphore.acquire(&self.stream, PATIENCE)?;
        kernels::spin(&self.stream, slow)?;
        Ok(permit.release(&self.stream)?)
    }

    fn hold_up(&self) -> Result<()> {
        let permit = self.semaphore.acquire(&self.stream, PATIENCE)?;
        hold(&self.stream)?;
        Ok(permit.release(&self.stream)?)
    }

    fn board(&mut self, path: &Path) -> Result<()> {
        if self.board.is_none() {
            self.board = Some(Board::open(&self.device, path)?);
        }
        Ok(())
    }

    fn compete(&mut self, path: &Path, rounds: u64) -> Result<u64> {
        self.board(path)?;
        let board = self.board.as_ref().context("opened above")?;
        let (most, mut passed) = (u64::from(self.semaphore.state().permits), 0);
        for _ in 0..rounds {
            let permit = self.semaphore.acquire_host(PATIENCE)?;
            if board.inside().fetch_add(1, SeqCst) >= most {
                board.crowds().fetch_add(1, SeqCst);
            }
            board.visits().fetch_add(1, SeqCst);
            // Others have a chance to come in while this one is inside.
            std::thread::yield_now();
            board.inside().fetch_sub(1, SeqCst);
            passed = passed.max(permit.passed);
            permit.release_now();
        }
        Ok(passed)
    }

    fn compete_until_killed(&mut self, path: &Path, slot: usize) -> Result<()> {
        self.board(path)?;
        let board = self.board.as_ref().context("opened above")?;
        loop {
            let permit = self.semaphore.acquire_host(PATIENCE)?;
            board.slot(slot).store(std::process::id().into(), SeqCst);
            if board.is_crowded(slot) {
                board.crowds().fetch_add(1, SeqCst);
            }
            board.visits().fetch_add(1, SeqCst);
            board.slot(slot).store(0, SeqCst);
            permit.release_now();
        }
    }

    fn turns(&mut self, path: &Path, count: u64, slow: Duration) -> Result<()> {
        self.board(path)?;
        let board = self.board.as_ref().context("opened above")?;
        for _ in 0..count {
            let permit = self.semaphore.acquire(&self.stream, PATIENCE)?;
            let turn = board.turn().load(SeqCst);
            // SAFETY: the board's data stays mapped and registered until the stream has been waited
            // for (`wrong`), or the process ends; the holder of the permit is alone on it.
            unsafe {
                if turn > 0 {
                    self.checks.push(self.error_counters.check(
                        &self.stream,
                        board.data(),
                        Board::WORDS,
                        turn,
                    )?);
                }
                fill_words(&self.stream, board.data(), Board::WORDS, turn + 1, slow)?;
            }
            board.turn().store(turn + 1, SeqCst);
            permit.release(&self.stream)?;
        }
        Ok(())
    }

    fn wrong(&mut self) -> Result<u64> {
        self.stream.synchronize(PATIENCE)?;
        Ok(std::mem::take(&mut self.checks)
            .into_iter()
            .map(|check| self.error_counters.wrong_words(check))
            .sum())
    }
}

impl Drop for Post {
    fn drop(&mut self) {
        // Before the board and the tally go; a stream that is stuck has failed its case already.
        let _ = self.stream.synchronize(PATIENCE);
    }
}
