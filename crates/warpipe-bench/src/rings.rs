//! The bare ring that the host figures are compared with: a head, a tail, slots of 128 bytes, and
//! an eventfd for a sleeping end. One writer, one reader, no checks, no death.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU64, fence};
use std::time::Instant;

use crate::raw::{LINE_BYTES, SharedMemory};
use anyhow::ensure;
use rustix::event::{EventfdFlags, eventfd};
use warpipe_testkit::wait_readable;

use super::PATIENCE;

pub type Payload = [u8; LINE_BYTES];

/// Slots of a ring.
pub const DEPTH: usize = 16;

/// Lines that a ring takes of the shared memory.
pub const LINES: usize = 2 + DEPTH;

/// A line's words: the value reached, and whether the other end sleeps until then.
const REACHED: usize = 0;
const ASLEEP: usize = 8;

/// An eventfd that both processes hold.
pub fn doorbell() -> anyhow::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// How an end waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patience {
    /// Polls.
    Spin,
    /// Polls this often, then sleeps.
    Sleep { spins: u32 },
}

/// One end of the ring in the lines from `base` on.
#[derive(Debug)]
pub struct Ring<'a> {
    memory: &'a SharedMemory,
    base: usize,
    /// Wakes the reader.
    filled: &'a OwnedFd,
    /// Wakes the writer.
    emptied: &'a OwnedFd,
    turn: u64,
}

impl<'a> Ring<'a> {
    pub fn new(
        memory: &'a SharedMemory,
        base: usize,
        filled: &'a OwnedFd,
        emptied: &'a OwnedFd,
    ) -> Ring<'a> {
        Ring {
            memory,
            base,
            filled,
            emptied,
            turn: 0,
        }
    }

    fn head(&self) -> &[AtomicU64; LINE_BYTES / 8] {
        self.memory.line(self.base)
    }

    fn tail(&self) -> &[AtomicU64; LINE_BYTES / 8] {
        self.memory.line(self.base + 1)
    }

    fn slot(&self, turn: u64) -> &[AtomicU64; LINE_BYTES / 8] {
        self.memory.line(self.base + 2 + turn as usize % DEPTH)
    }

    /// Copies a payload in, waiting for a free slot.
    pub fn push(&mut self, payload: &Payload, patience: Patience) -> anyhow::Result<()> {
        self.turn += 1;
        let freed = self.turn.saturating_sub(DEPTH as u64);
        await_reached(self.tail(), freed, self.emptied, patience)?;
        for (word, chunk) in self.slot(self.turn).iter().zip(payload.as_chunks::<8>().0) {
            word.store(u64::from_le_bytes(*chunk), Relaxed);
        }
        signal(self.head(), self.turn, self.filled, patience);
        Ok(())
    }

    /// Copies the next payload out, waiting for it.
    pub fn pop(&mut self, payload: &mut Payload, patience: Patience) -> anyhow::Result<()> {
        self.turn += 1;
        await_reached(self.head(), self.turn, self.filled, patience)?;
        for (word, chunk) in self
            .slot(self.turn)
            .iter()
            .zip(payload.as_chunks_mut::<8>().0)
        {
            *chunk = word.load(Relaxed).to_le_bytes();
        }
        signal(self.tail(), self.turn, self.emptied, patience);
        Ok(())
    }

    /// Waits, on the writer's side, until everything has been read.
    pub fn await_empty(&self) -> anyhow::Result<()> {
        await_reached(
            self.tail(),
            self.turn,
            self.emptied,
            Patience::Sleep { spins: 100 },
        )
    }
}

fn signal(line: &[AtomicU64; LINE_BYTES / 8], turn: u64, doorbell: &OwnedFd, patience: Patience) {
    line[REACHED].store(turn, Release);
    if patience == Patience::Spin {
        return;
    }
    // Pairs with the fence in `await_reached`: either this end sees the sleeper, or the sleeper
    // sees the value.
    fence(SeqCst);
    if line[ASLEEP].load(Acquire) != 0 {
        let _ = rustix::io::write(doorbell, &1u64.to_ne_bytes());
    }
}

fn await_reached(
    line: &[AtomicU64; LINE_BYTES / 8],
    turn: u64,
    doorbell: &OwnedFd,
    patience: Patience,
) -> anyhow::Result<()> {
    let is_reached = || line[REACHED].load(Acquire) >= turn;
    let Patience::Sleep { spins } = patience else {
        return spin(is_reached);
    };
    for _ in 0..spins {
        if is_reached() {
            return Ok(());
        }
        std::hint::spin_loop();
    }
    while !is_reached() {
        line[ASLEEP].store(1, Relaxed);
        fence(SeqCst);
        if !is_reached() {
            ensure!(
                wait_readable(doorbell, PATIENCE)?,
                "a bare ring makes no progress"
            );
        }
        line[ASLEEP].store(0, Relaxed);
        let _ = rustix::io::read(doorbell, &mut [0u8; 8]);
    }
    Ok(())
}

fn spin(is_reached: impl Fn() -> bool) -> anyhow::Result<()> {
    let start = Instant::now();
    loop {
        for _ in 0..100_000 {
            if is_reached() {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        ensure!(start.elapsed() < PATIENCE, "a bare ring makes no progress");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_into_the_bare_ring_comes_out_in_order() {
        let memory = SharedMemory::create(LINES).unwrap();
        let (filled, emptied) = (doorbell().unwrap(), doorbell().unwrap());
        let patience = Patience::Sleep { spins: 0 };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut ring = Ring::new(&memory, 0, &filled, &emptied);
                (0..200u8).for_each(|n| ring.push(&[n; LINE_BYTES], patience).unwrap());
                ring.await_empty().unwrap();
            });
            let mut ring = Ring::new(&memory, 0, &filled, &emptied);
            for n in 0..200u8 {
                let mut payload = [0; LINE_BYTES];
                ring.pop(&mut payload, patience).unwrap();
                assert_eq!(payload, [n; LINE_BYTES]);
            }
        });
    }
}
