"""Any object in the hands of many threads at once: each step happens once, and nobody gets anything but warpipe's errors.

Threads are switched as often as the interpreter can; on one without a lock of its own they run at the same time.
"""

import contextlib
import sys
import sysconfig
import threading

import numpy as np
import pytest
from conftest import LIMIT_SECONDS, sleeps, state, until

import warpipe

THREADS = 8


@pytest.fixture(autouse=True)
def often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(work):
    """Does ``work(index)`` in all threads, begun together. Returns what came of it: results, and warpipe's errors."""
    begin, results, errors, others = threading.Barrier(THREADS), [], [], []

    def run(index):
        begin.wait(LIMIT_SECONDS)
        try:
            results.append(work(index))
        except warpipe.Error as error:
            errors.append(error)
        except BaseException as error:  # noqa: BLE001
            others.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    assert others == [] and len(results) + len(errors) == THREADS
    return results, errors


def test_a_loan_is_sent_once(link):
    publisher, subscriber = link
    for _ in range(30):
        loan = publisher.loan((4,), "int32")
        sent, refused = at_once(lambda _index, loan=loan: loan.send())
        assert len(sent) == 1 and {type(error) for error in refused} == {warpipe.ReleasedError}
        subscriber.receive().release()


def test_a_frame_is_read_by_many_while_one_releases_it(link, device):
    publisher, subscriber = link

    def use(index, frame):
        if index == 0:
            return frame.release()
        return frame.tobytes() if index % 2 else bytes(frame.numpy().data)

    for number in range(30):
        publisher.send(np.full(64, number, np.uint8))
        frame = subscriber.receive()
        read, late = at_once(lambda index, frame=frame: use(index, frame))
        assert {each for each in read if each is not None} <= {bytes([number]) * 64}
        assert {type(error) for error in late} <= {warpipe.ReleasedError}


@pytest.mark.parametrize("kind", ["subscriber", "worker", "server"])
def test_a_try_does_not_wait_for_a_thread_that_waits(link, domain, device, kind):
    found, sent = [], []
    with warpipe.Queue("jobs", domain=domain, device=device, prefetch=8) as queue, contextlib.ExitStack() as open_ends:
        if kind == "subscriber":
            end = link[1]
            wait, attempt, come = end.receive, end.try_receive, lambda: link[0].send(b"x")
        elif kind == "worker":
            end = open_ends.enter_context(warpipe.Worker("jobs", domain=domain, device=device))
            wait, attempt, come = end.lease, end.try_lease, lambda: queue.submit(b"x")
        else:
            end = open_ends.enter_context(warpipe.Server("embed", domain=domain, device=device))
            client = open_ends.enter_context(warpipe.Client("embed", domain=domain, device=device, prefetch=8))
            wait, attempt, come = end.accept, end.try_accept, lambda: sent.append(client.request(b"x"))
        waiting = threading.Thread(target=lambda: found.append(wait(LIMIT_SECONDS)))
        waiting.start()

        def asleep():
            return state("self", waiting.native_id) == "S" and sleeps(waiting.native_id)

        def returns_during_one_sleep():
            # A thread that waits has the endpoint for the whole of each sleep.
            before = asleep()
            return before and attempt() is None and asleep() == before

        until(returns_during_one_sleep, "a try in the middle of a wait")
        come()
        waiting.join(LIMIT_SECONDS)
        assert len(found) == 1


def test_a_lease_is_answered_once(domain, device):
    with warpipe.Queue("jobs", domain=domain, device=device) as queue:
        with warpipe.Worker("jobs", domain=domain, device=device) as worker:
            for _ in range(20):
                handle = queue.submit(b"x")
                lease = worker.lease(LIMIT_SECONDS)
                said, refused = at_once(lambda index, lease=lease: lease.complete(np.array([index])))
                assert len(said) == 1 and {type(error) for error in refused} == {warpipe.ReleasedError}
                assert handle.result(LIMIT_SECONDS).attempt == 1


def test_all_threads_get_the_same_outcome(domain, device):
    with warpipe.Client("a", domain=domain, device=device) as client:
        with warpipe.Server("a", domain=domain, device=device) as server:
            for _ in range(20):
                pending = client.request(b"x")
                server.accept(LIMIT_SECONDS).complete()
                given, refused = at_once(lambda _index, pending=pending: pending.result())
                assert not refused and len({id(reply) for reply in given}) == 1


def test_many_threads_close_one_endpoint(domain, device):
    makers = [
        lambda: warpipe.Publisher("a", domain=domain, device=device),
        lambda: warpipe.Queue("b", domain=domain, device=device),
        lambda: warpipe.Server("c", domain=domain, device=device),
        lambda: warpipe.Pool.create("d", domain=domain, device=device),
        lambda: warpipe.Timeline.create("e", domain=domain, device=device),
        lambda: warpipe.Members.watch(domain),
    ]
    for make in makers:
        made = make()
        closed, errors = at_once(lambda _index, made=made: made.close())
        assert len(closed) == THREADS and errors == [] and made.closed


class Capsules:
    """A tensor that gives everybody the same capsule."""

    def __init__(self, array):
        self._array, self._capsule = array, array.__dlpack__()

    def __dlpack__(self, **_asked):
        return self._capsule

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def test_a_capsule_is_taken_by_one(link):
    publisher, subscriber = link
    for number in range(30):
        same = Capsules(np.full(8, number, np.int64))
        sent, refused = at_once(lambda _index, same=same: publisher.send(same))
        assert len(sent) == 1 and {type(error) for error in refused} == {warpipe.ExportError}
        assert subscriber.receive().numpy().tolist() == [number] * 8


def test_one_view_is_written_copied_and_read_by_many(device):
    memory = warpipe.Memory.allocate(4096, device=device)
    view = memory.view((512,), "float64")

    def use(index):
        for _ in range(20):
            if index % 2:
                view.copy_from(np.ones(512))
            else:
                view.write(np.ones(512).tobytes())
            view.numpy().sum()
            memory.view((8,), "int64", 8 * index).tobytes()
        return float(view.numpy().sum())

    written, errors = at_once(use)
    assert errors == [] and written == [512.0] * THREADS


def test_many_threads_name_element_types(link):
    publisher, _subscriber = link
    names = [np.float32, np.dtype("int16"), "uint8", float, np.complex64, bool, np.dtype("f8"), np.uint32]
    wanted = ["float32", "int16", "uint8", "float64", "complex64", "bool", "float64", "uint32"]

    def use(index):
        found = []
        for turn in range(50):
            with publisher.loan((1,), names[(index + turn) % len(names)]) as loan:
                found.append(loan.dtype == wanted[(index + turn) % len(names)])
                loan.discard()
        return all(found)

    assert at_once(use) == ([True] * THREADS, [])


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this interpreter has a lock of its own")
def test_importing_leaves_a_free_threaded_interpreter_free():
    assert not sys._is_gil_enabled()
