"""The command ``python -m warpipe.bench.weights``: a model's weights that outlive the processes that use them, beside
``from_pretrained`` and bare copies of the same bytes, in one run. Needs PyTorch, transformers and safetensors.

A wrong bit, a process that fails and memory that does not come back are errors; a figure that is not met is a result."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import pathlib
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import warpipe

from . import weights_floor, weights_plot
from .__main__ import heading, sharing

NEEDED = ("torch", "transformers", "safetensors")
NAME = "bench/model"
WORKERS = 4
# Seconds for anything that a process is asked for.
PATIENCE = 240.0
# For a program that measures by itself.
HOUR = 3600.0
# Of a Llama of eight billion parameters, with fewer layers.
MODEL = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "num_hidden_layers": 14, "tie_word_embeddings": False,
}  # fmt: skip
SMALL_MODEL = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 256, "num_hidden_layers": 2, "tie_word_embeddings": False,
}  # fmt: skip


class Failed(Exception):
    """Something that has to hold does not."""


class Ended(BaseException):
    """SIGTERM has come: what was measured so far is reported."""


def end(*_: object) -> None:
    raise Ended("ended by SIGTERM")


class Process:
    """A child that says JSON lines."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            with contextlib.suppress(ValueError):
                self.lines.put(json.loads(line))
        self.lines.put(None)

    def hear(self, event: str) -> dict[str, Any]:
        """The next line of this event."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise Failed(f"no line {event!r} within {PATIENCE} s") from None
            if line is None:
                raise Failed(f"the process ended before it said {event!r}: exit code {self.child.wait()}")
            if line.get("event") == event:
                return line

    def said(self) -> list[dict[str, Any]]:
        """Everything since the last look."""
        lines = []
        with contextlib.suppress(queue.Empty):
            while (line := self.lines.get_nowait()) is not None:
                lines.append(line)
        return lines

    def begin(self) -> None:
        """Tells the child, which waits for it, to go on."""
        assert self.child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.write("begin\n")
            self.child.stdin.flush()

    def kill(self) -> None:
        self.child.send_signal(signal.SIGKILL)
        self.child.wait()

    def end(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.close()
        self.child.wait(PATIENCE)


class Bench:
    def __init__(self, device: str, folder: pathlib.Path, quick: bool) -> None:
        self.device, self.folder, self.quick = device, folder, quick
        self.model = str(folder / "model")
        self.domain = str(folder / "domain")
        # Four workers that each use all cores would measure each other.
        self.environment = {**os.environ, "WARPIPE_DOMAIN": self.domain, "OMP_NUM_THREADS": "2"}
        self.report: dict[str, Any] = {"device": device}
        self.figures: list[dict[str, Any]] = []
        self.processes: list[Process] = []

    def figure(self, name: str, ours: float, floor: float, wanted: str = "nothing", limit: float = 0.0) -> None:
        """A figure in milliseconds, beside its floor; ``wanted`` says how ``limit`` judges it. A run on the host, which is for
        trying, judges nothing."""
        ratio = ours / floor if floor else 0.0
        judged = {"ratio_at_most": ratio, "beside_floor_at_most": ours - floor, "at_most": ours}
        is_judged = wanted in judged and self.device != "host"
        self.figures.append({
            "bench": "weights", "name": name, "unit": "ms", "ours": ours, "floor": floor, "ratio": ratio,
            "wanted": {wanted: limit} if is_judged else "nothing",
            "met": judged[wanted] <= limit if is_judged else None,
        })  # fmt: skip
        print(f"  {name}: {ours:.1f} ms beside {floor:.1f}, ratio {ratio:.2f}", flush=True)

    def memory_figures(self, used: list[float]) -> None:
        """GiB of the device that 1, 2 and 4 workers use, their contexts included, beside a copy of the model for each."""
        if self.device == "host":
            return
        model = self.report["bytes"] / (1 << 30)
        for workers, ours in zip((1, 2, WORKERS), used, strict=True):
            ours -= self.report["idle_gib"]
            copies, many = workers * model, "worker" if workers == 1 else "workers"
            self.figures.append({
                "bench": "weights", "name": f"GPU memory with {workers} {many}, beside a copy for each", "unit": "GiB",
                "ours": ours, "floor": copies, "ratio": ours / copies, "wanted": "nothing", "met": None,
            })  # fmt: skip
            print(f"  GPU memory with {workers} {many}: {ours:.2f} GiB beside {copies:.2f}", flush=True)

    # Processes.

    def worker(self, way: str, forever: bool = False) -> Process:
        command = [
            sys.executable, "-m", "warpipe.bench.weights_worker", way, self.model, "--name", NAME, "--device", self.device,
            "--domain", self.domain, "--started", str(time.monotonic_ns()), *(["--forever"] if forever else []),
        ]  # fmt: skip
        return self.start(command)

    def serve(self) -> Process:
        command = [sys.executable, "-m", "warpipe", "weights", "serve", self.model, "--name", NAME]
        return self.start([*command, "--device", self.device, "--json"])

    def start(self, command: list[str]) -> Process:
        self.processes.append(Process(command, self.environment))
        return self.processes[-1]

    def close(self) -> None:
        for process in self.processes:
            if process.child.poll() is None:
                process.kill()

    # Memory of the device that is in use, in GiB.

    def used(self) -> float:
        if self.device == "host":
            return 0.0
        import torch

        free, total = torch.cuda.mem_get_info(self.device)
        used: float = (total - free) / (1 << 30)
        return used

    def used_when(self, is_so: Callable[[float], bool]) -> float:
        """A dead process's memory is free when its context is gone: soon after its end, not before."""
        end = time.monotonic() + 30
        while not is_so(used := self.used()) and time.monotonic() < end:
            threading.Event().wait(0.05)
        return used

    # The parts.

    def make_model(self) -> None:
        import torch
        import transformers

        torch.manual_seed(7)
        config = transformers.LlamaConfig(**(SMALL_MODEL if self.quick else MODEL))
        with torch.device(self.torch_device()):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(self.model, max_shard_size="4GB")
        self.report["bytes"] = sum(file.stat().st_size for file in self.files())
        self.report["tensors"] = len(model.state_dict())
        del model
        gc.collect()
        if self.device != "host":
            torch.cuda.empty_cache()
        gib = self.report["bytes"] / (1 << 30)
        print(f"the model: {gib:.2f} GiB in {self.report['tensors']} tensors, {len(self.files())} files", flush=True)

    def torch_device(self) -> str:
        return "cpu" if self.device == "host" else self.device

    def files(self) -> list[pathlib.Path]:
        return sorted(pathlib.Path(self.model).glob("*.safetensors"))

    def floors(self) -> dict[str, float]:
        """Of the same bytes: a bare copy from page-locked memory, safetensors, and a bare import."""
        import safetensors.torch

        def load() -> None:
            kept = [safetensors.torch.load_file(file, device=self.torch_device()) for file in self.files()]
            self.synchronize()
            del kept

        found = {"safetensors_ms": statistics.median(milliseconds(load) for _ in range(3))}
        if self.device != "host":
            gc.collect()
            found["pinned_ms"] = weights_floor.pinned_copy(self.report["bytes"], self.device)
            found |= weights_floor.bare_import(self.report["bytes"])
        self.report["floors"] = found
        return found

    def synchronize(self) -> None:
        if self.device != "host":
            import torch

            torch.cuda.synchronize()

    def load(self, floors: dict[str, float]) -> Process:
        """Serves the files three times; the last one stays."""
        runs = []
        for last in (False, False, True):
            started = time.monotonic_ns()
            keeper = self.serve()
            ready = keeper.hear("ready")
            runs.append({**ready, "wall_ms": (time.monotonic_ns() - started) / 1e6})
            if not last:
                keeper.kill()
                self.used_when(lambda used: used < self.report["idle_gib"] + 0.5)
        self.report["serve"] = runs
        read = statistics.median(run["read_seconds"] * 1e3 for run in runs)
        wall = statistics.median(run["wall_ms"] for run in runs)
        floor = floors.get("pinned_ms", floors["safetensors_ms"])
        self.figure("load of the files, the device open", read, floor, "ratio_at_most", 1.4)
        self.figure("serve, from its start until ready", wall, floors["safetensors_ms"])
        self.report["keeper_kib"] = resident(keeper.child.pid)
        return keeper

    def first_tokens(self, reference: str, rounds: int) -> None:
        """A worker's restart until its first token, one worker at a time."""
        runs: dict[str, list[dict[str, Any]]] = {"pretrained": [], "attach": []}
        for _ in range(1 if self.quick else rounds):
            for way, found in runs.items():
                worker = self.worker(way)
                found.append(self.checked(worker.hear("answer"), reference))
                worker.end()
        self.report["workers"] = runs

        def median(way: str, of: Callable[[dict[str, Any]], float]) -> float:
            return statistics.median(of(run) for run in runs[way])

        total = {way: median(way, lambda run: run["total_ms"]) for way in runs}
        self.figure("restart of a worker until its first token", total["attach"], total["pretrained"])
        taken = median("attach", lambda run: run["phases"]["open"] + run["phases"]["attach"] + run["phases"]["device"])
        self.figure("weights of a worker", taken, median("pretrained", lambda run: run["phases"]["weights"]))
        if (floor := self.report["floors"].get("import_map_ms")) is not None:
            opened = median("attach", lambda run: run["phases"]["open"])
            self.figure("open, with a context there", opened, floor, "beside_floor_at_most", 2.0)
            self.figure("open, with a context there, for 8 GiB", opened, floor, "at_most", 50.0)

    def checked(self, line: dict[str, Any], reference: str) -> dict[str, Any]:
        if line["sha"] != reference:
            raise Failed(f"the logits differ from those of from_pretrained: {line}")
        return line

    def failover(self, reference: str) -> None:
        """Workers of ``warpipe.workers``: a restart from their fork server, and a kill of a server in a request."""
        from .weights_failover import Failover

        given = (self.model, NAME, self.domain, self.device)
        measured, kills = Failover(given, self.folder), 2 if self.quick else 10
        runs = [self.checked(line, reference) for line in measured.restarts(kills)]
        found = measured.kills(kills)
        self.report["failover"] = {"restarts": runs, **found}
        pretrained = statistics.median(run["total_ms"] for run in self.report["workers"]["pretrained"])
        restart = statistics.median(run["total_ms"] for run in runs)
        self.figure("kill of a worker until another one's first token", restart, pretrained, "ratio_at_most", 1 / 15)
        self.figure("kill of a worker until another one's first token, in at most 1 s", restart, pretrained, "at_most", 1000.0)
        warm, answer = (statistics.median(found[key]) for key in ("request_ms", "answer_ms"))
        self.figure("kill in a request until its answer by a standby", answer, warm, "beside_floor_at_most", 150.0)
        self.figure("kill until the next standby is warm", statistics.median(found["standby_ms"]), pretrained)

    def sync(self) -> None:
        """New versions from a trainer to two engines, beside PyTorch's own way and a bare copy of the same bytes."""
        out = self.folder / "publish.json"
        self.measured("warpipe.bench.weights_publish", ["-m"], out, ["--quick"] if self.quick else [])
        ways = json.loads(out.read_text())["publish"]
        self.report["sync"] = ways
        both = {way: statistics.median(found["both_ms"]) for way, found in ways.items()}
        bare = both.pop("bare device copy")
        for way, ours in both.items():
            limits = {"by copy": 1.3 * bare + 3, "in place": 5.0}
            limit = next((limit for kind, limit in limits.items() if way.startswith(kind)), None)
            wanted = "nothing" if limit is None else "at_most"
            self.figure(f"new version in two engines, {way}", ours, bare, wanted, limit or 0.0)

    def kv_failover(self, program: pathlib.Path, kills: int) -> None:
        """A decoder that is killed in the middle of steps, with its KV cache kept."""
        out = self.folder / "kv-failover.json"
        model = "llama-small" if self.quick else "llama"
        self.measured(str(program), [], out, ["--model", model, "--kills", str(kills)])
        found = json.loads(out.read_text())
        self.report["kv_failover"] = found
        taken, step = statistics.median(found["next_token_ms"]), statistics.median(found["step_ms"])
        self.figure("kill in a step until the next token, with the KV cache kept", taken, step, "at_most", 100.0)

    def measured(self, program: str, before: list[str], out: pathlib.Path, more: list[str]) -> None:
        """Runs a program that measures something with processes of its own."""
        command = [sys.executable, *before, program, "--device", self.device, "--out", str(out), *more]
        done = subprocess.run(command, env=self.environment, timeout=HOUR, check=False)
        if done.returncode != 0:
            raise Failed(f"{' '.join(command)}: exit code {done.returncode}")

    def storm(self, keeper: Process, reference: str) -> None:
        """Workers and keepers are killed and started again while all others answer."""
        kills = 2 if self.quick else 20
        used, workers = [self.used()], []
        for count in range(WORKERS):
            workers.append(self.worker("attach", forever=True))
            self.checked(workers[-1].hear("answer"), reference)
            if count + 1 in (1, 2, WORKERS):
                used.append(self.used())
        self.report["used_gib"] = {"keeper": used[0], "workers 1, 2, 4": used[1:]}
        self.memory_figures(used[1:])
        takeovers, restarts, answers = [], [], 0
        kills_at_once = max(1, min(kills, WORKERS - 1))
        for kill in range(kills):
            # Keepers are replaced while the killed workers come back, and the others go on.
            if kill % kills_at_once == 0:
                victims = [(kill + count) % WORKERS for count in range(min(kills_at_once, kills - kill))]
                for victim in victims:
                    answers += self.answers(workers[victim], reference)
                    workers[victim].kill()
                    workers[victim] = self.worker("attach", forever=True)
            keeper.kill()
            keeper, started = self.serve(), time.monotonic_ns()
            ready = keeper.hear("ready")
            takeovers.append((time.monotonic_ns() - started) / 1e6)
            if ready["from"] != "processes" or ready["version"] != 1:
                raise Failed(f"the new keeper did not take the version over: {ready}")
            if kill % kills_at_once == kills_at_once - 1 or kill == kills - 1:
                for victim in victims:
                    restarts.append(self.checked(workers[victim].hear("answer"), reference)["total_ms"])
        for worker in workers:
            # At least one more answer after the last kill.
            self.checked(worker.hear("again"), reference)
            answers += self.answers(worker, reference)
        self.report["storm"] = {
            "keepers_killed": kills, "workers_killed": kills, "answers_checked": answers,
            "takeover_ms": takeovers, "restart_ms": restarts, "used_gib": self.used(),
        }  # fmt: skip
        print(f"  {kills} keepers and {kills} workers killed, {answers} answers right", flush=True)
        for worker in workers:
            worker.end()
        alone = self.used_when(lambda now: now < used[0] + 0.2)
        keeper.kill()
        free = self.used_when(lambda now: now < self.report["idle_gib"] + 0.2)
        self.report["used_gib"] |= {"keeper alone": alone, "all dead": free}
        if free > self.report["idle_gib"] + 0.2 or alone > used[0] + 0.2:
            raise Failed(f"memory did not come back: {self.report['used_gib']}")

    def answers(self, worker: Process, reference: str) -> int:
        lines = [self.checked(line, reference) for line in worker.said() if line["event"] == "again"]
        return len(lines)

    def run(self, asked: argparse.Namespace) -> None:
        parts = set(asked.parts.split(","))
        if "sync" in parts:
            self.sync()
        if asked.kv_failover is not None:
            self.kv_failover(asked.kv_failover, asked.kills)
        if parts & {"restart", "failover", "storm"}:
            self.with_model(parts, asked.restarts)

    def with_model(self, parts: set[str], restarts: int) -> None:
        self.make_model()
        floors = self.floors()
        self.used()
        self.report["idle_gib"] = self.used()
        first = self.worker("pretrained")
        answer = first.hear("answer")
        first.end()
        self.report["reference"] = answer
        self.report["idle_gib"] = self.used_when(lambda used: used < self.report["idle_gib"] + 0.2)
        keeper = self.load(floors)
        # Failover compares itself with restarts.
        self.first_tokens(answer["sha"], restarts)
        if "failover" in parts:
            self.failover(answer["sha"])
        if "storm" in parts:
            self.storm(keeper, answer["sha"])


def milliseconds(run: Callable[[], object]) -> float:
    start = time.monotonic_ns()
    run()
    return (time.monotonic_ns() - start) / 1e6


def resident(pid: int) -> int:
    """KiB of memory that a process has of its own: without the pages of programs and libraries, which all share."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:"))


@contextlib.contextmanager
def place(given: pathlib.Path | None) -> Iterator[pathlib.Path]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(folder)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m warpipe.bench.weights", description=__doc__)
    parser.add_argument("--device", help="a GPU if there is one")
    parser.add_argument("--quick", action="store_true", help="a small model: shows that everything runs")
    parser.add_argument("--folder", type=pathlib.Path, help="for the model, of 8 GiB; a temporary one if left out")
    parser.add_argument("--parts", default="sync,restart,failover,storm", help="some of these, with commas between")
    parser.add_argument("--restarts", type=int, default=3, help="of a worker in the part restart, by each way")
    parser.add_argument("--kv-failover", type=pathlib.Path, help="the program kv_failover.py of the examples, to run it, too")
    parser.add_argument("--kills", type=int, default=300, help="of its decoders, some seconds each")
    parser.add_argument("--mode", help="how processes share the GPU, for the report; found by itself if left out")
    parser.add_argument("--out", type=pathlib.Path, help="write everything to this file, as JSON")
    parser.add_argument("--svg", type=pathlib.Path, help="draw a worker's restart until its first token into this file")
    asked = parser.parse_args(given)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"this benchmark needs {', '.join(missing)}: pip install {' '.join(missing)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, end)
    device = warpipe.Device(asked.device)
    mode = asked.mode or sharing(device.kind)
    print(f"device: {device.name} ({device.uuid}), {mode}: {device.why}", flush=True)
    asked.devices = 1
    with place(asked.folder) as folder:
        bench = Bench(asked.device or ("host" if device.kind == "host" else "cuda:0"), folder, asked.quick)
        try:
            bench.run(asked)
        except (Failed, Ended) as failed:
            print(f"FAILED: {failed}", flush=True)
            bench.report["failed"] = str(failed)
        finally:
            bench.close()
    if asked.out:
        report = {**heading(device, mode, asked), "weights": bench.report, "figures": bench.figures}
        asked.out.write_text(json.dumps(report, indent=1) + "\n")
    if asked.svg and "workers" in bench.report:
        gib = bench.report["bytes"] / (1 << 30)
        title = f"Restart of a worker until its first token: {gib:.1f} GiB on {device.name}"
        asked.svg.write_text(weights_plot.svg(bench.report, title))
    return 1 if "failed" in bench.report else 0


if __name__ == "__main__":
    sys.exit(main())
