"""Kills agents of other processes in the middle of their work, and looks what the survivor is told.

    python kills.py --kills 1000 --seconds 3000 [--gpu 0]

In each round a new agent takes the same name. In turn it is the target of a read, the target of a
write, and the initiator of writes to the survivor. The survivor is one process: it ends with 0 if
each round ended as it must. All have memory of the host, or of that GPU. Prints a line of JSON
with the times from the signal to NIXL_ERR_REMOTE_DISCONNECT, and to the end of a plain pipe: before
that the kernel takes the dead process apart. Prints it also when it is interrupted, terminated or
fails, of the rounds until then."""

import argparse
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time

from agents import Memory, Process, new_agent, notifications
from package import nixlRemoteDisconnectError

BYTES = 64 << 20
# The rounds until then leave what is kept for the next ones, such as threads.
FIRST_ROUNDS = 6
SAID_SECONDS = 30
LIMIT_S = 60


def until_told(victim, ask):
    """Kills an agent, and asks until the answer is that it is gone. The seconds until then, and
    until a plain pipe of its process says so; nothing, if there was no more to ask about."""
    victim.process.kill()
    began, pipe = time.perf_counter(), None
    while time.perf_counter() < began + LIMIT_S:
        try:
            if ask() == "DONE":
                return None  # it was complete before the kill
        except nixlRemoteDisconnectError:
            told = time.perf_counter() - began
            while pipe is None:
                pipe = victim.seen_to_end(began)
            return told, pipe
        pipe = pipe or victim.seen_to_end(began)
    raise AssertionError(f"{LIMIT_S} s after the kill nobody says that the agent is gone")


def killed_target(agent, memory, operation, delay_s):
    with Process("victim", BYTES, gpu=memory.gpu) as victim:
        name = agent.add_remote_agent(victim.metadata)
        remote = agent.get_xfer_descs(victim.tuples, memory.kind)
        handle = agent.initialize_xfer(operation, memory.descriptors(), remote, name)
        state = agent.transfer(handle)
        end = time.perf_counter() + delay_s
        while state == "PROC" and time.perf_counter() < end:
            state = agent.check_xfer_state(handle)
        told = until_told(victim, lambda: agent.check_xfer_state(handle))
        agent.release_xfer_handle(handle)
        agent.remove_remote_agent(name)
        return told


def killed_initiator(agent, memory, delay_s):
    with Process("victim", BYTES, gpu=memory.gpu) as victim:
        name = agent.add_remote_agent(victim.metadata)
        victim.ask("meet", agent.get_agent_metadata())
        victim.tell("write for ever", memory.tuples(), "survivor", b"written", memory.kind)
        assert notifications(agent, 1, LIMIT_S), "nothing was written"
        time.sleep(delay_s)
        told = until_told(victim, lambda: agent.send_notif(name, b"?"))
        agent.remove_remote_agent(name)
        agent.get_new_notifs()
        return told


def quantiles(seconds):
    ms = sorted(1000 * each for each in seconds)
    return {
        name: round(ms[int(share * (len(ms) - 1))], 3) if ms else None
        for name, share in (("median", 0.5), ("p99", 0.99), ("max", 1))
    }


def held():
    """What the survivor has open, and runs."""
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begins no round later")
    parser.add_argument("--gpu", type=int)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    os.environ.setdefault("WARPIPE_DOMAIN", tempfile.mkdtemp(prefix="nixl-kills-"))
    random.seed(arguments.seed)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    agent = new_agent("survivor")
    memory = Memory(agent, BYTES, value=1, gpu=arguments.gpu)
    told, report = [], {"wanted": arguments.kills, "gpu": arguments.gpu}
    began = said = time.monotonic()
    try:
        for kill in range(arguments.kills):
            if time.monotonic() > began + arguments.seconds:
                break
            delay_s = random.random() * 0.02
            if kill % 3 == 2:
                told.append(killed_initiator(agent, memory, delay_s))
            else:
                told.append(killed_target(agent, memory, ("READ", "WRITE")[kill % 3], delay_s))
            if kill + 1 == FIRST_ROUNDS:
                report["at_first"] = held()
            if time.monotonic() > said + SAID_SECONDS:
                said = time.monotonic()
                print(f"{len(told)} kills in {said - began:.0f} s", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        report["interrupted"] = True
    except Exception as error:
        report["failed"] = f"round {len(told)}: {type(error).__name__}: {error}"
    times = [pair for pair in told if pair is not None]
    report |= {
        "kills": len(told),
        "seconds": round(time.monotonic() - began, 1),
        "complete_before_the_kill": told.count(None),
        "told_ms": quantiles(told for told, _ in times),
        "pipe_ended_ms": quantiles(pipe for _, pipe in times),
        "told_after_the_pipe_ms": quantiles(told - pipe for told, pipe in times),
        "at_last": held(),
    }
    print(json.dumps(report))
    return 1 if "failed" in report else 0


if __name__ == "__main__":
    sys.exit(main())
