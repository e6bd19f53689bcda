"""``python -m warpipe.bench.host``: its report, and what it does without the others."""

import json
import os
import subprocess
import sys

import pytest
from conftest import DEVICE

from warpipe.bench import host

pytestmark = pytest.mark.skipif(DEVICE != "host", reason="a benchmark of the host")


def run(*options, **environment):
    command = [sys.executable, "-m", "warpipe.bench.host", "--quick", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment})


def test_a_round_trip_is_measured_in_every_place_beside_what_is_installed(tmp_path):
    out = tmp_path / "report.json"
    done = run("--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert list(report["medians_us"]) == list(host.places())
    for found in report["medians_us"].values():
        assert {name for name in found if name.startswith(host.OURS)} == {n for n in host.MADE if n.startswith(host.OURS)}
        assert all(len(rounds) == host.QUICK_ROUNDS and min(rounds) > 0 for rounds in found.values())
    others = {name for found in report["medians_us"].values() for name in found if not name.startswith(host.OURS)}
    beside = {other for other, ways in host.OTHERS.items() if others & set(ways)}
    assert len(report["figures"]) == len(beside) * len(report["medians_us"])


def test_a_library_that_is_not_installed_is_left_out_and_named(tmp_path):
    for module in ("zmq", "iceoryx2"):
        (tmp_path / f"{module}.py").write_text("raise ImportError('not here')\n")
    before = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    done = run(PYTHONPATH=os.pathsep.join([str(tmp_path), *before]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pip install iceoryx2" in done.stdout and "pip install pyzmq" in done.stdout
    assert "warpipe, no poll" in done.stdout and "ratio" not in done.stdout


def test_the_fastest_way_of_another_library_is_the_one_that_counts():
    found = {"warpipe": [10.0, 12.0, 11.0], "iceoryx2, polling": [20.0], "iceoryx2, asleep": [8.0]}
    (figure,) = host.figures("here", found)
    assert figure["ours"] == 11.0 and figure["floor"] == 8.0 and figure["note"] == "iceoryx2, asleep"
    assert figure["met"] is False and figure["wanted"] == {"ratio_at_most": 1.0}


def test_a_process_that_ends_is_an_error_and_no_hang(monkeypatch, capfd):
    with pytest.raises(RuntimeError, match="a process of the benchmark ended"):
        host.measure((10**6, 10**6), 1, 1)
    assert "setaffinity" in capfd.readouterr().err
