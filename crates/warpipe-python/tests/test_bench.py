"""``python -m warpipe.bench``: its report, and that whatever a contestant does is told and comes to an end."""

import json
import subprocess
import sys
import xml.etree.ElementTree

import pytest
import rivals

from warpipe.bench import arrays, figures, ours, pair, plot, rust
from warpipe.bench import rivals as real

PLAN = pair.Plan(warm_up=2, rounds=2, chained=3, awaited=4)
SIZES = [rivals.SMALL, rivals.LARGE]


@pytest.fixture
def place(tmp_path):
    return pair.Place("one device", "host", "host", str(tmp_path / "domain"))


def test_the_benchmark_measures_every_contestant_at_every_size_and_compares_them(tmp_path):
    out, svg = tmp_path / "report.json", tmp_path / "plot.svg"
    command = [sys.executable, "-m", "warpipe.bench", "--device", "host", "--quick"]
    done = subprocess.run(
        [*command, "--out", str(out), "--svg", str(svg)], capture_output=True, text=True, timeout=600, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert (report["mode"], report["devices"], report["quick"]) == ("host", 1, True)
    found = {(row["contestant"], row["bytes"]): row for row in report["contestants"]}
    names = {"warpipe, loan", "warpipe, send", "multiprocessing.Queue", "shared memory, opened once"}
    assert set(found) == {(name, size) for name in names for size in (4 << 10, 1 << 20)}
    for row in found.values():
        assert row["status"] == "measured", row
        assert row["kernel"] == "NumPy's add"
        spread = row["awaited_ns"]
        assert row["chained_us"] > 0 and 0 < spread["p50"] <= spread["p90"] <= spread["p99"] <= spread["max"]
        assert spread["count"] == pair.QUICK.rounds * pair.QUICK.awaited
        assert len(row["chained_rounds_us"]) == pair.QUICK.rounds
    compared = [figure["name"] for figure in report["figures"]]
    assert "1 MiB, one device, chained: multiprocessing.Queue over warpipe" in compared
    assert all({"bench", "name", "unit", "ours", "floor", "ratio", "wanted", "met"} <= set(f) for f in report["figures"])
    assert report["calls"]["status"] == "measured" and all(us > 0 for us in report["calls"]["us"].values())
    assert list(report["calls"]["us"])[:4] == ["loan", "array of the loan", "NumPy's add", "send"]
    assert "warpipe, loan" in done.stdout
    assert len(list(xml.etree.ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}polyline"))) == len(names)


def test_a_contestant_that_does_the_work_is_measured(place):
    outcomes = pair.measure(real.SharedMemory, place, SIZES, PLAN)
    assert [(outcome.status, outcome.bytes) for outcome in outcomes] == [("measured", size) for size in SIZES]
    assert [len(outcome.awaited_ns) for outcome in outcomes] == [8, 8]


def test_a_contestant_whose_data_is_wrong_has_failed(place):
    [outcome] = pair.measure(rivals.Liar, place, [rivals.SMALL], PLAN)
    assert outcome.status == "failed" and "wrong data" in outcome.reason


def test_a_contestant_that_hangs_is_ended_and_has_failed(place, monkeypatch):
    monkeypatch.setattr(pair, "SIZE_SECONDS", 1.0)
    [outcome] = pair.measure(rivals.Silent, place, [rivals.SMALL], PLAN)
    assert outcome.status == "failed" and "said nothing" in outcome.reason


def test_a_contestant_that_dies_at_one_size_is_measured_at_the_next(place):
    outcomes = pair.measure(rivals.Mortal, place, SIZES, PLAN)
    assert [outcome.status for outcome in outcomes] == ["failed", "measured"]
    assert "B ended with exit code 7" in outcomes[0].reason


def test_a_contestant_that_lacks_a_package_is_skipped_with_the_reason(place):
    outcomes = pair.measure(rivals.Absent, place, SIZES, PLAN)
    assert {(outcome.status, outcome.reason) for outcome in outcomes} == {
        ("skipped", "nothing_of_that_name cannot be imported")
    }
    assert len(outcomes) == 2


def test_a_size_that_a_contestant_is_not_asked_for_is_skipped_with_the_reason(place, monkeypatch):
    monkeypatch.setattr(real.SharedMemory, "bytes_max", rivals.SMALL)
    monkeypatch.setattr(real.SharedMemory, "bytes_max_reason", "too large")
    outcomes = pair.measure(real.SharedMemory, place, SIZES, PLAN)
    assert [(outcome.status, outcome.reason) for outcome in outcomes] == [("measured", ""), ("skipped", "too large")]


def test_the_report_names_the_kernel_that_a_contestant_ran():
    def named(contestant, device, other_device):
        place = pair.Place("somewhere", device, other_device, "")
        return figures.record(pair._outcome(contestant, place, 4096, "skipped"))["kernel"]

    one, two = ("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")
    assert named(ours.Loaned, *one) == named(ours.Loaned, *two) == named(real.QueueKept, *one) == "direct"
    assert named(ours.LoanedToPyTorch, *two) == named(real.QueueOfPyTorch, *one) == "PyTorch's add"
    assert [named(real.QueueKept, *two), named(real.QueueOfPyTorch, *two)] == ["copy_, direct", "copy_, PyTorch's add"]
    assert named(ours.Loaned, "host", "host") == named(real.SharedMemory, "host", "host") == "NumPy's add"


def test_what_is_wanted_is_asked_of_contestants_with_the_same_kernel():
    compared = [contestant for contestant in ours.ON_GPUS + real.ON_GPUS if contestant.role in ("ours", "usual")]
    assert {contestant.kernel for contestant in compared} == {"direct"}
    assert {contestant.role for contestant in compared} == {"ours", "usual"}
    beside = figures.record(
        pair.Outcome("usual", "usual, PyTorch's add", "one device", 4096, "measured", "", [1.0], [1000])
    )
    assert {figure["ratio"] for figure in figures.figures([*records(10.0, 60.0), beside], "mps", rust.Rust())} == {6.0}


@pytest.mark.parametrize("count", [arrays.HEAD, 3 * arrays.HEAD])
def test_a_kernel_adds_to_the_head_of_an_array_and_to_nothing_else(count):
    numpy = arrays.NumPy()
    source, target = numpy.zeros(count), numpy.zeros(count)
    numpy.adder(count, arrays.DIRECT)(source, target)
    assert numpy.values(target) == [1.0] * arrays.HEAD
    assert target.sum() == arrays.HEAD and not source.any()


def records(ours_us, *usual_us, place="one device", size=4096):
    def of(name, role, us):
        outcome = pair.Outcome(name, role, place, size, "measured", "", [us], [int(us * 1000)])
        return figures.record(outcome)

    return [of("warpipe, loan", "ours", ours_us), *(of(f"usual {us}", "usual", us) for us in usual_us)]


@pytest.mark.parametrize(
    "mode, place, usual, met",
    [("mps", "one device", 100.0, True), ("mps", "one device", 99.0, False),
     ("time-sliced", "one device", 12.5, True), ("time-sliced", "one device", 12.0, False),
     ("time-sliced", "two devices", 100.0, True), ("time-sliced", "two devices", 99.0, False),
     ("host", "one device", 1.0, None)],
)
def test_what_is_wanted_beside_the_usual_way_depends_on_how_a_gpu_is_shared(mode, place, usual, met):
    made = figures.figures(records(10.0, usual, place=place), mode, rust.Rust())
    assert [figure["met"] for figure in made] == [met, met]


def test_the_fastest_of_the_usual_ways_is_the_one_to_beat():
    made = figures.figures(records(10.0, 500.0, 60.0, 90.0), "mps", rust.Rust())
    assert {figure["ratio"] for figure in made} == {6.0}


@pytest.mark.parametrize("bare, met", [(30.0, True), (29.0, False)])
def test_python_may_add_fifteen_microseconds(bare, met):
    name = "kernel -> kernel, one device, sent"
    measured = rust.Rust("measured", "", [{"name": name, "ours": bare, "ours_ns": {"p50": int(bare * 1000)}}])
    made = figures.figures(records(45.0), "mps", measured)
    assert [figure["met"] for figure in made] == [met, met]


def test_quantiles_are_ranks_of_the_sorted_samples():
    found = figures.quantiles(list(range(1000, 0, -1)))
    assert found == {"count": 1000, "p50": 500, "p90": 900, "p99": 990, "max": 1000}
    assert figures.quantiles([]) is None


def test_a_contestant_that_failed_is_in_the_table_with_its_reason():
    failed = figures.record(pair.Outcome("other", "other", "one device", 4096, "failed", "it burnt"))
    text = figures.table([*records(10.0, 100.0), failed])
    assert "failed: it burnt" in text and "10.00" in text


def test_a_rust_program_that_fails_is_told_and_one_that_is_not_there_is_skipped():
    assert rust.measure(None, "host", 1, True).status == "skipped"
    failed = rust.measure("false", "host", 1, True)
    assert failed.status == "failed" and "bench handoff" in failed.reason


def test_a_plot_of_nothing_is_still_a_picture():
    assert plot.svg([], "nothing").endswith("</svg>\n")


@pytest.mark.parametrize("values", [[10.0], [0.3, 0.31], [19.9, 20.0, 51.0], [1.0, 123456.0]])
def test_a_plot_has_its_points_between_its_marks_and_its_names_apart(values):
    drawn = plot.svg([record for value in values for record in records(value, value)], "a title")
    root = xml.etree.ElementTree.fromstring(drawn)
    top, bottom = plot.TOP, plot.CHART_HEIGHT - plot.BOTTOM
    points = [float(at.get("cy")) for at in root.iter("{http://www.w3.org/2000/svg}circle")]
    assert all(top <= at <= bottom for at in points) and len(points) > len(values)
    names = [at for at in root.iter("{http://www.w3.org/2000/svg}text") if float(at.get("x", 0)) > plot.WIDTH - plot.RIGHT]
    heights = sorted(float(at.get("y")) for at in names)
    assert len(names) > 1 and all(below - above >= 12 for above, below in zip(heights, heights[1:]))


def test_what_a_gather_costs_is_measured_beside_a_plain_copy(tmp_path):
    out = tmp_path / "gather.json"
    command = [sys.executable, "-m", "warpipe.bench.gather", "--device", "host", "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) > 10 and all(set(row["us"]) == {"ours", "floor", "NumPy"} for row in rows)
    assert all(row["ratio"] > 0 and row["name"] in done.stdout for row in rows)
