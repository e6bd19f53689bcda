"""Ends actors that hand arrays to each other, and looks for what they leave.

    PYTHONPATH=src python ends.py --ends 10000 --kills 500 [--processes]

Each actor gives an array to a receiver that lives on, and is given one of its. Then it ends: by its `__ray_terminate__`, by
`ray.kill`, or by a SIGKILL in the middle of transfers, as `--kills` of them. Afterwards the receiver and the driver have the
descriptors, the mappings and the memory that they had at first, and the domain has the names of living processes alone.
Prints a line of JSON, also when it is interrupted, terminated or fails, and ends with 1 if something is left or failed.

With `--processes` the actors are processes of multiprocessing that make the calls of the transport that Ray makes, without
Ray between: it starts four actors a second, and these start in milliseconds.
"""

import argparse
import collections
import gc
import json
import multiprocessing
import os
import random
import select
import signal
import sys
import tempfile
import time

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import numpy  # noqa: E402
import ray  # noqa: E402
import warpipe  # noqa: E402
from ray.experimental.rdt.util import get_tensor_transport_manager  # noqa: E402

import warpipe_ray  # noqa: E402
from warpipe_ray import Transport, _source  # noqa: E402

LIMIT_SECONDS = 60.0
SAID_SECONDS = 30.0
BYTES = 1 << 20

warpipe_ray.register(numpy.ndarray)


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Actor:
    def pid(self):
        return os.getpid()

    @ray.method(tensor_transport="WARPIPE")
    def give(self):
        return numpy.ones(BYTES, "uint8")

    def take(self, given):
        return int(given[:: BYTES // 8].sum())

    def held(self):
        return held()


def mapped():
    """The mappings of shared memory of warpipe: regions and segments, its own and others'."""
    with open("/proc/self/maps") as file:
        return sum("/memfd:warpipe" in line for line in file)


def threads():
    """Those of warpipe: Ray's own come and go."""
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                names.append(file.read())
        except OSError:
            pass
    return sum(name.startswith("warpipe") for name in names)


def held():
    """What this process has of others, and for them. Its pool keeps regions for later objects, with two descriptors each."""
    # With the next source it would drop them itself.
    get_tensor_transport_manager("WARPIPE")._drop_gone()
    gc.collect()
    links = collections.Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            links[os.readlink(f"/proc/self/fd/{name}").partition(":")[0]] += 1
        except FileNotFoundError:
            pass
    stats = [one._pool.stats for one in _source._sources.values()]
    regions, own = sum(one.regions for one in stats), sum(one.total_nbytes for one in stats)
    return {
        "imported": warpipe.Device("host").bytes_held - own,
        "descriptors": sum(links.values()) - 2 * regions,
        "memfds": links["/memfd"] - 2 * regions,
        "mappings": mapped() - regions,
        "threads": threads(),
        "offered": sum(one.in_use_nbytes for one in stats),
        "lent": sum(one.lent_nbytes for one in stats),
    }


def ended(pid_handle):
    poll = select.poll()
    poll.register(pid_handle, select.POLLIN)
    if not poll.poll(LIMIT_SECONDS * 1000):
        raise AssertionError("an actor did not end")
    os.close(pid_handle)


def batch(receiver, ways):
    """Starts an actor for each way to end, and ends it."""
    actors = [Actor.remote() for _ in ways]
    answers = []
    for actor in actors:
        answers += [receiver.take.remote(actor.give.remote()), actor.take.remote(receiver.give.remote())]
    pids = ray.get([actor.pid.remote() for actor in actors], timeout=LIMIT_SECONDS)
    assert set(ray.get(answers, timeout=LIMIT_SECONDS)) == {8}
    handles = [os.pidfd_open(pid) for pid in pids]
    for actor, pid, way in zip(actors, pids, ways, strict=True):
        if way == "SIGKILL":
            # The driver owns all objects: Ray never collects those of an owner that was killed.
            for _ in range(4):
                receiver.take.remote(actor.give.remote())
                actor.take.remote(receiver.give.remote())
            # Somewhere in these transfers.
            time.sleep(random.uniform(0, 0.05))
            os.kill(pid, signal.SIGKILL)
        elif way == "ray.kill":
            ray.kill(actor)
        else:
            # As Ray does when the last handle is dropped. Its own thread for transfers keeps the last ones.
            actor.__ray_terminate__.remote()
    for handle in handles:
        ended(handle)


class Object:
    """An array of this process that the transport offers, as Ray names it."""

    number = 0

    def __init__(self, transport):
        Object.number += 1
        self.transport, self.name = transport, f"{os.getpid()}-{Object.number}"
        self.metadata = transport.extract_tensor_transport_metadata(self.name, [numpy.ones(BYTES, "uint8")])

    def collect(self):
        self.transport.garbage_collect(self.name, self.metadata, [])


def taken(transport, name, metadata):
    (given,) = transport.recv_multiple_tensors(name, metadata, None)
    return int(given[:: BYTES // 8].sum())


def process(pipe):
    """An actor: gives an object for each that it is given, until it is to end."""
    transport = get_tensor_transport_manager("WARPIPE")
    while True:
        given = pipe.recv()
        if given in ("ray.kill", "terminate"):
            # Ray's kill runs no code of the interpreter's end.
            os._exit(0) if given == "ray.kill" else sys.exit(0)
        name, metadata = given
        assert taken(transport, name, metadata) == 8
        mine = Object(transport)
        pipe.send((mine.name, mine.metadata))
        pipe.recv()
        mine.collect()


def process_batch(transport, ways):
    """As `batch`, of processes beside the one that gives to all and takes from all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "warpipe_ray"])
    started, objects = [], []
    try:
        for _ in ways:
            ours, theirs = context.Pipe()
            child = context.Process(target=process, args=(theirs,))
            child.start()
            theirs.close()
            started.append((child, ours))
        for (child, pipe), way in zip(started, ways, strict=True):
            mine = Object(transport)
            objects.append(mine)
            pipe.send((mine.name, mine.metadata))
            assert taken(transport, *pipe.recv()) == 8
            pipe.send("collected")
            if way == "SIGKILL":
                pipe.send((mine.name, mine.metadata))
                # Somewhere in the transfer there, or before the one here.
                time.sleep(random.uniform(0, 0.002))
                child.kill()
                try:
                    taken(transport, *pipe.recv())
                except (EOFError, ConnectionResetError, warpipe_ray.SourceGoneError):
                    pass
            else:
                pipe.send(way)
        for child, _ in started:
            child.join(LIMIT_SECONDS)
            if child.exitcode is None:
                raise AssertionError("a process did not end")
    finally:
        # Of an interrupted batch some are left.
        for child, pipe in started:
            child.kill()
            child.join(LIMIT_SECONDS)
            pipe.close()
        for mine in objects:
            mine.collect()


def rest(receiver, wanted):
    """What the receiver and the driver have, once that is no more than wanted, or after the limit. Of nothing wanted, once
    two looks are the same: what has just ended may still be on its way."""
    end, before = time.monotonic() + LIMIT_SECONDS, None
    while True:
        found = {"driver": held()}
        if not isinstance(receiver, Transport):
            found["receiver"] = ray.get(receiver.held.remote(), timeout=LIMIT_SECONDS)
        pairs = [(f"{at} {what}", count, (wanted or found)[at][what]) for at in found for what, count in found[at].items()]
        over = {what: count for what, count, most in pairs if count > most}
        if (not over and (wanted or found == before)) or time.monotonic() > end:
            return found, over
        before = found
        time.sleep(0.2)


def run(receiver, batch, ways, at_once, end, said):
    """Ends actors, and notes what was done and what is left, whatever ends it."""
    # As many at once as later, so that what is kept for the next ones is there.
    for _ in range(2):
        batch(receiver, (["SIGKILL", "ray.kill", "terminate"] * at_once)[:at_once])
    said["at_first"], _ = rest(receiver, None)
    counts, began = collections.Counter(), time.monotonic()
    reported = began
    try:
        while ways and time.monotonic() < end:
            now, ways = ways[:at_once], ways[at_once:]
            batch(receiver, now)
            counts.update(now)
            if time.monotonic() > reported + SAID_SECONDS:
                reported = time.monotonic()
                print(f"{counts.total()} ends in {reported - began:.0f} s", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        said["interrupted"] = True
    finally:
        said.update(ends=counts.total(), **counts, seconds=round(time.monotonic() - began, 1))
    said["at_last"], said["over"] = rest(receiver, said["at_first"])
    domain = warpipe.Domain()
    said["dead_names"] = sum(not one.alive for one in domain.endpoints())
    said["cleaned"] = len(domain.clean())
    said["living_names"] = len(domain.endpoints())
    return not said["over"] and said["living_names"] <= 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ends", type=int, default=10000)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="starts no more actors after this time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", action="store_true", help="processes that make the transport's calls, without Ray")
    options = parser.parse_args()
    random.seed(options.seed)
    ways = ["SIGKILL"] * options.kills + ["ray.kill", "terminate"] * ((options.ends - options.kills + 1) // 2)
    ways = ways[: options.ends]
    random.shuffle(ways)
    said, is_good = {"wanted": len(ways), "of": "processes" if options.processes else "actors"}, False
    with tempfile.TemporaryDirectory(prefix="warpipe-ray-") as folder:
        os.environ["WARPIPE_DOMAIN"] = os.path.join(folder, "domain")
        try:
            if options.processes:
                receiver, each = get_tensor_transport_manager("WARPIPE"), process_batch
            else:
                ray.init(include_dashboard=False, logging_level="ERROR", log_to_driver=False, object_store_memory=128 << 20)
                receiver, each = Actor.remote(), batch
            # Afterwards: Ray has a handler of its own.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            is_good = run(receiver, each, ways, options.at_once, time.monotonic() + options.seconds, said)
        except Exception as error:
            said["failed"] = f"{type(error).__name__}: {error}"
        ray.shutdown()
    print(json.dumps(said))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
