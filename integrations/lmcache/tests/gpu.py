"""LMCache's daemon on a GPU with KV memory of a warpipe pool: prints what was seen, a line of JSON for each part.

``python gpu.py [--layers 16] [--blocks 1024] [--turns 5]`` needs lmcache, cupy, warpipe and warpipe-lmcache. With
``--standin`` it runs over the fake driver, which has to be ``libcuda.so.1``.
"""

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from processes import DAEMON, MODULES, STATUS, Daemon, Worker, free_port, select_nothing, until

CHUNK, BLOCKS = 256, list(range(1, 129))
TOKENS = list(range(8 * CHUNK))
OTHERS = list(range(256, 256 + len(BLOCKS)))
# Bytes that a driver takes now and then for itself, far from a worker's KV memory.
SLACK = 64 << 20


def say(part, **found):
    print(json.dumps({"part": part, **found}), flush=True)


def took(call, *arguments):
    began = time.perf_counter()
    result = call(*arguments)
    return result, round(1000 * (time.perf_counter() - began), 2)


class Gpu:
    """How much memory the processes of a run have on the GPU, and the options that they are started with."""

    def __init__(self, backend):
        import torch

        self.name, self.memory = torch.cuda.get_device_name(), torch.cuda.mem_get_info
        self.modules = [DAEMON, STATUS] if backend == "warpipe" else [STATUS]
        self.daemon_options, self.worker_options = {"backend": backend}, {"backend": backend, "module": "gpu_memory"}

    def free(self, _daemon):
        return self.memory()[0]


class Standin:
    name, modules, daemon_options, worker_options = "fake driver", MODULES, {}, {}

    def free(self, daemon):
        # All of it counts.
        return -daemon.mappings()[0] + SLACK


class Run:
    def __init__(self, arguments, machine, folder, stack):
        self.arguments, self.machine, self.folder, self.stack = arguments, machine, folder, stack
        self.port = free_port()

    def daemon(self):
        started = Daemon(self.folder, self.port, modules=self.machine.modules, **self.machine.daemon_options)
        return self.stack.enter_context(started).wait()

    def worker(self, name, **more):
        return self.stack.enter_context(Worker(self.folder, self.port, name, **self.machine.worker_options, **more))

    def register(self, worker):
        return took(worker.ask, "register", self.arguments.layers, self.arguments.blocks)

    def transfers(self, worker, part):
        nbytes, registered = self.register(worker)
        worker.ask("fill", BLOCKS, 3)
        turns = [(f"s{turn}", [turn] * len(TOKENS)) for turn in range(self.arguments.turns)]
        stores = [took(worker.ask, "store", request, tokens, BLOCKS) for request, tokens in turns]
        until(lambda: worker.ask("lookup", "l", turns[-1][1]) == len(TOKENS) // CHUNK, "the chunks are stored")
        loads = [took(worker.ask, "retrieve", f"r{request}", tokens, OTHERS) for request, tokens in turns]
        values = worker.ask("values", OTHERS)
        assert values == [3 + layer for layer in range(self.arguments.layers)], values
        assert all(done for done, _ in stores + loads)
        say(
            part, kv_mib=nbytes >> 20, register_ms=registered, moved_mib=len(BLOCKS) * nbytes // self.arguments.blocks >> 20,
            store_ms=statistics.median(ms for _, ms in stores), load_ms=statistics.median(ms for _, ms in loads), right=True,
        )  # fmt: skip

    def deaths(self, daemon, watcher):
        """From ``SIGKILL``: until the process has ended, which is the least; until its memory is the GPU's again; until LMCache
        has forgotten it."""
        ended, known, memory = [], [], []
        for turn in range(self.arguments.turns):
            rest = self.machine.free(daemon)
            worker = self.worker(f"dying{turn}")
            self.register(worker)
            worker.ask("store", f"d{turn}", [1000 + turn] * len(TOKENS), BLOCKS)
            killed = time.perf_counter()
            worker.kill()
            ended.append(round(1000 * (time.perf_counter() - killed), 2))
            until(lambda: self.machine.free(daemon) >= rest - SLACK, "the memory is back")
            memory.append(round(1000 * (time.perf_counter() - killed), 2))
            until(lambda: worker.instance not in watcher.ask("status")["registered_gpu_ids"], "LMCache has forgotten it")
            known.append(round(1000 * (time.perf_counter() - killed), 2))
        say("kill -9 of a worker", ended_ms=ended, memory_back_ms=memory, forgotten_ms=known, lmcaches_own_s=[120, 3600])

    def restart(self, daemon, worker):
        for _ in range(2):
            began = time.perf_counter()
            daemon.kill()
            daemon = self.daemon()
            listening = round(time.perf_counter() - began, 2)
            ids = worker.ask("status")["registered_gpu_ids"]
            assert worker.instance in ids, ids
            until(lambda: worker.ask("store", f"again{began}", TOKENS, BLOCKS), "the worker has its daemon again")
            stored = round(time.perf_counter() - began, 2)
            assert worker.ask("retrieve", f"load{began}", TOKENS, OTHERS)
            say("kill -9 of the daemon", listening_s=listening, registered_when_it_listens=True, first_store_s=stored)
        return daemon

    def own(self):
        """LMCache as it is: what a killed worker's memory does within 10 s."""
        daemon, watcher = self.daemon(), self.worker("watcher")
        worker = self.worker("dying")
        rest = self.machine.free(daemon)
        nbytes, _ = self.register(worker)
        worker.ask("fill", BLOCKS, 3)
        worker.ask("store", "own", TOKENS, BLOCKS)
        worker.kill()
        select_nothing(10)
        # Of the worker alone: its context has gone with it.
        held = rest - self.machine.free(daemon)
        registered = worker.instance in watcher.ask("status")["registered_gpu_ids"]
        say("LMCache as it is, 10 s after kill -9 of a worker", registered=registered, held_mib=held >> 20, kv_mib=nbytes >> 20)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--standin", action="store_true")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="lmc"))
    try:
        with contextlib.ExitStack() as stack:
            run = Run(arguments, Standin() if arguments.standin else Gpu("warpipe"), folder, stack)
            say("machine", name=run.machine.name)
            daemon, first = run.daemon(), run.worker("first")
            run.transfers(first, "one worker")
            # CUDA looks itself up in /proc.
            prefix = ["unshare", "--pid", "--fork", "--mount-proc"]
            if subprocess.run([*prefix, "true"], capture_output=True).returncode == 0:
                run.transfers(run.worker("namespace", prefix=prefix), "a worker in another PID namespace")
            run.deaths(daemon, first)
            run.restart(daemon, first)
        if not arguments.standin:
            with contextlib.ExitStack() as stack:
                Run(arguments, Gpu("cuda"), folder, stack).own()
    except BaseException:
        for log in sorted(folder.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text()[-3000:]}")
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
