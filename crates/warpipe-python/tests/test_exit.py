"""The end of an interpreter that has everything open still: nothing of ours may stand in its way, nor bring it down."""

import os
import subprocess
import sys

from peers import LIMIT_SECONDS
from test_processes import kills, place  # noqa: F401

END = """
import ctypes, sys, threading
import numpy as np
import warpipe

domain, where = sys.argv[1:]
both = dict(domain=domain, device=where)


def keep(*things):
    # What the interpreter itself would have closed at its end.
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


# A stream that has work for longer than this process lives, and memory let go under it.
busy, stream = warpipe.Stream(where), warpipe.Stream(where)
warpipe._warpipe._preload(busy)
filler = warpipe.Publisher("b", **both)
loan = filler.loan((4,), "uint64")
warpipe._warpipe._slow_fill(loan, busy, 1, 10.0)
memory = warpipe.Memory.allocate(1 << 20, device=where)
memory.write(b"late", stream=busy)
memory.release()
publisher, subscriber = warpipe.Publisher("a", **both), warpipe.Subscriber("a", **both)
keep(filler, loan, busy, stream, publisher, subscriber)
begun = threading.Barrier(3, timeout=20.0)


def ask():
    busy.is_idle()
    begun.wait()
    while True:
        busy.is_idle()


def exchange():
    publisher.send(np.arange(3), stream=stream)
    subscriber.receive().release()
    begun.wait()
    while True:
        publisher.send(np.arange(3), stream=stream)
        subscriber.receive().release()


for work in (ask, exchange):
    threading.Thread(target=work, daemon=True).start()
begun.wait()
print("ends", flush=True)
"""


# Under MPS the end of a client with a running kernel ends all clients.
@kills
def test_an_interpreter_that_ends_while_its_threads_are_at_work_ends_well(place):  # noqa: F811
    done = subprocess.run(
        [sys.executable, "-c", END, *place], capture_output=True, text=True, timeout=LIMIT_SECONDS, env=dict(os.environ)
    )
    assert (done.returncode, done.stdout.strip()) == (0, "ends"), done.stdout + done.stderr
