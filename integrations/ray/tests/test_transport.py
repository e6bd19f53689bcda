"""The transport without a cluster: what comes from outside, limits, and what is left."""

import dataclasses
import os
import signal
import sys
import threading

import numpy
import pytest
import warpipe
from actors import HAS_TORCH, LIMIT_SECONDS, pools
from conftest import until

import warpipe_ray
from warpipe_ray import LIMIT_VARIABLE, _source
from warpipe_ray._source import timeline_of


@pytest.fixture
def transport():
    made = warpipe_ray.Transport()
    yield made
    made._offers.clear()
    until(lambda: pools() == (0, 0), "the end of what was offered")


@pytest.fixture
def limited(monkeypatch):
    """A process with room for little."""
    monkeypatch.setenv(LIMIT_VARIABLE, str(4 << 20))
    monkeypatch.setattr(_source, "_ROOM_SECONDS", 0.05)
    monkeypatch.setattr(_source, "_sources", {})


def received(transport, metadata):
    return transport.recv_multiple_tensors("object", metadata, None)


def test_an_object_is_the_same_whenever_ray_asks_for_it(transport):
    first = transport.extract_tensor_transport_metadata("a", [numpy.ones(3)])
    assert transport.extract_tensor_transport_metadata("a", [numpy.ones(3)]) is first
    assert received(transport, first)[0].tolist() == [1, 1, 1]


def test_an_object_without_tensors_needs_no_memory(transport):
    assert received(transport, transport.extract_tensor_transport_metadata("a", [])) == []
    [array] = received(transport, transport.extract_tensor_transport_metadata("b", [numpy.empty((2, 0), "int8")]))
    assert array.shape == (2, 0) and array.dtype == "int8" and pools() == (0, 0)


def test_a_collected_object_cannot_be_opened(transport):
    metadata = transport.extract_tensor_transport_metadata("a", [numpy.ones(3)])
    kept = received(transport, metadata)
    transport.garbage_collect("a", metadata, [])
    transport.garbage_collect("a", metadata, [])
    with pytest.raises(warpipe_ray.SourceGoneError):
        received(transport, metadata)
    assert kept[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"machine": "another"}, warpipe.ArgumentError),
        ({"tickets": ["no ticket"]}, warpipe.HandleError),
        ({"tickets": []}, IndexError),
        ({"places": [(7, 0)]}, IndexError),
        ({"places": [(0, 1 << 62)]}, warpipe.Error),
        ({"places": [(0, -1)]}, Exception),
        ({"places": []}, ValueError),
        ({"places": [None]}, warpipe.ArgumentError),
        ({"tensor_meta": [((1 << 40,), numpy.dtype("float64"))]}, warpipe.Error),
        ({"tensor_meta": [((1 << 70,), numpy.dtype("float64"))]}, Exception),
        ({"tensor_meta": [((-1, -3), numpy.dtype("float64"))]}, warpipe.LayoutError),
        ({"tensor_meta": [((3,), numpy.dtype("O"))]}, warpipe.DTypeError),
        ({"tensor_meta": [((3,), numpy.dtype([("a", "O")]))]}, warpipe.DTypeError),
        ({"device": "GPU-none"}, warpipe.DeviceError),
        ({"library": "os"}, KeyError),
        ({"domain": "/nowhere/at/all"}, warpipe.Error),
        ({"pool": "../../etc"}, warpipe.Error),
        ({"pool": "another"}, warpipe_ray.SourceGoneError),
        ({"complete": 1}, warpipe_ray.SourceGoneError),
    ],
)
def test_what_no_source_has_said_is_an_error(transport, change, error):
    metadata = transport.extract_tensor_transport_metadata("a", [numpy.ones(3)])
    for _ in range(2):
        with pytest.raises(error):
            received(transport, dataclasses.replace(metadata, **change))
        assert received(transport, metadata)[0].tolist() == [1, 1, 1]
    assert len(transport._connections) == 1 and transport._receiving == {}


def test_arrays_beyond_the_limit_are_an_error_until_others_are_collected(limited, transport):
    transport.extract_tensor_transport_metadata("a", [numpy.ones(3 << 20, "int8")])
    with pytest.raises(warpipe.MemoryLimitError):
        transport.extract_tensor_transport_metadata("b", [numpy.ones(3 << 20, "int8")])
    assert list(transport._offers) == ["a"]
    transport.garbage_collect("a", None, [])
    transport.extract_tensor_transport_metadata("b", [numpy.ones(3 << 20, "int8")])


@pytest.mark.parametrize("text", ["", "0", "-1", "many"])
def test_a_limit_that_is_none_is_an_error(limited, transport, monkeypatch, text):
    monkeypatch.setenv(LIMIT_VARIABLE, text)
    with pytest.raises(warpipe.ArgumentError, match=LIMIT_VARIABLE):
        transport.extract_tensor_transport_metadata("a", [numpy.ones(3)])


def test_blocks_of_empty_come_back_with_their_last_array():
    array = warpipe_ray.empty((4, 1 << 18), "float32")
    row = array[2]
    row[:] = 7
    del array
    assert row.sum() == 7 * (1 << 18) and pools()[0] == 4 << 20
    del row
    until(lambda: pools() == (0, 0), "the end of the block")


def test_a_wait_for_a_value_that_never_comes_ends_with_its_timeout_and_is_forgotten(transport):
    metadata = transport.extract_tensor_transport_metadata("a", [numpy.ones(3)])
    with warpipe.Timeline.create(timeline_of(metadata.pool), device="host") as timeline:
        fetch = transport.fetch_multiple_tensors("a", dataclasses.replace(metadata, complete=1), None)
        with pytest.raises(TimeoutError):
            transport.wait_fetch_complete(fetch, 0.05)
        with pytest.raises(TimeoutError):
            transport.wait_fetch_complete(fetch, 0)
        timeline.signal(1)
        assert transport.wait_fetch_complete(fetch, LIMIT_SECONDS)[0].tolist() == [1, 1, 1]
    assert transport._receiving == {}


def test_ctrl_c_ends_a_wait_and_the_next_one_is_complete(transport):
    metadata = transport.extract_tensor_transport_metadata("a", [numpy.ones(3)])
    with warpipe.Timeline.create(timeline_of(metadata.pool), device="host") as timeline:
        fetch = transport.fetch_multiple_tensors("a", dataclasses.replace(metadata, complete=1), None)
        waits = threading.Thread(
            target=lambda: (until(lambda: transport._receiving, "the wait"), os.kill(os.getpid(), signal.SIGINT))
        )
        with pytest.raises(KeyboardInterrupt):
            waits.start()
            transport.wait_fetch_complete(fetch, LIMIT_SECONDS)
        waits.join()
        assert transport._receiving == {}
        timeline.signal(1)
        assert transport.wait_fetch_complete(fetch, LIMIT_SECONDS)[0].tolist() == [1, 1, 1]


def test_more_objects_of_one_source_than_a_process_may_have_are_an_error(transport):
    metadata = transport.extract_tensor_transport_metadata("a", [numpy.ones(3)])
    kept = [received(transport, metadata) for _ in range(1024)]
    with pytest.raises(warpipe.ArgumentError, match="1024"):
        received(transport, metadata)
    kept.pop()
    kept.append(received(transport, metadata))


def test_the_connections_that_are_kept_are_few_and_those_of_the_dead_go(transport):
    metadata = transport.extract_tensor_transport_metadata("a", [numpy.ones(3)])
    sources = [warpipe.Pool.create(f"source-{number}", device="host") for number in range(70)]
    for source in sources:
        block = source.allocate(24)
        received(transport, dataclasses.replace(metadata, pool=source.name, tickets=[str(block.lend())]))
    assert len(transport._connections) == 64
    for source in sources[:-1]:
        source.close()
    until(lambda: all(one.client.is_owner_gone for one in list(transport._connections.values())[:-1]), "the end of the links")
    received(transport, metadata)
    assert [name for _, name, _ in transport._connections] == [sources[-1].name, metadata.pool]


@pytest.mark.skipif(not HAS_TORCH, reason="declared skip: no PyTorch here")
def test_a_tensor_without_plain_memory_is_refused(transport):
    import torch

    for tensor in (torch.eye(3).to_sparse(), torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)):
        with pytest.raises(warpipe.NotATensorError, match="send their parts"):
            transport.extract_tensor_transport_metadata("a", [tensor])
    with pytest.raises(warpipe.ArgumentError, match="meta"):
        transport.extract_tensor_transport_metadata("a", [torch.ones(3, device="meta")])


def test_a_process_ends_without_a_name_and_the_next_one_removes_those_of_the_killed():
    domain = warpipe.Domain()
    for ending in ("pass", "os.kill(os.getpid(), 9)"):
        program = f"import os, numpy, warpipe_ray; kept = warpipe_ray.empty(9, 'int8'); {ending}"
        os.spawnve(os.P_WAIT, *python(program))
    dead = [one.name for one in domain.endpoints() if not one.alive]
    assert len(dead) == 1 and dead[0].startswith("ray/")
    os.spawnve(os.P_WAIT, *python("import warpipe_ray; kept = warpipe_ray.empty(9, 'int8')"))
    assert [one.name for one in domain.endpoints() if not one.alive] == []


def python(program):
    return sys.executable, [sys.executable, "-c", program], os.environ
