"""A gateway in asyncio: hundreds of clients of one event loop in front of a queue of jobs and a few workers.

    python asyncio_gateway.py [--clients 100] [--device host] [--domain DIR]

Each client opens a connection of its own to the gateway (TCP on the loopback) and sends a line of numbers. The gateway
submits them as a job and awaits the result, without a thread of its own for any: the loop sleeps in its poller. Workers
are processes; each job is done once. Every client must get the cumulative sums of its own numbers.
"""

import argparse
import asyncio
import multiprocessing
import tempfile
from typing import Any

import numpy as np

import warpipe

WORKERS = 2
LIMIT_SECONDS = 60.0


def framework(device: warpipe.Device) -> Any:
    """The framework that computes on this device: NumPy on the host, PyTorch on a GPU, or CuPy if that is not there."""
    if device.kind == "host":
        return np
    try:
        import torch
    except ImportError:
        import cupy

        return cupy
    return torch


def array_of(memory: warpipe.Sample | warpipe.Loan) -> Any:
    """Memory of warpipe as an array of that framework, where it lies."""
    return getattr(memory, framework(memory.device).__name__)()


def on(device: warpipe.Device, array: Any) -> Any:
    """An array of NumPy's as one of that framework."""
    found = framework(device)
    if found is np:
        return array
    return found.asarray(array, device=f"cuda:{device.ordinal}") if found.__name__ == "torch" else found.asarray(array)


def worker(domain: str, device: str | None) -> None:
    """Writes the cumulative sums of each job's numbers into the result's memory, until the queue closes gracefully."""
    with warpipe.Worker("sums", domain=domain, device=device, wait=LIMIT_SECONDS) as jobs:
        for lease in jobs:
            with lease, lease.output(lease.shape, lease.dtype) as out:
                framework(lease.device).cumsum(array_of(lease), 0, out=array_of(out))


async def answer(queue: warpipe.Queue, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection: its line of numbers goes to the workers, their result goes back."""
    numbers = np.array((await reader.readline()).split(), dtype=np.int64)
    with await queue.submit(on(queue.device, numbers)) as sums:
        writer.write(" ".join(map(str, sums.numpy())).encode() + b"\n")
    await writer.drain()
    writer.close()


async def client(port: int, number: int) -> None:
    """Sends its numbers, and checks what comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    numbers = range(number, number + 10)
    writer.write(" ".join(map(str, numbers)).encode() + b"\n")
    sums = [int(word) for word in (await reader.readline()).split()]
    writer.close()
    assert sums == np.cumsum(numbers).tolist(), f"client {number} got {sums}"


async def gateway(queue: warpipe.Queue, clients: int) -> None:
    """Serves all clients at the same time, in this loop."""
    server = await asyncio.start_server(lambda *ends: answer(queue, *ends), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        everybody = asyncio.gather(*(client(port, number) for number in range(clients)))
        await asyncio.wait_for(everybody, LIMIT_SECONDS)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--device", default=None, help="host, cuda or cuda:N; the first GPU by default, else the host")
    parser.add_argument("--domain", default=None, help="the directory of names; a temporary one by default")
    options = parser.parse_args(arguments)
    device = warpipe.Device(options.device)
    print(f"device: {device} ({device.why})")

    with tempfile.TemporaryDirectory() as folder:
        domain = options.domain or folder
        # CUDA does not survive a fork: processes are spawned.
        spawn = multiprocessing.get_context("spawn")
        workers = [spawn.Process(target=worker, args=(domain, options.device)) for _ in range(WORKERS)]
        with warpipe.Queue("sums", domain=domain, device=options.device) as queue:
            for process in workers:
                process.start()
            queue.wait_for_workers(WORKERS, LIMIT_SECONDS)
            asyncio.run(gateway(queue, options.clients))
            assert queue.state.finished == 0, "every result was taken"
        for process in workers:
            process.join(LIMIT_SECONDS)
    assert [process.exitcode for process in workers] == [0] * WORKERS, "the workers end with the queue"
    print(f"{options.clients} clients served by {WORKERS} workers")


if __name__ == "__main__":
    main()
