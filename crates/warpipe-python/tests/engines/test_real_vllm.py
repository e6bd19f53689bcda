"""vLLM 0.33 itself, on a CPU: its plugins, its load formats, its loaders and a model of it, and both halves of its weight
transfer."""

import contextlib
import json
import pathlib
import socket

import pytest
from conftest import until
from engine_process import Engine, drop, llama
from needed import needed

from warpipe import _transfer

needed("vllm.plugins")

PROGRAM = pathlib.Path(__file__).with_name("vllm_engine.py")


@pytest.fixture
def start(domain):
    """Starts engines on a folder, which end with the test."""
    with contextlib.ExitStack() as stack:

        def start(folder, load_format="warpipe", *, rank=0, ranks=1, port=None, **extra):
            own = {"domain": str(domain.path), **extra} if load_format == "warpipe" else {}
            return Engine(stack, PROGRAM, folder, load_format, json.dumps(own), rank, ranks, port or free_port())

        yield start


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Client:
    """Brings a trainer's calls to engines, as vLLM's own clients do."""

    def __init__(self, engines):
        self.engines, self.said = engines, []

    def __getattr__(self, call):
        def told(*info):
            self.said = [engine.asked(call, *info) for engine in self.engines]

        return told


def test_engines_share_one_copy_which_outlives_the_first_one_and_the_keeper(start, domain, tmp_path):
    llama(tmp_path, 1)
    plain = start(tmp_path, "auto").said()
    assert plain["name"] is None
    first, second = start(tmp_path), start(tmp_path)
    begun, told = first.said(), second.said()
    assert begun["name"] == told["name"] and begun["digest"] == told["digest"] == plain["digest"]
    first.process.kill()
    drop(begun["name"], domain)
    assert second.asked("again")["digest"] == plain["digest"]
    until(lambda: not any(one.name == begun["name"] and one.alive for one in domain.endpoints()), "the end of the keeper")
    third = start(tmp_path).said()
    assert (third["name"], third["digest"]) == (begun["name"], plain["digest"])
    drop(begun["name"], domain)


def test_vllms_trainer_sends_its_weights_to_two_engines_that_share_them(start, domain, tmp_path):
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.base import ModuleSource

    from warpipe.vllm import trainer_init_info

    llama(tmp_path / "one", 1)
    trained = llama(tmp_path / "two", 2)
    wanted = start(tmp_path / "two", "auto").said()["digest"]
    engines = [start(tmp_path / "one", name="policy") for _ in range(2)]
    before = [engine.said()["digest"] for engine in engines]
    client = Client(engines)
    info = trainer_init_info("policy", devices=["host"], domain=str(domain.path))
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(trained))
    trainer.send_weights()
    assert [one["digest"] for one in client.said] == [wanted] * 2 != before
    assert start(tmp_path / "one", name="policy").said()["digest"] == wanted
    trainer.shutdown()
    drop("policy", domain)


def test_two_ranks_are_sent_their_parts_and_do_not_start_with_those_of_two_updates(start, domain, tmp_path):
    llama(tmp_path / "one", 1)
    trained = llama(tmp_path / "two", 2)
    names = _transfer.ranks("policy", 2)

    def pair(folder, load_format="warpipe", **extra):
        port = free_port()
        return [start(folder, load_format, rank=rank, ranks=2, port=port, **extra) for rank in range(2)]

    wanted = [engine.said()["digest"] for engine in pair(tmp_path / "two", "auto")]
    engines = pair(tmp_path / "one", name="policy")
    assert [engine.said()["name"] for engine in engines] == names
    trainer = _transfer.Trainer(names, devices=["host"] * 2, domain=domain)
    versions = dict(zip(names, trainer.send(trained.state_dict()), strict=True))
    assert [engine.asked("update_weights", {"versions": versions})["digest"] for engine in engines] == wanted
    for engine in engines:
        engine.process.kill()
    engines = pair(tmp_path / "one", name="policy")
    assert [engine.said()["digest"] for engine in engines] == wanted
    trainer.close()
    for engine in engines:
        engine.process.kill()
        engine.process.wait()
    # Nobody has the second rank's version any more.
    drop(names[1], domain)
    for engine in pair(tmp_path / "one", name="policy"):
        with pytest.raises(AssertionError, match="the engine ended with 1"):
            engine.said()
    for name in names:
        drop(name, domain)
