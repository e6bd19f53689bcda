"""Queues: every job done once and right, despite failures, hangs and deaths; results and leases as arrays."""

import asyncio
import contextlib
import gc
import threading

import numpy as np
import pytest
from conftest import LIMIT_SECONDS, until
from workers import complete_one_and_hang, double, own_a_queue, take_one_and_hang
from peers import kill, process, said
from test_processes import kills, place  # noqa: F401
from test_waits import Interrupted, a_signal_soon

import warpipe


@pytest.fixture
def pair(open_queue, open_worker):
    """A queue and its worker in this process."""
    return open_queue(), open_worker()


@pytest.fixture
def doubling(open_worker):
    """A thread that doubles every input; gives the numbers of the jobs as they were leased."""
    worker, seen = open_worker, []

    def start(**options):
        mine = worker(**options)

        def work():
            for lease in mine:
                seen.append(lease.job)
                lease.complete(lease.numpy() * 2)

        thread = threading.Thread(target=work)
        thread.start()
        threads.append(thread)
        return seen

    threads = []
    yield start
    for thread in threads:
        thread.join(LIMIT_SECONDS)
        assert not thread.is_alive()


def test_a_job_goes_out_as_an_array_and_comes_back_as_one(pair):
    queue, worker = pair
    handle = queue.submit(np.arange(6, dtype=np.float32).reshape(2, 3), metadata={"n": 17})
    assert handle.job == 1 and not handle.done()
    lease = worker.lease()
    assert (lease.shape, lease.dtype, lease.metadata, lease.job, lease.attempt) == ((2, 3), "float32", {"n": 17}, 1, 1)
    assert lease.numpy().tolist() == [[0, 1, 2], [3, 4, 5]] and lease.deadline_ns is None
    lease.complete(np.asarray(lease.numpy().sum()), metadata={"by": "me"})
    assert lease.is_answered and lease.released
    result = handle.result(LIMIT_SECONDS)
    assert isinstance(result, warpipe.Sample)
    assert (float(result.numpy()), result.metadata, result.job, result.attempt) == (15.0, {"by": "me"}, 1, 1)


def test_an_output_in_place_completes_its_job_at_the_end_of_the_block(pair):
    queue, worker = pair
    with queue.loan(4, "int64", metadata=b"in place") as loan:
        loan.copy_from(np.arange(4))
        handle = queue.submit(loan)
    with worker.lease() as lease:
        assert lease.metadata_bytes == b"in place"
        with pytest.raises(ZeroDivisionError), lease.output(4, "int64") as spoiled:
            raise ZeroDivisionError
        assert spoiled.released and not lease.is_answered
        with lease.output(4, "int64") as out:
            out.copy_from(np.negative(lease.numpy()))
        assert lease.is_answered
    assert handle.result(LIMIT_SECONDS).numpy().tolist() == [0, -1, -2, -3]


def test_an_output_can_be_completed_with_by_hand_and_a_job_without_any(pair):
    queue, worker = pair
    first, second = queue.submit(b"a"), queue.submit(b"b")
    lease = worker.lease()
    out = lease.output(1, "uint8")
    out.copy_from(np.array([9], np.uint8))
    lease.complete(out, metadata={"late": True})
    worker.lease().complete(metadata=b"nothing")
    result = first.result(LIMIT_SECONDS)
    assert (result.numpy().tolist(), result.metadata) == ([9], {"late": True})
    empty = second.result(LIMIT_SECONDS)
    assert (empty.nbytes, empty.metadata_bytes) == (0, b"nothing")


def test_loans_of_others_are_refused_and_nothing_is_lost(pair, open_publisher):
    queue, worker = pair
    handle = queue.submit(b"x")
    publisher = open_publisher()
    with publisher.loan(1, "uint8") as foreign, pytest.raises(warpipe.ArgumentError):
        queue.submit(foreign)
    lease = worker.lease()
    with queue.loan(1, "uint8") as wrong, pytest.raises(warpipe.ArgumentError):
        lease.complete(wrong)
    lease.complete(b"y")
    assert handle.result(LIMIT_SECONDS).tobytes() == b"y"


def test_arrays_of_a_lease_and_of_a_result_outlive_them(open_queue, open_worker):
    queue = open_queue(memory_limit=8 << 20)
    worker = open_worker()
    handle = queue.submit(np.full(1 << 20, 1, np.uint8))
    lease = worker.lease()
    held = lease.numpy()
    lease.complete(np.full(1 << 20, 101, np.uint8))
    with pytest.raises(warpipe.ReleasedError):
        lease.numpy()
    result = handle.result(LIMIT_SECONDS)
    array = result.numpy()
    del lease, result
    # Others come and go; what is held is not written again.
    for number in range(2, 12):
        again = queue.submit(np.full(1 << 20, number, np.uint8))
        worker.lease().complete(np.full(1 << 20, 100 + number, np.uint8))
        assert again.result(LIMIT_SECONDS).numpy()[-1] == 100 + number
        gc.collect()
    assert (held == 1).all() and (array == 101).all()
    worker.close()
    queue.close()
    assert (held == 1).all() and (array == 101).all()


def test_results_come_as_the_jobs_were_submitted_or_as_they_are_done(open_queue, open_worker):
    for order, expected in (("submission", [1, 2, 3]), ("completion", [3, 2, 1])):
        queue = open_queue(order=order, prefetch=3)
        worker = open_worker()
        for number in range(3):
            queue.submit(bytes([number]))
        leases = [worker.lease() for _ in range(3)]
        for lease in reversed(leases):
            lease.complete(lease.tobytes())
            # Completed as the queue sees it, before the next.
            until(lambda: queue.state.finished == 3 - lease.job + 1, "the outcome")
        assert [result.job for result in queue.results(LIMIT_SECONDS)] == expected
        worker.close()
        queue.close()


def test_results_can_be_followed_while_another_thread_submits(open_queue, doubling):
    queue = open_queue(limit=8)
    doubling()

    def submit():
        for number in range(100):
            queue.submit(np.array([number]), timeout=LIMIT_SECONDS)
        queue.shutdown(timeout=LIMIT_SECONDS)

    submitter = threading.Thread(target=submit)
    submitter.start()
    found = []
    for result in queue.results(LIMIT_SECONDS, follow=True):
        with result:
            found.append(int(result.numpy()[0]))
    submitter.join(LIMIT_SECONDS)
    assert found == [2 * number for number in range(100)]
    with pytest.raises(warpipe.QueueClosedError):
        queue.submit(b"too late")
    queue.close()


def test_an_exception_fails_the_lease_and_the_reasons_come_with_the_burial(open_queue, open_worker):
    queue, worker = open_queue(max_attempts=3), open_worker()
    handle = queue.submit(b"bad")
    with worker.lease():
        raise ValueError("cannot digest this")
    worker.lease().fail("tired")
    worker.lease()
    gc.collect()
    with pytest.raises(warpipe.DeadLetteredError, match="cannot digest") as dead_lettered:
        handle.result(LIMIT_SECONDS)
    reasons = dead_lettered.value.reasons
    assert (dead_lettered.value.job, dead_lettered.value.endpoint, len(reasons)) == (handle.job, "jobs", 3)
    assert "ValueError: cannot digest this" in reasons[0] and "tired" in reasons[1] and "without an answer" in reasons[2]


def test_a_rejected_job_and_a_buried_one_stand_in_their_places_among_the_results(open_queue, open_worker):
    queue, worker = open_queue(max_attempts=1, prefetch=4), open_worker()
    for number in range(4):
        queue.submit(bytes([number]))
    first, second, third, fourth = [worker.lease() for _ in range(4)]
    first.complete(b"1")
    second.reject("not this one")
    third.fail("no")
    fourth.complete(b"4")
    results, found = queue.results(LIMIT_SECONDS), []
    while True:
        try:
            found.append(next(results).tobytes())
        except StopIteration:
            break
        except warpipe.RejectedError as rejected:
            found.append((rejected.job, rejected.reason))
        except warpipe.DeadLetteredError as dead_lettered:
            found.append((dead_lettered.job, len(dead_lettered.reasons)))
    assert found == [b"1", (2, "not this one"), (3, 1), b"4"]


def test_a_worker_that_is_ended_gives_its_job_back_at_no_cost(pair):
    queue, worker = pair
    handle = queue.submit(b"x")
    with pytest.raises(KeyboardInterrupt), worker.lease():
        raise KeyboardInterrupt
    again = worker.lease()
    assert again.attempt == 1
    again.requeue()
    last = worker.lease()
    assert last.attempt == 1
    last.complete()
    assert handle.result(LIMIT_SECONDS).attempt == 1


def test_a_lease_is_answered_once_and_an_outcome_taken_once(pair):
    queue, worker = pair
    handle = queue.submit(b"x")
    lease = worker.lease()
    lease.complete()
    for again in (lease.complete, lease.requeue, lambda: lease.fail("x"), lambda: lease.output(1, "uint8")):
        with pytest.raises(warpipe.ReleasedError, match="answered"):
            again()
    result = handle.result(LIMIT_SECONDS)
    assert result.job == 1 and handle.done()
    assert handle.result(LIMIT_SECONDS) is result


def test_a_full_queue_says_so_and_a_job_that_is_called_off_makes_room(open_queue):
    queue = open_queue(limit=2, submit_timeout=0.05)
    handles = [queue.submit(b"x") for _ in range(2)]
    with pytest.raises(warpipe.QueueFullError) as full:
        queue.submit(b"x")
    assert (full.value.limit, full.value.endpoint) == (2, "jobs")
    assert handles[0].cancel() and handles[0].cancelled()
    queue.submit(b"x")
    assert queue.state.waiting >= 2 and queue.state.workers == []


def test_what_cannot_be_is_an_error_at_once(open_queue, domain, device):
    for options, error in [({"order": "random"}, ValueError), ({"prefetch": 0}, ValueError), ({"max_attempts": 0}, ValueError),
                           ({"lease_timeout": -1.0}, ValueError)]:
        with pytest.raises(error):
            open_queue(**options)
    with pytest.raises(warpipe.NotFoundError):
        warpipe.Worker("jobs", domain=domain, device=device)
    queue = open_queue()
    with pytest.raises(warpipe.MetadataError, match="200"):
        queue.submit(b"x", metadata=b"." * 201)
    with pytest.raises(warpipe.NotATensorError):
        queue.submit(object())
    assert queue.state.waiting == 0


def test_a_hung_worker_loses_its_job_and_its_late_answer_does_not_count(open_queue, open_worker):
    queue = open_queue(lease_timeout=0.2, prefetch=1, max_attempts=1000)
    slow = open_worker()
    handle = queue.submit(b"x")
    lease = slow.lease()
    other = open_worker()
    again = other.lease()
    assert (again.job, again.attempt) == (lease.job, 2)
    lease.complete(b"late")
    slow.close()
    again.complete(b"in time")

    def is_done():
        # On a busy machine the other one was late itself, and is given the job again.
        if not queue.state.finished:
            with contextlib.suppress(warpipe.TimeoutError):
                other.lease(timeout=0.01).complete(b"in time")
        return queue.state.finished == 1

    until(is_done, "the other's result")
    assert handle.result(LIMIT_SECONDS).tobytes() == b"in time"


def test_awaited_results_are_right_however_many(open_queue, doubling):
    queue = open_queue()
    doubling()

    async def ask(number):
        with await queue.submit(np.array([number])) as result:
            return int(result.numpy()[0])

    async def run():
        return await asyncio.wait_for(asyncio.gather(*map(ask, range(200))), LIMIT_SECONDS)

    assert asyncio.run(run()) == [2 * number for number in range(200)]
    assert not warpipe._loop._hubs
    queue.close()


def test_an_await_sees_burials_can_be_cancelled_and_ends_with_the_queue(open_queue, open_worker):
    queue, worker = open_queue(max_attempts=1), open_worker()

    async def run():
        handle = queue.submit(b"x")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_of(handle), 0.05)
        lease = await worker.lease_async()
        lease.fail("no")
        with pytest.raises(warpipe.DeadLetteredError):
            await handle
        with pytest.raises(warpipe.TimeoutError):
            await worker.lease_async(timeout=0.05)
        waiting = asyncio.create_task(_of(queue.submit(b"y")))
        await asyncio.sleep(0)
        threading.Thread(target=queue.close).start()
        with pytest.raises(warpipe.QueueClosedError):
            await asyncio.wait_for(waiting, LIMIT_SECONDS)

    asyncio.run(run())
    assert not warpipe._loop._hubs


async def _of(handle):
    return await handle


def test_a_worker_and_the_results_share_one_event_loop(pair):
    queue, worker = pair

    async def work():
        async with worker:
            async for lease in worker:
                lease.complete(lease.numpy() + 1)

    async def collect():
        found = [int(result.numpy()[0]) async for result in queue.results(LIMIT_SECONDS)]
        queue.close()
        return found

    async def run():
        for number in range(50):
            queue.submit(np.array([number]))
        return await asyncio.wait_for(asyncio.gather(collect(), work()), LIMIT_SECONDS)

    assert asyncio.run(run())[0] == list(range(1, 51))


def test_two_event_loops_wait_for_one_queue(open_queue, doubling):
    queue = open_queue()
    doubling()
    found = []

    async def run(first):
        async def ask(number):
            return int((await queue.submit(np.array([number]))).numpy()[0])

        found.extend(await asyncio.wait_for(asyncio.gather(*[ask(first + n) for n in range(20)]), LIMIT_SECONDS))

    loops = [threading.Thread(target=lambda first=first: asyncio.run(run(first))) for first in (0, 100)]
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join(LIMIT_SECONDS)
    assert sorted(found) == sorted(2 * n for first in (0, 100) for n in range(first, first + 20))
    queue.close()


def test_many_threads_submit_and_many_work(open_queue, doubling):
    queue = open_queue(prefetch=4)
    seen = doubling()
    for _ in range(2):
        doubling()
    found, lock = [], threading.Lock()

    def submit(first):
        for number in range(first, first + 50):
            result = queue.submit(np.array([number])).result(LIMIT_SECONDS)
            with lock:
                found.append(int(result.numpy()[0]))

    submitters = [threading.Thread(target=submit, args=(first,)) for first in (0, 50, 100, 150)]
    for thread in submitters:
        thread.start()
    for thread in submitters:
        thread.join(LIMIT_SECONDS)
    assert sorted(found) == [2 * number for number in range(200)]
    assert sorted(seen) == list(range(1, 201)), "each job was leased once"
    queue.close()


def test_a_signal_ends_every_wait_of_a_queue(open_queue, open_worker, domain, device):
    with pytest.raises(Interrupted), a_signal_soon():
        warpipe.Worker("jobs", domain=domain, device=device, wait=None)
    queue = open_queue(limit=1, submit_timeout=None, memory_limit=2 << 20)
    with pytest.raises(Interrupted), a_signal_soon():
        queue.wait_for_workers(1, None)
    worker = open_worker(timeout=None, memory_limit=2 << 20)
    for wait in (worker.lease, lambda: next(worker)):
        with pytest.raises(Interrupted), a_signal_soon():
            wait()
    handle = queue.submit(np.zeros(1 << 20, np.uint8))
    waits = [handle.result, lambda: next(queue.results()), queue.drain, lambda: queue.submit(b"x"), lambda: queue.loan(3 << 19, "uint8")]
    for wait in waits:
        with pytest.raises(Interrupted), a_signal_soon():
            wait()
    lease = worker.lease()
    out = lease.output(1 << 20, "uint8")
    with pytest.raises(Interrupted), a_signal_soon():
        lease.output(3 << 19, "uint8")
    lease.complete(out)
    assert handle.result(LIMIT_SECONDS).nbytes == 1 << 20
    with pytest.raises(Interrupted), a_signal_soon():
        worker.lease()
    # What was interrupted was not submitted, and nothing is lost for it.
    assert queue.submit(b"after").job == 2


def test_closing_ends_the_waits_of_other_threads(open_queue, open_worker):
    queue, worker = open_queue(), open_worker(timeout=None)
    handle, ended = queue.submit(b"x"), []
    worker.lease().requeue()
    held = worker.lease()

    def wait(work):
        try:
            work()
        except warpipe.Error as error:
            ended.append(type(error))

    waits = [handle.result, lambda: next(queue.results(follow=True)), queue.drain, lambda: worker.lease(None)]
    threads = [threading.Thread(target=wait, args=(work,)) for work in waits]
    for thread in threads:
        thread.start()
    queue.close()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
        assert not thread.is_alive()
    assert len(ended) == 4
    assert set(ended) <= {warpipe.QueueClosedError, warpipe.PeerGoneError}
    # Whether its worker has heard of the end yet is another matter.
    with contextlib.suppress(warpipe.PeerGoneError):
        held.complete()


def test_workers_in_other_processes_do_every_job_once_and_right(open_queue, place):  # noqa: F811
    queue = open_queue()
    with process(double, *place) as (_first, one), process(double, *place) as (_second, two):
        assert [said(one), said(two)] == ["ready", "ready"]
        queue.wait_for_workers(2, LIMIT_SECONDS)
        for number in range(200):
            queue.submit(np.full(3, number), metadata={"n": number})
        found, by = [], set()
        for result in queue.results(LIMIT_SECONDS):
            with result:
                found.append(result.numpy().tolist())
                by.add(result.worker_pid)
                assert result.metadata == {"by": result.worker_pid}
        assert found == [[2 * number] * 3 for number in range(200)]
        queue.close()
        assert said(one) + said(two) == 200
        assert len(by) <= 2


@kills
def test_the_job_of_a_killed_worker_is_done_again(open_queue, place):  # noqa: F811
    queue = open_queue()
    handle = queue.submit(np.arange(5))
    with process(take_one_and_hang, *place) as (victim, pipe):
        assert (said(pipe), said(pipe)) == ("ready", (1, 1))
        with process(double, *place) as (survivor, other):
            assert said(other) == "ready"
            kill(victim)
            result = handle.result(LIMIT_SECONDS)
            assert (result.numpy().tolist(), result.attempt, result.worker_pid) == ([0, 2, 4, 6, 8], 2, survivor.pid)


@kills
def test_a_job_that_kills_every_worker_is_buried(open_queue, place):  # noqa: F811
    queue = open_queue(max_attempts=2)
    handle = queue.submit(b"poison")
    for attempt in (1, 2):
        with process(take_one_and_hang, *place) as (victim, pipe):
            assert (said(pipe), said(pipe)) == ("ready", (1, attempt))
            kill(victim)
    with pytest.raises(warpipe.DeadLetteredError) as dead_lettered:
        handle.result(LIMIT_SECONDS)
    reasons = dead_lettered.value.reasons
    assert len(reasons) == 2 and all(reason.endswith("left it undone: it has died") for reason in reasons)


@kills
def test_a_result_outlives_its_worker(open_queue, place):  # noqa: F811
    queue = open_queue()
    handle = queue.submit(b"x")
    with process(complete_one_and_hang, *place) as (victim, pipe):
        assert (said(pipe), said(pipe)) == ("ready", "completed")
        until(handle.done, "the result")
        kill(victim)
    result = handle.result(LIMIT_SECONDS)
    until(lambda: not queue.state.workers, "the end of the dead worker")
    assert result.numpy().tolist() == [0, 1, 2, 3]


def test_a_queue_that_closes_gracefully_ends_the_loop_of_its_worker(open_worker, place):  # noqa: F811
    with process(own_a_queue, *place, 2) as (_owner, pipe):
        assert said(pipe) == "ready"
        worker = open_worker(wait=LIMIT_SECONDS)
        assert said(pipe) == 2
        for _ in range(2):
            worker.lease().complete()
        pipe.send("close")
        assert said(pipe) == "closed"
        assert list(worker) == []
        with pytest.raises(warpipe.PeerGoneError) as gone:
            worker.lease()
        assert gone.value.graceful and gone.value.endpoint == "jobs"


@kills
def test_a_queue_that_is_killed_is_an_error_to_its_worker(open_worker, place):  # noqa: F811
    with process(own_a_queue, *place, 1) as (owner, pipe):
        assert said(pipe) == "ready"
        worker = open_worker(wait=LIMIT_SECONDS)
        assert said(pipe) == 1
        lease = worker.lease()
        kill(owner)
        with pytest.raises(warpipe.PeerGoneError) as gone:
            next(worker)
        assert not gone.value.graceful
        assert lease.numpy().tolist() == [0] * 4, "what was leased can still be read"


def test_a_job_that_raises_fails_its_attempts_and_the_loop_does_the_others(open_queue, open_worker, caplog):
    queue = open_queue(max_attempts=2)
    worker = open_worker()

    def work():
        for lease in worker:
            with lease, lease.output(lease.shape, lease.dtype) as out:
                out.copy_from(np.array([6 // int(lease.numpy()[0])]))

    thread = threading.Thread(target=work)
    thread.start()
    handles = [queue.submit(np.array([number])) for number in (1, 0, 2)]
    assert [handles[index].result(LIMIT_SECONDS).numpy().tolist() for index in (0, 2)] == [[6], [3]]
    with pytest.raises(warpipe.DeadLetteredError, match="ZeroDivisionError"):
        handles[1].result(LIMIT_SECONDS)
    queue.close()
    thread.join(LIMIT_SECONDS)
    assert not thread.is_alive()
    failed = [record for record in caplog.records if record.name == "warpipe"]
    assert [record.getMessage() for record in failed] == ["attempt 1 of job 2 failed", "attempt 2 of job 2 failed"]
    assert all(record.exc_info[0] is ZeroDivisionError for record in failed)


def test_what_ends_a_worker_goes_on_beyond_its_lease_and_costs_no_attempt(pair):
    queue, worker = pair
    handle = queue.submit(b"x")
    for ends in (KeyboardInterrupt, SystemExit):
        with pytest.raises(ends), worker.lease(LIMIT_SECONDS):
            raise ends
    with pytest.raises(ZeroDivisionError), worker.lease(LIMIT_SECONDS) as lease:
        lease.complete()
        raise ZeroDivisionError("behind the answer")
    assert handle.result(LIMIT_SECONDS).attempt == 1
