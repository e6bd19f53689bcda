"""NIXL agents, of this process and of others, for the tests."""

import multiprocessing
import os
import time

import numpy
from nixl_cu12._api import nixl_agent, nixl_agent_config


def new_agent(name):
    return nixl_agent(name, nixl_agent_config(backends=["WARPIPE"]))


class Memory:
    """Host memory of an agent: an array of bytes, registered as pieces of equal length."""

    def __init__(self, agent, count, pieces=1, value=0):
        self.agent, self.pieces = agent, pieces
        self.array = numpy.full(count, value, dtype=numpy.uint8)
        whole = [(self.array.ctypes.data, count, 0, "")]
        self.registered = agent.register_memory(whole, "DRAM")

    def tuples(self):
        each = self.array.size // self.pieces
        start = self.array.ctypes.data
        return [(start + at * each, each, 0) for at in range(self.pieces)]

    def descriptors(self):
        return self.agent.get_xfer_descs(self.tuples(), "DRAM")

    def deregister(self):
        self.agent.deregister_memory(self.registered)


def finish(agent, handle, state, limit_s=30):
    """Looks at a transfer until it ends."""
    end = time.monotonic() + limit_s
    while state == "PROC" and time.monotonic() < end:
        state = agent.check_xfer_state(handle)
    return state


def transfer(agent, operation, local, remote_tuples, remote_name, notification=b""):
    remote = agent.get_xfer_descs(remote_tuples, "DRAM")
    handle = agent.initialize_xfer(
        operation, local.descriptors(), remote, remote_name, notification
    )
    state = finish(agent, handle, agent.transfer(handle, notification))
    agent.release_xfer_handle(handle)
    return state


def notifications(agent, count, limit_s=10):
    """Waits for that many notifications: pairs of a sender and a message, in their order."""
    found, end = [], time.monotonic() + limit_s
    while len(found) < count and time.monotonic() < end:
        for sender, messages in agent.get_new_notifs().items():
            found += [(sender, message) for message in messages]
    return found


# Its processes begin with the imports done, in some milliseconds.
_STARTER = multiprocessing.get_context("forkserver")
_STARTER.set_forkserver_preload(["agents"])


class Process:
    """An agent of another process, with registered memory."""

    def __init__(self, name, count=4096, pieces=1, value=0):
        self.name = name
        self._requests, theirs = _STARTER.Pipe()
        arguments = (theirs, os.environ["WARPIPE_DOMAIN"], name, count, pieces, value)
        self.process = _STARTER.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.tuples, self.metadata = self._requests.recv()

    def ask(self, *request):
        self.tell(*request)
        return self._requests.recv()

    def tell(self, *request):
        self._requests.send(request)

    def seen_to_end(self, since):
        """Seconds of time.perf_counter() since then, if the process's pipe has ended."""
        try:
            while self._requests.poll():
                self._requests.recv()
        except (EOFError, ConnectionError):
            return time.perf_counter() - since
        return None

    def end(self):
        self.process.kill()
        self.process.join()
        self._requests.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()


def _serve(requests, domain, name, count, pieces, value):
    os.environ["WARPIPE_DOMAIN"] = domain
    agent = new_agent(name)
    memory = Memory(agent, count, pieces, value)
    requests.send((memory.tuples(), agent.get_agent_metadata()))
    while True:
        what, *rest = requests.recv()
        answer = None
        if what == "values":
            answer = sorted(set(memory.array.tolist()))
        elif what == "fill":
            memory.array[:] = rest[0]
        elif what == "meet":
            agent.add_remote_agent(rest[0])
        elif what == "notify":
            agent.send_notif(*rest)
        elif what == "notifications":
            answer = notifications(agent, *rest)
        elif what == "write for ever":
            while transfer(agent, "WRITE", memory, *rest) == "DONE":
                pass
        elif what == "deregister":
            memory.deregister()
        elif what == "close":
            memory.deregister()
            del memory, agent
        requests.send(answer)
