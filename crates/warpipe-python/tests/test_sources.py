"""What is sent: element types, layouts, and objects that are no tensors."""

import ml_dtypes
import numpy as np
import pytest

import warpipe

# NumPy has no complex of two half floats, and ml_dtypes not for long; pairs of four bits are PyTorch's alone.
NUMPY_DTYPES = [
    name
    for name in warpipe.DTYPES
    if name not in ("complex32", "float4_e2m1fn_x2") or hasattr(ml_dtypes, name)
]


def numpy_dtype(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def pattern(dtype, shape=(3, 5)):
    count = int(np.prod(shape))
    if dtype.kind == "b":
        return (np.arange(count) % 3 == 0).reshape(shape)
    # Bytes that are finite in every type: small and positive.
    return (np.arange(count) % 7 + 1).astype(np.float32).astype(dtype).reshape(shape)


@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_every_element_type_makes_the_round_trip(link, name):
    publisher, subscriber = link
    data = pattern(numpy_dtype(name))
    publisher.send(data)
    frame = subscriber.receive()
    assert frame.dtype == name
    received = frame.numpy()
    assert received.dtype == data.dtype
    assert received.tobytes() == data.tobytes()


@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_every_element_type_can_be_loaned(link, name, device):
    if device.kind == "cuda":
        pytest.skip("a loan on a GPU is written by a framework: see test_frameworks")
    publisher, subscriber = link
    data = pattern(numpy_dtype(name))
    with publisher.loan(data.shape, data.dtype) as out:
        out[:] = data
    assert subscriber.receive().tobytes() == data.tobytes()


@pytest.mark.parametrize(
    "given, name",
    [("float32", "float32"), (np.float32, "float32"), (np.dtype("i2"), "int16"), (ml_dtypes.bfloat16, "bfloat16"),
     (float, "float64"), (int, "int64"), (bool, "bool"), (np.bool_, "bool"), (ml_dtypes.float8_e5m2, "float8_e5m2")],
)
def test_an_element_type_may_be_given_as_any_framework_writes_it(link, given, name):
    loan = link[0].loan((2,), given)
    assert loan.dtype == name


@pytest.mark.parametrize("given", ["float33", "U3", object(), np.datetime64, np.dtype("V6"), str, ml_dtypes.int4])
def test_an_element_type_that_cannot_be_sent_is_refused_with_the_list(link, given):
    with pytest.raises(warpipe.DTypeError, match="there are int8") as refused:
        link[0].loan((2,), given)
    assert isinstance(refused.value, (TypeError, ValueError))


def test_an_element_type_of_the_other_byte_order_is_refused(link):
    with pytest.raises(warpipe.DTypeError, match="byte order"):
        link[0].loan((2,), np.dtype(">f4"))


@pytest.mark.parametrize(
    "data, name",
    [(np.array([object()]), "O"), (np.zeros(2, "datetime64[s]"), "M8"), (np.zeros(2, ml_dtypes.int4), "int4")],
    ids=["objects", "times", "int4"],
)
def test_an_element_type_is_refused_by_its_name_and_with_the_next_step(link, data, name):
    with pytest.raises(warpipe.DTypeError, match=f"{name}.*astype"):
        link[0].send(data)


@pytest.mark.parametrize(
    "data",
    [np.array(["a"]), np.array([object()]), np.zeros(2, "datetime64[s]"), np.zeros(2, ">f4"), np.zeros(2, "i4,f4"),
     np.zeros(2, ml_dtypes.int4), np.zeros(2, np.longdouble)],
    ids=lambda data: str(data.dtype),
)
def test_an_array_of_another_element_type_is_refused(link, data):
    with pytest.raises(warpipe.DTypeError):
        link[0].send(data)


@pytest.mark.parametrize("shape", [(), (0,), (4, 0, 7), (1,), (1,) * 8, (2, 1, 3)])
def test_every_shape_makes_the_round_trip(link, shape):
    publisher, subscriber = link
    data = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    publisher.send(data)
    frame = subscriber.receive()
    assert frame.shape == shape
    np.testing.assert_array_equal(frame.numpy(), data)
    with publisher.loan(shape, "int32") as out:
        assert out.shape == shape
    assert subscriber.receive().shape == shape


@pytest.mark.parametrize("length", [np.int64(3), np.uint8(3), np.array(3)], ids=lambda length: type(length).__name__)
def test_one_length_may_be_any_whole_number(link, length):
    assert link[0].loan(length, "int8").shape == (3,)


@pytest.mark.parametrize("shape", ["", "33", b"", b"ab"])
def test_a_text_is_no_shape(link, shape):
    with pytest.raises(warpipe.LayoutError, match="tuple of lengths"):
        link[0].loan(shape, "int8")


@pytest.mark.parametrize("shape", [-1, (2, -3), (1,) * 9, (2**40, 2**40), "ab", (1.5,), None])
def test_a_shape_that_cannot_be_is_refused(link, shape):
    with pytest.raises((warpipe.LayoutError, TypeError, OverflowError)):
        link[0].loan(shape, "int8")


LAYOUTS = {
    "transposed": lambda a: a.T,
    "permuted": lambda a: a.transpose(2, 0, 1),
    "reversed": lambda a: a[::-1],
    "reversed twice": lambda a: a[::-1, :, ::-1],
    "Fortran": np.asfortranarray,
    "broadcast": lambda a: np.broadcast_to(a[:1], a.shape),
    "every second": lambda a: a[:, ::2],
    "a corner": lambda a: a[1:, 1:3, :2],
    "a column": lambda a: a[:, 0, 0],
    "every second, reversed": lambda a: a[::-2, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_that_is_not_contiguous_keeps_its_values(link, layout):
    publisher, subscriber = link
    data = LAYOUTS[layout](np.arange(60, dtype=np.float32).reshape(3, 4, 5))
    publisher.send(data)
    np.testing.assert_array_equal(subscriber.receive().numpy(), data)


def test_strides_are_sent_where_no_gap_would_be_and_gaps_are_left_behind(link):
    publisher, subscriber = link
    data = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    publisher.send(data.T)
    publisher.send(data[:, ::2])
    turned, gathered = subscriber.receive(), subscriber.receive()
    assert turned.strides == (1, 5, 20)
    assert gathered.strides == (10, 5, 1) and gathered.nbytes == 3 * 2 * 5 * 4
    assert len(gathered.tobytes()) == gathered.nbytes


def test_a_read_only_array_can_be_sent(link):
    publisher, subscriber = link
    data = np.arange(4)
    data.flags.writeable = False
    publisher.send(data)
    assert subscriber.receive().numpy().tolist() == [0, 1, 2, 3]


def test_a_frame_can_be_sent_on(link, open_publisher, open_subscriber):
    publisher, subscriber = link
    second = open_publisher("b")
    last = open_subscriber("b")
    publisher.send(np.arange(12, dtype=np.int16).reshape(3, 4).T)
    second.send(subscriber.receive())
    frame = last.receive()
    assert frame.strides == (1, 4)
    np.testing.assert_array_equal(frame.numpy(), np.arange(12).reshape(3, 4).T)


def test_bytes_are_sent_as_bytes(link):
    publisher, subscriber = link
    for data in (b"abc", bytearray(b"abc"), memoryview(b"abc")):
        publisher.send(np.asarray(data) if isinstance(data, memoryview) else data)
        assert subscriber.receive().tobytes() == b"abc"
    publisher.send(b"")
    assert subscriber.receive().shape == (0,)


@pytest.mark.parametrize("thing", [None, 7, "text", [1, 2], object(), set()])
def test_what_is_no_tensor_is_refused_with_the_next_step(link, thing):
    with pytest.raises(warpipe.NotATensorError, match="numpy.asarray") as refused:
        link[0].send(thing)
    assert isinstance(refused.value, TypeError)


class Interface:
    def __init__(self, **interface):
        self.__array_interface__ = {"version": 3, "shape": (2,), "typestr": "<f4", "data": (4096, False), **interface}


@pytest.mark.parametrize(
    "interface",
    [{"data": (0, False)}, {"data": b"1234"}, {"typestr": "f"}, {"typestr": "<f999"}, {"strides": (3,)},
     {"strides": (4, 4)}, {"mask": np.zeros(2)}, {"shape": (2**62, 8)}, {"shape": (-1,)}, {"shape": None},
     {"strides": (2**63 - 4,)}, {"strides": (-(2**40),)}, {"typestr": 4}, {"shape": "ab"}, {"shape": (1.5,)},
     {"shape": (2**64,)}, {"data": ()}, {"data": (-1, False)}, {"data": ("x", False)}, {"strides": "ab"},
     {"strides": (2**64,)}],
    ids=str,
)
def test_an_array_interface_that_cannot_be_is_refused(link, interface):
    with pytest.raises(warpipe.LayoutError):
        link[0].send(Interface(**interface))


@pytest.mark.parametrize("place", [None, "abc", (1,), ("host", 0), (2**40, 0)], ids=str)
def test_a_device_that_is_none_is_refused(link, place):
    class Tensor:
        def __dlpack_device__(self):
            return place

        def __dlpack__(self, **_options):
            raise AssertionError("never asked")

    with pytest.raises(warpipe.ExportError, match="__dlpack_device__"):
        link[0].send(Tensor())


def test_a_class_is_no_tensor(link):
    with pytest.raises(warpipe.NotATensorError, match="the class ndarray"):
        link[0].send(np.ndarray)


def test_what_is_masked_is_not_sent_without_its_mask(link):
    publisher, subscriber = link
    values = np.ma.masked_array([1, 2, 3], mask=[False, True, False])
    with pytest.raises(warpipe.LayoutError, match="masked"):
        publisher.send(values)
    publisher.send(values.filled(7))
    publisher.send(np.ma.masked_array([1, 2, 3]))
    assert [subscriber.receive().numpy().tolist() for _ in range(2)] == [[1, 7, 3], [1, 2, 3]]


def test_an_exception_of_the_tensor_itself_comes_through(link):
    class Tensor:
        @property
        def __array_interface__(self):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        link[0].send(Tensor())


def test_a_tensor_of_another_device_is_refused_with_both_places(link, device):
    class Elsewhere:
        def __dlpack_device__(self):
            return (2, 63)

        def __dlpack__(self, **_options):
            raise AssertionError("never asked")

    with pytest.raises(warpipe.WrongDeviceError, match="cuda:63"):
        link[0].send(Elsewhere())


def test_a_loan_takes_a_copy_of_what_fits_and_refuses_the_rest(link):
    publisher, subscriber = link
    data = np.arange(12, dtype=np.int16).reshape(3, 4)
    for source in (data, np.asfortranarray(data), np.arange(24, dtype=np.int16)[::2].reshape(3, 4) // 2):
        with publisher.loan((3, 4), "int16") as out:
            out.copy_from(source)
        np.testing.assert_array_equal(subscriber.receive().numpy(), data)
    with publisher.loan((3, 4), "int16") as out:
        for wrong in (data.T, data.astype(np.int32), data[:2], data.ravel()):
            with pytest.raises(warpipe.LayoutError, match="does not fit"):
                out.copy_from(wrong)
        out.copy_from(data)
    assert subscriber.receive().numpy().tolist() == data.tolist()
