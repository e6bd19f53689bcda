"""GPU memory and streams of tensors, handed between processes without a copy, surviving the death of any of them.

One process publishes tensors that lie in its GPU's memory; others on the same machine receive them where they lie.
Streams wait for each other on the device; no CPU waits for a GPU on the way, and no byte of a tensor is copied. Without a
GPU the same programs run on memory that is shared through memfds.

>>> import warpipe
>>> publisher = warpipe.Publisher("camera/front")            # doctest: +SKIP
>>> with publisher.loan((720, 1280, 3), "uint8") as out:     # doctest: +SKIP
...     out[:] = 0
>>> for frame in warpipe.Subscriber("camera/front"):         # doctest: +SKIP
...     print(frame.torch().float().mean())

Units of work go through a ``Queue``, which gets each job done once by one of any number of ``Worker`` processes; a
``Client`` asks a service, and a ``Server`` answers.

Beside them there are memory that others open by a ticket (``Memory``, ``Ticket``, ``SharedMemory``), pools of it
(``Pool``, ``PoolClient``), the order of streams of several processes (``Timeline``, ``Event``, ``Semaphore``), rings of kernels (``KernelRing``), handles of
other allocators' memory (``LegacyHandle``), and the members of a domain (``Member``, ``Members``). Model weights that
outlive their processes are in ``warpipe.weights``. ``warpipe.torch.install()`` has ``torch.multiprocessing`` carry GPU
tensors by this package. ``warpipe.workers`` keeps warmed-up processes ready to take over from one that died.

Everything that holds memory (``Sample``, ``SampleMut``, ``Lease``, ``JobResult``, ``View``, ...) speaks DLPack and the array
interfaces, so any framework can use it; ``Publisher.send`` and ``View.copy_from`` take any object that does. Tickets and
handles can be pickled. Errors are subclasses of ``warpipe.Error`` and say the next step. Objects belong to the process
that made them: use ``multiprocessing`` with ``spawn``; after a ``fork`` they raise ``ForkedError``.
"""

from __future__ import annotations

import os as _os
from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any as _Any

from ._errors import (
    AccessDeniedError,
    ArgumentError,
    CapturingError,
    ClosedError,
    ConnectionError as ConnectionError,
    CopyWarning,
    DTypeError,
    DeadLetteredError,
    DeadlinePassedError,
    DeviceError,
    DeviceMemoryError,
    DevicePermissionError,
    DomainError,
    DriverError,
    Error,
    EventLimitError,
    EventLostError,
    EventNotRecordedError,
    ExportError,
    ForeignFileError,
    ForkedError,
    FullError,
    HandleError,
    HandshakeError,
    InvalidNameError,
    JobError,
    LayoutError,
    LinkClosedError,
    MemoryLimitError,
    MetadataError,
    NameTakenError,
    NoSuchDeviceError,
    NoSuchJobError,
    NotATensorError,
    NotExportableError,
    NotFoundError,
    OtherKindError,
    PeerGoneError,
    ProtocolError,
    QueueClosedError,
    QueueFullError,
    QuotaExceededError,
    RefusedError,
    RejectedError,
    ReleasedError,
    SampleLostError,
    SystemCallError,
    TicketExpiredError,
    TimeoutError as TimeoutError,
    WeightsDamagedError,
    WeightsFileError,
    WeightsMismatchError,
    WeightsUnhashedError,
    WrongDeviceError,
)
from . import _arrays as _arrays, _exit as _exit, _futures as _futures, _members as _members, _objects as _objects
from ._dtypes import DTYPES
from ._queue import Client, Queue, Server, Worker
from ._receivers import Subscriber
from ._tuples import (
    Change,
    Discontinuity,
    EndpointInfo,
    MemberInfo,
    MemoryInfo,
    MemoryUse,
    PoolStats,
    PoolUsage,
    PreviousPublisher,
    QueueState,
    Quota,
    SubscriberInfo,
)
from ._warpipe import (
    Buffer,
    Closeable,
    Device,
    Domain,
    Event,
    EventHandle,
    JobHandle,
    JobResult,
    KernelRing,
    Lease,
    LegacyHandle,
    LegacyMemory,
    LentBuffer,
    Loan,
    Member,
    Members,
    Memory,
    Output,
    Part,
    Pending,
    Permit,
    Pool,
    PoolClient,
    Published,
    Publisher,
    Recording,
    Results,
    Sample,
    SampleMut,
    SampleParts,
    Semaphore,
    SharedMemory,
    Stream,
    Ticket,
    Timeline,
    View,
    __version__,
)
from . import weights as weights

if TYPE_CHECKING:
    from . import torch as torch, transformers as transformers, workers as workers


def include_dir() -> str:
    """The folder of ``warpipe/device.cuh``, for the include path of nvcc or NVRTC."""
    return _os.path.join(_os.path.dirname(__file__), "include")


def __getattr__(name: str) -> _Any:
    # What other programs need not import: ``multiprocessing``, and adapters for one package each.
    if name in ("torch", "transformers", "workers"):
        return _import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Without ``TimeoutError``, ``ConnectionError`` and ``torch``: a star must not replace those of others.
__all__ = [
    "AccessDeniedError",
    "ArgumentError",
    "Buffer",
    "CapturingError",
    "Change",
    "Client",
    "Closeable",
    "ClosedError",
    "CopyWarning",
    "DTYPES",
    "DTypeError",
    "DeadLetteredError",
    "DeadlinePassedError",
    "Device",
    "DeviceError",
    "DeviceMemoryError",
    "DevicePermissionError",
    "Discontinuity",
    "Domain",
    "DomainError",
    "DriverError",
    "EndpointInfo",
    "Error",
    "Event",
    "EventHandle",
    "EventLimitError",
    "EventLostError",
    "EventNotRecordedError",
    "ExportError",
    "ForeignFileError",
    "ForkedError",
    "FullError",
    "HandleError",
    "HandshakeError",
    "InvalidNameError",
    "JobError",
    "JobHandle",
    "JobResult",
    "KernelRing",
    "LayoutError",
    "Lease",
    "LegacyHandle",
    "LegacyMemory",
    "LentBuffer",
    "LinkClosedError",
    "Loan",
    "Member",
    "MemberInfo",
    "Members",
    "Memory",
    "MemoryInfo",
    "MemoryLimitError",
    "MemoryUse",
    "MetadataError",
    "NameTakenError",
    "NoSuchDeviceError",
    "NoSuchJobError",
    "NotATensorError",
    "NotExportableError",
    "NotFoundError",
    "OtherKindError",
    "Output",
    "Part",
    "PeerGoneError",
    "Pending",
    "Permit",
    "Pool",
    "PoolClient",
    "PoolStats",
    "PoolUsage",
    "ProtocolError",
    "PreviousPublisher",
    "Published",
    "Publisher",
    "Queue",
    "QueueClosedError",
    "QueueFullError",
    "Quota",
    "QuotaExceededError",
    "QueueState",
    "Recording",
    "RefusedError",
    "RejectedError",
    "ReleasedError",
    "Results",
    "Sample",
    "SampleLostError",
    "SampleMut",
    "SampleParts",
    "Semaphore",
    "Server",
    "SharedMemory",
    "Stream",
    "Subscriber",
    "SubscriberInfo",
    "SystemCallError",
    "Ticket",
    "TicketExpiredError",
    "Timeline",
    "View",
    "WeightsDamagedError",
    "WeightsFileError",
    "WeightsMismatchError",
    "WeightsUnhashedError",
    "Worker",
    "WrongDeviceError",
    "__version__",
    "include_dir",
    "weights",
]
