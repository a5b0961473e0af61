"""The CUDA nouns against a real device: what their CPU stand-ins promise."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from cuda_utils.errors import CudaError
from cuda_utils.event import CudaEvent
from cuda_utils.graph import GraphExec
from cuda_utils.memcpy import CudaMemcpy
from cuda_utils.pinned import CudaHostAllocator, PinnedPool
from cuda_utils.stream import CudaStream, select_device

pytestmark = pytest.mark.gpu

SLEEP_CYCLES = 200_000_000  # some 0.1 s


@pytest.fixture(scope="module")
def torch_stream() -> Iterator[torch.cuda.Stream]:
    select_device(0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield stream


@pytest.fixture
def stream(torch_stream: torch.cuda.Stream) -> CudaStream:
    return CudaStream(torch_stream.cuda_stream)


@pytest.fixture
def pool() -> Iterator[PinnedPool]:
    pool = PinnedPool(CudaHostAllocator(), 1 << 24)
    yield pool
    pool.close()


def test_an_event_follows_its_stream_and_can_be_recorded_again(stream: CudaStream) -> None:
    event = CudaEvent(stream)
    assert event.query()
    for _ in range(2):
        torch.cuda._sleep(SLEEP_CYCLES)
        event.record()
        assert not event.query()
        event.synchronize()
        assert event.query()
    event.close()
    event.close()


def test_copies_are_asynchronous_and_in_order(stream: CudaStream, pool: PinnedPool) -> None:
    copy, event = CudaMemcpy(stream), CudaEvent(stream)
    source, target = pool.acquire(1 << 20), pool.acquire(1 << 20)
    source.view(np.int32, (1 << 18,))[:] = np.arange(1 << 18)
    target.view(np.int32, (1 << 18,))[:] = -1
    device = torch.empty(1 << 18, dtype=torch.int32, device="cuda")
    device.add_(1)  # its kernel is loaded on first use, which takes 0.1 s on a fresh machine
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    started = time.perf_counter()
    copy.host_to_device(device.data_ptr(), source.ptr, source.nbytes)
    device.add_(1)
    copy.device_to_host(target.ptr, device.data_ptr(), target.nbytes)
    event.record()
    assert time.perf_counter() - started < 0.05
    assert (target.view(np.int32, (1 << 18,)) == -1).all()
    event.synchronize()
    assert (target.view(np.int32, (1 << 18,)) == np.arange(1, (1 << 18) + 1)).all()


def test_a_graph_is_uploaded_and_launched_by_its_handle(
    torch_stream: torch.cuda.Stream, stream: CudaStream
) -> None:
    counter = torch.zeros(4, device="cuda")
    counter.add_(1)
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    counter.add_(1)
    graph.capture_end()
    executable = GraphExec(graph.raw_cuda_graph_exec())
    executable.upload(stream)
    for _ in range(10):
        executable.launch(stream)
    stream.synchronize()
    assert counter.tolist() == [11.0] * 4


def test_a_bad_call_is_a_typed_error_that_does_not_stick(stream: CudaStream, pool: PinnedPool) -> None:
    slot = pool.acquire(64)
    with pytest.raises(CudaError, match="cuMemcpyHtoDAsync") as caught:
        CudaMemcpy(stream).host_to_device(0, slot.ptr, 64)
    assert not caught.value.sticky
    stream.synchronize()


def test_calls_are_quick_enough_for_the_loop(stream: CudaStream, pool: PinnedPool) -> None:
    copy, event = CudaMemcpy(stream), CudaEvent(stream)
    slot = pool.acquire(4096)
    device = torch.empty(4096, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(500):
        started = time.perf_counter()
        copy.host_to_device(device.data_ptr(), slot.ptr, 4096)
        event.record()
        event.query()
        times.append(time.perf_counter() - started)
        event.synchronize()
    assert sorted(times)[250] < 50e-6  # 1.4 + 2.3 + 3.9 µs on an H200 host
