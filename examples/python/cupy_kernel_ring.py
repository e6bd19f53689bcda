"""Two processes, a kernel each: CuPy's RawModule compiles both against the ring's header, and one launch hands over all items.

    python cupy_kernel_ring.py [--items 100000] [--blocks 4] [--time-slices] [--device cuda:0] [--domain DIR]

Both kernels run at the same time, and hand items over with no CPU in between. So each needs a GPU, or both one under MPS
(`warpipe run --mps`). Without MPS, one GPU runs two processes in turns, and a kernel that waits uses up its slice of time:
opening the ring is refused, unless `--time-slices` allows it. Every full ring then costs a turn; take few items (2000).
"""

import argparse
import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import warpipe

DEPTH, WORDS, THREADS = 64, 256, 128
LIMIT_SECONDS = 120.0
RING = "items"

SOURCE = r"""
#include "warpipe/device.cuh"

typedef unsigned long long u64;

static __device__ u64 word_of(u64 item, u64 index) { return (item + 1) * 0x9e3779b97f4a7c15ull + index; }

// All blocks together write `items` items. Each item is one block's.
extern "C" __global__ void produce(u64 params, u64 items, u64 *status)
{
    const warpipe_ring ring = warpipe_ring_open(params);
    for (u64 turn = blockIdx.x; turn < items; turn += gridDim.x) {
        const u64 item = warpipe_ring_block_claim(&ring);
        const u64 end = warpipe_ring_block_wait(&ring, item);
        if (end != WARPIPE_RING_OK) {
            if (threadIdx.x == 0) atomicMax(status, end);
            return;
        }
        u64 *slot = (u64 *)warpipe_ring_slot(&ring, item);
        for (u64 index = threadIdx.x; index < %(words)d; index += blockDim.x) slot[index] = word_of(item, index);
        warpipe_ring_block_pass(&ring, item); // publishes it
    }
}

// Reads them: counts the words that are wrong, and how often each item came.
extern "C" __global__ void consume(u64 params, u64 items, u64 *status, u64 *wrong, u64 *times)
{
    const warpipe_ring ring = warpipe_ring_open(params);
    for (u64 turn = blockIdx.x; turn < items; turn += gridDim.x) {
        const u64 item = warpipe_ring_block_claim(&ring);
        const u64 end = warpipe_ring_block_wait(&ring, item);
        if (end != WARPIPE_RING_OK) {
            if (threadIdx.x == 0) atomicMax(status, end);
            return;
        }
        const u64 *slot = (const u64 *)warpipe_ring_slot(&ring, item);
        u64 found = 0;
        for (u64 index = threadIdx.x; index < %(words)d; index += blockDim.x) found += slot[index] != word_of(item, index);
        if (found != 0) atomicAdd(wrong, found);
        if (threadIdx.x == 0 && item < items) atomicAdd(&times[item], 1);
        warpipe_ring_block_pass(&ring, item); // releases it
    }
}
""" % {"words": WORDS}


class Side:
    """A kernel of one side, loaded before it or any other kernel of this process waits for the peer."""

    def __init__(self, ring: warpipe.KernelRing, name: str) -> None:
        import cupy

        cupy.cuda.Device(ring.device.ordinal).use()
        self.cupy, self.ring = cupy, ring
        self.stream = cupy.cuda.Stream(non_blocking=True)
        module = cupy.RawModule(code=SOURCE, options=("-I" + warpipe.include_dir(),))
        self.kernel = module.get_function(name)

    def zeros(self, count: int) -> Any:
        with self.stream:
            return self.cupy.zeros(count, dtype=self.cupy.uint64)

    def run(self, items: int, blocks: int, *more: Any) -> int:
        """Launches the kernel, and waits for its end; the status of its waits."""
        number, status = self.cupy.uint64, self.zeros(1)
        # The address of the ring's parameters, for kernels on this stream.
        params = self.ring.params(stream=self.stream)
        with self.stream:
            self.kernel((blocks,), (THREADS,), (number(params), number(items), status, *more))
        self.stream.synchronize()
        return int(self.values(status)[0])

    def values(self, array: Any) -> Any:
        """A copy for the CPU, behind the work on the stream."""
        with self.stream:
            return array.get()


def produce(pipe: Connection, domain: str, name: str | None, items: int, blocks: int, time_slices: bool) -> None:
    device = warpipe.Device(name)
    options: dict[str, Any] = {"depth": DEPTH, "slot_bytes": 8 * WORDS, "allow_time_slices": time_slices}
    with warpipe.KernelRing.create(RING, device=device, domain=domain, **options) as ring:
        side = Side(ring, "produce")
        ring.wait_for_consumers(LIMIT_SECONDS)
        pipe.send(("done", side.run(items, blocks)))


def consume(pipe: Connection, domain: str, name: str | None, items: int, blocks: int, time_slices: bool) -> None:
    device = warpipe.Device(name)
    with warpipe.KernelRing.open(RING, device=device, domain=domain, wait=LIMIT_SECONDS) as ring:
        side = Side(ring, "consume")
        wrong, times = side.zeros(1), side.zeros(items)
        status = side.run(items, blocks, wrong, times)
        pipe.send(("done", status, int(side.values(wrong)[0]), int((side.values(times) == 1).sum())))


def run_side(side: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    """Says an error of the library to the main process."""
    try:
        side(pipe, *arguments)
    except warpipe.Error as error:
        pipe.send(("error", type(error).__name__, str(error)))


def ended(pipe: Connection) -> Any:
    """A side's last words."""
    if not pipe.poll(LIMIT_SECONDS):
        raise SystemExit("a side is silent")
    try:
        word, *found = pipe.recv()
    except EOFError:
        raise SystemExit("a side has ended without a word; its messages are above") from None
    if word != "done":
        raise SystemExit(": ".join(found))
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--time-slices", action="store_true", help="use one GPU without MPS")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--domain", default=None, help="the directory of names; a temporary one by default")
    options = parser.parse_args(arguments)
    if warpipe.Device(options.device).kind != "cuda":
        raise SystemExit("this example needs a GPU: its kernels are CUDA's")
    # CUDA does not survive a fork: processes are spawned.
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        given = (options.domain or folder, options.device, options.items, options.blocks, options.time_slices)
        processes, pipes = [], []
        for side in (consume, produce):
            ours, theirs = spawn.Pipe()
            processes.append(spawn.Process(target=run_side, args=(side, theirs, *given), daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        status, wrong, once = ended(pipes[0])
        (sent,) = ended(pipes[1])
        for process in processes:
            process.join(LIMIT_SECONDS)
            assert process.exitcode == 0, "both sides end well"
    assert (status, sent) == (0, 0), f"the waits ended with the statuses {status} and {sent} of device.cuh"
    assert wrong == 0, f"{wrong} words are wrong"
    assert once == options.items, f"{once} of {options.items} items came once"
    print(f"consumer: {once} items by {options.blocks} blocks, each right and once")


if __name__ == "__main__":
    main()
