"""Models of transformers that are built on published weights, as from_pretrained builds them on files."""

import subprocess
import sys
import warnings

import pytest
from conftest import LIMIT_SECONDS

import warpipe
from warpipe import weights

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", "5.0")
published = pytest.importorskip("warpipe.transformers")

SIZES = {
    "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "vocab_size": 64,
}  # fmt: skip
KINDS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "tied": lambda: transformers.LlamaConfig(tie_word_embeddings=True, **SIZES),
    "mixture": lambda: transformers.Qwen3MoeConfig(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, head_dim=16, **SIZES
    ),
    # Its configuration has an infinite number.
    "state space": lambda: transformers.Mamba2Config(
        hidden_size=32, num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=4, num_hidden_layers=2, vocab_size=64
    ),
    "encoder": lambda: transformers.BertConfig(
        hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    ),
}


@pytest.fixture
def place(device):
    return torch.device("cpu" if device.kind == "host" else f"cuda:{device.ordinal}")


@pytest.fixture
def options(domain, device):
    return {"domain": domain, "device": device, "wait": LIMIT_SECONDS}


@pytest.fixture(autouse=True)
def keeper(domain):
    with weights.keep("model", domain=domain) as keeper:
        yield keeper


def trained(kind, place, dtype=torch.bfloat16):
    torch.manual_seed(5)
    config = KINDS[kind]()
    chosen = transformers.AutoModelForMaskedLM if kind == "encoder" else transformers.AutoModelForCausalLM
    return chosen.from_config(config, dtype=dtype).to(place).eval()


def answer(model, place):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([[1, 7, 42, 9]], device=place)).logits


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", KINDS)
def test_a_published_model_is_built_by_its_name_alone_and_shares_its_weights(options, place, kind):
    model = trained(kind, place)
    published.publish(model, "model", **options).close()
    shared = weights.open("model", **options)
    built = published.from_published(shared)
    assert type(built) is type(model) and not built.training
    assert torch.equal(answer(built, place), answer(model, place))
    for name, parameter in built.named_parameters():
        assert parameter.data_ptr() == shared[name].ptr and not parameter.requires_grad, name
    tied = built.get_input_embeddings().weight is built.get_output_embeddings().weight
    assert tied == (kind in ("tied", "encoder"))


@pytest.mark.parametrize("given", ["object", "mapping", "folder"])
def test_a_configuration_may_be_given_in_each_form_that_from_pretrained_takes(options, place, given, tmp_path):
    model = trained("llama", place)
    weights.publish("model", model.state_dict(), **options).close()
    model.config.save_pretrained(tmp_path)
    config = {"object": KINDS["llama"](), "mapping": model.config.to_dict(), "folder": tmp_path}[given]
    built = published.from_published("model", config, **options)
    assert isinstance(built, transformers.LlamaForCausalLM) and torch.equal(answer(built, place), answer(model, place))


def test_a_models_files_and_its_weights_give_the_same_answer_and_generation(options, place, tmp_path):
    model = trained("llama", place)
    model.generation_config = transformers.GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=63, pad_token_id=0)
    model.save_pretrained(tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).to(place)
    published.publish(read, "model", metadata={"step": 3}, **options).close()
    built = published.from_published("model", **options)
    assert weights.open("model", **options).metadata["step"] == 3
    assert built.generation_config.max_new_tokens == 5 and built.config.dtype == read.config.dtype
    tokens = torch.tensor([[1, 7, 42]], device=place)
    assert torch.equal(built.generate(tokens), read.generate(tokens))
    for given in ({"max_new_tokens": 2}, transformers.GenerationConfig(max_new_tokens=2)):
        other = published.from_published("model", generation_config=given, **options)
        assert other.generation_config.max_new_tokens == 2


def test_parameters_have_the_types_of_the_weights_unless_one_is_demanded(options, place):
    model = trained("mixture", place)
    router = "model.layers.0.mlp.gate.weight"
    state = {name: tensor.float() if name == router else tensor for name, tensor in model.state_dict().items()}
    weights.publish("model", state, **options).close()
    built = published.from_published("model", KINDS["mixture"](), **options)
    assert built.get_parameter(router).dtype == torch.float32 and built.dtype == torch.bfloat16
    with pytest.raises(warpipe.WeightsMismatchError, match="float32") as refused:
        published.from_published("model", KINDS["mixture"](), dtype=torch.bfloat16, **options)
    assert list(refused.value.different) == [router]


def test_a_model_follows_new_versions_at_its_addresses(options, place):
    model = trained("llama", place)
    published.publish(model, "model", **options).close()
    shared = weights.open("model", **options)
    built, follower = published.from_published(shared), shared.follow()
    before = built.lm_head.weight.data_ptr()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    published.publish(model, "model", **options).close()
    assert follower.update() == 2 and built.lm_head.weight.data_ptr() == before
    assert torch.equal(answer(built, place), answer(model, place))


def test_what_the_weights_lack_is_an_error_that_lists_it_also_without_strict(options, place):
    state = trained("llama", place).state_dict()
    del state["model.norm.weight"]
    weights.publish("model", {**state, "extra": torch.ones(2, device=place)}, **options).close()
    with pytest.raises(warpipe.WeightsMismatchError, match="publish") as refused:
        published.from_published("model", KINDS["llama"](), strict=False, **options)
    assert refused.value.missing == ["model.norm.weight"] and refused.value.unexpected == ["extra"]


def test_what_the_model_lacks_is_an_error_and_a_warning_lists_it_without_strict(options, place):
    model = trained("llama", place)
    known = "model.layers.0.self_attn.rotary_emb.inv_freq"
    more = {"extra": torch.ones(2, device=place), known: torch.ones(2, device=place)}
    weights.publish("model", {**model.state_dict(), **more}, **options).close()
    with pytest.raises(warpipe.WeightsMismatchError) as refused:
        published.from_published("model", KINDS["llama"](), **options)
    assert sorted(refused.value.unexpected) == ["extra", known]
    with pytest.warns(UserWarning, match="left out: extra") as told:
        built = published.from_published("model", KINDS["llama"](), strict=False, **options)
    assert told[0].filename == __file__ and torch.equal(answer(built, place), answer(model, place))
    declared = type("Llama", (transformers.LlamaForCausalLM,), {"_keys_to_ignore_on_load_unexpected": [r"inv_freq$", "extra"]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        published.from_published("model", KINDS["llama"](), strict=False, model_class=declared, **options)


def test_what_cannot_be_built_is_an_error_with_the_next_step(options, place):
    model = trained("llama", place)
    weights.publish("model", model.state_dict(), metadata=[1], **options).close()

    def built(config=None, **more):
        return lambda: published.from_published("model", config, **options, **more)

    unknown = KINDS["llama"]()
    unknown.architectures = ["OfMyOwnForCausalLM"]
    quantized = KINDS["llama"]()
    quantized.quantization_config = {"quant_method": "fp8"}
    refusals = {
        r"no configuration.*warpipe\.transformers\.publish": built(),
        "no model_type 'other'.*give config=": built({"model_type": "other"}),
        "no class 'OfMyOwnForCausalLM'.*model_class=": built(unknown),
        r"quantization_config.*warpipe\.weights\.attach": built(quantized),
        "model_class is .*LlamaForCausalLM": built(KINDS["llama"](), model_class=torch.nn.Linear),
        "a Linear is no PreTrainedModel": lambda: published.publish(torch.nn.Linear(2, 2), "model", **options),
    }
    for said, attempt in refusals.items():
        with pytest.raises(warpipe.ArgumentError, match=said):
            attempt()


def test_warpipe_does_not_import_transformers_before_a_model_is_built():
    program = "import sys, warpipe, warpipe.transformers\nassert not {'torch', 'transformers'} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
