"""Models of Hugging Face's transformers whose weights are published once, and shared by every process that builds one.

>>> import warpipe.transformers
>>> warpipe.transformers.publish(model, "llama")                       # doctest: +SKIP
>>> model = warpipe.transformers.from_published("llama", wait=60)      # doctest: +SKIP

``from_published`` stands for ``from_pretrained``: no file is read, and no weight is allocated or copied.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from . import weights
from ._attach import _places
from ._conversion import is_transformers
from ._errors import ArgumentError, WeightsMismatchError
from ._warpipe import PublishedWeights, SharedWeights

if TYPE_CHECKING:
    import transformers

__all__ = ["from_published", "publish"]

# The key of a version's metadata that has the configuration, and the generation configuration beside it.
_KEY = "transformers"


def from_published(
    name: str | SharedWeights,
    config: transformers.PreTrainedConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    model_class: Any = None,
    generation_config: transformers.GenerationConfig | Mapping[str, Any] | None = None,
    device: Any = None,
    domain: Any = None,
    wait: float | None = 0.0,
    strict: bool = True,
    buffers: str = "share",
    **options: Any,
) -> transformers.PreTrainedModel:
    """Builds a model of transformers on the weights that are offered under ``name``, as ``from_pretrained`` does on
    files: in evaluation mode, without a copy, and without memory of its own but for buffers that are computed.

    ``config`` is a configuration, the dictionary of one, or what ``AutoConfig.from_pretrained`` takes: a folder or a
    model's id. Without it, it is the one that ``publish`` of this module put into the version, and so is
    ``generation_config``. ``model_class`` is a class of transformers or of its own kind; without it, it is the first of the
    configuration's ``architectures``, or ``AutoModelForCausalLM``. ``options`` go to the class as it is built, for example
    ``attn_implementation="sdpa"``.

    Parameters have the element types of the weights, which ``dtype=`` demands. Fused experts and tied weights are as for
    ``weights.attach``, and so are ``buffers``, and ``name``, which may be weights that are open: with
    ``shared = weights.open(name)`` the model follows new versions by ``shared.follow()``.

    Weights that the model has no place for are an error; with ``strict=False`` they are left out, and a warning lists
    them, but for those that the class itself declares as known. Parameters of the model that the weights lack are an
    error always, which lists them: they would have no values.

    Raises ``WeightsMismatchError``, ``ArgumentError``, ``ImportError`` without transformers, and as ``weights.open``.
    """
    shared = weights.open(name, device=device, domain=domain, wait=wait) if isinstance(name, str) else name
    described = shared.metadata.get(_KEY) if isinstance(shared.metadata, dict) else None
    described = _with_floats(described) if isinstance(described, dict) else {}
    given = _config(described.get("config") if config is None else config, shared)
    model = _built(model_class or _class_of(given), given, shared, options)
    try:
        weights.attach(model, shared, buffers=buffers)
    except WeightsMismatchError as error:
        if strict or error.missing or error.different or error.uncomputed:
            raise
        _tell_of_left_out(model, shared, error.unexpected)
        weights.attach(model, shared, buffers=buffers, strict=False)
    generation = described.get("generation_config") if generation_config is None else generation_config
    if generation is not None:
        if isinstance(generation, Mapping):
            generation = _transformers().GenerationConfig.from_dict(dict(generation))
        model.generation_config = generation
    return model.eval()


def publish(model: Any, name: str, *, metadata: Mapping[str, Any] | None = None, **options: Any) -> PublishedWeights:
    """Publishes a model of transformers under its own names, with its configuration and its generation configuration in
    the version's metadata: ``from_published`` needs the name alone then.

    ``metadata`` is more of it; ``options`` and exceptions are those of ``weights.publish``. Raises ``ArgumentError`` for
    what is no ``PreTrainedModel``.
    """
    if not is_transformers(model):
        said = f"a {type(model).__name__} is no PreTrainedModel of transformers"
        raise ArgumentError(f"{said}; give the model inside of wrappers (model.module), and adapters merged into it")
    config = json.loads(model.config.to_json_string(use_diff=False))
    config["architectures"] = [type(model).__name__]
    described: dict[str, Any] = {"config": config}
    if model.can_generate() and model.generation_config is not None:
        described["generation_config"] = json.loads(model.generation_config.to_json_string(use_diff=True))
    return weights.publish(name, model.state_dict(), metadata={**(metadata or {}), _KEY: described}, **options)


def _with_floats(described: dict[str, Any]) -> dict[str, Any]:
    """With the numbers that JSON has not: transformers writes ``{"__float__": "Infinity"}``, and reads it in files alone."""
    found: dict[str, Any] = json.loads(
        json.dumps(described), object_hook=lambda it: float(it["__float__"]) if "__float__" in it else it
    )
    return found


def _transformers() -> Any:
    return importlib.import_module("transformers")


def _config(given: Any, shared: SharedWeights) -> Any:
    transformers = _transformers()
    if given is None:
        said = f"version {shared.version} of the weights {shared.name!r} carries no configuration of transformers"
        raise ArgumentError(f"{said}; give config=, or publish it with warpipe.transformers.publish(model, name)")
    if isinstance(given, str | os.PathLike):
        given = transformers.AutoConfig.from_pretrained(given)
    elif isinstance(given, Mapping):
        kind = given.get("model_type")
        if kind not in transformers.CONFIG_MAPPING:
            said = f"transformers {transformers.__version__} has no model_type {kind!r}"
            raise ArgumentError(f"{said}; give config= as an object, and model_class= for a class of your own")
        given = transformers.CONFIG_MAPPING[kind].from_dict(dict(given))
    if getattr(given, "quantization_config", None) is not None:
        raise ArgumentError(
            "the configuration has a quantization_config, and transformers changes a model's layers by it as it reads files; "
            "build the model by transformers, and give it to warpipe.weights.attach(model, name, replace=True)"
        )
    return given


def _class_of(config: Any) -> Any:
    transformers = _transformers()
    architectures = config.architectures
    if not architectures:
        return transformers.AutoModelForCausalLM
    found = getattr(transformers, architectures[0], None)
    if found is None:
        said = f"transformers {transformers.__version__} has no class {architectures[0]!r}, which the configuration names"
        raise ArgumentError(f"{said}; give model_class=")
    return found


def _built(model_class: Any, config: Any, shared: SharedWeights, options: dict[str, Any]) -> Any:
    """The model without memory, its parameters of the element types of the weights unless a ``dtype`` is demanded."""
    torch = importlib.import_module("torch")
    # The classes for one task choose by the configuration. Those of models themselves have the same under another name.
    build = getattr(model_class, "from_config", None) or getattr(model_class, "_from_config", None)
    if build is None:
        raise ArgumentError(f"model_class is {model_class!r}; give a class of transformers, as LlamaForCausalLM")
    place = "cpu" if shared.device.kind == "host" else f"cuda:{shared.device.ordinal}"
    types = {full: getattr(torch, view.dtype) for full, view in shared.items()}
    with weights.on_meta(place):
        model = build(config, **{"dtype": _usual(torch, types.values()), **options})
    if "dtype" not in options:
        for full, (owner, last, tensor) in _places(model).items():
            wanted = types.get(full, tensor.dtype)
            if wanted != tensor.dtype and wanted.is_floating_point and tensor.is_floating_point():
                if last in owner._buffers:
                    owner._buffers[last] = tensor.to(wanted)
                else:
                    tensor.data = tensor.data.to(wanted)
    return model


def _usual(torch: Any, types: Iterable[Any]) -> Any:
    """The type that most tensors have, of those that a model can be built in."""
    counted = [one for one in types if one in (torch.float64, torch.float32, torch.bfloat16, torch.float16)]
    return max(set(counted), key=counted.count, default=torch.get_default_dtype())


def _tell_of_left_out(model: Any, shared: SharedWeights, names: list[str]) -> None:
    known = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    told = [name for name in names if not any(pattern.search(name) for pattern in known)]
    if told:
        said = f"{type(model).__name__} has no place for {len(told)} tensors of the weights {shared.name!r}"
        warnings.warn(f"{said}, which are left out: {', '.join(told)}", stacklevel=3)
