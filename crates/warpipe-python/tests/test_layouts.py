"""Tensors that do not lie as they are read: with gaps, turned, reversed, spread."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from conftest import LIMIT_SECONDS

import warpipe
from warpipe import _warpipe

IMAGE = np.arange(4 * 5 * 6, dtype=np.int32).reshape(4, 5, 6)

VIEWS = {
    "whole": lambda a: a,
    "crop": lambda a: a[1:3, 1:4, 2:5],
    "every other": lambda a: a[::2, ::3, ::2],
    "transposed": lambda a: a.T,
    "turned": lambda a: a.transpose(1, 2, 0),
    "mirrored": lambda a: a[..., ::-1],
    "upside down": lambda a: a[::-1],
    "reversed": lambda a: a[::-1, ::-1, ::-1],
    "reversed with gaps": lambda a: a[::-2, 1::2, ::-3],
    "a channel": lambda a: a[..., 1],
    "one row": lambda a: a[2:3, :, ::2],
    "spread": lambda a: np.broadcast_to(a[:1], (3, 5, 6)),
    "spread and mirrored": lambda a: np.broadcast_to(a[0, :, ::-1], (2, 5, 6)),
    "nothing": lambda a: a[:, 2:2, ::-1],
    "a number": lambda a: a[1, 2, 3],
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "complex64", "complex128"])
def test_whatever_lies_as_it_may_arrives_as_numpy_reads_it(link, name, dtype):
    publisher, subscriber = link
    view = VIEWS[name](IMAGE.astype(dtype))
    publisher.send(view)
    frame = subscriber.receive()
    assert frame.shape == view.shape
    np.testing.assert_array_equal(frame.numpy(), view)
    assert frame.tobytes() == view.tobytes()


@pytest.mark.parametrize("name", VIEWS)
def test_a_loan_and_a_view_take_in_whatever_lies_as_it_may(link, device, name):
    publisher, subscriber = link
    view = VIEWS[name](IMAGE)
    with publisher.loan(view.shape, "int32") as out:
        out.copy_from(view)
    assert subscriber.receive().tobytes() == view.tobytes()
    if view.nbytes:
        with warpipe.Memory.allocate(view.nbytes, device=device) as memory, memory.view(view.shape, "int32") as into:
            into.copy_from(view)
            assert into.tobytes() == view.tobytes()


def test_a_copy_from_itself_reads_before_it_writes(link, device):
    if device.kind == "cuda":
        pytest.skip("arrays of a GPU's memory are its frameworks'")
    publisher, subscriber = link
    with publisher.loan((8,), "int32") as out:
        out[:] = np.arange(8)
        out.copy_from(out.numpy()[::-1])
    assert subscriber.receive().numpy().tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    with warpipe.Memory.allocate(32, device=device) as memory, memory.view((8,), "int32") as view:
        view.copy_from(np.arange(8, dtype=np.int32))
        view.copy_from(view.numpy()[::-1])
        assert view.numpy().tolist() == [7, 6, 5, 4, 3, 2, 1, 0]


def test_a_dimension_of_one_may_have_any_stride(link):
    publisher, subscriber = link
    odd = np.lib.stride_tricks.as_strided(np.arange(6, dtype=np.int32), (1, 6), (3, 4))
    for array in (odd, odd[::-1], np.lib.stride_tricks.as_strided(IMAGE, (0, 3), (5, 7))):
        publisher.send(array)
        np.testing.assert_array_equal(subscriber.receive().numpy(), array)


def test_what_a_subscriber_gets_has_no_negative_strides(link):
    publisher, subscriber = link
    publisher.send(IMAGE[..., ::-1])
    frame = subscriber.receive()
    assert all(stride >= 0 for stride in frame.strides)


# Of another thread, within one copy: one that held the interpreter would let go of it a few times,
# for a step each. A copy has time for a few hundred on an idle core.
STEPS = 30


def test_other_threads_run_while_a_tensor_with_gaps_is_gathered(link):
    publisher, _ = link
    large = np.zeros((4096, 2, 4096), np.uint8)
    crop = large[:, 1, 1:]
    loan, end, steps = publisher.loan(crop.shape, "uint8"), threading.Event(), [0]

    def run():
        while not end.is_set():
            steps[0] += 1
            # Lets go of the interpreter, which nobody is made to do below.
            time.sleep(0)

    other, interval, most = threading.Thread(target=run), sys.getswitchinterval(), 0
    sys.setswitchinterval(10 * LIMIT_SECONDS)
    try:
        other.start()
        start = time.monotonic()
        while most < STEPS:
            assert time.monotonic() < start + LIMIT_SECONDS, f"at most {most} steps of another thread"
            before = steps[0]
            loan.copy_from(crop)
            most = max(most, steps[0] - before)
    finally:
        end.set()
        sys.setswitchinterval(interval)
        other.join(LIMIT_SECONDS)
        loan.discard()


REVERSED = """
import sys
import numpy as np, torch, warpipe
domain = sys.argv[1]
publisher = warpipe.Publisher("a", domain=domain, device="host")
subscriber = warpipe.Subscriber("a", domain=domain, device="host")
image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
publisher.send(image[..., ::-1])
print(torch.equal(subscriber.receive().torch(), torch.from_numpy(image[..., ::-1].copy())))
"""


def test_a_mirrored_image_reaches_pytorch(tmp_path):
    pytest.importorskip("torch")
    command = [sys.executable, "-c", REVERSED, str(tmp_path / "domain")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_a_mirrored_tensor_that_cannot_be_shared_is_copied_the_right_way_round(link, device):
    if device.kind == "cuda":
        pytest.skip("no framework of a GPU has negative strides")
    publisher, subscriber = link
    with pytest.warns(warpipe.CopyWarning):
        publisher.send(IMAGE[::-1], zero_copy=True)
    frame = subscriber.receive()
    assert all(stride >= 0 for stride in frame.strides)
    np.testing.assert_array_equal(frame.numpy(), IMAGE[::-1])


class Backwards:
    """Memory as another allocator makes it, from its last byte to its first."""

    def __init__(self, device, values):
        self.plain = _warpipe._allocate_plain(len(values), device)
        self.plain.write(values)

    def interface(self):
        address = self.plain.ptr + self.plain.nbytes - 1
        return {"shape": self.plain.shape, "typestr": "|u1", "data": (address, False), "strides": (-1,), "version": 3}


def test_a_frame_that_runs_backwards_is_refused_by_dlpack_and_not_by_numpy(link, device):
    publisher, subscriber = link
    protocol = "__cuda_array_interface__" if device.kind == "cuda" else "__array_interface__"
    tensor = type("Of", (Backwards,), {protocol: property(Backwards.interface)})(device, bytes(range(4)))
    publisher.send(tensor, zero_copy="require")
    frame = subscriber.receive()
    assert frame.numpy().tolist() == [3, 2, 1, 0]
    assert frame.tobytes() == bytes([3, 2, 1, 0])
    with pytest.raises(warpipe.ExportError, match="backwards"):
        frame.__dlpack__()
