//! N ready words by one batch of memory operations, or by one small kernel: where does the kernel
//! begin to pay?
//!
//! The answer is the constant above which the CUDA backend's `batch` takes the kernel.

use std::time::Instant;

use warpipe::Stream;
use warpipe::backend::cuda::{SignalBy, signal_by};
use warpipe_bench::raw::Words;
use warpipe_cli::device_arg::DeviceArg;
use warpipe_testkit::figure::Figure;

use super::setup::{PATIENCE, Setup};

const COUNTS: [usize; 12] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64];

/// Sends enqueued one after another, so that the GPU's time for each shows.
const BURST: usize = 32;

pub fn run(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    let DeviceArg::Cuda(ordinal) = setup.choice else {
        return Ok(Vec::new());
    };
    let words = Words::create(&setup.device, 64)?;
    let mut bench = Bench {
        ordinal,
        stream: setup.device.stream()?,
        words,
        turn: 0,
    };
    let mut figures = Vec::new();
    for count in COUNTS {
        let [mut batch_gpu, mut batch_cpu, mut kernel_gpu, mut kernel_cpu] =
            [const { Vec::new() }; 4];
        for _ in 0..=setup.rounds() {
            bench.burst(count, SignalBy::Batch, &mut batch_gpu, &mut batch_cpu)?;
            bench.burst(count, SignalBy::Kernel, &mut kernel_gpu, &mut kernel_cpu)?;
        }
        let name = |what| format!("{count} ready words by the kernel beside a batch, {what} time");
        figures.push(
            Figure::new("broadcast", name("GPU"), "us", &kernel_gpu[1..]).beside(&batch_gpu[1..]),
        );
        figures.push(
            Figure::new("broadcast", name("CPU"), "us", &kernel_cpu[1..]).beside(&batch_cpu[1..]),
        );
    }
    Ok(figures)
}

struct Bench {
    ordinal: u32,
    stream: Stream,
    words: Words,
    turn: u64,
}

impl Bench {
    /// Adds the microseconds that each send of a burst takes of the GPU, and of the CPU.
    fn burst(
        &mut self,
        count: usize,
        by: SignalBy,
        gpu: &mut Vec<f64>,
        cpu: &mut Vec<f64>,
    ) -> anyhow::Result<()> {
        self.stream.synchronize(PATIENCE)?;
        let start = Instant::now();
        for _ in 0..BURST {
            self.turn += 1;
            let ops: Vec<_> = (0..count)
                .map(|index| self.words.signal(index, self.turn))
                .collect();
            // SAFETY: the stream is live and of this device; the words live until the last has been
            // awaited.
            unsafe { signal_by(self.ordinal, self.stream.raw(), &ops, by) }?;
        }
        cpu.push(start.elapsed().as_secs_f64() * 1e6 / BURST as f64);
        self.words.await_word(count - 1, self.turn)?;
        gpu.push(start.elapsed().as_secs_f64() * 1e6 / BURST as f64);
        (0..count).try_for_each(|index| self.words.await_word(index, self.turn))
    }
}
