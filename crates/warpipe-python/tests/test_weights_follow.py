"""Followers of weights: each version comes in at the addresses of the one before, whole, and whoever dies."""

import gc
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import LIMIT_SECONDS, until
from peers import in_memory
from test_interrupted import interrupted_elsewhere

import warpipe
from warpipe import weights


@pytest.fixture
def keeper(domain):
    with weights.keep("llama", domain=domain) as keeper:
        yield keeper


@pytest.fixture
def options(domain, device):
    return {"domain": domain, "device": device}


def state(number, size=300):
    return {name: np.full((3, size), number, "f4") for name in ("a", "b")}


def publish(number, options, **shape):
    weights.publish("llama", state(number, **shape), **options).close()


def numbers(shared):
    return {float(value) for name in shared for value in np.unique(shared[name].numpy())}


def address(view):
    found = view.__dlpack__ and view
    return found.data_ptr if hasattr(found, "data_ptr") else found.numpy().__array_interface__["data"][0]


def holders(domain):
    return [one.name for one in domain.endpoints() if one.alive and "/held-" in one.name]


def test_a_follower_takes_each_version_where_the_last_one_was_and_holds_no_other(keeper, options, domain):
    gc.collect()
    before = options["device"].bytes_held
    publish(1, options)
    # A thread of the library unmaps the publisher's memory.
    until(lambda: options["device"].bytes_held == before, "the end of the publisher's mapping")
    shared = weights.open("llama", **options)
    held = options["device"].bytes_held
    follower, tensor = shared.follow(), shared["a"]
    assert (follower.version, follower.update()) == (1, None)
    for number in range(2, 6):
        publish(number, options)
        assert follower.update() == follower.version == shared.version == number
        assert numbers(shared) == {number} and set(np.unique(tensor.numpy())) == {number}
        assert follower.weights is shared and len(holders(domain)) == 1
        gc.collect()
        until(lambda: options["device"].bytes_held == held, "the end of the former version's mapping")
        # What is opened now is the same version, and the same memory.
        again = weights.open("llama", **options)
        assert again.version == number and again.content_hash("a") == shared.content_hash("a")
        again.close()
    assert repr(follower) == f"Follower('llama', version={number})".replace("'", '"')
    del follower, shared, again, tensor
    gc.collect()
    until(lambda: options["device"].bytes_held == before, "the end of the mapping")


def test_arrays_of_other_frameworks_read_the_new_version_without_being_made_again(keeper, options):
    if options["device"].kind != "host":
        pytest.skip("NumPy's arrays of a GPU's memory are copies")
    publish(1, options)
    shared = weights.open("llama", **options)
    array = np.from_dlpack(shared["b"])
    follower = shared.follow()
    publish(2, options)
    assert follower.update() == 2 and (array == 2).all()


def test_a_version_that_does_not_fit_changes_nothing(keeper, options):
    publish(1, options)
    shared = weights.open("llama", **options)
    follower = shared.follow()
    other = {"a": np.zeros((300, 3), "f4"), "c": np.zeros(1)}
    weights.publish("llama", other, **options).close()
    with pytest.raises(warpipe.WeightsMismatchError, match="version 2.*open the version anew") as raised:
        follower.update()
    error = raised.value
    assert (error.missing, error.unexpected, list(error.different)) == (["b"], ["c"], ["a"])
    assert (follower.version, numbers(shared)) == (1, {1})
    publish(3, options)
    assert follower.update() == 3 and numbers(shared) == {3}


def test_followers_of_one_process_share_the_version_that_is_there(keeper, options):
    publish(1, options)
    one, two = weights.open("llama", **options), weights.open("llama", **options)
    first, second = one.follow(), two.follow()
    publish(2, options)
    assert first.update() == 2
    assert (second.update(), second.version, numbers(two)) == (None, 2, {2})


def test_an_update_that_another_thread_overtook_takes_no_earlier_version(keeper, options):
    publish(1, options)
    one, two = weights.open("llama", **options), weights.open("llama", **options)
    first, second, taken = one.follow(), two.follow(), []
    publish(2, options)
    gate, stream = warpipe.Timeline.create("gate", **options), warpipe.Stream(options["device"])
    warpipe.Timeline.open("gate", **options).wait(1, stream=stream)
    slow = threading.Thread(target=lambda: taken.append(first.update(stream, timeout=LIMIT_SECONDS)))
    slow.start()
    try:
        until(lambda: len(holders(options["domain"])) == 2, "the opening of version 2 by the slow one")
        publish(3, options)
        assert second.update() == 3
    finally:
        gate.signal(1)
        slow.join()
    assert taken == [None] and numbers(one) == {3} and one.version == 3


def test_a_follower_goes_on_while_there_is_no_keeper(options, domain):
    with weights.keep("llama", domain=domain):
        publish(1, options)
        shared = weights.open("llama", **options)
    follower = shared.follow()
    assert follower.update() is None and numbers(shared) == {1}
    with weights.keep("llama", domain=domain):
        assert weights.verify("llama", **options) == 1
        publish(2, options)
        assert follower.update() == 2 and numbers(shared) == {2}


def test_an_update_waits_for_the_streams_work_and_changes_nothing_in_time_or_when_interrupted(keeper, options):
    publish(1, options)
    shared = weights.open("llama", **options)
    follower, stream = shared.follow(), warpipe.Stream(options["device"])
    publish(2, options)
    gate = warpipe.Timeline.create("gate", **options)
    warpipe.Timeline.open("gate", **options).wait(1, stream=stream)
    try:
        with pytest.raises(TimeoutError, match="the end of the stream's work"):
            follower.update(stream, timeout=0.05)
        assert follower.version == 1
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            follower.update(stream, timeout=None)
        assert follower.version == 1
    finally:
        gate.signal(1)
    assert follower.update(stream) == 2 and numbers(shared) == {2}


def test_an_update_that_raises_has_taken_nothing_wherever_an_interrupt_comes(keeper, options):
    publish(1, options)
    follower, places = weights.open("llama", **options).follow(), set()
    for number in itertools.count(2):
        publish(number, options)
        taken, is_interrupted = interrupted_elsewhere(places, follower.update)
        if taken is not None:
            break
        assert is_interrupted and follower.version == number - 1
        assert follower.update() == number
    assert taken == follower.version == number > 2


def test_an_update_waits_as_long_as_it_may_for_other_weights_of_the_same_memory(keeper, options, device):
    def lying(number):
        # Of two lengths, so that they are not pieces of one part.
        return {name: in_memory(device, np.full(size, number, "f4")) for name, size in (("a", 300), ("b", 1_000_000))}

    def publish_in_place(tensors):
        return weights.publish("llama", tensors, zero_copy="require", **options)

    same = lying(1)
    first = publish_in_place(same)
    other = weights.open("llama", **options)
    publish_in_place(same).close()
    first.close()
    shared = weights.open("llama", **options)
    assert numbers(shared) == numbers(other) == {1}
    follower = shared.follow()
    publish_in_place(lying(3)).close()
    with pytest.raises(warpipe.TimeoutError, match="other weights.*within 50ms"):
        follower.update(timeout=0.05)
    assert (follower.version, numbers(shared)) == (2, {1})
    # Longer than one look.
    closer = threading.Timer(1.5, other.close)
    closer.start()
    assert follower.update(timeout=LIMIT_SECONDS) == 3
    closer.join()
    assert numbers(shared) == {3}


def test_what_a_follower_refuses_names_the_next_step(keeper, options):
    publish(1, options)
    shared = weights.open("llama", **options)
    follower = shared.follow()
    with pytest.raises(TypeError, match=r"open\(name\)\.follow\(\)"):
        pickle.dumps(follower)
    with pytest.raises(warpipe.ArgumentError, match="stream"):
        follower.update("now")
    shared.close()
    with pytest.raises(warpipe.ClosedError):
        follower.update()
    with pytest.raises(warpipe.ClosedError):
        shared.follow()


def test_a_module_that_attach_filled_computes_with_each_new_version(keeper, options):
    torch = pytest.importorskip("torch")

    def linear(seed):
        torch.manual_seed(seed)
        return torch.nn.Linear(8, 8)

    weights.publish("llama", linear(1).state_dict(), **options).close()
    with weights.on_meta():
        module = linear(0)
    place = "cpu" if options["device"].kind == "host" else "cuda"
    given = torch.arange(8, dtype=torch.float32, device=place)
    follower = weights.attach(module, "llama", **options).follow()
    addresses = [parameter.data_ptr() for parameter in module.parameters()]
    for seed in (2, 3):
        weights.publish("llama", linear(seed).state_dict(), **options).close()
        assert follower.update() == seed
        assert torch.equal(module(given), linear(seed).to(place)(given))
        assert [parameter.data_ptr() for parameter in module.parameters()] == addresses


def test_a_captured_graph_computes_with_the_new_version_when_it_is_replayed(keeper, options):
    torch = pytest.importorskip("torch")
    if options["device"].kind == "host" or not torch.cuda.is_available():
        pytest.skip("graphs of CUDA need a GPU and PyTorch")

    def matrix(seed):
        torch.manual_seed(seed)
        return torch.randn(512, 512, device="cuda")

    weights.publish("llama", {"a": matrix(1)}, **options).close()
    shared = weights.open("llama", **options)
    follower, tensor, given = shared.follow(), shared["a"].torch(), matrix(0)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tensor @ given
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        product = tensor @ given
    for seed in (2, 3, 4):
        # A replay is under way when the next version is taken.
        graph.replay()
        weights.publish("llama", {"a": matrix(seed)}, **options).close()
        assert follower.update(torch.cuda.current_stream()) == seed
        graph.replay()
        assert torch.equal(product, matrix(seed) @ given)


ENGINE = """
import sys, time, numpy as np, warpipe
from warpipe import weights
domain, device = warpipe.Domain(sys.argv[1]), sys.argv[2]
shared = weights.open("llama", device=device, domain=domain, wait=60)
follower = shared.follow()
print("open", flush=True)
last = 0
while True:
    follower.update()
    found = {float(value) for name in shared for value in np.unique(shared[name].numpy())}
    assert len(found) == 1, f"version {shared.version} is torn: {found}"
    if found != last:
        print("whole", shared.version, flush=True)
    last = found
"""

TRAINER = """
import sys, itertools, numpy as np, warpipe
from warpipe import weights
domain, device = warpipe.Domain(sys.argv[1]), sys.argv[2]
for number in itertools.count(int(sys.argv[3])):
    state = {name: np.full((3, 300), number, "f4") for name in ("a", "b")}
    weights.publish("llama", state, device=device, domain=domain, wait=60).close()
    print("published", number, flush=True)
"""

KEEPER = """
import sys, warpipe
from warpipe import weights
domain, device = warpipe.Domain(sys.argv[1]), sys.argv[2]
while True:
    try:
        keeper = weights.keep("llama", domain=domain)
        break
    except warpipe.NameTakenError:
        pass
print("keeps", flush=True)
try:
    weights.verify("llama", device=device, domain=domain, wait=5)
except (TimeoutError, warpipe.Error):
    pass
print("verified", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("victim", ["engine", "trainer", "keeper"])
def test_no_version_is_torn_when_a_process_is_killed_in_the_middle_of_updates(domain, device, victim, request):
    """An engine checks every version that it takes; a process is killed again and again meanwhile."""
    place = [str(domain.path), device.name if device.kind == "host" else "cuda:0"]

    def start(program, *arguments):
        process = subprocess.Popen(
            [sys.executable, "-c", program, *place, *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        request.addfinalizer(process.wait)
        request.addfinalizer(process.kill)
        return process

    def read(process, word):
        """The next line that begins with the word."""
        for line in process.stdout:
            if line.startswith(word):
                return line.split()
        raise AssertionError(f"a process ended with {process.wait()} before it said {word!r}")

    keeper, first = start(KEEPER), 1000
    read(keeper, "keeps")
    trainer = start(TRAINER, first)
    read(trainer, "published")
    engines = [start(ENGINE), start(ENGINE)]
    for engine in engines:
        read(engine, "open")
    # What nobody reads must not fill a pipe.
    threading.Thread(target=lambda: [None for _ in trainer.stdout], daemon=True).start()
    for turn in range(1, 8):
        for engine in engines:
            read(engine, "whole")
        if victim == "engine":
            engines[0].kill()
            engines[0] = start(ENGINE)
            read(engines[0], "open")
        elif victim == "trainer":
            trainer.kill()
            trainer.wait()
            trainer = start(TRAINER, first + 1000 * turn)
            threading.Thread(target=lambda stream=trainer.stdout: [None for _ in stream], daemon=True).start()
        else:
            keeper.kill()
            keeper.wait()
            keeper = start(KEEPER)
            read(keeper, "verified")
        read(engines[1], "whole")
