"""SGLang 0.5.23 itself, on a CPU: its plugins, its command line, its load formats, its loaders and a model of it."""

import contextlib
import json
import pathlib

import pytest
from conftest import LIMIT_SECONDS, until
from engine_process import Engine, drop, llama
from needed import needed

from warpipe import weights

needed("sglang.srt.plugins")

PROGRAM = pathlib.Path(__file__).with_name("sglang_engine.py")


@pytest.fixture
def start(domain):
    """Starts engines on a folder, which end with the test."""
    with contextlib.ExitStack() as stack:
        own = {"domain": str(domain.path)}
        yield lambda folder, load_format="warpipe": Engine(
            stack, PROGRAM, folder, load_format, json.dumps(own if load_format == "warpipe" else {})
        )


def test_engines_share_one_copy_which_outlives_the_first_one_and_the_keeper(start, domain, tmp_path):
    llama(tmp_path, 1)
    plain = start(tmp_path, "auto").said()
    assert plain["name"] is None
    first = start(tmp_path)
    begun = first.said()
    second = start(tmp_path)
    told = second.said()
    assert (begun["how"], told["how"]) == ("PublishedWeights", "SharedWeights")
    assert begun["digest"] == told["digest"] == plain["digest"]
    first.process.kill()
    drop(begun["name"], domain)
    assert second.asked("again")["digest"] == plain["digest"]
    until(lambda: not any(one.name == begun["name"] and one.alive for one in domain.endpoints()), "the end of the keeper")
    third = start(tmp_path).said()
    assert (third["how"], third["digest"]) == ("SharedWeights", plain["digest"])
    drop(begun["name"], domain)


def test_an_engine_of_its_own_memory_takes_a_trainers_version(start, domain, tmp_path, monkeypatch):
    monkeypatch.setenv("WARPIPE_DOMAIN", str(domain.path))
    llama(tmp_path / "one", 1)
    trained = llama(tmp_path / "two", 2)
    engine = start(tmp_path / "one", "auto")
    before, wanted = engine.said()["digest"], start(tmp_path / "two", "auto").said()["digest"]
    with weights.keep("policy", domain=domain):
        options = {"device": "host", "domain": domain, "wait": LIMIT_SECONDS}
        with weights.publish("policy", trained.state_dict(), **options) as published:
            assert before != wanted == engine.asked("take", "policy", published.version)["digest"]
