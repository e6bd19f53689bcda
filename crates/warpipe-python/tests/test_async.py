"""Waits in event loops: each wakes by its own ring, a cancelled one has taken nothing, and loops may come and go."""

import asyncio
import concurrent.futures
import contextlib
import errno
import gc
import os
import random
import select
import threading

import numpy as np
import pytest
from conftest import LIMIT_SECONDS, until

import warpipe
from warpipe import _loop, _queue

# A worker waits with its answers when its queue holds 64 results of its.
SOME = 60


@pytest.fixture
def nothing_but_rings(monkeypatch):
    """No wait looks before it is woken, so that one which is not woken does not end."""
    monkeypatch.setattr(_loop, "LOOK_SECONDS", 3600.0)
    monkeypatch.setattr(_queue, "_PATIENCE_SECONDS", 3600.0)


@pytest.fixture(autouse=True)
def no_loop_is_kept():
    """No waiter is left."""
    yield
    gc.collect()
    assert dict(_loop._hubs) == {}


@pytest.fixture
def queue(domain, device):
    with warpipe.Queue("jobs", domain=domain, device=device, prefetch=64) as queue:
        yield queue


@pytest.fixture
def worker(queue, domain, device):
    with warpipe.Worker("jobs", domain=domain, device=device) as worker:
        yield worker


@pytest.fixture
def client(domain, device):
    with warpipe.Client("embed", domain=domain, device=device, timeout=LIMIT_SECONDS) as client:
        yield client


@pytest.fixture
def server(domain, device):
    with warpipe.Server("embed", domain=domain, device=device) as server:
        yield server


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_SECONDS))


async def of(awaitable):
    return await awaitable


async def asleep(task):
    """Returns when the task waits for something outside of the loop."""
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done()
    return task


async def cancelled(coroutine):
    """Begins it, and cancels it in its sleep."""
    task = await asleep(asyncio.create_task(coroutine))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def serve(server):
    """Triples what clients send, until it is cancelled."""
    async for request in server:
        with request:
            request.complete(request.numpy() * 3)


def test_async_iteration_serves_every_client_and_others_of_the_loop(server, domain, device, nothing_but_rings):
    async def go():
        serving = asyncio.create_task(serve(server))
        await asleep(serving)
        # They come when the server sleeps already.
        clients = [warpipe.Client("embed", domain=domain, device=device, timeout=LIMIT_SECONDS) for _ in range(3)]
        pending = [client.request(np.array([number])) for number in range(20) for client in clients]
        replies = [int(reply.numpy()[0]) for reply in await asyncio.gather(*pending)]
        serving.cancel()
        for client in clients:
            client.close()
        return replies

    assert run(go()) == [3 * number for number in range(20) for _ in range(3)]


def test_a_wait_that_is_late_says_what_the_wait_that_blocks_says(queue, worker, server, domain, device, link):
    subscriber = link[1]
    queue.submit(b"x")
    lease = worker.lease()
    waits = [
        (worker.lease_async, worker.lease),
        (server.accept_async, server.accept),
        (subscriber.receive_async, subscriber.receive),
        (lambda timeout: anext(queue.results(timeout)), lambda timeout: next(queue.results(timeout))),
    ]
    for awaited, blocking in waits:
        with pytest.raises(warpipe.TimeoutError) as expected:
            blocking(timeout=0.02)
        with pytest.raises(warpipe.TimeoutError) as late:
            run(awaited(timeout=0.02))
        assert (str(late.value), late.value.waited) == (str(expected.value), expected.value.waited)
    lease.complete()


def test_a_server_that_is_waited_for_in_vain_says_so_and_takes_the_next(server, client, nothing_but_rings):
    async def go():
        with pytest.raises(warpipe.TimeoutError) as late:
            await server.accept_async(timeout=0.05)
        assert late.value.waited == 0.05
        await cancelled(server.accept_async())
        waiting = await asleep(asyncio.create_task(server.accept_async()))
        pending = client.request(np.arange(3))
        (await waiting).complete(np.arange(4))
        with await pending as reply:
            return reply.numpy().tolist()

    assert run(go()) == [0, 1, 2, 3]


def test_without_the_ring_a_wait_does_not_end(server, client, nothing_but_rings, monkeypatch):
    """That the others end shows that they were woken."""

    async def go():
        # Attached to the client, and behind its first ring.
        pending = client.request(b"1")
        (await server.accept_async()).complete()
        (await pending).release()
        waiting = await asleep(asyncio.create_task(server.accept_async()))
        monkeypatch.setattr(_loop._Hub, "_wake", lambda _hub: None)
        pending = client.request(b"2")
        assert select.select([server], [], [], LIMIT_SECONDS)[0] == [server]
        await asleep(waiting)
        waiting.cancel()
        server.accept().complete()
        pending.result()

    run(go())


def test_async_with_closes_a_server(domain, device):
    async def go():
        async with warpipe.Server("embed", domain=domain, device=device) as server:
            assert server.try_accept() is None
        assert server.closed
        with pytest.raises(warpipe.ClosedError):
            await server.accept_async()

    run(go())


def shaken(wait, take, give, seed=0):
    """Takes with 4 tasks of which any is cancelled at any time, while ``give`` gives SOME; returns what was taken."""

    async def go():
        chance, taken = random.Random(seed), []

        async def once():
            taken.append(take(await wait()))

        tasks = set()
        for number in range(SOME):
            while len(tasks) < 4:
                tasks.add(asyncio.create_task(once()))
            give(number)
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            for task in list(tasks):
                if chance.random() < 0.3:
                    task.cancel()
            await asyncio.sleep(0)
            tasks = {task for task in tasks if not task.done()}
        while len(taken) < SOME:
            tasks = tasks or {asyncio.create_task(once())}
            _, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        return taken

    return go()


@pytest.mark.parametrize("seed", range(3))
def test_cancelled_waits_lose_no_job(queue, worker, nothing_but_rings, seed):
    handles = []

    def take(lease):
        with lease:
            number = int(lease.numpy()[0])
            lease.complete()
        return number

    taken = run(shaken(worker.lease_async, take, lambda number: handles.append(queue.submit(np.array([number]))), seed))
    assert sorted(taken) == list(range(SOME))
    assert {handle.result(LIMIT_SECONDS).attempt for handle in handles} == {1}


def test_cancelled_waits_lose_no_request(server, client, nothing_but_rings):
    pending = []

    def take(request):
        with request:
            number = int(request.numpy()[0])
            request.complete()
        return number

    taken = run(shaken(server.accept_async, take, lambda number: pending.append(client.request(np.array([number])))))
    assert sorted(taken) == list(range(SOME))
    assert {one.result().attempt for one in pending} == {1}


def test_cancelled_waits_lose_no_frame(open_publisher, open_subscriber, nothing_but_rings):
    publisher, subscriber = open_publisher(depth=128), open_subscriber()
    taken = run(shaken(subscriber.receive_async, lambda frame: frame.tobytes()[0], lambda number: publisher.send(bytes([number]))))
    assert sorted(taken) == list(range(SOME))


def test_cancelled_waits_lose_no_change(domain, nothing_but_rings):
    joined = []
    with warpipe.Members.watch(domain) as members:
        take = lambda change: change.member.name  # noqa: E731
        give = lambda number: joined.append(warpipe.Member.join(f"m{number}", domain=domain))  # noqa: E731
        taken = run(shaken(lambda: members.changes_async(None), take, give))
    assert sorted(taken) == sorted(member.name for member in joined)
    for member in joined:
        member.close()


def test_several_tasks_wait_for_one_worker_and_each_gets_a_job(queue, worker, nothing_but_rings):
    async def go():
        waiting = [await asleep(asyncio.create_task(worker.lease_async())) for _ in range(5)]
        handles = [queue.submit(b"x") for _ in range(5)]
        for lease in await asyncio.gather(*waiting):
            lease.complete()
        return [(await handle).attempt for handle in handles]

    assert run(go()) == [1] * 5


def test_two_loops_wait_for_one_worker(queue, worker):
    done = []

    async def work():
        while True:
            with await worker.lease_async() as lease:
                if not lease.metadata["go_on"]:
                    return lease.complete()
                lease.complete()
                done.append(threading.get_ident())

    loops = [threading.Thread(target=run, args=(work(),)) for _ in range(2)]
    for loop in loops:
        loop.start()
    for _ in range(100):
        queue.submit(b"x", metadata={"go_on": True}).result(LIMIT_SECONDS)
    for _ in loops:
        queue.submit(b"x", metadata={"go_on": False}).result(LIMIT_SECONDS)
    for loop in loops:
        loop.join(LIMIT_SECONDS)
    assert len(done) == 100


def test_a_job_that_ends_wakes_no_other_wait(queue, worker, nothing_but_rings, monkeypatch):
    looks, poll = [], warpipe._warpipe._Future._poll

    def counted(handle):
        looks.append(handle)
        return poll(handle)

    async def go():
        waiting = [asyncio.create_task(of(queue.submit(b"x"))) for _ in range(SOME)]
        await asleep(waiting[-1])
        for task in waiting:
            worker.lease(LIMIT_SECONDS).complete()
            (await task).release()

    monkeypatch.setattr(warpipe._warpipe._Future, "_poll", counted)
    run(go())
    # Before its sleep, behind it, and once more for the one that makes the doorbell.
    assert len(looks) <= 2 * SOME + 1


def test_changes_of_members_come_in_a_loop(domain, nothing_but_rings):
    async def go():
        seen = []
        with warpipe.Members.watch(domain) as members:
            assert await members.changes_async(timeout=0) is None
            waiting = await asleep(asyncio.create_task(members.changes_async(None)))
            member = warpipe.Member.join("a", domain=domain)
            seen.append(await waiting)
            member.close()
            async for change in members:
                seen.append(change)
                members.close()
        return [(change.what, change.member.name) for change in seen]

    assert run(go()) == [("joined", "a"), ("left", "a")]


def test_a_wait_ends_when_what_it_waits_for_is_closed(link, queue, worker, server, domain):
    _publisher, subscriber = link
    members = warpipe.Members.watch(domain)
    waits = {
        subscriber: subscriber.receive_async,
        worker: worker.lease_async,
        server: server.accept_async,
        members: lambda: members.changes_async(None),
    }

    async def go():
        for closed, wait in waits.items():
            waiting = await asleep(asyncio.create_task(wait()))
            closed.close()
            with pytest.raises(warpipe.ClosedError):
                await waiting

    run(go())


def test_a_descriptor_of_somebody_who_closed_rings_for_nobody_else(open_publisher, open_subscriber):
    """The kernel gives the next endpoint the numbers of the one before."""
    publishers = [open_publisher(name) for name in "ab"]

    async def go():
        waiting = []
        # What the library's threads close meanwhile may change which number is next.
        for _ in range(100):
            first = open_subscriber("a")
            waiting.append(await asleep(asyncio.create_task(first.receive_async())))
            number = first.fileno()
            first.close()
            second = open_subscriber("b")
            if second.fileno() == number:
                break
            second.close()
        _loop.LOOK_SECONDS, before = 3600.0, _loop.LOOK_SECONDS
        try:
            also = await asleep(asyncio.create_task(second.receive_async()))
            assert second.fileno() == number
            publishers[1].send(b"for the second")
            assert (await also).tobytes() == b"for the second"
        finally:
            _loop.LOOK_SECONDS = before
        for task in waiting:
            with pytest.raises(warpipe.ClosedError):
                await task

    run(go())


def test_awaiting_a_job_that_is_called_off_or_fails_or_whose_queue_closes_ends(queue, worker, nothing_but_rings):
    async def go():
        called_off = await asleep(asyncio.create_task(of(handle := queue.submit(b"1"))))
        first = await worker.lease_async()
        assert handle.cancel()
        first.complete()
        with pytest.raises(concurrent.futures.CancelledError):
            await called_off
        rejected = await asleep(asyncio.create_task(of(queue.submit(b"2"))))
        (await worker.lease_async()).reject("not this one")
        with pytest.raises(warpipe.RejectedError):
            await rejected
        left = await asleep(asyncio.create_task(of(queue.submit(b"3"))))
        queue.close()
        with pytest.raises(warpipe.QueueClosedError):
            await left

    run(go())


def test_a_cancelled_await_leaves_the_outcome_to_the_next(queue, worker, nothing_but_rings):
    async def go():
        handle = queue.submit(b"x")
        await cancelled(of(handle))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(of(handle), 0.02)
        (await worker.lease_async()).complete(np.arange(2))
        # Cancelled when the result is there, and before it looks again.
        until(handle.done, "the result")
        waiting = asyncio.create_task(of(handle))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with await handle as result:
            assert result.numpy().tolist() == [0, 1]
        assert await handle is result

    run(go())


def test_awaiting_a_request_ends_at_its_deadline_when_it_is_called_off_and_when_the_client_closes(client, nothing_but_rings):
    async def go():
        with pytest.raises(warpipe.DeadlinePassedError):
            await client.request(b"nobody serves", timeout=0.05)
        called_off = await asleep(asyncio.create_task(of(pending := client.request(b"x"))))
        pending.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            await called_off
        left = await asleep(asyncio.create_task(of(client.request(b"x"))))
        client.close()
        with pytest.raises(warpipe.QueueClosedError):
            await left

    run(go())


def test_a_cancelled_await_of_a_request_leaves_the_reply_to_the_next(client, server, nothing_but_rings):
    async def go():
        pending = client.request(b"x")
        await cancelled(of(pending))
        (await server.accept_async()).complete(np.arange(2))
        with await pending as reply:
            return reply.numpy().tolist()

    assert run(go()) == [0, 1]


def descriptors():
    """Without those of memory, which a thread of the library opens and closes when it comes to it."""
    gc.collect()
    count = 0
    with os.scandir("/proc/self/fd") as files:
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                count += not os.readlink(file).startswith("/memfd:")
    return count


def test_a_loop_that_is_closed_in_the_middle_leaves_nothing_behind(queue, worker, server, link):
    _publisher, subscriber = link
    # What each makes once.
    for endpoint in (worker, server, subscriber):
        endpoint.fileno()
    handle = queue.submit(b"x")
    before = descriptors()
    loop = asyncio.new_event_loop()
    waits = [of(handle), server.accept_async(), subscriber.receive_async()]
    tasks = [loop.create_task(wait) for wait in waits]
    for _ in range(5):
        loop.call_soon(loop.stop)
        loop.run_forever()
    assert not any(task.done() for task in tasks)
    loop.close()
    # asyncio says that they were pending; that is the point.
    for task in tasks:
        task._log_destroy_pending = False
    del loop, task, tasks, waits
    assert descriptors() == before
    worker.lease().complete()
    assert run(of(handle)).attempt == 1


def test_a_wait_in_a_loop_that_polls_no_descriptors_leaves_none_open(worker):
    async def go():
        before = descriptors()
        asyncio.get_running_loop().add_reader = None
        with pytest.raises(TypeError):
            await worker.lease_async()
        assert descriptors() == before

    worker.fileno()
    run(go())


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), "soon"])
def test_a_wrong_timeout_is_refused_as_by_the_waits_that_block(worker, server, link, domain, wrong):
    _publisher, subscriber = link

    async def go():
        for wait in (subscriber.receive_async, worker.lease_async, server.accept_async):
            with pytest.raises((warpipe.ArgumentError, TypeError)):
                await wait(timeout=wrong)

    run(go())


@pytest.mark.parametrize("number_is", ["free", "another file's"])
def test_a_wait_that_begins_as_another_thread_closes_its_endpoint_says_so(link, monkeypatch, number_is):
    _, subscriber = link
    duplicate = os.dup

    def dup(descriptor):
        subscriber.close()
        if number_is == "free":
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        with open(__file__) as other:
            return duplicate(other.fileno())

    monkeypatch.setattr(os, "dup", dup)
    with pytest.raises(warpipe.ClosedError):
        asyncio.run(subscriber.receive_async(LIMIT_SECONDS))
