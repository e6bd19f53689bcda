//! A peer's orders for kernel rings. **This module is marked for unsafe**: it launches kernels.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use warpipe::{KernelRing, KernelRingOptions, Memory, Stream};
use warpipe_kernels::ring::{self, Items};

use super::order::Answer;
use crate::PATIENCE;
use crate::context::Context;
use crate::graph::{Graphs, Mode};

/// Orders about one ring. The peer has one stream for it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum RingOrder {
    /// Make a ring with eight slots.
    Create {
        /// Its name.
        name: String,
        /// How many consumers it takes.
        consumers: u32,
    },
    /// Wait for its consumers.
    Start,
    /// Open a ring.
    Open(String),
    /// Launch a kernel that sends or receives items.
    Launch {
        /// How many.
        count: u64,
        /// How many blocks take turns.
        blocks: u32,
    },
    /// Capture the steps of so many items, one in each slot, and replay them so often. The words
    /// are added up.
    Replay(u64),
    /// Open the first ring as a consumer, make the second, and wait for its consumer.
    Pair(String, String),
    /// Send so many items of the first ring back on the second, by steps.
    Echo {
        /// How many.
        trips: u64,
        /// By replays of a graph.
        replays: bool,
    },
    /// Wait for the stream. Answers with the status of the kernel's waits.
    Finish,
    /// Answers with the words that were wrong, or with the sum.
    Wrong,
    /// Whether the steps were given their items, or the fault.
    Check,
    /// Drop the ring.
    Close,
}

/// Words of an item.
pub const WORDS: u64 = 512;
const SEED: u64 = 7;

/// One side of a ring, as a case or a peer works on it. Its results lie behind each other: wrong
/// words or the sum, status.
pub struct RingSide {
    /// The ring.
    pub ring: KernelRing,
    /// The stream of its kernel.
    pub stream: Stream,
    results: Memory,
    /// An item of the steps, as it is written next or was read last.
    item: Memory,
}

impl RingSide {
    /// A producer of this case.
    ///
    /// # Errors
    /// Those of the ring.
    pub fn create(context: &Context, name: &str, consumers: u32) -> Result<RingSide> {
        let options = KernelRingOptions {
            slot_bytes: 8 * WORDS,
            consumers,
            // The cases of one GPU run in time slices, too.
            allow_time_slices: !context.settings.mps,
            ..context.domain.on(&context.device)
        };
        RingSide::of(context, KernelRing::new(name, options)?)
    }

    /// A consumer of this case.
    ///
    /// # Errors
    /// Those of the ring.
    pub fn open(context: &Context, name: &str) -> Result<RingSide> {
        let ring = KernelRing::open(name, context.domain.on(&context.device), PATIENCE)?;
        RingSide::of(context, ring)
    }

    fn of(context: &Context, ring: KernelRing) -> Result<RingSide> {
        Ok(RingSide {
            ring,
            stream: context.stream()?,
            results: Memory::allocate(&context.device, 16)?,
            item: Memory::allocate(&context.device, 8 * WORDS)?,
        })
    }

    /// Launches the kernel of this side.
    ///
    /// # Errors
    /// Those of the launch.
    pub fn launch(&self, count: u64, blocks: u32) -> Result<()> {
        let items = Items {
            count,
            words: WORDS,
            seed: SEED,
        };
        let params = self.ring.params(&self.stream)?;
        let (wrong, status) = (self.results.ptr(), self.results.ptr() + 8);
        // SAFETY: the block is this ring's, for this stream; the results live until it is done,
        // which `finish` or the end of the process waits for.
        unsafe {
            if self.ring.info().is_producer {
                ring::send(&self.stream, params, items, blocks, status)?;
            } else {
                ring::receive(&self.stream, params, items, blocks, wrong, status)?;
            }
        }
        Ok(())
    }

    /// Enqueues the steps of one item for each slot: the producer's words are one more each time,
    /// the consumer adds them up.
    fn steps(&self, stream: &Stream) -> Result<()> {
        let Self { ring, item, .. } = self;
        for slot in 0..ring.info().depth {
            let slot = ring.slot(slot)?;
            // SAFETY: the slot is this stream's between the two steps; the rest is this side's own.
            unsafe {
                if ring.info().is_producer {
                    warpipe_kernels::touch(stream, item.ptr(), WORDS)?;
                    ring.wait_on(stream)?;
                    stream.copy(slot, item.ptr(), 8 * WORDS)?;
                    ring.publish_on(stream)?;
                } else {
                    ring.wait_on(stream)?;
                    stream.copy(item.ptr(), slot, 8 * WORDS)?;
                    ring.release_on(stream)?;
                    warpipe_kernels::checksum(stream, item.ptr(), WORDS, self.results.ptr())?;
                }
            }
        }
        Ok(())
    }

    /// Captures the steps of an item for each slot, and replays them.
    ///
    /// # Errors
    /// Those of the driver; the case is skipped on the host.
    pub fn replay(&self, context: &Context, times: u64) -> Result<()> {
        let graphs = Graphs::of(context)?;
        let capturing = context.stream()?;
        graphs.begin(&capturing, Mode::Global)?;
        let captured = self.steps(&capturing);
        let graph = graphs.end(&capturing);
        captured?;
        let graph = graph?;
        self.ring.params(&self.stream)?;
        for _ in 0..times {
            graph.launch(&self.stream)?;
        }
        Ok(self.stream.synchronize(10 * PATIENCE)?)
    }

    /// Waits for the stream. The status of the kernel's waits.
    ///
    /// # Errors
    /// It is not done in time.
    pub fn finish(&self) -> Result<u64> {
        self.stream.synchronize(PATIENCE)?;
        self.result(1)
    }

    /// The words that were wrong, or the sum.
    ///
    /// # Errors
    /// Those of the copy.
    pub fn wrong(&self) -> Result<u64> {
        self.result(0)
    }

    fn result(&self, index: usize) -> Result<u64> {
        let bytes = self.results.to_vec(PATIENCE)?;
        let word = bytes.chunks_exact(8).nth(index).context("two words")?;
        Ok(u64::from_ne_bytes(word.try_into()?))
    }
}

/// Two rings, on which one process sends and the other one sends back.
pub struct RingPair {
    receives: KernelRing,
    sends: KernelRing,
    stream: Stream,
    begins: bool,
}

impl RingPair {
    /// The side that begins: makes the ring `out`, and opens `back` once the other side has made it.
    ///
    /// # Errors
    /// Those of the rings.
    pub fn begin(context: &Context, out: KernelRing, back: &str) -> Result<RingPair> {
        let receives = KernelRing::open(back, context.domain.on(&context.device), PATIENCE)?;
        out.wait_for_consumers(PATIENCE)?;
        Ok(RingPair {
            receives,
            sends: out,
            stream: context.stream()?,
            begins: true,
        })
    }

    fn answer(context: &Context, out: &str, back: &str) -> Result<RingPair> {
        let receives = KernelRing::open(out, context.domain.on(&context.device), PATIENCE)?;
        let options = KernelRingOptions {
            allow_time_slices: true,
            ..context.domain.on(&context.device)
        };
        let sends = KernelRing::new(back, options)?;
        sends.wait_for_consumers(PATIENCE)?;
        Ok(RingPair {
            receives,
            sends,
            stream: context.stream()?,
            begins: false,
        })
    }

    /// The steps of one trip on this side.
    fn trip(&self, stream: &Stream) -> warpipe::Result<()> {
        let send = || {
            self.sends.wait_on(stream)?;
            self.sends.publish_on(stream)
        };
        let receive = || {
            self.receives.wait_on(stream)?;
            self.receives.release_on(stream)
        };
        match self.begins {
            true => send().and_then(|()| receive()),
            false => receive().and_then(|()| send()),
        }
    }

    /// Makes the trips, and waits for the last. How long that took.
    ///
    /// # Errors
    /// Those of the driver, or of a wait that failed.
    pub fn travel(&self, context: &Context, trips: u64, replays: bool) -> Result<Duration> {
        let graphs = Graphs::of(context)?;
        let capturing = context.stream()?;
        graphs.begin(&capturing, Mode::Global)?;
        let captured = self.trip(&capturing);
        let graph = graphs.end(&capturing);
        captured?;
        let graph = graph?;
        self.receives.params(&self.stream)?;
        self.sends.params(&self.stream)?;
        let start = Instant::now();
        for _ in 0..trips {
            match replays {
                true => graph.launch(&self.stream)?,
                false => self.trip(&self.stream)?,
            }
        }
        self.stream.synchronize(10 * PATIENCE)?;
        let took = start.elapsed();
        self.receives.check()?;
        self.sends.check()?;
        Ok(took)
    }
}

/// The rings of a peer.
#[derive(Default)]
pub(super) struct Rings {
    side: Option<RingSide>,
    pair: Option<RingPair>,
}

pub(super) fn carry_out(rings: &mut Rings, context: &Context, order: RingOrder) -> Result<Answer> {
    let Rings { side, pair } = rings;
    match order {
        RingOrder::Pair(out, back) => {
            *pair = Some(RingPair::answer(context, &out, &back)?);
            return Ok(Answer::Done);
        }
        RingOrder::Echo { trips, replays } => {
            let pair = pair.as_ref().context("it has no pair of rings")?;
            pair.travel(context, trips, replays)?;
            return Ok(Answer::Done);
        }
        RingOrder::Create { name, consumers } => {
            *side = Some(RingSide::create(context, &name, consumers)?);
            return Ok(Answer::Done);
        }
        RingOrder::Open(name) => {
            *side = Some(RingSide::open(context, &name)?);
            return Ok(Answer::Done);
        }
        RingOrder::Close => {
            (*side, *pair) = (None, None);
            return Ok(Answer::Done);
        }
        _ => {}
    }
    let side = side.as_ref().context("it has no ring")?;
    match order {
        RingOrder::Start => side.ring.wait_for_consumers(PATIENCE)?,
        RingOrder::Launch { count, blocks } => side.launch(count, blocks)?,
        RingOrder::Replay(times) => side.replay(context, times)?,
        RingOrder::Finish => return Ok(Answer::Number(side.finish()?)),
        RingOrder::Wrong => return Ok(Answer::Number(side.wrong()?)),
        RingOrder::Check => side.ring.check()?,
        RingOrder::Create { .. }
        | RingOrder::Open(_)
        | RingOrder::Close
        | RingOrder::Pair(..)
        | RingOrder::Echo { .. } => {}
    }
    Ok(Answer::Done)
}
