"""``WARPIPE``: a tensor transport of Ray between the actors of one node.

>>> import warpipe_ray
>>> warpipe_ray.register()                                             # doctest: +SKIP
>>> @ray.remote                                                        # doctest: +SKIP
... class Producer:
...     @ray.method(tensor_transport="WARPIPE")
...     def batch(self):
...         return torch.ones(1 << 20)

A tensor that a method returns is copied once, into memory that other processes map, and is not copied again: each actor
that is given the reference has that memory, for reading, and keeps it when the process that made it dies. What ``empty``
has made lies in such memory from the start.
"""

from __future__ import annotations

import importlib
from typing import Any

from ray.experimental import register_tensor_transport
from ray.experimental.rdt.util import transport_manager_info

from ._arrays import library_of_type
from ._errors import ReceiveAbortedError, SourceGoneError
from ._source import LIMIT_VARIABLE, empty
from ._transport import Transport, WritableTransport

__all__ = ["LIMIT_VARIABLE", "ReceiveAbortedError", "SourceGoneError", "Transport", "WritableTransport", "empty", "register"]


def register(data_type: type | None = None, *, name: str = "WARPIPE", writable: bool = False) -> None:
    """Makes the transport known to Ray, in this process and in the actors that it creates afterwards. Call it before the
    classes of these actors are defined. Once more it does nothing.

    ``data_type`` is ``torch.Tensor``, which it is by default, or ``numpy.ndarray``; Ray has one for each ``name``. With
    ``writable`` the tensors that actors receive may be written: all of them, and those in the source, are one memory.
    Otherwise a write to a received tensor of PyTorch ends the process.

    Raises ``ArgumentError``, ``ImportError`` without PyTorch, and ``ValueError`` where Ray has another transport of the name.
    """
    if data_type is None:
        data_type = importlib.import_module("torch").Tensor
    devices = list(library_of_type(data_type).devices)
    transport: Any = WritableTransport if writable else Transport
    known = transport_manager_info.get(name.upper())
    if known is None or tuple(known) != (transport, devices, data_type):
        register_tensor_transport(name, devices, transport, data_type)
