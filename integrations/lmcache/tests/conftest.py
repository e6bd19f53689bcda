"""Each test has a domain, a daemon and workers of its own."""

import contextlib
import ctypes

import pytest
from processes import Daemon, Worker, free_port


def pytest_unconfigure(config):
    """The last line, as all test programs of this project write it."""
    stats = config.pluginmanager.get_plugin("terminalreporter").stats
    passed, failed, errors, skipped = (len(stats.get(word, [])) for word in ("passed", "failed", "error", "skipped"))
    print(f"{passed} passed, {failed + errors} failed, {skipped} skipped")


@pytest.fixture(scope="session")
def fake_driver():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pytest.skip("declared skip: no libcuda.so.1; cargo xtask engines --lmcache puts the fake driver in its place")


class Place:
    """A domain and a port, with what runs there."""

    def __init__(self, folder, stack):
        self.folder, self.port, self._stack = folder, free_port(), stack

    def daemon(self, *options, **more):
        return self._stack.enter_context(Daemon(self.folder, self.port, *options, **more)).wait()

    def worker(self, name="worker", **more):
        return self._stack.enter_context(Worker(self.folder, self.port, name, **more))


@pytest.fixture
def place(tmp_path, fake_driver):
    with contextlib.ExitStack() as stack:
        yield Place(tmp_path, stack)
