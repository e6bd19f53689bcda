"""Ray itself, on this machine alone: one cluster for all tests, with a domain of its own."""

import gc
import os
import pathlib
import shutil
import tempfile
import time

import pytest

# Before Ray is imported: its processes take over the environment.
FOLDER = tempfile.mkdtemp(prefix="warpipe-ray-")
os.environ["WARPIPE_DOMAIN"] = os.path.join(FOLDER, "domain")
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
HERE = pathlib.Path(__file__).parent
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])

import ray  # noqa: E402
import warpipe  # noqa: E402
from actors import LIMIT_SECONDS, Actor  # noqa: E402


def pytest_unconfigure(config):
    """The last line, as all test programs of this project write it."""
    stats = config.pluginmanager.get_plugin("terminalreporter").stats
    passed, failed, errors, skipped = (len(stats.get(word, [])) for word in ("passed", "failed", "error", "skipped"))
    shutil.rmtree(FOLDER, ignore_errors=True)
    print(f"{passed} passed, {failed + errors} failed, {skipped} skipped")


@pytest.fixture(scope="session")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=128 << 20, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
    # What the actors left that Ray has killed.
    warpipe.Domain().clean()
    assert {one.pid for one in warpipe.Domain().endpoints()} <= {os.getpid()}


@pytest.fixture(scope="session")
def standing(cluster):
    """Two actors that no test ends."""
    return Actor.remote(), Actor.remote()


@pytest.fixture
def start(cluster):
    """Starts actors, which end with the test."""
    started = []

    def start():
        started.append(Actor.remote())
        return started[-1]

    yield start
    for actor in started:
        ray.kill(actor)


def until(condition, what):
    """Looks until the condition holds."""
    end = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < end, f"{what} did not come"
        gc.collect()
        time.sleep(0.01)
