"""A GraphEngine on a CUDA device: the one place where the engine's nouns become CUDA's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from cuda_utils.event import CudaEvent
from cuda_utils.memcpy import CudaMemcpy
from cuda_utils.pinned import CudaHostAllocator
from cuda_utils.stream import CudaStream, select_device
from rose.buckets import sequence_bucket, token_bucket
from rose.cuda_forward import CudaForward
from rose.cuda_side_stream import side_stream
from rose.graph_device import DeviceNouns
from rose.graph_engine import GraphEngine
from rose.staging import StagingLayout

if TYPE_CHECKING:
    from rose.attention.base import AttentionBackend
    from rose.batch import EngineInfo
    from rose.engine_options import EngineOptions
    from rose.limits import StepLimits
    from rose.models.registry import Model


def cuda_engine(
    model: Model,
    backends: Mapping[str, AttentionBackend],
    info: EngineInfo,
    limits: StepLimits,
    options: EngineOptions,
) -> GraphEngine:
    """Start an engine for `model` on its device.

    The thread that loads and the one that steps get the engine's stream as torch's current stream.

    Raises:
        torch.OutOfMemoryError, CudaError: the device has too little memory.
    """
    device = model.attention_spec.device
    torch.cuda.synchronize(device)  # the weights were loaded on another stream
    torch_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream = CudaStream(torch_stream.cuda_stream)

    def bind_thread() -> None:
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch_stream)
        select_device(device.index or 0)

    bind_thread()
    layout = StagingLayout(
        token_bucket(info.max_batch_tokens),
        sequence_bucket(info.max_batch_seqs),
        has_types=limits.type_vocab_size > 1,
    )
    nouns = DeviceNouns(
        memcpy=CudaMemcpy(stream),
        allocator=CudaHostAllocator(),
        new_event=lambda: CudaEvent(stream),
        synchronize=stream.synchronize,
        bind_thread=bind_thread,
        side=side_stream(device, layout.capacity),
    )
    return GraphEngine(CudaForward(model, backends, info, layout, stream), nouns, info, limits, options)
