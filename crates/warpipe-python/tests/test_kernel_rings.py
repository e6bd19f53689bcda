"""Rings of kernels: the steps on streams, ends and deaths, the header."""

import ctypes
import pathlib

import pytest
from conftest import LIMIT_SECONDS, until
from peers import kill, process, release_items, said
from test_processes import kills

import warpipe


@pytest.fixture
def place(domain, device):
    return str(domain.path), f"cuda:{device.ordinal}" if device.kind == "cuda" else "host"


@pytest.fixture
def create(domain, device):
    """Makes rings that are closed at the end."""
    made = []

    def make(name="ring", **options):
        made.append(warpipe.KernelRing.create(name, domain=domain, device=device, allow_time_slices=True, **options))
        return made[-1]

    yield make
    for ring in made:
        ring.close()


def test_items_pass_through_the_slots_in_order(create, domain, device):
    if device.kind != "host":
        pytest.skip("the test writes the slots by the CPU")
    producer = create(depth=2, slot_bytes=100)
    with warpipe.KernelRing.open("ring", domain=domain, device=device) as consumer:
        producer.wait_for_consumers()
        assert (producer.is_producer, consumer.is_producer) == (True, False)
        assert (consumer.depth, consumer.slot_bytes, consumer.name) == (2, 128, "ring")
        writing, reading = warpipe.Stream(device), warpipe.Stream(device)
        for item in range(10):
            producer.wait_on(stream=writing)
            writing.synchronize(LIMIT_SECONDS)
            ctypes.c_uint64.from_address(producer.slot(item % 2)).value = 1000 + item
            producer.publish_on(stream=writing)
            consumer.wait_on(stream=reading)
            reading.synchronize(LIMIT_SECONDS)
            assert ctypes.c_uint64.from_address(consumer.slot(item % 2)).value == 1000 + item
            consumer.release_on(stream=reading)
        reading.synchronize(LIMIT_SECONDS)
        consumer.check()
        producer.check()


def test_another_process_gets_every_item_and_then_the_close(create, device, place):
    producer = create()
    with process(release_items, *place, "ring", 21) as (_child, pipe):
        assert said(pipe) == "ready"
        producer.wait_for_consumers(LIMIT_SECONDS)
        stream = warpipe.Stream(device)
        for _ in range(20):
            producer.wait_on(stream=stream)
            producer.publish_on(stream=stream)
        stream.synchronize(LIMIT_SECONDS)
        producer.check()
        producer.close()
        word, _pid, graceful = said(pipe)
        assert (word, graceful) == ("gone", True)


@kills
def test_a_step_of_a_producer_whose_consumer_was_killed_ends(create, device, place):
    producer = create(depth=1)
    stream = warpipe.Stream(device)
    with process(release_items, *place, "ring", 1) as (child, pipe):
        assert said(pipe) == "ready"
        producer.wait_for_consumers(LIMIT_SECONDS)
        producer.wait_on(stream=stream)
        producer.publish_on(stream=stream)
        assert said(pipe) == "whole"
        producer.wait_on(stream=stream)
        producer.publish_on(stream=stream)
        producer.wait_on(stream=stream)
        kill(child)
        stream.synchronize(LIMIT_SECONDS)
        with pytest.raises(warpipe.LinkClosedError, match="Died.*makes it again"):
            producer.check()


def test_a_ring_says_what_it_is_not(create, domain, device):
    for wrong in ({"depth": 3}, {"consumers": 9}, {"slot_bytes": 0}, {"spin_limit": 0}):
        with pytest.raises(warpipe.ArgumentError):
            create(**wrong)
    producer = create()
    stream = warpipe.Stream(device)
    with pytest.raises(warpipe.ArgumentError, match="wait_for_consumers"):
        producer.params(stream=stream)
    with pytest.raises(warpipe.TimeoutError, match="consumers"):
        producer.wait_for_consumers(0.01)
    consumer = warpipe.KernelRing.open("ring", domain=domain, device=device)
    with pytest.raises(warpipe.RefusedError):
        warpipe.KernelRing.open("ring", domain=domain, device=device)
    with pytest.raises(warpipe.ArgumentError, match="producer"):
        consumer.publish_on(stream=stream)
    with pytest.raises(warpipe.ArgumentError):
        consumer.slot(8)
    assert consumer.params(stream=stream) % 8 == 0
    consumer.close()
    with pytest.raises(warpipe.ClosedError):
        consumer.params(stream=stream)


def test_a_side_that_stops_ends_its_own_steps(create, domain, device):
    producer = create()
    consumer = warpipe.KernelRing.open("ring", domain=domain, device=device)
    producer.wait_for_consumers()
    stream = warpipe.Stream(device)
    consumer.wait_on(stream=stream)
    consumer.stop()
    stream.synchronize(LIMIT_SECONDS)
    with pytest.raises(warpipe.LinkClosedError, match="stopped"):
        consumer.check()
    consumer.close()


class Driver:
    """Captures on streams of another library, by the driver's own functions."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def call(self, name, *arguments):
        code = getattr(self.cuda, name)(*arguments)
        assert code == 0, f"{name}: {code}"

    def stream(self):
        made = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(made), 1)
        return made

    def captured(self, stream, work):
        """What ``work`` gives the stream, as a graph that can be launched. Any thread's unsafe calls are forbidden."""
        graph, launchable = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuStreamBeginCapture_v2", stream, 0)
        try:
            work()
        finally:
            self.call("cuStreamEndCapture", stream, ctypes.byref(graph))
        self.call("cuGraphInstantiateWithFlags", ctypes.byref(launchable), graph, ctypes.c_uint64(0))
        return launchable


def test_the_steps_are_captured_on_a_stream_of_another_library(create, domain, device):
    if device.kind != "cuda":
        pytest.skip("a stream of the host cannot be captured")
    producer = create(depth=1)
    with warpipe.KernelRing.open("ring", domain=domain, device=device) as consumer:
        producer.wait_for_consumers()
        driver = Driver()
        writing, reading = driver.stream(), driver.stream()

        def steps(ring, stream, pass_on):
            def enqueue():
                ring.wait_on(stream=stream.value)
                pass_on(stream=stream.value)

            return enqueue

        sends = driver.captured(writing, steps(producer, writing, producer.publish_on))
        takes = driver.captured(reading, steps(consumer, reading, consumer.release_on))
        with pytest.raises(warpipe.ArgumentError, match="producer"):
            driver.captured(reading, lambda: consumer.publish_on(stream=reading.value))
        for _ in range(100):
            driver.call("cuGraphLaunch", sends, writing)
            driver.call("cuGraphLaunch", takes, reading)
        for stream in (writing, reading):
            driver.call("cuStreamSynchronize", stream)
        producer.check()
        consumer.check()
        # The hundred items have gone: the next one is not there.
        consumer.wait_on(stream=reading.value)
        consumer.stop()
        driver.call("cuStreamSynchronize", reading)
        with pytest.raises(warpipe.LinkClosedError, match="stopped"):
            consumer.check()
        for graph in (sends, takes):
            driver.call("cuGraphExecDestroy", graph)


def test_a_closed_ring_gives_its_memory_back(domain, device):
    before = device.bytes_held
    producer = warpipe.KernelRing.create("ring", domain=domain, device=device, allow_time_slices=True)
    consumer = warpipe.KernelRing.open("ring", domain=domain, device=device)
    producer.wait_for_consumers()
    assert device.bytes_held > before
    consumer.close()
    producer.close()
    until(lambda: device.bytes_held <= before, "the memory")


def test_the_package_has_the_header_for_compilers():
    header = pathlib.Path(warpipe.include_dir()) / "warpipe/device.cuh"
    assert "struct warpipe_ring {" in header.read_text()
