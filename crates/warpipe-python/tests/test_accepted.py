"""Every entry point takes any buffer, any name of an element type, and any name of a device."""

import array
import ctypes
import mmap
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import warpipe
from conftest import DEVICE

NUMBERS = np.arange(12, dtype=np.int32).reshape(3, 4)


def mapped():
    memory = mmap.mmap(-1, 4096)
    memory[:3] = b"abc"
    return memory


BUFFERS = {
    "array": (lambda: array.array("i", [1, 2, 3]), np.array([1, 2, 3], np.int32)),
    "array of doubles": (lambda: array.array("d", [1.5, 2.5]), np.array([1.5, 2.5])),
    "empty array": (lambda: array.array("f"), np.zeros(0, np.float32)),
    "mmap": (mapped, np.frombuffer(b"abc" + bytes(4093), np.uint8)),
    "bytearray": (lambda: bytearray(b"abc"), np.frombuffer(b"abc", np.uint8)),
    "memoryview": (lambda: memoryview(b"abc"), np.frombuffer(b"abc", np.uint8)),
    "memoryview of rows": (lambda: memoryview(bytes(range(12))).cast("B", (3, 4)), np.arange(12, dtype=np.uint8).reshape(3, 4)),
    "memoryview with gaps": (lambda: memoryview(array.array("h", range(10)))[1::3], np.arange(10, dtype=np.int16)[1::3]),
    "memoryview backwards": (lambda: memoryview(array.array("h", range(5)))[::-1], np.arange(5, dtype=np.int16)[::-1]),
    "memoryview of columns": (lambda: memoryview(NUMBERS.T), NUMBERS.T),
    "memoryview of bools": (lambda: memoryview(b"\1\0").cast("?"), np.array([True, False])),
    "memoryview of chars": (lambda: memoryview(b"ab").cast("c"), np.frombuffer(b"ab", np.uint8)),
    "memoryview of nothing": (lambda: memoryview(b""), np.zeros(0, np.uint8)),
    "memoryview of complex": (lambda: memoryview(np.array([1 + 2j])), np.array([1 + 2j])),
    "ctypes array": (lambda: (ctypes.c_float * 3)(1, 2, 3), np.array([1, 2, 3], np.float32)),
    "ctypes long": (lambda: (ctypes.c_long * 2)(1, -2), np.array([1, -2])),
    "ctypes rows": (lambda: (ctypes.c_uint16 * 2 * 3)((1, 2), (3, 4), (5, 6)), np.array([[1, 2], [3, 4], [5, 6]], np.uint16)),
    "ctypes scalar": (lambda: ctypes.c_double(2.5), np.array(2.5)),
    "numpy scalar": (lambda: np.float32(2.5), np.array(2.5, np.float32)),
    "numpy bool": (lambda: np.bool_(True), np.array(True)),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_any_buffer_is_sent(link, name):
    make, wanted = BUFFERS[name]
    publisher, subscriber = link
    publisher.send(make())
    frame = subscriber.receive()
    received = frame.numpy()
    assert (received.dtype, received.shape) == (wanted.dtype, wanted.shape)
    assert received.tobytes() == wanted.tobytes()


def test_any_buffer_is_copied_to_memory_and_is_a_job_and_its_answer(open_queue, open_worker, device):
    data = array.array("f", [1, 2, 3])
    memory = warpipe.Memory.allocate(12, device=device)
    memory.view(3, "float32").copy_from(data)
    assert memory.tobytes() == data.tobytes()
    queue, worker = open_queue(), open_worker()
    handle = queue.submit(memoryview(data)[::2])
    lease = worker.lease()
    assert lease.numpy().tolist() == [1, 3]
    lease.complete((ctypes.c_int32 * 2)(4, 5))
    assert handle.result().numpy().tolist() == [4, 5]


class Point(ctypes.Structure):
    _fields_ = [("x", ctypes.c_int), ("y", ctypes.c_int)]


REFUSED = {
    "structures": (lambda: (Point * 2)(), "no number"),
    "big-endian": (lambda: (ctypes.c_int32.__ctype_be__ * 2)(), "big-endian"),
    "characters": (lambda: array.array("u", "ab"), "no number"),
    "pointers": (lambda: (ctypes.c_void_p * 2)(), "no number"),
    "long doubles": (lambda: (ctypes.c_longdouble * 2)(), "no number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_buffer_of_no_numbers_is_refused_by_its_element_type(link, name):
    make, said = REFUSED[name]
    with pytest.raises(warpipe.DTypeError, match=said):
        link[0].send(make())


def test_a_buffer_that_was_released_is_its_own_error(link):
    view = memoryview(b"abc")
    view.release()
    with pytest.raises(ValueError, match="released"):
        link[0].send(view)


def test_a_buffer_is_free_once_it_is_sent(link):
    publisher, subscriber = link
    data = array.array("b", b"abc")
    publisher.send(data)
    assert subscriber.receive().tobytes() == b"abc"
    subscriber.close()
    publisher.close()
    # Refused while it is exported.
    data.append(1)


@pytest.mark.parametrize(
    "given",
    ["<f4", "=f4", "f4", "f", "float32", "single", np.float32, np.dtype("f4"), np.dtype("<f4"), np.zeros(1, "f4").dtype],
    ids=repr,
)
def test_an_element_type_has_all_names_of_numpy(link, device, given):
    assert link[0].loan(2, given).dtype == "float32"
    assert warpipe.Memory.allocate(8, device=device).view(2, given).dtype == "float32"


class Torch:
    """A ``torch.device`` without PyTorch."""

    def __init__(self, type, index=None):
        self.type, self.index = type, index

    def __repr__(self):
        return f"device({self.type!r}, {self.index!r})"


HERE = {
    "host": ["host", "cpu", Torch("cpu"), Torch("cpu", 0), SimpleNamespace(type="cpu", index=None), warpipe.Device("host")],
    "cuda": ["cuda", "cuda:0", 0, Torch("cuda", 0)],
}[DEVICE.partition(":")[0]]


@pytest.mark.parametrize("given", HERE, ids=repr)
def test_a_device_has_all_names_of_pytorch(domain, device, given):
    assert warpipe.Device(given) == device
    assert warpipe.Memory.allocate(4, device=given).device == device
    with warpipe.Publisher("a", domain=domain, device=given) as publisher:
        assert publisher.device == device


@pytest.mark.parametrize("given", ["gpu", "cuda:x", "cuda:-1", -1, True, 1.0, b"host", Torch("mps"), Torch("cuda", -1), Torch(3), int, np.zeros(1)], ids=repr)
def test_a_device_that_is_none_is_refused_with_what_is_taken(given):
    with pytest.raises(warpipe.ArgumentError, match="device.*a torch.device"):
        warpipe.Device(given)


def test_a_gpu_that_is_not_there_is_told_by_its_number():
    with pytest.raises(warpipe.DeviceError, match="99|driver"):
        warpipe.Device(99)


@pytest.mark.parametrize("name", ["torch", "cupy", "numpy.ma"])
def test_an_array_is_sent_while_another_thread_is_in_the_middle_of_an_import(monkeypatch, link, name):
    begun = ModuleType(name)
    begun.cuda = ModuleType(f"{name}.cuda")
    monkeypatch.setitem(sys.modules, name, begun)
    publisher, subscriber = link
    publisher.send(np.arange(3))
    with subscriber.receive() as frame:
        assert frame.nbytes == 24
