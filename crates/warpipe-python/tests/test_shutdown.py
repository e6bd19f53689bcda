"""``Queue.shutdown`` ends the workers' loops, after the last job and whatever the workers do meanwhile."""

import asyncio
import os
import signal
import threading

import numpy as np
import pytest
from conftest import LIMIT_SECONDS, stop, until
from peers import kill, process, said
from test_processes import kills, place  # noqa: F401
from workers import double, take_one_and_hang

import warpipe


def works(worker):
    """Completes jobs in a thread until the worker's loop ends; gives the thread and their numbers."""
    jobs = []

    def loop():
        for lease in worker:
            jobs.append(lease.job)
            lease.complete()

    thread = threading.Thread(target=loop)
    thread.start()
    return thread, jobs


def ended(thread):
    thread.join(LIMIT_SECONDS)
    return not thread.is_alive()


def test_a_loop_ends_after_the_jobs_that_waited(open_queue, open_worker):
    queue = open_queue()
    handles = [queue.submit(b"x") for _ in range(10)]
    queue.shutdown(wait=False)
    with pytest.raises(warpipe.QueueClosedError):
        queue.submit(b"too late")
    thread, jobs = works(open_worker())
    assert ended(thread) and jobs == list(range(1, 11))
    queue.shutdown(timeout=LIMIT_SECONDS)
    assert queue.state.workers == [] and [handle.result(LIMIT_SECONDS).job for handle in handles] == jobs


def test_a_loop_of_asyncio_ends_too(open_queue, open_worker):
    queue, worker = open_queue(), open_worker()

    async def loop():
        jobs = []
        async for lease in worker:
            jobs.append(lease.job)
            lease.complete()
            queue.shutdown(wait=False)
        return jobs

    queue.submit(b"x")
    assert asyncio.run(asyncio.wait_for(loop(), LIMIT_SECONDS)) == [1]


def test_a_shutdown_waits_for_the_lease_that_is_held(open_queue, open_worker):
    queue, worker = open_queue(), open_worker()
    queue.submit(b"held")
    lease = worker.lease()
    with pytest.raises(warpipe.TimeoutError):
        queue.shutdown(timeout=0.05)
    with pytest.raises(warpipe.TimeoutError):
        worker.lease(timeout=0.05)
    lease.complete(np.arange(3))
    queue.shutdown(timeout=LIMIT_SECONDS)
    with pytest.raises(warpipe.PeerGoneError) as gone:
        worker.lease()
    assert gone.value.graceful
    assert next(queue.results(LIMIT_SECONDS)).numpy().tolist() == [0, 1, 2]


def test_a_worker_that_comes_after_it_finds_no_queue_and_may_wait_for_the_next(open_queue, open_worker, domain, device):
    queue = open_queue()
    queue.shutdown(timeout=LIMIT_SECONDS)
    with pytest.raises(warpipe.NotFoundError):
        open_worker()
    following = warpipe.Queue("jobs", domain=domain, device=device)
    thread, jobs = works(open_worker())
    following.submit(b"x")
    following.shutdown(timeout=LIMIT_SECONDS)
    assert ended(thread) and jobs == [1]
    following.close()


def test_jobs_that_no_worker_holds_are_cancelled_on_request(open_queue, open_worker):
    queue, worker = open_queue(prefetch=1), open_worker()
    handles = [queue.submit(b"x") for _ in range(3)]
    lease = worker.lease()
    queue.shutdown(wait=False, cancel_futures=True)
    lease.complete()
    assert list(worker) == []
    assert [handle.done() for handle in handles] == [True] * 3
    assert [result.job for result in queue.results(LIMIT_SECONDS)] == [1]


@kills
def test_a_shutdown_goes_on_when_a_worker_is_killed_during_it(open_queue, place):  # noqa: F811
    queue = open_queue()
    handles = [queue.submit(np.full(3, number)) for number in range(4)]
    with process(take_one_and_hang, *place) as (victim, pipe):
        assert (said(pipe), said(pipe)) == ("ready", (1, 1))
        queue.shutdown(wait=False)
        with process(double, *place) as (_survivor, other):
            assert said(other) == "ready"
            kill(victim)
            # Its loop ends, and it says how many jobs it did.
            assert said(other) == 4
    queue.shutdown(timeout=LIMIT_SECONDS)
    assert [int(handle.result(LIMIT_SECONDS).numpy()[0]) for handle in handles] == [0, 2, 4, 6]


@kills
def test_a_stopped_worker_holds_up_no_shutdown_for_longer_than_its_lease(open_queue, place):  # noqa: F811
    # The survivor has one, too, and answers in it also on a busy machine.
    queue = open_queue(lease_timeout=2.0)
    handle = queue.submit(np.full(3, 7))
    with process(take_one_and_hang, *place) as (stopped, pipe):
        assert (said(pipe), said(pipe)) == ("ready", (1, 1))
        stop(stopped)
        try:
            queue.shutdown(wait=False)
            with process(double, *place) as (_survivor, other):
                assert said(other) == "ready"
                assert said(other) == 1
            queue.shutdown(timeout=LIMIT_SECONDS)
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
    assert handle.result(LIMIT_SECONDS).numpy().tolist() == [14, 14, 14]
    until(lambda: queue.state.workers == [], "the end of the workers")


def test_a_submission_that_waits_for_room_ends_with_the_shutdown(open_queue):
    queue, said = open_queue(limit=1, submit_timeout=None), []
    queue.submit(b"x")

    def submits():
        with pytest.raises(warpipe.QueueClosedError) as closed:
            queue.submit(b"y")
        said.append(closed)

    thread = threading.Thread(target=submits)
    thread.start()
    queue.shutdown(wait=False)
    assert ended(thread) and len(said) == 1


def test_shutdowns_drains_and_results_of_several_threads_end_together(open_queue, open_worker):
    queue, worker, said = open_queue(), open_worker(), []
    for _ in range(3):
        queue.submit(b"x")
    waits = [queue.shutdown, queue.shutdown, queue.drain, lambda: list(queue.results(follow=True))]
    threads = [threading.Thread(target=lambda wait=wait: said.append(wait())) for wait in waits]
    for thread in threads:
        thread.start()
    for lease in worker:
        lease.complete()
    assert all(ended(thread) for thread in threads)
    assert sorted(len(results) for results in said if results is not None) == [3] and len(said) == 4
    queue.shutdown(cancel_futures=True)
    queue.close()
    with pytest.raises(warpipe.QueueClosedError):
        queue.shutdown()
