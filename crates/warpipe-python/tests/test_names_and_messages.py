"""What the package takes for names, gives for names, and says."""

import asyncio
import gc
import inspect
import subprocess
import sys
import weakref

import numpy as np
import pytest
from conftest import LIMIT_SECONDS, until

import warpipe


def test_a_star_import_leaves_pythons_own_names_alone():
    code = (
        "before = dict(vars(__import__('builtins')))\nfrom warpipe import *\n"
        "taken = [name for name, value in before.items() if globals().get(name, value) is not value]\n"
        "assert not [name for name in taken if not name.startswith('__')], taken\nassert issubclass(Error, Exception)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    assert issubclass(warpipe.TimeoutError, TimeoutError)


NUMPYS = ["f4", "<f4", "=f8", "|u1", "u1", "i2", "c8", "b1", "?", "e", "d", "B", "l", "Q", "F", "D"]
NUMPYS += ["float", "int", "uint", "complex", "half", "single", "double", "byte", "ushort", "intc"]


@pytest.mark.parametrize("name", NUMPYS)
def test_element_types_have_numpys_names_too(open_publisher, name):
    with open_publisher().loan((2,), name) as out:
        assert out.dtype == np.dtype(name).name


@pytest.mark.parametrize("name", [">f4", "f3", "S4", "O", "M8", "m8[s]", "", "<", "torch.f4.f4", "x1"])
def test_what_is_no_element_type_is_refused_in_words(open_publisher, name):
    with pytest.raises(warpipe.DTypeError):
        open_publisher().loan((2,), name)


def test_devices_have_pytorchs_names_too(domain):
    torch = pytest.importorskip("torch")
    with warpipe.Publisher("a", domain=domain, device=torch.device("cpu")) as publisher:
        assert publisher.device == warpipe.Device("host")
    with pytest.raises(warpipe.ArgumentError):
        warpipe.Publisher("a", domain=domain, device=torch.device("meta"))


def test_no_message_shows_rust(domain, open_publisher, open_subscriber):
    said = [warpipe.Device().why]
    for call in (
        lambda: warpipe.Subscriber("nobody", domain=domain, device="host"),
        lambda: warpipe.Device("cuda:99"),
        lambda: open_publisher().wait_for_subscribers(1, 0.0),
        lambda: warpipe.Timeline.open("nobody", domain=domain, device="host"),
        lambda: open_publisher("b").loan((2**31, 2**32), "float64"),
    ):
        with pytest.raises(warpipe.Error) as error:
            call()
        said.append(str(error.value))
    for message in said:
        assert "::" not in message, message
    # What waits for an owner takes `wait`, and no timeout.
    assert all("`wait=`" in message for message in said if "nobody" in message)


@pytest.mark.parametrize("policy", ["block", "fail"])
def test_a_full_subscriber_is_said_to_hold_its_depth(open_publisher, open_subscriber, policy):
    publisher, subscriber = open_publisher(policy=policy, depth=3, timeout=0.01), open_subscriber()
    for _ in range(3):
        publisher.send(b"")
    with pytest.raises(warpipe.Error, match="has not released the 3 "):
        publisher.send(b"")
    subscriber.close()


def test_an_iteration_waits_as_long_as_it_takes_unless_it_is_told(open_publisher, domain, device):
    open_publisher()
    with warpipe.Subscriber("a", domain=domain, device=device) as subscriber:
        assert subscriber._iteration is None and subscriber._limit(...) == 10.0
    with warpipe.Subscriber("a", domain=domain, device=device, timeout=0.01) as subscriber:
        assert subscriber._iteration == subscriber._limit(...) == 0.01
        with pytest.raises(warpipe.TimeoutError):
            next(subscriber)
    with warpipe.Subscriber("a", domain=domain, device=device, timeout=None) as subscriber:
        assert subscriber._iteration is None and subscriber._limit(...) is None


def test_a_handle_and_a_request_can_be_made_tasks(open_queue, open_worker, open_client, domain, device):
    queue, worker, client = open_queue(), open_worker(), open_client()
    handle = queue.submit(b"")
    assert inspect.isawaitable(handle) and asyncio.iscoroutine(handle)

    async def run():
        tasks = [asyncio.create_task(queue.submit(bytes([n]))) for n in range(3)]
        first = asyncio.create_task(handle)
        await asyncio.sleep(0)
        for _ in range(4):
            with worker.lease(LIMIT_SECONDS) as lease:
                lease.complete(lease.tobytes() + b"!")
        assert (await first).tobytes() == b"!"
        assert [(await task).tobytes() for task in tasks] == [b"\0!", b"\1!", b"\2!"]
        with warpipe.Server("embed", domain=domain, device=device) as server:
            reply = asyncio.create_task(client.request(b"?"))
            await asyncio.sleep(0)
            server.accept(LIMIT_SECONDS).complete(b"yes")
            assert (await reply).tobytes() == b"yes"

    asyncio.run(asyncio.wait_for(run(), LIMIT_SECONDS))


def test_a_cancelled_task_of_a_handle_leaves_the_result(open_queue, open_worker):
    queue, worker = open_queue(), open_worker()
    handle = queue.submit(b"")

    async def run():
        for _ in range(2):
            task = asyncio.create_task(handle)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        both = asyncio.create_task(handle), asyncio.create_task(handle)
        await asyncio.sleep(0)
        worker.lease(LIMIT_SECONDS).complete(b"one")
        results = await asyncio.gather(*both, return_exceptions=True)
        assert isinstance(results[0], warpipe.JobResult) and results[0] is results[1]

    asyncio.run(asyncio.wait_for(run(), LIMIT_SECONDS))


def test_a_handle_whose_task_was_given_up_is_collected(open_queue):
    handles = [open_queue().submit(b"")]
    gone = weakref.ref(handles[0])

    async def run():
        asyncio.create_task(handles[0])
        await asyncio.sleep(0)

    asyncio.run(run())
    handles.clear()
    until(lambda: gc.collect() >= 0 and gone() is None, "the collection")
