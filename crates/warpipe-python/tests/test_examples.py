"""The examples run as they stand, in processes of their own."""

import importlib
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
    names += ["kv_failover.py", "graph_encoder_decoder.py", "cupy_kernel_ring.py", "numba_kernel_ring.py"]
    # The frameworks of a GPU machine need not be here, and parts of PyTorch have no types.
    flags = ["--strict", "--no-incremental", "--ignore-missing-imports", "--allow-untyped-calls"]
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


UNDER_MPS = bool(os.environ.get("WARPIPE_TEST_MPS"))
# Without MPS the two processes of an example take turns on one GPU.
SHARING = [] if UNDER_MPS else ["--time-slices"]


def needs_pytorch_on_a_gpu(device):
    if device.kind == "cuda":
        pytest.importorskip("torch")


def needs_kernels(device, framework):
    if device.kind != "cuda":
        pytest.skip("the example's kernels are CUDA's")
    pytest.importorskip(framework)


def test_a_replayed_decoder_gets_every_item_of_a_replayed_encoder_once(device):
    needs_pytorch_on_a_gpu(device)
    replays = "60" if device.kind == "host" else "10000" if UNDER_MPS else "300"
    said = run(example("graph_encoder_decoder.py"), "--replays", replays, "--device", device.kind, *SHARING)
    assert f"decoder: {replays} replays, {8 * int(replays)} items, each right and once" in said


@kills
def test_a_decoder_that_is_killed_in_its_steps_goes_on_in_a_standby_at_the_next_token(device):
    needs_pytorch_on_a_gpu(device)
    said = run(example("kv_failover.py"), "--kills", "12", "--device", device.kind)
    assert "12 kills, " in said and "all 41 tokens are right" in said


@kills
def test_a_model_of_transformers_goes_on_in_a_standby_at_the_next_token(device):
    pytest.importorskip("transformers")
    said = run(example("kv_failover.py"), "--kills", "6", "--model", "llama-small", "--device", device.kind)
    assert "6 kills, " in said and "all 29 tokens are right" in said


@kills
@pytest.mark.parametrize(("killed", "expected"), [("encoder", "decoder: PeerGoneError"), ("decoder", "encoder: LinkClosedError")])
def test_replays_of_a_side_whose_peer_is_killed_end_with_an_error(device, killed, expected):
    needs_pytorch_on_a_gpu(device)
    said = run(example("graph_encoder_decoder.py"), "--kill", killed, "--device", device.kind, *SHARING)
    assert expected in said


def test_kernels_of_cupy_in_two_processes_hand_over_every_item_once(device):
    needs_kernels(device, "cupy")
    said = run(example("cupy_kernel_ring.py"), "--items", "100000" if UNDER_MPS else "2000", *SHARING)
    assert "each right and once" in said


def test_kernels_of_numba_in_two_processes_hand_over_every_item_once(device):
    needs_kernels(device, "numba.cuda")
    try:
        importlib.import_module("numba.cuda.cudaimpl")
    except AttributeError as error:
        pytest.skip(f"this Numba compiles no kernel beside this NumPy: {error}")
    said = run(example("numba_kernel_ring.py"), "--items", "100000" if UNDER_MPS else "2000", *SHARING)
    assert "each right and in its order" in said


@pytest.mark.skipif(UNDER_MPS, reason="under MPS the two run beside each other")
def test_an_example_that_allows_no_time_slices_says_what_to_do(device):
    needs_kernels(device, "cupy")
    path = example("cupy_kernel_ring.py")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert done.returncode != 0 and "MPS" in done.stderr, done.stdout + done.stderr
