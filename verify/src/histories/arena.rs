//! An arena with streams that write late. A slot is taken, its holder's stream is given writes to
//! it and after them the signal of its fence; others hold it meanwhile. It may be taken again when
//! all have released it and the fence is reached.

use std::collections::VecDeque;

use super::Draw;
use super::memory::{Memory, Place, UNIT};
use crate::backend::TimelineWord;
use crate::device::Device;
use crate::memory::arena::{Arena, SlotId};

/// Streams of the arena's owner.
const STREAMS: usize = 2;
const LIMIT: u64 = 6 << 20;

/// The planted fault of the owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// It lets a slot go and sets no fence.
    ForgetsFence,
    /// It sets the fence of the slot's last taker.
    StaleFence,
    /// It signals before the write and not behind it.
    SignalsEarly,
}

/// A held slot.
#[derive(Debug)]
struct Taken {
    id: SlotId,
    place: Place,
    serial: u64,
    holders: u32,
    /// The stream that is to write to it, if it is not done.
    stream: Option<usize>,
    /// Its taker has let go: a slot has one fence.
    is_fenced: bool,
}

#[derive(Debug)]
enum Work {
    Write { place: Place, serial: u64 },
    Signal { id: SlotId, value: u64 },
}

/// An arena, and the truth about it.
pub struct Play {
    fault: Fault,
    arena: Arena,
    memory: Memory,
    taken: Vec<Taken>,
    streams: [VecDeque<Work>; STREAMS],
    words: Vec<TimelineWord>,
    fences: u64,
}

impl Play {
    pub fn new(fault: Fault) -> Play {
        let arena = Arena::new(&Device::host(), LIMIT);
        let (memory, taken, streams, words) = Default::default();
        Play {
            fault,
            arena,
            memory,
            taken,
            streams,
            words,
            fences: 0,
        }
    }

    /// # Errors

    /// The violation, if any.
    pub fn act(&mut self, (kind, which, size): Draw) -> Result<(), String> {
        let which = usize::from(which);
        match kind % 7 {
            0 | 1 => self.take(bytes_of(size))?,
            2 => self.write(which),
            3 => self.hold(which),
            4 => self.let_go(which)?,
            5 => self.run(which % STREAMS)?,
            _ => self.collect(),
        }
        self.check()
    }

    fn take(&mut self, bytes: u64) -> Result<(), String> {
        self.collect();
        let id = match self.arena.take(bytes) {
            Some(id) => id,
            None => {
                let (total, room) = (self.arena.total(), self.arena.room());
                let Some(growth) = self.arena.plan(bytes, total, room) else {
                    return Ok(());
                };
                let made = growth.make(&Device::host());
                let region = self
                    .arena
                    .adopt(growth, made)
                    .map_err(|error| error.to_string())?;
                self.memory
                    .add(self.arena.chunks()[region as usize].region.bytes());
                self.arena.take(bytes).ok_or("a new region has no room")?
            }
        };
        let slot = self.arena.slot(id);
        let place = Place {
            region: slot.region,
            offset: slot.offset,
            bytes: slot.bytes(),
        };
        let serial = self.arena.serial(id);
        if place.bytes < bytes.max(1) || place.bytes >= bytes.max(1) + UNIT {
            return Err(format!("{place:?} for {bytes} bytes"));
        }
        if let Some(other) = self
            .taken
            .iter()
            .find(|other| other.place.meets(&place) || other.serial == serial)
        {
            return Err(format!("{place:?} is taken, and so is {other:?}"));
        }
        self.words
            .resize_with(self.words.len().max(id as usize + 1), TimelineWord::default);
        self.memory.fill(place, serial);
        self.taken.push(Taken {
            id,
            place,
            serial,
            holders: 1,
            stream: None,
            is_fenced: false,
        });
        Ok(())
    }

    /// The taker's stream is to write to a slot.
    fn write(&mut self, which: usize) {
        let count = self.taken.len().max(1);
        let Some(taken) = self
            .taken
            .get_mut(which % count)
            .filter(|taken| !taken.is_fenced)
        else {
            return;
        };
        let stream = *taken.stream.get_or_insert(which / count % STREAMS);
        self.streams[stream].push_back(Work::Write {
            place: taken.place,
            serial: taken.serial,
        });
    }

    fn hold(&mut self, which: usize) {
        let count = self.taken.len().max(1);
        if let Some(taken) = self.taken.get_mut(which % count) {
            taken.holders += 1;
            self.arena.hold(taken.id);
        }
    }

    /// One holder lets go. The taker sets the fence before it does; others are past what they read.
    fn let_go(&mut self, which: usize) -> Result<(), String> {
        let index = which % self.taken.len().max(1);
        let Some(taken) = self.taken.get_mut(index) else {
            return Ok(());
        };
        let (id, stream) = (taken.id, taken.stream.take());
        taken.is_fenced = true;
        if let Some(foreign) = self.memory.foreign(taken.place, |tag| tag == taken.serial) {
            return Err(format!("{taken:?} was written by {foreign}"));
        }
        if let Some(stream) = stream {
            self.fences += 1;
            let value = self.fences;
            let signal = Work::Signal { id, value };
            if self.fault == Fault::SignalsEarly {
                self.streams[stream].push_front(signal);
            } else {
                self.streams[stream].push_back(signal);
            }
            match self.fault {
                Fault::ForgetsFence => {}
                Fault::StaleFence => self.arena.fence(id, self.words[id as usize].load()),
                Fault::None | Fault::SignalsEarly => self.arena.fence(id, value),
            }
        }
        taken.holders -= 1;
        if taken.holders == 0 {
            self.taken.swap_remove(index);
        }
        self.arena.release(id);
        Ok(())
    }

    /// A stream makes its next step, as late as that may be.
    fn run(&mut self, stream: usize) -> Result<(), String> {
        match self.streams[stream].pop_front() {
            Some(Work::Write { place, serial }) => {
                let spoilt = self
                    .taken
                    .iter()
                    .find(|taken| taken.serial != serial && taken.place.meets(&place));
                self.memory.fill(place, serial);
                spoilt.map_or(Ok(()), |taken| {
                    Err(format!("taking {serial} writes late, into {taken:?}"))
                })
            }
            Some(Work::Signal { id, value }) => {
                self.words[id as usize].store(value);
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn collect(&mut self) {
        let words = &self.words;
        self.arena
            .collect(|id, value| words[id as usize].reached(value));
    }

    fn check(&self) -> Result<(), String> {
        let held: u64 = self.taken.iter().map(|taken| taken.place.bytes).sum();
        let (waiting, total) = (self.arena.waiting_bytes(), self.arena.total());
        if held + waiting > total || total > LIMIT {
            return Err(format!(
                "{held} bytes are held and {waiting} wait, of {total}"
            ));
        }
        Ok(())
    }

    /// All let go and all streams run to their end: each region is one free range again.
    ///
    /// # Errors
    /// The violation, if any.
    pub fn finish(&mut self) -> Result<(), String> {
        while !self.taken.is_empty() {
            self.let_go(0)?;
        }
        for stream in 0..STREAMS {
            while !self.streams[stream].is_empty() {
                self.run(stream)?;
            }
        }
        self.collect();
        let mut regions: Vec<u64> = self.memory.regions().collect();
        regions.sort_unstable_by(|a, b| b.cmp(a));
        match regions
            .into_iter()
            .find(|&bytes| self.arena.take(bytes).is_none())
        {
            Some(bytes) => Err(format!("a region of {bytes} bytes is never whole again")),
            None => Ok(()),
        }
    }
}

/// From nothing to more than a region, the small ones more often.
fn bytes_of(size: u8) -> u64 {
    match size {
        0 => 0,
        1..=127 => u64::from(size) * 40_000,
        _ => u64::from(size) * 7,
    }
}
