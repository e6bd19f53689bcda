"""Weights that are published where they lie: what is shared, how long its owner is kept, and what is copied instead."""

import gc
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
from conftest import LIMIT_SECONDS, until
from peers import hold_weights, in_memory, keep_weights, kill, process, publish_weights_in_place, said
from test_processes import kills, place  # noqa: F401

import warpipe
from warpipe import weights

NAME = "llama"


@pytest.fixture
def options(domain, device):
    return {"domain": domain, "device": device}


@pytest.fixture
def keeper(domain):
    with weights.keep(NAME, domain=domain) as keeper:
        yield keeper


def read(shared):
    return {name: shared[name].numpy().tolist() for name in shared}


def test_readers_have_the_tensors_themselves_and_no_copy(keeper, options, device):
    given = {"a": np.arange(300, dtype="f4").reshape(3, 100), "b": np.arange(7, dtype="u1")}
    lying = {name: in_memory(device, values) for name, values in given.items()}
    with weights.publish(NAME, lying, **options, zero_copy="require") as published:
        assert (published.copied, published.version) == (0, 1)
    with weights.open(NAME, **options) as first, weights.open(NAME, **options) as second:
        for shared in (first, second):
            assert read(shared) == {name: values.tolist() for name, values in given.items()}
        assert all(first.offset(name) % 512 == 0 for name in given)
        assert weights.verify(NAME, **options) == 1
        lying["b"].copy_from(np.full(7, 9, "u1"))
        lying["b"].wait(LIMIT_SECONDS)
        assert first["b"].numpy().tolist() == [9] * 7
        with pytest.raises(warpipe.WeightsDamagedError, match='"b"'):
            weights.verify(NAME, **options)


def test_without_zero_copy_the_tensors_are_copied(keeper, options, device):
    lying = in_memory(device, np.arange(5, dtype="u1"))
    with weights.publish(NAME, {"a": lying}, **options) as published:
        assert published.copied == 5
    lying.copy_from(np.zeros(5, "u1"))
    with weights.open(NAME, **options) as shared:
        assert read(shared) == {"a": [0, 1, 2, 3, 4]}


def test_the_tensors_are_kept_until_no_process_has_their_version(keeper, options, device):
    values, before = np.full(1 << 24, 7, "u1"), device.bytes_held
    tensor = in_memory(device, values)
    published = weights.publish(NAME, {"a": tensor}, **options, zero_copy="require")
    del tensor
    shared = weights.open(NAME, **options)
    found = shared["a"]
    # The keeper offers another version, and the publisher gives this one up.
    weights.publish(NAME, {"a": np.zeros(1)}, **options).close()
    published.close()
    shared.close()
    del shared
    gc.collect()
    assert (found.numpy() == values).all()
    assert device.bytes_held - before >= 2 * values.nbytes, "the publisher's memory, and the reader's mapping of it"
    del found
    gc.collect()
    until(lambda: device.bytes_held - before < values.nbytes, "the end of the tensor's memory")


def test_tensors_that_cannot_be_opened_elsewhere_are_copied_beside_the_others_and_one_warning_says_so(keeper, options, device):
    lying = in_memory(device, np.arange(4, dtype="u1"))
    given = {"host": np.full(3, 7), "lying": lying, "none": np.zeros((0, 2), "f4"), "tied": lying, "more": np.ones(2)}
    with pytest.warns(warpipe.CopyWarning, match=r"2 of 4 tensors are copied: 'host' cannot be published.*pool\(\)") as said:
        published = weights.publish(NAME, given, **options, zero_copy=True)
    assert len(said) == 1 and published.copied == given["host"].nbytes + given["more"].nbytes
    with published, weights.open(NAME, **options) as shared:
        assert read(shared) == {
            "host": [7, 7, 7], "lying": [0, 1, 2, 3], "none": [], "tied": [0, 1, 2, 3], "more": [1.0, 1.0],
        }
        assert shared.offset("lying") == shared.offset("tied")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights.publish(NAME, {"lying": lying, "none": given["none"]}, **options, zero_copy=True).close()


def test_a_required_place_that_cannot_be_had_is_an_error_with_the_tensors_name_and_publishes_nothing(keeper, options, device):
    lying = in_memory(device, np.arange(8, dtype="u1").reshape(2, 4))
    with pytest.raises(warpipe.NotExportableError, match=r"'norm' cannot be published where it lies: .*zero_copy=True"):
        weights.publish(NAME, {"a": lying, "norm": np.ones(3)}, **options, zero_copy="require")
    memory = warpipe.Memory.allocate(4096, device=device)
    overlapping = {"a": memory.view((600,), "u1"), "b": memory.view((600,), "u1", 512)}
    with pytest.raises(warpipe.ArgumentError, match="'b' .*overlaps"):
        weights.publish(NAME, overlapping, **options, zero_copy="require")
    with pytest.raises(warpipe.ArgumentError, match="'b' .*512"):
        weights.publish(NAME, {"b": memory.view((3,), "u1", 8)}, **options, zero_copy="require")
    with pytest.raises(warpipe.ArgumentError, match="True, False or"):
        weights.publish(NAME, {"a": lying}, **options, zero_copy="always")
    assert keeper.version is None


@kills
def test_weights_in_place_survive_their_publisher_and_their_keeper(options, place):
    domain, device = place
    given = {f"t{number}": np.full(3, number) for number in range(12)}
    wanted = {name: values.tolist() for name, values in given.items()}
    with process(keep_weights, domain, NAME) as (keeper, pipe):
        assert said(pipe) == "ready"
        with process(publish_weights_in_place, domain, device, NAME, given) as (publisher, told):
            assert said(told) == (1, 0)
            with process(hold_weights, domain, device, NAME) as (_reader, reader):
                assert said(reader) == (1, wanted)
                kill(publisher)
                kill(keeper)
                reader.send("again")
                assert said(reader) == (1, wanted)
                with weights.keep(NAME, domain=options["domain"]) as keeper:
                    assert keeper.candidate == 1
                    assert weights.verify(NAME, **options) == 1
                    with weights.open(NAME, **options) as shared:
                        assert read(shared) == wanted


@pytest.mark.parametrize("allocator", ["expandable_segments:True", "pool"])
def test_modules_of_pytorchs_allocator_are_read_where_they_lie_also_when_it_has_other_tensors(device, tmp_path, allocator):
    pytest.importorskip("torch")
    if device.kind == "host":
        pytest.skip("PyTorch's allocator is a GPU's")
    code = f"""
import contextlib, gc, torch, warpipe.torch
from warpipe import weights
options = dict(domain={str(tmp_path / "d")!r}, device={device.ordinal})
place = torch.device("cuda", {device.ordinal})
pool = warpipe.torch.pool() if {allocator!r} == "pool" else None
with torch.cuda.use_mem_pool(pool, place.index) if pool else contextlib.nullcontext():
    model = torch.nn.Sequential(torch.nn.Linear(3000, 2000), torch.nn.LayerNorm(2000)).to(place)
wanted = {{name: tensor.cpu() for name, tensor in model.state_dict().items()}}
keeper = weights.keep("w", domain=options["domain"])
published = weights.publish("w", model.state_dict(), **options, zero_copy="require")
shared = weights.open("w", **options)
published.close()
del model
gc.collect()
torch.cuda.empty_cache()
with torch.cuda.use_mem_pool(pool, place.index) if pool else contextlib.nullcontext():
    others = [torch.full((2000, 3000), 5.0, device=place) for _ in range(4)]
torch.cuda.synchronize()
assert weights.verify("w", **options) == 1
found = {{name: shared[name].torch().cpu() for name in shared}}
assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
print("copied", published.copied)
shared.close()
keeper.close()
"""
    configured = "" if allocator == "pool" else allocator
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": configured}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "copied 0\n", done.stdout


def test_modules_of_pytorchs_default_segments_are_not_published_where_they_lie(device, tmp_path):
    pytest.importorskip("torch")
    if device.kind == "host":
        pytest.skip("PyTorch's allocator is a GPU's")
    code = f"""
import torch, warnings, warpipe
from warpipe import weights
options = dict(domain={str(tmp_path / "d")!r}, device={device.ordinal})
model = torch.nn.Linear(300, 200).to(torch.device("cuda", {device.ordinal}))
keeper = weights.keep("w", domain=options["domain"])
try:
    weights.publish("w", model.state_dict(), **options, zero_copy="require")
except warpipe.NotExportableError:
    print("refused", keeper.version)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    published = weights.publish("w", model.state_dict(), **options, zero_copy=True)
print(published.copied, [one.category for one in said].count(warpipe.CopyWarning))
published.close()
keeper.close()
"""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"refused None\n{(300 * 200 + 200) * 4} 1\n", done.stdout
