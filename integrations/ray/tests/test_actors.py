"""Actors that hand arrays to each other, to the driver, and die."""

import threading

import numpy
import pytest
import ray
import warpipe
from actors import HAS_TORCH, LIMIT_SECONDS, end, pools
from conftest import until
from ray._private import ray_constants
from ray.experimental import set_target_for_ref

import warpipe_ray

with_torch = pytest.mark.skipif(not HAS_TORCH, reason="declared skip: no PyTorch here")


def get(ref):
    return ray.get(ref, timeout=LIMIT_SECONDS)


def nothing_offered(actor):
    until(lambda: get(actor.pools.remote()) == (0, 0), "the end of what the actor offers")


def test_an_array_comes_as_it_was_for_reading_alone(standing):
    source, receiver = standing
    [(array, writeable)] = get(receiver.take.remote(source.array.remote(3))).values()
    assert array.dtype == "float32" and array.shape == (1000,) and (array == 3).all() and not writeable


def test_arrays_of_each_layout_and_element_type_come_as_they_were(standing):
    source, receiver = standing
    given = get(receiver.take.remote(source.several.remote()))
    assert given.pop("text") == "as it is"
    given = {name: array for name, (array, _) in given.items()}
    numpy.testing.assert_equal(given["rows"], numpy.arange(12, dtype="int16").reshape(3, 4))
    numpy.testing.assert_equal(given["columns"], numpy.arange(6.0).reshape(2, 3))
    numpy.testing.assert_equal(given["every second"], [0, 2, 4, 6, 8])
    numpy.testing.assert_equal(given["backwards"], [4, 3, 2, 1, 0])
    assert given["scalar"].shape == () and given["scalar"] == 7 and given["nothing"].shape == (0, 3)
    assert given["days"][0] == numpy.datetime64("2026-11-28") and given["structured"]["b"].tolist() == [2.5, 4.5]


def test_one_object_goes_to_several_actors_and_to_the_driver(standing, start):
    source, receiver = standing
    ref = source.array.remote(2)
    sums = [receiver.sum.remote(ref), start().sum.remote(ref), receiver.sum.remote(ref)]
    assert get(sums) == [2000] * 3 and get(ref).sum() == 2000
    assert get(receiver.get_and_sum.remote([ref])) == [2000]


def test_the_driver_puts_an_object(standing):
    ref = ray.put(numpy.ones(10), _tensor_transport="WARPIPE_NUMPY")
    assert [get(actor.sum.remote(ref)) for actor in standing] == [10, 10]
    assert pools()[0] > 0
    del ref
    until(lambda: pools() == (0, 0), "the end of what the driver offers")


def test_what_the_source_writes_later_does_not_reach_the_object(standing):
    source, receiver = standing
    ref = source.kept_array.remote(1)
    get(receiver.keep.remote(ref))
    get(source.write.remote(9))
    assert get(receiver.kept_sum.remote()) == get(receiver.sum.remote(ref)) == 1000
    get([actor.forget.remote() for actor in standing])


def test_what_empty_made_is_not_copied(standing):
    source, receiver = standing
    ref = source.in_place.remote(1)
    given = get(ref)
    assert given["all"].sum() == 1000 and given["a part"].sum() == 500
    assert get(source.pools.remote())[0] == 4000 // 512 * 512 + 512
    get(source.write.remote(2))
    assert given["all"].sum() == 2000 and given["a part"].sum() == 1000
    [(array, _), (part, _)] = get(receiver.take.remote(ref)).values()
    assert array.sum() == 2000 and part.sum() == 1000
    get(source.forget.remote())
    del ref
    until(lambda: get(source.pools.remote())[0] == 0, "the collection")
    assert given["all"].sum() == 2000, "the driver has it still"
    del given
    nothing_offered(source)


def test_a_collected_object_gives_its_memory_back_when_the_last_receiver_has_dropped_it(standing):
    source, receiver = standing
    ref = source.array.remote(1)
    get(receiver.keep.remote(ref))
    del ref
    until(lambda: get(source.pools.remote())[0] == 0, "the collection")
    assert get(source.pools.remote())[1] > 0 and get(receiver.kept_sum.remote()) == 1000
    get(receiver.forget.remote())
    nothing_offered(source)


def test_a_receiver_that_is_killed_gives_its_memory_back(standing, start):
    source, receiver = standing[0], start()
    ref = source.array.remote(1)
    get(receiver.keep.remote(ref))
    del ref
    until(lambda: get(source.pools.remote())[0] == 0, "the collection")
    assert get(source.pools.remote())[1] > 0
    end(receiver, "SIGKILL")
    nothing_offered(source)


def test_an_array_of_objects_is_refused(standing):
    with pytest.raises(warpipe.DTypeError, match="references of one process; send numbers"):
        get(standing[0].objects.remote())


def test_an_object_that_is_refused_is_not_kept(start):
    source = start()
    for _ in range(3):
        with pytest.raises(warpipe.DTypeError):
            get(source.objects.remote())
    assert get(source.stored.remote()) == 0
    assert get(source.array.remote(1)).sum() == 1000


def test_many_objects_leave_no_descriptor(standing):
    source, receiver = standing

    def round_trip():
        get(receiver.sum.remote(source.array.remote(1)))

    for _ in range(5):
        round_trip()
    nothing_offered(source)
    before = get([actor.descriptors.remote() for actor in standing])
    for _ in range(50):
        round_trip()
    nothing_offered(source)
    after = get([actor.descriptors.remote() for actor in standing])
    # Ray's own connections come and go.
    assert max(there - here for there, here in zip(after, before, strict=True)) < 10


# Deaths.


@pytest.mark.parametrize("how", ["ray.kill", "SIGKILL"])
def test_a_receiver_keeps_what_it_has_of_a_source_that_was_killed(standing, start, how):
    source, receiver = start(), standing[1]
    before = get(receiver.bytes_held.remote())
    ref = source.array.remote(4)
    assert get(receiver.keep.remote(ref)) == 4000
    here = get(ref)
    end(source, how)
    assert get(receiver.kept_sum.remote()) == here.sum() == 4000
    assert get(receiver.bytes_held.remote()) > before
    get(receiver.forget.remote())
    until(lambda: get(receiver.bytes_held.remote()) == before, "the end of the memory")


@pytest.mark.parametrize("how", ["ray.kill", "SIGKILL"])
def test_an_object_of_a_source_that_was_killed_is_an_error_at_once(standing, start, how):
    source, receiver = start(), standing[1]
    ref = source.array.remote(4)
    ray.wait([ref], timeout=LIMIT_SECONDS)
    end(source, how)
    for wanted in (receiver.sum.remote(ref), ref):
        with pytest.raises(warpipe_ray.SourceGoneError, match="create the object again") as caught:
            get(wanted)
        assert isinstance(caught.value, (warpipe.PeerGoneError, ray.exceptions.RayError))
    assert get(receiver.sum.remote(standing[0].array.remote(1))) == 1000, "the receiver goes on"


@pytest.mark.parametrize("how", ["ray.kill", "SIGKILL"])
def test_a_source_that_is_killed_before_its_work_is_done_ends_the_waits(standing, start, how):
    source, receiver = start(), standing[1]
    ref = source.unfinished.remote()
    ray.wait([ref], timeout=LIMIT_SECONDS)
    waiting = receiver.sum.remote(ref)
    failed = []

    def here():
        with pytest.raises(warpipe_ray.SourceGoneError):
            get(ref)
        failed.append(True)

    thread = threading.Thread(target=here)
    thread.start()
    assert ray.wait([waiting], timeout=0.2)[0] == []
    end(source, how)
    with pytest.raises(warpipe_ray.SourceGoneError):
        get(waiting)
    thread.join(LIMIT_SECONDS)
    assert failed


# Without PyTorch Ray's own thread for aborts ends with an ImportError.
@with_torch
def test_rays_limit_aborts_a_receive_and_the_actors_go_on(standing, monkeypatch):
    source, receiver = standing
    monkeypatch.setattr(ray_constants, "RDT_FETCH_FAIL_TIMEOUT_SECONDS", 1.0)
    ref = source.unfinished.remote()
    with pytest.raises(warpipe_ray.ReceiveAbortedError, match="did not complete"):
        get(receiver.sum.remote(ref))
    assert get(receiver.sum.remote(source.array.remote(1))) == 1000


def test_a_get_ends_with_its_timeout(standing):
    ref = standing[0].unfinished.remote()
    ray.wait([ref], timeout=LIMIT_SECONDS)
    with pytest.raises(ray.exceptions.GetTimeoutError):
        ray.get(ref, timeout=0.2)


# PyTorch.


@with_torch
def test_a_tensor_comes_as_it_was(standing):
    import torch

    source, receiver = standing
    for dtype in ("float32", "bfloat16", "float8_e4m3fn", "complex64", "bool", "int64"):
        ref = source.tensor.remote(2, dtype)
        wanted = torch.full((10, 100), 2).to(getattr(torch, dtype))
        [(said, values)] = get(receiver.take.remote(ref)).values()
        assert said == str(wanted.dtype) and (values == wanted.cfloat().numpy()).all()
        here = get(ref)
        assert here.dtype == wanted.dtype and torch.equal(here.cfloat(), wanted.cfloat())


@with_torch
def test_a_get_fills_target_buffers(standing):
    import torch

    ref = standing[0].tensor.remote(5)
    target = torch.zeros(10, 100)
    set_target_for_ref(ref, [target])
    assert get(ref) is target and (target == 5).all()


@with_torch
def test_a_tensor_that_empty_made_is_not_copied(standing):
    ref = standing[0].tensor_in_place.remote(1)
    given = get(ref)
    get(standing[0].write.remote(2))
    assert given.shape == (10, 100) and (given == 2).all()
    get(standing[0].forget.remote())


@with_torch
def test_a_writable_tensor_is_one_memory_for_all(standing):
    ref = standing[0].writable.remote(1.0)
    assert get(standing[1].add.remote(ref)) == 2000
    assert get(ref).sum() == 2000
