"""An endpoint that is opened as another kind says what it is."""

import pytest

import warpipe


@pytest.fixture
def made(domain, device):
    """One endpoint of each kind, under its kind's name."""
    on = {"domain": domain, "device": device}
    endpoints = [
        warpipe.Publisher("publisher", **on),
        warpipe.Queue("queue", **on),
        warpipe.Timeline.create("timeline", **on),
        warpipe.Semaphore.create("semaphore", **on),
        warpipe.Pool.create("pool", **on),
        warpipe.Member.join("x", domain=domain),
    ]
    yield ["publisher", "queue", "timeline", "semaphore", "pool", "members/x"]
    for endpoint in endpoints:
        endpoint.close()


OPENS = {
    "publisher": lambda name, on: warpipe.Subscriber(name, **on),
    "queue": lambda name, on: warpipe.Worker(name, **on),
    "timeline": lambda name, on: warpipe.Timeline.open(name, **on),
    "semaphore": lambda name, on: warpipe.Semaphore.open(name, **on),
    "pool": lambda name, on: warpipe.PoolClient.open(name, **on),
}


@pytest.mark.parametrize("kind", OPENS)
def test_the_wrong_kind_is_told_by_its_name_at_once(made, domain, device, kind):
    for name in made:
        if name == kind:
            OPENS[kind](name, {"domain": domain, "device": device}).close()
            continue
        with pytest.raises(warpipe.OtherKindError, match=name.removesuffix("s/x")) as told:
            OPENS[kind](name, {"domain": domain, "device": device, "wait": 30})
        assert (told.value.kind, told.value.found) == (kind, name.removesuffix("s/x"))
