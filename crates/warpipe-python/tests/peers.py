"""What other processes of the tests do. They are spawned, so everything here can be imported."""

import contextlib
import multiprocessing
import os
import signal

import numpy as np

import warpipe

LIMIT_SECONDS = 60.0
# How long a child may take to end by itself.
ENDS_SECONDS = 10.0
spawn = multiprocessing.get_context("spawn")


@contextlib.contextmanager
def process(work, *arguments):
    """Another process that does ``work(pipe, *arguments)``; gives it and our end of the pipe. It ends when the pipe is
    closed. It is killed only if it does not: under MPS a kill ends the clients of all other tests, too."""
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=until_the_pipe_closes, args=(work, theirs, *arguments), daemon=True)
    child.start()
    theirs.close()
    try:
        yield child, ours
    finally:
        ours.close()
        child.join(ENDS_SECONDS)
        if child.is_alive():
            child.kill()
        child.join(LIMIT_SECONDS)


def until_the_pipe_closes(work, pipe, *arguments):
    with contextlib.suppress(EOFError, BrokenPipeError):
        work(pipe, *arguments)


def said(pipe):
    """What the other process says next."""
    assert pipe.poll(LIMIT_SECONDS), "the other process is silent"
    return pipe.recv()


def kill(child):
    os.kill(child.pid, signal.SIGKILL)
    child.join(LIMIT_SECONDS)
    assert child.exitcode == -signal.SIGKILL


def publish_some(pipe, domain, device, count):
    """Publishes ``count`` frames of the pattern of their number once somebody listens, and waits to be killed when they
    are complete."""
    publisher = warpipe.Publisher("a", domain=domain, device=device)
    stream = warpipe.Stream(device)
    warpipe._warpipe._preload(stream)
    pipe.send("ready")
    publisher.wait_for_subscribers(1, LIMIT_SECONDS)
    for number in range(count):
        loan = publisher.loan(16, "uint64")
        warpipe._warpipe._slow_fill(loan, stream, number, 0.0)
        loan.send(stream=stream)
    stream.synchronize(LIMIT_SECONDS)
    pipe.send("sent")
    pipe.recv()


def publish_late(pipe, domain, device, delay):
    """Sends a frame with data that is complete only after ``delay`` seconds, and waits to be killed."""
    publisher = warpipe.Publisher("a", domain=domain, device=device)
    stream = warpipe.Stream(device)
    warpipe._warpipe._preload(stream)
    pipe.send("ready")
    publisher.wait_for_subscribers(1, LIMIT_SECONDS)
    loan = publisher.loan((1 << 16,), "uint64")
    warpipe._warpipe._slow_fill(loan, stream, 7, delay)
    loan.send(stream=stream)
    pipe.send("sent")
    pipe.recv()


def receive_and_hold(pipe, domain, device, count):
    """Receives ``count`` frames, keeps them, and waits to be killed."""
    subscriber = warpipe.Subscriber("a", domain=domain, device=device, wait=LIMIT_SECONDS, timeout=LIMIT_SECONDS)
    pipe.send("ready")
    held = [subscriber.receive() for _ in range(count)]
    pipe.send(len(held))
    pipe.recv()


def pass_on(pipe, domain, device, source, target):
    """Sends every frame of ``source``, plus one, to ``target``."""
    publisher = warpipe.Publisher(target, domain=domain, device=device, timeout=LIMIT_SECONDS)
    subscriber = warpipe.Subscriber(source, domain=domain, device=device, wait=LIMIT_SECONDS, timeout=LIMIT_SECONDS)
    publisher.wait_for_subscribers(1, LIMIT_SECONDS)
    pipe.send("ready")
    count = 0
    for frame in subscriber:
        publisher.send(frame.numpy() + 1)
        frame.release()
        count += 1
    publisher.close()
    pipe.send(count)
    pipe.recv()


def add_up(pipe, domain, device, source):
    """Adds up the first elements of all frames of ``source``, and counts them."""
    subscriber = warpipe.Subscriber(source, domain=domain, device=device, wait=LIMIT_SECONDS, timeout=LIMIT_SECONDS)
    pipe.send("ready")
    total = count = 0
    in_order = True
    for frame in subscriber:
        with frame:
            total += int(frame.numpy()[0])
            count += 1
            in_order &= frame.sequence == count
    pipe.send((count, total, in_order))
    pipe.recv()


def hold_bytes(pipe, domain, device):
    """Receives, closes everything, and says what this process still holds of the device."""
    subscriber = warpipe.Subscriber("a", domain=domain, device=device, wait=LIMIT_SECONDS, timeout=LIMIT_SECONDS)
    pipe.send("ready")
    pipe.send(subscriber.receive().numpy().tolist())
    pipe.recv()


def signal_when_told(pipe, domain, device):
    """Keeps a timeline, an event and a semaphore, passes the event's handle on, and does what it is told."""
    timeline = warpipe.Timeline.create("frames", domain=domain, device=device)
    semaphore = warpipe.Semaphore.create("turns", 1, domain=domain, device=device)
    event = warpipe.Event.create(domain=domain, device=device)
    stream = warpipe.Stream(device)
    pipe.send(event.handle())
    permit = semaphore.acquire(stream=stream)
    for word in iter(pipe.recv, "end"):
        if word == "signal":
            timeline.signal(timeline.value + 1, stream=stream)
        if word == "record":
            event.record(stream=stream)
        if word == "release":
            permit.release()
        pipe.send(word)


def release_items(pipe, domain, device, name, count):
    """Consumes items of a ring by its steps, says how the last one's wait ended, and waits to be killed."""
    ring = warpipe.KernelRing.open(name, domain=domain, device=device, wait=LIMIT_SECONDS)
    stream = warpipe.Stream(device)
    pipe.send("ready")
    for _ in range(count):
        ring.wait_on(stream=stream)
        ring.release_on(stream=stream)
    stream.synchronize(LIMIT_SECONDS)
    try:
        ring.check()
        pipe.send("whole")
    except warpipe.PeerGoneError as gone:
        pipe.send(("gone", gone.pid, gone.graceful))
    pipe.recv()


def join_and_wait(pipe, domain, name):
    """Is a member until it is told to leave, or is killed."""
    member = warpipe.Member.join(name, "sampler", domain=domain)
    pipe.send(member.generation)
    pipe.recv()
    member.close()
    pipe.send("left")
    pipe.recv()


def open_memory(pipe, device):
    """Opens whatever comes (tickets, legacy handles, lent blocks), and says what is in it."""
    for named in iter(pipe.recv, None):
        if isinstance(named, warpipe.Ticket) and named.kind == "pool":
            memory = warpipe.LentBuffer.open(named, device=device)
        else:
            memory = named.open(device=device)
        with memory:
            said = memory.view(4, "int32").numpy().tolist()
            if not memory.read_only:
                memory.view(4, "int32").copy_from(np.full(4, -1, np.int32))
                memory.wait()
            else:
                try:
                    memory.write(b"mine")
                except warpipe.ArgumentError:
                    pass
                else:
                    said = "it was written"
        pipe.send((type(memory).__name__, said, memory.read_only))


def receive_in_place(pipe, domain, device):
    """Receives one frame, says what it is and what is in it, and holds it until it is told."""
    subscriber = warpipe.Subscriber("a", domain=domain, device=device, wait=LIMIT_SECONDS, timeout=LIMIT_SECONDS)
    pipe.send("ready")
    frame = subscriber.receive()
    array = frame.numpy()
    pipe.send((frame.in_place, frame.shape, frame.dtype, frame.metadata, array.tolist()))
    pipe.recv()
    pipe.send(array.tolist())
    del array
    frame.release()
    pipe.send("released")
    pipe.recv()


def keep_everything(pipe, domain, device):
    """Keeps one of each that others open, says what names those without a name, and waits to be killed."""
    on = {"domain": domain, "device": device}
    pool = warpipe.Pool.create("pool", **on)
    block, memory = pool.allocate(64), warpipe.Memory.allocate(64, device=device)
    kept = [warpipe.Publisher("publisher", **on), warpipe.Queue("queue", **on), warpipe.Timeline.create("timeline", **on),
            warpipe.Semaphore.create("semaphore", **on), warpipe.Member.join("m", domain=domain)]
    published, event = memory.publish("memory", domain=domain), warpipe.Event.create(**on)
    pipe.send((str(event.handle()), str(published.ticket()), str(block.lend())))
    pipe.recv()
    del kept


def subscribe_until_full(pipe, domain, device):
    """Subscribes until the publisher takes no more, and says how often that went well, and what it was told."""
    held = []
    try:
        while len(held) < 100:
            held.append(warpipe.Subscriber("a", domain=domain, device=device, wait=LIMIT_SECONDS))
        pipe.send((len(held), None))
    except warpipe.Error as error:
        pipe.send((len(held), type(error).__name__))
    pipe.recv()


def keep_weights(pipe, domain, name):
    """Keeps the weights of a name until the pipe says a word, and says which version it offers."""
    with warpipe.weights.keep(name, domain=domain) as keeper:
        pipe.send("ready")
        while pipe.recv() != "end":
            pipe.send((keeper.version, keeper.candidate))


def hold_weights(pipe, domain, device, name):
    """Opens weights, and says what is in them; for each word once more."""
    shared = warpipe.weights.open(name, domain=domain, device=device, wait=LIMIT_SECONDS)
    while True:
        pipe.send((shared.version, {key: shared[key].numpy().tolist() for key in shared}))
        if pipe.recv() == "newer":
            shared = shared.newer(LIMIT_SECONDS)


def publish_weights(pipe, domain, device, name, tensors):
    """Publishes weights, and waits to be killed."""
    published = warpipe.weights.publish(name, tensors, domain=domain, device=device, wait=LIMIT_SECONDS)
    pipe.send(published.version)
    pipe.recv()


def publish_weights_in_place(pipe, domain, device, name, tensors):
    """Publishes weights where they lie, and waits to be killed."""
    placed = {key: in_memory(warpipe.Device(device), value) for key, value in tensors.items()}
    options = {"domain": domain, "device": device, "wait": LIMIT_SECONDS}
    published = warpipe.weights.publish(name, placed, **options, zero_copy="require")
    pipe.send((published.version, published.copied))
    pipe.recv()


def in_memory(device, values):
    """The values in exportable memory of their own."""
    view = warpipe.Memory.allocate(values.nbytes, device=device).view(values.shape, values.dtype)
    view.copy_from(values)
    return view
