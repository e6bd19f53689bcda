"""A program that ends well closes its endpoints gracefully, even if still referenced; no cycle leaks."""

import gc
import os
import subprocess
import sys
import weakref

import pytest
from conftest import LIMIT_SECONDS, until
from test_processes import place  # noqa: F401

import warpipe

BEGIN = """
import ctypes, multiprocessing, os, sys, threading, time
import warpipe

domain, where = sys.argv[1:]
both = dict(domain=domain, device=where)
ready = lambda: print("ready", flush=True)


def endpoints():
    return warpipe.Publisher("a", **both), warpipe.Member.join("m", domain=domain), warpipe.Queue("q", **both)
"""

# Each leaves a publisher, a member and a queue open, and ends well once it is told to.
ENDS = {
    "held by a daemon thread": """
def work():
    publisher, member, queue = endpoints()
    ready()
    while True:
        publisher.send(b"")
        time.sleep(0.001)
threading.Thread(target=work, daemon=True).start()
sys.stdin.readline()
""",
    "held by a thread that waits": """
def work():
    held = endpoints()
    other = warpipe.Publisher("other", **both)
    subscriber = warpipe.Subscriber("other", **both)
    ready()
    subscriber.receive(None)
threading.Thread(target=work, daemon=True).start()
sys.stdin.readline()
""",
    "beside a watch with a callback": """
held = endpoints()
watch = warpipe.Members.watch(domain, on=lambda change: (held, None)[1])
ready()
sys.stdin.readline()
""",
    "never let go": """
held = endpoints()
[ctypes.pythonapi.Py_IncRef(ctypes.py_object(one)) for one in held]
ready()
sys.stdin.readline()
""",
    "global in a forked child": """
def work():
    global held
    held = endpoints()
    ready()
    sys.stdin = open(0)
    sys.stdin.readline()
child = multiprocessing.get_context("fork").Process(target=work)
child.start()
child.join()
""",
}

# A child of multiprocessing, told so by its parent: a forkserver's has another standard input.
CHILD = """
import os, sys

def hold(domain, where):
    global held
    import warpipe

    both = dict(domain=domain, device=where)
    held = warpipe.Publisher("a", **both), warpipe.Member.join("m", domain=domain), warpipe.Queue("q", **both)

OPENS

def work(pipe, where):
    if "held" not in globals():
        hold(*where)
    pipe.send("ready")
    pipe.recv()

if __name__ == "__main__":
    import multiprocessing

    context = multiprocessing.get_context("METHOD")
    ours, theirs = context.Pipe()
    child = context.Process(target=work, args=(theirs, sys.argv[1:]))
    child.start()
    # A child that fails ends what its parent reads.
    theirs.close()
    print(ours.recv(), flush=True)
    ours.send(sys.stdin.readline())
    child.join()
"""

# When a child imports warpipe, and opens what it holds.
OPENS = {
    "in its own work": "",
    "in its own work, imported with the program": "import warpipe",
    "while its program is imported": """
import warpipe
if __name__ == "__mp_main__":
    hold(*os.environ["HOLD"].split())
""",
}


def closes_gracefully(command, domain, device, **environment):
    on = {"domain": domain, "device": device}
    with (
        warpipe.Members.watch(domain) as members,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
        ) as process,
    ):
        try:
            assert process.stdout.readline() == "ready\n"
            subscriber, worker = warpipe.Subscriber("a", **on), warpipe.Worker("q", **on)
            # A member that leaves before the watch has looked is never told of.
            assert members.changes(LIMIT_SECONDS).what == "joined"
            process.communicate("end\n", timeout=LIMIT_SECONDS)
        finally:
            process.kill()
        assert process.returncode == 0
        with pytest.raises(warpipe.PeerGoneError) as gone:
            while True:
                subscriber.receive(LIMIT_SECONDS).release()
        assert gone.value.graceful
        with pytest.raises(warpipe.PeerGoneError) as gone:
            worker.lease(LIMIT_SECONDS)
        assert gone.value.graceful
        assert members.changes(LIMIT_SECONDS).what == "left"
        subscriber.close()
        worker.close()


@pytest.mark.parametrize("how", ENDS)
def test_a_program_that_ends_well_closes_gracefully(place, domain, device, how):  # noqa: F811
    if device.kind == "cuda" and "fork" in how:
        pytest.skip("CUDA does not outlive a fork")
    closes_gracefully([sys.executable, "-c", BEGIN + ENDS[how], *place], domain, device)


@pytest.mark.parametrize("opens", OPENS)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_child_of_multiprocessing_that_ends_well_closes_gracefully(place, domain, device, tmp_path, method, opens):  # noqa: F811
    if device.kind == "cuda" and method == "fork" and opens != "in its own work":
        pytest.skip("CUDA does not outlive a fork")
    if method == "fork" and opens == "while its program is imported":
        pytest.skip("a forked child imports no program")
    script = tmp_path / "parent.py"
    script.write_text(CHILD.replace("METHOD", method).replace("OPENS", OPENS[opens]))
    closes_gracefully([sys.executable, str(script), *place], domain, device, HOLD=" ".join(place))


PARENT = """
publisher, others = warpipe.Publisher("parent", **both), warpipe.Queue("parents", **both)
subscriber, worker = warpipe.Subscriber("parent", **both), warpipe.Worker("parents", **both)
handle = others.submit(b"work")
lease = worker.lease(30)


def child():
    global held
    held = endpoints()
    ready()
    # The parent's own is buffered.
    open(0, closefd=False).readline()
"""

LIVES_ON = """
print("ended", flush=True)
open(0, closefd=False).readline()
publisher.send(b"whole")
assert subscriber.receive(30).tobytes() == b"whole"
lease.complete(b"done")
assert handle.result(30).tobytes() == b"done"
print("whole", flush=True)
open(0, closefd=False).readline()
"""

# Each forks a child, which ends well while its parent lives on.
FORKS = {
    "os.fork and sys.exit": """
if (pid := os.fork()) == 0:
    child()
    sys.exit()
assert os.waitpid(pid, 0)[1] == 0
""",
    "os.fork and the end of the program": """
if (pid := os.fork()) == 0:
    child()
else:
    assert os.waitpid(pid, 0)[1] == 0
    exec(LIVES_ON)
""",
    "multiprocessing": """
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
assert process.exitcode == 0
""",
}


@pytest.mark.parametrize("how", FORKS)
def test_a_forked_child_that_ends_well_closes_gracefully_and_its_parent_lives_on(place, domain, device, how):  # noqa: F811
    if device.kind == "cuda":
        pytest.skip("CUDA does not outlive a fork")
    on, last = {"domain": domain, "device": device}, "" if "LIVES_ON" in FORKS[how] else "exec(LIVES_ON)\n"
    program = f"{BEGIN}{PARENT}\nLIVES_ON = {LIVES_ON!r}\n{FORKS[how]}{last}"
    with (
        warpipe.Members.watch(domain) as members,
        subprocess.Popen([sys.executable, "-c", program, *place], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        as process,
    ):
        said = lambda line: (process.stdin.write(line), process.stdin.flush(), process.stdout.readline())[2]  # noqa: E731
        try:
            assert process.stdout.readline() == "ready\n"
            parents, worker = warpipe.Subscriber("parent", **on), warpipe.Worker("q", **on)
            subscriber = warpipe.Subscriber("a", **on)
            assert members.changes(LIMIT_SECONDS).what == "joined"
            assert said("end\n") == "ended\n"
            with pytest.raises(warpipe.PeerGoneError) as gone:
                subscriber.receive(LIMIT_SECONDS)
            assert gone.value.graceful
            with pytest.raises(warpipe.PeerGoneError) as gone:
                worker.lease(LIMIT_SECONDS)
            assert gone.value.graceful
            assert members.changes(LIMIT_SECONDS).what == "left"
            assert parents.publisher_state == "alive" and process.poll() is None
            # The names are free again.
            warpipe.Publisher("a", **on).close()
            assert said("go on\n") == "whole\n"
            assert parents.receive(LIMIT_SECONDS).tobytes() == b"whole"
            process.communicate("end\n", timeout=LIMIT_SECONDS)
        finally:
            process.kill()
        assert process.returncode == 0
        with pytest.raises(warpipe.PeerGoneError) as gone:
            parents.receive(LIMIT_SECONDS)
        assert gone.value.graceful
        for one in (parents, subscriber, worker):
            one.close()


class Node:
    """Holds the watch that calls it back, and a name."""

    def __init__(self, domain, device):
        self.publisher = warpipe.Publisher("node", domain=domain, device=device)
        self.members = warpipe.Members.watch(domain, on=self.on_change)
        self.members.on_death_of("other", self.on_death)

    def on_change(self, change):
        pass

    def on_death(self, member):
        pass


def test_an_object_that_is_called_back_by_its_own_watch_is_collected(domain, device):
    node = weakref.ref(Node(domain, device))
    until(lambda: gc.collect() >= 0 and node() is None, "the collection")
    warpipe.Publisher("node", domain=domain, device=device).close()


def test_a_watch_that_is_held_goes_on_calling_back_across_collections(domain):
    seen = []
    members = warpipe.Members.watch(domain, on=lambda change: seen.append(change.what))
    gc.collect()
    with warpipe.Member.join("m", domain=domain):
        until(lambda: seen == ["joined"], "the change")
    until(lambda: seen == ["joined", "left"], "the change")
    members.close()
