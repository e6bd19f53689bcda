"""The work of the tests of ``warpipe.workers``. A fork server's children import it, so all of it is at its top level."""

import ctypes
import os
import pathlib
import signal
import sys
import threading
import time

import numpy as np

import warpipe
from warpipe import workers

LIMIT_SECONDS = 60.0


def wait_for_ever(*_warmed):
    while True:
        time.sleep(1)


def warm_up():
    return {"warmed by": os.getpid()}


def say_and_wait(folder, warmed):
    """Says in a file of its process what it was given, and its place."""
    (pathlib.Path(folder) / f"place-{workers.place()}-{os.getpid()}").write_text(
        str(warmed["warmed by"] == os.getpid())
    )
    wait_for_ever()


def return_at_once():
    pass


def exit_with(code):
    sys.exit(code)


def return_when_there(file):
    while not os.path.exists(file):
        time.sleep(0.01)


def fail(text):
    raise ValueError(text)


def fail_until(folder, times):
    """Fails so many times in all, and returns then."""
    files = [pathlib.Path(folder) / f"failure-{number}" for number in range(times)]
    for file in files:
        try:
            file.touch(exist_ok=False)
        except FileExistsError:
            continue
        raise ValueError("once more")


def exit_if_not_first(folder):
    """Leaves at once, with code 0, in all processes but the first one."""
    try:
        (pathlib.Path(folder) / "first").touch(exist_ok=False)
    except FileExistsError:
        sys.exit(0)


def hang():
    time.sleep(LIMIT_SECONDS)


def say_at_the_end(folder):
    """Says that it works, and in the end that it was asked to end."""
    path = pathlib.Path(folder)
    try:
        (path / f"working-{os.getpid()}").touch()
        wait_for_ever()
    finally:
        (path / f"ended-{os.getpid()}").touch()


def ignore_everything(folder):
    """Takes no signal, and gives the interpreter to no other thread."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    (pathlib.Path(folder) / f"working-{os.getpid()}").touch()
    # Keeps the interpreter's lock during the call.
    ctypes.PyDLL(None).sleep(3600)


def leave_a_child(folder):
    """Forks a child that outlives it, and waits."""
    child = os.fork()
    if child == 0:
        time.sleep(LIMIT_SECONDS)
        os._exit(0)
    (pathlib.Path(folder) / f"child-{child}").touch()
    wait_for_ever()


def leave_a_child_of_a_library(folder):
    """As ``leave_a_child``, by a library that forks: no hook of Python runs in the child, which has all files."""
    library = ctypes.CDLL(None)
    child = library.fork()
    if child == 0:
        library.sleep(int(LIMIT_SECONDS))
        library._exit(0)
    (pathlib.Path(folder) / f"child-{child}").touch()
    wait_for_ever()


def fork_and_return(folder):
    """Returns in a forked child, too, and says with which code that has ended."""
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        (pathlib.Path(folder) / "code").write_text(str(code))


def stay_a_while():
    threading.Event().wait(LIMIT_SECONDS)


def open_server(domain, device):
    """The weights, a stream, a first request's work, and a server that takes none yet: it attaches when it accepts."""
    shared = warpipe.weights.open("scale", domain=domain, device=device, wait=LIMIT_SECONDS)
    server = warpipe.Server("embed", domain=domain, device=device)
    return server, shared


def serve(folder, warmed):
    """Answers with the input times the weights; says that it has accepted a request, and hangs if that asks for it."""
    server, shared = warmed
    scale = shared["scale"].numpy()
    for request in server:
        with request:
            asked = request.metadata
            if asked.get("hang") and request.attempt == 1:
                (pathlib.Path(folder) / f"accepted-{os.getpid()}").touch()
                wait_for_ever()
            request.complete(request.numpy() * scale, metadata={"pid": os.getpid()})


def arrays():
    return np.arange(8, dtype=np.float32)
