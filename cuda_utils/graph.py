"""An instantiated CUDA graph, launched through its raw handle."""

from __future__ import annotations

from cuda.bindings import driver

from cuda_utils.errors import CudaError, check
from cuda_utils.stream import CudaStream


class GraphExec:
    """A CUgraphExec that someone else (torch) instantiated and keeps alive.

    Launching the handle skips the prologue of torch's `replay`, which sets the random generators' state for
    graphs that draw random numbers; an embedding forward draws none.
    """

    __slots__ = ("_handle", "_launch")

    def __init__(self, pointer: int) -> None:
        self._handle = driver.CUgraphExec(pointer)
        self._launch = driver.cuGraphLaunch

    def upload(self, stream: CudaStream) -> None:
        """Send the graph to the device now, so that the first launch does not pay for it.

        Raises:
            CudaError: too little memory, or the stream is broken.
        """
        check(driver.cuGraphUpload(self._handle, stream.handle), "cuGraphUpload")

    def launch(self, stream: CudaStream) -> None:
        """Queue one run of the graph.

        Raises:
            CudaError: the stream is broken.
        """
        error = self._launch(self._handle, stream.handle)[0]
        if error:
            raise CudaError(error, "cuGraphLaunch")
