"""The metadata of a tensor: a JSON object, readable from every language, or the bytes of a buffer as they are."""

from __future__ import annotations

import json
from typing import Any

from ._errors import MetadataError


def dump(found: Any) -> bytes:
    """A dict as JSON, or the bytes of a buffer in C order.

    Raises ``MetadataError``.
    """
    if not isinstance(found, dict):
        try:
            return memoryview(found).tobytes()
        except Exception:
            raise MetadataError(f"the metadata is a {type(found).__name__}; give a dict, or bytes") from None
    try:
        # A lone surrogate has no UTF-8 encoding.
        return json.dumps(found, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except Exception as error:
        next_step = "use str, int, float, bool, None, list, dict"
        raise MetadataError(f"the metadata cannot be JSON: {error}; {next_step}") from None


def load(data: bytes) -> dict[str, Any]:
    """The dict of bytes that a sender states.

    Raises ``MetadataError``.
    """
    try:
        found = json.loads(data)
    except Exception:
        found = None
    if not isinstance(found, dict):
        raise MetadataError(f"the metadata is {len(data)} bytes that are no JSON object; read metadata_bytes")
    return found
