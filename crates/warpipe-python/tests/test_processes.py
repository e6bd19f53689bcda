"""Other processes: spawned, forked, killed; a hundred thousand frames through three of them; nothing left afterwards."""

import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import until
from peers import (
    LIMIT_SECONDS,
    add_up,
    hold_bytes,
    kill,
    pass_on,
    process,
    publish_late,
    publish_some,
    receive_and_hold,
    said,
    subscribe_until_full,
)

import warpipe
from warpipe import _warpipe

FRAMES = int(os.environ.get("WARPIPE_TEST_FRAMES", 20_000))

# A kill ends every client of an MPS server: that is MPS, and no test of ours.
kills = pytest.mark.skipif(bool(os.environ.get("WARPIPE_TEST_MPS")), reason="under MPS a kill ends all its clients")


@pytest.fixture
def place(domain, device):
    return str(domain.path), f"cuda:{device.ordinal}" if device.kind == "cuda" else "host"


def test_a_spawned_process_receives_what_is_sent_here(open_publisher, place):
    publisher = open_publisher(history=1)
    publisher.send(np.arange(3))
    with process(hold_bytes, *place) as (_child, pipe):
        assert said(pipe) == "ready"
        assert said(pipe) == [0, 1, 2]


@kills
def test_frames_of_a_killed_publisher_are_received_and_then_its_end(open_subscriber, place):
    with process(publish_some, *place, 3) as (child, pipe):
        assert said(pipe) == "ready"
        subscriber = open_subscriber()
        assert said(pipe) == "sent"
        kill(child)
        found = [int(subscriber.receive().numpy()[0]) for _ in range(3)]
        assert found == [_warpipe._pattern(number, 0) for number in range(3)]
        with pytest.raises(warpipe.PeerGoneError, match="has died") as gone:
            subscriber.receive()
        assert (gone.value.pid, gone.value.graceful) == (child.pid, False)
        with pytest.raises(warpipe.PeerGoneError):
            next(subscriber)


@kills
def test_a_frame_whose_publisher_dies_before_its_data_is_whole_is_lost(open_subscriber, place):
    with process(publish_late, *place, 9.0) as (child, pipe):
        assert said(pipe) == "ready"
        subscriber = open_subscriber()
        first, second = subscriber.receive(), None
        assert said(pipe) == "sent"
        kill(child)
        with pytest.raises(warpipe.SampleLostError, match="discard what was computed") as lost:
            first.wait()
        assert (lost.value.pid, lost.value.sequence) == (child.pid, 1)
        with pytest.raises(warpipe.SampleLostError):
            first.numpy()
        with pytest.raises(warpipe.SampleLostError):
            first.finish()
        assert second is None


@kills
def test_what_a_killed_subscriber_held_is_used_again(open_publisher, place):
    publisher = open_publisher(depth=4, memory_limit=4 << 20, timeout=LIMIT_SECONDS, loan_timeout=LIMIT_SECONDS)
    with process(receive_and_hold, *place, 4) as (child, pipe):
        assert said(pipe) == "ready"
        publisher.wait_for_subscribers(1, LIMIT_SECONDS)
        for _ in range(4):
            publisher.send(np.zeros(1 << 20, np.uint8))
        assert said(pipe) == 4
        kill(child)
        # Each needs the ring's room and a slot that the dead one held.
        for _ in range(8):
            publisher.send(np.zeros(1 << 20, np.uint8))
        until(lambda: not publisher.subscribers, "the end of the dead subscriber")


def test_many_small_tensors_through_three_processes(open_publisher, place):
    publisher = open_publisher("first", depth=64, timeout=LIMIT_SECONDS)
    with (
        process(pass_on, *place, "first", "second") as (_middle, passed),
        process(add_up, *place, "second") as (_last, added),
    ):
        assert said(added) == "ready"
        assert said(passed) == "ready"
        publisher.wait_for_subscribers(1, LIMIT_SECONDS)
        data = np.zeros(4, np.int64)
        for number in range(FRAMES):
            data[0] = number
            publisher.send(data)
        publisher.close()
        assert said(passed) == FRAMES
        assert said(added) == (FRAMES, FRAMES * (FRAMES - 1) // 2 + FRAMES, True)


FORK = """
import os, sys, gc, threading
import numpy as np
import warpipe
domain, where = sys.argv[1:]
publisher = warpipe.Publisher("a", domain=domain, device=where, depth=4)
subscriber = warpipe.Subscriber("a", domain=domain, device=where)
publisher.send(np.arange(3))
frame = subscriber.receive()
array = np.from_dlpack(frame, device="cpu")
loan = publisher.loan(4, "uint8")
queue = warpipe.Queue("jobs", domain=domain, device=where)
worker = warpipe.Worker("jobs", domain=domain, device=where)
client = warpipe.Client("service", domain=domain, device=where)
server = warpipe.Server("service", domain=domain, device=where)
handles = [queue.submit(np.arange(4)) for _ in range(3)]
lease = worker.lease()
worker.lease().complete(b"done")
result = handles[1].result(30)
output = lease.output(4, "int64")
pending = client.request(b"x")
request = server.accept(30)
results = queue.results()
threading.Thread(target=lambda: handles[2].result(), daemon=True).start()
# Somebody waits at the fork, and holds whatever a waiter holds.
threading.Thread(target=lambda: subscriber.receive(None), daemon=True).start()
pid = os.fork()
if pid == 0:
    uses = [lambda: publisher.send(b"x"), lambda: publisher.loan(1, "uint8"), lambda: publisher.subscribers,
            lambda: publisher.closed, publisher.close, subscriber.receive, subscriber.try_receive, subscriber.fileno,
            lambda: next(subscriber), lambda: subscriber.dropped, subscriber.close, frame.numpy, frame.wait,
            frame.release, frame.__dlpack__, loan.send, loan.discard, lambda: loan.ptr,
            lambda: queue.submit(b"x"), lambda: queue.loan(1, "uint8"), queue.drain, queue.shutdown, lambda: queue.state,
            queue.wait_for_workers, lambda: next(results), queue.close, handles[0].result, handles[0].done,
            handles[0].cancel, worker.lease, worker.try_lease, lambda: next(worker), worker.fileno, worker.close,
            lease.complete, lambda: lease.fail("x"), lease.requeue, lambda: lease.output(1, "uint8"), lease.numpy,
            lambda: lease.complete(output), lambda: output.ptr, result.numpy, result.release,
            lambda: client.call(b"x"), lambda: client.state, client.close, pending.result, pending.done, pending.cancel,
            server.accept, lambda: next(server), lambda: server.clients, server.close]
    wrong = 0
    for number, use in enumerate(uses):
        try:
            use()
            print("no error from use", number, flush=True)
            wrong = 1
        except warpipe.ForkedError as error:
            if "spawn" not in str(error):
                wrong = 2
    del array, frame, loan, subscriber, publisher, uses, use
    del queue, worker, client, server, handles, lease, result, output, pending, request, results
    gc.collect()
    if where == "host":
        with warpipe.Publisher("child", domain=domain, device=where) as own:
            with warpipe.Subscriber("child", domain=domain, device=where) as reader:
                own.send(b"of the child")
                wrong += reader.receive().tobytes() != b"of the child"
    os._exit(wrong)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
# The child harmed nothing of ours.
assert array.tolist() == [0, 1, 2] and frame.numpy().tolist() == [0, 1, 2]
loan.send()
with output:
    output.copy_from(np.full(4, 7))
assert handles[0].result(30).numpy().tolist() == [7] * 4 and result.tobytes() == b"done"
request.complete(b"y")
assert pending.result().tobytes() == b"y"
print("whole")
os._exit(0)
"""


def test_after_a_fork_everything_is_a_clear_error_and_the_parent_is_whole(place):
    done = subprocess.run(
        [sys.executable, "-c", FORK, *place], capture_output=True, text=True, timeout=LIMIT_SECONDS, env=dict(os.environ)
    )
    assert (done.returncode, done.stdout.strip()) == (0, "whole"), done.stdout + done.stderr


def test_an_object_is_not_pickled(link):
    import pickle

    for thing in link:
        with pytest.raises(TypeError):
            pickle.dumps(thing)


def test_another_process_has_so_many_subscribers_and_no_more(open_publisher, place):
    open_publisher()
    with process(subscribe_until_full, *place) as (_child, pipe):
        assert said(pipe) == (64, "HandshakeError")


@pytest.mark.parametrize("wrong", [-1.0, float("nan")])
def test_a_timeout_for_orphans_is_a_number_of_seconds(open_publisher, open_subscriber, wrong):
    open_publisher()
    open_subscriber(orphan_timeout=0.5)
    with pytest.raises(warpipe.ArgumentError, match="orphan_timeout"):
        open_subscriber(orphan_timeout=wrong)
