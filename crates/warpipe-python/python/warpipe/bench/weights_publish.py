"""The command ``python -m warpipe.bench.weights_publish``: new weights from a trainer to two engines, from the call of
``publish`` until both have them, beside PyTorch's own way and a bare copy of the same bytes. Engines on another GPU copy
them into tensors of their own, over NVLink. Needs PyTorch.

A round begins once the memory of the former one is back: the driver clears gigabytes for milliseconds, which is no part of
a publication."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import warpipe
from warpipe import _warpipe, weights

from .__main__ import heading, sharing

NAME = "bench/step"
ENGINES = 2
# Seconds for anything that a process is asked for.
PATIENCE = 120.0


def engine(pipe: Any, domain: str, device: str, copies: bool) -> None:
    """Has each version as soon as it is offered, and says when: until it is told to end. A word of the first and of the
    last tensor shows that they are the right ones."""
    import torch

    for_torch = torch.device("cpu" if device == "host" else device)
    torch.zeros(1, device=for_torch)
    own: dict[str, Any] = {}
    last = 0
    pipe.send("ready")
    with weights.watch(NAME, domain=domain, device=device) as watch:
        kept = None
        while True:
            newer = watch.changes(0.05)
            if newer is not None:
                keys = newer.keys()
                if copies:
                    given = {key: newer[key].torch() for key in keys}
                    own = own or {key: torch.empty_like(tensor) for key, tensor in given.items()}
                    for key, tensor in given.items():
                        own[key].copy_(tensor, non_blocking=True)
                    torch.cuda.synchronize(for_torch)
                has = time.monotonic_ns()
                kept, last = newer, newer.version
                values = [float((own[key] if copies else newer[key].torch())[0]) for key in (keys[0], keys[-1])]
                pipe.send((last, has, values))
            elif pipe.poll():
                break
        del kept


def torch_engine(inbox: Any, outbox: Any, device: str) -> None:
    """Copies what PyTorch's queue brings into tensors of its own, as engines do, and says when it has done."""
    import torch

    own: list[Any] = []
    while (given := inbox.get()) is not None:
        if not own:
            own = [torch.empty_like(tensor, device=device) for tensor in given]
        for mine, theirs in zip(own, given, strict=True):
            mine.copy_(theirs)
        if own[0].is_cuda:
            torch.cuda.synchronize(device)
        outbox.put((time.monotonic_ns(), float(own[0][0])))
        del given


class Trainer:
    """A trainer with the tensors, and two engines."""

    def __init__(self, device: str, engines: str, domain: str, asked: argparse.Namespace, nbytes: int) -> None:
        self.device, self.engine_device, self.domain, self.with_phases = device, engines, domain, asked.phases
        self.rounds, tensors = asked.rounds, asked.tensors
        self.names = [f"model.layers.{index}.weight" for index in range(tensors)]
        # Of two bytes each.
        self.elements = nbytes // tensors // 2
        self.kept: list[Any] = []

    def torch_device(self) -> str:
        return "cpu" if self.device == "host" else self.device

    def synchronize(self) -> None:
        if self.device != "host":
            import torch

            torch.cuda.synchronize()

    def full(self, value: float) -> dict[str, Any]:
        import torch

        device, dtype = self.torch_device(), torch.bfloat16
        return {name: torch.full((self.elements,), value, dtype=dtype, device=device) for name in self.names}

    def exportable(self) -> dict[str, Any]:
        """Tensors in memory that other processes can open."""
        if self.device == "host":
            made = {}
            for name in self.names:
                view = warpipe.Memory.allocate(self.elements * 2, device="host").view((self.elements,), "bfloat16")
                self.kept.append(view)
                made[name] = view.torch()
                made[name].fill_(1)
            return made
        import torch

        from .. import torch as ours

        with torch.cuda.use_mem_pool(ours.pool()):
            return self.full(1)

    @contextlib.contextmanager
    def engines(self) -> Iterator[list[Any]]:
        context = multiprocessing.get_context("spawn")
        pipes, processes = [], []
        for _ in range(ENGINES):
            ours, theirs = context.Pipe()
            given = (theirs, self.domain, self.engine_device, self.engine_device != self.device)
            process = context.Process(target=engine, args=given, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            for pipe in pipes:
                hear(pipe)
            yield pipes
        finally:
            for pipe, process in zip(pipes, processes, strict=True):
                with contextlib.suppress(OSError):
                    pipe.send("end")
                process.join(PATIENCE)
                process.kill()

    def measure(self, pipes: list[Any], state: dict[str, Any], expected: float, **options: Any) -> dict[str, Any]:
        """Publishes the tensors again and again."""
        published, took, had, used = None, [], [], []
        phases: list[dict[str, float]] = []
        least = self.used()
        for _ in range(self.rounds + 2):
            self.synchronize()
            before, start = self.used(), time.monotonic_ns()
            newer = self.publish(state, phases, {"wait": PATIENCE} | options)
            done = time.monotonic_ns()
            answers = [hear(pipe) for pipe in pipes]
            for version, _, values in answers:
                if version != newer.version or expected not in values:
                    raise RuntimeError(f"version {newer.version} with {expected}, and an engine has {version}, {values}")
            took.append((done - start) / 1e6)
            had.append((max(has for _, has, _ in answers) - start) / 1e6)
            used.append(self.used() - before)
            if published is not None:
                published.close()
            published = newer
            self.settle(least + used[0])
        # The first ones load kernels and open what is opened once.
        return {
            "publish_ms": took[2:], "both_ms": had[2:], "first_ms": had[0], "used_bytes": used[0], "version": published,
        } | ({"phases_ms": phases[2:]} if phases else {})  # fmt: skip

    def publish(self, state: dict[str, Any], phases: list[dict[str, float]], options: dict[str, Any]) -> Any:
        where: dict[str, Any] = {"domain": self.domain, "device": self.device}
        if not self.with_phases:
            return weights.publish(NAME, state, **where, **options)
        # What `publish` calls, which says how long each step took.
        given = where | options
        published, _, _, steps = _warpipe._publish_weights(NAME, list(state), list(state.values()), **given)
        phases.append({name: seconds * 1e3 for name, seconds in steps})
        return published

    def settle(self, most: int) -> None:
        """Waits until no more memory than one version's, beside what was there before, is in use."""
        end = time.monotonic() + PATIENCE
        while self.used() > most + (64 << 20):
            if time.monotonic() > end:
                raise RuntimeError(f"the memory of a former version is not back after {PATIENCE} s")
            time.sleep(0.001)

    def used(self) -> int:
        if self.device == "host":
            return 0
        import torch

        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free)

    def bare_copy(self, state: dict[str, Any]) -> list[float]:
        import torch

        device = "cpu" if self.engine_device == "host" else self.engine_device
        copies = [torch.empty_like(tensor, device=device) for tensor in state.values()]
        times = []
        for _ in range(self.rounds + 2):
            self.synchronize()
            start = time.monotonic_ns()
            for copy, tensor in zip(copies, state.values(), strict=True):
                copy.copy_(tensor)
            self.synchronize()
            if device != self.torch_device():
                torch.cuda.synchronize(device)
            times.append((time.monotonic_ns() - start) / 1e6)
        return times[2:]

    def torch_ipc(self, state: dict[str, Any]) -> list[float]:
        """All tensors through a queue of ``torch.multiprocessing`` to each engine, which copies them."""
        import torch.multiprocessing

        context = torch.multiprocessing.get_context("spawn")
        inboxes, outbox = [context.Queue() for _ in range(ENGINES)], context.Queue()
        given = [(inbox, outbox, self.engine_device) for inbox in inboxes]
        processes = [context.Process(target=torch_engine, args=one, daemon=True) for one in given]
        for process in processes:
            process.start()
        times, tensors = [], list(state.values())
        for _ in range(self.rounds + 2):
            self.synchronize()
            start = time.monotonic_ns()
            for inbox in inboxes:
                inbox.put(tensors)
            times.append((max(outbox.get(timeout=PATIENCE)[0] for _ in inboxes) - start) / 1e6)
        for inbox, process in zip(inboxes, processes, strict=True):
            inbox.put(None)
            process.join(PATIENCE)
            process.kill()
        return times[2:]


def hear(pipe: Any) -> Any:
    if not pipe.poll(PATIENCE):
        raise RuntimeError(f"an engine said nothing within {PATIENCE} s")
    return pipe.recv()


def run(trainer: Trainer, with_torch_ipc: bool) -> dict[str, Any]:
    """Every way, each by its median."""
    report: dict[str, Any] = {}
    state = trainer.full(1)
    lying = trainer.exportable()
    trainer.synchronize()
    report["bare device copy"] = {"both_ms": trainer.bare_copy(state)}
    if with_torch_ipc:
        report["torch.multiprocessing, two engines that copy"] = {"both_ms": trainer.torch_ipc(state)}
    with weights.keep(NAME, domain=trainer.domain), trainer.engines() as pipes:
        for hash in ("device", "later", "none"):
            report[f"by copy, hash={hash}"] = trainer.measure(pipes, state, 1, hash=hash)
        for hash in ("device", "later", "none"):
            report[f"in place, hash={hash}"] = trainer.measure(pipes, lying, 1, hash=hash, zero_copy="require")
        whole = report["in place, hash=none"]["version"]
        some = {trainer.names[-1]: state[trainer.names[-1]] * 2}
        report["one tensor by copy, the others of a base"] = trainer.measure(pipes, some, 2, base=whole)
        for found in report.values():
            if (version := found.pop("version", None)) is not None:
                version.close()
    return report


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m warpipe.bench.weights_publish", description=__doc__)
    parser.add_argument("--device", help="a GPU if there is one")
    parser.add_argument("--engines", help="the device of the engines, if it is another one")
    parser.add_argument("--gib", type=float, default=7.7, help="the length of all tensors")
    parser.add_argument("--tensors", type=int, default=171)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="a few MiB: shows that everything runs")
    parser.add_argument("--phases", action="store_true", help="say how long each step of a publication takes")
    parser.add_argument("--mode", help="how processes share the GPU, for the report; found by itself if left out")
    parser.add_argument("--out", type=pathlib.Path, help="write everything to this file, as JSON")
    asked = parser.parse_args(given)
    if importlib.util.find_spec("torch") is None:
        print("this benchmark needs torch: pip install torch", file=sys.stderr)
        return 2
    device = warpipe.Device(asked.device)
    mode = asked.mode or sharing(device.kind)
    where = asked.device or ("host" if device.kind == "host" else "cuda:0")
    nbytes, asked.rounds = (8 << 20, 2) if asked.quick else (int(asked.gib * (1 << 30)), asked.rounds)
    print(f"device: {device.name} ({device.uuid}), {mode}; {nbytes} bytes in {asked.tensors} tensors", flush=True)
    asked.devices = 1 if asked.engines in (None, where) else 2
    with tempfile.TemporaryDirectory() as folder:
        domain = str(pathlib.Path(folder) / "domain")
        trainer = Trainer(where, asked.engines or where, domain, asked, nbytes)
        report = run(trainer, with_torch_ipc=device.kind != "host")
    bare = statistics.median(report["bare device copy"]["both_ms"])
    for way, found in report.items():
        both = statistics.median(found["both_ms"])
        publish = f", publish {statistics.median(found['publish_ms']):.2f}" if "publish_ms" in found else ""
        first = f", the first time {found['first_ms']:.1f}" if "first_ms" in found else ""
        print(f"  {way}: {both:.2f} ms until both have it ({both / bare:.2f} x the bare copy){publish}{first}", flush=True)
        if "phases_ms" in found:
            steps = {step: statistics.median(one[step] for one in found["phases_ms"]) for step in found["phases_ms"][0]}
            print("    " + ", ".join(f"{step} {took:.2f}" for step, took in steps.items()), flush=True)
    if asked.out:
        asked.out.write_text(json.dumps(heading(device, mode, asked) | {"publish": report}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
