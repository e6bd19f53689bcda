"""Tensors of PyTorch that are no plain ones: their values arrive by every way in, or an error says what to do."""

import sys
import types

import numpy as np
import pytest
from conftest import LIMIT_SECONDS

import warpipe


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def place(device):
    return "cpu" if device.kind == "host" else f"cuda:{device.ordinal}"


@pytest.fixture
def ways(link, open_queue, open_worker, open_client, domain, device):
    """Every way in: a function that takes a tensor, and gives what arrived."""
    queue, worker, client = open_queue(max_attempts=1), open_worker(), open_client()
    server = warpipe.Server("embed", domain=domain, device=device, timeout=LIMIT_SECONDS)

    def send(tensor):
        link[0].send(tensor)
        return link[1].receive().numpy()

    def in_place(tensor):
        link[0].send(tensor, zero_copy=True)
        return link[1].receive().numpy()

    def fill(tensor):
        with link[0].loan(tuple(tensor.shape), tensor.dtype) as out:
            out.copy_from(tensor)
        return link[1].receive().numpy()

    def submit(tensor):
        handle = queue.submit(tensor)
        lease = worker.lease()
        arrived = lease.numpy()
        lease.complete()
        handle.result(LIMIT_SECONDS)
        return arrived

    def complete(tensor):
        handle = queue.submit(b"")
        worker.lease().complete(tensor)
        return handle.result(LIMIT_SECONDS).numpy()

    def request(tensor):
        pending = client.request(tensor)
        request = server.accept()
        arrived = request.numpy()
        request.complete()
        pending.result(LIMIT_SECONDS)
        return arrived

    def reply(tensor):
        pending = client.request(b"")
        server.accept().complete(tensor)
        return pending.result(LIMIT_SECONDS).numpy()

    def copy_from(tensor):
        memory = warpipe.Memory.allocate(4096, device=device)
        view = memory.view(tuple(tensor.shape), tensor.dtype)
        view.copy_from(tensor)
        return np.frombuffer(view.tobytes(), view.dtype).reshape(view.shape)

    with server:
        yield [send, in_place, fill, submit, complete, request, reply, copy_from]


@pytest.mark.filterwarnings("ignore::warpipe.CopyWarning")
def test_the_values_of_a_tensor_arrive_by_every_way_in(torch, place, ways):
    base = torch.arange(6, dtype=torch.float32, device=place).reshape(2, 3)
    z = torch.complex(base, base + 1)
    own = type("OfAUsersModule", (torch.Tensor,), {"__module__": "users"})
    parameter = type("OfAUsersModule", (torch.nn.Parameter,), {"__module__": "users"})
    for tensor in (
        z.conj().imag, z.conj(), z.conj().imag.t(), torch._neg_view(base), z.conj().real,
        base.clone().requires_grad_(), base.clone().requires_grad_() * 2, torch.nn.Parameter(base),
        base.as_subclass(own), torch._neg_view(base).as_subclass(own), parameter(base),
    ):  # fmt: skip
        expected = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().cpu().numpy()
        for way in ways:
            np.testing.assert_array_equal(way(tensor), expected, err_msg=f"{way.__name__} of {tensor!r}")


@pytest.mark.filterwarnings("ignore")
def test_a_tensor_without_values_of_its_own_is_an_error_with_the_next_step(torch, place, ways, device):
    base = torch.ones(3, device=place)
    wrapper = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    refused = {
        "torch.sparse_coo.*to_dense": torch.eye(3, device=place).to_sparse(),
        "torch.sparse_csr.*to_dense": torch.eye(3, device=place).to_sparse_csr(),
        "quantized.*tensors that it consists": torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8),
        "nested.*tensors that it consists": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "meta device.*no values": torch.empty(3, device="meta"),
        "lazy.*call its module": torch.nn.parameter.UninitializedParameter(),
        "TwoTensor.*consists of other": wrapper(base, base),
        "masked.*to_tensor": torch.masked.masked_tensor(base, base > 0),
        "FakeTensor of a trace.*outside": torch._subclasses.FakeTensorMode().from_tensor(base),
        "of a trace.*outside": torch._to_functional_tensor(base),
    }
    for said, tensor in refused.items():
        for way in ways[:2]:
            with pytest.raises(warpipe.NotATensorError, match=said):
                way(tensor)
        with pytest.raises(warpipe.NotATensorError, match=said):
            warpipe.Memory.allocate(64, device=device).view((3,), "float32").copy_from(tensor)


def test_a_tensor_inside_of_a_transformation_is_an_error_with_the_next_step(torch, place, ways):
    def asked(tensor):
        for way in ways[:2]:
            with pytest.raises(warpipe.NotATensorError, match="transformation.*outside of vmap, grad"):
                way(tensor)
        return tensor.sum()

    base = torch.ones((2, 3), device=place)
    torch.vmap(asked)(base)
    torch.func.grad(asked)(base)


def test_elements_that_dlpack_has_no_name_for_are_an_error_and_no_bytes(torch, place, ways):
    for name in ("uint4", "int4", "uint1", "bits8"):
        tensor = torch.arange(4, dtype=torch.uint8, device=place).view(getattr(torch, name))
        for way in ways[:2]:
            with pytest.raises(warpipe.DTypeError, match=f"torch.{name}.*view.torch.uint8"):
                way(tensor)
        np.testing.assert_array_equal(ways[0](tensor.view(torch.uint8)), np.arange(4))


@pytest.mark.filterwarnings("ignore::warpipe.CopyWarning")
def test_the_code_of_a_users_subclass_is_not_asked_for_the_values(torch, place, ways):
    def refuse(_class, function, _types, _arguments=(), _options=None):
        raise ValueError(f"{function} was called")

    own = type("Refusing", (torch.Tensor,), {"__torch_function__": classmethod(refuse)})
    for way in ways[:2]:
        np.testing.assert_array_equal(way(torch.arange(3, device=place).as_subclass(own)), np.arange(3))


def test_zeros_without_memory_arrive_as_zeros(torch, place, ways):
    np.testing.assert_array_equal(ways[0](torch._efficientzerotensor(3, device=place)), np.zeros(3))


def test_a_tensor_that_its_own_framework_does_not_hand_out_is_an_error_of_ours(link):
    class Closed:
        def __dlpack__(self, **_options):
            raise RuntimeError("it has no storage")

        def __dlpack_device__(self):
            return (1, 0)

    with pytest.raises(warpipe.ExportError, match="hand the .*Closed out: RuntimeError: it has no storage; give") as raised:
        link[0].send(Closed())
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_every_way_in_asks_for_what_a_tensor_of_pytorch_is(link, monkeypatch):
    """Where PyTorch is not installed: a stand-in with bits that say that its memory has other values."""
    if "torch" in sys.modules:
        pytest.skip("PyTorch itself is here")

    class Tensor:
        requires_grad = is_quantized = is_nested = is_meta = False
        dtype = "torch.float64"
        layout = "torch.strided"

        def __init__(self, array, negative):
            self._array, self._negative = array, negative

        def is_neg(self):
            return self._negative

        def is_conj(self):
            return False

        def _is_zerotensor(self):
            return False

        def data_ptr(self):
            return self._array.ctypes.data

        def detach(self):
            return self

        def as_subclass(self, _base):
            return self

        def resolve_conj(self):
            return self

        def resolve_neg(self):
            return Tensor(-self._array, False) if self._negative else self

        def __dlpack__(self, **options):
            return self._array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self._array.__dlpack_device__()

    class Off:
        def __enter__(self):
            pass

        def __exit__(self, *_raised):
            pass

    fake = types.SimpleNamespace(Tensor=Tensor, strided="torch.strided", _C=types.SimpleNamespace(DisableTorchFunctionSubclass=Off))
    monkeypatch.setitem(sys.modules, "torch", fake)
    for negative in (True, False):
        link[0].send(Tensor(np.arange(3.0), negative))
        assert link[1].receive().numpy().tolist() == ([0, -1, -2] if negative else [0, 1, 2])
