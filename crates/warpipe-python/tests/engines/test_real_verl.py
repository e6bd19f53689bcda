"""verl 0.9 itself: its registry, its configuration, and how its manager connects the engines before an update."""

import asyncio

import pytest
from conftest import LIMIT_SECONDS
from needed import needed

from warpipe import weights

base = needed("verl.checkpoint_engine.base")
torch = pytest.importorskip("torch")
ray = pytest.importorskip("ray")


class Group:
    """A worker group of verl, whose workers are of this process."""

    def __init__(self, engines):
        self.engines, self.world_size = engines, len(engines)

    def execute_checkpoint_engine(self, method, **given):
        columns = [dict(zip(given, values, strict=True)) for values in zip(*given.values(), strict=True)] or [{}] * self.world_size
        return [ray.put(getattr(one, call)(**more)) for one, call, more in zip(self.engines, method, columns, strict=True)]


@pytest.fixture
def cluster():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


async def received(engine):
    return {name: tensor async for name, tensor in engine.receive_weights(global_steps=1)}


def test_a_manager_of_verl_sends_an_update_to_two_rollouts(cluster, domain, monkeypatch):
    monkeypatch.setattr("warpipe._transfer.keep", lambda name, domain: None)
    own = {"name": "policy", "domain": str(domain.path), "wait": LIMIT_SECONDS}
    config = base.CheckpointEngineConfig(
        backend="warpipe", custom_backend_module="warpipe.verl", engine_kwargs={"warpipe": own}
    )
    base.import_external_libs(config.custom_backend_module)
    more = {"bucket_size": config.update_weights_bucket_megabytes << 20, **config.engine_kwargs[config.backend]}
    trainers = [base.CheckpointEngineRegistry.new(config.backend, is_master=rank == 0, **more) for rank in range(2)]
    rollouts = [base.CheckpointEngineRegistry.new(config.backend, **more) for _ in range(2)]
    manager = base.CheckpointEngineManager(config, Group(trainers), [])

    async def update(step):
        waiting = [asyncio.create_task(received(one)) for one in rollouts]
        for one in trainers:
            await one.send_weights(((name, torch.full((3,), float(step))) for name in "ab"), global_steps=step)
        return await asyncio.gather(*waiting)

    with weights.keep("policy", domain=domain):
        for step in (1, 2):
            manager.build_process_group(Group(rollouts))
            for found in asyncio.run(update(step)):
                assert {name: tensor.unique().tolist() for name, tensor in found.items()} == {"a": [step], "b": [step]}
            for one in [*trainers, *rollouts]:
                one.finalize()
                assert one.wire_format == "named_tensors"
        for one in trainers:
            one._published and one._published.close()
