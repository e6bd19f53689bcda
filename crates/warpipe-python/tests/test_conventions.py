"""What programs expect of any Python package: errors of the system, pickles, ``with`` blocks, futures."""

import asyncio
import concurrent.futures
import copy
import errno
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import DEVICE, LIMIT_SECONDS

import warpipe


def test_every_error_that_is_an_oserror_has_its_number_and_keeps_its_text(domain, device, link):
    expected = {
        warpipe.NotFoundError: (errno.ECONNREFUSED, lambda: warpipe.Subscriber("nobody", domain=domain, device=device)),
        warpipe.TimeoutError: (errno.ETIMEDOUT, lambda: link[1].receive(0)),
        warpipe.SystemCallError: (errno.ENOENT, lambda: warpipe.Ticket.read_file("/there/is/none")),
    }
    for kind, (number, call) in expected.items():
        with pytest.raises(kind) as raised:
            call()
        error = raised.value
        assert isinstance(error, OSError) and (error.errno, error.strerror) == (number, os.strerror(number)), kind
        assert str(error) == error.args[0] and "Errno" not in str(error)
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.errno, vars(again)) == (kind, str(error), number, vars(error) | vars(again))


def test_every_class_of_errors_that_is_an_oserror_has_a_number():
    for kind in vars(warpipe._errors).values():
        is_ours = isinstance(kind, type) and issubclass(kind, (warpipe.Error,)) and issubclass(kind, OSError)
        if is_ours and kind is not warpipe.SystemCallError:
            assert isinstance(kind("x").errno, int) and kind("x").strerror, kind


def test_a_process_without_descriptors_left_is_told_the_call_and_the_code(tmp_path):
    # In a process of its own: a driver that is out of descriptors may not work again.
    code = """
import errno, resource, sys, warpipe
domain, device = warpipe.Domain(sys.argv[1]), warpipe.Device(sys.argv[2])
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
publisher = warpipe.Publisher("here", domain=domain, device=device)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
try:
    warpipe.Publisher("there", domain=domain, device=device)
except warpipe.SystemCallError as error:
    raised = error
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
assert raised.call and (raised.code, raised.errno) == (errno.EMFILE, errno.EMFILE), vars(raised)
assert raised.error_kind == "limit_reached" and "ulimit -n" in str(raised), str(raised)
publisher.close()
"""
    program = [sys.executable, "-c", code, str(tmp_path / "domain"), DEVICE]
    done = subprocess.run(program, capture_output=True, text=True, timeout=2 * LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr


def test_what_is_closed_or_released_begins_no_block(link, domain, device):
    publisher, subscriber = link
    publisher.send(b"x")
    frame = subscriber.receive()
    semaphore = warpipe.Semaphore.create("s", 1, domain=domain, device=device)
    permit = semaphore.acquire()
    for one, end in ((frame, frame.release), (permit, permit.release), (semaphore, semaphore.close), (subscriber, subscriber.close)):
        with one:
            end()
        with pytest.raises((warpipe.ClosedError, warpipe.ReleasedError)), one:
            raise AssertionError("the block was begun")


def test_what_belongs_to_a_process_says_what_to_do_instead_of_a_pickle(link):
    publisher, subscriber = link
    publisher.send(b"x")
    frame = subscriber.receive()
    for one, said in ((frame, "a Sample .*Publisher or a Queue.*numpy"), (publisher, "a Publisher .*by its name")):
        for call in (pickle.dumps, copy.copy):
            with pytest.raises(TypeError, match=f"{said}"):
                call(one)


def test_an_outcome_that_is_pickled_says_to_send_a_copy_of_it(open_queue, open_client):
    for one in (open_queue().submit(b"x"), open_client().request(b"x")):
        for call in (pickle.dumps, copy.copy):
            with pytest.raises(TypeError, match=f"a {type(one).__name__} belongs.*send a copy"):
                call(one)
        one.cancel()


def test_an_outcome_has_every_method_of_a_future_that_is_not_its_executors(open_queue):
    handle = open_queue().submit(b"x")
    executors = {"set_result", "set_exception", "set_running_or_notify_cancel"}
    wanted = {name for name in dir(concurrent.futures.Future) if not name.startswith("_")} - executors
    assert wanted <= set(dir(handle))
    # It can be cancelled at any time.
    assert handle.running() is False and handle.cancel()


def test_a_devices_number_may_be_of_any_integer_type(device):
    if device.kind == "cuda":
        assert warpipe.Device(np.int64(device.ordinal)) == device
    else:
        # It is taken as the number of a GPU, whatever becomes of that.
        with pytest.raises(warpipe.DeviceError):
            warpipe.Device(np.int64(4000))
    for wrong in (True, 1.0, b"0"):
        with pytest.raises(warpipe.ArgumentError, match="a GPU's number"):
            warpipe.Device(wrong)


def test_what_is_no_ticket_by_its_type_is_a_typeerror():
    for wrong in (None, 3, b"ticket"):
        with pytest.raises(TypeError, match="a ticket is a Ticket or its text"):
            warpipe.Ticket(wrong)
    with pytest.raises(warpipe.HandleError, match="a usable ticket"):
        warpipe.Ticket("no ticket")


def test_weights_have_the_methods_of_a_mapping(domain, device):
    from warpipe import weights

    with weights.keep("w", domain=domain):
        published = weights.publish("w", {"a": np.arange(3.0), "b": np.arange(4)}, device=device, domain=domain)
        with weights.open("w", device=device, domain=domain) as found, published:
            assert dict(found.items()).keys() == {"a", "b"} and len(found.values()) == 2
            assert found.get("a").numpy().tolist() == [0, 1, 2]
            assert found.get("c") is None and found.get("c", 7) == 7 and found.get(3) is None
            assert {name: view.shape for name, view in found.items()} == {"a": (3,), "b": (4,)}


@pytest.fixture
def jobs(open_queue, open_worker):
    """Submits jobs, which are doubled; the job of a negative number fails."""
    queue, worker = open_queue(max_attempts=1), open_worker()

    def work():
        for lease in worker:
            number = int(lease.numpy()[0])
            if number < 0:
                lease.fail("negative")
            else:
                lease.complete(np.array([2 * number]))

    thread = threading.Thread(target=work)
    thread.start()
    yield lambda numbers: [queue.submit(np.array([number])) for number in numbers]
    queue.close()
    thread.join(LIMIT_SECONDS)
    assert not thread.is_alive()


def test_concurrent_futures_waits_for_handles(jobs):
    handles = jobs(range(100))
    done, pending = concurrent.futures.wait(handles, LIMIT_SECONDS)
    assert done == set(handles) and not pending
    assert concurrent.futures.wait(handles, 0).done == done
    seen = [int(handle.result().numpy()[0]) for handle in concurrent.futures.as_completed(jobs(range(100)), LIMIT_SECONDS)]
    assert sorted(seen) == [2 * number for number in range(100)]


def test_concurrent_futures_sees_the_first_failure_and_what_is_not_done(jobs, open_queue, domain, device):
    handles = jobs([1, -1, 2])
    done, _ = concurrent.futures.wait(handles, LIMIT_SECONDS, concurrent.futures.FIRST_EXCEPTION)
    assert handles[1] in done and isinstance(handles[1].exception(), warpipe.DeadLetteredError)
    with warpipe.Queue("nobody", domain=domain, device=device) as queue:
        open_handle, called_off = queue.submit(b"x"), queue.submit(b"y")
        called_off.cancel()
        done, pending = concurrent.futures.wait([open_handle, called_off], 0.05)
        assert (done, pending) == ({called_off}, {open_handle})
        with pytest.raises(TimeoutError):
            list(concurrent.futures.as_completed([open_handle], 0.05))


def test_asyncio_wraps_handles(jobs):
    async def run():
        handles = jobs([3, -1])
        assert int((await asyncio.wrap_future(handles[0])).numpy()[0]) == 6
        with pytest.raises(warpipe.DeadLetteredError):
            await asyncio.wrap_future(handles[1])

    asyncio.run(asyncio.wait_for(run(), LIMIT_SECONDS))


def test_a_handle_is_still_of_its_own_class(jobs):
    (handle,) = jobs([1])
    assert isinstance(handle, warpipe.JobHandle) and type(handle) is warpipe.JobHandle
    assert isinstance(handle, concurrent.futures.Future) and repr(handle).startswith("JobHandle(")
    handle.result(LIMIT_SECONDS)


def test_every_information_pickles_compares_hashes_and_takes_a_place_in_a_set(domain, device):
    with (
        warpipe.Publisher("frames", domain=domain, device=device) as publisher,
        warpipe.Subscriber("frames", domain=domain, device=device),
        warpipe.Queue("jobs", domain=domain, device=device) as queue,
        warpipe.Worker("jobs", domain=domain, device=device),
        warpipe.Pool.create("blocks", domain=domain, device=device) as pool,
        warpipe.Members.watch(domain) as members,
        warpipe.Member.join("renderer", domain=domain),
    ):
        publisher.wait_for_subscribers(1, LIMIT_SECONDS)
        queue.wait_for_workers(1, LIMIT_SECONDS)
        change = members.changes(LIMIT_SECONDS)
        previous = warpipe.PreviousPublisher(pid=1, graceful=True)
        given = [*publisher.subscribers, queue.state, pool.stats, change, change.member, previous]
        given.append(warpipe.Discontinuity(missing=0, previous=previous))
    kinds = "SubscriberInfo QueueState PoolStats Change MemberInfo PreviousPublisher Discontinuity"
    assert [type(info).__name__ for info in given] == kinds.split()
    for info in given:
        again = pickle.loads(pickle.dumps(info))
        assert again == info and hash(again) == hash(info) and {again} == {info}
        assert copy.deepcopy(info) == info and type(again) is type(info) is getattr(warpipe, type(info).__name__)
        assert info != info._replace(**{info._fields[0]: "another"})
