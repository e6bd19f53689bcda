"""Tensors that are sent where they lie: nothing is copied, the order of streams holds, and the tensor is kept so long."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref

import numpy as np
import pytest
import storages
from conftest import DEVICE, stop, until
from peers import LIMIT_SECONDS, kill, process, receive_in_place, said
from test_processes import kills, place  # noqa: F401

import warpipe
from warpipe import _warpipe


class Tensor:
    """Memory as another allocator makes it, behind an object that can be seen to go."""

    def __init__(self, device, shape=(4,), dtype="int32", nbytes=4096, offset=256):
        self.view = _warpipe._allocate_plain(nbytes, device).view(shape, dtype, offset)
        self.ptr = self.view.ptr
        self.fill = self.view.copy_from
        self.__dlpack__ = self.view.__dlpack__

    @property
    def __array_interface__(self):
        return self.view.__array_interface__

    @property
    def __cuda_array_interface__(self):
        return self.view.__cuda_array_interface__


@pytest.fixture
def tensor(device):
    tensor = Tensor(device)
    tensor.fill(np.arange(4, dtype=np.int32))
    tensor.view.wait()
    yield tensor
    # The test's arguments outlive its fixtures.
    vars(tensor).clear()


def test_a_tensor_is_received_where_it_lies(link, tensor):
    publisher, subscriber = link
    sequence = publisher.send(tensor, metadata={"n": 1}, zero_copy="require")
    with subscriber.receive() as frame:
        assert frame.in_place and frame.ptr == tensor.ptr and frame.sequence == sequence == 1
        assert (frame.shape, frame.dtype, frame.nbytes, frame.metadata) == ((4,), "int32", 16, {"n": 1})
        assert frame.tobytes() == np.arange(4, dtype=np.int32).tobytes()
        assert frame.numpy().tolist() == [0, 1, 2, 3]
    publisher.send(np.arange(2))
    with subscriber.receive() as frame:
        assert not frame.in_place and frame.sequence == 2


def test_a_tensor_is_kept_until_everybody_has_released_it(open_publisher, open_subscriber, device):
    publisher = open_publisher()
    subscribers = [open_subscriber(), open_subscriber()]
    publisher.wait_for_subscribers(2)
    tensor = Tensor(device)
    seen = weakref.ref(tensor)
    publisher.send(tensor, zero_copy=True)
    del tensor
    gc.collect()
    assert seen() is not None and publisher.in_place == 1
    first, second = (subscriber.receive() for subscriber in subscribers)
    first.release()
    held = second.numpy() if device.kind == "host" else second
    second = None if device.kind == "host" else second.release()
    gc.collect()
    if device.kind == "host":
        # An array of it is still there.
        assert publisher.in_place == 1 and seen() is not None and held.shape == (4,)
    del held
    gc.collect()
    until(lambda: publisher.in_place == 0, "the tensor")
    gc.collect()
    assert seen() is None


def test_without_subscribers_it_is_let_go_at_once(open_publisher, tensor):
    publisher = open_publisher()
    publisher.send(tensor, zero_copy=True)
    until(lambda: publisher.in_place == 0, "the tensor")


def test_the_next_send_lets_go_of_what_is_back(link, tensor):
    publisher, subscriber = link
    for _ in range(20):
        publisher.send(tensor, zero_copy=True)
        subscriber.receive().release()
    until(lambda: publisher.in_place == 0, "the tensors")


@pytest.mark.parametrize("strides", [(1, 3), (-3, 1)], ids=["turned", "backwards"])
def test_strides_and_offset_are_kept(link, device, strides):
    if device.kind != "host":
        pytest.skip("made with NumPy's strides")
    publisher, subscriber = link
    whole = Tensor(device, (6,), "int16")
    whole.fill(np.arange(6, dtype=np.int16))
    array = np.asarray(whole.view)
    turned = array.reshape(2, 3).T if strides == (1, 3) else array.reshape(2, 3)[::-1]
    assert publisher.send(turned, zero_copy="require")
    with subscriber.receive() as frame:
        assert frame.in_place and frame.strides == strides and frame.numpy().tolist() == turned.tolist()
        array[0] = 77
        assert frame.numpy().tolist() == turned.tolist() and 77 in frame.numpy()


def test_what_cannot_be_shared_is_copied_with_the_reason_or_refused(link, tensor, device):
    publisher, subscriber = link
    cases = {
        "ordinary host memory" if device.kind == "host" else "cuMemMap": (
            np.arange(4) if device.kind == "host" else warpipe.Memory.allocate(16, device=device), None),
        "that describe tensors": (tensor, {"text": "x" * 4060}),
    }
    if device.kind == "host":
        cases["gathered into a copy"] = (np.asarray(Tensor(device, (8,)).view)[::2], None)
        cases["it is empty"] = (np.zeros(0), None)
        cases["gathered"] = (b"bytes", None)
    for reason, (what, metadata) in cases.items():
        with pytest.warns(warpipe.CopyWarning, match=reason):
            publisher.send(what, metadata=metadata, zero_copy=True)
        with subscriber.receive() as frame:
            assert not frame.in_place and frame.metadata == (metadata or {})
            # The tensor's object is kept while it is copied, and the test takes the memory away
            # from under it.
            frame.wait()
        with pytest.raises(BufferError, match=reason):
            publisher.send(what, metadata=metadata, zero_copy="require")
    with pytest.raises(warpipe.ArgumentError, match="require"):
        publisher.send(tensor, zero_copy="maybe")
    with pytest.raises(TypeError):
        publisher.send(tensor, zero_copy=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        publisher.send(np.arange(4) if device.kind == "host" else tensor)
        publisher.send(tensor, zero_copy=True)
    copied, shared = subscriber.receive(), subscriber.receive()
    copied.wait()
    assert (copied.in_place, shared.in_place) == (False, True)


def test_ls_shows_how_often_a_tensor_was_copied_and_the_last_reason(link, tensor, device, domain):
    publisher, subscriber = link
    environment = {**os.environ, "WARPIPE_DOMAIN": str(domain.path)}

    def look():
        command = [sys.executable, "-m", "warpipe", "ls", "-v", "--json"]
        ran = subprocess.run(command, env=environment, capture_output=True, timeout=10 * LIMIT_SECONDS, check=True)
        (endpoint,) = [it for it in json.loads(ran.stdout)["endpoints"] if it["name"] == publisher.name]
        return endpoint["copied"]

    with subscriber:
        publisher.send(tensor, zero_copy="require")
        subscriber.receive().release()
        assert look() is None, "nothing was copied"
        for what, metadata in (tensor, {"text": "x" * 4060}), (warpipe.Memory.allocate(16, device=device), None):
            with pytest.warns(warpipe.CopyWarning):
                publisher.send(what, metadata=metadata, zero_copy=True)
            with subscriber.receive() as frame:
                frame.wait()
        copied = look()
    assert (copied["path"], copied["count"], copied["bytes"]) == ("not_exportable", 2, 32)
    assert "cannot be exported" in copied["reason"]


def test_a_consumer_waits_for_the_tensors_work(link, device, domain):
    """The stream that the tensor is sent behind is stopped: the data is not there before it goes on."""
    publisher, subscriber = link
    gate = warpipe.Timeline.create("gate", domain=domain, device=device)
    opened = warpipe.Timeline.open("gate", domain=domain, device=device)
    stream, tensor = warpipe.Stream(device), Tensor(device)
    tensor.fill(np.zeros(4, np.int32))
    tensor.view.wait()
    array_before_work = tensor if device.kind != "host" else np.asarray(tensor.view)
    opened.wait(1, stream=stream)
    tensor.fill(np.full(4, 5, np.int32), stream=stream)
    publisher.send(array_before_work, stream=stream, zero_copy="require")
    frame = subscriber.receive()
    with pytest.raises(warpipe.TimeoutError):
        frame.wait(0.05)
    _warpipe._skip_waits(True)
    try:
        too_early = np.asarray(frame.numpy()).tolist() if device.kind == "host" else [0] * 4
    finally:
        _warpipe._skip_waits(False)
    gate.signal(1)
    assert too_early == [0] * 4 and frame.numpy().tolist() == [5] * 4


def test_it_is_kept_until_the_consumers_stream_is_past_it(link, device, domain, tensor):
    publisher, subscriber = link
    gate = warpipe.Timeline.create("gate", domain=domain, device=device)
    opened = warpipe.Timeline.open("gate", domain=domain, device=device)
    stream = warpipe.Stream(device)
    publisher.send(tensor, zero_copy="require")
    frame = subscriber.receive()
    opened.wait(1, stream=stream)
    frame.release(stream=stream)
    assert publisher.in_place == 1
    gate.signal(1)
    stream.synchronize()
    until(lambda: publisher.in_place == 0, "the tensor")


def test_late_subscribers_get_it_from_the_history(open_publisher, open_subscriber, tensor):
    publisher = open_publisher(history=1)
    publisher.send(tensor, zero_copy="require")
    assert publisher.in_place == 1
    with open_subscriber().receive() as frame:
        assert frame.in_place and frame.numpy().tolist() == [0, 1, 2, 3]
    publisher.send(b"the next one")
    until(lambda: publisher.in_place == 0, "the tensor")


def test_close_does_not_wait_for_a_tensor_that_only_the_history_keeps(domain, device, tensor):
    publisher = warpipe.Publisher("a", domain=domain, device=device, history=1, timeout=None)
    publisher.send(tensor, zero_copy="require")
    assert publisher.in_place == 1
    closing = threading.Thread(target=publisher.close, daemon=True)
    closing.start()
    until(lambda: publisher.closed, "the close")
    closing.join(LIMIT_SECONDS)


def test_no_metadata_makes_a_sample_lie_elsewhere(link, tensor):
    publisher, subscriber = link
    publisher.send(tensor, metadata=b"placed", zero_copy="require")
    assert subscriber.receive().metadata_bytes == b"placed"
    for metadata in (b"\xf5WPIP\x02\x00", b"\x00\x04WPHL", b"\x01\x01a" + bytes(17)):
        publisher.send(b"copied", metadata=metadata)
        with subscriber.receive() as frame:
            assert not frame.in_place and (frame.metadata_bytes, frame.tobytes()) == (metadata, b"copied")


def test_another_process_reads_it_where_it_lies(open_publisher, place, tensor):  # noqa: F811
    publisher = open_publisher()
    with process(receive_in_place, *place) as (_child, pipe):
        assert said(pipe) == "ready"
        publisher.send(tensor, metadata={"n": 7}, zero_copy="require")
        assert said(pipe) == (True, (4,), "int32", {"n": 7}, [0, 1, 2, 3])
        tensor.fill(np.full(4, 9, np.int32))
        tensor.view.wait()
        pipe.send("look again")
        assert said(pipe) in ([9, 9, 9, 9], [0, 1, 2, 3] if place[1] != "host" else None)
        assert said(pipe) == "released"
        until(lambda: publisher.in_place == 0, "the tensor")


@kills
def test_the_death_of_its_reader_gives_it_back(open_publisher, place, tensor):  # noqa: F811
    publisher = open_publisher()
    with process(receive_in_place, *place) as (child, pipe):
        assert said(pipe) == "ready"
        publisher.send(tensor, zero_copy="require")
        assert said(pipe)[0] is True
        assert publisher.in_place == 1
        kill(child)
        until(lambda: publisher.in_place == 0, "the tensor")


@pytest.mark.parametrize("allocator", ["", "expandable_segments:True", "pool"])
def test_a_tensor_of_pytorchs_caching_allocator(place, tmp_path, allocator):  # noqa: F811
    pytest.importorskip("torch")
    if place[1] == "host":
        pytest.skip("PyTorch's allocator is a GPU's")
    import os
    import subprocess
    import sys

    code = f"""
import contextlib, warnings, torch, warpipe.torch
pool = warpipe.torch.pool() if {allocator!r} == "pool" else None
publisher = warpipe.Publisher("t", domain={str(tmp_path / "d")!r}, device={place[1]!r})
subscriber = warpipe.Subscriber("t", domain={str(tmp_path / "d")!r}, device={place[1]!r})
torch.rand(1 << 20, device={place[1]!r})
with torch.cuda.use_mem_pool(pool, torch.device({place[1]!r}).index) if pool else contextlib.nullcontext():
    tensor = torch.arange(1000, device={place[1]!r}, dtype=torch.float32)[100:]
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    publisher.send(tensor, zero_copy=True)
frame = subscriber.receive()
got = frame.torch()
assert (got == torch.arange(100, 1000, device={place[1]!r})).all().item()
print(frame.in_place, frame.ptr == tensor.data_ptr(), [str(one.message) for one in said])
del got
frame.release()
torch.cuda.synchronize()
subscriber.close()
publisher.close()
"""
    is_expandable = allocator.startswith("expandable")
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": allocator if is_expandable else ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    wanted = "False False ['zero_copy: the tensor is copied" if is_expandable else "True True []"
    assert done.stdout.startswith(wanted), done.stdout
    assert "expandable_segments" in done.stdout or not is_expandable


HAS_POOL = pytest.mark.skipif(DEVICE == "host", reason="PyTorch has pools of GPU memory alone")


@pytest.fixture
def pooled(device):
    """A tensor in memory of the allocator for PyTorch, and what PyTorch calls to free it."""
    tensor = storages.Allocated(device)
    freed = []

    def free():
        if not freed:
            freed.append(storages.allocator().warpipe_torch_free(tensor.address, storages.NBYTES, device.ordinal, None))

    yield tensor, free
    free()


@HAS_POOL
def test_a_tensor_of_the_pool_for_pytorch_is_received_where_it_lies(link, pooled, domain):
    publisher, subscriber = link
    tensor, _ = pooled
    for number in range(3):
        publisher.send(tensor, metadata={"n": number}, zero_copy="require")
        with subscriber.receive() as frame:
            assert frame.in_place and frame.ptr == tensor.address and frame.metadata == {"n": number}
            assert (frame.shape, frame.dtype) == ((storages.NBYTES,), "uint8")
            assert frame.tobytes() == bytes(storages.NBYTES)
    assert len([one for one in domain.endpoints() if one.name.startswith("in-place/")]) == 1
    publisher.close()
    assert not [one for one in domain.endpoints() if one.alive and one.name.startswith("in-place/")]


@HAS_POOL
def test_memory_that_pytorch_frees_goes_with_the_next_tensor_and_with_the_subscriber(link, device):
    publisher, subscriber = link
    before = device.bytes_held
    for _ in range(2):
        tensor = storages.Allocated(device)
        publisher.send(tensor, zero_copy="require")
        subscriber.receive().release()
        until(lambda: publisher.in_place == 0, "the release")
        storages.allocator().warpipe_torch_free(tensor.address, storages.NBYTES, device.ordinal, None)
    publisher.close()
    subscriber.close()
    until(lambda: device.bytes_held <= before, "the end of the memory")


SENDS_POOLED = """
import storages, sys, warpipe
publisher = warpipe.Publisher("a", domain=sys.argv[1], timeout=0.2)
publisher.wait_for_subscribers(1)
tensor = storages.Allocated(publisher.device)
publisher.send(tensor, zero_copy="require")
if len(sys.argv) > 2:
    publisher.close()
print("sent", flush=True)
sys.stdin.read()
"""


def sends_pooled(domain, *closes):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    command = [sys.executable, "-c", SENDS_POOLED, str(domain.path), *closes]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


@HAS_POOL
def test_a_frame_of_the_pool_can_be_received_after_its_publisher_has_closed(domain, device):
    sender = sends_pooled(domain, "closes")
    try:
        with warpipe.Subscriber("a", domain=domain, device=device, wait=LIMIT_SECONDS, timeout=LIMIT_SECONDS) as subscriber:
            assert sender.stdout.readline() == b"sent\n"
            with subscriber.receive() as frame:
                assert frame.in_place and frame.tobytes() == bytes(storages.NBYTES)
        owned = lambda: [one for one in domain.endpoints() if one.alive]
        until(lambda: not owned(), "the end of the memory's name")
    finally:
        sender.kill()
        sender.communicate()


@HAS_POOL
def test_a_frame_of_a_publisher_that_is_stopped_is_received_when_it_goes_on(domain, device):
    sender = sends_pooled(domain)
    try:
        with warpipe.Subscriber("a", domain=domain, device=device, wait=LIMIT_SECONDS, timeout=LIMIT_SECONDS) as subscriber:
            assert sender.stdout.readline() == b"sent\n"
            stop(sender)
            with pytest.raises(warpipe.HandshakeError):
                subscriber.receive()
            os.kill(sender.pid, signal.SIGCONT)
            with subscriber.receive() as frame:
                assert (frame.in_place, frame.sequence) == (True, 1)
    finally:
        sender.kill()
        sender.communicate()


@HAS_POOL
@kills
def test_a_frame_of_the_pool_is_read_only_and_outlives_its_publisher(domain, device):
    sender = sends_pooled(domain)
    try:
        with warpipe.Subscriber("a", domain=domain, device=device, wait=LIMIT_SECONDS, timeout=LIMIT_SECONDS) as subscriber:
            frame = subscriber.receive()
            assert frame.in_place and frame.__cuda_array_interface__["data"][1], "it is read-only"
            found = frame.tobytes()
            sender.kill()
            sender.wait(LIMIT_SECONDS)
            assert frame.tobytes() == found == bytes(storages.NBYTES)
            del frame
    finally:
        sender.kill()
        sender.communicate()
