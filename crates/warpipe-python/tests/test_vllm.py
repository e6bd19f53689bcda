"""vLLM's load format and its weight transfer, against stand-ins of the seams of two versions: see ``standin_vllm``."""

import fcntl
import gc
import importlib
import os
import subprocess
import sys

import pytest
from conftest import LIMIT_SECONDS, until

import warpipe
from warpipe import weights

torch = pytest.importorskip("torch")
import standin_vllm  # noqa: E402 - it needs PyTorch

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the stand-ins compute on the CPU; `warpipe.bench.vllm` runs vLLM on a GPU"
)
FP8 = "fp8"


@pytest.fixture(params=standin_vllm.VERSIONS)
def version(request):
    return request.param


@pytest.fixture
def vllm(monkeypatch, version):
    """vLLM's stand-in, with what this package registers there."""
    with monkeypatch.context() as patch:
        def install(rank=0, ranks=1):
            for name in ("_loader", "_weight_transfer"):
                sys.modules.pop(f"warpipe.vllm.{name}", None)
            installed = standin_vllm.install(
                patch, version, lambda: standin_vllm.checkpoint().items(), rank=rank, ranks=ranks
            )
            importlib.import_module("warpipe.vllm").register()
            return installed

        yield install
    for name in ("_loader", "_weight_transfer"):
        sys.modules.pop(f"warpipe.vllm.{name}", None)


@pytest.fixture
def others(monkeypatch):
    """What the other ranks say when they compare their versions: by default what this one does."""
    said = []

    def gather(found, mine, group):
        found[:] = [mine, *(said or [mine] * (len(found) - 1))]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    return said


@pytest.fixture
def load(vllm, domain, device, others):
    """Loads a model as a process of vLLM does; engines of this test are in one process."""
    names = []

    def load(rank=0, ranks=1, **given):
        installed = vllm(rank, ranks)
        extra = {"domain": domain, **given.pop("extra", {})}
        configured = standin_vllm.configs(extra=extra, **given)
        model = installed.loaders["warpipe"](configured[2]).load_model(*configured[:2])
        model.calls, model.configs, model.vllm = installed.calls, configured, installed
        names.append(model._warpipe_loaded.name)
        return model

    yield load
    # As vLLM does at an engine's end.
    gc.unfreeze()
    for name in set(names):
        # A publisher of hashes that come later goes on until a keeper has them.
        until(lambda name=name: weights.open(name, device=device, domain=domain).is_hashed, "the hashes")
        command = [sys.executable, "-m", "warpipe", "weights", "drop", name, "--domain", str(domain.path)]
        subprocess.run(command, timeout=LIMIT_SECONDS, check=False, capture_output=True)


def output(model):
    with torch.no_grad():
        return model(torch.linspace(-1, 1, 128).reshape(1, -1))


def plain(monkeypatch_install, **given):
    """The same model, loaded by vLLM's own loader."""
    configured = standin_vllm.configs(**given)
    configured[2].load_format, configured[2].model_loader_extra_config = "auto", {}
    return monkeypatch_install().loaders["auto"](configured[2]).load_model(*configured[:2])


@pytest.mark.parametrize("quantization", [None, FP8])
def test_the_first_engine_loads_and_publishes_and_the_next_ones_take_the_same_memory(load, vllm, quantization, device):
    wanted = output(plain(vllm, quantization=quantization))
    first = load(quantization=quantization)
    assert first.calls == ["load"] and torch.equal(output(first), wanted)
    held = device.bytes_held
    second = load(quantization=quantization)
    assert second.calls == [] and torch.equal(output(second), wanted)
    steps = {"identity", "turn", "open", "build", "weights", "processing"}
    assert second._warpipe_loaded.took.keys() == steps < first._warpipe_loaded.took.keys()
    # A thread of the library unmaps the publisher's memory.
    until(lambda: device.bytes_held <= held, "one mapping for both")
    for (name, one), (_, other) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert one.data_ptr() == other.data_ptr() and one.stride() == other.stride(), name
        assert type(one) is type(other) and vars(one) == vars(other)
    # What vLLM writes is each engine's own.
    assert first.down.used.data_ptr() != second.down.used.data_ptr() and second.down.used.item() == 1.0
    if quantization:
        assert second.down.kernel.weight is second.down.weight and second.down.out_scale_float == 0.5
        assert not hasattr(second.down, "placeholder") and second.down.weight.stride() == (1, 96)


def test_another_model_revision_quantization_or_rank_has_another_name(load):
    names = [
        load(**given)._warpipe_loaded.name
        for given in ({}, {"model": "another/model"}, {"quantization": FP8}, {"rank": 1, "ranks": 2}, {"transfer": True})
    ]
    assert len(set(names)) == len(names)
    assert all(name.startswith("vllm/") and len(name) < 200 for name in names)
    assert load()._warpipe_loaded.name == names[0]


def test_a_folder_is_one_model_however_it_is_written(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to("model")
    for written in ("model", str(tmp_path / "model"), "./model/", "link"):
        assert load(model=written).calls == (["load"] if written == "model" else [])


def test_ranks_with_versions_of_several_updates_are_refused(load, others, domain, device):
    given = {"ranks": 2, "transfer": True, "extra": {"name": "policy"}}
    loaded = [load(rank=rank, **given)._warpipe_loaded for rank in range(2)]
    sent = importlib.import_module("warpipe.vllm").Trainer([one.name for one in loaded], devices=[device] * 2, domain=domain)
    with pytest.MonkeyPatch.context() as patch:
        publish = weights.publish_in_phases

        def dying(name, *given, **options):
            if name == "policy/1of2":
                raise KeyboardInterrupt
            return publish(name, *given, **options)

        patch.setattr(weights, "publish_in_phases", dying)
        with pytest.raises(KeyboardInterrupt):
            sent.send({name: tensor for name, tensor in standin_vllm.checkpoint(2).items() if name != "out_scale"})
    sent.close()
    others.append(("policy/1of2", 1, None))
    with pytest.raises(warpipe.WeightsMismatchError, match=r"several updates of a trainer: policy/0of2 2, policy/1of2 1; start again, .*weights drop"):
        load(rank=0, **given)


def test_weights_of_another_user_are_opened_and_none_are_published_there(load, tmp_path, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory to another user")
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o711)
    os.chown(folder, 61_211, 61_211)
    monkeypatch.setattr("warpipe._transfer.TAKEOVER_SECONDS", 0.1)
    with pytest.raises(warpipe.NotFoundError, match=r"offers no weights 'policy'; start an engine of that user before.*allow_uids: \[0\]"):
        load(extra={"name": "policy", "domain": str(folder), "owner": 61_211})
    assert list(folder.iterdir()) == []


def test_ranks_compare_their_versions_when_no_other_process_waits_for_them(load, domain, monkeypatch):
    # Two engines of two ranks, each with the turn of one rank, would wait for each other.
    free = []

    def gather(found, mine, group):
        found[:] = [mine] * len(found)
        for path in domain.path.glob(".loads-*"):
            descriptor = os.open(path, os.O_RDWR)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(descriptor)
            free.append(path)

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    for _ in range(2):
        load(rank=0, ranks=2)
    assert len(free) == 2


def test_a_name_that_is_given_is_the_ranks_and_refuses_another_model(load):
    first = load(rank=1, ranks=2, extra={"name": "policy"})
    assert first._warpipe_loaded.name == "policy/1of2"
    about = first._warpipe_loaded.receiver.weights.metadata
    assert (about["model"], about["tp"], about["dtype"]) == ("some/model", "1of2", "float32")
    with pytest.raises(warpipe.WeightsMismatchError, match="model is 'another/model' here, and 'some/model' there"):
        load(rank=1, ranks=2, model="another/model", extra={"name": "policy"})


def test_an_engine_goes_on_with_what_others_have_when_the_keeper_was_killed(load, domain):
    first = load()
    name, wanted = first._warpipe_loaded.name, output(first)
    drop = [sys.executable, "-m", "warpipe", "weights", "drop", name, "--domain", str(domain.path)]
    subprocess.run(drop, check=True, timeout=LIMIT_SECONDS)
    second = load()
    assert second.calls == [] and torch.equal(output(second), wanted)


def test_what_writes_or_moves_weights_is_refused_with_the_next_step(load):
    for given, what in (({"sleep": True}, "sleep mode frees weights"), ({"offload": 4.0}, "offloading to the host moves weights")):
        with pytest.raises(warpipe.ArgumentError, match=f"{what}.*--load-format auto"):
            load(**given)


def test_weights_of_files_that_have_changed_are_loaded_anew_and_the_kept_ones_are_told(load, tmp_path, caplog):
    (tmp_path / "model.safetensors").write_bytes(b"1")
    names = []
    for changed in (b"1", b"12"):
        (tmp_path / "model.safetensors").write_bytes(changed)
        model = load(model=str(tmp_path))
        names.append(model._warpipe_loaded.name)
        assert model.calls == ["load"]
    assert f"if no engine needs them: warpipe weights drop {names[0]}" in caplog.text
    assert names[0] != names[1] and caplog.text.count("Other weights") == 1
    assert "/held-" not in caplog.text


def test_memory_that_is_kept_in_another_object_is_refused(load, monkeypatch):
    load(quantization=FP8)

    def keeping(self, layer, process=standin_vllm.Fp8LinearMethod.process_weights_after_loading):
        process(self, layer)
        layer.kernel.weight = layer.weight.data

    monkeypatch.setattr(standin_vllm.Fp8LinearMethod, "process_weights_after_loading", keeping)
    with pytest.raises(warpipe.WeightsMismatchError, match=r"keeps the memory of down\.weight.*--load-format auto"):
        load(quantization=FP8)


def test_a_version_that_does_not_fit_the_model_is_an_error_that_names_the_parameter(load, domain, device):
    first = load(extra={"name": "policy"})
    shared = first._warpipe_loaded.receiver.weights
    state = {name: view.torch() for name, view in shared.items()} | {"norm": torch.ones(64)}
    weights.publish("policy", state, device=device, domain=domain, metadata=shared.metadata).close()
    with pytest.raises(warpipe.WeightsMismatchError, match=r"version 2 .* does not fit the model: norm; warpipe weights drop"):
        load(extra={"name": "policy"})


@pytest.mark.parametrize("version", ["0.33"], indirect=True)
def test_memory_of_other_processes_is_counted_before_an_engine_has_any(load, vllm, domain):
    loader = vllm().loaders["warpipe"]
    configured = standin_vllm.configs(extra={"domain": domain})
    assert loader(configured[2]).get_external_weight_memory(configured[0]) == 0
    first = load()
    size = first._warpipe_loaded.receiver.weights.nbytes
    assert loader(configured[2]).get_external_weight_memory(configured[0]) == size


def engine_of(model):
    """The engine of the weight transfer, as the worker makes it."""
    cls = model.vllm.WeightTransferEngineFactory._registry["warpipe"]()
    vllm_config = model.configs[0]
    config = vllm_config.weight_transfer_config
    if hasattr(model.vllm, "WeightTransferTrainerFactory"):
        return cls(config, vllm_config, torch.device("cpu"), model)
    return cls(config, vllm_config.parallel_config, model)


class Client:
    """The engines, as a trainer reaches them."""

    def __init__(self, models):
        self.engines = [engine_of(model) for model in models]

    def init_weight_transfer_engine(self, info):
        for engine in self.engines:
            engine.init_transfer_engine(engine.parse_init_info(info))

    def start_weight_update(self):
        for engine in self.engines:
            if hasattr(engine, "start_weight_update"):
                engine.start_weight_update()

    def update_weights(self, info):
        for engine in self.engines:
            given = engine.parse_update_info(info)
            engine.receive_weights(given) if hasattr(engine, "vllm_config") else engine.receive_weights(
                given, load_weights=engine.model.load_weights
            )

    def finish_weight_update(self):
        for engine in self.engines:
            if hasattr(engine, "finish_weight_update"):
                engine.finish_weight_update()


def trainer_of(client, version, domain, device, ranks=1):
    """Sends tensors to the engines of a client, by the trainer half that this version of vLLM has."""
    if version == "0.33":
        info = importlib.import_module("warpipe.vllm").trainer_init_info(
            "policy", ranks=ranks, devices=[device] * ranks, domain=domain
        )
        cls = importlib.import_module("warpipe.vllm._weight_transfer").WarpipeTrainerWeightTransferEngine
        engine = cls.trainer_init(info, client=client, source=None)
        return lambda tensors, **options: engine.send_weights(tensors, **options)
    ours = importlib.import_module("warpipe.vllm")
    trainer = ours.Trainer(ours.ranks("policy", ranks), devices=[device] * ranks, domain=domain)
    cls = type(client.engines[0])

    def send(tensors, **options):
        arguments = {"trainer": trainer, "send_mode": client.update_weights, **options}
        cls.trainer_send_weights(iter(tensors.items()), arguments)

    return send


@pytest.mark.parametrize("eager", [True, False])
def test_a_trainer_sends_a_version_to_two_engines_at_their_addresses(load, version, domain, device, eager):
    given = {"transfer": True, "extra": {"name": "policy"}, "eager": eager}
    models = [load(**given), load(**given)]
    addresses = [parameter.data_ptr() for model in models for parameter in model.parameters()]
    send = trainer_of(Client(models), version, domain, device)
    tensors = {name: tensor for name, tensor in standin_vllm.checkpoint(2).items() if name != "out_scale"}
    send(tensors)
    wanted = standin_vllm.Model(0, 1, quantized=False)
    wanted.load_weights(tensors.items())
    assert all(torch.equal(output(model), output(wanted)) for model in models)
    changed = {"k": torch.zeros(standin_vllm.SHAPES["k"])}
    send(changed, changed=True)
    wanted.load_weights(changed.items())
    assert all(torch.equal(output(model), output(wanted)) for model in models)
    assert [parameter.data_ptr() for model in models for parameter in model.parameters()] == addresses
    assert [model._warpipe_loaded.receiver.version for model in models] == [3, 3]


def test_each_rank_is_sent_its_part(load, version, domain, device):
    given = {"transfer": True, "extra": {"name": "policy"}}
    models = [load(rank=rank, ranks=2, **given) for rank in range(2)]
    send = trainer_of(Client(models), version, domain, device, ranks=2)
    tensors = {name: tensor for name, tensor in standin_vllm.checkpoint(2).items() if name != "out_scale"}
    send(tensors)
    for rank, model in enumerate(models):
        wanted = standin_vllm.Model(rank, 2, quantized=False)
        wanted.load_weights(tensors.items())
        for name, parameter in wanted.named_parameters():
            assert torch.equal(model.get_parameter(name), parameter), name


def test_changed_tensors_that_are_shared_move_an_eager_engine_and_are_an_error_with_graphs(load, version, domain, device):
    eager = load(transfer=True, extra={"name": "policy"})
    send = trainer_of(Client([eager]), version, domain, device)
    send({"norm": torch.zeros(128)}, changed=True, same_layout=False)
    assert not output(eager).any()
    captured = load(transfer=True, extra={"name": "policy"}, eager=False)
    send = trainer_of(Client([captured]), version, domain, device)
    with pytest.raises(warpipe.WeightsMismatchError):
        send({"norm": torch.zeros(128), "k": torch.zeros(32, 128)}, changed=True, same_layout=False)
    assert captured._warpipe_loaded.receiver.version == 2


@pytest.mark.parametrize("same_layout", [True, False])
def test_an_engine_with_adapters_takes_the_versions_of_its_base(load, version, domain, device, same_layout):
    class Adapted(torch.nn.Module):
        # As vLLM wraps a layer, after the load.
        def __init__(self, layer):
            super().__init__()
            self.base_layer = layer

        def forward(self, given):
            return self.base_layer(given)

    model = load(transfer=True, extra={"name": "policy"})
    model.qk, model.down = Adapted(model.qk), Adapted(model.down)
    send = trainer_of(Client([model]), version, domain, device)
    send({"norm": torch.zeros(128)}, changed=True, same_layout=same_layout)
    assert not output(model).any()


def test_an_engine_of_another_loader_is_sent_the_checkpoint_and_copies_its_part(vllm, version, domain, device):
    installed = vllm(1, 2)
    configured = standin_vllm.configs(transfer=True)
    configured[2].load_format, configured[2].model_loader_extra_config = "auto", {}
    model = installed.loaders["auto"](configured[2]).load_model(*configured[:2])
    model.vllm, model.configs = installed, configured
    client = Client([model])
    with weights.keep("policy", domain=domain):
        client.init_weight_transfer_engine({"name": "policy", "domain": str(domain.path)})
        send = trainer_of(client, version, domain, device)
        send(standin_vllm.checkpoint(2))
        wanted = standin_vllm.Model(1, 2, quantized=False)
        wanted.load_weights(standin_vllm.checkpoint(2).items())
        assert torch.equal(output(model), output(wanted))
        # Its publisher keeps the memory until the keeper has them.
        until(lambda: weights.open("policy", device=device, domain=domain).is_hashed, "the hashes")
    assert installed.calls == (["load"] if version == "0.24" else ["load", "initialize reload", "finalize reload"])
