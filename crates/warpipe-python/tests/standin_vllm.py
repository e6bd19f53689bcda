"""What this package meets of vLLM, without vLLM: its seams with the signatures that versions 0.24 and 0.33 have, around a
model of two layers. One is quantized as vLLM does it: its processing replaces parameters, drops placeholders, transposes a
weight, and leaves objects and numbers on the layer."""

import dataclasses
import sys
import types
import typing

import torch
from torch import nn

VERSIONS = ("0.24", "0.33")


def install(monkeypatch, version, checkpoint, *, rank=0, ranks=1):
    """Puts modules named as vLLM's into this process; ``checkpoint()`` gives the pairs of names and tensors."""
    modules = {}

    def module(name, **members):
        modules[name] = types.ModuleType(name)
        vars(modules[name]).update(members)
        monkeypatch.setitem(sys.modules, name, modules[name])
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(modules[parent], last, modules[name])
        return modules[name]

    module("vllm", __version__=f"{version}.0", __path__=[])
    module("vllm.model_executor", __path__=[])
    group = types.SimpleNamespace(rank_in_group=0, world_size=1)
    module(
        "vllm.distributed", __path__=[], get_pp_group=lambda: group,
        get_tp_group=lambda: types.SimpleNamespace(world_size=ranks, cpu_group=ranks),
        get_tensor_model_parallel_rank=lambda: rank, get_tensor_model_parallel_world_size=lambda: ranks,
    )  # fmt: skip
    calls = []

    class BaseModelLoader:
        def __init__(self, load_config):
            self.load_config = load_config

        def load_model(self, vllm_config, model_config, prefix=""):
            model = Model(rank, ranks, quantized=model_config.quantization is not None)
            self.load_weights(model, model_config)
            for layer in model.modules():
                method = getattr(layer, "quant_method", None)
                if method is not None:
                    method.process_weights_after_loading(layer)
            for layer in model.modules():
                if hasattr(layer, "after_loading"):
                    layer.after_loading()
            return model.eval()

    if version == "0.33":
        BaseModelLoader.get_external_weight_memory = lambda self, vllm_config: 0

    class DefaultModelLoader(BaseModelLoader):
        def download_model(self, model_config):
            calls.append("download")

        def get_all_weights(self, model_config, model):
            yield from checkpoint()

        def load_weights(self, model, model_config):
            calls.append("load")
            model.load_weights(self.get_all_weights(model_config, model))

    loaders = {"auto": DefaultModelLoader}
    module("vllm.model_executor.model_loader", __path__=[], _LOAD_FORMAT_TO_MODEL_LOADER=loaders)
    loader = modules["vllm.model_executor.model_loader"]
    loader.register_model_loader = lambda name: lambda cls: loaders.setdefault(name, cls)
    loader.get_model_loader = lambda config: loaders[config.load_format](config)
    module("vllm.model_executor.model_loader.base_loader", BaseModelLoader=BaseModelLoader)
    module(
        "vllm.model_executor.model_loader.reload",
        initialize_layerwise_reload=lambda model: calls.append("initialize reload"),
        finalize_layerwise_reload=lambda model, config: calls.append("finalize reload"),
    )
    module("vllm.distributed.weight_transfer", __path__=[])
    (_old if version == "0.24" else _new)(module)
    engine = _factory()
    members = {"WeightTransferEngineFactory": engine}
    if version == "0.33":
        members["WeightTransferTrainerFactory"] = _factory()
    module("vllm.distributed.weight_transfer.factory", **members)
    return types.SimpleNamespace(calls=calls, loaders=loaders, **members)


def _factory():
    class Factory:
        _registry: typing.ClassVar[dict] = {}

        @classmethod
        def register_engine(cls, name, module, class_name):
            if name in cls._registry:
                raise ValueError(f"{name} is there")
            cls._registry[name] = lambda: getattr(__import__(module, fromlist=[class_name]), class_name)

    return Factory


def _old(module):
    @dataclasses.dataclass
    class WeightTransferUpdateInfo:
        _: dataclasses.KW_ONLY
        update_kind: str = "dense"
        num_updates_list: list | None = None

    class WeightTransferEngine:
        def __init__(self, config, parallel_config, model):
            self.config, self.parallel_config, self.model = config, parallel_config, model

    _base(module, WeightTransferUpdateInfo, WeightTransferEngine)


def _new(module):
    @dataclasses.dataclass
    class WeightTransferUpdateInfo:
        pass

    class WeightTransferEngine:
        def __init__(self, config, vllm_config, device, model):
            self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
            self.model_config = vllm_config.model_config

    @dataclasses.dataclass
    class TrainerInitInfo:
        backend: typing.ClassVar[str]
        rank: int = dataclasses.field(kw_only=True)

        @property
        def is_sender(self):
            return self.rank == 0

    class TrainerWeightTransferEngine:
        def __init__(self, *, client, source=None, is_sender=True, rank=0):
            self.client, self.source, self.is_sender, self.rank = client, source, is_sender, rank

    members = {"TrainerInitInfo": TrainerInitInfo, "TrainerWeightTransferEngine": TrainerWeightTransferEngine}
    _base(module, WeightTransferUpdateInfo, WeightTransferEngine, **members)


def _base(module, update, engine, **members):
    @dataclasses.dataclass
    class WeightTransferInitInfo:
        pass

    engine.parse_init_info = lambda self, given: self.init_info_cls(**given)
    engine.parse_update_info = lambda self, given: self.update_info_cls(**given)
    module(
        "vllm.distributed.weight_transfer.base", WeightTransferInitInfo=WeightTransferInitInfo,
        WeightTransferUpdateInfo=update, WeightTransferEngine=engine, **members,
    )  # fmt: skip


def configs(*, quantization=None, model="some/model", transfer=False, extra=None, eager=True, sleep=False, offload=0.0):
    """The configuration of vLLM, of its model and of its loader."""
    hf_config = types.SimpleNamespace(architectures=["Model"], to_dict=lambda: {"hidden_size": 64, "_name_or_path": model})
    model_config = types.SimpleNamespace(
        model=model, revision=None, dtype=torch.float32, quantization=quantization, hf_config=hf_config, is_moe=False,
        enforce_eager=eager, enable_sleep_mode=sleep,
    )  # fmt: skip
    parallel = types.SimpleNamespace(
        data_parallel_rank=0, data_parallel_size=1, enable_expert_parallel=False, enable_eplb=False,
        expert_placement_strategy="linear",
    )  # fmt: skip
    load_config = types.SimpleNamespace(load_format="warpipe", model_loader_extra_config=dict(extra or {}))
    vllm_config = types.SimpleNamespace(
        model_config=model_config, parallel_config=parallel, load_config=load_config, kernel_config=None,
        cache_config=types.SimpleNamespace(cache_dtype="auto"),
        offload_config=types.SimpleNamespace(uva=types.SimpleNamespace(cpu_offload_gb=offload)),
        weight_transfer_config=types.SimpleNamespace(backend="warpipe") if transfer else None,
    )  # fmt: skip
    return vllm_config, model_config, load_config


class Weight(nn.Parameter):
    """A parameter as vLLM has it: a class of its own, and how it is loaded."""

    def __new__(cls, data, **attributes):
        made = super().__new__(cls, data, requires_grad=False)
        made.__dict__.update(attributes)
        return made


class UnquantizedLinearMethod:
    def process_weights_after_loading(self, layer):
        pass


class Fp8LinearMethod:
    """Makes a transposed weight of a byte for each element, and a scale; drops what it has used."""

    def process_weights_after_loading(self, layer):
        if layer.placeholder.item() != -1.0:
            raise AssertionError("the placeholder has lost its value")
        weight = layer.weight
        scale = weight.abs().amax().clamp(min=1e-6)
        made = (weight / scale * 127).nan_to_num().clamp(-127, 127).round().to(torch.int8)
        layer.weight = Weight(made.t(), loader=weight.loader)
        layer.weight_scale = nn.Parameter(scale.reshape(1), requires_grad=False)
        layer.out_scale_float = layer.checkpoint_scale.item()
        layer.kernel = types.SimpleNamespace(weight=layer.weight)
        del layer.placeholder
        del layer.checkpoint_scale


class Layer(nn.Module):
    def __init__(self, rows, columns, method):
        super().__init__()
        self.quant_method = method
        self.weight = Weight(torch.empty(rows, columns), loader="rows")
        if isinstance(method, Fp8LinearMethod):
            self.placeholder = nn.Parameter(torch.tensor(-1.0), requires_grad=False)
            self.checkpoint_scale = nn.Parameter(torch.tensor(1.0), requires_grad=False)
        self.register_buffer("used", torch.zeros(1), persistent=False)

    def after_loading(self):
        # As attention does with its scales: a write.
        self.used.fill_(1.0)

    def forward(self, given):
        if isinstance(self.quant_method, Fp8LinearMethod):
            return given @ (self.kernel.weight.float() / 127 * self.weight_scale) * self.out_scale_float
        return given @ self.weight.t()


SHAPES = {"q": (64, 128), "k": (32, 128), "down": (128, 96), "norm": (128,)}


def checkpoint(step=1):
    generator = torch.Generator().manual_seed(step)
    pairs = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {**pairs, "out_scale": torch.tensor(0.5)}


class Model(nn.Module):
    """Joins q and k, and cuts all by its rank."""

    def __init__(self, rank, ranks, *, quantized):
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.qk = Layer(96 // ranks, 128, UnquantizedLinearMethod())
        self.down = Layer(128, 96 // ranks, Fp8LinearMethod() if quantized else UnquantizedLinearMethod())
        self.norm = nn.Parameter(torch.ones(128), requires_grad=False)
        # As vLLM has where there is nothing to have.
        self.none = nn.Parameter(torch.empty(0), requires_grad=False)
        self.register_buffer("nothing", torch.empty(0))

    def load_weights(self, pairs):
        for name, tensor in pairs:
            if name in ("q", "k"):
                rows = tensor.shape[0] // self.ranks
                at = 0 if name == "q" else 64 // self.ranks
                self.qk.weight.data.narrow(0, at, rows).copy_(tensor.narrow(0, self.rank * rows, rows))
            elif name == "down":
                columns = 96 // self.ranks
                self.down.weight.data.copy_(tensor.narrow(1, self.rank * columns, columns))
            elif name == "norm":
                self.norm.data.copy_(tensor)
            elif hasattr(self.down, "checkpoint_scale"):
                self.down.checkpoint_scale.data.copy_(tensor)

    def forward(self, given):
        return self.down(self.qk(given * self.norm))
