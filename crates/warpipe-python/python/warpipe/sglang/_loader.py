"""The load format ``warpipe``: an engine's parameters, as they are after SGLang has processed them, in shared memory.

SGLang's own weight cache knows which quantization methods leave nothing but tensors, what else decides their layout, and
which views of them a model keeps. These are taken from there.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
from typing import Any

import torch
from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model, get_model_loader
from sglang.srt.model_loader.utils import get_model_architecture, set_default_torch_dtype
from sglang.srt.runtime_context import get_exec, get_parallel
from sglang.srt.weight_cache.ipc_loader import IpcModelLoader
from sglang.srt.weight_cache.protocol import check_ipc_quant_support, compute_env_stamp, hash_quant_config

from .. import _transfer, weights
from .._engines import (
    Options, allow_descriptors, check_identity, checkpoint, device, digest, gpu, own_name, place_of, settings_of,
)  # fmt: skip
from .._errors import ArgumentError, WeightsMismatchError
from ..torch import pool

__all__ = ["Loader"]

_log = logging.getLogger("sglang.srt.warpipe")

# Of the engine's widths and ranks, those that decide what a rank's tensors are.
_PARALLEL = (
    "tp_size", "tp_rank", "pp_size", "pp_rank", "moe_ep_size", "moe_ep_rank", "moe_dp_size", "moe_dp_rank", "attn_dp_size",
    "attn_cp_size", "moe_dense_tp_size", "enable_dp_lm_head",
)  # fmt: skip
_MOE = ("moe_a2a_backend", "moe_runner_backend")
# Beside its parameters a model of SGLang may keep tensors as plain attributes: their names, in a version's metadata.
_ATTRIBUTES = "attributes"


class Loader(IpcModelLoader):  # type: ignore[misc]
    """Takes the weights of an engine that runs, else loads them as usual and publishes them."""

    def __init__(self, load_config: Any) -> None:
        usual = copy.copy(load_config)
        extra = dict(load_config.model_loader_extra_config or {})
        self._options = Options.taken_from(extra)
        self._domain = self._options.domain
        usual.load_format, usual.model_loader_extra_config = self._options.load_format, extra
        usual.__post_init__()
        super().__init__(usual)

    def download_model(self, model_config: Any) -> None:
        get_model_loader(self.load_config, model_config).download_model(model_config)

    def load_model(self, *, model_config: Any, device_config: Any) -> Any:
        method, settings = self._resolve_engine_quant(model_config)
        check_ipc_quant_support(method, settings, where="warpipe")
        _refuse(model_config)
        allow_descriptors()
        about = self._about(model_config, method, settings)
        name = self._name(about)
        with self._options.turn(name) as shared:
            if shared is None:
                return self._load(name, about, model_config, device_config)
        check_identity(name, about, shared.metadata)
        return self._attach(shared, model_config, device_config)

    def _about(self, model_config: Any, method: str, settings: Any) -> dict[str, Any]:
        parallel, moe, config = get_parallel(), get_exec().moe, model_config.hf_config
        about = {
            "engine": "sglang",
            "model": place_of(str(model_config.model_path)),
            "checkpoint": checkpoint(str(model_config.model_path)),
            "revision": model_config.revision,
            "architecture": ",".join(config.architectures or []),
            "draft": self.load_config.draft_model_idx,
            "dtype": str(model_config.dtype).removeprefix("torch."),
            "quantization": method,
            "load_format": str(self.load_config.load_format),
            "sglang": importlib.import_module("sglang").__version__,
            "gpu": gpu(),
            **{key: getattr(parallel, key) for key in _PARALLEL},
            **{key: str(getattr(moe, key)) for key in _MOE},
            **compute_env_stamp(),
            "settings": digest([settings_of(config), hash_quant_config(settings)]),
        }
        return {**about, "key": digest(about)}

    def _name(self, about: dict[str, Any]) -> str:
        if not self._options.name:
            return own_name(about, "draft", "gpu", *_PARALLEL)
        count, rank = about["tp_size"] * about["pp_size"], about["pp_rank"] * about["tp_size"] + about["tp_rank"]
        return str(_transfer.ranks(str(self._options.name), count)[rank])

    def _load(self, name: str, about: dict[str, Any], model_config: Any, device_config: Any) -> Any:
        is_cuda = torch.cuda.is_available()
        with torch.cuda.use_mem_pool(pool()) if is_cuda else contextlib.nullcontext():
            usual = get_model_loader(self.load_config, model_config)
            model = usual.load_model(model_config=model_config, device_config=device_config)
            buffers = {id(buffer) for buffer in model.buffers()}
            # The model goes on writing its buffers.
            state = {key: one.clone() if id(one) in buffers else one for key, one in model.state_dict(keep_vars=True).items()}
        state = {key: one.detach() for key, one in state.items()}
        _transfer.check_keeper(name, domain=self._domain)
        published = weights.publish(
            name, state, device=device(), domain=self._domain, wait=_transfer.TAKEOVER_SECONDS, zero_copy=is_cuda,
            metadata={**about, _ATTRIBUTES: _attributes(model)},
        )  # fmt: skip
        _log.info("Published the weights %r, version %d: %d bytes, %d of them copied",
                  name, published.version, published.nbytes, published.copied)  # fmt: skip
        # While it is open, the next keeper takes the version over from this process.
        model._warpipe_weights = published
        return model

    def _attach(self, shared: Any, model_config: Any, device_config: Any) -> Any:
        settings = _get_quantization_config(model_config, self.load_config)
        with set_default_torch_dtype(model_config.dtype), device_config.device, weights.on_meta():
            model = _initialize_model(model_config, self.load_config, settings)
        weights.attach(model, shared, replace=True, buffers="copy")
        self._rebuild_stale_views(model)
        lacking = sorted(set(shared.metadata[_ATTRIBUTES]).difference(_attributes(model)))
        if lacking:
            said = f"loading leaves tensors beside the parameters of this model: {', '.join(lacking[:8])}"
            raise WeightsMismatchError(f"{said}; use --load-format auto")
        # Memory that was taken before this engine began is none that it needs.
        self.preloaded_weights_bytes = shared.nbytes
        model._warpipe_weights = shared
        _log.info("Took the weights %r, version %d: %d bytes, none copied", shared.name, shared.version, shared.nbytes)
        return model.eval()


def _refuse(model_config: Any) -> None:
    """What writes weights in place, moves them, or derives others from them."""
    what = None
    if get_exec().features.enable_memory_saver:
        what = "--enable-memory-saver frees weights, and shared ones may only be read"
    elif get_exec().moe.enable_eplb:
        what = "--enable-eplb writes weights in place, and shared ones may only be read"
    elif hasattr(get_model_architecture(model_config)[0], "post_load_weights"):
        what = "this model keeps tensors that it derives from its weights as it loads them"
    if what is not None:
        raise ArgumentError(f"{what}; leave it off, or use --load-format auto")


def _attributes(model: Any) -> list[str]:
    """The names of the tensors that a model keeps as plain attributes."""
    return [
        f"{name}.{key}"
        for name, module in model.named_modules()
        for key, one in vars(module).items()
        if isinstance(one, torch.Tensor) and not one.is_meta
    ]
