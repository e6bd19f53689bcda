"""Element types as Python, NumPy, PyTorch and JAX write them."""

from __future__ import annotations

import itertools
import operator
import re
import sys
from typing import Any

from ._errors import DTypeError, LayoutError
from ._warpipe import _DTYPES

DTYPES = [name for name, _ in _DTYPES]
"""The element types that can be sent."""

# What NumPy's one letter, or its name for a Python or a C type, means on Linux.
_ALIASES = {
    **{"?": "bool", "b": "int8", "B": "uint8", "h": "int16", "H": "uint16", "i": "int32", "I": "uint32"},
    **{"l": "int64", "L": "uint64", "q": "int64", "Q": "uint64", "e": "float16", "f": "float32", "d": "float64"},
    **{"F": "complex64", "D": "complex128", "int": "int64", "uint": "uint64", "float": "float64"},
    **{"complex": "complex128", "byte": "int8", "ubyte": "uint8", "short": "int16", "ushort": "uint16"},
    **{"intc": "int32", "uintc": "uint32", "half": "float16", "single": "float32", "double": "float64"},
    "cdouble": "complex128",
}
_OF_KIND = {"i": "int", "u": "uint", "f": "float", "c": "complex"}
_OF_PYTHON: dict[Any, str] = {bool: "bool", int: "int64", float: "float64"}
_TYPESTR = re.compile(r"([<>=|]?)([iufcb][0-9]+)", re.ASCII)


def name_of(found: Any) -> tuple[str, bool]:
    """An element type's name, and whether the object is an element type and nothing else. Anything else that has one, such
    as an array, is neither held nor assumed to keep it."""
    if isinstance(found, str):
        return _of_text(found.removeprefix("torch.")), True
    name = _name(found).removeprefix("torch.")
    if name not in DTYPES:
        raise _unknown(name)
    classes = [getattr(sys.modules.get(module), "dtype", None) for module in ("torch", "numpy")]
    return name, isinstance(found, (type, *(one for one in classes if isinstance(one, type))))


def _name(found: Any) -> str:
    if isinstance(found, type) and found in _OF_PYTHON:
        return _OF_PYTHON[found]
    # `np.dtype`, and JAX's scalar types, which are classes with a `dtype` of their own.
    holder = getattr(found, "dtype", found)
    name = getattr(holder, "name", None)
    if not isinstance(name, str):
        return found.__name__.rstrip("_") if isinstance(found, type) else str(found)
    if not getattr(holder, "isnative", True):
        said = f'is of the other byte order, and no device computes with that; ask for "{name}"'
        raise DTypeError(f"element type {found!r} {said}")
    return name


def _of_text(text: str) -> str:
    if text in DTYPES:
        return text
    typestr = _TYPESTR.fullmatch(text)
    if typestr:
        return of_typestr((typestr[1] or "=") + typestr[2])
    is_ordered = text[:1] in ("<", ">", "=", "|")
    name = _ALIASES.get(text[1:] if is_ordered else text)
    if name is None or (text[0] == ">" and name not in ("bool", "int8", "uint8")):
        raise _unknown(text)
    return name


def _unknown(name: str) -> DTypeError:
    return DTypeError(f'element type "{name}" is not one that can be sent; there are {", ".join(DTYPES)}')


def of_typestr(typestr: str, name: str | None = None) -> str:
    """The element type of a type string of the array interface; ``name`` is its own where the string cannot say it: NumPy
    describes a type of another package as a structure, or as a float of one byte.

    Raises ``DTypeError``.
    """
    parsed = re.fullmatch(r"(.)(.)([0-9]{1,4})", typestr, re.ASCII | re.DOTALL)
    if parsed is not None and (parsed[1] != ">" or parsed[3] == "1"):
        nbytes = int(parsed[3])
        known = "bool" if parsed[2] + parsed[3] == "b1" else f"{_OF_KIND.get(parsed[2])}{8 * nbytes}"
        if known in DTYPES:
            return known
        if name is not None and (name, nbytes) in _DTYPES:
            return name
    raise _refusal(typestr, name)


def _refusal(typestr: str, name: str | None) -> DTypeError:
    """Why a type string of the array interface, of elements with this name, is not sent."""
    if typestr[1:2] in tuple("OSUatMm"):
        why = "is of objects, texts or times, and has no numbers that a device knows; convert it with `.astype`"
    elif not re.fullmatch(r"..[0-9]{1,4}", typestr, re.ASCII | re.DOTALL):
        why = "is no type string of the array interface"
    elif typestr[0] == ">" and typestr[2:] != "1":
        why = "has the byte order of big-endian machines, and no device computes with that; convert it with `.astype`"
    else:
        return DTypeError(f'element type "{name or typestr}" is not one that can be sent; convert it with `.astype`')
    return DTypeError(f'element type "{typestr}" {why}')


# The letter of a buffer says the kind, and its size the width: ctypes writes its `long` as a letter of four bytes.
_KINDS = {**dict.fromkeys("bhilqn", "i"), **dict.fromkeys("BHILQNc", "u"), **dict.fromkeys("efd", "f")}
_KINDS |= {"Zf": "c", "Zd": "c", "?": "b"}


def of_format(text: str, nbytes: int) -> str:
    """The element type of a buffer's ``format`` (PEP 3118), of which each element takes so many bytes."""
    kind = _KINDS.get(text[1:] if text[:1] in tuple("<>!=@") else text)
    if kind is None:
        raise DTypeError(f'element type "{text}" is no number that a device knows; send an array of numbers')
    return of_typestr(f"{'>' if text[0] in '>!' else '<'}{kind}{nbytes}")


def shape_of(found: Any, rank_max: int) -> list[int]:
    """A shape: one length, or a sequence of them."""
    if isinstance(found, (str, bytes)):
        # They can be iterated, but are no lengths.
        raise LayoutError(f"not a usable tensor layout: a shape of {found!r}; give a tuple of lengths")
    try:
        lengths = [found] if isinstance(found, int) else list(itertools.islice(found, rank_max + 1))
    except TypeError:
        # An integer of another kind, NumPy's for example.
        lengths = [operator.index(found)]
    if len(lengths) > rank_max:
        raise LayoutError(f"not a usable tensor layout: more than {rank_max} dimensions")
    for length in lengths:
        if not 0 <= operator.index(length) < 1 << 63:
            raise LayoutError(f"not a usable tensor layout: a dimension of {length}; it must be 0 to 2^63 - 1")
    return [operator.index(length) for length in lengths]
