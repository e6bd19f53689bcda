"""Each test has a domain and an agent of its own."""

import os

import pytest


def pytest_unconfigure(config):
    """The last line, as all test programs of this project write it."""
    stats = config.pluginmanager.get_plugin("terminalreporter").stats
    passed, failed, errors, skipped = (
        len(stats.get(word, [])) for word in ("passed", "failed", "error", "skipped")
    )
    print(f"{passed} passed, {failed + errors} failed, {skipped} skipped")


@pytest.fixture
def agent(tmp_path, monkeypatch):
    folder = os.environ.get("NIXL_PLUGIN_DIR", "")
    if not os.path.exists(os.path.join(folder, "libplugin_WARPIPE.so")):
        pytest.skip("declared skip: no libplugin_WARPIPE.so in NIXL_PLUGIN_DIR")
    from agents import new_agent

    monkeypatch.setenv("WARPIPE_DOMAIN", str(tmp_path / "domain"))
    return new_agent("initiator")
