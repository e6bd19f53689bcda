"""Tensors between processes of the tests of ``warpipe.torch``. Processes are spawned: everything can be imported."""

import os

import torch

import warpipe
from warpipe import _warpipe
from warpipe import torch as carried


def fresh(device, values):
    """A copy of a tensor in memory that is carried as a GPU's is: on the host, memory that a test declares so."""
    if device.kind == "cuda":
        return values.to(f"cuda:{device.ordinal}")
    memory = carried._carry_as_device(_warpipe._allocate_plain(max(values.numel() * values.element_size(), 1), device))
    if values.numel() == 0:
        return memory[:0].view(values.dtype).view(values.shape)
    tensor = memory.view(values.dtype).view(values.shape)
    return tensor.copy_(values)


def place(device):
    return torch.device("cpu" if device.kind == "host" else f"cuda:{device.ordinal}")


def is_carried(tensor):
    """Whether a tensor was received by warpipe."""
    return carried.TABLE.received(carried._key(tensor.untyped_storage())) is not None


# What other processes do. None of them calls install().


def answer(inbox, outbox):
    """Receives, writes into each tensor, and says what each is."""
    while (found := inbox.get()) is not None:
        outbox.put(described(found))
        del found


def described(found):
    if isinstance(found, torch.Tensor) and found.layout is not torch.strided:
        return str(found.layout), tuple(found.shape), found.requires_grad, found.detach().to_dense().cpu().tolist(), [
            is_carried(part) for part in sparse_parts(found.detach())
        ]  # fmt: skip
    if isinstance(found, torch.Tensor):
        bits = found.detach().resolve_conj().resolve_neg().cpu().contiguous()
        return (
            type(found).__name__, str(found.dtype), tuple(found.shape), found.stride(), found.requires_grad, is_carried(found),
            bits.flatten().tolist(),
        )  # fmt: skip
    if isinstance(found, dict):
        return {key: described(one) for key, one in found.items()}
    if isinstance(found, (list, tuple)):
        return [described(one) for one in found]
    return found


def sparse_parts(found):
    if found.layout is torch.sparse_coo:
        return found._indices(), found._values()
    if found.layout is torch.sparse_csr:
        return found.crow_indices(), found.col_indices(), found.values()
    return found.ccol_indices(), found.row_indices(), found.values()


def add_one(pipe):
    """Adds 1 to all elements of what it receives, in place, until it is told to end."""
    held = []
    while _added(pipe, held):
        pass


def _added(pipe, held):
    found = pipe.recv()
    if isinstance(found, str):
        held.clear()
        pipe.send(found)
        return found != "end"
    for tensor in found:
        tensor.add_(1)
        _finish(tensor)
    held.append(found)
    storages = {tensor.untyped_storage()._cdata for one in held for tensor in one}
    pipe.send([tensor.flatten().tolist() for tensor in found] + [len(storages)])
    return True


def _finish(tensor):
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def make(pipe, device):
    """Sends a tensor of its own, and waits to be killed or let go. It has not called install()."""
    tensor = fresh(device, torch.arange(6.0))
    pipe.send(tensor)
    pipe.recv()


def put_made(queue, pipe, device):
    """As ``make``, by a queue."""
    tensor = fresh(device, torch.arange(6.0))
    queue.put(tensor)
    pipe.recv()


def say_options(pipe, _device):
    """Whether and how this process has it installed."""
    pipe.send(tuple(carried.TABLE.options) if carried._usual else None)
    pipe.recv()


def make_in_pool(pipe, device):
    """As ``make``, in memory of warpipe's."""
    pool = carried.pool()
    with torch.cuda.use_mem_pool(pool, device.ordinal):
        tensor = torch.arange(6.0, device=place(device))
    pipe.send(tensor)
    pipe.recv()


def make_and_say(pipe, device, is_pooled):
    """As ``make_in_pool``, or in PyTorch's own memory. Afterwards it says what is in the tensor."""
    if is_pooled:
        pool = carried.pool()
        with torch.cuda.use_mem_pool(pool, device.ordinal):
            tensor = torch.arange(6.0, device=place(device))
    else:
        tensor = torch.arange(6.0, device=place(device))
    pipe.send(tensor)
    pipe.recv()
    pipe.send(tensor.tolist())


def write(pipe):
    """Has the GPU write into what it receives, and says how that ended. After a fault it can use its GPU no more."""
    tensor = pipe.recv()
    try:
        tensor.add_(1)
        _finish(tensor)
        how = "written"
    except RuntimeError as error:
        how = str(error)
    pipe.send(how)
    os._exit(0)


def start_a_child_that_makes(pipe, device):
    """As ``make``, by a child of this process."""
    child = torch.multiprocessing.get_context("spawn").Process(target=make, args=(pipe, device))
    child.start()
    child.join()


def put_late(queue, pipe, device, current):
    """Puts tensors that a stream of its own completes late, while ``current`` is the current GPU."""
    stream = torch.cuda.Stream(device.ordinal)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1)
        for number in range(8):
            tensor = torch.zeros(1 << 20, device=place(device))
            stream.synchronize()
            torch.cuda._sleep(200_000_000)
            tensor.fill_(number)
            with torch.cuda.device(current):
                queue.put(tensor)
            pipe.recv()


def received_argument(pipe, tensors):
    pipe.send(described(tensors))
    pipe.recv()


def twice(tensor):
    """For a pool."""
    assert is_carried(tensor)
    return fresh(warpipe.Device(tensor.device if tensor.is_cuda else "host"), 2 * tensor.cpu())


class Batches(torch.utils.data.Dataset):
    """Samples that a worker process puts on the device."""

    def __init__(self, device, count):
        self.device, self.count = device, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return fresh(self.device, torch.full((4,), float(index)))


def on_device(samples):
    """As a collate function does that runs on the GPU."""
    device = warpipe.Device(samples[0].device if samples[0].is_cuda else "host")
    return fresh(device, torch.stack(samples).cpu())
