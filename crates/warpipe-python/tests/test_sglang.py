"""The load format and the weight loader of SGLang, over a stand-in of its seams. `cargo xtask engines` has the real one."""

import types

import pytest
from conftest import LIMIT_SECONDS

import warpipe
from warpipe import weights

torch = pytest.importorskip("torch")
standin = pytest.importorskip("standin_sglang")
from warpipe import sglang  # noqa: E402

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the stand-ins compute on the CPU, and PyTorch keeps a pool's memory on a GPU"
)


@pytest.fixture
def place(device):
    return torch.device("cpu" if device.kind == "host" else f"cuda:{device.ordinal}")


@pytest.fixture
def load(domain, device, place, monkeypatch, request):
    """An engine's load: the loader, and the model. A keeper runs in this process."""
    keepers = {}

    def keep(name, domain, allow_uids):
        keepers.setdefault(name, weights.keep(name, domain=domain))

    monkeypatch.setattr("warpipe._transfer.keep", keep)
    seen = standin.install(monkeypatch, **getattr(request, "param", {}))
    sglang.register()

    def load(config=None, **extra):
        chosen = seen.LoadConfig("warpipe", {"domain": domain.path, **extra})
        loader = seen.get_model_loader(chosen)
        device_config = types.SimpleNamespace(device=place)
        return loader, loader.load_model(model_config=config or standin.model_config(), device_config=device_config)

    load.seen, load.keepers = seen, keepers
    yield load
    for keeper in keepers.values():
        keeper.close()


def test_the_load_format_is_one_of_sglangs_and_others_stay_as_they_are(load):
    sglang.register()
    assert load.seen.choices == ["auto", "warpipe"]
    assert load.seen.LoadConfig("auto").load_format is standin.LoadFormat.AUTO
    with pytest.raises(ValueError, match="other"):
        load.seen.LoadConfig("other")


def test_the_first_engine_loads_and_publishes_and_the_next_one_takes_the_same_memory(load, domain, device):
    _, first = load(num_threads=2)
    loader, second = load()
    assert load.seen.loads == 1 and second.loads == 0 and not second.training
    [name] = load.keepers
    shared = weights.open(name, device=device, domain=domain)
    assert name.startswith("sglang/") and shared.metadata["model"] == "a/model"
    ours, theirs = second.state_dict(), first.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    for key, parameter in second.named_parameters():
        assert parameter.data_ptr() == shared[key].ptr and not parameter.requires_grad, key
    assert second.first.weight.weight_loader and torch.equal(second.first.computed, first.first.computed)
    assert loader.preloaded_weights_bytes == shared.nbytes and load.seen.rebuilt == [id(second)]
    # An engine writes its buffers.
    second.first.filled.fill_(7)
    assert first.first.filled.unique().tolist() == [3] and load()[1].first.filled.unique().tolist() == [3]


def test_engines_of_other_settings_do_not_share(load):
    load()
    load(standin.model_config("b/model"))
    load(standin.model_config(revision="later"))
    load.seen.parallel.tp_size, load.seen.parallel.tp_rank = 2, 1
    load()
    assert load.seen.loads == 4 and len(load.keepers) == 4


def test_a_name_that_is_given_has_one_of_each_rank_and_no_other_model(load):
    load(name="policy")
    with pytest.raises(warpipe.WeightsMismatchError, match=r"model is 'b/model' here.*another name"):
        load(standin.model_config("b/model"), name="policy")
    load.seen.parallel.tp_size, load.seen.parallel.tp_rank = 2, 1
    load(name="policy")
    assert list(load.keepers) == ["policy", "policy/1of2"]


@pytest.mark.parametrize(
    ("load", "said"),
    [
        ({"memory_saver": True}, "enable-memory-saver"),
        ({"eplb": True}, "enable-eplb"),
        ({"architecture": standin.DerivingModel}, "derives"),
    ],
    indirect=["load"],
)
def test_what_writes_weights_or_derives_from_them_is_refused_before_the_load(load, said):
    with pytest.raises(warpipe.ArgumentError, match=f"{said}.*--load-format auto"):
        load()
    assert not load.seen.loads and not load.keepers


def test_a_quantization_that_sglang_does_not_share_is_refused(load):
    with pytest.raises(ValueError, match="gptq is not verified"):
        load(standin.model_config(quantization="gptq"))


@pytest.mark.parametrize("load", [{"architecture": standin.KeepingModel}], indirect=True)
def test_tensors_that_loading_leaves_beside_the_parameters_are_an_error_that_names_them(load):
    load()
    with pytest.raises(warpipe.WeightsMismatchError, match=r"kept.*--load-format auto"):
        load()


def test_a_trainers_version_is_copied_into_a_model_of_another_load_format(domain, device, place, monkeypatch):
    monkeypatch.setenv("WARPIPE_DOMAIN", str(domain.path))
    model = standin.Model().to(place)
    before = model.head.weight.data_ptr()
    state = {name: tensor.to(place) for name, tensor in standin.checkpoint().items()}
    with weights.keep("policy", domain=domain):
        for factor in (1, 2):
            new = {name: tensor * factor for name, tensor in state.items()}
            version = weights.publish("policy", new, device=device, domain=domain, wait=LIMIT_SECONDS).version
            sglang.load_published(model, sglang.announced("policy", version))
            assert torch.equal(model.first.weight, new["first.weight"]) and model.head.weight.data_ptr() == before
    for tensors in ([], [("a", torch.ones(1))], [*sglang.announced("policy", 1), ("a", torch.ones(1))]):
        with pytest.raises(warpipe.ArgumentError, match=r"announced\(name, version\)"):
            sglang.load_published(model, tensors)


def test_shared_weights_are_no_place_for_a_trainers_version(load):
    load()
    model = load()[1]
    with pytest.raises(warpipe.ArgumentError, match="may only be read.*without --load-format"):
        sglang.load_published(model, sglang.announced("policy", 1))
