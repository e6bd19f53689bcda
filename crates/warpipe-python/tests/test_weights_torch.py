"""Model weights in PyTorch: modules are given published tensors, and state dicts are published."""

import threading

import numpy as np
import pytest

import warpipe
from warpipe import weights

torch = pytest.importorskip("torch")

LIMIT_SECONDS = 60.0


class Model(torch.nn.Module):
    """An embedding that is tied to the last layer, a buffer of each kind, and no bias."""

    def __init__(self, width=8, dtype=torch.bfloat16):
        super().__init__()
        self.embed = torch.nn.Embedding(16, width, dtype=dtype)
        self.norm = torch.nn.LayerNorm(width, dtype=dtype)
        self.head = torch.nn.Linear(width, 16, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((), 0.5))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens))) * self.scale


def on_meta(**options):
    with weights.on_meta():
        return Model(**options)


@pytest.fixture
def place(device):
    """The device of PyTorch's tensors."""
    return torch.device("cpu" if device.kind == "host" else f"cuda:{device.ordinal}")


@pytest.fixture
def options(domain, device):
    return {"domain": domain, "device": device, "wait": LIMIT_SECONDS}


@pytest.fixture
def trained(place):
    torch.manual_seed(7)
    return Model().to(place)


@pytest.fixture
def published(domain, options, trained):
    with weights.keep("model", domain=domain), weights.publish("model", trained.state_dict(), **options) as published:
        yield published


def test_a_module_built_on_meta_computes_what_the_published_one_does_bit_for_bit(published, options, trained, place):
    module = on_meta()
    shared = weights.attach(module, "model", **options)
    assert shared.version == published.version
    tokens = torch.arange(16, device=place)
    with torch.no_grad():
        assert torch.equal(module(tokens), trained(tokens))


def test_a_module_is_given_the_tensors_also_where_it_is_built(published, options, trained):
    with weights.on_meta():
        module = Model()
        weights.attach(module, "model", **options)
        module.rnn = torch.nn.LSTM(2, 2)
        assert module.rnn.weight_ih_l0.is_meta
        assert torch.equal(module.norm.weight, trained.norm.weight) and module.scale.item() == 0.5
        assert Model().norm.weight.is_meta
    assert torch.equal(module.head.weight, trained.head.weight)


def test_tied_parameters_are_one_tensor_in_the_memory_and_in_the_module(published, options):
    module = on_meta()
    shared = weights.attach(module, "model", **options)
    assert module.head.weight is module.embed.weight
    assert shared.offset("head.weight") == shared.offset("embed.weight")
    assert module.embed.weight.data_ptr() % 512 == 0


def test_parameters_need_no_gradients_afterwards_and_passing_buffers_stay(published, options):
    module = on_meta()
    module.cache = torch.ones(3)
    weights.attach(module, "model", **options)
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert torch.equal(module.cache, torch.ones(3)) and module.scale.item() == 0.5


def test_the_name_that_a_file_left_out_because_it_is_tied_is_no_difference(domain, options, trained):
    state = {name: tensor for name, tensor in trained.state_dict().items() if name != "head.weight"}
    with weights.keep("untied", domain=domain), weights.publish("untied", state, **options):
        module = on_meta()
        weights.attach(module, "untied", **options)
        assert module.head.weight is module.embed.weight
        assert torch.equal(module.head.weight, trained.head.weight)


@pytest.mark.parametrize("change", ["width", "dtype", "name"])
def test_a_module_that_does_not_fit_is_refused_with_all_names_and_keeps_what_it_had(published, options, change):
    module = {
        "width": lambda: on_meta(width=4),
        "dtype": lambda: on_meta(dtype=torch.float32),
        "name": on_meta,
    }[change]()
    if change == "name":
        module.other = torch.nn.Linear(2, 2, device="meta")
        del module.norm
    before = dict(module.named_parameters())
    with pytest.raises(warpipe.WeightsMismatchError) as refused:
        weights.attach(module, "model", **options)
    error = refused.value
    if change == "name":
        assert sorted(error.missing) == ["other.bias", "other.weight"]
        assert sorted(error.unexpected) == ["norm.bias", "norm.weight"] and not error.different
    else:
        assert {"embed.weight", "norm.weight", "norm.bias"} <= set(error.different)
        assert not error.missing and not error.unexpected
    after = dict(module.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)


def test_names_that_only_one_side_has_are_left_out_if_that_is_wanted(published, options, trained):
    module = on_meta()
    module.other = torch.nn.Linear(2, 2)
    kept = module.other.weight
    weights.attach(module, "model", strict=False, **options)
    assert not module.cache.is_meta
    assert module.other.weight is kept
    assert torch.equal(module.norm.weight, trained.norm.weight)


def test_tensors_that_are_loaded_are_torchs_and_outlive_the_publisher(domain, options, trained):
    with weights.keep("gone", domain=domain) as keeper:
        weights.publish("gone", trained.state_dict(), **options).close()
        tensors = weights.load("gone", **options)
        keeper.close()
    expected = trained.state_dict()
    assert tensors.keys() == expected.keys()
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_views_with_strides_a_conjugate_and_a_0_d_tensor_arrive_as_their_values(domain, options, place):
    base = torch.arange(24, dtype=torch.float32, device=place).reshape(4, 6)
    given = {
        "turned": base.T,
        "stepped": base[::2, 1::2],
        "conjugate": torch.complex(base, base + 1).conj(),
        "one": torch.tensor(3, device=place),
        "none": base[:0],
        "parameter": torch.nn.Parameter(base),
    }
    with weights.keep("views", domain=domain), weights.publish("views", given, **options):
        found = weights.load("views", **options)
        for name, tensor in given.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor.detach().resolve_conj()), name


def test_numpy_arrays_and_tensors_may_be_published_together(domain, options, place):
    given = {"array": np.arange(5, dtype="f4"), "tensor": torch.arange(5, device=place)}
    with weights.keep("both", domain=domain), weights.publish("both", given, **options):
        found = weights.load("both", **options)
        assert found["array"].tolist() == found["tensor"].tolist() == [0, 1, 2, 3, 4]


def test_buffers_that_no_weights_have_are_named_where_a_module_has_them_on_meta(published, options):
    with torch.device("meta"):
        module = torch.nn.Sequential(Model())
    state = {f"0.{name}": found for name, found in weights.load("model", **options).items()}
    with weights.keep("inner", domain=options["domain"]), weights.publish("inner", state, **options):
        before = module[0].embed.weight
        with pytest.raises(warpipe.WeightsMismatchError, match=r"on meta.* 0\.cache; build the module in .*on_meta") as refused:
            weights.attach(module, "inner", **options)
        assert refused.value.uncomputed == ["0.cache"]
        assert module[0].embed.weight is before, "nothing was changed"
        weights.attach(module, "inner", meta_buffers=True, **options)
        assert module[0].cache.is_meta and not module[0].embed.weight.is_meta


def test_a_module_built_in_on_meta_allocates_no_parameters_and_has_its_buffers_on_the_device(place):
    tied = torch.nn.Parameter(torch.ones(2))
    with weights.on_meta(place):
        module = Model()
        other = torch.nn.Module()
        module.one, other.two = tied, tied
        module.lazy = torch.nn.LazyLinear(2)
    assert all(parameter.is_meta for name, parameter in module.named_parameters() if not name.startswith("lazy"))
    assert module.head.weight is module.embed.weight and other.two is module.one
    assert module.norm.weight.requires_grad
    assert module.cache.device == module.scale.device == torch.zeros(0, device=place).device
    assert module.scale.item() == 0.5 and module.cache.tolist() == [0.0] * 3
    assert not Model().norm.weight.is_meta and not tied.is_meta, "it ends with the block"


def test_modules_of_other_threads_are_built_as_always():
    made = []
    with weights.on_meta():
        thread = threading.Thread(target=lambda: made.append(torch.nn.Linear(2, 2)))
        thread.start()
        thread.join()
    assert not made[0].weight.is_meta


def test_a_transformer_with_rotary_embeddings_answers_as_the_published_one(domain, options, place):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, vocab_size=128,
        num_hidden_layers=2, tie_word_embeddings=True,
    )  # fmt: skip
    build = transformers.AutoModelForCausalLM.from_config
    trained = build(config, dtype=torch.bfloat16).to(place).eval()
    with weights.keep("llama", domain=domain), weights.publish("llama", trained.state_dict(), **options):
        with torch.device("meta"):
            module = build(config, dtype=torch.bfloat16).eval()
        with pytest.raises(warpipe.WeightsMismatchError, match=r"model\.rotary_emb\.inv_freq"):
            weights.attach(module, "llama", **options)
        with weights.on_meta(place):
            module = build(config, dtype=torch.bfloat16).eval()
        assert all(parameter.is_meta for parameter in module.parameters())
        weights.attach(module, "llama", **options)
        tokens = torch.tensor([[1, 7, 42, 9]], device=place)
        with torch.inference_mode():
            assert torch.equal(module(input_ids=tokens).logits, trained(input_ids=tokens).logits)


@pytest.mark.filterwarnings("ignore")
def test_tensors_that_cannot_be_published_are_named_with_the_next_step(domain, options):
    distributed = torch.ones(2).as_subclass(type("Distributed", (torch.Tensor,), {"full_tensor": None, "__module__": "torch.x"}))
    given = {
        "meta device.*load": torch.empty(3, device="meta"),
        "torch.sparse_coo.*to_dense": torch.eye(3).to_sparse(),
        "quantized.*tensors that it consists": torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8),
        "nested.*tensors that it consists": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "lazy.*call its module": torch.nn.parameter.UninitializedParameter(),
        "distributed.*full_tensor": distributed,
        "object": np.array([object()]),
        "byte order": np.ones(3, ">f4"),
    }
    with weights.keep("odd", domain=domain) as keeper:
        for said, tensor in given.items():
            with pytest.raises(warpipe.Error, match=f"layer.weight.*{said}"):
                weights.publish("odd", {"fine": torch.ones(2), "layer.weight": tensor}, **options)
        assert keeper.version is None


def test_values_of_four_bits_are_published_and_sent_in_pairs_with_their_scales(domain, options, place, link):
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this PyTorch has no such type")
    raw = torch.arange(96, dtype=torch.uint8, device=place).reshape(3, 32)
    pairs, scales = raw.view(torch.float4_e2m1fn_x2), raw[:, :2].contiguous().view(torch.float8_e8m0fnu)
    with weights.keep("model", domain=domain), weights.publish("model", {"w": pairs, "s": scales}, **options):
        loaded = weights.load("model", **options)
    publisher, subscriber = link
    sent = {}
    for name, tensor in (("w", pairs), ("s", scales), ("gaps", pairs[:, ::2])):
        publisher.send(tensor)
        sent[name] = subscriber.receive().torch()
    for name, found, wanted in (
        ("w", loaded["w"], pairs),
        ("s", loaded["s"], scales),
        ("w", sent["w"], pairs),
        ("s", sent["s"], scales),
        ("gaps", sent["gaps"], pairs[:, ::2].contiguous()),
    ):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), name
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), name
    with pytest.raises(warpipe.DTypeError, match=r"\.torch\(\)"):
        publisher.send(pairs)
        subscriber.receive().numpy()
