"""The channel: loans, frames, policies, history, metadata, and the ends of endpoints."""

import contextlib
import os
import time

import numpy as np
import pytest
from conftest import until

import warpipe
from warpipe import _warpipe


def test_what_is_sent_is_received_with_its_shape_type_and_sequence(link):
    publisher, subscriber = link
    data = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    assert publisher.send(data) == 1
    frame = subscriber.receive()
    assert (frame.shape, frame.dtype, frame.sequence, frame.nbytes) == ((2, 3, 4), "int16", 1, 48)
    assert (frame.ndim, frame.size, frame.strides) == (3, 24, (12, 4, 1))
    assert (frame.sent_at_ns, frame.received_at_ns) == (None, None)
    np.testing.assert_array_equal(frame.numpy(), data)


def test_frames_say_when_they_were_sent_and_received_if_their_publisher_wants_it(domain, device):
    before = time.monotonic_ns()
    with warpipe.Publisher("stamps", domain=domain, device=device, timestamps=True, history=1) as publisher:
        publisher.send(np.zeros(4))
        # A frame of the history tells when it was sent at first.
        sent = time.monotonic_ns()
        with warpipe.Subscriber("stamps", domain=domain, device=device) as late:
            frame = late.receive()
            assert before <= frame.sent_at_ns <= sent <= frame.received_at_ns <= time.monotonic_ns()


def test_a_source_may_be_changed_as_soon_as_it_is_sent(link):
    publisher, subscriber = link
    data = np.ones(1000)
    publisher.send(data)
    data[:] = 0
    assert (subscriber.receive().numpy() == 1).all()


def test_a_loan_is_sent_at_the_end_of_its_block(link, device):
    publisher, subscriber = link
    if device.kind == "cuda":
        pytest.skip("a loan on a GPU is written by a framework: see test_frameworks")
    with publisher.loan((2, 3), "float32", metadata={"n": 1}) as out:
        out[:] = 7
        out[1, 2] = 8
        assert out[1, 1] == 7
        assert (out.shape, out.dtype, out.nbytes, out.ndim, out.size) == ((2, 3), "float32", 24, 2, 6)
        assert subscriber.try_receive() is None
    frame = subscriber.receive()
    np.testing.assert_array_equal(frame.numpy(), [[7, 7, 7], [7, 7, 8]])
    assert frame.metadata == {"n": 1}


def test_a_loan_whose_block_raises_is_not_sent(link):
    publisher, subscriber = link
    with pytest.raises(ZeroDivisionError), publisher.loan(4, "uint8"):
        raise ZeroDivisionError
    publisher.send(b"next")
    assert subscriber.receive().tobytes() == b"next"


def test_a_loan_that_is_sent_or_discarded_cannot_be_used(link):
    publisher, subscriber = link
    sent, discarded = publisher.loan(4, "uint8"), publisher.loan(4, "uint8")
    sent.send()
    discarded.discard()
    discarded.discard()
    for loan in (sent, discarded):
        assert loan.released
        for use in (loan.send, loan.__dlpack__, lambda: loan.ptr, lambda: loan.set_metadata({})):
            with pytest.raises(warpipe.ReleasedError, match="no longer held"):
                use()
    assert subscriber.receive().nbytes == 4


def test_metadata_is_a_small_dict(link):
    publisher, subscriber = link
    metadata = {"exposure": 8.5, "name": "front ü", "tags": [1, None, True], "deep": {"a": {}}}
    publisher.send(b"x", metadata=metadata)
    publisher.send(b"x")
    publisher.send(b"x", metadata=b"\xff\x00")
    assert subscriber.receive().metadata == metadata
    assert subscriber.receive().metadata == {}
    raw = subscriber.receive()
    assert raw.metadata_bytes == b"\xff\x00"
    with pytest.raises(warpipe.MetadataError, match="metadata_bytes"):
        raw.metadata


@pytest.mark.parametrize("metadata", [bytearray(b"\xff\x00"), memoryview(b"\xff.\x00.")[::2], np.array([[0xFF], [0]], np.uint8)])
def test_metadata_may_be_any_buffer(link, metadata):
    publisher, subscriber = link
    publisher.send(b"x", metadata=metadata)
    assert subscriber.receive().metadata_bytes == b"\xff\x00"


def test_what_ends_the_program_is_no_error_of_metadata(link):
    class Ending(dict):
        def items(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        link[0].send(b"x", metadata=Ending(a=1))


@pytest.mark.parametrize("metadata", [{"a": "x" * 5000}, {"a": float("nan")}, {"a": object()}, [1], "text", {"a": "\ud800"}])
def test_metadata_that_cannot_travel_is_refused_and_nothing_is_sent(link, metadata):
    publisher, subscriber = link
    with pytest.raises(warpipe.MetadataError):
        publisher.send(b"x", metadata=metadata)
    assert subscriber.try_receive() is None


def test_a_late_subscriber_gets_the_history_first(open_publisher, open_subscriber):
    publisher = open_publisher(history=2)
    for number in range(5):
        publisher.send(bytes([number]))
    subscriber = open_subscriber()
    assert [subscriber.receive().tobytes() for _ in range(2)] == [b"\x03", b"\x04"]


def test_drop_oldest_keeps_the_newest_and_counts_what_is_lost(open_publisher, open_subscriber, device):
    publisher, subscriber = open_publisher(policy="drop_oldest", depth=2), open_subscriber()
    stream = warpipe.Stream(device)
    for number in range(5):
        # Filled on this stream alone: a copy from the host would be on the publisher's, and so
        # would be the sample's word.
        loan = publisher.loan(1, "uint64")
        _warpipe._slow_fill(loan, stream, number, 0.0)
        loan.send(stream=stream)
        # A place in the ring is taken back only when the device has written its word.
        stream.synchronize()
    wanted = [_warpipe._pattern(number, 0).to_bytes(8, "little") for number in (3, 4)]
    assert [subscriber.receive().tobytes() for _ in range(2)] == wanted
    assert subscriber.dropped == 3


def test_drop_newest_keeps_the_oldest(open_publisher, open_subscriber):
    publisher, subscriber = open_publisher(policy="drop_newest", depth=2), open_subscriber()
    for number in range(5):
        publisher.send(bytes([number]))
    assert [subscriber.receive().tobytes() for _ in range(2)] == [b"\x00", b"\x01"]
    assert publisher.subscribers[0].dropped == 3


def test_a_policy_of_failing_fails_with_the_depth(open_publisher, open_subscriber):
    publisher, _subscriber = open_publisher(policy="fail", depth=1), open_subscriber()
    publisher.send(b"1")
    with pytest.raises(warpipe.FullError, match="raise the depth") as failed:
        publisher.send(b"2")
    assert failed.value.depth == 1


def test_a_blocked_send_times_out_and_succeeds_once_there_is_room(open_publisher, open_subscriber):
    publisher, subscriber = open_publisher(depth=1, timeout=0.12), open_subscriber()
    publisher.send(b"1")
    with pytest.raises(warpipe.TimeoutError, match="room at subscriber") as late:
        publisher.send(b"2")
    assert late.value.waited == pytest.approx(0.12)
    subscriber.receive().release()

    def is_sent():
        # The release is behind the work of a stream.
        with contextlib.suppress(warpipe.TimeoutError):
            return publisher.send(b"3")

    until(is_sent, "room")
    assert subscriber.receive().tobytes() == b"3"


def test_memory_in_use_is_a_limit_that_says_its_bytes(open_publisher, open_subscriber):
    publisher, subscriber = open_publisher(memory_limit=4 << 20, loan_timeout=0.1), open_subscriber()
    publisher.send(np.zeros(4 << 20, np.uint8))
    held = subscriber.receive()
    with pytest.raises(warpipe.MemoryLimitError) as full:
        publisher.loan(1, "uint8")
    assert isinstance(full.value, MemoryError) and full.value.limit == 4 << 20
    held.release()

    def is_lent():
        # As above.
        with contextlib.suppress(warpipe.MemoryLimitError):
            publisher.loan(4 << 20, "uint8").discard()
            return True

    until(is_lent, "the memory")
    with pytest.raises(warpipe.MemoryLimitError):
        publisher.loan(5 << 20, "uint8")


def test_a_closed_publisher_says_so_and_its_subscriber_ends(link):
    publisher, subscriber = link
    publisher.send(b"last")
    publisher.close()
    publisher.close()
    assert publisher.closed
    uses = [lambda: publisher.send(b"x"), lambda: publisher.loan(1, "uint8"), lambda: publisher.subscribers]
    for use in [*uses, publisher.wait_for_subscribers, lambda: publisher.memory_in_use]:
        with pytest.raises(warpipe.ClosedError, match="open a new one"):
            use()
    assert [frame.tobytes() for frame in subscriber] == [b"last"]
    with pytest.raises(warpipe.PeerGoneError) as gone:
        subscriber.receive()
    assert gone.value.graceful and isinstance(gone.value, ConnectionError)


def test_a_loan_of_a_closed_publisher_cannot_be_sent(link):
    publisher, _subscriber = link
    loan = publisher.loan(4, "uint8")
    publisher.close()
    with pytest.raises(warpipe.ClosedError):
        loan.send()


def test_a_closed_subscriber_says_so_and_its_frames_stay(link):
    publisher, subscriber = link
    publisher.send(b"kept")
    with subscriber:
        frame = subscriber.receive()
    assert subscriber.closed
    for use in (subscriber.receive, subscriber.try_receive, subscriber.fileno, lambda: subscriber.dropped):
        with pytest.raises(warpipe.ClosedError):
            use()
    assert frame.tobytes() == b"kept"


def test_names_are_checked_taken_and_missed_in_words(open_publisher, open_subscriber, domain, device):
    open_publisher("camera/front")
    with pytest.raises(warpipe.NameTakenError, match="is held by process") as taken:
        open_publisher("camera/front")
    assert taken.value.endpoint == "camera/front" and taken.value.pid
    with pytest.raises(warpipe.InvalidNameError, match="part starts with a dot"):
        open_publisher("../etc")
    with pytest.raises(warpipe.NotFoundError, match="wait=") as missing:
        open_subscriber("nobody", wait=0.1)
    assert isinstance(missing.value, ConnectionRefusedError) and missing.value.endpoint == "nobody"
    assert [one.name for one in domain.endpoints() if one.alive] == ["camera/front"]


@pytest.mark.parametrize(
    "options", [{"policy": "pray"}, {"depth": 0}, {"history": 99}, {"timeout": -1.0}, {"timeout": float("nan")}]
)
def test_options_out_of_range_are_refused(open_publisher, options):
    with pytest.raises(warpipe.ArgumentError, match="allowed is"):
        open_publisher(**options)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "", "cuda:99"])
def test_devices_that_are_not_there_are_refused(name):
    with pytest.raises((warpipe.ArgumentError, warpipe.DeviceError)):
        warpipe.Device(name)


def test_devices_are_equal_by_identity(device):
    assert warpipe.Device(device) == device and len({device, warpipe.Device(device)}) == 1
    assert warpipe.Device("host").kind == "host"
    assert warpipe.Device().why


def test_a_receive_that_nobody_serves_times_out(link):
    _publisher, subscriber = link
    for timeout in (0, 0.07):
        with pytest.raises(TimeoutError) as late:
            subscriber.receive(timeout=timeout)
        assert isinstance(late.value, warpipe.Error)
    assert subscriber.try_receive() is None


def test_subscribers_are_shown(link):
    publisher, subscriber = link
    publisher.wait_for_subscribers(1)
    publisher.send(b"1")
    (info,) = publisher.subscribers
    assert (info.in_flight, info.dropped, info.state) == (1, 0, "alive")
    assert subscriber.publisher_pid == info.pid and subscriber.publisher_state == "alive"
    with pytest.raises(warpipe.TimeoutError):
        publisher.wait_for_subscribers(2, timeout=0.1)


def test_a_subscriber_follows_the_next_publisher_and_marks_the_gap(open_publisher, open_subscriber):
    first = open_publisher()
    subscriber = open_subscriber(reconnect=True)
    first.send(b"1")
    assert subscriber.receive().discontinuity is None
    first.close()
    assert subscriber.try_receive() is None
    second = open_publisher(history=1)
    second.send(b"2")
    frame = subscriber.receive()
    gap = frame.discontinuity
    assert frame.tobytes() == b"2" and gap.missing == 0
    assert gap.previous.graceful and gap.previous.pid == os.getpid()
    previous = f"PreviousPublisher(pid={os.getpid()}, graceful=True)"
    assert repr(gap) == f"Discontinuity(missing=0, previous={previous})"


def test_a_frame_says_how_many_were_dropped_before_it(open_publisher, open_subscriber):
    publisher, subscriber = open_publisher(policy="drop_newest", depth=2), open_subscriber()
    for number in range(5):
        publisher.send(bytes([number]))
    assert [subscriber.receive().discontinuity for _ in range(2)] == [None, None]
    frames = []

    def arrives():
        # There is room once the device has written the words of the releases.
        publisher.send(b"next")
        frames.append(subscriber.try_receive())
        return frames[-1] is not None

    until(arrives, "a frame after the gap")
    gap, missing = frames[-1].discontinuity, frames[-1].sequence - 3
    assert (gap.missing, gap.previous, subscriber.dropped) == (missing, None, missing) and missing >= 3
    assert repr(gap) == f"Discontinuity(missing={missing}, previous=None)"


def test_a_publisher_says_what_it_was_opened_with(open_publisher):
    usual = open_publisher()
    assert (usual.policy, usual.depth, usual.history, usual.timeout) == ("block", 16, 0, 5.0)
    other = open_publisher("b", policy="drop_oldest", depth=3, history=2, timeout=None)
    assert (other.policy, other.depth, other.history, other.timeout) == ("drop_oldest", 3, 2, None)
    other.close()
    assert other.policy == "drop_oldest"
