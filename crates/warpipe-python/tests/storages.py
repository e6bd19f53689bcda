"""Storages without a framework, and what other processes do with them. Processes are spawned: everything can be imported."""

import contextlib
import ctypes
import os
import signal
import weakref

import warpipe
from warpipe import _allocations, _messages, _warpipe
from warpipe._allocations import TABLE

NBYTES = 64


class Block:
    """Memory as another library has it. Pickled, it travels as a storage does."""

    def __init__(self, view, opened=None):
        self.view, self.opened = view, opened

    def __reduce__(self):
        return _same, (TABLE.export(Source(self)),)

    def __eq__(self, other):
        return self is other

    def __hash__(self):
        return id(self)

    @property
    def text(self):
        return self.view.tobytes()[:5].decode()

    def write(self, text):
        self.view.write(text.encode())


def plain(device, text="hello"):
    """Memory of the kind that ``cudaMalloc`` gives: another process gets a legacy handle."""
    return _filled(_warpipe._allocate_plain(NBYTES, device), text)


def in_pieces(device, text="hello"):
    """Memory of the virtual memory functions: another process gets descriptors."""
    return _filled(warpipe.Memory.allocate(NBYTES, device=device).view((NBYTES,), "uint8"), text)


def allocator():
    """The C functions that PyTorch's caching allocator is given."""
    library = ctypes.CDLL(_warpipe.__file__)
    library.warpipe_torch_allocate.restype = ctypes.c_void_p
    library.warpipe_torch_allocate.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    library.warpipe_torch_free.restype = None
    library.warpipe_torch_free.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    return library


class Allocated:
    """Memory of that allocator: an address, which another process writes and reads."""

    def __init__(self, device):
        self.device, self.nbytes = device, NBYTES
        self.address = allocator().warpipe_torch_allocate(NBYTES, device.ordinal, None)
        self.__cuda_array_interface__ = {"data": (self.address, False), "shape": (NBYTES,), "typestr": "|u1", "version": 3}


def of_allocator(device, _text=None):
    """Memory as PyTorch gets it in ``warpipe.torch.pool()``."""
    return Block(Allocated(device))


def _filled(view, text):
    block = Block(view)
    block.write(text)
    return block


class Source:
    """A block, for the table."""

    what = "block of 64 bytes"
    warned, orders = [], []

    @property
    def stream(self):
        self.orders.append(_messages.current().order)

    def __init__(self, block):
        self.storage, self.key, self.nbytes = block, id(block), block.view.nbytes
        self.device = block.view.device
        self.address = _address(block.view)
        self.rebuild = rebuild

    def copied(self):
        copy = Block(_allocations.memory_for_copy(self.device, self.nbytes))
        copy.view.write(self.storage.view.tobytes())
        return Source(copy)

    def warn(self, why):
        self.warned.append(why)


def _address(view):
    kind = "__cuda_array_interface__" if view.device.kind == "cuda" else "__array_interface__"
    return getattr(view, kind)["data"][0]


def _same(found):
    return found


def rebuild(fields):
    return TABLE.open(_allocations.Token(*fields), opened)


def opened(memory):
    block = Block(memory, opened=True)
    return _allocations.Opened(block, id(block), weakref.ref(block))


class Stall:
    """Pickled, it keeps its receiver from reading on, once the receiver has said so."""

    def __init__(self, pipe):
        self.pipe = pipe

    def __reduce__(self):
        return _stall, (self.pipe,)


def _stall(pipe):
    pipe.send("stalled")
    with contextlib.suppress(EOFError):
        pipe.recv()
    # The other side has gone without a kill.
    os.kill(os.getpid(), signal.SIGKILL)


class Unpicklable:
    def __reduce__(self):
        raise ValueError("cannot be pickled")


def configure(domain, copy=True):
    """Where the names of this process's storages are. Their processes' are in the messages."""
    TABLE.options = _allocations.Options(copy, os.fspath(domain), 60.0)
    _messages.leave()
    _messages.follow()


# What other processes do.


def send_again(pipe, domain, device):
    """Sends one block, again and again, as long as it is asked to."""
    configure(domain)
    block = plain(warpipe.Device(device))
    # One storage all the time: by itself it would be another one whenever its last share is over.
    _exported = TABLE.export(Source(block))
    pipe.send("ready")
    while pipe.recv():
        pipe.send(block)


def write_into(pipe):
    """Receives blocks; says what is in each, and writes there. Keeps all."""
    held = []
    while _written(pipe, held):
        pass


def _written(pipe, held):
    received = pipe.recv()
    if received == "release":
        held.clear()
        pipe.send("released")
    elif received != "end":
        blocks = received if isinstance(received, tuple) else (received,)
        texts = []
        for block in blocks:
            texts.append(block.text)
            block.write("there")
        held.extend(blocks)
        pipe.send((texts, len(set(held))))
    return received != "end"


class Part(Block):
    """A range of another block's memory, as an allocator hands it out."""

    def __init__(self, whole, offset):
        super().__init__(whole.view.view((NBYTES,), "uint8", offset))


def segment(device, count):
    """One allocation, and parts of it."""
    whole = Block(warpipe.Memory.allocate(count * NBYTES, device=device).view((count * NBYTES,), "uint8"))
    return [Part(whole, number * NBYTES) for number in range(count)]


def say_bytes_held(pipe, device):
    """Receives blocks, keeps them, and says after each what this process holds of the device."""
    held = []
    while (block := pipe.recv()) != "end":
        held.append(block)
        pipe.send((block.text, device.bytes_held))


def read_nothing(pipe):
    """Waits to be killed."""
    signal.pause()


def send_blocks(pipe, domain, device, make):
    """Sends a block, and another one that is never received, and waits to be killed or let go."""
    configure(domain)
    kept = [make(device, "first"), make(device, "other")]
    for block in kept:
        pipe.send(block)
    pipe.recv()


def pass_on(pipe, domain, copy):
    """Sends what it receives back, twice, and says which warnings there were."""
    configure(domain, copy)
    block = pipe.recv()
    for _ in range(2):
        try:
            pipe.send(block)
        except warpipe.Error as error:
            pipe.send((type(error).__name__, str(error)))
    pipe.send(list(Source.warned))
    pipe.recv()


def read_queue(pipe, queue):
    """Takes messages of the queue: as they lie, or as what they are."""
    held = []
    while (word := pipe.recv()) != "end":
        if word == "bytes":
            with queue._rlock:
                held.append(queue._reader.recv_bytes())
            pipe.send("read")
        else:
            held.append(queue.get())
            pipe.send(held[-1].text)


def started_with(pipe, block):
    """Its second argument was received before this is called."""
    pipe.send(block.text)
    pipe.recv()


def end_in_no_message():
    """In a forked child: the start of this process is a message of its parent alone."""
    os._exit(0 if _messages.current() is None else 1)


def send_and_end(pipe, domain, device):
    """Sends blocks in every way, and ends."""
    configure(domain)
    pipe.send(plain(device))
    pipe.send("ends")


class Gone:
    """Pickled, it travels as a storage of a process that is there no more."""

    def __init__(self, domain, device):
        self.fields = tuple(
            _allocations.Token("torch/gone", os.fspath(domain), 1, 1, NBYTES, device.uuid, "block of 64 bytes", 1, "MainProcess")
        )

    def __reduce__(self):
        return rebuild, (self.fields,)


def text_of(block):
    return block.text


def gone_from(domain, uuid):
    return Gone(domain, warpipe.Device(uuid))
