"""How engines find this package's plugins, without PyTorch."""

import enum
import importlib.metadata
import sys
import types

import pytest

from warpipe import sglang


@pytest.mark.parametrize(("group", "module"), [("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")])
def test_the_package_names_its_plugin_to_the_engine(group, module):
    found = [one for one in importlib.metadata.entry_points(group=group) if one.name == "warpipe"]
    assert [one.value for one in found] == [f"warpipe.{module}:register"]
    assert callable(found[0].load())


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
