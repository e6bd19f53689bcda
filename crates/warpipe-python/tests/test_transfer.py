"""New weights from a trainer to engines: joined and cut as the engine's load did, whole or not at all, whoever dies."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import weakref

import pytest
from conftest import LIMIT_SECONDS, until

import warpipe
from warpipe import _transfer, weights

torch = pytest.importorskip("torch")

SHAPES = {"q": (8, 16), "k": (4, 16), "v": (4, 16), "o": (16, 8), "norm": (16,)}


@pytest.fixture
def options(domain, device):
    return {"domain": domain, "device": device}


@pytest.fixture
def keepers(domain, options):
    names = []
    with contextlib.ExitStack() as stack:

        def keep(name):
            names.append(name)
            stack.enter_context(weights.keep(name, domain=domain))

        yield keep
        for name in names:
            # A publisher of hashes that come later goes on until a keeper has them.
            until(lambda name=name: weights.open(name, **options).is_hashed, "the hashes")


def checkpoint(step):
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Rank:
    """A rank of an engine: joins q, k and v, and cuts them and o by its number, as a loader does."""

    def __init__(self, rank, count):
        self.rank, self.count = rank, count
        rows = 16 // count
        self.tensors = {"qkv": torch.zeros(rows, 16), "o": torch.zeros(16, 8 // count), "norm": torch.zeros(16)}

    def load(self, pairs):
        at = {"q": 0, "k": 8 // self.count, "v": 12 // self.count}
        for name, tensor in pairs:
            if name in at:
                rows = tensor.shape[0] // self.count
                part = tensor.narrow(0, self.rank * rows, rows)
                self.tensors["qkv"].narrow(0, at[name], rows).copy_(part)
            elif name == "o":
                columns = tensor.shape[1] // self.count
                self.tensors["o"].copy_(tensor[:, self.rank * columns : (self.rank + 1) * columns])
            else:
                self.tensors["norm"].copy_(tensor)

    def publish(self, name, options, step=1):
        recorder = _transfer.Recorder(self.tensors)
        with recorder:
            self.load(recorder.watched(checkpoint(step).items()))
        metadata = _transfer.with_plan({"model": "m"}, recorder.plan(self.tensors))
        weights.publish(name, self.tensors, metadata=metadata, **options).close()
        return weights.open(name, **options)


def expected(step, rank, count):
    wanted = Rank(rank, count)
    wanted.load(checkpoint(step).items())
    return wanted.tensors


def is_step(shared, step, rank=0, count=1):
    return all(torch.equal(shared[name].torch().cpu(), tensor) for name, tensor in expected(step, rank, count).items())


def test_each_rank_gets_its_part_of_a_trainers_tensors_at_the_addresses_of_the_last_version(keepers, options, domain, device):
    names = _transfer.ranks("policy", 2)
    assert names == ["policy/0of2", "policy/1of2"]
    receivers = []
    for rank, name in enumerate(names):
        keepers(name)
        receivers.append(_transfer.Receiver(Rank(rank, 2).publish(name, options), domain=domain))
    trainer = _transfer.Trainer(names, devices=[device, device], domain=domain)
    tensors = [receiver.weights["qkv"].torch() for receiver in receivers]
    for step in (2, 3):
        assert trainer.send(checkpoint(step).items()) == [step, step]
        for rank, receiver in enumerate(receivers):
            assert receiver.update(step) == step == receiver.version
            assert is_step(receiver.weights, step, rank, 2)
            assert torch.equal(tensors[rank].cpu(), expected(step, rank, 2)["qkv"])
    trainer.close()


def test_a_tensor_with_two_names_is_sent_once_and_what_no_checkpoint_has_stays(keepers, options, domain, device):
    keepers("policy")
    embed = torch.zeros(4)
    tensors = {"embed": embed, "head": embed, "buffer": torch.full((3,), 5.0)}
    recorder = _transfer.Recorder({"embed": embed, "head": embed})
    with recorder:
        for _, tensor in recorder.watched([("embed", torch.ones(4))]):
            embed.copy_(tensor)
    weights.publish("policy", tensors, metadata=_transfer.with_plan({}, recorder.plan({"embed": embed, "head": embed})), **options).close()
    receiver = _transfer.Receiver(weights.open("policy", **options), domain=domain)
    trainer = _transfer.Trainer("policy", devices=[device], domain=domain)
    for value in (2, 3):
        [number] = trainer.send({"embed": torch.full((4,), float(value))})
        receiver.update(number)
        found = {name: receiver.weights[name].torch().unique().tolist() for name in tensors}
        assert found == {"embed": [value], "head": [value], "buffer": [5.0]}
    trainer.close()


@pytest.mark.parametrize("same_layout", [True, False])
def test_changed_tensors_alone_leave_the_others_as_they_are(keepers, options, domain, device, same_layout):
    keepers("policy")
    given = []
    receiver = _transfer.Receiver(Rank(0, 1).publish("policy", options), given.append, domain=domain)
    trainer = _transfer.Trainer("policy", devices=[device], domain=domain)
    changed = {name: tensor for name, tensor in checkpoint(2).items() if name in ("k", "norm")}
    assert trainer.send(changed, changed=True, same_layout=same_layout) == [2]
    assert receiver.update(2) == 2
    # Another layout lies elsewhere: the engine is given it anew.
    assert len(given) == (0 if same_layout else 1)
    wanted = Rank(0, 1)
    wanted.load((checkpoint(1) | changed).items())
    for name, tensor in wanted.tensors.items():
        assert torch.equal(receiver.weights[name].torch().cpu(), tensor)


def test_a_version_of_another_layout_is_an_error_for_an_engine_that_cannot_move(keepers, options, domain, device):
    keepers("policy")
    receiver = _transfer.Receiver(Rank(0, 1).publish("policy", options), domain=domain)
    trainer = _transfer.Trainer("policy", devices=[device], domain=domain)
    trainer.send({"norm": checkpoint(2)["norm"]}, changed=True, same_layout=False)
    with pytest.raises(warpipe.WeightsMismatchError):
        receiver.update(2)
    assert receiver.version == 1 and is_step(receiver.weights, 1)


def test_tensors_that_are_no_version_of_the_engines_checkpoint_are_refused_and_nothing_is_published(
    keepers, options, domain, device
):
    keepers("policy")
    shared = Rank(0, 1).publish("policy", options)
    trainer = _transfer.Trainer("policy", devices=[device], domain=domain)
    wrong = checkpoint(2) | {"o": torch.zeros(8, 16), "extra": torch.zeros(1)}
    del wrong["norm"]
    with pytest.raises(warpipe.WeightsMismatchError, match=r"lacks norm.*checkpoint lacks extra.*\[8, 16\] here") as raised:
        trainer.send(wrong)
    error = raised.value
    assert (error.missing, error.unexpected, list(error.different)) == (["norm"], ["extra"], ["o"])
    assert weights.open("policy", **options).version == shared.version


def test_what_the_engine_has_no_use_for_is_left_out_with_a_warning_unless_it_is_said_to_have_changed(
    keepers, options, domain, device
):
    keepers("policy")
    receiver = _transfer.Receiver(Rank(0, 1).publish("policy", options), domain=domain)
    trainer = _transfer.Trainer("policy", devices=[device], domain=domain)
    with pytest.warns(UserWarning, match="lacks critic, which no engine gets") as told:
        receiver.update(*trainer.send(checkpoint(2) | {"critic": torch.zeros(1)}))
    assert is_step(receiver.weights, 2) and told[0].filename == __file__
    with pytest.raises(warpipe.WeightsMismatchError, match="the engine's checkpoint lacks critic"):
        trainer.send({"critic": torch.zeros(1)}, changed=True)
    trainer.close()


def test_a_tensor_that_an_engine_computed_is_not_sent(keepers, options, domain, device):
    keepers("policy")
    tensors = {"scaled": torch.zeros(4), "moved": torch.zeros(4), "plain": torch.zeros(6)}
    recorder = _transfer.Recorder(tensors)
    given = {name: torch.ones(4) for name in tensors}
    with recorder:
        for name, tensor in recorder.watched(given.items()):
            tensors[name][:4].copy_(tensor)
        tensors["scaled"].mul_(2)
        # Padding is no computing.
        tensors["plain"][4:].fill_(7)
    tensors["moved"] = tensors["moved"].clone()
    plan = recorder.plan(tensors)
    assert plan.opaque == ["moved", "scaled"] and [one.target for one in plan.copies] == ["plain"]
    assert _transfer.Plan.unpacked(plan.packed()) == plan
    weights.publish("policy", tensors, metadata=_transfer.with_plan({}, plan), **options).close()
    trainer = _transfer.Trainer("policy", devices=[device], domain=domain)
    with pytest.raises(warpipe.WeightsMismatchError, match="computed these when it loaded them: moved, scaled") as raised:
        trainer.send(given)
    assert raised.value.uncomputed == ["moved", "scaled"]


def test_a_tensor_that_lies_where_one_of_the_checkpoint_was_is_not_taken_for_it(domain):
    target = torch.zeros(64)
    recorder = _transfer.Recorder({"a": target})
    with recorder:
        for _, tensor in recorder.watched((name, torch.arange(64.0)) for name in ("first",)):
            kept = tensor.data_ptr()
            del tensor
        # The allocator gives the same place out again, mostly.
        others = [torch.ones(64) for _ in range(8)]
        other = next((one for one in others if one.data_ptr() == kept), others[0])
        target.copy_(other)
    assert recorder.plan({"a": target}).opaque == ["a"]


def test_without_an_engine_the_tensors_are_published_as_they_are(keepers, options, domain, device):
    keepers("policy")
    trainer = _transfer.Trainer("policy", devices=[device], domain=domain)
    assert trainer.send(checkpoint(1)) == [1]
    assert trainer.send({"norm": checkpoint(2)["norm"]}, changed=True) == [2]
    shared = weights.open("policy", **options)
    assert torch.equal(shared["norm"].torch().cpu(), checkpoint(2)["norm"])
    assert torch.equal(shared["q"].torch().cpu(), checkpoint(1)["q"])
    trainer.close()


@pytest.mark.parametrize("has_engine", [True, False])
def test_each_tensor_is_copied_as_it_comes_and_none_is_kept(keepers, options, domain, device, has_engine):
    keepers("policy")
    if has_engine:
        Rank(0, 1).publish("policy", options)
    alive = []

    def gathered(step):
        # As a trainer gathers what it has in shards.
        for name, tensor in checkpoint(step).items():
            whole = tensor.clone()
            alive.append(weakref.ref(whole))
            yield name, whole
            del whole
            assert not any(one() is not None for one in alive), name

    trainer = _transfer.Trainer("policy", devices=[device], domain=domain)
    [number] = trainer.send(gathered(2))
    found = {name: view.torch().cpu() for name, view in weights.open("policy", **options).items()}
    wanted = expected(2, 0, 1) if has_engine else checkpoint(2)
    assert number == 1 + has_engine and found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert {"gather", "copies", "offer"} <= trainer.took.keys()
    trainer.close()


def test_tensors_that_come_one_after_the_other_lie_in_few_memories(domain, device):
    arena = _transfer.Arena(device)
    given = [torch.arange(count, dtype=dtype) for count in (1, 300, 3 << 20, 5) for dtype in (torch.uint8, torch.float32)]
    given.append(torch.empty(0))
    made = [arena.copied(tensor) for tensor in given]
    assert all(torch.equal(one.cpu(), tensor) and one.dtype == tensor.dtype for one, tensor in zip(made, given, strict=True))
    assert len({one.untyped_storage().data_ptr() for one in made if one.numel()}) == 4


@pytest.mark.parametrize("has_sent", [False, True])
def test_a_trainer_has_a_keeper_take_over_when_the_last_one_was_killed(options, domain, device, has_sent):
    trainer = _transfer.Trainer("policy", devices=[device], domain=domain)
    with weights.keep("policy", domain=domain):
        receiver = _transfer.Receiver(Rank(0, 1).publish("policy", options), domain=domain)
        if has_sent:
            receiver.update(*trainer.send(checkpoint(2)))
            until(lambda: weights.open("policy", **options).is_hashed, "the hashes")
    try:
        [number] = trainer.send(checkpoint(3))
        assert number == receiver.version + 1 == receiver.update(number) and is_step(receiver.weights, 3)
        until(lambda: weights.open("policy", **options).is_hashed, "the hashes")
    finally:
        trainer.close()
        ended = [sys.executable, "-m", "warpipe", "weights", "drop", "policy", "--domain", str(domain.path)]
        subprocess.run(ended, check=True, timeout=LIMIT_SECONDS)


def test_a_keeper_that_cannot_begin_is_an_error_with_its_words(domain, options, monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho no space left on device >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(_transfer.sys, "executable", str(program))
    trainer = _transfer.Trainer("policy", devices=[options["device"]], domain=domain)
    with pytest.raises(warpipe.NotFoundError, match="ended with 3: no space left on device; .* by hand"):
        trainer.send(checkpoint(1))


def test_a_trainers_own_element_type_becomes_the_engines(keepers, options, domain, device):
    keepers("policy")
    receiver = _transfer.Receiver(Rank(0, 1).publish("policy", options), domain=domain)
    trainer = _transfer.Trainer("policy", devices=[device], domain=domain)
    receiver.update(*trainer.send({name: tensor.double() for name, tensor in checkpoint(2).items()}))
    assert receiver.weights["qkv"].torch().dtype == torch.float32 and is_step(receiver.weights, 2)
    trainer.close()


def test_how_the_largest_mixtures_of_experts_are_loaded_has_room_in_a_versions_metadata():
    # 61 layers of 384 experts; a version has 1 MiB of metadata.
    copies, sources = [], {}
    for layer in range(61):
        for expert in range(384):
            for part, target in (("gate", "w13"), ("up", "w13"), ("down", "w2")):
                shape = (7168, 2048) if part == "down" else (2048, 7168)
                name = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
                at = expert * (2 if target == "w13" else 1) * 2048 * 7168 + (2048 * 7168 if part == "up" else 0)
                strides = (shape[1], 1)
                copies.append(_transfer.Copy(f"model.layers.{layer}.mlp.experts.{target}", at, strides, name, 0, strides, shape))
                sources[name] = shape
    plan = _transfer.Plan(copies, sources, ["opaque"])
    packed = plan.packed()
    assert len(packed) < 1 << 19 and _transfer.Plan.unpacked(packed) == plan


def test_ranks_that_one_send_published_say_so(keepers, options, domain, device):
    names = _transfer.ranks("policy", 2)
    for name in names:
        keepers(name)
    trainer = _transfer.Trainer(names, devices=[device, device], domain=domain)
    sends = []
    for step in (1, 2):
        trainer.send(checkpoint(step))
        sends.append({weights.open(name, **options).metadata[_transfer.SEND] for name in names})
    trainer.close()
    assert [len(one) for one in sends] == [1, 1] and sends[0] != sends[1]


TRAINER = """
import sys, torch, warpipe
sys.path.insert(0, sys.argv[1])
from test_transfer import checkpoint
from warpipe import _transfer
device = warpipe.Device(sys.argv[3])
trainer = _transfer.Trainer("policy", devices=[device], domain=warpipe.Domain(sys.argv[2]))

class Slow(dict):
    def items(self):
        for number, pair in enumerate(super().items()):
            if number == 3:
                print("in the middle", flush=True)
                sys.stdin.read()
            yield pair

print("sent", *trainer.send(checkpoint(2)), flush=True)
trainer.send(Slow(checkpoint(3)))
"""


def test_a_trainer_that_is_killed_in_the_middle_leaves_the_last_version_whole(keepers, options, domain, device, request):
    keepers("policy")
    receiver = _transfer.Receiver(Rank(0, 1).publish("policy", options), domain=domain)
    place = device.name if device.kind == "host" else "cuda:0"
    arguments = [sys.executable, "-c", TRAINER, os.path.dirname(__file__), str(domain.path), place]
    trainer = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    request.addfinalizer(trainer.wait)
    request.addfinalizer(trainer.kill)
    assert trainer.stdout.readline() == "sent 2\n"
    assert trainer.stdout.readline() == "in the middle\n"
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    assert receiver.update() == 2 and is_step(receiver.weights, 2)
    again = _transfer.Trainer("policy", devices=[device], domain=domain)
    assert again.send(checkpoint(3)) == [3]
    assert receiver.update(3) == 3 and is_step(receiver.weights, 3)
    again.close()


def test_one_process_at_a_time_loads_and_a_death_lets_the_next_one(domain, request):
    program = (
        "import sys\nfrom warpipe import _transfer\n"
        "with _transfer.one_at_a_time('m', domain=sys.argv[1]):\n    print('in', flush=True)\n    sys.stdin.read()\n"
    )

    def start():
        arguments = [sys.executable, "-c", program, str(domain.path)]
        process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        request.addfinalizer(process.wait)
        request.addfinalizer(process.kill)
        return process

    first = start()
    assert first.stdout.readline() == "in\n"
    second = start()
    first.kill()
    assert second.stdout.readline() == "in\n"


def test_a_directory_that_takes_no_lock_is_an_error_with_the_next_step(domain, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(_transfer.os, "open", lambda *_: (_ for _ in ()).throw(full))
    with pytest.raises(warpipe.DomainError, match="No space left on device; see the domain's directory"):
        with _transfer.one_at_a_time("m", domain=domain):
            raise AssertionError("it is inside without the lock")


def test_a_keeper_is_started_once_and_outlives_its_starter(domain, options):
    program = "import sys\nfrom warpipe import _transfer\n_transfer.keep('policy', domain=sys.argv[1])\n"
    subprocess.run([sys.executable, "-c", program, str(domain.path)], check=True, timeout=LIMIT_SECONDS)
    try:
        published = weights.publish("policy", checkpoint(1), wait=LIMIT_SECONDS, **options)
        assert _transfer.is_kept("policy", domain=domain) and _transfer.is_held("policy", domain=domain)
        _transfer.keep("policy", domain=domain)
        published.close()
        assert weights.open("policy", **options).version == 1
    finally:
        ended = [sys.executable, "-m", "warpipe", "weights", "drop", "policy", "--domain", str(domain.path)]
        subprocess.run(ended, check=True, timeout=LIMIT_SECONDS)
