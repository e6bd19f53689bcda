"""Which weights an engine can take: what decides the contents and the layout of its tensors."""

from __future__ import annotations

import importlib
import os
from typing import Any

from .._engines import checkpoint, digest, gpu, place_of, settings_of

# Environment variables of vLLM that choose kernels have one of these in their names: a kernel decides the layout.
_KERNELS = (
    "BATCH_INVARIANT", "CUTLASS", "DEEP_GEMM", "FLASHINFER_MOE", "FP4", "FP8", "LINEAR", "MARLIN", "MLA", "MOE", "QUANT",
    "ROCM", "TRITON",
)  # fmt: skip


def identity(vllm_config: Any, model_config: Any, prefix: str, *, load_format: str, one_memory: bool) -> dict[str, Any]:
    """The readable form, for the metadata of a version. ``key`` is the hash of all the rest."""
    parallel = vllm_config.parallel_config
    distributed = importlib.import_module("vllm.distributed")
    torch = importlib.import_module("torch")
    tensor, pipeline = distributed.get_tensor_model_parallel_rank(), distributed.get_pp_group()
    has_experts = bool(getattr(model_config, "is_moe", False))
    data = (parallel.data_parallel_rank, parallel.data_parallel_size) if has_experts else (0, 1)
    hf_config = model_config.hf_config
    settings = {
        "config": settings_of(hf_config),
        "quantization": getattr(model_config, "quantization_config", None),
        "kernels": getattr(vllm_config, "kernel_config", None),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("VLLM_") and any(word in name for word in _KERNELS)
        },
        "experts": [parallel.enable_expert_parallel, getattr(parallel, "expert_placement_strategy", None)],
    }
    about = {
        "engine": "vllm",
        "model": place_of(str(model_config.model)),
        "checkpoint": checkpoint(str(model_config.model)),
        "revision": model_config.revision,
        "architecture": ",".join(getattr(hf_config, "architectures", None) or []),
        "part": prefix,
        "dtype": str(model_config.dtype).removeprefix("torch."),
        "quantization": model_config.quantization,
        "kv_cache": str(vllm_config.cache_config.cache_dtype),
        "tp": f"{tensor}of{distributed.get_tensor_model_parallel_world_size()}",
        "pp": f"{pipeline.rank_in_group}of{pipeline.world_size}",
        "dp": f"{data[0]}of{data[1]}",
        "ep": bool(parallel.enable_expert_parallel),
        "load_format": load_format,
        "memory": "one" if one_memory else "in place",
        "vllm": importlib.import_module("vllm").__version__,
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "gpu": gpu(),
        "settings": digest(settings),
    }
    return {**about, "key": digest(about)}


def rank_of(about: dict[str, Any]) -> tuple[int, int]:
    """The number of a rank, and how many there are: tensor parallel ones first."""
    (tensor, tensors), (stage, stages), (data, datas) = (
        [int(number) for number in about[key].split("of")] for key in ("tp", "pp", "dp")
    )
    return (data * stages + stage) * tensors + tensor, tensors * stages * datas
