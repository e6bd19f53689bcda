"""``python -m warpipe.bench.torch_queue``: its arguments, its report, and that memory which grows is an error."""

import json
import subprocess
import sys

import pytest
from conftest import DEVICE
from test_processes import kills

from warpipe.bench import torch_queue


@kills
def test_the_benchmark_of_queues_compares_both_ways_and_kills_receivers(tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", "warpipe.bench.torch_queue", "--quick", "--device", DEVICE]
    # Other tests use the GPU meanwhile.
    command.append("--shared-gpu")
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=900, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    allocators = ["host"] if DEVICE == "host" else list(torch_queue.ALLOCATORS)
    runs = {(run["allocator"], run["way"]): run for run in report["torch_queue"]}
    for allocator in allocators:
        run = runs[allocator, "warpipe"]
        assert run["status"] == "measured", run
        assert [trip["bytes"] for trip in run["trips"]] == torch_queue.QUICK_SIZES
        assert all(0 < trip["ns"]["p50"] <= trip["ns"]["max"] for trip in run["trips"])
        trips = torch_queue.QUICK_ROUNDS * torch_queue.QUICK_TURNS
        assert all(trip["ns"]["count"] == trips for trip in run["trips"])
        assert all(len(trip["rounds"]) == torch_queue.QUICK_ROUNDS for trip in run["trips"])
        assert [round["killed"] for round in run["kills"]] == [2, 4]
        assert all(round["state"]["shared nbytes"] == 0 for round in run["kills"])
    if DEVICE == "host":
        assert runs["host", "plain"]["status"] == "measured" and not runs["host", "plain"]["kills"]
        assert len(report["figures"]) == len(torch_queue.QUICK_SIZES)
    assert all(0 < figure["ratios"][0] <= figure["ratios"][1] for figure in report["figures"])
    assert all(figure["ours"] > 0 and figure["floor"] > 0 for figure in report["figures"])
    assert report["quick"] and report["ended"] is None


def test_memory_shares_and_files_that_grow_with_killed_receivers_are_an_error():
    first = {"files": 30, "shared unclaimed": 0, "shared nbytes": 0, "allocated": 0, "used": 1 << 30}
    torch_queue.check_flat(first, first, 200)
    torch_queue.check_flat(first, {**first, "files": 34, "used": (1 << 30) + (1 << 20)}, 200)
    for name, found in [("files", 60), ("allocated", 512), ("used", 2 << 30), ("shared nbytes", 4096)]:
        with pytest.raises(torch_queue.Failed, match=f"after 200 killed.*{name}"):
            torch_queue.check_flat(first, {**first, name: found}, 200)
    torch_queue.check_flat(first, {**first, "used": 2 << 30}, 200, shared_gpu=True)
    with pytest.raises(torch_queue.Failed, match="files"):
        torch_queue.check_flat(first, {**first, "files": 60}, 200, shared_gpu=True)
    with pytest.raises(torch_queue.Failed, match="still shared"):
        torch_queue.check_flat({**first, "shared nbytes": 4096}, {**first, "shared nbytes": 4096}, 200)


def test_its_arguments_have_the_requirements_as_defaults():
    asked = torch_queue.arguments([])
    assert (asked.kills, asked.at_once, asked.allocator) == (200, 8, None)
    assert torch_queue.arguments(["--quick"]).kills == 4
    asked = torch_queue.arguments(["--allocator", "pool", "--allocator", "segments", "--kills", "0"])
    assert asked.allocator == ["pool", "segments"] and asked.kills == 0
    for wrong in (["--at-once", "0"], ["--kills", "-1"], ["--allocator", "other"], ["--devices", "2", "--device", "cuda:0"]):
        with pytest.raises(SystemExit):
            torch_queue.arguments(wrong)


def test_a_worker_that_fails_is_told_with_its_reason(tmp_path):
    asked = torch_queue.arguments(["--quick"])
    bench = torch_queue.Bench("host", asked, tmp_path / "domain")
    with pytest.raises(torch_queue.Failed, match="came back as 3"):
        bench.take({"trips": [], "kills": []}, {"event": "failed", "reason": "trip 1 came back as 3, not as 1"})


def test_the_benchmark_of_queues_says_that_it_needs_pytorch():
    hidden = "import sys, importlib.util; importlib.util.find_spec = lambda name: None; from warpipe.bench import torch_queue;"
    done = subprocess.run(
        [sys.executable, "-c", hidden + "sys.exit(torch_queue.main([]))"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "pip install torch" in done.stderr, done.stderr
