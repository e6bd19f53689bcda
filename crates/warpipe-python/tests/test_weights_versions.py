"""Versions of weights: when they are hashed, how their tensors lie, what they carry, and what they share with another one."""

import gc
import json
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for

import numpy as np
import pytest
from conftest import LIMIT_SECONDS, until
from peers import in_memory, keep_weights, kill, process, said
from test_processes import place  # noqa: F401

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


def test_hashes_are_there_at_once_or_later_or_never(keeper, options):
    given = {"a": np.arange(5), "b": np.ones((2, 3), "f4")}
    with weights.publish(NAME, given, **options) as published:
        assert published.wait_for_hashes(0)
        first = weights.open(NAME, **options)
        hashes = {name: first.content_hash(name) for name in given}
        assert (first.hash, first.is_hashed) == ("device", True) and all(len(found) == 16 for found in hashes.values())
    with weights.publish(NAME, given, **options, hash="later") as published:
        assert published.wait_for_hashes(LIMIT_SECONDS)
        later = weights.open(NAME, **options)
        assert (later.version, later.hash, later.is_hashed) == (2, "later", True)
        assert {name: later.content_hash(name) for name in given} == hashes
        assert weights.verify(NAME, **options) == 2
    with weights.publish(NAME, given, **options, hash="none") as published:
        assert not published.wait_for_hashes()
        never = weights.open(NAME, **options)
        assert (never.version, never.hash, never.is_hashed, never.content_hash("a")) == (3, "none", False, None)
        with pytest.raises(warpipe.WeightsUnhashedError, match="no content hashes") as told:
            weights.verify(NAME, **options)
        assert (told.value.endpoint, told.value.version) == (NAME, 3)
    with pytest.raises(warpipe.ArgumentError, match="'device', 'later' or 'none'"):
        weights.publish(NAME, given, **options, hash="soon")


def test_verify_waits_for_hashes_that_come_later_as_long_as_it_may(keeper, options):
    base = weights.publish(NAME, {"a": np.zeros(3)}, **options, hash="none")
    # Its hashes never come: some tensors are of a base without.
    late = weights.publish(NAME, {"b": np.zeros(3)}, **options, base=base, hash="later")
    assert not late.wait_for_hashes(LIMIT_SECONDS)
    with pytest.raises(warpipe.WeightsUnhashedError):
        weights.verify(NAME, **options, wait=0.1)
    with ThreadPoolExecutor() as pool:
        verified = pool.submit(weights.verify, NAME, **options, wait=LIMIT_SECONDS)
        # Longer than one call of the library waits.
        assert not wait_for([verified], timeout=2.5).done
        weights.publish(NAME, {"a": np.ones(3)}, **options).close()
        assert verified.result() == 3


def test_a_version_without_hashes_is_not_offered_by_the_keeper_that_takes_it_over(domain, options):
    with weights.keep(NAME, domain=domain):
        weights.publish(NAME, {"a": np.zeros(3)}, **options).close()
        older = weights.open(NAME, **options)
        newer = weights.publish(NAME, {"a": np.ones(3)}, **options, hash="none")
    with weights.keep(NAME, domain=domain) as keeper:
        assert keeper.candidate == newer.version == 2
        with pytest.raises(warpipe.WeightsUnhashedError):
            weights.verify(NAME, **options)
        assert (keeper.candidate, weights.verify(NAME, **options), keeper.version) == (1, 1, 1)
        assert older.version == 1
    newer.close()


def test_strides_are_kept_as_they_lie_unless_row_major_is_asked_for(keeper, options):
    whole = np.arange(24, dtype="i4").reshape(4, 6)
    given = {
        "turned": whole.T, "moved": whole.reshape(2, 3, 4).transpose(1, 2, 0), "gaps": whole[:, ::2], "back": whole[::-1],
        "spread": np.broadcast_to(whole[0], (3, 6)), "plain": whole,
    }  # fmt: skip
    weights.publish(NAME, given, **options).close()
    kept = weights.open(NAME, **options)
    weights.publish(NAME, given, **options, layout="row_major").close()
    packed = weights.open(NAME, **options)
    for name, tensor in given.items():
        for shared in (kept, packed):
            np.testing.assert_array_equal(shared[name].numpy(), tensor)
        assert packed[name].numpy().flags.c_contiguous
        is_dense = name in ("turned", "moved", "plain")
        assert kept[name].numpy().strides == (tensor.strides if is_dense else packed[name].numpy().strides)
    assert weights.verify(NAME, **options) == 2
    with pytest.raises(warpipe.ArgumentError, match="'as_is' or 'row_major'"):
        weights.publish(NAME, given, **options, layout="F")


def test_a_transposed_tensor_is_published_where_it_lies_and_copied_for_row_major(keeper, options, device):
    if device.kind != "host":
        pytest.skip("the view is made through the host")
    lying = in_memory(device, np.arange(12, dtype="f4").reshape(3, 4))
    turned = np.asarray(lying).T
    with weights.publish(NAME, {"a": turned}, **options, zero_copy="require") as published:
        assert published.copied == 0
        shared = weights.open(NAME, **options)
        np.testing.assert_array_equal(shared["a"].numpy(), turned)
        assert shared["a"].numpy().strides == turned.strides
    with pytest.raises(warpipe.Error, match="'a' cannot be published where it lies"):
        weights.publish(NAME, {"a": turned}, **options, zero_copy="require", layout="row_major")


def test_a_version_carries_metadata(keeper, options):
    given = {"step": 7, "adapter": {"rank": 8, "names": ["q", "v"]}, "text": "größer"}
    weights.publish(NAME, {"a": np.ones(1)}, **options, metadata=given).close()
    assert weights.open(NAME, **options).metadata == given
    weights.publish(NAME, {"a": np.ones(1)}, **options).close()
    assert weights.open(NAME, **options).metadata is None
    room = (1 << 20) - len(json.dumps(""))
    weights.publish(NAME, {"a": np.ones(1)}, **options, metadata="m" * room).close()
    assert len(weights.open(NAME, **options).metadata) == room
    with pytest.raises(warpipe.ArgumentError, match="metadata"):
        weights.publish(NAME, {"a": np.ones(1)}, **options, metadata="m" * (room + 1))
    with pytest.raises(TypeError, match="JSON"):
        weights.publish(NAME, {"a": np.ones(1)}, **options, metadata=object())
    with pytest.raises(ValueError, match="not JSON compliant"):
        weights.publish(NAME, {"a": np.ones(1)}, **options, metadata={"loss": float("nan")})


def test_a_partial_version_shares_the_other_tensors_of_its_base(keeper, options):
    base = {"embed": np.arange(600, dtype="f4"), "head": np.ones(4, "f4"), "norm": np.ones(3)}
    first = weights.publish(NAME, base, **options, metadata={"step": 1})
    before = weights.open(NAME, **options)
    changed = {"head": np.full(4, 2, "f4"), "lora": np.arange(2)}
    second = weights.publish(NAME, changed, **options, base=first)
    assert (second.version, second.copied) == (2, 4 * 4 + 2 * 8)
    first.close()
    shared = before.newer(LIMIT_SECONDS)
    assert set(shared.keys()) == {"embed", "head", "lora", "norm"} and shared.metadata is None
    for name, tensor in (base | changed).items():
        np.testing.assert_array_equal(shared[name].numpy(), tensor)
    assert shared.content_hash("embed") == before.content_hash("embed")
    np.testing.assert_array_equal(before["head"].numpy(), base["head"])
    # By open weights, and by the number of what the keeper offers; of nothing but the base.
    weights.publish(NAME, {"head": np.full(4, 3, "f4")}, **options, base=shared).close()
    third = weights.publish(NAME, {}, **options, base=3)
    del before, shared
    gc.collect()
    newest = weights.open(NAME, **options)
    assert (third.version, newest.version, newest["head"].numpy().tolist()) == (4, 4, [3.0] * 4)
    assert newest["embed"].numpy().tolist() == base["embed"].tolist()
    assert weights.verify(NAME, **options) == 4
    with pytest.raises(warpipe.ArgumentError, match="version 4, which is offered"):
        weights.publish(NAME, {}, **options, base=2)
    with pytest.raises(warpipe.ArgumentError, match="open weights"):
        weights.publish(NAME, {}, **options, base="2")
    for number in (-1, 1 << 64):
        with pytest.raises(warpipe.ArgumentError, match="a version's number"):
            weights.publish(NAME, {"b": np.zeros(3)}, **options, base=number)
    with pytest.raises(warpipe.ClosedError):
        weights.publish(NAME, {}, **options, base=first)


def test_tensors_of_a_base_are_kept_as_long_as_a_version_has_them(domain, options, device):
    held = device.bytes_held
    lying = {name: in_memory(device, np.full(9, at, "u1")) for at, name in enumerate("abc")}
    with weights.keep(NAME, domain=domain) as keeper:
        first = weights.publish(NAME, lying, **options, zero_copy="require")
        second = weights.publish(NAME, {"b": np.full(9, 7, "u1")}, **options, base=first)
        first.close()
        lying.clear()
        reader = weights.open(NAME, **options)
        keeper.close()
        second.close()
        with weights.keep(NAME, domain=domain) as keeper:
            assert (keeper.candidate, weights.verify(NAME, **options)) == (2, 2)
            assert {name: reader[name].numpy()[0] for name in "abc"} == {"a": 0, "b": 7, "c": 2}
            reader.close()
            reader = weights.open(NAME, **options)
            assert {name: reader[name].numpy()[0] for name in "abc"} == {"a": 0, "b": 7, "c": 2}
            reader.close()
    gc.collect()
    until(lambda: device.bytes_held == held, "the end of the tensors in place")


def test_a_keeper_that_is_killed_takes_nothing_of_a_base_away(options, place):
    domain, device = place
    with process(keep_weights, domain, NAME) as (keeper, _):
        first = weights.publish(NAME, {"a": np.arange(4), "b": np.ones(2)}, **options, wait=LIMIT_SECONDS)
        second = weights.publish(NAME, {"b": np.zeros(2)}, **options, base=first)
        first.close()
        reader = weights.open(NAME, **options)
        kill(keeper)
    second.close()
    with weights.keep(NAME, domain=domain) as keeper:
        until(lambda: keeper.candidate == 2, "the version of the reader")
        assert weights.verify(NAME, **options) == 2
        with weights.publish(NAME, {"b": np.full(2, 5.0)}, **options, base=2) as third:
            newest = weights.open(NAME, **options)
            assert (third.version, newest["a"].numpy().tolist(), newest["b"].numpy().tolist()) == (3, [0, 1, 2, 3], [5, 5])
    assert reader["a"].numpy().tolist() == [0, 1, 2, 3]
