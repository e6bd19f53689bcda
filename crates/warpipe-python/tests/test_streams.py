"""Streams: a consumer that does not wait reads what a slow producer wrote; without the library's wait it does not."""

import contextlib
import ctypes
import gc
import os
import weakref

import numpy as np
import pytest
from conftest import until

import warpipe
from warpipe import _warpipe

WORDS = 1 << 16
DELAY_SECONDS = 0.4


@pytest.fixture
def stream(device):
    stream = warpipe.Stream(device)
    _warpipe._preload(stream)
    return stream


@pytest.fixture
def without_waits():
    _warpipe._skip_waits(True)
    yield
    _warpipe._skip_waits(False)


def send_late(publisher, stream, seed, delay=DELAY_SECONDS):
    loan = publisher.loan((WORDS,), "uint64")
    _warpipe._slow_fill(loan, stream, seed, delay)
    loan.send(stream=stream)


def is_complete(frame):
    try:
        frame.wait(0)
    except TimeoutError:
        return False
    return True


def expected(seed):
    return np.array([_warpipe._pattern(seed, index) for index in range(WORDS)], np.uint64)


def consumers(device):
    """Ways to read a frame without a word of synchronisation."""
    if device.kind == "host":
        return {
            "numpy": lambda frame, wanted: bool((frame.numpy() == wanted).all()),
            "np.asarray": lambda frame, wanted: bool((np.asarray(frame) == wanted).all()),
            "np.from_dlpack": lambda frame, wanted: bool((np.from_dlpack(frame) == wanted).all()),
        }
    ways = {}
    try:
        import torch

        def by_torch(frame, wanted):
            other = torch.cuda.Stream()
            with torch.cuda.stream(other):
                # Its copy to the host must be on that stream as well.
                return bool((frame.torch().view(torch.int64) == wanted_on_gpu[id(wanted)]).all().item())

        wanted_on_gpu = {}

        def prepare_torch(wanted):
            on_gpu = wanted_on_gpu[id(wanted)] = torch.from_numpy(wanted.view(np.int64)).cuda()
            # The first launch of a kernel waits for all streams, which would be a wait that the
            # consumer lacks.
            assert (on_gpu == on_gpu).all().item()

        by_torch.prepare = prepare_torch
        ways["torch"] = by_torch
    except ImportError:
        pass
    try:
        import cupy

        def by_cupy(frame, wanted, make=cupy.from_dlpack):
            with cupy.cuda.Stream(non_blocking=True):
                same = (make(frame) == cupied[id(wanted)]).all()
                return bool(same.get())

        cupied = {}

        def prepare_cupy(wanted):
            on_gpu = cupied[id(wanted)] = cupy.asarray(wanted)
            # As for PyTorch.
            assert (on_gpu == on_gpu).all().get()

        by_cupy.prepare = prepare_cupy
        ways["cupy"] = by_cupy
        by_interface = lambda frame, wanted: by_cupy(frame, wanted, cupy.asarray)  # noqa: E731
        by_interface.prepare = by_cupy.prepare
        ways["cupy by its interface"] = by_interface
    except ImportError:
        pass
    return ways


def verdicts(device, link, stream, early=False):
    """Whether each way reads the right values. With ``early`` it has read before they were there."""
    publisher, subscriber = link
    ways = consumers(device)
    if not ways:
        pytest.skip("neither PyTorch nor CuPy is installed, and NumPy alone reads no GPU")
    found = {}
    for seed, (name, read) in enumerate(ways.items(), start=1):
        wanted = expected(seed)
        getattr(read, "prepare", lambda wanted: None)(wanted)
        delay, is_late = DELAY_SECONDS, True
        # A framework that loads its kernels, or a busy machine, may take longer than the delay.
        while is_late:
            assert delay < 60, name
            send_late(publisher, stream, seed, delay)
            frame = subscriber.receive()
            found[name] = read(frame, wanted)
            is_late = early and is_complete(frame)
            frame.release()
            stream.synchronize()
            delay *= 2
    return found


def test_a_consumer_that_does_not_synchronise_reads_the_right_values(device, link, stream):
    assert all(verdicts(device, link, stream).values())


@pytest.mark.skipif(
    bool(os.environ.get("WARPIPE_TEST_MPS")), reason="under MPS the streams may share a hardware queue, which orders them"
)
def test_without_the_wait_it_reads_wrong_values(device, link, stream, without_waits):
    assert not any(verdicts(device, link, stream, early=True).values())


def test_a_frame_is_there_before_its_data(device, link, stream):
    publisher, subscriber = link
    send_late(publisher, stream, 3)
    frame = subscriber.receive()
    with pytest.raises(warpipe.TimeoutError):
        frame.wait(timeout=0)
    frame.wait()
    np.testing.assert_array_equal(frame.numpy(), expected(3))


def test_a_slot_is_released_behind_the_work_of_its_user(device, link, stream, open_publisher):
    publisher, subscriber = link
    publisher.send(np.zeros(8))
    frame = subscriber.receive()
    # Something that keeps the user's stream busy.
    loan = publisher.loan((WORDS,), "uint64")
    _warpipe._slow_fill(loan, stream, 1, DELAY_SECONDS)
    frame.release(stream=stream)
    assert publisher.subscribers[0].in_flight == 1
    stream.synchronize()
    until(lambda: publisher.subscribers[0].in_flight == 0, "the release")
    loan.discard(stream=stream)


def test_streams_wait_for_each_other(device, link, stream):
    publisher, _subscriber = link
    other = warpipe.Stream(device)
    loan = publisher.loan((WORDS,), "uint64")
    _warpipe._slow_fill(loan, stream, 1, DELAY_SECONDS)
    other.wait_for(stream)
    assert not other.is_idle()
    other.synchronize()
    assert stream.is_idle()
    loan.discard(stream=stream)


def test_a_stream_of_another_kind_is_refused(device, link):
    frame_of, subscriber = link
    frame_of.send(b"x")
    frame = subscriber.receive()
    for wrong in ("a stream", object(), 1.5):
        with pytest.raises(warpipe.ArgumentError, match="stream"):
            frame.release(stream=wrong)
    if device.kind == "host":
        with pytest.raises(warpipe.ArgumentError, match="host"):
            frame.release(stream=1)
    assert frame.tobytes() == b"x"


def test_the_kernel_of_the_benchmark_adds_on_the_stream_that_it_was_made_for(open_publisher, open_subscriber, device):
    count, values = 3000, np.arange(3001, dtype=np.float32)
    publisher, subscriber = open_publisher(), open_subscriber()
    # A raw stream, too, where there are any.
    for stream in [warpipe.Stream(device), *([0] if device.kind == "cuda" else [])]:
        launch = _warpipe._Adder(device, stream, count, 1.5).launch
        publisher.send(values.tobytes())
        sample = subscriber.receive()
        sample.wait()
        loan = publisher.loan((4 * count,), "uint8")
        launch(sample.ptr, loan.ptr)
        launch(loan.ptr, loan.ptr)
        loan.send(stream=stream)
        found = np.frombuffer(subscriber.receive().tobytes(), np.float32)
        assert (found == values[:count] + 3).all()


def test_the_kernel_of_the_benchmark_takes_no_stream_of_another_device(device):
    if device.kind == "cuda":
        pytest.skip("streams of two devices need two GPUs")
    with pytest.raises(warpipe.ArgumentError, match="stream"):
        _warpipe._Adder(device, 7, 1, 1.0)


class Foreign:
    """A stream of somebody else's, which ends with its object."""

    def __init__(self, device):
        self.stream = warpipe.Stream(device)

    def __cuda_stream__(self):
        return 0, self.stream.ptr


@pytest.fixture
def make_foreign(device):
    """A function: what a fixture returns, it keeps."""
    if device.kind == "host":
        pytest.skip("the host has no streams of others")
    return lambda: Foreign(device)


def released(publisher):
    return publisher.subscribers[0].in_flight == 0


def test_a_stream_that_is_a_number_may_end_when_its_array_has_gone(link, make_foreign):
    (publisher, subscriber), foreign = link, make_foreign()
    publisher.send(np.zeros(8))
    frame = subscriber.receive()
    capsule = frame.__dlpack__(stream=foreign.stream.ptr, max_version=(1, 0))
    del capsule
    foreign.stream.synchronize()
    # The number means nothing from now on.
    del foreign.stream
    frame.release()
    until(lambda: released(publisher), "the release")


def test_a_stream_that_is_an_object_is_kept_while_memory_waits_for_it_and_no_longer(device, make_foreign):
    foreign = make_foreign()
    memory = warpipe.Memory.allocate(4096, device=device)
    memory.used_on(stream=foreign)
    kept = weakref.ref(foreign)
    del foreign
    gc.collect()
    assert kept() is not None
    memory.release()
    del memory
    gc.collect()
    until(lambda: kept() is None, "the end of the stream")


def test_arrays_of_one_frame_on_several_foreign_streams_each_hold_it(link, make_foreign):
    publisher, subscriber = link
    publisher.send(np.zeros(8))
    frame = subscriber.receive()
    others = [make_foreign() for _ in range(3)]
    capsules = [frame.__dlpack__(stream=other.stream.ptr, max_version=(1, 0)) for other in others]
    frame.release()
    while capsules:
        assert not released(publisher)
        del capsules[0]
        # It may end now.
        others.pop(0).stream.synchronize()
    until(lambda: released(publisher), "the release")


@contextlib.contextmanager
def captured(stream):
    """Captures the stream into a graph, and launches it once on the stream."""
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name, *arguments):
        assert getattr(driver, name)(*arguments) == 0, name

    primary, graph, launchable, handle = (ctypes.c_void_p(value) for value in (None, None, None, stream.ptr))
    call("cuDevicePrimaryCtxRetain", ctypes.byref(primary), 0)
    call("cuCtxSetCurrent", primary)
    call("cuStreamBeginCapture_v2", handle, 0)
    yield
    call("cuStreamEndCapture", handle, ctypes.byref(graph))
    call("cuGraphInstantiateWithFlags", ctypes.byref(launchable), graph, ctypes.c_ulonglong(0))
    call("cuGraphLaunch", launchable, handle)
    stream.synchronize(10)
    call("cuCtxSetCurrent", None)
    call("cuDevicePrimaryCtxRelease_v2", 0)


def test_nothing_is_copied_on_a_captured_stream_and_the_capture_stays_valid(device, stream, open_publisher):
    if device.kind == "host":
        pytest.skip("no stream of the host is captured")
    source, target = (warpipe.Memory.allocate(16, device=device) for _ in range(2))
    source.write(b"sixteen bytes...")
    publisher = open_publisher()
    with captured(stream):
        for copy in (
            lambda: publisher.send(source, stream=stream),
            lambda: target.copy_from(source, stream=stream),
            lambda: target.write(b"sixteen bytes...", stream=stream),
        ):
            with pytest.raises(warpipe.CapturingError):
                copy()
    assert target.tobytes() == bytes(16)
    source.release()
    target.release()
