"""A data loader feeds a trainer: one process makes the batches, the other one learns from them where they lie.

    python data_loader_to_trainer.py [--batches 200] [--device host] [--domain DIR]

The loader writes each batch into memory of the publisher, which blocks when the trainer is slow: nothing is dropped, and
no batch is copied on its way to the trainer's process. The model is a linear one, trained by gradient descent, with
PyTorch or CuPy on a GPU and NumPy on the host. The loss must fall to the noise in the data, and every batch must have arrived.
"""

import argparse
import multiprocessing
import tempfile
from typing import Any

import numpy as np

import warpipe

FEATURES, ROWS = 16, 64
NOISE = 0.1
LIMIT_SECONDS = 60.0


def truth() -> Any:
    """The weights that the trainer is to find."""
    return np.linspace(-1, 1, FEATURES, dtype=np.float32)


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


def loader(domain: str, device: str | None, batches: int) -> None:
    """Makes batches: the features, and in the last column what is to be predicted."""
    random = np.random.default_rng(1)
    with warpipe.Publisher("batches", domain=domain, device=device, policy="block", timeout=LIMIT_SECONDS) as publisher:
        publisher.wait_for_subscribers(1, LIMIT_SECONDS)
        for number in range(batches):
            features = random.standard_normal((ROWS, FEATURES), dtype=np.float32)
            noise = random.standard_normal(ROWS, dtype=np.float32)
            targets = features @ truth() + np.float32(NOISE) * noise
            with publisher.loan((ROWS, FEATURES + 1), "float32", metadata={"batch": number}) as batch:
                batch.copy_from(on(batch.device, np.column_stack([features, targets])))


def train(domain: str, device: str | None) -> tuple[list[float], list[int], Any]:
    """Takes one step for each batch; gives the losses, the batches' numbers and the weights."""
    losses, numbers = [], []
    weights = on(warpipe.Device(device), np.zeros(FEATURES, np.float32))
    with warpipe.Subscriber("batches", domain=domain, device=device, wait=LIMIT_SECONDS) as subscriber:
        for frame in subscriber:
            with frame:
                batch = array_of(frame)
                errors = batch[:, :FEATURES] @ weights - batch[:, FEATURES]
                weights = weights - 0.1 * (errors @ batch[:, :FEATURES]) / ROWS
                losses.append((errors * errors).mean())
                numbers.append(frame.metadata["batch"])
    return [float(loss) for loss in losses], numbers, np.array(weights.tolist())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--device", default=None, help="host, cuda or cuda:N; the first GPU by default, else the host")
    parser.add_argument("--domain", default=None, help="the directory of names; a temporary one by default")
    options = parser.parse_args(arguments)
    print(f"device: {warpipe.Device(options.device)} ({warpipe.Device(options.device).why})")
    with tempfile.TemporaryDirectory() as folder:
        domain = options.domain or folder
        # CUDA does not survive a fork: processes are spawned.
        process = multiprocessing.get_context("spawn").Process(
            target=loader, args=(domain, options.device, options.batches)
        )
        process.start()
        losses, numbers, weights = train(domain, options.device)
        process.join(LIMIT_SECONDS)
    assert process.exitcode == 0, "the loader ends well"
    assert numbers == list(range(options.batches)), "every batch arrives, once and in order"
    assert losses[-1] < 4 * NOISE**2 < losses[0], f"the loss falls to the noise: {losses[0]} ... {losses[-1]}"
    assert np.abs(weights - truth()).max() < 0.1, "the weights are found"
    print(f"trainer: {len(numbers)} batches, loss {losses[0]:.3f} to {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
