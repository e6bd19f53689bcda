"""The benchmark of vLLM, without vLLM: what it says of its figures, and how it talks to an engine."""

import gc
import json
import sys
import types

import pytest

from warpipe.bench import vllm, vllm_engine

FURTHER = {
    "load_model": 0.2, "load_steps": {"worker": 1.4, "loader": 0.2}, "collections_s": 1.2,
    "model": {"bytes": 7 << 30, "took": {"open": 0.004, "weights": 0.003}},
}  # fmt: skip
OURS = {
    "engines": [{}, FURTHER],
    "sync_s": [0.015, 0.019, 0.012], "memory_gib": {"1": 9.0, "2": 11.0, "4": 15.0},
    "same_tokens": [True], "same_new_tokens": [True], "graphs_same_new_tokens": True,
}  # fmt: skip
PLAIN = {"engines": [{}, {"load_model": 1.0}], "sync_s": [0.1, 0.05, 0.06], "memory_gib": {"1": 9.0, "2": 18.0, "4": 36.0}}


def test_each_figure_is_told_with_what_was_wanted_and_a_part_that_failed_is_named():
    report = {"parts": {"plain": PLAIN, "ours": OURS}, "failed": {"fp8": "RuntimeError: no"}, "left_out": ["kills"]}
    told = vllm.verdicts(report)
    assert "ok    weights of a further engine, ms: 7.0 (wanted <= 10)" in told
    assert "ok    a version from the trainer's call to two engines, median, ms: 15.0 (wanted <= 20)" in told
    assert "ok    ours / vLLM's: 0.25 (wanted <= 1/3)" in told
    assert "ok    weights of a further engine, GiB: 0.0 (wanted 0)" in told
    assert "ok    load_model of a further engine, s: 0.2 (wanted <= 0.35)" in told
    assert "collections of garbage: (1.4, 1.2)" in told
    assert told.endswith("FAIL  fp8: RuntimeError: no\nleft out for its time: kills")
    slow = {**report, "parts": {"plain": PLAIN, "ours": OURS | {"sync_s": [0.03]}}}
    assert "MISS  a version from the trainer's call to two engines, median, ms: 30.0" in vllm.verdicts(slow)


def test_a_report_has_its_figures_beside_vllms_own():
    rows = vllm.beside({"parts": {"plain": PLAIN, "ours": OURS}})
    assert [(row["unit"], row["theirs"], row["ours"]) for row in rows] == [
        ("ms", 1000.0, 200.0), ("ms", 60.0, 15.0), ("GiB", 9.0, 9.0), ("GiB", 18.0, 11.0), ("GiB", 36.0, 15.0),
    ]  # fmt: skip
    assert vllm.beside({"parts": {"ours": OURS}}) == []


def test_a_part_that_there_is_not_is_an_error_which_names_the_parts(capsys):
    with pytest.raises(SystemExit):
        vllm.main(["--parts", "plain,kill"])
    assert "there is no part kill; the parts are model, floor, plain, ours, in place, kills, fp8" in capsys.readouterr().err


def test_the_seconds_of_a_loaders_steps_and_of_the_garbage_meanwhile_are_told():
    class Loader:
        def load_model(self):
            gc.collect()
            return "model"

    owner = types.SimpleNamespace(get_loader=lambda: Loader(), load=lambda: owner.get_loader().load_model())
    timed = vllm_engine._Timed()
    timed.time(owner, "load", "worker")
    timed.time(owner, "get_loader", "loader", of_result="load_model")
    gc.callbacks.append(timed.collection)
    try:
        gc.collect()
        outside = timed.collections_s
        assert owner.load() == "model"
    finally:
        gc.callbacks.remove(timed.collection)
    assert outside == 0.0 < timed.collections_s <= timed.took["loader"] <= timed.took["worker"]


ENGINE = """
import json, sys
print(json.dumps({"given": json.loads(sys.argv[1])}), flush=True)
for line in sys.stdin:
    command = json.loads(line)
    if command["do"] == "die":
        print("ValueError: the last words", file=sys.stderr)
        sys.exit(3)
    print(json.dumps({"error": "no"} if command["do"] == "fail" else {"tokens": command["do"]}), flush=True)
"""


def test_an_engine_answers_each_command_and_its_errors_and_its_end_are_told_with_its_last_words(tmp_path):
    engine = vllm.Engine({"a": 1}, tmp_path / "log", [sys.executable, "-c", ENGINE])
    assert engine.ready() == {"given": {"a": 1}}
    assert engine.tokens() == "generate"
    with pytest.raises(RuntimeError, match="an engine says no"):
        engine.do(do="fail")
    with pytest.raises(RuntimeError, match="an engine ended with 3: ValueError: the last words"):
        engine.do(do="die")
    engine.kill()


STANDIN = """
import json, sys
given = json.loads(sys.argv[1])
took = {"open": 0.002, "weights": 0.003} | ({"publish": 0.1} if given["model_loader_extra_config"].pop("loads", 0) else {})
model = {"bytes": 7 << 30, "took": took, "copied": 0}
print(json.dumps({"load_model": 0.2, "load_steps": {"worker": 0.3}, "collections_s": 0.1, "first_token": 9.0, "model": model}), flush=True)
version = 0
for line in sys.stdin:
    command = json.loads(line)
    if command["do"] == "update" and not isinstance(command["info"], str):
        version = list(command["info"]["versions"].values() or [version])[0]
    elif command["do"] == "update":
        version = 1
    told = {"tokens": str(version), "seconds": 0.01, "steps": {"update": 0.01}, "taken": {"map": 0.002}, "reopen_s": [0.001]}
    print(json.dumps(told), flush=True)
"""


class Tensor:
    nbytes = 1 << 28

    def flip(self, _):
        return self


def test_each_part_runs_with_engines_and_fills_the_report(tmp_path, monkeypatch):
    starts = []

    def start(run, load_format, **options):
        # The first of those in place loads, and the second one attaches.
        kind = "in place" if load_format == "warpipe" and not options else "another"
        extra = {"loads": kind == "in place" not in starts, **options.pop("extra", {})}
        starts.append(kind)
        given = {"model_loader_extra_config": extra, **options}
        engine = vllm.Engine(given, tmp_path / f"log-{len(starts)}", [sys.executable, "-c", STANDIN])
        run.engines.append(engine)
        return engine

    class Trainer:
        took = {"copies": 0.006}

        def __init__(self, *_, **__):
            self.number = 0

        def send(self, _, changed=False, same_layout=True):
            self.number = 2 if changed else 1
            return [self.number]

        def close(self):
            pass

    def sent_by_ipc(run, engines):
        for engine in engines:
            engine.do(do="update", info="", checkpoint=True)
        return {"sync_s": [0.1], "new_tokens": engines[0].tokens()}

    def model(run):
        run.new = {"lm_head.weight": Tensor(), "model.norm.weight": Tensor()}
        return {}

    for name, stub in {
        "used": lambda: 1 << 30, "settled": lambda wanted: wanted, "_sent_by_ipc": sent_by_ipc, "sharing": lambda kind: "host",
        "_kill_keeper": lambda run: True, "_kill_trainer": lambda run, engine, wanted: {"same_tokens": True},
    }.items():  # fmt: skip
        monkeypatch.setattr(vllm, name, stub)
    monkeypatch.setattr(vllm.Run, "start", start)
    monkeypatch.setattr(vllm._transfer, "Trainer", Trainer)
    monkeypatch.setattr(vllm.warpipe, "Device", lambda name: host)
    monkeypatch.setattr(vllm.random.Random, "uniform", lambda *_: 0.0)
    monkeypatch.setattr(vllm, "PARTS", [("model", model), *(pair for pair in vllm.PARTS if pair[0] not in ("model", "floor"))])
    out = tmp_path / "report.json"
    vllm.main(["--out", str(out), "--work", str(tmp_path / "work"), "--kills", "11"])
    report = json.loads(out.read_text())
    assert report["failed"] == {} and report["left_out"] == []
    ours = report["parts"]["ours"]
    assert ours["sync_trainer_steps"] == [{"copies": 0.006}] * 7 and len(ours["sync_engines_steps"][0]) == 2
    assert ours["changed_shared_publish_s"] and ours["reopen_s"] == [0.001]
    assert report["parts"]["kills"]["killed"] == 11 and report["parts"]["in place"]["further"]["model"]["took"] == {
        "open": 0.002, "weights": 0.003,
    }  # fmt: skip
    assert len(report["beside"]) == 5


def test_a_part_that_fails_leaves_the_report_of_the_others(tmp_path, monkeypatch, capsys):
    def failing(run):
        raise RuntimeError("it broke")

    monkeypatch.setattr(vllm, "PARTS", [("one", lambda run: {"a": 1}), ("two", failing), ("three", lambda run: {"b": 2})])
    monkeypatch.setattr(vllm.warpipe, "Device", lambda name: host)
    monkeypatch.setattr(vllm, "sharing", lambda kind: "host")
    out = tmp_path / "report.json"
    assert vllm.main(["--out", str(out), "--work", str(tmp_path / "work")]) == 1
    report = json.loads(out.read_text())
    assert report["parts"].keys() == {"one", "three"} and report["failed"] == {"two": "RuntimeError: it broke"}
    assert "FAIL  two: RuntimeError: it broke" in capsys.readouterr().out


class host:
    name, uuid, why = "host", "host", "a test"
