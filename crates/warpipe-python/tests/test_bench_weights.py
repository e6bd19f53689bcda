"""``python -m warpipe.bench.weights``: workers and keepers are killed, every answer is compared, and memory comes back."""

import json
import subprocess
import sys
import xml.etree.ElementTree

import pytest

from conftest import DEVICE


def test_the_benchmark_of_weights_compares_every_answer_and_says_what_was_measured(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    out, svg = tmp_path / "report.json", tmp_path / "plot.svg"
    command = [sys.executable, "-m", "warpipe.bench.weights", "--quick", "--device", DEVICE]
    done = subprocess.run(
        [*command, "--out", str(out), "--svg", str(svg)], capture_output=True, text=True, timeout=900, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    weights = report["weights"]
    assert weights["storm"]["keepers_killed"] == weights["storm"]["workers_killed"] == 2
    assert weights["storm"]["answers_checked"] >= 4, "each worker gave one behind the last kill"
    assert weights["keeper_kib"] < 32 << 10
    names = {figure["name"] for figure in report["figures"]}
    assert len(weights["failover"]["answer_ms"]) == len(weights["failover"]["restarts"]) == 2
    assert "kill in a request until its answer by a standby" in names
    assert "restart of a worker until its first token" in names and "load of the files, the device open" in names
    # The memory is the whole device's, on which other programs may allocate and free meanwhile.
    times = [figure for figure in report["figures"] if figure["unit"] != "GiB"]
    assert times and all(figure["ours"] > 0 for figure in times), times
    bars = list(xml.etree.ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}title"))
    assert len(bars) >= 8


def test_the_benchmark_of_publications_has_two_engines_that_see_each_version(tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", "warpipe.bench.weights_publish", "--quick", "--device", DEVICE, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())["publish"]
    ways = {f"{way}, hash={hash}" for way in ("by copy", "in place") for hash in ("device", "later", "none")}
    assert ways | {"bare device copy", "one tensor by copy, the others of a base"} <= set(report)
    assert all(len(found["both_ms"]) == 2 and min(found["both_ms"]) > 0 for found in report.values()), report


def test_the_benchmark_of_weights_says_which_packages_it_lacks():
    hidden = "import sys, importlib.util; importlib.util.find_spec = lambda name: None; from warpipe.bench import weights;"
    done = subprocess.run(
        [sys.executable, "-c", hidden + "sys.exit(weights.main([]))"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "pip install torch transformers safetensors" in done.stderr, done.stderr
