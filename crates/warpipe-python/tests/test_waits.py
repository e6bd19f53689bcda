"""Waits: Ctrl-C ends them, they let other threads run, and event loops sleep in their own poller."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import warpipe
from warpipe import _warpipe

SECONDS = 60.0


class Interrupted(Exception):
    pass


@contextlib.contextmanager
def a_signal_soon():
    """A signal while the block runs; its handler raises. A signal that comes early would be seen as well."""

    def handler(_number, _frame):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.15)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_wait_that_is_late_says_what_is_missing(domain):
    with warpipe.Queue("jobs", domain=domain, device="host") as queue:
        handle = queue.submit(np.zeros(4, np.uint8))
        for wait in [lambda: handle.result(0.01), lambda: queue.drain(0.01), lambda: next(queue.results(timeout=0.01))]:
            with pytest.raises(warpipe.TimeoutError, match="attached workers: 0, jobs that wait: 1"):
                wait()
        with pytest.raises(warpipe.TimeoutError, match=r'2 workers of "jobs" \(0 attached\)'):
            queue.wait_for_workers(2, timeout=0.01)
    with warpipe.Publisher("camera", domain=domain, device="host") as publisher:
        with pytest.raises(warpipe.TimeoutError, match=r'1 subscriber of "camera" \(0 attached\)'):
            publisher.wait_for_subscribers(1, timeout=0.01)
        with warpipe.Subscriber("camera", domain=domain, device="host") as subscriber:
            with pytest.raises(warpipe.TimeoutError, match="publishes it, and has sent no other"):
                subscriber.receive(timeout=0.01)


def test_a_name_that_is_looked_for_in_vain_is_told_with_its_domain(domain):
    with pytest.raises(warpipe.NotFoundError) as told:
        warpipe.Subscriber("nobody", domain=domain, device="host")
    assert str(domain.path) in str(told.value)


def late_frame(device, publisher, subscriber):
    stream = warpipe.Stream(device)
    loan = publisher.loan((8,), "uint64")
    _warpipe._slow_fill(loan, stream, 1, 5.0)
    loan.send(stream=stream)
    return stream, subscriber.receive()


def test_a_signal_ends_every_wait(open_publisher, open_subscriber, device):
    publisher = open_publisher(depth=1, timeout=SECONDS, memory_limit=2 << 20, loan_timeout=SECONDS)
    waits = {
        "for a publisher": lambda: open_subscriber("nobody", wait=SECONDS),
        "for a subscriber": lambda: publisher.wait_for_subscribers(1, SECONDS),
    }
    for name, wait in waits.items():
        with pytest.raises(Interrupted), a_signal_soon():
            wait()
    subscriber = open_subscriber()
    publisher.wait_for_subscribers(1)
    publisher.send(np.zeros(1 << 20, np.uint8))
    with pytest.raises(Interrupted), a_signal_soon():
        publisher.send(b"for room")
    with pytest.raises(Interrupted), a_signal_soon():
        publisher.loan(3 << 19, "uint8")
    held = subscriber.receive()
    for wait in (lambda: subscriber.receive(SECONDS), lambda: next(subscriber), lambda: subscriber.receive(None)):
        with pytest.raises(Interrupted), a_signal_soon():
            wait()
    held.release()
    # What was interrupted was not sent, and nothing is lost for it.
    publisher.send(b"after")
    assert subscriber.receive().tobytes() == b"after"


def test_a_signal_ends_the_waits_for_data(link, device):
    stream, frame = late_frame(device, *link)
    for wait in (lambda: frame.wait(SECONDS), frame.numpy, lambda: stream.synchronize(SECONDS), frame.tobytes):
        with pytest.raises(Interrupted), a_signal_soon():
            wait()
    with pytest.raises(Interrupted), a_signal_soon():
        frame.finish(SECONDS)
    stream.synchronize(SECONDS)


def test_a_receiver_lets_other_threads_run(link):
    publisher, subscriber = link
    received = []
    receiver = threading.Thread(target=lambda: received.append(subscriber.receive(SECONDS).tobytes()))
    receiver.start()
    publisher.send(b"from another thread")
    receiver.join(SECONDS)
    assert received == [b"from another thread"]


def test_a_blocked_sender_lets_other_threads_run(open_publisher, open_subscriber):
    publisher, subscriber = open_publisher(depth=1, timeout=SECONDS), open_subscriber()
    publisher.send(b"1")
    sender = threading.Thread(target=publisher.send, args=(b"2",))
    sender.start()
    assert subscriber.receive().tobytes() == b"1"
    assert subscriber.receive().tobytes() == b"2"
    sender.join(SECONDS)
    assert not sender.is_alive()


def test_many_threads_send_and_receive_each_frame_once(open_publisher, open_subscriber):
    publisher, subscriber = open_publisher(depth=64), open_subscriber()
    each, threads = 200, 4
    seen, lock = [], threading.Lock()

    def send(first):
        for number in range(first, first + each):
            publisher.send(np.array([number]))

    def receive():
        for _ in range(each):
            frame = subscriber.receive(SECONDS)
            number = int(frame.numpy()[0])
            frame.release()
            with lock:
                seen.append(number)

    workers = [threading.Thread(target=send, args=(index * each,)) for index in range(threads)]
    workers += [threading.Thread(target=receive) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(SECONDS)
    assert sorted(seen) == list(range(each * threads))


def test_closing_ends_the_receive_of_another_thread(link):
    _publisher, subscriber = link
    ended = []

    def receive():
        try:
            subscriber.receive(None)
        except warpipe.Error as error:
            ended.append(type(error))

    receiver = threading.Thread(target=receive)
    receiver.start()
    subscriber.close()
    receiver.join(SECONDS)
    assert ended == [warpipe.ClosedError]


def test_closing_ends_the_blocked_send_of_another_thread(open_publisher, open_subscriber):
    publisher, _subscriber = open_publisher(depth=1, timeout=None), open_subscriber()
    publisher.send(b"1")
    ended = []

    def send():
        try:
            publisher.send(b"2")
        except warpipe.Error as error:
            ended.append(error)

    sender = threading.Thread(target=send)
    sender.start()
    publisher.close()
    sender.join(SECONDS)
    assert [type(error) for error in ended] == [warpipe.ClosedError]
    assert "open a new one" in str(ended[0])


def test_a_stream_of_the_parent_is_a_clear_error_in_a_forked_child(device):
    if device.kind == "cuda":
        pytest.skip("CUDA does not outlive a fork")
    code = """
import os, sys
import warpipe
stream, other = warpipe.Stream("host"), warpipe.Stream("host")
child = os.fork()
if child == 0:
    uses = [stream.is_idle, stream.synchronize, lambda: stream.wait_for(other),
            lambda: warpipe.Stream("host").wait_for(stream)]
    for use in uses:
        try:
            use()
            os._exit(1)
        except warpipe.ForkedError:
            pass
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr


def test_async_iteration_receives_everything_and_ends_with_the_publisher(link):
    publisher, subscriber = link

    async def produce():
        for number in range(50):
            while publisher.subscribers[0].in_flight > 8:
                await asyncio.sleep(0)
            publisher.send(bytes([number]))
            await asyncio.sleep(0)
        publisher.close()

    async def consume():
        found = []
        async with subscriber:
            async for frame in subscriber:
                with frame:
                    found.append(frame.tobytes()[0])
        return found

    async def both():
        return await asyncio.gather(consume(), produce())

    assert asyncio.run(asyncio.wait_for(both(), SECONDS))[0] == list(range(50))


def test_an_async_receive_sleeps_times_out_and_can_be_cancelled(link):
    publisher, subscriber = link

    async def run():
        with pytest.raises(warpipe.TimeoutError):
            await subscriber.receive_async(timeout=0.05)
        waiting = asyncio.create_task(subscriber.receive_async())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        waiting = asyncio.create_task(subscriber.receive_async())
        await asyncio.sleep(0)
        threading.Thread(target=publisher.send, args=(b"rung",)).start()
        return (await asyncio.wait_for(waiting, SECONDS)).tobytes()

    assert asyncio.run(run()) == b"rung"


def test_several_subscribers_share_one_loop(open_publisher, open_subscriber):
    names = ["a", "b", "c"]
    publishers = [open_publisher(name) for name in names]
    subscribers = [open_subscriber(name) for name in names]

    async def consume(subscriber):
        return [frame.tobytes() async for frame in subscriber]

    async def run():
        tasks = [asyncio.create_task(consume(subscriber)) for subscriber in subscribers]
        for publisher in publishers:
            publisher.send(publisher.name.encode())
            await asyncio.sleep(0)
            publisher.close()
        return await asyncio.wait_for(asyncio.gather(*tasks), SECONDS)

    assert asyncio.run(run()) == [[b"a"], [b"b"], [b"c"]]
