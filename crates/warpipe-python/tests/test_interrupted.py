"""Waits that are interrupted have taken nothing, and done nothing, whatever arrives at the same moment."""

import asyncio
import contextlib
import gc
import itertools
import os
import select
import signal
import subprocess
import sys
import threading
import time
import types
from itertools import chain, islice, repeat

import numpy as np
import pytest

import warpipe
from conftest import LIMIT_SECONDS, sleeps, state, stop, until
from peers import keep_everything, process, said
from test_processes import place  # noqa: F401
from warpipe import _loop

ROUNDS = 8
# Items that the interpreter skips in one step, which takes so long that other threads are due to have it.
EVERY_ONE_IS_DUE = 10_000_000


class Interrupted(Exception):
    pass


@pytest.fixture
def queue(open_queue):
    return open_queue()


@pytest.fixture
def worker(queue, open_worker):
    return open_worker()


@pytest.fixture
def service(open_client, domain, device):
    with warpipe.Server("embed", domain=domain, device=device, timeout=LIMIT_SECONDS) as server:
        yield open_client(), server


@contextlib.contextmanager
def a_handler_that_raises(number, first):
    def handler(signum, frame):
        first()
        if signum == signal.SIGINT:
            signal.default_int_handler(signum, frame)
        raise Interrupted

    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def is_asleep(thread):
    return state("self", thread) == "S"


def interrupted_by(wait, arrival, handler=lambda: None, by=signal.SIGUSR1, slices=0, ahead=lambda: None):
    """Runs ``wait`` on this thread; once ``ahead`` has returned and it sleeps, and has done so ``slices`` times, a signal
    comes, its ``handler`` runs and raises, and right behind it comes what it waits for."""
    begun, main, faults = threading.Event(), threading.get_native_id(), []

    def come():
        try:
            begun.wait(LIMIT_SECONDS)
            ahead()
            before = sleeps(main)
            until(lambda: is_asleep(main) and sleeps(main) >= before + slices, "the wait")
            os.kill(os.getpid(), by)
            arrival()
        except BaseException as fault:
            faults.append(fault)

    comer = threading.Thread(target=come)
    comer.start()
    try:
        with a_handler_that_raises(by, handler):
            try:
                begun.set()
                wait()
                # The signal is sent before anything can arrive.
                until(lambda: False, "the signal")
            except (Interrupted, KeyboardInterrupt):
                pass
    finally:
        comer.join(2 * LIMIT_SECONDS)
    assert not faults


def interrupted_elsewhere(places, wait):
    """What ``wait`` gives, and whether one of the interpreter's looks at signals raised: the first at none of the places
    yet. It looks where a function of Python begins, and behind each call of a native one. Those of the package count."""
    found, known = None, len(places)

    def look(frame, event, _native):
        place = event, frame.f_code, frame.f_lasti
        is_ours = frame.f_globals.get("__package__") == warpipe.__name__
        if is_ours and event in ("call", "c_return") and place not in places:
            places.add(place)
            sys.setprofile(None)
            raise Interrupted

    sys.setprofile(look)
    try:
        found = wait()
    except Interrupted:
        pass
    finally:
        sys.setprofile(None)
    return found, len(places) > known


def interrupted_behind(items, handler=lambda: None):
    """The next of the items, one that is there. Another thread gets the interpreter as soon as this one lets go of it,
    and sends a signal with a handler that raises: None if that comes first."""
    begun, found = [], None

    def keep_the_interpreter():
        while not begun:
            pass
        end = time.monotonic() + 0.005
        while time.monotonic() < end:
            pass
        os.kill(os.getpid(), signal.SIGUSR1)

    other, interval = threading.Thread(target=keep_the_interpreter), sys.getswitchinterval()
    sys.setswitchinterval(0.05)
    try:
        with a_handler_that_raises(signal.SIGUSR1, handler):
            other.start()
            try:
                begun.append(None)
                found = next(islice(chain(repeat(None, EVERY_ONE_IS_DUE), items), EVERY_ONE_IS_DUE, None))
                until(lambda: False, "the signal")
            except Interrupted:
                pass
    finally:
        sys.setswitchinterval(interval)
        other.join(LIMIT_SECONDS)
    return found


@pytest.mark.parametrize("follow", [False, True])
def test_a_result_that_was_taken_as_a_signal_came_is_the_next_one(queue, worker, follow):
    for number in range(ROUNDS):
        queue.submit(np.array([number]))
        worker.lease(LIMIT_SECONDS).complete(np.array([number]))
        until(lambda: queue.state.finished == 1, "the result")
        found = interrupted_behind(queue.results(LIMIT_SECONDS, follow=follow))
        # Also of another iterator, and for an event loop.
        results = queue.results(LIMIT_SECONDS, follow=follow)
        result = found or (asyncio.run(anext_of(results)) if number % 2 else next(results))
        assert result.numpy()[0] == number
        assert next(queue.results(LIMIT_SECONDS), None) is None


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_result_that_an_interrupt_kept_from_its_caller_ends_with_its_queue(domain, device, is_closed):
    before = device.bytes_held
    queue = warpipe.Queue("jobs", domain=domain, device=device)
    results = queue.results(LIMIT_SECONDS)
    with warpipe.Worker("jobs", domain=domain, device=device) as worker:
        queue.submit(np.array([1]))
        worker.lease(LIMIT_SECONDS).complete(np.array([1]))
    until(lambda: queue.state.finished == 1, "the result")
    found = interrupted_behind(results, queue.close if is_closed else lambda: None)
    kept = queue if is_closed else results
    del found, queue
    until(lambda: device.bytes_held == before, "the end of the result")
    assert kept


async def anext_of(results):
    return await anext(results)


def test_a_change_that_a_signal_comes_with_is_the_next_one(domain):
    with warpipe.Members.watch(domain) as members:
        for number in range(ROUNDS):
            with warpipe.Member.join(f"m{number}", domain=domain):
                until(lambda: select.select([members], [], [], 0)[0], "the change")
                found = interrupted_behind(members)
                if found is None:
                    assert select.select([members], [], [], 0)[0]
                change = found or members.changes(LIMIT_SECONDS)
                assert (change.what, change.member.name) == ("joined", f"m{number}")
            assert members.changes(LIMIT_SECONDS).what == "left"


def test_an_interrupted_receive_leaves_the_frame(link):
    publisher, subscriber = link
    waits = [lambda: subscriber.receive(LIMIT_SECONDS), lambda: next(subscriber)] * ROUNDS
    for number, wait in enumerate(waits):
        interrupted_by(wait, lambda number=number: publisher.send(np.array([number])))
        assert subscriber.receive(LIMIT_SECONDS).numpy()[0] == number


def first_of(items):
    for item in items:
        return item


# Each takes what is there.
TAKES = {
    "call": lambda items, names: getattr(items, names[0])(LIMIT_SECONDS),
    "try": lambda items, names: getattr(items, names[1])(),
    "iteration": lambda items, _: first_of(items),
    "await": lambda items, names: asyncio.run(awaited_of(items, names[2])),
    "async iteration": lambda items, _: asyncio.run(anext_of(items)),
}
everywhere = pytest.mark.parametrize("how", TAKES)


async def awaited_of(items, name):
    return await getattr(items, name)(LIMIT_SECONDS)


def interrupted_everywhere(how, items, names, make, again):
    """What was made, and what was taken then, each time with an interrupt at another place; until there is none."""
    places = set()
    for number in itertools.count():
        make(number)
        found, is_interrupted = interrupted_elsewhere(places, lambda: TAKES[how](items, names))
        yield number, found or again()
        if not is_interrupted:
            break


@everywhere
def test_a_frame_is_not_lost_wherever_an_interrupt_comes(link, how):
    publisher, subscriber = link
    names = ("receive", "try_receive", "receive_async")
    for number, frame in interrupted_everywhere(
        how, subscriber, names, lambda n: publisher.send(np.array([n])), subscriber.receive
    ):
        assert frame.numpy()[0] == number


@pytest.mark.parametrize("how", ["await", "async iteration"])
def test_a_frame_that_comes_behind_a_first_look_is_not_lost_wherever_an_interrupt_comes(link, how, monkeypatch):
    (publisher, subscriber), due = link, []

    def send():
        publisher.send(np.array([due.pop()]))
        until(lambda: select.select([subscriber], [], [], 0)[0], "the frame")

    class Doorbell(_loop._EndpointDoorbell):
        """A wait makes it once its first look has found nothing."""

        def __init__(self, endpoint):
            super().__init__(endpoint)
            if due:
                send()

    def again():
        # The interrupt may have come first.
        if due:
            send()
        return subscriber.receive(LIMIT_SECONDS)

    monkeypatch.setattr(_loop, "_EndpointDoorbell", Doorbell)
    names = ("receive", "try_receive", "receive_async")
    for number, frame in interrupted_everywhere(how, subscriber, names, due.append, again):
        assert frame.numpy()[0] == number


def test_a_loop_whose_wait_is_interrupted_anywhere_sleeps_on(link, monkeypatch):
    (publisher, subscriber), places, rung, ring = link, set(), [], _loop._Hub._ring

    def counted(hub):
        rung.append(hub)
        ring(hub)

    def polled():
        found = []
        for name in os.listdir("/proc/self/fd"):
            # The folder's own is closed by now.
            with contextlib.suppress(FileNotFoundError):
                found += ["eventpoll" in os.readlink(f"/proc/self/fd/{name}")]
        return sum(found)

    def receive():
        return loop.run_until_complete(subscriber.receive_async(LIMIT_SECONDS))

    monkeypatch.setattr(_loop._Hub, "_ring", counted)
    # What it makes once.
    subscriber.fileno()
    gc.collect()
    before = polled()
    loop, is_interrupted = asyncio.new_event_loop(), True
    loop.set_exception_handler(lambda *_: None)
    while is_interrupted:
        sends = threading.Timer(0.005, publisher.send, [b"x"])
        sends.start()
        found, is_interrupted = interrupted_elsewhere(places, receive)
        sends.join()
        if found is not None:
            publisher.send(b"x")
        # Something is there, and nobody waits for it.
        until(lambda: select.select([subscriber], [], [], 0)[0], "the frame")
        rung.clear()
        for _ in range(20):
            loop.run_until_complete(asyncio.sleep(0))
        assert len(rung) <= 2, places
        assert subscriber.receive(LIMIT_SECONDS)
    rung.clear()
    loop.close()
    del loop
    gc.collect()
    assert polled() == before


@everywhere
def test_a_job_is_not_lost_wherever_an_interrupt_comes(open_queue, open_worker, how):
    queue, worker, names = open_queue(max_attempts=1), open_worker(), ("lease", "try_lease", "lease_async")
    for number, lease in interrupted_everywhere(
        how, worker, names, lambda n: queue.submit(np.array([n])), worker.lease
    ):
        assert (lease.numpy()[0], lease.attempt) == (number, 1)
        lease.complete()


@everywhere
def test_a_request_is_not_lost_wherever_an_interrupt_comes(service, how):
    (client, server), pending, names = service, [], ("accept", "try_accept", "accept_async")
    make = lambda n: pending.append(client.request(np.array([n])))  # noqa: E731
    for number, request in interrupted_everywhere(how, server, names, make, server.accept):
        assert request.numpy()[0] == number
        request.complete()
        pending.pop().result()


@pytest.mark.parametrize("how", ["iteration", "async iteration"])
def test_a_result_is_not_lost_wherever_an_interrupt_comes(queue, worker, how):
    def make(number):
        queue.submit(np.array([number]))
        worker.lease(LIMIT_SECONDS).complete(np.array([number]))
        until(lambda: queue.state.finished == 1, "the result")

    results = queue.results(LIMIT_SECONDS)
    for number, result in interrupted_everywhere(how, results, (), make, results.__next__):
        assert result.numpy()[0] == number


@pytest.mark.parametrize("how", ["call", "iteration", "await", "async iteration"])
def test_a_change_is_not_lost_wherever_an_interrupt_comes(domain, how):
    joined, names = [], ("changes", None, "changes_async")
    with warpipe.Members.watch(domain) as members:
        make = lambda n: joined.append(warpipe.Member.join(f"m{n}", domain=domain))  # noqa: E731
        for number, change in interrupted_everywhere(how, members, names, make, members.changes):
            assert (change.what, change.member.name) == ("joined", f"m{number}")
            joined.pop().close()
            assert members.changes(LIMIT_SECONDS).what == "left"


def test_a_job_is_submitted_once_wherever_an_interrupt_comes(queue, worker):
    places = set()
    for number in itertools.count():
        handle, is_interrupted = interrupted_elsewhere(places, lambda n=number: queue.submit(np.array([n])))
        handle = handle or queue.submit(np.array([number]))
        with worker.lease(LIMIT_SECONDS) as lease:
            lease.complete()
        assert worker.try_lease() is None
        handle.result(LIMIT_SECONDS).release()
        if not is_interrupted:
            break


def test_frames_that_interrupted_waits_took_come_in_their_order(link):
    publisher, subscriber = link
    for number in range(ROUNDS):
        interrupted_by(lambda: subscriber.receive(LIMIT_SECONDS), lambda number=number: publisher.send(np.array([number])))
        publisher.send(np.array([100 + number]))
        assert [subscriber.receive(LIMIT_SECONDS).numpy()[0] for _ in range(2)] == [number, 100 + number]


def test_a_frame_that_an_interrupted_wait_took_is_there_for_pollers(link):
    publisher, subscriber = link
    for number in range(ROUNDS):
        interrupted_by(lambda: subscriber.receive(LIMIT_SECONDS), lambda number=number: publisher.send(np.array([number])))
        if number % 2:
            until(lambda: subscriber.try_receive() is not None, "the frame")
        else:
            assert asyncio.run(subscriber.receive_async(LIMIT_SECONDS)).numpy()[0] == number


def test_an_interrupted_result_stays_with_its_handle(queue, worker):
    for number in range(ROUNDS):
        handle = queue.submit(np.array([number]))
        lease = worker.lease(LIMIT_SECONDS)
        interrupted_by(lambda: handle.result(LIMIT_SECONDS), lambda lease=lease, n=number: lease.complete(np.array([n])))
        until(handle.done, "the result")
        assert queue.state.finished == 1
        assert handle.result(LIMIT_SECONDS).numpy()[0] == number
        assert queue.state.finished == 0


@pytest.mark.parametrize("order", ["submission", "completion"])
def test_an_interrupted_iteration_over_results_leaves_the_result(open_queue, open_worker, order):
    queue, worker = open_queue(order=order), open_worker()
    for number in range(ROUNDS):
        queue.submit(np.array([number]))
        lease = worker.lease(LIMIT_SECONDS)
        results = queue.results(LIMIT_SECONDS)
        interrupted_by(lambda: next(results), lambda lease=lease, n=number: lease.complete(np.array([n])))
        assert next(results).numpy()[0] == number
        assert next(results, None) is None


def test_an_interrupted_result_is_there_for_an_event_loop(queue, worker):
    async def outcome(handle):
        return (await asyncio.wait_for(outcome_of(handle), LIMIT_SECONDS)).numpy()[0]

    async def outcome_of(handle):
        return await handle

    for number in range(ROUNDS):
        handle = queue.submit(np.array([number]))
        lease = worker.lease(LIMIT_SECONDS)
        interrupted_by(lambda: handle.result(LIMIT_SECONDS), lambda lease=lease, n=number: lease.complete(np.array([n])))
        assert asyncio.run(outcome(handle)) == number


def test_an_interrupted_reply_stays_with_its_request(service):
    client, server = service
    for number in range(ROUNDS):
        pending = client.request(np.array([number]), timeout=LIMIT_SECONDS)
        request = server.accept(LIMIT_SECONDS)
        interrupted_by(pending.result, lambda request=request, n=number: request.complete(np.array([n])))
        assert pending.result().numpy()[0] == number


def test_an_interrupted_lease_leaves_the_job_at_no_cost(open_queue, open_worker):
    queue, worker = open_queue(max_attempts=1), open_worker()
    waits = [lambda: worker.lease(LIMIT_SECONDS), lambda: next(worker)] * ROUNDS
    for number, wait in enumerate(waits):
        interrupted_by(wait, lambda number=number: queue.submit(np.array([number])))
        with worker.lease(LIMIT_SECONDS) as lease:
            assert lease.numpy()[0] == number
            assert lease.attempt == 1
            lease.complete()
        next(queue.results(LIMIT_SECONDS)).release()


def test_a_job_that_comes_after_the_interrupt_goes_to_the_next_worker(open_queue, domain, device):
    queue = open_queue(max_attempts=1)

    def open_worker():
        return warpipe.Worker("jobs", domain=domain, device=device)

    for end in ("close", "drop"):
        worker, handles = open_worker(), []
        interrupted_by(lambda: worker.lease(LIMIT_SECONDS), lambda: handles.append(queue.submit(b"later")))
        if end == "close":
            worker.close()
        del worker
        with open_worker() as other, other.lease(LIMIT_SECONDS) as lease:
            lease.complete(b"done")
        assert handles[0].result(LIMIT_SECONDS).tobytes() == b"done"


def test_what_a_wait_took_that_was_closed_by_its_interrupt_is_let_go(open_queue, open_worker, open_client, domain, device):
    on, held = {"domain": domain, "device": device}, []
    for _ in range(ROUNDS):
        before = device.bytes_held
        publisher, subscriber = warpipe.Publisher("a", **on), warpipe.Subscriber("a", **on)
        interrupted_by(lambda: subscriber.receive(LIMIT_SECONDS), lambda: publisher.send(b"x"), subscriber.close)
        publisher.close()
        until(lambda: device.bytes_held <= before, "the memory of the frame")
        held.append(subscriber)
    queue, client = open_queue(max_attempts=1), open_client()
    for _ in range(ROUNDS):
        handles = []
        worker = open_worker()
        interrupted_by(lambda: worker.lease(LIMIT_SECONDS), lambda: handles.append(queue.submit(b"x")), worker.close)
        with warpipe.Worker("jobs", **on) as other, other.lease(LIMIT_SECONDS) as lease:
            lease.complete()
        handles[0].result(LIMIT_SECONDS).release()
        pending, server = [], warpipe.Server("embed", **on)
        interrupted_by(lambda: server.accept(LIMIT_SECONDS), lambda: pending.append(client.request(b"x")), server.close)
        with warpipe.Server("embed", **on) as other, other.accept(LIMIT_SECONDS) as request:
            request.complete()
        pending[0].result().release()
        held.extend((worker, server))


def test_an_interrupted_accept_leaves_the_request(service):
    client, server = service
    waits = [lambda: server.accept(LIMIT_SECONDS), lambda: next(server)] * ROUNDS
    for number, wait in enumerate(waits):
        pending = []
        interrupted_by(wait, lambda n=number: pending.append(client.request(np.array([n]), timeout=LIMIT_SECONDS)))
        with server.accept(LIMIT_SECONDS) as request:
            assert request.numpy()[0] == number
            request.complete()
        pending[0].result()


def test_an_interrupted_wait_for_changes_leaves_the_change(domain):
    with warpipe.Members.watch(domain) as members:
        waits = [lambda: members.changes(LIMIT_SECONDS), lambda: next(members)] * ROUNDS
        for number, wait in enumerate(waits):
            joined = []
            interrupted_by(wait, lambda n=number: joined.append(warpipe.Member.join(f"m{n}", domain=domain)))
            change = members.changes(LIMIT_SECONDS)
            assert (change.what, change.member.name) == ("joined", f"m{number}")
            joined.pop().close()
            assert members.changes(LIMIT_SECONDS).what == "left"


def patience(seconds):
    """Also as long as it takes."""
    return pytest.mark.parametrize("patience", [seconds, None], ids=["a while", "as long as it takes"])


by_any_handler = pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGUSR1], ids=["Ctrl-C", "another signal"])
# Longer than any slice of a wait.
long_or_not = pytest.mark.parametrize("slices", [0, 12], ids=["soon", "late"])


@by_any_handler
@long_or_not
@patience(LIMIT_SECONDS)
def test_an_interrupted_send_has_sent_nothing(open_publisher, open_subscriber, by, slices, patience):
    publisher, subscriber = open_publisher(depth=1, timeout=patience), open_subscriber()

    def in_place():
        with publisher.loan(11, "uint8") as out:
            out.copy_from(b"interrupted")

    for number in range(ROUNDS // 4 if slices else ROUNDS):
        publisher.send(b"fills")
        held = subscriber.receive()
        send = in_place if number % 2 else lambda: publisher.send(b"interrupted")
        interrupted_by(send, held.release, by=by, slices=slices)
        assert publisher.send(b"next") == 2 * number + 2
        assert subscriber.receive(LIMIT_SECONDS).tobytes() == b"next"


@by_any_handler
@long_or_not
@patience(LIMIT_SECONDS)
def test_an_interrupted_submit_has_submitted_nothing(open_queue, open_worker, by, slices, patience):
    queue, worker = open_queue(limit=1, submit_timeout=patience), open_worker()
    for _ in range(ROUNDS // 4 if slices else ROUNDS):
        done = queue.submit(b"fills")
        with worker.lease(LIMIT_SECONDS) as lease:
            lease.complete()
        until(done.done, "the result")
        taken = lambda done=done: done.result(LIMIT_SECONDS).release()  # noqa: E731
        interrupted_by(lambda: queue.submit(b"interrupted"), taken, by=by, slices=slices)
        handle = queue.submit(b"next")
        with worker.lease(LIMIT_SECONDS) as lease:
            assert lease.tobytes() == b"next"
            lease.complete()
        handle.result(LIMIT_SECONDS).release()


@by_any_handler
@long_or_not
def test_an_interrupted_request_has_asked_nobody(open_client, domain, device, by, slices):
    client = open_client(limit=1)
    with warpipe.Server("embed", domain=domain, device=device) as server:
        for call in (client.request, client.call):
            first = client.request(b"fills", timeout=2 * LIMIT_SECONDS)
            interrupted_by(lambda call=call: call(b"interrupted"), first.cancel, by=by, slices=slices)
            pending = client.request(b"next")
            with server.accept(LIMIT_SECONDS) as request:
                if request.tobytes() == b"fills":
                    # It was called off only when the server had it.
                    request.complete()
                    request = server.accept(LIMIT_SECONDS)
                assert request.tobytes() == b"next"
                request.complete()
            pending.result().release()


@by_any_handler
def test_an_interrupted_call_calls_its_request_off(open_client, domain, device, by):
    client = open_client()
    with warpipe.Server("embed", domain=domain, device=device) as server:
        accepted = []

        def asked():
            accepted.append(server.accept(LIMIT_SECONDS))

        late = lambda: accepted[-1].complete(b"too late")  # noqa: E731
        interrupted_by(lambda: client.call(b"interrupted"), late, by=by, ahead=asked)
        state = client.state
        assert state.waiting + state.finished == 0
        pending = client.request(b"next")
        with server.accept(LIMIT_SECONDS) as request:
            assert request.tobytes() == b"next"
            request.complete(b"reply")
        assert pending.result().tobytes() == b"reply"


@by_any_handler
@long_or_not
def test_an_interrupted_wait_for_a_permit_has_taken_none(domain, device, by, slices):
    both = {"domain": domain, "device": device}
    with warpipe.Semaphore.create("turns", **both) as semaphore:
        for stream in (None, warpipe.Stream(device)):
            permit = semaphore.acquire()
            interrupted_by(lambda s=stream: semaphore.acquire(LIMIT_SECONDS, stream=s), permit.release, by=by, slices=slices)
            semaphore.acquire(LIMIT_SECONDS, stream=stream).release()
        with semaphore.acquire(LIMIT_SECONDS):
            pass


# Opens what another process makes, and what makes it.
OPENED = {
    "subscriber": (lambda on: warpipe.Subscriber("made", wait=LIMIT_SECONDS, **on), lambda on: warpipe.Publisher("made", **on)),
    "worker": (lambda on: warpipe.Worker("made", wait=LIMIT_SECONDS, **on), lambda on: warpipe.Queue("made", **on)),
    "timeline": (
        lambda on: warpipe.Timeline.open("made", wait=LIMIT_SECONDS, **on),
        lambda on: warpipe.Timeline.create("made", **on),
    ),
    "semaphore": (
        lambda on: warpipe.Semaphore.open("made", wait=LIMIT_SECONDS, **on),
        lambda on: warpipe.Semaphore.create("made", **on),
    ),
    "pool": (
        lambda on: warpipe.PoolClient.open("made", wait=LIMIT_SECONDS, **on),
        lambda on: warpipe.Pool.create("made", **on),
    ),
}


@by_any_handler
@pytest.mark.parametrize("what", OPENED)
def test_an_open_that_succeeds_as_a_signal_comes_raises_what_its_handler_raises(domain, device, what, by):
    on, (opens, makes) = {"domain": domain, "device": device}, OPENED[what]
    for _ in range(ROUNDS):
        made = []
        interrupted_by(lambda: opens(on), lambda made=made: made.append(makes(on)), by=by)
        made[0].close()


def test_a_call_that_fails_when_an_interrupt_has_ended_its_wait_says_nothing(domain, monkeypatch):
    told, begun, interrupted = [], threading.Event(), threading.Event()

    def fail(*_given):
        begun.set()
        interrupted.wait(LIMIT_SECONDS)
        raise warpipe.NameTakenError("taken")

    monkeypatch.setattr(warpipe._warpipe, "_keep_weights", fail)
    monkeypatch.setattr(threading, "excepthook", told.append)
    interrupted_by(lambda: warpipe.weights.keep("llama", domain=domain), lambda: None, ahead=begun.wait)
    interrupted.set()
    until(lambda: "warpipe-asks" not in [thread.name for thread in threading.enumerate()], "the end of the call")
    assert not told


@by_any_handler
@long_or_not
def test_an_interrupted_wait_for_memory_has_taken_none(open_publisher, domain, device, by, slices):
    publisher = open_publisher(memory_limit=2 << 20, loan_timeout=LIMIT_SECONDS)
    with warpipe.Pool.create("scratch", memory_limit=2 << 20, domain=domain, device=device) as pool:
        for take in (lambda: publisher.loan(3 << 19, "uint8"), lambda: pool.allocate(3 << 19, timeout=LIMIT_SECONDS)):
            for _ in range(2):
                held = take()
                let_go = getattr(held, "discard", None) or held.release
                interrupted_by(take, let_go, by=by, slices=slices)
            last = take()
            (getattr(last, "discard", None) or last.release)()


@by_any_handler
@long_or_not
@pytest.mark.parametrize("answer_timeout", [LIMIT_SECONDS, None], ids=["a while", "as long as it takes"])
def test_an_interrupted_answer_can_be_given_again(open_queue, open_worker, by, slices, answer_timeout):
    queue, worker = open_queue(max_attempts=1), open_worker(memory_limit=2 << 20, answer_timeout=answer_timeout)
    large = np.zeros(3 << 19, np.uint8)
    for _ in range(ROUNDS // 4 if slices else ROUNDS):
        handles = [queue.submit(b"x") for _ in range(2)]
        worker.lease(LIMIT_SECONDS).complete(large)
        held, lease = handles[0].result(LIMIT_SECONDS), worker.lease(LIMIT_SECONDS)
        interrupted_by(lambda lease=lease: lease.complete(large), held.release, by=by, slices=slices)
        assert not lease.is_answered and not handles[1].done()
        lease.complete(b"again")
        with handles[1].result(LIMIT_SECONDS) as result:
            assert (result.tobytes(), result.attempt) == (b"again", 1)


def test_a_cancelled_await_leaves_what_has_come(link, queue, worker):
    """Cancelled between the ring and the look."""
    publisher, subscriber = link

    async def cancelled(awaited, arrival):
        async def wait():
            return await awaited

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        arrival()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return task

    async def run():
        for number in range(ROUNDS):
            task = await cancelled(subscriber.receive_async(), lambda n=number: publisher.send(np.array([n])))
            assert task.cancelled()
            assert (await subscriber.receive_async(LIMIT_SECONDS)).numpy()[0] == number
            handle = queue.submit(np.array([number]))
            lease = worker.lease(LIMIT_SECONDS)
            task = await cancelled(handle, lambda n=number, lease=lease: lease.complete(np.array([n])))
            assert task.cancelled()
            assert (await handle).numpy()[0] == number

    asyncio.run(asyncio.wait_for(run(), LIMIT_SECONDS))


CTRL_C = """
import os, signal, sys, threading
import warpipe
domain, device = sys.argv[1:]
queue = warpipe.Queue("jobs", domain=domain, device=device, max_attempts=1)
worker = warpipe.Worker("jobs", domain=domain, device=device)
main = threading.get_native_id()

def come():
    while open(f"/proc/self/task/{main}/stat").read().rpartition(")")[2].split()[0] != "S":
        pass
    os.kill(os.getpid(), signal.SIGINT)
    handles.append(queue.submit(b"late"))

handles = []
comer = threading.Thread(target=come)
try:
    comer.start()
    for lease in worker:
        sys.exit("no KeyboardInterrupt")
except KeyboardInterrupt:
    comer.join()
del worker
with warpipe.Worker("jobs", domain=domain, device=device) as other, other.lease(30) as lease:
    lease.complete(b"done")
print(handles[0].result(30).tobytes())
"""


def test_ctrl_c_in_a_worker_buries_no_job(tmp_path, device):
    command = [sys.executable, "-c", CTRL_C, str(tmp_path / "domain"), "host" if device.kind == "host" else "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * LIMIT_SECONDS)
    assert (done.returncode, done.stdout) == (0, "b'done'\n"), done.stderr


# What asks a process that is stopped, by what the peers are called or named.
ASKS = {
    "subscriber": lambda on, _: warpipe.Subscriber("publisher", handshake_timeout=3600.0, **on),
    "worker": lambda on, _: warpipe.Worker("queue", handshake_timeout=3600.0, **on),
    "timeline": lambda on, _: warpipe.Timeline.open("timeline", **on),
    "semaphore": lambda on, _: warpipe.Semaphore.open("semaphore", **on),
    "pool": lambda on, _: warpipe.PoolClient.open("pool", **on),
    "block": lambda _, known: known.pool.allocate(64),
    "event": lambda on, known: warpipe.Event.open(known.event, **on),
    "recording": lambda on, known: known.opened.record(stream=known.stream),
    "memory": lambda on, known: warpipe.Ticket(known.memory).open(device=on["device"]),
    "lent block": lambda on, known: warpipe.LentBuffer.open(known.block, device=on["device"]),
    "members": lambda on, _: warpipe.Members.watch(on["domain"]),
}
SIGNALS = 3


@pytest.mark.parametrize("ask", ASKS)
def test_a_wait_for_a_process_that_is_stopped_sees_every_signal(domain, device, place, ask):  # noqa: F811
    """Only the last one's handler raises: a call that saw none of them before it gave up would say so."""
    handled, begun, over, on = [], threading.Event(), threading.Event(), {"domain": domain, "device": device}
    main = threading.get_native_id()

    def handler(_number, _frame):
        handled.append(_number)
        if len(handled) == SIGNALS:
            raise Interrupted

    def send():
        begun.wait(LIMIT_SECONDS)
        for number in range(SIGNALS):
            until(lambda: is_asleep(main) or over.is_set(), "the wait")
            os.kill(os.getpid(), signal.SIGUSR1)
            until(lambda number=number: len(handled) > number or over.is_set(), "the handler")

    with process(keep_everything, *place) as (child, pipe):
        known = types.SimpleNamespace(**dict(zip(("event", "memory", "block"), said(pipe))))
        # One that is watched by nobody, so that nothing else of this process asks it.
        known.pool, known.opened = warpipe.PoolClient.open("pool", **on), warpipe.Event.open(known.event, **on)
        known.stream = warpipe.Stream(device)
        if ask not in ("block", "lent block"):
            known.pool.close()
        if ask != "recording":
            known.opened.close()
        stop(child)
        before = signal.signal(signal.SIGUSR1, handler)
        sender = threading.Thread(target=send)
        try:
            sender.start()
            with pytest.raises(Interrupted):
                begun.set()
                ASKS[ask](on, known)
        finally:
            over.set()
            sender.join(LIMIT_SECONDS)
            signal.signal(signal.SIGUSR1, before)
            os.kill(child.pid, signal.SIGCONT)
