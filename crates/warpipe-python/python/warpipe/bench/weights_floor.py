"""What bare calls of the driver take for the same bytes: a copy from page-locked memory, an import and its mapping."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

ROUNDS = 5


def pinned_copy(count: int, device: str) -> float:
    """Milliseconds of one copy of ``count`` bytes to the device, in parts of 1 GiB: the median, as of our own loads."""
    import torch

    part = min(count, 1 << 30)
    host = torch.empty(part, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(count, dtype=torch.uint8, device=device)
    took = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize(device)
        start = time.monotonic_ns()
        for at in range(0, count, part):
            size = min(part, count - at)
            target[at : at + size].copy_(host[:size], non_blocking=True)
        torch.cuda.synchronize(device)
        took.append((time.monotonic_ns() - start) / 1e6)
    del host, target
    torch.cuda.empty_cache()
    return statistics.median(took)


def bare_import(count: int) -> dict[str, float]:
    """Milliseconds until ``count`` bytes of another process are mapped, by the driver's calls alone: the first time in a
    process, and the median of the next ones."""
    try:
        import cuda.bindings.driver  # noqa: F401
    except ImportError:
        return {}
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(target=_owner, args=(theirs, count), daemon=True)
    owner.start()
    theirs.close()
    result, sink = context.Pipe(duplex=False)
    importer = context.Process(target=_importer, args=(ours, sink, count), daemon=True)
    importer.start()
    ours.close()
    sink.close()
    took = result.recv()
    importer.join()
    owner.join()
    return {"first_import_map_ms": took[0], "import_map_ms": statistics.median(took[1:])}


def _ok(answer: tuple[Any, ...]) -> Any:
    error, *rest = answer
    if int(error):
        raise RuntimeError(f"the driver said {error}")
    return rest[0] if rest else None


def _context() -> Any:
    from cuda.bindings import driver

    _ok(driver.cuInit(0))
    device = _ok(driver.cuDeviceGet(0))
    _ok(driver.cuCtxSetCurrent(_ok(driver.cuDevicePrimaryCtxRetain(device))))
    return driver


def _properties(driver: Any) -> Any:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 0
    properties.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return properties


def _rounded(count: int) -> int:
    return -(-count // (2 << 20)) * (2 << 20)


def _owner(pipe: Connection, count: int) -> None:
    driver = _context()
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    handle = _ok(driver.cuMemCreate(_rounded(count), _properties(driver), 0))
    fd = int(_ok(driver.cuMemExportToShareableHandle(handle, kind, 0)))
    reduction.send_handle(pipe, fd, pipe.recv())
    pipe.recv()
    os.close(fd)


def _importer(pipe: Connection, sink: Connection, count: int) -> None:
    driver = _context()
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    pipe.send(os.getpid())
    fd, size = reduction.recv_handle(pipe), _rounded(count)
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = 0
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    took = []
    for _ in range(ROUNDS + 1):
        start = time.monotonic_ns()
        handle = _ok(driver.cuMemImportFromShareableHandle(fd, kind))
        base = _ok(driver.cuMemAddressReserve(size, 0, 0, 0))
        _ok(driver.cuMemMap(base, size, 0, handle, 0))
        _ok(driver.cuMemSetAccess(base, size, [access], 1))
        took.append((time.monotonic_ns() - start) / 1e6)
        _ok(driver.cuMemUnmap(base, size))
        _ok(driver.cuMemAddressFree(base, size))
        _ok(driver.cuMemRelease(handle))
    pipe.send("done")
    sink.send(took)
