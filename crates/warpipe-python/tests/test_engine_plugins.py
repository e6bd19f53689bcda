"""How engines find this package's plugins, without PyTorch."""

import enum
import importlib
import importlib.metadata
import sys
import types

import pytest

from warpipe import sglang, vllm


@pytest.mark.parametrize(("group", "module"), [("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")])
def test_the_package_names_its_plugin_to_the_engine(group, module):
    found = [one for one in importlib.metadata.entry_points(group=group) if one.name == "warpipe"]
    assert [one.value for one in found] == [f"warpipe.{module}:register"]
    assert callable(found[0].load())


@pytest.mark.parametrize("fits", [True, False])
def test_vllms_loaders_are_not_imported_for_the_plugin_and_get_the_load_format_when_they_are(monkeypatch, tmp_path, caplog, fits):
    loaders = tmp_path / "vllm" / "model_executor" / "model_loader"
    transfer = tmp_path / "vllm" / "distributed" / "weight_transfer"
    for folder in (loaders, transfer):
        folder.mkdir(parents=True)
    for folder in (loaders, loaders.parent, tmp_path / "vllm", transfer.parent, transfer):
        (folder / "__init__.py").write_text("")
    (loaders / "__init__.py").write_text("taken = {}\nregister_model_loader = lambda name: lambda loader: taken.update({name: loader})\n")
    (transfer / "factory.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    ours = types.ModuleType("warpipe.vllm._loader")
    ours.Loader = dict
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "warpipe.vllm._loader", ours if fits else None)
    before = list(sys.meta_path)
    vllm.register()
    vllm.register()
    assert "vllm.model_executor.model_loader" not in sys.modules and len(sys.meta_path) == len(before) + 1
    found = importlib.import_module("vllm.model_executor.model_loader")
    assert found.taken == ({"warpipe": dict} if fits else {}) and sys.meta_path == before
    assert ("is not registered with this vLLM" in caplog.text) is not fits
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def test_sglang_takes_the_load_format_by_its_name_and_keeps_the_check_of_others(monkeypatch):
    kind = enum.Enum("HookType", "AROUND")
    choices, hooks = ["auto"], []
    stubs = {
        "sglang.srt.arg_groups.choices": {"LOAD_FORMAT_CHOICES": choices, "add_load_format_choices": choices.extend},
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": types.SimpleNamespace(register=lambda *given: hooks.append(given)), "HookType": kind,
        },
        "warpipe.sglang._loader": {"Loader": dict},
    }  # fmt: skip
    for name, members in stubs.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    sglang.register()
    sglang.register()
    assert choices == ["auto", "warpipe"]
    target, hook, around = hooks[0]
    assert target == "sglang.srt.configs.load_config.LoadConfig._verify_load_format" and around is kind.AROUND
    checked = []
    for given in ("warpipe", "auto"):
        config = types.SimpleNamespace(load_format=given)
        hook(checked.append, config)
        assert config.load_format == (dict if given == "warpipe" else given)
    assert [config.load_format for config in checked] == ["auto"]
