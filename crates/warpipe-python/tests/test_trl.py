"""TRL's WeightTransferProtocol: each update is a version, and each server is told. `cargo xtask engines` has the real TRL."""

import pytest
from conftest import LIMIT_SECONDS

import warpipe
from warpipe import weights

torch = pytest.importorskip("torch")
trl = pytest.importorskip("warpipe.trl")


class Server:
    """TRL's client of a server, as far as it is called."""

    def __init__(self, seen, number):
        self.seen, self.number = seen, number

    def __getattr__(self, call):
        return lambda *given: self.seen.append((self.number, call, *given))


@pytest.fixture
def keeper(domain):
    with weights.keep("policy", domain=domain) as keeper:
        yield keeper


def test_each_update_is_one_version_that_all_servers_are_told(keeper, domain, device):
    seen = []
    transfer = trl.WeightTransfer("policy", Server(seen, 0), Server(seen, 1), devices=[device], domain=domain)
    told = {"name": "policy", "domain": str(domain.path)}
    transfer.init_weight_transfer()
    assert seen == [
        (number, *call)
        for number in (0, 1)
        for call in (("wait_for_server_ready",), ("init_weight_transfer_engine", told))
    ]
    for step in (1, 2):
        seen.clear()
        transfer.pause()
        transfer.send_weights(iter([("a", torch.full((3,), float(step))), ("b", torch.ones(2))]))
        transfer.resume()
        update = {"versions": {"policy": step}}
        calls = [("start_weight_update",), ("update_weights", update), ("finish_weight_update",)]
        sent = [(number, *call) for number in (0, 1) for call in calls]
        assert seen == [(0, "pause"), (1, "pause"), *sent, (0, "resume"), (1, "resume")]
        shared = weights.open("policy", device=device, domain=domain, wait=LIMIT_SECONDS)
        assert shared.version == step and shared["a"].torch().unique().tolist() == [step]
    transfer.destroy()
    assert keeper.version == 2


def test_parameters_that_are_frozen_stay_as_they_are(keeper, domain, device):
    options = {"device": device, "domain": domain, "wait": LIMIT_SECONDS}
    weights.publish("policy", {"frozen": torch.ones(2), "a": torch.ones(3)}, **options).close()
    transfer = trl.WeightTransfer("policy", Server([], 0), devices=[device], domain=domain, changed=True)
    transfer.send_weights(iter([("a", torch.zeros(3))]))
    shared = weights.open("policy", **options)
    assert shared["frozen"].torch().all() and not shared["a"].torch().any()
    transfer.destroy()


def test_no_server_is_told_of_tensors_that_did_not_come(keeper, domain, device):
    seen = []
    transfer = trl.WeightTransfer("policy", Server(seen, 0), devices=[device], domain=domain)

    def broken():
        yield "a", torch.ones(3)
        raise RuntimeError("gathering failed")

    with pytest.raises(RuntimeError, match="gathering failed"):
        transfer.send_weights(broken())
    assert not seen and keeper.version is None
    with pytest.raises(warpipe.ArgumentError, match=r"VLLMClient\(url\)"):
        trl.WeightTransfer("policy")
