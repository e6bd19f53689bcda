"""The checkpoint engine ``warpipe`` of verl: a trainer's weights to the rollouts of one machine.

.. code-block:: yaml

    actor_rollout_ref:
      rollout:
        checkpoint_engine:
          backend: warpipe
          custom_backend_module: warpipe.verl
          engine_kwargs: {warpipe: {name: policy}}

Each update is one version. It lies in the trainer's GPU until the next update, and rollouts read it where it lies. Tested with
verl 0.9, on a CPU.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from . import _transfer, weights
from ._engines import device
from ._errors import ArgumentError

__all__ = ["WarpipeCheckpointEngine"]

# The key of a version's metadata that has the update's own name.
_UPDATE = "verl"


@CheckpointEngineRegistry.register("warpipe")
class WarpipeCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """verl makes one in each process of the trainer and of the rollouts.

    ``name`` is that of the weights, ``domain`` as everywhere, and ``wait`` the seconds in which an update has to come.
    """

    def __init__(
        self, bucket_size: int, is_master: bool = False, name: str = "verl", domain: Any = None, wait: float = 1800.0
    ) -> None:
        self.bucket_size, self.is_master = bucket_size, is_master
        self._name, self._domain, self._wait = name, domain, wait
        self._update: str | None = None
        # While it is open, the next keeper takes the version over from this process.
        self._published: Any = None

    def prepare(self) -> dict[str, Any]:
        with open("/proc/sys/kernel/random/boot_id") as file:
            machine = file.read().strip()
        if self.is_master:
            _transfer.keep(self._name, domain=self._domain)
        return {"machine": machine, "update": uuid.uuid4().hex if self.is_master else None}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        machines = {one["machine"] for one in metadata}
        if len(machines) > 1:
            said = f"the trainer and the rollouts run on {len(machines)} machines, and memory is shared on one"
            raise ArgumentError(f"{said}; use the backend nccl or nixl")
        [update] = [one["update"] for one in metadata if one["update"] is not None]
        return {"update": [update] * actor_wg_world_size}, {"update": [update] * rollout_world_size}

    def init_process_group(self, update: str) -> None:
        self._update = update

    def finalize(self) -> None:
        self._update = None

    async def send_weights(self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None) -> None:
        """Publishes the tensors of the master as one version."""
        with torch.no_grad():
            if not self.is_master:
                # Gathering a sharded tensor is a collective of all ranks.
                for _ in weights:
                    pass
                return
            self._publish(weights, global_steps)

    def _publish(self, pairs: Iterable[tuple[str, Any]], global_steps: int | None) -> None:
        # Each tensor is copied as it comes, so that the trainer never has all of them gathered beside the version.
        arena = _transfer.Arena(device())
        state = {name: arena.copied(tensor.detach()) for name, tensor in pairs}
        former, self._published = self._published, weights.publish(
            self._name, state, device=device(), domain=self._domain, wait=self._wait, hash="later", zero_copy="require",
            metadata={_UPDATE: self._update, "global_steps": global_steps},
        )  # fmt: skip
        if former is not None:
            former.close()

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, Any], None]:
        """The tensors of this update, where they lie: they may only be read.

        Raises ``TimeoutError`` when no version came in time, as when the trainer has died.
        """
        watch = weights.watch(self._name, device=device(), domain=self._domain)
        try:
            shared = await asyncio.wait_for(self._of_this_update(watch), self._wait)
        finally:
            watch.close()
        for name, view in shared.items():
            yield name, view.torch()

    async def _of_this_update(self, watch: Any) -> Any:
        async for shared in watch:
            if isinstance(shared.metadata, dict) and shared.metadata.get(_UPDATE) == self._update:
                return shared
        raise AssertionError("a watch goes on until it is closed")
