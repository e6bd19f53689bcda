"""Two processes, a kernel of Numba each, written in Python: they call the ring's functions, which Numba links in.

    python numba_kernel_ring.py [--items 100000] [--time-slices] [--device cuda:0] [--domain DIR]

Numba's compiler cannot read the ring's header. It calls functions of CUDA C++ instead that follow its own convention: the
result goes to the place of the first argument. The wrappers here do so, for one thread of a block; the barriers are the
kernel's own. `--time-slices` allows one GPU without MPS, see `cupy_kernel_ring.py`; take few items (2000) there.
"""

import argparse
import multiprocessing
import pathlib
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import warpipe

DEPTH, WORDS, THREADS = 64, 256, 128
LIMIT_SECONDS = 120.0
RING = "items"

WRAPPERS = r"""
extern "C" __device__ int ring_claim(long long *item, long long params)
{
    const warpipe_ring ring = warpipe_ring_open(params);
    *item = warpipe_ring_claim(&ring);
    return 0;
}

extern "C" __device__ int ring_wait(long long *status, long long params, long long item)
{
    const warpipe_ring ring = warpipe_ring_open(params);
    *status = warpipe_ring_wait(&ring, item);
    return 0;
}

extern "C" __device__ int ring_pass(long long *status, long long params, long long item)
{
    const warpipe_ring ring = warpipe_ring_open(params);
    warpipe_ring_pass(&ring, item);
    *status = WARPIPE_RING_OK;
    return 0;
}
"""


class Slots:
    """All slots as an array of a row each, where they lie."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (DEPTH, WORDS), "typestr": "<i8", "data": (address, False), "strides": None, "version": 3
        }


def kernels(folder: pathlib.Path) -> tuple[Any, Any]:
    """The producer's kernel, and the consumer's."""
    from numba import cuda, int64

    # One source: Numba compiles a file that ends in .cu, and takes no folder for headers.
    source = folder / "ring.cu"
    source.write_text((pathlib.Path(warpipe.include_dir()) / "warpipe/device.cuh").read_text() + WRAPPERS)
    claim = cuda.declare_device("ring_claim", "int64(int64)")
    wait = cuda.declare_device("ring_wait", "int64(int64, int64)")
    pass_on = cuda.declare_device("ring_pass", "int64(int64, int64)")

    @cuda.jit(link=[str(source)])  # type: ignore[untyped-decorator, unused-ignore]
    def produce(params: int, items: int, slots: Any, found: Any) -> None:
        shared = cuda.shared.array(2, int64)
        thread = cuda.threadIdx.x
        for _ in range(items):
            if thread == 0:
                shared[0] = claim(params)
                shared[1] = wait(params, shared[0])
            cuda.syncthreads()
            item = shared[0]
            if shared[1] != 0:
                if thread == 0:
                    found[0] = shared[1]
                return
            for index in range(thread, WORDS, THREADS):
                slots[item % DEPTH, index] = item * WORDS + index
            cuda.syncthreads()
            if thread == 0:
                pass_on(params, item)

    @cuda.jit(link=[str(source)])  # type: ignore[untyped-decorator, unused-ignore]
    def consume(params: int, items: int, slots: Any, found: Any) -> None:
        shared = cuda.shared.array(2, int64)
        thread = cuda.threadIdx.x
        for number in range(items):
            if thread == 0:
                shared[0] = claim(params)
                shared[1] = wait(params, shared[0])
            cuda.syncthreads()
            item = shared[0]
            if shared[1] != 0:
                if thread == 0:
                    found[0] = shared[1]
                return
            wrong = 0
            for index in range(thread, WORDS, THREADS):
                if slots[item % DEPTH, index] != number * WORDS + index:
                    wrong += 1
            if wrong != 0:
                cuda.atomic.add(found, 1, wrong)
            cuda.syncthreads()
            if thread == 0:
                found[2] += 1
                pass_on(params, item)

    return produce, consume


def run(ring: warpipe.KernelRing, items: int) -> list[int]:
    """Runs this side's kernel, of one block: the status of its waits, the words that were wrong, the items."""
    import numpy as np
    from numba import cuda

    with tempfile.TemporaryDirectory() as folder:
        produce, consume = kernels(pathlib.Path(folder))
        kernel = produce if ring.is_producer else consume
        stream = cuda.stream()
        found = cuda.to_device(np.zeros(3, dtype=np.int64), stream=stream)
        slots = cuda.as_cuda_array(Slots(ring.slot(0)), sync=False)
        # The address of the ring's parameters, for kernels on this stream.
        params = ring.params(stream=stream)
        kernel[1, THREADS, stream](np.int64(params), np.int64(items), slots, found)
        stream.synchronize()
        return [int(word) for word in found.copy_to_host()]


def side(pipe: Connection, is_producer: bool, domain: str, name: str | None, items: int, time_slices: bool) -> None:
    from numba import cuda

    device = warpipe.Device(name)
    cuda.select_device(device.ordinal)
    if is_producer:
        options: dict[str, Any] = {"depth": DEPTH, "slot_bytes": 8 * WORDS, "allow_time_slices": time_slices}
        ring = warpipe.KernelRing.create(RING, device=device, domain=domain, **options)
    else:
        ring = warpipe.KernelRing.open(RING, device=device, domain=domain, wait=LIMIT_SECONDS)
    with ring:
        ring.wait_for_consumers(LIMIT_SECONDS)
        pipe.send(("done", *run(ring, items)))


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
    parser.add_argument("--time-slices", action="store_true", help="use one GPU without MPS")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--domain", default=None, help="the directory of names; a temporary one by default")
    options = parser.parse_args(arguments)
    if warpipe.Device(options.device).kind != "cuda":
        raise SystemExit("this example needs a GPU: its kernels are CUDA's")
    # CUDA does not survive a fork: processes are spawned.
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        given = (options.domain or folder, options.device, options.items, options.time_slices)
        processes, pipes = [], []
        for is_producer in (False, True):
            ours, theirs = spawn.Pipe()
            processes.append(spawn.Process(target=run_side, args=(side, theirs, is_producer, *given), daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        status, wrong, items = ended(pipes[0])
        sent = ended(pipes[1])[0]
        for process in processes:
            process.join(LIMIT_SECONDS)
            assert process.exitcode == 0, "both sides end well"
    assert (status, sent) == (0, 0), f"the waits ended with the statuses {status} and {sent} of device.cuh"
    assert (wrong, items) == (0, options.items), f"{items} items came, with {wrong} wrong words"
    print(f"consumer: {items} items of a kernel in Python, each right and in its order")


if __name__ == "__main__":
    main()
