"""What is sent, published or copied: of PyTorch's tensors plain ones, of their values alone; and what array interfaces state."""

from __future__ import annotations

import functools
import operator
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ._dtypes import of_typestr, shape_of
from ._errors import ArgumentError, CopyWarning, DTypeError, Error, ExportError, LayoutError, NotATensorError

# The next step for tensors that cannot be published where they lie.
IN_PLACE = "allocate it in warpipe.torch.pool() or in expandable segments, without gaps"

_Value = TypeVar("_Value")


def items(argument: str, mapping: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    """The names and values of an argument that is a mapping of one at least."""
    found = list(mapping.items())
    if not found:
        raise ArgumentError(f"{argument} is an empty mapping; allowed is at least one named tensor")
    for name, _ in found:
        if not isinstance(name, str):
            raise TypeError(f"the name {name!r} is a {type(name).__qualname__}; names of tensors are texts")
    return found


def warn_of_copy(why: Error) -> None:
    """A tensor that was to be sent in place is copied."""
    warnings.warn(f"zero_copy: the tensor is copied: {why}", CopyWarning, stacklevel=2)


def prepared(tensor: Any) -> Any:
    """An object as others of its framework read its memory.

    A tensor of PyTorch has its bits there: the values of a conjugate or a negative view are another memory's. It
    requires no gradient, and is of no subclass. Anything else is what it was.

    Raises ``NotATensorError`` for a tensor without such memory, ``DTypeError`` for elements that DLPack has no name for.
    """
    torch: Any = sys.modules.get("torch")
    base = getattr(torch, "Tensor", None)
    if base is None or not isinstance(tensor, base):
        return tensor
    if type(tensor) is base and _is_plain(torch, tensor):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return _plain(tensor, base)
        except Error:
            raise
        except (RuntimeError, TypeError, AttributeError) as error:
            why = str(error).partition("\n")[0]
            said = f"the tensor is a {type(tensor).__name__}, which does not give its values out: {why}"
            raise NotATensorError(f"{said}; give a plain tensor of them") from error


def _plain(tensor: Any, base: Any) -> Any:
    refused = _refused(tensor)
    if refused is not None:
        raise NotATensorError(f"the tensor {refused}")
    if tensor.dtype in _unnamed():
        said = f"the tensor has elements of {tensor.dtype}, which DLPack has no name for"
        raise DTypeError(f"{said}; give its view(torch.uint8), and view what arrives as that type")
    # The zeros of forward differentiation have no memory until they are copied.
    plain = tensor.clone() if tensor._is_zerotensor() else tensor
    plain = plain.detach().as_subclass(base).resolve_conj().resolve_neg()
    if not _has_memory(plain):
        said = f"is a {type(tensor).__name__} of a trace or a transformation and has no values"
        raise NotATensorError(f"the tensor {said}; give it outside of vmap, grad, FakeTensorMode or torch.compile")
    return plain


def _is_plain(torch: Any, tensor: Any) -> bool:
    return not (
        tensor.requires_grad
        or tensor.is_neg()
        or tensor.is_conj()
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_meta
        or tensor.dtype in _unnamed()
        or not _has_memory(tensor)
    )


def _has_memory(tensor: Any) -> bool:
    """Whether its values lie somewhere. Tensors of a trace (``FakeTensorMode``, ``torch.compile``) and of ``vmap`` or
    ``grad`` look like others."""
    try:
        return bool(tensor.data_ptr()) or tensor.numel() == 0
    except RuntimeError:
        return False


@functools.cache
def _unnamed() -> frozenset[Any]:
    """PyTorch's types that DLPack does not give out, or gives out as whole bytes."""
    short = [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)]
    bits = ["bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"]
    return frozenset(getattr(sys.modules["torch"], name, None) for name in short + bits) - {None}


def _refused(tensor: Any) -> str | None:
    """Why a tensor of PyTorch's has no bytes of its own that can be copied, and the next step."""
    if is_lazy(tensor):
        return "has no shape yet: it is lazy; call its module once before"
    if hasattr(tensor, "full_tensor"):
        return "is distributed; give its full_tensor(), or its to_local() under a name of each rank"
    if hasattr(tensor, "get_mask"):
        return "is masked, and a mask does not travel; give its to_tensor() with a value for what is masked"
    if tensor.is_nested or tensor.is_quantized:
        return "is nested or quantized; give the tensors that it consists of"
    if hasattr(type(tensor), "__tensor_flatten__"):
        return f"is a {type(tensor).__name__}, which consists of other tensors; give these, or a plain tensor of its values"
    if tensor.is_meta:
        return "is on the meta device and has no values; load the module's weights before"
    if str(tensor.layout) != "torch.strided":
        return f"has the layout {tensor.layout}; give its to_dense(), or the tensors that it consists of"
    return None


def refusal(found: Any, error: BaseException | None = None) -> BaseException:
    """Why an object is not sent: it is no tensor, or its own ``__dlpack__`` raised this error. Interrupts are what they
    were."""
    if error is not None and not isinstance(error, Exception):
        return error
    if error is not None:
        said = f"its own __dlpack__ does not hand the {type(found).__qualname__} out: {type(error).__name__}: {error}"
        refused = ExportError(f"{said}; give a plain copy of it")
        refused.__cause__ = error
        return refused
    said = f"the class {found.__name__} is" if isinstance(found, type) else f"a {type(found).__name__} is"
    said = f"{said} no tensor" if isinstance(found, type) else f"{said} no tensor that can be sent"
    step = "give something with __dlpack__ or an array interface, for example numpy.asarray(it), or bytes"
    return NotATensorError(f"{said}; {step}")


def unpublished(name: str, error: BaseException, *found: Any) -> BaseException:
    """Why a tensor of this name is not published, after the error of a search in an object, or of a copy."""
    if isinstance(error, Exception) and found and not _is_tensor(found[0]):
        said = f"'{name}' is a {type(found[0]).__name__} and no tensor"
        return NotATensorError(f"{said}; leave it out, or make it an array")
    if not isinstance(error, Error):
        return error
    named = type(error)(f"'{name}': {error}")
    named.__cause__ = error
    return named


def _is_tensor(found: Any) -> bool:
    try:
        return not isinstance(found, type) and hasattr(found, "shape") and hasattr(found, "dtype")
    except Exception:
        # The shape of a tensor that is lazy is an error of its own.
        return True


def copied(refused: list[tuple[str, BaseException]], is_required: bool) -> list[str]:
    """What is said of tensors that are copied and were to be published where they lie. An error of the first one if none
    may be."""
    said = [f"'{name}' cannot be published where it lies: {error}" for name, error in refused]
    if said and is_required:
        error = refused[0][1]
        raise type(error)(f"{said[0]}; {IN_PLACE}, or give zero_copy=True to have it copied") from error
    return said


def described(owner: Any, interface: Any, rank_max: int) -> tuple[str, list[int], list[int] | None, int]:
    """What an array interface (version 2 or 3) states: the element type, the shape, the strides in bytes (None: row-major)
    and the address.

    Raises ``LayoutError``, ``DTypeError``.
    """

    def read(key: str, how: Callable[[Any], _Value]) -> _Value:
        if interface.get(key) is None:
            raise _no_layout(f"its array interface has no {key}")
        try:
            return how(interface[key])
        except (AttributeError, IndexError, OverflowError, TypeError, UnicodeError):
            raise _no_layout(f"its array interface gives {interface[key]} as {key}") from None

    if not isinstance(interface, dict):
        raise _no_layout(f"its array interface is a {type(interface).__name__}")
    if interface.get("mask") is not None:
        raise _no_layout("it is masked; fill it first")
    typestr = read("typestr", lambda text: text.encode().decode())
    shape = read("shape", lambda shape: shape_of(shape, rank_max))
    if not isinstance(read("data", lambda data: data), tuple):
        raise _no_layout("its array interface gives a buffer and no address; send numpy.asarray(it)")
    address = read("data", lambda data: _whole(data[0] or 0, 0, 1 << 64))
    strides = None
    if interface.get("strides") is not None:
        strides = read("strides", lambda strides: [_whole(stride, -1 << 63, 1 << 63) for stride in strides])
        if len(strides) != len(shape):
            raise _no_layout(f"{len(shape)} dimensions but {len(strides)} strides")
    if address == 0 and 0 not in shape:
        raise _no_layout("its data is null")
    name = getattr(getattr(owner, "dtype", None), "name", None)
    return of_typestr(typestr, name if isinstance(name, str) else None), shape, strides, address


def _no_layout(why: str) -> LayoutError:
    return LayoutError(f"not a usable tensor layout: {why}")


def _whole(number: Any, low: int, high: int) -> int:
    whole: int = operator.index(number)
    if not low <= whole < high:
        raise OverflowError
    return whole


def is_lazy(tensor: Any) -> bool:
    return type(tensor).__name__ in ("UninitializedParameter", "UninitializedBuffer")


def like(parameter: Any, values: Any, *, requires_grad: bool = False) -> Any:
    """A parameter of other values, of the same class with the same attributes (``weight_loader``)."""
    torch: Any = sys.modules["torch"]
    kind = parameter.cls_to_become if is_lazy(parameter) else type(parameter)
    if torch.nn.Parameter not in kind.__mro__:
        return torch.nn.Parameter(values, requires_grad=requires_grad)
    made = torch.Tensor._make_subclass(kind, values, requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made
