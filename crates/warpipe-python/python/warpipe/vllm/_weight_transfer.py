"""The backend ``warpipe`` of vLLM's weight transfer: versions of a trainer, taken between two steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer import base

from .. import _transfer, weights
from .._errors import ArgumentError
from ._loader import loaded

# From 0.28 on an engine brings its update about itself, and a trainer has classes of its own.
_IS_NEW = "vllm_config" in inspect.signature(base.WeightTransferEngine.__init__).parameters


@dataclass
class WarpipeInitInfo(base.WeightTransferInitInfo):  # type: ignore[misc]
    """For engines that were not loaded with ``--load-format warpipe``: the name that the trainer publishes under."""

    name: str | None = None
    domain: str | None = None


@dataclass
class WarpipeUpdateInfo(base.WeightTransferUpdateInfo):  # type: ignore[misc]
    """The number of the version of each name."""

    versions: dict[str, int] | None = None


class WarpipeWeightTransferEngine(base.WeightTransferEngine):  # type: ignore[misc]
    """Takes a trainer's version at the addresses of the last one; the worker calls it between two steps.

    A model that another loader loaded has memory of its own: the version is opened for reading and copied in, each rank
    its part.
    """

    init_info_cls = WarpipeInitInfo
    update_info_cls = WarpipeUpdateInfo

    def __init__(self, *given: Any, **named: Any) -> None:
        # (config, parallel_config, model), or (config, vllm_config, device, model).
        super().__init__(*given, **named)
        self._info = WarpipeInitInfo()

    def init_transfer_engine(self, init_info: WarpipeInitInfo) -> None:
        self._info = init_info
        if loaded(self.model) is None and init_info.name is None:
            said = "this engine was not loaded with --load-format warpipe, and the trainer gave no name"
            raise ArgumentError(f"{said}; give that load format, or a name in the init info")

    def start_weight_update(self) -> None:
        """Of 0.28 and later."""
        if loaded(self.model) is None:
            _reload().initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Of 0.28 and later."""
        if loaded(self.model) is None:
            _reload().finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(
        self, update_info: WarpipeUpdateInfo, load_weights: Callable[[list[tuple[str, Any]]], None] | None = None
    ) -> None:
        versions = update_info.versions or {}
        ours = loaded(self.model)
        if ours is None:
            self._copy(versions, load_weights or self.model.load_weights)
            return
        if versions and ours.name not in versions:
            raise ArgumentError(f"the trainer sent {sorted(versions)}, and this engine has the weights {ours.name!r}")
        stream = None
        if torch.cuda.is_available():
            # Copies of the last step's results may run on other streams.
            torch.cuda.synchronize()
            stream = torch.cuda.current_stream()
        ours.receiver.update(versions.get(ours.name), stream=stream)

    def _copy(self, versions: Mapping[str, int], load_weights: Callable[[list[tuple[str, Any]]], None]) -> None:
        assert self._info.name is not None
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "host"
        shared = weights.open(self._info.name, device=device, domain=self._info.domain, wait=60.0)
        while shared.version < versions.get(self._info.name, 0):
            shared = shared.newer(60.0)
        load_weights([(name, view.torch()) for name, view in shared.items()])
        if torch.cuda.is_available():
            # The memory is read until here.
            torch.cuda.synchronize()

    def shutdown(self) -> None:
        """The model keeps its weights."""

    @staticmethod
    def trainer_send_weights(
        iterator: Iterator[tuple[str, Any]], trainer_args: WarpipeTrainerSendWeightsArgs | dict[str, Any]
    ) -> None:
        """Before 0.28: publishes the trainer's tensors and tells the engines, between their ``start_weight_update`` (with
        ``is_checkpoint_format=False`` for engines of ``--load-format warpipe``) and ``finish_weight_update``."""
        given = WarpipeTrainerSendWeightsArgs(**trainer_args) if isinstance(trainer_args, dict) else trainer_args
        numbers = given.trainer.send(iterator, changed=given.changed, same_layout=given.same_layout)
        given.tell({"versions": dict(zip(given.trainer.names, numbers, strict=True))})


@dataclass
class WarpipeTrainerSendWeightsArgs:
    """For ``trainer_send_weights``."""

    trainer: _transfer.Trainer
    """Made once: ``warpipe.vllm.Trainer(name)``."""
    send_mode: str | Callable[[dict[str, Any]], None] = "http"
    """``http`` with ``url``, ``ray`` with ``llm_handle``, or a function that gives the engines the update info."""
    llm_handle: Any = None
    url: str | None = None
    changed: bool = False
    """Some tensors, and the others as they are."""
    same_layout: bool = True

    def tell(self, info: dict[str, Any]) -> None:
        if callable(self.send_mode):
            self.send_mode(info)
        elif self.send_mode == "ray" and self.llm_handle is not None:
            import ray

            handles = self.llm_handle if isinstance(self.llm_handle, list) else [self.llm_handle]
            ray.get([handle.update_weights.remote({"update_info": info}) for handle in handles])
        elif self.send_mode == "http" and self.url is not None:
            import requests

            requests.post(f"{self.url}/update_weights", json={"update_info": info}, timeout=300).raise_for_status()
        else:
            allowed = '"http" with a url, "ray" with an llm_handle, or a function'
            raise ArgumentError(f"send_mode is {self.send_mode!r}; give {allowed}")


def _reload() -> Any:
    from vllm.model_executor.model_loader import reload

    return reload


if _IS_NEW:

    @dataclass
    class WarpipeTrainerInitInfo(base.TrainerInitInfo):  # type: ignore[misc]
        """For ``WeightTransferTrainerFactory.trainer_init``: see ``warpipe.vllm.trainer_init_info``."""

        backend: ClassVar[str] = "warpipe"
        name: str
        ranks: int = 1
        devices: Sequence[Any] | None = None
        domain: Any = None

    class WarpipeTrainerWeightTransferEngine(base.TrainerWeightTransferEngine):  # type: ignore[misc]
        """Publishes the source's full tensors as one version of each rank of the engines, and tells them its number."""

        init_info_cls = WarpipeTrainerInitInfo

        def __init__(self, *, client: Any, source: Any, is_sender: bool, trainer: _transfer.Trainer) -> None:
            super().__init__(client=client, source=source, is_sender=is_sender)
            self.trainer = trainer

        @classmethod
        def trainer_init(
            cls, init_info: WarpipeTrainerInitInfo, *, client: Any, source: Any = None
        ) -> WarpipeTrainerWeightTransferEngine:
            names = _transfer.ranks(init_info.name, init_info.ranks)
            trainer = _transfer.Trainer(names, devices=init_info.devices, domain=init_info.domain)
            if init_info.is_sender:
                domain = None if init_info.domain is None else str(getattr(init_info.domain, "path", init_info.domain))
                client.init_weight_transfer_engine({"name": init_info.name, "domain": domain})
            return cls(client=client, source=source, is_sender=init_info.is_sender, trainer=trainer)

        def send_weights(
            self, tensors: Mapping[str, Any] | None = None, *, changed: bool = False, same_layout: bool = True
        ) -> None:
            """Sends the source's tensors, or ``tensors``: with ``changed`` some of them, and the others stay."""
            if tensors is None and self.source is None:
                raise ArgumentError("there is nothing to send; give trainer_init a source, or send_weights tensors")
            if not self.is_sender:
                if tensors is None:
                    # Gathering a sharded tensor is a collective of all ranks.
                    for _ in self.source.iter_full():
                        pass
                return
            numbers = self.trainer.send(
                self.source.iter_full() if tensors is None else tensors, changed=changed, same_layout=same_layout
            )
            self.client.start_weight_update()
            self.client.update_weights({"versions": dict(zip(self.trainer.names, numbers, strict=True))})
            self.client.finish_weight_update()

        def shutdown(self) -> None:
            self.trainer.close()
