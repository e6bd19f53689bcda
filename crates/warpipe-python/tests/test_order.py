"""Timelines, events and semaphores between processes, and the members of a domain."""

import gc
import pickle
import threading

import pytest
from conftest import until
from peers import LIMIT_SECONDS, join_and_wait, kill, process, said, signal_when_told
from test_processes import kills, place  # noqa: F401
from test_waits import Interrupted, a_signal_soon

import warpipe


@pytest.fixture
def where(domain, device):
    return {"domain": domain, "device": device}


@pytest.fixture
def streams(device):
    return warpipe.Stream(device), warpipe.Stream(device)


# Timelines.


def test_a_stream_waits_for_a_value_of_another(where, streams):
    writing, reading = streams
    with warpipe.Timeline.create("frames", **where) as owner, warpipe.Timeline.open("frames", **where) as frames:
        assert (owner.is_owner, frames.is_owner, frames.name, frames.value) == (True, False, "frames", 0)
        frames.wait(1, stream=reading)
        assert not reading.is_idle() and not frames.check(1)
        # From the CPU: in one process, a stream's wait may hold up another stream's signal.
        owner.signal(1)
        reading.synchronize()
        assert frames.check(1) and frames.value == 1
        owner.signal(2, stream=writing)
        frames.wait(2, stream=reading)
        reading.synchronize()
        frames.wait(2)
        assert frames.value == 2


@pytest.fixture
def written_later(where, device):
    """Memory, another mapping of it, and a function that writes it through a third one, then signals a stream."""
    source = warpipe.Memory.allocate(16, device=device)
    with source.publish("source", domain=where["domain"], writable=True) as published:
        shared, writer = (published.ticket().open(device=device) for _ in range(2))
    with warpipe.Timeline.create("written", **where) as owner, warpipe.Timeline.open("written", **where) as written:
        stream = warpipe.Stream(device)
        written.wait(1, stream=stream)

        def write():
            writer.write(b"sixteen bytes...")
            owner.signal(1)

        yield source, shared, stream, write
    for memory in (source, shared, writer):
        memory.release()


def test_a_copy_of_shared_memory_is_done_when_its_stream_comes_to_it(device, written_later):
    source, shared, stream, write = written_later
    targets = [warpipe.Memory.allocate(16, device=device) for _ in range(2)]
    targets[0].copy_from(source, stream=stream)
    targets[1].copy_from(shared.view(16, "uint8"), stream=stream)
    # It is kept until then.
    shared.release()
    assert not stream.is_idle()
    write()
    assert [target.tobytes() for target in targets] == [b"sixteen bytes..."] * 2


def test_a_send_of_shared_memory_reads_it_when_its_stream_comes_to_it(written_later, open_publisher, open_subscriber):
    source, _shared, stream, write = written_later
    publisher, subscriber = open_publisher(), open_subscriber()
    publisher.send(source, stream=stream)
    write()
    with subscriber.receive() as frame:
        assert frame.tobytes() == b"sixteen bytes..."


def waiter(wait):
    """A thread that waits, and what becomes of that."""
    ended = []

    def run():
        try:
            wait()
        except warpipe.Error as error:
            ended.append(type(error))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ended


def test_closing_ends_the_waits_of_other_threads_and_gives_the_name_up(where, device):
    stream = warpipe.Stream(device)
    owner, gate = warpipe.Timeline.create("gate", **where), warpipe.Timeline.open("gate", **where)
    gate.wait(1, stream=stream)
    timeline, event = warpipe.Timeline.create("t", **where), warpipe.Event.create(**where)
    semaphore = warpipe.Semaphore.create("s", 1, **where)
    event.record(stream=stream)
    permit = semaphore.acquire()
    waits = [
        (timeline, lambda: timeline.wait(1, timeout=None)),
        (event, lambda: event.synchronize(None)),
        (semaphore, lambda: semaphore.acquire(timeout=None)),
        (semaphore, lambda: semaphore.acquire(None, stream=warpipe.Stream(device))),
    ]
    waiting = [(*waiter(wait), closed) for closed, wait in waits]
    until(lambda: semaphore.waiting == 2, "two that wait for a permit")
    for _thread, _ended, closed in waiting:
        closed.close()
    for thread, ended, _closed in waiting:
        thread.join(LIMIT_SECONDS)
        assert ended == [warpipe.ClosedError]
    permit.release()
    owner.signal(1)
    stream.synchronize()
    gate.close()
    owner.close()
    warpipe.Timeline.create("t", **where).close()

    def is_free():
        try:
            warpipe.Semaphore.create("s", 1, **where).close()
            return True
        except warpipe.NameTakenError:
            return False

    # The waiter leaves the queue on a thread of its own.
    until(is_free, "the semaphore's name")


def test_who_is_interrupted_leaves_the_line(where):
    with warpipe.Semaphore.create("s", 1, **where) as semaphore, semaphore.acquire():
        with pytest.raises(Interrupted), a_signal_soon():
            semaphore.acquire(timeout=None)
        until(lambda: semaphore.waiting == 0, "an empty line")


def test_what_a_timeline_cannot_do_is_said(where, streams):
    owner = warpipe.Timeline.create("frames", **where)
    frames = warpipe.Timeline.open("frames", **where)
    owner.signal(3)
    with pytest.raises(warpipe.ArgumentError, match='value is 2; allowed is above 3, to which timeline "frames"'):
        owner.signal(2, stream=streams[0])
    with pytest.raises(warpipe.RefusedError):
        frames.signal(4)
    with pytest.raises(warpipe.TimeoutError, match="value 9"):
        frames.wait(9, timeout=0.01)
    with pytest.raises(warpipe.NameTakenError):
        warpipe.Timeline.create("frames", **where)
    with pytest.raises(warpipe.OtherKindError):
        warpipe.Semaphore.open("frames", **where)
    with pytest.raises(warpipe.NotFoundError) as nobody:
        warpipe.Timeline.open("others", **where)
    assert (nobody.value.kind, nobody.value.was_there) == ("timeline", False)
    owner.close()
    owner.close()
    with pytest.raises(warpipe.ClosedError):
        owner.signal(5)
    with pytest.raises(warpipe.PeerGoneError):
        frames.wait(9, timeout=LIMIT_SECONDS)


@pytest.mark.parametrize("wait", ["timeline", "event", "permit", "owner", "changes"])
def test_a_signal_ends_the_wait(where, streams, wait):
    timeline = warpipe.Timeline.create("frames", **where)
    event = warpipe.Event.create(**where)
    semaphore = warpipe.Semaphore.create("turns", **where)
    held = semaphore.acquire()
    members = warpipe.Members.watch(where["domain"])
    opened = warpipe.Timeline.open("frames", **where)
    opened.wait(1, stream=streams[0])
    event.record(stream=streams[0])
    waits = {
        "timeline": lambda: opened.wait(1, timeout=None),
        "event": lambda: event.synchronize(None),
        "permit": lambda: semaphore.acquire(timeout=None),
        "owner": lambda: warpipe.Timeline.open("nobody", wait=None, **where),
        "changes": lambda: members.changes(None),
    }
    with pytest.raises(Interrupted), a_signal_soon():
        waits[wait]()
    timeline.signal(1)
    event.synchronize()
    held.release()
    # A permit that came after the signal was handed on.
    semaphore.acquire(timeout=LIMIT_SECONDS).release()
    members.close()


# Events.


def test_an_event_is_opened_by_its_handle_in_every_form(where, streams, device):
    event = warpipe.Event.create(**where)
    handle = event.handle()
    writing, reading = streams
    forms = [handle, str(handle), handle.to_bytes(), pickle.loads(pickle.dumps(handle))]
    assert warpipe.EventHandle(str(handle)) == handle and hash(warpipe.EventHandle(handle.to_bytes())) == hash(handle)
    for form in forms:
        other = warpipe.Event.open(form, device=device)
        with pytest.raises(warpipe.EventNotRecordedError):
            warpipe.Event.create(**where).query()
        event.record(stream=writing)
        recording = other.wait(stream=reading)
        reading.synchronize()
        assert other.check(recording) and other.query()
        other.synchronize()
    with pytest.raises(warpipe.HandleError, match="a usable event handle"):
        warpipe.EventHandle("warpipe-event:00")
    with pytest.raises(warpipe.ArgumentError):
        warpipe.Event.open(7, device=device)


# Semaphores.


def test_a_permit_is_held_for_the_block_and_one_that_waits_gets_it(where, streams):
    semaphore = warpipe.Semaphore.create("turns", 1, **where)
    same = warpipe.Semaphore.open("turns", **where)
    with semaphore.acquire(stream=streams[0], timeout=1.0) as permit:
        assert semaphore.available == 0 and not permit.released and same.try_acquire() is None
        with pytest.raises(warpipe.TimeoutError):
            same.acquire(timeout=0.01, stream=streams[1])
        waiter = threading.Thread(target=lambda: same.acquire(timeout=LIMIT_SECONDS).release())
        waiter.start()
        until(lambda: semaphore.waiting == 1, "the waiter")
    assert permit.released
    waiter.join(LIMIT_SECONDS)
    assert not waiter.is_alive() and semaphore.available == 1
    permit.release()
    with pytest.raises(warpipe.ArgumentError):
        warpipe.Semaphore.create("none", 0, **where)


def test_the_next_holders_stream_waits_for_the_last_ones_work(where, streams):
    """The first holder's stream is stopped by a timeline; released, its permit goes on and its work does not."""
    first, second = streams
    gate = warpipe.Timeline.create("gate", **where)
    opened = warpipe.Timeline.open("gate", **where)
    semaphore = warpipe.Semaphore.create("turns", **where)
    with semaphore.acquire(stream=first):
        opened.wait(1, stream=first)
    with semaphore.acquire(stream=second):
        assert not second.is_idle()
        gate.signal(1)
        second.synchronize()


def test_a_permit_that_is_dropped_is_released(where):
    semaphore = warpipe.Semaphore.create("turns", **where)
    permit = semaphore.acquire()
    del permit
    gc.collect()
    assert semaphore.available == 1


# In other processes.


@kills
def test_the_death_of_an_owner_is_told(place, where, streams):  # noqa: F811
    with process(signal_when_told, *place) as (child, pipe):
        handle = said(pipe)
        timeline = warpipe.Timeline.open("frames", wait=LIMIT_SECONDS, **where)
        semaphore = warpipe.Semaphore.open("turns", wait=LIMIT_SECONDS, **where)
        event = handle.open(device=where["device"])
        for word in ("signal", "record"):
            pipe.send(word)
            assert said(pipe) == word
        timeline.wait(1, stream=streams[0])
        event.wait(stream=streams[0])
        streams[0].synchronize()
        assert timeline.check(1) and event.query()
        with pytest.raises(warpipe.TimeoutError):
            semaphore.acquire(timeout=0.01)
        pipe.send("release")
        assert said(pipe) == "release"
        semaphore.acquire(timeout=LIMIT_SECONDS).release()
        timeline.wait(2, stream=streams[1])
        kill(child)
        streams[1].synchronize(LIMIT_SECONDS)
        with pytest.raises(warpipe.PeerGoneError) as gone:
            timeline.check(2)
        assert (gone.value.pid, gone.value.graceful, gone.value.kind) == (child.pid, False, "timeline")


# Members.


@kills
def test_members_are_followed_from_joining_to_death(domain):
    with warpipe.Members.watch(domain) as members:
        with process(join_and_wait, str(domain.path), "worker/0") as (child, pipe):
            generation = said(pipe)
            joined = members.changes(LIMIT_SECONDS)
            assert (joined.what, joined.member.name, joined.member.role) == ("joined", "worker/0", "sampler")
            assert (joined.member.pid, joined.member.generation, joined.member.state) == (child.pid, generation, "alive")
            assert [member.name for member in members.list()] == ["worker/0"]
            dead = []
            members.on_death_of("worker/0", lambda member: dead.append(member.pid))
            kill(child)
            for change in members:
                if change.what == "died":
                    break
            until(lambda: dead, "the clean-up")
            assert dead == [child.pid] and members.list() == []


def test_callbacks_get_the_changes_and_one_that_raises_stops_nothing(domain, monkeypatch):
    heard, raised = [], []
    monkeypatch.setattr("sys.unraisablehook", lambda what: raised.append(what.exc_value))

    def hear(change):
        heard.append((change.what, change.member.name))
        raise ValueError("not for the watch")

    members = warpipe.Members.watch(domain, on=hear)
    with pytest.raises(warpipe.ArgumentError):
        members.changes(0.0)
    with warpipe.Member.join("a", domain=domain) as member:
        assert (member.name, member.role, member.closed) == ("a", "", False)
        until(lambda: ("joined", "a") in heard, "the callback")
    until(lambda: ("left", "a") in heard, "the second callback")
    assert raised and all(isinstance(error, ValueError) for error in raised)
    members.close()


def test_closing_a_watch_ends_the_iteration(domain):
    members = warpipe.Members.watch(domain)
    seen = []
    thread = threading.Thread(target=lambda: seen.extend(members))
    thread.start()
    with warpipe.Member.join("a", domain=domain):
        until(lambda: seen, "the change")
    members.close()
    thread.join(LIMIT_SECONDS)
    assert not thread.is_alive() and seen[0].what == "joined"
