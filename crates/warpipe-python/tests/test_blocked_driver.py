"""A call that a full launch queue holds up lets other threads go on: one of them may be what its stream waits for.

Each row runs in a process of its own, so that one that stands still fails alone.
"""

import os
import signal
import subprocess
import sys

import pytest
from peers import LIMIT_SECONDS
from test_processes import place  # noqa: F401

BEGIN = """
import sys, threading, time
import numpy as np
import warpipe
from warpipe import _warpipe

domain, where = sys.argv[1:]
both = dict(domain=domain, device=where)
stream, other = warpipe.Stream(where), warpipe.Stream(where)
_warpipe._preload(stream)
fills, ends, given = warpipe.Timeline.create("fills", **both), threading.Event(), 0
owner, timeline = warpipe.Timeline.create("gate", **both), warpipe.Timeline.create("t", **both)
gate, opened = warpipe.Timeline.open("gate", **both), warpipe.Timeline.open("t", **both)


class Foreign:
    '''A stream of somebody else's.'''

    def __cuda_stream__(self):
        return 0, stream.ptr


class Written:
    '''A tensor on the GPU that was written on the stream.'''

    def __init__(self):
        self.memory = warpipe.Memory.allocate(64, device=where)
        self.__cuda_array_interface__ = {
            "shape": (64,), "typestr": "|u1", "data": (self.memory.ptr, False), "version": 3, "stream": stream.ptr,
        }


# A driver may wait by sleeping, or by asking again and again; the ticks are of 10 ms.
SPIN_TICKS = 20


def is_held_up(thread):
    '''Whether a thread sleeps, has computed for long, or has ended.'''
    try:
        with open(f"/proc/self/task/{thread}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return True
    return fields[0] == "S" or int(fields[11]) + int(fields[12]) >= SPIN_TICKS


def late(on):
    '''A publisher, a subscriber and a frame with its data behind the work of a stream.'''
    publisher, subscriber = warpipe.Publisher("late", **both), warpipe.Subscriber("late", **both)
    publisher.loan((8,), "uint64").send(stream=on)
    return [publisher, subscriber, subscriber.receive()]


def meanwhile(work):
    '''Begins it on another thread, until that is held up.'''
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while not is_held_up(thread.native_id):
        time.sleep(0.001)


def fill_up():
    '''Gives the stream signals until there is no more room for them, and until it is told to end. Not
    kernels: behind a full queue of those, calls that copy bytes to another stream stood still on an H200, too.'''
    global given
    while not ends.is_set():
        fills.signal(given + 1, stream=stream)
        given += 1


def given_up(name):
    '''Lets go of the only reference to what the row prepared.'''
    del globals()[name]
"""

# What is prepared while the stream is idle, the call, and what is prepared once it waits and can
# take more.
ROWS = {
    "Stream.is_idle": ("", "stream.is_idle()"),
    "Stream.wait_for": ("", "stream.wait_for(other)"),
    "Stream.wait_for, of another": ("", "other.wait_for(stream)"),
    "Timeline.signal": ("", "timeline.signal(1, stream=stream)"),
    "Timeline.signal, a foreign stream": ("", "timeline.signal(1, stream=Foreign())"),
    "Timeline.wait": ("", "opened.wait(1, stream=stream)"),
    "Timeline.wait, a foreign stream": ("", "opened.wait(1, stream=stream.ptr)"),
    "Event.record": ("event = warpipe.Event.create(**both)", "event.record(stream=stream)"),
    "Event.record, a foreign stream": ("event = warpipe.Event.create(**both)", "event.record(stream=stream.ptr)"),
    "Event.wait": ("event = warpipe.Event.create(**both); gate.wait(1, stream=other); event.record(stream=other)", "event.wait(stream=stream)"),
    "Semaphore.acquire": ("semaphore = warpipe.Semaphore.create('s', 1, **both)", "semaphore.acquire(stream=Foreign())"),
    "Semaphore.try_acquire": ("semaphore = warpipe.Semaphore.create('s', 1, **both)", "semaphore.try_acquire(stream=Foreign())"),
    "Permit.release": ("permit = warpipe.Semaphore.create('s', 1, **both).acquire(stream=stream)", "permit.release()"),
    "Permit.release, a foreign stream": (
        "permit = warpipe.Semaphore.create('s', 1, **both).acquire()", "permit.release(stream=stream.ptr)"),
    "Permit, dropped": ("permit = warpipe.Semaphore.create('s', 1, **both).acquire(stream=Foreign())", "given_up('permit')"),
    "SampleMut.discard": ("loan = warpipe.Publisher('a', **both).loan(8, 'uint8')", "loan.discard(stream=stream)"),
    "SampleMut.discard, a foreign stream": (
        "loan = warpipe.Publisher('a', **both).loan(8, 'uint8')", "loan.discard(stream=Foreign())"),
    "SampleMut.send": ("publisher = warpipe.Publisher('a', **both); loan = publisher.loan(8, 'uint8')", "loan.send(stream=stream)"),
    "SampleMut.send, a foreign stream": (
        "publisher = warpipe.Publisher('a', **both); loan = publisher.loan(8, 'uint8')", "loan.send(stream=stream.ptr)"),
    "SampleMut, dropped": (
        "publisher = warpipe.Publisher('a', **both); loan = publisher.loan(8, 'uint8');"
        "capsule = loan.__dlpack__(stream=stream.ptr)", "given_up('capsule')"),
    "SampleMut.__dlpack__": (
        "publisher = warpipe.Publisher('a', **both); loan = publisher.loan(8, 'uint8');"
        "array = loan.__dlpack__(stream=stream.ptr)", "loan.send()"),
    "Sample.__dlpack__": ("", "held[2].__dlpack__(stream=stream.ptr)", "gate.wait(1, stream=other); held = late(other)"),
    "Sample.release": ("", "held[2].release(stream=stream)", "held = late(stream)"),
    "Sample.release, a foreign stream": ("", "held[2].release(stream=stream.ptr)", "held = late(stream)"),
    "Sample, dropped": ("held = late(stream); capsule = held[2].__dlpack__(stream=stream.ptr)", "(held.clear(), given_up('capsule'))"),
    "View.copy_from": ("memory = warpipe.Memory.allocate(64, device=where)", "memory.copy_from(np.ones(memory.nbytes, np.uint8), stream=stream)"),
    "View.write": ("memory = warpipe.Memory.allocate(64, device=where)", "memory.write(b'x', stream=stream)"),
    "View.write, a foreign stream": ("memory = warpipe.Memory.allocate(64, device=where)", "memory.write(b'x', stream=stream.ptr)"),
    "View.write, of memory in use": (
        "memory = warpipe.Memory.allocate(64, device=where); memory.used_on(stream=Foreign())", "memory.write(b'x', stream=None)"),
    "View, dropped": (
        "memory = warpipe.Memory.allocate(64, device=where); capsule = memory.__dlpack__(stream=stream.ptr)",
        "given_up('capsule')"),
    "Publisher.send": (
        "publisher = warpipe.Publisher('a', **both); written = Written()", "publisher.send(written)"),
    "Queue.submit": (
        "queue = warpipe.Queue('q', **both); loan = queue.loan(8, 'uint8')", "queue.submit(loan, stream=stream.ptr)"),
    "Queue.memory_in_use, beside a submit": (
        "queue = warpipe.Queue('q', **both); loan = queue.loan(8, 'uint8'); worker = warpipe.Worker('q', **both);"
        "queue.wait_for_workers()",
        "meanwhile(lambda: queue.submit(loan, stream=stream)); queue.memory_in_use"),
    "Pending, dropped beside a request": (
        "client = warpipe.Client('q', **both); loan = client.loan(8, 'uint8'); server = warpipe.Server('q', **both);"
        "pending = client.request(b'x'); server.accept(30)",
        "meanwhile(lambda: client.request(loan, stream=stream)); given_up('pending')"),
    "Lease.complete": (
        "queue = warpipe.Queue('q', **both); worker = warpipe.Worker('q', **both);"
        "job = queue.submit(b'x'); lease = worker.lease(30)", "lease.complete(stream=stream.ptr)"),
    "_slow_fill": (
        "publisher = warpipe.Publisher('a', **both); loan = publisher.loan(8, 'uint64')",
        "_warpipe._slow_fill(loan, stream, 1, 0.0)"),
}

FILL = """
filler = threading.Thread(target=fill_up, daemon=True)
filler.start()
# Full, when the thread that fills it gets no further.
before = same = 0
while given < FULL or same < 50 or not is_held_up(filler.native_id):
    same = same + 1 if given == before else 0
    before = given
    time.sleep(0.001)
"""

CALL = f"""
gate.wait(1, stream=stream)
exec(after)
{FILL}
ticks, begun, ended, faults = [0], threading.Event(), threading.Event(), []


def tick():
    while True:
        ticks[0] += 1
        time.sleep(0.0005)


def run():
    begun.set()
    try:
        exec(call)
    except BaseException as fault:
        faults.append(fault)
    ended.set()


for work in (tick, run):
    threading.Thread(target=work, daemon=True).start()
begun.wait()
before = ticks[0]
while ticks[0] < before + 100:
    time.sleep(0.001)
# Not `held`, which some rows have: to drop their publisher may take a call that the full queue
# holds up, too.
was_held_up = not ended.is_set()
owner.signal(1)
assert ended.wait(60), "the call does not return"
assert not faults, faults
ends.set()
filler.join()
print("held" if was_held_up else "at once")
"""

# Signals that fit, at most, into a launch queue of 1,020 operations beside those of a row's own; each is two at most.
FULL = 400

# A row that stands still says where.
PYTHON = [sys.executable, "-X", "faulthandler", "-c"]
# A client of MPS has few hardware queues, and streams that share one hold each other up. This is for rows in which another
# stream goes on meanwhile; not for all, as many clients with eight queues each exhaust the server's memory.
WITH_QUEUES = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "8"} if os.environ.get("WARPIPE_TEST_MPS") else None
STUCK = "import faulthandler; faulthandler.dump_traceback_later(100, exit=True)\n"


@pytest.mark.parametrize("row", ROWS)
def test_a_call_that_a_full_launch_queue_holds_up_lets_other_threads_go_on(place, device, row):  # noqa: F811
    if device.kind == "host":
        pytest.skip("a stream of the host takes more than anybody gives it")
    before, call, *after = ROWS[row]
    program = f"{BEGIN}\n{before}\ncall, after, FULL = {call!r}, {''.join(after)!r}, {FULL}\n{CALL}"
    done = subprocess.run(
        [*PYTHON, STUCK + program, *place], capture_output=True, text=True, timeout=2 * LIMIT_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # For people: a driver may take more than the one that this was written with.
    print(done.stdout)


# What a full launch queue holds up, on another thread; a call of the same endpoint that waits for
# that; and whether the call has done anything.
BEHIND = {
    "Publisher.send": (
        "publisher, subscriber = warpipe.Publisher('a', timeout=patience, **both), warpipe.Subscriber('a', **both);"
        "loan = publisher.loan(8, 'uint8')",
        "loan.send(stream=stream)", "publisher.send(b'interrupted')",
        "assert publisher.send(b'next') == 2"),
    "Publisher.send, which waits for no room": (
        "publisher, subscriber = warpipe.Publisher('a', policy='drop_newest', timeout=patience, **both),"
        " warpipe.Subscriber('a', **both); loan = publisher.loan(8, 'uint8')",
        "loan.send(stream=stream)", "publisher.send(b'interrupted')",
        "assert publisher.send(b'next') == 2"),
    "SampleMut.send": (
        "publisher = warpipe.Publisher('a', timeout=patience, **both); loan, other = (publisher.loan(8, 'uint8') for _ in '12')",
        "loan.send(stream=stream)", "other.send()",
        "assert publisher.send(b'next') == 2"),
    "Queue.submit": (
        "queue = warpipe.Queue('q', submit_timeout=patience, **both); loan = queue.loan(8, 'uint8')",
        "queue.submit(loan, stream=stream)", "queue.submit(b'interrupted')",
        "assert queue.submit(b'next').job == 2"),
    "Lease.complete": (
        "queue = warpipe.Queue('q', max_attempts=1, **both); worker = warpipe.Worker('q', answer_timeout=patience, **both);"
        "jobs = [queue.submit(b'x') for _ in '12']; one, other = worker.lease(30), worker.lease(30)",
        "one.complete(stream=stream)", "other.complete(b'interrupted')",
        "other.complete(b'next'); jobs[0].result(30); assert jobs[1].result(30).tobytes() == b'next'"),
    "Lease.fail": (
        "queue = warpipe.Queue('q', max_attempts=1, **both); worker = warpipe.Worker('q', answer_timeout=patience, **both);"
        "jobs = [queue.submit(b'x') for _ in '12']; one, other = worker.lease(30), worker.lease(30)",
        "one.complete(stream=stream)", "other.fail('interrupted')",
        "other.complete(b'next'); jobs[0].result(30); assert jobs[1].result(30).tobytes() == b'next'"),
    "Lease.complete, of a server": (
        "client = warpipe.Client('q', max_attempts=1, timeout=60, **both); server = warpipe.Server('q', answer_timeout=patience, **both);"
        "jobs = [client.request(b'x') for _ in '12']; one, other = server.accept(30), server.accept(30)",
        "one.complete(stream=stream)", "other.complete(b'interrupted')",
        "other.complete(b'next'); jobs[0].result(); assert jobs[1].result().tobytes() == b'next'"),
    "Timeline.signal": (
        "ahead = warpipe.Timeline.create('ahead', **both)",
        "ahead.signal(1, stream=stream)", "ahead.signal(5, stream=other)",
        "ahead.signal(2, stream=other); ahead.wait(2)"),
    "Timeline.signal, from the CPU": (
        "ahead = warpipe.Timeline.create('ahead', **both)",
        "ahead.signal(1, stream=stream)", "ahead.signal(5)",
        "ahead.wait(1); ahead.signal(2)"),
    "Event.record": (
        "event = warpipe.Event.create(**both)",
        "first = event.record(stream=stream)", "event.record(stream=other)",
        "event.synchronize(30); assert event.check(event.record(stream=other)) in (True, False);"
        "assert repr(event.record(stream=other)).startswith('Recording(3 of ')"),
}

INTERRUPTED = """
import os, signal

class Interrupted(Exception):
    pass


def interrupt(number, frame):
    raise Interrupted


def sleeps(thread):
    with open(f"/proc/self/task/{thread}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("voluntary"))


gate.wait(1, stream=stream)
exec(fill)
holder, held, main, faults = threading.Event(), threading.Event(), threading.get_native_id(), []


def hold():
    holder.number = threading.get_native_id()
    holder.set()
    try:
        exec(holds)
    except BaseException as fault:
        faults.append(fault)
    held.set()


def come():
    before = sleeps(main)
    while sleeps(main) < before + SLICES:
        time.sleep(0.001)
    os.kill(os.getpid(), BY)
    # Right behind it the way is free.
    owner.signal(1)


signal.signal(signal.SIGUSR1, interrupt)
threading.Thread(target=hold, daemon=True).start()
holder.wait()
while not is_held_up(holder.number):
    time.sleep(0.001)
if held.is_set():
    # A driver that takes more than this program gave it.
    owner.signal(1)
    print("at once")
else:
    threading.Thread(target=come, daemon=True).start()
    try:
        exec(call)
    except (Interrupted, KeyboardInterrupt):
        print("interrupted")
    assert held.wait(60), "the other call does not return"
    assert not faults, faults
    exec(after)
ends.set()
filler.join()
"""


@pytest.mark.parametrize("by", ["SIGINT", "SIGUSR1"])
@pytest.mark.parametrize("patience", [60, None])
@pytest.mark.parametrize("row", BEHIND)
def test_a_call_that_waits_behind_one_that_is_held_up_is_interrupted_and_has_done_nothing(
    place, device, row, patience, by  # noqa: F811
):
    if device.kind == "host":
        pytest.skip("a stream of the host takes more than anybody gives it")
    before, holds, call, after = BEHIND[row]
    given = f"patience = {patience}\n{before}\nholds, call, after, fill = {holds!r}, {call!r}, {after!r}, {FILL!r}"
    # More than a call has been asleep before it waits, and longer than any slice of a wait.
    numbers = f"FULL, SLICES, BY = {FULL}, 12, {getattr(signal, by):d}"
    program = f"{BEGIN}\n{given}\n{numbers}\n{INTERRUPTED}"
    environment = WITH_QUEUES if row.startswith("Timeline") else None
    done = subprocess.run(
        [*PYTHON, STUCK + program, *place], capture_output=True, text=True, timeout=2 * LIMIT_SECONDS, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout in ("interrupted\n", "at once\n")
