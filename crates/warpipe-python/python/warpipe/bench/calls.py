"""What each call of a hand-over takes of the CPU, in one process: where a round trip's share of Python goes."""

from __future__ import annotations

import operator
import statistics
import time
from typing import Any

import warpipe

from .arrays import DIRECT, HEAD, AddOne, Arrays, Missing, arrays_of
from .ours import SPIN_SECONDS

WARM_UP = 50
LIMIT_SECONDS = 30.0

# In the order in which they are made, the kernels in between. `dlpack` is an export alone; its
# capsule is dropped unused.
BEFORE = ("loan", "array of the loan")
BEHIND = ("send", "receive", "dlpack", "array of the sample", "release")


def measure(device: str, domain: str, times: int) -> dict[str, Any]:
    """The median of each call in microseconds, the clock's own share among them; or why there is none."""
    kind = warpipe.Device(device).kind
    try:
        arrays = arrays_of(device)
        kernels = [arrays.adder(HEAD, kernel) for kernel in arrays.kernels]
        with warpipe.Publisher("bench/calls", domain=domain, device=device, timeout=LIMIT_SECONDS) as publisher:
            with warpipe.Subscriber(
                "bench/calls", domain=domain, device=device, spin=SPIN_SECONDS[kind], timeout=LIMIT_SECONDS
            ) as subscriber:
                publisher.wait_for_subscribers(1, LIMIT_SECONDS)
                taken = [_once(publisher, subscriber, arrays, kernels, kind) for _ in range(WARM_UP + times)]
    except Missing as missing:
        return {"status": "skipped", "reason": str(missing), "us": {}}
    except warpipe.Error as error:
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}", "us": {}}
    columns = zip(*taken[WARM_UP:])
    launches = ("kernel" if kernel == DIRECT else kernel for kernel in arrays.kernels)
    return {
        "status": "measured",
        "reason": "",
        "us": {call: statistics.median(column) / 1e3 for call, column in zip((*BEFORE, *launches, *BEHIND), columns)},
    }


def _once(
    publisher: warpipe.Publisher, subscriber: warpipe.Subscriber, arrays: Arrays, kernels: list[AddOne], kind: str
) -> list[int]:
    """Nanoseconds of each call of one hand-over. Nothing of the device is waited for in between."""
    clock = time.perf_counter_ns
    options: dict[str, Any] = {"max_version": (1, 0), **({"stream": 1} if kind == "cuda" else {})}
    array_of, source = operator.methodcaller(arrays.method), arrays.zeros(HEAD)
    marks = [clock()]
    loan = publisher.loan((HEAD,), "float32")
    marks.append(clock())
    target = array_of(loan)
    marks.append(clock())
    for add_one in kernels:
        add_one(source, target)
        marks.append(clock())
    loan.send()
    marks.append(clock())
    sample = subscriber.receive()
    marks.append(clock())
    capsule = sample.__dlpack__(**options)
    marks.append(clock())
    theirs = array_of(sample)
    marks.append(clock())
    del sample, capsule, theirs
    marks.append(clock())
    arrays.synchronize()
    return [after - before for before, after in zip(marks, marks[1:])]


def line(found: dict[str, Any]) -> str:
    """For people."""
    if found["status"] != "measured":
        return f"CPU of each call: {found['status']}: {found['reason']}"
    return "CPU of each call, us: " + ", ".join(f"{call} {us:.2f}" for call, us in found["us"].items())
