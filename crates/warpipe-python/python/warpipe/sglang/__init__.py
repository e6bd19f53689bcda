"""Weights of SGLang: one copy for all engines of a GPU, and new versions from a trainer.

``sglang serve --model-path MODEL --load-format warpipe`` takes the weights of an engine that runs, else loads them as usual
and publishes them. SGLang finds this module by its entry point ``sglang.srt.plugins``. ``--model-loader-extra-config`` takes
``name`` (instead of one that is made of the model and the settings), ``domain``, ``keeper`` (false: start none),
``allow_uids`` (other users that the keeper admits), ``owner`` (the user of the domain, if that is another one: weights are
opened there, and none published), ``load_format`` (how the first engine loads, ``auto``), and what that loader takes.

An engine of another load format has memory of its own, and takes a trainer's versions with
``--custom-weight-loader warpipe.sglang.load_published``:

>>> from warpipe.sglang import Trainer, announced                      # doctest: +SKIP
>>> trainer = Trainer("policy")                                        # doctest: +SKIP
>>> [version] = trainer.send(model.named_parameters())                 # doctest: +SKIP
>>> engine.update_weights_from_tensor(                                 # doctest: +SKIP
...     announced("policy", version), load_format="warpipe.sglang.load_published")

Tested with SGLang 0.5.23, on a CPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from .. import weights
from .._attach import _attached
from .._errors import ArgumentError
from .._transfer import Trainer

__all__ = ["Trainer", "announced", "load_published", "register"]

_FORMAT = "warpipe"
# Before the name of the weights, which stands for a tensor's.
_MARK = "warpipe:"
# A trainer has published the version by the time that it is announced.
_WAIT_SECONDS = 60.0


def register() -> None:
    """Adds the load format to the SGLang that is installed, which calls this in each of its processes."""
    choices = importlib.import_module("sglang.srt.arg_groups.choices")
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    if _FORMAT not in choices.LOAD_FORMAT_CHOICES:
        choices.add_load_format_choices([_FORMAT])
    target = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"
    hooks.HookRegistry.register(target, _verify_load_format, hooks.HookType.AROUND)


def _verify_load_format(original: Any, config: Any) -> None:
    # SGLang takes a loader's class in the place of a format that it knows.
    if config.load_format == _FORMAT:
        config.load_format = importlib.import_module("warpipe.sglang._loader").Loader
    else:
        original(config)


def announced(name: str, version: int) -> list[tuple[str, Any]]:
    """What ``update_weights_from_tensor`` takes for ``load_published``: the name of the weights, and the version's number
    in a tensor of one element."""
    return [(_MARK + name, importlib.import_module("torch").tensor([version]))]


def load_published(model: Any, named_tensors: Sequence[tuple[str, Any]]) -> None:
    """For ``--custom-weight-loader``: copies the version that ``announced`` names into the model, each rank its part.
    The weights are those of a checkpoint, and are opened for that time alone.

    Raises ``ArgumentError`` for other tensors, and for a model of ``--load-format warpipe``, whose weights may only be
    read; as ``weights.open``.
    """
    names = [name for name, _ in named_tensors]
    if len(names) != 1 or not names[0].startswith(_MARK):
        raise ArgumentError(f"the tensors are {names[:3]}; give warpipe.sglang.announced(name, version)")
    tensors = list(model.parameters())
    if any(tensor in _attached() for tensor in tensors):
        said = "the model has shared weights, which may only be read"
        raise ArgumentError(f"{said}; start an engine that takes a trainer's versions without --load-format {_FORMAT}")
    place = tensors[0].device
    device = "host" if place.type == "cpu" else str(place)
    shared = weights.open(names[0].removeprefix(_MARK), device=device, wait=_WAIT_SECONDS)
    version = int(named_tensors[0][1])
    while shared.version < version:
        shared = shared.newer(_WAIT_SECONDS)
    model.load_weights((name, view.torch()) for name, view in shared.items())
    if place.type == "cuda":
        # The memory is read until here.
        importlib.import_module("torch").cuda.synchronize(place)
