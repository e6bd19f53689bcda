"""Results that are kept: any number of them, up to the memory of those that made them."""

import asyncio
import threading

import numpy as np
import pytest
from conftest import LIMIT_SECONDS

import warpipe

# A worker's ring has 64 entries.
COUNT = 200


@pytest.fixture
def doubling(open_worker):
    """Starts a thread that doubles every input until the queue closes."""
    threads = []

    def work(worker):
        for lease in worker:
            with lease:
                lease.complete(lease.numpy() * 2)

    def start(**options):
        threads.append(threading.Thread(target=work, args=(open_worker(**options),)))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join(LIMIT_SECONDS)
        assert not thread.is_alive()


@pytest.fixture
def queue(open_queue, doubling):
    queue = open_queue()
    doubling()
    yield queue
    queue.close()


def are_doubled(results):
    return [int(result.numpy()[0]) for result in results] == [2 * number for number in range(COUNT)]


def test_a_list_of_handles_gives_the_list_of_their_results(queue):
    handles = [queue.submit(np.array([number])) for number in range(COUNT)]
    assert are_doubled([handle.result(LIMIT_SECONDS) for handle in handles])


def test_more_jobs_than_were_ever_taken_wait_for_their_results(queue):
    handles = [queue.submit(b"") for _ in range(2000)]
    assert all(handle.result(LIMIT_SECONDS).attempt == 1 for handle in handles)


def test_gathered_jobs_all_have_their_results(queue):
    async def gather():
        return await asyncio.gather(*(queue.submit(np.array([number])) for number in range(COUNT)))

    assert are_doubled(asyncio.run(asyncio.wait_for(gather(), LIMIT_SECONDS)))


def test_a_list_of_a_queues_results_has_all_of_them_also_after_a_drain_and_a_shutdown(queue):
    for number in range(COUNT):
        queue.submit(np.array([number]))
    queue.drain(LIMIT_SECONDS)
    queue.shutdown(wait=True, timeout=LIMIT_SECONDS)
    assert are_doubled(list(queue.results()))


def test_every_callback_is_called_although_all_results_are_kept(queue):
    seen, all_seen = [], threading.Event()

    def note(handle):
        seen.append(handle)
        if len(seen) == COUNT:
            all_seen.set()

    for number in range(COUNT):
        queue.submit(np.array([number])).add_done_callback(note)
    assert all_seen.wait(LIMIT_SECONDS)
    assert are_doubled(sorted((handle.result() for handle in seen), key=lambda result: result.job))


def test_a_list_of_requests_gives_the_list_of_their_replies(open_client, domain, device):
    client = open_client()
    server = warpipe.Server("embed", domain=domain, device=device, timeout=LIMIT_SECONDS)

    def serve():
        for _ in range(COUNT):
            with server.accept() as request:
                request.complete(request.numpy() * 2)

    thread = threading.Thread(target=serve)
    thread.start()
    replies = [pending.result() for pending in [client.request(np.array([number])) for number in range(COUNT)]]
    thread.join(LIMIT_SECONDS)
    assert are_doubled(replies)
    server.close()


def fail_for_memory(worker):
    # What is logged keeps the frames of its thread.
    with worker.lease(LIMIT_SECONDS) as lease:
        lease.complete(np.zeros(1 << 20, "uint8"))


def test_a_worker_without_room_for_another_kept_result_names_its_memory_limit_and_goes_on(open_queue, open_worker, device):
    if device.kind != "host":
        pytest.skip("regions of a GPU may have another size")
    queue, worker = open_queue(max_attempts=1), open_worker(memory_limit=2 << 20, timeout=0.05)
    kept = []
    for _ in range(2):
        handle = queue.submit(b"x")
        worker.lease(LIMIT_SECONDS).complete(np.zeros(1 << 20, "uint8"))
        kept.append(handle.result(LIMIT_SECONDS))
    handle = queue.submit(b"x")
    failing = threading.Thread(target=fail_for_memory, args=(worker,))
    failing.start()
    failing.join(LIMIT_SECONDS)
    with pytest.raises(warpipe.DeadLetteredError, match="MemoryLimitError.*has no room for 1048576 bytes.*memory limit"):
        handle.result(LIMIT_SECONDS)
    kept.clear()
    del handle
    handle = queue.submit(b"x")
    worker.lease(LIMIT_SECONDS).complete(np.zeros(1 << 20, "uint8"))
    assert handle.result(LIMIT_SECONDS).nbytes == 1 << 20
