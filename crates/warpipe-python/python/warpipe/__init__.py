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

Everything that holds memory (``Sample``, ``SampleMut``) speaks DLPack and the array interfaces, so any framework can use it;
``Publisher.send`` takes any object that does. Errors are subclasses of ``warpipe.Error`` and say the next step. Objects
belong to the process that made them: use ``multiprocessing`` with ``spawn``; after a ``fork`` they raise ``ForkedError``.
"""

from __future__ import annotations

from ._errors import (
    AccessDeniedError,
    ArgumentError,
    ClosedError,
    ConnectionError,
    DescriptorLimitError,
    DeviceError,
    DeviceMemoryError,
    DevicePermissionError,
    DomainError,
    DriverError,
    DriverSymbolError,
    DTypeError,
    Error,
    EvictedError,
    ExportError,
    ForeignFileError,
    ForkedError,
    FullError,
    HandshakeError,
    InjectedError,
    InvalidNameError,
    LayoutError,
    LinkClosedError,
    MemoryLimitError,
    MetadataError,
    NameTakenError,
    NoDeviceError,
    NoDriverError,
    NoPublisherError,
    NoSuchDeviceError,
    NotATensorError,
    NotDeviceMemoryError,
    PeerAccessError,
    ProtocolError,
    PublisherGoneError,
    ReleasedError,
    SampleLostError,
    SystemCallError,
    TimeoutError,
    WrongDeviceError,
)
from ._subscriber import Subscriber
from ._warpipe import (
    DTYPES,
    Device,
    Discontinuity,
    Domain,
    Publisher,
    Sample,
    SampleMut,
    Stream,
    SubscriberInfo,
    __version__,
)

__all__ = [
    "AccessDeniedError",
    "ArgumentError",
    "ClosedError",
    "ConnectionError",
    "DTYPES",
    "DTypeError",
    "DescriptorLimitError",
    "Device",
    "DeviceError",
    "DeviceMemoryError",
    "DevicePermissionError",
    "Discontinuity",
    "Domain",
    "DomainError",
    "DriverError",
    "DriverSymbolError",
    "Error",
    "EvictedError",
    "ExportError",
    "ForeignFileError",
    "ForkedError",
    "FullError",
    "HandshakeError",
    "InjectedError",
    "InvalidNameError",
    "LayoutError",
    "LinkClosedError",
    "MemoryLimitError",
    "MetadataError",
    "NameTakenError",
    "NoDeviceError",
    "NoDriverError",
    "NoPublisherError",
    "NoSuchDeviceError",
    "NotATensorError",
    "NotDeviceMemoryError",
    "PeerAccessError",
    "ProtocolError",
    "Publisher",
    "PublisherGoneError",
    "ReleasedError",
    "Sample",
    "SampleLostError",
    "SampleMut",
    "Stream",
    "Subscriber",
    "SubscriberInfo",
    "SystemCallError",
    "TimeoutError",
    "WrongDeviceError",
    "__version__",
]
