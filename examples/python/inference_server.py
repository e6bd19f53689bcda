"""One process has the weights, servers share them in place, clients ask, and a server that is killed is not missed.

    python inference_server.py [--requests 60] [--device host] [--domain DIR]

The weights are published once, with a history for servers that come later: every server reads them where they lie in the
owner's memory. Servers answer through a service; one of them is killed in the middle of a request, and that request goes
to another one. Each reply must be what NumPy computes. PyTorch or CuPy computes on a GPU, NumPy on the host.
"""

import argparse
import contextlib
import multiprocessing
import os
import signal
import tempfile
from typing import Any

import numpy as np

import warpipe

INPUTS, OUTPUTS = 32, 8
SERVERS = 3
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


def server(domain: str, device: str | None, doomed: bool, pipe: Any) -> None:
    """Answers with ``inputs @ weights``, until it is told to stop. A doomed one dies of its first request."""
    with (
        warpipe.Subscriber("model/weights", domain=domain, device=device, wait=LIMIT_SECONDS) as model,
        warpipe.Server("model/infer", domain=domain, device=device, timeout=0.1) as requests,
        model.receive(LIMIT_SECONDS) as frame,
    ):
        weights = array_of(frame)
        pipe.send("ready")
        while not pipe.poll():
            with contextlib.suppress(warpipe.TimeoutError), requests.accept() as request:
                if doomed:
                    os.kill(os.getpid(), signal.SIGKILL)
                request.complete(array_of(request) @ weights)
        # Before the memory goes: no view of it is left in here.
        del weights


def ask(domain: str, device: str | None, weights: Any, requests: int) -> tuple[set[int], int]:
    """Sends all requests at once, and checks every reply. Returns the servers that answered, and how often one was tried again."""
    random = np.random.default_rng(2)
    inputs = [random.standard_normal((4, INPUTS), dtype=np.float32) for _ in range(requests)]
    with warpipe.Client("model/infer", domain=domain, device=device, timeout=LIMIT_SECONDS) as client:
        client.wait_for_servers(SERVERS, LIMIT_SECONDS)
        pending = [client.request(on(warpipe.Device(device), batch)) for batch in inputs]
        answered_by: set[int] = set()
        again = 0
        for batch, request in zip(inputs, pending, strict=True):
            with request.result() as reply:
                assert np.allclose(reply.numpy(), batch @ weights, atol=1e-4), "every reply is what NumPy computes"
                answered_by.add(reply.worker_pid)
                again += reply.attempt > 1
    return answered_by, again


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--device", default=None, help="host, cuda or cuda:N; the first GPU by default, else the host")
    parser.add_argument("--domain", default=None, help="the directory of names; a temporary one by default")
    options = parser.parse_args(arguments)
    device = warpipe.Device(options.device)
    print(f"device: {device} ({device.why})")
    weights = np.random.default_rng(1).standard_normal((INPUTS, OUTPUTS), dtype=np.float32)
    with contextlib.ExitStack() as stack:
        domain = options.domain or stack.enter_context(tempfile.TemporaryDirectory())
        # CUDA does not survive a fork: processes are spawned.
        spawn = multiprocessing.get_context("spawn")
        owner = stack.enter_context(
            warpipe.Publisher("model/weights", domain=domain, device=options.device, history=1, depth=4)
        )
        owner.send(on(device, weights))
        servers = []
        for number in range(SERVERS):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=server, args=(domain, options.device, number == 0, theirs))
            process.start()
            servers.append((process, ours))
        for _process, pipe in servers:
            assert pipe.poll(LIMIT_SECONDS) and pipe.recv() == "ready"
        answered_by, again = ask(domain, options.device, weights, options.requests)
        (victim, _pipe), *survivors = servers
        for process, pipe in survivors:
            pipe.send("stop")
        for process, _pipe in servers:
            process.join(LIMIT_SECONDS)
    assert victim.exitcode == -signal.SIGKILL and victim.pid not in answered_by, "one server was killed"
    assert [process.exitcode for process, _pipe in survivors] == [0] * (SERVERS - 1), "the others end well"
    assert again >= 1, "what it had begun was done again"
    print(f"{options.requests} requests, {len(answered_by)} servers answered, {again} tried again after a kill")


if __name__ == "__main__":
    main()
