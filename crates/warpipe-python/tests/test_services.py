"""Services: requests answered by whichever server is left, within their deadlines."""

import asyncio
import concurrent.futures
import contextlib
import threading

import numpy as np
import pytest
from conftest import LIMIT_SECONDS
from workers import accept_and_hang, serve
from peers import kill, process, said
from test_processes import kills, place  # noqa: F401
from test_waits import Interrupted, a_signal_soon

import warpipe


@pytest.fixture
def server(domain, device):
    with warpipe.Server("embed", domain=domain, device=device, timeout=LIMIT_SECONDS) as server:
        yield server


@pytest.fixture
def tripling(server):
    """A server in a thread of this process, until the end."""

    def work():
        try:
            for request in server:
                with request:
                    if request.metadata.get("refuse"):
                        request.reject("not this one")
                    else:
                        request.complete(request.numpy() * 3)
        except warpipe.ClosedError:
            pass

    thread = threading.Thread(target=work)
    thread.start()
    yield server
    server.close()
    thread.join(LIMIT_SECONDS)
    assert not thread.is_alive()


def test_a_request_is_a_lease_and_its_reply_a_result(open_client, server):
    import os
    import time

    client = open_client()
    pending = client.request(np.arange(3), metadata={"q": 1}, timeout=LIMIT_SECONDS)
    request = server.accept()
    assert request.queue_pid == os.getpid() and server.clients == 1
    assert request.metadata == {"q": 1} and request.deadline_ns > time.monotonic_ns()
    assert not pending.done()
    with request, request.output(3, "int64") as out:
        out.copy_from(request.numpy() + 1)
    reply = pending.result()
    assert reply.numpy().tolist() == [1, 2, 3] and reply.worker_pid == os.getpid()
    assert pending.result() is reply


def test_calls_of_many_threads_and_clients_are_answered_each_with_its_own(open_client, tripling):
    clients, found, lock = [open_client(), open_client()], [], threading.Lock()

    def call(client, first):
        for number in range(first, first + 25):
            with client.call(np.array([number])) as reply, lock:
                found.append((number, int(reply.numpy()[0])))

    threads = [threading.Thread(target=call, args=(clients[n % 2], 100 * n)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    assert len(found) == 100 and all(reply == 3 * number for number, reply in found)


def test_a_deadline_passes_a_rejection_is_told_and_a_request_is_called_off(open_client, domain, device):
    client = open_client()
    with pytest.raises(warpipe.DeadlinePassedError) as late:
        client.call(b"nobody is there", timeout=0.1)
    assert isinstance(late.value, TimeoutError) and late.value.endpoint == "embed"
    called_off = client.request(b"never mind")
    called_off.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        called_off.result()
    with warpipe.Server("embed", domain=domain, device=device, timeout=LIMIT_SECONDS) as server:
        pending = client.request(b"refuse this")
        server.accept().reject("not this one")
        with pytest.raises(warpipe.RejectedError) as rejected:
            pending.result()
        assert rejected.value.reason == "not this one"
        with pytest.raises(warpipe.TimeoutError):
            server.accept(timeout=0.05)


def test_failures_are_buried_with_their_reasons(open_client, server):
    client = open_client(max_attempts=2)
    pending = client.request(b"bad")
    for reason in ("first", "second"):
        with server.accept():
            raise ValueError(reason)
    with pytest.raises(warpipe.DeadLetteredError) as dead_lettered:
        pending.result()
    assert [reason in said for reason, said in zip(("first", "second"), dead_lettered.value.reasons, strict=True)] == [True] * 2


def test_a_server_goes_on_with_the_others_when_a_client_is_gone_before_its_answer(open_client, server, caplog):
    def leave(request):
        pass

    def output(request):
        with request.output(1, "int64") as out:
            out.copy_from(np.ones(1, "int64"))

    def interrupt(request):
        raise KeyboardInterrupt

    for answer in (lambda request: request.complete(request.numpy()), output, leave, interrupt):
        leaver, other = open_client(), open_client()
        kept = leaver.request(np.arange(3))
        request = server.accept()
        leaver.close()
        del kept
        with pytest.raises(KeyboardInterrupt) if answer is interrupt else contextlib.nullcontext(), request:
            answer(request)
        pending = other.request(np.arange(3))
        with server.accept() as request:
            request.complete(request.numpy())
        assert pending.result().numpy().tolist() == [0, 1, 2]
        other.close()
    # Its tracebacks have this frame.
    caplog.clear()


def test_requests_are_awaited(open_client, tripling):
    client = open_client()

    async def ask(number):
        with await client.request(np.array([number])) as reply:
            return int(reply.numpy()[0])

    async def run():
        found = await asyncio.wait_for(asyncio.gather(*map(ask, range(100))), LIMIT_SECONDS)
        with pytest.raises(warpipe.RejectedError):
            await client.request(b"x", metadata={"refuse": True})
        return found

    assert asyncio.run(run()) == [3 * number for number in range(100)]


def test_an_awaited_request_ends_at_its_deadline_and_when_its_client_closes(open_client):
    client = open_client()

    async def run():
        with pytest.raises(warpipe.DeadlinePassedError):
            await client.request(b"nobody is there", timeout=0.1)
        pending = client.request(b"nobody is there")

        async def wait():
            return await pending

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        client.close()
        with pytest.raises(warpipe.QueueClosedError):
            await asyncio.wait_for(waiting, LIMIT_SECONDS)

    asyncio.run(run())
    assert not warpipe._loop._hubs


def test_a_signal_ends_every_wait_of_a_service(open_client, server):
    client = open_client(timeout=None)
    for wait in (lambda: client.wait_for_servers(2, None), lambda: server.accept(None), lambda: next(server)):
        with pytest.raises(Interrupted), a_signal_soon():
            wait()
    pending = client.request(b"x")
    for wait in (pending.result, lambda: client.call(b"y")):
        with pytest.raises(Interrupted), a_signal_soon():
            wait()
    # The call was called off; the request stands.
    server.accept().complete(b"z")
    assert pending.result().tobytes() == b"z"


def test_a_client_is_no_queue(open_client):
    client = open_client()
    for use in (
        lambda: warpipe.Queue.drain(client),
        lambda: warpipe.Queue.shutdown(client, cancel_futures=True),
        lambda: next(warpipe.Queue.results(client)),
        lambda: warpipe.Queue.memory_in_use.fget(client),
    ):
        with pytest.raises(warpipe.ArgumentError, match="a client; allowed is a queue"):
            use()


def test_servers_of_other_processes_share_the_load(open_client, place):  # noqa: F811
    client = open_client()
    with process(serve, *place, 5) as (_one, first), process(serve, *place, 5) as (_two, second):
        assert [said(first), said(second)] == ["ready", "ready"]
        client.wait_for_servers(2, LIMIT_SECONDS)
        pending = [client.request(np.array([number])) for number in range(100)]
        replies = [request.result() for request in pending]
        assert [int(reply.numpy()[0]) for reply in replies] == [5 * number for number in range(100)]
        assert {reply.metadata["pid"] for reply in replies} == set(client.state.workers)


@kills
def test_a_request_of_a_killed_server_is_answered_by_another(open_client, place):  # noqa: F811
    import os

    client = open_client()
    with process(accept_and_hang, *place) as (victim, pipe):
        assert said(pipe) == "ready"
        client.wait_for_servers(1, LIMIT_SECONDS)
        pending = client.request(np.array([7]))
        assert said(pipe) == (os.getpid(), 1)
        with process(serve, *place, 5) as (survivor, other):
            assert said(other) == "ready"
            kill(victim)
            reply = pending.result()
            assert (reply.numpy().tolist(), reply.attempt, reply.worker_pid) == ([35], 2, survivor.pid)
