"""Trainers, keepers and engines are killed at any time: an engine has all of a version, or none of it."""

import contextlib
import random

from conftest import until
from peers import kill, process
from test_processes import kills, place  # noqa: F401
from weights_storm import follow, keep, train

NAME = "llama"
KILLS = 12


@kills
def test_no_version_is_torn_when_trainers_keepers_and_engines_are_killed_at_any_time(place):
    work = {
        "keeper": (keep,), "trainer": (train, 1), "other trainer": (train, 2), "engine": (follow,), "other engine": (follow,),
    }  # fmt: skip
    chance, seeds = random.Random(11), 2
    seen = {"engine": 0, "other engine": 0}
    with contextlib.ExitStack() as stack:
        running = {}

        def start(role):
            task, *more = work[role]
            running[role] = stack.enter_context(process(task, *place, NAME, *more))

        def hears():
            """Whether each engine has had another version since the last kill."""
            for role in seen:
                pipe = running[role][1]
                while pipe.poll(0):
                    version, wrong = pipe.recv()
                    assert not wrong, f"version {version} is torn: {wrong}"
                    seen[role] += 1
            return all(seen.values())

        for role in work:
            start(role)
        for _ in range(KILLS):
            until(hears, "a version at each engine")
            role = chance.choice(list(work))
            kill(running[role][0])
            running[role][1].close()
            if role.endswith("trainer"):
                seeds += 1
                work[role] = (train, seeds)
            start(role)
            seen.update(dict.fromkeys(seen, 0))
        until(hears, "a version at each engine behind the last kill")
