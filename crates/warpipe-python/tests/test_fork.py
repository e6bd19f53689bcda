"""After a fork objects answer a clear error in the child, and the parent's go on."""

import os
import subprocess
import sys

from peers import LIMIT_SECONDS
from test_processes import place  # noqa: F401

FORK = """
import gc, os, sys, threading
import numpy as np
import warpipe
from warpipe import _warpipe

domain, where = sys.argv[1:]
both = dict(domain=domain, device=where)
timeline, event = warpipe.Timeline.create("t", **both), warpipe.Event.create(**both)
semaphore, pool = warpipe.Semaphore.create("s", **both), warpipe.Pool.create("p", **both)
permit, member = semaphore.acquire(), warpipe.Member.join("m", domain=domain)
members, memory = warpipe.Members.watch(domain), warpipe.Memory.allocate(64, device=where)
published, block, stream = memory.publish("w", domain=domain), pool.allocate(64), warpipe.Stream(where)
lent = warpipe.PoolClient.open("p", **both).allocate(64)
view, plain = memory.view(4, "int32"), _warpipe._allocate_plain(64, where)
publisher, subscriber = warpipe.Publisher("a", **both), warpipe.Subscriber("a", **both)
publisher.send(plain, zero_copy="require")
frame = subscriber.receive()
# Somebody waits at the fork, and holds whatever a waiter holds.
threading.Thread(target=lambda: members.changes(None), daemon=True).start()
threading.Thread(target=lambda: semaphore.acquire(timeout=None), daemon=True).start()
while not semaphore.waiting:
    pass
pid = os.fork()
if pid == 0:
    uses = [lambda: timeline.value, lambda: timeline.signal(1), lambda: timeline.wait(1), timeline.close, event.handle,
            lambda: event.record(stream=stream), event.synchronize, event.close, semaphore.acquire, semaphore.try_acquire,
            lambda: semaphore.available, permit.release, permit.release_now, member.close, members.list,
            lambda: members.changes(1.0), lambda: next(members), members.close, memory.tobytes, memory.release,
            memory.export_fd, lambda: memory.write(b"x"), lambda: memory.publish("v", domain=domain), published.ticket,
            lambda: published.memory, view.wait, lambda: view.ptr, lambda: view.copy_from(np.zeros(4, np.int32)),
            lambda: pool.allocate(64), lambda: pool.stats, block.lend, block.release, lent.tobytes,
            lambda: publisher.in_place, frame.tobytes]
    wrong = 0
    for number, use in enumerate(uses):
        try:
            use()
            print("no error from use", number, flush=True)
            wrong = 1
        except warpipe.ForkedError:
            pass
    del timeline, event, semaphore, pool, permit, member, members, memory, published, block, lent, view, plain
    del publisher, subscriber, frame, uses, use
    gc.collect()
    if where == "host":
        with warpipe.Memory.allocate(64, device=where) as own, own.publish("child", domain=domain) as name:
            wrong += name.ticket().open(device=where).tobytes() != bytes(64)
    os._exit(wrong)
_, status = os.waitpid(pid, 0)
assert status == 0, status
timeline.signal(1)
timeline.wait(1)
event.record(stream=stream)
event.synchronize()
memory.write(b"whole")
assert published.ticket().open(device=where).tobytes()[:5] == b"whole"
assert [one.name for one in members.list()] == ["m"] and pool.stats.lent_nbytes >= 64
permit.release()
frame.release()
while publisher.in_place:
    pass
print("whole")
"""


def test_after_a_fork_every_object_is_a_clear_error_and_the_parent_is_whole(place):  # noqa: F811
    done = subprocess.run(
        [sys.executable, "-c", FORK, *place], capture_output=True, text=True, timeout=LIMIT_SECONDS, env=dict(os.environ)
    )
    assert (done.returncode, done.stdout.strip()) == (0, "whole"), done.stdout + done.stderr


def test_what_holds_memory_or_a_name_is_not_pickled(domain, device):
    import pickle

    import pytest

    import warpipe

    both = {"domain": domain, "device": device}
    with warpipe.Timeline.create("t", **both) as timeline, warpipe.Memory.allocate(64, device=device) as memory:
        for thing in (timeline, memory, warpipe.Event.create(**both)):
            with pytest.raises(TypeError):
                pickle.dumps(thing)
