//! N ready words by one call of the CUDA backend's `batch`, which takes a small kernel for more
//! than four, or by memory operations alone: where does the kernel begin to pay?

use std::time::Instant;

use warpipe::Stream;
use warpipe_bench::raw::Words;
use warpipe_cli::device_arg::DeviceArg;
use warpipe_testkit::figure::Figure;

use super::setup::{PATIENCE, Setup};

const COUNTS: [usize; 12] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64];

/// The most signals of one call that the backend makes by memory operations.
const MEMORY_OPERATIONS_MAX: usize = 4;

/// Sends enqueued one after another, so that the GPU's time for each shows.
const BURST: usize = 32;

pub fn run(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    if !matches!(setup.choice, DeviceArg::Cuda(_)) {
        return Ok(Vec::new());
    }
    let words = Words::create(&setup.device, 64)?;
    let mut bench = Bench {
        stream: setup.device.stream()?,
        words,
        turn: 0,
    };
    let mut figures = Vec::new();
    for count in COUNTS {
        let [mut batch_gpu, mut batch_cpu, mut kernel_gpu, mut kernel_cpu] =
            [const { Vec::new() }; 4];
        for _ in 0..=setup.rounds() {
            bench.burst(count, MEMORY_OPERATIONS_MAX, &mut batch_gpu, &mut batch_cpu)?;
            bench.burst(count, count, &mut kernel_gpu, &mut kernel_cpu)?;
        }
        let name = |what| {
            format!("{count} ready words by the kernel beside memory operations, {what} time")
        };
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
    stream: Stream,
    words: Words,
    turn: u64,
}

impl Bench {
    /// Adds the microseconds that each send of a burst takes of the GPU, and of the CPU.
    fn burst(
        &mut self,
        count: usize,
        in_a_call: usize,
        gpu: &mut Vec<f64>,
        cpu: &mut Vec<f64>,
    ) -> anyhow::Result<()> {
        self.stream.synchronize(PATIENCE)?;
        let backend = self.stream.device().backend().clone();
        let start = Instant::now();
        for _ in 0..BURST {
            self.turn += 1;
            let ops: Vec<_> = (0..count)
                .map(|index| self.words.signal(index, self.turn))
                .collect();
            for ops in ops.chunks(in_a_call) {
                // SAFETY: the stream is live and of this device; the words live until the last has
                // been awaited.
                unsafe { backend.batch(self.stream.raw(), ops) }?;
            }
        }
        cpu.push(start.elapsed().as_secs_f64() * 1e6 / BURST as f64);
        self.words.await_word(count - 1, self.turn)?;
        gpu.push(start.elapsed().as_secs_f64() * 1e6 / BURST as f64);
        (0..count).try_for_each(|index| self.words.await_word(index, self.turn))
    }
}
