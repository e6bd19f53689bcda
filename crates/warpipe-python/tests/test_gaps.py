"""Tensors with gaps, turned, reversed or repeated, where they lie: gathered on their own device, also out of the memory that
they are copied into."""

import ctypes
import gc
import os
import subprocess
import sys
import weakref

import numpy as np
import pytest
from conftest import LIMIT_SECONDS, until
from test_layouts import IMAGE, VIEWS

import warpipe
from warpipe import _warpipe

# Of an array, and not a scalar of NumPy's, which lies nowhere.
VIEWS = {**VIEWS, "a number": lambda a: a[1, 2, 3, ...]}
DLPACK_CODES = {"i": 0, "u": 1, "f": 2, "c": 5}


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    ]  # fmt: skip


class Lying:
    """A tensor in memory of the device that lies there as ``view`` lies in ``base``, by one protocol."""

    def __init__(self, memory, base, view, stream=None):
        self.memory = memory
        start = view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        self.address = memory.ptr + start if view.size else 0
        self.view = view
        self.stream = stream

    def interface(self):
        found = {"version": 3, "typestr": self.view.dtype.str, "shape": self.view.shape, "strides": self.view.strides}
        return {**found, "data": (self.address, False)}


class ByInterface(Lying):
    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        if self.memory.device.kind == "host":
            self.__array_interface__ = self.interface()
        else:
            self.__cuda_array_interface__ = {**self.interface(), "stream": self.stream}


class ByDLPack(Lying):
    def __dlpack_device__(self):
        return self.memory.__dlpack_device__()

    def __dlpack__(self, *, stream=None, max_version=None):
        view, rank = self.view, max(self.view.ndim, 1)
        width = view.dtype.itemsize
        shape, strides = (ctypes.c_int64 * rank)(*view.shape), (ctypes.c_int64 * rank)(*(s // width for s in view.strides))
        device, code = self.__dlpack_device__(), DLPACK_CODES[view.dtype.kind]
        # No deleter: the object keeps what the capsule points to.
        self.exported = (DLTensor(self.address, *device, view.ndim, code, 8 * width, 1, shape, strides, 0), shape, strides)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.exported[0]), b"dltensor", None)


PROTOCOLS = {"interface": ByInterface, "DLPack": ByDLPack}


@pytest.fixture
def place(device):
    """Puts an array into memory of the device and gives a tensor there that lies as a view of the array."""

    def put(base, view, protocol=ByInterface, **named):
        memory = warpipe.Memory.allocate(base.nbytes, device=device)
        memory.write(base.tobytes())
        return protocol(memory, base, view, **named)

    return put


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dtype", ["uint8", "float32", "complex128"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_whatever_lies_as_it_may_arrives_from_its_device_as_numpy_reads_it(link, place, device, name, dtype, protocol):
    publisher, subscriber = link
    base = IMAGE.astype(dtype)
    view = VIEWS[name](base)
    tensor = place(base, view, PROTOCOLS[protocol])
    publisher.send(tensor)
    frame = subscriber.receive()
    assert (frame.shape, frame.dtype) == (view.shape, dtype)
    assert frame.tobytes() == view.tobytes() and all(stride >= 0 for stride in frame.strides)
    with publisher.loan(view.shape, dtype) as out:
        out.copy_from(tensor)
    assert subscriber.receive().tobytes() == view.tobytes()
    if view.nbytes:
        with warpipe.Memory.allocate(view.nbytes, device=device) as memory, memory.view(view.shape, dtype) as into:
            into.copy_from(tensor)
            assert into.tobytes() == view.tobytes()


@pytest.mark.parametrize(
    "crop",
    [np.s_[:, 100:900], np.s_[1::2, 3:1003], np.s_[::-1, :700], np.s_[:, ::-1], np.s_[:, 0]],
    ids=["a crop", "every second row", "upside down", "mirrored", "a column"],
)
def test_rows_of_any_length_are_gathered(link, place, crop):
    publisher, subscriber = link
    base = (np.arange(64 * 1024) % 251).astype(np.uint8).reshape(64, 1024)
    publisher.send(place(base, base[crop]))
    assert subscriber.receive().tobytes() == base[crop].tobytes()


def test_eight_dimensions_and_odd_strides_of_single_ones_are_gathered(link, place):
    publisher, subscriber = link
    base = np.arange(3**8, dtype=np.int16).reshape((3,) * 8)
    view = base[::2, 1:, ::-1, :2, 1:2, :, ::-2, 1:].transpose(7, 0, 6, 1, 5, 2, 4, 3)
    odd = np.lib.stride_tricks.as_strided(view, view.shape, tuple(3 if n == 1 else s for n, s in zip(view.shape, view.strides)))
    for lying in (view, odd):
        publisher.send(place(base, lying))
        assert subscriber.receive().tobytes() == view.tobytes()


def test_a_gather_is_behind_the_tensors_own_stream_and_holds_the_tensor_until_it_is_done(link, device, domain):
    if device.kind == "host":
        pytest.skip("what lies on the host is read by the CPU, at once")
    publisher, subscriber = link
    gate = warpipe.Timeline.create("gate", domain=domain, device=device)
    opened = warpipe.Timeline.open("gate", domain=domain, device=device)
    stream = warpipe.Stream(device)
    memory = warpipe.Memory.allocate(IMAGE.nbytes, device=device)
    opened.wait(1, stream=stream)
    memory.write(IMAGE.tobytes(), stream=stream)
    view = IMAGE[:, ::-1, 1:4]
    tensor = ByInterface(memory, IMAGE, view, stream=stream.ptr)
    seen = weakref.ref(tensor)
    publisher.send(tensor)
    frame = subscriber.receive()
    del tensor
    gc.collect()
    assert seen() is not None and not stream.is_idle()
    gate.signal(1)
    assert frame.tobytes() == view.tobytes()

    def is_let_go():
        gc.collect()
        return seen() is None

    until(is_let_go, "the end of the tensor")


OVERLAPS = {
    "reversed": lambda a: a[::-1],
    "transposed": lambda a: a.reshape(128, 128).T,
    "itself": lambda a: a,
    "one element on": lambda a: a[1:],
    "one element back": lambda a: a[:-1],
    "every second": lambda a: a[::2],
    "its first element": lambda a: np.broadcast_to(a[:1], a.shape),
}


@pytest.mark.parametrize("name", OVERLAPS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_copy_out_of_the_memory_that_is_written_is_numpys(device, name, protocol):
    base = np.arange(128 * 128, dtype=np.int32)
    view = OVERLAPS[name](base)
    first = 4 if name == "one element back" else 0
    due = base.copy()
    due[first // 4 :][: view.size] = view.ravel()
    with warpipe.Memory.allocate(base.nbytes, device=device) as memory:
        memory.write(base.tobytes())
        with memory.view(view.shape, "int32", first) as into:
            into.copy_from(PROTOCOLS[protocol](memory, base, view))
        assert memory.tobytes() == due.tobytes()


def test_a_view_is_copied_into_one_that_it_overlaps(device):
    numbers = np.arange(1 << 16, dtype=np.uint8)
    for first, second in ((0, 1), (1, 0), (0, 64), (64, 0)):
        with warpipe.Memory.allocate(numbers.size, device=device) as memory:
            memory.write(numbers.tobytes())
            into, due = memory.view(60_000, "uint8", first), numbers.copy()
            into.copy_from(memory.view(60_000, "uint8", second))
            due[first:][:60_000] = numbers[second:][:60_000]
            assert memory.tobytes() == due.tobytes()
            into.release()


def test_a_handle_is_not_made_of_what_has_gaps(device):
    plain = _warpipe._allocate_plain(IMAGE.nbytes, device)
    with pytest.raises(warpipe.LayoutError, match="gaps"):
        warpipe.LegacyHandle.export(ByInterface(plain, IMAGE, IMAGE[:, 1:]), device=device)


def test_an_address_without_memory_is_refused(link, device):
    if device.kind == "host":
        pytest.skip("an address of the host is believed, as by every array library")

    class Nowhere:
        __cuda_array_interface__ = {"version": 3, "typestr": "|u1", "shape": (4,), "strides": (-2,), "data": (64, False)}

    with pytest.raises(warpipe.LayoutError, match="no memory"):
        link[0].send(Nowhere())


ANOTHER_GPU = """
import sys
import numpy as np, warpipe
from warpipe import _warpipe
from test_gaps import ByInterface
publisher = warpipe.Publisher("a", domain=sys.argv[1], device="cuda:0")
try:
    other = warpipe.Device("cuda:1")
except warpipe.DeviceError:
    sys.exit(77)
theirs = _warpipe._allocate_plain(4096, other)
whole = np.zeros((4, 1024), np.uint8)
for view in (whole[:, ::-1], whole[:, :600], whole, whole[::2, 3]):
    try:
        publisher.send(ByInterface(theirs, whole, view))
    except warpipe.WrongDeviceError as error:
        assert other.uuid in str(error) and "cuda:1" in str(error) and "cuda:0" in str(error), error
    else:
        raise AssertionError(f"a tensor of another GPU was taken: {view.strides}")
ours = warpipe.Publisher("b", domain=sys.argv[1], device=other)
got = warpipe.Subscriber("b", domain=sys.argv[1], device=other)
ours.send(ByInterface(theirs, whole, whole[:, ::-1]))
assert got.receive().tobytes() == bytes(4096)
print("refused")
"""


def run(code, domain, device, **environment):
    """Runs a program of its own, next to this file."""
    environment = {**os.environ, **environment, "WARPIPE_TEST_DEVICE": device.kind}
    command = [sys.executable, "-c", code, str(domain.path)]
    folder = os.path.dirname(__file__)
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, cwd=folder)


def test_an_interface_that_leads_to_another_gpu_is_refused_with_both_names(domain, device):
    if device.kind == "host":
        pytest.skip("there is one host")
    done = run(ANOTHER_GPU, domain, device, FAKE_CUDA_DEVICES="2")
    if done.returncode == 77:
        pytest.skip("there is one GPU")
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


FULL_QUEUE = """
import sys, threading
import numpy as np, warpipe
from warpipe import _warpipe
from test_gaps import ByInterface, IMAGE
device = warpipe.Device("cuda")
gate = warpipe.Timeline.create("gate", domain=sys.argv[1], device=device)
opened = warpipe.Timeline.open("gate", domain=sys.argv[1], device=device)
publisher = warpipe.Publisher("a", domain=sys.argv[1], device=device)
subscriber = warpipe.Subscriber("a", domain=sys.argv[1], device=device)
memory = warpipe.Memory.allocate(IMAGE.nbytes, device=device)
memory.write(IMAGE.tobytes())
first = ByInterface(memory, IMAGE, IMAGE[:, 1:])
publisher.send(first)
stream = warpipe.Stream(device)
scratch = warpipe.Memory.allocate(4096, device=device)
adder = _warpipe._Adder(device, stream, 4, 1.0)
opened.wait(1, stream=stream)
for _ in range(1020):
    adder.launch(scratch.ptr, scratch.ptr)
done = threading.Event()

def send():
    publisher.send(ByInterface(memory, IMAGE, IMAGE[::-1]), stream=stream)
    done.set()

thread = threading.Thread(target=send)
thread.start()
# The queue is full: the copy stands in the driver, and this thread gets on all the same.
assert not done.wait(0.3)
gate.signal(1)
assert done.wait(60)
thread.join()
subscriber.receive().release()
assert subscriber.receive().tobytes() == IMAGE[::-1].tobytes()
print("went on")
"""


def test_other_threads_run_while_a_gather_waits_for_room_in_the_launch_queue(domain, device):
    if not device.name.startswith("Fake CUDA"):
        pytest.skip("how many launches fill a stream's queue is the driver's affair")
    try:
        done = run(FULL_QUEUE, domain, device)
    except subprocess.TimeoutExpired:
        pytest.fail("nobody could open the gate: the copy held the interpreter")
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


def test_a_crop_of_a_loan_is_copied_within_it(link, place, device):
    """Where the target's elements are those of an array that is being filled."""
    publisher, subscriber = link
    base = np.arange(64, dtype=np.int16)
    loan = publisher.loan((64,), "int16")
    loan.copy_from(place(base, base))
    if device.kind == "host":
        loan.copy_from(loan.numpy()[::-1])
    else:
        loan.copy_from(ByInterface(loan, base, base[::-1]))
    loan.send()
    assert subscriber.receive(timeout=LIMIT_SECONDS).tobytes() == base[::-1].tobytes()
