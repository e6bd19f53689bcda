"""Weights and the processes that use them: each may die, stop waiting, or come late."""

import os
import signal
import threading

import numpy as np
import pytest
from conftest import LIMIT_SECONDS, stop, until
from peers import hold_weights, in_memory, keep_weights, kill, process, publish_weights, said
from test_gaps import run
from test_interrupted import interrupted_by
from test_processes import kills, place  # noqa: F401

import warpipe
from warpipe import weights

NAME = "llama"


@pytest.fixture
def options(domain, device):
    return {"domain": domain, "device": device}


def publish(options, number):
    return weights.publish(NAME, {"a": np.full(3, number)}, **options)


@kills
def test_readers_go_on_when_the_keeper_is_killed_and_the_next_keeper_takes_over_from_them(options, place):
    domain, device = place
    with process(hold_weights, domain, device, NAME) as (_reader, reader):
        with process(keep_weights, domain, NAME) as (keeper, pipe):
            assert said(pipe) == "ready"
            publish(options, 5).close()
            assert said(reader) == (1, {"a": [5, 5, 5]})
            kill(keeper)
        reader.send("again")
        assert said(reader) == (1, {"a": [5, 5, 5]})
        with process(keep_weights, domain, NAME) as (_next, pipe):
            assert said(pipe) == "ready"
            pipe.send("?")
            assert said(pipe) == (None, 1)
            assert weights.verify(NAME, **options) == 1
            pipe.send("?")
            assert said(pipe) == (1, None)
            with weights.open(NAME, **options) as shared:
                assert shared["a"].numpy().tolist() == [5, 5, 5]
            reader.send("newer")
            publish(options, 6)
            assert said(reader) == (2, {"a": [6, 6, 6]})
            pipe.send("end")


@kills
def test_waits_go_on_while_the_keeper_is_stopped(options, place):
    domain, _device = place
    seen, found = [], {}
    with process(keep_weights, domain, NAME) as (keeper, pipe):
        assert said(pipe) == "ready"
        stop(keeper)
        try:
            watched = weights.watch(NAME, **options, on=lambda shared: seen.append(shared.version))
            waits = {
                "open": lambda: weights.open(NAME, **options, wait=LIMIT_SECONDS).version,
                "publish": lambda: weights.publish(NAME, {"a": np.ones(1)}, **options, wait=LIMIT_SECONDS).version,
                "watch": lambda: next(weights.watch(NAME, **options)).version,
                "verify": lambda: weights.verify(NAME, **options, wait=LIMIT_SECONDS),
            }
            threads = [threading.Thread(target=lambda key=key: found.update({key: waits[key]()})) for key in waits]
            for thread in threads:
                thread.start()
            # As long as a keeper may take to answer.
            with pytest.raises(warpipe.HandshakeError):
                weights.open(NAME, **options)
        finally:
            os.kill(keeper.pid, signal.SIGCONT)
        for thread in threads:
            thread.join(LIMIT_SECONDS)
        until(lambda: seen, "the callback")
        assert found == dict.fromkeys(waits, 1) and seen == [1]
        watched.close()
        pipe.send("end")


def test_a_check_waits_for_a_version(options):
    with weights.keep(NAME, domain=options["domain"]):
        found = []
        check = threading.Thread(target=lambda: found.append(weights.verify(NAME, **options, wait=LIMIT_SECONDS)))
        check.start()
        # The version comes later than an answer that there is none.
        with pytest.raises(warpipe.TimeoutError):
            weights.verify(NAME, **options, wait=0.2)
        publish(options, 1)
        check.join(LIMIT_SECONDS)
        assert found == [1]


@kills
def test_a_killed_publisher_and_a_killed_reader_take_nothing_from_the_others(options, place):
    domain, device = place
    with weights.keep(NAME, domain=options["domain"]) as keeper:
        with process(publish_weights, domain, device, NAME, {"a": np.arange(4)}) as (publisher, pipe):
            assert said(pipe) == 1
            kill(publisher)
        with process(hold_weights, domain, device, NAME) as (reader, pipe):
            assert said(pipe) == (1, {"a": [0, 1, 2, 3]})
            kill(reader)
        assert keeper.version == 1
        with weights.open(NAME, **options) as shared:
            assert shared["a"].numpy().tolist() == [0, 1, 2, 3]
        assert publish(options, 1).version == 2


def test_a_damaged_version_is_named_with_its_tensors(options):
    lying = {name: in_memory(options["device"], np.zeros(4, "u1")) for name in "ab"}
    with weights.keep(NAME, domain=options["domain"]):
        published = weights.publish(NAME, lying, **options, zero_copy="require")
        lying["b"].copy_from(np.ones(4, "u1"))
        lying["b"].wait(LIMIT_SECONDS)
        with pytest.raises(warpipe.WeightsDamagedError, match='"b"') as damaged:
            weights.verify(NAME, **options)
        assert (damaged.value.endpoint, damaged.value.version, damaged.value.tensors) == (NAME, 1, ["b"])
        assert published.version == 1


def test_an_interrupted_wait_for_a_keeper_or_a_version_opens_nothing_and_can_be_repeated(options):
    waits = [
        lambda: weights.open(NAME, **options, wait=None), lambda: weights.load(NAME, **options, wait=LIMIT_SECONDS),
        lambda: weights.verify(NAME, **options, wait=None),
        lambda: weights.publish(NAME, {"a": np.ones(1)}, **options, wait=None),
    ]
    for wait in waits:
        interrupted_by(wait, lambda: None, by=signal.SIGINT, slices=3)
    with weights.keep(NAME, domain=options["domain"]) as keeper:
        interrupted_by(lambda: weights.open(NAME, **options, wait=None), lambda: None, by=signal.SIGINT, slices=3)
        version = publish(options, 1).version
        with weights.open(NAME, **options) as shared:
            assert shared.version == version == keeper.version
            interrupted_by(lambda: shared.newer(None), lambda: publish(options, 2), by=signal.SIGINT, slices=3)
            assert shared.newer(LIMIT_SECONDS)["a"].numpy()[0] == 2


def test_an_interrupted_watch_gives_the_version_to_the_next_wait(options):
    with weights.keep(NAME, domain=options["domain"]), weights.watch(NAME, **options) as watch:
        waits = [lambda: watch.changes(None), lambda: next(watch), lambda: watch.changes(LIMIT_SECONDS)]
        for number, wait in enumerate(waits, 1):
            interrupted_by(wait, lambda number=number: publish(options, number), by=signal.SIGINT, slices=2)
            shared = watch.changes(LIMIT_SECONDS)
            assert (shared.version, shared["a"].numpy()[0]) == (number, number)
        assert watch.changes(0.0) is None


def test_no_wait_holds_the_interpreter(options):
    with weights.keep(NAME, domain=options["domain"]), weights.watch(NAME, **options) as watch:
        found = []
        waits = [lambda: weights.open(NAME, **options, wait=None), lambda: watch.changes(None)]
        threads = [threading.Thread(target=lambda wait=wait: found.append(wait().version)) for wait in waits]
        for thread in threads:
            thread.start()
        # This thread would not come to it.
        publish(options, 1)
        for thread in threads:
            thread.join(LIMIT_SECONDS)
        assert found == [1, 1]


def test_many_versions_leave_no_memory_and_no_holder(options):
    before = options["device"].bytes_held
    with weights.keep(NAME, domain=options["domain"]), weights.watch(NAME, **options) as watch:
        for number in range(1, 41):
            publish(options, number).close()
            with watch.changes(LIMIT_SECONDS) as shared:
                assert shared.version == number
    alive = lambda: [one.name for one in options["domain"].endpoints() if one.alive]  # noqa: E731
    until(lambda: not alive(), "the end of all holders")
    del shared
    until(lambda: options["device"].bytes_held == before, "the end of all mappings")


NO_ROOM = """
import gc, sys, time
import numpy as np, warpipe
from peers import in_memory
from warpipe import weights
device = warpipe.Device("cuda")
before = device.bytes_held
with weights.keep("llama", domain=sys.argv[1]):
    given = {"a": in_memory(device, np.zeros(24 << 20, "u1"))}
    try:
        weights.publish("llama", given, domain=sys.argv[1], device=device)
        raise AssertionError("there was room for the copy, and for its hashes")
    except warpipe.DeviceMemoryError:
        del given
    end = time.monotonic() + 30
    while device.bytes_held > before:
        assert time.monotonic() < end, f"{device.bytes_held - before} bytes are still held"
        gc.collect()
"""


def test_what_was_to_be_copied_is_given_back_when_the_device_has_no_room(domain, device):
    if not device.name.startswith("Fake CUDA"):
        pytest.skip("the fake driver's memory has a limit")
    # The tensor and its copy fit, and the memory for the hashes does not.
    done = run(NO_ROOM, domain, device, FAKE_CUDA_MEMORY_MB="48")
    assert done.returncode == 0, done.stderr
