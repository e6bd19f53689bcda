"""Weights between containers: a keeper, a publisher and engines that share a directory and a device, and no PID or IPC
namespace. Each is a process of its own PID 1, of one user, or of users that the keeper admits."""

import contextlib
import os
import shutil
import subprocess
import sys

import pytest
from conftest import DEVICE, until
from test_weights_follow import holders

import warpipe

OWNER, ADMITTED, OTHER = 61_211, 61_212, 61_213
NAMESPACES = ["unshare", "--pid", "--ipc", "--mount-proc", "--fork"]

# Arguments: the part, the domain, its owner or nothing, the device, a user to admit or nothing.
PROGRAM = """
import sys
import warpipe
from warpipe import weights

part, path, owner, device, admitted = sys.argv[1:]
options = {"domain": warpipe.Domain(path, owner=int(owner) if owner else None)}

def say(*words):
    print("said", *words, flush=True)

if part == "keeper":
    keeper = weights.keep("w", allow_uids=[int(admitted)] if admitted else [], **options)
    say(keeper.candidate)
elif part == "engine's keeper":
    from warpipe import _transfer

    _transfer.keep("w", allow_uids=[int(admitted)] if admitted else [], **options)
    _transfer.check_keeper("w", **options)
    say("kept")
elif part == "publisher":
    view = warpipe.Memory.allocate(4096, device=device).view((4096,), "uint8")
    view.write(bytes(range(256)) * 16)
    say(weights.publish("w", {"a": view}, device=device, wait=60, **options).version)
elif part == "verifier":
    say(weights.verify("w", device=device, wait=60, **options))
elif part == "engine":
    try:
        shared = weights.open("w", device=device, wait=60, **options)
    except warpipe.AccessDeniedError as error:
        say(type(error).__name__)
        sys.exit()
    read = lambda: say(shared.version, sum(shared["a"].tobytes()))
    read()
    for line in sys.stdin:
        read()
sys.stdin.read()
"""
READ = f"1 {sum(range(256)) * 16}"


class Container:
    def __init__(self, stack, command):
        pipe = subprocess.PIPE
        self.process = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        stack.callback(self.process.kill)

    def said(self):
        for line in self.process.stdout:
            if line.startswith("said "):
                return line.removeprefix("said ").strip()
        raise AssertionError(f"the container ended with {self.process.wait()}")

    def asked(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.said()

    def kill(self):
        self.process.kill()
        # Of the process in it, too: the end of its output.
        self.process.stdout.read()


@pytest.fixture(params=["one user", "several users"])
def start(request, tmp_path):
    """Starts a part of the program in a container, as a user."""
    several = request.param == "several users"
    if several and os.geteuid() != 0:
        pytest.skip("only root can become other users")
    if several and os.environ.get("WARPIPE_TEST_MPS"):
        pytest.skip("an MPS daemon serves one user at a time: the next one's contexts wait for all of the first")
    # Where each user may read: the package, and an interpreter.
    folder = tmp_path / "package"
    shutil.copytree(os.path.dirname(warpipe.__file__), folder / "warpipe", ignore=shutil.ignore_patterns("__pycache__"))
    for parent in [folder, *folder.parents]:
        if parent.stat().st_uid == os.geteuid():
            parent.chmod(parent.stat().st_mode | 0o555)
    domain = tmp_path / "domain"
    domain.mkdir(mode=0o700)
    if several:
        os.chown(domain, OWNER, OWNER)
        domain.chmod(0o711)

    def command(user, interpreter, *arguments):
        if not several:
            return [*NAMESPACES, "--user", "--map-root-user", "--kill-child", interpreter, *arguments]
        # The signal is for the end of `unshare`, and is forgotten with a change of the user.
        change = ["setpriv", "--clear-groups", f"--reuid={user}", f"--regid={user}", "--pdeathsig=KILL"]
        return [*NAMESPACES, *change, interpreter, *arguments]

    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}

    def is_possible(interpreter):
        # It can start itself, too, as a keeper.
        again = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import warpipe'], check=True)"
        tried = command(OTHER, interpreter, "-c", f"{again}; import warpipe; warpipe.Device({DEVICE!r})")
        return subprocess.run(tried, env=environment, capture_output=True, check=False).returncode == 0

    interpreter = next((one for one in (sys.executable, "/usr/bin/python3") if is_possible(one)), None)
    if interpreter is None:
        pytest.skip("this user may make no namespaces, or other users may not use Python or the device here")
    with contextlib.ExitStack() as stack:

        def start(part, user=OWNER):
            given = [part, str(domain), str(OWNER) if several else "", DEVICE, str(ADMITTED) if several else ""]
            return Container(stack, ["env", f"PYTHONPATH={folder}", "PYTHONDONTWRITEBYTECODE=1", *command(user, interpreter, "-c", PROGRAM, *given)])

        start.domain, start.several = warpipe.Domain(domain, owner=OWNER if several else None), several
        yield start


def test_weights_cross_containers_and_outlive_those_of_the_publisher_and_the_keeper(start):
    keeper = start("keeper")
    assert keeper.said() == "None"
    publisher = start("publisher")
    assert publisher.said() == "1"
    engines = [start("engine", ADMITTED), start("engine", ADMITTED), start("engine")]
    assert [engine.said() for engine in engines] == [READ] * 3
    if start.several:
        assert start("engine", OTHER).said() == "AccessDeniedError"
    publisher.kill()
    keeper.kill()
    engines[0].kill()
    assert [engine.asked() for engine in engines[1:]] == [READ] * 2
    # The domain takes endpoints of its owner alone: an engine of another user hands nothing over.
    until(lambda: len(holders(start.domain)) == (1 if start.several else 2), "the end of the other containers")
    until(lambda: not any(one.name == "w" and one.alive for one in start.domain.endpoints()), "the end of the keeper")
    keeper = start("keeper")
    assert keeper.said() == "1"
    assert start("verifier").said() == "1"
    assert start("engine", ADMITTED).said() == READ


def test_the_keeper_that_an_engine_starts_admits_the_users_that_it_names(start):
    assert start("engine's keeper").said() == "kept"
    assert start("publisher").said() == "1"
    assert start("engine", ADMITTED).said() == READ
    if start.several:
        assert start("engine", OTHER).said() == "AccessDeniedError"
