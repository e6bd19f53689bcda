"""TRL's asynchronous trainers (``AsyncGRPOTrainer``, ``AsyncDistillationTrainer``) and engines of vLLM on one machine.

>>> from trl.experimental.async_grpo.vllm_client import VLLMClient     # doctest: +SKIP
>>> from warpipe.trl import WeightTransfer                             # doctest: +SKIP
>>> transfer = WeightTransfer("policy", VLLMClient("http://localhost:8000"))
>>> trainer = AsyncGRPOTrainer(..., weight_transfer=transfer)          # doctest: +SKIP

The engine was started with ``--weight-transfer-config '{"backend": "warpipe"}'`` and ``VLLM_SERVER_DEV_MODE=1``, vLLM 0.28 or
later; with ``--load-format warpipe --model-loader-extra-config '{"name": "policy"}'`` it takes a version without a copy.
Tested with TRL 1.16.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from ._errors import ArgumentError
from ._transfer import Trainer, ranks as names_of_ranks

__all__ = ["Client", "WeightTransfer"]


class Client(Protocol):
    """What tells one server of its new weights: TRL's ``VLLMClient``."""

    def wait_for_server_ready(self) -> None: ...
    def init_weight_transfer_engine(self, init_info: dict[str, Any], /) -> None: ...
    def pause(self) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: dict[str, Any], /) -> None: ...
    def finish_weight_update(self) -> None: ...
    def resume(self) -> None: ...


class WeightTransfer:
    """TRL's ``WeightTransferProtocol``: each update is one version, for all servers.

    ``name`` is that of the weights, ``ranks`` how many ranks an engine has (tensor times pipeline parallel), and
    ``devices`` the device of each, as of ``warpipe.vllm.Trainer``. With ``changed`` the trainer sends some of the
    parameters, since it has frozen others. A server has all of the former version or all of the new one; if the trainer
    dies before all is published, nothing has changed.
    """

    def __init__(
        self, name: str, *clients: Client, ranks: int = 1, devices: Sequence[Any] | None = None, domain: Any = None,
        changed: bool = False,
    ) -> None:  # fmt: skip
        if not clients:
            raise ArgumentError("there is no server to tell; give a client of each, as trl's VLLMClient(url)")
        self._clients = clients
        self._info = {"name": name, "domain": None if domain is None else os.fspath(domain)}
        self._trainer, self._changed = Trainer(names_of_ranks(name, ranks), devices=devices, domain=domain), changed

    def init_weight_transfer(self) -> None:
        """Waits for the servers, and tells each the name of the weights."""
        for client in self._clients:
            client.wait_for_server_ready()
            client.init_weight_transfer_engine(self._info)

    def pause(self) -> None:
        for client in self._clients:
            client.pause()

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Publishes the tensors as the next version, and has each server take it. Raises as ``warpipe.vllm.Trainer.send``."""
        versions = dict(zip(self._trainer.names, self._trainer.send(iterator, changed=self._changed), strict=True))
        for client in self._clients:
            client.start_weight_update()
            client.update_weights({"versions": versions})
            client.finish_weight_update()

    def resume(self) -> None:
        for client in self._clients:
            client.resume()

    def destroy(self) -> None:
        """Ends this process's part. The servers keep their weights."""
        self._trainer.close()
