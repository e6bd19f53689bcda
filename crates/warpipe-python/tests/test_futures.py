"""Jobs and requests as ``concurrent.futures.Future`` has them: outcomes, callbacks, cancellation."""

import asyncio
import concurrent.futures
import gc
import os
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
    assert seen == [True] and handle.cancelled() and handle.done()
    for ask in (handle.result, handle.exception):
        with pytest.raises(concurrent.futures.CancelledError):
            ask()

    async def awaits():
        await handle

    with pytest.raises(concurrent.futures.CancelledError):
        asyncio.run(awaits())


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
        server.accept().reply(np.arange(2))
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
