"""Memory of the host by Python's buffer protocol."""

import array
import gc
import weakref
import zlib

import pytest

import warpipe
from conftest import DEVICE, LIMIT_SECONDS, until

np = pytest.importorskip("numpy")
on_host = pytest.mark.skipif(DEVICE != "host", reason="a buffer is memory of the host")


def received(link, data):
    publisher, subscriber = link
    publisher.send(data)
    return subscriber.receive()


@on_host
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16",
                                   "float32", "float64", "complex64", "complex128"])
def test_a_buffer_is_the_samples_own_memory_with_its_shape_and_element_type(link, dtype):
    data = np.arange(6).reshape(2, 3).astype(dtype)
    frame = received(link, data)
    view = memoryview(frame)
    assert view.readonly and view.shape == (2, 3) and view.itemsize == data.itemsize and view.c_contiguous
    assert np.asarray(view).dtype == data.dtype and np.asarray(view).tolist() == data.tolist()
    assert np.asarray(view).ctypes.data == frame.ptr
    made = np.asarray(frame)
    assert made.ctypes.data == frame.ptr and made.dtype == data.dtype and not made.flags.writeable
    with pytest.raises(TypeError, match="read-only"):
        view.cast("B")[0] = 1


@on_host
def test_a_buffer_goes_wherever_python_takes_one(link, tmp_path):
    data = np.arange(12, dtype=np.int32).reshape(3, 4)
    frame = received(link, data)
    assert bytes(frame) == data.tobytes() == bytearray(frame)
    assert zlib.crc32(memoryview(frame)) == zlib.crc32(data.tobytes())
    (tmp_path / "file").write_bytes(memoryview(frame))
    assert (tmp_path / "file").read_bytes() == data.tobytes()
    assert array.array("i", memoryview(frame).cast("B").cast("i")).tolist() == list(range(12))


@on_host
def test_a_buffer_keeps_the_slot_until_it_is_given_back(open_publisher, open_subscriber):
    publisher, subscriber = open_publisher(depth=1, policy="fail"), open_subscriber()
    publisher.send(b"held")
    frame = subscriber.receive()
    view = memoryview(frame)
    frame.release()
    del frame
    for number in range(20):
        loan = publisher.loan(4, "uint8")
        loan.discard()
    assert bytes(view) == b"held"
    with pytest.raises(warpipe.FullError):
        publisher.send(b"next")
    view.release()

    def sent():
        try:
            return publisher.send(b"next")
        except warpipe.FullError:
            return False

    until(sent, "room")
    assert bytes(subscriber.receive()) == b"next"


@on_host
def test_a_loan_is_written_through_its_buffer(link):
    publisher, subscriber = link
    with publisher.loan((2, 2), "int16") as out:
        view = memoryview(out)
        assert not view.readonly
        view[1, 0] = 7
        view[0, 1] = -1
        del view
    assert np.asarray(subscriber.receive()).tolist()[1][0] == 7


@on_host
def test_memory_and_its_views_are_buffers(device):
    memory = warpipe.Memory.allocate(64, device=device)
    memory.view((2, 4), "float64").copy_from(np.arange(8.0).reshape(2, 4))
    assert memoryview(memory.view((2, 4), "float64")).tolist() == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    memoryview(memory)[0:8] = bytes(8)
    assert bytes(memory)[:8] == bytes(8)


@on_host
def test_strides_travel_in_a_buffer_and_a_consumer_of_contiguous_memory_is_refused(link):
    publisher, subscriber = link
    data = np.arange(24, dtype=np.int16).reshape(4, 6)
    publisher.send(data[:, ::2], zero_copy=False)
    publisher.send(data.T)
    publisher.send(np.asfortranarray(data))
    for wanted in (data[:, ::2], data.T, data):
        frame = subscriber.receive()
        view = memoryview(frame)
        assert np.asarray(view).tolist() == wanted.tolist()
        assert view.strides == tuple(stride * 2 for stride in frame.strides)
        in_order = np.asarray(view).flags.c_contiguous
        if in_order:
            assert zlib.crc32(view) == zlib.crc32(wanted.tobytes())
        else:
            with pytest.raises(BufferError):
                zlib.crc32(view)
        assert frame.tobytes() == wanted.tobytes() == view.tobytes()


@on_host
def test_an_element_type_without_a_letter_says_so_and_its_bytes_still_go(link):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    frame = received(link, np.arange(4).astype(ml_dtypes.bfloat16))
    with pytest.raises(BufferError, match="no letter for bfloat16.*numpy"):
        memoryview(frame)
    assert zlib.crc32(frame) == zlib.crc32(frame.tobytes())
    assert np.asarray(frame).dtype == ml_dtypes.bfloat16


@on_host
def test_a_released_sample_has_no_buffer(link):
    frame = received(link, b"x")
    frame.release()
    with pytest.raises(warpipe.ReleasedError):
        memoryview(frame)
    with pytest.raises(warpipe.ReleasedError):
        np.asarray(frame)


@on_host
def test_empty_tensors_and_single_elements_are_buffers(link):
    empty = memoryview(received(link, np.zeros((0, 3), np.float32)))
    assert empty.shape == (0, 3) and empty.tobytes() == b""
    single = memoryview(received(link, np.array(5, np.int64)))
    assert single.shape == () and single.tolist() == 5


@on_host
def test_a_wait_that_runs_out_is_told_once_and_not_waited_for_twice(open_publisher, open_subscriber, domain, device):
    gate = warpipe.Timeline.create("gate", domain=domain, device=device)
    publisher, subscriber = open_publisher(), open_subscriber(timeout=0.2)
    stream = warpipe.Stream(device)
    warpipe.Timeline.open("gate", domain=domain, device=device).wait(1, stream=stream)
    loan = publisher.loan(4, "uint8")
    loan.send(stream=stream)
    frame = subscriber.receive()
    for make in (memoryview, np.asarray, bytes):
        with pytest.raises(warpipe.TimeoutError):
            make(frame)
    gate.signal(1)
    frame.wait(LIMIT_SECONDS)
    assert len(np.asarray(frame)) == 4


@on_host
def test_a_buffer_that_was_refused_keeps_no_sample_behind(open_publisher, open_subscriber, domain, device):
    gate = warpipe.Timeline.create("gate", domain=domain, device=device)
    publisher, subscriber = open_publisher(), open_subscriber(timeout=0.05)
    stream = warpipe.Stream(device)
    warpipe.Timeline.open("gate", domain=domain, device=device).wait(1, stream=stream)
    publisher.loan(4, "uint8").send(stream=stream)

    def refused():
        frame = subscriber.receive()
        try:
            memoryview(frame)
        except warpipe.TimeoutError:
            pass
        return weakref.ref(frame)

    frame = refused()
    gc.collect()
    assert frame() is None
    gate.signal(1)


@on_host
def test_views_outlive_the_sample_its_release_and_its_link(link):
    publisher, subscriber = link
    with publisher.loan((2, 3), "int32") as out:
        written = memoryview(out)
        assert not written.readonly
        written.cast("B")[:] = bytes(range(24))
    frame = subscriber.receive()
    first = memoryview(frame)
    second, third = memoryview(first), first[1:]
    assert first.readonly and second.readonly
    wanted = np.frombuffer(bytes(range(24)), np.int32).reshape(2, 3).tolist()
    frame.release()
    subscriber.close()
    publisher.close()
    del frame
    gc.collect()
    first.release()
    second.release()
    assert third.tolist() == wanted[1:]


@pytest.mark.skipif(DEVICE == "host", reason="for memory of a GPU")
def test_memory_of_a_gpu_is_no_buffer_and_says_what_to_use(link):
    frame = received(link, np.arange(4))
    with pytest.raises(BufferError, match="numpy"):
        memoryview(frame)
    assert np.asarray(frame).tolist() == [0, 1, 2, 3]


@on_host
def test_a_consumer_that_would_lose_a_tensors_shape_is_refused_and_told_what_does_not(link, open_queue, open_worker):
    data, queue, worker = np.arange(6.0).reshape(2, 3), open_queue(), open_worker()
    queue.submit(data)
    with worker.lease(LIMIT_SECONDS) as lease:
        view = warpipe.Memory.allocate(64, device="host").view((2, 3), "float64")
        view.copy_from(data)
        for held in (received(link, data), lease, view):
            # As PyTorch's asarray asks: for bytes without a shape.
            with pytest.raises(BufferError, match=r"shape \[2, 3\]; use .torch\(\) or .numpy\(\), or memoryview"):
                zlib.crc32(held)
        lease.complete()
    row = received(link, data.reshape(-1))
    assert zlib.crc32(row) == zlib.crc32(data.tobytes())


@on_host
def test_pytorchs_asarray_gives_no_tensor_of_another_shape(link):
    torch = pytest.importorskip("torch")
    frame = received(link, np.arange(6.0).reshape(2, 3))
    with pytest.raises(RuntimeError):
        torch.asarray(frame)
    assert torch.as_tensor(frame).shape == frame.shape
