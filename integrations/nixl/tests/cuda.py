"""Memory of cudaMalloc, by the driver alone."""

import ctypes

import numpy


class Cuda:
    def __init__(self, ordinal=0):
        self.driver = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name, *arguments):
        result = getattr(self.driver, name)(*arguments)
        assert result == 0, f"{name}: {result}"

    def allocate(self, count):
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(count))
        return address.value

    def _copy(self, direction, to, source, count):
        self._call(f"cuMemcpy{direction}Async_v2", *map(ctypes.c_uint64, (to, source, count)), None)
        self._call("cuStreamSynchronize", None)

    def write(self, address, array):
        self._copy("HtoD", address, array.ctypes.data, array.nbytes)

    def read(self, address, count):
        array = numpy.empty(count, dtype=numpy.uint8)
        self._copy("DtoH", array.ctypes.data, address, count)
        return array
