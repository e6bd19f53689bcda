"""What PyTorch's tensors are when they are sent, published or copied: plain ones, of their values alone."""

from __future__ import annotations

import sys
from typing import Any

from ._errors import NotATensorError


def prepared(tensor: Any) -> Any:
    """An object as others of its framework read its memory.

    A tensor of PyTorch has its bits there: the values of a conjugate or a negative view are another memory's. It
    requires no gradient, and is of no subclass. Anything else is what it was.

    Raises ``NotATensorError`` for a tensor without such memory.
    """
    torch: Any = sys.modules.get("torch")
    base = getattr(torch, "Tensor", None)
    if base is None or not isinstance(tensor, base):
        return tensor
    if type(tensor) is base and _is_plain(torch, tensor):
        return tensor
    refused = _refused(tensor)
    if refused is not None:
        raise NotATensorError(f"the tensor {refused}")
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(base).resolve_conj().resolve_neg()


def _is_plain(torch: Any, tensor: Any) -> bool:
    return not (
        tensor.requires_grad
        or tensor.is_neg()
        or tensor.is_conj()
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_meta
    )


def _refused(tensor: Any) -> str | None:
    """Why a tensor of PyTorch's has no bytes of its own that can be copied, and the next step."""
    if is_lazy(tensor):
        return "has no shape yet: it is lazy; call its module once before"
    if hasattr(tensor, "full_tensor"):
        return "is distributed; give its full_tensor(), or its to_local() under a name of each rank"
    if tensor.is_nested or tensor.is_quantized:
        return "is nested or quantized; give the tensors that it consists of"
    if hasattr(type(tensor), "__tensor_flatten__"):
        return f"is a {type(tensor).__name__}, which consists of other tensors; give these, or a plain tensor of its values"
    if tensor.is_meta:
        return "is on the meta device and has no values; load the module's weights before"
    if str(tensor.layout) != "torch.strided":
        return f"has the layout {tensor.layout}; give its to_dense(), or the tensors that it consists of"
    return None


def is_lazy(tensor: Any) -> bool:
    return type(tensor).__name__ in ("UninitializedParameter", "UninitializedBuffer")
