"""Workers and servers of the tests, each in a process of its own."""

import contextlib
import os
import signal

import numpy as np
from peers import LIMIT_SECONDS

import warpipe


def double(pipe, domain, device, name="jobs"):
    """Doubles every job's input, in place of an output, until the queue closes gracefully. Says how many it did."""
    done = 0
    with warpipe.Worker(name, domain=domain, device=device, wait=LIMIT_SECONDS, timeout=LIMIT_SECONDS) as worker:
        pipe.send("ready")
        for lease in worker:
            with lease, lease.output(lease.shape, lease.dtype, metadata={"by": os.getpid()}) as out:
                out.copy_from(lease.numpy() * 2)
            done += 1
    pipe.send(done)
    pipe.recv()


def take_one_and_hang(pipe, domain, device):
    """Leases a job, says which, and waits to be killed."""
    worker = warpipe.Worker("jobs", domain=domain, device=device, wait=LIMIT_SECONDS, timeout=LIMIT_SECONDS)
    pipe.send("ready")
    lease = worker.lease()
    pipe.send((lease.job, lease.attempt))
    pipe.recv()


def complete_one_and_hang(pipe, domain, device):
    """Completes a job, says so once its data is on its way, and waits to be killed."""
    worker = warpipe.Worker("jobs", domain=domain, device=device, wait=LIMIT_SECONDS, timeout=LIMIT_SECONDS)
    pipe.send("ready")
    worker.lease().complete(np.arange(4))
    pipe.send("completed")
    pipe.recv()


def own_a_queue(pipe, domain, device, jobs):
    """Submits ``jobs`` jobs, says so, and waits to be killed, or told to close."""
    queue = warpipe.Queue("jobs", domain=domain, device=device, prefetch=jobs)
    pipe.send("ready")
    handles = [queue.submit(np.full(4, number)) for number in range(jobs)]
    pipe.send(len(handles))
    pipe.recv()
    queue.close()
    pipe.send("closed")
    pipe.recv()


def serve(pipe, domain, device, factor):
    """Answers every request with ``factor`` times its array, until it is told to stop."""
    stop = False

    def end(_number, _frame):
        nonlocal stop
        stop = True

    signal.signal(signal.SIGTERM, end)
    with warpipe.Server("embed", domain=domain, device=device) as server:
        pipe.send("ready")
        while not stop:
            with contextlib.suppress(warpipe.TimeoutError):
                with server.accept(timeout=0.1) as request:
                    if request.metadata.get("refuse"):
                        request.reject("not this one")
                    else:
                        request.complete(request.numpy() * factor, metadata={"pid": os.getpid()})


def accept_and_hang(pipe, domain, device):
    """Accepts a request, reports its client, and waits to be killed."""
    server = warpipe.Server("embed", domain=domain, device=device)
    pipe.send("ready")
    request = server.accept(LIMIT_SECONDS)
    pipe.send((request.queue_pid, request.attempt))
    pipe.recv()
