"""Memory of cudaMalloc and its copies, by the driver alone."""

import ctypes

import numpy


class Cuda:
    def __init__(self, ordinal=0):
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.context = context = ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name, *arguments):
        result = getattr(self.driver, name)(*arguments)
        assert result == 0, f"{name}: {result}"

    def allocate_on(self, ordinal, count):
        """Memory of another GPU, which this one reaches."""
        other = Cuda(ordinal)
        address = other.allocate(count)
        if other.context.value != self.context.value:
            self._call("cuCtxSetCurrent", self.context)
            # Without it, and where UCX or the library has it already, copies go all the same.
            self.driver.cuCtxEnablePeerAccess(other.context, 0)
        return address

    def allocate(self, count):
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(count))
        return address.value

    def _copy(self, direction, to, source, count):
        self._call(f"cuMemcpy{direction}Async_v2", *map(ctypes.c_uint64, (to, source, count)), None)
        self._call("cuStreamSynchronize", None)

    def copy(self, to, source, count):
        self._copy("DtoD", to, source, count)

    def write(self, address, array):
        self._copy("HtoD", address, array.ctypes.data, array.nbytes)

    def read(self, address, count):
        array = numpy.empty(count, dtype=numpy.uint8)
        self._copy("DtoH", array.ctypes.data, address, count)
        return array

    def allocate_mapped(self, ordinal, count, pieces):
        """Memory of the virtual memory functions: so many allocations, one behind the other."""
        each = count // pieces
        address = ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(count), ctypes.c_size_t(0), *_NOTHING)
        for piece in range(pieces):
            handle, properties = ctypes.c_uint64(), _Properties(1, 1, 1, ordinal)
            self._call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(each), ctypes.byref(properties), *_NOTHING[1:])
            place = ctypes.c_uint64(address.value + piece * each)
            self._call("cuMemMap", place, ctypes.c_size_t(each), ctypes.c_size_t(0), handle, *_NOTHING[1:])
            self._call("cuMemRelease", handle)
        access = (ctypes.c_int * 3)(1, ordinal, 3)
        self._call("cuMemSetAccess", address, ctypes.c_size_t(count), access, ctypes.c_size_t(1))
        return address.value


# An address and flags.
_NOTHING = ctypes.c_uint64(0), ctypes.c_uint64(0)


class _Properties(ctypes.Structure):
    """CUmemAllocationProp: pinned memory of a device, exported by descriptors."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("type", "handle_types", "location", "ordinal")),
        ("rest", ctypes.c_uint64 * 2),
    ]
