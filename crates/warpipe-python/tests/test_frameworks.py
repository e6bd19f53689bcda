"""Round trips through PyTorch, CuPy, JAX and Numba, wherever each of them is installed."""

import gc

import numpy as np
import pytest
from conftest import until
from test_sources import NUMPY_DTYPES, numpy_dtype, pattern

import warpipe


class Numpy:
    """On the host; to and from a GPU its arrays are copied."""

    def __init__(self, device):
        pass

    def has(self, name):
        return True

    def make(self, data):
        return data

    def read(self, frame):
        return frame.numpy()

    def fetch(self, array):
        return np.asarray(array)


class Torch:
    def __init__(self, device):
        self.torch = pytest.importorskip("torch")
        self.place = "cpu" if device.kind == "host" else f"cuda:{device.ordinal}"

    def has(self, name):
        element = getattr(self.torch, name, None)
        if element is None:
            return False
        try:
            self.torch.from_dlpack(self.torch.zeros(1, dtype=element))
        except (BufferError, RuntimeError):
            return False
        return True

    def make(self, data):
        raw = self.torch.from_numpy(data.view(np.uint8).copy()).to(self.place)
        return raw.view(getattr(self.torch, data.dtype.name)).reshape(data.shape)

    def read(self, frame):
        return frame.torch()

    def fetch(self, array):
        return array.contiguous().view(self.torch.uint8).cpu().numpy()


class Cupy:
    def __init__(self, device):
        self.cupy = pytest.importorskip("cupy")
        if device.kind == "host":
            pytest.skip("CuPy has no arrays on the host")

    def has(self, name):
        try:
            self.cupy.from_dlpack(self.cupy.zeros(1, np.dtype(name)))
        except (TypeError, ValueError, BufferError, RuntimeError):
            return False
        return True

    def make(self, data):
        return self.cupy.asarray(data)

    def read(self, frame):
        return frame.cupy()

    def fetch(self, array):
        return array.get()


class Jax:
    def __init__(self, device):
        self.jax = pytest.importorskip("jax")
        self.jax.config.update("jax_enable_x64", True)
        if device.kind == "cuda" and self.jax.default_backend() != "gpu":
            pytest.skip("this JAX has no GPU")

    def has(self, name):
        try:
            array = self.jax.numpy.zeros(1, numpy_dtype(name))
            self.jax.dlpack.from_dlpack(array)
        except Exception:
            return False
        return array.dtype.name == name

    def make(self, data):
        return self.jax.numpy.asarray(data)

    def read(self, frame):
        return frame.jax()

    def fetch(self, array):
        return np.asarray(array)


FRAMEWORKS = {"numpy": Numpy, "torch": Torch, "cupy": Cupy, "jax": Jax}


@pytest.mark.parametrize("name", NUMPY_DTYPES)
@pytest.mark.parametrize("reader", FRAMEWORKS)
@pytest.mark.parametrize("writer", FRAMEWORKS)
def test_every_element_type_goes_from_each_framework_to_each(link, device, writer, reader, name):
    publisher, subscriber = link
    source, target = FRAMEWORKS[writer](device), FRAMEWORKS[reader](device)
    if not (source.has(name) and target.has(name)):
        pytest.skip(f"{writer} or {reader} has no {name} to hand over")
    data = pattern(numpy_dtype(name))
    publisher.send(source.make(data))
    frame = subscriber.receive()
    assert (frame.dtype, frame.shape) == (name, data.shape)
    received = target.read(frame)
    frame.release()
    assert target.fetch(received).tobytes() == data.tobytes()
    del received
    gc.collect()
    frame = None


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_array_holds_the_slot_until_it_is_gone(link, device, framework):
    publisher, subscriber = link
    target = FRAMEWORKS[framework](device)
    if framework in ("jax", "numpy") and device.kind == "cuda":
        pytest.skip("JAX and NumPy get copies on a GPU")
    publisher.send(target.make(np.arange(64, dtype=np.float32)))
    frame = subscriber.receive()
    array = target.read(frame)
    frame.release()
    del frame
    gc.collect()
    first = publisher.subscribers[0].in_flight
    assert np.frombuffer(target.fetch(array).tobytes(), np.float32).tolist() == list(range(64))
    del array
    gc.collect()
    # JAX copies what is not aligned to its liking; a reader in place holds the slot.
    assert first == 1 or framework == "jax"
    until(lambda: publisher.subscribers[0].in_flight == 0, "the release")


@pytest.mark.parametrize("framework", ["torch", "cupy"])
def test_a_loan_is_written_by_a_framework_and_sent_behind_it(link, device, framework):
    publisher, subscriber = link
    target = FRAMEWORKS[framework](device)
    with publisher.loan((4, 5), "float32") as out:
        out.torch().fill_(3) if framework == "torch" else out.cupy().fill(3)
        out[1] = 4
    received = target.fetch(target.read(subscriber.receive())).tobytes()
    assert np.frombuffer(received, np.float32).reshape(4, 5).tolist() == [[3] * 5, [4] * 5, [3] * 5, [3] * 5]


@pytest.mark.parametrize("framework", ["torch", "cupy"])
def test_tensors_with_gaps_and_turned_ones_keep_their_values(link, device, framework):
    publisher, subscriber = link
    target = FRAMEWORKS[framework](device)
    whole = target.make(np.arange(60, dtype=np.int32).reshape(3, 20))
    turned = whole.t() if framework == "torch" else whole.T
    for part in (turned, whole[:, ::3], whole[:, 2:7]):
        publisher.send(part)
        frame = subscriber.receive()
        expected = part.cpu().numpy() if framework == "torch" else part.get()
        np.testing.assert_array_equal(frame.numpy(), expected)


def test_a_tensor_on_the_host_can_be_sent_from_either_device(link, device):
    torch = Torch(device)
    link[0].send(torch.torch.arange(5))
    assert link[1].receive().numpy().tolist() == [0, 1, 2, 3, 4]


def test_a_tensor_of_a_gpu_cannot_be_sent_by_a_publisher_of_the_host(open_publisher, device):
    if device.kind == "host":
        pytest.skip("there is no GPU to take a tensor from")
    torch = Torch(device)
    with pytest.raises(warpipe.WrongDeviceError):
        open_publisher("host", device="host").send(torch.torch.zeros(3, device=torch.place))


def test_numba_reads_and_writes_by_the_interface(link, device):
    cuda = pytest.importorskip("numba.cuda")
    if device.kind == "host":
        pytest.skip("Numba's device arrays lie on a GPU")
    publisher, subscriber = link
    publisher.send(cuda.to_device(np.arange(10, dtype=np.float32)))
    assert cuda.as_cuda_array(subscriber.receive()).copy_to_host().tolist() == list(range(10))


def test_a_tensor_that_was_copied_is_let_go_without_another_send(link, device):
    publisher, subscriber = link
    publisher.send(np.zeros(1 << 16, np.uint8))
    subscriber.receive().release()
    until(lambda: publisher.subscribers[0].in_flight == 0, "the release")
    before = device.bytes_held
    with warpipe.Memory.allocate(1 << 16, device=device) as source:
        assert device.bytes_held > before
        publisher.send(source)
    del source
    until(lambda: device.bytes_held == before, "the end of the tensor that was sent")


def test_a_stream_of_cupys_may_end_before_what_was_made_on_it(link, device):
    cupy = Cupy(device).cupy
    publisher, subscriber = link
    for make in (cupy.from_dlpack, cupy.asarray):
        with cupy.cuda.Stream(non_blocking=True):
            with publisher.loan(1 << 16, "float32") as out:
                array = make(out)
                array[:] = 3
                del array
        frame = subscriber.receive()
        with cupy.cuda.Stream(non_blocking=True):
            array = make(frame)
        gc.collect()
        # CuPy's current stream now is another one, which is in no order with the first.
        frame.wait()
        assert float(array.sum()) == 3 << 16
        # Its stream has gone, unless we keep it; the slot is given back behind it all the same. An
        # array made by the interface holds the frame itself.
        del array, frame
        gc.collect()
        until(lambda: publisher.subscribers[0].in_flight == 0, "the release")


def test_a_stream_that_is_a_number_may_end_when_its_array_has_gone(link, device):
    cupy = Cupy(device).cupy
    publisher, subscriber = link
    publisher.send(np.zeros(1 << 16, np.uint8))
    frame = subscriber.receive()
    stream = cupy.cuda.Stream(non_blocking=True)
    # Not CuPy's current one, so that nothing but the number is known of it.
    capsule = frame.__dlpack__(stream=stream.ptr, max_version=(1, 0))
    del capsule
    stream.synchronize()
    del stream
    gc.collect()
    frame.release()
    until(lambda: publisher.subscribers[0].in_flight == 0, "the release")


def test_jax_gets_a_frame_by_either_way(link, device):
    Jax(device)
    publisher, subscriber = link
    publisher.send(np.arange(6, dtype=np.int32))
    frame = subscriber.receive()
    assert frame.jax().tolist() == frame.jax(copy=True).tolist() == list(range(6))


@pytest.fixture
def second(device):
    if device.kind == "host":
        pytest.skip("there is one host")
    try:
        return warpipe.Device("cuda:1")
    except warpipe.DeviceError as error:
        pytest.skip(f"no second GPU: {error}")


def test_a_tensor_crosses_to_another_gpu(open_publisher, open_subscriber, second):
    publisher, subscriber = open_publisher(), open_subscriber(device=second)
    wanted = np.arange(1 << 20, dtype=np.int32)
    for _ in range(3):
        publisher.send(wanted)
        with subscriber.receive() as frame:
            assert frame.numpy().tolist() == wanted.tolist()
    gc.collect()
    until(lambda: publisher.subscribers[0].in_flight == 0, "the release")


def test_pytorch_reads_a_tensor_of_another_gpu(open_publisher, open_subscriber, device, second):
    torch = Torch(device).torch
    publisher, subscriber = open_publisher(), open_subscriber(device=second)
    sent = torch.arange(1 << 20, dtype=torch.float32, device="cuda:0")
    publisher.send(sent)
    frame = subscriber.receive()
    received = frame.torch()
    assert torch.equal((received + 1).cpu(), (sent + 1).cpu())
    assert frame.device == second and received.device.index == frame.__dlpack_device__()[1]
    del received, frame
    gc.collect()
    until(lambda: publisher.subscribers[0].in_flight == 0, "the release")
