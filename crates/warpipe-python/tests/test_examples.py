"""The examples run as they stand, in processes of their own."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest
from test_processes import kills

# In the repository, and in the bundle for a GPU machine.
PLACES = [pathlib.Path(__file__).parent / path for path in (
    "../../../examples/python", "../../../examples/mpi", "../examples", "../mpi"
)]


def example(name):
    found = [place / name for place in PLACES if (place / name).exists()]
    if not found:
        pytest.skip(f"{name} was not carried here")
    return found[0]


def run(path, *arguments):
    done = subprocess.run(
        [sys.executable, str(path), *arguments], capture_output=True, text=True, timeout=300, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_camera_serves_two_models(device):
    said = run(example("camera_to_two_models.py"), "--frames", "60", "--device", device.kind)
    assert "detector: 60 frames" in said


def needs_a_framework(device):
    if device.kind == "cuda" and not any(importlib.util.find_spec(name) for name in ("torch", "cupy")):
        pytest.skip("on a GPU the example computes with PyTorch or CuPy")


def test_a_data_loader_feeds_a_trainer(device):
    needs_a_framework(device)
    said = run(example("data_loader_to_trainer.py"), "--batches", "150", "--device", device.kind)
    assert "trainer: 150 batches" in said


def test_a_data_loader_of_pytorch_hands_its_workers_batches_to_the_trainer(device):
    pytest.importorskip("torch")
    place = "cpu" if device.kind == "host" else f"cuda:{device.ordinal}"
    said = run(example("torch_data_loader.py"), "--batches", "80", "--device", place)
    assert "trainer: 80 batches of 2 workers" in said


@kills
def test_inference_goes_on_when_a_server_is_killed(device):
    needs_a_framework(device)
    said = run(example("inference_server.py"), "--requests", "40", "--device", device.kind)
    assert "40 requests, 2 servers answered" in said


def test_an_asyncio_gateway_serves_all_its_clients(device):
    needs_a_framework(device)
    said = run(example("asyncio_gateway.py"), "--clients", "60", "--device", device.kind)
    assert "60 clients served by 2 workers" in said


def test_the_examples_are_typed_and_mypy_is_content_with_them():
    pytest.importorskip("mypy")
    names = ["camera_to_two_models.py", "data_loader_to_trainer.py", "inference_server.py", "asyncio_gateway.py"]
    names += ["torch_data_loader.py", "allreduce.py", "ranks.py", "ring.py"]
    # The frameworks of a GPU machine need not be here.
    flags = ["--strict", "--no-incremental", "--ignore-missing-imports"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *flags, *(str(example(name)) for name in names)],
        capture_output=True, text=True, timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_engines_follow_a_trainer_and_its_old_weights_are_freed(device):
    if device.kind == "cuda" and not importlib.util.find_spec("torch"):
        pytest.skip("on a GPU the trainer computes with PyTorch")
    said = run(example("trainer_to_engines.py"), "--syncs", "200", "--device", device.kind)
    assert "trainer: 200 versions to 2 engines" in said
