"""The transport's half for GPUs, over a stand-in for the driver: `test_fake_driver.py` runs this.

Arrays are memory of warpipe on the stand-in's GPU, copied on a stream that a gate holds up.
"""

import multiprocessing
import os
import sys
import threading
from dataclasses import dataclass

import numpy
import warpipe

import warpipe_ray
from warpipe_ray import _arrays

LIMIT_SECONDS = 30.0


@dataclass
class Array:
    memory: warpipe.View
    shape: tuple
    dtype: object

    def values(self):
        return numpy.frombuffer(self.memory.tobytes(), self.dtype).reshape(self.shape).tolist()


class OnGpu:
    """A library with a current stream of its own."""

    name = __name__

    def __init__(self):
        self.gpu = warpipe.Device(0)
        assert self.gpu.kind == "cuda"
        self.current, self.gate = warpipe.Stream(self.gpu), None

    def hold_up(self):
        """What the current stream is given from now on waits for the gate."""
        self.gate = warpipe.Timeline.create(f"gate/{os.getpid()}", device=self.gpu)
        # Its owner may not wait for what it has not signalled.
        self.opened = warpipe.Timeline.open(self.gate.name, device=self.gpu)
        self.opened.wait(1, stream=self.current)

    def array(self, values):
        values = numpy.asarray(values)
        memory = warpipe.Memory.allocate(values.nbytes, device=self.gpu)
        memory.write(values.tobytes())
        return Array(memory, values.shape, values.dtype)

    def dtype(self, dtype):
        return dtype, dtype.itemsize

    def device(self, array):
        return "cuda", self.gpu

    def check(self, array):
        assert isinstance(array, Array)

    def place(self, array):
        return array.memory.ptr, array.memory.ptr

    def over(self, memory, dtype, shape):
        return Array(memory, tuple(shape), dtype)

    def copy(self, into, array):
        into.memory.copy_from(array.memory.view((array.memory.nbytes,), "uint8"), stream=self.current)

    def stream(self, device):
        return self.current

    def opener(self, device):
        return warpipe.Device(device)


_arrays._LIBRARIES[__name__] = OnGpu


def source(pipe):
    """Offers an object that is complete, and one that never is, and waits for its end."""
    library, transport = _arrays.library(__name__), warpipe_ray.Transport()
    complete = transport.extract_tensor_transport_metadata("a", [library.array([1.5, 2.5])])
    library.hold_up()
    pipe.send((complete, transport.extract_tensor_transport_metadata("b", [library.array([3.5])])))
    pipe.recv()


def contents_are_waited_for():
    library, transport = _arrays.library(__name__), warpipe_ray.Transport()
    arrays = [library.array([1, 2, 3]), library.array([[4.5]])]
    library.hold_up()
    metadata = transport.extract_tensor_transport_metadata("a", arrays)
    assert metadata.tensor_device == "cuda" and metadata.complete == 1
    fetch = transport.fetch_multiple_tensors("a", metadata, None)
    try:
        transport.wait_fetch_complete(fetch, 0.05)
    except TimeoutError:
        pass
    else:
        raise AssertionError("the gate is closed, and the contents are said to be there")
    library.gate.signal(1)
    first, second = transport.wait_fetch_complete(fetch, LIMIT_SECONDS)
    assert first.values() == [1, 2, 3] and second.values() == [[4.5]]
    assert transport.extract_tensor_transport_metadata("b", arrays).complete == 2


def an_abort_ends_the_wait():
    library, transport = _arrays.library(__name__), warpipe_ray.Transport()
    library.hold_up()
    metadata = transport.extract_tensor_transport_metadata("a", [library.array([1])])
    told = []

    def receive():
        try:
            transport.recv_multiple_tensors("a", metadata, None)
        except warpipe_ray.ReceiveAbortedError as error:
            told.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    while thread.is_alive() and not told:
        # Nothing, before the wait has begun.
        transport.abort_transport("a", None)
        thread.join(0.01)
    assert told and not transport._receiving
    library.gate.signal(1)
    assert transport.recv_multiple_tensors("a", metadata, None)[0].values() == [1]


def a_killed_source_ends_the_wait_and_leaves_what_was_received():
    context, transport = multiprocessing.get_context("spawn"), warpipe_ray.Transport()
    pipe, theirs = context.Pipe()
    process = context.Process(target=source, args=(theirs,))
    process.start()
    theirs.close()
    complete, unfinished = pipe.recv()
    [received] = transport.recv_multiple_tensors("a", complete, None)
    fetch = transport.fetch_multiple_tensors("b", unfinished, None)
    threading.Timer(0.05, process.kill).start()
    for wait in (
        lambda: transport.wait_fetch_complete(fetch, LIMIT_SECONDS),
        lambda: transport.recv_multiple_tensors("b", unfinished, None),
    ):
        try:
            wait()
        except warpipe_ray.SourceGoneError:
            continue
        raise AssertionError("the source is dead, and its object is said to be there")
    process.join()
    assert received.values() == [1.5, 2.5]


if __name__ == "__main__":
    # Another process finds the library by the name of this module.
    import over_fake_driver

    getattr(over_fake_driver, sys.argv[1])()
