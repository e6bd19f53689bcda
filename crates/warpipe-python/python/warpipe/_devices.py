"""What names a device, ``Device`` and everything that takes one; and other frameworks' streams."""

from __future__ import annotations

import operator
import re
import sys
from typing import Any

from ._errors import ArgumentError

_ALLOWED = 'a Device, "host", "cuda", "cuda:1", a GPU\'s number, its UUID, or a torch.device'
_NAME = re.compile(r"host|cuda:[0-9]{1,9}|GPU-.*", re.ASCII)
_SHORT = {"cpu": "host", "cuda": "cuda:0"}


def name_of(found: Any) -> str:
    """``"host"``, ``"cuda:"`` with a number, or a GPU's UUID.

    Raises ``ArgumentError``.
    """
    name = found if isinstance(found, str) else _of_number(found) or _of_torch(found)
    name = _SHORT.get(name or "", name)
    if name is None or _NAME.fullmatch(name) is None:
        told = f'"{found}"' if isinstance(found, str) else found
        raise ArgumentError(f"device is {told}; allowed is {_ALLOWED}")
    return name


def raw_stream_of(found: Any) -> Any:
    """The number of another framework's stream; None if the object is no stream."""
    protocol = getattr(found, "__cuda_stream__", None)
    if protocol is not None:
        _version, raw = protocol() if callable(protocol) else protocol
        return raw
    for name in ("cuda_stream", "ptr"):
        if hasattr(found, name):
            return getattr(found, name)
    # Numba's is a ctypes pointer: null is None.
    handle: Any = getattr(found, "handle", None)
    return (handle.value or 0) if hasattr(handle, "value") else None


def _of_number(found: Any) -> str | None:
    try:
        return None if isinstance(found, bool) else f"cuda:{operator.index(found)}"
    except TypeError:
        return None


def _of_torch(found: Any) -> str | None:
    """Of a ``torch.device``, or an object with its ``type`` and ``index``. A GPU without a number is PyTorch's current one."""
    kind, index = getattr(found, "type", None), getattr(found, "index", "none")
    if not isinstance(kind, str) or not (index is None or isinstance(index, int)):
        return None
    if kind != "cuda":
        return kind
    torch: Any = sys.modules.get("torch")
    if index is None and torch is not None:
        index = torch.cuda.current_device()
    return f"cuda:{index or 0}"
