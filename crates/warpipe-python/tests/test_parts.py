"""Several tensors in one message: sent as a mapping, filled in place, received as one."""

import ctypes
from collections.abc import Mapping

import numpy as np
import pytest
from conftest import until
from test_in_place import Tensor

import warpipe


def tensors():
    return {"image": np.arange(48, dtype="u1").reshape(4, 4, 3), "depth": np.arange(16, dtype="f4").reshape(4, 4).T}


def equal(frame, sent):
    assert list(frame) == list(sent) and len(frame) == len(sent)
    for name, part in frame.items():
        assert part.dtype == sent[name].dtype.name and part.tobytes() == sent[name].tobytes()


def test_a_dict_is_received_as_a_mapping_of_its_tensors(link):
    publisher, subscriber = link
    assert publisher.send(tensors(), metadata={"n": 1}) == 1
    publisher.send(np.arange(3))
    with subscriber.receive() as frame:
        assert isinstance(frame, warpipe.SampleParts) and isinstance(frame, warpipe.Sample)
        assert isinstance(frame, Mapping) and "image" in frame and "other" not in frame
        assert frame.metadata == {"n": 1} and not frame.in_place and frame.get("other") is None
        equal(frame, tensors())
        with pytest.raises(KeyError):
            frame["other"]
    with subscriber.receive() as frame:
        assert not isinstance(frame, Mapping)


def test_the_text_of_several_tensors_has_their_names_and_layouts(link):
    publisher, subscriber = link
    publisher.send(tensors())
    frame = subscriber.receive()
    place = repr(subscriber).removeprefix('Subscriber("a", ').removesuffix(")")
    layouts = '{"image": uint8[4, 4, 3], "depth": float32[4, 4] strides [1, 4]}'
    assert repr(frame) == f"SampleParts({layouts}, {place}, sequence=1)"


def test_a_refused_name_or_tensor_of_several_is_named(link):
    publisher, _ = link
    with pytest.raises(TypeError, match="the name 1 is a int; names of tensors are texts"):
        publisher.send({1: np.ones(2)})
    with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
        publisher.send({"\ud800": np.ones(2)})
    with pytest.raises(warpipe.NotATensorError) as refused:
        publisher.send({"image": np.ones(2), "depth": [1, 2]})
    assert refused.value.__notes__ == ['while processing the tensor "depth"']


def test_a_part_keeps_the_memory_and_no_part_is_given_out_after_the_release(link):
    publisher, subscriber = link
    publisher.send(tensors())
    frame = subscriber.receive()
    part = frame["depth"]
    frame.release()
    assert part.tobytes() == tensors()["depth"].tobytes()
    with pytest.raises(warpipe.ReleasedError):
        frame["depth"]
    part.release()
    with pytest.raises(warpipe.ReleasedError):
        part.tobytes()


def test_a_received_message_is_sent_on_as_it_is(link):
    publisher, subscriber = link
    publisher.send(tensors())
    with subscriber.receive() as first:
        publisher.send(first)
    with subscriber.receive() as second:
        equal(second, tensors())


def test_a_loan_of_several_is_filled_by_name(link, device):
    publisher, subscriber = link
    with publisher.loan_parts({"a": ((2, 3), "float32"), "b": (4, "int16")}, metadata={"n": 2}) as out:
        out["a"] = np.full((2, 3), 5, "f4")
        if device.kind == "host":
            out["b"].numpy()[:] = 7
        else:
            out["b"] = np.full(4, 7, "i2")
        assert (out["a"].shape, out["b"].dtype) == ((2, 3), "int16")
        with pytest.raises(warpipe.LayoutError):
            out["b"] = np.zeros(5, "i2")
        with pytest.raises(KeyError):
            out["c"]
    with subscriber.receive() as frame:
        assert frame.metadata == {"n": 2}
        equal(frame, {"a": np.full((2, 3), 5, "f4"), "b": np.full(4, 7, "i2")})


def test_a_part_of_a_loan_ends_with_the_loan(link):
    publisher, subscriber = link
    for end in (lambda loan: loan.send(), lambda loan: loan.discard()):
        loan = publisher.loan_parts({"image": ((4,), "uint8")})
        loan["image"] = np.ones(4, "u1")
        part = loan["image"]
        assert part.ptr
        end(loan)
        assert part.released
        for use in (part.numpy, part.__dlpack__, lambda part=part: part.ptr):
            with pytest.raises(warpipe.ReleasedError):
                use()
    assert subscriber.receive()["image"].tobytes() == b"\1" * 4


@pytest.mark.parametrize("length", [4096, 4097])
def test_metadata_that_is_too_long_beside_several_tensors_is_an_error_of_metadata(link, length):
    publisher, subscriber = link
    with pytest.raises(warpipe.MetadataError, match="at most 4096 bytes"):
        publisher.send(tensors(), metadata=bytes(length))
    with pytest.raises(warpipe.MetadataError, match="at most 4096 bytes"):
        publisher.loan_parts({"image": ((4,), "uint8")}, metadata=bytes(length))
    loan = publisher.loan_parts({"image": ((4,), "uint8")})
    with pytest.raises(warpipe.MetadataError, match="at most 4096 bytes"):
        loan.set_metadata(bytes(length))
    loan.discard()
    assert subscriber.try_receive() is None


def test_tensors_are_sent_where_they_lie_all_or_none(link, device):
    publisher, subscriber = link
    first, second = Tensor(device), Tensor(device)
    for tensor in (first, second):
        tensor.fill(np.arange(4, dtype=np.int32))
        tensor.view.wait()
    sent = {"first": first, "second": second}
    assert publisher.send(sent, metadata={"n": 3}, zero_copy="require") == 1
    with subscriber.receive() as frame:
        assert frame.in_place and frame.metadata == {"n": 3}
        assert [frame[name].ptr for name in sent] == [first.ptr, second.ptr]
        equal(frame, dict.fromkeys(sent, np.arange(4, dtype=np.int32)))
        assert publisher.in_place == 2
    mixed = {"first": first, "gaps": np.arange(8)[::2]}
    with pytest.raises(BufferError):
        publisher.send(mixed, zero_copy="require")
    with pytest.warns(warpipe.CopyWarning):
        publisher.send(mixed, zero_copy=True)
    with subscriber.receive() as frame:
        assert not frame.in_place
        frame.wait()
        equal(frame, {"first": np.arange(4, dtype=np.int32), "gaps": np.arange(8)[::2]})
    for tensor in (first, second):
        vars(tensor).clear()


def test_long_metadata_travels_beside_the_parts(link):
    publisher, subscriber = link
    metadata = {"text": "x" * 3900}
    publisher.send(tensors(), metadata=metadata)
    with subscriber.receive() as frame:
        assert frame.metadata == metadata
        equal(frame, tensors())


@pytest.mark.parametrize("wrong", [{}, {"": np.zeros(1)}, {"n" * 129: np.zeros(1)}, {str(n): b"x" for n in range(128)}])
def test_names_that_cannot_travel_are_refused_and_nothing_is_sent(link, wrong):
    publisher, subscriber = link
    with pytest.raises(warpipe.ArgumentError):
        publisher.send(wrong)
    assert subscriber.try_receive() is None


class OnDevice:
    def __init__(self, device):
        self.memory = warpipe.Memory.allocate(1 << 20, device=device)
        self.__cuda_array_interface__ = {"shape": (1 << 20,), "typestr": "|u1", "data": (self.memory.ptr, False), "version": 3, "stream": None}


def send_one(publisher, stream, first, second):
    publisher.send(first, stream=stream)


def send_several(publisher, stream, first, second):
    publisher.send({"first": first, "second": second}, stream=stream)


def can_lend(publisher):
    try:
        publisher.loan((2 << 20,), "uint8").discard()
    except (warpipe.TimeoutError, warpipe.MemoryLimitError):
        return False
    return True


# A copy waits for its tensor's stream, which waits for it; then the stream of the last copy waits for the others.
@pytest.mark.parametrize(("send", "call"), [(send_one, 2), (send_several, 2), (send_several, 3)])
def test_memory_that_a_copy_still_writes_is_not_lent_again_after_an_error(open_publisher, device, domain, send, call):
    driver = ctypes.CDLL("libcuda.so.1") if device.kind == "cuda" else None
    if not hasattr(driver, "fakeCudaFail"):
        pytest.skip("declared skip: no fake driver, which fails a call")
    publisher = open_publisher(memory_limit=2 << 20, loan_timeout=0.05)
    stream, both = warpipe.Stream(device), {"domain": domain, "device": device}
    gate = warpipe.Timeline.create("gate", **both)
    opened = warpipe.Timeline.open("gate", **both)
    opened.wait(1, stream=stream)
    driver.fakeCudaReset()
    driver.fakeCudaFail(b"cuStreamWaitEvent", ctypes.c_uint64(call), 2)
    with pytest.raises(warpipe.DriverError, match="cuStreamWaitEvent"):
        send(publisher, stream.ptr, OnDevice(device), np.zeros(1 << 20, np.uint8))
    driver.fakeCudaReset()
    assert not can_lend(publisher)
    gate.signal(1)
    until(lambda: can_lend(publisher), "the memory")


def test_a_loan_of_no_tensor_is_refused(link):
    publisher, _ = link
    with pytest.raises(warpipe.ArgumentError, match="^parts is an empty mapping"):
        publisher.loan_parts({})


def test_what_is_no_name_is_no_key_of_a_message_of_several(link):
    publisher, subscriber = link
    publisher.send(tensors())
    with subscriber.receive() as frame:
        assert 5 not in frame and frame.get(5) is None
        with pytest.raises(KeyError):
            frame[5]
