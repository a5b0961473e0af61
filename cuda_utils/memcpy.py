"""Asynchronous copies between page-locked host memory and the device, by raw address."""

from __future__ import annotations

import ctypes
from typing import Protocol

from cuda.bindings import runtime

from cuda_utils.errors import CudaError
from cuda_utils.stream import CudaStream


class Memcpy(Protocol):
    """Copies bytes, in the order of the calls. Both ends must stay valid until the stream is past."""

    def host_to_device(self, destination: int, source: int, nbytes: int) -> None:
        """Queue a copy of `nbytes` from host address `source` to device address `destination`."""
        ...

    def device_to_host(self, destination: int, source: int, nbytes: int) -> None:
        """Queue a copy of `nbytes` from device address `source` to host address `destination`."""
        ...


class CudaMemcpy:
    """cudaMemcpyAsync on one stream: 3.9 µs a call, without torch's dispatch."""

    __slots__ = ("_copy", "_stream", "_to_device", "_to_host")

    def __init__(self, stream: CudaStream) -> None:
        self._copy = runtime.cudaMemcpyAsync
        self._stream = stream.handle
        self._to_device = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._to_host = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost

    def host_to_device(self, destination: int, source: int, nbytes: int) -> None:
        """See `Memcpy`. Raises: CudaError: the stream is broken or an address is wrong."""
        error = self._copy(destination, source, nbytes, self._to_device, self._stream)[0]
        if error:
            raise CudaError(error, "cudaMemcpyAsync to the device")

    def device_to_host(self, destination: int, source: int, nbytes: int) -> None:
        """See `Memcpy`. Raises: CudaError: the stream is broken or an address is wrong."""
        error = self._copy(destination, source, nbytes, self._to_host, self._stream)[0]
        if error:
            raise CudaError(error, "cudaMemcpyAsync to the host")


class PlainMemcpy:
    """The CPU's stand-in: host memory plays the device and the copy is done when the call returns."""

    def host_to_device(self, destination: int, source: int, nbytes: int) -> None:
        """See `Memcpy`."""
        ctypes.memmove(destination, source, nbytes)

    def device_to_host(self, destination: int, source: int, nbytes: int) -> None:
        """See `Memcpy`."""
        ctypes.memmove(destination, source, nbytes)
