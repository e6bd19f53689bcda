"""Jobs and requests as ``concurrent.futures.Future`` has them: outcomes, callbacks, cancellation."""

import asyncio
import concurrent.futures
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
from conftest import LIMIT_SECONDS, until

import warpipe


@pytest.fixture
def pair(open_queue, open_worker):
    """A queue and its worker in this process."""
    return open_queue(max_attempts=1), open_worker()


def callback_threads():
    return [thread for thread in threading.enumerate() if thread.name == "warpipe-callbacks"]


def test_a_result_is_the_same_object_each_time(pair):
    queue, worker = pair
    handle = queue.submit(b"x")
    assert not handle.done() and not handle.cancelled()
    with pytest.raises(TimeoutError):
        handle.exception(timeout=0.01)
    worker.lease().complete(np.arange(3))
    assert handle.exception(timeout=LIMIT_SECONDS) is None
    result = handle.result()
    assert result is handle.result(0) and result.numpy().tolist() == [0, 1, 2]
    assert handle.done() and not handle.cancelled() and not handle.cancel()


def test_a_failure_is_the_same_exception_each_time(pair):
    queue, worker = pair
    handle = queue.submit(b"x")
    worker.lease().fail("tired")
    error = handle.exception(LIMIT_SECONDS)
    assert isinstance(error, warpipe.DeadLetteredError) and handle.exception() is error
    with pytest.raises(warpipe.DeadLetteredError, match="tired"):
        handle.result()


def test_a_handle_that_took_a_failure_leaves_no_cycle_behind(pair):
    queue, worker = pair

    def fails():
        handle = queue.submit(b"x")
        worker.lease().fail("tired")
        try:
            handle.result(LIMIT_SECONDS)
        except warpipe.DeadLetteredError:
            pass
        return weakref.ref(handle)

    left = fails()
    gc.collect()
    assert left() is None


def test_a_failure_that_was_raised_does_not_keep_its_handle(pair):
    queue, worker = pair
    handles = [queue.submit(b"x")]
    left = weakref.ref(handles[0])
    worker.lease().fail("tired")
    try:
        handles.pop().result(LIMIT_SECONDS)
    except warpipe.DeadLetteredError:
        pass
    assert left() is None


def test_callbacks_run_in_their_order_and_one_that_raises_is_logged_and_stops_no_other(pair, caplog):
    queue, worker = pair
    handle, seen, done = queue.submit(b"x"), [], threading.Event()

    def fails(future):
        seen.append("fails")
        raise ValueError("cannot digest this")

    handle.add_done_callback(lambda future: seen.append(future is handle))
    handle.add_done_callback(fails)
    handle.add_done_callback(lambda future: seen.append(future.result().job))
    handle.add_done_callback(lambda _: (seen.append(threading.current_thread().name), done.set()))
    assert seen == []
    worker.lease().complete()
    assert done.wait(LIMIT_SECONDS)
    assert seen == [True, "fails", 1, "warpipe-callbacks"]
    assert "cannot digest this" in caplog.text and caplog.records[0].name == "warpipe"
    handle.add_done_callback(lambda _: seen.append(threading.current_thread() is threading.main_thread()))
    assert seen[4:] == [True], "one that comes late runs at once, here"
    # The record has the traceback, and that the handle.
    caplog.clear()


def test_all_futures_share_one_thread_which_ends_with_the_last(pair):
    queue, worker = pair
    count, all_done = 50, threading.Semaphore(0)
    for number in range(count):
        # Kept until its callback has run.
        queue.submit(bytes([number])).add_done_callback(lambda _: all_done.release())
    assert len(callback_threads()) == 1
    for _ in range(count):
        worker.lease().complete()
    for _ in range(count):
        assert all_done.acquire(timeout=LIMIT_SECONDS)
    until(lambda: callback_threads() == [], "the end of the thread")
    handle, done = queue.submit(b"again"), threading.Event()
    handle.add_done_callback(lambda _: done.set())
    worker.lease().complete()
    assert done.wait(LIMIT_SECONDS)


def test_a_job_that_is_cancelled_says_so_everywhere(pair):
    queue, worker = pair
    handle, seen = queue.submit(b"x"), []
    handle.add_done_callback(lambda future: seen.append(future.cancelled()))
    assert handle.cancel() is True and handle.cancel() is True
    assert handle.cancelled() and handle.done()
    # The thread of callbacks may have been faster, and be about to say so.
    until(lambda: seen, "the callback")
    assert seen == [True]
    for ask in (handle.result, handle.exception):
        with pytest.raises(concurrent.futures.CancelledError):
            ask()

    async def awaits():
        await handle

    with pytest.raises(concurrent.futures.CancelledError):
        asyncio.run(awaits())


def test_a_handle_that_another_thread_cancels_is_cancelled_as_soon_as_it_is_done(pair):
    queue, _ = pair
    handles, wrong, is_over = [queue.submit(b"x")], [], threading.Event()

    def asks():
        while not is_over.is_set():
            handle = handles[-1]
            if handle.done() and not handle.cancelled():
                wrong.append(handle)

    thread = threading.Thread(target=asks)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        for _ in range(5000):
            handles.append(queue.submit(b"x"))
            assert handles[-1].cancel()
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not wrong


def test_a_shutdown_that_cancels_marks_the_handles(open_queue):
    queue = open_queue()
    handle, done = queue.submit(b"x"), threading.Event()
    handle.add_done_callback(lambda _: done.set())
    queue.shutdown(cancel_futures=True, timeout=LIMIT_SECONDS)
    assert done.wait(LIMIT_SECONDS) and handle.cancelled() and handle.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        handle.result()


def test_the_end_of_a_queue_is_the_outcome_of_its_jobs(pair):
    queue, _ = pair
    handle, done = queue.submit(b"x"), threading.Event()
    handle.add_done_callback(lambda _: done.set())
    queue.close()
    assert done.wait(LIMIT_SECONDS) and handle.done() and not handle.cancel()
    assert isinstance(handle.exception(), warpipe.QueueClosedError)


def test_a_handle_that_is_dropped_leaves_its_outcome_to_the_queue(pair):
    queue, worker = pair
    handle = queue.submit(b"x")
    worker.lease().complete()
    until(handle.done, "the outcome")
    del handle
    assert next(queue.results(LIMIT_SECONDS)).job == 1


def test_a_request_is_a_future_whose_deadline_is_an_outcome(open_client, domain, device):
    client = open_client()
    late, done = client.request(b"x", timeout=0.05), threading.Event()
    late.add_done_callback(lambda _: done.set())
    assert done.wait(LIMIT_SECONDS) and isinstance(late.exception(), warpipe.DeadlinePassedError)
    with warpipe.Server("embed", domain=domain, device=device, timeout=LIMIT_SECONDS) as server:
        pending = client.request(np.arange(2))
        with pytest.raises(warpipe.TimeoutError):
            pending.result(timeout=0.01)
        server.accept().complete(np.arange(2))
        assert pending.result(LIMIT_SECONDS).numpy().tolist() == [0, 1]
        assert not pending.cancel() and not pending.cancelled()
        cancelled = client.request(b"x")
        assert cancelled.cancel() and cancelled.cancelled() and cancelled.deadline_ns > 0


def test_a_forked_child_has_callbacks_of_its_own_and_none_of_its_parents(pair):
    queue, worker = pair
    handle, seen = queue.submit(b"x"), []
    handle.add_done_callback(seen.append)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            from warpipe import _futures

            handle_refused = 0
            try:
                handle.add_done_callback(print)
            except warpipe.ForkedError:
                handle_refused = 1
            code = 0 if handle_refused and not _futures._callbacks._waiting else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    worker.lease().complete()
    until(lambda: seen == [handle], "the callback")
    seen.clear()


def test_a_callback_that_ends_its_thread_ends_no_other_callback(pair, caplog):
    queue, worker = pair
    first, second, seen, done = queue.submit(b"x"), queue.submit(b"y"), [], threading.Event()
    first.add_done_callback(lambda _: sys.exit(3))
    first.add_done_callback(seen.append)
    second.add_done_callback(lambda _: done.set())
    worker.lease().complete()
    until(lambda: len(seen) == 1, "the callback after it")
    worker.lease().complete()
    assert done.wait(LIMIT_SECONDS)
    assert "SystemExit: 3" in caplog.text
    caplog.clear()


def test_a_callback_that_ctrl_c_ends_on_its_caller_leaves_the_others_to_the_thread(pair):
    queue, worker = pair
    first, handle, seen = queue.submit(b"x"), queue.submit(b"y"), []
    busy, free = threading.Event(), threading.Event()
    first.add_done_callback(lambda _: (busy.set(), free.wait(LIMIT_SECONDS)))
    worker.lease().complete()
    assert busy.wait(LIMIT_SECONDS), "the thread of callbacks is held up: the caller runs the next ones"

    def interrupted(_):
        raise KeyboardInterrupt

    handle.add_done_callback(interrupted)
    handle.add_done_callback(lambda _: seen.append(threading.current_thread().name))
    with pytest.raises(KeyboardInterrupt):
        handle.cancel()
    free.set()
    until(lambda: seen == ["warpipe-callbacks"], "the callback after it")


def test_a_callback_is_not_kept_when_its_thread_cannot_start_and_the_next_starts_one(pair, monkeypatch):
    queue, worker = pair
    handle, seen, done = queue.submit(b"x"), [], threading.Event()
    until(lambda: callback_threads() == [], "the end of another test's thread")

    def refused(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError):
            handle.add_done_callback(seen.append)
    handle.add_done_callback(lambda _: done.set())
    worker.lease().complete()
    assert done.wait(LIMIT_SECONDS) and seen == []


def test_a_wait_for_futures_that_could_not_begin_can_begin_anew(pair, monkeypatch):
    queue, worker = pair
    handle = queue.submit(b"x")
    until(lambda: callback_threads() == [], "the end of another test's thread")

    def fails(_thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fails)
        with pytest.raises(RuntimeError):
            concurrent.futures.wait([handle])
    worker.lease().complete()
    assert concurrent.futures.wait([handle], LIMIT_SECONDS).done == {handle}


@pytest.fixture
def interrupts():
    """Makes a signal come soon. Its handler does something and raises."""
    before = signal.getsignal(signal.SIGALRM)

    def soon(work):
        def handler(*_):
            work()
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.05)

    yield soon
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("ask", ["result", "exception"])
def test_an_interrupt_that_comes_with_the_outcome_is_raised_and_not_the_outcome(pair, interrupts, ask):
    queue, worker = pair
    handle = queue.submit(b"x")

    def completes():
        worker.lease().complete()
        until(handle.done, "the outcome")

    interrupts(completes)
    with pytest.raises(KeyboardInterrupt):
        getattr(handle, ask)(LIMIT_SECONDS)
    assert handle.exception(LIMIT_SECONDS) is None


def test_an_event_loop_does_not_wait_for_a_thread_that_waits_for_the_same_outcome(pair):
    queue, worker = pair
    handle, threads = queue.submit(b"x"), []
    for _ in range(3):
        threads.append(threading.Thread(target=handle.result, args=(LIMIT_SECONDS,)))
        threads[-1].start()

    async def awaits():
        waits = [asyncio.create_task(handle) for _ in range(3)]
        looks = []
        for _ in range(20):
            looks.append(handle._poll())
            await asyncio.sleep(0)
        waits.pop().cancel()
        worker.lease().complete(np.arange(3))
        return looks, await asyncio.gather(*waits)

    looks, results = asyncio.run(asyncio.wait_for(awaits(), LIMIT_SECONDS))
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    assert looks == [None] * 20 and results == [handle.result()] * 2


def test_loops_of_several_threads_await_one_outcome(pair):
    queue, worker = pair
    handle, results = queue.submit(b"x"), []

    async def awaits():
        return await handle

    threads = [threading.Thread(target=lambda: results.append(asyncio.run(awaits()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    worker.lease().complete(np.arange(3))
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    assert results == [handle.result()] * 4


def test_what_is_done_gives_its_outcome_to_each_thread_without_a_wait(pair):
    queue, worker = pair
    results = []

    def take(handle, begin):
        begin.wait(LIMIT_SECONDS)
        results.append(handle.result(0))

    for round in range(1, 301):
        handle, begin = queue.submit(b"x"), threading.Barrier(4)
        worker.lease().complete(np.arange(3))
        until(handle.done, "the outcome")
        threads = [threading.Thread(target=take, args=(handle, begin)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_SECONDS)
        assert results == [handle.result()] * 4, f"round {round}"
        results.clear()


def test_each_waiter_of_a_job_that_a_shutdown_cancels_is_told_so(open_queue):
    for _ in range(10):
        queue, told = open_queue(), []
        handles = [queue.submit(b"x") for _ in range(40)]

        def waits(handle):
            try:
                handle.result(LIMIT_SECONDS)
            except concurrent.futures.CancelledError:
                told.append(True)
            except warpipe.Error as error:
                told.append(error)

        threads = [threading.Thread(target=waits, args=(handle,)) for handle in handles[:10]]
        for handle in handles:
            handle.add_done_callback(lambda future: told.append(future.cancelled()))
        for thread in threads:
            thread.start()
        queue.shutdown(cancel_futures=True)
        for thread in threads:
            thread.join(LIMIT_SECONDS)
        until(lambda: len(told) == 50, "the callbacks")
        assert told == [True] * 50
        queue.close()


def test_cancellations_of_several_threads_agree_and_one_of_them_calls_back(pair):
    queue, _ = pair
    for _ in range(20):
        handle, said, called = queue.submit(b"x"), [], []
        handle.add_done_callback(called.append)
        threads = [threading.Thread(target=lambda: said.append(handle.cancel())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_SECONDS)
        until(lambda: called == [handle], "the callback")
        assert said == [True] * 4


FORKING = """
import os, threading, warpipe
on = {"domain": warpipe.Domain(DOMAIN), "device": "host"}
queue, worker = warpipe.Queue("jobs", **on), warpipe.Worker("jobs", timeout=30, **on)
children, parents, done = [], [], threading.Event()
first, second = queue.submit(b"x"), queue.submit(b"y")
first.add_done_callback(lambda _: children.append(os.fork()))
first.add_done_callback(lambda _: parents.append(os.getpid()))
first.add_done_callback(lambda _: done.set())
second.add_done_callback(lambda _: parents.append(os.getpid()))
second.add_done_callback(lambda _: done.set())
for _ in range(2):
    worker.lease().complete()
    assert done.wait(30)
    done.clear()
print(os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]), parents == [os.getpid()] * 2, flush=True)
"""


def test_a_callback_may_fork_and_the_child_calls_none_of_its_parents(tmp_path):
    code = FORKING.replace("DOMAIN", repr(str(tmp_path)))
    # From 3.12 on Python warns of a fork beside threads.
    program = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 True\n", "")


EXITING = """
import atexit, sys, warpipe
on = {"domain": warpipe.Domain(DOMAIN), "device": "host"}
late = []
atexit.register(lambda: late[0].add_done_callback(lambda future: print("late", future.done())))
queue, worker = warpipe.Queue("jobs", **on), warpipe.Worker("jobs", timeout=30, **on)
late += [queue.submit(b"x") for _ in range(10)]
for handle in late[1:]:
    handle.add_done_callback(lambda _: None)
worker.lease().complete()
late[0].exception(30)
print("end", flush=True)
"""


def test_a_program_ends_with_callbacks_that_never_ran(tmp_path):
    code = EXITING.replace("DOMAIN", repr(str(tmp_path)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\nlate True\n", "")
