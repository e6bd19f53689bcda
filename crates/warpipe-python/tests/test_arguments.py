"""Arguments at every entry point: what is taken, and what a refusal says."""

import os
import pickle

import pytest

import warpipe
from conftest import DEVICE

np = pytest.importorskip("numpy")

HUGE = 1 << 70


class Places:
    """One object of each kind that takes arguments."""

    def __init__(self, domain, device):
        both = {"domain": domain, "device": device}
        self.both = both
        self.publisher = warpipe.Publisher("a", **both)
        self.queue = warpipe.Queue("q", **both)
        self.client = warpipe.Client("s", **both)
        self.timeline = warpipe.Timeline.create("t", **both)
        self.memory = warpipe.Memory.allocate(64, device=device)
        self.published = self.memory.publish("m", domain=domain)
        self.shared = self.published.ticket().open(device=device)
        self.pool = warpipe.Pool.create("p", **both)
        self.visit = warpipe.PoolClient.open("p", **both)

    def close(self):
        for one in (self.visit, self.pool, self.published, self.timeline, self.client, self.queue, self.publisher):
            one.close()


@pytest.fixture
def places(domain, device):
    places = Places(domain, device)
    yield places
    places.close()
    vars(places).clear()


INTEGERS = {
    **{f"Publisher({name})": (name, lambda p, n, name=name: warpipe.Publisher("b", **p.both, **{name: n})) for name in (
        "depth", "history", "memory_limit", "subscribers_max")},
    **{f"Publisher({name})": (name, lambda p, n, name=name: warpipe.Publisher("b", **p.both, **{name: [n]})) for name in (
        "allow_uids", "allow_gids")},
    **{f"Queue({name})": (name, lambda p, n, name=name: warpipe.Queue("b", **p.both, **{name: n})) for name in (
        "prefetch", "max_attempts", "limit", "memory_limit", "workers_max")},
    **{f"Client({name})": (name, lambda p, n, name=name: warpipe.Client("b", **p.both, **{name: n})) for name in (
        "prefetch", "max_attempts", "limit", "memory_limit")},
    **{f"Server({name})": (name, lambda p, n, name=name: warpipe.Server("b", **p.both, **{name: n})) for name in (
        "memory_limit", "clients_max")},
    **{f"Pool.create({name})": (name, lambda p, n, name=name: warpipe.Pool.create("b", **p.both, **{name: n})) for name in (
        "memory_limit", "reserve", "peers_max")},
    "Worker(memory_limit)": ("memory_limit", lambda p, n: warpipe.Worker("q", **p.both, memory_limit=n)),
    "Domain(owner)": ("owner", lambda p, n: warpipe.Domain(p.both["domain"].path, owner=n)),
    "Publisher.wait_for_subscribers": ("count", lambda p, n: p.publisher.wait_for_subscribers(n)),
    "Queue.wait_for_workers": ("count", lambda p, n: p.queue.wait_for_workers(n)),
    "Client.wait_for_servers": ("count", lambda p, n: p.client.wait_for_servers(n)),
    "Timeline.signal": ("value", lambda p, n: p.timeline.signal(n)),
    "Timeline.wait": ("value", lambda p, n: p.timeline.wait(n)),
    "Timeline.check": ("value", lambda p, n: p.timeline.check(n)),
    "Semaphore.create": ("permits", lambda p, n: warpipe.Semaphore.create("b", n, **p.both)),
    "Memory.allocate": ("nbytes", lambda p, n: warpipe.Memory.allocate(n, device=p.both["device"])),
    "Memory.write(offset)": ("offset", lambda p, n: p.memory.write(b"x", n)),
    "Memory.view(offset)": ("offset", lambda p, n: p.memory.view(1, "uint8", n)),
    **{f"{title}({name})": (name, lambda p, n, name=name, make=make: make(**p.both, **{name: [n]})) for name in (
        "allow_uids", "allow_gids") for title, make in (
        ("Timeline.create", lambda **on: warpipe.Timeline.create("b", **on)),
        ("Semaphore.create", lambda **on: warpipe.Semaphore.create("b", **on)),
        ("Event.create", lambda **on: warpipe.Event.create(**on)),
        ("Member.join", lambda device, **on: warpipe.Member.join("b", **on)))},
    "Memory.publish(allow_uids)": ("allow_uids", lambda p, n: p.memory.publish("b", domain=p.both["domain"], allow_uids=[n])),
    "Published.ticket(offset)": ("offset", lambda p, n: p.published.ticket(n)),
    "Published.ticket(nbytes)": ("nbytes", lambda p, n: p.published.ticket(0, n)),
    "SharedMemory.range(offset)": ("offset", lambda p, n: p.shared.range(n)),
    "SharedMemory.range(nbytes)": ("nbytes", lambda p, n: p.shared.range(0, n)),
    "SharedMemory.import_fd(fd)": ("fd", lambda p, n: warpipe.SharedMemory.import_fd(n, p.memory.info, device=DEVICE)),
    "MemoryInfo(nbytes)": ("nbytes", lambda p, n: warpipe.MemoryInfo(n, 4096, "host")),
    "Pool.allocate": ("nbytes", lambda p, n: p.pool.allocate(n)),
    "Pool.allocate(uid)": ("uid", lambda p, n: p.pool.allocate(8, uid=n)),
    "Pool.usage": ("uid", lambda p, n: p.pool.usage(n)),
    "PoolClient.allocate": ("nbytes", lambda p, n: p.visit.allocate(n)),
    "Publisher.loan(shape)": ("dimension", lambda p, n: p.publisher.loan((2, n), "uint8")),
    "Queue.loan(shape)": ("dimension", lambda p, n: p.queue.loan(n, "uint8")),
    "Publisher.send(stream)": ("stream", lambda p, n: p.publisher.send(b"", stream=n)),
}


@pytest.mark.parametrize("number", [HUGE, -HUGE, -1])
@pytest.mark.parametrize("entry", INTEGERS)
def test_an_integer_out_of_range_is_refused_by_the_name_of_its_argument(places, entry, number):
    argument, call = INTEGERS[entry]
    with pytest.raises((OverflowError, warpipe.Error)) as refused:
        call(places, number)
    said = [str(refused.value), *getattr(refused.value, "__notes__", [])]
    assert any(argument in line for line in said), said


def test_a_domain_is_pickled_as_its_path_and_owner(domain):
    again = pickle.loads(pickle.dumps(domain))
    assert isinstance(again, warpipe.Domain) and again.path == domain.path
    owned = warpipe.Domain(domain.path, owner=os.geteuid())
    assert pickle.loads(pickle.dumps(owned)).path == domain.path


def test_a_device_is_pickled_as_its_uuid(device):
    again = pickle.loads(pickle.dumps(device))
    assert again == device and again.uuid == device.uuid and hash(again) == hash(device)
    assert warpipe.Device(device.uuid) == device


def test_a_uuid_of_no_gpu_is_refused():
    with pytest.raises(warpipe.Error) as refused:
        warpipe.Device("GPU-00000000-0000-0000-0000-000000000000")
    absent = refused.type is warpipe.DeviceError and refused.value.fault in ("NoDriver", "NoGpu")
    assert absent or refused.type is warpipe.ArgumentError


def test_a_recording_shows_its_number(device, domain):
    with warpipe.Event.create(domain=domain, device=device) as event:
        stream = warpipe.Stream(device)
        event.record(stream=stream)
        assert repr(event.record(stream=stream)) == "Recording(2 of recorder 0)"
        stream.synchronize()


@pytest.mark.parametrize("kind, limit", [("Client", 40), ("Server", 40)])
def test_a_name_that_is_too_long_is_told_as_it_was_given(domain, device, kind, limit):
    name = "n" * (limit + 1)
    with pytest.raises(warpipe.InvalidNameError, match=f"^\"{name}\" .* longer than {limit} bytes"):
        getattr(warpipe, kind)(name, domain=domain, device=device)


SECONDS = {
    "Publisher(timeout)": ("timeout", lambda p, n: warpipe.Publisher("b", **p.both, timeout=n)),
    "Publisher(handshake_timeout)": ("handshake_timeout", lambda p, n: warpipe.Publisher("b", **p.both, handshake_timeout=n)),
    "Publisher.wait_for_subscribers": ("timeout", lambda p, n: p.publisher.wait_for_subscribers(timeout=n)),
    "Subscriber(wait)": ("wait", lambda p, n: warpipe.Subscriber("a", **p.both, wait=n)),
    "Subscriber(timeout)": ("timeout", lambda p, n: warpipe.Subscriber("a", **p.both, timeout=n)),
    "Subscriber(spin)": ("spin", lambda p, n: warpipe.Subscriber("a", **p.both, spin=n)),
    "Queue(submit_timeout)": ("submit_timeout", lambda p, n: warpipe.Queue("b", **p.both, submit_timeout=n)),
    "Queue(lease_timeout)": ("lease_timeout", lambda p, n: warpipe.Queue("b", **p.both, lease_timeout=n)),
    "Client(timeout)": ("timeout", lambda p, n: warpipe.Client("b", **p.both, timeout=n)),
    "Worker(wait)": ("wait", lambda p, n: warpipe.Worker("q", **p.both, wait=n)),
    "Worker(answer_timeout)": ("answer_timeout", lambda p, n: warpipe.Worker("q", **p.both, answer_timeout=n)),
    "Queue.drain": ("timeout", lambda p, n: p.queue.drain(n)),
    "Timeline.open": ("wait", lambda p, n: warpipe.Timeline.open("t", **p.both, wait=n)),
    "Pool.allocate": ("timeout", lambda p, n: p.pool.allocate(1, n)),
    "weights.open": ("wait", lambda p, n: warpipe.weights.open("w", **p.both, wait=n)),
    "Ticket.read_file": ("wait", lambda p, n: warpipe.Ticket.read_file("/there/is/none", wait=n)),
}


@pytest.mark.parametrize("number", [-1, float("nan"), float("inf"), 10**400, -(10**400)], ids=["negative", "nan", "inf", "huge", "low"])
@pytest.mark.parametrize("entry", SECONDS)
def test_a_time_that_no_wait_takes_is_refused_by_the_name_of_its_argument(places, entry, number):
    argument, call = SECONDS[entry]
    with pytest.raises(warpipe.ArgumentError, match=f"^{argument} is "):
        call(places, number)
