"""Tensors of GPUs. Declared skips without one."""

import pytest
import ray
from actors import HAS_TORCH, LIMIT_SECONDS, Actor, end
from conftest import until
from ray.experimental import set_target_for_ref

import warpipe_ray

torch = pytest.importorskip("torch") if HAS_TORCH else None
GPUS = torch.cuda.device_count() if HAS_TORCH else 0
pytestmark = pytest.mark.skipif(GPUS == 0, reason="declared skip: no GPU with PyTorch here")

COUNT = 1 << 20
# Seconds of a GPU's work.
LONG = 4_000_000_000


def get(ref):
    return ray.get(ref, timeout=LIMIT_SECONDS)


@pytest.fixture
def start(cluster):
    """Starts actors with a part of a GPU, or with one of their own."""
    started = []

    def start(gpus=0.25):
        started.append(Actor.options(num_gpus=gpus).remote())
        return started[-1]

    yield start
    for actor in started:
        ray.kill(actor)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_tensor_of_a_gpu_comes_complete(start, in_place):
    source, receiver = start(), start()
    for value in (1, 2):
        ref = source.on_gpu.remote(value, in_place, LONG // 20)
        assert get(receiver.sum.remote(ref)) == value * COUNT
        here = get(ref)
        assert here.is_cuda and (here == value).all()
        del ref, here
    get(source.forget.remote())
    until(lambda: get(source.pools.remote()) == (0, 0), "the end of what the source offers")


def test_what_the_source_writes_later_does_not_reach_a_copied_tensor_and_does_one_in_place(start):
    source = start()
    for in_place in (False, True):
        here = get(source.on_gpu.remote(1, in_place))
        get(source.write.remote(2))
        torch.cuda.synchronize()
        assert here.sum() == (2 if in_place else 1) * COUNT


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_target_buffers_of_each_device_are_filled(start, device):
    ref, target = start().on_gpu.remote(3), torch.zeros(COUNT, device=device)
    set_target_for_ref(ref, [target])
    assert get(ref) is target and (target == 3).all()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_receiver_keeps_a_killed_sources_tensor(start, in_place):
    source, receiver = start(), start()
    ref = source.on_gpu.remote(4, in_place)
    assert get(receiver.keep.remote(ref)) == 4 * COUNT
    end(source, "SIGKILL")
    assert get(receiver.kept_sum.remote()) == 4 * COUNT
    with pytest.raises(warpipe_ray.SourceGoneError):
        get(ref)


def test_a_source_that_is_killed_in_the_middle_of_its_stream_is_an_error(start):
    source, receiver = start(), start()
    get(receiver.sum.remote(source.on_gpu.remote(1)))
    ref = source.on_gpu.remote(1, False, 10 * LONG)
    ray.wait([ref], timeout=LIMIT_SECONDS)
    waiting = receiver.sum.remote(ref)
    end(source, "SIGKILL")
    with pytest.raises(warpipe_ray.SourceGoneError):
        get(waiting)


@pytest.mark.skipif(GPUS < 2, reason="declared skip: one GPU here")
@pytest.mark.parametrize("in_place", [False, True])
def test_an_actor_with_another_gpu_maps_the_tensor(start, in_place):
    source, receiver = start(1), start(1)
    ref = source.on_gpu.remote(5, in_place)
    assert get(receiver.keep.remote(ref)) == 5 * COUNT
    end(source, "SIGKILL")
    assert get(receiver.kept_sum.remote()) == 5 * COUNT
