"""Memory of other libraries in messages of multiprocessing: kept as long as it is used, and given back by the dead."""

import concurrent.futures.process
import ctypes
import functools
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest
import storages
from conftest import DEVICE, LIMIT_SECONDS, until
from peers import kill, process, said, spawn
from test_interrupted import interrupted_elsewhere
from test_processes import kills

import warpipe
from warpipe import _allocations, _messages, _unclaimed, _warpipe
from warpipe._allocations import TABLE

HAS_PIECES = pytest.mark.skipif(DEVICE == "host", reason="the host's memory has no descriptors of pieces")
KINDS = pytest.mark.parametrize("make", [storages.plain, pytest.param(storages.in_pieces, marks=HAS_PIECES)])


# A thread that looks at shares does not end with an exception.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture(autouse=True)
def configured(domain):
    """Names of this process's storages lie in the test's domain."""
    before = TABLE.options
    storages.configure(domain)
    yield
    until(lambda: TABLE.stats()["bytes"] == 0, "the end of all shares")
    for server, _ in TABLE.servers.values():
        server.close()
    TABLE.begin()
    TABLE.options = before
    _messages.leave()
    storages.Source.warned.clear()


def counts():
    found = TABLE.stats()
    return found["unclaimed"], found["claimed"]


def gone(block):
    """Looks whether a block is kept by anything."""
    reference = weakref.ref(block)

    def is_gone():
        gc.collect()
        return reference() is None

    return is_gone


@KINDS
def test_a_storage_is_the_same_memory_in_its_receiver_and_kept_until_that_releases_it(device, make):
    block = make(device)
    with process(storages.write_into) as (_, pipe):
        pipe.send(block)
        assert said(pipe) == (["hello"], 1)
        assert block.text == "there" and counts() == (0, 1)
        is_gone = gone(block)
        del block
        assert not is_gone()
        pipe.send("release")
        assert said(pipe) == "released"
        until(is_gone, "the end of the storage")
        assert counts() == (0, 0)


def test_a_storage_is_one_in_its_receiver_within_a_message_and_across_messages(device):
    block = storages.plain(device)
    with process(storages.write_into) as (_, pipe):
        pipe.send((block, block))
        assert said(pipe) == (["hello", "there"], 1)
        block.write("again")
        pipe.send(block)
        assert said(pipe) == (["again"], 1)
        # The later share is over, and the first one holds it.
        until(lambda: counts() == (0, 1), "the end of the second share")
        pipe.send(storages.plain(device, "other"))
        assert said(pipe) == (["other"], 2)
        pipe.send("end")


def test_a_storage_that_is_sent_again_after_its_release_is_the_present_one(device):
    with process(storages.write_into) as (_, pipe):
        for text in ("first", "later"):
            pipe.send(storages.plain(device, text))
            assert said(pipe) == ([text], 1)
            pipe.send("release")
            assert said(pipe) == "released"


def test_a_storage_that_is_sent_again_and_again_leaves_no_more_behind_than_one_that_is_sent_once(domain, device):
    block = storages.plain(device)
    with process(storages.write_into) as (_, pipe):
        for _ in range(50):
            pipe.send(block)
            said(pipe)
        until(lambda: len(TABLE.shared) <= 2, "the end of the shares that are over")
        pipe.send("end")
    with process(storages.send_again, domain, device.uuid) as (_, pipe):
        others = []
        for _ in range(50):
            pipe.send(True)
            received = pipe.recv()
            # Another object is where this one was.
            del received
            others.append(storages.Block(None))
        until(lambda: len(TABLE.opened) == 1 and len(TABLE.received_by_key) == 1, "the end of all but the last")
        pipe.send(False)


@HAS_PIECES
def test_a_segment_is_mapped_once_however_many_storages_lie_in_it(device):
    with process(storages.say_bytes_held, device) as (_, pipe):
        held = set()
        for number, part in enumerate(storages.segment(device, 20)):
            part.write(f"no {number:02}")
            pipe.send(part)
            text, nbytes = said(pipe)
            assert text == f"no {number:02}"
            held.add(nbytes)
        assert len(held) == 1 and counts() == (0, 20)
        pipe.send("end")


@kills
@KINDS
def test_a_killed_receiver_gives_back_what_it_had_open(device, make):
    block = make(device)
    with process(storages.write_into) as (child, pipe):
        pipe.send(block)
        assert said(pipe) == (["hello"], 1)
        is_gone = gone(block)
        del block
        kill(child)
        until(is_gone, "the end of the storage")


@kills
def test_an_argument_of_a_process_that_was_killed_before_it_received_it_is_given_back(device):
    ours, theirs = spawn.Pipe()
    block = storages.plain(device)
    child = spawn.Process(target=storages.started_with, args=(storages.Stall(theirs), block), daemon=True)
    child.start()
    assert said(ours) == "stalled"
    assert counts() == (1, 0)
    is_gone = gone(block)
    # A process has its arguments until it is started, and as long as it is referenced.
    del block
    kill(child)
    child.close()
    del child
    until(is_gone, "the end of the storage")


def test_an_argument_of_a_process_is_received_there(device):
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=storages.started_with, args=(theirs, storages.plain(device)), daemon=True)
    child.start()
    assert said(ours) == "hello"
    assert counts() == (0, 1)
    ours.send("end")
    child.join(LIMIT_SECONDS)
    assert child.exitcode == 0


def test_a_process_that_cannot_be_started_gives_its_arguments_back(device):
    block = storages.plain(device)
    with pytest.raises(ValueError, match="cannot be pickled"):
        spawn.Process(target=storages.started_with, args=(block, storages.Unpicklable())).start()
    assert counts() == (0, 0)


def test_a_process_that_no_server_starts_gives_its_arguments_back(device, monkeypatch):
    def refused(fds):
        raise ConnectionRefusedError("no server here")

    monkeypatch.setattr(multiprocessing.forkserver, "connect_to_new_process", refused)
    child = multiprocessing.get_context("forkserver").Process(target=storages.started_with, args=(None, storages.plain(device)))
    with pytest.raises(ConnectionRefusedError):
        child.start()
    assert counts() == (0, 0)


def test_a_forked_process_is_not_in_the_middle_of_its_own_start(device):
    child = multiprocessing.get_context("fork").Process(target=storages.end_in_no_message)
    child.start()
    child.join(LIMIT_SECONDS)
    assert child.exitcode == 0


def test_a_message_that_cannot_be_pickled_gives_its_storages_back(device):
    ours, theirs = spawn.Pipe()
    block = storages.plain(device)
    with pytest.raises(ValueError, match="cannot be pickled"):
        ours.send((block, storages.Unpicklable()))
    assert counts() == (0, 0)
    # The next message is sent as if the other had not been.
    ours.send(block)
    assert counts() == (1, 0)
    assert theirs.recv() is block


def test_an_order_holds_for_its_message_alone(device):
    queue = spawn.Queue()
    blocks = [storages.plain(device) for _ in range(3)]
    storages.Source.orders.clear()
    order = {0: "an event"}
    queue.put(_messages.Ordered((blocks[0], [blocks[1]]), order))
    queue.put(blocks[2])
    assert queue.get(timeout=LIMIT_SECONDS) == (blocks[0], [blocks[1]])
    assert queue.get(timeout=LIMIT_SECONDS) is blocks[2]
    assert storages.Source.orders == [order, order, {}]
    queue.close()
    queue.join_thread()


def test_a_queue_is_told_of_the_message_that_it_was_given_if_that_cannot_be_pickled(device):
    queue, told = spawn.Queue(), []
    queue._on_queue_feeder_error = lambda error, message: told.append((str(error), message))
    queue._on_queue_feeder_error.__name__ = "_on_queue_feeder_error"
    messages = storages.Unpicklable(), storages.Unpicklable()
    queue.put(_messages.Ordered(messages[0], {}))
    queue.put(messages[1])
    until(lambda: len(told) == 2, "the errors")
    assert told == [("cannot be pickled", message) for message in messages]
    queue.close()
    queue.join_thread()


def test_a_message_that_cannot_be_sent_gives_its_storages_back(device):
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    with pytest.raises(BrokenPipeError):
        ours.send(storages.plain(device))
    queue = multiprocessing.SimpleQueue()
    queue._reader.close()
    with pytest.raises(BrokenPipeError):
        queue.put(storages.plain(device))
    assert counts() == (0, 0)


@kills
def test_a_message_in_a_pipe_is_given_back_when_its_only_reader_is_killed(device):
    with process(storages.read_nothing) as (child, pipe):
        blocks = [storages.plain(device), storages.plain(device)]
        for block in blocks:
            pipe.send(block)
        assert counts() == (2, 0)
        is_gone = [gone(block) for block in blocks]
        del block, blocks
        later = [time.monotonic() + times * _unclaimed.GRACE_SECONDS for times in (1, 3)]
        for now in later:
            TABLE.unclaimed.look(now)
        assert counts() == (2, 0), "its reader is alive"
        kill(child)
        for now in later:
            TABLE.unclaimed.look(now)
        until(lambda: all(look() for look in is_gone), "the end of the storages")


def test_a_message_goes_while_no_thread_can_be_started_and_a_later_one_has_both_followed(device, monkeypatch):
    def refused(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    ours, theirs = multiprocessing.Pipe()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        ours.send(storages.plain(device))
    assert counts() == (1, 0), "the message was sent"
    ours.send(storages.plain(device))
    followed = [thread for thread in threading.enumerate() if thread.name == "warpipe-unclaimed"]
    assert followed and TABLE.unclaimed.is_followed
    assert [theirs.recv().text for _ in range(2)] == ["hello"] * 2
    until(lambda: not TABLE.unclaimed.waiting, "the look at both")


def test_an_interrupt_at_the_start_of_the_thread_takes_the_message_back_and_later_ones_are_followed(device, monkeypatch):
    def interrupted(thread):
        raise KeyboardInterrupt

    ours, theirs = multiprocessing.Pipe()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(threading.Thread, "start", interrupted)
        ours.send(storages.plain(device))
    assert counts() == (0, 0) and not TABLE.unclaimed.is_followed
    ours.send(storages.plain(device))
    assert TABLE.unclaimed.is_followed
    assert theirs.recv().text == "hello"


def test_a_share_whose_reader_waits_for_the_contents_is_followed_until_that_has_it_or_gives_it_back():
    class Ended:
        returncode = 0

    class Server:
        is_back = False

        def is_opened(self, number):
            return False

        def withdraw(self, number):
            return self.is_back

    unclaimed, server = _unclaimed.Unclaimed(), Server()
    unclaimed.waiting.append(_unclaimed.Waiting(server, 1, Ended(), None))
    unclaimed.look(0.0)
    assert len(unclaimed.waiting) == 1
    server.is_back = True
    unclaimed.look(0.0)
    assert unclaimed.waiting == []


def test_shares_are_followed_again_after_a_look_that_failed(device, monkeypatch):
    failed, told = threading.Event(), []
    monkeypatch.setattr(threading, "excepthook", told.append)

    def failing(now):
        failed.set()
        raise ValueError("a look that fails")

    ours, theirs = multiprocessing.Pipe()
    with monkeypatch.context() as patched:
        patched.setattr(TABLE.unclaimed, "look", failing)
        ours.send(storages.plain(device))
        assert failed.wait(LIMIT_SECONDS)
        until(lambda: told and not TABLE.unclaimed.is_followed, "the end of the thread, which is told")
    ours.send(storages.plain(device))
    assert TABLE.unclaimed.is_followed
    assert [theirs.recv().text for _ in range(2)] == ["hello"] * 2
    until(lambda: not TABLE.unclaimed.waiting, "the look at both")


def test_a_finalizer_may_send_a_storage_while_shares_are_looked_at(device):
    ours, theirs = multiprocessing.Pipe()

    def interrupted():
        # As a collection of garbage that begins there.
        with TABLE.unclaimed.lock:
            ours.send(storages.plain(device))

    thread = threading.Thread(target=interrupted, daemon=True)
    thread.start()
    thread.join(LIMIT_SECONDS)
    assert not thread.is_alive(), "it waits for itself"
    assert theirs.recv().text == "hello"


def test_a_message_that_was_read_from_a_pipe_which_was_closed_then_can_be_opened(device):
    ours, theirs = multiprocessing.Pipe()
    block = storages.plain(device)
    ours.send(block)
    message = theirs.recv_bytes()
    theirs.close()
    TABLE.unclaimed.look(time.monotonic())
    assert multiprocessing.reduction.ForkingPickler.loads(message) is block


def test_a_message_in_a_pipe_that_its_writer_closes_is_received(device):
    ours, theirs = multiprocessing.Pipe(duplex=False)
    block = storages.plain(device)
    theirs.send(block)
    theirs.close()
    TABLE.unclaimed.look(time.monotonic() + 10 * _unclaimed.GRACE_SECONDS)
    assert counts() == (1, 0)
    assert ours.recv() is block


@kills
def test_a_message_whose_reader_was_killed_is_given_back_once_later_ones_of_its_queue_are_received(device):
    queue = spawn.Queue()
    first, second = storages.plain(device, "first"), storages.plain(device, "later")
    is_gone = gone(first)
    with process(storages.read_queue, queue) as (reader, pipe), process(storages.read_queue, queue) as (_, other):
        queue.put(first)
        queue.put(second)
        pipe.send("bytes")
        assert said(pipe) == "read"
        kill(reader)
        del first
        now = time.monotonic()
        TABLE.unclaimed.look(now + 10 * _unclaimed.GRACE_SECONDS)
        assert not is_gone(), "nothing shows yet that it was read"
        other.send("get")
        assert said(other) == "later"
        TABLE.unclaimed.look(now)
        TABLE.unclaimed.look(now + _unclaimed.GRACE_SECONDS / 2)
        assert not is_gone(), "its reader may be slow"
        TABLE.unclaimed.look(now + 3 * _unclaimed.GRACE_SECONDS)
        until(is_gone, "the end of the storage")
        other.send("end")
    queue.close()
    queue.join_thread()


def test_a_message_that_a_queue_cannot_send_is_given_back_and_so_are_those_that_nobody_can_read(device, capsys):
    queue = spawn.Queue()
    queue.put(storages.plain(device, "first"))
    until(lambda: queue._reader.poll(), "the first message")
    # No other process has it open.
    queue._reader.close()
    queue.put(storages.plain(device, "later"))
    until(lambda: "BrokenPipeError" in capsys.readouterr().err, "the failure")
    until(lambda: counts() == (1, 0), "the end of the second message")
    queue.close()
    queue.join_thread()
    now = time.monotonic()
    TABLE.unclaimed.look(now + _unclaimed.GRACE_SECONDS / 2)
    assert counts() == (1, 0), "a process may have read it before"
    TABLE.unclaimed.look(now + 2 * _unclaimed.GRACE_SECONDS)
    assert counts() == (0, 0)


def test_a_message_in_a_queue_that_is_closed_when_nobody_can_read_it_is_given_back(device):
    queue = spawn.Queue()
    queue.put(storages.plain(device))
    until(lambda: queue._reader.poll(), "the message")
    queue.close()
    queue.join_thread()
    assert counts() == (1, 0)
    TABLE.unclaimed.look(time.monotonic() + 2 * _unclaimed.GRACE_SECONDS)
    assert counts() == (0, 0)


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_message_in_a_pipe_that_ends_when_nobody_can_read_it_is_given_back(device, is_closed):
    ours, theirs = multiprocessing.Pipe(duplex=False)
    theirs.send(storages.plain(device))
    # As the death of its only reader.
    ours.close()
    if is_closed:
        theirs.close()
    del theirs
    assert counts() == (1, 0)
    TABLE.unclaimed.look(time.monotonic() + 2 * _unclaimed.GRACE_SECONDS)
    assert counts() == (0, 0)


def test_an_interrupt_in_the_middle_of_a_close_leaves_no_descriptor(monkeypatch):
    ours, theirs = multiprocessing.Pipe(duplex=False)

    def interrupted(_pipe):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(_messages, "pipe_ends", [interrupted])
        theirs.close()
    # The end of what can be read.
    assert theirs.closed and ours.poll(0)
    ours.close()


def test_an_interrupt_wherever_it_comes_leaves_no_message_behind(device):
    """A message that could not be pickled to its end is taken back."""
    places, is_interrupted = set(), True
    while is_interrupted:
        (ours, theirs), block = multiprocessing.Pipe(), storages.plain(device)
        _, is_interrupted = interrupted_elsewhere(places, lambda: ours.send(block))  # noqa: B023
        assert _messages.current() is None
        assert counts() == (int(theirs.poll()), 0)
        if theirs.poll():
            assert theirs.recv().text == "hello"


def test_a_signal_in_the_middle_of_sharing_leaves_no_share_whose_number_is_lost(domain, device):
    server = _warpipe._AllocationServer("interrupted", device, domain)
    view = _warpipe._allocate_plain(storages.NBYTES, device)
    # No function of Python runs, in which its handler would.
    arrives = map(ctypes.CDLL(None)["raise"], [signal.SIGINT])

    class Address:
        __index__ = staticmethod(functools.partial(sum, arrives, view.ptr))

    with pytest.raises(KeyboardInterrupt):
        server.share(Address(), view.nbytes, object(), stream=None)
    assert server.stats()["unclaimed"] == 0
    server.close()


class Finalized:
    """Sends something of its own in the middle of another message, as a finalizer that runs there."""

    def __init__(self, pipe, device):
        self.pipe, self.device = pipe, device

    def __reduce__(self):
        self.pipe.send(storages.plain(self.device, "other"))
        return str, ()


def test_what_a_finalizer_sends_in_the_middle_of_a_message_stays_when_that_fails(device):
    (ours, theirs), (other, others) = multiprocessing.Pipe(), multiprocessing.Pipe()
    with pytest.raises(ValueError, match="cannot be pickled"):
        ours.send((Finalized(other, device), storages.plain(device), storages.Unpicklable()))
    assert counts() == (1, 0)
    assert others.recv().text == "other"


def test_a_failure_to_take_one_share_back_leaves_no_other(device):
    class Failing:
        def __reduce__(self):
            _messages.current().take_back.append((lambda: 1 / 0,))
            return str, ()

    ours, theirs = multiprocessing.Pipe()
    with pytest.raises(ZeroDivisionError):
        ours.send((Failing(), storages.plain(device), storages.Unpicklable()))
    assert counts() == (0, 0)


def test_a_message_may_be_given_by_the_name_of_its_argument():
    ours, theirs = multiprocessing.Pipe(duplex=False)
    queue = spawn.SimpleQueue()
    theirs.send(obj="sent")
    queue.put(obj="put")
    assert (ours.recv(), queue.get()) == ("sent", "put")


@kills
def test_the_tasks_of_an_executor_are_given_back_when_its_worker_is_killed(device):
    with concurrent.futures.ProcessPoolExecutor(1, spawn) as executor:
        worker = executor.submit(os.getpid).result(LIMIT_SECONDS)
        busy = executor.submit(signal.pause)
        until(busy.running, "the start")
        tasks = [executor.submit(id, storages.plain(device)) for _ in range(3)]
        until(lambda: counts()[0] > 0, "the first message")
        os.kill(worker, signal.SIGKILL)
        for task in (busy, *tasks):
            with pytest.raises(concurrent.futures.process.BrokenProcessPool):
                task.result(LIMIT_SECONDS)
    del busy, tasks, task
    TABLE.unclaimed.look(time.monotonic() + 2 * _unclaimed.GRACE_SECONDS)
    assert counts() == (0, 0)


def test_a_message_that_failed_to_be_pickled_does_not_show_that_earlier_ones_were_read(device, capsys):
    queue = spawn.Queue()
    kept = storages.plain(device, "first")
    queue.put(kept)
    queue.put((storages.plain(device), storages.Unpicklable()))
    until(lambda: counts() == (1, 0) and "cannot be pickled" in capsys.readouterr().err, "the end of the second message")
    now = time.monotonic()
    for later in (0, 10):
        TABLE.unclaimed.look(now + later * _unclaimed.GRACE_SECONDS)
    assert counts() == (1, 0)
    assert queue.get(timeout=LIMIT_SECONDS) is kept
    queue.close()
    queue.join_thread()


@HAS_PIECES
@kills
def test_memory_in_pieces_stays_valid_after_its_sender_as_long_as_its_receiver_uses_it(domain, device):
    before = device.bytes_held
    with process(storages.send_blocks, domain, device, storages.in_pieces) as (sender, pipe):
        block = said(pipe)
        kill(sender)
        TABLE.received(id(block)).check()
        assert block.text == "first"
        block.write("still")
        assert block.text == "still"
        del block
        assert TABLE.clients
        until(lambda: gc.collect() >= 0 and device.bytes_held == before, "the end of the mapping")


@kills
def test_other_memory_is_reported_after_its_sender(domain, device):
    with process(storages.send_blocks, domain, device, storages.plain) as (sender, pipe):
        block = said(pipe)
        received = TABLE.received(id(block))
        received.check()
        assert block.text == "first"
        kill(sender)
        said_by_error = rf"block of 64 bytes of process {sender.pid} \(.*\) cannot be used any more: .*; its memory went with the process"
        with pytest.raises(warpipe.PeerGoneError, match=said_by_error):
            until(lambda: received.check(), "the error")
        ours, _ = spawn.Pipe()
        with pytest.raises(warpipe.PeerGoneError, match="cannot be used any more"):
            ours.send(block)


@kills
def test_a_storage_whose_sender_is_dead_is_named_in_the_error(domain, device):
    with process(storages.send_blocks, domain, device, storages.plain) as (sender, pipe):
        until(lambda: pipe.poll(0.01), "the message")
        kill(sender)
        said_by_error = rf"block of 64 bytes of process {sender.pid} \(.*\) went with its process: .*; keep the sender running"
        with pytest.raises(warpipe.PeerGoneError, match=said_by_error):
            pipe.recv()


def test_a_pool_tells_of_a_storage_that_cannot_be_opened_and_goes_on(domain, device):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        with pytest.raises(warpipe.PeerGoneError, match="block of 64 bytes of process 1 .*went with its process"):
            pool.apply_async(storages.text_of, (storages.Gone(domain, device),)).get(LIMIT_SECONDS)
        # Of a result: where it is used.
        found = pool.apply_async(storages.gone_from, (domain, device.uuid)).get(LIMIT_SECONDS)
        for use in (lambda: found.text, lambda: found + 1, lambda: len(found), lambda: pickle.dumps(found)):
            with pytest.raises(warpipe.PeerGoneError, match="went with its process"):
                use()
        assert pool.apply_async(abs, (-1,)).get(LIMIT_SECONDS) == 1


def test_storages_go_by_the_domain_that_is_asked_for_now(device, domain, tmp_path):
    for folder in (domain.path, tmp_path / "other", domain.path):
        storages.configure(folder)
        with process(storages.write_into) as (_, pipe):
            pipe.send(storages.plain(device))
            assert said(pipe) == (["hello"], 1)
            assert any(one.alive for one in warpipe.Domain(folder).endpoints())
            pipe.send("end")


def test_a_receiver_in_another_folder_finds_the_sender(device, tmp_path, monkeypatch):
    with process(storages.write_into) as (_, pipe):
        monkeypatch.chdir(tmp_path)
        storages.configure("names")
        pipe.send(storages.plain(device))
        assert said(pipe) == (["hello"], 1)
        pipe.send("end")


def test_a_storage_that_cannot_be_sent_is_named_in_the_error(device, tmp_path):
    storages.configure(tmp_path / "not" / "there")
    ours, _ = multiprocessing.Pipe()
    with pytest.raises(warpipe.DomainError, match="block of 64 bytes cannot be sent: .*cannot be made"):
        ours.send(storages.plain(device))
    assert counts() == (0, 0)


def test_a_receiver_whose_environment_names_another_domain_finds_the_sender(device, tmp_path, monkeypatch):
    TABLE.options = _allocations.Options()
    monkeypatch.setenv("WARPIPE_DOMAIN", str(tmp_path / "ours"))
    ours, theirs = multiprocessing.Pipe()
    block = storages.plain(device)
    ours.send(block)
    assert theirs.recv() is block
    monkeypatch.setenv("WARPIPE_DOMAIN", str(tmp_path / "theirs"))
    with process(storages.write_into) as (_, pipe):
        monkeypatch.setenv("WARPIPE_DOMAIN", str(tmp_path / "ours"))
        pipe.send(block)
        assert said(pipe) == (["hello"], 1)
        pipe.send("end")


@HAS_PIECES
@kills
def test_memory_of_the_allocator_for_pytorch_is_read_by_others_alone_and_outlives_its_process(domain, device):
    with process(storages.send_blocks, domain, device, storages.of_allocator) as (sender, pipe):
        block = said(pipe)
        assert block.view.__cuda_array_interface__["data"][1], "it is read-only"
        with pytest.raises(warpipe.ArgumentError, match="read"):
            block.write("first")
        found = block.text
        kill(sender)
        TABLE.received(id(block)).check()
        assert block.text == found


@HAS_PIECES
def test_the_allocator_for_pytorch_gives_memory_back(device):
    before = device.bytes_held
    memory = storages.Allocated(device)
    assert device.bytes_held > before
    library = storages.allocator()
    library.warpipe_torch_free(memory.address, storages.NBYTES, device.ordinal, None)
    # What it does not know is not its to free, and what cannot be allocated is null.
    library.warpipe_torch_free(memory.address, storages.NBYTES, device.ordinal, None)
    assert library.warpipe_torch_allocate(1 << 60, device.ordinal, None) is None
    assert library.warpipe_torch_allocate(1, 1000, None) is None
    assert library.warpipe_torch_allocate(-1, device.ordinal, None) is None
    until(lambda: device.bytes_held == before, "the end of the memory")


def test_a_message_that_is_read_twice_is_one_storage_and_afterwards_an_error(domain, device):
    with process(storages.send_blocks, domain, device, storages.plain) as (sender, pipe):
        message = pipe.recv_bytes(1 << 16)
        load = multiprocessing.reduction.ForkingPickler.loads
        block = load(message)
        assert load(message) is block
        del block
        gc.collect()
        with pytest.raises(warpipe.NotFoundError, match=rf"process {sender.pid} .*one receiver; put it once for each"):
            load(message)
        pipe.send("end")


def test_a_storage_that_comes_back_to_its_process_is_itself(device):
    ours, theirs = multiprocessing.Pipe()
    block = storages.plain(device)
    ours.send((block, block))
    assert theirs.recv() == (block, block)
    assert counts() == (0, 0)


@KINDS
def test_a_received_storage_is_sent_on_as_a_copy_which_is_said(domain, device, make):
    block = make(device)
    with process(storages.pass_on, domain, True) as (_, pipe):
        pipe.send(block)
        first, second = said(pipe), said(pipe)
        assert (first.text, second.text) == ("hello", "hello")
        first.write("first")
        assert (block.text, second.text) == ("hello", "hello")
        (reason, _) = said(pipe)
        assert f"of process {os.getpid()}" in reason
        pipe.send("end")


def test_a_received_storage_that_is_sent_on_is_an_error_if_copies_are_not_allowed(domain, device):
    with process(storages.pass_on, domain, False) as (_, pipe):
        pipe.send(storages.plain(device))
        for _ in range(2):
            name, text = said(pipe)
            assert name == "NotExportableError"
            assert text.startswith("block of 64 bytes cannot be given to another process") and "install(copy=True)" in text
        assert said(pipe) == []
        pipe.send("end")


def test_shares_that_nobody_receives_keep_no_process_from_ending(domain, device):
    with process(storages.send_and_end, domain, device) as (child, pipe):
        child.join(LIMIT_SECONDS)
        assert child.exitcode == 0
        with pytest.raises(warpipe.PeerGoneError, match="went with its process"):
            pipe.recv()
        assert pipe.recv() == "ends"


ENDS = """
import multiprocessing, storages, sys
if __name__ == "__main__":
    storages.configure(sys.argv[1])
    queue = multiprocessing.get_context("spawn").Queue()
    queue.cancel_join_thread()
    for _ in range(10):
        queue.put(storages.plain(sys.argv[2]))
    while storages.TABLE.stats()["unclaimed"] < 10:
        pass
    print("ends")
"""


def test_the_thread_that_looks_at_shares_keeps_no_program_from_ending(domain, device, tmp_path):
    program = tmp_path / "ends.py"
    program.write_text(ENDS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    done = subprocess.run(
        [sys.executable, str(program), str(domain.path), device.kind], capture_output=True, text=True, timeout=60, env=environment
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "ends", "")


def test_a_forked_child_begins_without_its_parents_shares(device):
    ours, theirs = multiprocessing.Pipe()
    ours.send(storages.plain(device))
    assert counts() == (1, 0)
    child = os.fork()
    if child == 0:
        # Without pytest's end.
        os._exit(0 if TABLE.stats()["unclaimed"] == 0 and TABLE.servers == {} else 1)
    assert os.waitpid(child, 0)[1] == 0
    theirs.recv()
