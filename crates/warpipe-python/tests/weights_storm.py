"""What the processes of ``test_weights_storm.py`` do. Each version says in its metadata which number all elements of each
of its tensors have, so an engine sees whether it has all of one version."""

import contextlib
import random

import numpy as np
from peers import in_memory

import warpipe
from warpipe import weights

NAMES = [f"t{index}" for index in range(8)]
# The keeper, or a version without hashes, may be gone at any time.
PASSING = (
    warpipe.NotFoundError, warpipe.TimeoutError, warpipe.PeerGoneError, warpipe.RefusedError, warpipe.WeightsUnhashedError,
    warpipe.HandshakeError,
)  # fmt: skip


def keep(pipe, domain, device, name):
    """Keeps the name, and checks what it has taken over."""
    while True:
        with contextlib.suppress(warpipe.NameTakenError), weights.keep(name, domain=domain) as keeper:
            while not pipe.poll(0.01):
                if keeper.candidate is not None:
                    with contextlib.suppress(*PASSING):
                        weights.verify(name, device=device, domain=domain, wait=1)
            pipe.recv()


def train(pipe, domain, device, name, seed):
    """Publishes versions of all kinds, whole ones and parts of others, until it is killed."""
    chance = random.Random(seed)
    last, kept, step = None, [], seed * 1000
    while not pipe.poll(0):
        step += 1
        if chance.random() < 0.2:
            last = None
            # Of another trainer, maybe.
            with contextlib.suppress(*PASSING):
                shared = weights.open(name, device=device, domain=domain)
                last = shared, shared.metadata
        base, numbers = last or (None, {})
        names = NAMES if last is None else chance.sample(NAMES, chance.randint(0, 5))
        numbers = {**numbers, **dict.fromkeys(names, step)}
        length, lies = chance.choice([16, 1024]), chance.random() < 0.5
        values = np.full(length, step, "i8")
        state = {key: in_memory(warpipe.Device(device), values) if lies else values for key in names}
        options = {"hash": chance.choice(["device", "later", "none"]), "zero_copy": "require" if lies else False}
        try:
            published = weights.publish(
                name, state, domain=domain, device=device, base=base, metadata=numbers, wait=1, **options
            )
        except PASSING:
            last = None
            continue
        kept = [*kept[-2:], published]
        last = published, numbers
    pipe.recv()


def follow(pipe, domain, device, name):
    """Compares each version that comes, and the one before once more, with what it says of itself."""
    former = None
    while not pipe.poll(0):
        with contextlib.suppress(*PASSING), weights.watch(name, device=device, domain=domain) as watch:
            while not pipe.poll(0):
                shared = watch.changes(0.1)
                for version in filter(None, [shared, former if shared is not None else None]):
                    pipe.send((version.version, wrong(version)))
                former = shared or former
    pipe.recv()


def wrong(shared):
    """The tensors that are not as the version says."""
    numbers = shared.metadata
    found = sorted(set(numbers) ^ set(shared))
    return found + [key for key in shared if not (shared[key].numpy() == numbers[key]).all()]
