"""A process of ``warpipe.bench.torch_queue``: round trips through a queue of ``torch.multiprocessing``, and receivers that
are killed. It says JSON lines. Its children are forked by a server that has imported PyTorch, and no more: an import takes
each child seconds. So everything here can be imported."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import multiprocessing.forkserver
import os
import pathlib
import sys
import threading
import time
import traceback
from typing import Any

import warpipe

# Seconds for one message.
PATIENCE = 120.0
# Seconds after which whatever killed receivers had is counted as lost.
SETTLED = 10.0
# Tensors that each receiver has when it is killed, and their bytes.
HELD = 3
HELD_BYTES = 4 << 20
WARM_UP = 10


class Memory:
    """Where this process's tensors lie."""

    def __init__(self, device: str, way: str, allocator: str) -> None:
        import torch

        self.torch, self.device, self.way = torch, device, way
        self.pool = warpipe.torch.pool() if allocator == "pool" else None

    def zeros(self, nbytes: int) -> Any:
        if self.device != "host":
            pooled = self.torch.cuda.use_mem_pool(self.pool) if self.pool else contextlib.nullcontext()
            with pooled:
                return self.torch.zeros(nbytes, dtype=self.torch.uint8, device=self.device)
        if self.way == "plain":
            return self.torch.zeros(nbytes, dtype=self.torch.uint8)
        # The host has no allocator of a GPU: memory that is declared to be one's.
        plain = warpipe._warpipe._allocate_plain(nbytes, warpipe.Device("host"))
        return warpipe.torch._carry_as_device(plain).zero_()

    def state(self) -> dict[str, int]:
        """What this process and the device have in use."""
        found = {"files": open_files()}
        if self.way == "warpipe":
            found |= {f"shared {name}": count for name, count in warpipe.torch.stats()._asdict().items()}
        if self.device != "host":
            cuda = self.torch.cuda
            cuda.synchronize()
            free, total = cuda.mem_get_info(self.device)
            found |= {"allocated": cuda.memory_allocated(), "reserved": cuda.memory_reserved(), "used": total - free}
        return found


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def end_with_parent() -> None:
    """Ends this process with its parent: if that is killed, it would wait for a message for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def echo(inbox: Any, outbox: Any, *where: str) -> None:
    """Answers each tensor with one of its own that begins with the same byte."""
    end_with_parent()
    memory, mine = Memory(*where), {}
    while (item := inbox.get()) is not None:
        nbytes = item.numel()
        if nbytes not in mine:
            mine[nbytes] = memory.zeros(nbytes)
        mine[nbytes][:1].copy_(item[:1])
        del item
        outbox.put(mine[nbytes])


def hold(inbox: Any, ready: Any) -> None:
    """Keeps all that it receives, until it is killed."""
    end_with_parent()
    held = []
    while True:
        held.append(inbox.get())
        ready.put(len(held))


def await_turn() -> None:
    """Waits until this process is to go on, or ends with the benchmark."""
    if not sys.stdin.readline():
        sys.exit(1)


def trips(context: Any, memory: Memory, answers: tuple[str, ...], sizes: list[int], rounds: int, turns: int) -> None:
    there, back = context.Queue(), context.Queue()
    child = context.Process(target=echo, args=(there, back, *answers), daemon=True)
    child.start()

    def trip(tensor: Any, wanted: int) -> int:
        tensor[:1].fill_(wanted)
        start = time.monotonic_ns()
        there.put(tensor)
        answer = back.get(timeout=PATIENCE)
        value = int(answer[0])
        took = time.monotonic_ns() - start
        if value != wanted:
            raise ValueError(f"trip {wanted} of {tensor.numel()} bytes came back as {value}")
        return took

    for nbytes in sizes:
        tensor = memory.zeros(nbytes)
        for turn in range(WARM_UP):
            trip(tensor, turn)
        for _ in range(rounds):
            say("trips", bytes=nbytes, took=[trip(tensor, turn % 251) for turn in range(turns)])
            say("step")
            await_turn()
    there.put(None)
    child.join(PATIENCE)
    if child.exitcode != 0:
        raise RuntimeError(f"the process that answers ended with {child.exitcode}")


def kills(context: Any, memory: Memory, count: int, at_once: int) -> None:
    """Kills receivers that hold tensors of this process."""
    files = open_files()
    for begin in range(0, count, at_once):
        queues = [(context.Queue(), context.Queue()) for _ in range(min(at_once, count - begin))]
        children = [context.Process(target=hold, args=pair, daemon=True) for pair in queues]
        for child in children:
            child.start()
        for inbox, _ in queues:
            for _ in range(HELD):
                inbox.put(memory.zeros(HELD_BYTES))
        for _, ready in queues:
            for _ in range(HELD):
                ready.get(timeout=PATIENCE)
        for child in children:
            child.kill()
        for child in children:
            child.join()
        for queue in (queue for pair in queues for queue in pair):
            queue.close()
            queue.join_thread()
        del queues, children
        # The shares of dead receivers end one after the other, and their descriptors a moment later.
        end = time.monotonic() + SETTLED
        while (warpipe.torch.stats().nbytes or open_files() > files) and time.monotonic() < end:
            threading.Event().wait(0.02)
        if begin == 0:
            files = open_files()
        say("kills", killed=min(begin + at_once, count), state=memory.state())


def say(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=["plain", "warpipe"])
    parser.add_argument("allocator")
    parser.add_argument("--device", required=True)
    parser.add_argument("--answers", help="the device of the answers (--device)")
    parser.add_argument("--domain", type=pathlib.Path, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=1)
    asked = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "warpipe.torch"])
    multiprocessing.forkserver.ensure_running()
    import torch

    say("ready")
    await_turn()
    if asked.way == "warpipe":
        warpipe.torch.install(domain=asked.domain, copy=False)
    memory = Memory(asked.device, asked.way, asked.allocator)
    try:
        trips(context, memory, (asked.answers or asked.device, asked.way, asked.allocator), asked.sizes, asked.rounds, asked.turns)
        if asked.kills:
            kills(context, memory, asked.kills, asked.at_once)
    except Exception as error:
        traceback.print_exc()
        say("failed", reason=f"{type(error).__name__}: {error}")
        # A queue's thread may wait for a reader that has failed.
        sys.stdout.flush()
        os._exit(1)
    say("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
