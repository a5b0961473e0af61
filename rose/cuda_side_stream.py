"""A CUDA stream beside the model's, with all that a rehearsal needs."""

from __future__ import annotations

import torch

from cuda_utils.event import CudaEvent
from cuda_utils.graph import GraphExec
from cuda_utils.memcpy import CudaMemcpy
from cuda_utils.stream import CudaStream
from rose.graph_device import SideStream

_NODES = 4  # kernels of some 2 µs


def side_stream(device: torch.device, capacity: int) -> SideStream:
    """A new one. capacity: int32 elements of the input buffer.

    Raises:
        torch.OutOfMemoryError, CudaError: the device has too little memory.
    """
    torch_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(torch_stream):
        scratch = torch.zeros(capacity, dtype=torch.int32, device=device)
        graph = _SmallGraph(torch_stream, scratch)
    stream = graph.stream
    return SideStream(CudaMemcpy(stream), graph, CudaEvent(stream), scratch.data_ptr(), stream.synchronize)


class _SmallGraph:
    """A `rose.graph_runner.Graph` of a few kernels on the current stream; keeps alive what these need."""

    nbytes = 0

    def __init__(self, torch_stream: torch.cuda.Stream, scratch: torch.Tensor) -> None:
        self._kept = torch_stream, scratch
        self._graph = torch.cuda.CUDAGraph()
        counter = scratch[:1]
        counter.add_(1)  # loads the kernel, which a capture cannot
        self._graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(_NODES):
            counter.add_(1)
        self._graph.capture_end()
        self.stream = CudaStream(torch_stream.cuda_stream)
        self._executable = GraphExec(self._graph.raw_cuda_graph_exec())
        self._executable.upload(self.stream)

    def launch(self) -> None:
        """See Graph.launch."""
        self._executable.launch(self.stream)

    def close(self) -> None:
        """See Graph.close. It lives as long as this object."""
