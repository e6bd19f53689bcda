"""As much of NVIDIA's ``cuda.bindings.driver`` as LMCache calls for ``cuMemCreate``'s memory, over ``libcuda.so.1``.

The package itself asks the driver for each function by ``cuGetProcAddress``, which the fake driver has not.
"""

import ctypes
import enum
import types

_driver = ctypes.CDLL("libcuda.so.1")
_driver.cuInit(0)


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_INVALID_CONTEXT = 201

    @classmethod
    def _missing_(cls, value):
        made = int.__new__(cls, value)
        made._name_, made._value_ = f"CUDA_ERROR_{value}", value
        return made


class CUmemAllocationHandleType(enum.IntEnum):
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1
    CU_MEM_HANDLE_TYPE_FABRIC = 8


class CUmemLocationType(enum.IntEnum):
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAccess_flags(enum.IntEnum):  # noqa: N801
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class CUmemAccessDesc:
    def __init__(self):
        self.location, self.flags = types.SimpleNamespace(type=1, id=0), 0


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AccessDesc(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


CUdeviceptr = int
_u64, _int, _size = ctypes.c_uint64, ctypes.c_int, ctypes.c_size_t


def _call(name, *arguments):
    return CUresult(getattr(_driver, name)(*arguments))


def _out(kind, name, *arguments):
    value = kind()
    return _call(name, ctypes.byref(value), *arguments), value.value or 0


def cuCtxGetCurrent():
    return _out(ctypes.c_void_p, "cuCtxGetCurrent")


def cuCtxSetCurrent(context):
    return (_call("cuCtxSetCurrent", ctypes.c_void_p(context)),)


def cuDeviceGet(ordinal):
    return _out(_int, "cuDeviceGet", ordinal or 0)


def cuDevicePrimaryCtxRetain(device):
    return _out(ctypes.c_void_p, "cuDevicePrimaryCtxRetain", device)


def cuDevicePrimaryCtxRelease(device):
    return (_call("cuDevicePrimaryCtxRelease_v2", device),)


def cuMemRetainAllocationHandle(pointer):
    return _out(_u64, "cuMemRetainAllocationHandle", ctypes.c_void_p(pointer))


def cuMemGetAllocationPropertiesFromHandle(handle):
    # The fake driver has no such call. What warpipe allocates has a descriptor.
    return CUresult.CUDA_SUCCESS, types.SimpleNamespace(requestedHandleTypes=1)


def cuMemExportToShareableHandle(handle, kind, flags):
    return _out(_int, "cuMemExportToShareableHandle", _u64(handle), kind, _u64(flags))


def cuMemImportFromShareableHandle(fd, kind):
    return _out(_u64, "cuMemImportFromShareableHandle", ctypes.c_void_p(fd), kind)


def cuMemGetAddressRange(pointer):
    base, size = _u64(), _size()
    found = _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), _u64(pointer))
    return found, base.value, size.value


def cuMemAddressReserve(size, alignment, address, flags):
    return _out(_u64, "cuMemAddressReserve", _size(size), _size(alignment), _u64(address), _u64(flags))


def cuMemAddressFree(pointer, size):
    return (_call("cuMemAddressFree", _u64(pointer), _size(size)),)


def cuMemMap(pointer, size, offset, handle, flags):
    return (_call("cuMemMap", _u64(pointer), _size(size), _size(offset), _u64(handle), _u64(flags)),)


def cuMemUnmap(pointer, size):
    return (_call("cuMemUnmap", _u64(pointer), _size(size)),)


def cuMemRelease(handle):
    return (_call("cuMemRelease", _u64(handle)),)


def cuMemSetAccess(pointer, size, descriptions, count):
    array = (_AccessDesc * count)(*((_Location(int(d.location.type), d.location.id), int(d.flags)) for d in descriptions))
    return (_call("cuMemSetAccess", _u64(pointer), _size(size), array, _size(count)),)
