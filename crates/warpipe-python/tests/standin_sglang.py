"""What this package meets of SGLang, without SGLang: its seams as version 0.5.23 has them, around a model of two layers."""

import contextlib
import enum
import importlib
import sys
import types

import torch
from torch import nn


class LoadFormat(str, enum.Enum):
    AUTO = "auto"


class HookType(enum.Enum):
    AROUND = "around"


class Layer(nn.Module):
    """Its processing makes another shape of a weight, adds a scale, and fills a buffer."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 2 * width))
        self.weight.weight_loader = lambda parameter, loaded: parameter.data.copy_(loaded)
        self.register_buffer("filled", torch.zeros(width))
        self.register_buffer("computed", torch.arange(float(width)), persistent=False)

    def process(self):
        self.filled.fill_(3)
        self.weight = nn.Parameter(self.weight.data.T.contiguous(), requires_grad=False)
        self.scale = nn.Parameter(torch.full((1,), 0.5), requires_grad=False)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first, self.second = Layer(width), Layer(width)
        self.head = nn.Linear(width, width, bias=False)
        self.loads = 0

    def load_weights(self, pairs):
        self.loads += 1
        parameters = dict(self.named_parameters())
        for name, loaded in pairs:
            parameters[name].data.copy_(loaded)


class DerivingModel(Model):
    def post_load_weights(self):
        pass


class KeepingModel(Model):
    def load_weights(self, pairs):
        super().load_weights(pairs)
        self.kept = self.head.weight.data.clone()


def checkpoint(width=4):
    shape = (width, 2 * width)
    large = {f"{layer}.weight": torch.arange(32.0).reshape(shape) + at for at, layer in enumerate(("first", "second"))}
    return {**large, "head.weight": torch.eye(width)}


def install(monkeypatch, architecture=Model, **features):
    """Puts modules named as SGLang's into this process. Returns what they tell of."""
    seen = types.SimpleNamespace(loads=0, hooks={}, choices=["auto"], rebuilt=[], refused=None)

    def module(name, **members):
        made = types.ModuleType(name)
        vars(made).update({"__path__": [], **members})
        monkeypatch.setitem(sys.modules, name, made)
        return made

    class LoadConfig:
        def __init__(self, load_format="auto", model_loader_extra_config=None):
            self.load_format, self.draft_model_idx = load_format, None
            self.model_loader_extra_config = model_loader_extra_config or {}
            self.__post_init__()

        def __post_init__(self):
            self._verify_load_format()

        def _verify_load_format(self):
            self.load_format = LoadFormat(self.load_format)

    class Hooks:
        @staticmethod
        def register(target, hook, kind):
            assert kind is HookType.AROUND and target.startswith("sglang.srt.configs.load_config.LoadConfig.")
            seen.hooks[target] = hook
            last = target.rpartition(".")[2]
            original = getattr(LoadConfig, last)
            monkeypatch.setattr(LoadConfig, last, lambda config: hook(original, config))

    class DefaultModelLoader:
        def __init__(self, load_config):
            unexpected = set(load_config.model_loader_extra_config) - {"num_threads"}
            assert not unexpected, unexpected

        def load_model(self, *, model_config, device_config):
            seen.loads += 1
            with device_config.device:
                model = architecture()
            model.load_weights(checkpoint().items())
            for layer in (model.first, model.second):
                layer.process()
            return model.eval()

    class IpcModelLoader:
        preloaded_weights_bytes = 0

        def __init__(self, load_config):
            self.load_config = load_config

        def _resolve_engine_quant(self, model_config):
            return model_config.quantization or "", None

        @staticmethod
        def _rebuild_stale_views(model):
            seen.rebuilt.append(id(model))

    @contextlib.contextmanager
    def set_default_torch_dtype(dtype):
        former = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        yield
        torch.set_default_dtype(former)

    def check_ipc_quant_support(method, settings, where):
        if method:
            raise ValueError(f"{where}: {method} is not verified")

    def get_model_loader(load_config, model_config=None):
        chosen = load_config.load_format
        return chosen(load_config) if isinstance(chosen, type) else DefaultModelLoader(load_config)

    sizes = {"moe_dense_tp_size": None, "enable_dp_lm_head": False, "pp_size": 1, "pp_rank": 0, "tp_size": 1, "tp_rank": 0}
    for key in ("moe_ep", "moe_dp"):
        sizes |= {f"{key}_size": 1, f"{key}_rank": 0}
    parallel = types.SimpleNamespace(**sizes, attn_dp_size=1, attn_cp_size=1)
    moe = types.SimpleNamespace(moe_a2a_backend="none", moe_runner_backend="auto", enable_eplb=features.get("eplb", False))
    execution = types.SimpleNamespace(
        moe=moe, features=types.SimpleNamespace(enable_memory_saver=features.get("memory_saver", False))
    )
    seen.parallel, seen.LoadConfig, seen.get_model_loader = parallel, LoadConfig, get_model_loader
    module("sglang", __version__="0.5.23")
    for name in ("srt", "srt.arg_groups", "srt.configs", "srt.model_loader", "srt.weight_cache", "srt.plugins"):
        module(f"sglang.{name}")
    module("sglang.srt.arg_groups.choices", LOAD_FORMAT_CHOICES=seen.choices, add_load_format_choices=seen.choices.extend)
    module("sglang.srt.plugins.hook_registry", HookRegistry=Hooks, HookType=HookType)
    module("sglang.srt.configs.load_config", LoadConfig=LoadConfig)
    module(
        "sglang.srt.model_loader.loader", get_model_loader=get_model_loader, _get_quantization_config=lambda *_: None,
        _initialize_model=lambda *_: architecture(),
    )  # fmt: skip
    module(
        "sglang.srt.model_loader.utils", get_model_architecture=lambda _: (architecture, "Model"),
        set_default_torch_dtype=set_default_torch_dtype,
    )  # fmt: skip
    module("sglang.srt.runtime_context", get_exec=lambda: execution, get_parallel=lambda: parallel)
    module("sglang.srt.weight_cache.ipc_loader", IpcModelLoader=IpcModelLoader)
    module(
        "sglang.srt.weight_cache.protocol", check_ipc_quant_support=check_ipc_quant_support,
        compute_env_stamp=lambda: {"torch_version": torch.__version__}, hash_quant_config=lambda _: "",
    )  # fmt: skip
    forgotten(monkeypatch, "warpipe.sglang._loader")
    return seen


def forgotten(monkeypatch, name):
    """Has a module be imported anew, and forgotten at the end of the test."""
    parent, _, last = name.rpartition(".")
    monkeypatch.setattr(importlib.import_module(parent), last, None, raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    del sys.modules[name]


def model_config(path="a/model", *, revision=None, quantization=None):
    config = types.SimpleNamespace(architectures=["Model"], to_dict=lambda: {"width": 4})
    return types.SimpleNamespace(
        model_path=path, revision=revision, hf_config=config, dtype=torch.float32, quantization=quantization
    )
