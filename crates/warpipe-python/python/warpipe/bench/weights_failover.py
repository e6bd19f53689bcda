"""Workers of ``warpipe.workers`` in the benchmark ``weights``: a restart from the fork server, and a kill of a server in the
middle of a request."""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import signal
import statistics
import time
from typing import Any

import warpipe

from ..workers import Workers
from . import weights_worker

PRELOAD = ["torch", "transformers", "transformers.models.llama.modeling_llama", "warpipe.bench.weights_worker"]
SERVICE = "bench/answer"
# Tokens of one request.
TOKENS = 32
PATIENCE = 240.0

Given = tuple[str, str, str, str]


def given_of(given: Given, started_ns: int) -> argparse.Namespace:
    folder, name, domain, device = given
    return argparse.Namespace(folder=folder, name=name, domain=domain, device=device, started=started_ns)


def torch_place(device: str) -> str:
    return "cpu" if device == "host" else device


def take(given: Given) -> tuple[Any, Any, weights_worker.Phases]:
    """A model with the keeper's weights, as ``weights_worker`` takes them."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.use_deterministic_algorithms(True)
    phases = weights_worker.Phases(time.monotonic_ns())
    place = torch_place(given[3])
    if place == "cpu":
        # Several processes share the cores.
        torch.set_num_threads(1)
    torch.zeros(1, device=place).add_(1).cpu()
    phases.end("context")
    model, held, _ = weights_worker.from_keeper(given_of(given, 0), place, phases)
    return model.eval(), held, phases


def say_first_token(given: Given, path: str) -> None:
    """Answers once, and leaves a line about it; then it waits to be killed."""
    import torch

    begun = time.monotonic_ns()
    model, _held, phases = take(given)
    first, hashed = weights_worker.answer(torch, model, torch_place(given[3]))
    line = {"first_ns": first, "begun_ns": begun, "sha": hashed, "phases": phases.ms, "pid": os.getpid()}
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")
    signal.pause()


def tokens_after(model: Any, prompt: Any) -> Any:
    """Greedy, with a cache of its own."""
    import torch

    found = []
    with torch.inference_mode():
        given, cache = prompt.view(1, -1), None
        for _ in range(TOKENS):
            said = model(input_ids=given, past_key_values=cache, use_cache=True)
            given, cache = said.logits[:, -1:].argmax(-1), said.past_key_values
            found.append(given.view(-1))
    return torch.cat(found)


def warm(given: Given) -> tuple[Any, Any, warpipe.Server]:
    import torch

    model, held, _ = take(given)
    # A whole request: its kernels are loaded then, and its memory is PyTorch's.
    tokens_after(model, torch.tensor(weights_worker.PROMPT, device=torch_place(given[3])))
    return model, held, warpipe.Server(SERVICE, domain=given[2], device=given[3])


def serve(warmed: tuple[Any, Any, warpipe.Server]) -> None:
    model, _held, server = warmed
    for request in server:
        with request:
            request.complete(tokens_after(model, request.torch()))


class Failover:
    """Both measurements, one after the other."""

    def __init__(self, given: Given, folder: pathlib.Path) -> None:
        self.given, self.folder = given, folder

    def restarts(self, count: int) -> list[dict[str, Any]]:
        """Kills a worker without a standby, so many times: each run is from the kill to the next one's first token."""
        path = self.folder / "first-tokens"
        path.touch()
        runs: list[dict[str, Any]] = []
        work = functools.partial(say_first_token, self.given, str(path))
        with Workers(work, preload=PRELOAD, domain=self.given[2], deaths_max=None) as workers:
            killed = 0
            for number in range(count + 1):
                line = self._line(path, number)
                if killed:
                    runs.append(
                        {
                            **line,
                            "total_ms": (line["first_ns"] - killed) / 1e6,
                            "start_ms": (line["begun_ns"] - killed) / 1e6,
                        }
                    )
                workers.wait_until_ready(PATIENCE)
                killed = time.monotonic_ns()
                os.kill(line["pid"], signal.SIGKILL)
        return runs

    def _line(self, path: pathlib.Path, number: int) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while True:
            lines = path.read_text().splitlines(keepends=True)
            if len(lines) > number and lines[number].endswith("\n"):
                found: dict[str, Any] = json.loads(lines[number])
                return found
            if time.monotonic() > end:
                raise TimeoutError(f"no first token within {PATIENCE} s")
            time.sleep(0.001)

    def kills(self, count: int) -> dict[str, Any]:
        """Milliseconds of a warm request, from a kill in the middle of one to its right answer, and to the next standby."""
        import torch

        prompt = torch.tensor(weights_worker.PROMPT, device=torch_place(self.given[3]))
        requests, answers, standbys = [], [], []
        with (
            Workers(
                serve,
                warm=functools.partial(warm, self.given),
                standby=1,
                preload=PRELOAD,
                domain=self.given[2],
                deaths_max=None,
            ) as workers,
            warpipe.Client(SERVICE, domain=self.given[2], device=self.given[3], timeout=PATIENCE) as client,
        ):
            workers.wait_until_ready(PATIENCE)
            expected: list[int] = []
            for _ in range(5):
                begun = time.monotonic_ns()
                with client.call(prompt) as reply:
                    requests.append((time.monotonic_ns() - begun) / 1e6)
                    expected = reply.numpy().tolist()
            warm_ms = statistics.median(requests)
            for _ in range(count):
                (victim,) = (process.pid for process in workers.processes if process.state == "working")
                pending = client.request(prompt)
                time.sleep(warm_ms / 2e3)
                killed = time.monotonic_ns()
                os.kill(victim, signal.SIGKILL)
                with pending.result(PATIENCE) as reply:
                    answers.append((time.monotonic_ns() - killed) / 1e6)
                    if reply.numpy().tolist() != expected or reply.worker_pid == victim:
                        raise ValueError(f"a standby answered {reply.numpy().tolist()} instead of {expected}")
                workers.wait_until_ready(PATIENCE)
                standbys.append((time.monotonic_ns() - killed) / 1e6)
        return {"request_ms": requests, "answer_ms": answers, "standby_ms": standbys, "tokens": TOKENS}
