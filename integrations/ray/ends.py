"""Ends actors that hand arrays to each other, and looks for what they leave.

    PYTHONPATH=src python ends.py --ends 10000 --kills 500

Each actor gives an array to a receiver that lives on, and is given one of its. Then it ends: by its `__ray_terminate__`, by
`ray.kill`, or by a SIGKILL in the middle of transfers, as `--kills` of them. Afterwards the receiver and the driver have the
descriptors and the memory that they had at first, and the domain has the names of living processes alone. Prints a line of
JSON, and ends with 1 if something is left.
"""

import argparse
import collections
import gc
import json
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
from warpipe_ray import _source  # noqa: E402

LIMIT_SECONDS = 60.0
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


def rest(receiver, wanted):
    """What the receiver and the driver have, once that is no more than wanted, or after the limit."""
    end = time.monotonic() + LIMIT_SECONDS
    while True:
        found = {"receiver": ray.get(receiver.held.remote(), timeout=LIMIT_SECONDS), "driver": held()}
        pairs = [(f"{at} {what}", count, (wanted or found)[at][what]) for at in found for what, count in found[at].items()]
        over = {what: count for what, count, most in pairs if count > most}
        if not over or time.monotonic() > end:
            return found, over
        time.sleep(0.2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ends", type=int, default=10000)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="ends earlier after this time")
    options = parser.parse_args()
    ways = ["SIGKILL"] * options.kills + ["ray.kill", "terminate"] * ((options.ends - options.kills + 1) // 2)
    ways = ways[: options.ends]
    random.shuffle(ways)
    with tempfile.TemporaryDirectory(prefix="warpipe-ray-") as folder:
        os.environ["WARPIPE_DOMAIN"] = os.path.join(folder, "domain")
        ray.init(include_dashboard=False, logging_level="ERROR", log_to_driver=False, object_store_memory=128 << 20)
        receiver = Actor.remote()
        # As many at once as later, so that what is kept for the next ones is there.
        for _ in range(2):
            batch(receiver, (["SIGKILL", "ray.kill", "terminate"] * options.at_once)[: options.at_once])
        at_first, _ = rest(receiver, None)
        counts, began = collections.Counter(), time.monotonic()
        while ways and time.monotonic() < began + options.seconds:
            now, ways = ways[: options.at_once], ways[options.at_once :]
            batch(receiver, now)
            counts.update(now)
        at_last, over = rest(receiver, at_first)
        domain = warpipe.Domain()
        names = [one for one in domain.endpoints() if not one.alive]
        cleaned = len(domain.clean())
        living = [one.name for one in domain.endpoints()]
        ray.shutdown()
    said = {
        "ends": sum(counts.values()),
        **counts,
        "seconds": round(time.monotonic() - began, 1),
        "at_first": at_first,
        "at_last": at_last,
        "over": over,
        "dead_names": len(names),
        "cleaned": cleaned,
        "living_names": len(living),
    }
    print(json.dumps(said))
    return 1 if over or len(living) > 1 else 0


if __name__ == "__main__":
    sys.exit(main())
