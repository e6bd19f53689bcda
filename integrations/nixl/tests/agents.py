"""NIXL agents, of this process and of others, for the tests."""

import ctypes
import multiprocessing
import os
import signal
import time

import numpy
from cuda import Cuda
from package import nixl_agent, nixl_agent_config

# Bytes: three parts of a transfer.
MANY = 12 << 20


def new_agent(name, backend="WARPIPE"):
    return nixl_agent(name, nixl_agent_config(backends=[backend]))


class Memory:
    """Registered memory of an agent: bytes in pieces of equal length, of the host or of a GPU."""

    def __init__(self, agent, count, pieces=1, value=0, gpu=None, allocations=0):
        """On a GPU of cudaMalloc, or in so many allocations of the virtual memory functions."""
        self.agent, self.count, self.pieces = agent, count, pieces
        self.gpu, self.kind, self.device = gpu, *(("DRAM", 0) if gpu is None else ("VRAM", gpu))
        if gpu is None:
            self.array = numpy.empty(count, dtype=numpy.uint8)
            self.address = self.array.ctypes.data
        else:
            self.cuda = Cuda(gpu)
            if allocations:
                self.address = self.cuda.allocate_mapped(gpu, count, allocations)
            else:
                self.address = self.cuda.allocate(count)
        self.fill(value)
        self.register()

    def fill(self, value):
        self.write(numpy.full(self.count, value, dtype=numpy.uint8))

    def write(self, array):
        if self.kind == "DRAM":
            self.array[:] = array
        else:
            self.cuda.write(self.address, array)

    def read(self):
        return self.array if self.kind == "DRAM" else self.cuda.read(self.address, self.count)

    def values(self):
        return numpy.unique(self.read()).tolist()

    def tuples(self):
        each = self.count // self.pieces
        return [(self.address + at * each, each, self.device) for at in range(self.pieces)]

    def descriptors(self):
        return self.agent.get_xfer_descs(self.tuples(), self.kind)

    def register(self):
        whole = [(self.address, self.count, self.device, "")]
        self.registered = self.agent.register_memory(whole, self.kind)

    def deregister(self):
        self.agent.deregister_memory(self.registered)


def finish(agent, handle, state, limit_s=30):
    """Looks at a transfer until it ends."""
    end = time.monotonic() + limit_s
    while state == "PROC" and time.monotonic() < end:
        state = agent.check_xfer_state(handle)
    return state


def transfer(agent, operation, local, remote_tuples, remote_name, notification=b"", kind="DRAM"):
    remote = agent.get_xfer_descs(remote_tuples, kind)
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

    def __init__(self, name, count=4096, pieces=1, value=0, gpu=None, alone=False, backend="WARPIPE", allocations=0):
        """`alone` in a PID namespace of its own; PermissionError if this user makes none."""
        self.name = name
        self._requests, theirs = _STARTER.Pipe()
        memory = (count, pieces, value, gpu, allocations)
        arguments = (theirs, os.environ["WARPIPE_DOMAIN"], name, memory, alone, backend)
        self.process = _STARTER.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        begun = self._requests.recv()
        if isinstance(begun, Exception):
            raise begun
        self.tuples, self.metadata = begun

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


def _enter_pid_namespace():
    """Goes on in a child, which is killed with this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x20000000) != 0:  # CLONE_NEWPID
        raise PermissionError("no PID namespace for this user")
    child = os.fork()
    if child != 0:
        os.waitpid(child, 0)
        os._exit(0)
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _serve(requests, domain, name, memory, alone, backend):
    os.environ["WARPIPE_DOMAIN"] = domain
    if alone:
        try:
            _enter_pid_namespace()
        except PermissionError as error:
            requests.send(error)
            return
    agent = new_agent(name, backend)
    memory = Memory(agent, *memory)
    requests.send((memory.tuples(), agent.get_agent_metadata()))
    while True:
        what, *rest = requests.recv()
        answer = None
        if what == "values":
            answer = memory.values()
        elif what == "fill":
            memory.fill(rest[0])
        elif what == "meet":
            agent.add_remote_agent(rest[0])
        elif what == "notify":
            agent.send_notif(*rest)
        elif what == "notifications":
            answer = notifications(agent, *rest)
        elif what == "write for ever":
            while transfer(agent, "WRITE", memory, *rest) == "DONE":
                pass
        elif what == "metadata":
            answer = agent.get_agent_metadata()
        elif what == "register anew":
            memory.deregister()
            memory.register()
        elif what == "deregister":
            memory.deregister()
        elif what == "close":
            memory.deregister()
            del memory, agent
        requests.send(answer)
