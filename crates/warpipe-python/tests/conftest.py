"""Every test runs in a domain of its own, on the device that WARPIPE_TEST_DEVICE names (default: the host), and leaves
no memory behind."""

import gc
import os
import signal
import sys
import time

import pytest

import warpipe

DEVICE = os.environ.get("WARPIPE_TEST_DEVICE", "host")
LIMIT_SECONDS = 30.0
# Imported when collections of garbage last began to pass over what is there.
modules = 0


def pytest_report_header(config):
    device = warpipe.Device(DEVICE)
    return f"warpipe {warpipe.__version__} on {device.name} ({device.uuid})"


def pytest_unconfigure(config):
    """The last line, as all test programs of this project write it."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        # One of several processes that run tests: another one counts.
        return
    counts = {word: len(reporter.stats.get(word, [])) for word in ("passed", "failed", "error", "skipped")}
    print(f"{counts['passed']} passed, {counts['failed'] + counts['error']} failed, {counts['skipped']} skipped")


@pytest.fixture(scope="session")
def device():
    return warpipe.Device(DEVICE)


@pytest.fixture
def domain(tmp_path):
    return warpipe.Domain(tmp_path / "domain")


@pytest.fixture
def open_publisher(domain, device):
    """Makes publishers that are closed at the end."""
    made = []

    def make(name="a", **options):
        made.append(warpipe.Publisher(name, domain=domain, **{"device": device, **options}))
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()


@pytest.fixture
def open_subscriber(domain, device):
    """Makes subscribers that are closed at the end."""
    made = []

    def make(name="a", **options):
        made.append(warpipe.Subscriber(name, domain=domain, **{"device": device, "timeout": LIMIT_SECONDS, **options}))
        return made[-1]

    yield make
    for subscriber in made:
        subscriber.close()


@pytest.fixture
def link(open_publisher, open_subscriber):
    """A publisher and its subscriber in this process."""
    return open_publisher(), open_subscriber()


@pytest.fixture
def open_queue(domain, device):
    """Makes queues that are closed at the end."""
    made = []

    def make(**options):
        made.append(warpipe.Queue("jobs", domain=domain, **{"device": device, **options}))
        return made[-1]

    yield make
    for queue in made:
        queue.close()


@pytest.fixture
def open_worker(domain, device):
    """Makes workers that are closed at the end."""
    made = []

    def make(**options):
        made.append(warpipe.Worker("jobs", domain=domain, **{"device": device, "timeout": LIMIT_SECONDS, **options}))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


@pytest.fixture
def open_client(domain, device):
    """Makes clients that are closed at the end."""
    made = []

    def make(**options):
        options = {"device": device, "timeout": LIMIT_SECONDS, **options}
        made.append(warpipe.Client("embed", domain=domain, **options))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture(autouse=True)
def nothing_is_left(request, device):
    """What a test held is given back to the device once its objects have gone. What an earlier one left is its own fault."""
    global modules
    if modules != len(sys.modules):
        # JAX alone has objects for a tenth of a second of each later collection, of which tests make thousands.
        gc.collect()
        gc.freeze()
        modules = len(sys.modules)
    before = device.bytes_held
    yield
    # Set up first, so this runs last: the endpoints are closed by now.
    end, looks = time.monotonic() + LIMIT_SECONDS, 0
    while device.bytes_held > before and time.monotonic() < end:
        time.sleep(0.002)
        # Most comes back in a moment by itself, and a collection takes longer than that.
        looks += 1
        if looks % 16 == 0:
            gc.collect()
    assert device.bytes_held <= before


def until(condition, what):
    """Looks until the condition holds."""
    end = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(0.005)


def state(process, thread):
    """As /proc has it: ``S`` for asleep, ``T`` for stopped."""
    with open(f"/proc/{process}/task/{thread}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]


def sleeps(thread):
    """How often the thread has gone to sleep."""
    with open(f"/proc/self/task/{thread}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("voluntary"))


def stop(child):
    """Until all its threads have stopped, one of them can still answer a peer."""
    os.kill(child.pid, signal.SIGSTOP)
    threads = lambda: os.listdir(f"/proc/{child.pid}/task")  # noqa: E731
    until(lambda: all(state(child.pid, thread) == "T" for thread in threads()), "the stop")
