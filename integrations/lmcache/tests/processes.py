"""The daemon and workers of a test, as processes of their own."""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
LIMIT = 120
# What the fake driver calls its memory.
MEMORY = "/memfd:warpipe-fake-cuda-0"
STANDIN, DAEMON, STATUS = "warpipe_standin", {"module_path": "warpipe_lmcache.daemon"}, {"module_path": "status"}
MODULES = [{"module_path": STANDIN, "factory_name": "prepare"}, DAEMON, STATUS]


class Died(Exception):
    """The process has ended."""


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def environment(folder, backend="warpipe-standin", **more):
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    if backend == "warpipe-standin":
        paths.insert(0, str(HERE / "standin"))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "WARPIPE_DOMAIN": str(folder / "domain"),
        "LMCACHE_DEVICE_BACKEND": backend,
        "LMCACHE_TRACK_USAGE": "false",
        **more,
    }


class Process:
    def __init__(self, command, folder, name, **more):
        self.log = folder / f"{name}.log"
        self.process = subprocess.Popen(
            command, env=environment(folder, **more), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.log.open("a"), text=True, start_new_session=True,
        )  # fmt: skip

    @property
    def pid(self):
        return self.process.pid

    def kill(self):
        """The whole session: a namespace's first process is a child of ``unshare``."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(LIMIT)

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGCONT)
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


class Daemon(Process):
    """LMCache's server without HTTP, started as its command line does."""

    def __init__(self, folder, port, *options, modules=MODULES, **more):
        command = [sys.executable, "-m", "lmcache.v1.multiprocess.server", "--host", "127.0.0.1", "--port", str(port)]
        gib = "4" if "backend" in more else "0.1"
        command += ["--l1-size-gb", gib, "--eviction-policy", "LRU", "--disable-observability", *options]
        for module in modules:
            command += ["--server-module", json.dumps(module)]
        super().__init__(command, folder, "daemon", **more)
        self.port = port

    def wait(self):
        """Until it listens."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise Died(self.log.read_text()[-4000:])
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return self
            # A port has no notification of its listener.
            select_nothing(0.02)
        raise TimeoutError(self.log.read_text()[-4000:])

    def mappings(self):
        """Bytes of the fake GPU's memory that it has mapped, and the driver's descriptors of that."""
        mapped = held = 0
        for line in Path(f"/proc/{self.pid}/maps").read_text().splitlines():
            if MEMORY in line:
                first, last = (int(part, 16) for part in line.split()[0].split("-"))
                mapped += last - first
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                held += MEMORY in os.readlink(entry)
        return mapped, held


class Worker(Process):
    def __init__(self, folder, port, name="worker", prefix=(), scheme="tcp", module=STANDIN, **more):
        command = [*prefix, sys.executable, str(HERE / "engine.py"), f"{scheme}://127.0.0.1:{port}", module]
        super().__init__(command, folder, name, **more)
        self.instance = self.reply()

    def send(self, function, *arguments):
        print(json.dumps([function, *arguments]), file=self.process.stdin, flush=True)

    def reply(self):
        with selectors.DefaultSelector() as waiting:
            waiting.register(self.process.stdout, selectors.EVENT_READ)
            if not waiting.select(LIMIT):
                raise TimeoutError(self.log.read_text()[-4000:])
        line = self.process.stdout.readline()
        if not line:
            raise Died(self.log.read_text()[-4000:])
        done, result = json.loads(line)
        if not done:
            raise RuntimeError(result)
        return result

    def ask(self, function, *arguments):
        self.send(function, *arguments)
        return self.reply()


def select_nothing(seconds):
    with selectors.DefaultSelector() as nothing:
        nothing.select(seconds)


def until(condition, what):
    """Asks again until it holds: what one process does in its own time."""
    deadline = time.monotonic() + LIMIT
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {LIMIT} s: {what}"
        select_nothing(0.001)
    return found
