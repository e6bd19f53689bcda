"""Weights of vLLM: one copy for all engines of a GPU, and new versions from a trainer.

``vllm serve MODEL --load-format warpipe`` takes the weights of an engine that runs, else loads them as usual and publishes
them. vLLM finds this module by its entry point ``vllm.general_plugins``. ``--model-loader-extra-config`` takes ``name``
(instead of one that is made of the model and the settings), ``domain``, ``keeper`` (false: start none), ``allow_uids`` (other
users that the keeper admits), ``owner`` (the user of the domain, if that is another one: weights are opened there, and none
published), ``load_format`` (how the first engine loads, ``auto``), and what that loader takes.

``--weight-transfer-config '{"backend": "warpipe"}'`` has the engine take versions of a trainer between two steps:

>>> from warpipe.vllm import trainer_init_info                         # doctest: +SKIP
>>> from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
>>> trainer = WeightTransferTrainerFactory.trainer_init(trainer_init_info("policy"), client=client, source=source)
>>> trainer.send_weights()

Tested with vLLM 0.24 and 0.33.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import logging
import sys
from collections.abc import Sequence
from typing import Any

from .._errors import ArgumentError
from .._transfer import Trainer, ranks

__all__ = ["Trainer", "ranks", "register", "trainer_init_info"]

_NAME = "warpipe"
_LOADERS = "vllm.model_executor.model_loader"

_log = logging.getLogger("vllm.warpipe")


def register() -> None:
    """Registers the load format and the backend of weight transfer with the vLLM that is installed. vLLM calls it in each
    of its processes; a trainer that uses vLLM's factories calls it itself."""
    if _LOADERS in sys.modules:
        _register_loader()
    elif not any(isinstance(finder, _LoadersFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _LoadersFinder())
    _register_transfer()


def _register_loader() -> None:
    loaders = importlib.import_module(_LOADERS)
    loader = importlib.import_module("warpipe.vllm._loader").Loader
    if getattr(loaders, "_LOAD_FORMAT_TO_MODEL_LOADER", {}).get(_NAME) is not loader:
        loaders.register_model_loader(_NAME)(loader)


class _LoadersFinder(importlib.abc.MetaPathFinder):
    """Registers the load format when vLLM imports its loaders: hundreds of modules, which only its workers need."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _LOADERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: Any) -> None:
                run(module)
                try:
                    _register_loader()
                except Exception:
                    # Processes that do not use it have their vLLM as it is.
                    _log.exception("The load format %r is not registered with this vLLM", _NAME)

            vars(spec.loader)["exec_module"] = run_and_register
        return spec


def _register_transfer() -> None:
    factories = importlib.import_module("vllm.distributed.weight_transfer.factory")
    # Before 0.28 a trainer has no factory.
    for factory, engine in (
        ("WeightTransferEngineFactory", "WarpipeWeightTransferEngine"),
        ("WeightTransferTrainerFactory", "WarpipeTrainerWeightTransferEngine"),
    ):
        found = getattr(factories, factory, None)
        if found is not None and _NAME not in found._registry:
            found.register_engine(_NAME, "warpipe.vllm._weight_transfer", engine)


def trainer_init_info(
    name: str, *, ranks: int = 1, devices: Sequence[Any] | None = None, domain: Any = None, rank: int = 0
) -> Any:
    """What ``WeightTransferTrainerFactory.trainer_init`` takes, from vLLM 0.28 on: the ``name`` that the engines were given
    in ``--model-loader-extra-config``, how many ``ranks`` an engine has (tensor times pipeline parallel), and the device of
    each, by default ``cuda:0``, ``cuda:1`` and so on. ``rank`` is this trainer process's: rank 0 sends."""
    _register_transfer()
    info = getattr(importlib.import_module("warpipe.vllm._weight_transfer"), "WarpipeTrainerInitInfo", None)
    if info is None:
        said = "the vLLM that is installed has no factory of trainers, which came with 0.28"
        raise ArgumentError(f"{said}; call WarpipeWeightTransferEngine.trainer_send_weights, or update vLLM")
    return info(name=name, ranks=ranks, devices=devices, domain=domain, rank=rank)
