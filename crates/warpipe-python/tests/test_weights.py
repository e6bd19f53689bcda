"""Model weights: what is published is what is read, in one memory, from one version."""

import asyncio
import contextlib
import decimal
import fractions
import gc
import os
import pickle
import select
import threading

import numpy as np
import pytest
from conftest import LIMIT_SECONDS, until

import warpipe
from warpipe import _warpipe, weights


@pytest.fixture
def keeper(domain):
    with weights.keep("llama", domain=domain) as keeper:
        yield keeper


@pytest.fixture
def publish(domain, device):
    """Publishes tensors; the publications are closed at the end."""
    made = []

    def make(tensors, **options):
        made.append(weights.publish("llama", tensors, **{"domain": domain, "device": device, **options}))
        return made[-1]

    yield make
    for published in made:
        published.close()


@pytest.fixture
def options(domain, device):
    return {"domain": domain, "device": device}


def values(shared):
    return {name: shared[name].numpy() for name in shared}


def test_what_is_published_is_what_is_read(keeper, publish, options):
    given = {
        "matrix": np.arange(6, dtype="f4").reshape(2, 3), "scalar": np.array(7, dtype="i8"), "none": np.zeros((0, 3), "f2"),
        "bytes": np.arange(5, dtype="u1"), "flags": np.array([True, False]),
    }
    published = publish(given)
    assert (published.name, published.version, keeper.version) == ("llama", 1, 1)
    with weights.open("llama", **options) as shared:
        assert (shared.name, shared.version, shared.nbytes, len(shared)) == ("llama", 1, published.nbytes, len(given))
        assert shared.device == options["device"]
        assert list(shared) == shared.keys() == list(given)
        for name, tensor in given.items():
            found = shared[name]
            assert name in shared and found.shape == tensor.shape and found.dtype == tensor.dtype.name
            np.testing.assert_array_equal(found.numpy(), tensor)
            assert shared.offset(name) % 512 == 0
        assert "other" not in shared and 3 not in shared
        for look in (shared.__getitem__, shared.offset, shared.content_hash):
            with pytest.raises(KeyError, match="other"):
                look("other")


def test_every_tensor_starts_at_a_multiple_of_512_bytes_of_one_memory(keeper, publish, options):
    publish({str(size): np.zeros(size, "u1") for size in (1, 511, 512, 513)})
    shared = weights.open("llama", **options)
    places = [shared[name].__dlpack_device__() and shared.offset(name) for name in shared]
    assert places == [0, 512, 1024, 1536]


def test_tensors_can_be_read_and_not_written(keeper, publish, options):
    publish({"a": np.ones(4)})
    tensor = weights.open("llama", **options)["a"]
    assert tensor.read_only
    with pytest.raises(warpipe.ArgumentError, match="for reading"):
        tensor.copy_from(np.zeros(4))
    if options["device"].kind == "host":
        array = np.from_dlpack(tensor)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 2
        assert not np.asarray(tensor).flags.writeable


def test_a_mapping_lives_as_long_as_any_tensor_of_it(keeper, publish, options):
    before = options["device"].bytes_held
    publish({"a": np.arange(4), "b": np.arange(5)}).close()
    shared = weights.open("llama", **options)
    tensor = shared["b"]
    shared.close()
    with pytest.raises(warpipe.ClosedError, match="llama"):
        shared["a"]
    np.testing.assert_array_equal(tensor.numpy(), np.arange(5))
    assert options["device"].bytes_held > before
    del tensor
    gc.collect()
    until(lambda: options["device"].bytes_held == before, "the end of the mapping")


def holders(domain):
    return [one.name for one in domain.endpoints() if one.alive and "/held-" in one.name]


def test_a_version_is_mapped_once_in_a_process_which_is_one_holder(keeper, publish, options):
    publish({"a": np.arange(4)}).close()
    first, second = weights.open("llama", **options), weights.open("llama", **options)
    assert first is not second
    if options["device"].kind == "host":
        addresses = {np.from_dlpack(shared["a"]).ctypes.data for shared in (first, second)}
        assert len(addresses) == 1
    until(lambda: len(holders(options["domain"])) == 1, "one holder")
    first.close()
    np.testing.assert_array_equal(second["a"].numpy(), np.arange(4))
    assert len(holders(options["domain"])) == 1


def test_weights_of_another_domain_with_the_same_name_are_others(keeper, publish, options, tmp_path):
    publish({"a": np.arange(4)})
    elsewhere = {**options, "domain": tmp_path / "elsewhere"}
    with weights.keep("llama", domain=elsewhere["domain"]):
        weights.publish("llama", {"a": np.arange(4)}, **elsewhere).close()
        here, there = weights.open("llama", **options), weights.open("llama", **elsewhere)
        until(lambda: len(holders(warpipe.Domain(elsewhere["domain"]))) == 1, "a holder there")
        assert here.version == there.version == 1


def test_tied_tensors_are_stored_once_under_all_their_names(keeper, publish, options):
    embed = np.arange(600, dtype="f4")
    published = publish({"embed": embed, "norm": np.ones(3), "head": embed, "part": embed[:300], "turned": embed.reshape(2, 300)})
    shared = weights.open("llama", **options)
    assert shared.keys() == ["embed", "head", "norm", "part", "turned"]
    assert shared.offset("embed") == shared.offset("head") == 0
    # Another shape of the same memory is another tensor.
    assert len({shared.offset(name) for name in shared}) == 4
    np.testing.assert_array_equal(shared["head"].numpy(), embed)
    np.testing.assert_array_equal(shared["turned"].numpy(), embed.reshape(2, 300))
    assert published.nbytes == 2560 + 512 + 1536 + 2560
    assert shared.content_hash("head") == shared.content_hash("embed") == shared.content_hash("turned")
    assert weights.verify("llama", **options) == 1


def test_tensors_with_other_strides_have_their_values(keeper, publish, options):
    whole = np.arange(24, dtype="i4").reshape(4, 6)
    given = {"turned": whole.T, "gaps": whole[::2, ::3], "backwards": whole[::-1], "spread": np.broadcast_to(whole[0], (3, 6))}
    publish(given)
    for name, found in values(weights.open("llama", **options)).items():
        np.testing.assert_array_equal(found, given[name])


def test_the_tensors_may_be_changed_as_soon_as_they_are_published(keeper, publish, options):
    tensor = np.arange(1000)
    publish({"a": tensor})
    tensor[:] = -1
    np.testing.assert_array_equal(weights.open("llama", **options)["a"].numpy(), np.arange(1000))


def test_what_is_no_tensor_and_names_out_of_range_are_refused_and_publish_nothing(keeper, publish, options):
    with pytest.raises(warpipe.NotATensorError, match="'step' is a int"):
        publish({"a": np.ones(2), "step": 3})
    with pytest.raises(warpipe.ArgumentError, match="1,024 bytes"):
        publish({"n" * 1025: np.ones(2)})
    with pytest.raises(warpipe.InvalidNameError, match="200 bytes"):
        weights.publish("n" * 201, {"a": np.ones(2)}, **options)
    for name in ("n" * 201, ""):
        with pytest.raises(warpipe.InvalidNameError):
            weights.open(name, **options)
        with pytest.raises(warpipe.InvalidNameError):
            weights.keep(name, domain=options["domain"])
    assert keeper.version is None
    with pytest.raises(warpipe.TimeoutError, match="a version of the weights"):
        weights.open("llama", **options)


def test_what_is_no_dict_of_named_tensors_is_refused_with_the_next_step(keeper, publish):
    for wrong in (None, [("a", np.ones(3))], object(), iter({})):
        with pytest.raises(warpipe.NotATensorError, match=f"a {type(wrong).__name__} is no mapping.*state_dict"):
            publish(wrong)
    for name in (1, None, b"a"):
        with pytest.raises(TypeError, match="the name .* is a .*; names of tensors are texts"):
            publish({name: np.ones(3)})
    with pytest.raises(warpipe.NotATensorError, match="'a' is a type and no tensor"):
        publish({"a": np.ndarray})
    assert keeper.version is None


def test_without_a_keeper_each_call_says_what_to_start(options):
    for call in (weights.open, weights.load, weights.verify):
        with pytest.raises(warpipe.NotFoundError, match="wait=") as raised:
            call("llama", **options)
        assert raised.value.endpoint == "llama"
    with pytest.raises(warpipe.NotFoundError):
        weights.publish("llama", {"a": np.ones(1)}, **options, wait=0.0)
    with warpipe.Publisher("frames", **options), pytest.raises(warpipe.OtherKindError):
        weights.open("frames", **options)


def test_a_reader_waits_for_the_keeper_and_for_a_version(domain, device, publish, options):
    found = []
    reader = threading.Thread(target=lambda: found.append(weights.open("llama", **options, wait=LIMIT_SECONDS)))
    reader.start()
    with weights.keep("llama", domain=domain):
        publish({"a": np.arange(3)})
        reader.join(LIMIT_SECONDS)
        assert [shared.version for shared in found] == [1]
        found.clear()


def test_versions_grow_and_an_open_one_stays_as_it_is(keeper, publish, options):
    publish({"a": np.full(4, 1)})
    first = weights.open("llama", **options)
    with pytest.raises(warpipe.TimeoutError, match="after 1"):
        first.newer(0.0)
    publish({"a": np.full(4, 2), "b": np.zeros(1)})
    publish({"a": np.full(4, 3)})
    newest = first.newer()
    assert (first.version, newest.version, keeper.version) == (1, 3, 3)
    assert (first["a"].numpy()[0], newest["a"].numpy()[0]) == (1, 3)
    assert "b" not in newest


def test_a_closed_keeper_is_followed_by_one_that_takes_over_from_a_reader_and_offers_after_a_check(domain, publish, options):
    with weights.keep("llama", domain=domain) as first:
        with pytest.raises(warpipe.NameTakenError):
            weights.keep("llama", domain=domain)
        publish({"a": np.arange(4)}).close()
        shared = weights.open("llama", **options)
        assert (first.version, first.candidate, first.unanswered) == (1, None, 0)
    with weights.keep("llama", domain=domain) as second:
        assert (second.version, second.candidate) == (None, 1)
        with pytest.raises(warpipe.TimeoutError, match="check of version 1"):
            weights.open("llama", **options)
        assert weights.verify("llama", **options) == 1
        assert (second.version, second.candidate) == (1, None)
        assert publish({"a": np.arange(4)}).version == 2
    assert shared.version == 1


def test_a_watch_gives_the_version_that_is_offered_and_then_each_newer_one(keeper, publish, options):
    with weights.watch("llama", **options) as watch:
        assert watch.name == "llama" and watch.changes(0.0) is None
        publish({"a": np.full(2, 1)})
        assert watch.changes(LIMIT_SECONDS).version == 1
        publish({"a": np.full(2, 2)})
        assert next(watch).version == 2
        assert watch.changes(0.0) is None
        with weights.watch("llama", **options, after=1) as later:
            assert next(iter(later)).version == 2
    assert watch.closed
    with pytest.raises(warpipe.ClosedError):
        watch.changes()
    assert list(watch) == []


def test_an_interrupt_behind_the_wait_of_a_watch_leaves_the_version_the_next(keeper, publish, options, monkeypatch):
    read, interrupts = os.eventfd_read, [KeyboardInterrupt]

    def interrupted(bell):
        read(bell)
        if interrupts:
            raise interrupts.pop()

    with weights.watch("llama", **options) as watch:
        publish({"a": np.ones(1)})
        until(lambda: select.select([watch], [], [], 0)[0], "the version")
        monkeypatch.setattr(os, "eventfd_read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            watch.changes(LIMIT_SECONDS)
        assert not interrupts and select.select([watch], [], [], 0)[0], "the version is there still"
        assert watch.changes(LIMIT_SECONDS).version == 1
        assert watch.changes(0.0) is None


@pytest.mark.parametrize("found", [KeyboardInterrupt, "none", "the one before"])
def test_a_version_that_is_told_while_a_watch_looks_stays_told(keeper, publish, options, monkeypatch, found):
    look = _warpipe._open_weights

    def looked(*given):
        weights = None if found == "none" else look(*given)
        publish({"a": np.ones(1)})
        until(lambda: watch._board.told == keeper.version, "the number")
        monkeypatch.undo()
        if found is KeyboardInterrupt:
            raise KeyboardInterrupt
        return weights

    with weights.watch("llama", **options) as watch:
        if found != "none":
            publish({"a": np.ones(1)})
        monkeypatch.setattr(_warpipe, "_open_weights", looked)
        with contextlib.suppress(KeyboardInterrupt):
            assert getattr(watch.changes(0.0), "version", "none") == {"none": "none", "the one before": 1}[found]
        assert select.select([watch], [], [], 0)[0], "the version is there still"
        assert watch.changes(0.0).version == keeper.version
        assert not select.select([watch], [], [], 0)[0] and watch.changes(0.0) is None


@pytest.mark.parametrize("wrong", [-1, 1 << 64, 1.5, "1", None])
def test_a_watch_begins_after_a_number_alone(options, wrong):
    with pytest.raises((OverflowError, TypeError)):
        weights.watch("llama", **options, after=wrong)


@pytest.mark.parametrize("timeout", [decimal.Decimal("0.01"), fractions.Fraction(1, 100), np.float32(0.01)])
def test_a_watch_waits_so_many_seconds_of_any_number(domain, options, timeout):
    with weights.watch("llama", **options) as watch, warpipe.Members.watch(domain) as members:
        assert watch.changes(timeout) is None and asyncio.run(watch.changes_async(timeout)) is None
        assert asyncio.run(members.changes_async(timeout)) is None


def test_a_watch_goes_on_while_the_keeper_is_replaced(domain, publish, options):
    with weights.watch("llama", **options) as watch:
        with weights.keep("llama", domain=domain):
            published = publish({"a": np.ones(1)})
            assert watch.changes(LIMIT_SECONDS).version == 1
        with weights.keep("llama", domain=domain):
            assert published.version == 1
            publish({"a": np.ones(1)})
            assert watch.changes(LIMIT_SECONDS).version == 2


def test_a_watch_holds_no_memory(keeper, publish, options):
    before = options["device"].bytes_held
    with weights.watch("llama", **options) as watch:
        for _ in range(3):
            publish({"a": np.ones(1 << 20)}).close()
        with watch.changes(LIMIT_SECONDS) as shared:
            assert shared.version == 3 and options["device"].bytes_held > before
        del shared
        until(lambda: options["device"].bytes_held == before, "the end of the mapping")


def test_a_watch_is_an_asynchronous_iterator_and_cancelling_it_loses_no_version(keeper, publish, options):
    async def follow():
        with weights.watch("llama", **options) as watch:
            assert await watch.changes_async(0.0) is None
            waiting = asyncio.ensure_future(anext(watch))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            seen = []
            await asyncio.to_thread(publish, {"a": np.ones(2)})
            async for shared in watch:
                seen.append(shared.version)
                if len(seen) == 3:
                    return seen
                await asyncio.to_thread(publish, {"a": np.ones(2)})

    assert asyncio.run(asyncio.wait_for(follow(), LIMIT_SECONDS)) == [1, 2, 3]


def test_a_watch_calls_back_with_each_version(keeper, publish, options):
    seen = []
    with weights.watch("llama", **options, on=lambda shared: seen.append((shared.version, shared["a"].numpy()[0]))) as watch:
        for number in (1, 2):
            publish({"a": np.full(3, number * 10)})
            until(lambda: len(seen) == number, "the callback")
        with pytest.raises(warpipe.ArgumentError, match="callback"):
            watch.changes(0.0)
    assert seen == [(1, 10), (2, 20)]


def test_a_watch_that_calls_back_tells_of_an_error_and_goes_on(domain, publish, options, caplog):
    seen = []
    with warpipe.Publisher("llama", **options):
        watch = weights.watch("llama", **options, on=lambda shared: seen.append(shared.version))
        until(lambda: "llama" in caplog.text, "the error")
    with watch, weights.keep("llama", domain=domain):
        publish({"a": np.ones(1)})
        until(lambda: seen == [1], "the version")
    assert caplog.records[0].exc_info[0] is warpipe.OtherKindError


def test_a_watch_of_another_kind_of_name_raises(options):
    with warpipe.Publisher("frames", **options), weights.watch("frames", **options) as watch:
        with pytest.raises(warpipe.OtherKindError):
            watch.changes(LIMIT_SECONDS)


def test_nothing_of_weights_is_pickled_and_each_says_what_to_do(keeper, publish, options):
    published = publish({"a": np.ones(1)})
    with weights.watch("llama", **options) as watch:
        for one in (keeper, published, weights.open("llama", **options), watch):
            with pytest.raises(TypeError, match="cannot be pickled; "):
                pickle.dumps(one)


def test_a_forked_child_is_told_that_the_objects_are_its_parents(keeper, publish, options):
    published = publish({"a": np.ones(1)})
    shared, watch = weights.open("llama", **options), weights.watch("llama", **options)
    calls = [
        shared.keys, lambda: shared["a"], lambda: "a" in shared, lambda: len(shared), shared.newer, shared.close,
        lambda: keeper.version, lambda: keeper.candidate, keeper.close, published.close, watch.changes, watch.fileno, watch.close,
    ]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = b""
        try:
            for call in calls:
                try:
                    call()
                    said += b"-"
                except warpipe.ForkedError:
                    said += b"f"
        finally:
            os.write(write, said)
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"f" * len(calls)
    os.waitpid(child, 0)
    assert watch.changes(LIMIT_SECONDS).version == shared.version == 1
    watch.close()
