"""Asynchronous copies between page-locked host memory and the device, by raw address."""

from __future__ import annotations

from typing import Protocol

from cuda.bindings import driver

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
    """The driver's copies on one stream, without torch's dispatch or the runtime's look at the addresses."""

    __slots__ = ("_stream", "_to_device", "_to_host")

    def __init__(self, stream: CudaStream) -> None:
        self._stream = stream.handle
        self._to_device = driver.cuMemcpyHtoDAsync
        self._to_host = driver.cuMemcpyDtoHAsync

    def host_to_device(self, destination: int, source: int, nbytes: int) -> None:
        """See `Memcpy`. Raises: CudaError: the stream is broken or an address is wrong."""
        error = self._to_device(destination, source, nbytes, self._stream)[0]
        if error:
            raise CudaError(error, "cuMemcpyHtoDAsync")

    def device_to_host(self, destination: int, source: int, nbytes: int) -> None:
        """See `Memcpy`. Raises: CudaError: the stream is broken or an address is wrong."""
        error = self._to_host(destination, source, nbytes, self._stream)[0]
        if error:
            raise CudaError(error, "cuMemcpyDtoHAsync")
