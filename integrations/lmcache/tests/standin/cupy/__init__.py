"""As much of CuPy as LMCache makes tensors with, for memory that the CPU reaches."""

import contextlib
import ctypes
import types

import torch

uint8 = "uint8"


class UnownedMemory:
    def __init__(self, pointer, nbytes, owner):
        self.pointer, self.nbytes, self.owner = pointer, nbytes, owner


class MemoryPointer:
    def __init__(self, memory, offset):
        self.memory, self.offset = memory, offset


class ndarray:  # noqa: N801
    def __init__(self, nbytes, dtype, memptr):
        assert dtype == uint8 and memptr.offset + nbytes <= memptr.memory.nbytes
        array = (ctypes.c_uint8 * nbytes).from_address(memptr.memory.pointer + memptr.offset)
        self._tensor = torch.frombuffer(array, dtype=torch.uint8)

    def __dlpack__(self, **options):
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()


cuda = types.SimpleNamespace(
    Device=lambda index: contextlib.nullcontext(), UnownedMemory=UnownedMemory, MemoryPointer=MemoryPointer
)
