"""The load format ``warpipe``: an engine's parameters, as they are after vLLM has processed them, in shared memory."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from .. import _transfer, weights
from .._engines import Options, allow_descriptors, check_identity, check_ranks, device as _device, own_name
from .._errors import ArgumentError, NotFoundError, WeightsMismatchError
from .._tensors import like
from ..torch import pool
from ._identity import identity, rank_of

__all__ = ["Loader", "loaded"]

_log = logging.getLogger("vllm.warpipe")

# Parameters of fewer elements keep the values that vLLM gives them: placeholders of scales.
_SMALL = 4096
# Methods that leave a parameter on a GPU as it was loaded.
_PLAIN = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
# Buffers stand beside the parameters: a name of these has no slash.
_BUFFER = "buffer/"
_LOADED = "_warpipe_loaded"


class Loaded:
    """What a model has of shared weights."""

    def __init__(self, receiver: _transfer.Receiver, domain: Any, took: dict[str, float], copied: int) -> None:
        self.receiver, self.domain = receiver, domain
        self.took = took
        """Seconds of each step of the load."""
        self.copied = copied
        """Bytes that this engine copied to publish them."""

    @property
    def name(self) -> str:
        return str(self.receiver.weights.name)


def loaded(model: Any) -> Loaded | None:
    """What ``--load-format warpipe`` gave a model."""
    return getattr(model, _LOADED, None)


class Loader(BaseModelLoader):  # type: ignore[misc]
    """Takes the weights of an engine that runs, else loads them as usual and publishes them."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        extra = dict(load_config.model_loader_extra_config or {})
        self._options = Options.taken_from(extra)
        self._domain = self._options.domain
        usual = copy.copy(load_config)
        usual.load_format, usual.model_loader_extra_config = self._options.load_format, extra
        self._usual = usual
        # While ``load_model`` runs.
        self._meta = contextlib.ExitStack()
        self._shared: Any = None
        self._recorder: _transfer.Recorder | None = None
        self._records = False
        self._took = _transfer.Clock()

    def download_model(self, model_config: Any) -> None:
        get_model_loader(self._usual).download_model(model_config)

    def get_external_weight_memory(self, vllm_config: Any) -> int:
        """Bytes of weights that are there before this engine is: vLLM from 0.3x on counts them once."""
        about = self._about(vllm_config, vllm_config.model_config, "")
        try:
            shared = weights.open(self._name(about), device=_device(), domain=self._domain)
        except (NotFoundError, TimeoutError):
            return 0
        return int(shared.nbytes)

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        _refuse(vllm_config, model_config)
        allow_descriptors()
        self._took = _transfer.Clock()
        # vLLM has collected garbage before this and does so behind it, among all that it has imported. It freezes that
        # itself before it serves, and thaws it at its end.
        gc.freeze()
        about = self._about(vllm_config, model_config, prefix)
        name = self._name(about)
        self._took.end("identity")
        with self._options.turn(name, self._took) as shared:
            made = self._load(name, about, vllm_config, model_config, prefix) if shared is None else None
        if made is None:
            check_identity(name, about, shared.metadata)
            made = self._attach(shared, vllm_config, model_config, prefix), shared, 0
        # Not in the turn: ranks wait for each other here, and each of another engine's may have another one's turn.
        return self._done(*made, model_config)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Part of vLLM's own ``load_model``, which builds the model before and processes it afterwards."""
        self._meta.close()
        self._took.end("build")
        if self._shared is not None:
            _Gift(model, self._shared).give_before_processing()
        else:
            usual = get_model_loader(self._usual)
            if self._records:
                parameters = dict(model.named_parameters(remove_duplicate=False))
                self._recorder = recorder = _transfer.Recorder(parameters)
                all_weights = usual.get_all_weights
                usual.get_all_weights = lambda *given: recorder.watched(all_weights(*given))
                with recorder:
                    usual.load_weights(model, model_config)
            else:
                usual.load_weights(model, model_config)
        self._took.end("weights")

    def _about(self, vllm_config: Any, model_config: Any, prefix: str) -> dict[str, Any]:
        return identity(
            vllm_config, model_config, prefix,
            load_format=self._usual.load_format, one_memory=_takes_versions(vllm_config),
        )  # fmt: skip

    def _name(self, about: dict[str, Any]) -> str:
        given = self._options.name
        if given is None:
            return own_name(about, "part", "tp", "pp", "dp", "gpu")
        rank, count = rank_of(about)
        named = _transfer.ranks(given, count)[rank]
        # A draft model has a prefix of its own.
        return f"{named}/{about['part']}" if about["part"] else named

    def _load(
        self, name: str, about: dict[str, Any], vllm_config: Any, model_config: Any, prefix: str
    ) -> tuple[nn.Module, Any, int]:
        """The model, its shared weights, and how many bytes were copied for them."""
        self._records = one_memory = _takes_versions(vllm_config)
        device = _device()
        in_pool = contextlib.nullcontext() if one_memory or not _is_cuda() else torch.cuda.use_mem_pool(pool())
        model: nn.Module
        with in_pool:
            model = super().load_model(vllm_config, model_config, prefix)
            self._took.end("processing")
            state, floats = _state(model, clones=not one_memory), _floats(model)
        metadata = {**about, "floats": floats}
        if self._recorder is not None:
            metadata = _transfer.with_plan(metadata, self._recorder.plan(_parameters(model)))
            self._recorder = None
        self._took.end("plan")
        _transfer.check_keeper(name, domain=self._domain)
        published = weights.publish(
            name, state, device=device, domain=self._domain, wait=_transfer.TAKEOVER_SECONDS, zero_copy=_is_cuda() and not one_memory,
            metadata=metadata,
        )  # fmt: skip
        self._took.end("publish")
        shared = weights.open(name, device=device, domain=self._domain, wait=_transfer.TAKEOVER_SECONDS)
        if shared.version != published.version:
            said = f"another process published version {shared.version} of the weights {name!r} meanwhile"
            raise WeightsMismatchError(f"{said}; start this engine again")
        _log.info("Published the weights %r, version %d: %d bytes, %d of them copied",
                  name, published.version, published.nbytes, published.copied)  # fmt: skip
        # This engine reads the version as the others do, and can take the next one.
        del state
        _rebind(model, shared, leaves_others=not one_memory)
        copied = published.copied
        published.close()
        if _is_cuda():
            torch.cuda.empty_cache()
        self._took.end("share")
        return model, shared, copied

    def _attach(self, shared: Any, vllm_config: Any, model_config: Any, prefix: str) -> nn.Module:
        self._shared = shared
        try:
            with self._meta:
                # Left by ``load_weights``: what vLLM's processing makes is real.
                self._meta.enter_context(weights.on_meta(least=_SMALL))
                model: nn.Module = super().load_model(vllm_config, model_config, prefix)
            self._took.end("processing")
            gift = getattr(model, _GIFT)
            delattr(model, _GIFT)
            gift.give_after_processing()
            self._took.end("weights")
        finally:
            self._shared = None
        _log.info("Took the weights %r, version %d: %d bytes, none copied", shared.name, shared.version, shared.nbytes)
        return model

    def _done(self, model: nn.Module, shared: Any, copied: int, model_config: Any) -> nn.Module:
        distributed = importlib.import_module("vllm.distributed")
        check_ranks([distributed.get_tp_group(), distributed.get_pp_group()], shared)
        # A captured graph has addresses: only a version that fits there can be taken.
        moves = (lambda newer: _rebind(model, newer)) if getattr(model_config, "enforce_eager", False) else None
        receiver = _transfer.Receiver(shared, moves, domain=self._domain)
        setattr(model, _LOADED, Loaded(receiver, self._domain, self._took, copied))
        return model


def _is_cuda() -> bool:
    return bool(torch.cuda.is_available())


def _takes_versions(vllm_config: Any) -> bool:
    """Whether a trainer is to send weights: they lie in one memory then, as each of its versions will."""
    config = getattr(vllm_config, "weight_transfer_config", None)
    return config is not None and config.backend == "warpipe"


def _refuse(vllm_config: Any, model_config: Any) -> None:
    """What writes weights in place, or moves them, while the engine runs."""
    what = None
    if getattr(model_config, "enable_sleep_mode", False):
        what = "sleep mode frees weights"
    elif getattr(vllm_config.parallel_config, "enable_eplb", False):
        what = "expert load balancing writes weights in place"
    elif _offloads(getattr(vllm_config, "offload_config", None)):
        what = "offloading to the host moves weights"
    if what is not None:
        raise ArgumentError(f"{what}, and shared weights may only be read; leave it off, or use --load-format auto")


def _offloads(config: Any) -> bool:
    parts = getattr(config, "uva", None), getattr(config, "prefetch", None)
    return any(getattr(part, key, 0) > 0 for part in parts for key in ("cpu_offload_gb", "offload_group_size"))


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules, with each of their names."""
    return list(model.named_modules(remove_duplicate=False))


def _parameters(model: nn.Module) -> dict[str, Any]:
    return dict(model.named_parameters(remove_duplicate=False))


def _state(model: nn.Module, *, clones: bool) -> dict[str, Any]:
    """A model's parameters, and the values of its buffers, which it goes on writing."""
    state: dict[str, Any] = {}
    for name, parameter in _parameters(model).items():
        if not parameter.numel():
            # It is nothing to share, and lies nowhere.
            continue
        if parameter.device.type != ("cuda" if _is_cuda() else "cpu"):
            said = f"the parameter {name!r} is on {parameter.device}"
            raise ArgumentError(f"{said}, and only weights of the GPU are shared; leave offloading off, or use --load-format auto")
        state[name] = parameter.data
    copied: dict[int, Any] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if buffer.is_meta or buffer.layout is not torch.strided or not buffer.numel():
            continue
        if id(buffer) not in copied:
            copied[id(buffer)] = buffer.detach().clone() if clones else buffer.detach()
        state[_BUFFER + name] = copied[id(buffer)]
    return state


def _floats(model: nn.Module) -> dict[str, dict[str, float]]:
    """Scales that a layer keeps as numbers: vLLM takes them from tensors that it drops afterwards."""
    found: dict[str, dict[str, float]] = {}
    for name, module in model.named_modules():
        scales = {
            key: value
            for key, value in vars(module).items()
            if "scale" in key and isinstance(value, float) and math.isfinite(value)
        }
        if scales:
            found[name] = scales
    return found


def _fits(ours: Any, tensor: Any) -> bool:
    return (tuple(ours.shape), ours.dtype, _steps(ours)) == (tuple(tensor.shape), tensor.dtype, _steps(tensor))


def _steps(tensor: Any) -> list[int]:
    """The strides that say where an element lies."""
    if not tensor.numel():
        return []
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _put(parameter: Any, tensor: Any) -> bool:
    """Gives a parameter other memory. Everything that has the parameter reads that; False if something else has the
    memory that it had."""
    storage = parameter.untyped_storage()
    parameter.data = tensor
    return bool(storage.nbytes() == 0 or torch._C._storage_Use_Count(storage._cdata) == 1)


def _rebind(model: nn.Module, shared: Any, *, leaves_others: bool = False) -> None:
    """Gives all parameters of a model the memory of a version. With ``leaves_others`` something else may have the memory
    that one had, which has the same values."""
    tensors = _Tensors(shared)
    kept = []
    for name, parameter in _parameters(model).items():
        if not parameter.numel():
            continue
        if parameter.is_meta:
            said = f"the parameter {name!r} has no memory: vLLM is loading it anew"
            raise ArgumentError(f"{said}; start the update with is_checkpoint_format=False")
        # Adapters wrap layers after the load.
        tensor = tensors.get(name.replace(".base_layer.", "."))
        if tensor is None or not _fits(parameter, tensor):
            raise _mismatch(shared, [name])
        if parameter.data_ptr() != tensor.data_ptr() and not _put(parameter, tensor) and not leaves_others:
            kept.append(name)
    if kept:
        raise _kept(shared, kept)


class _Tensors:
    """The tensors of a version: one for all names of one tensor."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared
        self._made: dict[Any, Any] = {}
        self.used: set[str] = set()

    def get(self, name: str) -> Any:
        view = self._shared.get(name)
        if view is None:
            return None
        self.used.add(name)
        place = (self._shared.offset(name), tuple(view.shape), str(view.dtype)) if view.nbytes else name
        if place not in self._made:
            self._made[place] = view.torch()
        return self._made[place]


_GIFT = "_warpipe_gift"


class _Gift:
    """A version for a model that vLLM has just built, with its large parameters on ``meta``.

    What a quantization method makes of a layer is made here, too, of memory without values, so that all that it leaves
    on the layer is there: objects of kernels, attributes, parameters of another class. Then the layer's parameters get
    the memory of the version, which has what the method made of the values.
    """

    def __init__(self, model: nn.Module, shared: Any) -> None:
        self._model, self._shared = model, shared
        self._tensors = _Tensors(shared)
        # To look for them takes longer than to give them memory: once, and once more behind the processing.
        self._modules = _modules(model)
        self._names: dict[int, str] = {}
        self._methods: list[Any] = []
        self._device = torch.device("cuda", torch.cuda.current_device()) if _is_cuda() else torch.device("cpu")
        # One parameter of the module stays one: tied weights.
        self._made: dict[int, Any] = {}
        self._kept: list[str] = []
        self._wrong: list[str] = []

    def give_before_processing(self) -> None:
        setattr(self._model, _GIFT, self)
        for prefix, module in self._modules:
            if self._names.setdefault(id(module), prefix) != prefix:
                continue
            method = getattr(module, "quant_method", None)
            if method is None or type(method).__name__ in _PLAIN or not hasattr(method, "process_weights_after_loading"):
                self._give_layer(module)
            elif method not in self._methods:
                self._methods.append(method)
                method.process_weights_after_loading = self._processing(method.process_weights_after_loading)
        if self._methods:
            # Processing may read them.
            self._copy_buffers()
        if self._wrong or self._kept:
            self._raise()

    def give_after_processing(self) -> None:
        for method in self._methods:
            del method.process_weights_after_loading
        self._modules = _modules(self._model)
        self._copy_buffers()
        for name, scales in (self._shared.metadata.get("floats") or {}).items():
            module = self._model.get_submodule(name)
            for key, value in scales.items():
                setattr(module, key, value)
        for prefix, module in self._modules:
            for key, parameter in module._parameters.items():
                if parameter is None or not parameter.numel():
                    continue
                name = f"{prefix}.{key}" if prefix else key
                tensor = self._tensors.get(name)
                if parameter.is_meta or tensor is None or parameter.data_ptr() != tensor.data_ptr():
                    self._wrong.append(name)
        unused = [name for name in self._shared if name not in self._tensors.used]
        self._wrong += [name for name in unused if not name.startswith(_BUFFER)]
        self._raise()

    def _raise(self) -> None:
        if self._wrong:
            raise _mismatch(self._shared, self._wrong)
        if self._kept:
            raise _kept(self._shared, self._kept)

    def _processing(self, process: Callable[..., Any]) -> Callable[..., Any]:
        def processing(layer: nn.Module, *arguments: Any, **named: Any) -> Any:
            for key, parameter in layer._parameters.items():
                if parameter is not None and parameter.is_meta:
                    empty = torch.empty_strided(
                        parameter.shape, parameter.stride(), dtype=parameter.dtype, device=self._device
                    )
                    layer._parameters[key] = like(parameter, empty)
            given = process(layer, *arguments, **named)
            self._give_layer(layer)
            return given

        return processing

    def _give_layer(self, layer: nn.Module) -> None:
        prefix = self._names[id(layer)]
        for key, parameter in layer._parameters.items():
            if parameter is None or not parameter.numel():
                continue
            name = f"{prefix}.{key}" if prefix else key
            tensor = self._tensors.get(name)
            if tensor is None or not _fits(parameter, tensor):
                self._wrong.append(name)
            elif not parameter.is_meta:
                if parameter.data_ptr() != tensor.data_ptr() and not _put(parameter, tensor):
                    self._kept.append(name)
            else:
                if id(parameter) not in self._made:
                    self._made[id(parameter)] = parameter, like(parameter, tensor)
                layer._parameters[key] = self._made[id(parameter)][1]

    def _copy_buffers(self) -> None:
        done: set[int] = set()
        for prefix, module in self._modules:
            for key, buffer in module._buffers.items():
                name = _BUFFER + (f"{prefix}.{key}" if prefix else key)
                tensor = self._tensors.get(name)
                if buffer is None or tensor is None or id(buffer) in done:
                    continue
                if buffer.is_meta:
                    module._buffers[key] = tensor.clone()
                elif _fits(buffer, tensor):
                    buffer.copy_(tensor)
                else:
                    module._buffers[key] = tensor.clone()
                done.add(id(module._buffers[key]))


def _mismatch(shared: Any, names: list[str]) -> WeightsMismatchError:
    told = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    said = f"version {shared.version} of the weights {shared.name!r} does not fit the model: {told}"
    return WeightsMismatchError(
        f"{said}; warpipe weights drop {shared.name} and start the engines anew, or give another name in "
        "--model-loader-extra-config"
    )


def _kept(shared: Any, names: list[str]) -> WeightsMismatchError:
    told = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    said = f"this model keeps the memory of {told} in other objects, which cannot be given the weights {shared.name!r}"
    return WeightsMismatchError(f"{said}; use --load-format auto")
