"""Modules that engines own: classes and attributes of parameters, buffers that are written, values that are copied in."""

import importlib

import pytest

import warpipe
from warpipe import weights

torch = pytest.importorskip("torch")

LIMIT_SECONDS = 60.0


class Sharded(torch.nn.Parameter):
    """A parameter as engines have them: made with what loads it."""

    def __new__(cls, data, loader=None):
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data, loader):
        self.weight_loader = loader


def load(parameter, loaded):
    parameter.data.copy_(loaded)


class Layer(torch.nn.Module):
    """A parameter of a class of its own, one with an attribute that comes later, and normalisation with its buffers."""

    def __init__(self, width=4):
        super().__init__()
        self.weight = Sharded(torch.arange(width * 2.0).reshape(width, 2), load)
        bias = torch.nn.Parameter(torch.ones(width))
        self.register_parameter("bias", bias)
        bias.weight_loader = load
        self.norm = torch.nn.BatchNorm1d(width)
        self.register_parameter("scale", None)

    def forward(self, values):
        return self.norm(values @ self.weight.T + self.bias)


@pytest.fixture
def place(device):
    return torch.device("cpu" if device.kind == "host" else f"cuda:{device.ordinal}")


@pytest.fixture
def options(domain, device):
    return {"domain": domain, "device": device, "wait": LIMIT_SECONDS}


@pytest.fixture
def keeper(domain):
    with weights.keep("layer", domain=domain) as keeper:
        yield keeper


@pytest.fixture
def publish(keeper, options):
    """Publishes tensors as the next version."""
    return lambda state: weights.publish("layer", state, **options).close()


def on_meta():
    with weights.on_meta():
        return Layer()


def changed(state, by=1):
    return {name: tensor + by for name, tensor in state.items()}


def is_equal(module, state):
    return all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("build", [Layer, on_meta])
def test_parameters_keep_their_class_and_their_attributes(publish, options, place, build):
    state = Layer().to(place).state_dict()
    publish(state)
    module = build()
    weights.attach(module, "layer", **options)
    assert type(module.weight) is Sharded and module.weight.weight_loader is load
    assert type(module.bias) is torch.nn.Parameter and module.bias.weight_loader is load
    assert is_equal(module, state) and not module.bias.requires_grad


def test_weights_of_other_names_and_shapes_are_taken_with_replace_alone(publish, options, place):
    state = Layer().to(place).state_dict()
    state["weight"] = state["weight"].T.contiguous().to(torch.float16)
    state |= {"scale": torch.ones(3, device=place), "norm.offset": torch.ones(2, device=place)}
    publish(state)
    module = on_meta()
    module.norm.offset = None
    with pytest.raises(warpipe.WeightsMismatchError) as refused:
        weights.attach(module, "layer", **options)
    assert refused.value.unexpected and list(refused.value.different) == ["weight"]
    assert module.weight.is_meta, "nothing was changed"
    weights.attach(module, "layer", replace=True, **options)
    assert is_equal(module, state) and module.state_dict().keys() == state.keys()
    assert type(module.weight) is Sharded and module.weight.weight_loader is load
    assert module.weight.dtype == torch.float16 and module.weight.shape == (2, 4)


def test_what_a_module_cannot_take_is_named_and_nothing_is_changed(publish, options, place):
    state = Layer().to(place).state_dict()
    publish({**state, "norm": state["bias"], "forward": state["bias"], "other.weight": state["bias"]})
    module = on_meta()
    with pytest.raises(warpipe.WeightsMismatchError, match="no tensor") as refused:
        weights.attach(module, "layer", replace=True, **options)
    assert sorted(refused.value.different) == ["forward", "norm"]
    assert refused.value.unexpected == ["other.weight"] and module.weight.is_meta


def test_tied_parameters_become_two_where_the_weights_have_two(publish, options, place):
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2, bias=False), "b": torch.nn.Linear(2, 2, bias=False)})
    module["b"].weight = module["a"].weight
    publish({"a.weight": torch.zeros(2, 2, device=place), "b.weight": torch.ones(2, 2, device=place)})
    with pytest.raises(warpipe.WeightsMismatchError, match="is one tensor with"):
        weights.attach(module, "layer", **options)
    weights.attach(module, "layer", replace=True, **options)
    assert module["a"].weight.sum() == 0 and module["b"].weight.sum() == 4


def test_buffers_that_are_copied_are_written_by_the_module_and_no_version_changes(publish, options, place):
    state = changed(Layer().to(place).state_dict())
    publish(state)
    module = Layer().to(place)
    own = module.norm.running_mean.data_ptr()
    weights.attach(module, "layer", buffers="copy", **options)
    assert is_equal(module, state) and module.norm.running_mean.data_ptr() == own
    module.train()(torch.randn(8, 2, device=place))
    assert module.norm.num_batches_tracked == 2
    with torch.device("meta"):
        other = Layer()
    weights.attach(other, "layer", buffers="copy", **options)
    assert is_equal(other, state)
    other.norm.running_mean.add_(1)
    assert torch.equal(weights.load("layer", **options)["norm.running_mean"], state["norm.running_mean"])


def test_buffers_are_shared_unless_copies_are_wanted(publish, options, place):
    publish(Layer().to(place).state_dict())
    module = on_meta()
    shared = weights.attach(module, "layer", **options)
    assert module.norm.running_mean.data_ptr() == shared["norm.running_mean"].ptr
    with pytest.raises(warpipe.ArgumentError, match='"copy"'):
        weights.attach(module, "layer", buffers="own", **options)


def test_what_stays_on_meta_is_an_error_that_strict_does_not_hide(publish, options, place):
    state = Layer().to(place).state_dict()
    publish({name: tensor for name, tensor in state.items() if name not in ("bias", "norm.running_var")})
    with torch.device("meta"):
        module = Layer()
        module.register_buffer("passing", torch.zeros(2), persistent=False)
    with pytest.raises(warpipe.WeightsMismatchError, match="would stay on meta") as refused:
        weights.attach(module, "layer", strict=False, **options)
    assert refused.value.uncomputed == ["bias", "norm.running_var", "passing"]
    assert module.weight.is_meta, "nothing was changed"
    with pytest.raises(warpipe.WeightsMismatchError) as refused:
        weights.attach(module, "layer", strict=False, meta_buffers=True, **options)
    assert refused.value.uncomputed == ["bias"]
    module.bias = torch.nn.Parameter(torch.ones(4, device=place))
    weights.attach(module, "layer", strict=False, meta_buffers=True, **options)
    assert torch.equal(module.weight, state["weight"]) and module.passing.is_meta


@pytest.mark.parametrize("of", ["module", "mapping"])
def test_values_are_copied_into_tensors_that_stay_where_they_are(publish, options, place, of):
    module = Layer().to(place)
    before = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    target = module if of == "module" else dict(module.state_dict())
    for number in (1, 2):
        state = changed(Layer().to(place).state_dict(), number)
        publish(state)
        assert weights.copy_into(target, "layer", **options).version == number
        assert is_equal(module, state)
        assert before == {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    assert module.bias.requires_grad and module.weight.weight_loader is load


def test_values_are_copied_into_tied_tensors_and_those_of_inference_mode(publish, options, place):
    with torch.inference_mode():
        made = torch.zeros(3, device=place)
    publish({"a": torch.ones(3, device=place)})
    weights.copy_into({"a": made}, "layer", **options)
    module = torch.nn.Module()
    module.a = module.b = torch.nn.Parameter(torch.zeros(3, device=place))
    weights.copy_into(module, "layer", **options)
    assert made.tolist() == module.b.tolist() == [1.0, 1.0, 1.0] and module.a is module.b


@pytest.mark.parametrize("change", ["shape", "meta", "sparse", "expanded", "missing", "unexpected", "tied"])
def test_nothing_is_copied_into_tensors_that_do_not_fit(publish, options, place, change):
    publish({"a": torch.ones(3, device=place), "b": torch.zeros(3, device=place)})
    zeros = torch.zeros(3, device=place)
    target = {"a": zeros, "b": torch.zeros(3, device=place)}
    target |= {
        "shape": {"b": torch.zeros(4, device=place)},
        "meta": {"b": torch.zeros(3, device="meta")},
        "sparse": {"b": torch.zeros(3, device=place).to_sparse()},
        "expanded": {"b": torch.zeros(1, device=place).expand(3)},
        "missing": {"c": zeros.clone()},
        "unexpected": {},
        "tied": {"b": zeros},
    }[change]
    if change == "unexpected":
        del target["b"]
    with pytest.raises(warpipe.WeightsMismatchError, match="[abc]") as refused:
        weights.copy_into(target, "layer", **options)
    error = refused.value
    assert [*error.missing, *error.unexpected, *error.different] == ["c" if change == "missing" else "b"]
    assert not zeros.any()
    if change in ("missing", "unexpected"):
        weights.copy_into(target, "layer", strict=False, **options)
        assert zeros.all()


def test_nothing_is_copied_into_memory_of_weights(publish, options, place):
    state = Layer().to(place).state_dict()
    publish(state)
    module = on_meta()
    weights.attach(module, "layer", buffers="copy", **options)
    publish(changed(state))
    for target in (module, module.state_dict()):
        with pytest.raises(warpipe.WeightsMismatchError, match="attach the new version, or follow it") as refused:
            weights.copy_into(target, "layer", **options)
        assert sorted(refused.value.different) == ["bias", "norm.bias", "norm.weight", "weight"]
    assert is_equal(module, state)
    weights.copy_into(module.to(torch.float64).to(torch.float32), "layer", **options)
    assert is_equal(module, changed(state))


def test_modules_alone_are_attached_by_a_name_or_by_open_weights(publish, options):
    publish({"a": torch.ones(3)})
    for target in ({}, None, torch.nn.Linear):
        with pytest.raises(warpipe.NotATensorError, match="give"):
            weights.attach(target, "layer", **options)
    for name in (None, 3):
        with pytest.raises(TypeError, match="name"):
            weights.attach(torch.nn.Module(), name, **options)


def test_values_are_copied_into_modules_and_mappings_of_tensors_alone(publish, options):
    publish({"a": torch.ones(3)})
    for target in (3, {"a": [0.0]}):
        with pytest.raises(warpipe.NotATensorError, match="give"):
            weights.copy_into(target, "layer", **options)


def test_a_module_of_fused_tensors_is_refused_with_what_to_publish(publish, options, place):
    publish({f"experts.{number}.up.weight": torch.ones(2, 2, device=place) for number in range(2)})
    module = torch.nn.Module()
    module.experts = torch.nn.Module()
    module.experts.up = torch.nn.Parameter(torch.empty(2, 2, 2, device="meta"))
    with pytest.raises(warpipe.WeightsMismatchError, match=r"publish\(name, model\.state_dict\(\)\).*from_pretrained"):
        weights.attach(module, "layer", **options)


def mixtures():
    transformers = pytest.importorskip("transformers", "5.0")
    common = {
        "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 64, "num_experts_per_tok": 2,
    }  # fmt: skip
    return {
        "qwen3": lambda: transformers.Qwen3MoeConfig(num_experts=12, moe_intermediate_size=8, head_dim=16, **common),
        "mixtral": lambda: transformers.MixtralConfig(num_local_experts=12, **common),
        "deepseek": lambda: transformers.DeepseekV3Config(
            n_routed_experts=12, n_group=2, topk_group=1, moe_intermediate_size=8, first_k_dense_replace=1,
            kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, **common,
        ),
    }  # fmt: skip


def build(config, place):
    transformers = importlib.import_module("transformers")
    with weights.on_meta(place):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(params=["qwen3", "mixtral", "deepseek"])
def mixture(request, place):
    """A mixture of experts, its configuration, and its tensors under the names of its files."""
    transformers = pytest.importorskip("transformers", "5.0")
    loading = pytest.importorskip("transformers.core_model_loading")
    torch.manual_seed(3)
    config = mixtures()[request.param]()
    trained = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(place).eval()
    filed = loading.revert_weight_conversion(trained, trained.state_dict())
    assert any(".experts.11." in name for name in filed), "the files have a tensor for each expert"
    return trained, config, {name: tensor.contiguous() for name, tensor in filed.items()}


def answers(module, place):
    with torch.inference_mode():
        return module(input_ids=torch.tensor([[1, 7, 42, 9]], device=place)).logits


def test_a_mixture_of_experts_takes_the_weights_of_its_files(publish, options, place, mixture):
    trained, config, filed = mixture
    publish(filed)
    module = build(config, place)
    with pytest.warns(warpipe.CopyWarning, match=r"memory of this process alone.*publish\(name, model\.state_dict") as told:
        shared = weights.attach(module, "layer", **options)
    assert told[0].filename == __file__
    assert torch.equal(answers(module, place), answers(trained, place))
    assert module.lm_head.weight.data_ptr() == shared["lm_head.weight"].ptr


@pytest.mark.filterwarnings("error")
def test_a_mixture_of_experts_shares_its_own_tensors(publish, options, place, mixture):
    trained, config, filed = mixture
    publish(trained.state_dict())
    module = build(config, place)
    weights.attach(module, "layer", **options)
    assert torch.equal(answers(module, place), answers(trained, place))
    publish(changed(filed, 0.25))
    before = {name: tensor.data_ptr() for name, tensor in trained.state_dict().items()}
    old = answers(trained, place)
    weights.copy_into(trained, "layer", **options)
    assert before == {name: tensor.data_ptr() for name, tensor in trained.state_dict().items()}
    assert torch.equal(trained.lm_head.weight, filed["lm_head.weight"]) and not torch.equal(answers(trained, place), old)


@pytest.mark.parametrize("fault", ["absent", "expert"])
def test_a_mixture_that_transformers_does_not_convert_is_refused_with_what_to_publish(
    publish, options, place, mixture, monkeypatch, fault
):
    _, config, filed = mixture
    if fault == "absent":
        mapping = importlib.import_module("transformers.conversion_mapping")
        monkeypatch.delattr(mapping, "get_model_conversion_mapping")
    else:
        del filed[next(name for name in filed if ".experts.7." in name)]
    publish(filed)
    module = build(config, place)
    said = r"transformers does not convert.*publish\(name, model\.state_dict\(\)\)" if fault == "absent" else "publish"
    with pytest.raises(warpipe.WeightsMismatchError, match=said) as refused:
        weights.attach(module, "layer", **options)
    assert any("experts" in name for name in [*refused.value.missing, *refused.value.different])
    assert all(parameter.is_meta for parameter in module.parameters()), "nothing was changed"
