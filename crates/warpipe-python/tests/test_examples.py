"""The examples run as they stand, in processes of their own."""

import os
import pathlib
import subprocess
import sys

import pytest

# In the repository, and in the bundle for a GPU machine.
PLACES = [pathlib.Path(__file__).parent / path for path in ("../../../examples/python", "../examples")]


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
    if device.kind == "cuda":
        pytest.importorskip("torch", reason="on a GPU the example's images are made by PyTorch")
    said = run(example("camera_to_two_models.py"), "--frames", "60", "--device", device.kind)
    assert "detector: 60 frames" in said
