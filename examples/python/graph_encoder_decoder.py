"""An encoder and a decoder in a process each, both a CUDA graph that PyTorch replays; a kernel ring joins the two.

    python graph_encoder_decoder.py [--replays 10000] [--time-slices] [--kill encoder] [--device host] [--domain DIR]

Each side captures its work between the ring's steps, once, and replays it. A replay waits on the GPU for the next items and
passes them on; between two replays the processes exchange nothing. The decoder checks every item: the right one, and once.
Both processes need a GPU each, or one under MPS (`warpipe run --mps`). Without MPS one GPU serves them in time slices, in
which a waiting kernel uses up its slice: opening the ring is refused then, unless `--time-slices` allows it. `--kill` kills
one side in the middle; the other one ends with an error that says so. With `--device host` the CPU does the same steps.
"""

import argparse
import ctypes
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import warpipe

# A graph holds addresses: it has the steps of an item for each slot.
DEPTH, WORDS = 8, 512
SCALE = 3
LIMIT_SECONDS = 120.0
# The most that one may take, where the two take turns on a GPU that others use, too.
REPLAY_SECONDS = 0.05
# Replays between two looks at the end of the peer.
CHUNK = 100
RING = "codes"


class Slot:
    """A slot as an array that PyTorch, CuPy and Numba take where it lies."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {"shape": (WORDS,), "typestr": "<i8", "data": (address, False), "version": 3}


class Encoder:
    """Item ``n``, counted from 1, is ``SCALE * n`` plus a ramp."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.number = make(np.zeros(1, dtype=np.int64))
        self.ramp = make(np.arange(WORDS, dtype=np.int64))

    def work(self, slot: Any) -> None:
        self.number += 1
        slot[...] = self.ramp + SCALE * self.number


class Decoder:
    """Counts the items, and the words of them that are not those of the next item."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.number = make(np.zeros(1, dtype=np.int64))
        self.wrong = make(np.zeros(1, dtype=np.int64))
        self.ramp = make(np.arange(WORDS, dtype=np.int64))

    def work(self, slot: Any) -> None:
        self.number += 1
        self.wrong += (slot - self.ramp != SCALE * self.number).sum()


class ReplayedGraph:
    """The steps of an item for each slot as a CUDA graph."""

    def __init__(self, ring: warpipe.KernelRing, side: type[Encoder] | type[Decoder]) -> None:
        import torch

        torch.cuda.set_device(ring.device.ordinal)
        self.ring, self.torch = ring, torch
        self.stream, self.graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        slots = [torch.as_tensor(Slot(ring.slot(index)), device="cuda") for index in range(DEPTH)]
        # Before the capture: kernels are loaded at their first launch, which a capture does not allow. And before any
        # kernel of this process waits for the peer: loading may wait for all kernels that run.
        with torch.cuda.stream(self.stream):
            self.side = side(lambda array: torch.from_numpy(array).to("cuda"))
            scratch = torch.zeros(WORDS, dtype=torch.int64, device="cuda")
            for _ in range(3):
                self.side.work(scratch)
            for state in (self.side.number, getattr(self.side, "wrong", self.side.number)):
                state.zero_()
        self.stream.synchronize()
        pass_on = ring.publish_on if ring.is_producer else ring.release_on
        # On the stream of the capture, which is PyTorch's current one inside. What the work allocates comes from the
        # graph's own pool, and stays where it is at each replay.
        with torch.cuda.graph(self.graph, stream=self.stream):
            for slot in slots:
                ring.wait_on(stream=torch.cuda.current_stream())
                self.side.work(slot)
                pass_on(stream=torch.cuda.current_stream())
        # The ring's memory outlives the graph's work on this stream.
        ring.params(stream=self.stream)

    def replay(self, times: int) -> None:
        """Replays, waits for the end, and raises if the peer has ended in between."""
        with self.torch.cuda.stream(self.stream):
            for _ in range(times):
                self.graph.replay()
        self.stream.synchronize()
        self.ring.check()


class HostSteps:
    """The same steps one after the other; the CPU works on the slots."""

    def __init__(self, ring: warpipe.KernelRing, side: type[Encoder] | type[Decoder]) -> None:
        self.ring, self.stream, self.side = ring, warpipe.Stream(ring.device), side(lambda array: array)
        words = ctypes.c_int64 * WORDS
        self.slots = [np.ctypeslib.as_array(words.from_address(ring.slot(index))) for index in range(DEPTH)]

    def replay(self, times: int) -> None:
        """As a graph's."""
        pass_on = self.ring.publish_on if self.ring.is_producer else self.ring.release_on
        for _ in range(times):
            for slot in self.slots:
                self.ring.wait_on(stream=self.stream)
                self.stream.synchronize(LIMIT_SECONDS)
                self.ring.check()
                self.side.work(slot)
                pass_on(stream=self.stream)
        self.stream.synchronize(LIMIT_SECONDS)
        self.ring.check()


def opened(name: str | None) -> warpipe.Device:
    """The device. PyTorch is loaded first, which takes seconds: no kernel of the peer waits for the ring yet."""
    device = warpipe.Device(name)
    if device.kind == "cuda":
        import torch

        torch.cuda.init()
    return device


def steps_of(ring: warpipe.KernelRing, side: type[Encoder] | type[Decoder]) -> ReplayedGraph | HostSteps:
    return ReplayedGraph(ring, side) if ring.device.kind == "cuda" else HostSteps(ring, side)


def replay_all(steps: ReplayedGraph | HostSteps, replays: int, pipe: Connection) -> None:
    """Replays in chunks: an ended peer is seen after each."""
    done = 0
    while done < replays:
        steps.replay(min(CHUNK, replays - done))
        if done == 0:
            pipe.send("replays")
        done += CHUNK


def encode(pipe: Connection, domain: str, name: str | None, replays: int, time_slices: bool) -> None:
    """The producer of the ring."""
    device = opened(name)
    options: dict[str, Any] = {"depth": DEPTH, "slot_bytes": 8 * WORDS, "allow_time_slices": time_slices}
    with warpipe.KernelRing.create(RING, device=device, domain=domain, **options) as ring:
        # The steps hold the consumer's addresses: they exist once it has come.
        ring.wait_for_consumers(LIMIT_SECONDS)
        steps = steps_of(ring, Encoder)
        replay_all(steps, replays, pipe)
        pipe.send(("ended", steps.side.number.item()))


def decode(pipe: Connection, domain: str, name: str | None, replays: int, time_slices: bool) -> None:
    """The consumer of the ring."""
    device = opened(name)
    with warpipe.KernelRing.open(RING, device=device, domain=domain, wait=LIMIT_SECONDS) as ring:
        steps = steps_of(ring, Decoder)
        replay_all(steps, replays, pipe)
        assert isinstance(steps.side, Decoder)
        found = steps.side.number.item(), steps.side.wrong.item()
        try:
            steps.replay(1)
        except warpipe.PeerGoneError as end:
            # Behind the last item comes the encoder's close.
            pipe.send(("ended", *found, end.graceful))


def run_side(side: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    """Says an error of the library to the main process, whatever it is."""
    try:
        side(pipe, *arguments)
    except warpipe.Error as error:
        pipe.send(("error", type(error).__name__, str(error)))


def heard(pipe: Connection, limit: float = LIMIT_SECONDS) -> Any:
    if not pipe.poll(limit):
        raise SystemExit("a side is silent")
    try:
        return pipe.recv()
    except EOFError:
        raise SystemExit("a side has ended without a word; its messages are above") from None


def ended(pipe: Connection, replays: int) -> Any:
    """A side's last words."""
    word, *found = heard(pipe, LIMIT_SECONDS + replays * REPLAY_SECONDS)
    if word != "ended":
        raise SystemExit(": ".join(found))
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replays", type=int, default=10_000)
    parser.add_argument("--time-slices", action="store_true", help="use one GPU without MPS")
    parser.add_argument("--kill", choices=["encoder", "decoder"], help="kill this side in the middle")
    parser.add_argument("--device", default=None, help="host, cuda or cuda:N; the first GPU by default, else the host")
    parser.add_argument("--domain", default=None, help="the directory of names; a temporary one by default")
    options = parser.parse_args(arguments)
    print(f"device: {warpipe.Device(options.device)} ({warpipe.Device(options.device).why})")
    # A killed side never comes to an end of its own.
    replays = options.replays if options.kill is None else 1 << 40
    # CUDA does not survive a fork: processes are spawned.
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        given = (options.domain or folder, options.device, replays, options.time_slices)
        processes, pipes = {}, {}
        for name, side in (("encoder", encode), ("decoder", decode)):
            pipes[name], theirs = spawn.Pipe()
            processes[name] = spawn.Process(target=run_side, args=(side, theirs, *given), daemon=True)
            processes[name].start()
            theirs.close()
        begun = [heard(pipes[name]) for name in ("decoder", "encoder")]
        for said in begun:
            if said != "replays":
                raise SystemExit(f"{said[1]}: {said[2]}")
        if options.kill is not None:
            survivor = "decoder" if options.kill == "encoder" else "encoder"
            os.kill(processes[options.kill].pid or 0, signal.SIGKILL)
            said = heard(pipes[survivor])
            assert said[0] == "error", f"the {survivor} ends with an error: {said}"
            print(f"{survivor}: {said[1]}: {said[2]}")
        else:
            start = time.monotonic()
            (encoded,) = ended(pipes["encoder"], replays)
            decoded, wrong, graceful = ended(pipes["decoder"], replays)
            took = time.monotonic() - start
            assert (encoded, decoded) == (replays * DEPTH, replays * DEPTH), "each item comes once"
            assert wrong == 0, f"{wrong} words are wrong"
            assert graceful, "the encoder closes"
            print(f"decoder: {replays} replays, {decoded} items, each right and once; the last ones took {took:.1f} s")
        for name in set(processes) - {options.kill}:
            processes[name].join(LIMIT_SECONDS)
            assert processes[name].exitcode == 0, f"the {name} ends well"


if __name__ == "__main__":
    main()
