"""How PyTorch is asked: in few steps, by what is private there where that is as expected, and to the same effect as by what
is public. Its own behaviour is in ``test_frameworks``; here a stand-in notes what it is asked."""

import ctypes
import gc
import importlib
import sys
import types
from threading import Event, Thread

import numpy as np
import pytest
from conftest import LIMIT_SECONDS, until

import warpipe
from warpipe import _warpipe

WORDS = 1 << 16
DELAY_SECONDS = 0.4

name_of = ctypes.pythonapi.PyCapsule_GetName
name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]

PUBLIC, PRIVATE, STREAM, RAW_STREAM = "from_dlpack", "_from_dlpack", "current_stream", "_cuda_getCurrentRawStream"


class Tensor:
    """A capsule that was taken; it goes with this object."""

    def __init__(self, capsule):
        self.capsule, self.name = capsule, name_of(capsule)

    def __dlpack__(self, **_options):
        return self.capsule

    def __dlpack_device__(self):
        return (1, 0)


class Stream:
    def __init__(self, raw, identity):
        self.cuda_stream, self.stream_id = raw, identity


class Torch(types.ModuleType):
    """The stand-in. ``speaks`` is the newest version of capsules that it asks for."""

    def __init__(self, speaks=(1, 0)):
        super().__init__("torch")
        self.asked, self.speaks, self.stream, self.refuses = [], speaks, Stream(0, 0), False
        self._C = types.SimpleNamespace(**{PRIVATE: self._take, RAW_STREAM: self._raw_stream})
        self.cuda = types.SimpleNamespace(is_initialized=lambda: True, current_stream=self._current_stream)

    def from_dlpack(self, found):
        self.asked.append(PUBLIC)
        if not hasattr(found, "__dlpack__"):
            return Tensor(found)
        options = {} if self.speaks is None else {"max_version": self.speaks}
        if found.__dlpack_device__()[0] == 2:
            options["stream"] = self.stream.cuda_stream or 1
        return Tensor(found.__dlpack__(**options))

    def _take(self, capsule):
        self.asked.append(PRIVATE)
        if self.refuses:
            raise RuntimeError("refused below")
        return Tensor(capsule)

    def _raw_stream(self, ordinal):
        self.asked.append(RAW_STREAM)
        return self.stream.cuda_stream

    def _current_stream(self, ordinal):
        self.asked.append(STREAM)
        return self.stream

    def forget(self):
        """What it was asked so far."""
        asked, self.asked = self.asked, []
        return asked


@pytest.fixture
def install(monkeypatch):
    def install(torch):
        monkeypatch.setitem(sys.modules, "torch", torch)
        return torch

    return install


@pytest.fixture
def torch(install):
    return install(Torch())


@pytest.fixture
def frame(link):
    publisher, subscriber = link
    publisher.send(np.arange(6, dtype=np.float32))
    with subscriber.receive() as frame:
        yield frame


def on(device, *asked):
    """Without what is asked of GPUs alone."""
    return [what for what in asked if device.kind == "cuda" or what not in (STREAM, RAW_STREAM)]


@pytest.mark.parametrize("speaks, name", [((1, 0), b"dltensor_versioned"), (None, b"dltensor")])
def test_the_public_import_is_asked_once_and_then_given_the_capsules_that_it_asked_for(
    install, device, frame, speaks, name
):
    torch = install(Torch(speaks))
    assert frame.torch().name == name
    assert PUBLIC in torch.forget()
    for _ in range(2):
        assert frame.torch().name == name
        assert torch.forget() == on(device, RAW_STREAM, PRIVATE)


def test_another_torch_is_asked_anew(install, frame):
    for speaks, name in [((1, 0), b"dltensor_versioned"), (None, b"dltensor")]:
        install(Torch(speaks))
        assert [frame.torch().name, frame.torch().name] == [name, name]


def test_without_its_private_functions_the_public_ones_are_used(install, device, frame):
    torch = Torch()
    torch._C = types.SimpleNamespace()
    install(torch)
    frame.torch()
    torch.forget()
    assert frame.torch().name == b"dltensor_versioned"
    assert torch.forget() == on(device, STREAM, PUBLIC)


def test_private_functions_that_have_changed_are_replaced_by_the_public_ones(install, device, frame):
    torch = Torch()

    def changed():
        raise AssertionError("it takes no arguments, so this is not reached")

    torch._C = types.SimpleNamespace(**{PRIVATE: changed, RAW_STREAM: changed})
    install(torch)
    frame.torch()
    torch.forget()
    assert frame.torch().name == b"dltensor_versioned"
    assert torch.forget() == on(device, STREAM, PUBLIC)


def test_a_thread_that_asks_it_while_another_one_imports_it_waits_for_the_whole(monkeypatch, tmp_path, frame):
    meeting = types.ModuleType("meeting")
    meeting.begun, meeting.asked, meeting.made, meeting.seconds = Event(), Event(), Torch(), LIMIT_SECONDS
    monkeypatch.setitem(sys.modules, "meeting", meeting)
    (tmp_path / "torch.py").write_text(
        "import meeting\n"
        "def __getattr__(name):\n"
        "    meeting.asked.set()\n"
        "    raise AttributeError(name)\n"
        "meeting.begun.set()\n"
        "meeting.asked.wait(meeting.seconds)\n"
        "_C, cuda, from_dlpack = meeting.made._C, meeting.made.cuda, meeting.made.from_dlpack\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    # Another test may have imported the real one.
    monkeypatch.setitem(sys.modules, "torch", None)
    del sys.modules["torch"]
    importing = Thread(target=importlib.import_module, args=("torch",))
    importing.start()
    assert meeting.begun.wait(LIMIT_SECONDS)
    try:
        assert frame.torch().name == b"dltensor_versioned"
    finally:
        meeting.asked.set()
        importing.join()


def test_what_it_refuses_is_told_in_its_own_words(torch, frame):
    frame.torch()

    def refuse(_found):
        raise RuntimeError("no such type here")

    torch.from_dlpack = refuse
    frame.torch()
    torch.refuses = True
    with pytest.raises(RuntimeError, match="no such type here"):
        frame.torch()


def test_a_tensor_keeps_the_memory_and_gives_it_back(torch, link):
    publisher, subscriber = link
    for _ in range(3):
        publisher.send(np.arange(6, dtype=np.float32))
        frame = subscriber.receive()
        tensor = frame.torch()
        frame.release()
        del frame
        gc.collect()
        assert publisher.subscribers[0].in_flight == 1
        del tensor
        gc.collect()
        until(lambda: publisher.subscribers[0].in_flight == 0, "the release")


def test_a_released_frame_makes_no_tensor(torch, frame):
    frame.torch()
    frame.release()
    with pytest.raises(warpipe.ReleasedError):
        frame.torch()


def test_a_sample_is_read_only_and_a_loan_is_not(torch, device, link):
    if device.kind == "cuda":
        pytest.skip("NumPy reads no GPU")
    publisher, subscriber = link
    for seed in range(2):
        with publisher.loan((6,), "float32") as out:
            array = np.from_dlpack(out.torch())
            array[:] = seed
        with subscriber.receive() as frame:
            array = np.from_dlpack(frame.torch())
            assert not array.flags.writeable and (array == seed).all()
            del array


@pytest.fixture
def pool(torch, device):
    """A stream of the device, as one of the stand-in's pool."""
    if device.kind == "host":
        pytest.skip("the host has no streams of others")
    stream = warpipe.Stream(device)
    torch.stream = Stream(stream.ptr, 35)
    POOL.append(stream)
    return stream.ptr


# Never destroyed, as those of PyTorch.
POOL = []


def test_a_stream_of_its_pool_is_recognised_once(torch, pool, frame):
    frame.__dlpack__(stream=pool)
    assert torch.forget() == [STREAM]
    for _ in range(2):
        frame.__dlpack__(stream=pool)
        assert torch.forget() == []


def test_a_stream_that_it_was_given_is_not_taken_for_its_own(torch, pool, frame):
    torch.stream.stream_id = pool
    for _ in range(2):
        frame.__dlpack__(stream=pool)
        assert torch.forget() == [STREAM]


def test_a_stream_of_somebody_else_is_not_taken_for_its_own(torch, pool, frame):
    torch.stream = Stream(0, 0)
    for _ in range(2):
        frame.__dlpack__(stream=pool)
        assert torch.forget() == [STREAM]


def test_before_it_uses_gpus_it_is_not_asked_for_its_stream(torch, pool, frame):
    torch.cuda.is_initialized = lambda: False
    for _ in range(2):
        frame.torch()
        # The public import starts it.
        assert torch.forget() == [PUBLIC]


def test_a_loan_goes_out_behind_its_current_stream(torch, pool, link):
    publisher, subscriber = link
    for asked in (PUBLIC, PRIVATE):
        loan = publisher.loan((WORDS,), "uint64")
        _warpipe._slow_fill(loan, POOL[-1], 1, DELAY_SECONDS)
        torch.forget()
        tensor = loan.torch()
        assert asked in torch.forget()
        del tensor
        loan.send()
        with subscriber.receive() as frame:
            with pytest.raises(warpipe.TimeoutError):
                frame.wait(timeout=0)
            frame.wait()


def test_its_current_stream_waits_for_a_sample(torch, pool, device, link):
    publisher, subscriber = link
    filler = warpipe.Stream(device)
    for asked in (PUBLIC, PRIVATE):
        loan = publisher.loan((WORDS,), "uint64")
        _warpipe._slow_fill(loan, filler, 1, DELAY_SECONDS)
        loan.send(stream=filler)
        with subscriber.receive() as frame:
            torch.forget()
            tensor = frame.torch()
            assert asked in torch.forget()
            assert not POOL[-1].is_idle()
            POOL[-1].synchronize()
            assert filler.is_idle()
            del tensor


class Element:
    """An element type of a framework that nobody has heard of."""

    def __init__(self, name):
        self.name = name


def test_an_element_type_is_looked_up_once_and_an_object_that_has_one_each_time(open_publisher):
    publisher = open_publisher()
    asked = []

    class Named(type):
        @property
        def dtype(cls):
            asked.append(cls)
            return np.dtype("float16")

    class Half(metaclass=Named):
        pass

    for _ in range(3):
        with publisher.loan((2,), Half) as out:
            assert out.dtype == "float16"
    assert asked == [Half]
    changing = Element("float16")
    for name in ("float16", "int8"):
        changing.name = name
        with publisher.loan((2,), changing) as out:
            assert out.dtype == name


def test_more_element_types_than_are_remembered_are_told_apart(open_publisher):
    publisher = open_publisher()
    names = ["float16", "float32", "int8"]
    classes = [type(names[index % 3], (), {}) for index in range(100)]
    for _ in range(2):
        for index, element in enumerate(classes):
            with publisher.loan((2,), element) as out:
                assert out.dtype == names[index % 3]
