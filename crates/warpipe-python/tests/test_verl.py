"""The checkpoint engine of verl, over a stand-in of its registry. `cargo xtask engines` has the real one."""

import asyncio
import importlib
import sys
import types

import pytest
from conftest import LIMIT_SECONDS

import warpipe
from warpipe import weights

torch = pytest.importorskip("torch")
forgotten = pytest.importorskip("standin_sglang").forgotten
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the stand-ins compute on the CPU, and PyTorch keeps a pool's memory on a GPU"
)


class Registry:
    registered: dict[str, type] = {}

    @classmethod
    def register(cls, backend):
        return lambda engine: cls.registered.setdefault(backend, engine)


@pytest.fixture
def engine(monkeypatch, domain, device):
    """Makes engines as verl does: by the registry, from keywords."""
    for name in ("verl", "verl.checkpoint_engine"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    base = types.ModuleType("verl.checkpoint_engine.base")
    base.CheckpointEngine, base.CheckpointEngineRegistry = type("CheckpointEngine", (), {}), Registry
    monkeypatch.setitem(sys.modules, base.__name__, base)
    forgotten(monkeypatch, "warpipe.verl")
    monkeypatch.setattr("warpipe._transfer.keep", lambda name, domain: None)
    Registry.registered.clear()
    made = importlib.import_module("warpipe.verl")
    monkeypatch.setattr(made, "device", lambda: device)
    with weights.keep("policy", domain=domain):
        yield lambda **more: Registry.registered["warpipe"](
            bucket_size=1 << 20, name="policy", domain=domain, wait=LIMIT_SECONDS, **more
        )


def connected(trainers, rollouts):
    """What verl's manager does before each update."""
    metadata = [one.prepare() for one in [*trainers, *rollouts]]
    for group, given in zip((trainers, rollouts), type(trainers[0]).build_topology(len(trainers), len(rollouts), metadata)):
        assert all(len(values) == len(group) for values in given.values())
        for number, one in enumerate(group):
            one.init_process_group(**{key: values[number] for key, values in given.items()})


async def received(engine):
    return {name: tensor async for name, tensor in engine.receive_weights(global_steps=1)}


def test_rollouts_read_the_update_of_the_master_where_it_lies(engine, domain, device):
    trainers, rollouts = [engine(is_master=True), engine(is_master=False)], [engine(), engine()]
    drawn = []

    def tensors(rank, step):
        for name in "ab":
            drawn.append((rank, name))
            yield name, torch.full((3,), float(step)) if rank == 0 else torch.zeros(3)

    async def update(step):
        # As verl runs them: the rollouts wait before the trainers send.
        waiting = [asyncio.create_task(received(one)) for one in rollouts]
        await asyncio.sleep(0)
        for rank, one in enumerate(trainers):
            await one.send_weights(tensors(rank, step), global_steps=step)
        return await asyncio.gather(*waiting)

    for step in (1, 2, 3):
        drawn.clear()
        connected(trainers, rollouts)
        for found in asyncio.run(update(step)):
            assert {name: tensor.unique().tolist() for name, tensor in found.items()} == {"a": [step], "b": [step]}
        assert drawn == [(rank, name) for rank in (0, 1) for name in "ab"], "gathering is a collective of all ranks"
        shared = weights.open("policy", device=device, domain=domain)
        assert shared.version == step and shared.metadata["global_steps"] == step
        for one in [*trainers, *rollouts]:
            one.finalize()


def test_a_rollout_takes_no_version_of_an_earlier_update(engine, domain):
    trainer, rollout = engine(is_master=True), engine()
    connected([trainer], [rollout])
    asyncio.run(trainer.send_weights([("a", torch.ones(1))]))
    connected([trainer], [rollout])
    rollout._wait = 0.01
    with pytest.raises(TimeoutError):
        asyncio.run(received(rollout))


def test_rollouts_of_another_machine_are_refused_with_what_to_use(engine):
    trainer = engine(is_master=True)
    here = trainer.prepare()
    with pytest.raises(warpipe.ArgumentError, match="2 machines.*nccl"):
        type(trainer).build_topology(1, 1, [here, {**here, "machine": "another", "update": None}])
