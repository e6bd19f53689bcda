"""Memory as arrays: DLPack's two capsules, array interfaces, lifetimes, and capsules that lie."""

import ctypes
import gc
import threading

import numpy as np
import pytest

import warpipe
from conftest import until

get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
name_of = ctypes.pythonapi.PyCapsule_GetName
name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
# By address: a destructor's capsule must not be referred to again.
is_valid = ctypes.pythonapi.PyCapsule_IsValid
is_valid.restype, is_valid.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
DESTRUCTOR = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Legacy(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", DELETER)]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


class Stated:
    """An object that exports the DLPack tensor it is told to, and counts how often that is deleted."""

    def __init__(self, versioned=False, shape=(4,), strides=None, version=(1, 0), **fields):
        self.memory = (ctypes.c_float * 64)(*range(64))
        self.deleted = 0
        self.managed = Versioned() if versioned else Legacy()
        self.name = b"dltensor_versioned" if versioned else b"dltensor"
        tensor = self.managed.tensor
        tensor.data, tensor.device_type, tensor.ndim = ctypes.addressof(self.memory), 1, len(shape)
        tensor.code, tensor.bits, tensor.lanes = 2, 32, 1
        self.shape = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        tensor.shape = self.shape
        if strides is not None:
            self.strides = (ctypes.c_int64 * max(len(strides), 1))(*strides)
            tensor.strides = self.strides
        for field, value in fields.items():
            setattr(tensor, field, value)
        if versioned:
            self.managed.major, self.managed.minor = version
        self.managed.deleter = DELETER(self.count)
        self.destructor = DESTRUCTOR(self.end_of_capsule)

    def count(self, _managed):
        self.deleted += 1

    def end_of_capsule(self, capsule):
        if is_valid(capsule, self.name):
            self.count(None)

    def __dlpack_device__(self):
        return (self.managed.tensor.device_type, self.managed.tensor.device_id)

    def __dlpack__(self, **_options):
        return new_capsule(ctypes.addressof(self.managed), self.name, self.destructor)


@pytest.fixture
def frame(link):
    publisher, subscriber = link
    publisher.send(np.arange(6, dtype=np.float32).reshape(2, 3))
    frame = subscriber.receive()
    yield frame
    # The runner holds on to what a fixture gave.
    frame.release()


@pytest.mark.parametrize("max_version, name", [(None, b"dltensor"), ((0, 8), b"dltensor"), ((1, 0), b"dltensor_versioned")])
def test_a_capsule_is_of_the_version_that_the_consumer_speaks(frame, device, max_version, name):
    capsule = frame.__dlpack__(max_version=max_version)
    assert name_of(capsule) == name
    structure = Versioned if name.endswith(b"versioned") else Legacy
    tensor = structure.from_address(get_pointer(capsule, name)).tensor
    assert (tensor.ndim, tensor.code, tensor.bits, tensor.lanes) == (2, 2, 32, 1)
    assert tensor.shape[:2] == [2, 3] and tensor.strides[:2] == [3, 1]
    assert (tensor.device_type, tensor.device_id) == frame.__dlpack_device__()
    assert tensor.data + tensor.byte_offset == frame.ptr


def test_a_frame_is_read_only_and_a_loan_is_not(frame, link):
    loan = link[0].loan((2,), "int8")
    flags = [Versioned.from_address(get_pointer(it.__dlpack__(max_version=(1, 0)), b"dltensor_versioned")).flags
             for it in (frame, loan)]
    assert flags == [1, 0]


def test_a_capsule_that_nobody_took_gives_the_memory_back(link):
    publisher, subscriber = link
    publisher.send(b"x")
    frame = subscriber.receive()
    for version in (None, (1, 0)):
        capsule = frame.__dlpack__(max_version=version)
        del capsule
    del frame
    gc.collect()
    until(lambda: publisher.subscribers[0].in_flight == 0, "the release")


def test_a_copy_is_writable_and_outlives_everything(frame):
    copy = np.from_dlpack(frame, device="cpu", copy=True)
    frame.release()
    copy[0, 0] = 9
    assert copy.tolist() == [[9, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("request_", [{"dl_device": (2, 7)}, {"dl_device": (4, 0)}, {"stream": -7}, {"stream": 0}])
def test_an_export_that_cannot_be_is_a_buffer_error(frame, request_):
    with pytest.raises(BufferError) as refused:
        frame.__dlpack__(**request_)
    assert isinstance(refused.value, warpipe.Error)


def test_a_frame_that_was_released_is_an_error_for_every_use(frame):
    frame.release()
    frame.release()
    assert frame.released and frame.shape == (2, 3)
    uses = [frame.numpy, frame.wait, frame.finish, frame.tobytes, frame.__dlpack__, lambda: frame.ptr, frame.__array__]
    for use in uses:
        with pytest.raises(warpipe.ReleasedError, match="no longer held"):
            use()


def test_the_slot_is_held_as_long_as_any_array_made_of_it(link, device):
    if device.kind == "cuda":
        pytest.skip("NumPy has copies of what lies on a GPU; frameworks are tested in test_frameworks")
    publisher, subscriber = link
    for make in (lambda frame: frame.numpy(), np.asarray, np.from_dlpack):
        publisher.send(np.arange(5))
        frame = subscriber.receive()
        array = make(frame)
        part = array[1:3]
        frame.release()
        del frame, array
        gc.collect()
        assert publisher.subscribers[0].in_flight == 1
        assert part.tolist() == [1, 2]
        assert not part.flags.writeable
        del part
        gc.collect()
        until(lambda: publisher.subscribers[0].in_flight == 0, "the release")


def test_arrays_outlive_their_endpoints(link, device):
    if device.kind == "cuda":
        pytest.skip("NumPy has copies of what lies on a GPU")
    publisher, subscriber = link
    loan = publisher.loan((8,), "int32")
    written = loan.numpy()
    written[:] = 5
    loan.send()
    read = subscriber.receive().numpy()
    publisher.close()
    subscriber.close()
    gc.collect()
    assert read.tolist() == [5] * 8
    assert written.tolist() == [5] * 8


def test_the_last_array_may_be_dropped_on_any_thread(link):
    publisher, subscriber = link
    for _ in range(50):
        publisher.send(np.zeros(100))
        held = [np.from_dlpack(subscriber.receive(), device="cpu")]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
    gc.collect()
    until(lambda: publisher.subscribers[0].in_flight == 0, "the release")


def test_interfaces_belong_to_the_backend(link, device):
    publisher, subscriber = link
    publisher.send(np.arange(6, dtype=np.float32).reshape(2, 3))
    frame = subscriber.receive()
    assert hasattr(frame, "__array_interface__") == (device.kind == "host")
    assert hasattr(frame, "__cuda_array_interface__") == (device.kind == "cuda")
    interface = frame.__array_interface__ if device.kind == "host" else frame.__cuda_array_interface__
    assert interface["version"] == 3 and interface["shape"] == (2, 3) and interface["typestr"] == "<f4"
    assert interface["data"] == (frame.ptr, True) and interface["strides"] is None


@pytest.mark.parametrize("versioned", [False, True])
def test_a_foreign_capsule_is_taken_once_and_deleted_once(link, versioned):
    publisher, subscriber = link
    stated = Stated(versioned, shape=(2, 3))
    publisher.send(stated)
    publisher.send(stated)
    assert stated.deleted == 2
    for frame in (subscriber.receive(), subscriber.receive()):
        assert frame.numpy().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_foreign_offset_and_foreign_strides_are_honoured(link):
    publisher, subscriber = link
    publisher.send(Stated(shape=(2, 3), strides=(1, 2), byte_offset=8))
    assert subscriber.receive().numpy().tolist() == [[2, 4, 6], [3, 5, 7]]
    publisher.send(Stated(shape=(3,), strides=(-1,), byte_offset=8))
    assert subscriber.receive().numpy().tolist() == [2, 1, 0]
    publisher.send(Stated(shape=(2, 2), strides=(0, 1)))
    assert subscriber.receive().numpy().tolist() == [[0, 1], [0, 1]]


LIES = {
    "too many dimensions": ({"shape": (1,) * 9}, warpipe.LayoutError),
    "a negative rank": ({"ndim": -1}, warpipe.LayoutError),
    "a huge rank": ({"ndim": 2**31 - 1}, warpipe.LayoutError),
    "a null shape": ({"shape": (4,), "shape_null": True}, warpipe.ExportError),
    "a negative length": ({"shape": (-4,)}, warpipe.ExportError),
    "more elements than there can be": ({"shape": (2**62, 2**62)}, warpipe.LayoutError),
    "strides beyond all addresses": ({"shape": (4,), "strides": (2**62,)}, warpipe.LayoutError),
    "strides before all addresses": ({"shape": (4,), "strides": (-(2**60),)}, warpipe.LayoutError),
    "null data": ({"data": None}, warpipe.ExportError),
    "an offset that wraps": ({"byte_offset": 2**64 - 1}, warpipe.ExportError),
    "lanes": ({"lanes": 4}, warpipe.DTypeError),
    "no lanes": ({"lanes": 0}, warpipe.DTypeError),
    "an unknown type": ({"code": 99}, warpipe.DTypeError),
    "a type of four bits": ({"code": 17, "bits": 4}, warpipe.DTypeError),
    "another device": ({"device_type": 7}, warpipe.WrongDeviceError),
    "another major version": ({"versioned": True, "version": (2, 0)}, warpipe.ExportError),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_capsule_that_lies_is_refused_and_deleted(link, lie):
    publisher, subscriber = link
    fields, error = LIES[lie]
    fields = dict(fields)
    null = fields.pop("shape_null", False)
    stated = Stated(**fields)
    if null:
        stated.managed.tensor.shape = None
    with pytest.raises(error):
        publisher.send(stated)
    asked_for_a_capsule = stated.managed.tensor.device_type != 7
    assert stated.deleted == int(asked_for_a_capsule), "a refused tensor stays with its capsule, which deletes it"
    assert subscriber.try_receive() is None


def test_what_is_no_capsule_is_refused(link):
    class Wrong:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **_options):
            return "a capsule"

    with pytest.raises(warpipe.ExportError, match="no DLPack capsule"):
        link[0].send(Wrong())


def test_an_array_of_another_type_is_a_copy_and_none_if_that_was_forbidden(link, device):
    publisher, subscriber = link
    publisher.send(np.arange(3, dtype=np.int32))
    frame = subscriber.receive()
    assert frame.__array__(np.float64).tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(ValueError, match="copy"):
        frame.__array__(np.float64, copy=False)
    assert frame.__array__(np.int32, copy=True).flags.writeable
    if device.kind == "cuda":
        with pytest.raises(ValueError, match="copy"):
            frame.__array__(copy=False)
    else:
        # The same type needs none.
        assert frame.__array__("int32", copy=False).ctypes.data == frame.__array__("i4").ctypes.data == frame.ptr
